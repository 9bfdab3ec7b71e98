//! What must be known of whole tensors before a rank that has parts of them can update these: sums of each part, added up along
//! the axes that split the tensor. Which sums those are, and where they lie, follows from the shapes of parameters and the
//! optimizer, so it is the same on all ranks that exchange them.
//!
//! Ranks of the tensor axis have parts of tensors, and those of the data axis may keep shards of these. A sum of a tensor that
//! is split along both is added up along one after the other. So sums lie in this order, and each axis exchanges one range:
//!
//! ```text
//!  means: of no axis | tensor | tensor and data | data      norms: tensor | tensor and data | data
//!                     ╰───── over tensor ──────╯                   ╰─── over tensor ───╯
//!                              ╰────── over data ──────╯                    ╰─── over data ───╯
//! ```
//!
//! Sums of a row are added up along axes that split columns, and those of a column along axes that split rows: a row that a rank
//! has whole needs no exchange.

use std::ops::Range;

use polyreme_kernels::optim::{Optimizer, PartSums, SumsOf};

use crate::graph::Graph;
use crate::part::Splits;
use crate::program::Axis;

/// The sums of all tensors of which a rank has parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitSums {
    /// How many numbers they are.
    pub len: usize,
    /// Those of each tensor.
    pub tensors: Vec<SplitParam>,
    /// What is exchanged, in this order.
    pub over: Vec<SumsOver>,
}

/// The sums of one tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitParam {
    /// The parameter, by its number in the graph.
    pub param: usize,
    /// Elements of the whole tensor.
    pub numel: usize,
    /// The last two dims of the whole tensor, if ranks split them and the optimizer keeps means of rows and columns.
    pub matrix: Option<[usize; 2]>,
    /// How many ranks have the same means of rows.
    pub row_copies: usize,
    /// Where the sums lie.
    pub sums: PartSums,
}

/// Sums that are added up along an axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SumsOver {
    /// When.
    pub what: SumsOf,
    /// The axis.
    pub axis: Axis,
    /// The sums.
    pub range: Range<usize>,
}

impl SplitSums {
    /// Whether there is something to measure.
    pub fn measures(&self, what: SumsOf) -> bool {
        match what {
            SumsOf::Means => self.tensors.iter().any(|t| t.matrix.is_some()),
            SumsOf::Norms => !self.tensors.is_empty(),
        }
    }
}

/// Along which axes a sum is added up: tensor, data.
type Along = [bool; 2];

/// The order of sums: see the head of this file.
const ORDER: [Along; 4] = [[false, false], [true, false], [true, true], [false, true]];

/// The kinds of sums of a tensor.
#[derive(Clone, Copy)]
enum Kind {
    Rows,
    Cols,
    Totals,
    Norms,
}

struct Sum {
    tensor: usize,
    kind: Kind,
    what: SumsOf,
    along: Along,
    len: usize,
}

/// The sums that updates of a graph's parameters wait for; `None` if ranks have no parts of them, or if the optimizer goes by
/// element.
pub fn split_sums(graph: &Graph, optimizer: &Optimizer) -> Option<SplitSums> {
    if optimizer.by_element() {
        return None;
    }
    let (mut tensors, mut sums) = (Vec::new(), Vec::new());
    for (p, stored) in graph.params.iter().enumerate() {
        let splits = stored.splits();
        let learnt = graph.grads.get(p).copied().flatten().is_some();
        if learnt && splits != Splits::default() {
            let dims = graph.shape(stored.value).dims();
            tensors.push(of_tensor(p, dims, splits, optimizer, tensors.len(), &mut sums));
        }
    }
    let (mut len, mut over) = (0, Vec::new());
    for what in SumsOf::ALL {
        let mut ends = vec![len];
        for along in ORDER {
            for sum in sums.iter().filter(|sum| sum.what == what && sum.along == along) {
                let (of, range): (&mut SplitParam, _) = (&mut tensors[sum.tensor], len..len + sum.len);
                len = range.end;
                match sum.kind {
                    Kind::Rows => of.sums.rows = range,
                    Kind::Cols => of.sums.cols = range,
                    Kind::Totals => of.sums.totals = range,
                    Kind::Norms => of.sums.norms = range,
                }
            }
            ends.push(len);
        }
        for (axis, range) in [(Axis::Tensor, ends[1]..ends[3]), (Axis::Data, ends[2]..ends[4])] {
            if !range.is_empty() {
                over.push(SumsOver { what, axis, range });
            }
        }
    }
    (!tensors.is_empty()).then_some(SplitSums { len, tensors, over })
}

