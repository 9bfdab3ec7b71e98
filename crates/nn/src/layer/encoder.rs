//! A layer of a transformer encoder.

use polyreme_graph::{Builder, Tensor, Traced};

use super::{Dropout, LayerNorm, Linear, MultiheadAttention};

/// `torch.nn.TransformerEncoderLayer(batch_first=True)`: `self_attn`, `linear1`, `linear2`, `norm1`, `norm2`.
///
/// Dropout is applied where PyTorch applies it, except on the attention weights, which are never dropped.
#[derive(Clone, PartialEq, Debug)]
pub struct TransformerEncoderLayer {
    /// The width of the sequence.
    pub width: usize,
    /// How many attention heads.
    pub heads: usize,
    /// The width between the two linear layers.
    pub hidden: usize,
    /// The activation between them, by its name in the graph's list.
    pub activation: String,
    /// The dropout probability in training.
    pub dropout: f32,
    /// Whether norms come before attention and linear layers (pre-norm), or after their sums.
    pub norm_first: bool,
    /// Whether a position sees only itself and earlier ones.
    pub causal: bool,
}

impl TransformerEncoderLayer {
    /// PyTorch's defaults: ReLU, dropout 0.1, post-norm.
    pub fn new(width: usize, heads: usize, hidden: usize) -> TransformerEncoderLayer {
        let activation = "relu".into();
        TransformerEncoderLayer {
            width,
            heads,
            hidden,
            activation,
            dropout: 0.1,
            norm_first: false,
            causal: false,
        }
    }

    /// `[batch, time, width]` → the same. The mask, if any, is added to the scores.
    pub fn trace(
        &self,
        b: &mut Builder,
        name: &str,
        x: Tensor,
        mask: Option<Tensor>,
        training: bool,
    ) -> Traced {
        let (norm, drop) = (LayerNorm::new(self.width), Dropout { p: self.dropout });
        let attention = MultiheadAttention { width: self.width, heads: self.heads, causal: self.causal };
        b.layer(name, |b| {
            let inner = if self.norm_first { norm.trace(b, "norm1", x)? } else { x };
            let a = attention.trace(b, "self_attn", inner, mask)?;
            let a = drop.trace(b, "dropout1", a, training)?;
            let mut x = b.add(x, a)?;
            if !self.norm_first {
                x = norm.trace(b, "norm1", x)?;
            }
            let inner = if self.norm_first { norm.trace(b, "norm2", x)? } else { x };
            let f = Linear::new(self.width, self.hidden).trace(b, "linear1", inner)?;
            let f = b.activation(&self.activation, f)?;
            let f = drop.trace(b, "dropout", f, training)?;
            let f = Linear::new(self.hidden, self.width).trace(b, "linear2", f)?;
            let f = drop.trace(b, "dropout2", f, training)?;
            let x = b.add(x, f)?;
            if self.norm_first { Ok(x) } else { norm.trace(b, "norm2", x) }
        })
    }
}
