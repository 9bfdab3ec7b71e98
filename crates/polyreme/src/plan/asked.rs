//! A job as the question of a search.

use std::collections::BTreeSet;

use polyreme_exec::Isa;
use polyreme_graph::{Graph, Precision, Program};
use polyreme_parallel::{Norms, Plan};
use polyreme_sim::search::{FixedKeys, Question, Sharding};
use polyreme_train::job::{Job, PrecisionKind};
use polyreme_train::lower::{Lowering, step_graph, training_graph};
use polyreme_train::run::{Given, plan};
use polyreme_train::{TrainError, sets};

use crate::bench::jobs::BenchJob;
use crate::process;

/// The fewest samples that batch norms take statistics from, as where a run chooses the number of ranks itself.
const STATISTICS_MIN: usize = 32;

/// A job with everything that a question borrows.
pub struct AskedJob {
    job: BenchJob,
    base: Plan,
    batch: usize,
    least_samples: usize,
    precisions: Vec<(&'static str, Precision)>,
    fixed: FixedKeys,
    isa: Isa,
    /// Samples of an epoch, if the data are there.
    pub epoch_samples: Option<usize>,
}

impl AskedJob {
    /// A job, and which of its keys were said. Data are opened for their sizes; where `[model]` gives all sizes they need not be
    /// there.
    pub fn new(job: Job, said: &BTreeSet<String>, given: Given) -> Result<AskedJob, TrainError> {
        let isa = given.isa;
        let epoch_samples = match &given.sets {
            Some(sets) => Some(sets.train.len()),
            None => sets::open_as(&mut job.clone(), None, isa).ok().map(|sets| sets.train.len()),
        };
        let epoch_samples = epoch_samples.map(|n| ((n as f64 * job.data.fraction).ceil() as usize).max(1));
        let precisions = match job.train.precision {
            PrecisionKind::Auto => {
                let both = [PrecisionKind::F32, PrecisionKind::Bf16];
                both.map(|kind| (kind.name(), job.precision_as(kind))).to_vec()
            }
            kind => vec![(kind.name(), job.precision())],
        };
        let bench = BenchJob::of(job.clone(), given)?;
        // Two samples: statistics of one make no sense.
        let has_statistics = !training_graph(&bench.net, &bench.spec, 2, bench.loss)?.updates.is_empty();
        let (parallel, train) = (&job.parallel, &job.train);
        let base = plan(parallel, parallel.n_microbatches(train.accumulate), has_statistics);
        let alone = has_statistics && base.norms == Norms::Local;
        Ok(AskedJob {
            base,
            batch: epoch_samples.map_or(train.batch, |n| train.batch.min(n)),
            least_samples: if alone { STATISTICS_MIN } else { 1 },
            precisions,
            fixed: fixed(&job, said),
            isa,
            epoch_samples,
            job: bench,
        })
    }

    /// Samples of a step.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// The same job with other steps.
    pub fn set_batch(&mut self, batch: usize) {
        self.batch = batch.max(1);
    }

    /// The precisions to choose from, by name.
    pub fn precision(&self, number: usize) -> &'static str {
        self.precisions[number].0
    }

    /// What the job has decided, for flags to add to.
    pub fn fixed_mut(&mut self) -> &mut FixedKeys {
        &mut self.fixed
    }

    /// Fixes what the job leaves to be searched as it is without a search, except how many ranks there are.
    pub fn fix_defaults(&mut self) {
        let fixed = &mut self.fixed;
        let (mesh, n) = (&self.base.mesh, self.base.microbatches);
        fixed.tensor = fixed.tensor.or(Some(mesh.tensor));
        fixed.stage = fixed.stage.or(Some(mesh.stage));
        fixed.sequence = fixed.sequence.or(Some(mesh.sequence));
        fixed.microbatches = fixed.microbatches.or(Some(n));
        fixed.schedule = fixed.schedule.or(Some(self.base.pipeline));
        fixed.sharding = fixed.sharding.or(Some(Sharding::Usual));
    }

    /// Asks something of the job as a question.
    pub fn with<T>(&self, ask: impl FnOnce(&Question) -> T) -> T {
        let job = &self.job;
        let step = |samples: usize| -> Result<Graph, String> {
            let forward =
                training_graph(&job.net, &job.spec, samples, job.loss).map_err(|e| e.to_string())?;
            step_graph(&forward).map_err(|e| e.to_string())
        };
        let bytes_of = |program: &Program, threads: usize| {
            let (training, plan) = (job.training, Plan::alone());
            let lowering = Lowering { training, plan, budget_bytes: None, threads, isa: self.isa };
            lowering.rank_bytes(program)
        };
        ask(&Question {
            step: &step,
            training: job.training,
            batch: self.batch,
            least_samples: self.least_samples,
            bytes_of: &bytes_of,
            process_bytes: process::bytes_before_training(),
            precisions: &self.precisions,
            base: &self.base,
            fixed: self.fixed,
        })
    }
}

/// The keys that a job has decided, of those that it says: not those that are `"auto"`.
pub fn decided(job: &Job, mut said: BTreeSet<String>) -> BTreeSet<String> {
    let parallel = &job.parallel;
    let open = [
        ("ranks", parallel.ranks.is_none()),
        ("data", parallel.data.is_none()),
        ("threads", parallel.threads.is_none()),
        ("shard_optimizer", parallel.shard_optimizer.is_none()),
    ];
    let open = open.into_iter().filter(|(_, open)| *open).map(|(key, _)| key);
    for key in open.chain(parallel.open.names()) {
        said.remove(&format!("parallel.{key}"));
    }
    said
}

/// What a job has decided: keys that it sets.
fn fixed(job: &Job, said: &BTreeSet<String>) -> FixedKeys {
    let parallel = &job.parallel;
    let is_said = |key: &str| said.contains(key);
    let axis = |key: &str, n: usize| is_said(key).then_some(n);
    let cut = parallel.microbatches.is_some() || job.train.accumulate > 1;
    let keys = ["shard_weights", "shard_gradients", "shard_optimizer"];
    let sharding = match (parallel.shard_weights, parallel.shard_gradients, parallel.shard_optimizer) {
        (true, ..) => Some(Sharding::Weights),
        (false, true, _) => Some(Sharding::Gradients),
        (false, false, Some(true)) => Some(Sharding::Optimizer),
        (false, false, Some(false)) => Some(Sharding::Nothing),
        // What is said to be false is not done.
        (false, false, None) => {
            keys.iter().any(|key| is_said(&format!("parallel.{key}"))).then_some(Sharding::Usual)
        }
    };
    FixedKeys {
        ranks: parallel.ranks,
        data: parallel.data,
        tensor: axis("parallel.tensor", parallel.tensor),
        stage: axis("parallel.stage", parallel.stage),
        sequence: axis("parallel.sequence", parallel.sequence),
        microbatches: cut.then(|| parallel.n_microbatches(job.train.accumulate)),
        schedule: is_said("parallel.schedule").then_some(parallel.schedule),
        sharding,
        ranks_per_host: None,
        threads: parallel.threads,
        memory_bytes: job.train.memory_mib.map(|mib| mib << 20),
    }
}
