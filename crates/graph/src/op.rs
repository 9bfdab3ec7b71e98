//! The closed set of ops. A new op is one row in each table: its shape (`infer`), its types (`types`), its gradient
//! (`grad`), its cost (`cost`), its printed form (`print`) and its kernel (in `exec`).
//!
//! Images are channels-last, `[n, h, w, c]`; weights keep PyTorch's layouts. Legend: `m`, `k`, `n` of a product,
//! `c` channels, `t` time, `h` hidden.

use polyreme_kernels::elementwise::Expr;
/// The vocabulary of element-wise ops: that of the kernels.
pub use polyreme_kernels::elementwise::{Binary, Unary};

use crate::print::{binary_name, unary_name};
use crate::program::Axis;
use crate::shape::DType;

/// Stride, padding, dilation and groups of a 2-D convolution, rows first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conv {
    /// Pixels from one window to the next.
    pub stride: (usize, usize),
    /// Zeros added on each side.
    pub padding: (usize, usize),
    /// Pixels between the kernel's taps.
    pub dilation: (usize, usize),
    /// Channel groups that do not mix.
    pub groups: usize,
}

impl Default for Conv {
    fn default() -> Conv {
        Conv { stride: (1, 1), padding: (0, 0), dilation: (1, 1), groups: 1 }
    }
}

/// Which pixels an output of a pooling sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Window {
    /// The same window everywhere.
    Fixed {
        /// Rows and columns of the window.
        kernel: (usize, usize),
        /// Pixels from one window to the next.
        stride: (usize, usize),
        /// Padding on each side: never the maximum, and zeros for an average.
        padding: (usize, usize),
        /// Whether an average divides by the whole window, padding included.
        count_include_pad: bool,
    },
    /// Windows that cut the image into this many rows and columns.
    Adaptive {
        /// Rows and columns of the output.
        out: (usize, usize),
    },
}

/// How a reduction combines elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceKind {
    /// The sum.
    Sum,
    /// The mean.
    Mean,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
}

/// Options of a cross-entropy loss.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CrossEntropy {
    /// How much probability is spread over all classes.
    pub label_smoothing: f32,
    /// Samples with this label are ignored.
    pub ignore_index: Option<i32>,
}

/// Options of scaled-dot-product attention.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    /// Whether a query sees only keys at its own and earlier positions.
    pub causal: bool,
    /// What the products of queries and keys are multiplied by.
    pub scale: f32,
    /// One input `[b, t, 3, heads, d]` instead of three `[b, t, heads, d]`.
    pub packed: bool,
}

/// A part of a tensor, as a split over samples, columns, heads or time leaves it to one rank: runs of elements that lie further
/// apart in the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slab {
    /// The place of the first element in the whole tensor of a microbatch.
    pub first: usize,
    /// Of a part with two runs in each stride, where its second run begins; every other run is one of these.
    pub second: Option<usize>,
    /// Elements that are neighbours in the whole, too.
    pub run: usize,
    /// From the beginning of a run, or of a pair of them, to that of the next, in the whole.
    pub stride: usize,
}

/// What the ranks along an axis make of their values together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExchangeKind {
    /// The sum: every rank gets the same. A lone rank gets what it had.
    Sum,
    /// `x [..]` → `[ranks, ..]`: those of all ranks, in their order.
    Gather {
        /// How many ranks there are.
        ranks: usize,
        /// This rank's place among them.
        rank: usize,
    },
    /// `x [ranks, ..]` → the same shape, in which row `rank` is the sum of all ranks' row `rank`; other rows are undefined.
    Scatter {
        /// How many ranks there are.
        ranks: usize,
    },
    /// `x [ranks, ..]` → `[ranks, ..]`: row `r` is this rank's row of rank `r`'s.
    Swap {
        /// How many ranks there are.
        ranks: usize,
    },
    /// A message: `x` goes to one rank, and the result is what another one sent. A rank that receives nothing keeps its `x`.
    Pass {
        /// To which rank along the axis, if to any.
        to: Option<usize>,
        /// From which rank along the axis, if from any.
        from: Option<usize>,
    },
}

/// Which cell a recurrent layer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cell {
    /// Gates i, f, g, o and a cell state.
    Lstm,
    /// Gates r, z, n.
    Gru,
}

impl Cell {
    /// How many gates, each as wide as the hidden state.
    pub fn gates(self) -> usize {
        match self {
            Cell::Lstm => 4,
            Cell::Gru => 3,
        }
    }
}

