use std::sync::atomic::{AtomicU32, Ordering};

use polyreme_dtype::{bf16, f16};

use super::super::Strides;
use super::super::tests::{layout, numbers};
use super::*;
use crate::convert::{bf16_from_f32, f32_from_bf16};
use crate::lanes::testing::Reverse;
use crate::{Feature, Isa};

/// What the operands are made of.
#[derive(Clone, Copy, Debug)]
enum OperandValues {
    /// In (-0.5, 0.5).
    Ordinary,
    /// Any bits but NaN: denormals, infinities and all that overflows.
    Any,
    /// Such that products and sums are near the smallest normal number.
    Tiny,
}

fn floats(values: OperandValues, len: usize, seed: u32) -> Vec<f32> {
    let mut x = numbers(len, seed);
    for (i, v) in x.iter_mut().enumerate() {
        let bits = v.to_bits().wrapping_mul(0x9e37_79b9).rotate_left(11) ^ i as u32;
        *v = match values {
            OperandValues::Ordinary => *v,
            OperandValues::Any => {
                let any = f32::from_bits(bits);
                if any.is_nan() { f32::from_bits(bits & 0x8000_0000 | 0x7f80_0000) } else { any }
            }
            // Exponents of -66 to -59.
            OperandValues::Tiny => f32::from_bits(bits & 0x83ff_ffff | 0x1e80_0000),
        };
    }
    x
}

/// All of C, each element passed on once.
fn collect(g: &PairGemm, cx: &Cx, a: Floats, b: Floats) -> Vec<f32> {
    const NONE: u32 = f32::NAN.to_bits() + 1;
    let (m, n) = (g.gemm.m, g.gemm.n);
    let c: Vec<AtomicU32> = (0..g.gemm.batch * m * n).map(|_| AtomicU32::new(NONE)).collect();
    let call = |block: OutputBlock| {
        let (batch, first, col) = (block.batch, block.row, block.col);
        for (r, piece) in block.into_rows().enumerate() {
            for (j, v) in piece.iter().enumerate() {
                let at = (batch * m + first + r) * n + col + j;
                assert_eq!(c[at].swap(v.to_bits(), Ordering::Relaxed), NONE, "passed on once: {g:?}");
            }
        }
    };
    // NaN shows what is read before it is written.
    let mut scratch = vec![f32::NAN; g.scratch_len(cx.par.workers())];
    g.pass(cx, a, b, Epilogue::new(&call), &mut scratch);
    let c: Vec<f32> = c.into_iter().map(|v| f32::from_bits(v.into_inner())).collect();
    assert!(c.iter().all(|v| v.to_bits() != NONE), "all of C is passed on: {g:?}");
    c
}

#[track_caller]
fn same(what: &str, g: &PairGemm, got: &[f32], want: &[f32]) {
    for (i, (x, w)) in got.iter().zip(want).enumerate() {
        let same = x.to_bits() == w.to_bits() || (x.is_nan() && w.is_nan());
        assert!(
            same,
            "{what}: element {i} is {x:e} ({:#x}), not {w:e} ({:#x}): {g:?}",
            x.to_bits(),
            w.to_bits()
        );
    }
}

fn product(batch: usize, (m, n, k): (usize, usize, usize), forms: (usize, usize), pad: usize) -> Gemm {
    Gemm {
        batch,
        m,
        n,
        k,
        a: layout(m, k, forms.0, pad),
        b: layout(k, n, forms.1, pad),
        c: Strides { batch: 0, row: 0, col: 0 },
        accumulate: false,
        strict: false,
    }
}

