//! A job with its data and its network, checked: everything that can be wrong is said before anything is written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_collective::{Comm, Doing};
use polyreme_data::by_length::{ByLength, length_ends};
use polyreme_data::remote::RemoteEnv;
use polyreme_data::{
    Augment, Dataset, Features, Mode, Order, Spec, Stats, Target, Transform, balanced_weights,
};
use polyreme_exec::Isa;
use polyreme_graph::{Axis, Keeps, Program, cost};
use polyreme_parallel::pipeline::across_steps;
use polyreme_parallel::stage::flops;
use polyreme_parallel::tree::SumsOfRanks;
use polyreme_parallel::{
    DriftBound, FragmentTurns, LocalSteps, Mesh, Norms, OuterStep, Plan, Training, Updates, choose,
};

use super::layer_paths::check_f32_layers;
use super::measured_cuts::CutsFrom;
use super::planned_step::PlannedStep;
use super::seats::{Seats, seats};
use super::trial_run::PrecisionTrial;
use super::tuned::{check_tuning, frozen_numel};
use crate::error::TrainError;
use crate::event::Outline;
use crate::flush::Flushes;
use crate::job::{
    Balance, ClassWeights, EverySpec, Job, OrderSpec, OuterSpec, ParallelSpec, PrecisionKind, SyncKind,
};
use crate::learner::LearnerOptions;
use crate::loss::Loss;
use crate::lower::{evaluation_graph, step_graph, training_graph};
use crate::net::Net;
use crate::pace::{CutOrder, Pace, RankShare, StepCut};
use crate::preparation::Preparation;
use crate::schedule::Horizon;
use crate::sets::{Opening, Sets, open_as};
use crate::slowness::Slowness;

/// So many samples, evenly spread, are enough to know mean and deviation.
const STATS_SAMPLES: usize = 20_000;

/// What a job defined in Rust brings itself.
#[derive(Clone, Default)]
pub struct Given {
    /// The network, instead of `[model]`.
    pub net: Option<Net>,
    /// The data, instead of `[data]`'s source.
    pub sets: Option<Sets>,
    /// The instructions that kernels may use.
    pub isa: Isa,
    /// How much memory is free, if the caller can say so.
    pub memory_bytes: Option<usize>,
    /// What the caller knows of stores that data may be in.
    pub remote: RemoteEnv,
}

impl Given {
    /// How sets are opened.
    pub fn reading(&self) -> Opening {
        Opening { isa: self.isa, memory_bytes: self.memory_bytes, remote: self.remote.clone() }
    }
}

/// A job, ready to run. A copy is cheap: data and networks are shared.
#[derive(Clone)]
pub struct Prepared {
    /// The job, with everything resolved.
    pub job: Job,
    /// The network.
    pub net: Net,
    /// The data.
    pub sets: Sets,
    /// The training set's samples.
    pub spec: Spec,
    /// Epochs and steps.
    pub pace: Pace,
    /// How steps are cut, and so how many ranks there are.
    pub cut: StepCut,
    /// Threads of each rank.
    pub threads: usize,
    /// The normalisation.
    pub stats: Option<Stats>,
    /// The normalisation of numbers that are to be predicted.
    pub target_stats: Option<Stats>,
    /// How engines are made.
    pub learner: LearnerOptions,
    /// The machine and the program, for the report.
    pub system: Vec<(String, String)>,
    /// The host of each rank; empty if they are all on this one.
    pub hosts: Vec<String>,
    /// What the process has in memory before training: its code, and data that are held there. 0 if it is not known.
    pub process_bytes: usize,
    /// What the process has had in memory at most, if the caller can say so.
    pub peak_bytes: Option<fn() -> usize>,
    /// What was predicted of the run, if a planner chose how it is split; rank 0's.
    pub planned: Option<PlannedStep>,
    /// Where a timeline of all ranks goes; all ranks have it, or none.
    pub trace: Option<PathBuf>,
    /// Whether a run may go on with data that changed since it began.
    pub changed_data: bool,
    /// The precision and the figures that it was chosen by, if it was.
    pub measured: Option<String>,
    /// Where the cuts between stages come from.
    pub cuts_from: CutsFrom,
    /// After how many steps ranks agree in another way, while they have not done them.
    pub turns_at: Option<u64>,
    /// How steps are slowed down, to try what that does.
    pub slowness: Slowness,
}

