//! Each layer's parameters, output and errors, against what PyTorch's layer of the same name has.

use polyreme_graph::op::{Cell, Conv};
use polyreme_graph::{Builder, DType, Graph, Init, Tensor, Traced, differentiate, fuse};

use super::*;

/// Traces a layer on zeros of this shape; the loss is the mean of its squares.
fn traced(dims: &[usize], dtype: DType, f: impl FnOnce(&mut Builder, Tensor) -> Traced) -> Traced<Graph> {
    let mut b = Builder::new();
    let x = b.input("x", dims, dtype)?;
    let y = f(&mut b, x)?;
    let zero = b.constant(0.0);
    let loss = b.mse(y, zero)?;
    Ok(b.finish(&[("y", y), ("loss", loss)]))
}

/// `name shape init` of each parameter, and `: shape` of the output; its gradient exists.
fn check(dims: &[usize], f: impl FnOnce(&mut Builder, Tensor) -> Traced, want: &str) {
    check_of(dims, DType::F32, f, want);
}

fn check_of(dims: &[usize], dtype: DType, f: impl FnOnce(&mut Builder, Tensor) -> Traced, want: &str) {
    let graph = traced(dims, dtype, f).unwrap();
    let init = |init: Init| match init {
        Init::Const(c) => format!("={c}"),
        Init::Uniform { bound } => format!("±{bound:.4}"),
        Init::Normal { std } => format!("~{std:.4}"),
    };
    let rows = graph.params.iter().chain(&graph.states);
    let rows = rows.map(|p| format!("{} {} {}", p.name, graph.shape(p.value), init(p.init)));
    let y = format!(": {}", graph.shape(graph.output("y").unwrap()));
    let got = rows.chain([y]).collect::<Vec<_>>();
    assert_eq!(got, want.lines().map(str::trim).collect::<Vec<_>>());
    let step = differentiate(&graph, graph.output("loss").unwrap()).unwrap();
    assert!(step.grads.iter().all(Option::is_some), "a parameter has no gradient");
    fuse(&step).verify();
}

fn check_error(dims: &[usize], f: impl FnOnce(&mut Builder, Tensor) -> Traced, want: &str) {
    assert_eq!(traced(dims, DType::F32, f).unwrap_err().to_string(), want);
}

#[test]
fn linear() {
    let want = "l.weight [5, 4] ±0.5000\nl.bias [5] ±0.5000\n: [2, 3, 5]";
    check(&[2, 3, 4], |b, x| Linear::new(4, 5).trace(b, "l", x), want);
    check(
        &[2, 4],
        |b, x| Linear::new(4, 5).without_bias().trace(b, "l", x),
        "l.weight [5, 4] ±0.5000\n: [2, 5]",
    );
    let want = "layer `l`: linear: `inputs` is 0; it must be at least 1";
    check_error(&[2, 0], |b, x| Linear::new(0, 5).trace(b, "l", x), want);
    let want = "layer `l`: matmul: shapes [2, 3] and [5, 4] do not fit: the dims summed over are 3 and 4";
    check_error(&[2, 3], |b, x| Linear::new(4, 5).trace(b, "l", x), want);
}

#[test]
fn convolutions() {
    let grouped = Conv2d { conv: Conv { groups: 2, ..Conv::default() }, ..Conv2d::new(8, 6, 3) };
    let want = "c.weight [6, 4, 3, 3] ±0.1667\nc.bias [6] ±0.1667\n: [2, 5, 6, 6]";
    check(&[2, 7, 8, 8], |b, x| grouped.trace(b, "c", x), want);
    let wide = Conv2d { init: ConvInit::FanOut, ..Conv2d::new(3, 8, 2).stride(2).padding(1).without_bias() };
    check(&[2, 7, 8, 3], |b, x| wide.trace(b, "c", x), "c.weight [8, 3, 2, 2] ~0.2500\n: [2, 4, 5, 8]");
    let conv = Conv { stride: (2, 2), padding: (1, 1), groups: 2, ..Conv::default() };
    let up = ConvTranspose2d { conv, output_padding: (1, 1), ..ConvTranspose2d::new(6, 8, 3) };
    let want = "u.weight [6, 4, 3, 3] ±0.1667\nu.bias [8] ±0.1667\n: [2, 10, 14, 8]";
    check(&[2, 5, 7, 6], |b, x| up.trace(b, "u", x), want);

    let want = "layer `c`: conv2d: `groups` of 2 does not divide `inputs` of 7";
    check_error(&[2, 7, 8, 7], |b, x| Conv2d { inputs: 7, ..grouped }.trace(b, "c", x), want);
    let want = "layer `c`: conv2d: `stride` is 0; it must be at least 1";
    check_error(&[2, 7, 8, 3], |b, x| Conv2d::new(3, 3, 3).stride(0).trace(b, "c", x), want);
    let want = "layer `u`: conv_transpose2d: `kernel` is 0; it must be at least 1";
    check_error(&[2, 7, 8, 3], |b, x| ConvTranspose2d::new(3, 3, 0).trace(b, "u", x), want);
}

