//! Times of trials, by node, with one thread, with all, and with one on each core at the same time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Filled, Isa, Options, Pool, StepArgs, Timeline};
use polyreme_graph::{
    Body, Builder, DType, Graph, Init, Instr, MomentKind, Moments, Optimizer, Program, differentiate,
};
use polyreme_kernels::random;
use polyreme_sim::calibration::{TimePoint, TimeTable};
use polyreme_sim::work::{Work, WorkKind, of_instr, of_node};

use super::trials::{IDS, Trial};
use crate::bench::on_ranks;

/// How ranks are placed for a set of times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Variant {
    /// Threads of the rank.
    pub(super) threads: usize,
    /// How many ranks do the same at the same time.
    pub(super) ranks: usize,
}

/// What was measured for a variant: by kind and element size, the shapes and their times.
pub(super) type Found = BTreeMap<(WorkKind, bool), Vec<TimePoint>>;

/// How long a trial is repeated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repeats {
    pub(super) each: Duration,
    pub(super) runs_min: usize,
    pub(super) runs_max: usize,
}

/// Runs before those that count, when ranks meet.
const COLD_RUNS: usize = 5;

/// Runs all trials as a variant says.
pub(super) fn measure(
    trials: &[Trial],
    elements: &[usize],
    variant: Variant,
    isa: Isa,
    repeats: Repeats,
) -> Result<Found, ExecError> {
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..variant.ranks).map(|_| scope.spawn(|| keep_busy(trials, &done, isa))).collect();
        let found = own_times(trials, elements, variant, isa, repeats, &done);
        done.store(usize::MAX, Ordering::Release);
        for other in others {
            // A panic there is a bug, and is one here too.
            other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        found
    })
}

/// Two times of one shape that are further apart than this: another program used the machine during the longer one.
const APART: f64 = 1.2;

/// Adds what was measured once more: the mean of both times of a shape, or the shorter one if they are far apart.
pub(super) fn join(found: &mut Found, again: Found) {
    for (kind, points) in again {
        let known = found.entry(kind).or_default();
        for point in points {
            match known.iter_mut().find(|known| known.sizes == point.sizes) {
                Some(known) => {
                    let (least, most) = (known.us.min(point.us), known.us.max(point.us));
                    known.us = if most > APART * least { least } else { f64::midpoint(least, most) };
                }
                None => known.push(point),
            }
        }
    }
}

fn own_times(
    trials: &[Trial],
    elements: &[usize],
    variant: Variant,
    isa: Isa,
    repeats: Repeats,
    done: &AtomicUsize,
) -> Result<Found, ExecError> {
    let pool = Arc::new(Pool::new(variant.threads).map_err(|e| ExecError::Thread { why: e.to_string() })?);
    let options = Options { isa, pool: Some(pool), ..Options::threads(variant.threads) };
    let mut found = Found::new();
    for (number, trial) in trials.iter().enumerate() {
        let times = node_times(trial, &options, repeats)?;
        done.store(number + 1, Ordering::Release);
        take(trial, &times, &mut found);
    }
    for &n in elements {
        vectors(n, &options, repeats, &mut found)?;
        updates(n, &options, repeats, &mut found)?;
    }
    for points in found.values_mut() {
        points.sort_by(|a, b| a.sizes.partial_cmp(&b.sizes).expect("sizes are numbers"));
        points.dedup_by(|a, b| a.sizes == b.sizes);
    }
    Ok(found)
}

/// How long two ranks that compute the same for a millisecond and then meet wait for each other, as a share of it.
pub(super) fn unevenness(
    trials: &[Trial],
    isa: Isa,
    meetings: usize,
) -> Result<f64, Box<dyn std::error::Error + Send + Sync>> {
    type OwnAndAll = Result<(f64, f64), Box<dyn std::error::Error + Send + Sync>>;
    let of_rank = |mut comm: Comm| -> OwnAndAll {
        let mut engine = about_a_millisecond(trials, isa)?;
        for _ in 0..COLD_RUNS {
            engine.run()?;
            comm.barrier()?;
        }
        let (start, mut own) = (Instant::now(), Duration::ZERO);
        for _ in 0..meetings {
            let computing = Instant::now();
            engine.run()?;
            own += computing.elapsed();
            comm.barrier()?;
        }
        let all = start.elapsed();
        comm.finish()?;
        let each = |time: Duration| time.as_secs_f64() * 1e3 / meetings as f64;
        Ok((each(own), each(all)))
    };
    let seen = on_ranks(Comm::local(2), of_rank)?;
    let mean = |of: fn(&(f64, f64)) -> f64| seen.iter().map(of).sum::<f64>() / seen.len() as f64;
    let (own_ms, all_ms) = (mean(|times| times.0), mean(|times| times.1));
    let times = if own_ms > 1.0 { own_ms.sqrt() } else { own_ms };
    Ok(((all_ms - own_ms) / times.max(1e-3)).max(0.0))
}