impl Prepared {
    /// Opens the data, fits the network to them, and checks that everything goes together. `cores` is what all
    /// ranks together have: "auto" ranks and threads come to it.
    pub fn new(job: Job, given: Given, cores: usize) -> Result<Prepared, TrainError> {
        Prepared::of_rank(job, given, cores, 0)
    }

    /// The same for a process whose first rank is `rank`. What is measured of the whole training set (mean and
    /// deviation, frequencies of classes) is left to rank 0, which tells the others when they start.
    pub fn of_rank(job: Job, given: Given, cores: usize, rank: usize) -> Result<Prepared, TrainError> {
        Prepared::build(job, given, cores, rank, None)
    }

    /// The same to use a model that was trained before: columns and classes of the data are found by the names that they
    /// had in training, and what only matters in training is not checked.
    pub fn to_use(
        job: Job,
        given: Given,
        cores: usize,
        trained: &Preparation,
    ) -> Result<Prepared, TrainError> {
        Prepared::build(job, given, cores, 0, Some(trained))
    }

    fn build(
        mut job: Job,
        given: Given,
        cores: usize,
        rank: usize,
        trained: Option<&Preparation>,
    ) -> Result<Prepared, TrainError> {
        if let Some(key) = job.parallel.open.names().first() {
            return Err(TrainError::Mesh(format!(
                "`parallel.{key}` is \"auto\", and only `polyreme train` plans for itself; put a plan into the job \
                 file with `polyreme plan JOB.toml --write`, with --hosts or --cluster for several machines"
            )));
        }
        job.take_folder()?;
        let reading = given.reading();
        let sets = match given.sets {
            Some(sets) => sets,
            None => open_as(&mut job, trained, &reading)?,
        };
        let sets = by_length(sets, job.data.order);
        if sets.validation.is_none() {
            let stop = job.train.early_stop.as_ref().filter(|s| is_of_validation(&s.metric));
            if let Some(stop) = stop.filter(|_| trained.is_none()) {
                return Err(TrainError::NoValidation { metric: stop.metric.clone() });
            }
            // The test set is never chosen by: the last model counts.
            job.output.best = job.output.best.take().filter(|metric| !is_of_validation(metric));
        }
        let spec = sets.train.spec().clone();
        let kind = job.train.loss;
        if !kind.takes(&spec.target) {
            return Err(TrainError::LossMisfit { loss: kind.name(), target: describe_target(&spec) });
        }
        // A job made in Rust may have the default, which is for classes.
        job.output.best =
            job.output.best.take().map(|best| if kind.has_metric(&best) { best } else { "val_loss".into() });
        let net = match given.net {
            Some(net) => net,
            None => {
                job.model.fit(&spec)?;
                Net::Model(job.model.model.clone())
            }
        };
        if job.model.lora.is_some() {
            job.learn_new_head(&evaluation_graph(&net, &spec, 2, kind)?);
        }
        let net = net.tuned(job.tuning());
        let order = order(&job, sets.train.as_ref());
        let train = &job.train;
        if let Some((message, hint)) = job.parallel.refuses_to_shard(&train.optimizer) {
            return Err(TrainError::ShardGradients { message, hint });
        }
        if order.epoch_len() == 0 {
            return Err(TrainError::Empty);
        }
        // A set smaller than a batch is one step; engines are made for what there is.
        let pace = Pace { samples: order.epoch_len(), batch: train.batch.min(order.epoch_len()) };
        let normalise = job.data.normalise && !spec.features.is_ids();
        let measured = normalise && rank == 0;
        let stats = measured.then(|| Stats::of(sets.train.as_ref(), STATS_SAMPLES)).transpose()?;
        let numbers = job.data.normalise && matches!(spec.target, Target::Numbers { .. });
        let target_stats =
            (numbers && rank == 0).then(|| Stats::of_targets(sets.train.as_ref())).transpose()?;
        let class_weights = class_weights(&job, sets.train.as_ref(), rank == 0)?;
        let loss = Loss {
            kind,
            label_smoothing: train.label_smoothing,
            class_weights: !class_weights.is_empty(),
            mixup: train.mixup > 0.0,
        };
        if loss.mixup && spec.features.has_ids() {
            return Err(TrainError::MixupOfIds);
        }
        // Two samples: statistics of one make no sense.
        let two = training_graph(&net, &spec, 2, loss)?;
        check_f32_layers(&job, &net, &spec)?;
        if trained.is_none() {
            check_tuning(&job, &two)?;
        }
        let precision = job.precision();
        let parallel = &job.parallel;
        let Seats { ranks, threads } = seats(parallel, cores, pace.batch, !two.updates.is_empty());
        let shards = parallel.reproducible.then_some(parallel.shards);
        let order = match parallel.cuts_microbatches_first() {
            true => CutOrder::Microbatches,
            false => CutOrder::Ranks,
        };
        let accumulate = parallel.n_microbatches(train.accumulate);
        let flushes = Flushes::every_step();
        let cut = StepCut { weights: vec![1.0], accumulate, order, shards, flushes };
        let learner = LearnerOptions {
            threads,
            inherits: false,
            isa: given.isa,
            seed: train.seed,
            training: Training {
                optimizer: train.optimizer.rule,
                moments: train.optimizer.moments,
                clip: train.clip,
                ema: train.ema,
                scaled: precision.scales_loss(),
            },
            loss,
            class_weights,
            memory_bytes: train.memory_mib.map(|mib| mib << 20),
            plan: Plan { precision, ..plan(parallel, accumulate, !two.updates.is_empty()) },
            keeps: keeps(parallel),
        };
        let system = Vec::new();
        let (process_bytes, trace, changed_data, planned) = (0, None, false, None);
        let prepared = Prepared {
            net,
            sets,
            spec,
            pace,
            cut,
            threads,
            stats,
            target_stats,
            learner,
            system,
            hosts: Vec::new(),
            process_bytes,
            peak_bytes: None,
            planned,
            trace,
            changed_data,
            measured: None,
            cuts_from: CutsFrom::default(),
            turns_at: job.parallel.turn.map(|turn| turn.after),
            slowness: Slowness::default(),
            job,
        };
        prepared.transform()?;
        prepared.for_ranks(ranks)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.mesh().ranks()
    }

