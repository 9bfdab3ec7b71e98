//! Several tensors in one, and one tensor in a larger one.

use super::{StridedCopy, Word};
use crate::Cx;

/// Tensors concatenated along a dim.
#[derive(Clone, Debug)]
pub struct Concat {
    into: Vec<StridedCopy>,
    back: Vec<StridedCopy>,
}

impl Concat {
    /// `shapes` differ at most in `axis`.
    pub fn new(shapes: &[&[usize]], axis: usize) -> Concat {
        assert!(!shapes.is_empty(), "at least one tensor");
        let mut whole = shapes[0].to_vec();
        whole[axis] = shapes.iter().map(|s| s[axis]).sum();
        let (mut into, mut back) = (Vec::new(), Vec::new());
        let mut starts = vec![0; whole.len()];
        let steps = vec![1; whole.len()];
        for shape in shapes {
            let same = (0..whole.len()).all(|d| d == axis || shape.get(d) == Some(&whole[d]));
            assert!(same && shape.len() == whole.len(), "{shape:?} beside {:?} along {axis}", shapes[0]);
            into.push(StridedCopy::into_slice(&whole, &starts, shape, &steps));
            back.push(StridedCopy::slice(&whole, &starts, shape, &steps));
            starts[axis] += shape[axis];
        }
        Concat { into, back }
    }

    /// The parts into the whole.
    pub fn forward<T: Word>(&self, cx: &Cx, parts: &[&[T]], whole: &mut [T]) {
        assert_eq!(parts.len(), self.into.len(), "number of parts");
        for (copy, part) in self.into.iter().zip(parts) {
            copy.run(cx, part, whole);
        }
    }

    /// Part number `part` out of the whole: the gradient, and the way to split.
    pub fn part<T: Word>(&self, cx: &Cx, whole: &[T], part: usize, target: &mut [T]) {
        self.back[part].run(cx, whole, target);
    }
}

/// A tensor inside a larger one that is filled with one value.
#[derive(Clone, Debug)]
pub struct Pad {
    into: StridedCopy,
    back: StridedCopy,
}

impl Pad {
    /// `before[d]` and `after[d]` elements around dim `d` of `shape`.
    pub fn new(shape: &[usize], before: &[usize], after: &[usize]) -> Pad {
        assert!(before.len() == shape.len() && after.len() == shape.len(), "two numbers for each dim");
        let whole: Vec<usize> = (0..shape.len()).map(|d| before[d] + shape[d] + after[d]).collect();
        let steps = vec![1; shape.len()];
        Pad {
            into: StridedCopy::into_slice(&whole, before, shape, &steps),
            back: StridedCopy::slice(&whole, before, shape, &steps),
        }
    }

    /// `y` is `value` around `x`.
    pub fn forward<T: Word>(&self, cx: &Cx, value: T, x: &[T], y: &mut [T]) {
        cx.for_each_chunk(y, 65_536, |_, part| part.fill(value));
        self.into.run(cx, x, y);
    }

    /// The gradient: the inner part of `dy`.
    pub fn backward<T: Word>(&self, cx: &Cx, dy: &[T], dx: &mut [T]) {
        self.back.run(cx, dy, dx);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concat_and_parts() {
        for (outer, mids, inner) in
            [(1, [2, 3, 1], 1), (3, [2, 0, 5], 4), (4, [1, 1, 1], 17), (2, [9, 2, 3], 100)]
        {
            let shapes = mids.map(|m| [outer, m, inner]);
            let concat = Concat::new(&[&shapes[0], &shapes[1], &shapes[2]], 1);
            let parts: Vec<Vec<i32>> = (0..3)
                .map(|k| (0..outer * mids[k] * inner).map(|i| (k * 100_000 + i) as i32).collect())
                .collect();
            let mut want = Vec::new();
            for o in 0..outer {
                for k in 0..3 {
                    want.extend_from_slice(&parts[k][o * mids[k] * inner..(o + 1) * mids[k] * inner]);
                }
            }
            let mut whole = vec![0; want.len()];
            concat.forward(&Cx::serial(), &[&parts[0], &parts[1], &parts[2]], &mut whole);
            assert_eq!(whole, want);
            for (k, part) in parts.iter().enumerate() {
                let mut back = vec![0; part.len()];
                concat.part(&Cx::serial(), &whole, k, &mut back);
                assert_eq!(&back, part);
            }
        }
    }

    #[test]
    fn pad_and_back() {
        let x: Vec<f32> = (1..=6).map(|v| v as f32).collect();
        let pad = Pad::new(&[2, 3], &[1, 0], &[0, 2]);
        let mut y = vec![0.0; 15];
        pad.forward(&Cx::serial(), -1.0, &x, &mut y);
        assert_eq!(y, [-1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 2.0, 3.0, -1.0, -1.0, 4.0, 5.0, 6.0, -1.0, -1.0]);
        let mut dx = vec![0.0; 6];
        pad.backward(&Cx::serial(), &y, &mut dx);
        assert_eq!(dx, x);
    }
}
