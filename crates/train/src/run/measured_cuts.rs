//! Where a run with several stages cuts its network: where each stage takes as long as the others, as measured.
//!
//! Multiply-adds say little about an embedding or a norm, so before a run rank 0 runs forward and backward pass of a few samples
//! alone, times the nodes, and chooses; the others hear it. The choice is kept in checkpoints, and a run that goes on with as many
//! stages keeps its cuts, so that its sums, and its bits, stay those of a run that was not stopped. Two runs of a job may measure
//! different cuts; where gradients are clipped or weights are tied over stages, their last bits then differ.
//!
//! Cuts follow from multiply-adds instead where nothing is measured: in reproducible runs, where the whole network does not
//! fit into what the run will take on this host anyway, and where a pass of one sample would take longer than about a second.
//! `parallel.cuts` is never overruled.

use polyreme_collective::{Comm, Doing};
use polyreme_exec::{Engine, Options, step_seconds};
use polyreme_graph::cost;
use polyreme_parallel::stage::{chunk_costs, place_by_name};
use polyreme_parallel::{CompileError, Plan, choose_cuts};

use super::prepared::Prepared;
use crate::error::TrainError;
use crate::lower::{step_graph, training_graph};
use crate::talk;

/// Passes that are timed, after a first one.
const RUNS: usize = 3;
/// About as many operations as take a tenth of a second: more samples are not taken at once.
const FLOPS: u64 = 5_000_000_000;
/// Cuts by multiply-adds stay unless the slowest stage becomes faster by this share: single timings scatter by a few hundredths, and
/// runs of one job should not be cut in different places without need.
const LEAST_GAIN: f64 = 0.05;
/// One sample with more is not measured.
const FLOPS_MAX: u64 = 10 * FLOPS;

/// Where the cuts of a run come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CutsFrom {
    /// The job names them, or they follow from multiply-adds in every run.
    #[default]
    Job,
    /// From multiply-adds, since nothing could be measured.
    Operations,
    /// A measurement.
    Measured,
    /// The checkpoint that the run goes on from.
    Checkpoint,
}

impl CutsFrom {
    const ALL: [CutsFrom; 4] =
        [CutsFrom::Job, CutsFrom::Operations, CutsFrom::Measured, CutsFrom::Checkpoint];

    /// Whether a run that goes on must have the same ones.
    pub(super) fn is_kept(self) -> bool {
        self != CutsFrom::Job
    }

    /// In words that follow the cuts.
    pub(super) fn words(self) -> &'static str {
        match self {
            CutsFrom::Job => "",
            CutsFrom::Operations => " by multiply-adds",
            CutsFrom::Measured => " as measured",
            CutsFrom::Checkpoint => " as before",
        }
    }
}

impl Prepared {
    /// The same with the cuts that rank 0 has measured, or that the run had `before`. Collective; `local` ranks are in this process.
    pub(super) fn with_cuts(
        mut self,
        comm: &mut Comm,
        before: &[String],
        local: usize,
    ) -> Result<Prepared, TrainError> {
        let plan = &self.learner.plan;
        if plan.mesh.stage == 1 || !self.job.parallel.cuts.is_empty() || plan.is_reproducible() {
            return Ok(self);
        }
        let (mut from, mut cuts) = (CutsFrom::Operations, plan.cuts.clone());
        if comm.rank() == 0 {
            comm.set_doing(Doing::Preparing);
            if self.cuts_still_fit(before)? {
                (from, cuts) = (CutsFrom::Checkpoint, before.to_vec());
            } else if let Some(measured) = self.measure_cuts(local)? {
                (from, cuts) = (CutsFrom::Measured, measured);
            }
        }
        let mut which = [from as i64];
        comm.broadcast(&mut which, 0)?;
        let told = talk::broadcast(comm, cuts.join("\n").into_bytes(), 0)?;
        self.learner.plan.cuts = String::from_utf8_lossy(&told).lines().map(String::from).collect();
        self.cuts_from = CutsFrom::ALL.into_iter().find(|from| *from as i64 == which[0]).unwrap_or_default();
        Ok(self)
    }

    /// Whether the network can be cut there, into as many parts as there are.
    fn cuts_still_fit(&self, cuts: &[String]) -> Result<bool, TrainError> {
        if cuts.is_empty() {
            return Ok(false);
        }
        let step =
            step_graph(&training_graph(&self.net, &self.spec, self.micro().max(2), self.learner.loss)?)?;
        let plan = Plan { cuts: cuts.to_vec(), ..self.learner.plan.clone() };
        Ok(choose_cuts(&step, &plan, &|_| 0.0, None).is_ok())
    }

    /// The best cuts by measured times; `None` if measuring would take too long or too much memory.
    fn measure_cuts(&self, local: usize) -> Result<Option<Vec<String>>, TrainError> {
        let most = self.micro().max(2);
        let trace = |n: usize| step_graph(&training_graph(&self.net, &self.spec, n, self.learner.loss)?);
        let flops = cost::product_flops(&trace(most)?).max(1);
        if flops / most as u64 > FLOPS_MAX {
            return Ok(None);
        }
        let samples = usize::try_from(most as u64 * FLOPS / flops).unwrap_or(most).clamp(2, most);
        let step = trace(samples)?;
        let plan = Plan { cuts: Vec::new(), ..self.learner.plan.clone() };
        let options = Options { isa: self.learner.isa, ..Options::threads(self.threads) };
        // No more than the run itself: what is measured is freed before its engines are made.
        let lowering = self.rank_options(local).lowering(0, true);
        let own =
            lowering.program(&training_graph(&self.net, &self.spec, self.micro(), self.learner.loss)?)?;
        let room = Engine::footprint(&own, self.threads, self.learner.isa).total() * local;
        let Some(costs) = step_seconds(&step, &plan.precision, options, RUNS, room)? else { return Ok(None) };
        let seconds = |i: usize| costs[i];
        let slowest = |cuts: &[String]| -> Result<f64, TrainError> {
            let place = place_by_name(&step, cuts).map_err(CompileError::from)?;
            Ok(chunk_costs(&step, &place, &seconds).into_iter().fold(0.0, f64::max))
        };
        let by_seconds = choose_cuts(&step, &plan, &seconds, None)?;
        let by_operations = self.learner.plan.cuts.clone();
        let gains = slowest(&by_seconds)? < (1.0 - LEAST_GAIN) * slowest(&by_operations)?;
        Ok(Some(if gains { by_seconds } else { by_operations }))
    }
}
