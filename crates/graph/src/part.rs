//! Parts of tensors that ranks split among each other.

use crate::op::Slab;

/// A part of a tensor: one of its dims is seen as `groups` runs of equal length, each cut into `of` equal pieces, and this is
/// piece `index` of every run. With one group it is a range of the dim; rows of queries, keys and values that lie one after
/// another are three groups, of which a rank has some heads each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The dim that is cut.
    pub dim: usize,
    /// Runs that are cut alike.
    pub groups: usize,
    /// Which piece of each run this is.
    pub index: usize,
    /// How many pieces there are.
    pub of: usize,
}

impl Part {
    /// The dims of the whole tensor of which a part has these.
    pub fn whole_dims(&self, part: &[usize]) -> Vec<usize> {
        let mut dims = part.to_vec();
        dims[self.dim] *= self.of;
        dims
    }

    /// The dims of the part of a tensor with these; `None` if the dim cannot be cut so.
    pub fn dims(&self, whole: &[usize]) -> Option<Vec<usize>> {
        let mut dims = whole.to_vec();
        let cut = dims.get_mut(self.dim)?;
        if !cut.is_multiple_of(self.groups * self.of) {
            return None;
        }
        *cut /= self.of;
        Some(dims)
    }

    /// Where the part lies in a whole tensor with these dims: element `i` of the part is element
    /// `first + i / run * stride + i % run` of the whole.
    pub fn slab(&self, whole: &[usize]) -> Slab {
        let inner: usize = whole[self.dim + 1..].iter().product();
        let stride = whole[self.dim] / self.groups * inner;
        let run = stride / self.of;
        Slab { first: self.index * run, second: None, run, stride }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places of a part's elements in the whole.
    fn places(part: Part, whole: &[usize]) -> Vec<usize> {
        let n: usize = part.dims(whole).unwrap().iter().product();
        let Slab { first, run, stride, .. } = part.slab(whole);
        (0..n).map(|i| first + i / run * stride + i % run).collect()
    }

    #[test]
    fn parts_of_each_dim_lie_where_they_should() {
        let part = |dim, groups, index| Part { dim, groups, index, of: 2 };
        assert_eq!(places(part(0, 1, 1), &[4, 3]), [6, 7, 8, 9, 10, 11]);
        assert_eq!(places(part(1, 1, 0), &[2, 4]), [0, 1, 4, 5]);
        assert_eq!(places(part(1, 1, 1), &[2, 4]), [2, 3, 6, 7]);
        // Rows 0, 1 | 2, 3 | 4, 5: the second of each pair.
        assert_eq!(places(part(0, 3, 1), &[6, 2]), [2, 3, 6, 7, 10, 11]);
        assert_eq!(part(0, 3, 0).dims(&[8, 2]), None);
        assert_eq!(part(0, 3, 0).whole_dims(&[3, 2]), [6, 2]);
    }

    #[test]
    fn the_parts_of_all_ranks_are_the_whole() {
        for (whole, dim, groups, of) in
            [(vec![12, 5], 0, 3, 4), (vec![2, 8, 3], 1, 2, 2), (vec![3, 9], 1, 1, 3)]
        {
            let mut all: Vec<usize> =
                (0..of).flat_map(|index| places(Part { dim, groups, index, of }, &whole)).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..whole.iter().product()), "{whole:?}");
        }
    }
}
