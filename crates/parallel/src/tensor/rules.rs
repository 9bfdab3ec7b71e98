//! The rule of each op: in which layouts it can compute its results, from operands in which layouts.
//!
//! A rule lists ways; the rewrite takes the one that sends least. Every op can compute whole results from whole operands, on every
//! rank alike; that way is always the last of the list. An op with no other way is replicated.

use polyreme_graph::Shape;
use polyreme_graph::op::{Attention, Binary, Conv, Op, ReduceKind, Unary};

use super::layout::{TensorPlace, ValueLayout};
use super::products;

use ValueLayout::{Partial, Whole};

/// One way to compute an op on each rank.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Way {
    /// The op as each rank runs it.
    pub(super) op: Op,
    /// The layouts of its operands.
    pub(super) inputs: Vec<ValueLayout>,
    /// The layouts of its results.
    pub(super) outputs: Vec<ValueLayout>,
    /// Nodes other than the op alone.
    pub(super) form: OpForm,
}

/// What a way consists of.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum OpForm {
    /// The op.
    Op,
    /// The op, and its result divided by the number of ranks: a mean of means.
    Divided,
    /// The nodes of a table, or of a loss, that is split over the ids.
    Vocabulary,
}

/// What a rule knows of its node. Shapes are those of whole values.
pub(super) struct Given<'a> {
    pub(super) op: &'a Op,
    pub(super) x: Vec<&'a Shape>,
    pub(super) y: Vec<&'a Shape>,
    /// By operand: the layouts that it has already.
    pub(super) seen: Vec<Vec<ValueLayout>>,
    pub(super) place: TensorPlace,
    /// Of a product with a parameter: how its columns must be cut, if something that follows needs it.
    pub(super) columns: Option<usize>,
}

impl Given<'_> {
    /// Layouts of operand `k` that are worth a look: those that it has, and a cut of its rows.
    pub(super) fn candidates(&self, k: usize) -> Vec<ValueLayout> {
        let splits = self.seen[k].iter().copied().filter(|l| l.dim().is_some());
        let mut all: Vec<_> = splits.chain([ValueLayout::split(0)]).collect();
        all.dedup();
        all.retain(|l| l.fits(self.x[k].dims(), self.place.ranks));
        all
    }

    pub(super) fn has(&self, k: usize, layout: ValueLayout) -> bool {
        self.seen[k].contains(&layout)
    }

    pub(super) fn way(&self, inputs: Vec<ValueLayout>, outputs: Vec<ValueLayout>) -> Way {
        self.with(self.op.clone(), inputs, outputs)
    }

    pub(super) fn with(&self, op: Op, inputs: Vec<ValueLayout>, outputs: Vec<ValueLayout>) -> Way {
        Way { op, inputs, outputs, form: OpForm::Op }
    }

    pub(super) fn fits(&self, shape: &Shape, dim: usize) -> bool {
        ValueLayout::split(dim).fits(shape.dims(), self.place.ranks)
    }
}

/// The ways of a node, the replicated one last.
pub(super) fn ways(given: &Given) -> Vec<Way> {
    let mut ways = split_ways(given);
    let n_out = given.y.len();
    ways.push(given.way(vec![Whole; given.x.len()], vec![Whole; n_out]));
    ways
}

