//! The rule of each op: in which layouts a rank computes its results, from operands in which layouts.
//!
//! Unlike for split matrices there is nothing to choose: what has positions is split by them, and the rest is whole, or a sum
//! of which each rank has a term. An op without a rule for its operands is computed by every rank from whole ones.

use polyreme_graph::Shape;
use polyreme_graph::op::{Attention, Binary, Op, ReduceKind, Slab, Unary};

use super::place::SequencePlace;
use crate::tensor::ValueLayout;

use ValueLayout::{Partial, Split, Whole};

/// How a rank computes a node.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Rule {
    /// The op as the rank runs it.
    pub(super) op: Op,
    /// The layouts of its operands.
    pub(super) inputs: Vec<ValueLayout>,
    /// The layouts of its results.
    pub(super) outputs: Vec<ValueLayout>,
    /// Nodes other than the op alone.
    pub(super) form: RuleForm,
}

/// What a rule consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RuleForm {
    /// The op.
    Op,
    /// The op, and its result divided by the number of ranks: a mean of means.
    Divided,
    /// A slice of positions that one rank has; zeros on the others.
    OnePiece,
    /// A recurrent layer whose state is handed on.
    HandOn,
    /// A loss over rows of all ranks.
    Loss,
}

/// What a rule knows of its node. Shapes are those of whole values.
pub(super) struct PositionedNode<'a> {
    pub(super) op: &'a Op,
    pub(super) x: Vec<&'a Shape>,
    pub(super) y: Vec<&'a Shape>,
    /// By operand: the layout that it was computed in.
    pub(super) have: Vec<ValueLayout>,
    pub(super) place: SequencePlace,
}

impl PositionedNode<'_> {
    fn rule(&self, inputs: Vec<ValueLayout>, outputs: Vec<ValueLayout>) -> Rule {
        Rule { op: self.op.clone(), inputs, outputs, form: RuleForm::Op }
    }

    fn form(&self, form: RuleForm, inputs: Vec<ValueLayout>, outputs: Vec<ValueLayout>) -> Rule {
        Rule { form, ..self.rule(inputs, outputs) }
    }

    /// All operands and results whole.
    pub(super) fn replicated(&self) -> Rule {
        self.rule(vec![Whole; self.x.len()], vec![Whole; self.y.len()])
    }

    /// The first of these operands that is split.
    fn split_of(&self, operands: impl IntoIterator<Item = usize>) -> Option<ValueLayout> {
        operands.into_iter().map(|k| self.have[k]).find(|l| l.dim().is_some())
    }

    fn fits(&self, layout: ValueLayout, shape: &Shape) -> bool {
        layout.fits(shape.dims(), self.place.n_pieces())
    }
}

/// How a rank computes a node.
pub(super) fn rule(g: &PositionedNode) -> Rule {
    if g.have.iter().all(|l| *l == Whole) {
        return g.replicated();
    }
    let fits = |rule: &Rule| {
        let pairs = rule.inputs.iter().zip(&g.x).chain(rule.outputs.iter().zip(&g.y));
        pairs.into_iter().all(|(layout, shape)| g.fits(*layout, shape))
    };
    split_rule(g).filter(fits).unwrap_or_else(|| g.replicated())
}

