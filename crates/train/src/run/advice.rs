//! What would make a job fit that does not: each change is tried with the memory plan, and none is guessed.

use std::fmt;

use polyreme_graph::{DType, Keeps};
use polyreme_parallel::Mesh;

use super::fit::{Limit, Lodging, Need, Scope, mib};
use super::prepared::Prepared;
use crate::error::TrainError;
use crate::job::{Balance, OptimizerSpec, PrecisionKind};
use crate::pace::Pace;

/// What would fit.
#[derive(Clone, PartialEq, Debug)]
pub struct Advice {
    /// The largest batch, with everything else as it is; `None` if not even one sample fits.
    pub batch: Option<(usize, Need)>,
    /// Settings that take less with the batch as it is.
    pub options: Vec<Choice>,
}

/// A setting that takes less.
#[derive(Clone, PartialEq, Debug)]
pub struct Choice {
    /// What to write.
    pub setting: String,
    /// What the job takes then.
    pub need: Need,
    /// Whether that fits.
    pub fits: bool,
    /// Its price.
    pub price: &'static str,
}

/// A job with some settings changed.
struct Trier<'a> {
    prepared: &'a Prepared,
    lodging: Lodging,
    limits: &'a [Limit],
    /// As it is.
    need: Need,
}

impl Advice {
    pub(super) fn new(
        prepared: &Prepared,
        lodging: Lodging,
        limits: &[Limit],
        need: Need,
    ) -> Result<Advice, TrainError> {
        let trier = Trier { prepared, lodging, limits, need };
        let options = [
            trier.accumulate()?,
            trier.bf16()?,
            trier.recompute()?,
            trier.bf16_moments()?,
            trier.shard_gradients()?,
            trier.fewer_ranks()?,
        ];
        Ok(Advice { batch: trier.batch()?, options: options.into_iter().flatten().collect() })
    }

    pub(super) fn write(&self, f: &mut fmt::Formatter, scope: Scope) -> fmt::Result {
        match self.batch {
            Some((batch, need)) => {
                let need = mib(need.of(scope));
                write!(f, "\n  the largest batch that fits: train.batch = {batch} takes {need}")?;
            }
            None => write!(f, "\n  not even the smallest batch fits as it is")?,
        }
        for (fits, title) in [
            (true, "with the batch as it is, one of these fits:"),
            (false, "these take less, but are not enough by themselves:"),
        ] {
            let chosen: Vec<_> = self.options.iter().filter(|o| o.fits == fits).collect();
            if !chosen.is_empty() {
                write!(f, "\n  {title}")?;
            }
            for Choice { setting, need, price, .. } in chosen {
                write!(f, "\n    {setting} takes {}; {price}", mib(need.of(scope)))?;
            }
        }
        Ok(())
    }
}

