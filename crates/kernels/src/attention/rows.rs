//! Passes over one row of scores, for each instruction set.

use crate::simd::twins;
#[cfg(target_arch = "x86_64")]
use crate::tile::{Avx2, Avx512};

/// A multiple of the lanes of any vector: rows are padded to it, so that sums have the same zeros with all of them.
const FULL: usize = 16;

/// The passes of an instruction set.
///
/// # Safety
/// All functions: the CPU has the instructions.
pub(super) trait RowPasses {
    /// Makes a row of `n` scores into `exp(scale·s + mask − max)` and gives `(max, sum)`, the sum 0 if all are −∞. At least
    /// 16 zeros follow: tiles on the diagonal read up to `ROWS − 1` of them.
    ///
    /// # Safety
    /// The CPU has the instruction set of the implementation.
    unsafe fn exponentials(row: &mut [f32], n: usize, scale: f32, mask: Option<&[f32]>) -> (f32, f32);
    /// Makes a row of `n` scores in `p` into probabilities, and `dp` in `ds` into `p·(dp − delta)`. At least 16 zeros
    /// follow in both.
    ///
    /// # Safety
    /// As for [`RowPasses::exponentials`].
    unsafe fn probabilities(
        p: &mut [f32],
        ds: &mut [f32],
        n: usize,
        scale: f32,
        mask: Option<&[f32]>,
        lse: f32,
        delta: f32,
    );
    /// The sum of products.
    ///
    /// # Safety
    /// As for [`RowPasses::exponentials`].
    unsafe fn dot(a: &[f32], b: &[f32]) -> f32;
    /// `dst = scale·src`, over the shorter length.
    ///
    /// # Safety
    /// As for [`RowPasses::exponentials`].
    unsafe fn scaled_copy(scale: f32, src: &[f32], dst: &mut [f32]);
}

#[cfg(target_arch = "x86_64")]
macro_rules! passes {
    ($name:ident, $twin:ident) => {
        impl RowPasses for $name {
            unsafe fn exponentials(
                row: &mut [f32],
                n: usize,
                scale: f32,
                mask: Option<&[f32]>,
            ) -> (f32, f32) {
                // SAFETY: the CPU has the instructions, by the caller's promise.
                unsafe { $twin::exponentials(row, n, scale, mask) }
            }
            unsafe fn probabilities(
                p: &mut [f32],
                ds: &mut [f32],
                n: usize,
                scale: f32,
                mask: Option<&[f32]>,
                lse: f32,
                delta: f32,
            ) {
                // SAFETY: as above.
                unsafe { $twin::probabilities(p, ds, n, scale, mask, lse, delta) }
            }
            unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
                // SAFETY: as above.
                unsafe { $twin::dot(a, b) }
            }
            unsafe fn scaled_copy(scale: f32, src: &[f32], dst: &mut [f32]) {
                // SAFETY: as above.
                unsafe { $twin::scaled_copy(scale, src, dst) }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
passes!(Avx2, avx2);
#[cfg(target_arch = "x86_64")]
passes!(Avx512, avx512);

twins! {
    pub(super) fn exponentials(row: &mut [f32], n: usize, scale: f32, mask: Option<&[f32]>) -> (f32, f32) {
        let (body, rest) = row.split_at_mut(n.next_multiple_of(FULL));
        rest[..FULL].fill(0.0);
        if scale != 1.0 {
            for s in &mut body[..n] {
                *s *= scale;
            }
        }
        if let Some(mask) = mask {
            for (s, m) in body[..n].iter_mut().zip(&mask[..n]) {
                *s += m;
            }
        }
        // Lanes after the last key become zeros, like any masked key.
        body[n..].fill(f32::NEG_INFINITY);
        let mut most = splat(f32::NEG_INFINITY);
        for s in body.chunks_exact(WIDTH) {
            // SAFETY: the chunk has `WIDTH` floats.
            most = max(most, unsafe { load(s.as_ptr()) });
        }
        let most = largest(most);
        // The maximum may ignore NaN, which must not be lost here.
        if most == f32::NEG_INFINITY && body.iter().all(|&s| s == most) {
            body.fill(0.0);
            return (most, 0.0);
        }
        let (shift, mut sum) = (splat(most), LaneSum::new());
        for s in body.chunks_exact_mut(WIDTH) {
            // SAFETY: the chunk has `WIDTH` floats.
            unsafe {
                let e = exp(sub(load(s.as_ptr()), shift));
                sum.push(e);
                store(s.as_mut_ptr(), e);
            }
        }
        (most, sum.total())
    }

    pub(super) fn probabilities(
        p: &mut [f32],
        ds: &mut [f32],
        n: usize,
        scale: f32,
        mask: Option<&[f32]>,
        lse: f32,
        delta: f32,
    ) {
        let full = n.next_multiple_of(FULL);
        let (p, p_rest) = p.split_at_mut(full);
        let (ds, ds_rest) = ds.split_at_mut(full);
        p_rest[..FULL].fill(0.0);
        ds_rest[..FULL].fill(0.0);
        if lse == f32::NEG_INFINITY {
            p.fill(0.0);
            ds.fill(0.0);
            return;
        }
        if scale != 1.0 {
            for s in &mut p[..n] {
                *s *= scale;
            }
        }
        if let Some(mask) = mask {
            for (s, m) in p[..n].iter_mut().zip(&mask[..n]) {
                *s += m;
            }
        }
        p[n..].fill(f32::NEG_INFINITY);
        // Scores after the last key are products with zeros or with keys not seen, and finite or not, p = 0 must win.
        ds[n..].fill(0.0);
        let (lse, delta) = (splat(lse), splat(delta));
        for (p, ds) in p.chunks_exact_mut(WIDTH).zip(ds.chunks_exact_mut(WIDTH)) {
            // SAFETY: the chunks have `WIDTH` floats.
            unsafe {
                let e = exp(sub(load(p.as_ptr()), lse));
                let dp = load(ds.as_ptr());
                store(p.as_mut_ptr(), e);
                store(ds.as_mut_ptr(), mul(e, sub(dp, delta)));
            }
        }
    }

    /// Written out: two iterators over chunks compile to code with a mask per lane, which took a tenth of backward.
    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let n = a.len().min(b.len());
        let ((a, a_rest), (b, b_rest)) = (a[..n].as_chunks::<WIDTH>(), b[..n].as_chunks::<WIDTH>());
        let mut sum = LaneSum::new();
        for (a, b) in a.iter().zip(b) {
            // SAFETY: both have `WIDTH` floats.
            unsafe { sum.push_product(load(a.as_ptr()), load(b.as_ptr())) };
        }
        let rest = n % WIDTH;
        if rest > 0 {
            // SAFETY: both have `rest` floats left.
            unsafe { sum.push_product(load_first(a_rest.as_ptr(), rest), load_first(b_rest.as_ptr(), rest)) };
        }
        sum.total()
    }

    pub(super) fn scaled_copy(scale: f32, src: &[f32], dst: &mut [f32]) {
        for (y, x) in dst.iter_mut().zip(src) {
            *y = scale * x;
        }
    }
}
