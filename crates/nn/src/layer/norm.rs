//! Norms over the batch, over the last dim, and over groups of channels. Channels are the last dim.

use polyreme_graph::builder::BatchNorm;
use polyreme_graph::{Builder, Init, Tensor, TraceErrorKind, Traced};

use super::{divides, positive};

const ONE: Init = Init::Const(1.0);
const ZERO: Init = Init::Const(0.0);

/// `torch.nn.BatchNorm2d`: parameters `weight`, `bias` and states `running_mean`, `running_var`, each `[channels]`.
///
/// PyTorch's count of batches, `num_batches_tracked`, is not kept: it matters only where the momentum is `None`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct BatchNorm2d {
    /// The length of the last dim.
    pub channels: usize,
    /// Added to the variance.
    pub eps: f32,
    /// The weight of the batch in the running statistics.
    pub momentum: f32,
}

impl BatchNorm2d {
    /// With PyTorch's `eps` and `momentum`.
    pub fn new(channels: usize) -> BatchNorm2d {
        BatchNorm2d { channels, eps: 1e-5, momentum: 0.1 }
    }

    /// `[.., channels]` → the same. In training it normalises by the batch's statistics and updates the running ones.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor, training: bool) -> Traced {
        let &BatchNorm2d { channels, eps, momentum } = self;
        b.layer(name, |b| {
            positive(b, "batch_norm", &[("channels", channels)])?;
            if training && b.shape(x).rows() < 2 {
                let (shape, why) =
                    (b.shape(x).clone(), "training needs more than one value per channel".into());
                return b.error(TraceErrorKind::Shape { op: "batch_norm", shape, why });
            }
            let gamma = b.param("weight", [channels], ONE)?;
            let beta = b.param("bias", [channels], ZERO)?;
            let running_mean = b.state("running_mean", [channels], ZERO)?;
            let running_var = b.state("running_var", [channels], ONE)?;
            b.batch_norm(x, BatchNorm { gamma, beta, running_mean, running_var, eps, momentum }, training)
        })
    }
}

/// `torch.nn.LayerNorm` over the last dim: `weight` and `bias`, each `[width]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerNorm {
    /// The length of the last dim.
    pub width: usize,
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm {
    /// With PyTorch's `eps`.
    pub fn new(width: usize) -> LayerNorm {
        LayerNorm { width, eps: 1e-5 }
    }

    /// `[.., width]` → the same.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        b.layer(name, |b| {
            positive(b, "layer_norm", &[("width", self.width)])?;
            let gamma = b.param("weight", [self.width], ONE)?;
            let beta = b.param("bias", [self.width], ZERO)?;
            b.layer_norm(x, gamma, beta, self.eps)
        })
    }
}

/// `torch.nn.RMSNorm` over the last dim: `weight [width]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RmsNorm {
    /// The length of the last dim.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl RmsNorm {
    /// With PyTorch's `eps`, the machine epsilon of the element type.
    pub fn new(width: usize) -> RmsNorm {
        RmsNorm { width, eps: f32::EPSILON }
    }

    /// `[.., width]` → the same.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        b.layer(name, |b| {
            positive(b, "rms_norm", &[("width", self.width)])?;
            let gamma = b.param("weight", [self.width], ONE)?;
            b.rms_norm(x, gamma, self.eps)
        })
    }
}

/// `torch.nn.GroupNorm`: `weight` and `bias`, each `[channels]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GroupNorm {
    /// How many groups of channels, each normalised by itself.
    pub groups: usize,
    /// The length of the last dim.
    pub channels: usize,
    /// Added to the variance.
    pub eps: f32,
}

impl GroupNorm {
    /// With PyTorch's `eps`.
    pub fn new(groups: usize, channels: usize) -> GroupNorm {
        GroupNorm { groups, channels, eps: 1e-5 }
    }

    /// `[n, .., channels]` → the same.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        let &GroupNorm { groups, channels, eps } = self;
        b.layer(name, |b| {
            divides(b, "group_norm", ("groups", groups), ("channels", channels))?;
            let gamma = b.param("weight", [channels], ONE)?;
            let beta = b.param("bias", [channels], ZERO)?;
            b.group_norm(x, gamma, beta, groups, eps)
        })
    }
}
