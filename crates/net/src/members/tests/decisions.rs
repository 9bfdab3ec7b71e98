//! Single decisions of the coordinator, and their reasons.

use std::time::{Duration, Instant};

use super::super::coordinator::{Coordinator, Rules};
use super::super::decision::{Decision, MemberAction, MemberEvent, Reason};
use super::super::message::{Formation, MemberId, MemoryUse, Ready, Returned};
use super::super::store::GenerationRecord;
use super::super::tally::TallySummary;

const PATIENCE: Duration = Duration::from_secs(3);

const RULES: Rules = Rules {
    min: 1,
    max: 3,
    start: 3,
    patience: PATIENCE,
    hold_off: Duration::ZERO,
    exclusive: false,
    memory: MemoryUse::Never,
};

struct Story {
    coordinator: Coordinator,
    now: Instant,
    decisions: Vec<Decision>,
}

impl Story {
    fn new(min: usize, max: usize, start: usize) -> Story {
        let coordinator = Coordinator::new(Rules { min, max, start, ..RULES });
        Story { coordinator, now: Instant::now(), decisions: Vec::new() }
    }

    fn on(&mut self, id: MemberId, event: MemberEvent) -> &mut Story {
        self.decisions = self.coordinator.step(self.now, id, event);
        self
    }

    fn enter(&mut self, id: MemberId, watched: bool) -> &mut Story {
        self.on(id, MemberEvent::Entered { watched, was: None }).ready(id, 0, None)
    }

    fn ready(&mut self, id: MemberId, generation: u64, held: Option<u64>) -> &mut Story {
        self.ends(id, generation, held, "")
    }

    /// Stands ready because its generation broke.
    fn breaks(&mut self, id: MemberId, generation: u64, held: Option<u64>) -> &mut Story {
        self.ends(id, generation, held, "it broke")
    }

    fn ends(&mut self, id: MemberId, generation: u64, held: Option<u64>, why: &str) -> &mut Story {
        let (redoes, listen, why) = (false, format!("at {id}"), why.into());
        self.on(id, MemberEvent::Ready(Ready { generation, held, redoes, listen, why }))
    }

    fn run(&mut self, generation: u64, ids: &[MemberId]) -> &mut Story {
        for id in ids {
            self.on(*id, MemberEvent::Running { generation });
        }
        self
    }

    /// The generation that was formed last, if one was.
    fn formed(&self) -> Option<(&[MemberId], &Formation)> {
        self.decisions.iter().find_map(|decision| match &decision.action {
            MemberAction::Form { members, forms } => Some((&members[..], &forms[0])),
            _ => None,
        })
    }

    fn cancelled(&self) -> Option<(&[MemberId], &Reason)> {
        self.decisions.iter().find_map(|decision| match &decision.action {
            MemberAction::Cancel { members, .. } => Some((&members[..], &decision.why)),
            _ => None,
        })
    }
}

/// Three ranks of generation 1.
fn three(watched: bool) -> Story {
    let mut story = Story::new(1, 4, 3);
    story.enter(1, watched).enter(2, watched);
    assert!(story.formed().is_none(), "the third is waited for");
    story.enter(3, watched);
    let (members, form) = story.formed().expect("all are there");
    assert_eq!((members, form.source, form.master.as_str()), (&[1, 2, 3][..], None, "at 1"));
    story.run(1, &[1, 2, 3]);
    assert!(story.coordinator.trains());
    story
}

#[test]
fn the_others_go_on_when_a_rank_has_ended() {
    let mut story = three(true);
    story.on(2, MemberEvent::Closed);
    assert_eq!(story.cancelled(), Some((&[1, 3][..], &Reason::Closed(2))));
    story.ready(1, 1, Some(20)).ready(3, 1, Some(22));
    assert!(story.formed().is_none(), "the dead one was not seen dead yet");
    story.on(2, MemberEvent::Exited);
    let (members, form) = story.formed().expect("it is dead");
    assert_eq!((members, form.generation, form.source), (&[1, 3][..], 2, Some(1)));
    assert_eq!(form.held, [Some(20), Some(22)]);
    story.now += Duration::from_millis(40);
    story.run(2, &[1, 3]);
    assert_eq!((story.coordinator.tally.ranks_lost, story.coordinator.tally.stalls.len()), (1, 1));
}

