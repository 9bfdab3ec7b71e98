//! Where the time of a program goes, as data: spans, and what they are called.
//!
//! Whoever reads a program, in real time or in virtual time, records a [`Moment`] for each instruction that takes time. What an
//! instruction is called is a function of the program ([`Program::label`]), so a measured and a simulated timeline have the same
//! names and can be laid beside each other.
//!
//! ```text
//!  step 12 ├──────────────────────────────────────────────────────────┤   one for the whole program
//!          load 0│forward 0  │send│ receive … │input gradients 0│update    one for each instruction: they follow each other
//!                │matmul│add │                                             one for each node of a block
//!                             └── receive from stage 1 ──┘                 exchanges under way overlap everything
//! ```

use crate::body::BlockKind;
use crate::program::{Axis, Collective, Instr, Program, Region};

/// What a span of time was spent on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MomentKind {
    /// A whole program that updates parameters: a step, or several.
    Step,
    /// A whole program that updates nothing, such as an evaluation.
    Evaluation,
    /// A block of a microbatch.
    Block(BlockKind),
    /// A node of a block.
    Node,
    /// Filling the inputs of a microbatch.
    Load,
    /// Adding, copying or scaling elements: sums of gradients, their norm, states.
    Combine,
    /// Updating parameters, or their averages.
    Update,
    /// Handing elements to a message. How long it is on its way is not known here: nothing waits for it.
    Send,
    /// An exchange under way, from its start until it was waited for; everything else overlaps it.
    Exchange,
    /// Waiting for an exchange. Between ranks that share memory, a collective is also computed there.
    Wait,
}

impl MomentKind {
    /// All of them.
    pub const ALL: [MomentKind; 12] = [
        MomentKind::Step,
        MomentKind::Evaluation,
        MomentKind::Block(BlockKind::Forward),
        MomentKind::Block(BlockKind::InputGrad),
        MomentKind::Block(BlockKind::WeightGrad),
        MomentKind::Node,
        MomentKind::Load,
        MomentKind::Combine,
        MomentKind::Update,
        MomentKind::Send,
        MomentKind::Exchange,
        MomentKind::Wait,
    ];

    /// Its name in files, a word.
    pub fn name(self) -> &'static str {
        match self {
            MomentKind::Step => "step",
            MomentKind::Evaluation => "evaluation",
            MomentKind::Block(BlockKind::Forward) => "forward",
            MomentKind::Block(BlockKind::InputGrad) => "input-grad",
            MomentKind::Block(BlockKind::WeightGrad) => "weight-grad",
            MomentKind::Node => "node",
            MomentKind::Load => "load",
            MomentKind::Combine => "combine",
            MomentKind::Update => "update",
            MomentKind::Send => "send",
            MomentKind::Exchange => "exchange",
            MomentKind::Wait => "wait",
        }
    }
}

/// What is exchanged with other ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exchanged {
    /// The operation, such as `all-reduce` or `receive`.
    pub op: &'static str,
    /// The axis of the mesh along which it goes.
    pub axis: Axis,
    /// Of a message: the other rank's place along the axis, and the tag.
    pub message: Option<(usize, u16)>,
    /// The bytes of the elements in their format on the wire; those of one rank.
    pub bytes: usize,
    /// The exchange as printed programs have it.
    pub text: String,
}

/// What a span of time is called.
#[derive(Clone, PartialEq, Debug)]
pub struct MomentLabel {
    /// The name of the work.
    pub name: String,
    /// The kind of work.
    pub kind: MomentKind,
    /// The node of the body, if it is one.
    pub node: Option<usize>,
    /// The microbatch, if it is of one. A program of several steps counts on over all of them.
    pub microbatch: Option<usize>,
    /// The chunk of the network that a block belongs to, in a pipeline: counted from the input over all stages.
    pub chunk: Option<usize>,
    /// What is exchanged, if something is.
    pub exchanged: Option<Exchanged>,
}

/// A span of time.
#[derive(Clone, PartialEq, Debug)]
pub struct Moment {
    /// What it was spent on.
    pub label: MomentLabel,
    /// The number of the step, counted from 1. What comes after a step and is no part of one has that step's.
    pub step: u64,
    /// Microseconds since the timeline began.
    pub start_us: f64,
    /// Its duration in microseconds.
    pub us: f64,
}

