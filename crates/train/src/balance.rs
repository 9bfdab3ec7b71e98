//! How many samples each rank gets where machines differ in speed: decided now and then, from what was measured.
//!
//! A step takes as long as its slowest rank. If a rank gets samples in proportion to its speed, all are done at the
//! same time. The gradient stays exact: every microbatch counts by its samples. A change has a price (batches that were read
//! ahead are thrown away, programs for other lengths are compiled), and timings are noisy (another process takes a core
//! for a moment, a page has to be fetched). Shares that follow the noise are worse than equal ones, so:
//!
//! - A rank says how long a unit of its work took as a few means, each over a few steps, the longest of which is left out: a single
//!   hiccup does not show. A unit is a sample; in a reproducible run a logical shard, which moves whole. Looks come after 20 steps, or
//!   sooner where steps are long ([`is_due`]).
//! - Another sharing is judged by what it would have won in each of those times, over the last looks: its mean gain
//!   less twice its standard error must still be worth a change. How far looks scatter is learnt, and assumed to be much
//!   until it is known: so a rank at half the speed is believed after two looks, and one that is a fifth slower later.
//! - What it wins in the steps that are left must exceed what the last change cost.
//! - A change that did not win what was promised was a mistake: the next one needs twice as many looks, until nothing
//!   has changed for a while.
//! - A rank whose share was cut gets it back by trial (`probe`): with little to do, one that may only use a part of its core
//!   looks as fast as any other.
//!
//! [`slow`] says which ranks to report.

use std::collections::VecDeque;
use std::fmt;

use crate::share::counts;

mod probe;
pub mod slow;

use probe::{Instead, TrialVerdict, Trials};

/// Speeds are looked at after so many steps at the latest.
pub const EVERY_STEPS: u64 = 20;
/// And after so many, if they took so long: a process that is held to a part of its core is held back once in 0.1 s, and has to be
/// seen both running and waiting.
const EVERY: (u64, f64) = (4, 0.2);

/// A look has so many means of a rank: each over five steps, of which one may be anything.
pub const BLOCKS: usize = 4;

/// Whether to look again, so many steps and seconds after the last look.
pub fn is_due(steps: u64, seconds: f64) -> bool {
    steps >= EVERY_STEPS || (steps >= EVERY.0 && seconds >= EVERY.1)
}

/// What a change must win of a step's time.
pub const GAIN_MIN: f64 = 0.05;
/// The same before the first change, where nobody asked for shares by speed: machines of one kind differ by less, and keep equal
/// shares.
pub const GAIN_MIN_UNASKED: f64 = 0.15;

/// The fewest looks that a change rests on.
const LOOKS_MIN: usize = 2;
/// The most: older ones say little of today.
const LOOKS_MAX: usize = 16;

/// How far single looks lie apart, as long as few have shown it; counts as much as two looks.
const SCATTER: f64 = 0.1;
/// What a pair of looks adds to it at most, so that one real change of speed does not hide the next.
const SCATTER_MAX: f64 = 0.2;
/// What is left of the scatter of a look when the next one comes.
const SCATTER_KEPT: f64 = 0.97;
/// After so many looks without a change an old mistake is half forgotten.
const CALM_LOOKS: usize = 100;
/// Standard errors that a gain must exceed.
const ERRORS: f64 = 2.5;
/// A change is made for no more steps than this: speeds do not stay for ever.
const HORIZON_STEPS: u64 = 1000;

/// The times of one rank's steps since the last look.
#[derive(Clone, Debug)]
pub struct Timings {
    /// Seconds of a unit, by step.
    steps: Vec<f64>,
}

impl Timings {
    /// Nothing was noted yet. Room for all that a look covers: steps reserve no memory.
    pub fn with_room() -> Timings {
        Timings { steps: Vec::with_capacity(EVERY_STEPS as usize) }
    }

    /// Notes a whole step of this rank: its units and the seconds that it took for them, waiting for data or for others
    /// not counted.
    pub fn note(&mut self, units: usize, seconds: f64) {
        if units > 0 && seconds > 0.0 && seconds.is_finite() {
            self.steps.push(seconds / units as f64);
        }
    }

    /// Means of what was noted, and starts anew; zeros where nothing was.
    pub fn take(&mut self) -> [f64; BLOCKS] {
        let n = self.steps.len();
        let means = std::array::from_fn(|b| typical(&self.steps[b * n / BLOCKS..(b + 1) * n / BLOCKS]));
        self.steps.clear();
        means
    }
}

/// One look: the seconds of a unit, in each block of steps, by rank; zero where a rank had nothing to do.
pub type Look = Vec<[f64; BLOCKS]>;

