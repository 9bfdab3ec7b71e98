//! Oracles against an f64 model and finite differences, AVX2 against the oracles, and the same bits for any runner.

use polyreme_dtype::DType;

use super::sequence::Sequence;
use super::*;
use crate::floats::testing::OwnedFloats;
use crate::gemm::pairs::PairOrder;
use crate::lanes::testing::{Reverse, data};
use crate::{Cx, Isa};

/// The formats of what has T steps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Formats {
    xp: DType,
    y: DType,
    c_all: DType,
    gates: DType,
    dy: DType,
    dxp: DType,
}

impl Formats {
    pub(super) const fn all(dtype: DType) -> Formats {
        Formats { xp: dtype, y: dtype, c_all: dtype, gates: dtype, dy: dtype, dxp: dtype }
    }
}

pub(super) const F32: Formats = Formats::all(DType::F32);

/// `x` rounded to a format, in the other.
fn rounded(to: DType, stored: DType, x: &[f32]) -> OwnedFloats {
    OwnedFloats::new(stored, &OwnedFloats::new(to, x).wide())
}

/// Either cell, with inputs, and weights for its loss `Σ dy·y + dh_n·h_n + dc_n·c_n`.
pub(super) struct RnnCase {
    pub(super) lstm: bool,
    pub(super) reverse: bool,
    pub(super) batch: usize,
    pub(super) time: usize,
    pub(super) hidden: usize,
    pub(super) bias: bool,
    /// What multiplies: `None` f32.
    pub(super) products: Option<PairOrder>,
    /// xp, w_hh, b_hh, h0, c0: what gradients are taken of.
    pub(super) inputs: [Vec<f32>; 5],
    pub(super) dy: Vec<f32>,
    pub(super) dh_n: Option<Vec<f32>>,
    pub(super) dc_n: Option<Vec<f32>>,
}

/// y, then dxp, dw_hh, db_hh, dh0, dc0.
pub(super) type RnnResults = (Vec<f32>, [Vec<f32>; 5]);

impl RnnCase {
    pub(super) fn new(
        lstm: bool,
        batch: usize,
        time: usize,
        hidden: usize,
        reverse: bool,
        bias: bool,
    ) -> RnnCase {
        let gates = if lstm { 4 } else { 3 };
        let scale = 1.0 / (hidden.max(1) as f32).sqrt();
        let w = data(2, gates * hidden * hidden).iter().map(|x| x * 2.0 * scale).collect();
        let last = |seed| bias.then(|| data(seed, batch * hidden));
        let inputs = [
            data(1, batch * time * gates * hidden),
            w,
            data(3, gates * hidden),
            data(4, batch * hidden),
            data(5, batch * hidden),
        ];
        let dy = data(6, batch * time * hidden);
        let products = None;
        RnnCase {
            lstm,
            reverse,
            batch,
            time,
            hidden,
            bias,
            products,
            inputs,
            dy,
            dh_n: last(7),
            dc_n: last(8),
        }
    }

    pub(super) fn run(&self, cx: &Cx) -> RnnResults {
        self.run_stored(cx, F32, F32)
    }

