//! The loop: batches in, steps, evaluations, checkpoints, records.

use std::path::{Path, PathBuf};
use std::time::Instant;

use polyreme_data::{Loader, LoaderOptions, Span};

use super::prepared::Prepared;
use super::snapshot::{Progress, Tables, restore};
use crate::checkpoint::{self, Loaded, Store};
use crate::error::TrainError;
use crate::evaluate::{evaluate, values};
use crate::event::{Ending, Event, Observer, StepDone, Summary};
use crate::install::{install_file, ship};
use crate::job::Source;
use crate::judge::Judge;
use crate::metrics::{Best, Confusion, Patience, Verdict};
use crate::mixup;
use crate::record::{self, Recorder};
use crate::schedule::Horizon;
use crate::team::{Batch, StepResult, Team};

/// Evaluations take at least so many samples at once: a forward pass alone needs little memory.
const JUDGED_MIN: usize = 64;

/// A run that has its engines and its folder.
pub struct Run {
    prepared: Prepared,
    team: Team,
    judge: Option<Judge>,
    folder: PathBuf,
    store: Store,
    recorder: Recorder,
    tables: Tables,
    progress: Progress,
    /// The resolved job, for checkpoints.
    job: String,
    /// When this process began to train, moved back by what earlier ones took.
    started: Instant,
    /// When the last checkpoint was taken.
    saved: Instant,
    saved_step: u64,
    confusion: Option<Confusion>,
}

impl Run {
    /// Reserves everything and makes the folder. With `resumed`, goes on from there.
    pub fn new(mut prepared: Prepared, folder: &Path, resumed: Option<&Loaded>) -> Result<Run, TrainError> {
        let mut team = Team::new(&prepared.net, &prepared.spec, prepared.pace, prepared.team.clone())?;
        if let (Some(path), None) = (&prepared.job.model.weights, resumed) {
            install_file(team.learner_mut(), path)?;
        }
        let job = prepared.job.to_toml();
        let (best, stop) = (&prepared.job.output.best, &prepared.job.train.early_stop);
        let mut progress = Progress {
            seconds: 0.0,
            evaluating: 0.0,
            samples: 0,
            window: (0.0, 0),
            epoch: (0.0, 0),
            last_epoch_loss: None,
            best: best.as_ref().map(Best::new),
            patience: stop.as_ref().map(|s| Patience::new(&s.metric, s.patience, s.min_delta)),
            metrics: Vec::new(),
            preparation: prepared.preparation(),
        };
        if let Some(loaded) = resumed {
            progress = restore(&mut team, loaded)?;
            // As before, whatever the files on the disk would give now.
            prepared.stats = progress.preparation.stats();
        }
        let judge = match prepared.watched() {
            None => None,
            Some(set) => {
                let n = prepared.pace.micro.max(if prepared.spec.features.is_ids() { 1 } else { JUDGED_MIN });
                Some(Judge::new(&prepared.net, set.spec(), n.min(set.len()), prepared.threads)?)
            }
        };
        std::fs::create_dir_all(folder).map_err(|source| TrainError::io(folder, source))?;
        let mut store = Store::open(folder, prepared.job.output.keep, best.clone())?;
        if let Some(loaded) = resumed {
            store.go_back(loaded.manifest.step)?;
        }
        let options = record::Options { tensorboard: prepared.job.output.tensorboard, ..Default::default() };
        let recorder = match resumed {
            None => Recorder::create(folder, &options)?,
            Some(_) => Recorder::resume(folder, team.steps_done(), &options)?,
        };
        let file = folder.join("job.toml");
        std::fs::write(&file, &job).map_err(|source| TrainError::io(&file, source))?;
        let (tables, now, saved_step) = (Tables::new(&team), Instant::now(), team.steps_done());
        Ok(Run {
            prepared,
            team,
            judge,
            folder: folder.to_path_buf(),
            store,
            recorder,
            tables,
            progress,
            job,
            started: now,
            saved: now,
            saved_step,
            confusion: None,
        })
    }

