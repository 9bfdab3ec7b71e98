//! Attention with products of bf16 against products of whole matrices, bit for bit, and near attention in f32.

use polyreme_dtype::DType;

use super::rows::RowPasses;
use super::tests::{AttentionCase, AttentionResults, MaskKind, close};
use super::*;
use crate::Feature;
use crate::floats::testing::OwnedFloats;
use crate::gemm::pairs::testing::product;
use crate::gemm::pairs::{AmxState, amx_state};
use crate::lanes::testing::Reverse;

/// The formulas of the module's head on whole matrices of each head, with the row passes of an instruction set. Sums in the
/// order of AMX are the oracle's.
fn whole<R: RowPasses>(case: &AttentionCase, order: PairOrder, isa: Isa) -> AttentionResults {
    let oracle = order == PairOrder::Tiles;
    let cx = Cx { isa: if oracle { Isa::SCALAR } else { isa }, par: &crate::Serial };
    let (at, written) = (&case.at, case.stored.1);
    let (t_q, t_k, d) = (at.t_q, at.t_k, at.d);
    let round = |x: Vec<f32>| OwnedFloats::new(written, &x).wide();
    let unset = |x: &[f32]| vec![f32::NAN; x.len()];
    let mut all = AttentionResults {
        o: unset(&case.q),
        lse: vec![f32::NAN; at.lse_len()],
        dq: unset(&case.q),
        dk: unset(&case.k),
        dv: unset(&case.v),
    };
    for (b, h) in (0..at.batch * at.heads).map(|i| (i / at.heads, i % at.heads)) {
        let rows_at = |t_max: usize, t: usize| ((b * t_max + t) * at.heads + h) * d;
        let matrix = |x: &[f32], t_max: usize| -> Vec<f32> {
            (0..t_max).flat_map(|t| x[rows_at(t_max, t)..][..d].to_vec()).collect()
        };
        let put = |to: &mut [f32], t_max: usize, from: &[f32]| {
            for t in 0..t_max {
                to[rows_at(t_max, t)..][..d].copy_from_slice(&from[t * d..][..d]);
            }
        };
        let (q, k, v) = (matrix(&case.q, t_q), matrix(&case.k, t_k), matrix(&case.v, t_k));
        let dy = matrix(&case.dy, t_q);
        let mask = |t: usize, n: usize| {
            let row = case.mask().map(|m| &m.data[b * m.batch + h * m.head + t * m.row..][..n]);
            row.filter(|_| n > 0)
        };
        let scores = product(&cx, order, (t_q, t_k, d), (&q, false), (&k, true));
        let mut p = vec![0.0; t_q * t_k];
        let lse = &mut all.lse[(b * at.heads + h) * t_q..][..t_q];
        let mut inverse = vec![0.0; t_q];
        for t in 0..t_q {
            let n = at.keys(t);
            let mut row = vec![f32::NAN; n.next_multiple_of(16) + 16];
            row[..n].copy_from_slice(&scores[t * t_k..][..n]);
            // SAFETY: the passes are those of the instruction set, which was detected.
            let (max, sum) = unsafe { R::exponentials(&mut row, n, at.scale, mask(t, n)) };
            p[t * t_k..][..n].copy_from_slice(&row[..n]);
            lse[t] = if sum != 0.0 { max + sum.ln() } else { max };
            inverse[t] = if sum != 0.0 { 1.0 / sum } else { 0.0 };
        }
        let mut o = product(&cx, order, (t_q, d, t_k), (&p, false), (&v, false));
        for (o, inverse) in o.chunks_exact_mut(d).zip(&inverse) {
            o.iter_mut().for_each(|o| *o *= inverse);
        }
        let o = round(o);
        put(&mut all.o, t_q, &o);

        let dp = product(&cx, order, (t_q, t_k, d), (&dy, false), (&v, true));
        let mut ds = vec![0.0; t_q * t_k];
        p.fill(0.0);
        for t in 0..t_q {
            let n = at.keys(t);
            let [mut p_row, mut ds_row] = [0; 2].map(|_| vec![f32::NAN; n.next_multiple_of(16) + 16]);
            p_row[..n].copy_from_slice(&scores[t * t_k..][..n]);
            ds_row[..n].copy_from_slice(&dp[t * t_k..][..n]);
            // SAFETY: as above.
            unsafe {
                let delta = R::dot(&dy[t * d..][..d], &o[t * d..][..d]);
                R::probabilities(&mut p_row, &mut ds_row, n, at.scale, mask(t, n), lse[t], delta);
            }
            p[t * t_k..][..n].copy_from_slice(&p_row[..n]);
            ds[t * t_k..][..n].copy_from_slice(&ds_row[..n]);
        }
        let scaled = |x: Vec<f32>| round(x.into_iter().map(|x| at.scale * x).collect());
        put(&mut all.dq, t_q, &scaled(product(&cx, order, (t_q, d, t_k), (&ds, false), (&k, false))));
        put(&mut all.dk, t_k, &scaled(product(&cx, order, (t_k, d, t_q), (&ds, true), (&q, false))));
        put(&mut all.dv, t_k, &round(product(&cx, order, (t_k, d, t_q), (&p, true), (&dy, false))));
    }
    all
}

