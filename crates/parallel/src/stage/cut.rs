//! Cutting a step's graph into the graphs of its chunks.

use std::collections::BTreeSet;

use polyreme_graph::grad::{own_copy, settled};
use polyreme_graph::graph::{Input, Rebuild, Stored};
use polyreme_graph::memory::reshape_root;
use polyreme_graph::{Binary, DType, Graph, Op, Shape, ValueId};

use super::homes::Homes;
use super::tied::{contributions, users};

/// In which pass a value crosses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum CrossingPass {
    /// To a later chunk.
    Forward,
    /// A gradient, to an earlier chunk.
    Backward,
}

/// A value that one chunk computes and another one needs: an output of the first and an input of the second.
#[derive(Clone, PartialEq, Debug)]
pub struct Crossing {
    /// Its name in both graphs.
    pub name: String,
    /// The chunk that computes it.
    pub from: usize,
    /// The chunk that needs it.
    pub to: usize,
    /// When it crosses.
    pub pass: CrossingPass,
    /// The value in the graph of the whole step.
    pub value: ValueId,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Shape,
}

impl Crossing {
    /// Bytes that are sent.
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.bytes()
    }
}

/// The part of a step that one chunk computes: forward and backward pass.
#[derive(Clone, PartialEq, Debug)]
pub struct ChunkGraph {
    /// Its number, in the order of the forward pass.
    pub chunk: usize,
    /// The graph. Inputs of the step come first, then what arrives; outputs likewise.
    pub graph: Graph,
    /// What it gets from other chunks.
    pub arrives: Vec<Crossing>,
    /// What it computes for other chunks.
    pub leaves: Vec<Crossing>,
}

/// A parameter that several chunks use. The gradient of each is its own contribution, and the whole gradient their sum; with
/// the bits of the whole step if they are added from the last chunk to the first. A chunk may have no contribution: its
/// gradient is zero then, so that it has a place for the sum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tied {
    /// The parameter.
    pub name: String,
    /// The chunks, ascending.
    pub chunks: Vec<usize>,
    /// Those of them that have a contribution.
    pub contribute: Vec<usize>,
}

/// A step in chunks.
#[derive(Clone, PartialEq, Debug)]
pub struct Cut {
    /// The chunks, in the order of the forward pass.
    pub chunks: Vec<ChunkGraph>,
    /// Parameters that several of them use.
    pub tied: Vec<Tied>,
}

/// Why a step cannot be cut like this.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CutError {
    /// Several chunks use a state that changes.
    #[error(
        "state {name} changes in every step and is used in stages {chunks:?}; cut so that one stage has all layers that use it"
    )]
    SharedState {
        /// The state.
        name: String,
        /// The chunks that use it.
        chunks: Vec<usize>,
    },
}

/// Cuts a differentiated graph that has not been fused. `place` is the chunk of each node of the forward pass; it must not
/// decrease, but those of leaves and reshapes do not matter.
///
/// A parameter, state or input that nothing reads is in chunk 0. A forward pass does without: another chunk may have learnt it.
pub fn cut(step: &Graph, place: &[usize]) -> Result<Cut, CutError> {
    let homes = Homes::new(step, place);
    let n = homes.n_chunks();
    let mut parts = ChunkParts { step, homes, chunks: vec![ChunkPart::new(step); n] };
    let users = users(step, &parts.homes);
    for (name, v) in &step.outputs {
        let chunk = parts.homes.of_value(step, *v).unwrap_or(n - 1);
        parts.need(chunk, *v);
        parts.chunks[chunk].outputs.push((name.clone(), *v));
    }
    for &(state, v) in &step.updates {
        let chunk = parts.homes.of_value(step, v).unwrap_or(0);
        parts.need(chunk, v);
        parts.need(chunk, step.states[state].value);
        parts.chunks[chunk].updates.push((state, v));
    }
    for (p, grad) in step.grads.iter().enumerate() {
        let Some(grad) = *grad else { continue };
        for (chunk, v) in contributions(step, &parts.homes, &users[p], grad) {
            parts.need(chunk, v);
            parts.need(chunk, step.params[p].value);
            parts.chunks[chunk].grads[p] = Some(v);
        }
    }
    let learns = step.grads.iter().any(Option::is_some);
    let inputs = step.inputs.iter().map(|i| i.value);
    for v in inputs.chain(step.params.iter().chain(&step.states).map(|s| s.value)) {
        if learns && parts.holders(v).is_empty() {
            parts.need(0, v);
        }
    }
    for &(state, _) in &step.updates {
        let chunks = parts.holders(step.states[state].value);
        if chunks.len() > 1 {
            return Err(CutError::SharedState { name: step.states[state].name.clone(), chunks });
        }
    }
    let tied = step.params.iter().enumerate().map(|(p, param)| {
        let contribute = (0..n).filter(|c| parts.chunks[*c].grads[p].is_some()).collect();
        Tied { name: param.name.clone(), chunks: parts.holders(param.value), contribute }
    });
    let tied = tied.filter(|t| t.chunks.len() > 1).collect();
    let crossings = parts.crossings();
    let chunks = (0..n).map(|chunk| parts.build(chunk, &crossings)).collect();
    Ok(Cut { chunks, tied })
}

