//! The sums of an operand's quarters, made while the quarters are copied to where tiles read them.

use std::arch::x86_64::*;

use super::super::avx2::MR;
use super::super::block::{NR, next_rows};
use super::super::pack;

pub(super) mod avx512;

/// Seven slots for one operand, in the order in which the products are run: three are quarters, and four are sums.
trait Order {
    /// The slots of the quarters 11, 12, 21, 22. One of them is in [`Self::SUMS`] too, and the sum stays.
    const QUARTERS: [usize; 4];
    /// The slots of the sums.
    const SUMS: [usize; 4];
    /// The sums of a vector of each quarter.
    ///
    /// # Safety
    /// The CPU has the vector's instructions.
    unsafe fn sums<V: Vector>(quarters: [V; 4]) -> [V; 4];
}

/// Eight floats, or sixteen.
trait Vector: Copy {
    /// # Safety
    /// The CPU has the vector's instructions.
    unsafe fn plus(self, other: Self) -> Self;
    /// # Safety
    /// The CPU has the vector's instructions.
    unsafe fn minus(self, other: Self) -> Self;
}
impl Vector for __m256 {
    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm256_add_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn minus(self, other: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm256_sub_ps(self, other) }
    }
}
impl Vector for __m512 {
    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm512_add_ps(self, other) }
    }
    #[inline(always)]
    unsafe fn minus(self, other: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { _mm512_sub_ps(self, other) }
    }
}

/// The rows' operand: A11, A12, S2, S3, A22, S1, S4.
struct RowsOperand;
impl Order for RowsOperand {
    const QUARTERS: [usize; 4] = [0, 1, 5, 4];
    const SUMS: [usize; 4] = [5, 2, 3, 6];
    #[inline(always)]
    unsafe fn sums<V: Vector>([a11, a12, a21, a22]: [V; 4]) -> [V; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let s1 = a21.plus(a22);
            let s2 = s1.minus(a11);
            [s1, s2, a11.minus(a21), a12.minus(s2)]
        }
    }
}

/// The columns' operand: B11, B21, T2, T3, −T4, T1, B22.
struct Panels;
impl Order for Panels {
    const QUARTERS: [usize; 4] = [0, 5, 1, 6];
    const SUMS: [usize; 4] = [5, 2, 3, 4];
    #[inline(always)]
    unsafe fn sums<V: Vector>([b11, b12, b21, b22]: [V; 4]) -> [V; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let t1 = b12.minus(b11);
            let t2 = b22.minus(t1);
            [t1, t2, b22.minus(b12), b21.minus(t2)]
        }
    }
}

/// Where the quarters of a block are: elements are `own` apart along the dim shared with C, `k` apart along k.
#[derive(Clone, Copy)]
pub(super) struct Quarters {
    pub(super) at: [*const f32; 4],
    pub(super) own: usize,
    pub(super) k: usize,
}

/// Steps of k that are copied at a time: long enough to fill whole lines, few enough that the sources' stay in L1.
const LINES: usize = 8;

/// Makes the sums of quarters that are in their places, `slot` floats apart.
///
/// # Safety
/// The CPU has AVX2; `at` has seven slots, whose first `len` floats, a multiple of 8, may be read and written.
#[target_feature(enable = "avx2,fma")]
unsafe fn in_place<O: Order>(at: *mut f32, slot: usize, len: usize) {
    for i in (0..len).step_by(8) {
        // SAFETY: inside the slots, by the caller's promise.
        unsafe {
            let sums = O::sums(O::QUARTERS.map(|s| _mm256_loadu_ps(at.add(s * slot + i))));
            for (s, sum) in O::SUMS.into_iter().zip(sums) {
                _mm256_storeu_ps(at.add(s * slot + i), sum);
            }
        }
    }
}

/// Eight floats of each quarter, from `offset` on, to the seven slots.
///
/// # Safety
/// The CPU has AVX2; the floats are in the quarters, and in the slots at `to`.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn eight<O: Order>(from: &Quarters, offset: usize, to: *mut f32, slot: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let x = from.at.map(|at| _mm256_loadu_ps(at.add(offset)));
        for (s, quarter) in O::QUARTERS.into_iter().zip(x) {
            if !O::SUMS.contains(&s) {
                _mm256_storeu_ps(to.add(s * slot), quarter);
            }
        }
        for (s, sum) in O::SUMS.into_iter().zip(O::sums(x)) {
            _mm256_storeu_ps(to.add(s * slot), sum);
        }
    }
}

/// The panels of `cols` columns (the last may not be whole) and `kc` steps of k: seven of a panel, then seven of the next.
///
/// # Safety
/// The CPU has AVX2; the quarters have those columns and steps; `target` has room for `7 * 16 * kc` floats per panel.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn panels(from: &Quarters, cols: usize, kc: usize, target: *mut f32) {
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
                    for half in [0, 8] {
                        let offset = l * from.k + panel * NR + half;
                        eight::<Panels>(from, offset, to.add(l * NR + half), slot);
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

/// The strips of `rows` rows and `kc` steps of k, seven times, `slot` floats apart.
///
/// # Safety
/// The CPU has AVX2; the quarters have those rows and steps; a slot has `rows * kc` floats and eight more.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn strips(from: &Quarters, rows: usize, kc: usize, target: *mut f32, slot: usize) {
    // SAFETY: rows below `rows` and steps below `kc` are read; strips are inside their slots. Six floats are copied as
    // eight where both the rows and the strip go on.
    unsafe {
        let mut eights = 0;
        if from.own == 1 {
            while eights + MR + 2 <= rows && next_rows(rows - eights, MR) == MR {
                eights += MR;
            }
        }
        for l0 in (0..kc).step_by(LINES) {
            let l1 = (l0 + LINES).min(kc);
            if eights > 0 {
                for at in from.at {
                    pack::prefetch(at, from.k, l1, (l1 + LINES).min(kc), rows);
                }
            }
            for i in (0..eights).step_by(MR) {
                for l in l0..l1.min(kc - 1) {
                    eight::<RowsOperand>(from, l * from.k + i, target.add(i * kc + l * MR), slot);
                }
            }
        }
        // The last step's eight would reach into the next strip.
        for i in (0..eights).step_by(MR) {
            let mut last = [0f32; 7 * 8];
            eight::<RowsOperand>(from, (kc - 1) * from.k + i, last.as_mut_ptr(), 8);
            for s in 0..7 {
                let to = target.add(s * slot + i * kc + (kc - 1) * MR);
                std::ptr::copy_nonoverlapping(last.as_ptr().add(8 * s), to, MR);
            }
        }
        let (done, left) = (eights * kc, rows - eights);
        for (at, s) in from.at.into_iter().zip(RowsOperand::QUARTERS) {
            pack::strips(at.add(eights * from.own), from.own, from.k, left, kc, target.add(s * slot + done));
        }
        in_place::<RowsOperand>(target.add(done), slot, (left * kc).next_multiple_of(8));
    }
}
