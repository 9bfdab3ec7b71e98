//! GPT-2, as Hugging Face's `transformers` has it.
//!
//! The graph is that of [`Gpt`](super::Gpt) but for three things: logits are products with the table of token vectors (one
//! parameter, used twice), the epsilon of its layer norms is a size, and weights begin as GPT-2's do. Names and layouts are those
//! of `Gpt`, too: `transformers` stores its matrices the other way round and calls them otherwise, which is a matter of files
//! (`polyreme-train`'s `pretrained`). It drops attention weights in training; here only embeddings and residual branches are dropped.

use polyreme_graph::{Builder, Init, Tensor, Traced};

use super::sequence;
use crate::layer::{Dropout, Embedding, LayerNorm, Linear, Positions, attend, divides};

/// The deviation that GPT-2's weights begin with.
const STD: f32 = 0.02;

/// `tok` and learnt `pos`, pre-norm `blocks.K`, `ln`, and a last layer that is `tok` again unless it is untied. By default the
/// smallest one that was published, of 124 M parameters.
#[derive(Clone, PartialEq, Debug)]
pub struct Gpt2 {
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
    /// The activation between the two linear layers of a block, by its name in the graph's list.
    pub activation: String,
    /// Added to the variance of layer norms.
    pub eps: f32,
    /// Whether the last layer is the table of token vectors.
    pub tied: bool,
    /// The dropout probability in training: on the sum of the embeddings, and on each residual branch.
    pub dropout: f32,
}

impl Default for Gpt2 {
    fn default() -> Gpt2 {
        Gpt2 {
            vocab: 50_257,
            width: 768,
            heads: 12,
            layers: 12,
            context: 1024,
            activation: "gelu_tanh".into(),
            eps: 1e-5,
            tied: true,
            dropout: 0.0,
        }
    }
}

impl Gpt2 {
    /// `ids [b, t]` → `[b·t, vocab]`: for each token, the logits of the next one.
    pub fn logits(&self, b: &mut Builder, ids: Tensor, training: bool) -> Traced {
        let &Gpt2 { vocab, width, layers, context, eps, tied, dropout, .. } = self;
        let normal = Init::Normal { std: STD };
        let [batch, t] = sequence(b, ids)?;
        let (mut x, table) = Embedding { rows: vocab, width }.trace_shared(b, "tok", ids, normal)?;
        x = Positions { context, width }.trace_from(b, "pos", x, normal)?;
        x = Dropout { p: dropout }.trace(b, "drop", x, training)?;
        for k in 0..layers {
            x = b.layer(format!("blocks.{k}"), |b| self.block(b, x, training))?;
        }
        x = LayerNorm { width, eps }.trace(b, "ln", x)?;
        let logits = match tied {
            true => b.layer("head", |b| b.linear(x, table, None))?,
            false => Linear::new(width, vocab).without_bias().trace_from(b, "head", x, normal)?,
        };
        b.reshape(logits, [batch * t, vocab])
    }

    /// `x + proj(attention(qkv(ln1(x))))`, then `x + down(activation(up(ln2(x))))`. What is added to the residual stream begins
    /// smaller the more often that is done.
    fn block(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let &Gpt2 { width, heads, layers, eps, dropout, .. } = self;
        let (drop, norm) = (Dropout { p: dropout }, LayerNorm { width, eps });
        let inward = Init::Normal { std: STD };
        let outward = Init::Normal { std: STD / (2.0 * layers as f32).sqrt() };
        divides(b, "attention", ("heads", heads), ("width", width))?;
        let a = norm.trace(b, "ln1", x)?;
        let a = Linear::new(width, 3 * width).trace_from(b, "qkv", a, inward)?;
        let a = attend(b, a, heads, true, None)?;
        let a = Linear::new(width, width).trace_from(b, "proj", a, outward)?;
        let a = drop.trace(b, "drop1", a, training)?;
        let x = b.add(x, a)?;
        let f = norm.trace(b, "ln2", x)?;
        let f = Linear::new(width, 4 * width).trace_from(b, "up", f, inward)?;
        let f = b.activation(&self.activation, f)?;
        let f = Linear::new(4 * width, width).trace_from(b, "down", f, outward)?;
        let f = drop.trace(b, "drop2", f, training)?;
        b.add(x, f)
    }
}