    /// A run on numbers in the formats `stored`, of which those that have T steps are rounded to the formats `to`, also
    /// between forward and backward.
    pub(super) fn run_stored(&self, cx: &Cx, to: Formats, stored: Formats) -> RnnResults {
        let RnnCase { batch, time, hidden, reverse, products, .. } = *self;
        let [xp, w_hh, b_hh, h0, c0] = self.inputs.each_ref().map(|v| &v[..]);
        let b_hh = self.bias.then_some(b_hh);
        let workers = cx.par.workers();
        let nan = |n: usize| vec![f32::NAN; n];
        let states = batch * time * hidden;
        let (xp, dy) = (rounded(to.xp, stored.xp, xp), rounded(to.dy, stored.dy, &self.dy));
        let (xp, dy) = (xp.get(), dy.get());
        let mut y = OwnedFloats::unset(stored.y, states);
        let mut c_all = OwnedFloats::unset(stored.c_all, states);
        let mut gates = OwnedFloats::unset(stored.gates, 4 * states);
        let mut dxp = OwnedFloats::unset(stored.dxp, xp.len());
        let mut grads = self.inputs.each_ref().map(|v| nan(v.len()));
        let [_, dw_hh, db_hh, dh0, dc0] = grads.each_mut().map(|v| &mut v[..]);
        let db_hh = self.bias.then_some(db_hh);
        let (dh_n, dc_n) = (self.dh_n.as_deref(), self.dc_n.as_deref());
        let (lstm, gru) = (
            Lstm { batch, time, hidden, reverse, strict: false, products },
            Gru { batch, time, hidden, reverse, strict: false, products },
        );
        let half = stored != F32;
        {
            let (y, gates) = (y.get_mut(), gates.get_mut());
            if self.lstm {
                let n = if half { Lstm::forward_scratch_len_half } else { Lstm::forward_scratch_len };
                let c_all = c_all.get_mut();
                let x = LstmForward { xp, w_hh, b_hh, h0, c0, y, c_all, gates };
                lstm.forward(cx, x, &mut nan(n(&lstm, workers)));
            } else {
                let n = if half { Gru::forward_scratch_len_half } else { Gru::forward_scratch_len };
                gru.forward(cx, GruForward { xp, w_hh, b_hh, h0, y, gates }, &mut nan(n(&gru, workers)));
            }
        }
        let y = rounded(to.y, stored.y, &y.wide());
        let gates = rounded(to.gates, stored.gates, &gates.wide());
        {
            let (y, gates, dxp) = (y.get(), gates.get(), dxp.get_mut());
            if self.lstm {
                let n = if half { Lstm::backward_scratch_len_half } else { Lstm::backward_scratch_len };
                let c_all = rounded(to.c_all, stored.c_all, &c_all.wide());
                let c_all = c_all.get();
                let x = LstmBackward {
                    dy,
                    dh_n,
                    dc_n,
                    w_hh,
                    h0,
                    c0,
                    y,
                    c_all,
                    gates,
                    dxp,
                    dw_hh,
                    db_hh,
                    dh0,
                    dc0,
                };
                lstm.backward(cx, x, &mut nan(n(&lstm, workers)));
            } else {
                let n = if half { Gru::backward_scratch_len_half } else { Gru::backward_scratch_len };
                let x = GruBackward { dy, dh_n, w_hh, h0, y, gates, dxp, dw_hh, db_hh, dh0 };
                gru.backward(cx, x, &mut nan(n(&gru, workers)));
                dc0.fill(0.0);
            }
        }
        grads[0] = rounded(to.dxp, stored.dxp, &dxp.wide()).wide();
        if to != F32 && !half && products.is_none() {
            self.weight_grads(cx, &y.wide(), &gates.wide(), &mut grads);
        }
        if !self.bias {
            grads[2].fill(0.0);
        }
        (y.wide(), grads)
    }

    /// The gradients of the weights from a dxp that has been rounded, in f32.
    fn weight_grads(&self, cx: &Cx, y: &[f32], gates: &[f32], grads: &mut [Vec<f32>; 5]) {
        let RnnCase { batch, time, hidden, reverse, .. } = *self;
        let n_gates = if self.lstm { 4 } else { 3 };
        let seq = Sequence { batch, time, hidden, gates: n_gates, reverse, strict: false, products: None };
        let [dz, dw_hh, db_hh, ..] = grads;
        let mut dz = dz.clone();
        let mut h_before = y.to_vec();
        for (b, s) in (0..batch * time).map(|i| (i / time, i % time)) {
            let row = seq.row(b, s);
            let before =
                if s == 0 { &self.inputs[3][b * hidden..] } else { &y[seq.row(b, s - 1) * hidden..] };
            h_before[row * hidden..][..hidden].copy_from_slice(&before[..hidden]);
            if !self.lstm {
                let r = &gates[row * 4 * hidden..][..hidden];
                for (d, r) in dz[row * 3 * hidden + 2 * hidden..][..hidden].iter_mut().zip(r) {
                    *d *= r;
                }
            }
        }
        let mut scratch = vec![f32::NAN; seq.weight_product().scratch_len(cx.par.workers())];
        seq.weight_grads(cx, &dz, &h_before, dw_hh, Some(db_hh), &mut scratch);
    }

