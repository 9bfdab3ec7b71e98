//! Scaling an image so that it covers a size, and cropping to the middle: what torchvision's `Resize` and `CenterCrop`
//! do, to within one level (they round between the two directions, this does not).
//!
//! Each pixel of the result is a mean of pixels of the source under a triangle that is two pixels wide at the coarser of
//! the two scales (bilinear with antialiasing). The triangle of a pixel is the product of one over rows and one over
//! columns, so a row of the result takes two passes: rows of the source are mixed into one row, and that row is mixed
//! along itself. Nothing outside the crop is computed. With three channels and few weights the row is of i16, else of f32.

use std::ops::Range;

use polyreme_kernels::Isa;
use polyreme_kernels::bytes::mix_rows;
use polyreme_kernels::pixels::{Columns, WEIGHTS_MAX, blend_rows};

/// How an image of one size is scaled to another.
#[derive(Debug)]
pub(super) struct CoverCrop {
    from: ImageSize,
    to: ImageSize,
    /// `None`: nothing is scaled.
    mixes: Option<(Mix, Mix)>,
    /// The same in integers, if there are few weights.
    fixed: Option<Fixed>,
    part: ResizePart,
}

/// Weights in integers.
#[derive(Debug)]
struct Fixed {
    /// One weight per tap, for each row.
    rows: Vec<u16>,
    columns: Columns,
}

/// The part of an image that is needed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ResizePart {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl ResizePart {
    /// The whole image.
    pub(super) fn whole(size: ImageSize) -> ResizePart {
        ResizePart { rows: 0..size.height, columns: 0..size.width }
    }
}

/// A part of an image whose rows are read from top to bottom.
pub(super) trait Lines {
    /// The bytes from the first of `rows` on, and the stride of rows. A row starts with the part's first column.
    fn lines(&mut self, rows: Range<usize>) -> (&[u8], usize);
}

/// A part of an image that is whole in memory.
pub(super) struct Pixels<'a> {
    pub(super) bytes: &'a [u8],
    /// The stride of the image's rows in bytes.
    pub(super) stride: usize,
    /// Where the part starts in it.
    pub(super) first: usize,
}

impl Lines for Pixels<'_> {
    fn lines(&mut self, rows: Range<usize>) -> (&[u8], usize) {
        (&self.bytes[rows.start * self.stride + self.first..], self.stride)
    }
}

impl CoverCrop {
    pub(super) fn new(from: ImageSize, to: ImageSize) -> CoverCrop {
        let whole = from.covering(to);
        let (rows, columns) = (middle(whole.height, to.height), middle(whole.width, to.width));
        if whole == from {
            return CoverCrop { from, to, mixes: None, fixed: None, part: ResizePart { rows, columns } };
        }
        let mixes = (Mix::new(from.height, whole.height, rows), Mix::new(from.width, whole.width, columns));
        let part = ResizePart { rows: mixes.0.reach(), columns: mixes.1.reach() };
        let few = mixes.0.taps.max(mixes.1.taps) <= WEIGHTS_MAX;
        let fixed = few.then(|| Fixed::new(&mixes.0, &mixes.1));
        CoverCrop { from, to, mixes: Some(mixes), fixed, part }
    }

    /// The one in `last`, if it is for these sizes; else a new one, which is then stored there.
    pub(super) fn again(last: &mut Option<CoverCrop>, from: ImageSize, to: ImageSize) -> &CoverCrop {
        if last.as_ref().is_none_or(|cut| (cut.from, cut.to) != (from, to)) {
            *last = None;
        }
        last.get_or_insert_with(|| CoverCrop::new(from, to))
    }

    /// The part of the image that is needed.
    pub(super) fn part(&self) -> &ResizePart {
        &self.part
    }

    /// Scales `source`, which is [`CoverCrop::part`] of an image, so that the image covers the size of `out`, `[height, width,
    /// channels]`, of which the middle is written. `row` and `levels` are memory for rows.
    pub(super) fn write(
        &self,
        isa: Isa,
        source: &mut impl Lines,
        out: &mut [u8],
        channels: usize,
        row: &mut Vec<f32>,
        levels: &mut Vec<i16>,
    ) {
        assert_eq!(out.len(), self.to.pixels() * channels);
        let out_rows = out.chunks_exact_mut(self.to.width * channels);
        let Some((rows, columns)) = &self.mixes else {
            for (y, out) in self.part.rows.clone().zip(out_rows) {
                out.copy_from_slice(&source.lines(y..y + 1).0[..out.len()]);
            }
            return;
        };
        let first = self.part.columns.start;
        let used = self.part.columns.len() * channels;
        if let (3, Some(fixed)) = (channels, &self.fixed) {
            levels.resize(used.max(fixed.columns.reach()), 0);
            for ((&start, weights), out) in
                rows.starts.iter().zip(fixed.rows.chunks_exact(rows.taps)).zip(out_rows)
            {
                let (lines, stride) = source.lines(start..start + rows.taps);
                blend_rows(isa, lines, stride, weights, &mut levels[..used]);
                fixed.columns.blend(isa, levels, out);
            }
            return;
        }
        // One more in each, because pixels of three numbers are read and written four at a time.
        row.clear();
        row.resize(used + 1 + self.to.width * channels + 1, 0.0);
        let (row, means) = row.split_at_mut(used + 1);
        for (y, out) in out_rows.enumerate() {
            let (start, weights) = rows.of(y);
            let (lines, stride) = source.lines(start..start + rows.taps);
            mix_rows(isa, lines, stride, weights, &mut row[..used]);
            match channels {
                1 => mix_columns::<1>(row, first, columns, means),
                _ => mix_columns::<3>(row, first, columns, means),
            }
            for (level, &mean) in out.iter_mut().zip(&*means) {
                *level = nearest(mean);
            }
        }
    }
}

