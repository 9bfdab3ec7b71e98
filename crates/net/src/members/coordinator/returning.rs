//! Ranks that come to a coordinator because theirs was lost: the run goes on with them.
//!
//! A coordinator that is started again knows nothing. What it must know, its ranks bring: the number of the last generation and who
//! is in it. That is enough, because a generation takes effect only when each of its ranks was told of it: the ranks are the
//! journal, and every one of them has all of it. Ranks that train go on training in the meantime.
//!
//! A rank that does not come back is silent, and after patience it is lost as any other. One that was not told of the last
//! generation, because the coordinator was lost while it told them, shows that this generation cannot have begun: it is ended, and
//! the next one formed.

use std::time::Instant;

use super::super::decision::{Decision, MemberAction, Reason};
use super::super::message::{MemberId, Returned};
use super::{Coordinator, Known, Stand};

impl Coordinator {
    /// Whether the first generation waits for ranks that may train already.
    pub(super) fn holds_off(&self, now: Instant) -> bool {
        self.opened.is_some_and(|opened| now < opened + self.rules.hold_off)
    }

    /// A rank comes back.
    pub(super) fn take_back(
        &mut self,
        now: Instant,
        id: MemberId,
        returned: Returned,
        decisions: &mut Vec<Decision>,
    ) {
        let Returned { generation, ranks, running, trained, tally } = returned;
        #[cfg(test)]
        if self.bug == Some(super::CoordinatorBug::ForgetsTheRun) {
            let known = Known::waiting(now, 0);
            return drop(self.members.insert(id, Known { trained, ..known }));
        }
        if generation > self.generation && ranks.contains(&id) {
            self.take_over(now, generation, ranks.clone(), decisions);
        }
        self.tally.take_over(tally);
        // Two coordinators that were lost may have given the same number to different ranks; then neither was told to all.
        let other = generation == self.generation && ranks != self.ranks;
        let is_rank = self.ranks.contains(&id);
        if generation == 0 && !is_rank {
            // It was in no generation, and stands ready for one.
            return drop(self.members.insert(id, Known::waiting(now, 0)));
        }
        let Some(known) = self.members.get_mut(&id).filter(|_| is_rank) else {
            let action = MemberAction::Dismiss { member: id };
            return decisions.push(Decision { action, why: Reason::TooLate });
        };
        let stand = if running { Stand::Running } else { Stand::Busy };
        (known.heard, known.away) = (now, false);
        (known.trained, known.generation, known.stand) = (trained, generation, stand);
        #[cfg(test)]
        if self.bug == Some(super::CoordinatorBug::MixesGenerations) {
            known.generation = self.generation;
            return;
        }
        if let Some(why) = self.ending.clone().filter(|_| self.cancelled) {
            // The others were told before it came back.
            let action = MemberAction::Cancel { generation: self.generation, members: vec![id] };
            return decisions.push(Decision { action, why });
        }
        self.end_if_untold(now, other.then_some(id), decisions);
    }

    /// The last generation is this one, which another coordinator formed.
    pub(super) fn take_over(
        &mut self,
        now: Instant,
        generation: u64,
        ranks: Vec<MemberId>,
        decisions: &mut Vec<Decision>,
    ) {
        if self.ending.is_none() {
            // What this one formed meanwhile was formed without knowing of the run.
            let why = Reason::HoldsOff;
            self.end_generation(now, why, true, decisions);
        }
        for (id, known) in &mut self.members {
            known.trained &= ranks.contains(id);
        }
        for id in &ranks {
            // It counts as silent from now on, until it comes back.
            let away = Known { away: true, ..Known::waiting(now, generation) };
            self.members.entry(*id).or_insert(away);
        }
        // Whether they share memory only their last coordinator knows.
        (self.generation, self.ranks, self.memory) = (generation, ranks, None);
        self.accounted.clear();
        (self.ending, self.cancelled, self.waits) = (None, false, None);
        (self.saved, self.saving, self.restarted) = (None, None, true);
        self.began.get_or_insert(now);
        if let Some(ended) = self.ended.filter(|id| self.ranks.contains(id)) {
            self.accounted.insert(ended);
            self.lose(now, ended, Reason::Exited(ended), decisions);
        }
    }

    /// If a rank of the last generation was never told of it, that generation has not begun, and will not.
    fn end_if_untold(&mut self, now: Instant, other: Option<MemberId>, decisions: &mut Vec<Decision>) {
        let untold =
            |id: &&MemberId| self.members.get(id).is_some_and(|known| known.generation != self.generation);
        if let Some(id) = other.or_else(|| self.ranks.iter().find(untold).copied()) {
            self.end_generation(now, Reason::Untold(id), true, decisions);
        }
    }
}
