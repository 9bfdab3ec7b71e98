//! The inverse cosine transform of 8x8 coefficients.
//!
//! One dim after the other, as sums of products with integers of 13 bits: 8 inputs make 4 sums of the even and 4 of the
//! odd ones, and sums and differences of these are the 8 outputs. The factors are those of libjpeg's `islow` after its
//! shared terms are multiplied out, which changes no integer.

use crate::Isa;

/// Where [`idct`] expects the coefficient of row `v` and column `u`: at `PLACES[8 * v + u]`. Rows 0 and 4, 2 and 6, 1 and 5,
/// 3 and 7 lie in pairs, interleaved, because one instruction multiplies pairs and adds them.
pub const PLACES: [u8; 64] = places();

const fn places() -> [u8; 64] {
    // The pair of a row: which, and whether as its second.
    let pairs = [(0, 0), (2, 0), (1, 0), (3, 0), (0, 1), (2, 1), (1, 1), (3, 1)];
    let mut places = [0; 64];
    let mut i = 0;
    while i < 64 {
        let (pair, second) = pairs[i / 8];
        places[i] = 16 * pair + 2 * (i % 8) as u8 + second;
        i += 1;
    }
    places
}

/// Bits of the factors; the first pass keeps two bits more than it needs.
const BITS: i32 = 13;
const FIRST_SHIFT: i32 = BITS - 2;
/// The transform of both dims is eight times too large.
const SECOND_SHIFT: i32 = BITS + 2 + 3;
/// Half of the last place; in the second pass also the level of a sample that is zero.
const FIRST_ROUND: i32 = 1 << (FIRST_SHIFT - 1);
const SECOND_ROUND: i32 = (1 << (SECOND_SHIFT - 1)) + (128 << SECOND_SHIFT);

/// Factors of the pairs (0, 4) and (2, 6): two sums each.
const ZERO_FOUR: [[i16; 2]; 2] = [[8192, 8192], [8192, -8192]];
const TWO_SIX: [[i16; 2]; 2] = [[4433 + 6270, 4433], [4433, 4433 - 15137]];
/// Factors of the pairs (1, 5) and (3, 7) in the sums that go with outputs 0 and 7, 1 and 6, 2 and 5, 3 and 4.
const ONE_FIVE: [[i16; 2]; 4] = [
    [12299 - 7373 - 3196 + 9633, 9633 - 3196],
    [9633, 9633 - 20995],
    [9633 - 3196, 16819 - 20995 - 3196 + 9633],
    [9633 - 7373, 9633],
];
const THREE_SEVEN: [[i16; 2]; 4] = [
    [9633, 9633 - 7373],
    [25172 - 20995 - 16069 + 9633, 9633 - 16069],
    [9633 - 20995, 9633],
    [9633 - 16069, 2446 - 7373 - 16069 + 9633],
];

/// Multiplies `coefficients` with `quants` (both in the order of [`PLACES`]), transforms them into 8 rows of 8 samples of
/// `out`, `stride` apart, and clears them.
pub fn idct(isa: Isa, coefficients: &mut [i16; 64], quants: &[i16; 64], out: &mut [u8], stride: usize) {
    assert!(stride >= 8 && out.len() >= 7 * stride + 8, "8 rows, {stride} apart, in {} samples", out.len());
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: the CPU has AVX2, and `out` has 8 rows.
        return unsafe { avx2::idct(coefficients, quants, out.as_mut_ptr(), stride) };
    }
    let _ = isa;
    scalar::idct(coefficients, quants, out, stride);
}

/// What [`idct`] makes of the first coefficient alone, after its multiplication: 64 samples of one level.
pub fn flat(first: i16, out: &mut [u8], stride: usize) {
    let level = (((i32::from(first) * 4 + 16) >> 5) + 128).clamp(0, 255) as u8;
    for row in out.chunks_mut(stride).take(8) {
        row[..8].fill(level);
    }
}

mod scalar {
    use super::*;

    pub(super) fn idct(coefficients: &mut [i16; 64], quants: &[i16; 64], out: &mut [u8], stride: usize) {
        let mut first = [[0; 8]; 8];
        for (i, &place) in PLACES.iter().enumerate() {
            let place = usize::from(place);
            first[i % 8][i / 8] = coefficients[place].wrapping_mul(quants[place]);
        }
        coefficients.fill(0);
        let mut second = [[0; 8]; 8];
        for (u, column) in first.iter().enumerate() {
            for (y, value) in eight(column, FIRST_ROUND).into_iter().enumerate() {
                second[y][u] = (value >> FIRST_SHIFT).clamp(i16::MIN.into(), i16::MAX.into()) as i16;
            }
        }
        for (row, out) in second.iter().zip(out.chunks_mut(stride)) {
            for (value, out) in eight(row, SECOND_ROUND).into_iter().zip(out) {
                *out = (value >> SECOND_SHIFT).clamp(0, 255) as u8;
            }
        }
    }

