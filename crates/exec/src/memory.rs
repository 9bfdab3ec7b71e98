//! The memory of one rank, and slices of it by value or by region.
//!
//! This module turns the offsets of verified [`MemoryPlan`](polyreme_graph::MemoryPlan)s, and the regions of programs, into
//! references. Its unsafe code rests on three facts: a plan keeps apart what is alive at the same time, a node is given each of
//! its slices once, and instructions that name two regions name disjoint ones.

use std::cell::Cell;
use std::ops::Range;

use polyreme_collective::Span;
use polyreme_dtype::{DType, Element, bf16, f16};
use polyreme_graph::{Place, Region, ValueId};
use polyreme_kernels::convert;
use polyreme_kernels::cx::SharedMut;
use polyreme_kernels::elementwise::Source;
use polyreme_kernels::{Cx, Floats, FloatsMut};

use crate::arena::Arena;
use crate::engine::Loaded;
use crate::staging::Staging;
use crate::state::State;
use crate::weights::Kept;
use crate::workspace::{Ready, Workspace};

/// Bytes of an element of parameters, gradients and states.
const F32_BYTES: usize = DType::F32.bytes();

/// All memory of a rank.
pub(crate) struct Memory {
    pub(crate) state: State,
    pub(crate) work: Workspace,
    /// The buffer that blocks read parameters from, if it is not their arena.
    pub(crate) params_from: Option<usize>,
}

/// Contiguous elements of an arena.
struct Located<'a> {
    arena: &'a Arena,
    /// The offset in bytes.
    offset: usize,
    len: usize,
    dtype: DType,
}

impl Memory {
    /// Where blocks read parameters.
    fn params_arena(&self) -> &Arena {
        self.params_from.map_or(&*self.state.params, |buffer| &self.work.buffers[buffer].1)
    }

