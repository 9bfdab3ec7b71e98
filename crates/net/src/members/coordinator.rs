//! The coordinator's decisions: a pure function of time, state and event, that returns actions and why each is taken.
//!
//! It does no IO and reads no clock, so whole runs of it can be simulated (see `tests`). [`super::Office`] does what it says.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use super::message::{Formation, HeldSteps, MemberId, Ready};
use super::tally::{Stall, Tally};

/// How many generations in a row may end without a lost rank and without a step before the run is given up: then it is not a loss that
/// ends them.
const FRUITLESS_MAX: u32 = 10;

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
}

/// Something that happened.
#[derive(Clone, PartialEq, Debug)]
pub enum MemberEvent {
    /// A process has proved the secret and wants to be a rank. `watched`: the coordinator's host runs it, so that its end is reported
    /// and it can be killed.
    Entered {
        /// Whether it is watched.
        watched: bool,
        /// The member that this process was before, if it comes back.
        was: Option<MemberId>,
    },
    /// A member can form a generation.
    Ready(Ready),
    /// A member trains.
    Running {
        /// The generation.
        generation: u64,
    },
    /// A sign of life.
    Beat {
        /// Steps done.
        step: u64,
    },
    /// A member wants to leave at the end of a step.
    Leaves,
    /// Training is complete on a member, and everything is written.
    Done {
        /// The generation.
        generation: u64,
    },
    /// Its connection has closed.
    Closed,
    /// Its own host says that its process has ended.
    Exited,
    /// The test that runs this job has killed it: stalls are counted from here.
    Struck,
}

/// What a coordinator does.
#[derive(Clone, PartialEq, Debug)]
pub enum MemberAction {
    /// These members form a generation, by rank.
    Form {
        /// Who.
        members: Vec<MemberId>,
        /// What each is told, by rank.
        forms: Vec<Formation>,
    },
    /// These members end their generation now.
    Cancel {
        /// Which.
        generation: u64,
        /// Who.
        members: Vec<MemberId>,
    },
    /// These members end their generation at the end of a step.
    Change {
        /// Which.
        generation: u64,
        /// Who.
        members: Vec<MemberId>,
    },
    /// This member is no longer one: its connection is closed, and if it is watched it is killed.
    Remove {
        /// Who.
        member: MemberId,
    },
    /// This member is let go as it wished.
    Release {
        /// Who.
        member: MemberId,
    },
    /// Training stands still until members come.
    Wait,
    /// All ranks train again; the tally has changed.
    Trains,
    /// The run is over.
    End {
        /// Whether it is finished.
        finished: bool,
    },
}

/// Why a coordinator does something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// All that the first generation waits for are there.
    Begin,
    /// A rank's process has ended.
    Exited(MemberId),
    /// A rank's connection has closed.
    Closed(MemberId),
    /// A rank was silent for longer than patience.
    Silent(MemberId),
    /// A rank's group failed without a loss that the coordinator knows of.
    Failed(MemberId, String),
    /// Members want in.
    Joins(usize),
    /// A rank wants to leave.
    Leaves(MemberId),
    /// There are fewer members than the least number of ranks.
    BelowMin {
        /// Members.
        there: usize,
        /// The least number.
        min: usize,
    },
    /// Fewer than half of the last generation are there, and the others may be alive elsewhere.
    NoMajority {
        /// Of the last generation.
        there: usize,
        /// How many it had, without those whose end was reported.
        of: usize,
    },
    /// Generations end again and again without a loss.
    Fruitless(String),
    /// All ranks run.
    AllRun,
    /// Training is complete.
    Finished,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Reason::Begin => write!(f, "all ranks of the start are there"),
            Reason::Exited(id) => write!(f, "the process of member {id} ended"),
            Reason::Closed(id) => write!(f, "member {id} closed its connection"),
            Reason::Silent(id) => write!(f, "member {id} was silent for longer than `parallel.patience`"),
            Reason::Failed(id, why) => write!(f, "member {id} lost its group: {why}"),
            Reason::Joins(1) => write!(f, "a rank joins"),
            Reason::Joins(n) => write!(f, "{n} ranks join"),
            Reason::Leaves(id) => write!(f, "member {id} leaves"),
            Reason::BelowMin { there, min } => {
                write!(
                    f,
                    "there are {there} ranks and at least {min} are needed (`parallel.elastic.min`); waiting for more"
                )
            }
            Reason::NoMajority { there, of } => write!(
                f,
                "only {there} of {of} ranks of the last generation are there, and the others may be alive behind a cut network; waiting for them"
            ),
            Reason::Fruitless(why) => {
                write!(
                    f,
                    "{FRUITLESS_MAX} generations in a row ended without a step and without a lost rank: {why}"
                )
            }
            Reason::AllRun => write!(f, "all ranks run"),
            Reason::Finished => write!(f, "training is complete"),
        }
    }
}

