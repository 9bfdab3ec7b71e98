//! An expression compiled for fixed shapes, and its two ways to run: over whole tensors, or piece by piece.

use super::blocks::UNBOUND;
use super::expr::{Expr, ExprError};
use super::layout::{InputWalk, LoopLayout};
use super::pieces::FusedPieces;
use super::plan::StepPlan;
use crate::Isa;
use crate::cx::{Cx, SharedMut};

/// Rows shorter than this are evaluated several at a time, with broadcast inputs copied into block buffers: a block
/// of one short row would spend more time on dispatch than on values.
const SHORT_ROW: usize = 64;
/// The same where the broadcast inputs repeat in every row, and so are copied only once.
pub(super) const SHORT_CYCLE: usize = 256;
/// The least cost of a task; below twice this there is only one task.
const TASK_NS: f64 = 12_000.0;
/// The most tasks.
const TASKS_MAX: usize = 64;

/// Where an input of [`Fused::run`] comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A slice of the input's shape.
    Slice(&'a [f32]),
    /// What the output of this number held before; the input has the output's full shape.
    InPlace(usize),
}

/// Where an input of [`Fused::pieces`] comes from.
#[derive(Clone, Copy, Debug)]
pub enum PieceSource<'a> {
    /// A slice of the input's shape.
    Slice(&'a [f32]),
    /// The piece itself; the input has the output's full shape.
    Piece,
    /// What the output of this number held before; the input has the output's full shape.
    Target(usize),
}

/// Where an output of [`Fused::pieces`] goes. If none goes to the piece, the piece keeps its value.
#[derive(Clone, Copy)]
pub enum PieceTarget<'a> {
    /// To the same flat position of a whole tensor.
    Whole(SharedMut<'a, f32>),
    /// Over the piece.
    Piece,
}

/// An [`Expr`] compiled for an output shape and the shapes of its inputs.
#[derive(Clone, Debug)]
pub struct Fused {
    pub(super) layout: LoopLayout,
    /// Writes outputs as soon as they are known.
    direct: StepPlan,
    /// For inputs in the memory of an output that `direct` would overwrite too early.
    careful: StepPlan,
    /// Whether rows are so short that blocks span them.
    pub(super) short_rows: bool,
}

impl Fused {
    /// Compiles `expr` for an output shape; each input's shape broadcasts to it as in NumPy.
    pub fn new(expr: &Expr, out_shape: &[usize], input_shapes: &[&[usize]]) -> Result<Fused, ExprError> {
        if input_shapes.len() != expr.n_inputs() {
            return Err(ExprError::InputCount { shapes: input_shapes.len(), inputs: expr.n_inputs() });
        }
        let layout = LoopLayout::new(out_shape, input_shapes)?;
        let by_row = layout.walks.iter().any(|w| matches!(w, InputWalk::Row | InputWalk::Splat));
        let short = if by_row { SHORT_ROW } else { SHORT_CYCLE };
        let short_rows = layout.dims.len() > 1 && layout.inner() < short;
        Ok(Fused {
            layout,
            direct: StepPlan::new(expr, false),
            careful: StepPlan::new(expr, true),
            short_rows,
        })
    }

    /// How many floats each output has.
    pub fn len(&self) -> usize {
        self.layout.len
    }

    /// Whether the outputs are empty.
    pub fn is_empty(&self) -> bool {
        self.layout.len == 0
    }

