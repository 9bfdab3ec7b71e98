//! The transpose of a strip that is only a few elements wide on one side: channels of an image beside its pixels. With
//! AVX-512 sixteen pixels go together: `C` vectors on one side, `C` on the other, and each vector of the result takes
//! its elements from all `C` sources by one permutation each, blended by masks.

use std::arch::x86_64::*;

/// From 2 to this many channels are worth it: that many masks stay in registers.
pub(super) const CHANNELS_MAX: usize = 7;

/// Pixels that go together: one vector.
const PIXELS: usize = 16;

/// How vectors of channels (`C` of 16 pixels each) and vectors of pixels (`C` of 16 floats each) make each other.
struct Mix<const C: usize>;

impl<const C: usize> Mix<C> {
    /// For lane `l` of interleaved vector `k`: the pixel, and for each channel the lanes that are its.
    const WEAVE: [([i32; PIXELS], [u16; C]); C] = {
        let mut table = [([0; PIXELS], [0; C]); C];
        let mut at = 0;
        while at < C * PIXELS {
            let (k, l) = (at / PIXELS, at % PIXELS);
            table[k].0[l] = (at / C) as i32;
            table[k].1[at % C] |= 1 << l;
            at += 1;
        }
        table
    };

    /// For pixel `l` of channel `c`: the lane of its interleaved vector, and for each of these the pixels it has.
    const PART: [([i32; PIXELS], [u16; C]); C] = {
        let mut table = [([0; PIXELS], [0; C]); C];
        let mut at = 0;
        while at < C * PIXELS {
            let (c, l) = (at % C, at / C);
            table[c].0[l] = (at % PIXELS) as i32;
            table[c].1[at / PIXELS] |= 1 << l;
            at += 1;
        }
        table
    };
}

/// The mask of the first `n` lanes, all if there are more.
fn first(n: usize) -> __mmask16 {
    if n >= PIXELS { !0 } else { (1 << n) - 1 }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn mix<const C: usize>(table: &[([i32; PIXELS], [u16; C]); C], source: [__m512; C]) -> [__m512; C] {
    let mut mixed = [_mm512_setzero_ps(); C];
    // Interleaved vectors take turns with the masks: in this order each is used `C` times in a row.
    for turn in 0..C {
        for k in 0..C {
            let c = (turn + k * PIXELS) % C;
            // SAFETY: 16 numbers of 4 bytes.
            let idx = unsafe { _mm512_loadu_si512(table[k].0.as_ptr().cast()) };
            mixed[k] = _mm512_mask_permutexvar_ps(mixed[k], table[k].1[c], idx, source[c]);
        }
    }
    mixed
}

/// `t[i * C + c] = s[c * s_stride + i]` for `i` below `n`.
///
/// # Safety
/// The CPU has AVX-512; both sides have those elements and do not overlap.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(super) unsafe fn interleave<const C: usize>(s: *const f32, s_stride: usize, n: usize, t: *mut f32) {
    for i in (0..n).step_by(PIXELS) {
        let (pixels, floats) = (n - i, (n - i) * C);
        let mut planes = [_mm512_setzero_ps(); C];
        // SAFETY: masks cut both sides at the last pixel.
        unsafe {
            for c in 0..C {
                planes[c] = _mm512_maskz_loadu_ps(first(pixels), s.add(c * s_stride + i));
            }
            for (k, v) in mix(&Mix::<C>::WEAVE, planes).into_iter().enumerate() {
                let at = t.wrapping_add(i * C + k * PIXELS);
                _mm512_mask_storeu_ps(at, first(floats.saturating_sub(k * PIXELS)), v);
            }
        }
    }
}

/// `t[c * t_stride + i] = s[i * C + c]` for `i` below `n`.
///
/// # Safety
/// As for [`interleave`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(super) unsafe fn part<const C: usize>(s: *const f32, n: usize, t: *mut f32, t_stride: usize) {
    for i in (0..n).step_by(PIXELS) {
        let (pixels, floats) = (n - i, (n - i) * C);
        let mut woven = [_mm512_setzero_ps(); C];
        // SAFETY: masks cut both sides at the last pixel.
        unsafe {
            for k in 0..C {
                let at = s.wrapping_add(i * C + k * PIXELS);
                woven[k] = _mm512_maskz_loadu_ps(first(floats.saturating_sub(k * PIXELS)), at);
            }
            for (c, v) in mix(&Mix::<C>::PART, woven).into_iter().enumerate() {
                _mm512_mask_storeu_ps(t.add(c * t_stride + i), first(pixels), v);
            }
        }
    }
}
