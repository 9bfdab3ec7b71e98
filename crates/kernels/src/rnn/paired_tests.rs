//! Cells with products of bf16 against products of whole matrices, step by step, bit for bit, and near f32.

use polyreme_dtype::DType;

use super::sequence::Sequence;
use super::tests::{F32, Formats, RnnCase, RnnResults};
use super::*;
use crate::floats::testing::OwnedFloats;
use crate::gemm::pairs::testing::product;
use crate::gemm::pairs::{AmxState, PairOrder, amx_state};
use crate::lanes::testing::Reverse;
use crate::{Cx, Feature, Isa};

fn round(dtype: DType, x: &[f32]) -> Vec<f32> {
    OwnedFloats::new(dtype, x).wide()
}

/// All steps of a case with what has T steps in `dtype`. The cells are those of the instruction set; sums in the order of AMX
/// are the oracle's.
fn whole(case: &RnnCase, order: PairOrder, isa: Isa, dtype: DType) -> RnnResults {
    let oracle = order == PairOrder::Tiles;
    let cx = Cx { isa: if oracle { Isa::SCALAR } else { isa }, par: &crate::Serial };
    let &RnnCase { lstm, batch, time, hidden: h, reverse, .. } = case;
    let n_gates = if lstm { 4 } else { 3 };
    let width = n_gates * h;
    let seq = Sequence { batch, time, hidden: h, gates: n_gates, reverse, strict: false, products: None };
    let [xp, w, bias, h0, c0] = &case.inputs;
    let bias = case.bias.then_some(&bias[..]);
    let (xp, dy) = (round(dtype, xp), round(dtype, &case.dy));
    let states = batch * time * h;
    let [mut y, mut cells] = [0; 2].map(|_| vec![f32::NAN; states]);
    let mut gates = vec![f32::NAN; 4 * states];

    let (mut state, mut cell) = (h0.clone(), c0.clone());
    for s in 0..time {
        let sums = product(&cx, order, (batch, width, h), (&state, false), (w, true));
        for b in 0..batch {
            let row = seq.row(b, s);
            let (sums, xp) = (&sums[b * width..][..width], &xp[row * width..][..width]);
            let (gates, y) = (&mut gates[row * 4 * h..][..4 * h], &mut y[row * h..][..h]);
            let state = &mut state[b * h..][..h];
            if lstm {
                let (before, c) = (cell[b * h..][..h].to_vec(), &mut cell[b * h..][..h]);
                let step = lstm::ForwardStep { z: sums, xp, bias, c_before: &before, gates, c, y };
                lstm::lstm_forward(isa, h, step, state);
                cells[row * h..][..h].copy_from_slice(&cell[b * h..][..h]);
            } else {
                gru::gru_forward(isa, h, gru::ForwardStep { hp: sums, xp, bias, gates, state, y });
            }
        }
    }
    let (y, cells, gates) = (round(dtype, &y), round(dtype, &cells), round(dtype, &gates));

    let last = |x: &Option<Vec<f32>>| x.clone().unwrap_or_else(|| vec![0.0; batch * h]);
    let (mut dh, mut dc) = (last(&case.dh_n), last(&case.dc_n));
    let mut dxp = vec![f32::NAN; batch * time * width];
    let mut dhp_all = dxp.clone();
    let mut h_before = y.clone();
    for s in (0..time).rev() {
        let mut dhp = vec![f32::NAN; batch * width];
        for b in 0..batch {
            let row = seq.row(b, s);
            let earlier = |first: &[f32], later: &[f32]| match s {
                0 => first[b * h..][..h].to_vec(),
                _ => later[seq.row(b, s - 1) * h..][..h].to_vec(),
            };
            let before = earlier(h0, &y);
            h_before[row * h..][..h].copy_from_slice(&before);
            let (dy, gates) = (&dy[row * h..][..h], &gates[row * 4 * h..][..4 * h]);
            let (dhp, dxp) = (&mut dhp[b * width..][..width], &mut dxp[row * width..][..width]);
            let dh = &mut dh[b * h..][..h];
            if lstm {
                let (c_before, c) = (&earlier(c0, &cells)[..], &cells[row * h..][..h]);
                let dc = &mut dc[b * h..][..h];
                lstm::lstm_backward(isa, h, lstm::BackwardStep { dy, gates, c_before, c, dh, dc, dz: dhp });
                dxp.copy_from_slice(dhp);
            } else {
                gru::gru_backward(isa, h, gru::BackwardStep { dy, gates, before: &before, dh, dxp, dhp });
            }
            dhp_all[row * width..][..width].copy_from_slice(dhp);
        }
        let sums = product(&cx, order, (batch, h, width), (&dhp, false), (w, false));
        for (dh, sum) in dh.iter_mut().zip(sums) {
            *dh = if lstm { sum } else { *dh + sum };
        }
    }
    let dxp = round(dtype, &dxp);
    // Those of a GRU are kept in bf16, as dxp has others.
    let dhp_all = if lstm { dxp.clone() } else { round(DType::Bf16, &dhp_all) };
    let dw = product(&cx, order, (width, h, batch * time), (&dhp_all, true), (&h_before, false));
    let mut db = vec![0.0; width];
    for row in dhp_all.chunks_exact(width.max(1)).filter(|_| case.bias) {
        db.iter_mut().zip(row).for_each(|(db, d)| *db += d);
    }
    let dc = if lstm { dc } else { vec![0.0; batch * h] };
    (y, [dxp, dw, db, dh, dc])
}

