//! The gated recurrent unit.
//!
//! ```text
//! r, z = σ(xp_r + hp_r), σ(xp_z + hp_z)        hp = W_hh·h + b_hh
//! n = tanh(xp_n + r·hp_n)
//! h' = (1 − z)·n + z·h
//! ```
//!
//! The reset gate works on the product, as in PyTorch, so the gradients of `xp_n` and `hp_n` differ by the factor r.

use super::sequence::{SPARE, Sequence, Weights, start_row, take};
use crate::Cx;
use crate::cx::SharedMut;
use crate::tile::{aligned, round_cols};

/// A GRU over `batch` sequences of `time` steps with `hidden` units.
#[derive(Clone, Debug)]
pub struct Gru {
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

/// What [`Gru::forward`] reads and writes. The last state is `y` at the last step that is run.
#[derive(Debug)]
pub struct GruForward<'a> {
    /// `[B, T, 3H]`, the projected input with `b_ih`; gates in the order r, z, n.
    pub xp: &'a [f32],
    /// `[3H, H]`.
    pub w_hh: &'a [f32],
    /// `[3H]`.
    pub b_hh: Option<&'a [f32]>,
    /// `[B, H]`, the state before the first step.
    pub h0: &'a [f32],
    /// Written: `[B, T, H]`, the states.
    pub y: &'a mut [f32],
    /// Written, for backward: `[B, T, 4H]`, the gates r, z, n after their activation, and `hp_n`.
    pub gates: &'a mut [f32],
}

/// What [`Gru::backward`] reads and writes; gradients are overwritten.
#[derive(Debug)]
pub struct GruBackward<'a> {
    /// `[B, T, H]`, the gradient of the states.
    pub dy: &'a [f32],
    /// `[B, H]`, the gradient of the last state, beside that in `dy`.
    pub dh_n: Option<&'a [f32]>,
    /// As in forward.
    pub w_hh: &'a [f32],
    /// As in forward.
    pub h0: &'a [f32],
    /// From forward.
    pub y: &'a [f32],
    /// From forward.
    pub gates: &'a [f32],
    /// Written: `[B, T, 3H]`.
    pub dxp: &'a mut [f32],
    /// Written: `[3H, H]`.
    pub dw_hh: &'a mut [f32],
    /// Written: `[3H]`.
    pub db_hh: Option<&'a mut [f32]>,
    /// Written: `[B, H]`.
    pub dh0: &'a mut [f32],
}

impl Gru {
    fn seq(&self) -> Sequence {
        let Self { batch, time, hidden, reverse, strict } = *self;
        Sequence { batch, time, hidden, gates: 3, reverse, strict }
    }

    /// Floats of forward's scratch for each sequence of a task: the state, and its product with the weights.
    fn forward_row(&self) -> usize {
        round_cols(self.hidden) + round_cols(3 * self.hidden)
    }

    /// Floats of backward's scratch for each sequence of a task: the gradients of hp and of the state.
    fn backward_row(&self) -> usize {
        round_cols(3 * self.hidden) + round_cols(self.hidden)
    }

    /// How many floats of scratch `forward` needs with this many workers.
    pub fn forward_scratch_len(&self, workers: usize) -> usize {
        Weights::panels_len(self.hidden, 3 * self.hidden)
            + workers * self.seq().worker_len(self.forward_row())
            + SPARE
    }

    /// How many floats of scratch `backward` needs with this many workers.
    pub fn backward_scratch_len(&self, workers: usize) -> usize {
        let seq = self.seq();
        round_cols(seq.states_len())
            + round_cols(3 * seq.states_len())
            + (Weights::panels_len(3 * self.hidden, self.hidden)
                + workers * seq.worker_len(self.backward_row()))
            .max(seq.weight_product().scratch_len(workers))
            + SPARE
    }

