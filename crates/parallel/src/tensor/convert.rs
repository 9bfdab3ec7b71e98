//! Conversions between layouts: which nodes they are, and how many elements they send.
//!
//! With `n` elements, `T` ranks and a period of `s` elements, a value is `[n/s, T, s/T]`, of which rank `t` has `[:, t, :]`:
//!
//! ```text
//! whole   -> split     the rank's piece of each block; nothing is sent
//! split   -> whole     gather [T, n/s, s/T], blocks put together
//! partial -> whole     sum
//! partial -> split     pieces by rank [T, n/s, s/T], scatter, the rank's row
//! split   -> split     pieces of pieces by rank, swap, put together
//! ```
//!
//! With one block, as after a cut of the first dim, the permutations are left out. Sums are in f32.

use polyreme_graph::op::ExchangeKind;
use polyreme_graph::{Axis, DType, Graph, Op, Shape, ValueId};

use super::layout::{TensorPlace, ValueLayout};

/// The cost of a copy of one element, where sending one costs 1.
pub(super) const COPY: f64 = 0.25;

/// The cost of a conversion of `n` elements; `None` if there is no way.
pub(super) fn cost(
    from: ValueLayout,
    to: ValueLayout,
    shape: &Shape,
    dtype: DType,
    ranks: usize,
) -> Option<f64> {
    let (n, t) = (shape.numel() as f64, ranks as f64);
    let others = n * (t - 1.0) / t;
    let cost = match (from, to) {
        (ValueLayout::Whole, ValueLayout::Whole) | (ValueLayout::Partial, ValueLayout::Partial) => 0.0,
        _ if from == to => 0.0,
        (ValueLayout::Whole, ValueLayout::Split { .. }) => COPY * n,
        // Nothing else is done with integers.
        _ if !dtype.is_float() => return None,
        (ValueLayout::Split { .. }, ValueLayout::Whole)
        | (ValueLayout::Partial, ValueLayout::Split { .. }) => others,
        (ValueLayout::Partial, ValueLayout::Whole) => 2.0 * others,
        (ValueLayout::Split { .. }, ValueLayout::Split { .. }) => match nested(from, to, shape, ranks) {
            Some(_) => others / t,
            None => others + COPY * n,
        },
        (ValueLayout::Whole | ValueLayout::Split { .. }, ValueLayout::Partial) => return None,
    };
    Some(cost)
}

/// Of two splits, whether the first is the coarser one: each of its pieces is made of whole blocks of the other. `None` if
/// neither is.
fn nested(from: ValueLayout, to: ValueLayout, shape: &Shape, ranks: usize) -> Option<bool> {
    let (a, b) = (from.period(shape.dims())?, to.period(shape.dims())?);
    if (a / ranks).is_multiple_of(b) {
        Some(true)
    } else if (b / ranks).is_multiple_of(a) {
        Some(false)
    } else {
        None
    }
}

