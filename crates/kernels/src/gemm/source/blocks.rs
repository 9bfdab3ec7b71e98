//! Copies of blocks of an operand, converted to f32 on the way.

use std::arch::x86_64::*;

use polyreme_dtype::{DType, bf16, f16};

use super::OperandSource;
use crate::convert::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::floats::each;
use crate::{Floats, Isa};

/// Contiguous runs of elements, one after the other: of a block, its rows or its columns.
#[derive(Clone, Copy)]
pub(in super::super) struct Runs {
    /// The first element.
    pub(in super::super) at: usize,
    /// How many runs, and from one to the next.
    pub(in super::super) n: usize,
    pub(in super::super) stride: usize,
    /// Elements of a run.
    pub(in super::super) len: usize,
}

impl OperandSource<'_> {
    /// The address of an element, and bytes of one. For prefetching: it need not exist.
    pub(in super::super) fn address(&self, at: usize) -> (*const u8, usize) {
        let floats = self.floats;
        (each!(Floats, floats, x => x.as_ptr().wrapping_add(at).cast()), floats.dtype().bytes())
    }

    /// Writes runs as f32, `to_stride` floats apart.
    pub(in super::super) fn copy_runs(&self, runs: Runs, to: &mut [f32], to_stride: usize) {
        self.convert(&BlockCopy { runs, to_stride, panels: false }, to);
    }

    /// Writes runs, one for each step of k, as panels of [`PANEL`] columns, padded with zeros: panel after panel.
    pub(in super::super) fn copy_panels(&self, runs: Runs, to: &mut [f32]) {
        self.convert(&BlockCopy { runs, to_stride: PANEL, panels: true }, to);
    }

    fn convert(&self, job: &BlockCopy, to: &mut [f32]) {
        let isa = self.isa;
        match (self.floats, self.rounded) {
            (Floats::F32(x), Some(DType::F16)) => job.run::<RoundedF16>(isa, x, to),
            (Floats::F32(x), Some(DType::Bf16)) => job.run::<RoundedBf16>(isa, x, to),
            (Floats::F32(_), _) => unreachable!("f32 is read in place"),
            (Floats::F16(x), _) => job.run::<f16>(isa, x, to),
            (Floats::Bf16(x), _) => job.run::<bf16>(isa, x, to),
        }
    }

    /// Writes a block of `n_outer × n_inner` elements as f32, whatever its strides; rows are `to_stride` floats apart.
    pub(in super::super) fn copy_block(
        &self,
        at: usize,
        (n_outer, outer): (usize, usize),
        (n_inner, inner): (usize, usize),
        to: &mut [f32],
        to_stride: usize,
    ) {
        if inner == 1 || n_inner == 1 {
            return self.copy_runs(Runs { at, n: n_outer, stride: outer, len: n_inner }, to, to_stride);
        }
        for i in 0..n_outer {
            for (j, to) in to[i * to_stride..][..n_inner].iter_mut().enumerate() {
                *to = self.at(at + i * outer + j * inner);
            }
        }
    }
}

/// What is copied where.
struct BlockCopy {
    runs: Runs,
    to_stride: usize,
    /// Whether runs are cut into panels.
    panels: bool,
}

/// Columns of a panel.
const PANEL: usize = 16;

/// Runs that are copied at a time to panels, and prefetched meanwhile: strides hide them from the hardware.
const LINES: usize = 8;

impl BlockCopy {
    fn run<F: Format>(&self, isa: Isa, x: &[F::Stored], to: &mut [f32]) {
        if isa.has_f16c() {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn lanes<F: Format>(job: &BlockCopy, x: &[F::Stored], to: &mut [f32]) {
                // SAFETY: this function has the instructions.
                job.copy(x, to, |x, to| unsafe { F::widen_lanes(x, to) });
            }
            // SAFETY: the instruction set was detected.
            return unsafe { lanes::<F>(self, x, to) };
        }
        self.copy(x, to, widen_each::<F>);
    }

