//! Number formats: f16, bf16 and i32 from and to f32. Half formats are the types of the `half` crate.
//!
//! Rounding is to nearest, ties to even. Infinities, subnormals and signs are kept; a NaN stays a NaN (made quiet,
//! with the payload bits that fit). The scalar and the lane forms give the same bits.

use polyreme_dtype::{bf16, f16};

use crate::{Cx, FloatsMut, Isa};

/// Elements of a task: about 8 µs of memory traffic.
const CHUNK: usize = 32_768;

/// The f16 nearest to `x`.
#[inline(always)]
pub fn f16_from_f32(x: f32) -> f16 {
    f16::from_bits(f16_bits(x))
}

#[inline(always)]
fn f16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let abs = bits & 0x7fff_ffff;
    if abs > 0x7f80_0000 {
        return sign | 0x7e00 | (abs >> 13) as u16 & 0x3ff;
    }
    // From 65520 up the nearest is infinity.
    if abs >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if abs < 0x3880_0000 {
        // Subnormal: adding 0.5 leaves the value in units of 2⁻²⁴ in the low bits, rounded by the addition itself.
        return sign | (f32::from_bits(abs) + 0.5).to_bits() as u16;
    }
    // The exponent's bias changes by 112; half of the cut-off bits, less one, plus the bit that makes ties even.
    let odd = abs >> 13 & 1;
    sign | ((abs - (112 << 23) + 0xfff + odd) >> 13) as u16
}

/// The f32 of an f16: exact.
#[inline(always)]
pub fn f32_from_f16(h: f16) -> f32 {
    let h = h.to_bits();
    let sign = u32::from(h & 0x8000) << 16;
    let abs = u32::from(h & 0x7fff);
    let bits = if abs > 0x7c00 {
        0x7fc0_0000 | abs << 13
    } else if abs == 0x7c00 {
        0x7f80_0000
    } else if abs < 0x400 {
        // Subnormal: a count of 2⁻²⁴.
        (abs as f32 * (1.0 / 16_777_216.0)).to_bits()
    } else {
        (abs << 13) + (112 << 23)
    };
    f32::from_bits(sign | bits)
}

/// The bf16 nearest to `x`.
#[inline(always)]
pub fn bf16_from_f32(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    bf16::from_bits(if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded })
}

/// The f32 of a bf16: exact.
#[inline(always)]
pub fn f32_from_bf16(b: bf16) -> f32 {
    f32::from_bits(u32::from(b.to_bits()) << 16)
}

/// f32 to f16.
pub fn f32_to_f16(cx: &Cx, x: &[f32], y: &mut [f16]) {
    in_chunks(cx, x, y, round_f16);
}

/// f16 to f32.
pub fn f16_to_f32(cx: &Cx, x: &[f16], y: &mut [f32]) {
    in_chunks(cx, x, y, widen_f16);
}

/// f32 to bf16.
pub fn f32_to_bf16(cx: &Cx, x: &[f32], y: &mut [bf16]) {
    in_chunks(cx, x, y, round_bf16);
}

/// bf16 to f32.
pub fn bf16_to_f32(cx: &Cx, x: &[bf16], y: &mut [f32]) {
    in_chunks(cx, x, y, widen_bf16);
}

/// f32 to floats in any format.
pub fn round(cx: &Cx, x: &[f32], y: FloatsMut) {
    match y {
        FloatsMut::F32(y) => in_chunks(cx, x, y, |_, x, y| y.copy_from_slice(x)),
        FloatsMut::F16(y) => f32_to_f16(cx, x, y),
        FloatsMut::Bf16(y) => f32_to_bf16(cx, x, y),
    }
}

/// f32 to f16, on the calling thread.
#[inline]
pub fn round_f16(isa: Isa, x: &[f32], y: &mut [f16]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    #[cfg(target_arch = "x86_64")]
    if isa.has_f16c() {
        // SAFETY: the instruction set was detected.
        return unsafe { avx2::f32_to_f16(x, y) };
    }
    let _ = isa;
    map(x, y, f16_from_f32);
}

/// f16 to f32, on the calling thread.
#[inline]
pub fn widen_f16(isa: Isa, x: &[f16], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    #[cfg(target_arch = "x86_64")]
    if isa.has_f16c() {
        // SAFETY: the instruction set was detected.
        return unsafe { avx2::f16_to_f32(x, y) };
    }
    let _ = isa;
    map(x, y, f32_from_f16);
}

/// f32 to bf16, on the calling thread.
#[inline]
pub fn round_bf16(isa: Isa, x: &[f32], y: &mut [bf16]) {
    convert(isa, x, y, bf16_from_f32);
}

