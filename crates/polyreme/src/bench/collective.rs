//! `polyreme bench collective`: how long collectives take, by size.
//!
//! Timed as `allreduce_mpi.c` and `ddp.py` time their peers: three warm-up calls, a barrier, the mean of twenty calls
//! on the slowest rank. Results are checked before and after: a wrong sum is not a measurement.

use std::fmt;
use std::time::Instant;

use polyreme_collective::{Buffer, Comm, Cuts, Reduce};
use polyreme_net::Report as Lost;
use serde::Serialize;

const WARM_UP: usize = 3;
const TIMED: usize = 20;

/// The sizes that every comparison uses.
pub const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// The largest size that can be asked for.
pub const SIZE_MAX: usize = 1 << 34;

/// A collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum BenchOp {
    /// Every rank gets the sum of all.
    #[value(alias = "all-reduce")]
    Allreduce,
    /// Each rank gets its shard of the sum of all.
    ReduceScatter,
    /// Every rank gets the shards of all.
    #[value(alias = "allgather")]
    AllGather,
    /// Every rank gets rank 0's data.
    Broadcast,
    /// Every rank gets a shard from each.
    #[value(alias = "alltoall")]
    AllToAll,
    /// No rank goes on before all have entered.
    Barrier,
}

impl BenchOp {
    /// Its name in flags.
    pub fn name(self) -> &'static str {
        match self {
            BenchOp::Allreduce => "allreduce",
            BenchOp::ReduceScatter => "reduce-scatter",
            BenchOp::AllGather => "all-gather",
            BenchOp::Broadcast => "broadcast",
            BenchOp::AllToAll => "all-to-all",
            BenchOp::Barrier => "barrier",
        }
    }
}

/// The result for one size.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CollectiveReport {
    /// The operation.
    pub op: &'static str,
    /// What carried the data.
    pub transport: String,
    /// How many ranks.
    pub ranks: usize,
    /// Bytes of each rank's buffer, in f32.
    pub bytes: usize,
    /// The mean time of a call on the slowest rank.
    pub us: f64,
    /// Elements that were wrong, on all ranks together.
    pub wrong: u64,
}

/// The header of the table for people.
pub const HEADER: &str = "op              transport  ranks        bytes            us        GB/s";

impl fmt::Display for CollectiveReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let CollectiveReport { op, transport, ranks, bytes, us, .. } = self;
        let speed = *bytes as f64 / us / 1e3;
        write!(f, "{op:<14}  {transport:<9} {ranks:>6} {bytes:>12} {us:>13.1} {speed:>11.2}")
    }
}

/// What one rank measured: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measured {
    /// The mean time of a call on the slowest rank.
    pub us: f64,
    /// Elements that were wrong, on all ranks together.
    pub wrong: u64,
}

/// One rank's part of a measurement; every rank calls it with the same arguments.
pub fn measure(comm: &mut Comm, op: BenchOp, bytes: usize) -> Result<Measured, Lost> {
    let mut call = BenchCall::new(comm, op, bytes / size_of::<f32>())?;
    let mut wrong = call.wrong(comm)?;
    call.data.fill(1.0);
    for _ in 0..WARM_UP {
        call.run(comm)?;
    }
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..TIMED {
        call.run(comm)?;
    }
    let mut us = [start.elapsed().as_secs_f64() * 1e6 / TIMED as f64];
    comm.all_reduce(&mut us, Reduce::Max)?;
    wrong += call.wrong(comm)?;
    let mut all = [wrong as f64];
    comm.all_reduce(&mut all, Reduce::Sum)?;
    Ok(Measured { us: us[0], wrong: all[0] as u64 })
}

/// An operation and the memory that it works on.
struct BenchCall {
    op: BenchOp,
    data: Buffer<f32>,
    other: Buffer<f32>,
    cuts: Cuts,
    parts: Cuts,
}

impl BenchCall {
    fn new(comm: &mut Comm, op: BenchOp, n: usize) -> Result<BenchCall, Lost> {
        let size = comm.size();
        // All-to-all: every rank gets as much from each as it sends to it, so shards are equal and the remainder stays.
        let part = n / size;
        Ok(BenchCall {
            op,
            // Gradients are in such memory too.
            data: comm.buffer(n)?,
            other: comm.buffer(if op == BenchOp::AllToAll { n } else { 0 })?,
            cuts: (0..=size).map(|r| n * r / size).collect(),
            parts: (0..=size).map(|r| part * r).collect(),
        })
    }

    fn run(&mut self, comm: &mut Comm) -> Result<(), Lost> {
        let BenchCall { op, data, other, cuts, parts } = self;
        match op {
            BenchOp::Allreduce => comm.all_reduce(data, Reduce::Sum),
            BenchOp::ReduceScatter => comm.reduce_scatter(data, cuts, Reduce::Sum),
            BenchOp::AllGather => comm.all_gather(data, cuts),
            BenchOp::Broadcast => comm.broadcast(data, 0),
            BenchOp::AllToAll => {
                let end = parts[comm.size()];
                comm.all_to_all(&data[..end], parts, &mut other[..end], parts)
            }
            BenchOp::Barrier => comm.barrier(),
        }
    }

