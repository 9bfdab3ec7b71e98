//! Mailboxes on simulated networks. After each exchange: letters of a sender and a class came in order, each once, none was
//! left out while all lived, no more was held than is allowed, every wait has ended, and all reports agree.
//!
//! `SEED=7 cargo test -p polyreme-net --lib mailbox::tests::simulated::exchanges -- --nocapture` repeats one and prints
//! its events; `SCHEDULES=2000` runs more of them than an ordinary test does.

use std::mem::discriminant;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::{Class, ClassBounds, Letter, Limits, Mailbox, PostError};
use super::{label, text};
use crate::patience::Patience;
use crate::pulse::Doing;
use crate::simulation::{Bug, Fault, Rank, Settings, SimOutcome, SimRandom, Simulation, master};
use crate::{Cause, First, JoinOptions, Report, Secret, join};

/// How many exchanges an ordinary test runs.
const SCHEDULES: u64 = 100;
const SILENCE: Duration = Duration::from_secs(4);
const ORDINARY: u16 = 1;
/// The last letter of a sender and a class.
const LAST: u16 = 2;

/// Everything that follows from a seed.
#[derive(Clone, Debug)]
struct MailPlan {
    seed: u64,
    size: usize,
    limits: Limits,
    /// What each rank posts, in order: to whom, which class, how many bytes, and how long it rests before.
    posts: Vec<Vec<(usize, Class, usize, Duration)>>,
    /// How long each rank rests before it takes a letter, and how often, in a thousand.
    rests: Vec<(Duration, u32)>,
    settings: Settings,
    /// The ranks that may be reported.
    culprits: Vec<usize>,
}

/// How a rank ended.
#[derive(Clone, PartialEq, Debug)]
enum MailEnd {
    Fine,
    Wrong(String),
    Alone(String),
    Lost(Report),
}

impl From<PostError> for MailEnd {
    fn from(e: PostError) -> MailEnd {
        match e {
            PostError::Lost(report) => MailEnd::Lost(report),
            e => MailEnd::Wrong(e.to_string()),
        }
    }
}

impl MailPlan {
    fn new(seed: u64) -> MailPlan {
        let mut random = SimRandom::new(seed);
        let micros = Duration::from_micros;
        let size = random.within(2..6) as usize;
        let bounds = |random: &mut SimRandom, max: u64| ClassBounds {
            letter_bytes_max: 400_000,
            inbox_bytes_max: random.within(200..max) as usize,
            outbox_bytes_max: random.within(200..max) as usize,
        };
        let limits = Limits { urgent: bounds(&mut random, 2000), data: bounds(&mut random, 300_000) };
        let post = |random: &mut SimRandom| {
            let urgent = random.chance(400);
            let bytes = [0, 1, 200, 3000, 70_000, 300_000][random.within(0..6) as usize];
            let bytes = random.within(bytes / 2..bytes + 1) as usize;
            let rest = if random.chance(200) { micros(random.within(0..300_000)) } else { Duration::ZERO };
            let to = random.within(0..size as u64) as usize;
            match urgent {
                true => (to, Class::Urgent, bytes.min(1000), rest),
                false => (to, Class::Data, bytes, rest),
            }
        };
        let posts = (0..size).map(|_| (0..random.within(0..40)).map(|_| post(&mut random)).collect());
        let posts = posts.collect();
        let rests = (0..size)
            .map(|_| (micros(random.within(1..200_000)), [0, 100, 900][random.within(0..3) as usize]));
        let rests = rests.collect();
        let mut settings = Settings {
            delay: micros(20)..micros(random.within(50..5000)),
            losses: [0, 2, 20][random.within(0..3) as usize],
            lag: micros(random.within(10..20_000)),
            buffer_bytes: random.within(4 << 10..128 << 10) as usize,
            time_max: Duration::from_secs(3000),
            ..Settings::default()
        };
        let mut plan =
            MailPlan { seed, size, limits, posts, rests, settings: settings.clone(), culprits: vec![] };
        let at = |random: &mut SimRandom| micros(random.within(50_000..2_000_000));
        let short = micros(random.within(0..1_000_000));
        for _ in 0..random.within(0..3) {
            let rank = random.within(0..size as u64) as usize;
            let fault = match random.within(0..3) {
                0 => Fault::Pause { rank, time: short },
                1 => Fault::PauseMain { rank, time: short },
                _ => Fault::Hold { ranks: vec![rank], time: short / 2 },
            };
            settings.faults.push((at(&mut random), fault));
        }
        let rank = random.within(0..size as u64) as usize;
        let other = (rank + random.within(1..size as u64) as usize) % size;
        let long = SILENCE + Duration::from_secs(4);
        let large = match random.within(0..10) {
            0 | 1 => Some((vec![rank], Fault::Kill { rank })),
            2 => Some((vec![rank], Fault::Vanish { rank })),
            3 => Some((vec![rank], Fault::Pause { rank, time: long })),
            // Of rank 0 the first connection is the one of the control plane.
            4 | 5 => {
                let nth = usize::from(rank.min(other) == 0) + random.within(0..2) as usize;
                Some((vec![rank, other], Fault::Cut { one: rank, other, nth }))
            }
            // The job goes on behind rank 0's back, but these two never reach each other.
            6 if rank.min(other) > 0 => Some((vec![rank, other], Fault::Part { one: rank, other })),
            _ => None,
        };
        if let Some((culprits, fault)) = large {
            plan.culprits = culprits;
            let when = if matches!(fault, Fault::Part { .. }) { Duration::ZERO } else { at(&mut random) };
            settings.faults.push((when, fault));
        }
        plan.settings = settings;
        plan
    }

