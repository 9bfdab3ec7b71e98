//! A custom network: a list of layers, one after another.
//!
//! A layer gives only its output sizes; its input sizes follow from the layers before it. Parameters are named as in
//! `torch.nn.Sequential`: `0.weight`, `1.bias`, and `3.0.weight` inside a residual. Images are channels-last inside, and
//! `flatten` gives PyTorch's order, so weights go to a PyTorch twin and back without a change.

mod trace;

#[cfg(test)]
mod tests;

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_graph::op::{Cell, Conv};
use polyreme_graph::{Builder, DType, Shape, Tensor, Traced};

use super::{ModelInput, TraceOptions};

/// A list of layers, run one after another.
#[derive(Clone, PartialEq, Debug)]
pub struct Stack {
    /// The input of the first layer.
    pub input: StackInput,
    /// The layers, in order.
    pub layers: Vec<StackLayer>,
}

/// The input of a [`Stack`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StackInput {
    /// Not known yet: `Model::fit` takes it from the data.
    Open,
    /// A row of numbers.
    Row {
        /// How many numbers a row has.
        width: usize,
    },
    /// An image, `[channels, height, width]`.
    Image {
        /// The number of channels.
        channels: usize,
        /// The height in pixels.
        height: usize,
        /// The width in pixels.
        width: usize,
    },
    /// A sequence of token ids.
    Ids {
        /// The size of the vocabulary.
        vocab: usize,
        /// The length of sequences, and the limit of learnt positions.
        context: usize,
    },
    /// Sequences of token ids of different lengths, filled up at their end.
    Texts {
        /// The size of the vocabulary.
        vocab: usize,
        /// The longest sequence, and the limit of learnt positions.
        context: usize,
        /// The id that fills them up.
        padding: usize,
    },
}

/// One layer of a [`Stack`]. Pairs are rows and columns.
#[derive(Clone, PartialEq, Debug)]
pub enum StackLayer {
    /// `linear`: of rows, or of each step of a sequence.
    Linear {
        /// The output width; `None` in the last layer: the number of classes.
        outputs: Option<usize>,
        /// Whether there is a bias.
        bias: bool,
    },
    /// `conv`: of images.
    Conv {
        /// Output channels.
        outputs: usize,
        /// The size of the kernel.
        kernel: (usize, usize),
        /// Stride, padding, dilation and groups.
        conv: Conv,
        /// Whether there is a bias.
        bias: bool,
    },
    /// `conv_transpose`: of images.
    ConvTranspose {
        /// Output channels.
        outputs: usize,
        /// The size of the kernel.
        kernel: (usize, usize),
        /// Options of the convolution whose transpose this is.
        conv: Conv,
        /// Rows and columns added at the end of the output.
        output_padding: (usize, usize),
        /// Whether there is a bias.
        bias: bool,
    },
    /// `max_pool`: the maximum of each window of an image.
    MaxPool {
        /// The size of the window.
        kernel: (usize, usize),
        /// The stride, from one window to the next.
        stride: (usize, usize),
        /// Padding on each side, which is never the maximum.
        padding: (usize, usize),
    },
    /// `avg_pool`: the mean of each window of an image.
    AvgPool {
        /// The size of the window.
        kernel: (usize, usize),
        /// The stride, from one window to the next.
        stride: (usize, usize),
        /// Zero padding on each side, which the mean counts.
        padding: (usize, usize),
    },
    /// `adaptive_avg_pool`: windows that cut the image into `out`.
    AdaptiveAvgPool {
        /// Rows and columns of the output.
        out: (usize, usize),
    },
    /// `global_mean`: an image to a row, the mean of each channel.
    GlobalMean,
    /// `batch_norm`, per channel.
    BatchNorm,
    /// `layer_norm` over the last dim; of an image, over the channels of each pixel.
    LayerNorm,
    /// `rms_norm` over the last dim; of an image, over the channels of each pixel.
    RmsNorm,
    /// `group_norm` over groups of channels.
    GroupNorm {
        /// How many groups of channels.
        groups: usize,
    },
    /// An activation; its name is the layer's kind.
    Activation {
        /// The name in the graph's list.
        name: String,
    },
    /// `dropout`, in training only.
    Dropout {
        /// The dropout probability, in `0..1`.
        p: f32,
    },
    /// `flatten`: an image or a sequence to a row, in PyTorch's order.
    Flatten,
    /// `embedding`: ids to a sequence of vectors.
    Embedding {
        /// The length of each vector.
        width: usize,
    },
    /// `positions`: adds a learnt vector for each position of a sequence.
    Positions,
    /// `lstm` or `gru`: a sequence to a sequence.
    Recurrent {
        /// LSTM or GRU.
        cell: Cell,
        /// The width of the hidden state.
        hidden: usize,
        /// Whether it also runs backwards in time; the outputs are concatenated.
        bidirectional: bool,
    },
    /// `last_step`: a sequence to a row, its last time step.
    LastStep,
    /// `mean_time`: a sequence to a row, the mean over time.
    MeanTime,
    /// `attention` of a sequence with itself.
    Attention {
        /// How many heads.
        heads: usize,
        /// Whether a position sees only itself and earlier ones.
        causal: bool,
    },
    /// `encoder_layer`: attention and two linear layers, each with a norm and a sum.
    EncoderLayer {
        /// How many attention heads.
        heads: usize,
        /// The width between the linear layers; `None`: four times the sequence's.
        hidden: Option<usize>,
        /// The activation between the linear layers.
        activation: String,
        /// The dropout probability in training.
        dropout: f32,
        /// Whether norms come before attention and linear layers (pre-norm), or after their sums.
        norm_first: bool,
        /// Whether a position sees only itself and earlier ones.
        causal: bool,
    },
    /// `residual`: `x + f(x)`.
    Residual {
        /// The layers of `f`, which must keep the shape.
        layers: Vec<StackLayer>,
    },
}

