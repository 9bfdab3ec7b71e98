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
//! An operand that has to be converted to f32 is copied to a stage first, a sweep's rows or a panel at a time; what is made of it
//! is the same.
//!
//! The price is a larger error: it is bounded by the largest elements of the operands, not by those in a sum,
//! and an element that is not finite may reach all of C.

mod avx512;
mod sums;
mod tiles;

use std::marker::PhantomData;

use super::avx2::MR;
use super::block::{Ahead, NR};
use super::plan::{Operand, converted_rows, part};
use super::source::{Converted, OperandSource, OperandSources, Runs};
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
    /// Floats of one worker's rows, of tiles that wait, and of the stages of what is converted.
    pub(super) fn own_len(&self, converted: Converted) -> usize {
        let rows = if converted.a { 4 * QuarterStage::new(&self.p, self.mc, self.kc).len } else { 0 };
        let panel = if converted.b { 4 * QuarterStage::new(&self.q, NR, self.kc).len } else { 0 };
        self.stage_at() + rows.max(panel)
    }
    /// Where the stages begin in a worker's scratch.
    fn stage_at(&self) -> usize {
        7 * self.slot() + 3 * self.wait()
    }
    /// Whether the blocks of C are complete, one by one, when their tasks end: all of k is done in one round.
    pub(super) fn completes(&self) -> bool {
        self.round() == self.n_kb
    }
    /// Floats of a task's part of C, if that is stored separately: whole rows, of both halves.
    pub(super) fn block_len(&self) -> usize {
        2 * self.mc * 2 * self.cols
    }
    /// The two halves of a block of k.
    fn halves(&self, kb: usize) -> (usize, usize, usize) {
        let (l0, l1) = part(self.k, self.n_kb, kb);
        (2 * l0, l0 + l1, l1 - l0)
    }
}

/// How a quarter lies in its stage, after it has been converted.
struct QuarterStage {
    own: usize,
    k: usize,
    /// Floats of it.
    len: usize,
}

impl QuarterStage {
    fn new(operand: &Operand, n_own: usize, n_k: usize) -> QuarterStage {
        let Operand { own, k, .. } = converted_rows(operand, n_own, n_k);
        QuarterStage { own, k, len: if k == 1 { n_own * own } else { n_k * k } }
    }

    /// Converts a block of each quarter; `at` are their first elements.
    fn fill(
        &self,
        from: &OperandSource,
        operand: &Operand,
        at: [usize; 4],
        (n_own, n_k): (usize, usize),
        stages: &mut [f32],
    ) -> Quarters {
        let (outer, inner, stride) = match self.k {
            1 => ((n_own, operand.own), (n_k, operand.k), self.own),
            stride => ((n_k, operand.k), (n_own, operand.own), stride),
        };
        for (at, stage) in at.into_iter().zip(stages.chunks_exact_mut(self.len)) {
            from.copy_block(at, outer, inner, stage, stride);
        }
        let first = stages.as_ptr();
        Quarters { at: [0, 1, 2, 3].map(|i| first.wrapping_add(i * self.len)), own: self.own, k: self.k }
    }
}

/// A product with its pointers.
struct SevenProduct<'a> {
    cut: SevenCut,
    isa: Isa,
    from: OperandSources<'a>,
    /// Null if no block of C is kept after the epilogue: they are in the workers' scratch then.
    c: *mut f32,
    c_row: usize,
    accumulate: bool,
    epilogue: Option<Epilogue<'a>>,
    blocks: std::ops::Range<usize>,
    shared: *mut f32,
    /// The workers' scratch, `own_len` each: the cut's, and a task's part of C if C itself is not wanted.
    own: *mut f32,
    own_len: usize,
}

/// Where a sweep's part of C is written.
#[derive(Clone, Copy)]
struct SweepTarget {
    /// The first element of the sweep's rows, in the upper half and in the lower.
    halves: [*mut f32; 2],
    row: usize,
}

// SAFETY: tasks write disjoint parts of C and of the scratch, and only read the rest.
unsafe impl Sync for SevenProduct<'_> {}

