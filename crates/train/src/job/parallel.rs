//! `[parallel]`: what a run uses, and how ranks share a step.

use std::ops::Bound;

use super::cursor::Cursor;
use super::declare::{keys, section};
use super::key::Key;
use super::mesh;
use super::section::Section;
use super::shape::Bounds;
use super::spec::{Balance, Elastic, OptimizerSpec, ParallelSpec, PrecisionKind, TrainSpec, Transport};
use super::store::address;
use super::sync::{self, EVERY_MAX, FRAGMENTS_MAX, STALENESS_MAX, SyncKind};
use super::tuning::patterns;
use super::types::{auto, either, flag, list, maybe, one_of, real, table, text, whole, within};
use super::wire;

/// More ranks than this are a slip.
pub(super) const RANKS_MAX: u64 = 1 << 16;
/// More than this is a slip, not a setting.
pub(super) const THREADS_MAX: u64 = 1 << 10;
const SHARDS_MAX: u64 = 1 << 12;
const MICROBATCHES_MAX: u64 = 1 << 12;
/// A flush after so many steps costs next to nothing, and the program of a run has passes for all of them.
const FLUSH_EVERY_MAX: u64 = 1 << 8;
/// More ranks than this share neither a matrix nor the layers of a network in a useful way.
const AXIS_MAX: u64 = 64;
/// A bucket of a GiB is as good as none.
const BUCKET_MIB: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Included(1024.0) };
/// At least what a few signs of life take; a week is as good as for ever.
const SECONDS: std::ops::RangeInclusive<f64> = 1.0..=604_800.0;
/// Ranks of one kind differ by less.
const LEAVE_OUT: std::ops::RangeInclusive<f64> = 1.5..=1e6;

section! { ParallelSpec => {
    let section = Section::new("parallel", "a section", |_| ParallelSpec::default(), keys());
    let idle = |s: &ParallelSpec, key: &str| match key {
        "shards" => !s.reproducible,
        "schedule" | "cuts" => s.stage == 1 && !s.open.schedule,
        "flush_every" => !s.is_flushless(),
        "every" => !s.agrees_by(SyncKind::Local),
        "fragments" => !s.agrees_by(SyncKind::Local),
        "overlap" => s.fragments == 1,
        "own" => s.own.is_empty(),
        "staleness" => !s.agrees_by(SyncKind::PsBounded),
        "servers" => !s.syncs().any(SyncKind::has_servers),
        _ => false,
    };
    section.unwritten(idle).check(check)
} }

