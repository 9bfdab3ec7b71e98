//! A score: what a rank with a program does, as the clock of the simulation reads it. Everything between two exchanges is one
//! segment with one time.
//!
//! Which exchange of a group meets which of another rank follows from the order alone: a group runs its operations in the order in
//! which each rank starts them, and messages from one rank to another with one tag arrive in the order in which they were sent.
//! That order is the same in every step, so it is counted here once.

use std::ops::Range;

use polyreme_collective::links::choose::FrameOp;
use polyreme_graph::{Axis, Collective, DType, Instr, Program, Region, ServedRange};

use crate::coding::CodedOp;
use crate::exchange::GroupOp;
use crate::speed::{HostSpeed, Took};
use crate::work::{Work, WorkKind, exchanged_bytes, of_instr, of_node, update};

/// One thing that a rank does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Act {
    /// Computes: a segment, by its number.
    Compute(usize),
    /// Starts an exchange of the program.
    Start(usize),
    /// Waits for it.
    Wait(usize),
    /// Posts the gradient of a range to its server.
    Push(usize),
    /// Asks for its weights.
    Pull(usize),
    /// Waits for them, by this instruction.
    Await { range: usize, instr: usize },
}

/// A range of a parameter server, and what it costs one core of this host to work on it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct ServedPart {
    pub(crate) server: usize,
    pub(crate) bytes: f64,
    /// To copy it: out of a letter, or into one.
    pub(crate) copy_us: f64,
    /// To add another gradient.
    pub(crate) add_us: f64,
    /// To update it.
    pub(crate) update_us: f64,
}

/// What happens in an exchange.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Meeting {
    /// A collective of the group along an axis: it is the `number`-th of the step. `at_wait` if it is only begun in its wait.
    Group { op: GroupOp, number: usize, at_wait: bool },
    /// A message to a place along the axis.
    Send { to: usize, tag: u16, bytes: f64 },
    /// A message from a place along the axis.
    Receive { from: usize, tag: u16 },
}

/// Computing without an exchange.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Stretch {
    pub(crate) took: Took,
    /// What it consists of, for timelines.
    pub(crate) parts: Range<usize>,
}

/// A node or an instruction within a stretch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct StretchPart {
    pub(crate) what: PartOf,
    pub(crate) alone_us: f64,
}

/// What a part of a stretch is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PartOf {
    /// A node of a block, for a microbatch, by an instruction.
    Node { instr: usize, block: usize, node: usize, microbatch: usize },
    /// An instruction.
    Instr(usize),
}

impl PartOf {
    /// The instruction that it belongs to.
    pub(crate) fn instr(self) -> usize {
        match self {
            PartOf::Node { instr, .. } | PartOf::Instr(instr) => instr,
        }
    }
}

/// A program with times.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Score {
    pub(crate) acts: Vec<Act>,
    pub(crate) stretches: Vec<Stretch>,
    pub(crate) parts: Vec<StretchPart>,
    /// By exchange of the program: its axis and what happens.
    pub(crate) meetings: Vec<(Axis, Meeting)>,
    /// The ranges of parameter servers.
    pub(crate) served: Vec<ServedPart>,
    /// By axis: the collectives of a step in the order in which the rank begins them, by exchange.
    pub(crate) order: [Vec<usize>; 4],
}

impl Score {
    /// The score of a program on a host of this speed.
    pub(crate) fn new(program: &Program, speed: &HostSpeed, threads: usize, cores: usize) -> Score {
        let node_times = node_times(program, speed, threads, cores);
        let mut score = Score {
            acts: Vec::new(),
            stretches: Vec::new(),
            parts: Vec::new(),
            meetings: (0..program.exchanges.len()).map(|n| meeting(program, n)).collect(),
            served: served_parts(program, speed, cores),
            order: Default::default(),
        };
        for (at, instr) in program.instrs.iter().enumerate() {
            match instr {
                Instr::Start(number) => {
                    score.acts.push(Act::Start(*number));
                    score.count(*number, false);
                }
                Instr::Wait(number) => {
                    score.acts.push(Act::Wait(*number));
                    score.count(*number, true);
                }
                &Instr::Run { block, microbatch, .. } => {
                    let of = &program.blocks[block];
                    for node in of.nodes.clone() {
                        let what = PartOf::Node { instr: at, block, node, microbatch };
                        score.compute(what, node_times[of.body][node]);
                    }
                }
                Instr::Pull(range) => score.acts.push(Act::Pull(*range)),
                // A gradient is written into a letter, and weights are read out of one.
                Instr::Push(range) => {
                    score.instr(program, at, speed, threads, cores);
                    score.acts.push(Act::Push(*range));
                }
                Instr::Await(range) => {
                    score.acts.push(Act::Await { range: *range, instr: at });
                    score.instr(program, at, speed, threads, cores);
                }
                Instr::Begin(_)
                | Instr::Load { .. }
                | Instr::Count { .. }
                | Instr::Keep { .. }
                | Instr::WeighStates { .. }
                | Instr::Zero(_)
                | Instr::Copy { .. }
                | Instr::Add { .. }
                | Instr::Subtract { .. }
                | Instr::DivideByWeight(_)
                | Instr::Divide { .. }
                | Instr::Judge(_)
                | Instr::JudgeOwn(_)
                | Instr::JudgeSteps(_)
                | Instr::Squares { .. }
                | Instr::SquaresApart { .. }
                | Instr::Leave { .. }
                | Instr::Together
                | Instr::Measure { .. }
                | Instr::Clip { .. }
                | Instr::Update { .. }
                | Instr::Outer { .. }
                | Instr::PutBack { .. }
                | Instr::ReadParams(_)
                | Instr::NextStep
                | Instr::Follow { .. } => score.instr(program, at, speed, threads, cores),
            }
        }
        score
    }