/// What a chunk consists of, in nodes and values of the whole step.
#[derive(Clone)]
struct ChunkPart {
    /// By node of the step.
    has: Vec<bool>,
    arrives: BTreeSet<ValueId>,
    outputs: Vec<(String, ValueId)>,
    updates: Vec<(usize, ValueId)>,
    /// By parameter.
    grads: Vec<Option<ValueId>>,
}

impl ChunkPart {
    fn new(step: &Graph) -> ChunkPart {
        ChunkPart {
            has: vec![false; step.nodes.len()],
            arrives: BTreeSet::new(),
            outputs: Vec::new(),
            updates: Vec::new(),
            grads: vec![None; step.params.len()],
        }
    }
}

struct ChunkParts<'a> {
    step: &'a Graph,
    homes: Homes,
    chunks: Vec<ChunkPart>,
}

impl ChunkParts<'_> {
    /// Makes `v` available in a chunk, with all that it depends on there and elsewhere.
    fn need(&mut self, chunk: usize, v: ValueId) {
        let mut needed = vec![(chunk, v)];
        while let Some((chunk, v)) = needed.pop() {
            let from = self.step.value(v).producer.idx();
            let home = self.homes.of_node(from).unwrap_or(chunk);
            if home != chunk {
                self.chunks[chunk].arrives.insert(v);
            }
            if !std::mem::replace(&mut self.chunks[home].has[from], true) {
                needed.extend(self.step.nodes[from].inputs.iter().map(|&v| (home, v)));
            }
        }
    }

    /// The chunks that have a value, ascending.
    fn holders(&self, v: ValueId) -> Vec<usize> {
        let node = self.step.value(v).producer.idx();
        (0..self.chunks.len()).filter(|&chunk| self.chunks[chunk].has[node]).collect()
    }

    /// Everything that crosses: by receiver, and there in the order in which it is computed.
    fn crossings(&self) -> Vec<Crossing> {
        let crossing = |to: usize, value: ValueId| {
            let node = self.step.value(value).producer.idx();
            let from = self.homes.of_node(node).expect("what crosses has a home");
            let pass =
                if node < self.step.n_forward { CrossingPass::Forward } else { CrossingPass::Backward };
            let layer = &self.step.nodes[node].layer;
            // A rewrite that attributes a node to the wrong traced node would break this.
            assert!(
                if pass == CrossingPass::Forward { from < to } else { from > to },
                "{value} of layer {layer} crosses from chunk {from} to {to} in the {pass:?} pass"
            );
            let (dtype, shape) = (self.step.value(value).dtype, self.step.shape(value).clone());
            Crossing { name: format!("to {to}: {value}"), from, to, pass, value, dtype, shape }
        };
        let of_chunk = |(to, part)| {
            let part: &ChunkPart = part;
            part.arrives.iter().map(move |&v| crossing(to, v))
        };
        self.chunks.iter().enumerate().flat_map(of_chunk).collect()
    }

    /// The graph of a chunk: what arrives, and then its nodes in the order of the whole step.
    fn build(&self, chunk: usize, crossings: &[Crossing]) -> ChunkGraph {
        let (step, part) = (self.step, &self.chunks[chunk]);
        let has = |v: ValueId| part.has[step.value(v).producer.idx()];
        let arrives: Vec<_> = crossings.iter().filter(|c| c.to == chunk).cloned().collect();
        let leaves: Vec<_> = crossings.iter().filter(|c| c.from == chunk).cloned().collect();
        // Which inputs, parameters and states it has, by their numbers in the step.
        let inputs = numbers(step.inputs.iter().map(|i| has(i.value)));
        let params = numbers(step.params.iter().map(|p| has(p.value)));
        let states = numbers(step.states.iter().map(|s| has(s.value)));
        let number = |of: &[usize], old: usize| of.binary_search(&old).expect("a leaf that it has");

        let mut to = Rebuild::new(step);
        for (k, c) in arrives.iter().enumerate() {
            let layer = &step.producer(c.value).layer;
            to.replace(step, &[c.value], Op::Input(inputs.len() + k), &[], layer);
        }
        to.graph.n_forward = to.graph.nodes.len();
        for i in (0..step.nodes.len()).filter(|&i| part.has[i]) {
            let node = &step.nodes[i];
            let op = match node.op {
                Op::Input(k) => Op::Input(number(&inputs, k)),
                Op::Param(k) => Op::Param(number(&params, k)),
                Op::State(k) => Op::State(number(&states, k)),
                ref op => op.clone(),
            };
            let operands: Vec<_> = node.inputs.iter().map(|&v| to.get(v)).collect();
            to.replace(step, &node.outputs, op, &operands, &node.layer);
            if i < step.n_forward {
                to.graph.n_forward = to.graph.nodes.len();
            }
        }
        let stored = |s: &Stored| Stored { value: to.get(s.value), ..s.clone() };
        let input = |name: &str, v: ValueId| Input { name: name.into(), value: to.get(v) };
        let own_inputs = inputs.iter().map(|&k| input(&step.inputs[k].name, step.inputs[k].value));
        let outputs = part.outputs.iter().map(|(name, v)| (name, *v));
        let outputs = outputs.chain(leaves.iter().map(|c| (&c.name, c.value)));
        let mut graph = Graph {
            inputs: own_inputs.chain(arrives.iter().map(|c| input(&c.name, c.value))).collect(),
            params: params.iter().map(|&k| stored(&step.params[k])).collect(),
            states: states.iter().map(|&k| stored(&step.states[k])).collect(),
            updates: part.updates.iter().map(|&(s, v)| (number(&states, s), to.get(v))).collect(),
            outputs: outputs.map(|(name, v)| (name.clone(), to.get(v))).collect(),
            samples: Some(step.n_samples()),
            ..to.graph.clone()
        };
        let learnt = |p: usize| step.grads.get(p).is_some_and(Option::is_some);
        let grad = |&p: &usize| match part.grads[p] {
            Some(v) => Some(to.get(v)),
            None => learnt(p).then(|| nothing(&mut graph, to.get(step.params[p].value))),
        };
        let grads = params.iter().map(grad).collect();
        graph.grads = placed(&mut graph, grads);
        graph.verify();
        ChunkGraph { chunk, graph, arrives, leaves }
    }
}

