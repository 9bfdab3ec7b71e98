//! The oracle of [`super::PairOrder::Tiles`], and the fallback where there is no AVX2: what the manual says that TDPBF16PS
//! does, one output at a time.

use super::super::{Epilogue, OutputBlock};
use super::source::UnitSource;
use super::{PairShape, RUN};

/// The same as `PairShape::pass`, on the calling thread; the row of C that is lent is in `scratch`.
pub(super) fn run(
    g: &PairShape,
    a: &dyn UnitSource,
    b: &dyn UnitSource,
    epilogue: Epilogue,
    scratch: &mut [f32],
) {
    for batch in 0..g.batch {
        for i in 0..g.m {
            let row = &mut scratch[..g.n];
            for (j, c) in row.iter_mut().enumerate() {
                *c = 0.0;
                for start in (0..g.k).step_by(RUN) {
                    let product =
                        |l: usize| if l < g.k { (a.at(batch, i, l), b.at(batch, j, l)) } else { (0.0, 0.0) };
                    *c = add_run(*c, std::array::from_fn(|l| product(start + l)));
                }
            }
            (epilogue.call)(OutputBlock::piece(batch, i, 0, row));
        }
    }
}

/// What one TDPBF16PS makes of a sum and of 32 products. Zeros behind the last step of k count: they make +0 of a chain
/// that was flushed to -0.
pub(super) fn add_run(sum: f32, products: [(f32, f32); RUN]) -> f32 {
    let mut chains = [0.0; 2];
    for (l, (a, b)) in products.into_iter().enumerate() {
        chains[l % 2] = fused(flushed(a), flushed(b), chains[l % 2]);
    }
    flushed(sum + flushed(chains[0] + chains[1]))
}

/// A denormal becomes a zero of its sign. Sums of two floats that are denormal are exact, so it makes no difference that
/// they were rounded first.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `a·b + c` for bf16 `a` and `b`, rounded once, or a zero if that is tiny.
///
/// What is tiny is decided, as x86 does, on the value rounded to 24 bits with any exponent: below 2⁻¹²⁶ - 2⁻¹⁵¹, whose
/// tie goes up to the smallest normal number. Rounded as a denormal, with fewer bits, a value that is a little smaller
/// would already become normal. The sum in f64 decides rightly: a product that makes it tiny beside a `c` that is not is
/// at least 2⁻¹⁵¹, so its 16 bits end at 2⁻¹⁶⁶ and the sum is exact; without `c` the product alone is.
fn fused(a: f32, b: f32, c: f32) -> f32 {
    const TINY: f64 = f64::from_bits((1023 - 126) << 52) - f64::from_bits((1023 - 151) << 52);
    let sum = a.mul_add(b, c);
    let exact = f64::from(a) * f64::from(b) + f64::from(c);
    if exact.abs() < TINY { 0f32.copysign(sum) } else { sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(products: &[(f32, f32)]) -> [(f32, f32); RUN] {
        std::array::from_fn(|l| products.get(l).copied().unwrap_or((0.0, 0.0)))
    }

    #[test]
    fn what_is_tiny_is_decided_on_24_bits() {
        let least = f32::MIN_POSITIVE;
        let two = |exponent: i32| 2f32.powi(exponent);
        // A little below the smallest normal number: as a denormal it would be rounded up to it.
        assert_eq!(two(-75).mul_add(-two(-75), least), least);
        assert_eq!(fused(two(-75), -two(-75), least).to_bits(), 0);
        assert_eq!(fused(-two(-75), -two(-75), -least).to_bits(), (-0f32).to_bits());
        // Half as far below it is rounded up to it with 24 bits too.
        assert_eq!(fused(two(-75), -two(-76), least), least);
        assert_eq!(fused(two(-75), -1.0078125 * two(-76), least), 0.0);
        // Products alone.
        assert_eq!(fused(two(-63), two(-63), 0.0), least);
        assert_eq!(fused(two(-63), -two(-64), 0.0).to_bits(), (-0f32).to_bits());
        assert_eq!(fused(two(-100), -two(-100), 0.0).to_bits(), (-0f32).to_bits());
        assert_eq!(add_run(0.0, padded(&[(1e-39, 1e38)])), 0.0);
    }

    #[test]
    fn even_and_odd_steps_are_summed_apart() {
        // 1 + 2⁻²⁴ is 1, and 2⁻²⁴ + 2⁻²⁴ is not lost.
        let small = 2f32.powi(-24);
        let apart = &[(1.0, 1.0), (small, 1.0), (0.0, 1.0), (small, 1.0)];
        assert_eq!(add_run(0.0, padded(apart)), 1.0 + 2.0 * small);
        let together = &[(1.0, 1.0), (0.0, 1.0), (small, 1.0), (0.0, 1.0), (small, 1.0)];
        assert_eq!(add_run(0.0, padded(together)), 1.0);
    }
}