    /// What an instruction computes.
    fn instr(&mut self, program: &Program, at: usize, speed: &HostSpeed, threads: usize, cores: usize) {
        let mut took = Took::default();
        for work in of_instr(program, &program.instrs[at]) {
            took += speed.took(&work, threads, cores);
        }
        self.compute(PartOf::Instr(at), took);
    }

    /// Adds to the stretch that the score ends with, or begins one.
    fn compute(&mut self, what: PartOf, took: Took) {
        if took.alone_us <= 0.0 {
            return;
        }
        self.parts.push(StretchPart { what, alone_us: took.alone_us });
        let end = self.parts.len();
        if let (Some(Act::Compute(_)), Some(last)) = (self.acts.last(), self.stretches.last_mut()) {
            last.took += took;
            last.parts.end = end;
            return;
        }
        self.acts.push(Act::Compute(self.stretches.len()));
        self.stretches.push(Stretch { took, parts: end - 1..end });
    }

    /// Numbers a collective of its group when it is begun.
    fn count(&mut self, exchange: usize, waits: bool) {
        let (axis, meeting) = &mut self.meetings[exchange];
        if let Meeting::Group { number, at_wait, .. } = meeting
            && *at_wait == waits
        {
            let order = &mut self.order[*axis as usize];
            *number = order.len();
            order.push(exchange);
        }
    }
}

fn served_parts(program: &Program, speed: &HostSpeed, cores: usize) -> Vec<ServedPart> {
    let us = |work: &Work| speed.took(&work.joined(), 1, cores).alone_us;
    let part = |served: &ServedRange| {
        let bytes = (served.params.len() * DType::F32.bytes()) as f64;
        let update = program.optimizer.map(|rule| update(rule, program.moments, served.params.len()));
        ServedPart {
            server: served.server,
            bytes,
            copy_us: us(&Work::pass(WorkKind::Copy, 2.0 * bytes)),
            add_us: us(&Work::pass(WorkKind::Add, 3.0 * bytes)),
            update_us: update.map_or(0.0, |work| us(&work)),
        }
    };
    program.served.iter().map(part).collect()
}

fn node_times(program: &Program, speed: &HostSpeed, threads: usize, cores: usize) -> Vec<Vec<Took>> {
    let of_body = |body: &std::sync::Arc<polyreme_graph::Body>| {
        let of_node = |node: usize| {
            let mut took = Took::default();
            for work in of_node(body, node, program.optimizer, program.moments) {
                took += speed.took(&work, threads, cores);
            }
            took
        };
        (0..body.graph.nodes.len()).map(of_node).collect()
    };
    program.bodies.iter().map(of_body).collect()
}

pub(crate) fn meeting(program: &Program, number: usize) -> (Axis, Meeting) {
    let exchange = &program.exchanges[number];
    let bytes = exchanged_bytes(program, number);
    // Parameters and gradients lie where other processes see them.
    let visible = match exchange.of {
        Region::Params(_) | Region::Grads(_) => true,
        Region::States(_)
        | Region::Residual(_)
        | Region::Factors(_)
        | Region::Buffer(..)
        | Region::Value { .. } => false,
    };
    let coded = exchange.coding.as_ref().map(|coding| CodedOp::new(coding, program.len_of(&exchange.of)));
    let group = |op: FrameOp, at_wait: bool| Meeting::Group {
        op: GroupOp { op, bytes, visible, coded },
        number: 0,
        at_wait,
    };
    let meeting = match &exchange.op {
        Collective::AllReduce => group(FrameOp::AllReduce, false),
        Collective::ReduceScatter(_) => group(FrameOp::ReduceScatter, false),
        Collective::AllGather(_) => group(FrameOp::AllGather, false),
        Collective::AllToAll { .. } => group(FrameOp::AllToAll, true),
        Collective::Meet => group(FrameOp::Barrier, true),
        &Collective::Send { to, tag } => Meeting::Send { to, tag, bytes },
        &Collective::Receive { from, tag } => Meeting::Receive { from, tag },
    };
    (exchange.axis, meeting)
}
