//! An expression compiled for fixed shapes, and its two ways to run: over whole tensors, or piece by piece.

use super::expr::{Expr, ExprError};
#[cfg(target_arch = "x86_64")]
use super::lanes;
use super::layout::{InputWalk, LoopLayout, RowCursor};
use super::plan::{FusedStep, StepPlan};
use super::scalar;
use crate::Isa;
use crate::cx::{Cx, SharedMut};
use std::mem::MaybeUninit;

/// Elements of a block: four buffers of it take a quarter of a 32 KB L1 cache.
const BLOCK: usize = 512;
/// Rows shorter than this are evaluated several at a time, with broadcast inputs copied into block buffers: a block
/// of one short row would spend more time on dispatch than on values.
const SHORT_ROW: usize = 64;
/// The same where the broadcast inputs repeat in every row, and so are copied only once.
const SHORT_CYCLE: usize = 256;
/// Room for a block, or for a block and a short row: a cycle of short rows is written out once and then read from
/// wherever in its row a block starts.
const SPACE: usize = BLOCK + SHORT_CYCLE;
/// The least cost of a task; below twice this there is only one task.
const TASK_NS: f64 = 12_000.0;
/// The most tasks.
const TASKS_MAX: usize = 64;

/// Copies that stand for a value that does not change: as many as the widest vector has lanes.
pub(super) const SPLAT: usize = 16;

/// Where a slot of the table points, and how far the next element is: 1, or 0 for [`SPLAT`] copies of one value.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub ptr: *mut f32,
    pub step: usize,
}

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
    layout: LoopLayout,
    /// Writes outputs as soon as they are known.
    direct: StepPlan,
    /// For inputs in the memory of an output that `direct` would overwrite too early.
    careful: StepPlan,
    /// Whether rows are so short that blocks span them.
    short_rows: bool,
}

/// Base pointers of inputs and outputs.
#[derive(Clone, Copy)]
struct Bind {
    inputs: [*mut f32; Expr::INPUTS_MAX],
    outputs: [*mut f32; Expr::OUTPUTS_MAX],
}

// SAFETY: inputs are read only, and tasks write disjoint ranges of the outputs.
unsafe impl Send for Bind {}
// SAFETY: as above.
unsafe impl Sync for Bind {}

