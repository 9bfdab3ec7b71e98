//! Ranks that take steps by themselves and then average their weights, against a twin: lone engines, one for each rank, whose weights are
//! averaged here in plain Rust. With two ranks sums have one order, so the bits are the same.

use std::ops::Range;
use std::sync::Arc;

use polyreme_exec::{Counted, Engine, ExecError, Feed, Inputs, Kept, Options, Slot, StepArgs, Totals};
use polyreme_graph::{BlockCodec, DType, Microbatch, Moments, Optimizer, Program, WireCodec};
use polyreme_kernels::tally::Tally;
use polyreme_parallel::tree::run_of;
use polyreme_parallel::{
    DriftBound, FragmentTurns, LocalSteps, Mesh, OuterStep, Plan, StepShape, Training, compile, fragments,
    schedule, share_own, take_back_own,
};

use crate::ranks::{BATCH, Case, Over, feed, on_ranks, step_graph};

/// Steps of each run between two exchanges.
const RUNS: [usize; 3] = [5, 1, 2];

#[derive(Clone, Copy, Debug)]
struct Local {
    ranks: usize,
    over: Over,
    outer: Option<OuterStep>,
    microbatches: usize,
    moments: DType,
    clip: Option<f64>,
    /// Whether each rank keeps the last layer for itself.
    own: bool,
    /// The format in which differences of weights travel.
    wire: Option<WireCodec>,
    /// What makes steps fewer.
    drift: Option<DriftBound>,
    /// Parts of the model that take turns.
    turns: Option<FragmentTurns>,
    /// A step, counted over all runs, in which rank 1 is fed a number that is not finite.
    spoilt: Option<usize>,
}

const PLAIN: Local = Local {
    ranks: 2,
    over: Over::Threads,
    outer: None,
    microbatches: 1,
    moments: DType::F32,
    clip: None,
    own: false,
    wire: None,
    drift: None,
    turns: None,
    spoilt: None,
};

/// Parameters that a rank may keep for itself. Their gradients are ready first, so without a rule they would be first in the arena.
const HEAD: &str = "b.";

impl Local {
    fn training(&self) -> Training {
        let optimizer = Optimizer::Adam(Moments::DEFAULT);
        Training { optimizer, moments: self.moments, clip: self.clip, ema: None, scaled: false }
    }

    /// The samples of each microbatch of a rank.
    fn cuts(&self, rank: usize) -> Vec<Range<usize>> {
        let part = run_of(BATCH, self.ranks, rank);
        let within = |k: usize| {
            let run = run_of(part.len(), self.microbatches, k);
            part.start + run.start..part.start + run.end
        };
        (0..self.microbatches).map(within).collect()
    }

    /// A program for each of these numbers of steps, over one body.
    fn programs(&self, plan: &Plan, rank: usize, steps: &[usize]) -> Vec<Program> {
        let (cuts, training) = (self.cuts(rank), self.training());
        let mut graph = step_graph(cuts[0].len(), true);
        for param in &mut graph.params {
            param.learning.own = self.own && param.name.starts_with(HEAD);
        }
        let body = Arc::new(compile(&graph, plan, &training, None).unwrap());
        let microbatches: Vec<_> =
            cuts.iter().map(|r| Microbatch { body: 0, first_sample: r.start }).collect();
        let program = |steps: &usize| {
            let shape = StepShape::rounds(&microbatches, microbatches.len()).times(*steps);
            schedule(plan, &training, std::slice::from_ref(&body), &shape)
        };
        steps.iter().map(program).collect()
    }

    fn steps(&self, rank: usize, first: usize) -> OwnSteps {
        OwnSteps { cuts: self.cuts(rank), first, spoilt: self.spoilt.filter(|_| rank == 1) }
    }
}

struct OwnSteps {
    cuts: Vec<Range<usize>>,
    first: usize,
    spoilt: Option<usize>,
}

impl Feed<ExecError> for OwnSteps {
    fn load(&mut self, microbatch: usize, inputs: &mut Inputs) -> Result<Counted, ExecError> {
        let (step, k) = (self.first + microbatch / self.cuts.len(), microbatch % self.cuts.len());
        feed(inputs, step, self.cuts[k].clone());
        if self.spoilt == Some(step) {
            inputs.f32("x")?[0] = f32::NAN;
        }
        let mut samples = Tally::default();
        self.cuts[k].clone().for_each(|i| samples.note(step as u64, i as u64));
        Ok(Counted { weight: self.cuts[k].len() as f64 / BATCH as f64, samples })
    }

