//! The evaluator of a [`Fused`]: a range of flat positions, block by block.

use std::mem::MaybeUninit;

use super::expr::Expr;
use super::formats::StagedBlock;
use super::fused::{Fused, SHORT_CYCLE};
#[cfg(target_arch = "x86_64")]
use super::lanes;
use super::layout::{InputWalk, RowCursor};
use super::plan::{FusedStep, StepPlan};
use super::scalar;
use crate::Isa;

/// Elements of a block: four buffers of it take a quarter of a 32 KB L1 cache.
pub(super) const BLOCK: usize = 512;
/// Room for a block, or for a block and a short row: a cycle of short rows is written out once and then read from
/// wherever in its row a block starts.
pub(super) const SPACE: usize = BLOCK + SHORT_CYCLE;
/// Copies that stand for a value that does not change: as many as the widest vector has lanes.
pub(super) const SPLAT: usize = 16;

/// Where a slot of the table points, and how far the next element is: 1, or 0 for [`SPLAT`] copies of one value.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub ptr: *mut f32,
    pub step: usize,
}

/// Base pointers of inputs and outputs; those of halves are cast before they are moved or read.
#[derive(Clone, Copy)]
pub(super) struct Bind {
    pub inputs: [*mut f32; Expr::INPUTS_MAX],
    pub outputs: [*mut f32; Expr::OUTPUTS_MAX],
}

// SAFETY: inputs are read only, and tasks write disjoint ranges of the outputs.
unsafe impl Send for Bind {}
// SAFETY: as above.
unsafe impl Sync for Bind {}

pub(super) const UNBOUND: Bind = Bind {
    inputs: [std::ptr::null_mut(); Expr::INPUTS_MAX],
    outputs: [std::ptr::null_mut(); Expr::OUTPUTS_MAX],
};

