//! A program as text, for people and for tests.

use std::fmt;
use std::ops::Range;

use crate::graph::Graph;
use crate::memory::param_ranges;
use crate::program::{Collective, Exchange, Instr, Program, Region};
use crate::shape::DType;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut shown = vec![false; self.blocks.len()];
        for instr in &self.instrs {
            match instr {
                Instr::Begin(of) => writeln!(f, "begin {}", self.words(of))?,
                Instr::Load { slot, microbatch } => {
                    let m = &self.microbatches[*microbatch];
                    let (from, n) = (m.first_sample, self.bodies[m.body].samples());
                    writeln!(f, "load microbatch {microbatch} into slot {slot}: {n} samples from {from}")?;
                }
                Instr::Run { block, slot, microbatch } => {
                    let b = &self.blocks[*block];
                    let update = b.update.map(|p| &self.bodies[b.body].graph.params[p]);
                    write!(
                        f,
                        "run block {block} on slot {slot}: {} of microbatch {microbatch}",
                        b.kind.name()
                    )?;
                    if self.bodies[b.body].strict {
                        write!(f, ", strict")?;
                    }
                    match update {
                        Some(param) => {
                            let (name, how) = (&param.name, param.learning.words());
                            writeln!(f, ", update {name}{}{how}", self.moments_format())?;
                        }
                        None => writeln!(f)?,
                    }
                    if !std::mem::replace(&mut shown[*block], true) {
                        let graph = &self.bodies[b.body].graph;
                        for node in &graph.nodes[b.nodes.clone()] {
                            writeln!(f, "  {}", crate::print::line(graph, node))?;
                        }
                    }
                }
                Instr::Count { microbatch, into, tally, .. } => {
                    let (into, tally) = (self.words(into), self.words(tally));
                    writeln!(f, "count loss of microbatch {microbatch} into {into}, samples into {tally}")?;
                }
                Instr::Keep { microbatch, .. } => writeln!(f, "keep states of microbatch {microbatch}")?,
                Instr::WeighStates { microbatch, into, .. } => {
                    writeln!(f, "{} = states of microbatch {microbatch}, weighted", self.words(into))?;
                }
                Instr::Zero(of) => writeln!(f, "{} = 0", self.words(of))?,
                Instr::Copy { from, into } => writeln!(f, "{} = {}", self.words(into), self.words(from))?,
                Instr::Add { from, into } => writeln!(f, "{} += {}", self.words(into), self.words(from))?,
                Instr::Subtract { from, into } => {
                    writeln!(f, "{} -= {}", self.words(into), self.words(from))?;
                }
                Instr::DivideByWeight(of) => writeln!(f, "{} /= weight of the step", self.words(of))?,
                Instr::Divide { of, by } => writeln!(f, "{} /= {by}", self.words(of))?,
                Instr::Start(i) => writeln!(f, "start {i}: {}", self.describe(&self.exchanges[*i]))?,
                Instr::Wait(i) => writeln!(f, "wait {i}")?,
                Instr::Judge(of) => writeln!(f, "judge {}{}", self.words(of), self.or_skips())?,
                Instr::JudgeOwn(of) => writeln!(f, "judge own {}", self.words(of))?,
                Instr::JudgeSteps(of) => writeln!(f, "judge all steps by {}", self.words(of))?,
                Instr::Squares { of, into, block } => {
                    let op = if block.is_some() { "=" } else { "+=" };
                    writeln!(f, "{} {op} squares of {}", self.words(into), self.words(of))?;
                }
                Instr::SquaresApart { of, from, into } => {
                    writeln!(
                        f,
                        "{} += squares of {} - {}",
                        self.words(into),
                        self.words(of),
                        self.words(from)
                    )?;
                }
                Instr::Leave { movement, drift } => {
                    writeln!(f, "go on together if drift {drift} is exceeded by {}", self.words(movement))?;
                }
                Instr::Together => writeln!(f, "together")?,
                Instr::Clip { squares, max_norm } => {
                    writeln!(f, "clip {max_norm} by {}{}", self.words(squares), self.or_skips())?
                }
                Instr::Measure { what, params, grads, sums } => writeln!(
                    f,
                    "{} = {} of split tensors in params {}..{} with {}",
                    self.words(sums),
                    what.name(),
                    params.start,
                    params.end,
                    self.words(grads)
                )?,
                Instr::Update { params, grads, sums, learning, .. } => {
                    let names = names_in(self.graph(), params);
                    let by = sums.as_ref().map_or(String::new(), |sums| format!(" by {}", self.words(sums)));
                    writeln!(
                        f,
                        "update params {}..{} with {}{by}{}{}: {names}",
                        params.start,
                        params.end,
                        self.words(grads),
                        self.moments_format(),
                        learning.words()
                    )?;
                }
                Instr::Outer { of, from, lr, momentum, .. } => {
                    writeln!(
                        f,
                        "outer step of {} from {}: rate {lr}, momentum {momentum}",
                        self.words(of),
                        self.words(from)
                    )?;
                }
                Instr::PutBack { from, into } => {
                    writeln!(f, "{} = {} if updates were skipped", self.words(into), self.words(from))?;
                }
                Instr::ReadParams(of) => writeln!(f, "read parameters from {}", self.words(of))?,
                Instr::Push(n) => {
                    let of = &self.served[*n];
                    let pushed: Vec<_> = of.pushed.iter().map(|region| self.words(region)).collect();
                    writeln!(f, "push {} to server {}", pushed.join(" and "), of.server)?;
                }
                Instr::Pull(n) => {
                    let of = &self.served[*n];
                    let Range { start, end } = of.params;
                    writeln!(f, "pull params {start}..{end} from server {}", of.server)?;
                }
                Instr::Await(n) => {
                    let Range { start, end } = self.served[*n].params;
                    writeln!(f, "await params {start}..{end}")?;
                }
                Instr::NextStep => writeln!(f, "next step")?,
                Instr::Follow { decay } => writeln!(f, "average += (1 - {decay}) · (params - average)")?,
            }
        }
        Ok(())
    }
}

