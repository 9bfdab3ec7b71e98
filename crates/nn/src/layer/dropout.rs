//! The dropout layer.

use polyreme_graph::{Builder, Tensor, Traced};

/// `torch.nn.Dropout`: in training each element becomes zero with probability `p`, and the rest are scaled by `1/(1-p)`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// The dropout probability, in `0..1`.
    pub p: f32,
}

impl Dropout {
    /// Any shape → the same; outside training, `x` itself.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor, training: bool) -> Traced {
        if training { b.layer(name, |b| b.dropout(x, self.p)) } else { Ok(x) }
    }
}
