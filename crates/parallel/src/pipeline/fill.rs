//! The list scheduler behind the zero-bubble schedules: weight gradients fill the time in which a stage would wait.
//!
//! Time goes in ticks, and every pass takes one. In each tick every stage takes the first that it can of: a forward, of the
//! earlier chunk first; input gradients, of the earliest microbatch; weight gradients, of the earliest microbatch. What
//! holds forwards back is memory (`held_max` activations per stage, of which the last place is only for the stage's last
//! chunk) and the schedule's own rule. The result is an order: it remains valid whatever passes really cost.
//!
//! With one or two chunks per stage some stage can always go on, as long as `may_start` never holds back the earliest
//! microbatch that is not finished. If the next pass of that microbatch is a gradient, it can run. If it is a forward, what
//! its stage holds in the same chunk and later ones is of earlier microbatches: they only lack weight gradients, which can
//! run. When these are done, only activations of the stage's first chunk can remain, and they leave the last place free.

use super::timetable::{Action, StagePass, Timetable};

/// How many microbatches each chunk has done, by pass.
#[derive(Clone)]
pub(super) struct FillProgress {
    pub(super) forward: Vec<usize>,
    pub(super) input: Vec<usize>,
    pub(super) weight: Vec<usize>,
}

/// Fills a timetable for chunks at these places. `may_start` says whether a chunk may begin one more forward.
pub(super) fn fill(
    place: Vec<usize>,
    microbatches: usize,
    held_max: usize,
    may_start: impl Fn(&FillProgress, usize) -> bool,
) -> Timetable {
    let n_chunks = place.len();
    let stages = place.iter().max().map_or(0, |last| last + 1);
    let none = || vec![0; n_chunks];
    let mut done = FillProgress { forward: none(), input: none(), weight: none() };
    let mut timetable = Timetable {
        stages,
        microbatches,
        chunks_per_stage: n_chunks / stages,
        place,
        by_stage: vec![Vec::new(); stages],
    };
    let chunks: Vec<Vec<usize>> = (0..stages).map(|stage| timetable.chunks_of(stage)).collect();
    while done.weight.iter().any(|n| *n < microbatches) {
        // All stages choose before any of them counts as done: what ends in a tick can be used in the next one.
        let chosen: Vec<Option<Action>> =
            chunks.iter().map(|own| choose(&done, own, microbatches, held_max, &may_start)).collect();
        assert!(chosen.iter().any(Option::is_some), "a stage can always go on: see the head of this file");
        for (actions, action) in timetable.by_stage.iter_mut().zip(chosen) {
            if let Some(action) = action {
                done.count(action);
                actions.push(action);
            }
        }
    }
    timetable
}

/// What a stage with these chunks does next, if it can do anything.
fn choose(
    done: &FillProgress,
    own: &[usize],
    microbatches: usize,
    held_max: usize,
    may_start: impl Fn(&FillProgress, usize) -> bool,
) -> Option<Action> {
    let held: usize = own.iter().map(|chunk| done.forward[*chunk] - done.weight[*chunk]).sum();
    let forward = own.iter().copied().find(|&chunk| {
        let reserved = usize::from(Some(&chunk) != own.last());
        let arrived = if chunk == 0 { microbatches } else { done.forward[chunk - 1] };
        done.forward[chunk] < arrived && held + reserved < held_max && may_start(done, chunk)
    });
    if let Some(chunk) = forward {
        return Some(Action { pass: StagePass::Forward, chunk, microbatch: done.forward[chunk] });
    }
    // Of two chunks at the same microbatch the later one comes first, as in the backward pass.
    let earliest = |pass, next: &[usize], arrived: &dyn Fn(usize) -> usize| {
        let can = own.iter().rev().copied().filter(|&chunk| next[chunk] < arrived(chunk));
        let chunk = can.min_by_key(|&chunk| next[chunk])?;
        Some(Action { pass, chunk, microbatch: next[chunk] })
    };
    let gradients = |chunk: usize| match done.input.get(chunk + 1) {
        Some(after) => *after,
        None => done.forward[chunk],
    };
    earliest(StagePass::InputGrad, &done.input, &gradients)
        .or_else(|| earliest(StagePass::WeightGrad, &done.weight, &|chunk| done.input[chunk]))
}

impl FillProgress {
    fn count(&mut self, action: Action) {
        let of = match action.pass {
            StagePass::Forward => &mut self.forward,
            StagePass::InputGrad => &mut self.input,
            StagePass::Backward | StagePass::WeightGrad => &mut self.weight,
        };
        of[action.chunk] += 1;
    }
}