    /// Evaluates the expression over the whole shape. The same bits for any number of workers.
    pub fn run(&self, cx: &Cx, inputs: &[Source], outputs: &mut [&mut [f32]]) {
        assert_eq!(inputs.len(), self.direct.n_inputs, "one source for each input");
        assert_eq!(outputs.len(), self.direct.n_outputs, "one slice for each output");
        let mut bind = UNBOUND;
        for (to, out) in bind.outputs.iter_mut().zip(outputs) {
            assert_eq!(out.len(), self.len(), "length of an output");
            *to = out.as_mut_ptr();
        }
        let mut plan = &self.direct;
        for (k, source) in inputs.iter().enumerate() {
            bind.inputs[k] = match *source {
                Source::Slice(s) => self.checked(k, s),
                Source::InPlace(j) => {
                    self.check_in_place(k);
                    assert!(j < self.direct.n_outputs, "output {j} exists");
                    if self.direct.late[j] >> k & 1 == 1 {
                        plan = &self.careful;
                    }
                    bind.outputs[j]
                }
            };
        }
        let n = self.len();
        let total_ns = plan.cost_ns() * n as f64 / 8.0;
        let n_tasks = ((total_ns / TASK_NS) as usize).clamp(1, TASKS_MAX);
        if n_tasks == 1 {
            // SAFETY: the slices were checked; nothing else runs.
            unsafe { self.range(cx.isa, plan, &bind, 0, n) };
            return;
        }
        let chunk = n.div_ceil(n_tasks).next_multiple_of(64);
        let bind = &bind;
        cx.par.run(n.div_ceil(chunk), &|i, _| {
            // SAFETY: the slices were checked; the ranges of different tasks are disjoint.
            unsafe { self.range(cx.isa, plan, bind, i * chunk, n.min((i + 1) * chunk)) };
        });
    }

    /// Binds everything but the piece, for evaluation piece by piece.
    ///
    /// # Safety
    /// If any target is [`PieceTarget::Whole`]: calls of [`FusedPieces::piece`] that overlap in time must have
    /// disjoint ranges of flat positions, the wholes must be disjoint from each other and from the pieces, and
    /// nothing else may use them while pieces are evaluated.
    pub unsafe fn pieces<'a>(
        &'a self,
        isa: Isa,
        inputs: &[PieceSource<'a>],
        outputs: &[PieceTarget<'a>],
    ) -> FusedPieces<'a> {
        assert_eq!(inputs.len(), self.direct.n_inputs, "one source for each input");
        assert_eq!(outputs.len(), self.direct.n_outputs, "one target for each output");
        let mut pieces = FusedPieces {
            fused: self,
            isa,
            plan: &self.direct,
            bind: UNBOUND,
            piece_inputs: 0,
            piece_outputs: 0,
        };
        for (j, target) in outputs.iter().enumerate() {
            match target {
                PieceTarget::Whole(whole) => {
                    assert_eq!(whole.len(), self.len(), "length of an output");
                    pieces.bind.outputs[j] = whole.as_mut_ptr();
                }
                PieceTarget::Piece => pieces.piece_outputs |= 1 << j,
            }
        }
        assert!(pieces.piece_outputs.count_ones() <= 1, "at most one output goes to the piece");
        for (k, source) in inputs.iter().enumerate() {
            // The outputs that share this input's memory.
            let shared = match *source {
                PieceSource::Slice(s) => {
                    pieces.bind.inputs[k] = self.checked(k, s);
                    0
                }
                PieceSource::Piece => {
                    self.check_in_place(k);
                    pieces.piece_inputs |= 1 << k;
                    pieces.piece_outputs
                }
                PieceSource::Target(j) => {
                    self.check_in_place(k);
                    assert!(matches!(outputs[j], PieceTarget::Whole(_)), "output {j} is a whole tensor");
                    pieces.bind.inputs[k] = pieces.bind.outputs[j];
                    1 << j
                }
            };
            if (0..outputs.len()).any(|j| shared >> j & 1 == 1 && self.direct.late[j] >> k & 1 == 1) {
                pieces.plan = &self.careful;
            }
        }
        pieces
    }

    fn checked(&self, k: usize, s: &[f32]) -> *mut f32 {
        assert_eq!(s.len(), self.layout.lens[k], "length of input {k}");
        s.as_ptr().cast_mut()
    }

    fn check_in_place(&self, k: usize) {
        assert_eq!(self.layout.lens[k], self.len(), "input {k} is in place, so it has the output's shape");
    }
}
