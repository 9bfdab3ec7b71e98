//! The way back: a job as a file that reads as the same job.

use std::fmt::Write;
use std::path::Path;

use polyreme_graph::op::{Cell, Conv};
use polyreme_graph::{Moments, Optimizer};
use polyreme_nn::Model;
use polyreme_nn::model::{StackInput, StackLayer};

use super::spec::*;
use crate::schedule::Shape;

impl Job {
    /// The job as TOML, everything said and all paths absolute: read again, it is the same job, from any file, in any
    /// folder. What is to come from the data is left out. A well-known set that was named without a path is written
    /// so; give it the folder that was found (`known: None`) to make it independent of the working folder.
    pub fn to_toml(&self) -> String {
        let mut out = Section::default();
        out.put("name", text(&self.name));
        out.begin("model");
        model(&mut out, &self.model);
        out.begin("data");
        data(&mut out, &self.data);
        out.begin("train");
        train(&mut out, &self.train);
        out.begin("parallel");
        parallel(&mut out, &self.parallel);
        out.begin("output");
        output(&mut out, &self.output);
        out.text
    }
}

#[derive(Default)]
struct Section {
    text: String,
}

impl Section {
    fn begin(&mut self, name: &str) {
        let _ = writeln!(self.text, "\n[{name}]");
    }
    fn put(&mut self, key: &str, value: String) {
        let _ = writeln!(self.text, "{key} = {value}");
    }
    fn maybe(&mut self, key: &str, value: Option<String>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }
}

fn text(s: &str) -> String {
    toml::Value::String(s.into()).to_string()
}

fn path(path: &Path) -> String {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
    text(&whole.to_string_lossy())
}

fn real(x: f64) -> String {
    format!("{x:?}")
}

/// The shortest decimal that reads back as the same number.
fn single(x: f32) -> String {
    let short = format!("{x:?}");
    let back = short.parse::<f64>().map(|y| y as f32);
    if back == Ok(x) { short } else { real(f64::from(x)) }
}

fn list<T: ToString>(items: &[T]) -> String {
    format!("[{}]", items.iter().map(T::to_string).collect::<Vec<_>>().join(", "))
}

fn pair((a, b): (usize, usize)) -> String {
    list(&[a, b])
}

fn table(entries: &[(&str, String)]) -> String {
    let entries = entries.iter().map(|(key, value)| format!("{key} = {value}"));
    format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
}

fn model(out: &mut Section, spec: &ModelSpec) {
    out.put("kind", text(spec.model.name()));
    let mut put = |key: &str, value: String| {
        if !spec.from_data.iter().any(|open| open == key) {
            out.put(key, value);
        }
    };
    let mut sizes = |rows: &[(&str, usize)]| rows.iter().for_each(|(key, n)| put(key, n.to_string()));
    match &spec.model {
        Model::Mlp(m) => {
            sizes(&[("inputs", m.inputs), ("classes", m.classes)]);
            put("hidden", list(&m.hidden));
            put("activation", text(&m.activation));
            put("dropout", single(m.dropout));
        }
        Model::Lenet(m) => {
            sizes(&[("channels", m.channels), ("classes", m.classes)]);
            put("image", pair(m.image));
        }
        Model::Cnn(m) => {
            sizes(&[("channels", m.channels), ("classes", m.classes)]);
            put("widths", list(&m.widths));
            put("dropout", single(m.dropout));
        }
        Model::AlexNet(m) => {
            sizes(&[("channels", m.channels), ("classes", m.classes)]);
            put("dropout", single(m.dropout));
        }
        Model::ResNet(m) => sizes(&[("channels", m.channels), ("classes", m.classes)]),
        Model::Gpt(m) => {
            sizes(&[("vocab", m.vocab), ("context", m.context), ("width", m.width)]);
            sizes(&[("heads", m.heads), ("layers", m.layers)]);
            put("dropout", single(m.dropout));
        }
        Model::Recurrent(m) => {
            sizes(&[("vocab", m.vocab), ("context", m.context), ("width", m.width)]);
            sizes(&[("hidden", m.hidden), ("layers", m.layers), ("classes", m.classes)]);
            put("dropout", single(m.dropout));
        }
        Model::Encoder(m) => {
            sizes(&[("vocab", m.vocab), ("context", m.context), ("width", m.width), ("heads", m.heads)]);
            sizes(&[("hidden", m.hidden), ("layers", m.layers), ("classes", m.classes)]);
            put("dropout", single(m.dropout));
        }
        Model::Layers(m) => {
            match m.input {
                StackInput::Open => {}
                StackInput::Row { width } => put("input", list(&[width])),
                StackInput::Image { channels, height, width } => {
                    put("input", list(&[channels, height, width]))
                }
                StackInput::Ids { vocab, context } => sizes(&[("vocab", vocab), ("context", context)]),
            }
            put("layers", layers(&m.layers, "\n    ", "\n"));
        }
    }
    out.maybe("weights", spec.weights.as_deref().map(path));
}

