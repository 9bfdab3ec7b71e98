//! Parts of the model that ranks exchange in turn while they take steps by themselves (Streaming DiLoCo, Douillard et al. 2025), instead of all of it
//! at once.
//!
//! ```text
//!  step        1   2   3   4   5   6   7   8   ...             every = 4, two fragments, an overlap of 1
//!  fragment 0      [---]           [---]                       begins after steps 2, 6, ...
//!  fragment 1              [---]           [---]               begins after steps 4, 8, ...
//! ```
//!
//! A fragment is some of the parameters that follow each other in the arena, whole tensors, about as many elements as each other one. Its exchange
//! is that of local steps, for these parameters alone: mean, and outer step with the fragment's own part of the velocity.
//!
//! # While steps go on
//! With an overlap a copy of the fragment is what is exchanged, `s_i`, and the rank goes on with its own weights. When the exchange ends these are
//! `w_i`, and the fragment becomes `g + (w_i - s_i)`: what all ranks have come to, `g`, and what this rank has learnt meanwhile, which is part of the
//! difference that it brings to the fragment's next exchange. (Streaming DiLoCo mixes `g` and `w_i`; nothing is lost here.)
//!
//! All weights are the same on all ranks where a program begins and ends: there all of it is exchanged at once, and an exchange that would not end before that is
//! left out.
//!
//! # What it costs
//! - Bytes: in a program of `r · every` steps each fragment has `r` turns, but for the last one of the last, and all are exchanged at its end: at most
//!   `r + 1` times the parameters.
//! - Memory: with an overlap twice the largest fragment.

use std::ops::Range;

use polyreme_graph::memory::{own_range, param_ranges};
use polyreme_graph::{Axis, Collective, DType, Graph, Instr, Region};

use crate::buckets::cuts;
use crate::local_steps::agree;
use crate::plan::{FragmentTurns, LocalSteps};
use crate::schedule::Lowering;

/// The fragment as it was sent.
const SENT: &str = "fragment as sent";
/// The fragment that is being summed.
const SUMMED: &str = "fragment on its way";

/// The parameters that ranks have in common, in `n` parts of about as many elements; fewer if there are fewer tensors.
pub fn fragments(graph: &Graph, n: usize) -> Vec<Range<usize>> {
    let common = own_range(graph).start;
    let ends: Vec<usize> =
        param_ranges(graph).iter().map(|(_, r)| r.end).filter(|end| *end <= common).collect();
    let mut parts: Vec<Range<usize>> = Vec::new();
    for k in 1..=n {
        let (from, most) = (parts.last().map_or(0, |part| part.end), ends.len() - (n - k).min(ends.len()));
        let ideal = common * k / n;
        // One tensor at least stays for each of the parts that follow.
        let open = ends[..most].iter().copied().filter(|end| *end > from);
        if let Some(end) = open.min_by_key(|end| end.abs_diff(ideal)) {
            parts.push(from..end);
        }
    }
    parts
}

/// The turns of a program.
pub(crate) struct Turns {
    local: LocalSteps,
    /// What is yet to come, the next one last.
    left: Vec<([usize; 2], usize)>,
    fragments: Vec<Range<usize>>,
    /// The weights of the last exchange, where they are needed.
    before: Option<Region>,
    /// What is on its way.
    way: Option<FragmentSum>,
}

/// An exchange that goes on.
struct FragmentSum {
    ends: usize,
    range: Range<usize>,
    sum: usize,
    sent: Region,
    summed: Region,
}

impl Turns {
    pub(crate) fn new(
        lowering: &Lowering,
        local: LocalSteps,
        turns: FragmentTurns,
        n_steps: usize,
        before: Option<Region>,
    ) -> Turns {
        let fragments = fragments(lowering.program.graph(), turns.fragments);
        let mut left: Vec<_> = turns.within(n_steps).filter(|(_, k)| *k < fragments.len()).collect();
        left.reverse();
        Turns { local, left, fragments, before, way: None }
    }

    /// What comes after so many steps.
    pub(crate) fn after(&mut self, lowering: &mut Lowering, done: usize) {
        if let Some(way) = self.way.take_if(|way| way.ends == done) {
            self.arrive(lowering, way);
        }
        let Some(([_, ends], k)) = self.left.pop_if(|([begins, _], _)| *begins == done) else { return };
        let range = self.fragments[k].clone();
        if ends > done {
            self.way = Some(self.send(lowering, range, ends));
            return;
        }
        agree(lowering, self.local, range.clone(), self.before.as_ref());
        self.remember(lowering, Region::Params(range.clone()), &range);
    }

    /// From here on these are the weights of the last exchange.
    fn remember(&self, lowering: &mut Lowering, from: Region, range: &Range<usize>) {
        if let Some(before) = &self.before {
            lowering.push(Instr::Copy { from, into: before.part(range.clone()) });
        }
    }

    fn send(&self, lowering: &mut Lowering, range: Range<usize>, ends: usize) -> FragmentSum {
        let most = self.fragments.iter().map(Range::len).max().unwrap_or(0);
        let [sent, summed] =
            [SENT, SUMMED].map(|name| lowering.common_buffer(name, DType::F32, most).part(0..range.len()));
        for into in [&sent, &summed] {
            lowering.push(Instr::Copy { from: Region::Params(range.clone()), into: into.clone() });
        }
        if let (Some(before), Some(_)) = (&self.before, lowering.wire) {
            lowering.push(Instr::Subtract { from: before.part(range.clone()), into: summed.clone() });
        }
        let sum = lowering.program.exchange(Collective::AllReduce, Axis::Data, summed.clone());
        lowering.code(sum, cuts(range.len(), self.ranks(lowering)), range.clone());
        lowering.push(Instr::Start(sum));
        FragmentSum { ends, range, sum, sent, summed }
    }

    fn arrive(&self, lowering: &mut Lowering, way: FragmentSum) {
        let FragmentSum { range, sum, sent, summed, .. } = way;
        let by = self.ranks(lowering);
        lowering.push(Instr::Wait(sum));
        lowering.push(Instr::Divide { of: summed.clone(), by });
        let before = self.before.as_ref().map(|before| before.part(range.clone()));
        if let (Some(from), Some(_)) = (before.clone(), lowering.wire) {
            lowering.push(Instr::Add { from, into: summed.clone() });
        }
        if let (Some(from), Some(outer)) = (before, self.local.outer) {
            let (of, lr, momentum) = (summed.clone(), outer.lr, outer.momentum);
            lowering.push(Instr::Outer { of, params: range.clone(), from, lr, momentum });
        }
        self.remember(lowering, summed.clone(), &range);
        lowering.push(Instr::Subtract { from: sent, into: summed.clone() });
        lowering.push(Instr::Add { from: summed, into: Region::Params(range) });
    }

    fn ranks(&self, lowering: &Lowering) -> usize {
        lowering.role.ranks
    }
}
