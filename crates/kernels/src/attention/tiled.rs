//! Attention on register tiles, for any instruction set that has them.
//!
//! Keys and values of a head are packed into panels once; then, for each block of queries:
//!
//! - forward: the strip of scores `[block × t_k]` is computed, made into exponentials row by row, and multiplied
//!   with v; the division by the row's sum waits until the rows of o are written.
//! - backward: for each block of keys the strips p and ds are computed, and used three times: `ds·k` into the block's
//!   dq, `dsᵀ·q` and `pᵀ·dy` into the head's dk and dv, which are kept in scratch until the last block.
//!
//! With a causal mask each tile stops at the diagonal: tiles of scores above it are not computed, and sums of
//! products leave out the zeros, but for those inside the tiles on the diagonal. A zero more or less changes no sum, and
//! blocks do not depend on the size of tiles, so all instruction sets give the same bits.
//!
//! Operands in half are widened on their way into panels and blocks, in scratch whose turn comes later, and results are
//! rounded row by row. So they need no scratch beyond that of f32.

use std::ops::Range;

use super::rows::RowPasses;
use super::stored::{HeadRows, HeadRowsMut};
use super::{Attention, HeadGrads, HeadInputs, Saved};
use crate::Isa;
use crate::cx::SharedMut;
use crate::tile::avx2::{pack_panel_rows, pack_transposed, panels_len};
use crate::tile::{Left, Right, TILE_COLS, Tiles, round_cols, row_stride, take};

/// What differs between instruction sets: tiles, and passes over a row.
pub(super) trait Kernel: Tiles + RowPasses {}

impl<K: Tiles + RowPasses> Kernel for K {}

/// Queries of a block: whole tiles, and few enough that with one panel of keys they stay in L1.
const QUERIES: usize = 48;
/// Keys of a block in backward: whole tiles both ways. The two strips then take 150 KB of L2.
const KEYS: usize = 384;

/// How many rows ahead dk and dv are prefetched.
const AHEAD: usize = 8;

/// Queries of a block in forward, where a strip is as long as the sequence and should not leave L2.
fn queries(at: &Attention) -> usize {
    if at.t_k <= 1024 { QUERIES } else { QUERIES / 2 }
}

pub(super) fn forward_len(at: &Attention) -> usize {
    let rows = queries(at);
    panels_len(at.d, at.t_k)
        + panels_len(at.t_k, at.d)
        + rows * row_stride(at.t_k)
        + 2 * rows * row_stride(at.d)
        + QUERIES
}

pub(super) fn backward_len(at: &Attention) -> usize {
    2 * panels_len(at.d, at.t_k)
        + 3 * panels_len(at.t_k, at.d)
        + 2 * QUERIES * row_stride(at.t_k.min(KEYS))
        + 3 * QUERIES * row_stride(at.d)
        + QUERIES
}

