//! Picking elements along a dim by index, and adding them back: `torch.gather` and `scatter_add`.
//!
//! Memory-bound and irregular: there is one form for all instruction sets.

use super::{Word, contiguous};
use crate::cx::SharedMut;
use crate::{Cx, Floats};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements that a task should at least have.
const TASK_ELEMENTS: usize = 8_192;
/// Columns that a task of a scatter takes, when columns are split over tasks.
const COLUMNS: usize = 256;

/// `y[i, j, k] = x[i, index[i, j, k], k]`, with the dim in the middle. The index's shape is y's; in the other dims it
/// is at most x's.
#[derive(Clone, Debug)]
pub struct Gather {
    index_shape: Vec<usize>,
    /// Strides of x.
    strides: Vec<usize>,
    axis: usize,
    axis_len: usize,
    x_len: usize,
    y_len: usize,
}

/// The first index that is outside the dim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadIndex {
    /// Its flat position among the indices.
    pub position: usize,
    /// Its value.
    pub value: i32,
    /// The length of the dim.
    pub axis_len: usize,
}

impl fmt::Display for BadIndex {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "index {} at position {} is outside 0..{}", self.value, self.position, self.axis_len)
    }
}

impl std::error::Error for BadIndex {}

impl Gather {
    /// Gathers from `shape` along `axis`.
    pub fn new(shape: &[usize], index_shape: &[usize], axis: usize) -> Gather {
        assert!(
            axis < shape.len() && shape.len() == index_shape.len(),
            "as many dims, and the axis is one of them"
        );
        let fits = (0..shape.len()).all(|d| d == axis || index_shape[d] <= shape[d]);
        assert!(fits, "index {index_shape:?} into {shape:?} along {axis}");
        Gather {
            index_shape: index_shape.to_vec(),
            strides: contiguous(shape),
            axis,
            axis_len: shape[axis],
            x_len: shape.iter().product(),
            y_len: index_shape.iter().product(),
        }
    }

    /// `y[i, j, k] = x[i, index[i, j, k], k]`. With a bad index, `y` is partly written.
    pub fn forward<T: Word>(&self, cx: &Cx, x: &[T], index: &[i32], y: &mut [T]) -> Result<(), BadIndex> {
        assert_eq!(x.len(), self.x_len, "length of x");
        assert_eq!(index.len(), self.y_len, "length of the index");
        assert_eq!(y.len(), self.y_len, "length of y");
        let row_len = self.index_shape[self.index_shape.len() - 1];
        if self.y_len == 0 {
            return Ok(());
        }
        let bad = AtomicUsize::new(usize::MAX);
        let rows = (TASK_ELEMENTS / row_len).max(1);
        let (axis_step, step) = self.steps();
        cx.for_each_chunk(y, rows * row_len, |i, y| {
            for (r, y) in y.chunks_mut(row_len).enumerate() {
                let row = i * rows + r;
                let base = self.base(row);
                let index = &index[row * row_len..][..row_len];
                for (k, (v, &at)) in y.iter_mut().zip(index).enumerate() {
                    if (at as u32 as usize) < self.axis_len {
                        *v = x[base + at as usize * axis_step + k * step];
                    } else {
                        bad.fetch_min(row * row_len + k, Ordering::Relaxed);
                    }
                }
            }
        });
        self.verdict(index, bad.into_inner())
    }

    /// `dx[i, index[i, j, k], k] += dy[i, j, k]`, in the order of `j`. With a bad index, `dx` is left as it was.
    pub fn scatter_add(&self, cx: &Cx, dy: Floats, index: &[i32], dx: &mut [f32]) -> Result<(), BadIndex> {
        assert_eq!(dx.len(), self.x_len, "length of dx");
        assert_eq!(index.len(), self.y_len, "length of the index");
        assert_eq!(dy.len(), self.y_len, "length of dy");
        let bad = index.iter().position(|&at| at as u32 as usize >= self.axis_len);
        self.verdict(index, bad.unwrap_or(usize::MAX))?;
        if self.y_len == 0 {
            return Ok(());
        }
        let row_len = self.index_shape[self.index_shape.len() - 1];
        // Different outer indices never overlap in dx; nor do the columns, unless they are the dim.
        let n_outer: usize = self.index_shape[..self.axis].iter().product();
        let rows = self.y_len / row_len / n_outer;
        let (axis_step, step) = self.steps();
        let columns = if step == 1 { COLUMNS.min(row_len) } else { row_len };
        let n_columns = row_len.div_ceil(columns);
        let n_items = self.y_len / row_len / rows * n_columns;
        let group = (TASK_ELEMENTS / (rows * columns)).max(1);
        let shared = SharedMut::new(dx);
        cx.par.run(n_items.div_ceil(group), &|task, _| {
            for item in task * group..n_items.min((task + 1) * group) {
                let (outer, first) = (item / n_columns, item % n_columns * columns);
                let (end, mut stage) = (row_len.min(first + columns), [0.0; COLUMNS]);
                let run = if dy.is_half() { COLUMNS } else { columns };
                for row in outer * rows..(outer + 1) * rows {
                    let base = self.base(row);
                    for first in (first..end).step_by(run) {
                        let len = run.min(end - first);
                        let dy = dy.staged(cx.isa, row * row_len + first, len, &mut stage);
                        for (k, &g) in (first..).zip(dy) {
                            let at = index[row * row_len + k] as usize;
                            // SAFETY: the index was checked, so the place is inside; no other task has this outer
                            // index and this column.
                            unsafe { *shared.as_mut_ptr().add(base + at * axis_step + k * step) += g };
                        }
                    }
                }
            }
        });
        Ok(())
    }

