use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::Isa;
use crate::lanes::testing::Reverse;

pub(super) fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

/// A `rows × cols` layout: row-major or column-major, padded by `pad`, or with no contiguous dim at all.
pub(super) fn layout(rows: usize, cols: usize, form: usize, pad: usize) -> Strides {
    match form {
        0 => Strides { batch: rows * (cols + pad) + pad, row: cols + pad, col: 1 },
        1 => Strides { batch: cols * (rows + pad) + pad, row: 1, col: rows + pad },
        _ => Strides { batch: 2 * rows * (cols + pad), row: 2 * (cols + pad), col: 2 },
    }
}

/// Against the oracle; each element finished once; elements outside C untouched; the same bits on other workers and with
/// every vector instruction set.
fn check(batch: usize, shape: (usize, usize, usize), forms: (usize, usize), pad: usize, accumulate: bool) {
    check_by(batch, shape, forms, pad, accumulate, false);
    // Strict products of a short k are no others.
    if shape.2 > 150 {
        check_by(batch, shape, forms, pad, accumulate, true);
    }
}

fn check_by(
    batch: usize,
    (m, n, k): (usize, usize, usize),
    forms: (usize, usize),
    pad: usize,
    accumulate: bool,
    strict: bool,
) {
    let g = Gemm {
        batch,
        m,
        n,
        k,
        a: layout(m, k, forms.0, pad),
        b: layout(k, n, forms.1, pad),
        c: layout(m, n, 0, pad),
        accumulate,
        strict,
    };
    let a = numbers(batch * g.a.batch, 1);
    let b = numbers(batch * g.b.batch, 2);
    let c = numbers(batch * g.c.batch, 3);
    let run = |cx: &Cx, finish: bool| {
        let mut out = c.clone();
        // NaN shows what is read before it is written.
        let mut scratch = vec![f32::NAN; g.scratch_len(cx.par.workers())];
        let finished: Vec<AtomicU32> = (0..batch * m * n).map(|_| AtomicU32::new(0)).collect();
        let epilogue = |block: OutputBlock| {
            let (batch, first, col) = (block.batch, block.row, block.col);
            for (r, piece) in block.into_rows().enumerate() {
                let row = first + r;
                for (j, v) in piece.iter_mut().enumerate() {
                    *v = *v * 2.0 + (col + j) as f32;
                    finished[(batch * m + row) * n + col + j].fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        g.run(cx, &a, &b, &mut out, finish.then(|| Epilogue::new(&epilogue)), &mut scratch);
        if finish {
            assert!(finished.iter().all(|v| v.load(Ordering::Relaxed) == 1), "finished once: {g:?}");
        }
        out
    };
    if !accumulate {
        for isa in Isa::available() {
            for workers in [1, 3] {
                let cx = Cx { isa, par: &Reverse(workers) };
                check_pass(&g, &cx, &a, &b, &run(&cx, false));
            }
        }
    }
    for finish in [false, true] {
        let want = run(&Cx::oracle(), finish);
        let got = run(&Cx::serial(), finish);
        // Both sums are of k products of at most 1/4, rounded k times.
        let tolerance = 1e-6 * (k as f32).sqrt() + 1e-6 * if finish { n as f32 } else { 1.0 };
        for (i, (w, v)) in want.iter().zip(&got).enumerate() {
            assert!((w - v).abs() <= tolerance, "element {i}: {v}, not {w}: {g:?}");
        }
        for isa in Isa::available().filter(|isa| isa.has_avx2() == Isa::detect().has_avx2()) {
            for workers in [1, 3] {
                let again = run(&Cx { isa, par: &Reverse(workers) }, finish);
                let same = again.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "the same bits on {workers} workers with {}: {g:?}", isa.name());
            }
        }
    }
}

/// Blocks that are passed on have the bits of those that are kept, and each element is passed on once.
fn check_pass(g: &Gemm, cx: &Cx, a: &[f32], b: &[f32], want: &[f32]) {
    const NONE: u32 = f32::NAN.to_bits() + 1;
    let got: Vec<AtomicU32> = (0..g.batch * g.m * g.n).map(|_| AtomicU32::new(NONE)).collect();
    let call = |block: OutputBlock| {
        let (batch, first, col) = (block.batch, block.row, block.col);
        for (r, piece) in block.into_rows().enumerate() {
            for (j, v) in piece.iter().enumerate() {
                let before =
                    got[(batch * g.m + first + r) * g.n + col + j].swap(v.to_bits(), Ordering::Relaxed);
                assert_eq!(before, NONE, "passed on once: {g:?}");
            }
        }
    };
    // What is beside is prefetched and never read: it need not even exist.
    let beside = [1, 2, 3].map(|i| std::ptr::without_provenance(i * 64));
    let mut scratch = vec![f32::NAN; g.pass_scratch_len(cx.par.workers())];
    g.pass(cx, a, b, Epilogue { call: &call, beside }, &mut scratch);
    for (i, got) in got.iter().enumerate() {
        let (batch, row, col) = (i / (g.m * g.n), i / g.n % g.m, i % g.n);
        let want = want[batch * g.c.batch + row * g.c.row + col];
        assert_eq!(got.load(Ordering::Relaxed), want.to_bits(), "({batch}, {row}, {col}): {g:?}");
    }
}

#[test]
fn awkward_shapes_agree_with_the_oracle() {
    let dims = [0, 1, 5, 6, 7, 15, 16, 17, 33, 100];
    for (i, m) in dims.into_iter().enumerate() {
        for (j, n) in dims.into_iter().enumerate() {
            for (l, k) in dims.into_iter().enumerate() {
                // Every form meets every size, without the whole product of them.
                let turn = i + 2 * j + 3 * l;
                for forms in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    check(1, (m, n, k), forms, turn % 3, turn % 2 == 0);
                }
            }
        }
    }
}

#[test]
fn every_rest_of_a_tile_agrees() {
    for rest in 0..NEAR {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (0, 2), (2, 1)] {
            check(2, (24 + rest, 40 + rest, 9 + rest), forms, rest % 2, rest % 2 == 1);
        }
    }
}
const NEAR: usize = 17;

