//! The cost of each op: floating-point operations and bytes that must move, for planners and benchmarks.

use polyreme_kernels::elementwise::{Expr, Instr};

use crate::graph::{Graph, Node};
use crate::op::{Binary, Op, Unary};

/// What a node costs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Cost {
    /// Additions, multiplications and the like; a multiply-add is two.
    pub flops: u64,
    /// Bytes read and written, each operand and result once.
    pub bytes: u64,
}

impl std::ops::Add for Cost {
    type Output = Cost;
    fn add(self, other: Cost) -> Cost {
        Cost { flops: self.flops + other.flops, bytes: self.bytes + other.bytes }
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), |a, b| a + b)
    }
}

/// The cost of the whole graph.
pub fn total(graph: &Graph) -> Cost {
    graph.nodes.iter().map(|n| cost(graph, n)).sum()
}

/// The multiply-adds of products and convolutions alone, times two: the basis of GFLOP/s. Convolutions count
/// as if computed directly, causal attention by the half that is computed.
pub fn product_flops(graph: &Graph) -> u64 {
    let product = |n: &&Node| {
        let op = if let Op::Epilogue(e) = &n.op { &e.base } else { &n.op };
        matches!(
            op,
            Op::MatMul { .. }
                | Op::Conv2d(_)
                | Op::Conv2dGradInput { .. }
                | Op::Conv2dGradWeight { .. }
                | Op::Attention(_)
                | Op::AttentionGrad(_)
                | Op::Recurrent { .. }
                | Op::RecurrentGrad { .. }
        )
    };
    graph.nodes.iter().filter(product).map(|n| cost(graph, n).flops).sum()
}

/// The cost of one node.
pub fn cost(graph: &Graph, node: &Node) -> Cost {
    if node.op.is_leaf() || matches!(node.op, Op::Reshape) {
        return Cost::default();
    }
    let bytes = node.inputs.iter().chain(&node.outputs).map(|&v| graph.value(v).bytes() as u64).sum();
    Cost { flops: flops(graph, node, &node.op), bytes }
}

fn flops(graph: &Graph, node: &Node, op: &Op) -> u64 {
    let n_in = |i: usize| graph.shape(node.inputs[i]).numel() as u64;
    let n_out = graph.shape(node.outputs[0]).numel() as u64;
    let dims = |i: usize| graph.shape(node.inputs[i]).dims();
    match op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Const(_) | Op::Reshape => 0,
        Op::Expand
        | Op::Permute(_)
        | Op::Slice { .. }
        | Op::Concat { .. }
        | Op::Pad { .. }
        | Op::Gather { .. }
        | Op::Embedding => 0,
        Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Cast(_) | Op::Dropout { .. } => n_out,
        Op::Fused(expr) => n_out * expr.instrs().len() as u64,
        Op::Epilogue(e) => flops(graph, node, &e.base) + n_out * e.expr.instrs().len() as u64,
        Op::Reduce { .. } => n_in(0),
        Op::ScatterAdd { .. } => n_in(0),
        Op::EmbeddingGrad { .. } => n_in(1),
        &Op::MatMul { ta, .. } => {
            let a = dims(0);
            2 * n_out * (if ta { a[a.len() - 2] } else { a[a.len() - 1] }) as u64
        }
        Op::Conv2d(_) => 2 * n_out * dims(1)[1..].iter().product::<usize>() as u64,
        Op::Conv2dGradInput { .. } => 2 * n_in(0) * dims(1)[1..].iter().product::<usize>() as u64,
        Op::Conv2dGradWeight { .. } => {
            let dweight = graph.shape(node.outputs[0]).dims();
            2 * n_in(1) * dweight[1..].iter().product::<usize>() as u64
        }
        Op::MaxPool(_) | Op::AvgPool(_) => n_in(0),
        Op::MaxPoolGrad { .. } | Op::AvgPoolGrad { .. } => n_in(0),
        // Two passes over x, and a multiply-add on the way out.
        Op::BatchNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::GroupNorm { .. } => {
            7 * n_in(0)
        }
        Op::BatchNormGrad { .. } | Op::LayerNormGrad | Op::RmsNormGrad | Op::GroupNormGrad { .. } => {
            11 * n_in(0)
        }
        // The same work in two nodes: the addition costs nothing compared to waiting for the other ranks.
        Op::Exchange { .. } => n_out,
        Op::BatchNormSums => 4 * n_in(0),
        Op::BatchNormFromSums { .. } => 3 * n_in(0),
        Op::BatchNormGradSums { .. } => 5 * n_in(0),
        Op::BatchNormGradFromSums { .. } => 6 * n_in(0),
        Op::Softmax { .. } | Op::LogSoftmax { .. } | Op::SoftmaxGrad { .. } | Op::LogSoftmaxGrad { .. } => {
            4 * n_in(0)
        }
        Op::CrossEntropy(_) => 4 * n_in(0),
        Op::CrossEntropyGrad(_) => 4 * n_in(1),
        // Forward: two products of t_q × t_k × d; backward: five, with the scores computed again.
        Op::Attention(a) => 2 * attention_pairs(graph, node, a, 0),
        Op::AttentionGrad(a) => 5 * attention_pairs(graph, node, a, 3),
        Op::Recurrent { .. } => {
            let (xp, h) = (n_in(0), dims(1)[1] as u64);
            2 * xp * h
        }
        Op::RecurrentGrad { .. } => {
            let (dxp, h) = (n_out, dims(1)[1] as u64);
            4 * dxp * h
        }
    }
}