/// Queries `rows` of one head.
///
/// # Safety
/// The CPU has the instructions; the inputs have the lengths of their layouts; nothing else accesses these rows of `o`
/// and `lse`.
pub(super) unsafe fn forward<K: Kernel>(
    at: &Attention,
    isa: Isa,
    head: &HeadInputs,
    rows: Range<usize>,
    o: HeadRowsMut,
    lse: SharedMut<f32>,
    scratch: &mut [f32],
) {
    let block = queries(at);
    let keys = if rows.is_empty() { 0 } else { at.keys(rows.end - 1) };
    let (strip_stride, d_stride) = (row_stride(at.t_k), row_stride(at.d));
    let mut scratch = scratch;
    let keys_t = take(&mut scratch, panels_len(at.d, keys));
    let values = take(&mut scratch, panels_len(keys, at.d));
    let strip = take(&mut scratch, block * strip_stride);
    let q = take(&mut scratch, block * d_stride);
    let sums = take(&mut scratch, block * d_stride);
    let inverse = take(&mut scratch, block);

    head.k.for_each_block(isa, keys, at.d, sums, d_stride, |rows, stride, first, n| {
        // SAFETY: there are `n` rows of k, and the panels have room for them.
        unsafe { pack_transposed(rows.as_ptr(), stride, n, at.d, keys_t[first * at.d..].as_mut_ptr()) };
    });
    head.v.for_each_block(isa, keys, at.d, sums, d_stride, |rows, stride, first, n| {
        let panels = values[first * TILE_COLS..].as_mut_ptr();
        // SAFETY: as above, of v.
        unsafe { pack_panel_rows(rows.as_ptr(), stride, at.d, n, keys, panels) };
    });
    for start in rows.clone().step_by(block) {
        let n = (rows.end - start).min(block);
        // SAFETY: the CPU has the instructions, here and below.
        unsafe { copy_rows::<K>(isa, at.scale, head.q, start, n, at.d, q, d_stride, sums) };
        let bounds = ScoreBlock {
            causal: at.causal,
            query: start,
            key: 0,
            n_queries: n,
            n_keys: at.keys(start + n - 1),
        };
        // SAFETY: as above.
        unsafe { scores::<K>(&bounds, at.d, q, d_stride, keys_t, strip, strip_stride) };

        let lse_range = at.lse_range(head, start..start + n);
        // SAFETY: the caller's promise.
        let lse = unsafe { lse.slice(lse_range.start, n) };
        for r in 0..n {
            head.q.ask_for(start + n + r, at.d);
            o.ask_for(start + r, at.d);
            let seen = at.keys(start + r);
            let row = &mut strip[r * strip_stride..][..strip_stride];
            // SAFETY: as above.
            let (max, sum) = unsafe { K::exponentials(row, seen, 1.0, head.mask_row(start + r, 0, seen)) };
            // A row that sees nothing is all zeros, and stays so.
            let seen = sum != 0.0;
            lse[r] = if seen { max + sum.ln() } else { max };
            inverse[r] = if seen { 1.0 / sum } else { 0.0 };
        }

        // SAFETY: as above.
        unsafe {
            rows_times_panels::<K, false>(&bounds, at.d, strip, strip_stride, values, keys, sums, d_stride)
        };
        for r in 0..n {
            // The block's queries are not needed any more.
            // SAFETY: the caller's promise.
            unsafe {
                o.make(isa, start + r, at.d, q, |o| {
                    K::scaled_copy(inverse[r], &sums[r * d_stride..][..at.d], o);
                });
            }
        }
    }
}