#[test]
fn norms() {
    let want = "n.weight [6] =1\nn.bias [6] =0\nn.running_mean [6] =0\nn.running_var [6] =1\n: [2, 3, 3, 6]";
    for training in [true, false] {
        check(&[2, 3, 3, 6], |b, x| BatchNorm2d::new(6).trace(b, "n", x, training), want);
    }
    let want = "n.weight [6] =1\nn.bias [6] =0\n: [2, 3, 6]";
    check(&[2, 3, 6], |b, x| LayerNorm::new(6).trace(b, "n", x), want);
    check(&[2, 3, 6], |b, x| GroupNorm::new(2, 6).trace(b, "n", x), want);
    check(&[2, 3, 6], |b, x| RmsNorm::new(6).trace(b, "n", x), "n.weight [6] =1\n: [2, 3, 6]");

    let want = "layer `n`: group_norm: `groups` of 4 does not divide `channels` of 6";
    check_error(&[2, 6], |b, x| GroupNorm::new(4, 6).trace(b, "n", x), want);
    let want = "layer `n`: batch_norm: shape [1, 1, 1, 6] does not fit: training needs more than one value per channel";
    check_error(&[1, 1, 1, 6], |b, x| BatchNorm2d::new(6).trace(b, "n", x, true), want);
}

#[test]
fn running_statistics_follow_in_training_only() {
    for (training, n_updates) in [(true, 2), (false, 0)] {
        let graph =
            traced(&[2, 3, 3, 6], DType::F32, |b, x| BatchNorm2d::new(6).trace(b, "n", x, training)).unwrap();
        assert_eq!(graph.updates.len(), n_updates);
    }
}

#[test]
fn embeddings() {
    let table = Embedding { rows: 9, width: 4 };
    check_of(&[2, 3], DType::I32, |b, x| table.trace(b, "e", x), "e.weight [9, 4] ~1.0000\n: [2, 3, 4]");
    let positions = Positions { context: 5, width: 4 };
    for t in [1, 3, 5] {
        let want = format!("p.weight [5, 4] ~1.0000\n: [2, {t}, 4]");
        check(&[2, t, 4], |b, x| positions.trace(b, "p", x), &want);
    }
    let want = "layer `p`: positions: shape [2, 6, 4] does not fit: \
                the sequence of 6 is longer than the context of 5";
    check_error(&[2, 6, 4], |b, x| positions.trace(b, "p", x), want);
}

#[test]
fn recurrent() {
    let lstm = Recurrent { layers: 2, bidirectional: true, ..Recurrent::new(Cell::Lstm, 3, 4) };
    let want = "r.weight_ih_l0 [16, 3] ±0.5000
        r.weight_hh_l0 [16, 4] ±0.5000
        r.bias_ih_l0 [16] ±0.5000
        r.bias_hh_l0 [16] ±0.5000
        r.weight_ih_l0_reverse [16, 3] ±0.5000
        r.weight_hh_l0_reverse [16, 4] ±0.5000
        r.bias_ih_l0_reverse [16] ±0.5000
        r.bias_hh_l0_reverse [16] ±0.5000
        r.weight_ih_l1 [16, 8] ±0.5000
        r.weight_hh_l1 [16, 4] ±0.5000
        r.bias_ih_l1 [16] ±0.5000
        r.bias_hh_l1 [16] ±0.5000
        r.weight_ih_l1_reverse [16, 8] ±0.5000
        r.weight_hh_l1_reverse [16, 4] ±0.5000
        r.bias_ih_l1_reverse [16] ±0.5000
        r.bias_hh_l1_reverse [16] ±0.5000
        : [2, 5, 8]";
    check(&[2, 5, 3], |b, x| lstm.trace(b, "r", x, None, true), want);
    let gru = Recurrent::new(Cell::Gru, 3, 4);
    let want = "r.weight_ih_l0 [12, 3] ±0.5000
        r.weight_hh_l0 [12, 4] ±0.5000
        r.bias_ih_l0 [12] ±0.5000
        r.bias_hh_l0 [12] ±0.5000
        : [2, 5, 4]";
    check(&[2, 5, 3], |b, x| gru.trace(b, "r", x, None, true), want);
    let want = "layer `r`: recurrent: `layers` is 0; it must be at least 1";
    check_error(&[2, 5, 3], |b, x| Recurrent { layers: 0, ..gru }.trace(b, "r", x, None, true), want);
}

