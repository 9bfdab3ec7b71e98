//! Mixed precision: a rewrite of a step that stores activations and their gradients in half, and multiplies in half.
//!
//! ```text
//!  f32                                 bf16
//!  %4 = matmul tb %x %w    f32         %4 = matmul tb as bf16 %x %w   f32
//!  %5 = add %4 %b          f32         %5 = add %4 %b                 f32
//!  %6 = gelu %5            f32         %6 = cast bf16 %5              bf16   kept for the backward pass
//!                                      %7 = cast f32 %6               f32    inside the fused pass, not in memory
//!                                      %8 = gelu %7                   f32
//!                                      %9 = cast bf16 %8              bf16
//! ```
//!
//! Half is a format of storage: everything is computed in f32. A value is rounded where it would be stored, and everything
//! that reads it reads it rounded. What only exists between element-wise ops of one pass, which fusion joins, is not
//! rounded. This follows from the step as it was traced, not from what is fused or recomputed later.
//!
//! Parameters, their gradients, statistics and losses stay f32. A product takes a parameter, or what is fed to the step, as
//! it is and rounds it while it copies it, so there is no second copy of the weights.
//!
//! A layer that stays in f32 rounds nothing, and neither does what only such layers read. What other layers read too, it
//! reads rounded.

use crate::fuse::join_norm_relu_if;
use crate::graph::{Graph, Node, Rebuild, ValueId, is_within};
use crate::op::{ExchangeKind, Op};
use crate::program::Program;
use crate::shape::DType;

#[cfg(test)]
mod tests;

/// In which formats a step stores activations and multiplies, and by which algorithms.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Precision {
    /// Whether products and convolutions take no algorithm that trades accuracy for speed.
    pub strict: bool,
    /// Whether sums have one order on every machine, so that all come to the same bits, fast or not.
    pub reproducible: bool,
    /// f16 or bf16; `None` for f32 everywhere.
    pub half: Option<DType>,
    /// Layers that stay in f32: their paths, or the beginnings of paths.
    pub f32_layers: Vec<String>,
}

impl Precision {
    /// f32 everywhere.
    pub const F32: Precision =
        Precision { strict: false, reproducible: false, half: None, f32_layers: Vec::new() };

    /// The same without algorithms that trade accuracy for speed.
    pub const F32_STRICT: Precision =
        Precision { strict: true, reproducible: false, half: None, f32_layers: Vec::new() };

    /// This format wherever it is allowed.
    pub fn half(half: DType) -> Precision {
        assert!(is_half(half), "{half} is not a half-precision format");
        Precision { half: Some(half), ..Precision::F32 }
    }

    /// The graph of a step, or of a forward pass, in this precision.
    pub fn apply(&self, graph: &Graph) -> Graph {
        let Some(half) = self.half else { return graph.clone() };
        // Joined first, as fusion would: casts between the two would hide the pair. A layer that stays in f32 is not joined
        // with one that does not, which would make both the same.
        let alike = |norm: &Node, relu: &Node| self.is_f32(&norm.layer) == self.is_f32(&relu.layer);
        let graph = &join_norm_relu_if(graph, &alike);
        let mut rewrite = Rewrite {
            old: graph,
            half,
            stores: stores(graph, &|layer| self.is_f32(layer)),
            to: Rebuild::new(graph),
            rounded: vec![None; graph.values.len()],
        };
        for i in 0..graph.nodes.len() {
            if i == graph.n_forward {
                rewrite.to.graph.n_forward = rewrite.to.graph.nodes.len();
            }
            rewrite.node(i, self.is_f32(&graph.nodes[i].layer));
        }
        if graph.n_forward == graph.nodes.len() {
            rewrite.to.graph.n_forward = rewrite.to.graph.nodes.len();
        }
        rewrite.finish()
    }

    /// The program of a forward pass in this precision.
    pub fn forward(&self, graph: &Graph) -> Program {
        self.chosen_for(Program::forward(&self.apply(graph)))
    }

    /// The program of a forward and backward pass in this precision, without an update.
    pub fn gradients(&self, step: &Graph) -> Program {
        self.chosen_for(Program::gradients(&self.apply(step)))
    }

    /// A program whose kernels are chosen by this precision.
    fn chosen_for(&self, program: Program) -> Program {
        program.with_strict(self.strict).with_reproducible(self.reproducible)
    }

    /// Whether gradients need a larger loss: the smallest numbers of f16 are too large for many of them.
    pub fn scales_loss(&self) -> bool {
        self.half == Some(DType::F16)
    }

    fn is_f32(&self, layer: &str) -> bool {
        self.f32_layers.iter().any(|path| is_within(layer, path))
    }
}

/// Whether it is a half-precision format.
pub fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16)
}

/// In which format an op wants an operand.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Wants {
    /// In half: it multiplies.
    Half,
    /// In f32, or it is no float.
    Wide,
    /// As it is stored, but all such operands of a node in one format.
    Stored,
}

