//! Random numbers that are a function of where they are used: Philox4x32-10 (Salmon et al., 2011).
//!
//! A value is addressed by a stream (`key`), a `step` and a position. There is no state: any range can be made
//! alone, on any machine, in any order, with the same bits, in scalar code as in lanes. Position `i` of a step is
//! lane `i % 4` of the block with counter `i / 4`.

use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

/// Multipliers of a round and increments of the key.
const MUL: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const BUMP: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
/// Elements of a task; a multiple of what the lanes do at a time.
const CHUNK: usize = 16_384;

/// One block of Philox4x32-10: 128 random bits for a counter and a key.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let a = u64::from(MUL[0]) * u64::from(c0);
        let b = u64::from(MUL[1]) * u64::from(c2);
        (c0, c1, c2, c3) = ((b >> 32) as u32 ^ c1 ^ k0, b as u32, (a >> 32) as u32 ^ c3 ^ k1, a as u32);
        (k0, k1) = (k0.wrapping_add(BUMP[0]), k1.wrapping_add(BUMP[1]));
    }
    [c0, c1, c2, c3]
}

/// The block of positions `4·block..4·block + 4` of a stream's step.
#[inline(always)]
fn block_of(key: u64, step: u64, block: u64) -> [u32; 4] {
    let counter = [block as u32, (block >> 32) as u32, step as u32, (step >> 32) as u32];
    philox(counter, [key as u32, (key >> 32) as u32])
}

/// Numbers evenly spread over `low..high`: positions `offset..offset + y.len()` of the stream's step.
pub fn uniform(cx: &Cx, key: u64, step: u64, offset: u64, low: f32, high: f32, y: &mut [f32]) {
    let width = high - low;
    fill(cx, key, step, offset, y, move |bits| bits.map(|b| low + width * unit(b)));
}

/// Normal numbers: positions `offset..offset + y.len()` of the stream's step.
///
/// Box and Muller's transform of the two pairs of a block. Logarithm, sine and cosine are made of f64 additions and
/// multiplications only, so the bits are the same on every machine.
pub fn normal(cx: &Cx, key: u64, step: u64, offset: u64, mean: f32, std: f32, y: &mut [f32]) {
    let (mean, std) = (f64::from(mean), f64::from(std));
    fill(cx, key, step, offset, y, move |bits| {
        let mut out = [0.0; 4];
        for pair in 0..2 {
            // In (0, 1]: the logarithm exists.
            let u = (f64::from(bits[2 * pair]) + 1.0) / 4_294_967_296.0;
            let radius = (-2.0 * ln_unit(u)).sqrt() * std;
            let (sin, cos) = sin_cos_turn(f64::from(bits[2 * pair + 1]) / 4_294_967_296.0);
            out[2 * pair] = (mean + radius * cos) as f32;
            out[2 * pair + 1] = (mean + radius * sin) as f32;
        }
        out
    });
}

/// The top 24 bits as a number in 0..1.
#[inline(always)]
fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// ln u for 0 < u ≤ 1, to about 1e-13.
#[inline(always)]
fn ln_unit(u: f64) -> f64 {
    // u = 2ⁿ·m with m in √½..√2; ln m = 2·artanh(s), s = (m-1)/(m+1).
    let shifted = u.to_bits().wrapping_sub(0x3fe6_a09e_667f_3bcd) as i64 >> 52;
    let m = f64::from_bits(u.to_bits().wrapping_sub((shifted << 52) as u64));
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let mut sum = 1.0 / 17.0;
    for k in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * s2 + 1.0 / k;
    }
    shifted as f64 * std::f64::consts::LN_2 + 2.0 * s * sum
}

