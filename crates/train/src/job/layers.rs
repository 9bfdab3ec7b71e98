//! `layers = [..]`: a network of one's own, layer by layer. A layer is a table with a kind, or its kind alone.

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_graph::op::{Cell, Conv};
use polyreme_nn::model::StackLayer;

use super::cursor::{At, Cursor};
use super::error::Place;
use super::model::WIDTH_MAX;
use super::tree::{Node, Table, Value};

/// Kernels, strides, paddings and dilations.
const WINDOW_MAX: usize = 1 << 12;
const CHANNELS_MAX: usize = 1 << 16;

/// Reads a list of layers; `last`: its last layer may leave the outputs to the data. `None` if something is wrong.
pub(super) fn read(list: &At, last: bool) -> Option<Vec<StackLayer>> {
    let items = list.items("a list of layers")?;
    if items.is_empty() {
        list.fault(format!("`{}` is empty; at least one layer is needed", list.path), "");
    }
    let n = items.len();
    // All layers are read before one that is wrong ends it.
    let layers: Vec<_> = items.iter().enumerate().map(|(i, item)| layer(item, last && i + 1 == n)).collect();
    layers.into_iter().collect()
}

/// The place of a layer by its path, such as `layers[2].layers[0]`; `list` is the outermost.
pub(super) fn place_of<'a>(list: &'a Node, path: &str) -> Option<&'a Place> {
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

fn layer(item: &At, open: bool) -> Option<StackLayer> {
    let nothing = Table::default();
    let known: Vec<&'static str> =
        StackLayer::KINDS.into_iter().chain(ACTIVATIONS.map(|(name, _)| name)).collect();
    let reading = item.reading();
    let (cursor, kind);
    match &item.node.value {
        // The kind alone.
        Value::String(_) => {
            kind = item.choice(&known)?;
            cursor = Cursor::new(reading, &nothing, &item.node.place, "model.layers", item.path.clone());
            cursor.get("kind");
        }
        Value::Table(_) => {
            cursor = item.table("model.layers", "a layer")?;
            cursor.require("kind", &format!("known are {}", known.join(", ")));
            let Some(said) = cursor.choice("kind", &known) else {
                cursor.finish_kind(None);
                return None;
            };
            kind = said;
        }
        _ => return item.wrong("a layer (a table with a `kind`, or a kind alone)"),
    }
    let layer = of_kind(&cursor, kind, open);
    cursor.finish_kind(Some(kind));
    layer
}

