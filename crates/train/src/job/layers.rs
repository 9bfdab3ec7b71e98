//! `layers = [..]`: custom layers, one after another. A layer is a table with a kind, or its kind alone.
//!
//! A network knows nothing of precision. In the file the precision of a layer is one of its keys, and in a
//! [`ModelSpec`](super::ModelSpec) it stands beside the network, by the layer's path: [`listed`] and [`taken_apart`] go
//! from one to the other.

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
use super::types::{Type, flag, list, maybe, name_of, one_of, pair, single, table, whole};

/// Kernels, strides, paddings and dilations.
const WINDOW_MAX: u64 = 1 << 12;

/// Rows and columns.
type Pair = (usize, usize);

/// A layer as the file has it.
#[derive(Clone)]
pub(super) struct ListedLayer {
    /// The layer; a residual is without its layers.
    layer: StackLayer,
    /// The layers of a residual.
    inner: Vec<ListedLayer>,
    /// Whether it stays in f32 whatever the run's precision is.
    is_f32: bool,
}

section! { ListedLayer => {
    let such_as = "a layer (a table with a `kind`, or a kind alone)";
    let section = Section::of_kinds("model.layers", such_as, kinds(), |s| s.layer.kind(), keys());
    section.short().check(check)
} }

/// Layers as the file has them; `f32_layers` are the paths of those that stay in f32.
pub(super) fn listed(layers: &[StackLayer], f32_layers: &[String]) -> Vec<ListedLayer> {
    listed_in("", layers, f32_layers)
}

fn listed_in(list: &str, layers: &[StackLayer], f32_layers: &[String]) -> Vec<ListedLayer> {
    let one = |(k, layer): (usize, &StackLayer)| {
        let path = format!("{list}{k}");
        let is_f32 = f32_layers.contains(&path);
        match layer {
            StackLayer::Residual { layers } => ListedLayer {
                inner: listed_in(&format!("{path}."), layers, f32_layers),
                layer: StackLayer::Residual { layers: Vec::new() },
                is_f32,
            },
            layer => ListedLayer { layer: layer.clone(), inner: Vec::new(), is_f32 },
        }
    };
    layers.iter().enumerate().map(one).collect()
}

/// The layers, and the paths of those that stay in f32, as parameters are named: `3`, or `3.0` inside a residual.
pub(super) fn taken_apart(listed: Vec<ListedLayer>) -> (Vec<StackLayer>, Vec<String>) {
    let mut f32_layers = Vec::new();
    (taken_apart_in("", listed, &mut f32_layers), f32_layers)
}

fn taken_apart_in(list: &str, listed: Vec<ListedLayer>, f32_layers: &mut Vec<String>) -> Vec<StackLayer> {
    let one = |(k, listed): (usize, ListedLayer)| {
        let path = format!("{list}{k}");
        if listed.is_f32 {
            f32_layers.push(path.clone());
        }
        match listed.layer {
            StackLayer::Residual { .. } => {
                let layers = taken_apart_in(&format!("{path}."), listed.inner, f32_layers);
                StackLayer::Residual { layers }
            }
            layer => layer,
        }
    };
    listed.into_iter().enumerate().map(one).collect()
}

/// Whether a list has a layer at this path.
pub(super) fn has_layer(layers: &[StackLayer], path: &str) -> bool {
    let (first, inner) = path.split_once('.').map_or((path, None), |(first, inner)| (first, Some(inner)));
    let layer = layers.iter().enumerate().find(|(k, _)| k.to_string() == first);
    match (layer, inner) {
        (Some((_, StackLayer::Residual { layers })), Some(inner)) => has_layer(layers, inner),
        (layer, inner) => layer.is_some() && inner.is_none(),
    }
}

