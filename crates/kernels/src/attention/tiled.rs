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

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use super::{Attention, HeadInputs, Out, Saved};
use crate::cx::SharedMut;
use crate::tile::avx2::{pack_panels, pack_transposed, panels_len};
use crate::tile::{Left, Right, TILE_COLS, Tiles, round_cols, row_stride};

/// What differs between instruction sets: tiles, and passes over a row.
///
/// # Safety
/// All functions: the CPU has the instructions.
pub(super) trait Kernel: Tiles {
    /// Makes a row of `n` scores into `exp(s + mask − max)` and gives `(max, sum)`, the sum 0 if all are −∞. At least 16
    /// zeros follow: tiles on the diagonal read up to `ROWS − 1` of them.
    ///
    /// # Safety
    /// The CPU has the instruction set of the implementation.
    unsafe fn exponentials(row: &mut [f32], n: usize, mask: Option<&[f32]>) -> (f32, f32);
    /// Makes a row of `n` scores in `p` into probabilities, and `dp` in `ds` into `p·(dp − delta)`. At least 16 zeros
    /// follow in both.
    ///
    /// # Safety
    /// As for [`Kernel::exponentials`].
    unsafe fn probabilities(
        p: &mut [f32],
        ds: &mut [f32],
        n: usize,
        mask: Option<&[f32]>,
        lse: f32,
        delta: f32,
    );
    /// The sum of products.
    ///
    /// # Safety
    /// As for [`Kernel::exponentials`].
    unsafe fn dot(a: &[f32], b: &[f32]) -> f32;
    /// `dst = scale·src`, over the shorter length.
    ///
    /// # Safety
    /// As for [`Kernel::exponentials`].
    unsafe fn scaled_copy(scale: f32, src: &[f32], dst: &mut [f32]);
}

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
    head: &HeadInputs,
    rows: Range<usize>,
    o: SharedMut<f32>,
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

    // SAFETY: `head` has `keys` rows of k and v, and the panels have room for them.
    unsafe {
        pack_transposed(head.k.as_ptr(), at.k.time, keys, at.d, keys_t.as_mut_ptr());
        pack_panels(head.v.as_ptr(), at.v.time, at.d, keys, values.as_mut_ptr());
    }
    let o_rows = o.as_mut_ptr().wrapping_add(at.o.at(head.b, head.h));
    for start in rows.clone().step_by(block) {
        let n = (rows.end - start).min(block);
        // SAFETY: the CPU has the instructions, here and below.
        unsafe { copy_rows::<K>(at.scale, &head.q[start * at.q.time..], at.q.time, n, at.d, q, d_stride) };
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
            ask_for(head.q.as_ptr().wrapping_add((start + n + r) * at.q.time), at.d);
            ask_for(o_rows.wrapping_add((start + r) * at.o.time), at.d);
            let seen = at.keys(start + r);
            let row = &mut strip[r * strip_stride..][..strip_stride];
            // SAFETY: as above.
            let (max, sum) = unsafe { K::exponentials(row, seen, head.mask_row(start + r, 0, seen)) };
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
            // SAFETY: the caller's promise.
            unsafe {
                let o = o.slice(at.o.at(head.b, head.h) + (start + r) * at.o.time, at.d);
                K::scaled_copy(inverse[r], &sums[r * d_stride..][..at.d], o);
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
    head: &HeadInputs,
    saved: &Saved,
    out: &Out,
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

    // SAFETY: `head` has `keys` rows of k and v, and the panels have room for them.
    unsafe {
        pack_transposed(head.k.as_ptr(), at.k.time, keys, at.d, keys_t.as_mut_ptr());
        pack_transposed(head.v.as_ptr(), at.v.time, keys, at.d, values_t.as_mut_ptr());
        pack_panels(head.k.as_ptr(), at.k.time, at.d, keys, key_rows.as_mut_ptr());
    }
    dk.fill(0.0);
    dv.fill(0.0);

    let [dq_rows, dk_rows, dv_rows] = [(&out.dq, at.q), (&out.dk, at.k), (&out.dv, at.v)]
        .map(|(all, layout)| all.as_mut_ptr().wrapping_add(layout.at(head.b, head.h)));
    for start in (0..at.t_q).step_by(QUERIES) {
        let n = (at.t_q - start).min(QUERIES);
        // q carries the scale into the scores and into dk.
        // SAFETY: the CPU has the instructions, here and below.
        unsafe {
            copy_rows::<K>(at.scale, &head.q[start * at.q.time..], at.q.time, n, at.d, q, d_stride);
            copy_rows::<K>(1.0, &saved.dy[start * at.o.time..], at.o.time, n, at.d, dy, d_stride);
            for r in 0..n {
                delta[r] = K::dot(&dy[r * d_stride..][..at.d], &saved.o[(start + r) * at.o.time..][..at.d]);
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
                    ask_for(head.q.as_ptr().wrapping_add((start + n + r) * at.q.time), at.d);
                    ask_for(saved.dy.as_ptr().wrapping_add((start + n + r) * at.o.time), at.d);
                    ask_for(saved.o.as_ptr().wrapping_add((start + n + r) * at.o.time), at.d);
                    ask_for(dq_rows.wrapping_add((start + r) * at.q.time), at.d);
                }
                let seen = at.keys(start + r).saturating_sub(key).min(n_keys);
                let mask = head.mask_row(start + r, key, seen);
                let row = r * strip_stride..(r + 1) * strip_stride;
                let lse = saved.lse[start + r];
                // SAFETY: as above.
                unsafe { K::probabilities(&mut p[row.clone()], &mut ds[row], seen, mask, lse, delta[r]) };
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
            // SAFETY: the caller's promise.
            unsafe {
                let row = out.dq.slice(at.q.at(head.b, head.h) + (start + r) * at.q.time, at.d);
                K::scaled_copy(at.scale, &dq[r * d_stride..][..at.d], row);
            }
        }
    }
    for j in 0..at.t_k {
        ask_for(dk_rows.wrapping_add((j + AHEAD) * at.k.time), at.d);
        ask_for(dv_rows.wrapping_add((j + AHEAD) * at.v.time), at.d);
        // SAFETY: the caller's promise.
        unsafe {
            let row = out.dk.slice(at.k.at(head.b, head.h) + j * at.k.time, at.d);
            row.copy_from_slice(&dk[j * d_cols..][..at.d]);
            let row = out.dv.slice(at.v.at(head.b, head.h) + j * at.v.time, at.d);
            row.copy_from_slice(&dv[j * d_cols..][..at.d]);
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

/// `dst = scale·src` for `n` rows of `d`; what follows a row up to its stride is zeros.
///
/// # Safety
/// The CPU has the instructions.
unsafe fn copy_rows<K: Kernel>(
    scale: f32,
    src: &[f32],
    src_stride: usize,
    n: usize,
    d: usize,
    dst: &mut [f32],
    dst_stride: usize,
) {
    for (r, dst) in dst.chunks_exact_mut(dst_stride).take(n).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { K::scaled_copy(scale, &src[r * src_stride..][..d], dst) };
        dst[d..].fill(0.0);
    }
}

/// Prefetches a row of `d` floats: rows are too far apart for the hardware prefetcher.
#[inline]
fn ask_for(row: *const f32, d: usize) {
    for j in (0..d).step_by(TILE_COLS) {
        // SAFETY: a hint, which reads nothing: any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(j).cast()) };
    }
}

/// The next `n` floats, rounded up to a cache line.
fn take<'a>(scratch: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(round_cols(n));
    *scratch = rest;
    &mut taken[..n]
}
