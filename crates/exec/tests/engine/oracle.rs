//! The engine's outputs against a definition in f64, element by element.

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Builder, Init, Program, Tensor, Traced};
use polyreme_kernels::Isa;

use crate::random::TestRandom;

/// A tensor that is read by its indices.
pub(crate) struct Array {
    pub(crate) dims: Vec<usize>,
    pub(crate) data: Vec<f64>,
}

impl Array {
    pub(crate) fn new(dims: &[usize], f: impl Fn(&[usize]) -> f64) -> Array {
        let n: usize = dims.iter().product();
        let data = (0..n).map(|i| f(&unravel(dims, i))).collect();
        Array { dims: dims.to_vec(), data }
    }
    pub(crate) fn scalar(x: f64) -> Array {
        Array { dims: Vec::new(), data: vec![x] }
    }
    /// The element at these indices, by the rule of broadcasting.
    pub(crate) fn at(&self, idx: &[usize]) -> f64 {
        let idx = &idx[idx.len() - self.dims.len()..];
        let flat = idx.iter().zip(&self.dims).fold(0, |flat, (&i, &d)| flat * d + if d == 1 { 0 } else { i });
        self.data[flat]
    }
    /// The element of an image, zero outside.
    pub(crate) fn pixel(&self, n: usize, y: isize, x: isize, c: usize) -> Option<f64> {
        let inside = (0..self.dims[1] as isize).contains(&y) && (0..self.dims[2] as isize).contains(&x);
        inside.then(|| self.at(&[n, y as usize, x as usize, c]))
    }
}

pub(crate) fn unravel(dims: &[usize], mut flat: usize) -> Vec<usize> {
    let mut idx = vec![0; dims.len()];
    for (i, &d) in idx.iter_mut().zip(dims).rev() {
        (*i, flat) = (flat % d, flat / d);
    }
    idx
}

/// The range of numbers that serves most ops.
pub(crate) const LOW: f32 = -1.0;
pub(crate) const HIGH: f32 = 1.0;

/// [`check_with`] in the usual range.
pub(crate) fn check(
    name: &str,
    shapes: &[&[usize]],
    f: impl Fn(&mut Builder, &[Tensor]) -> Traced,
    want: impl Fn(&[Array]) -> Array,
) {
    check_with(name, (LOW, HIGH), shapes, &[], f, want);
}

/// Runs `f` on numbers of a range, and on integers; compares with the definition.
pub(crate) fn check_with(
    name: &str,
    (low, high): (f32, f32),
    shapes: &[&[usize]],
    integers: &[(&str, &[i32])],
    f: impl Fn(&mut Builder, &[Tensor]) -> Traced,
    want: impl Fn(&[Array]) -> Array,
) {
    let mut b = Builder::new();
    let params: Vec<_> = shapes
        .iter()
        .enumerate()
        .map(|(i, s)| b.param(&format!("p{i}"), *s, Init::Const(0.0)).unwrap())
        .collect();
    let y = f(&mut b, &params).unwrap_or_else(|e| panic!("{name}: {e}"));
    let dims = b.dims(y);
    let program = Program::forward(&b.finish(&[("y", y)]));
    for isa in [Isa::detect(), Isa::SCALAR] {
        let mut engine = Engine::new(program.clone(), Options { isa, ..Options::threads(2) }).unwrap();
        let mut random = TestRandom::new(9);
        let mut operands = Vec::new();
        for (i, dims) in shapes.iter().enumerate() {
            let data = engine.param_mut(&format!("p{i}")).unwrap();
            data.fill_with(|| random.uniform(low, high));
            operands.push(Array { dims: dims.to_vec(), data: data.iter().map(|x| f64::from(*x)).collect() });
        }
        for (name, data) in integers {
            engine.input_i32(name).unwrap().copy_from_slice(data);
        }
        engine.run().unwrap();
        let want = want(&operands);
        assert_eq!(dims, want.dims, "{name}: dims");
        let size = want.data.iter().fold(1.0f64, |m, x| m.max(x.abs()));
        for (i, (got, want)) in engine.output("y").unwrap().iter().zip(&want.data).enumerate() {
            let close = (f64::from(*got) - want).abs() <= 1e-5 * size;
            assert!(close, "{name}, {isa:?}: {got} at {:?}, should be {want}", unravel(&dims, i));
        }
    }
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