    /// The states and the loss, in f64, written down from PyTorch's formulas.
    fn model(&self, inputs: &[Vec<f32>; 5]) -> (Vec<f64>, f64) {
        let [xp, w, b, h0, c0] = inputs;
        let (n, gates) = (self.hidden, if self.lstm { 4 } else { 3 });
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| x as f64).collect() };
        let (mut y, mut loss) = (vec![0.0; self.dy.len()], 0.0);
        for seq in 0..self.batch {
            let (mut h, mut c) = (wide(&h0[seq * n..][..n]), wide(&c0[seq * n..][..n]));
            for s in 0..self.time {
                let row = seq * self.time + if self.reverse { self.time - 1 - s } else { s };
                let x = &xp[row * gates * n..][..gates * n];
                let hp: Vec<f64> = (0..gates * n)
                    .map(|g| {
                        let bias = if self.bias { b[g] as f64 } else { 0.0 };
                        bias + (0..n).map(|k| w[g * n + k] as f64 * h[k]).sum::<f64>()
                    })
                    .collect();
                for j in 0..n {
                    let pre = |g: usize| x[g * n + j] as f64 + hp[g * n + j];
                    if self.lstm {
                        c[j] = sigmoid(pre(1)) * c[j] + sigmoid(pre(0)) * pre(2).tanh();
                        h[j] = sigmoid(pre(3)) * c[j].tanh();
                    } else {
                        let (r, z) = (sigmoid(pre(0)), sigmoid(pre(1)));
                        let new = (x[2 * n + j] as f64 + r * hp[2 * n + j]).tanh();
                        h[j] = (1.0 - z) * new + z * h[j];
                    }
                    y[row * n + j] = h[j];
                    loss += h[j] * self.dy[row * n + j] as f64;
                }
            }
            for j in 0..n {
                loss += self.dh_n.as_ref().map_or(0.0, |d| d[seq * n + j] as f64 * h[j]);
                if self.lstm {
                    loss += self.dc_n.as_ref().map_or(0.0, |d| d[seq * n + j] as f64 * c[j]);
                }
            }
        }
        (y, loss)
    }
}

#[test]
fn oracle_is_the_model_and_its_finite_differences() {
    for lstm in [true, false] {
        for (batch, time, hidden, reverse, bias) in
            [(1, 1, 1, false, true), (2, 3, 3, false, true), (2, 4, 2, true, true), (1, 3, 3, true, false)]
        {
            let case = RnnCase::new(lstm, batch, time, hidden, reverse, bias);
            let (y, grads) = case.run(&Cx::oracle());
            let (want, _) = case.model(&case.inputs);
            for (y, want) in y.iter().zip(&want) {
                assert!((*y as f64 - want).abs() < 1e-5, "y: {y}, not {want}");
            }
            for (which, grad) in grads.iter().enumerate() {
                for i in 0..grad.len() {
                    let at = |step: f32| {
                        let mut moved = case.inputs.clone();
                        moved[which][i] += step;
                        (case.model(&moved).1, moved[which][i] as f64)
                    };
                    let ((high, x1), (low, x0)) = (at(1e-3), at(-1e-3));
                    let want = (high - low) / (x1 - x0);
                    let got = grad[i] as f64;
                    assert!(
                        (got - want).abs() < 1e-4,
                        "lstm {lstm}, gradient {which} at {i}: {got}, not {want}"
                    );
                }
            }
        }
    }
}

