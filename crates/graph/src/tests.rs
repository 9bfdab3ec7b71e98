//! Whole rewrites on small models, as printed snapshots.

use super::*;
use crate::builder::BatchNorm;
use crate::op::{Cell, Conv, CrossEntropy};

const PLAIN: CrossEntropy = CrossEntropy { label_smoothing: 0.0, ignore_index: None };

fn mlp(b: &mut Builder) -> Traced<(Tensor, Tensor)> {
    let x = b.input("x", [4, 3], DType::F32)?;
    let labels = b.input("labels", [4], DType::I32)?;
    let mut h = x;
    for (name, i, o) in [("fc1", 3, 5), ("fc2", 5, 2)] {
        h = b.layer(name, |b| {
            let w = b.param("weight", [o, i], Init::Uniform { bound: 0.5 })?;
            let bias = b.param("bias", [o], Init::Const(0.0))?;
            let y = b.linear(h, w, Some(bias))?;
            if name == "fc1" { b.activation("relu", y) } else { Ok(y) }
        })?;
    }
    Ok((h, b.cross_entropy(h, labels, None, PLAIN)?))
}

/// Compares the fused step of a model with a snapshot.
fn check(model: fn(&mut Builder) -> Traced<(Tensor, Tensor)>, want: &str) {
    let mut b = Builder::new();
    let (y, loss) = model(&mut b).unwrap();
    let forward = b.finish(&[("y", y), ("loss", loss)]);
    let got = fuse(&differentiate(&forward, loss).unwrap()).to_string();
    assert_eq!(got, want, "\n--- got ---\n{got}");
}

#[test]
fn a_step_of_mlp_fuses_into_products() {
    check(mlp, include_str!("../snapshots/mlp_step.txt"));
}

#[test]
fn a_residual_step_joins_norms_with_relu_and_with_the_sum() {
    check(residual, include_str!("../snapshots/residual_step.txt"));
}

#[test]
fn an_attention_step_keeps_no_copy_of_what_a_reshape_shows() {
    check(attention, include_str!("../snapshots/attention_step.txt"));
}

#[test]
fn a_recurrent_step_has_one_product_for_all_times() {
    check(recurrent, include_str!("../snapshots/recurrent_step.txt"));
}

#[test]
fn every_node_knows_which_traced_node_it_comes_from() {
    for model in [mlp, residual, attention, recurrent] {
        let mut b = Builder::new();
        let (y, loss) = model(&mut b).unwrap();
        let traced = b.finish(&[("y", y), ("loss", loss)]);
        let step = differentiate(&traced, loss).unwrap();
        let half = Precision::half(DType::Bf16).apply(&step);
        for graph in [&traced, &step, &half] {
            for (i, node) in graph.nodes.iter().enumerate() {
                let from = &traced.nodes[node.origin as usize];
                // The loss's own gradient, which is 1, is named for what it is.
                let seed = i == graph.n_forward && matches!(node.op, Op::Const(_));
                assert!(
                    seed || from.layer == node.layer,
                    "node {i} ({}) of {}: {}",
                    node.op.name(),
                    node.layer,
                    from.layer
                );
            }
            // Outputs that are kept in half are widened at the very end.
            let widened = |n: &&graph::Node| graph.outputs.iter().any(|(_, v)| *v == n.outputs[0]);
            let (forward, back) = graph.nodes.split_at(graph.n_forward);
            assert!(forward.iter().is_sorted_by_key(|n| n.origin), "{graph}");
            let back: Vec<_> = back.iter().filter(|n| !widened(n)).collect();
            assert!(back.iter().rev().is_sorted_by_key(|n| n.origin), "{graph}");
        }
    }
}

/// Convolution, norm, ReLU; convolution, norm, sum with the first, ReLU.
fn residual(b: &mut Builder) -> Traced<(Tensor, Tensor)> {
    let x = b.input("x", [2, 6, 6, 3], DType::F32)?;
    let labels = b.input("labels", [2], DType::I32)?;
    let h = conv_norm(b, "stem", x, 4)?;
    let h = b.activation("relu", h)?;
    let y = conv_norm(b, "block", h, 4)?;
    let sum = b.add(y, h)?;
    let h = b.activation("relu", sum)?;
    let pooled = b.mean(h, &[1, 2])?;
    Ok((pooled, b.cross_entropy(pooled, labels, None, PLAIN)?))
}

