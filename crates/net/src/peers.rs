//! Whether the processes of other ranks still run, asked of the kernel and not of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, test_kill_process};

/// Processes that are watched. A process that later gets the same id is not mistaken for one of them.
pub struct Peers(Vec<PeerProcess>);

/// One process that is watched.
pub(crate) enum PeerProcess {
    /// A file that becomes readable when the process ends.
    Watched(OwnedFd),
    /// No pidfd was available: asked by id, which does not distinguish zombies from running processes.
    Asked(Pid),
    Ended,
}

impl Peers {
    /// Watches processes by their numbers. One that has ended already counts as ended.
    pub fn watch(pids: &[u32]) -> Peers {
        Peers(pids.iter().map(|pid| PeerProcess::watch(*pid)).collect())
    }

    /// Whether a process has ended.
    pub fn ended(&self, idx: usize) -> bool {
        self.0[idx].ended()
    }
}

impl PeerProcess {
    pub(crate) fn watch(pid: u32) -> PeerProcess {
        let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
            return PeerProcess::Ended;
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(file) => PeerProcess::Watched(file),
            Err(Errno::SRCH) => PeerProcess::Ended,
            Err(_) => PeerProcess::Asked(pid),
        }
    }

    /// A process that can be watched and killed: it runs, is of this user, and cannot be mistaken for a later one.
    pub(crate) fn in_hand(pid: u32) -> Option<PeerProcess> {
        let process = PeerProcess::watch(pid);
        // Asked after it was opened: the answer is about this process, unless it has ended, which is seen too.
        let obeys =
            i32::try_from(pid).ok().and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_ok());
        (matches!(process, PeerProcess::Watched(_)) && obeys).then_some(process)
    }

    /// Kills it, if it is one that [`PeerProcess::in_hand`] gave. One that has ended is left alone.
    pub(crate) fn kill(&self) {
        if let PeerProcess::Watched(process) = self {
            // It fails if the process has ended.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }

    /// What becomes readable when it ends, of one that [`PeerProcess::in_hand`] gave.
    pub(crate) fn end(&self) -> Option<BorrowedFd<'_>> {
        match self {
            PeerProcess::Watched(process) => Some(process.as_fd()),
            PeerProcess::Asked(_) | PeerProcess::Ended => None,
        }
    }

    pub(crate) fn ended(&self) -> bool {
        match self {
            PeerProcess::Watched(process) => {
                let mut asked = [PollFd::new(process, PollFlags::IN)];
                let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
                matches!(poll(&mut asked, Some(&at_once)), Ok(1..))
            }
            PeerProcess::Asked(pid) => test_kill_process(*pid) == Err(Errno::SRCH),
            PeerProcess::Ended => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_killed_process_is_seen_before_anybody_asks_for_its_end() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let peers = Peers::watch(&[std::process::id(), child.id(), 0]);
        assert_eq!([0, 1, 2].map(|i| peers.ended(i)), [false, false, true]);
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while !peers.ended(1) {
            assert!(Instant::now() < until, "the kernel has not said in 10 s that a killed process ended");
            std::thread::yield_now();
        }
        assert!(!peers.ended(0));
        child.wait().unwrap();
    }

    #[test]
    fn one_that_is_in_hand_can_be_killed_and_one_that_has_ended_is_not() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = PeerProcess::in_hand(child.id()).expect("it runs and is of this user");
        assert!(!process.ended() && process.end().is_some());
        process.kill();
        assert!(!child.wait().unwrap().success());
        assert!(process.ended());
        process.kill();
        assert!(PeerProcess::in_hand(child.id()).is_none() && PeerProcess::in_hand(0).is_none());
    }
}
