//! What the tasks of a product of pairs do. How it was cut into them is up to `plan`.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::plan::part;
use super::super::{Epilogue, LINE, OutputBlock, from_line};
use super::blocks::{UNIT, UNIT_LEN};
use super::plan::{PairPlan, Side};
use super::source::UnitSource;
use super::{AmxState, PairOrder, PairShape, amx, avx2, avx512, avx512_bf16};
use crate::{Cx, Feature, Isa};

/// Strips or panels that one task copies to a shared copy, of all of k.
const UNITS_A_TASK: usize = 4;
/// Those that one task copies of one block of k in a round. The operands of a gradient of weights are contiguous along them.
const UNITS_A_TASK_OF_ROUND: usize = 32;

/// Copied strips by copied panels, over one block of k.
pub(super) struct PackedBlock {
    /// Units of each strip and each panel: at least one.
    pub(super) runs: usize,
    /// Rows of C. The strips have rows of zeros behind the last of them, and C has room for their sums.
    pub(super) rows: usize,
    /// Panels.
    pub(super) panels: usize,
    /// The strips, each on a cache line, and elements (pairs) from one to the next.
    pub(super) a: *const u32,
    pub(super) a_next: usize,
    /// The same for the panels.
    pub(super) b: *const u32,
    pub(super) b_next: usize,
    /// The first element of C: whole strips by whole panels.
    pub(super) c: *mut f32,
    /// From one row of C to the next.
    pub(super) c_row: usize,
    /// Adds to C instead of overwriting it.
    pub(super) add: bool,
}

impl PackedBlock {
    /// Where the rows of A from `row` on, the panels from `panel` on, and their outputs start.
    pub(super) fn at(&self, row: usize, panel: usize) -> (*const u32, *const u32, *mut f32) {
        let a = self.a.wrapping_add(row / UNIT * self.a_next + row % UNIT * UNIT);
        let b = self.b.wrapping_add(panel * self.b_next);
        (a, b, self.c.wrapping_add(row * self.c_row + panel * UNIT))
    }
}

/// What multiplies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kernel {
    Amx,
    Avx512Bf16,
    Avx512,
    Avx2,
}

impl Kernel {
    /// The one for an order, if there are vectors.
    pub(super) fn of(isa: Isa, order: PairOrder) -> Option<Kernel> {
        match order {
            PairOrder::Pairs if isa.has(Feature::Avx512Bf16) => Some(Kernel::Avx512Bf16),
            _ if !isa.has_avx2() => None,
            _ if isa.has(Feature::AmxBf16) && amx::state() == AmxState::Ready => Some(Kernel::Amx),
            _ if isa.has_avx512() => Some(Kernel::Avx512),
            _ => Some(Kernel::Avx2),
        }
    }

    /// Multiplies a block.
    ///
    /// # Safety
    /// The CPU has its instructions; the pointers are as [`PackedBlock`] says, and nothing else accesses C.
    pub(super) unsafe fn multiply(self, block: &PackedBlock) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Kernel::Amx => amx::multiply(block),
                Kernel::Avx512Bf16 => avx512_bf16::multiply(block),
                Kernel::Avx512 => avx512::multiply(block),
                Kernel::Avx2 => avx2::multiply(block),
            }
        }
    }
}

/// A product with its pointers, ready to be run in tasks.
struct PairProduct<'a> {
    plan: PairPlan,
    isa: Isa,
    kernel: Kernel,
    m: usize,
    n: usize,
    a: &'a dyn UnitSource,
    b: &'a dyn UnitSource,
    epilogue: Epilogue<'a>,
    /// The shared copies, then the workers' scratch; from a cache line on.
    scratch: *mut f32,
}

// SAFETY: tasks write disjoint parts of the scratch, and only read the rest.
unsafe impl Sync for PairProduct<'_> {}

/// Runs a product. The ISA has AVX2 and what the kernel needs.
pub(super) fn run(
    shape: &PairShape,
    kernel: Kernel,
    cx: &Cx,
    a: &dyn UnitSource,
    b: &dyn UnitSource,
    epilogue: Epilogue,
    scratch: &mut [f32],
) {
    let plan = PairPlan::new(shape);
    let needed = plan.scratch_len(cx.par.workers()) - LINE;
    let scratch = from_line(scratch);
    assert!(scratch.len() >= needed, "room for every worker");
    let (isa, m, n, scratch) = (cx.isa, shape.m, shape.n, scratch.as_mut_ptr());
    let product = PairProduct { plan, isa, kernel, m, n, a, b, epilogue, scratch };
    let in_rounds = plan.n_rounds() > 1;
    let per_task = if in_rounds { UNITS_A_TASK_OF_ROUND } else { UNITS_A_TASK };
    let copies = |side: &Side| if side.shared { side.units.div_ceil(per_task) } else { 0 };
    let (of_a, of_b) = (copies(&plan.a), copies(&plan.b));
    for round in 0..plan.n_rounds() {
        let blocks = plan.round(round);
        let cuts = if in_rounds { blocks.len() } else { 1 };
        if of_a + of_b > 0 {
            cx.par.run(cuts * (of_a + of_b), &|task, _| {
                let (cut, task) = (task / (of_a + of_b), task % (of_a + of_b));
                let (of_b, task) = if task < of_a { (false, task) } else { (true, task - of_a) };
                let (kb0, kb1) = part(blocks.len(), cuts, cut);
                let blocks = blocks.start + kb0..blocks.start + kb1;
                // SAFETY: the ISA has AVX2; each strip and each panel of a block of k is in one task.
                unsafe { product.share(of_b, (task * per_task, (task + 1) * per_task), blocks) };
            });
        }
        let task = |task: usize, worker: usize| {
            // SAFETY: the ISA has the instructions, and the runner gives each task once, each worker one at a time.
            unsafe { product.task(task, worker, round) }
        };
        match plan.n_tasks() {
            1 => task(0, 0),
            n => cx.par.run(n, &task),
        }
    }
}

