//! The rows that a unit of work reads, with padding made real: either the image itself, where no patch leaves it, or a
//! copy of a few rows with zeros around. An image in half is always copied, widened.

use super::Gather;
use crate::Isa;
use crate::floats::Floats;

/// Some rows of one image.
pub(in super::super) struct View<'a> {
    /// The pixel at `(first_row, first_col)`.
    pub(in super::super) ptr: *const f32,
    /// Floats from one row to the next.
    pub(in super::super) row: usize,
    /// Floats from one pixel to the next.
    pub(in super::super) pixel: usize,
    first_row: isize,
    first_col: isize,
    lent: std::marker::PhantomData<&'a [f32]>,
}

impl<'a> View<'a> {
    /// What rows `from..to` of image `image` read, copied to `buffer` only if it must be.
    pub(in super::super) fn new(
        gather: &Gather,
        isa: Isa,
        read: Floats<'a>,
        image: usize,
        from: usize,
        to: usize,
        buffer: &'a mut [f32],
    ) -> View<'a> {
        let (h, w, c) = (gather.rows.read(), gather.cols.read(), gather.c_read);
        let (top, bottom) = gather.rows.reads(from, to);
        let (left, right) = gather.cols.reads(0, gather.cols.made());
        let source = read.part(image * h * w * c, h * w * c);
        let lent = std::marker::PhantomData;
        let inside = top >= 0 && bottom <= h as isize && left >= 0 && right <= w as isize;
        if let (Floats::F32(source), true) = (source, inside) {
            let at = (top as usize * w + left as usize) * c;
            let ptr = source[at.min(source.len())..].as_ptr();
            return View { ptr, row: w * c, pixel: c, first_row: top, first_col: left, lent };
        }
        let width = (right - left) as usize;
        let buffer = &mut buffer[..(bottom - top) as usize * width * c];
        // The columns of the image that the view has, in the image's and in the view's numbers.
        let (cut_left, cut_right) = (left.clamp(0, w as isize) as usize, right.clamp(0, w as isize) as usize);
        let lead = ((cut_left as isize - left) as usize).min(width) * c;
        let len = (cut_right - cut_left) * c;
        for (i, line) in buffer.chunks_exact_mut(width * c).enumerate() {
            let at = top + i as isize;
            if at < 0 || at >= h as isize || len == 0 {
                line.fill(0.0);
                continue;
            }
            line[..lead].fill(0.0);
            source.part((at as usize * w + cut_left) * c, len).widen(isa, &mut line[lead..lead + len]);
            line[lead + len..].fill(0.0);
        }
        View { ptr: buffer.as_ptr(), row: width * c, pixel: c, first_row: top, first_col: left, lent }
    }

    /// Channel `c` of the pixel at `(row, col)`, in the image's numbers.
    ///
    /// # Safety
    /// The view has that pixel.
    pub(in super::super) unsafe fn at(&self, row: isize, col: isize, c: usize) -> *const f32 {
        debug_assert!(row >= self.first_row && col >= self.first_col, "{row} {col}");
        let (row, col) = ((row - self.first_row) as usize, (col - self.first_col) as usize);
        // SAFETY: inside the view by the caller's promise.
        unsafe { self.ptr.add(row * self.row + col * self.pixel + c) }
    }
}