/// Vectors against the oracle: steps add rounding errors of sums over H up, to at most 5e-5 of values near one.
fn check(lstm: bool, batch: usize, time: usize, hidden: usize, reverse: bool) {
    let what = format!("lstm {lstm}, B {batch}, T {time}, H {hidden}, reverse {reverse}");
    let case = RnnCase::new(lstm, batch, time, hidden, reverse, batch != 2);
    let want = case.run(&Cx::oracle());
    let got = case.run(&Cx::serial());
    let close = |got: &[f32], want: &[f32], name: &str| {
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!((g - w).abs() <= 5e-5 * (1.0 + w.abs()), "{name} of {what} at {i}: {g}, not {w}");
        }
    };
    close(&got.0, &want.0, "y");
    for (name, (got, want)) in ["dxp", "dw_hh", "db_hh", "dh0", "dc0"].iter().zip(got.1.iter().zip(&want.1)) {
        close(got, want, name);
    }
    for workers in [1, 3, 16] {
        for isa in Isa::available().filter(|isa| isa.has_avx2()) {
            let again = case.run(&Cx { isa, par: &Reverse(workers) });
            assert_eq!(again, got, "bits of {what} on {workers} workers with {}", isa.name());
        }
    }
}

#[test]
fn vectors_are_the_oracle() {
    for lstm in [true, false] {
        for hidden in [1, 7, 8, 9, 16, 33, 100] {
            check(lstm, 3, 4, hidden, false);
            check(lstm, 2, 3, hidden, true);
        }
        for batch in [1, 5, 8, 13, 16, 37, 300] {
            check(lstm, batch, 3, 12, false);
        }
        check(lstm, 4, 40, 24, true);
    }
}

/// What has T steps in half: the bits of widening it, running in f32, and rounding what it gives.
#[test]
fn halves_are_f32_that_is_rounded() {
    let mixed = Formats { y: DType::F16, c_all: DType::F32, dy: DType::F32, ..Formats::all(DType::Bf16) };
    for lstm in [true, false] {
        for (batch, time, hidden, reverse) in [
            (1, 1, 1, false),
            (3, 4, 7, false),
            (2, 3, 33, true),
            (5, 9, 16, false),
            (37, 3, 12, true),
            // Several blocks of rows in the product of the weights' gradient.
            (60, 15, 9, false),
            (0, 3, 4, false),
            (2, 0, 4, false),
            (2, 3, 0, true),
        ] {
            let case = RnnCase::new(lstm, batch, time, hidden, reverse, batch != 2);
            for formats in [Formats::all(DType::F16), Formats::all(DType::Bf16), mixed] {
                for isa in Isa::available() {
                    let want = case.run_stored(&Cx { isa, par: &crate::Serial }, formats, F32);
                    for workers in [1, 3] {
                        let cx = Cx { isa, par: &Reverse(workers) };
                        let got = case.run_stored(&cx, formats, formats);
                        let name = isa.name();
                        assert_eq!(
                            got, want,
                            "lstm {lstm}, {batch}×{time}×{hidden}, {formats:?}, {workers} workers, {name}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn empty_shapes_do_nothing() {
    for lstm in [true, false] {
        for (batch, time, hidden) in [(0, 3, 4), (2, 0, 4), (2, 3, 0)] {
            for cx in [Cx::oracle(), Cx::serial()] {
                let case = RnnCase::new(lstm, batch, time, hidden, false, true);
                let (_, grads) = case.run(&cx);
                assert!(grads[1].iter().chain(&grads[2]).all(|&x| x == 0.0));
                assert_eq!(Some(&grads[3]), case.dh_n.as_ref(), "without steps dh0 is dh_n");
            }
        }
    }
}
