//! Layers: from plain numbers to parameters and ops.
//!
//! Each has `trace(&self, b, name, x, ..)`, which runs in the scope `name`, so that its parameters and errors carry it.
//! Options that a layer does not document are as in PyTorch's layer of the same name.

mod attention;
mod categories;
mod check;
mod conv;
mod dropout;
mod embedding;
mod encoder;
mod image;
mod linear;
mod norm;
mod numbers;
mod padding;
mod pool;
mod recurrent;

#[cfg(test)]
mod tests;

pub use attention::MultiheadAttention;
pub use categories::{Categories, NO_WORD, TextIds};
pub use conv::{Conv2d, ConvInit, ConvTranspose2d};
pub use dropout::Dropout;
pub use embedding::{Embedding, Positions};
pub use encoder::TransformerEncoderLayer;
pub use image::{channels_last, flatten, global_mean};
pub use linear::Linear;
pub use norm::{BatchNorm2d, GroupNorm, LayerNorm, RmsNorm};
pub use numbers::NumberVectors;
pub use padding::{Padding, by_token, last_step, mean_time};
pub use pool::{AdaptiveAvgPool2d, AvgPool2d, MaxPool2d};
pub use recurrent::Recurrent;

pub(crate) use attention::attend;
pub(crate) use check::{divides, positive};

use polyreme_graph::Init;

/// PyTorch's `kaiming_uniform` with `a = √5`, which comes to `±1/√fan_in`.
fn uniform(fan_in: usize) -> Init {
    Init::Uniform { bound: 1.0 / (fan_in as f32).sqrt() }
}
