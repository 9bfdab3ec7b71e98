//! Whether the processes of other ranks still run, asked of the kernel and not of them.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

/// Processes that are watched. A process that later gets the same id is not mistaken for one of them.
pub struct Peers(Vec<PeerProcess>);

enum PeerProcess {
    /// A file that becomes readable when the process ends.
    Watched(OwnedFd),
    /// No pidfd was available: asked by id, which does not distinguish zombies from running processes.
    Asked(Pid),
    Ended,
}

impl Peers {
    /// Watches processes by their numbers. One that has ended already counts as ended.
    pub fn watch(pids: &[u32]) -> Peers {
        let open = |pid: &u32| {
            let Some(pid) = i32::try_from(*pid).ok().and_then(Pid::from_raw) else {
                return PeerProcess::Ended;
            };
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(file) => PeerProcess::Watched(file),
                Err(Errno::SRCH) => PeerProcess::Ended,
                Err(_) => PeerProcess::Asked(pid),
            }
        };
        Peers(pids.iter().map(open).collect())
    }

    /// Whether a process has ended.
    pub fn ended(&self, idx: usize) -> bool {
        match &self.0[idx] {
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
}
