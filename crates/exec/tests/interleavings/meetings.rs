//! Ranks that share memory, through the public API: messages, which rank may touch whose memory, and what holds
//! when the group fails.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use polyreme_collective::{Cause, Comm, Reduce, Report, Span, Work};
use polyreme_net::Alarm;
use polyreme_sync::model::{Faults, SOUND, check};
use polyreme_sync::thread;

use super::{LATE, UNORDERED, found};

/// Runs this on every rank of a group. Communicators are not dropped after a failure, when the threads of the others are gone.
fn on_all<R: Send + 'static>(ends: Vec<Comm>, run: fn(&mut Comm) -> R) -> Vec<R> {
    let rank = |comm: Comm| {
        thread::spawn(move || {
            let mut comm = ManuallyDrop::new(comm);
            let result = run(&mut comm);
            drop(ManuallyDrop::into_inner(comm));
            result
        })
    };
    let ranks: Vec<_> = ends.into_iter().map(rank).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Meetings, sums in place and over staging areas, and operations that are started first and awaited later.
fn ranks_meet() {
    on_all(Comm::local(2), |comm| {
        let rank = comm.rank();
        comm.barrier().unwrap();
        let mut one = [rank as i32 + 1; 3];
        comm.all_reduce(&mut one, Reduce::Sum).unwrap();
        assert_eq!(one, [3; 3]);
        let mut shared = [rank as u8; 2];
        comm.broadcast(&mut shared, 1).unwrap();
        assert_eq!(shared, [1; 2]);
        let (mut a, mut b) = ([rank as f32; 2], [10.0f32; 2000]);
        // SAFETY: both live until the last operation has been awaited.
        unsafe { comm.start(Work::AllReduce(Span::of(&mut a), Reduce::Max)) };
        // SAFETY: as above.
        let last = unsafe { comm.start(Work::AllReduce(Span::of(&mut b), Reduce::Sum)) };
        comm.wait(last).unwrap();
        assert!(a == [1.0; 2] && b.iter().all(|x| *x == 20.0));
        comm.barrier().unwrap();
    });
}

/// A message waits for its receiver; the receiver may come first or last.
fn ranks_send() {
    on_all(Comm::local(2), |comm| {
        let (rank, mut got) = (comm.rank(), [0u8; 100]);
        if rank == 0 {
            comm.send(1, &[7u8; 100]).unwrap();
            comm.recv(1, &mut got).unwrap();
        } else {
            comm.recv(0, &mut got).unwrap();
            comm.send(0, &[7u8; 100]).unwrap();
        }
        assert_eq!(got, [7; 100]);
    });
}

/// A rank of a group that fails: it starts a sum, does something else, and waits. A rank that has got its report has its
/// memory back too, and reuses it.
fn sums(comm: Comm, kept: &RankSums, meanwhile: fn(&mut Comm)) -> Result<(), Report> {
    let mut comm = ManuallyDrop::new(comm);
    let mut data = vec![1.0f32; LENGTH];
    // SAFETY: the data live until the operation has been awaited.
    let ticket = unsafe { comm.start(Work::AllReduce(Span::of(&mut data), Reduce::Sum)) };
    meanwhile(&mut comm);
    let end = comm.wait(ticket);
    if end.is_err() {
        data.fill(-1.0);
    }
    // Freed when all is over: a fault should fail the test, not crash it.
    kept.lock().unwrap().push((end.is_ok(), data));
    drop(ManuallyDrop::into_inner(comm));
    end
}

/// Longer than what counts as a short message.
const LENGTH: usize = 1100;

/// The memory of the ranks, and whether the sum succeeded.
type RankSums = Arc<Mutex<Vec<(bool, Vec<f32>)>>>;

fn look_at(kept: &RankSums) {
    for (well, data) in kept.lock().unwrap().iter() {
        let want = if *well { 2.0 } else { -1.0 };
        let what = if *well {
            "a sum that succeeds is right"
        } else {
            "no rank touches memory of one that has given up"
        };
        assert!(data.iter().all(|x| *x == want), "{what}");
    }
}

/// An alarm ends the group while its ranks write to each other's memory.
fn a_group_fails() {
    let (alarm, kept) = (Alarm::default(), RankSums::default());
    let rank = |comm: Comm| {
        let kept = kept.clone();
        thread::spawn(move || sums(comm, &kept, |_| ()))
    };
    let ranks: Vec<_> = Comm::threads(2, &alarm, Duration::from_secs(60)).into_iter().map(rank).collect();
    let cause = Cause::Failed { why: "enough".into() };
    let report = Report { rank: 9, host: "there".into(), step: 3, op: "x".into(), cause };
    thread::yield_now();
    alarm.raise(report.clone());
    for end in ranks.into_iter().map(|rank| rank.join().unwrap()) {
        assert!(end.is_ok() || end == Err(report.clone()), "one report: {end:?}");
    }
    look_at(&kept);
}

/// A rank fails with an operation in flight, which the other one is about to do or is doing.
fn a_rank_fails() {
    let kept = RankSums::default();
    let rank = |comm: Comm| {
        let kept = kept.clone();
        let fails = |comm: &mut Comm| {
            if comm.rank() == 0 {
                // Later, so that the other one gets to touch the memory.
                thread::yield_now();
                comm.fail("no");
            }
        };
        thread::spawn(move || sums(comm, &kept, fails))
    };
    let ranks: Vec<_> = Comm::local(2).into_iter().map(rank).collect();
    let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    look_at(&kept);
    let same = |end: &Result<(), Report>| end.as_ref().is_err_and(|report| report.rank == 0);
    assert!(ends.iter().all(same), "one report, of the rank that failed: {ends:?}");
}

/// With timeouts: an alarm of this process wakes no rank, and is seen when a sleeper times out.
const WITH_LIMITS: Faults = Faults { waits_end: true, ..SOUND };

#[test]
fn ranks_that_meet_agree_and_none_sleeps_on() {
    check(1_000, SOUND, ranks_meet);
    check(1_000, SOUND, ranks_send);
}

#[test]
fn memory_of_a_rank_that_gives_up_is_its_own() {
    check(1_000, WITH_LIMITS, a_group_fails);
    check(1_000, WITH_LIMITS, a_rank_fails);
}

/// The description of an operation arrives after the flag that says that it is there.
#[test]
fn an_operation_that_is_posted_before_it_is_written_is_found() {
    let said = found(UNORDERED, ranks_meet);
    assert!(said.contains("Disagrees") || said.contains("deadlock"), "{said}");
}

/// `busy` arrives after the check of the notice.
#[test]
fn a_rank_that_says_too_late_that_it_touches_is_found() {
    let said = found(Faults { waits_end: true, ..LATE }, a_rank_fails);
    assert!(said.contains("no rank touches memory"), "{said}");
}
