//! `polyreme inspect PATH --timeline FILE.svg`: a step of a timeline as a picture.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use polyreme_train::record::timeline::{StepTimeline, TimelineError, Trace, svg};
use polyreme_train::record::trace;
use serde_json::json;

use super::ending::Failure;
use super::{CommandResult, print_json};

#[derive(Args)]
pub(super) struct TimelineArgs {
    /// Draw a step: ranks over time, what each computes, exchanges and waits for. PATH is the file that `--trace` wrote, or a
    /// run's folder with that file as `trace.json`.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "graph")]
    pub(super) timeline: Option<PathBuf>,
    /// With `--timeline`: the step to draw [default: a typical one].
    #[arg(long, value_name = "N", requires = "timeline")]
    step: Option<u64>,
    /// With `--timeline`: another timeline, drawn below on the same scale.
    #[arg(long, value_name = "PATH", requires = "timeline")]
    beside: Option<PathBuf>,
}

impl TimelineArgs {
    /// Draws what `path` has.
    pub(super) fn draw(&self, path: &Path, picture: &Path, json: bool) -> CommandResult {
        let mut steps = vec![read(path, self.step)?];
        if let Some(beside) = &self.beside {
            // Runs need not have the same steps; a simulation has one.
            steps.push(read(beside, self.step).or_else(|_| read(beside, None))?);
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
}

/// A step of what a file, or the file in a run's folder, has.
fn read(path: &Path, step: Option<u64>) -> Result<StepTimeline, Failure> {
    if path.extension().is_some_and(|e| e == "toml") {
        let why = "a timeline is drawn from what a run has recorded";
        let path = path.display();
        return Err(Failure::usage(format!(
            "{path}: {why}; run `polyreme train {path} --trace {file}` and give {file}",
            file = trace::FILE
        )));
    }
    let file = if path.is_dir() { path.join(trace::FILE) } else { path.to_path_buf() };
    if path.is_dir() && !file.is_file() {
        let (path, file) = (path.display(), file.display());
        return Err(Failure::usage(format!(
            "{path}: there is no {} in it; train with `--trace {file}`",
            trace::FILE
        )));
    }
    Trace::read(&file).and_then(|trace| trace.step(step)).map_err(|error| match error {
        TimelineError::Read { .. } => Failure::world(error),
        TimelineError::NotATrace { .. } | TimelineError::NoSteps { .. } | TimelineError::NoStep { .. } => {
            Failure::usage(error)
        }
    })
}
