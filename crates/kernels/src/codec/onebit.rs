//! Signs in blocks of 256, with the mean magnitude of the block as their scale.
//!
//! A number loses nearly everything on its way; only the residual makes it arrive. Sums of what is lost stay bounded because a
//! block's numbers are as large as their scale on the average.

use super::{INFINITE, SCALE_BYTES, largest_bits};
use crate::lanes::{sum_map, twin};

/// Numbers of a block.
pub(super) const SIGN_BLOCK: usize = 256;

/// Bytes of a whole block.
const CODED_BLOCK: usize = SCALE_BYTES + SIGN_BLOCK / 8;

/// Bytes that `n` numbers take.
pub(super) fn coded_len(n: usize) -> usize {
    SCALE_BYTES * n.div_ceil(SIGN_BLOCK) + n.div_ceil(8)
}

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
    let blocks = x.chunks(SIGN_BLOCK).zip(residual.chunks_mut(SIGN_BLOCK));
    for ((x, r), coded) in blocks.zip(coded.chunks_mut(CODED_BLOCK)) {
        r.iter_mut().zip(x).for_each(|(r, x)| *r += x);
        let (head, signs) = coded.split_at_mut(SCALE_BYTES);
        if largest_bits(r) >= INFINITE {
            head.copy_from_slice(&f32::NAN.to_le_bytes());
            signs.fill(0);
            r.fill(0.0);
            continue;
        }
        let scale = sum_map(r, f32::abs) / r.len() as f32;
        head.copy_from_slice(&scale.to_le_bytes());
        for (byte, r) in signs.iter_mut().zip(r.chunks_mut(8)) {
            let mut bits = 0;
            for (k, r) in r.iter_mut().enumerate() {
                let sign = r.to_bits() >> 31;
                bits |= sign << k;
                *r -= signed(scale, sign);
            }
            *byte = bits as u8;
        }
    }
}

#[inline(always)]
fn decode_body(coded: &[u8], y: &mut [f32]) {
    each(coded, y, |y, x| *y = x);
}

#[inline(always)]
fn decode_add_body(coded: &[u8], y: &mut [f32]) {
    each(coded, y, |y, x| *y += x);
}

#[inline(always)]
fn each(coded: &[u8], y: &mut [f32], put: impl Fn(&mut f32, f32)) {
    for (y, coded) in y.chunks_mut(SIGN_BLOCK).zip(coded.chunks(CODED_BLOCK)) {
        let (head, signs) = coded.split_first_chunk().expect("a block begins with its scale");
        let scale = f32::from_le_bytes(*head);
        for (y, byte) in y.chunks_mut(8).zip(signs) {
            for (k, y) in y.iter_mut().enumerate() {
                put(y, signed(scale, u32::from(*byte) >> k & 1));
            }
        }
    }
}

/// The scale with this sign bit.
#[inline(always)]
fn signed(scale: f32, sign: u32) -> f32 {
    f32::from_bits(scale.to_bits() | sign << 31)
}
