//! What a node or an instruction has a rank's threads do: which kind of work, how much of it, and of which shape.
//!
//! Times are measured or assumed by kind. Two nodes of one kind differ in how much they compute or move, and in a few sizes that
//! decide how well a kernel runs: the three of a product, the length of sequences, the bytes that a pass goes through.
//!
//! Every op and every instruction has a row here; a new one does not compile before it has.

use polyreme_graph::graph::Node;
use polyreme_graph::{Body, Collective, DType, Graph, Instr, Op, Optimizer, Program, Region, cost};
use serde::{Deserialize, Serialize};

/// Kinds of work with one table of times each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkKind {
    /// A product of operands as they are stored; sizes `m`, `n`, `k`.
    Product,
    /// A product with a transposed second operand: the forward pass of a linear layer.
    ProductNt,
    /// A product with a transposed first operand: the gradient of a weight.
    ProductTn,
    /// Convolutions by 1x1; sizes: channels in, channels out, pixels.
    Conv1,
    /// The gradient of their input.
    Conv1GradInput,
    /// The gradient of their weight.
    Conv1GradWeight,
    /// Convolutions by 3x3 that look at every pixel.
    Conv3,
    /// The gradient of their input.
    Conv3GradInput,
    /// The gradient of their weight.
    Conv3GradWeight,
    /// Convolutions with other windows and strides.
    ConvWide,
    /// The gradient of their input.
    ConvWideGradInput,
    /// The gradient of their weight.
    ConvWideGradWeight,
    /// Convolutions of groups of channels; sizes: channels in, channels of a group, pixels.
    ConvGrouped,
    /// The gradient of their input.
    ConvGroupedGradInput,
    /// The gradient of their weight.
    ConvGroupedGradWeight,
    /// Attention; sizes: length, width of a head, heads of all samples.
    Attention,
    /// Its gradient.
    AttentionGrad,
    /// A recurrent layer; sizes: hidden width, samples, length.
    Recurrent,
    /// Its gradient.
    RecurrentGrad,
    /// Passes over memory that add, multiply, compare; size: bytes. So are the others below.
    Elementwise,
    /// Exponentials and the like, on top of the pass that reads and writes; size: how many.
    Functions,
    /// Layer, RMS and group norms.
    Norm,
    /// Their gradients.
    NormGrad,
    /// Batch norms, and the two parts of those over several ranks.
    BatchNorm,
    /// Their gradients.
    BatchNormGrad,
    /// Softmax.
    Softmax,
    /// Its gradient.
    SoftmaxGrad,
    /// Cross-entropy.
    CrossEntropy,
    /// Its gradient.
    CrossEntropyGrad,
    /// Sums, means, maxima along dims.
    Reduce,
    /// Pooling.
    Pool,
    /// Its gradient.
    PoolGrad,
    /// Rows of a table by index.
    Lookup,
    /// Their gradient: rows added by index.
    LookupGrad,
    /// Elements in another order, or parts of them.
    Rearrange,
    /// Random masks.
    Dropout,
    /// Copies of whole ranges, and zeros.
    Copy,
    /// Sums of two ranges, and of squares.
    Add,
    /// Updates by SGD.
    UpdateSgd,
    /// By Adam and AdamW.
    UpdateAdam,
    /// By Lion.
    UpdateLion,
    /// By LAMB and Adafactor, which look at whole tensors.
    UpdateWhole,
}

