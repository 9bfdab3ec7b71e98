//! Recomputation: a rewrite that trades time for a stated memory budget.
//!
//! A value of the forward pass that the backward pass reads is kept all the way between. Dropping it means computing it
//! again just before its first reader in the backward pass, from values that are still kept. Which to drop is chosen by
//! trying: first values that are cheap for their size, more and more of them; then everything but the values at the
//! graph's narrow places (where one tensor is all that crosses, as between blocks of a residual network). The cheapest
//! choice that fits the budget wins. Masks of dropout come from a counter, so they come out the same; statistics of
//! batch norm are computed again, their running ones are updated once. A sum over the ranks is never computed again: it
//! is small, all ranks would wait for it, and they need not have dropped the same values.

use std::collections::BTreeSet;

use crate::cost::cost;
use crate::graph::{Graph, Rebuild, ValueId};
use crate::op::Op;

/// The result of a recomputation.
#[derive(Debug)]
pub struct Recomputed {
    /// The rewritten graph.
    pub graph: Graph,
    /// Bytes by the caller's measure.
    pub bytes: usize,
    /// Floating-point operations that are done twice.
    pub extra_flops: u64,
}

/// No choice of what to recompute fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "a step needs at least {least_bytes} bytes even with recomputation, and the budget is {budget_bytes}; use a smaller batch"
)]
pub struct BudgetError {
    /// What was asked for.
    pub budget_bytes: usize,
    /// The least that recomputation can reach.
    pub least_bytes: usize,
}

/// The graph of a step, rewritten so that `measure` gives at most `budget_bytes`; as it is, if it fits already.
pub fn recompute(
    graph: &Graph,
    budget_bytes: usize,
    measure: &dyn Fn(&Graph) -> usize,
) -> Result<Recomputed, BudgetError> {
    let parts = recompute_parts(std::slice::from_ref(graph), budget_bytes, &|parts| measure(&parts[0]))?;
    let RecomputedParts { mut graphs, bytes, extra_flops } = parts;
    Ok(Recomputed { graph: graphs.remove(0), bytes, extra_flops })
}

/// The result of a recomputation of several graphs.
#[derive(Debug)]
pub struct RecomputedParts {
    /// The rewritten graphs.
    pub graphs: Vec<Graph>,
    /// Bytes of all together, by the caller's measure.
    pub bytes: usize,
    /// Floating-point operations that are done twice.
    pub extra_flops: u64,
}

/// The same for parts of a step that one rank computes, such as chunks of a pipeline, which are measured together. Each drops
/// the same share of its values.
pub fn recompute_parts(
    parts: &[Graph],
    budget_bytes: usize,
    measure: &dyn Fn(&[Graph]) -> usize,
) -> Result<RecomputedParts, BudgetError> {
    let now = measure(parts);
    if now <= budget_bytes {
        return Ok(RecomputedParts { graphs: parts.to_vec(), bytes: now, extra_flops: 0 });
    }
    let total = |graphs: &[Graph]| graphs.iter().map(|g| crate::cost::total(g).flops).sum::<u64>();
    let flops = total(parts);
    let mut least_bytes = now;
    let mut best: Option<RecomputedParts> = None;
    let by_part: Vec<_> = parts.iter().map(choices).collect();
    let n_choices = by_part.first().map_or(0, Vec::len);
    let together = |k: usize| by_part.iter().map(|of| &of[k]).collect::<Vec<_>>();
    let mut choices: Vec<_> = (0..n_choices).map(together).collect();
    choices.dedup();
    for dropped in choices {
        let graphs: Vec<_> = parts.iter().zip(dropped).map(|(graph, set)| drop_values(graph, set)).collect();
        let bytes = measure(&graphs);
        least_bytes = least_bytes.min(bytes);
        let extra_flops = total(&graphs) - flops;
        if bytes <= budget_bytes && best.as_ref().is_none_or(|b| extra_flops < b.extra_flops) {
            best = Some(RecomputedParts { graphs, bytes, extra_flops });
        }
    }
    best.ok_or(BudgetError { budget_bytes, least_bytes })
}

/// Sets of values worth trying; as many for every graph.
fn choices(graph: &Graph) -> Vec<BTreeSet<ValueId>> {
    let kept = kept_values(graph);
    let mut cheap: Vec<(f64, ValueId)> = kept
        .iter()
        .map(|&v| {
            let c = cost(graph, graph.producer(v));
            ((c.flops + 4 * c.bytes) as f64 / graph.value(v).bytes().max(1) as f64, v)
        })
        .collect();
    cheap.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    const STEPS: usize = 12;
    let mut sets: Vec<BTreeSet<ValueId>> =
        (1..=STEPS).map(|k| cheap[..cheap.len() * k / STEPS].iter().map(|&(_, v)| v).collect()).collect();
    let narrow = narrow_values(graph);
    for every in [1, 2, 3, 4, 6, 8] {
        let stay: BTreeSet<_> = narrow.iter().copied().step_by(every).collect();
        sets.push(kept.difference(&stay).copied().collect());
    }
    sets
}