/// The gradient of a parameter to which a chunk has no contribution.
fn nothing(graph: &mut Graph, param: ValueId) -> ValueId {
    let (shape, layer) = (graph.shape(param).clone(), graph.producer(param).layer.clone());
    graph.push_shaped(Op::Binary(Binary::Sub), &[param, param], &layer, vec![(shape, DType::F32)])[0]
}

/// Gradients in the shapes of their parameters, and in memory that holds nothing else: what leaves may still be on its way
/// when the gradient of the next microbatch is computed.
fn placed(graph: &mut Graph, grads: Vec<Option<ValueId>>) -> Vec<Option<ValueId>> {
    let read: Vec<_> = graph.outputs.iter().map(|&(_, v)| reshape_root(graph, v)).collect();
    let mut place = |(p, grad): (usize, Option<ValueId>)| {
        let grad = grad?;
        let (param, layer) = (graph.params[p].value, graph.producer(grad).layer.clone());
        let grad = graph.reshape(grad, graph.shape(param).clone(), &layer);
        Some(if read.contains(&reshape_root(graph, grad)) { own_copy(graph, grad) } else { grad })
    };
    let grads = grads.into_iter().enumerate().map(&mut place).collect();
    settled(graph, grads)
}

/// The numbers of those that are there.
fn numbers(there: impl Iterator<Item = bool>) -> Vec<usize> {
    there.enumerate().filter(|(_, there)| *there).map(|(k, _)| k).collect()
}
