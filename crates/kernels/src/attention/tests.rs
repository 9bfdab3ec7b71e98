//! Oracle against finite differences, tiles against the oracle, and the same bits for any order of tasks and any tiles.

use polyreme_dtype::DType;

use super::*;
use crate::floats::testing::{HALVES, OwnedFloats};
use crate::lanes::testing::{Reverse, data};

/// The mask of a row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MaskKind {
    None,
    /// `[t_q, t_k]`, numbers.
    Shared,
    /// `[batch, 1, t_k]`, −∞ on every third key.
    Keys,
    /// `[batch, heads, t_q, t_k]`, numbers and −∞, and all of row 0 hidden.
    Full,
}

/// What multiplies: f32, and bf16 in both orders.
const PRODUCTS: [Option<PairOrder>; 3] = [None, Some(PairOrder::Tiles), Some(PairOrder::Pairs)];

/// Everything in f32.
const F32: (DType, DType) = (DType::F32, DType::F32);

/// All results of a run.
#[derive(PartialEq, Debug)]
pub(super) struct AttentionResults {
    pub(super) o: Vec<f32>,
    pub(super) lse: Vec<f32>,
    pub(super) dq: Vec<f32>,
    pub(super) dk: Vec<f32>,
    pub(super) dv: Vec<f32>,
}

pub(super) struct AttentionCase {
    pub(super) at: Attention,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) dy: Vec<f32>,
    mask: Vec<f32>,
    kind: MaskKind,
    /// The formats of what is read and of what is written.
    pub(super) stored: (DType, DType),
}

impl AttentionCase {
    pub(super) fn new(
        batch: usize,
        heads: usize,
        t_q: usize,
        t_k: usize,
        d: usize,
        causal: bool,
        kind: MaskKind,
    ) -> AttentionCase {
        let at = Attention::separate(batch, t_q, t_k, heads, d, causal);
        let mut mask = data(5, batch * heads * t_q * t_k);
        for (i, m) in mask.iter_mut().enumerate() {
            if kind == MaskKind::Keys && i % t_k % 3 == 1
                || kind == MaskKind::Full && (i % 5 == 2 || (i / t_k).is_multiple_of(t_q))
            {
                *m = f32::NEG_INFINITY;
            }
        }
        let (n_q, n_k) = (batch * t_q * heads * d, batch * t_k * heads * d);
        // Scores of a few units, so that the softmax is not flat.
        let q = data(1, n_q).iter().map(|x| 3.0 * x).collect();
        AttentionCase { at, q, k: data(2, n_k), v: data(3, n_k), dy: data(4, n_q), mask, kind, stored: F32 }
    }

    /// The same with other products.
    pub(super) fn with(self, products: Option<PairOrder>) -> AttentionCase {
        AttentionCase { at: Attention { products, ..self.at }, ..self }
    }

    /// The same in these formats.
    pub(super) fn stored(&self, read: DType, written: DType) -> AttentionCase {
        AttentionCase { stored: (read, written), ..self.rounded(DType::F32) }
    }

    /// The same with all that is read rounded to the format, which is then exact in it.
    pub(super) fn rounded(&self, dtype: DType) -> AttentionCase {
        let [q, k, v, dy] = [&self.q, &self.k, &self.v, &self.dy].map(|x| OwnedFloats::new(dtype, x).wide());
        AttentionCase { at: self.at.clone(), mask: self.mask.clone(), q, k, v, dy, ..*self }
    }

