//! What a rank has learnt: parameters, gradients, moments, states without a gradient, and how many steps are done. It
//! outlives programs and groups of ranks; everything else can be made anew.

use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::Block;
use polyreme_dtype::DType;
use polyreme_kernels::Parallel;

use crate::arena::Arena;
use crate::error::ExecError;
use crate::loan::Lent;
use crate::weights::{Held, Kept};

/// Bytes of an element of these arenas.
const F32_BYTES: usize = DType::F32.bytes();

/// Elements of the arenas of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lengths {
    pub(crate) params: usize,
    /// All gradients, or the buffers in which buckets of them take turns; 0 if there are none.
    pub(crate) grads: usize,
    pub(crate) states: usize,
    /// The optimizer's states of the parameters that this rank updates.
    pub(crate) moments: [usize; 2],
    /// How many states the optimizer has: 0, 1 or 2. This rank's part of them may be empty.
    pub(crate) n_moments: usize,
    /// Averaged parameters; 0 if this rank keeps none.
    pub(crate) average: usize,
}

/// Memory that other ranks see too, in place of a rank's own.
#[derive(Default)]
pub(crate) struct Blocks {
    /// Weights that ranks share.
    pub(crate) params: Option<Block>,
    /// Gradients that the others can read.
    pub(crate) grads: Option<Block>,
}

/// What a rank has learnt.
pub(crate) struct State {
    pub(crate) params: Arc<Arena>,
    pub(crate) grads: Arena,
    pub(crate) states: Arena,
    pub(crate) moments: [Arc<Arena>; 2],
    pub(crate) average: Arc<Arena>,
    pub(crate) lengths: Lengths,
    /// Steps done.
    pub(crate) step: u64,
    /// What of it was lent last.
    pub(crate) lent: Option<Arc<Lent>>,
}

impl State {
    /// Everything zero, faulted in by the threads of `par`.
    pub(crate) fn new(lengths: Lengths, blocks: Blocks, par: &dyn Parallel) -> Result<State, ExecError> {
        let floats = |len: usize, what| Arena::new(len * F32_BYTES, what, par);
        let or = |block: Option<Block>, len: usize, what| {
            block.map(Arena::over).map_or_else(|| floats(len, what), Ok)
        };
        let moment = |k: usize| floats(lengths.moments[k], "the optimizer's state");
        Ok(State {
            params: or(blocks.params, lengths.params, "parameters")?.into(),
            grads: or(blocks.grads, lengths.grads, "gradients")?,
            states: floats(lengths.states, "states")?,
            moments: [moment(0)?.into(), moment(1)?.into()],
            average: floats(lengths.average, "averaged parameters")?.into(),
            lengths,
            step: 0,
            lent: None,
        })
    }

    /// Bytes that stay from one step to the next.
    pub(crate) fn held(&self) -> Held {
        Held {
            params: self.params.bytes(),
            grads: self.grads.bytes(),
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
        }
    }

    /// A whole arena that outlives the step.
    pub(crate) fn kept(&self, what: Kept) -> &[f32] {
        let (arena, len) = self.arena(what);
        // SAFETY: `&self` between runs: only a run writes, and it takes `&mut`.
        unsafe { arena.slice(0, len) }
    }

    /// A whole arena that outlives the step, to write.
    pub(crate) fn kept_mut(&mut self, what: Kept) -> &mut [f32] {
        let (arena, len) = self.arena(what);
        self.settle(what, 0..len);
        // SAFETY: `&mut self` between runs, and settled.
        unsafe { arena.slice_mut(0, len) }
    }

    /// An arena that may be read by another thread, if it holds anything, and how long it is.
    pub(crate) fn lendable(&self, what: Kept) -> Option<(Arc<Arena>, usize)> {
        let arena = match what {
            Kept::Params => &self.params,
            Kept::Moment1 => &self.moments[0],
            Kept::Moment2 => &self.moments[1],
            Kept::Average => &self.average,
            Kept::States => return None,
        };
        let (_, len) = self.arena(what);
        (len > 0).then(|| (arena.clone(), len))
    }

    /// Returns when a range may be overwritten: nobody who was lent it reads it from where it lies any more.
    pub(crate) fn settle(&self, what: Kept, range: Range<usize>) {
        if let Some(lent) = &self.lent {
            lent.settle(what, range);
        }
    }

    /// The same for parameters and their moments, which are updated together.
    pub(crate) fn settle_update(&self, params: Range<usize>, [moments1, moments2]: [Range<usize>; 2]) {
        self.settle(Kept::Params, params);
        self.settle(Kept::Moment1, moments1);
        self.settle(Kept::Moment2, moments2);
    }

    /// Parameters to read, and their averages to write.
    pub(crate) fn params_and_average(&mut self) -> (&[f32], &mut [f32]) {
        self.settle(Kept::Average, 0..self.lengths.average);
        let len = self.lengths.average;
        // SAFETY: `&mut self`, two arenas, and settled.
        unsafe { (self.params.slice(0, len), self.average.slice_mut(0, len)) }
    }

    /// Parameters become their averages, and averages the parameters.
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
