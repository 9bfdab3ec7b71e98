use super::super::tests::{layout, numbers};
use super::*;
use crate::Isa;
use crate::floats::testing::{FORMATS, HALVES, OwnedFloats, same_rounded};
use crate::lanes::testing::Reverse;

/// Formats of A, B and C, and what f32 is rounded to: every pair of formats of the operands that has something to convert.
fn formats() -> impl Iterator<Item = (DType, DType, DType, Option<DType>)> {
    HALVES.into_iter().flat_map(|half| {
        let both = [(half, half), (half, DType::F32), (DType::F32, half), (DType::F32, DType::F32)];
        both.into_iter().flat_map(move |(a, b)| {
            let plain = (a != b || a == half).then_some(None);
            let results = FORMATS.into_iter().filter(move |c| *c == half || *c == DType::F32);
            results.flat_map(move |c| {
                plain.into_iter().chain([Some(Some(half))]).map(move |rounded| (a, b, c, rounded.flatten()))
            })
        })
    })
}

/// The bits of widening everything, running the kernel of f32, and rounding: with every instruction set, on any workers, with
/// an epilogue and without, kept and passed on.
fn check(batch: usize, (m, n, k): (usize, usize, usize), forms: (usize, usize), pad: usize, strict: bool) {
    let g = Gemm {
        batch,
        m,
        n,
        k,
        a: layout(m, k, forms.0, pad),
        b: layout(k, n, forms.1, pad),
        c: layout(m, n, 0, pad),
        accumulate: false,
        strict,
    };
    let (a_values, b_values) = (numbers(batch * g.a.batch, 1), numbers(batch * g.b.batch, 2));
    // Of a large product, each layout takes its turn of the formats; and the oracle, which has one way only, none.
    let large = m * n * k >= 1 << 18;
    let turn = if large { (forms.0 + 2 * forms.1, 3) } else { (0, 1) };
    for (i, (a_type, b_type, c_type, rounded)) in formats().enumerate().skip(turn.0).step_by(turn.1) {
        let (a, b) = (OwnedFloats::new(a_type, &a_values), OwnedFloats::new(b_type, &b_values));
        let wide = |x: &OwnedFloats| match rounded {
            Some(half) => OwnedFloats::new(half, &x.wide()).wide(),
            None => x.wide(),
        };
        let (a_wide, b_wide) = (wide(&a), wide(&b));
        let product = WideGemm { gemm: g.clone(), a: a_type, b: b_type, c: c_type, rounded };
        let epilogue = |block: OutputBlock| {
            let col = block.col;
            for row in block.into_rows() {
                row.iter_mut().enumerate().for_each(|(j, v)| *v = *v * 2.0 + (col + j) as f32);
            }
        };
        let epilogue = (i % 2 == 0).then(|| Epilogue::new(&epilogue));
        let isas = Isa::available().chain([Isa::detect().without(crate::Feature::F16c)]);
        for isa in isas.filter(|isa| isa.has_avx2() || !large) {
            let mut want = OwnedFloats::unset(DType::F32, batch * g.c.batch);
            let FloatsMut::F32(c) = want.get_mut() else { unreachable!() };
            let serial = Cx { isa, par: &crate::Serial };
            // NaN shows what is read before it is written.
            g.run(&serial, &a_wide, &b_wide, c, epilogue, &mut vec![f32::NAN; g.scratch_len(1)]);
            for workers in [1, 3] {
                let cx = Cx { isa, par: &Reverse(workers) };
                let what = format!("{product:?} on {workers} workers with {}", isa.name());
                let mut got = OwnedFloats::unset(c_type, batch * g.c.batch);
                let mut scratch = vec![f32::NAN; product.scratch_len(workers)];
                product.run(&cx, a.get(), b.get(), got.get_mut(), epilogue, &mut scratch);
                same_rounded(&what, &[got], std::slice::from_ref(&want));
                if epilogue.is_some() {
                    continue;
                }
                let mut passed = OwnedFloats::unset(DType::F32, batch * g.c.batch);
                let shared = SharedFloats::new(passed.get_mut());
                let keep = |block: OutputBlock| {
                    let first = block.batch * g.c.batch + block.row * g.c.row + block.col;
                    for (r, row) in block.into_rows().enumerate() {
                        // SAFETY: blocks are disjoint.
                        unsafe { shared.part(first + r * g.c.row, row.len()) }.round(isa, row);
                    }
                };
                let mut scratch = vec![f32::NAN; product.pass_scratch_len(workers)];
                product.pass(&cx, a.get(), b.get(), Epilogue::new(&keep), &mut scratch);
                same_rounded(&what, &[passed], std::slice::from_ref(&want));
            }
        }
    }
}

