//! How a product of pairs is cut: into tasks, blocks of k, and what is copied by whom. It follows from the shape alone.

use super::super::LINE;
use super::super::plan::part;
use super::blocks::{UNIT, UNIT_LEN};
use super::{PairShape, RUN};
use crate::tile;

/// The most runs of a block of k: three panels take 48 KB then.
const RUNS_MAX: usize = 16;
/// The most strips of a sweep, if there is one block of k: they take half of L2 together with their part of C.
const STRIPS: usize = 12;
/// The same if there are several: the panels that a task copies for itself are copied again for each sweep.
const STRIPS_LONG: usize = 24;
/// The most panels that a sweep goes over before the epilogue is called.
const PANELS: usize = 33;
/// Floats that a copied operand takes at most if it is copied before the tasks start: 4 MB.
const SHARED_MAX: usize = 1 << 20;
/// The work worth a task, in units of A by units of B: about 15 µs.
const TASK_WORK: usize = 180;
/// The number of tasks of a large product; four times that for a batch.
const TASKS: usize = 16;
/// Floats that both copied operands take in a round: 512 KB. With twice as much, the weight gradient of a 1x1 convolution of
/// 256 to 64 channels takes 1.09 of the time on a Zen 4 core.
const ROUND_MAX: usize = 1 << 17;
/// Floats that C may take between rounds, which read and write all of it: 1 MB.
const ROUND_C_MAX: usize = 1 << 18;

/// One operand: how it is copied and cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Side {
    /// Strips or panels.
    pub(super) units: usize,
    /// Into how many parts they are cut, for tasks.
    pub(super) tasks: usize,
    /// The most of them in a sweep.
    pub(super) most: usize,
    /// Whether all of it is copied before the tasks start.
    pub(super) shared: bool,
}

impl Side {
    /// The most of them in a block.
    fn block(&self) -> usize {
        self.units.div_ceil(self.tasks).min(self.most)
    }
    /// Into how many sweeps a task's part is cut.
    pub(super) fn sweeps(&self, units: usize) -> usize {
        units.div_ceil(self.most)
    }
    fn shared_len(&self, runs: usize) -> usize {
        if self.shared { self.units * runs * UNIT_LEN } else { 0 }
    }
    fn own_len(&self, runs: usize) -> usize {
        if self.shared { 0 } else { self.block() * runs * UNIT_LEN }
    }
}

/// The cut of one product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PairPlan {
    batch: usize,
    /// Runs of k: one of nothing but zeros if there is no k.
    pub(super) runs: usize,
    /// Blocks of k.
    pub(super) n_kb: usize,
    /// Blocks of k of a round. If there are several rounds, both operands are shared, each round copies its part of them,
    /// and the tasks' parts of C last.
    round: usize,
    pub(super) a: Side,
    pub(super) b: Side,
}

impl PairPlan {
    pub(super) fn new(g: &PairShape) -> PairPlan {
        let (strips, panels) = (g.m.div_ceil(UNIT), g.n.div_ceil(UNIT));
        let runs = g.k.div_ceil(RUN).max(1);
        let n_kb = runs.div_ceil(RUNS_MAX);
        let fits = |units: usize| g.batch == 1 && units * runs * UNIT_LEN <= SHARED_MAX;
        let (a_fits, b_fits) = (fits(strips), fits(panels));
        let wanted = (g.batch * strips * panels * runs / TASK_WORK)
            .clamp(1, if g.batch == 1 { TASKS } else { 4 * TASKS })
            .div_ceil(g.batch.max(1));
        let wanted: usize = 1 << wanted.ilog2();
        // A small C with a long k, as gradients of weights are. Without rounds either every task copies nearly as much as it
        // multiplies, or tasks are single panels. Single strips are better than rounds.
        let long = runs >= strips.max(panels) && strips * panels * UNIT_LEN <= ROUND_C_MAX;
        let in_rounds = g.batch == 1 && !b_fits && long;
        let (a_fits, b_fits) = (a_fits || in_rounds, b_fits || in_rounds);
        // What tasks copy again, or at least read again, is to be small.
        let cost = |(rows, cols): (usize, usize)| {
            let (a, b) = (if a_fits { 1 } else { 8 }, if b_fits { 1 } else { 8 });
            cols * strips * a + rows * panels * b
        };
        let floor2 = |n: usize| 1 << n.max(1).ilog2();
        let cuts =
            (0..=wanted.ilog2()).map(|i| ((1 << i).min(floor2(strips)), (wanted >> i).min(floor2(panels))));
        let (row_tasks, col_tasks) =
            cuts.min_by_key(|&(rows, cols)| (wanted - rows * cols, cost((rows, cols)))).unwrap_or((1, 1));
        // A task that is alone copies for itself.
        let several = row_tasks * col_tasks > 1;
        let in_rounds = several && in_rounds;
        let round_runs = ROUND_MAX / ((strips + panels) * UNIT_LEN).max(1);
        let round = if in_rounds { (round_runs / runs.div_ceil(n_kb)).max(1) } else { n_kb };
        // What lasts between rounds is not swept.
        let (most_a, most_b) = match in_rounds {
            true => (strips, panels),
            false => (if n_kb == 1 { STRIPS } else { STRIPS_LONG }, PANELS),
        };
        PairPlan {
            batch: g.batch,
            runs,
            n_kb,
            round,
            a: Side { units: strips, tasks: row_tasks, most: most_a, shared: several && a_fits },
            b: Side { units: panels, tasks: col_tasks, most: most_b, shared: several && b_fits },
        }
    }