/// A tensor of which a rank has a part with these dims.
fn of_tensor(
    param: usize,
    dims: &[usize],
    splits: Splits,
    optimizer: &Optimizer,
    tensor: usize,
    sums: &mut Vec<Sum>,
) -> SplitParam {
    let whole = splits.whole_dims(dims);
    let (axes, [cols_dim, rows_dim]) =
        ([splits.part, splits.shard], [1, 2].map(|back| dims.len().checked_sub(back)));
    let splits_dim = |dim: Option<usize>| axes.map(|part| part.is_some_and(|part| Some(part.dim) == dim));
    let [by_rows, by_cols] = [rows_dim, cols_dim].map(splits_dim);
    let either = [0, 1].map(|axis| by_rows[axis] || by_cols[axis]);
    let mut add = |what, kind, along, len| sums.push(Sum { tensor, kind, what, along, len });
    add(SumsOf::Norms, Kind::Norms, axes.map(|part| part.is_some()), 2);
    let factored = matches!(optimizer, Optimizer::Adafactor(_)) && either != [false; 2];
    let matrix = match (dims, &whole[..]) {
        ([.., rows, cols], [.., whole_rows, whole_cols]) if factored => {
            let count = dims[..dims.len() - 2].iter().product::<usize>();
            add(SumsOf::Means, Kind::Rows, by_cols, count * rows);
            add(SumsOf::Means, Kind::Cols, by_rows, count * cols);
            add(SumsOf::Means, Kind::Totals, either, count);
            Some([*whole_rows, *whole_cols])
        }
        _ => None,
    };
    let copies = axes.into_iter().flatten().filter(|part| Some(part.dim) == cols_dim);
    SplitParam {
        param,
        numel: whole.iter().product(),
        matrix,
        row_copies: copies.map(|part| part.of).product(),
        sums: PartSums::default(),
    }
}

#[cfg(test)]
mod tests {
    use polyreme_kernels::optim::{Adafactor, Moments};

    use super::*;
    use crate::{Builder, DType, Init, Part, differentiate};

    /// A network with a bias and two matrices, of which a rank has such parts and shards.
    fn graph(parts: [[Option<Part>; 2]; 3]) -> Graph {
        let mut b = Builder::new();
        let x = b.input("x", [2, 30], DType::F32).unwrap();
        let w1 = b.param("w1", [10, 30], Init::Const(0.1)).unwrap();
        let b1 = b.param("b1", [10], Init::Const(0.1)).unwrap();
        let h = b.linear(x, w1, Some(b1)).unwrap();
        let w2 = b.param("w2", [4, 10], Init::Const(0.1)).unwrap();
        let h = b.linear(h, w2, None).unwrap();
        let loss = b.mean(h, &[0, 1]).unwrap();
        let mut graph = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
        for (stored, [part, shard]) in graph.params.iter_mut().zip(parts) {
            (stored.part, stored.shard) = (part, shard);
        }
        graph
    }

    fn part(dim: usize, of: usize) -> Option<Part> {
        Some(Part { dim, groups: 1, index: 0, of })
    }

    #[test]
    fn each_axis_exchanges_the_sums_of_what_it_splits() {
        let graph = graph([[part(0, 2), part(0, 3)], [part(0, 2), None], [part(1, 2), part(0, 3)]]);
        assert_eq!(split_sums(&graph, &Optimizer::AdamW(Moments::DEFAULT)), None);
        let over = |what, axis, range| SumsOver { what, axis, range };
        let (means, norms) = (SumsOf::Means, SumsOf::Norms);

        let lamb = split_sums(&graph, &Optimizer::Lamb(Moments::DEFAULT)).unwrap();
        assert_eq!(lamb.over, [over(norms, Axis::Tensor, 0..6), over(norms, Axis::Data, 2..6)]);
        let at: Vec<_> = lamb.tensors.iter().map(|t| (t.numel, t.sums.norms.clone())).collect();
        assert_eq!(at, [(60 * 30, 2..4), (20, 0..2), (12 * 20, 4..6)]);
        assert!(lamb.tensors.iter().all(|t| t.matrix.is_none() && t.sums.rows.is_empty()));

        let ada = split_sums(&graph, &Optimizer::Adafactor(Adafactor::DEFAULT)).unwrap();
        let [w1, b1, w2] = &ada.tensors[..] else { panic!("three tensors") };
        // Both axes split the rows of w1: its rows are whole here, and its columns are added up along both.
        assert_eq!((w1.matrix, w1.row_copies, w1.sums.rows.clone()), (Some([60, 30]), 1, 0..10));
        assert_eq!((b1.matrix, b1.numel), (None, 20));
        // Two tensor ranks have the same rows of w2.
        assert_eq!((w2.matrix, w2.row_copies), (Some([12, 20]), 2));
        assert_eq!(w2.sums.rows, 10..14);
        assert_eq!((w1.sums.cols.clone(), w1.sums.totals.clone()), (14..44, 44..45));
        assert_eq!((w2.sums.totals.clone(), w2.sums.cols.clone()), (45..46, 46..56));
        assert_eq!(ada.over[..2], [over(means, Axis::Tensor, 10..46), over(means, Axis::Data, 14..56)]);
        assert_eq!(ada.over[2..], [over(norms, Axis::Tensor, 56..62), over(norms, Axis::Data, 58..62)]);
        assert_eq!(ada.len, 62);
    }
}