/// The sine and cosine of 2π·t for 0 ≤ t < 1, to about 1e-13.
#[inline(always)]
fn sin_cos_turn(t: f64) -> (f64, f64) {
    let quarter = (4.0 * t + 0.5).floor();
    let r = (4.0 * t - quarter) * std::f64::consts::FRAC_PI_2;
    let r2 = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        sin = 1.0 - sin * r2 * (1.0 / (k * (k - 1.0)));
    }
    for k in [14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0] {
        cos = 1.0 - cos * r2 * (1.0 / (k * (k - 1.0)));
    }
    let sin = sin * r;
    // Selects, not branches: the quarter is random.
    let quarter = quarter as u32;
    let (sin, cos) = if quarter & 1 == 1 { (cos, sin) } else { (sin, cos) };
    let sign = |flip: u32| f64::from(1 - (flip as i32 & 2));
    (sin * sign(quarter), cos * sign(quarter + 1))
}

/// Random bits: positions `offset..offset + y.len()` of the stream's step, on the calling thread.
pub(crate) fn bits(isa: Isa, key: u64, step: u64, offset: u64, y: &mut [u32]) {
    fill_part(isa, key, step, offset, y, |bits| bits);
}

/// Fills `y` with `f` of each block, in parallel.
fn fill(cx: &Cx, key: u64, step: u64, offset: u64, y: &mut [f32], f: impl Fn([u32; 4]) -> [f32; 4] + Sync) {
    cx.for_each_chunk(y, CHUNK, |i, y| fill_part(cx.isa, key, step, offset + (i * CHUNK) as u64, y, &f));
}

/// Fills `y` with `f` of each block, from position `start` on.
#[inline]
fn fill_part<T: Copy>(
    isa: Isa,
    key: u64,
    step: u64,
    start: u64,
    y: &mut [T],
    f: impl Fn([u32; 4]) -> [T; 4],
) {
    let head = y.len().min((start.next_multiple_of(4) - start) as usize);
    let (first, rest) = y.split_at_mut(head);
    if head > 0 {
        let skip = (start % 4) as usize;
        first.copy_from_slice(&f(block_of(key, step, start / 4))[skip..skip + head]);
    }
    let mut block = (start + head as u64) / 4;
    for group in rest.chunks_mut(32) {
        let words = eight_blocks(isa, key, step, block);
        let (values, tail) = group.as_chunks_mut::<4>();
        for (to, bits) in values.iter_mut().zip(&words) {
            *to = f(*bits);
        }
        if !tail.is_empty() {
            tail.copy_from_slice(&f(words[values.len()])[..tail.len()]);
        }
        block += 8;
    }
}

/// The blocks `block..block + 8`.
#[inline]
fn eight_blocks(isa: Isa, key: u64, step: u64, block: u64) -> [[u32; 4]; 8] {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() && block as u32 <= u32::MAX - 7 {
        // SAFETY: the instruction set was detected; 32 words are 32 words.
        return unsafe {
            std::mem::transmute::<[std::arch::x86_64::__m256i; 4], [[u32; 4]; 8]>(philox_avx2(
                key, step, block,
            ))
        };
    }
    let _ = isa;
    std::array::from_fn(|i| block_of(key, step, block + i as u64))
}

/// The positions of a tensor's elements in the tensor that all ranks have together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Positions {
    /// The position of the first element.
    pub first: u64,
    /// The position of the second run, if runs come in pairs.
    pub second: Option<u64>,
    /// How many elements are contiguous there too.
    pub run: usize,
    /// The distance from the start of such a run, or pair of runs, to the start of the next.
    pub stride: u64,
}

impl Positions {
    /// `len` contiguous elements.
    pub fn from(first: u64, len: usize) -> Positions {
        Positions { first, second: None, run: len, stride: len as u64 }
    }

    /// The position of element `at` of the tensor.
    fn of(&self, at: usize) -> u64 {
        let (row, col) = (at / self.run, (at % self.run) as u64);
        let start = match self.second {
            None => self.first + row as u64 * self.stride,
            Some(second) => [self.first, second][row % 2] + (row / 2) as u64 * self.stride,
        };
        start + col
    }
}