/// In both orders, with operands in f32 and in bf16: the bits of the oracle, and for `Pairs` those that one worker has.
fn check(
    batch: usize,
    shape: (usize, usize, usize),
    forms: (usize, usize),
    pad: usize,
    values: OperandValues,
) {
    let gemm = product(batch, shape, forms, pad);
    let a = floats(values, batch * gemm.a.batch, 1);
    let b = floats(values, batch * gemm.b.batch, 2);
    let half = |x: &[f32]| x.iter().map(|&v| bf16_from_f32(v)).collect::<Vec<bf16>>();
    let (a_half, b_half) = (half(&a), half(&b));
    let pairs = |a_rounds: bool, b_rounds: bool| {
        (
            if a_rounds { Floats::F32(&a) } else { Floats::Bf16(&a_half) },
            if b_rounds { Floats::F32(&b) } else { Floats::Bf16(&b_half) },
        )
    };
    let tiles = PairGemm { gemm: gemm.clone(), order: PairOrder::Tiles };
    let want = collect(&tiles, &Cx::oracle(), Floats::Bf16(&a_half), Floats::Bf16(&b_half));
    // The oracle is slow.
    let again = (shape.0 * shape.1 * shape.2 < 10_000).then_some(Isa::SCALAR);
    let vectors = Isa::available().chain([Isa::detect()]).filter(|isa| isa.has_avx2());
    for isa in vectors.chain(again) {
        for (i, workers) in [1, 3].into_iter().enumerate() {
            let cx = Cx { isa, par: &Reverse(workers) };
            for (a_rounds, b_rounds) in [(i == 0, i == 1), (i == 1, i == 1)] {
                let (a, b) = pairs(a_rounds, b_rounds);
                same(isa.name(), &tiles, &collect(&tiles, &cx, a, b), &want);
            }
        }
    }
    let pair_order = PairGemm { gemm, order: PairOrder::Pairs };
    let (a, b) = pairs(true, true);
    let got = collect(&pair_order, &Cx::serial(), a, b);
    if let OperandValues::Ordinary = values {
        // Sums of k products grow to about √k/12, and each of k additions rounds them by up to 2⁻²⁴, in either direction.
        let tolerance = 1e-6 + 6.0 * shape.2 as f32 / 12.0 * 2f32.powi(-24);
        for (i, (x, w)) in got.iter().zip(&want).enumerate() {
            assert!((x - w).abs() <= tolerance, "element {i}: {x}, not {w}: {pair_order:?}");
        }
    }
    let (a, b) = pairs(false, false);
    let again = collect(&pair_order, &Cx { isa: Isa::detect(), par: &Reverse(3) }, a, b);
    same("pairs with other workers", &pair_order, &again, &got);
}

#[test]
fn awkward_shapes_have_the_bits_of_the_oracle() {
    let dims = [0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 49, 70];
    for (i, m) in dims.into_iter().enumerate() {
        for (j, n) in dims.into_iter().enumerate() {
            for (l, k) in dims.into_iter().enumerate() {
                // Every form and all values meet every size, without the whole product of them.
                let turn = i + 2 * j + 3 * l;
                let forms = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (0, 2), (2, 1)][turn % 7];
                let values = [OperandValues::Ordinary, OperandValues::Any, OperandValues::Tiny][turn / 7 % 3];
                check(1, (m, n, k), forms, turn % 3, values);
            }
        }
    }
}

#[test]
fn every_rest_of_a_unit_agrees() {
    for rest in 0..17 {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)] {
            for values in [OperandValues::Ordinary, OperandValues::Any, OperandValues::Tiny] {
                check(2, (16 + rest, 33 + rest, 49 + rest), forms, rest % 2, values);
            }
        }
    }
}

/// Several tasks, sweeps and blocks of k; operands that are shared and that are not.
#[test]
fn blocks_of_every_dim_agree() {
    for (batch, shape) in [
        (1, (300, 70, 900)),
        (1, (70, 300, 1100)),
        (1, (5, 600, 1000)),
        (1, (600, 5, 1000)),
        (1, (410, 560, 130)),
        (1, (10, 10, 5000)),
        (1, (20, 1400, 96)),
        (2, (300, 70, 900)),
        (7, (70, 20, 30)),
        (3, (16, 16, 700)),
        (0, (3, 3, 3)),
    ] {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            check(batch, shape, forms, 1, OperandValues::Ordinary);
        }
        check(batch, shape, (0, 1), 0, OperandValues::Tiny);
    }
    check(1, (18, 17, 66_000), (0, 1), 0, OperandValues::Ordinary);
    check(1, (37, 100, 21_000), (1, 0), 0, OperandValues::Ordinary);
    let shared = |batch, shape| {
        let plan = plan::PairPlan::new(&PairShape::of(&product(batch, shape, (0, 0), 0)));
        assert!(plan.n_tasks() > batch);
        (plan.a.shared, plan.b.shared, plan.n_kb > 1, plan.n_rounds() > 1)
    };
    assert_eq!(shared(1, (300, 70, 900)), (true, true, true, false));
    assert_eq!(shared(1, (410, 560, 130)), (true, true, false, false));
    assert_eq!(shared(2, (300, 70, 900)), (false, false, true, false));
    assert_eq!(shared(1, (18, 17, 66_000)), (true, true, true, true));
    assert_eq!(shared(1, (37, 100, 21_000)), (true, true, true, true));
}

