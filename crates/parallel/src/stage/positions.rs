//! Where a step may be cut.
//!
//! A cut should be narrow: what crosses is sent twice for every microbatch, forwards as it is and backwards as its gradient.
//! So positions are those between layers, and those inside of a layer where one value is all that crosses, as after the sum
//! in the middle of a transformer's block, or between recurrent layers. Element-wise work stays with what it is fused to.
//! There is no cut before the loss, which an evaluation may not have.

use std::collections::BTreeSet;

use polyreme_graph::{Graph, Op, ValueId};

use super::homes::Homes;
use super::points::Places;

/// A place between two nodes of the forward pass.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Position {
    /// The first node behind it.
    pub node: usize,
    /// The layer of that node.
    pub layer: String,
    /// Its name, by which it is found in other graphs of the same model.
    pub name: String,
    /// Bytes that would cross in the forward pass.
    pub bytes: usize,
}

/// All positions at which a step may be cut, in the order of the forward pass. The graph has not been rewritten since it was
/// traced and differentiated.
pub fn positions(step: &Graph) -> Vec<Position> {
    let homes = Homes::new(step, &vec![0; step.n_forward]);
    let groups = groups(step, &homes);
    let places = Places::new(step);
    let last = last_use_of_params(step, &homes);
    let mut alive = Alive::new(step, &homes);
    let mut found = Vec::new();
    for (before, group) in groups.iter().zip(groups.iter().skip(1)) {
        let (node, layer) = (group[0], &step.nodes[group[0]].layer);
        alive.advance(step, node);
        let fused = group.iter().all(|&i| step.nodes[i].op.is_elementwise());
        let between = unit(layer) != unit(&step.nodes[before[0]].layer);
        if fused || node > last || !(between || alive.values.len() == 1) {
            continue;
        }
        if let Some(name) = places.name(node) {
            let bytes = alive.values.iter().map(|&v| step.value(v).bytes()).sum();
            found.push(Position { node, layer: layer.clone(), name, bytes });
        }
    }
    found
}

/// The last node of the forward pass that reads a parameter; what follows it is the loss.
fn last_use_of_params(step: &Graph, homes: &Homes) -> usize {
    let param = |v: &ValueId| matches!(step.producer(homes.source(step, *v)).op, Op::Param(_));
    let reads = |i: &usize| homes.of_node(*i).is_some() && step.nodes[*i].inputs.iter().any(param);
    (0..step.n_forward).rev().find(reads).unwrap_or(0)
}

/// The nodes of the forward pass that have a home; those that come from one traced node together.
fn groups(step: &Graph, homes: &Homes) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for i in (0..step.n_forward).filter(|&i| homes.of_node(i).is_some()) {
        match groups.last_mut() {
            Some(last) if step.nodes[last[0]].origin == step.nodes[i].origin => last.push(i),
            _ => groups.push(vec![i]),
        }
    }
    groups
}

/// The layer as a unit of the network: the path up to its first number, as `blocks.3` of `blocks.3.ln1`, or its first name.
pub(crate) fn unit(layer: &str) -> &str {
    let mut end = 0;
    for name in layer.split('.') {
        end += name.len();
        if name.parse::<usize>().is_ok() {
            return &layer[..end];
        }
        end += 1;
    }
    layer.split('.').next().unwrap_or(layer)
}

/// Values that have been computed and are still to be read by the forward pass.
struct Alive {
    /// By value: the last node of the forward pass that reads it or a view of it.
    last_read: Vec<usize>,
    values: BTreeSet<ValueId>,
    at: usize,
}

impl Alive {
    fn new(step: &Graph, homes: &Homes) -> Alive {
        let mut last_read = vec![0; step.values.len()];
        for i in (0..step.n_forward).filter(|&i| homes.of_node(i).is_some()) {
            for &v in &step.nodes[i].inputs {
                let source = homes.source(step, v);
                // Leaves do not cross.
                if homes.of_value(step, source).is_some() {
                    last_read[source.idx()] = i;
                }
            }
        }
        Alive { last_read, values: BTreeSet::new(), at: 0 }
    }

    /// Goes on to the place before `node`.
    fn advance(&mut self, step: &Graph, node: usize) {
        let made = step.nodes[self.at..node].iter().flat_map(|n| &n.outputs);
        self.values.extend(made);
        self.values.retain(|v| self.last_read[v.idx()] >= node);
        self.at = node;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_numbered_blocks_or_names() {
        for (layer, want) in [
            ("blocks.3.ln1", "blocks.3"),
            ("blocks.3", "blocks.3"),
            ("encoder.layers.10.linear1", "encoder.layers.10"),
            ("layer1.0.bn2", "layer1.0"),
            ("lstm.dropout_l0", "lstm"),
            ("4", "4"),
            ("fc", "fc"),
            ("", ""),
        ] {
            assert_eq!(unit(layer), want);
        }
    }
}
