//! Scaling of RGB images in integers: rows of bytes are blended into one row, and that row's pixels into fewer or more.
//! The weights are up to the caller. For weights of any number and size, in f32, see `bytes`.
//!
//! Between the two a level is a number of 1/128. A result is less than 0.01 levels for each weight away from the exact one
//! before it is rounded.

use crate::Isa;

/// More weights than this are refused: each adds to the error.
pub const WEIGHTS_MAX: usize = 16;

/// `row[j]` is the sum of `weights[t] / 65536` times `source[t * stride + j]`, in 1/128. The weights' sum is 1 or less.
pub fn blend_rows(isa: Isa, source: &[u8], stride: usize, weights: &[u16], row: &mut [i16]) {
    let reach = weights.len().checked_sub(1).map_or(0, |last| last * stride + row.len());
    assert!(source.len() >= reach, "{} rows, {stride} apart, of {} bytes", weights.len(), row.len());
    assert!(weights.len() <= WEIGHTS_MAX, "{} weights are too many", weights.len());
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() && row.len() >= avx2::WIDE {
        // SAFETY: the CPU has AVX2, the source reaches as far as `reach`, and the row is not too short.
        return unsafe { avx2::blend_rows(source.as_ptr(), stride, weights, row) };
    }
    let _ = isa;
    scalar::blend_rows(source, stride, weights, row);
}

/// Which pixels of a row make each pixel of another.
#[derive(Clone, Debug)]
pub struct Columns {
    /// The first number of each one's first pixel.
    starts: Vec<u32>,
    /// As many for each: `2 * pairs`.
    weights: Vec<i16>,
    pairs: usize,
    reach: usize,
}

impl Columns {
    /// For each pixel of the result its first pixel of the source, and `taps` weights in 1/16384, whose sum is 1.
    pub fn new(starts: &[usize], weights: &[i16], taps: usize) -> Columns {
        assert!(starts.len() * taps == weights.len(), "{taps} weights for each of {}", starts.len());
        assert!((1..=WEIGHTS_MAX).contains(&taps), "{taps} weights");
        let pairs = taps.div_ceil(2);
        let mut even = Vec::with_capacity(starts.len() * 2 * pairs);
        for weights in weights.chunks_exact(taps) {
            even.extend_from_slice(weights);
            even.resize(even.len() + 2 * pairs - taps, 0);
        }
        let starts: Vec<u32> = starts
            .iter()
            .map(|&s| u32::try_from(3 * s).expect("an image is less than 2^30 pixels wide"))
            .collect();
        // Eight numbers are read where six are needed.
        let reach = starts.iter().max().map_or(0, |&last| last as usize + 6 * (pairs - 1) + 8);
        Columns { starts, weights: even, pairs, reach }
    }

    /// How many numbers a row must have; what is behind its pixels does not matter.
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// Blends the pixels of `row`, in 1/128, into those of `out`, in bytes.
    pub fn blend(&self, isa: Isa, row: &[i16], out: &mut [u8]) {
        assert!(row.len() >= self.reach, "{} numbers of {}", row.len(), self.reach);
        assert!(out.len() == 3 * self.starts.len(), "{} bytes for {} pixels", out.len(), self.starts.len());
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx2() {
            done = self.starts.len() / avx2::PIXELS * avx2::PIXELS;
            // SAFETY: the CPU has AVX2; starts are such that `reach` is enough, and `out` has as many pixels.
            unsafe {
                avx2::blend(&self.starts[..done], &self.weights, self.pairs, row.as_ptr(), out.as_mut_ptr())
            };
        }
        let _ = isa;
        let weights = &self.weights[done * 2 * self.pairs..];
        scalar::blend(&self.starts[done..], weights, 2 * self.pairs, row, &mut out[3 * done..]);
    }
}

mod scalar {
    pub(super) fn blend_rows(source: &[u8], stride: usize, weights: &[u16], row: &mut [i16]) {
        for (j, row) in row.iter_mut().enumerate() {
            // Each product is cut off at 1/256: half of that is given back, and a half for the last shift.
            let mut sum = weights.len() as u32 / 2 + 1;
            for (t, &w) in weights.iter().enumerate() {
                sum += ((u32::from(source[t * stride + j]) << 8) * u32::from(w)) >> 16;
            }
            *row = (sum >> 1) as i16;
        }
    }

