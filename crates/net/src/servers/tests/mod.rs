//! Decisions by hand, and thousands of schedules from seeds.

mod decisions;
mod schedules;
