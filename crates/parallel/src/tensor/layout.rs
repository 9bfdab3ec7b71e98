//! Layouts: what of a value each rank of the tensor axis has.
//!
//! A split value is one of its dims cut into equal pieces, or, with several groups, each of `groups` runs of that dim cut so. In
//! the order of the elements in memory that is a *period*: blocks of that many elements, of each of which rank `t` has the
//! `t`-th piece. The period is what a reshape keeps, and what decides how two splits of one value are converted.

use polyreme_graph::{Part, Shape};

/// What of a value each rank has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ValueLayout {
    /// All of it.
    Whole,
    /// A piece of one dim, or of each of several runs of it, as [`Part`] describes.
    Split {
        /// The dim that is cut.
        dim: usize,
        /// Runs that are cut alike.
        groups: usize,
    },
    /// A term: the value is the sum of what the ranks have.
    Partial,
}

/// A rank's place along the tensor axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorPlace {
    /// Its number.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
}

impl ValueLayout {
    /// A cut of one dim into consecutive pieces.
    pub fn split(dim: usize) -> ValueLayout {
        ValueLayout::Split { dim, groups: 1 }
    }

    /// The same cut of another dim; anything else as it is.
    pub fn at(self, dim: usize) -> ValueLayout {
        match self {
            ValueLayout::Split { groups, .. } => ValueLayout::Split { dim, groups },
            other => other,
        }
    }

    /// The dim that is cut.
    pub fn dim(self) -> Option<usize> {
        match self {
            ValueLayout::Split { dim, .. } => Some(dim),
            ValueLayout::Whole | ValueLayout::Partial => None,
        }
    }

    /// Whether a value with these dims can have this layout.
    pub fn fits(self, dims: &[usize], ranks: usize) -> bool {
        match self {
            ValueLayout::Split { dim, groups } => {
                dims.get(dim).is_some_and(|d| *d > 0 && d.is_multiple_of(groups * ranks))
            }
            ValueLayout::Whole | ValueLayout::Partial => true,
        }
    }

    /// The part that a rank has, if the value is split.
    pub fn part(self, place: TensorPlace) -> Option<Part> {
        match self {
            ValueLayout::Split { dim, groups } => {
                Some(Part { dim, groups, index: place.rank, of: place.ranks })
            }
            ValueLayout::Whole | ValueLayout::Partial => None,
        }
    }

    /// What a rank has of a value of this shape.
    pub fn local(self, whole: &Shape, ranks: usize) -> Shape {
        match self {
            ValueLayout::Split { dim, .. } => whole.with_dim(dim, whole.dims()[dim] / ranks),
            ValueLayout::Whole | ValueLayout::Partial => whole.clone(),
        }
    }

    /// Elements of the blocks that are cut alike.
    pub fn period(self, dims: &[usize]) -> Option<usize> {
        match self {
            ValueLayout::Split { dim, groups } => Some(dims[dim..].iter().product::<usize>() / groups),
            ValueLayout::Whole | ValueLayout::Partial => None,
        }
    }

    /// The layout of the same elements in another shape, if there is one.
    pub fn reshaped(self, from: &[usize], to: &[usize], ranks: usize) -> Option<ValueLayout> {
        let Some(period) = self.period(from) else { return Some(self) };
        let mut inner = 1;
        for dim in (0..to.len()).rev() {
            let all = inner * to[dim];
            if period.is_multiple_of(inner * ranks) && all >= period && all.is_multiple_of(period) {
                return Some(ValueLayout::Split { dim, groups: all / period });
            }
            inner = all;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reshape_keeps_which_elements_a_rank_has() {
        let check = |from: &[usize], layout: ValueLayout, to: &[usize], want: Option<ValueLayout>| {
            let got = layout.reshaped(from, to, 2);
            assert_eq!(got, want, "{layout:?} of {from:?} as {to:?}");
            let slab = |layout: ValueLayout, dims: &[usize]| {
                layout.part(TensorPlace { rank: 1, ranks: 2 }).map(|part| part.slab(dims))
            };
            if let Some(got) = got {
                assert_eq!(slab(got, to), slab(layout, from));
                assert_eq!(got.reshaped(to, from, 2), Some(layout), "and back");
            }
        };
        let three = |dim| ValueLayout::Split { dim, groups: 3 };
        check(&[2, 5, 24], three(2), &[2, 5, 3, 4, 2], Some(ValueLayout::split(3)));
        check(&[10, 24], three(1), &[2, 5, 24], Some(three(2)));
        // Three heads of four do not go to two ranks.
        check(&[2, 5, 36], three(2), &[2, 5, 3, 3, 4], None);
        check(&[4, 5, 6], ValueLayout::split(0), &[20, 6], Some(ValueLayout::split(0)));
        check(&[3, 4, 6], ValueLayout::split(1), &[12, 6], Some(ValueLayout::Split { dim: 0, groups: 3 }));
        check(&[6, 2], ValueLayout::split(0), &[3, 2, 2], None);
        check(&[4, 1, 1, 8], ValueLayout::split(3), &[4, 8], Some(ValueLayout::split(1)));
        check(&[4, 8], ValueLayout::Partial, &[32], Some(ValueLayout::Partial));
        check(&[4, 8], ValueLayout::Whole, &[32], Some(ValueLayout::Whole));
    }
}