/// What op wants of its operand `k`: the row of each op.
fn wants(op: &Op, k: usize) -> Wants {
    use Wants::{Half, Stored, Wide};
    let first = |n: usize, wants: Wants| if k < n { wants } else { Wide };
    match op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) => unreachable!("a leaf has no operands"),
        Op::Fused(_) | Op::Epilogue(_) => unreachable!("fusion comes later"),

        // In registers, after what they read is widened.
        Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Expand | Op::Cast(_) => Wide,

        // Moved.
        Op::Reshape | Op::Permute(_) | Op::Slice { .. } | Op::Pad { .. } | Op::Dropout { .. } => Stored,
        Op::Concat { .. } => Stored,
        Op::Gather { .. } | Op::ScatterAdd { .. } => first(1, Stored),
        // The table is a parameter.
        Op::Embedding => Wide,
        Op::EmbeddingGrad { .. } => {
            if k == 1 {
                Stored
            } else {
                Wide
            }
        }

        // Sums over many elements: in f32, of what is stored.
        Op::Reduce { .. } => Stored,
        // Partial sums are added up in f32; what is only moved stays as it is stored.
        Op::Exchange { kind: ExchangeKind::Sum | ExchangeKind::Scatter { .. }, .. } => Wide,
        Op::Exchange {
            kind: ExchangeKind::Gather { .. } | ExchangeKind::Swap { .. } | ExchangeKind::Pass { .. },
            ..
        } => Stored,

        // Products.
        Op::MatMul { .. } | Op::Conv2d(_) | Op::Conv2dGradInput { .. } | Op::Conv2dGradWeight { .. } => Half,
        Op::Attention(a) => first(if a.packed { 1 } else { 3 }, Half),
        Op::AttentionGrad(a) => {
            let n_data = if a.packed { 1 } else { 3 };
            if k == 2 { Wide } else { first(3 + n_data, Half) }
        }
        Op::Recurrent { .. } | Op::RecurrentGrad { .. } => Half,

        Op::MaxPool(_) | Op::AvgPool(_) | Op::AvgPoolGrad { .. } => Stored,
        Op::MaxPoolGrad { .. } => first(1, Stored),

        // Norms: statistics in f32.
        Op::BatchNorm { .. } | Op::BatchNormFromSums { .. } | Op::BatchNormSums => first(1, Stored),
        Op::LayerNorm { .. } | Op::GroupNorm { .. } | Op::RmsNorm { .. } => first(1, Stored),
        Op::BatchNormGrad { .. } | Op::BatchNormGradSums { .. } | Op::BatchNormGradFromSums { .. } => {
            first(2, Stored)
        }
        Op::LayerNormGrad | Op::GroupNormGrad { .. } | Op::RmsNormGrad => first(2, Stored),

        // Softmax and losses: in f32, of what is stored.
        Op::Softmax { .. } | Op::LogSoftmax { .. } => Stored,
        Op::SoftmaxGrad { .. } | Op::LogSoftmaxGrad { .. } => Wide,
        Op::CrossEntropy(_) => first(1, Stored),
        Op::CrossEntropyGrad(_) => {
            if k == 1 {
                Stored
            } else {
                Wide
            }
        }
    }
}

/// For each value, whether it is stored in half.
fn stores(graph: &Graph, is_f32: &dyn Fn(&str) -> bool) -> Vec<bool> {
    let mut users = vec![Vec::new(); graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for (k, v) in node.inputs.iter().enumerate() {
            users[v.idx()].push((i, k));
        }
    }
    let (varies, results) = (varies(graph), towards_results(graph, &users));
    let stored = |v: ValueId| {
        let (value, from) = (graph.value(v), graph.value(v).producer.idx());
        let node = &graph.nodes[from];
        let may =
            value.dtype == DType::F32 && value.shape.numel() > 1 && varies[v.idx()] && !results[v.idx()];
        if !may || node.op.is_leaf() || is_f32(&node.layer) {
            return false;
        }
        users[v.idx()].iter().any(|&(user, k)| {
            let reader = &graph.nodes[user];
            // What only layers in f32 read reaches them as it was computed, such as the gradient of their results.
            if is_f32(&reader.layer) {
                return false;
            }
            if reader.op.is_elementwise() {
                // Joined with it by fusion, unless it runs in the other pass or on another shape.
                let same_pass = (from < graph.n_forward) == (user < graph.n_forward);
                return !same_pass || graph.shape(reader.outputs[0]) != &value.shape;
            }
            wants(&reader.op, k) != Wants::Wide
        })
    };
    (0..graph.values.len()).map(|v| stored(ValueId(v as u32))).collect()
}

/// For each value, whether it depends on what is fed: what depends on parameters alone is small, and stays exact.
fn varies(graph: &Graph) -> Vec<bool> {
    let mut varies = vec![false; graph.values.len()];
    for node in &graph.nodes {
        let does = matches!(node.op, Op::Input(_)) || node.inputs.iter().any(|v| varies[v.idx()]);
        for v in &node.outputs {
            varies[v.idx()] = does;
        }
    }
    varies
}

