//! The gated recurrent unit.
//!
//! ```text
//! r, z = σ(xp_r + hp_r), σ(xp_z + hp_z)        hp = W_hh·h + b_hh
//! n = tanh(xp_n + r·hp_n)
//! h' = (1 − z)·n + z·h
//! ```
//!
//! The reset gate works on the product, as in PyTorch, so the gradients of `xp_n` and `hp_n` differ by the factor r.

use super::sequence::{OwnLen, SPARE, Sequence, start_row};
use super::weights::Weights;
use crate::cx::SharedMut;
use crate::floats::{Float, Floats, FloatsMut, SharedFloats, each};
use crate::gemm::pairs::PairOrder;
use crate::tile::{aligned, round_cols, take};
use crate::{Cx, Isa};

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
    /// Multiplies in bf16, with sums in this order; `None` in f32.
    pub products: Option<PairOrder>,
}

/// What [`Gru::forward`] reads and writes. The last state is `y` at the last step that is run.
#[derive(Debug)]
pub struct GruForward<'a> {
    /// `[B, T, 3H]`, the projected input with `b_ih`; gates in the order r, z, n.
    pub xp: Floats<'a>,
    /// `[3H, H]`.
    pub w_hh: &'a [f32],
    /// `[3H]`.
    pub b_hh: Option<&'a [f32]>,
    /// `[B, H]`, the state before the first step.
    pub h0: &'a [f32],
    /// Written: `[B, T, H]`, the states.
    pub y: FloatsMut<'a>,
    /// Written, for backward: `[B, T, 4H]`, the gates r, z, n after their activation, and `hp_n`.
    pub gates: FloatsMut<'a>,
}

/// What [`Gru::backward`] reads and writes; gradients are overwritten.
#[derive(Debug)]
pub struct GruBackward<'a> {
    /// `[B, T, H]`, the gradient of the states.
    pub dy: Floats<'a>,
    /// `[B, H]`, the gradient of the last state, beside that in `dy`.
    pub dh_n: Option<&'a [f32]>,
    /// As in forward.
    pub w_hh: &'a [f32],
    /// As in forward.
    pub h0: &'a [f32],
    /// From forward.
    pub y: Floats<'a>,
    /// From forward.
    pub gates: Floats<'a>,
    /// Written: `[B, T, 3H]`.
    pub dxp: FloatsMut<'a>,
    /// Written: `[3H, H]`.
    pub dw_hh: &'a mut [f32],
    /// Written: `[3H]`.
    pub db_hh: Option<&'a mut [f32]>,
    /// Written: `[B, H]`.
    pub dh0: &'a mut [f32],
}

impl Gru {
    fn seq(&self) -> Sequence {
        let Self { batch, time, hidden, reverse, strict, products } = *self;
        Sequence { batch, time, hidden, gates: 3, reverse, strict, products }
    }

    /// Forward's scratch: of each sequence the state and its product with the weights; in half, of the sequence at hand xp,
    /// the gates and y.
    fn forward_own(&self, half: bool) -> OwnLen {
        let [one, three, four] = [1, 3, 4].map(|n| round_cols(n * self.hidden));
        let (m, h) = (self.seq().chunk(), self.hidden);
        let extra = Weights::extra_len::<false>(self.products, m, h, 3 * h);
        OwnLen { per_sequence: one + three, once: extra + if half { three + four + one } else { 0 } }
    }

    /// Backward's scratch: of each sequence the gradients of hp and of the state; in half, of the sequence at hand dy, the
    /// gates, the state before and dxp.
    fn backward_own(&self, half: bool) -> OwnLen {
        let [one, three, four] = [1, 3, 4].map(|n| round_cols(n * self.hidden));
        let (m, h) = (self.seq().chunk(), self.hidden);
        let extra = Weights::extra_len::<true>(self.products, m, 3 * h, h);
        OwnLen { per_sequence: three + one, once: extra + if half { 2 * one + four + three } else { 0 } }
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
        Weights::panels_len(self.products, self.hidden, 3 * self.hidden)
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
            + seq.kept_len(half, 3 * seq.states_len())
            + self.steps_back_len(half, workers).max(seq.weight_grads_len(half, workers))
            + SPARE
    }

