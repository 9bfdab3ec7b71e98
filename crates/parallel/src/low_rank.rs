//! Which gradients of a bucket travel as factors, and where the factors of each are kept.

use std::ops::Range;

use polyreme_graph::memory::param_ranges;
use polyreme_graph::{Graph, LowRankLayout, LowRankMatrix};

/// The layout of a bucket that is such a range of the parameters, and where its right factors are kept among those of all buckets. They
/// lie in the order of the parameters, so it does not matter how these are cut into buckets.
pub(crate) fn layout(graph: &Graph, range: Range<usize>, rank: usize) -> (LowRankLayout, Range<usize>) {
    let (mut before, mut matrices) = (0, Vec::new());
    for (p, at) in param_ranges(graph) {
        let param = &graph.params[p];
        let matrix = LowRankMatrix::of(at.start, graph.shape(param.value).dims(), rank);
        let Some(matrix) = matrix.filter(|_| !param.learning.frozen && at.start < range.end) else {
            continue;
        };
        if at.start < range.start {
            before += matrix.right_len();
        } else {
            matrices.push(LowRankMatrix { at: at.start - range.start, ..matrix });
        }
    }
    let layout = LowRankLayout::new(rank, range.len(), matrices);
    let factors = before..before + layout.factors_len();
    (layout, factors)
}
