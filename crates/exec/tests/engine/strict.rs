//! Strict programs take no algorithm that trades accuracy for speed.

use polyreme_exec::{Engine, Isa, Options};
use polyreme_graph::op::Conv;
use polyreme_graph::{Builder, DType, Graph, Init, Optimizer, Precision, Program, differentiate};
use polyreme_kernels::{Cx, random};
use polyreme_parallel::{Plan, StepShape, Training, Updates, compile, schedule};

const CHANNELS: usize = 256;
const MADE: usize = 32;
const SIDE: usize = 16;
const ROWS: usize = 1024;

/// A convolution that Winograd's algorithm suits, and a product that seven products of halves suit; both with gradients.
fn graph() -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [2, SIDE, SIDE, CHANNELS], DType::F32).unwrap();
    let weight = b.input("filter", [MADE, CHANNELS, 3, 3], DType::F32).unwrap();
    let conv = Conv { stride: (1, 1), padding: (1, 1), dilation: (1, 1), groups: 1 };
    let y = b.conv2d(x, weight, None, conv).unwrap();
    let a = b.input("a", [ROWS, CHANNELS], DType::F32).unwrap();
    let c = b.input("b", [CHANNELS, CHANNELS], DType::F32).unwrap();
    let product = b.matmul(a, c, false, false).unwrap();
    b.finish(&[("y", y), ("product", product)])
}

fn normal(stream: u64, to: &mut [f32]) {
    random::normal(&Cx::serial(), stream, 0, 0, 0.0, 1.0, to);
}

/// The root mean square of the errors over that of what is right, of every 7th element.
fn error(got: &[f32], exact: impl Fn(usize) -> f64) -> f64 {
    let (mut squares, mut right) = (0.0, 0.0);
    for i in (0..got.len()).step_by(7) {
        let want = exact(i);
        squares += (f64::from(got[i]) - want).powi(2);
        right += want * want;
    }
    (squares / right).sqrt()
}

/// The errors of both outputs.
fn errors(strict: bool) -> [f64; 2] {
    let program = Program::forward(&graph()).with_strict(strict);
    assert_eq!(program.to_string().contains(", strict"), strict, "{program}");
    let mut engine = Engine::new(program, Options::threads(2)).unwrap();
    let mut fill = |name: &str, stream: u64| {
        let to = engine.input_f32(name).unwrap();
        normal(stream, to);
        to.to_vec()
    };
    let (x, weight, a, b) = (fill("x", 1), fill("filter", 2), fill("a", 3), fill("b", 4));
    engine.run().unwrap();
    let conv = error(engine.output("y").unwrap(), |i| {
        let (o, p) = (i % MADE, i / MADE);
        let (image, row, col) = (p / SIDE / SIDE, p / SIDE % SIDE, p % SIDE);
        let mut sum = 0.0;
        for tap in 0..9 {
            // The padding shifts by one.
            let (row, col) = (row + tap / 3, col + tap % 3);
            if (1..=SIDE).contains(&row) && (1..=SIDE).contains(&col) {
                let pixel = (image * SIDE + row - 1) * SIDE + col - 1;
                for c in 0..CHANNELS {
                    let tap = weight[(o * CHANNELS + c) * 9 + tap];
                    sum += f64::from(x[pixel * CHANNELS + c]) * f64::from(tap);
                }
            }
        }
        sum
    });
    let product = error(engine.output("product").unwrap(), |i| {
        let (row, col) = (i / CHANNELS, i % CHANNELS);
        let term = |k: usize| f64::from(a[row * CHANNELS + k]) * f64::from(b[k * CHANNELS + col]);
        (0..CHANNELS).map(term).sum()
    });
    [conv, product]
}

#[test]
fn strict_programs_are_nearer_to_f64() {
    let [fast, strict] = [false, true].map(|strict| Program::forward(&graph()).with_strict(strict));
    let scratch = |program: &Program| Engine::footprint(program, 2, Isa::detect()).activations;
    assert_ne!(scratch(&fast), scratch(&strict), "memory is planned for what runs");
    let (fast, strict) = (errors(false), errors(true));
    assert!(strict.iter().all(|e| *e < 3e-7), "{strict:?}, not strictly {fast:?}");
    if Isa::detect().has_avx2() {
        // Each takes another algorithm otherwise.
        assert!(fast.iter().zip(strict).all(|(fast, strict)| *fast > 1.5 * strict), "{fast:?} {strict:?}");
    }
}

/// A plan that is strict makes strict bodies, whichever passes they go through.
#[test]
fn strict_plans_make_strict_programs() {
    let mut b = Builder::new();
    let x = b.input("x", [4, 8], DType::F32).unwrap();
    let weight = b.param("weight", [8, 3], Init::Const(0.0)).unwrap();
    let y = b.matmul(x, weight, false, false).unwrap();
    let loss = b.mean_all(y).unwrap();
    let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
    let sgd = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let training = Training { optimizer: sgd, moments: DType::F32, clip: None, ema: None, scaled: false };
    for precision in [Precision::F32, Precision::F32_STRICT] {
        let strict = precision.strict;
        for updates in [Updates::AtEnd, Updates::AtOnce] {
            let plan = Plan { precision: precision.clone(), updates, ..Plan::alone() };
            let body = compile(&step, &plan, &training, None).unwrap();
            assert_eq!(body.strict, strict);
            let program = schedule(&plan, &training, &[body.into()], &StepShape::one());
            assert_eq!(program.to_string().contains(", strict"), strict, "{program}");
        }
    }
}
