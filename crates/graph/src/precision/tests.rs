//! A small network in half precision: what is rounded, what stays exact, and what a layer that is kept in f32 does.

use super::*;
use crate::builder::BatchNorm;
use crate::op::CrossEntropy;
use crate::{Builder, Init, Tensor, Traced, differentiate};

const PLAIN: CrossEntropy = CrossEntropy { label_smoothing: 0.0, ignore_index: None };

/// Linear, GELU, layer norm, linear and cross-entropy, with all gradients.
fn network() -> Graph {
    step(|b| {
        let x = b.input("x", [4, 3], DType::F32)?;
        let h = linear(b, "fc1", x, 6)?;
        let h = b.layer("act", |b| b.activation("gelu", h))?;
        let h = b.layer("ln", |b| {
            let gamma = b.param("weight", [6], Init::Const(1.0))?;
            let beta = b.param("bias", [6], Init::Const(0.0))?;
            b.layer_norm(h, gamma, beta, 1e-5)
        })?;
        linear(b, "fc2", h, 5)
    })
}

fn linear(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let w = b.param("weight", [out, b.shape(x).last()], Init::Uniform { bound: 0.5 })?;
        let bias = b.param("bias", [out], Init::Const(0.0))?;
        b.linear(x, w, Some(bias))
    })
}

/// The step of a network that gives logits, with a cross-entropy loss.
fn step(logits: fn(&mut Builder) -> Traced) -> Graph {
    let mut b = Builder::new();
    let y = logits(&mut b).unwrap();
    let labels = b.input("labels", [b.dims(y)[0]], DType::I32).unwrap();
    let loss = b.layer("loss", |b| b.cross_entropy(y, labels, None, PLAIN)).unwrap();
    let forward = b.finish(&[("y", y), ("loss", loss)]);
    differentiate(&forward, loss).unwrap()
}

fn bf16(f32_layers: &[&str]) -> Precision {
    let f32_layers = f32_layers.iter().map(|path| path.to_string()).collect();
    Precision { f32_layers, ..Precision::half(DType::Bf16) }
}

/// The layers with anything in half: a value, or a product that rounds what it reads.
fn layers_in_half(graph: &Graph) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    for node in &graph.nodes {
        let rounds = matches!(node.op, Op::MatMul { rounded: Some(_), .. });
        let half = rounds || node.outputs.iter().any(|v| is_half(graph.value(*v).dtype));
        if half && !found.contains(&node.layer.as_str()) {
            found.push(&node.layer);
        }
    }
    found
}

#[test]
fn a_step_in_bf16() {
    let got = bf16(&[]).apply(&network()).to_string();
    assert_eq!(got, include_str!("../../snapshots/precision_step.txt"), "\n--- got ---\n{got}");
}

#[test]
fn a_step_in_bf16_with_a_layer_in_f32() {
    let got = bf16(&["fc2"]).apply(&network()).to_string();
    assert_eq!(got, include_str!("../../snapshots/precision_f32_layer_step.txt"), "\n--- got ---\n{got}");
}

#[test]
fn products_round_weights_themselves_and_results_are_f32() {
    for half in [DType::Bf16, DType::F16] {
        let graph = Precision::half(half).apply(&network());
        let is_weight = |v: &ValueId| matches!(graph.producer(*v).op, Op::Param(_));
        let mut n_products = 0;
        for node in &graph.nodes {
            match &node.op {
                Op::MatMul { rounded, .. } if node.inputs.iter().any(is_weight) => {
                    n_products += 1;
                    assert_eq!(*rounded, Some(half), "{}", node.layer);
                }
                Op::Cast(to) => {
                    assert!([half, DType::F32].contains(to), "{to}");
                    assert!(!node.inputs.iter().any(is_weight), "a copy of a weight of {}", node.layer);
                }
                _ => {}
            }
        }
        // Both layers in the forward pass, and the gradient of what the second one read.
        assert_eq!(n_products, 3);
        assert_eq!(graph.grads.iter().flatten().count(), 6);
        for v in graph.results() {
            assert_eq!(graph.value(v).dtype, DType::F32, "{v} of {}", graph.producer(v).layer);
        }
    }
}

