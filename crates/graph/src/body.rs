//! Bodies and blocks: the graph of one microbatch, compiled once, and the runs of its nodes that a schedule orders.
//!
//! A body is what a rank computes for a microbatch of a fixed number of samples: forward and backward pass, fused. It
//! is cut into blocks: the forward pass, gradients of activations, gradients of weights. A schedule
//! ([`crate::program`]) says which block runs when, on the memory of which slot. Weight gradients are separate because
//! nothing in their microbatch waits for them: a pipeline may put them where it would otherwise idle.

use std::ops::Range;

use crate::fuse::fuse;
use crate::graph::{Graph, Stored, ValueId};
use crate::part::Part;

/// What the nodes of a block compute.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum BlockKind {
    /// The forward pass.
    Forward,
    /// Gradients of activations, and what other nodes of the backward pass read.
    InputGrad,
    /// What only the gradient of one parameter depends on.
    WeightGrad,
}

impl BlockKind {
    /// Its name in printed programs.
    pub fn name(self) -> &'static str {
        match self {
            BlockKind::Forward => "forward",
            BlockKind::InputGrad => "input gradients",
            BlockKind::WeightGrad => "weight gradients",
        }
    }
}

/// A run of a body's nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// The body, by its number in the program.
    pub body: usize,
    /// The nodes.
    pub nodes: Range<usize>,
    /// What they compute.
    pub kind: BlockKind,
    /// The parameter that the block's only node updates with each part of the gradient as it is computed. The gradient
    /// is never stored: see [`crate::at_once`].
    pub update: Option<usize>,
}

/// A run of a body's nodes that is not interrupted; in a pipeline other microbatches run before and after it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The chunk of the network, counted from its input over all stages.
    pub chunk: usize,
    /// What the nodes compute.
    pub kind: BlockKind,
    /// The nodes.
    pub nodes: Range<usize>,
}

/// A value of a body that one stage of a pipeline computes and another one reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// The value here.
    pub value: ValueId,
    /// The chunk that computes it. An earlier one sends activations, a later one gradients.
    pub from: usize,
    /// The chunk that reads it.
    pub to: usize,
    /// Which one it is of those from the one chunk to the other.
    pub number: usize,
}

/// A parameter that several stages of a pipeline use: each has the gradient of its own uses, and the parameter's is their sum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tied {
    /// The parameter, by its number here.
    pub param: usize,
    /// Its number among the tied parameters of the whole step, the same on all stages.
    pub number: usize,
    /// The stages that have it, ascending.
    pub stages: Vec<usize>,
}

/// A parameter of the whole step, which may be another stage's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Declared {
    /// Its name.
    pub name: String,
    /// Elements; of a tensor that ranks split among each other, those of one part.
    pub numel: usize,
    /// Which part of a tensor a rank has, if it is split.
    pub part: Option<Part>,
}

/// The parameters of a graph, in the order in which the model declares them.
pub fn declared(graph: &Graph) -> Vec<Declared> {
    let of =
        |p: &Stored| Declared { name: p.name.clone(), numel: graph.shape(p.value).numel(), part: p.part };
    graph.params.iter().map(of).collect()
}

/// The graph of one microbatch, ready to be cut into blocks.
#[derive(Clone, PartialEq, Debug)]
pub struct Body {
    /// The nodes, with element-wise work fused.
    pub graph: Graph,
    /// By node: the parameter that is updated while the node computes its gradient.
    pub applied: Vec<Option<usize>>,
    /// Whether products and convolutions take no algorithm that trades accuracy for speed.
    pub strict: bool,
    /// Whether results must not depend on the machine.
    pub reproducible: bool,
    /// Runs of nodes between which other microbatches may run, one after another; none if a microbatch is done before the next
    /// one begins.
    pub segments: Vec<Segment>,
    /// What it gets from other stages: inputs.
    pub arrives: Vec<Link>,
    /// What it computes for other stages.
    pub leaves: Vec<Link>,
    /// Parameters that other stages have too.
    pub tied: Vec<Tied>,
    /// All parameters of the step in the order in which the model declares them, those of other stages too.
    pub declared: Vec<Declared>,
    kinds: Vec<BlockKind>,
}

