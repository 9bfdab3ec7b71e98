//! Finds inputs that break a reader. For tests only: none of it is in the product.
//!
//! A [`Target`] has valid inputs, words of their format, and a way to repair checksums and lengths; a check reads an
//! input as the product does and returns the reader's answer. Inputs are mutations of valid ones: [`mutate`] knows
//! numbers, lines and tokens, [`json`] knows JSON. An input with a new kind of answer is mutated further, so the search
//! works its way past one error after another.
//!
//! What must hold of each input: no panic, no more memory than the target allows for its length, an answer within a
//! second, and whatever the check asserts (that what was read can be written and read again). An input that breaks one
//! of these is shrunk and written to a file, and its path is printed.
//!
//! | variable | is |
//! |---|---|
//! | `FUZZ_INPUTS` | how many inputs each target gets; a million takes minutes |
//! | `FUZZ_SEED` | the seed; each gives different inputs |
//! | `FUZZ_TRACE` | writes each input to a file before it is read, so that it survives a crash of the process |
//! | `FUZZ_FILE` | reads only this file, for instance one that an earlier run wrote |
//!
//! `FUZZ_INPUTS=1000000 cargo test --workspace --lib fuzz:: -- --nocapture` is the long run, with overflow checks; add
//! `-p polyreme-net` or the name of a test for a part of it. `docs/decisions/013-readers-are-fuzzed-by-a-crate-of-our-own.md` says
//! why this is not `bolero`.
//!
//! # Layout
//! - [`target`]: a reader under test, and findings. `hunt`: the loop, and how an input is judged. `shrink`: makes
//!   inputs shorter.
//! - [`mutate`], [`json`], [`safetensors`]: mutations. [`random`]: random numbers. [`input`]: what checks need.
//!   `memory`: an allocator that counts. `watch`: saves the input of a process that hangs or dies.

mod hunt;
pub mod input;
pub mod json;
mod memory;
pub mod mutate;
pub mod random;
pub mod safetensors;
mod shrink;
pub mod target;
mod watch;

#[cfg(test)]
mod tests;

pub use input::{InFile, scale};
pub use random::Random;
pub use target::{BadInput, FuzzSummary, ReadResult, Target};
