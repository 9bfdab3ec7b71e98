//! Rows of a table `[rows, d]` picked by ids, and the gradient of the table.
//!
//! Ids are checked before anything is written. The gradient of a row is summed in the order of the positions that
//! picked it, in f32; each task has its own columns, so the order is the same whatever runs them.

use crate::cx::SharedMut;
use crate::{Cx, Floats, FloatsMut, SharedFloats};
use std::fmt;

/// A table of `rows` vectors of `d` floats, read at `n` positions.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// How many vectors the table has.
    pub rows: usize,
    /// Their length.
    pub d: usize,
    /// How many ids there are.
    pub n: usize,
}

/// An id that is not a row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IdError {
    /// Where among the ids.
    pub position: usize,
    /// The id.
    pub id: i32,
    /// How many rows the table has.
    pub rows: usize,
}

impl fmt::Display for IdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let IdError { position, id, rows } = self;
        write!(f, "id {id} at position {position} is not in 0..{rows}: fix the data or the table's size")
    }
}

impl std::error::Error for IdError {}

/// Columns of a backward task: 4 cache lines.
const COLUMNS: usize = 64;

impl Embedding {
    /// `y[i] = table[ids[i]]`, `[n, d]`.
    pub fn forward(&self, cx: &Cx, table: Floats, ids: &[i32], y: FloatsMut) -> Result<(), IdError> {
        let d = self.d;
        assert_eq!(table.len(), self.rows * d, "the table is [rows, d]");
        assert_eq!(y.len(), self.n * d, "y is [n, d]");
        self.check_ids(ids)?;
        if d == 0 {
            return Ok(());
        }
        let step = (16 * 1024 / d).max(1);
        let y = SharedFloats::new(y);
        cx.par.run(self.n.div_ceil(step), &|task, _| {
            for (i, &id) in ids.iter().enumerate().skip(task * step).take(step) {
                // SAFETY: tasks have disjoint rows, and each runs once.
                unsafe { y.part(i * d, d) }.copy_from(cx.isa, table.part(id as usize * d, d));
            }
        });
        Ok(())
    }

    /// `dtable[r] = Σ dy[i]` over the positions with `ids[i] == r`, and 0 where there are none: it overwrites.
    pub fn backward(&self, cx: &Cx, dy: Floats, ids: &[i32], dtable: &mut [f32]) -> Result<(), IdError> {
        let d = self.d;
        assert_eq!(dtable.len(), self.rows * d, "dtable is [rows, d]");
        assert_eq!(dy.len(), self.n * d, "dy is [n, d]");
        self.check_ids(ids)?;
        cx.for_each_chunk(dtable, 64 * 1024, |_, part| part.fill(0.0));
        // With little to add, one task for all columns.
        let wide = if self.n * d <= 16 * 1024 { d.max(1) } else { COLUMNS };
        let dtable = SharedMut::new(dtable);
        cx.par.run(d.div_ceil(wide), &|task, _| {
            let (first, wide) = (task * wide, wide.min(d - task * wide));
            let mut stage = [0.0; COLUMNS];
            let step = if dy.is_half() { COLUMNS } else { wide };
            for (i, &id) in ids.iter().enumerate() {
                for at in (first..first + wide).step_by(step) {
                    let len = step.min(first + wide - at);
                    // SAFETY: each task has its own columns and one part at a time, and runs once.
                    let target = unsafe { dtable.slice(id as usize * d + at, len) };
                    for (t, &g) in target.iter_mut().zip(dy.staged(cx.isa, i * d + at, len, &mut stage)) {
                        *t += g;
                    }
                }
            }
        });
        Ok(())
    }

    fn check_ids(&self, ids: &[i32]) -> Result<(), IdError> {
        assert_eq!(ids.len(), self.n, "ids are [n]");
        for (position, &id) in ids.iter().enumerate() {
            if !usize::try_from(id).is_ok_and(|row| row < self.rows) {
                return Err(IdError { position, id, rows: self.rows });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};
    use polyreme_dtype::DType;

    fn check(rows: usize, d: usize, n: usize) {
        let e = Embedding { rows, d, n };
        let (table, dy) = (data(1, rows * d), data(2, n * d));
        let ids: Vec<i32> = data(3, n).iter().map(|v| ((v * v) * rows as f32) as i32).collect();
        let mut runs = vec![];
        for cx in contexts() {
            let (mut y, mut dtable) = (vec![f32::NAN; n * d], vec![f32::NAN; rows * d]);
            e.forward(&cx, Floats::F32(&table), &ids, FloatsMut::F32(&mut y)).unwrap();
            e.backward(&cx, Floats::F32(&dy), &ids, &mut dtable).unwrap();
            for i in 0..n * d {
                assert_eq!(y[i], table[ids[i / d] as usize * d + i % d]);
            }
            runs.push(dtable);
            in_half(&e, &cx, &table, &ids, &dy);
        }
        same_bits("dtable", &runs);
        let mut want = vec![0.0; rows * d];
        for i in 0..n * d {
            want[ids[i / d] as usize * d + i % d] += f64::from(dy[i]);
        }
        close("dtable", &runs[0], &want, 1e-5);
    }

    /// Rows rounded as they are picked, rows of a table in half, and gradients in half.
    fn in_half(e: &Embedding, cx: &Cx, table: &[f32], ids: &[i32], dy: &[f32]) {
        for half in HALVES {
            for (from, to) in [(DType::F32, half), (half, half), (half, DType::F32)] {
                let table = OwnedFloats::new(from, table);
                let (mut want, mut got) = (vec![f32::NAN; e.n * e.d], OwnedFloats::unset(to, e.n * e.d));
                e.forward(cx, Floats::F32(&table.wide()), ids, FloatsMut::F32(&mut want)).unwrap();
                e.forward(cx, table.get(), ids, got.get_mut()).unwrap();
                same_rounded("rows", &[got], &[OwnedFloats::F32(want)]);
            }
            let dy = OwnedFloats::new(half, dy);
            let (mut want, mut got) = (vec![f32::NAN; e.rows * e.d], vec![f32::NAN; e.rows * e.d]);
            e.backward(cx, Floats::F32(&dy.wide()), ids, &mut want).unwrap();
            e.backward(cx, dy.get(), ids, &mut got).unwrap();
            same_rounded("dtable", &[OwnedFloats::F32(got)], &[OwnedFloats::F32(want)]);
        }
    }

    #[test]
    fn gathers_and_scatters() {
        for (rows, d, n) in
            [(1, 1, 0), (1, 1, 3), (5, 0, 2), (3, 7, 9), (10, 64, 5), (256, 130, 300), (7, 384, 100)]
        {
            check(rows, d, n);
        }
    }

    #[test]
    fn a_wrong_id_is_said_before_anything_is_written() {
        let e = Embedding { rows: 3, d: 2, n: 2 };
        for id in [3, -1, i32::MAX] {
            let (mut y, mut dtable) = ([9.0; 4], [9.0; 6]);
            let want = Err(IdError { position: 1, id, rows: 3 });
            let (cx, table, dy) = (Cx::serial(), Floats::F32(&[0.0; 6]), Floats::F32(&[1.0; 4]));
            assert_eq!(e.forward(&cx, table, &[0, id], FloatsMut::F32(&mut y)), want);
            assert_eq!(e.backward(&cx, dy, &[0, id], &mut dtable), want);
            assert_eq!((y, dtable), ([9.0; 4], [9.0; 6]));
        }
    }
}
