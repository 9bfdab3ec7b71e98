//! Large products by seven products of halves instead of eight: an eighth fewer multiplications.
//!
//! This is Winograd's form of Strassen's algorithm, one level of it. With each operand cut into halves along both dims,
//!
//! ```text
//! S1 = A21 + A22    T1 = B12 − B11    P1 = A11·B11    P5 = S1·T1    C11 = P1 + P2
//! S2 = S1 − A11     T2 = B22 − T1     P2 = A12·B21    P6 = S2·T2    U2  = P1 + P6    C21 = U3 − P4
//! S3 = A11 − A21    T3 = B22 − B12    P3 = S4·B22     P7 = S3·T3    U3  = U2 + P7    C22 = U3 + P5
//! S4 = A12 − S2     T4 = T2 − B21     P4 = A22·T4                   U4  = U2 + P5    C12 = U4 + P3
//! ```
//!
//! The sums of B are made as its panels are copied, those of A as a sweep's rows are (`sums`). No P is ever stored: a panel
//! meets a sweep's rows in the order P1, P2, P6, P7, P4, P5, P3, and each tile is added, straight from the registers, to what
//! earlier ones left (`tiles`). P1 and the U's wait in a few kilobytes of scratch; C is written once for
//! each block of k.
//!
//! k is cut into blocks first, and each block is cut into halves: the rows of a sweep are then short enough to stay in L2,
//! seven times. The cut follows from the shape alone, as in `plan`, and with it the order of every sum.
//!
//! The price is a larger error: it is bounded by the largest elements of the operands, not by those in a sum,
//! and an element that is not finite may reach all of C.

mod avx512;
mod sums;
mod tiles;

use std::marker::PhantomData;

use super::avx2::MR;
use super::block::{Ahead, NR};
use super::plan::{Operand, part};
use super::{Epilogue, Gemm, OutputBlock};
use crate::{Cx, Isa};
use sums::Quarters;
use tiles::SumTarget;

// The figures below were chosen on a Zen 3 core with the shapes of the `gpt` job: effective GFLOP/s go from 96 to 104 for
// 2048×384 by 384×1152, from 94 to 102 for 2048×1536 by 1536×384, from 92 to 96 for 1536×2048 by 2048×384.

/// The fewest rows, columns, and steps of k of a product for which this pays. Copies cost more here than in `plan`,
/// especially for short dims: 92 becomes 90 for 384×2048 by 2048×1536, and 87 becomes 77 for 384×2048 by 2048×384.
const ROWS_MIN: usize = 1024;
const COLS_MIN: usize = 256;
const K_MIN: usize = 256;
/// The longest half of a block of k. On Zen 3 256 does as well, 384 costs 1536×2048 by 2048×384 4 %, 512 costs it 8 %; with
/// AVX-512, where two panels at a time fill L1 sooner, 256 costs it about 5 % and 2048×1536 by 1536×384 1 %.
const HALF_MAX: usize = 192;
/// The most floats of one of the seven sums of a sweep's rows: together they take half of L2.
const SLOT_MAX: usize = 9984;
/// The most rows of a sweep, in each half: 24 and 72 are 1 to 3 % slower for 2048×384 by 384×1152; with AVX-512
/// and 2 MB of L2, 96 are 2 to 15 % slower.
const MC_MAX: usize = 48;
/// The fewest that a sweep is cut to for the sake of tasks, and what they are a multiple of: whole tiles of any height.
const MC_MIN: usize = 24;
const MC_STEP: usize = 12;
/// The number of tasks.
const TASKS: usize = 16;
/// Panels that one task copies.
const PANELS_A_TASK: usize = 4;
/// The last panels of a task, during which it prefetches the next rows.
const ASK_PANELS: usize = 4;
/// Floats of panels that are made at once: 4 MB.
const SHARED_MAX: usize = 1 << 20;

/// How a product is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct SevenCut {
    /// Rows and columns of a half of C, and half of k.
    rows: usize,
    cols: usize,
    k: usize,
    p: Operand,
    q: Operand,
    /// Blocks of k, and the longest half of one.
    n_kb: usize,
    kc: usize,
    /// Sweeps of rows, the rows of the longest, and parts of the panels: a task is one sweep over one part.
    sweeps: usize,
    mc: usize,
    col_tasks: usize,
}

