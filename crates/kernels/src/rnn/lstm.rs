//! The long short-term memory layer.
//!
//! ```text
//! i, f, g, o = σ, σ, tanh, σ (xp[t] + W_hh·h + b_hh)
//! c' = f·c + i·g        h' = o·tanh c'
//! ```

use super::sequence::{OwnLen, SPARE, Sequence, start_row};
use super::weights::Weights;
use crate::cx::SharedMut;
use crate::floats::{Floats, FloatsMut, SharedFloats};
use crate::gemm::pairs::PairOrder;
use crate::tile::{aligned, round_cols, take};
use crate::{Cx, Isa};

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
    /// Multiplies in bf16, with sums in this order; `None` in f32.
    pub products: Option<PairOrder>,
}

/// What [`Lstm::forward`] reads and writes. The last state is `y` at the last step that is run.
#[derive(Debug)]
pub struct LstmForward<'a> {
    /// `[B, T, 4H]`, the projected input with `b_ih`; gates in the order i, f, g, o.
    pub xp: Floats<'a>,
    /// `[4H, H]`.
    pub w_hh: &'a [f32],
    /// `[4H]`.
    pub b_hh: Option<&'a [f32]>,
    /// `[B, H]`, the state before the first step.
    pub h0: &'a [f32],
    /// `[B, H]`, the cell before the first step.
    pub c0: &'a [f32],
    /// Written: `[B, T, H]`, the states.
    pub y: FloatsMut<'a>,
    /// Written, for backward: `[B, T, H]`, the cells.
    pub c_all: FloatsMut<'a>,
    /// Written, for backward: `[B, T, 4H]`, the gates after their activation.
    pub gates: FloatsMut<'a>,
}

