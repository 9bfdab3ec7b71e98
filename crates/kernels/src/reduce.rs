//! Sums, means, extremes and sums of squares over any dims.
//!
//! A shape is folded into alternating runs of kept and reduced dims, and each reduced run is one pass over `[outer,
//! reduced, inner]`; nearly always there is one. Two kernels do all passes: rows (`inner == 1`) and columns. Rows are
//! summed in 32 lanes over blocks of 1,024, and blocks in f64. Columns are summed four rows at a time over slabs of
//! rows, into accumulators that stay in the L1 cache. Where blocks and slabs end depends on the shape alone, so the
//! bits do not depend on the workers, and no sum has a long chain of f32 additions.
//!
//! Extremes give NaN when there is one. It does not say where an extreme is.

use polyreme_dtype::DType;

use crate::cx::SharedMut;
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

/// What a reduction computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceKind {
    /// The sum.
    Sum,
    /// The sum over the count.
    Mean,
    /// The greatest; −inf of nothing.
    Max,
    /// The smallest; inf of nothing.
    Min,
    /// The sum of squares.
    SumSquares,
}

/// A reduction of a shape over some dims.
#[derive(Clone, Debug)]
pub struct Reduce {
    kind: ReduceKind,
    passes: Vec<ReducePass>,
    x_len: usize,
    y_len: usize,
}

/// One pass: `[outer, reduced, inner]` to `[outer, inner]`.
#[derive(Clone, Copy, Debug)]
struct ReducePass {
    outer: usize,
    reduced: usize,
    inner: usize,
}

/// Elements of a row that one task sums.
const ROW_CHUNK: usize = 32_768;
/// Elements that a task should at least have.
const TASK_ELEMENTS: usize = 32_768;
/// Columns of a task: accumulators of 8 KB, and four rows streaming through.
const COLUMNS: usize = 2_048;
/// Rows that go into one chain of f32 additions, four at a time.
const ROWS: usize = 256;
/// The most slabs of rows of one column reduction.
const SLABS_MAX: usize = 64;
/// Narrower matrices than this are seen as fewer, wider rows.
const NARROW: usize = 64;

impl Reduce {
    /// Reduces `shape` over the dims `axes`; the output has the other dims, in order. Panics if one does not exist.
    pub fn new(kind: ReduceKind, shape: &[usize], axes: &[usize]) -> Reduce {
        assert!(axes.iter().all(|&a| a < shape.len()), "axes {axes:?} of a shape of {} dims", shape.len());
        let mut runs: Vec<(bool, usize)> = Vec::new();
        for (d, &size) in shape.iter().enumerate() {
            let reduced = axes.contains(&d);
            match runs.last_mut() {
                Some((r, n)) if *r == reduced => *n *= size,
                _ => runs.push((reduced, size)),
            }
        }
        runs.retain(|&(_, n)| n != 1);
        let mut passes = Vec::new();
        // From the innermost run out: that pass shrinks the most, and reads memory in order.
        while let Some(at) = runs.iter().rposition(|&(reduced, _)| reduced) {
            let size = |runs: &[(bool, usize)]| runs.iter().map(|r| r.1).product();
            passes.push(ReducePass {
                outer: size(&runs[..at]),
                reduced: runs[at].1,
                inner: size(&runs[at + 1..]),
            });
            runs.remove(at);
        }
        let y_len = runs.iter().map(|r| r.1).product();
        if passes.is_empty() {
            passes.push(ReducePass { outer: 1, reduced: 1, inner: y_len });
        }
        Reduce { kind, passes, x_len: shape.iter().product(), y_len }
    }

    /// How many floats the input has.
    pub fn x_len(&self) -> usize {
        self.x_len
    }

    /// How many floats the output has.
    pub fn y_len(&self) -> usize {
        self.y_len
    }

    /// How many floats of scratch `forward` needs for a y in this format; the same for any number of workers.
    pub fn scratch_len(&self, y: DType, _workers: usize) -> usize {
        let (between, partial) = self.scratch_parts();
        2 * between + partial + if y == DType::F32 { 0 } else { self.y_len }
    }