/// The row of each op: its ways but the replicated one.
fn split_ways(g: &Given) -> Vec<Way> {
    match g.op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) => unreachable!("leaves have no operands"),
        Op::Fused(_) | Op::Epilogue(_) => unreachable!("fusion comes later"),

        // Element by element. What is linear can be done with the terms of a sum.
        Op::Unary(op) => {
            let linear = matches!(op, Unary::Scale(_) | Unary::Neg);
            passes_terms(g, linear).chain(aligned(g)).collect()
        }
        Op::Binary(op) => binary_terms(g, *op).into_iter().chain(aligned(g)).collect(),
        Op::Select | Op::Cast(_) | Op::Expand => aligned(g),
        &Op::Dropout { p, stream, slab } => {
            if slab.is_some() {
                return Vec::new();
            }
            let way = |layout: ValueLayout| {
                let slab = layout.part(g.place).map(|part| part.slab(g.x[0].dims()));
                g.with(Op::Dropout { p, stream, slab }, vec![layout], vec![layout])
            };
            g.candidates(0).into_iter().map(way).collect()
        }
        Op::Exchange { .. } => aligned(g),

        // Moved.
        Op::Reshape => {
            let (from, to) = (g.x[0].dims(), g.y[0].dims());
            let way = |l: ValueLayout| Some(g.way(vec![l], vec![l.reshaped(from, to, g.place.ranks)?]));
            passes_terms(g, true).chain(g.candidates(0).into_iter().filter_map(way)).collect()
        }
        Op::Permute(perm) => {
            let way = |l: ValueLayout| {
                let to = perm.iter().position(|p| Some(*p) == l.dim())?;
                Some(g.way(vec![l], vec![l.at(to)]))
            };
            passes_terms(g, true).chain(g.candidates(0).into_iter().filter_map(way)).collect()
        }
        &Op::Slice { axis, .. } => passes_terms(g, true).chain(beside(g, axis)).collect(),
        &Op::Concat { axis } => {
            let terms = (0..g.x.len()).all(|k| g.has(k, Partial));
            terms_if(g, terms).chain(beside(g, axis)).collect()
        }
        &Op::Pad { axis, value, .. } => passes_terms(g, value == 0.0).chain(beside(g, axis)).collect(),
        &Op::Gather { axis } | &Op::ScatterAdd { axis, .. } => beside(g, axis),
        Op::Reduce { kind, axes } => reduce(g, *kind, axes),

        // Products.
        &Op::MatMul { ta, tb, .. } => products::matmul(g, ta, tb),
        Op::Conv2d(conv) => products::conv(g, *conv),
        &Op::Conv2dGradInput { conv, size } => products::conv_grad_input(g, conv, size),
        &Op::Conv2dGradWeight { conv, kernel } => products::conv_grad_weight(g, conv, kernel),

        // Windows: samples or channels.
        Op::MaxPool(_) | Op::MaxPoolGrad { .. } | Op::AvgPool(_) | Op::AvgPoolGrad { .. } => {
            let ends = |l: &ValueLayout| matches!(l.dim(), Some(0 | 3));
            let alike = |l: ValueLayout| g.way(vec![l; g.x.len()], vec![l; g.y.len()]);
            let all = (0..g.x.len()).flat_map(|k| g.candidates(k));
            all.filter(ends).map(alike).collect()
        }

        // Norms. A batch norm is one of each channel; the others are one of each row.
        Op::BatchNorm { .. } | Op::BatchNormGrad { .. } => batch_norm(g),
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => row_norm(g, 1),
        Op::LayerNormGrad | Op::RmsNormGrad => row_norm(g, 2),
        &Op::GroupNorm { groups, eps } => group_norm(g, 1, groups, |groups| Op::GroupNorm { groups, eps }),
        &Op::GroupNormGrad { groups } => group_norm(g, 2, groups, |groups| Op::GroupNormGrad { groups }),
        // Synchronisation over the data axis comes later.
        Op::BatchNormSums
        | Op::BatchNormFromSums { .. }
        | Op::BatchNormGradSums { .. }
        | Op::BatchNormGradFromSums { .. } => Vec::new(),

        // Softmax and losses.
        &Op::Softmax { axis } | &Op::LogSoftmax { axis } => beside(g, axis),
        &Op::SoftmaxGrad { axis } | &Op::LogSoftmaxGrad { axis } => beside(g, axis),
        Op::CrossEntropy(_) => split_classes(g, 0),
        Op::CrossEntropyGrad(_) => split_classes(g, 1),

        // Sequences.
        Op::Embedding => products::embedding(g),
        &Op::EmbeddingGrad { .. } => products::embedding_grad(g),
        Op::Attention(a) => attention(g, *a, 0),
        Op::AttentionGrad(a) => attention(g, *a, 3),
        // By samples; weights whole, and their gradients terms.
        Op::Recurrent { .. } => {
            let mut inputs = vec![ValueLayout::split(0); g.x.len()];
            inputs[1..3].fill(Whole);
            rows_if(g, inputs, vec![ValueLayout::split(0); g.y.len()])
        }
        Op::RecurrentGrad { .. } => {
            let mut inputs = vec![ValueLayout::split(0); g.x.len()];
            inputs[1] = Whole;
            let mut outputs = vec![ValueLayout::split(0); g.y.len()];
            outputs[1..3].fill(Partial);
            rows_if(g, inputs, outputs)
        }
    }
}