/// The row of each op; `None` if it is computed from whole operands.
fn split_rule(g: &PositionedNode) -> Option<Rule> {
    match g.op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) => unreachable!("leaves have no operands"),
        Op::Fused(_) | Op::Epilogue(_) => unreachable!("fusion comes later"),

        // Element by element. What is linear can be done with the terms of a sum.
        Op::Unary(op) => terms(g, matches!(op, Unary::Scale(_) | Unary::Neg)).or_else(|| aligned(g)),
        Op::Binary(op) => binary_terms(g, *op).or_else(|| aligned(g)),
        Op::Cast(to) => terms(g, to.is_float()).or_else(|| aligned(g)),
        Op::Select | Op::Expand => aligned(g),
        &Op::Dropout { p, stream, slab: None } => {
            let layout = g.split_of([0])?;
            let slab = Some(slab(layout, g.x[0], g.place)?);
            Some(Rule { op: Op::Dropout { p, stream, slab }, ..g.rule(vec![layout], vec![layout]) })
        }
        Op::Dropout { slab: Some(_), .. } => None,
        // What other rewrites exchange comes later.
        Op::Exchange { .. } => None,

        // Moved.
        Op::Reshape => terms(g, true).or_else(|| {
            let layout = g.split_of([0])?;
            let to = layout.reshaped(g.x[0].dims(), g.y[0].dims(), g.place.n_pieces())?;
            Some(g.rule(vec![layout], vec![to]))
        }),
        Op::Permute(perm) => terms(g, true).or_else(|| {
            let layout = g.split_of([0])?;
            let to = perm.iter().position(|p| Some(*p) == layout.dim())?;
            Some(g.rule(vec![layout], vec![layout.at(to)]))
        }),
        &Op::Slice { axis, start, len } => {
            terms(g, true).or_else(|| beside(g, axis)).or_else(|| one_piece(g, axis, start, len))
        }
        &Op::Concat { axis } => beside(g, axis),
        // A piece of the positions among others: terms of the whole.
        &Op::Pad { axis, value, .. } => terms(g, value == 0.0).or_else(|| beside(g, axis)).or_else(|| {
            let linear = value == 0.0 && g.have[0].dim() == Some(axis);
            linear.then(|| g.rule(vec![Partial], vec![Partial]))
        }),
        &Op::Gather { axis } | &Op::ScatterAdd { axis, .. } => beside(g, axis),
        Op::Reduce { kind, axes } => reduce(g, *kind, axes),

        // Products with weights: rows, or sums over rows.
        &Op::MatMul { ta, tb, .. } => matmul(g, ta, tb),

        // Windows and convolutions would need positions of other ranks; norms of channels their statistics.
        Op::Conv2d(_)
        | Op::Conv2dGradInput { .. }
        | Op::Conv2dGradWeight { .. }
        | Op::MaxPool(_)
        | Op::MaxPoolGrad { .. }
        | Op::AvgPool(_)
        | Op::AvgPoolGrad { .. }
        | Op::BatchNorm { .. }
        | Op::BatchNormGrad { .. }
        | Op::BatchNormSums
        | Op::BatchNormFromSums { .. }
        | Op::BatchNormGradSums { .. }
        | Op::BatchNormGradFromSums { .. }
        | Op::GroupNorm { .. }
        | Op::GroupNormGrad { .. } => None,
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => row_norm(g, 1),
        Op::LayerNormGrad | Op::RmsNormGrad => row_norm(g, 2),

        // Softmax and losses.
        &Op::Softmax { axis } | &Op::LogSoftmax { axis } => beside(g, axis),
        &Op::SoftmaxGrad { axis } | &Op::LogSoftmaxGrad { axis } => beside(g, axis),
        Op::CrossEntropy(_) => {
            let rows = rows_of(g, [0, 1])?;
            let mut inputs = vec![Whole; g.x.len()];
            inputs[..2].fill(rows);
            Some(g.form(RuleForm::Loss, inputs, vec![Partial, rows]))
        }
        Op::CrossEntropyGrad(_) => {
            let rows = rows_of(g, [1, 2, 3])?;
            let mut inputs = vec![Whole; g.x.len()];
            inputs[1..4].fill(rows);
            Some(g.form(RuleForm::Loss, inputs, vec![rows]))
        }

        // Sequences.
        Op::Embedding => {
            let ids = g.split_of([0])?;
            Some(g.rule(vec![ids, Whole], vec![ids]))
        }
        Op::EmbeddingGrad { .. } => {
            let ids = g.split_of([0, 1])?;
            (ids.dim()? < g.x[0].rank()).then(|| g.rule(vec![ids, ids], vec![Partial]))
        }
        Op::Attention(a) => ring(g, *a, 0),
        Op::AttentionGrad(a) => ring(g, *a, 3),
        Op::Recurrent { .. } => {
            let time = g.split_of([0]).filter(|l| *l == ValueLayout::split(1))?;
            let mut inputs = vec![Whole; g.x.len()];
            inputs[0] = time;
            Some(g.form(RuleForm::HandOn, inputs, vec![time; g.y.len()]))
        }
        Op::RecurrentGrad { cell, .. } => {
            let n_states = if cell.gates() == 4 { 2 } else { 1 };
            let time = ValueLayout::split(1);
            let is_split = g.have[2 + n_states..].contains(&time);
            let inputs = (0..g.x.len()).map(|k| if (1..2 + n_states).contains(&k) { Whole } else { time });
            // The gradients of the initial state: terms, as only the first rank has one.
            let outputs = (0..g.y.len()).map(|k| if k == 0 { time } else { Partial });
            is_split.then(|| g.form(RuleForm::HandOn, inputs.collect(), outputs.collect()))
        }
    }
}

