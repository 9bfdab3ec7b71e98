//! What a run tells whoever watches it, and what it asks: whether to stop.

use std::path::{Path, PathBuf};
use std::time::Duration;

use polyreme_collective::servers::ServerCounts;
use serde::Serialize;

use crate::ledger::LedgerReport;

/// Watches a run. The terminal, JSON lines and tests are observers.
pub trait Observer {
    /// Something happened.
    fn event(&mut self, event: Event<'_>);

    /// Whether the run is to end after this step.
    fn stop_requested(&self) -> bool {
        false
    }

    /// Whether an elastic run is to change its ranks after this step. Only rank 0's observer is asked.
    fn change_requested(&self) -> bool {
        false
    }

    /// What changes of an elastic run's ranks have cost so far.
    fn membership(&self) -> Option<MembershipCost> {
        None
    }
}

/// What changes of an elastic run's ranks cost.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct MembershipCost {
    /// Ranks that were lost.
    pub ranks_lost: u64,
    /// Ranks that joined after the start.
    pub ranks_joined: u64,
    /// Steps that were begun, not finished, and done again.
    pub steps_redone: u64,
    /// Half of the stalls after losses were at most this long.
    pub stall_ms_p50: f64,
    /// Ninety-nine of a hundred were.
    pub stall_ms_p99: f64,
    /// The longest.
    pub stall_ms_max: f64,
    /// Medians of the parts of stalls: until a loss was noticed, until all others had stopped, until they trained again.
    pub stall_parts_ms_p50: [f64; 3],
}

