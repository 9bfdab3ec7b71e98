//! Convolution by register tiles that read patches in place.
//!
//! With channels last, the patch of an output pixel is, for each kernel row, one contiguous run of `kw · c` floats, and
//! the patch of its right neighbour is the same run shifted by `stride · c`. So a tile of 6 pixels by 16 output
//! channels is a small matrix product whose left side needs no packing: six pointers a fixed distance apart. Only the
//! weights are repacked, into panels `[kh][kw][c][16]`, once per call. With dilation or groups the runs are `c /
//! groups` long, one per tap; nothing else changes.
//!
//! Padding is a copy: a task makes a few rows of one image, and if any of their patches leaves the image it first
//! copies the rows it will read, with zeros around, into its scratch. That *view* is small (a few rows) and is read
//! `kh · kw · c_out` times.
//!
//! Where few channels are made, lanes are pixels instead, with AVX-512; see [`planar`].
//!
//! The input gradient is the same code on another [`SpatialDim`]; see `geometry`. The weight gradient is in [`grad_weight`].
//!
//! A task is some rows of some images, by shape alone, and where these are few, as with one image, some of the channels
//! made; each output is summed by one task, in the order of its patch.

mod grad_weight;
mod planar;
pub(super) mod turn;
mod view;

pub(super) use grad_weight::grad_weight;
pub(super) use view::View;

use super::geometry::{Direction, SpatialDim, pieces};
use super::micro::{self, ALIGN_SLACK, GatherTarget, GatherWalk, Strip, aligned, padded, panel, strips};
use super::{Conv2d, ConvPass, Operands};
use crate::cx::SharedMut;
use crate::floats::{Float, Floats, SharedFloats, each};
use crate::{Cx, Isa};
use std::ops::Range;

/// Multiply-adds that make a task worth starting: about 10 µs.
const TASK_MACS_MIN: usize = 1 << 19;
/// Enough tasks for 16 workers: with fewer, channels are cut too. Each part copies its unit's view again, if that must be
/// copied.
const TASKS_MIN: usize = 16;
/// Floats of weights that are cut into two parts in any case: 4 MB. Half of the workers read one half then, which they also
/// packed, and does not travel between the caches of cores. Measured on two cores, 8 images of
/// 14x14, stride 2, ms forward and input gradient: 3x3 of 512 channels 12.6 and 13.4 uncut, 10.1 and 10.6 cut; 1x1 of 1024 to
/// 2048 12.0 and 16.4, cut 7.9 and 13.4.
const HEAVY: usize = 1 << 20;
/// Floats that the rows made by one unit may take: they are still in L2 when the epilogue comes.
const UNIT_MADE_MAX: usize = 1 << 15;
/// Floats that a view may take: half of a 512 KB L2, beside the panel of weights and the rows made.
const VIEW_MAX: usize = 1 << 16;

/// The most taps of kernels whose weights are repacked by squares.
const TAPS_MAX: usize = 128;

/// Terms that a strict convolution sums at once, before they are added to the sum of the others: the error grows with the
/// root of it. With 256 channels it is 8.3e-7 of the result's root mean square in one sum.
const SEGMENT: usize = 128;

/// Weights that are worth a task to repack: about 15 µs.
const PACK_MIN: usize = 1 << 14;

/// A convolution as a gather: what is read, what is made, and how the weights are strided.
#[derive(Clone, Debug)]
pub(super) struct Gather {
    pub(super) n: usize,
    pub(super) rows: SpatialDim,
    pub(super) cols: SpatialDim,
    /// Channels read, over all groups.
    pub(super) c_read: usize,
    /// Channels made, over all groups.
    pub(super) c_made: usize,
    pub(super) groups: usize,
    /// Floats between the weights of neighbouring channels made, and read.
    made_step: usize,
    read_step: usize,
    /// Rows made by one unit of work, at most.
    pub(super) unit_rows: usize,
    /// Whether sums are cut into segments.
    segmented: bool,
}