    /// The engines.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// Trains to the end, or until `observer` wants to stop.
    pub fn train(mut self, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
        let steps = self.prepared.pace.total_steps(self.prepared.job.train.length);
        observer.event(Event::Started(&self.prepared.outline(&self.folder, self.team.steps_done())?));
        self.started = Instant::now();
        let mut loader = self.loader(steps)?;
        let mut ending = Ending::Finished;
        while self.team.steps_done() < steps {
            let step = self.team.steps_done();
            let (result, lr) = self.step(&mut loader, step, steps)?;
            self.note(step, steps, result, lr, &loader, observer)?;
            let stop = observer.stop_requested();
            let stopped_early = self.end_of_step(step, step + 1 == steps || stop, observer)?;
            if stopped_early {
                ending = Ending::EarlyStop;
                break;
            }
            if stop && step + 1 < steps {
                ending = Ending::Interrupted;
                break;
            }
        }
        drop(loader);
        self.save(observer)?;
        self.store.finish()?;
        self.finish(ending, observer)
    }

    fn loader(&self, steps: u64) -> Result<Loader, TrainError> {
        let (pace, first) = (self.prepared.pace, self.team.steps_done());
        let order = self.prepared.order(0);
        let plan = (first..steps).flat_map(move |step| {
            let order = order.of_epoch(pace.epoch(step));
            pace.pieces(step).map(move |p| Span { order, start: p.start, len: p.len })
        });
        let data = &self.prepared.job.data;
        let cheap = !matches!(data.source, Source::Images { .. });
        let threads = data.threads.unwrap_or(if cheap { 1 } else { self.prepared.threads });
        let options = LoaderOptions {
            batch_max: pace.micro,
            threads,
            prefetch: data.prefetch,
            seed: self.prepared.job.train.seed,
        };
        Ok(Loader::start(self.prepared.sets.train.clone(), self.prepared.transform()?, plan, options))
    }

    fn step(&mut self, loader: &mut Loader, step: u64, steps: u64) -> Result<(StepResult, f64), TrainError> {
        let (pace, train) = (self.prepared.pace, &self.prepared.job.train);
        let horizon = Horizon { steps, steps_per_epoch: pace.steps_per_epoch() };
        let lr = train.schedule.rate(train.optimizer.lr, step, horizon);
        let mix = if train.mixup > 0.0 { mixup::share(train.mixup, train.seed, step) } else { 1.0 };
        for piece in pace.pieces(step) {
            let batch = loader.next().expect("the plan has a batch for each piece")?;
            let batch = Batch { x: values(&batch), labels: &batch.labels, mix };
            if let Some(result) = self.team.piece(piece, batch, lr as f32)? {
                return Ok((result, lr));
            }
        }
        unreachable!("the last piece of a step ends it")
    }

    /// Seconds of the whole run, those before a resumption included.
    fn seconds(&self) -> f64 {
        self.progress.seconds + self.started.elapsed().as_secs_f64()
    }

    fn note(
        &mut self,
        step: u64,
        steps: u64,
        result: StepResult,
        lr: f64,
        loader: &Loader,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let (pace, seconds) = (self.prepared.pace, self.seconds());
        let samples = pace.len(step);
        self.progress.samples += samples as u64;
        for (sum, n) in [&mut self.progress.window, &mut self.progress.epoch] {
            *sum += result.loss;
            *n += 1;
        }
        let here = self.started.elapsed().as_secs_f64();
        observer.event(Event::Step(&StepDone {
            step: step + 1,
            steps,
            epoch: pace.epoch(step) + 1,
            epochs: steps.div_ceil(pace.steps_per_epoch()),
            loss: result.loss,
            lr,
            samples,
            seconds,
            waiting: loader.waited().as_secs_f64() / here.max(1e-9),
        }));
        let every = self.prepared.job.train.log_every_steps.max(1);
        if (step + 1).is_multiple_of(every) || step + 1 == steps {
            let (sum, n) = std::mem::take(&mut self.progress.window);
            let training = (seconds - self.progress.evaluating).max(1e-9);
            let mut line = vec![
                ("train_loss".to_string(), sum / n as f64),
                ("lr".to_string(), lr),
                ("samples_per_s".to_string(), self.progress.samples as f64 / training),
            ];
            line.extend(result.grad_norm.map(|norm| ("grad_norm".to_string(), norm)));
            self.record(step + 1, &line, observer);
        }
        if pace.ends_epoch(step) {
            let (sum, n) = std::mem::take(&mut self.progress.epoch);
            self.progress.last_epoch_loss = Some(sum / n as f64);
        }
        Ok(())
    }