fn layers(list: &[StackLayer], before: &str, after: &str) -> String {
    let rows: Vec<_> = list.iter().map(|l| format!("{before}{}", layer(l))).collect();
    format!("[{}{}]", rows.join(","), if rows.is_empty() { "" } else { after })
}

fn layer(layer: &StackLayer) -> String {
    let window = |kernel, stride, padding| {
        vec![("kernel", pair(kernel)), ("stride", pair(stride)), ("padding", pair(padding))]
    };
    let conv = |outputs: usize, kernel, conv: &Conv, bias: bool| {
        let mut rows = vec![("outputs", outputs.to_string())];
        rows.extend(window(kernel, conv.stride, conv.padding));
        rows.extend([("dilation", pair(conv.dilation)), ("groups", conv.groups.to_string())]);
        rows.push(("bias", bias.to_string()));
        rows
    };
    let rows = match layer {
        StackLayer::Linear { outputs, bias } => {
            let mut rows: Vec<_> = outputs.iter().map(|n| ("outputs", n.to_string())).collect();
            rows.push(("bias", bias.to_string()));
            rows
        }
        StackLayer::Conv { outputs, kernel, conv: c, bias } => conv(*outputs, *kernel, c, *bias),
        StackLayer::ConvTranspose { outputs, kernel, conv: c, output_padding, bias } => {
            let mut rows = conv(*outputs, *kernel, c, *bias);
            rows.push(("output_padding", pair(*output_padding)));
            rows
        }
        StackLayer::MaxPool { kernel, stride, padding } | StackLayer::AvgPool { kernel, stride, padding } => {
            window(*kernel, *stride, *padding)
        }
        StackLayer::AdaptiveAvgPool { out } => vec![("out", pair(*out))],
        StackLayer::GroupNorm { groups } => vec![("groups", groups.to_string())],
        StackLayer::Dropout { p } => vec![("p", single(*p))],
        StackLayer::Embedding { width } => vec![("width", width.to_string())],
        StackLayer::Recurrent { cell: Cell::Lstm | Cell::Gru, hidden, bidirectional } => {
            vec![("hidden", hidden.to_string()), ("bidirectional", bidirectional.to_string())]
        }
        StackLayer::Attention { heads, causal } => {
            vec![("heads", heads.to_string()), ("causal", causal.to_string())]
        }
        StackLayer::EncoderLayer { heads, hidden, activation, dropout, norm_first, causal } => {
            let mut rows = vec![("heads", heads.to_string())];
            rows.extend(hidden.iter().map(|n| ("hidden", n.to_string())));
            rows.extend([("activation", text(activation)), ("dropout", single(*dropout))]);
            rows.extend([("norm_first", norm_first.to_string()), ("causal", causal.to_string())]);
            rows
        }
        StackLayer::Residual { layers: inner } => vec![("layers", layers(inner, " ", " "))],
        StackLayer::GlobalMean
        | StackLayer::BatchNorm
        | StackLayer::LayerNorm
        | StackLayer::RmsNorm
        | StackLayer::Activation { .. }
        | StackLayer::Flatten
        | StackLayer::Positions
        | StackLayer::LastStep
        | StackLayer::MeanTime => Vec::new(),
    };
    let kind = match layer {
        StackLayer::Activation { name } => text(name),
        _ => text(layer.kind()),
    };
    if rows.is_empty() {
        return kind;
    }
    table(&[vec![("kind", kind)], rows].concat())
}

