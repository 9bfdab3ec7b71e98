//! Which positions of a sequence each rank has, and what it is fed.
//!
//! With `R` ranks a sequence is cut into equal pieces, in one of two orders:
//!
//! ```text
//! contiguous, R pieces     rank r has piece r
//! zigzag, 2·R pieces       rank r has pieces r and 2·R-1-r: an early and a late one
//! ```
//!
//! In the zigzag all ranks have the same work where a position sees only earlier ones. Recurrent layers need one run of
//! positions. What a rank has is in the order of the positions.

use std::ops::Range;

use polyreme_graph::op::Op;
use polyreme_graph::{DType, Graph, Shape};

use crate::tensor::ValueLayout;

/// In which order ranks have the pieces of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SequenceOrder {
    /// One piece for each rank.
    Contiguous,
    /// An early and a late piece for each rank.
    Zigzag,
}

impl SequenceOrder {
    /// The order that a step, or a forward pass, needs: a zigzag for causal attention without recurrent layers.
    pub fn of(graph: &Graph) -> SequenceOrder {
        let any = |is: fn(&Op) -> bool| graph.nodes.iter().any(|node| is(&node.op));
        let causal = any(|op| matches!(op, Op::Attention(a) if a.causal));
        match causal && !any(|op| matches!(op, Op::Recurrent { .. })) {
            true => SequenceOrder::Zigzag,
            false => SequenceOrder::Contiguous,
        }
    }
}

/// A rank's place along the sequence axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SequencePlace {
    /// Its number.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// Which pieces it has.
    pub order: SequenceOrder,
}

impl SequencePlace {
    /// How many pieces a sequence is cut into.
    pub fn n_pieces(&self) -> usize {
        match self.order {
            SequenceOrder::Zigzag if self.ranks > 1 => 2 * self.ranks,
            SequenceOrder::Contiguous | SequenceOrder::Zigzag => self.ranks,
        }
    }

    /// The pieces that the rank has, ascending.
    pub fn pieces(&self) -> Vec<usize> {
        match self.order {
            SequenceOrder::Zigzag if self.ranks > 1 => vec![self.rank, 2 * self.ranks - 1 - self.rank],
            SequenceOrder::Contiguous | SequenceOrder::Zigzag => vec![self.rank],
        }
    }

    /// The positions of a sequence of `time` that the rank has, in their order.
    ///
    /// # Panics
    /// If the pieces are not equal; [`fed_parts`] reports that as an error.
    pub fn positions(&self, time: usize) -> Vec<Range<usize>> {
        let len = time / self.n_pieces();
        assert_eq!(len * self.n_pieces(), time, "equal pieces of a sequence");
        self.pieces().into_iter().map(|piece| piece * len..(piece + 1) * len).collect()
    }
}

/// Which elements of an input a rank is fed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FedPart {
    /// The input.
    pub name: String,
    /// Elements of one sequence.
    pub sequence: usize,
    /// The elements of each sequence that the rank has, in their order.
    pub ranges: Vec<Range<usize>>,
}

impl FedPart {
    /// Copies the rank's elements of several sequences.
    ///
    /// # Panics
    /// If `into` has another number of elements than the rank's parts of `all`.
    pub fn copy<T: Copy>(&self, all: &[T], into: &mut [T]) {
        let mut at = 0;
        for sequence in all.chunks(self.sequence) {
            for range in &self.ranges {
                into[at..at + range.len()].copy_from_slice(&sequence[range.clone()]);
                at += range.len();
            }
        }
        assert_eq!(at, into.len(), "all of a rank's elements of {}", self.name);
    }
}

/// What a rank is fed of the inputs that are cut; others are fed whole. Or why sequences cannot be cut so.
///
/// The graph is that of whole sequences, as it was traced.
pub fn fed_parts(graph: &Graph, place: SequencePlace) -> Result<Vec<FedPart>, String> {
    let layouts = input_layouts(graph, place)?;
    let part = |(input, layout): (&polyreme_graph::graph::Input, ValueLayout)| {
        let sequence = layout.period(graph.shape(input.value).dims())?;
        let len = sequence / place.n_pieces();
        let ranges = place.pieces().into_iter().map(|piece| piece * len..(piece + 1) * len).collect();
        Some(FedPart { name: input.name.clone(), sequence, ranges })
    };
    Ok(graph.inputs.iter().zip(layouts).filter_map(part).collect())
}