/// Zeroes each element with probability `p` and scales the others by 1/(1 − p).
///
/// Which ones is a function of stream, step and position alone; so the gradient is the same call with `dy` for `x` and `dx`
/// for `y`, and ranks that have a part of the tensor each draw the mask of the whole. With `p` of 1 or more all is zero.
pub fn dropout(cx: &Cx, p: f32, key: u64, step: u64, at: Positions, x: Floats, y: FloatsMut) {
    assert_eq!(x.len(), y.len(), "lengths of x and y");
    let mask = Mask::new(p, key, step);
    // Halves go through a buffer in f32, which is masked in place.
    let piece_max = if x.is_half() || y.is_half() { STAGE } else { usize::MAX };
    let y = SharedFloats::new(y);
    cx.par.run(y.len().div_ceil(CHUNK), &|i, _| {
        let mut start = i * CHUNK;
        let end = y.len().min(start + CHUNK);
        let mut stage = [0.0; STAGE];
        while start < end {
            let len = (at.run - start % at.run).min(end - start).min(piece_max);
            let position = at.of(start);
            // SAFETY: chunks of different tasks do not overlap, and each task runs once.
            let y = unsafe { y.part(start, len) };
            match (x.part(start, len), y) {
                (Floats::F32(x), FloatsMut::F32(y)) => {
                    // SAFETY: both have `len` floats.
                    unsafe { mask.apply(cx.isa, position, x.as_ptr(), y.as_mut_ptr(), len) };
                }
                (x, mut y) => {
                    let stage = &mut stage[..len];
                    x.widen(cx.isa, stage);
                    let ptr = stage.as_mut_ptr();
                    // SAFETY: `len` floats, read and written in place.
                    unsafe { mask.apply(cx.isa, position, ptr, ptr, len) };
                    y.round(cx.isa, stage);
                }
            }
            start += len;
        }
    });
}

/// Floats of the buffer that halves go through.
const STAGE: usize = 512;

/// A stream's step of a dropout.
struct Mask {
    key: u64,
    step: u64,
    /// An element goes if the top 24 of its bits are below this.
    threshold: u32,
    scale: f32,
}

impl Mask {
    fn new(p: f32, key: u64, step: u64) -> Mask {
        let threshold = (f64::from(p) * 16_777_216.0).round().clamp(0.0, 16_777_216.0) as u32;
        Mask { key, step, threshold, scale: if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 } }
    }

    /// Applies the mask to `len` positions from `at`.
    ///
    /// # Safety
    /// `x` and `y` have `len` floats each; they are the same or do not overlap.
    unsafe fn apply(&self, isa: Isa, at: u64, x: *const f32, y: *mut f32, len: usize) {
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx2() {
            // SAFETY: the instruction set was detected; the rest is the caller's promise.
            return unsafe { self.apply_avx2(at, x, y, len) };
        }
        let _ = isa;
        // SAFETY: the caller's promise.
        unsafe { self.apply_scalar(at, x, y, len) };
    }

    /// # Safety
    /// As `apply`.
    unsafe fn apply_scalar(&self, at: u64, x: *const f32, y: *mut f32, len: usize) {
        let mut i = 0;
        while i < len {
            let pos = at + i as u64;
            let bits = block_of(self.key, self.step, pos / 4);
            for b in &bits[(pos % 4) as usize..] {
                if i < len {
                    // SAFETY: `i` is below `len`.
                    unsafe { *y.add(i) = if b >> 8 < self.threshold { 0.0 } else { *x.add(i) * self.scale } };
                    i += 1;
                }
            }
        }
    }

    /// Eight blocks at a time, one in each lane.
    ///
    /// # Safety
    /// As `apply`.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn apply_avx2(&self, at: u64, x: *const f32, y: *mut f32, len: usize) {
        use std::arch::x86_64::*;
        let head = len.min((at.next_multiple_of(4) - at) as usize);
        // SAFETY: the first `head` of `len`.
        unsafe { self.apply_scalar(at, x, y, head) };
        let limit = _mm256_set1_epi32(self.threshold as i32 - 1);
        let scale = _mm256_set1_ps(self.scale);
        let mut i = head;
        while i + 32 <= len {
            let block = (at + i as u64) / 4;
            if block as u32 > u32::MAX - 7 {
                // The low word of the counter overflows inside these lanes.
                // SAFETY: 32 elements from `i` are inside `len`.
                unsafe { self.apply_scalar(at + i as u64, x.add(i), y.add(i), 32) };
            } else {
                for (k, bits) in philox_avx2(self.key, self.step, block).into_iter().enumerate() {
                    let keep = _mm256_cmpgt_epi32(_mm256_srli_epi32::<8>(bits), limit);
                    // SAFETY: 32 elements from `i` are inside `len`.
                    unsafe {
                        let v = _mm256_mul_ps(_mm256_loadu_ps(x.add(i + 8 * k)), scale);
                        _mm256_storeu_ps(y.add(i + 8 * k), _mm256_and_ps(v, _mm256_castsi256_ps(keep)));
                    }
                }
            }
            i += 32;
        }
        // SAFETY: what is left of `len`.
        unsafe { self.apply_scalar(at + i as u64, x.add(i), y.add(i), len - i) };
    }
}