/// What to do about the looks.
#[derive(Clone, PartialEq, Debug)]
pub enum Decision {
    /// Nothing.
    Stay(Reason),
    /// Share out in another way from now on.
    Change {
        /// Units of each rank in a whole step.
        counts: Vec<usize>,
        /// The share of a step's time that it wins.
        gain: f64,
    },
}

/// Why nothing is changed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reason {
    /// Too little has been measured yet.
    Unknown,
    /// The units of a step are shared out so already.
    Same,
    /// It would win too little, or too little for how much timings scatter.
    Small {
        /// The share of a step's time that it would win.
        gain: f64,
        /// Its standard error.
        error: f64,
    },
    /// A change costs more than it would win in the steps that are left.
    Dear {
        /// The share of a step's time that it would win.
        gain: f64,
    },
}

/// What a decision rests on beside the looks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stakes {
    /// The fewest looks.
    pub looks_min: usize,
    /// Steps that are left.
    pub steps_left: u64,
    /// Seconds that the last change cost; 0 if there was none.
    pub cost_s: f64,
    /// How far single looks lie apart, relative.
    pub scatter: f64,
    /// What a change must win of a step's time.
    pub gain_min: f64,
}

/// Whether to share out a step in another way than by `now`, the units of each rank. A pure function. `looks` are those
/// since the last change, the newest last: the last few of them decide, or twice as many, and so on, so that a large
/// difference is seen soon and a small one at all.
pub fn decide(now: &[usize], looks: &[Look], stakes: Stakes) -> Decision {
    let mut n = stakes.looks_min.max(1);
    let mut reason = Reason::Unknown;
    while n <= looks.len() {
        match weigh(now, &looks[looks.len() - n..], stakes) {
            Decision::Stay(why) => reason = why,
            change @ Decision::Change { .. } => return change,
        }
        n += n.div_ceil(2);
    }
    Decision::Stay(reason)
}

/// The same from these looks alone.
fn weigh(now: &[usize], looks: &[Look], stakes: Stakes) -> Decision {
    let typical = typical_units(now.len(), looks);
    let slowest = typical.iter().copied().fold(0.0, f64::max);
    if slowest == 0.0 {
        return Decision::Stay(Reason::Unknown);
    }
    // A rank that had nothing to do is tried as if it were the slowest.
    let typical: Vec<f64> = typical.into_iter().map(|t| if t > 0.0 { t } else { slowest }).collect();
    let then = fair(now.iter().sum(), &typical);
    if then == now {
        return Decision::Stay(Reason::Same);
    }
    let gains: Vec<f64> = looks.iter().map(|look| gain(now, &then, look, &typical)).collect();
    let n = gains.len() as f64;
    let gain = mean(&gains);
    let squares: f64 = gains.iter().map(|g| (g - gain) * (g - gain)).sum();
    let error = ((2.0 * stakes.scatter * stakes.scatter + squares) / (n + 1.0) / n).sqrt();
    if gain.is_nan() || gain - ERRORS * error < stakes.gain_min {
        return Decision::Stay(Reason::Small { gain, error });
    }
    let step_s = mean(&looks.iter().map(|look| step_s(now, look, &typical)).collect::<Vec<_>>());
    if gain * step_s * stakes.steps_left.min(HORIZON_STEPS) as f64 <= stakes.cost_s {
        return Decision::Stay(Reason::Dear { gain });
    }
    Decision::Change { counts: then, gain }
}

/// Seconds of a unit of each rank, as it was in most blocks; zero where a rank had nothing to do.
fn typical_units(ranks: usize, looks: &[Look]) -> Vec<f64> {
    let times = |rank: usize| looks.iter().flat_map(move |look| look[rank]).filter(|t| *t > 0.0);
    (0..ranks).map(|rank| median(&mut times(rank).collect::<Vec<_>>())).collect()
}

/// The share of a look's time that `then` would have won over `now`.
fn gain(now: &[usize], then: &[usize], look: &Look, typical: &[f64]) -> f64 {
    1.0 - step_s(then, look, typical) / step_s(now, look, typical)
}

