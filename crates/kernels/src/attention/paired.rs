//! Attention with products of bf16: operands are rounded to it as they are copied, and sums, softmax and statistics are f32.
//!
//! What is rounded is q, k, v and dy, where they are not stored in bf16 anyway, and p and ds, of which p is not divided by
//! its row's sum forward, as the division waits until the rows of o are written. The scale is applied in f32, to the scores
//! and to the sums of dq and dk.
//!
//! Keys and values of a head are copied into panels once; then, for each block of queries:
//!
//! - forward: scores, their exponentials, and those times v.
//! - backward: for each block of keys p and ds, and from these dq, and the transposed `dkᵀ += qᵀ·ds` and `dvᵀ += dyᵀ·p`: so p
//!   and ds are panels whose pairs are neighbouring rows of the strip, which takes no transpose to copy. A block of queries is
//!   one run of these sums.
//!
//! Every sum has the bits of one product of whole matrices: blocks are whole runs, and what is left out above the diagonal
//! is zeros. So results depend neither on the size of blocks nor on the instruction set, as long as the order of sums and the
//! bits of the softmax do not: scalar exponentials differ from those of vectors.

use std::ops::Range;

use super::rows::RowPasses;
use super::stored::HeadRowsMut;
use super::{Attention, HeadGrads, HeadInputs, Saved};
use crate::copy::TransposeTile;
use crate::cx::SharedMut;
use crate::gemm::pairs::blocks::{
    PairBlocks, PairOperand, RUN, UNIT, UNIT_LEN, UnitProduct, runs, units_len,
};
use crate::tile::{round_cols, row_stride, take};
use crate::{Floats, Isa};

/// Queries of a block: a run of the sums over queries, and two strips.
const QUERIES: usize = 32;
/// Keys of a block in backward: whole runs. The two strips then take 128 KB of L2.
const KEYS: usize = 512;
/// Keys whose gradients are transposed together, as they are written.
const TOGETHER: usize = 16;

pub(super) fn forward_len(at: &Attention) -> usize {
    units_len(at.t_k, at.d)
        + units_len(at.d, at.t_k)
        + units_len(QUERIES, at.d)
        + units_len(QUERIES, at.t_k)
        + QUERIES * row_stride(at.t_k)
        + QUERIES * row_stride(at.d)
        + round_cols(at.d)
        + QUERIES
}

pub(super) fn backward_len(at: &Attention) -> usize {
    let keys = at.t_k.min(KEYS);
    2 * units_len(at.t_k, at.d)
        + units_len(at.d, at.t_k)
        + 2 * round_cols(at.d) * row_stride(at.t_k)
        + 2 * units_len(QUERIES, at.d)
        + 2 * units_len(at.d, QUERIES)
        + units_len(QUERIES, keys)
        + 2 * units_len(keys, QUERIES)
        + 2 * QUERIES * row_stride(keys)
        + QUERIES * row_stride(at.d)
        + TOGETHER * round_cols(at.d)
        + 2 * round_cols(at.d)
        + QUERIES
}

