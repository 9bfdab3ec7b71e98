//! The coordinator's decisions: a pure function of time, state and event, that returns actions and why each is taken.
//!
//! It does no IO and reads no clock, so whole runs of it can be simulated (see `tests`). [`super::Office`] does what it says.

mod forming;
mod returning;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::decision::{Decision, FRUITLESS_MAX, MemberAction, MemberEvent, Reason};
use super::message::{HeldSteps, MemberId, MemoryUse, Ready};
use super::store::GenerationRecord;
use super::tally::{Stall, Tally};

/// What a coordinator goes by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Fewer ranks than this do not train.
    pub min: usize,
    /// More ranks than this are not taken; others wait until there is room.
    pub max: usize,
    /// How many the first generation waits for.
    pub start: usize,
    /// How long a member may be silent before it counts as lost.
    pub patience: Duration,
    /// How long the first generation waits for ranks of a run that trains already, from when the coordinator opens: its predecessor may
    /// have been lost.
    pub hold_off: Duration,
    /// Whether a store sees to it that no other coordinator forms the next generation: then whoever is there may go on.
    pub exclusive: bool,
    /// Whether ranks may share memory.
    pub memory: MemoryUse,
}

/// A deliberate mistake, to prove that the tests find it.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CoordinatorBug {
    /// The next generation is formed before all survivors have left the last one.
    FormsEarly,
    /// The state of a member that has not trained yet counts: one that was taken for dead comes back with its own.
    TrustsNewcomers,
    /// A watched member that is removed is not waited for.
    ForgetsTheDying,
    /// The state of the lowest rank counts, not the one that is furthest.
    TakesFirstState,
    /// Silent members stay.
    EndlessPatience,
    /// Half of a generation is not asked for.
    GoesOnWithAny,
    /// A coordinator that was started again begins anew, whoever comes back.
    ForgetsTheRun,
    /// A rank that comes back from an earlier generation is taken for one of this.
    MixesGenerations,
}

struct Known {
    watched: bool,
    /// Memory can be shared with it.
    here: bool,
    heard: Instant,
    /// It is a rank of a generation that another coordinator formed, and has not come back yet: what is heard of it before is not for this one.
    away: bool,
    leaves: bool,
    /// Whether it has trained as this member: what it held before that is of a run that may have gone on without it.
    trained: bool,
    step: u64,
    /// The generation that it was told to form last.
    generation: u64,
    stand: Stand,
}

enum Stand {
    /// It prepares, or has not answered a cancel yet.
    Busy,
    Ready(Ready),
    Running,
    Done,
}

/// The state.
pub struct Coordinator {
    rules: Rules,
    members: BTreeMap<MemberId, Known>,
    /// Removed and watched, and not seen dead yet.
    dying: BTreeSet<MemberId>,
    generation: u64,
    /// The ranks of the last generation, those that are gone included.
    ranks: Vec<MemberId>,
    /// Whether they share memory; unknown of ranks that another coordinator told what to form.
    memory: Option<bool>,
    /// Those of them that are gone and whose end their host reported, or that left by themselves: not those that fell silent.
    accounted: BTreeSet<MemberId>,
    /// Why the last generation ends, or has ended; none while it is formed and runs.
    ending: Option<Reason>,
    cancelled: bool,
    /// The state that generations which were formed to save have saved.
    saved: Option<HeldSteps>,
    /// What the last generation is to save, if it was formed for that.
    saving: Option<HeldSteps>,
    /// The first that it was told of anything.
    opened: Option<Instant>,
    began: Option<Instant>,
    /// Whether it took the last generation over from another coordinator.
    restarted: bool,
    /// A rank of that generation whose process has ended, with the coordinator in it.
    ended: Option<MemberId>,
    over: bool,
    waits: Option<Reason>,
    /// What rank 0 left for later ones.
    note: Vec<u8>,
    fruitless: u32,
    redoes: bool,
    /// When it happened, was noticed, and all had stopped.
    struck: Option<Instant>,
    noticed: Option<Instant>,
    stopped: Option<Instant>,
    /// What has happened so far.
    pub tally: Tally,
    #[cfg(test)]
    pub(super) bug: Option<CoordinatorBug>,
}

