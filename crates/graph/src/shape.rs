//! Shapes and element types: the static part of every value.

use std::fmt;

pub use polyreme_dtype::DType;

/// The lengths of a tensor's dims; none for a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// The shape of a scalar.
    pub fn scalar() -> Shape {
        Shape(Vec::new())
    }
    /// The lengths.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }
    /// How many dims.
    pub fn rank(&self) -> usize {
        self.0.len()
    }
    /// How many elements.
    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }
    /// The length of the last dim; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }
    /// The product of all dims but the last.
    pub fn rows(&self) -> usize {
        self.0.split_last().map_or(1, |(_, lead)| lead.iter().product())
    }
    /// The same shape with dim `axis` of another length.
    pub fn with_dim(&self, axis: usize, len: usize) -> Shape {
        let mut dims = self.0.clone();
        dims[axis] = len;
        Shape(dims)
    }
    /// The product of the dims before one, its length, and the product of the dims after it.
    pub fn around(&self, axis: usize) -> (usize, usize, usize) {
        (self.0[..axis].iter().product(), self.0[axis], self.0[axis + 1..].iter().product())
    }

    /// The shape that two broadcast to, by NumPy's rule, if they do.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let dim = |s: &Shape, i: usize| (i + s.rank()).checked_sub(rank).map_or(1, |j| s.0[j]);
        (0..rank)
            .map(|i| match (dim(self, i), dim(other, i)) {
                (a, b) if a == b => Some(a),
                (1, b) => Some(b),
                (a, 1) => Some(a),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
            .map(Shape)
    }

    /// The dims of `wide` along which `self` was repeated.
    pub fn broadcast_axes(&self, wide: &Shape) -> Vec<usize> {
        let lead = wide.rank() - self.rank();
        (0..wide.rank()).filter(|&i| i < lead || (self.0[i - lead] == 1 && wide.0[i] != 1)).collect()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Shape {
        Shape(dims.to_vec())
    }
}
impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Shape {
        Shape(dims.to_vec())
    }
}
impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Shape {
        Shape(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_follows_numpy() {
        let check = |a: &[usize], b: &[usize], want: Option<&[usize]>| {
            assert_eq!(Shape::from(a).broadcast(&Shape::from(b)), want.map(Shape::from), "{a:?} {b:?}");
        };
        check(&[], &[], Some(&[]));
        check(&[3], &[], Some(&[3]));
        check(&[2, 3], &[3], Some(&[2, 3]));
        check(&[2, 1], &[1, 3], Some(&[2, 3]));
        check(&[2, 3], &[2], None);
        check(&[4, 1, 3], &[5, 1], Some(&[4, 5, 3]));
    }

    #[test]
    fn broadcast_axes_are_those_repeated() {
        let check = |small: &[usize], wide: &[usize], want: &[usize]| {
            assert_eq!(Shape::from(small).broadcast_axes(&Shape::from(wide)), want);
        };
        check(&[3], &[2, 3], &[0]);
        check(&[2, 1], &[2, 3], &[1]);
        check(&[1, 1], &[1, 3], &[1]);
        check(&[], &[2, 3], &[0, 1]);
    }
}
