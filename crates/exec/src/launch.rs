//! Which kernel runs a node: descriptors of kernels, made once from the node's shapes.

use polyreme_graph::graph::{Graph, Node};
use polyreme_graph::op::{self, Cell, ExchangeKind, Op, Slab, Window};
use polyreme_graph::precision::is_half;
use polyreme_graph::{Body, DType, Shape, ValueId};
use polyreme_kernels::Isa;
use polyreme_kernels::attention::Attention;
use polyreme_kernels::conv::{Conv2d, ConvPass};
use polyreme_kernels::copy::{Gather, Pad, StridedCopy};
use polyreme_kernels::elementwise::Fused;
use polyreme_kernels::embedding::Embedding;
use polyreme_kernels::gemm::pairs::PairOrder;
use polyreme_kernels::gemm::{Gemm, Strides};
use polyreme_kernels::loss::CrossEntropy;
use polyreme_kernels::norm::{BatchNorm, GroupNorm, LayerNorm, RmsNorm};
use polyreme_kernels::pool::{Fixed, Pool2d};
use polyreme_kernels::reduce::{Reduce, ReduceKind};
use polyreme_kernels::rnn::{Gru, Lstm};
use polyreme_kernels::softmax::SoftmaxDim;

use crate::convolution::Convolution;
use crate::product::Product;
use crate::staging::{LINE, Staging};

/// How a node is run.
pub(crate) enum Launch {
    /// Leaves and reshapes: there is nothing to do.
    Nothing,
    Fused(Fused),
    /// A strided copy: permutations and slices.
    Copy(StridedCopy, DType),
    /// One strided copy for each operand.
    Concat(Vec<StridedCopy>, DType),
    Pad(Pad, f32, DType),
    Gather(Gather, DType),
    ScatterAdd(Gather),
    Cast {
        from: DType,
        to: DType,
    },
    Reduce(Reduce),
    MatMul(Product),
    /// A product that computes a gradient, which is applied to the parameter block by block.
    Apply(Product),
    Conv(Convolution, ConvPass),
    MaxPool(Pool2d),
    MaxPoolGrad(Pool2d),
    AvgPool(Pool2d),
    AvgPoolGrad(Pool2d),
    BatchNorm(BatchNorm, f32),
    BatchNormGrad(BatchNorm),
    /// A copy of what this rank brings to an exchange, which works on the copy.
    Exchange(ExchangeKind),
    BatchNormSums(BatchNorm),
    BatchNormFromSums(BatchNorm, f32),
    BatchNormGradSums(BatchNorm),
    BatchNormGradFromSums(BatchNorm),
    LayerNorm(LayerNorm),
    LayerNormGrad(LayerNorm),
    RmsNorm(RmsNorm),
    RmsNormGrad(RmsNorm),
    GroupNorm(GroupNorm),
    GroupNormGrad(GroupNorm),
    Softmax(SoftmaxDim),
    SoftmaxGrad(SoftmaxDim),
    LogSoftmax(SoftmaxDim),
    LogSoftmaxGrad(SoftmaxDim),
    CrossEntropy(CrossEntropy),
    CrossEntropyGrad(CrossEntropy),
    Embedding(Embedding),
    EmbeddingGrad(Embedding),
    Attention(Attention, Masked),
    AttentionGrad(Attention, Masked),
    Dropout {
        p: f32,
        stream: u64,
        slab: Option<Slab>,
    },
    Lstm(Lstm),
    LstmGrad(Lstm),
    Gru(Gru),
    GruGrad(Gru),
}

/// The layout of an attention's operands.
#[derive(Clone, Copy)]
pub(crate) struct Masked {
    pub(crate) packed: bool,
    /// Strides of the mask, if there is one: of the batch, the head and the query.
    pub(crate) mask: Option<[usize; 3]>,
}

/// Element-wise work on finished tiles of the launch's first output.
pub(crate) struct Then {
    pub(crate) fused: Fused,
    pub(crate) keeps_base: bool,
    /// How many of the node's inputs belong to the base op.
    pub(crate) n_base_inputs: usize,
    /// How many outputs the base op has.
    pub(crate) n_base_outputs: usize,
}

