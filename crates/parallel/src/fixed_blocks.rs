//! The norm of gradients in reproducible mode: squares of fixed blocks of every parameter, added up in the order in which the
//! model declares parameters.
//!
//! A block is [`PART_ALIGN`] elements of one tensor, counted from its beginning. Where the tensor lies in the arena differs
//! from stage to stage, and who computes a block's squares from mesh to mesh; the block and its number do not. Every rank
//! has a buffer with one number for each block of the whole model, fills in those that it computes, and the sum over
//! all axes is exact: for each block one rank has a number and the others have zeros. So the norm has the same bits on
//! any number of stages and of ranks along the data axis. The parts of a tensor that is split over the tensor axis have blocks of
//! their own: how many parts there are is part of the numerics.
//!
//! A rank that keeps a part of the gradients must have whole blocks, so parts begin where blocks do ([`block_cuts`]).
//!
//! Per step each rank exchanges eight bytes for each block of the model along each axis: a five-hundredth of what the gradients
//! take. If a peer dies the exchange ends with a report, and nothing is updated.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::param_ranges;
use polyreme_graph::{Axis, Body, Collective, DType, Declared, Graph, Instr, Region};

use crate::buckets::PART_ALIGN;
use crate::schedule::Lowering;

/// Nearly equal parts of the first `len` elements of the arena, each of whole blocks.
pub(crate) fn block_cuts(graph: &Graph, len: usize, ranks: usize) -> Arc<[usize]> {
    let tensors = tensors(graph).into_iter().map(|(_, range)| range);
    block_cuts_of(tensors, len, ranks)
}

/// The same, of elements among which tensors lie there, in this order.
pub(crate) fn block_cuts_of(
    tensors: impl Iterator<Item = Range<usize>>,
    len: usize,
    ranks: usize,
) -> Arc<[usize]> {
    let starts = tensors.flat_map(|range| range.step_by(PART_ALIGN));
    let starts: Vec<usize> = starts.filter(|at| *at < len).chain([len]).collect();
    let cut = |rank: usize| starts[starts.partition_point(|at| *at < len * rank / ranks)];
    (0..=ranks).map(cut).collect()
}

/// By parameter: its elements in the arena.
fn tensors(graph: &Graph) -> Vec<(usize, Range<usize>)> {
    let of = |(p, range): (usize, Range<usize>)| {
        (p, range.start..range.start + graph.shape(graph.params[p].value).numel())
    };
    param_ranges(graph).into_iter().map(of).collect()
}

/// Gradients of which a rank has some ranges.
pub(crate) struct BlocksHere<'a> {
    /// By parameter: where its gradient lies among all.
    pub(crate) tensors: Vec<(usize, Range<usize>)>,
    /// The ranges that this rank has.
    pub(crate) mine: &'a [Range<usize>],
    /// Where a range of them lies.
    pub(crate) region: &'a dyn Fn(Range<usize>) -> Region,
}

/// Clips by the norm of all gradients, of which this rank has those of the ranges `mine` of the arena.
pub(crate) fn clip(lowering: &mut Lowering, mine: &[Range<usize>], max_norm: f64) {
    let tensors = tensors(lowering.program.graph());
    clip_blocks(lowering, &BlocksHere { tensors, mine, region: &Region::Grads }, max_norm);
}

/// The same for gradients that lie elsewhere.
pub(crate) fn clip_blocks(lowering: &mut Lowering, here: &BlocksHere, max_norm: f64) {
    let body = lowering.program.bodies[0].clone();
    let firsts = first_blocks(&body.declared);
    let squares = lowering.program.buffer("squares", DType::F64, firsts[body.declared.len()]);
    lowering.push(Instr::Zero(squares.clone()));
    for (of, block) in counted(lowering, &body, &firsts, here) {
        let into = squares.part(block..block + of.len().div_ceil(PART_ALIGN));
        lowering.push(Instr::Squares { of: (here.region)(of), into, block: Some(PART_ALIGN) });
    }
    let data = lowering.role.sharded().then_some(Axis::Data);
    for axis in data.into_iter().chain(lowering.split_axes.clone()).collect::<Vec<_>>() {
        lowering.program.exchange_now(Collective::AllReduce, axis, squares.clone());
    }
    lowering.push(Instr::Clip { squares, max_norm });
}