/// All keys are asked for before one that is wrong ends it.
fn of_kind(c: &Cursor, kind: &str, open: bool) -> Option<StackLayer> {
    let kernel = || {
        c.require("kernel", "say the rows and columns of the window, such as kernel = 3");
        c.pair("kernel", 1..=WINDOW_MAX)
    };
    let outputs = || {
        c.require("outputs", "say how many channels go out, such as outputs = 32");
        c.size("outputs", 1..=CHANNELS_MAX)
    };
    let pair = |key, least, default| {
        if c.has(key) {
            c.pair(key, least..=WINDOW_MAX)
        } else {
            c.get(key);
            Some(default)
        }
    };
    let conv = || {
        let stride = pair("stride", 1, (1, 1));
        let padding = pair("padding", 0, (0, 0));
        let dilation = pair("dilation", 1, (1, 1));
        let groups = c.size("groups", 1..=CHANNELS_MAX);
        Some(Conv {
            stride: stride?,
            padding: padding?,
            dilation: dilation?,
            groups: groups.or((!c.has("groups")).then_some(1))?,
        })
    };
    let bias = || c.flag("bias").unwrap_or(true);
    let heads = || {
        c.require("heads", "say how many attention heads share the width, such as heads = 4");
        c.size("heads", 1..=CHANNELS_MAX)
    };
    let window = || {
        let kernel = kernel();
        let stride = pair("stride", 1, kernel.unwrap_or((1, 1)));
        let padding = pair("padding", 0, (0, 0));
        Some((kernel?, stride?, padding?))
    };
    let recurrent = |cell| {
        c.require("hidden", "say the width of the state, such as hidden = 128");
        let hidden = c.size("hidden", 1..=CHANNELS_MAX);
        let bidirectional = c.flag("bidirectional").unwrap_or(false);
        Some(StackLayer::Recurrent { cell, hidden: hidden?, bidirectional })
    };
    Some(match kind {
        "linear" => {
            if !open {
                c.require("outputs", "only the last layer may leave it out, for the number of classes");
            }
            let outputs = c.size("outputs", 1..=WIDTH_MAX);
            StackLayer::Linear { outputs, bias: bias() }
        }
        "conv" => {
            let (outputs, kernel, conv, bias) = (outputs(), kernel(), conv(), bias());
            StackLayer::Conv { outputs: outputs?, kernel: kernel?, conv: conv?, bias }
        }
        "conv_transpose" => {
            let (outputs, kernel, conv, bias) = (outputs(), kernel(), conv(), bias());
            let output_padding = pair("output_padding", 0, (0, 0))?;
            StackLayer::ConvTranspose {
                outputs: outputs?,
                kernel: kernel?,
                conv: conv?,
                output_padding,
                bias,
            }
        }
        "max_pool" => {
            let (kernel, stride, padding) = window()?;
            StackLayer::MaxPool { kernel, stride, padding }
        }
        "avg_pool" => {
            let (kernel, stride, padding) = window()?;
            StackLayer::AvgPool { kernel, stride, padding }
        }
        "adaptive_avg_pool" => {
            c.require("out", "say how many rows and columns go out, such as out = 1");
            StackLayer::AdaptiveAvgPool { out: c.pair("out", 1..=WINDOW_MAX)? }
        }
        "global_mean" => StackLayer::GlobalMean,
        "batch_norm" => StackLayer::BatchNorm,
        "layer_norm" => StackLayer::LayerNorm,
        "rms_norm" => StackLayer::RmsNorm,
        "group_norm" => {
            c.require("groups", "say how many groups of channels, such as groups = 8");
            StackLayer::GroupNorm { groups: c.size("groups", 1..=CHANNELS_MAX)? }
        }
        "dropout" => StackLayer::Dropout { p: c.real("p", 0.0..1.0).unwrap_or(0.5) as f32 },
        "flatten" => StackLayer::Flatten,
        "embedding" => {
            c.require("width", "say the length of each token's vector, such as width = 128");
            StackLayer::Embedding { width: c.size("width", 1..=CHANNELS_MAX)? }
        }
        "positions" => StackLayer::Positions,
        "lstm" => recurrent(Cell::Lstm)?,
        "gru" => recurrent(Cell::Gru)?,
        "last_step" => StackLayer::LastStep,
        "mean_time" => StackLayer::MeanTime,
        "attention" => {
            let (heads, causal) = (heads(), c.flag("causal").unwrap_or(false));
            StackLayer::Attention { heads: heads?, causal }
        }
        "encoder_layer" => {
            let heads = heads();
            let hidden = c.size("hidden", 1..=CHANNELS_MAX);
            let activation = c.choice("activation", &ACTIVATIONS.map(|(n, _)| n)).unwrap_or("relu").into();
            let dropout = c.real("dropout", 0.0..1.0).unwrap_or(0.1) as f32;
            let norm_first = c.flag("norm_first").unwrap_or(false);
            let causal = c.flag("causal").unwrap_or(false);
            StackLayer::EncoderLayer { heads: heads?, hidden, activation, dropout, norm_first, causal }
        }
        "residual" => {
            c.require("layers", "say what is added to x, as a list of layers");
            StackLayer::Residual { layers: read(&c.get("layers")?, false)? }
        }
        activation => StackLayer::Activation { name: activation.into() },
    })
}
