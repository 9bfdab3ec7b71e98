//! The five matrices, each applied to a column of vectors, and [`square`], which applies one to both sides of a square.

use super::vector::Vector;

/// The points 0, ±A, ±B and ∞. Which they are decides how far sums of large terms cancel, and so the error. All powers
/// below are exact in f32.
///
/// Errors of a convolution of 256 channels against f64, relative to the root mean square and to the largest of the result,
/// transforms and sums in f32 (a search over sixteenths; a direct sum has 2.3e-7 and 2.7e-7):
///
/// | ±A, ±B | root mean square | largest |
/// |---|---|---|
/// | 1, 2 | 2.3e-6 | 7.2e-6 |
/// | √½, √2 | 1.06e-6 | 1.4e-6 |
/// | 3/4, 3/2 | 1.1e-6 | 1.5e-6 |
/// | 5/8, 3/2 | 1.02e-6 | 1.8e-6 |
/// | 5/8, 25/16 | 1.01e-6 | 1.6e-6 |
const A: f64 = 0.625;
const B: f64 = 1.5;
const A1: f32 = A as f32;
const A2: f32 = (A * A) as f32;
const A3: f32 = (A * A * A) as f32;
const B1: f32 = B as f32;
const B2: f32 = (B * B) as f32;
const B3: f32 = (B * B * B) as f32;
/// `A² B²` and `A² + B²`: the polynomial of the four points other than 0 and ∞.
const PRODUCT: f32 = (A * A * B * B) as f32;
const SUM: f32 = (A * A + B * B) as f32;
/// What the filter's polynomial is divided by at 0, ±A and ±B.
const AT_0: f64 = 1.0 / (A * A * B * B);
const AT_A: f64 = 1.0 / (2.0 * A * A * (A * A - B * B));
const AT_B: f64 = 1.0 / (2.0 * B * B * (B * B - A * A));
/// The rows of `G`: by the powers of the filter.
const G_0: f32 = AT_0 as f32;
const G_A: [f32; 3] = [AT_A as f32, (AT_A * A) as f32, (AT_A * A * A) as f32];
const G_B: [f32; 3] = [AT_B as f32, (AT_B * B) as f32, (AT_B * B * B) as f32];

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
        let p = d[2].mul_add(-B2, d[4]);
        let q = d[1].mul_add(-B2, d[3]);
        let r = d[2].mul_add(-A2, d[4]);
        let s = d[1].mul_add(-A2, d[3]);
        [
            d[0].mul_add(PRODUCT, d[2].mul_add(-SUM, d[4])),
            q.mul_add(A1, p),
            q.mul_add(-A1, p),
            s.mul_add(B1, r),
            s.mul_add(-B1, r),
            d[1].mul_add(PRODUCT, d[3].mul_add(-SUM, d[5])),
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
        [
            m[0].add(p).add(r),
            s.mul_add(B1, q.scale(A1)),
            r.mul_add(B2, p.scale(A2)),
            s.mul_add(B3, q.mul_add(A3, m[5])),
        ]
    }
}

/// `A y`.
pub(super) struct Spread;

impl LineTransform<4, 6> for Spread {
    #[inline(always)]
    fn apply<V: Vector>(y: [V; 4]) -> [V; 6] {
        let (p, q) = (y[2].mul_add(A2, y[0]), y[3].mul_add(A3, y[1].scale(A1)));
        let (r, s) = (y[2].mul_add(B2, y[0]), y[3].mul_add(B3, y[1].scale(B1)));
        [y[0], p.add(q), p.sub(q), r.add(s), r.sub(s), y[3]]
    }
}

/// `G g`.
pub(super) struct Filter;

impl LineTransform<3, 6> for Filter {
    #[inline(always)]
    fn apply<V: Vector>(g: [V; 3]) -> [V; 6] {
        let (p, q) = (g[0].mul_add(G_A[0], g[2].scale(G_A[2])), g[1].scale(G_A[1]));
        let (r, s) = (g[0].mul_add(G_B[0], g[2].scale(G_B[2])), g[1].scale(G_B[1]));
        [g[0].scale(G_0), p.add(q), p.sub(q), r.add(s), r.sub(s), g[2]]
    }
}

/// `Gᵀ u`.
pub(super) struct Unfilter;

impl LineTransform<6, 3> for Unfilter {
    #[inline(always)]
    fn apply<V: Vector>(u: [V; 6]) -> [V; 3] {
        let (p, q) = (u[1].add(u[2]), u[1].sub(u[2]));
        let (r, s) = (u[3].add(u[4]), u[3].sub(u[4]));
        [
            u[0].mul_add(G_0, r.mul_add(G_B[0], p.scale(G_A[0]))),
            q.mul_add(G_A[1], s.scale(G_B[1])),
            r.mul_add(G_B[2], p.mul_add(G_A[2], u[5])),
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