    /// One dim of eight.
    fn eight(x: &[i16; 8], round: i32) -> [i32; 8] {
        // Damaged files have numbers that overflow: they wrap, as they do in SIMD.
        let sum = |a: usize, b: usize, by: [i16; 2]| {
            (i32::from(x[a]) * i32::from(by[0])).wrapping_add(i32::from(x[b]) * i32::from(by[1]))
        };
        let [zero, four] = ZERO_FOUR.map(|by| sum(0, 4, by).wrapping_add(round));
        let [two, six] = TWO_SIX.map(|by| sum(2, 6, by));
        let even =
            [zero.wrapping_add(two), four.wrapping_add(six), four.wrapping_sub(six), zero.wrapping_sub(two)];
        let mut y = [0; 8];
        for (k, even) in even.into_iter().enumerate() {
            let odd = sum(1, 5, ONE_FIVE[k]).wrapping_add(sum(3, 7, THREE_SEVEN[k]));
            y[k] = even.wrapping_add(odd);
            y[7 - k] = even.wrapping_sub(odd);
        }
        y
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::*;

    /// # Safety
    /// The CPU has AVX2; `out` has 8 rows of 8 bytes, `stride` apart.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn idct(coefficients: &mut [i16; 64], quants: &[i16; 64], out: *mut u8, stride: usize) {
        let mut pairs = [_mm256_setzero_si256(); 4];
        for (k, pair) in pairs.iter_mut().enumerate() {
            // SAFETY: 16 of 64 numbers each.
            unsafe {
                let c: *mut __m256i = coefficients.as_mut_ptr().add(16 * k).cast();
                let q = _mm256_loadu_si256(quants.as_ptr().add(16 * k).cast());
                *pair = _mm256_mullo_epi16(_mm256_loadu_si256(c), q);
                _mm256_storeu_si256(c, _mm256_setzero_si256());
            }
        }
        let columns = pass::<FIRST_SHIFT>(pairs, FIRST_ROUND);
        // Halves of a lane, four numbers each, to pairs of numbers.
        let zip = _mm256_setr_epi8(
            0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6,
            7, 14, 15,
        );
        let [zero, one, two, three] =
            columns.map(|c| _mm256_shuffle_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(c), zip));
        let [a, b, c, d] = pass::<SECOND_SHIFT>([zero, two, one, three], SECOND_ROUND);
        // Rows 0 and 1 with 4 and 5, rows 2 and 3 with 6 and 7.
        for (first, two) in [(0, _mm256_packus_epi16(a, b)), (2, _mm256_packus_epi16(c, d))] {
            let (low, high) = (_mm256_castsi256_si128(two), _mm256_extracti128_si256::<1>(two));
            for (row, two) in [(first, low), (first + 4, high)] {
                // SAFETY: rows 0 to 7 are there, by the caller's promise.
                unsafe {
                    _mm_storel_epi64(out.add(row * stride).cast(), two);
                    _mm_storeh_pd(out.add((row + 1) * stride).cast(), _mm_castsi128_pd(two));
                }
            }
        }
    }

    /// One dim of eight vectors of eight, which come in pairs and leave as rows `k` and `k + 4` of the transposed matrix.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn pass<const SHIFT: i32>(pairs: [__m256i; 4], round: i32) -> [__m256i; 4] {
        let [zero_four, two_six, one_five, three_seven] = pairs;
        let round = _mm256_set1_epi32(round);
        let [zero, four] = ZERO_FOUR.map(|by| _mm256_add_epi32(sum(zero_four, by), round));
        let [two, six] = TWO_SIX.map(|by| sum(two_six, by));
        let even = [
            _mm256_add_epi32(zero, two),
            _mm256_add_epi32(four, six),
            _mm256_sub_epi32(four, six),
            _mm256_sub_epi32(zero, two),
        ];
        let mut y = [_mm256_setzero_si256(); 8];
        for k in 0..4 {
            let odd = _mm256_add_epi32(sum(one_five, ONE_FIVE[k]), sum(three_seven, THREE_SEVEN[k]));
            y[k] = _mm256_srai_epi32::<SHIFT>(_mm256_add_epi32(even[k], odd));
            y[7 - k] = _mm256_srai_epi32::<SHIFT>(_mm256_sub_epi32(even[k], odd));
        }
        // In each lane four columns: eight rows of them become four of eight.
        let quarter = |a: usize| {
            let (even, odd) = (_mm256_packs_epi32(y[a], y[a + 2]), _mm256_packs_epi32(y[a + 1], y[a + 3]));
            let (low, high) = (_mm256_unpacklo_epi16(even, odd), _mm256_unpackhi_epi16(even, odd));
            (_mm256_unpacklo_epi32(low, high), _mm256_unpackhi_epi32(low, high))
        };
        let ((a, b), (c, d)) = (quarter(0), quarter(4));
        [
            _mm256_unpacklo_epi64(a, c),
            _mm256_unpackhi_epi64(a, c),
            _mm256_unpacklo_epi64(b, d),
            _mm256_unpackhi_epi64(b, d),
        ]
    }

    /// Eight times `first * by[0] + second * by[1]`.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn sum(pairs: __m256i, by: [i16; 2]) -> __m256i {
        let both = i32::from(by[0] as u16) | i32::from(by[1]) << 16;
        _mm256_madd_epi16(pairs, _mm256_set1_epi32(both))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Coefficients of one kind from a seed, in the order of `PLACES`.
    fn coefficients(seed: u32, n: usize, largest: i32) -> [i16; 64] {
        let mut state = seed;
        let mut block = [0; 64];
        for place in &PLACES[..n] {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            block[usize::from(*place)] = ((state >> 8) as i32 % (2 * largest + 1) - largest) as i16;
        }
        block
    }

    #[test]
    fn blocks_are_as_the_scalar_twin_makes_them() {
        let quants: [i16; 64] = std::array::from_fn(|i| 1 + (i as i16 * 7) % 90);
        for stride in [8, 9, 40] {
            for (seed, largest) in (0..200).zip([1, 5, 40, 300, 2047, 32_767].into_iter().cycle()) {
                let block = coefficients(seed, 1 + seed as usize % 64, largest);
                let (mut fast, mut slow) = (vec![7; 8 * stride], vec![7; 8 * stride]);
                let (mut a, mut b) = (block, block);
                idct(Isa::detect(), &mut a, &quants, &mut fast, stride);
                idct(Isa::SCALAR, &mut b, &quants, &mut slow, stride);
                assert_eq!(fast, slow, "seed {seed}, up to {largest}");
                assert_eq!((a, b), ([0; 64], [0; 64]));
            }
        }
    }

    #[test]
    fn blocks_are_as_the_cosines_say() {
        for seed in 0..100 {
            let block = coefficients(seed, 64, 60);
            let mut out = [0; 64];
            idct(Isa::detect(), &mut { block }, &[1; 64], &mut out, 8);
            for (i, &got) in out.iter().enumerate() {
                let mut want = 128.0;
                for (j, &place) in PLACES.iter().enumerate() {
                    let along = |x: usize, u: usize| {
                        let scale = if u == 0 { 0.5f64.sqrt() } else { 1.0 };
                        scale * ((2 * x + 1) as f64 * u as f64 * std::f64::consts::PI / 16.0).cos() / 2.0
                    };
                    want += f64::from(block[usize::from(place)]) * along(i / 8, j / 8) * along(i % 8, j % 8);
                }
                let off = (f64::from(got) - want.clamp(0.0, 255.0)).abs();
                assert!(off < 0.6, "seed {seed}, sample {i}: {got} and {want}");
            }
        }
    }

    #[test]
    fn a_flat_block_is_that_of_its_first_coefficient() {
        for first in (-33_000..33_000).step_by(7).chain([-1024, -1023, 0, 1, 3, 4, 1015, 1016]) {
            let first = first as i16;
            let (mut whole, mut quick) = ([1; 80], [1; 80]);
            let mut block = [0; 64];
            block[0] = first;
            idct(Isa::SCALAR, &mut block, &[1; 64], &mut whole, 10);
            flat(first, &mut quick, 10);
            assert_eq!(whole, quick, "{first}");
        }
    }

    #[test]
    #[should_panic(expected = "8 rows")]
    fn rows_that_are_not_there_are_refused() {
        idct(Isa::detect(), &mut [0; 64], &[1; 64], &mut [0; 64], 9);
    }
}