    pub(super) fn mask(&self) -> Option<Mask<'_>> {
        let (data, t_k) = (&self.mask[..], self.at.t_k);
        let all = self.at.t_q * t_k;
        match self.kind {
            MaskKind::None => None,
            MaskKind::Shared => Some(Mask { data, batch: 0, head: 0, row: t_k }),
            MaskKind::Keys => Some(Mask { data, batch: t_k, head: 0, row: 0 }),
            MaskKind::Full => Some(Mask { data, batch: self.at.heads * all, head: all, row: t_k }),
        }
    }

    /// `o` as it is stored, and `lse`.
    fn forward(&self, cx: &Cx) -> (Vec<f32>, Vec<f32>) {
        let mut scratch = vec![f32::NAN; self.at.forward_scratch_len(cx.par.workers())];
        let (read, written) = self.stored;
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| OwnedFloats::new(read, x));
        let (mut o, mut lse) = (OwnedFloats::unset(written, self.q.len()), vec![f32::NAN; self.at.lse_len()]);
        let (q, k, v) = (q.get(), k.get(), v.get());
        self.at.forward(cx, q, k, v, self.mask(), o.get_mut(), &mut lse, &mut scratch);
        (o.wide(), lse)
    }

    pub(super) fn run(&self, cx: &Cx) -> AttentionResults {
        let (o, lse) = self.forward(cx);
        self.run_backward(cx, o, lse)
    }

    /// The gradients, given what forward has left.
    fn run_backward(&self, cx: &Cx, o: Vec<f32>, lse: Vec<f32>) -> AttentionResults {
        let mut scratch = vec![f32::NAN; self.at.backward_scratch_len(cx.par.workers())];
        let (read, written) = self.stored;
        let [q, k, v, dy] = [&self.q, &self.k, &self.v, &self.dy].map(|x| OwnedFloats::new(read, x));
        let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| OwnedFloats::unset(written, x.get().len()));
        let stored_o = OwnedFloats::new(written, &o);
        let grads = Grads::Separate { dq: dq.get_mut(), dk: dk.get_mut(), dv: dv.get_mut() };
        let (q, k, v, dy) = (q.get(), k.get(), v.get(), dy.get());
        self.at.backward(cx, dy, q, k, v, self.mask(), stored_o.get(), &lse, grads, &mut scratch);
        AttentionResults { o, lse, dq: dq.wide(), dk: dk.wide(), dv: dv.wide() }
    }

    /// The loss `Σ dy·o`, in f64 and as plainly as possible.
    fn loss(&self, q: &[f32], k: &[f32], v: &[f32]) -> f64 {
        let at = &self.at;
        let mut loss = 0.0;
        for b in 0..at.batch {
            for h in 0..at.heads {
                for i in 0..at.t_q {
                    let row = |x: &[f32], t_max: usize, t: usize| -> Vec<f64> {
                        let start = ((b * t_max + t) * at.heads + h) * at.d;
                        x[start..start + at.d].iter().map(|&x| x as f64).collect()
                    };
                    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                    let (q, dy) = (row(q, at.t_q, i), row(&self.dy, at.t_q, i));
                    let (mut sum, mut out) = (0.0, 0.0);
                    for j in 0..at.t_k {
                        let hidden = at.causal && j > i;
                        let mask =
                            self.mask().map_or(0.0, |m| m.data[b * m.batch + h * m.head + i * m.row + j]);
                        if !hidden {
                            let p = (dot(&q, &row(k, at.t_k, j)) * at.scale as f64 + mask as f64).exp();
                            sum += p;
                            out += p * dot(&dy, &row(v, at.t_k, j));
                        }
                    }
                    loss += if sum > 0.0 { out / sum } else { 0.0 };
                }
            }
        }
        loss
    }
}

pub(super) fn close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g == w || (g - w).abs() <= tolerance * (1.0 + w.abs()), "{what} at {i}: {g}, not {w}");
    }
}

