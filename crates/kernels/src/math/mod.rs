//! Transcendental functions of f32: exp, expm1, ln, ln1p, tanh, sigmoid, erf, sin, cos.
//!
//! `avx2` has them for eight lanes and `avx512` for sixteen, to be inlined into other kernels, with the same bits;
//! [`scalar`] has the twins, one value at a time.
//! They are not correctly rounded. The bounds that the tests hold, against f64 over dense sweeps:
//!
//! | function | bound | notes |
//! |---|---|---|
//! | `exp` | 2 ulp | results below 2⁻¹²⁵ are 0, so `exp(-inf) == 0`; overflow is `inf` |
//! | `expm1` | 4 ulp | |
//! | `ln` | 2 ulp | subnormals are right; `ln(0) == -inf`, `ln(negative)` is NaN |
//! | `ln1p` | 4 ulp | for arguments in 0..=1 |
//! | `tanh` | 4 ulp | |
//! | `sigmoid` | 4 ulp | results below 2⁻¹²⁶ may be 0 |
//! | `erf` | 3 ulp | |
//! | `sin`, `cos` | 2 ulp | beyond 1e5 the lanes are handed to the scalar twin |
//!
//! NaN in is NaN out, for all of them. The polynomials are minimax fits made for these files (Remez exchange).

#[cfg(target_arch = "x86_64")]
mod lanes;
pub mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use lanes::{avx2, avx512};

#[cfg(test)]
mod tests;
