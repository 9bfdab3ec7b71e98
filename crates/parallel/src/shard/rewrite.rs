//! The rewrite: walks a step's nodes in their order, puts gathers ahead of the layers that read sharded parameters, and scatters
//! behind the gradients.

use std::collections::{HashMap, VecDeque};

use polyreme_graph::graph::Rebuild;
use polyreme_graph::op::ExchangeKind;
use polyreme_graph::precision::is_half;
use polyreme_graph::{Axis, DType, Graph, Op, Part, ValueId};

use super::choose::{ShardPlace, shard_of};
use super::groups::{Groups, ShardRead};

/// Layers whose weights are gathered at a time: the one that is computed, and the next one.
const GATHERED_MAX: usize = 2;

/// Whether the backward pass of a microbatch follows its forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passes {
    /// At once: the last layer's weights are kept for both.
    Together,
    /// Other microbatches may come between, as in a pipeline.
    Apart,
}

/// The step, or forward pass, of a rank that keeps shards of its large parameters. Parameters have the same shards in both.
pub fn shard(step: &Graph, place: ShardPlace, passes: Passes) -> Graph {
    let shards: Vec<Option<Part>> =
        step.params.iter().map(|p| shard_of(step.shape(p.value).dims(), place)).collect();
    let is_sharded: Vec<bool> = shards.iter().map(Option::is_some).collect();
    let groups = Groups::new(step, &is_sharded, passes == Passes::Together);
    let mut rewrite = ShardRewrite {
        old: step,
        place,
        on_the_way_max: groups.most(),
        started: vec![false; groups.list.len()],
        groups,
        shards,
        to: Rebuild::new(step),
        gathered: HashMap::new(),
        views: HashMap::new(),
        on_the_way: VecDeque::new(),
        grads: vec![None; step.params.len()],
    };
    rewrite.leaves();
    for i in 0..step.nodes.len() {
        if i == step.n_forward {
            rewrite.to.graph.n_forward = rewrite.to.graph.nodes.len();
        }
        rewrite.node(i);
    }
    if step.n_forward == step.nodes.len() {
        rewrite.to.graph.n_forward = rewrite.to.graph.nodes.len();
    }
    rewrite.finish()
}

struct ShardRewrite<'a> {
    old: &'a Graph,
    place: ShardPlace,
    /// By parameter.
    shards: Vec<Option<Part>>,
    groups: Groups,
    /// By group: whether its gathers have been started.
    started: Vec<bool>,
    to: Rebuild,
    /// By group and parameter: the shards of all ranks.
    gathered: HashMap<(usize, usize), ValueId>,
    /// By group and old value: a whole parameter, or a view of it.
    views: HashMap<(usize, ValueId), ValueId>,
    /// Gradients that are being summed, of which this rank has not taken its shard yet.
    on_the_way: VecDeque<(usize, ValueId)>,
    /// How many of them there may be: as many as a layer has.
    on_the_way_max: usize,
    /// By parameter: this rank's shard of the gradient.
    grads: Vec<Option<ValueId>>,
}

