//! Scaling an image so that it covers a size, and cutting out the middle: what torchvision's `Resize` and `CenterCrop`
//! do, to within one level (they round between the two directions, this does not).
//!
//! Each pixel of the result is a mean of pixels of the source under a triangle that is two pixels wide at the coarser of
//! the two scales (bilinear with antialiasing). The triangle of a pixel is the product of one over rows and one over
//! columns, so a row of the result takes two passes: rows of the source are mixed into one row of f32, and that row is
//! mixed along itself. Nothing outside the cut is computed.

use std::ops::Range;

use polyreme_kernels::Isa;
use polyreme_kernels::bytes::mix_rows;

/// Scales `source`, `[height, width, channels]`, so that it covers the size of `out`, `[height, width, channels]`, and
/// cuts out the middle. `row` is memory for two rows.
pub(super) fn cover(
    source: &[u8],
    from: Size,
    out: &mut [u8],
    to: Size,
    channels: usize,
    row: &mut Vec<f32>,
) {
    assert_eq!((source.len(), out.len()), (from.pixels() * channels, to.pixels() * channels));
    let whole = from.covering(to);
    let (top_down, left_right) = (middle(whole.height, to.height), middle(whole.width, to.width));
    if whole == from {
        let lines = source.chunks_exact(from.width * channels).skip(top_down.start);
        for (out, line) in out.chunks_exact_mut(to.width * channels).zip(lines) {
            out.copy_from_slice(&line[left_right.start * channels..left_right.end * channels]);
        }
        return;
    }
    let isa = Isa::detect();
    let rows = Mix::new(from.height, whole.height, top_down);
    let columns = Mix::new(from.width, whole.width, left_right);
    // The columns that the cut needs, and how many numbers a row of them is.
    let first = columns.starts[0];
    let used = (columns.starts[to.width - 1] + columns.taps - first) * channels;
    // One more in each, because pixels of three numbers are read and written four at a time.
    row.clear();
    row.resize(used + 1 + to.width * channels + 1, 0.0);
    let (row, means) = row.split_at_mut(used + 1);
    for (y, out) in out.chunks_exact_mut(to.width * channels).enumerate() {
        let (start, weights) = rows.of(y);
        let lines = &source[(start * from.width + first) * channels..];
        mix_rows(isa, lines, from.width * channels, weights, &mut row[..used]);
        match channels {
            1 => mix_columns::<1>(row, first, &columns, means),
            _ => mix_columns::<3>(row, first, &columns, means),
        }
        for (level, &mean) in out.iter_mut().zip(&*means) {
            *level = nearest(mean);
        }
    }
}

/// The size of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size {
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Size {
    pub(super) fn pixels(self) -> usize {
        self.height * self.width
    }

    /// The smallest size with this one's proportions that covers `to`.
    fn covering(self, to: Size) -> Size {
        if to.height * self.width >= to.width * self.height {
            Size { height: to.height, width: (to.height * self.width / self.height).max(to.width) }
        } else {
            Size { height: (to.width * self.height / self.width).max(to.height), width: to.width }
        }
    }
}

/// The middle `inner` of `outer`; half a pixel is rounded to the even side, as Python rounds.
fn middle(outer: usize, inner: usize) -> Range<usize> {
    let spare = outer - inner;
    let start = spare / 2 + usize::from(spare % 4 == 3);
    start..start + inner
}

/// Which elements of the source make each element of the result along one dim, and with what weights.
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

/// Each pixel of `means` from its pixels of `row`, which starts at column `first`. Few numbers of taps are most of what
/// occurs, and faster when known ahead.
fn mix_columns<const C: usize>(row: &[f32], first: usize, columns: &Mix, means: &mut [f32]) {
    match columns.taps {
        2 => mix_taps::<C, 2>(row, first, columns, means),
        3 => mix_taps::<C, 3>(row, first, columns, means),
        4 => mix_taps::<C, 4>(row, first, columns, means),
        5 => mix_taps::<C, 5>(row, first, columns, means),
        6 => mix_taps::<C, 6>(row, first, columns, means),
        taps => {
            let weights = columns.weights.chunks_exact(taps);
            for (x, (&start, weights)) in columns.starts.iter().zip(weights).enumerate() {
                let from = &row[(start - first) * C..];
                mix_pixel::<C>(from, weights, &mut means[x * C..]);
            }
        }
    }
}

fn mix_taps<const C: usize, const TAPS: usize>(row: &[f32], first: usize, columns: &Mix, means: &mut [f32]) {
    let (weights, _) = columns.weights.as_chunks::<TAPS>();
    for (x, (&start, weights)) in columns.starts.iter().zip(weights).enumerate() {
        // One more where pixels are read four numbers at a time.
        let from = &row[(start - first) * C..][..TAPS * C + usize::from(C == 3)];
        mix_pixel::<C>(from, weights, &mut means[x * C..]);
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

/// The nearest level. A mean of bytes lies in 0..=255, so beside 2^23 its nearest integer is the low byte.
fn nearest(mean: f32) -> u8 {
    (mean + 8_388_608.0).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(height: usize, width: usize) -> Size {
        Size { height, width }
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
    fn naive(source: &[u8], from: Size, to: Size, channels: usize) -> Vec<f64> {
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
        let mut row = Vec::new();
        for from in sizes {
            for to in sizes {
                for channels in [1, 3] {
                    let source: Vec<u8> =
                        (0..from.pixels() * channels).map(|i| (i * i * 37 + i * 11) as u8).collect();
                    let mut out = vec![0; to.pixels() * channels];
                    cover(&source, from, &mut out, to, channels, &mut row);
                    for (got, want) in out.iter().zip(naive(&source, from, to, channels)) {
                        assert!(
                            (f64::from(*got) - want).abs() < 0.501,
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