impl Fixed {
    fn new(rows: &Mix, columns: &Mix) -> Fixed {
        // The weights of a row sum to 1, but a single one must fit 16 bits.
        let by_row = rows.fixed(1 << 16).map(|w| w.min(0xffff) as u16);
        let by_column: Vec<i16> = columns.fixed(1 << 14).map(|w| w as i16).collect();
        let first = columns.reach().start;
        let starts: Vec<usize> = columns.starts.iter().map(|start| start - first).collect();
        Fixed { rows: by_row.collect(), columns: Columns::new(&starts, &by_column, columns.taps) }
    }
}

/// The size of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ImageSize {
    pub(crate) height: usize,
    pub(crate) width: usize,
}

impl ImageSize {
    pub(super) fn pixels(self) -> usize {
        self.height * self.width
    }

    /// The smallest size with this one's proportions that covers `to`.
    fn covering(self, to: ImageSize) -> ImageSize {
        if to.height * self.width >= to.width * self.height {
            ImageSize { height: to.height, width: (to.height * self.width / self.height).max(to.width) }
        } else {
            ImageSize { height: (to.width * self.height / self.width).max(to.height), width: to.width }
        }
    }
}

/// The middle `inner` of `outer`; half a pixel is rounded to the even side, as Python rounds.
fn middle(outer: usize, inner: usize) -> Range<usize> {
    let spare = outer - inner;
    let start = spare / 2 + usize::from(spare % 4 == 3);
    start..start + inner
}

/// Which elements of the source make each element of the result along one dim, and with which weights.
#[derive(Debug)]
struct Mix {
    starts: Vec<usize>,
    /// `taps` for each element; a triangle that is narrower has zeros.
    weights: Vec<f32>,
    taps: usize,
}

impl Mix {
    /// From `from` elements to the `part` of `to` elements.
    fn new(from: usize, to: usize, part: Range<usize>) -> Mix {
        let scale = from as f64 / to as f64;
        let reach = scale.max(1.0);
        let triangles: Vec<(usize, Vec<f64>)> =
            part.map(|i| triangle((i as f64 + 0.5) * scale, reach, from)).collect();
        let taps = triangles.iter().map(|(_, weights)| weights.len()).max().unwrap_or(1);
        let (mut starts, mut weights) = (Vec::with_capacity(triangles.len()), Vec::new());
        for (first, triangle) in triangles {
            let start = first.min(from - taps);
            let sum: f64 = triangle.iter().sum();
            weights.extend(std::iter::repeat_n(0.0, first - start));
            weights.extend(triangle.iter().map(|w| (w / sum) as f32));
            starts.push(start);
            weights.resize(starts.len() * taps, 0.0);
        }
        Mix { starts, weights, taps }
    }

    /// All elements of the source that are used.
    fn reach(&self) -> Range<usize> {
        let last = self.starts.last().map_or(0, |start| start + self.taps);
        self.starts.first().map_or(0, |&start| start)..last
    }

    /// The weights in units of which `one` are 1; what rounding leaves goes to the largest.
    fn fixed(&self, one: i32) -> impl Iterator<Item = i32> {
        self.weights.chunks_exact(self.taps).flat_map(move |weights| {
            let mut fixed: Vec<i32> = weights.iter().map(|w| (w * one as f32).round() as i32).collect();
            let rest = one - fixed.iter().sum::<i32>();
            if let Some(largest) = fixed.iter_mut().max() {
                *largest += rest;
            }
            fixed
        })
    }

    fn of(&self, i: usize) -> (usize, &[f32]) {
        (self.starts[i], &self.weights[i * self.taps..][..self.taps])
    }
}

/// The elements under a triangle around `centre` that reaches `reach` to both sides, cut off at `0..n`.
fn triangle(centre: f64, reach: f64, n: usize) -> (usize, Vec<f64>) {
    let first = (centre - reach + 0.5).max(0.0) as usize;
    let end = ((centre + reach + 0.5) as usize).min(n);
    let weight = |i: usize| (1.0 - ((i as f64 - centre + 0.5) / reach).abs()).max(0.0);
    let mut weights: Vec<f64> = (first..end).map(weight).collect();
    while weights.len() > 1 && weights.last() == Some(&0.0) {
        weights.pop();
    }
    let zeros = weights.iter().take_while(|&&w| w == 0.0).count().min(weights.len() - 1);
    (first + zeros, weights.split_off(zeros))
}

