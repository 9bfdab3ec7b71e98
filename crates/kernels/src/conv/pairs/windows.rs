//! Which elements of an image a row of the matrix of patches consists of.
//!
//! A *window* is what one pixel that is made reads: all taps of its phase, each with all channels, taps row by row. In that
//! order it consists of *stretches*, which are contiguous in the image as long as they are inside it: a row of taps if they
//! are next to each other, else one tap. All stretches have the same length, so step `k` of a window is element
//! `k % stretch` of stretch `k / stretch`.

use super::super::Conv2d;
use super::super::geometry::{Direction, Lattice, SpatialDim};

/// All windows of one phase of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows {
    images: usize,
    pub(super) rows: Lattice,
    pub(super) cols: Lattice,
    /// The image that is read: its height, the elements of one of its rows, and its channels.
    height: usize,
    row_len: usize,
    pub(super) channels: usize,
    /// Elements of a stretch.
    stretch: usize,
}

/// One window: where its first tap is. It may be outside the image.
#[derive(Clone, Copy, Default)]
pub(super) struct PatchWindow {
    /// Its first element, counted over all images.
    pub(super) first: isize,
    row: isize,
    /// Element of the row.
    at: isize,
}

/// A part of a stretch that goes to some lanes of a vector: the same for all windows.
#[derive(Clone, Copy, Default)]
pub(super) struct Piece {
    /// Rows below the window's first.
    down: isize,
    /// Elements of a row from the window's first to what lane 0 would be.
    right: isize,
    /// Elements of the image from the window's first to what lane 0 would be.
    pub(super) offset: isize,
    lanes: (isize, isize),
}

/// Windows next to each other, and the smallest and the largest place of their first taps.
pub(super) struct WindowList<'a> {
    pub(super) windows: &'a [PatchWindow],
    rows: (isize, isize),
    ats: (isize, isize),
}

/// Lanes `low..high` as bits.
fn lanes(low: isize, high: isize) -> u32 {
    if low < high { u32::MAX >> (32 - (high - low)) << low } else { 0 }
}

impl Piece {
    /// Its lanes as bits.
    pub(super) fn lanes(&self) -> u32 {
        lanes(self.lanes.0, self.lanes.1)
    }
}

/// The two spatial dims of a convolution.
pub(super) fn dims(s: &Conv2d, way: Direction) -> (SpatialDim, SpatialDim) {
    let dim = |input, output, k, (stride, padding, dilation)| SpatialDim {
        way,
        input,
        output,
        k,
        stride,
        padding,
        dilation,
    };
    (
        dim(s.h, s.out_h(), s.kh, (s.stride.0, s.padding.0, s.dilation.0)),
        dim(s.w, s.out_w(), s.kw, (s.stride.1, s.padding.1, s.dilation.1)),
    )
}

impl Windows {
    /// The windows of phase `(row phase, column phase)`.
    pub(super) fn new(s: &Conv2d, way: Direction, phase: (usize, usize)) -> Windows {
        let (rows, cols) = dims(s, way);
        let channels = if way == Direction::Forward { s.c_in } else { s.c_out };
        let (height, row_len) = (rows.read(), cols.read() * channels);
        let (rows, cols) = (rows.lattice(phase.0), cols.lattice(phase.1));
        let together = if cols.tap_step == 1 { cols.taps } else { 1 };
        Windows { images: s.n, rows, cols, height, row_len, channels, stretch: together * channels }
    }

    pub(super) fn count(&self) -> usize {
        self.images * self.rows.count * self.cols.count
    }

    pub(super) fn taps(&self) -> usize {
        self.rows.taps * self.cols.taps
    }

    /// Elements of a window.
    pub(super) fn len(&self) -> usize {
        self.taps() * self.channels
    }

    /// The image, row and column of a window, counted within the phase.
    pub(super) fn place(&self, idx: usize) -> (usize, usize, usize) {
        let (line, col) = (idx / self.cols.count, idx % self.cols.count);
        (line / self.rows.count, line % self.rows.count, col)
    }

    /// Elements of all images.
    pub(super) fn images_len(&self) -> usize {
        self.images * self.height * self.row_len
    }

    /// Writes the windows from `first` on: as many as there are, and as `to` has room for.
    pub(super) fn list<'a>(&self, first: usize, to: &'a mut [PatchWindow]) -> WindowList<'a> {
        let n = to.len().min(self.count() - first);
        let (mut image, mut row, mut col) = self.place(first);
        let (mut rows, mut ats) = ((isize::MAX, isize::MIN), (isize::MAX, isize::MIN));
        for window in &mut to[..n] {
            let down = self.rows.read_first + (row * self.rows.read_step) as isize;
            let right = self.cols.read_first + (col * self.cols.read_step) as isize;
            let (above, at) = ((image * self.height) as isize, right * self.channels as isize);
            *window = PatchWindow { first: (above + down) * self.row_len as isize + at, row: down, at };
            rows = (rows.0.min(down), rows.1.max(down));
            ats = (ats.0.min(at), ats.1.max(at));
            col += 1;
            if col == self.cols.count {
                (row, col) = (row + 1, 0);
            }
            if row == self.rows.count {
                (image, row) = (image + 1, 0);
            }
        }
        WindowList { windows: &to[..n], rows, ats }
    }

    /// Calls `f` with the pieces of steps `k..k + n` of windows, which go to lanes from 0 on.
    pub(super) fn pieces(&self, k: usize, n: usize, mut f: impl FnMut(Piece)) {
        let n = n.min(self.len() - k);
        let (mut stretch, mut from) = (k / self.stretch, k % self.stretch);
        let mut lane = 0;
        while lane < n {
            let end = n.min(lane + self.stretch - from);
            let (row, col) = if self.cols.tap_step == 1 {
                (stretch, 0)
            } else {
                (stretch / self.cols.taps, stretch % self.cols.taps)
            };
            let down = (row * self.rows.tap_step) as isize;
            let right = (col * self.cols.tap_step * self.channels + from) as isize - lane as isize;
            let offset = down * self.row_len as isize + right;
            f(Piece { down, right, offset, lanes: (lane as isize, end as isize) });
            (stretch, from, lane) = (stretch + 1, 0, end);
        }
    }

    /// Whether all lanes of a piece are inside the image, for all windows of a list.
    pub(super) fn inside(&self, list: &WindowList, piece: &Piece) -> bool {
        list.rows.0 + piece.down >= 0
            && list.rows.1 + piece.down < self.height as isize
            && list.ats.0 + piece.right + piece.lanes.0 >= 0
            && list.ats.1 + piece.right + piece.lanes.1 <= self.row_len as isize
    }

    /// The lanes of a piece of a window that are inside the image, as bits.
    #[inline(always)]
    pub(super) fn lanes_inside(&self, window: &PatchWindow, piece: &Piece) -> u32 {
        let (row, at) = (window.row + piece.down, window.at + piece.right);
        let (low, high) = (piece.lanes.0.max(-at), piece.lanes.1.min(self.row_len as isize - at));
        if (0..self.height as isize).contains(&row) { lanes(low, high) } else { 0 }
    }

    /// The index of step `k` of a window in the image that is read; none in the padding.
    pub(super) fn element(&self, window: usize, k: usize) -> Option<usize> {
        let mut list = [PatchWindow::default()];
        self.list(window, &mut list);
        let mut found = None;
        self.pieces(k, 1, |piece| {
            let inside = self.lanes_inside(&list[0], &piece) != 0;
            found = inside.then(|| (list[0].first + piece.offset) as usize);
        });
        found
    }
}
