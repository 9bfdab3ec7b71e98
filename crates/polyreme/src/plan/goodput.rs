//! What losses of hosts leave of a plan's time: as an elastic run, and as one that is started again from its checkpoints.

use std::fmt;
use std::time::Duration;

use polyreme_sim::goodput::Losses;
use polyreme_sim::search::FoundPlan;
use serde::Serialize;

use super::asked::AskedJob;
use crate::times::words;

/// How long it takes until a run that ended is started again and trains.
const RESTART_S: f64 = 30.0;

/// Shares of the time that count in the end.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ExpectedGoodput {
    lost_every_s: f64,
    /// As an elastic run, if the plan can be one.
    elastic: Option<f64>,
    /// Started again from checkpoints, if it is known how often there is one.
    restarted: Option<f64>,
    saves_s: Option<f64>,
    notice_s: f64,
    replaced_s: f64,
    restart_s: f64,
}

impl ExpectedGoodput {
    /// Of a plan, if a host is lost so often and replaced after a while.
    pub fn new(asked: &AskedJob, plan: &FoundPlan, every: Duration, replaced: Duration) -> ExpectedGoodput {
        let (job, mesh) = (asked.job(), &plan.choice.mesh);
        let step_s = plan.report.step_us / 1e6;
        let (notice_s, replaced_s) = (job.parallel.patience, replaced.as_secs_f64());
        let hosts = plan.choice.seating.hosts;
        let losses = Losses { every_s: every.as_secs_f64(), notice_s, replaced_s, hosts };
        let epoch_s = asked.epoch_samples.map(|n| n.div_ceil(asked.batch()) as f64 * step_s);
        let output = &job.output;
        let saves = [
            output.every_minutes.map(|minutes| minutes * 60.0),
            output.every_steps.map(|steps| steps as f64 * step_s),
            output.every_epochs.zip(epoch_s).map(|(epochs, epoch_s)| epochs as f64 * epoch_s),
        ];
        let saves_s = saves.into_iter().flatten().reduce(f64::min);
        ExpectedGoodput {
            lost_every_s: losses.every_s,
            // Where ranks have a model together, none of them can be lost alone.
            elastic: (mesh.ranks() == mesh.data).then(|| losses.elastic(step_s, mesh.ranks())),
            restarted: saves_s.map(|saves_s| losses.restarted(saves_s, RESTART_S)),
            saves_s,
            notice_s,
            replaced_s,
            restart_s: RESTART_S,
        }
    }
}

impl fmt::Display for ExpectedGoodput {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let time = |seconds: f64| words(Duration::from_secs_f64(seconds));
        writeln!(
            f,
            "if a host is lost every {}, noticed after {} (`parallel.patience`) and replaced after {}, of the time count:",
            time(self.lost_every_s),
            time(self.notice_s),
            time(self.replaced_s)
        )?;
        match self.elastic {
            Some(share) => {
                writeln!(f, "  {:>6.2} % with `train --elastic`: the others go on", share * 100.0)?
            }
            None => writeln!(f, "           `train --elastic` is for plans that split the batch alone")?,
        }
        match self.restarted.zip(self.saves_s) {
            Some((share, saves_s)) => write!(
                f,
                "  {:>6.2} % started again within {} from checkpoints, one every {}",
                share * 100.0,
                time(self.restart_s),
                time(saves_s)
            ),
            None => {
                write!(f, "           from checkpoints: set `output.every_minutes`, or have the data here")
            }
        }
    }
}