/// bf16 to f32, on the calling thread.
#[inline]
pub fn widen_bf16(isa: Isa, x: &[bf16], y: &mut [f32]) {
    convert(isa, x, y, f32_from_bf16);
}

/// i32 to the nearest f32.
pub fn i32_to_f32(cx: &Cx, x: &[i32], y: &mut [f32]) {
    in_chunks(cx, x, y, |isa, x, y| convert(isa, x, y, |v| v as f32));
}

/// f32 to i32: towards zero; beyond the range the nearest end, NaN to 0.
pub fn f32_to_i32(cx: &Cx, x: &[f32], y: &mut [i32]) {
    in_chunks(cx, x, y, |isa, x, y| convert(isa, x, y, |v| v as i32));
}

/// Converts chunk by chunk, in parallel.
fn in_chunks<S: Sync, T: Send>(cx: &Cx, x: &[S], y: &mut [T], f: impl Fn(Isa, &[S], &mut [T]) + Sync) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    cx.for_each_chunk(y, CHUNK, |i, y| f(cx.isa, &x[i * CHUNK..][..y.len()], y));
}

/// A conversion that the compiler can vectorise by itself.
#[inline]
fn convert<S: Copy, T>(isa: Isa, x: &[S], y: &mut [T], f: impl Fn(S) -> T) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() {
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        fn lanes<S: Copy, T>(x: &[S], y: &mut [T], f: impl Fn(S) -> T) {
            map(x, y, f);
        }
        // SAFETY: the instruction set was detected.
        return unsafe { lanes(x, y, f) };
    } else if isa.has_avx2() {
        #[target_feature(enable = "avx2,fma")]
        fn lanes<S: Copy, T>(x: &[S], y: &mut [T], f: impl Fn(S) -> T) {
            map(x, y, f);
        }
        // SAFETY: the instruction set was detected.
        return unsafe { lanes(x, y, f) };
    }
    let _ = isa;
    map(x, y, f);
}