const UNBOUND: Bind = Bind {
    inputs: [std::ptr::null_mut(); Expr::INPUTS_MAX],
    outputs: [std::ptr::null_mut(); Expr::OUTPUTS_MAX],
};

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

    /// Evaluates the flat positions `start..end`.
    ///
    /// # Safety
    /// The bound pointers are valid for this layout's lengths, or at least for what `start..end` reads and writes.
    #[inline]
    unsafe fn range(&self, isa: Isa, plan: &StepPlan, bind: &Bind, start: usize, end: usize) {
        if start >= end {
            return;
        }
        let inner = self.layout.inner();
        // A range inside one row, as pieces mostly are, has no rows to span.
        let spans = self.short_rows && start / inner != (end - 1) / inner;
        let fills = if spans { plan.n_inputs } else { 0 };
        // Two sizes of stack frame, so that the usual short chain does not touch the pages of the largest.
        // SAFETY: the frames have room for the plan's slots and buffers; the rest is the caller's promise.
        unsafe {
            if plan.first_output() + plan.n_outputs <= 24 && plan.n_bufs + fills <= 6 {
                self.range_in::<24, 6>(isa, plan, bind, start, end, spans);
            } else {
                self.range_in::<{ SLOTS_MAX }, { BUFS_MAX }>(isa, plan, bind, start, end, spans);
            }
        }
    }

    /// # Safety
    /// As `range`; the plan has at most `SLOTS` slots, and at most `BUFS` buffers together with its inputs.
    unsafe fn range_in<const SLOTS: usize, const BUFS: usize>(
        &self,
        isa: Isa,
        plan: &StepPlan,
        bind: &Bind,
        start: usize,
        end: usize,
        spans: bool,
    ) {
        let mut bufs = MaybeUninit::<Bufs<BUFS>>::uninit();
        let bufs: *mut f32 = bufs.as_mut_ptr().cast();
        let mut splats = MaybeUninit::<[[f32; SPLAT]; Expr::INPUTS_MAX]>::uninit();
        let splats: *mut [f32; SPLAT] = splats.as_mut_ptr().cast();
        let mut table = [const { MaybeUninit::<Lane>::uninit() }; SLOTS];
        for (c, v) in plan.consts.iter().enumerate() {
            table[plan.first_const() + c].write(Lane { ptr: v.as_ptr().cast_mut(), step: 0 });
        }
        for b in 0..plan.n_bufs {
            table[plan.first_buf() + b].write(Lane { ptr: bufs.wrapping_add(b * SPACE), step: 1 });
        }
        let layout = &self.layout;
        for (k, walk) in layout.walks.iter().enumerate() {
            // SAFETY: there is a splat for each input; a uniform input has one float.
            unsafe {
                match walk {
                    InputWalk::Uniform => *splats.add(k) = [*bind.inputs[k]; SPLAT],
                    InputWalk::Full | InputWalk::Cycle | InputWalk::Row | InputWalk::Splat => {}
                }
            }
            let step = if matches!(walk, InputWalk::Uniform) || (!spans && *walk == InputWalk::Splat) {
                0
            } else {
                1
            };
            table[k].write(Lane { ptr: splats.wrapping_add(k).cast(), step });
        }
        let table: *mut Lane = table.as_mut_ptr().cast();
        let inner = layout.inner();
        let single_row = layout.dims.len() == 1;
        let (row, mut col) = if single_row { (0, start) } else { (start / inner, start % inner) };
        let mut cursor = RowCursor::new(layout, row);
        // A single step has no use for blocks: nothing is read again.
        let block = if plan.steps.len() == 1 && !spans { usize::MAX } else { BLOCK };
        // Fill buffers come after the plan's, one for each input.
        let fills = bufs.wrapping_add(plan.n_bufs * SPACE);
        if spans {
            // SAFETY: there is a buffer for each input, with room for a block and a short row.
            unsafe { self.fill_cycles(bind, fills, BLOCK.min(end - start) + inner) };
        }
        let mut at = start;
        while at < end {
            let len;
            if spans {
                len = block.min(end - at);
                // SAFETY: there is a fill buffer for each input, and the cycles were written.
                unsafe { self.fill(bind, table, fills, at, len, &mut cursor, &mut col) };
            } else {
                len = block.min(end - at).min(inner - col);
                for (k, walk) in layout.walks.iter().enumerate() {
                    let row = bind.inputs[k].wrapping_add(cursor.offsets[k]);
                    // SAFETY: slots below `SLOTS`; the row's value exists.
                    unsafe {
                        match walk {
                            InputWalk::Full => (*table.add(k)).ptr = bind.inputs[k].wrapping_add(at),
                            InputWalk::Cycle | InputWalk::Row => (*table.add(k)).ptr = row.wrapping_add(col),
                            InputWalk::Splat => *splats.add(k) = [*row; SPLAT],
                            InputWalk::Uniform => {}
                        }
                    }
                }
                col += len;
                if col == inner && at + len < end {
                    col = 0;
                    cursor.advance(layout);
                }
            }
            for j in 0..plan.n_outputs {
                // SAFETY: output slots are below `SLOTS`.
                unsafe {
                    *table.add(plan.first_output() + j) =
                        Lane { ptr: bind.outputs[j].wrapping_add(at), step: 1 }
                };
            }
            // SAFETY: every slot that the steps use points to `len` floats, or to `SPLAT` with step 0.
            unsafe { steps(isa, &plan.steps, table, len) };
            at += len;
        }
    }

    /// Writes the first `len` values of each cycle of rows.
    ///
    /// # Safety
    /// As `range`; `fills` has `SPACE` floats for each input, and `len` is at most that.
    unsafe fn fill_cycles(&self, bind: &Bind, fills: *mut f32, len: usize) {
        let inner = self.layout.inner();
        for (k, _) in self.layout.walks.iter().enumerate().filter(|(_, w)| **w == InputWalk::Cycle) {
            let to = fills.wrapping_add(k * SPACE);
            for i in 0..len {
                // SAFETY: the input has `inner` floats; later rounds copy what the first wrote.
                unsafe { *to.add(i) = if i < inner { *bind.inputs[k].add(i) } else { *to.add(i - inner) } };
            }
        }
    }

    /// Points the input slots at the values for `at..at + len` where that range spans rows: broadcast inputs are
    /// copied, row by row. Moves the cursor past the range.
    ///
    /// # Safety
    /// As `range`; `fills` has a block for each input.
    unsafe fn fill(
        &self,
        bind: &Bind,
        table: *mut Lane,
        fills: *mut f32,
        at: usize,
        len: usize,
        cursor: &mut RowCursor,
        col: &mut usize,
    ) {
        let (layout, inner) = (&self.layout, self.layout.inner());
        for (k, walk) in layout.walks.iter().enumerate() {
            let ptr = match walk {
                InputWalk::Full => bind.inputs[k].wrapping_add(at),
                InputWalk::Cycle => fills.wrapping_add(k * SPACE + *col),
                InputWalk::Row | InputWalk::Splat => fills.wrapping_add(k * SPACE),
                InputWalk::Uniform => continue,
            };
            // SAFETY: there is a slot for each input.
            unsafe { (*table.add(k)).ptr = ptr };
        }
        if !layout.walks.iter().any(|w| matches!(w, InputWalk::Row | InputWalk::Splat)) {
            // Nothing depends on the row.
            *col = (*col + len) % inner;
            return;
        }
        let mut done = 0;
        while done < len {
            let run = (inner - *col).min(len - done);
            for (k, walk) in layout.walks.iter().enumerate() {
                let to = fills.wrapping_add(k * SPACE + done);
                let row = bind.inputs[k].wrapping_add(cursor.offsets[k]);
                // SAFETY: `done + run` is at most a block; the row has `inner` values, or one.
                unsafe {
                    match walk {
                        InputWalk::Row => {
                            let from = row.add(*col);
                            for i in 0..run {
                                *to.add(i) = *from.add(i);
                            }
                        }
                        InputWalk::Splat => {
                            let v = *row;
                            for i in 0..run {
                                *to.add(i) = v;
                            }
                        }
                        InputWalk::Full | InputWalk::Cycle | InputWalk::Uniform => {}
                    }
                }
            }
            done += run;
            *col += run;
            if *col == inner {
                *col = 0;
                cursor.advance(layout);
            }
        }
    }
}

