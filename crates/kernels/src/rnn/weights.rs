//! The product of states, or of gradients, with the recurrent weights, which are packed once for all steps.

use crate::gemm::pairs::PairOrder;
use crate::gemm::pairs::blocks::{PairBlocks, PairOperand, UNIT, UnitProduct, runs, units_len};
use crate::tile::round_cols;
use crate::{Cx, Floats, Isa};

/// The recurrent weights as the right operand of a product: `depth × cols`.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    isa: Isa,
    /// What multiplies in bf16, if that is asked for.
    pairs: Option<PairBlocks>,
    /// Packed panels, or for the scalar twin of f32 the weights as they are.
    data: &'a [f32],
    depth: usize,
    cols: usize,
    /// The strides of (depth, col) in weights that are not packed.
    strides: (usize, usize),
}

impl<'a> Weights<'a> {
    /// How many floats `panels` of a `depth × cols` operand are.
    pub(super) fn panels_len(products: Option<PairOrder>, depth: usize, cols: usize) -> usize {
        if products.is_some() { units_len(cols, depth) } else { depth * round_cols(cols) }
    }

    /// How many floats a product of `m` rows takes beside its operands and results: strips, and sums up to whole strips; with
    /// `ADD` all sums.
    pub(super) fn extra_len<const ADD: bool>(
        products: Option<PairOrder>,
        m: usize,
        depth: usize,
        cols: usize,
    ) -> usize {
        let sums = if ADD { m.next_multiple_of(UNIT) } else { m.next_multiple_of(UNIT) - m };
        if products.is_some() { units_len(m, depth) + sums * round_cols(cols) } else { 0 }
    }

    /// `wᵀ` of `w [width, hidden]`, for `h·wᵀ`.
    pub(super) fn transposed(
        cx: &Cx,
        products: Option<PairOrder>,
        w: &'a [f32],
        width: usize,
        hidden: usize,
        panels: &'a mut [f32],
    ) -> Self {
        Weights::pack(cx, products, w, hidden, width, (1, hidden), panels)
    }

    /// `w [width, hidden]` itself, for `dz·w`.
    pub(super) fn plain(
        cx: &Cx,
        products: Option<PairOrder>,
        w: &'a [f32],
        width: usize,
        hidden: usize,
        panels: &'a mut [f32],
    ) -> Self {
        Weights::pack(cx, products, w, width, hidden, (hidden, 1), panels)
    }

    fn pack(
        cx: &Cx,
        products: Option<PairOrder>,
        w: &'a [f32],
        depth: usize,
        cols: usize,
        strides: (usize, usize),
        panels: &'a mut [f32],
    ) -> Self {
        assert_eq!(w.len(), depth * cols, "recurrent weights");
        let panels = &mut panels[..Weights::panels_len(products, depth, cols)];
        // Four panels per task.
        let group = 4 * UNIT;
        let pairs = products.map(|order| PairBlocks::new(cx.isa, order));
        if let Some(blocks) = pairs {
            cx.for_each_chunk(panels, units_len(group, depth), |i, panels| {
                let x = Floats::F32(&w[i * group * strides.1..]);
                let n_own = group.min(cols - i * group);
                let of = PairOperand { x, own: strides.1, k: strides.0, n_own, n_k: depth };
                blocks.copy_panels(&of, panels);
            });
            return Weights { isa: cx.isa, pairs, data: panels, depth, cols, strides };
        }
        #[cfg(target_arch = "x86_64")]
        if cx.isa.has_avx2() {
            cx.for_each_chunk(panels, (group * depth).max(1), |i, panels| {
                let n = group.min(cols - i * group);
                let src = &w[i * group * strides.1..];
                // SAFETY: the instruction set was detected; `w` has depth × cols elements, of which these are columns
                // `i·group .. i·group + n`, and the panels have room for them.
                unsafe {
                    use crate::tile::avx2::{pack_panels, pack_transposed};
                    if strides.1 == 1 {
                        pack_panels(src.as_ptr(), strides.0, n, depth, panels.as_mut_ptr());
                    } else {
                        pack_transposed(src.as_ptr(), strides.1, n, depth, panels.as_mut_ptr());
                    }
                }
            });
            return Weights { isa: cx.isa, pairs, data: panels, depth, cols, strides };
        }
        let _ = panels;
        Weights { isa: cx.isa, pairs, data: w, depth, cols, strides }
    }

    /// Floats from one row of the product to the next.
    pub(super) fn out_stride(&self) -> usize {
        round_cols(self.cols)
    }

    /// The rows that `out` of a product of `m` rows has room for.
    pub(super) fn out_rows(&self, m: usize) -> usize {
        if self.pairs.is_some() { m.next_multiple_of(UNIT) } else { m }
    }

    /// `out[m × cols] = a[m × depth] · weights`, or `+=`, the rows of `out` [`Weights::out_stride`] apart. Without `ADD` it has
    /// room for [`Weights::out_rows`]; `extra` has the rest of [`Weights::extra_len`].
    ///
    /// In bf16 the rows of `a` are rounded.
    pub(super) fn product<const ADD: bool>(&self, m: usize, a: &[f32], out: &mut [f32], extra: &mut [f32]) {
        let stride = self.out_stride();
        if let Some(blocks) = &self.pairs {
            let (strips, sums) = extra.split_at_mut(units_len(m, self.depth));
            let x = Floats::F32(a);
            blocks.copy_strips(&PairOperand { x, own: self.depth, k: 1, n_own: m, n_k: self.depth }, strips);
            let depth_runs = runs(self.depth);
            blocks.multiply(UnitProduct {
                runs: depth_runs,
                rows: m,
                panels: self.cols.div_ceil(UNIT),
                a: (strips, depth_runs),
                b: (self.data, depth_runs),
                c: (if ADD { sums } else { &mut *out }, stride),
                add: false,
            });
            if ADD {
                for (out, sum) in out[..m * stride].iter_mut().zip(&*sums) {
                    *out += sum;
                }
            }
            return;
        }
        assert!(a.len() >= m * self.depth && out.len() >= m * stride, "operands of the recurrent product");
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_avx2() {
            use crate::tile::{Avx2, Avx512, product};
            let run = if self.isa.has_avx512() { product::<Avx512, ADD> } else { product::<Avx2, ADD> };
            let (a, panels, out) = (a.as_ptr(), self.data.as_ptr(), out.as_mut_ptr());
            // SAFETY: the instruction set was detected; lengths by the assertion and by `pack`.
            return unsafe { run(m, self.cols, self.depth, a, self.depth, panels, out, stride) };
        }
        for r in 0..m {
            for c in 0..self.cols {
                let sum: f32 = (0..self.depth)
                    .map(|i| a[r * self.depth + i] * self.data[i * self.strides.0 + c * self.strides.1])
                    .sum();
                let out = &mut out[r * stride + c];
                *out = if ADD { *out + sum } else { sum };
            }
        }
    }
}
