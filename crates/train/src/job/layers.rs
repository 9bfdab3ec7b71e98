//! `layers = [..]`: custom layers, one after another. A layer is a table with a kind, or its kind alone.

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_graph::op::{Cell, Conv};
use polyreme_nn::model::StackLayer;

use super::cursor::{At, Cursor};
use super::declare::{field, keys, kinds, section};
use super::error::ErrorPlace;
use super::key::Key;
use super::model::{CHANNELS_MAX, WIDTH_MAX};
use super::section::{self, Keyed, Kind, Section};
use super::shape::Bounds;
use super::tree::{TreeNode, Value};
use super::types::{Type, flag, list, maybe, name_of, pair, single, table, whole};

/// Kernels, strides, paddings and dilations.
const WINDOW_MAX: u64 = 1 << 12;

/// Rows and columns.
type Pair = (usize, usize);

section! { StackLayer => {
    let such_as = "a layer (a table with a `kind`, or a kind alone)";
    let section = Section::of_kinds("model.layers", such_as, kinds(), StackLayer::kind, keys());
    section.short().check(check)
} }

fn kinds() -> Vec<Kind<StackLayer>> {
    // What must be given is 0 until it is.
    const NONE: Pair = (0, 0);
    let mut kinds = kinds! {
        /// fully connected, from rows to rows, or step by step from sequences to sequences
        "linear" => |_| StackLayer::Linear { outputs: None, bias: true };
        /// a convolution, from images to images
        "conv" => |_| StackLayer::Conv { outputs: 0, kernel: NONE, conv: Conv::default(), bias: true };
        /// a transposed convolution, from images to images
        "conv_transpose" => |_| StackLayer::ConvTranspose {
            outputs: 0, kernel: NONE, conv: Conv::default(), output_padding: (0, 0), bias: true
        };
        /// the maximum of each window, from images to images
        "max_pool" => |_| StackLayer::MaxPool { kernel: NONE, stride: NONE, padding: (0, 0) };
        /// the mean of each window, from images to images; padding counts as zeros
        "avg_pool" => |_| StackLayer::AvgPool { kernel: NONE, stride: NONE, padding: (0, 0) };
        /// the means of windows that cut an image into `out`, from images to images
        "adaptive_avg_pool" => |_| StackLayer::AdaptiveAvgPool { out: NONE };
        /// the mean of each channel, from images to rows
        "global_mean" => |_| StackLayer::GlobalMean;
        /// batch norm, channel by channel, of anything but ids
        "batch_norm" => |_| StackLayer::BatchNorm;
        /// layer norm over the last dimension, or over the channels of each pixel, of anything but ids
        "layer_norm" => |_| StackLayer::LayerNorm;
        /// RMS norm over the last dimension, or over the channels of each pixel, of anything but ids
        "rms_norm" => |_| StackLayer::RmsNorm;
        /// group norm, of anything but ids
        "group_norm" => |_| StackLayer::GroupNorm { groups: 0 };
        /// sets elements to 0 at random in training, of anything but ids
        "dropout" => |_| StackLayer::Dropout { p: 0.5 };
        /// from images or sequences to rows, in PyTorch's order
        "flatten" => |_| StackLayer::Flatten;
        /// from ids to sequences of vectors
        "embedding" => |_| StackLayer::Embedding { width: 0 };
        /// adds a learnt vector at each position of a sequence
        "positions" => |_| StackLayer::Positions;
        /// a long short-term memory, from sequences to sequences
        "lstm" => |_| StackLayer::Recurrent { cell: Cell::Lstm, hidden: 0, bidirectional: false };
        /// a gated recurrent unit, from sequences to sequences
        "gru" => |_| StackLayer::Recurrent { cell: Cell::Gru, hidden: 0, bidirectional: false };
        /// the last step, from sequences to rows
        "last_step" => |_| StackLayer::LastStep;
        /// the mean over time, from sequences to rows
        "mean_time" => |_| StackLayer::MeanTime;
        /// self-attention, from sequences to sequences
        "attention" => |_| StackLayer::Attention { heads: 0, causal: false };
        /// a transformer layer as PyTorch's `TransformerEncoderLayer`, from sequences to sequences
        "encoder_layer" => |_| StackLayer::EncoderLayer {
            heads: 0, hidden: None, activation: "relu".into(), dropout: 0.1, norm_first: false, causal: false
        };
        /// x + f(x), of anything but ids; f must keep the shape
        "residual" => |_| StackLayer::Residual { layers: Vec::new() };
    };
    let activation = |name: &'static str| StackLayer::Activation { name: name.into() };
    let words = "an activation, element by element, of anything but ids";
    kinds.extend(section::kinds(&ACTIVATIONS.map(|(name, _)| name), activation, words));
    kinds
}

