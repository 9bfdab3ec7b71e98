//! Ranks against one rank: the same weights after a few steps, whatever the plan, the number of ranks and of microbatches.

use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::{Comm, ShmSetup};
use polyreme_exec::{Engine, ExecError, Inputs, Kept, Options, StepArgs};
use polyreme_graph::builder::BatchNorm;
use polyreme_graph::op::CrossEntropy;
use polyreme_graph::{
    Adafactor, Body, Builder, DType, Graph, Init, Keeps, Microbatch, Moments, Optimizer, Program, Tensor,
    Weights, differentiate,
};
use polyreme_kernels::elementwise::Unary;
use polyreme_parallel::tree::run_of;
use polyreme_parallel::{Mesh, Plan, StepShape, Training, average_states, compile, schedule};

use crate::random::TestRandom;

/// Samples of a step, and steps.
pub(crate) const BATCH: usize = 24;
const STEPS: usize = 6;

/// Two linear layers with a batch norm between them if `norm`, for `n` samples; the loss is weighted.
pub(crate) fn step_graph(n: usize, norm: bool) -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [n, 20], DType::F32).unwrap();
    let labels = b.input("labels", [n], DType::I32).unwrap();
    let weight = b.input("weight", [1], DType::F32).unwrap();
    let linear = |b: &mut Builder, name: &str, x: Tensor, out: usize| {
        b.layer(name, |b| {
            let width = b.shape(x).last();
            let w = b.param("weight", [out, width], Init::Uniform { bound: 0.2 })?;
            let bias = b.param("bias", [out], Init::Uniform { bound: 0.1 })?;
            b.linear(x, w, Some(bias))
        })
    };
    let mut h = linear(&mut b, "a", x, 70).unwrap();
    if norm {
        h = b
            .layer("norm", |b| {
                let gamma = b.param("gamma", [70], Init::Const(1.0))?;
                let beta = b.param("beta", [70], Init::Const(0.0))?;
                let running_mean = b.state("mean", [70], Init::Const(0.0))?;
                let running_var = b.state("var", [70], Init::Const(1.0))?;
                let at = BatchNorm { gamma, beta, running_mean, running_var, eps: 1e-5, momentum: 0.1 };
                b.batch_norm(h, at, true)
            })
            .unwrap();
    }
    let h = b.unary(Unary::Tanh, h).unwrap();
    let logits = linear(&mut b, "b", h, 5).unwrap();
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    let loss = b.cross_entropy(logits, labels, None, options).unwrap();
    let scalar = b.reshape(weight, polyreme_graph::Shape::scalar()).unwrap();
    let weighted = b.mul(loss, scalar).unwrap();
    let graph = b.finish(&[("loss", loss), ("weighted", weighted)]);
    differentiate(&graph, weighted).unwrap()
}

pub(crate) fn feed(inputs: &mut Inputs, step: usize, samples: Range<usize>) {
    let sample = |i: usize| TestRandom::new((step * 1000 + i) as u64);
    let x = inputs.f32("x").unwrap();
    for (row, i) in x.chunks_exact_mut(20).zip(samples.clone()) {
        let mut random = sample(i);
        row.fill_with(|| random.uniform(-1.0, 1.0));
    }
    let labels = inputs.i32("labels").unwrap();
    labels.iter_mut().zip(samples).for_each(|(l, i)| *l = (sample(i).below(5)) as i32);
}

/// What connects the ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Over {
    Threads,
    SharedMemory,
    Sockets,
}

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) ranks: usize,
    pub(crate) plan: Plan,
    pub(crate) optimizer: Optimizer,
    /// What its state is stored in.
    pub(crate) moments: DType,
    pub(crate) clip: Option<f64>,
    pub(crate) over: Over,
    /// How many microbatches each rank's share is cut into.
    pub(crate) microbatches: usize,
    pub(crate) norm: bool,
    /// A differentiated step of this many samples, with norms or without.
    pub(crate) graph: fn(usize, bool) -> Graph,
}

