//! The vectors of channels that the transforms are written for: 8 with AVX2, 16 with AVX-512. All that either does to a
//! channel is the same, so both give the same bits.

use std::arch::x86_64::*;

use super::super::super::micro;

/// Some channels. Its operations may only run in functions with the instruction set enabled, into which they are
/// inlined.
pub(super) trait Vector: Copy {
    /// How many channels.
    const LANES: usize;
    /// The same in every lane.
    fn splat(v: f32) -> Self;
    /// `self · k + add`.
    fn mul_add(self, k: f32, add: Self) -> Self;
    /// `self · k`.
    fn scale(self, k: f32) -> Self;
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self − other`.
    fn sub(self, other: Self) -> Self;
    /// # Safety
    /// `ptr` is readable for all lanes.
    unsafe fn load(ptr: *const f32) -> Self;
    /// The first `lanes` and zeros.
    ///
    /// # Safety
    /// `ptr` is readable for `lanes`.
    unsafe fn load_first(ptr: *const f32, lanes: usize) -> Self;
    /// # Safety
    /// `ptr` is writable for all lanes.
    unsafe fn store(self, ptr: *mut f32);
    /// The first `lanes`, all if there are more.
    ///
    /// # Safety
    /// `ptr` is writable for `lanes`.
    unsafe fn store_first(self, ptr: *mut f32, lanes: usize);
}

impl Vector for __m256 {
    const LANES: usize = 8;
    #[inline(always)]
    fn splat(v: f32) -> Self {
        // SAFETY: only used where AVX2 is enabled.
        unsafe { _mm256_set1_ps(v) }
    }
    #[inline(always)]
    fn mul_add(self, k: f32, add: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(self, _mm256_set1_ps(k), add) }
    }
    #[inline(always)]
    fn scale(self, k: f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_mul_ps(self, _mm256_set1_ps(k)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_add_ps(self, other) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_sub_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(ptr) }
    }
    #[inline(always)]
    unsafe fn load_first(ptr: *const f32, lanes: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm256_maskload_ps(ptr, micro::mask(lanes)) }
    }
    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(ptr, self) }
    }
    #[inline(always)]
    unsafe fn store_first(self, ptr: *mut f32, lanes: usize) {
        // SAFETY: the caller's promise.
        unsafe { micro::store(ptr, self, lanes) }
    }
}

/// The mask of the first `lanes` lanes.
#[inline(always)]
fn first(lanes: usize) -> __mmask16 {
    if lanes >= 16 { !0 } else { (1 << lanes) - 1 }
}

impl Vector for __m512 {
    const LANES: usize = 16;
    #[inline(always)]
    fn splat(v: f32) -> Self {
        // SAFETY: only used where AVX-512 is enabled.
        unsafe { _mm512_set1_ps(v) }
    }
    #[inline(always)]
    fn mul_add(self, k: f32, add: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(self, _mm512_set1_ps(k), add) }
    }
    #[inline(always)]
    fn scale(self, k: f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(self, _mm512_set1_ps(k)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(self, other) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_sub_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(ptr) }
    }
    #[inline(always)]
    unsafe fn load_first(ptr: *const f32, lanes: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(first(lanes), ptr) }
    }
    #[inline(always)]
    unsafe fn store(self, ptr: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(ptr, self) }
    }
    #[inline(always)]
    unsafe fn store_first(self, ptr: *mut f32, lanes: usize) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_mask_storeu_ps(ptr, first(lanes), self) }
    }
}
