//! 1F1B, also called PipeDream-flush (Narayanan et al. 2021): one forward, one backward.
//!
//! Stage `s` of `p` begins with `p - 1 - s` forwards, enough to be busy until the first gradient is back, and then takes
//! turns: a forward, a backward. So it holds at most `p - s` activations, however many microbatches there are. The bubble
//! is `(p - 1) (tF + tB)`.

use super::timetable::{Action, StagePass, Timetable};

/// The timetable of one step.
pub fn timetable(stages: usize, microbatches: usize) -> Timetable {
    warmed_up(stages, microbatches, |stage| stages - 1 - stage)
}

/// One chunk per stage: `ahead` forwards (of as many as there are), then a forward and a backward in turn while there are
/// any.
pub(super) fn warmed_up(stages: usize, microbatches: usize, ahead: impl Fn(usize) -> usize) -> Timetable {
    let passes: Vec<(usize, usize)> = (0..microbatches).map(|microbatch| (0, microbatch)).collect();
    let by_stage = (0..stages).map(|stage| in_turn(&passes, &passes, ahead(stage), |_| stage)).collect();
    Timetable { stages, microbatches, chunks_per_stage: 1, place: (0..stages).collect(), by_stage }
}

/// The first `ahead` forwards, then a forward and a backward in turn, then the backwards that are left. Both lists are of
/// (which of the stage's chunks, microbatch); `chunk` numbers the stage's chunks.
pub(super) fn in_turn(
    forwards: &[(usize, usize)],
    backwards: &[(usize, usize)],
    ahead: usize,
    chunk: impl Fn(usize) -> usize,
) -> Vec<Action> {
    let action = |pass, (own, microbatch): (usize, usize)| Action { pass, chunk: chunk(own), microbatch };
    let (first, rest) = forwards.split_at(ahead.min(forwards.len()));
    let mut actions: Vec<Action> = first.iter().map(|of| action(StagePass::Forward, *of)).collect();
    for (k, backward) in backwards.iter().enumerate() {
        actions.extend(rest.get(k).map(|of| action(StagePass::Forward, *of)));
        actions.push(action(StagePass::Backward, *backward));
    }
    actions
}
