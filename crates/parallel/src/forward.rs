//! The program of a forward pass: for evaluations and predictions with weights that ranks split.
//!
//! ```text
//!  load                                   what this stage is fed
//!  start receives                         of all that arrives from other stages
//!  wait, run, start sends                 chunk by chunk, with the exchanges along the tensor axis inside
//!  wait sends
//! ```
//!
//! The ranks of the tensor and stage axes run one microbatch together; each part of the data axis runs its own, and exchanges
//! nothing. If these parts shard the weights, each gathers what it reads, so all of them must run equally many.
//!
//! With `S` stages a rank computes `1/S` of the time; evaluations follow each other, so a stage begins with the next one when its
//! part is done.
//!
//! Outputs are on the rank whose chunk computes them, mostly the last stage, and are whole on every rank of the tensor axis.
//! Parameters are those of the same plan's training body, or fewer, and split alike, so that one engine runs both. What
//! crosses between stages is what crosses in training, once: the bytes of one activation per cut.
//!
//! If a peer dies the exchange fails on all ranks, as in training; nothing has been changed.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::{Axis, BlockKind, Body, Collective, Graph, Instr, Microbatch, Program, Region, fuse};

use crate::joint;
use crate::own_part::own_part;
use crate::passes::CompileError;
use crate::plan::Plan;
use crate::shard::{Passes, shard};
use crate::stage::{BackwardOrder, ChunkGraph, cut, join};
use crate::stage_body::{cut_origins, links_of, place_by_origin, usual_timetable};
use crate::staged::link_tag;

/// The program of a rank for a forward pass of one microbatch. States stay as they are.
///
/// The plan has the cuts and the layouts that were chosen for training ([`choose`](crate::choose())); without any, they are chosen for
/// this graph, which is of use where nothing is trained.
pub fn compile_forward(graph: &Graph, plan: &Plan) -> Result<Program, CompileError> {
    let cuts = cut_origins(graph, plan, None)?;
    let graph = plan.precision.apply(graph);
    let graph = own_part(&graph, plan, &cuts)?.map_or(graph, |part| part.graph);
    let graph = Graph { updates: Vec::new(), grads: Vec::new(), ..graph };
    let (body, runs, place) = match plan.mesh.stage {
        1 => {
            let body = Body::forward(&sharded(&graph, plan));
            let nodes = 0..body.graph.nodes.len();
            (body, vec![(0, nodes)], vec![0])
        }
        _ => staged_body(&graph, plan, &cuts)?,
    };
    let body = body.with_strict(plan.precision.strict).with_reproducible(plan.is_reproducible());
    Ok(lower(Arc::new(body), &runs, &place, plan.ranks()))
}

/// The same where ranks of the data axis shard the weights: what a chunk reads is gathered ahead of its use. All of them have to
/// run as many forward passes then.
fn sharded(graph: &Graph, plan: &Plan) -> Graph {
    plan.shard_place().map_or_else(|| graph.clone(), |place| shard(graph, place, Passes::Apart))
}

/// The nodes of each chunk of a body.
type ChunkRuns = Vec<(usize, Range<usize>)>;

/// The body of this rank's stage; its chunks, ascending; and the stage of each chunk of the network.
fn staged_body(
    graph: &Graph,
    plan: &Plan,
    cuts: &[u32],
) -> Result<(Body, ChunkRuns, Vec<usize>), CompileError> {
    let place = usual_timetable(plan)?.place;
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let chunks = cut(graph, &place_by_origin(graph, cuts))?.chunks;
    let mine = chunks.into_iter().filter(|c| place[c.chunk] == stage);
    let mine: Vec<_> = mine.map(|c| ChunkGraph { graph: fuse(&sharded(&c.graph, plan)), ..c }).collect();
    let joined = join(&mine, BackwardOrder::Apart);
    let (arrives, leaves) = links_of(&joined);
    let forward = |(chunk, kind, nodes)| (kind == BlockKind::Forward).then_some((chunk, nodes));
    let runs = joined.ranges.into_iter().filter_map(forward).collect();
    let mut body = Body::of(joined.graph);
    (body.arrives, body.leaves) = (arrives, leaves);
    Ok((body, runs, place))
}

fn lower(body: Arc<Body>, runs: &[(usize, Range<usize>)], place: &[usize], data_ranks: usize) -> Program {
    let mut program = Program::empty(vec![body.clone()]);
    program.microbatches.push(Microbatch { body: 0, first_sample: 0 });
    program.instrs.push(Instr::Load { slot: 0, microbatch: 0 });
    let start = |program: &mut Program, op: Collective, value| {
        let number = program.exchange(op, Axis::Stage, Region::Value { slot: 0, body: 0, value });
        program.instrs.push(Instr::Start(number));
        number
    };
    // By chunk. What arrives has memory of its own, so all of it may come as soon as it is sent.
    let mut receives: Vec<(usize, usize)> = Vec::new();
    for link in &body.arrives {
        let op = Collective::Receive { from: place[link.from], tag: link_tag(link, place.len()) };
        receives.push((link.to, start(&mut program, op, link.value)));
    }
    let mut sends = Vec::new();
    for (chunk, nodes) in runs {
        let arrived = receives.iter().filter(|(to, _)| to == chunk);
        program.instrs.extend(arrived.map(|(_, number)| Instr::Wait(*number)));
        joint::run(&mut program, 0, 0, nodes, data_ranks);
        for link in body.leaves.iter().filter(|link| link.from == *chunk) {
            let op = Collective::Send { to: place[link.to], tag: link_tag(link, place.len()) };
            sends.push(start(&mut program, op, link.value));
        }
    }
    program.instrs.extend(sends.into_iter().map(Instr::Wait));
    program
}
