//! Which chunk each node of a step belongs to.
//!
//! A node of the forward pass is where its place says. A node of the backward pass is where the forward node is that it
//! differentiates: both come from the same traced node ([`polyreme_graph::graph::Node::origin`]).
//!
//! Some nodes have no home. Leaves, reshapes, and casts of what a rank has anyway cost nothing or little, so each chunk that
//! needs one has its own.
//!
//! # Why gradients only ever go to earlier chunks
//! `differentiate` walks forward nodes from the last to the first, and adds the contribution of a node to a gradient in that
//! node's row: `((d3 + d2) + d1)` for users 1, 2, 3 in the order of the trace. Homes do not decrease along the trace, so
//! each sum is at home in the earliest chunk of its contributors, after the partial sums of later chunks. There is no
//! `(a + b) + c` with `b` in an earlier chunk than `c`.

use std::collections::{BTreeMap, BTreeSet};

use polyreme_graph::{Graph, Op, ValueId};

/// The chunk of each node.
pub(crate) struct Homes {
    /// By node; `None` for what each chunk that needs it has itself.
    of_node: Vec<Option<usize>>,
    n_chunks: usize,
}

impl Homes {
    /// Homes of all nodes from the places of those of the forward pass.
    pub(crate) fn new(step: &Graph, place: &[usize]) -> Homes {
        assert_eq!(place.len(), step.n_forward, "a place for each node of the forward pass");
        let everywhere = everywhere(step);
        let mut homes = Homes { of_node: vec![None; step.nodes.len()], n_chunks: 1 };
        // By traced node; and those that each chunk has itself.
        let (mut of_origin, mut views) = (BTreeMap::new(), BTreeSet::new());
        let mut last = 0;
        for (i, &chunk) in place.iter().enumerate() {
            let node = &step.nodes[i];
            if everywhere[i] {
                views.insert(node.origin);
                continue;
            }
            assert!(
                chunk >= last,
                "node {i} of layer {} is in an earlier chunk than the one before",
                node.layer
            );
            last = chunk;
            homes.of_node[i] = Some(chunk);
            of_origin.insert(node.origin, chunk);
        }
        homes.n_chunks = last + 1;
        for i in (step.n_forward..step.nodes.len()).filter(|&i| !everywhere[i]) {
            let node = &step.nodes[i];
            let before = || of_origin.range(..=node.origin).next_back().map_or(0, |(_, &chunk)| chunk);
            homes.of_node[i] = Some(match of_origin.get(&node.origin) {
                Some(&chunk) => chunk,
                // A sum in the row of a reshape: in the earliest chunk of its operands.
                None if views.contains(&node.origin) => {
                    let gradient = |v: &&ValueId| step.value(**v).producer.idx() >= step.n_forward;
                    let chunks = node.inputs.iter().filter(gradient).filter_map(|&v| homes.of_value(step, v));
                    chunks.min().unwrap_or_else(before)
                }
                // The forward node is gone, as nothing but its gradient was needed.
                None => before(),
            });
        }
        homes
    }

    /// How many chunks there are.
    pub(crate) fn n_chunks(&self) -> usize {
        self.n_chunks
    }

    /// The chunk of a node; `None` for what each chunk has itself.
    pub(crate) fn of_node(&self, node: usize) -> Option<usize> {
        self.of_node[node]
    }

    /// The chunk that computes a value, or what it is a view of; `None` for a leaf.
    pub(crate) fn of_value(&self, step: &Graph, v: ValueId) -> Option<usize> {
        self.of_node(step.value(self.source(step, v)).producer.idx())
    }

    /// What a value is a view of: a leaf, or the result of a node that has a home.
    pub(crate) fn source(&self, step: &Graph, mut v: ValueId) -> ValueId {
        loop {
            let from = step.value(v).producer.idx();
            match step.nodes[from].inputs.first() {
                Some(&operand) if self.of_node(from).is_none() => v = operand,
                _ => return v,
            }
        }
    }
}

/// What a value is made of.
#[derive(Clone, Copy, PartialEq)]
enum Made {
    /// Of constants.
    Constant,
    /// Of one parameter, state or input, without computing anything.
    Stored,
    /// By a node of the forward pass, or a view of its result.
    Forward,
    Backward,
}

/// For each node, whether every chunk that needs it has its own: leaves, reshapes of anything (what crosses is what they show),
/// casts of leaves, and casts for the backward pass of what the forward pass computed.
fn everywhere(step: &Graph) -> Vec<bool> {
    let mut made: Vec<Made> = Vec::with_capacity(step.values.len());
    let of_node = |(i, node): (usize, &polyreme_graph::graph::Node)| {
        let forward = i < step.n_forward;
        let operand = node.inputs.first().map(|v| made[v.idx()]);
        let (everywhere, what) = match (&node.op, operand) {
            (Op::Const(_), _) => (true, Made::Constant),
            (Op::Input(_) | Op::Param(_) | Op::State(_), _) => (true, Made::Stored),
            (Op::Reshape, Some(of)) => (true, of),
            (Op::Expand, Some(Made::Constant)) => (true, Made::Constant),
            (Op::Cast(_), Some(of @ (Made::Constant | Made::Stored))) => (true, of),
            (Op::Cast(_), Some(Made::Forward)) if !forward => (true, Made::Forward),
            _ => (false, if forward { Made::Forward } else { Made::Backward }),
        };
        made.extend(node.outputs.iter().map(|_| what));
        everywhere
    };
    step.nodes.iter().enumerate().map(of_node).collect()
}
