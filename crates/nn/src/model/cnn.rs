//! Six 3x3 convolutions with batch norm.

use polyreme_graph::{Builder, Tensor, Traced};

use crate::layer::{BatchNorm2d, Conv2d, Dropout, Linear, MaxPool2d, channels_last, global_mean};

/// Pairs of `conv.K`, `norm.K` and ReLU with 2x2 max pooling between the pairs, the mean over pixels, `head`. By default
/// 64 64 | 128 128 | 256 256 on 3x32x32.
#[derive(Clone, PartialEq, Debug)]
pub struct Cnn {
    /// Channels of an image.
    pub channels: usize,
    /// Channels of each pair.
    pub widths: Vec<usize>,
    /// How many classes.
    pub classes: usize,
    /// The dropout probability before `head` in training.
    pub dropout: f32,
}

impl Default for Cnn {
    fn default() -> Cnn {
        Cnn { channels: 3, widths: vec![64, 128, 256], classes: 10, dropout: 0.0 }
    }
}

impl Cnn {
    /// Rows and columns of an image, by default.
    pub const IMAGE: (usize, usize) = (32, 32);

    /// `x [n, c, h, w]` → `[n, classes]`.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let mut x = channels_last(b, x)?;
        let mut channels = self.channels;
        for (pair, &width) in self.widths.iter().enumerate() {
            if pair > 0 {
                x = MaxPool2d::new(2, 2).trace(b, &format!("pool.{}", pair - 1), x)?;
            }
            for k in [2 * pair, 2 * pair + 1] {
                let conv = Conv2d::new(channels, width, 3).padding(1).without_bias();
                x = conv.trace(b, &format!("conv.{k}"), x)?;
                x = BatchNorm2d::new(width).trace(b, &format!("norm.{k}"), x, training)?;
                x = b.activation("relu", x)?;
                channels = width;
            }
        }
        x = global_mean(b, x)?;
        x = Dropout { p: self.dropout }.trace(b, "drop", x, training)?;
        Linear::new(channels, self.classes).trace(b, "head", x)
    }
}
