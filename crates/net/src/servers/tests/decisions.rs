//! What servers and leases decide, event by event.

use std::time::{Duration, Instant};

use super::super::*;

type SaidEvent = ServerEvent<&'static str>;
type SaidAction = ServerAction<&'static str>;

fn id(worker: usize) -> WorkerId {
    WorkerId { worker, session: 1 }
}

fn push(worker: usize, clock: u64, block: u64, gradient: &'static str) -> SaidEvent {
    ServerEvent::Push { from: id(worker), clock, block, range: 0, gradient }
}

fn pull(worker: usize, clock: u64) -> SaidEvent {
    ServerEvent::Pull { from: id(worker), clock, range: 0 }
}

/// In short: `+a` is applied, `>1` is answered, `!1` is refused.
fn short(actions: Vec<SaidAction>) -> String {
    let words = actions.into_iter().map(|action| match action {
        ServerAction::Apply { gradients, staleness: 0, .. } => format!("+{}", gradients.join("&")),
        ServerAction::Apply { gradients, staleness, .. } => format!("+{}~{staleness}", gradients.join("&")),
        ServerAction::Answer { to, version, .. } => format!(">{}v{version}", to.worker),
        ServerAction::Refuse { to, why } => format!("!{}: {why}", to.worker),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn check(discipline: Discipline, rows: Vec<(SaidEvent, &str)>) {
    let mut server = ParamServer::new(discipline, 1, 0);
    for worker in 0..2 {
        assert_eq!(short(server.step(ServerEvent::Join { id: id(worker), clock: None })), "");
    }
    for (at, (event, want)) in rows.into_iter().enumerate() {
        assert_eq!(short(server.step(event)), want, "{discipline:?}, event {at}");
    }
}

#[test]
fn pulls_are_answered_as_the_discipline_says() {
    check(
        Discipline::Free,
        vec![
            (push(0, 0, 0, "a"), "+a"),
            (pull(0, 1), ">0v1"),
            (push(0, 1, 2, "c"), "+c"),
            (push(1, 0, 1, "b"), "+b~2"),
            (pull(1, 1), ">1v3"),
        ],
    );
    check(
        Discipline::Bounded { staleness: 1 },
        vec![
            (push(0, 0, 0, "a"), "+a"),
            (pull(0, 1), ">0v1"),
            (push(0, 1, 2, "c"), "+c"),
            (pull(0, 2), ""),
            (push(1, 0, 1, "b"), "+b~2 >0v3"),
            (pull(1, 1), ">1v3"),
        ],
    );
    check(
        Discipline::Lockstep { workers: 2 },
        vec![
            (push(1, 0, 0, "b"), ""),
            (pull(1, 1), ""),
            (push(0, 0, 0, "a"), "+a&b >1v1"),
            (pull(0, 1), ">0v1"),
        ],
    );
}

#[test]
fn a_push_that_comes_twice_counts_once() {
    check(
        Discipline::Free,
        vec![
            (push(0, 0, 5, "a"), "+a"),
            (push(0, 0, 5, "a"), "!0: block 5 is applied already"),
            // Another worker had the same block; its clock goes on.
            (push(1, 0, 5, "a"), "!1: block 5 is applied already"),
            (pull(1, 1), ">1v1"),
        ],
    );
    check(
        Discipline::Lockstep { workers: 2 },
        vec![
            (push(0, 0, 0, "a"), ""),
            (push(0, 0, 0, "x"), ""),
            (push(1, 0, 0, "b"), "+a&b"),
            (push(1, 0, 0, "b"), "!1: block 0 is applied already"),
        ],
    );
}

#[test]
fn nothing_that_a_stranger_sends_changes_a_parameter() {
    let of = |worker, session| WorkerId { worker, session };
    check(
        Discipline::Free,
        vec![
            (push(7, 0, 0, "a"), "!7: it has not joined, or has left"),
            (pull(7, 0), "!7: it has not joined, or has left"),
            (ServerEvent::Pull { from: id(0), clock: 0, range: 3 }, "!0: there is no range 3 at this server"),
            (push(0, 1, 0, "a"), "!0: its pull at clock 1 is not answered"),
            (ServerEvent::Join { id: of(0, 2), clock: None }, ""),
            (push(0, 0, 0, "a"), "!0: it has not joined, or has left"),
        ],
    );
}

#[test]
fn who_leaves_is_not_waited_for() {
    check(
        Discipline::Bounded { staleness: 0 },
        vec![
            (push(0, 0, 0, "a"), "+a"),
            (pull(0, 1), ""),
            (ServerEvent::Leave(id(1)), ">0v1"),
            // What was on its way when it left.
            (ServerEvent::Join { id: id(1), clock: None }, ""),
            (push(1, 0, 1, "b"), "!1: it has not joined, or has left"),
        ],
    );
}

#[test]
fn who_joins_late_starts_with_the_slowest() {
    let mut server: ParamServer<()> = ParamServer::new(Discipline::Bounded { staleness: 0 }, 1, 0);
    server.step(ServerEvent::Join { id: id(0), clock: None });
    for clock in 0..5 {
        server.step(ServerEvent::Push { from: id(0), clock, block: clock, range: 0, gradient: () });
        server.step(ServerEvent::Pull { from: id(0), clock: clock + 1, range: 0 });
    }
    server.step(ServerEvent::Join { id: id(1), clock: None });
    assert_eq!(server.clocks(), [5, 5]);
}

#[test]
fn blocks_are_leased_once_and_come_back() {
    let (start, longest) = (Instant::now(), Duration::from_secs(1));
    let mut leases = Leases::new(10);
    let ask = |worker, number| LeaseEvent::Ask {
        worker,
        segment: 1,
        number,
        done: None,
        stop: false,
        watches: false,
    };
    let done = |worker, number, block| LeaseEvent::Ask {
        worker,
        segment: 1,
        number,
        done: Some(block),
        stop: false,
        watches: false,
    };
    let lease = |worker, number, block| LeaseAction::Lease { worker, number, block };
    // The segment has not begun.
    assert_eq!(leases.step(start, ask(0, 0)), []);
    assert_eq!(
        leases.step(start, LeaseEvent::Open { segment: 1, blocks: 10..13, longest }),
        [lease(0, 0, 10)]
    );
    assert_eq!(leases.step(start, ask(0, 0)), [lease(0, 0, 10)], "the same answer again");
    assert_eq!(leases.step(start, ask(1, 0)), [lease(1, 0, 11)]);
    assert_eq!(leases.step(start, done(0, 1, 10)), [lease(0, 1, 12)]);
    assert_eq!(leases.step(start, done(0, 2, 12)), [LeaseAction::Rest { worker: 0, number: 2 }]);
    assert_eq!(leases.step(start, LeaseEvent::Leave { worker: 1 }), [lease(0, 2, 11)]);
    assert_eq!(leases.step(start, ask(1, 1)), [], "it is gone");
    assert_eq!(leases.step(start, done(0, 3, 11)), [LeaseAction::Over { worker: 0, number: 3, end: 13 }]);
}

#[test]
fn a_segment_ends_after_its_time_or_on_a_wish() {
    let (start, longest) = (Instant::now(), Duration::from_secs(1));
    let open = |longest| LeaseEvent::Open { segment: 1, blocks: 0..100, longest };
    let ask = |number: u64, stop| {
        let done = number.checked_sub(1);
        LeaseEvent::Ask { worker: 0, segment: 1, number, done, stop, watches: false }
    };
    for (at, stop) in [(start + longest, false), (start, true)] {
        let mut leases = Leases::new(0);
        leases.step(start, open(longest));
        leases.step(start, ask(0, false));
        assert_eq!(leases.step(at, ask(1, stop)), [LeaseAction::Over { worker: 0, number: 1, end: 1 }]);
    }
    // Every segment gets on by a block, whatever is wished.
    let mut leases = Leases::new(0);
    leases.step(start, open(Duration::ZERO));
    assert_eq!(leases.step(start, ask(0, true)), [LeaseAction::Lease { worker: 0, number: 0, block: 0 }]);
}

#[test]
fn who_only_serves_hears_of_the_end_and_gets_no_block() {
    let (start, longest) = (Instant::now(), Duration::from_secs(1));
    let ask = |worker, number, done, stop| {
        let watches = worker == 0;
        LeaseEvent::Ask { worker, segment: 1, number, done, stop, watches }
    };
    let rest = |worker, number| LeaseAction::Rest { worker, number };
    let lease = |worker, number, block| LeaseAction::Lease { worker, number, block };
    let over = |worker, number, end| LeaseAction::Over { worker, number, end };
    let mut leases = Leases::new(0);
    assert_eq!(leases.step(start, ask(0, 0, None, false)), []);
    leases.step(start, LeaseEvent::Open { segment: 1, blocks: 0..9, longest });
    assert_eq!(leases.step(start, ask(0, 0, None, false)), [rest(0, 0)], "as when the segment began");
    assert_eq!(leases.step(start, ask(1, 0, None, false)), [lease(1, 0, 0)]);
    assert_eq!(leases.step(start, ask(1, 1, Some(0), false)), [lease(1, 1, 1)]);
    // It wishes an end: what is under way is finished.
    assert_eq!(leases.step(start, ask(0, 1, None, true)), [rest(0, 1)]);
    assert_eq!(leases.step(start, ask(1, 2, Some(1), false)), [over(0, 1, 2), over(1, 2, 2)]);
}
