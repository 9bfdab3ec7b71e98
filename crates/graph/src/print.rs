//! The printed form of a graph, for people and for tests.
//!
//! One line per node: `%value, .. : type = op{options}(operands)  # layer`.

use std::fmt::{self, Write};

use polyreme_kernels::elementwise::{Binary, Expr, Instr, Unary};

use crate::graph::{Graph, Node};
use crate::op::{Conv, ExchangeKind, Op, Slab, Window};
use crate::program::Axis;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for (i, node) in self.nodes.iter().enumerate() {
            if i == self.n_forward && i > 0 {
                writeln!(f, "-- backward --")?;
            }
            writeln!(f, "{}", line(self, node))?;
        }
        for (name, v) in &self.outputs {
            writeln!(f, "output {name} = {v}")?;
        }
        for (param, grad) in self.params.iter().zip(&self.grads) {
            if let Some(grad) = grad {
                writeln!(f, "grad {} = {grad}", param.name)?;
            }
        }
        for &(state, v) in &self.updates {
            writeln!(f, "update {} = {v}", self.states[state].name)?;
        }
        Ok(())
    }
}

/// One node as a line.
pub fn line(graph: &Graph, node: &Node) -> String {
    let mut s = String::new();
    for (i, &v) in node.outputs.iter().enumerate() {
        let value = graph.value(v);
        let comma = if i > 0 { ", " } else { "" };
        push(&mut s, format_args!("{comma}{v}: {}{}", value.dtype, value.shape));
    }
    push(&mut s, format_args!(" = {}", node.op.name()));
    let options = options(graph, &node.op);
    if !options.is_empty() {
        push(&mut s, format_args!("{{{options}}}"));
    }
    if !node.op.is_leaf() {
        let args: Vec<_> = node.inputs.iter().map(|v| v.to_string()).collect();
        push(&mut s, format_args!("({})", args.join(", ")));
    }
    push(&mut s, format_args!("  # {}", node.layer));
    s
}

fn push(s: &mut String, args: fmt::Arguments) {
    s.write_fmt(args).expect("writing to a string cannot fail");
}

