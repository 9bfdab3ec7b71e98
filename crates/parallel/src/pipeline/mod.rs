//! Pipeline schedules as data: which stage runs which pass of which microbatch, in which order.
//!
//! A network is cut into chunks, numbered from its input to its output, and each stage (a rank along the stage axis) has
//! one or more of them. A [`Timetable`] is the order of passes on every stage; it says nothing about time. What times
//! follow from it, and how much memory, is what [`simulate()`] computes, with no threads and no clock. Nothing here knows
//! graphs or programs: lowering reads timetables, and the planner compares them.
//!
//! What every timetable guarantees, and the tests prove:
//! - every pass of every microbatch is run once, on the stage that has the chunk;
//! - for each chunk and pass, microbatches go in the order 0, 1, 2, ... So weight gradients are summed in the same order
//!   under every schedule (the same bits), and messages with one tag ([`Channel`]) are received in the order in which they
//!   are sent, also those of values that skip chunks;
//! - no stage waits for ever, provided that sends do not block.
//!
//! # Layout
//! - [`kind`]: the schedules' names, and [`timetable()`]. [`mod@timetable`]: what a timetable is, which messages it sends,
//!   and how many activations a stage holds.
//! - [`gpipe`], [`one_f_one_b`], [`interleaved`], [`zb_h1`], [`zb_v`]: a file for each schedule of one step; `fill` is the
//!   list scheduler that makes the last two. [`two_bw`]: the schedule that goes on across steps.
//! - [`mod@simulate`]: start times, idle times and the end of a step. [`mod@picture`]: a timetable as text.
//! - [`hand_over`]: when stages exchange their parts of the gradients of tied parameters, microbatch by microbatch.

pub mod gpipe;
pub mod hand_over;
pub mod interleaved;
pub mod kind;
pub mod one_f_one_b;
pub mod picture;
pub mod simulate;
pub mod timetable;
pub mod two_bw;
pub mod zb_h1;
pub mod zb_v;

mod fill;

pub use hand_over::{HandOver, hand_overs};
pub use kind::{PipelineKind, timetable};
pub use picture::picture;
pub use simulate::{Costs, SimulatedStep, Stuck, simulate};
pub use timetable::{Action, Channel, HeldMost, Message, StagePass, Timetable};
pub use two_bw::{AcrossSteps, StepAction, across_steps};

#[cfg(test)]
mod tests;
