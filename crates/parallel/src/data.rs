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
//!
//! # Gradients too
//! With `shard_gradients` a rank keeps its own part of the gradients only. Buckets take turns in two buffers
//! ([`GradBuffers`]): before the first gradient of bucket `k` is written, the sum of bucket `k - 2` is waited for and
//! this rank's part of it taken out. So bucket `k - 2` is summed while bucket `k - 1` is computed.
//!
//! ```text
//!  compute … dW4         start sum of bucket 0
//!  compute … dW3         start sum of bucket 1
//!  wait 0, take own part of bucket 0
//!  compute … dW2         start sum of bucket 2, in the place of bucket 0
//!  wait 1, take own part of bucket 1; wait 2, take own part of bucket 2
//! ```
//!
//! What would have to be summed at the end of a step's pieces is gone by then, so every piece is summed over the ranks,
//! and own parts add up: with `n` pieces, `n` times the bytes of a reduce-scatter.

use std::ops::Range;
use std::sync::Arc;

use crate::buckets::{Bucket, buckets, cuts, in_turn, n_learnt};
use crate::sync_norm::sync_batch_norm;
use polyreme_graph::{Exchange, GradBuffers, Graph, Instr, NodeId, Optimizer, Program, Role};

/// How a step is split over the data axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DataPlan {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Whether each rank updates, and keeps moments for, a part only.
    pub sharded: bool,
    /// Whether each rank keeps its part of the gradients only; it then updates, and keeps moments for, that part too.
    /// Neither LAMB, which needs the gradients of whole tensors, nor logical shards, whose whole gradients are added up
    /// in a tree, go with it.
    pub shard_gradients: bool,
    /// Whether all ranks work on one copy of the weights.
    pub shared_weights: bool,
    /// Gradients are sent in buckets of at least so many bytes.
    pub bucket_bytes: usize,
    /// Whether batch norms take their statistics over all ranks.
    pub sync_batch_norm: bool,
    /// Reproducible: logical shards of the global batch.
    pub shards: Option<usize>,
    /// Whether every step is one piece and nobody asks for gradients: a lone rank that does not clip them then updates
    /// parameters while it computes their gradients.
    pub at_once: bool,
}

impl DataPlan {
    /// One rank.
    pub fn alone() -> DataPlan {
        DataPlan {
            rank: 0,
            ranks: 1,
            sharded: false,
            shard_gradients: false,
            shared_weights: false,
            bucket_bytes: 1 << 20,
            sync_batch_norm: false,
            shards: None,
            at_once: false,
        }
    }
}

/// The program of one rank: `step` is a differentiated graph with the output `loss`.
///
/// # Panics
/// If a plan shards the gradients of LAMB, or of logical shards.
pub fn data_parallel(step: &Graph, optimizer: Optimizer, clip: Option<f64>, plan: &DataPlan) -> Program {
    // Logical shards are computed one by one, each with statistics of its own.
    let sync = plan.sync_batch_norm && plan.ranks > 1 && plan.shards.is_none();
    let at_once = plan.at_once && plan.ranks == 1 && plan.shards.is_none() && clip.is_none();
    let mut program = match (sync, at_once) {
        (true, _) => Program::gradients(&sync_batch_norm(step)),
        (false, true) => Program::late_gradients(step),
        (false, false) => Program::gradients(step),
    };
    program.optimizer = Some(optimizer);
    // LAMB needs the norms of whole tensors. Shared weights are written by one rank each: they are always sharded.
    let lamb = matches!(optimizer, Optimizer::Lamb(_));
    assert!(!plan.shard_gradients || !lamb, "LAMB needs the gradients of whole tensors on every rank");
    assert!(!plan.shard_gradients || plan.shards.is_none(), "logical shards need whole gradients");
    // One rank owns everything.
    let in_buffers = plan.shard_gradients && plan.ranks > 1;
    let wanted = plan.sharded || plan.shared_weights || plan.shards.is_some() || in_buffers;
    let sharded = plan.ranks > 1 && !lamb && wanted;
    let shared_weights = plan.shared_weights && sharded;
    let one_bucket = (shared_weights && !in_buffers) || plan.shards.is_some() || plan.ranks == 1;
    let mut buckets = buckets(&program.graph, if one_bucket { usize::MAX } else { plan.bucket_bytes });
    if in_buffers {
        buckets = in_turn(buckets);
        program.buffers = Some(GradBuffers::new(buckets.iter().map(|b| b.range.clone()).collect()));
    }
    let cuts: Vec<Arc<[usize]>> = buckets.iter().map(|b| cuts(b.range.len(), plan.ranks)).collect();
    let part = |rank: usize| match sharded {
        false => buckets.iter().map(|b| b.range.clone()).collect(),
        true => buckets.iter().zip(&cuts).map(|(b, cuts)| b.part(cuts, rank)).collect(),
    };
    let parts = (0..plan.ranks).map(part).collect();
    let (rank, ranks, shards) = (plan.rank, plan.ranks, plan.shards);
    let role = Role { rank, ranks, shared_weights, shards, parts, sharded };
    let updates: Vec<Instr> = match lamb || plan.ranks == 1 {
        true => vec![Instr::Update { first: 0, last: n_learnt(&program.graph) }],
        false => own_updates(role.own()),
    };
    let mut lowering = Lowering {
        program: &program,
        buckets: &buckets,
        cuts: &cuts,
        role: &role,
        exchanges: Vec::new(),
        instrs: Vec::new(),
        taken: 0,
        at_once,
    };
    lowering.backward();
    lowering.updates(clip, &updates);
    let Lowering { exchanges, instrs, .. } = lowering;
    (program.exchanges, program.instrs, program.role) = (exchanges, instrs, Some(role));
    if at_once {
        program.update_at_once();
    }
    program
}

