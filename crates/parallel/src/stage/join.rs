//! The chunks of one rank as one body.
//!
//! ```text
//!  forward a │ forward b │ input gradients b │ input gradients a │ weight gradients b │ weight gradients a
//! ```
//!
//! A schedule orders these blocks over microbatches: within a microbatch each block needs at most those before it, and what
//! arrives from other ranks. Where the schedule runs nothing between input and weight gradients of a chunk, both can be one
//! block, `backward b │ backward a`: what is only needed within it is in memory for one microbatch, and not for all that are
//! in flight. What crosses between two chunks of the rank becomes a plain edge. A tied parameter that several
//! of them use is one parameter, and its gradient is the sum of theirs, from the last chunk to the first.

use std::collections::HashMap;
use std::ops::Range;

use polyreme_graph::body::kinds;
use polyreme_graph::fuse::fused_sum;
use polyreme_graph::graph::{Input, Node, Rebuild, Stored, Value};
use polyreme_graph::{BlockKind, Graph, NodeId, Op, ValueId};

use super::cut::{ChunkGraph, Crossing};

/// What one rank computes for a microbatch.
#[derive(Clone, PartialEq, Debug)]
pub struct StageBody {
    /// The nodes of all its chunks.
    pub graph: Graph,
    /// Which nodes do what: chunk, kind, nodes. They follow each other, and cover the graph. A backward pass in one go is of the
    /// kind of its input gradients.
    pub ranges: Vec<(usize, BlockKind, Range<usize>)>,
    /// What it gets from other ranks.
    pub arrives: Vec<Crossing>,
    /// What it computes for other ranks.
    pub leaves: Vec<Crossing>,
}

/// In which order a rank's chunks compute gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackwardOrder {
    /// Weight gradients when the schedule says so.
    Apart,
    /// Each chunk in one go, in the order of differentiation: activations that are computed again are needed for the shortest
    /// time, but what other ranks wait for comes last.
    ByLayer,
}

/// Joins the chunks of one rank, ascending, whose graphs have been fused.
pub fn join(chunks: &[ChunkGraph], backward: BackwardOrder) -> StageBody {
    let here = |chunk: usize| chunks.iter().any(|c| c.chunk == chunk);
    let all = Concatenated::new(chunks, &here);
    let mut to = Rebuild::new(&all.graph);
    to.graph.samples = chunks.first().map(|c| c.graph.n_samples());
    let mut ranges = Vec::new();
    let mut grads = vec![None; all.graph.params.len()];
    for (c, kinds) in order(chunks.len(), backward) {
        let start = to.graph.nodes.len();
        for i in all.nodes_of(c).filter(|&i| kinds.contains(&all.kinds[i]) && !all.replaced(i)) {
            to.copy(&all.graph, i);
            for &v in &all.graph.nodes[i].outputs {
                for &same in all.same.get(&v).into_iter().flatten() {
                    to.map[same.idx()] = Some(to.get(v));
                }
            }
        }
        if kinds.contains(&BlockKind::WeightGrad) {
            all.add_grads(c, &mut to, &mut grads);
        }
        let kind = kinds[0];
        ranges.push((chunks[c].chunk, kind, start..to.graph.nodes.len()));
        if kind == BlockKind::Forward {
            to.graph.n_forward = to.graph.nodes.len();
        }
    }
    let graph = Graph { grads, ..to.finish(&all.graph) };
    graph.verify();
    let arrives = chunks.iter().flat_map(|c| &c.arrives).filter(|c| !here(c.from)).cloned().collect();
    let leaves = chunks.iter().flat_map(|c| &c.leaves).filter(|c| !here(c.to)).cloned().collect();
    StageBody { graph, ranges, arrives, leaves }
}

/// The blocks of this number of chunks: of which chunk each is, and the kinds of its nodes.
fn order(n: usize, backward: BackwardOrder) -> Vec<(usize, &'static [BlockKind])> {
    use BlockKind::{Forward, InputGrad, WeightGrad};
    let blocks: &'static [&'static [BlockKind]] = match backward {
        BackwardOrder::Apart => &[&[InputGrad], &[WeightGrad]],
        BackwardOrder::ByLayer => &[&[InputGrad, WeightGrad]],
    };
    let forward = (0..n).map(|c| (c, &[Forward] as &[BlockKind]));
    let back = blocks.iter().flat_map(|kinds| (0..n).rev().map(move |c| (c, *kinds)));
    forward.chain(back).collect()
}

/// All chunks' nodes in one list, one chunk after another.
struct Concatenated {
    /// Inputs, parameters and states once each; no gradients.
    graph: Graph,
    /// By node.
    kinds: Vec<BlockKind>,
    /// By chunk.
    first_node: Vec<usize>,
    /// By value, those of leaves that are the same value.
    same: HashMap<ValueId, Vec<ValueId>>,
    /// By parameter: the chunks with a gradient, ascending, and these.
    grads: Vec<Vec<(usize, ValueId)>>,
}

