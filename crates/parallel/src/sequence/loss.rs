//! Cross-entropy of rows that are cut over the ranks.
//!
//! The loss is the mean over the rows of all ranks, weighted by class if it has weights of classes, without ignored labels. A
//! rank computes the mean over its own rows; with `W_r` the weight of those:
//!
//! ```text
//! loss  = Σ_r mean_r · W_r / W     W = Σ_r W_r      where all rows count alike W_r / W = 1/R, and nothing is exchanged for it
//! dlogits of rank r                as for its own mean, from dloss · W_r / W
//! ```

use polyreme_graph::op::{Binary, CrossEntropy, Op, ReduceKind, Unary};
use polyreme_graph::{DType, Shape, ValueId};

use super::convert::Nodes;

/// `(logits, labels)` and the weights of classes, if any → the rank's term of the mean loss, and `lse`.
pub(super) fn forward(nodes: &mut Nodes, options: CrossEntropy, x: &[ValueId]) -> Vec<ValueId> {
    let own = nodes.push_all(Op::CrossEntropy(options), x);
    let Some([weight, all]) = weights(nodes, options, x[1], x.get(2).copied(), x[0]) else {
        let share = nodes.push(Op::Unary(Unary::Scale(1.0 / nodes.place.ranks as f32)), &[own[0]]);
        return vec![share, own[1]];
    };
    // The mean over no rows is not a number.
    let sum = nodes.push(Op::Binary(Binary::Mul), &[own[0], weight]);
    let zero = nodes.push(Op::Const(0.0), &[]);
    let sum = nodes.push(Op::Select, &[weight, sum, zero]);
    vec![nodes.push(Op::Binary(Binary::Div), &[sum, all]), own[1]]
}

/// `(dloss, logits, labels, lse)` and the weights of classes, if any → `dlogits`.
pub(super) fn backward(nodes: &mut Nodes, options: CrossEntropy, x: &[ValueId]) -> Vec<ValueId> {
    let dloss = match weights(nodes, options, x[2], x.get(4).copied(), x[1]) {
        None => nodes.push(Op::Unary(Unary::Scale(1.0 / nodes.place.ranks as f32)), &[x[0]]),
        Some([weight, all]) => {
            // With all labels ignored gradients are 0, not 0/0.
            let least = nodes.push(Op::Const(f32::MIN_POSITIVE), &[]);
            let all = nodes.push(Op::Binary(Binary::Max), &[all, least]);
            let share = nodes.push(Op::Binary(Binary::Div), &[weight, all]);
            nodes.push(Op::Binary(Binary::Mul), &[x[0], share])
        }
    };
    let operands = [&[dloss], &x[1..]].concat();
    nodes.push_all(Op::CrossEntropyGrad(options), &operands)
}

/// The weight of the rank's rows and that of all rows; `None` if all rows count alike.
fn weights(
    nodes: &mut Nodes,
    options: CrossEntropy,
    labels: ValueId,
    class_weights: Option<ValueId>,
    logits: ValueId,
) -> Option<[ValueId; 2]> {
    if options.ignore_index.is_none() && class_weights.is_none() {
        return None;
    }
    let n = nodes.graph.shape(labels).numel();
    let classes = nodes.graph.shape(logits).last();
    let (mut counted, mut idx) = (None, labels);
    if let Some(ignored) = options.ignore_index {
        let numbers = nodes.push(Op::Cast(DType::F32), &[labels]);
        let ignored = nodes.push(Op::Const(ignored as f32), &[]);
        let skipped = nodes.push(Op::Binary(Binary::Equal), &[numbers, ignored]);
        let taken = nodes.push(Op::Unary(Unary::Neg), &[skipped]);
        let taken = nodes.push(Op::Unary(Unary::Offset(1.0)), &[taken]);
        let known = nodes.push(Op::Binary(Binary::Mul), &[numbers, taken]);
        idx = nodes.push(Op::Cast(DType::I32), &[known]);
        counted = Some(taken);
    }
    let weights = match class_weights {
        None => counted.expect("rows differ because some are ignored"),
        Some(table) => {
            let table = nodes.reshape(table, [1, classes].into());
            let idx = nodes.reshape(idx, [1, n].into());
            let of_rows = nodes.push(Op::Gather { axis: 1 }, &[table, idx]);
            let of_rows = nodes.reshape(of_rows, [n].into());
            match counted {
                Some(counted) => nodes.push(Op::Binary(Binary::Mul), &[of_rows, counted]),
                None => of_rows,
            }
        }
    };
    let own = nodes.push(Op::Reduce { kind: ReduceKind::Sum, axes: vec![0] }, &[weights]);
    let own = nodes.reshape(own, Shape::scalar());
    let all = nodes.sum(own);
    Some([own, all])
}
