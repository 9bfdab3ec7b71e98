//! What rank 0 writes: the folder of a run, its checkpoints, records and report. Other ranks have none of it.

use super::apart::save_apart;
use super::folder::{Hold, JOB_FILE};
use super::prepared::Prepared;
use super::snapshot::{Frame, Progress, Tables};
use crate::checkpoint::{Disk, Store};
use crate::error::TrainError;
use crate::event::{Ending, Event, Observer, Summary};
use crate::learner::Learner;
use crate::metrics::Confusion;
use crate::record::{self, Recorder};

/// The files of a run.
pub(super) struct Files {
    store: Store,
    recorder: Recorder,
    tables: Tables,
    /// The resolved job, for checkpoints.
    job: String,
    /// What is to be told.
    notes: Vec<String>,
}

impl Files {
    /// Begins the run in its folder, or goes on with it.
    pub(super) fn open(hold: Hold, prepared: &Prepared, learner: &Learner) -> Result<Files, TrainError> {
        let (job, output) = (prepared.job.to_toml(), &prepared.job.output);
        let folder = hold.folder().to_path_buf();
        let (store, goes_on, notes) = hold.begin(output.keep, output.best.clone(), learner.steps_done())?;
        // Before anything else: from here on the run can go on, whenever it is killed.
        Disk::default().write_whole(&folder.join(JOB_FILE), job.as_bytes())?;
        let options = record::Options { tensorboard: output.tensorboard, ..Default::default() };
        let recorder = match goes_on {
            false => Recorder::create(&folder, &options)?,
            true => Recorder::resume(&folder, learner.steps_done(), &options)?,
        };
        Ok(Files { store, recorder, tables: Tables::new(learner), job, notes })
    }

    /// The same for a group of other ranks, which have the same model.
    pub(super) fn of_group(self, learner: &Learner) -> Files {
        Files { tables: Tables::new(learner), ..self }
    }

    /// Tells what there is to be said about the folder.
    pub(super) fn tell(&mut self, observer: &mut dyn Observer) {
        self.notes.extend(self.store.take_notes().into_iter().map(String::from));
        self.notes.drain(..).for_each(|note| observer.event(Event::Warning(&note)));
    }

    /// Waits for the last checkpoint. That it failed is an error for a run that is to go on from it; one that has
    /// finished has its model to write still.
    pub(super) fn settle(&mut self, ending: Ending, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let written = self.store.finish();
        self.tell(observer);
        match (written, ending) {
            (Ok(()), _) => Ok(()),
            (Err(error), Ending::Interrupted) => Err(error.into()),
            (Err(error), Ending::Finished | Ending::EarlyStop) => {
                observer.event(Event::Warning(&format!("the last checkpoint could not be written: {error}")));
                Ok(())
            }
        }
    }

    /// Hands a checkpoint of this moment to the writer. Collective; other ranks hand over their part.
    pub(super) fn save(
        &mut self,
        learner: &mut Learner,
        epoch: u64,
        progress: &Progress,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let frame = Frame { epoch, progress, job: &self.job };
        let saved = match learner.is_apart() {
            true => save_apart(learner, frame, &mut self.store)?,
            false => {
                let buffers = self.store.take_buffers();
                self.store.save(self.tables.snapshot(learner, frame, buffers)?)
            }
        };
        if let Err(error) = saved {
            observer.event(Event::Warning(&format!("a checkpoint could not be written: {error}")));
        }
        self.tell(observer);
        Ok(())
    }

    /// Writes a line of metrics.
    pub(super) fn record(
        &mut self,
        step: u64,
        epoch: u64,
        seconds: f64,
        values: &[(String, f64)],
        observer: &mut dyn Observer,
    ) {
        let values: Vec<(&str, f64)> = values.iter().map(|(name, v)| (name.as_str(), *v)).collect();
        if let Some(error) = self.recorder.log(step, epoch, seconds, &values) {
            observer.event(Event::Warning(&error.to_string()));
        }
    }

    /// Writes the report.
    pub(super) fn finish(
        self,
        prepared: &Prepared,
        progress: &Progress,
        confusion: Option<&Confusion>,
        summary: &Summary,
        observer: &mut dyn Observer,
    ) {
        let ended = match summary.ending {
            Ending::Finished => "Finished",
            Ending::EarlyStop => "Stopped early",
            Ending::Interrupted => "Interrupted",
        };
        // The test set's figures are what counts.
        let mut metrics = progress.metrics.clone();
        metrics.sort_by_key(|(name, _)| !name.starts_with("test"));
        let report = record::report::Summary {
            title: prepared.job.name.clone(),
            ended: ended.into(),
            steps: summary.steps,
            seconds: summary.seconds,
            samples_per_s: summary.samples_per_s,
            metrics,
            best: progress.best.clone(),
            settings: settings(&self.job),
            system: prepared.system.clone(),
            confusion: confusion.cloned(),
            class_names: progress.preparation.names.clone(),
            warnings: Vec::new(),
        };
        if let Err(error) = self.recorder.finish(&report) {
            observer.event(Event::Warning(&error.to_string()));
        }
    }
}

/// The lines of a job as `section.key` and value; a list that goes over several lines is one value.
fn settings(toml: &str) -> Vec<(String, String)> {
    let mut section = "";
    let mut settings: Vec<(String, String)> = Vec::new();
    for line in toml.lines() {
        let goes_on = line.starts_with([' ', ']']);
        match (settings.last_mut(), line.split_once(" = ")) {
            (Some((_, value)), _) if goes_on => {
                value.push(' ');
                value.push_str(line.trim());
            }
            (_, Some((key, value))) => settings.push((format!("{section}.{key}"), value.to_string())),
            _ => section = line.trim_matches(['[', ']']),
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_the_lines_of_a_job() {
        let job = "[model]\nlayers = [\n    \"relu\",\n    { kind = \"linear\" },\n]\n\n[train]\nbatch = 8\n";
        let want = [("model.layers", "[ \"relu\", { kind = \"linear\" }, ]"), ("train.batch", "8")];
        assert_eq!(settings(job), want.map(|(key, value)| (key.to_string(), value.to_string())));
    }
}
