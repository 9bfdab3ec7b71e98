//! Pipelines of four stages in real time, with kernels that sleep: four ranks on two cores then idle as on four.
//!
//! Each block takes as long as its share of its segment's cost: a forward pass, input gradients and weight gradients take a
//! unit each, on every stage. What is measured is from the engines' own timelines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use polyreme_collective::Comm;
use polyreme_exec::{BlockPace, Comms, Engine, ExecError, Filled, Isa, Options, StepArgs, Timeline};
use polyreme_graph::{Builder, DType, Graph, Init, Moment, MomentKind, Optimizer, Segment, differentiate};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan, Training, compile, schedule};

const STAGES: usize = 4;
const MICROBATCHES: usize = 8;
const UNIT: Duration = Duration::from_millis(8);

/// As many equal layers as there are stages.
fn layers() -> Graph {
    let mut b = Builder::new();
    let mut x = b.input("x", [2, 8], DType::F32).unwrap();
    for i in 0..STAGES {
        let layer = b.layer(format!("layer{i}"), |b| {
            let gamma = b.param("gamma", [8], Init::Const(1.0))?;
            let beta = b.param("beta", [8], Init::Const(0.0))?;
            let w = b.param("weight", [8, 8], Init::Uniform { bound: 0.3 })?;
            // The first layer has input gradients too: two parameters wait for them.
            let y = b.layer_norm(x, gamma, beta, 1e-5)?;
            b.linear(y, w, None)
        });
        x = layer.unwrap();
    }
    let loss = b.mean(x, &[0, 1]).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

/// What a schedule was seen to do.
#[derive(Debug)]
struct Seen {
    /// How long stages did nothing, all together.
    idle: Duration,
    /// From the first pass of all to the last.
    took: Duration,
    /// By stage: the most microbatches between their first forward pass and their last backward pass.
    in_flight: Vec<usize>,
    /// By stage: bytes of activations that the engine reserved.
    activations: Vec<usize>,
}

/// A step, or a run of several.
fn run(kind: PipelineKind, steps: usize) -> Seen {
    let graph = layers();
    let cuts = (1..STAGES).map(|i| format!("layer{i}")).collect();
    let mesh = Mesh { stage: STAGES, ..Mesh::data(1) };
    let plan =
        Plan { mesh, pipeline: kind, microbatches: MICROBATCHES, run_steps: steps, cuts, ..Plan::alone() };
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    // Runs of several steps clip, by the norm of the gradients of all stages: that is to cost no flush.
    let clip = (steps > 1).then_some(1.0);
    let training = Training { optimizer, moments: DType::F32, clip, ema: None, scaled: false };
    let origin = Instant::now();
    let rank = |comm: Comm| {
        let plan = Plan { rank: comm.rank(), ..plan.clone() };
        let body = Arc::new(compile(&graph, &plan, &training, None).unwrap());
        let program = schedule(&plan, &training, &[body], &plan.whole_step());
        let bytes = Engine::footprint(&program, 1, Isa::detect()).activations;
        let comms = Comms::new(comm, &plan.mesh).unwrap();
        let mut engine = Engine::join(program, Options::threads(1), comms).unwrap();
        let step = |engine: &mut Engine| {
            let args = StepArgs { lr: 0.01, ..StepArgs::default() };
            engine.step_with::<ExecError>(&mut Filled { weight: 1.0 }, args).unwrap();
        };
        // The first step touches memory for the first time.
        step(&mut engine);
        engine.set_pace(Some(BlockPace::new(|body, block| {
            let within = |s: &&Segment| s.nodes.contains(&block.nodes.start);
            let segment = body.segments.iter().find(within).unwrap();
            UNIT * block.nodes.len() as u32 / segment.nodes.len() as u32
        })));
        engine.set_timeline(Some(Timeline::new(origin, usize::MAX)));
        step(&mut engine);
        let passes = engine.timeline().unwrap().moments().iter();
        let paced = |m: &&Moment| matches!(m.label.kind, MomentKind::Block(_));
        (passes.filter(paced).cloned().collect::<Vec<_>>(), bytes)
    };
    let ranks: Vec<(Vec<Moment>, usize)> = std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(STAGES).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    let all = || ranks.iter().flat_map(|(moments, _)| moments);
    let start = all().map(|m| m.start_us).fold(f64::INFINITY, f64::min);
    let end = all().map(|m| m.start_us + m.us).fold(0.0, f64::max);
    let busy: f64 = all().map(|m| m.us).sum();
    Seen {
        idle: Duration::from_secs_f64((STAGES as f64 * (end - start) - busy).max(0.0) / 1e6),
        took: Duration::from_secs_f64((end - start) / 1e6),
        in_flight: ranks.iter().map(|(moments, _)| in_flight(moments, steps * MICROBATCHES)).collect(),
        activations: ranks.iter().map(|(_, bytes)| *bytes).collect(),
    }
}

/// The most microbatches that have begun and are not done.
fn in_flight(moments: &[Moment], microbatches: usize) -> usize {
    let spans: Vec<(f64, f64)> = (0..microbatches)
        .map(|k| {
            let of = || moments.iter().filter(|m| m.label.microbatch == Some(k));
            let start = of().map(|m| m.start_us).fold(f64::INFINITY, f64::min);
            (start, of().map(|m| m.start_us + m.us).fold(0.0, f64::max))
        })
        .collect();
    spans.iter().map(|a| spans.iter().filter(|b| b.0 <= a.0 && a.0 < b.1).count()).max().unwrap()
}

#[test]
fn zero_bubble_idles_less_than_1f1b_and_1f1b_holds_less_than_gpipe() {
    // A busy machine only adds idle time, so the best of several tries counts.
    let mut best: Option<[Seen; 3]> = None;
    let unit = |units: usize| UNIT.as_secs_f64() * units as f64;
    // A stage sends input gradients before it computes weight gradients, so 1F1B idles for two of the three passes.
    let (one_idles, zero_idles) = (unit(2 * (STAGES - 1) * STAGES), unit((STAGES - 1) * STAGES));
    let between = |seen: &[Seen; 3]| {
        let [one, zero, _] = seen;
        let less_s = one.idle.as_secs_f64() - zero.idle.as_secs_f64();
        less_s > (one_idles - zero_idles) / 4.0 && zero.took < one.took
    };
    for _ in 0..12 {
        let now = [PipelineKind::OneFOneB, PipelineKind::ZbH1, PipelineKind::Gpipe].map(|kind| run(kind, 1));
        best = Some(match best {
            None => now,
            Some(old) => {
                let mut both = old.into_iter().zip(now);
                std::array::from_fn(|_| {
                    let (a, b) = both.next().unwrap();
                    if a.idle < b.idle { a } else { b }
                })
            }
        });
        if best.as_ref().is_some_and(between) {
            break;
        }
    }
    let best = best.unwrap();
    assert!(between(&best), "{best:?}; 1F1B idles for {one_idles} s, ZB-H1 for {zero_idles}");
    let [one, zero, gpipe] = best;
    assert_eq!((&one.in_flight[..], &gpipe.in_flight[..]), (&[4, 3, 2, 1][..], &[8; 4][..]));
    assert!(
        zero.in_flight.iter().all(|n| *n <= STAGES),
        "ZB-H1 holds what 1F1B's first stage does: {zero:?}"
    );
    for (one, gpipe) in one.activations.iter().zip(&gpipe.activations) {
        assert!(one < gpipe, "{one} bytes against {gpipe}");
    }
}

#[test]
fn a_run_without_a_flush_idles_once_and_not_once_per_step() {
    let steps = 3;
    // As much work as three steps of 1F1B, and the idle time of one.
    let once = UNIT.as_secs_f64() * (2 * (STAGES - 1) * STAGES) as f64;
    let tries = (0..12).map(|_| run(PipelineKind::TwoBw, steps));
    let enough = |seen: &Seen| seen.idle.as_secs_f64() < 1.75 * once;
    let mut best: Option<Seen> = None;
    for seen in tries {
        let better = best.as_ref().is_none_or(|best| seen.idle < best.idle);
        best = if better { Some(seen) } else { best };
        if best.as_ref().is_some_and(enough) {
            break;
        }
    }
    let best = best.unwrap();
    assert!(enough(&best), "{best:?}; a flush is {once} s over all stages");
    assert_eq!(best.in_flight, [4, 3, 2, 1]);
}