/// The gradients whose squares this rank computes, tensor by tensor, each with the number of its first block.
fn counted(
    lowering: &Lowering,
    body: &Body,
    firsts: &[usize],
    here: &BlocksHere,
) -> Vec<(Range<usize>, usize)> {
    let graph = &body.graph;
    let mut found = Vec::new();
    let places = param_ranges(graph);
    for (p, range) in &here.tensors {
        let p = *p;
        let (_, place) = places.iter().find(|(other, _)| *other == p).expect("every parameter has a place");
        let elsewhere = |other: &Range<usize>| other.start <= place.start && place.end <= other.end;
        if graph.grads[p].is_none() || lowering.counted_elsewhere.iter().any(elsewhere) {
            continue;
        }
        let stored = &graph.params[p];
        let number = body.declared.iter().position(|d| d.name == stored.name);
        let number = number.expect("the step has every parameter of a stage");
        let numel = body.declared[number].numel;
        let first = firsts[number] + stored.part.map_or(0, |part| part.index * numel.div_ceil(PART_ALIGN));
        for own in here.mine {
            let of = own.start.max(range.start)..own.end.min(range.start + numel);
            if of.is_empty() {
                continue;
            }
            let at = of.start - range.start;
            assert!(at.is_multiple_of(PART_ALIGN), "parts begin where blocks do");
            found.push((of, first + at / PART_ALIGN));
        }
    }
    found
}

/// The number of each parameter's first block, and how many blocks there are.
fn first_blocks(declared: &[Declared]) -> Vec<usize> {
    let mut firsts = vec![0];
    for param in declared {
        let parts = param.part.map_or(1, |part| part.of);
        firsts.push(firsts[firsts.len() - 1] + parts * param.numel.div_ceil(PART_ALIGN));
    }
    firsts
}

#[cfg(test)]
mod tests {
    use polyreme_graph::{Builder, Init, differentiate};

    use super::*;

    /// A network whose parameters have one short, one long and one odd tensor.
    fn graph() -> Graph {
        let mut b = Builder::new();
        let x = b.input("x", [2, 30], DType::F32).unwrap();
        let w1 = b.param("w1", [100, 30], Init::Const(0.1)).unwrap();
        let b1 = b.param("b1", [100], Init::Const(0.1)).unwrap();
        let h = b.linear(x, w1, Some(b1)).unwrap();
        let w2 = b.param("w2", [41, 100], Init::Const(0.1)).unwrap();
        let h = b.linear(h, w2, None).unwrap();
        let loss = b.mean(h, &[0, 1]).unwrap();
        differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
    }

    #[test]
    fn parts_are_nearly_equal_and_of_whole_blocks() {
        let graph = graph();
        let ranges = param_ranges(&graph);
        let len = ranges.last().map_or(0, |(_, r)| r.end);
        for ranks in 1..9 {
            let cuts = block_cuts(&graph, len, ranks);
            assert_eq!((cuts[0], cuts[ranks], cuts.len()), (0, len, ranks + 1));
            for w in cuts.windows(2) {
                assert!(w[0] <= w[1] && w[1] - w[0] <= len / ranks + 2 * PART_ALIGN, "{cuts:?}");
            }
            for cut in cuts.iter().filter(|cut| **cut < len) {
                let (_, range) = ranges.iter().find(|(_, r)| r.contains(cut)).unwrap();
                assert!((cut - range.start).is_multiple_of(PART_ALIGN), "{cuts:?}");
            }
        }
    }

    #[test]
    fn blocks_are_numbered_as_the_model_declares_parameters() {
        let declared = polyreme_graph::body::declared(&graph());
        assert_eq!(first_blocks(&declared), [0, 3, 4, 9]);
    }
}