/// Terms in, terms out, if the op is linear and all its operands are terms.
fn terms(g: &PositionedNode, linear: bool) -> Option<Rule> {
    let all = linear && g.have.iter().all(|l| *l == Partial);
    all.then(|| g.rule(vec![Partial; g.x.len()], vec![Partial; g.y.len()]))
}

/// Sums of terms, and terms times one number.
fn binary_terms(g: &PositionedNode, op: Binary) -> Option<Rule> {
    let is_term = |k: usize| g.have[k] == Partial && g.x[k] == g.y[0];
    let is_number = |k: usize| g.have[k] == Whole && g.x[k].numel() == 1;
    match op {
        Binary::Add | Binary::Sub if is_term(0) && is_term(1) => {
            Some(g.rule(vec![Partial, Partial], vec![Partial]))
        }
        Binary::Mul | Binary::Div if is_term(0) && is_number(1) => {
            Some(g.rule(vec![Partial, Whole], vec![Partial]))
        }
        Binary::Mul if is_term(1) && is_number(0) => Some(g.rule(vec![Whole, Partial], vec![Partial])),
        _ => None,
    }
}

/// All operands cut as the result, where they are not repeated along the dim that is cut.
fn aligned(g: &PositionedNode) -> Option<Rule> {
    let y = g.y[0];
    // Where dim `dim` of the result is in operand `k`.
    let place = |k: usize, dim: usize| {
        let at = (dim + g.x[k].rank()).checked_sub(y.rank())?;
        (g.x[k].dims()[at] == y.dims()[dim]).then_some(at)
    };
    let layout = (0..g.x.len()).find_map(|k| {
        let dim = g.have[k].dim()? + y.rank() - g.x[k].rank();
        place(k, dim).map(|_| g.have[k].at(dim))
    })?;
    let dim = layout.dim()?;
    let inputs = (0..g.x.len()).map(|k| place(k, dim).map_or(Whole, |at| layout.at(at)));
    Some(g.rule(inputs.collect(), vec![layout; g.y.len()]))
}

/// All operands and the results cut along the same dim, which is not the one that the op works along.
fn beside(g: &PositionedNode, axis: usize) -> Option<Rule> {
    let layout = g.split_of(0..g.x.len()).filter(|l| l.dim() != Some(axis))?;
    Some(g.rule(vec![layout; g.x.len()], vec![layout; g.y.len()]))
}

/// Positions that are all in one rank's piece.
fn one_piece(g: &PositionedNode, axis: usize, start: usize, len: usize) -> Option<Rule> {
    let layout = g.split_of([0]).filter(|l| *l == ValueLayout::split(axis))?;
    let piece = g.x[0].dims()[axis] / g.place.n_pieces();
    let inside = len > 0 && piece > 0 && start / piece == (start + len - 1) / piece;
    inside.then(|| g.form(RuleForm::OnePiece, vec![layout], vec![Partial]))
}

/// Cut along a dim that stays, or, of one that is reduced, sums of what each rank has.
fn reduce(g: &PositionedNode, kind: ReduceKind, axes: &[usize]) -> Option<Rule> {
    let adds = matches!(kind, ReduceKind::Sum | ReduceKind::Mean);
    terms(g, adds).or_else(|| {
        let layout = g.split_of([0])?;
        if !axes.contains(&layout.dim()?) {
            return Some(g.rule(vec![layout], vec![layout]));
        }
        let form = if kind == ReduceKind::Mean { RuleForm::Divided } else { RuleForm::Op };
        adds.then(|| g.form(form, vec![layout], vec![Partial]))
    })
}

