//! The oracle, and the fallback where there is no AVX2: plain loops, row by row of B.

use super::{Epilogue, Gemm, OutputBlock};

/// The same as `Gemm::run`, on the calling thread.
pub(super) fn run(g: &Gemm, a: &[f32], b: &[f32], c: &mut [f32], epilogue: Option<Epilogue>) {
    for batch in 0..g.batch {
        let (a, b) = (&a[batch * g.a.batch..], &b[batch * g.b.batch..]);
        for i in 0..g.m {
            let c0 = batch * g.c.batch + i * g.c.row;
            let c_row = &mut c[c0..c0 + g.n];
            if !g.accumulate {
                c_row.fill(0.0);
            }
            for l in 0..g.k {
                let a = a[i * g.a.row + l * g.a.col];
                for (j, c) in c_row.iter_mut().enumerate() {
                    *c += a * b[l * g.b.row + j * g.b.col];
                }
            }
            if let Some(epilogue) = epilogue {
                (epilogue.call)(OutputBlock::piece(batch, i, 0, c_row));
            }
        }
    }
}
