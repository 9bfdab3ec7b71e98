//! The copies with sums for AVX-512: sixteen floats at a time, strips of twelve rows.

use std::arch::x86_64::*;

use super::super::super::avx512::{MR, lanes, store_first, store_turned};
use super::super::super::block::{NR, next_rows};
use super::super::super::pack;
use super::{LINES, Order, Panels, Quarters, RowsOperand, in_place};

/// The seven of one vector of each quarter, in the order of the slots.
///
/// # Safety
/// The CPU has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn seven<O: Order>(quarters: [__m512; 4]) -> [__m512; 7] {
    let mut slots = [_mm512_setzero_ps(); 7];
    for (s, quarter) in O::QUARTERS.into_iter().zip(quarters) {
        slots[s] = quarter;
    }
    // SAFETY: the caller's promise.
    for (s, sum) in O::SUMS.into_iter().zip(unsafe { O::sums(quarters) }) {
        slots[s] = sum;
    }
    slots
}

/// The twin of [`super::panels`].
///
/// # Safety
/// The CPU has AVX-512; the quarters have those columns and steps; `target` has room for `7 * 16 * kc` floats per
/// panel.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(in super::super) unsafe fn panels(from: &Quarters, cols: usize, kc: usize, target: *mut f32) {
    let slot = kc * NR;
    let whole = if from.own == 1 { cols / NR } else { 0 };
    // SAFETY: columns below `cols` and steps below `kc` are read; panel and slot are inside the target.
    unsafe {
        for l0 in (0..kc).step_by(LINES) {
            let l1 = (l0 + LINES).min(kc);
            for at in from.at {
                pack::prefetch(at, from.k, l1, (l1 + LINES).min(kc), whole * NR);
            }
            for panel in 0..whole {
                let to = target.add(7 * panel * slot);
                for l in l0..l1 {
                    let x = from.at.map(|at| _mm512_loadu_ps(at.add(l * from.k + panel * NR)));
                    for (s, x) in seven::<Panels>(x).into_iter().enumerate() {
                        _mm512_storeu_ps(to.add(s * slot + l * NR), x);
                    }
                }
            }
        }
        for panel in whole..cols.div_ceil(NR) {
            let to = target.add(7 * panel * slot);
            let cols = NR.min(cols - panel * NR);
            for (at, s) in from.at.into_iter().zip(Panels::QUARTERS) {
                let at = at.add(panel * NR * from.own);
                pack::panel(at, from.own, from.k, cols, kc, to.add(s * slot));
            }
            in_place::<Panels>(to, slot, slot);
        }
    }
}

/// The twin of [`super::strips`], for strips as tiles of twelve rows read them.
///
/// # Safety
/// The CPU has AVX-512; the quarters have those rows and steps; a slot has `rows * kc` floats.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(in super::super) unsafe fn strips(
    from: &Quarters,
    rows: usize,
    kc: usize,
    target: *mut f32,
    slot: usize,
) {
    // SAFETY: rows below `rows` and steps below `kc` are read; strips are inside their slots.
    unsafe {
        for l0 in (0..kc).step_by(NR) {
            let l1 = (l0 + NR).min(kc);
            if from.own == 1 {
                for at in from.at {
                    pack::prefetch(at, from.k, l1, (l1 + NR).min(kc), rows);
                }
            }
            let mut i = 0;
            while i < rows {
                let strip = next_rows(rows - i, MR);
                let to = target.add(i * kc);
                if from.own == 1 {
                    let mask = lanes(strip);
                    for l in l0..l1 {
                        let x = from.at.map(|at| _mm512_maskz_loadu_ps(mask, at.add(l * from.k + i)));
                        for (s, x) in seven::<RowsOperand>(x).into_iter().enumerate() {
                            pack::avx512::store_step(to.add(s * slot), strip, l, kc, x);
                        }
                    }
                } else {
                    let mask = lanes(l1 - l0);
                    for (at, s) in from.at.into_iter().zip(RowsOperand::QUARTERS) {
                        let mut x = [_mm512_setzero_ps(); MR];
                        for r in 0..strip {
                            x[r] = _mm512_maskz_loadu_ps(mask, at.add((i + r) * from.own + l0));
                        }
                        store_strip(&x, strip, to.add(s * slot + l0 * strip), l1 - l0);
                    }
                }
                i += strip;
            }
            if from.own == 1 {
                continue;
            }
            // Four quarters are turned instead of seven sums; and all strips before the first is read again, so that
            // partial stores have reached the cache by then.
            let mut i = 0;
            while i < rows {
                let strip = next_rows(rows - i, MR);
                sums_in_place::<RowsOperand>(target.add(i * kc + l0 * strip), slot, strip * (l1 - l0));
                i += strip;
            }
        }
    }
}

/// Makes the sums of quarters that are in their places, `slot` floats apart.
///
/// # Safety
/// The CPU has AVX-512; `at` has seven slots, whose first `len` floats may be read and written.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn sums_in_place<O: Order>(at: *mut f32, slot: usize, len: usize) {
    for i in (0..len).step_by(NR) {
        let mask = lanes(NR.min(len - i));
        // SAFETY: inside the slots, by the caller's promise.
        unsafe {
            let quarters = O::QUARTERS.map(|s| _mm512_maskz_loadu_ps(mask, at.add(s * slot + i)));
            for (s, sum) in O::SUMS.into_iter().zip(O::sums(quarters)) {
                store_first(at.add(s * slot + i), mask, sum);
            }
        }
    }
}

/// Stores `rows` rows of at most sixteen steps of k as steps of `rows` floats.
///
/// # Safety
/// The CPU has AVX-512; `to` has room for `rows * steps` floats.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn store_strip(x: &[__m512; MR], rows: usize, to: *mut f32, steps: usize) {
    macro_rules! store {
        ($($n:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($n => unsafe { store_turned::<$n>(*x, to, $n, steps, false) },)*
                _ => unreachable!("a strip of {rows} rows"),
            }
        };
    }
    store!(1 2 3 4 5 6 7 8 9 10 11 12);
}
