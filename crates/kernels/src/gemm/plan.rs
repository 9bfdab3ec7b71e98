//! How one product is cut: the role of each operand, what is copied, and what is a task.
//!
//! A plan follows from the shape and the strides alone, so that sums are computed in the same order, with the same
//! bits, for any number of workers and with any instruction set. It counts in AVX2's tiles of 6×16; others take several
//! of those at once.
//!
//! An operand that has to be converted to f32 is always copied, so its plan may be another one. The blocks of k are the same,
//! and so are the bits.

use super::Gemm;
use super::avx2::MR;
use super::block::NR;
use super::source::Converted;

// The figures below were chosen on a Zen 3 core (32 KB of L1, 512 KB of L2) with `examples/gemm_shapes`, beside other
// work: differences of a few percent were not visible, and those that are stated here were.

/// The longest block of k. A panel of 16 columns then takes 50 KB, more than L1, but tiles prefetch it, and C is
/// accessed half as often as with 400: 94.7 becomes 97.0 GFLOP/s for 128×784 by 784×512.
const KC_MAX: usize = 800;
/// The same for small outputs, whose operands pass through L2 once: together with what is prefetched they fit in half
/// of it.
const KC_SMALL: usize = 200;
/// The same for strict products, whose error grows with the root of it: 4.1e-7 to 5.0e-7 of the result's root mean square
/// become 2.4e-7 to 2.6e-7 for 1024 to 2048 cubed (PyTorch: 2.5e-7).
const KC_STRICT: usize = 192;
/// Rows and columns together of a small output.
const SMALL: usize = 160;
/// The most rows that are swept over a panel.
const MC_MAX: usize = 136;
/// Floats of those rows: half of L2.
const ROWS_MAX: usize = 1 << 16;
/// Copying rows that are contiguous along the other dim pays from this many panels on, from half of it if the rows come
/// from memory: 55 becomes 75 GFLOP/s for 36 products of 64×4096 by 4096×64, but 89 becomes 82 if they are in L2.
const PACK_ROWS_PANELS: usize = 5;
/// Floats of an operand that is not in the caches: 16 MB.
const FROM_MEMORY: usize = 1 << 22;
/// A columns' operand of this many floats stays in L1 as it is: 16 KB.
const IN_PLACE_MAX: usize = 4096;
/// Up to this many rows, panels are copied on the way. On Zen 3 72 does as well; with AVX-512 130 becomes 138 GFLOP/s for
/// 128×512 by 512×512 that come from the last-level cache.
const ON_THE_WAY_ROWS: usize = 136;
/// The work worth a task, in steps of k of a tile, six cycles: 15 µs.
const TASK_WORK: usize = 8000;
/// The number of tasks of a large product; four times that for a batch, as 36 products do not divide well.
const TASKS: usize = 16;
/// The fewest rows of a task: a panel is then used eight times for each time that it is fetched.
const MIN_ROWS: usize = 48;
/// The fewest panels of a task that copies its rows, because they are converted or too few to be cut: they are copied again
/// for each range of panels. 64×25088 by 25088×256 took 8.4 ms on one thread and on two; in two ranges it takes 8.9 and 4.7.
const COPIED_ROWS_PANELS: usize = 8;
/// Floats of shared panels that are made at once, if they are of more than one block of k: 4 MB.
const SHARED_MAX: usize = 1 << 20;

/// One operand in its role: `own` is the dim that it shares with C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) batch: usize,
    pub(super) own: usize,
    pub(super) k: usize,
}

/// What happens to the rows' operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RowCopies {
    /// It is read in place.
    InPlace,
    /// Each task copies the rows of a sweep, in strips.
    Strips,
    /// Each task converts the rows of a sweep, and copies them as they lie.
    Converted,
}

/// What happens to the panels of the columns' operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Panels {
    /// They are copied to shared scratch before the tasks start.
    Shared,
    /// Each task copies its own, one by one, before the first tile of each.
    Own,
    /// Each task copies its own, all of a block of k at once: for operands that are contiguous along the columns.
    OwnWide,
    /// Each task copies its own, in the course of the first tile of each.
    OnTheWay,
    /// They are read in place, except an incomplete one.
    InPlace,
}