impl Coordinator {
    /// Nobody is there yet.
    pub fn new(rules: Rules) -> Coordinator {
        Coordinator {
            rules,
            members: BTreeMap::new(),
            dying: BTreeSet::new(),
            generation: 0,
            ranks: Vec::new(),
            memory: None,
            accounted: BTreeSet::new(),
            ending: Some(Reason::Begin),
            cancelled: true,
            saved: None,
            saving: None,
            opened: None,
            began: None,
            restarted: false,
            ended: None,
            over: false,
            waits: None,
            note: Vec::new(),
            fruitless: 0,
            redoes: false,
            struck: None,
            noticed: None,
            stopped: None,
            tally: Tally::default(),
            #[cfg(test)]
            bug: None,
        }
    }

    /// The last generation, and its ranks that are still members, in order.
    pub fn generation(&self) -> (u64, Vec<MemberId>) {
        (self.generation, self.ranks.iter().copied().filter(|id| self.members.contains_key(id)).collect())
    }

    /// Whether all ranks of the last generation train.
    pub fn trains(&self) -> bool {
        self.ending.is_none() && self.ranks.iter().all(|id| self.runs(*id))
    }

    /// Whether the ranks of the last generation share memory, if this coordinator formed it.
    pub fn shares_memory(&self) -> Option<bool> {
        self.memory
    }

    /// Members that are in no generation.
    pub fn waiting(&self) -> Vec<MemberId> {
        let waits = |(id, known): (&MemberId, &Known)| {
            (!self.ranks.contains(id) || matches!(known.stand, Stand::Ready(_))).then_some(*id)
        };
        self.members.iter().filter_map(waits).collect()
    }

    /// Steps that a member has done, as far as it said.
    pub fn step_of(&self, member: MemberId) -> Option<u64> {
        self.members.get(&member).map(|known| known.step)
    }

    /// What training stands still for, if it does.
    pub fn waits(&self) -> Option<&Reason> {
        self.waits.as_ref()
    }

    /// Whether the run is over.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Keeps what rank 0 leaves for later ones.
    pub fn keep_note(&mut self, note: Vec<u8>) {
        if !note.is_empty() {
            self.note = note;
        }
    }

    /// It comes after a coordinator that was in the process of this member, which has ended.
    pub fn succeeds(&mut self, ended: Option<MemberId>) {
        self.ended = ended;
    }

    /// The last generation is the one that was recorded; its ranks are on their way.
    pub fn goes_on(&mut self, now: Instant, record: &GenerationRecord) {
        self.opened.get_or_insert(now);
        // Nobody is connected yet who could be told anything.
        self.take_over(now, record.generation, record.ranks.clone(), &mut Vec::new());
    }

    /// When the next tick is due even if nothing happens.
    pub fn due(&self) -> Option<Instant> {
        let silent = self.members.values().map(|known| known.heard + self.rules.patience).min();
        let held_off = self.opened.map(|opened| opened + self.rules.hold_off);
        silent.into_iter().chain(held_off.filter(|_| self.generation == 0)).min()
    }

    /// Something happened to a member.
    pub fn step(&mut self, now: Instant, member: MemberId, event: MemberEvent) -> Vec<Decision> {
        let mut decisions = Vec::new();
        self.opened.get_or_insert(now);
        self.apply(now, member, event, &mut decisions);
        self.settle(now, &mut decisions);
        decisions
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) -> Vec<Decision> {
        let mut decisions = Vec::new();
        self.opened.get_or_insert(now);
        let patience = self.rules.patience;
        let silent = |(id, known): (&MemberId, &Known)| (now >= known.heard + patience).then_some(*id);
        let silent: Vec<MemberId> = self.members.iter().filter_map(silent).collect();
        for id in silent {
            #[cfg(test)]
            if self.bug == Some(CoordinatorBug::EndlessPatience) {
                continue;
            }
            decisions.push(Decision { action: MemberAction::Remove { member: id }, why: Reason::Silent(id) });
            self.lose(now, id, Reason::Silent(id), &mut decisions);
        }
        self.settle(now, &mut decisions);
        decisions
    }

