//! Runs one prepared node: slices in, kernel, slices out.

use polyreme_graph::DType;
use polyreme_graph::op::Slab;
use polyreme_kernels::attention::{Attention, Grads, Mask};
use polyreme_kernels::conv::ConvPass;
use polyreme_kernels::elementwise::{Expr, Fused, FusedPieces, PieceSource, PieceTarget, Source};
use polyreme_kernels::gemm::{Epilogue, OutputBlock};
use polyreme_kernels::norm::RunningStats;
use polyreme_kernels::random::Positions;
use polyreme_kernels::rnn::{GruBackward, GruForward, LstmBackward, LstmForward};
use polyreme_kernels::{Cx, Floats, FloatsMut, SharedFloats, convert, random, softmax};

use crate::error::RejectedData;
use crate::launch::{Launch, Masked, Prepared, Then};
use crate::memory::NodeMemory;

/// What random draws depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DrawKey {
    /// The seed of the run.
    pub(crate) seed: u64,
    /// The number of the step, from 0.
    pub(crate) step: u64,
    /// The index of the microbatch's first sample within the step.
    pub(crate) first_sample: u64,
    /// How many samples the microbatch has.
    pub(crate) samples: usize,
}

impl DrawKey {
    /// Where a tensor of `len` elements, sample by sample, lies in the same tensor of the whole step over all ranks.
    fn positions(&self, len: usize, slab: Option<Slab>) -> Positions {
        let of_sample = len / self.samples.max(1);
        match slab {
            None => Positions::from(self.first_sample * of_sample as u64, len.max(1)),
            Some(Slab { first, run, stride }) => {
                let runs_before = self.first_sample * (of_sample / run) as u64;
                Positions { first: runs_before * stride as u64 + first as u64, run, stride: stride as u64 }
            }
        }
    }
}