impl MomentLabel {
    /// A label with a name and a kind only.
    pub fn new(name: impl Into<String>, kind: MomentKind) -> MomentLabel {
        MomentLabel { name: name.into(), kind, node: None, microbatch: None, chunk: None, exchanged: None }
    }

    fn of_microbatch(self, microbatch: usize) -> MomentLabel {
        MomentLabel { microbatch: Some(microbatch), ..self }
    }
}

impl Program {
    /// The label of a whole program whose first step, or whose last one if it updates nothing, has this number.
    pub fn whole_label(&self, step: u64) -> MomentLabel {
        let n = self.instrs.iter().filter(|instr| matches!(instr, Instr::NextStep)).count() as u64;
        match self.optimizer {
            Some(_) if n == 0 => MomentLabel::new(format!("step {step}"), MomentKind::Step),
            Some(_) => MomentLabel::new(format!("steps {step} to {}", step + n), MomentKind::Step),
            None => MomentLabel::new("evaluation", MomentKind::Evaluation),
        }
    }

    /// The label of an instruction; `None` for those that take no time worth recording. `in_slots` has the microbatch of each slot.
    pub fn label(&self, instr: &Instr, in_slots: &[usize]) -> Option<MomentLabel> {
        let combine = |name: &str| Some(MomentLabel::new(name, MomentKind::Combine));
        match instr {
            Instr::Load { microbatch, .. } => {
                let label = MomentLabel::new(format!("load {microbatch}"), MomentKind::Load);
                Some(label.of_microbatch(*microbatch))
            }
            Instr::Run { block, microbatch, .. } => Some(self.block_label(*block, *microbatch)),
            Instr::Keep { microbatch, .. } => {
                combine("keep states").map(|label| label.of_microbatch(*microbatch))
            }
            Instr::WeighStates { microbatch, .. } => {
                combine("weigh states").map(|label| label.of_microbatch(*microbatch))
            }
            Instr::Zero(_) => combine("zero"),
            Instr::Copy { .. } => combine("copy"),
            Instr::Add { .. } => combine("add"),
            Instr::Subtract { .. } => combine("subtract"),
            Instr::DivideByWeight(_) | Instr::Divide { .. } => combine("divide"),
            Instr::Squares { .. } | Instr::SquaresApart { .. } => combine("squares"),
            Instr::PutBack { .. } => combine("put back"),
            Instr::Measure { what, .. } => combine(&format!("measure {}", what.name())),
            Instr::Update { .. } => Some(MomentLabel::new("update", MomentKind::Update)),
            Instr::Outer { .. } => Some(MomentLabel::new("outer step", MomentKind::Update)),
            Instr::Follow { .. } => Some(MomentLabel::new("average", MomentKind::Update)),
            Instr::Push(n) => {
                let name = format!("push to server {}", self.served[*n].server);
                Some(MomentLabel::new(name, MomentKind::Send))
            }
            Instr::Await(n) => {
                let name = format!("await server {}", self.served[*n].server);
                Some(MomentLabel::new(name, MomentKind::Wait))
            }
            Instr::Wait(number) => Some(self.exchange_label(*number, MomentKind::Wait, in_slots)),
            Instr::Start(number) => match self.exchanges[*number].op {
                Collective::Send { .. } => Some(self.exchange_label(*number, MomentKind::Send, in_slots)),
                // Announced or handed to another thread.
                Collective::AllReduce
                | Collective::ReduceScatter(_)
                | Collective::AllGather(_)
                | Collective::AllToAll { .. }
                | Collective::Receive { .. }
                | Collective::Meet => None,
            },
            Instr::Begin(_)
            | Instr::Count { .. }
            | Instr::Judge(_)
            | Instr::JudgeOwn(_)
            | Instr::JudgeSteps(_)
            | Instr::Leave { .. }
            | Instr::Together
            | Instr::Clip { .. }
            | Instr::Pull(_)
            | Instr::ReadParams(_)
            | Instr::NextStep => None,
        }
    }

    /// The label of a node of a block.
    pub fn node_label(&self, block: usize, node: usize, microbatch: usize) -> MomentLabel {
        let graph = &self.bodies[self.blocks[block].body].graph;
        let (op, layer) = (graph.nodes[node].op.name(), &graph.nodes[node].layer);
        let update = if self.blocks[block].update.is_some() { ", update" } else { "" };
        let label = MomentLabel::new(format!("{op} {layer}{update}"), MomentKind::Node);
        MomentLabel { node: Some(node), ..label.of_microbatch(microbatch) }
    }