/// For each value, whether it is a result of the graph, or only rearranged or added up into one, as gradients of parameters are.
fn towards_results(graph: &Graph, users: &[Vec<(usize, usize)>]) -> Vec<bool> {
    let mut is = vec![false; graph.values.len()];
    for v in graph.results() {
        is[v.idx()] = true;
    }
    for i in (0..graph.nodes.len()).rev() {
        for &v in &graph.nodes[i].outputs {
            let leads = |&(user, _): &(usize, usize)| {
                let reader = &graph.nodes[user];
                let rearranges = reader.op.is_elementwise()
                    || matches!(
                        reader.op,
                        Op::Reshape | Op::Permute(_) | Op::Slice { .. } | Op::Pad { .. } | Op::Concat { .. }
                    );
                rearranges && reader.outputs.iter().all(|o| is[o.idx()])
            };
            is[v.idx()] |= !users[v.idx()].is_empty() && users[v.idx()].iter().all(leads);
        }
    }
    is
}

struct Rewrite<'a> {
    old: &'a Graph,
    half: DType,
    /// By old value: whether it is stored in half.
    stores: Vec<bool>,
    /// Maps an old value to a new one of its type; nothing if it exists in half only.
    to: Rebuild,
    /// By old value: the new one in half.
    rounded: Vec<Option<ValueId>>,
}

impl Rewrite<'_> {
    fn node(&mut self, i: usize, f32_layer: bool) {
        let node = &self.old.nodes[i];
        if node.op.is_leaf() {
            return self.to.copy(self.old, i);
        }
        let wanted = |k: usize| if f32_layer { Wants::Wide } else { wants(&node.op, k) };
        let n = node.inputs.len();
        let old = self.old;
        let is_float = |v: ValueId| old.value(v).dtype == DType::F32;
        // Operands that are taken as they are stored: in half if one of them is.
        let group = |k: &usize| wanted(*k) == Wants::Stored && is_float(node.inputs[*k]);
        let in_half = (0..n).filter(group).any(|k| self.rounded[node.inputs[k].idx()].is_some());
        let mut op = node.op.clone();
        let mut inputs = Vec::with_capacity(n);
        for (k, &v) in node.inputs.iter().enumerate() {
            let half = is_float(v) && (wanted(k) == Wants::Half || wanted(k) == Wants::Stored && in_half);
            inputs.push(match (half, &mut op) {
                (false, _) => self.wide(v, &node.layer),
                (true, Op::MatMul { rounded, .. }) if self.rounded[v.idx()].is_none() && self.lasts(v) => {
                    *rounded = Some(self.half);
                    self.to.get(v)
                }
                (true, _) => self.narrow(v, &node.layer),
            });
        }
        let carried = matches!(op, Op::Reshape | Op::Expand);
        let outputs = if carried {
            let dtype = self.to.graph.value(inputs[0]).dtype;
            let shape = self.old.shape(node.outputs[0]).clone();
            self.to.graph.push_shaped(op, &inputs, &node.layer, vec![(shape, dtype)])
        } else {
            let pushed = self.to.graph.push(op, &inputs, &node.layer);
            pushed.unwrap_or_else(|e| unreachable!("the row of precision is wrong: {e}"))
        };
        for (&v, new) in node.outputs.iter().zip(outputs) {
            match self.to.graph.value(new).dtype == self.old.value(v).dtype {
                true => self.to.map[v.idx()] = Some(new),
                false => self.rounded[v.idx()] = Some(new),
            }
            if self.stores[v.idx()] && self.rounded[v.idx()].is_none() && !f32_layer {
                self.narrow(v, &node.layer);
                self.to.map[v.idx()] = None;
            }
        }
        self.to.comes_from(node.origin);
    }

    /// Whether a value is in memory for the whole step anyway: fed to it, or a parameter.
    fn lasts(&self, v: ValueId) -> bool {
        self.old.producer(crate::memory::reshape_root(self.old, v)).op.is_leaf()
    }

    /// The value in its own type.
    fn wide(&mut self, v: ValueId, layer: &str) -> ValueId {
        match (self.to.map[v.idx()], self.rounded[v.idx()]) {
            (Some(wide), _) => wide,
            // For each reader again: it is part of the reader's fused pass.
            (None, Some(half)) => self.cast(half, DType::F32, layer),
            (None, None) => unreachable!("operands are rebuilt before their users"),
        }
    }

    /// The value in half.
    fn narrow(&mut self, v: ValueId, layer: &str) -> ValueId {
        if let Some(half) = self.rounded[v.idx()] {
            return half;
        }
        let half = self.cast(self.to.get(v), self.half, layer);
        self.rounded[v.idx()] = Some(half);
        half
    }

    fn cast(&mut self, v: ValueId, to: DType, layer: &str) -> ValueId {
        let shape = self.to.graph.shape(v).clone();
        self.to.graph.push_shaped(Op::Cast(to), &[v], layer, vec![(shape, to)])[0]
    }

    /// Results are in f32.
    fn finish(mut self) -> Graph {
        let results: Vec<ValueId> = self.old.results().collect();
        for v in results {
            if self.to.map[v.idx()].is_none() {
                let layer = &self.old.producer(v).layer;
                self.to.map[v.idx()] = Some(self.wide(v, layer));
            }
        }
        let graph = self.to.finish(self.old).without_dead();
        graph.verify();
        graph
    }
}