/// Terms in, terms out, if the op is linear and has terms.
fn passes_terms(g: &Given, linear: bool) -> impl Iterator<Item = Way> {
    terms_if(g, linear && g.has(0, Partial))
}

fn terms_if(g: &Given, terms: bool) -> impl Iterator<Item = Way> {
    terms.then(|| g.way(vec![Partial; g.x.len()], vec![Partial; g.y.len()])).into_iter()
}

/// Sums of terms, and terms times one number.
fn binary_terms(g: &Given, op: Binary) -> Option<Way> {
    let terms = |k: usize| g.has(k, Partial) && g.x[k] == g.y[0];
    match op {
        Binary::Add | Binary::Sub if terms(0) && terms(1) => {
            Some(g.way(vec![Partial, Partial], vec![Partial]))
        }
        Binary::Mul | Binary::Div if terms(0) && g.x[1].numel() == 1 => {
            Some(g.way(vec![Partial, Whole], vec![Partial]))
        }
        Binary::Mul if terms(1) && g.x[0].numel() == 1 => Some(g.way(vec![Whole, Partial], vec![Partial])),
        _ => None,
    }
}

/// All operands cut as the result, where they are not repeated along the dim that is cut.
fn aligned(g: &Given) -> Vec<Way> {
    let y = g.y[0];
    // Where dim `dim` of the result is in operand `k`.
    let place = |k: usize, dim: usize| {
        let at = (dim + g.x[k].rank()).checked_sub(y.rank())?;
        (g.x[k].dims()[at] == y.dims()[dim]).then_some(at)
    };
    let mut layouts: Vec<ValueLayout> = Vec::new();
    for (k, seen) in g.seen.iter().enumerate() {
        for l in seen {
            let Some(dim) = l.dim().map(|d| d + y.rank() - g.x[k].rank()) else { continue };
            if place(k, dim).is_some() {
                layouts.push(l.at(dim));
            }
        }
    }
    layouts.push(ValueLayout::split(0));
    let mut unique: Vec<ValueLayout> = Vec::new();
    for l in layouts {
        if l.fits(y.dims(), g.place.ranks) && !unique.contains(&l) {
            unique.push(l);
        }
    }
    let way = |l: ValueLayout| {
        let dim = l.dim()?;
        let inputs: Vec<_> = (0..g.x.len()).map(|k| place(k, dim).map_or(Whole, |at| l.at(at))).collect();
        Some(g.way(inputs, vec![l; g.y.len()]))
    };
    unique.into_iter().filter_map(way).collect()
}

/// All operands and the results cut along the same dim, which is not the one that the op works along.
fn beside(g: &Given, axis: usize) -> Vec<Way> {
    let other = |l: &ValueLayout| l.dim() != Some(axis);
    let alike = |l: ValueLayout| g.way(vec![l; g.x.len()], vec![l; g.y.len()]);
    let mut layouts: Vec<_> = (0..g.x.len()).flat_map(|k| g.candidates(k)).filter(other).collect();
    layouts.sort_by_key(|l| l.dim().is_some_and(|d| d == 0));
    layouts.dedup();
    layouts.into_iter().map(alike).collect()
}

/// Cut along a dim that stays, or, of one that is reduced, sums of what each rank has.
fn reduce(g: &Given, kind: ReduceKind, axes: &[usize]) -> Vec<Way> {
    let adds = matches!(kind, ReduceKind::Sum | ReduceKind::Mean);
    let way = |l: ValueLayout| {
        let dim = l.dim()?;
        if !axes.contains(&dim) {
            return Some(g.way(vec![l], vec![l]));
        }
        let form = if kind == ReduceKind::Mean { OpForm::Divided } else { OpForm::Op };
        adds.then(|| Way { form, ..g.way(vec![l], vec![Partial]) })
    };
    passes_terms(g, adds).chain(g.candidates(0).into_iter().filter_map(way)).collect()
}

