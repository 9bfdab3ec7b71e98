//! A [`Fused`] evaluated piece by piece: the epilogue of a kernel that has a piece of its result in cache.

use std::mem::MaybeUninit;

use super::blocks::{BLOCK, Bind, Bufs, Lane, ROWS_BUFS, ROWS_BUFS_HALVES, ROWS_SLOTS, SPACE, SPLAT, steps};
use super::expr::Expr;
use super::formats::StagedBlock;
use super::fused::Fused;
use super::layout::InputWalk;
use super::plan::StepPlan;
use crate::Isa;

/// A [`Fused`] with everything bound but the piece. Any thread may evaluate pieces.
#[derive(Clone, Copy)]
pub struct FusedPieces<'a> {
    pub(super) fused: &'a Fused,
    pub(super) isa: Isa,
    pub(super) plan: &'a StepPlan,
    pub(super) bind: Bind,
    /// As bits: the inputs that are the piece.
    pub(super) piece_inputs: u32,
    /// As bits: the output that goes to the piece, if any.
    pub(super) piece_outputs: u32,
}

impl FusedPieces<'_> {
    /// Evaluates several pieces: the one number `r` starts at the flat position `first + r * stride`.
    pub fn rows<'p>(&self, first: usize, stride: usize, pieces: impl Iterator<Item = &'p mut [f32]>) {
        let (layout, plan) = (&self.fused.layout, self.plan);
        let by_row = layout.walks.iter().any(|w| matches!(w, InputWalk::Row | InputWalk::Splat));
        let same_column = layout.dims.len() == 1 || stride.is_multiple_of(layout.inner());
        let fits = plan.first_output() + plan.n_outputs <= ROWS_SLOTS;
        let halves = self.fused.formats.halves;
        let (n_bufs, room) = if halves {
            (plan.n_bufs + plan.n_inputs + plan.n_outputs, ROWS_BUFS_HALVES)
        } else {
            (plan.n_bufs, ROWS_BUFS)
        };
        if by_row || !same_column || !fits || n_bufs > room {
            for (r, piece) in pieces.enumerate() {
                self.piece(first + r * stride, piece);
            }
        } else if halves {
            self.rows_at_column::<ROWS_BUFS_HALVES, true>(first, stride, pieces);
        } else {
            self.rows_at_column::<ROWS_BUFS, false>(first, stride, pieces);
        }
    }

    /// Pieces below each other, where no input depends on the row: all but a few pointers is set up once.
    fn rows_at_column<'p, const BUFS: usize, const HALVES: bool>(
        &self,
        first: usize,
        stride: usize,
        pieces: impl Iterator<Item = &'p mut [f32]>,
    ) {
        let (layout, plan) = (&self.fused.layout, self.plan);
        let (n, inner) = (layout.len, layout.inner());
        let col = if layout.dims.len() == 1 { 0 } else { first % inner };
        let mut bufs = MaybeUninit::<Bufs<BUFS>>::uninit();
        let bufs: *mut f32 = bufs.as_mut_ptr().cast();
        let mut splats = [[0f32; SPLAT]; Expr::INPUTS_MAX];
        let mut table = [Lane { ptr: std::ptr::null_mut(), step: 1 }; ROWS_SLOTS];
        for (c, v) in plan.consts.iter().enumerate() {
            table[plan.first_const() + c] = Lane { ptr: v.as_ptr().cast_mut(), step: 0 };
        }
        for b in 0..plan.n_bufs {
            table[plan.first_buf() + b].ptr = bufs.wrapping_add(b * SPACE);
        }
        for (k, _) in layout.walks.iter().enumerate().filter(|(_, w)| **w == InputWalk::Uniform) {
            let of_piece = self.piece_inputs >> k & 1 == 1;
            // SAFETY: a uniform input has one float; if it is the piece, its value is set below.
            let value = if of_piece { 0.0 } else { unsafe { self.fused.value::<HALVES>(&self.bind, k, 0) } };
            splats[k] = [value; SPLAT];
            table[k] = Lane { ptr: splats[k].as_mut_ptr(), step: 0 };
        }
        let stage = StagedBlock::after(plan, bufs);
        if HALVES {
            // SAFETY: there is a buffer for each input and output.
            unsafe { stage.clear(&self.fused.formats, plan, BLOCK) };
        }
        let block = if plan.steps.len() == 1 && !HALVES { usize::MAX } else { BLOCK };
        for (r, piece) in pieces.enumerate() {
            let at = first + r * stride;
            assert!(at <= n && piece.len() <= n - at, "piece {at}+{} of {n}", piece.len());
            assert!(layout.dims.len() == 1 || col + piece.len() <= inner, "a piece stays in its row");
            for done in (0..piece.len()).step_by(block.min(piece.len().max(1))) {
                let len = block.min(piece.len() - done);
                let here = piece.as_mut_ptr().wrapping_add(done);
                for (k, walk) in layout.walks.iter().enumerate() {
                    let from = match walk {
                        _ if self.piece_inputs >> k & 1 == 1 => {
                            table[k] = Lane { ptr: here, step: 1 };
                            continue;
                        }
                        InputWalk::Full => at + done,
                        InputWalk::Cycle | InputWalk::Row | InputWalk::Splat => col + done,
                        InputWalk::Uniform => continue,
                    };
                    // SAFETY: inputs were checked when bound, and this piece is inside its row and inside the whole.
                    table[k].ptr =
                        unsafe { self.fused.block::<HALVES>(self.isa, &self.bind, k, from, len, stage) };
                }
                for j in 0..plan.n_outputs {
                    let ptr = if self.piece_outputs >> j & 1 == 1 {
                        here
                    } else if HALVES && self.fused.formats.rounds(j) {
                        stage.output(j)
                    } else {
                        self.bind.outputs[j].wrapping_add(at + done)
                    };
                    table[plan.first_output() + j] = Lane { ptr, step: 1 };
                }
                // SAFETY: every slot that the steps use points to `len` floats, or to `SPLAT` with step 0: inputs and
                // outputs were checked when bound, and this piece is inside its row and inside the whole;
                // disjointness is the promise made to `Fused::pieces`.
                unsafe { steps(self.isa, &plan.steps, table.as_ptr(), len) };
                if HALVES {
                    let formats = &self.fused.formats;
                    // SAFETY: the steps have written the buffers of the outputs; the rest as above.
                    unsafe { formats.round(self.isa, plan, &self.bind, at + done, len, stage) };
                }
            }
        }
    }

    /// Evaluates the flat positions `flat_start..flat_start + piece.len()`.
    #[inline]
    pub fn piece(&self, flat_start: usize, piece: &mut [f32]) {
        let n = self.fused.len();
        assert!(
            flat_start <= n && piece.len() <= n - flat_start,
            "piece {flat_start}+{} of {n}",
            piece.len()
        );
        let mut bind = self.bind;
        // The base from which the piece lies at its flat position; only positions inside the piece are touched.
        let base = piece.as_mut_ptr().wrapping_sub(flat_start);
        for k in 0..self.plan.n_inputs {
            if self.piece_inputs >> k & 1 == 1 {
                // An input of a one-element shape is read at its base.
                bind.inputs[k] = base;
            }
        }
        for j in 0..self.plan.n_outputs {
            if self.piece_outputs >> j & 1 == 1 {
                bind.outputs[j] = base;
            }
        }
        // SAFETY: inputs and outputs were checked when bound; the piece covers the range; disjointness is the
        // promise made to `Fused::pieces`.
        unsafe { self.fused.range(self.isa, self.plan, &bind, flat_start, flat_start + piece.len()) };
    }
}
