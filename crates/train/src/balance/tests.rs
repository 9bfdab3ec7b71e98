use super::*;

/// Random numbers of a seed: SplitMix64.
struct BalanceRandom(u64);

impl BalanceRandom {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.next()).ln()).sqrt() * (std::f64::consts::TAU * self.next()).cos()
    }
}

/// How steps on a simulated machine go wrong.
#[derive(Clone, Copy, Debug)]
struct Noise {
    /// From step to step, relative.
    jitter: f64,
    /// The share of steps in which something else takes the core for up to ten steps' worth.
    hiccups: f64,
    /// What comes and goes over some twenty steps, relative: other processes.
    drift: f64,
}

const QUIET: Noise = Noise { jitter: 0.02, hiccups: 0.005, drift: 0.0 };
/// Steps of a millisecond on an idle machine.
const SHORT: Noise = Noise { jitter: 0.15, hiccups: 0.03, drift: 0.05 };
/// The same on a machine that does something else too.
const BUSY: Noise = Noise { jitter: 0.3, hiccups: 0.1, drift: 0.15 };

/// A simulated job.
struct Simulation {
    units: usize,
    noise: Noise,
    /// Work of a rank that does not depend on its units, in units.
    fixed: f64,
    /// Seconds of a unit at full speed.
    unit_s: f64,
    steps: u64,
    seed: u64,
}

/// What became of it.
struct BalanceOutcome {
    /// The step and the shares of each change.
    changes: Vec<(u64, Vec<usize>)>,
    counts: Vec<usize>,
    /// What all steps took, and what they would have taken without a change.
    seconds: [f64; 2],
}

impl Simulation {
    fn new(units: usize, noise: Noise, steps: u64, seed: u64) -> Simulation {
        Simulation { units, noise, fixed: 0.0, unit_s: 1e-4, steps, seed }
    }

    /// Runs it on ranks whose speed at a step is `speed(step)`.
    fn run(&self, ranks: usize, speed: impl Fn(u64) -> Vec<f64>) -> BalanceOutcome {
        let mut random = BalanceRandom(self.seed);
        let mut balancer = Balancer::new(counts(self.units, &vec![1.0; ranks]), "samples");
        let (mut timings, mut drift) = (vec![Timings::with_room(); ranks], vec![0.0; ranks]);
        let equal = balancer.counts().to_vec();
        let (mut changes, mut seconds) = (Vec::new(), [0.0; 2]);
        for step in 1..=self.steps {
            let (speeds, mut longest) = (speed(step), [0.0f64; 2]);
            for r in 0..ranks {
                // The deviation stays what `drift` says; a twentieth is new in each step.
                drift[r] = 0.95f64.sqrt() * drift[r] + 0.05f64.sqrt() * self.noise.drift * random.normal();
                let mut slow = (drift[r] + self.noise.jitter * random.normal()).exp() / speeds[r];
                if random.next() < self.noise.hiccups {
                    slow *= 1.0 + 10.0 * random.next();
                }
                let of = |n: usize| (n as f64 + self.fixed) * self.unit_s * slow;
                timings[r].note(balancer.counts()[r], of(balancer.counts()[r]));
                longest = [longest[0].max(of(balancer.counts()[r])), longest[1].max(of(equal[r]))];
            }
            seconds = [seconds[0] + longest[0], seconds[1] + longest[1]];
            if step.is_multiple_of(EVERY_STEPS) {
                let look = timings.iter_mut().map(Timings::take).collect();
                // Trials are part of how a share is given back.
                if balancer.look(look, self.steps - step, 0.0, &|_| true).is_some_and(|s| s.said.is_some()) {
                    changes.push((step, balancer.counts().to_vec()));
                }
            }
        }
        BalanceOutcome { changes, counts: balancer.counts().to_vec(), seconds }
    }
}

