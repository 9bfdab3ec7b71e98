//! Microbatches of a batch, on one rank and on several, against the whole batch: the same weights, with dropout, class
//! weights and short last steps.

use polyreme_collective::Comm;
use polyreme_data::{Features, Spec, Tally, Target, Values};
use polyreme_exec::{Engine, Isa, Kept};
use polyreme_graph::memory::ALIGN_BYTES;
use polyreme_graph::{DType, Keeps, Moments, Optimizer, Precision, Traced};
use polyreme_nn::layer::{BatchNorm2d, Dropout, Linear};
use polyreme_parallel::{Mesh, Plan, Training};
use polyreme_train::learner::{Learner, LearnerOptions, MicrobatchData, RankStep, StepResult};
use polyreme_train::loss::Loss;
use polyreme_train::pace::{Pace, RankShare, StepCut, StepKind};
use polyreme_train::{Net, TrainError};

const WIDTH: usize = 10;
const CLASSES: usize = 3;

fn spec() -> Spec {
    Spec {
        features: Features::Row { width: WIDTH },
        target: Target::Class { classes: CLASSES, names: Vec::new() },
    }
}

fn net(norm: bool) -> Net {
    Net::Function(std::sync::Arc::new(move |b, x, training| -> Traced {
        let mut x = Linear::new(WIDTH, 32).trace(b, "fc1", x)?;
        if norm {
            x = BatchNorm2d::new(32).trace(b, "norm", x, training)?;
        }
        x = b.activation("tanh", x)?;
        x = Dropout { p: 0.25 }.trace(b, "drop", x, training)?;
        Linear::new(32, CLASSES).trace(b, "fc2", x)
    }))
}

fn options(loss: Loss) -> LearnerOptions {
    LearnerOptions {
        inherits: false,
        isa: Isa::detect(),
        threads: 1,
        seed: 3,
        training: Training {
            optimizer: Optimizer::AdamW(Moments::DEFAULT),
            moments: DType::F32,
            clip: Some(1.0),
            ema: Some(0.9),
            scaled: false,
        },
        loss,
        class_weights: if loss.class_weights { vec![0.5, 1.0, 4.0] } else { Vec::new() },
        memory_bytes: None,
        plan: Plan { bucket_bytes: 1 << 10, ..Plan::alone() },
        keeps: Some(Keeps::OwnMoments),
    }
}

/// The same for ranks that split the batch.
fn over_ranks(options: LearnerOptions, ranks: usize) -> LearnerOptions {
    LearnerOptions { plan: Plan { mesh: Mesh::data(ranks), ..options.plan.clone() }, ..options }
}

fn number(i: usize) -> f32 {
    ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// Samples of an epoch.
struct Data {
    x: Vec<f32>,
    labels: Vec<i32>,
}

impl Data {
    fn new(samples: usize) -> Data {
        let labels = (0..samples).map(|i| ((i * 7) % 5 % CLASSES) as i32).collect();
        Data { x: (0..samples * WIDTH).map(number).collect(), labels }
    }

    /// One rank's part of a step.
    fn step(
        &self,
        learner: &mut Learner,
        pace: Pace,
        part: &RankShare,
        step: u64,
    ) -> Result<StepResult, TrainError> {
        let (microbatches, rounds) = (part.microbatches(step), part.rounds(step));
        let of = RankStep {
            labels: &|_| pace.len(step),
            kind: StepKind { microbatches, rounds, steps: 1, time: None },
            lr: &|_| 0.01,
            loss_scale: 1.0,
            extra: &|| [0.0; 2],
        };
        let results = learner.step(of, &mut |_, microbatch, take| {
            let start = pace.start(step) + microbatch.offset;
            let rows = start..start + microbatch.len;
            let x = Values::F32(&self.x[rows.start * WIDTH..rows.end * WIDTH]);
            let labels = Values::I32(&self.labels[rows]);
            take(MicrobatchData { x, labels, mix: 1.0, samples: Tally::default() })
        })?;
        Ok(results[0])
    }
}

/// Trains two epochs and returns rank 0's parameters, averages and losses.
fn train(pace: Pace, cut: &StepCut, options: &LearnerOptions) -> (Vec<f32>, Vec<f32>, Vec<f64>) {
    let data = Data::new(pace.samples);
    let rank = |comm: Comm| {
        let part = RankShare::new(pace, cut, comm.rank());
        let options = over_ranks(options.clone(), comm.size());
        let mut learner = Learner::new(&net(false), &spec(), &part, None, options, comm).unwrap();
        let steps = 0..2 * pace.steps_per_epoch();
        let losses = steps.map(|step| data.step(&mut learner, pace, &part, step).unwrap().loss).collect();
        (learner.engine().kept(Kept::Params).to_vec(), learner.average().to_vec(), losses)
    };
    std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(cut.ranks()).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
        let mut outcomes: Vec<(Vec<f32>, Vec<f32>, Vec<f64>)> =
            ranks.into_iter().map(|r| r.join().unwrap()).collect();
        assert!(outcomes.iter().all(|o| (&o.0, &o.2) == (&outcomes[0].0, &outcomes[0].2)), "ranks agree");
        outcomes.swap_remove(0)
    })
}