/// Adds the nodes of a conversion of a value whose whole shape is `shape`.
pub(super) fn convert(
    graph: &mut Graph,
    x: ValueId,
    from: ValueLayout,
    to: ValueLayout,
    shape: &Shape,
    place: TensorPlace,
    layer: &str,
) -> ValueId {
    let mut nodes = Nodes { graph, place, layer };
    let (n, ranks) = (shape.numel(), place.ranks);
    let blocks = |layout: ValueLayout| layout.period(shape.dims()).map_or(1, |period| n / period);
    let local = to.local(shape, ranks);
    match (from, to) {
        (ValueLayout::Whole, ValueLayout::Whole) | (ValueLayout::Partial, ValueLayout::Partial) => x,
        _ if from == to => x,
        (ValueLayout::Whole, ValueLayout::Split { .. }) => {
            let (a, b) = (blocks(to), n / blocks(to) / ranks);
            let x = nodes.reshape(x, [a, ranks, b].into());
            let piece = nodes.push(Op::Slice { axis: 1, start: place.rank, len: 1 }, x);
            nodes.reshape(piece, local)
        }
        (ValueLayout::Split { .. }, ValueLayout::Whole) => {
            let (a, b) = (blocks(from), n / blocks(from) / ranks);
            let x = nodes.reshape(x, [a, b].into());
            let all = nodes.exchange(ExchangeKind::Gather { ranks, rank: place.rank }, x);
            let all = nodes.swap_first(all, [ranks, a, b]);
            nodes.reshape(all, local)
        }
        (ValueLayout::Partial, ValueLayout::Whole) => {
            nodes.in_f32(x, |nodes, x| nodes.exchange(ExchangeKind::Sum, x))
        }
        (ValueLayout::Partial, ValueLayout::Split { .. }) => {
            let (a, b) = (blocks(to), n / blocks(to) / ranks);
            nodes.in_f32(x, |nodes, x| {
                let x = nodes.reshape(x, [a, ranks, b].into());
                let x = nodes.swap_first(x, [a, ranks, b]);
                let x = nodes.reshape(x, [ranks, a * b].into());
                let all = nodes.exchange(ExchangeKind::Scatter { ranks }, x);
                let mine = nodes.push(Op::Slice { axis: 0, start: place.rank, len: 1 }, all);
                nodes.reshape(mine, local)
            })
        }
        (ValueLayout::Split { .. }, ValueLayout::Split { .. }) => match nested(from, to, shape, ranks) {
            // This rank's pieces of `a` blocks are whole blocks of the finer split, `c` in each.
            Some(true) => {
                let (a, b) = (blocks(from), n / blocks(to) / ranks);
                let c = blocks(to) / ranks / a;
                let x = nodes.reshape(x, [a * c, ranks, b].into());
                let x = nodes.swap_first(x, [a * c, ranks, b]);
                let x = nodes.reshape(x, [ranks, a * c * b].into());
                let y = nodes.exchange(ExchangeKind::Swap { ranks }, x);
                let y = nodes.reshape(y, [ranks, a, c * b].into());
                let y = nodes.swap_first(y, [ranks, a, c * b]);
                nodes.reshape(y, local)
            }
            Some(false) => {
                let (a, b) = (blocks(to), n / blocks(from) / ranks);
                let c = blocks(from) / ranks / a;
                let x = nodes.reshape(x, [a, ranks, c * b].into());
                let x = nodes.swap_first(x, [a, ranks, c * b]);
                let x = nodes.reshape(x, [ranks, a * c * b].into());
                let y = nodes.exchange(ExchangeKind::Swap { ranks }, x);
                let y = nodes.reshape(y, [ranks, a * c, b].into());
                let y = nodes.swap_first(y, [ranks, a * c, b]);
                nodes.reshape(y, local)
            }
            None => {
                let whole = convert(graph, x, from, ValueLayout::Whole, shape, place, layer);
                convert(graph, whole, ValueLayout::Whole, to, shape, place, layer)
            }
        },
        (ValueLayout::Whole | ValueLayout::Split { .. }, ValueLayout::Partial) => {
            unreachable!("nothing is turned into terms of a sum")
        }
    }
}

/// Appends nodes whose shapes are known to fit.
struct Nodes<'a> {
    graph: &'a mut Graph,
    place: TensorPlace,
    layer: &'a str,
}

impl Nodes<'_> {
    fn push(&mut self, op: Op, x: ValueId) -> ValueId {
        let name = op.name();
        match self.graph.push(op, &[x], self.layer) {
            Ok(outputs) => outputs[0],
            Err(error) => unreachable!("{name} of a conversion between layouts: {error}"),
        }
    }

    fn exchange(&mut self, kind: ExchangeKind, x: ValueId) -> ValueId {
        self.push(Op::Exchange { axis: Axis::Tensor, kind }, x)
    }

    /// A view of the value itself, not of another view of it.
    fn reshape(&mut self, mut x: ValueId, shape: Shape) -> ValueId {
        while let Op::Reshape = self.graph.producer(x).op {
            x = self.graph.producer(x).inputs[0];
        }
        self.graph.reshape(x, shape, self.layer)
    }

    /// `[a, b, c]` as `[b, a, c]`; nothing is moved where one of the two is 1.
    fn swap_first(&mut self, x: ValueId, [a, b, c]: [usize; 3]) -> ValueId {
        if a == 1 || b == 1 {
            return self.reshape(x, [b, a, c].into());
        }
        self.push(Op::Permute(vec![1, 0, 2]), x)
    }

    /// What ranks add up is added up in f32.
    fn in_f32(&mut self, x: ValueId, sum: impl FnOnce(&mut Self, ValueId) -> ValueId) -> ValueId {
        debug_assert!(self.place.ranks > 1, "a lone rank has everything");
        match self.graph.value(x).dtype {
            DType::F32 => sum(self, x),
            half => {
                let wide = self.push(Op::Cast(DType::F32), x);
                let y = sum(self, wide);
                self.push(Op::Cast(half), y)
            }
        }
    }
}
