//! Splits as printed graphs: what each rank computes, and what is exchanged.

use polyreme_graph::op::{Cell, CrossEntropy};
use polyreme_graph::{Builder, DType, Graph, Init, Tensor, Traced, differentiate};

use super::{TensorPlace, ValueLayout, split, split_as};

const NORMAL: Init = Init::Normal { std: 0.1 };

fn linear(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let width = b.shape(x).last();
        let weight = b.param("weight", [out, width], NORMAL)?;
        let bias = b.param("bias", [out], NORMAL)?;
        b.linear(x, weight, Some(bias))
    })
}

fn norm(b: &mut Builder, name: &str, x: Tensor) -> Traced {
    b.layer(name, |b| {
        let width = b.shape(x).last();
        let gamma = b.param("gamma", [width], Init::Const(1.0))?;
        let beta = b.param("beta", [width], Init::Const(0.0))?;
        b.layer_norm(x, gamma, beta, 1e-5)
    })
}

fn loss(b: &mut Builder, logits: Tensor) -> Traced {
    let labels = b.input("labels", [b.shape(logits).dims()[0]], DType::I32)?;
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    b.layer("loss", |b| b.cross_entropy(logits, labels, None, options))
}

fn mlp(b: &mut Builder) -> Traced {
    let x = b.input("x", [4, 6], DType::F32)?;
    let h = linear(b, "up", x, 8)?;
    let h = b.activation("relu", h)?;
    let y = linear(b, "down", h, 6)?;
    let y = b.add(x, y)?;
    let y = b.unary(polyreme_graph::op::Unary::Square, y)?;
    b.mean_all(y)
}

fn gpt(b: &mut Builder) -> Traced {
    let ids = b.input("ids", [2, 3], DType::I32)?;
    let table = b.param("table", [10, 8], NORMAL)?;
    let x = b.embedding(ids, table)?;
    let x = b.dropout(x, 0.5)?;
    let a = norm(b, "ln1", x)?;
    let a = linear(b, "qkv", a, 24)?;
    let a = b.reshape(a, [2, 3, 3, 2, 4])?;
    let a = b.attention_packed(a, true, None)?;
    let a = b.reshape(a, [2, 3, 8])?;
    let a = linear(b, "proj", a, 8)?;
    let x = b.add(x, a)?;
    let f = norm(b, "ln2", x)?;
    let f = linear(b, "up", f, 16)?;
    let f = b.activation("gelu", f)?;
    let f = linear(b, "down", f, 8)?;
    let f = b.dropout(f, 0.5)?;
    let x = b.add(x, f)?;
    let head = b.param("head", [10, 8], NORMAL)?;
    let logits = b.linear(x, head, None)?;
    let logits = b.reshape(logits, [6, 10])?;
    loss(b, logits)
}

fn step(model: impl Fn(&mut Builder) -> Traced) -> Graph {
    let mut b = Builder::new();
    let loss = model(&mut b).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

fn check(model: impl Fn(&mut Builder) -> Traced, want: &str) {
    let got = split(&step(model), TensorPlace { rank: 1, ranks: 2 }).unwrap().graph.to_string();
    assert_eq!(got, want, "\n--- got ---\n{got}");
}

#[test]
fn two_linear_layers_are_split_by_columns_and_by_rows() {
    check(mlp, include_str!("../../snapshots/tensor_mlp.txt"));
}

#[test]
fn a_block_is_split_by_heads_columns_and_rows() {
    check(gpt, include_str!("../../snapshots/tensor_gpt.txt"));
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let said = split(&step(gpt), TensorPlace { rank: 0, ranks: 4 }).unwrap_err();
    let want = "layer `model` has 2 attention heads, which tensor = 4 does not divide; use a number of tensor ranks that \
                divides 2, or another number of heads";
    assert_eq!(said, want);
}

#[test]
fn what_does_not_divide_is_listed() {
    let place = TensorPlace { rank: 0, ranks: 2 };
    let odd = step(|b| {
        let x = b.input("x", [3, 5, 7], DType::F32)?;
        let x = linear(b, "odd", x, 12)?;
        let w = b.param("w_hh", [12, 3], NORMAL)?;
        let bias = b.param("b_hh", [12], NORMAL)?;
        let y = b.layer("lstm", |b| b.recurrent(Cell::Lstm, x, w, bias, &[], false))?;
        b.mean_all(y)
    });
    assert_eq!(split(&odd, place).unwrap().replicated, [("lstm", "lstm".to_string())]);
    assert_eq!(split(&step(mlp), place).unwrap().replicated, []);
}

#[test]
fn a_forward_pass_has_whole_logits() {
    let mut b = Builder::new();
    let x = b.input("x", [4, 6], DType::F32).unwrap();
    let h = linear(&mut b, "up", x, 8).unwrap();
    let logits = linear(&mut b, "down", h, 10).unwrap();
    let value = loss(&mut b, logits).unwrap();
    let graph = b.finish(&[("logits", logits), ("loss", value)]);
    let part = split(&graph, TensorPlace { rank: 0, ranks: 2 }).unwrap().graph;
    assert_eq!(part.n_forward, part.nodes.len(), "{part}");
    assert_eq!(part.shape(part.output("logits").unwrap()).dims(), [4, 10]);
    assert!(part.params.iter().all(|p| p.part.is_some()), "{part}");
}

#[test]
fn layouts_that_were_chosen_for_a_graph_change_nothing_in_it() {
    for graph in [step(mlp), step(gpt)] {
        for rank in 0..2 {
            let place = TensorPlace { rank, ranks: 2 };
            let chosen = split(&graph, place).unwrap();
            let again = split_as(&graph, place, &chosen.layouts, &[]).unwrap();
            assert_eq!(again.graph.to_string(), chosen.graph.to_string());
            assert_eq!(again.layouts, chosen.layouts);
        }
    }
}

#[test]
fn a_graph_takes_the_layouts_of_another_one() {
    let graph = step(mlp);
    let place = TensorPlace { rank: 0, ranks: 2 };
    let mut layouts = split(&graph, place).unwrap().layouts;
    assert_eq!(layouts["up.weight"], ValueLayout::split(0));
    layouts.insert("up.weight".into(), ValueLayout::split(1));
    layouts.insert("down.bias".into(), ValueLayout::Whole);
    layouts.insert("of another graph".into(), ValueLayout::Whole);
    let got = split_as(&graph, place, &layouts, &[]).unwrap();
    layouts.remove("of another graph");
    assert_eq!(got.layouts, layouts);
    let up = got.graph.params.iter().find(|p| p.name == "up.weight").unwrap();
    assert_eq!(got.graph.shape(up.value).dims(), [8, 3]);
}
