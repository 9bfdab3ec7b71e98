//! Whether the layers that a job names are in its network.

use polyreme_data::Spec;
use polyreme_graph::Graph;
use polyreme_graph::graph::Node;
use polyreme_graph::op::Op;

use crate::error::TrainError;
use crate::job::{Job, nearest};
use crate::lower::network_graph;
use crate::net::Net;

/// Checks that every layer that is to stay in f32 is one of the network.
pub(super) fn check_f32_layers(job: &Job, net: &Net, spec: &Spec) -> Result<(), TrainError> {
    if job.f32_layers().next().is_none() {
        return Ok(());
    }
    let graph = network_graph(net, spec, 2)?;
    let known = paths(&graph);
    // A custom layer may leave nothing in the graph, such as a `flatten` of rows.
    let is_known = |path: &str| known.contains(&path) || job.model.has_custom_layer(path);
    let Some(path) = job.f32_layers().find(|path| !is_known(path)) else { return Ok(()) };
    let hint = match nearest(path, known.iter().copied()) {
        Some(near) => format!("did you mean {near:?}?"),
        None => {
            let outermost: Vec<_> = known.iter().copied().filter(|p| !p.contains('.')).collect();
            format!("its outermost layers are {}", outermost.join(", "))
        }
    };
    Err(TrainError::NoLayer { path: path.into(), hint })
}

/// The paths of all layers, each behind those that it is in, in the order in which they run.
fn paths(graph: &Graph) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    // An input is called by its name, and what is in no layer is of the whole model.
    let is_of_layer = |node: &&Node| !matches!(node.op, Op::Input(_)) && node.layer != "model";
    for node in graph.nodes.iter().filter(is_of_layer) {
        let ends = node.layer.match_indices('.').map(|(at, _)| at).chain([node.layer.len()]);
        for path in ends.map(|end| &node.layer[..end]).filter(|path| !path.is_empty()) {
            if !found.contains(&path) {
                found.push(path);
            }
        }
    }
    found
}