impl WorkKind {
    /// All of them.
    pub const ALL: [WorkKind; 42] = {
        use WorkKind::*;
        [
            Product,
            ProductNt,
            ProductTn,
            Conv1,
            Conv1GradInput,
            Conv1GradWeight,
            Conv3,
            Conv3GradInput,
            Conv3GradWeight,
            ConvWide,
            ConvWideGradInput,
            ConvWideGradWeight,
            ConvGrouped,
            ConvGroupedGradInput,
            ConvGroupedGradWeight,
            Attention,
            AttentionGrad,
            Recurrent,
            RecurrentGrad,
            Elementwise,
            Functions,
            Norm,
            NormGrad,
            BatchNorm,
            BatchNormGrad,
            Softmax,
            SoftmaxGrad,
            CrossEntropy,
            CrossEntropyGrad,
            Reduce,
            Pool,
            PoolGrad,
            Lookup,
            LookupGrad,
            Rearrange,
            Dropout,
            Copy,
            Add,
            UpdateSgd,
            UpdateAdam,
            UpdateLion,
            UpdateWhole,
        ]
    };
}

/// Some work.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Work {
    /// Its kind.
    pub kind: WorkKind,
    /// Whether its operands are stored in half.
    pub half: bool,
    /// Multiply-adds times two; 0 where only bytes count.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// The sizes that the kind has; the others are 1.
    pub sizes: [f64; 3],
    /// Whether it is done within another op, and so has no fixed cost of its own.
    pub joined: bool,
}

impl Work {
    /// A pass over memory.
    pub fn pass(kind: WorkKind, bytes: f64) -> Work {
        Work { kind, half: false, flops: 0.0, bytes, sizes: [bytes.max(1.0), 1.0, 1.0], joined: false }
    }

    /// The same within another op.
    pub fn joined(self) -> Work {
        Work { joined: true, ..self }
    }

    /// How much there is of it, in the unit in which times are interpolated: multiply-adds, or bytes.
    pub fn amount(&self) -> f64 {
        if self.flops > 0.0 { self.flops } else { self.bytes }
    }
}

/// What a node of a body does.
pub fn of_node(body: &Body, node: usize, optimizer: Option<Optimizer>, moments: DType) -> Vec<Work> {
    let graph = &body.graph;
    let mut work = of_op(graph, &graph.nodes[node]);
    if let (Some(param), Some(optimizer)) = (body.applied[node], optimizer) {
        let numel = graph.shape(graph.params[param].value).numel();
        // The gradient is in cache, and is never written.
        let update = update(optimizer, moments, numel);
        work.push(Work::pass(update.kind, update.bytes - (numel * DType::F32.bytes()) as f64).joined());
    }
    work
}

