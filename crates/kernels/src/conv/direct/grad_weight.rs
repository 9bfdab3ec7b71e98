//! The weight gradient without packing: a tile is some consecutive floats of the patch by 16 channels of `dy`, and the
//! sum runs over pixels. Both operands are read in place, or if they are in half, from the scratch that a unit's rows
//! are widened into.
//!
//! Determinism: the units of work (some rows of an image) are cut into at most [`SLABS_MAX`] slabs by shape alone. Each
//! slab sums its units in order into its own partial gradient, `[group][panel][patch][lanes]`, and the partials are
//! added in the slabs' order. Where the weights are so many that few partials fit, tasks are also cut by panels.

use super::super::Conv2d;
use super::super::geometry::{Direction, pieces};
use super::super::micro::{self, ALIGN_SLACK, Lanes, Loops, Strip, Sweep, aligned, padded, panel};
use super::{Gather, View, turn};
use crate::cx::SharedMut;
use crate::floats::Floats;
use crate::{Cx, Isa};

/// Enough for 16 workers.
const SLABS_MAX: usize = 16;
/// Floats in all partial gradients together: half of a 32 MB L3.
const PARTIALS_MAX: usize = 1 << 22;

/// From this patch length on, a panel of `dy` is copied together before it is read `patch / 6` times: with a power of
/// two of channels its rows fall into few sets of the L1 cache. Measured, 28x28, 128 to 256 channels,
/// 3x3, stride 2, batch 4: 8.6 ms without, 6.3 with.
const PACK_PATCH_MIN: usize = 96;

/// Floats of a vector.
const LANES: usize = 16;

struct WeightCut {
    gather: Gather,
    /// Panels of one group, and of all.
    group_panels: usize,
    n_panels: usize,
    /// Floats of a group's and of a whole partial gradient.
    group_len: usize,
    partial_len: usize,
    slabs: usize,
    units_per_slab: usize,
    panels_per_task: usize,
    /// Whether panels of `dy` are copied together.
    packs: bool,
    /// Whether, with AVX-512, lanes are floats of the patch and rows are channels of `dy`: where the runs of the patch
    /// fill vectors better than the channels do. A partial gradient is then `[group][channel][patch]`.
    turns: bool,
}

impl WeightCut {
    fn new(s: &Conv2d) -> WeightCut {
        let gather = Gather::new(s, Direction::Forward);
        let c_out = s.c_out / s.groups;
        let group_panels = c_out.div_ceil(micro::PANEL);
        let n_panels = group_panels * s.groups;
        let group_len = gather.patch_len() * padded(c_out);
        let partial_len = group_len * s.groups;
        let units = gather.n * gather.units_per_image();
        let slabs =
            SLABS_MAX.min(units.div_ceil(gather.units_per_task())).min(PARTIALS_MAX / partial_len.max(1));
        let units_per_slab = units.div_ceil(slabs.max(1));
        let slabs = units.div_ceil(units_per_slab.max(1));
        // With fewer slabs than workers might be, cut the panels too, but not below two: each cut reads x again.
        let parts = SLABS_MAX.div_ceil(slabs.max(1)).min(n_panels.div_ceil(2)).max(1);
        // Each part is worth a task.
        let parts = parts.min(gather.parts_max() / slabs.max(1)).max(1);
        let panels_per_task = n_panels.div_ceil(parts).max(1);
        let packs = gather.patch_len() >= PACK_PATCH_MIN && s.c_out > micro::PANEL;
        let filled = |len: usize| len as f32 / len.next_multiple_of(LANES) as f32;
        let turns = c_out < LANES && filled(run(s).1) >= 1.25 * filled(c_out);
        WeightCut {
            gather,
            group_panels,
            n_panels,
            group_len,
            partial_len,
            slabs,
            units_per_slab,
            panels_per_task,
            packs,
            turns,
        }
    }

    fn view_len(&self) -> usize {
        self.gather.view_len().next_multiple_of(16)
    }

