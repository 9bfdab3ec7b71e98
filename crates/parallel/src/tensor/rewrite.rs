//! The rewrite: walks a step's nodes in their order, chooses for each the way that sends least, and converts operands.
//!
//! A value may exist in several layouts: what it was computed in, and what readers needed. Each is made once, from the cheapest
//! of those that there are.
//!
//! Three kinds of values are made only when a reader asks for them, in the layout that it asks for: parameters and states,
//! which have no layout until then; what follows from them and from constants alone; and reshapes, which are another view of
//! their operand, so that both share their conversions.

use std::collections::BTreeMap;

use polyreme_graph::grad::own_copy;
use polyreme_graph::graph::{Graph, Input, Node, Stored};
use polyreme_graph::memory::reshape_root;
use polyreme_graph::op::{Op, Unary};
use polyreme_graph::{DType, Shape, ValueId};

use super::convert;
use super::layout::{TensorPlace, ValueLayout};
use super::order::overlapped;
use super::rules::{Given, OpForm, Way, ways};
use super::seeds;
use super::vocabulary::Vocabulary;

use ValueLayout::{Partial, Whole};

/// What it costs to keep an element of a weight on every rank where it could be split: more than anything that is sent.
const REPLICATED_WEIGHT: f64 = 1e6;

/// How many floating-point operations take as long as sending one element.
const FLOPS_PER_ELEMENT: f64 = 64.0;