/// Runs a node whose slices are `m`.
pub(crate) fn run(cx: &Cx, prepared: &Prepared, m: &NodeMemory, draw: DrawKey) -> Result<(), RejectedData> {
    let then = prepared.then.as_ref();
    // What may be in any format of storage.
    let floats = |k: usize| Floats::F32(m.input(k));
    let floats_mut = |k: usize| FloatsMut::F32(m.output(k));
    match &prepared.launch {
        Launch::Nothing => {}
        Launch::Apply(_) => unreachable!("`Engine::apply` runs it"),
        Launch::Fused(fused) => run_fused(cx, fused, m),
        Launch::Copy(copy, DType::I32) => copy.run::<i32>(cx, m.input(0), m.output(0)),
        Launch::Copy(copy, _) => copy.run::<f32>(cx, m.input(0), m.output(0)),
        Launch::Concat(parts) => {
            let y = m.output::<f32>(0);
            for (k, part) in parts.iter().enumerate() {
                part.run(cx, m.input(k), y);
            }
        }
        Launch::Pad(pad, value) => pad.forward::<f32>(cx, *value, m.input(0), m.output(0)),
        Launch::Gather(gather) => gather.forward::<f32>(cx, m.input(0), m.input(1), m.output(0))?,
        Launch::ScatterAdd(gather) => {
            let dx = m.output(0);
            dx.fill(0.0);
            gather.scatter_add(cx, floats(0), m.input(1), dx)?;
        }
        Launch::Cast { from, to } => cast(cx, *from, *to, m),
        Launch::Reduce(reduce) => reduce.forward(cx, floats(0), floats_mut(0), m.scratch()),
        Launch::MatMul(gemm) => {
            let (rows, n) = (gemm.m, gemm.n);
            let pieces = then.map(|t| pieces(cx, t, m));
            let epilogue = |block: OutputBlock| {
                if let Some(p) = &pieces {
                    p.rows((block.batch * rows + block.row) * n + block.col, n, block.into_rows());
                }
            };
            let epilogue = pieces.as_ref().map(|_| Epilogue::new(&epilogue));
            gemm.run(cx, m.input(0), m.input(1), m.output(0), epilogue, m.scratch());
        }
        Launch::Conv(conv, ConvPass::Forward) => {
            let pieces = then.map(|t| pieces(cx, t, m));
            let epilogue = |first: usize, piece: &mut [f32]| {
                if let Some(p) = &pieces {
                    p.piece(first, piece);
                }
            };
            let epilogue = pieces.as_ref().map(|_| &epilogue as &_);
            conv.forward(cx, m.input(0), m.input(1), None, m.output(0), epilogue, m.scratch());
        }
        Launch::Conv(conv, ConvPass::GradInput) => {
            conv.grad_input(cx, m.input(0), m.input(1), m.output(0), m.scratch());
        }
        Launch::Conv(conv, ConvPass::GradWeight) => {
            conv.grad_weight(cx, m.input(0), m.input(1), m.output(0), m.scratch());
        }
        Launch::MaxPool(pool) => pool.max_forward(cx, floats(0), floats_mut(0), m.output(1), m.scratch()),
        Launch::MaxPoolGrad(pool) => pool.max_backward(cx, floats(0), m.input(1), floats_mut(0), m.scratch()),
        Launch::AvgPool(pool) => pool.avg_forward(cx, floats(0), floats_mut(0), m.scratch()),
        Launch::AvgPoolGrad(pool) => pool.avg_backward(cx, floats(0), floats_mut(0), m.scratch()),
        Launch::BatchNorm(norm, momentum) => {
            let (mean, var) = (m.output(3), m.output(4));
            mean.copy_from_slice(m.input(3));
            var.copy_from_slice(m.input(4));
            let running = Some(RunningStats { mean, var, momentum: *momentum });
            let pieces = then.map(|t| pieces(cx, t, m));
            let epilogue = |first: usize, piece: &mut [f32]| {
                if let Some(p) = &pieces {
                    p.piece(first, piece);
                }
            };
            let epilogue = pieces.as_ref().map(|_| &epilogue as &_);
            let (x, gamma, beta) = (floats(0), m.input(1), m.input(2));
            let (y, mean, rstd, s) = (floats_mut(0), m.output(1), m.output(2), m.scratch());
            norm.forward(cx, x, gamma, beta, y, mean, rstd, running, epilogue, s);
        }
        Launch::BatchNormGrad(norm) => {
            let (dx, dgamma, dbeta) = (floats_mut(0), m.output(1), m.output(2));
            let (dy, x, gamma, beta) = (floats(0), floats(1), m.input(2), m.input(3));
            norm.backward(cx, dy, x, gamma, beta, m.input(4), m.input(5), dx, dgamma, dbeta, m.scratch());
        }
        Launch::AxisSum => m.output::<f32>(0).copy_from_slice(m.input(0)),
        Launch::BatchNormSums(norm) => norm.sums(cx, floats(0), m.input(1), m.output(0), m.scratch()),
        Launch::BatchNormFromSums(norm, momentum) => {
            let (mean, var) = (m.output(3), m.output(4));
            mean.copy_from_slice(m.input(3));
            var.copy_from_slice(m.input(4));
            let running = Some(RunningStats { mean, var, momentum: *momentum });
            let pieces = then.map(|t| pieces(cx, t, m));
            let epilogue = |first: usize, piece: &mut [f32]| {
                if let Some(p) = &pieces {
                    p.piece(first, piece);
                }
            };
            let epilogue = pieces.as_ref().map(|_| &epilogue as &_);
            let (x, gamma, beta, shift, sums) = (floats(0), m.input(1), m.input(2), m.input(3), m.input(5));
            let (y, mean, rstd, s) = (floats_mut(0), m.output(1), m.output(2), m.scratch());
            norm.forward_from_sums(cx, x, gamma, beta, shift, sums, y, mean, rstd, running, epilogue, s);
        }
        Launch::BatchNormGradSums(norm) => {
            let (sums, dgamma, dbeta) = (m.output(0), m.output(1), m.output(2));
            let (dy, x, gamma, beta) = (floats(0), floats(1), m.input(2), m.input(3));
            norm.grad_sums(cx, dy, x, gamma, beta, m.input(4), m.input(5), sums, dgamma, dbeta, m.scratch());
        }
        Launch::BatchNormGradFromSums(norm) => {
            let (dy, x, gamma, beta) = (floats(0), floats(1), m.input(2), m.input(3));
            let (mean, rstd, sums) = (m.input(4), m.input(5), m.input(6));
            norm.backward_from_sums(cx, dy, x, gamma, beta, mean, rstd, sums, floats_mut(0), m.scratch());
        }
        Launch::LayerNorm(norm) => {
            let (y, mean, rstd) = (floats_mut(0), m.output(1), m.output(2));
            let (weight, bias) = (Some(m.input(1)), Some(m.input(2)));
            norm.forward(cx, floats(0), weight, bias, y, mean, rstd, m.scratch());
        }
        Launch::LayerNormGrad(norm) => {
            let (dx, dgamma, dbeta) = (floats_mut(0), Some(m.output(1)), Some(m.output(2)));
            let (dy, x, gamma) = (floats(0), floats(1), Some(m.input(2)));
            norm.backward(cx, dy, x, gamma, m.input(3), m.input(4), dx, dgamma, dbeta, m.scratch());
        }
        Launch::RmsNorm(norm) => {
            norm.forward(cx, floats(0), Some(m.input(1)), floats_mut(0), m.output(1), m.scratch());
        }
        Launch::RmsNormGrad(norm) => {
            let (dx, dgamma) = (floats_mut(0), Some(m.output(1)));
            norm.backward(cx, floats(0), floats(1), Some(m.input(2)), m.input(3), dx, dgamma, m.scratch());
        }
        Launch::GroupNorm(norm) => {
            let (y, mean, rstd) = (floats_mut(0), m.output(1), m.output(2));
            norm.forward(cx, floats(0), m.input(1), m.input(2), y, mean, rstd, m.scratch());
        }
        Launch::GroupNormGrad(norm) => {
            let (dx, dgamma, dbeta) = (floats_mut(0), m.output(1), m.output(2));
            let (dy, x, gamma) = (floats(0), floats(1), m.input(2));
            norm.backward(cx, dy, x, gamma, m.input(3), m.input(4), dx, dgamma, dbeta, m.scratch());
        }
        Launch::Softmax(axis) => softmax::softmax(cx, *axis, floats(0), floats_mut(0), m.scratch()),
        Launch::SoftmaxGrad(axis) => {
            softmax::softmax_backward(cx, *axis, floats(0), floats(1), floats_mut(0), m.scratch());
        }
        Launch::LogSoftmax(axis) => {
            softmax::log_softmax(cx, *axis, floats(0), floats_mut(0), m.scratch());
        }
        Launch::LogSoftmaxGrad(axis) => {
            softmax::log_softmax_backward(cx, *axis, floats(0), floats(1), floats_mut(0), m.scratch());
        }
        Launch::CrossEntropy(loss) => {
            let weights = (m.n_inputs() > 2).then(|| m.input(2));
            let result = loss.forward(cx, floats(0), m.input(1), weights, m.output(1), m.scratch())?;
            m.output(0)[0] = result.mean;
        }
        Launch::CrossEntropyGrad(loss) => {
            let weights = (m.n_inputs() > 4).then(|| m.input(4));
            let dloss = m.input::<f32>(0)[0];
            let (logits, labels, lse) = (floats(1), m.input(2), m.input(3));
            loss.backward(cx, dloss, logits, labels, weights, lse, floats_mut(0), m.scratch());
        }
        Launch::Embedding(e) => e.forward(cx, floats(1), m.input(0), floats_mut(0))?,
        Launch::EmbeddingGrad(e) => e.backward(cx, floats(1), m.input(0), m.output(0))?,
        Launch::Attention(a, masked) => {
            let [q, k, v] = qkv(m, masked, 0);
            a.forward(cx, q, k, v, mask(m, masked, 0), m.output(0), m.output(1), m.scratch());
        }
        Launch::AttentionGrad(a, masked) => attention_grad(cx, a, masked, m),
        Launch::Dropout { p, stream, slab } => {
            let key = draw.seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let y = floats_mut(0);
            random::dropout(cx, *p, key, draw.step, draw.positions(y.len(), *slab), floats(0), y);
        }
        Launch::Lstm(lstm) => {
            let x = LstmForward {
                xp: m.input(0),
                w_hh: m.input(1),
                b_hh: Some(m.input(2)),
                h0: m.input(3),
                c0: m.input(4),
                y: m.output(0),
                c_all: m.output(1),
                gates: m.output(2),
            };
            lstm.forward(cx, x, m.scratch());
        }
        Launch::LstmGrad(lstm) => {
            let x = LstmBackward {
                dy: m.input(0),
                dh_n: None,
                dc_n: None,
                w_hh: m.input(1),
                h0: m.input(2),
                c0: m.input(3),
                y: m.input(4),
                c_all: m.input(5),
                gates: m.input(6),
                dxp: m.output(0),
                dw_hh: m.output(1),
                db_hh: Some(m.output(2)),
                dh0: m.output(3),
                dc0: m.output(4),
            };
            lstm.backward(cx, x, m.scratch());
        }
        Launch::Gru(gru) => {
            let x = GruForward {
                xp: m.input(0),
                w_hh: m.input(1),
                b_hh: Some(m.input(2)),
                h0: m.input(3),
                y: m.output(0),
                gates: m.output(1),
            };
            gru.forward(cx, x, m.scratch());
        }
        Launch::GruGrad(gru) => {
            let x = GruBackward {
                dy: m.input(0),
                dh_n: None,
                w_hh: m.input(1),
                h0: m.input(2),
                y: m.input(3),
                gates: m.input(4),
                dxp: m.output(0),
                dw_hh: m.output(1),
                db_hh: Some(m.output(2)),
                dh0: m.output(3),
            };
            gru.backward(cx, x, m.scratch());
        }
    }
    Ok(())
}