    fn args(&mut self, step: usize) -> Option<StepArgs> {
        let lr = 0.05 / (1 + self.first + step) as f32;
        Some(StepArgs { lr, extra: [1.0, 0.5], ..StepArgs::default() })
    }
}

/// What a rank ends with: parameters, states and first moments; and by step its loss and samples.
type Ended = (Vec<Vec<f32>>, Vec<(f64, Tally)>);

/// Parameters and residual after a run.
type AfterRun = [Vec<f32>; 2];

fn options() -> Options {
    Options { seed: 3, ..Options::threads(1) }
}

fn kept(engine: &Engine) -> Vec<Vec<f32>> {
    [Kept::Params, Kept::States, Kept::Moment1].map(|what| engine.kept_wide(what)).to_vec()
}

fn ranks(local: Local) -> Vec<Result<Ended, ExecError>> {
    ranks_by_run(local).into_iter().map(|outcome| outcome.map(|(ended, _)| ended)).collect()
}

fn ranks_by_run(local: Local) -> Vec<Result<(Ended, Vec<AfterRun>), ExecError>> {
    let case = Case {
        ranks: local.ranks,
        plan: Plan::alone(),
        optimizer: local.training().optimizer,
        moments: local.moments,
        clip: local.clip,
        over: local.over,
        microbatches: local.microbatches,
        norm: true,
        graph: step_graph,
    };
    on_ranks(&case, |comm| {
        let rank = comm.rank();
        let meets = Some(LocalSteps { outer: local.outer, drift: local.drift, turns: local.turns });
        // Where ranks share memory, weights are their own all the same.
        let (mesh, wire) = (Mesh::data(local.ranks), local.wire);
        let plan = Plan { mesh, rank, wire, local: meets, ..Plan::alone() };
        let plan = plan.kept(None, local.over != Over::Sockets);
        let mut programs = local.programs(&plan, rank, &RUNS).into_iter();
        let mut engine = Engine::join(programs.next().unwrap(), options(), comm)?;
        programs.try_for_each(|program| engine.add(program).map(drop))?;
        let (mut totals, mut runs, mut first) = (Vec::new(), Vec::new(), 0);
        for number in 0..RUNS.len() {
            engine.select(number);
            let mut feed = local.steps(rank, first);
            let args = feed.args(0).unwrap();
            let last = engine.step_with(&mut feed, args)?;
            let n = local.ranks as f64;
            assert_eq!(last.extra, [n, n / 2.0], "the caller's numbers are those of all ranks");
            let of = |t: &Totals| (t.loss, t.samples);
            totals.extend(engine.earlier_steps().iter().map(of));
            totals.push(of(&last));
            first += engine.earlier_steps().len() + 1;
            assert_eq!(engine.steps_done(), first as u64);
            runs.push([Kept::Params, Kept::Residual].map(|what| engine.kept(what).to_vec()));
        }
        if local.own {
            one_model(&mut engine);
        }
        Ok(((kept(&engine), totals), runs))
    })
}

/// Where one model is asked for, the mean of what ranks keep for themselves is in it, and then each has its own again, which can be gathered and scattered.
fn one_model(engine: &mut Engine) {
    let (ranks, len) = (engine.role().ranks, engine.own_len());
    assert_eq!(len, engine.own_slots().iter().map(|slot| slot.range.len().next_multiple_of(16)).sum());
    let at = engine.kept(Kept::Params).len() - len;
    let body = engine.program().bodies[0].clone();
    let programs = [share_own(ranks, &body), take_back_own(&body)].map(|p| engine.add(p).unwrap());
    let all = engine.gather_own().unwrap();
    let mine = engine.kept(Kept::Params).to_vec();
    engine.select(programs[0]);
    engine.run().unwrap();
    let shared = engine.kept(Kept::Params).to_vec();
    assert_eq!(shared[..at], mine[..at]);
    for (i, x) in shared[at..].iter().enumerate().filter(|_| !all.is_empty()) {
        let sum: f32 = (0..ranks).map(|rank| all[rank * len + i]).sum();
        assert!((x - sum / ranks as f32).abs() < 1e-6, "{x} is the mean");
    }
    engine.select(programs[1]);
    engine.run().unwrap();
    assert_eq!(engine.kept(Kept::Params), mine);
    engine.kept_mut(Kept::Params)[at..].fill(0.0);
    engine.scatter_own((!all.is_empty()).then_some(&all[..])).unwrap();
    assert_eq!(engine.kept(Kept::Params), mine);
}

