//! The mesh of a job: how many ranks there are along each axis, and into how many microbatches they cut a step.

use polyreme_parallel::Mesh;
use polyreme_parallel::pipeline::{PipelineKind, timetable};

use super::cursor::Cursor;
use super::spec::{Balance, ParallelSpec, PrecisionKind, TrainSpec};

impl ParallelSpec {
    /// The keys by which no rank has the whole model with all of its state.
    pub(super) fn splits(&self) -> impl Iterator<Item = &'static str> {
        let keys = [
            ("tensor", self.tensor > 1),
            ("stage", self.stage > 1),
            ("sequence", self.sequence > 1),
            ("shard_weights", self.shard_weights),
            ("shard_gradients", self.shard_gradients),
            ("shard_optimizer", self.shard_optimizer == Some(true)),
        ];
        keys.into_iter().filter_map(|(key, set)| set.then_some(key))
    }

    /// How many ranks have the whole model together.
    pub fn replica_ranks(&self) -> usize {
        self.tensor * self.stage * self.sequence
    }

    /// How many ranks the job asks for, if it does: not while an axis is left to the planner.
    pub fn asked_ranks(&self) -> Option<usize> {
        let open = self.open.tensor || self.open.stage || self.open.sequence;
        self.ranks.or(self.data.filter(|_| !open).map(|data| data * self.replica_ranks()))
    }

    /// How `ranks` ranks are arranged, or why they cannot be.
    pub fn mesh(&self, ranks: usize) -> Result<Mesh, String> {
        let ParallelSpec { tensor, stage, sequence, .. } = *self;
        let each = self.replica_ranks();
        let axes = self.axes();
        if !ranks.is_multiple_of(each) || ranks == 0 {
            let (below, above) = (ranks / each * each, ranks.next_multiple_of(each).max(each));
            let near = if below > 0 { format!("{below} or {above}") } else { above.to_string() };
            return Err(format!(
                "{axes} make {each} ranks for each copy of the model, and {ranks} cannot be divided by {each}; use {near} ranks"
            ));
        }
        let mesh = Mesh { data: ranks / each, tensor, stage, sequence };
        match self.data {
            Some(data) if data != mesh.data => Err(format!(
                "data = {data} and {axes} make {} ranks, and there are {ranks}; leave `parallel.data` out, or use {} ranks",
                data * each,
                data * each
            )),
            _ => Ok(mesh),
        }
    }

    /// The axes that a copy of the model is split along, in words.
    fn axes(&self) -> String {
        let axes = [("tensor", self.tensor), ("stage", self.stage), ("sequence", self.sequence)];
        let split: Vec<_> =
            axes.iter().filter(|(_, n)| *n > 1).map(|(axis, n)| format!("{axis} = {n}")).collect();
        if split.is_empty() { "one rank".into() } else { split.join(", ") }
    }

    /// Whether stages go on from step to step without a flush.
    pub fn is_flushless(&self) -> bool {
        self.stage > 1 && self.schedule == PipelineKind::TwoBw
    }

    /// Into how many microbatches a step is cut: logical shards are the microbatches of a reproducible one.
    pub fn n_microbatches(&self, accumulate: usize) -> usize {
        match self.reproducible {
            true => self.shards,
            false => self.microbatches.unwrap_or(accumulate).max(1),
        }
    }

    /// Whether a step is cut into microbatches first, and each of these is shared over the ranks of the data axis, so that a
    /// microbatch is the same samples on any mesh.
    pub fn cuts_microbatches_first(&self) -> bool {
        self.replica_ranks() > 1 || self.microbatches.is_some() || self.sync_batch_norm
    }
}

