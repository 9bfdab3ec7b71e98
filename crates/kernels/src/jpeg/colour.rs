//! Luma and two chroma planes to red, green and blue.
//!
//! With `cb` and `cr` counted from 128: `r = y + 1.402 cr`, `g = y - 0.34414 cb - 0.71414 cr`, `b = y + 1.772 cb`, each in
//! units of 2^-16 and rounded once, as libjpeg does.

use crate::Isa;

/// Factors in units of 2^-16, without their nearest integers (1, -1 and 2), so that they fit 16 bits.
const RED_CR: i32 = 91_881 - 65_536;
const GREEN_CB: i32 = -22_554;
const GREEN_CR: i32 = 65_536 - 46_802;
const BLUE_CB: i32 = 116_130 - 2 * 65_536;

/// `out[3 * i..3 * i + 3]` is red, green and blue of `y[i]`, `cb[i]` and `cr[i]`.
pub fn rgb(isa: Isa, y: &[u8], cb: &[u8], cr: &[u8], out: &mut [u8]) {
    let n = y.len();
    assert!(
        cb.len() == n && cr.len() == n && out.len() == 3 * n,
        "as many of each, and three times as many results"
    );
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() && n >= avx2::WIDE {
        let [y, cb, cr] = [y, cb, cr].map(<[u8]>::as_ptr);
        for at in avx2::starts(n) {
            // SAFETY: the CPU has AVX2, and WIDE pixels from `at` on are inside all slices.
            unsafe { avx2::rgb(y.add(at), cb.add(at), cr.add(at), out.as_mut_ptr().add(3 * at)) };
        }
        return;
    }
    let _ = isa;
    scalar::rgb(y, cb, cr, out);
}

mod scalar {
    use super::*;