fn keys() -> Vec<Key<ParallelSpec>> {
    let balance = either(
        one_of([("hosts", Balance::Hosts, ""), ("equal", Balance::Equal, ""), ("auto", Balance::Auto, "")]),
        list(within(Bounds::POSITIVE), &[], "an array of weights").map(Balance::Given, |b| {
            if let Balance::Given(weights) = b { Some(weights.clone()) } else { None }
        }),
    );
    let transport = one_of(Transport::ALL.map(|t| (t.name(), t, t.words())));
    let open = [("auto", None, "the fastest of those that follow but `2bw`, found by the planner")];
    let schedule = one_of(
        open.into_iter().chain(mesh::schedules().map(|(name, kind, words)| (name, Some(kind), words))),
    );
    keys! { ParallelSpec;
        /// how many ranks share a step; auto: as many as were started, or as `balance` has weights; else cores
        /// are split into ranks of at least 16 samples a step, 32 with batch norm
        ranks: auto(whole(1..=RANKS_MAX)) => |s| Some(&mut s.ranks);
        /// over how many ranks, or groups of ranks that have the model together, each batch is split; auto: those
        /// that the other axes leave
        data: auto(whole(1..=RANKS_MAX)) => |s| Some(&mut s.data);
        /// over how many ranks each matrix is split: column and row parts, heads, vocabulary, channels
        tensor: auto(whole(1..=AXIS_MAX)) => ParallelSpec::tensor_key, ParallelSpec::set_tensor_key;
        /// over how many ranks the layers are split: a pipeline of stages
        stage: auto(whole(1..=AXIS_MAX)) => ParallelSpec::stage_key, ParallelSpec::set_stage_key;
        /// over how many ranks each sequence is split
        sequence: auto(whole(1..=AXIS_MAX)) => ParallelSpec::sequence_key, ParallelSpec::set_sequence_key;
        /// into how many microbatches a step is cut, before these are split over the ranks of `data`; a pipeline
        /// wants a few for each stage
        microbatches: auto(whole(1..=MICROBATCHES_MAX)) => ParallelSpec::microbatches_key, ParallelSpec::set_microbatches_key;
            or "`train.accumulate`";
        /// in which order stages run microbatches, see below
        schedule: schedule => ParallelSpec::schedule_key, ParallelSpec::set_schedule_key; or "`\"1f1b\"`";
        /// with `schedule = "2bw"`: the most steps from one flush of the pipeline to the next; requests to stop wait for one
        flush_every: whole(1..=FLUSH_EVERY_MAX) => |s| Some(&mut s.flush_every); or "16";
        /// the layers before which the network is cut into stages, as `["blocks.3"]`; none: where the slowest stage
        /// is as fast as can be, as measured when the run begins
        cuts: list(text(), &[], "an array of layer names") => |s| Some(&mut s.cuts); or "none";
        /// each rank of `data` keeps only its part of the weights, gradients and optimizer state; layers are
        /// gathered ahead of their use
        shard_weights: auto(flag()) => ParallelSpec::shard_weights_key, ParallelSpec::set_shard_weights_key;
        /// threads of each rank; auto: the cores that the rank has
        threads: auto(whole(1..=THREADS_MAX)) => |s| Some(&mut s.threads);
        /// what ranks communicate over, see below
        transport: transport => |s| Some(&mut s.transport);
        /// whether what ranks send over sockets is encrypted; auto: where it leaves a host. It must be the same
        /// on all ranks
        encrypt: auto(flag()) => |s| Some(&mut s.encrypt);
        /// batch norm takes the statistics of all ranks' samples
        sync_batch_norm: flag() => |s| Some(&mut s.sync_batch_norm);
        /// weights have the same bits on any number of ranks
        reproducible: flag() => |s| Some(&mut s.reproducible);
        /// how many microbatches a reproducible step is cut into; must divide `train.batch`
        shards: whole(1..=SHARDS_MAX) => |s| Some(&mut s.shards); or "8";
        /// each rank keeps the optimizer state of its own range of the parameters only; auto: where ranks share
        /// memory
        shard_optimizer: auto(flag()) => |s| Some(&mut s.shard_optimizer);
        /// each rank keeps the gradients of its own range only, and so the optimizer state too
        shard_gradients: auto(flag()) => ParallelSpec::shard_gradients_key, ParallelSpec::set_shard_gradients_key;
        /// how much of the gradients is reduced at once
        bucket_mib: within(BUCKET_MIB) => |s| Some(&mut s.bucket_mib);
        /// the format in which gradients, or with `sync = "local"` differences of weights, travel between ranks of `data` that are connected by a
        /// network, see below
        wire: table() => |s| Some(&mut s.wire); or "`\"f32\"`";
        /// how the ranks of `data` agree, see below and `docs/dial.md`
        sync: sync::sync() => ParallelSpec::sync_key, ParallelSpec::set_sync_key;
        /// with `sync = "local"`: how many steps ranks take by themselves, see below; fewer before an evaluation, a checkpoint or the end
        every: sync::every() => |s| Some(&mut s.every); or "50";
        /// with `sync = "local"`: an outer step with Nesterov's momentum towards the mean of the weights; none: they become that mean
        outer: maybe(table()) => |s| Some(&mut s.outer);
        /// with `sync = "local"`: in how many parts, which take turns, the model is exchanged, each once in `every` steps; 1: all of it at once
        fragments: whole(1..=FRAGMENTS_MAX) => |s| Some(&mut s.fragments); or "1";
        /// with `fragments`: how many steps ranks take while a part is exchanged
        overlap: whole(0..=EVERY_MAX) => |s| Some(&mut s.overlap); or "0";
        /// with `sync = "local"`: parameters that each rank keeps for itself, as names or paths of layers with `*` for any characters: `["head.*"]`
        own: patterns() => |s| Some(&mut s.own); or "none";
        /// with `sync = "ps-bounded"`: how many steps a rank may be ahead of the slowest when it asks for weights
        staleness: whole(0..=STALENESS_MAX) => |s| Some(&mut s.staleness); or "3";
        /// with `sync = "ps"`, `"ps-bounded"` or `"ps-async"`: how many parameter servers hold the weights; the first ranks host one each. A table: ranks that do
        /// nothing else
        servers: sync::servers() => |s| Some(&mut s.servers); or "1";
        /// ranks may be lost and may join while training goes on, see `docs/elastic.md`
        elastic: maybe(table()) => |s| Some(&mut s.elastic);
        /// how samples are divided among ranks: equally, by measured speed, in proportion to these weights; or
        /// `"hosts"`, by measured speed where ranks are on several hosts that differ, and equally on one
        balance: balance => |s| Some(&mut s.balance);
        /// threads rest while other programs need the cores of a host, and come back; weights have the same bits
        follow_load: flag() => |s| Some(&mut s.follow_load);
        /// seconds after which a silent rank counts as lost, since its host vanished. A process that ends is
        /// noticed at once; one that computes, reads, writes or is paused for less is waited for
        patience: real(SECONDS) => |s| Some(&mut s.patience);
        /// seconds without progress on any rank, though all of them are alive, after which the run ends with a
        /// report. A rank that uses its processor makes progress
        stall: real(SECONDS) => |s| Some(&mut s.stall);
    }
}