/// By channels, which are the last dim of the data and the only one of everything else.
fn batch_norm(g: &Given) -> Vec<Way> {
    let last = g.x[0].rank() - 1;
    let mut layouts: Vec<_> = g.candidates(0);
    layouts.push(ValueLayout::split(last));
    layouts.retain(|l| l.dim() == Some(last) && l.fits(g.x[0].dims(), g.place.ranks));
    layouts.dedup();
    let of = |l: ValueLayout| move |s: &&Shape| if s.rank() == last + 1 && last > 0 { l } else { l.at(0) };
    let way = |l: ValueLayout| g.way(g.x.iter().map(of(l)).collect(), g.y.iter().map(of(l)).collect());
    layouts.into_iter().map(way).collect()
}

/// By rows. The first `n_data` operands, statistics, and the first result have rows; factors and offsets are whole, and their
/// gradients are terms.
fn row_norm(g: &Given, n_data: usize) -> Vec<Way> {
    let last = g.x[0].rank() - 1;
    let mut layouts: Vec<_> = (0..n_data).flat_map(|k| g.candidates(k)).collect();
    layouts.retain(|l| l.dim() != Some(last));
    layouts.dedup();
    let way = |l: ValueLayout| {
        let backward = n_data == 2;
        let inputs = g.x.iter().enumerate().map(|(k, _)| match k {
            _ if k < n_data => l,
            _ if backward && k > n_data => l,
            _ => Whole,
        });
        let outputs = g.y.iter().enumerate().map(|(k, _)| if backward && k > 0 { Partial } else { l });
        g.way(inputs.collect(), outputs.collect())
    };
    layouts.into_iter().map(way).collect()
}

/// By samples, or by groups of channels.
fn group_norm(g: &Given, n_data: usize, groups: usize, op: impl Fn(usize) -> Op) -> Vec<Way> {
    let last = g.x[0].rank() - 1;
    let backward = n_data == 2;
    let mut ways = Vec::new();
    if groups.is_multiple_of(g.place.ranks) {
        let (data, vector, stats) = (ValueLayout::split(last), ValueLayout::split(0), ValueLayout::split(1));
        let inputs = (0..g.x.len()).map(|k| match k {
            _ if k < n_data => data,
            _ if backward && k > n_data => stats,
            _ => vector,
        });
        let outputs = (0..g.y.len()).map(|k| match k {
            0 => data,
            _ if backward => vector,
            _ => stats,
        });
        ways.push(g.with(op(groups / g.place.ranks), inputs.collect(), outputs.collect()));
    }
    let samples = row_norm(g, n_data).into_iter().filter(|way| way.inputs[0] == ValueLayout::split(0));
    ways.extend(samples);
    ways
}

/// By heads, or by samples. Operands of the attention begin at `first`; what comes before them has the shape of its results.
fn attention(g: &Given, a: Attention, first: usize) -> Vec<Way> {
    let n_data = if a.packed { 1 } else { 3 };
    let heads_at = if a.packed { 3 } else { 2 };
    let mask = |way: &mut Vec<ValueLayout>, dim: usize, rank: usize| {
        for mask in &g.x[first + n_data..] {
            let cut = mask.rank() >= rank && g.fits(mask, dim) && mask.dims()[dim] > 1;
            way.push(if cut { ValueLayout::split(dim) } else { Whole });
        }
    };
    let build = |data: ValueLayout, o: ValueLayout, lse: ValueLayout, mask_dim: usize, mask_rank: usize| {
        let mut inputs = if first == 3 { vec![o, o, lse] } else { Vec::new() };
        inputs.extend(std::iter::repeat_n(data, n_data));
        mask(&mut inputs, mask_dim, mask_rank);
        let outputs = if first == 3 { vec![data; n_data] } else { vec![o, lse] };
        g.way(inputs, outputs)
    };
    let mut ways = Vec::new();
    if g.fits(g.x[first], heads_at) {
        ways.push(build(ValueLayout::split(heads_at), ValueLayout::split(2), ValueLayout::split(1), 1, 4));
    }
    if g.fits(g.x[first], 0) {
        ways.push(build(ValueLayout::split(0), ValueLayout::split(0), ValueLayout::split(0), 0, 3));
    }
    ways
}