impl StackLayer {
    /// The kinds of layers that are not activations.
    pub const KINDS: [&str; 22] = [
        "linear",
        "conv",
        "conv_transpose",
        "max_pool",
        "avg_pool",
        "adaptive_avg_pool",
        "global_mean",
        "batch_norm",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "dropout",
        "flatten",
        "embedding",
        "positions",
        "lstm",
        "gru",
        "last_step",
        "mean_time",
        "attention",
        "encoder_layer",
        "residual",
    ];

    /// The kind, as job files and errors name it: one of [`StackLayer::KINDS`], or the activation's name.
    pub fn kind(&self) -> &'static str {
        match self {
            StackLayer::Linear { .. } => "linear",
            StackLayer::Conv { .. } => "conv",
            StackLayer::ConvTranspose { .. } => "conv_transpose",
            StackLayer::MaxPool { .. } => "max_pool",
            StackLayer::AvgPool { .. } => "avg_pool",
            StackLayer::AdaptiveAvgPool { .. } => "adaptive_avg_pool",
            StackLayer::GlobalMean => "global_mean",
            StackLayer::BatchNorm => "batch_norm",
            StackLayer::LayerNorm => "layer_norm",
            StackLayer::RmsNorm => "rms_norm",
            StackLayer::GroupNorm { .. } => "group_norm",
            StackLayer::Activation { name } => {
                ACTIVATIONS.iter().find(|(n, _)| n == name).map_or("activation", |(n, _)| n)
            }
            StackLayer::Dropout { .. } => "dropout",
            StackLayer::Flatten => "flatten",
            StackLayer::Embedding { .. } => "embedding",
            StackLayer::Positions => "positions",
            StackLayer::Recurrent { cell: Cell::Lstm, .. } => "lstm",
            StackLayer::Recurrent { cell: Cell::Gru, .. } => "gru",
            StackLayer::LastStep => "last_step",
            StackLayer::MeanTime => "mean_time",
            StackLayer::Attention { .. } => "attention",
            StackLayer::EncoderLayer { .. } => "encoder_layer",
            StackLayer::Residual { .. } => "residual",
        }
    }
}

impl Stack {
    /// The input with these options. An open input has no elements.
    pub fn input(&self, options: &TraceOptions) -> ModelInput {
        let n = options.batch;
        let numbers = |shape: Shape| ModelInput { name: "x", shape, dtype: DType::F32 };
        match self.input {
            StackInput::Open => numbers([n, 0].into()),
            StackInput::Row { width } => numbers([n, width].into()),
            StackInput::Image { channels, height, width } => {
                let (h, w) = options.image.unwrap_or((height, width));
                numbers([n, channels, h, w].into())
            }
            StackInput::Ids { context, .. } | StackInput::Texts { context, .. } => {
                let shape = [n, options.time.unwrap_or(context)].into();
                ModelInput { name: "ids", shape, dtype: DType::I32 }
            }
        }
    }

    /// Whether there is a label for each token, not one for each sequence.
    pub fn is_per_token(&self) -> bool {
        trace::ends_in_sequence(self)
    }

    /// The number of classes; 0 while that is open, or if the layers do not fit together.
    pub fn classes(&self) -> usize {
        self.probe().map_or(0, |shape| shape.last())
    }

    /// Whether the number of classes is still open.
    pub fn is_open(&self) -> bool {
        matches!(self.layers.last(), Some(StackLayer::Linear { outputs: None, .. }))
    }

    /// Sets the outputs of the last layer, if they were open.
    pub fn set_classes(&mut self, classes: usize) {
        if let Some(StackLayer::Linear { outputs: outputs @ None, .. }) = self.layers.last_mut() {
            *outputs = Some(classes);
        }
    }

    /// What [`Stack::input`] describes → `[n, classes]`, or `[n·time, classes]` where there is a label for each token.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        trace::logits(self, b, x, training)
    }

    /// Fails while the input is open.
    pub(super) fn closed(&self, b: &Builder) -> Traced<()> {
        trace::closed(self, b)
    }

    /// The shape of the logits of one sample, or what is wrong with the layers.
    fn probe(&self) -> Traced<Shape> {
        let mut b = Builder::new();
        let input = self.input(&TraceOptions::evaluation(1));
        let x = b.input(input.name, input.shape, input.dtype)?;
        let logits = self.logits(&mut b, x, false)?;
        Ok(b.shape(logits).clone())
    }
}