/// A node, ready to run.
pub(crate) struct Prepared {
    pub(crate) launch: Launch,
    pub(crate) then: Option<Then>,
    /// Floats of scratch space that the kernel uses; what is staged comes behind them.
    pub(crate) kernel_scratch: usize,
    pub(crate) staging: Staging,
}

impl Prepared {
    /// Bytes of scratch space.
    pub(crate) fn scratch_bytes(&self) -> usize {
        DType::F32.bytes() * (self.kernel_scratch + self.staging.len)
    }
}

/// What kernels are chosen by, beside shapes and types.
#[derive(Clone, Copy)]
pub(crate) struct Choices {
    /// Threads.
    pub(crate) workers: usize,
    /// Features of the CPU.
    pub(crate) isa: Isa,
    /// Whether every machine must come to the same bits.
    pub(crate) reproducible: bool,
    /// Whether no algorithm may trade accuracy for speed.
    pub(crate) strict: bool,
}

impl Choices {
    /// The order of sums in which a kernel multiplies operands in this format as pairs of bf16, or `None` for f32: what is
    /// fastest, where `pays` says that an order is faster than f32. Where every machine must come to the same bits, it is the
    /// same one on each, fast or not.
    pub(crate) fn pair_order(&self, format: DType, pays: impl Fn(PairOrder) -> bool) -> Option<PairOrder> {
        match format {
            DType::Bf16 if self.reproducible => Some(PairOrder::Tiles),
            DType::Bf16 => [PairOrder::Tiles, PairOrder::Pairs].into_iter().find(|&order| pays(order)),
            _ => None,
        }
    }
}

/// Prepares node `i` of a body.
pub(crate) fn prepare(body: &Body, i: usize, with: Choices) -> Prepared {
    let (graph, at_once) = (&body.graph, body.applied[i].is_some());
    let node = &graph.nodes[i];
    let op = if let Op::Epilogue(e) = &node.op { &e.base } else { &node.op };
    let launch = match launch(graph, node, op, with) {
        Launch::MatMul(product) if at_once => Launch::Apply(product),
        launch => launch,
    };
    let then = match &node.op {
        Op::Epilogue(e) => Some(then(graph, node, e, overwrites(&launch))),
        _ => None,
    };
    let base = match &then {
        Some(then) => (then.n_base_inputs, then.n_base_outputs),
        None => (node.inputs.len(), node.outputs.len()),
    };
    let staging = Staging::new(graph, node, &launch, base);
    // What is staged begins at a cache line, as the scratch space does.
    let is_half = |v: &ValueId| is_half(graph.value(*v).dtype);
    let halves = node.inputs[..base.0].iter().chain(&node.outputs[..base.1]).any(is_half);
    let kernel_scratch = scratch_len(&launch, halves, with.workers).next_multiple_of(LINE);
    Prepared { launch, then, kernel_scratch, staging }
}

/// Whether an epilogue's first result overwrites the kernel's own. Products of pairs keep none.
fn overwrites(launch: &Launch) -> bool {
    !matches!(launch, Launch::MatMul(Product::Pairs(_)))
}

fn then(graph: &Graph, node: &Node, e: &op::Epilogue, overwrites: bool) -> Then {
    let out = graph.shape(node.outputs[0]).dims();
    let extra = node.inputs[e.n_base_inputs..].iter().map(|&v| typed(graph, v));
    let inputs: Vec<_> = [(out, DType::F32)].into_iter().chain(extra).collect();
    // The first result, where it overwrites the tile, is f32 as that is.
    let mut dtypes = e.dtypes.clone();
    if !e.keeps_base && overwrites {
        dtypes[0] = DType::F32;
    }
    let fused = Fused::typed(&e.expr, out, &inputs, &dtypes).expect("the graph was verified");
    let n_extra = e.expr.outputs().len() - usize::from(!e.keeps_base);
    Then {
        fused,
        keeps_base: e.keeps_base,
        n_base_inputs: e.n_base_inputs,
        n_base_outputs: node.outputs.len() - n_extra,
    }
}