    fn run(&self) -> SimOutcome<MailEnd> {
        let plan = self.clone();
        Simulation::new(self.seed, self.settings.clone())
            .run(self.size, move |rank| live(&plan, &rank).err().unwrap_or(MailEnd::Fine))
    }

    fn judge(&self, outcome: &SimOutcome<MailEnd>) -> Result<(), String> {
        if let Some(failure) = &outcome.failure {
            return Err(failure.clone());
        }
        for (rank, end) in outcome.results.iter().enumerate() {
            if let Some(MailEnd::Wrong(what)) = end {
                return Err(format!("rank {rank}: {what}"));
            }
        }
        let mut said = None;
        for (rank, end) in outcome.results.iter().enumerate() {
            let culprit = self.culprits.contains(&rank);
            match end {
                Some(MailEnd::Fine) => {}
                None if culprit => {}
                Some(MailEnd::Lost(_)) if self.culprits == [rank] => {}
                // What happened to a rank while it joined.
                Some(MailEnd::Alone(_)) if !self.culprits.is_empty() => {}
                Some(MailEnd::Lost(report)) if self.blames(report) => {
                    let says = (report.rank, discriminant(&report.cause));
                    if *said.get_or_insert(says) != says {
                        return Err(format!("rank {rank} says something else than those before: {report}"));
                    }
                }
                end => return Err(format!("rank {rank}: {end:?}")),
            }
        }
        Ok(())
    }

    fn blames(&self, report: &Report) -> bool {
        let parted = self.settings.faults.iter().any(|(_, fault)| matches!(fault, Fault::Part { .. }));
        match &report.cause {
            // A call that does not get through is not a fault: the job stalls, and some rank is named for it.
            Cause::Stalled { .. } => parted,
            Cause::Gone | Cause::Silent { .. } | Cause::Unreachable { .. } => {
                self.culprits.contains(&report.rank)
            }
            Cause::Disagrees { .. } | Cause::Failed { .. } | Cause::Damaged { .. } => false,
        }
    }
}

/// What a rank does: its first thread posts, another one takes.
fn live(plan: &MailPlan, rank: &Rank) -> Result<(), MailEnd> {
    let secret = Secret::from_text(&"5e".repeat(32)).expect("64 hexadecimal digits");
    let mut options = JoinOptions::new(rank.rank, rank.size, master(), secret);
    options.system = rank.system.clone();
    options.patience = Patience { silence: SILENCE, stall: Duration::from_secs(90) };
    options.first = First::NoPairs;
    options.host_key = Some(format!("host {}", rank.rank));
    let joined = join(options).map_err(|e| MailEnd::Alone(e.to_string()))?;
    let control = joined.control.clone();
    let mailbox = Arc::new(
        joined.mailbox(3, &(0..joined.size).collect::<Vec<_>>(), plan.limits).expect("files to wait for"),
    );
    let taken = Arc::new(Mutex::new(None));
    let (theirs, filled, its_plan, its_rank) = (mailbox.clone(), taken.clone(), plan.clone(), rank.clone());
    let body = move || *filled.lock().unwrap() = Some(take(&its_plan, &its_rank, &theirs));
    let taker = rank.system.spawn("taker", Box::new(body)).expect("a thread");
    let posted = post(plan, rank, &mailbox, |n| control.pulse().at(n, Doing::Send));
    rank.system.join(taker).expect("what a taker finds wrong it returns");
    let taken = taken.lock().unwrap().take().expect("the taker has ended");
    let done = posted.and(taken).and_then(|()| mailbox.close().map_err(MailEnd::Lost));
    match done {
        Ok(()) => control.goodbye().map_err(MailEnd::Lost),
        Err(end) => {
            // As the program does: the others are told why this one ends.
            if let MailEnd::Lost(report) = &end {
                control.fail(&report.to_string());
            }
            Err(end)
        }
    }
}

