//! Tests of membership: decisions one by one, thousands of simulated schedules, and real sockets.

mod decisions;
mod messages;
mod schedules;
mod stored;