    fn apply(&mut self, now: Instant, id: MemberId, event: MemberEvent, decisions: &mut Vec<Decision>) {
        if let MemberEvent::Entered { watched, was } = event {
            self.began.get_or_insert(now);
            // It is here, so it is not training elsewhere.
            self.accounted.extend(was.filter(|was| self.ranks.contains(was)));
            if let Some(was) = was.filter(|was| self.members.contains_key(was)) {
                self.lose(now, was, Reason::Closed(was), decisions);
                self.dying.remove(&was);
            }
            self.members.insert(id, Known { watched, ..Known::waiting(now, 0) });
            return;
        }
        if let MemberEvent::Returned(returned) = event {
            return self.take_back(now, id, returned, decisions);
        }
        if matches!(event, MemberEvent::Exited) {
            self.dying.remove(&id);
        }
        // Its own host says so: the process has ended, or its system closed what it had open.
        if matches!(event, MemberEvent::Exited | MemberEvent::Closed) && self.ranks.contains(&id) {
            self.accounted.insert(id);
        }
        let is_end = matches!(event, MemberEvent::Exited | MemberEvent::Closed);
        let Some(known) = self.members.get_mut(&id).filter(|known| is_end || !known.away) else { return };
        known.heard = now;
        match event {
            MemberEvent::Entered { .. } | MemberEvent::Returned(_) | MemberEvent::Beat { .. } => {
                if let MemberEvent::Beat { step } = event {
                    if step > known.step {
                        self.fruitless = 0;
                    }
                    known.step = step;
                }
            }
            MemberEvent::Ready(ready) => {
                if ready.generation != known.generation {
                    return;
                }
                let counts = known.trained;
                #[cfg(test)]
                let counts = counts || self.bug == Some(CoordinatorBug::TrustsNewcomers);
                let held = ready.held.filter(|_| counts);
                let ready = Ready { held, ..ready };
                let failed = !ready.why.is_empty();
                let why = Reason::Failed(id, ready.why.clone());
                self.redoes |= ready.redoes;
                known.step = ready.held.map_or(known.step, |held| held / 2);
                known.stand = Stand::Ready(ready);
                // A rank that gives its generation up may be the only one that knows, also if it was to end with this step.
                let gives_up = self.ending.is_none() || (!self.cancelled && failed);
                if self.ranks.contains(&id) && !failed && !self.cancelled {
                    self.saved = self.saved.max(self.saving);
                }
                if self.ranks.contains(&id) && gives_up {
                    self.fruitless += 1;
                    self.end_generation(now, why, true, decisions);
                }
            }
            MemberEvent::Running { generation } => {
                if known.generation == generation && matches!(known.stand, Stand::Busy) {
                    (known.stand, known.trained) = (Stand::Running, true);
                }
            }
            MemberEvent::Leaves => {
                known.leaves = true;
                if !self.ranks.contains(&id) {
                    self.members.remove(&id);
                    decisions.push(Decision {
                        action: MemberAction::Release { member: id },
                        why: Reason::Leaves(id),
                    });
                }
            }
            MemberEvent::Done { generation } => {
                if known.generation == generation {
                    known.stand = Stand::Done;
                }
            }
            MemberEvent::Closed => {
                // Who is done ends by itself, and may still be writing what it has to say.
                let watched = known.watched && !self.over && !matches!(known.stand, Stand::Done);
                self.lose(now, id, Reason::Closed(id), decisions);
                if watched {
                    decisions.push(Decision {
                        action: MemberAction::Remove { member: id },
                        why: Reason::Closed(id),
                    });
                }
            }
            MemberEvent::Exited => {
                self.lose(now, id, Reason::Exited(id), decisions);
                self.dying.remove(&id);
            }
            MemberEvent::Struck => {
                self.struck.get_or_insert(now);
            }
            MemberEvent::Here => (known.watched, known.here) = (true, true),
        }
    }