/// What does not go together in the section itself.
pub(super) fn check(spec: &ParallelSpec, c: &Cursor) {
    if let Some(ranks) = spec.ranks.filter(|ranks| *ranks > 0)
        && let Err(why) = spec.mesh(ranks)
    {
        let named = ["ranks", "data", "tensor", "stage", "sequence"].into_iter().find(|key| c.has(key));
        let (message, hint) = why.rsplit_once("; ").unwrap_or((&why, ""));
        c.fault(
            named.unwrap_or("ranks"),
            format!("`parallel.ranks` is {ranks}: {message}"),
            hint.to_string(),
        );
    }
    for (key, wanted) in [("schedule", "a pipeline schedule"), ("cuts", "where a pipeline is cut")] {
        // A run that goes on with one stage has them from before.
        if c.has(key) && !c.has("stage") {
            let message = format!("`parallel.{key}` is {wanted}, and the job has one stage");
            c.fault(key, message, "write `stage = 2` or more, or leave it out");
        }
    }
    if c.has("flush_every") && !c.has("schedule") {
        let message = "`parallel.flush_every` is for pipelines that go on from step to step without a flush";
        c.fault("flush_every", message, "write schedule = \"2bw\", or leave it out");
    }
    if spec.is_flushless() {
        check_flushless(spec, c);
    }
    let chunks = spec.stage * spec.schedule.chunks_per_stage();
    if spec.stage > 1 && !spec.cuts.is_empty() && spec.cuts.len() + 1 != chunks {
        let (got, want, schedule) = (spec.cuts.len(), chunks - 1, spec.schedule);
        let message = format!(
            "`parallel.cuts` names {got} layers, and a \"{schedule}\" pipeline of {} stages is cut before {want}",
            spec.stage
        );
        c.fault("cuts", message, format!("name {want} layers, or leave `cuts` out"));
    }
    if spec.replica_ranks() > 1 && spec.balance == Balance::Auto {
        let message = "`parallel.balance = \"auto\"` measures single ranks, and here several have a copy of the model together";
        c.fault("balance", message, "write \"equal\", or one weight for each rank of the data axis");
    }
}

/// What stages that go on from step to step cannot have.
fn check_flushless(spec: &ParallelSpec, c: &Cursor) {
    let refuse = |key: &str, why: &str| {
        let message = format!("`parallel.schedule = \"2bw\"` does not work with `parallel.{key}`: {why}");
        c.fault(
            key,
            message,
            format!("leave `{key}` out, or use \"zb-h1\", which waits little and has no old gradients"),
        );
    };
    if spec.reproducible {
        refuse("reproducible", "gradients that are one step old are not those of one rank");
    }
    if spec.shard_weights {
        refuse("shard_weights", "passes read two versions of the weights, and shards are gathered from one");
    }
    if spec.shard_optimizer == Some(true) {
        refuse("shard_optimizer", "ranks would wait for each other's part of every update");
    }
}

/// What does not go together with `[train]`; `c` is in `[parallel]`.
pub(super) fn check_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    let n = spec.n_microbatches(train.accumulate);
    if let Some(microbatches) = spec.microbatches {
        if train.accumulate > 1 && train.accumulate != microbatches {
            let message = format!(
                "`parallel.microbatches` is {microbatches} and `train.accumulate` is {}; both say into how many microbatches a step is cut",
                train.accumulate
            );
            c.fault("microbatches", message, "leave one of them out");
        }
        if spec.reproducible && microbatches != spec.shards {
            let message = format!(
                "`parallel.microbatches` is {microbatches}, and a reproducible step is cut into its {} shards",
                spec.shards
            );
            c.fault("microbatches", message, "leave it out, and set `shards`");
        }
    }
    let data = spec.data.or(spec.ranks.map(|ranks| ranks / spec.replica_ranks())).unwrap_or(1).max(1);
    let key = if c.has("microbatches") { "microbatches" } else { "stage" };
    if spec.cuts_microbatches_first() && !spec.reproducible && train.batch < n * data && (c.has(key) || n > 1)
    {
        let message = format!(
            "`train.batch` of {} is too small for {n} microbatches that {data} data ranks share: {} samples are needed",
            train.batch,
            n * data
        );
        c.fault(key, message, "use fewer microbatches or data ranks, or a larger batch");
    }
    if spec.stage > 1
        && let Err(why) = timetable(spec.schedule, spec.stage, n)
    {
        c.fault("schedule", why, "");
    }
    if spec.is_flushless() && train.precision == PrecisionKind::F16 {
        let message = "`parallel.schedule = \"2bw\"` does not work with `train.precision = \"f16\"`: the next step's passes begin before \
                       it is known whether this one overflowed";
        c.fault("schedule", message, "use precision = \"bf16\", or the schedule \"zb-h1\"");
    }
}

/// The schedules of job files, with words about each.
pub(super) fn schedules() -> impl Iterator<Item = (&'static str, PipelineKind, &'static str)> {
    PipelineKind::ALL.into_iter().map(|kind| {
        let words = match kind {
            PipelineKind::Gpipe => "all forward passes, then all backward passes",
            PipelineKind::OneFOneB => "one forward, one backward: as few activations as the pipeline is deep",
            PipelineKind::Interleaved { .. } => {
                "1f1b over two parts of the network for each stage: less waiting, more messages"
            }
            PipelineKind::ZbH1 => "1f1b with weight gradients where stages would wait",
            PipelineKind::ZbV => {
                "two parts for each stage, down and up again, with weight gradients where stages would wait"
            }
            PipelineKind::TwoBw => {
                "1f1b that goes on from step to step: stages wait once in `flush_every` steps, and gradients are one step old"
            }
        };
        (kind.name(), kind, words)
    })
}