fn conv_norm(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let c = b.shape(x).last();
        let w = b.param("weight", [out, c, 3, 3], Init::Normal { std: 0.1 })?;
        let y = b.conv2d(x, w, None, Conv { padding: (1, 1), ..Conv::default() })?;
        let at = BatchNorm {
            gamma: b.param("gamma", [out], Init::Const(1.0))?,
            beta: b.param("beta", [out], Init::Const(0.0))?,
            running_mean: b.state("mean", [out], Init::Const(0.0))?,
            running_var: b.state("var", [out], Init::Const(1.0))?,
            eps: 1e-5,
            momentum: 0.1,
        };
        b.batch_norm(y, at, true)
    })
}

/// Norm, attention and the residual sum.
fn attention(b: &mut Builder) -> Traced<(Tensor, Tensor)> {
    let (n, t, heads, d) = (2, 3, 2, 4);
    let ids = b.input("ids", [n, t], DType::I32)?;
    let labels = b.input("labels", [n * t], DType::I32)?;
    let table = b.param("table", [7, d], Init::Normal { std: 0.02 })?;
    let x = b.embedding(ids, table)?;
    let gamma = b.param("gamma", [d], Init::Const(1.0))?;
    let beta = b.param("beta", [d], Init::Const(0.0))?;
    let y = b.layer_norm(x, gamma, beta, 1e-5)?;
    let qkv = b.param("qkv", [3 * d, d], Init::Normal { std: 0.02 })?;
    let bias = b.param("bias", [3 * d], Init::Const(0.0))?;
    let y = b.linear(y, qkv, Some(bias))?;
    let y = b.reshape(y, [n, t, 3, heads, d / heads])?;
    let y = b.attention_packed(y, true, None)?;
    let y = b.reshape(y, [n, t, d])?;
    let out = b.param("out", [d, d], Init::Normal { std: 0.02 })?;
    let y = b.linear(y, out, None)?;
    let y = b.dropout(y, 0.1)?;
    let y = b.add(x, y)?;
    let flat = b.reshape(y, [n * t, d])?;
    Ok((flat, b.cross_entropy(flat, labels, None, PLAIN)?))
}

fn recurrent(b: &mut Builder) -> Traced<(Tensor, Tensor)> {
    let (n, t, width, h) = (2, 3, 4, 5);
    let x = b.input("x", [n, t, width], DType::F32)?;
    let labels = b.input("labels", [n], DType::I32)?;
    let w = b.param("w_ih", [4 * h, width], Init::Uniform { bound: 0.4 })?;
    let bias = b.param("b_ih", [4 * h], Init::Uniform { bound: 0.4 })?;
    let xp = b.linear(x, w, Some(bias))?;
    let w_hh = b.param("w_hh", [4 * h, h], Init::Uniform { bound: 0.4 })?;
    let b_hh = b.param("b_hh", [4 * h], Init::Uniform { bound: 0.4 })?;
    let y = b.recurrent(Cell::Lstm, xp, w_hh, b_hh, &[], false)?;
    let last = b.slice(y, 1, t - 1, 1)?;
    let last = b.reshape(last, [n, h])?;
    Ok((last, b.cross_entropy(last, labels, None, PLAIN)?))
}

#[test]
fn a_fused_pass_may_widen_its_operands() {
    let mut b = Builder::new();
    let x = b.input("x", [1, 3], DType::F32).unwrap();
    let wide = b.expand(x, [2, 3]).unwrap();
    let y = b.scale(wide, 2.0).unwrap();
    let half = b.constant(0.5);
    let halves = b.expand(half, [4]).unwrap();
    let fused = fuse(&b.finish(&[("y", y), ("halves", halves)]));
    let shape = |name: &str| fused.shape(fused.output(name).unwrap()).dims().to_vec();
    assert_eq!((shape("y"), shape("halves")), (vec![2, 3], vec![4]));
    assert!(fused.nodes.iter().all(|n| n.op.name() != "expand"));
}

#[test]
fn a_step_of_mlp_updates_while_it_computes_gradients() {
    let mut b = Builder::new();
    let (_, loss) = mlp(&mut b).unwrap();
    let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
    let got = Program::train_at_once(&step, Optimizer::Adam(Moments::DEFAULT)).to_string();
    assert_eq!(got, include_str!("../snapshots/mlp_at_once.txt"), "\n--- got ---\n{got}");
    // The ratio of LAMB is that of whole tensors.
    let lamb = Optimizer::Lamb(Moments::DEFAULT);
    let program = Program::train_at_once(&step, lamb);
    assert!(program.blocks.iter().all(|block| block.update.is_none()), "{program}");
    let updates = program.instrs.iter().filter(|i| matches!(i, Instr::Update { .. })).count();
    assert_eq!(updates, 1, "{program}");
}
