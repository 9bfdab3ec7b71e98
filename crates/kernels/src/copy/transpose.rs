//! The transpose of a strip: eight by eight in registers where the instruction set allows it.

#[cfg(target_arch = "x86_64")]
use super::narrow;
use crate::Isa;

/// Width of a strip, and of the blocks it is walked in: 64 rows on either side keep to the pages that the first
/// level of the TLB holds.
pub(super) const STRIP: usize = 64;
/// Blocks are made of squares of whole cache lines on both sides, so that no line is needed twice.
#[cfg(target_arch = "x86_64")]
const SQUARE: usize = 16;

/// `across` is contiguous in the source, `along` is contiguous in the target.
pub struct TransposeTile {
    /// How many elements are contiguous in the source.
    pub across: usize,
    /// How many are contiguous in the target.
    pub along: usize,
    /// How far the source moves for one step along.
    pub source_stride: usize,
    /// How far the target moves for one step across.
    pub target_stride: usize,
}

impl TransposeTile {
    /// Copies the tile.
    ///
    /// # Safety
    /// Every element of the tile lies inside the buffers that `s` and `t` point into, which do not overlap.
    pub(crate) unsafe fn run(&self, isa: Isa, s: *const u32, t: *mut u32) {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx512() && unsafe { self.narrow(s, t) } {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx2() {
            let (across, along) = (self.across / 8 * 8, self.along / 8 * 8);
            // SAFETY: the instruction set was detected; the rest is the caller's promise.
            unsafe {
                self.avx2(across, along, s, t);
                self.scalar(0..across, along, s, t);
                self.scalar(across..self.across, 0, s, t);
            }
            return;
        }
        let _ = isa;
        // SAFETY: the caller's promise.
        unsafe { self.scalar(0..self.across, 0, s, t) };
    }

    /// The same for elements of two bytes.
    ///
    /// # Safety
    /// As `run`.
    pub(crate) unsafe fn run_halves(&self, isa: Isa, s: *const u16, t: *mut u16) {
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx2() {
            let (across, along) = (self.across / 8 * 8, self.along / 8 * 8);
            // SAFETY: the instruction set was detected; the rest is the caller's promise.
            unsafe {
                self.squares(across, along, |from, to| {
                    eight_by_eight_halves(s.add(from), self.source_stride, t.add(to), self.target_stride);
                });
                self.scalar(0..across, along, s, t);
                self.scalar(across..self.across, 0, s, t);
            }
            return;
        }
        let _ = isa;
        // SAFETY: the caller's promise.
        unsafe { self.scalar(0..self.across, 0, s, t) };
    }

    /// Copies the tile if one side is a run of few elements after few; says whether it was.
    ///
    /// # Safety
    /// As `run`; the CPU has AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn narrow(&self, s: *const u32, t: *mut u32) -> bool {
        let (s, t) = (s.cast::<f32>(), t.cast::<f32>());
        macro_rules! pick {
            ($channels:expr, $c:ident => $call:expr) => {
                match $channels {
                    2 => {
                        const $c: usize = 2;
                        $call
                    }
                    3 => {
                        const $c: usize = 3;
                        $call
                    }
                    4 => {
                        const $c: usize = 4;
                        $call
                    }
                    5 => {
                        const $c: usize = 5;
                        $call
                    }
                    6 => {
                        const $c: usize = 6;
                        $call
                    }
                    7 => {
                        const $c: usize = 7;
                        $call
                    }
                    _ => return false,
                }
            };
        }
        // SAFETY: the caller's promise: every element that is read or written is of the tile.
        unsafe {
            if self.target_stride == self.along && self.along <= narrow::CHANNELS_MAX {
                pick!(self.along, C => narrow::interleave::<C>(s, self.source_stride, self.across, t));
            } else if self.source_stride == self.across && self.across <= narrow::CHANNELS_MAX {
                pick!(self.across, C => narrow::part::<C>(s, self.along, t, self.target_stride));
            } else {
                return false;
            }
        }
        true
    }

    /// Copies the elements at `across` and from `first_along` on.
    ///
    /// # Safety
    /// As `run`.
    unsafe fn scalar<B: Copy>(
        &self,
        across: std::ops::Range<usize>,
        first_along: usize,
        s: *const B,
        t: *mut B,
    ) {
        for j in first_along..self.along {
            for i in across.clone() {
                // SAFETY: the caller's promise.
                unsafe { *t.add(i * self.target_stride + j) = *s.add(j * self.source_stride + i) };
            }
        }
    }