#[test]
fn oracle_gradients_are_finite_differences() {
    for (t_q, t_k, d, causal, kind) in [
        (3, 3, 2, false, MaskKind::None),
        (4, 4, 3, true, MaskKind::None),
        (2, 5, 3, true, MaskKind::Shared),
        (5, 2, 2, true, MaskKind::Full),
        (3, 4, 2, false, MaskKind::Keys),
        (3, 6, 1, false, MaskKind::Full),
    ] {
        let case = AttentionCase::new(2, 2, t_q, t_k, d, causal, kind);
        let got = case.run(&Cx::oracle());
        let loss: f64 = got.o.iter().zip(&case.dy).map(|(o, dy)| *o as f64 * *dy as f64).sum();
        assert!((loss - case.loss(&case.q, &case.k, &case.v)).abs() < 1e-5, "loss of {t_q}×{t_k}");
        let tensors = [&case.q, &case.k, &case.v];
        for (which, grad) in [&got.dq, &got.dk, &got.dv].into_iter().enumerate() {
            for i in 0..grad.len() {
                let at = |step: f32| {
                    let mut moved = tensors.map(Vec::clone);
                    moved[which][i] += step;
                    (case.loss(&moved[0], &moved[1], &moved[2]), moved[which][i] as f64)
                };
                let ((high, x1), (low, x0)) = (at(1e-3), at(-1e-3));
                let want = (high - low) / (x1 - x0);
                assert!(
                    (grad[i] as f64 - want).abs() < 1e-4,
                    "gradient {which} at {i}: {}, not {want}",
                    grad[i]
                );
            }
        }
    }
}

/// Tiles against the oracle, to 2e-5 of values near one (sums of up to 400 products), and the same bits for any runner
/// and any instruction set that has tiles.
fn check(batch: usize, heads: usize, t_q: usize, t_k: usize, d: usize, causal: bool, kind: MaskKind) {
    let what = format!("{batch}×{heads} heads, {t_q}×{t_k}×{d}, causal {causal}, mask {kind:?}");
    let case = AttentionCase::new(batch, heads, t_q, t_k, d, causal, kind);
    let want = case.run(&Cx::oracle());
    let got = case.run(&Cx::serial());
    close(&got.o, &want.o, 2e-5, &format!("o of {what}"));
    close(&got.lse, &want.lse, 2e-5, &format!("lse of {what}"));
    close(&got.dq, &want.dq, 2e-5, &format!("dq of {what}"));
    close(&got.dk, &want.dk, 2e-5, &format!("dk of {what}"));
    close(&got.dv, &want.dv, 2e-5, &format!("dv of {what}"));
    for workers in [1, 3, 16] {
        for isa in Isa::available().filter(|isa| isa.has_avx2()) {
            let cx = Cx { isa, par: &Reverse(workers) };
            assert_eq!(case.run(&cx), got, "bits of {what} on {workers} workers with {}", isa.name());
        }
    }
}

#[test]
fn tiles_are_the_oracle() {
    for t in [1, 5, 6, 7, 8, 11, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 97] {
        for d in [1, 7, 8, 9, 16, 17, 33, 64] {
            check(1, 2, t, t, d, true, MaskKind::None);
        }
        check(2, 1, t, t, 12, false, MaskKind::None);
    }
    for (t_q, t_k) in [(1, 50), (50, 1), (13, 33), (100, 30), (30, 100), (7, 400), (60, 777), (450, 390)] {
        for causal in [false, true] {
            for kind in [MaskKind::None, MaskKind::Shared, MaskKind::Keys, MaskKind::Full] {
                check(2, 2, t_q, t_k, 20, causal, kind);
            }
        }
    }
    check(1, 1, 40, 1100, 8, false, MaskKind::None);
    check(40, 1, 20, 20, 32, true, MaskKind::None);
}

