//! Matrix products: which kernel multiplies, and where its blocks go.

use polyreme_graph::DType;
use polyreme_kernels::gemm::pairs::{PairGemm, PairOrder};
use polyreme_kernels::gemm::{Epilogue, Gemm, OutputBlock, WideGemm};
use polyreme_kernels::{Cx, SharedFloats};

use crate::launch::{Choices, Then};
use crate::memory::NodeMemory;
use crate::run::pieces;

/// The kernel of a product.
pub(crate) enum Product {
    /// In f32, to which operands in half are widened.
    Wide(WideGemm),
    /// Of pairs in bf16, to which operands in f32 are rounded. Only passes blocks on.
    Pairs(PairGemm),
}

impl Product {
    /// The kernel for operands and a result in these formats, f32 among the operands being rounded.
    pub(crate) fn new(gemm: Gemm, [a, b, c]: [DType; 3], rounded: Option<DType>, with: Choices) -> Product {
        let of = |order: PairOrder| PairGemm { gemm: gemm.clone(), order };
        match with.pair_order(rounded.unwrap_or(a), |order| of(order).pays(with.isa)) {
            Some(order) => Product::Pairs(of(order)),
            None => Product::Wide(WideGemm { gemm, a, b, c, rounded }),
        }
    }

    /// The shape.
    pub(crate) fn gemm(&self) -> &Gemm {
        match self {
            Product::Wide(WideGemm { gemm, .. }) | Product::Pairs(PairGemm { gemm, .. }) => gemm,
        }
    }

    /// Floats of scratch space to compute C.
    pub(crate) fn scratch_len(&self, workers: usize) -> usize {
        match self {
            Product::Wide(wide) => wide.scratch_len(workers),
            Product::Pairs(pairs) => pairs.scratch_len(workers),
        }
    }

    /// Floats of scratch space to pass blocks of C on.
    pub(crate) fn pass_scratch_len(&self, workers: usize) -> usize {
        match self {
            Product::Wide(wide) => wide.pass_scratch_len(workers),
            Product::Pairs(pairs) => pairs.scratch_len(workers),
        }
    }

    /// Passes the blocks of C on, which is kept nowhere.
    pub(crate) fn pass(&self, cx: &Cx, m: &NodeMemory, epilogue: Epilogue) {
        match self {
            Product::Wide(wide) => wide.pass(cx, m.floats(0), m.floats(1), epilogue, m.scratch()),
            Product::Pairs(pairs) => pairs.pass(cx, m.floats(0), m.floats(1), epilogue, m.scratch()),
        }
    }

    /// Computes C, or what an epilogue makes of it.
    pub(crate) fn run(&self, cx: &Cx, then: Option<&Then>, m: &NodeMemory) {
        let (rows, n) = (self.gemm().m, self.gemm().n);
        let first = |block: &OutputBlock| (block.batch * rows + block.row) * n + block.col;
        match self {
            Product::Wide(wide) => {
                let pieces = then.map(|t| pieces(cx, t, m, true));
                let epilogue = |block: OutputBlock| {
                    if let Some(p) = &pieces {
                        p.rows(first(&block), n, block.into_rows());
                    }
                };
                let epilogue = pieces.as_ref().map(|_| Epilogue::new(&epilogue));
                let (a, b, c) = (m.floats(0), m.floats(1), m.floats_mut(0));
                wide.run(cx, a, b, c, epilogue, m.scratch());
            }
            Product::Pairs(pairs) => {
                let Some(then) = then else {
                    return pairs.run(cx, m.floats(0), m.floats(1), m.floats_mut(0), m.scratch());
                };
                let pieces = pieces(cx, then, m, false);
                let c = then.keeps_base.then(|| SharedFloats::new(m.floats_mut(0)));
                let store = |block: OutputBlock| {
                    let at = first(&block);
                    let Some(c) = &c else { return pieces.rows(at, n, block.into_rows()) };
                    for (r, row) in block.into_rows().enumerate() {
                        let at = at + r * n;
                        // SAFETY: the blocks of a product are disjoint, and each is passed once.
                        unsafe { c.part(at, row.len()) }.round(cx.isa, row);
                        pieces.rows(at, n, std::iter::once(row));
                    }
                };
                self.pass(cx, m, Epilogue::new(&store));
            }
        }
    }
}
