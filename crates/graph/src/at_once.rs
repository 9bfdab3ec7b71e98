//! Updates that are made while gradients are computed.
//!
//! ```text
//!  at the end                        at once
//!  %8 = matmul …    dW2              %8 = matmul …   dX
//!  %9 = matmul …    dX               %9 = matmul …   dW2, update fc2.weight
//!  %10 = matmul …   dW1              %10 = matmul …  dW1, update fc1.weight
//!  update fc2.weight fc1.weight
//! ```
//!
//! A weight's gradient is mostly one product, and most updates look at one element at a time. So each block of the
//! gradient can go into the update as soon as it is complete, while it is in cache; it is then written nowhere, and the
//! arena of gradients is left with what is no product. That takes a lone rank whose step is one piece, no clipping (the
//! norm is that of all gradients), and a parameter that nobody reads any more: such products come after the last reader
//! of their parameter.

use std::collections::BTreeMap;

use polyreme_kernels::optim::Optimizer;

use crate::fuse::fuse;
use crate::graph::{Graph, NodeId, ValueId};
use crate::memory::{MemoryPlan, Place, param_ranges, readiness, reshape_root};
use crate::op::Op;
use crate::program::{Instr, Program};

impl Program {
    /// A whole training step that updates while it computes gradients, where it can. Nobody can ask for gradients, and
    /// the program is only run as a whole.
    pub fn train_at_once(step: &Graph, optimizer: Optimizer) -> Program {
        let mut program = Program::late_gradients(step);
        let learnt = program.graph.grads.iter().flatten().count();
        program.instrs.push(Instr::Update { first: 0, last: learnt });
        program.optimizer = Some(optimizer);
        program.update_at_once();
        program
    }

    /// [`Program::gradients`], with products that make gradients behind the last reader of their parameters.
    pub fn late_gradients(step: &Graph) -> Program {
        Program::of(late(&fuse(step)))
    }

    /// Has parameters updated while their gradients are computed, where that can be done, instead of at the end.
    ///
    /// # Panics
    /// If other ranks take part, if gradients are clipped, or if no instruction updates all parameters.
    pub fn update_at_once(&mut self) {
        let alone = self.role.as_ref().is_none_or(|r| r.ranks == 1 && r.shards.is_none());
        let clips = self.instrs.iter().any(|i| matches!(i, Instr::Clip { .. }));
        assert!(alone && !clips && self.buffers.is_none(), "a lone rank's whole step, without clipping");
        if !self.optimizer.is_some_and(|o| o.by_element()) {
            return;
        }
        let mut of_node = vec![None; self.graph.nodes.len()];
        for (param, node) in products(&self.graph) {
            if last_reader(&self.graph, self.graph.params[param].value) < node {
                of_node[node] = Some(param);
            }
        }
        for instr in &mut self.instrs {
            if let Instr::Compute(node) = *instr
                && let Some(param) = of_node[node.idx()]
            {
                *instr = Instr::Apply { node, param };
            }
        }
        let at = self.instrs.iter().position(|i| matches!(i, Instr::Update { .. }));
        let at = at.expect("an update of all parameters");
        let rest = self.updates_of_the_rest();
        self.instrs.splice(at..=at, rest);
    }

    /// By parameter, whether it is updated while its gradient is computed.
    fn at_once(&self) -> Vec<bool> {
        let mut at_once = vec![false; self.graph.params.len()];
        for instr in &self.instrs {
            if let Instr::Apply { param, .. } = *instr {
                at_once[param] = true;
            }
        }
        at_once
    }

    /// Updates of the runs of parameters that are left for the end.
    fn updates_of_the_rest(&self) -> Vec<Instr> {
        let at_once = self.at_once();
        let learnt = self.graph.grads.iter().flatten().count();
        let order = readiness(&self.graph);
        let mut updates: Vec<Instr> = Vec::new();
        for (i, _) in order[..learnt].iter().enumerate().filter(|(_, p)| !at_once[**p]) {
            match updates.last_mut() {
                Some(Instr::Update { last, .. }) if *last == i => *last += 1,
                _ => updates.push(Instr::Update { first: i, last: i + 1 }),
            }
        }
        updates
    }

    /// Takes gradients that are written nowhere out of a plan; the others lie one after the other.
    pub fn place_gradients(&self, plan: &mut MemoryPlan) {
        let at_once = self.at_once();
        if !at_once.contains(&true) {
            return;
        }
        // By the old place of each gradient, the new one.
        let mut places = BTreeMap::new();
        plan.grad_len = 0;
        for (p, range) in param_ranges(&self.graph) {
            let place = if at_once[p] { Place::Nowhere } else { Place::Grad(plan.grad_len) };
            places.insert(range.start, place);
            plan.grad_len += if at_once[p] { 0 } else { range.len() };
        }
        for place in &mut plan.places {
            if let Place::Grad(at) = place {
                *place = places[at];
            }
        }
    }
}

/// Parameters whose gradient is a product that nobody else wants, and the node that makes it.
fn products(graph: &Graph) -> impl Iterator<Item = (usize, usize)> + '_ {
    let uses = graph.use_counts();
    graph.grads.iter().enumerate().filter_map(move |(param, grad)| {
        let grad = (*grad)?;
        let node = graph.producer(grad);
        let product = matches!(node.op, Op::MatMul { .. }) && graph.shape(grad).rank() == 2;
        // Once: as this gradient.
        (product && uses[grad.idx()] == 1).then_some((param, graph.value(grad).producer.idx()))
    })
}

/// The last node that reads a value, itself or reshaped.
fn last_reader(graph: &Graph, value: ValueId) -> usize {
    let reads = |i: usize| graph.nodes[i].inputs.iter().any(|&v| reshape_root(graph, v) == value);
    (0..graph.nodes.len()).rev().find(|&i| reads(i)).unwrap_or(0)
}

/// The graph with products that make gradients behind the last reader of their parameters.
fn late(graph: &Graph) -> Graph {
    let mut behind: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    let mut moved = vec![false; graph.nodes.len()];
    for (param, node) in products(graph) {
        let reader = last_reader(graph, graph.params[param].value);
        if reader > node {
            behind[reader].push(node);
            moved[node] = true;
        }
    }
    let order: Vec<usize> = (0..graph.nodes.len())
        .flat_map(|i| (!moved[i]).then_some(i).into_iter().chain(behind[i].iter().copied()))
        .collect();
    let late = graph.reordered(&order);
    late.verify();
    late
}

impl Instr {
    /// The node that it computes, if it computes one.
    pub fn node(&self) -> Option<NodeId> {
        match *self {
            Instr::Compute(node) | Instr::Apply { node, .. } => Some(node),
            _ => None,
        }
    }
}