    /// Calls it once with numbers whose result every rank can compute; returns how many elements are wrong here.
    fn wrong(&mut self, comm: &mut Comm) -> Result<u64, Lost> {
        let rank = comm.rank();
        self.data.iter_mut().enumerate().for_each(|(i, x)| *x = given(rank, i));
        self.run(comm)?;
        Ok(self.off(comm.rank(), comm.size()))
    }

    /// How many elements of this rank's result are wrong.
    fn off(&self, rank: usize, size: usize) -> u64 {
        let (data, cuts, parts) = (&self.data[..], &self.cuts, &self.parts);
        let ranks: f32 = (0..size).map(|r| given(r, 0)).sum();
        let sum = |i: usize| size as f32 * given(0, i) + ranks;
        let count = |found: &[f32], first: usize, want: &dyn Fn(usize) -> f32| {
            found.iter().zip(first..).filter(|(x, i)| **x != want(*i)).count() as u64
        };
        match self.op {
            BenchOp::Allreduce => count(data, 0, &sum),
            BenchOp::ReduceScatter => count(&data[cuts[rank]..cuts[rank + 1]], cuts[rank], &sum),
            BenchOp::AllGather => {
                (0..size).map(|r| count(&data[cuts[r]..cuts[r + 1]], cuts[r], &|i| given(r, i))).sum()
            }
            BenchOp::Broadcast => count(data, 0, &|i| given(0, i)),
            BenchOp::AllToAll => {
                let from = |r: usize| &self.other[parts[r]..parts[r + 1]];
                (0..size).map(|r| count(from(r), parts[rank], &|i| given(r, i))).sum()
            }
            BenchOp::Barrier => 0,
        }
    }
}

/// Element `i` of a rank before a call: different from its neighbours and from other ranks, and small enough for exact
/// sums.
fn given(rank: usize, i: usize) -> f32 {
    (rank % 64 + i % 61) as f32
}

/// Reads `4096`, `64K`, `16M` or `1G`.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.trim().char_indices().last() {
        Some((at, 'k' | 'K')) => (&text.trim()[..at], 10),
        Some((at, 'm' | 'M')) => (&text.trim()[..at], 20),
        Some((at, 'g' | 'G')) => (&text.trim()[..at], 30),
        _ => (text.trim(), 0),
    };
    let bytes = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(1 << unit));
    bytes
        .filter(|n| *n <= SIZE_MAX)
        .ok_or_else(|| format!("a size such as 4096, 64K or 16M, up to {}G", SIZE_MAX >> 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_timed_on_any_number_of_ranks() {
        use clap::ValueEnum;
        for op in BenchOp::value_variants() {
            for (ranks, bytes) in [(1, 4096), (2, 0), (2, 4), (3, 4096)] {
                let found: Vec<_> = std::thread::scope(|s| {
                    let rank = |mut comm: Comm| s.spawn(move || measure(&mut comm, *op, bytes).unwrap());
                    let ranks: Vec<_> = Comm::local(ranks).into_iter().map(rank).collect();
                    ranks.into_iter().map(|r| r.join().unwrap()).collect()
                });
                assert!(found.iter().all(|f| f.us > 0.0 && *f == found[0]), "{op:?}: {found:?}");
                assert_eq!(found[0].wrong, 0, "{op:?} on {ranks} ranks of {bytes} bytes");
            }
        }
    }

    #[test]
    fn one_wrong_element_is_counted() {
        for op in [
            BenchOp::Allreduce,
            BenchOp::ReduceScatter,
            BenchOp::AllGather,
            BenchOp::Broadcast,
            BenchOp::AllToAll,
        ] {
            let mut comm = Comm::alone();
            let mut call = BenchCall::new(&mut comm, op, 64).unwrap();
            assert_eq!(call.wrong(&mut comm).unwrap(), 0);
            let found = if op == BenchOp::AllToAll { &mut call.other } else { &mut call.data };
            found[62] += 1.0;
            assert_eq!(call.off(0, 1), 1, "{op:?}");
        }
    }

    #[test]
    fn sizes_are_read() {
        for (text, want) in [("0", 0), ("4096", 4096), ("64K", 65536), ("16m", 16 << 20), ("1G", 1 << 30)] {
            assert_eq!(parse_size(text).unwrap(), want);
        }
        for bad in ["", "x", "K", "-1", "99999999999999999999", "99G", "1.5M"] {
            assert!(parse_size(bad).unwrap_err().contains("64K"), "{bad}");
        }
    }
}
