//! How a list of layers is traced: each layer is given what came out of the one before it.
//!
//! Shapes: image `[n, h, w, c]`, sequence `[b, t, d]`, row `[n, d]`, ids `[b, t]`. Errors carry the layer's index in
//! the list, such as `layers[2] (conv)`.

use polyreme_graph::{Builder, Tensor, TraceError, TraceErrorKind, Traced};

use super::{Stack, StackInput, StackLayer};
use crate::layer::{
    AdaptiveAvgPool2d, AvgPool2d, BatchNorm2d, Conv2d, ConvInit, ConvTranspose2d, Dropout, Embedding,
    GroupNorm, LayerNorm, Linear, MaxPool2d, MultiheadAttention, Padding, Positions, Recurrent, RmsNorm,
    TransformerEncoderLayer, channels_last, flatten, global_mean, last_step, mean_time, positive,
};

/// The most elements of one tensor: beyond any memory, and far below where products of sizes would overflow.
const ELEMENTS_MAX: usize = 1 << 40;

/// The form of the values between layers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Ids,
    Row,
    Sequence,
    Image,
}

impl Form {
    fn of(input: StackInput) -> Form {
        match input {
            StackInput::Open | StackInput::Row { .. } => Form::Row,
            StackInput::Image { .. } => Form::Image,
            StackInput::Ids { .. } | StackInput::Texts { .. } => Form::Ids,
        }
    }

    /// The output of a layer.
    fn after(self, layer: &StackLayer) -> Form {
        match layer {
            StackLayer::GlobalMean | StackLayer::Flatten | StackLayer::LastStep | StackLayer::MeanTime => {
                Form::Row
            }
            StackLayer::Embedding { .. } => Form::Sequence,
            _ => self,
        }
    }
}

/// Whether the layers end with a sequence; they need not fit together.
pub(super) fn ends_in_sequence(stack: &Stack) -> bool {
    stack.layers.iter().fold(Form::of(stack.input), Form::after) == Form::Sequence
}

/// Fails while the input is open.
pub(super) fn closed(stack: &Stack, b: &Builder) -> Traced<()> {
    if stack.input != StackInput::Open {
        return Ok(());
    }
    let why = "its size is open; set `input`, or take it from data with `fit`".into();
    b.error(TraceErrorKind::Option { op: "input", why })
}

pub(super) fn logits(stack: &Stack, b: &mut Builder, x: Tensor, training: bool) -> Traced {
    closed(stack, b)?;
    if stack.layers.is_empty() {
        let why = "the list is empty; give at least one".into();
        return b.error(TraceErrorKind::Option { op: "layers", why });
    }
    room(b, "input", &[b.shape(x).dims()])?;
    positive(b, "input", &b.shape(x).dims().iter().map(|&d| ("size", d)).collect::<Vec<_>>())?;
    let form = Form::of(stack.input);
    let x = if form == Form::Image { channels_last(b, x)? } else { x };
    let padding = match stack.input {
        StackInput::Texts { padding, .. } => Some(Padding::of(b, x, padding)?),
        StackInput::Open | StackInput::Row { .. } | StackInput::Image { .. } | StackInput::Ids { .. } => None,
    };
    let walk = StackTracer { input: stack.input, padding, training };
    let (x, form) = walk.layers(b, &stack.layers, x, form, "")?;
    let shape = b.shape(x).clone();
    match (form, shape.dims()) {
        (Form::Row, _) => Ok(x),
        (Form::Sequence, &[batch, t, d]) => b.reshape(x, [batch * t, d]),
        _ => {
            let why = "rows or sequences are needed at the end; \
                       add `flatten` or `global_mean`, and a `linear` after it"
                .into();
            b.error(TraceErrorKind::Shape { op: "layers", shape, why })
        }
    }
}

/// Settings that all layers share.
struct StackTracer {
    input: StackInput,
    /// Which positions of sequences are padding, if they differ in length.
    padding: Option<Padding>,
    training: bool,
}

