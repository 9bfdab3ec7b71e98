//! The product of states, or of gradients, with the recurrent weights, which are packed once for all steps.

use crate::tile::round_cols;
use crate::{Cx, Isa};

/// The recurrent weights as the right operand of a product: `depth × cols`.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    isa: Isa,
    /// Packed panels, or for the scalar twin the weights as they are.
    data: &'a [f32],
    depth: usize,
    cols: usize,
    /// The strides of (depth, col) in weights that are not packed.
    strides: (usize, usize),
}

impl<'a> Weights<'a> {
    /// How many floats `panels` of a `depth × cols` operand are.
    pub(super) fn panels_len(depth: usize, cols: usize) -> usize {
        depth * round_cols(cols)
    }

    /// `wᵀ` of `w [width, hidden]`, for `h·wᵀ`.
    pub(super) fn transposed(
        cx: &Cx,
        w: &'a [f32],
        width: usize,
        hidden: usize,
        panels: &'a mut [f32],
    ) -> Self {
        Weights::pack(cx, w, hidden, width, (1, hidden), panels)
    }

    /// `w [width, hidden]` itself, for `dz·w`.
    pub(super) fn plain(cx: &Cx, w: &'a [f32], width: usize, hidden: usize, panels: &'a mut [f32]) -> Self {
        Weights::pack(cx, w, width, hidden, (hidden, 1), panels)
    }

    fn pack(
        cx: &Cx,
        w: &'a [f32],
        depth: usize,
        cols: usize,
        strides: (usize, usize),
        panels: &'a mut [f32],
    ) -> Self {
        assert_eq!(w.len(), depth * cols, "recurrent weights");
        #[cfg(target_arch = "x86_64")]
        if cx.isa.has_avx2() {
            // Four panels per task.
            let group = 4 * crate::tile::TILE_COLS;
            let panels = &mut panels[..Weights::panels_len(depth, cols)];
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
            return Weights { isa: cx.isa, data: panels, depth, cols, strides };
        }
        let _ = panels;
        Weights { isa: cx.isa, data: w, depth, cols, strides }
    }

    /// Floats from one row of the product to the next.
    pub(super) fn out_stride(&self) -> usize {
        round_cols(self.cols)
    }

    /// `out[m × cols] = a[m × depth] · weights`, or `+=`, the rows of `out` [`Weights::out_stride`] apart.
    pub(super) fn product<const ADD: bool>(&self, m: usize, a: &[f32], out: &mut [f32]) {
        let stride = self.out_stride();
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
