//! The tensors of a model as a whole, however ranks split them: what files hold. Ranks agree on who has which part of each.

use std::ops::Range;

use polyreme_collective::{Comm, Cuts};
use polyreme_exec::Slot;
use polyreme_graph::graph::{Graph, Stored};
use polyreme_graph::{LowRank, Optimizer, Part, Piece, Splits};

use crate::checkpoint::TensorShape;
use crate::error::TrainError;
use crate::talk;

/// The tensors of a whole model, in the order of their declaration.
#[derive(Clone, PartialEq, Debug)]
pub struct WholeModel {
    /// Parameters.
    pub params: Vec<TensorShape>,
    /// By parameter: whether it is frozen, so that the optimizer keeps nothing of it.
    pub frozen: Vec<bool>,
    /// States without a gradient.
    pub states: Vec<TensorShape>,
}

impl WholeModel {
    /// That of a graph which is not split.
    pub fn of(graph: &Graph) -> WholeModel {
        let shape =
            |s: &Stored| TensorShape { name: s.name.clone(), dims: graph.shape(s.value).dims().to_vec() };
        WholeModel {
            params: graph.params.iter().map(shape).collect(),
            frozen: graph.params.iter().map(|p| p.learning.frozen).collect(),
            states: graph.states.iter().map(shape).collect(),
        }
    }

    /// Whether frozen parameters are in a file of their own, once for the run, and not in each checkpoint: those beside low-rank factors
    /// are nearly the whole model.
    pub fn keeps_frozen_apart(&self) -> bool {
        self.params.iter().any(|param| LowRank::is_factor(&param.name))
    }

    /// Whether a parameter of this name is in that file.
    pub fn is_apart(&self, name: &str) -> bool {
        let named = self.params.iter().position(|param| param.name == name);
        self.keeps_frozen_apart() && named.is_some_and(|k| self.frozen[k])
    }

    /// The parameters in that file.
    pub fn frozen_apart(&self) -> Vec<TensorShape> {
        self.params.iter().filter(|param| self.is_apart(&param.name)).cloned().collect()
    }

    /// The parameters and states in a checkpoint.
    pub fn saved(&self) -> Vec<TensorShape> {
        self.params.iter().filter(|param| !self.is_apart(&param.name)).chain(&self.states).cloned().collect()
    }

    /// Parameters and states.
    pub fn all(&self) -> Vec<TensorShape> {
        self.params.iter().chain(&self.states).cloned().collect()
    }

    /// What the optimizer keeps as its state number `k`, for each parameter that has it.
    pub fn moments(&self, optimizer: Optimizer, k: usize) -> Vec<TensorShape> {
        let moment = |p: &TensorShape| {
            let dims = optimizer.state_dims(&p.dims)[k].clone()?;
            Some(TensorShape { name: p.name.clone(), dims })
        };
        let learnt = self.params.iter().zip(&self.frozen).filter(|(_, frozen)| !**frozen);
        learnt.map(|(param, _)| param).filter_map(moment).collect()
    }

    /// The states of each of `ranks` ranks of the data axis, one rank after the other.
    pub fn states_of(&self, ranks: usize) -> Vec<TensorShape> {
        of_each(&self.states, ranks)
    }

    /// What the optimizer keeps as its state number `k` on each of `ranks` ranks of the data axis, one rank after the other.
    pub fn moments_of(&self, optimizer: Optimizer, k: usize, ranks: usize) -> Vec<TensorShape> {
        of_each(&self.moments(optimizer, k), ranks)
    }

    /// What codes of gradients have lost on each of `ranks` ranks of the data axis, one rank after the other.
    pub fn residuals_of(&self, ranks: usize) -> Vec<TensorShape> {
        of_each(&self.params, ranks)
    }
}

/// Tensors that each rank has for itself.
fn of_each(tensors: &[TensorShape], ranks: usize) -> Vec<TensorShape> {
    let of = |rank: usize| {
        let named = move |t: &TensorShape| TensorShape { name: of_rank(rank, &t.name), ..t.clone() };
        tensors.iter().map(named)
    };
    (0..ranks).flat_map(of).collect()
}

/// What the state of one rank is called.
pub(crate) fn of_rank(rank: usize, name: &str) -> String {
    format!("rank{rank}.{name}")
}

/// Who has which part of some tensors.
#[derive(Debug)]
pub(crate) struct Owners {
    /// By tensor: ranks and the elements that each gives, in the order of ranks. No element is given twice.
    of: Vec<Vec<Owned>>,
}

/// What one rank gives of a tensor.
#[derive(Clone, PartialEq, Debug)]
struct Owned {
    rank: usize,
    dims: Vec<usize>,
    splits: Splits,
}

