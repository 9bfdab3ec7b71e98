//! How many of its threads a rank uses where others need the cores too: `[parallel] follow_load`.
//!
//! Training on a machine that people also work on should be the one who steps back. Once in a second a rank looks at what the kernel
//! says: for which part of that second some thread was ready and had no core (pressure), how many cores were idle, and how
//! many others used. If others use cores and somebody waits, it sends one of its threads to rest; if a core has been idle
//! for some seconds, it wakes one. It never has fewer than one. Tasks are cut as before, so that weights have the same bits; and ranks
//! whose samples are shared out by speed get fewer of them.
//!
//! A core that is taken back only to be given up again was taken too soon: the next time it has to be idle for twice as long.
//!
//! What the processes of this process group use is not what others use. Ranks of one host take turns, so that one core that is
//! wanted is given up once.

use std::fs;
use std::time::{Duration, Instant};

/// How often the load is looked at.
const EVERY: Duration = Duration::from_secs(1);
/// Somebody waits for a core for more than this part of the time.
const PRESSURE: f64 = 0.4;
/// Others use more than this, in cores.
const OTHERS: f64 = 0.25;
/// Looks in a row before a thread rests: a moment is none of our business.
const TIGHT_LOOKS: usize = 2;
/// A core that is idle to more than this part can be used.
const IDLE: f64 = 0.8;
/// Looks in a row before a thread wakes; twice as many after a mistake, up to the most.
const CALM_LOOKS: (usize, usize) = (2, 32);
/// A thread that was woken and is not wanted within so many looks was woken too soon.
const SOON_LOOKS: usize = 10;

/// What a machine did since the look before.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Load {
    /// The part of the time in which some thread waited for a core.
    pub pressure: f64,
    /// Cores that were idle.
    pub idle: f64,
    /// Cores that others used.
    pub others: f64,
}

/// How many threads a rank uses: a pure function of what was seen.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadFollower {
    threads: usize,
    active: usize,
    tight: usize,
    calm: usize,
    calm_min: usize,
    /// Looks since a thread was woken.
    woken: Option<usize>,
}

impl LoadFollower {
    /// For a rank of so many threads, all of which it uses.
    pub fn new(threads: usize) -> LoadFollower {
        let threads = threads.max(1);
        LoadFollower { threads, active: threads, tight: 0, calm: 0, calm_min: CALM_LOOKS.0, woken: None }
    }

    /// Takes a look; what to say if the number of threads changes.
    pub fn look(&mut self, load: Load) -> Option<String> {
        let Load { pressure, idle, others } = load;
        self.woken = self.woken.map(|looks| looks + 1);
        self.tight = if pressure > PRESSURE && others > OTHERS { self.tight + 1 } else { 0 };
        self.calm = if idle > IDLE { self.calm + 1 } else { 0 };
        if self.tight >= TIGHT_LOOKS && self.active > 1 {
            self.calm_min = match self.woken {
                Some(looks) if looks <= SOON_LOOKS => (2 * self.calm_min).min(CALM_LOOKS.1),
                _ => CALM_LOOKS.0,
            };
            (self.active, self.tight, self.woken) = (self.active - 1, 0, None);
            return Some(format!(
                "{} from now on: others use {others:.1} cores, and some wait",
                self.words()
            ));
        }
        if self.calm >= self.calm_min && self.active < self.threads {
            (self.active, self.calm, self.woken) = (self.active + 1, 0, Some(0));
            return Some(format!("{} from now on: {idle:.1} cores are idle", self.words()));
        }
        None
    }

    /// Threads that are used.
    pub fn active(&self) -> usize {
        self.active
    }

    fn words(&self) -> String {
        format!("{} of {} threads", self.active, self.threads)
    }
}

/// What the kernel counts, since it started.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct LoadCounts {
    /// Microseconds in which some thread waited for a core.
    waited_us: u64,
    /// Ticks of all cores.
    idle: u64,
    busy: u64,
    /// Ticks of the processes of this process group.
    own: u64,
}

impl LoadCounts {
    /// `None` where the kernel does not say.
    fn read() -> Option<LoadCounts> {
        let pressure = fs::read_to_string("/proc/pressure/cpu").ok()?;
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let (idle, busy) = of_cores(&stat)?;
        let group = of_process(&fs::read_to_string("/proc/self/stat").ok()?)?.0;
        let is_number = |name: &str| name.bytes().all(|b| b.is_ascii_digit());
        let processes = fs::read_dir("/proc").ok()?.flatten();
        let own = processes
            .filter(|entry| entry.file_name().to_str().is_some_and(is_number))
            .filter_map(|entry| of_process(&fs::read_to_string(entry.path().join("stat")).ok()?))
            .filter(|(of, _)| *of == group)
            .map(|(_, ticks)| ticks)
            .sum();
        Some(LoadCounts { waited_us: waited_us(&pressure)?, idle, busy, own })
    }
}

/// The total of the first line of `/proc/pressure/cpu`.
fn waited_us(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find(|line| line.starts_with("some "))?;
    some.split_once("total=")?.1.trim().parse().ok()
}