/// Memory is shared by the ranks of a generation that are all on the coordinator's host, and one of those that is lost is seen dead before
/// the others form the next one, whoever started it.
#[test]
fn ranks_share_memory_while_all_are_here() {
    let mut story = Story::new(1, 4, 2);
    story.coordinator = Coordinator::new(Rules { start: 2, max: 4, memory: MemoryUse::IfAllHere, ..RULES });
    for id in [1, 2] {
        story.on(id, MemberEvent::Entered { watched: id == 1, was: None }).on(id, MemberEvent::Here);
        story.ready(id, 0, None);
    }
    assert!(story.formed().expect("both are there").1.memory);
    assert_eq!(story.coordinator.shares_memory(), Some(true));
    story.run(1, &[1, 2]);
    // One of another host.
    story.enter(3, false).ready(1, 1, Some(5)).ready(2, 1, Some(5));
    assert!(!story.formed().expect("it joins").1.memory);
    story.run(2, &[1, 2, 3]).on(3, MemberEvent::Closed).ready(1, 2, Some(9)).ready(2, 2, Some(9));
    assert!(story.formed().expect("it has gone").1.memory);
    story.run(3, &[1, 2]).on(2, MemberEvent::Closed).ready(1, 3, Some(11));
    assert!(story.formed().is_none(), "no child, and not seen dead yet");
    story.on(2, MemberEvent::Exited);
    assert!(story.formed().is_some());
}

#[test]
fn rank_0_has_a_successor() {
    let mut story = three(true);
    story.on(1, MemberEvent::Exited).ready(3, 1, Some(8)).ready(2, 1, Some(8));
    let (members, form) = story.formed().expect("both are ready");
    assert_eq!((members, form.master.as_str(), form.source), (&[2, 3][..], "at 2", Some(0)));
}

#[test]
fn a_member_joins_at_the_end_of_a_step_and_not_beyond_max() {
    let mut story = three(true);
    story.enter(4, false);
    assert!(
        matches!(&story.decisions[0].action, MemberAction::Change { members, .. } if members == &[1, 2, 3])
    );
    assert_eq!(story.decisions[0].why, Reason::Joins(1));
    story.ready(1, 1, Some(5)).ready(2, 1, Some(5)).ready(3, 1, Some(5));
    let (members, form) = story.formed().expect("all have stopped");
    assert_eq!((members, form.source, form.held[3]), (&[1, 2, 3, 4][..], Some(0), None));
    story.run(2, &[1, 2, 3, 4]);
    assert_eq!(story.coordinator.tally.ranks_joined, 1);
    // A spare one waits until there is room.
    story.enter(5, false);
    assert!(story.decisions.is_empty());
    story.on(4, MemberEvent::Closed).ready(1, 2, Some(9)).ready(2, 2, Some(9)).ready(3, 2, Some(9));
    assert_eq!(story.formed().expect("there is room").0, [1, 2, 3, 5]);
}

#[test]
fn silence_longer_than_patience_is_a_loss_and_a_shorter_one_is_not() {
    let mut story = three(false);
    story.now += PATIENCE - Duration::from_millis(1);
    assert!(story.coordinator.tick(story.now).is_empty());
    for id in [1, 2] {
        story.on(id, MemberEvent::Beat { step: 1 });
    }
    story.now += Duration::from_millis(1);
    story.decisions = story.coordinator.tick(story.now);
    assert_eq!(story.cancelled(), Some((&[1, 2][..], &Reason::Silent(3))));
    assert!(story.decisions.iter().any(|d| d.action == MemberAction::Remove { member: 3 }));
}

#[test]
fn below_min_the_state_is_saved_once_and_members_are_waited_for() {
    let mut story = Story::new(2, 4, 2);
    story.enter(1, true).enter(2, true).run(1, &[1, 2]).on(2, MemberEvent::Exited).ready(1, 1, Some(6));
    let (members, form) = story.formed().expect("a generation that saves");
    assert!(form.save_only && members == [1]);
    story.ready(1, 2, Some(6));
    assert_eq!(story.decisions[0].why, Reason::BelowMin { there: 1, min: 2 });
    story.enter(3, true);
    let (members, form) = story.formed().expect("there are enough again");
    assert!(!form.save_only && members == [1, 3] && form.source == Some(0));
}

