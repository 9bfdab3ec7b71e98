//! The peak speed of this core: multiply-adds per second, and bytes per second, to compare kernels with.
//!
//! They measure the calling thread alone, and the machine as it is now: other work on it lowers them.

use std::hint::black_box;
use std::time::Instant;

use crate::gemm::pairs::PairOrder;
use crate::{Cx, Isa};

/// How many short runs are made; the best counts.
const RUNS: usize = 10;
/// Steps of a run: 20 multiply-adds of a whole register, ten cycles; 2 ms at 2.5 GHz.
const STEPS: usize = 500_000;

/// Billions of f32 operations per second (a multiply-add is two) in a loop of independent multiply-adds. Takes 20 ms.
pub fn fma_peak_gflops(cx: &Cx) -> f64 {
    let (steps, run) = chains(cx.isa);
    gflops(steps, run)
}

/// Billions of operations per second in products of bf16 with the instructions of an order: pairs in registers, or tiles
/// that are loaded from L1. `None` without those instructions. Takes 20 ms.
pub fn pair_peak_gflops(cx: &Cx, order: PairOrder) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::Feature;
        use crate::gemm::pairs::{AmxState, amx, amx_state};
        match order {
            PairOrder::Pairs if cx.isa.has(Feature::Avx512Bf16) => {
                // SAFETY: the ISA has AVX512-BF16.
                Some(gflops(STEPS, |steps| unsafe { avx512_bf16(steps) }))
            }
            PairOrder::Tiles if cx.isa.has(Feature::AmxBf16) && amx_state() == AmxState::Ready => {
                // SAFETY: the ISA has AMX, and the system allows it.
                Some(gflops(STEPS / 64, |times| unsafe { amx::products_in_l1(times) }))
            }
            _ => None,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (cx, order);
        None
    }
}

/// The best of some runs of `steps` steps each; `run` returns their operations.
fn gflops(steps: usize, run: impl Fn(usize) -> f64) -> f64 {
    best((0..RUNS).map(|_| {
        let start = Instant::now();
        let flops = run(steps);
        flops / start.elapsed().as_secs_f64() * 1e-9
    }))
}

/// The loop of an instruction set, and how many steps of it to run.
fn chains(isa: Isa) -> (usize, fn(usize) -> f64) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() {
        // SAFETY: the ISA has AVX-512.
        return (STEPS, |steps| unsafe { avx512(steps) });
    } else if isa.has_avx2() {
        // SAFETY: the ISA has AVX2 and FMA.
        return (STEPS, |steps| unsafe { avx2(steps) });
    }
    let _ = isa;
    (STEPS / 8, scalar)
}

/// Billions of bytes per second, read and written, of `target = source`. The slices should be larger than the last
/// cache (64 MB each will do); the target keeps the source's values.
pub fn copy_bandwidth_gbs(target: &mut [f32], source: &[f32]) -> f64 {
    assert_eq!(target.len(), source.len(), "slices of the same length");
    bandwidth(2 * size_of_val(source), || black_box(&mut *target).copy_from_slice(black_box(source)))
}

/// Billions of bytes per second, read and written, of `target += source`, as for [`copy_bandwidth_gbs`].
pub fn add_bandwidth_gbs(target: &mut [f32], source: &[f32]) -> f64 {
    assert_eq!(target.len(), source.len(), "slices of the same length");
    bandwidth(3 * size_of_val(source), || {
        for (t, s) in black_box(&mut *target).iter_mut().zip(black_box(source)) {
            *t += s;
        }
    })
}

fn bandwidth(bytes: usize, mut pass: impl FnMut()) -> f64 {
    // The first pass also faults the pages in.
    pass();
    best((0..3).map(|_| {
        let start = Instant::now();
        pass();
        bytes as f64 / start.elapsed().as_secs_f64() * 1e-9
    }))
}

fn best(speeds: impl Iterator<Item = f64>) -> f64 {
    speeds.fold(0.0, f64::max)
}

/// Runs the loop and returns its operations. Ten chains keep two adders with a latency of four or five cycles busy.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(steps: usize) -> f64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm256_setzero_ps(); 10];
    let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(0.25)));
    for _ in 0..steps {
        for _ in 0..2 {
            for s in &mut sums {
                *s = _mm256_fmadd_ps(*s, a, b);
            }
        }
    }
    black_box(sums);
    (steps * 2 * 10 * 8 * 2) as f64
}

/// The same with 16 floats a register, which only some CPUs do at twice the speed.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512(steps: usize) -> f64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_setzero_ps(); 10];
    let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(0.25)));
    for _ in 0..steps {
        for _ in 0..2 {
            for s in &mut sums {
                *s = _mm512_fmadd_ps(*s, a, b);
            }
        }
    }
    black_box(sums);
    (steps * 2 * 10 * 16 * 2) as f64
}

/// The same with pairs of bf16: twice the operations of a multiply-add.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
fn avx512_bf16(steps: usize) -> f64 {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_setzero_ps(); 10];
    let ones = _mm512_set1_ps(black_box(1.0));
    let ones = _mm512_cvtne2ps_pbh(ones, ones);
    for _ in 0..steps {
        for _ in 0..2 {
            for s in &mut sums {
                *s = _mm512_dpbf16_ps(*s, ones, ones);
            }
        }
    }
    black_box(sums);
    (steps * 2 * 10 * 32 * 2) as f64
}

/// The same without SIMD by hand: a multiply and an add of 8 chains.
fn scalar(steps: usize) -> f64 {
    let mut sums = [0f32; 80];
    let (a, b) = (black_box(0.5f32), black_box(0.25f32));
    for _ in 0..steps {
        for s in &mut sums {
            *s = *s * a + b;
        }
    }
    black_box(sums);
    (steps * 80 * 2) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Feature;
    use crate::gemm::pairs::{AmxState, amx_state};

    #[test]
    fn figures_are_of_a_computer() {
        for isa in Isa::available() {
            let cx = Cx { isa, ..Cx::serial() };
            let peak = fma_peak_gflops(&cx);
            assert!((0.05..10_000.0).contains(&peak), "{peak}");
            for order in [PairOrder::Pairs, PairOrder::Tiles] {
                assert_eq!(pair_peak_gflops(&cx, order), None, "a named set has neither instruction");
            }
        }
        let cx = Cx::serial();
        let pairs = pair_peak_gflops(&cx, PairOrder::Pairs);
        assert_eq!(pairs.is_some(), cx.isa.has(Feature::Avx512Bf16));
        let tiles = pair_peak_gflops(&cx, PairOrder::Tiles);
        assert_eq!(tiles.is_some(), cx.isa.has(Feature::AmxBf16) && amx_state() == AmxState::Ready);
        for peak in pairs.into_iter().chain(tiles) {
            assert!((0.05..20_000.0).contains(&peak), "{peak}");
        }
        let (mut target, source) = (vec![1.0; 1 << 18], vec![2.0; 1 << 18]);
        let add = add_bandwidth_gbs(&mut target, &source);
        assert!((0.01..10_000.0).contains(&add), "{add}");
        assert_eq!(target[7], 9.0, "one pass to warm up and three that count");
        let copy = copy_bandwidth_gbs(&mut target, &source);
        assert!((0.01..10_000.0).contains(&copy), "{copy}");
        assert_eq!(target, source);
    }
}
