//! Forward and input gradient with more channels than tiles: tiles are transformed once, and a task takes a few of the
//! channels made through all the rest.
//!
//! 36 transformed floats stand for 9 weights: 38 MB with 512 channels on both sides. Transformed once for all tasks they would
//! be written to memory, read back by each block of tiles, and travel between the caches of the cores. Here a task transforms
//! the filters of its own channels, multiplies all tiles by them while they are near, and forgets them. What is shared are the
//! transformed tiles, which are fewer: 2 MB for 8 images of 7x7. Milliseconds of 3x3 convolutions of 8 images on one and two
//! threads, by tiles and by channels, input gradient, on a Zen 4 whose two cores seem to share no cache:
//!
//! | | by tiles | by channels |
//! |---|---|---|
//! | 7x7, 512 channels | 10.5, 11.8 | 7.3, 4.2 |
//! | 14x14, 256 channels | 6.5, 5.5 | 6.4, 4.5 |
//!
//! Each sum is the same as by tiles, in the same order: the bits are the same.

use super::super::Operands;
use super::super::micro::{self, padded};
use super::{Correlate, POINTS, Planes, SKEW};
use crate::Cx;
use crate::cx::SharedMut;
use crate::floats::{Floats, SharedFloats, each};
use std::ops::Range;

/// Tiles that one task transforms.
const TRANSFORM_TILES: usize = 8;
/// Tiles that are multiplied before they are transformed back: two rows of register tiles with AVX-512, so that what they
/// made, 130 KB, is still in L2.
const BLOCK: usize = 28;
/// With fewer tasks than this, a task takes one panel and not two.
const TASKS_MIN: usize = 8;

impl Correlate {
    /// Whether the transformed tiles are fewer than the transformed filters.
    pub(super) fn goes_by_channels(&self) -> bool {
        self.c_made > self.tiling.count()
    }

    /// Channels that one task makes.
    fn task_channels(&self) -> usize {
        let few = self.c_made.div_ceil(micro::STRIP_MAX) < TASKS_MIN;
        if few { micro::PANEL } else { micro::STRIP_MAX }
    }

    fn tiles_plane(&self) -> usize {
        self.tiling.count() * padded(self.c_read) + SKEW
    }

    fn filters_plane(&self) -> usize {
        self.c_read * self.task_channels() + SKEW
    }

    fn block_plane(&self) -> usize {
        BLOCK * self.task_channels() + SKEW
    }

    /// Floats of what all workers share, and of what each has, without what halves need.
    pub(super) fn lens_by_channels(&self) -> (usize, usize) {
        (POINTS * self.tiles_plane(), POINTS * (self.filters_plane() + self.block_plane()))
    }