#[inline(always)]
fn map<S: Copy, T>(x: &[S], y: &mut [T], f: impl Fn(S) -> T) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = f(x);
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use polyreme_dtype::f16;

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn f32_to_f16(x: &[f32], y: &mut [f16]) {
        let (mut xs, mut ys) = (x.chunks_exact(8), y.chunks_exact_mut(8));
        for (x, y) in (&mut xs).zip(&mut ys) {
            // SAFETY: eight floats are read and eight halves are written.
            unsafe {
                let h = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr()));
                _mm_storeu_si128(y.as_mut_ptr().cast(), h);
            }
        }
        super::map(xs.remainder(), ys.into_remainder(), super::f16_from_f32);
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn f16_to_f32(x: &[f16], y: &mut [f32]) {
        let (mut xs, mut ys) = (x.chunks_exact(8), y.chunks_exact_mut(8));
        for (x, y) in (&mut xs).zip(&mut ys) {
            // SAFETY: eight halves are read and eight floats are written.
            unsafe {
                let v = _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast()));
                _mm256_storeu_ps(y.as_mut_ptr(), v);
            }
        }
        super::map(xs.remainder(), ys.into_remainder(), super::f32_from_f16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits, because a NaN is not equal to itself.
    fn f16_bits_of(y: &[f16]) -> Vec<u16> {
        y.iter().map(|h| h.to_bits()).collect()
    }
    fn bf16_bits_of(y: &[bf16]) -> Vec<u16> {
        y.iter().map(|b| b.to_bits()).collect()
    }

    /// The value of an f16, from its definition.
    fn f16_value(h: u16) -> f64 {
        let (exponent, mantissa) = (i32::from(h >> 10 & 31), f64::from(h & 0x3ff));
        let abs = match exponent {
            0 => mantissa * 2f64.powi(-24),
            31 if mantissa == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
        };
        if h >> 15 == 1 { -abs } else { abs }
    }

    #[test]
    fn every_half() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for cx in [Cx::oracle(), Cx::serial()] {
            let mut wide = vec![0.0; all.len()];
            let halves: Vec<f16> = all.iter().map(|&b| f16::from_bits(b)).collect();
            let mut back = vec![f16::ZERO; all.len()];
            f16_to_f32(&cx, &halves, &mut wide);
            f32_to_f16(&cx, &wide, &mut back);
            for i in 0..all.len() {
                let want = f16_value(all[i]);
                assert!(
                    f64::from(wide[i]).to_bits() == want.to_bits() || (wide[i].is_nan() && want.is_nan())
                );
                let quiet = if want.is_nan() { all[i] | 0x200 } else { all[i] };
                assert_eq!(back[i].to_bits(), quiet, "f16 {:#06x} there and back", all[i]);
            }
            let brains: Vec<bf16> = all.iter().map(|&b| bf16::from_bits(b)).collect();
            let mut back = vec![bf16::ZERO; all.len()];
            bf16_to_f32(&cx, &brains, &mut wide);
            f32_to_bf16(&cx, &wide, &mut back);
            for i in 0..all.len() {
                assert_eq!(wide[i].to_bits(), u32::from(all[i]) << 16);
                let quiet = if wide[i].is_nan() { all[i] | 0x40 } else { all[i] };
                assert_eq!(back[i].to_bits(), quiet, "bf16 {:#06x} there and back", all[i]);
            }
        }
    }

    /// Around every half: the middle to the next one, and a step to either side of it.
    #[test]
    fn rounding_is_to_nearest_even() {
        let (mut x, mut half, mut brain) = (Vec::new(), Vec::new(), Vec::new());
        for h in 0..0x7c00u16 {
            let next = if h == 0x7bff { 65536.0 } else { f16_value(h + 1) };
            let middle = ((f16_value(h) + next) / 2.0) as f32;
            let even = if h & 1 == 0 { h } else { h + 1 };
            x.extend([middle.next_down(), middle, middle.next_up()]);
            half.extend([h, even, h + 1]);
        }
        for cx in [Cx::oracle(), Cx::serial()] {
            let mut y = vec![f16::ZERO; x.len()];
            f32_to_f16(&cx, &x, &mut y);
            assert_eq!(f16_bits_of(&y), half);
            let minus: Vec<f32> = x.iter().map(|v| -v).collect();
            f32_to_f16(&cx, &minus, &mut y);
            assert!(y.iter().zip(&half).all(|(y, h)| y.to_bits() == h | 0x8000));
        }
        x.clear();
        for b in 0..0x7f80u16 {
            let middle = f32::from_bits(u32::from(b) << 16 | 0x8000);
            x.extend([middle.next_down(), middle, middle.next_up()]);
            brain.extend([b, if b & 1 == 0 { b } else { b + 1 }, b + 1]);
        }
        for cx in [Cx::oracle(), Cx::serial()] {
            let mut y = vec![bf16::ZERO; x.len()];
            f32_to_bf16(&cx, &x, &mut y);
            assert_eq!(bf16_bits_of(&y), brain);
        }
    }

    #[test]
    fn ends_and_lengths() {
        let ends = [f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, 1e-30, -1e-30, f32::MIN_POSITIVE];
        let nan = [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)];
        let x: Vec<f32> = ends.into_iter().chain(nan).cycle().take(70_003).collect();
        for n in [0, 1, 7, 8, 9, 70_003] {
            let (mut a, mut b) = (vec![f16::ZERO; n], vec![f16::ZERO; n]);
            f32_to_f16(&Cx::oracle(), &x[..n], &mut a);
            f32_to_f16(&Cx::serial(), &x[..n], &mut b);
            assert_eq!(f16_bits_of(&a), f16_bits_of(&b));
            assert!(a.iter().zip(&x).all(|(h, x)| f32_from_f16(*h).is_nan() == x.is_nan()));
            let (mut a, mut b) = (vec![bf16::ZERO; n], vec![bf16::ZERO; n]);
            f32_to_bf16(&Cx::oracle(), &x[..n], &mut a);
            f32_to_bf16(&Cx::serial(), &x[..n], &mut b);
            assert_eq!(bf16_bits_of(&a), bf16_bits_of(&b));
            assert!(a.iter().zip(&x).all(|(h, x)| f32_from_bf16(*h).is_nan() == x.is_nan()));
        }
    }

    #[test]
    fn integers() {
        let x = [0, 1, -1, i32::MAX, i32::MIN, 16_777_217, -7, 9, 100];
        let mut y = [0.0; 9];
        let mut back = [0; 9];
        for cx in [Cx::oracle(), Cx::serial()] {
            i32_to_f32(&cx, &x, &mut y);
            assert_eq!(y, [0.0, 1.0, -1.0, 2147483648.0, -2147483648.0, 16_777_216.0, -7.0, 9.0, 100.0]);
            let z = [1.9, -1.9, f32::NAN, 1e20, -1e20, f32::INFINITY, -0.0, 0.5, 3.0];
            f32_to_i32(&cx, &z, &mut back);
            assert_eq!(back, [1, -1, 0, i32::MAX, i32::MIN, i32::MAX, 0, 0, 3]);
        }
    }
}
