//! The arenas of one rank, and slices of them by value.
//!
//! This module turns the offsets of a verified [`MemoryPlan`] into references. Its unsafe code rests on two facts: the
//! plan keeps apart what is alive at the same time, and a node is given each of its slices once.

use std::cell::Cell;
use std::ops::Range;

use polyreme_collective::{Block, Span};
use polyreme_dtype::{DType, Element};
use polyreme_graph::{Graph, MemoryPlan, Place, ValueId};
use polyreme_kernels::cx::SharedMut;
use polyreme_kernels::elementwise::Source;

use crate::arena::Arena;
use crate::error::ExecError;
use crate::weights::{Held, Kept};

/// What arenas are called if there is no memory for them.
const ACTIVATIONS: &str = "activations";
const INPUTS: &str = "inputs";

/// Everything that a rank keeps in memory.
pub(crate) struct Memory {
    pub(crate) plan: MemoryPlan,
    activations: Arena,
    params: Arena,
    /// All gradients, or the buffers in which buckets of them take turns.
    grads: Arena,
    /// Elements of it.
    grad_len: usize,
    /// The sums of the gradients that this rank owns, if it keeps no others; laid out as its moments are.
    own_grads: Option<Arena>,
    states: Arena,
    inputs: Arena,
    /// Up to two floats for each parameter that this rank updates.
    optimizer: [Arena; 2],
    n_optimizer: usize,
    /// Elements of each.
    moment_len: usize,
    /// The sums of a step's earlier pieces; made when first needed.
    sums: Option<Arena>,
}

/// What a rank keeps beside the plan.
pub(crate) struct Keeping {
    /// Floats of optimizer state a parameter.
    pub(crate) state_per_param: usize,
    /// Parameters that this rank updates.
    pub(crate) moment_len: usize,
    /// Whether there are gradients.
    pub(crate) gradients: bool,
    /// Whether only those of the parameters that this rank updates outlive their buffers.
    pub(crate) own_gradients: bool,
    /// Weights that ranks share, and gradients that the others can read.
    pub(crate) blocks: Option<(Option<Block>, Block)>,
}

/// What belongs to one batch size: the plan and the memory of its values.
pub(crate) struct Workspace {
    pub(crate) plan: MemoryPlan,
    activations: Arena,
    inputs: Arena,
}

impl Memory {
    pub(crate) fn new(plan: MemoryPlan, keeping: Keeping) -> Result<Memory, ExecError> {
        let floats = |wanted: bool, len: usize, what| Arena::new(if wanted { len * 4 } else { 0 }, what);
        let (n, moment_len) = (keeping.state_per_param, keeping.moment_len);
        let (params, grads) = match keeping.blocks {
            Some((params, grads)) => (params.map(Arena::over), Some(Arena::over(grads))),
            None => (None, None),
        };
        Ok(Memory {
            activations: Arena::new(plan.arena_bytes, ACTIVATIONS)?,
            params: params.map_or_else(|| floats(true, plan.param_len, "parameters"), Ok)?,
            grads: grads.map_or_else(|| floats(keeping.gradients, plan.grad_len, "gradients"), Ok)?,
            grad_len: if keeping.gradients { plan.grad_len } else { 0 },
            own_grads: keeping.own_gradients.then(|| floats(true, moment_len, "gradients")).transpose()?,
            states: Arena::new(plan.state_len * 4, "states")?,
            inputs: Arena::new(plan.input_bytes, INPUTS)?,
            optimizer: [
                floats(n > 0, moment_len, "the optimizer's state")?,
                floats(n > 1, moment_len, "the optimizer's state")?,
            ],
            n_optimizer: n,
            moment_len,
            sums: None,
            plan,
        })
    }

    /// What stays from one step to the next.
    pub(crate) fn held(&self) -> Held {
        Held {
            params: self.params.bytes(),
            grads: self.grads.bytes()
                + [&self.sums, &self.own_grads].into_iter().flatten().map(Arena::bytes).sum::<usize>(),
            optimizer: self.optimizer.iter().map(Arena::bytes).sum(),
            states: self.states.bytes(),
        }
    }

    /// Changes places with the values of another batch size.
    pub(crate) fn swap(&mut self, other: &mut Workspace) {
        std::mem::swap(&mut self.plan, &mut other.plan);
        std::mem::swap(&mut self.activations, &mut other.activations);
        std::mem::swap(&mut self.inputs, &mut other.inputs);
    }

    /// Gradients of the last run that no exchange is working on, and the sums of earlier ones.
    pub(crate) fn grads_and_sums(&mut self, range: Range<usize>) -> (&mut [f32], &mut [f32]) {
        let sums = self.sums.as_ref().expect("the first piece of a step made them");
        let (at, len) = (range.start * 4, range.len());
        // SAFETY: `&mut self`, and two arenas.
        unsafe { (self.grads.slice_mut(at, len), sums.slice_mut(at, len)) }
    }

