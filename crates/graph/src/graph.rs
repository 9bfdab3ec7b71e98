//! The graph: a list of nodes in the order in which they run. Plain data.
//!
//! A node's inputs are values of earlier nodes, so the list is its own topological order and every rewrite keeps it
//! so. No threads, no IO, no ranks.

use std::fmt;

use crate::error::{TraceError, TraceErrorKind};
use crate::infer::infer;
use crate::op::Op;
use crate::part::Part;
use crate::shape::{DType, Shape};
use crate::tuning::Learning;

/// The id of a value of a graph.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ValueId(pub u32);

/// The id of a node of a graph: its index in the list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

impl ValueId {
    /// As an index into [`Graph::values`].
    pub fn idx(self) -> usize {
        self.0 as usize
    }
}
impl NodeId {
    /// As an index into [`Graph::nodes`].
    pub fn idx(self) -> usize {
        self.0 as usize
    }
}
impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// The static part of a value.
#[derive(Clone, PartialEq, Debug)]
pub struct Value {
    /// Its dims.
    pub shape: Shape,
    /// Its element type.
    pub dtype: DType,
    /// The node that computes it.
    pub producer: NodeId,
}

impl Value {
    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.bytes()
    }
}

/// One op and its operands.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<ValueId>,
    /// Its results; most ops have one.
    pub outputs: Vec<ValueId>,
    /// The path of the layer that it belongs to, for messages.
    pub layer: String,
    /// The number of the traced node that it comes from. A node of the backward pass comes from the one whose row of
    /// gradients made it, and what a rewrite adds comes from the node that it was added for.
    pub origin: u32,
}

/// How a parameter starts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// All the same.
    Const(f32),
    /// Uniform in `-bound..bound`.
    Uniform {
        /// The bound.
        bound: f32,
    },
    /// Normal around zero.
    Normal {
        /// The standard deviation.
        std: f32,
    },
}

/// Something fed to each run.
#[derive(Clone, PartialEq, Debug)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: ValueId,
}

/// A named tensor that outlives a step: a parameter, or a state without a gradient.
#[derive(Clone, PartialEq, Debug)]
pub struct Stored {
    /// Its name, as PyTorch's `state_dict` has it.
    pub name: String,
    /// Its value at the start of a step.
    pub value: ValueId,
    /// How it starts.
    pub init: Init,
    /// Its place among the whole model's parameters, or its states, which follow them: random initial values depend on it.
    pub number: usize,
    /// Which part of the tensor this rank computes with, if ranks of the tensor axis split it.
    pub part: Option<Part>,
    /// Which part of that it keeps, if ranks of the data axis shard it; it is gathered where it is read.
    pub shard: Option<Part>,
    /// How it is learnt, if it is a parameter.
    pub learning: Learning,
}

/// A traced model, or a whole step made from one.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Graph {
    /// The nodes in the order in which they run.
    pub nodes: Vec<Node>,
    /// Every node's outputs.
    pub values: Vec<Value>,
    /// What is fed to each run.
    pub inputs: Vec<Input>,
    /// The parameters, which are learnt unless they are frozen.
    pub params: Vec<Stored>,
    /// The states, which are kept from step to step.
    pub states: Vec<Stored>,
    /// What each state becomes at the end of a step: `(state, value)`.
    pub updates: Vec<(usize, ValueId)>,
    /// What is read after a run, by name.
    pub outputs: Vec<(String, ValueId)>,
    /// The gradient of each parameter, once differentiated; `None` where the loss does not depend on it, and where it is
    /// frozen.
    pub grads: Vec<Option<ValueId>>,
    /// Nodes before this one are the forward pass.
    pub n_forward: usize,
    /// Samples of the batch, where the first input does not tell: a part of a step may be fed activations only.
    pub samples: Option<usize>,
}