/// What a step of a look would take if it were shared out so, in seconds: as long as its slowest rank, block by block.
fn step_s(counts: &[usize], look: &Look, typical: &[f64]) -> f64 {
    let of_rank = |rank: usize, block: usize| {
        let t = look[rank][block];
        counts[rank] as f64 * if t > 0.0 { t } else { typical[rank] }
    };
    let of_block = |block: usize| (0..counts.len()).map(|rank| of_rank(rank, block)).fold(0.0, f64::max);
    (0..BLOCKS).map(of_block).sum::<f64>() / BLOCKS as f64
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Units in proportion to speed. A rank without any would never be measured again, so each has one if there are enough.
fn fair(units: usize, seconds: &[f64]) -> Vec<usize> {
    let speeds: Vec<f64> = seconds.iter().map(|s| 1.0 / s).collect();
    match units.checked_sub(seconds.len()) {
        None => counts(units, &speeds),
        Some(_) => {
            let mut fair = counts(units, &speeds);
            while let Some(idle) = fair.iter().position(|n| *n == 0) {
                let most = (0..fair.len()).max_by_key(|&r| fair[r]).unwrap_or(idle);
                fair[most] -= 1;
                fair[idle] += 1;
            }
            fair
        }
    }
}

/// The mean of all but the largest, if there are enough to leave it out. Not the median: a process that stands still in two steps of
/// five is slow.
fn typical(values: &[f64]) -> f64 {
    let (sum, most) = (values.iter().sum::<f64>(), values.iter().copied().fold(0.0, f64::max));
    match values.len() {
        0 => 0.0,
        n @ 1..4 => sum / n as f64,
        n => (sum - most) / (n - 1) as f64,
    }
}

fn median(values: &mut [f64]) -> f64 {
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        _ => *values.select_nth_unstable_by(middle, f64::total_cmp).1,
    }
}

/// How a step is shared out, and what has been measured of it: the same on every rank.
#[derive(Clone, Debug)]
pub struct Balancer {
    counts: Vec<usize>,
    /// What a unit is called.
    unit: &'static str,
    /// Since the last change.
    looks: VecDeque<Look>,
    looks_min: usize,
    /// Looks since the last change, or since a mistake was half forgotten.
    calm: usize,
    scatter: Scatter,
    cost_s: f64,
    /// What the last change promised, until it is known whether it was kept.
    promised: Option<Promise>,
    gain_min: f64,
    trials: Trials,
}

/// Shares that have changed.
#[derive(Clone, PartialEq, Debug)]
pub struct Shift {
    /// What to say of it; nothing of trials, and of those that are taken back.
    pub said: Option<String>,
}

#[derive(Clone, Debug)]
struct Promise {
    /// The counts before it.
    before: Vec<usize>,
    gain: f64,
    /// Seconds of a unit that it rested on.
    typical: Vec<f64>,
}

impl Balancer {
    /// A step of which each rank has so many units; `unit` is their name, such as `samples`.
    pub fn new(counts: Vec<usize>, unit: &'static str) -> Balancer {
        Balancer {
            trials: Trials::new(counts.len()),
            counts,
            unit,
            looks: VecDeque::with_capacity(LOOKS_MAX),
            looks_min: LOOKS_MIN,
            calm: 0,
            scatter: Scatter { squares: 2.0 * SCATTER * SCATTER, looks: 2.0 },
            cost_s: 0.0,
            promised: None,
            gain_min: GAIN_MIN,
        }
    }

    /// The same, where the first change must win more.
    pub fn unasked(counts: Vec<usize>, unit: &'static str) -> Balancer {
        Balancer { gain_min: GAIN_MIN_UNASKED, ..Balancer::new(counts, unit) }
    }

