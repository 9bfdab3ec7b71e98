//! GPipe (Huang et al. 2019): all forwards, then all backwards.
//!
//! The simplest schedule, and the one that holds the most: every stage keeps the activations of all microbatches. The
//! bubble is `(p - 1) (tF + tB)`, that of 1F1B. Backwards go from the first microbatch on, so that weight gradients are
//! summed in the order of the other schedules.

use super::one_f_one_b;
use super::timetable::Timetable;

/// The timetable of one step.
pub fn timetable(stages: usize, microbatches: usize) -> Timetable {
    one_f_one_b::warmed_up(stages, microbatches, |_| microbatches)
}