fn run_fused(cx: &Cx, fused: &Fused, m: &NodeMemory) {
    let mut inputs = [Source::Slice(Floats::F32(&[])); Expr::INPUTS_MAX];
    for (k, input) in inputs[..m.n_inputs()].iter_mut().enumerate() {
        *input = m.source(k);
    }
    let mut outputs: [FloatsMut; Expr::OUTPUTS_MAX] = std::array::from_fn(|_| FloatsMut::F32(&mut []));
    for (k, output) in outputs[..m.n_outputs()].iter_mut().enumerate() {
        *output = FloatsMut::F32(m.output(k));
    }
    fused.run(cx, &inputs[..m.n_inputs()], &mut outputs[..m.n_outputs()]);
}

/// Binds an epilogue: its first input is the tile, the others follow the base op's; its outputs overwrite the tile (the
/// first, unless the base op's result is kept) and go to the outputs after the base op's.
fn pieces<'a>(cx: &Cx, then: &'a Then, m: &NodeMemory<'a>) -> FusedPieces<'a> {
    let n_inputs = m.n_inputs() - then.n_base_inputs + 1;
    let mut inputs = [PieceSource::Piece; Expr::INPUTS_MAX];
    for k in 1..n_inputs {
        inputs[k] = PieceSource::Slice(Floats::F32(m.input(then.n_base_inputs + k - 1)));
    }
    let over = usize::from(!then.keeps_base);
    let n_outputs = m.n_outputs() - then.n_base_outputs + over;
    let mut outputs = [PieceTarget::Piece; Expr::OUTPUTS_MAX];
    for j in over..n_outputs {
        let whole = FloatsMut::F32(m.output(then.n_base_outputs + j - over));
        outputs[j] = PieceTarget::Whole(SharedFloats::new(whole));
    }
    // SAFETY: the kernels call an epilogue once for each tile, and tiles are disjoint; the whole tensors are outputs of
    // this node, which the memory plan keeps apart, and are not handed out elsewhere.
    unsafe { then.fused.pieces(cx.isa, &inputs[..n_inputs], &outputs[..n_outputs]) }
}