impl Fused {
    /// Evaluates the flat positions `start..end`.
    ///
    /// # Safety
    /// The bound pointers are valid for this layout's lengths, or at least for what `start..end` reads and writes.
    #[inline]
    pub(super) unsafe fn range(&self, isa: Isa, plan: &StepPlan, bind: &Bind, start: usize, end: usize) {
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
            let few_slots = plan.first_output() + plan.n_outputs <= ROWS_SLOTS;
            if self.formats.halves {
                if few_slots && plan.n_bufs + plan.n_inputs + plan.n_outputs <= ROWS_BUFS_HALVES {
                    self.range_in::<ROWS_SLOTS, ROWS_BUFS_HALVES, true>(isa, plan, bind, start, end, spans);
                } else {
                    self.range_in::<{ SLOTS_MAX }, { BUFS_MAX }, true>(isa, plan, bind, start, end, spans);
                }
            } else if few_slots && plan.n_bufs + fills <= ROWS_BUFS {
                self.range_in::<ROWS_SLOTS, ROWS_BUFS, false>(isa, plan, bind, start, end, spans);
            } else {
                self.range_in::<{ SLOTS_MAX }, { BUFS_MAX }, false>(isa, plan, bind, start, end, spans);
            }
        }
    }

    /// # Safety
    /// As `range`; the plan has at most `SLOTS` slots, and at most `BUFS` buffers together with its inputs and, where
    /// there are `HALVES`, its outputs.
    unsafe fn range_in<const SLOTS: usize, const BUFS: usize, const HALVES: bool>(
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
        let stage = StagedBlock::after(plan, bufs);
        if HALVES {
            // SAFETY: there is a buffer for each input and output.
            unsafe { stage.clear(&self.formats, plan, end - start) };
        }
        let layout = &self.layout;
        for (k, walk) in layout.walks.iter().enumerate() {
            // SAFETY: there is a splat for each input; a uniform input has one float.
            unsafe {
                match walk {
                    InputWalk::Uniform => *splats.add(k) = [self.value::<HALVES>(bind, k, 0); SPLAT],
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
        let block = if plan.steps.len() == 1 && !spans && !HALVES { usize::MAX } else { BLOCK };
        if spans {
            // SAFETY: there is a buffer for each input, with room for a block and a short row.
            unsafe { self.fill_cycles::<HALVES>(bind, stage, BLOCK.min(end - start) + inner) };
        }
        let mut at = start;
        while at < end {
            let len;
            if spans {
                len = block.min(end - at);
                // SAFETY: there is a fill buffer for each input, and the cycles were written.
                unsafe { self.fill::<HALVES>(isa, bind, table, stage, at, len, &mut cursor, &mut col) };
            } else {
                len = block.min(end - at).min(inner - col);
                for (k, walk) in layout.walks.iter().enumerate() {
                    // SAFETY: slots below `SLOTS`; the row's values exist.
                    unsafe {
                        let from = match walk {
                            InputWalk::Full => at,
                            InputWalk::Cycle | InputWalk::Row => cursor.offsets[k] + col,
                            InputWalk::Splat => {
                                *splats.add(k) = [self.value::<HALVES>(bind, k, cursor.offsets[k]); SPLAT];
                                continue;
                            }
                            InputWalk::Uniform => continue,
                        };
                        (*table.add(k)).ptr = self.block::<HALVES>(isa, bind, k, from, len, stage);
                    }
                }
                col += len;
                if col == inner && at + len < end {
                    col = 0;
                    cursor.advance(layout);
                }
            }
            for j in 0..plan.n_outputs {
                let ptr = if HALVES && self.formats.rounds(j) {
                    stage.output(j)
                } else {
                    bind.outputs[j].wrapping_add(at)
                };
                // SAFETY: output slots are below `SLOTS`.
                unsafe { *table.add(plan.first_output() + j) = Lane { ptr, step: 1 } };
            }
            // SAFETY: every slot that the steps use points to `len` floats, or to `SPLAT` with step 0.
            unsafe { steps(isa, &plan.steps, table, len) };
            if HALVES {
                // SAFETY: the steps have written the buffers of the outputs; the rest is the caller's promise.
                unsafe { self.formats.round(isa, plan, bind, at, len, stage) };
            }
            at += len;
        }
    }

    /// Value `at` of input `k`.
    ///
    /// # Safety
    /// The bound pointer is valid there.
    #[inline(always)]
    pub(super) unsafe fn value<const HALVES: bool>(&self, bind: &Bind, k: usize, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { if HALVES { self.formats.value(bind, k, at) } else { *bind.inputs[k].wrapping_add(at) } }
    }

    /// Where `from..from + len` of input `k` can be read as f32: in place, or in its buffer.
    ///
    /// # Safety
    /// If the input is in half, its pointer is valid there, and `len` is at most a block and has been cleared.
    #[inline(always)]
    pub(super) unsafe fn block<const HALVES: bool>(
        &self,
        isa: Isa,
        bind: &Bind,
        k: usize,
        from: usize,
        len: usize,
        stage: StagedBlock,
    ) -> *mut f32 {
        if HALVES && self.formats.widens(k) {
            // SAFETY: the caller's promise.
            unsafe { self.formats.widen(isa, bind, k, from, len, stage.input(k)) };
            return stage.input(k);
        }
        bind.inputs[k].wrapping_add(from)
    }

    /// Writes the first `len` values of each cycle of rows.
    ///
    /// # Safety
    /// As `range`; `stage` has `SPACE` floats for each input, and `len` is at most that.
    unsafe fn fill_cycles<const HALVES: bool>(&self, bind: &Bind, stage: StagedBlock, len: usize) {
        let inner = self.layout.inner();
        for (k, _) in self.layout.walks.iter().enumerate().filter(|(_, w)| **w == InputWalk::Cycle) {
            let to = stage.input(k);
            for i in 0..len {
                // SAFETY: the input has `inner` floats; later rounds copy what the first wrote.
                unsafe {
                    *to.add(i) = if i < inner { self.value::<HALVES>(bind, k, i) } else { *to.add(i - inner) }
                };
            }
        }
    }

    /// Points the input slots at the values for `at..at + len` where that range spans rows: broadcast inputs are
    /// copied, row by row. Moves the cursor past the range.
    ///
    /// # Safety
    /// As `range`; `stage` has a block for each input.
    unsafe fn fill<const HALVES: bool>(
        &self,
        isa: Isa,
        bind: &Bind,
        table: *mut Lane,
        stage: StagedBlock,
        at: usize,
        len: usize,
        cursor: &mut RowCursor,
        col: &mut usize,
    ) {
        let (layout, inner) = (&self.layout, self.layout.inner());
        for (k, walk) in layout.walks.iter().enumerate() {
            let ptr = match walk {
                // SAFETY: a block of the whole input.
                InputWalk::Full => unsafe { self.block::<HALVES>(isa, bind, k, at, len, stage) },
                InputWalk::Cycle => stage.input(k).wrapping_add(*col),
                InputWalk::Row | InputWalk::Splat => stage.input(k),
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
                let to = stage.input(k).wrapping_add(done);
                let row = cursor.offsets[k];
                // SAFETY: `done + run` is at most a block; the row has `inner` values, or one.
                unsafe {
                    match walk {
                        InputWalk::Row => {
                            for i in 0..run {
                                *to.add(i) = self.value::<HALVES>(bind, k, row + *col + i);
                            }
                        }
                        InputWalk::Splat => {
                            let v = self.value::<HALVES>(bind, k, row);
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
/// The most block buffers: one an instruction, one for each output that is an input, one for each broadcast or half
/// input, one for each half output.
const BUFS_MAX: usize = Expr::INSTRS_MAX + Expr::OUTPUTS_MAX * 2 + Expr::INPUTS_MAX;

/// What the usual short chain uses of them.
pub(super) const ROWS_SLOTS: usize = 24;
pub(super) const ROWS_BUFS: usize = 6;
/// The same with a buffer for each input and output, where any of them is in half.
pub(super) const ROWS_BUFS_HALVES: usize = 12;

#[repr(align(64))]
pub(super) struct Bufs<const N: usize>(
    #[allow(dead_code, reason = "used through a raw pointer")] [[f32; SPACE]; N],
);

/// Evaluates the steps over a block of `len` elements.
///
/// # Safety
/// Every slot that the steps name points to `len` floats with step 1, or to [`SPLAT`] with step 0 (destinations: step 1).
#[inline]
pub(super) unsafe fn steps(isa: Isa, steps: &[FusedStep], table: *const Lane, len: usize) {
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