fn data(out: &mut Section, spec: &DataSpec) {
    out.put("kind", text(spec.source.kind()));
    match &spec.source {
        Source::Idx { known: Some(_), .. } | Source::Given => {}
        Source::Idx { path: p, known: None } | Source::Cifar { path: p, .. } => out.put("path", path(p)),
        Source::Csv { path: p, test, label, delimiter, header } => {
            out.put("path", path(p));
            out.maybe("test", test.as_deref().map(path));
            out.maybe("label", label.as_deref().map(text));
            out.put("delimiter", text(&char::from(*delimiter).to_string()));
            out.maybe("header", header.map(|h| h.to_string()));
        }
        Source::Images { path: p, size, grey } => {
            out.put("path", path(p));
            out.maybe("size", size.map(pair));
            out.put("grey", grey.to_string());
        }
        Source::Text { path: p, test, tokenizer, context } => {
            out.put("path", path(p));
            out.maybe("test", test.as_deref().map(path));
            out.maybe("tokenizer", tokenizer.as_deref().map(path));
            out.maybe("context", context.map(|n| n.to_string()));
        }
        Source::Arrays { path: p, test, x, labels } => {
            out.put("path", path(p));
            out.maybe("test", test.as_deref().map(path));
            out.put("x", text(x));
            out.put("labels", text(labels));
        }
        Source::Synthetic { samples, shape, classes, noise } => {
            out.put("samples", samples.to_string());
            out.put("shape", list(shape));
            out.put("classes", classes.to_string());
            out.put("noise", real(*noise));
        }
    }
    out.put("validation", real(spec.validation));
    let Augment { crop, flip, shift, erase } = spec.augment;
    if !matches!(spec.source, Source::Text { .. }) {
        out.put("normalise", spec.normalise.to_string());
    }
    if spec.augment != Augment::default() {
        let rows = [("crop", crop.to_string()), ("flip", flip.to_string()), ("shift", shift.to_string())];
        out.put("augment", table(&[rows.to_vec(), vec![("erase", real(erase))]].concat()));
    }
    match &spec.class_weights {
        ClassWeights::None => {}
        ClassWeights::Balanced => out.put("class_weights", text("balanced")),
        ClassWeights::Given(weights) => {
            let weights: Vec<_> = weights.iter().map(|w| single(*w)).collect();
            out.put("class_weights", list(&weights));
        }
    }
    match spec.order {
        OrderSpec::InOrder => out.put("order", text("in-order")),
        OrderSpec::Sample => out.put("order", text("sample")),
        OrderSpec::Parts => out.put("order", text("parts")),
        OrderSpec::Block(n) => {
            out.put("order", text("block"));
            out.put("block", n.to_string());
        }
    }
    out.put("fraction", real(spec.fraction));
    out.maybe("threads", spec.threads.map(|n| n.to_string()));
    out.put("prefetch", spec.prefetch.to_string());
}