    fn find(&self, ready: &Ready, slot: usize, v: ValueId) -> Located<'_> {
        let value = ready.body.graph.value(v);
        let (arena, offset) = match ready.plan.places[v.idx()] {
            Place::Arena(offset) => (&self.work.activations, self.work.slot_at(ready, slot) + offset),
            Place::Shared(offset) => (&self.work.activations, offset),
            Place::Param(at) => (self.params_arena(), at * F32_BYTES),
            Place::Grad(at) => (&self.state.grads, at * F32_BYTES),
            Place::State(at) => (&self.state.states, at * F32_BYTES),
            Place::Input(offset) => (&self.work.inputs, slot * self.work.input_bytes + offset),
            Place::Nowhere => unreachable!("{v} is not stored"),
        };
        Located { arena, offset, len: value.shape.numel(), dtype: value.dtype }
    }

    fn locate(&self, loaded: &Loaded, bodies: &[Option<Ready>], region: &Region) -> Located<'_> {
        let of = |arena, start: usize, len: usize, dtype: DType| Located {
            arena,
            offset: start * dtype.bytes(),
            len,
            dtype,
        };
        match region {
            Region::Params(r) => of(&self.state.params, r.start, r.len(), DType::F32),
            Region::Grads(r) => of(&self.state.grads, r.start, r.len(), DType::F32),
            Region::States(r) => of(&self.state.states, r.start, r.len(), DType::F32),
            Region::Residual(r) => of(&self.state.residual, r.start, r.len(), DType::F32),
            Region::Factors(r) => of(&self.state.factors, r.start, r.len(), DType::F32),
            Region::Buffer(buffer, r) => {
                let (buffer, arena) = &self.work.buffers[loaded.buffers[*buffer]];
                of(arena, r.start, r.len(), buffer.dtype)
            }
            Region::Value { slot, body, value } => {
                let ready = bodies[loaded.bodies[*body]].as_ref().expect("bodies of a program stay with it");
                self.find(ready, *slot, *value)
            }
        }
    }

    /// A region, mutable.
    pub(crate) fn region<T: Element>(
        &mut self,
        loaded: &Loaded,
        bodies: &[Option<Ready>],
        region: &Region,
    ) -> &mut [T] {
        let at = self.locate(loaded, bodies, region);
        // SAFETY: `&mut self`, and no exchange in flight works on these elements: the program waits for it first.
        unsafe { at.slice_mut() }
    }

    /// Two regions: one shared, one mutable.
    ///
    /// # Panics
    /// If they overlap.
    pub(crate) fn two_regions<T: Element, U: Element>(
        &mut self,
        loaded: &Loaded,
        bodies: &[Option<Ready>],
        [from, into]: [&Region; 2],
    ) -> (&[T], &mut [U]) {
        let (from, into) = (self.locate(loaded, bodies, from), self.locate(loaded, bodies, into));
        assert!(!from.overlaps(&into), "an instruction reads and writes different elements");
        // SAFETY: `&mut self`, the two do not overlap, and as above.
        unsafe { (from.slice(), into.slice_mut()) }
    }

    /// Where the elements of a region lie, for an exchange. Not a slice: every rank refers to the same elements of shared
    /// weights at the same time, and some of them may still be being updated by the rank that owns them.
    pub(crate) fn span(&self, loaded: &Loaded, bodies: &[Option<Ready>], region: &Region) -> Span {
        let at = self.locate(loaded, bodies, region);
        at.arena.span(at.offset, at.len, at.dtype)
    }

    /// What an outer step works on: the mean of parameters, where they came from, and their velocity.
    pub(crate) fn outer(
        &mut self,
        loaded: &Loaded,
        bodies: &[Option<Ready>],
        [of, from]: [&Region; 2],
        params: &Range<usize>,
    ) -> (&mut [f32], &[f32], &mut [f32]) {
        let state = &self.state;
        if let Region::Params(range) = of {
            state.settle(Kept::Params, range.clone());
        }
        let [of, from] = [of, from].map(|region| self.locate(loaded, bodies, region));
        let beside = [&of, &from].into_iter().all(|at| !std::ptr::eq(at.arena, &state.velocity));
        assert!(beside && !of.overlaps(&from), "the weights of the last exchange have a buffer of their own");
        assert!(params.end <= state.lengths.velocity, "a velocity for each parameter");
        let (at, len) = (params.start * F32_BYTES, params.len());
        // SAFETY: `&mut self`, three memories that do not overlap, and settled.
        unsafe { (of.slice_mut(), from.slice(), state.velocity.slice_mut(at, len)) }
    }

    /// Parameters `start..start + len` of the arena, their gradients, the matching part of the optimizer state, and sums of split
    /// tensors.
    pub(crate) fn update(
        &mut self,
        loaded: &Loaded,
        bodies: &[Option<Ready>],
        (start, len): (usize, usize),
        grads: &Region,
        [moments1, moments2]: [Range<usize>; 2],
        sums: Option<&Region>,
    ) -> UpdateRange<'_> {
        let grads = self.locate(loaded, bodies, grads);
        let sums = sums.map(|sums| self.locate(loaded, bodies, sums));
        let state = &self.state;
        assert!(!std::ptr::eq(grads.arena, &*state.params), "gradients do not lie among the parameters");
        assert!(sums.as_ref().is_none_or(|sums| !sums.overlaps(&grads)), "sums have a buffer of their own");
        state.settle_update(start..start + len, [moments1.clone(), moments2.clone()]);
        // SAFETY: `&mut self`, these are different arenas or buffers, and settled.
        unsafe {
            UpdateRange {
                params: state.params.slice_mut(start * F32_BYTES, len),
                grads: grads.slice(),
                moments: match state.lengths.moments_dtype {
                    DType::Bf16 => MomentsMut::Bf16(two_moments(state, moments1, moments2)),
                    _ => MomentsMut::F32(two_moments(state, moments1, moments2)),
                },
                sums: sums.map_or(&mut [], |sums| sums.slice_mut()),
            }
        }
    }

    /// A value between runs.
    pub(crate) fn read<T: Element>(&self, ready: &Ready, slot: usize, v: ValueId) -> &[T] {
        // SAFETY: `&self` between runs: only a run writes, and it takes `&mut`.
        unsafe { self.find(ready, slot, v).slice() }
    }

    /// A value between runs, mutable.
    pub(crate) fn write<T: Element>(&mut self, ready: &Ready, slot: usize, v: ValueId) -> &mut [T] {
        // SAFETY: `&mut self` between runs.
        unsafe { self.find(ready, slot, v).slice_mut() }
    }

    /// Zeroes a value between runs.
    pub(crate) fn clear(&mut self, ready: &Ready, slot: usize, v: ValueId) {
        match ready.body.graph.value(v).dtype {
            DType::F16 => self.write::<f16>(ready, slot, v).fill(f16::ZERO),
            DType::Bf16 => self.write::<bf16>(ready, slot, v).fill(bf16::ZERO),
            _ => self.write::<f32>(ready, slot, v).fill(0.0),
        }
    }

    /// Writes the constants of a body into a slot.
    pub(crate) fn set_constants(&mut self, ready: &Ready, slot: usize) {
        let base = self.work.slot_at(ready, slot);
        for (offset, value) in ready.constants() {
            // SAFETY: `&mut self`.
            unsafe { self.work.activations.slice_mut::<f32>(base + offset, 1)[0] = value };
        }
    }

    /// Copies a value over another one of the same length in another arena.
    pub(crate) fn copy(&mut self, ready: &Ready, slot: usize, from: ValueId, to: ValueId) {
        let (from, to) = (self.find(ready, slot, from), self.find(ready, slot, to));
        assert!(!std::ptr::eq(from.arena, to.arena), "values of one arena are not copied over each other");
        // SAFETY: `&mut self`, and two arenas.
        unsafe { to.slice_mut::<f32>().copy_from_slice(from.slice()) };
    }

    /// The slices of one node while it runs. Takes `&mut`, since one node runs at a time.
    pub(crate) fn node<'a>(&'a mut self, ready: &'a Ready, slot: usize, node: usize) -> NodeMemory<'a> {
        NodeMemory { memory: self, ready, slot, node, taken: Cell::new(0) }
    }
}

