//! How a run is cut into epochs, steps and microbatches: pure arithmetic on positions.
//!
//! Position `p` of epoch `e` belongs to step `p / batch` of that epoch; the last step of an epoch may be short. So
//! which samples make a step never depends on how many ranks there are. Each rank has a contiguous part of a step's
//! positions ([`RankShare`]), and cuts it into microbatches, whose gradients are added up. All ranks cut a step into as many
//! microbatches. Where microbatches have to be the same samples on any number of ranks ([`CutOrder::Microbatches`]), a step is
//! cut into them first, and each rank has a part of each. A reproducible step is cut into a fixed number of logical shards
//! instead, of which each rank has some.
//!
//! Ranks are those of the data axis: ranks that have a copy of the model together have the same samples.

use std::ops::Range;

use polyreme_parallel::tree::run_of;

use crate::flush::Flushes;
use crate::job::Length;
use crate::share::{counts, even, share};

/// The sizes that everything follows from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Samples of an epoch.
    pub samples: usize,
    /// Samples of a step.
    pub batch: usize,
}

/// What a step is cut into first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutOrder {
    /// The ranks' parts, and each of these into microbatches: every rank reads neighbours.
    Ranks,
    /// Microbatches, and each of these into the ranks' parts: a microbatch is the same samples on any number of ranks.
    Microbatches,
}

/// How a step is cut.
#[derive(Clone, PartialEq, Debug)]
pub struct StepCut {
    /// A weight for each rank: samples are shared out in proportion.
    pub weights: Vec<f64>,
    /// Into how many microbatches a whole step, or a rank's part of it, is cut.
    pub accumulate: usize,
    /// Which of the two.
    pub order: CutOrder,
    /// Reproducible: into how many logical shards the step is cut.
    pub shards: Option<usize>,
    /// Which steps are run without a flush between them.
    pub flushes: Flushes,
}

/// What a program is made for: a step, or several like it without a flush between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepKind<'a> {
    /// A rank's microbatches of each step.
    pub microbatches: &'a [MicrobatchRange],
    /// How many microbatches of a step the rank with the most has.
    pub rounds: usize,
    /// How many steps.
    pub steps: usize,
    /// The length that texts are filled up to; `None`: that of the longest.
    pub time: Option<usize>,
}

/// A part of a step that goes through the engine at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MicrobatchRange {
    /// Its first position in the step.
    pub offset: usize,
    /// Samples; 0 in a logical shard of a short step that has none.
    pub len: usize,
    /// Which logical shard, or else which microbatch of this rank, it is.
    pub number: usize,
}

/// What one rank does of every step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankShare {
    pace: Pace,
    /// Of a step of `batch` samples.
    whole: Vec<MicrobatchRange>,
    /// Of the short last step of an epoch.
    short: Vec<MicrobatchRange>,
    /// The longest microbatch of any rank.
    longest: usize,
    /// Of a whole step and of a short one: the most microbatches that any rank has.
    rounds: [usize; 2],
    /// How many whole steps are run without a flush, the longest run first.
    runs: Vec<usize>,
}

impl Pace {
    /// Steps of an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.samples.div_ceil(self.batch) as u64
    }

    /// Steps of a run.
    pub fn total_steps(&self, length: Length) -> u64 {
        match length {
            Length::Epochs(epochs) => epochs * self.steps_per_epoch(),
            Length::Steps(steps) => steps,
        }
    }

    /// The epoch of a step, counted from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// Whether a step is the last of its epoch.
    pub fn ends_epoch(&self, step: u64) -> bool {
        (step + 1).is_multiple_of(self.steps_per_epoch())
    }

    /// Samples of the short last step of an epoch; 0 if all steps are whole.
    pub fn tail(&self) -> usize {
        self.samples % self.batch
    }

    /// The first position of a step in its epoch.
    pub fn start(&self, step: u64) -> usize {
        (step % self.steps_per_epoch()) as usize * self.batch
    }

    /// Samples of a step.
    pub fn len(&self, step: u64) -> usize {
        self.batch.min(self.samples - self.start(step))
    }
}

impl StepCut {
    /// For one rank: a step is one microbatch.
    pub fn alone() -> StepCut {
        let flushes = Flushes::every_step();
        StepCut { weights: vec![1.0], accumulate: 1, order: CutOrder::Ranks, shards: None, flushes }
    }

    /// The same, shared out by other weights.
    pub fn by(&self, weights: Vec<f64>) -> StepCut {
        StepCut { weights, ..self.clone() }
    }