/// Values that the forward pass computes and the backward pass reads.
fn kept_values(graph: &Graph) -> BTreeSet<ValueId> {
    let forward = |v: ValueId| graph.value(v).producer.idx() < graph.n_forward;
    let may_drop = |v: ValueId| {
        let op = &graph.producer(v).op;
        !op.is_leaf() && !matches!(op, Op::Reshape | Op::Exchange { .. })
    };
    let results: BTreeSet<_> = graph.results().collect();
    graph.nodes[graph.n_forward..]
        .iter()
        .flat_map(|n| n.inputs.iter().copied())
        .map(|v| crate::memory::reshape_root(graph, v))
        .filter(|&v| forward(v) && may_drop(v) && !results.contains(&v))
        .collect()
}

/// Forward values at whose computation nothing else that was computed is still to be read by the forward pass.
fn narrow_values(graph: &Graph) -> Vec<ValueId> {
    let mut last_use = vec![0; graph.values.len()];
    for (i, node) in graph.nodes[..graph.n_forward].iter().enumerate() {
        for v in &node.inputs {
            last_use[v.idx()] = i;
        }
    }
    let mut alive: BTreeSet<ValueId> = BTreeSet::new();
    let mut narrow = Vec::new();
    for (i, node) in graph.nodes[..graph.n_forward].iter().enumerate() {
        if node.op.is_leaf() {
            continue;
        }
        alive.retain(|v| last_use[v.idx()] > i);
        alive.extend(node.outputs.iter().filter(|v| last_use[v.idx()] > i));
        if alive.len() == 1 && alive.contains(&node.outputs[0]) && !matches!(node.op, Op::Reshape) {
            narrow.push(node.outputs[0]);
        }
    }
    narrow
}

/// The graph in which the backward pass computes `dropped` again.
fn drop_values(graph: &Graph, dropped: &BTreeSet<ValueId>) -> Graph {
    let mut to = Rebuild::new(graph);
    for i in 0..graph.n_forward {
        to.copy(graph, i);
    }
    to.graph.n_forward = to.graph.nodes.len();
    let mut again = Again { graph, dropped, made: vec![None; graph.values.len()] };
    for node in &graph.nodes[graph.n_forward..] {
        let inputs: Vec<_> = node.inputs.iter().map(|&v| again.value(&mut to, v)).collect();
        to.replace(graph, &node.outputs, node.op.clone(), &inputs, &node.layer);
    }
    let result = to.finish(graph).without_dead();
    result.verify();
    result
}

struct Again<'a> {
    graph: &'a Graph,
    dropped: &'a BTreeSet<ValueId>,
    made: Vec<Option<ValueId>>,
}

impl Again<'_> {
    /// The value that the backward pass should read for `v`: kept, or computed again.
    fn value(&mut self, to: &mut Rebuild, v: ValueId) -> ValueId {
        let at = self.graph.value(v).producer.idx();
        let node = &self.graph.nodes[at];
        let stays = node.op.is_leaf() || matches!(node.op, Op::Exchange { .. });
        if at >= self.graph.n_forward || stays || !self.reaches_dropped(v) {
            return to.get(v);
        }
        if let Some(made) = self.made[v.idx()] {
            return made;
        }
        let inputs: Vec<_> = node.inputs.iter().map(|&u| self.value(to, u)).collect();
        let shapes =
            node.outputs.iter().map(|&o| (self.graph.shape(o).clone(), self.graph.value(o).dtype)).collect();
        let outputs = to.graph.push_shaped(node.op.clone(), &inputs, &node.layer, shapes);
        for (&o, new) in node.outputs.iter().zip(outputs) {
            self.made[o.idx()] = Some(new);
        }
        self.made[v.idx()].expect("just made")
    }

    /// Whether `v` is no longer available: dropped itself, a view of something dropped, or something that the
    /// backward pass never read before and that would have to be kept for this alone.
    fn reaches_dropped(&self, v: ValueId) -> bool {
        let root = crate::memory::reshape_root(self.graph, v);
        self.dropped.contains(&root) || !self.is_kept(root)
    }

    fn is_kept(&self, root: ValueId) -> bool {
        let node = self.graph.producer(root);
        node.op.is_leaf()
            || self.graph.results().any(|r| r == root)
            || self.graph.nodes[self.graph.n_forward..]
                .iter()
                .flat_map(|n| &n.inputs)
                .any(|&u| crate::memory::reshape_root(self.graph, u) == root)
    }
}
