//! From an expression to steps over slots: dead instructions dropped, block buffers reused, outputs written straight.
//!
//! A slot is an entry of the table of pointers that a block is evaluated with. In order: inputs, constants, block
//! buffers, outputs.

use super::blocks::SPLAT;
use super::expr::{Binary, Expr, Instr, Unary};

/// What a step does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum StepOp {
    Copy,
    Unary(Unary),
    Binary(Binary),
    Select,
}

/// One op over a block: `dest = op(args)`. `dest` may be one of `args`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct FusedStep {
    pub op: StepOp,
    pub args: [u8; 3],
    pub dest: u8,
}

/// The steps of a block, and how many slots of each sort they use.
#[derive(Clone, Debug)]
pub(crate) struct StepPlan {
    pub steps: Vec<FusedStep>,
    pub n_inputs: usize,
    pub consts: Vec<[f32; SPLAT]>,
    pub n_bufs: usize,
    pub n_outputs: usize,
    /// For each output, the inputs (as bits) that are read after the output was written.
    pub late: [u16; Expr::OUTPUTS_MAX],
}

impl StepPlan {
    pub(crate) fn first_const(&self) -> usize {
        self.n_inputs
    }
    pub(crate) fn first_buf(&self) -> usize {
        self.n_inputs + self.consts.len()
    }
    pub(crate) fn first_output(&self) -> usize {
        self.first_buf() + self.n_bufs
    }

    /// Lowers `expr`. A `careful` plan writes outputs only after every input was read, so that any input may share any
    /// output's memory; the other plan writes them as soon as they are known.
    pub(crate) fn new(expr: &Expr, careful: bool) -> StepPlan {
        ExprLowering::new(expr, careful).finish()
    }

    /// An estimate of nanoseconds for eight elements, to split work into tasks.
    pub(crate) fn cost_ns(&self) -> f64 {
        let streams = (self.n_inputs + self.n_outputs) as f64;
        streams * 0.7 + self.steps.iter().map(|s| cost_ns(s.op)).sum::<f64>()
    }
}

/// While lowering, slots of each sort are numbered from 0; `finish` puts them in one row.
#[derive(Clone, Copy, PartialEq)]
enum SlotRef {
    Nowhere,
    Input(usize),
    Const(usize),
    Buf(usize),
    Output(usize),
}

struct ExprLowering<'a> {
    expr: &'a Expr,
    steps: Vec<(StepOp, [SlotRef; 3], SlotRef)>,
    place: Vec<SlotRef>,
    consts: Vec<[f32; SPLAT]>,
    /// For each buffer, whether it is in use.
    bufs: Vec<bool>,
}

impl<'a> ExprLowering<'a> {
    fn new(expr: &'a Expr, careful: bool) -> Self {
        let n_regs = expr.n_inputs() + expr.instrs().len();
        let mut place = vec![SlotRef::Nowhere; n_regs];
        for (k, p) in place.iter_mut().enumerate().take(expr.n_inputs()) {
            *p = SlotRef::Input(k);
        }
        let mut lowering =
            ExprLowering { expr, steps: Vec::new(), place, consts: Vec::new(), bufs: Vec::new() };
        if careful {
            for &reg in expr.outputs() {
                if let from @ SlotRef::Input(_) = lowering.place[usize::from(reg)] {
                    let to = lowering.take_buf();
                    lowering.steps.push((StepOp::Copy, [from, SlotRef::Nowhere, SlotRef::Nowhere], to));
                    lowering.place[usize::from(reg)] = to;
                }
            }
        }
        let last_use = last_uses(expr);
        for (i, instr) in expr.instrs().iter().enumerate() {
            let reg = expr.n_inputs() + i;
            if last_use[reg].is_some() {
                lowering.instr(i, instr, &last_use, careful);
            }
        }
        for (j, &reg) in expr.outputs().iter().enumerate() {
            let from = lowering.place[usize::from(reg)];
            if from != SlotRef::Output(j) {
                lowering.steps.push((
                    StepOp::Copy,
                    [from, SlotRef::Nowhere, SlotRef::Nowhere],
                    SlotRef::Output(j),
                ));
            }
        }
        lowering
    }

