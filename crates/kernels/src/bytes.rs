//! Bytes of images: rows of pixels mixed into one row of numbers. The weights are up to the caller.

use crate::Isa;

/// `row[j] = Σ weights[t] · source[t · stride + j]`.
pub fn mix_rows(isa: Isa, source: &[u8], stride: usize, weights: &[f32], row: &mut [f32]) {
    let reach = weights.len().checked_sub(1).map_or(0, |last| last * stride + row.len());
    assert!(source.len() >= reach, "{} rows, {stride} apart, of {} bytes", weights.len(), row.len());
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: the CPU has AVX2, and the source reaches as far as `reach`.
        return unsafe { avx2::mix_rows(source.as_ptr(), stride, weights, row) };
    }
    let _ = isa;
    scalar::mix_rows(source, stride, weights, row);
}

mod scalar {
    pub(super) fn mix_rows(source: &[u8], stride: usize, weights: &[f32], row: &mut [f32]) {
        row.fill(0.0);
        for (t, w) in weights.iter().enumerate() {
            for (r, &v) in row.iter_mut().zip(&source[t * stride..]) {
                *r += w * f32::from(v);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    /// Columns that are summed up in registers at a time.
    const WIDE: usize = 32;

    /// # Safety
    /// The CPU has AVX2 and FMA; `source` has `row.len()` bytes in each of as many rows as there are weights.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn mix_rows(source: *const u8, stride: usize, weights: &[f32], row: &mut [f32]) {
        let whole = row.len() / WIDE * WIDE;
        let (wide, rest) = row.split_at_mut(whole);
        for (i, out) in wide.chunks_exact_mut(WIDE).enumerate() {
            let mut sums = [_mm256_setzero_ps(); WIDE / 8];
            for (t, w) in weights.iter().enumerate() {
                let w = _mm256_set1_ps(*w);
                for (k, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: eight bytes inside row `t`, by the caller's promise.
                    let bytes = unsafe { _mm_loadl_epi64(source.add(t * stride + i * WIDE + k * 8).cast()) };
                    *sum = _mm256_fmadd_ps(w, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), *sum);
                }
            }
            for (k, sum) in sums.iter().enumerate() {
                // SAFETY: `out` has WIDE elements.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(k * 8), *sum) };
            }
        }
        for (j, r) in rest.iter_mut().enumerate() {
            // SAFETY: inside row `t`, by the caller's promise.
            let byte = |t: usize| f32::from(unsafe { *source.add(t * stride + whole + j) });
            *r = weights.iter().enumerate().map(|(t, w)| w * byte(t)).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_mixed_as_the_scalar_twin_mixes_them() {
        let source: Vec<u8> = (0..2000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in [0, 1, 7, 8, 9, 31, 32, 33, 64, 101, 300] {
            for taps in [0, 1, 2, 3, 5] {
                let weights: Vec<f32> = (0..taps).map(|t| 0.1 + 0.3 * t as f32).collect();
                let (mut fast, mut slow) = (vec![7.0; len], vec![7.0; len]);
                mix_rows(Isa::detect(), &source, 331, &weights, &mut fast);
                scalar::mix_rows(&source, 331, &weights, &mut slow);
                for (a, b) in fast.iter().zip(&slow) {
                    assert!((a - b).abs() <= 1e-3, "{len} columns, {taps} rows: {a} and {b}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows")]
    fn a_source_that_is_too_short_is_refused() {
        mix_rows(Isa::detect(), &[0; 10], 5, &[0.5, 0.5], &mut [0.0; 6]);
    }
}