section! { Elastic => {
    let keys = keys! { Elastic;
        /// with fewer ranks the run saves and waits for more
        min: whole(1..=RANKS_MAX) => |s| Some(&mut s.min);
        /// more ranks than this wait until there is room
        max: whole(1..=RANKS_MAX) => |s| Some(&mut s.max);
        /// a rank that takes this many times as long as the others for the same work, for a while, leaves, unless too few would be left
        leave_out: maybe(real(LEAVE_OUT)) => |s| Some(&mut s.leave_out); or "a slow rank is reported, and stays";
        /// where an etcd cluster keeps who coordinates, as `"etcd://HOST:PORT,HOST:PORT/PREFIX"`; the prefix is this run's own
        store: maybe(address()) => |s| Some(&mut s.store); or "the process that was started coordinates";
    };
    Section::new("parallel.elastic", "a table such as { min = 2, max = 16 }", |_| Elastic::default(), keys)
} }

fn check(spec: &mut ParallelSpec, c: &Cursor) {
    if let Balance::Given(weights) = &spec.balance {
        let each = spec.replica_ranks();
        let (got, want) =
            (weights.len(), spec.asked_ranks().map_or(weights.len(), |ranks| ranks.div_ceil(each)));
        if got != want || got == 0 {
            let message = match want {
                0 | 1 => format!("`parallel.balance` has {got} weights for 1 rank"),
                _ => format!("`parallel.balance` has {got} weights for {want} ranks"),
            };
            c.fault("balance", message, "write one weight for each rank, or \"auto\"");
        }
        // The weights say how many ranks there are.
        spec.ranks = spec.ranks.or(Some(want * each));
    }
    mesh::check(spec, c);
    wire::check(spec, c);
    sync::check(spec, c);
    if spec.stall < spec.patience {
        let message = format!(
            "`parallel.stall` of {} s is shorter than `parallel.patience` of {} s: a rank that makes no progress would \
             end the run before it counts as lost",
            spec.stall, spec.patience
        );
        let key = if c.has("stall") { "stall" } else { "patience" };
        c.fault(key, message, "choose a stall of at least the patience");
    }
    if !spec.reproducible && c.has("shards") {
        let hint = "write reproducible = true, or leave `shards` out";
        c.fault("shards", "`parallel.shards` is for reproducible runs", hint);
    }
    if spec.reproducible && spec.sync_batch_norm {
        let message = "`parallel.sync_batch_norm` needs all samples of a step at once, but shards are computed one by one";
        c.fault("sync_batch_norm", message, "leave it out, or leave `reproducible` out");
    }
}

/// What does not go together with `[train]`; `c` is in `[parallel]`.
pub(super) fn check_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    if let Some((message, hint)) = spec.refuses_to_shard(&train.optimizer) {
        c.fault("shard_gradients", message, hint);
    }
    mesh::check_with(spec, train, c);
    wire::check_with(spec, train, c);
    sync::check_with(spec, train, c);
    if let Some((message, hint)) = spec.refuses_elastic(train) {
        c.fault("elastic", message, hint);
    }
    if !spec.reproducible {
        return;
    }
    let key = if c.has("shards") { "shards" } else { "reproducible" };
    if !train.batch.is_multiple_of(spec.shards) {
        let message =
            format!("`parallel.shards` of {} does not divide `train.batch` of {}", spec.shards, train.batch);
        let near = (1..=spec.shards).rev().find(|n| train.batch.is_multiple_of(*n)).unwrap_or(1);
        c.fault(key, message, format!("shards = {near} would"));
    }
    let data = spec.data.or(spec.ranks.map(|ranks| ranks / spec.replica_ranks()));
    if let Some(ranks) = data.filter(|&ranks| ranks > spec.shards) {
        let message =
            format!("`parallel.shards` of {} leaves some of {ranks} ranks without work", spec.shards);
        c.fault(key, message, "choose at least as many shards as ranks");
    }
    if train.accumulate > 1 {
        let message = "`train.accumulate` and `parallel.reproducible` both cut a step into microbatches";
        c.fault("reproducible", message, "leave `accumulate` out and raise `shards`");
    }
}