/// All gradients of one head.
///
/// # Safety
/// The CPU has the instructions; inputs have the lengths of their layouts; nothing else accesses this head's rows of
/// the gradients, and they do not overlap each other.
pub(super) unsafe fn backward<K: Kernel>(
    at: &Attention,
    isa: Isa,
    head: &HeadInputs,
    saved: &Saved,
    out: &HeadGrads,
    scratch: &mut [f32],
) {
    const { assert!(K::ROWS <= 17 && QUERIES.is_multiple_of(K::ROWS) && KEYS.is_multiple_of(K::COLS)) };
    let keys = if at.t_q == 0 { 0 } else { at.keys(at.t_q - 1) };
    let (strip_stride, d_stride) = (row_stride(at.t_k.min(KEYS)), row_stride(at.d));
    let d_cols = round_cols(at.d);
    let mut scratch = scratch;
    let keys_t = take(&mut scratch, panels_len(at.d, keys));
    let values_t = take(&mut scratch, panels_len(at.d, keys));
    let key_rows = take(&mut scratch, panels_len(keys, at.d));
    let dk = take(&mut scratch, at.t_k * d_cols);
    let dv = take(&mut scratch, at.t_k * d_cols);
    let p = take(&mut scratch, QUERIES * strip_stride);
    let ds = take(&mut scratch, QUERIES * strip_stride);
    let q = take(&mut scratch, QUERIES * d_stride);
    let dy = take(&mut scratch, QUERIES * d_stride);
    let dq = take(&mut scratch, QUERIES * d_stride);
    let delta = take(&mut scratch, QUERIES);

    head.k.for_each_block(isa, keys, at.d, dq, d_stride, |rows, stride, first, n| {
        let panels = key_rows[first * TILE_COLS..].as_mut_ptr();
        // SAFETY: there are `n` rows of k, and the panels have room for them.
        unsafe {
            pack_transposed(rows.as_ptr(), stride, n, at.d, keys_t[first * at.d..].as_mut_ptr());
            pack_panel_rows(rows.as_ptr(), stride, at.d, n, keys, panels);
        }
    });
    head.v.for_each_block(isa, keys, at.d, dq, d_stride, |rows, stride, first, n| {
        // SAFETY: as above, of v.
        unsafe { pack_transposed(rows.as_ptr(), stride, n, at.d, values_t[first * at.d..].as_mut_ptr()) };
    });
    dk.fill(0.0);
    dv.fill(0.0);

    for start in (0..at.t_q).step_by(QUERIES) {
        let n = (at.t_q - start).min(QUERIES);
        // q carries the scale into the scores and into dk.
        // SAFETY: the CPU has the instructions, here and below.
        unsafe {
            copy_rows::<K>(isa, at.scale, head.q, start, n, at.d, q, d_stride, dq);
            copy_rows::<K>(isa, 1.0, saved.dy, start, n, at.d, dy, d_stride, dq);
            for r in 0..n {
                delta[r] = K::dot(&dy[r * d_stride..][..at.d], saved.o.row(isa, start + r, at.d, dq));
            }
        }
        dq.fill(0.0);

        let seen_by_block = at.keys(start + n - 1);
        for key in (0..seen_by_block).step_by(KEYS) {
            let n_keys = (seen_by_block - key).min(KEYS);
            let bounds = ScoreBlock { causal: at.causal, query: start, key, n_queries: n, n_keys };
            // SAFETY: as above.
            unsafe {
                scores::<K>(&bounds, at.d, q, d_stride, &keys_t[key * at.d..], p, strip_stride);
                scores::<K>(&bounds, at.d, dy, d_stride, &values_t[key * at.d..], ds, strip_stride);
            }
            for r in 0..n {
                if key == 0 {
                    head.q.ask_for(start + n + r, at.d);
                    saved.dy.ask_for(start + n + r, at.d);
                    saved.o.ask_for(start + n + r, at.d);
                    out.dq.ask_for(start + r, at.d);
                }
                let seen = at.keys(start + r).saturating_sub(key).min(n_keys);
                let mask = head.mask_row(start + r, key, seen);
                let row = r * strip_stride..(r + 1) * strip_stride;
                let lse = saved.lse[start + r];
                // SAFETY: as above.
                unsafe {
                    K::probabilities(&mut p[row.clone()], &mut ds[row], seen, 1.0, mask, lse, delta[r])
                };
            }
            let key_panels = &key_rows[key * TILE_COLS..];
            let (dk, dv) = (&mut dk[key * d_cols..], &mut dv[key * d_cols..]);
            // SAFETY: as above.
            unsafe {
                rows_times_panels::<K, true>(&bounds, at.d, ds, strip_stride, key_panels, keys, dq, d_stride);
                columns_times_rows::<K>(&bounds, [p, ds], strip_stride, [dy, q], d_stride, [dv, dk], d_cols);
            }
        }
        for r in 0..n {
            // The block's queries are not needed any more.
            // SAFETY: the caller's promise.
            unsafe {
                out.dq.make(isa, start + r, at.d, q, |row| {
                    K::scaled_copy(at.scale, &dq[r * d_stride..][..at.d], row);
                });
            }
        }
    }
    for j in 0..at.t_k {
        out.dk.ask_for(j + AHEAD, at.d);
        out.dv.ask_for(j + AHEAD, at.d);
        // SAFETY: the caller's promise.
        unsafe {
            out.dk.write(isa, j, &dk[j * d_cols..][..at.d]);
            out.dv.write(isa, j, &dv[j * d_cols..][..at.d]);
        }
    }
}

/// A block of the scores: which queries and keys, and where the diagonal cuts it.
struct ScoreBlock {
    causal: bool,
    /// The first query and the first key.
    query: usize,
    key: usize,
    n_queries: usize,
    n_keys: usize,
}

impl ScoreBlock {
    /// How many of the block's keys matter to a tile of `n` queries from `row` on: those its last query sees.
    fn depth(&self, row: usize, n: usize) -> usize {
        if self.causal {
            (self.query + row + n).saturating_sub(self.key).min(self.n_keys)
        } else {
            self.n_keys
        }
    }

    /// The block's first query that sees a key `col` of the block.
    fn first_row(&self, col: usize) -> usize {
        if self.causal { (self.key + col).saturating_sub(self.query) } else { 0 }
    }
}

/// `strip = rows · panelsᵀ`, tiles above the diagonal left out.
///
/// # Safety
/// The CPU has the instructions.
unsafe fn scores<K: Kernel>(
    bounds: &ScoreBlock,
    d: usize,
    rows: &[f32],
    rows_stride: usize,
    panels: &[f32],
    strip: &mut [f32],
    strip_stride: usize,
) {
    let n = bounds.n_queries;
    assert!(rows.len() >= n * rows_stride && rows_stride >= d);
    assert!(strip.len() >= n * strip_stride && strip_stride >= round_cols(bounds.n_keys));
    assert!(panels.len() >= panels_len(d, bounds.n_keys));
    for col in (0..bounds.n_keys).step_by(K::COLS) {
        let first = bounds.first_row(col) / K::ROWS * K::ROWS;
        for row in (first..n).step_by(K::ROWS) {
            let tile_rows = (n - row).min(K::ROWS);
            // On the diagonal not all of a wide tile's panels are seen.
            let cols = round_cols(bounds.depth(row, tile_rows) - col).min(K::COLS);
            // SAFETY: rows, panels and tile are inside the slices, by the assertions.
            unsafe {
                K::tile::<false>(
                    tile_rows,
                    cols,
                    d,
                    rows.as_ptr().add(row * rows_stride),
                    Left::Rows(rows_stride),
                    panels.as_ptr().add(col * d),
                    Right::panels(d),
                    strip.as_mut_ptr().add(row * strip_stride + col),
                    strip_stride,
                );
            }
        }
    }
}

