//! Padding is nothing: a batch of sequences of different lengths gives the same losses and gradients however far it is filled
//! up, and those of its slow twin, in which every sequence goes through the model alone, at its own length and without any
//! padding.

// All of this is tests; clippy recognises only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

use polyreme_exec::{Engine, Options};
use polyreme_graph::op::Cell;
use polyreme_graph::{DType, Precision, differentiate};
use polyreme_nn::layer::TextIds;
use polyreme_nn::model::{
    Bert, EncoderClassifier, Mlp, Pooling, RecurrentClassifier, Stack, StackInput, StackLayer, Tabular,
};
use polyreme_nn::{Model, TraceOptions};

const VOCAB: usize = 13;
/// The id that fills up: one past those of tokens, or one among them.
const PADS: [usize; 2] = [12, 0];
const CONTEXT: usize = 16;
const LENGTHS: [usize; 5] = [5, 1, 9, 2, 7];
const CLASSES: usize = 3;

/// What a step comes to: its loss, and the gradient of each parameter.
struct PaddedResult {
    loss: f64,
    grads: Vec<(String, Vec<f32>)>,
}

/// Sequences without padding, and their labels.
fn samples(pad: usize) -> (Vec<Vec<i32>>, Vec<i32>) {
    let token = |s: usize, i: usize| {
        let id = (7 * s + 5 * i + s * i) % (VOCAB - 1);
        // All ids but that of the padding.
        (if id >= pad { id + 1 } else { id }) as i32
    };
    let rows = LENGTHS.iter().enumerate().map(|(s, &n)| (0..n).map(|i| token(s, i)).collect());
    (rows.collect(), (0..LENGTHS.len()).map(|s| (s % CLASSES) as i32).collect())
}

fn run(
    model: &Model,
    rows: &[Vec<i32>],
    labels: &[i32],
    filled: (usize, usize),
    precision: &Precision,
) -> PaddedResult {
    let (time, pad) = filled;
    let options = TraceOptions { time: Some(time), ..TraceOptions::training(rows.len()) };
    let forward = model.trace(&options).unwrap();
    let step = differentiate(&forward, forward.output("loss").unwrap()).unwrap();
    let mut engine = Engine::new(precision.gradients(&step), Options::threads(1)).unwrap();
    let ids = engine.input_i32("ids").unwrap();
    ids.fill(pad as i32);
    ids.chunks_exact_mut(time).zip(rows).for_each(|(to, row)| to[..row.len()].copy_from_slice(row));
    engine.input_i32("labels").unwrap().copy_from_slice(labels);
    engine.run().unwrap();
    let loss = f64::from(engine.output("loss").unwrap()[0]);
    let grad = |name: &String| (name.clone(), engine.grad(name).unwrap().unwrap().to_vec());
    PaddedResult { loss, grads: step.params.iter().map(|p| grad(&p.name)).collect() }
}

