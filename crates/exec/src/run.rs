//! Runs one prepared node: slices in, kernel, slices out.

use polyreme_dtype::{bf16, f16};
use polyreme_graph::DType;
use polyreme_graph::op::{ExchangeKind, Slab};
use polyreme_kernels::attention::{Attention, Grads, Mask};
use polyreme_kernels::convert::{bf16_from_f32, f16_from_f32};
use polyreme_kernels::elementwise::{Expr, Fused, FusedPieces, PieceSource, PieceTarget, Source};
use polyreme_kernels::norm::RunningStats;
use polyreme_kernels::random::Positions;
use polyreme_kernels::rnn::{GruBackward, GruForward, LstmBackward, LstmForward};
use polyreme_kernels::{Cx, Floats, FloatsMut, SharedFloats, convert, random, softmax};

use crate::error::RejectedData;
use crate::launch::{Launch, Masked, Prepared, Then};
use crate::memory::NodeMemory;
use crate::vectors;

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
            Some(Slab { first, second, run, stride }) => {
                // Of the whole tensor, of which this is as large a part as its runs are of their stride.
                let runs = 1 + usize::from(second.is_some());
                let whole = len / (run * runs) * stride;
                let before = self.first_sample * (whole / self.samples.max(1)) as u64;
                let [first, second] = [first, second.unwrap_or(first)].map(|at| before + at as u64);
                let second = (runs == 2).then_some(second);
                Positions { first, second, run, stride: stride as u64 }
            }
        }
    }
}

/// The same expression with the element type that is moved.
macro_rules! by_type {
    ($dtype:expr, $t:ident => $then:expr) => {
        match $dtype {
            DType::F16 => {
                type $t = f16;
                $then
            }
            DType::Bf16 => {
                type $t = bf16;
                $then
            }
            DType::I32 => {
                type $t = i32;
                $then
            }
            _ => {
                type $t = f32;
                $then
            }
        }
    };
}

/// Runs a node whose slices are `m`.
pub(crate) fn run(cx: &Cx, prepared: &Prepared, m: &NodeMemory, draw: DrawKey) -> Result<(), RejectedData> {
    m.stage(cx);
    launch(cx, prepared, m, draw)?;
    m.store(cx);
    Ok(())
}

