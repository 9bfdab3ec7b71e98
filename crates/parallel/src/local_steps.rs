//! The schedule of local steps: each rank of the data axis takes a number of steps by itself, and then they agree on weights. One
//! program for a run of `n` steps, from common weights to common weights.
//!
//! ```text
//!  weights at the last exchange = params           only with an outer step, or coded
//!  ── step 0: load, forward, backward, judge own, clip, update      as a lone rank, with its part of the batch
//!     next step
//!  ── step 1 ...
//!  ── step n - 1
//!  sum the totals of all n steps over the ranks, judge all steps
//!  sum params over the ranks, params /= ranks
//!  sum states over the ranks, states /= ranks      running statistics
//!  outer step of params                            or none: the mean is what all go on with
//! ```
//!
//! A step of a rank is that of a lone one: its gradient is the mean over its own samples, and it is that gradient's norm that is
//! clipped. Nothing is exchanged before the last step has been made, so a rank waits for others once in `n` steps; but for parts of the model that
//! take turns, if they do (`fragments`).
//!
//! # Parameters of a rank's own
//! Parameters that each replica keeps for itself ([`Learning::own`](polyreme_graph::Learning)) are in no exchange: they lie behind the
//! others. Where one model is asked for, to evaluate or to save it, it has their mean for as long as that takes ([`share_own`],
//! [`take_back_own`]).
//!
//! # The outer step
//! With `g = w - mean(w_i)`, where `w` are the weights that all ranks had at the last exchange (DiLoCo, Douillard et al. 2023):
//!
//! ```text
//!  velocity = momentum · velocity + g
//!  w        = w - lr · (g + momentum · velocity)
//! ```
//!
//! `lr = 1` and `momentum = 0` is plain averaging, but for rounding. `w` is a copy that the program makes when it begins, where all ranks
//! have the same weights; only the velocity outlives a program. All ranks compute the same from the same sums.
//!
//! # How far ranks may come
//! With a bound on drift a rank measures after every `look` steps how far it has come from the weights `w` of the last exchange. The squares are summed over the ranks,
//! and so are those of `w`, which makes two numbers the same on all of them:
//!
//! ```text
//!  drift = √(Σᵢ |w_i - w|² / Σᵢ |w|²)
//! ```
//!
//! Ranks meet when that exceeds the bound: the rest of the steps is left out. It is never less than the root mean square of the ranks' distances from their mean, which is
//! the point that makes the sum of squares least; that distance cannot be known without an exchange of weights. The sum goes on during the next step, at the
//! end of which ranks hear of it, so no rank waits for another that is not a step behind.
//!
//! # Fewer bytes
//! With a format on the wire, what travels is how far a rank's weights have come since the last exchange, `w_i - w`, with feedback of what the codes
//! lost. All ranks decode the same sum, and so go on with the same weights `w + sum / ranks`.
//!
//! ```text
//!  params -= weights at the last exchange
//!  sum params over the ranks, coded; params /= ranks
//!  params += weights at the last exchange
//! ```
//!
//! # What it costs
//! - Bytes: for `n` steps one all-reduce of parameters and states, and of 9 numbers for each step. All-reduce in every step sends `n` times
//!   as many.
//! - Memory: weights and optimizer state are each rank's own, also where ranks share memory. With an outer step, the parameters twice more; with a
//!   format on the wire too (once more with both), and its codes.
//! - What is learnt is not what one rank would learn with the whole batch: the noise of `ranks` short runs is averaged instead of their gradients.
//!
//! # Numbers that are not finite
//! A rank whose loss is not finite updates nothing more, and goes on to the end of the run, as others wait for it there. The sums of
//! all totals tell every rank, before weights are averaged.
//!
//! Refused: scaled losses, whose scale all ranks change together; averages of weights that follow every step; logical shards; batch norms
//! over all ranks.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::{own_range, state_len};
use polyreme_graph::{Axis, Body, Collective, DType, Instr, Keeps, Program, Region, Role, Weights, totals};