#[test]
fn blocks_of_every_dim_agree() {
    for shape in [
        (300, 70, 900),
        (70, 300, 900),
        (5, 600, 1000),
        (600, 5, 1000),
        (1, 333, 2000),
        (333, 1, 2000),
        (290, 530, 130),
        (128, 96, 513),
        (1000, 16, 64),
        (10, 10, 5000),
    ] {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)] {
            check(1, shape, forms, 0, false);
            check(1, shape, forms, 3, true);
        }
    }
}

/// 64 rows that are copied are too few to be cut, but not one task: the weight gradient of 64 to 256 channels, both ways.
#[test]
fn few_copied_rows_make_several_tasks() {
    let (few, many, k) = (64, 256, 25088);
    for (m, n) in [(few, many), (many, few)] {
        let (a, b, c) = (layout(m, k, 1, 0), layout(k, n, 0, 0), layout(m, n, 0, 0));
        let g = Gemm { batch: 1, m, n, k, a, b, c, accumulate: false, strict: false };
        let plan = plan::GemmPlan::new(&g, Converted::NONE);
        assert!(plan.copied_rows == plan::RowCopies::Strips && plan.n_tasks() >= 2, "{plan:?}");
    }
    check(1, (few, many, 1700), (1, 0), 0, false);
    check(1, (many, few, 1700), (1, 0), 3, true);
}

/// Too many panels to be copied at once: C is complete only after the last round.
#[test]
fn rounds_agree() {
    check(1, (140, 1100, 1000), (1, 0), 0, false);
    let g = Gemm {
        c: layout(140, 1100, 0, 0),
        a: layout(140, 1000, 1, 0),
        b: layout(1000, 1100, 0, 0),
        batch: 1,
        m: 140,
        n: 1100,
        k: 1000,
        accumulate: false,
        strict: false,
    };
    assert!(!plan::GemmPlan::new(&g, Converted::NONE).completes());
}