fn of_op(graph: &Graph, node: &Node) -> Vec<Work> {
    let cost = cost::cost(graph, node);
    let (flops, bytes) = (cost.flops as f64, cost.bytes as f64);
    let half = node.inputs.first().is_some_and(|v| graph.value(*v).dtype.bytes() == 2);
    let pass = |kind| vec![Work::pass(kind, bytes)];
    let busy = |kind, half, sizes: [usize; 3]| {
        vec![Work { kind, half, flops, bytes, sizes: sizes.map(|n| n.max(1) as f64), joined: false }]
    };
    let dims = |i: usize| graph.shape(node.inputs[i]).dims();
    match &node.op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) | Op::Reshape => Vec::new(),
        Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Fused(_) => {
            let mut work = pass(WorkKind::Elementwise);
            work.extend(functions(graph, node));
            work
        }
        Op::Epilogue(e) => {
            let base = Node { op: e.base.clone(), ..node.clone() };
            let mut work = of_op(graph, &Node { inputs: node.inputs[..e.n_base_inputs].to_vec(), ..base });
            // Its operands and results beside those of the base; the block that it works on is in cache.
            let beside = node.inputs[e.n_base_inputs..].iter().chain(node.outputs.iter().skip(1));
            let bytes: usize = beside.map(|v| graph.value(*v).bytes()).sum();
            work.push(Work::pass(WorkKind::Elementwise, bytes as f64).joined());
            work.extend(functions(graph, node));
            work
        }
        Op::Cast(_) | Op::Expand => pass(WorkKind::Elementwise),
        Op::Permute(_) | Op::Slice { .. } | Op::Concat { .. } | Op::Pad { .. } => pass(WorkKind::Rearrange),
        Op::Gather { .. } | Op::Embedding => {
            // Rows are read as often as they are written; the rest of the table is not touched.
            let out = graph.value(node.outputs[0]).bytes();
            vec![Work::pass(WorkKind::Lookup, 2.0 * out as f64)]
        }
        Op::ScatterAdd { .. } | Op::EmbeddingGrad { .. } => pass(WorkKind::LookupGrad),
        Op::Reduce { .. } => pass(WorkKind::Reduce),
        &Op::MatMul { ta, tb, rounded } => {
            let (a, c) = (dims(0), graph.shape(node.outputs[0]).dims());
            let (rows, n) = (a.len() - 2, c[c.len() - 1]);
            let k = if ta { a[rows] } else { a[rows + 1] };
            // A second operand that serves all of the first makes one product of many rows.
            let m = if dims(1).len() == 2 { c[..c.len() - 1].iter().product() } else { c[c.len() - 2] };
            let kind = match (ta, tb) {
                (true, _) => WorkKind::ProductTn,
                (false, true) => WorkKind::ProductNt,
                (false, false) => WorkKind::Product,
            };
            busy(kind, half || rounded.is_some(), [m, n, k])
        }
        Op::Conv2d(conv) => {
            let kinds = [WorkKind::Conv1, WorkKind::Conv3, WorkKind::ConvWide, WorkKind::ConvGrouped];
            let out = graph.shape(node.outputs[0]).dims();
            let channels = channels(conv, dims(0)[3], out[3]);
            busy(kinds[window(conv, dims(1))], half, [channels.0, channels.1, out[0] * out[1] * out[2]])
        }
        Op::Conv2dGradInput { conv, .. } => {
            use WorkKind::*;
            let kinds = [Conv1GradInput, Conv3GradInput, ConvWideGradInput, ConvGroupedGradInput];
            let (dy, dx) = (dims(0), graph.shape(node.outputs[0]).dims());
            let channels = channels(conv, dx[3], dy[3]);
            busy(kinds[window(conv, dims(1))], half, [channels.0, channels.1, dy[0] * dy[1] * dy[2]])
        }
        Op::Conv2dGradWeight { conv, .. } => {
            use WorkKind::*;
            let kinds = [Conv1GradWeight, Conv3GradWeight, ConvWideGradWeight, ConvGroupedGradWeight];
            let (x, dy, dw) = (dims(0), dims(1), graph.shape(node.outputs[0]).dims());
            let channels = channels(conv, x[3], dy[3]);
            busy(kinds[window(conv, dw)], half, [channels.0, channels.1, dy[0] * dy[1] * dy[2]])
        }
        Op::MaxPool(_) | Op::AvgPool(_) => pass(WorkKind::Pool),
        Op::MaxPoolGrad { .. } | Op::AvgPoolGrad { .. } => pass(WorkKind::PoolGrad),
        Op::BatchNorm { .. } | Op::BatchNormSums | Op::BatchNormFromSums { .. } => pass(WorkKind::BatchNorm),
        Op::BatchNormGrad { .. } | Op::BatchNormGradSums { .. } | Op::BatchNormGradFromSums { .. } => {
            pass(WorkKind::BatchNormGrad)
        }
        // What is copied to where the exchange finds it; the exchange itself is an instruction.
        Op::Exchange { .. } => {
            let copied: usize =
                match graph.value(node.inputs[0]).bytes() == graph.value(node.outputs[0]).bytes() {
                    // Sums end where their operand is.
                    true => 0,
                    false => 2 * graph.value(node.inputs[0]).bytes(),
                };
            vec![Work::pass(WorkKind::Copy, copied as f64)]
        }
        Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::GroupNorm { .. } => pass(WorkKind::Norm),
        Op::LayerNormGrad | Op::RmsNormGrad | Op::GroupNormGrad { .. } => pass(WorkKind::NormGrad),
        Op::Softmax { .. } | Op::LogSoftmax { .. } => pass(WorkKind::Softmax),
        Op::SoftmaxGrad { .. } | Op::LogSoftmaxGrad { .. } => pass(WorkKind::SoftmaxGrad),
        Op::CrossEntropy(_) => pass(WorkKind::CrossEntropy),
        Op::CrossEntropyGrad(_) => pass(WorkKind::CrossEntropyGrad),
        Op::Attention(a) => busy(WorkKind::Attention, half, attention_sizes(dims(0), a.packed)),
        Op::AttentionGrad(a) => busy(WorkKind::AttentionGrad, half, attention_sizes(dims(3), a.packed)),
        Op::Dropout { .. } => pass(WorkKind::Dropout),
        Op::Recurrent { .. } => busy(WorkKind::Recurrent, half, [dims(1)[1], dims(0)[0], dims(0)[1]]),
        Op::RecurrentGrad { .. } => {
            let dxp = graph.shape(node.outputs[0]).dims();
            busy(WorkKind::RecurrentGrad, half, [dims(0)[2], dxp[0], dxp[1]])
        }
    }
}

