//! Self-attention with several heads.

use polyreme_graph::{Builder, Init, Tensor, TraceErrorKind, Traced};

use super::{divides, uniform};

/// `torch.nn.MultiheadAttention(batch_first=True)` of a sequence with itself: `in_proj_weight [3·width, width]`,
/// `in_proj_bias`, `out_proj.weight [width, width]`, `out_proj.bias`. Attention weights are never dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MultiheadAttention {
    /// The width of the sequence.
    pub width: usize,
    /// How many heads share it.
    pub heads: usize,
    /// Whether a position sees only itself and earlier ones.
    pub causal: bool,
}

impl MultiheadAttention {
    /// `[batch, time, width]` → the same. The mask, if any, is added to the scores.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor, mask: Option<Tensor>) -> Traced {
        let d = self.width;
        b.layer(name, |b| {
            divides(b, "attention", ("heads", self.heads), ("width", d))?;
            // Xavier initialisation of the three projections as one matrix.
            let bound = (6.0 / (3 * d + d) as f32).sqrt();
            let weight = b.param("in_proj_weight", [3 * d, d], Init::Uniform { bound })?;
            let bias = b.param("in_proj_bias", [3 * d], Init::Const(0.0))?;
            let qkv = b.linear(x, weight, Some(bias))?;
            let o = attend(b, qkv, self.heads, self.causal, mask)?;
            b.layer("out_proj", |b| {
                let weight = b.param("weight", [d, d], uniform(d))?;
                let bias = b.param("bias", [d], Init::Const(0.0))?;
                b.linear(o, weight, Some(bias))
            })
        })
    }
}

/// Attention of `qkv [batch, time, 3·width]`: queries, keys and values side by side, each cut into heads
/// → `[batch, time, width]`.
pub(crate) fn attend(
    b: &mut Builder,
    qkv: Tensor,
    heads: usize,
    causal: bool,
    mask: Option<Tensor>,
) -> Traced {
    let shape = b.shape(qkv).clone();
    let &[batch, t, wide] = shape.dims() else {
        let why = "3 dims are needed: [batch, time, 3 x width]".into();
        return b.error(TraceErrorKind::Shape { op: "attention", shape, why });
    };
    let d = wide / 3;
    divides(b, "attention", ("heads", heads), ("width", d))?;
    let qkv = b.reshape(qkv, [batch, t, 3, heads, d / heads])?;
    let o = b.attention_packed(qkv, causal, mask)?;
    b.reshape(o, [batch, t, d])
}
