//! Which algorithm an operation uses: a pure function of its size, the number of ranks and measured costs.
//!
//! All ranks must choose alike, so the costs are those that they agreed on ([`super::measure()`]). An estimate adds up
//! rounds, messages, bytes and reductions one after the other; overlap within long messages helps all algorithms alike,
//! and only their ranking matters here.

/// The operations, as messages name them.
pub use polyreme_net::frame::FrameOp;
use polyreme_net::frame::segment_bytes;

use super::plan::n_blocks;

/// The algorithm of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Algorithm {
    /// Every rank with every other: [`super::direct`].
    Direct,
    /// Partners exchange everything: [`super::halving`].
    Doubling,
    /// Recursive halving and doubling: [`super::halving`].
    Halving,
    /// Around the ring, or along the chain: [`super::ring`].
    Ring,
    /// The binomial tree: [`super::tree`].
    Tree,
}

/// Communication costs between the ranks of a group.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Costs {
    /// The latency of a small message, without [`Costs::message_us`].
    pub latency_us: f64,
    /// How long a rank is busy with sending one message and receiving one.
    pub message_us: f64,
    /// The bandwidth while all ranks send and receive.
    pub bytes_per_us: f64,
    /// The speed of reductions.
    pub reduce_bytes_per_us: f64,
}

impl Default for Costs {
    /// Typical costs of a loopback interface.
    fn default() -> Costs {
        Costs { latency_us: 20.0, message_us: 6.0, bytes_per_us: 2000.0, reduce_bytes_per_us: 8000.0 }
    }
}

/// A choice and its reasons.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The best one.
    pub algorithm: Algorithm,
    /// Its estimated time.
    pub us: f64,
    /// The estimated time of each candidate, to explain the choice.
    pub candidates: Vec<(Algorithm, f64)>,
}

/// Chunks up to this size fit into the receiver's socket buffers, even if all ranks send at once.
const DIRECT_CHUNK_BYTES_MAX: usize = 64 * 1024;

/// About what a core sends and receives at the same time. A link that is faster than that is never idle.
const CORE_BYTES_PER_US: f64 = 2000.0;

/// The algorithms that an operation has.
pub fn candidates(op: FrameOp) -> &'static [Algorithm] {
    use Algorithm::*;
    match op {
        FrameOp::AllReduce => &[Direct, Doubling, Halving, Ring, Tree],
        FrameOp::ReduceScatter | FrameOp::AllGather => &[Direct, Halving, Ring],
        FrameOp::Broadcast | FrameOp::Reduce => &[Tree, Ring],
        FrameOp::Barrier => &[Doubling],
        FrameOp::Gather
        | FrameOp::Scatter
        | FrameOp::AllToAll
        | FrameOp::Send
        | FrameOp::Receipt
        | FrameOp::Farewell => &[Direct],
    }
}

/// The cheapest algorithm for an operation on `bytes` bytes (of the whole data) between `ranks` ranks.
pub fn choose(op: FrameOp, bytes: usize, ranks: usize, costs: &Costs) -> Choice {
    let all: Vec<_> = candidates(op)
        .iter()
        .filter(|a| fits(op, **a, bytes, ranks))
        .map(|a| (*a, estimate(op, *a, bytes, ranks).us(costs)))
        .collect();
    let (algorithm, us) =
        all.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).expect("every operation has an algorithm");
    Choice { algorithm, us, candidates: all }
}

/// The same choice without its reasons: it allocates nothing.
pub(super) fn quickly(op: FrameOp, bytes: usize, ranks: usize, costs: &Costs) -> Algorithm {
    let fitting = candidates(op).iter().copied().filter(|a| fits(op, *a, bytes, ranks));
    let us = |a: &Algorithm| estimate(op, *a, bytes, ranks).us(costs);
    fitting.min_by(|a, b| us(a).total_cmp(&us(b))).expect("every operation has an algorithm")
}

fn fits(op: FrameOp, algorithm: Algorithm, bytes: usize, ranks: usize) -> bool {
    let has_others = matches!(op, FrameOp::AllReduce | FrameOp::ReduceScatter | FrameOp::AllGather);
    algorithm != Algorithm::Direct || !has_others || bytes / ranks <= DIRECT_CHUNK_BYTES_MAX
}

/// What happens one after the other between the start and the end of an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Effort {
    /// Messages that wait for each other, each for the latency of a link.
    pub rounds: f64,
    /// Messages that a rank sends.
    pub messages: f64,
    /// Bytes that a rank sends.
    pub sent_bytes: f64,
    /// Bytes that a rank reduces.
    pub reduced_bytes: f64,
    /// Bytes that a link could have carried while it was idle.
    pub idle_bytes: f64,
}

impl Effort {
    /// The time that it takes with these costs.
    pub fn us(&self, costs: &Costs) -> f64 {
        self.rounds * costs.latency_us
            + self.messages * costs.message_us
            + self.sent_bytes / costs.bytes_per_us
            + self.idle_bytes * (1.0 / costs.bytes_per_us - 1.0 / CORE_BYTES_PER_US).max(0.0)
            + self.reduced_bytes / costs.reduce_bytes_per_us
    }
}

