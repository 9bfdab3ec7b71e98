//! Sixteen lanes: AVX-512 with VL, BW and DQ. The names are those of the sibling.

use std::arch::x86_64::*;

pub(crate) use crate::math::avx512::*;

/// A vector.
pub(crate) type V = __m512;
/// A vector of integers.
pub(crate) type I = __m512i;
/// A mask: one bit per lane.
pub(crate) type M = __mmask16;
/// Lanes of a vector.
pub(crate) const WIDTH: usize = 16;

super::instructions! { "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma":
    splat(x: f32) -> V = _mm512_set1_ps;
    splat_i(x: i32) -> I = _mm512_set1_epi32;
    zero() -> V = _mm512_setzero_ps;
    add(a: V, b: V) -> V = _mm512_add_ps;
    sub(a: V, b: V) -> V = _mm512_sub_ps;
    mul(a: V, b: V) -> V = _mm512_mul_ps;
    div(a: V, b: V) -> V = _mm512_div_ps;
    sqrt(a: V) -> V = _mm512_sqrt_ps;
    floor(a: V) -> V = _mm512_roundscale_ps::<0x09>;
    // a·b + c and c − a·b, rounded once.
    fmadd(a: V, b: V, c: V) -> V = _mm512_fmadd_ps;
    fnmadd(a: V, b: V, c: V) -> V = _mm512_fnmadd_ps;
    // The second operand where either is NaN.
    min(a: V, b: V) -> V = _mm512_min_ps;
    max(a: V, b: V) -> V = _mm512_max_ps;
    and(a: V, b: V) -> V = _mm512_and_ps;
    // b without the bits of a.
    andnot(a: V, b: V) -> V = _mm512_andnot_ps;
    or(a: V, b: V) -> V = _mm512_or_ps;
    xor(a: V, b: V) -> V = _mm512_xor_ps;
    bits(a: V) -> I = _mm512_castps_si512;
    from_bits(a: I) -> V = _mm512_castsi512_ps;
    to_float(a: I) -> V = _mm512_cvtepi32_ps;
    add_i(a: I, b: I) -> I = _mm512_add_epi32;
    sub_i(a: I, b: I) -> I = _mm512_sub_epi32;
    and_i(a: I, b: I) -> I = _mm512_and_si512;
    shift_left_23(a: I) -> I = _mm512_slli_epi32::<23>;
    shift_left_30(a: I) -> I = _mm512_slli_epi32::<30>;
    shift_right_13(a: I) -> I = _mm512_srai_epi32::<13>;
    shift_right_16(a: I) -> I = _mm512_srai_epi32::<16>;
    shift_right_23(a: I) -> I = _mm512_srai_epi32::<23>;
    // Ordered comparisons: no where either is NaN.
    lt(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_LT_OQ>;
    gt(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_GT_OQ>;
    ge(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_GE_OQ>;
    eq(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>;
    // Their opposites: yes where either is NaN.
    ne(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>;
    not_lt(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>;
    not_le(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>;
    unordered(a: V, b: V) -> M = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>;
}

/// `yes` where the mask is set, `no` elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) fn select(mask: M, yes: V, no: V) -> V {
    _mm512_mask_blend_ps(mask, no, yes)
}

/// `x` where the mask is set, 0 elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) fn keep(mask: M, x: V) -> V {
    _mm512_maskz_mov_ps(mask, x)
}

/// Set where the lowest bit is.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) fn odd(x: I) -> M {
    _mm512_test_epi32_mask(x, splat_i(1))
}

/// One bit per lane.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) fn lanes_set(mask: M) -> u32 {
    u32::from(mask)
}

/// The largest lane; whether it returns a NaN among them is unspecified.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) fn largest(v: V) -> f32 {
    super::avx2::largest(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
}

/// A whole vector.
///
/// # Safety
/// `WIDTH` floats may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) unsafe fn load(x: *const f32) -> V {
    // SAFETY: the caller's promise.
    unsafe { _mm512_loadu_ps(x) }
}

/// Writes a whole vector.
///
/// # Safety
/// `WIDTH` floats may be written.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) unsafe fn store(y: *mut f32, v: V) {
    // SAFETY: the caller's promise.
    unsafe { _mm512_storeu_ps(y, v) }
}

/// The first `n` floats, fewer than `WIDTH`, and zeros.
///
/// # Safety
/// `n` floats may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) unsafe fn load_first(x: *const f32, n: usize) -> V {
    // SAFETY: the caller's promise; other lanes are not touched.
    unsafe { _mm512_maskz_loadu_ps(first(n), x) }
}

/// Writes the first `n` lanes, fewer than `WIDTH`.
///
/// # Safety
/// `n` floats may be written.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) unsafe fn store_first(y: *mut f32, n: usize, v: V) {
    // SAFETY: the caller's promise; other lanes are not touched.
    unsafe { _mm512_mask_storeu_ps(y, first(n), v) }
}

/// `v` with `-inf` after the first `n` lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(crate) fn hide_after(n: usize, v: V) -> V {
    select(first(n), v, splat(f32::NEG_INFINITY))
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn first(n: usize) -> M {
    ((1u32 << n) - 1) as M
}

/// A sum in 16 lanes, whatever the width: here of one vector.
#[derive(Clone, Copy)]
pub(crate) struct LaneSum(V);

impl LaneSum {
    /// Zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    pub(crate) fn new() -> LaneSum {
        LaneSum(zero())
    }

    /// Adds the next vector.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    pub(crate) fn push(&mut self, v: V) {
        self.0 = add(self.0, v);
    }

    /// Adds the products of the next two vectors, rounded once.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    pub(crate) fn push_product(&mut self, a: V, b: V) {
        self.0 = fmadd(a, b, self.0);
    }

    /// The sum of all lanes: halves onto each other, down to one.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
    pub(crate) fn total(self) -> f32 {
        let halves = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
        let mut lanes = [0.0; 8];
        // SAFETY: the array has eight floats.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), halves) };
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}