/// `out = strip · panels`, or `+=`, each tile up to the last key that it sees. A panel has `panel_depth` rows, the
/// first of which belongs to the strip's first column.
///
/// # Safety
/// The CPU has the instructions.
unsafe fn rows_times_panels<K: Kernel, const ADD: bool>(
    bounds: &ScoreBlock,
    d: usize,
    strip: &[f32],
    strip_stride: usize,
    panels: &[f32],
    panel_depth: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let n = bounds.n_queries;
    assert!(strip.len() >= n * strip_stride && strip_stride >= bounds.n_keys);
    assert!(out.len() >= n * out_stride && out_stride >= round_cols(d));
    for col in (0..d).step_by(K::COLS) {
        let cols = round_cols(d - col).min(K::COLS);
        let panels = &panels[col * panel_depth..];
        assert!(panels.len() >= (cols - TILE_COLS) * panel_depth + bounds.n_keys * TILE_COLS);
        for row in (0..n).step_by(K::ROWS) {
            let tile_rows = (n - row).min(K::ROWS);
            // SAFETY: rows, panels and tile are inside the slices, by the assertions.
            unsafe {
                K::tile::<ADD>(
                    tile_rows,
                    cols,
                    bounds.depth(row, tile_rows),
                    strip.as_ptr().add(row * strip_stride),
                    Left::Rows(strip_stride),
                    panels.as_ptr(),
                    Right::panels(panel_depth),
                    out.as_mut_ptr().add(row * out_stride + col),
                    out_stride,
                );
            }
        }
    }
}

/// `out[i] += stripᵀ[i] · rows[i]` for both pairs, each tile from the first query that sees its keys. Both pairs go
/// together because they share bounds; their strips' lines stay in L1 for all columns.
///
/// # Safety
/// The CPU has the instructions.
unsafe fn columns_times_rows<K: Kernel>(
    bounds: &ScoreBlock,
    strips: [&[f32]; 2],
    strip_stride: usize,
    rows: [&[f32]; 2],
    rows_stride: usize,
    out: [&mut [f32]; 2],
    d_cols: usize,
) {
    let n = bounds.n_queries;
    assert!(rows_stride >= d_cols && strip_stride >= bounds.n_keys);
    for ((strip, rows), out) in strips.into_iter().zip(rows).zip(out) {
        assert!(strip.len() >= n * strip_stride && rows.len() >= n * rows_stride);
        assert!(out.len() >= bounds.n_keys * d_cols);
        for key in (0..bounds.n_keys).step_by(K::ROWS) {
            let first = bounds.first_row(key);
            if first >= n {
                break;
            }
            for col in (0..d_cols).step_by(K::COLS) {
                // SAFETY: columns, rows and tile are inside the slices, by the assertions.
                unsafe {
                    K::tile::<true>(
                        (bounds.n_keys - key).min(K::ROWS),
                        (d_cols - col).min(K::COLS),
                        n - first,
                        strip.as_ptr().add(first * strip_stride + key),
                        Left::Columns(strip_stride),
                        rows.as_ptr().add(first * rows_stride + col),
                        Right::rows(rows_stride),
                        out.as_mut_ptr().add(key * d_cols + col),
                        d_cols,
                    );
                }
            }
        }
    }
}

/// `dst = scale·src` for `n` rows of `d` from row `first` on; what follows a row up to its stride is zeros. Rows in half
/// are widened in `stage`.
///
/// # Safety
/// The CPU has the instructions.
unsafe fn copy_rows<K: Kernel>(
    isa: Isa,
    scale: f32,
    src: HeadRows,
    first: usize,
    n: usize,
    d: usize,
    dst: &mut [f32],
    dst_stride: usize,
    stage: &mut [f32],
) {
    for (r, dst) in dst.chunks_exact_mut(dst_stride).take(n).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { K::scaled_copy(scale, src.row(isa, first + r, d, stage), dst) };
        dst[d..].fill(0.0);
    }
}
