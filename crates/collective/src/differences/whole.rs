//! Small whole numbers of every element type, and what any reduction of them gives.

use half::{bf16, f16};

use crate::element::{Bool, Element, Reduce};

/// A number of the rows.
pub(super) trait Whole: Element + PartialEq + PartialOrd + std::fmt::Debug {
    /// A small whole number; wrapped for bytes, and its sign for booleans.
    fn of(x: i32) -> Self;
    fn plus(self, other: Self) -> Self;
}

macro_rules! whole {
    ($($t:ty: $of:expr, $plus:expr;)*) => { $(impl Whole for $t {
        fn of(x: i32) -> $t { $of(x) }
        fn plus(self, other: $t) -> $t { $plus(self, other) }
    })* };
}
whole! {
    f32: |x| x as f32, |a, b| a + b;
    f64: f64::from, |a, b| a + b;
    f16: |x| f16::from_f32(x as f32), |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32());
    bf16: |x| bf16::from_f32(x as f32), |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32());
    i32: |x| x, i32::wrapping_add;
    i64: i64::from, i64::wrapping_add;
    u8: |x| x as u8, u8::wrapping_add;
    i8: |x| x as i8, i8::wrapping_add;
    Bool: |x| Bool::from(x > 0), |a: Bool, b: Bool| Bool::from(a.get() || b.get());
}

/// Element `i` of rank `r`: of both signs, and different from rank to rank and from index to index.
pub(super) fn value<T: Whole>(r: usize, i: usize) -> T {
    T::of(((i * 7 + r * 5 + i / 11) % 13) as i32 - 6)
}

/// The oracle: the elements `i` of all ranks, folded in the order of the ranks.
pub(super) fn folded<T: Whole>(ranks: usize, i: usize, reduce: Reduce) -> T {
    let fold = |a: T, b: T| match reduce {
        Reduce::Sum => a.plus(b),
        Reduce::Max => {
            if b > a {
                b
            } else {
                a
            }
        }
        Reduce::Min => {
            if b < a {
                b
            } else {
                a
            }
        }
    };
    (1..ranks).fold(value(0, i), |all, r| fold(all, value(r, i)))
}
