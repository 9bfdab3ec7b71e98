//! Finds inputs that break whatever reads them. For tests only: nothing of it is in the product.
//!
//! A [`Target`] has good inputs, words of their format, and a way to make checksums and lengths right again; a check reads an
//! input as the product does and says what came of it. Inputs are made from good ones by [`mutate`], which knows numbers,
//! lines and tokens, and by [`json`]; one that is answered in a new way is changed further, so that errors lead on from one to the next.
//!
//! What must hold of each input: no panic, no more memory than the target allows for its length, an answer within a second,
//! and whatever the check asserts (that what was read can be written and read again). What breaks it is made as short as it can
//! be, written to a file and named.
//!
//! | variable | is |
//! |---|---|
//! | `FUZZ_INPUTS` | how many inputs each target gets; a million takes minutes |
//! | `FUZZ_SEED` | another number gives other inputs |
//! | `FUZZ_TRACE` | each input is in a file before it is read, so that a process that dies leaves it |
//! | `FUZZ_FILE` | reads this file alone, such as one that a run left |
//!
//! `FUZZ_INPUTS=1000000 cargo test --workspace --lib fuzz:: -- --nocapture` is the long run, with overflow checks; add
//! `-p polyreme-net` or the name of a test for a part of it. `docs/decisions/013-readers-are-fuzzed-by-a-crate-of-our-own.md` says
//! why this is not `bolero`.
//!
//! # Layout
//! - [`target`]: what is given, what is found. `hunt`: the loop, and how an input is judged. `shrink`: shorter ones.
//! - [`mutate`], [`json`], [`safetensors`]: changes. [`random`]: numbers. [`input`]: what checks need. `memory`: an allocator that counts. `watch`: what is left of a process
//!   that hangs or dies.

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
