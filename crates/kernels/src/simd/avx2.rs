//! Eight lanes: AVX2 with FMA. The names are those of the sibling.

use std::arch::x86_64::*;

pub(crate) use crate::math::avx2::*;

/// A vector.
pub(crate) type V = __m256;
/// A vector of integers.
pub(crate) type I = __m256i;
/// A mask: all bits of a lane, or none.
pub(crate) type M = __m256;
/// Lanes of a vector.
pub(crate) const WIDTH: usize = 8;

super::instructions! { "avx2,fma":
    splat(x: f32) -> V = _mm256_set1_ps;
    splat_i(x: i32) -> I = _mm256_set1_epi32;
    zero() -> V = _mm256_setzero_ps;
    add(a: V, b: V) -> V = _mm256_add_ps;
    sub(a: V, b: V) -> V = _mm256_sub_ps;
    mul(a: V, b: V) -> V = _mm256_mul_ps;
    div(a: V, b: V) -> V = _mm256_div_ps;
    sqrt(a: V) -> V = _mm256_sqrt_ps;
    floor(a: V) -> V = _mm256_floor_ps;
    // a·b + c and c − a·b, rounded once.
    fmadd(a: V, b: V, c: V) -> V = _mm256_fmadd_ps;
    fnmadd(a: V, b: V, c: V) -> V = _mm256_fnmadd_ps;
    // The second operand where either is NaN.
    min(a: V, b: V) -> V = _mm256_min_ps;
    max(a: V, b: V) -> V = _mm256_max_ps;
    and(a: V, b: V) -> V = _mm256_and_ps;
    // b without the bits of a.
    andnot(a: V, b: V) -> V = _mm256_andnot_ps;
    or(a: V, b: V) -> V = _mm256_or_ps;
    xor(a: V, b: V) -> V = _mm256_xor_ps;
    bits(a: V) -> I = _mm256_castps_si256;
    from_bits(a: I) -> V = _mm256_castsi256_ps;
    to_float(a: I) -> V = _mm256_cvtepi32_ps;
    add_i(a: I, b: I) -> I = _mm256_add_epi32;
    sub_i(a: I, b: I) -> I = _mm256_sub_epi32;
    and_i(a: I, b: I) -> I = _mm256_and_si256;
    shift_left_23(a: I) -> I = _mm256_slli_epi32::<23>;
    shift_left_30(a: I) -> I = _mm256_slli_epi32::<30>;
    shift_right_13(a: I) -> I = _mm256_srai_epi32::<13>;
    shift_right_16(a: I) -> I = _mm256_srai_epi32::<16>;
    shift_right_23(a: I) -> I = _mm256_srai_epi32::<23>;
    // Ordered comparisons: no where either is NaN.
    lt(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_LT_OQ>;
    gt(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_GT_OQ>;
    ge(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_GE_OQ>;
    eq(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_EQ_OQ>;
    // Their opposites: yes where either is NaN.
    ne(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_NEQ_UQ>;
    not_lt(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_NLT_UQ>;
    not_le(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_NLE_UQ>;
    unordered(a: V, b: V) -> M = _mm256_cmp_ps::<_CMP_UNORD_Q>;
}

/// `yes` where the mask is set, `no` elsewhere.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn select(mask: M, yes: V, no: V) -> V {
    _mm256_blendv_ps(no, yes, mask)
}

/// `x` where the mask is set, 0 elsewhere.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn keep(mask: M, x: V) -> V {
    _mm256_and_ps(mask, x)
}

/// Set where the lowest bit is.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn odd(x: I) -> M {
    _mm256_castsi256_ps(_mm256_srai_epi32::<31>(_mm256_slli_epi32::<31>(x)))
}

/// One bit per lane.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn lanes_set(mask: M) -> u32 {
    _mm256_movemask_ps(mask) as u32
}

/// The largest lane; whether it returns a NaN among them is unspecified.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn largest(v: V) -> f32 {
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
}

/// A whole vector.
///
/// # Safety
/// `WIDTH` floats may be read.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn load(x: *const f32) -> V {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_ps(x) }
}

/// Writes a whole vector.
///
/// # Safety
/// `WIDTH` floats may be written.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn store(y: *mut f32, v: V) {
    // SAFETY: the caller's promise.
    unsafe { _mm256_storeu_ps(y, v) }
}

/// The first `n` floats, fewer than `WIDTH`, and zeros.
///
/// # Safety
/// `n` floats may be read.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn load_first(x: *const f32, n: usize) -> V {
    // SAFETY: the caller's promise; other lanes are not touched.
    unsafe { _mm256_maskload_ps(x, first(n)) }
}

/// Writes the first `n` lanes, fewer than `WIDTH`.
///
/// # Safety
/// `n` floats may be written.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn store_first(y: *mut f32, n: usize, v: V) {
    // SAFETY: the caller's promise; other lanes are not touched.
    unsafe { _mm256_maskstore_ps(y, first(n), v) }
}

/// `v` with `-inf` after the first `n` lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn hide_after(n: usize, v: V) -> V {
    select(_mm256_castsi256_ps(first(n)), v, splat(f32::NEG_INFINITY))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn first(n: usize) -> I {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// A sum in 16 lanes, whatever the width: here of two vectors, which change places so that each takes every other.
#[derive(Clone, Copy)]
pub(crate) struct LaneSum(V, V);

impl LaneSum {
    /// Zeros.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn new() -> LaneSum {
        LaneSum(zero(), zero())
    }

    /// Adds the next vector.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn push(&mut self, v: V) {
        *self = LaneSum(self.1, add(self.0, v));
    }

    /// Adds the products of the next two vectors, rounded once.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn push_product(&mut self, a: V, b: V) {
        *self = LaneSum(self.1, fmadd(a, b, self.0));
    }

    /// The sum of all lanes: halves onto each other, down to one.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn total(self) -> f32 {
        let mut lanes = [0.0; WIDTH];
        // SAFETY: the array has `WIDTH` floats.
        unsafe { store(lanes.as_mut_ptr(), add(self.0, self.1)) };
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}