    /// How far x moves for one step along the dim, and for one along the last dim.
    fn steps(&self) -> (usize, usize) {
        (self.strides[self.axis], usize::from(self.axis + 1 != self.strides.len()))
    }

    /// Where the row of x that belongs to a row of the index starts, at 0 along the dim.
    fn base(&self, mut row: usize) -> usize {
        let mut base = 0;
        for d in (0..self.index_shape.len() - 1).rev() {
            if d != self.axis {
                base += row % self.index_shape[d] * self.strides[d];
            }
            row /= self.index_shape[d];
        }
        base
    }

    fn verdict(&self, index: &[i32], bad: usize) -> Result<(), BadIndex> {
        match index.get(bad) {
            Some(&value) => Err(BadIndex { position: bad, value, axis_len: self.axis_len }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats};
    use crate::lanes::testing::contexts;

    fn pick<T: Word>(gather: &Gather, x: &[T], index: &[i32]) -> Vec<T> {
        let mut y = vec![T::default(); gather.y_len];
        gather.forward(&Cx::serial(), x, index, &mut y).unwrap();
        y
    }

    fn check(shape: &[usize], index_shape: &[usize], axis: usize) {
        let gather = Gather::new(shape, index_shape, axis);
        let x: Vec<f32> = (0..gather.x_len).map(|i| i as f32).collect();
        let index: Vec<i32> = (0..gather.y_len).map(|i| (i * 7919 % shape[axis]) as i32).collect();
        let (strides, index_strides) = (contiguous(shape), contiguous(index_shape));
        let place = |flat: usize| -> usize {
            let at = |d: usize| flat / index_strides[d] % index_shape[d];
            (0..shape.len()).map(|d| strides[d] * if d == axis { index[flat] as usize } else { at(d) }).sum()
        };
        let mut y = vec![0.0; gather.y_len];
        gather.forward(&Cx::serial(), &x, &index, &mut y).unwrap();
        let dy: Vec<f32> = (0..gather.y_len).map(|i| (i % 13) as f32 * 0.37).collect();
        let (mut dx, mut want) = (vec![1.0; gather.x_len], vec![1.0; gather.x_len]);
        gather.scatter_add(&Cx::serial(), Floats::F32(&dy), &index, &mut dx).unwrap();
        for flat in 0..gather.y_len {
            assert_eq!(y[flat], x[place(flat)], "{shape:?} {index_shape:?} {axis} at {flat}");
            want[place(flat)] += dy[flat];
        }
        assert_eq!(dx, want);
        for half in HALVES {
            let (x, dy) = (OwnedFloats::new(half, &x), OwnedFloats::new(half, &dy));
            let picked = match &x {
                OwnedFloats::F16(x) => OwnedFloats::F16(pick(&gather, x, &index)),
                OwnedFloats::Bf16(x) => OwnedFloats::Bf16(pick(&gather, x, &index)),
                OwnedFloats::F32(_) => unreachable!("a half"),
            };
            assert_eq!(picked.wide(), pick(&gather, &x.wide(), &index));
            for cx in contexts() {
                let (mut got, mut of_f32) = (vec![1.0; gather.x_len], vec![1.0; gather.x_len]);
                gather.scatter_add(&cx, dy.get(), &index, &mut got).unwrap();
                gather.scatter_add(&cx, Floats::F32(&dy.wide()), &index, &mut of_f32).unwrap();
                assert_eq!(got, of_f32);
            }
        }
        for at in
            [0, gather.y_len / 2, gather.y_len.saturating_sub(1)].into_iter().filter(|&at| at < gather.y_len)
        {
            for value in [-1, shape[axis] as i32] {
                let mut index = index.clone();
                index[at..].fill(value);
                let refused = Err(BadIndex { position: at, value, axis_len: shape[axis] });
                assert_eq!(gather.forward(&Cx::serial(), &x, &index, &mut y), refused);
                assert_eq!(gather.scatter_add(&Cx::serial(), Floats::F32(&dy), &index, &mut dx), refused);
            }
        }
        assert_eq!(dx, want, "a refused scatter changes nothing");
    }

    #[test]
    fn along_every_axis() {
        check(&[5], &[9], 0);
        check(&[5], &[0], 0);
        check(&[100, 10], &[100, 1], 1);
        check(&[7, 600], &[30, 600], 0);
        check(&[7, 600], &[30, 17], 0);
        check(&[3, 4, 5], &[3, 9, 5], 1);
        check(&[3, 4, 5], &[2, 9, 4], 1);
        check(&[3, 4, 5], &[2, 3, 11], 2);
        check(&[3, 4, 5], &[8, 3, 5], 0);
        check(&[2, 3, 4, 5], &[2, 2, 7, 3], 2);
    }
}