    /// Whether every rank has a sample for each of its microbatches, in whole steps and in short ones.
    pub fn all_meet(&self, pace: Pace) -> bool {
        [pace.batch, pace.tail()].into_iter().all(|n| n == 0 || self.least(pace, n) > 0)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.weights.len()
    }

    /// The microbatches of rank `rank` in a step of `n` samples, of a run whose whole steps have `batch`.
    fn microbatches(&self, n: usize, batch: usize, rank: usize) -> Vec<MicrobatchRange> {
        if let Some(shards) = self.shards {
            let microbatch = |number: usize| {
                let range = even(n, shards, number);
                MicrobatchRange { offset: range.start, len: range.len(), number }
            };
            return self.shard_run(shards, rank).map(microbatch).collect();
        }
        if self.order == CutOrder::Microbatches {
            return self.parts_of_microbatches(n, batch, rank);
        }
        let most = |n: usize| counts(n, &self.weights).into_iter().max().unwrap_or(0);
        let micro = most(batch).div_ceil(self.accumulate.max(1)).max(1);
        let n_microbatches = most(n).div_ceil(micro);
        let part = share(n, &self.weights, rank);
        let microbatch = |number: usize| {
            let range = even(part.len(), n_microbatches, number);
            MicrobatchRange { offset: part.start + range.start, len: range.len(), number }
        };
        (0..n_microbatches).map(microbatch).filter(|p| p.len > 0).collect()
    }

    /// A rank's parts of the microbatches that a step of `n` samples is cut into. A short step has fewer of them, and no more
    /// than give every rank a sample of each, if there are so many.
    fn parts_of_microbatches(&self, n: usize, batch: usize, rank: usize) -> Vec<MicrobatchRange> {
        let micro = batch.div_ceil(self.accumulate.max(1)).max(1);
        let n_microbatches = n.div_ceil(micro).min((n / self.ranks().max(1)).max(1));
        let microbatch = |number: usize| {
            let all = even(n, n_microbatches, number);
            let part = share(all.len(), &self.weights, rank);
            MicrobatchRange { offset: all.start + part.start, len: part.len(), number }
        };
        (0..n_microbatches).map(microbatch).filter(|p| p.len > 0).collect()
    }

    /// Reproducible: which logical shards each rank has.
    pub fn shard_runs(&self) -> Option<Vec<Range<usize>>> {
        self.shards.map(|shards| (0..self.ranks()).map(|rank| self.shard_run(shards, rank)).collect())
    }

    /// The logical shards of a rank, which move whole where ranks have different weights.
    fn shard_run(&self, shards: usize, rank: usize) -> Range<usize> {
        match self.weights.iter().all(|w| *w == self.weights[0]) {
            true => run_of(shards, self.ranks(), rank),
            false => share(shards, &self.weights, rank),
        }
    }

    /// What each rank has of a step of `batch` samples: samples, or logical shards; and what they are called.
    pub fn units(&self, batch: usize) -> (Vec<usize>, &'static str) {
        match self.shard_runs() {
            Some(runs) => (runs.iter().map(Range::len).collect(), "shards"),
            None => (counts(batch, &self.weights), "samples"),
        }
    }

    /// The shortest microbatch that any rank has in a step of `n` samples; 0 if some rank has fewer microbatches than others.
    pub fn least(&self, pace: Pace, n: usize) -> usize {
        let of_ranks: Vec<_> = (0..self.ranks()).map(|r| self.microbatches(n, pace.batch, r)).collect();
        let most = of_ranks.iter().map(Vec::len).max().unwrap_or(0);
        if of_ranks.iter().any(|microbatches| microbatches.len() < most) {
            return 0;
        }
        of_ranks.iter().flatten().map(|p| p.len).min().unwrap_or(0)
    }
}

impl RankShare {
    /// The part of rank `rank`.
    pub fn new(pace: Pace, cut: &StepCut, rank: usize) -> RankShare {
        let microbatches = |n: usize| cut.microbatches(n, pace.batch, rank);
        let longest =
            (0..cut.ranks()).flat_map(|r| cut.microbatches(pace.batch, pace.batch, r)).map(|p| p.len).max();
        let longest = longest.unwrap_or(1).max(1);
        let most =
            |n: usize| (0..cut.ranks()).map(|r| cut.microbatches(n, pace.batch, r).len()).max().unwrap_or(0);
        let rounds = [most(pace.batch), most(pace.tail())];
        let (whole, short) = (microbatches(pace.batch), microbatches(pace.tail()));
        RankShare { pace, whole, short, longest, rounds, runs: cut.flushes.lengths(pace) }
    }

