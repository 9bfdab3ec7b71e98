//! `polyreme inspect PATH --timeline FILE.svg`: a step of a timeline as a picture, from what a run recorded or from a simulation of a job file.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use polyreme_sim::search::{Planner, SearchEffort};
use polyreme_train::record::timeline::{StepTimeline, TimelineError, Trace, svg};
use polyreme_train::record::trace;
use serde_json::json;

use super::ending::Failure;
use super::machines::MachineArgs;
use super::plan::{nothing_fits, said};
use super::{CommandResult, print_json, train};
use crate::app::App;
use crate::plan::asked::{AskedJob, decided};
use crate::plan::searching::SearchLine;
use crate::plan::simulated;

#[derive(Args)]
pub(super) struct TimelineArgs {
    /// Draw a step: ranks over time, what each computes, exchanges and waits for. PATH is the file that `--trace` wrote, a
    /// run's folder with that file as `trace.json`, or a job file, whose plan is simulated.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "graph")]
    pub(super) timeline: Option<PathBuf>,
    /// With `--timeline`: the step to draw [default: a typical one].
    #[arg(long, value_name = "N", requires = "timeline")]
    step: Option<u64>,
    /// With `--timeline`: another timeline, drawn below on the same scale; a file, a run's folder or a job file too.
    #[arg(long, value_name = "PATH", requires = "timeline")]
    beside: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Machines that a job file is simulated on, with --timeline")]
    machines: MachineArgs,
}

impl TimelineArgs {
    /// Refuses flags that have no meaning without a picture.
    pub(super) fn check(&self) -> CommandResult {
        match self.timeline.is_none() && self.machines.any() {
            true => Err(Failure::usage(
                "--cluster, --calibration and --hosts say what a job file is simulated on; add `--timeline FILE.svg`, or use `polyreme plan`",
            )),
            false => Ok(()),
        }
    }

    /// Draws what `path` has.
    pub(super) fn draw(&self, app: &App, path: &Path, picture: &Path, json: bool) -> CommandResult {
        let mut steps = vec![self.read(app, path)?.step(self.step).map_err(failure)?];
        if let Some(beside) = &self.beside {
            // Runs need not have the same steps; a simulation has few.
            let other = self.read(app, beside)?;
            steps.push(other.step(self.step).or_else(|_| other.step(None)).map_err(failure)?);
        }
        let failed = |e: io::Error| Failure::world(format!("{}: cannot be written: {e}", picture.display()));
        fs::write(picture, svg(&steps)).map_err(failed)?;
        if json {
            let of = |s: &StepTimeline| json!({"step": s.steps().0, "step_ms": s.took_us() / 1e3, "idle": s.idle()});
            let steps: Vec<_> = steps.iter().map(of).collect();
            return print_json(&json!({"timeline": picture, "steps": steps}));
        }
        let words = |s: &StepTimeline| {
            let (step, ms, idle) = (s.steps().0, s.took_us() / 1e3, 100.0 * s.idle());
            format!("step {step}, {ms:.1} ms, {idle:.0} % idle")
        };
        let words: Vec<String> = steps.iter().map(words).collect();
        Ok(writeln!(io::stdout().lock(), "{}: {}", picture.display(), words.join("; "))?)
    }

    /// What a file, or the file in a run's folder, has; of a job file what its plan would do.
    fn read(&self, app: &App, path: &Path) -> Result<Trace, Failure> {
        if path.extension().is_some_and(|e| e == "toml") {
            return self.simulate(app, path);
        }
        let file = if path.is_dir() { path.join(trace::FILE) } else { path.to_path_buf() };
        if path.is_dir() && !file.is_file() {
            let (path, file) = (path.display(), file.display());
            return Err(Failure::usage(format!(
                "{path}: there is no {} in it; train with `--trace {file}`",
                trace::FILE
            )));
        }
        Trace::read(&file).map_err(failure)
    }

    /// A few steps of a job's plan. Keys that the job does not say have their defaults, unless some are `"auto"`: then these are searched
    /// as well, as `train` does. The number of ranks, if it is open, is that of the fastest plan.
    fn simulate(&self, app: &App, file: &Path) -> Result<Trace, Failure> {
        let job = train::read_job(app, Some(file), &[])?;
        let keys = decided(&job, said(&job, Some(file), &[])?);
        let known = self.machines.known(app)?;
        let mut asked = AskedJob::new(job.clone(), &keys, app.given())?;
        if !job.parallel.open.any() {
            asked.fix_defaults();
        }
        let line = SearchLine::begin();
        let watch = |progress| line.show(progress);
        let plan = asked.with(|question| {
            let mut planner = Planner::new(question).watched(&watch);
            let answer = planner.search(&known.cluster, SearchEffort::USUAL).map_err(Failure::usage)?;
            let best = answer.plans.first().cloned();
            best.ok_or_else(|| nothing_fits(&answer))
        })?;
        simulated::timeline(&plan, &known.cluster, &job.name, file).map_err(Failure::usage)
    }
}

fn failure(error: TimelineError) -> Failure {
    match error {
        TimelineError::Read { .. } => Failure::world(error),
        TimelineError::NotATrace { .. } | TimelineError::NoSteps { .. } | TimelineError::NoStep { .. } => {
            Failure::usage(error)
        }
    }
}
