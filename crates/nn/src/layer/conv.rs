//! Convolutions of images `[n, h, w, c]`, with weights in PyTorch's layouts.

use polyreme_graph::op::Conv;
use polyreme_graph::{Builder, Init, Tensor, Traced};

use super::{divides, positive, uniform};

/// How a convolution's weight is initialised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConvInit {
    /// PyTorch's default: uniform, `±1/√fan_in`.
    FanIn,
    /// torchvision's for ResNets, `kaiming_normal(fan_out, relu)`: normal, `√(2/fan_out)`.
    FanOut,
}

/// `torch.nn.Conv2d`: `weight [outputs, inputs/groups, kh, kw]` and `bias [outputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conv2d {
    /// Input channels.
    pub inputs: usize,
    /// Output channels.
    pub outputs: usize,
    /// Rows and columns of the kernel.
    pub kernel: (usize, usize),
    /// Stride, padding, dilation and groups.
    pub conv: Conv,
    /// Whether there is a bias.
    pub bias: bool,
    /// How the weight is initialised.
    pub init: ConvInit,
}

impl Conv2d {
    /// A square kernel, stride 1, no padding, one group, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> Conv2d {
        let conv = Conv::default();
        Conv2d { inputs, outputs, kernel: (kernel, kernel), conv, bias: true, init: ConvInit::FanIn }
    }
    /// The same with another stride.
    pub fn stride(mut self, stride: usize) -> Conv2d {
        self.conv.stride = (stride, stride);
        self
    }
    /// The same with zero padding on all sides.
    pub fn padding(mut self, padding: usize) -> Conv2d {
        self.conv.padding = (padding, padding);
        self
    }
    /// The same without a bias.
    pub fn without_bias(self) -> Conv2d {
        Conv2d { bias: false, ..self }
    }

    /// `[n, h, w, inputs]` → `[n, h', w', outputs]`.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        let &Conv2d { inputs, outputs, kernel: (kh, kw), conv, bias, init } = self;
        b.layer(name, |b| {
            check(b, "conv2d", (kh, kw), &conv)?;
            divides(b, "conv2d", ("groups", conv.groups), ("inputs", inputs))?;
            divides(b, "conv2d", ("groups", conv.groups), ("outputs", outputs))?;
            let fan_in = inputs / conv.groups * kh * kw;
            let init = match init {
                ConvInit::FanIn => uniform(fan_in),
                ConvInit::FanOut => Init::Normal { std: (2.0 / (outputs * kh * kw) as f32).sqrt() },
            };
            let weight = b.param("weight", [outputs, inputs / conv.groups, kh, kw], init)?;
            let bias = bias.then(|| b.param("bias", [outputs], uniform(fan_in))).transpose()?;
            b.conv2d(x, weight, bias, conv)
        })
    }
}

/// `torch.nn.ConvTranspose2d`: `weight [inputs, outputs/groups, kh, kw]` and `bias [outputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConvTranspose2d {
    /// Input channels.
    pub inputs: usize,
    /// Output channels.
    pub outputs: usize,
    /// Rows and columns of the kernel.
    pub kernel: (usize, usize),
    /// Options of the convolution whose transpose this is.
    pub conv: Conv,
    /// Rows and columns added at the end of the output.
    pub output_padding: (usize, usize),
    /// Whether there is a bias.
    pub bias: bool,
}

impl ConvTranspose2d {
    /// A square kernel, stride 1, no padding, one group, with a bias.
    pub fn new(inputs: usize, outputs: usize, kernel: usize) -> ConvTranspose2d {
        let (kernel, conv) = ((kernel, kernel), Conv::default());
        ConvTranspose2d { inputs, outputs, kernel, conv, output_padding: (0, 0), bias: true }
    }

    /// `[n, h, w, inputs]` → `[n, h', w', outputs]`.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        let &ConvTranspose2d { inputs, outputs, kernel: (kh, kw), conv, output_padding, bias } = self;
        let op = "conv_transpose2d";
        b.layer(name, |b| {
            check(b, op, (kh, kw), &conv)?;
            divides(b, op, ("groups", conv.groups), ("inputs", inputs))?;
            divides(b, op, ("groups", conv.groups), ("outputs", outputs))?;
            // PyTorch takes dim 1 of any weight for the fan in, which here is the outputs.
            let init = uniform(outputs / conv.groups * kh * kw);
            let weight = b.param("weight", [inputs, outputs / conv.groups, kh, kw], init)?;
            let bias = bias.then(|| b.param("bias", [outputs], init)).transpose()?;
            b.conv_transpose2d(x, weight, bias, conv, output_padding)
        })
    }
}

fn check(b: &Builder, op: &'static str, (kh, kw): (usize, usize), conv: &Conv) -> Traced<()> {
    let (stride, dilation) = (conv.stride, conv.dilation);
    positive(
        b,
        op,
        &[
            ("kernel", kh.min(kw)),
            ("stride", stride.0.min(stride.1)),
            ("dilation", dilation.0.min(dilation.1)),
        ],
    )
}