struct Lowering<'a> {
    program: &'a Program,
    buckets: &'a [Bucket],
    cuts: &'a [Arc<[usize]>],
    role: &'a Role,
    exchanges: Vec<Exchange>,
    instrs: Vec<Instr>,
    /// Buckets that have been waited for and taken out of their buffers.
    taken: usize,
    /// Whether parameters are updated before the last node.
    at_once: bool,
}

impl Lowering<'_> {
    fn exchange(&mut self, exchange: Exchange) -> usize {
        self.exchanges.push(exchange);
        self.exchanges.len() - 1
    }

    /// The nodes, with totals and buckets started where they are ready. Exchanges `1..=buckets` are the buckets.
    fn backward(&mut self) {
        let (graph, buckets, role) = (&self.program.graph, self.buckets, self.role);
        let totals = self.exchange(Exchange::Totals);
        // Shards are summed by the engine, in a tree of its own.
        let n_sums = if role.ranks > 1 && role.shards.is_none() { buckets.len() } else { 0 };
        for (k, bucket) in buckets[..n_sums].iter().enumerate() {
            let range = bucket.range.clone();
            let cuts = role.sharded.then(|| self.cuts[k].clone());
            let at = self.program.buffers.as_ref().map_or(range.start, |buffers| buffers.at(k));
            self.exchange(Exchange::SumGrads { range, cuts, at });
        }
        let loss = graph.output("loss").map_or(0, |v| graph.value(v).producer.idx());
        let last = graph.nodes.len().saturating_sub(1);
        for i in 0..graph.nodes.len() {
            if self.program.buffers.is_some() {
                // Nobody writes where a sum is still under way.
                let begun = buckets.iter().filter(|b| b.begins <= i).count();
                self.take_until(begun.saturating_sub(2));
            }
            self.instrs.push(Instr::Compute(NodeId(i as u32)));
            if i == loss {
                self.instrs.push(Instr::Start(totals));
                self.instrs.extend(self.at_once.then_some(Instr::Wait(totals)));
            }
            for (k, bucket) in buckets[..n_sums].iter().enumerate() {
                let waits_for_all = role.shared_weights && k + 1 == n_sums;
                if i == if waits_for_all { last } else { bucket.ready } {
                    self.instrs.push(Instr::Start(k + 1));
                }
            }
        }
        // Nothing is taken over, and nothing updated, before all know that the loss is finite.
        self.instrs.extend((!self.at_once).then_some(Instr::Wait(totals)));
        self.instrs.extend(self.program.instrs.iter().filter(|i| matches!(i, Instr::Keep { .. })));
    }

    /// Waits for the sums of buckets up to `end`, and takes this rank's parts out of their buffers.
    fn take_until(&mut self, end: usize) {
        for k in self.taken..end {
            let before = self.role.own()[..k].iter().map(Range::len).sum();
            self.instrs.extend([Instr::Wait(k + 1), Instr::Take { exchange: k + 1, to: before }]);
        }
        self.taken = self.taken.max(end);
    }

    /// Makes sure that the sums of buckets up to `end` are there.
    fn wait_until(&mut self, end: usize) {
        if self.program.buffers.is_some() {
            return self.take_until(end);
        }
        self.instrs.extend((self.taken..end).map(|k| Instr::Wait(k + 1)));
        self.taken = self.taken.max(end);
    }

    fn updates(&mut self, clip: Option<f64>, updates: &[Instr]) {
        let (buckets, role) = (self.buckets, self.role);
        let n_sums = self.exchanges.len() - 1;
        // The norm is that of all gradients, and shared weights are still read by others.
        let together = clip.is_some() || role.shared_weights || updates.len() != buckets.len();
        if together {
            self.wait_until(n_sums);
            self.instrs.extend(clip.map(|max_norm| Instr::Clip { max_norm }));
        }
        let mut gathers = Vec::new();
        for (k, update) in updates.iter().enumerate() {
            self.wait_until((k + 1).min(n_sums));
            self.instrs.push(*update);
            if role.sharded && !role.shared_weights {
                let (range, cuts) = (buckets[k].range.clone(), self.cuts[k].clone());
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
    use polyreme_graph::{Builder, DType, Init, Moments, differentiate};

    /// Four products without a bias.
    fn step() -> Graph {
        let mut b = Builder::new();
        let mut h = b.input("x", [4, 48], DType::F32).unwrap();
        for name in ["a", "b", "c", "d"] {
            let w = b.param(name, [48, 48], Init::Uniform { bound: 0.5 }).unwrap();
            h = b.linear(h, w, None).unwrap();
        }
        let loss = b.mean(h, &[0, 1]).unwrap();
        differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
    }

    const ADAM: Optimizer = Optimizer::Adam(Moments::DEFAULT);

    fn plan() -> DataPlan {
        DataPlan { rank: 1, ranks: 2, shard_gradients: true, bucket_bytes: 1, ..DataPlan::alone() }
    }

    #[test]
    fn buckets_take_turns_over_a_network() {
        let got = data_parallel(&step(), ADAM, None, &plan()).to_string();
        assert_eq!(got, include_str!("../snapshots/shard_gradients.txt"), "\n--- got ---\n{got}");
    }

    #[test]
    fn buckets_take_turns_where_weights_are_shared() {
        let plan = DataPlan { shared_weights: true, ..plan() };
        let got = data_parallel(&step(), ADAM, Some(1.0), &plan).to_string();
        assert_eq!(got, include_str!("../snapshots/shard_gradients_shared.txt"), "\n--- got ---\n{got}");
    }

    #[test]
    fn one_rank_updates_at_once_when_it_knows_that_the_loss_is_finite() {
        let plan = DataPlan { at_once: true, ..DataPlan::alone() };
        let program = data_parallel(&step(), ADAM, None, &plan);
        let at = |what: fn(&Instr) -> bool| program.instrs.iter().position(what);
        let (waited, first) = (at(|i| matches!(i, Instr::Wait(0))), at(|i| matches!(i, Instr::Apply { .. })));
        assert!(waited.is_some() && waited < first, "{program}");
        // Whose gradients others wait for, or whose norm is wanted, are updated at the end.
        let later = |clip: Option<f64>, plan: &DataPlan| {
            let program = data_parallel(&step(), ADAM, clip, plan);
            assert!(!program.instrs.iter().any(|i| matches!(i, Instr::Apply { .. })), "{program}");
        };
        later(Some(1.0), &plan);
        later(None, &DataPlan { ranks: 2, ..plan.clone() });
        later(None, &DataPlan { shards: Some(4), ..plan });
    }

    #[test]
    fn one_rank_has_nothing_to_shard() {
        let plan = DataPlan { shard_gradients: true, ..DataPlan::alone() };
        let program = data_parallel(&step(), ADAM, None, &plan);
        assert_eq!(program.buffers, None);
        assert_eq!(program.to_string(), data_parallel(&step(), ADAM, None, &DataPlan::alone()).to_string());
    }

    #[test]
    #[should_panic(expected = "LAMB needs the gradients of whole tensors")]
    fn lamb_is_refused() {
        data_parallel(&step(), Optimizer::Lamb(Moments::DEFAULT), None, &plan());
    }
}
