//! The gradient of each op: what reaches its operands when `dy` has reached its outputs.

use polyreme_kernels::elementwise::{Binary, Unary};

use super::{Backward, GradResult, elementwise, no_gradient};
use crate::graph::{Node, ValueId};
use crate::op::{Cell, ExchangeKind, Op, ReduceKind};
use crate::shape::Shape;

pub(super) fn row(b: &mut Backward, node: &Node, dys: &[Option<ValueId>]) -> GradResult {
    // Only the first output of any op reaches a loss: the others are statistics kept for these rows.
    let Some(dy) = dys[0] else { return no_gradient(node) };
    let x = &node.inputs;
    let shape_of = |b: &Backward, v: ValueId| b.graph.shape(v).clone();
    match &node.op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) => {}
        Op::Unary(op) => elementwise::unary(b, node, *op, dy)?,
        Op::Binary(op) => elementwise::binary(b, node, *op, dy)?,
        Op::Select => elementwise::select(b, node, dy)?,
        Op::Dropout { .. } => {
            let dx = b.one(node.op.clone(), &[dy]);
            b.reach(x[0], dx);
        }
        Op::Reshape => {
            let shape = shape_of(b, x[0]);
            let dx = b.reshape(dy, shape);
            b.reach(x[0], dx);
        }
        Op::Expand => b.reach_reduced(x[0], dy),
        Op::Permute(perm) => {
            let mut inverse = vec![0; perm.len()];
            for (i, &p) in perm.iter().enumerate() {
                inverse[p] = i;
            }
            let dx = b.one(Op::Permute(inverse), &[dy]);
            b.reach(x[0], dx);
        }
        &Op::Slice { axis, start, len } => {
            let after = b.graph.shape(x[0]).dims()[axis] - start - len;
            let dx = b.one(Op::Pad { axis, before: start, after, value: 0.0 }, &[dy]);
            b.reach(x[0], dx);
        }
        &Op::Concat { axis } => {
            let mut start = 0;
            for &v in x {
                let len = b.graph.shape(v).dims()[axis];
                if b.needs(v) {
                    let dv = b.one(Op::Slice { axis, start, len }, &[dy]);
                    b.reach(v, dv);
                }
                start += len;
            }
        }
        &Op::Pad { axis, before, .. } => {
            let len = b.graph.shape(x[0]).dims()[axis];
            let dx = b.one(Op::Slice { axis, start: before, len }, &[dy]);
            b.reach(x[0], dx);
        }
        &Op::Gather { axis } => {
            let len = b.graph.shape(x[0]).dims()[axis];
            let dx = b.one(Op::ScatterAdd { axis, len }, &[dy, x[1]]);
            b.reach(x[0], dx);
        }
        &Op::ScatterAdd { axis, .. } => {
            let dx = b.one(Op::Gather { axis }, &[dy, x[1]]);
            b.reach(x[0], dx);
        }
        // Gradients are f32 whatever the values are: they pass, and add up without being rounded.
        Op::Cast(_) => b.reach(x[0], dy),
        Op::Reduce { kind, axes } => reduce(b, node, *kind, axes, dy),
        &Op::MatMul { ta, tb, .. } => matmul(b, x[0], x[1], ta, tb, dy),
        Op::Conv2d(conv) => {
            let (image, weight) = (shape_of(b, x[0]), shape_of(b, x[1]));
            if b.needs(x[1]) {
                let kernel = (weight.dims()[2], weight.dims()[3]);
                let dw = b.one(Op::Conv2dGradWeight { conv: *conv, kernel }, &[x[0], dy]);
                b.reach(x[1], dw);
            }
            if b.needs(x[0]) {
                let size = (image.dims()[1], image.dims()[2]);
                let dx = b.one(Op::Conv2dGradInput { conv: *conv, size }, &[dy, x[1]]);
                b.reach(x[0], dx);
            }
        }
        // y = Kᵀx for the convolution K: so dx = K·dy, and in the weight's gradient x and dy change places.
        Op::Conv2dGradInput { conv, .. } => {
            let weight = shape_of(b, x[1]);
            if b.needs(x[1]) {
                let kernel = (weight.dims()[2], weight.dims()[3]);
                let dw = b.one(Op::Conv2dGradWeight { conv: *conv, kernel }, &[dy, x[0]]);
                b.reach(x[1], dw);
            }
            if b.needs(x[0]) {
                let dx = b.one(Op::Conv2d(*conv), &[dy, x[1]]);
                b.reach(x[0], dx);
            }
        }
        Op::MaxPool(window) => {
            let image = shape_of(b, x[0]);
            let size = (image.dims()[1], image.dims()[2]);
            let dx = b.one(Op::MaxPoolGrad { window: *window, size }, &[dy, node.outputs[1]]);
            b.reach(x[0], dx);
        }
        Op::AvgPool(window) => {
            let image = shape_of(b, x[0]);
            let size = (image.dims()[1], image.dims()[2]);
            let dx = b.one(Op::AvgPoolGrad { window: *window, size }, &[dy]);
            b.reach(x[0], dx);
        }
        &Op::BatchNorm { relu, .. } => {
            let y = &node.outputs;
            let d = b.all(Op::BatchNormGrad { relu }, &[dy, x[0], x[1], x[2], y[1], y[2]]);
            reach_needed(b, &x[..3], &d);
        }
        // Every rank's y is Σ x over the ranks, and the loss is the sum of the ranks' losses: dx = Σ dy over them.
        &Op::Exchange { axis, kind: kind @ ExchangeKind::Sum } => {
            let dx = b.one(Op::Exchange { axis, kind }, &[dy]);
            b.reach(x[0], dx);
        }
        Op::LayerNorm { .. } => norm(b, node, Op::LayerNormGrad, dy),
        &Op::GroupNorm { groups, .. } => norm(b, node, Op::GroupNormGrad { groups }, dy),
        Op::RmsNorm { .. } => {
            let d = b.all(Op::RmsNormGrad, &[dy, x[0], x[1], node.outputs[1]]);
            reach_needed(b, &x[..2], &d);
        }
        &Op::Softmax { axis } => {
            let dx = b.one(Op::SoftmaxGrad { axis }, &[dy, node.outputs[0]]);
            b.reach(x[0], dx);
        }
        &Op::LogSoftmax { axis } => {
            let dx = b.one(Op::LogSoftmaxGrad { axis }, &[dy, node.outputs[0]]);
            b.reach(x[0], dx);
        }
        Op::CrossEntropy(options) => {
            if x.get(2).is_some_and(|&weights| b.needs(weights)) {
                return no_gradient(node);
            }
            let mut operands = vec![dy, x[0], x[1], node.outputs[1]];
            operands.extend(x.get(2));
            let dx = b.one(Op::CrossEntropyGrad(*options), &operands);
            b.reach(x[0], dx);
        }
        Op::Embedding => {
            let rows = b.graph.shape(x[1]).dims()[0];
            let dtable = b.one(Op::EmbeddingGrad { rows }, &[x[0], dy]);
            b.reach(x[1], dtable);
        }
        Op::Attention(a) => {
            let n = if a.packed { 1 } else { 3 };
            if x.get(n).is_some_and(|&mask| b.needs(mask)) {
                return no_gradient(node);
            }
            let mut operands = vec![dy, node.outputs[0], node.outputs[1]];
            operands.extend_from_slice(x);
            let d = b.all(Op::AttentionGrad(*a), &operands);
            reach_needed(b, &x[..n], &d);
        }
        &Op::Recurrent { cell, reverse } => {
            let mut operands = vec![dy, x[1]];
            operands.extend_from_slice(&x[3..]);
            operands.extend_from_slice(&node.outputs);
            let d = b.all(Op::RecurrentGrad { cell, reverse }, &operands);
            let n_states = if cell == Cell::Lstm { 2 } else { 1 };
            reach_needed(b, &x[..3 + n_states], &d);
        }
        // The parts of a synchronised batch norm, and what ranks exchange, are made from a step that has been differentiated.
        Op::Exchange { .. }
        | Op::BatchNormSums
        | Op::BatchNormFromSums { .. }
        | Op::BatchNormGradSums { .. }
        | Op::BatchNormGradFromSums { .. } => return no_gradient(node),
        Op::Fused(_)
        | Op::Epilogue(_)
        | Op::Conv2dGradWeight { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AvgPoolGrad { .. }
        | Op::BatchNormGrad { .. }
        | Op::LayerNormGrad
        | Op::RmsNormGrad
        | Op::GroupNormGrad { .. }
        | Op::SoftmaxGrad { .. }
        | Op::LogSoftmaxGrad { .. }
        | Op::CrossEntropyGrad(_)
        | Op::EmbeddingGrad { .. }
        | Op::AttentionGrad(_)
        | Op::RecurrentGrad { .. } => return no_gradient(node),
    }
    Ok(())
}

