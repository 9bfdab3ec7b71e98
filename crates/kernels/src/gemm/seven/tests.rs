use super::*;
use crate::Isa;
use crate::gemm::Strides;
use crate::lanes::testing::Reverse;

/// Small whole numbers: every sum is exact, so that seven products equal eight bit for bit.
fn whole(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 + i / 19 + seed) % 15) as f32 - 7.0).collect()
}

/// Row-major or column-major, padded.
fn layout(rows: usize, cols: usize, turned: bool, pad: usize) -> Strides {
    if turned {
        Strides { batch: 0, row: 1, col: rows + pad }
    } else {
        Strides { batch: 0, row: cols + pad, col: 1 }
    }
}

fn check((m, n, k): (usize, usize, usize), turned: (bool, bool), pad: usize, accumulate: bool) {
    let (a, b, c) = (layout(m, k, turned.0, pad), layout(k, n, turned.1, pad), layout(m, n, false, pad));
    let g = Gemm { batch: 1, m, n, k, a, b, c, accumulate, strict: false };
    let (av, bv) = (whole(m.max(k) * (m.min(k) + pad) + m.max(k) * pad, 1), whole((k + pad) * (n + pad), 2));
    let before = whole(m * (n + pad), 3);
    let mut want = before.clone();
    g.run(&Cx::oracle(), &av, &bv, &mut want, None, &mut []);
    let cut = SevenCut::of(&g).expect("the dims are even");
    for isa in Isa::available().filter(|isa| isa.has_avx2()) {
        for workers in [1, 3] {
            let mut got = before.clone();
            // NaN shows what is read before it is written.
            let mut scratch = vec![f32::NAN; cut.shared_len() + workers * cut.own_len(Converted::NONE)];
            let from = OperandSources::of_f32(&av, &bv, isa);
            run(&g, cut, &Cx { isa, par: &Reverse(workers) }, from, got.as_mut_ptr(), None, &mut scratch);
            assert!(want == got, "{g:?} on {workers} workers with {}", isa.name());
        }
    }
}

#[test]
fn seven_products_equal_eight() {
    for m in [2, 4, 10, 12, 14, 26, 202] {
        for n in [2, 14, 30, 32, 34, 130] {
            for k in [2, 6, 16, 18, 34] {
                for turned in [(false, false), (false, true), (true, false), (true, true)] {
                    check((m, n, k), turned, (m + n + k) % 3, k % 4 == 0);
                }
            }
        }
    }
}

#[test]
fn blocks_of_k_may_differ_by_one() {
    for (m, n, k) in [(20, 36, 1030), (130, 70, 2050), (100, 2500, 1026)] {
        for turned in [(false, true), (true, false)] {
            check((m, n, k), turned, 0, false);
            check((m, n, k), turned, 1, true);
        }
    }
}

/// Against sums in f64, beside the plain way: the error grows, but not by much.
#[test]
fn errors_stay_small() {
    let isa = Isa::detect();
    if !isa.has_avx2() {
        return;
    }
    let (m, n, k) = (96, 64, 1024);
    let noise = |len: usize, seed: u32| {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..len).map(next).collect::<Vec<f32>>()
    };
    let (a, b) = (noise(m * k, 1), noise(k * n, 2));
    let strides = |cols: usize| Strides { batch: 0, row: cols, col: 1 };
    let g = Gemm {
        batch: 1,
        m,
        n,
        k,
        a: strides(k),
        b: strides(n),
        c: strides(n),
        accumulate: false,
        strict: false,
    };
    let cut = SevenCut::of(&g).expect("the dims are even");
    let (mut seven, mut plain) = (vec![0.0; m * n], vec![0.0; m * n]);
    let mut scratch = vec![0.0; cut.shared_len() + cut.own_len(Converted::NONE)];
    run(&g, cut, &Cx::serial(), OperandSources::of_f32(&a, &b, isa), seven.as_mut_ptr(), None, &mut scratch);
    g.run(&Cx::serial(), &a, &b, &mut plain, None, &mut vec![0.0; g.scratch_len(1)]);
    let error = |c: &[f32]| {
        let square = |i: usize| {
            let terms = (0..k).map(|l| f64::from(a[i / n * k + l]) * f64::from(b[l * n + i % n]));
            (terms.sum::<f64>() - f64::from(c[i])).powi(2)
        };
        ((0..m * n).map(square).sum::<f64>() / (m * n) as f64).sqrt()
    };
    let (seven, plain) = (error(&seven), error(&plain));
    // The sums themselves are 2.7 in the mean.
    assert!(seven < 4.0 * plain && seven < 3e-6, "{seven:e} beside {plain:e}");
}