/// The layout of each input. The first is the sequences: `[samples, time]` of ids, or `[samples, time, features]`. Another
/// one is cut if it has one element, or row, for each position.
pub(super) fn input_layouts(graph: &Graph, place: SequencePlace) -> Result<Vec<ValueLayout>, String> {
    let ranks = place.ranks;
    let first = graph.inputs.first().map(|input| graph.value(input.value));
    let sizes = first.and_then(|value| match (value.shape.dims(), value.dtype) {
        (&[samples, time], DType::I32) | (&[samples, time, _], _) => Some((samples, time)),
        _ => None,
    });
    let Some((samples, time)) = sizes else {
        let shape = first.map_or(Shape::scalar(), |value| value.shape.clone());
        return Err(format!(
            "sequence = {ranks} cuts sequences, and the model is fed {shape}; use sequence = 1 and split the batch, the \
             matrices or the layers instead"
        ));
    };
    let pieces = place.n_pieces();
    if time == 0 || !time.is_multiple_of(pieces) {
        let next = time.next_multiple_of(pieces).max(pieces);
        let why = match place.order {
            SequenceOrder::Contiguous => String::new(),
            SequenceOrder::Zigzag => ", an early and a late one for each rank".into(),
        };
        return Err(format!(
            "sequence = {ranks} cuts a sequence into {pieces} equal pieces{why}, and {time} positions do not divide so; use a \
             context that {pieces} divides, such as {next}, or fewer ranks"
        ));
    }
    let layout = |shape: &Shape| match *shape.dims() {
        [s, t] | [s, t, _] if (s, t) == (samples, time) => ValueLayout::split(1),
        [rows] | [rows, _] if rows == samples * time && time > 1 => {
            ValueLayout::Split { dim: 0, groups: samples }
        }
        _ => ValueLayout::Whole,
    };
    Ok(graph.inputs.iter().map(|input| layout(graph.shape(input.value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use polyreme_graph::Builder;

    #[test]
    fn ranks_have_all_positions_once() {
        for order in [SequenceOrder::Contiguous, SequenceOrder::Zigzag] {
            for ranks in [1, 2, 3, 4] {
                let mut all: Vec<usize> = (0..ranks)
                    .flat_map(|rank| SequencePlace { rank, ranks, order }.positions(24).into_iter().flatten())
                    .collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..24), "{order:?} on {ranks}");
            }
        }
        let place = SequencePlace { rank: 1, ranks: 4, order: SequenceOrder::Zigzag };
        assert_eq!(place.positions(16), [2..4, 12..14]);
    }

    #[test]
    fn inputs_with_positions_are_cut() {
        let mut b = Builder::new();
        b.input("ids", [2, 4], DType::I32).unwrap();
        b.input("labels", [8], DType::I32).unwrap();
        b.input("weight", [1], DType::F32).unwrap();
        let graph = b.finish(&[]);
        let place = SequencePlace { rank: 1, ranks: 2, order: SequenceOrder::Contiguous };
        let parts = fed_parts(&graph, place).unwrap();
        assert_eq!(parts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["ids", "labels"]);
        let mut got = [0; 4];
        for part in parts {
            part.copy(&[0, 1, 2, 3, 4, 5, 6, 7], &mut got);
            assert_eq!(got, [2, 3, 6, 7]);
        }
    }

    #[test]
    fn what_does_not_divide_is_explained() {
        let mut b = Builder::new();
        b.input("ids", [2, 6], DType::I32).unwrap();
        let graph = b.finish(&[]);
        let place = SequencePlace { rank: 0, ranks: 2, order: SequenceOrder::Zigzag };
        let said = fed_parts(&graph, place).unwrap_err();
        assert!(said.contains("4 equal pieces") && said.contains("such as 8"), "{said}");
        let mut b = Builder::new();
        b.input("x", [2, 6], DType::F32).unwrap();
        let said = fed_parts(&b.finish(&[]), place).unwrap_err();
        assert!(said.contains("the model is fed [2, 6]"), "{said}");
    }
}