impl StackTracer {
    /// Traces layers under their indices; `at` is the path of the list in the model.
    fn layers(
        &self,
        b: &mut Builder,
        layers: &[StackLayer],
        mut x: Tensor,
        mut form: Form,
        at: &str,
    ) -> Traced<(Tensor, Form)> {
        for (k, layer) in layers.iter().enumerate() {
            let place = format!("{at}layers[{k}]");
            x = self.layer(b, layer, &k.to_string(), x, form, &place).map_err(|e| {
                // Errors inside a residual carry their path already.
                let layer = if e.layer.starts_with("layers[") {
                    e.layer
                } else {
                    format!("{place} ({})", layer.kind())
                };
                TraceError { layer, ..e }
            })?;
            form = form.after(layer);
        }
        Ok((x, form))
    }

    /// Traces a layer in the scope `name`, so that each of its ops is known to be its own.
    fn layer(
        &self,
        b: &mut Builder,
        layer: &StackLayer,
        name: &str,
        x: Tensor,
        form: Form,
        place: &str,
    ) -> Traced {
        let op = layer.kind();
        takes(b, layer, x, form)?;
        if self.padding.is_some() && form == Form::Sequence {
            takes_padding(b, layer, x)?;
        }
        let dims = b.dims(x);
        let last = dims.last().copied().unwrap_or(0);
        let rows = b.shape(x).rows();
        match *layer {
            StackLayer::Linear { outputs, bias } => {
                let Some(outputs) = outputs else {
                    let why =
                        "`outputs` is open; only the last layer may leave it out, for the number of classes";
                    return b.error(TraceErrorKind::Option { op, why: why.into() });
                };
                room(b, op, &[&[rows, outputs], &[last, outputs]])?;
                Linear { inputs: last, outputs, bias }.trace(b, name, x)
            }
            StackLayer::Conv { outputs, kernel, conv, bias } => {
                let size = |i: usize, pad: usize| dims[1 + i].saturating_add(pad.saturating_mul(2));
                let padded = [size(0, conv.padding.0), size(1, conv.padding.1)];
                room(b, op, &[&[dims[0], padded[0], padded[1], outputs.max(last)]])?;
                room(b, op, &[&[outputs, last, kernel.0, kernel.1], &[kernel.0, conv.dilation.0]])?;
                room(b, op, &[&[kernel.1, conv.dilation.1]])?;
                Conv2d { inputs: last, outputs, kernel, conv, bias, init: ConvInit::FanIn }.trace(b, name, x)
            }
            StackLayer::ConvTranspose { outputs, kernel, conv, output_padding, bias } => {
                let size = |i: usize, stride: usize, kernel: usize, dilation: usize, extra: usize| {
                    let len = dims[1 + i].saturating_mul(stride);
                    len.saturating_add(kernel.saturating_mul(dilation)).saturating_add(extra)
                };
                let h = size(0, conv.stride.0, kernel.0, conv.dilation.0, output_padding.0);
                let w = size(1, conv.stride.1, kernel.1, conv.dilation.1, output_padding.1);
                room(b, op, &[&[dims[0], h, w, outputs.max(1)], &[outputs, last, kernel.0, kernel.1]])?;
                room(b, op, &[&[conv.padding.0], &[conv.padding.1]])?;
                ConvTranspose2d { inputs: last, outputs, kernel, conv, output_padding, bias }
                    .trace(b, name, x)
            }
            StackLayer::MaxPool { kernel, stride, padding } => {
                window(b, op, kernel, stride, padding)?;
                MaxPool2d { kernel, stride, padding }.trace(b, name, x)
            }
            StackLayer::AvgPool { kernel, stride, padding } => {
                window(b, op, kernel, stride, padding)?;
                AvgPool2d { kernel, stride, padding, count_include_pad: true }.trace(b, name, x)
            }
            StackLayer::AdaptiveAvgPool { out } => {
                room(b, op, &[&[dims[0], out.0, out.1, last]])?;
                AdaptiveAvgPool2d { out }.trace(b, name, x)
            }
            StackLayer::GlobalMean => b.layer(name, |b| global_mean(b, x)),
            StackLayer::BatchNorm => BatchNorm2d::new(last).trace(b, name, x, self.training),
            StackLayer::LayerNorm => LayerNorm::new(last).trace(b, name, x),
            StackLayer::RmsNorm => RmsNorm::new(last).trace(b, name, x),
            StackLayer::GroupNorm { groups } => GroupNorm::new(groups, last).trace(b, name, x),
            StackLayer::Activation { name: ref function } => b.layer(name, |b| b.activation(function, x)),
            StackLayer::Dropout { p } => Dropout { p }.trace(b, name, x, self.training),
            StackLayer::Flatten if form == Form::Image => b.layer(name, |b| flatten(b, x)),
            StackLayer::Flatten => b.layer(name, |b| b.reshape(x, [dims[0], dims[1..].iter().product()])),
            StackLayer::Embedding { width } => {
                let (StackInput::Ids { vocab, .. } | StackInput::Texts { vocab, .. }) = self.input else {
                    unreachable!("only ids have this form")
                };
                room(b, op, &[&[vocab, width], &[rows, last, width]])?;
                Embedding { rows: vocab, width }.trace(b, name, x)
            }
            StackLayer::Positions => {
                let (StackInput::Ids { context, .. } | StackInput::Texts { context, .. }) = self.input else {
                    unreachable!("only ids become sequences")
                };
                room(b, op, &[&[context, last]])?;
                Positions { context, width: last }.trace(b, name, x)
            }
            StackLayer::Recurrent { cell, hidden, bidirectional } => {
                room(
                    b,
                    op,
                    &[&[2, cell.gates(), hidden, last.max(hidden)], &[2, cell.gates(), hidden, rows]],
                )?;
                let recurrent = Recurrent { bidirectional, ..Recurrent::new(cell, last, hidden) };
                recurrent.trace(b, name, x, self.padding, self.training)
            }
            StackLayer::LastStep => b.layer(name, |b| last_step(b, x, self.padding)),
            StackLayer::MeanTime => b.layer(name, |b| mean_time(b, x, self.padding)),
            StackLayer::Attention { heads, causal } => {
                room(b, op, &[&[3, last, last], &[3, rows, last]])?;
                let hidden = self.padding.map(|padding| padding.scores(b)).transpose()?;
                MultiheadAttention { width: last, heads, causal }.trace(b, name, x, hidden)
            }
            StackLayer::EncoderLayer { heads, hidden, ref activation, dropout, norm_first, causal } => {
                let hidden = hidden.unwrap_or(4 * last);
                room(b, op, &[&[3, last, last], &[3, rows, last], &[hidden, last], &[hidden, rows]])?;
                let layer = TransformerEncoderLayer {
                    activation: activation.clone(),
                    dropout,
                    norm_first,
                    causal,
                    ..TransformerEncoderLayer::new(last, heads, hidden)
                };
                let hidden_keys = self.padding.map(|padding| padding.scores(b)).transpose()?;
                layer.trace(b, name, x, hidden_keys, self.training)
            }
            StackLayer::Residual { ref layers } => {
                let at = format!("{place}.");
                let (y, _) = b.layer(name, |b| self.layers(b, layers, x, form, &at))?;
                if b.shape(x) != b.shape(y) {
                    let (left, right) = (b.shape(x).clone(), b.shape(y).clone());
                    let why = "its layers must keep the shape".into();
                    return b.error(TraceErrorKind::Shapes { op, left, right, why });
                }
                b.layer(name, |b| b.add(x, y))
            }
        }
    }
}

