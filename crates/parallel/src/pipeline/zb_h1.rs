//! ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B with the backward pass split in two.
//!
//! An earlier stage waits for input gradients only, so they are computed first and sent at once. Weight gradients wait
//! until memory runs out (`p` activations) or there is nothing else to do. Forwards and input gradients go in 1F1B's order:
//! stage `s` has at most `p - s` microbatches between the two. The later a stage, the more weight gradients it puts off,
//! up to `s`, and those fill its end, where 1F1B would be idle.
//!
//! With `p` microbatches or more the bubble is `(p - 1) max(tF + tI - tW, tF, tI)`: with equal costs a third of 1F1B's.
//! Every stage holds up to `p` activations, as many as 1F1B's first stage. (With 1F1B's `p - s` on each stage the last one
//! could put nothing off, and the bubble would be two thirds.)

use super::fill::fill;
use super::timetable::Timetable;

/// The timetable of one step.
pub fn timetable(stages: usize, microbatches: usize) -> Timetable {
    fill((0..stages).collect(), microbatches, stages, |done, stage| {
        done.forward[stage] - done.input[stage] < stages - stage
    })
}