    pub(super) fn blend(starts: &[u32], weights: &[i16], taps: usize, row: &[i16], out: &mut [u8]) {
        for ((out, &start), weights) in out.chunks_exact_mut(3).zip(starts).zip(weights.chunks_exact(taps)) {
            for (c, out) in out.iter_mut().enumerate() {
                let from = row[start as usize + c..].iter().step_by(3);
                let sum: i32 = weights.iter().zip(from).map(|(&w, &v)| i32::from(w) * i32::from(v)).sum();
                *out = ((sum + (1 << 20)) >> 21).clamp(0, 255) as u8;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    /// Bytes of a row at a time.
    pub(super) const WIDE: usize = 32;
    /// Pixels of the result at a time.
    pub(super) const PIXELS: usize = 8;

    /// # Safety
    /// The CPU has AVX2; `row` has at least WIDE elements, and `source` as many bytes in each of as many rows as there are
    /// weights.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn blend_rows(source: *const u8, stride: usize, weights: &[u16], row: &mut [i16]) {
        let last = row.len() - WIDE;
        let half = _mm256_set1_epi16(weights.len() as i16 / 2 + 1);
        // The last go back over some that are done, where they are not a multiple.
        for at in (0..row.len().div_ceil(WIDE)).map(|i| (i * WIDE).min(last)) {
            let (mut low, mut high) = (half, half);
            for (t, &w) in weights.iter().enumerate() {
                // SAFETY: WIDE bytes inside row `t`, by the caller's promise.
                let bytes = unsafe { _mm256_loadu_si256(source.add(t * stride + at).cast()) };
                let (w, zero) = (_mm256_set1_epi16(w as i16), _mm256_setzero_si256());
                // With zeros below them bytes are 256 times as large.
                low = _mm256_add_epi16(low, _mm256_mulhi_epu16(_mm256_unpacklo_epi8(zero, bytes), w));
                high = _mm256_add_epi16(high, _mm256_mulhi_epu16(_mm256_unpackhi_epi8(zero, bytes), w));
            }
            let (low, high) = (_mm256_srli_epi16::<1>(low), _mm256_srli_epi16::<1>(high));
            // SAFETY: WIDE elements from `at` on are inside the row.
            unsafe {
                let out: *mut __m256i = row.as_mut_ptr().add(at).cast();
                _mm256_storeu_si256(out, _mm256_permute2x128_si256::<0x20>(low, high));
                _mm256_storeu_si256(out.add(1), _mm256_permute2x128_si256::<0x31>(low, high));
            }
        }
    }

    /// # Safety
    /// The CPU has AVX2; there are `2 * pairs` weights for each of `starts`, which are a multiple of PIXELS; `row` has
    /// `6 * (pairs - 1) + 8` numbers from each start on; `out` has three bytes for each.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn blend(
        starts: &[u32],
        weights: &[i16],
        pairs: usize,
        row: *const i16,
        mut out: *mut u8,
    ) {
        // Of two pixels in a lane: reds, greens, blues, and zeros.
        let zip =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1));
        // Of four pixels in a lane: without the fourth byte.
        let three = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
        ));
        for (i, starts) in starts.chunks_exact(PIXELS).enumerate() {
            let mut sums = [_mm256_set1_epi32(1 << 20); PIXELS / 2];
            for (k, sum) in sums.iter_mut().enumerate() {
                // Pixel `k` in the lower lane, and `k + 4` in the upper.
                for pair in 0..pairs {
                    // SAFETY: the weights of PIXELS pixels are there, and eight numbers of the row, by the caller's promise.
                    let (numbers, by) = unsafe {
                        let from = |k: usize| _mm_loadu_si128(row.add(starts[k] as usize + 6 * pair).cast());
                        let by = |k: usize| {
                            let two = weights.as_ptr().add(2 * ((i * PIXELS + k) * pairs + pair));
                            _mm256_set1_epi32(two.cast::<i32>().read_unaligned())
                        };
                        (
                            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(from(k)), from(k + 4)),
                            _mm256_blend_epi32::<0xf0>(by(k), by(k + 4)),
                        )
                    };
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_shuffle_epi8(numbers, zip), by));
                }
                *sum = _mm256_srai_epi32::<21>(*sum);
            }
            let [a, b, c, d] = sums;
            let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            let bytes = _mm256_shuffle_epi8(bytes, three);
            for lane in [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)] {
                // SAFETY: twelve bytes for four pixels, by the caller's promise.
                unsafe {
                    _mm_storel_epi64(out.cast(), lane);
                    out.add(8).cast::<i32>().write_unaligned(_mm_extract_epi32::<2>(lane));
                    out = out.add(12);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: u32) -> Vec<u8> {
        (0..n).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    /// Weights of a sum that is `one`.
    fn weights(taps: usize, seed: usize, one: i32) -> Vec<i32> {
        let mut weights: Vec<i32> =
            (0..taps).map(|t| one / taps as i32 * (t + seed) as i32 % (one / taps as i32)).collect();
        weights[seed % taps] += one - weights.iter().sum::<i32>();
        weights
    }

    #[test]
    fn rows_are_as_the_scalar_twin_and_near_the_sum() {
        let source = bytes(6000);
        for len in [0, 1, 31, 32, 33, 63, 64, 65, 101, 300] {
            for taps in [0, 1, 2, 3, 4, 5, 16] {
                let weights: Vec<u16> = if taps == 0 {
                    vec![]
                } else {
                    weights(taps, len, 65_535).iter().map(|&w| w as u16).collect()
                };
                let (mut fast, mut slow) = (vec![7; len], vec![8; len]);
                blend_rows(Isa::detect(), &source, 331, &weights, &mut fast);
                blend_rows(Isa::SCALAR, &source, 331, &weights, &mut slow);
                assert_eq!(fast, slow, "{len} bytes, {taps} rows");
                for (j, &got) in fast.iter().enumerate() {
                    let value =
                        |(t, &w): (usize, &u16)| f64::from(source[t * 331 + j]) * f64::from(w) / 65_536.0;
                    let want: f64 = weights.iter().enumerate().map(value).sum();
                    assert!(
                        (f64::from(got) / 128.0 - want).abs() < 0.01 + 0.003 * taps as f64,
                        "{got} {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn pixels_are_as_the_scalar_twin_and_near_the_sum() {
        let row: Vec<i16> = bytes(1000).iter().map(|&b| i16::from(b) * 128).collect();
        for pixels in [0, 1, 7, 8, 9, 16, 60] {
            for taps in [1, 2, 3, 4, 5, 16] {
                let starts: Vec<usize> = (0..pixels).map(|x| x * 5 % 300).collect();
                let by: Vec<i16> =
                    (0..pixels).flat_map(|x| weights(taps, x, 16_384)).map(|w| w as i16).collect();
                let columns = Columns::new(&starts, &by, taps);
                let row = &row[..columns.reach()];
                let (mut fast, mut slow) = (vec![7; 3 * pixels], vec![8; 3 * pixels]);
                columns.blend(Isa::detect(), row, &mut fast);
                columns.blend(Isa::SCALAR, row, &mut slow);
                assert_eq!(fast, slow, "{pixels} pixels, {taps} taps");
                for (i, &got) in fast.iter().enumerate() {
                    let (x, c) = (i / 3, i % 3);
                    let value = |t: usize| {
                        f64::from(row[3 * (starts[x] + t) + c]) * f64::from(by[x * taps + t])
                            / (128.0 * 16_384.0)
                    };
                    let want: f64 = (0..taps).map(value).sum();
                    assert!((f64::from(got) - want).abs() <= 0.5001, "{got} {want}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "numbers of")]
    fn a_row_that_is_too_short_is_refused() {
        let columns = Columns::new(&[0, 5], &[8192; 4], 2);
        columns.blend(Isa::detect(), &vec![0; columns.reach() - 1], &mut [0; 6]);
    }

    #[test]
    #[should_panic(expected = "rows")]
    fn a_source_that_is_too_short_is_refused() {
        blend_rows(Isa::detect(), &[0; 10], 5, &[5, 5], &mut [0; 6]);
    }
}
