//! What belongs to programs and not to the learnt state: prepared kernels, inputs and activations of the microbatches that are
//! in memory, and buffers that live for one step.
//!
//! All bodies, those of evaluations too, share one arena of activations and one of inputs: only one of them runs at a time,
//! and nothing there outlives a step. A slot is the part of both arenas that belongs to one microbatch.

use std::sync::Arc;

use polyreme_graph::memory::ALIGN_BYTES;
use polyreme_graph::{Body, Buffer, Graph, MemoryPlan, Op, Place, Program};
use polyreme_kernels::{Isa, Parallel};

use crate::arena::Arena;
use crate::error::ExecError;
use crate::launch::{Choices, Prepared, prepare};

/// A body that is ready to run.
pub(crate) struct Ready {
    pub(crate) body: Arc<Body>,
    pub(crate) prepared: Vec<Prepared>,
    pub(crate) plan: MemoryPlan,
}

impl Ready {
    /// Prepares the kernels of a body of `program`, and plans its memory.
    pub(crate) fn new(program: &Program, body: &Arc<Body>, threads: usize, isa: Isa) -> Ready {
        let graph = &body.graph;
        let with =
            Choices { workers: threads.max(1), isa, reproducible: body.reproducible, strict: body.strict };
        let prepared: Vec<_> = (0..graph.nodes.len()).map(|i| prepare(body, i, with)).collect();
        let scratch: Vec<_> = prepared.iter().map(Prepared::scratch_bytes).collect();
        let mut plan = MemoryPlan::new(graph, &scratch);
        body.place_gradients(&mut plan);
        if let Some(buffers) = &program.grad_buffers {
            buffers.apply(&mut plan);
        }
        Ready { body: body.clone(), prepared, plan }
    }

    /// Lays out a forward pass, in which no gradients become ready, with its parameters where another body has them.
    pub(crate) fn follow(&mut self, first: &Ready) -> Result<(), ExecError> {
        let named = |r: &Ready| -> Vec<(String, usize)> {
            let of = |g: &Graph| {
                g.params.iter().map(|s| (s.name.clone(), g.shape(s.value).numel())).collect::<Vec<_>>()
            };
            of(&r.body.graph)
        };
        if named(self) != named(first) {
            return Err(ExecError::Layout);
        }
        for (stored, &at) in self.body.graph.params.iter().zip(&first.plan.param_offsets) {
            self.plan.places[stored.value.idx()] = Place::Param(at);
        }
        self.plan.param_offsets.clone_from(&first.plan.param_offsets);
        (self.plan.param_len, self.plan.grad_len) = (first.plan.param_len, first.plan.grad_len);
        Ok(())
    }

    /// Whether the body computes gradients.
    pub(crate) fn learns(&self) -> bool {
        self.body.graph.grads.iter().any(Option::is_some)
    }

    /// Offsets and values of constants, which are written whenever a microbatch is loaded.
    pub(crate) fn constants(&self) -> impl Iterator<Item = (usize, f32)> {
        self.body.graph.nodes.iter().filter_map(|node| match (&node.op, node.outputs.first()) {
            (Op::Const(value), Some(v)) => match self.plan.places[v.idx()] {
                Place::Arena(offset) => Some((offset, *value)),
                _ => None,
            },
            _ => None,
        })
    }
}

/// Memory in which nothing outlives a step.
pub(crate) struct Workspace {
    pub(crate) activations: Arena,
    pub(crate) inputs: Arena,
    /// Bytes of one slot in each arena.
    pub(crate) activation_bytes: usize,
    pub(crate) input_bytes: usize,
    slots: usize,
    /// Buffers of all programs, by name.
    pub(crate) buffers: Vec<(Buffer, Arena)>,
}

impl Workspace {
    pub(crate) fn new() -> Workspace {
        Workspace {
            activations: Arena::empty(),
            inputs: Arena::empty(),
            activation_bytes: 0,
            input_bytes: 0,
            slots: 1,
            buffers: Vec::new(),
        }
    }

    /// Makes room for another program: arenas grow to what it needs. On an error everything stays as it was.
    pub(crate) fn make_room(
        &mut self,
        program: &Program,
        ready: &[&Ready],
        par: &dyn Parallel,
    ) -> Result<Vec<usize>, ExecError> {
        let most = |of: fn(&MemoryPlan) -> usize| {
            ready.iter().map(|r| of(&r.plan)).max().unwrap_or(0).next_multiple_of(ALIGN_BYTES)
        };
        let activation_bytes = most(|p| p.arena_bytes).max(self.activation_bytes);
        let input_bytes = most(|p| p.input_bytes).max(self.input_bytes);
        let slots = program.slots.max(self.slots);
        self.activations.grow(slots * activation_bytes, "activations", par)?;
        self.inputs.grow(slots * input_bytes, "inputs", par)?;
        (self.activation_bytes, self.input_bytes, self.slots) = (activation_bytes, input_bytes, slots);
        program.buffers.iter().map(|buffer| self.buffer(buffer, par)).collect()
    }

    fn buffer(&mut self, wanted: &Buffer, par: &dyn Parallel) -> Result<usize, ExecError> {
        let bytes = wanted.len * wanted.dtype.bytes();
        let same = |(b, _): &(Buffer, Arena)| (&b.name, b.dtype) == (&wanted.name, wanted.dtype);
        if let Some(at) = self.buffers.iter().position(same) {
            self.buffers[at].1.grow(bytes, "sums of gradients", par)?;
            return Ok(at);
        }
        self.buffers.push((wanted.clone(), Arena::new(bytes, "sums of gradients", par)?));
        Ok(self.buffers.len() - 1)
    }
}
