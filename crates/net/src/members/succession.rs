//! Who coordinates after the coordinator's process is lost: a rank.
//!
//! # Without a store
//! It is a rank of the same host. An address of a host can be listened at by one process. So the rule needs no votes: whoever can bind the address of the coordinator
//! that was lost is its successor, and all members knock there anyway. Only ranks of the same host can, and while the old
//! process lives, paused or cut off, nobody can. Ranks try in the order of their numbers, a moment apart, so that it is mostly the
//! first of those that are left.
//!
//! The successor is a thread of a rank's process, and learns from whoever comes back where the run stands (`coordinator/returning.rs`).
//! If that process is lost, its rank is lost with the coordinator that would have noticed; but whoever binds the address next knows by
//! that: the process has ended.
//!
//! # With a store
//! It is any rank, at an address of its own: the one that gets the post (`store.rs`), which is free when the coordinator did not renew it for
//! as long as patience, or when the system at its address says that nothing listens there any more. The coordinator may be alive
//! in spite of that. It cannot form a generation without the post, and ends when it learns that it has it no longer: so the rank
//! in its process counts as lost here too.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::message::{MemberId, MemoryUse};
use super::store::{Begins, CoordinatorPlace, Post, take_post};
use super::tenure::Tenure;

/// How long a rank waits for each rank before it to be the successor.
const TURN: Duration = Duration::from_millis(20);
/// Later ranks than this one do not wait for longer.
const TURNS_MAX: usize = 32;

/// What a member does to become the coordinator.
pub type OpenOffice = Arc<dyn Fn(Vacancy) -> io::Result<()> + Send + Sync>;

/// The place of a coordinator that was lost.
pub struct Vacancy {
    /// Where the next one listens, bound by this process.
    pub listener: TcpListener,
    /// Its post in the store, if there is one.
    pub tenure: Option<Tenure>,
    /// The member whose process takes it.
    pub own: MemberId,
    /// The member whose process had it, if it was one: it has ended.
    pub ended: Option<MemberId>,
    /// Whether ranks may share memory, as the last one said.
    pub memory: MemoryUse,
}

/// Takes the place of a coordinator that was lost `since` then, if it is this member's turn and the place is free. `before` is how
/// many ranks come before it, `runs_on` the member whose process had it, `memory` whether ranks may share memory.
pub(super) fn take(
    place: &CoordinatorPlace,
    since: Instant,
    before: usize,
    (own, local): (MemberId, IpAddr),
    (runs_on, memory): (Option<MemberId>, MemoryUse),
) -> Option<Vacancy> {
    if since.elapsed() < TURN * before.min(TURNS_MAX) as u32 {
        return None;
    }
    let not_own = |member: &MemberId| *member != own;
    match place {
        CoordinatorPlace::At(at) => {
            let addrs: Vec<SocketAddr> = at.to_socket_addrs().map_or_else(|_| Vec::new(), Iterator::collect);
            // It fails on other hosts, and where another rank has become the successor.
            let listener = addrs.into_iter().find_map(|addr| TcpListener::bind(addr).ok())?;
            Some(Vacancy { listener, tenure: None, own, ended: runs_on.filter(not_own), memory })
        }
        CoordinatorPlace::InStore(store) => {
            let listener = TcpListener::bind((local, 0)).ok()?;
            // If the store cannot be asked, or the post is not free, it is tried again.
            let (term, had) = take_post(&**store, &listener, Some(own), Begins::GoesOn).ok()?.ok()?;
            let post = Post { at: listener.local_addr().ok()?.to_string(), member: Some(own) };
            let tenure = Some(Tenure::hold(store.clone(), post, term).ok()?);
            let ended = had.map_or(runs_on, |post| post.member).filter(not_own);
            Some(Vacancy { listener, tenure, own, ended, memory })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_can_take_an_address_when_it_is_free_and_its_turn_has_come() {
        let old = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = CoordinatorPlace::At(old.local_addr().unwrap().to_string());
        let take = |at: &CoordinatorPlace, since, before| {
            take(at, since, before, (3, [127, 0, 0, 1].into()), (Some(2), MemoryUse::IfAllHere))
        };
        let long_ago = Instant::now() - Duration::from_secs(1);
        assert!(take(&at, long_ago, 0).is_none(), "its coordinator lives");
        drop(old);
        assert!(take(&at, Instant::now() + Duration::from_secs(1), 1).is_none(), "not its turn");
        let taken = take(&at, long_ago, 3).expect("it is free");
        assert_eq!((taken.ended, taken.memory), (Some(2), MemoryUse::IfAllHere));
        assert!(take(&at, long_ago, 0).is_none(), "another one has it");
        drop(taken);
        // An address of documentation, which no host has.
        assert!(take(&CoordinatorPlace::At("192.0.2.1:7".into()), long_ago, 0).is_none());
    }
}
