//! The tracing API: a model is a function that takes a [`Builder`] and tensors and returns tensors.
//!
//! Every call checks shapes at once, and an error names the layer in whose scope it happened.

use std::sync::Arc;

use polyreme_kernels::elementwise::{Binary, Expr, Unary};

use crate::error::{TraceError, TraceErrorKind};
use crate::graph::{Graph, Init, Input, Stored, ValueId};
use crate::memory::reshape_root;
use crate::op::{Attention, Cell, Conv, CrossEntropy, ExchangeKind, Op, ReduceKind, Window};
use crate::program::Axis;
use crate::shape::{DType, Shape};
use crate::tuning::{Learning, Tuning};

/// How the difference of an element and its target counts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ErrorKind {
    /// Its square.
    Squared,
    /// Its absolute value.
    Absolute,
    /// Half its square up to `delta`, and linear beyond, as PyTorch's `HuberLoss`.
    Huber {
        /// From where on it is linear.
        delta: f32,
    },
    /// The binary cross-entropy of a logit and a target in 0..=1.
    Bce,
}

/// A handle to a value that is being traced.
pub type Tensor = ValueId;

/// The result of tracing.
pub type Traced<T = Tensor> = Result<T, TraceError>;

/// Records a model's ops.
#[derive(Default)]
pub struct Builder {
    graph: Graph,
    scope: Vec<String>,
    n_streams: u64,
    tuning: Option<Arc<Tuning>>,
}

impl Builder {
    /// An empty trace.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Says how the parameters that are declared from here on are learnt.
    pub fn tune(&mut self, tuning: Arc<Tuning>) {
        self.tuning = Some(tuning);
    }

    /// The rank and the scale of the factors that a linear layer in this scope gets beside it, if it does.
    pub fn low_rank(&self) -> Option<(usize, f32)> {
        let low = self.tuning.as_ref()?.low_rank.as_ref()?;
        let path = self.scope.join(".");
        low.on.iter().any(|pattern| pattern.matches(&path)).then_some((low.rank, low.scale))
    }

    /// Ends the trace with these named outputs.
    pub fn finish(mut self, outputs: &[(&str, Tensor)]) -> Graph {
        self.graph.outputs = outputs.iter().map(|&(n, v)| (n.to_string(), v)).collect();
        self.graph.n_forward = self.graph.nodes.len();
        let n_params = self.graph.params.len();
        self.graph.states.iter_mut().enumerate().for_each(|(k, state)| state.number = n_params + k);
        self.graph.verify();
        self.graph
    }

    /// Runs `f` inside a layer: names of parameters and errors get `name.` in front.
    pub fn layer<T>(&mut self, name: impl Into<String>, f: impl FnOnce(&mut Builder) -> T) -> T {
        self.scope.push(name.into());
        let result = f(self);
        self.scope.pop();
        result
    }

    /// The shape of `x`.
    pub fn shape(&self, x: Tensor) -> &Shape {
        self.graph.shape(x)
    }
    /// The dims of `x`.
    pub fn dims(&self, x: Tensor) -> Vec<usize> {
        self.shape(x).dims().to_vec()
    }

    /// An error at the present layer.
    pub fn error<T>(&self, kind: TraceErrorKind) -> Traced<T> {
        Err(TraceError { layer: self.path(), kind })
    }

    // Leaves.

    /// Something fed to each run.
    pub fn input(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType) -> Traced {
        if self.graph.inputs.iter().any(|i| i.name == name) {
            return self.error(TraceErrorKind::Duplicate { what: "input", name: name.into() });
        }
        let op = Op::Input(self.graph.inputs.len());
        let value = self.graph.push_leaf(op, shape.into(), dtype, name);
        self.graph.inputs.push(Input { name: name.into(), value });
        Ok(value)
    }

