//! The schedule of a seed: how many ranks, what they do, what goes wrong, and the expected outcome.

use std::mem::{Discriminant, discriminant};
use std::time::Duration;

use super::super::{Fault, Settings, SimOutcome, SimRandom, Simulation};
use super::job::{Act, Early, RankEnd, work};
use crate::patience::Patience;
use crate::rendezvous::CLOSE_TIME;
use crate::{Cause, JoinError};

/// How long a rank may be silent without a fault: a heartbeat, a packet that is lost three times, threads that run
/// late.
const SLACK: Duration = Duration::from_millis(2000);

/// The expected outcome of a schedule.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Verdict {
    /// All ranks do what they have to, and none reports anything.
    AllFine,
    /// This rank is lost. The remaining ranks agree on it, if they report anything.
    Loses { rank: usize },
    /// A connection between these breaks. All agree on one of the two, except the second one if it has no other
    /// connection to the others.
    Breaks { ends: [usize; 2] },
    /// These two cannot be connected. All ranks report it, naming the one that the other connects to.
    Parts { ends: [usize; 2] },
    /// This rank fails, and all ranks report it.
    Fails { rank: usize },
    /// No rank makes progress because of this one, and all report it.
    Stalls { rank: usize },
}

/// Everything that follows from a seed.
#[derive(Clone, Debug)]
pub(super) struct RunPlan {
    pub(super) seed: u64,
    pub(super) size: usize,
    pub(super) patience: Patience,
    pub(super) early: Early,
    pub(super) acts: Vec<Act>,
    pub(super) settings: Settings,
    pub(super) verdict: Verdict,
}

impl RunPlan {
    pub(super) fn new(seed: u64) -> RunPlan {
        let mut random = SimRandom::new(seed);
        let size = random.within(2..7) as usize;
        let mut acts: Vec<_> = (0..random.within(0..8)).map(|_| act(&mut random, size)).collect();
        // From separate random numbers, so that the rest of a seed's schedule stays what it was.
        let mut more = SimRandom::new(!seed);
        let early = [Early::AllPairs, Early::Neighbours, Early::NoPairs][more.within(0..3) as usize];
        letters(&mut more, size, &mut acts);
        let far = [500, 5_000, 50_000][random.within(0..3) as usize];
        let mut settings = Settings {
            delay: micros(20)..micros(random.within(50..far)),
            losses: [0, 2, 20][random.within(0..3) as usize],
            lag: micros(random.within(10..100_000)),
            buffer_bytes: random.within(4 << 10..256 << 10) as usize,
            ..Settings::default()
        };
        let silence =
            Duration::from_secs([4, 4, 4, 4, 4, 7, 7, 7, 7, 7, 7, 60][random.within(0..12) as usize]);
        let patience = Patience { silence, stall: 5 * silence + Duration::from_secs(60) };
        let phases = phases(&acts, &settings);
        small_faults(&mut random, size, silence, phases, &mut settings.faults);
        let mut verdict = large_fault(&mut random, size, patience, phases, &mut acts, &mut settings.faults);
        if verdict == Verdict::AllFine && size > 2 && more.chance(150) {
            verdict = part(&mut more, size, &mut settings.faults);
        }
        let mut plan = RunPlan { seed, size, patience, early, acts, settings, verdict };
        plan.settings.time_max = plan.time_max();
        plan
    }

    /// Joining has its own bound; then comes all work, twice the delay that faults cause, and the time in which a loss
    /// or a stall is noticed and reported.
    pub(super) fn time_max(&self) -> Duration {
        let busy: Duration = self.acts.iter().map(Act::time).sum();
        let late: Duration = self.settings.faults.iter().map(|(_, fault)| 2 * time(fault)).sum();
        Duration::from_secs(120) + busy + late + 5 * self.patience.silence + self.patience.stall
    }

    pub(super) fn run(&self) -> SimOutcome<RankEnd> {
        let (acts, patience, early) = (self.acts.clone(), self.patience, self.early);
        Simulation::new(self.seed, self.settings.clone())
            .run(self.size, move |rank| work(rank, patience, early, &acts))
    }

