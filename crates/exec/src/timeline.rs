//! Where the time of steps goes, as the engine measures it: a span for each program, each instruction and each node.
//!
//! What spans are called is the program's business ([`polyreme_graph::moment`]); here is when. Nothing is recorded, and no clock is
//! read, unless a timeline was set. Names are made while the step runs, outside of the spans: they cost the next instruction
//! a few microseconds at most.

use std::time::Instant;

use polyreme_graph::{Collective, Instr, Moment, MomentKind, MomentLabel};

use crate::engine::{Engine, Loaded};

/// A recording. It stops when it is full.
#[derive(Clone, Debug)]
pub struct Timeline {
    origin: Instant,
    moments: Vec<Moment>,
    max: usize,
}

impl Timeline {
    /// A recording of at most `max` spans, with times counted from `origin`.
    pub fn new(origin: Instant, max: usize) -> Timeline {
        Timeline { origin, moments: Vec::new(), max }
    }

    /// The recorded spans, in the order in which they ended.
    pub fn moments(&self) -> &[Moment] {
        &self.moments
    }

    fn is_full(&self) -> bool {
        self.moments.len() >= self.max
    }

    fn push(&mut self, label: MomentLabel, step: u64, [start, end]: [Instant; 2]) {
        if !self.is_full() {
            let start_us = start.duration_since(self.origin).as_secs_f64() * 1e6;
            let us = end.duration_since(start).as_secs_f64() * 1e6;
            self.moments.push(Moment { label, step, start_us, us });
        }
    }
}

impl Engine {
    /// The time, if it is being recorded.
    pub(crate) fn clock(&self) -> Option<Instant> {
        self.timeline.as_ref().is_some_and(|timeline| !timeline.is_full()).then(Instant::now)
    }

    /// The number of the step that is being run; of the last one, if this program updates nothing.
    pub(crate) fn step_number(&self, loaded: &Loaded) -> u64 {
        self.memory.state.step + u64::from(loaded.program.optimizer.is_some())
    }

    /// Records a whole program that began with this step.
    pub(crate) fn note_program(&mut self, loaded: &Loaded, step: u64, began: Option<Instant>) {
        let Some(began) = began else { return };
        let span = [began, Instant::now()];
        self.note(loaded.program.whole_label(step), step, span);
    }

    /// Records an instruction, unless it was skipped.
    pub(crate) fn note_instr(&mut self, loaded: &Loaded, instr: &Instr, began: Option<Instant>) {
        let Some(began) = began else { return };
        let span = [began, Instant::now()];
        let updates = matches!(
            instr,
            Instr::Measure { .. } | Instr::Update { .. } | Instr::Outer { .. } | Instr::Follow { .. }
        );
        let puts_back = matches!(instr, Instr::PutBack { .. });
        if updates && self.progress.keeps_weights() || puts_back && !self.progress.skipped {
            return;
        }
        if let Some(label) = loaded.program.label(instr, &self.progress.in_slots) {
            self.note(label, self.step_number(loaded), span);
        }
    }

    /// Records a node of a block.
    pub(crate) fn note_node(
        &mut self,
        loaded: &Loaded,
        block: usize,
        node: usize,
        microbatch: usize,
        began: Option<Instant>,
    ) {
        let Some(began) = began else { return };
        let span = [began, Instant::now()];
        self.note(loaded.program.node_label(block, node, microbatch), self.step_number(loaded), span);
    }

    /// Records an exchange that is over, from its start. When a message that was sent is over is not known here.
    pub(crate) fn note_exchange(&mut self, loaded: &Loaded, number: usize, started: Option<Instant>) {
        let sent = matches!(loaded.program.exchanges[number].op, Collective::Send { .. });
        let (Some(started), Some(end), false) = (started, self.clock(), sent) else { return };
        let label = loaded.program.exchange_label(number, MomentKind::Exchange, &self.progress.in_slots);
        self.note(label, self.step_number(loaded), [started, end]);
    }

    fn note(&mut self, label: MomentLabel, step: u64, span: [Instant; 2]) {
        if let Some(timeline) = &mut self.timeline {
            timeline.push(label, step, span);
        }
    }
}