    /// A parameter of the present layer.
    pub fn param(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Traced {
        let name = self.join(name);
        if self.graph.params.iter().any(|p| p.name == name) {
            return self.error(TraceErrorKind::Duplicate { what: "parameter", name });
        }
        let (op, layer) = (Op::Param(self.graph.params.len()), self.path());
        let value = self.graph.push_leaf(op, shape.into(), DType::F32, &layer);
        let number = self.graph.params.len();
        let learning = self.tuning.as_ref().map_or(Learning::PLAIN, |tuning| tuning.of(&name));
        self.graph.params.push(Stored { name, value, init, number, part: None, shard: None, learning });
        Ok(value)
    }

    /// A state of the present layer: kept from step to step, without a gradient.
    pub fn state(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Traced {
        let name = self.join(name);
        if self.graph.states.iter().any(|s| s.name == name) {
            return self.error(TraceErrorKind::Duplicate { what: "state", name });
        }
        let (op, layer) = (Op::State(self.graph.states.len()), self.path());
        let value = self.graph.push_leaf(op, shape.into(), DType::F32, &layer);
        let number = self.graph.states.len();
        let learning = Learning::PLAIN;
        self.graph.states.push(Stored { name, value, init, number, part: None, shard: None, learning });
        Ok(value)
    }

    /// Says what a state becomes at the end of the step; the last call wins.
    pub fn update_state(&mut self, state: Tensor, value: Tensor) -> Traced<()> {
        let op = "update_state";
        let Some(idx) = self.graph.states.iter().position(|s| s.value == state) else {
            let why = "its target is not a state; make it with `state`".into();
            return self.error(TraceErrorKind::Option { op, why });
        };
        let (left, right) = (self.shape(state).clone(), self.shape(value).clone());
        if left != right {
            let why = "a state keeps its shape".into();
            return self.error(TraceErrorKind::Shapes { op, left, right, why });
        }
        // States change one after another, so what another state was at the start of the step is copied first.
        let root = reshape_root(&self.graph, value);
        let is_state = matches!(self.graph.producer(root).op, Op::State(_));
        let value = if is_state { self.scale(value, 1.0)? } else { value };
        self.graph.updates.retain(|(s, _)| *s != idx);
        self.graph.updates.push((idx, value));
        Ok(())
    }

    /// A scalar constant.
    pub fn constant(&mut self, value: f32) -> Tensor {
        let layer = self.path();
        self.graph.push_leaf(Op::Const(value), Shape::scalar(), DType::F32, &layer)
    }

    // Element-wise.

    /// One element-wise op.
    pub fn unary(&mut self, op: Unary, x: Tensor) -> Traced {
        self.push(Op::Unary(op), &[x])
    }
    /// One element-wise op on two operands that broadcast.
    pub fn binary(&mut self, op: Binary, a: Tensor, b: Tensor) -> Traced {
        self.push(Op::Binary(op), &[a, b])
    }
    /// `a + b`.
    pub fn add(&mut self, a: Tensor, b: Tensor) -> Traced {
        self.binary(Binary::Add, a, b)
    }
    /// `a - b`.
    pub fn sub(&mut self, a: Tensor, b: Tensor) -> Traced {
        self.binary(Binary::Sub, a, b)
    }
    /// `a * b`.
    pub fn mul(&mut self, a: Tensor, b: Tensor) -> Traced {
        self.binary(Binary::Mul, a, b)
    }
    /// `a / b`.
    pub fn div(&mut self, a: Tensor, b: Tensor) -> Traced {
        self.binary(Binary::Div, a, b)
    }
    /// `x * factor`.
    pub fn scale(&mut self, x: Tensor, factor: f32) -> Traced {
        self.unary(Unary::Scale(factor), x)
    }
    /// `a` where `condition` is not zero, else `b`.
    pub fn select(&mut self, condition: Tensor, a: Tensor, b: Tensor) -> Traced {
        self.push(Op::Select, &[condition, a, b])
    }
    /// An activation by its name, as job files give it.
    pub fn activation(&mut self, name: &str, x: Tensor) -> Traced {
        match ACTIVATIONS.iter().find(|(n, _)| *n == name) {
            Some((_, None)) => Ok(x),
            Some((_, Some(op))) => self.unary(*op, x),
            None => self.error(TraceErrorKind::Unknown {
                what: "activation",
                name: name.into(),
                known: ACTIVATIONS.map(|(n, _)| n).join(", "),
            }),
        }
    }
    /// Zeroes each element with probability `p` and scales the rest by `1/(1-p)`.
    pub fn dropout(&mut self, x: Tensor, p: f32) -> Traced {
        if !(0.0..1.0).contains(&p) {
            let why = format!("the share {p} is not in 0..1");
            return self.error(TraceErrorKind::Option { op: "dropout", why });
        }
        if p == 0.0 {
            return Ok(x);
        }
        self.n_streams += 1;
        self.push(Op::Dropout { p, stream: self.n_streams, slab: None }, &[x])
    }
    /// Converts to another element type.
    pub fn cast(&mut self, x: Tensor, to: DType) -> Traced {
        let from = self.graph.value(x).dtype;
        match (from, to) {
            _ if from == to => Ok(x),
            (DType::F32, _) | (_, DType::F32) => self.push(Op::Cast(to), &[x]),
            // Through f32: no kernel converts between two half-precision formats directly.
            _ => {
                let wide = self.push(Op::Cast(DType::F32), &[x])?;
                self.push(Op::Cast(to), &[wide])
            }
        }
    }

    /// In f32, if it is in half precision.
    fn wide(&mut self, x: Tensor) -> Traced {
        match self.graph.value(x).dtype {
            DType::F16 | DType::Bf16 => self.cast(x, DType::F32),
            _ => Ok(x),
        }
    }

    // Shapes.

    /// The same elements in another shape.
    pub fn reshape(&mut self, x: Tensor, shape: impl Into<Shape>) -> Traced {
        let (shape, from) = (shape.into(), self.shape(x).clone());
        if shape.numel() != from.numel() {
            let why = format!("they have {} and {} elements", from.numel(), shape.numel());
            return self.error(TraceErrorKind::Shapes { op: "reshape", left: from, right: shape, why });
        }
        Ok(self.graph.reshape(x, shape, &self.path()))
    }
    /// Repeats dims of length 1, by the rule of broadcasting.
    pub fn expand(&mut self, x: Tensor, shape: impl Into<Shape>) -> Traced {
        let (shape, from) = (shape.into(), self.shape(x).clone());
        if from.broadcast(&shape).as_ref() != Some(&shape) || shape.rank() > Expr::RANK_MAX {
            let why = format!("only dims of length 1 can be repeated, to {} dims at most", Expr::RANK_MAX);
            return self.error(TraceErrorKind::Shapes { op: "expand", left: from, right: shape, why });
        }
        Ok(self.graph.expand(x, shape, &self.path()))
    }
    /// Dims in another order.
    pub fn permute(&mut self, x: Tensor, perm: &[usize]) -> Traced {
        self.push(Op::Permute(perm.to_vec()), &[x])
    }
    /// Swaps two dims.
    pub fn transpose(&mut self, x: Tensor, a: usize, b: usize) -> Traced {
        let mut perm: Vec<_> = (0..self.shape(x).rank()).collect();
        if a.max(b) >= perm.len() {
            let why = format!("it has no dim {}", a.max(b));
            return self.error(TraceErrorKind::Shape { op: "transpose", shape: self.shape(x).clone(), why });
        }
        perm.swap(a, b);
        self.permute(x, &perm)
    }
    /// `start..start + len` of one dim.
    pub fn slice(&mut self, x: Tensor, axis: usize, start: usize, len: usize) -> Traced {
        self.push(Op::Slice { axis, start, len }, &[x])
    }
    /// Equal parts along a dim.
    pub fn split(&mut self, x: Tensor, axis: usize, pieces: usize) -> Traced<Vec<Tensor>> {
        let have = self.shape(x).dims().get(axis).copied().unwrap_or(0);
        if pieces == 0 || !have.is_multiple_of(pieces) {
            let why = format!("dim {axis} does not split into {pieces} equal parts");
            return self.error(TraceErrorKind::Shape { op: "split", shape: self.shape(x).clone(), why });
        }
        let len = have / pieces;
        (0..pieces).map(|i| self.slice(x, axis, i * len, len)).collect()
    }
    /// Concatenates along a dim.
    pub fn concat(&mut self, xs: &[Tensor], axis: usize) -> Traced {
        if xs.is_empty() {
            return self.error(TraceErrorKind::Option {
                op: "concat",
                why: "there is nothing to concatenate".into(),
            });
        }
        self.push(Op::Concat { axis }, xs)
    }
    /// Adds constant elements before and after along a dim.
    pub fn pad(&mut self, x: Tensor, axis: usize, before: usize, after: usize, value: f32) -> Traced {
        self.push(Op::Pad { axis, before, after, value }, &[x])
    }
    /// `y[.., i, ..] = x[.., indices[.., i, ..], ..]` along a dim.
    pub fn gather(&mut self, x: Tensor, axis: usize, indices: Tensor) -> Traced {
        self.push(Op::Gather { axis }, &[x, indices])
    }

    // Reductions.

    /// Reduces along dims, which stay with length 1 if `keep`.
    pub fn reduce(&mut self, kind: ReduceKind, x: Tensor, axes: &[usize], keep: bool) -> Traced {
        let mut axes = axes.to_vec();
        axes.sort_unstable();
        axes.dedup();
        let y = self.push(Op::Reduce { kind, axes: axes.clone() }, &[x])?;
        if keep {
            return Ok(y);
        }
        let dims: Vec<_> = self.dims(y).into_iter().enumerate().filter(|(i, _)| !axes.contains(i)).collect();
        let dims: Vec<_> = dims.into_iter().map(|(_, d)| d).collect();
        self.reshape(y, dims)
    }
    /// The mean over dims, which are removed.
    pub fn mean(&mut self, x: Tensor, axes: &[usize]) -> Traced {
        self.reduce(ReduceKind::Mean, x, axes, false)
    }
    /// The sum over dims, which are removed.
    pub fn sum(&mut self, x: Tensor, axes: &[usize]) -> Traced {
        self.reduce(ReduceKind::Sum, x, axes, false)
    }
    /// The mean of all elements, a scalar.
    pub fn mean_all(&mut self, x: Tensor) -> Traced {
        let axes: Vec<_> = (0..self.shape(x).rank()).collect();
        self.mean(x, &axes)
    }

    // Products.

    /// `a·b`; `ta` and `tb` say which operands are stored transposed.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, ta: bool, tb: bool) -> Traced {
        self.product(Op::MatMul { ta, tb, rounded: None }, [a, b], None)
    }
    /// `x·weightᵀ + bias`; the weight is `[out, in]`.
    pub fn linear(&mut self, x: Tensor, weight: Tensor, bias: Option<Tensor>) -> Traced {
        self.product(Op::MatMul { ta: false, tb: true, rounded: None }, [x, weight], bias)
    }
    /// A 2-D convolution of `[n, h, w, c]` with `[out, in/groups, kh, kw]`.
    pub fn conv2d(&mut self, x: Tensor, weight: Tensor, bias: Option<Tensor>, conv: Conv) -> Traced {
        self.product(Op::Conv2d(conv), [x, weight], bias)
    }
    /// A product of operands of one type, which the result has again; it is rounded once, after the bias is added.
    fn product(&mut self, op: Op, operands: [Tensor; 2], bias: Option<Tensor>) -> Traced {
        let own = self.graph.value(operands[0]).dtype;
        let mut y = self.push(op, &operands)?;
        if let Some(bias) = bias {
            let bias = self.wide(bias)?;
            y = self.add(y, bias)?;
        }
        self.cast(y, own)
    }
    /// A transposed 2-D convolution of `[n, h, w, in]` with `[in, out/groups, kh, kw]`.
    pub fn conv_transpose2d(
        &mut self,
        x: Tensor,
        weight: Tensor,
        bias: Option<Tensor>,
        conv: Conv,
        output_padding: (usize, usize),
    ) -> Traced {
        let op = "conv_transpose2d";
        let misfit = |why: String| {
            let (left, right) = (self.shape(x).clone(), self.shape(weight).clone());
            self.error(TraceErrorKind::Shapes { op, left, right, why })
        };
        let (&[_, h, w, c], &[c_in, _, kh, kw]) = (self.shape(x).dims(), self.shape(weight).dims()) else {
            return misfit("[n, h, w, in] and [in, out/groups, kh, kw] are needed".into());
        };
        if c != c_in || conv.groups == 0 || c % conv.groups != 0 {
            let groups = conv.groups;
            return misfit(format!(
                "{c} channels in {groups} group(s) need a weight of [{c}, out/groups, kh, kw]"
            ));
        }
        if [h, w, kh, kw].contains(&0) {
            return misfit("the image and the kernel need at least one pixel".into());
        }
        let out = |len: usize, k: usize, stride: usize, pad: usize, dilation: usize, extra: usize| {
            ((len - 1) * stride + (k - 1) * dilation + 1 + extra).checked_sub(2 * pad).filter(|&l| l > 0)
        };
        let size = (
            out(h, kh, conv.stride.0, conv.padding.0, conv.dilation.0, output_padding.0),
            out(w, kw, conv.stride.1, conv.padding.1, conv.dilation.1, output_padding.1),
        );
        let (Some(oh), Some(ow)) = size else {
            let why = format!("padding {:?} leaves no output", conv.padding);
            return self.error(TraceErrorKind::Option { op, why });
        };
        if output_padding.0 >= conv.stride.0.max(conv.dilation.0)
            || output_padding.1 >= conv.stride.1.max(conv.dilation.1)
        {
            let why =
                format!("output padding {output_padding:?} must be less than the stride or the dilation");
            return self.error(TraceErrorKind::Option { op, why });
        }
        let y = self.push(Op::Conv2dGradInput { conv, size: (oh, ow) }, &[x, weight])?;
        bias.map_or(Ok(y), |b| self.add(y, b))
    }
    /// The maximum of each window.
    pub fn max_pool(&mut self, x: Tensor, window: Window) -> Traced {
        self.push(Op::MaxPool(window), &[x])
    }
    /// The mean of each window.
    pub fn avg_pool(&mut self, x: Tensor, window: Window) -> Traced {
        self.push(Op::AvgPool(window), &[x])
    }

    // Ranks.

    /// The sum of `x` over the ranks of the data axis; on a lone rank, `x`.
    pub fn axis_sum(&mut self, x: Tensor) -> Traced {
        self.push(Op::Exchange { axis: Axis::Data, kind: ExchangeKind::Sum }, &[x])
    }

    // Norms.

    /// Batch norm over all dims but the last. Training normalises by the batch's statistics and updates the running
    /// ones; evaluation normalises by the running ones.
    pub fn batch_norm(&mut self, x: Tensor, at: BatchNorm, training: bool) -> Traced {
        let BatchNorm { gamma, beta, running_mean, running_var, eps, momentum } = at;
        if training {
            let op = Op::BatchNorm { eps, momentum, relu: false };
            let out = self.push_all(op, &[x, gamma, beta, running_mean, running_var])?;
            self.update_state(running_mean, out[3])?;
            self.update_state(running_var, out[4])?;
            return Ok(out[0]);
        }
        let var = self.unary(Unary::Offset(eps), running_var)?;
        let rstd = self.unary(Unary::Rsqrt, var)?;
        let factor = self.mul(rstd, gamma)?;
        // Statistics are f32; the result has the type of the data, as in training.
        let (own, x) = (self.graph.value(x).dtype, self.wide(x)?);
        let centred = self.sub(x, running_mean)?;
        let scaled = self.mul(centred, factor)?;
        let y = self.add(scaled, beta)?;
        self.cast(y, own)
    }
    /// Layer norm over the last dim.
    pub fn layer_norm(&mut self, x: Tensor, gamma: Tensor, beta: Tensor, eps: f32) -> Traced {
        self.push(Op::LayerNorm { eps }, &[x, gamma, beta])
    }
    /// RMS norm over the last dim.
    pub fn rms_norm(&mut self, x: Tensor, gamma: Tensor, eps: f32) -> Traced {
        self.push(Op::RmsNorm { eps }, &[x, gamma])
    }
    /// Group norm of `[n, .., c]`.
    pub fn group_norm(&mut self, x: Tensor, gamma: Tensor, beta: Tensor, groups: usize, eps: f32) -> Traced {
        self.push(Op::GroupNorm { groups, eps }, &[x, gamma, beta])
    }

    // Softmax and losses.

    /// Softmax along a dim.
    pub fn softmax(&mut self, x: Tensor, axis: usize) -> Traced {
        self.push(Op::Softmax { axis }, &[x])
    }
    /// Log-softmax along a dim.
    pub fn log_softmax(&mut self, x: Tensor, axis: usize) -> Traced {
        self.push(Op::LogSoftmax { axis }, &[x])
    }
    /// The mean cross-entropy of `[samples, classes]` and integer labels, with class weights if any.
    pub fn cross_entropy(
        &mut self,
        logits: Tensor,
        labels: Tensor,
        weights: Option<Tensor>,
        options: CrossEntropy,
    ) -> Traced {
        let operands: Vec<_> = [logits, labels].into_iter().chain(weights).collect();
        self.push(Op::CrossEntropy(options), &operands)
    }
    /// The mean squared difference.
    pub fn mse(&mut self, x: Tensor, target: Tensor) -> Traced {
        let each = self.error_of(ErrorKind::Squared, x, target)?;
        self.mean_all(each)
    }
    /// The mean binary cross-entropy of logits and targets in 0..=1.
    pub fn bce_with_logits(&mut self, x: Tensor, target: Tensor) -> Traced {
        let each = self.error_of(ErrorKind::Bce, x, target)?;
        self.mean_all(each)
    }
    /// How far each element is from its target.
    pub fn error_of(&mut self, kind: ErrorKind, x: Tensor, target: Tensor) -> Traced {
        let (x, target) = (self.wide(x)?, self.wide(target)?);
        match kind {
            ErrorKind::Squared => {
                let d = self.sub(x, target)?;
                self.unary(Unary::Square, d)
            }
            ErrorKind::Absolute => {
                let d = self.sub(x, target)?;
                self.unary(Unary::Abs, d)
            }
            ErrorKind::Huber { delta } => {
                // With c = clamp(d, -δ, δ), c·(d - c/2) is d²/2 where |d| ≤ δ, and δ·(|d| - δ/2) beyond. Its gradient is
                // c, as d - c is 0 wherever c changes with d.
                let d = self.sub(x, target)?;
                let c = self.unary(Unary::Clamp(-delta, delta), d)?;
                let half = self.scale(c, 0.5)?;
                let rest = self.sub(d, half)?;
                self.mul(c, rest)
            }
            ErrorKind::Bce => {
                // -(t·ln σ(x) + (1-t)·ln(1-σ(x))) = softplus(x) - t·x, which does not overflow.
                let s = self.unary(Unary::Softplus, x)?;
                let tx = self.mul(x, target)?;
                self.sub(s, tx)
            }
        }
    }

    // Sequences.

    /// Rows of a table by index.
    pub fn embedding(&mut self, ids: Tensor, table: Tensor) -> Traced {
        self.push(Op::Embedding, &[ids, table])
    }
    /// Attention of `[b, t, 3, heads, d]`: queries, keys and values in one tensor.
    pub fn attention_packed(&mut self, qkv: Tensor, causal: bool, mask: Option<Tensor>) -> Traced {
        let scale = 1.0 / (self.shape(qkv).last() as f32).sqrt();
        let operands: Vec<_> = [qkv].into_iter().chain(mask).collect();
        self.push(Op::Attention(Attention { causal, scale, packed: true }), &operands)
    }
    /// Attention of `q`, `k`, `v`, each `[b, t, heads, d]`.
    pub fn attention(&mut self, [q, k, v]: [Tensor; 3], causal: bool, mask: Option<Tensor>) -> Traced {
        let scale = 1.0 / (self.shape(q).last() as f32).sqrt();
        let operands: Vec<_> = [q, k, v].into_iter().chain(mask).collect();
        self.push(Op::Attention(Attention { causal, scale, packed: false }), &operands)
    }
    /// One direction of an LSTM or GRU layer over `xp = x·w_ihᵀ + b_ih`, `[b, t, gates·h]`, from a zero state.
    pub fn recurrent(
        &mut self,
        cell: Cell,
        xp: Tensor,
        w_hh: Tensor,
        b_hh: Tensor,
        initial: &[Tensor],
        reverse: bool,
    ) -> Traced {
        let n_states = if cell == Cell::Lstm { 2 } else { 1 };
        let mut operands = vec![xp, w_hh, b_hh];
        if initial.is_empty() {
            let (b, h) = (self.shape(xp).dims().first().copied().unwrap_or(0), self.shape(w_hh).last());
            let zero = self.constant(0.0);
            let zeros = self.expand(zero, [b, h])?;
            let own = self.graph.value(xp).dtype;
            let zeros = if own.is_float() { self.cast(zeros, own)? } else { zeros };
            operands.extend(std::iter::repeat_n(zeros, n_states));
        } else if initial.len() == n_states {
            operands.extend_from_slice(initial);
        } else {
            let why = format!("{} initial states given, {n_states} needed", initial.len());
            return self.error(TraceErrorKind::Option { op: "recurrent", why });
        }
        self.push(Op::Recurrent { cell, reverse }, &operands)
    }

    fn push(&mut self, op: Op, inputs: &[Tensor]) -> Traced {
        Ok(self.push_all(op, inputs)?[0])
    }
    fn push_all(&mut self, op: Op, inputs: &[Tensor]) -> Traced<Vec<Tensor>> {
        let layer = self.path();
        self.graph.push(op, inputs, &layer)
    }
    fn path(&self) -> String {
        if self.scope.is_empty() { "model".into() } else { self.scope.join(".") }
    }
    fn join(&self, name: &str) -> String {
        self.scope.iter().map(String::as_str).chain([name]).collect::<Vec<_>>().join(".")
    }
}

/// The operands and options of a batch norm.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm {
    /// The learnt factor of each channel.
    pub gamma: Tensor,
    /// The learnt offset of each channel.
    pub beta: Tensor,
    /// A state.
    pub running_mean: Tensor,
    /// A state.
    pub running_var: Tensor,
    /// Added to the variance.
    pub eps: f32,
    /// The weight of the batch in the running statistics.
    pub momentum: f32,
}

