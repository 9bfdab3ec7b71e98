//! The learnt state of a rank: parameters, gradients, moments, states without a gradient, and how many steps are done. It
//! outlives programs and groups of ranks; everything else can be rebuilt.

use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::Block;
use polyreme_dtype::DType;
use polyreme_kernels::Parallel;
use polyreme_kernels::floats::{Floats, FloatsMut};

use crate::arena::Arena;
use crate::error::ExecError;
use crate::loan::Lent;
use crate::weights::{Held, Kept};

/// Bytes of an element of these arenas.
const F32_BYTES: usize = DType::F32.bytes();

/// The lengths of a rank's arenas in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lengths {
    pub(crate) params: usize,
    /// All gradients, or the buffers in which buckets of them take turns; 0 if there are none.
    pub(crate) grads: usize,
    pub(crate) states: usize,
    /// The optimizer state of the parameters that this rank updates.
    pub(crate) moments: [usize; 2],
    /// What it is stored in: f32 or bf16.
    pub(crate) moments_dtype: DType,
    /// How many states the optimizer has: 0, 1 or 2. This rank's part of them may be empty.
    pub(crate) n_moments: usize,
    /// The averaged parameters; 0 if this rank keeps none.
    pub(crate) average: usize,
    /// What codes of gradients have lost; 0 if none are coded.
    pub(crate) residual: usize,
    /// The right factors of the last sums; 0 if no matrices travel as factors.
    pub(crate) factors: usize,
    /// The velocity of outer steps; 0 if there are none.
    pub(crate) velocity: usize,
}

/// Memory that other ranks see too, used instead of a private allocation.
#[derive(Default)]
pub(crate) struct SharedBlocks {
    /// Weights that ranks share.
    pub(crate) params: Option<Block>,
    /// Gradients that the other ranks can read.
    pub(crate) grads: Option<Block>,
}

/// The learnt state of a rank, taken out of an engine: what it needs to go on in another one, with other ranks.
pub struct LearntState(pub(crate) State);

impl LearntState {
    /// How many training steps are done.
    pub fn steps_done(&self) -> u64 {
        self.0.step
    }

    /// Becomes what it was after `steps` steps: these arenas were other ones then.
    pub fn go_back(&mut self, steps: u64, arenas: &[(Kept, Vec<f32>)]) {
        for (what, numbers) in arenas {
            self.0.kept_mut(*what).copy_from_slice(numbers);
        }
        self.0.step = steps;
    }
}

/// The learnt state of a rank.
pub(crate) struct State {
    pub(crate) params: Arc<Arena>,
    pub(crate) grads: Arena,
    pub(crate) states: Arena,
    pub(crate) moments: [Arc<Arena>; 2],
    pub(crate) average: Arc<Arena>,
    pub(crate) residual: Arena,
    pub(crate) factors: Arena,
    pub(crate) velocity: Arena,
    pub(crate) lengths: Lengths,
    /// How many training steps are done.
    pub(crate) step: u64,
    /// Loans, as long as they may be read.
    pub(crate) lent: Vec<Arc<Lent>>,
}

impl State {
    /// All zeros, faulted in by the threads of `par`.
    pub(crate) fn new(
        lengths: Lengths,
        blocks: SharedBlocks,
        par: &dyn Parallel,
    ) -> Result<State, ExecError> {
        let mut state = State::blank(lengths, blocks, par)?;
        state.complete(par)?;
        Ok(state)
    }

    /// Without memory for what is learnt: that of another engine takes its place, or [`State::complete`] reserves it.
    pub(crate) fn blank(
        lengths: Lengths,
        blocks: SharedBlocks,
        par: &dyn Parallel,
    ) -> Result<State, ExecError> {
        let or = |block: Option<Block>, len: usize, what| {
            block.map(Arena::over).map_or_else(|| Arena::new(len * F32_BYTES, what, par), Ok)
        };
        Ok(State {
            params: blocks.params.map_or_else(Arena::empty, Arena::over).into(),
            grads: or(blocks.grads, lengths.grads, "gradients")?,
            states: Arena::empty(),
            moments: [Arena::empty().into(), Arena::empty().into()],
            average: Arena::empty().into(),
            residual: Arena::new(lengths.residual * F32_BYTES, "residuals of gradients", par)?,
            factors: Arena::new(lengths.factors * F32_BYTES, "factors of gradients", par)?,
            velocity: Arena::new(lengths.velocity * F32_BYTES, "the velocity of outer steps", par)?,
            lengths,
            step: 0,
            lent: Vec::new(),
        })
    }

    /// Reserves what is missing of the memory for what is learnt, as zeros.
    pub(crate) fn complete(&mut self, par: &dyn Parallel) -> Result<(), ExecError> {
        let reserve = |arena: &Arena, bytes: usize, what| match arena.bytes() < bytes {
            true => Arena::new(bytes, what, par).map(Some),
            false => Ok(None),
        };
        let Lengths { params, average, moments, moments_dtype, .. } = self.lengths;
        if let Some(arena) = reserve(&self.params, params * F32_BYTES, "parameters")? {
            self.params = arena.into();
        }
        self.complete_states(par)?;
        for (own, len) in self.moments.iter_mut().zip(moments) {
            if let Some(arena) = reserve(own, len * moments_dtype.bytes(), "the optimizer's state")? {
                *own = arena.into();
            }
        }
        if let Some(arena) = reserve(&self.average, average * F32_BYTES, "averaged parameters")? {
            self.average = arena.into();
        }
        Ok(())
    }

    /// The same for running statistics alone.
    pub(crate) fn complete_states(&mut self, par: &dyn Parallel) -> Result<(), ExecError> {
        let bytes = self.lengths.states * F32_BYTES;
        if self.states.bytes() < bytes {
            self.states = Arena::new(bytes, "states", par)?;
        }
        Ok(())
    }