/// What a generation was to save is saved again if it broke.
#[test]
fn a_save_that_broke_is_done_again() {
    let mut story = Story::new(3, 4, 3);
    story.enter(1, true).enter(2, true).enter(3, true).run(1, &[1, 2, 3]);
    story.on(3, MemberEvent::Exited).ready(1, 1, Some(6)).ready(2, 1, Some(6));
    assert!(story.formed().expect("it saves").1.save_only);
    story.breaks(1, 2, Some(6));
    assert_eq!(story.cancelled().expect("the other may not know").0, [2]);
    story.ready(2, 2, Some(6));
    assert!(story.formed().expect("it saves again").1.save_only);
    story.ready(1, 3, Some(6)).ready(2, 3, Some(6));
    assert_eq!(story.decisions[0].action, MemberAction::Wait);
}

/// A link that breaks while ranks are to change at the end of a step is known to one of them alone.
#[test]
fn a_generation_that_was_to_end_and_breaks_is_cancelled() {
    let mut story = three(true);
    story.enter(4, false);
    assert!(matches!(story.decisions[0].action, MemberAction::Change { .. }));
    story.breaks(2, 1, Some(4));
    assert_eq!(story.cancelled().expect("the others wait for it").0, [1, 3]);
}

/// Nobody leaves with a step that no other rank has.
#[test]
fn a_member_that_alone_has_the_last_step_leaves_later() {
    let mut story = three(true);
    story.on(2, MemberEvent::Leaves).on(3, MemberEvent::Exited);
    story.ready(1, 1, Some(4)).ready(2, 1, Some(6));
    let (members, form) = story.formed().expect("it hands over");
    assert_eq!((members, form.source), (&[1, 2][..], Some(1)));
    story.run(2, &[1, 2]);
    assert!(matches!(story.decisions[0].action, MemberAction::Change { .. }));
    story.ready(1, 2, Some(8)).ready(2, 2, Some(8));
    assert_eq!(story.decisions[0].action, MemberAction::Release { member: 2 });
    assert_eq!(story.formed().expect("one goes on").0, [1]);
}

/// If all leave, they save first.
#[test]
fn the_last_to_leave_save() {
    let mut story = three(true);
    story.on(1, MemberEvent::Leaves).on(2, MemberEvent::Leaves).on(3, MemberEvent::Leaves);
    story.ready(1, 1, Some(4)).ready(2, 1, Some(4)).ready(3, 1, Some(4));
    assert!(story.formed().expect("they save").1.save_only);
    story.ready(1, 2, Some(4)).ready(2, 2, Some(4)).ready(3, 2, Some(4));
    let released = |d: &&Decision| matches!(d.action, MemberAction::Release { .. });
    assert_eq!(story.decisions.iter().filter(released).count(), 3);
    assert_eq!(story.decisions[3].why, Reason::BelowMin { there: 0, min: 1 });
}

/// A process that was taken for dead comes back with its old state; that it was told to form a generation since does not make it true.
#[test]
fn a_state_counts_when_its_member_has_trained() {
    let mut story = three(false);
    story.on(3, MemberEvent::Closed).ready(1, 1, Some(4)).ready(2, 1, Some(4)).run(2, &[1, 2]);
    story.on(9, MemberEvent::Entered { watched: false, was: Some(3) }).ready(9, 0, Some(40));
    story.ready(1, 2, Some(6)).ready(2, 2, Some(6));
    assert_eq!(story.formed().expect("it joins").0, [1, 2, 9]);
    // Before it has the state of the others, one of them is lost.
    story.on(2, MemberEvent::Closed).ready(1, 3, Some(6)).ready(9, 3, Some(40));
    let (members, form) = story.formed().expect("two are left");
    assert_eq!((members, form.held.as_slice()), (&[1, 9][..], &[Some(6), None][..]));
}

/// Each time that training stands still, the user hears why, also if it is for the same reason as before.
#[test]
fn a_wait_for_the_same_reason_is_told_again() {
    let mut story = Story::new(1, 4, 1);
    for (id, generation) in [(1, 1), (2, 2)] {
        story.enter(id, false).run(generation, &[id]);
        story.now += PATIENCE;
        story.decisions = story.coordinator.tick(story.now);
        let waits = story.decisions.iter().find(|d| d.action == MemberAction::Wait);
        assert_eq!(waits.expect("it is told").why, Reason::NoMajority { there: 0, of: 1 });
        story.on(id, MemberEvent::Closed);
    }
}