/// How many exponentials, or functions that take as long as one, an element-wise pass or an epilogue computes. Additions and the
/// like hide behind the bytes that it moves; these do not. Other ops (softmax, norms, attention) have none of their own here: they are
/// measured as a whole.
pub fn functions(graph: &Graph, node: &Node) -> u64 {
    let n_out = graph.shape(node.outputs[0]).numel() as u64;
    let of_expr = |expr: &Expr| expr.instrs().iter().map(exponentials).sum::<u64>();
    match &node.op {
        Op::Fused(expr) => n_out * of_expr(expr),
        Op::Epilogue(e) => n_out * of_expr(&e.expr),
        Op::Unary(op) => n_out * exponentials(&Instr::Unary(*op, 0)),
        Op::Binary(op) => n_out * exponentials(&Instr::Binary(*op, 0, 0)),
        _ => 0,
    }
}

fn exponentials(instr: &Instr) -> u64 {
    match instr {
        Instr::Const(_) | Instr::Select(..) => 0,
        Instr::Unary(op, _) => match op {
            Unary::Exp | Unary::Ln | Unary::Elu(_) => 1,
            Unary::Tanh | Unary::Sigmoid | Unary::GeluTanh | Unary::Silu => 1,
            Unary::Gelu | Unary::Erf | Unary::Sin | Unary::Cos | Unary::Softplus | Unary::Powf(_) => 2,
            Unary::Neg | Unary::Sqrt | Unary::Rsqrt | Unary::Recip | Unary::Relu | Unary::LeakyRelu(_) => 0,
            Unary::Abs | Unary::Square | Unary::Sign | Unary::Floor | Unary::Scale(_) | Unary::Offset(_) => 0,
            Unary::Clamp(..) | Unary::Positive | Unary::RoundF16 | Unary::RoundBf16 => 0,
        },
        Instr::Binary(op, ..) => match op {
            Binary::Pow | Binary::GeluGrad => 2,
            Binary::GeluTanhGrad | Binary::SiluGrad | Binary::SoftplusGrad | Binary::EluGrad(_) => 1,
            Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Max | Binary::Min => 0,
            Binary::Greater | Binary::GreaterEqual | Binary::Equal | Binary::ReluGrad => 0,
            Binary::TanhGrad | Binary::SigmoidGrad | Binary::LeakyReluGrad(_) => 0,
        },
    }
}

/// Multiply-adds times two of one product of an attention.
fn attention_pairs(graph: &Graph, node: &Node, a: &crate::op::Attention, first: usize) -> u64 {
    let shape = |i: usize| graph.shape(node.inputs[first + i]).dims();
    let (b, t_q, heads, d) =
        if a.packed { (shape(0)[0], shape(0)[1], shape(0)[3], shape(0)[4]) } else { quad(shape(0)) };
    let t_k = if a.packed { t_q } else { shape(1)[1] };
    let pairs = if a.causal { (0..t_q).map(|q| t_k.min(q + 1)).sum() } else { t_q * t_k };
    2 * (b * heads * pairs * d) as u64
}

fn quad(dims: &[usize]) -> (usize, usize, usize, usize) {
    (dims[0], dims[1], dims[2], dims[3])
}
