//! The crate's integration tests.

#![allow(clippy::unwrap_used)]

mod team;