    /// # Safety
    /// As `run`; `across` and `along` are multiples of eight inside the tile.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(&self, across: usize, along: usize, s: *const u32, t: *mut u32) {
        self.squares(across, along, |from, to| {
            // SAFETY: eight rows of eight elements, inside the tile on both sides.
            unsafe {
                eight_by_eight(s.add(from).cast(), self.source_stride, t.add(to).cast(), self.target_stride)
            };
        });
    }

    /// Calls `f` with where each eight by eight elements start in the source and in the target.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn squares(&self, across: usize, along: usize, f: impl Fn(usize, usize)) {
        for block in (0..along).step_by(STRIP) {
            for i in (0..across).step_by(SQUARE) {
                for j in (block..along.min(block + STRIP)).step_by(SQUARE) {
                    for j in (j..along.min(j + SQUARE)).step_by(8) {
                        for i in (i..across.min(i + SQUARE)).step_by(8) {
                            f(j * self.source_stride + i, i * self.target_stride + j);
                        }
                    }
                }
            }
        }
    }
}

/// # Safety
/// There are eight rows of eight elements on both sides, and they do not overlap; the CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn eight_by_eight_halves(s: *const u16, s_stride: usize, t: *mut u16, t_stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise.
    let r: [__m128i; 8] = std::array::from_fn(|k| unsafe { _mm_loadu_si128(s.add(k * s_stride).cast()) });
    // Columns in pairs of rows, then in fours, then in eights.
    let (a, b) = (_mm_unpacklo_epi16(r[0], r[1]), _mm_unpackhi_epi16(r[0], r[1]));
    let (c, d) = (_mm_unpacklo_epi16(r[2], r[3]), _mm_unpackhi_epi16(r[2], r[3]));
    let (e, f) = (_mm_unpacklo_epi16(r[4], r[5]), _mm_unpackhi_epi16(r[4], r[5]));
    let (g, h) = (_mm_unpacklo_epi16(r[6], r[7]), _mm_unpackhi_epi16(r[6], r[7]));
    let low = [
        _mm_unpacklo_epi32(a, c),
        _mm_unpackhi_epi32(a, c),
        _mm_unpacklo_epi32(b, d),
        _mm_unpackhi_epi32(b, d),
    ];
    let high = [
        _mm_unpacklo_epi32(e, g),
        _mm_unpackhi_epi32(e, g),
        _mm_unpacklo_epi32(f, h),
        _mm_unpackhi_epi32(f, h),
    ];
    for (k, (low, high)) in low.into_iter().zip(high).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            _mm_storeu_si128(t.add(2 * k * t_stride).cast(), _mm_unpacklo_epi64(low, high));
            _mm_storeu_si128(t.add((2 * k + 1) * t_stride).cast(), _mm_unpackhi_epi64(low, high));
        }
    }
}

/// Transposes a square of eight by eight.
///
/// # Safety
/// The CPU has AVX2. There are eight rows of eight elements on both sides, and they do not overlap.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn eight_by_eight(s: *const f32, s_stride: usize, t: *mut f32, t_stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: the caller's promise.
    unsafe {
        // Halves of rows k and k + 4 side by side: what is left are moves inside 128 bits.
        let load = |k: usize, half: usize| {
            let low = _mm_loadu_ps(s.add(k * s_stride + half));
            let high = _mm_loadu_ps(s.add((k + 4) * s_stride + half));
            _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high)
        };
        for half in [0, 4] {
            let (r0, r1, r2, r3) = (load(0, half), load(1, half), load(2, half), load(3, half));
            let (a, b) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (c, d) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let rows = [
                _mm256_shuffle_ps::<0x44>(a, c),
                _mm256_shuffle_ps::<0xee>(a, c),
                _mm256_shuffle_ps::<0x44>(b, d),
                _mm256_shuffle_ps::<0xee>(b, d),
            ];
            for (k, row) in rows.into_iter().enumerate() {
                _mm256_storeu_ps(t.add((half + k) * t_stride), row);
            }
        }
    }
}