/// The costs that the heads of the algorithms' files state, as formulas.
pub fn estimate(op: FrameOp, algorithm: Algorithm, bytes: usize, ranks: usize) -> Effort {
    let (n, b) = (ranks as f64, bytes as f64);
    let (low, high) = (f64::from(ranks.ilog2()), f64::from(ranks.next_power_of_two().ilog2()));
    // Bytes of all chunks but one; of all core ranks' chunks but one; and one if ranks are folded in.
    let p = (1u64 << ranks.ilog2()) as f64;
    let (chunks, core, fold) = (b * (n - 1.0) / n, b * (p - 1.0) / p, if p < n { 1.0 } else { 0.0 });
    // With a range per rank, the core ranks that stand for two have more, and the first blocks are all theirs.
    let extra = ranks - (1 << ranks.ilog2());
    let ranges = b / n * (0..ranks.ilog2()).map(|k| (1 << k) + extra.min(1 << k)).sum::<usize>() as f64;
    // A chain is as long as its ranks, but only its first segment has to go all the way before the last rank begins.
    let chain = b + (n - 2.0).max(0.0) * segment_bytes(bytes).min(bytes) as f64;
    let blocks = n_blocks(bytes) as f64;
    let (rounds, messages, sent_bytes, reduced_bytes) = match (op, algorithm) {
        (FrameOp::AllReduce, Algorithm::Direct) => (2.0, 2.0 * (n - 1.0), 2.0 * chunks, chunks),
        (FrameOp::AllReduce, Algorithm::Doubling) => {
            let rounds = low + 2.0 * fold;
            (rounds, rounds, rounds * b, (low + fold) * b)
        }
        (FrameOp::AllReduce, Algorithm::Halving) => {
            let rounds = 2.0 * low + 2.0 * fold;
            (rounds, blocks * rounds, 2.0 * core + 2.0 * fold * b, core + fold * b)
        }
        (FrameOp::AllReduce, Algorithm::Ring) => {
            let rounds = 2.0 * (n - 1.0);
            (rounds, blocks * rounds, 2.0 * chunks, chunks)
        }
        (FrameOp::AllReduce, Algorithm::Tree) => (2.0 * high, 2.0 * high, 2.0 * high * b, high * b),
        (FrameOp::ReduceScatter, Algorithm::Halving) => {
            let rounds = low + 2.0 * fold;
            (rounds, rounds, ranges + fold * (b + b / n), ranges + fold * b)
        }
        (FrameOp::ReduceScatter, Algorithm::Ring) => (n - 1.0, n - 1.0, chunks, chunks),
        (FrameOp::ReduceScatter, _) => (1.0, n - 1.0, chunks, chunks),
        (FrameOp::AllGather, Algorithm::Halving) => {
            let rounds = low + 2.0 * fold;
            (rounds, rounds + fold, ranges + fold * (b / n + chunks), 0.0)
        }
        (FrameOp::AllGather, Algorithm::Ring) => (n - 1.0, n - 1.0, chunks, 0.0),
        (FrameOp::AllGather, _) => (1.0, n - 1.0, chunks, 0.0),
        (FrameOp::Broadcast, Algorithm::Ring) => (n - 1.0, n - 1.0, chain, 0.0),
        (FrameOp::Broadcast, _) => (high, high, high * b, 0.0),
        (FrameOp::Reduce, Algorithm::Ring) => (n - 1.0, n - 1.0, chain, b),
        (FrameOp::Reduce, _) => (high, high, high * b, high * b),
        (FrameOp::Barrier, _) => (high, high, high, 0.0),
        (FrameOp::Gather | FrameOp::Scatter | FrameOp::AllToAll, _) => (1.0, n - 1.0, chunks, 0.0),
        (FrameOp::Send, _) => (1.0, 1.0, b, 0.0),
        (FrameOp::Receipt | FrameOp::Farewell, _) => (0.0, 0.0, 0.0, 0.0),
    };
    // In each round, halving turns to another partner, to which nothing is in flight, and about one segment's time
    // passes before the link is full again. The ring has one stream, which never ends. Four hosts, 4 MiB at 100 Mbit/s:
    // the ring takes 535 to 547 ms, halving 536 to 656, the most with BBR.
    let idle_bytes = match algorithm {
        Algorithm::Halving if ranks > 2 => rounds * (segment_bytes(bytes) as f64).min(b / 8.0),
        _ => 0.0,
    };
    Effort { rounds, messages, sent_bytes, reduced_bytes, idle_bytes }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Key, plan};
    use super::*;

    const OPS: [FrameOp; 5] =
        [FrameOp::AllReduce, FrameOp::ReduceScatter, FrameOp::AllGather, FrameOp::Broadcast, FrameOp::Reduce];

    /// The most bytes and messages that a rank sends, counted.
    fn count(op: FrameOp, algorithm: Algorithm, bytes: usize, n: usize) -> (usize, usize) {
        let cuts = (0..=n).map(|r| bytes * r / n).collect();
        let key = Key { cuts: Some(cuts), ..Key::new(op, algorithm, bytes, 1, 0) };
        let plans: Vec<_> = (0..n).map(|rank| plan(rank, n, &key)).collect();
        let sent = |rank: usize| {
            plans[rank]
                .iter()
                .filter(|m| m.kind == polyreme_net::moves::MoveKind::Send)
                .map(|m| m.bytes.len())
        };
        let most = (0..n).map(|rank| sent(rank).sum()).max().unwrap();
        let messages = (0..n).map(|rank| sent(rank).count()).max().unwrap();
        (most, messages)
    }

    /// The formulas against the plans themselves: no rank sends more than they say, and exactly as much where all ranks
    /// do the same.
    #[test]
    fn estimates_are_what_plans_do() {
        // The second goes in six blocks, which all of these numbers divide.
        for bytes in [720_720, 21_621_600] {
            for op in OPS {
                for &algorithm in candidates(op) {
                    for n in 1..=16usize {
                        let effort = estimate(op, algorithm, bytes, n);
                        let (sent, messages) = count(op, algorithm, bytes, n);
                        let says =
                            format!("{op:?} by {algorithm:?} of {n}: {sent} bytes in {messages}, {effort:?}");
                        assert!(sent as f64 <= effort.sent_bytes + 1.0, "{says}");
                        assert!(messages as f64 <= effort.messages, "{says}");
                        let folds = matches!(algorithm, Algorithm::Halving | Algorithm::Doubling);
                        let one_sided = algorithm == Algorithm::Tree
                            || matches!(op, FrameOp::Broadcast | FrameOp::Reduce);
                        if !one_sided && (n.is_power_of_two() || !folds) {
                            assert!((sent as f64 - effort.sent_bytes).abs() < 2.0, "{says}");
                            assert_eq!(messages as f64, effort.messages, "{says}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_choice_is_the_cheapest() {
        let lines = [(20.0, 6.0, 2000.0), (60.0, 5.0, 118.0), (1000.0, 5.0, 11.8), (3.0, 1.0, 10_000.0)];
        for (latency_us, message_us, bytes_per_us) in lines {
            let costs = Costs { latency_us, message_us, bytes_per_us, reduce_bytes_per_us: 8000.0 };
            for (op, n, k) in
                OPS.iter().flat_map(|op| (1..=17).flat_map(move |n| (0..=26).map(move |k| (*op, n, k))))
            {
                let bytes = (1usize << k) - 1;
                let choice = choose(op, bytes, n, &costs);
                for (algorithm, us) in &choice.candidates {
                    assert_eq!(*us, estimate(op, *algorithm, bytes, n).us(&costs));
                    assert!(*us >= choice.us, "{op:?} {n} {bytes}: {choice:?}");
                }
                assert_eq!(choice.algorithm, quickly(op, bytes, n, &costs));
                let left_out: Vec<_> =
                    candidates(op).iter().filter(|a| choice.candidates.iter().all(|c| c.0 != **a)).collect();
                assert!(
                    left_out.iter().all(|a| **a == Algorithm::Direct && bytes / n > DIRECT_CHUNK_BYTES_MAX)
                );
            }
        }
    }

    /// As expected: few rounds for small data, few bytes for large.
    #[test]
    fn small_and_large_differ() {
        let slow =
            Costs { latency_us: 1000.0, message_us: 5.0, bytes_per_us: 11.8, reduce_bytes_per_us: 8000.0 };
        let loopback = Costs { bytes_per_us: 4000.0, ..Costs::default() };
        let rows = [
            (slow, FrameOp::AllReduce, 64, 2, Algorithm::Doubling),
            (slow, FrameOp::AllReduce, 64, 8, Algorithm::Direct),
            (slow, FrameOp::AllReduce, 64 << 20, 8, Algorithm::Ring),
            (loopback, FrameOp::AllReduce, 64 << 20, 8, Algorithm::Halving),
            (slow, FrameOp::AllReduce, 64 << 20, 7, Algorithm::Ring),
            (slow, FrameOp::AllGather, 64 << 20, 7, Algorithm::Ring),
            (slow, FrameOp::Broadcast, 64, 8, Algorithm::Tree),
            (slow, FrameOp::Broadcast, 64 << 20, 8, Algorithm::Ring),
            (slow, FrameOp::Reduce, 64 << 20, 8, Algorithm::Ring),
        ];
        for (costs, op, bytes, n, algorithm) in rows {
            let choice = choose(op, bytes, n, &costs);
            assert_eq!(choice.algorithm, algorithm, "{op:?} of {bytes} bytes, {n} ranks: {choice:?}");
        }
    }
}
