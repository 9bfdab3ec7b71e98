//! Differences: every collective over every transport, element type, reducer and length against one oracle, with ranks that
//! may run on different cores.
//!
//! The oracle folds plain numbers in the order of the ranks ([`whole`]). The numbers are small and whole, so that sums
//! are exact in every type and every order, and what comes back is compared with `==`. A rank runs all rows ([`rows`])
//! in a group ([`groups`]) and returns what was wrong, in words; a report of the group counts as wrong too.
//!
//! # Layout
//! [`whole`]: numbers, and the oracle. [`rows`]: what is run and compared. [`messages`]: those that are started. [`meshes`]: the same in
//! groups of some ranks. [`mailboxes`]: letters between any two. [`groups`]: ranks as threads, as processes that
//! share memory, over sockets, on two levels.

mod groups;
mod mailboxes;
mod meshes;
mod messages;
mod rows;
mod whole;

use groups::{Cores, Play, TestTransport};
use rows::PlantedBug;

use crate::comm::Comm;
use crate::work::{Span, Work};

const RANKS: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// With equal cores: with and without a core for each rank. Everything else is as with unequal ones.
const EQUAL_RANKS: [usize; 2] = [2, 4];

/// What the ranks of a group found wrong.
fn wrong(transport: TestTransport, ranks: usize, cores: Cores, fault: PlantedBug) -> Vec<String> {
    groups::run(transport, ranks, cores, &Play::Rows(fault)).into_iter().filter_map(Result::err).collect()
}

fn all_are_right(transport: TestTransport) {
    let equal = EQUAL_RANKS.map(|ranks| (ranks, Cores::Equal));
    for (ranks, cores) in equal.into_iter().chain(RANKS.map(|ranks| (ranks, Cores::Unequal))) {
        let wrong = wrong(transport, ranks, cores, PlantedBug::None);
        assert!(wrong.is_empty(), "{transport:?}, {ranks} ranks, {cores:?} cores: {wrong:#?}");
    }
}

#[test]
fn sums_of_threads_are_right_whatever_the_cores() {
    all_are_right(TestTransport::Threads);
}

#[test]
fn sums_of_processes_are_right_whatever_the_cores() {
    all_are_right(TestTransport::Processes);
}

#[test]
fn sums_over_sockets_are_right_whatever_the_cores() {
    all_are_right(TestTransport::Sockets);
}

#[test]
fn sums_on_two_levels_are_right_whatever_the_cores() {
    all_are_right(TestTransport::TwoLevels);
}

/// Ranks that choose algorithms by their own cores without agreeing on it get wrong sums; the rows find that.
#[test]
fn the_rows_find_ranks_that_go_different_ways() {
    for transport in [TestTransport::Threads, TestTransport::Processes] {
        let wrong = wrong(transport, 2, Cores::Unequal, PlantedBug::SecretWays);
        assert!(wrong.iter().any(|what| what.contains("all-reduce")), "{transport:?}: {wrong:#?}");
    }
}

/// If ranks do not agree after all, the first call ends on all of them with one report.
#[test]
fn ranks_that_count_on_different_cores_say_so_before_they_sum() {
    for transport in [TestTransport::Threads, TestTransport::Processes] {
        let wrong = wrong(transport, 3, Cores::Equal, PlantedBug::OpenWays);
        assert_eq!(wrong.len(), 3, "{transport:?}: {wrong:#?}");
        for what in wrong {
            let expected =
                "rank 0 disagrees with the others: it counts on a core for each rank and the others do not";
            assert!(what.contains(expected), "{transport:?}: {what}");
        }
    }
}

/// The oracle sees a single element that is wrong on a single rank, over any transport.
#[test]
fn the_rows_find_one_wrong_element() {
    for transport in [TestTransport::Threads, TestTransport::Sockets, TestTransport::TwoLevels] {
        let wrong = wrong(transport, 3, Cores::Equal, PlantedBug::OneElement);
        assert!(wrong.iter().any(|what| what.contains("at rank 2")), "{transport:?}: {wrong:#?}");
    }
}

const TRANSPORTS: [TestTransport; 4] =
    [TestTransport::Threads, TestTransport::Processes, TestTransport::Sockets, TestTransport::TwoLevels];

