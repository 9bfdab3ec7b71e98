//! What is made of the output of a network to answer with it, before ranks send it to each other.
//!
//! ```text
//! rows        y [n, ..]      gathered along the data axis: [ranks, n, ..], those of each copy of the network in turn
//! one row     y [n, c]       Σ over rows of y · at, with an input at [n, 1] that is 1 at one row and 0 at the others: [1, c]
//! ```
//!
//! One row is what the next token of a text needs: the others stay where they are computed. The sum has one term that is not 0,
//! so it is exact; and rows by element and sums of rows have rules wherever matrices are split or sequences are cut. It is made
//! of what a precision leaves, which is f32: rounding in between would change answers.

use polyreme_graph::graph::Input;
use polyreme_graph::op::{Binary, ReduceKind};
use polyreme_graph::{Axis, DType, ExchangeKind, Graph, Op, ValueId};

use crate::plan::Plan;

/// Which rows of a network's output make an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnswerRows {
    /// All its rows, of all copies of the network.
    All,
    /// One row, which the input [`AnswerRows::AT`] says.
    One,
}

/// The layer of the nodes.
const LAYER: &str = "answer";

impl AnswerRows {
    /// The input that is 1 at the row that is asked for, and 0 at the others.
    pub const AT: &'static str = "at";

    /// A forward pass whose one output becomes an answer of the same name.
    ///
    /// # Panics
    /// If there are several outputs, or if one row is asked for of what has no rows.
    pub fn made_of(self, graph: &Graph, plan: &Plan) -> Graph {
        let mut graph = graph.clone();
        let [(_, y)] = graph.outputs[..] else { panic!("one output is answered with") };
        graph.outputs[0].1 = match self {
            AnswerRows::All if plan.ranks() == 1 => y,
            AnswerRows::All => {
                let (rank, ranks) = (plan.mesh.place(plan.rank, Axis::Data), plan.ranks());
                let kind = ExchangeKind::Gather { ranks, rank };
                push(&mut graph, Op::Exchange { axis: Axis::Data, kind }, &[y])
            }
            AnswerRows::One => {
                let rows = graph.shape(y).dims()[0];
                let op = Op::Input(graph.inputs.len());
                let at = graph.push_shaped(op, &[], "", vec![([rows, 1].into(), DType::F32)])[0];
                graph.inputs.push(Input { name: AnswerRows::AT.into(), value: at });
                let picked = push(&mut graph, Op::Binary(Binary::Mul), &[y, at]);
                push(&mut graph, Op::Reduce { kind: ReduceKind::Sum, axes: vec![0] }, &[picked])
            }
        };
        graph.n_forward = graph.nodes.len();
        graph
    }
}

fn push(graph: &mut Graph, op: Op, inputs: &[ValueId]) -> ValueId {
    let name = op.name();
    match graph.push(op, inputs, LAYER) {
        Ok(outputs) => outputs[0],
        Err(error) => panic!("{name} of an answer: {error}"),
    }
}