    pub(super) fn rgb(y: &[u8], cb: &[u8], cr: &[u8], out: &mut [u8]) {
        for (((out, &y), &cb), &cr) in out.chunks_exact_mut(3).zip(y).zip(cb).zip(cr) {
            let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
            let nearest = |sum: i32| (sum + 0x8000) >> 16;
            let r = y + cr + nearest(RED_CR * cr);
            let g = y - cr + nearest(GREEN_CB * cb + GREEN_CR * cr);
            let b = y + 2 * cb + nearest(BLUE_CB * cb);
            out.copy_from_slice(&[r, g, b].map(|v| v.clamp(0, 255) as u8));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::*;

    /// Pixels at a time.
    pub(super) const WIDE: usize = 16;

    /// Where to start so that all of `n` pixels are covered; the last start goes back over pixels that are done.
    pub(super) fn starts(n: usize) -> impl Iterator<Item = usize> {
        (0..n / WIDE).map(|i| i * WIDE).chain((!n.is_multiple_of(WIDE)).then(|| n - WIDE))
    }

    /// # Safety
    /// The CPU has AVX2; WIDE bytes of each source and three times as many of `out` may be touched.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) unsafe fn rgb(y: *const u8, cb: *const u8, cr: *const u8, out: *mut u8) {
        // SAFETY: WIDE bytes each, by the caller's promise.
        let [y, cb, cr] =
            [y, cb, cr].map(|from| unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast())) });
        let level = _mm256_set1_epi16(128);
        let (cb, cr) = (_mm256_sub_epi16(cb, level), _mm256_sub_epi16(cr, level));
        let (cb2, cr2) = (_mm256_add_epi16(cb, cb), _mm256_add_epi16(cr, cr));
        // The high half of twice the product, and then the half of that, rounded.
        let nearest = |twice: __m256i, by: i32| {
            let high = _mm256_mulhi_epi16(twice, _mm256_set1_epi16(by as i16));
            _mm256_srai_epi16::<1>(_mm256_add_epi16(high, _mm256_set1_epi16(1)))
        };
        let r = _mm256_add_epi16(_mm256_add_epi16(y, cr), nearest(cr2, RED_CR));
        let b = _mm256_add_epi16(_mm256_add_epi16(y, cb2), nearest(cb2, BLUE_CB));
        let by = _mm256_set1_epi32((GREEN_CB & 0xffff) | GREEN_CR << 16);
        let sums = |pairs: __m256i| {
            let sum = _mm256_add_epi32(_mm256_madd_epi16(pairs, by), _mm256_set1_epi32(0x8000));
            _mm256_srai_epi32::<16>(sum)
        };
        let both =
            _mm256_packs_epi32(sums(_mm256_unpacklo_epi16(cb, cr)), sums(_mm256_unpackhi_epi16(cb, cr)));
        let g = _mm256_add_epi16(_mm256_sub_epi16(y, cr), both);
        // In each lane eight pixels: red and green in one vector, blue in the other, to 16 and 8 bytes.
        let (rg, b) = (_mm256_packus_epi16(r, g), _mm256_packus_epi16(b, b));
        let place = |places: [i8; 16]| {
            // SAFETY: sixteen bytes.
            _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(places.as_ptr().cast()) })
        };
        let front = _mm256_or_si256(
            _mm256_shuffle_epi8(rg, place([0, 8, -1, 1, 9, -1, 2, 10, -1, 3, 11, -1, 4, 12, -1, 5])),
            _mm256_shuffle_epi8(b, place([-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1])),
        );
        let back = _mm256_or_si256(
            _mm256_shuffle_epi8(rg, place([13, -1, 6, 14, -1, 7, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1])),
            _mm256_shuffle_epi8(b, place([-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, -1, -1, -1, -1, -1, -1])),
        );
        // SAFETY: 48 bytes, by the caller's promise.
        unsafe {
            _mm_storeu_si128(out.cast(), _mm256_castsi256_si128(front));
            _mm_storel_epi64(out.add(16).cast(), _mm256_castsi256_si128(back));
            _mm_storeu_si128(out.add(24).cast(), _mm256_extracti128_si256::<1>(front));
            _mm_storel_epi64(out.add(40).cast(), _mm256_extracti128_si256::<1>(back));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_colour_is_as_the_scalar_twin_makes_it() {
        let all: Vec<u8> = (0..=255).collect();
        for y in (0..=255u8).step_by(5) {
            for cb in 0..=255u8 {
                let (mut fast, mut slow) = (vec![0; 768], vec![0; 768]);
                rgb(Isa::detect(), &[y; 256], &[cb; 256], &all, &mut fast);
                rgb(Isa::SCALAR, &[y; 256], &[cb; 256], &all, &mut slow);
                assert_eq!(fast, slow, "y {y}, cb {cb}");
            }
        }
    }

    #[test]
    fn every_length_is_covered() {
        let bytes: Vec<u8> = (0..300u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for n in (0..70).chain([99]) {
            let (y, cb, cr) = (&bytes[..n], &bytes[100..100 + n], &bytes[200..200 + n]);
            let (mut fast, mut slow) = (vec![1; 3 * n], vec![2; 3 * n]);
            rgb(Isa::detect(), y, cb, cr, &mut fast);
            scalar::rgb(y, cb, cr, &mut slow);
            assert_eq!(fast, slow, "{n}");
        }
    }

    #[test]
    fn colours_are_as_defined() {
        for (y, cb, cr) in [(0, 128, 128), (255, 128, 128), (76, 85, 255), (29, 255, 107), (200, 30, 140)] {
            let mut out = [0; 3];
            rgb(Isa::detect(), &[y], &[cb], &[cr], &mut out);
            let (y, cb, cr) = (f64::from(y), f64::from(cb) - 128.0, f64::from(cr) - 128.0);
            let want = [y + 1.402 * cr, y - 0.34414 * cb - 0.71414 * cr, y + 1.772 * cb];
            for (got, want) in out.into_iter().zip(want) {
                assert!((f64::from(got) - want.clamp(0.0, 255.0)).abs() < 0.502, "{got} {want}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "as many of each")]
    fn rows_of_different_lengths_are_refused() {
        rgb(Isa::detect(), &[0; 20], &[0; 19], &[0; 20], &mut [0; 60]);
    }
}