    /// The longest result between passes, and the most partial results of a pass.
    fn scratch_parts(&self) -> (usize, usize) {
        let between = self.passes[..self.passes.len() - 1].iter().map(|p| p.outer * p.inner).max();
        let partial = self.passes.iter().map(|p| p.partial_len()).max();
        (between.unwrap_or(0), partial.unwrap_or(0))
    }

    /// Reduces `x` into `y`. All is summed in f32 and f64; what is stored in half is widened in blocks, and y is rounded
    /// at the end.
    pub fn forward(&self, cx: &Cx, x: Floats, y: FloatsMut, scratch: &mut [f32]) {
        assert_eq!(x.len(), self.x_len, "length of x");
        assert_eq!(y.len(), self.y_len, "length of y");
        if let FloatsMut::F32(y) = y {
            return self.forward_f32(cx, x, y, scratch);
        }
        let (wide, scratch) = scratch.split_at_mut(self.y_len);
        self.forward_f32(cx, x, wide, scratch);
        let y = SharedFloats::new(y);
        cx.for_each_chunk(wide, TASK_ELEMENTS, |i, wide| {
            // SAFETY: chunks of different tasks do not overlap, and each task runs once.
            unsafe { y.part(i * TASK_ELEMENTS, wide.len()) }.round(cx.isa, wide);
        });
    }

    fn forward_f32(&self, cx: &Cx, x: Floats, y: &mut [f32], scratch: &mut [f32]) {
        let scale = match self.kind {
            ReduceKind::Mean => self.y_len as f64 / self.x_len as f64,
            ReduceKind::Sum | ReduceKind::Max | ReduceKind::Min | ReduceKind::SumSquares => 1.0,
        };
        let (between, partial) = self.scratch_parts();
        let (mut from_buf, rest) = scratch.split_at_mut(between);
        let (mut to_buf, rest) = rest.split_at_mut(between);
        let partials = &mut rest[..partial];
        let n = self.passes.len();
        for (i, pass) in self.passes.iter().enumerate() {
            let between = &from_buf[..if i == 0 { 0 } else { pass.outer * pass.reduced * pass.inner }];
            let x_pass = if i == 0 { x } else { Floats::F32(between) };
            let y_pass = if i + 1 == n { &mut *y } else { &mut to_buf[..pass.outer * pass.inner] };
            let scale = if i + 1 == n { scale } else { 1.0 };
            match self.kind {
                ReduceKind::SumSquares if i == 0 => {
                    pass.run::<SumSquares>(cx, x_pass, y_pass, scale, partials)
                }
                ReduceKind::Sum | ReduceKind::Mean | ReduceKind::SumSquares => {
                    pass.run::<Sum>(cx, x_pass, y_pass, scale, partials);
                }
                ReduceKind::Max => pass.run::<Max>(cx, x_pass, y_pass, scale, partials),
                ReduceKind::Min => pass.run::<Min>(cx, x_pass, y_pass, scale, partials),
            }
            std::mem::swap(&mut from_buf, &mut to_buf);
        }
    }
}

/// How a column pass is cut: rows are joined until they are wide enough, then cut into slabs and column blocks.
struct ColumnCut {
    /// How many rows are seen as one.
    joined: usize,
    /// The width of a joined row.
    width: usize,
    /// How many joined rows, and how many rows are left over.
    rows: usize,
    left: usize,
    slab_rows: usize,
    n_slabs: usize,
}

impl ReducePass {
    fn columns(&self) -> ColumnCut {
        let joined =
            if self.inner < NARROW { (2 * NARROW / self.inner.max(1)).min(self.reduced.max(1)) } else { 1 };
        let width = joined * self.inner;
        let rows = self.reduced / joined;
        let slab_rows = (2 * TASK_ELEMENTS / width.max(1)).max(rows.div_ceil(SLABS_MAX)).max(8);
        let n_slabs = rows.div_ceil(slab_rows).max(1);
        ColumnCut { joined, width, rows, left: self.reduced % joined, slab_rows, n_slabs }
    }

