//! ResNets, as torchvision has them.

use polyreme_graph::{Builder, Tensor, Traced};

use crate::layer::{BatchNorm2d, Conv2d, ConvInit, Linear, MaxPool2d, channels_last, global_mean};

/// The depth, in layers with weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// ResNet-18: 2, 2, 2, 2 basic blocks.
    D18,
    /// ResNet-34: 3, 4, 6, 3 basic blocks.
    D34,
    /// ResNet-50: 3, 4, 6, 3 bottlenecks.
    D50,
    /// ResNet-101: 3, 4, 23, 3 bottlenecks.
    D101,
}

impl Depth {
    /// Blocks of each of the four stages.
    pub fn blocks(self) -> [usize; 4] {
        match self {
            Depth::D18 => [2, 2, 2, 2],
            Depth::D34 | Depth::D50 => [3, 4, 6, 3],
            Depth::D101 => [3, 4, 23, 3],
        }
    }
    /// How many times wider than a stage's width its blocks' outputs are: 4 for bottlenecks, 1 for basic blocks.
    pub fn expansion(self) -> usize {
        match self {
            Depth::D18 | Depth::D34 => 1,
            Depth::D50 | Depth::D101 => 4,
        }
    }
}

/// The stem: the layers before the blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stem {
    /// A 7x7 convolution of stride 2 and 3x3 max pooling of stride 2.
    ImageNet,
    /// A 3x3 convolution of stride 1 and no pool, for small images.
    Cifar,
}

impl Stem {
    /// Rows and columns of an image, by default.
    pub fn image(self) -> (usize, usize) {
        match self {
            Stem::ImageNet => (224, 224),
            Stem::Cifar => (32, 32),
        }
    }
}

/// `conv1`, `bn1`, blocks `layer1.K` to `layer4.K`, the mean over pixels, `fc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResNet {
    /// The depth, which says which blocks there are and how many.
    pub depth: Depth,
    /// The stem before them.
    pub stem: Stem,
    /// Channels of an image.
    pub channels: usize,
    /// How many classes.
    pub classes: usize,
}

impl Default for ResNet {
    fn default() -> ResNet {
        ResNet { depth: Depth::D18, stem: Stem::ImageNet, channels: 3, classes: 10 }
    }
}

impl ResNet {
    /// `x [n, c, h, w]` → `[n, classes]`.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let mut x = channels_last(b, x)?;
        x = match self.stem {
            Stem::ImageNet => {
                let conv = Conv2d::new(self.channels, 64, 7).stride(2).padding(3);
                let y = conv_norm(b, x, conv, "conv1", "bn1", true, training)?;
                MaxPool2d { padding: (1, 1), ..MaxPool2d::new(3, 2) }.trace(b, "maxpool", y)?
            }
            Stem::Cifar => {
                let conv = Conv2d::new(self.channels, 64, 3).padding(1);
                conv_norm(b, x, conv, "conv1", "bn1", true, training)?
            }
        };
        let mut channels = 64;
        for (stage, n_blocks) in self.depth.blocks().into_iter().enumerate() {
            let width = 64 << stage;
            for k in 0..n_blocks {
                let stride = if stage > 0 && k == 0 { 2 } else { 1 };
                let block = ResidualBlock { channels, width, expansion: self.depth.expansion(), stride };
                x = b.layer(format!("layer{}.{k}", stage + 1), |b| block.trace(b, x, training))?;
                channels = block.outputs();
            }
        }
        x = global_mean(b, x)?;
        Linear::new(channels, self.classes).trace(b, "fc", x)
    }
}

/// A basic block or a bottleneck, by its expansion.
struct ResidualBlock {
    channels: usize,
    width: usize,
    expansion: usize,
    stride: usize,
}

impl ResidualBlock {
    fn outputs(&self) -> usize {
        self.width * self.expansion
    }

    fn trace(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let &ResidualBlock { channels, width, stride, .. } = self;
        // The stride of a bottleneck is on its 3x3 convolution, as in torchvision, not on the first.
        let convs = if self.expansion == 1 {
            vec![
                Conv2d::new(channels, width, 3).stride(stride).padding(1),
                Conv2d::new(width, width, 3).padding(1),
            ]
        } else {
            vec![
                Conv2d::new(channels, width, 1),
                Conv2d::new(width, width, 3).stride(stride).padding(1),
                Conv2d::new(width, self.outputs(), 1),
            ]
        };
        let mut y = x;
        for (i, conv) in convs.iter().enumerate() {
            let (conv_name, norm_name) = (format!("conv{}", i + 1), format!("bn{}", i + 1));
            y = conv_norm(b, y, *conv, &conv_name, &norm_name, i + 1 < convs.len(), training)?;
        }
        let identity = if stride != 1 || channels != self.outputs() {
            let conv = Conv2d::new(channels, self.outputs(), 1).stride(stride);
            conv_norm(b, x, conv, "downsample.0", "downsample.1", false, training)?
        } else {
            x
        };
        let sum = b.add(y, identity)?;
        b.activation("relu", sum)
    }
}

/// A convolution without bias, a batch norm and perhaps a ReLU.
fn conv_norm(
    b: &mut Builder,
    x: Tensor,
    conv: Conv2d,
    conv_name: &str,
    norm_name: &str,
    relu: bool,
    training: bool,
) -> Traced {
    let conv = Conv2d { init: ConvInit::FanOut, ..conv.without_bias() };
    let y = conv.trace(b, conv_name, x)?;
    let y = BatchNorm2d::new(conv.outputs).trace(b, norm_name, y, training)?;
    if relu { b.activation("relu", y) } else { Ok(y) }
}
