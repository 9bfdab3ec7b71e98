//! Buckets: which gradients are sent together, when they are ready, and which shard of them each rank owns.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::{param_ranges, reshape_root};
use polyreme_graph::{Graph, Op};

/// Each rank's shard begins at a multiple of this many elements: whole vectors, and sums of squares over fixed blocks.
pub const PART_ALIGN: usize = 1024;

/// The last bucket holds at most the minimum size of a bucket divided by this. A step of `cnn` on two hosts with 250
/// Mbit/s between them takes 24 ms longer than one without a network, and took 60 ms longer without this rule; sending
/// the gradients takes 154 ms.
const LAST_PART: usize = 4;

/// Gradients that are sent together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Bucket {
    /// The elements of the parameters' arena.
    pub(crate) range: Range<usize>,
    /// The first node that writes one of them, or one of a later bucket.
    pub(crate) begins: usize,
    /// The last node that writes or reads one of them, or one of an earlier bucket.
    pub(crate) ready: usize,
}

/// The gradients in the order in which they become ready, in buckets of at least `bytes_min` bytes; the last may be
/// smaller.
pub(crate) fn buckets(graph: &Graph, bytes_min: usize) -> Vec<Bucket> {
    let mut buckets = joined(&learnt(graph), bytes_min);
    in_order(&mut buckets);
    buckets
}

/// Joins consecutive parameters until there are enough bytes. The last bucket is sent when there is nothing left to
/// compute, so the last few parameters get a small bucket of their own.
fn joined(params: &[Bucket], bytes_min: usize) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    let end = params.last().map_or(0, |param| param.range.end);
    let is_last = |b: &Bucket| (end - b.range.start) * 4 <= bytes_min / LAST_PART;
    for param in params {
        match buckets.last_mut() {
            Some(b) if b.range.len() * 4 < bytes_min && is_last(b) == is_last(param) => b.join(param),
            _ => buckets.push(param.clone()),
        }
    }
    buckets
}

/// Buckets that can alternate between two buffers: before one is first written, the one before the previous is ready.
/// Those that cannot are joined; the gradients that one node writes go into at most two buckets.
pub(crate) fn in_turn(mut buckets: Vec<Bucket>) -> Vec<Bucket> {
    let late = |b: &[Bucket]| (2..b.len()).find(|&k| b[k].begins <= b[k - 2].ready);
    while let Some(k) = late(&buckets) {
        let next = buckets.remove(k);
        buckets[k - 1].join(&next);
        in_order(&mut buckets);
    }
    buckets
}

/// Nearly equal parts of `len` elements that begin at multiples of [`PART_ALIGN`].
pub fn cuts(len: usize, ranks: usize) -> Arc<[usize]> {
    let blocks = len.div_ceil(PART_ALIGN);
    (0..=ranks).map(|r| (blocks * r / ranks * PART_ALIGN).min(len)).collect()
}

impl Bucket {
    /// Extends this bucket by the next one.
    fn join(&mut self, next: &Bucket) {
        self.range.end = next.range.end;
        self.begins = self.begins.min(next.begins);
        self.ready = self.ready.max(next.ready);
    }

    /// The shard of a rank.
    pub(crate) fn part(&self, cuts: &[usize], rank: usize) -> Range<usize> {
        self.range.start + cuts[rank]..self.range.start + cuts[rank + 1]
    }
}

/// Makes buckets begin and become ready in order.
fn in_order(buckets: &mut [Bucket]) {
    for k in 1..buckets.len() {
        buckets[k].ready = buckets[k].ready.max(buckets[k - 1].ready);
    }
    for k in (1..buckets.len()).rev() {
        buckets[k - 1].begins = buckets[k - 1].begins.min(buckets[k].begins);
    }
}