fn kinds() -> Vec<Kind<ListedLayer>> {
    // What must be given is 0 until it is.
    const NONE: Pair = (0, 0);
    let mut kinds = kinds! {
        /// fully connected, from rows to rows, or step by step from sequences to sequences
        "linear" => |_| plain(StackLayer::Linear { outputs: None, bias: true });
        /// a convolution, from images to images
        "conv" => |_| plain(StackLayer::Conv { outputs: 0, kernel: NONE, conv: Conv::default(), bias: true });
        /// a transposed convolution, from images to images
        "conv_transpose" => |_| plain(StackLayer::ConvTranspose {
            outputs: 0, kernel: NONE, conv: Conv::default(), output_padding: (0, 0), bias: true
        });
        /// the maximum of each window, from images to images
        "max_pool" => |_| plain(StackLayer::MaxPool { kernel: NONE, stride: NONE, padding: (0, 0) });
        /// the mean of each window, from images to images; padding counts as zeros
        "avg_pool" => |_| plain(StackLayer::AvgPool { kernel: NONE, stride: NONE, padding: (0, 0) });
        /// the means of windows that cut an image into `out`, from images to images
        "adaptive_avg_pool" => |_| plain(StackLayer::AdaptiveAvgPool { out: NONE });
        /// the mean of each channel, from images to rows
        "global_mean" => |_| plain(StackLayer::GlobalMean);
        /// batch norm, channel by channel, of anything but ids
        "batch_norm" => |_| plain(StackLayer::BatchNorm);
        /// layer norm over the last dimension, or over the channels of each pixel, of anything but ids
        "layer_norm" => |_| plain(StackLayer::LayerNorm);
        /// RMS norm over the last dimension, or over the channels of each pixel, of anything but ids
        "rms_norm" => |_| plain(StackLayer::RmsNorm);
        /// group norm, of anything but ids
        "group_norm" => |_| plain(StackLayer::GroupNorm { groups: 0 });
        /// sets elements to 0 at random in training, of anything but ids
        "dropout" => |_| plain(StackLayer::Dropout { p: 0.5 });
        /// from images or sequences to rows, in PyTorch's order
        "flatten" => |_| plain(StackLayer::Flatten);
        /// from ids to sequences of vectors
        "embedding" => |_| plain(StackLayer::Embedding { width: 0 });
        /// adds a learnt vector at each position of a sequence
        "positions" => |_| plain(StackLayer::Positions);
        /// a long short-term memory, from sequences to sequences
        "lstm" => |_| plain(StackLayer::Recurrent { cell: Cell::Lstm, hidden: 0, bidirectional: false });
        /// a gated recurrent unit, from sequences to sequences
        "gru" => |_| plain(StackLayer::Recurrent { cell: Cell::Gru, hidden: 0, bidirectional: false });
        /// the last step, from sequences to rows
        "last_step" => |_| plain(StackLayer::LastStep);
        /// the mean over time, from sequences to rows
        "mean_time" => |_| plain(StackLayer::MeanTime);
        /// self-attention, from sequences to sequences
        "attention" => |_| plain(StackLayer::Attention { heads: 0, causal: false });
        /// a transformer layer as PyTorch's `TransformerEncoderLayer`, from sequences to sequences
        "encoder_layer" => |_| plain(StackLayer::EncoderLayer {
            heads: 0, hidden: None, activation: "relu".into(), dropout: 0.1, norm_first: false, causal: false
        });
        /// x + f(x), of anything but ids; f must keep the shape
        "residual" => |_| plain(StackLayer::Residual { layers: Vec::new() });
    };
    let activation = |name: &'static str| plain(StackLayer::Activation { name: name.into() });
    let words = "an activation, element by element, of anything but ids";
    kinds.extend(section::kinds(&ACTIVATIONS.map(|(name, _)| name), activation, words));
    kinds
}

/// A layer in the run's precision.
fn plain(layer: StackLayer) -> ListedLayer {
    ListedLayer { layer, inner: Vec::new(), is_f32: false }
}

