//! The ledger of a run: which samples have been committed, in which epoch, as a digest that proves that each counted once.
//!
//! Samples are counted where they cannot be counted wrongly without being trained wrongly: the loader tallies each sample as it reads
//! it into a batch, the engine takes the tally of a microbatch together with its weight and adds both when it counts the microbatch's
//! loss, and ranks add their tallies in the exchange that adds their losses. So what reaches the ledger is what the step's loss and
//! gradient were made of, over all ranks, and it is known at the step's end on every rank: a rank that is lost takes nothing
//! with it. A step that was begun and not finished has counted nothing; done again, it counts once.
//!
//! For each epoch there is one [`Tally`]: a count, and a sum of hashes that does not depend on the order in which samples came, nor on ranks, microbatches
//! or interruptions. It is compared with what should have been: of a whole epoch of the whole set, every sample once; of other
//! steps, what the order of samples says, which is a function of the seed. The digest of a run is the sum over its epochs.
//!
//! What it does not prove: that the bytes of a sample were the right ones (fingerprints of the data look at that), or that an update was
//! computed well. Asynchronous workers may commit epochs in any order, and several at a time.

use std::fmt;

use polyreme_data::order::LENGTHS_MAX;
use polyreme_data::{Mode, Order, Tally};
use serde::{Deserialize, Serialize};

use crate::pace::Pace;

/// More epochs than this are not told apart: the earliest become one entry.
const ENTRIES_MAX: usize = 512;
/// More samples than this are not hashed again: it would take minutes.
const CHECKED_MAX: u128 = 1 << 32;

/// The samples that a run has committed.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct SampleLedger {
    /// By epoch, the earliest first.
    epochs: Vec<EpochEntry>,
    /// Where samples came from: one entry, unless a run went on with another batch or other data.
    orders: Vec<OrderSince>,
    /// Samples of steps whose update was skipped because of an overflow; they are counted all the same.
    skipped: u64,
}

/// The samples of one epoch, or of several in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct EpochEntry {
    /// The first epoch, counted from 0.
    first: u64,
    /// How many.
    epochs: u64,
    /// Samples.
    count: u64,
    /// The sum of their hashes.
    #[serde(with = "hex")]
    sum: u128,
}

/// Which samples steps take, from a step on.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
struct OrderSince {
    step: u64,
    len: usize,
    seed: u64,
    #[serde(with = "ModeForm")]
    mode: Mode,
    fraction: f64,
    batch: usize,
}

/// [`Mode`] in a checkpoint.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Mode", rename_all = "snake_case")]
enum ModeForm {
    InOrder,
    Sample,
    Block(usize),
    Parts(usize),
    Lengths { batch: usize, ends: [usize; LENGTHS_MAX] },
}

/// What the ledger of a run comes to.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LedgerReport {
    /// The digest over all epochs, in hex: the same for any two runs that counted the same samples in the same epochs.
    pub digest: String,
    /// Samples counted.
    pub samples: u64,
    /// Epochs begun.
    pub epochs: u64,
    /// Samples of steps whose update was skipped.
    pub skipped: u64,
    /// Whether they are those that should have been counted, each as often; `None` if there are too many to find out.
    pub exact: Option<bool>,
    /// The same in words.
    pub words: String,
}

impl SampleLedger {
    /// From step `step` on, steps of `batch` samples are taken from this order.
    pub fn follow(&mut self, step: u64, order: Order, batch: usize) {
        let Order { len, seed, mode, fraction, .. } = order;
        let now = OrderSince { step, len, seed, mode, fraction, batch };
        if self.orders.last().is_none_or(|last| OrderSince { step, ..*last } != now) {
            // Nothing was taken from an order that is replaced at once.
            self.orders.retain(|before| before.step < step);
            self.orders.push(now);
        }
    }

    /// Counts the samples of a step of this epoch, which is done. `skipped` says that its update was not made.
    pub fn commit(&mut self, epoch: u64, samples: Tally, skipped: bool) {
        let at = self.epochs.partition_point(|entry| entry.first <= epoch);
        let known = at.checked_sub(1).filter(|at| self.epochs[*at].has(epoch));
        match known {
            Some(at) => self.epochs[at].add(samples),
            None => {
                let Tally { count, sum } = samples;
                self.epochs.insert(at, EpochEntry { first: epoch, epochs: 1, count, sum });
            }
        }
        if skipped {
            self.skipped += samples.count;
        }
        if self.epochs.len() > ENTRIES_MAX {
            let earliest = self.epochs.remove(0);
            let next = &mut self.epochs[0];
            next.epochs += next.first - earliest.first;
            next.first = earliest.first;
            next.add(earliest.tally());
        }
    }

    /// All samples of all epochs.
    pub fn total(&self) -> Tally {
        self.epochs.iter().map(EpochEntry::tally).fold(Tally::default(), |a, b| a + b)
    }

    /// What it comes to after `steps` steps.
    pub fn report(&self, steps: u64) -> LedgerReport {
        let Tally { count, sum } = self.total();
        let (exact, words) = match self.check(steps) {
            Ok(words) => (Some(true), words),
            Err(Doubt::Wrong(what)) => (Some(false), what),
            Err(Doubt::TooMany) => {
                (None, format!("{count} samples counted; there are too many to check them"))
            }
        };
        let epochs = self.epochs.last().map_or(0, |entry| entry.first + entry.epochs);
        LedgerReport {
            digest: format!("{sum:032x}"),
            samples: count,
            epochs,
            skipped: self.skipped,
            exact,
            words,
        }
    }

