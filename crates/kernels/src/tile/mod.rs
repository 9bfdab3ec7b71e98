//! Small products on operands that are already in panels: a register tile of up to 6×16 sums with AVX2, of up to 12×32
//! with AVX-512, and the packing for both.
//!
//! Kernels that fuse a product with what comes before and after it (attention, recurrent cells) keep their operands
//! in scratch and walk over tiles themselves, with bounds that a general matrix product does not know. It is not a
//! matrix product: that is [`crate::gemm`].
//!
//! A *panel* is 16 columns wide and stored row after row, so that a tile reads it as one stream; a wider tile reads
//! several. Each sum goes along the depth in one chain of fused multiply-adds that starts at 0, so tiles of all shapes
//! give the same bits.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

/// Columns of a panel: one cache line.
pub(crate) const TILE_COLS: usize = 16;

/// The left operand of a tile.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// Element (row, depth) is at `row * stride + depth`.
    Rows(usize),
    /// Element (row, depth) is at `depth * stride + row`.
    Columns(usize),
}

/// The right operand of a tile: element (depth, col) is at `col / 16 * panel + depth * stride + col % 16`.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Right {
    pub(crate) stride: usize,
    pub(crate) panel: usize,
}

#[cfg(target_arch = "x86_64")]
impl Right {
    /// Packed panels of this depth.
    pub(crate) fn panels(depth: usize) -> Right {
        Right { stride: TILE_COLS, panel: depth * TILE_COLS }
    }

    /// Rows in place.
    pub(crate) fn rows(stride: usize) -> Right {
        Right { stride, panel: TILE_COLS }
    }
}

/// The tile of an instruction set.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Tiles {
    /// Rows of a full tile.
    const ROWS: usize;
    /// Columns of a full tile: whole panels.
    const COLS: usize;

    /// `c[rows×cols] = a[rows×depth] · b[depth×cols]`, or `+=`, for `rows` of 1 to `ROWS` and `cols` a multiple of 16 up
    /// to `COLS`.
    ///
    /// # Safety
    /// The CPU has the instructions. The pointers are valid for those elements: `a` and `b` as `left` and `right` say,
    /// row `i` of `c` at `i * c_stride`. `c` overlaps neither `a` nor `b`.
    unsafe fn tile<const ADD: bool>(
        rows: usize,
        cols: usize,
        depth: usize,
        a: *const f32,
        left: Left,
        b: *const f32,
        right: Right,
        c: *mut f32,
        c_stride: usize,
    );
}

/// Tiles of 6×16.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2;
/// Tiles of 12×32.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx512;

/// `c[m×n] = a[m×depth] · panels`, or `+=`: tiles over all rows and panels. `n` is rounded up to whole panels, so the
/// rows of `c` have room for them.
///
/// # Safety
/// As for [`Tiles::tile`], for all rows and panels.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn product<T: Tiles, const ADD: bool>(
    m: usize,
    n: usize,
    depth: usize,
    a: *const f32,
    a_stride: usize,
    panels: *const f32,
    c: *mut f32,
    c_stride: usize,
) {
    // Equal shares of rows: 8 rows are two tiles of 4, which cost less than one of 6 and one of 2.
    let tiles = m.div_ceil(T::ROWS).max(1);
    for col in (0..n).step_by(T::COLS) {
        let cols = round_cols(n - col).min(T::COLS);
        let mut row = 0;
        for t in 0..tiles {
            let rows = (m - row).div_ceil(tiles - t);
            if rows > 0 {
                // SAFETY: rows row..row+rows and these panels are inside what the caller promises.
                unsafe {
                    T::tile::<ADD>(
                        rows,
                        cols,
                        depth,
                        a.add(row * a_stride),
                        Left::Rows(a_stride),
                        panels.add(col * depth),
                        Right::panels(depth),
                        c.add(row * c_stride + col),
                        c_stride,
                    );
                }
            }
            row += rows;
        }
    }
}

/// `n` rounded up to whole panels.
pub(crate) const fn round_cols(n: usize) -> usize {
    n.div_ceil(TILE_COLS) * TILE_COLS
}

/// A row stride for at least `n` floats and 16 of slack, that is an odd number of cache lines: rows then start in
/// different sets of the cache, and a column of tiles does not evict itself.
pub(crate) const fn row_stride(n: usize) -> usize {
    let lines = n.div_ceil(TILE_COLS);
    (lines + 1 + lines % 2) * TILE_COLS
}

/// The part of `scratch` that starts on a cache line. Scratch that is handed to it has 15 floats to spare.
pub(crate) fn aligned(scratch: &mut [f32]) -> &mut [f32] {
    let skip = scratch.as_ptr().align_offset(64).min(scratch.len());
    &mut scratch[skip..]
}

/// The next `n` floats, rounded up to a cache line.
pub(crate) fn take<'a>(scratch: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(round_cols(n));
    *scratch = rest;
    &mut taken[..n]
}