impl Graph {
    /// The static part of `v`.
    pub fn value(&self, v: ValueId) -> &Value {
        &self.values[v.idx()]
    }
    /// The shape of `v`.
    pub fn shape(&self, v: ValueId) -> &Shape {
        &self.value(v).shape
    }
    /// The node that computes `v`.
    pub fn producer(&self, v: ValueId) -> &Node {
        &self.nodes[self.value(v).producer.idx()]
    }
    /// The output called `name`.
    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.outputs.iter().find(|(n, _)| n == name).map(|&(_, v)| v)
    }
    /// How many elements all parameters have together.
    pub fn param_numel(&self) -> usize {
        self.params.iter().map(|p| self.shape(p.value).numel()).sum()
    }

    /// Samples of the batch: the first dim of the first input, unless the graph says otherwise.
    pub fn n_samples(&self) -> usize {
        let first = self.inputs.first().and_then(|i| self.shape(i.value).dims().first().copied());
        self.samples.or(first).unwrap_or(1)
    }

    /// Appends a node; its outputs' shapes follow from its operands, or it is an error that names the layer.
    pub fn push(&mut self, op: Op, inputs: &[ValueId], layer: &str) -> Result<Vec<ValueId>, TraceError> {
        let operands: Vec<_> = inputs.iter().map(|&v| self.value(v)).collect();
        let shapes = infer(&op, &operands).map_err(|kind| TraceError { layer: layer.to_string(), kind })?;
        Ok(self.push_shaped(op, inputs, layer, shapes))
    }

    /// Appends a leaf, whose shape is given.
    pub(crate) fn push_leaf(&mut self, op: Op, shape: Shape, dtype: DType, layer: &str) -> ValueId {
        debug_assert!(op.is_leaf());
        self.push_shaped(op, &[], layer, vec![(shape, dtype)])[0]
    }

    /// Appends a node whose outputs' shapes are known (reshapes, expansions, fused passes and leaves carry theirs in
    /// the value).
    pub fn push_shaped(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        layer: &str,
        shapes: Vec<(Shape, DType)>,
    ) -> Vec<ValueId> {
        let producer = NodeId(self.nodes.len() as u32);
        let first = self.values.len() as u32;
        let outputs: Vec<_> = (first..first + shapes.len() as u32).map(ValueId).collect();
        self.values.extend(shapes.into_iter().map(|(shape, dtype)| Value { shape, dtype, producer }));
        self.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            layer: layer.to_string(),
            origin: producer.0,
        });
        outputs
    }

    /// Every value that must exist when the nodes have run: outputs, gradients and updates.
    pub fn results(&self) -> impl Iterator<Item = ValueId> + '_ {
        let outputs = self.outputs.iter().map(|&(_, v)| v);
        let grads = self.grads.iter().flatten().copied();
        let updates = self.updates.iter().map(|&(_, v)| v);
        outputs.chain(grads).chain(updates)
    }

    /// For each value, how many times nodes and results use it.
    pub fn use_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.values.len()];
        for v in self.nodes.iter().flat_map(|n| n.inputs.iter().copied()).chain(self.results()) {
            counts[v.idx()] += 1;
        }
        counts
    }

    /// Checks what every rewrite must keep: order, ownership, and shapes that follow from the operands. A failure
    /// is a bug in the rewrite, so it panics with the node.
    pub fn verify(&self) {
        for (i, node) in self.nodes.iter().enumerate() {
            for &v in &node.inputs {
                let from = self.value(v).producer.idx();
                assert!(from < i, "node {i} ({}) reads {v} of node {from}, which runs later", node.op.name());
            }
            for &v in &node.outputs {
                assert_eq!(self.value(v).producer.idx(), i, "{v} is not owned by node {i}");
            }
            if node.op.is_leaf() || matches!(node.op, Op::Reshape | Op::Expand | Op::Fused(_)) {
                self.verify_carried(i);
                continue;
            }
            let operands: Vec<_> = node.inputs.iter().map(|&v| self.value(v)).collect();
            match infer(&node.op, &operands) {
                Ok(shapes) => {
                    let have: Vec<_> =
                        node.outputs.iter().map(|&v| (self.shape(v).clone(), self.value(v).dtype)).collect();
                    assert_eq!(have, shapes, "node {i} ({}) of layer {}", node.op.name(), node.layer);
                }
                Err(kind) => panic!("node {i} of layer {}: {kind}", node.layer),
            }
        }
        for v in self.results() {
            assert!(v.idx() < self.values.len(), "result {v} does not exist");
        }
        for (param, grad) in self.params.iter().zip(&self.grads) {
            if let Some(grad) = grad {
                assert_eq!(self.shape(param.value), self.shape(*grad), "gradient of {}", param.name);
            }
        }
        assert!(self.n_forward <= self.nodes.len());
    }

    /// Checks a node that carries its shape in its value: reshapes, and what expands its operands.
    fn verify_carried(&self, i: usize) {
        let node = &self.nodes[i];
        let to = self.shape(node.outputs[0]);
        for &v in &node.inputs {
            let from = self.shape(v);
            let fits = match node.op {
                Op::Reshape => from.numel() == to.numel(),
                _ => from.broadcast(to).as_ref() == Some(to),
            };
            assert!(fits, "node {i} ({}) of layer {}: {from} to {to}", node.op.name(), node.layer);
            let (from, to) = (self.value(v).dtype, self.value(node.outputs[0]).dtype);
            let fits = if matches!(node.op, Op::Fused(_)) { from.is_float() } else { from == to };
            assert!(fits, "types {from}, {to} of node {i} ({}) of layer {}", node.op.name(), node.layer);
        }
        if let Op::Fused(expr) = &node.op {
            assert_eq!(expr.n_inputs(), node.inputs.len(), "operands of node {i}");
            assert_eq!(expr.outputs().len(), node.outputs.len(), "results of node {i}");
            let first = self.value(node.outputs[0]);
            let alike = |v: &Value| v.shape == first.shape && v.dtype.is_float();
            assert!(node.outputs.iter().all(|&v| alike(self.value(v))), "results of node {i} differ");
        }
    }

    /// A copy without the nodes on which no result depends. Inputs, parameters and states stay.
    pub fn without_dead(&self) -> Graph {
        let mut live = vec![false; self.nodes.len()];
        for v in self.results() {
            live[self.value(v).producer.idx()] = true;
        }
        for i in (0..self.nodes.len()).rev() {
            let node = &self.nodes[i];
            live[i] |= matches!(node.op, Op::Input(_) | Op::Param(_) | Op::State(_));
            if live[i] {
                for &v in &node.inputs {
                    live[self.value(v).producer.idx()] = true;
                }
            }
        }
        let order: Vec<_> = (0..self.nodes.len()).filter(|&i| live[i]).collect();
        self.reordered(&order)
    }

    /// A copy with these nodes in this order; values are renumbered.
    pub fn reordered(&self, order: &[usize]) -> Graph {
        let mut to = Rebuild::new(self);
        for &i in order {
            if i == self.n_forward {
                to.graph.n_forward = to.graph.nodes.len();
            }
            to.copy(self, i);
        }
        let forward = order.iter().filter(|&&i| i < self.n_forward).count();
        to.graph.n_forward = forward;
        to.finish(self)
    }
}