    /// How they are arranged.
    pub fn mesh(&self) -> &Mesh {
        &self.learner.plan.mesh
    }

    /// The learning rate of a step.
    pub fn lr(&self, step: u64) -> f64 {
        let (pace, train) = (self.pace, &self.job.train);
        let (steps, steps_per_epoch) = (pace.total_steps(train.length), pace.steps_per_epoch());
        train.schedule.rate(train.optimizer.lr, step, Horizon { steps, steps_per_epoch })
    }

    /// A rank's place along the data axis, which says what samples it has.
    pub fn data_rank(&self, rank: usize) -> usize {
        // A worker that takes blocks does each of them alone.
        if self.learner.plan.is_free() { 0 } else { self.mesh().place(rank, Axis::Data) }
    }

    /// Plans for the way in which the job's ranks agree now; servers follow from how many ranks there are.
    pub(super) fn follow_sync(&mut self) {
        self.learner.plan.local = local_steps(&self.job.parallel);
    }

    /// The same for so many ranks, whatever the job says.
    pub fn for_ranks(mut self, ranks: usize) -> Result<Prepared, TrainError> {
        let mesh = self.job.parallel.mesh(ranks).map_err(TrainError::Mesh)?;
        self.learner.plan.mesh = mesh;
        self.learner.plan.servers = self.job.parallel.server_plan(mesh.data).map_err(TrainError::Mesh)?;
        self.cut.flushes = flushes(&self.job, self.pace, mesh.data, self.until());
        self.learner.plan.run_steps = self.cut.flushes.lengths(self.pace)[0];
        let data = mesh.data;
        let weights = match &self.job.parallel.balance {
            Balance::Given(weights) => weights.clone(),
            Balance::Hosts | Balance::Equal | Balance::Auto => self.worker_weights(data),
        };
        if weights.len() != data {
            return Err(TrainError::Balance { got: weights.len(), want: data });
        }
        self.cut.weights = if self.learner.plan.is_free() { vec![1.0] } else { weights };
        let (pace, cut) = (self.pace, &self.cut);
        let short = |n: &usize| *n > 0 && cut.least(pace, *n) == 0;
        let meets = self.learner.plan.norms == Norms::Synchronised && data > 1;
        if let Some(samples) = [pace.batch, pace.tail()].into_iter().find(|n| meets && short(n)) {
            return Err(TrainError::TooFew { samples, ranks: data });
        }
        if self.learner.plan.is_flushless() {
            // Fewer than asked for, if that makes microbatches alike, or if a rank's weight gives it no sample of some.
            let of_rank = |rank: usize| RankShare::new(pace, cut, rank).microbatches(0).len();
            let least = (0..data).map(of_rank).min().unwrap_or(0);
            across_steps(mesh.stage, least).map_err(TrainError::Mesh)?;
        }
        self.choose_parts()?;
        Ok(self)
    }

