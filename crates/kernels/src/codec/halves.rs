//! Halves on the wire: bf16 as it is, f16 in blocks of 1024 with a power of two as their scale.

use polyreme_dtype::{bf16, f16};

use super::{INFINITE, SCALE_BYTES, largest_bits};
use crate::Isa;
use crate::convert::{bf16_from_f32, f32_from_bf16, round_f16, widen_f16};
use crate::lanes::twin;

/// Numbers of a block of f16.
pub(super) const F16_BLOCK: usize = 1024;

/// The exponent of the largest magnitude of a block after scaling: below 65504 by a factor of two, as a sum of two blocks is.
const TOP_EXPONENT: i32 = 14;

twin! {
    /// Codes `x + residual` as bf16.
    pub(super) fn encode_bf16(x: &[f32], residual: &mut [f32], coded: &mut [u8]) = encode_bf16_body
}

twin! {
    /// Writes bf16 as f32.
    pub(super) fn decode_bf16(coded: &[u8], y: &mut [f32]) = decode_bf16_body
}

twin! {
    /// Adds bf16 to f32.
    pub(super) fn add_bf16(coded: &[u8], y: &mut [f32]) = add_bf16_body
}

#[inline(always)]
fn encode_bf16_body(x: &[f32], residual: &mut [f32], coded: &mut [u8]) {
    let (codes, _) = coded.as_chunks_mut::<2>();
    for ((x, r), code) in x.iter().zip(residual).zip(codes) {
        let sum = *x + *r;
        let half = bf16_from_f32(sum);
        *code = half.to_bits().to_le_bytes();
        let lost = sum - f32_from_bf16(half);
        // Infinities and NaN leave none.
        *r = if lost.to_bits() & 0x7fff_ffff < INFINITE { lost } else { 0.0 };
    }
}

#[inline(always)]
fn decode_bf16_body(coded: &[u8], y: &mut [f32]) {
    let (codes, _) = coded.as_chunks::<2>();
    y.iter_mut().zip(codes).for_each(|(y, c)| *y = f32_from_bf16(bf16::from_bits(u16::from_le_bytes(*c))));
}

#[inline(always)]
fn add_bf16_body(coded: &[u8], y: &mut [f32]) {
    let (codes, _) = coded.as_chunks::<2>();
    y.iter_mut().zip(codes).for_each(|(y, c)| *y += f32_from_bf16(bf16::from_bits(u16::from_le_bytes(*c))));
}

/// Codes `x + residual` as f16.
pub(super) fn encode_f16(isa: Isa, x: &[f32], residual: &mut [f32], coded: &mut [u8]) {
    let (mut scaled, mut halves) = ([0.0f32; F16_BLOCK], [f16::ZERO; F16_BLOCK]);
    let blocks = x.chunks(F16_BLOCK).zip(residual.chunks_mut(F16_BLOCK));
    for ((x, r), coded) in blocks.zip(coded.chunks_mut(SCALE_BYTES + 2 * F16_BLOCK)) {
        let (head, codes) = coded.split_at_mut(SCALE_BYTES);
        let (scaled, halves) = (&mut scaled[..x.len()], &mut halves[..x.len()]);
        let scale = scale_block(isa, x, r, scaled);
        head.copy_from_slice(&scale.to_le_bytes());
        round_f16(isa, scaled, halves);
        pack(isa, halves, codes);
        widen_f16(isa, halves, scaled);
        lose(isa, scaled, scale, r);
    }
}

/// Writes f16 as f32.
pub(super) fn decode_f16(isa: Isa, coded: &[u8], y: &mut [f32]) {
    each_f16(isa, coded, y, set_scaled);
}

/// Adds f16 to f32.
pub(super) fn add_f16(isa: Isa, coded: &[u8], y: &mut [f32]) {
    each_f16(isa, coded, y, add_scaled);
}

fn each_f16(isa: Isa, coded: &[u8], y: &mut [f32], put: impl Fn(Isa, &[f32], f32, &mut [f32])) {
    let (mut wide, mut halves) = ([0.0f32; F16_BLOCK], [f16::ZERO; F16_BLOCK]);
    for (y, coded) in y.chunks_mut(F16_BLOCK).zip(coded.chunks(SCALE_BYTES + 2 * F16_BLOCK)) {
        let (head, codes) = coded.split_first_chunk().expect("a block begins with its scale");
        let (wide, halves) = (&mut wide[..y.len()], &mut halves[..y.len()]);
        unpack(isa, codes, halves);
        widen_f16(isa, halves, wide);
        put(isa, wide, f32::from_le_bytes(*head), y);
    }
}

twin! {
    /// Adds `x` to its residual, writes the sum divided by a power of two, and returns that power.
    fn scale_block(x: &[f32], residual: &mut [f32], scaled: &mut [f32]) -> f32 = scale_block_body
}

#[inline(always)]
fn scale_block_body(x: &[f32], residual: &mut [f32], scaled: &mut [f32]) -> f32 {
    residual.iter_mut().zip(x).for_each(|(r, x)| *r += x);
    let bits = largest_bits(residual);
    let exponent = match bits {
        0 | INFINITE.. => 0,
        _ => ((bits >> 23) as i32 - 127 - TOP_EXPONENT).max(-126),
    };
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    let inverse = power(-exponent);
    scaled.iter_mut().zip(residual).for_each(|(s, r)| *s = *r * inverse);
    power(exponent)
}

twin! {
    /// `r -= wide · scale`, and zero where that is not finite.
    fn lose(wide: &[f32], scale: f32, residual: &mut [f32]) = lose_body
}

#[inline(always)]
fn lose_body(wide: &[f32], scale: f32, residual: &mut [f32]) {
    for (r, w) in residual.iter_mut().zip(wide) {
        let lost = *r - w * scale;
        *r = if lost.to_bits() & 0x7fff_ffff < INFINITE { lost } else { 0.0 };
    }
}

twin! { fn pack(halves: &[f16], codes: &mut [u8]) = pack_body }
twin! { fn unpack(codes: &[u8], halves: &mut [f16]) = unpack_body }
twin! { fn set_scaled(wide: &[f32], scale: f32, y: &mut [f32]) = set_scaled_body }
twin! { fn add_scaled(wide: &[f32], scale: f32, y: &mut [f32]) = add_scaled_body }

#[inline(always)]
fn pack_body(halves: &[f16], codes: &mut [u8]) {
    let (codes, _) = codes.as_chunks_mut::<2>();
    codes.iter_mut().zip(halves).for_each(|(c, h)| *c = h.to_bits().to_le_bytes());
}

#[inline(always)]
fn unpack_body(codes: &[u8], halves: &mut [f16]) {
    let (codes, _) = codes.as_chunks::<2>();
    halves.iter_mut().zip(codes).for_each(|(h, c)| *h = f16::from_bits(u16::from_le_bytes(*c)));
}

#[inline(always)]
fn set_scaled_body(wide: &[f32], scale: f32, y: &mut [f32]) {
    y.iter_mut().zip(wide).for_each(|(y, w)| *y = w * scale);
}

#[inline(always)]
fn add_scaled_body(wide: &[f32], scale: f32, y: &mut [f32]) {
    y.iter_mut().zip(wide).for_each(|(y, w)| *y += w * scale);
}