fn options(graph: &Graph, op: &Op) -> String {
    match op {
        Op::Input(i) => graph.inputs.get(*i).map_or(String::new(), |x| x.name.clone()),
        Op::Param(i) => graph.params.get(*i).map_or(String::new(), |p| p.name.clone()),
        Op::State(i) => graph.states.get(*i).map_or(String::new(), |s| s.name.clone()),
        Op::Const(c) => format!("{c}"),
        Op::Unary(u) => unary_option(*u),
        Op::Binary(b) => binary_option(*b),
        Op::Fused(expr) => expression(expr),
        Op::Epilogue(e) => {
            let base = options(graph, &e.base);
            let sep = if base.is_empty() { "" } else { " " };
            let keeps = if e.keeps_base { " keep" } else { "" };
            format!("{base}{sep}then{keeps} {}", expression(&e.expr))
        }
        Op::Permute(perm) => format!("{perm:?}"),
        Op::Slice { axis, start, len } => format!("dim {axis}: {start}..{}", start + len),
        Op::Pad { axis, before, after, value } => {
            format!("dim {axis}: {before} before, {after} after, {value}")
        }
        Op::Concat { axis } | Op::Gather { axis } | Op::Softmax { axis } | Op::LogSoftmax { axis } => {
            format!("dim {axis}")
        }
        Op::SoftmaxGrad { axis } | Op::LogSoftmaxGrad { axis } => format!("dim {axis}"),
        Op::ScatterAdd { axis, len } => format!("dim {axis} of {len}"),
        Op::Cast(to) => to.to_string(),
        Op::Reduce { axes, .. } => format!("{axes:?}"),
        Op::MatMul { ta, tb, rounded } => {
            let mut words: Vec<String> = Vec::new();
            words.extend(ta.then(|| "ta".into()));
            words.extend(tb.then(|| "tb".into()));
            words.extend(rounded.map(|half| format!("as {half}")));
            words.join(" ")
        }
        Op::Conv2d(c) => conv(c),
        Op::Conv2dGradInput { conv: c, .. } | Op::Conv2dGradWeight { conv: c, .. } => conv(c),
        Op::MaxPool(w) | Op::AvgPool(w) => window(w),
        Op::MaxPoolGrad { window: w, .. } | Op::AvgPoolGrad { window: w, .. } => window(w),
        Op::BatchNorm { eps, momentum, relu } | Op::BatchNormFromSums { eps, momentum, relu } => {
            format!("eps {eps} momentum {momentum}{}", if *relu { " relu" } else { "" })
        }
        Op::BatchNormGrad { relu } | Op::BatchNormGradSums { relu } | Op::BatchNormGradFromSums { relu } => {
            if *relu {
                "relu".into()
            } else {
                String::new()
            }
        }
        Op::LayerNorm { eps } | Op::RmsNorm { eps } => format!("eps {eps}"),
        Op::GroupNorm { groups, eps } => format!("groups {groups} eps {eps}"),
        Op::GroupNormGrad { groups } => format!("groups {groups}"),
        Op::CrossEntropy(o) | Op::CrossEntropyGrad(o) => {
            let mut parts = Vec::new();
            if o.label_smoothing != 0.0 {
                parts.push(format!("smoothing {}", o.label_smoothing));
            }
            if let Some(ignore) = o.ignore_index {
                parts.push(format!("ignore {ignore}"));
            }
            parts.join(" ")
        }
        Op::Exchange { axis, kind: ExchangeKind::Pass { to, from } } => {
            let end = |word: &str, rank: &Option<usize>| rank.map(|r| format!(" {word} {r}"));
            let ends = [end("to", to), end("from", from)].into_iter().flatten().collect::<String>();
            format!("over {}{ends}", axis.name())
        }
        Op::Exchange { axis: Axis::Data, .. } => String::new(),
        Op::Exchange { axis, .. } => format!("over {}", axis.name()),
        Op::EmbeddingGrad { rows } => format!("rows {rows}"),
        Op::Attention(a) | Op::AttentionGrad(a) => {
            let packed = if a.packed { " packed" } else { "" };
            format!("{}scale {}{packed}", if a.causal { "causal " } else { "" }, a.scale)
        }
        Op::Dropout { p, stream, slab: None } => format!("{p} stream {stream}"),
        Op::Dropout { p, stream, slab: Some(Slab { first, second, run, stride }) } => {
            let second = second.map_or(String::new(), |at| format!(" and {at}"));
            format!("{p} stream {stream} from {first}{second}, {run} of each {stride}")
        }
        Op::Recurrent { reverse, .. } | Op::RecurrentGrad { reverse, .. } => {
            if *reverse {
                "reverse".into()
            } else {
                String::new()
            }
        }
        Op::Select
        | Op::Reshape
        | Op::Expand
        | Op::BatchNormSums
        | Op::LayerNormGrad
        | Op::RmsNormGrad
        | Op::Embedding => String::new(),
    }
}

fn conv(c: &Conv) -> String {
    let d = Conv::default();
    let mut parts = Vec::new();
    for (name, have, default) in [
        ("stride", c.stride, d.stride),
        ("padding", c.padding, d.padding),
        ("dilation", c.dilation, d.dilation),
    ] {
        if have != default {
            parts.push(format!("{name} {}x{}", have.0, have.1));
        }
    }
    if c.groups != 1 {
        parts.push(format!("groups {}", c.groups));
    }
    parts.join(" ")
}

fn window(w: &Window) -> String {
    match w {
        Window::Fixed { kernel, stride, padding, count_include_pad } => {
            let counted = if *count_include_pad { " counted" } else { "" };
            let padding = match padding {
                (0, 0) => String::new(),
                (a, b) => format!(" padding {a}x{b}{counted}"),
            };
            format!("{}x{} stride {}x{}{padding}", kernel.0, kernel.1, stride.0, stride.1)
        }
        Window::Adaptive { out } => format!("to {}x{}", out.0, out.1),
    }
}