impl Concatenated {
    fn new(chunks: &[ChunkGraph], here: &dyn Fn(usize) -> bool) -> Concatenated {
        let (mut all, mut same) = (Graph::default(), HashMap::<ValueId, Vec<ValueId>>::new());
        let (mut all_kinds, mut first_node, mut grads) = (Vec::new(), vec![0], Vec::new());
        // What crosses inside of the rank, by name: where it is computed, and the inputs that get it.
        let (mut computed, mut inner) = (HashMap::new(), Vec::new());
        let mut arrived = Vec::new();
        for (c, chunk) in chunks.iter().enumerate() {
            let (graph, offset) = (&chunk.graph, all.values.len() as u32);
            let at = |v: ValueId| ValueId(v.0 + offset);
            let crosses = |name: &str| chunk.arrives.iter().chain(&chunk.leaves).find(|c| c.name == name);
            let mut numbers = Numbers::default();
            for input in &graph.inputs {
                let value = at(input.value);
                match crosses(&input.name) {
                    Some(crossing) if here(crossing.from) => inner.push((input.name.clone(), value)),
                    Some(_) => arrived.push(Input { name: input.name.clone(), value }),
                    None => {
                        let known = all.inputs.iter().position(|i| i.name == input.name);
                        match known {
                            Some(k) => same.entry(all.inputs[k].value).or_default().push(value),
                            None => all.inputs.push(Input { name: input.name.clone(), value }),
                        }
                    }
                }
            }
            numbers.params = union(&mut all.params, &graph.params, &at, &mut same);
            numbers.states = union(&mut all.states, &graph.states, &at, &mut same);
            grads.resize(all.params.len(), Vec::new());
            for (&p, grad) in numbers.params.iter().zip(&graph.grads) {
                grads[p].extend(grad.map(|v| (c, at(v))));
            }
            all.updates.extend(graph.updates.iter().map(|&(s, v)| (numbers.states[s], at(v))));
            for (name, v) in &graph.outputs {
                match crosses(name) {
                    Some(crossing) if here(crossing.to) => drop(computed.insert(name.clone(), at(*v))),
                    _ => all.outputs.push((name.clone(), at(*v))),
                }
            }
            let node_offset = all.nodes.len() as u32;
            all.values.extend(graph.values.iter().map(|v| {
                let producer = NodeId(v.producer.0 + node_offset);
                Value { producer, ..v.clone() }
            }));
            all.nodes.extend(graph.nodes.iter().map(|node| Node {
                op: numbers.of(&node.op),
                inputs: node.inputs.iter().map(|&v| at(v)).collect(),
                outputs: node.outputs.iter().map(|&v| at(v)).collect(),
                ..node.clone()
            }));
            all_kinds.extend(kinds(graph));
            first_node.push(all.nodes.len());
        }
        for (name, value) in inner {
            same.entry(computed[&name]).or_default().push(value);
        }
        all.inputs.extend(arrived);
        for (k, input) in all.inputs.iter().enumerate() {
            let node = all.values[input.value.idx()].producer.idx();
            all.nodes[node].op = Op::Input(k);
        }
        Concatenated { graph: all, kinds: all_kinds, first_node, same, grads }
    }

    fn nodes_of(&self, chunk: usize) -> Range<usize> {
        self.first_node[chunk]..self.first_node[chunk + 1]
    }

    /// Whether a node is a leaf that is the same value as another one.
    fn replaced(&self, node: usize) -> bool {
        let node = &self.graph.nodes[node];
        node.op.is_leaf() && self.same.values().flatten().any(|v| *v == node.outputs[0])
    }

    /// The gradients of the parameters of which this is the first chunk that has one.
    fn add_grads(&self, chunk: usize, to: &mut Rebuild, grads: &mut [Option<ValueId>]) {
        for (of_param, grad) in self.grads.iter().zip(grads) {
            if of_param.first().is_none_or(|(first, _)| *first != chunk) {
                continue;
            }
            let sum = |sum: ValueId, v: ValueId| fused_sum(&mut to.graph, sum, v);
            let parts: Vec<_> =
                of_param.iter().rev().map(|&(_, v)| to.map[v.idx()].expect("is computed")).collect();
            *grad = parts.into_iter().reduce(sum);
        }
    }
}

/// The numbers of a chunk's parameters and states on the rank.
#[derive(Default)]
struct Numbers {
    params: Vec<usize>,
    states: Vec<usize>,
}

impl Numbers {
    /// The op with these numbers. Inputs are numbered when all are known.
    fn of(&self, op: &Op) -> Op {
        match *op {
            Op::Param(p) => Op::Param(self.params[p]),
            Op::State(s) => Op::State(self.states[s]),
            ref op => op.clone(),
        }
    }
}

/// Adds what is not known yet, and returns the number of each.
fn union(
    all: &mut Vec<Stored>,
    chunk: &[Stored],
    at: &dyn Fn(ValueId) -> ValueId,
    same: &mut HashMap<ValueId, Vec<ValueId>>,
) -> Vec<usize> {
    let number = |stored: &Stored| {
        let value = at(stored.value);
        let known = all.iter().position(|s| s.name == stored.name);
        match known {
            Some(k) => same.entry(all[k].value).or_default().push(value),
            None => all.push(Stored { value, ..stored.clone() }),
        }
        known.unwrap_or(all.len() - 1)
    };
    chunk.iter().map(number).collect()
}
