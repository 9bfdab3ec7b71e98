//! The program of a forward pass: for evaluations and predictions with weights that ranks split.
//!
//! ```text
//!  load                                   what this stage is fed
//!  start receives                         of all that arrives from other stages
//!  wait, run, start sends                 chunk by chunk, with the exchanges along the tensor axis inside
//!  wait sends
//!  wait outputs                           of another stage, if all stages are to have them
//! ```
//!
//! The ranks of the tensor and stage axes run one microbatch together; each part of the data axis runs its own, and exchanges
//! nothing. If these parts shard the weights, each gathers what it reads, so all of them must run equally many.
//!
//! With `S` stages a rank computes `1/S` of the time; evaluations follow each other, so a stage begins with the next one when its
//! part is done.
//!
//! Outputs are on the rank whose chunk computes them, mostly the last stage, and are whole on every rank of the tensor axis. An
//! answer is needed elsewhere: rank 0 prints predictions, and the first stage reads the token that follows from the logits. There
//! ([`compile_answer`]) the stage that computes outputs sends them to every other one: `S - 1` messages, each of the bytes of
//! the outputs.
//!
//! Parameters are those of the same plan's training body, or fewer, and split alike, so that one engine runs both. What
//! crosses between stages is what crosses in training, once: the bytes of one activation per cut.
//!
//! If a peer dies the exchange fails on all ranks, as in training; nothing has been changed.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::graph::Input;
use polyreme_graph::{
    Axis, BlockKind, Body, Collective, Graph, Instr, Keeps, Link, Microbatch, Op, Program, Region, Role,
    ValueId, Weights, fuse,
};

use crate::answer::AnswerRows;
use crate::joint;
use crate::own_part::own_part;
use crate::passes::CompileError;
use crate::plan::Plan;
use crate::shard::{Passes, shard};
use crate::stage::{BackwardOrder, ChunkGraph, cut, join};
use crate::stage_body::{cut_origins, links_of, place_by_origin, usual_timetable};
use crate::staged::{LINKS_MAX, link_tag};

/// The program of a rank for a forward pass of one microbatch. States stay as they are.
///
/// The plan has the cuts and the layouts that were chosen for training ([`choose`](crate::choose())); without any, they are chosen for
/// this graph, which is of use where nothing is trained.
pub fn compile_forward(graph: &Graph, plan: &Plan) -> Result<Program, CompileError> {
    compile(graph, plan, OutputRanks::Computing)
}

/// The same for a network whose one output is answered with: what is made of it is on every rank.
pub fn compile_answer(graph: &Graph, plan: &Plan, answer: AnswerRows) -> Result<Program, CompileError> {
    compile(graph, plan, OutputRanks::All(answer))
}

/// A forward pass for an engine of its own, which joins the ranks of the plan without training: the role that a training
/// program would say.
pub fn standalone(program: Program, plan: &Plan) -> Program {
    let (rank, ranks) = (plan.mesh.place(plan.rank, Axis::Data), plan.ranks());
    let weights = match plan.shard_place() {
        Some(_) => Weights::Sharded,
        None if ranks == 1 => Weights::Own,
        None => plan.weights,
    };
    let role = Role { rank, ranks, weights, keeps: Keeps::All, shards: None, parts: vec![Vec::new(); ranks] };
    Program { role: Some(role), ..program }
}

/// Which ranks of a network have its outputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OutputRanks {
    /// Those of the stage that computes them.
    Computing,
    /// All have what is made of them.
    All(AnswerRows),
}

fn compile(graph: &Graph, plan: &Plan, outputs: OutputRanks) -> Result<Program, CompileError> {
    let cuts = cut_origins(graph, plan, None)?;
    let graph = plan.precision.apply(graph);
    let graph = match outputs {
        OutputRanks::Computing => graph,
        OutputRanks::All(answer) => answer.made_of(&graph, plan),
    };
    let graph = own_part(&graph, plan, &cuts)?.map_or(graph, |part| part.graph);
    let graph = Graph { updates: Vec::new(), grads: Vec::new(), ..graph };
    let mut chunks = match plan.mesh.stage {
        1 => {
            let body = Body::forward(&sharded(&graph, plan));
            let runs = vec![(0, 0..body.graph.nodes.len())];
            StageChunks { body, runs, place: vec![0], told: Vec::new() }
        }
        _ => staged_chunks(&graph, plan, &cuts, outputs)?,
    };
    chunks.body = chunks.body.with_strict(plan.precision.strict).with_reproducible(plan.is_reproducible());
    Ok(lower(chunks, plan))
}

/// The same where ranks of the data axis shard the weights: what a chunk reads is gathered ahead of its use. All of them have to
/// run as many forward passes then.
fn sharded(graph: &Graph, plan: &Plan) -> Graph {
    plan.shard_place().map_or_else(|| graph.clone(), |place| shard(graph, place, Passes::Apart))
}