/// Queries `rows` of one head.
///
/// # Safety
/// The CPU has the instructions; nothing else accesses these rows of `o` and `lse`.
pub(super) unsafe fn forward<R: RowPasses>(
    at: &Attention,
    (isa, blocks): (Isa, PairBlocks),
    head: &HeadInputs,
    rows: Range<usize>,
    o: HeadRowsMut,
    lse: SharedMut<f32>,
    scratch: &mut [f32],
) {
    let keys = if rows.is_empty() { 0 } else { at.keys(rows.end - 1) };
    let (strip_stride, d_stride) = (row_stride(at.t_k), row_stride(at.d));
    let (d_runs, key_runs) = (runs(at.d), runs(keys));
    let mut scratch = scratch;
    let keys_t = take(&mut scratch, units_len(keys, at.d));
    let values = take(&mut scratch, units_len(at.d, keys));
    let q = take(&mut scratch, units_len(QUERIES, at.d));
    let p = take(&mut scratch, units_len(QUERIES, keys));
    let strip = take(&mut scratch, QUERIES * strip_stride);
    let sums = take(&mut scratch, QUERIES * d_stride);
    let stage = take(&mut scratch, at.d);
    let inverse = take(&mut scratch, QUERIES);

    blocks.copy_panels(&head.k.along_d(0, keys, at.d), keys_t);
    blocks.copy_panels(&head.v.along_rows(0, keys, at.d), values);
    for start in rows.clone().step_by(QUERIES) {
        let n = (rows.end - start).min(QUERIES);
        let seen_by_block = at.keys(start + n - 1);
        blocks.copy_strips(&head.q.along_d(start, n, at.d), q);
        let lse_range = at.lse_range(head, start..start + n);
        // SAFETY: the caller's promise.
        let lse = unsafe { lse.slice(lse_range.start, n) };
        blocks.multiply(UnitProduct {
            runs: d_runs,
            rows: n,
            panels: seen_by_block.div_ceil(UNIT),
            a: (q, d_runs),
            b: (keys_t, d_runs),
            c: (strip, strip_stride),
            add: false,
        });
        for r in 0..n {
            head.q.ask_for(start + n + r, at.d);
            o.ask_for(start + r, at.d);
            let seen = at.keys(start + r);
            let row = &mut strip[r * strip_stride..][..strip_stride];
            let mask = head.mask_row(start + r, 0, seen);
            // SAFETY: the CPU has the instructions, here and below.
            let (max, sum) = unsafe { R::exponentials(row, seen, at.scale, mask) };
            row[seen..seen_by_block].fill(0.0);
            // A row that sees nothing is all zeros, and stays so.
            let seen = sum != 0.0;
            lse[r] = if seen { max + sum.ln() } else { max };
            inverse[r] = if seen { 1.0 / sum } else { 0.0 };
        }
        blocks.copy_strips(&strip_rows(strip, strip_stride, n, seen_by_block), p);
        blocks.multiply(UnitProduct {
            runs: runs(seen_by_block),
            rows: n,
            panels: at.d.div_ceil(UNIT),
            a: (p, runs(seen_by_block)),
            b: (values, key_runs),
            c: (sums, d_stride),
            add: false,
        });
        for r in 0..n {
            // SAFETY: the caller's promise.
            unsafe {
                o.make(isa, start + r, at.d, stage, |o| {
                    R::scaled_copy(inverse[r], &sums[r * d_stride..][..at.d], o);
                });
            }
        }
    }
}