    /// Units of each rank.
    pub fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// Takes a look, with `steps_left` steps to go and the seconds that a change cost since the one before. Returns what
    /// to say if the counts have changed, which they do if the new ones are `allowed`.
    pub fn look(
        &mut self,
        look: Look,
        steps_left: u64,
        cost_s: f64,
        allowed: &dyn Fn(&[usize]) -> bool,
    ) -> Option<Shift> {
        if cost_s > 0.0 {
            self.cost_s = cost_s;
        }
        if let Some(last) = self.looks.back() {
            self.scatter.add(last, &look);
        }
        let idle = vec![0.0; self.counts.len()];
        let look_s = (EVERY.0 as f64 * step_s(&self.counts, &look, &idle)).max(EVERY.1);
        let verdict = self.trials.verdict(&look, self.cost_s, look_s);
        if let TrialVerdict::Failed { before } = verdict {
            self.take_up(before);
            return Some(Shift { said: None });
        }
        if self.looks.len() == LOOKS_MAX {
            self.looks.pop_front();
        }
        self.looks.push_back(look);
        let looks = &*self.looks.make_contiguous();
        if looks.len() >= self.looks_min
            && let Some(promise) = self.promised.take()
            && !kept(&promise, &self.counts, looks)
            && !self.trials.explain(&promise.before, &self.counts, &promise.typical, looks)
        {
            self.looks_min = (2 * self.looks_min).min(LOOKS_MAX);
        }
        self.calm += 1;
        if self.calm == CALM_LOOKS {
            (self.calm, self.looks_min) = (0, (self.looks_min / 2).max(LOOKS_MIN));
        }
        let scatter = (self.scatter.squares / self.scatter.looks).sqrt().max(SCATTER);
        let stakes = Stakes {
            looks_min: self.looks_min,
            steps_left,
            cost_s: self.cost_s,
            scatter,
            gain_min: self.gain_min,
        };
        // A trial that went well has shown what other looks are needed for.
        let stakes = match verdict {
            TrialVerdict::Passed => Stakes { looks_min: 1, scatter: 0.0, ..stakes },
            TrialVerdict::None | TrialVerdict::Failed { .. } => stakes,
        };
        let passed = verdict == TrialVerdict::Passed;
        let typical = typical_units(self.counts.len(), looks);
        match decide(&self.counts, looks, stakes) {
            Decision::Change { counts, gain } if allowed(&counts) => {
                match self.trials.instead_of(&self.counts, &counts, &typical) {
                    Instead::Nothing => {
                        let before = self.take_up(counts);
                        self.trials.cut(&before, &self.counts);
                        self.promised = Some(Promise { before, gain, typical });
                        self.gain_min = GAIN_MIN;
                        let said = Said { counts: &self.counts, unit: self.unit, gain }.to_string();
                        Some(Shift { said: Some(said) })
                    }
                    Instead::Trial(counts) if allowed(&counts) => {
                        self.trials.begin(&self.counts, &counts, &typical);
                        self.take_up(counts);
                        Some(Shift { said: None })
                    }
                    Instead::Trial(_) | Instead::Wait => None,
                }
            }
            // The trial was all that was wanted.
            _ if passed => Some(Shift { said: Some(format!("{} from now on", self.words())) }),
            Decision::Stay(_) | Decision::Change { .. } => None,
        }
    }

    /// Shares out by other counts from now on, and returns those before.
    fn take_up(&mut self, counts: Vec<usize>) -> Vec<usize> {
        self.looks.clear();
        self.calm = 0;
        std::mem::replace(&mut self.counts, counts)
    }

    fn words(&self) -> String {
        let counts: Vec<_> = self.counts.iter().map(usize::to_string).collect();
        format!("ranks take {} {} a step", counts.join(", "), self.unit)
    }
}

/// How far looks that follow each other lie apart. A speed that changes and stays shows once.
#[derive(Clone, Copy, Debug)]
struct Scatter {
    squares: f64,
    looks: f64,
}

impl Scatter {
    fn add(&mut self, last: &Look, next: &Look) {
        // A rank's time relative to that of all: what is slow for all ranks changes no share.
        let relative = |look: &Look| -> Option<Vec<f64>> {
            let logs: Vec<f64> = look.iter().map(|t| median(&mut t.clone()).ln()).collect();
            let mean = logs.iter().sum::<f64>() / logs.len() as f64;
            mean.is_finite().then(|| logs.iter().map(|l| l - mean).collect())
        };
        let (Some(a), Some(b)) = (relative(last), relative(next)) else { return };
        let apart = a.iter().zip(&b).map(|(a, b)| (b - a) * (b - a) / 2.0).sum::<f64>() / a.len() as f64;
        self.squares = SCATTER_KEPT * self.squares + apart.min(SCATTER_MAX * SCATTER_MAX);
        self.looks = SCATTER_KEPT * self.looks + 1.0;
    }
}

/// Whether the looks since a change would have been longer without it, by a quarter of what was promised at least.
/// Steps before and after it say little: they were long before it, or nothing would have been changed.
fn kept(promise: &Promise, counts: &[usize], looks: &[Look]) -> bool {
    let idle = vec![0.0; counts.len()];
    let gains: Vec<f64> = looks.iter().map(|look| gain(&promise.before, counts, look, &idle)).collect();
    mean(&gains) >= promise.gain / 4.0
}

/// What is said of a change.
struct Said<'a> {
    counts: &'a [usize],
    unit: &'static str,
    gain: f64,
}

impl fmt::Display for Said<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let counts: Vec<_> = self.counts.iter().map(usize::to_string).collect();
        let (counts, unit, gain) = (counts.join(", "), self.unit, self.gain * 100.0);
        write!(f, "ranks take {counts} {unit} a step from now on, by their speed; that wins {gain:.0} %")
    }
}

#[cfg(test)]
mod tests;