/// The cut of one product.
#[derive(Clone, Copy, Debug)]
pub(super) struct GemmPlan {
    /// How many products.
    pub(super) batch: usize,
    /// The rows' operand is B and the tiles are transposed when they are stored.
    pub(super) swap: bool,
    /// Rows of C, or its columns if the parts are swapped.
    pub(super) rows: usize,
    /// Columns of C, or its rows if the parts are swapped.
    pub(super) cols: usize,
    /// The dim that is summed over.
    pub(super) k: usize,
    /// The rows' operand.
    pub(super) p: Operand,
    /// The columns' operand.
    pub(super) q: Operand,
    /// What happens to the rows.
    pub(super) copied_rows: RowCopies,
    /// Where tiles read the rows, unless in strips: `p`, or a converted copy.
    pub(super) p_read: Operand,
    /// What happens to the panels.
    pub(super) panels: Panels,
    /// Blocks of k.
    pub(super) n_kb: usize,
    /// The longest of them.
    pub(super) kc_max: usize,
    /// The most rows that are swept over a panel.
    pub(super) mc_max: usize,
    /// Parts of the rows that are tasks.
    pub(super) row_tasks: usize,
    /// Parts of the panels that are tasks.
    pub(super) col_tasks: usize,
}

/// The `i`th of `n` nearly equal parts of `0..len`.
pub(super) fn part(len: usize, n: usize, i: usize) -> (usize, usize) {
    (len * i / n, len * (i + 1) / n)
}

/// Into how many parts the rows and the panels are cut.
fn cut(batch: usize, rows: usize, n_panels: usize, k: usize, copied_rows: RowCopies) -> (usize, usize) {
    let work = batch * rows.div_ceil(MR) * n_panels * k;
    let wanted =
        (work / TASK_WORK).clamp(1, if batch == 1 { TASKS } else { 4 * TASKS }).div_ceil(batch.max(1));
    let floor2 = |n: usize| if n == 0 { 1 } else { 1 << n.ilog2() };
    let wanted = floor2(wanted);
    let row_tasks = floor2(rows / MIN_ROWS).min(wanted);
    let most = match copied_rows {
        RowCopies::Strips if row_tasks > 1 => 1,
        RowCopies::InPlace => floor2(n_panels / 2),
        RowCopies::Strips | RowCopies::Converted => floor2(n_panels / COPIED_ROWS_PANELS),
    };
    if copied_rows == RowCopies::Strips || rows >= n_panels * NR {
        (row_tasks, most.min(wanted / row_tasks))
    } else {
        let col_tasks = most.min(wanted);
        (floor2(rows / MIN_ROWS).min(wanted / col_tasks), col_tasks)
    }
}

/// How rows lie in their converted copy: along the dim along which they are contiguous, a line apart so that neighbours do not
/// share a set of the cache.
pub(super) fn converted_rows(p: &Operand, rows: usize, k: usize) -> Operand {
    let line = |n: usize| n.next_multiple_of(NR) + NR;
    if p.own == 1 && p.k != 1 {
        Operand { batch: 0, own: 1, k: line(rows) }
    } else {
        Operand { batch: 0, own: line(k), k: 1 }
    }
}

impl GemmPlan {
    /// The cheaper of the two plans.
    pub(super) fn new(g: &Gemm, converted: Converted) -> GemmPlan {
        let straight = GemmPlan::of(g, converted, false);
        let swapped = GemmPlan::of(g, converted, true);
        if swapped.cost() < straight.cost() { swapped } else { straight }
    }

    /// The plan with the parts as they are, or swapped.
    fn of(g: &Gemm, converted: Converted, swap: bool) -> GemmPlan {
        let a = Operand { batch: g.a.batch, own: g.a.row, k: g.a.col };
        let b = Operand { batch: g.b.batch, own: g.b.col, k: g.b.row };
        let (mut p, mut q, rows, cols) = if swap { (b, a, g.n, g.m) } else { (a, b, g.m, g.n) };
        let (p_converted, q_converted) =
            if swap { (converted.b, converted.a) } else { (converted.a, converted.b) };
        // The stride of a dim of one does not count.
        if rows == 1 {
            p.own = 1;
        }
        if cols == 1 {
            q.own = 1;
        }
        if g.k == 1 {
            (p.k, q.k) = (1, 1);
        }
        let kc_max = if rows + cols <= SMALL { KC_SMALL } else { KC_MAX };
        let n_kb = match g.strict {
            true => g.k.div_ceil(KC_STRICT).max(1),
            false if g.k <= KC_MAX => 1,
            false => g.k.div_ceil(kc_max),
        };
        let n_panels = cols.div_ceil(NR);
        let from_memory = g.batch * g.k * rows >= FROM_MEMORY;
        let worth = n_panels >= PACK_ROWS_PANELS || (n_panels >= PACK_ROWS_PANELS / 2 && from_memory);
        let copied_rows = match p.k != 1 && (p.own != 1 || worth) {
            _ if p_converted => RowCopies::Converted,
            true => RowCopies::Strips,
            false => RowCopies::InPlace,
        };
        let (row_tasks, col_tasks) = cut(g.batch, rows, n_panels, g.k, copied_rows);
        let panels = match q.own {
            _ if q_converted && rows <= ON_THE_WAY_ROWS && row_tasks == 1 => Panels::Own,
            1 if q_converted && (g.batch > 1 || row_tasks == 1) => Panels::OwnWide,
            _ if q_converted && g.batch > 1 => Panels::Own,
            _ if q_converted => Panels::Shared,
            1 if rows <= 2 * MR || g.k * q.k <= IN_PLACE_MAX || q.k == NR => Panels::InPlace,
            1 if rows <= ON_THE_WAY_ROWS => Panels::OnTheWay,
            _ if g.batch == 1 && row_tasks > 1 => Panels::Shared,
            1 => Panels::OwnWide,
            _ => Panels::Own,
        };
        let kc_max = g.k.div_ceil(n_kb);
        let mc_max = (ROWS_MAX / kc_max.max(1) / MR * MR).clamp(MIN_ROWS, MC_MAX);
        let p_read = match copied_rows {
            RowCopies::Converted => converted_rows(&p, mc_max.min(rows), kc_max),
            _ => p,
        };
        GemmPlan {
            swap,
            rows,
            cols,
            k: g.k,
            p,
            q,
            copied_rows,
            p_read,
            panels,
            n_kb,
            kc_max,
            mc_max,
            row_tasks,
            col_tasks,
            batch: g.batch,
        }
    }

