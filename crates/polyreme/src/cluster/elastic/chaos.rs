//! Faults from a seed: `--chaos "kill=1s,stop=5s:2s,cut=7s:2s,join=3s,seed=7"` kills, pauses, cuts off and adds ranks while an elastic run
//! trains, and `--chaos "sleep=20ms,slow=80ms@0.1,slow_rank=3:4x,seed=1"` slows the steps of any run down ([`Slowness`]).
//!
//! Each kind has an interval; when it is due, a child is drawn, and how long it lasts if that is a range (`stop=5s:2s..20s`). The last one that trains is left alone: with it the state would be lost,
//! which is a test of checkpoints and not of this.

use std::fmt;
use std::time::{Duration, Instant};

use polyreme_train::slowness::Slowness;

use crate::times::duration;

/// A fault that lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastingFault {
    every: Duration,
    /// The shortest and the longest that it lasts.
    lasts: [Duration; 2],
}

impl LastingFault {
    fn parse(key: &str, text: &str) -> Result<LastingFault, String> {
        let missing = || format!("{key} needs an interval and a length: {key}=5s:2s");
        let (every, lasts) = text.split_once(':').ok_or_else(missing)?;
        let (least, most) = lasts.split_once("..").unwrap_or((lasts, lasts));
        let lasts = [duration(least)?, duration(most)?];
        match lasts[0] > lasts[1] {
            true => Err(format!("{key}={text} lasts longer at least than at most: {key}=5s:2s..20s")),
            false => Ok(LastingFault { every: duration(every)?, lasts }),
        }
    }
}

impl fmt::Display for LastingFault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [least, most] = self.lasts.map(|time| time.as_secs_f64());
        write!(f, "{}s:{least}s", self.every.as_secs_f64())?;
        if least < most { write!(f, "..{most}s") } else { Ok(()) }
    }
}

/// What is done, and how often.
#[derive(Clone, PartialEq, Debug)]
pub struct ChaosSpec {
    /// A rank is killed.
    pub kill: Option<Duration>,
    /// A rank is stopped, and continued later.
    pub stop: Option<LastingFault>,
    /// A rank's network is cut off, and connected again later.
    pub cut: Option<LastingFault>,
    /// A rank is added.
    pub join: Option<Duration>,
    /// Steps are slowed down, in any run. Its seed is that from which everything is drawn.
    pub slowness: Slowness,
}

impl ChaosSpec {
    /// What of it only an elastic run survives.
    pub fn of_elastic_runs(&self) -> Option<&'static str> {
        let ChaosSpec { kill, stop, cut, join, slowness: _ } = self;
        let kinds = [
            (kill.is_some(), "kill"),
            (stop.is_some(), "stop"),
            (cut.is_some(), "cut"),
            (join.is_some(), "join"),
        ];
        kinds.into_iter().find_map(|(asked, name)| asked.then_some(name))
    }
}