/// Ranks that fell silent may be alive: half of the generation has to be here. What hosts report does not count.
#[test]
fn the_smaller_part_of_a_generation_waits() {
    let mut story = three(false);
    story.now += PATIENCE;
    story.on(1, MemberEvent::Beat { step: 2 });
    story.decisions = story.coordinator.tick(story.now);
    story.ready(1, 1, Some(4));
    assert_eq!(story.decisions[0].why, Reason::NoMajority { there: 1, of: 3 });
    // One comes back, as a new member: its state is worth nothing.
    story.on(9, MemberEvent::Entered { watched: false, was: Some(3) });
    assert_eq!(story.formed().expect("one of two").0, [1]);
    story.run(2, &[1]).ready(9, 0, Some(40));
    assert_eq!(story.decisions[0].why, Reason::Joins(1));
    story.ready(1, 2, Some(6));
    let (members, form) = story.formed().expect("it joins");
    assert_eq!((members, form.held.as_slice()), (&[1, 9][..], &[Some(6), None][..]));
    let mut story = three(false);
    story.on(2, MemberEvent::Closed).on(3, MemberEvent::Closed).ready(1, 1, Some(4));
    assert_eq!(story.formed().expect("their ends were reported").0, [1]);
}

#[test]
fn a_member_that_wants_to_leave_is_let_go_at_the_end_of_a_step() {
    let mut story = three(true);
    story.on(2, MemberEvent::Leaves);
    assert!(matches!(story.decisions[0].action, MemberAction::Change { .. }));
    story.ready(1, 1, Some(4)).ready(2, 1, Some(4)).ready(3, 1, Some(4));
    assert_eq!(story.decisions[0].action, MemberAction::Release { member: 2 });
    assert_eq!(story.formed().expect("the others go on").0, [1, 3]);
    assert_eq!(story.coordinator.tally.ranks_lost, 0);
}

#[test]
fn a_group_that_breaks_again_and_again_without_a_loss_ends_the_run() {
    let mut story = Story::new(1, 4, 2);
    story.enter(1, true).enter(2, true);
    for generation in 1..=11 {
        story.breaks(1, generation, None);
        if story.coordinator.is_over() {
            assert_eq!(generation, 11);
            assert!(story.decisions.iter().any(|d| d.why == Reason::Fruitless("it broke".into())));
            return;
        }
        story.breaks(2, generation, None);
        assert!(story.formed().is_some(), "{generation}");
    }
    panic!("it goes on for ever");
}

/// A coordinator whose predecessor was in a rank's process knows that this rank is lost as soon as it knows of the run, and ranks that
/// come back later are told.
#[test]
fn a_rank_that_coordinated_is_lost_with_its_process() {
    let mut story = Story::new(1, 4, 3);
    story.coordinator.succeeds(Some(1));
    let returned = |n: u64| {
        let (ranks, tally) = (vec![1, 2, 3], TallySummary::default());
        (n, MemberEvent::Returned(Returned { generation: 5, ranks, running: true, trained: true, tally }))
    };
    for (id, event) in [returned(2), returned(3)] {
        story.on(id, event);
        let (told, why) = story.cancelled().expect("it is cancelled");
        assert!(told.contains(&id) && *why == Reason::Exited(1), "{told:?}: {why:?}");
    }
    story.ready(2, 5, Some(8)).ready(3, 5, Some(8));
    assert_eq!(story.formed().expect("the others go on").0, [2, 3]);
    assert_eq!(story.coordinator.tally.ranks_lost, 1);
}

/// A store says which generation was the last, and that no other coordinator forms the next: one rank of three goes on.
#[test]
fn with_a_store_no_majority_is_asked_for() {
    for (exclusive, goes_on) in [(true, Some((vec![2], 6))), (false, None)] {
        let mut story = Story::new(1, 3, 3);
        story.coordinator = Coordinator::new(Rules { exclusive, ..RULES });
        story.coordinator.goes_on(story.now, &GenerationRecord { generation: 5, ranks: vec![1, 2, 3] });
        story.now += PATIENCE / 2;
        let (ranks, tally) = (vec![1, 2, 3], TallySummary { ranks_lost: 4, ..TallySummary::default() });
        let returned = Returned { generation: 5, ranks, running: true, trained: true, tally };
        story.on(2, MemberEvent::Returned(returned));
        assert_eq!((story.coordinator.generation(), &story.decisions[..]), ((5, vec![1, 2, 3]), &[][..]));
        story.breaks(2, 5, Some(8));
        story.now += PATIENCE / 2;
        story.decisions = story.coordinator.tick(story.now);
        let formed = story.formed().map(|(members, form)| (members.to_vec(), form.generation));
        assert_eq!(formed, goes_on);
        assert_eq!(story.coordinator.tally.ranks_lost, 6);
    }
}