    /// An estimate in eighths of a cycle, to choose between the two roles of the operands.
    fn cost(&self) -> usize {
        let n_panels = self.cols.div_ceil(NR);
        let strips = self.rows.div_ceil(MR);
        let step = if self.copied_rows == RowCopies::Strips || self.p_read.k == 1 { 6 * 8 } else { 7 * 8 };
        let tile = step * self.k + self.n_kb * 8 * if self.swap { 80 } else { 30 };
        let copies = if self.panels == Panels::Shared { 1 } else { self.row_tasks };
        let an_element = match self.panels {
            Panels::InPlace => 0,
            Panels::OnTheWay => 2,
            _ if self.q.own == 1 => 4,
            _ if self.q.k == 1 => 8,
            _ => 24,
        };
        let rows = match self.copied_rows {
            RowCopies::InPlace => 0,
            RowCopies::Converted if self.p.own == 1 || self.p.k == 1 => 3,
            RowCopies::Strips if self.p.own == 1 => 6,
            _ => 24,
        };
        n_panels * strips * tile
            + an_element * self.k * self.cols * copies
            + rows * self.k * self.rows * self.col_tasks
    }

    pub(super) fn n_panels(&self) -> usize {
        self.cols.div_ceil(NR)
    }
    pub(super) fn n_tasks(&self) -> usize {
        self.batch * self.row_tasks * self.col_tasks
    }
    /// Blocks of k of one round.
    pub(super) fn round_blocks(&self) -> usize {
        match self.panels {
            Panels::Shared => (SHARED_MAX / (self.kc_max * self.n_panels() * NR)).clamp(1, self.n_kb),
            _ => self.n_kb,
        }
    }
    /// Whether the blocks of C are complete, one by one, when their tasks end: all of k is done in one round.
    pub(super) fn completes(&self) -> bool {
        self.round_blocks() == self.n_kb
    }
    /// Rows and panels of the largest task.
    fn largest_task(&self) -> (usize, usize) {
        (self.rows.div_ceil(self.row_tasks), self.n_panels().div_ceil(self.col_tasks))
    }
    /// Floats from one row to the next of a task's part of C, if that is stored separately.
    pub(super) fn block_row(&self) -> usize {
        let (rows, panels) = self.largest_task();
        if self.swap { rows.next_multiple_of(NR) } else { panels * NR }
    }
    /// Floats of a task's part of C.
    pub(super) fn block_len(&self) -> usize {
        let (rows, panels) = self.largest_task();
        self.block_row() * if self.swap { panels * NR } else { rows }
    }
    /// Floats of the shared panels.
    pub(super) fn shared_len(&self) -> usize {
        match self.panels {
            Panels::Shared => self.k.min(self.round_blocks() * self.kc_max) * self.n_panels() * NR,
            _ => 0,
        }
    }
    /// Floats of one worker's panels.
    pub(super) fn own_panels_len(&self) -> usize {
        match self.panels {
            Panels::Shared => 0,
            Panels::InPlace => self.kc_max * NR,
            _ => self.kc_max * NR * self.n_panels().div_ceil(self.col_tasks),
        }
    }
    /// Floats of one worker's scratch, a multiple of a cache line.
    pub(super) fn own_len(&self) -> usize {
        let rows = match self.copied_rows {
            RowCopies::InPlace => 0,
            RowCopies::Strips => self.mc_max.min(self.rows) * self.kc_max,
            RowCopies::Converted if self.p_read.k == 1 => self.mc_max.min(self.rows) * self.p_read.own,
            RowCopies::Converted => self.kc_max * self.p_read.k,
        };
        (self.own_panels_len() + rows).next_multiple_of(NR)
    }
}
