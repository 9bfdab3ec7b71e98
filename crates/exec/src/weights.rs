//! The learnt state of an engine, seen from outside: whole arenas with a name for each range, for checkpoints, averages,
//! accumulated gradients, and engines that share a model.

use std::borrow::Cow;
use std::ops::Range;

use polyreme_graph::graph::Stored;
use polyreme_graph::{Buffer, DType, Piece, Place, Splits};
use polyreme_kernels::Isa;
use polyreme_kernels::floats::{Floats, FloatsMut};

use crate::arena::Arena;
use crate::engine::Engine;
use crate::error::ExecError;
use crate::state::State;

/// A named range of elements in an arena.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    /// The parameter's or the state's name.
    pub name: String,
    /// The shape of the tensor.
    pub dims: Vec<usize>,
    /// Which elements of the whole tensor it has, if ranks split that among them.
    pub splits: Splits,
    /// Its elements in the arena.
    pub range: Range<usize>,
}

impl Slot {
    /// The elements of the whole tensor in `range` that it has.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Piece> + use<> {
        self.splits.pieces(&self.dims, range)
    }
}

/// An arena that outlives a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// The parameters.
    Params,
    /// States without a gradient, such as running statistics.
    States,
    /// The optimizer's first moment (momentum, the mean of gradients).
    Moment1,
    /// The optimizer's second moment (the mean of squares).
    Moment2,
    /// The averaged parameters (`train.ema`), if this rank keeps them.
    Average,
    /// What codes of gradients have lost so far, if gradients travel coded. Each rank has its own.
    Residual,
    /// The right factors of the last sums, if matrices of gradients travel as factors. All ranks that send them have the same.
    Factors,
    /// The velocity of outer steps, if replicas take steps by themselves. All have the same.
    Velocity,
}

/// The arenas of an engine, to be read while something else of it is used.
#[derive(Clone, Copy)]
pub struct KeptArenas<'a> {
    pub(crate) state: &'a State,
    pub(crate) isa: Isa,
}

impl<'a> KeptArenas<'a> {
    /// A whole arena as f32: as it is stored, or a wider copy.
    pub fn wide(&self, what: Kept) -> Cow<'a, [f32]> {
        let stored = self.state.stored(what);
        if let Floats::F32(numbers) = stored {
            return Cow::Borrowed(numbers);
        }
        let mut wide = vec![0.0; stored.len()];
        stored.widen(self.isa, &mut wide);
        Cow::Owned(wide)
    }
}

/// The bytes that an engine has reserved for what stays from one step to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// Parameters. Weights that ranks share are counted on rank 0.
    pub params: usize,
    /// Gradients, or their buffers; and what a step needs besides: this rank's own gradients, sums of earlier microbatches or
    /// of logical shards, codes and what they have lost.
    pub grads: usize,
    /// The averaged parameters (`train.ema`), if this rank keeps them.
    pub average: usize,
    /// Optimizer state of the parameters that this rank updates.
    pub optimizer: usize,
    /// States without a gradient, such as running statistics.
    pub states: usize,
    /// Scalars of a step: losses, weights, squares.
    pub totals: usize,
}

impl Engine {
    /// The memory that this engine has reserved, besides inputs and activations.
    pub fn held(&self) -> Held {
        let held = self.memory.state.held();
        let bytes = |sums: bool| -> usize {
            let of = |(buffer, _): &&(Buffer, Arena)| (buffer.dtype != DType::F64) == sums;
            self.memory.work.buffers.iter().filter(of).map(|(_, arena)| arena.bytes()).sum()
        };
        let held = Held { grads: held.grads + bytes(true), totals: bytes(false), ..held };
        match &self.first().role {
            Some(role) if role.shares_weights() && role.rank > 0 => Held { params: 0, ..held },
            _ => held,
        }
    }

    /// The parameters' ranges, in the order of their declaration. Gradients have the same layout.
    pub fn param_slots(&self) -> Vec<Slot> {
        self.slots(&self.layout().body.graph.params)
    }

