//! The arithmetic of JPEG, bit for bit as libjpeg's default (`islow`, with "fancy" upsampling) does it: coefficients to
//! samples, colours stored at half size to whole size, and luma with two colours to RGB.
//!
//! It is not a decoder: where coefficients come from, and which rows belong together, is up to the caller.

mod colour;
mod idct;
mod upsample;

pub use colour::rgb;
pub use idct::{PLACES, flat, idct};
pub use upsample::{double, double_between, half_way};