    /// Whether the samples of so many steps were counted, each as often as it should have been: in words, or what is wrong.
    fn check(&self, steps: u64) -> Result<String, Doubt> {
        let wrong = |what: String| Err(Doubt::Wrong(what));
        if self.orders.iter().any(|order| order.batch == 0 || order.epoch_len() == 0) {
            return wrong("the ledger names an order without samples".into());
        }
        let ends = self.orders.iter().skip(1).map(|order| order.step).chain([steps]);
        let spans: Vec<(&OrderSince, u64)> = self.orders.iter().zip(ends).collect();
        let samples =
            |(order, end): &(&OrderSince, u64)| order.before(*end).saturating_sub(order.before(order.step));
        if spans.iter().map(samples).sum::<u128>() > CHECKED_MAX {
            return Err(Doubt::TooMany);
        }
        let mut found = vec![Tally::default(); self.epochs.len()];
        for (order, end) in &spans {
            let mut step = order.step;
            while step < *end {
                let (epoch, next) = order.epoch_of(step, *end);
                let of = order.tally(epoch, step, next);
                let at = self.epochs.iter().position(|entry| entry.has(epoch));
                let Some(at) = at else {
                    return wrong(format!("no sample of epoch {} was counted", epoch + 1));
                };
                found[at] += of;
                step = next;
            }
        }
        let off = self.epochs.iter().zip(&found).find(|(entry, want)| entry.tally() != **want);
        match off {
            Some((entry, want)) => wrong(entry.differs(want.count)),
            None => Ok(self.claim(steps)),
        }
    }

    /// What is known of a ledger that is right.
    fn claim(&self, steps: u64) -> String {
        let all = self.total().count;
        let mut words = match &self.orders[..] {
            [order] if order.fraction >= 1.0 => once(order, steps),
            [order] => format!(
                "{all} samples counted, {} of {} in each epoch, each as often as the order says",
                order.epoch_len(),
                order.len
            ),
            [.., last] => {
                let changed = format!("the batch or the data changed at step {}", last.step);
                format!("{all} samples counted, each as often as the order says; {changed}")
            }
            [] => "no sample was counted".into(),
        };
        if self.skipped > 0 {
            words += &format!("; {} of them in steps that overflowed and changed nothing", self.skipped);
        }
        words
    }
}

/// Each sample of whole epochs counted once.
fn once(order: &OrderSince, steps: u64) -> String {
    let (epochs, done) = ((order.before(steps) / order.len as u128), order.before(steps) % order.len as u128);
    let n = order.len;
    match (epochs, done) {
        (0, done) => format!("{done} of {n} samples counted once"),
        (1, 0) => format!("each of {n} samples counted once in 1 epoch"),
        (1, done) => format!("each of {n} samples counted once in 1 epoch, and {done} of them in the next"),
        (epochs, 0) => format!("each of {n} samples counted once in each of {epochs} epochs"),
        (epochs, done) => {
            format!(
                "each of {n} samples counted once in each of {epochs} epochs, and {done} of them in the next"
            )
        }
    }
}

/// Why a ledger is not known to be right.
enum Doubt {
    Wrong(String),
    TooMany,
}

impl EpochEntry {
    fn has(&self, epoch: u64) -> bool {
        epoch.checked_sub(self.first).is_some_and(|after| after < self.epochs)
    }

    fn tally(&self) -> Tally {
        Tally { count: self.count, sum: self.sum }
    }

    fn add(&mut self, samples: Tally) {
        Tally { count: self.count, sum: self.sum } = self.tally() + samples;
    }

    /// How it differs from what should have been.
    fn differs(&self, want: u64) -> String {
        let (first, last) = (self.first + 1, self.first + self.epochs);
        let which =
            if first == last { format!("epoch {first}") } else { format!("epochs {first} to {last}") };
        let count = self.count;
        match count == want {
            true => format!("{which}: {count} samples were counted, but some twice and others not at all"),
            false => format!(
                "{which}: {count} samples were counted instead of {want}; some were {}",
                if count < want { "left out" } else { "counted twice" }
            ),
        }
    }
}

impl OrderSince {
    fn order(&self, epoch: u64) -> Order {
        Order { len: self.len, seed: self.seed, epoch, mode: self.mode, fraction: self.fraction }
    }

    fn epoch_len(&self) -> usize {
        self.order(0).epoch_len()
    }

    fn pace(&self) -> Pace {
        Pace { samples: self.epoch_len(), batch: self.batch }
    }

    /// Samples of all steps before this one.
    fn before(&self, step: u64) -> u128 {
        let pace = self.pace();
        u128::from(pace.epoch(step)) * pace.samples as u128 + pace.start(step) as u128
    }

    /// The epoch of a step, and the first step behind it, or the end.
    fn epoch_of(&self, step: u64, end: u64) -> (u64, u64) {
        let epoch = self.pace().epoch(step);
        (epoch, (epoch + 1).saturating_mul(self.pace().steps_per_epoch()).min(end))
    }

    /// The samples of steps `from..to`, all of one epoch.
    fn tally(&self, epoch: u64, from: u64, to: u64) -> Tally {
        let start = self.pace().start(from);
        let n = (self.before(to) - self.before(from)) as usize;
        let mut tally = Tally::default();
        match n == self.len {
            // The whole set, whatever the order is.
            true => (0..n).for_each(|idx| tally.note(epoch, idx as u64)),
            false => {
                self.order(epoch).walk(start).take(n).for_each(|idx| tally.note(epoch, idx as u64));
            }
        }
        tally
    }
}

impl fmt::Display for LedgerReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} (digest {})", self.words, self.digest)
    }
}

/// JSON has no integers of 128 bits that all readers agree on.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(sum: &u128, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{sum:032x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u128, D::Error> {
        let text = String::deserialize(d)?;
        u128::from_str_radix(&text, 16).map_err(|_| D::Error::custom("a digest is 32 hex digits"))
    }
}

#[cfg(test)]
mod tests;