impl Trier<'_> {
    /// What the job takes with a change; `None` if it cannot be made.
    fn with(&self, lodging: Lodging, change: impl FnOnce(&mut Prepared)) -> Result<Option<Need>, TrainError> {
        let mut changed = self.prepared.clone();
        change(&mut changed);
        match changed.need(lodging) {
            Ok(need) => Ok(Some(need)),
            // Less than this can be had by no recomputation.
            Err(TrainError::Budget(_)) => Ok(None),
            // Too few microbatches for the stages.
            Err(TrainError::Mesh(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn fits(&self, need: &Need) -> bool {
        need.exceeds(self.limits).is_none()
    }

    /// A setting, if it takes less than the job as it is, by more than a hundredth.
    fn choice(&self, setting: String, need: Option<Need>, price: &'static str) -> Option<Choice> {
        let need = need?;
        let less = |scope: Scope| need.of(scope) < self.need.of(scope) / 100 * 99;
        let fits = self.fits(&need);
        let helps = fits || self.limits.iter().any(|limit| less(limit.scope));
        helps.then_some(Choice { setting, need, fits, price })
    }

    /// What a batch takes if that fits, in epochs of so many samples.
    fn with_batch(&self, batch: usize, samples: usize) -> Result<Option<Need>, TrainError> {
        let need = self.with(self.lodging, |p| {
            (p.job.train.batch, p.pace) = (batch, Pace { samples, batch: batch.min(samples) });
        })?;
        Ok(need.filter(|need| self.fits(need)))
    }

    /// The largest batch that fits: batches are whole microbatches, or whole logical shards.
    fn batch(&self) -> Result<Option<(usize, Need)>, TrainError> {
        let (cut, Pace { samples, batch }) = (&self.prepared.cut, self.prepared.pace);
        let unit = cut.shards.unwrap_or(cut.accumulate).max(1);
        let found = largest(batch / unit, |units| self.with_batch(units * unit, samples))?;
        Ok(found.map(|(units, need)| (units * unit, need)))
    }

    /// More microbatches, each of which is shorter: as few as fit, or as many as there can be.
    fn accumulate(&self) -> Result<Option<Choice>, TrainError> {
        let (batch, now) = (self.prepared.job.train.batch, self.prepared.cut.accumulate);
        // A reproducible step is cut into shards.
        if self.prepared.cut.shards.is_some() {
            return Ok(None);
        }
        let divisors: Vec<usize> = (now + 1..=batch).filter(|n| batch.is_multiple_of(*n)).collect();
        let with = |n: usize| {
            self.with(self.lodging, |p| {
                (p.job.train.accumulate, p.cut.accumulate, p.learner.plan.microbatches) = (n, n, n);
            })
        };
        let Some(&most) = divisors.last() else { return Ok(None) };
        // From the end: the first that does not fit ends the search.
        let fits = |k: usize| Ok(with(divisors[divisors.len() - k])?.filter(|need| self.fits(need)));
        let (n, need) = match largest(divisors.len(), fits)? {
            Some((k, need)) => (divisors[divisors.len() - k], Some(need)),
            None => (most, with(most)?),
        };
        let price = "a step is cut into as many microbatches";
        Ok(self.choice(format!("train.accumulate = {n}"), need, price))
    }

    /// Activations and their gradients in bf16. A run that is strict is so for its accuracy.
    fn bf16(&self) -> Result<Option<Choice>, TrainError> {
        if !matches!(self.prepared.job.train.precision, PrecisionKind::F32 | PrecisionKind::Auto) {
            return Ok(None);
        }
        let need = self.with(self.lodging, |p| {
            p.job.train.precision = PrecisionKind::Bf16;
            p.learner.plan.precision = p.job.precision();
        })?;
        let price = "activations are rounded to 8 bits, the weights stay exact";
        Ok(self.choice("train.precision = \"bf16\"".into(), need, price))
    }

    /// The optimizer's state in bf16.
    fn bf16_moments(&self) -> Result<Option<Choice>, TrainError> {
        let OptimizerSpec { rule, moments, .. } = self.prepared.job.train.optimizer;
        if !rule.by_element() || rule.n_states() == 0 || moments != DType::F32 {
            return Ok(None);
        }
        let need = self.with(self.lodging, |p| {
            (p.job.train.optimizer.moments, p.learner.training.moments) = (DType::Bf16, DType::Bf16);
        })?;
        let price = "the optimizer's state is rounded to 8 bits, at random";
        Ok(self.choice("train.optimizer.moments = \"bf16\"".into(), need, price))
    }

    /// Values that are computed twice instead of kept.
    fn recompute(&self) -> Result<Option<Choice>, TrainError> {
        let processes = if self.lodging.threads { 1 } else { self.lodging.here.max(1) };
        let over = self.limits.iter().filter_map(|limit| {
            let n = if matches!(limit.scope, Scope::Host | Scope::Group) { processes } else { 1 };
            self.need.of(limit.scope).checked_sub(limit.bytes).map(|over| over.div_ceil(n))
        });
        let plan = self.prepared.plan_bytes(self.lodging)?;
        let Some(mib) = plan.checked_sub(over.max().unwrap_or(0)).map(|bytes| bytes >> 20).filter(|m| *m > 0)
        else {
            return Ok(None);
        };
        let need = self.with(self.lodging, |p| p.learner.memory_bytes = Some(mib << 20))?;
        let price = "activations are computed a second time, so steps take longer";
        Ok(self.choice(format!("train.memory_mib = {mib}"), need, price))
    }

    /// Every rank keeps its own part of the gradients.
    fn shard_gradients(&self) -> Result<Option<Choice>, TrainError> {
        let mut spec = self.prepared.job.parallel.clone();
        if spec.shard_gradients || self.prepared.mesh().data == 1 {
            return Ok(None);
        }
        spec.shard_gradients = true;
        if spec.refuses_to_shard(&self.prepared.job.train.optimizer).is_some() {
            return Ok(None);
        }
        let need = self.with(self.lodging, |p| p.learner.keeps = Some(Keeps::OwnGradients))?;
        let price = "gradients are summed as soon as they are ready";
        Ok(self.choice("parallel.shard_gradients = true".into(), need, price))
    }

    /// As many ranks as fit, where the user may choose.
    fn fewer_ranks(&self) -> Result<Option<Choice>, TrainError> {
        let (ranks, threads) = (self.prepared.ranks(), self.prepared.threads);
        // Of a mesh, fewer copies of the model are another mesh.
        let only_data = self.prepared.mesh().replica_ranks() == 1;
        let Some(flag) = self.lodging.flag.filter(|_| ranks > 1 && only_data) else { return Ok(None) };
        if matches!(self.prepared.job.parallel.balance, Balance::Given(_)) {
            return Ok(None);
        }
        let with = |n: usize| {
            self.with(Lodging { here: n, ..self.lodging }, |p| {
                (p.cut.weights, p.learner.plan.mesh) = (vec![1.0; n], Mesh::data(n));
                if p.job.parallel.threads.is_none() {
                    p.threads = threads * ranks / n;
                }
            })
        };
        let fits = |n: usize| Ok(with(n)?.filter(|need| self.fits(need)));
        let (n, need) = match largest(ranks - 1, fits)? {
            Some((n, need)) => (n, Some(need)),
            None => (1, with(1)?),
        };
        let price = "every rank has gradients of its own";
        Ok(self.choice(format!("{flag} {n}"), need, price))
    }
}

/// The largest of `1..=most` for which `fits` gives something, if it does so up to some number and not beyond.
fn largest<T>(
    most: usize,
    fits: impl Fn(usize) -> Result<Option<T>, TrainError>,
) -> Result<Option<(usize, T)>, TrainError> {
    let (mut good, mut bad, mut found) = (0, most + 1, None);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(middle)? {
            Some(value) => (good, found) = (middle, Some((middle, value))),
            None => bad = middle,
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_found() {
        for most in 0..20 {
            for limit in 0..25 {
                let found = largest(most, |n| Ok((n <= limit).then_some(n))).unwrap();
                let want = most.min(limit);
                assert_eq!(found, (want > 0).then_some((want, want)), "{limit} of {most}");
            }
        }
    }
}