/// An operand that is larger than what is copied at once, on either side.
#[test]
fn large_operands_agree() {
    let by_parts = |m: usize, n: usize, k: usize| {
        let plan = plan::PairPlan::new(&PairShape::of(&product(1, (m, n, k), (0, 0), 0)));
        (plan.a.shared, plan.b.shared)
    };
    assert_eq!(by_parts(4100, 17, 520), (false, true));
    assert_eq!(by_parts(17, 4100, 520), (true, false));
    check(1, (4100, 17, 520), (0, 1), 0, OperandValues::Ordinary);
    check(1, (17, 4100, 520), (1, 0), 0, OperandValues::Ordinary);
}

#[test]
fn sums_of_f32_are_near_those_of_a_product_in_f64() {
    let gemm = product(1, (40, 50, 300), (0, 1), 0);
    let (a, b) = (numbers(40 * 300, 5), numbers(300 * 50, 6));
    let exact = |x: f32| f64::from(f32_from_bf16(bf16_from_f32(x)));
    for order in [PairOrder::Tiles, PairOrder::Pairs] {
        let g = PairGemm { gemm: gemm.clone(), order };
        let got = collect(&g, &Cx::serial(), Floats::F32(&a), Floats::F32(&b));
        for (i, x) in got.into_iter().enumerate() {
            let want: f64 = (0..300).map(|l| exact(a[i / 50 * 300 + l]) * exact(b[i % 50 * 300 + l])).sum();
            assert!((f64::from(x) - want).abs() < 1e-5, "element {i}: {x} for {want}");
        }
    }
}

#[test]
fn an_operand_may_be_shared_by_the_batch_and_overlap() {
    let mut gemm = product(3, (20, 18, 33), (0, 0), 0);
    gemm.a = Strides { batch: 7, row: 1, col: 1 };
    gemm.b.batch = 0;
    let (a, b) = (numbers(200, 1), numbers(33 * 18, 2));
    let g = PairGemm { gemm, order: PairOrder::Tiles };
    let want = collect(&g, &Cx::oracle(), Floats::F32(&a), Floats::F32(&b));
    same("overlapping", &g, &collect(&g, &Cx::serial(), Floats::F32(&a), Floats::F32(&b)), &want);
}

#[test]
fn kept_products_are_rounded_to_the_format_of_c() {
    let (batch, m, n, k) = (2, 21, 35, 50);
    let mut gemm = product(batch, (m, n, k), (0, 1), 0);
    gemm.c = layout(m, n, 0, 3);
    let (a, b) = (numbers(batch * m * k, 1), numbers(batch * k * n, 2));
    let (a, b) = (Floats::F32(&a), Floats::F32(&b));
    let g = PairGemm { gemm, order: PairOrder::Tiles };
    let want = collect(&g, &Cx::oracle(), a, b);
    for isa in Isa::available() {
        let cx = Cx { isa, par: &Reverse(3) };
        let len = batch * g.gemm.c.batch;
        let (mut wide, mut half) = (vec![9.0; len], vec![bf16::from_bits(7); len]);
        let mut scratch = vec![f32::NAN; g.scratch_len(3)];
        g.run(&cx, a, b, FloatsMut::F32(&mut wide), &mut scratch);
        g.run(&cx, a, b, FloatsMut::Bf16(&mut half), &mut scratch);
        for at in 0..len {
            let (batch, row, col) =
                (at / g.gemm.c.batch, at % g.gemm.c.batch / (n + 3), at % g.gemm.c.batch % (n + 3));
            let sum = (row < m && col < n).then(|| want[(batch * m + row) * n + col]);
            assert_eq!(wide[at], sum.unwrap_or(9.0), "{isa:?}");
            assert_eq!(half[at], sum.map_or(bf16::from_bits(7), bf16_from_f32), "{isa:?}");
        }
    }
}

