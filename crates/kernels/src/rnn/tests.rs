//! Oracles against an f64 model and finite differences, AVX2 against the oracles, and the same bits for any runner.

use super::*;
use crate::lanes::testing::{Reverse, data};
use crate::{Cx, Isa};

/// Either cell, with inputs, and weights for its loss `Σ dy·y + dh_n·h_n + dc_n·c_n`.
struct RnnCase {
    lstm: bool,
    reverse: bool,
    batch: usize,
    time: usize,
    hidden: usize,
    bias: bool,
    /// xp, w_hh, b_hh, h0, c0: what gradients are taken of.
    inputs: [Vec<f32>; 5],
    dy: Vec<f32>,
    dh_n: Option<Vec<f32>>,
    dc_n: Option<Vec<f32>>,
}

/// y, then dxp, dw_hh, db_hh, dh0, dc0.
type RnnResults = (Vec<f32>, [Vec<f32>; 5]);

impl RnnCase {
    fn new(lstm: bool, batch: usize, time: usize, hidden: usize, reverse: bool, bias: bool) -> RnnCase {
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
        RnnCase { lstm, reverse, batch, time, hidden, bias, inputs, dy, dh_n: last(7), dc_n: last(8) }
    }

    fn run(&self, cx: &Cx) -> RnnResults {
        let RnnCase { batch, time, hidden, reverse, .. } = *self;
        let [xp, w_hh, b_hh, h0, c0] = self.inputs.each_ref().map(|v| &v[..]);
        let b_hh = self.bias.then_some(b_hh);
        let workers = cx.par.workers();
        let nan = |n: usize| vec![f32::NAN; n];
        let states = batch * time * hidden;
        let (mut y, mut c_all, mut gates) = (nan(states), nan(states), nan(4 * states));
        let mut grads = self.inputs.each_ref().map(|v| nan(v.len()));
        let [dxp, dw_hh, db_hh, dh0, dc0] = grads.each_mut().map(|v| &mut v[..]);
        let db_hh = self.bias.then_some(db_hh);
        let (dh_n, dc_n) = (self.dh_n.as_deref(), self.dc_n.as_deref());
        if self.lstm {
            let lstm = Lstm { batch, time, hidden, reverse, strict: false };
            let (y, c_all, gates) = (&mut y[..], &mut c_all[..], &mut gates[..]);
            let mut scratch = nan(lstm.forward_scratch_len(workers));
            lstm.forward(cx, LstmForward { xp, w_hh, b_hh, h0, c0, y, c_all, gates }, &mut scratch);
            let mut scratch = nan(lstm.backward_scratch_len(workers));
            let dy = &self.dy;
            let x =
                LstmBackward { dy, dh_n, dc_n, w_hh, h0, c0, y, c_all, gates, dxp, dw_hh, db_hh, dh0, dc0 };
            lstm.backward(cx, x, &mut scratch);
        } else {
            let gru = Gru { batch, time, hidden, reverse, strict: false };
            let (y, gates) = (&mut y[..], &mut gates[..]);
            let mut scratch = nan(gru.forward_scratch_len(workers));
            gru.forward(cx, GruForward { xp, w_hh, b_hh, h0, y, gates }, &mut scratch);
            let mut scratch = nan(gru.backward_scratch_len(workers));
            let dy = &self.dy;
            let x = GruBackward { dy, dh_n, w_hh, h0, y, gates, dxp, dw_hh, db_hh, dh0 };
            gru.backward(cx, x, &mut scratch);
            dc0.fill(0.0);
        }
        if !self.bias {
            grads[2].fill(0.0);
        }
        (y, grads)
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