    fn instr(&mut self, i: usize, instr: &Instr, last_use: &[Option<usize>], careful: bool) {
        let reg = self.expr.n_inputs() + i;
        let op = match *instr {
            Instr::Const(v) => {
                self.place[reg] = SlotRef::Const(self.consts.len());
                self.consts.push([v; SPLAT]);
                return;
            }
            Instr::Unary(op, _) => StepOp::Unary(op),
            Instr::Binary(op, _, _) => StepOp::Binary(op),
            Instr::Select(..) => StepOp::Select,
        };
        let (regs, n) = instr.args();
        let mut args = [SlotRef::Nowhere; 3];
        for (arg, &r) in args.iter_mut().zip(&regs[..n]) {
            *arg = self.place[usize::from(r)];
            // Freed before the destination is chosen: a step may overwrite its own operand.
            if let (SlotRef::Buf(b), Some(last)) = (*arg, last_use[usize::from(r)])
                && last == i
            {
                self.bufs[b] = false;
            }
        }
        let output = self.expr.outputs().iter().position(|&r| usize::from(r) == reg);
        let dest = match output {
            Some(j) if !careful => SlotRef::Output(j),
            _ => self.take_buf(),
        };
        self.place[reg] = dest;
        self.steps.push((op, args, dest));
    }

    fn take_buf(&mut self) -> SlotRef {
        let b = self.bufs.iter().position(|used| !used).unwrap_or(self.bufs.len());
        if b == self.bufs.len() {
            self.bufs.push(true);
        }
        self.bufs[b] = true;
        SlotRef::Buf(b)
    }

    fn finish(self) -> StepPlan {
        let mut plan = StepPlan {
            steps: Vec::new(),
            n_inputs: self.expr.n_inputs(),
            consts: self.consts,
            n_bufs: self.bufs.len(),
            n_outputs: self.expr.outputs().len(),
            late: [0; Expr::OUTPUTS_MAX],
        };
        let slot = |p: SlotRef| match p {
            SlotRef::Nowhere => 0,
            SlotRef::Input(k) => k as u8,
            SlotRef::Const(c) => (plan.first_const() + c) as u8,
            SlotRef::Buf(b) => (plan.first_buf() + b) as u8,
            SlotRef::Output(j) => (plan.first_output() + j) as u8,
        };
        let steps = self.steps.iter().map(|(op, args, dest)| FusedStep {
            op: *op,
            args: args.map(slot),
            dest: slot(*dest),
        });
        plan.steps = steps.collect();
        for (s, (_, _, dest)) in self.steps.iter().enumerate() {
            let SlotRef::Output(j) = *dest else { continue };
            for (_, args, _) in &self.steps[s + 1..] {
                for arg in args {
                    if let SlotRef::Input(k) = *arg {
                        plan.late[j] |= 1 << k;
                    }
                }
            }
        }
        plan
    }
}

/// For each register, the last live instruction that reads it (one past the end for outputs), or `None`.
fn last_uses(expr: &Expr) -> Vec<Option<usize>> {
    let mut last = vec![None; expr.n_inputs() + expr.instrs().len()];
    for &reg in expr.outputs() {
        last[usize::from(reg)] = Some(expr.instrs().len());
    }
    for (i, instr) in expr.instrs().iter().enumerate().rev() {
        if last[expr.n_inputs() + i].is_some() {
            let (args, n) = instr.args();
            for &reg in &args[..n] {
                last[usize::from(reg)].get_or_insert(i);
            }
        }
    }
    last
}

/// Rounded measurements on Zen 3; only their order of magnitude matters.
fn cost_ns(op: StepOp) -> f64 {
    match op {
        StepOp::Copy | StepOp::Select => 0.4,
        StepOp::Unary(u) => match u {
            Unary::Neg
            | Unary::Relu
            | Unary::LeakyRelu(_)
            | Unary::Abs
            | Unary::Square
            | Unary::Sign
            | Unary::Floor
            | Unary::Scale(_)
            | Unary::Offset(_)
            | Unary::Clamp(..)
            | Unary::Positive => 0.4,
            Unary::RoundF16 | Unary::RoundBf16 => 1.0,
            Unary::Sqrt | Unary::Rsqrt | Unary::Recip => 2.0,
            Unary::Exp | Unary::Ln | Unary::Elu(_) => 2.5,
            Unary::Tanh | Unary::Sigmoid | Unary::GeluTanh | Unary::Silu | Unary::Erf => 4.0,
            Unary::Sin | Unary::Cos | Unary::Gelu => 5.0,
            Unary::Softplus => 8.0,
            Unary::Powf(_) => 60.0,
        },
        StepOp::Binary(b) => match b {
            Binary::Add
            | Binary::Sub
            | Binary::Mul
            | Binary::Max
            | Binary::Min
            | Binary::Greater
            | Binary::GreaterEqual
            | Binary::Equal
            | Binary::ReluGrad
            | Binary::TanhGrad
            | Binary::SigmoidGrad
            | Binary::LeakyReluGrad(_) => 0.4,
            Binary::Div => 2.0,
            Binary::EluGrad(_) => 2.5,
            Binary::SiluGrad | Binary::SoftplusGrad | Binary::GeluTanhGrad => 5.0,
            Binary::GeluGrad => 7.0,
            Binary::Pow => 100.0,
        },
    }
}
