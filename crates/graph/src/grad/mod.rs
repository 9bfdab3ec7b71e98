//! Differentiation: a rewrite that appends to a graph the nodes that compute the gradient of each parameter.
//!
//! Forward nodes are walked backwards; each has a row in `rows` that says what reaches its operands. Contributions
//! to the same value are added. A node is visited only if the loss depends on it and it depends on a parameter that is learnt:
//! so the backward pass ends where all that is further up is frozen.

mod elementwise;
mod rows;

use std::collections::HashMap;

use crate::error::{TraceError, TraceErrorKind};
use crate::graph::{Graph, Node, Stored, ValueId};
use crate::memory::reshape_root;
use crate::op::{Op, ReduceKind};
use crate::shape::{DType, Shape};

use polyreme_kernels::elementwise::{Binary, Unary};

/// The graph with a backward pass: the gradient of the scalar `loss` with respect to every parameter that is not frozen, in
/// [`Graph::grads`].
pub fn differentiate(graph: &Graph, loss: ValueId) -> Result<Graph, TraceError> {
    let shape = graph.shape(loss);
    if shape.numel() != 1 {
        let why = "a loss is one number; take its mean first".into();
        let kind = TraceErrorKind::Shape { op: "loss", shape: shape.clone(), why };
        return Err(TraceError { layer: graph.producer(loss).layer.clone(), kind });
    }
    let n_forward = graph.nodes.len();
    let mut back = Backward {
        graph: Graph { n_forward, ..graph.clone() },
        grads: vec![None; graph.values.len()],
        needed: depends_on_learnt(graph),
        wide: HashMap::new(),
        layer: "loss".into(),
    };
    let one = back.graph.push_leaf(Op::Const(1.0), Shape::scalar(), DType::F32, "loss");
    let seed = back.graph.reshape(one, shape.clone(), "loss");
    back.grads[loss.idx()] = Some(seed);
    back.comes_from(n_forward, graph.producer(loss).origin);
    for node in graph.nodes.iter().rev() {
        let dy: Vec<_> = node.outputs.iter().map(|v| back.grads[v.idx()]).collect();
        if node.op.is_leaf() || dy.iter().all(Option::is_none) || !node.inputs.iter().any(|v| back.needs(*v))
        {
            continue;
        }
        back.layer.clone_from(&node.layer);
        let first = back.graph.nodes.len();
        rows::row(&mut back, node, &dy).map_err(|kind| TraceError { layer: node.layer.clone(), kind })?;
        back.comes_from(first, node.origin);
    }
    // A row may reach operands that nobody asked about.
    let reached = |p: &Stored| back.grads[p.value.idx()].filter(|_| !p.learning.frozen);
    let reached = graph.params.iter().map(reached).collect();
    let grads = settled(&mut back.graph, reached);
    let graph = Graph { grads, ..back.graph }.without_dead();
    graph.verify();
    Ok(graph)
}

/// The graph under construction, as the rows see it. Shapes of gradients follow from those of a graph that has been
/// checked, so appending cannot fail.
struct Backward {
    graph: Graph,
    /// What has reached each value so far.
    grads: Vec<Option<ValueId>>,
    /// Which values depend on a parameter that is learnt.
    needed: Vec<bool>,
    /// Values in half precision, and what they were cast to.
    wide: HashMap<ValueId, ValueId>,
    layer: String,
}

impl Backward {
    fn needs(&self, v: ValueId) -> bool {
        self.needed[v.idx()]
    }

    /// Says which traced node the nodes from `first` on come from.
    fn comes_from(&mut self, first: usize, origin: u32) {
        self.graph.nodes[first..].iter_mut().for_each(|node| node.origin = origin);
    }

    /// Adds a contribution to the gradient of `v`.
    fn reach(&mut self, v: ValueId, dv: ValueId) {
        debug_assert_eq!(self.graph.shape(v), self.graph.shape(dv), "gradient of {v} in {}", self.layer);
        debug_assert_eq!(self.graph.value(dv).dtype, DType::F32, "gradient of {v} in {}", self.layer);
        let sum = match self.grads[v.idx()] {
            Some(before) => self.binary(Binary::Add, before, dv),
            None => dv,
        };
        self.grads[v.idx()] = Some(sum);
    }