fn typed(graph: &Graph, v: ValueId) -> (&[usize], DType) {
    (graph.shape(v).dims(), graph.value(v).dtype)
}

fn launch(graph: &Graph, node: &Node, op: &Op, with: Choices) -> Launch {
    let x = |k: usize| graph.shape(node.inputs[k]);
    let y = |k: usize| graph.shape(node.outputs[k]);
    let dtype = node.inputs.first().map_or(DType::F32, |&v| graph.value(v).dtype);
    let strict = with.strict;
    let pass = |conv: Conv2d, pass: ConvPass| Launch::Conv(Convolution::new(conv, pass, dtype, with), pass);
    match op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) | Op::Reshape => Launch::Nothing,
        Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Expand | Op::Epilogue(_) => {
            unreachable!("{} is fused before it runs", op.name())
        }
        Op::Fused(expr) => {
            let inputs: Vec<_> = node.inputs.iter().map(|&v| typed(graph, v)).collect();
            let dtypes: Vec<_> = node.outputs.iter().map(|&v| graph.value(v).dtype).collect();
            let fused = Fused::typed(expr, y(0).dims(), &inputs, &dtypes);
            Launch::Fused(fused.expect("the graph was verified"))
        }
        Op::Permute(perm) => Launch::Copy(StridedCopy::permute(x(0).dims(), perm), dtype),
        &Op::Slice { axis, start, .. } => {
            let (starts, steps) = (at_axis(x(0), axis, start), vec![1; x(0).rank()]);
            let copy = StridedCopy::slice(x(0).dims(), &starts, y(0).dims(), &steps);
            Launch::Copy(copy, dtype)
        }
        &Op::Concat { axis } => {
            let mut start = 0;
            let steps = vec![1; y(0).rank()];
            let part = |&v: &_| {
                let part = graph.shape(v);
                let copy =
                    StridedCopy::into_slice(y(0).dims(), &at_axis(part, axis, start), part.dims(), &steps);
                start += part.dims()[axis];
                copy
            };
            Launch::Concat(node.inputs.iter().map(part).collect(), dtype)
        }
        &Op::Pad { axis, before, after, value } => {
            let (before, after) = (at_axis(x(0), axis, before), at_axis(x(0), axis, after));
            Launch::Pad(Pad::new(x(0).dims(), &before, &after), value, dtype)
        }
        &Op::Gather { axis } => Launch::Gather(Gather::new(x(0).dims(), x(1).dims(), axis), dtype),
        &Op::ScatterAdd { axis, .. } => Launch::ScatterAdd(Gather::new(y(0).dims(), x(1).dims(), axis)),
        &Op::Cast(to) => Launch::Cast { from: graph.value(node.inputs[0]).dtype, to },
        Op::Reduce { kind, axes } => {
            let kind = match kind {
                op::ReduceKind::Sum => ReduceKind::Sum,
                op::ReduceKind::Mean => ReduceKind::Mean,
                op::ReduceKind::Max => ReduceKind::Max,
                op::ReduceKind::Min => ReduceKind::Min,
            };
            Launch::Reduce(Reduce::new(kind, x(0).dims(), axes))
        }
        &Op::MatMul { ta, tb, rounded } => {
            let gemm = gemm(x(0), x(1), ta, tb, strict);
            let formats = [node.inputs[0], node.inputs[1], node.outputs[0]].map(|v| graph.value(v).dtype);
            Launch::MatMul(Product::new(gemm, formats, rounded, with))
        }
        Op::Conv2d(c) => pass(conv(c, x(0), x(1), strict), ConvPass::Forward),
        Op::Conv2dGradInput { conv: c, .. } => pass(conv(c, y(0), x(1), strict), ConvPass::GradInput),
        Op::Conv2dGradWeight { conv: c, .. } => pass(conv(c, x(0), y(0), strict), ConvPass::GradWeight),
        Op::MaxPool(w) => Launch::MaxPool(pool(w, x(0))),
        Op::MaxPoolGrad { window, .. } => Launch::MaxPoolGrad(pool(window, y(0))),
        Op::AvgPool(w) => Launch::AvgPool(pool(w, x(0))),
        Op::AvgPoolGrad { window, .. } => Launch::AvgPoolGrad(pool(window, y(0))),
        &Op::BatchNorm { eps, momentum, relu } => Launch::BatchNorm(batch_norm(x(0), eps, relu), momentum),
        &Op::BatchNormGrad { relu } => Launch::BatchNormGrad(batch_norm(x(0), 0.0, relu)),
        &Op::Exchange { kind, .. } => Launch::Exchange(kind),
        Op::BatchNormSums => Launch::BatchNormSums(batch_norm(x(0), 0.0, false)),
        &Op::BatchNormFromSums { eps, momentum, relu } => {
            Launch::BatchNormFromSums(batch_norm(x(0), eps, relu), momentum)
        }
        &Op::BatchNormGradSums { relu } => Launch::BatchNormGradSums(batch_norm(x(0), 0.0, relu)),
        &Op::BatchNormGradFromSums { relu } => Launch::BatchNormGradFromSums(batch_norm(x(0), 0.0, relu)),
        &Op::LayerNorm { eps } => Launch::LayerNorm(LayerNorm { rows: x(0).rows(), d: x(0).last(), eps }),
        Op::LayerNormGrad => Launch::LayerNormGrad(LayerNorm { rows: x(0).rows(), d: x(0).last(), eps: 0.0 }),
        &Op::RmsNorm { eps } => Launch::RmsNorm(RmsNorm { rows: x(0).rows(), d: x(0).last(), eps }),
        Op::RmsNormGrad => Launch::RmsNormGrad(RmsNorm { rows: x(0).rows(), d: x(0).last(), eps: 0.0 }),
        &Op::GroupNorm { groups, eps } => Launch::GroupNorm(group_norm(x(0), groups, eps)),
        &Op::GroupNormGrad { groups } => Launch::GroupNormGrad(group_norm(x(0), groups, 0.0)),
        &Op::Softmax { axis } => Launch::Softmax(along(x(0), axis)),
        &Op::SoftmaxGrad { axis } => Launch::SoftmaxGrad(along(x(0), axis)),
        &Op::LogSoftmax { axis } => Launch::LogSoftmax(along(x(0), axis)),
        &Op::LogSoftmaxGrad { axis } => Launch::LogSoftmaxGrad(along(x(0), axis)),
        Op::CrossEntropy(o) => Launch::CrossEntropy(cross_entropy(o, x(0))),
        Op::CrossEntropyGrad(o) => Launch::CrossEntropyGrad(cross_entropy(o, x(1))),
        Op::Embedding => {
            let d = x(1).last();
            Launch::Embedding(Embedding { rows: x(1).dims()[0], d, n: x(0).numel() })
        }
        &Op::EmbeddingGrad { rows } => {
            Launch::EmbeddingGrad(Embedding { rows, d: x(1).last(), n: x(0).numel() })
        }
        Op::Attention(a) => {
            let (attention, masked) = attention(graph, node, a, 0, with);
            Launch::Attention(attention, masked)
        }
        Op::AttentionGrad(a) => {
            let (attention, masked) = attention(graph, node, a, 3, with);
            Launch::AttentionGrad(attention, masked)
        }
        &Op::Dropout { p, stream, slab } => Launch::Dropout { p, stream, slab },
        &Op::Recurrent { cell, reverse } => {
            let shape = y(0).dims();
            match cell {
                Cell::Lstm => Launch::Lstm(lstm(shape, reverse, dtype, with)),
                Cell::Gru => Launch::Gru(gru(shape, reverse, dtype, with)),
            }
        }
        &Op::RecurrentGrad { cell, reverse } => {
            let shape = x(0).dims();
            match cell {
                Cell::Lstm => Launch::LstmGrad(lstm(shape, reverse, dtype, with)),
                Cell::Gru => Launch::GruGrad(gru(shape, reverse, dtype, with)),
            }
        }
    }
}

