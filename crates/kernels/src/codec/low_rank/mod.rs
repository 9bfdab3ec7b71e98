//! Matrices as products of thin factors (PowerSGD, Vogels et al. 2019): what a sum of gradients needs to travel as `r` columns and
//! `r` rows in place of all its numbers.
//!
//! A rank has a matrix `M` of `rows × cols`: its gradient and what earlier messages lost of it. All ranks have the same `Q`, `cols × r`, the
//! right factor of the last sum. One sum is
//!
//! 1. `P = M Q` ([`LowRankMatrix::left`]); the ranks' `P` are added up;
//! 2. the columns of `P` are made orthogonal and of length 1 ([`LowRankMatrix::orthogonalise`]);
//! 3. `Q = Mᵀ P` ([`LowRankMatrix::right`]); the ranks' `Q` are added up;
//! 4. the sum is taken to be `P Qᵀ`, and the rank keeps `M - P Qₒᵀ`, with its own `Qₒ` of step 3 ([`LowRankMatrix::expand`]).
//!
//! This is a step of power iteration that goes on from message to message. `P Pᵀ M` is the part of `M` that lies in the span of `P`, so
//! what a rank keeps is never longer than `M`, and what all keep together is exactly what the sum lacks.
//!
//! # The same bits on all ranks
//! Steps 1 and 3 are products of a rank's own numbers, by the kernels' gemm. Steps 2 and 4 are computed by each rank from the same
//! numbers and must come to the same bits, on other CPUs too: they add in a fixed order and without fused multiplications.
//!
//! # Columns of nothing
//! A column of `Q` that is zero would stay so. Before a sum it gets numbers that follow from its place ([`LowRankMatrix::begin`]): so
//! zeros are a fine beginning, and a column that has become zero (a gradient of a lower rank) is tried anew. A column of `P` that depends
//! on those before it, up to rounding, becomes zero rather than noise of length 1. A matrix with a number that is not finite becomes NaN and leaves
//! no residual, and its factor begins anew.
//!
//! Factors lie transposed, a column after the other: `Pᵀ` is `r × rows`, `Qᵀ` is `r × cols`.
//!
//! # Layout
//! [`LowRankMatrix`]: the steps. `layout`: what of a bucket travels as factors, and where.

mod layout;
#[cfg(test)]
mod tests;

pub use layout::LowRankLayout;

use crate::gemm::{Gemm, Strides};
use crate::lanes::twin;
use crate::{Cx, Isa, Serial};

/// A column whose part outside of those before it is shorter than this share of it depends on them: what is left is rounding.
const DEPENDENT: f64 = 1e-6;

/// A matrix of a bucket that travels as factors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LowRankMatrix {
    /// Its first number in the bucket.
    pub at: usize,
    /// Rows: the tensor's first dim.
    pub rows: usize,
    /// Columns: all its other dims.
    pub cols: usize,
    /// Columns of its factors.
    pub rank: usize,
}

impl LowRankMatrix {
    /// How a tensor travels: as factors, if it has at least two dims and they are at most half as many numbers as it has.
    pub fn of(at: usize, dims: &[usize], rank: usize) -> Option<LowRankMatrix> {
        let (rows, rest) = dims.split_first().filter(|(_, rest)| !rest.is_empty())?;
        let (rows, cols) = (*rows, rest.iter().product::<usize>());
        let rank = rank.min(rows).min(cols);
        (2 * rank * (rows + cols) <= rows * cols && rank > 0).then_some(LowRankMatrix {
            at,
            rows,
            cols,
            rank,
        })
    }

    /// Numbers of the matrix.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether it has no numbers, which [`LowRankMatrix::of`] never makes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Numbers of `P`.
    pub fn left_len(&self) -> usize {
        self.rank * self.rows
    }

    /// Numbers of `Q`.
    pub fn right_len(&self) -> usize {
        self.rank * self.cols
    }

    /// Floats that the products need beside their operands.
    pub fn scratch_len(&self) -> usize {
        self.left_product().scratch_len(1).max(self.right_product().scratch_len(1))
    }

    /// Columns of `q` that are zero get numbers that follow from their place.
    pub fn begin(&self, q: &mut [f32]) {
        for (j, column) in q.chunks_exact_mut(self.cols).enumerate() {
            if column.iter().all(|x| *x == 0.0) {
                let seed = (self.at as u64) << 8 | j as u64;
                column.iter_mut().enumerate().for_each(|(i, x)| *x = scattered(seed, i as u64));
            }
        }
    }

