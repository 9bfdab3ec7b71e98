//! Copies of operands as units of pairs: 16 rows of A, or 16 columns of B, by 32 steps of k, padded with zeros.

use polyreme_dtype::bf16;

use super::super::pack::transpose8;
use super::RUN;
use super::blocks::{UNIT, UNIT_LEN};
use crate::convert::bf16_from_f32;
use crate::simd::twins;

/// A unit in rows of 16 pairs, the earlier step of k in the lower half of each.
type Unit = [[u32; UNIT]; UNIT];

/// What is stored as, or rounded to, bf16.
pub(super) trait Rounded: Copy {
    fn bits(self) -> u16;
}

impl Rounded for bf16 {
    #[inline(always)]
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

impl Rounded for f32 {
    #[inline(always)]
    fn bits(self) -> u16 {
        bf16_from_f32(self).to_bits()
    }
}

/// A part of an operand: strips of A or panels of B, by a block of k.
#[derive(Clone, Copy)]
pub(super) struct Part<'a, T> {
    /// The operand from the part's first element on.
    pub(super) x: &'a [T],
    /// From one row of A, or column of B, to the next.
    pub(super) own: usize,
    /// From one step of k to the next.
    pub(super) k: usize,
    /// How many rows of A, or columns of B.
    pub(super) n_own: usize,
    /// How many steps of k.
    pub(super) n_k: usize,
}

#[inline(always)]
fn pair(early: u16, late: u16) -> u32 {
    u32::from(early) | u32::from(late) << 16
}

impl<T: Rounded> Part<'_, T> {
    /// Writes the unit from `(own, k)` on, each of its rows a row of A or a column of B. Rows along k are contiguous.
    #[inline(always)]
    fn along_k(&self, own: usize, k: usize, unit: &mut Unit) {
        *unit = [[0; UNIT]; UNIT];
        let n_k = RUN.min(self.n_k - k);
        for (r, row) in unit.iter_mut().enumerate().take(self.n_own - own) {
            let from = &self.x[(own + r) * self.own + k..][..n_k];
            if let Ok(from) = <&[T; RUN]>::try_from(from) {
                // Pairs are neighbours in memory: on x86 the lower half comes first.
                let mut halves = [0; RUN];
                for l in 0..RUN {
                    halves[l] = from[l].bits();
                }
                // SAFETY: both are 64 bytes of any bits.
                *row = unsafe { std::mem::transmute::<[u16; RUN], [u32; UNIT]>(halves) };
            } else {
                for (l, x) in from.iter().enumerate() {
                    row[l / 2] |= u32::from(x.bits()) << (16 * (l % 2));
                }
            }
        }
    }

    /// The same transposed: each of its rows a pair of steps of k. Rows along the other dim are contiguous.
    #[inline(always)]
    fn along_own(&self, own: usize, k: usize, unit: &mut Unit) {
        *unit = [[0; UNIT]; UNIT];
        let n_own = UNIT.min(self.n_own - own);
        let n_k = RUN.min(self.n_k - k);
        for (p, row) in unit.iter_mut().enumerate().take(n_k.div_ceil(2)) {
            let early = &self.x[(k + 2 * p) * self.k + own..][..n_own];
            let late = if 2 * p + 1 < n_k { &self.x[(k + 2 * p + 1) * self.k + own..][..n_own] } else { &[] };
            if let (Ok(early), Ok(late)) = (<&[T; UNIT]>::try_from(early), <&[T; UNIT]>::try_from(late)) {
                let mut pairs = [0; UNIT];
                for r in 0..UNIT {
                    pairs[r] = pair(early[r].bits(), late[r].bits());
                }
                *row = pairs;
            } else {
                for r in 0..n_own {
                    row[r] = pair(early[r].bits(), late.get(r).map_or(0, |x| x.bits()));
                }
            }
        }
    }

    /// As `along_k`, for any strides.
    fn anywhere(&self, own: usize, k: usize, unit: &mut Unit) {
        *unit = [[0; UNIT]; UNIT];
        for (r, row) in unit.iter_mut().enumerate().take(self.n_own - own) {
            for l in 0..RUN.min(self.n_k - k) {
                let x = self.x[(own + r) * self.own + (k + l) * self.k];
                row[l / 2] |= u32::from(x.bits()) << (16 * (l % 2));
            }
        }
    }
}

twins! {
    /// Writes the transpose of a unit.
    fn transpose(unit: &Unit, turned: &mut Unit) {
        let (from, to) = (unit.as_ptr().cast::<f32>(), turned.as_mut_ptr().cast::<f32>());
        for (i, j) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            // SAFETY: the CPU has AVX2; both units have 16 rows of 16, and this is a quarter of each. Floats are only moved.
            unsafe { transpose8(from.add(i * UNIT + j), UNIT, to.add(j * UNIT + i)) };
        }
    }

    /// Copies a part, run after run of each strip or panel. With `TURNED` the rows of units are pairs of steps of k, as B
    /// wants them; otherwise they are the rows of A.
    pub(crate) fn copy<const TURNED: bool, T: Rounded>(part: &Part<T>, target: &mut [[u32; UNIT_LEN]]) {
        let (n_units, runs) = (part.n_own.div_ceil(UNIT), part.n_k.div_ceil(RUN).max(1));
        assert_eq!(target.len(), n_units * runs, "units of the part");
        if part.n_k == 0 {
            return target.as_flattened_mut().fill(0);
        }
        let mut other = [[0; UNIT]; UNIT];
        if part.k == 1 || part.own != 1 {
            for (at, to) in target.iter_mut().enumerate() {
                let (own, k) = (at / runs * UNIT, at % runs * RUN);
                let unit = if TURNED { &mut other } else { rows_of(to) };
                if part.k == 1 {
                    part.along_k(own, k, unit);
                } else {
                    part.anywhere(own, k, unit);
                }
                if TURNED {
                    transpose(&other, rows_of(to));
                }
            }
        } else {
            // Along the rows of the source, which are far apart.
            for run in 0..runs {
                for i in 0..n_units {
                    let to = rows_of(&mut target[i * runs + run]);
                    if TURNED {
                        part.along_own(i * UNIT, run * RUN, to);
                    } else {
                        part.along_own(i * UNIT, run * RUN, &mut other);
                        transpose(&other, to);
                    }
                }
            }
        }
    }
}

/// A unit by its rows.
#[inline(always)]
fn rows_of(unit: &mut [u32; UNIT_LEN]) -> &mut Unit {
    let rows = unit.as_chunks_mut::<UNIT>().0;
    rows.try_into().expect("a unit has 16 rows")
}
