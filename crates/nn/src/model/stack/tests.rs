//! Lists of layers: names, shapes, labels and errors. The references compare their results with PyTorch.

use polyreme_graph::{Graph, differentiate, fuse};

use super::*;
use crate::model::Model;

const IMAGE: StackInput = StackInput::Image { channels: 3, height: 8, width: 6 };
const ROW: StackInput = StackInput::Row { width: 5 };
const IDS: StackInput = StackInput::Ids { vocab: 9, context: 4 };

fn activation(name: &str) -> StackLayer {
    StackLayer::Activation { name: name.into() }
}

fn linear(outputs: usize) -> StackLayer {
    StackLayer::Linear { outputs: Some(outputs), bias: true }
}

fn conv(outputs: usize, kernel: usize) -> StackLayer {
    StackLayer::Conv { outputs, kernel: (kernel, kernel), conv: Conv::default(), bias: true }
}

fn max_pool(kernel: usize) -> StackLayer {
    StackLayer::MaxPool { kernel: (kernel, kernel), stride: (kernel, kernel), padding: (0, 0) }
}

fn encoder_layer() -> StackLayer {
    StackLayer::EncoderLayer {
        heads: 2,
        hidden: None,
        activation: "gelu".into(),
        dropout: 0.1,
        norm_first: true,
        causal: true,
    }
}

fn traced(input: StackInput, layers: Vec<StackLayer>, training: bool) -> Traced<Graph> {
    let options = TraceOptions { training, ..TraceOptions::training(2) };
    Model::Layers(Stack { input, layers }).trace(&options)
}

#[test]
fn names_are_those_of_sequential() {
    let check = |input, layers: &[StackLayer], want: &str| {
        let graph = traced(input, layers.to_vec(), true).unwrap();
        let rows = graph.params.iter().chain(&graph.states);
        let rows = rows.map(|p| format!("{} {}", p.name, graph.shape(p.value)));
        let logits = format!(": {}", graph.shape(graph.output("logits").unwrap()));
        let got = rows.chain([logits]).collect::<Vec<_>>();
        assert_eq!(got, want.lines().map(str::trim).collect::<Vec<_>>());
        let step = differentiate(&graph, graph.output("loss").unwrap()).unwrap();
        assert!(step.grads.iter().all(Option::is_some), "a parameter has no gradient");
        fuse(&step).verify();

        let model = Model::Layers(Stack { input, layers: layers.to_vec() });
        let logits = graph.shape(graph.output("logits").unwrap()).dims().to_vec();
        assert_eq!(logits, [model.n_labels(&TraceOptions::training(2)), model.classes()]);
        let evaluation = traced(input, layers.to_vec(), false).unwrap();
        assert!(evaluation.updates.is_empty() && evaluation.nodes.iter().all(|n| n.op.name() != "dropout"));
    };
    check(
        ROW,
        &[linear(7), activation("relu"), StackLayer::Dropout { p: 0.5 }, StackLayer::BatchNorm, linear(3)],
        "0.weight [7, 5]\n0.bias [7]\n3.weight [7]\n3.bias [7]\n4.weight [3, 7]\n4.bias [3]
         3.running_mean [7]\n3.running_var [7]\n: [2, 3]",
    );
    let residual = StackLayer::Residual { layers: vec![conv(4, 1), activation("tanh")] };
    check(
        IMAGE,
        &[conv(4, 3), max_pool(2), residual, StackLayer::Flatten, linear(3)],
        "0.weight [4, 3, 3, 3]\n0.bias [4]\n2.0.weight [4, 4, 1, 1]\n2.0.bias [4]\n4.weight [3, 24]\n4.bias [3]
         : [2, 3]",
    );
    let pooled = StackLayer::AdaptiveAvgPool { out: (2, 2) };
    check(
        IMAGE,
        &[StackLayer::LayerNorm, pooled, StackLayer::GroupNorm { groups: 3 }, StackLayer::GlobalMean],
        "0.weight [3]\n0.bias [3]\n2.weight [3]\n2.bias [3]\n: [2, 3]",
    );
    let gru = StackLayer::Recurrent { cell: Cell::Gru, hidden: 2, bidirectional: false };
    check(
        IDS,
        &[StackLayer::Embedding { width: 3 }, gru, StackLayer::LastStep, linear(5)],
        "0.weight [9, 3]\n1.weight_ih_l0 [6, 3]\n1.weight_hh_l0 [6, 2]\n1.bias_ih_l0 [6]\n1.bias_hh_l0 [6]
         3.weight [5, 2]\n3.bias [5]\n: [2, 5]",
    );
    // A label for each token.
    check(
        IDS,
        &[StackLayer::Embedding { width: 4 }, StackLayer::Positions, StackLayer::RmsNorm, linear(9)],
        "0.weight [9, 4]\n1.weight [4, 4]\n2.weight [4]\n3.weight [9, 4]\n3.bias [9]\n: [8, 9]",
    );
    check(
        IDS,
        &[StackLayer::Embedding { width: 4 }, encoder_layer(), StackLayer::MeanTime, linear(3)],
        "0.weight [9, 4]
         1.norm1.weight [4]\n1.norm1.bias [4]
         1.self_attn.in_proj_weight [12, 4]\n1.self_attn.in_proj_bias [12]
         1.self_attn.out_proj.weight [4, 4]\n1.self_attn.out_proj.bias [4]
         1.norm2.weight [4]\n1.norm2.bias [4]
         1.linear1.weight [16, 4]\n1.linear1.bias [16]\n1.linear2.weight [4, 16]\n1.linear2.bias [4]
         3.weight [3, 4]\n3.bias [3]\n: [2, 3]",
    );
}