    pub(super) fn run_by_channels(&self, cx: &Cx, operands: Operands, zeros: &[f32], scratch: &mut [f32]) {
        let Operands { read, weight, bias, made, epilogue } = operands;
        let (tiles, c_task) = (self.tiling.count(), self.task_channels());
        let (shared_len, planes_len) = self.lens_by_channels();
        let (u, own) = scratch.split_at_mut(shared_len);
        let (u, own, made) = (SharedMut::new(u), SharedMut::new(own), SharedFloats::new(made));
        let stages_len = if !read.is_half() && made.is_f32() { 0 } else { self.stages_len() };
        let own_len = planes_len + stages_len;
        // The transformed tiles from `tile` on.
        let tiles_from = |tile: usize| Planes {
            ptr: u.as_mut_ptr().wrapping_add(tile * padded(self.c_read)),
            plane: self.tiles_plane(),
            pitch: padded(self.c_read),
        };
        cx.par.run(tiles.div_ceil(TRANSFORM_TILES), &|task, worker| {
            let from = task * TRANSFORM_TILES;
            let to = (from + TRANSFORM_TILES).min(tiles);
            // SAFETY: this runs only on a CPU with AVX2; tiles are disjoint rows of the planes; a worker runs one task at a
            // time.
            unsafe {
                let stages = &mut own.slice(worker * own_len, own_len)[planes_len..];
                self.transform_patches(cx.isa, read, zeros, from, to, tiles_from(from), stages);
            }
        });
        each!(Floats, weight, weight => cx.par.run(self.c_made.div_ceil(c_task), &|task, worker| {
            // SAFETY: a worker runs one task at a time.
            let own = unsafe { own.slice(worker * own_len, own_len) };
            let (filters, rest) = own.split_at_mut(POINTS * self.filters_plane());
            let (m, stages) = rest.split_at_mut(POINTS * self.block_plane());
            let channels: Range<usize> = task * c_task..((task + 1) * c_task).min(self.c_made);
            for idx in channels.start / micro::PANEL..channels.end.div_ceil(micro::PANEL) {
                let out = filters[self.c_read * (idx * micro::PANEL - channels.start)..].as_mut_ptr();
                // SAFETY: this runs only on a CPU with AVX2; every plane of the filters has these panels.
                unsafe {
                    self.transform_filters(cx.isa, weight, idx, 0, self.c_read, out, self.filters_plane());
                }
            }
            let filters = (filters.as_ptr(), self.filters_plane());
            let m = Planes { ptr: m.as_mut_ptr(), plane: self.block_plane(), pitch: c_task };
            for from in (0..tiles).step_by(BLOCK) {
                let to = (from + BLOCK).min(tiles);
                // SAFETY: as above; the tiles are transformed, and only read now; each task makes its own channels.
                unsafe {
                    self.multiply(cx.isa, filters, channels.len(), to - from, zeros, tiles_from(from), m);
                    let channels = channels.clone();
                    self.transform_tiles(cx.isa, m, from, to, channels, bias, made, epilogue, stages);
                }
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{Conv2d, ConvPass};
    use super::*;
    use crate::lanes::testing::{Reverse, data};
    use crate::{FloatsMut, Isa};

    /// Both orders make the same bits, whichever the shape would take.
    #[test]
    fn both_orders_give_the_same_bits() {
        for (n, h, w, c_in, c_out) in
            [(1, 4, 4, 16, 16), (2, 9, 7, 17, 90), (5, 12, 13, 40, 33), (1, 30, 30, 16, 260)]
        {
            let s = Conv2d {
                n,
                h,
                w,
                c_in,
                c_out,
                kh: 3,
                kw: 3,
                stride: (1, 1),
                padding: (1, 1),
                dilation: (1, 1),
                groups: 1,
                strict: false,
            };
            for pass in [ConvPass::Forward, ConvPass::GradInput] {
                let forward = pass == ConvPass::Forward;
                let (read, made_len) = if forward { (s.x_len(), s.y_len()) } else { (s.y_len(), s.x_len()) };
                let (read, weight) = (data(1, read), data(2, s.weight_len()));
                let c = Correlate::new(&s, pass);
                let zeros = vec![0.0; c.zeros_len()];
                let run = |isa: Isa, workers: usize, by_channels: bool| {
                    let (shared, own) = if by_channels { c.lens_by_channels() } else { c.lens_by_tiles() };
                    let mut scratch = vec![f32::NAN; shared + workers * own];
                    let mut made = vec![f32::NAN; made_len];
                    let operands = Operands {
                        read: Floats::F32(&read),
                        weight: Floats::F32(&weight),
                        bias: None,
                        made: FloatsMut::F32(&mut made),
                        epilogue: None,
                    };
                    let cx = Cx { isa, par: &Reverse(workers) };
                    match by_channels {
                        true => c.run_by_channels(&cx, operands, &zeros, &mut scratch),
                        false => c.run_by_tiles(&cx, operands, &zeros, &mut scratch),
                    }
                    made.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                };
                for isa in Isa::available().filter(|isa| isa.has_avx2()) {
                    let want = run(isa, 1, false);
                    assert!(want.iter().all(|v| f32::from_bits(*v).is_finite()));
                    for workers in [1, 3] {
                        assert!(run(isa, workers, true) == want, "{pass:?} of {s:?} on {}", isa.name());
                    }
                }
            }
        }
    }
}
