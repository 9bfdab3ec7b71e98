//! ZB-V (Qi et al. 2023 and 2024, "Pipeline Parallelism with Controllable Memory"): two chunks per stage, placed as a V.
//!
//! Stage `s` of `p` has the chunks `s` and `2p - 1 - s`: a microbatch goes down the stages and up again, so the first stage
//! computes the loss and begins the backward pass at once. A stage that holds an activation of its first chunk for long
//! holds that of its second one briefly, and the sum is the same everywhere: up to `2p` activations of chunks, as much
//! memory as the first stage of 1F1B.
//!
//! A forward through the first chunk is back at the stage after `2 (p - s) - 1` passes, and that many may be on their way.
//! With equal costs the bubble is `(p - 1) tF` of a chunk, which is half a stage: nothing but the wait for the first
//! microbatch. Other costs leave gaps.

use super::fill::fill;
use super::timetable::Timetable;

/// The timetable of one step.
pub fn timetable(stages: usize, microbatches: usize) -> Timetable {
    let place = (0..stages).chain((0..stages).rev()).collect();
    fill(place, microbatches, 2 * stages, |done, chunk| {
        let back = 2 * stages - 1 - chunk;
        chunk >= stages || done.forward[chunk] - done.forward[back] < 2 * (stages - chunk) - 1
    })
}