    /// `P = M Q`.
    pub fn left(&self, isa: Isa, m: &[f32], q: &[f32], p: &mut [f32], scratch: &mut [f32]) {
        let cx = Cx { isa, par: &Serial };
        self.left_product().run(&cx, q, m, p, None, scratch);
    }

    /// `Q = Mᵀ P`.
    pub fn right(&self, isa: Isa, m: &[f32], p: &[f32], q: &mut [f32], scratch: &mut [f32]) {
        let cx = Cx { isa, par: &Serial };
        self.right_product().run(&cx, p, m, q, None, scratch);
    }

    /// Makes the columns of `p` orthogonal and of length 1, or zero where they depend on those before. Whether all its numbers were
    /// finite; if not, it is zero.
    pub fn orthogonalise(&self, p: &mut [f32]) -> bool {
        if !p.iter().all(|x| x.is_finite()) {
            p.fill(0.0);
            return false;
        }
        for j in 0..self.rank {
            let (before, rest) = p.split_at_mut(j * self.rows);
            let column = &mut rest[..self.rows];
            let whole = length(column);
            // Twice, because the first time leaves rounding errors of what is taken away.
            for _ in 0..2 {
                for other in before.chunks_exact(self.rows) {
                    let share = dot(column, other) as f32;
                    column.iter_mut().zip(other).for_each(|(x, y)| *x -= share * y);
                }
            }
            let left = length(column);
            let scale = if left > whole * DEPENDENT && left > 0.0 { 1.0 / left } else { 0.0 };
            column.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32);
        }
        true
    }

    /// Writes `P Qᵀ`, and takes `P Qₒᵀ` away from the residual, which has `M`.
    pub fn expand(&self, isa: Isa, p: &[f32], [q, own]: [&[f32]; 2], sum: &mut [f32], residual: &mut [f32]) {
        assert!(sum.len() == self.len() && residual.len() == self.len(), "a number of each for each");
        assert!(p.len() == self.left_len() && q.len() == self.right_len() && own.len() == q.len(), "factors");
        expand_rows(isa, p, q, own, sum, residual, self.cols);
    }

    /// `Pᵀ = Qᵀ Mᵀ`.
    fn left_product(&self) -> Gemm {
        let LowRankMatrix { rows, cols, rank, .. } = *self;
        Gemm {
            batch: 1,
            m: rank,
            n: rows,
            k: cols,
            a: Strides { batch: 0, row: cols, col: 1 },
            b: Strides { batch: 0, row: 1, col: cols },
            c: Strides { batch: 0, row: rows, col: 1 },
            accumulate: false,
            strict: true,
        }
    }

    /// `Qᵀ = Pᵀ M`.
    fn right_product(&self) -> Gemm {
        let LowRankMatrix { rows, cols, rank, .. } = *self;
        Gemm {
            batch: 1,
            m: rank,
            n: cols,
            k: rows,
            a: Strides { batch: 0, row: rows, col: 1 },
            b: Strides { batch: 0, row: cols, col: 1 },
            c: Strides { batch: 0, row: cols, col: 1 },
            accumulate: false,
            strict: true,
        }
    }
}

twin! {
    /// The rows of a sum and of a residual from factors.
    fn expand_rows(p: &[f32], q: &[f32], own: &[f32], sum: &mut [f32], residual: &mut [f32], cols: usize) = expand_body
}

#[inline(always)]
fn expand_body(p: &[f32], q: &[f32], own: &[f32], sum: &mut [f32], residual: &mut [f32], cols: usize) {
    let rows = sum.len() / cols;
    for (i, (sum, residual)) in sum.chunks_exact_mut(cols).zip(residual.chunks_exact_mut(cols)).enumerate() {
        for (j, (q, own)) in q.chunks_exact(cols).zip(own.chunks_exact(cols)).enumerate() {
            let x = p[j * rows + i];
            if j == 0 {
                sum.iter_mut().zip(q).for_each(|(s, q)| *s = x * q);
            } else {
                sum.iter_mut().zip(q).for_each(|(s, q)| *s += x * q);
            }
            residual.iter_mut().zip(own).for_each(|(r, q)| *r -= x * q);
        }
    }
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

fn length(x: &[f32]) -> f64 {
    dot(x, x).sqrt()
}

/// A number between -1 and 1 that looks random (SplitMix64).
fn scattered(seed: u64, i: u64) -> f32 {
    let mut z =
        seed.wrapping_mul(0xd1b5_4a32_d192_ed03).wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}
