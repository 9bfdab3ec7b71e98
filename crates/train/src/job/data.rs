//! `[data]`: where samples come from and what is done to them.

use std::ops::Bound;
use std::path::PathBuf;

use super::cursor::{At, Cursor};
use super::keys::{DATA_KINDS, Grammar};
use super::model::{CONTEXT_MAX, SIDE_MAX, WIDTH_MAX};
use super::spec::{Augment, ClassWeights, DataSpec, OrderSpec, Source};
use super::tree::Value;

/// More than this is a slip, not a setting.
const THREADS_MAX: usize = 1 << 10;

/// Reads the section; `None` if the source is wrong, which has then been reported.
pub(super) fn read(c: &Cursor) -> Option<DataSpec> {
    let kind = match c.get("kind") {
        Some(said) => said.choice(&DATA_KINDS),
        None => {
            c.require("kind", &format!("known are {}", DATA_KINDS.join(", ")));
            None
        }
    };
    let mut spec = DataSpec::default();
    if let Some(validation) = c.real("validation", 0.0..1.0) {
        spec.validation = validation;
    }
    if let Some(fraction) = c.real("fraction", (Bound::Excluded(0.0), Bound::Included(1.0))) {
        spec.fraction = fraction;
    }
    spec.threads = c.size("threads", 1..=THREADS_MAX);
    if let Some(prefetch) = c.size("prefetch", 1..=THREADS_MAX) {
        spec.prefetch = prefetch;
    }
    spec.order = order(c);
    let Some(kind) = kind else {
        c.finish_kind(None);
        return None;
    };
    let has = |key: &str| Grammar::at("data").keys_of(Some(kind)).any(|k| k == key);
    // Ids have no mean.
    spec.normalise = has("normalise");
    if has("normalise") {
        spec.normalise = c.flag("normalise").unwrap_or(true);
    }
    if has("augment") {
        spec.augment = augment(c);
    }
    if has("class_weights") {
        spec.class_weights = class_weights(c);
    }
    let source = source(c, kind);
    c.finish_kind(Some(kind));
    spec.source = source?;
    Some(spec)
}

/// All keys are asked for before one that is wrong ends it.
fn source(c: &Cursor, kind: &'static str) -> Option<Source> {
    let folder = |what: &str| {
        c.require("path", &format!("say where {what}; paths are relative to the job file's folder"));
        c.path("path")
    };
    let known = |name| match c.get("path") {
        Some(path) => path.path(),
        None => Some(Source::default_folder(name)),
    };
    let optional = |key| c.path(key);
    Some(match kind {
        "idx" => Source::Idx { path: folder("the IDX files are")?, known: None },
        "mnist" | "fashion-mnist" => {
            let path: PathBuf = known(kind)?;
            Source::Idx { path, known: (!c.has("path")).then_some(kind) }
        }
        "cifar10" => Source::Cifar { path: known(kind)?, classes: 10 },
        "cifar100" => Source::Cifar { path: known(kind)?, classes: 100 },
        "csv" => {
            let (path, test) = (folder("the table is"), optional("test"));
            let (label, delimiter, header) = (label(c), delimiter(c), c.flag("header"));
            Source::Csv { path: path?, test, label, delimiter, header }
        }
        "images" => {
            let path = folder("the folder of images is");
            let size = c.pair("size", 1..=SIDE_MAX);
            let grey = c.flag("grey").unwrap_or(false);
            Source::Images { path: path?, size, grey }
        }
        "text" => {
            let (path, test) = (folder("the text is"), optional("test"));
            let (tokenizer, context) = (optional("tokenizer"), c.size("context", 1..=CONTEXT_MAX));
            Source::Text { path: path?, test, tokenizer, context }
        }
        "arrays" => {
            let (path, test) = (folder("the safetensors file is"), optional("test"));
            let x = c.string("x").unwrap_or("x").into();
            let labels = c.string("labels").unwrap_or("labels").into();
            Source::Arrays { path: path?, test, x, labels }
        }
        "synthetic" => {
            let samples = c.size("samples", 1..=(1 << 32)).unwrap_or(1000);
            let classes = c.size("classes", 1..=WIDTH_MAX).unwrap_or(10);
            let noise = c.real("noise", 0.0..).unwrap_or(0.2);
            let shape = shape(c);
            Source::Synthetic { samples, shape: shape?, classes, noise }
        }
        _ => Source::Given,
    })
}