    /// How many rounds there are.
    pub(super) fn n_rounds(&self) -> usize {
        self.n_kb.div_ceil(self.round)
    }
    /// The blocks of k of a round.
    pub(super) fn round(&self, round: usize) -> std::ops::Range<usize> {
        round * self.round..((round + 1) * self.round).min(self.n_kb)
    }

    pub(super) fn n_tasks(&self) -> usize {
        self.batch * self.a.tasks * self.b.tasks
    }
    /// The runs of a block of k.
    pub(super) fn block(&self, kb: usize) -> (usize, usize) {
        part(self.runs, self.n_kb, kb)
    }
    fn block_runs(&self) -> usize {
        self.runs.div_ceil(self.n_kb)
    }
    /// Where the units of a block of k from `unit` on are in a shared copy.
    pub(super) fn shared_at(&self, side: &Side, kb: usize, unit: usize) -> usize {
        let (run0, run1) = self.block(kb);
        let (round0, _) = self.block(kb - kb % self.round);
        ((run0 - round0) * side.units + unit * (run1 - run0)) * UNIT_LEN
    }
    /// Floats of the shared copy of A, and of both.
    pub(super) fn shared_lens(&self) -> (usize, usize) {
        let runs = self.runs.min(self.round * self.block_runs());
        let a = self.a.shared_len(runs);
        (a, a + self.b.shared_len(runs))
    }
    /// Where a worker's strips end and where its panels do; its part of C follows.
    pub(super) fn own_lens(&self) -> (usize, usize) {
        let a = self.a.own_len(self.block_runs());
        (a, a + self.b.own_len(self.block_runs()))
    }
    /// Floats from one row of a worker's part of C to the next.
    pub(super) fn c_row(&self) -> usize {
        tile::row_stride(self.b.block() * UNIT)
    }
    /// Floats of one worker's scratch; of one task's, which is its part of C, if there are several rounds.
    pub(super) fn own_len(&self) -> usize {
        self.own_lens().1 + self.a.block() * UNIT * self.c_row()
    }
    /// Where the scratch of a task that runs as this worker starts.
    pub(super) fn own_at(&self, task: usize, worker: usize) -> usize {
        let owner = if self.n_rounds() > 1 { task } else { worker };
        self.shared_lens().1 + owner * self.own_len()
    }
    /// All of the scratch, with one line more, to start on a line.
    pub(super) fn scratch_len(&self, workers: usize) -> usize {
        let owners = if self.n_rounds() > 1 { self.n_tasks() } else { workers };
        LINE + self.shared_lens().1 + owners * self.own_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(batch: usize, m: usize, n: usize, k: usize) -> PairPlan {
        PairPlan::new(&PairShape { batch, m, n, k })
    }

    #[test]
    fn large_operands_are_not_copied_whole() {
        let shared = |p: PairPlan| (p.a.shared, p.b.shared);
        assert_eq!(shared(plan(1, 2048, 1536, 384)), (true, true));
        let long = plan(1, 32768, 1536, 384);
        assert_eq!((shared(long), long.a.tasks, long.b.tasks), ((false, true), 16, 1));
        let wide = plan(1, 384, 50_000, 384);
        assert_eq!((shared(wide), wide.a.tasks, wide.b.tasks), ((true, false), 1, 16));
        let both = plan(1, 4096, 4096, 4096);
        assert_eq!((shared(both), both.a.tasks, both.b.tasks), ((false, false), 4, 4));
        assert_eq!(shared(plan(1, 64, 64, 64)), (false, false), "one task");
        assert_eq!(shared(plan(48, 256, 256, 64)), (false, false), "a batch");
        assert!(plan(1, 512, 512, 1_000_000).scratch_len(1) < 1 << 20);
    }

    #[test]
    fn a_small_c_with_a_long_k_goes_in_rounds() {
        let rounds = |p: PairPlan| (p.n_rounds() > 1, p.a.shared && p.b.shared);
        assert_eq!(rounds(plan(1, 64, 576, 65_536)), (true, true));
        assert_eq!(rounds(plan(1, 64, 256, 25_088)), (true, true), "one operand alone would fit");
        assert_eq!(rounds(plan(1, 256, 64, 25_088)), (false, false), "each task copies its strip");
        assert_eq!(rounds(plan(1, 64, 256, 4096)), (false, true), "both fit");
        assert_eq!(rounds(plan(1, 16, 16, 1_000_000)), (false, false), "one task");
        assert_eq!(rounds(plan(1, 2048, 2048, 65_536)), (false, false), "C is large");
        assert_eq!(rounds(plan(9, 64, 576, 65_536)), (false, false), "a batch");
        assert_eq!(rounds(plan(1, 65_536, 64, 576)), (false, false), "a short k");
    }
}