/// In both orders, for every instruction set and number of workers: the bits of whole matrices; those of AVX2 and AVX-512 are
/// the same in the order of AMX, and all are near f32's.
fn check(batch: usize, heads: usize, t_q: usize, t_k: usize, d: usize, causal: bool, kind: MaskKind) {
    let case = AttentionCase::new(batch, heads, t_q, t_k, d, causal, kind).rounded(DType::Bf16);
    let f32 = case.run(&Cx::serial());
    for written in [DType::Bf16, DType::F32] {
        let case = case.stored(DType::Bf16, written);
        for order in [PairOrder::Tiles, PairOrder::Pairs] {
            let case = case.rounded(DType::F32).with(Some(order));
            let what =
                format!("{batch}×{heads} heads, {t_q}×{t_k}×{d}, causal {causal}, {kind:?}, {order:?}");
            let mut vectors = None;
            for isa in Isa::available().chain([Isa::detect()]) {
                let want = by_isa!(isa, whole)(&case, order, isa);
                for workers in [1, 3] {
                    let got = case.run(&Cx { isa, par: &Reverse(workers) });
                    assert_eq!(got, want, "{what} in {written} on {workers} workers with {isa:?}");
                }
                // Five products of numbers near one, each operand rounded to eight bits.
                for (name, want, got) in [
                    ("o", &f32.o, &want.o),
                    ("dq", &f32.dq, &want.dq),
                    ("dk", &f32.dk, &want.dk),
                    ("dv", &f32.dv, &want.dv),
                ] {
                    close(got, want, 2e-2, &format!("{name} of {what} with {isa:?}"));
                }
                if isa.has_avx2() && order == PairOrder::Tiles {
                    assert_eq!(
                        &want,
                        vectors.get_or_insert(case.run(&Cx { isa, par: &Reverse(1) })),
                        "{what}"
                    );
                }
            }
        }
    }
}

#[test]
fn blocks_have_the_bits_of_whole_matrices() {
    for t in [1, 15, 17, 32, 33, 65] {
        for d in [8, 20, 64] {
            check(1, 2, t, t, d, true, MaskKind::None);
        }
        check(2, 1, t, t, 20, false, MaskKind::None);
    }
    for (t_q, t_k) in [(1, 50), (50, 1), (13, 33), (70, 30), (30, 70)] {
        for causal in [false, true] {
            for kind in [MaskKind::Shared, MaskKind::Keys, MaskKind::Full] {
                check(1, 2, t_q, t_k, 20, causal, kind);
            }
        }
    }
    // Several blocks of keys in backward, and several tasks of queries forward.
    check(1, 1, 40, 1100, 8, false, MaskKind::Full);
    check(1, 1, 600, 600, 8, true, MaskKind::None);
    check(1, 1, 0, 3, 4, true, MaskKind::None);
    check(1, 1, 3, 0, 4, false, MaskKind::None);
}

/// Operands in f32 are rounded as they are copied, all but those of sums in f32.
#[test]
fn operands_in_f32_are_rounded() {
    for order in [PairOrder::Tiles, PairOrder::Pairs] {
        let case = AttentionCase::new(1, 2, 40, 33, 20, false, MaskKind::Full).with(Some(order));
        let half = case.stored(DType::Bf16, DType::F32);
        let (wide, half) = (case.run(&Cx::serial()), half.run(&Cx::serial()));
        assert_eq!((&wide.o, &wide.lse, &wide.dv), (&half.o, &half.lse, &half.dv));
    }
}

#[test]
fn pairs_pay_for_long_heads_with_their_own_instructions() {
    let pays = |t_q, t_k, d, order, isa| {
        Attention { products: Some(order), ..Attention::separate(1, t_q, t_k, 1, d, true) }.pays(isa)
    };
    let all = Isa::detect();
    let (tiles, pairs) = (PairOrder::Tiles, PairOrder::Pairs);
    assert_eq!(pays(256, 256, 64, pairs, all), all.has(Feature::Avx512Bf16));
    assert_eq!(pays(256, 256, 64, tiles, all), amx_state() == AmxState::Ready);
    assert!(
        !pays(16, 256, 64, pairs, all) && !pays(256, 16, 64, pairs, all) && !pays(256, 256, 16, pairs, all)
    );
    assert!(!Attention::separate(1, 256, 256, 1, 64, true).pays(all), "f32 was asked for");
    for isa in Isa::available() {
        assert!(
            !pays(256, 256, 64, tiles, isa) && !pays(256, 256, 64, pairs, isa),
            "a twin does not: {isa:?}"
        );
    }
}

#[test]
#[should_panic(expected = "f16 is multiplied in f32")]
fn f16_is_refused() {
    let case = AttentionCase::new(1, 1, 4, 4, 4, false, MaskKind::None).with(Some(PairOrder::Tiles));
    case.stored(DType::F16, DType::F16).run(&Cx::serial());
}