fn launch(cx: &Cx, prepared: &Prepared, m: &NodeMemory, draw: DrawKey) -> Result<(), RejectedData> {
    let then = prepared.then.as_ref();
    match &prepared.launch {
        Launch::Nothing => {}
        Launch::Apply(_) => unreachable!("`Engine::apply` runs it"),
        Launch::Fused(fused) => run_fused(cx, fused, m),
        Launch::Copy(copy, dtype) => by_type!(*dtype, T => copy.run::<T>(cx, m.input(0), m.output(0))),
        Launch::Concat(parts, dtype) => by_type!(*dtype, T => {
            let y = m.output::<T>(0);
            for (k, part) in parts.iter().enumerate() {
                part.run(cx, m.input(k), y);
            }
        }),
        Launch::Pad(pad, value, DType::F16) => {
            pad.forward(cx, f16_from_f32(*value), m.input(0), m.output(0));
        }
        Launch::Pad(pad, value, DType::Bf16) => {
            pad.forward(cx, bf16_from_f32(*value), m.input(0), m.output(0));
        }
        Launch::Pad(pad, value, _) => pad.forward::<f32>(cx, *value, m.input(0), m.output(0)),
        Launch::Gather(gather, dtype) => {
            by_type!(*dtype, T => gather.forward::<T>(cx, m.input(0), m.input(1), m.output(0))?);
        }
        Launch::ScatterAdd(gather) => {
            let dx = m.output(0);
            dx.fill(0.0);
            gather.scatter_add(cx, m.floats(0), m.input(1), dx)?;
        }
        Launch::Cast { from, to } => cast(cx, *from, *to, m),
        Launch::Reduce(reduce) => reduce.forward(cx, m.floats(0), m.floats_mut(0), m.scratch()),
        Launch::MatMul(product) => product.run(cx, then, m),
        Launch::Conv(conv, pass) => conv.run(*pass, cx, then, m),
        Launch::MaxPool(pool) => pool.max_forward(cx, m.floats(0), m.floats_mut(0), m.output(1), m.scratch()),
        Launch::MaxPoolGrad(pool) => {
            pool.max_backward(cx, m.floats(0), m.input(1), m.floats_mut(0), m.scratch())
        }
        Launch::AvgPool(pool) => pool.avg_forward(cx, m.floats(0), m.floats_mut(0), m.scratch()),
        Launch::AvgPoolGrad(pool) => pool.avg_backward(cx, m.floats(0), m.floats_mut(0), m.scratch()),
        Launch::BatchNorm(norm, momentum) => {
            let (mean, var) = (m.output(3), m.output(4));
            mean.copy_from_slice(m.input(3));
            var.copy_from_slice(m.input(4));
            let running = Some(RunningStats { mean, var, momentum: *momentum });
            let pieces = then.map(|t| pieces(cx, t, m, true));
            let epilogue = |first: usize, piece: &mut [f32]| {
                if let Some(p) = &pieces {
                    p.piece(first, piece);
                }
            };
            let epilogue = pieces.as_ref().map(|_| &epilogue as &_);
            let (x, gamma, beta) = (m.floats(0), m.input(1), m.input(2));
            let (y, mean, rstd, s) = (m.floats_mut(0), m.output(1), m.output(2), m.scratch());
            norm.forward(cx, x, gamma, beta, y, mean, rstd, running, epilogue, s);
        }
        Launch::BatchNormGrad(norm) => {
            let (dx, dgamma, dbeta) = (m.floats_mut(0), m.output(1), m.output(2));
            let (dy, x, gamma, beta) = (m.floats(0), m.floats(1), m.input(2), m.input(3));
            norm.backward(cx, dy, x, gamma, beta, m.input(4), m.input(5), dx, dgamma, dbeta, m.scratch());
        }
        Launch::Exchange(kind) => bring(cx, *kind, m),
        Launch::BatchNormSums(norm) => norm.sums(cx, m.floats(0), m.input(1), m.output(0), m.scratch()),
        Launch::BatchNormFromSums(norm, momentum) => {
            let (mean, var) = (m.output(3), m.output(4));
            mean.copy_from_slice(m.input(3));
            var.copy_from_slice(m.input(4));
            let running = Some(RunningStats { mean, var, momentum: *momentum });
            let pieces = then.map(|t| pieces(cx, t, m, true));
            let epilogue = |first: usize, piece: &mut [f32]| {
                if let Some(p) = &pieces {
                    p.piece(first, piece);
                }
            };
            let epilogue = pieces.as_ref().map(|_| &epilogue as &_);
            let (x, gamma, beta, shift, sums) = (m.floats(0), m.input(1), m.input(2), m.input(3), m.input(5));
            let (y, mean, rstd, s) = (m.floats_mut(0), m.output(1), m.output(2), m.scratch());
            norm.forward_from_sums(cx, x, gamma, beta, shift, sums, y, mean, rstd, running, epilogue, s);
        }
        Launch::BatchNormGradSums(norm) => {
            let (sums, dgamma, dbeta) = (m.output(0), m.output(1), m.output(2));
            let (dy, x, gamma, beta) = (m.floats(0), m.floats(1), m.input(2), m.input(3));
            norm.grad_sums(cx, dy, x, gamma, beta, m.input(4), m.input(5), sums, dgamma, dbeta, m.scratch());
        }
        Launch::BatchNormGradFromSums(norm) => {
            let (dy, x, gamma, beta) = (m.floats(0), m.floats(1), m.input(2), m.input(3));
            let (mean, rstd, sums) = (m.input(4), m.input(5), m.input(6));
            norm.backward_from_sums(cx, dy, x, gamma, beta, mean, rstd, sums, m.floats_mut(0), m.scratch());
        }
        Launch::LayerNorm(norm) => {
            let (y, mean, rstd) = (m.floats_mut(0), m.output(1), m.output(2));
            let (weight, bias) = (Some(m.input(1)), Some(m.input(2)));
            norm.forward(cx, m.floats(0), weight, bias, y, mean, rstd, m.scratch());
        }
        Launch::LayerNormGrad(norm) => {
            let (dx, dgamma, dbeta) = (m.floats_mut(0), Some(m.output(1)), Some(m.output(2)));
            let (dy, x, gamma) = (m.floats(0), m.floats(1), Some(m.input(2)));
            norm.backward(cx, dy, x, gamma, m.input(3), m.input(4), dx, dgamma, dbeta, m.scratch());
        }
        Launch::RmsNorm(norm) => {
            norm.forward(cx, m.floats(0), Some(m.input(1)), m.floats_mut(0), m.output(1), m.scratch());
        }
        Launch::RmsNormGrad(norm) => {
            let (dx, dgamma) = (m.floats_mut(0), Some(m.output(1)));
            norm.backward(
                cx,
                m.floats(0),
                m.floats(1),
                Some(m.input(2)),
                m.input(3),
                dx,
                dgamma,
                m.scratch(),
            );
        }
        Launch::GroupNorm(norm) => {
            let (y, mean, rstd) = (m.floats_mut(0), m.output(1), m.output(2));
            norm.forward(cx, m.floats(0), m.input(1), m.input(2), y, mean, rstd, m.scratch());
        }
        Launch::GroupNormGrad(norm) => {
            let (dx, dgamma, dbeta) = (m.floats_mut(0), m.output(1), m.output(2));
            let (dy, x, gamma) = (m.floats(0), m.floats(1), m.input(2));
            norm.backward(cx, dy, x, gamma, m.input(3), m.input(4), dx, dgamma, dbeta, m.scratch());
        }
        Launch::Softmax(axis) => softmax::softmax(cx, *axis, m.floats(0), m.floats_mut(0), m.scratch()),
        Launch::SoftmaxGrad(axis) => {
            softmax::softmax_backward(cx, *axis, m.floats(0), m.floats(1), m.floats_mut(0), m.scratch());
        }
        Launch::LogSoftmax(axis) => {
            softmax::log_softmax(cx, *axis, m.floats(0), m.floats_mut(0), m.scratch());
        }
        Launch::LogSoftmaxGrad(axis) => {
            softmax::log_softmax_backward(cx, *axis, m.floats(0), m.floats(1), m.floats_mut(0), m.scratch());
        }
        Launch::CrossEntropy(loss) => {
            let weights = (m.n_inputs() > 2).then(|| m.input(2));
            let result = loss.forward(cx, m.floats(0), m.input(1), weights, m.output(1), m.scratch())?;
            m.output(0)[0] = result.mean;
        }
        Launch::CrossEntropyGrad(loss) => {
            let weights = (m.n_inputs() > 4).then(|| m.input(4));
            let dloss = m.input::<f32>(0)[0];
            let (logits, labels, lse) = (m.floats(1), m.input(2), m.input(3));
            loss.backward(cx, dloss, logits, labels, weights, lse, m.floats_mut(0), m.scratch());
        }
        Launch::Embedding(e) => e.forward(cx, m.floats(1), m.input(0), m.floats_mut(0))?,
        Launch::EmbeddingGrad(e) => e.backward(cx, m.floats(1), m.input(0), m.output(0))?,
        Launch::Attention(a, masked) => {
            let [q, k, v] = qkv(m, masked, 0);
            let o = m.floats_mut(0);
            a.forward(cx, q, k, v, mask(m, masked, 0), o, m.output(1), m.scratch());
        }
        Launch::AttentionGrad(a, masked) => attention_grad(cx, a, masked, m),
        Launch::Dropout { p, stream, slab } => {
            let key = draw.seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let y = m.floats_mut(0);
            random::dropout(cx, *p, key, draw.step, draw.positions(y.len(), *slab), m.floats(0), y);
        }
        Launch::Lstm(lstm) => {
            let x = LstmForward {
                xp: m.floats(0),
                w_hh: m.input(1),
                b_hh: Some(m.input(2)),
                h0: m.input(3),
                c0: m.input(4),
                y: m.floats_mut(0),
                c_all: m.floats_mut(1),
                gates: m.floats_mut(2),
            };
            lstm.forward(cx, x, m.scratch());
        }
        Launch::LstmGrad(lstm) => {
            let x = LstmBackward {
                dy: m.floats(0),
                dh_n: (m.n_inputs() > 7).then(|| m.input(7)),
                dc_n: (m.n_inputs() > 8).then(|| m.input(8)),
                w_hh: m.input(1),
                h0: m.input(2),
                c0: m.input(3),
                y: m.floats(4),
                c_all: m.floats(5),
                gates: m.floats(6),
                dxp: m.floats_mut(0),
                dw_hh: m.output(1),
                db_hh: Some(m.output(2)),
                dh0: m.output(3),
                dc0: m.output(4),
            };
            lstm.backward(cx, x, m.scratch());
        }
        Launch::Gru(gru) => {
            let x = GruForward {
                xp: m.floats(0),
                w_hh: m.input(1),
                b_hh: Some(m.input(2)),
                h0: m.input(3),
                y: m.floats_mut(0),
                gates: m.floats_mut(1),
            };
            gru.forward(cx, x, m.scratch());
        }
        Launch::GruGrad(gru) => {
            let x = GruBackward {
                dy: m.floats(0),
                dh_n: (m.n_inputs() > 5).then(|| m.input(5)),
                w_hh: m.input(1),
                h0: m.input(2),
                y: m.floats(3),
                gates: m.floats(4),
                dxp: m.floats_mut(0),
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
        *output = m.floats_mut(k);
    }
    fused.run(cx, &inputs[..m.n_inputs()], &mut outputs[..m.n_outputs()]);
}

/// Binds an epilogue: its first input is the tile, the others follow the base op's; its outputs overwrite the tile (the
/// first, unless the base op's result is kept) and go to the outputs after the base op's.
/// With `overwrites` not set, the tile is only read, and all go to outputs of their own.
pub(crate) fn pieces<'a>(cx: &Cx, then: &'a Then, m: &NodeMemory<'a>, overwrites: bool) -> FusedPieces<'a> {
    let n_inputs = m.n_inputs() - then.n_base_inputs + 1;
    let mut inputs = [PieceSource::Piece; Expr::INPUTS_MAX];
    for k in 1..n_inputs {
        inputs[k] = PieceSource::Slice(m.floats(then.n_base_inputs + k - 1));
    }
    // The first takes the place of the base op's result.
    let over = usize::from(!then.keeps_base);
    let n_outputs = m.n_outputs() - then.n_base_outputs + over;
    let mut outputs = [PieceTarget::Piece; Expr::OUTPUTS_MAX];
    for j in usize::from(overwrites && over == 1)..n_outputs {
        let k = if j < over { 0 } else { then.n_base_outputs + j - over };
        outputs[j] = PieceTarget::Whole(SharedFloats::new(m.floats_mut(k)));
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

fn qkv<'a>(m: &NodeMemory<'a>, masked: &Masked, first: usize) -> [Floats<'a>; 3] {
    [0, 1, 2].map(|k| m.floats(if masked.packed { first } else { first + k }))
}

fn mask<'a>(m: &NodeMemory<'a>, masked: &Masked, first: usize) -> Option<Mask<'a>> {
    let at = first + if masked.packed { 1 } else { 3 };
    masked.mask.map(|[batch, head, row]| Mask { data: m.input(at), batch, head, row })
}

fn attention_grad(cx: &Cx, a: &Attention, masked: &Masked, m: &NodeMemory) {
    let [q, k, v] = qkv(m, masked, 3);
    let grads = if masked.packed {
        Grads::Packed(m.floats_mut(0))
    } else {
        let [dq, dk, dv] = [0, 1, 2].map(|k| m.floats_mut(k));
        Grads::Separate { dq, dk, dv }
    };
    let (dy, o) = (m.floats(0), m.floats(1));
    a.backward(cx, dy, q, k, v, mask(m, masked, 3), o, m.input(2), grads, m.scratch());
}

/// Copies what this rank brings to an exchange to where the exchange takes place, if it is not there.
fn bring(cx: &Cx, kind: ExchangeKind, m: &NodeMemory) {
    let rank = match kind {
        ExchangeKind::Sum | ExchangeKind::Scatter { .. } => 0,
        ExchangeKind::Gather { rank, .. } => rank,
        // It goes from the operand to the result.
        ExchangeKind::Swap { .. } | ExchangeKind::Pass { from: Some(_), .. } => return,
        // It stays here.
        ExchangeKind::Pass { from: None, .. } => 0,
    };
    if let Source::InPlace(_) = m.source(0) {
        return;
    }
    fn row<T: Copy + Send + Sync>(cx: &Cx, rank: usize, to: &mut [T], from: &[T]) {
        vectors::copy(cx, &mut to[rank * from.len()..][..from.len()], from);
    }
    match (m.floats(0), m.floats_mut(0)) {
        (Floats::F32(from), FloatsMut::F32(to)) => row(cx, rank, to, from),
        (Floats::F16(from), FloatsMut::F16(to)) => row(cx, rank, to, from),
        (Floats::Bf16(from), FloatsMut::Bf16(to)) => row(cx, rank, to, from),
        _ => unreachable!("an exchange keeps the element type"),
    }
}