    fn steps_back_len(&self, half: bool, workers: usize) -> usize {
        Weights::panels_len(self.products, 3 * self.hidden, self.hidden)
            + workers * self.seq().worker_len(self.backward_own(half))
    }

    /// Runs all steps.
    pub fn forward(&self, cx: &Cx, x: GruForward, scratch: &mut [f32]) {
        let (seq, h) = (self.seq(), self.hidden);
        assert_eq!(x.xp.len(), 3 * seq.states_len(), "xp is [B, T, 3H]");
        assert_eq!(x.gates.len(), 4 * seq.states_len(), "gates are [B, T, 4H]");
        assert_eq!(x.y.len(), seq.states_len(), "y is [B, T, H]");
        assert_eq!(x.h0.len(), self.batch * h, "h0 is [B, H]");
        assert!(x.b_hh.is_none_or(|b| b.len() == 3 * h), "b_hh is [3H]");
        let half = x.xp.is_half() || x.y.is_half() || x.gates.is_half();
        let want = self.forward_len(half, cx.par.workers());
        assert!(scratch.len() >= want, "scratch of GRU forward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let panels = take(&mut scratch, Weights::panels_len(self.products, h, 3 * h));
        let weights = Weights::transposed(cx, self.products, x.w_hh, 3 * h, h, panels);
        let (y, gates) = (SharedFloats::new(x.y), SharedFloats::new(x.gates));
        let staged = |n: usize| if half { n } else { 0 };
        seq.for_each_chunk(cx, self.forward_own(half), scratch, |start, n, mut scratch| {
            let state = take(&mut scratch, n * h);
            let hp = take(&mut scratch, weights.out_rows(n) * weights.out_stride());
            let [xp_stage, gates_stage, y_stage] = [3, 4, 1].map(|n| take(&mut scratch, staged(n * h)));
            let extra = scratch;
            state.copy_from_slice(&x.h0[start * h..][..n * h]);
            for s in 0..self.time {
                weights.product::<false>(n, state, hp, extra);
                for r in 0..n {
                    let row = seq.row(start + r, s);
                    // SAFETY: a row belongs to one task.
                    let (y, gates) = unsafe { (y.part(row * h, h), gates.part(row * 4 * h, 4 * h)) };
                    let (hp, state) = (&hp[r * weights.out_stride()..][..3 * h], &mut state[r * h..][..h]);
                    let xp = x.xp.staged(cx.isa, row * 3 * h, 3 * h, xp_stage);
                    y.staged(cx.isa, y_stage, |y| {
                        gates.staged(cx.isa, gates_stage, |gates| {
                            gru_forward(cx.isa, h, ForwardStep { hp, xp, bias: x.b_hh, gates, state, y });
                        });
                    });
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
        let half = [x.dy, x.y, x.gates, x.dxp.as_floats()].iter().any(Floats::is_half);
        let workers = cx.par.workers();
        let want = self.backward_len(half, workers);
        let is_f16 = |x: &Floats| matches!(x, Floats::F16(_));
        assert!(
            self.products.is_none() || ![x.y, x.dxp.as_floats()].iter().any(is_f16),
            "f16 is multiplied in f32: leave `products` unset"
        );
        assert!(scratch.len() >= want, "scratch of GRU backward is short");
        if h == 0 {
            return;
        }

        let mut scratch = aligned(scratch);
        let staged = |n: usize| if half { n } else { 0 };
        // The state before each step and the gradient of hp, for their product; in half with products in f32 they are made
        // again, some rows at a time.
        let mut h_before = seq.kept(half, states, &mut scratch);
        let mut dhp_all = seq.kept(half, 3 * states, &mut scratch);
        let mut dxp = x.dxp;
        let state_before = |b: usize, s: usize| match s {
            0 => Floats::F32(&x.h0[b * h..][..h]),
            _ => x.y.part(seq.row(b, s - 1) * h, h),
        };
        {
            let (panels, scratch) = scratch.split_at_mut(Weights::panels_len(self.products, 3 * h, h));
            let weights = Weights::plain(cx, self.products, x.w_hh, 3 * h, h, panels);
            let (dxp, dh0) = (SharedFloats::new(dxp.reborrow()), SharedMut::new(x.dh0));
            let [h_before, dhp_all] = [&mut h_before, &mut dhp_all]
                .map(|kept| kept.as_mut().map(|kept| SharedFloats::new(kept.reborrow())));
            seq.for_each_chunk(cx, self.backward_own(half), scratch, |start, n, mut scratch| {
                let stride = weights.out_stride();
                let dhp = take(&mut scratch, n * 3 * h);
                let dh = take(&mut scratch, n * stride);
                let [dy_stage, before_stage, gates_stage, dxp_stage] =
                    [1, 1, 4, 3].map(|n| take(&mut scratch, staged(n * h)));
                let extra = scratch;
                for r in 0..n {
                    start_row(&mut dh[r * stride..][..h], x.dh_n, start + r);
                }
                for s in (0..self.time).rev() {
                    for r in 0..n {
                        let row = seq.row(start + r, s);
                        let before = state_before(start + r, s).staged(cx.isa, 0, h, before_stage);
                        let dy = x.dy.staged(cx.isa, row * h, h, dy_stage);
                        let gates = x.gates.staged(cx.isa, row * 4 * h, 4 * h, gates_stage);
                        let (dhp, dh) = (&mut dhp[r * 3 * h..][..3 * h], &mut dh[r * stride..][..h]);
                        // SAFETY: a row belongs to one task.
                        unsafe { dxp.part(row * 3 * h, 3 * h) }.staged(cx.isa, dxp_stage, |dxp| {
                            gru_backward(cx.isa, h, BackwardStep { dy, gates, before, dh, dxp, dhp });
                        });
                        if let (Some(h_before), Some(dhp_all)) = (&h_before, &dhp_all) {
                            // SAFETY: as above.
                            unsafe {
                                h_before.part(row * h, h).round(cx.isa, before);
                                dhp_all.part(row * 3 * h, 3 * h).round(cx.isa, dhp);
                            }
                        }
                    }
                    weights.product::<true>(n, dhp, dh, extra);
                }
                for r in 0..n {
                    // SAFETY: a row belongs to one task.
                    let dh0 = unsafe { dh0.slice((start + r) * h, h) };
                    dh0.copy_from_slice(&dh[r * stride..][..h]);
                }
            });
        }
        match (&dhp_all, &h_before, self.products) {
            (Some(dhp), Some(h_before), Some(order)) => {
                let (dhp, h_before) = (dhp.as_floats(), h_before.as_floats());
                return seq.weight_grads_in_pairs(cx, order, dhp, h_before, x.dw_hh, x.db_hh, scratch);
            }
            (Some(FloatsMut::F32(dhp)), Some(FloatsMut::F32(h_before)), _) => {
                return seq.weight_grads(cx, dhp, h_before, x.dw_hh, x.db_hh, scratch);
            }
            _ => {}
        }
        let dxp = dxp.as_floats();
        let row = |row: usize, dhp: &mut [f32], h_before: &mut [f32]| {
            dxp.part(row * 3 * h, 3 * h).widen(cx.isa, dhp);
            // The gradient of hp_n is that of xp_n times r.
            each!(Floats, x.gates.part(row * 4 * h, h), r => for (d, r) in dhp[2 * h..].iter_mut().zip(r) {
                *d *= r.wide();
            });
            let (b, s) = seq.at(row);
            state_before(b, s).widen(cx.isa, h_before);
        };
        seq.weight_grads_by_rows(cx, row, x.dw_hh, x.db_hh, scratch);
    }
}

cell! {
    /// One step forward.
    fn gru_forward(step: ForwardStep)
}
cell! {
    /// One step back.
    fn gru_backward(step: BackwardStep)
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
