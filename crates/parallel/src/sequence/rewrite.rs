//! The rewrite: walks a step's nodes in their order and computes each by its rule, from operands in the layouts that it says.
//!
//! A value may exist in several layouts: what it was computed in, and what readers needed. What repeats or pads a whole value,
//! such as the gradient of a mean over time, is made only when a reader asks for it, for that reader's positions.
//!
//! Gradients of parameters are sums over the ranks. Each sum starts when the rank's term is known; the result is copied to its
//! place once a few more have started, so that sums overlap with the backward pass and take little memory.

use std::collections::VecDeque;

use polyreme_graph::grad::own_copy;
use polyreme_graph::graph::{Graph, Input, Node, Stored};
use polyreme_graph::memory::reshape_root;
use polyreme_graph::op::{Op, Unary};
use polyreme_graph::{DType, Shape, ValueId};

use super::convert::Nodes;
use super::expand::expand_rings;
use super::hand_on::{Handed, Layer};
use super::loss;
use super::place::{SequencePlace, input_layouts};
use super::rules::{PositionedNode, Rule, RuleForm, is_split, rule};
use crate::tensor::ValueLayout;

use ValueLayout::{Partial, Split, Whole};

/// How many sums of gradients are under way before the first is needed.
const SUMS: usize = 6;