/// Ticks idle and busy of the first line of `/proc/stat`.
fn of_cores(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find(|line| line.starts_with("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).map_while(|field| field.parse().ok()).collect();
    // User, nice, system, idle, waiting for disks, interrupts (two), stolen.
    let idle = ticks.get(3)? + ticks.get(4)?;
    let busy = ticks[..3].iter().sum::<u64>() + ticks.get(5)? + ticks.get(6)?;
    Some((idle, busy))
}

/// The process group and the ticks of a process, by its `stat`. Its name may contain anything.
fn of_process(stat: &str) -> Option<(i64, u64)> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((fields.get(2)?.parse().ok()?, ticks(11)? + ticks(12)?))
}

/// Follows the load of this machine.
pub(crate) struct FollowedLoad {
    follower: LoadFollower,
    last: LoadCounts,
    looked: Instant,
    began: Instant,
    cores: f64,
    /// This rank's number among those of its host, and how many they are.
    turn: (u64, u64),
}

impl FollowedLoad {
    /// For a rank of so many threads, the `turn.0`-th of `turn.1` on its host; `None` if the kernel does not say what it does.
    pub(crate) fn new(threads: usize, turn: (usize, usize)) -> Option<FollowedLoad> {
        let last = LoadCounts::read()?;
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let is_core = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        Some(FollowedLoad {
            follower: LoadFollower::new(threads),
            last,
            looked: Instant::now(),
            began: Instant::now(),
            cores: stat.lines().filter(is_core).count() as f64,
            turn: (turn.0 as u64, turn.1.max(1) as u64),
        })
    }

    /// Looks, if it is time to; how many threads to use from now on, and why, if that changes.
    pub(crate) fn look(&mut self) -> Option<(usize, String)> {
        if self.looked.elapsed() < EVERY {
            return None;
        }
        let passed_us = self.looked.elapsed().as_secs_f64() * 1e6;
        let counts = LoadCounts::read()?;
        let load = between(&self.last, &counts, self.cores, passed_us);
        (self.last, self.looked) = (counts, Instant::now());
        if self.began.elapsed().as_secs() % self.turn.1 != self.turn.0 {
            return None;
        }
        let why = self.follower.look(load)?;
        Some((self.follower.active(), why))
    }
}

/// What happened between two counts. A tick is the same part of a second for cores and for processes, so only ratios are used.
fn between(before: &LoadCounts, after: &LoadCounts, cores: f64, passed_us: f64) -> Load {
    let grown = |of: fn(&LoadCounts) -> u64| of(after).saturating_sub(of(before)) as f64;
    let (idle, busy, own) = (grown(|c| c.idle), grown(|c| c.busy), grown(|c| c.own));
    let core = ((idle + busy) / cores.max(1.0)).max(1.0);
    Load {
        pressure: (grown(|c| c.waited_us) / passed_us.max(1.0)).min(1.0),
        idle: idle / core,
        others: ((busy - own) / core).max(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Load = Load { pressure: 0.1, idle: 0.1, others: 0.1 };
    const WANTED: Load = Load { pressure: 0.9, idle: 0.0, others: 1.0 };
    const IDLE_CORE: Load = Load { pressure: 0.0, idle: 1.0, others: 0.0 };

    fn active_after(follower: &mut LoadFollower, loads: &[Load]) -> Vec<usize> {
        let mut active = |load: &Load| {
            follower.look(*load);
            follower.active()
        };
        loads.iter().map(&mut active).collect()
    }

    #[test]
    fn threads_rest_while_others_want_cores_and_come_back() {
        let mut follower = LoadFollower::new(3);
        assert_eq!(
            active_after(&mut follower, &[QUIET, WANTED, QUIET, WANTED]),
            [3; 4],
            "a moment is nothing"
        );
        assert_eq!(active_after(&mut follower, &[WANTED; 7]), [2, 2, 1, 1, 1, 1, 1], "never none");
        assert_eq!(active_after(&mut follower, &[QUIET; 5]), [1; 5]);
        assert_eq!(active_after(&mut follower, &[IDLE_CORE; 6]), [1, 2, 2, 3, 3, 3]);
    }

    /// Threads of this run that wait for each other are not others.
    #[test]
    fn pressure_of_our_own_is_kept() {
        let own = Load { others: 0.1, ..WANTED };
        assert_eq!(active_after(&mut LoadFollower::new(4), &[own; 9]), [4; 9]);
    }

    #[test]
    fn a_core_that_was_taken_too_soon_is_waited_for_longer() {
        let mut follower = LoadFollower::new(2);
        let mut idle_looks = Vec::new();
        for _ in 0..6 {
            while follower.active() == 2 {
                follower.look(WANTED);
            }
            let mut looks = 0;
            while follower.active() == 1 {
                follower.look(IDLE_CORE);
                looks += 1;
            }
            idle_looks.push(looks);
        }
        assert_eq!(idle_looks, [2, 4, 8, 16, 32, 32]);
        active_after(&mut follower, &[QUIET; SOON_LOOKS + 1]);
        active_after(&mut follower, &[WANTED; 2]);
        assert_eq!(active_after(&mut follower, &[IDLE_CORE; 2]), [1, 2], "that one was not too soon");
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        let pressure =
            "some avg10=95.20 avg60=95.40 avg300=91.97 total=19883939959\nfull avg10=0.00 total=0\n";
        assert_eq!(waited_us(pressure), Some(19_883_939_959));
        let stat = "cpu  100 20 30 400 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(of_cores(stat), Some((450, 163)));
        let process = "77 (a (name) of) R 1 42 3 0 -1 4 5 6 7 8 90 10 3 4 20 0 1";
        assert_eq!(of_process(process), Some((42, 100)));
        let before = LoadCounts { waited_us: 0, idle: 0, busy: 0, own: 0 };
        let after = LoadCounts { waited_us: 500_000, idle: 50, busy: 150, own: 100 };
        assert_eq!(between(&before, &after, 2.0, 1e6), Load { pressure: 0.5, idle: 0.5, others: 0.5 });
        let here = LoadCounts::read().expect("this kernel says it");
        assert!(here.busy > 0 && here.own <= here.busy + here.idle);
    }
}
