//! Rows of halves in f32, some at a time: buffers for kernels that need whole rows more than once.
//!
//! A kernel on rows widens a few of them into buffers, computes with the code it has for f32, and rounds the result out
//! of another one. What is in f32 is used in place, all rows of a task at once.

use std::ops::Range;

use crate::cx::SharedMut;

/// Floats of a buffer, where rows are shorter than that: 8 KB, so that three of them stay in the L1 cache.
const BUFFER: usize = 2_048;

/// The buffers of each worker for rows of one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStage {
    n_buffers: usize,
    /// Rows that are done at a time.
    rows: usize,
    buffer_len: usize,
}

impl RowStage {
    /// `n_buffers` for rows of `d`; none if there are no `halves`.
    pub(crate) fn new(halves: bool, n_buffers: usize, d: usize) -> RowStage {
        if !halves {
            return RowStage { n_buffers, rows: usize::MAX, buffer_len: 0 };
        }
        let rows = (BUFFER / d.max(1)).max(1);
        RowStage { n_buffers, rows, buffer_len: rows * d }
    }

    /// `n_buffers` for this many rows of `d`; none if there are no `halves`.
    pub(crate) fn of_rows(halves: bool, n_buffers: usize, rows: usize, d: usize) -> RowStage {
        if halves {
            RowStage { n_buffers, rows, buffer_len: rows * d }
        } else {
            RowStage::new(false, n_buffers, d)
        }
    }

    /// How many floats the buffers of all workers have.
    pub(crate) fn len(&self, workers: usize) -> usize {
        workers * self.n_buffers * self.buffer_len
    }

    /// The buffers of a worker.
    ///
    /// # Safety
    /// No two calls with the same worker have buffers that are alive at the same time.
    pub(crate) unsafe fn buffers<'a, const N: usize>(
        &self,
        scratch: SharedMut<'a, f32>,
        worker: usize,
    ) -> [&'a mut [f32]; N] {
        assert_eq!(N, self.n_buffers, "number of buffers");
        // SAFETY: each buffer has its own place; the rest is the caller's promise.
        std::array::from_fn(|k| unsafe { scratch.slice((worker * N + k) * self.buffer_len, self.buffer_len) })
    }

    /// Cuts rows into those that are done at a time.
    pub(crate) fn cut(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let step = self.rows.min(rows.len().max(1));
        rows.clone().step_by(step).map(move |first| first..rows.end.min(first + step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_once_and_buffers_do_not_overlap() {
        for (halves, d, rows) in [(true, 1, 5000), (true, 700, 11), (true, 5000, 3), (false, 700, 11)] {
            let stage = RowStage::new(halves, 2, d);
            let all: Vec<usize> = stage.cut(7..7 + rows).flatten().collect();
            assert_eq!(all, (7..7 + rows).collect::<Vec<_>>());
            assert!(stage.cut(7..7 + rows).all(|r| !halves || r.len() * d <= stage.buffer_len));
            let mut scratch = vec![0.0; stage.len(3)];
            let shared = SharedMut::new(&mut scratch);
            for worker in 0..3 {
                // SAFETY: one worker after the other.
                let buffers: [_; 2] = unsafe { stage.buffers(shared, worker) };
                buffers.into_iter().for_each(|b| b.iter_mut().for_each(|v| *v += 1.0));
            }
            assert!(scratch.iter().all(|&v| v == 1.0));
        }
    }
}
