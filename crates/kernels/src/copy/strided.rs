//! A copy with strides on both sides, and its named forms.

use super::bits::Bits;
use super::transpose::{STRIP, TransposeTile};
use super::{Word, contiguous};
use crate::{Cx, Isa};

/// The most loops after folding.
const LOOPS_MAX: usize = 8;
/// Elements that a task should at least have: about 5 µs.
const TASK_ELEMENTS: usize = 16_384;
/// Long runs are cut here, so that one run can be many tasks.
const RUN_MAX: usize = 32_768;

/// One loop: how often, and how far either side moves.
#[derive(Clone, Copy, Debug)]
struct Loop {
    size: usize,
    source: usize,
    target: usize,
}

/// A copy from a strided view of one buffer to a strided view of another; no two elements have the same target.
#[derive(Clone, Debug)]
pub struct StridedCopy {
    /// Outermost first; never empty.
    loops: Vec<Loop>,
    source_start: usize,
    target_start: usize,
    source_len: usize,
    target_len: usize,
    how: How,
}

/// What the innermost work is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    /// Nothing to copy.
    Nothing,
    /// Runs that are contiguous on both sides.
    Runs,
    /// One value to a contiguous run.
    Repeat,
    /// The last two loops are contiguous on the source's and the target's side.
    Transpose,
    /// One element at a time.
    Steps,
}