fn mean(of: &[Vec<f32>]) -> Vec<f32> {
    let mut mean = of[0].clone();
    for other in &of[1..] {
        mean.iter_mut().zip(other).for_each(|(a, b)| *a += b);
    }
    mean.iter_mut().for_each(|x| *x /= of.len() as f32);
    mean
}

/// The mean of weights; where codes of differences travel that lose nothing, by way of these.
fn agreed(all: &[Vec<f32>], before: &[f32], coded: bool) -> Vec<f32> {
    if !coded {
        return mean(all);
    }
    let apart = |w: &Vec<f32>| w.iter().zip(before).map(|(w, b)| w - b).collect();
    let mut mean = mean(&all.iter().map(apart).collect::<Vec<_>>());
    mean.iter_mut().zip(before).for_each(|(x, b)| *x += b);
    mean
}

fn outer_step(mean: &mut [f32], before: &[f32], velocity: &mut [f32], OuterStep { lr, momentum }: OuterStep) {
    let (lr, momentum) = (lr as f32, momentum as f32);
    for ((w, from), v) in mean.iter_mut().zip(before).zip(velocity) {
        let g = from - *w;
        *v = momentum * *v + g;
        *w = from - lr * (g + momentum * *v);
    }
}

/// The same with lone engines.
fn twin(local: Local) -> Vec<Ended> {
    let engine = |rank: usize| {
        let program = local.programs(&Plan::alone(), rank, &[1]).pop().unwrap();
        Engine::new(program, options()).unwrap()
    };
    let mut engines: Vec<Engine> = (0..local.ranks).map(engine).collect();
    let mut velocity = vec![0.0f32; engines[0].kept(Kept::Params).len()];
    let is_own = |slot: &Slot| local.own && slot.name.starts_with(HEAD);
    let own: Vec<Slot> = engines[0].param_slots().into_iter().filter(is_own).collect();
    let (mut totals, mut first, mut seen) = (Vec::new(), 0, None);
    let graph = engines[0].program().graph().clone();
    for steps in RUNS {
        let mut before = engines[0].kept(Kept::Params).to_vec();
        let mut way: Option<(usize, Range<usize>, Vec<Vec<f32>>)> = None;
        let (mut heard, mut done) = (None, 0);
        while done < steps && heard.is_none_or(|far: bool| !far) {
            let step = first + done;
            let (mut loss, mut weight, mut samples) = (0.0, 0.0, Tally::default());
            for (rank, engine) in engines.iter_mut().enumerate() {
                let mut feed = local.steps(rank, step);
                let args = feed.args(0).unwrap();
                let own = engine.step_with(&mut feed, args).unwrap();
                (loss, weight) = (loss + own.loss * own.weight, weight + own.weight);
                samples += own.samples;
            }
            totals.push((loss / weight, samples));
            done += 1;
            let begins =
                local.turns.and_then(|turns| turns.within(steps).find(|([begins, _], _)| *begins == done));
            let mut arrive = |engines: &mut [Engine], range: Range<usize>, sent: Vec<Vec<f32>>| {
                let mut new = agreed(&sent, &before[range.clone()], local.wire.is_some());
                if let Some(outer) = local.outer {
                    outer_step(&mut new, &before[range.clone()], &mut velocity[range.clone()], outer);
                }
                for (engine, sent) in engines.iter_mut().zip(&sent) {
                    let own = &mut engine.kept_mut(Kept::Params)[range.clone()];
                    let instant = own.iter().zip(sent).all(|(w, s)| w == s);
                    for ((w, g), s) in own.iter_mut().zip(&new).zip(sent) {
                        *w = if instant { *g } else { *w + (g - s) };
                    }
                }
                before[range].copy_from_slice(&new);
            };
            if let Some((_, range, sent)) = way.take_if(|(ends, ..)| *ends == done) {
                arrive(&mut engines, range, sent);
            }
            if let (Some(([_, ends], k)), Some(turns)) = (begins, local.turns) {
                let range = fragments(&graph, turns.fragments)[k].clone();
                let sent =
                    engines.iter().map(|engine| engine.kept(Kept::Params)[range.clone()].to_vec()).collect();
                match ends > done {
                    true => way = Some((ends, range, sent)),
                    false => arrive(&mut engines, range, sent),
                }
            }
            // What is seen after a step is heard after the next.
            heard = seen.take();
            if let Some(DriftBound { drift, look }) = local.drift
                && done.is_multiple_of(look)
            {
                let squares = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                let moved = |engine: &Engine| -> f64 {
                    let far: Vec<f32> =
                        engine.kept(Kept::Params).iter().zip(&before).map(|(a, b)| a - b).collect();
                    squares(&far)
                };
                let apart: f64 = engines.iter().map(moved).sum();
                seen = Some((apart / (local.ranks as f64 * squares(&before))).sqrt() > drift);
            }
        }
        seen = None;
        first += done;
        for what in [Kept::Params, Kept::States] {
            let all: Vec<Vec<f32>> = engines.iter().map(|engine| engine.kept(what).to_vec()).collect();
            let mut mean = match what {
                Kept::Params => agreed(&all, &before, local.wire.is_some()),
                _ => mean(&all),
            };
            if let (Kept::Params, Some(outer)) = (what, local.outer) {
                outer_step(&mut mean, &before, &mut velocity, outer);
            }
            for engine in &mut engines {
                let before = engine.kept(what).to_vec();
                engine.kept_mut(what).copy_from_slice(&mean);
                for slot in own.iter().filter(|_| what == Kept::Params) {
                    engine.kept_mut(what)[slot.range.clone()].copy_from_slice(&before[slot.range.clone()]);
                }
            }
        }
    }
    engines.iter().map(|engine| (kept(engine), totals.clone())).collect()
}