#[track_caller]
fn check(samples: usize, batch: usize, weights: &[f64], accumulate: usize, loss: Loss) {
    let pace = Pace { samples, batch: batch.min(samples) };
    let whole = train(pace, &StepCut::alone(), &options(loss));
    let cut = StepCut { weights: weights.to_vec(), accumulate, ..StepCut::alone() };
    for keeps in [Keeps::OwnMoments, Keeps::OwnGradients] {
        let cut = train(pace, &cut, &LearnerOptions { keeps: Some(keeps), ..options(loss) });
        assert_eq!(whole.2.len(), cut.2.len());
        for (a, b) in whole.2.iter().zip(&cut.2) {
            assert!((a - b).abs() < 1e-5, "losses {a} and {b}, {keeps:?}");
        }
        for (a, b) in whole.0.iter().zip(&cut.0).chain(whole.1.iter().zip(&cut.1)) {
            assert!((a - b).abs() < 1e-4, "weights {a} and {b}, {keeps:?}");
        }
    }
}

#[test]
fn accumulated_microbatches_give_the_weights_of_the_large_batch() {
    let rows: [(usize, usize, &[f64], usize); 8] = [
        (48, 24, &[1.0], 4),
        (53, 24, &[1.0], 3),
        (5, 24, &[1.0], 3),
        (31, 10, &[1.0], 2),
        (48, 24, &[1.0, 1.0], 1),
        (53, 24, &[1.0, 2.0, 0.5], 2),
        // Ranks without a sample, in the last step and in all.
        (26, 24, &[1.0; 4], 1),
        (5, 3, &[1.0; 5], 2),
    ];
    for (samples, batch, weights, accumulate) in rows {
        check(samples, batch, weights, accumulate, Loss::default());
        check(samples, batch, weights, accumulate, Loss { class_weights: true, ..Loss::default() });
        check(samples, batch, weights, accumulate, Loss { label_smoothing: 0.1, ..Loss::default() });
    }
}

/// What a rank was planned to take is what it holds once it has trained, however its steps are cut.
#[test]
fn the_plan_counts_the_sums_of_microbatches() {
    let pace = Pace { samples: 48, batch: 24 };
    let data = Data::new(pace.samples);
    let (moments, gradients) = (Keeps::OwnMoments, Keeps::OwnGradients);
    for (accumulate, keeps, ranks) in [(1, moments, 1), (3, moments, 1), (3, moments, 2), (3, gradients, 2)] {
        let cut = StepCut { weights: vec![1.0; ranks], accumulate, ..StepCut::alone() };
        let plan = Plan { microbatches: accumulate, ..options(Loss::default()).plan };
        let options = LearnerOptions { plan, keeps: Some(keeps), ..options(Loss::default()) };
        let options = over_ranks(options, ranks);
        let rank = |comm: Comm| {
            let part = RankShare::new(pace, &cut, comm.rank());
            let lowering = options.lowering(comm.rank(), true);
            let mut learner = Learner::new(&net(true), &spec(), &part, None, options.clone(), comm).unwrap();
            data.step(&mut learner, pace, &part, 0).unwrap();
            let engine = learner.engine();
            let (held, footprint) =
                (engine.held(), Engine::footprint(engine.program(), 1, polyreme_exec::Isa::detect()));
            let held = held.params + held.grads + held.optimizer + held.states + held.average + held.totals;
            (held + footprint.inputs + footprint.activations, lowering.host_bytes(engine.program()))
        };
        let taken: Vec<(usize, usize)> = std::thread::scope(|s| {
            let ranks: Vec<_> = Comm::local(ranks).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        });
        let held: usize = taken.iter().map(|(held, _)| held).sum();
        let what = format!("{accumulate} microbatches, {ranks} ranks, {keeps:?}");
        // Each of a rank's arenas is rounded up to a line.
        let rounding = ranks * 6 * ALIGN_BYTES;
        for (_, planned) in taken {
            assert!((planned..planned + rounding).contains(&held), "{what}: held {held}, planned {planned}");
        }
    }
}

