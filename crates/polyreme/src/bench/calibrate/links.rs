//! What exchanges cost between ranks of this machine.

use std::error::Error;

use polyreme_collective::links::{self, Costs};
use polyreme_collective::{Comm, Linked};
use polyreme_kernels::Isa;
use polyreme_net::loopback;
use polyreme_sim::BetweenSpec;
use polyreme_sim::calibration::LinkTimes;

use super::codecs;
use crate::bench::collective::{self, BenchOp};
use crate::bench::on_ranks;

/// Bytes of all-reduces.
const SIZES: [usize; 7] = [64, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20, 32 << 20];
/// Those of a first impression.
const QUICK: [usize; 3] = [64, 16 << 10, 1 << 20];

type Measuring<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// How often each is measured: the least counts, of a thread that was never put to sleep meanwhile.
const TAKES: usize = 3;

pub(super) fn measure(quick: bool, unevenness: f64, isa: Isa) -> Measuring<LinkTimes> {
    let sizes = if quick { &QUICK[..] } else { &SIZES[..] };
    let (meet_us, shared) = times(Comm::local(2), sizes)?;
    let (_, over_loopback) = times(connected()?, sizes)?;
    let Costs { latency_us, message_us, bytes_per_us, reduce_bytes_per_us } = costs()?;
    // Both ends of the loopback interface are this machine's cores.
    let loopback = BetweenSpec { latency_us, message_us, bytes_per_us, reduce_bytes_per_us, core_share: 1.0 };
    Ok(LinkTimes { meet_us, shared, loopback, over_loopback, unevenness, codecs: codecs::measure(isa) })
}

/// Two ranks over the loopback interface. Making a group is collective.
fn connected() -> Measuring<Vec<Comm>> {
    let ends = loopback::links(2)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || Comm::tcp(end))).collect();
        let mut comms = Vec::new();
        for rank in ranks {
            comms.push(rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(comms)
    })
}

/// The time of half a barrier, and of all-reduces by size.
fn times(comms: Vec<Comm>, sizes: &[usize]) -> Measuring<(f64, Vec<(f64, f64)>)> {
    let of_rank = |mut comm: Comm| -> Measuring<(f64, Vec<(f64, f64)>)> {
        let mut least = |op: BenchOp, bytes: usize| -> Measuring<f64> {
            let mut us = f64::INFINITY;
            for _ in 0..TAKES {
                us = us.min(collective::measure(&mut comm, op, bytes)?.us);
            }
            Ok(us)
        };
        let meet = least(BenchOp::Barrier, 0)? / 2.0;
        let mut found = Vec::new();
        for &bytes in sizes {
            found.push((bytes as f64, least(BenchOp::Allreduce, bytes)?.max(0.01)));
        }
        comm.finish()?;
        Ok((meet, found))
    };
    on_ranks(comms, of_rank)?.pop().ok_or_else(|| "there are no ranks".into())
}

/// What production measures when ranks connect.
fn costs() -> Measuring<Costs> {
    let ends = loopback::links(2)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            ends.into_iter().map(|end| scope.spawn(move || links::measure(&mut Linked::over(end)))).collect();
        let mut agreed = None;
        for rank in ranks {
            agreed = Some(rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        agreed.ok_or_else(|| "there are no ranks".into())
    })
}