#[test]
fn a_layer_in_f32_has_nothing_in_half() {
    let check = |f32_layers: &[&str], want: &[&str]| {
        let graph = bf16(f32_layers).apply(&network());
        assert_eq!(layers_in_half(&graph), want, "{f32_layers:?}\n{graph}");
    };
    check(&[], &["fc1", "act", "ln", "fc2", "loss"]);
    check(&["fc1"], &["act", "ln", "fc2", "loss"]);
    // Of GELU, the gradient alone goes to a layer in half.
    check(&["ln"], &["fc1", "fc2", "loss", "act"]);
    // The gradient of the logits goes to the last layer alone.
    check(&["fc2"], &["fc1", "act", "ln"]);
    check(&["fc2", "fc1"], &["act", "ln"]);
    check(&["fc1", "act", "ln", "fc2"], &[]);
    // The beginning of a name is no path.
    check(&["fc"], &["fc1", "act", "ln", "fc2", "loss"]);
}

#[test]
fn a_layer_in_f32_takes_all_that_is_inside_it() {
    let nested = step(|b| {
        let x = b.input("x", [4, 3], DType::F32)?;
        let h = b.layer("blocks.1", |b| linear(b, "up", x, 6))?;
        let h = b.layer("blocks.10", |b| linear(b, "up", h, 6))?;
        linear(b, "head", h, 5)
    });
    let check = |path: &str, want: &[&str]| {
        assert_eq!(layers_in_half(&bf16(&[path]).apply(&nested)), want, "{path}");
    };
    check("blocks.1", &["blocks.10.up", "head", "loss"]);
    check("blocks.1.up", &["blocks.10.up", "head", "loss"]);
    check("blocks", &["head", "loss"]);
}

#[test]
fn without_half_a_graph_stays_as_it_is() {
    let step = network();
    for f32_layers in [vec![], vec!["fc1".to_string()]] {
        let same = Precision { f32_layers, ..Precision::F32 }.apply(&step);
        assert_eq!(same.to_string(), step.to_string());
    }
}

/// Batch norm and ReLU run as one op, which is in one precision.
#[test]
fn a_relu_in_f32_is_not_joined_with_a_norm_in_half() {
    let step = step(|b| {
        let x = b.input("x", [4, 3], DType::F32)?;
        let h = linear(b, "fc", x, 6)?;
        let h = b.layer("bn", |b| {
            let at = BatchNorm {
                gamma: b.param("gamma", [6], Init::Const(1.0))?,
                beta: b.param("beta", [6], Init::Const(0.0))?,
                running_mean: b.state("mean", [6], Init::Const(0.0))?,
                running_var: b.state("var", [6], Init::Const(1.0))?,
                eps: 1e-5,
                momentum: 0.1,
            };
            b.batch_norm(h, at, true)
        })?;
        let h = b.layer("relu", |b| b.activation("relu", h))?;
        linear(b, "head", h, 5)
    });
    let joined = |graph: &Graph| graph.nodes.iter().any(|n| matches!(n.op, Op::BatchNorm { relu: true, .. }));
    let check = |f32_layers: &[&str], is_joined: bool, want: &[&str]| {
        let graph = bf16(f32_layers).apply(&step);
        assert_eq!(joined(&graph), is_joined, "{f32_layers:?}\n{graph}");
        assert_eq!(layers_in_half(&graph), want, "{f32_layers:?}\n{graph}");
    };
    check(&[], true, &["fc", "bn", "head", "loss"]);
    check(&["bn", "relu"], true, &["fc", "head", "loss"]);
    check(&["relu"], false, &["fc", "bn", "head", "loss"]);
    check(&["bn"], false, &["fc", "relu", "head", "loss"]);
}

#[test]
fn programs_have_what_kernels_are_chosen_by() {
    let step = network();
    for (strict, reproducible) in [(false, false), (true, false), (false, true)] {
        let precision = Precision { strict, reproducible, ..bf16(&[]) };
        for program in [precision.forward(&step), precision.gradients(&step)] {
            let body = &program.bodies[0];
            assert_eq!((body.strict, body.reproducible), (strict, reproducible));
            assert!(layers_in_half(&body.graph).contains(&"fc1"), "{program}");
        }
    }
}