impl<'a> PairProduct<'a> {
    fn side(&self, of_b: bool) -> (&'a dyn UnitSource, &Side, usize) {
        if of_b { (self.b, &self.plan.b, self.plan.shared_lens().0) } else { (self.a, &self.plan.a, 0) }
    }

    /// Copies strips or panels `unit0..unit1`, as far as there are such, of some blocks of k to the shared copy.
    ///
    /// # Safety
    /// No other task copies or reads them now, `unit0` is below their number, and the blocks are of one round.
    unsafe fn share(&self, of_b: bool, (unit0, unit1): (usize, usize), blocks: Range<usize>) {
        let (operand, side, start) = self.side(of_b);
        let unit1 = unit1.min(side.units);
        for kb in blocks {
            let (run0, run1) = self.plan.block(kb);
            let at = start + self.plan.shared_at(side, kb, unit0);
            // SAFETY: inside the shared copy, and this task's alone.
            let target = unsafe { units(self.scratch.add(at), (unit1 - unit0) * (run1 - run0)) };
            operand.copy(self.isa, 0, (unit0, unit1), (run0, run1), target);
        }
    }

    /// Where units of a block of k are: in the shared copy, or at `own`, to where they are copied if `fresh`.
    ///
    /// # Safety
    /// `own` is inside the worker's scratch, with room for them if they are not shared.
    unsafe fn block(
        &self,
        of_b: bool,
        batch: usize,
        kb: usize,
        (unit0, unit1): (usize, usize),
        own: *mut f32,
        fresh: bool,
    ) -> *const u32 {
        let (operand, side, start) = self.side(of_b);
        if side.shared {
            return self.scratch.wrapping_add(start + self.plan.shared_at(side, kb, unit0)).cast();
        }
        if fresh {
            let (run0, run1) = self.plan.block(kb);
            // SAFETY: the caller's promise.
            let target = unsafe { units(own, (unit1 - unit0) * (run1 - run0)) };
            operand.copy(self.isa, batch, (unit0, unit1), (run0, run1), target);
        }
        own.cast()
    }

    /// Runs one task: a range of strips by a range of panels, of one product of the batch, over a round's part of k.
    ///
    /// # Safety
    /// The CPU has the instructions; `task` is below `n_tasks` and runs once a round, after the rounds before; no other task
    /// runs as `worker` now.
    unsafe fn task(&self, task: usize, worker: usize, round: usize) {
        let plan = &self.plan;
        let per_batch = plan.a.tasks * plan.b.tasks;
        let (batch, in_batch) = (task / per_batch, task % per_batch);
        let (strip0, strip1) = part(plan.a.units, plan.a.tasks, in_batch / plan.b.tasks);
        let (panel0, panel1) = part(plan.b.units, plan.b.tasks, in_batch % plan.b.tasks);
        let (row_sweeps, col_sweeps) = (plan.a.sweeps(strip1 - strip0), plan.b.sweeps(panel1 - panel0));
        // SAFETY: the scratch has `own_len` floats for each worker or task, behind the shared copies.
        let own_a = unsafe { self.scratch.add(plan.own_at(task, worker)) };
        let (b_at, c_at) = plan.own_lens();
        // SAFETY: as above.
        let (own_b, c) = unsafe { (own_a.add(b_at), own_a.add(c_at)) };
        for col_sweep in 0..col_sweeps {
            let (p0, p1) = part(panel1 - panel0, col_sweeps, col_sweep);
            let (p0, p1) = (panel0 + p0, panel0 + p1);
            for row_sweep in 0..row_sweeps {
                let (s0, s1) = part(strip1 - strip0, row_sweeps, row_sweep);
                let (s0, s1) = (strip0 + s0, strip0 + s1);
                let rows = self.m.min(s1 * UNIT) - s0 * UNIT;
                for kb in plan.round(round) {
                    let (run0, run1) = plan.block(kb);
                    // What was copied last is still there, if it is the same.
                    let new_a = plan.n_kb > 1 || row_sweeps > 1 || col_sweep == 0;
                    let new_b = plan.n_kb > 1 || row_sweep == 0;
                    // SAFETY: the worker's scratch has room for the largest blocks of both, and for C.
                    unsafe {
                        let a = self.block(false, batch, kb, (s0, s1), own_a, new_a);
                        let b = self.block(true, batch, kb, (p0, p1), own_b, new_b);
                        let (runs, panels, c_row) = (run1 - run0, p1 - p0, plan.c_row());
                        self.kernel.multiply(&PackedBlock {
                            runs,
                            rows,
                            panels,
                            a,
                            a_next: runs * UNIT_LEN,
                            b,
                            b_next: runs * UNIT_LEN,
                            c,
                            c_row,
                            add: kb > 0,
                        });
                    }
                }
                if round + 1 < plan.n_rounds() {
                    continue;
                }
                (self.epilogue.call)(OutputBlock {
                    batch,
                    row: s0 * UNIT,
                    col: p0 * UNIT,
                    rows,
                    cols: self.n.min(p1 * UNIT) - p0 * UNIT,
                    at: c,
                    stride: plan.c_row(),
                    lent: PhantomData,
                });
            }
        }
    }
}

/// Scratch as units.
///
/// # Safety
/// There is room for `n` of them, which nothing else accesses for as long as they are borrowed.
unsafe fn units<'a>(at: *mut f32, n: usize) -> &'a mut [[u32; UNIT_LEN]] {
    // SAFETY: the caller's promise; any bits are a u32, and a float has its size and alignment.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), n) }
}
