//! What belongs to programs and not to the learnt state: prepared kernels, inputs and activations of the microbatches that are
//! in memory, and buffers that live for one step.
//!
//! All bodies, those of evaluations too, share one arena of activations and one of inputs: only one of them runs at a time,
//! and nothing there outlives a step. A slot is the part of both arenas that belongs to one microbatch. Before the slots of
//! bodies in segments lies what they share; other bodies have the arena of activations to themselves.

use std::sync::Arc;

use polyreme_graph::graph::Stored;
use polyreme_graph::memory::{ALIGN_BYTES, reshape_root};
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
        let mut plan = MemoryPlan::new(graph, &scratch, &body.segments);
        body.place_gradients(&mut plan);
        if let Some(buffers) = &program.grad_buffers {
            buffers.apply(&mut plan);
        }
        Ready { body: body.clone(), prepared, plan }
    }

    /// Lays out a forward pass, in which no gradients become ready, with its parameters and states where another body has them.
    /// It may have fewer, but the same parts of them.
    pub(crate) fn follow(&mut self, first: &Ready) -> Result<(), ExecError> {
        let (own, other) = (&self.body.graph, &first.body.graph);
        let mut offsets = Vec::new();
        for stored in &own.params {
            let Place::Param(at) = first.place_of(&other.params, stored, own)? else {
                unreachable!("parameters lie in their own arena")
            };
            self.plan.places[stored.value.idx()] = Place::Param(at);
            offsets.push(at);
        }
        for stored in &own.states {
            self.plan.places[stored.value.idx()] = first.place_of(&other.states, stored, own)?;
        }
        // Views are where the tensors are.
        for v in own.nodes.iter().filter(|node| node.op == Op::Reshape).map(|node| node.outputs[0]) {
            let place = self.plan.places[reshape_root(own, v).idx()];
            if let Place::Param(_) | Place::State(_) = place {
                self.plan.places[v.idx()] = place;
            }
        }
        self.plan.param_offsets = offsets;
        (self.plan.param_len, self.plan.grad_len) = (first.plan.param_len, first.plan.grad_len);
        self.plan.state_len = first.plan.state_len;
        Ok(())
    }

    /// Where the tensor is that another body's graph has under the same name; an error if there is none that is the same part.
    fn place_of(&self, known: &[Stored], stored: &Stored, graph: &Graph) -> Result<Place, ExecError> {
        let same = |s: &&Stored| {
            (&s.name, s.part, s.shard, self.body.graph.shape(s.value))
                == (&stored.name, stored.part, stored.shard, graph.shape(stored.value))
        };
        known.iter().find(same).map(|s| self.plan.places[s.value.idx()]).ok_or(ExecError::Layout)
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
    /// Bytes that the slots of bodies in segments share, at the beginning of the arena of activations.
    shared_bytes: usize,
    /// Bytes of one slot in each arena.
    slot_bytes: usize,
    pub(crate) input_bytes: usize,
    slots: usize,
    /// Buffers of all programs, by name.
    pub(crate) buffers: Vec<(Buffer, Arena)>,
}

/// What a program needs of inputs and activations, in bytes.
pub(crate) struct Need {
    /// Of the arena of activations, by bodies that have it to themselves.
    alone: usize,
    /// By bodies in segments: what their slots share, and each slot.
    shared: usize,
    slot: usize,
    /// Inputs of a slot.
    inputs: usize,
    slots: usize,
}

impl Need {
    pub(crate) fn of<'a>(program: &Program, ready: impl Iterator<Item = &'a Ready> + Clone) -> Need {
        let most = |of: &dyn Fn(&MemoryPlan) -> usize| {
            ready.clone().map(|r| of(&r.plan)).max().unwrap_or(0).next_multiple_of(ALIGN_BYTES)
        };
        let in_segments = |p: &MemoryPlan| p.shared_bytes.is_some();
        Need {
            alone: most(&|p| if in_segments(p) { 0 } else { p.arena_bytes }),
            shared: most(&|p| p.shared_bytes.unwrap_or(0)),
            slot: most(&|p| if in_segments(p) { p.arena_bytes } else { 0 }),
            inputs: most(&|p| p.input_bytes),
            slots: program.slots,
        }
    }

    /// Bytes of activations.
    pub(crate) fn activations(&self) -> usize {
        self.alone.max(self.shared + self.slots * self.slot)
    }

    /// Bytes of inputs.
    pub(crate) fn inputs(&self) -> usize {
        self.slots * self.inputs
    }
}

impl Workspace {
    /// Where the values of a body that outlive its segments begin, in bytes: the slot of a microbatch.
    pub(crate) fn slot_at(&self, ready: &Ready, slot: usize) -> usize {
        match ready.plan.shared_bytes {
            Some(_) => self.shared_bytes + slot * self.slot_bytes,
            None => 0,
        }
    }

    pub(crate) fn new() -> Workspace {
        Workspace {
            activations: Arena::empty(),
            inputs: Arena::empty(),
            shared_bytes: 0,
            slot_bytes: 0,
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
        let need = Need::of(program, ready.iter().copied());
        let shared_bytes = need.shared.max(self.shared_bytes);
        let slot_bytes = need.slot.max(self.slot_bytes);
        let input_bytes = need.inputs.max(self.input_bytes);
        let slots = program.slots.max(self.slots);
        self.activations.grow(need.alone.max(shared_bytes + slots * slot_bytes), "activations", par)?;
        self.inputs.grow(slots * input_bytes, "inputs", par)?;
        (self.shared_bytes, self.slot_bytes) = (shared_bytes, slot_bytes);
        (self.input_bytes, self.slots) = (input_bytes, slots);
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