    /// What is wrong with an outcome.
    pub(super) fn judge(&self, outcome: &SimOutcome<RankEnd>) -> Result<(), String> {
        if let Some(failure) = &outcome.failure {
            return Err(failure.clone());
        }
        let mut said: Option<(usize, Discriminant<Cause>)> = None;
        for (rank, end) in outcome.results.iter().enumerate() {
            let culprit = match &self.verdict {
                Verdict::AllFine => false,
                Verdict::Loses { rank: lost } => *lost == rank,
                Verdict::Breaks { ends } => ends.contains(&rank) && ends[0] == 0 && ends[1] == rank,
                Verdict::Parts { .. } | Verdict::Fails { .. } | Verdict::Stalls { .. } => false,
            };
            match end {
                None if culprit => {}
                None => return Err(format!("rank {rank} did not end")),
                Some(RankEnd::Wrong(what)) => return Err(format!("rank {rank}: {what}")),
                Some(RankEnd::Fine { parting }) => self.judge_parting(rank, *parting)?,
                _ if self.verdict == Verdict::AllFine => {
                    return Err(format!("rank {rank} gives up: {end:?}"));
                }
                Some(RankEnd::Alone(e)) if !culprit && !self.names(e) => {
                    return Err(format!("rank {rank} does not join and blames the wrong rank: {e}"));
                }
                Some(RankEnd::Lost(report)) if !culprit => {
                    let says = (report.rank, discriminant(&report.cause));
                    let blames = self.blames(report.rank, &report.cause);
                    if !blames && !self.last_words_lost(outcome, &report.cause) {
                        return Err(format!("rank {rank} reports what did not happen: {report}"));
                    }
                    // A rank 0 that fails while it is held back has left before all have received the reason.
                    let unheard = self.verdict == Verdict::Fails { rank: 0 } && self.holds_last_words();
                    if *said.get_or_insert(says) != says && !self.cuts_rank_0_off() && !unheard {
                        return Err(format!("rank {rank} contradicts the ranks before it: {report}"));
                    }
                }
                Some(RankEnd::Alone(_) | RankEnd::Lost(_)) => {}
            }
        }
        Ok(())
    }

    /// A rank that leaves is answered at once, unless something is late.
    fn judge_parting(&self, rank: usize, parting: Duration) -> Result<(), String> {
        let Settings { faults, losses, .. } = &self.settings;
        let at_once = Duration::from_secs(1);
        if rank > 0 && faults.is_empty() && *losses == 0 && parting > at_once {
            return Err(format!("rank {rank} took {parting:?} to leave"));
        }
        Ok(())
    }

    /// Whether the lost rank had left in order, and its machine then lost power with something of it still to be sent:
    /// the others only see that they wait in vain.
    fn last_words_lost(&self, outcome: &SimOutcome<RankEnd>, cause: &Cause) -> bool {
        let left = |rank: usize| matches!(outcome.results[rank], Some(RankEnd::Fine { .. }));
        matches!(self.verdict, Verdict::Loses { rank } if left(rank))
            && matches!(cause, Cause::Stalled { .. })
    }

    fn blames(&self, rank: usize, cause: &Cause) -> bool {
        let unreachable = matches!(cause, Cause::Unreachable { .. });
        match self.verdict {
            Verdict::AllFine => false,
            Verdict::Loses { rank: lost } => {
                let silent = matches!(cause, Cause::Silent { .. });
                let lost = rank == lost && (silent || unreachable || *cause == Cause::Gone);
                lost || (silent && self.cuts_rank_0_off())
            }
            Verdict::Breaks { ends } => ends.contains(&rank) && (unreachable || *cause == Cause::Gone),
            Verdict::Parts { ends } => {
                (rank == ends[0].min(ends[1]) && unreachable)
                    || (matches!(cause, Cause::Stalled { .. }) && self.calls_in_vain(ends))
            }
            Verdict::Fails { rank: failed } => {
                let gone = *cause == Cause::Gone && failed == 0 && self.holds_last_words();
                rank == failed && (gone || matches!(cause, Cause::Failed { .. }))
            }
            Verdict::Stalls { rank: stuck } => rank == stuck && matches!(cause, Cause::Stalled { .. }),
        }
    }

    /// Whether the lower of two parted ranks is the first to talk. Its calls do not get through, which is not a fault:
    /// the higher one may reach it. That one does not try before it wants to talk, and it may wait for the lower one
    /// until then.
    fn calls_in_vain(&self, ends: [usize; 2]) -> bool {
        let (lower, higher) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        self.acts.contains(&Act::Letter { from: lower, to: higher })
    }

    /// Whether rank 0 is cut off from the others: it takes them for silent, and they it. A rank that has not decided
    /// yet when rank 0's report arrives after all repeats that report.
    fn cuts_rank_0_off(&self) -> bool {
        let long = |fault: &Fault| match fault {
            Fault::Hold { ranks, time } => ranks.contains(&0) && *time > self.patience.silence,
            _ => false,
        };
        self.settings.faults.iter().any(|(_, fault)| long(fault))
    }

