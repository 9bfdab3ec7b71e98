//! The formats that inputs and outputs are stored in. Steps see f32 alone: blocks of half inputs are widened into
//! buffers before them, and half outputs are rounded out of buffers after them.

use polyreme_dtype::{DType, bf16, f16};

use super::blocks::{BLOCK, Bind, SPACE};
use super::expr::{Expr, ExprError};
use super::plan::StepPlan;
use crate::{Floats, FloatsMut, Isa, convert};

/// The format of each input and output.
#[derive(Clone, Debug)]
pub(super) struct PassFormats {
    pub inputs: [DType; Expr::INPUTS_MAX],
    pub outputs: [DType; Expr::OUTPUTS_MAX],
    /// Whether any of them is stored in half.
    pub halves: bool,
}

impl PassFormats {
    /// Of no more inputs and outputs than an expression can have.
    pub(super) fn new(
        inputs: impl Iterator<Item = DType>,
        outputs: &[DType],
    ) -> Result<PassFormats, ExprError> {
        let mut formats = PassFormats {
            inputs: [DType::F32; Expr::INPUTS_MAX],
            outputs: [DType::F32; Expr::OUTPUTS_MAX],
            halves: false,
        };
        for (to, dtype) in formats.inputs.iter_mut().zip(inputs) {
            *to = dtype;
        }
        formats.outputs[..outputs.len()].copy_from_slice(outputs);
        for &dtype in formats.inputs.iter().chain(&formats.outputs) {
            match dtype {
                DType::F32 => {}
                DType::F16 | DType::Bf16 => formats.halves = true,
                _ => return Err(ExprError::Format(dtype)),
            }
        }
        Ok(formats)
    }

    /// Whether input `k` is widened into a buffer.
    #[inline]
    pub(super) fn widens(&self, k: usize) -> bool {
        self.inputs[k] != DType::F32
    }

    /// Whether output `j` is rounded out of a buffer.
    #[inline]
    pub(super) fn rounds(&self, j: usize) -> bool {
        self.outputs[j] != DType::F32
    }

    /// One value of input `k`.
    ///
    /// # Safety
    /// The bound pointer is valid there.
    #[inline]
    pub(super) unsafe fn value(&self, bind: &Bind, k: usize, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.inputs[k] {
                DType::F16 => convert::f32_from_f16(bind.inputs[k].cast::<f16>().wrapping_add(at).read()),
                DType::Bf16 => convert::f32_from_bf16(bind.inputs[k].cast::<bf16>().wrapping_add(at).read()),
                _ => bind.inputs[k].wrapping_add(at).read(),
            }
        }
    }

    /// Widens `at..at + len` of the half input `k`.
    ///
    /// # Safety
    /// The bound pointer is valid there; `to` has `len` floats, which nothing else uses and which have been written before.
    #[inline]
    pub(super) unsafe fn widen(&self, isa: Isa, bind: &Bind, k: usize, at: usize, len: usize, to: *mut f32) {
        let from = bind.inputs[k];
        // SAFETY: the caller's promise.
        let (from, to) = unsafe {
            let from = match self.inputs[k] {
                DType::F16 => {
                    Floats::F16(std::slice::from_raw_parts(from.cast::<f16>().wrapping_add(at), len))
                }
                _ => Floats::Bf16(std::slice::from_raw_parts(from.cast::<bf16>().wrapping_add(at), len)),
            };
            (from, std::slice::from_raw_parts_mut(to, len))
        };
        from.widen(isa, to);
    }

    /// Writes `at..at + len` of every half output from its buffer.
    ///
    /// # Safety
    /// The bound pointers are valid there and nothing else uses those elements; the buffers that `stage` has for the
    /// outputs hold `len` floats each.
    #[inline]
    pub(super) unsafe fn round(
        &self,
        isa: Isa,
        plan: &StepPlan,
        bind: &Bind,
        at: usize,
        len: usize,
        stage: StagedBlock,
    ) {
        for j in (0..plan.n_outputs).filter(|&j| self.rounds(j)) {
            let to = bind.outputs[j];
            // SAFETY: the caller's promise.
            let (from, mut to) = unsafe {
                let to = match self.outputs[j] {
                    DType::F16 => {
                        FloatsMut::F16(std::slice::from_raw_parts_mut(to.cast::<f16>().wrapping_add(at), len))
                    }
                    _ => FloatsMut::Bf16(std::slice::from_raw_parts_mut(
                        to.cast::<bf16>().wrapping_add(at),
                        len,
                    )),
                };
                (std::slice::from_raw_parts(stage.output(j), len), to)
            };
            to.round(isa, from);
        }
    }
}

/// Where the buffers of inputs and outputs lie: after the plan's, one for each, [`SPACE`] floats apart.
#[derive(Clone, Copy)]
pub(super) struct StagedBlock {
    first: *mut f32,
    n_inputs: usize,
}

impl StagedBlock {
    pub(super) fn after(plan: &StepPlan, bufs: *mut f32) -> StagedBlock {
        StagedBlock { first: bufs.wrapping_add(plan.n_bufs * SPACE), n_inputs: plan.n_inputs }
    }

    /// The buffer of input `k`.
    #[inline]
    pub(super) fn input(&self, k: usize) -> *mut f32 {
        self.first.wrapping_add(k * SPACE)
    }

    /// The buffer of output `j`.
    #[inline]
    pub(super) fn output(&self, j: usize) -> *mut f32 {
        self.first.wrapping_add((self.n_inputs + j) * SPACE)
    }

    /// Writes zeros where halves will be widened or rounded, a block or `len` each, so that slices can be made of them.
    ///
    /// # Safety
    /// The buffers exist.
    #[inline]
    pub(super) unsafe fn clear(&self, formats: &PassFormats, plan: &StepPlan, len: usize) {
        let len = len.min(BLOCK);
        for k in (0..plan.n_inputs).filter(|&k| formats.widens(k)) {
            // SAFETY: a buffer has room for a block.
            unsafe { self.input(k).write_bytes(0, len) };
        }
        for j in (0..plan.n_outputs).filter(|&j| formats.rounds(j)) {
            // SAFETY: as above.
            unsafe { self.output(j).write_bytes(0, len) };
        }
    }
}
