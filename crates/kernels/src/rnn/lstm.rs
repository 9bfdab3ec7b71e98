//! The long short-term memory layer.
//!
//! ```text
//! i, f, g, o = σ, σ, tanh, σ (xp[t] + W_hh·h + b_hh)
//! c' = f·c + i·g        h' = o·tanh c'
//! ```

use super::sequence::{SPARE, Sequence, Weights, start_row, take};
use crate::Cx;
use crate::cx::SharedMut;
use crate::tile::{aligned, round_cols};

/// An LSTM over `batch` sequences of `time` steps with `hidden` units.
#[derive(Clone, Debug)]
pub struct Lstm {
    /// B, how many sequences.
    pub batch: usize,
    /// T, how many steps.
    pub time: usize,
    /// H, how many units.
    pub hidden: usize,
    /// Goes from the last step to the first; tensors keep their order of time.
    pub reverse: bool,
    /// Whether the product of the weights' gradient is strict, as [`crate::gemm::Gemm`] has it.
    pub strict: bool,
}

/// What [`Lstm::forward`] reads and writes. The last state is `y` at the last step that is run.
#[derive(Debug)]
pub struct LstmForward<'a> {
    /// `[B, T, 4H]`, the projected input with `b_ih`; gates in the order i, f, g, o.
    pub xp: &'a [f32],
    /// `[4H, H]`.
    pub w_hh: &'a [f32],
    /// `[4H]`.
    pub b_hh: Option<&'a [f32]>,
    /// `[B, H]`, the state before the first step.
    pub h0: &'a [f32],
    /// `[B, H]`, the cell before the first step.
    pub c0: &'a [f32],
    /// Written: `[B, T, H]`, the states.
    pub y: &'a mut [f32],
    /// Written, for backward: `[B, T, H]`, the cells.
    pub c_all: &'a mut [f32],
    /// Written, for backward: `[B, T, 4H]`, the gates after their activation.
    pub gates: &'a mut [f32],
}

/// What [`Lstm::backward`] reads and writes; gradients are overwritten.
#[derive(Debug)]
pub struct LstmBackward<'a> {
    /// `[B, T, H]`, the gradient of the states.
    pub dy: &'a [f32],
    /// `[B, H]`, the gradient of the last state, beside that in `dy`.
    pub dh_n: Option<&'a [f32]>,
    /// `[B, H]`, the gradient of the last cell.
    pub dc_n: Option<&'a [f32]>,
    /// As in forward.
    pub w_hh: &'a [f32],
    /// As in forward.
    pub h0: &'a [f32],
    /// As in forward.
    pub c0: &'a [f32],
    /// From forward.
    pub y: &'a [f32],
    /// From forward.
    pub c_all: &'a [f32],
    /// From forward.
    pub gates: &'a [f32],
    /// Written: `[B, T, 4H]`.
    pub dxp: &'a mut [f32],
    /// Written: `[4H, H]`.
    pub dw_hh: &'a mut [f32],
    /// Written: `[4H]`.
    pub db_hh: Option<&'a mut [f32]>,
    /// Written: `[B, H]`.
    pub dh0: &'a mut [f32],
    /// Written: `[B, H]`.
    pub dc0: &'a mut [f32],
}

impl Lstm {
    fn seq(&self) -> Sequence {
        let Self { batch, time, hidden, reverse, strict } = *self;
        Sequence { batch, time, hidden, gates: 4, reverse, strict }
    }

    /// Floats of forward's scratch for each sequence of a task: the state, and its product with the weights.
    fn forward_row(&self) -> usize {
        round_cols(self.hidden) + round_cols(4 * self.hidden)
    }

    /// Floats of backward's scratch for each sequence of a task: dz, dh and dc.
    fn backward_row(&self) -> usize {
        round_cols(4 * self.hidden) + 2 * round_cols(self.hidden)
    }

    /// How many floats of scratch `forward` needs with this many workers.
    pub fn forward_scratch_len(&self, workers: usize) -> usize {
        Weights::panels_len(self.hidden, 4 * self.hidden)
            + workers * self.seq().worker_len(self.forward_row())
            + SPARE
    }

    /// How many floats of scratch `backward` needs with this many workers.
    pub fn backward_scratch_len(&self, workers: usize) -> usize {
        let seq = self.seq();
        round_cols(seq.states_len())
            + (Weights::panels_len(4 * self.hidden, self.hidden)
                + workers * seq.worker_len(self.backward_row()))
            .max(seq.weight_product().scratch_len(workers))
            + SPARE
    }

