//! The oracle, and the fallback where there is no AVX2: plain loops, row by row of B.

use super::source::OperandSources;
use super::{Epilogue, Gemm, OutputBlock};

/// The same as `Gemm::run`, on the calling thread.
pub(super) fn run(g: &Gemm, from: OperandSources, c: &mut [f32], epilogue: Option<Epilogue>) {
    match (from.a.in_place(), from.b.in_place()) {
        (Some(a), Some(b)) => multiply(g, |i| a[i], |i| b[i], c, epilogue),
        _ => multiply(g, |i| from.a.at(i), |i| from.b.at(i), c, epilogue),
    }
}

/// With functions that read A and B.
#[inline(always)]
fn multiply(
    g: &Gemm,
    a: impl Fn(usize) -> f32,
    b: impl Fn(usize) -> f32,
    c: &mut [f32],
    epilogue: Option<Epilogue>,
) {
    for batch in 0..g.batch {
        let (a0, b0) = (batch * g.a.batch, batch * g.b.batch);
        for i in 0..g.m {
            let c0 = batch * g.c.batch + i * g.c.row;
            let c_row = &mut c[c0..c0 + g.n];
            if !g.accumulate {
                c_row.fill(0.0);
            }
            for l in 0..g.k {
                let a = a(a0 + i * g.a.row + l * g.a.col);
                for (j, c) in c_row.iter_mut().enumerate() {
                    *c += a * b(b0 + l * g.b.row + j * g.b.col);
                }
            }
            if let Some(epilogue) = epilogue {
                (epilogue.call)(OutputBlock::piece(batch, i, 0, c_row));
            }
        }
    }
}
