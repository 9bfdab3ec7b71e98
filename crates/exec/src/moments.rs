//! Where optimizer states lie.
//!
//! The states of an element-wise optimizer are laid out as the parameters that this rank updates. An optimizer that needs whole
//! tensors says what it keeps for each; those lie in the order in which gradients become ready, the same on every rank.

use std::ops::Range;

use polyreme_graph::memory::{ALIGN_BYTES, learnt_len, readiness};
use polyreme_graph::{DType, Optimizer, Part, Program, Splits, split_sums};
use polyreme_kernels::optim::{ParamTensor, SplitTensor};

use crate::engine::Engine;
use crate::error::ExecError;
use crate::state::Lengths;
use crate::weights::{Kept, Slot};
use crate::workspace::Ready;

/// The state of a tensor begins at a multiple of this, as parameters do.
const ALIGN: usize = ALIGN_BYTES / size_of::<f32>();

/// The parameters' tensors in the order in which gradients become ready, and their states' offsets if whole tensors are needed.
pub(crate) fn tensors(optimizer: Option<Optimizer>, first: &Ready) -> Vec<ParamTensor> {
    let graph = &first.body.graph;
    let mut next = [0; 2];
    let tensor = |p: usize| {
        let (start, shape) = (first.plan.param_offsets[p], graph.shape(graph.params[p].value));
        let dims = shape.dims();
        let kept = match optimizer {
            Some(optimizer) if !graph.params[p].learning.frozen => optimizer.state_dims(dims),
            _ => [None, None],
        };
        let states = [0, 1].map(|k| {
            let len = kept[k].as_ref().map_or(0, |dims| dims.iter().product());
            let at = next[k];
            next[k] = (at + len).next_multiple_of(ALIGN);
            at..at + len
        });
        let matrix = match dims {
            [.., rows, cols] => Some([*rows, *cols]),
            _ => None,
        };
        ParamTensor { range: start..start + shape.numel(), matrix, states }
    };
    readiness(graph).into_iter().map(tensor).collect()
}

/// The tensors that an optimizer looks at as a whole.
#[derive(Default)]
pub(crate) struct Updated {
    /// Those that this rank has whole.
    pub(crate) whole: Vec<ParamTensor>,
    /// Those of which it has a part.
    pub(crate) split: Vec<SplitTensor>,
}

impl Updated {
    /// Both in the order of the parameters' arena; `tensors` are all of them.
    pub(crate) fn new(optimizer: Option<Optimizer>, first: &Ready, tensors: &[ParamTensor]) -> Updated {
        let sums = optimizer.and_then(|o| split_sums(&first.body.graph, &o));
        let mut updated = Updated::default();
        for tensor in tensors {
            let of = |p: usize| first.plan.param_offsets[p] == tensor.range.start;
            let split = sums.iter().flat_map(|sums| &sums.tensors).find(|split| of(split.param));
            match split {
                None => updated.whole.push(tensor.clone()),
                Some(split) => updated.split.push(SplitTensor {
                    part: tensor.clone(),
                    numel: split.numel,
                    matrix: split.matrix,
                    row_copies: split.row_copies,
                    sums: split.sums.clone(),
                }),
            }
        }
        updated
    }
}

/// Whether the optimizer's state can be stored as a program says: one that needs whole tensors reads it twice in a step.
pub(crate) fn check(program: &Program) -> Result<(), ExecError> {
    let by_element = program.optimizer.is_none_or(|o| o.by_element());
    match program.moments {
        DType::F32 => Ok(()),
        DType::Bf16 if by_element => Ok(()),
        dtype => Err(ExecError::Moments { dtype }),
    }
}

/// The lengths of the optimizer states that a rank with this program keeps.
pub(crate) fn lengths(program: &Program, first: &Ready) -> [usize; 2] {
    let Some(optimizer) = program.optimizer else { return [0; 2] };
    let own = match &program.role {
        _ if !optimizer.by_element() => None,
        Some(role) if role.sharded() => Some(role.own().iter().map(Range::len).sum()),
        _ => Some(learnt_len(&first.body.graph)),
    };
    let tensors = tensors(Some(optimizer), first);
    let packed = |k: usize| tensors.last().map_or(0, |t| t.states[k].end.next_multiple_of(ALIGN));
    [0, 1].map(|k| if optimizer.n_states() > k { own.unwrap_or_else(|| packed(k)) } else { 0 })
}

/// The part of the states that an update of these parameters reads and writes; all of it, if the optimizer needs whole tensors.
pub(crate) fn of_update(
    optimizer: &Optimizer,
    lengths: &Lengths,
    params: &Range<usize>,
    moments_at: usize,
) -> [Range<usize>; 2] {
    let by_element = optimizer.by_element();
    assert!(params.start == 0 || by_element, "tensors are counted from the start");
    [0, 1].map(|k| match (lengths.n_moments > k, by_element) {
        (false, _) => 0..0,
        (true, true) => moments_at..moments_at + params.len(),
        (true, false) => 0..lengths.moments[k],
    })
}

impl Engine {
    /// Where optimizer states lie when they are gathered, in the order in which the parameters are declared; parameters of
    /// which nothing is kept, such as frozen ones, are left out.
    pub fn moment_slots(&self, which: Kept) -> Vec<Slot> {
        let k = match which {
            Kept::Moment1 => 0,
            Kept::Moment2 => 1,
            Kept::Params | Kept::States | Kept::Average | Kept::Residual | Kept::Factors | Kept::Velocity => {
                return Vec::new();
            }
        };
        let Some(optimizer) = self.optimizer() else { return Vec::new() };
        let slot = |slot: Slot| {
            let dims = optimizer.state_dims(&slot.dims)[k].clone()?;
            if optimizer.by_element() {
                return Some(slot);
            }
            // What is kept once for a whole dim is the same on all ranks that split that dim.
            let whole = slot.splits.whole_dims(&slot.dims);
            let kept = optimizer.state_dims(&whole)[k].clone()?;
            let splits = |part: Option<Part>| part.filter(|part| kept[part.dim] == whole[part.dim]);
            let splits = Splits { part: splits(slot.splits.part), shard: splits(slot.splits.shard) };
            let tensor = self.tensors.iter().find(|t| t.range == slot.range).expect("one of the parameters");
            Some(Slot { dims, splits, range: tensor.states[k].clone(), ..slot })
        };
        self.learnt_slots().into_iter().filter_map(slot).collect()
    }

    /// The length of an arena when it is gathered.
    pub fn gathered_len(&self, which: Kept) -> usize {
        let lengths = &self.memory.state.lengths;
        let moment = |k: usize| match self.optimizer() {
            Some(o) if o.by_element() && o.n_states() > k => learnt_len(&self.layout().body.graph),
            _ => lengths.moments[k],
        };
        match which {
            Kept::Params => lengths.params,
            Kept::Average => lengths.average,
            Kept::Residual => lengths.residual,
            Kept::Factors => lengths.factors,
            Kept::Velocity => lengths.velocity,
            Kept::States => lengths.states,
            Kept::Moment1 => moment(0),
            Kept::Moment2 => moment(1),
        }
    }

    fn optimizer(&self) -> Option<Optimizer> {
        self.first().optimizer
    }
}
