//! A network of one's own: a list of layers, one after another.
//!
//! Only what goes out of a layer is said; what comes in follows from the layers before it. Parameters are named as in
//! `torch.nn.Sequential`: `0.weight`, `1.bias`, and `3.0.weight` inside a residual. Images are channels-last inside, and
//! `flatten` gives PyTorch's order, so weights go to a PyTorch twin and back without a change.

mod trace;

#[cfg(test)]
mod tests;

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_graph::op::{Cell, Conv};
use polyreme_graph::{Builder, DType, Shape, Tensor, Traced};

use super::{ModelInput, TraceOptions};

/// Layers, one after another.
#[derive(Clone, PartialEq, Debug)]
pub struct Stack {
    /// What comes in.
    pub input: StackInput,
    /// The layers, in order.
    pub layers: Vec<StackLayer>,
}

/// What comes into a [`Stack`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StackInput {
    /// Not said yet: `Model::fit` takes it from the data.
    Open,
    /// A row of numbers.
    Row {
        /// How many.
        width: usize,
    },
    /// An image, `[channels, height, width]`.
    Image {
        /// Colours.
        channels: usize,
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
    },
    /// Token ids.
    Ids {
        /// How many tokens there are.
        vocab: usize,
        /// The length of sequences, and the limit of learnt positions.
        context: usize,
    },
}

/// One layer of a [`Stack`]. Pairs are rows and columns.
#[derive(Clone, PartialEq, Debug)]
pub enum StackLayer {
    /// `linear`: of rows, or of each step of a sequence.
    Linear {
        /// The width that goes out; `None` in the last layer: the number of classes.
        outputs: Option<usize>,
        /// Whether something is added.
        bias: bool,
    },
    /// `conv`: of images.
    Conv {
        /// Channels that go out.
        outputs: usize,
        /// The kernel.
        kernel: (usize, usize),
        /// Stride, padding, dilation and groups.
        conv: Conv,
        /// Whether something is added to each channel.
        bias: bool,
    },
    /// `conv_transpose`: of images.
    ConvTranspose {
        /// Channels that go out.
        outputs: usize,
        /// The kernel.
        kernel: (usize, usize),
        /// Of the convolution that goes the other way.
        conv: Conv,
        /// Rows and columns added at the end.
        output_padding: (usize, usize),
        /// Whether something is added to each channel.
        bias: bool,
    },
    /// `max_pool`: the maximum of each window of an image.
    MaxPool {
        /// The window.
        kernel: (usize, usize),
        /// From one window to the next.
        stride: (usize, usize),
        /// On each side; never the maximum.
        padding: (usize, usize),
    },
    /// `avg_pool`: the mean of each window of an image.
    AvgPool {
        /// The window.
        kernel: (usize, usize),
        /// From one window to the next.
        stride: (usize, usize),
        /// Zeros on each side, which count.
        padding: (usize, usize),
    },
    /// `adaptive_avg_pool`: windows that cut the image into `out`.
    AdaptiveAvgPool {
        /// Rows and columns that go out.
        out: (usize, usize),
    },
    /// `global_mean`: an image to a row, the mean of each channel.
    GlobalMean,
    /// `batch_norm`, channel by channel.
    BatchNorm,
    /// `layer_norm` over the last dim; of an image, over the channels of each pixel.
    LayerNorm,
    /// `rms_norm` over the last dim; of an image, over the channels of each pixel.
    RmsNorm,
    /// `group_norm`.
    GroupNorm {
        /// How many groups of channels.
        groups: usize,
    },
    /// An activation; its name is the layer's kind.
    Activation {
        /// The name in the graph's list.
        name: String,
    },
    /// `dropout`.
    Dropout {
        /// The share, in `0..1`.
        p: f32,
    },
    /// `flatten`: an image or a sequence to a row, in PyTorch's order.
    Flatten,
    /// `embedding`: ids to a sequence of vectors.
    Embedding {
        /// The length of each vector.
        width: usize,
    },
    /// `positions`: adds a learnt vector for each place of a sequence.
    Positions,
    /// `lstm` or `gru`: a sequence to a sequence.
    Recurrent {
        /// Which.
        cell: Cell,
        /// The width of the state.
        hidden: usize,
        /// Whether it also runs from the end of time; outputs stand side by side.
        bidirectional: bool,
    },
    /// `last_step`: of a sequence, as a row.
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
        /// What is between the linear layers.
        activation: String,
        /// The share dropped in training.
        dropout: f32,
        /// Whether norms stand before attention and linears, or after their sums.
        norm_first: bool,
        /// Whether a position sees only itself and earlier ones.
        causal: bool,
    },
    /// `residual`: `x + f(x)`.
    Residual {
        /// `f`: must keep the shape.
        layers: Vec<StackLayer>,
    },
}

impl StackLayer {
    /// The kinds of layers that are no activations.
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
    /// What it is fed with these options. An open input has no elements.
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
            StackInput::Ids { context, .. } => {
                let shape = [n, options.time.unwrap_or(context)].into();
                ModelInput { name: "ids", shape, dtype: DType::I32 }
            }
        }
    }

    /// Whether there is a label for each token, not one for each sequence.
    pub fn is_per_token(&self) -> bool {
        trace::ends_in_sequence(self)
    }

    /// How many classes the logits tell apart; 0 while that is open, or if the layers do not fit together.
    pub fn classes(&self) -> usize {
        self.probe().map_or(0, |shape| shape.last())
    }

    /// Whether the number of classes is still open.
    pub fn is_open(&self) -> bool {
        matches!(self.layers.last(), Some(StackLayer::Linear { outputs: None, .. }))
    }

    /// Closes the last layer, if it was open.
    pub fn set_classes(&mut self, classes: usize) {
        if let Some(StackLayer::Linear { outputs: outputs @ None, .. }) = self.layers.last_mut() {
            *outputs = Some(classes);
        }
    }

    /// What [`Stack::input`] describes → `[n, classes]`, or `[n·time, classes]` where there is a label for each token.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        trace::logits(self, b, x, training)
    }

    /// An error while the input is open.
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
