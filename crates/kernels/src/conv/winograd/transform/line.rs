//! The five matrices, each applied to a column of vectors, and [`square`], which applies one to both sides of a square.

use super::vector::Vector;

/// One transform along one dim. A trait and not a function argument: calls through `Fn` go through a shim without AVX2,
/// into which nothing is inlined.
pub(super) trait LineTransform<const I: usize, const O: usize> {
    /// The matrix times a column.
    fn apply<V: Vector>(column: [V; I]) -> [V; O];
}

/// `Bᵀ d`.
pub(super) struct Patch;

impl LineTransform<6, 6> for Patch {
    #[inline(always)]
    fn apply<V: Vector>(d: [V; 6]) -> [V; 6] {
        let p = d[2].mul_add(-4.0, d[4]);
        let q = d[1].mul_add(-4.0, d[3]);
        let r = d[4].sub(d[2]);
        let s = d[3].sub(d[1]);
        [
            d[0].mul_add(4.0, d[2].mul_add(-5.0, d[4])),
            p.add(q),
            p.sub(q),
            s.mul_add(2.0, r),
            s.mul_add(-2.0, r),
            d[1].mul_add(4.0, d[3].mul_add(-5.0, d[5])),
        ]
    }
}

/// `Aᵀ m`.
pub(super) struct OutputTile;

impl LineTransform<6, 4> for OutputTile {
    #[inline(always)]
    fn apply<V: Vector>(m: [V; 6]) -> [V; 4] {
        let (p, q) = (m[1].add(m[2]), m[1].sub(m[2]));
        let (r, s) = (m[3].add(m[4]), m[3].sub(m[4]));
        [m[0].add(p).add(r), s.mul_add(2.0, q), r.mul_add(4.0, p), s.mul_add(8.0, q).add(m[5])]
    }
}

/// `A y`.
pub(super) struct Spread;

impl LineTransform<4, 6> for Spread {
    #[inline(always)]
    fn apply<V: Vector>(y: [V; 4]) -> [V; 6] {
        let (p, q) = (y[0].add(y[2]), y[1].add(y[3]));
        let (r, s) = (y[2].mul_add(4.0, y[0]), y[3].mul_add(8.0, y[1].scale(2.0)));
        [y[0], p.add(q), p.sub(q), r.add(s), r.sub(s), y[3]]
    }
}

/// `G g`.
pub(super) struct Filter;

impl LineTransform<3, 6> for Filter {
    #[inline(always)]
    fn apply<V: Vector>(g: [V; 3]) -> [V; 6] {
        let p = g[0].add(g[2]).scale(-1.0 / 6.0);
        let q = g[1].scale(1.0 / 6.0);
        let r = g[0].mul_add(1.0 / 24.0, g[2].scale(1.0 / 6.0));
        let s = g[1].scale(1.0 / 12.0);
        [g[0].scale(0.25), p.sub(q), p.add(q), r.add(s), r.sub(s), g[2]]
    }
}

/// `Gᵀ u`.
pub(super) struct Unfilter;

impl LineTransform<6, 3> for Unfilter {
    #[inline(always)]
    fn apply<V: Vector>(u: [V; 6]) -> [V; 3] {
        let (p, q) = (u[1].add(u[2]), u[2].sub(u[1]));
        let (r, s) = (u[3].add(u[4]), u[3].sub(u[4]));
        [
            u[0].mul_add(0.25, r.mul_add(1.0 / 24.0, p.scale(-1.0 / 6.0))),
            q.mul_add(1.0 / 6.0, s.scale(1.0 / 12.0)),
            r.sub(p).mul_add(1.0 / 6.0, u[5]),
        ]
    }
}

/// Applies a line's transform to the columns and then to the rows of a square.
#[inline(always)]
pub(super) fn square<const I: usize, const O: usize, L: LineTransform<I, O>, V: Vector>(
    load: impl Fn(usize, usize) -> V,
    mut store: impl FnMut(usize, usize, V),
) {
    let mut half = [[V::splat(0.0); I]; O];
    for j in 0..I {
        let mut column = [V::splat(0.0); I];
        for i in 0..I {
            column[i] = load(i, j);
        }
        let column = L::apply(column);
        for i in 0..O {
            half[i][j] = column[i];
        }
    }
    for i in 0..O {
        let row = L::apply(half[i]);
        for j in 0..O {
            store(i, j, row[j]);
        }
    }
}