/// What a node computes. Operands are the node's inputs, in the order that each variant states.
#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    /// What is fed to each run; by index into the graph's inputs.
    Input(usize),
    /// A parameter, by index.
    Param(usize),
    /// A value kept from step to step without a gradient, such as running statistics; by index.
    State(usize),
    /// A scalar constant.
    Const(f32),

    /// Element-wise, one operand.
    Unary(Unary),
    /// Element-wise, two operands that broadcast.
    Binary(Binary),
    /// `(condition, a, b)`: a where the condition is not zero, else b.
    Select,
    /// A chain of element-wise ops in one pass, evaluated in f32; all outputs have the node's shape, and each is stored in its
    /// own type.
    Fused(Expr),
    /// Another op, followed by element-wise ops on each finished block of its first output.
    Epilogue(Box<Epilogue>),

    /// The same elements in another shape; no copy.
    Reshape,
    /// Repeats dims of length 1.
    Expand,
    /// Reorders dims: dim `i` of the result is dim `perm[i]`.
    Permute(Vec<usize>),
    /// `start..start + len` of one dim.
    Slice {
        /// The dim.
        axis: usize,
        /// The first index taken.
        start: usize,
        /// How many.
        len: usize,
    },
    /// Operands one after another along a dim.
    Concat {
        /// The dim.
        axis: usize,
    },
    /// Adds constant elements before and after along a dim.
    Pad {
        /// The dim.
        axis: usize,
        /// How many before.
        before: usize,
        /// How many after.
        after: usize,
        /// Their value.
        value: f32,
    },
    /// `(x, indices)`: `y[.., i, ..] = x[.., indices[.., i, ..], ..]` along a dim.
    Gather {
        /// The dim.
        axis: usize,
    },
    /// `(dy, indices)`: the gradient of gather; the dim gets length `len`.
    ScatterAdd {
        /// The dim.
        axis: usize,
        /// Its length.
        len: usize,
    },
    /// Converts to another element type.
    Cast(DType),
    /// Reduces along dims, which stay with length 1.
    Reduce {
        /// Sum, mean, maximum or minimum.
        kind: ReduceKind,
        /// Along which dims, ascending.
        axes: Vec<usize>,
    },

    /// `(a, b)`: `[.., m, k]·[.., k, n]`, stored transposed if `ta` or `tb`. A rank-2 `b` serves all of `a`.
    MatMul {
        /// `a` is stored `[.., k, m]`.
        ta: bool,
        /// `b` is stored `[.., n, k]`.
        tb: bool,
        /// The format that operands in f32 are rounded to as they are read.
        rounded: Option<DType>,
    },
    /// `(x [n,h,w,c], weight [o, c/groups, kh, kw])`.
    Conv2d(Conv),
    /// `(dy [n,oh,ow,o], weight)` → `dx [n,h,w,c]`; as a forward op, the transposed convolution.
    Conv2dGradInput {
        /// Of the convolution whose gradient this is.
        conv: Conv,
        /// Rows and columns of `dx`.
        size: (usize, usize),
    },
    /// `(x, dy)` → `dweight`.
    Conv2dGradWeight {
        /// Of the convolution whose gradient this is.
        conv: Conv,
        /// Rows and columns of the kernel.
        kernel: (usize, usize),
    },
    /// `x` → `(y, where the maximum was)`.
    MaxPool(Window),
    /// `(dy, where)` → `dx`.
    MaxPoolGrad {
        /// Of the pooling whose gradient this is.
        window: Window,
        /// Rows and columns of `dx`.
        size: (usize, usize),
    },
    /// `x` → `y`.
    AvgPool(Window),
    /// `dy` → `dx`.
    AvgPoolGrad {
        /// Of the pooling whose gradient this is.
        window: Window,
        /// Rows and columns of `dx`.
        size: (usize, usize),
    },

    /// `(x [.., c], gamma, beta, running mean, running variance)` → `(y, mean, rstd, new running mean, new running
    /// variance)`, with the batch's statistics.
    BatchNorm {
        /// Added to the variance.
        eps: f32,
        /// The weight of the batch in the running statistics.
        momentum: f32,
        /// Whether `y` is clamped at zero.
        relu: bool,
    },
    /// `(dy, x, gamma, beta, mean, rstd)` → `(dx, dgamma, dbeta)`.
    BatchNormGrad {
        /// Whether `y` was clamped at zero; where it was is found from `x`.
        relu: bool,
    },
    /// What the ranks along an axis of the mesh make of their `x` together; every rank waits for it. The gradient of a sum is
    /// a sum; the others are added after differentiation.
    Exchange {
        /// The axis.
        axis: Axis,
        /// What they make of it.
        kind: ExchangeKind,
    },
    /// `(x [.., c], shift)` → `[1 + 2·c]`: how many rows, and of each channel the sums of `x - shift` and of its square.
    BatchNormSums,
    /// `(x [.., c], gamma, beta, running mean, running variance, sums)` → as [`Op::BatchNorm`], with the statistics of
    /// the rows that were summed. The sums are those of [`Op::BatchNormSums`] about the running mean.
    BatchNormFromSums {
        /// Added to the variance.
        eps: f32,
        /// The weight of the batch in the running statistics.
        momentum: f32,
        /// Whether `y` is clamped at zero.
        relu: bool,
    },
    /// `(dy, x, gamma, beta, mean, rstd)` → `(sums [1 + 2·c], dgamma, dbeta)`: how many rows, then `dbeta` and
    /// `dgamma`, which are the gradients of these rows alone.
    BatchNormGradSums {
        /// Whether `y` was clamped at zero.
        relu: bool,
    },
    /// `(dy, x, gamma, beta, mean, rstd, sums)` → `dx`.
    BatchNormGradFromSums {
        /// Whether `y` was clamped at zero.
        relu: bool,
    },
    /// `(x [.., c], gamma, beta)` → `(y, mean, rstd)` over the last dim.
    LayerNorm {
        /// Added to the variance.
        eps: f32,
    },
    /// `(dy, x, gamma, mean, rstd)` → `(dx, dgamma, dbeta)`.
    LayerNormGrad,
    /// `(x [.., c], gamma)` → `(y, rstd)` over the last dim.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `(dy, x, gamma, rstd)` → `(dx, dgamma)`.
    RmsNormGrad,
    /// `(x [n, .., c], gamma, beta)` → `(y, mean [n, groups], rstd)`.
    GroupNorm {
        /// How many groups of channels.
        groups: usize,
        /// Added to the variance.
        eps: f32,
    },
    /// `(dy, x, gamma, mean, rstd)` → `(dx, dgamma, dbeta)`.
    GroupNormGrad {
        /// How many groups of channels.
        groups: usize,
    },

    /// Along a dim.
    Softmax {
        /// The dim.
        axis: usize,
    },
    /// `(dy, y)` → `dx`.
    SoftmaxGrad {
        /// The dim.
        axis: usize,
    },
    /// Along a dim.
    LogSoftmax {
        /// The dim.
        axis: usize,
    },
    /// `(dy, y)` → `dx`.
    LogSoftmaxGrad {
        /// The dim.
        axis: usize,
    },
    /// `(logits [n, c], labels [n])`, with class weights `[c]` as a third operand if any → `(mean loss, lse [n])`.
    CrossEntropy(CrossEntropy),
    /// `(dloss, logits, labels, lse)` and the class weights if any → `dlogits`.
    CrossEntropyGrad(CrossEntropy),

    /// `(ids, table [v, d])` → `[ids.., d]`.
    Embedding,
    /// `(ids, dy)` → `dtable`.
    EmbeddingGrad {
        /// `v`.
        rows: usize,
    },
    /// `(qkv)` or `(q, k, v)`, and an additive mask if any → `(o [b, t, heads, d], lse [b, heads, t])`. The mask is
    /// `[t, t_k]`, `[b, t, t_k]`, `[b, heads, t, t_k]`, or `[b, 1, t_k]`: the same for all queries of a sample.
    Attention(Attention),
    /// `(do, o, lse)` and then the operands of the attention → `dqkv` or `(dq, dk, dv)`.
    AttentionGrad(Attention),
    /// Zeroes elements at random and scales the rest; the mask is a function of the run's seed, the step and `stream`,
    /// so it is drawn again and never stored.
    Dropout {
        /// The probability.
        p: f32,
        /// Distinguishes this mask from the model's others.
        stream: u64,
        /// Where the elements lie in the tensor of all ranks, if this rank has a part of each sample.
        slab: Option<Slab>,
    },
    /// `(xp [b, t, gates·h], w_hh [gates·h, h], b_hh [gates·h], h0 [b, h])`, for LSTM also `c0 [b, h]`
    /// → LSTM: `(y [b, t, h], cells, gates)`; GRU: `(y, gates)`, where gates has `4·h`.
    Recurrent {
        /// Which cell.
        cell: Cell,
        /// Whether time runs from the end.
        reverse: bool,
    },
    /// `(dy, the operands but b_hh for LSTM.., the outputs)` → `(dxp, dw_hh, db_hh, dh0[, dc0])`. The gradients of the final
    /// states `dh_n[, dc_n]` may follow, for a sequence that goes on elsewhere.
    RecurrentGrad {
        /// Which cell.
        cell: Cell,
        /// Whether time ran from the end.
        reverse: bool,
    },
}

