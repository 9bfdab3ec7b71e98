//! The mesh: ranks as points of a grid with named axes. Ranks that differ along one axis only form a group.
//!
//! Ranks are numbered along the tensor axis first, then sequence, stage and data: neighbours, which are mostly on one
//! host, exchange the most.

use polyreme_graph::Axis;

/// How many ranks there are along each axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mesh {
    /// Parts of the batch.
    pub data: usize,
    /// Parts of each matrix.
    pub tensor: usize,
    /// Runs of layers.
    pub stage: usize,
    /// Parts of each sequence.
    pub sequence: usize,
}

/// Axes from the one with adjacent ranks to the one whose ranks are farthest apart.
const ORDER: [Axis; 4] = [Axis::Tensor, Axis::Sequence, Axis::Stage, Axis::Data];

impl Mesh {
    /// A mesh that only splits the batch: pure data parallelism.
    pub fn data(ranks: usize) -> Mesh {
        Mesh { data: ranks, tensor: 1, stage: 1, sequence: 1 }
    }

    /// How many ranks there are along an axis.
    pub fn len(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Tensor => self.tensor,
            Axis::Stage => self.stage,
            Axis::Sequence => self.sequence,
        }
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        ORDER.iter().map(|axis| self.len(*axis)).product()
    }

    /// A rank's coordinate along an axis.
    pub fn place(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.len(axis)
    }

    /// The ranks that differ from `rank` along this axis only, itself included, in their order.
    pub fn group(&self, rank: usize, axis: Axis) -> Vec<usize> {
        let stride = self.stride(axis);
        let first = rank - self.place(rank, axis) * stride;
        (0..self.len(axis)).map(|k| first + k * stride).collect()
    }

    /// All groups along an axis; each rank is in one of them.
    pub fn groups(&self, axis: Axis) -> Vec<Vec<usize>> {
        let first = |rank: &usize| self.place(*rank, axis) == 0;
        (0..self.ranks()).filter(first).map(|rank| self.group(rank, axis)).collect()
    }

    /// How many ranks have the whole model together: those with the same place along the data axis.
    pub fn replica_ranks(&self) -> usize {
        self.stride(Axis::Data)
    }

    /// The ranks of each replica of the model. Data is the last axis, so they are neighbours.
    pub fn replicas(&self) -> Vec<Vec<usize>> {
        let n = self.replica_ranks();
        (0..self.data).map(|k| (k * n..(k + 1) * n).collect()).collect()
    }

    fn stride(&self, axis: Axis) -> usize {
        ORDER.iter().take_while(|a| **a != axis).map(|a| self.len(*a)).product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_the_mesh_along_each_axis() {
        let mesh = Mesh { data: 3, tensor: 2, stage: 4, sequence: 2 };
        assert_eq!(mesh.ranks(), 48);
        for axis in ORDER {
            let mut seen = vec![0; mesh.ranks()];
            for rank in 0..mesh.ranks() {
                let group = mesh.group(rank, axis);
                assert_eq!((group.len(), group[mesh.place(rank, axis)]), (mesh.len(axis), rank));
                group.iter().for_each(|r| seen[*r] += 1);
                // The others see the same group, and have this rank's coordinates along the other axes.
                for other in group.iter().copied() {
                    assert_eq!(mesh.group(other, axis), group);
                    let same = |a: &Axis| *a == axis || mesh.place(other, *a) == mesh.place(rank, *a);
                    assert!(ORDER.iter().all(same));
                }
            }
            assert!(seen.iter().all(|n| *n == mesh.len(axis)));
        }
        for (k, replica) in mesh.replicas().iter().enumerate() {
            assert_eq!(replica.len(), mesh.replica_ranks());
            assert!(replica.iter().all(|rank| mesh.place(*rank, Axis::Data) == k));
        }
        assert_eq!(mesh.group(5, Axis::Tensor), [4, 5], "neighbours");
        assert_eq!(mesh.group(5, Axis::Data), [5, 21, 37]);
    }
}