/// An expression as nested calls; operands are `a`, `b`, `c` in the order of the inputs.
fn expression(expr: &Expr) -> String {
    let mut regs: Vec<String> =
        (0..expr.n_inputs()).map(|i| char::from(b'a' + i as u8).to_string()).collect();
    for instr in expr.instrs() {
        let at = |r: u8| &regs[usize::from(r)];
        let text = match instr {
            Instr::Const(c) => format!("{c}"),
            Instr::Unary(u, a) => {
                let option = unary_option(*u);
                let sep = if option.is_empty() { "" } else { ", " };
                format!("{}({}{sep}{option})", unary_name(*u), at(*a))
            }
            Instr::Binary(b, p, q) => {
                let option = binary_option(*b);
                let sep = if option.is_empty() { "" } else { ", " };
                format!("{}({}, {}{sep}{option})", binary_name(*b), at(*p), at(*q))
            }
            Instr::Select(c, p, q) => format!("select({}, {}, {})", at(*c), at(*p), at(*q)),
        };
        regs.push(text);
    }
    expr.outputs().iter().map(|&r| regs[usize::from(r)].clone()).collect::<Vec<_>>().join("; ")
}

fn unary_option(op: Unary) -> String {
    match op {
        Unary::LeakyRelu(a) | Unary::Elu(a) | Unary::Scale(a) | Unary::Offset(a) | Unary::Powf(a) => {
            format!("{a}")
        }
        Unary::Clamp(low, high) => format!("{low}, {high}"),
        _ => String::new(),
    }
}

fn binary_option(op: Binary) -> String {
    match op {
        Binary::LeakyReluGrad(a) | Binary::EluGrad(a) => format!("{a}"),
        _ => String::new(),
    }
}

/// The printed name of an element-wise op of one operand.
pub(crate) fn unary_name(op: Unary) -> &'static str {
    match op {
        Unary::Neg => "neg",
        Unary::Exp => "exp",
        Unary::Ln => "ln",
        Unary::Sqrt => "sqrt",
        Unary::Rsqrt => "rsqrt",
        Unary::Recip => "recip",
        Unary::Tanh => "tanh",
        Unary::Sigmoid => "sigmoid",
        Unary::Relu => "relu",
        Unary::LeakyRelu(_) => "leaky_relu",
        Unary::Elu(_) => "elu",
        Unary::Gelu => "gelu",
        Unary::GeluTanh => "gelu_tanh",
        Unary::Silu => "silu",
        Unary::Erf => "erf",
        Unary::Abs => "abs",
        Unary::Square => "square",
        Unary::Sin => "sin",
        Unary::Cos => "cos",
        Unary::Softplus => "softplus",
        Unary::Sign => "sign",
        Unary::Floor => "floor",
        Unary::Scale(_) => "scale",
        Unary::Offset(_) => "offset",
        Unary::Powf(_) => "powf",
        Unary::Clamp(..) => "clamp",
        Unary::Positive => "positive",
        Unary::RoundF16 => "round_f16",
        Unary::RoundBf16 => "round_bf16",
    }
}

/// The printed name of an element-wise op of two operands.
pub(crate) fn binary_name(op: Binary) -> &'static str {
    match op {
        Binary::Add => "add",
        Binary::Sub => "sub",
        Binary::Mul => "mul",
        Binary::Div => "div",
        Binary::Max => "maximum",
        Binary::Min => "minimum",
        Binary::Pow => "pow",
        Binary::Greater => "greater",
        Binary::GreaterEqual => "greater_equal",
        Binary::Equal => "equal",
        Binary::ReluGrad => "relu_grad",
        Binary::TanhGrad => "tanh_grad",
        Binary::SigmoidGrad => "sigmoid_grad",
        Binary::GeluGrad => "gelu_grad",
        Binary::GeluTanhGrad => "gelu_tanh_grad",
        Binary::SiluGrad => "silu_grad",
        Binary::SoftplusGrad => "softplus_grad",
        Binary::LeakyReluGrad(_) => "leaky_relu_grad",
        Binary::EluGrad(_) => "elu_grad",
    }
}
