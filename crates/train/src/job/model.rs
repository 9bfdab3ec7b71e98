//! `[model]`: one of the reference models with its sizes, or a list of layers.

use std::ops::RangeInclusive;

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_nn::model::{Stack, StackInput};
use polyreme_nn::{Model, TraceOptions};

use super::cursor::{At, Cursor};
use super::layers;
use super::spec::ModelSpec;
use super::tree::Value;

/// Widths, channels and vocabularies. With the other limits, no product of sizes overflows.
pub(super) const WIDTH_MAX: usize = 1 << 20;
/// Channels of images.
const CHANNELS_MAX: usize = 1 << 16;
/// Rows and columns of images.
pub(super) const SIDE_MAX: usize = 1 << 12;
/// Ids of a sequence.
pub(super) const CONTEXT_MAX: usize = 1 << 16;
/// Layers of a model that has a number of them.
const LAYERS_MAX: usize = 1 << 10;

/// Reads the section; `None` if it is wrong, which has then been reported.
pub(super) fn read(c: &Cursor) -> Option<ModelSpec> {
    let weights = c.path("weights");
    let Some(kind) = kind(c) else {
        c.finish_kind(None);
        return None;
    };
    let n_faults = c.reading.n_faults();
    let model = if kind == "layers" { stack(c) } else { reference(c, kind) };
    c.finish_kind(Some(kind));
    if c.reading.n_faults() > n_faults {
        return None;
    }
    let model = model?;
    let open = model.sizes_from_data().iter().filter(|key| match (&model, **key) {
        (Model::Layers(m), "input") => m.input == StackInput::Open,
        (Model::Layers(m), _) => m.is_open(),
        (_, key) => !c.has(key),
    });
    let from_data = open.map(|key| key.to_string()).collect();
    Some(ModelSpec { model, from_data, weights })
}

/// The kind; a list of layers needs none.
fn kind(c: &Cursor) -> Option<&'static str> {
    let known: Vec<&'static str> = Model::NAMES.into_iter().chain(["layers"]).collect();
    let said = c.get("kind");
    if let Some(said) = said {
        return said.choice(&known);
    }
    if c.has("layers") {
        return Some("layers");
    }
    c.require("kind", &format!("known are {}", known.join(", ")));
    None
}

/// A reference model, with the sizes that are said.
fn reference(c: &Cursor, kind: &str) -> Option<Model> {
    let mut model = Model::by_name(kind).ok()?;
    let set = |key, to: &mut usize, max: usize| {
        let Some(at) = c.get(key) else { return };
        if key == "layers" && matches!(at.node.value, Value::Array(_)) {
            let message =
                format!("`{}` is an array; a model of kind `{kind}` has a number of layers", at.path);
            at.fault(message, "leave `kind` out for a list of layers of your own");
        } else if let Some(n) = at.size(1..=max) {
            *to = n;
        }
    };
    let dropout = |to: &mut f32| {
        if let Some(p) = c.real("dropout", 0.0..1.0) {
            *to = p as f32;
        }
    };
    match &mut model {
        Model::Mlp(m) => {
            set("inputs", &mut m.inputs, 1 << 28);
            set("classes", &mut m.classes, WIDTH_MAX);
            if let Some(hidden) = sizes(c.get("hidden"), 1..=WIDTH_MAX) {
                m.hidden = hidden;
            }
            if let Some(name) = c.choice("activation", &ACTIVATIONS.map(|(n, _)| n)) {
                m.activation = name.into();
            }
            dropout(&mut m.dropout);
        }
        Model::Lenet(m) => {
            set("channels", &mut m.channels, CHANNELS_MAX);
            set("classes", &mut m.classes, WIDTH_MAX);
            if let Some(image) = c.pair("image", 1..=SIDE_MAX) {
                m.image = image;
            }
        }
        Model::Cnn(m) => {
            set("channels", &mut m.channels, CHANNELS_MAX);
            set("classes", &mut m.classes, WIDTH_MAX);
            if let Some(widths) = sizes(c.get("widths"), 1..=CHANNELS_MAX) {
                m.widths = widths;
            }
            dropout(&mut m.dropout);
        }
        Model::AlexNet(m) => {
            set("channels", &mut m.channels, CHANNELS_MAX);
            set("classes", &mut m.classes, WIDTH_MAX);
            dropout(&mut m.dropout);
        }
        Model::ResNet(m) => {
            set("channels", &mut m.channels, CHANNELS_MAX);
            set("classes", &mut m.classes, WIDTH_MAX);
        }
        Model::Gpt(m) => {
            set("vocab", &mut m.vocab, WIDTH_MAX);
            set("context", &mut m.context, CONTEXT_MAX);
            set("width", &mut m.width, CHANNELS_MAX);
            set("heads", &mut m.heads, CHANNELS_MAX);
            set("layers", &mut m.layers, LAYERS_MAX);
            dropout(&mut m.dropout);
            divides(c, m.heads, m.width);
        }
        Model::Recurrent(m) => {
            set("vocab", &mut m.vocab, WIDTH_MAX);
            set("context", &mut m.context, CONTEXT_MAX);
            set("width", &mut m.width, CHANNELS_MAX);
            set("hidden", &mut m.hidden, CHANNELS_MAX);
            set("layers", &mut m.layers, LAYERS_MAX);
            set("classes", &mut m.classes, WIDTH_MAX);
            dropout(&mut m.dropout);
        }
        Model::Encoder(m) => {
            set("vocab", &mut m.vocab, WIDTH_MAX);
            set("context", &mut m.context, CONTEXT_MAX);
            set("width", &mut m.width, CHANNELS_MAX);
            set("heads", &mut m.heads, CHANNELS_MAX);
            set("hidden", &mut m.hidden, CHANNELS_MAX);
            set("layers", &mut m.layers, LAYERS_MAX);
            set("classes", &mut m.classes, WIDTH_MAX);
            dropout(&mut m.dropout);
            divides(c, m.heads, m.width);
        }
        Model::Layers(_) => unreachable!("no reference model is a list of layers"),
    }
    Some(model)
}

