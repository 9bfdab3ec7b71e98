//! Data parallel: every rank has the whole model and a part of the batch; gradients are added up, and each rank
//! updates its part of the parameters.
//!
//! ```text
//!  compute … loss        start totals
//!  compute … dW3 db3     start sum of bucket 0 ─┐ while the backward pass goes on
//!  compute … dW1 db1     start sum of bucket 1 ─┘
//!  wait 0, update own part of bucket 0, start gather of bucket 0
//!  wait 1, update own part of bucket 1, start gather of bucket 1
//!  wait for the gathers
//! ```
//!
//! A bucket is a range of the arena of gradients, which lies in the order of readiness, so nothing is copied to be
//! sent. With `sharded`, the sum is a reduce-scatter: a rank gets the sum of its own part of each bucket, keeps
//! moments for that part only, and the updated parts are gathered. As many bytes go over the wire as by an
//! all-reduce. LAMB looks at whole tensors, so there every rank updates everything.
//!
//! Ranks that share one copy of the weights have no gather: they meet before and after the updates. The sum of the
//! last bucket starts after the last node, and is complete only when all ranks have started it; so nobody writes a
//! parameter that another rank still reads. With shared memory there is no wire to keep busy either: one bucket.

use std::ops::Range;
use std::sync::Arc;

use crate::sync_norm::sync_batch_norm;
use polyreme_graph::memory::param_ranges;
use polyreme_graph::{Exchange, Graph, Instr, NodeId, Optimizer, Program, Role};

/// Parts of ranks begin at multiples of so many elements: whole vectors, and sums of squares by fixed blocks.
pub const PART_ALIGN: usize = 1024;

/// The last bucket is at most this part of what the others are at least. A step of `cnn` on two hosts with 250 Mbit/s
/// between them was 60 ms longer than one without a link, and is 24 ms longer with it; the gradients take 154 ms.
const LAST_PART: usize = 4;

/// How a step is split over the data axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DataPlan {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Whether each rank updates, and keeps moments for, a part only.
    pub sharded: bool,
    /// Whether all ranks work on one copy of the weights.
    pub shared_weights: bool,
    /// Gradients are sent in buckets of at least so many bytes.
    pub bucket_bytes: usize,
    /// Whether batch norms take their statistics over all ranks.
    pub sync_batch_norm: bool,
    /// Reproducible: logical shards of the global batch.
    pub shards: Option<usize>,
}

impl DataPlan {
    /// One rank.
    pub fn alone() -> DataPlan {
        DataPlan {
            rank: 0,
            ranks: 1,
            sharded: false,
            shared_weights: false,
            bucket_bytes: 1 << 20,
            sync_batch_norm: false,
            shards: None,
        }
    }
}

/// The program of one rank: `step` is a differentiated graph with the output `loss`.
pub fn data_parallel(step: &Graph, optimizer: Optimizer, clip: Option<f64>, plan: &DataPlan) -> Program {
    // Logical shards are computed one by one, each with statistics of its own.
    let sync = plan.sync_batch_norm && plan.ranks > 1 && plan.shards.is_none();
    let mut program =
        if sync { Program::gradients(&sync_batch_norm(step)) } else { Program::gradients(step) };
    program.optimizer = Some(optimizer);
    // LAMB needs the norms of whole tensors. Shared weights are written by one rank each: they are always sharded.
    let lamb = matches!(optimizer, Optimizer::Lamb(_));
    let sharded = plan.ranks > 1 && !lamb && (plan.sharded || plan.shared_weights || plan.shards.is_some());
    let shared_weights = plan.shared_weights && sharded;
    let learnt = learnt(&program.graph);
    let one_bucket = shared_weights || plan.shards.is_some() || plan.ranks == 1;
    let buckets = if one_bucket { buckets(&learnt, usize::MAX) } else { buckets(&learnt, plan.bucket_bytes) };
    let cuts: Vec<Arc<[usize]>> = buckets.iter().map(|b| cuts(b.range.len(), plan.ranks)).collect();
    let part = |rank: usize| match sharded {
        false => buckets.iter().map(|b| b.range.clone()).collect(),
        true => buckets.iter().zip(&cuts).map(|(b, cuts)| own_part(b, cuts, rank)).collect(),
    };
    let parts = (0..plan.ranks).map(part).collect();
    let (rank, ranks, shards) = (plan.rank, plan.ranks, plan.shards);
    let role = Role { rank, ranks, shared_weights, shards, parts, sharded };
    let mut lowering = Lowering { exchanges: Vec::new(), instrs: Vec::new() };
    lowering.backward(&program, &buckets, &cuts, &role);
    let updates: Vec<Instr> = match lamb || plan.ranks == 1 {
        true => vec![Instr::Update { first: 0, last: learnt.len() }],
        false => own_updates(role.own()),
    };
    lowering.updates(&buckets, &cuts, &role, clip, updates);
    program.instrs = lowering.instrs;
    program.exchanges = lowering.exchanges;
    program.role = Some(role);
    program
}

/// A learnt parameter: its elements and the node after which its gradient is there.
struct Learnt {
    range: Range<usize>,
    ready: usize,
}

/// Gradients that are sent together.
struct Bucket {
    range: Range<usize>,
    ready: usize,
}

struct Lowering {
    exchanges: Vec<Exchange>,
    instrs: Vec<Instr>,
}

impl Lowering {
    fn exchange(&mut self, exchange: Exchange) -> usize {
        self.exchanges.push(exchange);
        self.exchanges.len() - 1
    }

