//! The LeNet-5 model.

use polyreme_graph::{Builder, Tensor, Traced};

use crate::layer::{Conv2d, Linear, MaxPool2d, channels_last, flatten};

/// `conv1`, `conv2` of 5x5, each with tanh and 2x2 max pooling, then `fc1`, `fc2`, `fc3`. By default on 3x32x32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lenet {
    /// Channels of an image.
    pub channels: usize,
    /// Rows and columns of an image; the inputs of `fc1` follow from them.
    pub image: (usize, usize),
    /// How many classes.
    pub classes: usize,
}

impl Default for Lenet {
    fn default() -> Lenet {
        Lenet { channels: 3, image: (32, 32), classes: 10 }
    }
}

impl Lenet {
    /// `x [n, c, h, w]` → `[n, classes]`. The same in training and evaluation.
    pub fn logits(&self, b: &mut Builder, x: Tensor, _training: bool) -> Traced {
        let pool = MaxPool2d::new(2, 2);
        // A 5x5 kernel takes four pixels off and a pool halves; an image too small is an error of the convolution.
        let left = |len: usize| (len.saturating_sub(4) / 2).saturating_sub(4) / 2;
        let mut x = channels_last(b, x)?;
        x = Conv2d::new(self.channels, 6, 5).trace(b, "conv1", x)?;
        x = b.activation("tanh", x)?;
        x = pool.trace(b, "pool1", x)?;
        x = Conv2d::new(6, 16, 5).trace(b, "conv2", x)?;
        x = b.activation("tanh", x)?;
        x = pool.trace(b, "pool2", x)?;
        x = flatten(b, x)?;
        x = Linear::new(16 * left(self.image.0) * left(self.image.1), 120).trace(b, "fc1", x)?;
        x = b.activation("tanh", x)?;
        x = Linear::new(120, 84).trace(b, "fc2", x)?;
        x = b.activation("tanh", x)?;
        Linear::new(84, self.classes).trace(b, "fc3", x)
    }
}