/// All gradients of one head.
///
/// # Safety
/// The CPU has the instructions; nothing else accesses this head's rows of the gradients, and they do not overlap each other.
pub(super) unsafe fn backward<R: RowPasses>(
    at: &Attention,
    (isa, blocks): (Isa, PairBlocks),
    head: &HeadInputs,
    saved: &Saved,
    out: &HeadGrads,
    scratch: &mut [f32],
) {
    let keys = if at.t_q == 0 { 0 } else { at.keys(at.t_q - 1) };
    let block_keys = at.t_k.min(KEYS);
    let (strip_stride, d_stride, keys_stride) =
        (row_stride(block_keys), row_stride(at.d), row_stride(at.t_k));
    let (d_runs, key_runs, d_panels) = (runs(at.d), runs(keys), at.d.div_ceil(UNIT));
    let mut scratch = scratch;
    let keys_t = take(&mut scratch, units_len(keys, at.d));
    let values_t = take(&mut scratch, units_len(keys, at.d));
    let key_rows = take(&mut scratch, units_len(at.d, keys));
    let dk_t = take(&mut scratch, d_panels * UNIT * keys_stride);
    let dv_t = take(&mut scratch, d_panels * UNIT * keys_stride);
    let [q, dy] = [0; 2].map(|_| take(&mut scratch, units_len(QUERIES, at.d)));
    let [q_t, dy_t] = [0; 2].map(|_| take(&mut scratch, units_len(at.d, QUERIES)));
    let ds_strips = take(&mut scratch, units_len(QUERIES, block_keys));
    let [p_panels, ds_panels] = [0; 2].map(|_| take(&mut scratch, units_len(block_keys, QUERIES)));
    let [p, ds] = [0; 2].map(|_| take(&mut scratch, QUERIES * strip_stride));
    let dq = take(&mut scratch, QUERIES * d_stride);
    let stage = take(&mut scratch, TOGETHER * at.d);
    let [dy_row, o_row] = [0; 2].map(|_| take(&mut scratch, at.d));
    let delta = take(&mut scratch, QUERIES);

    blocks.copy_panels(&head.k.along_d(0, keys, at.d), keys_t);
    blocks.copy_panels(&head.v.along_d(0, keys, at.d), values_t);
    blocks.copy_panels(&head.k.along_rows(0, keys, at.d), key_rows);
    dk_t.fill(0.0);
    dv_t.fill(0.0);

    for start in (0..at.t_q).step_by(QUERIES) {
        let n = (at.t_q - start).min(QUERIES);
        blocks.copy_strips(&head.q.along_d(start, n, at.d), q);
        blocks.copy_strips(&saved.dy.along_d(start, n, at.d), dy);
        blocks.copy_strips(&head.q.along_rows(start, n, at.d), q_t);
        blocks.copy_strips(&saved.dy.along_rows(start, n, at.d), dy_t);
        for r in 0..n {
            let (dy, o) =
                (saved.dy.row(isa, start + r, at.d, dy_row), saved.o.row(isa, start + r, at.d, o_row));
            // SAFETY: the CPU has the instructions, here and below.
            delta[r] = unsafe { R::dot(dy, o) };
        }
        dq.fill(0.0);

        let seen_by_block = at.keys(start + n - 1);
        for key in (0..seen_by_block).step_by(KEYS) {
            let n_keys = (seen_by_block - key).min(KEYS);
            let panels = n_keys.div_ceil(UNIT);
            for (rows, panels_t, c) in [(&*q, &*keys_t, &mut *p), (&*dy, &*values_t, &mut *ds)] {
                blocks.multiply(UnitProduct {
                    runs: d_runs,
                    rows: n,
                    panels,
                    a: (rows, d_runs),
                    b: (&panels_t[key / UNIT * d_runs * UNIT_LEN..], d_runs),
                    c: (c, strip_stride),
                    add: false,
                });
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
                let (p, ds) =
                    (&mut p[r * strip_stride..][..strip_stride], &mut ds[r * strip_stride..][..strip_stride]);
                // SAFETY: as above.
                unsafe { R::probabilities(p, ds, seen, at.scale, mask, saved.lse[start + r], delta[r]) };
                p[seen..n_keys].fill(0.0);
                ds[seen..n_keys].fill(0.0);
            }
            let of_ds = strip_rows(ds, strip_stride, n, n_keys);
            blocks.copy_strips(&of_ds, ds_strips);
            blocks.multiply(UnitProduct {
                runs: runs(n_keys),
                rows: n,
                panels: d_panels,
                a: (ds_strips, runs(n_keys)),
                b: (&key_rows[key / RUN * UNIT_LEN..], key_runs),
                c: (dq, d_stride),
                add: key > 0,
            });
            let of_p = strip_rows(p, strip_stride, n, n_keys);
            for (strip, panels_of, rows_t, sums) in
                [(of_p, &mut *p_panels, &*dy_t, &mut *dv_t), (of_ds, &mut *ds_panels, &*q_t, &mut *dk_t)]
            {
                blocks.copy_panels(&strip.transposed(), panels_of);
                blocks.multiply(UnitProduct {
                    runs: 1,
                    rows: at.d,
                    panels,
                    a: (rows_t, 1),
                    b: (panels_of, 1),
                    c: (&mut sums[key..], keys_stride),
                    add: true,
                });
            }
        }
        for r in 0..n {
            // SAFETY: the caller's promise.
            unsafe {
                out.dq.make(isa, start + r, at.d, dy_row, |row| {
                    R::scaled_copy(at.scale, &dq[r * d_stride..][..at.d], row);
                });
            }
        }
    }
    // SAFETY: the caller's promise.
    unsafe {
        write_transposed::<R>(at, isa, at.scale, dk_t, keys_stride, &out.dk, (stage, dy_row));
        write_transposed::<R>(at, isa, 1.0, dv_t, keys_stride, &out.dv, (stage, dy_row));
    }
}

/// Writes a gradient of the keys or values from its transpose, times `scale`.
///
/// # Safety
/// As for [`backward`].
unsafe fn write_transposed<R: RowPasses>(
    at: &Attention,
    isa: Isa,
    scale: f32,
    sums_t: &[f32],
    stride: usize,
    out: &HeadRowsMut,
    (stage, row_stage): (&mut [f32], &mut [f32]),
) {
    for first in (0..at.t_k).step_by(TOGETHER) {
        let n = (at.t_k - first).min(TOGETHER);
        let tile = TransposeTile { across: n, along: at.d, source_stride: stride, target_stride: at.d };
        assert!(sums_t.len() >= (at.d - 1) * stride + first + n && stage.len() >= n * at.d);
        // SAFETY: both have room for the tile, by the assertion, and are different slices.
        unsafe { tile.run(isa, sums_t[first..].as_ptr().cast(), stage.as_mut_ptr().cast()) };
        for (j, row) in stage.chunks_exact(at.d).take(n).enumerate() {
            out.ask_for(first + TOGETHER + j, at.d);
            // SAFETY: the caller's promise.
            unsafe { out.make(isa, first + j, at.d, row_stage, |out| R::scaled_copy(scale, row, out)) };
        }
    }
}

/// The first `n_keys` columns of `n` rows of a strip, as an operand whose steps of k are the keys.
fn strip_rows(strip: &[f32], stride: usize, n: usize, n_keys: usize) -> PairOperand<'_> {
    PairOperand { x: Floats::F32(strip), own: stride, k: 1, n_own: n, n_k: n_keys }
}