fn train(out: &mut Section, spec: &TrainSpec) {
    out.put("batch", spec.batch.to_string());
    match spec.length {
        Length::Epochs(n) => out.put("epochs", n.to_string()),
        Length::Steps(n) => out.put("steps", n.to_string()),
    }
    out.put("optimizer", optimizer(&spec.optimizer));
    let (kind, mut rows) = match spec.schedule.shape {
        Shape::Constant => ("constant", vec![]),
        Shape::Step { every_epochs, factor } => {
            ("step", vec![("every_epochs", every_epochs.to_string()), ("factor", real(factor))])
        }
        Shape::Exponential { factor } => ("exponential", vec![("factor", real(factor))]),
        Shape::Cosine { floor, restarts } => {
            ("cosine", vec![("floor", real(floor)), ("restarts", restarts.to_string())])
        }
        Shape::OneCycle { start_share, div, final_div } => (
            "one-cycle",
            vec![("start_share", real(start_share)), ("div", real(div)), ("final_div", real(final_div))],
        ),
        Shape::Linear { floor } => ("linear", vec![("floor", real(floor))]),
    };
    // One-cycle has its own way up.
    if kind != "one-cycle" {
        rows.push(("warmup", spec.schedule.warmup.to_string()));
    }
    out.put("schedule", table(&[vec![("kind", text(kind))], rows].concat()));
    out.maybe("clip", spec.clip.map(real));
    out.put("accumulate", spec.accumulate.to_string());
    out.maybe("ema", spec.ema.map(real));
    out.put("label_smoothing", single(spec.label_smoothing));
    out.put("mixup", real(spec.mixup));
    if let Some(EarlyStop { metric, patience, min_delta }) = &spec.early_stop {
        let rows =
            [("metric", text(metric)), ("patience", patience.to_string()), ("min_delta", real(*min_delta))];
        out.put("early_stop", table(&rows));
    }
    out.maybe("evaluate_every", spec.evaluate_every_steps.map(|n| n.to_string()));
    out.put("log_every", spec.log_every_steps.to_string());
    out.put("seed", spec.seed.to_string());
    out.put("precision", text("f32"));
    out.maybe("memory_mib", spec.memory_mib.map(|n| n.to_string()));
}

fn optimizer(spec: &OptimizerSpec) -> String {
    let moments = |m: &Moments| {
        vec![
            ("weight_decay", single(m.weight_decay)),
            ("betas", list(&[real(m.beta1), real(m.beta2)])),
            ("eps", single(m.eps)),
        ]
    };
    let (kind, rows) = match &spec.rule {
        Optimizer::Sgd { momentum, nesterov, weight_decay } => (
            "sgd",
            vec![
                ("weight_decay", single(*weight_decay)),
                ("momentum", single(*momentum)),
                ("nesterov", nesterov.to_string()),
            ],
        ),
        Optimizer::Adam(m) => ("adam", moments(m)),
        Optimizer::AdamW(m) => ("adamw", moments(m)),
        Optimizer::Lamb(m) => ("lamb", moments(m)),
    };
    table(&[vec![("kind", text(kind)), ("lr", real(spec.lr))], rows].concat())
}

fn parallel(out: &mut Section, spec: &ParallelSpec) {
    let or_auto = |n: Option<usize>| n.map_or(text("auto"), |n| n.to_string());
    out.put("ranks", or_auto(spec.ranks));
    out.put("threads", or_auto(spec.threads));
    out.put("transport", text(spec.transport.name()));
    out.put("encrypt", spec.encrypt.map_or(text("auto"), |on| on.to_string()));
    out.put("sync_batch_norm", spec.sync_batch_norm.to_string());
    out.put("reproducible", spec.reproducible.to_string());
    out.maybe("shards", spec.reproducible.then(|| spec.shards.to_string()));
    out.put("shard_optimizer", spec.shard_optimizer.map_or(text("auto"), |on| on.to_string()));
    out.put("shard_gradients", spec.shard_gradients.to_string());
    out.put("bucket_mib", real(spec.bucket_mib));
    let balance = match &spec.balance {
        Balance::Equal => text("equal"),
        Balance::Auto => text("auto"),
        Balance::Given(weights) => list(&weights.iter().map(|w| real(*w)).collect::<Vec<_>>()),
    };
    out.put("balance", balance);
    out.put("patience", real(spec.patience));
    out.put("stall", real(spec.stall));
}

fn output(out: &mut Section, spec: &OutputSpec) {
    out.maybe("path", spec.path.as_deref().map(path));
    out.maybe("every_steps", spec.every_steps.map(|n| n.to_string()));
    out.put("every_epochs", spec.every_epochs.unwrap_or(0).to_string());
    out.maybe("every_minutes", spec.every_minutes.map(real));
    out.put("keep", spec.keep.to_string());
    out.put("best", text(spec.best.as_deref().unwrap_or("none")));
    out.put("tensorboard", spec.tensorboard.to_string());
}