impl Owned {
    fn pieces(&self, range: &Range<usize>) -> impl Iterator<Item = Piece> + use<> {
        self.splits.pieces(&self.dims, range.clone())
    }
}

/// A rank's answer to who has what: by tensor, nothing, or its dims there, which part it is, and which shard of the part.
type Claims = Vec<Option<(Vec<usize>, [Option<[usize; 4]>; 2])>>;

impl Owners {
    /// Finds out who has what of `tensors`; `slots` are this rank's. Collective.
    pub(crate) fn agree(
        comm: &mut Comm,
        tensors: &[TensorShape],
        slots: &[Slot],
    ) -> Result<Owners, TrainError> {
        let claim = |t: &TensorShape| {
            let slot = slots.iter().find(|slot| slot.name == t.name)?;
            let numbers = |p: Option<Part>| p.map(|Part { dim, groups, index, of }| [dim, groups, index, of]);
            Some((slot.dims.clone(), [slot.splits.part, slot.splits.shard].map(numbers)))
        };
        let mine: Claims = tensors.iter().map(claim).collect();
        let bad = |e: serde_json::Error| TrainError::Progress(e.to_string());
        let mut line = serde_json::to_vec(&mine).map_err(bad)?;
        line.push(b'\n');
        let all = talk::gather(comm, line)?.unwrap_or_default();
        let all = talk::broadcast(comm, all, 0)?;
        let lines = all.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let claims: Vec<Claims> = lines.map(serde_json::from_slice).collect::<Result<_, _>>().map_err(bad)?;
        let owners = |k: usize| {
            let mut owners: Vec<Owned> = Vec::new();
            for (rank, claim) in claims.iter().enumerate() {
                let Some((dims, splits)) = &claim[k] else { continue };
                let part = |p: [usize; 4]| Part { dim: p[0], groups: p[1], index: p[2], of: p[3] };
                let [part, shard] = splits.map(|numbers| numbers.map(part));
                let owned = Owned { rank, dims: dims.clone(), splits: Splits { part, shard } };
                // The same elements may be on several ranks: the first one gives them.
                if owners.iter().all(|known| known.splits != owned.splits) {
                    owners.push(owned);
                }
            }
            owners
        };
        Ok(Owners { of: (0..tensors.len()).map(owners).collect() })
    }

    /// Elements of a tensor, put together on the first rank; nothing on the others. `mine` are the elements that this rank has
    /// of it. Collective.
    pub(crate) fn gather(
        &self,
        comm: &mut Comm,
        tensor: usize,
        range: Range<usize>,
        mine: &[f32],
    ) -> Result<Vec<f32>, TrainError> {
        let (rank, owners) = (comm.rank(), &self.of[tensor]);
        let count = |owned: &Owned| owned.pieces(&range).map(|piece| piece.len).sum::<usize>();
        let mut cuts = vec![0];
        for r in 0..comm.size() {
            let n: usize = owners.iter().filter(|owned| owned.rank == r).map(count).sum();
            cuts.push(cuts[r] + n);
        }
        let mut packed = Vec::with_capacity(cuts[rank + 1] - cuts[rank]);
        for owned in owners.iter().filter(|owned| owned.rank == rank) {
            owned.pieces(&range).for_each(|p| packed.extend_from_slice(&mine[p.in_part..][..p.len]));
        }
        let mut all = vec![0.0; if rank == 0 { cuts[comm.size()] } else { 0 }];
        let cuts: Cuts = cuts.into();
        comm.gather(&packed, (rank == 0).then_some(&mut all[..]), &cuts, 0)?;
        if rank > 0 {
            return Ok(Vec::new());
        }
        let (mut numbers, mut at) = (vec![0.0; range.len()], 0);
        for owned in owners {
            for piece in owned.pieces(&range) {
                numbers[piece.in_whole - range.start..][..piece.len]
                    .copy_from_slice(&all[at..at + piece.len]);
                at += piece.len;
            }
        }
        Ok(numbers)
    }
}

/// Puts elements of a whole tensor, from the `first` on, where a rank has them; nowhere if it does not.
pub(crate) fn put(
    slots: &[Slot],
    name: &str,
    first: usize,
    numbers: &[f32],
    to: &mut dyn FnMut(usize, &[f32]),
) {
    let Some(slot) = slots.iter().find(|slot| slot.name == name) else { return };
    for piece in slot.pieces(first..first + numbers.len()) {
        to(slot.range.start + piece.in_part, &numbers[piece.in_whole - first..][..piece.len]);
    }
}
