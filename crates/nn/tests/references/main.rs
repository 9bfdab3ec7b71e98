//! The engine against PyTorch. `references/README.md` says how the files were made.
//!
//! # Layout
//! - `fill`: the generator of weights and batches.
//! - `half`: whole models in bf16 and f16 over 50 steps.
//! - `models`: whole models over 20 steps.
//! - `norms`: batch norm on several ranks.
//! - `ops`: operations one by one.

// All of this is tests; clippy recognises only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

mod fill;
mod half;
mod models;
mod norms;
mod ops;

use std::path::PathBuf;

use serde::de::DeserializeOwned;

/// A file of `references/`.
fn read<T: DeserializeOwned>(name: &str) -> T {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("references/{name}.json"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}