    /// The ranges of the parameters that are not frozen.
    pub(crate) fn learnt_slots(&self) -> Vec<Slot> {
        let params = &self.layout().body.graph.params;
        let learnt: Vec<_> = params.iter().filter(|p| !p.learning.frozen).cloned().collect();
        self.slots(&learnt)
    }

    /// The states' ranges.
    pub fn state_slots(&self) -> Vec<Slot> {
        self.slots(&self.layout().body.graph.states)
    }

    /// A whole arena; empty if this program does not have it.
    pub fn kept(&self, what: Kept) -> &[f32] {
        self.memory.state.kept(what)
    }

    /// A whole arena, mutable. Ranks that share weights write it inside [`Engine::exclusively`]; moments are those of the
    /// parameters that this rank updates.
    pub fn kept_mut(&mut self, what: Kept) -> &mut [f32] {
        let free = what != Kept::Params || self.may_write_weights();
        assert!(free, "weights that ranks share are written inside `exclusively`");
        self.memory.state.kept_mut(what)
    }

    /// What the elements of an arena are stored in: f32, or bf16 for moments of a program that says so.
    pub fn kept_dtype(&self, what: Kept) -> DType {
        self.memory.state.dtype(what)
    }

    /// A whole arena as f32, whatever it is stored in.
    pub fn kept_wide(&self, what: Kept) -> Vec<f32> {
        KeptArenas { state: &self.memory.state, isa: self.options.isa }.wide(what).into_owned()
    }

    /// Sets elements of an arena from `first` on, rounded to the nearest that can be stored; as for
    /// [`kept_mut`](Self::kept_mut).
    pub fn put_kept(&mut self, what: Kept, first: usize, numbers: &[f32]) {
        let isa = self.options.isa;
        if self.kept_dtype(what) == DType::F32 {
            return self.kept_mut(what)[first..first + numbers.len()].copy_from_slice(numbers);
        }
        if let FloatsMut::Bf16(all) = self.memory.state.stored_mut(what) {
            FloatsMut::Bf16(&mut all[first..first + numbers.len()]).round(isa, numbers);
        }
    }

    /// All gradients, laid out as the parameters are.
    ///
    /// # Panics
    /// If this rank keeps only its own shard of them.
    pub fn grads(&self) -> &[f32] {
        assert!(self.first().grad_buffers.is_none(), "{}", ExecError::NotKept);
        self.memory.state.all_grads()
    }

    /// Continues a run after `steps` steps: bias correction and dropout masks are those of the next one.
    pub fn set_steps_done(&mut self, steps: u64) {
        self.memory.state.step = steps;
    }

    /// Sets parameters by name, from an arena that is laid out as `slots` say.
    pub fn copy_params(&mut self, slots: &[Slot], from: &[f32]) -> Result<(), ExecError> {
        for slot in slots {
            let (to, from) = (self.param_mut(&slot.name)?, &from[slot.range.clone()]);
            if to.len() != from.len() {
                let (want, got) = (to.len(), from.len());
                return Err(ExecError::Length { what: "parameter", name: slot.name.clone(), want, got });
            }
            to.copy_from_slice(from);
        }
        Ok(())
    }

    /// Swaps the parameters and their averages; a second call swaps them back. Ranks that share weights do it inside
    /// [`Engine::exclusively`].
    pub fn swap_average(&mut self) {
        assert!(self.may_write_weights(), "weights that ranks share are written inside `exclusively`");
        self.memory.state.swap_average();
    }

    fn slots(&self, stored: &[Stored]) -> Vec<Slot> {
        let ready = self.layout();
        let slot = |s: &Stored| {
            let (Place::Param(start) | Place::State(start)) = ready.plan.places[s.value.idx()] else {
                unreachable!("parameters and states lie in their own arenas")
            };
            let shape = ready.body.graph.shape(s.value);
            let (name, dims) = (s.name.clone(), shape.dims().to_vec());
            Slot { name, dims, splits: s.splits(), range: start..start + shape.numel() }
        };
        stored.iter().map(slot).collect()
    }
}
