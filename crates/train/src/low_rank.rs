//! Files of a run with low-rank factors (`model.lora`): which tensors each of them has, and factors merged into weights.
//!
//! Beside factors nearly the whole model is frozen. It is written once, when the run begins; checkpoints and the run's model have what
//! is learnt. On request the model has the weights that a layer with factors computes with, `W + scale · B·A`, under the
//! names of a model without any. That is done row by row while the file is written, from whatever the numbers come from: the
//! arena of one rank, or the ranks that have the model together.

use std::cell::RefCell;
use std::ops::Range;

use polyreme_dtype::DType;
use polyreme_graph::LowRank;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::tensors::TensorSource;
use crate::whole::WholeModel;

/// Which tensors of a model a file has.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub enum Selection {
    /// All of them.
    #[default]
    All,
    /// Those that are not kept in a file of their own.
    Learnt,
    /// Those that are.
    Frozen,
    /// All but factors, which are merged into the weights beside them.
    Merged {
        /// What the product of factors is multiplied by.
        scale: f32,
    },
}

impl Selection {
    fn has(self, whole: &WholeModel, name: &str) -> bool {
        match self {
            Selection::All => true,
            Selection::Learnt => !whole.is_apart(name),
            Selection::Frozen => whole.is_apart(name),
            Selection::Merged { .. } => !LowRank::is_factor(name),
        }
    }
}

/// The tensors of a selection, with their numbers.
pub(crate) struct Selected<'a, S: ?Sized> {
    /// By tensor of the selection: which one it is in the source.
    of: Vec<usize>,
    /// By tensor of the selection: the factors that are merged into it.
    factors: Vec<Option<Factors>>,
    scale: f32,
    numbers: &'a S,
    /// The factors that were read last, and of which tensor: a tensor is asked for in parts.
    last: RefCell<(usize, Vec<f32>, Vec<f32>)>,
}

/// Where the factors of a weight are in the source.
#[derive(Clone, Copy)]
struct Factors {
    down: usize,
    up: usize,
    rank: usize,
    inputs: usize,
    outputs: usize,
}

impl<'a, S: TensorSource + ?Sized> Selected<'a, S> {
    /// Those of `tensors`, by name, dims and type, whose numbers these are.
    pub(crate) fn new(
        selection: Selection,
        whole: &WholeModel,
        tensors: &[(&str, &[usize], DType)],
        numbers: &'a S,
    ) -> Selected<'a, S> {
        let of: Vec<usize> = (0..tensors.len()).filter(|k| selection.has(whole, tensors[*k].0)).collect();
        let (merges, scale) = match selection {
            Selection::Merged { scale } => (true, scale),
            Selection::All | Selection::Learnt | Selection::Frozen => (false, 0.0),
        };
        let factors = of.iter().map(|k| Factors::of(tensors, *k).filter(|_| merges)).collect();
        Selected { of, factors, scale, numbers, last: RefCell::new((usize::MAX, Vec::new(), Vec::new())) }
    }

    /// Which tensors of the source they are.
    pub(crate) fn tensors(&self) -> &[usize] {
        &self.of
    }

    fn all(&self, tensor: usize, numel: usize) -> Result<Vec<f32>, CheckpointError> {
        let mut all = Vec::with_capacity(numel);
        self.numbers.read(tensor, 0..numel, &mut |part| all.extend_from_slice(part))?;
        Ok(all)
    }
}

impl Factors {
    /// The factors beside a weight, if it has some.
    fn of(tensors: &[(&str, &[usize], DType)], weight: usize) -> Option<Factors> {
        let layer = tensors[weight].0.strip_suffix(".weight")?;
        let factor =
            |last: &str| tensors.iter().position(|(name, _, _)| name.strip_prefix(layer) == Some(last));
        let (down, up) = (factor(&format!(".{}", LowRank::DOWN))?, factor(&format!(".{}", LowRank::UP))?);
        let (&[rank, inputs], &[outputs, _]) = (tensors[down].1, tensors[up].1) else { return None };
        Some(Factors { down, up, rank, inputs, outputs })
    }

    /// Adds `scale · B·A` to elements of the weight, from the `first` on.
    fn add(&self, [down, up]: [&[f32]; 2], scale: f32, first: usize, weight: &mut [f32]) {
        for (at, w) in (first..).zip(weight) {
            let (row, column) = (at / self.inputs, at % self.inputs);
            let up = &up[row * self.rank..][..self.rank];
            let down = down[column..].iter().step_by(self.inputs);
            let sum: f64 = up.iter().zip(down).map(|(b, a)| f64::from(*b) * f64::from(*a)).sum();
            *w = (f64::from(*w) + f64::from(scale) * sum) as f32;
        }
    }
}

impl<S: TensorSource + ?Sized> TensorSource for Selected<'_, S> {
    fn read(
        &self,
        tensor: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(&[f32]),
    ) -> Result<(), CheckpointError> {
        let Some(factors) = self.factors[tensor] else {
            return self.numbers.read(self.of[tensor], range, read);
        };
        let mut last = self.last.borrow_mut();
        if last.0 != tensor {
            let down = self.all(factors.down, factors.rank * factors.inputs)?;
            let up = self.all(factors.up, factors.outputs * factors.rank)?;
            *last = (tensor, down, up);
        }
        let mut at = range.start;
        self.numbers.read(self.of[tensor], range, &mut |weight| {
            let mut merged = weight.to_vec();
            factors.add([&last.1, &last.2], self.scale, at, &mut merged);
            at += merged.len();
            read(&merged);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::View;

    /// `W + 0.5 · B·A` by hand, read whole and in odd parts.
    #[test]
    fn factors_are_merged_in_any_parts() {
        let numbers = |n: usize| (0..n).map(|i| (i * i % 7) as f32 - 3.0).collect::<Vec<_>>();
        let (w, a, b) = (numbers(12), numbers(8), numbers(6));
        let view = |name, dims, data| View { name, dims, dtype: DType::F32, data };
        let views = [
            view("x.weight", &[3, 4], &w[..]),
            view("x.lora_a", &[2, 4], &a[..]),
            view("x.lora_b", &[3, 2], &b[..]),
            view("y.weight", &[3, 4], &w[..]),
        ];
        let heads = views.iter().map(|v| (v.name, v.dims, v.dtype)).collect::<Vec<_>>();
        let whole = WholeModel { params: Vec::new(), frozen: Vec::new(), states: Vec::new() };
        let merged = Selected::new(Selection::Merged { scale: 0.5 }, &whole, &heads, &views[..]);
        assert_eq!(merged.tensors(), [0, 3]);
        let want: Vec<f32> = (0..12)
            .map(|i| w[i] + 0.5 * (b[i / 4 * 2] * a[i % 4] + b[i / 4 * 2 + 1] * a[4 + i % 4]))
            .collect();
        let read = |tensor, parts: &[Range<usize>]| {
            let mut got = Vec::new();
            parts
                .iter()
                .for_each(|p| merged.read(tensor, p.clone(), &mut |x| got.extend_from_slice(x)).unwrap());
            got
        };
        assert_eq!(read(0, &[0..12, 12..12]), want);
        assert_eq!(read(1, &[0..5, 5..12]), w);
        assert_eq!(read(0, &[0..3, 3..4, 4..11, 11..12]), want);
    }
}