impl<'a> Located<'a> {
    fn overlaps(&self, other: &Located) -> bool {
        let range = |at: &Located| (at.offset, at.offset + at.len * at.dtype.bytes());
        let (a, b) = (range(self), range(other));
        std::ptr::eq(self.arena, other.arena) && a.0 < b.1 && b.0 < a.1
    }

    /// # Safety
    /// Nothing may write these elements while the slice lives.
    unsafe fn slice<T: Element>(self) -> &'a [T] {
        check_type::<T>(self.dtype);
        // SAFETY: the caller's promise.
        unsafe { self.arena.slice(self.offset, self.len) }
    }

    /// # Safety
    /// Nothing else may hold these elements while the slice lives.
    unsafe fn slice_mut<T: Element>(self) -> &'a mut [T] {
        check_type::<T>(self.dtype);
        // SAFETY: the caller's promise.
        unsafe { self.arena.slice_mut(self.offset, self.len) }
    }
}

impl<'a> Located<'a> {
    /// # Safety
    /// Nothing else may hold these elements while the slice lives.
    unsafe fn floats_mut(self) -> FloatsMut<'a> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::F16 => FloatsMut::F16(self.slice_mut()),
                DType::Bf16 => FloatsMut::Bf16(self.slice_mut()),
                _ => FloatsMut::F32(self.slice_mut()),
            }
        }
    }
}

/// The operands of an update that is made block by block: a parameter and its moments.
pub(crate) struct UpdateTarget<'a> {
    pub(crate) params: SharedMut<'a, f32>,
    /// The offset of the parameter among all.
    pub(crate) at: usize,
    /// The moments; empty where the optimizer has none.
    pub(crate) moments: SharedMoments<'a>,
}

