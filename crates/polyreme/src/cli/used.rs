//! Ranks that use a trained model together: what `eval` and `predict` have in common.
//!
//! Rank 0's process reads the checkpoint, says what cannot be before anything is started, and tells the other processes what
//! the model is. Data, files and prompts each process reads itself, as in training; rank 0 alone prints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use polyreme_collective::Comm;
use polyreme_parallel::Plan;
use polyreme_train::TrainError;
use polyreme_train::inference::{use_ranks, use_spec};
use polyreme_train::job::{Job, ParallelSpec};
use polyreme_train::trained::{CheckpointNote, Trained};

use super::ranks::{RankArgs, asked_by_job, note_apart, or_tell, part, show, voice_waits};
use super::{CommandResult, Failure};
use crate::app::App;
use crate::cluster::cores::Machine;
use crate::cluster::enter::Ranks;
use crate::cluster::{Asked, Setup};
use crate::output;

/// The largest batch that a job can have, so that no number of ranks is too large for it: nothing is trained.
const ANY_BATCH: usize = 1 << 20;

/// The model, and who uses it.
#[derive(Args)]
pub(super) struct UseArgs {
    /// A run's folder (its best checkpoint is used), or a checkpoint.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Change a setting, such as `data.path=other/folder`, or `parallel.tensor=2` to split the model over two ranks; may be given
    /// several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    #[command(flatten)]
    ranks: RankArgs,
}

/// A model that the ranks of this process are about to use.
pub(super) struct UsedModel {
    pub(super) trained: Trained,
    /// How all ranks have it together.
    pub(super) plan: Plan,
    pub(super) ranks: Ranks,
}

/// How this number of ranks has a model together, or why they cannot.
pub(super) type PlanFor<'a> = dyn Fn(&Trained, &ParallelSpec, usize) -> Result<Plan, TrainError> + 'a;

impl UseArgs {
    /// Opens the model and starts the ranks; `None` if this process was the launcher, and all is done.
    pub(super) fn open(
        &self,
        app: &App,
        command: &str,
        json: bool,
        plan_for: &PlanFor,
    ) -> Result<Option<UsedModel>, Failure> {
        let reads = self.ranks.speaks()?;
        let opened = reads.then(|| Trained::open(&self.run, &app.given())).transpose()?;
        let machine = Machine::read();
        let asked = match &opened {
            Some(trained) => {
                let spec = self.parallel(trained)?;
                Asked { ranks: Some(use_ranks(&spec)), ..asked_by_job(&spec) }
            }
            None => Asked::default(),
        };
        let decided = self.ranks.decide(asked, &machine)?;
        if let Some(trained) = &opened {
            let n = match &decided.setup {
                Setup::Threads { ranks, .. } => *ranks,
                Setup::Spawn { processes, .. } => *processes,
                Setup::Process(place) => place.size,
            };
            plan_for(trained, &self.parallel_of(trained, n)?, n)?;
        }
        let Some(mut ranks) = self.ranks.enter_as(decided, machine, command, Arc::default())? else {
            return Ok(None);
        };
        let hear = |ranks: &mut Ranks| {
            let note = opened.as_ref().map(|trained| trained.note.to_bytes()).transpose()?;
            let note = ranks.tell(note.unwrap_or_default())?;
            let trained = match opened {
                Some(trained) => trained,
                None => Trained::noted(CheckpointNote::from_bytes(&note)?, &app.given())?,
            };
            let plan = plan_for(&trained, &self.parallel_of(&trained, ranks.size())?, ranks.size())?;
            Ok((trained, plan))
        };
        let (trained, plan) = or_tell(&mut ranks, hear)?;
        if !json {
            show(&ranks, false);
            note_apart(&ranks, &plan.mesh);
            output::err().settle();
        }
        voice_waits(&mut ranks);
        Ok(Some(UsedModel { trained, plan, ranks }))
    }

    /// The job of the model, for its data: with the settings that are not about ranks.
    pub(super) fn data_job(&self, trained: &Trained) -> Result<Job, Failure> {
        let (_, others) = self.settings();
        let origin = trained.folder().join("job.toml");
        let job = Job::from_text(&trained.note.job, &origin.display().to_string(), Path::new("."), &others);
        // Ranks of training, and what they need, do not matter here.
        Ok(Job { parallel: ParallelSpec::default(), ..job.map_err(Failure::job)? })
    }

    /// How `n` ranks use the model: the run's axes, changed by settings. One rank has all of it, whatever the run had.
    fn parallel_of(&self, trained: &Trained, n: usize) -> Result<ParallelSpec, Failure> {
        let spec = self.parallel(trained)?;
        let (said, _) = self.settings();
        Ok(if n == 1 && said.is_empty() { ParallelSpec::default() } else { spec })
    }

    /// The run's axes, changed by settings.
    fn parallel(&self, trained: &Trained) -> Result<ParallelSpec, Failure> {
        // What else a run says, such as its optimizer, restricts training alone.
        let mut job = Job::new(&trained.job.name);
        job.train.batch = ANY_BATCH;
        job.parallel = use_spec(&trained.job.parallel);
        let (said, _) = self.settings();
        let origin = format!("[parallel] of {}", trained.folder().join("job.toml").display());
        let job = Job::from_text(&job.to_toml(), &origin, Path::new("."), &said).map_err(Failure::job)?;
        Ok(job.parallel)
    }

    /// Settings of `[parallel]`, and others.
    fn settings(&self) -> (Vec<String>, Vec<String>) {
        self.sets.iter().cloned().partition(|set| set.trim_start().starts_with("parallel."))
    }
}

/// Runs `work` on each rank of this process; the error is that of the first rank that has one.
pub(super) fn on_ranks(mut ranks: Ranks, work: impl Fn(Comm) -> CommandResult + Sync) -> CommandResult {
    let control = ranks.control.take();
    let outcomes = ranks.run(work);
    part(control, outcomes.into_iter().collect())
}
