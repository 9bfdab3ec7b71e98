//! What one task does: the loops around the tiles. How the product was cut into tasks is up to `plan`.

use std::marker::PhantomData;
use std::ops::Range;

use super::plan::{GemmPlan, Panels, RowCopies, part};
use super::source::{OperandSource, OperandSources, Runs};
use super::{Epilogue, OutputBlock, avx2, avx512, pack};
use crate::Isa;

/// Columns of a panel.
pub(super) const NR: usize = 16;
/// Panels of C after which the epilogue runs. Few would leave C in L2, but push the rows out of it: for 2048×384 by
/// 384×1536 with bias and GELU, 4 panels cost 4.7 ms beside the product, 16 cost 3.8 and 96 cost 3.3.
const EPILOGUE_PANELS: usize = 96;

/// One tile: `rows × k` by `k × cols`, where the rows are known to the kernel.
pub(super) struct Tile {
    /// Steps of k.
    pub(super) k: usize,
    /// The rows' operand. Contiguous along one dim, `p_stride` along the other.
    pub(super) p: *const f32,
    pub(super) p_stride: usize,
    /// The columns' operand: `k` rows of 8 or 16 contiguous floats; `q_next` floats on, if the tile has more than 16
    /// columns, as many of the panel behind it.
    pub(super) q: *const f32,
    pub(super) q_stride: usize,
    pub(super) q_next: usize,
    /// Where the columns' operand is copied to, in rows of 16, by the kernels that copy: panel after panel.
    pub(super) copy: *mut f32,
    /// The lines to prefetch in the meantime, for later.
    pub(super) ahead: PrefetchLines,
    /// The first element of C; rows are `c_row` apart. Transposed: the tile's rows are C's columns.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// How many of the tile's columns C has.
    pub(super) cols: usize,
    /// Adds to C.
    pub(super) add: bool,
    /// Stores the transpose.
    pub(super) transposed: bool,
}

/// Computes one tile. The caller promises what [`Tile`] says about its pointers, and that the CPU has the instructions.
pub(super) type TileFn = unsafe fn(&Tile);

/// The tiles of an instruction set.
pub(super) struct Tiles {
    /// Rows of a full tile.
    pub(super) rows: usize,
    /// Whole panels that a tile takes at once.
    panels: usize,
    /// Steps of k between two lines that a tile prefetches, and whether it goes on with [`PrefetchLines::next`].
    ahead_steps: usize,
    ahead_turns: bool,
    /// The kernel for `(rows, cols, along_k, copy)`.
    kernel: fn(usize, usize, bool, bool) -> TileFn,
    /// Copies rows in strips, as [`Tiles::next_rows`] cuts them: [`pack::strips`] or its twin.
    strips: unsafe fn(*const f32, usize, usize, usize, usize, *mut f32),
}

static AVX2: Tiles = Tiles {
    rows: avx2::MR,
    panels: 1,
    ahead_steps: 4,
    ahead_turns: false,
    kernel: avx2::tile_fn,
    strips: pack::strips,
};
static AVX512: Tiles = Tiles {
    rows: avx512::MR,
    panels: 2,
    ahead_steps: 1,
    ahead_turns: true,
    kernel: avx512::tile_fn,
    strips: pack::avx512::strips,
};

impl Tiles {
    /// The tiles of an instruction set with at least AVX2.
    pub(super) fn of(isa: Isa) -> &'static Tiles {
        if isa.has_avx512() { &AVX512 } else { &AVX2 }
    }

    /// How many rows the next tile takes of the `left` ones, which are divided as evenly as can be: a short tile loads whole
    /// panels for few sums. Of 64 rows five tiles of 12 and one of 4 were made, and are four of 11 and two of 10 now.
    pub(super) fn next_rows(&self, left: usize) -> usize {
        next_rows(left, self.rows)
    }
}

/// [`Tiles::next_rows`] for tiles of at most `most` rows.
pub(super) fn next_rows(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most).max(1))
}

