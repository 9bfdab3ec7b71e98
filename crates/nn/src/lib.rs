//! Layers and reference models, traced into graphs.
//!
//! A layer is a struct of plain numbers. Its `trace` declares parameters, under PyTorch's names, in PyTorch's layouts
//! and with PyTorch's initialisers, and records what the layer computes. A model is the same, made of layers; weights
//! go to and from a PyTorch `state_dict` without a change.
//!
//! Nothing is computed here and nothing is known of ranks, threads or kernels. Inside a graph images are
//! channels-last; models take them as PyTorch users have them, `[n, c, h, w]`, and convert them once.
//!
//! ```
//! use polyreme_nn::{Model, TraceOptions};
//!
//! let graph = Model::by_name("mlp")?.trace(&TraceOptions::training(128))?;
//! assert_eq!(graph.param_numel(), 669_706);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Layout
//! - [`layer`]: the layers.
//! - [`model`]: the reference models, each usable inside a custom trace; [`Model`] is any of them, or
//!   a custom list of layers.
//! - `references/`: what PyTorch gives for the same models, and how it was made.

#![forbid(unsafe_code)]

pub mod layer;
pub mod model;

pub use model::{Answer, FitError, Fitted, Model, ModelInput, Sample, TraceOptions, UnknownModel};