#[test]
fn the_short_last_step_feeds_the_running_statistics() {
    let pace = Pace { samples: 11, batch: 8 };
    let (data, part) = (Data::new(pace.samples), RankShare::new(pace, &StepCut::alone(), 0));
    let mut learner =
        Learner::new(&net(true), &spec(), &part, None, options(Loss::default()), Comm::alone()).unwrap();
    let mut seen = vec![learner.engine().state("norm.running_mean").unwrap().to_vec()];
    for step in 0..2 {
        data.step(&mut learner, pace, &part, step).unwrap();
        let now = learner.engine().state("norm.running_mean").unwrap().to_vec();
        assert!(!seen.contains(&now), "step {step} left the running mean as it was");
        seen.push(now);
    }
}

#[test]
fn a_loss_that_is_not_finite_names_its_place() {
    // In the only microbatch, in the first of two, and on one of two ranks; in f16 it is told apart from an overflow.
    for (weights, accumulate, bad, keeps, precision) in [
        (vec![1.0], 1, 3, Keeps::OwnMoments, Precision::F32),
        (vec![1.0], 2, 0, Keeps::OwnMoments, Precision::F32),
        (vec![1.0, 1.0], 1, 3, Keeps::OwnMoments, Precision::F32),
        (vec![1.0, 1.0], 1, 3, Keeps::OwnGradients, Precision::F32),
        (vec![1.0, 1.0], 2, 2, Keeps::OwnGradients, Precision::F32),
        (vec![1.0], 2, 0, Keeps::OwnMoments, Precision::half(DType::F16)),
        (vec![1.0, 1.0], 1, 3, Keeps::OwnGradients, Precision::half(DType::F16)),
        (vec![1.0, 1.0], 1, 3, Keeps::OwnMoments, Precision::half(DType::Bf16)),
    ] {
        let pace = Pace { samples: 4, batch: 4 };
        let cut = StepCut { weights, accumulate, ..StepCut::alone() };
        let mut data = Data::new(pace.samples);
        data.x[bad * WIDTH] = f32::NAN;
        let rank = |comm: Comm| {
            let part = RankShare::new(pace, &cut, comm.rank());
            let options = LearnerOptions { keeps: Some(keeps), ..options(Loss::default()) };
            let mut options = over_ranks(options, comm.size());
            options.training.scaled = precision.scales_loss();
            options.plan.precision = precision.clone();
            let mut learner = Learner::new(&net(false), &spec(), &part, None, options, comm).unwrap();
            data.step(&mut learner, pace, &part, 0).unwrap_err()
        };
        let errors: Vec<TrainError> = std::thread::scope(|s| {
            let ranks: Vec<_> =
                Comm::local(cut.ranks()).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        });
        for error in errors {
            assert!(matches!(error, TrainError::NotFinite { step: 0, .. }), "{error}");
            assert!(error.to_string().contains("of the input `x` is not finite"), "{error}");
        }
    }
}

#[test]
fn mixed_labels_count_by_their_share() {
    let pace = Pace { samples: 2, batch: 2 };
    let loss = Loss { mixup: true, ..Loss::default() };
    let one = |labels: &[i32; 2], mix: f32| {
        let part = RankShare::new(pace, &StepCut::alone(), 0);
        let mut learner =
            Learner::new(&net(false), &spec(), &part, None, options(loss), Comm::alone()).unwrap();
        // Both samples are the same, so that mixing leaves them as they are.
        let x = [0.5; 2 * WIDTH];
        let batch = MicrobatchData {
            x: Values::F32(&x),
            labels: Values::I32(labels),
            mix,
            samples: Tally::default(),
        };
        let step = RankStep {
            labels: &|_| 2,
            kind: part.kinds()[0],
            lr: &|_| 0.01,
            loss_scale: 1.0,
            extra: &|| [0.0; 2],
        };
        learner.step(step, &mut |_, _, take| take(batch)).unwrap()[0].loss
    };
    let (mixed, first, second) = (one(&[0, 1], 0.3), one(&[0, 1], 1.0), one(&[1, 0], 1.0));
    assert!((mixed - (0.3 * first + 0.7 * second)).abs() < 1e-6, "{mixed}, {first}, {second}");
}
