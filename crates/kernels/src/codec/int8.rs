//! Integers of a byte in blocks of 256, with a scale for each: the largest magnitude becomes 127.
//!
//! The scalar and the SIMD forms are one body (`twin!`). Rounding is the addition of `1.5 · 2²³`, after which the lowest byte of
//! the sum is the nearest integer in two's complement, ties to even.

use super::{INFINITE, SCALE_BYTES, largest_bits};
use crate::lanes::twin;

/// Numbers of a block.
pub(super) const INT8_BLOCK: usize = 256;

/// A sum with this has the nearest integer in its lowest bits.
const ROUNDS: f32 = 12_582_912.0;

/// Blocks whose largest magnitude is below this are sent as zeros; their residuals keep them.
const LEAST: f32 = 1e-30;

twin! {
    /// Codes `x + residual`.
    pub(super) fn encode(x: &[f32], residual: &mut [f32], coded: &mut [u8]) = encode_body
}

twin! {
    /// Writes the numbers of a code.
    pub(super) fn decode(coded: &[u8], y: &mut [f32]) = decode_body
}

twin! {
    /// Adds the numbers of a code.
    pub(super) fn add(coded: &[u8], y: &mut [f32]) = decode_add_body
}

#[inline(always)]
fn encode_body(x: &[f32], residual: &mut [f32], coded: &mut [u8]) {
    let blocks = x.chunks(INT8_BLOCK).zip(residual.chunks_mut(INT8_BLOCK));
    for ((x, r), coded) in blocks.zip(coded.chunks_mut(SCALE_BYTES + INT8_BLOCK)) {
        // What is to be coded waits where its residual will be.
        r.iter_mut().zip(x).for_each(|(r, x)| *r += x);
        let (head, codes) = coded.split_at_mut(SCALE_BYTES);
        let bits = largest_bits(r);
        let largest = f32::from_bits(bits);
        let (scale, inverse) = match bits {
            INFINITE.. => (f32::NAN, 0.0),
            _ if largest < LEAST => (0.0, 0.0),
            _ => (largest / 127.0, 127.0 / largest),
        };
        head.copy_from_slice(&scale.to_le_bytes());
        if bits >= INFINITE {
            codes.fill(0);
            r.fill(0.0);
            continue;
        }
        for (code, r) in codes.iter_mut().zip(r) {
            let rounded = *r * inverse + ROUNDS;
            *code = rounded.to_bits() as u8;
            *r -= (rounded - ROUNDS) * scale;
        }
    }
}

#[inline(always)]
fn decode_body(coded: &[u8], y: &mut [f32]) {
    for (y, coded) in y.chunks_mut(INT8_BLOCK).zip(coded.chunks(SCALE_BYTES + INT8_BLOCK)) {
        let (scale, codes) = scale_of(coded);
        y.iter_mut().zip(codes).for_each(|(y, code)| *y = f32::from(*code as i8) * scale);
    }
}

#[inline(always)]
fn decode_add_body(coded: &[u8], y: &mut [f32]) {
    for (y, coded) in y.chunks_mut(INT8_BLOCK).zip(coded.chunks(SCALE_BYTES + INT8_BLOCK)) {
        let (scale, codes) = scale_of(coded);
        y.iter_mut().zip(codes).for_each(|(y, code)| *y += f32::from(*code as i8) * scale);
    }
}

#[inline(always)]
fn scale_of(coded: &[u8]) -> (f32, &[u8]) {
    let (head, codes) = coded.split_first_chunk().expect("a block begins with its scale");
    (f32::from_le_bytes(*head), codes)
}