#[track_caller]
fn check(local: Local) {
    let got: Vec<Ended> = ranks(local).into_iter().map(Result::unwrap).collect();
    let want = twin(local);
    for (rank, ((got, totals), (want, twins))) in got.iter().zip(&want).enumerate() {
        for (what, (got, want)) in got.iter().zip(want).enumerate() {
            let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let same = got.iter().map(|x| x.to_bits()).eq(want.iter().map(|x| x.to_bits()));
            let fits = if local.ranks == 2 { same } else { far <= 1e-6 };
            assert!(fits && got.len() == want.len(), "{local:?}: {far} apart, arena {what} of rank {rank}");
        }
        for (got, want) in totals.iter().zip(twins) {
            assert!((got.0 - want.0).abs() < 1e-6 && got.1 == want.1, "{local:?}: {got:?} for {want:?}");
        }
        assert_eq!(totals.len(), twins.len());
    }
    assert_ne!(got[0].0[2], got[1].0[2], "each rank has moments of its own");
    assert_eq!(got[0].0[0] != got[1].0[0], local.own, "and parameters, if it is to keep some");
}

#[test]
fn ranks_by_themselves_are_lone_ranks_that_are_averaged() {
    let outer = Some(OuterStep { lr: 0.7, momentum: 0.9 });
    for over in [Over::Threads, Over::SharedMemory, Over::Sockets] {
        check(Local { over, ..PLAIN });
        check(Local { over, outer, microbatches: 2, clip: Some(0.1), ..PLAIN });
    }
    check(Local { outer, moments: DType::Bf16, ..PLAIN });
    check(Local { ranks: 3, outer, ..PLAIN });
}

#[test]
fn ranks_keep_parameters_for_themselves() {
    let outer = Some(OuterStep { lr: 0.7, momentum: 0.9 });
    for over in [Over::Threads, Over::SharedMemory, Over::Sockets] {
        check(Local { over, own: true, ..PLAIN });
    }
    check(Local { ranks: 3, own: true, outer, microbatches: 2, clip: Some(0.1), ..PLAIN });
}