    /// Makes room for the sums of a step's earlier pieces, the first time.
    pub(crate) fn make_sums(&mut self) -> Result<(), ExecError> {
        if self.sums.is_none() {
            self.sums = Some(Arena::new(self.grad_len * 4, "sums of gradients")?);
        }
        Ok(())
    }

    /// Elements of the gradients' arena that no exchange is working on. Others may be.
    pub(crate) fn grads_range(&mut self, range: Range<usize>) -> &mut [f32] {
        // SAFETY: `&mut self`, and these elements are this rank's until it hands them to an exchange.
        unsafe { self.grads.slice_mut(range.start * 4, range.len()) }
    }

    /// Elements of a buffer whose sum is there, and the gradients of this rank from `to` on that they belong to.
    pub(crate) fn buffer_and_own(&mut self, from: Range<usize>, to: usize) -> (&[f32], &mut [f32]) {
        let own = self.own_grads.as_ref().expect("a program with buffers");
        // SAFETY: `&mut self`, two arenas, and no exchange works on these elements.
        unsafe { (self.grads.slice(from.start * 4, from.len()), own.slice_mut(to * 4, from.len())) }
    }

    /// Where the gradients of elements from `start` on lie that this rank updates, whose moments begin at
    /// `moments_at`.
    fn own_place(&self, start: usize, moments_at: usize) -> (&Arena, usize) {
        match &self.own_grads {
            Some(own) => (own, moments_at * 4),
            None => (&self.grads, start * 4),
        }
    }

    /// Gradients of `range`, a part that this rank updates, whose moments begin at `moments_at`.
    pub(crate) fn own_grads(&self, range: Range<usize>, moments_at: usize) -> &[f32] {
        let (arena, at) = self.own_place(range.start, moments_at);
        // SAFETY: `&self` between runs.
        unsafe { arena.slice(at, range.len()) }
    }

    /// All gradients and all states.
    pub(crate) fn grads_and_states(&mut self) -> (&mut [f32], &mut [f32]) {
        // SAFETY: `&mut self`, and two arenas.
        unsafe { (self.grads.slice_mut(0, self.grad_len), self.states.slice_mut(0, self.plan.state_len)) }
    }

    /// Where elements of the parameters' arena lie. No slice: of weights that ranks share every rank names the same
    /// elements at the same time, and some of them may still be updated by the rank that they belong to.
    pub(crate) fn params_span(&self, range: Range<usize>) -> Span {
        self.params.span(range.start, range.len())
    }

    fn find(&self, v: ValueId) -> (&Arena, usize) {
        match self.plan.places[v.idx()] {
            Place::Arena(offset) => (&self.activations, offset),
            Place::Param(at) => (&self.params, at * 4),
            Place::Grad(at) => (&self.grads, at * 4),
            Place::State(at) => (&self.states, at * 4),
            Place::Input(offset) => (&self.inputs, offset),
            Place::Nowhere => unreachable!("{v} is not stored"),
        }
    }

    /// A value between runs.
    pub(crate) fn read<T: Element>(&self, graph: &Graph, v: ValueId) -> &[T] {
        check_type::<T>(graph.value(v).dtype);
        let (arena, offset) = self.find(v);
        // SAFETY: `&self` between runs: only a run writes, and it takes `&mut`.
        unsafe { arena.slice(offset, graph.shape(v).numel()) }
    }

    /// A value between runs, to write.
    pub(crate) fn write<T: Element>(&mut self, graph: &Graph, v: ValueId) -> &mut [T] {
        check_type::<T>(graph.value(v).dtype);
        let (arena, offset) = self.find(v);
        // SAFETY: `&mut self` between runs.
        unsafe { arena.slice_mut(offset, graph.shape(v).numel()) }
    }

