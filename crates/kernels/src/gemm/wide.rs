//! Products in f32 of operands in any format, with a result in any format.
//!
//! Operands are widened, which is exact, or rounded to half and widened again, while blocks of them are copied to where tiles
//! read them; blocks of C are rounded once they are complete. Neither an operand nor, mostly, C is ever whole in f32. The bits
//! are those of [`Gemm`] on operands in f32, rounded: k is cut in the same way.

use polyreme_dtype::DType;

use super::source::{Converted, OperandSource, OperandSources, is_converted};
use super::{Epilogue, Gemm, OutputBlock};
use crate::{Cx, Floats, FloatsMut, SharedFloats};

/// A product in f32 whose operands and result are stored in any format.
#[derive(Clone, Debug)]
pub struct WideGemm {
    /// The shape, and the layouts.
    pub gemm: Gemm,
    /// The formats of A, B and C.
    pub a: DType,
    /// As above.
    pub b: DType,
    /// As above.
    pub c: DType,
    /// The format that operands in f32 are rounded to before they are multiplied.
    pub rounded: Option<DType>,
}

impl WideGemm {
    fn converted(&self) -> Converted {
        Converted { a: is_converted(self.a, self.rounded), b: is_converted(self.b, self.rounded) }
    }

    /// How many floats of scratch `run` needs with this many workers. Their contents do not matter.
    pub fn scratch_len(&self, workers: usize) -> usize {
        match self.c {
            DType::F32 => self.gemm.scratch_len_from(self.converted(), workers),
            _ => self.pass_scratch_len(workers),
        }
    }

    /// How many floats of scratch `pass` needs with this many workers.
    pub fn pass_scratch_len(&self, workers: usize) -> usize {
        self.gemm.pass_scratch_len_from(self.converted(), workers)
    }

    /// Runs the product. `epilogue` is called as by [`Gemm::run`], on blocks in f32, which are rounded to the format of C
    /// afterwards.
    ///
    /// # Panics
    /// As [`Gemm::run`]; if an operand or C has another format than was said; or if C is in half and to be added to.
    pub fn run(
        &self,
        cx: &Cx,
        a: Floats,
        b: Floats,
        c: FloatsMut,
        epilogue: Option<Epilogue>,
        scratch: &mut [f32],
    ) {
        let g = &self.gemm;
        assert_eq!(c.dtype(), self.c, "the format of C");
        let half = match c {
            FloatsMut::F32(c) => return g.run_from(cx, self.sources(cx, a, b), c, epilogue, scratch),
            half => half,
        };
        if g.batch == 0 || g.m == 0 || g.n == 0 {
            return;
        }
        g.check_output(half.len());
        let c = SharedFloats::new(half);
        let store = |mut block: OutputBlock| {
            if let Some(epilogue) = epilogue {
                (epilogue.call)(block.reborrow());
            }
            let first = block.batch * g.c.batch + block.row * g.c.row + block.col;
            for (i, row) in block.into_rows().enumerate() {
                // SAFETY: each element is in one row of one block, and elements of C do not overlap.
                unsafe { c.part(first + i * g.c.row, row.len()) }.round(cx.isa, row);
            }
        };
        self.pass(cx, a, b, Epilogue::new(&store), scratch);
    }

    /// Runs the product without keeping C, as [`Gemm::pass`].
    ///
    /// # Panics
    /// As [`Gemm::pass`], or if an operand has another format than was said.
    pub fn pass(&self, cx: &Cx, a: Floats, b: Floats, epilogue: Epilogue, scratch: &mut [f32]) {
        self.gemm.pass_from(cx, self.sources(cx, a, b), epilogue, scratch);
    }

    fn sources<'a>(&self, cx: &Cx, a: Floats<'a>, b: Floats<'a>) -> OperandSources<'a> {
        assert_eq!((a.dtype(), b.dtype()), (self.a, self.b), "the formats of A and B");
        let of = |x| OperandSource::new(x, self.rounded, cx.isa);
        OperandSources { a: of(a), b: of(b) }
    }
}

#[cfg(test)]
mod tests;