    fn partial_len(&self) -> usize {
        if self.inner == 1 {
            let n_chunks = self.reduced.div_ceil(ROW_CHUNK);
            if n_chunks > 1 { self.outer * n_chunks } else { 0 }
        } else {
            let c = self.columns();
            if c.n_slabs > 1 || c.joined > 1 { self.outer * c.n_slabs * c.width } else { 0 }
        }
    }

    fn run<F: Fold>(&self, cx: &Cx, x: Floats, y: &mut [f32], scale: f64, partials: &mut [f32]) {
        if self.inner == 1 {
            self.run_rows::<F>(cx, x, y, scale, partials);
        } else {
            self.run_columns::<F>(cx, x, y, scale, partials);
        }
    }

    fn run_rows<F: Fold>(&self, cx: &Cx, x: Floats, y: &mut [f32], scale: f64, partials: &mut [f32]) {
        let len = self.reduced;
        if len == 0 {
            y.fill((f64::from(F::INIT) * scale) as f32);
            return;
        }
        let n_chunks = len.div_ceil(ROW_CHUNK);
        if n_chunks == 1 {
            let rows = (TASK_ELEMENTS / len).max(1);
            cx.for_each_chunk(y, rows, |i, part| {
                let x = x.part(i * rows * len, part.len() * len);
                fold_rows::<F>(cx.isa, x, len, part, scale);
            });
            return;
        }
        cx.for_each_chunk(&mut partials[..self.outer * n_chunks], 1, |i, part| {
            let (row, start) = (i / n_chunks, i % n_chunks * ROW_CHUNK);
            let x = x.part(row * len + start, ROW_CHUNK.min(len - start));
            fold_rows::<F>(cx.isa, x, x.len(), part, 1.0);
        });
        for (v, parts) in y.iter_mut().zip(partials.chunks(n_chunks)) {
            let total = parts.iter().fold(f64::from(F::INIT), |a, &p| F::join64(a, f64::from(p)));
            *v = (total * scale) as f32;
        }
    }

    fn run_columns<F: Fold>(&self, cx: &Cx, x: Floats, y: &mut [f32], scale: f64, partials: &mut [f32]) {
        if self.outer == 0 || self.inner == 0 {
            return;
        }
        let c = self.columns();
        let matrix = self.reduced * self.inner;
        let straight = c.n_slabs == 1 && c.joined == 1;
        let len = if straight { y.len() } else { self.outer * c.n_slabs * c.width };
        let sums = SharedMut::new(if straight { &mut *y } else { &mut partials[..len] });
        // One item is a block of columns of a slab; small items are done several to a task.
        let n_blocks = c.width.div_ceil(COLUMNS);
        let n_items = self.outer * c.n_slabs * n_blocks;
        let group = (TASK_ELEMENTS / (c.slab_rows.min(c.rows.max(1)) * c.width.min(COLUMNS))).max(1);
        cx.par.run(n_items.div_ceil(group), &|task, _| {
            for item in task * group..n_items.min((task + 1) * group) {
                let (slab, block) = (item / n_blocks, item % n_blocks);
                let (outer, first) = (slab / c.n_slabs, slab % c.n_slabs * c.slab_rows);
                let rows = c.slab_rows.min(c.rows - first);
                let cols = COLUMNS.min(c.width - block * COLUMNS);
                let start = outer * matrix + first * c.width + block * COLUMNS;
                // SAFETY: each item has its own slab and columns.
                let sum = unsafe { sums.slice(slab * c.width + block * COLUMNS, cols) };
                fold_columns::<F>(cx.isa, x, start, rows, c.width, sum);
            }
        });
        if straight {
            if scale != 1.0 {
                y.iter_mut().for_each(|v| *v = (f64::from(*v) * scale) as f32);
            }
            return;
        }
        let partials = &partials[..len];
        let grain = (TASK_ELEMENTS / (c.n_slabs * c.joined)).max(1);
        cx.for_each_chunk(y, grain, |i, part| {
            for (k, v) in part.iter_mut().enumerate() {
                let (outer, col) = ((i * grain + k) / self.inner, (i * grain + k) % self.inner);
                let sums = &partials[outer * c.n_slabs * c.width..];
                let mut total = f64::from(F::INIT);
                for at in 0..c.n_slabs * c.joined {
                    total = F::join64(total, f64::from(sums[at * self.inner + col]));
                }
                for row in self.reduced - c.left..self.reduced {
                    total =
                        F::join64(total, f64::from(F::see(x.at(outer * matrix + row * self.inner + col))));
                }
                *v = (total * scale) as f32;
            }
        });
    }
}

