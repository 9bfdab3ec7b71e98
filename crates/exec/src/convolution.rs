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