/// Operands and results in half: the bits of widening them, running in f32, and rounding what it gives.
#[test]
fn halves_are_f32_that_is_rounded() {
    let round = |dtype: DType, x: &[f32]| OwnedFloats::new(dtype, x).wide();
    for (batch, heads, t_q, t_k, d, causal, kind) in [
        (1, 1, 1, 1, 1, true, MaskKind::None),
        (2, 3, 17, 17, 7, true, MaskKind::None),
        (1, 2, 33, 50, 20, false, MaskKind::Full),
        (2, 1, 100, 30, 64, true, MaskKind::Keys),
        (1, 2, 60, 777, 9, false, MaskKind::Shared),
        (1, 1, 30, 1100, 8, false, MaskKind::None),
        (1, 2, 3, 0, 4, false, MaskKind::None),
        (1, 2, 0, 3, 4, true, MaskKind::None),
    ] {
        let case = AttentionCase::new(batch, heads, t_q, t_k, d, causal, kind);
        for (read, written) in [
            (DType::F16, DType::F16),
            (DType::Bf16, DType::Bf16),
            (DType::Bf16, DType::F32),
            (DType::F32, DType::F16),
        ] {
            let what = format!("{batch}×{heads} heads, {t_q}×{t_k}×{d}, {kind:?}, {read} to {written}");
            let wide = case.rounded(read);
            for isa in Isa::available() {
                let (o, lse) = wide.forward(&Cx { isa, par: &Reverse(1) });
                let o = round(written, &o);
                let want = wide.run_backward(&Cx { isa, par: &Reverse(1) }, o, lse);
                for workers in [1, 3] {
                    let half = case.stored(read, written);
                    let got = half.run(&Cx { isa, par: &Reverse(workers) });
                    let what = format!("{what} with {} on {workers} workers", isa.name());
                    assert_eq!((&got.o, &got.lse), (&want.o, &want.lse), "o of {what}");
                    assert_eq!(got.dq, round(written, &want.dq), "dq of {what}");
                    assert_eq!(got.dk, round(written, &want.dk), "dk of {what}");
                    assert_eq!(got.dv, round(written, &want.dv), "dv of {what}");
                }
            }
        }
    }
}

#[test]
fn empty_shapes_give_zeros() {
    for (isa, products) in Isa::available().flat_map(|isa| PRODUCTS.map(|p| (isa, p))) {
        let cx = Cx { isa, par: &Reverse(2) };
        let none = AttentionCase::new(1, 2, 3, 0, 4, false, MaskKind::None).with(products).run(&cx);
        assert!(none.o.iter().chain(&none.dq).all(|&x| x == 0.0));
        assert!(none.lse.iter().all(|&x| x == f32::NEG_INFINITY));
        let none = AttentionCase::new(1, 2, 0, 3, 4, true, MaskKind::None).with(products).run(&cx);
        assert!(none.dk.iter().chain(&none.dv).all(|&x| x == 0.0));
        AttentionCase::new(0, 2, 3, 3, 4, true, MaskKind::None).with(products).run(&cx);
        AttentionCase::new(2, 0, 3, 3, 4, true, MaskKind::None).with(products).run(&cx);
    }
}

#[test]
fn a_hidden_row_is_zeros_and_sends_no_gradient() {
    for (isa, products) in Isa::available().flat_map(|isa| PRODUCTS.map(|p| (isa, p))) {
        let case = AttentionCase::new(1, 1, 9, 20, 4, false, MaskKind::Full).with(products);
        let got = case.run(&Cx { isa, par: &Reverse(1) });
        assert_eq!(
            (&got.o[..4], got.lse[0], &got.dq[..4]),
            (&[0.0; 4][..], f32::NEG_INFINITY, &[0.0; 4][..])
        );
        assert!(got.o.iter().chain(&got.dq).chain(&got.dk).chain(&got.dv).all(|x| x.is_finite()));
        assert!(got.o[4..].iter().any(|&x| x != 0.0));
    }
}

#[test]
fn a_nan_is_not_hidden() {
    for (isa, products) in Isa::available().flat_map(|isa| PRODUCTS.map(|p| (isa, p))) {
        for key in [0, 10] {
            let mut case = AttentionCase::new(1, 1, 20, 20, 8, true, MaskKind::None).with(products);
            case.k[key * 8] = f32::NAN;
            let (o, lse) = case.forward(&Cx { isa, par: &Reverse(1) });
            assert!(o[..key * 8].iter().chain(&lse[..key]).all(|x| !x.is_nan()), "rows before {key}");
            assert!(o[key * 8..].iter().chain(&lse[key..]).all(|x| x.is_nan()), "rows that see {key}");
        }
    }
}