fn sizes(at: Option<At>, range: RangeInclusive<usize>) -> Option<Vec<usize>> {
    at?.sizes(&[], "an array of whole numbers", range)
}

fn divides(c: &Cursor, heads: usize, width: usize) {
    if !width.is_multiple_of(heads) {
        let key = if c.has("heads") { "heads" } else { "width" };
        let message = format!("`model.heads` of {heads} does not divide `model.width` of {width}");
        let near = (1..=heads).rev().find(|h| width.is_multiple_of(*h)).unwrap_or(1);
        c.reading.fault(c.place_of(key), &c.path_of(key), message, format!("{near} heads would"));
    }
}

/// A list of layers. Where the input is said, they are traced once, so that a layer that does not fit is found here.
fn stack(c: &Cursor) -> Option<Model> {
    let n_faults = c.reading.n_faults();
    let input = input(c);
    let classes = c.size("classes", 1..=WIDTH_MAX);
    c.require("layers", "write layers = [{ kind = \"linear\", outputs = 64 }, \"relu\", \"linear\"]");
    let list = c.get("layers")?;
    if matches!(list.node.value, Value::Integer(_)) {
        return list.wrong("a list of layers");
    }
    let layers = layers::read(&list, true)?;
    let mut stack = Stack { input: input?, layers };
    if let Some(classes) = classes {
        if !stack.is_open() {
            let message = "`model.classes` is said, but the last layer does not leave its `outputs` open";
            let hint = "end with \"linear\", or leave `classes` out";
            c.reading.fault(c.place_of("classes"), &c.path_of("classes"), message, hint);
        }
        stack.set_classes(classes);
    }
    if stack.input != StackInput::Open && c.reading.n_faults() == n_faults {
        let mut closed = stack.clone();
        closed.set_classes(2);
        if let Err(e) = Model::Layers(closed).trace(&TraceOptions::evaluation(2)) {
            // The error's layer is the layer's path below [model], and its kind.
            let path = e.layer.split(' ').next().unwrap_or_default();
            let place = layers::place_of(list.node, path).unwrap_or(c.place_of("layers"));
            let message = format!("{}: {}", e.layer, e.kind);
            c.reading.fault(place, &c.path_of(path), message, "");
        }
    }
    Some(Model::Layers(stack))
}

/// `input = [width]`, `[channels, height, width]`, or `vocab` and `context`. Nothing: open. `None`: wrong.
fn input(c: &Cursor) -> Option<StackInput> {
    let (shape, vocab, context) = (c.get("input"), c.has("vocab"), c.has("context"));
    let vocab_size = c.size("vocab", 1..=WIDTH_MAX);
    let context_size = c.size("context", 1..=CONTEXT_MAX);
    let Some(shape) = shape else {
        if vocab || context {
            let hint = "token ids have both; leave both out to take them from the data";
            c.require("vocab", hint);
            c.require("context", hint);
            return Some(StackInput::Ids { vocab: vocab_size?, context: context_size? });
        }
        return Some(StackInput::Open);
    };
    if vocab || context {
        let message = "`model.input` and `model.vocab` or `model.context` cannot both be said";
        shape.fault(message, "`input` is for rows and images, the others are for token ids");
    }
    let dims = shape.sizes(&[1, 3], "[width] or [channels, height, width]", 1..=(1 << 28))?;
    match *dims.as_slice() {
        [width] => Some(StackInput::Row { width }),
        [channels, height, width] if channels <= CHANNELS_MAX && height.max(width) <= SIDE_MAX => {
            Some(StackInput::Image { channels, height, width })
        }
        _ => {
            let message =
                format!("`{}` is too large; images have at most {SIDE_MAX} rows and columns", shape.path);
            shape.fault(message, "");
            None
        }
    }
}
