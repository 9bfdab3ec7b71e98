//! Rows of pixels from planes of samples, on demand: the few that are in use at a time stay in the cache.

use std::ops::Range;

use polyreme_kernels::jpeg::{double, double_between, half_way, rgb};

use super::{Component, Decoder, Plane, samples};
use crate::images::resize::{ImageSize, Lines, ResizePart};

/// How many rows are kept at least; otherwise twice as many as are requested at once.
const KEPT: usize = 32;
/// Rows with no more colours than this are not blended; libjpeg does the same.
const NARROW: usize = 2;

/// The requested part of an image.
pub(in crate::images) struct Rows<'a> {
    decoder: &'a mut Decoder,
    size: ImageSize,
    part: ResizePart,
    grey: bool,
    /// The chroma, if the image has it.
    colours: Option<Colours>,
    /// Which rows are kept.
    kept: Range<usize>,
}

#[derive(Clone, Copy)]
struct Colours {
    /// Pixels of the image per sample, vertically and horizontally.
    scale: (usize, usize),
    size: ImageSize,
}

impl<'a> Rows<'a> {
    /// The rows of what `decoder` has decoded; `components` are those in its planes.
    pub(super) fn new(
        decoder: &'a mut Decoder,
        size: ImageSize,
        part: ResizePart,
        grey: bool,
        components: &[Component],
    ) -> Rows<'a> {
        let colours = components.get(1).map(|c| Colours { scale: c.scale, size: c.size });
        let kept = part.rows.start..part.rows.start;
        Rows { decoder, size, part, grey, colours, kept }
    }

    /// The size of the whole image.
    pub(in crate::images) fn size(&self) -> ImageSize {
        self.size
    }

    /// Writes all rows of the part.
    pub(in crate::images) fn write(&mut self, out: &mut [u8]) {
        let len = self.part.columns.len() * if self.grey { 1 } else { 3 };
        for (y, out) in self.part.rows.clone().zip(out.chunks_exact_mut(len)) {
            self.row(y, out);
        }
    }

    fn row(&mut self, y: usize, out: &mut [u8]) {
        let Decoder { isa, planes: [luma, planes @ ..], colours: rows, .. } = &mut *self.decoder;
        let luma = luma.row(y, &self.part.columns);
        let Some(Colours { scale, size }) = self.colours else {
            match self.grey {
                true => out.copy_from_slice(luma),
                false => out.chunks_exact_mut(3).zip(luma).for_each(|(out, &level)| out.fill(level)),
            }
            return;
        };
        let columns = samples(&self.part.columns, scale.1, size.width);
        // The nearest row of samples, and the one on the other side of this row.
        let near = y / scale.0;
        let above = y.is_multiple_of(2);
        let far = if above { near.saturating_sub(1) } else { (near + 1).min(size.height - 1) };
        let colour = |plane: &'_ Plane, row: &mut Vec<u8>| {
            row.resize(columns.len() * scale.1, 0);
            let (near, far) =
                (plane.row(near, &columns), plane.row(if scale.0 == 1 { near } else { far }, &columns));
            match scale {
                (1, 1) => row.copy_from_slice(near),
                (_, 1) => half_way(near, far, above, row),
                (_, _) if size.width <= NARROW => {
                    row.chunks_exact_mut(2).zip(near).for_each(|(row, &sample)| row.fill(sample));
                }
                (1, _) => double(*isa, near, row),
                (_, _) => double_between(*isa, near, far, row),
            }
        };
        rows.iter_mut().zip(&*planes).for_each(|(row, plane)| colour(plane, row));
        let first = self.part.columns.start - columns.start * scale.1;
        let [cb, cr] = rows.each_ref().map(|row| &row[first..first + luma.len()]);
        rgb(*isa, luma, cb, cr, out);
    }
}

impl Lines for Rows<'_> {
    fn lines(&mut self, rows: Range<usize>) -> (&[u8], usize) {
        if self.grey {
            let luma = &self.decoder.planes[0];
            return (luma.from(rows.start, self.part.columns.start), luma.stride());
        }
        let stride = 3 * self.part.columns.len();
        let mut kept = std::mem::take(&mut self.decoder.kept);
        let most = KEPT.max(2 * rows.len());
        if kept.len() < most * stride {
            kept.resize(most * stride, 0);
        }
        let at = |y: usize, first: usize| (y - first) * stride;
        if rows.end > self.kept.start + most || rows.start < self.kept.start {
            // Rows that are still needed move to the front.
            let still = rows.start.clamp(self.kept.start, self.kept.end)..self.kept.end;
            let first = self.kept.start;
            kept.copy_within(at(still.start, first)..at(still.end, first), 0);
            self.kept = if still.is_empty() { rows.start..rows.start } else { still };
        }
        while self.kept.end < rows.end {
            let y = self.kept.end;
            let place = at(y, self.kept.start);
            self.row(y, &mut kept[place..place + stride]);
            self.kept.end += 1;
        }
        self.decoder.kept = kept;
        (&self.decoder.kept[at(rows.start, self.kept.start)..], stride)
    }
}