/// The activations that can be asked for by name.
pub const ACTIVATIONS: [(&str, Option<Unary>); 12] = [
    ("none", None),
    ("relu", Some(Unary::Relu)),
    ("leaky_relu", Some(Unary::LeakyRelu(0.01))),
    ("elu", Some(Unary::Elu(1.0))),
    ("gelu", Some(Unary::Gelu)),
    ("gelu_tanh", Some(Unary::GeluTanh)),
    ("silu", Some(Unary::Silu)),
    ("sigmoid", Some(Unary::Sigmoid)),
    ("tanh", Some(Unary::Tanh)),
    ("softplus", Some(Unary::Softplus)),
    ("exp", Some(Unary::Exp)),
    ("abs", Some(Unary::Abs)),
];

impl Graph {
    /// Appends a reshape, or nothing if the shape is the same already.
    pub fn reshape(&mut self, x: ValueId, shape: Shape, layer: &str) -> ValueId {
        if *self.shape(x) == shape {
            return x;
        }
        let dtype = self.value(x).dtype;
        self.push_shaped(Op::Reshape, &[x], layer, vec![(shape, dtype)])[0]
    }
    /// Appends an expansion, or nothing if the shape is the same already.
    pub(crate) fn expand(&mut self, x: ValueId, shape: Shape, layer: &str) -> ValueId {
        if *self.shape(x) == shape {
            return x;
        }
        let dtype = self.value(x).dtype;
        self.push_shaped(Op::Expand, &[x], layer, vec![(shape, dtype)])[0]
    }
}