/// A step of one rank of the tensor axis.
#[derive(Debug)]
pub struct TensorSplit {
    /// Its graph.
    pub graph: Graph,
    /// What every rank computes alike, as `(op, layer)`, because it has no rule or because its sizes do not divide.
    pub replicated: Vec<(&'static str, String)>,
    /// How its parameters and states are split.
    pub layouts: StoredLayouts,
}

/// The part of a step, or of a forward pass, that one of several ranks computes.
///
/// It fails if attention heads do not divide by the number of ranks.
pub fn split(step: &Graph, place: TensorPlace) -> Result<TensorSplit, String> {
    split_as(step, place, &StoredLayouts::new(), &[])
}

/// How parameters and states are split, by name.
pub type StoredLayouts = BTreeMap<String, ValueLayout>;

/// The same with parameters and states that are split as in another graph of the model ([`TensorSplit::layouts`]). Those
/// without an entry are split as is best for this one.
///
/// `cuts` are the traced nodes before which the network is cut into chunks for stages: the backward pass of a chunk does not read
/// what the forward pass of a later one has made of its values.
pub fn split_as(
    step: &Graph,
    place: TensorPlace,
    layouts: &StoredLayouts,
    cuts: &[u32],
) -> Result<TensorSplit, String> {
    if let Some(why) = seeds::refusal(step, place.ranks) {
        return Err(why);
    }
    let mut rewrite = Rewrite::new(step, place, layouts);
    rewrite.cuts = cuts.to_vec();
    for i in 0..step.nodes.len() {
        if i == step.n_forward {
            rewrite.graph.n_forward = rewrite.graph.nodes.len();
            rewrite.is_backward = true;
        }
        rewrite.reader = step.nodes[i].origin;
        rewrite.node(i);
    }
    if step.n_forward == step.nodes.len() {
        rewrite.graph.n_forward = rewrite.graph.nodes.len();
    }
    Ok(rewrite.finish())
}

struct Rewrite<'a> {
    old: &'a Graph,
    place: TensorPlace,
    graph: Graph,
    /// By old value: the layouts that it exists in, the first of which it was computed in.
    made: Vec<Vec<(ValueLayout, ValueId)>>,
    /// By old value: whether it is made when a reader asks for it.
    lazy: Vec<bool>,
    /// By old value: whether it depends on parameters, states and constants alone.
    fixed: Vec<bool>,
    /// By old value: the layout that a parameter or a state is to have.
    prescribed: Vec<Option<ValueLayout>>,
    columns: Vec<Option<usize>>,
    gradient_of: Vec<Option<usize>>,
    /// Old outputs, and what they are now.
    outputs: Vec<(ValueId, ValueId)>,
    replicated: Vec<(&'static str, String)>,
    /// The traced nodes before which the network is cut.
    cuts: Vec<u32>,
    /// The traced node that the node comes from which is rewritten now, and whether that is one of the backward pass.
    reader: u32,
    is_backward: bool,
    /// How many nodes of the new graph know which traced node they come from.
    n_attributed: usize,
}

impl<'a> Rewrite<'a> {
    fn new(old: &'a Graph, place: TensorPlace, layouts: &StoredLayouts) -> Rewrite<'a> {
        let n = old.values.len();
        let mut prescribed = vec![None; n];
        for stored in old.params.iter().chain(&old.states) {
            prescribed[stored.value.idx()] = layouts.get(&stored.name).copied();
        }
        let (mut lazy, mut fixed) = (vec![false; n], vec![false; n]);
        for node in &old.nodes {
            let is_fixed = match node.op {
                Op::Param(_) | Op::State(_) | Op::Const(_) => true,
                Op::Input(_) => false,
                _ => node.inputs.iter().all(|v| fixed[v.idx()]),
            };
            let cheap = match node.op {
                Op::Param(_) | Op::State(_) | Op::Const(_) => true,
                Op::Unary(_) | Op::Binary(_) | Op::Cast(_) | Op::Expand => is_fixed,
                Op::Permute(_) | Op::Slice { .. } => is_fixed,
                _ => false,
            };
            for v in &node.outputs {
                fixed[v.idx()] = is_fixed;
                let of_lazy = node.inputs.iter().all(|v| lazy[v.idx()]);
                lazy[v.idx()] = matches!(node.op, Op::Reshape) || cheap && of_lazy;
            }
        }
        Rewrite {
            old,
            place,
            graph: Graph { samples: old.samples, ..Graph::default() },
            made: vec![Vec::new(); n],
            lazy,
            fixed,
            prescribed,
            columns: seeds::columns(old),
            gradient_of: seeds::gradients(old),
            outputs: Vec::new(),
            replicated: Vec::new(),
            cuts: Vec::new(),
            reader: 0,
            is_backward: false,
            n_attributed: 0,
        }
    }

    /// Says that the nodes added since the last call come from what this old node comes from.
    fn comes_from(&mut self, node: &Node) {
        self.graph.nodes[self.n_attributed..].iter_mut().for_each(|new| new.origin = node.origin);
        self.n_attributed = self.graph.nodes.len();
    }

    fn node(&mut self, i: usize) {
        let node = &self.old.nodes[i];
        if let Op::Input(_) = node.op {
            let value = self.old.value(node.outputs[0]);
            let shapes = vec![(value.shape.clone(), value.dtype)];
            let new = self.graph.push_shaped(node.op.clone(), &[], &node.layer, shapes);
            self.made[node.outputs[0].idx()].push((Whole, new[0]));
            return self.comes_from(node);
        }
        if !self.lazy[node.outputs[0].idx()] {
            let way = self.choose(i);
            self.note_replicated(i, &way);
            self.emit(node, &way);
            self.comes_from(node);
        }
        // Outputs and gradients are exchanged as soon as they are known; what reads gradients comes last.
        for &v in &node.outputs {
            if self.old.outputs.iter().any(|(_, output)| *output == v) {
                let value = self.get_result(v, Whole);
                let value = self.settled(value);
                self.outputs.push((v, value));
            }
            if let Some(param) = self.gradient_of[v.idx()].filter(|&p| self.old.grads[p] == Some(v)) {
                self.get_result(v, self.layout_of(self.old.params[param].value));
            }
        }
    }

    /// The way of a node that costs least; the first of several.
    fn choose(&self, i: usize) -> Way {
        let node = &self.old.nodes[i];
        let all = ways(&self.given(i));
        let last = all.last().cloned();
        let mut best: Option<(f64, Way)> = None;
        for way in all {
            let Some(cost) = self.way_cost(node, &way) else { continue };
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, way));
            }
        }
        // Integers in pieces cannot be put together; nothing computes them so if something reads them otherwise.
        best.map(|(_, way)| way).or(last).expect("there is always the replicated way")
    }

    fn given(&self, i: usize) -> Given<'a> {
        let (old, node) = (self.old, &self.old.nodes[i]);
        let weight = node.inputs.get(1).is_some_and(|v| self.fixed[v.idx()]);
        Given {
            op: &node.op,
            x: node.inputs.iter().map(|&v| old.shape(v)).collect(),
            y: node.outputs.iter().map(|&v| old.shape(v)).collect(),
            seen: node.inputs.iter().map(|&v| self.seen(v)).collect(),
            place: self.place,
            columns: self.columns[i].filter(|_| weight),
        }
    }

    /// The forms of a value that the node which is rewritten now may read.
    fn made_for_reader(&self, v: ValueId) -> Vec<(ValueLayout, ValueId)> {
        let chunk = |origin: u32| self.cuts.partition_point(|cut| *cut <= origin);
        let may_read = |new: ValueId| {
            let from = self.graph.value(new).producer.idx();
            let node = &self.graph.nodes[from];
            let of_forward = self.is_backward && from < self.graph.n_forward;
            !of_forward || node.op.is_leaf() || chunk(node.origin) <= chunk(self.reader)
        };
        let made = &self.made[v.idx()];
        // What a value was computed in comes first, and is where its readers expect it.
        let own = made.iter().copied().enumerate().filter(|(k, (_, new))| *k == 0 || may_read(*new));
        own.map(|(_, form)| form).collect()
    }

    /// The layouts in which a value exists, or could without sending anything.
    fn seen(&self, v: ValueId) -> Vec<ValueLayout> {
        let made = self.made_for_reader(v);
        let mut seen: Vec<_> = made.iter().map(|(layout, _)| *layout).collect();
        let node = self.old.producer(v);
        if !self.lazy[v.idx()] {
            return seen;
        }
        for &x in &node.inputs {
            for layout in self.seen(x) {
                if let Some(there) = self.carried(node, x, layout).filter(|l| !seen.contains(l)) {
                    seen.push(there);
                }
            }
        }
        seen
    }

    /// The layout of a lazy node's result if its operand `x` has this one.
    fn carried(&self, node: &Node, x: ValueId, layout: ValueLayout) -> Option<ValueLayout> {
        let (from, to) = (self.old.shape(x), self.old.shape(node.outputs[0]));
        match &node.op {
            Op::Reshape => layout.reshaped(from.dims(), to.dims(), self.place.ranks),
            _ if layout.dim().is_none() => None,
            Op::Permute(perm) => perm.iter().position(|p| Some(*p) == layout.dim()).map(|d| layout.at(d)),
            &Op::Slice { axis, .. } => (layout.dim() != Some(axis)).then_some(layout),
            _ => (from == to).then_some(layout),
        }
    }

    /// The layouts of a lazy node's operands from which its result follows in this one.
    fn sources(&self, node: &Node, layout: ValueLayout) -> Option<Vec<ValueLayout>> {
        let to = self.old.shape(node.outputs[0]);
        let Some(dim) = layout.dim() else {
            let terms = layout == Partial && !matches!(node.op, Op::Reshape);
            return (!terms).then(|| vec![layout; node.inputs.len()]);
        };
        let source = |&x: &ValueId| {
            let from = self.old.shape(x);
            match &node.op {
                Op::Reshape => layout.reshaped(to.dims(), from.dims(), self.place.ranks),
                Op::Permute(perm) => Some(layout.at(perm[dim])),
                &Op::Slice { axis, .. } => (dim != axis).then_some(layout),
                _ => {
                    let at = (dim + from.rank()).checked_sub(to.rank());
                    let cut = at.filter(|at| from.dims()[*at] == to.dims()[dim]);
                    Some(cut.map_or(Whole, |at| layout.at(at)))
                }
            }
        };
        node.inputs.iter().map(source).collect()
    }

    /// What it costs to have a value in a layout; `None` if it cannot be.
    fn cost(&self, v: ValueId, layout: ValueLayout) -> Option<f64> {
        let (value, made) = (self.old.value(v), self.made_for_reader(v));
        if !layout.fits(value.shape.dims(), self.place.ranks) {
            return None;
        }
        if made.iter().any(|(l, _)| *l == layout) {
            return Some(0.0);
        }
        let node = self.old.producer(v);
        if self.lazy[v.idx()] {
            if node.op.is_leaf() && made.is_empty() {
                return match self.prescribed[v.idx()] {
                    None => (layout != Partial).then_some(0.0),
                    Some(from) => convert::cost(from, layout, &value.shape, value.dtype, self.place.ranks),
                };
            }
            let sources = self.sources(node, layout).filter(|_| !node.op.is_leaf());
            let costs = |sources: Vec<ValueLayout>| -> Option<f64> {
                node.inputs.iter().zip(sources).map(|(&x, l)| self.cost(x, l)).sum()
            };
            if let Some(cost) = sources.and_then(costs) {
                return Some(cost);
            }
            if !node.op.is_leaf() {
                let whole = costs(vec![Whole; node.inputs.len()])?;
                let cut = convert::cost(Whole, layout, &value.shape, value.dtype, self.place.ranks)?;
                return Some(whole + cut);
            }
        }
        let convert =
            |from: ValueLayout| convert::cost(from, layout, &value.shape, value.dtype, self.place.ranks);
        made.iter().filter_map(|(from, _)| convert(*from)).reduce(f64::min)
    }

    /// What a way costs: what is sent for its operands and later for its results, weights that are not split, and work that all
    /// ranks do.
    fn way_cost(&self, node: &Node, way: &Way) -> Option<f64> {
        let mut cost = 0.0;
        let has_weight =
            matches!(node.op, Op::MatMul { .. } | Op::Conv2d(_) | Op::Conv2dGradInput { .. } | Op::Embedding);
        for (&v, &layout) in node.inputs.iter().zip(&way.inputs) {
            cost += self.cost(v, layout)?;
            let weight = has_weight && self.fixed[v.idx()] && self.seen(v).is_empty();
            if weight && layout == Whole {
                cost += REPLICATED_WEIGHT * self.old.shape(v).numel() as f64;
            }
        }
        for (&v, &layout) in node.outputs.iter().zip(&way.outputs) {
            let value = self.old.value(v);
            if !layout.fits(value.shape.dims(), self.place.ranks) {
                return None;
            }
            let then = match self.gradient_of[v.idx()] {
                Some(param) => self.layout_of(self.old.params[param].value),
                None if layout == Partial => ValueLayout::split(0),
                None => layout,
            };
            cost += convert::cost(layout, then, &value.shape, value.dtype, self.place.ranks)?;
        }
        let shared = way.inputs.iter().chain(&way.outputs).any(|l| *l != Whole);
        let share = if shared { self.place.ranks as f64 } else { 1.0 };
        Some(cost + flops(self.old, node) / FLOPS_PER_ELEMENT / share)
    }

    /// The layout that a parameter or state has.
    fn layout_of(&self, v: ValueId) -> ValueLayout {
        let first = self.made[v.idx()].first().map(|(layout, _)| *layout);
        first.or(self.prescribed[v.idx()]).unwrap_or(Whole)
    }

    /// The value in a layout, as a result of the step.
    fn get_result(&mut self, v: ValueId, layout: ValueLayout) -> ValueId {
        let node = self.old.producer(v);
        let new = self.get(v, layout, &node.layer);
        self.comes_from(node);
        new
    }

    /// The value in a layout.
    fn get(&mut self, v: ValueId, layout: ValueLayout, layer: &str) -> ValueId {
        let made = self.made_for_reader(v);
        if let Some((_, new)) = made.iter().find(|(l, _)| *l == layout) {
            return *new;
        }
        let (old, place) = (self.old, self.place);
        let (value, node) = (old.value(v), old.producer(v));
        if let (true, Some(first)) = (made.is_empty(), self.prescribed[v.idx()].filter(|l| *l != layout)) {
            let stored = self.get_lazily(v, first, layer);
            self.made[v.idx()].push((first, stored));
        }
        let made = self.made_for_reader(v);
        let new = if self.lazy[v.idx()] && (made.is_empty() || !node.op.is_leaf()) {
            self.get_lazily(v, layout, layer)
        } else {
            let cost =
                |from: ValueLayout| convert::cost(from, layout, &value.shape, value.dtype, place.ranks);
            let options = made.iter().filter_map(|&(from, x)| Some((cost(from)?, from, x)));
            let best = options.reduce(|a, b| if b.0 < a.0 { b } else { a });
            let (_, from, x) = best.expect("operands are made before their users, in a layout that converts");
            convert::convert(&mut self.graph, x, from, layout, &value.shape, place, layer)
        };
        self.made[v.idx()].push((layout, new));
        new
    }

    fn get_lazily(&mut self, v: ValueId, layout: ValueLayout, layer: &str) -> ValueId {
        let (old, ranks) = (self.old, self.place.ranks);
        let (value, node) = (old.value(v), old.producer(v));
        let sources = self
            .sources(node, layout)
            .filter(|sources| node.inputs.iter().zip(sources).all(|(&x, &l)| self.cost(x, l).is_some()));
        let Some(sources) = sources else {
            let whole = self.get(v, Whole, layer);
            return convert::convert(&mut self.graph, whole, Whole, layout, &value.shape, self.place, layer);
        };
        let inputs: Vec<_> = node.inputs.iter().zip(sources).map(|(&x, l)| self.get(x, l, layer)).collect();
        let shapes = vec![(layout.local(&value.shape, ranks), value.dtype)];
        self.comes_from(node);
        let new = self.graph.push_shaped(node.op.clone(), &inputs, &node.layer, shapes)[0];
        self.comes_from(node);
        new
    }

    fn emit(&mut self, node: &Node, way: &Way) {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (&v, &layout) in node.inputs.iter().zip(&way.inputs) {
            inputs.push(self.get(v, layout, &node.layer));
            self.comes_from(node);
        }
        let (old, ranks) = (self.old, self.place.ranks);
        let local = |(v, l): (&ValueId, &ValueLayout)| {
            let value = old.value(*v);
            (l.local(&value.shape, ranks), value.dtype)
        };
        let shapes: Vec<(Shape, DType)> = node.outputs.iter().zip(&way.outputs).map(local).collect();
        let mut outputs = match way.form {
            OpForm::Op | OpForm::Divided => {
                self.graph.push_shaped(way.op.clone(), &inputs, &node.layer, shapes.clone())
            }
            OpForm::Vocabulary => self.vocabulary(node, &inputs, &shapes),
        };
        if way.form == OpForm::Divided {
            let op = Op::Unary(Unary::Scale(1.0 / ranks as f32));
            outputs = self.graph.push_shaped(op, &outputs, &node.layer, shapes);
        }
        for ((&v, &layout), new) in node.outputs.iter().zip(&way.outputs).zip(outputs) {
            self.made[v.idx()].push((layout, new));
        }
    }

    /// The nodes of a table or a loss that is split over the ids.
    fn vocabulary(&mut self, node: &Node, x: &[ValueId], shapes: &[(Shape, DType)]) -> Vec<ValueId> {
        let mut to = Vocabulary { graph: &mut self.graph, place: self.place, layer: &node.layer };
        match node.op {
            Op::Embedding => vec![to.embedding(x[0], x[1])],
            Op::EmbeddingGrad { .. } => vec![to.embedding_grad(x[0], x[1], shapes[0].0.dims()[0])],
            Op::CrossEntropy(options) => to.loss([x[0], x[1]], x.get(2).copied(), options).to_vec(),
            Op::CrossEntropyGrad(options) => {
                vec![to.loss_grad([x[0], x[1], x[2], x[3]], x.get(4).copied(), options)]
            }
            _ => unreachable!("{} has no vocabulary", node.op.name()),
        }
    }

    /// Notes what all ranks compute alike in the forward pass, single numbers apart.
    fn note_replicated(&mut self, i: usize, way: &Way) {
        let node = &self.old.nodes[i];
        let alike = way.inputs.iter().chain(&way.outputs).all(|l| *l == Whole);
        let large = node.outputs.iter().any(|v| self.old.shape(*v).numel() > 1);
        let entry = (node.op.name(), node.layer.clone());
        if alike && large && i < self.old.n_forward && !self.replicated.contains(&entry) {
            self.replicated.push(entry);
        }
    }

    /// Gradients and new states in the layouts of what they belong to, and whole outputs.
    fn finish(mut self) -> TensorSplit {
        let old = self.old;
        let stored = |rewrite: &mut Self, stored: &Stored| {
            let layout = rewrite.layout_of(stored.value);
            let value = rewrite.get_result(stored.value, layout);
            Stored { value, part: layout.part(rewrite.place), ..stored.clone() }
        };
        let params: Vec<_> = old.params.iter().map(|p| stored(&mut self, p)).collect();
        let states: Vec<_> = old.states.iter().map(|s| stored(&mut self, s)).collect();
        let named = old.params.iter().chain(&old.states);
        let layouts = named.map(|s| (s.name.clone(), self.layout_of(s.value))).collect();
        let grads = (0..old.grads.len()).map(|p| {
            let grad = old.grads[p]?;
            let value = self.get_result(grad, self.layout_of(old.params[p].value));
            Some(self.settled(value))
        });
        let grads = grads.collect();
        let updates = old.updates.iter().map(|&(s, v)| {
            let layout = self.layout_of(old.states[s].value);
            (s, self.get_result(v, layout))
        });
        let updates = updates.collect();
        let output =
            |v: ValueId| self.outputs.iter().find(|(old, _)| *old == v).expect("all nodes were visited").1;
        let outputs = old.outputs.iter().map(|(name, v)| (name.clone(), output(*v))).collect();
        let input = |i: &Input| Input { name: i.name.clone(), value: self.made[i.value.idx()][0].1 };
        let inputs = old.inputs.iter().map(input).collect();
        let graph = Graph { params, states, grads, updates, outputs, inputs, ..self.graph };
        let graph = overlapped(&graph.without_dead());
        graph.verify();
        TensorSplit { graph, replicated: self.replicated, layouts }
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

/// About how many operations a node takes on one rank.
fn flops(graph: &Graph, node: &Node) -> f64 {
    let numel = |v: ValueId| graph.shape(v).numel() as f64;
    let y = numel(node.outputs[0]);
    match &node.op {
        Op::MatMul { ta, .. } => {
            let a = graph.shape(node.inputs[0]).dims();
            2.0 * y * a[a.len() - if *ta { 2 } else { 1 }] as f64
        }
        Op::Conv2d(_) => 2.0 * y * numel(node.inputs[1]) / graph.shape(node.inputs[1]).dims()[0] as f64,
        Op::Conv2dGradInput { .. } | Op::Conv2dGradWeight { .. } => {
            let (x, o) = (numel(node.inputs[0]), graph.shape(node.inputs[1]).dims()[1] as f64);
            2.0 * x * o
        }
        Op::Attention(_) | Op::AttentionGrad(_) => {
            let t = graph.shape(node.outputs[0]).dims()[1] as f64;
            4.0 * y * t
        }
        Op::Recurrent { .. } | Op::RecurrentGrad { .. } => {
            let h = graph.shape(node.inputs[1]).last() as f64;
            8.0 * y * h
        }
        _ => 2.0 * y,
    }
}