fn keys() -> Vec<Key<StackLayer>> {
    let window = |least| pair(least..=WINDOW_MAX);
    let channels = || whole(1..=CHANNELS_MAX);
    let activation = name_of(ACTIVATIONS.map(|(name, _)| name));
    keys! { StackLayer;
        /// the width of the output
        outputs: maybe(whole(1..=WIDTH_MAX)) => field!(StackLayer::{Linear}.outputs);
            or "in the last layer the number of classes, needed elsewhere";
        /// channels of the output
        outputs: channels() => field!(StackLayer::{Conv | ConvTranspose}.outputs);
            needed "say how many channels go out, such as outputs = 32";
        /// the size of the window
        kernel: window(1) => field!(StackLayer::{Conv | ConvTranspose | MaxPool | AvgPool}.kernel);
            needed "say the rows and columns of the window, such as kernel = 3";
        /// pixels from one window to the next
        stride: window(1) => |s| steps(s).map(|[stride, _]| stride); or "1; the kernel in pools";
        /// pixels added on each side
        padding: window(0) => |s| steps(s).map(|[_, padding]| padding); or "0";
        /// pixels from one tap of the kernel to the next
        dilation: window(1) => |s| conv(s).map(|c| &mut c.dilation); or "1";
        /// groups of channels that do not mix
        groups: channels() => |s| conv(s).map(|c| &mut c.groups);
        /// groups of channels that are normalised together
        groups: channels() => field!(StackLayer::{GroupNorm}.groups);
            needed "say how many groups of channels, such as groups = 8";
        /// rows and columns added at the end of the output
        output_padding: window(0) => field!(StackLayer::{ConvTranspose}.output_padding); or "0";
        /// whether a learnt vector is added
        bias: flag() => field!(StackLayer::{Linear | Conv | ConvTranspose}.bias);
        /// the size of the output
        out: window(1) => field!(StackLayer::{AdaptiveAvgPool}.out);
            needed "say how many rows and columns go out, such as out = 1";
        /// the share dropped in training
        p: single(Bounds::BELOW_1) => field!(StackLayer::{Dropout}.p);
        /// the length of each vector
        width: channels() => field!(StackLayer::{Embedding}.width);
            needed "say the length of each token's vector, such as width = 128";
        /// the width of the state
        hidden: channels() => field!(StackLayer::{Recurrent}.hidden);
            needed "say the width of the state, such as hidden = 128";
        /// the width between its two linear layers
        hidden: maybe(channels()) => field!(StackLayer::{EncoderLayer}.hidden); or "4 times the width of the sequence";
        /// whether it also runs backwards in time; outputs are concatenated
        bidirectional: flag() => field!(StackLayer::{Recurrent}.bidirectional);
        /// attention heads
        heads: channels() => field!(StackLayer::{Attention | EncoderLayer}.heads);
            needed "say how many attention heads, such as heads = 4";
        /// the activation between its two linear layers
        activation: activation => field!(StackLayer::{EncoderLayer}.activation);
        /// the share dropped in training
        dropout: single(Bounds::BELOW_1) => field!(StackLayer::{EncoderLayer}.dropout);
        /// whether norms come before attention and linear layers, or after their sums
        norm_first: flag() => field!(StackLayer::{EncoderLayer}.norm_first);
        /// whether a position sees only itself and earlier ones
        causal: flag() => field!(StackLayer::{Attention | EncoderLayer}.causal);
        /// the layers of f
        layers: layers(false) => field!(StackLayer::{Residual}.layers);
            needed "say what is added to x, as a list of layers";
    }
}

fn conv(layer: &mut StackLayer) -> Option<&mut Conv> {
    match layer {
        StackLayer::Conv { conv, .. } | StackLayer::ConvTranspose { conv, .. } => Some(conv),
        _ => None,
    }
}

/// Stride and padding of what has windows.
fn steps(layer: &mut StackLayer) -> Option<[&mut Pair; 2]> {
    match layer {
        StackLayer::Conv { conv, .. } | StackLayer::ConvTranspose { conv, .. } => {
            Some([&mut conv.stride, &mut conv.padding])
        }
        StackLayer::MaxPool { stride, padding, .. } | StackLayer::AvgPool { stride, padding, .. } => {
            Some([stride, padding])
        }
        _ => None,
    }
}

/// Windows of pools lie side by side by default.
fn check(layer: &mut StackLayer, c: &Cursor) {
    if let StackLayer::MaxPool { kernel, stride, .. } | StackLayer::AvgPool { kernel, stride, .. } = layer
        && !c.has("stride")
    {
        *stride = *kernel;
    }
}

/// A list of layers. Only the last one of a model may leave its outputs to the data.
pub(super) fn layers(of_model: bool) -> Type<Vec<StackLayer>> {
    let Type { shape, write, .. } = list(table::<StackLayer>(), &[], "an array of layers");
    let needed = shape.clone();
    let read = move |at: &At| {
        let items = at.items(&needed)?;
        if items.is_empty() {
            at.fault(format!("`{}` is empty; at least one layer is needed", at.path), "");
        }
        let layer = |(i, item): (usize, &At)| {
            let layer = StackLayer::section().read(item)?;
            let is_open = matches!(layer, StackLayer::Linear { outputs: None, .. });
            if is_open && !(of_model && i + 1 == items.len()) {
                let hint = "only the last layer may leave it out, for the number of classes";
                item.cursor(&StackLayer::section().outline)?.require("outputs", hint);
            }
            Some(layer)
        };
        // All layers are read before one that is wrong ends it.
        let layers: Vec<_> = items.iter().enumerate().map(layer).collect();
        layers.into_iter().collect()
    };
    Type { shape, read: Box::new(read), write }
}

/// The place of a layer by its path, such as `layers[2].layers[0]`; `list` is the outermost.
pub(super) fn place_of<'a>(list: &'a TreeNode, path: &str) -> Option<&'a ErrorPlace> {
    let mut list = list;
    let mut found = None;
    for part in path.split('.') {
        let idx: usize = part.strip_prefix("layers[")?.strip_suffix(']')?.parse().ok()?;
        let Value::Array(items) = &list.value else { return found };
        let item = items.get(idx)?;
        found = Some(&item.place);
        match &item.value {
            Value::Table(table) if table.get("layers").is_some() => list = &table.get("layers")?.node,
            _ => return found,
        }
    }
    found
}
