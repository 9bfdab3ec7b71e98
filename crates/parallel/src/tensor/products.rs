//! The rules of ops with weights: products, convolutions and tables.

use polyreme_graph::op::{Conv, Op};

use super::layout::ValueLayout;
use super::rules::{Given, OpForm, Way, fewer_groups};

use ValueLayout::{Partial, Whole};

/// `[.., m, k]·[.., k, n]`: cut along `k` it gives terms, along anything else a cut result. A weight that is cut along its rows
/// or columns is one of the two.
pub(super) fn matmul(g: &Given, ta: bool, tb: bool) -> Vec<Way> {
    let (ra, rb, ry) = (g.x[0].rank(), g.x[1].rank(), g.y[0].rank());
    let (m, k_a) = if ta { (ra - 1, ra - 2) } else { (ra - 2, ra - 1) };
    let (k_b, n) = if tb { (rb - 1, rb - 2) } else { (rb - 2, rb - 1) };
    // In how many groups a dim is cut already, and in one.
    let groups = |operand: usize, dim: usize| {
        let seen = g.seen[operand].iter().filter_map(move |l| match *l {
            ValueLayout::Split { dim: d, groups } if d == dim => Some(groups),
            _ => None,
        });
        let mut all: Vec<_> = seen.chain([1]).collect();
        all.dedup();
        all
    };
    let cut = |dim: usize, groups: usize| ValueLayout::Split { dim, groups };
    let fits = |operand: usize, l: ValueLayout| l.fits(g.x[operand].dims(), g.place.ranks);
    let mut ways = Vec::new();
    if let Some(columns) = g.columns.map(|groups| cut(n, groups)).filter(|l| fits(1, *l)) {
        return vec![g.way(vec![Whole, columns], vec![columns.at(ry - 1)])];
    }
    let mut along_k = groups(0, k_a);
    along_k.extend(groups(1, k_b));
    along_k.dedup();
    for count in along_k {
        if fits(0, cut(k_a, count)) {
            ways.push(g.way(vec![cut(k_a, count), cut(k_b, count)], vec![Partial]));
        }
    }
    for count in groups(1, n) {
        if fits(1, cut(n, count)) {
            ways.push(g.way(vec![Whole, cut(n, count)], vec![cut(ry - 1, count)]));
        }
    }
    for count in groups(0, m) {
        if fits(0, cut(m, count)) {
            ways.push(g.way(vec![cut(m, count), Whole], vec![cut(ry - 2, count)]));
        }
    }
    // Leading dims: rows, if one right operand serves all of them.
    for dim in 0..ra - 2 {
        for count in groups(0, dim) {
            let l = cut(dim, count);
            if fits(0, l) && (dim == 0 || g.has(0, l)) {
                ways.push(g.way(vec![l, if rb == 2 { Whole } else { l }], vec![l]));
            }
        }
    }
    ways
}

/// `(x [n,h,w,c], weight [o, c/groups, kh, kw])`: output channels, input channels (terms), or samples.
pub(super) fn conv(g: &Given, conv: Conv) -> Vec<Way> {
    conv_ways(g, conv, &Op::Conv2d, (1, 0))
}

/// `(dy [n,oh,ow,o], weight [o, c/groups, kh, kw])` → `[n,h,w,c]`: the same with the two kinds of channels in each other's place.
pub(super) fn conv_grad_input(g: &Given, conv: Conv, size: (usize, usize)) -> Vec<Way> {
    conv_ways(g, conv, &|conv| Op::Conv2dGradInput { conv, size }, (0, 1))
}

/// A convolution that sums over the channels of the weight's dim `reads` and makes those of its dim `makes`; `op` is the one for
/// fewer groups.
fn conv_ways(g: &Given, conv: Conv, op: &dyn Fn(Conv) -> Op, (reads, makes): (usize, usize)) -> Vec<Way> {
    let (ranks, split) = (g.place.ranks, ValueLayout::split);
    let mut ways = Vec::new();
    if conv.groups > 1 && conv.groups.is_multiple_of(ranks) {
        ways.push(g.with(op(fewer_groups(conv, ranks)), vec![split(3), split(0)], vec![split(3)]));
    }
    if conv.groups == 1 {
        if g.fits(g.x[0], 3) {
            ways.push(g.way(vec![split(3), split(reads)], vec![Partial]));
        }
        if g.fits(g.x[1], makes) {
            ways.push(g.way(vec![Whole, split(makes)], vec![split(3)]));
        }
    }
    if g.fits(g.x[0], 0) {
        ways.push(g.way(vec![split(0), Whole], vec![split(0)]));
    }
    ways
}

/// `(x, dy)` → `[o, c/groups, kh, kw]`: either kind of channels, or samples (terms).
pub(super) fn conv_grad_weight(g: &Given, conv: Conv, kernel: (usize, usize)) -> Vec<Way> {
    let ranks = g.place.ranks;
    let mut ways = Vec::new();
    if conv.groups > 1 && conv.groups.is_multiple_of(ranks) {
        let op = Op::Conv2dGradWeight { conv: fewer_groups(conv, ranks), kernel };
        ways.push(g.with(op, vec![ValueLayout::split(3); 2], vec![ValueLayout::split(0)]));
    }
    if conv.groups == 1 {
        if g.fits(g.x[0], 3) {
            ways.push(g.way(vec![ValueLayout::split(3), Whole], vec![ValueLayout::split(1)]));
        }
        if g.fits(g.x[1], 3) {
            ways.push(g.way(vec![Whole, ValueLayout::split(3)], vec![ValueLayout::split(0)]));
        }
    }
    if g.fits(g.x[0], 0) {
        ways.push(g.way(vec![ValueLayout::split(0); 2], vec![Partial]));
    }
    ways
}

/// `(ids, table [v, d])` → `[ids.., d]`: rows of the table, which give terms; columns where the rows do not divide.
pub(super) fn embedding(g: &Given) -> Vec<Way> {
    let last = g.y[0].rank() - 1;
    if g.fits(g.x[1], 0) {
        let rows = g.way(vec![Whole, ValueLayout::split(0)], vec![Partial]);
        vec![Way { form: OpForm::Vocabulary, ..rows }]
    } else if g.fits(g.x[1], 1) {
        vec![g.way(vec![Whole, ValueLayout::split(1)], vec![ValueLayout::split(last)])]
    } else {
        Vec::new()
    }
}

/// `(ids, dy)` → `[v, d]`: rows or columns of the table, or terms of samples.
pub(super) fn embedding_grad(g: &Given) -> Vec<Way> {
    let last = g.x[1].rank() - 1;
    let mut ways = Vec::new();
    if g.fits(g.y[0], 0) {
        let rows = g.way(vec![Whole, Whole], vec![ValueLayout::split(0)]);
        ways.push(Way { form: OpForm::Vocabulary, ..rows });
    }
    if g.fits(g.x[1], last) {
        ways.push(g.way(vec![Whole, ValueLayout::split(last)], vec![ValueLayout::split(1)]));
    }
    if g.fits(g.x[0], 0) {
        ways.push(g.way(vec![ValueLayout::split(0); 2], vec![Partial]));
    }
    ways
}