#[test]
fn on_equal_ranks_shares_stay_equal() {
    for seed in 0..30 {
        for (ranks, units, noise) in [(2, 64, QUIET), (2, 128, SHORT), (4, 64, SHORT), (8, 256, SHORT)] {
            let job = Simulation { fixed: 20.0, ..Simulation::new(units, noise, 4000, seed) };
            let outcome = job.run(ranks, |_| vec![1.0; ranks]);
            assert_eq!(outcome.changes, [], "seed {seed}, {ranks} ranks, {units} units, {noise:?}");
        }
    }
}

/// Where other processes make ranks slow for dozens of steps at a time, a few looks may mislead: rarely, and at no cost.
#[test]
fn on_a_busy_machine_shares_rarely_change_and_nothing_is_lost() {
    let (mut changes, mut seconds) = (0, [0.0; 2]);
    for seed in 0..100 {
        let outcome = Simulation::new(128, BUSY, 8000, seed).run(2, |_| vec![1.0; 2]);
        changes += outcome.changes.len();
        let lost = outcome.seconds[0] / outcome.seconds[1];
        assert!(lost < 1.02, "seed {seed}: {lost}, {:?}", outcome.changes);
        seconds = [seconds[0] + outcome.seconds[0], seconds[1] + outcome.seconds[1]];
    }
    let lost = seconds[0] / seconds[1];
    println!("{changes} changes in 40000 looks, steps take {lost:.4} of equal shares'");
    assert!(changes <= 800 && lost < 1.005, "{changes} changes in 40000 looks, {lost} of equal shares");
}

#[test]
fn really_unequal_ranks_get_their_shares_within_tens_of_steps() {
    for seed in 0..50 {
        for noise in [QUIET, SHORT] {
            for (speeds, want) in [
                (vec![1.0, 0.5], vec![85, 43]),
                (vec![0.25, 1.0], vec![26, 102]),
                (vec![1.0, 1.0, 0.5, 1.0], vec![37, 37, 18, 36]),
                (vec![1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.25], vec![18, 18, 18, 18, 17, 17, 17, 5]),
            ] {
                let outcome = Simulation::new(128, noise, 400, seed).run(speeds.len(), |_| speeds.clone());
                let what = format!("seed {seed}, {speeds:?}, {noise:?}: {:?}", outcome.changes);
                assert!(outcome.changes.first().is_some_and(|(step, _)| *step <= 60), "{what}");
                assert!(outcome.changes.len() <= 3, "{what}");
                let near = outcome.counts.iter().zip(&want).all(|(a, b)| a.abs_diff(*b) <= 3 + b / 5);
                assert!(near && outcome.counts.iter().sum::<usize>() == 128, "{what}, not {want:?}");
            }
        }
    }
}

/// Work that does not depend on samples makes a rank look slower the fewer samples it has.
#[test]
fn shares_come_near_their_best_where_half_of_a_step_is_fixed_work() {
    for seed in 0..50 {
        let job = Simulation { fixed: 64.0, ..Simulation::new(128, SHORT, 2000, seed) };
        let outcome = job.run(2, |_| vec![1.0, 0.5]);
        // 64 + n = 2 (64 + 128 - n): 107 and 21 would be done together.
        let step = |n: &[usize]| (64.0 + n[0] as f64).max(2.0 * (64.0 + n[1] as f64));
        let (took, best) = (step(&outcome.counts), step(&[107, 21]));
        assert!(took < 1.2 * best, "seed {seed}: {:?}: {took} and not {best}", outcome.changes);
        assert!(outcome.changes.len() <= 5, "seed {seed}: {:?}", outcome.changes);
    }
}

#[test]
fn a_change_of_speed_in_the_middle_is_followed() {
    for seed in 0..100 {
        for noise in [QUIET, SHORT] {
            let job = Simulation::new(128, noise, 3000, seed);
            let speeds = |step: u64| match step {
                0..1010 => vec![1.0, 1.0],
                1010..2010 => vec![1.0, 0.4],
                _ => vec![1.0, 1.0],
            };
            let BalanceOutcome { changes, counts, .. } = job.run(2, speeds);
            let what = format!("seed {seed}, {noise:?}: {changes:?}");
            let within = |first: u64| changes.iter().any(|(step, _)| (first..=first + 110).contains(step));
            assert!(within(1010) && within(2010), "{what}");
            assert!(changes.iter().all(|(step, _)| *step > 1010) && changes.len() <= 6, "{what}");
            assert!(counts[0].abs_diff(64) <= 8, "{what}");
        }
    }
}

