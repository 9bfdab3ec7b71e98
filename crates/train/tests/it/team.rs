//! Pieces of a batch against the whole batch: the same weights, with dropout, class weights and short last steps.

use polyreme_data::{Features, Spec, Target, Values};
use polyreme_exec::Kept;
use polyreme_graph::{Moments, Optimizer, Traced};
use polyreme_nn::layer::{BatchNorm2d, Dropout, Linear};
use polyreme_train::lower::Loss;
use polyreme_train::pace::Pace;
use polyreme_train::team::{Batch, Team, TeamOptions};
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

fn options(loss: Loss) -> TeamOptions {
    TeamOptions {
        threads: 1,
        seed: 3,
        optimizer: Optimizer::AdamW(Moments::DEFAULT),
        clip: Some(1.0),
        loss,
        class_weights: if loss.class_weights { vec![0.5, 1.0, 4.0] } else { Vec::new() },
        ema: Some(0.9),
        memory_bytes: None,
    }
}

fn number(i: usize) -> f32 {
    ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// Trains two epochs and returns parameters, averages and losses.
fn train(pace: Pace, loss: Loss, norm: bool) -> (Vec<f32>, Vec<f32>, Vec<f64>) {
    let x: Vec<f32> = (0..pace.samples * WIDTH).map(number).collect();
    let labels: Vec<i32> = (0..pace.samples).map(|i| ((i * 7) % 5 % CLASSES) as i32).collect();
    let mut team = Team::new(&net(norm), &spec(), pace, options(loss)).unwrap();
    let mut losses = Vec::new();
    for step in 0..2 * pace.steps_per_epoch() {
        for piece in pace.pieces(step) {
            let rows = piece.start..piece.start + piece.len;
            let x = Values::F32(&x[rows.start * WIDTH..rows.end * WIDTH]);
            let batch = Batch { x, labels: &labels[rows], mix: 1.0 };
            losses.extend(team.piece(piece, batch, 0.01).unwrap().map(|r| r.loss));
        }
    }
    (team.learner().kept(Kept::Params).to_vec(), team.average().to_vec(), losses)
}

#[track_caller]
fn check(samples: usize, batch: usize, micro: usize, loss: Loss) {
    let whole = train(Pace { samples, batch, micro: batch }, loss, false);
    let cut = train(Pace { samples, batch, micro }, loss, false);
    assert_eq!(whole.2.len(), cut.2.len());
    for (a, b) in whole.2.iter().zip(&cut.2) {
        assert!((a - b).abs() < 1e-5, "losses {a} and {b}");
    }
    for (a, b) in whole.0.iter().zip(&cut.0).chain(whole.1.iter().zip(&cut.1)) {
        assert!((a - b).abs() < 1e-4, "weights {a} and {b}");
    }
}

#[test]
fn accumulated_pieces_give_the_weights_of_the_large_batch() {
    for (samples, batch, micro) in [(48, 24, 6), (48, 24, 24), (53, 24, 8), (5, 24, 8), (31, 10, 5)] {
        check(samples, batch, micro, Loss::default());
        check(samples, batch, micro, Loss { class_weights: true, ..Loss::default() });
        check(samples, batch, micro, Loss { label_smoothing: 0.1, ..Loss::default() });
    }
}

#[test]
fn the_short_last_step_feeds_the_running_statistics() {
    let pace = Pace { samples: 11, batch: 8, micro: 8 };
    let x: Vec<f32> = (0..pace.samples * WIDTH).map(number).collect();
    let labels = vec![0; pace.samples];
    let mut team = Team::new(&net(true), &spec(), pace, options(Loss::default())).unwrap();
    let mut seen = vec![team.learner().state("norm.running_mean").unwrap().to_vec()];
    for step in 0..2 {
        for piece in pace.pieces(step) {
            let rows = piece.start..piece.start + piece.len;
            let x = Values::F32(&x[rows.start * WIDTH..rows.end * WIDTH]);
            team.piece(piece, Batch { x, labels: &labels[rows], mix: 1.0 }, 0.01).unwrap();
        }
        let now = team.learner().state("norm.running_mean").unwrap().to_vec();
        assert!(!seen.contains(&now), "step {step} left the running mean as it was");
        seen.push(now);
    }
}

#[test]
fn a_loss_that_is_not_finite_names_its_place() {
    let pace = Pace { samples: 4, batch: 4, micro: 4 };
    let mut team = Team::new(&net(false), &spec(), pace, options(Loss::default())).unwrap();
    team.learner_mut().param_mut("fc2.bias").unwrap()[0] = f32::NAN;
    let x = [0.5; 4 * WIDTH];
    let batch = Batch { x: Values::F32(&x), labels: &[0, 1, 2, 0], mix: 1.0 };
    let error = team.piece(pace.pieces(0).next().unwrap(), batch, 0.01).unwrap_err();
    assert!(matches!(error, TrainError::NotFinite { step: 0, .. }));
    assert!(error.to_string().contains("fc2.bias"), "{error}");
}

#[test]
fn mixed_labels_count_by_their_share() {
    let pace = Pace { samples: 2, batch: 2, micro: 2 };
    let loss = Loss { mixup: true, ..Loss::default() };
    let one = |labels: &[i32; 2], mix: f32| {
        let mut team = Team::new(&net(false), &spec(), pace, options(loss)).unwrap();
        // Both samples are the same, so that mixing leaves them as they are.
        let x = [0.5; 2 * WIDTH];
        let batch = Batch { x: Values::F32(&x), labels, mix };
        team.piece(pace.pieces(0).next().unwrap(), batch, 0.01).unwrap().unwrap().loss
    };
    let (mixed, first, second) = (one(&[0, 1], 0.3), one(&[0, 1], 1.0), one(&[1, 0], 1.0));
    assert!((mixed - (0.3 * first + 0.7 * second)).abs() < 1e-6, "{mixed}, {first}, {second}");
}
