//! Weights in the order in which windows are: taps row by row, the channels of each.
//!
//! They are stored as `[c_out, c_in, taps]`. A copy of them, made once a pass, has for each filter the channels of a tap
//! side by side, so that the product reads it as a plain matrix. With one tap they are in that order as they are.

use polyreme_dtype::bf16;

use super::super::Conv2d;
use super::super::geometry::Direction;
use super::windows::dims;
use crate::Cx;
use crate::cx::SharedMut;

/// Filters that one task copies have at least this many weights: about 15 µs.
const TASK_MIN: usize = 1 << 15;

/// Floats of scratch that the copy takes.
pub(super) fn copy_len(s: &Conv2d) -> usize {
    if s.kh * s.kw == 1 { 0 } else { s.weight_len().div_ceil(2).next_multiple_of(16) }
}

/// The weights as windows of this direction read them: `[c_out, tap, c_in]` forward and `[tap, c_out, c_in]` backward, the
/// taps of a phase behind those of the phases before it.
pub(super) fn in_order<'a>(
    s: &Conv2d,
    way: Direction,
    cx: &Cx,
    weight: &'a [bf16],
    scratch: &'a mut [f32],
) -> &'a [bf16] {
    let taps = s.kh * s.kw;
    if taps == 1 {
        return weight;
    }
    assert!(scratch.len() >= copy_len(s), "the scratch has room for the weights");
    // SAFETY: two of them fit into a float, any bits are one, and the scratch is borrowed for as long as they are.
    let copy = unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast::<bf16>(), weight.len()) };
    let shared = SharedMut::new(copy);
    let (filter, tap) = match way {
        Direction::Forward => (taps * s.c_in, s.c_in),
        Direction::Backward => (s.c_in, s.c_out * s.c_in),
    };
    let per_task = TASK_MIN.div_ceil(taps * s.c_in);
    cx.par.run(s.c_out.div_ceil(per_task), &|task, _| {
        for co in task * per_task..((task + 1) * per_task).min(s.c_out) {
            let from = &weight[co * taps * s.c_in..][..taps * s.c_in];
            let mut position = 0;
            each_tap(s, way, |k| {
                // SAFETY: each tap of each filter has its own place, and each filter is in one task.
                let to = unsafe { shared.slice(co * filter + position * tap, s.c_in) };
                for (to, from) in to.iter_mut().zip(from.chunks_exact(taps)) {
                    *to = from[k];
                }
                position += 1;
            });
        }
    });
    copy
}

/// Calls `f` with the taps of the kernel in the order of windows, phase by phase.
fn each_tap(s: &Conv2d, way: Direction, mut f: impl FnMut(usize)) {
    let (rows, cols) = dims(s, way);
    for (rh, rw) in phases(s, way) {
        let (lh, lw) = (rows.lattice(rh), cols.lattice(rw));
        for i in 0..lh.taps {
            for j in 0..lw.taps {
                f(lh.tap(i) * s.kw + lw.tap(j));
            }
        }
    }
}

/// All pairs of a row's and a column's phase.
pub(super) fn phases(s: &Conv2d, way: Direction) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (rows, cols) = dims(s, way);
    (0..rows.phases()).flat_map(move |rh| (0..cols.phases()).map(move |rw| (rh, rw)))
}