/// What an instruction has the rank's own threads do. Blocks are counted by their nodes, exchanges by what carries them. There are few
/// of these, and long ones: their fixed costs do not count.
pub fn of_instr(program: &Program, instr: &Instr) -> Vec<Work> {
    instr_passes(program, instr).into_iter().map(Work::joined).collect()
}

fn instr_passes(program: &Program, instr: &Instr) -> Vec<Work> {
    let bytes = |region: &Region| (program.len_of(region) * program.dtype(region).bytes()) as f64;
    let copy = |bytes: f64| vec![Work::pass(WorkKind::Copy, bytes)];
    let graph = |microbatch: usize| &program.bodies[program.microbatches[microbatch].body].graph;
    match instr {
        Instr::Run { .. } | Instr::Start(_) | Instr::Wait(_) => Vec::new(),
        Instr::Begin(of) | Instr::Judge(of) | Instr::JudgeOwn(of) | Instr::JudgeSteps(of) => copy(bytes(of)),
        Instr::Load { microbatch, .. } => {
            let graph = graph(*microbatch);
            let body = &program.bodies[program.microbatches[*microbatch].body];
            let arrives = |v| body.arrives.iter().any(|link| link.value == v);
            let fed = graph.inputs.iter().filter(|input| !arrives(input.value));
            copy(fed.map(|input| 2.0 * graph.value(input.value).bytes() as f64).sum())
        }
        Instr::Count { into, tally, .. } => copy(bytes(into) + bytes(tally)),
        Instr::Keep { microbatch, nodes, .. } => {
            let graph = graph(*microbatch);
            let kept = graph.updates.iter().filter(|(_, v)| nodes.contains(&graph.value(*v).producer.idx()));
            copy(kept.map(|(_, v)| 2.0 * graph.value(*v).bytes() as f64).sum())
        }
        Instr::WeighStates { into, .. } => copy(4.0 * bytes(into)),
        Instr::Zero(of) => copy(bytes(of)),
        // As a step that updates: what was kept is not put back.
        Instr::PutBack { .. } => Vec::new(),
        Instr::Copy { from, .. } => copy(2.0 * bytes(from)),
        Instr::Add { from, .. } | Instr::Subtract { from, .. } => {
            vec![Work::pass(WorkKind::Add, 3.0 * bytes(from))]
        }
        Instr::DivideByWeight(of) | Instr::Divide { of, .. } => {
            vec![Work::pass(WorkKind::Add, 2.0 * bytes(of))]
        }
        // As if ranks never came too far.
        Instr::Leave { .. } | Instr::Together => Vec::new(),
        Instr::SquaresApart { of, .. } => vec![Work::pass(WorkKind::Add, 2.0 * bytes(of))],
        Instr::Squares { of, .. } => vec![Work::pass(WorkKind::Add, bytes(of))],
        // Gradients and parameters are read, and the states of means or norms.
        Instr::Measure { grads, .. } => vec![Work::pass(WorkKind::Add, 3.0 * bytes(grads))],
        Instr::Clip { squares, .. } => copy(bytes(squares)),
        Instr::Update { params, .. } => {
            program.optimizer.map(|rule| update(rule, program.moments, params.len())).into_iter().collect()
        }
        // Parameters and velocity are read and written, and where they came from is read.
        Instr::Outer { from, .. } => vec![Work::pass(WorkKind::Add, 5.0 * bytes(from))],
        // Into letters, and out of them.
        Instr::Push(range) | Instr::Await(range) => {
            copy((2 * program.served[*range].params.len() * DType::F32.bytes()) as f64)
        }
        Instr::Pull(_) => Vec::new(),
        Instr::ReadParams(_) | Instr::NextStep => Vec::new(),
        Instr::Follow { .. } => {
            let numel = program.graph().param_numel();
            vec![Work::pass(WorkKind::Add, (3 * numel * DType::F32.bytes()) as f64)]
        }
    }
}