/// A step of one rank of the sequence axis.
#[derive(Debug)]
pub struct SequenceSplit {
    /// Its graph.
    pub graph: Graph,
    /// How many positions of each sequence the rank has.
    pub time: usize,
    /// What every rank computes for all positions, as `(op, layer)`: it has no rule for sequences that are cut.
    pub replicated: Vec<(&'static str, String)>,
}

/// The part of a step, or of a forward pass, that one of several ranks computes. Outputs with positions stay cut.
///
/// It fails if the model is not fed sequences, or if they do not divide by the number of ranks.
pub fn split(step: &Graph, place: SequencePlace) -> Result<SequenceSplit, String> {
    let part = split_positions(step, place)?;
    let graph = expand_rings(&part.graph, place, part.time);
    Ok(SequenceSplit { graph, ..part })
}

/// The same with attention as it was, on the rank's positions: [`expand_rings`] must follow.
pub fn split_positions(step: &Graph, place: SequencePlace) -> Result<SequenceSplit, String> {
    let mut rewrite = PositionSplit::new(step, place)?;
    for i in 0..step.nodes.len() {
        if i == step.n_forward {
            rewrite.graph.n_forward = rewrite.graph.nodes.len();
        }
        rewrite.node(i)?;
    }
    if step.n_forward == step.nodes.len() {
        rewrite.graph.n_forward = rewrite.graph.nodes.len();
    }
    rewrite.finish()
}

struct PositionSplit<'a> {
    old: &'a Graph,
    place: SequencePlace,
    graph: Graph,
    /// By input.
    input_layouts: Vec<ValueLayout>,
    /// By old value: the layouts that it exists in, the first of which it was computed in.
    made: Vec<Vec<(ValueLayout, ValueId)>>,
    /// By old value: whether it is made when a reader asks for it.
    lazy: Vec<bool>,
    /// By recurrent layer: its old first result, and the states that this rank began with.
    initial: Vec<(ValueId, Vec<ValueId>)>,
    /// What was sent and nothing here reads.
    sent: Vec<ValueId>,
    /// Old outputs, and what they are now.
    outputs: Vec<(ValueId, ValueId)>,
    /// By parameter.
    grads: Vec<Option<ValueId>>,
    /// Parameters whose gradients are being summed.
    summing: VecDeque<usize>,
    replicated: Vec<(&'static str, String)>,
    /// How many nodes of the new graph know which traced node they come from.
    n_attributed: usize,
}

impl<'a> PositionSplit<'a> {
    fn new(old: &'a Graph, place: SequencePlace) -> Result<PositionSplit<'a>, String> {
        let n = old.values.len();
        Ok(PositionSplit {
            old,
            place,
            graph: Graph { samples: old.samples, ..Graph::default() },
            input_layouts: input_layouts(old, place)?,
            made: vec![Vec::new(); n],
            lazy: vec![false; n],
            initial: Vec::new(),
            sent: Vec::new(),
            outputs: Vec::new(),
            grads: vec![None; old.grads.len()],
            summing: VecDeque::new(),
            replicated: Vec::new(),
            n_attributed: 0,
        })
    }

    fn node(&mut self, i: usize) -> Result<(), String> {
        let (old, node) = (self.old, &self.old.nodes[i]);
        if node.op.is_leaf() {
            let layout = match node.op {
                Op::Input(k) => self.input_layouts[k],
                _ => Whole,
            };
            let value = old.value(node.outputs[0]);
            let shapes = vec![(layout.local(&value.shape, self.place.ranks), value.dtype)];
            let new = self.graph.push_shaped(node.op.clone(), &[], &node.layer, shapes)[0];
            self.made[node.outputs[0].idx()].push((layout, new));
        } else if self.may_wait(node) {
            self.lazy[node.outputs[0].idx()] = true;
        } else {
            let given = self.given(node);
            let rule = rule(&given);
            self.note_replicated(i, &given.have, &rule);
            self.emit(node, &rule)?;
        }
        self.comes_from(node);
        for &v in &node.outputs {
            if old.outputs.iter().any(|(_, output)| *output == v) {
                let layout = Some(self.layout_of(v)).filter(|l| is_split(*l)).unwrap_or(Whole);
                let value = self.get(v, layout, node)?;
                let value = self.settled(value);
                self.outputs.push((v, value));
                self.comes_from(node);
            }
            // What reads gradients comes last, so their sums start here.
            for p in (0..old.grads.len()).filter(|&p| old.grads[p] == Some(v)) {
                self.grads[p] = Some(self.get(v, Whole, node)?);
                self.comes_from(node);
                self.summing.push_back(p);
                if self.summing.len() > SUMS {
                    self.settle_first();
                }
            }
        }
        Ok(())
    }

    /// Says that the nodes added since the last call come from what this old node comes from.
    fn comes_from(&mut self, node: &Node) {
        self.graph.nodes[self.n_attributed..].iter_mut().for_each(|new| new.origin = node.origin);
        self.n_attributed = self.graph.nodes.len();
    }

    /// Copies the gradient whose sum was started first to where gradients are.
    fn settle_first(&mut self) {
        if let Some(p) = self.summing.pop_front() {
            self.grads[p] = self.grads[p].map(|grad| self.settled(grad));
        }
    }

    /// Whether a node repeats or pads a whole value, or shows some of such a value: readers then ask for their positions.
    fn may_wait(&self, node: &Node) -> bool {
        let is = |is: &dyn Fn(ValueId) -> bool| node.inputs.iter().all(|v| is(*v));
        match node.op {
            Op::Expand => is(&|v| self.lazy[v.idx()] || self.layout_of(v) == Whole),
            Op::Pad { value, .. } => {
                value == 0.0 && is(&|v| self.lazy[v.idx()] || self.layout_of(v) == Whole)
            }
            Op::Slice { .. } | Op::Reshape | Op::Permute(_) | Op::Unary(_) | Op::Cast(_) => {
                is(&|v| self.lazy[v.idx()])
            }
            _ => false,
        }
    }

    fn given(&self, node: &'a Node) -> PositionedNode<'a> {
        let old = self.old;
        PositionedNode {
            op: &node.op,
            x: node.inputs.iter().map(|&v| old.shape(v)).collect(),
            y: node.outputs.iter().map(|&v| old.shape(v)).collect(),
            have: node.inputs.iter().map(|&v| self.layout_of(v)).collect(),
            place: self.place,
        }
    }

    /// The layout that a value was computed in; whole if it has not been made.
    fn layout_of(&self, v: ValueId) -> ValueLayout {
        self.made[v.idx()].first().map_or(Whole, |(layout, _)| *layout)
    }

    fn nodes(&mut self, layer: &'a str) -> Nodes<'_> {
        Nodes { graph: &mut self.graph, place: self.place, layer }
    }

    /// A value in a layout, for a node that reads it.
    fn get(&mut self, v: ValueId, layout: ValueLayout, reader: &'a Node) -> Result<ValueId, String> {
        let made = &self.made[v.idx()];
        if let Some((_, new)) = made.iter().find(|(l, _)| *l == layout) {
            return Ok(*new);
        }
        let new = match made[..] {
            [] => self.get_lazily(v, layout, reader)?,
            [first, ..] => {
                // A whole value is cut without an exchange; of the others take the first.
                let from = made.iter().copied().find(|(l, _)| *l == Whole && is_split(layout));
                let (from, x) = from.unwrap_or(first);
                let shape = self.old.shape(v);
                self.nodes(&reader.layer).convert(x, from, layout, shape)?
            }
        };
        self.made[v.idx()].push((layout, new));
        Ok(new)
    }

    /// Makes a value that waited for a reader.
    fn get_lazily(&mut self, v: ValueId, layout: ValueLayout, reader: &'a Node) -> Result<ValueId, String> {
        let (old, ranks) = (self.old, self.place.ranks);
        let (node, value) = (old.producer(v), old.value(v));
        debug_assert!(self.lazy[v.idx()], "operands are made before their users");
        let x = node.inputs[0];
        let source = match layout {
            Split { dim, groups } => self.source(node, dim, groups),
            Whole => Some(Whole),
            Partial => None,
        };
        if let (None, Split { dim, groups: 1 }, &Op::Pad { axis, before, .. }) = (source, layout, &node.op)
            && axis == dim
        {
            let x = self.get(x, Whole, reader)?;
            return Ok(self.padded_pieces(x, axis, before, value.shape.dims()[axis], reader));
        }
        let Some(source) = source else {
            let whole = self.get(v, Whole, reader)?;
            return self.nodes(&reader.layer).convert(whole, Whole, layout, &value.shape);
        };
        let x = self.get(x, source, reader)?;
        let shapes = vec![(layout.local(&value.shape, ranks), value.dtype)];
        Ok(self.graph.push_shaped(node.op.clone(), &[x], &node.layer, shapes)[0])
    }

    /// The layout of a lazy node's operand from which this rank's part of its result follows.
    fn source(&self, node: &Node, dim: usize, groups: usize) -> Option<ValueLayout> {
        let (from, to) = (self.old.shape(node.inputs[0]), self.old.shape(node.outputs[0]));
        let layout = Split { dim, groups };
        match &node.op {
            Op::Expand => {
                let at = (dim + from.rank()).checked_sub(to.rank());
                let cut = at.filter(|at| from.dims()[*at] == to.dims()[dim]);
                Some(cut.map_or(Whole, |at| layout.at(at)))
            }
            &Op::Pad { axis, .. } | &Op::Slice { axis, .. } => (axis != dim).then_some(layout),
            Op::Reshape => layout.reshaped(to.dims(), from.dims(), self.place.n_pieces()),
            Op::Permute(perm) => Some(layout.at(perm[dim])),
            Op::Unary(_) | Op::Cast(_) => Some(layout),
            _ => None,
        }
    }

    /// This rank's pieces of what pads `x` along time.
    fn padded_pieces(
        &mut self,
        x: ValueId,
        axis: usize,
        before: usize,
        time: usize,
        reader: &'a Node,
    ) -> ValueId {
        let place = self.place;
        let mut nodes = self.nodes(&reader.layer);
        let (shape, dtype) = (nodes.graph.shape(x).clone(), nodes.graph.value(x).dtype);
        let (start, end) = (before, before + shape.dims()[axis]);
        let piece = |nodes: &mut Nodes, at: std::ops::Range<usize>| {
            let (first, last) = (start.max(at.start), end.min(at.end));
            if first >= last {
                return nodes.zeros(shape.with_dim(axis, at.len()), dtype);
            }
            let some = nodes.slice(x, axis, first - start, last - first);
            nodes.pad_zeros(some, axis, first - at.start, at.end - last)
        };
        let pieces: Vec<_> = place.positions(time).into_iter().map(|at| piece(&mut nodes, at)).collect();
        match pieces[..] {
            [one] => one,
            _ => nodes.push(Op::Concat { axis }, &pieces),
        }
    }

    fn emit(&mut self, node: &'a Node, rule: &Rule) -> Result<(), String> {
        let mut x = Vec::with_capacity(node.inputs.len());
        for (&v, &layout) in node.inputs.iter().zip(&rule.inputs) {
            x.push(self.get(v, layout, node)?);
        }
        let (old, ranks) = (self.old, self.place.ranks);
        let local = |(v, l): (&ValueId, &ValueLayout)| {
            let value = old.value(*v);
            (l.local(&value.shape, ranks), value.dtype)
        };
        let shapes: Vec<(Shape, DType)> = node.outputs.iter().zip(&rule.outputs).map(local).collect();
        let layer = &node.layer;
        let outputs = match rule.form {
            RuleForm::Op => self.graph.push_shaped(rule.op.clone(), &x, layer, shapes),
            RuleForm::Divided => {
                let sums = self.graph.push_shaped(rule.op.clone(), &x, layer, shapes.clone());
                let op = Op::Unary(Unary::Scale(1.0 / ranks as f32));
                self.graph.push_shaped(op, &sums, layer, shapes)
            }
            RuleForm::OnePiece => vec![self.one_piece(node, x[0])],
            RuleForm::HandOn => self.hand_on(node, x),
            RuleForm::Loss => {
                let mut nodes = self.nodes(layer);
                match node.op {
                    Op::CrossEntropy(options) => loss::forward(&mut nodes, options, &x),
                    Op::CrossEntropyGrad(options) => loss::backward(&mut nodes, options, &x),
                    _ => unreachable!("{} is not a loss", node.op.name()),
                }
            }
        };
        for ((&v, &layout), new) in node.outputs.iter().zip(&rule.outputs).zip(outputs) {
            self.made[v.idx()].push((layout, new));
        }
        Ok(())
    }

    /// A slice of positions on the rank that has them; on the others, by the same nodes, zeros.
    fn one_piece(&mut self, node: &'a Node, x: ValueId) -> ValueId {
        let &Op::Slice { axis, start, len } = &node.op else {
            unreachable!("only slices take some positions")
        };
        let (place, time) = (self.place, self.old.shape(node.inputs[0]).dims()[axis]);
        let (mut at, mut found) = (0, None);
        for range in place.positions(time) {
            if range.contains(&start) {
                found = Some(at + start - range.start);
            }
            at += range.len();
        }
        let mut nodes = self.nodes(&node.layer);
        let some = nodes.push(Op::Slice { axis, start: found.unwrap_or(0), len }, &[x]);
        nodes.push(Op::Unary(Unary::Scale(if found.is_some() { 1.0 } else { 0.0 })), &[some])
    }

    fn hand_on(&mut self, node: &'a Node, mut x: Vec<ValueId>) -> Vec<ValueId> {
        let handed: Handed = match node.op {
            Op::Recurrent { cell, reverse } => {
                let handed = Layer { cell, reverse }.forward(&mut self.nodes(&node.layer), &x);
                self.initial.push((node.outputs[0], handed.initial.clone()));
                handed
            }
            Op::RecurrentGrad { cell, reverse } => {
                // The state that this rank began with, instead of that of the whole sequence.
                let n_states = if cell.gates() == 4 { 2 } else { 1 };
                let y = node.inputs[2 + n_states];
                let found = self.initial.iter().find(|(of, _)| *of == y);
                let (_, initial) = found.expect("the gradient of a layer reads the layer's result");
                x[2..2 + n_states].copy_from_slice(initial);
                Layer { cell, reverse }.backward(&mut self.nodes(&node.layer), &x)
            }
            _ => unreachable!("{} hands nothing on", node.op.name()),
        };
        self.sent.extend(handed.sent);
        handed.outputs
    }

    /// Notes what all ranks compute for all positions in the forward pass.
    fn note_replicated(&mut self, i: usize, have: &[ValueLayout], rule: &Rule) {
        let node = &self.old.nodes[i];
        let gathered = have.iter().zip(&rule.inputs).any(|(have, want)| is_split(*have) && *want == Whole);
        let entry = (node.op.name(), node.layer.clone());
        if gathered && i < self.old.n_forward && !self.replicated.contains(&entry) {
            self.replicated.push(entry);
        }
    }

    fn finish(mut self) -> Result<SequenceSplit, String> {
        while !self.summing.is_empty() {
            self.settle_first();
        }
        let old = self.old;
        let mut updates = Vec::with_capacity(old.updates.len());
        for &(state, v) in &old.updates {
            let value = self.get(v, Whole, old.producer(v))?;
            self.comes_from(old.producer(v));
            updates.push((state, value));
        }
        let whole = |v: ValueId| self.made[v.idx()][0].1;
        let stored = |s: &Stored| Stored { value: whole(s.value), ..s.clone() };
        let params = old.params.iter().map(stored).collect();
        let states = old.states.iter().map(stored).collect();
        let inputs =
            old.inputs.iter().map(|i| Input { name: i.name.clone(), value: whole(i.value) }).collect();
        let output =
            |v: ValueId| self.outputs.iter().find(|(old, _)| *old == v).expect("all nodes were visited").1;
        let named = old.outputs.iter().map(|(name, v)| (name.clone(), output(*v)));
        // Results, so that no later pass takes them for dead: other ranks wait for them.
        let sent = self.sent.iter().enumerate().map(|(k, v)| (format!("handed on {k}"), *v));
        let outputs = named.chain(sent).collect();
        let graph = Graph { params, states, grads: self.grads, updates, outputs, inputs, ..self.graph };
        let graph = graph.without_dead();
        graph.verify();
        let time = graph.shape(graph.inputs[0].value).dims()[1];
        Ok(SequenceSplit { graph, time, replicated: self.replicated })
    }

    /// A gradient or an output that an exchange ends in is copied: what follows in a program must not read it before it has arrived.
    fn settled(&mut self, value: ValueId) -> ValueId {
        let root = reshape_root(&self.graph, value);
        match self.graph.producer(root).op {
            Op::Exchange { .. } => {
                let copy = own_copy(&mut self.graph, value);
                self.n_attributed = self.graph.nodes.len();
                copy
            }
            _ => value,
        }
    }
}