fn cast(cx: &Cx, from: DType, to: DType, m: &NodeMemory) {
    match (from, to) {
        (DType::F32, DType::F16) => convert::f32_to_f16(cx, m.input(0), m.output(0)),
        (DType::F32, DType::Bf16) => convert::f32_to_bf16(cx, m.input(0), m.output(0)),
        (DType::F32, DType::I32) => convert::f32_to_i32(cx, m.input(0), m.output(0)),
        (DType::F16, DType::F32) => convert::f16_to_f32(cx, m.input(0), m.output(0)),
        (DType::Bf16, DType::F32) => convert::bf16_to_f32(cx, m.input(0), m.output(0)),
        (DType::I32, DType::F32) => convert::i32_to_f32(cx, m.input(0), m.output(0)),
        (from, to) => unreachable!("no cast from {from} to {to}: the graph casts by way of f32"),
    }
}

fn qkv<'a>(m: &NodeMemory<'a>, masked: &Masked, first: usize) -> [&'a [f32]; 3] {
    if masked.packed { [m.input(first); 3] } else { [0, 1, 2].map(|k| m.input(first + k)) }
}

fn mask<'a>(m: &NodeMemory<'a>, masked: &Masked, first: usize) -> Option<Mask<'a>> {
    let at = first + if masked.packed { 1 } else { 3 };
    masked.mask.map(|[batch, head, row]| Mask { data: m.input(at), batch, head, row })
}

fn attention_grad(cx: &Cx, a: &Attention, masked: &Masked, m: &NodeMemory) {
    let [q, k, v] = qkv(m, masked, 3);
    let grads = if masked.packed {
        Grads::Packed(m.output(0))
    } else {
        Grads::Separate { dq: m.output(0), dk: m.output(1), dv: m.output(2) }
    };
    a.backward(cx, m.input(0), q, k, v, mask(m, masked, 3), m.input(1), m.input(2), grads, m.scratch());
}
