//! A program: what one rank does in one step. Plain data with several readers; `exec` is the one that runs it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use polyreme_kernels::optim::Optimizer;

use crate::buffers::GradBuffers;
use crate::error::TraceError;
use crate::fuse::fuse;
use crate::grad::differentiate;
use crate::graph::{Graph, NodeId, ValueId};
use crate::memory::{param_ranges, readiness};

/// What ranks do together in a step. Elements are those of the arenas of gradients and parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Exchange {
    /// Adds up the loss, the weight of the samples and a few more numbers.
    Totals,
    /// Adds up gradients. With cuts, each rank gets the sum of its own part; otherwise everybody gets all.
    SumGrads {
        /// The elements.
        range: Range<usize>,
        /// Rank `r` has `cuts[r]..cuts[r + 1]`, counted from the start of the range.
        cuts: Option<Arc<[usize]>>,
        /// Where the first of them lies in the arena of gradients: at the start of the range, or in a buffer.
        at: usize,
    },
    /// Brings the parameters that each rank has updated to all.
    GatherParams {
        /// The elements.
        range: Range<usize>,
        /// As above.
        cuts: Arc<[usize]>,
    },
    /// Waits until every rank has updated its part of weights that they share.
    Meet,
}

/// How a rank stands to the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Role {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Whether all ranks work on one copy of the weights.
    pub shared_weights: bool,
    /// Reproducible: into how many logical shards the global batch is cut, whose gradients are added up in a fixed
    /// tree.
    pub shards: Option<usize>,
    /// By rank: the parts of the arena that it updates, in their order. Its moments are those of these parts, one
    /// after the other.
    pub parts: Vec<Vec<Range<usize>>>,
    /// Whether the parts are disjoint: each rank updates its own.
    pub sharded: bool,
}

impl Role {
    /// The parts of this rank.
    pub fn own(&self) -> &[Range<usize>] {
        &self.parts[self.rank]
    }
}

/// One thing that a rank does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Instr {
    /// Computes a node.
    Compute(NodeId),
    /// Computes a node whose only result is the gradient of a parameter, and updates the parameter with each block of it.
    /// The gradient is kept nowhere. See [`Program::train_at_once`].
    Apply {
        /// The node.
        node: NodeId,
        /// The parameter.
        param: usize,
    },
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
    /// Starts an exchange, by its number in the program.
    Start(usize),
    /// Waits for an exchange that was started.
    Wait(usize),
    /// Adds this rank's part of a sum that was waited for to its own gradients, and so frees the buffer. The first
    /// piece of a step sets them.
    Take {
        /// The sum, by its number in the program.
        exchange: usize,
        /// Where the part begins among this rank's own gradients: where its moments do among this rank's.
        to: usize,
    },
    /// Updates elements `start..end` of the arena: a part of this rank's own.
    UpdateOwn {
        /// The first one.
        start: usize,
        /// One past the last.
        end: usize,
        /// Where their moments begin among this rank's.
        moments_at: usize,
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
    /// What is done together with other ranks.
    pub exchanges: Vec<Exchange>,
    /// How this rank stands to others; `None` for a program that knows of none.
    pub role: Option<Role>,
    /// Where gradients lie until they are added up, if each rank keeps its own part of them only.
    pub buffers: Option<GradBuffers>,
}

impl Program {
    /// A forward pass; states stay as they are.
    pub fn forward(graph: &Graph) -> Program {
        let graph = fuse(&Graph { updates: Vec::new(), grads: Vec::new(), ..graph.clone() });
        let instrs = computes(&graph);
        Program { graph, instrs, optimizer: None, exchanges: Vec::new(), role: None, buffers: None }
    }

    /// The forward and backward pass, without an update.
    pub fn gradients(step: &Graph) -> Program {
        Program::of(fuse(step))
    }

    /// Every node of a fused graph in turn, and what is kept of it.
    pub(crate) fn of(graph: Graph) -> Program {
        let mut instrs = computes(&graph);
        instrs.extend(keeps(&graph));
        Program { graph, instrs, optimizer: None, exchanges: Vec::new(), role: None, buffers: None }
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
                Instr::Apply { node, param } => {
                    let line = crate::print::line(&self.graph, &self.graph.nodes[node.idx()]);
                    writeln!(f, "{line}, update {}", self.graph.params[*param].name)?;
                }
                Instr::Clip { max_norm } => writeln!(f, "clip {max_norm}")?,
                Instr::Update { first, last } => {
                    let names: Vec<_> =
                        order[*first..*last].iter().map(|&p| self.graph.params[p].name.as_str()).collect();
                    writeln!(f, "update {}", names.join(" "))?;
                }
                Instr::Start(i) => {
                    write!(f, "start {i}: {}", describe(&self.graph, &self.exchanges[*i]))?;
                    match (&self.exchanges[*i], &self.buffers) {
                        (Exchange::SumGrads { range, at, .. }, Some(_)) => {
                            writeln!(f, ", in {at}..{} of the buffers", at + range.len())?
                        }
                        _ => writeln!(f)?,
                    }
                }
                Instr::Take { exchange, .. } => writeln!(f, "take own part of {exchange}")?,
                Instr::Wait(i) => writeln!(f, "wait {i}")?,
                Instr::UpdateOwn { start, end, .. } => writeln!(f, "update elements {start}..{end}")?,
                Instr::Keep { state, value } => {
                    writeln!(f, "keep {} = {value}", self.graph.states[*state].name)?
                }
            }
        }
        Ok(())
    }
}

/// An exchange in words, with the parameters that it touches.
fn describe(graph: &Graph, exchange: &Exchange) -> String {
    let names = |range: &Range<usize>| {
        let within =
            param_ranges(graph).into_iter().filter(|(_, r)| r.start < range.end && range.start < r.end);
        within.map(|(p, _)| graph.params[p].name.clone()).collect::<Vec<_>>().join(" ")
    };
    match exchange {
        Exchange::Totals => "sum totals".into(),
        Exchange::SumGrads { range, cuts: None, .. } => format!("all-reduce gradients of {}", names(range)),
        Exchange::SumGrads { range, .. } => format!("reduce-scatter gradients of {}", names(range)),
        Exchange::GatherParams { range, .. } => format!("all-gather {}", names(range)),
        Exchange::Meet => "meet".into(),
    }
}

fn computes(graph: &Graph) -> Vec<Instr> {
    (0..graph.nodes.len() as u32).map(|i| Instr::Compute(NodeId(i))).collect()
}

fn keeps(graph: &Graph) -> impl Iterator<Item = Instr> + '_ {
    graph.updates.iter().map(|&(state, value)| Instr::Keep { state, value })
}