fn right_on_meshes(transport: TestTransport) {
    for sizes in [vec![2, 2], vec![2, 3], vec![2, 2, 2]] {
        let (ranks, play) = (sizes.iter().product(), Play::Mesh(sizes.clone()));
        let said = groups::run(transport, ranks, Cores::Equal, &play);
        let wrong: Vec<_> = said.into_iter().filter_map(Result::err).collect();
        assert!(wrong.is_empty(), "{transport:?}, mesh {sizes:?}: {wrong:#?}");
    }
}

#[test]
fn threads_on_meshes_are_right() {
    right_on_meshes(TestTransport::Threads);
}

#[test]
fn processes_on_meshes_are_right() {
    right_on_meshes(TestTransport::Processes);
}

#[test]
fn sockets_on_meshes_are_right() {
    right_on_meshes(TestTransport::Sockets);
}

#[test]
fn two_levels_on_meshes_are_right() {
    right_on_meshes(TestTransport::TwoLevels);
}

#[test]
fn joined_ranks_on_meshes_are_right() {
    right_on_meshes(TestTransport::Joined);
}

/// A rank that waits for a lost one in a group reports its number in the job, and the step and operation.
#[test]
fn a_rank_that_is_lost_in_a_group_is_named_as_in_the_job() {
    for transport in TRANSPORTS {
        for play in [Play::LostRank(vec![2, 2]), Play::LostSender(vec![2, 2])] {
            let said = groups::run(transport, 4, Cores::Equal, &play);
            let wrong: Vec<_> = said.into_iter().filter_map(Result::err).collect();
            assert!(wrong.is_empty(), "{transport:?}, {play:?}: {wrong:#?}");
        }
    }
}

/// Letters from any rank in any order, whatever carries the collectives; in groups of one too.
#[test]
fn mailboxes_are_made_over_every_transport() {
    for transport in TRANSPORTS.into_iter().chain([TestTransport::Joined]) {
        for ranks in [1, 2, 3, 5] {
            let said = groups::run(transport, ranks, Cores::Equal, &Play::Mailboxes);
            let wrong: Vec<_> = said.into_iter().filter_map(Result::err).collect();
            assert!(wrong.is_empty(), "{transport:?}, {ranks} ranks: {wrong:#?}");
        }
    }
}

/// A rank that waits at a mailbox, of any group, reports the lost rank by its number in the job.
#[test]
fn a_rank_that_is_lost_ends_waits_at_every_mailbox() {
    for transport in TRANSPORTS.into_iter().chain([TestTransport::Joined]) {
        for lost in [0, 3] {
            let said = groups::run(transport, 4, Cores::Equal, &Play::LostMember(lost));
            let wrong: Vec<_> = said.into_iter().filter_map(Result::err).collect();
            assert!(wrong.is_empty(), "{transport:?}, rank {lost}: {wrong:#?}");
        }
    }
}

/// A message of another length or type than expected is an error that says so, whichever side came first.
#[test]
fn messages_that_do_not_fit_are_reported() {
    for (late, count) in [(true, 3), (false, 3), (true, 4), (false, 4)] {
        let mut ends = Comm::local(2);
        let (mut receiver, mut sender) = (ends.remove(0), ends.remove(0));
        let (mut sent, mut got) = (vec![1i32; count], vec![0.0f32; 4]);
        let send = Work::Send { to: 0, tag: 5, span: Span::of(&mut sent) };
        let receive = Work::Receive { from: 1, tag: 5, span: Span::of(&mut got) };
        // SAFETY: the data outlive both ends.
        let ticket = unsafe {
            if late {
                sender.start(send);
                receiver.start(receive)
            } else {
                let ticket = receiver.start(receive);
                sender.start(send);
                ticket
            }
        };
        let report = receiver.wait(ticket).unwrap_err().to_string();
        let expected =
            format!("rank 1 disagrees with the others: it sends {} bytes of i32 and 16 of f32", 4 * count);
        assert!(report.contains(&expected), "{report}");
        assert_eq!(got, [0.0; 4], "nothing was written");
    }
}

/// A rank of [`TestTransport::Processes`]: this binary, started again.
#[test]
fn one_rank() {
    groups::rank_of_processes();
}