impl Body {
    /// The body of a step's graph, or of a forward pass.
    pub fn new(step: &Graph) -> Body {
        Body::of(fuse(step))
    }

    /// A forward pass; gradients and new states are left out.
    pub fn forward(graph: &Graph) -> Body {
        Body::new(&Graph { updates: Vec::new(), grads: Vec::new(), ..graph.clone() })
    }

    /// The body of a graph as it is: every element-wise node is a fused pass already.
    pub fn of(graph: Graph) -> Body {
        let kinds = kinds(&graph);
        Body {
            applied: vec![None; graph.nodes.len()],
            strict: false,
            reproducible: false,
            segments: Vec::new(),
            arrives: Vec::new(),
            leaves: Vec::new(),
            tied: Vec::new(),
            declared: declared(&graph),
            kinds,
            graph,
        }
    }

    /// The same with products and convolutions that take no algorithm that trades accuracy for speed, or that may.
    pub fn with_strict(self, strict: bool) -> Body {
        Body { strict, ..self }
    }

    /// The same with sums that have one order on every machine, or the fastest one on each.
    pub fn with_reproducible(self, reproducible: bool) -> Body {
        Body { reproducible, ..self }
    }

    /// Samples of the microbatch.
    pub fn samples(&self) -> usize {
        self.graph.n_samples()
    }

    /// Whether some parameter is updated while its gradient is computed.
    pub fn updates_at_once(&self) -> bool {
        self.applied.iter().any(Option::is_some)
    }

    /// How many parameters have a gradient.
    pub fn n_learnt(&self) -> usize {
        self.graph.grads.iter().flatten().count()
    }

    /// The blocks that `nodes` consist of, in their order.
    pub fn blocks(&self, body: usize, nodes: Range<usize>) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        for i in nodes {
            let (kind, update) = (self.kinds[i], self.applied[i]);
            match blocks.last_mut() {
                Some(last) if last.kind == kind && last.update.is_none() && update.is_none() => {
                    last.nodes.end = i + 1;
                }
                _ => blocks.push(Block { body, nodes: i..i + 1, kind, update }),
            }
        }
        blocks
    }
}

/// What depends on a node of the backward pass.
#[derive(Clone, Copy, PartialEq)]
enum Follows {
    Nothing,
    /// The gradient of this parameter and nothing else.
    Gradient(usize),
    More,
}

impl Follows {
    fn and(self, other: Follows) -> Follows {
        match (self, other) {
            (Follows::Nothing, x) | (x, Follows::Nothing) => x,
            (a, b) if a == b => a,
            _ => Follows::More,
        }
    }
}

/// The kind of each node. A node of the backward pass belongs to a weight gradient if one parameter's gradient is all
/// that depends on it.
pub fn kinds(graph: &Graph) -> Vec<BlockKind> {
    let mut of_value = vec![Follows::Nothing; graph.values.len()];
    for (param, grad) in graph.grads.iter().enumerate() {
        if let Some(v) = grad {
            of_value[v.idx()] = of_value[v.idx()].and(Follows::Gradient(param));
        }
    }
    graph.outputs.iter().map(|(_, v)| v).chain(graph.updates.iter().map(|(_, v)| v)).for_each(|v| {
        of_value[v.idx()] = Follows::More;
    });
    let mut kinds = vec![BlockKind::Forward; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev().take_while(|(i, _)| *i >= graph.n_forward) {
        let follows = node.outputs.iter().fold(Follows::Nothing, |f, v| f.and(of_value[v.idx()]));
        kinds[i] = match follows {
            Follows::Gradient(_) => BlockKind::WeightGrad,
            Follows::Nothing | Follows::More => BlockKind::InputGrad,
        };
        for v in &node.inputs {
            of_value[v.idx()] = of_value[v.idx()].and(follows);
        }
    }
    kinds
}