    fn pack_len(&self) -> usize {
        if self.packs { self.gather.unit_rows * self.gather.cols.made() * micro::STRIP_MAX } else { 0 }
    }

    fn parts(&self) -> usize {
        self.n_panels.div_ceil(self.panels_per_task)
    }
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, half: bool, workers: usize) -> usize {
    let cut = WeightCut::new(s);
    let stage = if half { cut.gather.made_stage_len() } else { 0 };
    cut.slabs * cut.partial_len + workers * (cut.view_len() + cut.pack_len() + stage) + ALIGN_SLACK
}

/// `dweight` from `x` and `dy`.
pub(in super::super) fn grad_weight(
    s: &Conv2d,
    cx: &Cx,
    x: Floats,
    dy: Floats,
    dweight: &mut [f32],
    scratch: &mut [f32],
) {
    let cut = WeightCut::new(s);
    let gather = &cut.gather;
    let n_units = gather.n * gather.units_per_image();
    let stage_len = if dy.is_half() { gather.made_stage_len() } else { 0 };
    let own_len = cut.view_len() + cut.pack_len() + stage_len;
    let (partials, own) = aligned(scratch).split_at_mut(cut.slabs * cut.partial_len);
    {
        let (partials, own) = (SharedMut::new(partials), SharedMut::new(own));
        let c_out = s.c_out / s.groups;
        cx.par.run(cut.slabs * cut.parts(), &|task, worker| {
            let (slab, part) = (task / cut.parts(), task % cut.parts());
            // SAFETY: a worker runs one task at a time.
            let own = unsafe { own.slice(worker * own_len, own_len) };
            let (buffer, rest) = own.split_at_mut(cut.view_len());
            let (packed, stage) = rest.split_at_mut(cut.pack_len());
            for unit in slab * cut.units_per_slab..((slab + 1) * cut.units_per_slab).min(n_units) {
                let (image, from, to) = gather.unit(unit);
                let view = View::new(gather, cx.isa, x, image, from, to, buffer);
                let pixel = (image * s.out_h() + from) * s.out_w();
                let len = (to - from) * s.out_w() * s.c_out;
                let dy = dy.staged(cx.isa, pixel * s.c_out, len, stage);
                if cut.turns && cx.isa.has_avx512() {
                    // With few channels there is one panel per group, and it is not split.
                    for group in part * cut.panels_per_task..((part + 1) * cut.panels_per_task).min(s.groups)
                    {
                        let start = slab * cut.partial_len + group * cut.group_len;
                        // SAFETY: groups of a slab are disjoint and belong to one task.
                        let sums = unsafe { partials.slice(start, gather.patch_len() * c_out) };
                        let add = unit > slab * cut.units_per_slab;
                        // SAFETY: the CPU has AVX-512; `dy` and the view are of these rows.
                        unsafe { add_unit_turned(s, gather, &view, dy, group, from, to, sums, add) };
                    }
                    continue;
                }
                let last = ((part + 1) * cut.panels_per_task).min(cut.n_panels);
                let mut idx = part * cut.panels_per_task;
                while idx < last {
                    let (group, first) = (idx / cut.group_panels, idx % cut.group_panels);
                    let end = (first + last - idx).min(cut.group_panels);
                    let strip = Strip::at(cx.isa, c_out, first, end);
                    idx += strip.panels();
                    let start =
                        slab * cut.partial_len + group * cut.group_len + gather.patch_len() * strip.first;
                    // SAFETY: panels of a slab are disjoint and belong to one task.
                    let sums = unsafe { partials.slice(start, gather.patch_len() * strip.width) };
                    let add = unit > slab * cut.units_per_slab;
                    let dy = &dy[group * c_out + strip.first..];
                    let dy = if cut.packs {
                        Channels::pack(dy, s.c_out, strip, (to - from) * s.out_w(), packed)
                    } else {
                        Channels { ptr: dy.as_ptr(), pixel: s.c_out, panel: micro::PANEL, lanes: strip.lanes }
                    };
                    // SAFETY: this runs only on a CPU with AVX2; `dy` and the view are of these rows.
                    unsafe { add_unit(s, cx.isa, gather, &view, dy, group, strip, from, to, sums, add) };
                }
            }
        });
    }
    finish(s, cx, &cut, cut.turns && cx.isa.has_avx512(), partials, dweight);
}