fn shape(c: &Cursor) -> Option<Vec<usize>> {
    let Some(at) = c.get("shape") else { return Some(vec![16]) };
    let shape = at.sizes(&[1, 3], "[width] or [channels, height, width]", 1..=(1 << 24))?;
    let numel = shape.iter().fold(1_usize, |n, &d| n.saturating_mul(d));
    if numel > 1 << 28 {
        at.fault(format!("`{}` has {numel} numbers a sample; at most {} are possible", at.path, 1 << 28), "");
        return None;
    }
    Some(shape)
}

/// The label's column, by name or number.
fn label(c: &Cursor) -> Option<String> {
    let at = c.get("label")?;
    match &at.node.value {
        Value::Integer(_) => at.whole(0..=u64::from(u32::MAX)).map(|n| n.to_string()),
        Value::String(name) => Some(name.clone()),
        _ => at.wrong("a column's name or number"),
    }
}

fn delimiter(c: &Cursor) -> u8 {
    let Some(at) = c.get("delimiter") else { return b',' };
    let Some(text) = at.string() else { return b',' };
    match text.as_bytes() {
        [byte] if byte.is_ascii() && !matches!(byte, b'"' | b'\n' | b'\r') => *byte,
        _ => {
            let message = format!("`{}` is {text:?}; one ASCII character is needed", at.path);
            at.fault(message, "such as \",\", \";\" or \"\\t\"");
            b','
        }
    }
}

fn order(c: &Cursor) -> OrderSpec {
    let order = c.choice("order", &["sample", "block", "parts", "in-order"]);
    let block = c.size("block", 1..=(1 << 32));
    if c.has("block") && order != Some("block") {
        let message = "`data.block` is said, but `data.order` is not \"block\"";
        c.reading.fault(c.place_of("block"), &c.path_of("block"), message, "write order = \"block\"");
    }
    match order {
        Some("in-order") => OrderSpec::InOrder,
        Some("parts") => OrderSpec::Parts,
        Some("block") => OrderSpec::Block(block.unwrap_or(4096)),
        _ => OrderSpec::Sample,
    }
}

fn augment(c: &Cursor) -> Augment {
    let needed = "a table such as { crop = 4, flip = true }";
    let Some(c) = c.get("augment").and_then(|at| at.table("data.augment", needed)) else {
        return Augment::default();
    };
    let augment = Augment {
        crop: c.size("crop", 0..=SIDE_MAX).unwrap_or(0),
        flip: c.flag("flip").unwrap_or(false),
        shift: c.size("shift", 0..=SIDE_MAX).unwrap_or(0),
        erase: c.real("erase", 0.0..=1.0).unwrap_or(0.0),
    };
    c.finish();
    augment
}

fn class_weights(c: &Cursor) -> ClassWeights {
    let Some(at) = c.get("class_weights") else { return ClassWeights::None };
    let given = |at: &At| -> Option<Vec<f32>> {
        let items = at.items("\"balanced\" or an array of numbers")?;
        if items.is_empty() {
            at.fault(format!("`{}` is empty; one number a class is needed", at.path), "");
        }
        let weights: Vec<_> = items.iter().map(|item| item.real(0.0..)).collect();
        weights.into_iter().map(|w| w.map(|w| w as f32)).collect()
    };
    match &at.node.value {
        Value::String(_) => match at.choice(&["balanced"]) {
            Some(_) => ClassWeights::Balanced,
            None => ClassWeights::None,
        },
        _ => given(&at).map_or(ClassWeights::None, ClassWeights::Given),
    }
}
