//! What the rewrite knows ahead: for which products the columns must be cut, and in how many groups; and which values are
//! gradients of which parameters.

use polyreme_graph::op::{Binary, Unary};
use polyreme_graph::{ExchangeKind, Graph, Op, ValueId};

/// By node: of a product whose result goes to an attention, in how many groups its columns are cut, so that each rank gets
/// whole heads. Of one whose result goes to a loss over classes: 1, so that each rank gets some of the classes.
pub(super) fn columns(graph: &Graph) -> Vec<Option<usize>> {
    // By value: how what reads it wants its last dim to be cut. Readers come later, so values are visited from the end.
    let mut wanted: Vec<Option<usize>> = vec![None; graph.values.len()];
    let mut columns = vec![None; graph.nodes.len()];
    for (i, node) in graph.nodes[..graph.n_forward].iter().enumerate().rev() {
        let from_y = node.outputs.first().and_then(|y| wanted[y.idx()]);
        match &node.op {
            Op::Attention(a) => {
                let n_data = if a.packed { 1 } else { 3 };
                for v in &node.inputs[..n_data] {
                    wanted[v.idx()] = Some(if a.packed { 3 } else { 1 });
                }
            }
            Op::CrossEntropy(_) => wanted[node.inputs[0].idx()] = Some(1),
            Op::Reshape | Op::Cast(_) | Op::Unary(_) | Op::Binary(_) => {
                for v in &node.inputs {
                    if wanted[v.idx()].is_none() {
                        wanted[v.idx()] = from_y;
                    }
                }
            }
            Op::MatMul { .. } => columns[i] = from_y,
            _ => {}
        }
    }
    columns
}

/// By value: of which parameter it is the gradient, or a contribution to it of the same shape.
pub(super) fn gradients(graph: &Graph) -> Vec<Option<usize>> {
    let mut of: Vec<Option<usize>> = vec![None; graph.values.len()];
    for (param, grad) in graph.grads.iter().enumerate() {
        if let Some(grad) = grad {
            of[grad.idx()] = Some(param);
        }
    }
    for node in graph.nodes.iter().rev() {
        let sum = matches!(node.op, Op::Exchange { kind: ExchangeKind::Sum, .. });
        let linear = matches!(node.op, Op::Binary(Binary::Add) | Op::Unary(Unary::Scale(_)) | Op::Cast(_));
        let passes = sum || linear;
        let Some(param) = of[node.outputs[0].idx()].filter(|_| passes) else { continue };
        for v in &node.inputs {
            if graph.shape(*v) == graph.shape(node.outputs[0]) && of[v.idx()].is_none() {
                of[v.idx()] = Some(param);
            }
        }
    }
    of
}

/// Why a graph cannot be split over this many ranks, if it cannot.
pub(super) fn refusal(graph: &Graph, ranks: usize) -> Option<String> {
    let heads = |v: ValueId, packed: bool| graph.shape(v).dims()[if packed { 3 } else { 2 }];
    graph.nodes.iter().find_map(|node| match &node.op {
        Op::Attention(a) if !heads(node.inputs[0], a.packed).is_multiple_of(ranks) => {
            let heads = heads(node.inputs[0], a.packed);
            let layer = &node.layer;
            Some(format!(
                "layer `{layer}` has {heads} attention heads, which tensor = {ranks} does not divide; use a number \
                 of tensor ranks that divides {heads}, or another number of heads"
            ))
        }
        _ => None,
    })
}
