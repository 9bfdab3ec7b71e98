//! Gradients against central differences.
//!
//! The loss is `Σ y·w` with fixed weights `w`. The test sums it in f64 from the engine's f32 `y`, moves each parameter
//! along random directions `d` and compares the slope with `<gradient, d>`. An error of a tenth in one element of a
//! gradient of a hundred is above the tolerance.

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Builder, DType, Graph, Init, Precision, Program, Tensor, Traced, differentiate};
use polyreme_kernels::Isa;

use crate::random::TestRandom;

/// Which values parameters take, to stay away from kinks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values {
    /// Uniform in a range.
    Between(f32, f32),
    /// Either sign, between two sizes.
    Signed(f32, f32),
    /// All different, at least this far apart: for max ops.
    Apart(f32),
    /// Signed(0.1, 0.9) plus an integer: for floor.
    OffIntegers,
}

impl Values {
    fn fill(self, random: &mut TestRandom, data: &mut [f32]) {
        match self {
            Values::Between(low, high) => data.fill_with(|| random.uniform(low, high)),
            Values::Signed(low, high) => data.fill_with(|| random.signed(low, high)),
            Values::Apart(gap) => {
                let half = data.len() as f32 / 2.0;
                data.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f32 + 0.3 - half) * gap);
                random.shuffle(data);
            }
            Values::OffIntegers => data.fill_with(|| random.below(5) as f32 - 2.0 + random.uniform(0.1, 0.9)),
        }
    }
}

/// One case: what to feed, and the tolerance.
pub(crate) struct Check {
    name: String,
    values: Vec<Values>,
    eps: f32,
    tolerance: f64,
    /// How many roundings to half precision results may differ by from f32's, in norm.
    roundings: f64,
    floats: Vec<(String, Vec<f32>)>,
    integers: Vec<(String, Vec<i32>)>,
}

/// Checks with the usual settings.
pub(crate) fn check(name: &str, shapes: &[&[usize]], f: impl Fn(&mut Builder, &[Tensor]) -> Traced) {
    Check::new(name).run(shapes, f);
}

impl Check {
    /// Values in -1..1, steps of 0.01, a tolerance of 0.005.
    pub(crate) fn new(name: &str) -> Check {
        Check {
            name: name.into(),
            values: vec![Values::Between(-1.0, 1.0)],
            eps: 1e-2,
            tolerance: 5e-3,
            roundings: 16.0,
            floats: Vec::new(),
            integers: Vec::new(),
        }
    }
    /// Sets the values of every parameter.
    pub(crate) fn values(self, values: Values) -> Check {
        self.values_of(&[values])
    }
    /// Sets the values of each parameter; the last entry serves the rest.
    pub(crate) fn values_of(self, values: &[Values]) -> Check {
        Check { values: values.to_vec(), ..self }
    }
    /// Sets the step of the differences, and the tolerance relative to the gradient's size.
    pub(crate) fn exact(self, eps: f32, tolerance: f64) -> Check {
        Check { eps, tolerance, ..self }
    }
    /// Sets how many roundings to half precision results may differ by.
    pub(crate) fn roundings(self, roundings: f64) -> Check {
        Check { roundings, ..self }
    }
    /// Sets an f32 input.
    pub(crate) fn floats(mut self, name: &str, data: Vec<f32>) -> Check {
        self.floats.push((name.into(), data));
        self
    }
    /// Sets an i32 input.
    pub(crate) fn integers(mut self, name: &str, data: Vec<i32>) -> Check {
        self.integers.push((name.into(), data));
        self
    }