/// How values are joined. `see` is applied to each input value first.
trait Fold {
    const INIT: f32;
    fn see(x: f32) -> f32 {
        x
    }
    fn join(a: f32, b: f32) -> f32;
    fn join64(a: f64, b: f64) -> f64;
}

struct Sum;
struct SumSquares;
struct Max;
struct Min;

impl Fold for Sum {
    const INIT: f32 = 0.0;
    #[inline(always)]
    fn join(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn join64(a: f64, b: f64) -> f64 {
        a + b
    }
}

impl Fold for SumSquares {
    const INIT: f32 = 0.0;
    #[inline(always)]
    fn see(x: f32) -> f32 {
        x * x
    }
    #[inline(always)]
    fn join(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn join64(a: f64, b: f64) -> f64 {
        a + b
    }
}

impl Fold for Max {
    const INIT: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn join(a: f32, b: f32) -> f32 {
        if b > a || b.is_nan() { b } else { a }
    }
    #[inline(always)]
    fn join64(a: f64, b: f64) -> f64 {
        if b > a || b.is_nan() { b } else { a }
    }
}

impl Fold for Min {
    const INIT: f32 = f32::INFINITY;
    #[inline(always)]
    fn join(a: f32, b: f32) -> f32 {
        if b < a || b.is_nan() { b } else { a }
    }
    #[inline(always)]
    fn join64(a: f64, b: f64) -> f64 {
        if b < a || b.is_nan() { b } else { a }
    }
}

/// Elements of a row that are summed in f32.
const BLOCK: usize = 1_024;
/// Columns of halves that are widened at a time.
const HALF_COLUMNS: usize = 512;

/// Folds each row of `len` values into one of `y`.
fn fold_rows<F: Fold>(isa: Isa, x: Floats, len: usize, y: &mut [f32], scale: f64) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        #[target_feature(enable = "avx2,fma")]
        fn lanes<F: Fold>(isa: Isa, x: Floats, len: usize, y: &mut [f32], scale: f64) {
            fold_rows_body::<F>(isa, x, len, y, scale);
        }
        // SAFETY: the instruction set was detected.
        unsafe { lanes::<F>(isa, x, len, y, scale) };
        return;
    }
    fold_rows_body::<F>(isa, x, len, y, scale);
}

/// One body for all instruction sets: the compiler vectorises the fixed-size loops, and the bits are the same.
#[inline(always)]
fn fold_rows_body<F: Fold>(isa: Isa, x: Floats, len: usize, y: &mut [f32], scale: f64) {
    if let Floats::F32(x) = x {
        for (row, v) in x.chunks_exact(len).zip(y) {
            *v = (fold_row::<F>(row) * scale) as f32;
        }
        return;
    }
    let mut stage = [0.0; BLOCK];
    if len <= BLOCK {
        let group = BLOCK / len;
        for (g, y) in y.chunks_mut(group).enumerate() {
            let rows = x.staged(isa, g * group * len, y.len() * len, &mut stage);
            for (row, v) in rows.chunks_exact(len).zip(y) {
                *v = (fold_row::<F>(row) * scale) as f32;
            }
        }
        return;
    }
    for (r, v) in y.iter_mut().enumerate() {
        let mut total = f64::from(F::INIT);
        for start in (0..len).step_by(BLOCK) {
            let block = x.staged(isa, r * len + start, BLOCK.min(len - start), &mut stage);
            total = F::join64(total, f64::from(fold_block::<F>(block)));
        }
        *v = (total * scale) as f32;
    }
}