/// Whether a layer is the one at `path`, or a part of it.
pub fn is_within(layer: &str, path: &str) -> bool {
    layer.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A graph that is built from another, node by node; every rewrite uses it.
pub struct Rebuild {
    /// The new graph, so far.
    pub graph: Graph,
    /// For each old value, the new one.
    pub map: Vec<Option<ValueId>>,
    /// How many nodes of the new graph know which traced node they come from.
    n_attributed: usize,
}

impl Rebuild {
    /// An empty graph, into which nothing of `old` has been copied.
    pub fn new(old: &Graph) -> Rebuild {
        let graph = Graph { samples: old.samples, ..Graph::default() };
        Rebuild { graph, map: vec![None; old.values.len()], n_attributed: 0 }
    }

    /// The new value of an old one that has been copied.
    pub fn get(&self, old: ValueId) -> ValueId {
        self.map[old.idx()].expect("operands are rebuilt before their users")
    }

    /// Copies node `i` as it is.
    pub fn copy(&mut self, old: &Graph, i: usize) {
        let node = &old.nodes[i];
        let inputs: Vec<_> = node.inputs.iter().map(|&v| self.get(v)).collect();
        self.replace(old, &node.outputs, node.op.clone(), &inputs, &node.layer);
    }

    /// Adds a node that computes these old values.
    pub fn replace(&mut self, old: &Graph, values: &[ValueId], op: Op, inputs: &[ValueId], layer: &str) {
        let shapes = values.iter().map(|&v| (old.shape(v).clone(), old.value(v).dtype)).collect();
        let new = self.graph.push_shaped(op, inputs, layer, shapes);
        for (&v, n) in values.iter().zip(new) {
            self.map[v.idx()] = Some(n);
        }
        self.comes_from(values.first().map_or(0, |&v| old.producer(v).origin));
    }

    /// Says that the nodes added since the last call come from this traced node. A rewrite that only uses `copy` and
    /// `replace`, also after pushing what the replaced node reads, need not call it.
    pub fn comes_from(&mut self, origin: u32) {
        for node in &mut self.graph.nodes[self.n_attributed..] {
            node.origin = origin;
        }
        self.n_attributed = self.graph.nodes.len();
    }

    /// Copies names and results.
    pub fn finish(mut self, old: &Graph) -> Graph {
        // What was added last, after every node: it comes from where its operands do.
        for i in self.n_attributed..self.graph.nodes.len() {
            let from = self.graph.nodes[i].inputs.first().map(|&v| self.graph.producer(v).origin);
            self.graph.nodes[i].origin = from.unwrap_or(0);
        }
        let stored = |s: &Stored| Stored { value: self.get(s.value), ..s.clone() };
        let params = old.params.iter().map(stored).collect();
        let states = old.states.iter().map(stored).collect();
        let inputs =
            old.inputs.iter().map(|i| Input { name: i.name.clone(), value: self.get(i.value) }).collect();
        let outputs = old.outputs.iter().map(|(n, v)| (n.clone(), self.get(*v))).collect();
        let grads = old.grads.iter().map(|g| g.map(|v| self.get(v))).collect();
        let updates = old.updates.iter().map(|&(s, v)| (s, self.get(v))).collect();
        self.graph = Graph { params, states, inputs, outputs, grads, updates, ..self.graph };
        self.graph
    }
}

/// The result of a shape rule.
pub(crate) type Shapes = Result<Vec<(Shape, DType)>, TraceErrorKind>;