    /// Whether the network holds something back for longer than a rank 0 that gives up waits for it to get through.
    fn holds_last_words(&self) -> bool {
        let long = |fault: &Fault| matches!(fault, Fault::Hold { .. }) && time(fault) >= CLOSE_TIME;
        self.settings.faults.iter().any(|(_, fault)| long(fault))
    }

    fn names(&self, e: &JoinError) -> bool {
        let culprits = match self.verdict {
            Verdict::AllFine | Verdict::Fails { .. } | Verdict::Stalls { .. } => vec![],
            Verdict::Loses { rank } => vec![rank],
            Verdict::Breaks { ends } | Verdict::Parts { ends } => ends.to_vec(),
        };
        let in_text = |text: &str| culprits.iter().any(|rank| text.contains(&format!("rank {rank} ")));
        match e {
            JoinError::Left { rank, .. } => {
                culprits.contains(rank) || (*rank == 0 && self.holds_last_words())
            }
            JoinError::Missing { ranks, .. } => culprits.iter().any(|rank| ranks.contains(rank)),
            JoinError::Unreachable { .. } => culprits.contains(&0),
            JoinError::Mesh { pairs } => pairs.iter().any(|pair| in_text(pair)),
            // A rank 0 that was cut off may blame anyone, and be heard later.
            JoinError::Refused { why } => in_text(why) || culprits.contains(&0),
            _ => false,
        }
    }
}

impl Act {
    fn time(&self) -> Duration {
        match self {
            Act::Compute { each, longer } => *each + longer.map_or(Duration::ZERO, |longer| longer.1),
            Act::Share { .. } | Act::Letter { .. } => Duration::from_secs(1),
            Act::AllReduce { bytes, .. } | Act::Broadcast { bytes, .. } => {
                // In the smallest buffers, over the slowest network.
                Duration::from_secs(1) + Duration::from_millis(*bytes as u64 / 20)
            }
            Act::Fail { .. } => Duration::ZERO,
            Act::Idle { time, .. } | Act::Linger { time, .. } => *time,
        }
    }
}

fn micros(n: u64) -> Duration {
    Duration::from_micros(n)
}

fn act(random: &mut SimRandom, size: usize) -> Act {
    let bytes = [0, 1, 100, 5_000, 70_000, 150_000][random.within(0..6) as usize];
    let bytes = (bytes + random.within(0..1 + bytes / 10)) as usize;
    let someone = random.within(0..size as u64) as usize;
    match random.within(0..10) {
        0..3 => {
            let long = if random.chance(100) { 30_000_000 } else { 2_000_000 };
            let longer = (someone, micros(random.within(0..long)));
            let each = micros(random.within(0..500_000));
            Act::Compute { each, longer: Some(longer).filter(|_| random.chance(500)) }
        }
        3..5 => Act::Share { bytes: bytes.min(40_000) },
        5..7 => Act::AllReduce { bytes, ring: true },
        7..9 => Act::AllReduce { bytes, ring: false },
        _ => Act::Broadcast { bytes, root: someone },
    }
}

/// Some letters in between: each may be the first time that two ranks talk.
fn letters(random: &mut SimRandom, size: usize, acts: &mut Vec<Act>) {
    for _ in 0..random.within(0..3) {
        let from = random.within(0..size as u64) as usize;
        let to = (from + random.within(1..size as u64) as usize) % size;
        acts.insert(random.within(0..acts.len() as u64 + 1) as usize, Act::Letter { from, to });
    }
}

/// Two ranks never reach each other; neither is rank 0, through which all reports go.
fn part(random: &mut SimRandom, size: usize, faults: &mut Vec<(Duration, Fault)>) -> Verdict {
    let others = size as u64 - 1;
    let first = random.within(0..others);
    let second = (first + random.within(1..others)) % others;
    let [one, other] = [first, second].map(|rank| rank as usize + 1);
    faults.push((Duration::ZERO, Fault::Part { one, other }));
    Verdict::Parts { ends: [one, other] }
}

/// About how long joining and working take, in microseconds, if nothing goes wrong.
fn phases(acts: &[Act], settings: &Settings) -> [u64; 2] {
    let turn = (settings.delay.end + settings.lag / 20).as_micros() as u64;
    let busy = |act: &Act| match act {
        Act::Compute { each, longer } => {
            (*each + longer.map_or(Duration::ZERO, |longer| longer.1)).as_micros() as u64
        }
        Act::Share { .. } | Act::Letter { .. } => 20_000 + 2 * turn,
        Act::AllReduce { bytes, .. } | Act::Broadcast { bytes, .. } => {
            (4 + (bytes / settings.buffer_bytes) as u64) * turn
        }
        Act::Fail { .. } | Act::Idle { .. } | Act::Linger { .. } => 0,
    };
    [12 * turn, acts.iter().map(busy).sum()]
}

