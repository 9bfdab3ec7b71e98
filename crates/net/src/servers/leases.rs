//! Which worker computes which block: the ledger's side of asynchronous training.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What reaches the leases.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LeaseEvent {
    /// A segment begins: these blocks are to be done, or fewer.
    Open {
        /// Its number; one more than that of the last.
        segment: u64,
        /// The blocks.
        blocks: Range<u64>,
        /// After so long no more blocks are handed out; what was begun by then is finished.
        longest: Duration,
    },
    /// A worker asks for a block.
    Ask {
        /// The worker, or a rank that only serves.
        worker: usize,
        /// In which segment. The answer to a question about a later segment comes when that has begun.
        segment: u64,
        /// Which of its questions it is, counted over all segments: an answer of an earlier one is known as such, and a question that is
        /// repeated gets the same answer.
        number: u64,
        /// The block of its last answer, which is in all ranges now.
        done: Option<u64>,
        /// Whether it wishes the segment to end soon.
        stop: bool,
        /// Whether it wants no block, and only to be told when the segment is over.
        watches: bool,
    },
    /// A worker will do nothing more, and does not come back under its number: others get its blocks.
    Leave {
        /// The worker.
        worker: usize,
    },
    /// Time goes on.
    Tick,
}

/// What the leases say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LeaseAction {
    /// A block for a worker.
    Lease {
        /// The worker.
        worker: usize,
        /// The question that it answers.
        number: u64,
        /// The block.
        block: u64,
    },
    /// There is no block for a worker now. It will be told of one, or that the segment is over.
    Rest {
        /// The worker.
        worker: usize,
        /// The question that it answers.
        number: u64,
    },
    /// The segment is over: all its blocks are done.
    Over {
        /// The worker.
        worker: usize,
        /// The question that it answers.
        number: u64,
        /// The first block that is not of it.
        end: u64,
    },
}

/// A bug of a test, which its harness must find.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LeaseBug {
    /// Forgets the blocks of a worker that leaves.
    LosesBlocks,
    /// Says that the segment is over when all blocks are handed out.
    EndsEarly,
}

/// The state of the leases.
#[derive(Debug)]
pub struct Leases {
    segment: u64,
    /// When it began, and for how long it hands out blocks; `None` if it no longer does.
    opened: Option<(Instant, Duration)>,
    /// The first block of this segment.
    first: u64,
    /// Blocks that were never handed out.
    fresh: Range<u64>,
    /// Blocks that came back.
    returned: BTreeSet<u64>,
    /// Who has which block.
    held: BTreeMap<u64, usize>,
    /// By worker: its last question, and the answer if it had one.
    asked: BTreeMap<usize, (u64, u64, Option<LeaseAction>)>,
    /// Those that want no block.
    watchers: BTreeSet<usize>,
    /// Workers that left, and may have messages on their way.
    gone: BTreeSet<usize>,
    #[cfg(test)]
    bug: Option<LeaseBug>,
}

impl Leases {
    /// Leases before the first segment; the blocks below `done` are done.
    pub fn new(done: u64) -> Leases {
        Leases {
            segment: 0,
            opened: None,
            first: done,
            fresh: done..done,
            returned: BTreeSet::new(),
            held: BTreeMap::new(),
            asked: BTreeMap::new(),
            watchers: BTreeSet::new(),
            gone: BTreeSet::new(),
            #[cfg(test)]
            bug: None,
        }
    }

    /// What an event leads to.
    pub fn step(&mut self, now: Instant, event: LeaseEvent) -> Vec<LeaseAction> {
        let mut actions = Vec::new();
        match event {
            LeaseEvent::Open { segment, blocks, longest } if segment > self.segment => {
                self.first = self.fresh.start;
                (self.segment, self.opened) = (segment, Some((now, longest)));
                self.fresh = self.first..blocks.end.max(self.first);
            }
            LeaseEvent::Open { .. } | LeaseEvent::Tick => {}
            LeaseEvent::Ask { worker, segment, number, done, stop, watches } => {
                if let Some(block) = done {
                    self.held.remove(&block);
                    self.returned.remove(&block);
                }
                if stop && segment == self.segment {
                    self.close();
                }
                match self.asked.get(&worker) {
                    _ if self.gone.contains(&worker) => {}
                    Some((of, last, answer)) if (*of, *last) == (segment, number) => {
                        actions.extend(answer.clone());
                    }
                    Some((of, last, _)) if (*of, *last) > (segment, number) => {}
                    Some(_) | None => {
                        self.asked.insert(worker, (segment, number, None));
                        match watches {
                            true => self.watchers.insert(worker),
                            false => self.watchers.remove(&worker),
                        };
                    }
                }
            }
            LeaseEvent::Leave { worker } => {
                self.asked.remove(&worker);
                self.gone.insert(worker);
                let gone: Vec<u64> =
                    self.held.iter().filter(|(_, w)| **w == worker).map(|(b, _)| *b).collect();
                for block in gone {
                    self.held.remove(&block);
                    #[cfg(test)]
                    if self.bug == Some(LeaseBug::LosesBlocks) {
                        continue;
                    }
                    self.returned.insert(block);
                }
            }
        }
        let is_long = |(opened, longest)| now.saturating_duration_since(opened) >= longest;
        if self.opened.is_some_and(is_long) {
            self.close();
        }
        self.serve(&mut actions);
        actions
    }

    /// No more fresh blocks in this segment, but at least one, so that every segment gets on.
    fn close(&mut self) {
        if self.opened.take().is_some() {
            let least = self.fresh.start.max(self.first + 1);
            self.fresh.end = self.fresh.end.min(least);
        }
    }

    /// Answers the workers for which there is an answer now.
    fn serve(&mut self, actions: &mut Vec<LeaseAction>) {
        let over = self.fresh.is_empty() && self.returned.is_empty() && self.held.is_empty();
        #[cfg(test)]
        let over = over || (self.bug == Some(LeaseBug::EndsEarly) && self.fresh.is_empty());
        for (&worker, (segment, number, answer)) in &mut self.asked {
            let (number, rested) = (*number, matches!(answer, Some(LeaseAction::Rest { .. })));
            if *segment != self.segment || (answer.is_some() && !rested) {
                continue;
            }
            let block = match self.watchers.contains(&worker) {
                true => None,
                false => self.returned.pop_first().or_else(|| self.fresh.next()),
            };
            let now = match block {
                Some(block) => {
                    self.held.insert(block, worker);
                    LeaseAction::Lease { worker, number, block }
                }
                None if over => LeaseAction::Over { worker, number, end: self.fresh.end },
                None if rested => continue,
                None => LeaseAction::Rest { worker, number },
            };
            *answer = Some(now.clone());
            actions.push(now);
        }
    }
}

#[cfg(test)]
impl Leases {
    pub(super) fn with_bug(mut self, bug: Option<LeaseBug>) -> Leases {
        self.bug = bug;
        self
    }
}
