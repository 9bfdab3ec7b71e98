//! `parallel.sync`: how the replicas of a model agree, and what does not go together with each way.

use std::ops::Bound;

use super::cursor::Cursor;
use super::declare::{keys, section};
use super::section::Section;
use super::shape::Bounds;
use super::spec::{Balance, ParallelSpec, PrecisionKind, TrainSpec};
use super::types::{Type, one_of, within};

/// The program of a run has the passes of all its steps.
pub(super) const EVERY_MAX: u64 = 1 << 10;
/// More than this is a slip: the outer step would leap far beyond the replicas' mean.
const OUTER_LR: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Included(10.0) };
/// A momentum of 1 never forgets.
const OUTER_MOMENTUM: Bounds = Bounds { low: Bound::Included(0.0), high: Bound::Excluded(1.0) };

/// How replicas agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SyncKind {
    /// In every step gradients are summed over all of them.
    #[default]
    AllReduce,
    /// Each takes steps of its own, and after some of them their weights are averaged.
    Local,
}

/// What is done with the mean of the replicas' weights, beside taking it over.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OuterSpec {
    /// The learning rate of the outer step.
    pub lr: f64,
    /// Its momentum.
    pub momentum: f64,
}

impl Default for OuterSpec {
    fn default() -> OuterSpec {
        OuterSpec { lr: 0.7, momentum: 0.9 }
    }
}

impl SyncKind {
    /// All of them.
    pub const ALL: [SyncKind; 2] = [SyncKind::AllReduce, SyncKind::Local];

    /// The name, as a job file has it.
    pub fn name(self) -> &'static str {
        match self {
            SyncKind::AllReduce => "allreduce",
            SyncKind::Local => "local",
        }
    }

    fn words(self) -> &'static str {
        match self {
            SyncKind::AllReduce => "gradients are summed over all ranks of `data` in every step",
            SyncKind::Local => {
                "each rank of `data` takes `every` steps with weights of its own, which are then averaged"
            }
        }
    }
}

/// How the way stands in a job file.
pub(super) fn sync() -> Type<SyncKind> {
    one_of(SyncKind::ALL.map(|kind| (kind.name(), kind, kind.words())))
}

section! { OuterSpec => {
    let keys = keys! { OuterSpec;
        /// the learning rate of the outer step
        lr: within(OUTER_LR) => |s| Some(&mut s.lr);
        /// the momentum of the outer step
        momentum: within(OUTER_MOMENTUM) => |s| Some(&mut s.momentum);
    };
    let words = "a table such as { lr = 0.7, momentum = 0.9 }";
    Section::new("parallel.outer", words, |_| OuterSpec::default(), keys)
} }

/// What ways to agree do not go together with.
pub(super) fn check(spec: &ParallelSpec, c: &Cursor) {
    if spec.sync != SyncKind::Local {
        // A run that goes on with another way to agree has them from before.
        for key in ["every", "outer"].into_iter().filter(|key| c.has(key) && !c.has("sync")) {
            let message = format!("`parallel.{key}` is for replicas that take steps of their own");
            c.fault(key, message, format!("write sync = \"local\", or leave `{key}` out"));
        }
        return;
    }
    let refuse = |why: &str, hint: &str| c.fault("sync", format!("`parallel.sync = \"local\"` {why}"), hint);
    let one_out = "leave one of them out";
    if spec.reproducible {
        let why = "does not work with `reproducible`: what replicas learn by themselves depends on how many there are";
        refuse(why, one_out);
    }
    if spec.sync_batch_norm {
        let why = "does not work with `sync_batch_norm`, which needs all samples of a step at once";
        refuse(why, one_out);
    }
    let axes = [("tensor", spec.tensor > 1), ("stage", spec.stage > 1), ("sequence", spec.sequence > 1)];
    let shards = [
        ("shard_weights", spec.shard_weights),
        ("shard_gradients", spec.shard_gradients),
        ("shard_optimizer", spec.shard_optimizer == Some(true)),
    ];
    for (key, _) in axes.into_iter().chain(shards).filter(|(_, set)| *set) {
        let why =
            format!("works where each rank has the whole model and updates all of it, and not with `{key}`");
        refuse(&why, one_out);
    }
    if spec.wire.is_some() {
        refuse("sends weights, and `wire` is a format of gradients", "leave `wire` out, or `sync`");
    }
    if spec.balance == Balance::Auto {
        let why = "does not measure the speed of ranks, which `balance = \"auto\"` asks for";
        refuse(why, "leave `balance` out, or write one weight for each rank");
    }
    if let Some(key) = spec.open.names().first() {
        let why = format!("is not known to the planner, which `{key} = \"auto\"` asks");
        refuse(&why, "leave `sync` out, or write numbers for the axes");
    }
}

/// What does not go together with `[train]`; `c` is in `[parallel]`.
pub(super) fn check_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    if spec.sync != SyncKind::Local {
        return;
    }
    let refuse = |why: &str, hint: &str| c.fault("sync", format!("`parallel.sync = \"local\"` {why}"), hint);
    if train.ema.is_some() {
        let why = "does not work with `train.ema`, which follows the weights of every step";
        refuse(why, "leave one of them out");
    }
    if train.precision == PrecisionKind::F16 {
        let why = "does not work with `train.precision = \"f16\"`: ranks find the scale of the loss together, in every step";
        refuse(why, "use precision = \"bf16\"");
    }
}