pub(crate) struct Outcome {
    pub(crate) params: Vec<f32>,
    pub(crate) states: Vec<f32>,
    pub(crate) moments: Vec<f32>,
    pub(crate) losses: Vec<f64>,
}

/// Ranks that are connected by real sockets.
fn connected(ranks: usize) -> Vec<Comm> {
    let links = polyreme_net::loopback::links(ranks).unwrap();
    // All measure their links together.
    let joining: Vec<_> =
        links.into_iter().map(|l| std::thread::spawn(move || Comm::tcp(l).unwrap())).collect();
    joining.into_iter().map(|j| j.join().unwrap()).collect()
}

/// Ranks that share memory as processes do, whose own memory the others cannot see.
fn shared(ranks: usize) -> Vec<Comm> {
    let segment = Comm::segment(ranks, 0).unwrap();
    let path = segment.path().unwrap();
    let join = |rank: usize| {
        let setup = ShmSetup::new(rank, ranks, Comm::open_segment(&path, ranks, 0).unwrap());
        std::thread::spawn(move || Comm::shm(setup).unwrap())
    };
    let joining: Vec<_> = (0..ranks).map(join).collect();
    joining.into_iter().map(|j| j.join().unwrap()).collect()
}

/// Runs `rank` on every rank of a case, and returns their results.
pub(crate) fn on_ranks<R: Send>(case: &Case, rank: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let comms: Vec<Comm> = match case.over {
        Over::Threads => Comm::local(case.ranks),
        Over::SharedMemory => shared(case.ranks),
        Over::Sockets => connected(case.ranks),
    };
    std::thread::scope(|s| {
        let rank = &rank;
        let ranks: Vec<_> = comms.into_iter().map(|comm| s.spawn(move || rank(comm))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Trains and returns the result of rank 0; all ranks must agree.
pub(crate) fn train(case: &Case) -> Outcome {
    let outcomes: Vec<Outcome> = on_ranks(case, |comm| run_rank(case, comm).unwrap());
    let mut outcomes = outcomes.into_iter();
    let first = outcomes.next().unwrap();
    for other in outcomes {
        assert_eq!((&other.params, &other.losses), (&first.params, &first.losses), "ranks agree");
    }
    first
}

/// A rank's share of a step: the samples of each of its microbatches, or logical shards.
fn cuts(case: &Case, rank: usize) -> Vec<Range<usize>> {
    let within = |part: Range<usize>, n: usize| {
        (0..n).map(move |k| {
            let run = run_of(part.len(), n, k);
            part.start + run.start..part.start + run.end
        })
    };
    match case.plan.shards {
        None => {
            within(run_of(BATCH, case.ranks, rank), case.microbatches).filter(|r| !r.is_empty()).collect()
        }
        Some(n) => run_of(n, case.ranks, rank).map(|k| run_of(BATCH, n, k)).collect(),
    }
}

/// The program of a rank of this case, and its samples by microbatch.
pub(crate) fn program(case: &Case, rank: usize) -> (Program, Vec<Range<usize>>) {
    let plan =
        Plan { mesh: Mesh::data(case.ranks), rank, microbatches: case.microbatches, ..case.plan.clone() };
    let training = Training {
        optimizer: case.optimizer,
        moments: case.moments,
        clip: case.clip,
        ema: None,
        scaled: false,
    };
    let cuts = self::cuts(case, rank);
    let mut sizes: Vec<usize> = cuts.iter().map(|r| r.len()).filter(|n| *n > 0).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() {
        sizes.push(1);
    }
    let compile = |n: &usize| compile(&(case.graph)(*n, case.norm), &plan, &training, None).unwrap();
    let bodies: Vec<Arc<Body>> = sizes.iter().map(|n| Arc::new(compile(n))).collect();
    let microbatch = |r: &Range<usize>| {
        let body = sizes.iter().position(|n| *n == r.len())?;
        Some(Microbatch { body, first_sample: r.start })
    };
    let microbatches: Vec<Option<Microbatch>> = cuts.iter().map(microbatch).collect();
    let shape = match plan.shards {
        Some(n) => {
            let runs = (0..case.ranks).map(|rank| run_of(n, case.ranks, rank)).collect();
            StepShape::shards(microbatches, runs)
        }
        None => {
            let rounds = (0..case.ranks).map(|rank| self::cuts(case, rank).len()).max().unwrap_or(1);
            StepShape::rounds(&microbatches.into_iter().flatten().collect::<Vec<_>>(), rounds)
        }
    };
    (schedule(&plan, &training, &bodies, &shape), cuts.into_iter().filter(|r| !r.is_empty()).collect())
}

fn run_rank(case: &Case, comm: Comm) -> Result<Outcome, ExecError> {
    let rank = comm.rank();
    let (program, samples) = program(case, rank);
    let averaging = average_states(case.ranks, &program.bodies[0]);
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comm)?;
    let averaging = engine.add(averaging)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            let samples = samples[microbatch].clone();
            feed(inputs, step, samples.clone());
            Ok(samples.len() as f64 / BATCH as f64)
        };
        let totals =
            engine.step_with(&mut load, StepArgs { lr: 0.05, extra: [1.0, 2.0], ..StepArgs::default() })?;
        let n = case.ranks as f64;
        assert_eq!(totals.extra, [n, 2.0 * n]);
        assert_eq!(totals.grad_norm.is_some(), case.clip.is_some());
        losses.push(totals.loss);
    }
    if case.ranks > 1 && case.plan.shards.is_none() {
        engine.select(averaging);
        engine.run()?;
    }
    let plan = Plan { rank, ..case.plan.clone() };
    let root = plan.rank == 0;
    let mut moments = Vec::new();
    for which in [Kept::Moment1, Kept::Moment2] {
        let mut all = vec![0.0; engine.gathered_len(which)];
        engine.gather_moments(which, root.then_some(&mut all[..]))?;
        // And scattered again, as after a restart.
        engine.scatter_moments(which, root.then_some(&all[..]))?;
        let mut again = vec![0.0; all.len()];
        engine.gather_moments(which, root.then_some(&mut again[..]))?;
        assert_eq!(all, again);
        moments.append(&mut all);
    }
    let outcome = Outcome {
        params: engine.kept(Kept::Params).to_vec(),
        states: engine.kept(Kept::States).to_vec(),
        moments,
        losses,
    };
    engine.comm().barrier()?;
    Ok(outcome)
}

pub(crate) fn near(what: &str, a: &[f32], b: &[f32]) {
    let scale = b.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 2e-5 * scale, "{what}: {worst} of {scale}");
}