/// An op with element-wise work attached to its first output.
#[derive(Clone, PartialEq, Debug)]
pub struct Epilogue {
    /// The op; its inputs are the node's first `n_base_inputs`.
    pub base: Op,
    /// How many of the node's inputs are the base's.
    pub n_base_inputs: usize,
    /// Input 0 is the base's first output, the others are the rest of the node's inputs.
    pub expr: Expr,
    /// The element types of the expression's outputs, in which they are stored; it is evaluated in f32.
    pub dtypes: Vec<DType>,
    /// Whether the base's first output is one of the node's outputs too; if not, the expression's first output
    /// takes its place. The base's other outputs follow, then the expression's (other) outputs.
    pub keeps_base: bool,
}

impl Op {
    /// The name for errors and listings.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input(_) => "input",
            Op::Param(_) => "param",
            Op::State(_) => "state",
            Op::Const(_) => "const",
            Op::Unary(op) => unary_name(*op),
            Op::Binary(op) => binary_name(*op),
            Op::Select => "select",
            Op::Fused(_) => "fused",
            Op::Epilogue(e) => e.base.name(),
            Op::Reshape => "reshape",
            Op::Expand => "expand",
            Op::Permute(_) => "permute",
            Op::Slice { .. } => "slice",
            Op::Concat { .. } => "concat",
            Op::Pad { .. } => "pad",
            Op::Gather { .. } => "gather",
            Op::ScatterAdd { .. } => "scatter_add",
            Op::Cast(_) => "cast",
            Op::Reduce { kind: ReduceKind::Sum, .. } => "sum",
            Op::Reduce { kind: ReduceKind::Mean, .. } => "mean",
            Op::Reduce { kind: ReduceKind::Max, .. } => "max",
            Op::Reduce { kind: ReduceKind::Min, .. } => "min",
            Op::MatMul { .. } => "matmul",
            Op::Conv2d(_) => "conv2d",
            Op::Conv2dGradInput { .. } => "conv2d_grad_input",
            Op::Conv2dGradWeight { .. } => "conv2d_grad_weight",
            Op::MaxPool(_) => "max_pool",
            Op::MaxPoolGrad { .. } => "max_pool_grad",
            Op::AvgPool(_) => "avg_pool",
            Op::AvgPoolGrad { .. } => "avg_pool_grad",
            Op::BatchNorm { .. } => "batch_norm",
            Op::BatchNormGrad { .. } => "batch_norm_grad",
            Op::Exchange { kind: ExchangeKind::Sum, .. } => "axis_sum",
            Op::Exchange { kind: ExchangeKind::Gather { .. }, .. } => "axis_gather",
            Op::Exchange { kind: ExchangeKind::Scatter { .. }, .. } => "axis_scatter",
            Op::Exchange { kind: ExchangeKind::Swap { .. }, .. } => "axis_swap",
            Op::Exchange { kind: ExchangeKind::Pass { .. }, .. } => "axis_pass",
            Op::BatchNormSums => "batch_norm_sums",
            Op::BatchNormFromSums { .. } => "batch_norm_from_sums",
            Op::BatchNormGradSums { .. } => "batch_norm_grad_sums",
            Op::BatchNormGradFromSums { .. } => "batch_norm_grad_from_sums",
            Op::LayerNorm { .. } => "layer_norm",
            Op::LayerNormGrad => "layer_norm_grad",
            Op::RmsNorm { .. } => "rms_norm",
            Op::RmsNormGrad => "rms_norm_grad",
            Op::GroupNorm { .. } => "group_norm",
            Op::GroupNormGrad { .. } => "group_norm_grad",
            Op::Softmax { .. } => "softmax",
            Op::SoftmaxGrad { .. } => "softmax_grad",
            Op::LogSoftmax { .. } => "log_softmax",
            Op::LogSoftmaxGrad { .. } => "log_softmax_grad",
            Op::CrossEntropy(_) => "cross_entropy",
            Op::CrossEntropyGrad(_) => "cross_entropy_grad",
            Op::Embedding => "embedding",
            Op::EmbeddingGrad { .. } => "embedding_grad",
            Op::Attention(_) => "attention",
            Op::AttentionGrad(_) => "attention_grad",
            Op::Dropout { .. } => "dropout",
            Op::Recurrent { cell: Cell::Lstm, .. } => "lstm",
            Op::Recurrent { cell: Cell::Gru, .. } => "gru",
            Op::RecurrentGrad { cell: Cell::Lstm, .. } => "lstm_grad",
            Op::RecurrentGrad { cell: Cell::Gru, .. } => "gru_grad",
        }
    }

    /// Whether the node is given its value rather than computing it.
    pub fn is_leaf(&self) -> bool {
        matches!(self, Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_))
    }

    /// Whether every output element depends on the operands' elements at the same (broadcast) index alone. Such an op can
    /// join a fused pass, if it has to do with floats.
    pub fn is_elementwise(&self) -> bool {
        matches!(self, Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Expand | Op::Cast(_) | Op::Fused(_))
    }

    /// Whether the executor can run element-wise work on finished blocks of the first output.
    pub fn takes_epilogue(&self) -> bool {
        matches!(
            self,
            Op::MatMul { .. } | Op::Conv2d(_) | Op::BatchNorm { .. } | Op::BatchNormFromSums { .. }
        )
    }
}