/// One strip of `dy`: pixel after pixel, of which `lanes` floats may be read.
#[derive(Clone, Copy)]
struct Channels {
    ptr: *const f32,
    /// Floats from one pixel to the next, and from one panel to the next.
    pixel: usize,
    panel: usize,
    lanes: usize,
}

impl Channels {
    /// A strip's channels of `n_px` pixels, copied together by panels.
    fn pack(dy: &[f32], c_out: usize, strip: Strip, n_px: usize, packed: &mut [f32]) -> Channels {
        let width = strip.panel_width();
        for (i, packed) in packed.chunks_exact_mut(n_px * width).take(strip.panels()).enumerate() {
            let (first, lanes) = (i * width, (strip.lanes - i * width).min(width));
            for (target, source) in packed.chunks_exact_mut(width).zip(dy.chunks(c_out)) {
                target[..lanes].copy_from_slice(&source[first..first + lanes]);
                target[lanes..].fill(0.0);
            }
        }
        Channels { ptr: packed.as_ptr(), pixel: width, panel: n_px * width, lanes: strip.width }
    }
}

/// Adds one unit's share to one strip of a partial gradient.
///
/// # Safety
/// `isa` has AVX2; the view and `dy` are of rows `from..to`.
unsafe fn add_unit(
    s: &Conv2d,
    isa: Isa,
    gather: &Gather,
    view: &View,
    dy: Channels,
    group: usize,
    strip: Strip,
    from: usize,
    to: usize,
    sums: &mut [f32],
    add: bool,
) {
    let c_in = s.c_in / s.groups;
    let (lh, lw) = (gather.rows.lattice(0), gather.cols.lattice(0));
    let (inner, len) = run(s);
    let sweep = Sweep {
        lines: to - from,
        pixels: lw.count,
        a_line: lh.read_step * view.row,
        a_pixel: lw.read_step * s.c_in,
        b_line: s.out_w() * dy.pixel,
        b_pixel: dy.pixel,
        b_panel: dy.panel,
        out_panel: gather.patch_len() * micro::PANEL,
    };
    for (kh, kw) in (0..s.kh * inner).map(|i| (i / inner, i % inner)) {
        let row = lh.read_first + (from * lh.read_step + kh * lh.tap_step) as isize;
        let col = lw.read_first + (kw * lw.tap_step) as isize;
        for (at, rows) in pieces(len, micro::rows_max(isa, strip.width)) {
            let sums = &mut sums[((kh * inner + kw) * len + at) * strip.panel_width()..];
            // SAFETY: the view covers every tap of these rows; `dy` has every pixel; each panel of the sums has the rows.
            unsafe {
                let a = view.at(row, col, group * c_in + at);
                micro::reduce(isa, rows, strip.width, dy.lanes, &sweep, a, dy.ptr, sums.as_mut_ptr(), add);
            }
        }
    }
}

/// How many contiguous runs a row of the kernel reads, and how long they are: neighbouring taps of all channels are one.
fn run(s: &Conv2d) -> (usize, usize) {
    let c_in = s.c_in / s.groups;
    if s.dilation.1 == 1 && s.groups == 1 { (1, s.kw * c_in) } else { (s.kw, c_in) }
}