/// Scratch space in floats; `halves` says whether operands or results are in half.
fn scratch_len(launch: &Launch, halves: bool, workers: usize) -> usize {
    match launch {
        Launch::Nothing
        | Launch::Fused(_)
        | Launch::Copy(..)
        | Launch::Concat(..)
        | Launch::Pad(..)
        | Launch::Gather(..)
        | Launch::ScatterAdd(_)
        | Launch::Cast { .. }
        | Launch::Exchange(_)
        | Launch::Embedding(_)
        | Launch::EmbeddingGrad(_)
        | Launch::Dropout { .. } => 0,
        Launch::Reduce(r) => r.scratch_len(if halves { DType::Bf16 } else { DType::F32 }, workers),
        Launch::MatMul(g) => g.scratch_len(workers),
        Launch::Apply(g) => g.pass_scratch_len(workers),
        Launch::Conv(c, pass) => c.scratch_len(*pass, halves, workers),
        Launch::BatchNorm(n, _)
        | Launch::BatchNormGrad(n)
        | Launch::BatchNormSums(n)
        | Launch::BatchNormFromSums(n, _)
        | Launch::BatchNormGradSums(n)
        | Launch::BatchNormGradFromSums(n) => n.scratch_len(halves, workers),
        Launch::LayerNorm(n) => n.forward_scratch_len(halves, workers),
        Launch::LayerNormGrad(n) => n.backward_scratch_len(halves, workers),
        Launch::RmsNorm(n) => n.forward_scratch_len(halves, workers),
        Launch::RmsNormGrad(n) => n.backward_scratch_len(halves, workers),
        Launch::GroupNorm(n) | Launch::GroupNormGrad(n) => n.scratch_len(halves, workers),
        Launch::MaxPool(p) | Launch::MaxPoolGrad(p) | Launch::AvgPool(p) | Launch::AvgPoolGrad(p) => {
            p.scratch_len(halves, workers)
        }
        Launch::Softmax(d) | Launch::SoftmaxGrad(d) | Launch::LogSoftmax(d) | Launch::LogSoftmaxGrad(d) => {
            d.scratch_len(halves, workers)
        }
        Launch::CrossEntropy(c) => c.forward_scratch_len(halves, workers),
        Launch::CrossEntropyGrad(c) => c.backward_scratch_len(halves, workers),
        Launch::Attention(a, _) => a.forward_scratch_len(workers),
        Launch::AttentionGrad(a, _) => a.backward_scratch_len(workers),
        Launch::Lstm(r) if halves => r.forward_scratch_len_half(workers),
        Launch::Lstm(r) => r.forward_scratch_len(workers),
        Launch::LstmGrad(r) if halves => r.backward_scratch_len_half(workers),
        Launch::LstmGrad(r) => r.backward_scratch_len(workers),
        Launch::Gru(r) if halves => r.forward_scratch_len_half(workers),
        Launch::Gru(r) => r.forward_scratch_len(workers),
        Launch::GruGrad(r) if halves => r.backward_scratch_len_half(workers),
        Launch::GruGrad(r) => r.backward_scratch_len(workers),
    }
}