/// A process that may use a part of its core only, as a cgroup's quota sees to it, with steps of a tenth of a second: in one step it
/// needs `units` times `unit_s` of its core, and gets no more than `quota` of the time that the step takes.
#[test]
fn a_rank_that_is_held_to_a_quarter_of_its_core_stays_near_its_best_and_gets_its_share_back() {
    let (unit_s, units, lifted) = (2e-3, 128usize, 400u64);
    let mut balancer = Balancer::new(vec![64, 64], "samples");
    let (mut timings, mut since) = (vec![Timings::with_room(); 2], (0u64, 0.0));
    let (mut seconds, mut first, mut back) = ([0.0; 2], None, None);
    let mut random = BalanceRandom(5);
    let mut lines = Vec::new();
    for step in 1..=lifted + 60 {
        let quota = if step <= lifted { 0.25 } else { 1.0 };
        let counts = balancer.counts().to_vec();
        let mut jitter = || (0.03 * random.normal()).exp();
        let (fast, slow) = (counts[0] as f64 * unit_s * jitter(), counts[1] as f64 * unit_s * jitter());
        // Held back only if it needs more of its core than it may use while the other computes.
        let slow = if slow > quota * fast { slow / quota } else { slow };
        timings[0].note(counts[0], fast);
        timings[1].note(counts[1], slow);
        let took = fast.max(slow);
        if step <= lifted {
            seconds = [seconds[0] + took, seconds[1] + 64.0 * unit_s / quota];
        }
        since = (since.0 + 1, since.1 + took);
        if is_due(since.0, since.1) {
            since = (0, 0.0);
            let look = timings.iter_mut().map(Timings::take).collect();
            if let Some(shift) = balancer.look(look, 10_000, 0.02, &|_| true) {
                lines.extend(shift.said.map(|said| (step, said)));
            }
        }
        let slow_has = balancer.counts()[1];
        first = first.or((slow_has <= units / 3).then_some(step));
        back = back.or((step > lifted && slow_has >= 60).then(|| step - lifted));
    }
    let won = seconds[1] / seconds[0];
    println!(
        "{won:.2} times as fast as with equal shares; cut at step {first:?}, back {back:?} steps later: {lines:?}"
    );
    assert!(won > 1.9, "{won}: 2.5 would be ideal");
    assert!(first.is_some_and(|step| step <= 12), "{first:?}");
    assert!(back.is_some_and(|steps| steps <= 20), "{back:?}");
    assert!(lines.len() <= 6, "trials are not reported: {lines:?}");
}

/// A look in which every block of a rank says the same.
fn look(seconds: &[f64]) -> Look {
    seconds.iter().map(|s| [*s; BLOCKS]).collect()
}

fn stakes(looks_min: usize) -> Stakes {
    Stakes { looks_min, steps_left: 1000, cost_s: 0.0, scatter: SCATTER, gain_min: GAIN_MIN }
}