#[test]
fn large_products_agree() {
    check(1, (1024, 256, 256), (0, 1), 0, false);
    check(1, (1024, 256, 256), (2, 2), 1, true);
    check(1, (1034, 262, 530), (0, 0), 2, true);
    check(1, (1034, 262, 530), (1, 0), 0, false);
}

/// A strict product has the error of short sums, whatever its size.
#[test]
fn strict_products_are_nearer() {
    let (m, n, k) = (1024, 256, 1024);
    let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
    let error = |strict: bool| {
        let [a_layout, b_layout, c] = [layout(m, k, 0, 0), layout(k, n, 0, 0), layout(m, n, 0, 0)];
        let g = Gemm { batch: 1, m, n, k, a: a_layout, b: b_layout, c, accumulate: false, strict };
        let (mut c, mut scratch) = (vec![f32::NAN; m * n], vec![f32::NAN; g.scratch_len(1)]);
        g.run(&Cx::serial(), &a, &b, &mut c, None, &mut scratch);
        let (mut squares, mut right) = (0.0, 0.0);
        // Every 61st element meets all columns.
        for at in (0..m * n).step_by(61) {
            let (row, col) = (at / n, at % n);
            let want: f64 = (0..k).map(|l| f64::from(a[row * k + l]) * f64::from(b[l * n + col])).sum();
            squares += (f64::from(c[at]) - want).powi(2);
            right += want * want;
        }
        (squares / right).sqrt()
    };
    let (fast, strict) = (error(false), error(true));
    if Isa::detect().has_avx2() {
        assert!(strict < 3e-7 && fast > 1.5 * strict, "{fast:.2e}, strictly {strict:.2e}");
    }
}

#[test]
fn batches_agree() {
    for (batch, shape) in
        [(0, (3, 3, 3)), (36, (70, 20, 30)), (5, (200, 64, 64)), (3, (16, 16, 700)), (40, (4, 4, 4))]
    {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            check(batch, shape, forms, 1, false);
            check(batch, shape, forms, 0, true);
        }
    }
}

#[test]
fn an_operand_may_be_shared_by_the_batch_and_heads_may_interleave() {
    // y[t, h, :] = x[t, h, :]·w, with the heads inside the rows and one w for all.
    let (heads, t, d) = (3, 50, 20);
    let g = Gemm {
        batch: heads,
        m: t,
        n: d,
        k: d,
        a: Strides { batch: d, row: heads * d, col: 1 },
        b: Strides { batch: 0, row: d, col: 1 },
        c: Strides { batch: d, row: heads * d, col: 1 },
        accumulate: false,
        strict: false,
    };
    let (a, b) = (numbers(t * heads * d, 1), numbers(d * d, 2));
    let (mut want, mut got) = (vec![0.0; a.len()], vec![0.0; a.len()]);
    let mut scratch = vec![0.0; g.scratch_len(1)];
    g.run(&Cx::oracle(), &a, &b, &mut want, None, &mut scratch);
    g.run(&Cx::serial(), &a, &b, &mut got, None, &mut scratch);
    assert!(want.iter().zip(&got).all(|(w, v)| (w - v).abs() < 1e-5));
}

#[test]
#[should_panic(expected = "do not overlap")]
fn rows_of_c_that_overlap_are_refused() {
    let s = Strides { batch: 0, row: 1, col: 1 };
    let g = Gemm { batch: 1, m: 2, n: 2, k: 1, a: s, b: s, c: s, accumulate: false, strict: false };
    let mut c = [0.0; 8];
    g.run(&Cx::serial(), &[0.0; 8], &[0.0; 8], &mut c, None, &mut vec![0.0; g.scratch_len(1)]);
}
