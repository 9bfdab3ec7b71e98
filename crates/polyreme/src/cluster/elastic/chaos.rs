//! Faults from a seed: `--chaos "kill=1s,stop=5s:2s,join=3s,seed=7"` kills, pauses and adds ranks while a run trains.
//!
//! Each kind has an interval; when it is due, a child is drawn. The last one that trains is left alone: with it the state would be lost,
//! which is a test of checkpoints and not of this.

use std::fmt;
use std::time::{Duration, Instant};

use crate::times::duration;

/// What is done, and how often.
#[derive(Clone, PartialEq, Debug)]
pub struct ChaosSpec {
    /// A rank is killed.
    pub kill: Option<Duration>,
    /// A rank is stopped, and continued after the second time.
    pub stop: Option<(Duration, Duration)>,
    /// A rank is added.
    pub join: Option<Duration>,
    /// From which everything is drawn.
    pub seed: u64,
}

impl std::str::FromStr for ChaosSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<ChaosSpec, String> {
        let mut spec = ChaosSpec { kill: None, stop: None, join: None, seed: 0 };
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) =
                part.split_once('=').ok_or_else(|| format!("{part:?} has no value: kill=1s"))?;
            match key {
                "kill" => spec.kill = Some(duration(value)?),
                "join" => spec.join = Some(duration(value)?),
                "stop" => {
                    let (every, length) =
                        value.split_once(':').ok_or("stop needs an interval and a length: stop=5s:2s")?;
                    spec.stop = Some((duration(every)?, duration(length)?));
                }
                "seed" => spec.seed = value.parse().map_err(|_| format!("seed={value} is not a number"))?,
                "cut" => {
                    return Err(
                        "cut needs ranks in networks of their own; cut their links outside of polyreme"
                            .into(),
                    );
                }
                _ => return Err(format!("{key:?} is unknown: kill, stop, join and seed are known")),
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for ChaosSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ChaosSpec { kill, stop, join, seed } = self;
        let all = [
            kill.map(|every| format!("kill={}s", every.as_secs_f64())),
            stop.map(|(every, length)| format!("stop={}s:{}s", every.as_secs_f64(), length.as_secs_f64())),
            join.map(|every| format!("join={}s", every.as_secs_f64())),
            Some(format!("seed={seed}")),
        ];
        f.write_str(&all.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

/// Something to be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Kill this child.
    Kill(u64),
    /// Stop this one.
    Stop(u64),
    /// Continue it.
    Continue(u64),
    /// Start one more.
    Join,
}

/// Draws faults. Pure: time and children are given.
pub struct Chaos {
    spec: ChaosSpec,
    state: u64,
    kill_at: Option<Instant>,
    stop_at: Option<Instant>,
    join_at: Option<Instant>,
    stopped: Option<(u64, Instant)>,
}

impl Chaos {
    /// Begins now.
    pub fn new(spec: ChaosSpec, now: Instant) -> Chaos {
        let at = |every: Option<Duration>| every.map(|every| now + every);
        let (kill_at, join_at) = (at(spec.kill), at(spec.join));
        let stop_at = at(spec.stop.map(|(every, _)| every));
        Chaos { state: spec.seed, spec, kill_at, stop_at, join_at, stopped: None }
    }

    /// What is due. `ranks` are the children that train, in order; `room` says whether one more may be added.
    pub fn due(&mut self, now: Instant, ranks: &[u64], room: bool) -> Vec<Fault> {
        let mut faults = Vec::new();
        if let Some((child, _)) = self.stopped.filter(|(_, until)| *until <= now) {
            self.stopped = None;
            faults.push(Fault::Continue(child));
        }
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.kill_at) && ranks.len() > 1 {
            self.kill_at = self.spec.kill.map(|every| now + every);
            let child = self.draw(ranks);
            faults.push(Fault::Kill(child));
        }
        if is_due(self.stop_at) && ranks.len() > 1 && self.stopped.is_none() {
            let (every, length) = self.spec.stop.expect("it is due");
            self.stop_at = Some(now + every);
            let child = self.draw(ranks);
            if !faults.contains(&Fault::Kill(child)) {
                self.stopped = Some((child, now + length));
                faults.push(Fault::Stop(child));
            }
        }
        if is_due(self.join_at) {
            self.join_at = self.spec.join.map(|every| now + every);
            faults.extend(room.then_some(Fault::Join));
        }
        faults
    }

    fn draw(&mut self, ranks: &[u64]) -> u64 {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ranks[((z ^ (z >> 31)) % ranks.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_read_and_written_and_errors_say_what_to_write() {
        for text in ["kill=1s,stop=5s:2s,join=3s,seed=7", "kill=0.25s,seed=0", "seed=3"] {
            assert_eq!(text.parse::<ChaosSpec>().unwrap().to_string(), text);
        }
        assert_eq!("kill=250ms".parse::<ChaosSpec>().unwrap().kill, Some(Duration::from_millis(250)));
        for (text, part) in [
            ("kill", "kill=1s"),
            ("kill=1", "1s, 250ms"),
            ("kill=0s", "no time"),
            ("stop=5s", "stop=5s:2s"),
            ("cut=7s:2s", "networks of their own"),
            ("crash=1s", "kill, stop, join"),
            ("seed=x", "number"),
        ] {
            let error = text.parse::<ChaosSpec>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn faults_follow_from_the_seed_and_spare_the_last_rank() {
        let run = |seed| {
            let spec = ChaosSpec { seed, ..ChaosSpec::from_str_or_panic("kill=1s,stop=2s:500ms,join=3s") };
            let start = Instant::now();
            let mut chaos = Chaos::new(spec, start);
            let at = |ms: u64| start + Duration::from_millis(ms);
            (0..80).flat_map(|k| chaos.due(at(k * 100), &[3, 5, 8, 9], true)).collect::<Vec<_>>()
        };
        let faults = run(7);
        assert!(faults == run(7) && faults != run(8));
        assert_eq!(faults.iter().filter(|f| matches!(f, Fault::Kill(_))).count(), 7);
        assert_eq!(faults.iter().filter(|f| **f == Fault::Join).count(), 2);
        let n = |f: fn(&&Fault) -> bool| faults.iter().filter(f).count();
        assert!(n(|f| matches!(f, Fault::Stop(_))) >= n(|f| matches!(f, Fault::Continue(_))));
        let mut chaos = Chaos::new(ChaosSpec::from_str_or_panic("kill=1s"), Instant::now());
        assert!(chaos.due(Instant::now() + Duration::from_secs(9), &[4], true).is_empty());
    }

    impl ChaosSpec {
        fn from_str_or_panic(text: &str) -> ChaosSpec {
            text.parse().unwrap()
        }
    }
}