/// Each sequence alone.
fn twin(model: &Model, rows: &[Vec<i32>], labels: &[i32], precision: &Precision) -> PaddedResult {
    let alone = rows
        .iter()
        .zip(labels)
        .map(|(row, label)| run(model, std::slice::from_ref(row), &[*label], (row.len(), 0), precision));
    let mut sum: Option<PaddedResult> = None;
    for one in alone {
        let Some(all) = &mut sum else {
            sum = Some(one);
            continue;
        };
        all.loss += one.loss;
        for ((_, to), (_, from)) in all.grads.iter_mut().zip(&one.grads) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
    let mut sum = sum.unwrap();
    let n = rows.len() as f64;
    sum.loss /= n;
    sum.grads.iter_mut().for_each(|(_, grad)| grad.iter_mut().for_each(|g| *g /= n as f32));
    sum
}

fn near(what: &str, got: &PaddedResult, want: &PaddedResult, tolerance: f64) {
    let off = (got.loss - want.loss).abs();
    assert!(off <= tolerance, "{what}: loss {} and not {}", got.loss, want.loss);
    for ((name, got), (other, want)) in got.grads.iter().zip(&want.grads) {
        assert_eq!((name, got.len()), (other, want.len()), "{what}");
        let peak = want.iter().fold(1.0, |peak: f64, x| peak.max(f64::from(x.abs())));
        let off = got.iter().zip(want).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        assert!(off <= tolerance * peak, "{what}: the gradient of {name} is off by {off:e} of {peak}");
    }
}

/// The model with padding and the same one without.
fn models(pad: usize) -> Vec<(String, Model, Model)> {
    let mut all = Vec::new();
    let (vocab, context, classes) = (VOCAB, CONTEXT, CLASSES);
    let encoder = EncoderClassifier {
        vocab,
        context,
        classes,
        width: 16,
        heads: 2,
        hidden: 24,
        ..EncoderClassifier::default()
    };
    let padded = EncoderClassifier { padding: Some(pad), ..encoder };
    all.push(("encoder".into(), Model::Encoder(padded), Model::Encoder(encoder)));
    for pooling in [Pooling::First, Pooling::Mean] {
        let (width, heads, hidden, layers) = (16, 2, 24, 2);
        let bert = Bert { vocab, context, classes, width, heads, hidden, layers, pooling, ..Bert::default() };
        let padded = Bert { padding: Some(pad), ..bert.clone() };
        all.push((format!("bert, {pooling:?}"), Model::Bert(padded), Model::Bert(bert)));
    }
    for cell in [Cell::Lstm, Cell::Gru] {
        for bidirectional in [false, true] {
            let plain = RecurrentClassifier {
                cell,
                bidirectional,
                vocab,
                context,
                classes,
                width: 8,
                hidden: 12,
                ..RecurrentClassifier::default()
            };
            let padded = RecurrentClassifier { padding: Some(pad), ..plain };
            let name = format!("{cell:?}, both ways {bidirectional}");
            all.push((name, Model::Recurrent(padded), Model::Recurrent(plain)));
        }
    }
    let linear = |outputs| StackLayer::Linear { outputs: Some(outputs), bias: true };
    let attention = |causal| StackLayer::Attention { heads: 2, causal };
    let recurrent = StackLayer::Recurrent { cell: Cell::Lstm, hidden: 6, bidirectional: true };
    let lists = [
        ("mean of embeddings", vec![StackLayer::MeanTime]),
        ("attention", vec![StackLayer::Positions, attention(false), StackLayer::LastStep]),
        (
            "causal attention",
            vec![StackLayer::Positions, attention(true), StackLayer::LayerNorm, StackLayer::MeanTime],
        ),
        ("recurrent", vec![recurrent, StackLayer::LastStep]),
    ];
    for (name, middle) in lists {
        let mut layers = vec![StackLayer::Embedding { width: 8 }];
        layers.extend(middle);
        layers.push(linear(CLASSES));
        let plain = Stack { input: StackInput::Ids { vocab, context }, layers };
        let padded = Stack { input: StackInput::Texts { vocab, context, padding: pad }, ..plain.clone() };
        all.push((name.into(), Model::Layers(padded), Model::Layers(plain)));
    }
    all
}

#[test]
fn padding_is_nothing() {
    for pad in PADS {
        let (rows, labels) = samples(pad);
        let longest = *LENGTHS.iter().max().unwrap();
        for (name, padded, plain) in models(pad) {
            let strict = Precision::F32_STRICT;
            let tight = run(&padded, &rows, &labels, (longest, pad), &strict);
            for time in [longest + 1, CONTEXT] {
                let more = run(&padded, &rows, &labels, (time, pad), &strict);
                near(&format!("{name}, padding {pad}, {time} long"), &more, &tight, 1e-6);
            }
            near(
                &format!("{name}, padding {pad}, alone"),
                &tight,
                &twin(&plain, &rows, &labels, &strict),
                1e-6,
            );
            // Nothing is learnt of the padding itself.
            let width = tight.grads[0].1.len() / VOCAB;
            assert!(tight.grads[0].0.ends_with("weight"), "{name}: {}", tight.grads[0].0);
            let of_padding = &tight.grads[0].1[pad * width..][..width];
            assert!(of_padding.iter().all(|g| *g == 0.0), "{name}: {of_padding:?}");
        }
    }
}

/// In half, what is rounded is the same with more padding, and hidden scores and closed gates stay what they are.
#[test]
fn padding_is_nothing_in_half() {
    for (half, tolerance) in [(DType::Bf16, 4e-3), (DType::F16, 1e-3)] {
        let (rows, labels) = samples(PADS[0]);
        for (name, padded, plain) in models(PADS[0]) {
            let precision = Precision::half(half);
            let tight = run(&padded, &rows, &labels, (9, PADS[0]), &precision);
            let more = run(&padded, &rows, &labels, (CONTEXT, PADS[0]), &precision);
            near(&format!("{name} in {half}"), &more, &tight, tolerance);
            near(
                &format!("{name} in {half}, alone"),
                &tight,
                &twin(&plain, &rows, &labels, &precision),
                8.0 * tolerance,
            );
        }
    }
}

#[test]
fn samples_of_padding_alone_are_finite_and_change_no_other() {
    for (name, padded, _) in models(12) {
        let (mut rows, mut labels) = samples(12);
        rows.push(Vec::new());
        labels.push(0);
        let options = TraceOptions { time: Some(9), ..TraceOptions::evaluation(rows.len()) };
        let graph = padded.trace(&options).unwrap();
        let mut engine = Engine::new(Precision::F32.forward(&graph), Options::threads(1)).unwrap();
        let ids = engine.input_i32("ids").unwrap();
        ids.fill(12);
        ids.chunks_exact_mut(9).zip(&rows).for_each(|(to, row)| to[..row.len()].copy_from_slice(row));
        engine.input_i32("labels").unwrap().copy_from_slice(&labels);
        engine.run().unwrap();
        assert!(engine.output("logits").unwrap().iter().all(|x| x.is_finite()), "{name}");
    }
}

#[test]
fn layers_that_would_mix_padding_in_are_refused() {
    for (layer, instead) in [
        (StackLayer::Flatten, "`mean_time` or `last_step`"),
        (StackLayer::BatchNorm, "`layer_norm`"),
        (StackLayer::GroupNorm { groups: 2 }, "`layer_norm`"),
    ] {
        let input = StackInput::Texts { vocab: 9, context: 4, padding: 8 };
        let layers = vec![
            StackLayer::Embedding { width: 8 },
            layer,
            StackLayer::Linear { outputs: Some(2), bias: true },
        ];
        let error =
            Model::Layers(Stack { input, layers }).trace(&TraceOptions::training(2)).unwrap_err().to_string();
        assert!(error.contains("texts differ in length") && error.contains(instead), "{error}");
    }
}

/// Ids of a category and of the words of texts: more than half a float tells apart.
const MANY: usize = 600;

/// A row of a table: two numbers, the id of a category, and the words of a text.
type TableRow = ([f32; 2], usize, Vec<usize>);

fn table_rows() -> (Vec<TableRow>, Vec<i32>) {
    let word = |row: usize, i: usize| 257 + (17 * row + 3 * i + row * i) % (MANY - 257);
    let lengths = [5, 1, 9, 0, 7];
    let row = |(k, &n): (usize, &usize)| {
        ([k as f32 - 2.0, 0.5 * k as f32], 301 + 2 * k, (0..n).map(|i| word(k, i)).collect())
    };
    (lengths.iter().enumerate().map(row).collect(), (0..5).map(|k| k % CLASSES as i32).collect())
}

/// A step of a model of tables whose texts have so many places in a row.
fn run_table(
    tabular: bool,
    rows: &[TableRow],
    labels: &[i32],
    length: usize,
    precision: &Precision,
) -> PaddedResult {
    let (inputs, categories, texts) = (3 + length, vec![MANY], vec![TextIds { ids: MANY, length }]);
    let model = match tabular {
        true => {
            let (embed, width, hidden, dropout) = (4, 16, 24, 0.0);
            let sizes = Tabular { embed, width, hidden, dropout, ..Tabular::default() };
            Model::Tabular(Tabular { inputs, categories, texts, classes: CLASSES, ..sizes })
        }
        false => {
            let sizes = Mlp { hidden: vec![16], ..Mlp::default() };
            Model::Mlp(Mlp { inputs, categories, texts, classes: CLASSES, ..sizes })
        }
    };
    let forward = model.trace(&TraceOptions::training(rows.len())).unwrap();
    let step = differentiate(&forward, forward.output("loss").unwrap()).unwrap();
    let mut engine = Engine::new(precision.gradients(&step), Options::threads(1)).unwrap();
    let x = engine.input_f32("x").unwrap();
    x.fill(0.0);
    for (to, (numbers, category, words)) in x.chunks_exact_mut(inputs).zip(rows) {
        to[..2].copy_from_slice(numbers);
        to[2] = *category as f32;
        to[3..].iter_mut().zip(words).for_each(|(to, word)| *to = *word as f32);
    }
    engine.input_i32("labels").unwrap().copy_from_slice(labels);
    engine.run().unwrap();
    let loss = f64::from(engine.output("loss").unwrap()[0]);
    let grad = |name: &String| (name.clone(), engine.grad(name).unwrap().unwrap().to_vec());
    PaddedResult { loss, grads: step.params.iter().map(|p| grad(&p.name)).collect() }
}

/// A text of a table is the mean of its words' vectors, wherever its row is filled up to; and every id has a vector of its own, in half
/// as well.
#[test]
fn texts_beside_numbers_are_means_of_words() {
    let (rows, labels) = table_rows();
    for (tabular, half) in [(false, None), (true, None), (false, Some(DType::Bf16)), (true, Some(DType::F16))]
    {
        let what = format!("tabular {tabular}, {half:?}");
        let precision = half.map_or(Precision::F32_STRICT, Precision::half);
        let tolerance = if half.is_some() { 4e-3 } else { 1e-6 };
        let tight = run_table(tabular, &rows, &labels, 9, &precision);
        let more = run_table(tabular, &rows, &labels, 14, &precision);
        near(&format!("{what}, 14 long"), &more, &tight, tolerance);
        // Each row alone, filled up to nothing but its own length.
        let alone = rows.iter().zip(&labels).map(|(row, label)| {
            let length = row.2.len().max(1);
            run_table(tabular, std::slice::from_ref(row), &[*label], length, &precision)
        });
        let mut sum = PaddedResult { loss: 0.0, grads: Vec::new() };
        for one in alone {
            sum.loss += one.loss / rows.len() as f64;
            sum.grads.resize(one.grads.len(), Default::default());
            for ((name, to), (of, from)) in sum.grads.iter_mut().zip(one.grads) {
                to.resize(from.len(), 0.0);
                *name = of;
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from / rows.len() as f32);
            }
        }
        near(&format!("{what}, alone"), &tight, &sum, 8.0 * tolerance);
        let learns = |name: &str, used: Vec<usize>| {
            let (_, grad) = tight.grads.iter().find(|(of, _)| of == name).unwrap();
            let width = grad.len() / MANY;
            let row = |id: &usize| grad[id * width..][..width].iter().any(|g| *g != 0.0);
            let mut used = used;
            used.sort_unstable();
            used.dedup();
            assert_eq!((0..MANY).filter(row).collect::<Vec<_>>(), used, "{what}: {name}");
        };
        learns("embed1.weight", rows.iter().map(|row| row.1).collect());
        learns("words1.weight", rows.iter().flat_map(|row| row.2.clone()).collect());
    }
}