fn reach_needed(b: &mut Backward, values: &[ValueId], grads: &[ValueId]) {
    for (&v, &dv) in values.iter().zip(grads) {
        if b.needs(v) {
            b.reach(v, dv);
        }
    }
}

/// The norms with a mean and a reciprocal deviation: operands `(x, gamma, beta, ..)`, outputs `(y, mean, rstd, ..)`.
fn norm(b: &mut Backward, node: &Node, grad: Op, dy: ValueId) {
    let (x, y) = (&node.inputs, &node.outputs);
    let d = b.all(grad, &[dy, x[0], x[1], y[1], y[2]]);
    reach_needed(b, &x[..3], &d);
}

fn reduce(b: &mut Backward, node: &Node, kind: ReduceKind, axes: &[usize], dy: ValueId) {
    let (x, y) = (node.inputs[0], node.outputs[0]);
    let shape = b.graph.shape(x).clone();
    let n: usize = axes.iter().map(|&a| shape.dims()[a]).product();
    let dx = match kind {
        ReduceKind::Sum => b.expand(dy, shape),
        ReduceKind::Mean => {
            let each = b.unary(Unary::Scale(1.0 / n as f32), dy);
            b.expand(each, shape)
        }
        // Elements that equal the extreme share its gradient.
        ReduceKind::Max | ReduceKind::Min => {
            let hit = b.binary(Binary::Equal, x, y);
            let count = b.one(Op::Reduce { kind: ReduceKind::Sum, axes: axes.to_vec() }, &[hit]);
            let each = b.binary(Binary::Div, dy, count);
            b.binary(Binary::Mul, hit, each)
        }
    };
    b.reach(x, dx);
}