    /// The microbatches of a step; none if this rank has no samples of it.
    pub fn microbatches(&self, step: u64) -> &[MicrobatchRange] {
        if self.pace.len(step) == self.pace.batch { &self.whole } else { &self.short }
    }

    /// How many microbatches the rank with the most has in a step.
    pub fn rounds(&self, step: u64) -> usize {
        self.rounds[usize::from(self.pace.len(step) != self.pace.batch)]
    }

    /// What there are programs for: runs of whole steps, the longest first, and the short last step of an epoch if there is
    /// one.
    pub fn kinds(&self) -> Vec<StepKind<'_>> {
        let [rounds, of_short] = self.rounds;
        let whole = |steps: &usize| StepKind { microbatches: &self.whole, rounds, steps: *steps, time: None };
        let mut kinds: Vec<_> = self.runs.iter().map(whole).collect();
        if self.pace.tail() > 0 {
            kinds.push(StepKind { microbatches: &self.short, rounds: of_short, steps: 1, time: None });
        }
        kinds
    }

    /// Samples of this rank in a step.
    pub fn samples(&self, step: u64) -> usize {
        self.microbatches(step).iter().map(|p| p.len).sum()
    }

    /// The lengths that microbatches may have, each once, the longest first. At least one: a rank without samples has an
    /// engine too.
    pub fn lengths(&self) -> Vec<usize> {
        let short: &[MicrobatchRange] = if self.pace.tail() > 0 { &self.short } else { &[] };
        let mut lengths: Vec<usize> =
            self.whole.iter().chain(short).map(|p| p.len).filter(|n| *n > 0).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        if lengths.is_empty() { vec![self.longest] } else { lengths }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn weights() -> impl Strategy<Value = Vec<f64>> {
        prop_oneof![(1usize..9).prop_map(|ranks| vec![1.0; ranks]), prop::collection::vec(0.1f64..9.0, 1..9),]
    }

    fn cut() -> impl Strategy<Value = StepCut> {
        (weights(), 1usize..5, prop::option::of(1usize..12)).prop_map(|(weights, accumulate, shards)| {
            StepCut { weights, accumulate, shards, ..StepCut::alone() }
        })
    }

    proptest! {
        #[test]
        fn microbatches_of_all_ranks_cover_an_epoch_once(samples in 1usize..500, batch in 1usize..80, cut in cut()) {
            let pace = Pace { samples, batch: batch.min(samples) };
            let parts: Vec<_> = (0..cut.ranks()).map(|rank| RankShare::new(pace, &cut, rank)).collect();
            let first = 3 * pace.steps_per_epoch();
            let mut next = 0;
            for step in first..first + pace.steps_per_epoch() {
                prop_assert_eq!((pace.epoch(step), pace.start(step)), (3, next));
                let mut offset = 0;
                for part in &parts {
                    for (k, microbatch) in part.microbatches(step).iter().enumerate() {
                        prop_assert_eq!(microbatch.offset, offset);
                        prop_assert!(microbatch.len == 0 || part.lengths().contains(&microbatch.len));
                        prop_assert!(microbatch.len > 0 || cut.shards.is_some());
                        prop_assert!(cut.shards.is_some() || microbatch.number == k);
                        offset += microbatch.len;
                    }
                }
                prop_assert_eq!(offset, pace.len(step));
                next += offset;
            }
            prop_assert_eq!(next, samples);
            prop_assert!(pace.ends_epoch(first + pace.steps_per_epoch() - 1));
        }

        #[test]
        fn microbatches_that_come_first_do_not_depend_on_ranks(
            samples in 1usize..500, batch in 1usize..80, accumulate in 1usize..9, ranks in 1usize..9,
        ) {
            let pace = Pace { samples, batch: batch.min(samples) };
            let order = CutOrder::Microbatches;
            let cut = |ranks| StepCut { weights: vec![1.0; ranks], accumulate, order, ..StepCut::alone() };
            let of = |ranks: usize| -> Vec<RankShare> {
                (0..ranks).map(|rank| RankShare::new(pace, &cut(ranks), rank)).collect()
            };
            let (one, many) = (of(1), of(ranks));
            for step in [0, pace.steps_per_epoch() - 1] {
                let n = pace.len(step);
                let mut seen: Vec<MicrobatchRange> = many.iter().flat_map(|part| part.microbatches(step).to_vec()).collect();
                seen.sort_by_key(|p| p.offset);
                let mut next = 0;
                for p in &seen {
                    prop_assert_eq!(p.offset, next);
                    next += p.len;
                }
                prop_assert_eq!(next, n);
                // Everybody has a part of each microbatch, if there are enough samples.
                let count = many[0].microbatches(step).len();
                if n >= ranks {
                    prop_assert!(many.iter().all(|part| part.microbatches(step).len() == count));
                }
                if n >= accumulate * ranks {
                    prop_assert_eq!(count, one[0].microbatches(step).len());
                    for (k, whole) in one[0].microbatches(step).iter().enumerate() {
                        let parts = seen.iter().filter(|p| p.number == k);
                        prop_assert_eq!(parts.clone().map(|p| p.len).sum::<usize>(), whole.len);
                        prop_assert_eq!(parts.map(|p| p.offset).min(), Some(whole.offset));
                    }
                }
            }
        }

        #[test]
        fn shards_do_not_depend_on_ranks(samples in 1usize..500, batch in 1usize..80, shards in 1usize..12, weights in weights()) {
            let pace = Pace { samples, batch: batch.min(samples) };
            let cut = |weights: &[f64]| StepCut { weights: weights.into(), shards: Some(shards), ..StepCut::alone() };
            let (one, many) = (RankShare::new(pace, &cut(&[1.0]), 0), cut(&weights));
            prop_assert_eq!(many.units(pace.batch).0.iter().sum::<usize>(), shards);
            let many: Vec<_> = (0..weights.len()).map(|rank| RankShare::new(pace, &many, rank)).collect();
            for step in 0..pace.steps_per_epoch() {
                let together: Vec<MicrobatchRange> = many.iter().flat_map(|part| part.microbatches(step).to_vec()).collect();
                prop_assert_eq!(&together[..], one.microbatches(step));
            }
        }
    }

    #[test]
    fn parts_by_hand() {
        let check = |samples, batch, weights: &[f64], accumulate, rank, whole: &[usize], short: &[usize]| {
            let pace = Pace { samples, batch };
            let part = RankShare::new(
                pace,
                &StepCut { weights: weights.to_vec(), accumulate, ..StepCut::alone() },
                rank,
            );
            let lens = |step: u64| part.microbatches(step).iter().map(|p| p.len).collect::<Vec<_>>();
            assert_eq!((lens(0), lens(pace.steps_per_epoch() - 1)), (whole.to_vec(), short.to_vec()));
        };
        check(70, 32, &[1.0], 1, 0, &[32], &[6]);
        // Microbatches of at most a fourth of a batch, so a short step has fewer of them.
        check(42, 32, &[1.0], 4, 0, &[8, 8, 8, 8], &[5, 5]);
        check(42, 32, &[1.0, 1.0], 4, 1, &[4, 4, 4, 4], &[3, 2]);
        check(33, 32, &[1.0, 1.0], 1, 0, &[16], &[1]);
        check(33, 32, &[1.0, 1.0], 1, 1, &[16], &[]);
        // Who has fewer microbatches than another knows how many rounds there are.
        let rounds = |samples: usize, accumulate: usize| {
            let pace = Pace { samples, batch: 32 };
            let cut = StepCut { weights: vec![10.0, 2.0, 2.0, 2.0], accumulate, ..StepCut::alone() };
            [0, 1].map(|step| (0..4).map(|r| RankShare::new(pace, &cut, r).rounds(step)).collect::<Vec<_>>())
        };
        assert_eq!(rounds(33, 1), [[1; 4], [1; 4]]);
        // 20, 4, 4 and 4 samples in 8 microbatches; then 5, 1, 1 and 1 in 2.
        assert_eq!(rounds(40, 8), [[7; 4], [2; 4]]);
        // 2 samples, 1 and none.
        assert_eq!(rounds(35, 32), [[20; 4], [2; 4]]);
        // All ranks have as many microbatches, however long their parts are.
        check(32, 32, &[3.0, 1.0], 3, 0, &[8, 8, 8], &[8, 8, 8]);
        check(32, 32, &[3.0, 1.0], 3, 1, &[3, 3, 2], &[3, 3, 2]);
    }

    #[test]
    fn the_least_piece_is_that_of_any_rank() {
        let pace = Pace { samples: 33, batch: 32 };
        let cut = StepCut { weights: vec![1.0, 1.0], accumulate: 4, ..StepCut::alone() };
        assert_eq!((cut.least(pace, 32), cut.least(pace, 1)), (4, 0));
    }
}