#[test]
fn errors_name_the_layer() {
    let check = |input, layers: Vec<StackLayer>, want: &str| {
        assert_eq!(traced(input, layers, true).unwrap_err().to_string(), want);
    };
    check(
        IMAGE,
        vec![conv(4, 3), max_pool(2), conv(4, 5)],
        "layer `layers[2] (conv)`: conv2d: shape [2, 3, 2, 4] does not fit: the kernel spans 5 rows, more than the \
         padded input's 3 (3 + 2x0); use a smaller kernel or more padding",
    );
    check(
        IMAGE,
        vec![conv(4, 3), linear(3)],
        "layer `layers[1] (linear)`: linear: shape [2, 6, 4, 4] does not fit: it takes rows or sequences, not images; \
         put `flatten` or `global_mean` before it",
    );
    check(
        IDS,
        vec![linear(3)],
        "layer `layers[0] (linear)`: linear: shape [2, 4] does not fit: it takes rows or sequences, not token ids; \
         put `embedding` before it",
    );
    check(
        ROW,
        vec![conv(4, 3)],
        "layer `layers[0] (conv)`: conv: shape [2, 5] does not fit: it takes images, not rows",
    );
    check(
        IMAGE,
        vec![conv(4, 3)],
        "layer `model`: layers: shape [2, 6, 4, 4] does not fit: rows or sequences are needed at the end; \
         add `flatten` or `global_mean`, and a `linear` after it",
    );
    check(
        ROW,
        vec![StackLayer::Residual { layers: vec![linear(5), linear(4)] }],
        "layer `layers[0] (residual)`: residual: shapes [2, 5] and [2, 4] do not fit: its layers must keep the shape",
    );
    check(
        ROW,
        vec![
            linear(4),
            StackLayer::Residual { layers: vec![linear(4), StackLayer::GroupNorm { groups: 3 }] },
        ],
        "layer `layers[1].layers[1] (group_norm)`: group_norm: `groups` of 3 does not divide `channels` of 4",
    );
    check(
        ROW,
        vec![StackLayer::Linear { outputs: None, bias: true }, linear(3)],
        "layer `layers[0] (linear)`: linear: `outputs` is open; only the last layer may leave it out, \
         for the number of classes",
    );
    check(
        ROW,
        vec![activation("swish")],
        "layer `layers[0] (activation)`: unknown activation `swish`; known are none, relu, leaky_relu, elu, gelu, \
         gelu_tanh, silu, sigmoid, tanh, softplus, exp, abs",
    );
    check(
        ROW,
        vec![linear(1 << 50)],
        "layer `layers[0] (linear)`: linear: 2x1125899906842624 elements are more than the 1099511627776 that are \
         possible",
    );
    check(
        IMAGE,
        vec![max_pool(0)],
        "layer `layers[0] (max_pool)`: max_pool: `kernel` is 0; it must be at least 1",
    );
    check(ROW, vec![], "layer `model`: layers: the list is empty; give at least one");
    check(
        StackInput::Open,
        vec![linear(3)],
        "layer `model`: input: its size is open; set `input`, or take it from data with `fit`",
    );
}

#[test]
fn sizes_beyond_all_bounds_are_errors() {
    let huge = usize::MAX;
    let wide = Conv { stride: (huge, huge), padding: (huge, huge), dilation: (huge, huge), groups: 1 };
    let rows: Vec<(StackInput, Vec<StackLayer>)> = vec![
        (IMAGE, vec![conv(huge, 3)]),
        (IMAGE, vec![conv(4, huge)]),
        (IMAGE, vec![StackLayer::Conv { outputs: 1, kernel: (1, 1), conv: wide, bias: false }]),
        (
            IMAGE,
            vec![StackLayer::ConvTranspose {
                outputs: 1,
                kernel: (1, 1),
                conv: wide,
                output_padding: (huge, huge),
                bias: false,
            }],
        ),
        (IMAGE, vec![StackLayer::AvgPool { kernel: (2, 2), stride: (1, 1), padding: (huge, huge) }]),
        (IMAGE, vec![max_pool(huge)]),
        (IMAGE, vec![StackLayer::AdaptiveAvgPool { out: (huge, huge) }]),
        (ROW, vec![linear(huge)]),
        (StackInput::Row { width: huge }, vec![linear(3)]),
        (IDS, vec![StackLayer::Embedding { width: huge }]),
        (StackInput::Ids { vocab: huge, context: huge }, vec![StackLayer::Embedding { width: 3 }]),
        (
            IDS,
            vec![
                StackLayer::Embedding { width: 3 },
                StackLayer::Recurrent { cell: Cell::Lstm, hidden: huge, bidirectional: true },
            ],
        ),
    ];
    for (input, layers) in rows {
        let what = format!("{layers:?}");
        assert!(traced(input, layers, true).is_err(), "{what}");
    }
}