impl SevenCut {
    /// The cut of a product for which this pays, and whose error may be larger.
    pub(super) fn new(g: &Gemm) -> Option<SevenCut> {
        let large = !g.strict && g.m >= ROWS_MIN && g.n >= COLS_MIN && g.k >= K_MIN;
        if large { SevenCut::of(g) } else { None }
    }

    /// The cut of a product that has halves, and rows that can be copied fast.
    fn of(g: &Gemm) -> Option<SevenCut> {
        let halves = [g.m, g.n, g.k].into_iter().all(|n| n > 0 && n.is_multiple_of(2));
        if g.batch != 1 || !halves || (g.a.col != 1 && g.a.row != 1) {
            return None;
        }
        let (rows, cols, k) = (g.m / 2, g.n / 2, g.k / 2);
        let n_kb = k.div_ceil(HALF_MAX);
        let kc = k.div_ceil(n_kb);
        // As many sweeps as tasks are wanted, if they are not too short: a part of the panels would copy the rows again.
        let enough = rows.div_ceil(TASKS).next_multiple_of(MC_STEP).max(MC_MIN);
        let mc = (SLOT_MAX / kc / MR * MR).clamp(MR, MC_MAX.min(enough)).min(rows);
        let sweeps = rows.div_ceil(mc);
        Some(SevenCut {
            rows,
            cols,
            k,
            p: Operand { batch: 0, own: g.a.row, k: g.a.col },
            q: Operand { batch: 0, own: g.b.col, k: g.b.row },
            n_kb,
            kc,
            sweeps,
            mc,
            col_tasks: TASKS.div_ceil(sweeps).min(cols.div_ceil(NR)),
        })
    }

    fn n_panels(&self) -> usize {
        self.cols.div_ceil(NR)
    }
    /// Blocks of k of one round.
    fn round(&self) -> usize {
        (SHARED_MAX / (7 * self.kc * self.n_panels() * NR)).clamp(1, self.n_kb)
    }
    /// Floats of the panels of one round.
    pub(super) fn shared_len(&self) -> usize {
        self.round() * 7 * self.kc * self.n_panels() * NR
    }
    /// Floats of one of the seven, with eight to spare.
    fn slot(&self) -> usize {
        (self.mc * self.kc + 8).next_multiple_of(NR)
    }
    /// Floats of tiles that wait, one of the three: of as many panels as any instruction set takes at once.
    fn wait(&self) -> usize {
        2 * self.mc * NR
    }
    /// Floats of one worker's rows, and of tiles that wait.
    pub(super) fn own_len(&self) -> usize {
        7 * self.slot() + 3 * self.wait()
    }
    /// The two halves of a block of k.
    fn halves(&self, kb: usize) -> (usize, usize, usize) {
        let (l0, l1) = part(self.k, self.n_kb, kb);
        (2 * l0, l0 + l1, l1 - l0)
    }
}

/// A product with its pointers.
struct SevenProduct<'a> {
    cut: SevenCut,
    isa: Isa,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    c_row: usize,
    accumulate: bool,
    epilogue: Option<Epilogue<'a>>,
    blocks: std::ops::Range<usize>,
    shared: *mut f32,
    own: *mut f32,
}

// SAFETY: tasks write disjoint parts of C and of the scratch, and only read the rest.
unsafe impl Sync for SevenProduct<'_> {}

/// Runs the product. `Gemm::run` has checked the slices, and the scratch begins on a line.
pub(super) fn run(
    g: &Gemm,
    cut: SevenCut,
    cx: &Cx,
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    epilogue: Option<Epilogue>,
    scratch: &mut [f32],
) {
    assert!(scratch.len() >= cut.shared_len() + cx.par.workers() * cut.own_len(), "the scratch is whole");
    let (shared, own) = scratch.split_at_mut(cut.shared_len());
    let round = cut.round();
    for first in (0..cut.n_kb).step_by(round) {
        let job = SevenProduct {
            cut,
            isa: cx.isa,
            a: a.as_ptr(),
            b: b.as_ptr(),
            c: c.as_mut_ptr(),
            c_row: g.c.row,
            accumulate: g.accumulate,
            epilogue,
            blocks: first..(first + round).min(cut.n_kb),
            shared: shared.as_mut_ptr(),
            own: own.as_mut_ptr(),
        };
        // SAFETY: the ISA has AVX2; each panel is in one task.
        cx.par.run(cut.n_panels().div_ceil(PANELS_A_TASK), &|task, _| unsafe {
            let panel0 = task * PANELS_A_TASK;
            job.share_panels(panel0, (panel0 + PANELS_A_TASK).min(cut.n_panels()));
        });
        // SAFETY: the ISA has AVX2; the runner gives each task once, and each worker one at a time.
        cx.par.run(cut.sweeps * cut.col_tasks, &|task, worker| unsafe { job.task(task, worker) });
    }
}

