//! Feeding a program: the caller fills the inputs of each microbatch when the program loads it.

use polyreme_dtype::{DType, Element};
use polyreme_kernels::tally::Tally;

use crate::engine::unknown;
use crate::error::ExecError;
use crate::memory::Memory;
use crate::reader::StepArgs;
use crate::workspace::Ready;

/// Fills the inputs of microbatches. `E` is the caller's error, which ends the step.
pub trait Feed<E> {
    /// Fills the inputs of microbatch `microbatch` of the program, and returns what it counts in the step.
    fn load(&mut self, microbatch: usize, inputs: &mut Inputs) -> Result<Counted, E>;

    /// The arguments of step `step` of a program of several steps, counted from 0; `None` if they are those of the first.
    fn args(&mut self, _step: usize) -> Option<StepArgs> {
        None
    }
}

/// What a microbatch counts in its step.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Counted {
    /// Its weight: the loss's gradient is multiplied by it, and the step's loss is the weighted mean.
    pub weight: f64,
    /// The samples that it was filled with; empty if the caller does not follow them.
    pub samples: Tally,
}

impl From<f64> for Counted {
    /// A weight, of samples that are not followed.
    fn from(weight: f64) -> Counted {
        Counted { weight, samples: Tally::default() }
    }
}

/// Inputs that were filled before the step; every microbatch has the same weight.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Filled {
    /// The weight of each microbatch.
    pub weight: f64,
}

impl<E> Feed<E> for Filled {
    fn load(&mut self, _: usize, _: &mut Inputs) -> Result<Counted, E> {
        Ok(self.weight.into())
    }
}

impl<E, F: FnMut(usize, &mut Inputs) -> Result<f64, E>> Feed<E> for F {
    fn load(&mut self, microbatch: usize, inputs: &mut Inputs) -> Result<Counted, E> {
        self(microbatch, inputs).map(Counted::from)
    }
}

/// The inputs of a slot.
pub struct Inputs<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) ready: &'a Ready,
    pub(crate) slot: usize,
}

impl<'a> Inputs<'a> {
    /// The f32 input `name`, to be filled.
    pub fn f32(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        self.again().of(name)
    }

    /// The i32 input `name`, to be filled.
    pub fn i32(&mut self, name: &str) -> Result<&mut [i32], ExecError> {
        self.again().of(name)
    }

    fn again(&mut self) -> Inputs<'_> {
        Inputs { memory: self.memory, ready: self.ready, slot: self.slot }
    }

    /// Whether there is an input `name`.
    pub fn has(&self, name: &str) -> bool {
        self.ready.body.graph.inputs.iter().any(|i| i.name == name)
    }

    /// The input `name` as elements of type `T`.
    pub(crate) fn of<T: Element>(self, name: &str) -> Result<&'a mut [T], ExecError> {
        let graph = &self.ready.body.graph;
        let input = graph.inputs.iter().find(|i| i.name == name);
        let input =
            input.ok_or_else(|| unknown("input", name, graph.inputs.iter().map(|i| i.name.as_str())))?;
        let (want, got): (DType, DType) = (graph.value(input.value).dtype, T::DTYPE);
        if want != got {
            return Err(ExecError::Type { name: name.into(), want, got });
        }
        Ok(self.memory.write(self.ready, self.slot, input.value))
    }
}