    /// Builds `f` of parameters with these shapes and compares.
    pub(crate) fn run(&self, shapes: &[&[usize]], f: impl Fn(&mut Builder, &[Tensor]) -> Traced) {
        self.compare_halves(shapes, &f);
        let (forward, step) = self.trace(shapes, false, f);
        let fast = Options { seed: 7, ..Options::threads(2) };
        let plain = Options { isa: Isa::SCALAR, seed: 7, ..Options::threads(1) };
        let [a, b] = [fast.clone(), plain].map(|options| self.compare(&forward, &step, options));
        for ((what, a), (_, b)) in a.iter().zip(&b) {
            let size = a.iter().fold(1.0f32, |m, x| m.max(x.abs()));
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                let close = (a - b).abs() <= 1e-4 * size;
                assert!(close, "{}: {what}[{i}] is {a} with {:?} and {b} in scalars", self.name, fast.isa);
            }
        }
    }

    /// Compares `y` and its gradients in half precision with those in f32.
    fn compare_halves(&self, shapes: &[&[usize]], f: impl Fn(&mut Builder, &[Tensor]) -> Traced) {
        let (forward, step) = self.trace(shapes, true, f);
        let mut random = TestRandom::new(1);
        let mut w = vec![0.0; forward.shape(forward.output("y").unwrap()).numel()];
        w.fill_with(|| random.signed(0.5, 1.0));
        let params: Vec<Vec<f32>> = (0..forward.params.len())
            .map(|i| {
                let mut data = vec![0.0; forward.shape(forward.params[i].value).numel()];
                self.values[i.min(self.values.len() - 1)].fill(&mut random, &mut data);
                data
            })
            .collect();
        let run = |precision: &Precision, isa: Isa, threads: usize, reproducible: bool| {
            let options = Options { seed: 7, isa, ..Options::threads(threads) };
            let program = Program::gradients(&precision.apply(&step)).with_reproducible(reproducible);
            let mut engine = Engine::new(program, options).unwrap();
            for i in 0..shapes.len() {
                engine.input_f32(&format!("zero{i}")).unwrap().fill(0.0);
            }
            self.feed(&mut engine, &w, &params);
            engine.run().unwrap();
            let mut results = vec![("y".to_string(), engine.output("y").unwrap().to_vec())];
            for p in &forward.params {
                results.push((p.name.clone(), engine.grad(&p.name).unwrap().unwrap_or_default().to_vec()));
            }
            results
        };
        let want = run(&Precision::F32, Isa::detect(), 1, false);
        for (half, unit) in [(DType::Bf16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
            let precision = Precision::half(half);
            // Products of small shapes are of pairs only where the bits must not depend on the machine.
            for (isa, threads, reproducible) in [
                (Isa::SCALAR, 1, false),
                (Isa::detect(), 2, false),
                (Isa::SCALAR, 1, true),
                (Isa::detect(), 2, true),
            ] {
                let got = run(&precision, isa, threads, reproducible);
                for ((what, want), (_, got)) in want.iter().zip(got) {
                    let far: Vec<f32> = want.iter().zip(&got).map(|(a, b)| a - b).collect();
                    let (far, size) = (dot(&far, &far).sqrt(), dot(want, want).sqrt().max(1e-2));
                    assert!(
                        far <= self.roundings * unit * size,
                        "{}: {what} in {half} with {isa:?}, reproducible {reproducible}, is {:.1} roundings away, {} are allowed",
                        self.name,
                        far / size / unit,
                        self.roundings
                    );
                }
            }
        }
    }

    /// With `varies`, operands depend on what is fed, as activations do; what is fed are zeros.
    fn trace(
        &self,
        shapes: &[&[usize]],
        varies: bool,
        f: impl Fn(&mut Builder, &[Tensor]) -> Traced,
    ) -> (Graph, Graph) {
        let mut b = Builder::new();
        let params: Vec<_> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| {
                let param = b.param(&format!("p{i}"), *shape, Init::Const(0.0)).unwrap();
                if !varies {
                    return param;
                }
                let zero = b.input(&format!("zero{i}"), *shape, DType::F32).unwrap();
                b.add(param, zero).unwrap()
            })
            .collect();
        let y = f(&mut b, &params).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let dims = b.dims(y);
        let w = b.input("w", dims.clone(), DType::F32).unwrap();
        let yw = b.mul(y, w).unwrap();
        let loss = b.sum(yw, &(0..dims.len()).collect::<Vec<_>>()).unwrap();
        let forward = b.finish(&[("y", y)]);
        let step = differentiate(&forward, loss).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        (forward, step)
    }

    /// Compares slopes, and returns `y` and all gradients.
    fn compare(&self, forward: &Graph, step: &Graph, options: Options) -> Vec<(String, Vec<f32>)> {
        let name = &self.name;
        let mut random = TestRandom::new(1);
        let mut engine = Engine::new(Program::gradients(step), options.clone()).unwrap();
        let mut w = vec![0.0; forward.shape(forward.output("y").unwrap()).numel()];
        w.fill_with(|| random.signed(0.5, 1.0));
        let params: Vec<Vec<f32>> = forward
            .params
            .iter()
            .enumerate()
            .map(|(i, p)| {
                let mut data = vec![0.0; forward.shape(p.value).numel()];
                self.values[i.min(self.values.len() - 1)].fill(&mut random, &mut data);
                data
            })
            .collect();
        self.feed(&mut engine, &w, &params);
        engine.run().unwrap();
        let first: Vec<_> = forward.params.iter().map(|p| bits(engine.grad(&p.name).unwrap())).collect();
        // Again, over the memory of the first run: nothing may rely on zeros.
        engine.run().unwrap();
        for (p, first) in forward.params.iter().zip(first) {
            let again = bits(engine.grad(&p.name).unwrap());
            assert!(first == again, "{name}: the gradient of {} differs in a second run", p.name);
        }
        let mut outer = Engine::new(Program::forward(forward), options.clone()).unwrap();
        let y = self.outputs(&mut outer, &w, &params);
        let mut results = vec![("y".to_string(), y.clone())];
        for (a, b) in y.iter().zip(engine.output("y").unwrap()) {
            assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{name}: y is {a} forward, {b} in a step");
        }
        for (i, values) in params.iter().enumerate() {
            let param = forward.params[i].name.clone();
            let grad = engine.grad(&param).unwrap().map_or(vec![0.0; values.len()], <[f32]>::to_vec);
            assert!(grad.iter().all(|g| g.is_finite()), "{name}: gradient of {param} is {grad:?}");
            for k in 0..3 {
                let mut d = vec![0.0; values.len()];
                d.fill_with(|| random.signed(0.5, 1.0));
                let mut at = |by: f32| {
                    let mut moved = params.clone();
                    moved[i].iter_mut().zip(&d).for_each(|(x, d)| *x += by * d);
                    let y = self.outputs(&mut outer, &w, &moved);
                    // What was really added, after rounding.
                    let size: f64 =
                        moved[i].iter().zip(values).zip(&d).map(|((m, x), d)| project(m - x, *d)).sum();
                    let norm: f64 = d.iter().map(|d| f64::from(*d).powi(2)).sum();
                    (dot(&y, &w), size / norm)
                };
                let ((above, up), (below, down)) = (at(self.eps), at(-self.eps));
                let slope = (above - below) / (up - down);
                let want = dot(&grad, &d);
                let size = dot(&grad, &grad).sqrt().max(want.abs()).max(1e-2);
                assert!(
                    (slope - want).abs() <= self.tolerance * size,
                    "{name}, {:?}: gradient of {param} along direction {k} is {want}, the slope {slope} (size {size})",
                    options.isa,
                );
            }
            results.push((param, grad));
        }
        results
    }

    fn outputs(&self, engine: &mut Engine, w: &[f32], params: &[Vec<f32>]) -> Vec<f32> {
        self.feed(engine, w, params);
        engine.run().unwrap();
        engine.output("y").unwrap().to_vec()
    }

    fn feed(&self, engine: &mut Engine, w: &[f32], params: &[Vec<f32>]) {
        engine.input_f32("w").unwrap().copy_from_slice(w);
        for (name, data) in &self.floats {
            engine.input_f32(name).unwrap().copy_from_slice(data);
        }
        for (name, data) in &self.integers {
            engine.input_i32(name).unwrap().copy_from_slice(data);
        }
        for (i, data) in params.iter().enumerate() {
            let name = engine.program().graph().params[i].name.clone();
            engine.param_mut(&name).unwrap().copy_from_slice(data);
        }
    }
}

fn bits(x: Option<&[f32]>) -> Vec<u32> {
    x.unwrap_or_default().iter().map(|x| x.to_bits()).collect()
}

fn project(moved: f32, d: f32) -> f64 {
    f64::from(moved) * f64::from(d)
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}