/// Moments in whatever they are stored in, which several threads update block by block.
pub(crate) enum SharedMoments<'a> {
    F32([SharedMut<'a, f32>; 2]),
    Bf16([SharedMut<'a, bf16>; 2]),
}

/// Moments in whatever they are stored in.
pub(crate) enum MomentsMut<'a> {
    F32([&'a mut [f32]; 2]),
    Bf16([&'a mut [bf16]; 2]),
}

/// Ranges of the two moments.
///
/// # Safety
/// Nothing else may hold these elements while the slices live, and moments are stored as `T`.
#[expect(clippy::mut_from_ref, reason = "the caller's promise")]
unsafe fn two_moments<T: Element>(state: &State, one: Range<usize>, other: Range<usize>) -> [&mut [T]; 2] {
    // SAFETY: the caller's promise; these are two arenas.
    unsafe {
        [
            state.moments[0].slice_mut(one.start * size_of::<T>(), one.len()),
            state.moments[1].slice_mut(other.start * size_of::<T>(), other.len()),
        ]
    }
}

/// The operands of an update.
pub(crate) struct UpdateRange<'a> {
    pub(crate) params: &'a mut [f32],
    pub(crate) grads: &'a [f32],
    pub(crate) moments: MomentsMut<'a>,
    /// What was measured of tensors that ranks split.
    pub(crate) sums: &'a mut [f64],
}

/// The operands and results of a node that is running.
pub(crate) struct NodeMemory<'a> {
    memory: &'a Memory,
    ready: &'a Ready,
    slot: usize,
    node: usize,
    /// Bit k: output k has been handed out; bit 31: the scratch space has.
    taken: Cell<u32>,
}

impl<'a> NodeMemory<'a> {
    fn operands(&self) -> (&'a [ValueId], &'a [ValueId]) {
        let node = &self.ready.body.graph.nodes[self.node];
        (&node.inputs, &node.outputs)
    }

    fn take(&self, bit: usize) {
        assert!(self.taken.get() >> bit & 1 == 0, "a slice is handed out once");
        self.taken.set(self.taken.get() | 1 << bit);
    }

    /// Operand `k`; in f32, if it is staged.
    pub(crate) fn input<T: Element>(&self, k: usize) -> &'a [T] {
        let v = self.operands().0[k];
        match self.staging().inputs.get(k) {
            Some(&Some(at)) => {
                check_type::<T>(DType::F32);
                let len = self.ready.body.graph.shape(v).numel();
                // SAFETY: it was written before the kernel runs, which only reads it.
                unsafe { self.work_floats(self.staged(at), len) }
            }
            _ => self.memory.read(self.ready, self.slot, v),
        }
    }

    /// Operand `k` in the format in which it is stored; in f32, if it is staged.
    pub(crate) fn floats(&self, k: usize) -> Floats<'a> {
        match self.staging().inputs.get(k) {
            Some(Some(_)) => Floats::F32(self.input(k)),
            _ => self.stored(k),
        }
    }

    fn stored(&self, k: usize) -> Floats<'a> {
        let v = self.operands().0[k];
        let (memory, ready, slot) = (self.memory, self.ready, self.slot);
        match ready.body.graph.value(v).dtype {
            DType::F16 => Floats::F16(memory.read(ready, slot, v)),
            DType::Bf16 => Floats::Bf16(memory.read(ready, slot, v)),
            _ => Floats::F32(memory.read(ready, slot, v)),
        }
    }

    fn staging(&self) -> &'a Staging {
        &self.ready.prepared[self.node].staging
    }

    /// The offset in the arena of activations, in bytes, of what is staged at `at`.
    fn staged(&self, at: usize) -> usize {
        let before = self.ready.prepared[self.node].kernel_scratch + at;
        let scratch = self.ready.plan.scratch[self.node];
        scratch + before * F32_BYTES
    }

    /// # Safety
    /// Nothing may write these elements while the slice lives.
    unsafe fn work_floats<T: Element>(&self, offset: usize, len: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe { self.memory.work.activations.slice(offset, len) }
    }

    /// Writes operands that are staged, before the kernel runs.
    pub(crate) fn stage(&self, cx: &Cx) {
        for (k, at) in self.staging().inputs.iter().enumerate() {
            let Some(at) = *at else { continue };
            let from = self.stored(k);
            // SAFETY: `node` took `&mut Memory`; the scratch space is apart from all values, and this part of it is for this
            // operand alone.
            let to = unsafe { self.memory.work.activations.slice_mut(self.staged(at), from.len()) };
            from.widen_in_chunks(cx, to);
        }
    }

    /// Stores results that are staged, after the kernel ran.
    pub(crate) fn store(&self, cx: &Cx) {
        for (k, at) in self.staging().outputs.iter().enumerate() {
            let Some(at) = *at else { continue };
            let v = self.operands().1[k];
            let len = self.ready.body.graph.shape(v).numel();
            // SAFETY: the kernel has returned.
            let from = unsafe { self.work_floats(self.staged(at), len) };
            let to = self.memory.find(self.ready, self.slot, v);
            // SAFETY: `node` took `&mut Memory`, and the kernel was given the staged slice instead of this one.
            convert::round(cx, from, unsafe { to.floats_mut() });
        }
    }

    /// Operand `k`, or the output that it shares memory with.
    pub(crate) fn source(&self, k: usize) -> Source<'a> {
        let (inputs, outputs) = self.operands();
        let (plan, graph) = (&self.ready.plan, &self.ready.body.graph);
        // Lengths are compared too: an empty value may lie anywhere.
        let place = |v: ValueId| (plan.places[v.idx()], graph.shape(v).numel());
        match outputs.iter().position(|&o| place(o) == place(inputs[k])) {
            Some(output) => Source::InPlace(output),
            None => Source::Slice(self.floats(k)),
        }
    }

    /// How many operands there are.
    pub(crate) fn n_inputs(&self) -> usize {
        self.operands().0.len()
    }

    /// How many results there are.
    pub(crate) fn n_outputs(&self) -> usize {
        self.operands().1.len()
    }

    /// Result `k`; may be taken once. In f32, if it is staged.
    pub(crate) fn output<T: Element>(&self, k: usize) -> &'a mut [T] {
        self.take(k);
        let v = self.operands().1[k];
        if let Some(&Some(at)) = self.staging().outputs.get(k) {
            check_type::<T>(DType::F32);
            let len = self.ready.body.graph.shape(v).numel();
            // SAFETY: `node` took `&mut Memory`; this part of the scratch space is for this result alone, and is handed out
            // once.
            return unsafe { self.memory.work.activations.slice_mut(self.staged(at), len) };
        }
        let at = self.memory.find(self.ready, self.slot, v);
        // SAFETY: `node` took `&mut Memory`; this range is handed out once; the plan was verified to keep the
        // outputs of a node from each other, from its scratch and from its inputs (an in-place operand of a fused
        // pass or of a sum over ranks is passed as `Source::InPlace`, not as a slice).
        unsafe { at.slice_mut() }
    }

    /// Result `k` in the format in which it is stored; in f32, if it is staged. May be taken once.
    pub(crate) fn floats_mut(&self, k: usize) -> FloatsMut<'a> {
        if let Some(Some(_)) = self.staging().outputs.get(k) {
            return FloatsMut::F32(self.output(k));
        }
        self.take(k);
        // SAFETY: as for `output`.
        unsafe { self.memory.find(self.ready, self.slot, self.operands().1[k]).floats_mut() }
    }

    /// A parameter that neither this node nor a later one reads, and its moments; taken instead of the node's output.
    pub(crate) fn update_target(&self, param: ValueId) -> UpdateTarget<'a> {
        self.take(0);
        let state = &self.memory.state;
        let len = self.ready.body.graph.shape(param).numel();
        let Place::Param(at) = self.ready.plan.places[param.idx()] else {
            unreachable!("{param} is a parameter")
        };
        state.settle_update(at..at + len, [at..at + len, at..at + len]);
        let [one, other] = [0, 1].map(|n| if state.lengths.n_moments > n { at..at + len } else { 0..0 });
        // SAFETY: `node` took `&mut Memory`, they are handed out once, and nodes have no other access to moments.
        let moments = unsafe {
            match state.lengths.moments_dtype {
                DType::Bf16 => SharedMoments::Bf16(two_moments(state, one, other).map(SharedMut::new)),
                _ => SharedMoments::F32(two_moments(state, one, other).map(SharedMut::new)),
            }
        };
        // SAFETY: as above; the program was made so that neither this node nor a later one reads the parameter.
        let params = SharedMut::new(unsafe { state.params.slice_mut(at * F32_BYTES, len) });
        UpdateTarget { params, at, moments }
    }

    /// The kernel's scratch space; may be taken once.
    pub(crate) fn scratch(&self) -> &'a mut [f32] {
        self.take(31);
        let (work, offset) = (&self.memory.work, self.ready.plan.scratch[self.node]);
        let len = self.ready.prepared[self.node].kernel_scratch;
        // SAFETY: as for outputs.
        unsafe { work.activations.slice_mut(offset, len) }
    }
}