/// What [`Lstm::backward`] reads and writes; gradients are overwritten.
#[derive(Debug)]
pub struct LstmBackward<'a> {
    /// `[B, T, H]`, the gradient of the states.
    pub dy: Floats<'a>,
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
    pub y: Floats<'a>,
    /// From forward.
    pub c_all: Floats<'a>,
    /// From forward.
    pub gates: Floats<'a>,
    /// Written: `[B, T, 4H]`.
    pub dxp: FloatsMut<'a>,
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
        let Self { batch, time, hidden, reverse, strict, products } = *self;
        Sequence { batch, time, hidden, gates: 4, reverse, strict, products }
    }

    /// Forward's scratch: of each sequence the state and its product with the weights; in half also the cell, and of the
    /// sequence at hand xp, the gates, the next cell and y.
    fn forward_own(&self, half: bool) -> OwnLen {
        let (one, four) = (round_cols(self.hidden), round_cols(4 * self.hidden));
        let (m, h) = (self.seq().chunk(), self.hidden);
        let extra = Weights::extra_len::<false>(self.products, m, h, 4 * h);
        if half {
            return OwnLen { per_sequence: 2 * one + four, once: 2 * four + 2 * one + extra };
        }
        OwnLen { per_sequence: one + four, once: extra }
    }

    /// Backward's scratch: of each sequence dz, dh and dc; in half, of the sequence at hand dy, the gates and two cells.
    fn backward_own(&self, half: bool) -> OwnLen {
        let (one, four) = (round_cols(self.hidden), round_cols(4 * self.hidden));
        let (m, h) = (self.seq().chunk(), self.hidden);
        let extra = Weights::extra_len::<false>(self.products, m, 4 * h, h);
        OwnLen { per_sequence: four + 2 * one, once: extra + if half { four + 3 * one } else { 0 } }
    }

    /// Whether the products of bf16 that it asks for are expected to be faster than f32 with these instructions.
    pub fn pays(&self, isa: Isa) -> bool {
        self.seq().pays(isa)
    }

    /// How many floats of scratch `forward` on f32 needs with this many workers.
    pub fn forward_scratch_len(&self, workers: usize) -> usize {
        self.forward_len(false, workers)
    }

    /// How many floats of scratch `forward` needs with this many workers if anything is stored in half.
    pub fn forward_scratch_len_half(&self, workers: usize) -> usize {
        self.forward_len(true, workers)
    }

    fn forward_len(&self, half: bool, workers: usize) -> usize {
        Weights::panels_len(self.products, self.hidden, 4 * self.hidden)
            + workers * self.seq().worker_len(self.forward_own(half))
            + SPARE
    }

    /// How many floats of scratch `backward` on f32 needs with this many workers.
    pub fn backward_scratch_len(&self, workers: usize) -> usize {
        self.backward_len(false, workers)
    }

    /// How many floats of scratch `backward` needs with this many workers if anything is stored in half.
    pub fn backward_scratch_len_half(&self, workers: usize) -> usize {
        self.backward_len(true, workers)
    }

    fn backward_len(&self, half: bool, workers: usize) -> usize {
        let seq = self.seq();
        seq.kept_len(half, seq.states_len())
            + self.steps_back_len(half, workers).max(seq.weight_grads_len(half, workers))
            + SPARE
    }

    fn steps_back_len(&self, half: bool, workers: usize) -> usize {
        Weights::panels_len(self.products, 4 * self.hidden, self.hidden)
            + workers * self.seq().worker_len(self.backward_own(half))
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
        let half = x.xp.is_half() || [&x.y, &x.c_all, &x.gates].iter().any(|x| x.is_half());
        let want = self.forward_len(half, cx.par.workers());
        assert!(scratch.len() >= want, "scratch of LSTM forward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let panels = take(&mut scratch, Weights::panels_len(self.products, h, 4 * h));
        let weights = Weights::transposed(cx, self.products, x.w_hh, 4 * h, h, panels);
        let [y, c_all, gates] = [x.y, x.c_all, x.gates].map(SharedFloats::new);
        let staged = |n: usize| if half { n } else { 0 };
        seq.for_each_chunk(cx, self.forward_own(half), scratch, |start, n, mut scratch| {
            let state = take(&mut scratch, n * h);
            let z = take(&mut scratch, weights.out_rows(n) * weights.out_stride());
            let cells = take(&mut scratch, staged(n * h));
            let [xp_stage, gates_stage] = [4 * h, 4 * h].map(|n| take(&mut scratch, staged(n)));
            let [c_stage, y_stage] = [h, h].map(|n| take(&mut scratch, staged(n)));
            let extra = scratch;
            state.copy_from_slice(&x.h0[start * h..][..n * h]);
            for s in 0..self.time {
                weights.product::<false>(n, state, z, extra);
                for r in 0..n {
                    let row = seq.row(start + r, s);
                    // SAFETY: a row belongs to one task, and rows of two steps are different.
                    let (y, c, gates) = unsafe {
                        (y.part(row * h, h), c_all.part(row * h, h), gates.part(row * 4 * h, 4 * h))
                    };
                    let before = match (s, c_all) {
                        (0, _) => &x.c0[(start + r) * h..][..h],
                        // SAFETY: as above, the row of this task's step before.
                        (_, SharedFloats::F32(c)) => unsafe { &*c.slice(seq.row(start + r, s - 1) * h, h) },
                        _ => &cells[r * h..][..h],
                    };
                    let (z, state) = (&z[r * weights.out_stride()..][..4 * h], &mut state[r * h..][..h]);
                    let xp = x.xp.staged(cx.isa, row * 4 * h, 4 * h, xp_stage);
                    y.staged(cx.isa, y_stage, |y| {
                        c.staged(cx.isa, c_stage, |c| {
                            gates.staged(cx.isa, gates_stage, |gates| {
                                let step = ForwardStep { z, xp, bias: x.b_hh, c_before: before, gates, c, y };
                                lstm_forward(cx.isa, h, step, state);
                            });
                        });
                    });
                    if !c_all.is_f32() {
                        cells[r * h..][..h].copy_from_slice(c_stage);
                    }
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
        let half = [x.dy, x.y, x.c_all, x.gates, x.dxp.as_floats()].iter().any(Floats::is_half);
        let workers = cx.par.workers();
        let want = self.backward_len(half, workers);
        let is_f16 = |x: &Floats| matches!(x, Floats::F16(_));
        assert!(
            self.products.is_none() || ![x.y, x.dxp.as_floats()].iter().any(is_f16),
            "f16 is multiplied in f32: leave `products` unset"
        );
        assert!(scratch.len() >= want, "scratch of LSTM backward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let staged = |n: usize| if half { n } else { 0 };
        // The state before each step, for the product with dxp; in half with products in f32 both are read again, some rows at
        // a time.
        let mut h_before = seq.kept(half, states, &mut scratch);
        let mut dxp = x.dxp;
        let state_before = |b: usize, s: usize| match s {
            0 => Floats::F32(&x.h0[b * h..][..h]),
            _ => x.y.part(seq.row(b, s - 1) * h, h),
        };
        {
            let (panels, scratch) = scratch.split_at_mut(Weights::panels_len(self.products, 4 * h, h));
            let weights = Weights::plain(cx, self.products, x.w_hh, 4 * h, h, panels);
            let dxp = SharedFloats::new(dxp.reborrow());
            let h_before = h_before.as_mut().map(|kept| SharedFloats::new(kept.reborrow()));
            let (dh0, dc0) = (SharedMut::new(x.dh0), SharedMut::new(x.dc0));
            seq.for_each_chunk(cx, self.backward_own(half), scratch, |start, n, mut scratch| {
                let stride = weights.out_stride();
                let dz = take(&mut scratch, n * 4 * h);
                let dh = take(&mut scratch, weights.out_rows(n) * stride);
                let dc = take(&mut scratch, n * h);
                let gates_stage = take(&mut scratch, staged(4 * h));
                let [dy_stage, before_stage, c_stage] = [h; 3].map(|n| take(&mut scratch, staged(n)));
                let extra = scratch;
                for r in 0..n {
                    start_row(&mut dh[r * stride..][..h], x.dh_n, start + r);
                    start_row(&mut dc[r * h..][..h], x.dc_n, start + r);
                }
                for s in (0..self.time).rev() {
                    for r in 0..n {
                        let row = seq.row(start + r, s);
                        let c_before = match s {
                            0 => &x.c0[(start + r) * h..][..h],
                            _ => x.c_all.staged(cx.isa, seq.row(start + r, s - 1) * h, h, before_stage),
                        };
                        if let Some(h_before) = &h_before {
                            // SAFETY: a row belongs to one task.
                            unsafe { h_before.part(row * h, h) }
                                .copy_from(cx.isa, state_before(start + r, s));
                        }
                        let dz = &mut dz[r * 4 * h..][..4 * h];
                        let step = BackwardStep {
                            dy: x.dy.staged(cx.isa, row * h, h, dy_stage),
                            gates: x.gates.staged(cx.isa, row * 4 * h, 4 * h, gates_stage),
                            c_before,
                            c: x.c_all.staged(cx.isa, row * h, h, c_stage),
                            dh: &dh[r * stride..][..h],
                            dc: &mut dc[r * h..][..h],
                            dz,
                        };
                        lstm_backward(cx.isa, h, step);
                        // SAFETY: a row belongs to one task.
                        unsafe { dxp.part(row * 4 * h, 4 * h) }.round(cx.isa, dz);
                    }
                    weights.product::<false>(n, dz, dh, extra);
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
        let h_before = h_before.as_ref().map(|kept| kept.as_floats());
        match (dxp.as_floats(), h_before, self.products) {
            (dxp, Some(h_before), Some(order)) => {
                seq.weight_grads_in_pairs(cx, order, dxp, h_before, x.dw_hh, x.db_hh, scratch);
            }
            (Floats::F32(dxp), Some(Floats::F32(h_before)), None) => {
                seq.weight_grads(cx, dxp, h_before, x.dw_hh, x.db_hh, scratch);
            }
            (dxp, ..) => {
                let row = |row: usize, dz: &mut [f32], h_before: &mut [f32]| {
                    dxp.part(row * 4 * h, 4 * h).widen(cx.isa, dz);
                    let (b, s) = seq.at(row);
                    state_before(b, s).widen(cx.isa, h_before);
                };
                seq.weight_grads_by_rows(cx, row, x.dw_hh, x.db_hh, scratch);
            }
        }
    }
}

cell! {
    /// One step forward.
    fn lstm_forward(step: ForwardStep, state: &mut [f32])
}
cell! {
    /// One step back.
    fn lstm_backward(step: BackwardStep)
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
