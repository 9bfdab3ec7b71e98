//! The body of one stage of a pipeline: the step's graph is cut into chunks, and those of the stage are joined.

use std::collections::BTreeMap;

use polyreme_graph::graph::Node;
use polyreme_graph::{Axis, Body, Graph, Link, Segment, Tied, fuse};

use crate::passes::CompileError;
use crate::pipeline::{Timetable, timetable};
use crate::plan::Plan;
use crate::stage::{ChunkGraph, Crossing, Cut, cut, flops, join, partition, place_by_name};

/// The timetable of a plan with several stages, for steps of `microbatches`.
pub(crate) fn timetable_of(plan: &Plan, microbatches: usize) -> Result<Timetable, CompileError> {
    timetable(plan.pipeline, plan.mesh.stage, microbatches).map_err(CompileError::Pipeline)
}

/// The body of a plan's stage, from the graph of the whole step. It is cut where `like` would be: the same step, as the first
/// rank along another axis has it.
pub(crate) fn stage_body(step: &Graph, like: Option<&Graph>, plan: &Plan) -> Result<Body, CompileError> {
    let timetable = timetable_of(plan, plan.microbatches.max(1))?;
    let n_chunks = timetable.place.len();
    let model = like.unwrap_or(step);
    let place = match plan.cuts.is_empty() {
        true => partition(model, n_chunks, &flops(model), None)?,
        false if plan.cuts.len() + 1 == n_chunks => place_by_name(model, &plan.cuts)?,
        false => {
            let (got, want) = (plan.cuts.len(), n_chunks - 1);
            return Err(CompileError::Cuts { got, want, n_chunks, kind: plan.pipeline.name() });
        }
    };
    let place = if like.is_some() { place_alike(step, model, &place) } else { place };
    let Cut { chunks, tied } = cut(step, &place)?;
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let mine: Vec<ChunkGraph> = chunks.into_iter().filter(|c| timetable.place[c.chunk] == stage).collect();
    let mine: Vec<_> = mine.into_iter().map(|c| ChunkGraph { graph: fuse(&c.graph), ..c }).collect();
    let joined = join(&mine);
    let graph = &joined.graph;
    let input = |name: &str| graph.inputs.iter().find(|i| i.name == name).map(|i| i.value);
    let arrives = links(&joined.arrives, &|name| input(name));
    let leaves = links(&joined.leaves, &|name| graph.output(name));
    let tied = tied.into_iter().filter_map(|tied| {
        let param = graph.params.iter().position(|p| p.name == tied.name)?;
        let mut stages: Vec<usize> = tied.chunks.iter().map(|c| timetable.place[*c]).collect();
        stages.sort_unstable();
        stages.dedup();
        (stages.len() > 1).then_some(Tied { param, stages })
    });
    let tied = tied.collect();
    let segments = joined.ranges.iter().cloned();
    let segments = segments.map(|(chunk, kind, nodes)| Segment { chunk, kind, nodes }).collect();
    let mut body = Body::of(joined.graph);
    (body.segments, body.arrives, body.leaves, body.tied) = (segments, arrives, leaves, tied);
    Ok(body)
}

/// The places of a step's nodes, from those of the same traced nodes in another form of it.
fn place_alike(step: &Graph, like: &Graph, place: &[usize]) -> Vec<usize> {
    let of_origin: BTreeMap<u32, usize> =
        like.nodes.iter().zip(place).map(|(node, chunk)| (node.origin, *chunk)).collect();
    let of = |node: &Node| of_origin.range(..=node.origin).next_back().map_or(0, |(_, chunk)| *chunk);
    step.nodes[..step.n_forward].iter().map(of).collect()
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