/// Something that happened in a run.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Everything is ready: what will run.
    Started(&'a Outline),
    /// A step is done.
    Step(&'a StepDone),
    /// A set was evaluated.
    Evaluated {
        /// Steps done.
        step: u64,
        /// Epochs begun.
        epoch: u64,
        /// Names and values.
        metrics: &'a [(String, f64)],
        /// Whether this is the best so far, by the job's metric.
        best: bool,
    },
    /// A checkpoint was handed to the writer.
    Saving {
        /// Its step.
        step: u64,
        /// How long training was held.
        held: Duration,
    },
    /// The ranks of an elastic run are others from now on. Every rank tells its observer.
    Membership {
        /// The number of this group of ranks.
        generation: u64,
        /// How many ranks it has.
        ranks: usize,
        /// Steps done.
        step: u64,
        /// Why.
        why: &'a str,
    },
    /// Samples are shared out among ranks in another way from now on.
    Balanced {
        /// Steps done.
        step: u64,
        /// What changed, and why.
        why: &'a str,
    },
    /// Ranks agree in another way from now on, by the rule of the job.
    Turned {
        /// Steps done.
        step: u64,
        /// `parallel.sync` from here on.
        sync: &'a str,
    },
    /// This rank uses another number of threads from now on.
    Followed {
        /// Steps done.
        step: u64,
        /// How many, and why.
        why: &'a str,
    },
    /// What parameter servers came to so far, one after the other: about once a second, or in lockstep when metrics are recorded.
    Servers(&'a [ServerCounts]),
    /// This rank is so much slower than the others that it should leave (`parallel.elastic.leave_out`).
    TooSlow,
    /// Something is wrong that does not end the run.
    Warning(&'a str),
    /// The run is over.
    Finished(&'a Summary),
}

/// What a run is going to do.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Outline {
    /// The job's name.
    pub name: String,
    /// The network in a few words.
    pub model: String,
    /// Parameters.
    pub params: usize,
    /// Those of them that stay as they are.
    pub frozen_params: usize,
    /// What the run begins with, if that is not random.
    pub weights: Option<String>,
    /// Training samples.
    pub train_samples: usize,
    /// Validation samples.
    pub val_samples: usize,
    /// Test samples.
    pub test_samples: usize,
    /// A sample in a few words.
    pub sample: String,
    /// What was found in the columns of a table, as lines; empty if there is nothing to say.
    pub columns: Vec<String>,
    /// Which step the model is of that the run ends with, in a few words.
    pub model_of: String,
    /// The precision, and if it was measured the figures.
    pub precision: String,
    /// Samples a step.
    pub batch: usize,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Steps done before.
    pub first_step: u64,
    /// How many ranks share a step.
    pub ranks: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// Whether each rank keeps the gradients of its own range only.
    pub shard_gradients: bool,
    /// How ranks are arranged, if they split more than the batch.
    pub mesh: Option<String>,
    /// What the run takes at its peak on one host, as planned: all ranks, copies for checkpoints, batches that are read ahead,
    /// code, and data that are held in memory.
    pub memory_mib: f64,
    /// GFLOP of a step's products.
    pub step_gflop: f64,
    /// The run's folder.
    pub output: PathBuf,
}

/// A step that is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepDone {
    /// Steps done, this one included.
    pub step: u64,
    /// Steps of the run.
    pub steps: u64,
    /// Epochs begun.
    pub epoch: u64,
    /// Epochs of the run.
    pub epochs: u64,
    /// The mean loss of its samples; `None` of a step that was skipped because a scaled loss was too large for f16.
    pub loss: Option<f64>,
    /// The learning rate.
    pub lr: f64,
    /// Samples of the step.
    pub samples: usize,
    /// Those of this rank.
    pub own_samples: usize,
    /// How long it took this rank, without waiting for data or other ranks.
    pub own_busy: Duration,
    /// Since the run began, those of resumed runs included.
    pub seconds: f64,
    /// The share of the time spent waiting for data.
    pub waiting: f64,
    /// The share of the time that ranks spent waiting for each other; 0 if there is one.
    pub waiting_for_ranks: f64,
    /// Bytes that this rank has put on the wire in steps since it was started.
    pub sent_bytes: u64,
    /// Batches that were read ahead, and wait.
    pub batches_ready: usize,
}

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All steps are done.
    Finished,
    /// There was no gain any more.
    EarlyStop,
    /// Somebody asked for it.
    Interrupted,
}

/// What a run came to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    /// Steps done in all.
    pub steps: u64,
    /// Seconds of training and evaluation in all.
    pub seconds: f64,
    /// Training samples a second, evaluations left out.
    pub samples_per_s: f64,
    /// The mean training loss of the last epoch's worth of steps, as far as this process saw them.
    pub final_loss: f64,
    /// The last value of every metric.
    pub metrics: serde_json::Map<String, serde_json::Value>,
    /// The run's folder.
    pub output: PathBuf,
    /// The weights.
    pub model: PathBuf,
    /// Why it ended.
    pub ending: Ending,
    /// The step whose weights `model` has.
    pub model_step: u64,
    /// Which samples counted, and whether each did as often as it should; rank 0's, and not known of runs that an earlier version began.
    pub ledger: Option<LedgerReport>,
    /// Bytes that ranks have sent to each other in steps of training since the run was started or resumed, all together: over
    /// sockets, without the heads of frames. Not known under MPI; 0 where ranks share memory.
    pub wire_bytes: u64,
    /// The same of the rank that sent the most: what the busiest link carried.
    pub wire_bytes_max: u64,
    /// With parameter servers: how many updates came between the weights that a gradient is of and the update with it, at most; since the
    /// run was started or resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub staleness_max: Option<u64>,
    /// The same on the average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub staleness_mean: Option<f64>,
    /// What changes of ranks cost, in an elastic run.
    #[serde(flatten)]
    pub membership: Option<MembershipCost>,
}

impl Summary {
    /// How to go on with a run that was interrupted.
    pub fn resume_hint(folder: &Path) -> String {
        format!("polyreme resume {}", folder.display())
    }
}

/// Watches nothing.
#[derive(Clone, Copy, Default, Debug)]
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _: Event<'_>) {}
}