fn keys() -> Vec<Key<ListedLayer>> {
    let window = |least| pair(least..=WINDOW_MAX);
    let channels = || whole(1..=CHANNELS_MAX);
    let activation = name_of(ACTIVATIONS.map(|(name, _)| name));
    keys! { ListedLayer;
        /// the width of the output
        outputs: maybe(whole(1..=WIDTH_MAX)) => field!(StackLayer::{Linear}.outputs in layer);
            or "in the last layer the number of classes, needed elsewhere";
        /// channels of the output
        outputs: channels() => field!(StackLayer::{Conv | ConvTranspose}.outputs in layer);
            needed "say how many channels go out, such as outputs = 32";
        /// the size of the window
        kernel: window(1) => field!(StackLayer::{Conv | ConvTranspose | MaxPool | AvgPool}.kernel in layer);
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
        groups: channels() => field!(StackLayer::{GroupNorm}.groups in layer);
            needed "say how many groups of channels, such as groups = 8";
        /// rows and columns added at the end of the output
        output_padding: window(0) => field!(StackLayer::{ConvTranspose}.output_padding in layer); or "0";
        /// whether a learnt vector is added
        bias: flag() => field!(StackLayer::{Linear | Conv | ConvTranspose}.bias in layer);
        /// the size of the output
        out: window(1) => field!(StackLayer::{AdaptiveAvgPool}.out in layer);
            needed "say how many rows and columns go out, such as out = 1";
        /// the share dropped in training
        p: single(Bounds::BELOW_1) => field!(StackLayer::{Dropout}.p in layer);
        /// the length of each vector
        width: channels() => field!(StackLayer::{Embedding}.width in layer);
            needed "say the length of each token's vector, such as width = 128";
        /// the width of the state
        hidden: channels() => field!(StackLayer::{Recurrent}.hidden in layer);
            needed "say the width of the state, such as hidden = 128";
        /// the width between its two linear layers
        hidden: maybe(channels()) => field!(StackLayer::{EncoderLayer}.hidden in layer); or "4 times the width of the sequence";
        /// whether it also runs backwards in time; outputs are concatenated
        bidirectional: flag() => field!(StackLayer::{Recurrent}.bidirectional in layer);
        /// attention heads
        heads: channels() => field!(StackLayer::{Attention | EncoderLayer}.heads in layer);
            needed "say how many attention heads, such as heads = 4";
        /// the activation between its two linear layers
        activation: activation => field!(StackLayer::{EncoderLayer}.activation in layer);
        /// the share dropped in training
        dropout: single(Bounds::BELOW_1) => field!(StackLayer::{EncoderLayer}.dropout in layer);
        /// whether norms come before attention and linear layers, or after their sums
        norm_first: flag() => field!(StackLayer::{EncoderLayer}.norm_first in layer);
        /// whether a position sees only itself and earlier ones
        causal: flag() => field!(StackLayer::{Attention | EncoderLayer}.causal in layer);
        /// the layers of f
        layers: layers(false) => |s| matches!(s.layer, StackLayer::Residual { .. }).then_some(&mut s.inner);
            needed "say what is added to x, as a list of layers";
        /// keeps the layer in f32 where `train.precision` is another; of a residual, all that is inside it
        precision: one_of([("f32", true, "")]) => |s| Some(&mut s.is_f32); or "the run's";
    }
}

fn conv(listed: &mut ListedLayer) -> Option<&mut Conv> {
    match &mut listed.layer {
        StackLayer::Conv { conv, .. } | StackLayer::ConvTranspose { conv, .. } => Some(conv),
        _ => None,
    }
}

/// Stride and padding of what has windows.
fn steps(listed: &mut ListedLayer) -> Option<[&mut Pair; 2]> {
    match &mut listed.layer {
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
fn check(listed: &mut ListedLayer, c: &Cursor) {
    if let StackLayer::MaxPool { kernel, stride, .. } | StackLayer::AvgPool { kernel, stride, .. } =
        &mut listed.layer
        && !c.has("stride")
    {
        *stride = *kernel;
    }
}

/// A list of layers. Only the last one of a model may leave its outputs to the data.
pub(super) fn layers(of_model: bool) -> Type<Vec<ListedLayer>> {
    let Type { shape, write, .. } = list(table::<ListedLayer>(), &[], "an array of layers");
    let needed = shape.clone();
    let read = move |at: &At| {
        let items = at.items(&needed)?;
        if items.is_empty() {
            at.fault(format!("`{}` is empty; at least one layer is needed", at.path), "");
        }
        let layer = |(i, item): (usize, &At)| {
            let layer = ListedLayer::section().read(item)?;
            let is_open = matches!(layer.layer, StackLayer::Linear { outputs: None, .. });
            if is_open && !(of_model && i + 1 == items.len()) {
                let hint = "only the last layer may leave it out, for the number of classes";
                item.cursor(&ListedLayer::section().outline)?.require("outputs", hint);
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