/// `[.., m, k]·[.., k, n]`: rows of either operand, several products at once, or a sum over rows that both have.
fn matmul(g: &PositionedNode, ta: bool, tb: bool) -> Option<Rule> {
    let (ra, rb, ry) = (g.x[0].rank(), g.x[1].rank(), g.y[0].rank());
    let (a_rows, a_sum) = if ta { (ra - 1, ra - 2) } else { (ra - 2, ra - 1) };
    let (b_sum, b_cols) = if tb { (rb - 1, rb - 2) } else { (rb - 2, rb - 1) };
    let together = rb > 2 && ra == rb;
    let of_a = g.split_of([0]).and_then(|a| match a.dim()? {
        d if d == a_sum => Some(g.rule(vec![a, a.at(b_sum)], vec![Partial])),
        d if d == a_rows => Some(g.rule(vec![a, Whole], vec![a.at(ry - 2)])),
        _ if together => Some(g.rule(vec![a, a], vec![a])),
        _ => (rb == 2).then(|| g.rule(vec![a, Whole], vec![a])),
    });
    of_a.or_else(|| {
        let b = g.split_of([1])?;
        match b.dim()? {
            d if d == b_sum => Some(g.rule(vec![b.at(a_sum), b], vec![Partial])),
            d if d == b_cols => Some(g.rule(vec![Whole, b], vec![b.at(ry - 1)])),
            _ => together.then(|| g.rule(vec![b, b], vec![b])),
        }
    })
}

/// By rows. The first `n_data` operands, statistics, and the first result have rows; factors and offsets are whole, and their
/// gradients are terms.
fn row_norm(g: &PositionedNode, n_data: usize) -> Option<Rule> {
    let last = g.x[0].rank() - 1;
    let layout = g.split_of(0..n_data).filter(|l| l.dim() != Some(last))?;
    let backward = n_data == 2;
    let inputs = (0..g.x.len()).map(|k| if k < n_data || (backward && k > n_data) { layout } else { Whole });
    let outputs = (0..g.y.len()).map(|k| if backward && k > 0 { Partial } else { layout });
    Some(g.rule(inputs.collect(), outputs.collect()))
}

/// The cut of the rows of these operands.
fn rows_of(g: &PositionedNode, operands: impl IntoIterator<Item = usize>) -> Option<ValueLayout> {
    g.split_of(operands).filter(|l| l.dim() == Some(0))
}

/// By time: later it goes round a ring. Operands of the attention begin at `first`; what comes before them has the shape of its results. A mask is for all
/// positions, so with one every rank computes all of it.
fn ring(g: &PositionedNode, a: Attention, first: usize) -> Option<Rule> {
    let n_data = if a.packed { 1 } else { 3 };
    let time = ValueLayout::split(1);
    let all = g.x.len() == first + n_data && g.have[first..].contains(&time);
    // Queries and keys of one sequence: nothing else is cut alike.
    let alike = g.x[first..].iter().all(|x| x.dims()[1] == g.x[first].dims()[1]);
    // In contiguous pieces the first rank would have hardly anything to do with causal attention.
    let balanced = !a.causal || g.place.order == super::place::SequenceOrder::Zigzag;
    let lse = ValueLayout::split(2);
    let mut inputs = if first == 3 { vec![time, time, lse] } else { Vec::new() };
    inputs.extend(std::iter::repeat_n(time, n_data));
    let outputs = if first == 3 { vec![time; n_data] } else { vec![time, lse] };
    (all && alike && balanced).then(|| g.rule(inputs, outputs))
}

/// Where a rank's part of a value lies in the whole.
fn slab(layout: ValueLayout, whole: &Shape, place: SequencePlace) -> Option<Slab> {
    let stride = layout.period(whole.dims())?;
    let run = stride / place.n_pieces();
    let pieces = place.pieces();
    let second = pieces.get(1).map(|piece| piece * run);
    Some(Slab { first: pieces[0] * run, second, run, stride })
}

/// Whether a layout cuts something.
pub(super) fn is_split(layout: ValueLayout) -> bool {
    matches!(layout, Split { .. })
}