/// A bucket for each parameter that has a gradient to be summed: shards are sums already.
fn learnt(graph: &Graph) -> Vec<Bucket> {
    // Other nodes may read a gradient too: it must not change before they have.
    let mut last_read = vec![0; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate().filter(|(_, n)| !matches!(n.op, Op::Reshape)) {
        for &v in &node.inputs {
            last_read[reshape_root(graph, v).idx()] = i;
        }
    }
    let of = |(p, range): (usize, Range<usize>)| {
        let grad = graph.grads.get(p).copied().flatten().filter(|_| graph.params[p].shard.is_none())?;
        let root = reshape_root(graph, grad);
        let begins = graph.value(root).producer.idx();
        let ready = graph.value(grad).producer.idx().max(last_read[root.idx()]);
        Some(Bucket { range, begins, ready })
    };
    param_ranges(graph).into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(range: Range<usize>, begins: usize, ready: usize) -> Bucket {
        Bucket { range, begins, ready }
    }

    /// Checks the elements of each bucket of at least 400 bytes, for parameters of these sizes.
    fn check(params: &[usize], want: &[usize]) {
        let mut at = 0;
        let param = |(ready, &n): (usize, &usize)| {
            at += n;
            bucket(at - n..at, ready, ready)
        };
        let params: Vec<_> = params.iter().enumerate().map(param).collect();
        let buckets = joined(&params, 400);
        assert_eq!(buckets.iter().map(|b| b.range.len()).collect::<Vec<_>>(), want, "{params:?}");
        // Each is ready with its last parameter, and together they are all.
        let mut at = 0;
        for bucket in &buckets {
            assert_eq!(bucket.range.start, at);
            at = bucket.range.end;
            assert_eq!(params[bucket.ready].range.end, at);
        }
        assert_eq!(at, params.last().map_or(0, |p| p.range.end));
    }

    #[test]
    fn what_is_ready_last_is_a_small_bucket() {
        check(&[], &[]);
        check(&[7], &[7]);
        check(&[300, 50, 70, 200], &[300, 120, 200]);
        // 25 elements are a fourth of 400 bytes.
        check(&[100, 60, 25], &[100, 60, 25]);
        check(&[100, 60, 20, 5], &[100, 60, 25]);
        check(&[100, 60, 26], &[100, 86]);
        check(&[10, 10, 5], &[25]);
        check(&[10, 10, 10], &[10, 20]);
    }

    #[test]
    fn buckets_take_turns_when_the_last_but_one_is_ready() {
        let apart: Vec<_> = (0..5).map(|k| bucket(k..k + 1, 10 * k, 10 * k + 9)).collect();
        assert_eq!(in_turn(apart.clone()), apart);
        // One node writes the last three: they are two buckets.
        let together = vec![bucket(0..1, 3, 3), bucket(1..2, 7, 7), bucket(2..3, 7, 7), bucket(3..4, 7, 7)];
        assert_eq!(in_turn(together), [bucket(0..1, 3, 3), bucket(1..2, 7, 7), bucket(2..4, 7, 7)]);
        // The last one is written first, so all the others but one would have to wait for it.
        let mut early = vec![bucket(0..1, 5, 6), bucket(1..2, 7, 8), bucket(2..3, 9, 9), bucket(3..4, 1, 12)];
        in_order(&mut early);
        assert_eq!(in_turn(early), [bucket(0..1, 1, 6), bucket(1..4, 1, 12)]);
    }

    #[test]
    fn parts_are_nearly_equal_and_aligned() {
        for (len, ranks) in [(0, 3), (5, 4), (1024, 2), (10_000, 3), (1 << 20, 8), (1_000_000, 7)] {
            let cuts = cuts(len, ranks);
            assert_eq!((cuts[0], cuts[ranks], cuts.len()), (0, len, ranks + 1));
            for w in cuts.windows(2) {
                assert!(w[0] % PART_ALIGN == 0 && w[1] - w[0] <= len / ranks + PART_ALIGN, "{cuts:?}");
            }
        }
    }
}
