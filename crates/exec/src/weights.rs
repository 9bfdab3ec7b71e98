//! What an engine has learnt, seen from outside: whole arenas with a name for each range, for checkpoints, averages,
//! accumulated gradients, and engines that share a model.

use std::ops::Range;

use polyreme_graph::graph::Stored;
use polyreme_graph::{Buffer, DType, Place};

use crate::arena::Arena;
use crate::engine::Engine;
use crate::error::ExecError;

/// A named range of an arena.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    /// The parameter's or the state's name.
    pub name: String,
    /// Its dims.
    pub dims: Vec<usize>,
    /// Its elements in the arena.
    pub range: Range<usize>,
}

/// An arena that outlives a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kept {
    /// Parameters.
    Params,
    /// States without a gradient, such as running statistics.
    States,
    /// The optimizer's first number for each parameter (momentum, the mean of gradients).
    Moment1,
    /// Its second (the mean of squares).
    Moment2,
    /// Averaged parameters.
    Average,
}

/// Bytes that an engine has reserved for what stays from one step to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// Parameters. Weights that ranks share are counted by rank 0.
    pub params: usize,
    /// Gradients, or their buffers; and what a step needs beside them: this rank's own gradients, sums of earlier microbatches or
    /// of logical shards.
    pub grads: usize,
    /// Averaged parameters.
    pub average: usize,
    /// Optimizer state of the parameters that this rank updates.
    pub optimizer: usize,
    /// States without a gradient.
    pub states: usize,
    /// Numbers of a step: losses, weights, squares.
    pub totals: usize,
}

impl Engine {
    /// What this engine really holds, beside inputs and activations.
    pub fn held(&self) -> Held {
        let held = self.memory.state.held();
        let bytes = |sums: bool| -> usize {
            let of = |(buffer, _): &&(Buffer, Arena)| (buffer.dtype == DType::F32) == sums;
            self.memory.work.buffers.iter().filter(of).map(|(_, arena)| arena.bytes()).sum()
        };
        let held = Held { grads: held.grads + bytes(true), totals: bytes(false), ..held };
        match &self.first().role {
            Some(role) if role.shares_weights() && role.rank > 0 => Held { params: 0, ..held },
            _ => held,
        }
    }

    /// The parameters' ranges, in the order of their declaration. Gradients have the same.
    pub fn param_slots(&self) -> Vec<Slot> {
        self.slots(&self.layout().body.graph.params)
    }

    /// The states' ranges.
    pub fn state_slots(&self) -> Vec<Slot> {
        self.slots(&self.layout().body.graph.states)
    }

    /// A whole arena; empty if this program has none of it.
    pub fn kept(&self, what: Kept) -> &[f32] {
        self.memory.state.kept(what)
    }

    /// A whole arena, to set. Ranks that share weights do it inside [`Engine::exclusively`]; moments are those of the
    /// parameters that this rank updates.
    pub fn kept_mut(&mut self, what: Kept) -> &mut [f32] {
        let free = what != Kept::Params || self.may_write_weights();
        assert!(free, "weights that ranks share are written inside `exclusively`");
        self.memory.state.kept_mut(what)
    }

    /// All gradients, laid out as the parameters are.
    ///
    /// # Panics
    /// If this rank keeps its own part of them only.
    pub fn grads(&self) -> &[f32] {
        assert!(self.first().grad_buffers.is_none(), "{}", ExecError::NotKept);
        self.memory.state.all_grads()
    }

    /// Continues a run of which `steps` steps are done: moments are corrected and masks drawn for the next one.
    pub fn set_steps_done(&mut self, steps: u64) {
        self.memory.state.step = steps;
    }

    /// Parameters by name, from an arena that is laid out as `slots` say.
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

    /// Puts the averaged parameters in the place of the parameters; the second time, back. Ranks that share weights do it inside
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
            Slot { name: s.name.clone(), dims: shape.dims().to_vec(), range: start..start + shape.numel() }
        };
        stored.iter().map(slot).collect()
    }
}