/// An action and why it is taken.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// What is done.
    pub action: MemberAction,
    /// Why.
    pub why: Reason,
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
}

struct Known {
    watched: bool,
    heard: Instant,
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
    /// Those of them that are gone and whose end their host reported, or that left by themselves: not those that fell silent.
    accounted: BTreeSet<MemberId>,
    /// Why the last generation ends, or has ended; none while it is formed and runs.
    ending: Option<Reason>,
    cancelled: bool,
    /// The state that generations which were formed to save have saved.
    saved: Option<HeldSteps>,
    /// What the last generation is to save, if it was formed for that.
    saving: Option<HeldSteps>,
    began: Option<Instant>,
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
            accounted: BTreeSet::new(),
            ending: Some(Reason::Begin),
            cancelled: true,
            saved: None,
            saving: None,
            began: None,
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

    /// When the next tick is due even if nothing happens.
    pub fn due(&self) -> Option<Instant> {
        self.members.values().map(|known| known.heard + self.rules.patience).min()
    }

    /// Something happened to a member.
    pub fn step(&mut self, now: Instant, member: MemberId, event: MemberEvent) -> Vec<Decision> {
        let mut decisions = Vec::new();
        self.apply(now, member, event, &mut decisions);
        self.settle(now, &mut decisions);
        decisions
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) -> Vec<Decision> {
        let mut decisions = Vec::new();
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
            let (leaves, trained, step, generation, stand) = (false, false, 0, 0, Stand::Busy);
            let known = Known { watched, heard: now, leaves, trained, step, generation, stand };
            self.members.insert(id, known);
            return;
        }
        if matches!(event, MemberEvent::Exited) {
            self.dying.remove(&id);
        }
        // Its own host says so: the process has ended, or its system closed what it had open.
        if matches!(event, MemberEvent::Exited | MemberEvent::Closed) && self.ranks.contains(&id) {
            self.accounted.insert(id);
        }
        let Some(known) = self.members.get_mut(&id) else { return };
        known.heard = now;
        match event {
            MemberEvent::Entered { .. } | MemberEvent::Beat { .. } => {
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

    /// A generation has ended, or ends.
    fn settle_ending(&mut self, now: Instant, decisions: &mut Vec<Decision>) {
        let survivors: Vec<MemberId> =
            self.ranks.iter().copied().filter(|id| self.members.contains_key(id)).collect();
        let stopped = survivors.iter().all(|id| self.is_ready(*id)) && self.dying.is_empty();
        #[cfg(test)]
        let stopped = match self.bug {
            Some(CoordinatorBug::FormsEarly) => {
                survivors.is_empty() || survivors.iter().any(|id| self.is_ready(*id))
            }
            Some(CoordinatorBug::ForgetsTheDying) => survivors.iter().all(|id| self.is_ready(*id)),
            _ => stopped,
        };
        if !stopped {
            return;
        }
        // Who wants to leave with a step that is neither saved nor known to a rank that stays takes part in one more generation,
        // which takes it over or saves it.
        let wants = |id: &MemberId| self.members[id].leaves;
        let others = survivors.iter().filter(|id| !wants(id)).filter_map(|id| self.held(*id)).max();
        let kept = others.max(self.saved);
        let goes = |id: &MemberId| wants(id) && self.held(*id) <= kept;
        for id in survivors.iter().copied().filter(goes).collect::<Vec<_>>() {
            decisions
                .push(Decision { action: MemberAction::Release { member: id }, why: Reason::Leaves(id) });
            self.members.remove(&id);
            self.accounted.insert(id);
        }
        let newcomers = self.newcomers();
        let mut chosen: Vec<MemberId> = survivors
            .into_iter()
            .filter(|id| self.is_ready(*id))
            .chain(newcomers.iter().copied())
            .take(self.rules.max)
            .collect();
        if let Some(why) = self.waits_for(now, &chosen) {
            let furthest = chosen.iter().filter_map(|id| self.held(*id)).max();
            let saves = matches!(why, Reason::BelowMin { .. }) && furthest.is_some() && furthest > self.saved;
            if self.waits.as_ref() != Some(&why) && !saves {
                self.waits = Some(why.clone());
                decisions.push(Decision { action: MemberAction::Wait, why: why.clone() });
            }
            if !saves {
                return;
            }
            chosen.retain(|id| self.held(*id).is_some());
            return self.form(now, chosen, true, why, decisions);
        }
        let why = self.ending.clone().unwrap_or(Reason::Begin);
        self.form(now, chosen, false, why, decisions);
    }

    /// Why these members cannot train, if they cannot.
    fn waits_for(&self, now: Instant, chosen: &[MemberId]) -> Option<Reason> {
        let lacks = |least: usize| {
            let there = chosen.iter().filter(|id| !self.members[id].leaves).count();
            Some(Reason::BelowMin { there, min: least })
        };
        if self.generation == 0 {
            // The first generation waits for all that were started, as long as they may still come.
            let late = self.began.is_some_and(|began| now >= began + self.rules.patience);
            let prepare = self.members.values().any(|known| matches!(known.stand, Stand::Busy));
            let least = if late && !prepare { self.rules.min } else { self.rules.start.max(self.rules.min) };
            return if chosen.len() < least { lacks(least) } else { None };
        }
        let there = self.ranks.iter().filter(|id| chosen.contains(id)).count();
        let of = self.ranks.iter().filter(|id| !self.accounted.contains(id)).count();
        let enough = 2 * there >= of;
        #[cfg(test)]
        let enough = enough || self.bug == Some(CoordinatorBug::GoesOnWithAny);
        if !enough {
            return Some(Reason::NoMajority { there, of });
        }
        // Those that leave only hand over: without a rank that takes it, they save.
        let all_leave = chosen.iter().all(|id| self.members[id].leaves);
        if chosen.len() < self.rules.min || all_leave { lacks(self.rules.min) } else { None }
    }

    fn form(
        &mut self,
        now: Instant,
        members: Vec<MemberId>,
        save_only: bool,
        why: Reason,
        decisions: &mut Vec<Decision>,
    ) {
        if members.is_empty() {
            return;
        }
        let held: Vec<Option<HeldSteps>> = members.iter().map(|id| self.held(*id)).collect();
        let furthest = held.iter().flatten().max();
        let source =
            furthest.and_then(|furthest| held.iter().position(|held| held.as_ref() == Some(furthest)));
        #[cfg(test)]
        let source = match self.bug {
            Some(CoordinatorBug::TakesFirstState) => held.iter().position(Option::is_some),
            _ => source,
        };
        let master = match &self.members[&members[0]].stand {
            Stand::Ready(ready) => ready.listen.clone(),
            Stand::Busy | Stand::Running | Stand::Done => return,
        };
        if self.generation > 0 && !save_only {
            self.tally.ranks_joined +=
                members.iter().filter(|id| self.members[id].generation == 0).count() as u64;
        }
        self.tally.steps_redone += u64::from(std::mem::take(&mut self.redoes));
        if self.noticed.is_some() {
            self.stopped = Some(now);
        }
        self.generation += 1;
        let form = |rank: usize| Formation {
            generation: self.generation,
            rank,
            master: master.clone(),
            held: held.clone(),
            source,
            save_only,
            note: self.note.clone(),
            why: why.to_string(),
        };
        let forms = (0..members.len()).map(form).collect();
        for id in &members {
            let known = self.members.get_mut(id).expect("a member that was chosen");
            (known.generation, known.stand) = (self.generation, Stand::Busy);
        }
        self.ranks.clone_from(&members);
        self.accounted.clear();
        // A generation that only saves ends by itself.
        // Without a state the run goes back.
        self.saved = self.saved.filter(|_| source.is_some());
        self.saving = furthest.copied().filter(|_| save_only);
        (self.cancelled, self.waits) = (false, None);
        self.ending = save_only.then(|| why.clone());
        decisions.push(Decision { action: MemberAction::Form { members, forms }, why });
    }

    fn held(&self, id: MemberId) -> Option<HeldSteps> {
        match &self.members.get(&id)?.stand {
            Stand::Ready(ready) => ready.held,
            Stand::Busy | Stand::Running | Stand::Done => None,
        }
    }

    fn is_ready(&self, id: MemberId) -> bool {
        self.members.get(&id).is_some_and(|known| matches!(known.stand, Stand::Ready(_)))
    }

    fn runs(&self, id: MemberId) -> bool {
        self.members.get(&id).is_some_and(|known| matches!(known.stand, Stand::Running))
    }
}

impl Known {
    /// Whether it is in its generation, as far as is known.
    fn is_in(&self) -> bool {
        matches!(self.stand, Stand::Busy | Stand::Running)
    }
}
