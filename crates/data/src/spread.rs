//! A set whose files lie with several members, with no storage in common.
//!
//! All members know the whole order: which runs of samples lie in which part, who has that part, and the class of each sample. What a
//! member has itself it reads itself. Everything else is asked for from the member that has it ([`Lender`]), and comes as [`Fetched`] is:
//! decoded by the member that has the file, before augmentation. So a sample has the same bits wherever it lies.
//!
//! Who is going to read several samples says so first ([`Dataset::ahead`]): they are asked for with one letter for each member that has
//! some, and wait in the reader's [`Scratch`]. A loader does that for each batch, some batches ahead of the step. A sample that was not
//! announced is asked for alone, which costs its reader a round trip.

mod letter;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::dataset::{Dataset, Fetched, Scratch};
use crate::error::DataError;
use crate::spec::{Spec, Target};
use crate::together::{Members, gather, share};
pub use letter::{read_sample, write_sample};

/// An answer has about this many bytes at most, so that a long one does not keep others waiting, and the memory of those that are on
/// their way is bounded.
const ANSWER_BYTES: usize = 16 << 20;
/// A request names so many samples at most.
const ASKED_MAX: usize = 1 << 16;
/// Labels are told in letters of so many.
const LABELS: usize = 1 << 24;

/// Brings samples that other members have.
pub trait Lender: Send + Sync {
    /// Asks a member for samples of a set: each is the number of a part there, and an index in it.
    fn ask(&self, member: usize, set: u32, samples: &[(u32, u64)]) -> Result<u64, DataError>;

    /// Waits for what was asked for: the samples one after the other, as [`write_sample`] writes them.
    fn wait(&self, ticket: u64) -> Result<Vec<u8>, DataError>;
}

/// Neighbours in the order of the set that lie beside each other in one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpreadRun {
    /// How many samples.
    pub len: usize,
    /// The part that they lie in, as its member counts.
    pub part: u32,
    /// The first of them there.
    pub first: usize,
    /// The member that tells others what is in them, and lends them.
    pub member: usize,
    /// Whether this member has that part too, under the same number.
    pub here: bool,
}

/// A set of which this member has some parts.
pub struct SpreadSet {
    spec: Spec,
    runs: Vec<SpreadRun>,
    /// The index after the last sample of each run.
    ends: Vec<usize>,
    /// By number; `None` for those that only others have.
    parts: Vec<Option<Arc<dyn Dataset>>>,
    /// Of sets with classes, that of each sample.
    classes: Vec<u32>,
    /// Which of a run's sets it is.
    set: u32,
    lender: Arc<dyn Lender>,
}

/// Samples of other members that were asked for.
#[derive(Default, Debug)]
pub(crate) struct AheadSamples {
    set: u32,
    /// The letter that a sample is in, and where it begins.
    places: HashMap<usize, (usize, usize)>,
    letters: Vec<Vec<u8>>,
}

impl SpreadSet {
    /// Joins parts in the order of `runs`, which is the same on all members but for `here`. All parts must have the same spec. Collective.
    pub fn join(
        runs: Vec<SpreadRun>,
        parts: Vec<Option<Arc<dyn Dataset>>>,
        members: &mut dyn Members,
        lender: Arc<dyn Lender>,
        set: u32,
    ) -> Result<SpreadSet, DataError> {
        let Some(first) = runs.first().copied() else {
            return Err(DataError::Setting { why: "a set has at least one sample".into() });
        };
        let mine = parts.iter().flatten().next().map(|part| part.spec().clone());
        let mut spec = match parts.get(first.part as usize).and_then(Option::as_ref) {
            Some(part) if first.member == members.rank() => Some(part.spec().clone()),
            Some(_) | None => None,
        };
        share(members, first.member, &mut spec)?;
        let Some(spec) = spec else {
            return Err(DataError::Setting { why: "the first part of the set is nowhere".into() });
        };
        let others = parts.iter().flatten().any(|part| *part.spec() != spec);
        let unlike = gather(members, others.then(|| mine.map(|spec| format!("{spec:?}"))).flatten())?;
        if let Some((member, has)) = unlike.iter().enumerate().find_map(|(k, has)| Some((k, has.as_ref()?))) {
            let why = format!(
                "samples of the files of rank {member} are {has}, but those of rank {} are {spec:?}; all files of a set must have the \
                 same shape and classes",
                first.member
            );
            return Err(DataError::Setting { why });
        }
        let mut end = 0;
        let ends = runs.iter().map(|run| {
            end += run.len;
            end
        });
        let ends = ends.collect();
        let mut spread = SpreadSet { spec, ends, runs, parts, classes: Vec::new(), set, lender };
        if matches!(spread.spec.target, Target::Class { .. }) {
            spread.classes = spread.tell_classes(members)?;
        }
        Ok(spread)
    }