/// In both orders, for every instruction set and number of workers: the bits of whole matrices; those of AVX2 and AVX-512 are
/// the same in the order of AMX, and all are near f32's.
fn check(lstm: bool, batch: usize, time: usize, hidden: usize, reverse: bool) {
    let mut case = RnnCase::new(lstm, batch, time, hidden, reverse, batch != 2);
    let f32 = case.run(&Cx::serial());
    for (dtype, order) in [DType::Bf16, DType::F32]
        .into_iter()
        .flat_map(|dtype| [(dtype, PairOrder::Tiles), (dtype, PairOrder::Pairs)])
    {
        case.products = Some(order);
        let what = format!("lstm {lstm}, {batch}×{time}×{hidden}, reverse {reverse}, {dtype}, {order:?}");
        let formats = Formats::all(dtype);
        let mut vectors = None;
        for isa in Isa::available().chain([Isa::detect()]) {
            let want = whole(&case, order, isa, dtype);
            for workers in [1, 3] {
                let got = case.run_stored(&Cx { isa, par: &Reverse(workers) }, formats, formats);
                assert_eq!(got, want, "{what}, {workers} workers, {isa:?}");
            }
            let names = ["y", "dxp", "dw_hh", "db_hh", "dh0", "dc0"];
            let tensors = [&f32.0].into_iter().chain(&f32.1).zip([&want.0].into_iter().chain(&want.1));
            for (name, (f32, got)) in names.iter().zip(tensors) {
                let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
                let far = norm(&mut f32.iter().zip(got).map(|(a, b)| a - b));
                let size = norm(&mut f32.iter().copied());
                assert!(far <= 16.0 / 256.0 * size, "{name} of {what}, {isa:?}: {far} away of {size}");
            }
            if isa.has_avx2() && order == PairOrder::Tiles {
                let first =
                    vectors.get_or_insert(case.run_stored(&Cx { isa, par: &Reverse(1) }, formats, formats));
                assert_eq!(&want, first, "{what}");
            }
        }
    }
}

#[test]
fn steps_have_the_bits_of_whole_matrices() {
    for lstm in [true, false] {
        for hidden in [1, 8, 17, 33, 65] {
            check(lstm, 3, 4, hidden, false);
            check(lstm, 2, 3, hidden, true);
        }
        for batch in [1, 17, 37] {
            check(lstm, batch, 5, 20, false);
        }
        for (batch, time, hidden) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
            check(lstm, batch, time, hidden, false);
        }
    }
}

#[test]
fn pairs_pay_for_wide_states_with_their_own_instructions() {
    let all = Isa::detect();
    let pays = |batch, hidden, order, isa| {
        let products = Some(order);
        let lstm = Lstm { batch, time: 9, hidden, reverse: false, strict: false, products };
        let gru = Gru { batch, time: 9, hidden, reverse: false, strict: false, products };
        assert_eq!(lstm.pays(isa), gru.pays(isa));
        lstm.pays(isa)
    };
    assert_eq!(pays(32, 256, PairOrder::Pairs, all), all.has(Feature::Avx512Bf16));
    assert_eq!(pays(32, 256, PairOrder::Tiles, all), amx_state() == AmxState::Ready);
    assert!(!pays(32, 16, PairOrder::Pairs, all));
    for isa in Isa::available() {
        assert!(!pays(32, 256, PairOrder::Tiles, isa), "a twin does not: {isa:?}");
    }
}

#[test]
#[should_panic(expected = "f16 is multiplied in f32")]
fn f16_is_refused() {
    let mut case = RnnCase::new(true, 2, 2, 4, false, true);
    case.products = Some(PairOrder::Tiles);
    case.run_stored(&Cx::serial(), F32, Formats::all(DType::F16));
}