/// A product with its pointers, ready to be run in tasks.
pub(super) struct BlockProduct<'a> {
    pub(super) plan: GemmPlan,
    pub(super) tiles: &'static Tiles,
    pub(super) from: OperandSources<'a>,
    /// Null if no block of C is kept after the epilogue: they are in the workers' scratch then.
    pub(super) c: *mut f32,
    pub(super) c_batch: usize,
    pub(super) c_row: usize,
    pub(super) accumulate: bool,
    pub(super) epilogue: Option<Epilogue<'a>>,
    /// The blocks of k of this round.
    pub(super) blocks: std::ops::Range<usize>,
    /// The shared panels of this round: per block of k, per panel.
    pub(super) shared: *mut f32,
    /// The workers' scratch, `own_len` each: `plan.own_len()`, and a task's part of C if C itself is not wanted.
    pub(super) own: *mut f32,
    pub(super) own_len: usize,
}

/// Where a task's part of one C is written.
#[derive(Clone, Copy)]
struct OutputTarget {
    /// The first element of C, or where it would be if all of C were there.
    c: *mut f32,
    row: usize,
}

// SAFETY: tasks write disjoint parts of C and of the scratch, and only read the rest.
unsafe impl Sync for BlockProduct<'_> {}

impl<'a> BlockProduct<'a> {
    fn p(&self) -> &OperandSource<'a> {
        if self.plan.swap { &self.from.b } else { &self.from.a }
    }
    fn q(&self) -> &OperandSource<'a> {
        if self.plan.swap { &self.from.a } else { &self.from.b }
    }

    /// Where a panel is in the shared scratch.
    fn shared_panel(&self, kb: usize, panel: usize) -> *mut f32 {
        let plan = &self.plan;
        let (first, _) = part(plan.k, plan.n_kb, self.blocks.start);
        let (l0, l1) = part(plan.k, plan.n_kb, kb);
        self.shared.wrapping_add(((l0 - first) * plan.n_panels() + panel * (l1 - l0)) * NR)
    }

    /// Copies panels of every block of k of this round to the shared scratch.
    ///
    /// # Safety
    /// The CPU has AVX2, the panels are below `n_panels`, no other task copies or reads them now.
    pub(super) unsafe fn share_panels(&self, panel0: usize, panel1: usize) {
        let plan = &self.plan;
        for kb in self.blocks.clone() {
            let (l0, l1) = part(plan.k, plan.n_kb, kb);
            // SAFETY: inside the shared scratch, as `run` has checked, where panels lie one after the other.
            unsafe { self.copy_panels(0, (panel0, panel1), (l0, l1), self.shared_panel(kb, panel0)) };
        }
    }

    /// Copies panels of one product and block of k, panel after panel; the last may not be whole.
    ///
    /// # Safety
    /// The CPU has AVX2, the panels are below `n_panels`, `target` has room for them.
    unsafe fn copy_panels(
        &self,
        batch: usize,
        (panel0, panel1): (usize, usize),
        (l0, l1): (usize, usize),
        target: *mut f32,
    ) {
        let plan = &self.plan;
        let (kc, at) = (l1 - l0, batch * plan.q.batch + panel0 * NR * plan.q.own + l0 * plan.q.k);
        // SAFETY: inside Q, as `run` has checked, and inside the target.
        unsafe {
            let Some(q) = self.q().in_place() else {
                let cols = plan.cols.min(panel1 * NR) - panel0 * NR;
                let target = std::slice::from_raw_parts_mut(target, (panel1 - panel0) * kc * NR);
                return pack::converted(self.q(), at, plan.q.own, plan.q.k, cols, kc, target);
            };
            let source = q.as_ptr().add(at);
            if plan.q.own == 1 {
                return self.pack_wide(source, panel0, panel1, kc, target);
            }
            for panel in panel0..panel1 {
                let cols = NR.min(plan.cols - panel * NR);
                let source = source.add((panel - panel0) * NR * plan.q.own);
                let target = target.add((panel - panel0) * kc * NR);
                pack::panel(source, plan.q.own, plan.q.k, cols, kc, target);
            }
        }
    }

    /// Copies panels of an operand that is contiguous along the columns; the last may not be whole.
    ///
    /// # Safety
    /// The CPU has AVX2, `source` is the first element of `panel0`, `target` has room for the panels.
    unsafe fn pack_wide(
        &self,
        source: *const f32,
        panel0: usize,
        panel1: usize,
        kc: usize,
        target: *mut f32,
    ) {
        let plan = &self.plan;
        let whole = (plan.cols / NR).min(panel1) - panel0;
        // SAFETY: the caller's promise; the panel that is not whole has `cols` columns.
        unsafe {
            pack::panels(source, plan.q.k, whole, kc, target);
            if panel0 + whole < panel1 {
                let cols = plan.cols - (panel0 + whole) * NR;
                pack::panel(
                    source.add(whole * NR),
                    plan.q.own,
                    plan.q.k,
                    cols,
                    kc,
                    target.add(whole * kc * NR),
                );
            }
        }
    }

    /// Runs one task: a block of rows by a range of panels, of one product of the batch.
    ///
    /// # Safety
    /// The CPU has AVX2; `task` is below `n_tasks` and runs once; no other task runs as `worker` now.
    pub(super) unsafe fn task(&self, task: usize, worker: usize) {
        let plan = &self.plan;
        let per_batch = plan.row_tasks * plan.col_tasks;
        let (batch, in_batch) = (task / per_batch, task % per_batch);
        let (r0, r1) = part(plan.rows, plan.row_tasks, in_batch / plan.col_tasks);
        let (panel0, panel1) = part(plan.n_panels(), plan.col_tasks, in_batch % plan.col_tasks);
        let n_sweeps = (r1 - r0).div_ceil(plan.mc_max);
        // SAFETY: all offsets below are of elements that `run` has checked to be inside the slices; the scratch
        // has `own_len` floats for each worker.
        unsafe {
            let own_panels = self.own.add(worker * self.own_len);
            let own_rows = own_panels.add(plan.own_panels_len());
            let target = self.target(batch, r0, panel0, own_panels.wrapping_add(plan.own_len()));
            for kb in self.blocks.clone() {
                let (l0, l1) = part(plan.k, plan.n_kb, kb);
                let kc = l1 - l0;
                if plan.panels == Panels::OwnWide {
                    self.copy_panels(batch, (panel0, panel1), (l0, l1), own_panels);
                }
                for sweep in 0..n_sweeps {
                    let (i0, i1) = part(r1 - r0, n_sweeps, sweep);
                    let (i0, i1) = (r0 + i0, r0 + i1);
                    let p = self.rows(batch, (i0, i1), (l0, l1), own_rows);
                    let [mut later_rows, mut later_panels] = self.later(task, kb, sweep);
                    let mut done = panel0;
                    let mut panel = panel0;
                    while panel < panel1 {
                        let s0 = panel * NR;
                        let whole = (plan.cols / NR).min(panel1).saturating_sub(panel);
                        let wide = self.tiles.panels.min(whole.max(1));
                        let cols = (wide * NR).min(plan.cols - s0);
                        let copy = own_panels.add((panel - panel0) * kc * NR);
                        let source = match self.q().in_place() {
                            Some(q) => q.as_ptr().add(batch * plan.q.batch + s0 * plan.q.own + l0 * plan.q.k),
                            None => copy.cast_const(),
                        };
                        let mut t = Tile {
                            k: kc,
                            p,
                            p_stride: 0,
                            q: source,
                            q_stride: NR,
                            q_next: kc * NR,
                            copy,
                            ahead: PrefetchLines::none(source),
                            c: target.c,
                            c_row: target.row,
                            cols,
                            add: self.accumulate || kb > 0,
                            transposed: plan.swap,
                        };
                        let mut copy = false;
                        let mut next_panel = Ahead::NONE;
                        match plan.panels {
                            Panels::Shared => {
                                t.q = self.shared_panel(kb, panel);
                                let next = wide.min(panel1 - panel - wide);
                                next_panel = Ahead::new(t.q.wrapping_add(wide * kc * NR), NR, next * kc, NR);
                            }
                            Panels::InPlace if whole > 0 => {
                                t.q_stride = plan.q.k;
                                t.q_next = NR;
                            }
                            Panels::InPlace => {
                                t.copy = own_panels;
                                pack::panel(source, plan.q.own, plan.q.k, cols, kc, t.copy);
                                t.q = t.copy;
                            }
                            Panels::OwnWide => t.q = t.copy,
                            _ if sweep > 0 => t.q = t.copy,
                            Panels::OnTheWay if whole > 0 => {
                                copy = true;
                                t.q_stride = plan.q.k;
                                t.q_next = NR;
                            }
                            _ => {
                                self.copy_panels(batch, (panel, panel + wide), (l0, l1), t.copy);
                                t.q = t.copy;
                            }
                        }
                        let [mut b0, mut b1, mut b2] = match self.epilogue {
                            Some(_) => self.beside(batch, kb, i0..i1, s0, cols),
                            None if self.c.is_null() => [Ahead::NONE; 3],
                            None => {
                                [self.laid_out_as_c(target.c, i0..i1, s0, cols), Ahead::NONE, Ahead::NONE]
                            }
                        };
                        self.strips(
                            &mut t,
                            i0,
                            i1,
                            s0,
                            copy,
                            [&mut b0, &mut b1, &mut b2, &mut next_panel, &mut later_rows, &mut later_panels],
                        );
                        if kb + 1 == plan.n_kb {
                            let rest = panel1 - panel - wide;
                            if plan.swap {
                                self.finish(target, batch, s0, s0 + cols, i0, i1);
                            } else if rest == 0
                                || (panel + wide - done >= EPILOGUE_PANELS && rest >= EPILOGUE_PANELS / 2)
                            {
                                self.finish(target, batch, i0, i1, done * NR, s0 + cols);
                                done = panel + wide;
                            }
                        }
                        panel += wide;
                    }
                }
            }
        }
    }

    /// Where tiles read the rows of a sweep: in place, or in `own`, to where they are copied.
    ///
    /// # Safety
    /// As for `task`; `own` has room for the rows, if they are copied.
    unsafe fn rows(
        &self,
        batch: usize,
        (i0, i1): (usize, usize),
        (l0, l1): (usize, usize),
        own: *mut f32,
    ) -> *const f32 {
        let plan = &self.plan;
        let (n, kc) = (i1 - i0, l1 - l0);
        let at = batch * plan.p.batch + i0 * plan.p.own + l0 * plan.p.k;
        // SAFETY: inside P, as `run` has checked, and inside the copy.
        unsafe {
            let Some(p) = self.p().in_place() else {
                let (outer, inner, stride) = match plan.p_read.k {
                    1 => ((n, plan.p.own), (kc, plan.p.k), plan.p_read.own),
                    stride => ((kc, plan.p.k), (n, plan.p.own), stride),
                };
                let to = std::slice::from_raw_parts_mut(own, outer.0 * stride);
                self.p().copy_block(at, outer, inner, to, stride);
                return own;
            };
            let p = p.as_ptr().add(at);
            if plan.copied_rows == RowCopies::Strips {
                (self.tiles.strips)(p, plan.p.own, plan.p.k, n, kc, own);
                return own;
            }
            p
        }
    }

    /// What this task, or the next one, reads after this sweep: its rows, and its panels if they are its own.
    fn later(&self, task: usize, kb: usize, sweep: usize) -> [Ahead; 2] {
        let plan = &self.plan;
        let per_batch = plan.row_tasks * plan.col_tasks;
        let n_sweeps = |task: usize| {
            let (r0, r1) = part(plan.rows, plan.row_tasks, task % per_batch / plan.col_tasks);
            (r1 - r0).div_ceil(plan.mc_max)
        };
        let (task, kb, sweep) = if sweep + 1 < n_sweeps(task) {
            (task, kb, sweep + 1)
        } else if kb + 1 < self.blocks.end {
            (task, kb + 1, 0)
        } else if task + 1 < plan.n_tasks() {
            (task + 1, self.blocks.start, 0)
        } else {
            return [Ahead::NONE, Ahead::NONE];
        };
        let (batch, in_batch) = (task / per_batch, task % per_batch);
        let (l0, l1) = part(plan.k, plan.n_kb, kb);
        let (r0, r1) = part(plan.rows, plan.row_tasks, in_batch / plan.col_tasks);
        let (i0, i1) = part(r1 - r0, n_sweeps(task), sweep);
        let at = batch * plan.p.batch + (r0 + i0) * plan.p.own + l0 * plan.p.k;
        let rows = if plan.p.own == 1 {
            Ahead::of(self.p(), Runs { at, n: l1 - l0, stride: plan.p.k, len: i1 - i0 })
        } else if plan.p.k == 1 && l1 - l0 >= SHORT_ROW {
            Ahead::of(self.p(), Runs { at, n: i1 - i0, stride: plan.p.own, len: l1 - l0 })
        } else {
            Ahead::NONE
        };
        let own = matches!(plan.panels, Panels::OnTheWay | Panels::OwnWide) && sweep == 0;
        if !own {
            return [rows, Ahead::NONE];
        }
        let (panel0, panel1) = part(plan.n_panels(), plan.col_tasks, in_batch % plan.col_tasks);
        let at = batch * plan.q.batch + panel0 * NR + l0 * plan.q.k;
        let len = (panel1 - panel0) * NR;
        [rows, Ahead::of(self.q(), Runs { at, n: l1 - l0, stride: plan.q.k, len })]
    }

    /// What the epilogue accesses beside the tiles of these rows and columns.
    fn beside(&self, batch: usize, kb: usize, rows: Range<usize>, col: usize, cols: usize) -> [Ahead; 3] {
        let Some(epilogue) = self.epilogue.filter(|_| kb + 1 == self.plan.n_kb) else {
            return [Ahead::NONE; 3];
        };
        epilogue.beside.map(|at| {
            if at.is_null() {
                return Ahead::NONE;
            }
            self.laid_out_as_c(at.wrapping_add(batch * self.c_batch), rows.clone(), col, cols)
        })
    }

    /// These rows and columns of what is laid out as a C that begins at `at`.
    fn laid_out_as_c(&self, at: *const f32, rows: Range<usize>, col: usize, cols: usize) -> Ahead {
        if self.plan.swap {
            Ahead::new(at.wrapping_add(col * self.c_row + rows.start), self.c_row, cols, rows.len())
        } else {
            Ahead::new(at.wrapping_add(rows.start * self.c_row + col), self.c_row, rows.len(), cols)
        }
    }

    /// The tiles of rows `i0..i1` by the panels in `t`.
    ///
    /// # Safety
    /// As for `task`; `t` describes the panels, `t.p` is row `i0` and `t.c` the start of this product's C.
    #[inline]
    unsafe fn strips(
        &self,
        t: &mut Tile,
        i0: usize,
        i1: usize,
        s0: usize,
        mut copy: bool,
        mut ahead: [&mut Ahead; 6],
    ) {
        let plan = &self.plan;
        let tiles = self.tiles;
        let in_strips = plan.copied_rows == RowCopies::Strips;
        let along_k = !in_strips && plan.p_read.k == 1;
        let full: TileFn = (tiles.kernel)(tiles.rows, t.cols, along_k, false);
        let (p, c) = (t.p, t.c);
        let mut current = 0;
        let mut i = i0;
        // SAFETY: rows `i0..i1` and columns `s0..s0 + t.cols` belong to this task alone.
        unsafe {
            while i < i1 {
                let rows = tiles.next_rows(i1 - i);
                if in_strips {
                    t.p = p.add((i - i0) * t.k);
                    t.p_stride = rows;
                } else {
                    t.p = p.add((i - i0) * plan.p_read.own);
                    t.p_stride = if along_k { plan.p_read.own } else { plan.p_read.k };
                }
                t.c = c.wrapping_add(if plan.swap { s0 * t.c_row + i } else { i * t.c_row + s0 });
                let f = if rows == tiles.rows && !copy {
                    full
                } else {
                    (tiles.kernel)(rows, t.cols, along_k, copy)
                };
                while let Some(block) = ahead.get_mut(current) {
                    if let Some(lines) = block.take(t.k / tiles.ahead_steps, tiles.ahead_turns) {
                        t.ahead = lines;
                        break;
                    }
                    current += 1;
                    t.ahead.stride = 0;
                }
                f(t);
                if copy {
                    copy = false;
                    t.q = t.copy;
                    t.q_stride = NR;
                    t.q_next = t.k * NR;
                }
                i += rows;
            }
        }
    }

    /// Where the part of C that begins at this row and panel goes; `block` is the worker's scratch for it.
    fn target(&self, batch: usize, row: usize, panel: usize, block: *mut f32) -> OutputTarget {
        if !self.c.is_null() {
            return OutputTarget { c: self.c.wrapping_add(batch * self.c_batch), row: self.c_row };
        }
        let (row, col) = if self.plan.swap { (panel * NR, row) } else { (row, panel * NR) };
        let stride = self.plan.block_row();
        OutputTarget { c: block.wrapping_sub(row * stride + col), row: stride }
    }

    /// Calls the epilogue on rows `row0..row1`, columns `col0..col1` of C.
    ///
    /// # Safety
    /// They are inside the target, and belong to this task alone.
    unsafe fn finish(
        &self,
        target: OutputTarget,
        batch: usize,
        row0: usize,
        row1: usize,
        col0: usize,
        col1: usize,
    ) {
        let Some(epilogue) = self.epilogue else { return };
        let at = target.c.wrapping_add(row0 * target.row + col0);
        let (rows, cols, stride) = (row1 - row0, col1 - col0, target.row);
        (epilogue.call)(OutputBlock {
            batch,
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

/// Lines that a tile prefetches: `rows` of them, `stride` floats apart, then as many beside those, and so on.
#[derive(Clone, Copy)]
pub(super) struct PrefetchLines {
    pub(super) at: *const f32,
    pub(super) stride: usize,
    pub(super) rows: usize,
}

impl PrefetchLines {
    /// No prefetch: the same cached line again and again.
    pub(super) fn none(at: *const f32) -> PrefetchLines {
        PrefetchLines { at, stride: 0, rows: usize::MAX }
    }

    /// The top of the lines beside those that end above `at`.
    #[inline(always)]
    pub(super) fn next(&self, at: *const f32) -> *const f32 {
        at.wrapping_sub(self.rows.wrapping_mul(self.stride)).wrapping_add(LINE)
    }
}

/// A block of memory that is needed later, handed out to tiles that prefetch it in the meantime: the strides hide it
/// from the hardware prefetchers.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    at: *const f32,
    stride: usize,
    rows: usize,
    /// Floats of a row.
    len: usize,
    /// The next line: its first row, and where in the row.
    row: usize,
    col: usize,
}

impl Ahead {
    pub(super) const NONE: Ahead = Ahead::new(std::ptr::null(), 0, 0, 0);

    /// A block of `rows` rows of `len` floats.
    pub(super) const fn new(at: *const f32, stride: usize, rows: usize, len: usize) -> Ahead {
        Ahead { at, stride, rows, len, row: 0, col: 0 }
    }

    /// Runs of an operand. Where it is stored in half they are half as long, to within a float.
    pub(super) fn of(source: &OperandSource, runs: Runs) -> Ahead {
        let (at, bytes) = source.address(runs.at);
        let floats = |n: usize| n * bytes / size_of::<f32>();
        Ahead::new(at.cast(), floats(runs.stride), runs.n, floats(runs.len).max(1))
    }

    /// Lines for a tile that prefetches `n`. With `turns` it goes on beside the last row; otherwise below it, where the
    /// rows of a later task are, if there are any.
    #[inline]
    pub(super) fn take(&mut self, n: usize, turns: bool) -> Option<PrefetchLines> {
        if self.row >= self.rows {
            return None;
        }
        let at = self.at.wrapping_add(self.row * self.stride + self.col);
        let rows = (self.rows - self.row).next_multiple_of(STEPS);
        if turns && rows <= n {
            self.col += n / rows * LINE;
            if self.col >= self.len {
                self.row = self.rows;
            }
            return Some(PrefetchLines { at, stride: self.stride, rows });
        }
        self.col += LINE;
        if self.col >= self.len {
            self.col = 0;
            self.row += n.max(1);
        }
        Some(PrefetchLines { at, stride: self.stride, rows: usize::MAX })
    }
}
/// Steps of k between two turns come in fours, as tiles make them.
const STEPS: usize = 4;
/// Rows shorter than this are so close that the hardware prefetches them itself.
const SHORT_ROW: usize = 128;
/// Floats of a cache line.
const LINE: usize = 16;