impl StridedCopy {
    /// `target[i₀, i₁, ..] = source[.., i_k at axis axes[k], ..]`: dim `k` of the target is dim `axes[k]` of `shape`.
    pub fn permute(shape: &[usize], axes: &[usize]) -> StridedCopy {
        let mut seen = axes.to_vec();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..shape.len()), "axes {axes:?} permute {} dims", shape.len());
        let source = contiguous(shape);
        let target_shape: Vec<usize> = axes.iter().map(|&a| shape[a]).collect();
        let strides: Vec<usize> = axes.iter().map(|&a| source[a]).collect();
        let len = shape.iter().product();
        StridedCopy::new(&target_shape, (&strides, 0, len), (&contiguous(&target_shape), 0, len))
    }

    /// The elements `starts[d] + i·steps[d]`, `i < sizes[d]`, of `shape`, to a contiguous target of shape `sizes`.
    pub fn slice(shape: &[usize], starts: &[usize], sizes: &[usize], steps: &[usize]) -> StridedCopy {
        let (strides, start, len) = window(shape, starts, sizes, steps);
        let target_len = sizes.iter().product();
        StridedCopy::new(sizes, (&strides, start, len), (&contiguous(sizes), 0, target_len))
    }

    /// The reverse of [`StridedCopy::slice`]: a contiguous source of shape `sizes` into the window of `shape`; the
    /// rest of the target keeps its values.
    pub fn into_slice(shape: &[usize], starts: &[usize], sizes: &[usize], steps: &[usize]) -> StridedCopy {
        let (strides, start, len) = window(shape, starts, sizes, steps);
        let source_len = sizes.iter().product();
        StridedCopy::new(sizes, (&contiguous(sizes), 0, source_len), (&strides, start, len))
    }

    /// `shape` broadcast to `target_shape`, as in NumPy.
    pub fn expand(shape: &[usize], target_shape: &[usize]) -> StridedCopy {
        assert!(shape.len() <= target_shape.len(), "{shape:?} does not broadcast to {target_shape:?}");
        let missing = target_shape.len() - shape.len();
        let mut strides = vec![0; target_shape.len()];
        for (d, (&size, stride)) in shape.iter().zip(contiguous(shape)).enumerate() {
            let to = target_shape[missing + d];
            assert!(size == 1 || size == to, "{shape:?} does not broadcast to {target_shape:?}");
            strides[missing + d] = if size == 1 { 0 } else { stride };
        }
        let target = (&contiguous(target_shape)[..], 0, target_shape.iter().product());
        StridedCopy::new(target_shape, (&strides, 0, shape.iter().product()), target)
    }

    /// Each side is strides, start and length.
    fn new(
        shape: &[usize],
        source: (&[usize], usize, usize),
        target: (&[usize], usize, usize),
    ) -> StridedCopy {
        let mut loops: Vec<Loop> = Vec::new();
        for (d, &size) in shape.iter().enumerate().filter(|(_, size)| **size != 1) {
            let next = Loop { size, source: source.0[d], target: target.0[d] };
            match loops.last_mut() {
                Some(last) if last.source == next.source * size && last.target == next.target * size => {
                    *last = Loop { size: last.size * size, ..next };
                }
                _ => loops.push(next),
            }
        }
        if loops.is_empty() {
            loops.push(Loop { size: 1, source: 1, target: 1 });
        }
        assert!(loops.len() <= LOOPS_MAX, "at most {LOOPS_MAX} dims that do not fold");
        let last = loops[loops.len() - 1];
        let how = if shape.contains(&0) {
            How::Nothing
        } else if last.target == 1 && last.source == 1 {
            How::Runs
        } else if last.target == 1 && last.source == 0 {
            How::Repeat
        } else if let Some(at) = loops.iter().position(|l| l.source == 1 && l.size >= 4)
            && last.target == 1
        {
            let across = loops.remove(at);
            loops.insert(loops.len() - 1, across);
            How::Transpose
        } else {
            How::Steps
        };
        if how != How::Nothing {
            let end = |start: usize, stride: fn(&Loop) -> usize| {
                start + loops.iter().map(|l| (l.size - 1) * stride(l)).sum::<usize>()
            };
            assert!(end(source.1, |l| l.source) < source.2, "the view is inside the source");
            assert!(end(target.1, |l| l.target) < target.2, "the view is inside the target");
        }
        StridedCopy {
            loops,
            source_start: source.1,
            target_start: target.1,
            source_len: source.2,
            target_len: target.2,
            how,
        }
    }

    /// How many elements the source has.
    pub fn source_len(&self) -> usize {
        self.source_len
    }

    /// How many elements the target has.
    pub fn target_len(&self) -> usize {
        self.target_len
    }

    /// Copies.
    pub fn run<T: Word>(&self, cx: &Cx, source: &[T], target: &mut [T]) {
        assert_eq!(source.len(), self.source_len, "length of the source");
        assert_eq!(target.len(), self.target_len, "length of the target");
        let n_inner = match self.how {
            How::Nothing => return,
            How::Transpose => 2,
            How::Runs | How::Repeat | How::Steps => 1,
        };
        let (outer, inner) = self.loops.split_at(self.loops.len() - n_inner);
        // The first inner loop is cut into strips, and a task does some whole strips.
        let width = self.strip_width();
        let n_strips = inner[0].size.div_ceil(width);
        let n_items = n_strips * outer.iter().map(|l| l.size).product::<usize>();
        let item: usize = width.min(inner[0].size) * inner[1..].iter().map(|l| l.size).product::<usize>();
        let group = (TASK_ELEMENTS / item).max(1);
        let ends: BufferStarts<T::Bits> =
            BufferStarts { source: source.as_ptr().cast(), target: target.as_mut_ptr().cast() };
        let ends = &ends;
        cx.par.run(n_items.div_ceil(group), &|task, _| {
            let mut at = Cursor::new(outer, task * group / n_strips, self.source_start, self.target_start);
            for item in task * group..n_items.min((task + 1) * group) {
                // SAFETY: the views lie inside the slices, whose lengths were checked; elements have the size of their bits;
                // different items write different places.
                unsafe {
                    let (s, t) = (ends.source.add(at.source), ends.target.add(at.target));
                    self.item(cx.isa, s, t, inner, item % n_strips);
                }
                if item % n_strips == n_strips - 1 {
                    at.advance(outer);
                }
            }
        });
    }

    /// # Safety
    /// `s` and `t` are where the inner loops start, inside views that were checked.
    unsafe fn item<B: Bits>(&self, isa: Isa, s: *const B, t: *mut B, inner: &[Loop], strip: usize) {
        let l = inner[0];
        let first = strip * self.strip_width();
        let n = self.strip_width().min(l.size - first);
        // SAFETY: the caller's promise.
        unsafe {
            let (s, t) = (s.add(first * l.source), t.add(first * l.target));
            match self.how {
                How::Nothing => {}
                How::Runs => B::copy_run(isa, s, t, n),
                How::Repeat => std::slice::from_raw_parts_mut(t, n).fill(*s),
                How::Steps => (0..n).for_each(|i| *t.add(i * l.target) = *s.add(i * l.source)),
                How::Transpose => {
                    let (along, source_stride) = (inner[1].size, inner[1].source);
                    let tile = TransposeTile { across: n, along, source_stride, target_stride: l.target };
                    B::transpose(&tile, isa, s, t);
                }
            }
        }
    }

    /// How much of the first inner loop is done at a time.
    fn strip_width(&self) -> usize {
        match self.how {
            How::Transpose => STRIP,
            How::Nothing | How::Runs | How::Repeat | How::Steps => RUN_MAX,
        }
    }
}