/// With `A` and `Q` the operands as multiplied: `dA = dy·Qᵀ` and `dQ = Aᵀ·dy`, transposed back where stored so. The
/// second operand's gradient comes first: it is what other ranks wait for.
fn matmul(b: &mut Backward, p: ValueId, q: ValueId, ta: bool, tb: bool, dy: ValueId) {
    if b.needs(q) {
        // One right operand for all rows: the rows are summed over as one long dim.
        let shared = b.graph.shape(q).rank() == 2;
        let (p, dy) = if shared { (rows(b, p), rows(b, dy)) } else { (p, dy) };
        let dq = if tb {
            b.one(Op::MatMul { ta: true, tb: ta, rounded: None }, &[dy, p])
        } else {
            b.one(Op::MatMul { ta: !ta, tb: false, rounded: None }, &[p, dy])
        };
        b.reach(q, dq);
    }
    if b.needs(p) {
        let dp = if ta {
            b.one(Op::MatMul { ta: tb, tb: true, rounded: None }, &[q, dy])
        } else {
            b.one(Op::MatMul { ta: false, tb: !tb, rounded: None }, &[dy, q])
        };
        b.reach(p, dp);
    }
}

fn rows(b: &mut Backward, x: ValueId) -> ValueId {
    let shape = b.graph.shape(x);
    let flat = Shape::from([shape.rows(), shape.last()]);
    b.reshape(x, flat)
}