impl Program {
    /// What a number that is not finite does, where the loss is scaled.
    fn or_skips(&self) -> &'static str {
        if self.scaled { ", or skip updates" } else { "" }
    }

    /// What the optimizer's state is stored in, if it has one and that is not f32.
    fn moments_format(&self) -> String {
        let has = self.optimizer.is_some_and(|optimizer| optimizer.n_states() > 0);
        if has && self.moments != DType::F32 {
            format!(", moments in {}", self.moments)
        } else {
            String::new()
        }
    }

    /// An exchange in words: op, elements, type, group and wire format.
    pub fn describe(&self, exchange: &Exchange) -> String {
        let Exchange { op, axis, of, dtype, coding } = exchange;
        let name = op.name();
        match op {
            Collective::AllReduce
            | Collective::ReduceScatter(_)
            | Collective::AllGather(_)
            | Collective::AllToAll { .. } => {}
            Collective::Send { to, tag } => {
                return format!("{name} {dtype} {} to {} {to}, tag {tag}", self.words(of), axis.name());
            }
            Collective::Receive { from, tag } => {
                return format!("{name} {dtype} {} from {} {from}, tag {tag}", self.words(of), axis.name());
            }
            Collective::Meet => return format!("{name} over {}", axis.name()),
        }
        let form = coding.as_ref().map_or(String::new(), |coding| {
            let factors =
                coding.factors.as_ref().map_or(String::new(), |f| format!(" and {}", self.words(f)));
            format!(" as {} with {}{factors}", coding.layout.words(), self.words(&coding.residual))
        });
        let mut names = String::new();
        if let (Region::Grads(_) | Region::Params(_), Some(params)) = (of, self.params_of(of)) {
            names = format!(": {}", names_in(self.graph(), &params));
        }
        format!("{name} {dtype} {} over {}{form}{names}", self.words(of), axis.name())
    }

    /// The elements of the parameters' arena that a region of parameters or gradients covers.
    fn params_of(&self, region: &Region) -> Option<Range<usize>> {
        match (region, &self.grad_buffers) {
            (Region::Params(r), _) | (Region::Grads(r), None) => Some(r.clone()),
            (
                Region::Grads(_)
                | Region::States(_)
                | Region::Residual(_)
                | Region::Factors(_)
                | Region::Buffer(..)
                | Region::Value { .. },
                _,
            ) => None,
        }
    }

    fn words(&self, region: &Region) -> String {
        match region {
            Region::Params(r) => format!("params {}..{}", r.start, r.end),
            Region::Grads(r) => format!("grads {}..{}", r.start, r.end),
            Region::States(r) => format!("states {}..{}", r.start, r.end),
            Region::Residual(r) => format!("residual {}..{}", r.start, r.end),
            Region::Factors(r) => format!("factors {}..{}", r.start, r.end),
            Region::Buffer(buffer, r) => format!("{} {}..{}", self.buffers[*buffer].name, r.start, r.end),
            Region::Value { slot, value, .. } => format!("{value} of slot {slot}"),
        }
    }
}

/// The parameters that a range of the arena touches.
fn names_in(graph: &Graph, range: &Range<usize>) -> String {
    let within = param_ranges(graph).into_iter().filter(|(_, r)| r.start < range.end && range.start < r.end);
    within.map(|(p, _)| graph.params[p].name.clone()).collect::<Vec<_>>().join(" ")
}
