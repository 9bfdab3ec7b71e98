//! Weights from PyTorch's layout into panels and back, for whole panels of 16 channels: both are transposes of runs of
//! floats, here by squares of 8x8. With few pixels this weighs: one by one, copying the weights of a 3x3 convolution of 256
//! channels took as long as convolving an image of 8x8 with them.
//!
//! A panel has a row of 16 floats for each column of the matrix `[channel made][channel read, tap]`, in another order.

use super::super::micro::PANEL;
use crate::copy::eight_by_eight;

/// Columns that are turned at once, in L1: 8 channels of 3x3.
pub(in super::super) const COLS: usize = 72;

/// Columns on their way, 16 floats each.
pub(in super::super) type PanelColumns = [[f32; PANEL]; COLS];

/// None yet.
pub(in super::super) const NO_COLUMNS: PanelColumns = [[0.0; PANEL]; COLS];

/// For each column `j` below `cols`, copies the 16 floats `source[lane * stride + j]` to `target(j)`.
///
/// # Safety
/// The CPU has AVX2; 16 rows of `cols` floats are readable, `stride` apart, and 16 floats are writable at each target.
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn into_panel(
    source: *const f32,
    stride: usize,
    cols: usize,
    stage: &mut PanelColumns,
    mut target: impl FnMut(usize) -> *mut f32,
) {
    if stride == 1 && cols == 1 {
        // SAFETY: the caller's promise; the 16 floats are neighbours.
        return unsafe { target(0).copy_from_nonoverlapping(source, PANEL) };
    }
    for j0 in (0..cols).step_by(COLS) {
        let n = COLS.min(cols - j0);
        let whole = n / 8 * 8;
        // SAFETY: the caller's promise; squares end before column `cols`.
        unsafe {
            for j in (0..whole).step_by(8) {
                for half in [0, 8] {
                    let to = stage[j].as_mut_ptr().add(half);
                    eight_by_eight(source.add(half * stride + j0 + j), stride, to, PANEL);
                }
            }
            for (j, row) in stage.iter_mut().enumerate().take(n).skip(whole) {
                for (lane, v) in row.iter_mut().enumerate() {
                    *v = *source.add(lane * stride + j0 + j);
                }
            }
            for (j, row) in stage[..n].iter().enumerate() {
                target(j0 + j).copy_from_nonoverlapping(row.as_ptr(), PANEL);
            }
        }
    }
}

/// The reverse: for each column `j` below `cols`, the 16 floats that `source` writes go to `target[lane * stride + j]`.
///
/// # Safety
/// The CPU has AVX2; 16 rows of `cols` floats are writable, `stride` apart.
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn from_panel(
    mut source: impl FnMut(usize, &mut [f32; PANEL]),
    cols: usize,
    target: *mut f32,
    stride: usize,
) {
    let mut stage = NO_COLUMNS;
    for j0 in (0..cols).step_by(COLS) {
        let n = COLS.min(cols - j0);
        let whole = n / 8 * 8;
        for (j, row) in stage[..n].iter_mut().enumerate() {
            source(j0 + j, row);
        }
        // SAFETY: the caller's promise; squares end before column `cols`.
        unsafe {
            for j in (0..whole).step_by(8) {
                for half in [0, 8] {
                    let from = stage[j].as_ptr().add(half);
                    eight_by_eight(from, PANEL, target.add(half * stride + j0 + j), stride);
                }
            }
            for (j, row) in stage.iter().enumerate().take(n).skip(whole) {
                for (lane, v) in row.iter().enumerate() {
                    *target.add(lane * stride + j0 + j) = *v;
                }
            }
        }
    }
}