/// Strides, start and length of a window of a contiguous shape.
fn window(shape: &[usize], starts: &[usize], sizes: &[usize], steps: &[usize]) -> (Vec<usize>, usize, usize) {
    let n = shape.len();
    assert!(
        starts.len() == n && sizes.len() == n && steps.len() == n,
        "one start, size and step for each dim"
    );
    let strides = contiguous(shape);
    let mut start = 0;
    for d in 0..n {
        let inside = sizes[d] == 0 || starts[d] + (sizes[d] - 1) * steps[d] < shape[d];
        assert!(
            inside && (steps[d] > 0 || sizes[d] <= 1),
            "dim {d}: {}+{}·{} of {}",
            starts[d],
            sizes[d],
            steps[d],
            shape[d]
        );
        start += starts[d] * strides[d];
    }
    (strides.iter().zip(steps).map(|(s, step)| s * step).collect(), start, shape.iter().product())
}

/// The starts of both buffers.
struct BufferStarts<B> {
    source: *const B,
    target: *mut B,
}

// SAFETY: the source is only read, and items write different places of the target.
unsafe impl<B> Sync for BufferStarts<B> {}

/// A place in the outer loops.
struct Cursor {
    idx: [usize; LOOPS_MAX],
    source: usize,
    target: usize,
}

impl Cursor {
    fn new(loops: &[Loop], mut item: usize, source: usize, target: usize) -> Cursor {
        let mut cursor = Cursor { idx: [0; LOOPS_MAX], source, target };
        for (d, l) in loops.iter().enumerate().rev() {
            cursor.idx[d] = item % l.size;
            item /= l.size;
            cursor.source += cursor.idx[d] * l.source;
            cursor.target += cursor.idx[d] * l.target;
        }
        cursor
    }