/// The update of so many parameters.
pub(crate) fn update(optimizer: Optimizer, moments: DType, numel: usize) -> Work {
    let kind = match optimizer {
        Optimizer::Sgd { .. } => WorkKind::UpdateSgd,
        Optimizer::Adam(_) | Optimizer::AdamW(_) => WorkKind::UpdateAdam,
        Optimizer::Lion { .. } => WorkKind::UpdateLion,
        Optimizer::Lamb(_) | Optimizer::Adafactor(_) => WorkKind::UpdateWhole,
    };
    // Parameters and states are read and written, gradients are read.
    let each = 3 * DType::F32.bytes() + 2 * optimizer.n_states() * moments.bytes();
    Work::pass(kind, (numel * each) as f64)
}

/// The bytes of an exchange: of the whole region, as all ranks have it.
pub(crate) fn exchanged_bytes(program: &Program, number: usize) -> f64 {
    let exchange = &program.exchanges[number];
    let elements = match &exchange.op {
        Collective::ReduceScatter(cuts) | Collective::AllGather(cuts) => {
            cuts.last().copied().unwrap_or(0) - cuts.first().copied().unwrap_or(0)
        }
        Collective::AllReduce
        | Collective::AllToAll { .. }
        | Collective::Send { .. }
        | Collective::Receive { .. } => program.len_of(&exchange.of),
        Collective::Meet => 0,
    };
    program.wire_bytes(exchange, elements) as f64
}

fn functions(graph: &Graph, node: &Node) -> Option<Work> {
    let n = cost::functions(graph, node) as f64;
    let (kind, sizes) = (WorkKind::Functions, [n, 1.0, 1.0]);
    let work = Work { kind, half: false, flops: n, bytes: 0.0, sizes, joined: true };
    (n > 0.0).then_some(work)
}

/// Which kind of convolution has a weight of these dims: by 1x1, by 3x3, others, groups.
fn window(conv: &polyreme_graph::op::Conv, weight: &[usize]) -> usize {
    match (conv.groups, conv.stride, conv.dilation, weight[2], weight[3]) {
        (1, _, _, 1, 1) => 0,
        (1, (1, 1), (1, 1), 3, 3) => 1,
        (1, ..) => 2,
        _ => 3,
    }
}

/// The two sizes that channels have: in and out, or in and those of a group.
fn channels(conv: &polyreme_graph::op::Conv, c_in: usize, c_out: usize) -> (usize, usize) {
    if conv.groups == 1 { (c_in, c_out) } else { (c_in, c_in / conv.groups) }
}

/// Length, width of a head, heads of all samples; from the shape of the queries.
fn attention_sizes(q: &[usize], packed: bool) -> [usize; 3] {
    let (heads, d) = if packed { (q[3], q[4]) } else { (q[2], q[3]) };
    [q[1], d, q[0] * heads]
}
