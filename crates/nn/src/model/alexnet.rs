//! AlexNet, as torchvision has it.

use polyreme_graph::{Builder, Tensor, Traced};

use crate::layer::{AdaptiveAvgPool2d, Conv2d, Dropout, Linear, MaxPool2d, channels_last, flatten};

/// Five convolutions under `features`, a pool to 6x6, three linear layers under `classifier`; numbers are the indices
/// in torchvision's lists.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AlexNet {
    /// Channels of an image.
    pub channels: usize,
    /// How many classes.
    pub classes: usize,
    /// The dropout probability before the first two linear layers in training.
    pub dropout: f32,
}

impl Default for AlexNet {
    fn default() -> AlexNet {
        AlexNet { channels: 3, classes: 10, dropout: 0.5 }
    }
}

impl AlexNet {
    /// Rows and columns of an image, by default; the minimum is 63.
    pub const IMAGE: (usize, usize) = (224, 224);

    /// `x [n, c, h, w]` → `[n, classes]`.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let drop = Dropout { p: self.dropout };
        let x = channels_last(b, x)?;
        let x = b.layer("features", |b| self.features(b, x))?;
        let mut x = AdaptiveAvgPool2d { out: (6, 6) }.trace(b, "avgpool", x)?;
        x = flatten(b, x)?;
        b.layer("classifier", |b| {
            x = drop.trace(b, "0", x, training)?;
            x = Linear::new(256 * 6 * 6, 4096).trace(b, "1", x)?;
            x = b.activation("relu", x)?;
            x = drop.trace(b, "3", x, training)?;
            x = Linear::new(4096, 4096).trace(b, "4", x)?;
            x = b.activation("relu", x)?;
            Linear::new(4096, self.classes).trace(b, "6", x)
        })
    }

    fn features(&self, b: &mut Builder, mut x: Tensor) -> Traced {
        // Each convolution is followed by its ReLU at the next index, and some by a pool after that.
        let rows = [
            (0, Conv2d::new(self.channels, 64, 11).stride(4).padding(2), true),
            (3, Conv2d::new(64, 192, 5).padding(2), true),
            (6, Conv2d::new(192, 384, 3).padding(1), false),
            (8, Conv2d::new(384, 256, 3).padding(1), false),
            (10, Conv2d::new(256, 256, 3).padding(1), true),
        ];
        for (place, conv, pooled) in rows {
            x = conv.trace(b, &place.to_string(), x)?;
            x = b.activation("relu", x)?;
            if pooled {
                x = MaxPool2d::new(3, 2).trace(b, &(place + 2).to_string(), x)?;
            }
        }
        Ok(x)
    }
}