    #[inline(always)]
    fn copy<T>(&self, x: &[T], to: &mut [f32], widen: impl Fn(&[T], &mut [f32])) {
        let Runs { at, n, stride, len } = self.runs;
        if !self.panels {
            for i in 0..n {
                widen(&x[at + i * stride..][..len], &mut to[i * self.to_stride..][..len]);
            }
            return;
        }
        for first in (0..n).step_by(LINES) {
            let last = (first + LINES).min(n);
            for i in last..(last + LINES).min(n) {
                prefetch(x.as_ptr().wrapping_add(at + i * stride), len);
            }
            for (panel, col) in (0..len).step_by(PANEL).enumerate() {
                let cols = PANEL.min(len - col);
                for i in first..last {
                    let to: &mut [f32; PANEL] = &mut to.as_chunks_mut().0[panel * n + i];
                    let x = &x[at + i * stride + col..][..cols];
                    // Their number is known to the compiler, which leaves no loop then.
                    if let Ok(x) = <&[T; PANEL]>::try_from(x) {
                        widen(x, to);
                    } else {
                        widen(x, &mut to[..cols]);
                        to[cols..].fill(0.0);
                    }
                }
            }
        }
    }
}

/// Asks for the lines of `len` elements.
#[inline(always)]
fn prefetch<T>(first: *const T, len: usize) {
    for byte in (0..len * size_of::<T>()).step_by(64) {
        // SAFETY: a hint, which reads nothing: any address will do, and every CPU of this architecture has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.cast::<i8>().wrapping_add(byte)) };
    }
}

/// How a float of an operand becomes f32.
trait Format {
    /// What is stored.
    type Stored: Copy;

    /// One of them.
    fn wide(x: Self::Stored) -> f32;

    /// A run of them.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C, and the caller was compiled for them.
    #[inline(always)]
    unsafe fn widen_lanes(x: &[Self::Stored], to: &mut [f32])
    where
        Self: Sized,
    {
        widen_each::<Self>(x, to);
    }
}

/// A run, in a loop that the compiler vectorises where it can.
#[inline(always)]
fn widen_each<F: Format>(x: &[F::Stored], to: &mut [f32]) {
    for (to, &x) in to.iter_mut().zip(x) {
        *to = F::wide(x);
    }
}

/// Eight at a time, and then one by one.
#[inline(always)]
fn widen_eights<F: Format>(x: &[F::Stored], to: &mut [f32], eight: impl Fn(*const F::Stored) -> __m256) {
    let (mut xs, mut tos) = (x.chunks_exact(8), to.chunks_exact_mut(8));
    for (x, to) in (&mut xs).zip(&mut tos) {
        // SAFETY: eight floats are written; the caller's CPU has AVX2.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), eight(x.as_ptr())) };
    }
    widen_each::<F>(xs.remainder(), tos.into_remainder());
}

impl Format for bf16 {
    type Stored = bf16;

    #[inline(always)]
    fn wide(x: bf16) -> f32 {
        f32_from_bf16(x)
    }
}

impl Format for f16 {
    type Stored = f16;

    #[inline(always)]
    fn wide(x: f16) -> f32 {
        f32_from_f16(x)
    }

    #[inline(always)]
    unsafe fn widen_lanes(x: &[f16], to: &mut [f32]) {
        // SAFETY: the caller's promise; eight halves are read.
        widen_eights::<f16>(x, to, |x| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.cast())) });
    }
}

/// f32 rounded to bf16.
struct RoundedBf16;

impl Format for RoundedBf16 {
    type Stored = f32;

    #[inline(always)]
    fn wide(x: f32) -> f32 {
        f32_from_bf16(bf16_from_f32(x))
    }
}

/// f32 rounded to f16.
struct RoundedF16;

impl Format for RoundedF16 {
    type Stored = f32;

    #[inline(always)]
    fn wide(x: f32) -> f32 {
        f32_from_f16(f16_from_f32(x))
    }

    #[inline(always)]
    unsafe fn widen_lanes(x: &[f32], to: &mut [f32]) {
        // SAFETY: the caller's promise; eight floats are read.
        widen_eights::<RoundedF16>(x, to, |x| unsafe {
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x)))
        });
    }
}
