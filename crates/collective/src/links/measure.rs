//! Measures what messages, bytes and reductions cost between the ranks of a group.

use std::hint::black_box;
use std::time::Instant;

use polyreme_net::frame::{FrameOp, Tag, Terms};
use polyreme_net::{Move, Moves, Report};

use super::choose::{Algorithm, Costs};
use super::{Linked, combine};
use crate::element::{DType, Reduce};

/// Small messages in flight at once, to separate the cost per message from the latency.
const SMALL: usize = 16;
const SMALL_BYTES: usize = 64;

/// Long enough to fill a fast link, and a tenth of a second on one of 100 Mbit/s.
const LONG_BYTES: usize = 1 << 20;

/// Measures, and agrees with all ranks on the result: the slowest pair decides. All ranks call it at the same time.
/// Takes some milliseconds on a fast network. The costs are set.
pub fn measure(linked: &mut Linked) -> Result<Costs, Report> {
    if linked.size() == 1 {
        return Ok(*linked.costs());
    }
    linked.barrier()?;
    let one = around(linked, 1, SMALL_BYTES, 20)?;
    let many = around(linked, SMALL, SMALL_BYTES, 10)?;
    let long = around(linked, 1, LONG_BYTES, 4)?;
    let message_us = ((many - one) / (SMALL - 1) as f64).max(0.1);
    let latency_us = (one - message_us).max(0.1);
    let bytes_per_us = LONG_BYTES as f64 / (long - one).max(1.0);

    let (mut into, arrived) = (vec![0; LONG_BYTES / 4], vec![0; LONG_BYTES / 4]);
    let mut reducing = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        combine::combine(DType::F32, Reduce::Sum, black_box(&mut into), black_box(&arrived), false);
        reducing = reducing.min(start.elapsed().as_secs_f64() * 1e6);
    }
    let reduce_bytes_per_us = into.len() as f64 / reducing.max(0.1);

    // As costs per unit, so that for all of them larger is worse.
    let mut worst = [latency_us, message_us, 1.0 / bytes_per_us, 1.0 / reduce_bytes_per_us];
    linked.set_algorithm(Some(Algorithm::Tree));
    let agreed = linked.all_reduce(&mut worst, Reduce::Max);
    linked.set_algorithm(None);
    agreed?;
    let costs = Costs {
        latency_us: worst[0],
        message_us: worst[1],
        bytes_per_us: 1.0 / worst[2],
        reduce_bytes_per_us: 1.0 / worst[3],
    };
    linked.set_costs(costs);
    Ok(costs)
}

/// Every rank sends `messages` messages to the next rank and receives as many from the previous one; returns the
/// shortest time.
fn around(linked: &mut Linked, messages: usize, bytes: usize, times: usize) -> Result<f64, Report> {
    let (rank, n) = (linked.rank(), linked.size());
    let mut list = Vec::new();
    list.extend((0..messages).map(|_| Move::send_from((rank + 1) % n, 0..bytes)));
    list.extend((0..messages).map(|_| Move::recv((rank + n - 1) % n, 0..bytes)));
    let (moves, from, mut into) = (Moves::new(list), vec![0; bytes], vec![0; bytes]);
    let terms = Terms::default();
    let tag = Tag { step: 0, op: FrameOp::Send, dtype: DType::U8 as u8, count: bytes as u64, terms };
    let mut least = f64::INFINITY;
    for _ in 0..times {
        linked.barrier()?;
        let start = Instant::now();
        linked.links().run(&tag, &moves, &from, &mut into, &mut |_, _, _| {})?;
        least = least.min(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::super::tests::on_all;
    use super::*;

    #[test]
    fn all_ranks_agree_on_costs() {
        for ranks in [1, 2, 5] {
            let costs = on_all(ranks, |linked| measure(linked).unwrap());
            assert!(costs.iter().all(|c| *c == costs[0]), "{costs:?}");
            let Costs { latency_us, message_us, bytes_per_us, reduce_bytes_per_us } = costs[0];
            let sensible = |x: f64, low: f64, high: f64| (low..high).contains(&x);
            assert!(sensible(latency_us, 0.05, 1e7) && sensible(message_us, 0.05, 1e7), "{costs:?}");
            assert!(
                sensible(bytes_per_us, 1e-2, 1e6) && sensible(reduce_bytes_per_us, 1.0, 1e7),
                "{costs:?}"
            );
        }
    }
}