/// The most slots: inputs, constants and buffers (one an instruction, or an input that is an output), outputs.
const SLOTS_MAX: usize = Expr::INPUTS_MAX + Expr::INSTRS_MAX + Expr::OUTPUTS_MAX * 2;
/// The most block buffers: one an instruction, one for each output that is an input, one for each broadcast input.
const BUFS_MAX: usize = Expr::INSTRS_MAX + Expr::OUTPUTS_MAX + Expr::INPUTS_MAX;

/// What the usual short chain uses of them.
const ROWS_SLOTS: usize = 24;
const ROWS_BUFS: usize = 6;

#[repr(align(64))]
struct Bufs<const N: usize>(#[allow(dead_code, reason = "used through a raw pointer")] [[f32; SPACE]; N]);

/// Evaluates the steps over a block of `len` elements.
///
/// # Safety
/// Every slot that the steps name points to `len` floats with step 1, or to [`SPLAT`] with step 0 (destinations: step 1).
#[inline]
unsafe fn steps(isa: Isa, steps: &[FusedStep], table: *const Lane, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() {
        for step in steps {
            // SAFETY: the instruction set was detected; the rest is the caller's promise.
            unsafe { lanes::avx512::step(step, table, len) };
        }
        return;
    } else if isa.has_avx2() {
        for step in steps {
            // SAFETY: as above.
            unsafe { lanes::avx2::step(step, table, len) };
        }
        return;
    }
    let _ = isa;
    for step in steps {
        // SAFETY: the caller's promise.
        unsafe { scalar::step(step, table, len) };
    }
}

/// A [`Fused`] with everything bound but the piece. Any thread may evaluate pieces.
#[derive(Clone, Copy)]
pub struct FusedPieces<'a> {
    fused: &'a Fused,
    isa: Isa,
    plan: &'a StepPlan,
    bind: Bind,
    /// As bits: the inputs that are the piece.
    piece_inputs: u32,
    /// As bits: the output that goes to the piece, if any.
    piece_outputs: u32,
}