    /// What servers do with the sums of logical shards that are pushed to them, if the run is reproducible.
    pub(super) fn sums_of_ranks(&self) -> Option<SumsOfRanks> {
        Some(SumsOfRanks::new(self.cut.shards?, &self.cut.shard_runs()?))
    }

    /// A weight for each of so many data ranks: as many samples for each, and none for those that only serve.
    pub(super) fn worker_weights(&self, data: usize) -> Vec<f64> {
        let serving = self.learner.plan.servers.map_or(0, |servers| servers.serving);
        (0..data).map(|rank| if rank < serving { 0.0 } else { 1.0 }).collect()
    }

    /// Chooses which rank of a copy of the model has which part of it, once for all programs: all ranks come to the same.
    fn choose_parts(&mut self) -> Result<(), TrainError> {
        let said = self.job.parallel.cuts.clone();
        let plan = Plan { cuts: said, layouts: Default::default(), ..self.learner.plan.clone() };
        self.learner.plan = match plan.mesh.replica_ranks() {
            1 => plan,
            _ => {
                let forward = training_graph(&self.net, &self.spec, self.micro().max(2), self.learner.loss)?;
                let step = step_graph(&forward)?;
                choose(&step, &plan, &flops(&step), None)?
            }
        };
        Ok(())
    }

    /// Whether the texts of a step are filled up only as far as the longest of them needs. Parts of a model that several ranks
    /// have together are made for one length, and so are programs of several steps.
    pub fn fills_by_step(&self) -> bool {
        self.mesh().replica_ranks() == 1 && !self.learner.plan.runs_several_steps()
    }

    /// The longest microbatch of rank 0.
    pub fn micro(&self) -> usize {
        RankShare::new(self.pace, &self.cut, 0).lengths()[0]
    }

    /// What is going to run; `output` is where.
    pub fn outline(&self, output: &Path, first_step: u64) -> Result<Outline, TrainError> {
        let (ranks, micro) = (self.ranks(), self.micro());
        let forward = training_graph(&self.net, &self.spec, micro, self.learner.loss)?;
        // The last rank has the largest parts.
        let lowering = self.rank_options(ranks).lowering(ranks - 1, true);
        let program = lowering.program(&forward)?;
        // All ranks of a copy of the model have the same samples.
        let microbatches = self.pace.batch as f64 / micro as f64;
        let bytes = self.expected_bytes()?;
        Ok(Outline {
            name: self.job.name.clone(),
            model: self.net.name().into(),
            params: forward.params.iter().map(|p| forward.shape(p.value).numel()).sum(),
            frozen_params: frozen_numel(&forward),
            weights: self.weights_note()?,
            train_samples: self.sets.train.len(),
            val_samples: self.sets.validation.as_ref().map_or(0, |s| s.len()),
            test_samples: self.sets.test.as_ref().map_or(0, |s| s.len()),
            sample: describe(&self.spec),
            columns: self.sets.notes(),
            model_of: match &self.job.output.best {
                Some(metric) => format!("the step with the best {metric}"),
                None => "the last step".into(),
            },
            precision: self.measured.clone().unwrap_or_else(|| self.job.train.precision.name().into()),
            batch: self.pace.batch,
            steps_per_epoch: self.pace.steps_per_epoch(),
            steps: self.pace.total_steps(self.job.train.length),
            first_step,
            ranks,
            threads: self.threads,
            shard_gradients: program.grad_buffers.is_some(),
            mesh: mesh_words(&self.learner.plan, self.cuts_from),
            memory_mib: bytes as f64 / f64::from(1 << 20),
            step_gflop: cost::product_flops(&step_graph(&forward)?) as f64 * microbatches / 1e9,
            output: output.to_path_buf(),
        })
    }