    /// Parameters `start..end` of the arena, a part that this rank updates, their gradients and their optimizer state,
    /// which begins at `moments_at`.
    pub(crate) fn update_own(&mut self, start: usize, end: usize, moments_at: usize) -> UpdateRange<'_> {
        let (grads, grads_at) = self.own_place(start, moments_at);
        self.update_range(start, end, moments_at, grads, grads_at)
    }

    /// Parameters `start..end` of the arena, their gradients, which begin at `grads_at`, and their optimizer state.
    pub(crate) fn update_whole(&mut self, start: usize, end: usize, grads_at: usize) -> UpdateRange<'_> {
        self.update_range(start, end, start, &self.grads, grads_at * 4)
    }

    /// The slices of an update; for those who have `&mut self`.
    fn update_range<'a>(
        &'a self,
        start: usize,
        end: usize,
        moments_at: usize,
        grads: &'a Arena,
        grads_at: usize,
    ) -> UpdateRange<'a> {
        let len = end - start;
        let moments = |n: usize| if self.n_optimizer > n { (moments_at * 4, len) } else { (0, 0) };
        let ((at1, len1), (at2, len2)) = (moments(0), moments(1));
        // SAFETY: the callers have `&mut self`, and these are four different arenas.
        unsafe {
            UpdateRange {
                params: self.params.slice_mut(start * 4, len),
                grads: grads.slice(grads_at, len),
                state1: self.optimizer[0].slice_mut(at1, len1),
                state2: self.optimizer[1].slice_mut(at2, len2),
            }
        }
    }

    /// All gradients, or their buffers.
    pub(crate) fn all_grads(&self) -> &[f32] {
        // SAFETY: `&self` between runs.
        unsafe { self.grads.slice(0, self.grad_len) }
    }

    /// All gradients or their buffers, to write.
    pub(crate) fn all_grads_mut(&mut self) -> &mut [f32] {
        // SAFETY: `&mut self` between runs.
        unsafe { self.grads.slice_mut(0, self.grad_len) }
    }

    fn kept_arena(&self, what: Kept) -> (&Arena, usize) {
        let moments = |n: usize| if self.n_optimizer > n { self.moment_len } else { 0 };
        match what {
            Kept::Params => (&self.params, self.plan.param_len),
            Kept::States => (&self.states, self.plan.state_len),
            Kept::Moment1 => (&self.optimizer[0], moments(0)),
            Kept::Moment2 => (&self.optimizer[1], moments(1)),
        }
    }

    /// A whole arena that outlives the step.
    pub(crate) fn kept(&self, what: Kept) -> &[f32] {
        let (arena, len) = self.kept_arena(what);
        // SAFETY: `&self` between runs.
        unsafe { arena.slice(0, len) }
    }

    /// A whole arena that outlives the step, to write.
    pub(crate) fn kept_mut(&mut self, what: Kept) -> &mut [f32] {
        let (arena, len) = self.kept_arena(what);
        // SAFETY: `&mut self` between runs.
        unsafe { arena.slice_mut(0, len) }
    }

    /// Copies a value over another of the same length, in another arena.
    pub(crate) fn copy(&mut self, graph: &Graph, from: ValueId, to: ValueId) {
        [from, to].into_iter().for_each(|v| check_type::<f32>(graph.value(v).dtype));
        let n = graph.shape(from).numel();
        let ((source, at), (target, target_at)) = (self.find(from), self.find(to));
        assert!(!std::ptr::eq(source, target), "values of one arena are not copied over each other");
        // SAFETY: `&mut self`, and two arenas.
        unsafe { target.slice_mut::<f32>(target_at, n).copy_from_slice(source.slice(at, n)) };
    }

    /// The slices of one node, for the time it runs. Takes `&mut`: one node at a time.
    pub(crate) fn node<'a>(&'a mut self, graph: &'a Graph, node: usize) -> NodeMemory<'a> {
        NodeMemory { memory: self, graph, node, taken: Cell::new(0) }
    }
}

impl Workspace {
    /// Reserves what another batch size needs.
    pub(crate) fn new(plan: MemoryPlan) -> Result<Workspace, ExecError> {
        let activations = Arena::new(plan.arena_bytes, ACTIVATIONS)?;
        let inputs = Arena::new(plan.input_bytes, INPUTS)?;
        Ok(Workspace { plan, activations, inputs })
    }
}

/// What an update that is made block by block works on: a parameter and its moments.
pub(crate) struct UpdateTarget<'a> {
    pub(crate) params: SharedMut<'a, f32>,
    /// Empty if the optimizer has no such state; so is the next.
    pub(crate) state1: SharedMut<'a, f32>,
    pub(crate) state2: SharedMut<'a, f32>,
}

/// What an update works on.
pub(crate) struct UpdateRange<'a> {
    pub(crate) params: &'a mut [f32],
    pub(crate) grads: &'a [f32],
    pub(crate) state1: &'a mut [f32],
    pub(crate) state2: &'a mut [f32],
}

/// The operands and results of a node that is running.
pub(crate) struct NodeMemory<'a> {
    memory: &'a Memory,
    graph: &'a Graph,
    node: usize,
    /// Bit k: output k was handed out; bit 31: the scratch was.
    taken: Cell<u32>,
}

impl<'a> NodeMemory<'a> {
    fn value(&self, of: &[ValueId], k: usize) -> ValueId {
        of[k]
    }
    fn take(&self, bit: usize) {
        assert!(self.taken.get() >> bit & 1 == 0, "a slice is handed out once");
        self.taken.set(self.taken.get() | 1 << bit);
    }