impl SevenProduct<'_> {
    /// The seven panels of one panel and block of k: one after the other, as they are read.
    fn panels(&self, kb: usize, panel: usize) -> *mut f32 {
        let cut = &self.cut;
        let (_, _, kc) = cut.halves(kb);
        self.shared.wrapping_add(((kb - self.blocks.start) * cut.n_panels() * cut.kc + panel * kc) * 7 * NR)
    }

    /// Copies panels of every block of k of this round.
    ///
    /// # Safety
    /// The CPU has AVX2, the panels are below `n_panels`, no other task copies or reads them now.
    unsafe fn share_panels(&self, panel0: usize, panel1: usize) {
        let cut = &self.cut;
        let (own, k) = (cut.q.own, cut.q.k);
        for kb in self.blocks.clone() {
            let (l0, l1, kc) = cut.halves(kb);
            let (s0, s1) = (panel0 * NR, panel0 * NR + cut.cols);
            let at =
                [(l0, s0), (l0, s1), (l1, s0), (l1, s1)].map(|(l, s)| self.b.wrapping_add(l * k + s * own));
            let cols = cut.cols.min(panel1 * NR) - s0;
            // SAFETY: quarters of B, which `Gemm::run` has checked, go to panels of the shared scratch.
            unsafe {
                let (from, to) = (Quarters { at, own, k }, self.panels(kb, panel0));
                if self.isa.has_avx512() {
                    sums::avx512::panels(&from, cols, kc, to);
                } else {
                    sums::panels(&from, cols, kc, to);
                }
            }
        }
    }

    /// Rows `i0..` of both halves, in a block of k.
    fn quarters(&self, kb: usize, i0: usize) -> Quarters {
        let cut = &self.cut;
        let (own, k) = (cut.p.own, cut.p.k);
        let (l0, l1, _) = cut.halves(kb);
        let j0 = i0 + cut.rows;
        let at = [(i0, l0), (i0, l1), (j0, l0), (j0, l1)].map(|(i, l)| self.a.wrapping_add(i * own + l * k));
        Quarters { at, own, k }
    }

    /// The rows of a task.
    fn rows(&self, task: usize) -> (usize, usize) {
        let i0 = task / self.cut.col_tasks * self.cut.mc;
        (i0, (i0 + self.cut.mc).min(self.cut.rows))
    }

    /// The rows that this task, or the next one, copies after this block of k.
    fn later(&self, task: usize, kb: usize) -> [Ahead; 4] {
        let cut = &self.cut;
        let (task, kb) =
            if kb + 1 < self.blocks.end { (task, kb + 1) } else { (task + 1, self.blocks.start) };
        if task >= cut.sweeps * cut.col_tasks {
            return [Ahead::NONE; 4];
        }
        let (i0, i1) = self.rows(task);
        let (_, _, kc) = cut.halves(kb);
        let Quarters { at, own, k } = self.quarters(kb, i0);
        at.map(|at| if k == 1 { Ahead::new(at, own, i1 - i0, kc) } else { Ahead::new(at, k, kc, i1 - i0) })
    }

    /// Runs one task: a sweep of rows of both halves by a range of panels of both halves.
    ///
    /// # Safety
    /// The CPU has AVX2; `task` is below their number and runs once; no other task runs as `worker` now.
    unsafe fn task(&self, task: usize, worker: usize) {
        let cut = &self.cut;
        let (i0, i1) = self.rows(task);
        let (panel0, panel1) = part(cut.n_panels(), cut.col_tasks, task % cut.col_tasks);
        // SAFETY: all offsets below are of elements that `run` has checked to be inside the slices; the scratch
        // has `own_len` floats for each worker.
        unsafe {
            let rows = self.own.add(worker * cut.own_len());
            for kb in self.blocks.clone() {
                let (_, _, kc) = cut.halves(kb);
                let from = self.quarters(kb, i0);
                if self.isa.has_avx512() {
                    sums::avx512::strips(&from, i1 - i0, kc, rows, cut.slot());
                } else {
                    sums::strips(&from, i1 - i0, kc, rows, cut.slot());
                }
                let mut ahead = [Ahead::NONE; 6];
                let most = if self.isa.has_avx512() { 2 } else { 1 };
                // Late enough to be still in cache when it is needed.
                let first_ask = panel0 + (panel1 - panel0).saturating_sub(ASK_PANELS) / most * most;
                let mut panel = panel0;
                while panel < panel1 {
                    let wide = most.min((cut.cols / NR).min(panel1).saturating_sub(panel)).max(1);
                    if panel == first_ask {
                        ahead[2..].copy_from_slice(&self.later(task, kb));
                    }
                    self.seven(kb, panel, wide, i0, i1, rows, &mut ahead);
                    panel += wide;
                }
            }
            if self.blocks.end == cut.n_kb {
                let (s0, s1) = (panel0 * NR, (panel1 * NR).min(cut.cols));
                for row in [0, cut.rows] {
                    if s1 - s0 == cut.cols {
                        self.finish(row + i0, row + i1, 0, 2 * cut.cols);
                    } else {
                        self.finish(row + i0, row + i1, s0, s1);
                        self.finish(row + i0, row + i1, cut.cols + s0, cut.cols + s1);
                    }
                }
            }
        }
    }

    /// The seven products of one panel, or of two whole ones, with a sweep's rows.
    ///
    /// # Safety
    /// As for `task`; `own` has the rows of the sweep and of this block of k.
    unsafe fn seven(
        &self,
        kb: usize,
        panel: usize,
        wide: usize,
        i0: usize,
        i1: usize,
        own: *mut f32,
        ahead: &mut [Ahead; 6],
    ) {
        let cut = &self.cut;
        let (_, _, kc) = cut.halves(kb);
        let s0 = panel * NR;
        let n = i1 - i0;
        let panels = self.panels(kb, panel);
        // SAFETY: rows `i0..i1` and columns `s0..s0 + cols` of each quarter of C are this task's alone.
        unsafe {
            // What waits: P1 and then U4, U2, U3.
            let x = own.add(7 * cut.slot());
            let (y, z) = (x.add(cut.wait()), x.add(2 * cut.wait()));
            let nothing = std::ptr::null();
            let n_cols = wide * NR;
            let keep = |to: *mut f32, plus: *const f32| {
                Some(SumTarget { to, row: n_cols, cols: n_cols, add: false, plus })
            };
            let done = |quarter: usize, plus: *const f32| {
                let (row, col) = (quarter / 2 * cut.rows + i0, quarter % 2 * cut.cols + s0);
                let to = self.c.add(row * self.c_row + col);
                let (cols, add) = (n_cols.min(cut.cols - s0), kb > 0 || self.accumulate);
                Some(SumTarget { to, row: self.c_row, cols, add, plus })
            };
            let ends = [
                [keep(x, nothing), None],
                [done(0, x), None],
                [keep(y, x), None],
                [keep(z, y), None],
                [done(2, z), None],
                [done(3, z), keep(x, y)],
                [done(1, x), None],
            ];
            for (product, ends) in ends.into_iter().enumerate() {
                let q = panels.add(product * kc * NR);
                let rows = own.add(product * cut.slot());
                // The next panel comes after this one.
                for (i, next) in ahead[..wide].iter_mut().enumerate() {
                    *next = Ahead::new(q.wrapping_add((7 * i + 1) * kc * NR), NR, kc, NR);
                }
                if self.isa.has_avx512() {
                    avx512::product(n, kc, rows, q, wide, ahead, ends);
                } else {
                    tiles::product(n, kc, rows, q, ahead, ends);
                }
            }
        }
    }

    /// Calls the epilogue on rows `row0..row1`, columns `col0..col1` of C.
    ///
    /// # Safety
    /// They are inside C, and belong to this task alone.
    unsafe fn finish(&self, row0: usize, row1: usize, col0: usize, col1: usize) {
        let Some(epilogue) = self.epilogue else { return };
        // SAFETY: this part of C is this task's alone, and inside C.
        let at = unsafe { self.c.add(row0 * self.c_row + col0) };
        let (rows, cols, stride) = (row1 - row0, col1 - col0, self.c_row);
        (epilogue.call)(OutputBlock {
            batch: 0,
            row: row0,
            col: col0,
            rows,
            cols,
            at,
            stride,
            lent: PhantomData,
        });
    }
}

#[cfg(test)]
mod tests;