/// An engine that runs for about a millisecond: the first trial that takes half of one, or else the last.
fn about_a_millisecond(trials: &[Trial], isa: Isa) -> Result<Engine, ExecError> {
    let mut found = engine(&trials[trials.len() - 1], Options { isa, ..Options::threads(1) })?;
    for trial in trials {
        let mut candidate = engine(trial, Options { isa, ..Options::threads(1) })?;
        candidate.run()?;
        let start = Instant::now();
        candidate.run()?;
        if start.elapsed() > Duration::from_micros(500) {
            found = candidate;
            break;
        }
    }
    Ok(found)
}

/// Does what the measured rank does until it is done with it.
fn keep_busy(trials: &[Trial], done: &AtomicUsize, isa: Isa) -> Result<(), ExecError> {
    for (number, trial) in trials.iter().enumerate() {
        if done.load(Ordering::Acquire) > number {
            continue;
        }
        let mut engine = engine(trial, Options { isa, ..Options::threads(1) })?;
        while done.load(Ordering::Acquire) <= number {
            engine.run()?;
        }
    }
    // Then it is the memory that ranks share.
    let mut engine =
        Engine::new(vector_program(BUSY_ELEMENTS, true, REPEATED).0, Options { isa, ..Options::threads(1) })?;
    while done.load(Ordering::Acquire) != usize::MAX {
        engine.run()?;
    }
    Ok(())
}

fn engine(trial: &Trial, options: Options) -> Result<Engine, ExecError> {
    let mut engine = Engine::new(Program::gradients(&trial.step), options)?;
    let inputs = &trial.step.inputs;
    let integers = inputs.iter().filter(|i| trial.step.value(i.value).dtype == DType::I32);
    for input in integers {
        for (i, id) in engine.input_i32(&input.name)?.iter_mut().enumerate() {
            *id = (random::philox([i as u32, 0, 0, 0], [3, 0])[0] as usize % IDS) as i32;
        }
    }
    Ok(engine)
}

/// The body of a trial, and the median microseconds of each of its nodes.
type NodeTimes = (Arc<Body>, Vec<f64>);

fn node_times(trial: &Trial, options: &Options, repeats: Repeats) -> Result<NodeTimes, ExecError> {
    let mut engine = engine(trial, options.clone())?;
    let body = engine.program().bodies[0].clone();
    let mut times = vec![Vec::new(); body.graph.nodes.len()];
    // In a step most of what a kernel reads was written long before by another one. A trial that found its own data where it left
    // them would be too fast, so something else goes through the caches first, with the same threads.
    let mut elsewhere = Engine::new(vector_program(BUSY_ELEMENTS, true, 1).0, options.clone())?;
    repeat(repeats, || {
        elsewhere.run()?;
        engine.set_timeline(Some(Timeline::new(Instant::now(), usize::MAX)));
        engine.run()?;
        for moment in engine.timeline().map_or(&[][..], Timeline::moments) {
            if let Some(node) = moment.label.node {
                times[node].push(moment.us);
            }
        }
        Ok(())
    })?;
    Ok((body, times.iter_mut().map(|times| median(times)).collect()))
}

/// Calls as often as it is told.
fn repeat(repeats: Repeats, mut call: impl FnMut() -> Result<(), ExecError>) -> Result<(), ExecError> {
    let began = Instant::now();
    let mut runs = 0;
    while runs < repeats.runs_min || (began.elapsed() < repeats.each && runs < repeats.runs_max) {
        call()?;
        runs += 1;
    }
    Ok(())
}

/// Takes the times of the kinds that a trial is for.
fn take(trial: &Trial, (body, times): &NodeTimes, found: &mut Found) {
    for (node, &us) in times.iter().enumerate() {
        let work = of_node(body, node, None, DType::F32);
        match work[..] {
            [work] if trial.kinds.contains(&work.kind) => keep(found, work, us),
            // What functions take beyond the pass that they are part of.
            [pass, functions] if trial.kinds.contains(&functions.kind) => {
                let pass_us = pass_us(found, &pass);
                keep(found, functions, (us - pass_us).max(us * 0.05));
            }
            _ => {}
        }
    }
}