pub(crate) fn base() -> Case {
    Case {
        ranks: 1,
        plan: Plan::alone(),
        optimizer: Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 },
        moments: DType::F32,
        clip: None,
        over: Over::Threads,
        microbatches: 1,
        norm: false,
        graph: step_graph,
    }
}

const LION: Optimizer = Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };

/// Plans, and the transports that each runs over.
const PLANS: [(Keeps, Weights, Over); 6] = [
    (Keeps::All, Weights::Own, Over::Threads),
    (Keeps::OwnMoments, Weights::Own, Over::Threads),
    (Keeps::OwnMoments, Weights::Shared, Over::Threads),
    (Keeps::OwnMoments, Weights::Shared, Over::SharedMemory),
    (Keeps::All, Weights::Own, Over::Sockets),
    (Keeps::OwnMoments, Weights::Own, Over::Sockets),
];

#[test]
fn every_plan_gives_the_weights_of_one_rank() {
    let optimizers = [
        base().optimizer,
        Optimizer::AdamW(Moments { weight_decay: 0.1, ..Moments::DEFAULT }),
        Optimizer::Lamb(Moments::DEFAULT),
        LION,
        Optimizer::Adafactor(Adafactor::DEFAULT),
    ];
    for optimizer in optimizers {
        for clip in [None, Some(0.3)] {
            let one = train(&Case { optimizer, clip, ..base() });
            // Where Lion and Adafactor differ from the others does not depend on the number of ranks.
            let all_ranks: &[usize] = match optimizer {
                Optimizer::Lion { .. } | Optimizer::Adafactor(_) => &[3],
                _ => &[2, 3, 4, 8],
            };
            for &ranks in all_ranks {
                for (keeps, weights, over) in PLANS {
                    for (bucket_bytes, microbatches) in [(1, 1), (4096, 2), (1 << 20, 3)] {
                        let plan = Plan { keeps, weights, bucket_bytes, ..Plan::alone() };
                        let many =
                            train(&Case { ranks, plan, optimizer, clip, microbatches, over, ..base() });
                        let what = format!(
                            "{optimizer:?}, clip {clip:?}, {ranks} ranks, {keeps:?}, {weights:?}, {bucket_bytes}, {microbatches}, {over:?}"
                        );
                        near(&what, &many.params, &one.params);
                        near(&what, &many.moments, &one.moments);
                        let (a, b) = (many.losses.last().unwrap(), one.losses.last().unwrap());
                        assert!((a - b).abs() < 1e-6 * b, "{what}: {a} and {b}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_rank_may_have_no_samples() {
    let one = train(&base());
    let plan = Plan { keeps: Keeps::OwnMoments, ..Plan::alone() };
    // 24 samples for 30 ranks.
    let many = train(&Case { ranks: 30, plan, ..base() });
    near("30 ranks", &many.params, &one.params);
}

#[test]
fn shards_give_the_same_bits_on_any_number_of_ranks() {
    let adam = Optimizer::AdamW(Moments::DEFAULT);
    for (optimizer, clip, moments) in [
        (base().optimizer, None, DType::F32),
        (adam, Some(0.3), DType::F32),
        (adam, None, DType::Bf16),
        (Optimizer::Lamb(Moments::DEFAULT), None, DType::F32),
        (LION, None, DType::F32),
        (LION, None, DType::Bf16),
        (Optimizer::Adafactor(Adafactor::DEFAULT), Some(0.3), DType::F32),
    ] {
        let case = |ranks: usize, weights: Weights, over: Over| {
            let plan = Plan { shards: Some(8), keeps: Keeps::OwnMoments, weights, ..Plan::alone() };
            train(&Case { ranks, plan, optimizer, clip, moments, norm: true, over, ..base() })
        };
        let one = case(1, Weights::Own, Over::Threads);
        for ranks in [2, 3, 4, 8, 11] {
            for (_, weights, over) in PLANS {
                let many = case(ranks, weights, over);
                let what = format!("{optimizer:?}, {moments}, {ranks} ranks, {weights:?}, {over:?}");
                assert_eq!(many.losses, one.losses, "{what}");
                assert!(many.params == one.params, "{what}: parameters");
                assert!(many.states == one.states, "{what}: states");
                assert!(many.moments == one.moments, "{what}: moments");
            }
        }
    }
}

#[test]
fn a_loss_that_is_not_finite_stops_all_ranks_before_the_update() {
    let errors: Vec<ExecError> = std::thread::scope(|s| {
        let rank = |comm: Comm| {
            s.spawn(move || {
                let rank = comm.rank();
                let plan = Plan { keeps: Keeps::OwnMoments, ..Plan::alone() };
                let (program, _) = program(&Case { ranks: 3, plan, ..base() }, rank);
                let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
                let before = engine.kept(Kept::Params).to_vec();
                let mut load = |_: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
                    feed(inputs, 0, 0..8);
                    if rank == 1 {
                        inputs.f32("x").unwrap()[7] = f32::NAN;
                    }
                    Ok(1.0 / 3.0)
                };
                let error = engine.step_with(&mut load, StepArgs::default()).unwrap_err();
                assert!(engine.kept(Kept::Params) == before);
                error
            })
        };
        let ranks: Vec<_> = Comm::local(3).into_iter().map(rank).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(matches!(error, ExecError::NotFinite { here, .. } if *here == (rank == 1)), "{error}");
    }
}
