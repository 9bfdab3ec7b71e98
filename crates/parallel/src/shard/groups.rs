//! Which layers read which sharded parameters, in each pass: what is gathered together, and in which order.
//!
//! A group is a layer of one pass. It gathers a parameter once, however many of its nodes read it; a table that the first and the
//! last layer share is gathered by both. Between parameter and reader there may be *views*: casts, reshapes, permutations and
//! slices, which are computed again in each group rather than kept from the forward to the backward pass.

use polyreme_graph::memory::reshape_root;
use polyreme_graph::{DType, Graph, Op, ValueId};

use crate::stage::positions::unit;

/// What is gathered of a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ShardRead {
    pub(super) param: usize,
    /// The format of all that reads it, if that is narrower: then shards are cast before they are sent.
    pub(super) half: Option<DType>,
}

/// A layer in one pass; the last one of the forward pass may go on into the backward pass.
#[derive(Debug)]
pub(super) struct GatherGroup {
    unit: String,
    /// In the order in which they are first read.
    pub(super) needs: Vec<ShardRead>,
}

/// The groups of a step.
pub(super) struct Groups {
    pub(super) list: Vec<GatherGroup>,
    /// By node: the group that it belongs to, if it reads a sharded parameter.
    pub(super) of_node: Vec<Option<usize>>,
    /// By node: the group whose layer begins there in its pass, with or without reading a parameter.
    pub(super) begins: Vec<Option<usize>>,
    /// By pass: its groups in the order in which they begin.
    pub(super) order: [Vec<usize>; 2],
    /// By value: whether it is a sharded parameter or a view of one.
    pub(super) views: Vec<bool>,
}

impl Groups {
    /// `sharded` says of each parameter whether it is. With `goes_on`, what the last layer of the forward pass has gathered is
    /// kept for the backward pass, which begins with the same layer.
    pub(super) fn new(step: &Graph, sharded: &[bool], goes_on: bool) -> Groups {
        let views = views(step, sharded);
        let mut groups = Groups {
            list: Vec::new(),
            of_node: vec![None; step.nodes.len()],
            begins: vec![None; step.nodes.len()],
            order: [Vec::new(), Vec::new()],
            views,
        };
        for (i, node) in step.nodes.iter().enumerate() {
            let is_view = node.outputs.iter().any(|v| groups.views[v.idx()]);
            if is_view || !node.inputs.iter().any(|v| groups.views[v.idx()]) {
                continue;
            }
            let group = groups.find(usize::from(i >= step.n_forward), unit(&node.layer), goes_on);
            groups.of_node[i] = Some(group);
            for &v in node.inputs.iter().filter(|v| groups.views[v.idx()]) {
                let need = need(step, &node.op, v);
                let needs = &mut groups.list[group].needs;
                match needs.iter_mut().find(|n| n.param == need.param) {
                    Some(known) if known.half != need.half => known.half = None,
                    Some(_) => {}
                    None => needs.push(need),
                }
            }
        }
        groups.find_begins(step);
        groups
    }

    fn find_begins(&mut self, step: &Graph) {
        let mut begun = [const { Vec::<usize>::new() }; 2];
        for (i, node) in step.nodes.iter().enumerate().filter(|(_, node)| !node.op.is_leaf()) {
            let pass = usize::from(i >= step.n_forward);
            let of_layer = self.order[pass].iter().find(|&&g| self.list[g].unit == unit(&node.layer));
            if let Some(&group) = of_layer.filter(|g| !begun[pass].contains(g)) {
                begun[pass].push(group);
                self.begins[i] = Some(group);
            }
        }
    }

    /// The group of a layer in a pass, which may be a new one.
    fn find(&mut self, pass: usize, unit: &str, goes_on: bool) -> usize {
        let here = self.order[pass].iter().find(|&&g| self.list[g].unit == unit);
        if let Some(&group) = here {
            return group;
        }
        let last_forward = self.order[0].last().copied();
        let continued = last_forward
            .filter(|&g| goes_on && pass == 1 && self.order[1].is_empty() && self.list[g].unit == unit);
        let group = continued.unwrap_or_else(|| {
            self.list.push(GatherGroup { unit: unit.into(), needs: Vec::new() });
            self.list.len() - 1
        });
        self.order[pass].push(group);
        group
    }

    /// The most parameters that one layer gathers.
    pub(super) fn most(&self) -> usize {
        self.list.iter().map(|g| g.needs.len()).max().unwrap_or(0)
    }
}

/// By value: whether it is a sharded parameter, or follows from one alone by a cast or by moving elements. Results are not: they
/// must exist in any case.
fn views(step: &Graph, sharded: &[bool]) -> Vec<bool> {
    let mut is_result = vec![false; step.values.len()];
    step.results().for_each(|v| is_result[v.idx()] = true);
    let mut views = vec![false; step.values.len()];
    for node in &step.nodes {
        let y = node.outputs[0].idx();
        views[y] = match node.op {
            Op::Param(p) => sharded[p],
            Op::Reshape | Op::Cast(_) | Op::Permute(_) | Op::Slice { .. } => {
                views[node.inputs[0].idx()] && !is_result[y]
            }
            _ => false,
        };
    }
    views
}

/// The parameter that a reader's operand is a view of, and the format in which it is read.
fn need(step: &Graph, reader: &Op, operand: ValueId) -> ShardRead {
    let mut half = match *reader {
        Op::MatMul { rounded, .. } => rounded,
        _ => None,
    };
    let mut v = reshape_root(step, operand);
    loop {
        let node = step.producer(v);
        match node.op {
            Op::Param(param) => return ShardRead { param, half },
            Op::Cast(DType::F32) => half = None,
            Op::Cast(to) => half = Some(to),
            _ => {}
        }
        v = reshape_root(step, node.inputs[0]);
    }
}