#[inline(always)]
fn fold_row<F: Fold>(row: &[f32]) -> f64 {
    if row.len() < 16 {
        return f64::from(row.iter().fold(F::INIT, |a, &b| F::join(a, F::see(b))));
    }
    let mut total = f64::from(F::INIT);
    for block in row.chunks(BLOCK) {
        total = F::join64(total, f64::from(fold_block::<F>(block)));
    }
    total
}

#[inline(always)]
fn fold_block<F: Fold>(block: &[f32]) -> f32 {
    let mut lanes = [F::INIT; 32];
    let mut groups = block.chunks_exact(32);
    for group in &mut groups {
        for i in 0..32 {
            lanes[i] = F::join(lanes[i], F::see(group[i]));
        }
    }
    for (lane, &b) in lanes.iter_mut().zip(groups.remainder()) {
        *lane = F::join(*lane, F::see(b));
    }
    for half in [16, 8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = F::join(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// Folds `rows` rows that are `stride` apart, the first at `start`, into `sum`, which is as wide as the part of the rows
/// that is wanted.
fn fold_columns<F: Fold>(isa: Isa, x: Floats, start: usize, rows: usize, stride: usize, sum: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        #[target_feature(enable = "avx2,fma")]
        fn lanes<F: Fold>(isa: Isa, x: Floats, start: usize, rows: usize, stride: usize, sum: &mut [f32]) {
            fold_columns_body::<F>(isa, x, start, rows, stride, sum);
        }
        // SAFETY: the instruction set was detected.
        unsafe { lanes::<F>(isa, x, start, rows, stride, sum) };
        return;
    }
    fold_columns_body::<F>(isa, x, start, rows, stride, sum);
}

#[inline(always)]
fn fold_columns_body<F: Fold>(
    isa: Isa,
    x: Floats,
    start: usize,
    rows: usize,
    stride: usize,
    sum: &mut [f32],
) {
    let mut acc = [F::INIT; COLUMNS];
    if let Floats::F32(x) = x {
        let n = sum.len();
        let mut source = InPlace { x: &x[start..], stride, n };
        return fold_rows_of::<F>(&mut source, rows, sum, &mut acc[..n]);
    }
    for (block, sum) in sum.chunks_mut(HALF_COLUMNS).enumerate() {
        let (n, start) = (sum.len(), start + block * HALF_COLUMNS);
        let mut source = Widened { isa, x, start, stride, n, stage: [[0.0; HALF_COLUMNS]; 4] };
        fold_rows_of::<F>(&mut source, rows, sum, &mut acc[..n]);
    }
}

/// Rows as f32, four or one at a time.
trait RowSource {
    fn four(&mut self, first: usize) -> [&[f32]; 4];
    fn one(&mut self, row: usize) -> &[f32];
}

/// Rows of `n` that are `stride` apart.
struct InPlace<'a> {
    x: &'a [f32],
    stride: usize,
    n: usize,
}

impl RowSource for InPlace<'_> {
    #[inline(always)]
    fn four(&mut self, first: usize) -> [&[f32]; 4] {
        let at = |k: usize| &self.x[(first + k) * self.stride..][..self.n];
        [at(0), at(1), at(2), at(3)]
    }
    #[inline(always)]
    fn one(&mut self, row: usize) -> &[f32] {
        &self.x[row * self.stride..][..self.n]
    }
}

/// The same in half, the first row at `start`.
struct Widened<'a> {
    isa: Isa,
    x: Floats<'a>,
    start: usize,
    stride: usize,
    n: usize,
    stage: [[f32; HALF_COLUMNS]; 4],
}