/// The packed form gives the bits of the separate form, and does not touch what is in between.
#[test]
fn packed_is_separate() {
    let (batch, t, heads, d) = (2, 21, 3, 10);
    let pack = |parts: &[&[f32]]| -> Vec<f32> {
        let row = heads * d;
        (0..batch * t)
            .flat_map(|i| parts.iter().flat_map(move |p| &p[i * row..(i + 1) * row]))
            .copied()
            .collect()
    };
    let formats = HALVES.into_iter().chain([DType::F32]).map(|dtype| (dtype, None));
    let in_pairs = PRODUCTS.into_iter().map(|products| (DType::Bf16, products));
    for (dtype, products) in formats.chain(in_pairs) {
        let stored = (dtype, dtype);
        let case = AttentionCase::new(batch, heads, t, t, d, true, MaskKind::None).with(products);
        let case = AttentionCase { stored, ..case };
        let want = case.run(&Cx::serial());
        let at = Attention { products, ..Attention::packed(batch, t, heads, d, true) };
        let (qkv, dy) =
            (OwnedFloats::new(dtype, &pack(&[&case.q, &case.k, &case.v])), OwnedFloats::new(dtype, &case.dy));
        let (qkv, dy) = (qkv.get(), dy.get());
        let mut scratch = vec![f32::NAN; at.forward_scratch_len(1).max(at.backward_scratch_len(1))];
        let (mut o, mut lse) = (OwnedFloats::unset(dtype, want.o.len()), vec![0.0; want.lse.len()]);
        at.forward(&Cx::serial(), qkv, qkv, qkv, None, o.get_mut(), &mut lse, &mut scratch);
        assert_eq!((&o.wide(), &lse), (&want.o, &want.lse));
        let mut dqkv = OwnedFloats::unset(dtype, qkv.len());
        let grads = Grads::Packed(dqkv.get_mut());
        at.backward(&Cx::serial(), dy, qkv, qkv, qkv, None, o.get(), &lse, grads, &mut scratch);
        assert_eq!(dqkv.wide(), pack(&[&want.dq, &want.dk, &want.dv]));

        let [k, v] = [0, 1].map(|part| HeadLayout::packed(part, 2, t, heads, d));
        let at = Attention { k, v, ..case.at.clone() };
        let (q, kv) = (OwnedFloats::new(dtype, &case.q), OwnedFloats::new(dtype, &pack(&[&case.k, &case.v])));
        let (q, kv) = (q.get(), kv.get());
        let (mut dq, mut dkv) =
            (OwnedFloats::unset(dtype, want.dq.len()), OwnedFloats::unset(dtype, kv.len()));
        let grads = Grads::PackedKv { dq: dq.get_mut(), dkv: dkv.get_mut() };
        at.backward(&Cx::serial(), dy, q, kv, kv, None, o.get(), &lse, grads, &mut scratch);
        assert_eq!((dq.wide(), dkv.wide()), (want.dq, pack(&[&want.dk, &want.dv])));
    }
}

#[test]
#[should_panic(expected = "overlap")]
fn gradients_on_each_other_are_refused() {
    let case = AttentionCase::new(1, 2, 4, 4, 4, false, MaskKind::None);
    let (o, lse) = case.forward(&Cx::serial());
    let mut scratch = vec![0.0; case.at.backward_scratch_len(1)];
    let mut all = vec![0.0; 3 * case.q.len()];
    let grads = Grads::Packed(FloatsMut::F32(&mut all));
    let [dy, q, k, v, o] = [&case.dy, &case.q, &case.k, &case.v, &o].map(|x| Floats::F32(x));
    case.at.backward(&Cx::serial(), dy, q, k, v, None, o, &lse, grads, &mut scratch);
}