    /// The label of an exchange: handed over, under way, or waited for.
    pub fn exchange_label(&self, number: usize, kind: MomentKind, in_slots: &[usize]) -> MomentLabel {
        let exchange = &self.exchanges[number];
        let (op, axis) = (exchange.op.name(), exchange.axis.name());
        let (name, message) = match exchange.op {
            Collective::Send { to, tag } => (format!("{op} to {axis} {to}"), Some((to, tag))),
            Collective::Receive { from, tag } => (format!("{op} from {axis} {from}"), Some((from, tag))),
            Collective::AllReduce
            | Collective::ReduceScatter(_)
            | Collective::AllGather(_)
            | Collective::AllToAll { .. }
            | Collective::Meet => (format!("{op} over {axis}"), None),
        };
        let microbatch = match exchange.of {
            Region::Value { slot, .. } => in_slots.get(slot).copied(),
            Region::Params(_)
            | Region::Grads(_)
            | Region::States(_)
            | Region::Residual(_)
            | Region::Factors(_)
            | Region::Buffer(..) => None,
        };
        let bytes = self.wire_bytes(exchange, self.len_of(&exchange.of));
        let text = self.describe(exchange);
        let exchanged = Some(Exchanged { op, axis: exchange.axis, message, bytes, text });
        MomentLabel { microbatch, exchanged, ..MomentLabel::new(name, kind) }
    }

    fn block_label(&self, number: usize, microbatch: usize) -> MomentLabel {
        let block = &self.blocks[number];
        let segments = &self.bodies[block.body].segments;
        let segment = segments.iter().find(|s| s.nodes.contains(&block.nodes.start));
        let label =
            MomentLabel::new(format!("{} {microbatch}", block.kind.name()), MomentKind::Block(block.kind));
        MomentLabel { chunk: segment.map(|s| s.chunk), ..label.of_microbatch(microbatch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, DType, Init, Optimizer};

    #[test]
    fn names_of_kinds_differ() {
        let mut names: Vec<_> = MomentKind::ALL.iter().map(|kind| kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MomentKind::ALL.len());
    }

    #[test]
    fn every_instruction_that_takes_time_has_a_name() {
        let mut b = Builder::new();
        let x = b.input("x", [2, 4], DType::F32).unwrap();
        let w = b.param("w", [3, 4], Init::Const(0.5)).unwrap();
        let y = b.linear(x, w, None).unwrap();
        let loss = b.mean(y, &[0, 1]).unwrap();
        let sgd = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let mut program = Program::train_loss(&b.finish(&[("loss", loss)]), loss, sgd).unwrap();
        assert_eq!(program.whole_label(7).name, "step 7");
        let value = Region::Value { slot: 1, body: 0, value: program.graph().inputs[0].value };
        program.exchange_now(Collective::Send { to: 2, tag: 5 }, Axis::Stage, value.clone());
        program.exchange_now(Collective::Receive { from: 0, tag: 5 }, Axis::Stage, value);
        program.exchange_now(Collective::AllReduce, Axis::Data, Region::Grads(0..12));
        program.instrs.push(Instr::NextStep);
        let labels: Vec<MomentLabel> =
            program.instrs.iter().filter_map(|i| program.label(i, &[0, 3])).collect();
        let seen: Vec<_> = labels.iter().map(|l| (l.name.as_str(), l.kind.name(), l.microbatch)).collect();
        let want = [
            ("load 0", "load", Some(0)),
            ("forward 0", "forward", Some(0)),
            ("weight gradients 0", "weight-grad", Some(0)),
            ("update", "update", None),
            ("send to stage 2", "send", Some(3)),
            ("send to stage 2", "wait", Some(3)),
            ("receive from stage 0", "wait", Some(3)),
            ("all-reduce over data", "wait", None),
        ];
        assert_eq!(seen, want);
        let sum = labels.last().and_then(|l| l.exchanged.clone()).unwrap();
        assert_eq!((sum.bytes, sum.text.as_str()), (48, "all-reduce f32 grads 0..12 over data: w"));
        assert_eq!(program.whole_label(7).name, "steps 7 to 8");
        let block = program.instrs.iter().find_map(|i| match i {
            Instr::Run { block, .. } => Some(*block),
            _ => None,
        });
        let node = program.node_label(block.unwrap(), 0, 4);
        assert_eq!((node.kind, node.node, node.microbatch), (MomentKind::Node, Some(0), Some(4)));
    }
}