impl std::str::FromStr for ChaosSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<ChaosSpec, String> {
        let mut spec =
            ChaosSpec { kill: None, stop: None, cut: None, join: None, slowness: Slowness::default() };
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value) =
                part.split_once('=').ok_or_else(|| format!("{part:?} has no value: kill=1s"))?;
            match key {
                "kill" => spec.kill = Some(duration(value)?),
                "join" => spec.join = Some(duration(value)?),
                "stop" => spec.stop = Some(LastingFault::parse(key, value)?),
                "cut" => spec.cut = Some(LastingFault::parse(key, value)?),
                "sleep" => spec.slowness.sleep = duration(value)?,
                "slow" => spec.slowness.slow = Some(slow(value)?),
                "slow_rank" => spec.slowness.ranks.push(slow_rank(value)?),
                "seed" => {
                    spec.slowness.seed =
                        value.parse().map_err(|_| format!("seed={value} is not a number"))?;
                }
                _ => {
                    return Err(format!(
                        "{key:?} is unknown: kill, stop, cut, join, sleep, slow, slow_rank and seed are known"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for ChaosSpec {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ChaosSpec { kill, stop, cut, join, slowness: Slowness { sleep, slow, ranks, seed } } = self;
        let all = [
            kill.map(|every| format!("kill={}s", every.as_secs_f64())),
            stop.map(|stop| format!("stop={stop}")),
            cut.map(|cut| format!("cut={cut}")),
            join.map(|every| format!("join={}s", every.as_secs_f64())),
            (!sleep.is_zero()).then(|| format!("sleep={}s", sleep.as_secs_f64())),
            slow.map(|(sleep, share)| format!("slow={}s@{share}", sleep.as_secs_f64())),
        ];
        let ranks = ranks.iter().map(|(rank, times)| format!("slow_rank={rank}:{times}x"));
        let all = all.into_iter().flatten().chain(ranks).chain([format!("seed={seed}")]);
        f.write_str(&all.collect::<Vec<_>>().join(","))
    }
}

/// `80ms@0.1`: a time, and the share of steps that it is of.
fn slow(value: &str) -> Result<(Duration, f64), String> {
    let (time, share) = value.split_once('@').ok_or("slow needs a time and a share: slow=80ms@0.1")?;
    match share.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok((duration(time)?, share)),
        _ => Err(format!("slow={value}: {share:?} is not a share of the steps, such as 0.1")),
    }
}

/// `3:4x`: a rank, and how many times as long its steps take.
fn slow_rank(value: &str) -> Result<(usize, f64), String> {
    let wrong = || format!("slow_rank={value} does not say which rank and how slow: slow_rank=3:4x");
    let (rank, times) = value.split_once(':').ok_or_else(wrong)?;
    let rank = rank.parse().map_err(|_| wrong())?;
    let times = times.strip_suffix('x').unwrap_or(times).parse().map_err(|_| wrong())?;
    if (1.0..=1e4).contains(&times) { Ok((rank, times)) } else { Err(wrong()) }
}

/// Something to be done now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Kill this child.
    Kill(u64),
    /// Stop this one for so long.
    Stop(u64, Duration),
    /// Continue it.
    Continue(u64),
    /// Cut this one off for so long.
    Cut(u64, Duration),
    /// Connect it again.
    Mend(u64),
    /// Start one more.
    Join,
}

/// Draws faults. Pure: time and children are given.
pub struct Chaos {
    spec: ChaosSpec,
    state: u64,
    kill_at: Option<Instant>,
    stop_at: Option<Instant>,
    cut_at: Option<Instant>,
    join_at: Option<Instant>,
    stopped: Option<(u64, Instant)>,
    cut: Option<(u64, Instant)>,
}

impl Chaos {
    /// Begins now.
    pub fn new(spec: ChaosSpec, now: Instant) -> Chaos {
        let at = |every: Option<Duration>| every.map(|every| now + every);
        let (kill_at, join_at) = (at(spec.kill), at(spec.join));
        let (stop_at, cut_at) = (at(spec.stop.map(|stop| stop.every)), at(spec.cut.map(|cut| cut.every)));
        let state = spec.slowness.seed;
        Chaos { state, spec, kill_at, stop_at, cut_at, join_at, stopped: None, cut: None }
    }

    /// What is due. `ranks` are the children that train, in order; `room` says whether one more may be added. One child at a time is
    /// stopped, and one is cut off.
    pub fn due(&mut self, now: Instant, ranks: &[u64], room: bool) -> Vec<Fault> {
        let mut faults = Vec::new();
        let over = |of: &mut Option<(u64, Instant)>| of.take_if(|(_, until)| *until <= now);
        faults.extend(over(&mut self.stopped).map(|(child, _)| Fault::Continue(child)));
        faults.extend(over(&mut self.cut).map(|(child, _)| Fault::Mend(child)));
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now) && ranks.len() > 1;
        if is_due(self.kill_at) {
            self.kill_at = self.spec.kill.map(|every| now + every);
            faults.push(Fault::Kill(self.draw(ranks)));
        }
        if let Some(stop) = self.spec.stop.filter(|_| is_due(self.stop_at) && self.stopped.is_none()) {
            self.stop_at = Some(now + stop.every);
            let (child, lasts) = (self.draw(ranks), self.draw_time(stop.lasts));
            if !faults.contains(&Fault::Kill(child)) {
                self.stopped = Some((child, now + lasts));
                faults.push(Fault::Stop(child, lasts));
            }
        }
        if let Some(cut) = self.spec.cut.filter(|_| is_due(self.cut_at) && self.cut.is_none()) {
            self.cut_at = Some(now + cut.every);
            let (child, lasts) = (self.draw(ranks), self.draw_time(cut.lasts));
            if !faults.contains(&Fault::Kill(child)) {
                self.cut = Some((child, now + lasts));
                faults.push(Fault::Cut(child, lasts));
            }
        }
        if self.join_at.is_some_and(|at| at <= now) {
            self.join_at = self.spec.join.map(|every| now + every);
            faults.extend(room.then_some(Fault::Join));
        }
        faults
    }

    fn draw_time(&mut self, [least, most]: [Duration; 2]) -> Duration {
        if least == most {
            return least;
        }
        least + (most - least).mul_f64((self.next() >> 11) as f64 / (1u64 << 53) as f64)
    }

    fn draw(&mut self, ranks: &[u64]) -> u64 {
        ranks[(self.next() % ranks.len() as u64) as usize]
    }

    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_read_and_written_and_errors_say_what_to_write() {
        for text in [
            "kill=1s,stop=5s:2s,cut=7s:2s,join=3s,seed=7",
            "stop=5s:2s..20s,seed=1",
            "kill=0.25s,seed=0",
            "seed=3",
            "sleep=0.02s,slow=0.08s@0.1,slow_rank=3:4x,slow_rank=1:1.5x,seed=1",
        ] {
            assert_eq!(text.parse::<ChaosSpec>().unwrap().to_string(), text);
        }
        assert_eq!("kill=250ms".parse::<ChaosSpec>().unwrap().kill, Some(Duration::from_millis(250)));
        for (text, part) in [
            ("kill", "kill=1s"),
            ("kill=1", "1s, 250ms"),
            ("kill=0s", "no time"),
            ("stop=5s", "stop=5s:2s"),
            ("cut=5s", "cut=5s:2s"),
            ("cut=5s:3s..2s", "at least"),
            ("crash=1s", "kill, stop, cut, join"),
            ("slow=80ms", "slow=80ms@0.1"),
            ("slow=80ms@10%", "share of the steps"),
            ("slow=80ms@1.5", "share of the steps"),
            ("slow_rank=3", "slow_rank=3:4x"),
            ("slow_rank=3:0.5x", "slow_rank=3:4x"),
            ("slow_rank=a:4x", "slow_rank=3:4x"),
            ("sleep=20", "250ms"),
            ("seed=x", "number"),
        ] {
            let error = text.parse::<ChaosSpec>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn faults_follow_from_the_seed_and_spare_the_last_rank() {
        let run = |seed| {
            let spec = ChaosSpec::from_str_or_panic(&format!(
                "kill=1s,stop=2s:500ms,cut=2s:1s..3s,join=3s,seed={seed}"
            ));
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
        assert!(n(|f| matches!(f, Fault::Stop(..))) >= n(|f| matches!(f, Fault::Continue(_))));
        assert!(n(|f| matches!(f, Fault::Cut(..))) >= 2 && n(|f| matches!(f, Fault::Mend(_))) >= 1);
        let lasts = |f: &Fault| match f {
            Fault::Cut(_, lasts) => Some(*lasts),
            Fault::Kill(_) | Fault::Stop(..) | Fault::Continue(_) | Fault::Mend(_) | Fault::Join => None,
        };
        let (least, most) = (Duration::from_secs(1), Duration::from_secs(3));
        assert!(faults.iter().filter_map(lasts).all(|time| least <= time && time <= most));
        let mut chaos = Chaos::new(ChaosSpec::from_str_or_panic("kill=1s"), Instant::now());
        assert!(chaos.due(Instant::now() + Duration::from_secs(9), &[4], true).is_empty());
    }

    impl ChaosSpec {
        fn from_str_or_panic(text: &str) -> ChaosSpec {
            text.parse().unwrap()
        }
    }
}
