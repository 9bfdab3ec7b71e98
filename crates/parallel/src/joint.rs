//! Exchanges inside a body: from a node that stands for one to the exchange of a program.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::graph::Node;
use polyreme_graph::{Axis, Collective, ExchangeKind, Graph, Instr, Op, Program, Region, ValueId};

/// The axis along which a node exchanges something, if it does.
pub(crate) fn axis_of(node: &Node) -> Option<Axis> {
    match node.op {
        Op::Exchange { axis, .. } => Some(axis),
        _ => None,
    }
}

/// The tag of messages inside a body. Ranks along an axis run the same exchanges in the same order, so one is enough.
const PASS_TAG: u16 = 0;

/// An exchange of a program, and the first node that must not run before it is waited for.
pub(crate) struct JointExchange {
    /// Its number.
    pub(crate) number: usize,
    /// The node.
    pub(crate) reader: usize,
}

/// Adds the exchanges that node `i` of a body stands for: none for most nodes, two for a message to one rank and from another.
///
/// What is sent is waited for at once, because its memory may be used again; that is no wait for the receiver.
pub(crate) fn exchanges(program: &mut Program, slot: usize, body: usize, i: usize) -> Vec<JointExchange> {
    let of = program.bodies[body].clone();
    let node = &of.graph.nodes[i];
    let reader = |now: bool| if now { i + 1 } else { first_reader(&of.graph, i, node.outputs[0]) };
    if let Op::Exchange { axis, kind: ExchangeKind::Pass { to, from } } = node.op {
        let region = |value: ValueId| Region::Value { slot, body, value };
        let send = to.map(|to| (Collective::Send { to, tag: PASS_TAG }, node.inputs[0], true));
        let receive = from.map(|from| (Collective::Receive { from, tag: PASS_TAG }, node.outputs[0], false));
        let both = [receive, send].into_iter().flatten();
        return both
            .map(|(op, of, now)| JointExchange {
                number: program.exchange(op, axis, region(of)),
                reader: reader(now),
            })
            .collect();
    }
    let number = exchange(program, slot, body, node);
    number.map(|number| JointExchange { number, reader: reader(reads_operand(node)) }).into_iter().collect()
}

/// Adds the exchange that a node of a body stands for; returns its number. `None` for any other node.
fn exchange(program: &mut Program, slot: usize, body: usize, node: &Node) -> Option<usize> {
    let Op::Exchange { axis, kind } = node.op else { return None };
    let region = |value: ValueId| Region::Value { slot, body, value };
    let (x, y) = (node.inputs[0], node.outputs[0]);
    let rows = |ranks: usize| -> Arc<[usize]> {
        let row = program.len_of(&region(y)) / ranks;
        (0..=ranks).map(|r| r * row).collect()
    };
    let (op, of) = match kind {
        ExchangeKind::Sum => (Collective::AllReduce, y),
        ExchangeKind::Gather { ranks, .. } => (Collective::AllGather(rows(ranks)), y),
        ExchangeKind::Scatter { ranks } => (Collective::ReduceScatter(rows(ranks)), y),
        ExchangeKind::Swap { ranks } => {
            let (send, recv) = (rows(ranks), rows(ranks));
            (Collective::AllToAll { send, into: region(y), recv }, x)
        }
        ExchangeKind::Pass { .. } => return None,
    };
    Some(program.exchange(op, axis, region(of)))
}

/// Whether the node's operand is still read while the exchange goes on: then nothing may run before it is waited for.
fn reads_operand(node: &Node) -> bool {
    matches!(node.op, Op::Exchange { kind: ExchangeKind::Swap { .. }, .. })
}

/// Runs nodes of a microbatch, with the exchanges that they contain: each is started as soon as its elements are there, and
/// waited for before the first node that reads its result, or at the end. Sums over the data axis of a lone rank are left out.
pub(crate) fn run(
    program: &mut Program,
    slot: usize,
    microbatch: usize,
    nodes: &Range<usize>,
    data_ranks: usize,
) {
    run_with(program, slot, microbatch, nodes, data_ranks, &[]);
}

/// The same, with instructions before some nodes.
pub(crate) fn run_with(
    program: &mut Program,
    slot: usize,
    microbatch: usize,
    nodes: &Range<usize>,
    data_ranks: usize,
    before: &[(usize, Instr)],
) {
    let number = program.microbatches[microbatch].body;
    let body = program.bodies[number].clone();
    let graph = &body.graph;
    let (mut from, mut under_way) = (nodes.start, Vec::<(usize, usize)>::new());
    for i in nodes.clone() {
        let ready: Vec<usize> = under_way.iter().filter(|(_, reader)| *reader <= i).map(|e| e.0).collect();
        let mut between =
            before.iter().filter(|(node, _)| *node == i).map(|(_, instr)| instr.clone()).peekable();
        if !ready.is_empty() || between.peek().is_some() {
            program.run(slot, microbatch, from..i);
            from = i;
            under_way.retain(|(_, reader)| *reader > i);
            program.instrs.extend(ready.into_iter().map(Instr::Wait));
            program.instrs.extend(between);
        }
        let node = &graph.nodes[i];
        let takes_part = match axis_of(node) {
            None => false,
            Some(Axis::Data) => data_ranks > 1,
            Some(Axis::Tensor | Axis::Stage | Axis::Sequence) => true,
        };
        if takes_part {
            program.run(slot, microbatch, from..i + 1);
            from = i + 1;
            for JointExchange { number, reader } in exchanges(program, slot, number, i) {
                program.instrs.push(Instr::Start(number));
                under_way.push((number, reader));
            }
        }
    }
    program.run(slot, microbatch, from..nodes.end);
    program.instrs.extend(under_way.into_iter().map(|(exchange, _)| Instr::Wait(exchange)));
}

/// Runs what a rank without samples does of some nodes: those that are `idle`, and exchanges along the data axis, to which it
/// brings its shards of weights, or else zeros.
pub(crate) fn run_idle(
    program: &mut Program,
    slot: usize,
    number: usize,
    nodes: &Range<usize>,
    idle: &[bool],
) {
    let body = program.bodies[number].clone();
    let mut under_way = Vec::<(usize, usize)>::new();
    for i in nodes.clone() {
        let exchanges_here = axis_of(&body.graph.nodes[i]) == Some(Axis::Data);
        if !idle[i] && !exchanges_here {
            continue;
        }
        let ready: Vec<usize> = under_way.iter().filter(|(_, reader)| *reader <= i).map(|e| e.0).collect();
        under_way.retain(|(_, reader)| *reader > i);
        program.instrs.extend(ready.into_iter().map(Instr::Wait));
        if idle[i] {
            // It reads no samples: any microbatch will do.
            program.run_body(number, slot, 0, i..i + 1);
        } else {
            let value = body.graph.nodes[i].outputs[0];
            program.instrs.push(Instr::Zero(Region::Value { slot, body: number, value }));
        }
        if exchanges_here {
            for JointExchange { number, reader } in exchanges(program, slot, number, i) {
                program.instrs.push(Instr::Start(number));
                under_way.push((number, reader));
            }
        }
    }
    program.instrs.extend(under_way.into_iter().map(|(exchange, _)| Instr::Wait(exchange)));
}

/// The first node behind `i` that reads `value`, or one past the last node.
fn first_reader(graph: &Graph, i: usize, value: ValueId) -> usize {
    let reads = |k: &usize| graph.nodes[*k].inputs.contains(&value);
    (i + 1..graph.nodes.len()).find(reads).unwrap_or(graph.nodes.len())
}