    /// The nodes, with totals and buckets started where they are ready. Exchanges `1..=buckets` are the buckets.
    fn backward(&mut self, program: &Program, buckets: &[Bucket], cuts: &[Arc<[usize]>], role: &Role) {
        let graph = &program.graph;
        let totals = self.exchange(Exchange::Totals);
        let ranks = role.ranks > 1;
        // Shards are summed by the engine, in a tree of its own.
        let sums: Vec<usize> = match ranks && role.shards.is_none() {
            false => Vec::new(),
            true => buckets
                .iter()
                .zip(cuts)
                .map(|(b, c)| {
                    let cuts = role.sharded.then(|| c.clone());
                    self.exchange(Exchange::SumGrads { range: b.range.clone(), cuts })
                })
                .collect(),
        };
        let loss = graph.output("loss").map_or(0, |v| graph.value(v).producer.idx());
        let last = graph.nodes.len().saturating_sub(1);
        for i in 0..graph.nodes.len() {
            self.instrs.push(Instr::Compute(NodeId(i as u32)));
            if i == loss {
                self.instrs.push(Instr::Start(totals));
            }
            for (k, &sum) in sums.iter().enumerate() {
                let waits_for_all = role.shared_weights && k + 1 == sums.len();
                if i == if waits_for_all { last } else { buckets[k].ready } {
                    self.instrs.push(Instr::Start(sum));
                }
            }
        }
        // Nothing is taken over, and nothing updated, before all know that the loss is finite.
        self.instrs.push(Instr::Wait(totals));
        self.instrs.extend(program.instrs.iter().filter(|i| matches!(i, Instr::Keep { .. })));
    }

    fn updates(
        &mut self,
        buckets: &[Bucket],
        cuts: &[Arc<[usize]>],
        role: &Role,
        clip: Option<f64>,
        updates: Vec<Instr>,
    ) {
        let n_sums = self.exchanges.len() - 1;
        // The norm is that of all gradients, and shared weights are still read by others.
        let together = clip.is_some() || role.shared_weights || updates.len() != buckets.len();
        if together {
            self.instrs.extend((0..n_sums).map(|k| Instr::Wait(k + 1)));
            self.instrs.extend(clip.map(|max_norm| Instr::Clip { max_norm }));
        }
        let mut gathers = Vec::new();
        for (k, update) in updates.iter().enumerate() {
            if !together && n_sums > 0 {
                self.instrs.push(Instr::Wait(k + 1));
            }
            self.instrs.push(*update);
            if role.sharded && !role.shared_weights {
                let (range, cuts) = (buckets[k].range.clone(), cuts[k].clone());
                let gather = self.exchange(Exchange::GatherParams { range, cuts });
                self.instrs.push(Instr::Start(gather));
                gathers.push(gather);
            }
        }
        if role.shared_weights {
            let meet = self.exchange(Exchange::Meet);
            self.instrs.push(Instr::Start(meet));
            gathers.push(meet);
        }
        self.instrs.extend(gathers.into_iter().map(Instr::Wait));
    }
}

fn learnt(graph: &Graph) -> Vec<Learnt> {
    let of = |(p, range): (usize, Range<usize>)| {
        let grad = graph.grads.get(p).copied().flatten()?;
        Some(Learnt { range, ready: graph.value(grad).producer.idx() })
    };
    param_ranges(graph).into_iter().filter_map(of).collect()
}

/// Consecutive parameters until there are enough bytes. What becomes ready last is sent while nothing is computed any
/// more, so the last of them, which come to a part of a bucket, are not held together with earlier ones.
fn buckets(learnt: &[Learnt], bytes_min: usize) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    let end = learnt.last().map_or(0, |param| param.range.end);
    let is_last = |from: usize| (end - from) * 4 <= bytes_min / LAST_PART;
    for param in learnt {
        match buckets.last_mut() {
            Some(b)
                if b.range.len() * 4 < bytes_min && is_last(b.range.start) == is_last(param.range.start) =>
            {
                b.range.end = param.range.end;
                b.ready = b.ready.max(param.ready);
            }
            _ => buckets.push(Bucket { range: param.range.clone(), ready: param.ready }),
        }
    }
    buckets
}

/// Nearly equal parts of `len` elements that begin at multiples of [`PART_ALIGN`].
pub fn cuts(len: usize, ranks: usize) -> Arc<[usize]> {
    let blocks = len.div_ceil(PART_ALIGN);
    (0..=ranks).map(|r| (blocks * r / ranks * PART_ALIGN).min(len)).collect()
}

fn own_part(bucket: &Bucket, cuts: &[usize], rank: usize) -> Range<usize> {
    bucket.range.start + cuts[rank]..bucket.range.start + cuts[rank + 1]
}

fn own_updates(own: &[Range<usize>]) -> Vec<Instr> {
    let mut moments_at = 0;
    let update = |r: &Range<usize>| {
        let update = Instr::UpdateOwn { start: r.start, end: r.end, moments_at };
        moments_at += r.len();
        update
    };
    own.iter().map(update).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements of buckets of at least 400 bytes, for parameters of so many elements.
    fn check(params: &[usize], want: &[usize]) {
        let mut at = 0;
        let param = |(ready, &n): (usize, &usize)| {
            at += n;
            Learnt { range: at - n..at, ready }
        };
        let learnt: Vec<_> = params.iter().enumerate().map(param).collect();
        let buckets = buckets(&learnt, 400);
        assert_eq!(buckets.iter().map(|b| b.range.len()).collect::<Vec<_>>(), want, "{params:?}");
        // Each is ready with its last parameter, and together they are all.
        let mut at = 0;
        for bucket in &buckets {
            assert_eq!(bucket.range.start, at);
            at = bucket.range.end;
            assert_eq!(learnt[bucket.ready].range.end, at);
        }
        assert_eq!(at, params.iter().sum());
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
}