/// The 32 words of the blocks `block..block + 8`, in order.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma")]
fn philox_avx2(key: u64, step: u64, block: u64) -> [std::arch::x86_64::__m256i; 4] {
    use std::arch::x86_64::*;
    let word = |v: u64| _mm256_set1_epi32(v as u32 as i32);
    let mut c0 = _mm256_add_epi32(word(block), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    let (mut c1, mut c2, mut c3) = (word(block >> 32), word(step), word(step >> 32));
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    // The high and the low halves of the products of eight words: even and odd lanes apart.
    let product = |c: __m256i, m: u32| {
        let m = _mm256_set1_epi32(m as i32);
        let even = _mm256_mul_epu32(c, m);
        let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(c), m);
        let high = _mm256_blend_epi32::<0b1010_1010>(_mm256_srli_epi64::<32>(even), odd);
        (high, _mm256_blend_epi32::<0b1010_1010>(even, _mm256_slli_epi64::<32>(odd)))
    };
    for _ in 0..10 {
        let (a_high, a_low) = product(c0, MUL[0]);
        let (b_high, b_low) = product(c2, MUL[1]);
        c0 = _mm256_xor_si256(_mm256_xor_si256(b_high, c1), _mm256_set1_epi32(k0 as i32));
        c2 = _mm256_xor_si256(_mm256_xor_si256(a_high, c3), _mm256_set1_epi32(k1 as i32));
        (c1, c3) = (b_low, a_low);
        (k0, k1) = (k0.wrapping_add(BUMP[0]), k1.wrapping_add(BUMP[1]));
    }
    // From a word of each block in each register to whole blocks.
    let (t0, t1) = (_mm256_unpacklo_epi32(c0, c1), _mm256_unpackhi_epi32(c0, c1));
    let (t2, t3) = (_mm256_unpacklo_epi32(c2, c3), _mm256_unpackhi_epi32(c2, c3));
    let (b04, b15) = (_mm256_unpacklo_epi64(t0, t2), _mm256_unpackhi_epi64(t0, t2));
    let (b26, b37) = (_mm256_unpacklo_epi64(t1, t3), _mm256_unpackhi_epi64(t1, t3));
    [
        _mm256_permute2x128_si256::<0x20>(b04, b15),
        _mm256_permute2x128_si256::<0x20>(b26, b37),
        _mm256_permute2x128_si256::<0x31>(b04, b15),
        _mm256_permute2x128_si256::<0x31>(b26, b37),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{FORMATS, HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::contexts;

    /// The known answers that are published with Random123.
    #[test]
    fn known_answers() {
        let rows = [
            ([0; 4], [0; 2], [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                [0xa4093822, 0x299f31d0],
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ];
        for (counter, key, want) in rows {
            assert_eq!(philox(counter, key), want);
        }
    }

    #[test]
    fn any_range_alone() {
        let n = 40_000;
        let cx = Cx::serial();
        let (mut u, mut g) = (vec![0.0; n], vec![0.0; n]);
        uniform(&cx, 5, 9, 1000, -1.0, 1.0, &mut u);
        normal(&cx, 5, 9, 1000, 0.0, 1.0, &mut g);
        for (start, len) in [(0, 0), (0, 1), (1, 5), (3, 1), (17_000, 301), (39_999, 1)] {
            let mut part = vec![0.0; len];
            uniform(&Cx::oracle(), 5, 9, 1000 + start as u64, -1.0, 1.0, &mut part);
            assert_eq!(part, u[start..start + len]);
            normal(&Cx::oracle(), 5, 9, 1000 + start as u64, 0.0, 1.0, &mut part);
            assert_eq!(part, g[start..start + len]);
        }
        let mut other = vec![0.0; n];
        uniform(&cx, 5, 10, 1000, -1.0, 1.0, &mut other);
        assert_ne!(u, other);
    }

    #[test]
    fn distributions() {
        let n = 400_000;
        let mut x = vec![0.0; n];
        let moment = |x: &[f32], k: i32| x.iter().map(|v| f64::from(*v).powi(k)).sum::<f64>() / n as f64;
        uniform(&Cx::serial(), 1, 2, 0, 0.0, 1.0, &mut x);
        assert!(x.iter().all(|v| (0.0..1.0).contains(v)));
        for k in 1..5 {
            assert!((moment(&x, k) - 1.0 / f64::from(k + 1)).abs() < 3e-3);
        }
        normal(&Cx::serial(), 1, 2, 0, 0.0, 1.0, &mut x);
        for (k, want) in [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)] {
            assert!((moment(&x, k) - want).abs() < 0.05, "moment {k}: {}", moment(&x, k));
        }
        let below = |t: f32| x.iter().filter(|v| **v < t).count() as f64 / n as f64;
        for (t, want) in [(-2.0, 0.02275), (-1.0, 0.15866), (0.0, 0.5), (0.5, 0.69146), (1.5, 0.93319)] {
            assert!((below(t) - want).abs() < 3e-3, "below {t}");
        }
        normal(&Cx::serial(), 1, 2, 0, 3.0, 0.5, &mut x);
        assert!((moment(&x, 1) - 3.0).abs() < 3e-3);
    }

    #[test]
    fn own_functions() {
        for i in 1..=10_000 {
            let u = f64::from(i) / 10_000.0;
            assert!((ln_unit(u) - u.ln()).abs() < 1e-12);
            assert!((ln_unit(u * 1e-9) - (u * 1e-9).ln()).abs() < 1e-11);
            let (s, c) = sin_cos_turn(u - 1e-4);
            let a = (u - 1e-4) * std::f64::consts::TAU;
            assert!((s - a.sin()).abs() < 1e-11 && (c - a.cos()).abs() < 1e-11);
        }
    }

    /// To and from halves: what f32 gives, rounded.
    fn halves_draw_the_same(cx: &Cx, at: Positions, x: &[f32]) {
        for (from, to) in HALVES.into_iter().flat_map(|h| FORMATS.map(|other| (h, other))) {
            for (from, to) in [(from, to), (to, from)] {
                let x = OwnedFloats::new(from, x);
                let (mut want, mut got) = (vec![7.0; x.get().len()], OwnedFloats::unset(to, x.get().len()));
                dropout(cx, 0.3, 11, 5, at, Floats::F32(&x.wide()), FloatsMut::F32(&mut want));
                dropout(cx, 0.3, 11, 5, at, x.get(), got.get_mut());
                same_rounded(&format!("{from} to {to}"), &[got], &[OwnedFloats::F32(want)]);
            }
        }
    }

    #[test]
    fn dropout_is_a_function_of_position() {
        // Around the place where the low word of the counter overflows, too.
        for offset in [0, 1, 3, 77, (1u64 << 34) - 100] {
            for n in [0, 1, 7, 31, 32, 33, 100, 40_000] {
                let x: Vec<f32> = (0..n).map(|i| i as f32 + 1.0).collect();
                let (mut a, mut b) = (vec![0.0; n], vec![0.0; n]);
                let at = Positions::from(offset, n);
                dropout(&Cx::oracle(), 0.3, 11, 5, at, Floats::F32(&x), FloatsMut::F32(&mut a));
                dropout(&Cx::serial(), 0.3, 11, 5, at, Floats::F32(&x), FloatsMut::F32(&mut b));
                assert_eq!(a, b);
                for i in 0..n {
                    let pos = offset + i as u64;
                    let gone = unit(block_of(11, 5, pos / 4)[(pos % 4) as usize]) < 0.3;
                    assert_eq!(a[i], if gone { 0.0 } else { x[i] * (1.0 / (1.0 - 0.3)) });
                }
                for cx in contexts() {
                    halves_draw_the_same(&cx, at, &x);
                }
                if n == 40_000 {
                    let zeros = a.iter().filter(|v| **v == 0.0).count();
                    assert!((11_700..12_300).contains(&zeros), "{zeros} of 40000");
                }
            }
        }
        let (x, mut y) = ([1.0; 64], [7.0; 64]);
        dropout(&Cx::serial(), 0.0, 1, 1, Positions::from(0, 64), Floats::F32(&x), FloatsMut::F32(&mut y));
        assert_eq!(x, y);
        dropout(&Cx::serial(), 1.0, 1, 1, Positions::from(0, 64), Floats::F32(&x), FloatsMut::F32(&mut y));
        assert_eq!(y, [0.0; 64]);
    }

    /// Columns of a matrix, however it is cut into them, draw what the whole matrix draws; also where a run is longer than a task.
    #[test]
    fn parts_of_rows_draw_the_mask_of_the_whole() {
        for (rows, cols) in [(1, 50_000), (7, 1), (5, 33), (130, 1000)] {
            let x: Vec<f32> = (0..rows * cols).map(|i| i as f32 + 1.0).collect();
            let mut whole = vec![0.0; x.len()];
            dropout(
                &Cx::serial(),
                0.5,
                3,
                9,
                Positions::from(100, x.len()),
                Floats::F32(&x),
                FloatsMut::F32(&mut whole),
            );
            let cuts = [0, cols / 3, cols / 2, cols];
            for part in cuts.windows(2).map(|w| w[0]..w[1]).filter(|part| !part.is_empty()) {
                let of = |m: &[f32]| -> Vec<f32> {
                    (0..rows).flat_map(|r| m[r * cols..][part.clone()].to_vec()).collect()
                };
                let (first, run) = (100 + part.start as u64, part.len());
                let at = Positions { first, second: None, run, stride: cols as u64 };
                for cx in [Cx::serial(), Cx::oracle()] {
                    halves_draw_the_same(&cx, at, &of(&x));
                    let (x, mut y) = (of(&x), vec![0.0; rows * part.len()]);
                    dropout(&cx, 0.5, 3, 9, at, Floats::F32(&x), FloatsMut::F32(&mut y));
                    assert_eq!(y, of(&whole), "{rows} rows, columns {part:?} of {cols}");
                }
            }
        }
    }

    /// A part with two runs in each row, in their order, draws what the whole matrix draws.
    #[test]
    fn pairs_of_runs_draw_the_mask_of_the_whole() {
        let (rows, cols, run) = (13, 40, 7);
        let x = vec![1.0; rows * cols];
        let mut whole = vec![0.0; x.len()];
        let all = Positions::from(100, x.len());
        dropout(&Cx::serial(), 0.5, 3, 9, all, Floats::F32(&x), FloatsMut::F32(&mut whole));
        for (first, second) in [(0, 33), (7, 14), (20, 1)] {
            let of_row = |r: usize| [first, second].map(|at| whole[r * cols + at..][..run].to_vec()).concat();
            let want: Vec<f32> = (0..rows).flat_map(of_row).collect();
            let stride = cols as u64;
            let at = Positions { first: 100 + first as u64, second: Some(100 + second as u64), run, stride };
            for cx in [Cx::serial(), Cx::oracle()] {
                let (x, mut y) = (vec![1.0; want.len()], vec![0.0; want.len()]);
                dropout(&cx, 0.5, 3, 9, at, Floats::F32(&x), FloatsMut::F32(&mut y));
                assert_eq!(y, want, "runs at {first} and {second}");
            }
        }
    }
}