#[test]
fn decisions_by_hand() {
    let even = [10, 10, 10];
    let check = |now: &[usize], seconds: &[f64], looks: usize, want: Result<(&[usize], f64), &str>| {
        let looks = vec![look(seconds); looks];
        match (decide(now, &looks, stakes(2)), want) {
            (Decision::Change { counts, gain, .. }, Ok((want, want_gain))) => {
                assert_eq!(counts, want);
                assert!((gain - want_gain).abs() < 1e-9, "{gain}");
            }
            (Decision::Stay(reason), Err(want)) => {
                assert!(format!("{reason:?}").starts_with(want), "{reason:?} and not {want}");
            }
            (got, want) => panic!("{got:?} and not {want:?}"),
        }
    };
    check(&even, &[1.0, 1.0, 1.0], 4, Err("Same"));
    // Ten samples at half the speed took 20; twelve and six take 12.
    check(&even, &[1.0, 2.0, 1.0], 2, Ok((&[12, 6, 12], 0.4)));
    check(&even, &[1.0, 2.0, 1.0], 1, Err("Unknown"));
    check(&[12, 6, 12], &[1.0, 2.0, 1.0], 4, Err("Same"));
    check(&[20, 5, 5], &[1.0, 1.0, 1.0], 2, Ok((&[10, 10, 10], 0.5)));
    check(&even, &[0.0, 0.0, 0.0], 4, Err("Unknown"));
    // One that had nothing to do is tried, and one that is very slow keeps something to be measured by.
    check(&[15, 15, 0], &[1.0, 1.0, 0.0], 2, Ok((&[10, 10, 10], 1.0 / 3.0)));
    check(&even, &[1.0, 1.0, 100.0], 2, Ok((&[15, 14, 1], 0.9)));
    // More ranks than samples.
    check(&[1, 1, 0, 0], &[1.0, 1.0, 0.0, 0.0], 4, Err("Same"));
}

#[test]
fn small_gains_are_left_alone_and_others_wait_until_they_are_certain() {
    let needed = |seconds: &[f64]| {
        (1..=LOOKS_MAX).find(|n| {
            let looks = vec![look(seconds); *n];
            matches!(decide(&[500, 500], &looks, stakes(2)), Decision::Change { .. })
        })
    };
    assert_eq!(needed(&[1.0, 2.0]), Some(2));
    assert_eq!(needed(&[1.0, 1.2]), Some(12));
    assert_eq!(needed(&[1.0, 1.08]), None);
    // The same mean, but looks do not agree.
    let looks = [look(&[1.0, 2.5]), look(&[1.0, 0.9]), look(&[1.0, 2.5]), look(&[1.0, 0.9])];
    assert!(matches!(decide(&[50, 50], &looks, stakes(2)), Decision::Stay(Reason::Small { .. })));
}

#[test]
fn a_change_that_costs_more_than_it_wins_is_not_made() {
    let looks = vec![look(&[1e-3, 2e-3]); 2];
    let at = |steps_left, cost_s| decide(&[10, 10], &looks, Stakes { steps_left, cost_s, ..stakes(2) });
    // A third of steps of 20 ms.
    assert!(matches!(at(1000, 6.0), Decision::Change { .. }));
    assert!(matches!(at(1000, 7.0), Decision::Stay(Reason::Dear { .. })));
    assert!(matches!(at(10, 0.5), Decision::Stay(Reason::Dear { .. })));
    assert!(matches!(at(1_000_000, 7.0), Decision::Stay(Reason::Dear { .. })), "speeds do not stay for ever");
    assert!(matches!(at(0, 0.0), Decision::Stay(Reason::Dear { .. })), "nothing is left to win in");
}

#[test]
fn a_change_that_did_not_win_makes_the_next_one_wait() {
    let mut balancer = Balancer::new(vec![50, 50], "samples");
    let mut say = |seconds: &[f64]| balancer.look(look(seconds), 1000, 0.0, &|_| true);
    assert_eq!(say(&[1.0, 2.0]), None);
    let said = say(&[1.0, 2.0]).unwrap().said.unwrap();
    assert_eq!(said, "ranks take 67, 33 samples a step from now on, by their speed; that wins 33 %");
    // It was something else: the first rank is the slow one now, and a step takes longer than before.
    let later = (1..=8).find(|_| say(&[2.0, 1.0]).is_some());
    assert_eq!(later, Some(4), "twice as many looks");
}

#[test]
fn a_hiccup_does_not_show() {
    let mut timings = Timings::with_room();
    for step in 0..EVERY_STEPS {
        timings.note(1, if step % 5 == 2 { 7.0 } else { 1.0 });
    }
    assert_eq!(timings.take(), [1.0; BLOCKS]);
    assert_eq!(timings.take(), [0.0; BLOCKS], "nothing was noted since");
    timings.note(0, 1.0);
    timings.note(3, f64::NAN);
    timings.note(2, 1.0);
    assert!(timings.take().iter().all(|t| *t == 0.0 || *t == 0.5));
}