#[test]
fn attention() {
    let layer = MultiheadAttention { width: 8, heads: 2, causal: true };
    let want = "a.in_proj_weight [24, 8] ±0.4330
        a.in_proj_bias [24] =0
        a.out_proj.weight [8, 8] ±0.3536
        a.out_proj.bias [8] =0
        : [2, 5, 8]";
    check(&[2, 5, 8], |b, x| layer.trace(b, "a", x, None), want);
    let want = "layer `a`: attention: `heads` of 3 does not divide `width` of 8";
    check_error(&[2, 5, 8], |b, x| MultiheadAttention { heads: 3, ..layer }.trace(b, "a", x, None), want);
}

#[test]
fn encoder_layers() {
    let last = TransformerEncoderLayer::new(8, 2, 16);
    let first = TransformerEncoderLayer { norm_first: true, ..last.clone() };
    let linears = "e.linear1.weight [16, 8] ±0.3536
        e.linear1.bias [16] ±0.3536
        e.linear2.weight [8, 16] ±0.2500
        e.linear2.bias [8] ±0.2500";
    let attention = "e.self_attn.in_proj_weight [24, 8] ±0.4330
        e.self_attn.in_proj_bias [24] =0
        e.self_attn.out_proj.weight [8, 8] ±0.3536
        e.self_attn.out_proj.bias [8] =0";
    let norm = |k| format!("e.norm{k}.weight [8] =1\ne.norm{k}.bias [8] =0");
    let (norm1, norm2) = (norm(1), norm(2));
    let want = format!("{attention}\n{norm1}\n{linears}\n{norm2}\n: [2, 5, 8]");
    check(&[2, 5, 8], |b, x| last.trace(b, "e", x, None, true), &want);
    let want = format!("{norm1}\n{attention}\n{norm2}\n{linears}\n: [2, 5, 8]");
    check(&[2, 5, 8], |b, x| first.trace(b, "e", x, None, false), &want);
    let want = "layer `e.self_attn`: attention: `heads` of 3 does not divide `width` of 8";
    check_error(&[2, 5, 8], |b, x| TransformerEncoderLayer::new(8, 3, 4).trace(b, "e", x, None, true), want);
}

#[test]
fn dropout_is_for_training() {
    let drops = |training| {
        let layer = TransformerEncoderLayer::new(8, 2, 16);
        let graph = traced(&[2, 5, 8], DType::F32, |b, x| layer.trace(b, "e", x, None, training)).unwrap();
        graph.nodes.iter().filter(|n| n.op.name() == "dropout").count()
    };
    assert_eq!((drops(true), drops(false)), (3, 0));
    let want = "layer `d`: dropout: the share 1 is not in 0..1";
    check_error(&[2], |b, x| Dropout { p: 1.0 }.trace(b, "d", x, true), want);
}

#[test]
fn pools_and_orders() {
    let weigh = |b: &mut Builder, x: Tensor| Conv2d::new(3, 3, 1).without_bias().trace(b, "c", x);
    let check = |dims: &[usize], f: &dyn Fn(&mut Builder, Tensor) -> Traced, want: &str| {
        check(
            dims,
            |b, x| weigh(b, x).and_then(|x| f(b, x)),
            &format!("c.weight [3, 3, 1, 1] ±0.5774\n: {want}"),
        );
    };
    check(&[2, 7, 8, 3], &|b, x| MaxPool2d::new(3, 2).trace(b, "p", x), "[2, 3, 3, 3]");
    check(&[2, 7, 8, 3], &|b, x| AvgPool2d::new(2, 2).trace(b, "p", x), "[2, 3, 4, 3]");
    check(&[2, 7, 8, 3], &|b, x| AdaptiveAvgPool2d { out: (2, 9) }.trace(b, "p", x), "[2, 2, 9, 3]");
    check(&[2, 7, 8, 3], &global_mean, "[2, 3]");
    check(&[2, 7, 8, 3], &flatten, "[2, 168]");
    check(&[2, 1, 1, 3], &flatten, "[2, 3]");
}

#[test]
fn an_order_that_is_right_already_is_not_changed() {
    let permutes = |dims: &[usize]| {
        let graph = traced(dims, DType::F32, |b, x| {
            let x = channels_last(b, x)?;
            flatten(b, x)
        });
        graph.unwrap().nodes.iter().filter(|n| n.op.name() == "permute").count()
    };
    assert_eq!(permutes(&[2, 3, 4, 5]), 2);
    assert_eq!(permutes(&[2, 1, 4, 5]), 0);
    assert_eq!(permutes(&[2, 3, 1, 1]), 0);
    let want = "layer `model`: channels_last: shape [2, 3] does not fit: 4 dims are needed: [n, c, h, w]";
    check_error(&[2, 3], channels_last, want);
}