    /// Bytes that stay from one step to the next.
    pub(crate) fn held(&self) -> Held {
        Held {
            params: self.params.bytes(),
            grads: self.grads.bytes() + self.residual.bytes() + self.factors.bytes() + self.velocity.bytes(),
            optimizer: self.moments.iter().map(|arena| arena.bytes()).sum(),
            states: self.states.bytes(),
            average: self.average.bytes(),
            totals: 0,
        }
    }

    fn arena(&self, what: Kept) -> (&Arena, usize) {
        match what {
            Kept::Params => (&self.params, self.lengths.params),
            Kept::States => (&self.states, self.lengths.states),
            Kept::Moment1 => (&self.moments[0], self.lengths.moments[0]),
            Kept::Moment2 => (&self.moments[1], self.lengths.moments[1]),
            Kept::Average => (&self.average, self.lengths.average),
            Kept::Residual => (&self.residual, self.lengths.residual),
            Kept::Factors => (&self.factors, self.lengths.factors),
            Kept::Velocity => (&self.velocity, self.lengths.velocity),
        }
    }

    /// How many elements an arena has.
    pub(crate) fn len(&self, what: Kept) -> usize {
        self.arena(what).1
    }

    /// What the elements of an arena are.
    pub(crate) fn dtype(&self, what: Kept) -> DType {
        match what {
            Kept::Moment1 | Kept::Moment2 => self.lengths.moments_dtype,
            Kept::Params | Kept::States | Kept::Average | Kept::Residual | Kept::Factors | Kept::Velocity => {
                DType::F32
            }
        }
    }

    /// A whole arena that outlives the step, in whatever it is stored in.
    pub(crate) fn stored(&self, what: Kept) -> Floats<'_> {
        let (arena, len) = self.arena(what);
        match self.dtype(what) {
            // SAFETY: `&self` between runs: only a run writes, and it takes `&mut`.
            DType::Bf16 => Floats::Bf16(unsafe { arena.slice(0, len) }),
            // SAFETY: as above.
            _ => Floats::F32(unsafe { arena.slice(0, len) }),
        }
    }

    /// The same, mutable.
    pub(crate) fn stored_mut(&mut self, what: Kept) -> FloatsMut<'_> {
        let (arena, len) = self.arena(what);
        self.settle(what, 0..len);
        match self.dtype(what) {
            // SAFETY: `&mut self` between runs, and settled.
            DType::Bf16 => FloatsMut::Bf16(unsafe { arena.slice_mut(0, len) }),
            // SAFETY: as above.
            _ => FloatsMut::F32(unsafe { arena.slice_mut(0, len) }),
        }
    }

    /// A whole arena that outlives the step.
    ///
    /// # Panics
    /// If it is not stored in f32.
    pub(crate) fn kept(&self, what: Kept) -> &[f32] {
        match self.stored(what) {
            Floats::F32(numbers) => numbers,
            other => panic!("{what:?} is stored in {}", other.dtype()),
        }
    }

    /// A whole arena that outlives the step, mutable.
    ///
    /// # Panics
    /// If it is not stored in f32.
    pub(crate) fn kept_mut(&mut self, what: Kept) -> &mut [f32] {
        match self.stored_mut(what) {
            FloatsMut::F32(numbers) => numbers,
            other => panic!("{what:?} is stored in {}", other.dtype()),
        }
    }

    /// An arena that can be lent to another thread, and its length; `None` if it is empty or is never lent.
    pub(crate) fn lendable(&self, what: Kept) -> Option<(Arc<Arena>, usize)> {
        let arena = match what {
            Kept::Params => &self.params,
            Kept::Moment1 => &self.moments[0],
            Kept::Moment2 => &self.moments[1],
            Kept::Average => &self.average,
            Kept::States | Kept::Residual | Kept::Factors | Kept::Velocity => return None,
        };
        let (_, len) = self.arena(what);
        (len > 0).then(|| (arena.clone(), len))
    }

    /// Waits until a range may be overwritten: no reader of a loan reads it in place any more.
    pub(crate) fn settle(&self, what: Kept, range: Range<usize>) {
        self.lent.iter().for_each(|lent| lent.settle(what, range.clone()));
    }

    /// The same for parameters and their moments, which are updated together.
    pub(crate) fn settle_update(&self, params: Range<usize>, [moments1, moments2]: [Range<usize>; 2]) {
        self.settle(Kept::Params, params);
        self.settle(Kept::Moment1, moments1);
        self.settle(Kept::Moment2, moments2);
    }

    /// The parameters, and their averages, mutable.
    pub(crate) fn params_and_average(&mut self) -> (&[f32], &mut [f32]) {
        self.settle(Kept::Average, 0..self.lengths.average);
        let len = self.lengths.average;
        // SAFETY: `&mut self`, two arenas, and settled.
        unsafe { (self.params.slice(0, len), self.average.slice_mut(0, len)) }
    }

    /// Swaps the parameters and their averages.
    pub(crate) fn swap_average(&mut self) {
        let len = self.lengths.average;
        [Kept::Params, Kept::Average].into_iter().for_each(|what| self.settle(what, 0..len));
        // SAFETY: `&mut self`, two arenas, and settled.
        let (params, average): (&mut [f32], &mut [f32]) =
            unsafe { (self.params.slice_mut(0, len), self.average.slice_mut(0, len)) };
        params.swap_with_slice(average);
    }

    /// All gradients, or their buffers.
    pub(crate) fn all_grads(&self) -> &[f32] {
        // SAFETY: `&self` between runs.
        unsafe { self.grads.slice(0, self.lengths.grads) }
    }
}