    /// Evaluates and saves where it is time to; whether the run is to stop early.
    fn end_of_step(
        &mut self,
        step: u64,
        last: bool,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let (pace, train) = (self.prepared.pace, &self.prepared.job.train);
        let done = step + 1;
        let due = match train.evaluate_every_steps {
            Some(every) => done.is_multiple_of(every.max(1)),
            None => pace.ends_epoch(step),
        };
        let finished = last && !observer.stop_requested();
        let (best, stop) = if due || finished { self.evaluate(done, observer)? } else { (false, false) };
        let output = &self.prepared.job.output;
        let per_epoch = output.every_epochs.map(|n| n.max(1) * pace.steps_per_epoch());
        let minutes = self.saved.elapsed().as_secs_f64() / 60.0;
        let save = best
            || output.every_steps.is_some_and(|n| done.is_multiple_of(n.max(1)))
            || per_epoch.is_some_and(|n| done.is_multiple_of(n))
            || output.every_minutes.is_some_and(|limit| minutes >= limit);
        if save {
            self.save(observer)?;
        }
        Ok(stop)
    }

    /// Evaluates the watched set; whether it is the best, and whether patience is at its end.
    fn evaluate(&mut self, done: u64, observer: &mut dyn Observer) -> Result<(bool, bool), TrainError> {
        let (Some(judge), Some(set)) = (&mut self.judge, self.prepared.watched()) else {
            return Ok((false, false));
        };
        let began = Instant::now();
        judge.take(&self.team)?;
        let scores = evaluate(judge, set, &self.prepared.plain_transform(set.as_ref())?, 1)?;
        self.progress.evaluating += began.elapsed().as_secs_f64();
        let metrics = scores.named("val");
        self.confusion = scores.confusion().cloned();
        let value = |name: &str| metrics.iter().find(|(n, _)| n == name).map(|(_, v)| *v);
        let watched = self.progress.best.as_mut().and_then(|b| value(&b.metric).map(|v| b.observe(done, v)));
        let stop = match &mut self.progress.patience {
            Some(p) => value(p.metric()).is_some_and(|v| p.observe(v) == Verdict::Stop),
            None => false,
        };
        let best = watched.unwrap_or(false);
        remember(&mut self.progress.metrics, &metrics);
        self.record(done, &metrics, observer);
        let epoch = self.prepared.pace.epoch(done - 1) + 1;
        observer.event(Event::Evaluated { step: done, epoch, metrics: &metrics, best });
        Ok((best, stop))
    }

    /// Hands a checkpoint of this moment to the writer, unless there is one already.
    fn save(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let step = self.team.steps_done();
        if step == self.saved_step {
            return Ok(());
        }
        let began = Instant::now();
        let progress = Progress { seconds: self.seconds(), ..self.progress.clone() };
        let epoch = step / self.prepared.pace.steps_per_epoch();
        let buffers = self.store.take_buffers();
        let snapshot = self.tables.snapshot(&self.team, epoch, &progress, &self.job, buffers)?;
        let outcome = self.store.save(snapshot);
        (self.saved, self.saved_step) = (Instant::now(), step);
        observer.event(Event::Saving { step, held: began.elapsed() });
        if let Err(error) = outcome {
            observer.event(Event::Warning(&format!("a checkpoint could not be written: {error}")));
        }
        Ok(())
    }