use crate::buckets::cuts;
use crate::fragments::Turns;
use crate::plan::{DriftBound, LocalSteps, StepShape, Training};
use crate::schedule::Lowering;

/// Where the weights of the last exchange are kept for the outer step.
const BEFORE: &str = "weights at the last exchange";
/// Where a rank's own parameters are kept while their mean is in their place.
const OWN: &str = "own parameters";
/// How far ranks have come, and the squares of where they came from.
const MOVEMENT: &str = "movement";

/// A run of steps that this rank takes by itself, over which the program's microbatches are spread; then all ranks meet.
///
/// # Panics
/// If the loss is scaled or weights are followed by an average.
pub(crate) fn run(lowering: &mut Lowering, local: LocalSteps, shape: &StepShape, training: &Training) {
    assert!(
        !training.scaled && training.ema.is_none(),
        "ranks agree on a scale and on averages in every step"
    );
    let (n_steps, len, learnt) = (shape.steps, totals::len(1), lowering.grad_len());
    let all_totals = lowering.program.buffer("totals of steps", DType::F64, n_steps * len);
    let common = own_range(lowering.program.graph()).start;
    let params = Region::Params(0..common);
    let needed = local.outer.is_some() || local.drift.is_some() || lowering.wire.is_some();
    let before = needed.then(|| {
        let before = lowering.program.buffer(BEFORE, DType::F32, common);
        lowering.push(Instr::Copy { from: params.clone(), into: before.clone() });
        before
    });
    let per_step = lowering.program.microbatches.len() / n_steps;
    let bodies = lowering.program.bodies.clone();
    let mut looks =
        local.drift.zip(before.clone()).map(|(bound, before)| Looks::new(lowering, bound, before));
    if looks.is_some() {
        // Of steps that are left out.
        lowering.push(Instr::Zero(all_totals.clone()));
    }
    let mut turns = local.turns.map(|turns| Turns::new(lowering, local, turns, n_steps, before.clone()));
    for step in 0..n_steps {
        let role = std::mem::replace(&mut lowering.role, alone(learnt));
        lowering.by_itself = true;
        let totals = all_totals.part(step * len..(step + 1) * len);
        lowering.push(Instr::Begin(totals.clone()));
        // A rank without samples of a short step leaves it out.
        if per_step > 0 {
            lowering.rounds_of(step * per_step..(step + 1) * per_step, per_step, &totals);
            lowering.updates(training, &bodies);
        }
        (lowering.role, lowering.by_itself) = (role, false);
        if let Some(looks) = &mut looks {
            looks.after(lowering, step + 1, n_steps);
        }
        if let Some(turns) = &mut turns {
            turns.after(lowering, step + 1);
        }
        if step + 1 < n_steps {
            lowering.push(Instr::NextStep);
        }
    }
    if looks.is_some() {
        lowering.push(Instr::Together);
    }
    lowering.program.exchange_now(Collective::AllReduce, Axis::Data, all_totals.clone());
    lowering.push(Instr::JudgeSteps(all_totals));
    agree(lowering, local, 0..common, before.as_ref());
    let states = Region::States(0..state_len(lowering.program.graph()));
    if lowering.program.len_of(&states) > 0 {
        let by = lowering.role.ranks;
        lowering.program.exchange_now(Collective::AllReduce, Axis::Data, states.clone());
        lowering.push(Instr::Divide { of: states, by });
    }
}

/// How ranks find out that they have come too far.
struct Looks {
    bound: DriftBound,
    /// The weights of the last exchange.
    before: Region,
    /// The two numbers that are summed.
    movement: Region,
    /// The sum that is under way.
    sum: Option<usize>,
}