impl FusedPieces<'_> {
    /// Evaluates several pieces: the one number `r` starts at the flat position `first + r * stride`.
    pub fn rows<'p>(&self, first: usize, stride: usize, pieces: impl Iterator<Item = &'p mut [f32]>) {
        let (layout, plan) = (&self.fused.layout, self.plan);
        let by_row = layout.walks.iter().any(|w| matches!(w, InputWalk::Row | InputWalk::Splat));
        let same_column = layout.dims.len() == 1 || stride.is_multiple_of(layout.inner());
        let fits = plan.first_output() + plan.n_outputs <= ROWS_SLOTS && plan.n_bufs <= ROWS_BUFS;
        if !by_row && same_column && fits {
            self.rows_at_column(first, stride, pieces);
        } else {
            for (r, piece) in pieces.enumerate() {
                self.piece(first + r * stride, piece);
            }
        }
    }

    /// Pieces below each other, where no input depends on the row: all but a few pointers is set up once.
    fn rows_at_column<'p>(&self, first: usize, stride: usize, pieces: impl Iterator<Item = &'p mut [f32]>) {
        let (layout, plan) = (&self.fused.layout, self.plan);
        let (n, inner) = (layout.len, layout.inner());
        let col = if layout.dims.len() == 1 { 0 } else { first % inner };
        let mut bufs = MaybeUninit::<Bufs<ROWS_BUFS>>::uninit();
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
            // SAFETY: a uniform input has one float; if it is the piece, its value is set below.
            let value = if self.piece_inputs >> k & 1 == 1 { 0.0 } else { unsafe { *self.bind.inputs[k] } };
            splats[k] = [value; SPLAT];
            table[k] = Lane { ptr: splats[k].as_mut_ptr(), step: 0 };
        }
        let block = if plan.steps.len() == 1 { usize::MAX } else { BLOCK };
        for (r, piece) in pieces.enumerate() {
            let at = first + r * stride;
            assert!(at <= n && piece.len() <= n - at, "piece {at}+{} of {n}", piece.len());
            assert!(layout.dims.len() == 1 || col + piece.len() <= inner, "a piece stays in its row");
            for done in (0..piece.len()).step_by(block.min(piece.len().max(1))) {
                let len = block.min(piece.len() - done);
                let here = piece.as_mut_ptr().wrapping_add(done);
                for (k, walk) in layout.walks.iter().enumerate() {
                    let input = self.bind.inputs[k];
                    match walk {
                        _ if self.piece_inputs >> k & 1 == 1 => table[k] = Lane { ptr: here, step: 1 },
                        InputWalk::Full => table[k].ptr = input.wrapping_add(at + done),
                        InputWalk::Cycle | InputWalk::Row | InputWalk::Splat => {
                            table[k].ptr = input.wrapping_add(col + done)
                        }
                        InputWalk::Uniform => {}
                    }
                }
                for j in 0..plan.n_outputs {
                    let whole = self.bind.outputs[j].wrapping_add(at + done);
                    let ptr = if self.piece_outputs >> j & 1 == 1 { here } else { whole };
                    table[plan.first_output() + j] = Lane { ptr, step: 1 };
                }
                // SAFETY: every slot that the steps use points to `len` floats, or to `SPLAT` with step 0: inputs and
                // outputs were checked when bound, and this piece is inside its row and inside the whole;
                // disjointness is the promise made to `Fused::pieces`.
                unsafe { steps(self.isa, &plan.steps, table.as_ptr(), len) };
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