/// Each pixel of `means` from its pixels of `row`, which starts at column `first`.
fn mix_columns<const C: usize>(row: &[f32], first: usize, columns: &Mix, means: &mut [f32]) {
    let weights = columns.weights.chunks_exact(columns.taps);
    for (x, (&start, weights)) in columns.starts.iter().zip(weights).enumerate() {
        mix_pixel::<C>(&row[(start - first) * C..], weights, &mut means[x * C..]);
    }
}

#[inline(always)]
fn mix_pixel<const C: usize>(from: &[f32], weights: &[f32], means: &mut [f32]) {
    if C == 1 {
        means[0] = weights.iter().zip(from).map(|(w, v)| w * v).sum();
        return;
    }
    // Four numbers are one vector: the fourth belongs to the next pixel, which overwrites it.
    let mut sums = [0.0; 4];
    for (t, w) in weights.iter().enumerate() {
        for (sum, v) in sums.iter_mut().zip(&from[t * C..t * C + 4]) {
            *sum += w * v;
        }
    }
    means[..4].copy_from_slice(&sums);
}

/// The nearest level. A mean of bytes lies in 0..=255, so after adding 2^23 its nearest integer is the low byte.
fn nearest(mean: f32) -> u8 {
    (mean + 8_388_608.0).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(height: usize, width: usize) -> ImageSize {
        ImageSize { height, width }
    }

    #[test]
    fn a_size_is_covered_as_torchvision_covers_it() {
        for (from, to, want) in [
            (size(375, 500), size(224, 224), size(224, 298)),
            (size(500, 375), size(224, 224), size(298, 224)),
            (size(10, 10), size(4, 4), size(4, 4)),
            (size(10, 10), size(4, 8), size(8, 8)),
            (size(10, 30), size(4, 8), size(4, 12)),
            (size(3, 7), size(100, 100), size(100, 233)),
            (size(1, 16384), size(16384, 1), size(16384, 16384 * 16384)),
        ] {
            assert_eq!(from.covering(to), want, "{from:?} {to:?}");
        }
        // Python: int(round((outer - inner) / 2)).
        for (outer, start) in [(10, 0), (11, 0), (12, 1), (13, 2), (14, 2), (15, 2), (16, 3), (17, 4)] {
            assert_eq!(middle(outer, 10), start..start + 10, "{outer}");
        }
    }

    /// The same by the definition: each pixel by itself, in f64.
    fn naive(source: &[u8], from: ImageSize, to: ImageSize, channels: usize) -> Vec<f64> {
        let whole = from.covering(to);
        let (top, left) = (middle(whole.height, to.height).start, middle(whole.width, to.width).start);
        let along = |i: usize, from: usize, to: usize| {
            let scale = from as f64 / to as f64;
            let centre = (i as f64 + 0.5) * scale;
            let weight = |j: usize| (1.0 - ((j as f64 + 0.5 - centre) / scale.max(1.0)).abs()).max(0.0);
            let weights: Vec<f64> = (0..from).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            weights.into_iter().map(move |w| w / sum).collect::<Vec<_>>()
        };
        let mut out = Vec::new();
        for y in 0..to.height {
            let rows = along(top + y, from.height, whole.height);
            for x in 0..to.width {
                let columns = along(left + x, from.width, whole.width);
                for c in 0..channels {
                    let at = |i: usize, j: usize| source[(i * from.width + j) * channels + c] as f64;
                    let row = |i: usize| columns.iter().enumerate().map(|(j, w)| w * at(i, j)).sum::<f64>();
                    out.push(
                        rows.iter().enumerate().filter(|(_, w)| **w > 0.0).map(|(i, w)| w * row(i)).sum(),
                    );
                }
            }
        }
        out
    }

    #[test]
    fn every_size_is_as_defined() {
        let sizes = [size(1, 1), size(1, 9), size(9, 1), size(5, 5), size(7, 13), size(32, 17), size(20, 40)];
        let (mut row, mut levels) = (Vec::new(), Vec::new());
        for from in sizes {
            for to in sizes {
                for channels in [1, 3] {
                    let source: Vec<u8> =
                        (0..from.pixels() * channels).map(|i| (i * i * 37 + i * 11) as u8).collect();
                    let mut out = vec![0; to.pixels() * channels];
                    let cut = CoverCrop::new(from, to);
                    let (stride, first) = (from.width * channels, cut.part().columns.start * channels);
                    cut.write(
                        Isa::detect(),
                        &mut Pixels { bytes: &source, stride, first },
                        &mut out,
                        channels,
                        &mut row,
                        &mut levels,
                    );
                    for (got, want) in out.iter().zip(naive(&source, from, to, channels)) {
                        // Integers are off by up to 0.01 levels for each weight, of which there are up to 16.
                        assert!(
                            (f64::from(*got) - want).abs() < if channels == 3 { 0.66 } else { 0.501 },
                            "{from:?} {to:?} {channels}: {got} {want}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn levels_are_rounded() {
        for (mean, want) in [(0.0, 0), (0.49, 0), (0.51, 1), (254.6, 255), (255.0, 255), (255.001, 255)] {
            assert_eq!(nearest(mean), want);
        }
    }
}