impl ParallelSpec {
    /// Why ranks cannot come and go, and what to write instead; `None` if they can, or need not.
    pub fn refuses_elastic(&self, train: &TrainSpec) -> Option<(String, &'static str)> {
        let Elastic { min, max, .. } = *self.elastic.as_ref()?;
        let refused = |what: &str, hint| Some((format!("`parallel.elastic` {what}"), hint));
        if min > max {
            return refused(&format!("has min = {min} above max = {max}"), "choose a min of at most max");
        }
        if self.replica_ranks() > 1 {
            let hint = "leave `tensor`, `stage` and `sequence` out, or `elastic`";
            return refused("is for ranks that split the batch alone", hint);
        }
        if self.open.any() {
            let what = format!(
                "changes the number of ranks, and a plan for `{}` would be for one",
                self.open.names().join("`, `")
            );
            return refused(&what, "leave keys with \"auto\" out");
        }
        if self.data.is_some() {
            return refused("changes the number of ranks", "leave `data` out");
        }
        if self.shard_weights || self.shard_gradients || self.shard_optimizer == Some(true) {
            let hint = "leave `shard_weights`, `shard_gradients` and `shard_optimizer` out, or `elastic`";
            return refused("keeps the whole state on every rank, so that none is lost with one", hint);
        }
        if self.wire.is_coded() {
            let what = "does not work with `parallel.wire`: what rounding left out in a step that is done again cannot be given back";
            return refused(what, "leave `wire` out, or `elastic`");
        }
        if self.agrees_by(SyncKind::Local) {
            let what = "does not work with `parallel.sync = \"local\"`: what a rank learnt since the last exchange would be lost with it";
            return refused(what, "leave `sync` out, or `elastic`");
        }
        if self.sync == SyncKind::Ps {
            let what = "does not work with `parallel.sync = \"ps\"`: servers have applied a step before every rank has its weights";
            return refused(what, "write sync = \"ps-async\" or \"ps-bounded\", or leave `sync` out");
        }
        if matches!(self.balance, Balance::Given(_)) {
            return refused("changes the number of ranks", "leave `balance` out, or write \"auto\"");
        }
        match self.transport {
            Transport::Auto | Transport::Tcp | Transport::Shm => {}
            Transport::Mpi => {
                let what = "does not work over MPI, which ends all ranks when one is lost";
                return refused(what, "write transport = \"tcp\"");
            }
            Transport::Local => {
                return refused("needs ranks that are processes", "write transport = \"shm\" or \"tcp\"");
            }
        }
        if self.reproducible && max > self.shards {
            let what = format!("has max = {max}, and a reproducible step is cut into {} shards", self.shards);
            return refused(&what, "choose a max of at most `shards`, or more shards");
        }
        if train.ema.is_some() {
            let hint = "leave `train.ema` out, or `elastic`";
            return refused("does not work with `train.ema`, whose averages only rank 0 keeps", hint);
        }
        if train.precision == PrecisionKind::Auto {
            let hint = "name a `train.precision`";
            return refused(
                "does not work with `train.precision = \"auto\"`, which ranks measure together",
                hint,
            );
        }
        None
    }

    /// Why gradients cannot be sharded, and what to write instead; `None` if they can, or need not be.
    pub(crate) fn refuses_to_shard(&self, optimizer: &OptimizerSpec) -> Option<(String, &'static str)> {
        if !self.shard_gradients {
            return None;
        }
        if !optimizer.rule.by_element() {
            let message = format!(
                "`parallel.shard_gradients` does not work with the optimizer \"{}\", which needs the gradients of whole \
                 tensors on every rank",
                optimizer.kind()
            );
            return Some((message, "choose \"adamw\", or leave `shard_gradients` out"));
        }
        if self.reproducible {
            let message = "`parallel.shard_gradients` does not work with `reproducible`, which adds up whole gradients \
                           in a fixed tree";
            return Some((message.into(), "leave one of them out"));
        }
        if self.is_flushless() {
            let message = "`parallel.schedule = \"2bw\"` does not work with `parallel.shard_gradients`: ranks would wait for \
                           each other's part of every update";
            let hint =
                "leave `shard_gradients` out, or use \"zb-h1\", which waits little and has no old gradients";
            return Some((message.into(), hint));
        }
        if self.shard_optimizer == Some(false) {
            let message = "`parallel.shard_gradients` needs `shard_optimizer`: with its part of the gradients, a rank \
                           can update that part only";
            return Some((message.into(), "leave `shard_optimizer` out"));
        }
        None
    }
}
