//! The body of one stage of a pipeline: the step's graph is cut into chunks, and those of the stage are joined.
//!
//! Where to cut is decided on the graph as it was traced, before it is rewritten for a precision and for this rank: so all
//! ranks cut in the same places, and all graphs of a model can be cut in the places that were chosen for one of them.

use polyreme_graph::{Axis, Body, Graph, Link, Segment, Tied, fuse};

use crate::choice::choose_cuts;
use crate::passes::CompileError;
use crate::pipeline::{PipelineKind, Timetable, timetable};
use crate::plan::Plan;
use crate::shard::{Passes, shard};
use crate::stage::{
    self, ChunkGraph, Crossing, Cut, Homes, StageBody, cut, flops, join, nodes_by_name, place,
};

/// The timetable of a plan with several stages, for steps of `microbatches`.
pub(crate) fn timetable_of(plan: &Plan, microbatches: usize) -> Result<Timetable, CompileError> {
    if plan.pipeline == PipelineKind::TwoBw {
        let why = "schedule \"2bw\", which goes on from step to step without a flush, cannot be run yet; set \
                   `parallel.schedule = \"zb-h1\"` or \"zb-v\"";
        return Err(CompileError::Pipeline(why.into()));
    }
    if microbatches == 0 {
        // A rank without samples has the chunks of the others, and nothing to run.
        let one = timetable_of(plan, 1)?;
        return Ok(Timetable { microbatches, by_stage: vec![Vec::new(); one.stages], ..one });
    }
    timetable(plan.pipeline, plan.mesh.stage, microbatches).map_err(CompileError::Pipeline)
}

/// That of a full step.
pub(crate) fn usual_timetable(plan: &Plan) -> Result<Timetable, CompileError> {
    let microbatches = plan.shards.map_or(plan.microbatches, |shards| shards.div_ceil(plan.ranks()));
    timetable_of(plan, microbatches.max(1))
}

/// The traced nodes before which a plan with several stages cuts a graph: the same ones in every rewrite of it.
pub(crate) fn cut_origins(step: &Graph, plan: &Plan) -> Result<Vec<u32>, CompileError> {
    if plan.mesh.stage == 1 {
        return Ok(Vec::new());
    }
    let names = choose_cuts(step, plan, &flops(step), None)?;
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

/// The body of a plan's stage, from the graph of the whole step, which is cut before these traced nodes.
pub(crate) fn stage_body(step: &Graph, plan: &Plan, cuts: &[u32]) -> Result<Body, CompileError> {
    let timetable = usual_timetable(plan)?;
    let place = place_by_origin(step, cuts);
    let Cut { chunks, tied } = cut(step, &place)?;
    if plan.shards.is_some() {
        same_order(&tied, &timetable, plan)?;
    }
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let mine: Vec<ChunkGraph> = chunks.into_iter().filter(|c| timetable.place[c.chunk] == stage).collect();
    // Each chunk gathers the weights that it reads.
    let sharded = |graph: Graph| match plan.shard_place() {
        Some(place) => shard(&graph, place, Passes::Apart),
        None => graph,
    };
    let mine: Vec<_> = mine.into_iter().map(|c| ChunkGraph { graph: fuse(&sharded(c.graph)), ..c }).collect();
    let joined = join(&mine);
    let (arrives, leaves) = links_of(&joined);
    let graph = &joined.graph;
    let tied = tied.into_iter().enumerate().filter_map(|(number, tied)| {
        let param = graph.params.iter().position(|p| p.name == tied.name)?;
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
    body.declared = polyreme_graph::body::declared(step);
    Ok(body)
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
