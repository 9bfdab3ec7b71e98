//! Conversions between layouts. A split value is `[blocks, pieces, len]` in memory, of which a rank has one or two pieces.
//!
//! ```text
//! whole   -> split     the rank's pieces; nothing is sent
//! split   -> partial   zeros where other ranks' pieces are; nothing is sent
//! partial -> whole     sum over the ranks
//! ```
//!
//! The others follow from these. What follows from a sequence without its positions, such as gradients of weights and means
//! over time, is partial; so hardly anything is ever put together.

use polyreme_graph::op::{Binary, ExchangeKind, Unary};
use polyreme_graph::{Axis, DType, Graph, Op, Shape, ValueId};

use super::place::SequencePlace;
use crate::tensor::ValueLayout;

/// Appends nodes to a rank's graph.
pub(super) struct Nodes<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) place: SequencePlace,
    pub(super) layer: &'a str,
}

impl Nodes<'_> {
    /// A value, whose whole shape is `shape`, in another layout.
    pub(super) fn convert(
        &mut self,
        x: ValueId,
        from: ValueLayout,
        to: ValueLayout,
        shape: &Shape,
    ) -> Result<ValueId, String> {
        match (from, to) {
            _ if from == to => Ok(x),
            (ValueLayout::Whole, ValueLayout::Split { .. }) => Ok(self.cut(x, to, shape)),
            // Nothing else is done with integers.
            _ if !self.graph.value(x).dtype.is_float() => Err(format!(
                "layer `{}` needs the integers of all positions together, which sequence = {} has cut; use sequence = 1",
                self.layer, self.place.ranks
            )),
            (ValueLayout::Split { .. }, ValueLayout::Partial) => Ok(self.pad(x, from, shape)),
            (ValueLayout::Partial, ValueLayout::Whole) => Ok(self.sum(x)),
            (ValueLayout::Whole, ValueLayout::Partial) => {
                Ok(self.push(Op::Unary(Unary::Scale(1.0 / self.place.ranks as f32)), &[x]))
            }
            (ValueLayout::Split { .. }, ValueLayout::Whole) => {
                let terms = self.pad(x, from, shape);
                Ok(self.sum(terms))
            }
            (ValueLayout::Split { .. } | ValueLayout::Partial, ValueLayout::Split { .. }) => {
                let whole = self.convert(x, from, ValueLayout::Whole, shape)?;
                Ok(self.cut(whole, to, shape))
            }
            (ValueLayout::Whole, ValueLayout::Whole) | (ValueLayout::Partial, ValueLayout::Partial) => Ok(x),
        }
    }

    /// The rank's pieces of a whole value.
    fn cut(&mut self, x: ValueId, to: ValueLayout, shape: &Shape) -> ValueId {
        let (n, len) = self.blocks(to, shape);
        let x = self.reshape(x, [n, self.place.n_pieces(), len].into());
        let local = to.local(shape, self.place.ranks);
        let pieces = match self.place.pieces()[..] {
            [a, b] => {
                let both = [a, b].map(|piece| self.slice(x, 1, piece, 1));
                self.push(Op::Concat { axis: 1 }, &both)
            }
            ref one => self.slice(x, 1, one[0], 1),
        };
        self.reshape(pieces, local)
    }

    /// The rank's pieces where they are in the whole, and zeros elsewhere.
    fn pad(&mut self, x: ValueId, from: ValueLayout, shape: &Shape) -> ValueId {
        let (n, len) = self.blocks(from, shape);
        let (pieces, all) = (self.place.pieces(), self.place.n_pieces());
        let x = self.reshape(x, [n, pieces.len(), len].into());
        // Nodes and shapes are the same on all ranks: rewrites after this one must come to the same layouts.
        let mut sum = None;
        for (k, piece) in pieces.iter().enumerate() {
            let one = self.slice(x, 1, k, 1);
            let (before, after) = (*piece, all - 1 - piece);
            let padded = self.push(Op::Pad { axis: 1, before, after, value: 0.0 }, &[one]);
            sum = Some(match sum {
                Some(sum) => self.push(Op::Binary(Binary::Add), &[sum, padded]),
                None => padded,
            });
        }
        let x = sum.expect("a rank has a piece");
        self.reshape(x, shape.clone())
    }

    /// The sum of what the ranks have, in f32.
    pub(super) fn sum(&mut self, x: ValueId) -> ValueId {
        let own = self.graph.value(x).dtype;
        let wide = self.cast(x, DType::F32);
        let sum = self.push(Op::Exchange { axis: Axis::Sequence, kind: ExchangeKind::Sum }, &[wide]);
        self.cast(sum, own)
    }

    /// How many blocks a split value consists of, and elements of one of their pieces.
    fn blocks(&self, layout: ValueLayout, shape: &Shape) -> (usize, usize) {
        let period = layout.period(shape.dims()).expect("only split values have pieces");
        (shape.numel() / period, period / self.place.n_pieces())
    }

    pub(super) fn cast(&mut self, x: ValueId, to: DType) -> ValueId {
        if self.graph.value(x).dtype == to { x } else { self.push(Op::Cast(to), &[x]) }
    }

    pub(super) fn slice(&mut self, x: ValueId, axis: usize, start: usize, len: usize) -> ValueId {
        if self.graph.shape(x).dims()[axis] == len {
            return x;
        }
        self.push(Op::Slice { axis, start, len }, &[x])
    }

    pub(super) fn pad_zeros(&mut self, x: ValueId, axis: usize, before: usize, after: usize) -> ValueId {
        if before + after == 0 {
            return x;
        }
        self.push(Op::Pad { axis, before, after, value: 0.0 }, &[x])
    }

    /// Zeros.
    pub(super) fn zeros(&mut self, shape: Shape, dtype: DType) -> ValueId {
        let zero = self.push(Op::Const(0.0), &[]);
        let zero = self.graph.push_shaped(Op::Expand, &[zero], self.layer, vec![(shape, DType::F32)])[0];
        self.cast(zero, dtype)
    }

    /// A view of the value itself, not of another view of it.
    pub(super) fn reshape(&mut self, mut x: ValueId, shape: Shape) -> ValueId {
        while let Op::Reshape = self.graph.producer(x).op {
            x = self.graph.producer(x).inputs[0];
        }
        self.graph.reshape(x, shape, self.layer)
    }

    pub(super) fn push(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.push_all(op, inputs)[0]
    }

    pub(super) fn push_all(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        let name = op.name();
        match self.graph.push(op, inputs, self.layer) {
            Ok(outputs) => outputs,
            Err(error) => unreachable!("{name} of a sequence that is cut: {error}"),
        }
    }
}
