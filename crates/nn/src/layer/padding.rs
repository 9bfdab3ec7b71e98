//! Sequences of different lengths in one batch: shorter ones are filled up with a token of their own, the padding, and
//! nothing that a model computes of a sequence depends on how much of it there is.
//!
//! Which positions are padding is found from the ids once, as a mask `[batch, time]` of ones (tokens) and zeros. Everything
//! else is element-wise work on it, so there are no kernels, gradients or rules for ranks of its own:
//!
//! ```text
//! attention        a number far below all scores is added to those of padded keys: exp of them is 0
//! LSTM backwards   gates of padded steps are closed (i = f = o = 0): the state stays the zeros that it began with
//! GRU backwards    z = 1 at padded steps: the state stays the zeros that it began with
//! mean over time   Σ mask·x / Σ mask
//! last step        Σ last·x, where last is 1 at the last token and 0 elsewhere
//! ```
//!
//! A recurrent layer that runs forwards meets padding after the last token, and what it makes of it is never read. Queries
//! at padded positions and what follows from them are computed and not read either: their gradients are zeros, and add
//! nothing to those of parameters. The row of the padding in an embedding's table gets no gradient.
//!
//! A sequence of padding alone (samples that fill up a batch of an evaluation) gives finite numbers that mean nothing.

use polyreme_graph::op::{Cell, Unary};
use polyreme_graph::{Builder, DType, Tensor, Traced};

/// What is added to scores of padded keys. Finite, so that a sequence of padding alone does not become NaN.
const HIDDEN: f32 = -1e30;
/// What is added to the gates of padded steps: sigmoid and tanh are at their limits, also as an f16.
const CLOSED: f32 = 3e4;

/// Which positions of a batch of sequences are tokens.
#[derive(Clone, Copy, Debug)]
pub struct Padding {
    /// `[batch, time]`: 1 for a token, 0 for padding.
    mask: Tensor,
}

impl Padding {
    /// Of `ids [batch, time]`, where the id `padding` fills sequences up at their end.
    pub fn of(b: &mut Builder, ids: Tensor, padding: usize) -> Traced<Padding> {
        b.layer("padding", |b| {
            // An f32 has every whole number below 2^24, and vocabularies are smaller.
            let ids = b.cast(ids, DType::F32)?;
            let apart = b.unary(Unary::Offset(-(padding as f32)), ids)?;
            let apart = b.unary(Unary::Abs, apart)?;
            Ok(Padding { mask: b.unary(Unary::Clamp(0.0, 1.0), apart)? })
        })
    }

    /// What is added to the scores of an attention: `[batch, 1, time]`.
    pub fn scores(&self, b: &mut Builder) -> Traced {
        b.layer("padding", |b| {
            let dims = b.dims(self.mask);
            let hidden = b.unary(Unary::Offset(-1.0), self.mask)?;
            let scores = b.scale(hidden, -HIDDEN)?;
            b.reshape(scores, [dims[0], 1, dims[1]])
        })
    }

    /// `xp [batch, time, gates·hidden]`, what a recurrent layer that runs backwards takes of its input, such that its state
    /// stays zero until it comes to the last token.
    pub(super) fn closed(&self, b: &mut Builder, cell: Cell, xp: Tensor) -> Traced {
        let sign = match cell {
            Cell::Lstm => 1.0,
            Cell::Gru => -1.0,
        };
        let mask = self.by_step(b)?;
        let padded = b.unary(Unary::Offset(-1.0), mask)?;
        let closed = b.scale(padded, sign * CLOSED)?;
        b.add(xp, closed)
    }

    /// The mask as `[batch, time, 1]`.
    fn by_step(&self, b: &mut Builder) -> Traced {
        let dims = b.dims(self.mask);
        b.reshape(self.mask, [dims[0], dims[1], 1])
    }
}

/// `[batch, time, width]` → `[batch·time, width]`, a row for each token; those of padding mean nothing.
pub fn by_token(b: &mut Builder, x: Tensor) -> Traced {
    let dims = b.dims(x);
    b.reshape(x, [dims[0] * dims[1], dims[2]])
}

/// `[batch, time, width]` → `[batch, width]`, the mean over the tokens of each sequence.
pub fn mean_time(b: &mut Builder, x: Tensor, padding: Option<Padding>) -> Traced {
    let Some(padding) = padding else { return b.mean(x, &[1]) };
    let batch = b.dims(x)[0];
    let mask = padding.by_step(b)?;
    let tokens = b.mul(x, mask)?;
    let sum = b.sum(tokens, &[1])?;
    let n = b.sum(padding.mask, &[1])?;
    let n = b.unary(Unary::Clamp(1.0, f32::MAX), n)?;
    let n = b.reshape(n, [batch, 1])?;
    b.div(sum, n)
}

/// `[batch, time, width]` → `[batch, width]`, the last token of each sequence.
pub fn last_step(b: &mut Builder, x: Tensor, padding: Option<Padding>) -> Traced {
    let dims = b.dims(x);
    let (batch, t, width) = (dims[0], dims[1], dims[2]);
    let Some(padding) = padding.filter(|_| t > 1) else {
        let last = b.slice(x, 1, t - 1, 1)?;
        return b.reshape(last, [batch, width]);
    };
    // A token that no token follows.
    let next = b.slice(padding.mask, 1, 1, t - 1)?;
    let next = b.pad(next, 1, 0, 1, 0.0)?;
    let last = b.sub(padding.mask, next)?;
    let last = b.reshape(last, [batch, t, 1])?;
    let only = b.mul(x, last)?;
    b.sum(only, &[1])
}
