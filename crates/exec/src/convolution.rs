//! Convolutions: which kernel computes a pass, and on which slices.

use polyreme_graph::DType;
use polyreme_kernels::Cx;
use polyreme_kernels::conv::pairs::PairConv;
use polyreme_kernels::conv::{Conv2d, ConvPass};
use polyreme_kernels::gemm::pairs::PairOrder;

use crate::launch::{Choices, Then};
use crate::memory::NodeMemory;
use crate::run::pieces;

/// The kernel of a pass.
pub(crate) enum Convolution {
    /// In f32, to which it widens what is stored in half.
    Wide(Conv2d),
    /// Of pairs in bf16.
    Pairs(PairConv),
}

impl Convolution {
    /// The fastest kernel for images and weights in this format. Where every machine must come to the same bits, it is the
    /// same one on each, fast or not.
    pub(crate) fn new(conv: Conv2d, pass: ConvPass, format: DType, with: Choices) -> Convolution {
        if format != DType::Bf16 || !PairConv::suits(&conv) {
            return Convolution::Wide(conv);
        }
        let of = |order: PairOrder| PairConv { conv: conv.clone(), order };
        if with.reproducible {
            return Convolution::Pairs(of(PairOrder::Tiles));
        }
        let orders = [PairOrder::Tiles, PairOrder::Pairs].map(of);
        let fastest = orders.into_iter().find(|pairs| pairs.pays(pass, with.isa));
        fastest.map_or(Convolution::Wide(conv), Convolution::Pairs)
    }

    /// Floats of scratch space; `halves` says whether images or weights are in half.
    pub(crate) fn scratch_len(&self, pass: ConvPass, halves: bool, workers: usize) -> usize {
        match self {
            Convolution::Wide(conv) if halves => conv.scratch_len_half(pass, workers),
            Convolution::Wide(conv) => conv.scratch_len(pass, workers),
            Convolution::Pairs(conv) => conv.scratch_len(pass, workers),
        }
    }

    /// Computes a pass; an epilogue belongs to a forward one.
    pub(crate) fn run(&self, pass: ConvPass, cx: &Cx, then: Option<&Then>, m: &NodeMemory) {
        let (first, second, scratch) = (m.floats(0), m.floats(1), m.scratch());
        match pass {
            ConvPass::Forward => {
                let pieces = then.map(|t| pieces(cx, t, m, true));
                let epilogue = |first: usize, piece: &mut [f32]| {
                    if let Some(p) = &pieces {
                        p.piece(first, piece);
                    }
                };
                let (y, epilogue) = (m.floats_mut(0), pieces.as_ref().map(|_| &epilogue as &_));
                match self {
                    Convolution::Wide(conv) => conv.forward(cx, first, second, None, y, epilogue, scratch),
                    Convolution::Pairs(conv) => conv.forward(cx, first, second, None, y, epilogue, scratch),
                }
            }
            ConvPass::GradInput => match self {
                Convolution::Wide(conv) => conv.grad_input(cx, first, second, m.floats_mut(0), scratch),
                Convolution::Pairs(conv) => conv.grad_input(cx, first, second, m.floats_mut(0), scratch),
            },
            ConvPass::GradWeight => match self {
                Convolution::Wide(conv) => conv.grad_weight(cx, first, second, m.output(0), scratch),
                Convolution::Pairs(conv) => conv.grad_weight(cx, first, second, m.output(0), scratch),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use polyreme_kernels::gemm::pairs::{AmxState, amx_state};
    use polyreme_kernels::{Feature, Isa};

    use super::*;

    /// The order of the sums of a pass of pairs; `None` for f32.
    fn order(conv: &Conv2d, format: DType, isa: Isa, reproducible: bool) -> Option<PairOrder> {
        let with = Choices { workers: 1, isa, reproducible, strict: conv.strict };
        match Convolution::new(conv.clone(), ConvPass::Forward, format, with) {
            Convolution::Wide(_) => None,
            Convolution::Pairs(pairs) => Some(pairs.order),
        }
    }

    #[test]
    fn pairs_are_taken_where_they_pay_and_in_reproducible_steps() {
        let (n, h, w, c_in, c_out, kh, kw) = (8, 28, 28, 128, 256, 3, 3);
        let (stride, padding, dilation, groups, strict) = ((2, 2), (1, 1), (1, 1), 1, false);
        let large = Conv2d { n, h, w, c_in, c_out, kh, kw, stride, padding, dilation, groups, strict };
        let small = Conv2d { c_in: 3, c_out: 6, ..large.clone() };
        let all = Isa::detect();
        let fastest = match amx_state() {
            AmxState::Ready => Some(PairOrder::Tiles),
            _ => all.has(Feature::Avx512Bf16).then_some(PairOrder::Pairs),
        };
        assert_eq!(order(&large, DType::Bf16, all, false), fastest);
        assert_eq!(order(&small, DType::Bf16, all, false), None);
        assert_eq!(order(&large, DType::Bf16, Isa::SCALAR, false), None);
        for conv in [&large, &small] {
            for isa in [all, Isa::SCALAR] {
                assert_eq!(order(conv, DType::Bf16, isa, true), Some(PairOrder::Tiles));
            }
            for (format, reproducible) in [(DType::F32, false), (DType::F32, true), (DType::F16, true)] {
                assert_eq!(order(conv, format, all, reproducible), None);
            }
        }
        for conv in [Conv2d { groups: 2, ..large.clone() }, Conv2d { strict: true, ..large.clone() }] {
            assert_eq!(order(&conv, DType::Bf16, all, false), None, "{conv:?}");
            assert_eq!(order(&conv, DType::Bf16, all, true), None, "{conv:?}");
        }
    }
}
