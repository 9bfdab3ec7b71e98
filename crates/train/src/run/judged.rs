//! Evaluations during a run and at its end: every rank judges a part of the set, and all have the scores.

use std::sync::Arc;
use std::time::Instant;

use polyreme_data::Dataset;

use super::train::Run;
use crate::error::TrainError;
use crate::evaluate::evaluate;
use crate::event::{Event, Observer};
use crate::metrics::{Measured, Verdict};

/// The one metric that needs no set to be evaluated.
const TRAIN_LOSS: &str = "train_loss";

impl Run {
    /// Evaluates the validation set, if there is one; whether it is the best, and whether patience is at its end. The test
    /// set has no say in either. Collective.
    pub(super) fn evaluate(
        &mut self,
        done: u64,
        observer: &mut dyn Observer,
    ) -> Result<(bool, bool), TrainError> {
        let mut metrics = Vec::new();
        if let Some(set) = self.prepared.sets.validation.clone() {
            let began = Instant::now();
            let scores = self.scores(&set)?;
            self.progress.evaluating += began.elapsed().as_secs_f64();
            metrics = scores.named("val");
            self.confusion = scores.confusion().cloned();
        }
        let train_loss = self.train_loss();
        let value = |name: &str| match name {
            TRAIN_LOSS => train_loss,
            name => metrics.iter().find(|(n, _)| n == name).map(|(_, v)| *v),
        };
        let watched = self.progress.best.as_mut().and_then(|b| value(&b.metric).map(|v| b.observe(done, v)));
        let stop = match &mut self.progress.patience {
            Some(p) => value(p.metric()).is_some_and(|v| p.observe(v) == Verdict::Stop),
            None => false,
        };
        let best = watched.unwrap_or(false);
        remember(&mut self.progress.metrics, &metrics);
        if let (Some(b), Some(loss)) = (&self.progress.best, train_loss)
            && b.metric == TRAIN_LOSS
        {
            // Which checkpoint is the best is decided by its metrics.
            remember(&mut self.progress.metrics, &[(TRAIN_LOSS.into(), loss)]);
        }
        if metrics.is_empty() {
            // Its record has the loss already; who watches is told what there is.
            metrics.extend(train_loss.map(|loss| (TRAIN_LOSS.to_string(), loss)));
        } else {
            self.record(done, &metrics, observer);
        }
        let epoch = self.prepared.pace.epoch(done - 1) + 1;
        observer.event(Event::Evaluated { step: done, epoch, metrics: &metrics, best });
        Ok((best, stop))
    }

    /// The mean loss of the training steps of this epoch, or of the one that has just ended.
    fn train_loss(&self) -> Option<f64> {
        let (sum, n) = self.progress.epoch;
        if n > 0 { Some(sum / n as f64) } else { self.progress.last_epoch_loss }
    }

    /// Evaluates the test set with the weights that are shipped. Collective.
    pub(super) fn test(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(set) = self.prepared.sets.test.clone() else { return Ok(()) };
        let scores = self.scores(&set)?;
        let metrics = scores.named("test");
        self.confusion = scores.confusion().cloned();
        remember(&mut self.progress.metrics, &metrics);
        let (step, epoch) = (self.learner.steps_done(), self.prepared.pace.epoch(self.learner.steps_done()));
        self.record(step, &metrics, observer);
        observer.event(Event::Evaluated { step, epoch, metrics: &metrics, best: false });
        Ok(())
    }

    /// The scores of a set with the weights that would be shipped, the same on all ranks.
    fn scores(&mut self, set: &Arc<dyn Dataset>) -> Result<Measured, TrainError> {
        self.learner.average_states()?;
        self.learner.swap_average()?;
        let shared = self.learner.share_own()?;
        let transform = self.prepared.plain_transform(set.as_ref())?;
        // Workers that take whole steps share an evaluation all the same.
        let weights = match self.prepared.learner.plan.is_free() {
            true => self.prepared.worker_weights(self.prepared.ranks()),
            false => self.prepared.cut.weights.clone(),
        };
        let mut judge = self.learner.judge().expect("a set to evaluate, and so an evaluation");
        let scores = evaluate(&mut judge, set, &transform, 1, &weights)?;
        if shared {
            self.learner.take_back_own()?;
        }
        self.learner.swap_average()?;
        Ok(scores)
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