#[test]
fn awkward_shapes_have_the_bits_of_f32() {
    let dims = [1, 5, 16, 17, 33];
    for (i, m) in dims.into_iter().enumerate() {
        for (j, n) in dims.into_iter().enumerate() {
            for (l, k) in [0, 1, 7, 40].into_iter().enumerate() {
                let turn = i + 2 * j + 3 * l;
                for forms in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)] {
                    check(1 + turn % 2, (m, n, k), forms, turn % 3, false);
                }
            }
        }
    }
}

#[test]
fn blocks_of_every_dim_have_the_bits_of_f32() {
    for shape in
        [(150, 70, 900), (70, 150, 900), (5, 300, 1000), (300, 5, 1000), (290, 270, 130), (10, 10, 1700)]
    {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)] {
            check(1, shape, forms, 3, false);
        }
        check(1, shape, (1, 1), 0, true);
    }
}

/// A matrix by a vector, of more outputs and steps than are converted at a time.
#[test]
fn thin_products_have_the_bits_of_f32() {
    for shape in [(1, 333, 70), (333, 1, 70), (1, 300, 1200), (300, 1, 1200)] {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            check(2, shape, forms, 1, false);
        }
    }
}

#[test]
fn batches_have_the_bits_of_f32() {
    for (batch, shape) in [(0, (3, 3, 3)), (7, (70, 20, 30)), (3, (200, 64, 64)), (3, (16, 16, 700))] {
        for forms in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            check(batch, shape, forms, 1, false);
        }
    }
}

/// Seven products in one round and in several, and panels in several rounds: C is whole then.
#[test]
fn large_products_have_the_bits_of_f32() {
    for forms in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        check(1, (1024, 260, 258), forms, 0, false);
    }
    check(1, (1026, 810, 770), (0, 1), 1, false);
    check(1, (140, 1100, 1000), (1, 0), 0, false);
    #[cfg(target_arch = "x86_64")]
    for ((m, n, k), rounds) in [((1024, 260, 258), 1), ((1026, 810, 770), 3)] {
        let [a, b, c] = [layout(m, k, 0, 0), layout(k, n, 1, 0), layout(m, n, 0, 0)];
        let g = Gemm { batch: 1, m, n, k, a, b, c, accumulate: false, strict: false };
        let cut = super::super::seven::SevenCut::new(&g).expect("large enough");
        assert_eq!(cut.completes(), rounds == 1, "{g:?}");
    }
}

/// Infinities, NaNs, subnormals and what becomes infinite in f16, of which a product shows that they were read.
#[test]
fn odd_values_are_converted_alike() {
    let odd = [
        f32::INFINITY,
        f32::NAN,
        1e-7,
        -6e-5,
        65519.0,
        65520.0,
        -7e4,
        3e38,
        f32::MIN_POSITIVE,
        -0.0,
        1.0 + 1e-3,
    ];
    let n = 3 * odd.len();
    let values: Vec<f32> = odd.iter().cycle().take(n).copied().collect();
    let one = [1.0];
    let plain = |cols: usize| super::super::Strides { batch: 0, row: cols, col: 1 };
    let gemm = Gemm {
        batch: 1,
        m: 1,
        n,
        k: 1,
        a: plain(1),
        b: plain(n),
        c: plain(n),
        accumulate: false,
        strict: false,
    };
    for half in HALVES {
        for (b, rounded) in [(half, None), (DType::F32, Some(half))] {
            let x = OwnedFloats::new(b, &values);
            let want = OwnedFloats::new(half, &values).wide();
            for isa in Isa::available() {
                let product = WideGemm { gemm: gemm.clone(), a: DType::F32, b, c: DType::F32, rounded };
                let mut got = vec![7.0; n];
                let mut scratch = vec![f32::NAN; product.scratch_len(1)];
                let cx = Cx { isa, par: &crate::Serial };
                product.run(&cx, Floats::F32(&one), x.get(), FloatsMut::F32(&mut got), None, &mut scratch);
                for (got, want) in got.iter().zip(&want) {
                    assert!(got == want || got.is_nan() && want.is_nan(), "{got}, not {want}, in {half}");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "the formats of A and B")]
fn another_format_than_was_said_is_refused() {
    let one = super::super::Strides { batch: 0, row: 1, col: 1 };
    let gemm = Gemm { batch: 1, m: 1, n: 1, k: 1, a: one, b: one, c: one, accumulate: false, strict: false };
    let product = WideGemm { gemm, a: DType::F16, b: DType::F16, c: DType::F32, rounded: None };
    let (x, mut c) = ([1.0], [0.0]);
    let mut scratch = vec![0.0; product.scratch_len(1)];
    product.run(&Cx::serial(), Floats::F32(&x), Floats::F32(&x), FloatsMut::F32(&mut c), None, &mut scratch);
}