/// A rank that was recorded and has not come back has not said which state it has: nothing else is heard of it until then.
#[test]
fn a_recorded_rank_counts_when_it_has_come_back() {
    let mut story = Story::new(1, 3, 3);
    story.coordinator = Coordinator::new(Rules { exclusive: true, ..RULES });
    story.coordinator.goes_on(story.now, &GenerationRecord { generation: 5, ranks: vec![1] });
    story.breaks(1, 5, Some(8));
    assert!(story.formed().is_none(), "it would begin anew");
    let (ranks, tally) = (vec![1], TallySummary::default());
    let returned = Returned { generation: 5, ranks, running: false, trained: true, tally };
    story.on(1, MemberEvent::Returned(returned)).breaks(1, 5, Some(8));
    assert_eq!(story.formed().expect("it goes on").1.held, [Some(8)]);
}

/// The coordinator was lost after it had recorded a generation and before it told its ranks of it: that one is never begun.
#[test]
fn a_recorded_generation_that_no_rank_was_told_of_is_not_begun() {
    let mut story = Story::new(1, 3, 3);
    story.coordinator = Coordinator::new(Rules { exclusive: true, ..RULES });
    story.coordinator.goes_on(story.now, &GenerationRecord { generation: 6, ranks: vec![1, 2] });
    for id in [1, 2] {
        let (ranks, tally) = (vec![1, 2, 3], TallySummary::default());
        let returned = Returned { generation: 5, ranks, running: false, trained: true, tally };
        story.on(id, MemberEvent::Returned(returned)).ready(id, 5, Some(8));
    }
    let (members, form) = story.formed().expect("the next one is formed");
    assert_eq!((members, form.generation, form.source), (&[1, 2][..], 7, Some(0)));
}

#[test]
fn one_that_is_done_ends_the_run() {
    let mut story = three(true);
    story.on(1, MemberEvent::Done { generation: 1 });
    assert_eq!(story.decisions[0].action, MemberAction::End { finished: true });
    assert!(story.on(1, MemberEvent::Exited).decisions.is_empty());
    assert!(story.on(2, MemberEvent::Closed).cancelled().is_none());
}

/// A rank that is done closes its connection while it still writes what it has to say: it is not killed for it, and neither is one
/// that was told of the end.
#[test]
fn who_is_done_ends_by_itself() {
    let mut story = three(true);
    story.on(2, MemberEvent::Done { generation: 1 }).on(2, MemberEvent::Closed);
    assert_eq!(story.decisions, []);
    story.on(0, MemberEvent::Closed);
    assert_eq!(story.decisions, []);
}

/// How many messages go to and fro from the loss of one of `n` ranks until the others train again.
fn messages_after_a_loss(n: u64) -> usize {
    let mut story = Story::new(1, n as usize, n as usize);
    for id in 1..=n {
        story.enter(id, false);
    }
    story.run(1, &(1..=n).collect::<Vec<_>>());
    assert!(story.coordinator.trains());
    let mut messages = 0;
    let told = |story: &Story| -> usize {
        let members = |decision: &Decision| match &decision.action {
            MemberAction::Form { members, .. }
            | MemberAction::Cancel { members, .. }
            | MemberAction::Change { members, .. } => members.len(),
            MemberAction::Remove { .. } | MemberAction::Dismiss { .. } | MemberAction::Release { .. } => 1,
            MemberAction::Wait | MemberAction::Trains | MemberAction::End { .. } => 0,
        };
        story.decisions.iter().map(members).sum()
    };
    story.on(n, MemberEvent::Closed);
    messages += told(&story);
    for id in 1..n {
        story.ready(id, 1, Some(8));
        messages += 1 + told(&story);
    }
    assert_eq!(story.formed().expect("the others form a group").0.len() as u64, n - 1);
    for id in 1..n {
        story.on(id, MemberEvent::Running { generation: 2 });
        messages += 1 + told(&story);
    }
    assert!(story.coordinator.trains());
    messages
}

#[test]
fn as_many_messages_for_each_rank_however_many_there_are() {
    let each = |n: u64| messages_after_a_loss(n) as f64 / n as f64;
    let (few, many) = (each(8), each(512));
    assert!(
        few > 2.0 && many < 4.1 && many < few * 1.2,
        "{few} messages for each of 8 ranks, {many} for each of 512"
    );
}
