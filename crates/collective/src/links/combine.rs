//! Reducing what arrived into local data, element by element, on bytes of any alignment.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::element::{Bool, DType, Reduce};

/// `into` becomes `into ∘ arrived`, or `arrived ∘ into` if `theirs_first`.
pub(super) fn combine(dtype: DType, reduce: Reduce, into: &mut [u8], arrived: &[u8], theirs_first: bool) {
    macro_rules! numbers {
        ($t:ty, $sum:expr) => {{
            let sum = $sum;
            match reduce {
                Reduce::Sum => each(into, arrived, theirs_first, |a, b| {
                    sum(<$t>::from_ne_bytes(a), <$t>::from_ne_bytes(b)).to_ne_bytes()
                }),
                Reduce::Max => each(into, arrived, theirs_first, |a, b| {
                    if <$t>::from_ne_bytes(b) > <$t>::from_ne_bytes(a) { b } else { a }
                }),
                Reduce::Min => each(into, arrived, theirs_first, |a, b| {
                    if <$t>::from_ne_bytes(b) < <$t>::from_ne_bytes(a) { b } else { a }
                }),
            }
        }};
    }
    match dtype {
        DType::F32 => numbers!(f32, |a: f32, b: f32| a + b),
        DType::F64 => numbers!(f64, |a: f64, b: f64| a + b),
        DType::F16 if reduce == Reduce::Sum => f16_sums(into, arrived, theirs_first),
        DType::F16 => numbers!(f16, |a: f16, b: f16| a + b),
        DType::Bf16 if reduce == Reduce::Sum => each(into, arrived, theirs_first, |a, b| {
            bf16_rounded(bf16_wide(u16::from_ne_bytes(a)) + bf16_wide(u16::from_ne_bytes(b))).to_ne_bytes()
        }),
        DType::Bf16 => numbers!(half::bf16, |a: half::bf16, b: half::bf16| a + b),
        DType::I32 => numbers!(i32, i32::wrapping_add),
        DType::I64 => numbers!(i64, i64::wrapping_add),
        DType::U8 => numbers!(u8, u8::wrapping_add),
        DType::I8 => numbers!(i8, i8::wrapping_add),
        DType::Bool => numbers!(Bool, |a: Bool, b: Bool| a | b),
    }
}

#[inline(always)]
fn each<const N: usize>(
    into: &mut [u8],
    arrived: &[u8],
    theirs_first: bool,
    f: impl Fn([u8; N], [u8; N]) -> [u8; N],
) {
    let pairs = into.as_chunks_mut::<N>().0.iter_mut().zip(arrived.as_chunks::<N>().0);
    if theirs_first {
        pairs.for_each(|(mine, theirs)| *mine = f(*theirs, *mine));
    } else {
        pairs.for_each(|(mine, theirs)| *mine = f(*mine, *theirs));
    }
}

/// Sums of f16 in blocks: the conversion of a whole slice uses the CPU's instructions, that of one number does not.
fn f16_sums(into: &mut [u8], arrived: &[u8], theirs_first: bool) {
    const BLOCK: usize = 256;
    let (mut halves, mut mine, mut theirs) = ([f16::ZERO; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    for (into, arrived) in into.chunks_mut(2 * BLOCK).zip(arrived.chunks(2 * BLOCK)) {
        let n = into.len() / 2;
        let mut widen = |bytes: &[u8], wide: &mut [f32]| {
            halves.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(h, b)| *h = f16::from_ne_bytes(*b));
            halves[..n].convert_to_f32_slice(wide);
        };
        widen(into, &mut mine[..n]);
        widen(arrived, &mut theirs[..n]);
        let (first, second) = if theirs_first { (&mut theirs, &mine) } else { (&mut mine, &theirs) };
        first[..n].iter_mut().zip(&second[..n]).for_each(|(a, b)| *a += *b);
        halves[..n].convert_from_f32_slice(&first[..n]);
        into.as_chunks_mut::<2>().0.iter_mut().zip(&halves).for_each(|(b, h)| *b = h.to_ne_bytes());
    }
}

fn bf16_wide(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// To the nearest, ties to even. Without branches, so that the loop around it becomes SIMD.
fn bf16_rounded(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
    (if x.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Sums of half precision are those of the `half` crate, one by one.
    #[test]
    fn halves_are_rounded_once() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let other: Vec<u16> = bits.iter().map(|b| b.wrapping_mul(40503).wrapping_add(77)).collect();
        let bytes = |v: &[u16]| v.iter().flat_map(|b| b.to_ne_bytes()).collect::<Vec<u8>>();
        let sums = |dtype, theirs_first| {
            let mut into = bytes(&bits);
            combine(dtype, Reduce::Sum, &mut into, &bytes(&other), theirs_first);
            into.as_chunks::<2>().0.iter().map(|b| u16::from_ne_bytes(*b)).collect::<Vec<u16>>()
        };
        for theirs_first in [false, true] {
            for (k, got) in sums(DType::F16, theirs_first).into_iter().enumerate() {
                let want = f16::from_bits(bits[k]) + f16::from_bits(other[k]);
                let got = f16::from_bits(got);
                assert!(got == want || got.is_nan() && want.is_nan(), "f16 {k}: {got} for {want}");
            }
            for (k, got) in sums(DType::Bf16, theirs_first).into_iter().enumerate() {
                let want = bf16::from_bits(bits[k]) + bf16::from_bits(other[k]);
                let got = bf16::from_bits(got);
                assert!(got == want || got.is_nan() && want.is_nan(), "bf16 {k}: {got} for {want}");
            }
        }
    }

    #[test]
    fn the_order_of_the_two_is_kept() {
        for (theirs_first, want) in [(false, 0.0f32), (true, -0.0)] {
            let mut into = 0.0f32.to_ne_bytes();
            combine(DType::F32, Reduce::Max, &mut into, &(-0.0f32).to_ne_bytes(), theirs_first);
            assert_eq!(f32::from_ne_bytes(into).to_bits(), want.to_bits());
        }
    }
}