    /// Appends a node. Gradients are computed in f32: operands that the forward pass has in half precision are cast.
    fn all(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        let name = op.name();
        let inputs: Vec<_> = inputs.iter().map(|&v| self.wide(v)).collect();
        match self.graph.push(op, &inputs, &self.layer) {
            Ok(outputs) => outputs,
            Err(error) => unreachable!("the gradient row that uses {name} is wrong: {error}"),
        }
    }
    /// The value in f32, cast once for all rows; integers as they are.
    fn wide(&mut self, v: ValueId) -> ValueId {
        match self.graph.value(v).dtype {
            DType::F16 | DType::Bf16 => {}
            _ => return v,
        }
        if let Some(&wide) = self.wide.get(&v) {
            return wide;
        }
        let shape = self.graph.shape(v).clone();
        let wide =
            self.graph.push_shaped(Op::Cast(DType::F32), &[v], &self.layer, vec![(shape, DType::F32)])[0];
        self.wide.insert(v, wide);
        wide
    }
    fn one(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.all(op, inputs)[0]
    }
    fn unary(&mut self, op: Unary, x: ValueId) -> ValueId {
        self.one(Op::Unary(op), &[x])
    }
    fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.one(Op::Binary(op), &[a, b])
    }
    fn constant(&mut self, value: f32) -> ValueId {
        self.graph.push_leaf(Op::Const(value), Shape::scalar(), DType::F32, &self.layer)
    }
    fn reshape(&mut self, x: ValueId, shape: Shape) -> ValueId {
        self.graph.reshape(x, shape, &self.layer)
    }
    fn expand(&mut self, x: ValueId, shape: Shape) -> ValueId {
        self.graph.expand(x, shape, &self.layer)
    }

    /// Sums a gradient over the dims that broadcasting repeated.
    fn reduce_to(&mut self, dy: ValueId, shape: &Shape) -> ValueId {
        let axes = shape.broadcast_axes(self.graph.shape(dy));
        let sum =
            if axes.is_empty() { dy } else { self.one(Op::Reduce { kind: ReduceKind::Sum, axes }, &[dy]) };
        self.reshape(sum, shape.clone())
    }

    /// A contribution that may have been broadcast.
    fn reach_reduced(&mut self, v: ValueId, dv: ValueId) {
        let shape = self.graph.shape(v).clone();
        let dv = self.reduce_to(dv, &shape);
        self.reach(v, dv);
    }
}

/// Gradients that each have their own memory in the arena: a leaf, or a value that is the gradient of two parameters, is
/// copied.
pub fn settled(graph: &mut Graph, grads: Vec<Option<ValueId>>) -> Vec<Option<ValueId>> {
    let mut roots = Vec::new();
    let mut settle = |v: ValueId| {
        let root = reshape_root(graph, v);
        let own = !graph.producer(root).op.is_leaf() && !roots.contains(&root);
        roots.push(root);
        if own { v } else { own_copy(graph, v) }
    };
    grads.into_iter().map(|g| g.map(&mut settle)).collect()
}

/// Appends a copy of a value in f32, in memory of its own.
pub fn own_copy(graph: &mut Graph, v: ValueId) -> ValueId {
    let (layer, origin) = (graph.producer(v).layer.clone(), graph.producer(v).origin);
    let shape = (graph.shape(v).clone(), DType::F32);
    let copy = graph.push_shaped(COPY, &[v], &layer, vec![shape])[0];
    let node = graph.value(copy).producer.idx();
    graph.nodes[node].origin = origin;
    copy
}

/// What copies: it changes no bit.
pub const COPY: Op = Op::Unary(Unary::Scale(1.0));

fn depends_on_learnt(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.values.len()];
    for node in &graph.nodes {
        let does = match node.op {
            Op::Param(p) => !graph.params[p].learning.frozen,
            _ => node.inputs.iter().any(|v| needed[v.idx()]),
        };
        for v in &node.outputs {
            needed[v.idx()] = does && graph.value(*v).dtype.is_float();
        }
    }
    needed
}

/// The result of a row: nothing, or why there is no gradient.
type GradResult = Result<(), TraceErrorKind>;

fn no_gradient(node: &Node) -> GradResult {
    Err(TraceErrorKind::NoGradient { op: node.op.name() })
}