    /// Operand `k`.
    pub(crate) fn input<T: Element>(&self, k: usize) -> &'a [T] {
        let v = self.value(&self.graph.nodes[self.node].inputs, k);
        self.memory.read(self.graph, v)
    }

    /// Operand `k`, or the output in whose place it lies.
    pub(crate) fn source(&self, k: usize) -> Source<'a> {
        let node = &self.graph.nodes[self.node];
        // Lengths too: an empty value may be given any place.
        let place = |v: ValueId| (self.memory.plan.places[v.idx()], self.graph.shape(v).numel());
        match node.outputs.iter().position(|&o| place(o) == place(node.inputs[k])) {
            Some(output) => Source::InPlace(output),
            None => Source::Slice(self.input(k)),
        }
    }

    /// How many operands there are.
    pub(crate) fn n_inputs(&self) -> usize {
        self.graph.nodes[self.node].inputs.len()
    }

    /// How many results there are.
    pub(crate) fn n_outputs(&self) -> usize {
        self.graph.nodes[self.node].outputs.len()
    }

    /// Result `k`; once.
    pub(crate) fn output<T: Element>(&self, k: usize) -> &'a mut [T] {
        self.take(k);
        let v = self.value(&self.graph.nodes[self.node].outputs, k);
        check_type::<T>(self.graph.value(v).dtype);
        let (arena, offset) = self.memory.find(v);
        // SAFETY: `node` took `&mut Memory`; this range is handed out once; the plan was verified to keep the
        // outputs of a node from each other, from its scratch and from its inputs (an in-place operand of a fused
        // pass is passed as `Source::InPlace`, not as a slice).
        unsafe { arena.slice_mut(offset, self.graph.shape(v).numel()) }
    }

    /// A parameter that no node reads from this one on, and its moments; in the place of the node's output.
    pub(crate) fn update_target(&self, param: ValueId) -> UpdateTarget<'a> {
        self.take(0);
        let (memory, len) = (self.memory, self.graph.shape(param).numel());
        let Place::Param(at) = memory.plan.places[param.idx()] else {
            unreachable!("{param} is a parameter")
        };
        let state = |n: usize| {
            let (at, len) = if memory.n_optimizer > n { (at * 4, len) } else { (0, 0) };
            // SAFETY: `node` took `&mut Memory`, this is handed out once, and nodes have no other access to moments.
            SharedMut::new(unsafe { memory.optimizer[n].slice_mut(at, len) })
        };
        // SAFETY: as above; the program was made so that neither this node nor a later one reads the parameter.
        let params = SharedMut::new(unsafe { memory.params.slice_mut(at * 4, len) });
        UpdateTarget { params, state1: state(0), state2: state(1) }
    }

    /// The node's scratch space; once.
    pub(crate) fn scratch(&self) -> &'a mut [f32] {
        self.take(31);
        let plan = &self.memory.plan;
        let (offset, bytes) = (plan.scratch[self.node], plan.scratch_bytes[self.node]);
        // SAFETY: as for outputs.
        unsafe { self.memory.activations.slice_mut(offset, bytes / 4) }
    }
}

/// A slice is of the type that the graph gave its value, in release builds too: a kernel that is wired up wrongly stops
/// here, instead of reading bits as numbers of another type.
fn check_type<T: Element>(dtype: DType) {
    assert_eq!(T::DTYPE, dtype, "the element type of a slice is that of its value");
}

#[cfg(test)]
mod tests {
    use polyreme_dtype::{bf16, f16};
    use polyreme_graph::Builder;

    use super::*;

    /// Of types that are equally long, only a value's own is handed out.
    #[test]
    fn a_slice_has_the_type_of_its_value() {
        let mut b = Builder::new();
        let x = b.input("x", [4], DType::F32).unwrap();
        let half = b.cast(x, DType::F16).unwrap();
        let graph = b.finish(&[("half", half)]);
        let (x, half) = (graph.nodes[0].outputs[0], graph.output("half").unwrap());
        let keeping = Keeping {
            state_per_param: 0,
            moment_len: 0,
            gradients: false,
            own_gradients: false,
            blocks: None,
        };
        let plan = MemoryPlan::new(&graph, &vec![0; graph.nodes.len()]);
        let mut memory = Memory::new(plan, keeping).unwrap();
        memory.write::<f32>(&graph, x).fill(1.0);
        assert_eq!(memory.read::<f32>(&graph, x), [1.0; 4]);
        assert_eq!(memory.read::<f16>(&graph, half), [f16::ZERO; 4]);

        fn refused(run: impl FnOnce()) -> bool {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
        }
        assert!(refused(|| _ = memory.read::<i32>(&graph, x)));
        assert!(refused(|| _ = memory.read::<bf16>(&graph, half)));
        assert!(refused(|| _ = memory.write::<i32>(&graph, x)));
        assert!(refused(|| _ = memory.node(&graph, 1).output::<bf16>(0)));
    }
}