impl RowSource for Widened<'_> {
    #[inline(always)]
    fn four(&mut self, first: usize) -> [&[f32]; 4] {
        for (k, stage) in self.stage.iter_mut().enumerate() {
            self.x.staged(self.isa, self.start + (first + k) * self.stride, self.n, stage);
        }
        let [a, b, c, d] = &self.stage;
        [&a[..self.n], &b[..self.n], &c[..self.n], &d[..self.n]]
    }
    #[inline(always)]
    fn one(&mut self, row: usize) -> &[f32] {
        self.x.staged(self.isa, self.start + row * self.stride, self.n, &mut self.stage[0])
    }
}

#[inline(always)]
fn fold_rows_of<F: Fold>(source: &mut impl RowSource, rows: usize, sum: &mut [f32], acc: &mut [f32]) {
    let n = sum.len();
    sum.fill(F::INIT);
    for first in (0..rows).step_by(ROWS) {
        let last = rows.min(first + ROWS);
        let mut row = first;
        acc.fill(F::INIT);
        while row + 4 <= last {
            let [r0, r1, r2, r3] = source.four(row);
            for i in 0..n {
                let low = F::join(F::see(r0[i]), F::see(r1[i]));
                let high = F::join(F::see(r2[i]), F::see(r3[i]));
                acc[i] = F::join(acc[i], F::join(low, high));
            }
            row += 4;
        }
        for row in row..last {
            let r = source.one(row);
            for i in 0..n {
                acc[i] = F::join(acc[i], F::see(r[i]));
            }
        }
        for i in 0..n {
            sum[i] = F::join(sum[i], acc[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::{Reverse, contexts};

    const KINDS: [ReduceKind; 5] =
        [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max, ReduceKind::Min, ReduceKind::SumSquares];

    fn naive(kind: ReduceKind, shape: &[usize], axes: &[usize], x: &[f32]) -> Vec<f64> {
        let kept: Vec<usize> = (0..shape.len()).filter(|d| !axes.contains(d)).collect();
        let y_len: usize = kept.iter().map(|&d| shape[d]).product();
        let init = match kind {
            ReduceKind::Max => f64::NEG_INFINITY,
            ReduceKind::Min => f64::INFINITY,
            ReduceKind::Sum | ReduceKind::Mean | ReduceKind::SumSquares => 0.0,
        };
        let mut y = vec![init; y_len];
        for (flat, &v) in x.iter().enumerate() {
            let (mut rest, mut idx) = (flat, vec![0; shape.len()]);
            for d in (0..shape.len()).rev() {
                idx[d] = rest % shape[d];
                rest /= shape[d];
            }
            let at = kept.iter().fold(0, |at, &d| at * shape[d] + idx[d]);
            let v = f64::from(v);
            y[at] = match kind {
                ReduceKind::Sum | ReduceKind::Mean => y[at] + v,
                ReduceKind::SumSquares => y[at] + v * v,
                ReduceKind::Max => y[at].max(v),
                ReduceKind::Min => y[at].min(v),
            };
        }
        if kind == ReduceKind::Mean {
            y.iter_mut().for_each(|v| *v *= y_len as f64 / x.len() as f64);
        }
        y
    }

    fn run(kind: ReduceKind, shape: &[usize], axes: &[usize], x: &[f32], cx: &Cx) -> Vec<f32> {
        run_in(kind, shape, axes, Floats::F32(x), DType::F32, cx).wide()
    }

    fn run_in(
        kind: ReduceKind,
        shape: &[usize],
        axes: &[usize],
        x: Floats,
        to: DType,
        cx: &Cx,
    ) -> OwnedFloats {
        let reduce = Reduce::new(kind, shape, axes);
        let mut y = OwnedFloats::unset(to, reduce.y_len());
        let mut scratch = vec![f32::NAN; reduce.scratch_len(to, cx.par.workers())];
        reduce.forward(cx, x, y.get_mut(), &mut scratch);
        y
    }

    /// To and from halves: what f32 gives, rounded.
    fn in_half(kind: ReduceKind, shape: &[usize], axes: &[usize], x: &[f32]) {
        for cx in contexts() {
            for from in HALVES {
                let x = OwnedFloats::new(from, x);
                let want = OwnedFloats::F32(run(kind, shape, axes, &x.wide(), &cx));
                for to in [from, DType::F32] {
                    let got = run_in(kind, shape, axes, x.get(), to, &cx);
                    let what = format!("{kind:?} of {shape:?} over {axes:?}, {from}");
                    same_rounded(&what, &[got], std::slice::from_ref(&want));
                }
            }
        }
    }

    fn check(shape: &[usize], axes: &[usize]) {
        let n: usize = shape.iter().product();
        // All of one sign for a part, so that a lossy order of summation shows.
        let x: Vec<f32> =
            (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e7 - 0.1).collect();
        for kind in KINDS {
            in_half(kind, shape, axes, &x);
            let want = naive(kind, shape, axes, &x);
            let first = run(kind, shape, axes, &x, &Cx::serial());
            assert_eq!(first.len(), want.len());
            for (i, (g, w)) in first.iter().zip(&want).enumerate() {
                let close = f64::from(*g) == *w || (f64::from(*g) - w).abs() <= 1e-6 * w.abs().max(0.01);
                assert!(close, "{kind:?} of {shape:?} over {axes:?} at {i}: {g}, not {w}");
            }
            for (isa, workers) in [(Isa::SCALAR, 1), (Isa::detect(), 3), (Isa::detect(), 16)] {
                let again = run(kind, shape, axes, &x, &Cx { isa, par: &Reverse(workers) });
                let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&first), bits(&again), "same bits");
            }
        }
    }

    #[test]
    fn awkward_shapes() {
        for (shape, axes) in [
            (&[][..], &[][..]),
            (&[1], &[0]),
            (&[7], &[]),
            (&[3, 5], &[0, 1]),
            (&[3, 5], &[0]),
            (&[3, 5], &[1]),
            (&[5, 100], &[1]),
            (&[100, 5], &[0]),
            (&[33, 31], &[0]),
            (&[1000, 64], &[0]),
            (&[300, 2100], &[0]),
            (&[70_001], &[0]),
            (&[3, 40_001], &[1]),
            (&[2, 50, 70], &[1]),
            (&[50, 9, 3], &[1]),
            (&[2, 3, 4, 5], &[0, 2]),
            (&[2, 3, 4, 5], &[1, 3]),
            (&[2, 3, 1, 5], &[2]),
            (&[4, 6, 49], &[0, 2]),
            (&[2, 3, 2, 3, 2], &[0, 2, 4]),
            (&[30_000, 3], &[0]),
            (&[2, 30_000, 3], &[1]),
        ] {
            check(shape, axes);
        }
    }

    #[test]
    fn of_nothing() {
        let cx = Cx::serial();
        assert_eq!(run(ReduceKind::Sum, &[2, 0], &[1], &[], &cx), [0.0; 2]);
        assert_eq!(run(ReduceKind::Sum, &[0, 2], &[0], &[], &cx), [0.0; 2]);
        assert_eq!(run(ReduceKind::Max, &[2, 0], &[1], &[], &cx), [f32::NEG_INFINITY; 2]);
        assert_eq!(run(ReduceKind::Min, &[0, 2], &[0], &[], &cx), [f32::INFINITY; 2]);
        assert_eq!(run(ReduceKind::Sum, &[0, 2], &[1], &[], &cx), [0.0; 0]);
        assert!(run(ReduceKind::Mean, &[2, 0], &[1], &[], &cx)[0].is_nan());
    }

    #[test]
    fn extremes_give_nan() {
        for at in [0, 5, 99] {
            for (shape, axis) in [([1, 100], 1), ([100, 1], 0), ([50, 2], 0), ([2, 50], 1)] {
                let mut x = vec![1.0; 100];
                x[at] = f32::NAN;
                for kind in [ReduceKind::Max, ReduceKind::Min] {
                    assert!(run(kind, &shape, &[axis], &x, &Cx::serial()).iter().any(|v| v.is_nan()));
                }
            }
        }
    }
}