impl ShardRewrite<'_> {
    /// The shards that this rank keeps. They come first: they are gathered before the nodes around their parameters run.
    fn leaves(&mut self) {
        for (p, shard) in self.shards.iter().enumerate() {
            let Some(shard) = shard else { continue };
            let old = self.old.params[p].value;
            let (value, node) = (self.old.value(old), self.old.producer(old));
            let dims = shard.dims(value.shape.dims()).expect("a dim that divides was chosen");
            let shapes = vec![(dims.into(), value.dtype)];
            let new = self.to.graph.push_shaped(node.op.clone(), &[], &node.layer, shapes);
            self.to.map[old.idx()] = Some(new[0]);
            self.to.comes_from(node.origin);
        }
    }

    fn node(&mut self, i: usize) {
        let (old, node) = (self.old, &self.old.nodes[i]);
        if let Some(group) = self.groups.begins[i] {
            self.gather_ahead(group, usize::from(i >= old.n_forward));
        }
        if node.outputs.iter().any(|v| self.groups.views[v.idx()]) {
            return;
        }
        match self.groups.of_node[i] {
            None => self.to.copy(old, i),
            Some(group) => {
                let views = &self.groups.views;
                let is_view: Vec<bool> = node.inputs.iter().map(|v| views[v.idx()]).collect();
                let read = |(&v, is_view)| if is_view { self.view(group, v) } else { self.to.get(v) };
                let inputs: Vec<_> = node.inputs.iter().zip(is_view).map(read).collect();
                let op = self.as_read(&node.op, &inputs);
                self.to.replace(old, &node.outputs, op, &inputs, &node.layer);
            }
        }
        for (p, grad) in old.grads.iter().enumerate() {
            let is_here = |grad: &ValueId| node.outputs.contains(grad);
            if let Some(grad) = grad.filter(is_here).filter(|_| self.shards[p].is_some()) {
                self.scatter(p, grad);
                self.to.comes_from(node.origin);
            }
        }
    }

    /// Starts the gathers of a group and of the one after it in the pass.
    fn gather_ahead(&mut self, group: usize, pass: usize) {
        let order = &self.groups.order[pass];
        let at = order.iter().position(|g| *g == group).expect("a group of the pass");
        let ahead: Vec<usize> = order[at..].iter().copied().take(GATHERED_MAX).collect();
        for group in ahead {
            if !std::mem::replace(&mut self.started[group], true) {
                for need in self.groups.list[group].needs.clone() {
                    self.gather(group, need);
                }
            }
        }
    }

    fn gather(&mut self, group: usize, ShardRead { param, half }: ShardRead) {
        let value = self.old.params[param].value;
        let layer = &self.old.producer(value).layer;
        let mut x = self.to.get(value);
        if let Some(half) = half {
            let shape = self.to.graph.shape(x).clone();
            x = self.to.graph.push_shaped(Op::Cast(half), &[x], layer, vec![(shape, half)])[0];
        }
        let ShardPlace { rank, ranks, .. } = self.place;
        let all = self.push(ExchangeKind::Gather { ranks, rank }, x, layer);
        self.gathered.insert((group, param), all);
    }

    /// A sharded parameter or a view of it, whole, for the readers of a group.
    fn view(&mut self, group: usize, v: ValueId) -> ValueId {
        if let Some(&known) = self.views.get(&(group, v)) {
            return known;
        }
        let (shape, node) = (self.old.shape(v).clone(), self.old.producer(v));
        let view = if let Op::Param(p) = node.op {
            self.whole(group, p, v)
        } else {
            let x = self.view(group, node.inputs[0]);
            let of = self.to.graph.value(x).dtype;
            match node.op {
                // It was cast before it was sent.
                Op::Cast(to) if to == of => x,
                Op::Cast(to) => {
                    self.to.graph.push_shaped(Op::Cast(to), &[x], &node.layer, vec![(shape, to)])[0]
                }
                ref op => self.to.graph.push_shaped(op.clone(), &[x], &node.layer, vec![(shape, of)])[0],
            }
        };
        self.views.insert((group, v), view);
        view
    }

    /// A whole parameter, from the shards `[ranks, outer, inner / ranks]` of all ranks.
    fn whole(&mut self, group: usize, param: usize, v: ValueId) -> ValueId {
        let (all, shape) = (self.gathered[&(group, param)], self.old.shape(v).clone());
        let layer = &self.old.producer(v).layer;
        let [outer, ranks, inner] = self.pieces(param);
        if outer == 1 {
            return self.to.graph.reshape(all, shape, layer);
        }
        let all = self.to.graph.reshape(all, [ranks, outer, inner].into(), layer);
        let whole = self.permuted(all, layer);
        self.to.graph.reshape(whole, shape, layer)
    }

    /// Sums a gradient over the ranks; each gets its shard. The shard of an earlier one is taken. In reproducible steps the gradient
    /// stays whole.
    fn scatter(&mut self, param: usize, grad: ValueId) {
        let layer = &self.old.producer(grad).layer;
        let pieces @ [outer, ranks, inner] = self.pieces(param);
        let mut x = self.to.get(grad);
        if outer > 1 {
            x = self.to.graph.reshape(x, pieces.into(), layer);
            x = self.permuted(x, layer);
        }
        let x = self.to.graph.reshape(x, [ranks, outer * inner].into(), layer);
        if self.place.in_tree {
            // It is copied into a leaf of the tree before this rank's rows are taken.
            self.on_the_way.push_back((param, x));
            return self.take_shard();
        }
        let sums = self.push(ExchangeKind::Scatter { ranks }, x, layer);
        self.on_the_way.push_back((param, sums));
        if self.on_the_way.len() > self.on_the_way_max {
            self.take_shard();
        }
    }

    /// This rank's shard of the gradient that has been on its way for longest.
    fn take_shard(&mut self) {
        let Some((param, sums)) = self.on_the_way.pop_front() else { return };
        let layer = self.to.graph.producer(sums).layer.clone();
        let own = Op::Slice { axis: 0, start: self.place.rank, len: 1 };
        let pushed = self.to.graph.push(own, &[sums], &layer);
        let own = pushed.expect("a row for each rank")[0];
        let shape = self.to.graph.shape(self.to.get(self.old.params[param].value)).clone();
        self.grads[param] = Some(self.to.graph.reshape(own, shape, &layer));
    }

    /// A parameter's elements as `[outer, ranks, inner]`, of which each rank has those of its number.
    fn pieces(&self, param: usize) -> [usize; 3] {
        let shard = self.shards[param].expect("a sharded parameter");
        let dims = self.old.shape(self.old.params[param].value).dims();
        let outer = dims[..shard.dim].iter().product();
        [outer, shard.of, dims[shard.dim..].iter().product::<usize>() / shard.of]
    }

    fn permuted(&mut self, x: ValueId, layer: &str) -> ValueId {
        self.to.graph.push(Op::Permute(vec![1, 0, 2]), &[x], layer).expect("three dims")[0]
    }

    fn push(&mut self, kind: ExchangeKind, x: ValueId, layer: &str) -> ValueId {
        let pushed = self.to.graph.push(Op::Exchange { axis: Axis::Data, kind }, &[x], layer);
        pushed.expect("an exchange of floats")[0]
    }

    /// A reader of these operands: a product need not round what was rounded before it was sent.
    fn as_read(&self, op: &Op, inputs: &[ValueId]) -> Op {
        let dtype = |v: &ValueId| -> DType { self.to.graph.value(*v).dtype };
        match *op {
            Op::MatMul { ta, tb, .. } if inputs.iter().all(|v| is_half(dtype(v))) => {
                Op::MatMul { ta, tb, rounded: None }
            }
            ref op => op.clone(),
        }
    }

    fn finish(mut self) -> Graph {
        while !self.on_the_way.is_empty() {
            self.take_shard();
        }
        let (old, shards, grads) = (self.old, self.shards, self.grads);
        let mut graph = self.to.finish(old);
        for (p, shard) in shards.into_iter().enumerate().filter(|(_, shard)| shard.is_some()) {
            graph.params[p].shard = shard;
            if let Some(grad) = graph.grads.get_mut(p) {
                *grad = grads[p];
            }
        }
        let graph = graph.without_dead();
        graph.verify();
        graph
    }
}