    fn record(&mut self, step: u64, values: &[(String, f64)], observer: &mut dyn Observer) {
        let epoch = self.prepared.pace.epoch(step.saturating_sub(1));
        let values: Vec<(&str, f64)> = values.iter().map(|(name, v)| (name.as_str(), *v)).collect();
        if let Some(error) = self.recorder.log(step, epoch, self.seconds(), &values) {
            observer.event(Event::Warning(&error.to_string()));
        }
    }

    /// Writes the model that the run ends with, evaluates the test set with it, and reports.
    fn finish(mut self, ending: Ending, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
        let seconds = self.seconds();
        let model = self.folder.join("model.safetensors");
        let mut model_step = self.team.steps_done();
        if ending != Ending::Interrupted {
            if let Some(best) = self.best_elsewhere() {
                let loaded = checkpoint::load(&best)?;
                restore(&mut self.team, &loaded)?;
                model_step = loaded.manifest.step;
            }
            self.test(observer)?;
            ship(&model, &self.team)?;
        }
        let training = (seconds - self.progress.evaluating).max(1e-9);
        let (sum, n) = self.progress.epoch;
        let partial = (n > 0).then(|| sum / n as f64);
        let final_loss = self.progress.last_epoch_loss.or(partial).unwrap_or(f64::NAN);
        let metrics = self.progress.metrics.iter().map(|(name, v)| (name.clone(), (*v).into())).collect();
        let summary = Summary {
            steps: self.saved_step,
            seconds,
            samples_per_s: self.progress.samples as f64 / training,
            final_loss,
            metrics,
            output: self.folder.clone(),
            model,
            ending,
            model_step,
        };
        let report = self.report(&summary);
        if let Err(error) = self.recorder.finish(&report) {
            observer.event(Event::Warning(&error.to_string()));
        }
        observer.event(Event::Finished(&summary));
        Ok(summary)
    }

    fn report(&self, summary: &Summary) -> record::report::Summary {
        let ended = match summary.ending {
            Ending::Finished => "Finished",
            Ending::EarlyStop => "Stopped early",
            Ending::Interrupted => "Interrupted",
        };
        // The test set's figures are what counts.
        let mut metrics = self.progress.metrics.clone();
        metrics.sort_by_key(|(name, _)| !name.starts_with("test"));
        record::report::Summary {
            title: self.prepared.job.name.clone(),
            ended: ended.into(),
            steps: summary.steps,
            seconds: summary.seconds,
            samples_per_s: summary.samples_per_s,
            metrics,
            best: self.progress.best.clone(),
            settings: settings(&self.job),
            system: self.prepared.system.clone(),
            confusion: self.confusion.clone(),
            class_names: self.progress.preparation.names.clone(),
            warnings: Vec::new(),
        }
    }

    /// The best checkpoint, if it is another than the last.
    fn best_elsewhere(&self) -> Option<PathBuf> {
        let best = self.progress.best.as_ref().filter(|b| b.value.is_some())?;
        (best.step != self.team.steps_done()).then(|| self.folder.join("checkpoints/best"))
    }

    /// Evaluates the test set with the weights that are shipped.
    fn test(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let (Some(judge), Some(set)) = (&mut self.judge, &self.prepared.sets.test) else { return Ok(()) };
        judge.take(&self.team)?;
        let scores = evaluate(judge, set, &self.prepared.plain_transform(set.as_ref())?, 1)?;
        let metrics = scores.named("test");
        self.confusion = scores.confusion().cloned();
        remember(&mut self.progress.metrics, &metrics);
        let (step, epoch) = (self.team.steps_done(), self.prepared.pace.epoch(self.team.steps_done()));
        self.record(step, &metrics, observer);
        observer.event(Event::Evaluated { step, epoch, metrics: &metrics, best: false });
        Ok(())
    }
}

/// The last value of each metric.
fn remember(known: &mut Vec<(String, f64)>, new: &[(String, f64)]) {
    for (name, value) in new {
        match known.iter_mut().find(|(n, _)| n == name) {
            Some((_, v)) => *v = *value,
            None => known.push((name.clone(), *value)),
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