    /// Runs all steps.
    pub fn forward(&self, cx: &Cx, x: GruForward, scratch: &mut [f32]) {
        let (seq, h) = (self.seq(), self.hidden);
        assert_eq!(x.xp.len(), 3 * seq.states_len(), "xp is [B, T, 3H]");
        assert_eq!(x.gates.len(), 4 * seq.states_len(), "gates are [B, T, 4H]");
        assert_eq!(x.y.len(), seq.states_len(), "y is [B, T, H]");
        assert_eq!(x.h0.len(), self.batch * h, "h0 is [B, H]");
        assert!(x.b_hh.is_none_or(|b| b.len() == 3 * h), "b_hh is [3H]");
        let workers = cx.par.workers();
        assert!(scratch.len() >= self.forward_scratch_len(workers), "scratch of GRU forward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let panels = take(&mut scratch, Weights::panels_len(h, 3 * h));
        let weights = Weights::transposed(cx, x.w_hh, 3 * h, h, panels);
        let (y, gates) = (SharedMut::new(x.y), SharedMut::new(x.gates));
        seq.for_each_chunk(cx, self.forward_row(), scratch, |start, n, mut scratch| {
            let state = take(&mut scratch, n * h);
            let hp = take(&mut scratch, n * weights.out_stride());
            state.copy_from_slice(&x.h0[start * h..][..n * h]);
            for s in 0..self.time {
                weights.product::<false>(n, state, hp);
                for r in 0..n {
                    let row = seq.row(start + r, s);
                    // SAFETY: a row belongs to one task.
                    let (y, gates) = unsafe { (y.slice(row * h, h), gates.slice(row * 4 * h, 4 * h)) };
                    let step = ForwardStep {
                        hp: &hp[r * weights.out_stride()..][..3 * h],
                        xp: &x.xp[row * 3 * h..][..3 * h],
                        bias: x.b_hh,
                        gates,
                        state: &mut state[r * h..][..h],
                        y,
                    };
                    #[cfg(target_arch = "x86_64")]
                    if cx.isa.has_avx512() {
                        // SAFETY: the instruction set was detected.
                        unsafe { super::lanes::avx512::gru_forward(h, step) };
                        continue;
                    } else if cx.isa.has_avx2() {
                        // SAFETY: as above.
                        unsafe { super::lanes::avx2::gru_forward(h, step) };
                        continue;
                    }
                    super::scalar::gru_forward(h, step);
                }
            }
        });
    }

    /// Runs all steps back.
    pub fn backward(&self, cx: &Cx, x: GruBackward, scratch: &mut [f32]) {
        let (seq, h) = (self.seq(), self.hidden);
        let (states, per_batch) = (seq.states_len(), self.batch * h);
        assert_eq!(x.dxp.len(), 3 * states, "dxp is [B, T, 3H]");
        assert_eq!(x.gates.len(), 4 * states, "gates are [B, T, 4H]");
        assert_eq!((x.dy.len(), x.y.len()), (states, states), "dy and y are [B, T, H]");
        assert_eq!((x.h0.len(), x.dh0.len()), (per_batch, per_batch), "h0 and dh0 are [B, H]");
        assert!(x.dh_n.is_none_or(|d| d.len() == per_batch), "dh_n is [B, H]");
        assert_eq!(x.dw_hh.len(), 3 * h * h, "dw_hh is [3H, H]");
        assert!(x.db_hh.as_ref().is_none_or(|d| d.len() == 3 * h), "db_hh is [3H]");
        let workers = cx.par.workers();
        assert!(scratch.len() >= self.backward_scratch_len(workers), "scratch of GRU backward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let h_before = take(&mut scratch, states);
        let dhp_all = take(&mut scratch, 3 * states);
        {
            let (panels, scratch) = scratch.split_at_mut(Weights::panels_len(3 * h, h));
            let weights = Weights::plain(cx, x.w_hh, 3 * h, h, panels);
            let (dxp, dh0) = (SharedMut::new(x.dxp), SharedMut::new(x.dh0));
            let (h_before, dhp_all) = (SharedMut::new(&mut *h_before), SharedMut::new(&mut *dhp_all));
            seq.for_each_chunk(cx, self.backward_row(), scratch, |start, n, mut scratch| {
                let stride = weights.out_stride();
                let dhp = take(&mut scratch, n * 3 * h);
                let dh = take(&mut scratch, n * stride);
                for r in 0..n {
                    start_row(&mut dh[r * stride..][..h], x.dh_n, start + r);
                }
                for s in (0..self.time).rev() {
                    for r in 0..n {
                        let row = seq.row(start + r, s);
                        let before = match s {
                            0 => &x.h0[(start + r) * h..][..h],
                            _ => &x.y[seq.row(start + r, s - 1) * h..][..h],
                        };
                        // SAFETY: a row belongs to one task.
                        let dxp = unsafe {
                            h_before.slice(row * h, h).copy_from_slice(before);
                            dxp.slice(row * 3 * h, 3 * h)
                        };
                        let dhp = &mut dhp[r * 3 * h..][..3 * h];
                        let step = BackwardStep {
                            dy: &x.dy[row * h..][..h],
                            gates: &x.gates[row * 4 * h..][..4 * h],
                            before,
                            dh: &mut dh[r * stride..][..h],
                            dxp,
                            dhp,
                        };
                        #[cfg(target_arch = "x86_64")]
                        if cx.isa.has_avx512() {
                            // SAFETY: the instruction set was detected.
                            unsafe { super::lanes::avx512::gru_backward(h, step) };
                        } else if cx.isa.has_avx2() {
                            // SAFETY: as above.
                            unsafe { super::lanes::avx2::gru_backward(h, step) };
                        } else {
                            super::scalar::gru_backward(h, step);
                        }
                        #[cfg(not(target_arch = "x86_64"))]
                        super::scalar::gru_backward(h, step);
                        // SAFETY: a row belongs to one task.
                        unsafe { dhp_all.slice(row * 3 * h, 3 * h) }.copy_from_slice(dhp);
                    }
                    weights.product::<true>(n, dhp, dh);
                }
                for r in 0..n {
                    // SAFETY: a row belongs to one task.
                    let dh0 = unsafe { dh0.slice((start + r) * h, h) };
                    dh0.copy_from_slice(&dh[r * stride..][..h]);
                }
            });
        }
        seq.weight_grads(cx, dhp_all, h_before, x.dw_hh, x.db_hh, scratch);
    }
}

/// One sequence, one step forward. `hp` is the state's product with the weights; `state` becomes the next one, and
/// so does `y`.
pub(super) struct ForwardStep<'a> {
    pub hp: &'a [f32],
    pub xp: &'a [f32],
    pub bias: Option<&'a [f32]>,
    pub gates: &'a mut [f32],
    pub state: &'a mut [f32],
    pub y: &'a mut [f32],
}

/// One sequence, one step back. `dh` is the state's gradient without `dy`, and becomes that of the state `before`,
/// but for what comes through the product.
pub(super) struct BackwardStep<'a> {
    pub dy: &'a [f32],
    pub gates: &'a [f32],
    pub before: &'a [f32],
    pub dh: &'a mut [f32],
    pub dxp: &'a mut [f32],
    pub dhp: &'a mut [f32],
}
