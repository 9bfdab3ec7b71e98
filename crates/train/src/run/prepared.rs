//! A job with its data and its network, checked: everything that can be wrong is said before anything is written.

use std::path::Path;
use std::sync::Arc;

use polyreme_data::{
    Augment, Dataset, Features, Mode, Order, Spec, Stats, Target, Transform, balanced_weights,
};
use polyreme_exec::Engine;
use polyreme_graph::cost;

use crate::error::TrainError;
use crate::event::Outline;
use crate::job::{ClassWeights, Job, OrderSpec};
use crate::lower::{Loss, training_graph, training_program};
use crate::net::Net;
use crate::pace::Pace;
use crate::preparation::Preparation;
use crate::sets::{Sets, open};
use crate::team::TeamOptions;

/// So many samples, evenly spread, are enough to know mean and deviation.
const STATS_SAMPLES: usize = 20_000;

/// What a job defined in Rust brings itself.
#[derive(Clone, Default)]
pub struct Given {
    /// The network, instead of `[model]`.
    pub net: Option<Net>,
    /// The data, instead of `[data]`'s source.
    pub sets: Option<Sets>,
}

/// A job, ready to run.
pub struct Prepared {
    /// The job, with everything resolved.
    pub job: Job,
    /// The network.
    pub net: Net,
    /// The data.
    pub sets: Sets,
    /// The training set's samples.
    pub spec: Spec,
    /// Epochs, steps and pieces.
    pub pace: Pace,
    /// Threads of the engines.
    pub threads: usize,
    /// The normalisation.
    pub stats: Option<Stats>,
    /// How engines are made.
    pub team: TeamOptions,
    /// The machine and the program, for the report.
    pub system: Vec<(String, String)>,
}

impl Prepared {
    /// Opens the data, fits the network to them, and checks that everything goes together. `cores` is what "auto"
    /// threads come to.
    pub fn new(mut job: Job, given: Given, cores: usize) -> Result<Prepared, TrainError> {
        let sets = match given.sets {
            Some(sets) => sets,
            None => open(&mut job)?,
        };
        let spec = sets.train.spec().clone();
        let net = match given.net {
            Some(net) => net,
            None => {
                job.model.fit(&spec)?;
                Net::Model(job.model.model.clone())
            }
        };
        let order = order(&job, sets.train.len());
        let train = &job.train;
        if order.epoch_len() == 0 {
            return Err(TrainError::Empty);
        }
        let micro = (train.batch / train.accumulate.max(1)).max(1);
        let pace = Pace { samples: order.epoch_len(), batch: train.batch, micro };
        // A set smaller than a batch is one short step; the engine for whole pieces is made for what there is.
        let pace = Pace { batch: pace.batch.min(pace.samples), micro: micro.min(pace.samples), ..pace };
        let normalise = job.data.normalise && !spec.features.is_ids();
        let stats = normalise.then(|| Stats::of(sets.train.as_ref(), STATS_SAMPLES)).transpose()?;
        let class_weights = class_weights(&job, sets.train.as_ref())?;
        let loss = Loss {
            label_smoothing: train.label_smoothing,
            class_weights: !class_weights.is_empty(),
            mixup: train.mixup > 0.0,
        };
        if loss.mixup && spec.features.is_ids() {
            return Err(TrainError::MixupOfIds);
        }
        let threads = job.parallel.threads.unwrap_or(cores).max(1);
        let team = TeamOptions {
            threads,
            seed: train.seed,
            optimizer: train.optimizer.rule,
            clip: train.clip,
            loss,
            class_weights,
            ema: train.ema,
            memory_bytes: train.memory_mib.map(|mib| mib << 20),
        };
        let prepared = Prepared { net, sets, spec, pace, threads, stats, team, system: Vec::new(), job };
        prepared.transform()?;
        Ok(prepared)
    }

    /// What is going to run; `output` is where.
    pub fn outline(&self, output: &Path, first_step: u64) -> Result<Outline, TrainError> {
        let forward = training_graph(&self.net, &self.spec, self.pace.micro, self.team.loss)?;
        let budget = self.team.memory_bytes.map(|bytes| (bytes, self.threads));
        let program = training_program(&forward, Some((self.team.optimizer, self.team.clip)), budget)?;
        let params = &program.graph.params;
        let pieces = self.pace.batch as f64 / self.pace.micro as f64;
        Ok(Outline {
            name: self.job.name.clone(),
            model: match &self.net {
                Net::Model(model) => model.name().to_string(),
                Net::Function(_) => "function".into(),
            },
            params: params.iter().map(|p| program.graph.shape(p.value).numel()).sum(),
            train_samples: self.sets.train.len(),
            val_samples: self.sets.validation.as_ref().map_or(0, |s| s.len()),
            test_samples: self.sets.test.as_ref().map_or(0, |s| s.len()),
            sample: describe(&self.spec),
            batch: self.pace.batch,
            steps_per_epoch: self.pace.steps_per_epoch(),
            steps: self.pace.total_steps(self.job.train.length),
            first_step,
            threads: self.threads,
            memory_mib: Engine::footprint(&program, self.threads).total() as f64 / f64::from(1 << 20),
            step_gflop: cost::product_flops(&program.graph) as f64 * pieces / 1e9,
            output: output.to_path_buf(),
        })
    }

    /// The order of an epoch.
    pub fn order(&self, epoch: u64) -> Order {
        Order { epoch, ..order(&self.job, self.sets.train.len()) }
    }

    /// What is done to training samples.
    pub fn transform(&self) -> Result<Transform, TrainError> {
        Ok(Transform::new(&self.spec, self.stats.as_ref(), self.job.data.augment)?)
    }

    /// What is done to a set that is evaluated.
    pub fn plain_transform(&self, set: &dyn Dataset) -> Result<Transform, TrainError> {
        Ok(Transform::new(set.spec(), self.stats.as_ref(), Augment::default())?)
    }

    /// The set that is evaluated during the run: for validation, or else for the test.
    pub fn watched(&self) -> Option<&Arc<dyn Dataset>> {
        self.sets.validation.as_ref().or(self.sets.test.as_ref())
    }

    /// What a model needs to know of its data later.
    pub fn preparation(&self) -> Preparation {
        Preparation::new(&self.spec, self.stats.as_ref(), self.sets.tokenizer.clone())
    }
}

fn order(job: &Job, len: usize) -> Order {
    let mode = match job.data.order {
        OrderSpec::InOrder => Mode::InOrder,
        OrderSpec::Sample => Mode::Sample,
        OrderSpec::Block(n) => Mode::Block(n),
    };
    Order { len, seed: job.train.seed, epoch: 0, mode, fraction: job.data.fraction }
}

fn class_weights(job: &Job, set: &dyn Dataset) -> Result<Vec<f32>, TrainError> {
    match &job.data.class_weights {
        ClassWeights::None => Ok(Vec::new()),
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
        Features::Ids { time, vocab } => format!("{time} ids below {vocab}"),
    };
    match &spec.target {
        Target::Class { classes, .. } => format!("{sample}, {classes} classes"),
        Target::NextId => format!("{sample}, the next id"),
    }
}
