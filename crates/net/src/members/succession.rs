//! Who coordinates after the coordinator's process is lost: a rank of its host.
//!
//! An address of a host can be listened at by one process. So the rule needs no votes: whoever can bind the address of the coordinator
//! that was lost is its successor, and all members knock there anyway. Only ranks of the same host can, and while the old
//! process lives, paused or cut off, nobody can. Ranks try in the order of their numbers, a moment apart, so that it is mostly the
//! first of those that are left.
//!
//! The successor is a thread of a rank's process, and learns from whoever comes back where the run stands (`coordinator/returning.rs`).
//! If that process is lost, its rank is lost with the coordinator that would have noticed; but whoever binds the address next knows by
//! that: the process has ended.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::message::MemberId;

/// How long a rank waits for each rank before it to be the successor.
const TURN: Duration = Duration::from_millis(20);
/// Later ranks than this one do not wait for longer.
const TURNS_MAX: usize = 32;

/// What a member does to become the coordinator.
pub type OpenOffice = Arc<dyn Fn(Vacancy) -> io::Result<()> + Send + Sync>;

/// The place of a coordinator that was lost.
#[derive(Debug)]
pub struct Vacancy {
    /// Its address, bound by this process.
    pub listener: TcpListener,
    /// The member whose process takes it.
    pub own: MemberId,
    /// The member whose process had it, if it was one: it has ended.
    pub ended: Option<MemberId>,
}

/// Takes the address of a coordinator that was lost `since` then, if it is this member's turn and the address is free. `before` is how
/// many ranks come before it.
pub(super) fn take(at: &str, since: Instant, before: usize) -> Option<TcpListener> {
    if since.elapsed() < TURN * before.min(TURNS_MAX) as u32 {
        return None;
    }
    let addrs: Vec<SocketAddr> = at.to_socket_addrs().map_or_else(|_| Vec::new(), Iterator::collect);
    // It fails on other hosts, and where another rank has become the successor.
    addrs.into_iter().find_map(|addr| TcpListener::bind(addr).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_can_take_an_address_when_it_is_free_and_its_turn_has_come() {
        let old = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = old.local_addr().unwrap().to_string();
        let long_ago = Instant::now() - Duration::from_secs(1);
        assert!(take(&at, long_ago, 0).is_none(), "its coordinator lives");
        drop(old);
        assert!(take(&at, Instant::now() + Duration::from_secs(1), 1).is_none(), "not its turn");
        let taken = take(&at, long_ago, 3).expect("it is free");
        assert!(take(&at, long_ago, 0).is_none(), "another one has it");
        drop(taken);
        // An address of documentation, which no host has.
        assert!(take("192.0.2.1:7", long_ago, 0).is_none());
    }
}
