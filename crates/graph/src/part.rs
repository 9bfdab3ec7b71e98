//! Parts of tensors that ranks split among each other.
//!
//! A tensor may be split twice: ranks of the tensor axis compute with parts of it, and ranks of the data axis keep shards of
//! these. [`Stored::runs`] says where the elements of the result lie in the whole tensor; what is random and what is read from
//! files goes by it.

use std::ops::Range;

use crate::graph::Stored;
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

/// Elements that are neighbours in a whole tensor and in what is stored of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The place of the first in the whole.
    pub in_whole: usize,
    /// The place of the first in what is stored.
    pub in_part: usize,
    /// How many there are.
    pub len: usize,
}

/// Which elements of a whole tensor are stored: a part of it, or a shard of that part.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Splits {
    /// The part of the whole.
    pub part: Option<Part>,
    /// The shard of the part.
    pub shard: Option<Part>,
}

impl Splits {
    /// The dims of the whole tensor, of what is stored with these dims.
    pub fn whole_dims(&self, stored: &[usize]) -> Vec<usize> {
        let splits = [self.shard, self.part].into_iter().flatten();
        splits.fold(stored.to_vec(), |dims, part| part.whole_dims(&dims))
    }

    /// Where the elements that are stored with these dims lie in the whole tensor: runs that follow each other here, each of
    /// them a range there.
    pub fn runs(&self, stored: &[usize]) -> impl Iterator<Item = Range<usize>> + use<> {
        let slab = |part: Option<Part>, dims: &[usize]| match part {
            Some(part) => part.slab(&part.whole_dims(dims)),
            None => {
                let n = dims.iter().product();
                Slab { first: 0, second: None, run: n, stride: n }
            }
        };
        let (inner, n) = (slab(self.shard, stored), stored.iter().product());
        let outer = slab(self.part, &self.shard.map_or(stored.to_vec(), |shard| shard.whole_dims(stored)));
        inner.runs(0..n).flat_map(move |run| outer.runs(run))
    }

    /// The elements of the whole tensor in `range` that are stored, in the order in which they are.
    pub fn pieces(&self, stored: &[usize], range: Range<usize>) -> impl Iterator<Item = Piece> + use<> {
        let mut before = 0;
        self.runs(stored).filter_map(move |run| {
            let at = before;
            before += run.len();
            let (from, to) = (run.start.max(range.start), run.end.min(range.end));
            (from < to).then(|| Piece { in_whole: from, in_part: at + from - run.start, len: to - from })
        })
    }
}

impl Slab {
    /// Where a range of the part lies in the whole.
    fn runs(self, mut part: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let next = move || {
            let inside = part.start % self.run.max(1);
            let len = (self.run - inside).min(part.len());
            let first = self.first + part.start / self.run.max(1) * self.stride + inside;
            part.start += len;
            (len > 0).then_some(first..first + len)
        };
        std::iter::from_fn(next)
    }
}

impl Stored {
    /// Which elements of the whole tensor are stored.
    pub fn splits(&self) -> Splits {
        Splits { part: self.part, shard: self.shard }
    }

    /// The dims of the whole tensor, of what is stored with these dims.
    pub fn whole_dims(&self, stored: &[usize]) -> Vec<usize> {
        self.splits().whole_dims(stored)
    }

    /// Where the elements that are stored with these dims lie in the whole tensor: runs that follow each other here, each of
    /// them a range there.
    pub fn runs(&self, stored: &[usize]) -> impl Iterator<Item = Range<usize>> + use<> {
        self.splits().runs(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Init, ValueId};
    use crate::tuning::Learning;

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
    fn pieces_of_a_range_are_the_elements_of_a_part_that_lie_in_it() {
        for (whole, dim, groups, of) in
            [(vec![12, 5], 0, 3, 4), (vec![2, 8, 3], 1, 2, 2), (vec![3, 9], 1, 1, 3), (vec![4], 0, 1, 4)]
        {
            let n: usize = whole.iter().product();
            for index in 0..of {
                let part = Part { dim, groups, index, of };
                let places = places(part, &whole);
                for (start, end) in (0..=n).flat_map(|a| (a..=n).map(move |b| (a, b))) {
                    let splits = Splits { part: Some(part), shard: None };
                    let dims = part.dims(&whole).unwrap();
                    let got: Vec<_> = splits.pieces(&dims, start..end).collect();
                    assert!(got.iter().all(|piece| piece.len > 0));
                    let pairs = got.iter().flat_map(|p| (0..p.len).map(|k| (p.in_part + k, p.in_whole + k)));
                    let want = places.iter().copied().enumerate();
                    let want = want.filter(|(_, at)| (start..end).contains(at));
                    assert!(pairs.eq(want), "{whole:?}, {part:?}, {start}..{end}: {got:?}");
                }
            }
        }
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
    /// The places in a whole tensor of what is stored of it.
    fn stored_places(part: Option<Part>, shard: Option<Part>, whole: &[usize]) -> Vec<usize> {
        let (value, init) = (ValueId(0), Init::Const(0.0));
        let stored =
            Stored { name: "w".into(), value, init, number: 0, part, shard, learning: Learning::PLAIN };
        let dims = [part, shard].into_iter().flatten().fold(whole.to_vec(), |d, p| p.dims(&d).unwrap());
        assert_eq!(stored.whole_dims(&dims), whole);
        stored.runs(&dims).flatten().collect()
    }

    #[test]
    fn a_shard_of_a_part_lies_where_it_should() {
        let part = |dim, groups, index, of| Some(Part { dim, groups, index, of });
        assert_eq!(stored_places(None, None, &[2, 3]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(stored_places(None, part(0, 1, 1, 2), &[4, 2]), [4, 5, 6, 7]);
        assert_eq!(stored_places(part(1, 1, 1, 2), None, &[2, 4]), [2, 3, 6, 7]);
        // Columns 2 and 3, and of these the second row.
        assert_eq!(stored_places(part(1, 1, 1, 2), part(0, 1, 1, 2), &[2, 4]), [6, 7]);
        // Rows 1, 3, 5, and of these the second column.
        assert_eq!(stored_places(part(0, 3, 1, 2), part(1, 1, 1, 2), &[6, 2]), [3, 7, 11]);
        // A shard may be inside of a group, and reach over several.
        assert_eq!(stored_places(part(0, 2, 0, 2), part(0, 1, 1, 4), &[16, 1]), [2, 3]);
        assert_eq!(stored_places(part(0, 4, 0, 2), part(0, 1, 0, 2), &[16, 1]), [0, 1, 4, 5]);
    }

    #[test]
    fn the_shards_of_all_ranks_are_the_whole() {
        for (whole, tensor, groups, data) in [([12, 8], (0, 2), 3, (0, 3)), ([12, 8], (1, 4), 1, (0, 2))] {
            let mut all = Vec::new();
            for (t, d) in (0..tensor.1).flat_map(|t| (0..data.1).map(move |d| (t, d))) {
                let part = Part { dim: tensor.0, groups, index: t, of: tensor.1 };
                let shard = Part { dim: data.0, groups: 1, index: d, of: data.1 };
                all.extend(stored_places(Some(part), Some(shard), &whole));
            }
            all.sort_unstable();
            assert!(all.into_iter().eq(0..96), "{whole:?}");
        }
    }
}
