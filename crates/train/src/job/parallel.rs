//! `[parallel]`: with what.

use std::ops::Bound;

use polyreme_graph::Optimizer;

use super::cursor::Cursor;
use super::keys::TRANSPORTS;
use super::spec::{Balance, ParallelSpec, TrainSpec, Transport};
use super::tree::Value;

const RANKS_MAX: usize = 1 << 16;
const THREADS_MAX: usize = 1 << 10;
const SHARDS_MAX: usize = 1 << 12;
/// More than 0; a bucket of a GiB is as good as none.
const BUCKET_MIB: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Included(1024.0));

/// At least what a few signs of life take; a week is as good as for ever.
const SECONDS: (Bound<f64>, Bound<f64>) = (Bound::Included(1.0), Bound::Included(604_800.0));

/// Reads the section; what is wrong has been reported, and is as if not said.
pub(super) fn read(c: &Cursor, train: &TrainSpec) -> ParallelSpec {
    let default = ParallelSpec::default();
    let ranks = number(c, "ranks", RANKS_MAX);
    let balance = balance(c, ranks).unwrap_or(default.balance);
    // A list of weights says how many ranks there are.
    let listed = if let Balance::Given(weights) = &balance { Some(weights.len()) } else { None };
    let spec = ParallelSpec {
        ranks: ranks.or(listed),
        threads: number(c, "threads", THREADS_MAX),
        transport: transport(c).unwrap_or(default.transport),
        encrypt: auto_or_flag(c, "encrypt"),
        sync_batch_norm: c.flag("sync_batch_norm").unwrap_or(default.sync_batch_norm),
        reproducible: c.flag("reproducible").unwrap_or(default.reproducible),
        shards: c.size("shards", 1..=SHARDS_MAX).unwrap_or(default.shards),
        shard_optimizer: auto_or_flag(c, "shard_optimizer"),
        shard_gradients: c.flag("shard_gradients").unwrap_or(default.shard_gradients),
        bucket_mib: c.real("bucket_mib", BUCKET_MIB).unwrap_or(default.bucket_mib),
        balance,
        patience: c.real("patience", SECONDS).unwrap_or(default.patience),
        stall: c.real("stall", SECONDS).unwrap_or(default.stall),
    };
    if spec.stall < spec.patience {
        let message = format!(
            "`parallel.stall` of {} s is shorter than `parallel.patience` of {} s: a rank that only stands still would \
             end the run before it counts as lost",
            spec.stall, spec.patience
        );
        let key = if c.has("stall") { "stall" } else { "patience" };
        fault(c, key, &message, "take a stall of at least the patience");
    }
    if spec.reproducible {
        check_reproducible(c, &spec, train);
    } else if c.has("shards") {
        let hint = "write reproducible = true, or leave `shards` out";
        fault(c, "shards", "`parallel.shards` is for reproducible runs", hint);
    }
    if let Some((message, hint)) = spec.refuses_to_shard(&train.optimizer.rule) {
        fault(c, "shard_gradients", message, hint);
    }
    c.finish();
    spec
}

impl ParallelSpec {
    /// Why gradients cannot be sharded, and what to write instead; `None` if they can, or need not be.
    pub(crate) fn refuses_to_shard(&self, optimizer: &Optimizer) -> Option<(&'static str, &'static str)> {
        if !self.shard_gradients {
            return None;
        }
        if matches!(optimizer, Optimizer::Lamb(_)) {
            let message = "`parallel.shard_gradients` does not go with LAMB, which needs the gradients of whole \
                           tensors on every rank";
            return Some((message, "take \"adamw\", or leave `shard_gradients` out"));
        }
        if self.reproducible {
            let message = "`parallel.shard_gradients` does not go with `reproducible`, which adds up whole gradients \
                           in a fixed tree";
            return Some((message, "leave one of them out"));
        }
        if self.shard_optimizer == Some(false) {
            let message = "`parallel.shard_gradients` needs `shard_optimizer`: with its part of the gradients, a rank \
                           can update that part only";
            return Some((message, "leave `shard_optimizer` out"));
        }
        None
    }
}

/// A flag, or `"auto"` for none.
fn auto_or_flag(c: &Cursor, key: &'static str) -> Option<bool> {
    c.get(key).and_then(|at| match &at.node.value {
        Value::String(s) if s == "auto" => None,
        _ => c.flag(key),
    })
}

/// A number, or `"auto"` for none.
fn number(c: &Cursor, key: &'static str, max: usize) -> Option<usize> {
    c.get(key).and_then(|at| match &at.node.value {
        Value::String(s) if s == "auto" => None,
        Value::Integer(_) => at.size(1..=max),
        _ => at.wrong("\"auto\" or a whole number"),
    })
}

fn transport(c: &Cursor) -> Option<Transport> {
    let name = c.choice("transport", &TRANSPORTS)?;
    Transport::ALL.into_iter().find(|t| t.name() == name)
}

fn balance(c: &Cursor, ranks: Option<usize>) -> Option<Balance> {
    let at = c.get("balance")?;
    match &at.node.value {
        Value::String(_) => match at.choice(&["equal", "auto"])? {
            "auto" => Some(Balance::Auto),
            _ => Some(Balance::Equal),
        },
        Value::Array(_) => {
            let items = at.items("a list of numbers")?;
            let positive = (Bound::Excluded(0.0), Bound::Unbounded);
            // All elements are read before one that is wrong ends it.
            let weights: Vec<_> = items.iter().map(|item| item.real(positive)).collect();
            let weights: Vec<f64> = weights.into_iter().collect::<Option<_>>()?;
            let (got, want) = (weights.len(), ranks.unwrap_or(weights.len()));
            if got != want || got == 0 {
                let message = format!("`{}` has {got} weights, and there are {} ranks", at.path, want.max(1));
                at.fault(message, "write one weight for each rank, or \"auto\"");
                return None;
            }
            Some(Balance::Given(weights))
        }
        _ => at.wrong("\"equal\", \"auto\" or a list of weights"),
    }
}

/// What does not go together with the same bits on any number of ranks.
fn check_reproducible(c: &Cursor, spec: &ParallelSpec, train: &TrainSpec) {
    let key = if c.has("shards") { "shards" } else { "reproducible" };
    if !train.batch.is_multiple_of(spec.shards) {
        let message =
            format!("`parallel.shards` of {} does not divide `train.batch` of {}", spec.shards, train.batch);
        let near = (1..=spec.shards).rev().find(|n| train.batch.is_multiple_of(*n)).unwrap_or(1);
        fault(c, key, &message, &format!("shards = {near} would"));
    }
    if let Some(ranks) = spec.ranks.filter(|&ranks| ranks > spec.shards) {
        let message =
            format!("`parallel.shards` of {} leaves some of {ranks} ranks without work", spec.shards);
        fault(c, key, &message, "take at least as many shards as ranks");
    }
    if train.accumulate > 1 {
        let message = "`train.accumulate` cuts a step, and so does `parallel.reproducible`";
        fault(c, "reproducible", message, "leave `accumulate` out and raise `shards`");
    }
    if spec.sync_batch_norm {
        let message =
            "`parallel.sync_batch_norm` needs all samples of a step at once, and shards come one by one";
        fault(c, "sync_batch_norm", message, "leave it out, or leave `reproducible` out");
    }
}

fn fault(c: &Cursor, key: &str, message: &str, hint: &str) {
    c.reading.fault(c.place_of(key), &c.path_of(key), message, hint);
}