/// Zeros, except in one dim.
fn at_axis(shape: &Shape, axis: usize, value: usize) -> Vec<usize> {
    (0..shape.rank()).map(|d| if d == axis { value } else { 0 }).collect()
}

fn gemm(a: &Shape, b: &Shape, ta: bool, tb: bool, strict: bool) -> Gemm {
    let matrix = |s: &Shape, t: bool| {
        let (r, c) = (s.dims()[s.rank() - 2], s.last());
        let strides = if t { (1, c) } else { (c, 1) };
        let (rows, cols) = if t { (c, r) } else { (r, c) };
        (rows, cols, Strides { batch: r * c, row: strides.0, col: strides.1 })
    };
    let (mut m, k, a_strides) = matrix(a, ta);
    let (_, n, b_strides) = matrix(b, tb);
    let mut batch = a.dims()[..a.rank() - 2].iter().product();
    if b.rank() == 2 && batch != 1 {
        // With one right operand for all, the batch is one tall matrix.
        m *= batch;
        batch = 1;
    }
    let c = Strides { batch: m * n, row: n, col: 1 };
    Gemm { batch, m, n, k, a: a_strides, b: b_strides, c, accumulate: false, strict }
}

fn conv(c: &op::Conv, image: &Shape, weight: &Shape, strict: bool) -> Conv2d {
    let (&[n, h, w, c_in], &[c_out, _, kh, kw]) = (image.dims(), weight.dims()) else {
        unreachable!("verified")
    };
    let op::Conv { stride, padding, dilation, groups } = *c;
    Conv2d { n, h, w, c_in, c_out, kh, kw, stride, padding, dilation, groups, strict }
}

