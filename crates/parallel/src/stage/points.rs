//! Cuts as names: a place in the network that can be found again in every graph of the same model.
//!
//! A run compiles a model several times: for microbatches of other sizes, without dropout and with running statistics for an
//! evaluation, without a loss for predictions. All of these graphs must be cut in the same places, or a stage would not have
//! the parameters that it is asked for. So cuts are chosen once, and have names:
//!
//! ```text
//! blocks.3     before the first op of this layer and the layers inside of it
//! lstm#2       before op 2 of this very layer, counted from 0
//! ```
//!
//! Only ops that every graph of a model has are counted: neither dropout, which only training has, nor element-wise work, which
//! an evaluation has instead of a batch norm. A place that has no name is none where a cut is chosen.

use polyreme_graph::graph::{Node, is_within};
use polyreme_graph::{Graph, Op};

use super::homes::Homes;

/// What stands between the name of a layer and the number of an op.
const OF_LAYER: char = '#';

/// The nodes of a forward pass in the order of the trace, for names of places.
pub(crate) struct Places<'a> {
    step: &'a Graph,
    /// Those that a cut can be before: what each chunk has itself, and dropout, left out.
    nodes: Vec<usize>,
}

impl Places<'_> {
    /// The places of a graph that has not been rewritten since it was traced and differentiated.
    pub(crate) fn new(step: &Graph) -> Places<'_> {
        let homes = Homes::new(step, &vec![0; step.n_forward]);
        let may = |&i: &usize| homes.of_node(i).is_some() && !matches!(step.nodes[i].op, Op::Dropout { .. });
        Places { step, nodes: (0..step.n_forward).filter(may).collect() }
    }

    /// The nodes that a cut can be before, and the first one.
    pub(crate) fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// The name of the place before a node, if it has one.
    pub(crate) fn name(&self, node: usize) -> Option<String> {
        let layer = &self.step.nodes[node].layer;
        if self.first_of(layer) == Some(node) {
            return Some(layer.clone());
        }
        let number = self.counted(layer).position(|i| i == node)?;
        Some(format!("{layer}{OF_LAYER}{number}"))
    }

    /// The node before which the place with this name is.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.first_of(name).or_else(|| {
            let (layer, number) = name.rsplit_once(OF_LAYER)?;
            self.counted(layer).nth(number.parse().ok()?)
        })
    }

    fn first_of(&self, layer: &str) -> Option<usize> {
        self.nodes.iter().copied().find(|&i| is_within(&self.step.nodes[i].layer, layer))
    }

    /// The nodes of this very layer that every graph of a model has.
    fn counted(&self, layer: &str) -> impl Iterator<Item = usize> {
        let counts = move |node: &Node| node.layer == layer && is_counted(&node.op);
        self.nodes.iter().copied().filter(move |&i| counts(&self.step.nodes[i]))
    }
}

fn is_counted(op: &Op) -> bool {
    !op.is_elementwise() && !matches!(op, Op::BatchNorm { .. } | Op::Dropout { .. })
}
