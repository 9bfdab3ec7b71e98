//! Costs from a measurement.
//!
//! Floating-point operations say little about an embedding, a norm or a convolution of few channels. So a rank may run the whole
//! step for a few times, as it would alone, and time the nodes of its body. These are other nodes than those of the step:
//! rewritten and fused. But each knows from which traced node it comes, and so its time counts as that of the traced node, in
//! the chunk of which it will be.

use std::collections::BTreeMap;

use polyreme_graph::Graph;

use super::homes::Homes;

/// By node of a step: the seconds of all nodes of a body that come from it, forwards and backwards. `seconds` are by node of the
/// body, which was made from this step, for one rank or for several.
///
/// # Panics
/// If there is not one time for each node of the body.
pub fn measured(step: &Graph, body: &Graph, seconds: &[f64]) -> Vec<f64> {
    assert_eq!(seconds.len(), body.nodes.len(), "a time for each node");
    let homes = Homes::new(step, &vec![0; step.n_forward]);
    // Nodes without a home, such as reshapes, count for the one before them.
    let at: BTreeMap<u32, usize> = (0..step.n_forward)
        .filter(|&i| homes.of_node(i).is_some())
        .map(|i| (step.nodes[i].origin, i))
        .collect();
    let mut costs = vec![0.0; step.nodes.len()];
    for (node, seconds) in body.nodes.iter().zip(seconds) {
        let found = at.range(..=node.origin).next_back().or(at.iter().next());
        if let Some((_, &i)) = found {
            costs[i] += seconds;
        }
    }
    costs
}