/// Checks that a layer takes its input; the error says what to put before it.
fn takes(b: &Builder, layer: &StackLayer, x: Tensor, form: Form) -> Traced<()> {
    use Form::{Ids, Image, Row, Sequence};
    let wanted: &[Form] = match layer {
        StackLayer::Linear { .. } => &[Row, Sequence],
        StackLayer::Conv { .. }
        | StackLayer::ConvTranspose { .. }
        | StackLayer::MaxPool { .. }
        | StackLayer::AvgPool { .. }
        | StackLayer::AdaptiveAvgPool { .. }
        | StackLayer::GlobalMean => &[Image],
        StackLayer::BatchNorm
        | StackLayer::LayerNorm
        | StackLayer::RmsNorm
        | StackLayer::GroupNorm { .. }
        | StackLayer::Activation { .. }
        | StackLayer::Dropout { .. }
        | StackLayer::Flatten
        | StackLayer::Residual { .. } => &[Row, Sequence, Image],
        StackLayer::Embedding { .. } => &[Ids],
        StackLayer::Positions
        | StackLayer::Recurrent { .. }
        | StackLayer::LastStep
        | StackLayer::MeanTime
        | StackLayer::Attention { .. }
        | StackLayer::EncoderLayer { .. } => &[Sequence],
    };
    if wanted.contains(&form) {
        return Ok(());
    }
    let plural = |form: &Form| match form {
        Ids => "token ids",
        Row => "rows",
        Sequence => "sequences",
        Image => "images",
    };
    let wanted_names = wanted.iter().map(plural).collect::<Vec<_>>().join(" or ");
    let advice = match form {
        Ids => "; put `embedding` before it",
        Image if wanted.contains(&Row) => "; put `flatten` or `global_mean` before it",
        _ => "",
    };
    let why = format!("it takes {wanted_names}, not {}{advice}", plural(&form));
    b.error(TraceErrorKind::Shape { op: layer.kind(), shape: b.shape(x).clone(), why })
}

