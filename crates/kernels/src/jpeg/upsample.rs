//! Rows of samples at half size to whole size: each new sample is three parts the nearest old one and one part the next
//! nearest, in one dim or in both. Beyond the edge is the edge. Halves are rounded up and down in turn, as libjpeg does.

use crate::Isa;

/// A row twice as long as `row`.
pub fn double(isa: Isa, row: &[u8], out: &mut [u8]) {
    widen::<false>(isa, row, row, out);
}

/// A row twice as long, between the rows `near` and `far`, and three times as near to the first.
pub fn double_between(isa: Isa, near: &[u8], far: &[u8], out: &mut [u8]) {
    widen::<true>(isa, near, far, out);
}

/// A row between the rows `near` and `far`, and three times as near to the first; `above` says whether `far` is above.
pub fn half_way(near: &[u8], far: &[u8], above: bool, out: &mut [u8]) {
    let round = if above { 1 } else { 2 };
    for ((out, &near), &far) in out.iter_mut().zip(near).zip(far) {
        *out = ((3 * u16::from(near) + u16::from(far) + round) >> 2) as u8;
    }
}

fn widen<const BETWEEN: bool>(isa: Isa, near: &[u8], far: &[u8], out: &mut [u8]) {
    let n = near.len();
    assert!(far.len() == n && out.len() == 2 * n, "two rows of a length, and a result of twice that");
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() && n >= avx2::WIDE + 2 {
        let last = n - 1;
        // All but the ends, the last of them over again where they are not a multiple.
        for at in (1..).step_by(avx2::WIDE).map(|at| at.min(last - avx2::WIDE)) {
            // SAFETY: the CPU has AVX2; WIDE samples from `at` on have neighbours on both sides.
            unsafe {
                let out = out.as_mut_ptr().add(2 * at);
                avx2::widen::<BETWEEN>(near.as_ptr().add(at), far.as_ptr().add(at), out);
            }
            if at + avx2::WIDE == last {
                break;
            }
        }
        scalar::widen::<BETWEEN>(near, far, out, 0..1);
        scalar::widen::<BETWEEN>(near, far, out, last..n);
        return;
    }
    let _ = isa;
    scalar::widen::<BETWEEN>(near, far, out, 0..n);
}

mod scalar {
    use std::ops::Range;

    /// The samples that come from those of `range`.
    pub(super) fn widen<const BETWEEN: bool>(near: &[u8], far: &[u8], out: &mut [u8], range: Range<usize>) {
        let sample = |i: usize| {
            if BETWEEN { 3 * u16::from(near[i]) + u16::from(far[i]) } else { u16::from(near[i]) }
        };
        let (shift, down, up) = if BETWEEN { (4, 8, 7) } else { (2, 1, 2) };
        for i in range {
            let middle = 3 * sample(i);
            let (left, right) = (sample(i.saturating_sub(1)), sample((i + 1).min(near.len() - 1)));
            out[2 * i] = ((middle + left + down) >> shift) as u8;
            out[2 * i + 1] = ((middle + right + up) >> shift) as u8;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    /// Old samples at a time.
    pub(super) const WIDE: usize = 16;

    /// # Safety
    /// The CPU has AVX2; the sources may be read from one before to WIDE + 1 behind, `out` is twice WIDE long.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(super) unsafe fn widen<const BETWEEN: bool>(near: *const u8, far: *const u8, out: *mut u8) {
        let sample = |by: isize| {
            // SAFETY: WIDE samples from one before, at or one behind the first, by the caller's promise.
            let [near, far] = [near, far]
                .map(|row| unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(row.offset(by).cast())) });
            if BETWEEN { _mm256_add_epi16(thrice(near), far) } else { near }
        };
        let middle = thrice(sample(0));
        let (down, up) = if BETWEEN { (8, 7) } else { (1, 2) };
        let [left, right] = [(-1, down), (1, up)].map(|(by, round)| {
            let sum = _mm256_add_epi16(_mm256_add_epi16(middle, sample(by)), _mm256_set1_epi16(round));
            if BETWEEN { _mm256_srli_epi16::<4>(sum) } else { _mm256_srli_epi16::<2>(sum) }
        });
        let both = _mm256_or_si256(left, _mm256_slli_epi16::<8>(right));
        // SAFETY: 32 bytes, by the caller's promise.
        unsafe { _mm256_storeu_si256(out.cast(), both) };
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn thrice(x: __m256i) -> __m256i {
        _mm256_add_epi16(_mm256_add_epi16(x, x), x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_as_the_scalar_twin_makes_it() {
        let bytes: Vec<u8> = (0..400u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for n in (0..70).chain([150]) {
            let (near, far) = (&bytes[..n], &bytes[200..200 + n]);
            let (mut fast, mut slow) = (vec![1; 2 * n], vec![2; 2 * n]);
            double(Isa::detect(), near, &mut fast);
            double(Isa::SCALAR, near, &mut slow);
            assert_eq!(fast, slow, "{n}");
            double_between(Isa::detect(), near, far, &mut fast);
            double_between(Isa::SCALAR, near, far, &mut slow);
            assert_eq!(fast, slow, "{n}, between");
        }
    }

    #[test]
    fn samples_are_three_parts_near_and_one_part_far() {
        let mut out = [0; 6];
        double(Isa::detect(), &[0, 100, 255], &mut out);
        assert_eq!(out, [0, 25, 75, 139, 216, 255]);
        double_between(Isa::detect(), &[0, 100, 200], &[40, 60, 200], &mut out);
        // 10, 90 and 200 between the rows.
        assert_eq!(out, [10, 30, 70, 117, 173, 200]);
        half_way(&[0, 100, 201], &[1, 60, 200], true, &mut out[..3]);
        assert_eq!(out[..3], [0, 90, 201]);
        half_way(&[0, 100, 201], &[2, 60, 199], false, &mut out[..3]);
        assert_eq!(out[..3], [1, 90, 201]);
    }

    #[test]
    #[should_panic(expected = "two rows")]
    fn a_result_of_another_length_is_refused() {
        double(Isa::detect(), &[0; 20], &mut [0; 39]);
    }
}