fn keep(found: &mut Found, work: Work, us: f64) {
    let point = TimePoint { sizes: work.sizes, amount: work.amount(), us: us.max(0.01) };
    found.entry((work.kind, work.half)).or_default().push(point);
}

/// The time of a plain pass of as many bytes, by the nearest one that was measured.
fn pass_us(found: &Found, pass: &Work) -> f64 {
    let points = found.get(&(WorkKind::Elementwise, false)).map_or(&[][..], Vec::as_slice);
    let far = |p: &TimePoint| (p.amount / pass.bytes).ln().abs();
    let nearest = points.iter().min_by(|a, b| far(a).total_cmp(&far(b)));
    nearest.map_or(0.0, |p| p.us * pass.bytes / p.amount)
}

/// Instructions of one step, so that the time of one of them can be told.
const REPEATED: usize = 16;

/// A graph of one parameter.
fn one_parameter(n: usize) -> Graph {
    let mut b = Builder::new();
    let trace = |b: &mut Builder| {
        let p = b.param("p", [n], Init::Uniform { bound: 0.5 })?;
        b.mean_all(p)
    };
    let loss = trace(&mut b).expect("a mean of a parameter can be traced");
    let graph = b.finish(&[("loss", loss)]);
    let loss = graph.output("loss").expect("it was named");
    differentiate(&graph, loss).expect("a mean has a gradient")
}

/// What ranks that are not measured go through while others copy and update: with two buffers more than the caches of a core hold.
const BUSY_ELEMENTS: usize = 1 << 21;

/// Some copies of `n` elements, or sums, and what one of them is.
fn vector_program(n: usize, adds: bool, times: usize) -> (Program, Vec<Work>) {
    let mut program = Program::forward(&one_parameter(16));
    let from = program.buffer("from", DType::F32, n);
    let into = program.buffer("into", DType::F32, n);
    let instr = if adds { Instr::Add { from, into } } else { Instr::Copy { from, into } };
    let works = of_instr(&program, &instr);
    program.instrs = vec![instr; times];
    (program, works)
}

/// Copies and sums of `n` elements.
fn vectors(n: usize, options: &Options, repeats: Repeats, found: &mut Found) -> Result<(), ExecError> {
    for adds in [false, true] {
        let (program, works) = vector_program(n, adds, REPEATED);
        let mut engine = Engine::new(program, options.clone())?;
        let mut times = Vec::new();
        repeat(repeats, || {
            let began = Instant::now();
            engine.run()?;
            times.push(began.elapsed().as_secs_f64() * 1e6 / REPEATED as f64);
            Ok(())
        })?;
        for work in works {
            keep(found, work, median(&mut times));
        }
    }
    Ok(())
}

/// Updates of `n` parameters.
fn updates(n: usize, options: &Options, repeats: Repeats, found: &mut Found) -> Result<(), ExecError> {
    let moments = Moments::DEFAULT;
    let optimizers = [
        Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 },
        Optimizer::AdamW(moments),
        Optimizer::Lion { beta1: moments.beta1, beta2: 0.99, weight_decay: 0.0 },
        Optimizer::Lamb(moments),
    ];
    for optimizer in optimizers {
        let program = Program::train(&one_parameter(n), optimizer, None);
        let works: Vec<Work> = program
            .instrs
            .iter()
            .filter(|instr| matches!(instr, Instr::Update { .. }))
            .flat_map(|instr| of_instr(&program, instr))
            .collect();
        let mut engine = Engine::new(program, options.clone())?;
        let mut times = Vec::new();
        repeat(repeats, || {
            engine.set_timeline(Some(Timeline::new(Instant::now(), usize::MAX)));
            engine.step_with::<ExecError>(
                &mut Filled { weight: 1.0 },
                StepArgs { lr: 1e-6, ..StepArgs::default() },
            )?;
            let moments = engine.timeline().map_or(&[][..], Timeline::moments);
            times.extend(moments.iter().filter(|m| m.label.kind == MomentKind::Update).map(|m| m.us));
            Ok(())
        })?;
        for work in works {
            keep(found, work, median(&mut times));
        }
    }
    Ok(())
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Tables of what was found for a variant. Times of all cores at once are those of a crowd.
pub(super) fn tables(found: Found, variant: Variant) -> impl Iterator<Item = TimeTable> {
    found.into_iter().map(move |((kind, half), points)| TimeTable {
        kind,
        half,
        threads: variant.threads,
        crowded: variant.ranks > 1,
        points,
    })
}