/// A moment: while ranks join, while they work, or about when they end.
fn moment(random: &mut SimRandom, [joining, working]: [u64; 2]) -> Duration {
    micros(match random.within(0..10) {
        0..4 => random.within(0..joining),
        4..8 => joining + random.within(0..working),
        _ => joining + working + random.within(0..joining),
    })
}

/// How long a fault keeps something from going on. What is sent again after a hold may take as long once more.
fn time(fault: &Fault) -> Duration {
    match fault {
        Fault::Pause { time, .. } | Fault::PauseMain { time, .. } => *time,
        Fault::Hold { time, .. } => 2 * *time,
        Fault::Part { .. } | Fault::Cut { .. } | Fault::Kill { .. } | Fault::Vanish { .. } => Duration::ZERO,
    }
}

/// Faults that together silence no rank for too long.
fn small_faults(
    random: &mut SimRandom,
    size: usize,
    silence: Duration,
    phases: [u64; 2],
    faults: &mut Vec<(Duration, Fault)>,
) {
    let mut left = silence - SLACK;
    for _ in 0..random.within(0..4) {
        let length = micros(random.within(0..left.as_micros() as u64));
        let rank = random.within(0..size as u64) as usize;
        let fault = match random.within(0..3) {
            0 => Fault::Pause { rank, time: length },
            1 => Fault::PauseMain { rank, time: length },
            _ => Fault::Hold { ranks: vec![rank], time: length / 2 },
        };
        left -= time(&fault);
        faults.push((moment(random, phases), fault));
    }
}

/// At most one fault that ends the job.
fn large_fault(
    random: &mut SimRandom,
    size: usize,
    patience: Patience,
    phases: [u64; 2],
    acts: &mut Vec<Act>,
    faults: &mut Vec<(Duration, Fault)>,
) -> Verdict {
    let rank = random.within(0..size as u64) as usize;
    let other = (rank + random.within(1..size as u64) as usize) % size;
    let long = patience.silence + SLACK + micros(random.within(0..20_000_000));
    let at = moment(random, phases);
    let (fault, verdict) = match random.within(0..12) {
        0 | 1 => (Fault::Kill { rank }, Verdict::Loses { rank }),
        2 => (Fault::Vanish { rank }, Verdict::Loses { rank }),
        3 => (Fault::Pause { rank, time: long }, Verdict::Loses { rank }),
        4 => (Fault::Hold { ranks: vec![rank], time: long }, Verdict::Loses { rank }),
        5 | 6 => {
            let (one, other) = (rank.min(other), rank.max(other));
            // With rank 0 there are two connections, the first one of the control plane.
            let nth = if one == 0 { random.within(0..2) as usize } else { 0 };
            // A connection that is no longer used is not missed.
            acts.push(Act::AllReduce { bytes: 70_000, ring: false });
            (Fault::Cut { one, other, nth }, Verdict::Breaks { ends: [one, other] })
        }
        7 => {
            let at = random.within(0..acts.len() as u64 + 1) as usize;
            acts.insert(at, Act::Fail { rank });
            // Without this the others may be done before they learn of it.
            acts.push(Act::Share { bytes: 1 });
            return Verdict::Fails { rank };
        }
        // It waits for something that does not come, and the others wait for it.
        9 if random.chance(300) => {
            let at = random.within(0..acts.len() as u64 + 1) as usize;
            acts.insert(at, Act::Idle { rank, time: 2 * patience.stall });
            acts.push(Act::Share { bytes: 1 });
            return Verdict::Stalls { rank };
        }
        // All machines stop at the same time and go on at the same time: a suspended laptop, a migrated rack. Before, the ranks
        // have joined, which is bounded by the clock.
        8 => {
            acts.insert(0, Act::Compute { each: Duration::from_secs(6), longer: None });
            let at = Duration::from_secs(4) + at.min(Duration::from_secs(2));
            faults.clear();
            faults.extend((0..size).map(|rank| (at, Fault::Pause { rank, time: long })));
            return Verdict::AllFine;
        }
        _ => return Verdict::AllFine,
    };
    faults.push((at, fault));
    verdict
}