/// What a rank's stage runs.
struct StageChunks {
    body: Body,
    /// The nodes of each of its chunks, ascending.
    runs: Vec<(usize, Range<usize>)>,
    /// The stage of each chunk of the network.
    place: Vec<usize>,
    /// Outputs that go from one stage to another: from the chunk that computes them to the first of the other's.
    told: Vec<Link>,
}

/// The chunks of this rank's stage.
fn staged_chunks(
    graph: &Graph,
    plan: &Plan,
    cuts: &[u32],
    outputs: OutputRanks,
) -> Result<StageChunks, CompileError> {
    let place = usual_timetable(plan)?.place;
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let chunks = cut(graph, &place_by_origin(graph, cuts))?.chunks;
    // The chunk that computes each output.
    let homes: Vec<usize> = match outputs {
        OutputRanks::Computing => Vec::new(),
        OutputRanks::All(_) => {
            let home = |name: &str| chunks.iter().find(|c| c.graph.output(name).is_some()).map(|c| c.chunk);
            let of_graph = graph.outputs.iter();
            of_graph.map(|(name, _)| home(name).expect("a chunk computes each output")).collect()
        }
    };
    let mine = chunks.into_iter().filter(|c| place[c.chunk] == stage);
    let mine: Vec<_> = mine.map(|c| ChunkGraph { graph: fuse(&sharded(&c.graph, plan)), ..c }).collect();
    let mut joined = join(&mine, BackwardOrder::Apart);
    let (arrives, leaves) = links_of(&joined);
    let mut told = Vec::new();
    for (number, ((name, v), from)) in graph.outputs.iter().zip(homes).enumerate() {
        // Between two chunks there may be other links in this direction: outputs are numbered from the last number down.
        let number = LINKS_MAX - 1 - number;
        let first_of = |stage: usize| place.iter().position(|s| *s == stage).expect("a stage has chunks");
        if place[from] == stage {
            let value = joined.graph.output(name).expect("this stage computes it");
            let others = (0..plan.mesh.stage).filter(|other| *other != stage);
            told.extend(others.map(|other| Link { value, from, to: first_of(other), number }));
        } else {
            let value = output_of_another(&mut joined.graph, name, graph, *v);
            told.push(Link { value, from, to: first_of(stage), number });
        }
    }
    let forward = |(chunk, kind, nodes)| (kind == BlockKind::Forward).then_some((chunk, nodes));
    let runs = joined.ranges.into_iter().filter_map(forward).collect();
    let mut body = Body::of(joined.graph);
    (body.arrives, body.leaves) = (arrives, leaves);
    Ok(StageChunks { body, runs, place, told })
}

/// A place in a stage's graph for an output that another stage computes: an input that arrives, and that nothing reads.
fn output_of_another(stage: &mut Graph, name: &str, graph: &Graph, v: ValueId) -> ValueId {
    let of = graph.value(v);
    let op = Op::Input(stage.inputs.len());
    let value = stage.push_shaped(op, &[], "", vec![(of.shape.clone(), of.dtype)])[0];
    stage.inputs.push(Input { name: name.into(), value });
    stage.outputs.push((name.into(), value));
    stage.n_forward = stage.nodes.len();
    value
}

fn lower(chunks: StageChunks, plan: &Plan) -> Program {
    let StageChunks { body, runs, place, told } = chunks;
    let body = Arc::new(body);
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let mut program = Program::empty(vec![body.clone()]);
    program.microbatches.push(Microbatch { body: 0, first_sample: 0 });
    program.instrs.push(Instr::Load { slot: 0, microbatch: 0 });
    let start = |program: &mut Program, op: Collective, value| {
        let number = program.exchange(op, Axis::Stage, Region::Value { slot: 0, body: 0, value });
        program.instrs.push(Instr::Start(number));
        number
    };
    let receive =
        |link: &Link| Collective::Receive { from: place[link.from], tag: link_tag(link, place.len()) };
    let send = |link: &Link| Collective::Send { to: place[link.to], tag: link_tag(link, place.len()) };
    // By chunk. What arrives has memory of its own, so all of it may come as soon as it is sent.
    let mut receives: Vec<(usize, usize)> = Vec::new();
    for link in &body.arrives {
        receives.push((link.to, start(&mut program, receive(link), link.value)));
    }
    let (tells, hears): (Vec<&Link>, Vec<&Link>) = told.iter().partition(|link| place[link.from] == stage);
    let heard: Vec<usize> = hears.iter().map(|link| start(&mut program, receive(link), link.value)).collect();
    let mut sends = Vec::new();
    for (chunk, nodes) in &runs {
        let arrived = receives.iter().filter(|(to, _)| to == chunk);
        program.instrs.extend(arrived.map(|(_, number)| Instr::Wait(*number)));
        joint::run(&mut program, 0, 0, nodes, plan.ranks());
        for link in body.leaves.iter().chain(tells.iter().copied()).filter(|link| link.from == *chunk) {
            sends.push(start(&mut program, send(link), link.value));
        }
    }
    program.instrs.extend(sends.into_iter().chain(heard).map(Instr::Wait));
    program
}
