//! An expression compiled for fixed shapes, and its two ways to run: over whole tensors, or piece by piece.

use polyreme_dtype::DType;

use super::blocks::UNBOUND;
use super::expr::{Expr, ExprError};
use super::formats::PassFormats;
use super::layout::{InputWalk, LoopLayout};
use super::pieces::FusedPieces;
use super::plan::StepPlan;
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

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
    Slice(Floats<'a>),
    /// What the output of this number held before; the input has the output's full shape and format.
    InPlace(usize),
}

/// Where an input of [`Fused::pieces`] comes from.
#[derive(Clone, Copy, Debug)]
pub enum PieceSource<'a> {
    /// A slice of the input's shape.
    Slice(Floats<'a>),
    /// The piece itself; the input has the output's full shape, and is in f32.
    Piece,
    /// What the output of this number held before; the input has the output's full shape and format.
    Target(usize),
}

/// Where an output of [`Fused::pieces`] goes. If none goes to the piece, the piece keeps its value.
#[derive(Clone, Copy)]
pub enum PieceTarget<'a> {
    /// To the same flat position of a whole tensor.
    Whole(SharedFloats<'a>),
    /// Over the piece; the output is in f32.
    Piece,
}

/// An [`Expr`] compiled for an output shape and the shapes of its inputs, and for the formats of both.
#[derive(Clone, Debug)]
pub struct Fused {
    pub(super) layout: LoopLayout,
    pub(super) formats: PassFormats,
    /// Writes outputs as soon as they are known.
    direct: StepPlan,
    /// For inputs in the memory of an output that `direct` would overwrite too early.
    careful: StepPlan,
    /// Whether rows are so short that blocks span them.
    pub(super) short_rows: bool,
}

impl Fused {
    /// Compiles `expr` for an output shape; each input's shape broadcasts to it as in NumPy. Everything is in f32.
    pub fn new(expr: &Expr, out_shape: &[usize], input_shapes: &[&[usize]]) -> Result<Fused, ExprError> {
        let inputs: Vec<_> = input_shapes.iter().map(|&shape| (shape, DType::F32)).collect();
        Fused::typed(expr, out_shape, &inputs, &vec![DType::F32; expr.outputs().len()])
    }

    /// Compiles `expr` as [`Fused::new`] does, for inputs and outputs in the given formats. Each value that is read is
    /// widened, everything is computed in f32, and each output is rounded once, as it is written: where one register is
    /// both an output and an operand, the operand is not rounded.
    pub fn typed(
        expr: &Expr,
        out_shape: &[usize],
        inputs: &[(&[usize], DType)],
        outputs: &[DType],
    ) -> Result<Fused, ExprError> {
        if inputs.len() != expr.n_inputs() {
            return Err(ExprError::InputCount { shapes: inputs.len(), inputs: expr.n_inputs() });
        }
        if outputs.len() != expr.outputs().len() {
            return Err(ExprError::OutputFormats { formats: outputs.len(), outputs: expr.outputs().len() });
        }
        let formats = PassFormats::new(inputs.iter().map(|&(_, dtype)| dtype), outputs)?;
        let input_shapes: Vec<_> = inputs.iter().map(|&(shape, _)| shape).collect();
        let layout = LoopLayout::new(out_shape, &input_shapes)?;
        let by_row = layout.walks.iter().any(|w| matches!(w, InputWalk::Row | InputWalk::Splat));
        let short = if by_row { SHORT_ROW } else { SHORT_CYCLE };
        let short_rows = layout.dims.len() > 1 && layout.inner() < short;
        Ok(Fused {
            layout,
            formats,
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
    pub fn run(&self, cx: &Cx, inputs: &[Source], outputs: &mut [FloatsMut]) {
        assert_eq!(inputs.len(), self.direct.n_inputs, "one source for each input");
        assert_eq!(outputs.len(), self.direct.n_outputs, "one slice for each output");
        let mut bind = UNBOUND;
        for (j, out) in outputs.iter_mut().enumerate() {
            assert_eq!(out.len(), self.len(), "length of an output");
            assert_eq!(out.dtype(), self.formats.outputs[j], "format of output {j}");
            bind.outputs[j] = match out {
                FloatsMut::F32(y) => y.as_mut_ptr(),
                FloatsMut::F16(y) => y.as_mut_ptr().cast(),
                FloatsMut::Bf16(y) => y.as_mut_ptr().cast(),
            };
        }
        let mut plan = &self.direct;
        for (k, source) in inputs.iter().enumerate() {
            bind.inputs[k] = match *source {
                Source::Slice(s) => self.checked(k, s),
                Source::InPlace(j) => {
                    self.check_in_place(k);
                    assert!(j < self.direct.n_outputs, "output {j} exists");
                    self.check_format(k, self.formats.outputs[j]);
                    if self.overwrites(j, k) {
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
                    let (dtype, base) = match whole {
                        SharedFloats::F32(y) => (DType::F32, y.as_mut_ptr()),
                        SharedFloats::F16(y) => (DType::F16, y.as_mut_ptr().cast()),
                        SharedFloats::Bf16(y) => (DType::Bf16, y.as_mut_ptr().cast()),
                    };
                    assert_eq!(dtype, self.formats.outputs[j], "format of output {j}");
                    pieces.bind.outputs[j] = base;
                }
                PieceTarget::Piece => {
                    assert!(!self.formats.rounds(j), "output {j} goes to the piece, so it is in f32");
                    pieces.piece_outputs |= 1 << j;
                }
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
                    self.check_format(k, DType::F32);
                    pieces.piece_inputs |= 1 << k;
                    pieces.piece_outputs
                }
                PieceSource::Target(j) => {
                    self.check_in_place(k);
                    assert!(matches!(outputs[j], PieceTarget::Whole(_)), "output {j} is a whole tensor");
                    self.check_format(k, self.formats.outputs[j]);
                    pieces.bind.inputs[k] = pieces.bind.outputs[j];
                    1 << j
                }
            };
            if (0..outputs.len()).any(|j| shared >> j & 1 == 1 && self.overwrites(j, k)) {
                pieces.plan = &self.careful;
            }
        }
        pieces
    }

    fn checked(&self, k: usize, s: Floats) -> *mut f32 {
        assert_eq!(s.len(), self.layout.lens[k], "length of input {k}");
        self.check_format(k, s.dtype());
        match s {
            Floats::F32(x) => x.as_ptr().cast_mut(),
            Floats::F16(x) => x.as_ptr().cast_mut().cast(),
            Floats::Bf16(x) => x.as_ptr().cast_mut().cast(),
        }
    }

    fn check_format(&self, k: usize, dtype: DType) {
        assert_eq!(dtype, self.formats.inputs[k], "format of input {k}");
    }

    /// Whether `direct` would overwrite input `k` in the memory of output `j` too early. A half output is written from
    /// its buffer after all steps.
    fn overwrites(&self, j: usize, k: usize) -> bool {
        self.direct.late[j] >> k & 1 == 1 && !self.formats.rounds(j)
    }

    fn check_in_place(&self, k: usize) {
        assert_eq!(self.layout.lens[k], self.len(), "input {k} is in place, so it has the output's shape");
    }
}
