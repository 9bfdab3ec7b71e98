//! A decoder-only transformer.

use polyreme_graph::{Builder, Tensor, Traced};

use super::sequence;
use crate::layer::{Dropout, Embedding, LayerNorm, Linear, Positions, attend, divides};

/// `tok` and learnt `pos`, pre-norm `blocks.K`, `ln`, and an untied `head`. By default 10.9 M parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gpt {
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The width of the embeddings.
    pub width: usize,
    /// How many attention heads.
    pub heads: usize,
    /// How many blocks.
    pub layers: usize,
    /// The longest sequence.
    pub context: usize,
    /// The dropout probability in training: on the sum of the embeddings, and on each residual branch.
    pub dropout: f32,
}

impl Default for Gpt {
    fn default() -> Gpt {
        Gpt { vocab: 256, width: 384, heads: 6, layers: 6, context: 256, dropout: 0.0 }
    }
}

impl Gpt {
    /// `ids [b, t]` → `[b·t, vocab]`: for each token, the logits of the next one.
    pub fn logits(&self, b: &mut Builder, ids: Tensor, training: bool) -> Traced {
        let &Gpt { vocab, width, heads, layers, context, dropout } = self;
        let drop = Dropout { p: dropout };
        let [batch, t] = sequence(b, ids)?;
        let mut x = Embedding { rows: vocab, width }.trace(b, "tok", ids)?;
        x = Positions { context, width }.trace(b, "pos", x)?;
        x = drop.trace(b, "drop", x, training)?;
        for k in 0..layers {
            x = b.layer(format!("blocks.{k}"), |b| block(b, x, width, heads, drop, training))?;
        }
        x = LayerNorm::new(width).trace(b, "ln", x)?;
        let logits = Linear::new(width, vocab).without_bias().trace(b, "head", x)?;
        b.reshape(logits, [batch * t, vocab])
    }
}

/// `x + proj(attention(qkv(ln1(x))))`, then `x + down(gelu(up(ln2(x))))`.
fn block(b: &mut Builder, x: Tensor, width: usize, heads: usize, drop: Dropout, training: bool) -> Traced {
    divides(b, "attention", ("heads", heads), ("width", width))?;
    let a = LayerNorm::new(width).trace(b, "ln1", x)?;
    let a = Linear::new(width, 3 * width).trace(b, "qkv", a)?;
    let a = attend(b, a, heads, true, None)?;
    let a = Linear::new(width, width).trace(b, "proj", a)?;
    let a = drop.trace(b, "drop1", a, training)?;
    let x = b.add(x, a)?;
    let f = LayerNorm::new(width).trace(b, "ln2", x)?;
    let f = Linear::new(width, 4 * width).trace(b, "up", f)?;
    let f = b.activation("gelu_tanh", f)?;
    let f = Linear::new(4 * width, width).trace(b, "down", f)?;
    let f = drop.trace(b, "drop2", f, training)?;
    b.add(x, f)
}
