//! A job as the question of a search.

use std::collections::BTreeSet;

use polyreme_exec::Isa;
use polyreme_graph::{Graph, Precision, Program};
use polyreme_parallel::{Norms, Plan};
use polyreme_sim::search::{FixedKeys, FoundPlan, Question, Sharding};
use polyreme_sim::{Cluster, InsideBy};
use polyreme_train::job::{Job, PrecisionKind, ServersSpec, SyncKind};
use polyreme_train::lower::{Lowering, step_graph, training_graph};
use polyreme_train::run::{Given, Lodging, Prepared, plan};
use polyreme_train::sets::{self, Opening, Sets};
use polyreme_train::{Net, TrainError};

use super::{chosen, tried};
use crate::bench::jobs::BenchJob;
use crate::{memory, process};

/// The fewest samples that batch norms take statistics from, as where a run chooses the number of ranks itself.
const STATISTICS_MIN: usize = 32;

/// A job with everything that a question borrows.
pub struct AskedJob {
    job: BenchJob,
    base: Plan,
    /// How far ranks may run ahead of the slowest, if there are servers that hold them back.
    staleness: Option<usize>,
    batch: usize,
    least_samples: usize,
    precisions: Vec<(&'static str, Precision)>,
    fixed: FixedKeys,
    isa: Isa,
    /// The job as it was asked, what it has decided, and its network if a program brings one.
    asked: (Job, BTreeSet<String>, Option<Net>),
    /// Its data, if they are there.
    sets: Option<Sets>,
    /// What this process has, with the data, before a search.
    process_bytes: usize,
    /// Samples of an epoch, if the data are there.
    pub epoch_samples: Option<usize>,
}

impl AskedJob {
    /// The job as it was asked.
    pub fn job(&self) -> &Job {
        &self.asked.0
    }

    /// A job, and which of its keys were said. Data are opened for their sizes; where `[model]` gives all sizes they need not be
    /// there.
    pub fn new(job: Job, said: &BTreeSet<String>, given: Given) -> Result<AskedJob, TrainError> {
        if let Some(turn) = job.parallel.turn {
            let (start, then) = (turn.start.name(), turn.then.name());
            let why = format!(
                "a plan is for one way to agree, and `parallel.sync` turns from \"{start}\" to \"{then}\"; add --set \
                 parallel.sync={start} or --set parallel.sync={then}"
            );
            return Err(TrainError::Mesh(why));
        }
        let serves = matches!(job.parallel.sync, SyncKind::Ps | SyncKind::PsBounded | SyncKind::PsAsync);
        if serves && matches!(job.parallel.servers, ServersSpec::Apart(_)) {
            let why = "plans do not know ranks that only serve; add --set parallel.servers=1, or as many as are to be beside ranks";
            return Err(TrainError::Mesh(why.into()));
        }
        if serves && job.parallel.reproducible {
            let why = "plans do not know parameter servers of reproducible runs; add --set parallel.reproducible=false";
            return Err(TrainError::Mesh(why.into()));
        }
        let isa = given.isa;
        let opened = match &given.sets {
            Some(sets) => Some(sets.clone()),
            None => {
                let reading = Opening { memory_bytes: memory::free_bytes(), ..given.reading() };
                sets::open_as(&mut job.clone(), None, &reading).ok()
            }
        };
        let epoch_samples = opened.as_ref().map(|sets| sets.train.len());
        let epoch_samples = epoch_samples.map(|n| ((n as f64 * job.data.fraction).ceil() as usize).max(1));
        let precisions = match job.train.precision {
            PrecisionKind::Auto => {
                let both = [PrecisionKind::F32, PrecisionKind::Bf16];
                both.map(|kind| (kind.name(), job.precision_as(kind))).to_vec()
            }
            kind => vec![(kind.name(), job.precision())],
        };
        let net = given.net.clone();
        let bench = BenchJob::of(job.clone(), given)?;
        // Two samples: statistics of one make no sense.
        let has_statistics = !training_graph(&bench.net, &bench.spec, 2, bench.loss)?.updates.is_empty();
        let (parallel, train) = (&job.parallel, &job.train);
        let mut base = plan(parallel, parallel.n_microbatches(train.accumulate), has_statistics);
        if base.local.is_some() {
            base.run_steps = parallel.steps_apart();
        }
        let alone = has_statistics && base.norms == Norms::Local;
        let bounded = parallel.sync == SyncKind::PsBounded;
        Ok(AskedJob {
            base,
            staleness: bounded.then_some(parallel.staleness),
            batch: epoch_samples.map_or(train.batch, |n| train.batch.min(n)),
            least_samples: if alone { STATISTICS_MIN } else { 1 },
            precisions,
            fixed: fixed(&job, said),
            isa,
            asked: (job, said.clone(), net),
            sets: opened,
            process_bytes: process::bytes_of_a_planned_process(),
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

    /// What the largest process of a run with this plan takes, as the run itself counts it: with evaluations, batches that are read
    /// ahead, and what checkpoints are made of. Without the data, what its ranks' programs take.
    pub fn run_bytes(&self, plan: &FoundPlan, cluster: &Cluster) -> usize {
        self.counted_bytes(plan, cluster).unwrap_or(plan.process_bytes)
    }

    fn counted_bytes(&self, plan: &FoundPlan, cluster: &Cluster) -> Option<usize> {
        let (job, said, net) = &self.asked;
        let auto = job.train.precision == PrecisionKind::Auto;
        let keys = chosen::keys(plan, cluster, self.precision(plan.choice.precision), said, auto);
        let job = chosen::applied(job, &chosen::settings(&keys, &job.parallel.open.names())).ok()?;
        let seating = plan.choice.seating;
        let sets = Some(self.sets.clone()?);
        let given = Given { net: net.clone(), sets, isa: self.isa, ..Given::default() };
        // Not as rank 0, which would read all of the data for their mean.
        let prepared = Prepared::of_rank(job, given, seating.ranks() * seating.threads, 1).ok()?;
        let threads = cluster.inside.by == InsideBy::Threads;
        let lodging = Lodging {
            here: seating.ranks_per_host,
            threads,
            shared: seating.hosts == 1 && cluster.inside.by != InsideBy::Sockets,
            together: true,
            flag: None,
        };
        let need = prepared.fit(lodging, &[]).ok()?;
        Some(self.process_bytes + if threads { need.host } else { need.mapped })
    }

    /// The fastest of the first plans, as tried here, and the milliseconds of its step; see [`tried::fastest`].
    pub fn tried<'p>(
        &self,
        plans: &'p [FoundPlan],
    ) -> Result<Option<(&'p FoundPlan, f64)>, Box<dyn std::error::Error + Send + Sync>> {
        tried::fastest(&self.job, self.batch, plans, self.isa)
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
            process_bytes: self.process_bytes,
            precisions: &self.precisions,
            base: &self.base,
            staleness: self.staleness,
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
    // Replicas that do not sum gradients as they are have the whole model each.
    let whole = parallel.sync != SyncKind::AllReduce || parallel.wire.codec().is_some();
    let axis = |key: &str, n: usize| if whole { Some(1) } else { axis(key, n) };
    let sharding = if whole { Some(Sharding::Usual) } else { sharding };
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
