//! The body of one stage of a pipeline: the step's graph is cut into chunks, and those of the stage are joined.

use polyreme_graph::{Axis, Body, Graph, Link, Segment, Tied, fuse};

use crate::passes::CompileError;
use crate::pipeline::{Timetable, timetable};
use crate::plan::Plan;
use crate::stage::{self, ChunkGraph, Crossing, Cut, cut, flops, join, partition, place_by_name};

/// The timetable of a plan with several stages, for steps of `microbatches`.
pub(crate) fn timetable_of(plan: &Plan, microbatches: usize) -> Result<Timetable, CompileError> {
    if microbatches == 0 {
        // A rank without samples has the chunks of the others, and nothing to run.
        let one = timetable_of(plan, 1)?;
        return Ok(Timetable { microbatches, by_stage: vec![Vec::new(); one.stages], ..one });
    }
    timetable(plan.pipeline, plan.mesh.stage, microbatches).map_err(CompileError::Pipeline)
}

/// The body of a plan's stage, from the graph of the whole step.
pub(crate) fn stage_body(step: &Graph, plan: &Plan) -> Result<Body, CompileError> {
    let microbatches = plan.shards.map_or(plan.microbatches, |shards| shards.div_ceil(plan.ranks()));
    let timetable = timetable_of(plan, microbatches.max(1))?;
    let n_chunks = timetable.place.len();
    let place = match plan.cuts.is_empty() {
        true => partition(step, n_chunks, &flops(step), None)?,
        false if plan.cuts.len() + 1 == n_chunks => place_by_name(step, &plan.cuts)?,
        false => {
            let (got, want) = (plan.cuts.len(), n_chunks - 1);
            return Err(CompileError::Cuts { got, want, n_chunks, kind: plan.pipeline.name() });
        }
    };
    let Cut { chunks, tied } = cut(step, &place)?;
    if plan.shards.is_some() {
        same_order(&tied, &timetable, plan)?;
    }
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let mine: Vec<ChunkGraph> = chunks.into_iter().filter(|c| timetable.place[c.chunk] == stage).collect();
    let mine: Vec<_> = mine.into_iter().map(|c| ChunkGraph { graph: fuse(&c.graph), ..c }).collect();
    let joined = join(&mine);
    let graph = &joined.graph;
    let input = |name: &str| graph.inputs.iter().find(|i| i.name == name).map(|i| i.value);
    let arrives = links(&joined.arrives, &|name| input(name));
    let leaves = links(&joined.leaves, &|name| graph.output(name));
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