/// As [`add_unit`], with lanes along the patch: `sums[channel][patch]`.
///
/// # Safety
/// The CPU has AVX-512; the view and `dy` are of rows `from..to`.
unsafe fn add_unit_turned(
    s: &Conv2d,
    gather: &Gather,
    view: &View,
    dy: &[f32],
    group: usize,
    from: usize,
    to: usize,
    sums: &mut [f32],
    add: bool,
) {
    let (c_in, c_out) = (s.c_in / s.groups, s.c_out / s.groups);
    let (lh, lw) = (gather.rows.lattice(0), gather.cols.lattice(0));
    let (inner, len) = run(s);
    let loops = Loops {
        outer: 0..to - from,
        middle: 1,
        inner: lw.count,
        a: [lh.read_step * view.row, 0, lw.read_step * s.c_in],
        b: [s.out_w() * s.c_out, 0, s.c_out],
    };
    let per_run = len.div_ceil(LANES);
    for (first, n) in pieces(s.kh * inner * per_run, micro::VECTORS_MAX) {
        let lanes: [Lanes; micro::VECTORS_MAX] = std::array::from_fn(|i| {
            let idx = first + i.min(n - 1);
            let (tap, at) = (idx / per_run, idx % per_run * LANES);
            let row = lh.read_first + (from * lh.read_step + tap / inner * lh.tap_step) as isize;
            let col = lw.read_first + (tap % inner * lw.tap_step) as isize;
            // SAFETY: the view covers every tap of these rows.
            let a = unsafe { view.at(row, col, group * c_in + at) };
            Lanes { a, out: tap * len + at, len: (len - at).min(LANES), active: loops.outer.clone() }
        });
        for (c, rows) in pieces(c_out, micro::ROWS_MAX) {
            let sums = &mut sums[c * gather.patch_len()..][..rows * gather.patch_len()];
            let b = dy[group * c_out + c..].as_ptr();
            // SAFETY: the view has every pixel's patch, `dy` every pixel; `sums` has `rows` whole patches.
            unsafe {
                micro::along(rows, &loops, &lanes[..n], b, None, sums.as_mut_ptr(), gather.patch_len(), add);
            }
        }
    }
}

/// Adds the partial gradients in order and converts them to OIHW, one panel per task.
fn finish(s: &Conv2d, cx: &Cx, cut: &WeightCut, turned: bool, partials: &[f32], dweight: &mut [f32]) {
    let (c_in, c_out, taps) = (s.c_in / s.groups, s.c_out / s.groups, s.kh * s.kw);
    let filter = c_in * taps;
    let dweight = SharedMut::new(dweight);
    cx.par.run(cut.n_panels, &|idx, _| {
        let (group, (first, width, lanes)) = (idx / cut.group_panels, panel(c_out, idx % cut.group_panels));
        // SAFETY: panels are disjoint ranges of output channels.
        let out = unsafe { dweight.slice((group * c_out + first) * filter, lanes * filter) };
        let partials = &partials[group * cut.group_len + filter * first..];
        if lanes == micro::PANEL && !turned {
            let (mut ci, mut tap) = (0, 0);
            let sum = |_, to: &mut [f32; micro::PANEL]| {
                *to = [0.0; micro::PANEL];
                let at = (tap * c_in + ci) * micro::PANEL;
                for partial in partials.chunks(cut.partial_len) {
                    to.iter_mut().zip(&partial[at..at + micro::PANEL]).for_each(|(v, p)| *v += p);
                }
                tap += 1;
                if tap == taps {
                    (ci, tap) = (ci + 1, 0);
                }
            };
            // SAFETY: this runs only on a CPU with AVX2; the rows are those of 16 channels.
            return unsafe { turn::from_panel(sum, filter, out.as_mut_ptr(), filter) };
        }
        for at in 0..filter {
            let (tap, ci) = (at / c_in, at % c_in);
            let mut sum = [0.0; micro::PANEL];
            for partial in partials.chunks(cut.partial_len) {
                if turned {
                    for lane in 0..lanes {
                        sum[lane] += partial[lane * filter + at];
                    }
                } else {
                    for (v, p) in sum.iter_mut().zip(&partial[at * width..][..width]) {
                        *v += p;
                    }
                }
            }
            for lane in 0..lanes {
                out[lane * filter + ci * taps + tap] = sum[lane];
            }
        }
    });
}
