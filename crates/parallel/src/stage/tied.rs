//! Gradients of tied parameters, which several chunks use: the contribution of each chunk.

use std::collections::BTreeSet;

use polyreme_graph::grad::COPY;
use polyreme_graph::{Binary, Graph, Op, ValueId};

use super::homes::Homes;

/// For each parameter, the chunks with a node that reads it.
pub(crate) fn users(step: &Graph, homes: &Homes) -> Vec<BTreeSet<usize>> {
    let mut users = vec![BTreeSet::new(); step.params.len()];
    for (i, node) in step.nodes.iter().enumerate() {
        let Some(chunk) = homes.of_node(i) else { continue };
        for &v in &node.inputs {
            if let Op::Param(p) = step.producer(homes.source(step, v)).op {
                users[p].insert(chunk);
            }
        }
    }
    users
}

/// The gradient of a parameter that these chunks use, by chunk: values whose sum, from the last chunk to the first, is
/// `grad`. Their shapes may differ from the parameter's by a reshape.
///
/// A gradient is a chain of sums in the order of the chunks, so it is taken apart where the chunk changes. Where something
/// else than a reshape follows a sum over chunks, the sum stays whole, in the chunk that computes it.
pub(crate) fn contributions(
    step: &Graph,
    homes: &Homes,
    users: &BTreeSet<usize>,
    grad: ValueId,
) -> Vec<(usize, ValueId)> {
    // A gradient may have been computed for another value of a later chunk, as where a sum passes it on.
    let user = |v: ValueId| {
        let made = homes.of_value(step, v).unwrap_or(usize::MAX);
        users.range(..=made).next_back().or(users.first()).copied().or(homes.of_value(step, v)).unwrap_or(0)
    };
    let mut found = Vec::new();
    let mut whole = grad;
    // Copies are for gradients that share memory; each chunk makes those that it needs.
    while step.producer(whole).op == COPY {
        whole = step.producer(whole).inputs[0];
    }
    // What is not taken apart stays as it is, reshapes included: when it is computed says when the gradient is ready.
    let mut rest = whole;
    loop {
        let node = step.producer(rest);
        match node.op {
            Op::Reshape => rest = node.inputs[0],
            Op::Binary(Binary::Add)
                if user(node.inputs[0]) > user(rest)
                    && node.inputs.iter().all(|&v| step.shape(v) == step.shape(rest)) =>
            {
                found.push((user(rest), node.inputs[1]));
                whole = node.inputs[0];
                rest = whole;
            }
            _ => break,
        }
    }
    found.push((user(rest), whole));
    found
}
