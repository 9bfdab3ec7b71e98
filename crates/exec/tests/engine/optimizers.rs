//! Updates and clipping through whole steps, against plain loops in f64.

use polyreme_exec::{Engine, ExecError, Kept, Options};
use polyreme_graph::{Builder, DType, Graph, Init, Program, differentiate};
use polyreme_kernels::optim::{Adafactor, Moments, Optimizer};

use crate::random::TestRandom;

const PARAMS: [&str; 2] = ["w", "v"];
const LR: f32 = 0.05;

/// `mean((tanh(x·w) · v - t)²)` and a parameter that no loss depends on.
fn step() -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [5, 7], DType::F32).unwrap();
    let t = b.input("t", [5, 3], DType::F32).unwrap();
    let w = b.param("w", [7, 3], Init::Uniform { bound: 1.0 }).unwrap();
    let unused = b.param("unused", [19], Init::Const(0.5)).unwrap();
    let v = b.param("v", [3], Init::Const(1.0)).unwrap();
    let h = b.matmul(x, w, false, false).unwrap();
    let h = b.activation("tanh", h).unwrap();
    let y = b.mul(h, v).unwrap();
    let loss = b.mse(y, t).unwrap();
    let forward = b.finish(&[("loss", loss), ("unused", unused)]);
    differentiate(&forward, loss).unwrap()
}

/// One parameter's tensor and its two moments, by the formulas.
struct Naive {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    /// The number of rows; 0 for a vector.
    rows: usize,
}

impl Naive {
    fn step(&mut self, optimizer: Optimizer, t: i32, lr: f64, g: &[f64]) {
        match optimizer {
            Optimizer::Sgd { momentum, nesterov, weight_decay } => {
                let (momentum, decay) = (f64::from(momentum), f64::from(weight_decay));
                for i in 0..g.len() {
                    let g = g[i] + decay * self.p[i];
                    self.m[i] = if t == 1 { g } else { momentum * self.m[i] + g };
                    self.p[i] -= lr * if nesterov { g + momentum * self.m[i] } else { self.m[i] };
                }
            }
            Optimizer::Adam(o) => {
                let g: Vec<_> =
                    g.iter().zip(&self.p).map(|(g, p)| g + f64::from(o.weight_decay) * p).collect();
                let u = self.direction(o, t, &g);
                self.p.iter_mut().zip(u).for_each(|(p, u)| *p -= lr * u);
            }
            Optimizer::AdamW(o) => {
                self.p.iter_mut().for_each(|p| *p *= 1.0 - lr * f64::from(o.weight_decay));
                let u = self.direction(o, t, g);
                self.p.iter_mut().zip(u).for_each(|(p, u)| *p -= lr * u);
            }
            Optimizer::Lion { beta1, beta2, weight_decay } => {
                for i in 0..g.len() {
                    let mix = beta1 * self.m[i] + (1.0 - beta1) * g[i];
                    self.p[i] -= lr * (mix.signum() + f64::from(weight_decay) * self.p[i]);
                    self.m[i] = beta2 * self.m[i] + (1.0 - beta2) * g[i];
                }
            }
            Optimizer::Adafactor(o) => {
                let (rows, rms) = (self.rows, |x: &[f64]| norm(x) / (x.len() as f64).sqrt());
                let cols = g.len() / rows.max(1);
                let take = f64::from(t).powf(o.beta2_decay);
                let alpha = lr.min(1.0 / f64::from(t).sqrt()) * rms(&self.p).max(f64::from(o.eps2));
                let mean =
                    |it: &mut dyn Iterator<Item = f64>, n: usize| it.map(|g| g * g).sum::<f64>() / n as f64;
                for i in 0..if rows == 0 { g.len() } else { rows } {
                    let new = if rows == 0 {
                        g[i] * g[i]
                    } else {
                        mean(&mut g[i * cols..(i + 1) * cols].iter().copied(), cols)
                    };
                    self.m[i] += take * (new - self.m[i]);
                }
                for j in 0..if rows == 0 { 0 } else { cols } {
                    let new = mean(&mut g[j..].iter().step_by(cols).copied(), rows);
                    self.v[j] += take * (new - self.v[j]);
                }
                let row_mean = self.m[..rows].iter().sum::<f64>() / rows as f64;
                let v = |i: usize| match rows {
                    0 => self.m[i],
                    _ => self.m[i / cols] * self.v[i % cols] / row_mean,
                };
                let u: Vec<f64> = (0..g.len()).map(|i| g[i] / v(i).sqrt()).collect();
                let over = (rms(&u) / f64::from(o.d)).max(1.0);
                let keep = 1.0 - lr * f64::from(o.weight_decay);
                self.p.iter_mut().zip(u).for_each(|(p, u)| *p = *p * keep - alpha * u / over);
            }
            Optimizer::Lamb(o) => {
                let mut u = self.direction(o, t, g);
                u.iter_mut().zip(&self.p).for_each(|(u, p)| *u += f64::from(o.weight_decay) * p);
                let ratio = norm(&self.p) / norm(&u);
                self.p.iter_mut().zip(u).for_each(|(p, u)| *p -= lr * ratio * u);
            }
        }
    }

