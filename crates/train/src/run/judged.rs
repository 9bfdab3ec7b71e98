//! Evaluations during a run and at its end: every rank judges a part of the set, and all have the scores.

use std::sync::Arc;
use std::time::Instant;

use polyreme_collective::Doing;
use polyreme_data::Dataset;

use super::train::Run;
use crate::error::TrainError;
use crate::evaluate::{evaluate_blocks, n_blocks};
use crate::event::{Event, Observer};
use crate::metrics::{Scores, Verdict};
use crate::share::share;

impl Run {
    /// Evaluates the watched set; whether it is the best, and whether patience is at its end. Collective.
    pub(super) fn evaluate(
        &mut self,
        done: u64,
        observer: &mut dyn Observer,
    ) -> Result<(bool, bool), TrainError> {
        let Some(set) = self.prepared.watched().cloned() else { return Ok((false, false)) };
        let began = Instant::now();
        let scores = self.scores(&set)?;
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

    /// Evaluates the test set with the weights that are shipped. Collective.
    pub(super) fn test(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(set) = self.prepared.sets.test.clone() else { return Ok(()) };
        let scores = self.scores(&set)?;
        let metrics = scores.named("test");
        self.confusion = scores.confusion().cloned();
        remember(&mut self.progress.metrics, &metrics);
        let (step, epoch) = (self.team.steps_done(), self.prepared.pace.epoch(self.team.steps_done()));
        self.record(step, &metrics, observer);
        observer.event(Event::Evaluated { step, epoch, metrics: &metrics, best: false });
        Ok(())
    }

    /// The scores of a set with the weights that would be shipped, the same on all ranks.
    fn scores(&mut self, set: &Arc<dyn Dataset>) -> Result<Scores, TrainError> {
        self.team.learner_mut().average_states()?;
        self.team.swap_average()?;
        let transform = self.prepared.plain_transform(set.as_ref())?;
        self.team.comm().set_doing(Doing::Evaluating);
        let mut judge = self.team.judge().expect("a set to watch, and so an evaluation");
        let blocks = share(n_blocks(&judge, set.as_ref()), &self.prepared.cut.weights, self.rank);
        let part = evaluate_blocks(&mut judge, set, &transform, 1, blocks)?;
        let scores = part.gather(self.team.comm())?;
        self.team.swap_average()?;
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