    /// The class of every sample. Collective.
    fn tell_classes(&self, members: &mut dyn Members) -> Result<Vec<u32>, DataError> {
        let mut classes = vec![0u32; self.len()];
        for member in 0..members.size() {
            let own = member == members.rank();
            // Where this member's samples are in the set, in letters of at most `LABELS`.
            let mut pieces: Vec<Range<usize>> = Vec::new();
            for (run, end) in self.runs.iter().zip(&self.ends).filter(|(run, _)| run.member == member) {
                let mut at = end - run.len;
                while at < *end {
                    let to = (*end).min(at + LABELS);
                    pieces.push(at..to);
                    at = to;
                }
            }
            let mut pieces = pieces.into_iter().peekable();
            while pieces.peek().is_some() {
                let (mut letter, mut n) = (Vec::new(), 0);
                while let Some(piece) = pieces.next_if(|piece| n == 0 || n + piece.len() <= LABELS) {
                    n += piece.len();
                    letter.push(piece);
                }
                let mut bytes = Vec::new();
                if own {
                    for idx in letter.iter().cloned().flatten() {
                        let (run, at) = self.find(idx);
                        let part = self.parts[run.part as usize].as_ref();
                        let class = part.map_or(Ok(None), |part| part.class(at))?;
                        bytes.extend_from_slice(&(class.unwrap_or(0) as u32).to_le_bytes());
                    }
                }
                let told = members.tell(member, bytes)?;
                if told.len() != 4 * n {
                    return Err(letter::corrupt(member));
                }
                let mut told = told.chunks_exact(4);
                for idx in letter.into_iter().flatten() {
                    let class = told.next().and_then(|bytes| bytes.try_into().ok());
                    classes[idx] = class.map_or(0, u32::from_le_bytes);
                }
            }
        }
        Ok(classes)
    }

    /// The run that a sample is in, and its index in its part.
    fn find(&self, idx: usize) -> (&SpreadRun, usize) {
        let k = self.ends.partition_point(|&end| end <= idx);
        let run = &self.runs[k];
        (run, run.first + (idx - (self.ends[k] - run.len)))
    }

    /// The part that has a sample, if it is here.
    fn here(&self, run: &SpreadRun) -> Option<&Arc<dyn Dataset>> {
        self.parts.get(run.part as usize).filter(|_| run.here)?.as_ref()
    }

    /// How many samples of this kind an answer has.
    fn samples_per_answer(&self) -> usize {
        (ANSWER_BYTES / (4 * self.spec.features.numel() + 64)).clamp(1, ASKED_MAX)
    }
}

impl Dataset for SpreadSet {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let (run, at) = self.find(idx);
        if let Some(part) = self.here(run) {
            return part.fetch(at, scratch);
        }
        if scratch.ahead.set != self.set || !scratch.ahead.places.contains_key(&idx) {
            self.ahead(&mut std::iter::once(idx), scratch)?;
        }
        let Some(&(letter, start)) = scratch.ahead.places.get(&idx) else {
            return Err(letter::corrupt(run.member));
        };
        let Scratch { ahead, numbers, targets, ids, .. } = scratch;
        let bytes = &ahead.letters[letter][start..];
        let sample = read_sample(bytes, numbers, targets, ids);
        sample.map(|(sample, _)| sample).ok_or_else(|| letter::corrupt(run.member))
    }

    fn ahead(
        &self,
        samples: &mut dyn Iterator<Item = usize>,
        scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        let ahead = &mut scratch.ahead;
        ahead.set = self.set;
        ahead.places.clear();
        ahead.letters.clear();
        let mut of_member: Vec<(usize, Vec<usize>)> = Vec::new();
        for idx in samples {
            let (run, _) = self.find(idx);
            if self.here(run).is_some() {
                continue;
            }
            match of_member.iter_mut().find(|(member, _)| *member == run.member) {
                Some((_, wanted)) => wanted.push(idx),
                None => of_member.push((run.member, vec![idx])),
            }
        }
        // All are asked before one is waited for.
        let mut asked = Vec::new();
        for (member, wanted) in &mut of_member {
            // A sample may be wanted twice where one pass over the set ends and the next one begins.
            wanted.sort_unstable();
            wanted.dedup();
            for wanted in wanted.chunks(self.samples_per_answer()) {
                let place = |idx: &usize| {
                    let (run, at) = self.find(*idx);
                    (run.part, at as u64)
                };
                let places: Vec<_> = wanted.iter().map(place).collect();
                asked.push((*member, self.lender.ask(*member, self.set, &places)?, wanted));
            }
        }
        for (member, ticket, wanted) in asked {
            let letter = self.lender.wait(ticket)?;
            let mut start = 0;
            for idx in wanted {
                ahead.places.insert(*idx, (ahead.letters.len(), start));
                start += letter::length(&letter[start..]).ok_or_else(|| letter::corrupt(member))?;
            }
            ahead.letters.push(letter);
        }
        Ok(())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(self.classes.get(idx).map(|class| *class as usize))
    }

    fn intact(&self) -> Result<(), DataError> {
        self.parts.iter().flatten().try_for_each(|part| part.intact())
    }
}

/// How many samples each part has, by number, as those say who lend them. Collective.
pub fn tell_lengths(
    parts: &[Option<Arc<dyn Dataset>>],
    tellers: &[usize],
    members: &mut dyn Members,
) -> Result<Vec<usize>, DataError> {
    #[derive(Serialize, Deserialize)]
    struct Length {
        part: usize,
        samples: usize,
    }
    let rank = members.rank();
    let own = |(part, set): (usize, &Option<Arc<dyn Dataset>>)| {
        let set = set.as_ref().filter(|_| tellers.get(part) == Some(&rank))?;
        Some(Length { part, samples: set.len() })
    };
    let mine: Vec<Length> = parts.iter().enumerate().filter_map(own).collect();
    let mut lengths = vec![0; tellers.len()];
    for Length { part, samples } in gather(members, mine)?.into_iter().flatten() {
        if let Some(length) = lengths.get_mut(part) {
            *length = samples;
        }
    }
    Ok(lengths)
}

#[cfg(test)]
mod tests;