/// Fails for a layer that would mix padding into what it makes of a sequence.
fn takes_padding(b: &Builder, layer: &StackLayer, x: Tensor) -> Traced<()> {
    let instead = match layer {
        StackLayer::Flatten => "`mean_time` or `last_step`",
        StackLayer::BatchNorm | StackLayer::GroupNorm { .. } => "`layer_norm` or `rms_norm`",
        StackLayer::Linear { .. }
        | StackLayer::Conv { .. }
        | StackLayer::ConvTranspose { .. }
        | StackLayer::MaxPool { .. }
        | StackLayer::AvgPool { .. }
        | StackLayer::AdaptiveAvgPool { .. }
        | StackLayer::GlobalMean
        | StackLayer::LayerNorm
        | StackLayer::RmsNorm
        | StackLayer::Activation { .. }
        | StackLayer::Dropout { .. }
        | StackLayer::Embedding { .. }
        | StackLayer::Positions
        | StackLayer::Recurrent { .. }
        | StackLayer::LastStep
        | StackLayer::MeanTime
        | StackLayer::Attention { .. }
        | StackLayer::EncoderLayer { .. }
        | StackLayer::Residual { .. } => return Ok(()),
    };
    let why = format!("texts differ in length, and it would mix their padding in; use {instead} instead");
    b.error(TraceErrorKind::Shape { op: layer.kind(), shape: b.shape(x).clone(), why })
}

/// Each list of sizes stays below [`ELEMENTS_MAX`] when multiplied.
fn room(b: &Builder, op: &'static str, products: &[&[usize]]) -> Traced<()> {
    for sizes in products {
        let product = sizes.iter().fold(1_usize, |p, &s| p.saturating_mul(s));
        if product > ELEMENTS_MAX {
            let sizes = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
            let why = format!("{sizes} elements are more than the {ELEMENTS_MAX} that are possible");
            return b.error(TraceErrorKind::Option { op, why });
        }
    }
    Ok(())
}

fn window(
    b: &Builder,
    op: &'static str,
    kernel: (usize, usize),
    stride: (usize, usize),
    padding: (usize, usize),
) -> Traced<()> {
    positive(b, op, &[("kernel", kernel.0.min(kernel.1)), ("stride", stride.0.min(stride.1))])?;
    room(b, op, &[&[kernel.0, kernel.1], &[padding.0], &[padding.1]])
}
