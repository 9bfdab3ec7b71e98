//! `polyreme bench collective`: how long ranks take to do something together, by size.
//!
//! Timed as `allreduce_mpi.c` and `ddp.py` time their peers: three calls that do not count, a barrier, the mean of twenty;
//! of the ranks, the slowest.

use std::fmt;
use std::time::Instant;

use polyreme_collective::{Comm, Cuts, Reduce};
use polyreme_net::Report as Lost;
use serde::Serialize;

const WARM_UP: usize = 3;
const TIMED: usize = 20;

/// The sizes that every comparison uses.
pub const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// The largest size that can be asked for.
pub const SIZE_MAX: usize = 1 << 34;

/// What ranks do together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Op {
    /// Every rank gets the sum of all.
    #[value(alias = "all-reduce")]
    Allreduce,
    /// Each rank gets its part of the sum of all.
    ReduceScatter,
    /// Every rank gets the parts of all.
    #[value(alias = "allgather")]
    AllGather,
    /// Every rank gets what rank 0 has.
    Broadcast,
    /// Every rank gets a part from each.
    #[value(alias = "alltoall")]
    AllToAll,
    /// Nobody goes on before all are there.
    Barrier,
}

impl Op {
    /// Its name, as flags have it.
    pub fn name(self) -> &'static str {
        match self {
            Op::Allreduce => "allreduce",
            Op::ReduceScatter => "reduce-scatter",
            Op::AllGather => "all-gather",
            Op::Broadcast => "broadcast",
            Op::AllToAll => "all-to-all",
            Op::Barrier => "barrier",
        }
    }
}

/// What one size came to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
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
}

/// The head of the table for people.
pub const HEADER: &str = "op              transport  ranks        bytes            us        GB/s";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Report { op, transport, ranks, bytes, us } = self;
        let speed = *bytes as f64 / us / 1e3;
        write!(f, "{op:<14}  {transport:<9} {ranks:>6} {bytes:>12} {us:>13.1} {speed:>11.2}")
    }
}

/// One rank's part of a measurement; every rank calls it with the same arguments, and gets the slowest one's
/// microseconds.
pub fn measure(comm: &mut Comm, op: Op, bytes: usize) -> Result<f64, Lost> {
    let n = bytes / 4;
    let size = comm.size();
    // Gradients lie in such memory too.
    let mut data = comm.buffer::<f32>(n)?;
    data.fill(1.0);
    let mut other = comm.buffer::<f32>(if op == Op::AllToAll { n } else { 0 })?;
    let cuts: Cuts = (0..=size).map(|r| n * r / size).collect();
    // All-to-all: everybody gets as much from each as it sends to it, so parts are equal and the rest stays.
    let part = n / size;
    let parts: Cuts = (0..=size).map(|r| part * r).collect();
    let mut call = |comm: &mut Comm| match op {
        Op::Allreduce => comm.all_reduce(&mut data, Reduce::Sum),
        Op::ReduceScatter => comm.reduce_scatter(&mut data, &cuts, Reduce::Sum),
        Op::AllGather => comm.all_gather(&mut data, &cuts),
        Op::Broadcast => comm.broadcast(&mut data, 0),
        Op::AllToAll => comm.all_to_all(&data[..part * size], &parts, &mut other[..part * size], &parts),
        Op::Barrier => comm.barrier(),
    };
    for _ in 0..WARM_UP {
        call(comm)?;
    }
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..TIMED {
        call(comm)?;
    }
    let mut us = [start.elapsed().as_secs_f64() * 1e6 / TIMED as f64];
    comm.all_reduce(&mut us, Reduce::Max)?;
    Ok(us[0])
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
        for op in Op::value_variants() {
            for (ranks, bytes) in [(1, 4096), (2, 0), (2, 4), (3, 4096)] {
                let times: Vec<_> = std::thread::scope(|s| {
                    let rank = |mut comm: Comm| s.spawn(move || measure(&mut comm, *op, bytes).unwrap());
                    let ranks: Vec<_> = Comm::local(ranks).into_iter().map(rank).collect();
                    ranks.into_iter().map(|r| r.join().unwrap()).collect()
                });
                assert!(times.iter().all(|t| *t > 0.0 && *t == times[0]), "{op:?}: {times:?}");
            }
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