    /// The program of a rank's whole step, if all ranks are threads of one process.
    pub fn program(&self, rank: usize) -> Result<Program, TrainError> {
        let ranks = self.ranks();
        let options = self.rank_options(ranks);
        let lowering = options.lowering(rank, true);
        let part = RankShare::new(self.pace, &self.cut, self.data_rank(rank));
        lowering.step_program(part.kinds()[0], self.cut.shard_runs().as_deref(), &mut |n| {
            lowering.body(&training_graph(&self.net, &self.spec, n, options.loss)?)
        })
    }

    /// How a rank's engine is made in a process of so many ranks, which share what training may take.
    pub(crate) fn rank_options(&self, ranks: usize) -> LearnerOptions {
        let memory_bytes = self.learner.memory_bytes.map(|bytes| bytes / ranks.max(1));
        LearnerOptions { memory_bytes, threads: self.threads, ..self.learner.clone() }
    }

    /// The same with the precision that rank 0 finds to be faster, if the job leaves that open. Collective.
    pub(super) fn decided(mut self, comm: &mut Comm) -> Result<Prepared, TrainError> {
        if self.job.train.precision != PrecisionKind::Auto {
            return Ok(self);
        }
        let mut figures = [0.0; 3];
        if comm.rank() == 0 {
            comm.set_doing(Doing::Preparing);
            let PrecisionTrial { ms, samples } = self.measure_precisions()?;
            figures = [ms[0], ms[1], samples as f64];
        }
        comm.broadcast(&mut figures, 0)?;
        let measured = PrecisionTrial { ms: [figures[0], figures[1]], samples: figures[2] as usize };
        self.job.train.precision = measured.faster();
        self.learner.plan.precision = self.job.precision();
        self.measured = Some(measured.words());
        Ok(self)
    }

    /// A number for what ranks must have in common to train together.
    pub fn digest(&self) -> u64 {
        crate::talk::digest(&self.fingerprint())
    }

    /// What ranks must have in common to train together.
    pub(crate) fn fingerprint(&self) -> String {
        let lens = |set: &Option<Arc<dyn Dataset>>| set.as_ref().map(|s| s.len());
        let sets = (self.sets.train.len(), lens(&self.sets.validation), lens(&self.sets.test));
        let (job, learner) = (&self.job, &self.learner);
        let data = (&job.data.augment, job.data.order, job.data.fraction, job.data.normalise);
        // Of fewer ranks the plan has fewer servers.
        let servers = (job.parallel.sync, job.parallel.servers, job.parallel.staleness);
        let how = (learner.keeps, &learner.plan, servers, learner.memory_bytes, learner.loss);
        let (train, f32_layers) = (&job.train, &job.model.f32_layers);
        let output = (job.output.every_steps, job.output.every_epochs, &job.output.best, job.parallel.turn);
        format!(
            "{:?}",
            (
                &self.net,
                f32_layers,
                &self.spec.features,
                sets,
                self.pace,
                &self.cut,
                data,
                how,
                train,
                output
            )
        )
    }

    /// The order of an epoch.
    pub fn order(&self, epoch: u64) -> Order {
        Order { epoch, ..order(&self.job, self.sets.train.as_ref()) }
    }

    /// What is done to training samples.
    pub fn transform(&self) -> Result<Transform, TrainError> {
        let transform = Transform::new(&self.spec, self.stats.as_ref(), self.job.data.augment)?;
        Ok(transform.with_targets(self.target_stats.as_ref())?)
    }

    /// What is done to a set that is evaluated.
    pub fn plain_transform(&self, set: &dyn Dataset) -> Result<Transform, TrainError> {
        let transform = Transform::new(set.spec(), self.stats.as_ref(), Augment::default())?;
        Ok(transform.with_targets(self.target_stats.as_ref())?)
    }

    /// A set that is evaluated, during the run or at its end.
    pub(crate) fn evaluated(&self) -> Option<&Arc<dyn Dataset>> {
        self.sets.validation.as_ref().or(self.sets.test.as_ref())
    }

    /// What a model needs to know of its data later.
    pub fn preparation(&self) -> Preparation {
        Preparation::new(&self.spec, self.stats.as_ref(), self.sets.tokenizer.clone())
            .with_columns(self.sets.columns.clone())
            .with_schema(self.sets.schema.as_deref().cloned())
            .with_tokenizer_digest(self.sets.tokenizer_digest.clone())
            .with_types(self.sets.types)
            .with_targets(self.target_stats.as_ref())
    }
}

