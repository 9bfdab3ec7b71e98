//! A vector for each number of a row, which takes its place.
//!
//! A linear layer sees a number as one direction: twice the age is twice as far. A vector of several hinges,
//! `relu(weight · x + bias)`, is a piecewise-linear function of the number whose knots are learnt, so that the layers after
//! it can tell "between 30 and 40" from "above 60". It is the simplest embedding of "On Embeddings for Numerical Features in
//! Tabular Deep Learning" (Gorishniy et al., 2022; there "LR", in its code `LinearReLUEmbeddings`): nothing of it depends on the
//! data, as bins would, and it needs no op that other models do not have, as sines would.

use polyreme_graph::{Builder, Tensor, TraceErrorKind, Traced};

use super::{positive, uniform};

/// `relu(x[j] · weight[j] + bias[j])` for each number `j` of a row: `weight` and `bias`, each `[numbers, width]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NumberVectors {
    /// How many numbers a row has.
    pub numbers: usize,
    /// The length of each number's vector.
    pub width: usize,
}

impl NumberVectors {
    /// `[n, numbers]` → `[n, numbers * width]`, vector after vector.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        let &NumberVectors { numbers, width } = self;
        b.layer(name, |b| {
            positive(b, "number_vectors", &[("numbers", numbers), ("width", width)])?;
            let shape = b.shape(x).clone();
            let n = match *shape.dims() {
                [n, m] if m == numbers => n,
                _ => {
                    let why = format!("[batch, {numbers}] is needed");
                    return b.error(TraceErrorKind::Shape { op: "number_vectors", shape, why });
                }
            };
            let weight = b.param("weight", [numbers, width], uniform(width))?;
            let bias = b.param("bias", [numbers, width], uniform(width))?;
            let x = b.reshape(x, [n, numbers, 1])?;
            let x = b.mul(x, weight)?;
            let x = b.add(x, bias)?;
            let x = b.activation("relu", x)?;
            b.reshape(x, [n, numbers * width])
        })
    }
}
