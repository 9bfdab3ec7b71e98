//! A program: what one rank does in one step. Plain data with several readers; `exec` is the one that runs it.

use std::fmt;

use polyreme_kernels::optim::Optimizer;

use crate::error::TraceError;
use crate::fuse::fuse;
use crate::grad::differentiate;
use crate::graph::{Graph, NodeId, ValueId};
use crate::memory::readiness;

/// One thing that a rank does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Instr {
    /// Computes a node.
    Compute(NodeId),
    /// Finds the factor that brings the norm of all gradients down to a maximum; the updates multiply by it.
    Clip {
        /// The maximum.
        max_norm: f64,
    },
    /// Updates parameters `first..last`, counted in the order in which gradients become ready.
    Update {
        /// The first one.
        first: usize,
        /// One past the last.
        last: usize,
    },
    /// Takes a new value over into a state.
    Keep {
        /// The state.
        state: usize,
        /// The value.
        value: ValueId,
    },
}

/// What one rank does in one step.
#[derive(Clone, Debug)]
pub struct Program {
    /// The nodes, with element-wise work fused.
    pub graph: Graph,
    /// In this order.
    pub instrs: Vec<Instr>,
    /// What updates do.
    pub optimizer: Option<Optimizer>,
}

impl Program {
    /// A forward pass; states stay as they are.
    pub fn forward(graph: &Graph) -> Program {
        let graph = fuse(&Graph { updates: Vec::new(), grads: Vec::new(), ..graph.clone() });
        let instrs = computes(&graph);
        Program { graph, instrs, optimizer: None }
    }

    /// The forward and backward pass, without an update.
    pub fn gradients(step: &Graph) -> Program {
        let graph = fuse(step);
        let mut instrs = computes(&graph);
        instrs.extend(keeps(&graph));
        Program { graph, instrs, optimizer: None }
    }

    /// A whole training step: forward, backward, clipping if asked for, update.
    pub fn train(step: &Graph, optimizer: Optimizer, clip: Option<f64>) -> Program {
        let mut program = Program::gradients(step);
        program.instrs.extend(clip.map(|max_norm| Instr::Clip { max_norm }));
        let learnt = program.graph.grads.iter().flatten().count();
        program.instrs.push(Instr::Update { first: 0, last: learnt });
        program.optimizer = Some(optimizer);
        program
    }

    /// Traces to a training step in one go: differentiates `loss`, an output of `forward`, and adds the update.
    pub fn train_loss(forward: &Graph, loss: ValueId, optimizer: Optimizer) -> Result<Program, TraceError> {
        Ok(Program::train(&differentiate(forward, loss)?, optimizer, None))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let order = readiness(&self.graph);
        for instr in &self.instrs {
            match instr {
                Instr::Compute(n) => {
                    writeln!(f, "{}", crate::print::line(&self.graph, &self.graph.nodes[n.idx()]))?
                }
                Instr::Clip { max_norm } => writeln!(f, "clip {max_norm}")?,
                Instr::Update { first, last } => {
                    let names: Vec<_> =
                        order[*first..*last].iter().map(|&p| self.graph.params[p].name.as_str()).collect();
                    writeln!(f, "update {}", names.join(" "))?;
                }
                Instr::Keep { state, value } => {
                    writeln!(f, "keep {} = {value}", self.graph.states[*state].name)?
                }
            }
        }
        Ok(())
    }
}

fn computes(graph: &Graph) -> Vec<Instr> {
    (0..graph.nodes.len() as u32).map(|i| Instr::Compute(NodeId(i))).collect()
}

fn keeps(graph: &Graph) -> impl Iterator<Item = Instr> + '_ {
    graph.updates.iter().map(|&(state, value)| Instr::Keep { state, value })
}