/// How a job's steps are split, but for what follows from the group of ranks.
pub fn plan(spec: &ParallelSpec, accumulate: usize, has_statistics: bool) -> Plan {
    Plan {
        microbatches: accumulate.max(1),
        bucket_bytes: (spec.bucket_mib * f64::from(1 << 20)) as usize,
        wire: spec.wire.codec(),
        wire_start: spec.wire.start,
        norms: if spec.sync_batch_norm && has_statistics { Norms::Synchronised } else { Norms::Local },
        shards: spec.reproducible.then_some(spec.shards),
        updates: if spec.elastic.is_some() { Updates::AtEnd } else { Updates::AtOnce },
        elastic: spec.elastic.is_some(),
        local: local_steps(spec),
        servers: spec.server_plan(usize::MAX).ok().flatten(),
        pipeline: spec.schedule,
        cuts: spec.cuts.clone(),
        shard_weights: spec.shard_weights,
        ..Plan::alone()
    }
}

/// What ranks that take steps by themselves do when they meet, if the job has them.
fn local_steps(spec: &ParallelSpec) -> Option<LocalSteps> {
    let outer = spec.outer.map(|OuterSpec { lr, momentum }| OuterStep { lr, momentum });
    let EverySpec { drift, .. } = spec.every;
    let drift = drift.map(|drift| DriftBound { drift, look: spec.every.look() });
    let turns = FragmentTurns { fragments: spec.fragments, every: spec.every.steps, overlap: spec.overlap };
    let turns = (spec.fragments > 1).then_some(turns);
    (spec.sync == SyncKind::Local).then_some(LocalSteps { outer, drift, turns })
}

/// Where stages that go on from step to step are flushed, and where ranks that take steps by themselves meet; after every step if
/// there are neither. `data` is the number of ranks that share the batch, `until` that of the steps.
fn flushes(job: &Job, pace: Pace, data: usize, until: u64) -> Flushes {
    let parallel = &job.parallel;
    let most = match parallel.sync {
        SyncKind::Local if data > 1 => parallel.steps_apart(),
        SyncKind::AllReduce | SyncKind::Local if parallel.is_flushless() => parallel.flush_every,
        SyncKind::AllReduce | SyncKind::Local | SyncKind::Ps | SyncKind::PsBounded | SyncKind::PsAsync => {
            return Flushes::every_step();
        }
    };
    let every = job.saves_every(pace).chain([job.evaluates_every(pace)]).collect();
    let flushes = Flushes::new(most, every, until);
    let leaves = parallel.sync == SyncKind::Local && parallel.every.drift.is_some();
    if leaves { flushes.that_end_early() } else { flushes }
}

/// How ranks are arranged, in words; nothing if they only split the batch.
fn mesh_words(plan: &Plan, cuts_from: CutsFrom) -> Option<String> {
    let mesh = &plan.mesh;
    if let Some(local) = plan.local_steps() {
        let then = if local.outer.is_some() { "an outer step" } else { "the mean of their weights" };
        if let Some(turns) = local.turns {
            return Some(format!(
                "data {}, each rank by itself; {} parts of the model take turns, each after {} steps, and all meet after up to {}: {then}",
                mesh.data, turns.fragments, turns.every, plan.run_steps
            ));
        }
        let until = local.drift.map_or(String::new(), |bound| format!(" or a drift of {}", bound.drift));
        return Some(format!(
            "data {}, each rank by itself for up to {} steps{until}, then {then}",
            mesh.data, plan.run_steps
        ));
    }
    if let Some(serving) = plan.servers.map(|servers| servers.serving).filter(|serving| *serving > 0) {
        return Some(format!("data {}, the first {serving} of which only serve", mesh.data));
    }
    if mesh.replica_ranks() == 1 && plan.shard_place().is_none() {
        return None;
    }
    let axes = Axis::ALL.into_iter().filter(|axis| mesh.len(*axis) > 1);
    let mut words =
        axes.map(|axis| format!("{} {}", axis.name(), mesh.len(axis))).collect::<Vec<_>>().join(" x ");
    if mesh.stage > 1 {
        words += &format!(", {} with {} microbatches", plan.pipeline, plan.microbatches);
        if plan.is_flushless() && plan.run_steps > 1 {
            words +=
                &format!(" (gradients are one step old; a flush after at most {} steps)", plan.run_steps);
        }
        words += &format!(", cut before {}", plan.cuts.join(", "));
        words += cuts_from.words();
    }
    if plan.shard_place().is_some() {
        words += ", weights sharded";
    }
    Some(words)
}