/// Runs the product. `Gemm` has checked the slices, and the scratch begins on a line. `c` is null if C is not kept after the
/// epilogue, and all of k is done in one round.
pub(super) fn run(
    g: &Gemm,
    cut: SevenCut,
    cx: &Cx,
    from: OperandSources,
    c: *mut f32,
    epilogue: Option<Epilogue>,
    scratch: &mut [f32],
) {
    let own_len = cut.own_len(from.converted()) + if c.is_null() { cut.block_len() } else { 0 };
    assert!(scratch.len() >= cut.shared_len() + cx.par.workers() * own_len, "the scratch is whole");
    let (shared, own) = scratch.split_at_mut(cut.shared_len());
    let round = cut.round();
    for first in (0..cut.n_kb).step_by(round) {
        let job = SevenProduct {
            cut,
            isa: cx.isa,
            from,
            c,
            c_row: g.c.row,
            accumulate: g.accumulate,
            epilogue,
            blocks: first..(first + round).min(cut.n_kb),
            shared: shared.as_mut_ptr(),
            own: own.as_mut_ptr(),
            own_len,
        };
        // SAFETY: the ISA has AVX2; each panel is in one task, and each worker has one task at a time.
        cx.par.run(cut.n_panels().div_ceil(PANELS_A_TASK), &|task, worker| unsafe {
            let panel0 = task * PANELS_A_TASK;
            job.share_panels(panel0, (panel0 + PANELS_A_TASK).min(cut.n_panels()), worker);
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
    /// The CPU has AVX2, the panels are below `n_panels`, no other task copies or reads them now, or runs as `worker`.
    unsafe fn share_panels(&self, panel0: usize, panel1: usize, worker: usize) {
        let cut = &self.cut;
        let (own, k) = (cut.q.own, cut.q.k);
        for kb in self.blocks.clone() {
            let (l0, l1, kc) = cut.halves(kb);
            let quarters = |panel: usize| {
                let (s0, s1) = (panel * NR, panel * NR + cut.cols);
                [(l0, s0), (l0, s1), (l1, s0), (l1, s1)].map(|(l, s)| l * k + s * own)
            };
            let sums = if self.isa.has_avx512() { sums::avx512::panels } else { sums::panels };
            // SAFETY: quarters of B, which `Gemm` has checked, go to panels of the shared scratch.
            unsafe {
                if let Some(b) = self.from.b.in_place() {
                    let at = quarters(panel0).map(|at| b.as_ptr().add(at));
                    let cols = cut.cols.min(panel1 * NR) - panel0 * NR;
                    sums(&Quarters { at, own, k }, cols, kc, self.panels(kb, panel0));
                    continue;
                }
                let stage = QuarterStage::new(&cut.q, NR, cut.kc);
                for panel in panel0..panel1 {
                    let cols = cut.cols.min((panel + 1) * NR) - panel * NR;
                    let stages = self.stages(&stage, worker);
                    let from = stage.fill(&self.from.b, &cut.q, quarters(panel), (cols, kc), stages);
                    sums(&from, cols, kc, self.panels(kb, panel));
                }
            }
        }
    }

    /// A worker's stages.
    ///
    /// # Safety
    /// No other task runs as `worker` now, and nothing else has them.
    #[expect(clippy::mut_from_ref, reason = "the caller's promise")]
    unsafe fn stages(&self, stage: &QuarterStage, worker: usize) -> &mut [f32] {
        let at = self.own.wrapping_add(worker * self.own_len + self.cut.stage_at());
        // SAFETY: `own_len` has room for them, and the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(at, 4 * stage.len) }
    }

    /// Where rows `i0..` of both halves are in A, in a block of k.
    fn quarters(&self, kb: usize, i0: usize) -> [usize; 4] {
        let cut = &self.cut;
        let (l0, l1, _) = cut.halves(kb);
        let j0 = i0 + cut.rows;
        [(i0, l0), (i0, l1), (j0, l0), (j0, l1)].map(|(i, l)| i * cut.p.own + l * cut.p.k)
    }

    /// Rows `i0..i1` of both halves, in a block of k, as f32.
    ///
    /// # Safety
    /// No other task runs as `worker` now.
    unsafe fn rows_quarters(&self, kb: usize, (i0, i1): (usize, usize), worker: usize) -> Quarters {
        let cut = &self.cut;
        let (_, _, kc) = cut.halves(kb);
        let at = self.quarters(kb, i0);
        if let Some(a) = self.from.a.in_place() {
            let at = at.map(|at| a.as_ptr().wrapping_add(at));
            return Quarters { at, own: cut.p.own, k: cut.p.k };
        }
        let stage = QuarterStage::new(&cut.p, cut.mc, cut.kc);
        // SAFETY: the caller's promise; these are the only ones now.
        let stages = unsafe { self.stages(&stage, worker) };
        stage.fill(&self.from.a, &cut.p, at, (i1 - i0, kc), stages)
    }

    /// Where the rows of a sweep go.
    fn target(&self, i0: usize, worker: usize) -> SweepTarget {
        let cut = &self.cut;
        if self.c.is_null() {
            let row = 2 * cut.cols;
            let first = self.own.wrapping_add((worker + 1) * self.own_len - cut.block_len());
            return SweepTarget { halves: [first, first.wrapping_add(cut.mc * row)], row };
        }
        let row = self.c_row;
        SweepTarget { halves: [i0, i0 + cut.rows].map(|i| self.c.wrapping_add(i * row)), row }
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
        let (n, own, k) = (i1 - i0, cut.p.own, cut.p.k);
        self.quarters(kb, i0).map(|at| match k {
            1 => Ahead::of(&self.from.a, Runs { at, n, stride: own, len: kc }),
            _ => Ahead::of(&self.from.a, Runs { at, n: kc, stride: k, len: n }),
        })
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
            let rows = self.own.add(worker * self.own_len);
            let target = self.target(i0, worker);
            for kb in self.blocks.clone() {
                let (_, _, kc) = cut.halves(kb);
                let from = self.rows_quarters(kb, (i0, i1), worker);
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
                    self.seven(kb, panel, wide, i1 - i0, target, rows, &mut ahead);
                    panel += wide;
                }
            }
            if self.blocks.end == cut.n_kb {
                let (s0, s1) = (panel0 * NR, (panel1 * NR).min(cut.cols));
                for (row, at) in [i0, i0 + cut.rows].into_iter().zip(target.halves) {
                    let finish = |col0: usize, col1: usize| {
                        self.finish((row, i1 - i0), (col0, col1), at.wrapping_add(col0), target.row);
                    };
                    if s1 - s0 == cut.cols {
                        finish(0, 2 * cut.cols);
                    } else {
                        finish(s0, s1);
                        finish(cut.cols + s0, cut.cols + s1);
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
        n: usize,
        target: SweepTarget,
        own: *mut f32,
        ahead: &mut [Ahead; 6],
    ) {
        let cut = &self.cut;
        let (_, _, kc) = cut.halves(kb);
        let s0 = panel * NR;
        let panels = self.panels(kb, panel);
        // SAFETY: `n` rows and columns `s0..s0 + cols` of each quarter of C are this task's alone.
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
                let to = target.halves[quarter / 2].add(quarter % 2 * cut.cols + s0);
                let (cols, add) = (n_cols.min(cut.cols - s0), kb > 0 || self.accumulate);
                Some(SumTarget { to, row: target.row, cols, add, plus })
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

    /// Calls the epilogue on `rows` rows of C from `row` on, columns `col0..col1`, which are at `at`.
    ///
    /// # Safety
    /// They belong to this task alone.
    unsafe fn finish(
        &self,
        (row, rows): (usize, usize),
        (col0, col1): (usize, usize),
        at: *mut f32,
        stride: usize,
    ) {
        let Some(epilogue) = self.epilogue else { return };
        let (col, cols) = (col0, col1 - col0);
        (epilogue.call)(OutputBlock { batch: 0, row, col, rows, cols, at, stride, lent: PhantomData });
    }
}

#[cfg(test)]
mod tests;