fn post(plan: &MailPlan, rank: &Rank, mailbox: &Mailbox, mut pulse: impl FnMut(u64)) -> Result<(), MailEnd> {
    let me = rank.rank;
    let mut next = vec![[0; 2]; plan.size];
    let last = (0..plan.size).flat_map(|to| Class::ALL.map(|class| (to, class, 1, Duration::ZERO, LAST)));
    let ordinary = plan.posts[me].iter().map(|&(to, class, bytes, rest)| (to, class, bytes, rest, ORDINARY));
    for (done, (to, class, bytes, rest, kind)) in ordinary.chain(last).enumerate() {
        if rest > Duration::ZERO {
            rank.sleep(rest);
        }
        let n = &mut next[to][class as usize];
        mailbox.post(to, class, label(kind, *n), text(me, to, class, *n, bytes))?;
        *n += 1;
        pulse(done as u64);
        for class in Class::ALL {
            let ClassBounds { outbox_bytes_max, .. } = plan.limits.of(class);
            held(plan, outbox_bytes_max, mailbox.held_bytes(class).1, "posted")?;
        }
    }
    Ok(())
}

/// Takes until the last letter of each sender and class has come.
fn take(plan: &MailPlan, rank: &Rank, mailbox: &Mailbox) -> Result<(), MailEnd> {
    let mut random = SimRandom::new(plan.seed ^ rank.rank as u64);
    let (rest, often) = plan.rests[rank.rank];
    let mut next = vec![[0; 2]; plan.size];
    let mut n_open = 2 * plan.size;
    while n_open > 0 {
        if random.chance(often) {
            rank.sleep(rest);
        }
        for class in Class::ALL {
            let ClassBounds { inbox_bytes_max, .. } = plan.limits.of(class);
            held(plan, inbox_bytes_max, mailbox.held_bytes(class).0, "held")?;
        }
        let letter = mailbox.take().map_err(MailEnd::Lost)?;
        let letter = letter.ok_or_else(|| MailEnd::Wrong("it was not closed".into()))?;
        n_open -= usize::from(letter.label.kind == LAST);
        check(rank.rank, &letter, &mut next[letter.from][letter.class as usize]).map_err(MailEnd::Wrong)?;
    }
    Ok(())
}

fn check(me: usize, letter: &Letter, next: &mut u64) -> Result<(), String> {
    let n = letter.label.ticket;
    if n != *next || letter.label.place != !n {
        return Err(format!("letter {n} of rank {} instead of {next}", letter.from));
    }
    if letter[..] != text(letter.from, me, letter.class, n, letter.len())[..] {
        return Err(format!("letter {n} of rank {} holds something else", letter.from));
    }
    *next += 1;
    Ok(())
}

/// For each other rank at most the bound, or one letter.
fn held(plan: &MailPlan, max: usize, held: usize, what: &str) -> Result<(), MailEnd> {
    let longest = plan.posts.iter().flatten().map(|post| post.2).max().unwrap_or(1).max(1) + 128;
    let allowed = plan.size * max.max(longest);
    if held > allowed {
        return Err(MailEnd::Wrong(format!("{held} bytes are {what}; at most {allowed} are allowed")));
    }
    Ok(())
}

/// The first exchanges of a range that do not end as they must, at most `most`.
fn wrong(seeds: std::ops::Range<u64>, most: usize, bug: Option<Bug>) -> Vec<String> {
    let judged = seeds.filter_map(|seed| {
        let mut plan = MailPlan::new(seed);
        plan.settings.bug = bug;
        let outcome = plan.run();
        let why = plan.judge(&outcome).err()?;
        Some(format!("SEED={seed}: {why}\n{:?}\n{plan:?}", outcome.results))
    });
    judged.take(most).collect()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn exchanges() {
    if let Some(seed) = number("SEED") {
        let plan = MailPlan::new(seed);
        let outcome = plan.run();
        println!("{plan:#?}\n{}\n{:#?}", outcome.trace, outcome.results);
        return plan.judge(&outcome).unwrap();
    }
    let found = wrong(0..number("SCHEDULES").unwrap_or(SCHEDULES), 20, None);
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

/// Each bug is found within this many exchanges.
#[test]
fn mistakes_are_found() {
    let bugs = [
        Bug::ReadsWithoutRoom,
        Bug::ForgetsRoom,
        Bug::ClosesAtOnce,
        Bug::Doubles,
        Bug::Drops,
        Bug::Overtakes,
        Bug::JudgesAlone,
    ];
    for bug in bugs {
        let found = wrong(0..SCHEDULES, 1, Some(bug));
        let first = found.first().unwrap_or_else(|| panic!("{bug:?} is not found in {SCHEDULES} exchanges"));
        println!("{bug:?}: {}", first.lines().next().unwrap_or_default());
    }
}