#[test]
fn all_ranks_hear_of_a_loss_that_is_not_finite() {
    for spoilt in 0..RUNS.iter().sum() {
        for (rank, outcome) in ranks(Local { spoilt: Some(spoilt), ..PLAIN }).into_iter().enumerate() {
            let Err(ExecError::NotFinite { here, place, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!((here, place.is_some()), (rank == 1, rank == 1), "step {spoilt}");
        }
    }
}

/// Differences that travel coded: all ranks go on with the same weights, and what these lack of the mean is what ranks have kept. The twin takes the same
/// steps by itself, from the weights to which the ranks came.
#[track_caller]
fn check_coded(wire: WireCodec, ranks: usize) {
    let local = Local { ranks, over: Over::Sockets, wire: Some(wire), ..PLAIN };
    let got: Vec<Vec<AfterRun>> = ranks_by_run(local).into_iter().map(|outcome| outcome.unwrap().1).collect();
    let engine = |rank: usize| {
        let program = local.programs(&Plan::alone(), rank, &[1]).pop().unwrap();
        Engine::new(program, options()).unwrap()
    };
    let mut engines: Vec<Engine> = (0..ranks).map(engine).collect();
    let mut lost = vec![0.0f64; engines[0].kept(Kept::Params).len()];
    let (mut first, mut most) = (0, 0.0f64);
    for (run, steps) in RUNS.into_iter().enumerate() {
        let before = engines[0].kept(Kept::Params).to_vec();
        let mut sum = lost.clone();
        for (rank, engine) in engines.iter_mut().enumerate() {
            for step in first..first + steps {
                let mut feed = local.steps(rank, step);
                let args = feed.args(0).unwrap();
                engine.step_with(&mut feed, args).unwrap();
            }
            let moved = engine.kept(Kept::Params).iter().zip(&before).map(|(w, b)| f64::from(w - b));
            sum.iter_mut().zip(moved).for_each(|(sum, moved)| *sum += moved);
        }
        first += steps;
        let [weights, _] = &got[0][run];
        for rank in &got {
            let same = rank[run][0].iter().zip(weights).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{wire:?}: all read the same weights");
        }
        lost = (0..lost.len()).map(|i| got.iter().map(|rank| f64::from(rank[run][1][i])).sum()).collect();
        for (i, (w, b)) in weights.iter().zip(&before).enumerate() {
            let want = f64::from(*b) + (sum[i] - lost[i]) / ranks as f64;
            assert!((f64::from(*w) - want).abs() < 2e-6, "{wire:?}: {w} for {want}");
        }
        most = lost.iter().fold(most, |most, x| most.max(x.abs()));
        engines.iter_mut().for_each(|engine| engine.kept_mut(Kept::Params).copy_from_slice(weights));
    }
    let exact = wire == WireCodec::Blocks(BlockCodec::TopK { ppm: 1_000_000 });
    assert_eq!(most == 0.0, exact, "{wire:?} loses {most}");
}

#[test]
fn differences_of_weights_travel_coded() {
    for codec in BlockCodec::ALL.into_iter().chain([BlockCodec::TopK { ppm: 1_000_000 }]) {
        check_coded(WireCodec::Blocks(codec), 2);
    }
    check_coded(WireCodec::Blocks(BlockCodec::Int8), 3);
    check_coded(WireCodec::LowRank { rank: 2 }, 2);
}

/// Ranks that come too far leave the rest of their steps out, all at the same place.
#[test]
fn ranks_that_have_come_too_far_meet() {
    let outer = Some(OuterStep { lr: 0.7, momentum: 0.9 });
    let all: usize = RUNS.iter().sum();
    for (drift, look, n_steps) in [(1e-9, 1, 2 + 1 + 2), (1e-9, 2, 3 + 1 + 2), (1e9, 1, all)] {
        for over in [Over::Threads, Over::SharedMemory, Over::Sockets] {
            let local = Local { over, drift: Some(DriftBound { drift, look }), ..PLAIN };
            check(local);
            check(Local { outer, clip: Some(0.1), ..local });
            let steps = ranks(local).into_iter().map(|rank| rank.unwrap().1.len());
            assert!(steps.into_iter().all(|n| n == n_steps), "{drift} {look}");
        }
    }
    // A bound between what the first step does and what the first two do.
    let lens = |drift: f64| twin(Local { drift: Some(DriftBound { drift, look: 1 }), ..PLAIN })[0].1.len();
    let between = (1..200).map(|k| f64::from(k) * 0.01).find(|drift| (6..all).contains(&lens(*drift)));
    check(Local { drift: Some(DriftBound { drift: between.unwrap(), look: 1 }), ..PLAIN });
}

#[test]
fn parts_of_the_model_take_turns() {
    let outer = Some(OuterStep { lr: 0.7, momentum: 0.9 });
    for (fragments, every, overlap) in [(2, 2, 0), (2, 2, 1), (3, 3, 0), (3, 3, 1), (2, 4, 2)] {
        let turns = Some(FragmentTurns { fragments, every, overlap });
        check(Local { turns, ..PLAIN });
        for over in [Over::Threads, Over::SharedMemory, Over::Sockets] {
            check(Local { turns, over, outer, clip: Some(0.1), ..PLAIN });
        }
    }
    let turns = Some(FragmentTurns { fragments: 2, every: 2, overlap: 1 });
    check(Local { turns, own: true, outer, microbatches: 2, ..PLAIN });
    // A format that loses nothing, with turns and without.
    let wire = Some(WireCodec::Blocks(BlockCodec::TopK { ppm: 1_000_000 }));
    for (turns, outer) in [(None, None), (None, outer), (turns, None), (turns, outer)] {
        check(Local { turns, outer, wire, over: Over::Sockets, ..PLAIN });
    }
}