fn pool(window: &Window, image: &Shape) -> Pool2d {
    let &[n, h, w, c] = image.dims() else { unreachable!("verified") };
    match *window {
        Window::Fixed { kernel, stride, padding, count_include_pad } => {
            let pair = |(a, b): (usize, usize)| [a, b];
            let fixed = Fixed {
                kernel: pair(kernel),
                stride: pair(stride),
                padding: pair(padding),
                count_include_pad,
            };
            Pool2d::fixed(n, h, w, c, fixed)
        }
        Window::Adaptive { out } => Pool2d::adaptive(n, h, w, c, out.0, out.1),
    }
}

fn batch_norm(x: &Shape, eps: f32, relu: bool) -> BatchNorm {
    BatchNorm { rows: x.rows(), channels: x.last(), eps, relu }
}

fn group_norm(x: &Shape, groups: usize, eps: f32) -> GroupNorm {
    let (n, channels) = (x.dims()[0], x.last());
    GroupNorm { n, pixels: x.numel() / (n * channels).max(1), channels, groups, eps }
}

fn along(x: &Shape, axis: usize) -> SoftmaxDim {
    let (outer, axis, inner) = x.around(axis);
    SoftmaxDim { outer, axis, inner }
}

fn cross_entropy(o: &op::CrossEntropy, logits: &Shape) -> CrossEntropy {
    let (n, classes) = (logits.rows(), logits.last());
    CrossEntropy { n, classes, label_smoothing: o.label_smoothing, ignore_index: o.ignore_index }
}

fn lstm(shape: &[usize], reverse: bool, format: DType, with: Choices) -> Lstm {
    let &[batch, time, hidden] = shape else { unreachable!("verified") };
    let of = |products| Lstm { batch, time, hidden, reverse, strict: with.strict, products };
    of(with.pair_order(format, |order| of(Some(order)).pays(with.isa)))
}

fn gru(shape: &[usize], reverse: bool, format: DType, with: Choices) -> Gru {
    let &[batch, time, hidden] = shape else { unreachable!("verified") };
    let of = |products| Gru { batch, time, hidden, reverse, strict: with.strict, products };
    of(with.pair_order(format, |order| of(Some(order)).pays(with.isa)))
}

fn attention(
    graph: &Graph,
    node: &Node,
    a: &op::Attention,
    first: usize,
    with: Choices,
) -> (Attention, Masked) {
    let dims = |k: usize| graph.shape(node.inputs[first + k]).dims();
    let (n, attention) = if a.packed {
        let &[b, t, _, heads, d] = dims(0) else { unreachable!("verified") };
        (1, Attention::packed(b, t, heads, d, a.causal))
    } else {
        let (&[b, t_q, heads, d], &[_, t_k, _, _]) = (dims(0), dims(1)) else { unreachable!("verified") };
        (3, Attention::separate(b, t_q, t_k, heads, d, a.causal))
    };
    let (t_q, t_k) = (attention.t_q, attention.t_k);
    let mask = (node.inputs.len() > first + n).then(|| match *dims(n) {
        [_, _] => [0, 0, t_k],
        [_, 1, _] => [t_k, 0, 0],
        [_, _, _] => [t_q * t_k, 0, t_k],
        [_, 1, _, _] => [t_q * t_k, 0, t_k],
        [_, heads, _, _] => [heads * t_q * t_k, t_q * t_k, t_k],
        _ => unreachable!("verified"),
    });
    let of = |products: Option<PairOrder>| Attention { scale: a.scale, products, ..attention.clone() };
    let format = graph.value(node.inputs[first]).dtype;
    let order = with.pair_order(format, |order| of(Some(order)).pays(with.isa));
    (of(order), Masked { packed: a.packed, mask })
}