/// What ranks keep of gradients and optimizer state, if the job says so.
fn keeps(spec: &ParallelSpec) -> Option<Keeps> {
    match (spec.shard_gradients, spec.shard_optimizer) {
        (true, _) => Some(Keeps::OwnGradients),
        (false, Some(true)) => Some(Keeps::OwnMoments),
        (false, Some(false)) => Some(Keeps::All),
        (false, None) => None,
    }
}

/// Whether a metric is one of the validation set.
pub(crate) fn is_of_validation(metric: &str) -> bool {
    metric.starts_with("val_")
}

/// Texts that are filled up to several lengths are arranged by them: those that are evaluated, and those that are learnt from
/// if their order is free.
fn by_length(sets: Sets, order: OrderSpec) -> Sets {
    Sets {
        train: match order {
            OrderSpec::Sample => ByLength::arrange(sets.train),
            OrderSpec::InOrder | OrderSpec::Block(_) | OrderSpec::Parts => sets.train,
        },
        validation: sets.validation.map(ByLength::arrange),
        test: sets.test.map(ByLength::arrange),
        ..sets
    }
}

fn order(job: &Job, set: &dyn Dataset) -> Order {
    let len = set.len();
    let several = matches!(&set.spec().features, Features::Texts { times, .. } if times.len() > 1);
    let mode = match job.data.order {
        OrderSpec::InOrder => Mode::InOrder,
        OrderSpec::Sample if several => Mode::Lengths { batch: job.train.batch, ends: length_ends(set) },
        OrderSpec::Sample => Mode::Sample,
        OrderSpec::Block(n) => Mode::Block(n),
        OrderSpec::Parts => Mode::Parts(job.train.batch),
    };
    Order { len, seed: job.train.seed, epoch: 0, mode, fraction: job.data.fraction }
}

/// Weights of the classes; frequencies are counted only if `count`, and the weights are all 1 otherwise.
fn class_weights(job: &Job, set: &dyn Dataset, count: bool) -> Result<Vec<f32>, TrainError> {
    match &job.data.class_weights {
        ClassWeights::None => Ok(Vec::new()),
        ClassWeights::Balanced if !count => Ok(vec![1.0; set.spec().classes()]),
        ClassWeights::Balanced => Ok(balanced_weights(set)?),
        ClassWeights::Given(weights) => match weights.len() == set.spec().classes() {
            true => Ok(weights.clone()),
            false => Err(TrainError::ClassWeights { got: weights.len(), want: set.spec().classes() }),
        },
    }
}

fn describe(spec: &Spec) -> String {
    let sample = match spec.features {
        Features::Image { channels, height, width, .. } => format!("image {channels}x{height}x{width}"),
        Features::Row { width } => format!("{width} numbers"),
        Features::Mixed { numbers, ref ids, ref texts } => {
            let n = |n: usize, one: &str, many: &str| match n {
                0 => String::new(),
                1 => format!(", 1 {one}"),
                n => format!(", {n} {many}"),
            };
            let categories = n(ids.len(), "category with learnt vectors", "categories with learnt vectors");
            format!("{numbers} numbers{categories}{}", n(texts.len(), "text", "texts"))
        }
        Features::Ids { time, vocab } => format!("{time} ids below {vocab}"),
        Features::Texts { vocab, .. } => {
            format!("a text of up to {} tokens below {vocab}", spec.features.numel())
        }
    };
    format!("{sample}, {}", describe_target(spec))
}

fn describe_target(spec: &Spec) -> String {
    match &spec.target {
        Target::Class { classes, .. } => format!("{classes} classes"),
        Target::Tags { classes, .. } => format!("one of {classes} tags for each word"),
        Target::NextId => "the next id".into(),
        Target::Numbers { n: 1, .. } => "a number to predict".into(),
        Target::Numbers { n, .. } => format!("{n} numbers to predict"),
        Target::Labels { n: 1, .. } => "a label of 0 or 1".into(),
        Target::Labels { n, .. } => format!("{n} labels of 0 or 1"),
    }
}
