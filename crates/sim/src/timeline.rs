//! What a traced rank did: the same moments, with the same labels, as an engine records of a real step. Whatever writes, reads and draws
//! those does so with these.

use polyreme_graph::{Instr, Moment, MomentKind, MomentLabel, Program};

use crate::clock::{Mark, MarkOf};
use crate::score::{PartOf, Score};

/// The moments of a rank from what the clock marked: of each program, of each instruction and of each node, inner ones first. A stretch is
/// divided among its parts by the times that they would take alone.
pub(crate) fn moments(program: &Program, score: &Score, marks: &[Mark]) -> Vec<Moment> {
    let slots = SlotContents::new(program);
    let label = |at: usize| program.label(&program.instrs[at], slots.at(at));
    let per_run = 1 + program.instrs.iter().filter(|instr| matches!(instr, Instr::NextStep)).count() as u64;
    let mut moments = Vec::new();
    let mut run: Option<(usize, [f64; 2])> = None;
    for mark in marks {
        // Steps are counted from 1.
        let step = 1 + mark.run as u64 * per_run;
        let moment =
            |label: MomentLabel, from: f64, to: f64| Moment { label, step, start_us: from, us: to - from };
        if let Some((number, span)) = run.filter(|(number, _)| *number != mark.run) {
            moments.push(whole(program, 1 + number as u64 * per_run, span));
            run = None;
        }
        // An exchange may have begun long before; a rank does not stand still between what it does.
        if !matches!(mark.what, MarkOf::Exchange(_)) {
            let from = run.map_or(mark.from, |(_, [from, _])| from);
            run = Some((mark.run, [from, mark.to]));
        }
        match mark.what {
            MarkOf::Wait(number) => {
                moments.extend(label(slots.waits[number]).map(|label| moment(label, mark.from, mark.to)));
            }
            MarkOf::Served(instr) => {
                moments.extend(label(instr).map(|label| moment(label, mark.from, mark.to)));
            }
            MarkOf::Copy(number) => {
                moments.extend(label(slots.starts[number]).map(|label| moment(label, mark.from, mark.to)));
            }
            MarkOf::Exchange(number) => {
                let in_slots = slots.at(slots.waits[number]);
                let label = program.exchange_label(number, MomentKind::Exchange, in_slots);
                moments.push(moment(label, mark.from, mark.to));
            }
            MarkOf::Stretch(k) => {
                let stretch = &score.stretches[k];
                let stretched = (mark.to - mark.from) / stretch.took.alone_us;
                let mut at = mark.from;
                let parts = &score.parts[stretch.parts.clone()];
                for of_instr in parts.chunk_by(|a, b| a.what.instr() == b.what.instr()) {
                    let began = at;
                    for part in of_instr {
                        let end = at + part.alone_us * stretched;
                        if let PartOf::Node { block, node, microbatch, .. } = part.what {
                            moments.push(moment(program.node_label(block, node, microbatch), at, end));
                        }
                        at = end;
                    }
                    let instr = of_instr[0].what.instr();
                    moments.extend(label(instr).map(|label| moment(label, began, at)));
                }
            }
        }
    }
    if let Some((number, span)) = run {
        moments.push(whole(program, 1 + number as u64 * per_run, span));
    }
    moments
}

fn whole(program: &Program, step: u64, [from, to]: [f64; 2]) -> Moment {
    Moment { label: program.whole_label(step), step, start_us: from, us: to - from }
}

/// Which microbatch is in which slot when, and where exchanges are started and waited for.
struct SlotContents {
    /// By instruction: which of `contents`.
    of_instr: Vec<usize>,
    contents: Vec<Vec<usize>>,
    starts: Vec<usize>,
    waits: Vec<usize>,
}

impl SlotContents {
    fn new(program: &Program) -> SlotContents {
        let n = program.exchanges.len();
        let (mut starts, mut waits) = (vec![0; n], vec![0; n]);
        let mut contents = vec![vec![0; program.slots]];
        let mut of_instr = Vec::with_capacity(program.instrs.len());
        for (at, instr) in program.instrs.iter().enumerate() {
            if let Instr::Load { slot, microbatch } = instr {
                let mut now = contents[contents.len() - 1].clone();
                now[*slot] = *microbatch;
                contents.push(now);
            }
            if let Instr::Start(number) = instr {
                starts[*number] = at;
            }
            if let Instr::Wait(number) = instr {
                waits[*number] = at;
            }
            of_instr.push(contents.len() - 1);
        }
        SlotContents { of_instr, contents, starts, waits }
    }

    fn at(&self, instr: usize) -> &[usize] {
        &self.contents[self.of_instr[instr]]
    }
}