impl Looks {
    fn new(lowering: &mut Lowering, bound: DriftBound, before: Region) -> Looks {
        Looks { bound, before, movement: lowering.program.buffer(MOVEMENT, DType::F64, 2), sum: None }
    }

    /// What comes after so many steps of `n_steps`. What would be heard when all are done is of no use.
    fn after(&mut self, lowering: &mut Lowering, done: usize, n_steps: usize) {
        let DriftBound { drift, look } = self.bound;
        if let Some(sum) = self.sum.take() {
            lowering.push(Instr::Wait(sum));
            lowering.push(Instr::Leave { movement: self.movement.clone(), drift });
        }
        if done.is_multiple_of(look) && done + 1 < n_steps {
            let [apart, whole] = [0, 1].map(|k| self.movement.part(k..k + 1));
            let (from, common) = (self.before.clone(), lowering.program.len_of(&self.before));
            lowering.push(Instr::Zero(self.movement.clone()));
            let of = Region::Params(0..common);
            lowering.push(Instr::SquaresApart { of, from: from.clone(), into: apart });
            lowering.push(Instr::Squares { of: from, into: whole, block: None });
            let sum = lowering.program.exchange(Collective::AllReduce, Axis::Data, self.movement.clone());
            lowering.push(Instr::Start(sum));
            self.sum = Some(sum);
        }
    }
}

/// All ranks come to the same weights, of a range of the parameters. `before` are those that they had in common at the last exchange, where that is
/// needed.
pub(crate) fn agree(
    lowering: &mut Lowering,
    local: LocalSteps,
    range: Range<usize>,
    before: Option<&Region>,
) {
    let (of, by) = (Region::Params(range.clone()), lowering.role.ranks);
    let before = before.map(|before| before.part(range.clone()));
    let coded = before.clone().filter(|_| lowering.wire.is_some());
    if let Some(from) = coded.clone() {
        lowering.push(Instr::Subtract { from, into: of.clone() });
    }
    let sum = lowering.program.exchange(Collective::AllReduce, Axis::Data, of.clone());
    lowering.code(sum, cuts(range.len(), by), range.clone());
    lowering.program.instrs.extend([Instr::Start(sum), Instr::Wait(sum)]);
    lowering.push(Instr::Divide { of: of.clone(), by });
    if let Some(from) = coded {
        lowering.push(Instr::Add { from, into: of });
    }
    if let (Some(outer), Some(from)) = (local.outer, before) {
        let (of, lr, momentum) = (Region::Params(range.clone()), outer.lr, outer.momentum);
        lowering.push(Instr::Outer { of, params: range, from, lr, momentum });
    }
}

/// The program that puts the mean over all ranks in the place of the parameters that each keeps for itself; the body says which these
/// are. What each had is kept until [`take_back_own`].
pub fn share_own(ranks: usize, body: &Arc<Body>) -> Program {
    let mut program = Program::empty(vec![body.clone()]);
    let own = Region::Params(own_range(&body.graph));
    let kept = program.buffer(OWN, DType::F32, program.len_of(&own));
    program.instrs.push(Instr::Copy { from: own.clone(), into: kept });
    program.exchange_now(Collective::AllReduce, Axis::Data, own.clone());
    program.instrs.push(Instr::Divide { of: own, by: ranks });
    program
}

/// The program that gives each rank its own parameters again.
pub fn take_back_own(body: &Arc<Body>) -> Program {
    let mut program = Program::empty(vec![body.clone()]);
    let own = Region::Params(own_range(&body.graph));
    let from = program.buffer(OWN, DType::F32, program.len_of(&own));
    program.instrs.push(Instr::Copy { from, into: own });
    program
}

/// The role of a rank in a step that it takes by itself.
fn alone(learnt: usize) -> Role {
    let all = 0..learnt;
    Role { rank: 0, ranks: 1, weights: Weights::Own, keeps: Keeps::All, shards: None, parts: vec![vec![all]] }
}

#[cfg(test)]
mod tests;