    /// Runs all steps.
    pub fn forward(&self, cx: &Cx, x: LstmForward, scratch: &mut [f32]) {
        let (seq, h) = (self.seq(), self.hidden);
        assert_eq!(x.xp.len(), 4 * seq.states_len(), "xp is [B, T, 4H]");
        assert_eq!(x.gates.len(), 4 * seq.states_len(), "gates are [B, T, 4H]");
        assert_eq!(
            (x.y.len(), x.c_all.len()),
            (seq.states_len(), seq.states_len()),
            "y and c_all are [B, T, H]"
        );
        assert_eq!((x.h0.len(), x.c0.len()), (self.batch * h, self.batch * h), "h0 and c0 are [B, H]");
        assert!(x.b_hh.is_none_or(|b| b.len() == 4 * h), "b_hh is [4H]");
        let workers = cx.par.workers();
        assert!(scratch.len() >= self.forward_scratch_len(workers), "scratch of LSTM forward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let panels = take(&mut scratch, Weights::panels_len(h, 4 * h));
        let weights = Weights::transposed(cx, x.w_hh, 4 * h, h, panels);
        let (y, c_all, gates) = (SharedMut::new(x.y), SharedMut::new(x.c_all), SharedMut::new(x.gates));
        seq.for_each_chunk(cx, self.forward_row(), scratch, |start, n, mut scratch| {
            let state = take(&mut scratch, n * h);
            let z = take(&mut scratch, n * weights.out_stride());
            state.copy_from_slice(&x.h0[start * h..][..n * h]);
            for s in 0..self.time {
                weights.product::<false>(n, state, z);
                for r in 0..n {
                    let row = seq.row(start + r, s);
                    // SAFETY: a row belongs to one task, and rows of two steps are different.
                    let (y, c, gates) = unsafe {
                        (y.slice(row * h, h), c_all.slice(row * h, h), gates.slice(row * 4 * h, 4 * h))
                    };
                    let before = match s {
                        0 => &x.c0[(start + r) * h..][..h],
                        // SAFETY: as above, the row of this task's step before.
                        _ => unsafe { &*c_all.slice(seq.row(start + r, s - 1) * h, h) },
                    };
                    let step = ForwardStep {
                        z: &z[r * weights.out_stride()..][..4 * h],
                        xp: &x.xp[row * 4 * h..][..4 * h],
                        bias: x.b_hh,
                        c_before: before,
                        gates,
                        c,
                        y,
                    };
                    let state = &mut state[r * h..][..h];
                    #[cfg(target_arch = "x86_64")]
                    if cx.isa.has_avx512() {
                        // SAFETY: the instruction set was detected.
                        unsafe { super::lanes::avx512::lstm_forward(h, step, state) };
                        continue;
                    } else if cx.isa.has_avx2() {
                        // SAFETY: as above.
                        unsafe { super::lanes::avx2::lstm_forward(h, step, state) };
                        continue;
                    }
                    super::scalar::lstm_forward(h, step, state);
                }
            }
        });
    }

    /// Runs all steps back.
    pub fn backward(&self, cx: &Cx, x: LstmBackward, scratch: &mut [f32]) {
        let (seq, h) = (self.seq(), self.hidden);
        let (states, per_batch) = (seq.states_len(), self.batch * h);
        assert_eq!((x.dxp.len(), x.gates.len()), (4 * states, 4 * states), "dxp and gates are [B, T, 4H]");
        assert_eq!(
            (x.dy.len(), x.y.len(), x.c_all.len()),
            (states, states, states),
            "dy, y, c_all are [B, T, H]"
        );
        assert_eq!((x.h0.len(), x.c0.len()), (per_batch, per_batch), "h0 and c0 are [B, H]");
        assert_eq!((x.dh0.len(), x.dc0.len()), (per_batch, per_batch), "dh0 and dc0 are [B, H]");
        assert!(x.dh_n.is_none_or(|d| d.len() == per_batch), "dh_n is [B, H]");
        assert!(x.dc_n.is_none_or(|d| d.len() == per_batch), "dc_n is [B, H]");
        assert_eq!(x.dw_hh.len(), 4 * h * h, "dw_hh is [4H, H]");
        assert!(x.db_hh.as_ref().is_none_or(|d| d.len() == 4 * h), "db_hh is [4H]");
        let workers = cx.par.workers();
        assert!(scratch.len() >= self.backward_scratch_len(workers), "scratch of LSTM backward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let h_before = take(&mut scratch, states);
        {
            let (panels, scratch) = scratch.split_at_mut(Weights::panels_len(4 * h, h));
            let weights = Weights::plain(cx, x.w_hh, 4 * h, h, panels);
            let (dxp, h_before) = (SharedMut::new(&mut *x.dxp), SharedMut::new(&mut *h_before));
            let (dh0, dc0) = (SharedMut::new(x.dh0), SharedMut::new(x.dc0));
            seq.for_each_chunk(cx, self.backward_row(), scratch, |start, n, mut scratch| {
                let stride = weights.out_stride();
                let dz = take(&mut scratch, n * 4 * h);
                let dh = take(&mut scratch, n * stride);
                let dc = take(&mut scratch, n * h);
                for r in 0..n {
                    start_row(&mut dh[r * stride..][..h], x.dh_n, start + r);
                    start_row(&mut dc[r * h..][..h], x.dc_n, start + r);
                }
                for s in (0..self.time).rev() {
                    for r in 0..n {
                        let row = seq.row(start + r, s);
                        let (h_row, c_row) = match s {
                            0 => (&x.h0[(start + r) * h..][..h], &x.c0[(start + r) * h..][..h]),
                            _ => {
                                let before = seq.row(start + r, s - 1) * h;
                                (&x.y[before..before + h], &x.c_all[before..before + h])
                            }
                        };
                        // SAFETY: a row belongs to one task.
                        unsafe { h_before.slice(row * h, h) }.copy_from_slice(h_row);
                        let dz = &mut dz[r * 4 * h..][..4 * h];
                        let step = BackwardStep {
                            dy: &x.dy[row * h..][..h],
                            gates: &x.gates[row * 4 * h..][..4 * h],
                            c_before: c_row,
                            c: &x.c_all[row * h..][..h],
                            dh: &dh[r * stride..][..h],
                            dc: &mut dc[r * h..][..h],
                            dz,
                        };
                        #[cfg(target_arch = "x86_64")]
                        if cx.isa.has_avx512() {
                            // SAFETY: the instruction set was detected.
                            unsafe { super::lanes::avx512::lstm_backward(h, step) };
                        } else if cx.isa.has_avx2() {
                            // SAFETY: as above.
                            unsafe { super::lanes::avx2::lstm_backward(h, step) };
                        } else {
                            super::scalar::lstm_backward(h, step);
                        }
                        #[cfg(not(target_arch = "x86_64"))]
                        super::scalar::lstm_backward(h, step);
                        // SAFETY: a row belongs to one task.
                        unsafe { dxp.slice(row * 4 * h, 4 * h) }.copy_from_slice(dz);
                    }
                    weights.product::<false>(n, dz, dh);
                }
                for r in 0..n {
                    // SAFETY: a row belongs to one task.
                    let (dh0, dc0) =
                        unsafe { (dh0.slice((start + r) * h, h), dc0.slice((start + r) * h, h)) };
                    dh0.copy_from_slice(&dh[r * stride..][..h]);
                    dc0.copy_from_slice(&dc[r * h..][..h]);
                }
            });
        }
        seq.weight_grads(cx, x.dxp, h_before, x.dw_hh, x.db_hh, scratch);
    }
}

/// One sequence, one step forward. `z` is the state's product with the weights.
pub(super) struct ForwardStep<'a> {
    pub z: &'a [f32],
    pub xp: &'a [f32],
    pub bias: Option<&'a [f32]>,
    pub c_before: &'a [f32],
    pub gates: &'a mut [f32],
    pub c: &'a mut [f32],
    pub y: &'a mut [f32],
}

/// One sequence, one step back. `dh` is the state's gradient without `dy`; `dc` becomes that of the cell before; `dz`
/// is that of the gates before their activation.
pub(super) struct BackwardStep<'a> {
    pub dy: &'a [f32],
    pub gates: &'a [f32],
    pub c_before: &'a [f32],
    pub c: &'a [f32],
    pub dh: &'a [f32],
    pub dc: &'a mut [f32],
    pub dz: &'a mut [f32],
}
