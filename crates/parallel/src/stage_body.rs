//! The body of one stage of a pipeline: the step's graph is cut into chunks, and those of the stage are joined.
//!
//! Where to cut is decided on the graph as it was traced, before it is rewritten for a precision and for this rank: so all
//! ranks cut in the same places, and all graphs of a model can be cut in the places that were chosen for one of them.

use polyreme_graph::recompute::{BudgetError, RecomputedParts};
use polyreme_graph::{Axis, Body, Graph, Link, Segment, Tied, fuse, recompute_parts};

use crate::choice::{CutRoom, choose_cuts};
use crate::passes::CompileError;
use crate::pipeline::{PipelineKind, Timetable, across_steps, timetable};
use crate::plan::Plan;
use crate::shard::{Passes, ShardPlace, shard};
use crate::stage::{
    self, BackwardOrder, ChunkGraph, Crossing, Cut, Homes, StageBody, cut, flops, join, nodes_by_name, place,
};
use crate::staged::CHUNKS_MAX;

/// The timetable of a plan with several stages, for steps of `microbatches`.
pub(crate) fn timetable_of(plan: &Plan, microbatches: usize) -> Result<Timetable, CompileError> {
    if microbatches == 0 {
        // A rank without samples has the chunks of the others, and nothing to run.
        let one = timetable_of(plan, 1)?;
        return Ok(Timetable { microbatches, by_stage: vec![Vec::new(); one.stages], ..one });
    }
    // A step with a flush before it and behind it, however short, is one of 1F1B.
    let kind = if plan.is_flushless() { PipelineKind::OneFOneB } else { plan.pipeline };
    let found = timetable(kind, plan.mesh.stage, microbatches).map_err(CompileError::Pipeline)?;
    let n_chunks = found.place.len();
    if n_chunks > CHUNKS_MAX {
        let kind = plan.pipeline;
        let why = format!(
            "a \"{kind}\" pipeline of {n_chunks} parts is too long; use stages that come to at most {CHUNKS_MAX}"
        );
        return Err(CompileError::Pipeline(why));
    }
    Ok(found)
}

/// That of a full step.
pub(crate) fn usual_timetable(plan: &Plan) -> Result<Timetable, CompileError> {
    let microbatches = plan.shards.map_or(plan.microbatches, |shards| shards.div_ceil(plan.ranks())).max(1);
    if plan.is_flushless() {
        across_steps(plan.mesh.stage, microbatches).map_err(CompileError::Pipeline)?;
    }
    timetable_of(plan, microbatches)
}

/// The traced nodes before which a plan with several stages cuts a graph: the same ones in every rewrite of it.
pub(crate) fn cut_origins(
    step: &Graph,
    plan: &Plan,
    room: Option<CutRoom>,
) -> Result<Vec<u32>, CompileError> {
    if plan.mesh.stage == 1 {
        return Ok(Vec::new());
    }
    let names = choose_cuts(step, plan, &flops(step), room)?;
    let nodes = nodes_by_name(step, &names)?;
    Ok(nodes.into_iter().map(|node| step.nodes[node].origin).collect())
}

/// The chunk of each node of a rewritten graph that is cut before these traced nodes.
pub(crate) fn place_by_origin(step: &Graph, cuts: &[u32]) -> Vec<usize> {
    let homes = Homes::new(step, &vec![0; step.n_forward]);
    let behind = |cut: &u32| {
        let found = |&i: &usize| homes.of_node(i).is_some() && step.nodes[i].origin >= *cut;
        (0..step.n_forward).find(found).unwrap_or(step.n_forward)
    };
    place(step, &cuts.iter().map(behind).collect::<Vec<_>>())
}

/// What a stage's body may take.
pub(crate) struct StageRoom<'a> {
    /// The most bytes.
    pub(crate) bytes: usize,
    /// The bytes of a rank with a body.
    pub(crate) measure: &'a dyn Fn(Body) -> usize,
}

