//! The two sizes of elements: how runs and tiles of each are copied.

use super::transpose::TransposeTile;
use crate::Isa;

/// An unsigned integer of an element's size.
pub trait Bits: Copy + Send + Sync + 'static {
    /// Copies a run of `n`.
    ///
    /// # Safety
    /// There are `n` at both places, and they do not overlap.
    unsafe fn copy_run(isa: Isa, s: *const Self, t: *mut Self, n: usize);

    /// Copies a tile whose sides are contiguous in different dims.
    ///
    /// # Safety
    /// Every element of the tile lies inside the buffers that `s` and `t` point into, which do not overlap.
    unsafe fn transpose(tile: &TransposeTile, isa: Isa, s: *const Self, t: *mut Self);
}

impl Bits for u32 {
    #[inline]
    unsafe fn copy_run(isa: Isa, s: *const u32, t: *mut u32, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy_run::<u32, 8>(isa, s, t, n) };
    }
    #[inline]
    unsafe fn transpose(tile: &TransposeTile, isa: Isa, s: *const u32, t: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { tile.run(isa, s, t) };
    }
}

impl Bits for u16 {
    #[inline]
    unsafe fn copy_run(isa: Isa, s: *const u16, t: *mut u16, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy_run::<u16, 16>(isa, s, t, n) };
    }
    #[inline]
    unsafe fn transpose(tile: &TransposeTile, isa: Isa, s: *const u16, t: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe { tile.run_halves(isa, s, t) };
    }
}

/// Copies a run of `n`, of which a vector has `WIDTH`.
///
/// # Safety
/// There are `n` at both places, and they do not overlap.
#[inline]
unsafe fn copy_run<B: Copy, const WIDTH: usize>(isa: Isa, s: *const B, t: *mut B, n: usize) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        /// Not memcpy: the C library's uses `rep movsb` for long runs, which is several times slower on some CPUs
        /// and alignments; and for short runs the call costs as much as the copy.
        ///
        /// # Safety
        /// The CPU has AVX2. `s` is readable and `t` writable for `n` elements, and they do not overlap.
        #[target_feature(enable = "avx2")]
        unsafe fn lanes<B: Copy, const WIDTH: usize>(s: *const B, t: *mut B, n: usize) {
            use std::arch::x86_64::*;
            const { assert!(WIDTH * size_of::<B>() == size_of::<__m256i>()) };
            let mut i = 0;
            // SAFETY: `i` and what is read from there stay below `n`.
            unsafe {
                while i + 4 * WIDTH <= n {
                    let at = |k: usize| _mm256_loadu_si256(s.add(i + k * WIDTH).cast());
                    let (a, b, c, d) = (at(0), at(1), at(2), at(3));
                    _mm256_storeu_si256(t.add(i).cast(), a);
                    _mm256_storeu_si256(t.add(i + WIDTH).cast(), b);
                    _mm256_storeu_si256(t.add(i + 2 * WIDTH).cast(), c);
                    _mm256_storeu_si256(t.add(i + 3 * WIDTH).cast(), d);
                    i += 4 * WIDTH;
                }
                while i + WIDTH <= n {
                    _mm256_storeu_si256(t.add(i).cast(), _mm256_loadu_si256(s.add(i).cast()));
                    i += WIDTH;
                }
                while i < n {
                    *t.add(i) = *s.add(i);
                    i += 1;
                }
            }
        }
        // SAFETY: the instruction set was detected; the rest is the caller's promise.
        return unsafe { lanes::<B, WIDTH>(s, t, n) };
    }
    let _ = isa;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(s, t, n) };
}
