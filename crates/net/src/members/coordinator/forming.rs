//! Which members form the next generation, and when.

use std::time::Instant;

use super::super::decision::{Decision, MemberAction, Reason};
use super::super::message::{Formation, HeldSteps, MemberId, MemoryUse};
#[cfg(test)]
use super::CoordinatorBug;
use super::{Coordinator, Stand};

impl Coordinator {
    /// A generation has ended, or ends.
    pub(super) fn settle_ending(&mut self, now: Instant, decisions: &mut Vec<Decision>) {
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
            // Ranks of a run that trains may be on their way back to it.
            if self.holds_off(now) {
                return Some(Reason::HoldsOff);
            }
            // The first generation waits for all that were started, as long as they may still come.
            let late = self.began.is_some_and(|began| now >= began + self.rules.patience);
            let prepare = self.members.values().any(|known| matches!(known.stand, Stand::Busy));
            let least = if late && !prepare { self.rules.min } else { self.rules.start.max(self.rules.min) };
            return if chosen.len() < least { lacks(least) } else { None };
        }
        let there = self.ranks.iter().filter(|id| chosen.contains(id)).count();
        let of = self.ranks.iter().filter(|id| !self.accounted.contains(id)).count();
        // Half is enough only together with the coordinator that formed it: two coordinators never have more than half each.
        let enough = self.rules.exclusive || 2 * there >= of + usize::from(self.restarted && of > 0);
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
        let here = |id: &MemberId| self.members.get(id).is_some_and(|known| known.here);
        let memory = self.rules.memory != MemoryUse::Never && members.iter().all(here);
        self.memory = Some(memory);
        let form = |rank: usize| Formation {
            generation: self.generation,
            rank,
            master: master.clone(),
            ranks: members.clone(),
            held: held.clone(),
            source,
            save_only,
            memory,
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
        (self.cancelled, self.waits, self.restarted) = (false, None, false);
        self.ending = save_only.then(|| why.clone());
        decisions.push(Decision { action: MemberAction::Form { members, forms }, why });
    }

    pub(super) fn held(&self, id: MemberId) -> Option<HeldSteps> {
        match &self.members.get(&id)?.stand {
            Stand::Ready(ready) => ready.held,
            Stand::Busy | Stand::Running | Stand::Done => None,
        }
    }
}
