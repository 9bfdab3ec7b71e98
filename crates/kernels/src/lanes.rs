//! Reductions in fixed lanes, and the macro that builds the twins of a memory-bound kernel.
//!
//! The memory-bound kernels of this crate are one `#[inline(always)]` body each, which [`twin!`] instantiates for the
//! baseline CPU (the scalar twin), with AVX2, and with AVX-512. The bodies sum in [`LANES`] fixed lanes and never ask for
//! a fused multiply-add, so all twins round alike.
//!
//! This is not a SIMD library: there are no vector types here, and compute-bound kernels write their own intrinsics.

/// How many partial sums a reduction keeps; lane `l` sums the elements whose index is `l` modulo this.
pub(crate) const LANES: usize = 32;

/// Makes `fn name(isa, args..)` from an `#[inline(always)]` body: one dispatch, then the twin of that level.
/// Where the list of arguments starts with `isa;` the body is given it too, for kernels that it calls.
macro_rules! twin {
    ($(#[$doc:meta])* $vis:vis fn $name:ident(isa; $($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            $crate::lanes::twin! { fn with_isa(level: $crate::Isa, $($arg: $ty),*) $(-> $ret)? = $body }
            with_isa(isa, isa, $($arg),*)
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                if isa.has_avx512() {
                    // SAFETY: an `Isa` with AVX-512 comes from detection alone, so this CPU has the instructions.
                    return unsafe { avx512($($arg),*) };
                }
                if isa.has_avx2() {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
pub(crate) use twin;

/// The sum of `f(x)` over the slice.
#[inline(always)]
pub(crate) fn sum_map(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            acc[l] += f(chunk[l]);
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        *a += f(v);
    }
    fold(acc)
}

/// The sum of `f(x, y)` over two slices of one length.
#[inline(always)]
pub(crate) fn sum_map2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [0.0f32; LANES];
    let ((x_chunks, x_rest), (y_chunks, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (a, b) in x_chunks.iter().zip(y_chunks) {
        for l in 0..LANES {
            acc[l] += f(a[l], b[l]);
        }
    }
    for ((s, &a), &b) in acc.iter_mut().zip(x_rest).zip(y_rest) {
        *s += f(a, b);
    }
    fold(acc)
}

/// The largest element; `-inf` for an empty slice. NaN are ignored: they show in the sums.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            acc[l] = if chunk[l] > acc[l] { chunk[l] } else { acc[l] };
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        *a = if v > *a { v } else { *a };
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] = if acc[l + width] > acc[l] { acc[l + width] } else { acc[l] };
        }
        width /= 2;
    }
    acc[0]
}

/// The sum of the lanes, as a tree.
#[inline(always)]
pub(crate) fn fold(mut acc: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] += acc[l + width];
        }
        width /= 2;
    }
    acc[0]
}

/// What the tests of several kernels share: a runner that differs from [`crate::Serial`] as much as possible, data,
/// comparison.
#[cfg(test)]
pub(crate) mod testing {
    use crate::{Cx, Isa, Parallel};

    /// Runs tasks in reverse order and claims this many workers, taken in turn.
    pub(crate) struct Reverse(pub usize);

    // SAFETY: each index once, one after another, workers below the claimed number.
    unsafe impl Parallel for Reverse {
        fn workers(&self) -> usize {
            self.0
        }
        fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
            for i in (0..n_tasks).rev() {
                task(i, (i * 7 + 1) % self.0);
            }
        }
    }

    /// The contexts whose results must agree: the oracle first, then each instruction set straight, then the best in
    /// reverse.
    pub(crate) fn contexts() -> Vec<Cx<'static>> {
        let isa = Isa::detect();
        let mut all: Vec<_> = Isa::available().map(|isa| Cx { isa, par: &crate::Serial }).collect();
        all.extend([Cx { isa, par: &Reverse(3) as &dyn Parallel }, Cx { isa, par: &Reverse(16) }]);
        all
    }

    /// `len` values in [-1, 1), the same for the same seed.
    pub(crate) fn data(seed: u64, len: usize) -> Vec<f32> {
        let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..len)
            .map(|_| {
                s ^= s << 13;
                s ^= s >> 7;
                s ^= s << 17;
                (s >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Panics unless `|got - want| <= tol * (1 + |want|)` everywhere (NaN where NaN is wanted).
    #[track_caller]
    pub(crate) fn close(what: &str, got: &[f32], want: &[f64], tol: f64) {
        assert_eq!(got.len(), want.len(), "{what}: length");
        for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
            let g = f64::from(g);
            let same = (g.is_nan() && w.is_nan()) || g == w || (g - w).abs() <= tol * (1.0 + w.abs());
            assert!(same, "{what}[{i}]: {g} for {w}");
        }
    }

    /// Panics unless all runs gave the bits of the first.
    #[track_caller]
    pub(crate) fn same_bits(what: &str, runs: &[Vec<f32>]) {
        for (k, run) in runs.iter().enumerate().skip(1) {
            for (i, (a, b)) in run.iter().zip(&runs[0]).enumerate() {
                assert_eq!(a.to_bits(), b.to_bits(), "{what}[{i}] of context {k}: {a} for {b}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_on_awkward_lengths() {
        for n in [0, 1, 7, 8, 31, 32, 33, 100, 1000] {
            let (x, y) = (testing::data(n as u64 + 1, n), testing::data(n as u64 + 2, n));
            let dot: f64 = x.iter().zip(&y).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            testing::close("dot", &[sum_map2(&x, &y, |a, b| a * b)], &[dot], 1e-5);
            let sum: f64 = x.iter().map(|&a| f64::from(a)).sum();
            testing::close("sum", &[sum_map(&x, |a| a)], &[sum], 1e-5);
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
