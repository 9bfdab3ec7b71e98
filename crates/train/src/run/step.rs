//! One rank's part of every step: its samples, its pieces, and how its part changes with its speed.

use std::time::Instant;

use polyreme_data::{Loader, LoaderOptions, Span};

use super::train::{Run, Wishes};
use crate::balance::{self, Decision, Measured, decide};
use crate::error::TrainError;
use crate::evaluate::values;
use crate::event::{Event, Observer};
use crate::job::{Balance, Source};
use crate::mixup;
use crate::pace::Part;
use crate::schedule::Horizon;
use crate::talk;
use crate::team::{Batch, StepResult};

/// What rank 0 adds to the sum of wishes if it is time for a checkpoint: more than there are ranks who wish to stop.
const SAVE: f64 = 4_294_967_296.0;

impl Run {
    /// Reads this rank's samples from the next step on, and no others.
    pub(super) fn loader(&self, steps: u64) -> Result<Loader, TrainError> {
        let (pace, first) = (self.prepared.pace, self.team.steps_done());
        let (order, part) = (self.prepared.order(0), self.part.clone());
        let plan = (first..steps).flat_map(move |step| {
            let (order, start) = (order.of_epoch(pace.epoch(step)), pace.start(step));
            let pieces = part.pieces(step).iter().filter(|p| p.len > 0);
            pieces.map(|p| Span { order, start: start + p.offset, len: p.len }).collect::<Vec<_>>()
        });
        let data = &self.prepared.job.data;
        let cheap = !matches!(data.source, Source::Images { .. });
        let threads = data.threads.unwrap_or(if cheap { 1 } else { self.prepared.threads });
        let options = LoaderOptions {
            batch_max: self.part.lengths()[0],
            threads,
            prefetch: data.prefetch,
            seed: self.prepared.job.train.seed,
        };
        Ok(Loader::start(self.prepared.sets.train.clone(), self.prepared.transform()?, plan, options))
    }

    /// This rank's part of a step. Returns what all ranks wish.
    pub(super) fn step(
        &mut self,
        loader: &mut Loader,
        step: u64,
        steps: u64,
        wishes: Wishes,
    ) -> Result<(StepResult, f64, Wishes), TrainError> {
        let (pace, train) = (self.prepared.pace, &self.prepared.job.train);
        let horizon = Horizon { steps, steps_per_epoch: pace.steps_per_epoch() };
        let lr = train.schedule.rate(train.optimizer.lr, step, horizon);
        let mix = if train.mixup > 0.0 { mixup::share(train.mixup, train.seed, step) } else { 1.0 };
        let flags = f64::from(u8::from(wishes.stop)) + if wishes.save { SAVE } else { 0.0 };
        let extra = [flags, self.waited_last.as_secs_f64()];
        let (began, waited_before) = (Instant::now(), loader.waited());
        self.team.begin(pace.len(step));
        for _ in 0..self.part.missing(step) {
            self.team.empty_piece()?;
        }
        let pieces = self.part.pieces(step);
        // The last piece ends the step, unless the step is cut into shards.
        let last = if self.prepared.cut.shards.is_some() { None } else { pieces.len().checked_sub(1) };
        let mut result = None;
        for (k, &piece) in pieces.iter().enumerate() {
            let loaded = match piece.len {
                0 => None,
                _ => Some(loader.next().expect("the plan has a batch for each piece")?),
            };
            let batch = loaded.as_ref().map(|b| Batch { x: values(b), labels: &b.labels, mix });
            match batch {
                Some(batch) if Some(k) == last => {
                    result = Some(self.team.finish(Some((piece, batch)), lr as f32, extra)?);
                }
                batch => self.team.piece(piece, batch)?,
            }
        }
        let result = match result {
            Some(result) => result,
            None => self.team.finish(None, lr as f32, extra)?,
        };
        let idle = result.waited + (loader.waited() - waited_before);
        self.measured.samples += self.part.samples(step) as f64;
        self.measured.seconds += began.elapsed().saturating_sub(idle).as_secs_f64();
        self.waited_last = result.waited;
        let save = result.extra[0] >= SAVE;
        let stop = result.extra[0] - if save { SAVE } else { 0.0 } > 0.0;
        Ok((result, lr, Wishes { stop, save }))
    }

    /// Looks at the ranks' speeds now and then; whether samples are shared out in another way from now on. Collective.
    pub(super) fn rebalance(&mut self, done: u64, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let (ranks, batch) = (self.prepared.ranks(), self.prepared.pace.batch);
        let looks = self.prepared.job.parallel.balance == Balance::Auto && self.prepared.cut.shards.is_none();
        if !looks || ranks == 1 || !done.is_multiple_of(balance::EVERY_STEPS) {
            return Ok(false);
        }
        let mine = std::mem::take(&mut self.measured);
        let all = talk::gather_all(self.team.comm(), &[mine.samples, mine.seconds])?;
        let all: Vec<_> = all.chunks_exact(2).map(|m| Measured { samples: m[0], seconds: m[1] }).collect();
        let mut weights = self.prepared.cut.weights.clone();
        let decision = decide(batch, &weights, &all);
        if let (0, Decision::Change { weights: new, .. }) = (self.rank, &decision) {
            weights.clone_from(new);
        }
        // Rank 0's word counts, should another machine round in another way.
        self.team.comm().broadcast(&mut weights, 0)?;
        if weights == self.prepared.cut.weights {
            return Ok(false);
        }
        self.prepared.cut.weights = weights;
        self.part = Part::new(self.prepared.pace, &self.prepared.cut, self.rank);
        self.team.prepare(&self.part.lengths())?;
        observer.event(Event::Balanced { step: done, why: &decision.to_string() });
        Ok(true)
    }
}