    /// `m̂ / (√v̂ + eps)`.
    fn direction(&mut self, o: Moments, t: i32, g: &[f64]) -> Vec<f64> {
        (0..g.len())
            .map(|i| {
                self.m[i] = o.beta1 * self.m[i] + (1.0 - o.beta1) * g[i];
                self.v[i] = o.beta2 * self.v[i] + (1.0 - o.beta2) * g[i] * g[i];
                let (m, v) = (self.m[i] / (1.0 - o.beta1.powi(t)), self.v[i] / (1.0 - o.beta2.powi(t)));
                m / (v.sqrt() + f64::from(o.eps))
            })
            .collect()
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn check(optimizer: Optimizer, clip: Option<f64>) {
    let name = format!("{optimizer:?} clip {clip:?}");
    let mut engine = Engine::new(Program::train(&step(), optimizer, clip), Options::threads(2)).unwrap();
    let mut random = TestRandom::new(11);
    let mut naive = PARAMS.map(|p| {
        let p = wide(engine.param(p).unwrap());
        Naive { m: vec![0.0; p.len()], v: vec![0.0; p.len()], rows: if p.len() == 21 { 7 } else { 0 }, p }
    });
    let start = engine.param("w").unwrap().to_vec();
    let mut clipped = 0;
    for t in 1..=6 {
        engine.input_f32("x").unwrap().fill_with(|| random.uniform(-1.0, 1.0));
        engine.input_f32("t").unwrap().fill_with(|| random.uniform(-1.0, 1.0));
        let lr = LR / t as f32;
        engine.step(lr).unwrap();
        assert_eq!(engine.steps_done(), t as u64);
        // The engine's own gradients of this step: what is compared is the update.
        let mut grads = PARAMS.map(|p| wide(engine.grad(p).unwrap().unwrap()));
        if let Some(max) = clip {
            let all = norm(&grads.concat());
            let seen = engine.grad_norm().unwrap();
            assert!((all - seen).abs() <= 1e-6 * all, "{name}: norm {seen}, should be {all}");
            let scale = (max / (all + 1e-6)).min(1.0);
            clipped += usize::from(scale < 1.0);
            grads.iter_mut().flatten().for_each(|g| *g *= scale);
        } else {
            assert_eq!(engine.grad_norm(), None);
        }
        for ((param, naive), g) in PARAMS.iter().zip(&mut naive).zip(&grads) {
            naive.step(optimizer, t, f64::from(lr), g);
            for (got, want) in wide(engine.param(param).unwrap()).iter().zip(&naive.p) {
                assert!((got - want).abs() <= 2e-6, "{name}, step {t}: {param} is {got}, should be {want}");
            }
        }
        assert_eq!(engine.param("unused").unwrap(), [0.5; 19], "{name}: nothing moves without a gradient");
        assert_eq!(engine.grad("unused").unwrap(), None);
    }
    assert!(
        engine.param("w").unwrap().iter().zip(&start).all(|(a, b)| (a - b).abs() > 1e-4),
        "{name}: it moved"
    );
    assert!(clip.is_none_or(|max| (max < 1.0) == (clipped > 0)), "{name}: clipped {clipped} times");
}

#[test]
fn sgd() {
    for weight_decay in [0.0, 0.1] {
        for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
            check(Optimizer::Sgd { momentum, nesterov, weight_decay }, None);
        }
    }
}

#[test]
fn adam_and_its_kin() {
    for weight_decay in [0.0, 0.1] {
        let moments = Moments { beta1: 0.8, beta2: 0.95, eps: 1e-6, weight_decay };
        check(Optimizer::Adam(moments), None);
        check(Optimizer::AdamW(moments), None);
        check(Optimizer::Lamb(moments), None);
    }
}

#[test]
fn lion() {
    for weight_decay in [0.0, 0.1] {
        check(Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay }, None);
    }
}

#[test]
fn adafactor() {
    for weight_decay in [0.0, 0.1] {
        check(Optimizer::Adafactor(Adafactor { weight_decay, ..Adafactor::DEFAULT }), None);
    }
    check(Optimizer::Adafactor(Adafactor::DEFAULT), Some(0.05));
}

#[test]
fn adafactor_keeps_rows_and_columns() {
    let bytes = |optimizer| {
        let program = Program::train(&step(), optimizer, None);
        let engine = Engine::new(program.clone(), Options::threads(1)).unwrap();
        assert_eq!(
            engine.held().optimizer,
            Engine::footprint(&program, 1, polyreme_exec::Isa::detect()).optimizer
        );
        let kept = [Kept::Moment1, Kept::Moment2].map(|kept| engine.moment_slots(kept));
        (engine.held().optimizer, kept.map(|k| k.into_iter().map(|s| (s.name, s.dims)).collect::<Vec<_>>()))
    };
    let (bytes, kept) = bytes(Optimizer::Adafactor(Adafactor::DEFAULT));
    let named = |list: &[(&str, &[usize])]| {
        list.iter().map(|(name, dims)| (name.to_string(), dims.to_vec())).collect::<Vec<_>>()
    };
    assert_eq!(kept[0], named(&[("w", &[7, 1]), ("unused", &[19]), ("v", &[3])]));
    assert_eq!(kept[1], named(&[("w", &[1, 3])]));
    // The state of a tensor begins at a multiple of 16 floats.
    assert_eq!(bytes, (16 + 32 + 16 + 16) * size_of::<f32>());
}

#[test]
fn clipping() {
    let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.1 };
    for optimizer in [sgd, Optimizer::AdamW(Moments::DEFAULT), Optimizer::Lamb(Moments::DEFAULT)] {
        for max in [0.05, 1e3] {
            check(optimizer, Some(max));
        }
    }
}

#[test]
fn a_program_without_an_update_does_not_step() {
    let mut engine = Engine::new(Program::gradients(&step()), Options::threads(1)).unwrap();
    assert_eq!(engine.step(0.1), Err(ExecError::NoOptimizer));
    assert_eq!(engine.steps_done(), 0);
}