impl Gather {
    /// The gather behind a pass.
    pub(super) fn new(s: &Conv2d, way: Direction) -> Gather {
        let rows = SpatialDim {
            way,
            input: s.h,
            output: s.out_h(),
            k: s.kh,
            stride: s.stride.0,
            padding: s.padding.0,
            dilation: s.dilation.0,
        };
        let cols = SpatialDim {
            way,
            input: s.w,
            output: s.out_w(),
            k: s.kw,
            stride: s.stride.1,
            padding: s.padding.1,
            dilation: s.dilation.1,
        };
        let taps = s.kh * s.kw;
        let filter = s.c_in / s.groups * taps;
        let (c_read, c_made, made_step, read_step) = match way {
            Direction::Forward => (s.c_in, s.c_out, filter, taps),
            Direction::Backward => (s.c_out, s.c_in, taps, filter),
        };
        let mut gather = Gather {
            n: s.n,
            rows,
            cols,
            c_read,
            c_made,
            groups: s.groups,
            made_step,
            read_step,
            unit_rows: 1,
            segmented: s.strict && taps * c_read / s.groups > SEGMENT,
        };
        if gather.made_len() > 0 {
            // The most rows that keep both the view and what is made in cache.
            while gather.unit_rows < rows.made()
                && (gather.unit_rows + 1) * cols.made() * c_made <= UNIT_MADE_MAX
                && rows.reads_max(gather.unit_rows + 1) * gather.view_row_len() <= VIEW_MAX
            {
                gather.unit_rows += 1;
            }
            // Units of even height.
            gather.unit_rows = rows.made().div_ceil(rows.made().div_ceil(gather.unit_rows));
        }
        gather
    }

    fn made_len(&self) -> usize {
        self.n * self.rows.made() * self.cols.made() * self.c_made
    }

    fn view_row_len(&self) -> usize {
        self.cols.reads_max(self.cols.made().max(1)) * self.c_read
    }

    /// Floats of the largest view.
    pub(super) fn view_len(&self) -> usize {
        if self.made_len() == 0 { 0 } else { self.rows.reads_max(self.unit_rows) * self.view_row_len() }
    }

    /// Units of work in one image.
    pub(super) fn units_per_image(&self) -> usize {
        self.rows.made().div_ceil(self.unit_rows)
    }

    /// The image and the rows of a unit.
    pub(super) fn unit(&self, idx: usize) -> (usize, usize, usize) {
        let from = idx % self.units_per_image() * self.unit_rows;
        (idx / self.units_per_image(), from, (from + self.unit_rows).min(self.rows.made()))
    }

    /// Units that one task takes.
    pub(super) fn units_per_task(&self) -> usize {
        TASK_MACS_MIN.div_ceil(self.unit_macs().max(1))
    }

    /// Multiply-adds of a unit.
    fn unit_macs(&self) -> usize {
        self.unit_rows * self.cols.made() * self.c_made * self.patch_len() / self.phases()
    }

    /// Into how many parts the channels made can be cut, so that each is worth a task.
    pub(super) fn parts_max(&self) -> usize {
        self.n * self.units_per_image() * self.unit_macs() / TASK_MACS_MIN
    }

    /// Pairs of panels of one group.
    fn group_pairs(&self) -> usize {
        (self.c_made / self.groups).div_ceil(micro::STRIP_MAX)
    }

    /// Into how many parts the channels made are cut.
    fn parts(&self) -> usize {
        let tasks = (self.n * self.units_per_image()).div_ceil(self.units_per_task()).max(1);
        let most = (self.groups * self.group_pairs()).min(self.parts_max()).max(1);
        let heavy = self.groups * self.packed_group_len() >= HEAVY;
        let wanted = TASKS_MIN.div_ceil(tasks).max(if heavy { 2 } else { 1 });
        if planar::pays(self) { 1 } else { wanted.min(most) }
    }

    /// The channels of a part, over all groups: whole pairs of panels.
    fn part_channels(&self, part: usize) -> Range<usize> {
        let (pairs, c_group) = (self.group_pairs(), self.c_made / self.groups);
        let first = |part: usize| {
            let pair = self.groups * pairs * part / self.parts();
            pair / pairs * c_group + pair % pairs * micro::STRIP_MAX
        };
        first(part)..first(part + 1)
    }