#[cfg(test)]
mod tests {
    use polyreme_graph::{Builder, Init, Precision, differentiate};

    use super::*;

    #[test]
    fn pairs_are_taken_where_they_pay_and_always_where_runs_are_reproducible() {
        let with = Choices { workers: 1, isa: Isa::SCALAR, reproducible: false, strict: false };
        let same = Choices { reproducible: true, ..with };
        for (pays, want) in [
            (&[][..], None),
            (&[PairOrder::Pairs], Some(PairOrder::Pairs)),
            (&[PairOrder::Pairs, PairOrder::Tiles], Some(PairOrder::Tiles)),
        ] {
            assert_eq!(with.pair_order(DType::Bf16, |order| pays.contains(&order)), want);
            assert_eq!(same.pair_order(DType::Bf16, |order| pays.contains(&order)), Some(PairOrder::Tiles));
            for format in [DType::F32, DType::F16] {
                assert_eq!(with.pair_order(format, |_| true), None);
                assert_eq!(same.pair_order(format, |_| true), None);
            }
        }
    }

    /// How attention and recurrent layers of a step multiply, in both passes.
    fn products(half: Option<DType>, reproducible: bool) -> Vec<Option<PairOrder>> {
        let mut b = Builder::new();
        let zero = Init::Const(0.0);
        let qkv = b.input("qkv", [2, 40, 3, 2, 16], DType::F32).unwrap();
        let scale = b.param("scale", [2, 40, 3, 2, 16], zero).unwrap();
        let qkv = b.mul(qkv, scale).unwrap();
        let mut sums = vec![b.attention_packed(qkv, true, None).unwrap()];
        for (cell, name) in [(Cell::Lstm, "lstm"), (Cell::Gru, "gru")] {
            let width = cell.gates() * 20;
            let xp = b.input(name, [2, 5, width], DType::F32).unwrap();
            let w = b.param(&format!("{name}.w"), [width, 20], zero).unwrap();
            let bias = b.param(&format!("{name}.b"), [width], zero).unwrap();
            sums.push(b.recurrent(cell, xp, w, bias, &[], false).unwrap());
        }
        let sums = sums.into_iter().map(|y| {
            let axes: Vec<usize> = (0..b.dims(y).len()).collect();
            b.sum(y, &axes).unwrap()
        });
        let sums: Vec<_> = sums.collect();
        let loss = b.add(sums[0], sums[1]).unwrap();
        let loss = b.add(loss, sums[2]).unwrap();
        let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
        let step = half.map_or(Precision::F32, Precision::half).apply(&step);
        let with = Choices { workers: 1, isa: Isa::SCALAR, reproducible, strict: false };
        let inside = |op: &Op| {
            matches!(
                op,
                Op::Attention(_) | Op::AttentionGrad(_) | Op::Recurrent { .. } | Op::RecurrentGrad { .. }
            )
        };
        step.nodes
            .iter()
            .filter(|node| inside(&node.op))
            .map(|node| match launch(&step, node, &node.op, with) {
                Launch::Attention(a, _) | Launch::AttentionGrad(a, _) => a.products,
                Launch::Lstm(l) | Launch::LstmGrad(l) => l.products,
                Launch::Gru(g) | Launch::GruGrad(g) => g.products,
                _ => unreachable!("one of these ops"),
            })
            .collect()
    }

    #[test]
    fn reproducible_steps_of_bf16_multiply_in_one_order() {
        assert_eq!(products(Some(DType::Bf16), true), [Some(PairOrder::Tiles); 6]);
        // A twin never pays.
        assert_eq!(products(Some(DType::Bf16), false), [None; 6]);
        for half in [None, Some(DType::F16)] {
            assert_eq!(products(half, true), [None; 6]);
        }
    }
}