/// Checks, in release builds too, that a slice has its value's element type in the graph: a kernel that is wired up wrongly stops
/// here, instead of reading bits as numbers of another type.
fn check_type<T: Element>(dtype: DType) {
    assert_eq!(T::DTYPE, dtype, "the element type of a slice is that of its value");
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use polyreme_dtype::{bf16, f16};
    use polyreme_graph::{Body, Builder, Program};
    use polyreme_kernels::Serial;

    use super::*;
    use crate::state::{Lengths, SharedBlocks};

    /// Even among types of the same size, a slice is handed out only in the value's own type.
    #[test]
    fn a_slice_has_the_type_of_its_value() {
        let mut b = Builder::new();
        let x = b.input("x", [4], DType::F32).unwrap();
        let half = b.cast(x, DType::F16).unwrap();
        let graph = b.finish(&[("half", half)]);
        let (x, half) = (graph.nodes[0].outputs[0], graph.output("half").unwrap());
        let body = Arc::new(Body::new(&graph));
        let program = Program::empty(vec![body.clone()]);
        let ready = Ready::new(&program, &body, 1, polyreme_kernels::Isa::detect());
        let lengths = Lengths {
            residual: 0,
            factors: 0,
            velocity: 0,
            params: 0,
            grads: 0,
            states: 0,
            moments: [0; 2],
            moments_dtype: DType::F32,
            n_moments: 0,
            average: 0,
        };
        let state = State::new(lengths, SharedBlocks::default(), &Serial).unwrap();
        let mut work = Workspace::new();
        work.make_room(&program, &[&ready], &Serial).unwrap();
        let mut memory = Memory { state, work, params_from: None };
        memory.write::<f32>(&ready, 0, x).fill(1.0);
        assert_eq!(memory.read::<f32>(&ready, 0, x), [1.0; 4]);
        assert_eq!(memory.read::<f16>(&ready, 0, half), [f16::ZERO; 4]);

        fn refused(run: impl FnOnce()) -> bool {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
        }
        assert!(refused(|| _ = memory.read::<i32>(&ready, 0, x)));
        assert!(refused(|| _ = memory.read::<bf16>(&ready, 0, half)));
        assert!(refused(|| _ = memory.write::<i32>(&ready, 0, x)));
        assert!(refused(|| _ = memory.node(&ready, 0, 1).output::<bf16>(0)));
    }
}