    fn phases(&self) -> usize {
        self.rows.phases() * self.cols.phases()
    }

    /// All pairs of a row's and a column's phase.
    fn phase_pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let cols = self.cols.phases();
        (0..self.phases()).map(move |i| (i / cols, i % cols))
    }

    /// Weights behind one channel made, over all phases.
    pub(super) fn patch_len(&self) -> usize {
        self.rows.k * self.cols.k * (self.c_read / self.groups)
    }

    fn packed_group_len(&self) -> usize {
        self.patch_len() * padded(self.c_made / self.groups)
    }

    fn shared_len(&self) -> usize {
        self.groups * (self.packed_group_len() + padded(self.c_made / self.groups))
    }

    fn scratch_len(&self, half: bool, workers: usize) -> usize {
        let stages = if half { self.made_stage_len() + self.row_stage_len() } else { 0 };
        self.shared_len() + workers * (self.own_len() + stages) + ALIGN_SLACK
    }

    /// Floats of what a unit makes, if that is not made in place.
    pub(super) fn made_stage_len(&self) -> usize {
        (self.unit_rows * self.cols.made() * self.c_made).next_multiple_of(16)
    }

    /// Floats of a row that is widened on its way into planes.
    fn row_stage_len(&self) -> usize {
        if planar::pays(self) { planar::row_len(self).next_multiple_of(16) } else { 0 }
    }

    /// Floats that a worker has for its views, of whichever kind.
    fn own_len(&self) -> usize {
        let planar = if planar::pays(self) { planar::view_len(self) } else { 0 };
        self.view_len().max(planar).next_multiple_of(16)
    }

    /// Where in a group's packed weights a phase starts, in patch rows.
    fn phase_start(&self, row_phase: usize, col_phase: usize) -> usize {
        let before = self.rows.taps_before(row_phase) * self.cols.k
            + self.rows.lattice(row_phase).taps * self.cols.taps_before(col_phase);
        before * (self.c_read / self.groups)
    }

    /// Repacks one panel of one group's weights: for each phase `[tap row][tap column][channel read][lanes]`.
    ///
    /// # Safety
    /// The CPU has AVX2, and each panel is packed by one task.
    unsafe fn pack<W: Float>(&self, weight: &[W], group: usize, idx: usize, packed: SharedMut<f32>) {
        let (c_read, c_made) = (self.c_read / self.groups, self.c_made / self.groups);
        let filters = weight.len() / self.groups;
        let weight = &weight[group * filters..][..filters];
        let (first, width, lanes) = panel(c_made, idx);
        if let Some(weight) = W::as_f32(weight)
            && lanes == micro::PANEL
            && self.rows.k * self.cols.k <= TAPS_MAX
        {
            // SAFETY: the caller's promise.
            return unsafe { self.pack_whole(&weight[first * self.made_step..], group, first, packed) };
        }
        for (rh, rw) in self.phase_pairs() {
            let (lh, lw) = (self.rows.lattice(rh), self.cols.lattice(rw));
            let len = lh.taps * lw.taps * c_read;
            let start =
                group * self.packed_group_len() + self.phase_start(rh, rw) * padded(c_made) + len * first;
            // SAFETY: panels of a phase are disjoint, and so are phases; each panel is packed by one task.
            let panel = unsafe { packed.slice(start, len * width) };
            for (at, lane) in panel.chunks_exact_mut(width).enumerate() {
                let (c, tap) = (at % c_read, at / c_read);
                let (kh, kw) = (lh.tap(tap / lw.taps), lw.tap(tap % lw.taps));
                let from = c * self.read_step + kh * self.cols.k + kw + first * self.made_step;
                for (l, v) in lane.iter_mut().enumerate() {
                    *v = if l < lanes { weight[from + l * self.made_step].wide() } else { 0.0 };
                }
            }
        }
    }

    /// Repacks a whole panel, whose weights begin with those of its first channel.
    ///
    /// # Safety
    /// As for `pack`; the panel has 16 channels.
    unsafe fn pack_whole(&self, weight: &[f32], group: usize, first: usize, packed: SharedMut<f32>) {
        let (c_read, c_made) = (self.c_read / self.groups, self.c_made / self.groups);
        let taps = self.rows.k * self.cols.k;
        // Where the first channel read goes, by tap.
        let mut starts = [0; TAPS_MAX];
        for (rh, rw) in self.phase_pairs() {
            let (lh, lw) = (self.rows.lattice(rh), self.cols.lattice(rw));
            let start = group * self.packed_group_len() + self.phase_start(rh, rw) * padded(c_made);
            let start = start + lh.taps * lw.taps * c_read * first;
            for at in 0..lh.taps * lw.taps {
                let tap = lh.tap(at / lw.taps) * self.cols.k + lw.tap(at % lw.taps);
                starts[tap] = start + at * c_read * micro::PANEL;
            }
        }
        // Forward, taps of all channels read are one run; backward, those of one.
        let (runs, run) = if self.read_step == taps { (1, c_read) } else { (c_read, 1) };
        let last = (micro::PANEL - 1) * self.made_step + (runs - 1) * self.read_step + run * taps;
        assert!(last <= weight.len(), "the weights have 16 channels");
        let mut stage = turn::NO_COLUMNS;
        for from in 0..runs {
            let (mut c, mut tap) = (from, 0);
            let target = |_| {
                // SAFETY: panels are disjoint, and so are the rows of one.
                let row = unsafe { packed.slice(starts[tap] + c * micro::PANEL, micro::PANEL) };
                tap += 1;
                if tap == taps {
                    (c, tap) = (c + 1, 0);
                }
                row.as_mut_ptr()
            };
            // SAFETY: the CPU has AVX2; the weights were checked, and targets are rows of 16.
            unsafe {
                let source = weight.as_ptr().add(from * self.read_step);
                turn::into_panel(source, self.made_step, run * taps, &mut stage, target);
            }
        }
    }

    pub(super) fn run(&self, cx: &Cx, operands: Operands, scratch: &mut [f32]) {
        let Operands { read, weight, bias, made, epilogue } = operands;
        let (group_len, lanes) = (self.packed_group_len(), padded(self.c_made / self.groups));
        let (packed, rest) = aligned(scratch).split_at_mut(self.groups * group_len);
        let (init, rest) = rest.split_at_mut(self.groups * lanes);
        let c_group = self.c_made / self.groups;
        for (g, init) in init.chunks_exact_mut(lanes).enumerate() {
            init.fill(0.0);
            if let Some(bias) = bias {
                init[..c_group].copy_from_slice(&bias[g * c_group..][..c_group]);
            }
        }
        {
            let packed = SharedMut::new(packed);
            let group_panels = c_group.div_ceil(micro::PANEL);
            // Small weights are packed by one task.
            let n = self.groups * group_panels;
            let per_task = n.div_ceil(packed.len().div_ceil(PACK_MIN));
            each!(Floats, weight, weight => cx.par.run(n.div_ceil(per_task), &|task, _| {
                for idx in task * per_task..((task + 1) * per_task).min(n) {
                    // SAFETY: this runs only on a CPU with AVX2; each panel is in one task.
                    unsafe { self.pack(weight, idx / group_panels, idx % group_panels, packed) };
                }
            }));
        }
        let (packed, init) = (&*packed, &*init);

        let by_planes = cx.isa.has_avx512() && !self.segmented && planar::pays(self);
        let image_len = self.rows.read() * self.cols.read() * self.c_read;
        let made = SharedFloats::new(made);
        let stages = if !read.is_half() && made.is_f32() {
            (0, 0)
        } else {
            (self.made_stage_len(), self.row_stage_len())
        };
        let own_len = self.own_len() + stages.0 + stages.1;
        let own = SharedMut::new(rest);
        let row_len = self.cols.made() * self.c_made;
        let n_units = self.n * self.units_per_image();
        let (per_task, parts) = (self.units_per_task(), self.parts());
        let per_part = n_units.div_ceil(per_task);
        cx.par.run(per_part * parts, &|task, worker| {
            let (channels, task) = (self.part_channels(task / per_part), task % per_part);
            // SAFETY: a worker runs one task at a time.
            let own = unsafe { own.slice(worker * own_len, own_len) };
            let (buffer, rest) = own.split_at_mut(self.own_len());
            let (made_stage, row_stage) = rest.split_at_mut(stages.0);
            for idx in task * per_task..((task + 1) * per_task).min(n_units) {
                let (image, from, to) = self.unit(idx);
                let (first, len) = ((image * self.rows.made() + from) * row_len, (to - from) * row_len);
                assert!(first + len <= made.len());
                // Where the unit is made: in place, or in scratch.
                let out = match made {
                    SharedFloats::F32(made) => made.as_mut_ptr().wrapping_add(first),
                    _ => made_stage[..len].as_mut_ptr(),
                };
                if by_planes {
                    let image = read.part(image * image_len, image_len);
                    // SAFETY: units are disjoint ranges of rows, and this one is not cut into parts.
                    let out = unsafe { std::slice::from_raw_parts_mut(out, len) };
                    planar::make(cx.isa, self, image, buffer, row_stage, packed, init, from, to, out);
                } else {
                    let view = View::new(self, cx.isa, read, image, from, to, buffer);
                    // SAFETY: this runs only on a CPU with AVX2; the view has all that these rows read; units are disjoint
                    // ranges of rows, and parts of channels.
                    unsafe { self.make(cx.isa, &view, packed, init, from, to, &channels, out) };
                }
                if epilogue.is_none() && made.is_f32() {
                    continue;
                }
                // Rows of all channels are one run.
                let (runs, run_len) = if parts == 1 { (1, len) } else { (len / self.c_made, channels.len()) };
                for at in (0..runs).map(|px| px * self.c_made + channels.start) {
                    // SAFETY: these channels of the unit are this task's, and have just been made.
                    let run = unsafe { std::slice::from_raw_parts_mut(out.add(at), run_len) };
                    if let Some(epilogue) = epilogue {
                        epilogue(first + at, run);
                    }
                    if !made.is_f32() {
                        // SAFETY: as above.
                        unsafe { made.part(first + at, run_len) }.round(cx.isa, run);
                    }
                }
            }
        });
    }

    /// Makes some channels of rows `from..to` of one image.
    ///
    /// # Safety
    /// `isa` has AVX2, and the view is of these rows; `out` has them, and nothing else accesses these channels there.
    unsafe fn make(
        &self,
        isa: Isa,
        view: &View,
        packed: &[f32],
        init: &[f32],
        from: usize,
        to: usize,
        channels: &Range<usize>,
        out: *mut f32,
    ) {
        let (c_read, c_made) = (self.c_read / self.groups, self.c_made / self.groups);
        for (rh, rw) in self.phase_pairs() {
            let (lh, lw) = (self.rows.lattice(rh), self.cols.lattice(rw));
            let start = self.phase_start(rh, rw);
            let len = lh.taps * lw.taps * c_read;
            // Neighbouring taps of all channels are one run.
            let joined = lw.tap_step == 1 && self.groups == 1;
            let walk = GatherWalk {
                row: lw.read_step * self.c_read,
                outer: 0,
                outer_step: lh.tap_step * view.row,
                inner: if joined { lw.taps.min(1) } else { lw.taps },
                inner_step: lw.tap_step * self.c_read,
                len: if joined { lw.taps * c_read } else { c_read },
                b_panel: len * micro::PANEL,
            };
            for (group, strip) in (0..self.groups).flat_map(|g| strips(isa, c_made).map(move |s| (g, s))) {
                let Strip { first, width, lanes } = strip;
                let channel = group * c_made + first;
                if !channels.contains(&channel) {
                    continue;
                }
                let panel = &packed[group * self.packed_group_len() + start * padded(c_made) + len * first..]
                    [..len * width];
                let init = &init[group * padded(c_made) + first..][..width];
                for idx in lh.within(from, to) {
                    let line = lh.made_first + idx * lh.made_step - from;
                    // Rows of padding add nothing. Of columns the view must have the zeros: pixels of a tile go together.
                    let row = lh.read_first + (idx * lh.read_step) as isize;
                    let inside = lh.taps_inside(row, self.rows.read());
                    let walk = GatherWalk { outer: if lw.taps == 0 { 0 } else { inside.len() }, ..walk };
                    let panel = &panel[inside.start * lw.taps * c_read * strip.panel_width()..];
                    for (px, rows) in pieces(lw.count, micro::rows_max(isa, width)) {
                        let column = lw.made_first + px * lw.made_step;
                        let at = (line * self.cols.made() + column) * self.c_made + channel;
                        let last = at + (rows - 1) * lw.made_step * self.c_made + lanes;
                        debug_assert!(last <= (to - from) * self.cols.made() * self.c_made);
                        // SAFETY: the view covers every tap of these pixels; the last row ends inside `out`.
                        unsafe {
                            let a = if walk.outer == 0 {
                                view.ptr
                            } else {
                                view.at(
                                    row + (inside.start * lh.tap_step) as isize,
                                    lw.read_first + (px * lw.read_step) as isize,
                                    group * c_read,
                                )
                            };
                            let target =
                                GatherTarget { ptr: out.add(at), row: lw.made_step * self.c_made, lanes };
                            let (panel, init) = (panel.as_ptr(), init.as_ptr());
                            match self.segmented && walk.outer > 0 {
                                true => segments(isa, rows, strip, &walk, a, panel, init, target),
                                false => micro::gather(isa, rows, width, &walk, a, panel, init, target),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// One tile as [`micro::gather`] makes it, but with at most [`SEGMENT`] terms summed at once.
///
/// # Safety
/// As for `gather`; the walk is not empty.
unsafe fn segments(
    isa: Isa,
    rows: usize,
    strip: Strip,
    walk: &GatherWalk,
    a: *const f32,
    panel: *const f32,
    init: *const f32,
    target: GatherTarget,
) {
    let (zeros, mut tile) = ([0.0f32; micro::STRIP_MAX], [0.0f32; micro::TILE_MAX]);
    assert!(rows * strip.width <= tile.len(), "a tile has at most {} floats", tile.len());
    let GatherWalk { outer, inner, len, .. } = *walk;
    // Whole runs, or whole lines of them, as long as they are short enough.
    let len_step = len.div_ceil(len.div_ceil(SEGMENT));
    let inner_step = if len_step < len { 1 } else { (SEGMENT / len).clamp(1, inner) };
    let outer_step = if inner_step < inner { 1 } else { (SEGMENT / (inner * len)).clamp(1, outer) };
    let steps = |n: usize, step: usize| (0..n).step_by(step).map(move |at| (at, step.min(n - at)));
    for (o, outer_part) in steps(outer, outer_step) {
        for (i, inner_part) in steps(inner, inner_step) {
            for (l, len_part) in steps(len, len_step) {
                let part = GatherWalk { outer: outer_part, inner: inner_part, len: len_part, ..*walk };
                // SAFETY: the segment is a part of the walk; the tile has room for all rows of the strip.
                unsafe {
                    let a = a.add(o * walk.outer_step + i * walk.inner_step + l);
                    let b = panel.add(((o * inner + i) * len + l) * strip.panel_width());
                    if (o, i, l) == (0, 0, 0) {
                        micro::gather(isa, rows, strip.width, &part, a, b, init, target);
                        continue;
                    }
                    let own = GatherTarget { ptr: tile.as_mut_ptr(), row: strip.width, lanes: strip.lanes };
                    micro::gather(isa, rows, strip.width, &part, a, b, zeros.as_ptr(), own);
                    for (r, sums) in tile.chunks_exact(strip.width).take(rows).enumerate() {
                        let to = std::slice::from_raw_parts_mut(target.ptr.add(r * target.row), strip.lanes);
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
                    }
                }
            }
        }
    }
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, pass: ConvPass, half: bool, workers: usize) -> usize {
    match pass {
        ConvPass::Forward => Gather::new(s, Direction::Forward).scratch_len(half, workers),
        ConvPass::GradInput => Gather::new(s, Direction::Backward).scratch_len(half, workers),
        ConvPass::GradWeight => grad_weight::scratch_len(s, half, workers),
    }
}