    /// A member is gone.
    fn lose(&mut self, now: Instant, id: MemberId, why: Reason, decisions: &mut Vec<Decision>) {
        let Some(known) = self.members.remove(&id) else { return };
        if known.watched {
            self.dying.insert(id);
        }
        if matches!(known.stand, Stand::Done) || self.over {
            self.accounted.insert(id);
            return;
        }
        if self.ranks.contains(&id) {
            self.tally.ranks_lost += 1;
            self.fruitless = 0;
            self.noticed.get_or_insert(now);
            self.end_generation(now, why, true, decisions);
        }
    }

    /// The generation ends: now, or at the end of a step.
    fn end_generation(&mut self, now: Instant, why: Reason, at_once: bool, decisions: &mut Vec<Decision>) {
        if self.over || (self.cancelled && self.ending.is_some()) {
            return;
        }
        if at_once {
            self.noticed.get_or_insert(now);
        }
        let members: Vec<MemberId> =
            self.ranks.iter().copied().filter(|id| self.members.get(id).is_some_and(Known::is_in)).collect();
        let generation = self.generation;
        let action = match at_once {
            true => MemberAction::Cancel { generation, members },
            false => MemberAction::Change { generation, members },
        };
        self.cancelled = at_once;
        self.ending = Some(why.clone());
        decisions.push(Decision { action, why });
    }

    /// Does what can be done now.
    fn settle(&mut self, now: Instant, decisions: &mut Vec<Decision>) {
        if self.over {
            return;
        }
        if self.members.values().any(|known| matches!(known.stand, Stand::Done)) {
            self.over = true;
            return decisions
                .push(Decision { action: MemberAction::End { finished: true }, why: Reason::Finished });
        }
        if self.fruitless > FRUITLESS_MAX {
            self.over = true;
            let why = match &self.ending {
                Some(Reason::Failed(_, why)) => why.clone(),
                _ => String::new(),
            };
            let why = Reason::Fruitless(why);
            return decisions.push(Decision { action: MemberAction::End { finished: false }, why });
        }
        if self.ending.is_none() {
            self.settle_running(now, decisions);
        }
        if self.ending.is_some() {
            self.settle_ending(now, decisions);
        }
    }

    /// A generation is formed or runs.
    fn settle_running(&mut self, now: Instant, decisions: &mut Vec<Decision>) {
        if !self.ranks.iter().all(|id| self.runs(*id)) {
            return;
        }
        if let (Some(noticed), Some(stopped)) = (self.noticed.take(), self.stopped.take()) {
            let struck = self.struck.take().unwrap_or(noticed).min(noticed);
            self.tally.stalls.push(Stall {
                noticing: noticed - struck,
                cancelling: stopped - noticed,
                reforming: now - stopped,
            });
        }
        (self.waits, self.noticed, self.stopped) = (None, None, None);
        if let Some(id) = self.ranks.iter().copied().find(|id| self.members[id].leaves) {
            return self.end_generation(now, Reason::Leaves(id), false, decisions);
        }
        let joins = self.newcomers().len().min(self.rules.max.saturating_sub(self.ranks.len()));
        if joins > 0 && self.saving.is_none() {
            self.end_generation(now, Reason::Joins(joins), false, decisions);
        }
    }

    /// Members that are ready and were not in the last generation.
    fn newcomers(&self) -> Vec<MemberId> {
        let fresh = |(id, known): (&MemberId, &Known)| {
            (matches!(known.stand, Stand::Ready(_)) && !self.ranks.contains(id) && !known.leaves)
                .then_some(*id)
        };
        self.members.iter().filter_map(fresh).collect()
    }

    fn is_ready(&self, id: MemberId) -> bool {
        self.members.get(&id).is_some_and(|known| matches!(known.stand, Stand::Ready(_)))
    }

    fn runs(&self, id: MemberId) -> bool {
        self.members.get(&id).is_some_and(|known| matches!(known.stand, Stand::Running))
    }
}

impl Known {
    /// Nothing was heard of it yet.
    fn waiting(now: Instant, generation: u64) -> Known {
        let (watched, here, away, leaves, trained) = (false, false, false, false, false);
        Known { watched, here, heard: now, away, leaves, trained, step: 0, generation, stand: Stand::Busy }
    }

    /// Whether it is in its generation, as far as is known.
    fn is_in(&self) -> bool {
        matches!(self.stand, Stand::Busy | Stand::Running)
    }
}