/// By classes, which are the columns of operand `logits`.
fn split_classes(g: &Given, logits: usize) -> Vec<Way> {
    if !g.fits(g.x[logits], 1) || !g.has(logits, ValueLayout::split(1)) {
        return Vec::new();
    }
    let mut inputs = vec![Whole; g.x.len()];
    inputs[logits] = ValueLayout::split(1);
    let outputs = if logits == 1 { vec![ValueLayout::split(1)] } else { vec![Whole; 2] };
    vec![Way { form: OpForm::Vocabulary, ..g.way(inputs, outputs) }]
}

fn rows_if(g: &Given, inputs: Vec<ValueLayout>, outputs: Vec<ValueLayout>) -> Vec<Way> {
    if g.fits(g.x[0], 0) { vec![g.way(inputs, outputs)] } else { Vec::new() }
}

/// A convolution of a rank's groups of channels.
pub(super) fn fewer_groups(conv: Conv, ranks: usize) -> Conv {
    Conv { groups: conv.groups / ranks, ..conv }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given<'a>(op: &'a Op, x: &'a [Shape], y: &'a [Shape]) -> Given<'a> {
        let place = TensorPlace { rank: 0, ranks: 2 };
        let (x, y) = (x.iter().collect::<Vec<_>>(), y.iter().collect());
        Given { op, seen: vec![vec![Whole]; x.len()], x, y, place, columns: None }
    }

    #[test]
    fn only_the_parts_of_synchronised_norms_have_no_rule() {
        let vector = || Shape::from([8]);
        let data = || Shape::from([4, 8]);
        let sums = || Shape::from([17]);
        let norm = [data(), vector(), vector(), vector(), vector()];
        let grad = [data(), data(), vector(), vector(), vector(), vector()];
        let (eps, momentum, relu) = (1e-5, 0.1, false);
        let check = |op: Op, x: &[Shape], y: &[Shape], n_ways: usize| {
            assert_eq!(ways(&given(&op, x, y)).len(), n_ways, "{}", op.name());
        };
        check(Op::BatchNorm { eps, momentum, relu }, &norm, &norm, 2);
        check(Op::BatchNormGrad { relu }, &grad, &[data(), vector(), vector()], 2);
        check(Op::BatchNormSums, &[data(), vector()], &[sums()], 1);
        let from_sums: Vec<_> = norm.iter().cloned().chain([sums()]).collect();
        check(Op::BatchNormFromSums { eps, momentum, relu }, &from_sums, &norm, 1);
        check(Op::BatchNormGradSums { relu }, &grad, &[sums(), vector(), vector()], 1);
        let from_sums: Vec<_> = grad.iter().cloned().chain([sums()]).collect();
        check(Op::BatchNormGradFromSums { relu }, &from_sums, &[data()], 1);
    }

    #[test]
    fn groups_of_channels_are_split_where_they_divide() {
        let (x, v, stats) = (Shape::from([4, 3, 3, 8]), Shape::from([8]), Shape::from([4, 4]));
        let op = Op::GroupNorm { groups: 4, eps: 1e-5 };
        let (operands, results) = ([x.clone(), v.clone(), v], [x, stats.clone(), stats]);
        let ways = ways(&given(&op, &operands, &results));
        assert_eq!(ways[0].op, Op::GroupNorm { groups: 2, eps: 1e-5 });
        assert_eq!(ways[0].inputs, [ValueLayout::split(3), ValueLayout::split(0), ValueLayout::split(0)]);
        assert_eq!(ways[0].outputs, [ValueLayout::split(3), ValueLayout::split(1), ValueLayout::split(1)]);
        assert_eq!(ways[1].inputs, [ValueLayout::split(0), Whole, Whole], "by samples");
    }
}
