//! Small products on operands that already lie in panels: a register tile of up to 6×16 sums, and the packing for it.
//!
//! Kernels that fuse a product with what comes before and after it (attention, recurrent cells) keep their operands
//! in scratch and walk over tiles themselves, with bounds that a general matrix product does not know. It is not a
//! matrix product: that is [`crate::gemm`].
//!
//! A *panel* is 16 columns wide and stored row after row, so that a tile reads it as one stream.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;

/// Rows of a full tile.
pub(crate) const TILE_ROWS: usize = 6;
/// Columns of a tile, and of a panel: one cache line.
pub(crate) const TILE_COLS: usize = 16;

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