    #[inline]
    fn advance(&mut self, loops: &[Loop]) {
        for (d, l) in loops.iter().enumerate().rev() {
            self.idx[d] += 1;
            self.source += l.source;
            self.target += l.target;
            if self.idx[d] < l.size {
                return;
            }
            self.idx[d] = 0;
            self.source -= l.size * l.source;
            self.target -= l.size * l.target;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::testing::Reverse;
    use polyreme_dtype::f16;

    fn sizes(shape: &[usize]) -> Vec<Vec<usize>> {
        let n: usize = shape.iter().product();
        let strides = contiguous(shape);
        (0..n).map(|flat| strides.iter().zip(shape).map(|(s, size)| flat / s % size).collect()).collect()
    }

    fn both(copy: &StridedCopy, target: &[u32]) -> Vec<u32> {
        let source: Vec<u32> =
            (0..copy.source_len() as u32).map(|i| i.wrapping_mul(2_654_435_761) | 1).collect();
        let mut a = target.to_vec();
        copy.run(&Cx::oracle(), &source, &mut a);
        for isa in Isa::available() {
            let mut b = target.to_vec();
            copy.run(&Cx { isa, par: &crate::Serial }, &source, &mut b);
            assert!(a == b, "the twins agree on {}", isa.name());
        }
        let upper =
            |words: &[u32]| words.iter().map(|v| f16::from_bits((v >> 16) as u16)).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut halves = upper(target);
            copy.run(&Cx { isa, par: &Reverse(3) }, &upper(&source), &mut halves);
            let same = halves.iter().zip(upper(&a)).all(|(h, w)| h.to_bits() == w.to_bits());
            assert!(same, "elements of two bytes go where those of four do on {}", isa.name());
        }
        a
    }

    fn value(i: usize) -> u32 {
        (i as u32).wrapping_mul(2_654_435_761) | 1
    }

    fn at(strides: &[usize], idx: &[usize]) -> usize {
        strides.iter().zip(idx).map(|(s, i)| s * i).sum()
    }

    #[test]
    fn permutes() {
        for (shape, axes) in [
            (&[][..], &[][..]),
            (&[5], &[0]),
            (&[0, 3], &[1, 0]),
            (&[1, 9], &[1, 0]),
            (&[8, 8], &[1, 0]),
            (&[7, 9], &[1, 0]),
            (&[33, 70], &[1, 0]),
            (&[300, 257], &[1, 0]),
            (&[2, 3, 5, 7], &[0, 2, 3, 1]),
            (&[2, 20, 19, 18], &[0, 3, 1, 2]),
            (&[3, 17, 4, 16], &[0, 2, 1, 3]),
            (&[3, 17, 4, 16], &[3, 2, 1, 0]),
            (&[2, 3, 4, 5, 2, 3], &[5, 3, 1, 0, 2, 4]),
            (&[2, 3, 4, 5, 2, 3], &[1, 0, 2, 3, 5, 4]),
            (&[3, 2, 5, 7], &[0, 2, 3, 1]),
            (&[2, 3, 150], &[0, 2, 1]),
            (&[3, 6, 33], &[0, 2, 1]),
            (&[2, 33, 5], &[0, 2, 1]),
            (&[2, 7, 16], &[0, 2, 1]),
            (&[2, 100, 7], &[0, 2, 1]),
            (&[100_000], &[0]),
            (&[3, 65_536], &[0, 1]),
            (&[2, 3, 70_000], &[1, 0, 2]),
        ] {
            let copy = StridedCopy::permute(shape, axes);
            let got = both(&copy, &vec![0; copy.target_len()]);
            let (from, to_shape) = (contiguous(shape), axes.iter().map(|&a| shape[a]).collect::<Vec<_>>());
            for (flat, idx) in sizes(&to_shape).iter().enumerate() {
                let offset: usize = axes.iter().zip(idx).map(|(&a, i)| from[a] * i).sum();
                assert_eq!(got[flat], value(offset), "{shape:?} by {axes:?} at {idx:?}");
            }
        }
    }

    #[test]
    fn slices_and_back() {
        for (shape, starts, size, steps) in [
            (&[10][..], &[3][..], &[4][..], &[2][..]),
            (&[10], &[3], &[0], &[1]),
            (&[6, 10], &[1, 2], &[3, 5], &[2, 1]),
            (&[6, 10], &[0, 0], &[6, 10], &[1, 1]),
            (&[4, 5, 6], &[1, 0, 2], &[2, 5, 2], &[1, 1, 3]),
            (&[4, 50, 60], &[1, 0, 2], &[2, 50, 40], &[1, 1, 1]),
        ] {
            let strides = contiguous(shape);
            let place = |idx: &[usize]| -> usize {
                (0..idx.len()).map(|d| strides[d] * (starts[d] + idx[d] * steps[d])).sum()
            };
            let out = StridedCopy::slice(shape, starts, size, steps);
            let got = both(&out, &vec![0; out.target_len()]);
            let back = StridedCopy::into_slice(shape, starts, size, steps);
            let mut want = vec![9; back.target_len()];
            let put = both(&back, &want);
            for (flat, idx) in sizes(size).iter().enumerate() {
                assert_eq!(got[flat], value(place(idx)));
                want[place(idx)] = value(flat);
            }
            assert_eq!(put, want);
        }
    }

    #[test]
    fn expands() {
        for (shape, to) in [
            (&[][..], &[][..]),
            (&[], &[3, 4]),
            (&[1], &[70_000]),
            (&[4], &[3, 4]),
            (&[3, 1], &[3, 4]),
            (&[2, 1, 3, 1], &[5, 2, 4, 3, 6]),
        ] {
            let copy = StridedCopy::expand(shape, to);
            let got = both(&copy, &vec![0; copy.target_len()]);
            let mut strides = contiguous(shape);
            strides.iter_mut().zip(shape).for_each(|(s, size)| *s *= usize::from(*size > 1));
            for (flat, idx) in sizes(to).iter().enumerate() {
                assert_eq!(got[flat], value(at(&strides, &idx[to.len() - shape.len()..])));
            }
        }
    }
}
