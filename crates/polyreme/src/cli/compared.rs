//! What `polyreme inspect RUN` says of a run that was planned: predicted beside measured.

use std::io::{self, Write};
use std::path::Path;

use polyreme_train::checkpoint;
use polyreme_train::record::history::History;
use polyreme_train::run::Progress;
use polyreme_train::run::planned_step::{PlannedStep, recorded_step_ms};
use serde::{Deserialize, Serialize};

use super::CommandResult;
use crate::plan::row::{counted, mesh_words};

/// A planned run, as predicted and as it ran.
#[derive(Serialize)]
pub(super) struct ComparedRun {
    /// Ranks along data, tensor, stage and sequence.
    mesh: [usize; 4],
    /// Threads of each rank.
    threads: usize,
    /// Where the predicted times come from.
    source: String,
    /// How long a step takes, the measured one as the median of the records.
    step_ms: ComparedFigure,
    /// What a process takes: predicted of the largest, measured of rank 0's.
    memory_mib: ComparedFigure,
    #[serde(skip)]
    plan: PlannedStep,
}

/// A figure, predicted and measured.
#[derive(Serialize)]
struct ComparedFigure {
    predicted: f64,
    /// Not there if too little was recorded.
    measured: Option<f64>,
    /// How much the prediction is above the measurement, as a share of it.
    error: Option<f64>,
}

impl ComparedFigure {
    fn new(predicted: f64, measured: Option<f64>) -> ComparedFigure {
        let measured = measured.filter(|m| *m > 0.0);
        ComparedFigure { predicted, measured, error: measured.map(|m| predicted / m - 1.0) }
    }

    fn line(&self, what: &str, unit: &str, digits: usize) -> String {
        let number = |x: f64| format!("{x:.digits$} {unit}");
        let measured = self.measured.map_or("-".to_string(), number);
        let error = self.error.map_or("-".to_string(), |error| format!("{:+.1} %", error * 100.0));
        format!("  {what:<8} {:>14} {measured:>14} {error:>10}", number(self.predicted))
    }
}

impl ComparedRun {
    /// Compares, by the newest checkpoint of a run; `None` if the run, as it goes on now, was not planned.
    pub(super) fn of(run: &Path, history: &History) -> Option<ComparedRun> {
        let newest = checkpoint::list(run).ok()?.into_iter().rev().find_map(|entry| entry.manifest.ok())?;
        let progress = Progress::deserialize(&newest.progress).ok()?;
        let plan = progress.planned.clone()?;
        Some(ComparedRun {
            mesh: plan.mesh,
            threads: plan.threads,
            source: plan.source.clone(),
            step_ms: ComparedFigure::new(plan.step_ms, recorded_step_ms(history)),
            memory_mib: ComparedFigure::new(plan.memory_mib, progress.peak_mib),
            plan,
        })
    }

    /// As a table.
    pub(super) fn show(&self) -> CommandResult {
        let mut out = io::stdout().lock();
        let (mesh, threads) = (mesh_words(&self.plan.mesh()), counted(self.threads, "thread"));
        writeln!(out, "\n  planned: {mesh}, {threads} per rank, by {}", self.source)?;
        writeln!(out, "  {:<8} {:>14} {:>14} {:>10}", "", "predicted", "measured", "error")?;
        writeln!(out, "{}", self.step_ms.line("step", "ms", 2))?;
        Ok(writeln!(out, "{}", self.memory_mib.line("memory", "MiB", 1))?)
    }
}