/// The check that AMX must pass before it is used: its twins do, and what sums in another order does not.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_check_of_amx_finds_other_bits() {
    let isa = Isa::detect();
    if isa.has_avx2() {
        // SAFETY: the ISA has AVX2.
        assert!(amx::agrees(|block| unsafe { avx2::multiply(block) }));
    }
    if isa.has_avx512() {
        // SAFETY: the ISA has AVX-512.
        assert!(amx::agrees(|block| unsafe { avx512::multiply(block) }));
    }
    if isa.has(Feature::Avx512Bf16) {
        // SAFETY: the ISA has AVX512-BF16.
        assert!(!amx::agrees(|block| unsafe { avx512_bf16::multiply(block) }));
    }
    assert!(!amx::agrees(|_| ()));
    let found = amx_state();
    assert_eq!(found == AmxState::Absent, !isa.has(Feature::AmxBf16), "{found}");
    assert_ne!(found, AmxState::Differs);
    if found != AmxState::Ready {
        use std::io::Write as _;
        writeln!(std::io::stderr(), "not tested: products with AMX ({found})").unwrap();
    }
}

/// What a kernel did to MXCSR would change all that is computed after it.
#[cfg(target_arch = "x86_64")]
#[test]
fn denormals_are_kept_elsewhere() {
    let g = PairGemm { gemm: product(1, (20, 20, 40), (0, 0), 0), order: PairOrder::Tiles };
    let (a, b) = (numbers(800, 1), numbers(800, 2));
    for isa in Isa::available() {
        collect(&g, &Cx { isa, ..Cx::serial() }, Floats::F32(&a), Floats::F32(&b));
        let least = std::hint::black_box(f32::MIN_POSITIVE);
        assert!((least / 2.0).is_subnormal() && least / 2.0 > 0.0, "{isa:?}");
    }
}

#[test]
fn pairs_pay_for_large_products_with_their_own_instructions() {
    let pays = |shape, order, isa| PairGemm { gemm: product(1, shape, (0, 0), 0), order }.pays(isa);
    let all = Isa::detect();
    assert_eq!(pays((2048, 384, 384), PairOrder::Pairs, all), all.has(Feature::Avx512Bf16));
    assert_eq!(pays((2048, 384, 384), PairOrder::Tiles, all), amx_state() == AmxState::Ready);
    for shape in [(16, 512, 512), (512, 16, 512), (512, 512, 16), (0, 0, 0)] {
        assert!(!pays(shape, PairOrder::Pairs, all), "{shape:?}");
    }
    for isa in Isa::available() {
        assert!(!pays((2048, 384, 384), PairOrder::Tiles, isa), "{isa:?}");
        assert!(!pays((2048, 384, 384), PairOrder::Pairs, isa), "a twin does not: {isa:?}");
    }
}

#[test]
#[should_panic(expected = "f16 is multiplied in f32")]
fn f16_is_refused() {
    let g = PairGemm { gemm: product(1, (2, 2, 2), (0, 0), 0), order: PairOrder::Tiles };
    let (a, b) = ([f16::ZERO; 4], [0.0; 4]);
    let mut scratch = vec![0.0; g.scratch_len(1)];
    g.pass(&Cx::serial(), Floats::F16(&a), Floats::F32(&b), Epilogue::new(&|_| ()), &mut scratch);
}

#[test]
#[should_panic(expected = "A is inside its slice")]
fn a_short_operand_is_refused() {
    let g = PairGemm { gemm: product(1, (2, 2, 2), (0, 0), 0), order: PairOrder::Pairs };
    let (a, b) = ([0.0; 3], [0.0; 4]);
    let mut scratch = vec![0.0; g.scratch_len(1)];
    g.pass(&Cx::serial(), Floats::F32(&a), Floats::F32(&b), Epilogue::new(&|_| ()), &mut scratch);
}