/// The body of a plan's stage, from the graph of the whole step, which is cut before these traced nodes. Chunks recompute what
/// they must to fit.
pub(crate) fn stage_body(
    step: &Graph,
    plan: &Plan,
    cuts: &[u32],
    room: Option<StageRoom>,
) -> Result<Body, CompileError> {
    let timetable = usual_timetable(plan)?;
    let Cut { chunks, tied } = cut(step, &place_by_origin(step, cuts))?;
    if plan.shards.is_some() {
        same_order(&tied, &timetable, plan)?;
    }
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let mine: Vec<ChunkGraph> = chunks.into_iter().filter(|c| timetable.place[c.chunk] == stage).collect();
    let body = |graphs: &[Graph], order| {
        let mut body = joined_body(&mine, graphs, &tied, &timetable, order, plan.shard_place());
        body.declared = polyreme_graph::body::declared(step);
        body
    };
    // Other stages should get what they wait for early; where room is short, it may have to wait for weight gradients.
    let orders: &[BackwardOrder] = match timetable.splits_backward() {
        true => &[BackwardOrder::Apart],
        false => &[BackwardOrder::Apart, BackwardOrder::ByLayer],
    };
    let graphs: Vec<Graph> = mine.iter().map(|c| c.graph.clone()).collect();
    let Some(StageRoom { bytes, measure }) = room else { return Ok(body(&graphs, orders[0])) };
    let (mut best, mut least) = (None::<(RecomputedParts, BackwardOrder)>, usize::MAX);
    for &order in orders {
        match recompute_parts(&graphs, bytes, &|graphs| measure(body(graphs, order))) {
            Ok(found) if best.as_ref().is_none_or(|(b, _)| found.extra_flops < b.extra_flops) => {
                best = Some((found, order));
            }
            Ok(_) => {}
            Err(error) => least = least.min(error.least_bytes),
        }
    }
    let error = BudgetError { budget_bytes: bytes, least_bytes: least };
    let (found, order) = best.ok_or(error)?;
    Ok(body(&found.graphs, order))
}

/// The chunks of a stage as one body, with these graphs for their own.
fn joined_body(
    chunks: &[ChunkGraph],
    graphs: &[Graph],
    tied: &[stage::Tied],
    timetable: &Timetable,
    order: BackwardOrder,
    shards: Option<ShardPlace>,
) -> Body {
    // Each chunk gathers the weights that it reads.
    let sharded = |graph: &Graph| match shards {
        Some(place) => fuse(&shard(graph, place, Passes::Apart)),
        None => fuse(graph),
    };
    let fused = |(c, graph): (&ChunkGraph, &Graph)| ChunkGraph { graph: sharded(graph), ..c.clone() };
    let fused: Vec<_> = chunks.iter().zip(graphs).map(fused).collect();
    let joined = join(&fused, order);
    let (arrives, leaves) = links_of(&joined);
    let graph = &joined.graph;
    let tied = tied.iter().enumerate().filter_map(|(number, tied)| {
        // A frozen one has no gradient to be added up.
        let param = graph.params.iter().position(|p| p.name == tied.name && !p.learning.frozen)?;
        let mut stages: Vec<usize> = tied.chunks.iter().map(|c| timetable.place[*c]).collect();
        stages.sort_unstable();
        stages.dedup();
        (stages.len() > 1).then_some(Tied { param, number, stages })
    });
    let tied = tied.collect();
    let segments = joined.ranges.iter().cloned();
    let segments = segments.map(|(chunk, kind, nodes)| Segment { chunk, kind, nodes }).collect();
    let mut body = Body::of(joined.graph);
    (body.segments, body.arrives, body.leaves, body.tied) = (segments, arrives, leaves, tied);
    body
}

/// What a stage's graph gets from other stages, and what it computes for them.
pub(crate) fn links_of(joined: &StageBody) -> (Vec<Link>, Vec<Link>) {
    let graph = &joined.graph;
    let input = |name: &str| graph.inputs.iter().find(|i| i.name == name).map(|i| i.value);
    (links(&joined.arrives, &|name| input(name)), links(&joined.leaves, &|name| graph.output(name)))
}

/// Refuses tied parameters whose gradient stages cannot add up in the order of a lone rank, from the last chunk to the first: a
/// stage adds up those of its own chunks, and stages follow each other from the last to the first. Sums of two have one order.
fn same_order(tied: &[stage::Tied], timetable: &Timetable, plan: &Plan) -> Result<(), CompileError> {
    for tied in tied.iter().filter(|t| t.contribute.len() > 2) {
        let stages: Vec<usize> = tied.contribute.iter().rev().map(|c| timetable.place[*c]).collect();
        let of_first = stages.iter().take_while(|s| **s == stages[0]).count();
        if stages[of_first - 1..].windows(2).any(|w| w[0] <= w[1]) {
            let (name, n, kind) = (tied.name.clone(), stages.len(), plan.pipeline.name());
            return Err(CompileError::TiedOrder { name, n, kind });
        }
    }
    Ok(())
}

/// Crossings as links: those between two chunks are numbered alike at both ends.
fn links(crossings: &[Crossing], value: &dyn Fn(&str) -> Option<polyreme_graph::ValueId>) -> Vec<Link> {
    let link = |(k, c): (usize, &Crossing)| {
        let (from, to) = (c.from, c.to);
        let number = crossings[..k].iter().filter(|other| (other.from, other.to) == (from, to)).count();
        Link { value: value(&c.name).expect("what crosses has a name at both ends"), from, to, number }
    };
    crossings.iter().enumerate().map(link).collect()
}
