//! The shape rule of each op: what its outputs look like, or why its operands do not fit. Element types have their own
//! table, `types`.

use crate::error::TraceErrorKind;
use crate::graph::{Shapes, Value};
use crate::op::{Conv, ExchangeKind, Op, Window};
use crate::shape::Shape;
use crate::types::types;

use polyreme_kernels::elementwise::Expr;

/// The shapes and element types of an op's outputs.
pub(crate) fn infer(op: &Op, x: &[&Value]) -> Shapes {
    let types = types(op, x)?;
    let shapes = infer_shapes(op, x)?;
    assert_eq!(types.len(), shapes.len(), "outputs of {} in the tables of types and shapes", op.name());
    Ok(shapes.into_iter().zip(types).collect())
}

fn infer_shapes(op: &Op, x: &[&Value]) -> Result<Vec<Shape>, TraceErrorKind> {
    let name = op.name();
    let one = |shape: Shape| Ok(vec![shape]);
    if let Some(v) = x.iter().find(|v| v.shape.rank() > Expr::RANK_MAX) {
        return Err(shape(name, &v.shape, format!("at most {} dims are supported", Expr::RANK_MAX)));
    }
    match op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Reshape | Op::Expand | Op::Fused(_) => {
            unreachable!("{name} carries its shape in its value")
        }
        Op::Const(_) => one(Shape::scalar()),
        Op::Unary(_) | Op::Dropout { .. } | Op::Cast(_) => one(x[0].shape.clone()),
        Op::Exchange { kind, .. } => one(exchanged(name, *kind, &x[0].shape)?),
        Op::Binary(_) => one(broadcast(name, &x[0].shape, &x[1].shape)?),
        Op::Select => {
            let both = broadcast(name, &x[1].shape, &x[2].shape)?;
            one(broadcast(name, &x[0].shape, &both)?)
        }
        Op::Epilogue(e) => {
            let mut out = infer_shapes(&e.base, &x[..e.n_base_inputs])?;
            let first = out[0].clone();
            for v in &x[e.n_base_inputs..] {
                if broadcast(name, &first, &v.shape)? != first {
                    return Err(shapes(name, &first, &v.shape, "an epilogue's operand must not be wider"));
                }
            }
            let extra = e.expr.outputs().len() - usize::from(!e.keeps_base);
            out.extend(std::iter::repeat_n(first, extra));
            Ok(out)
        }
        Op::Permute(perm) => {
            let dims = x[0].shape.dims();
            let mut sorted = perm.clone();
            sorted.sort_unstable();
            if sorted != (0..dims.len()).collect::<Vec<_>>() {
                return Err(shape(name, &x[0].shape, format!("{perm:?} is not an order of its dims")));
            }
            one(perm.iter().map(|&p| dims[p]).collect::<Vec<_>>().into())
        }
        &Op::Slice { axis, start, len } => {
            let have = dim(name, &x[0].shape, axis)?;
            if start.checked_add(len).is_none_or(|end| end > have) {
                let why = format!("{start}..{} is outside dim {axis}", start.saturating_add(len));
                return Err(shape(name, &x[0].shape, why));
            }
            one(x[0].shape.with_dim(axis, len))
        }
        &Op::Concat { axis } => {
            let mut total = 0;
            for v in x {
                total += dim(name, &v.shape, axis)?;
                if v.shape.rank() != x[0].shape.rank()
                    || v.shape.with_dim(axis, 0) != x[0].shape.with_dim(axis, 0)
                {
                    return Err(shapes(
                        name,
                        &x[0].shape,
                        &v.shape,
                        &format!("they may differ in dim {axis} only"),
                    ));
                }
            }
            one(x[0].shape.with_dim(axis, total))
        }
        &Op::Pad { axis, before, after, .. } => {
            let have = dim(name, &x[0].shape, axis)?;
            one(x[0].shape.with_dim(axis, before + have + after))
        }
        &Op::Gather { axis } => {
            dim(name, &x[0].shape, axis)?;
            let (data, index) = (&x[0].shape, &x[1].shape);
            if data.rank() != index.rank() || data.with_dim(axis, 0) != index.with_dim(axis, 0) {
                return Err(shapes(name, data, index, &format!("they may differ in dim {axis} only")));
            }
            one(index.clone())
        }
        &Op::ScatterAdd { axis, len } => {
            same(name, &x[0].shape, &x[1].shape)?;
            one(x[0].shape.with_dim(axis, len))
        }
        Op::Reduce { axes, .. } => {
            let mut out = x[0].shape.clone();
            for &axis in axes {
                dim(name, &x[0].shape, axis)?;
                out = out.with_dim(axis, 1);
            }
            one(out)
        }
        &Op::MatMul { ta, tb, .. } => one(matmul(&x[0].shape, &x[1].shape, ta, tb)?),
        Op::Conv2d(conv) => one(conv2d(name, conv, &x[0].shape, &x[1].shape)?),
        &Op::Conv2dGradInput { conv, size } => {
            let (dy, w) = (&x[0].shape, &x[1].shape);
            rank(name, dy, 4, "[n, h, w, c]")?;
            rank(name, w, 4, "[out, in/groups, kh, kw]")?;
            let dx = Shape::from([dy.dims()[0], size.0, size.1, w.dims()[1] * conv.groups]);
            if conv2d(name, &conv, &dx, w)? != *dy {
                let why = format!("a convolution of {dx} with it does not give the first");
                return Err(shapes(name, dy, w, &why));
            }
            one(dx)
        }
        &Op::Conv2dGradWeight { conv, kernel } => {
            let (x, dy) = (&x[0].shape, &x[1].shape);
            rank(name, x, 4, "[n, h, w, c]")?;
            rank(name, dy, 4, "[n, h, w, c]")?;
            let w = Shape::from([dy.last(), x.last() / conv.groups, kernel.0, kernel.1]);
            same(name, &conv2d(name, &conv, x, &w)?, dy)?;
            one(w)
        }
        Op::MaxPool(window) => {
            let y = pool(name, window, &x[0].shape)?;
            Ok(vec![y.clone(), y])
        }
        Op::AvgPool(window) => one(pool(name, window, &x[0].shape)?),
        &Op::MaxPoolGrad { window, size } | &Op::AvgPoolGrad { window, size } => {
            let dy = &x[0].shape;
            rank(name, dy, 4, "[n, h, w, c]")?;
            let dx = Shape::from([dy.dims()[0], size.0, size.1, dy.last()]);
            same(name, &pool(name, &window, &dx)?, dy)?;
            one(dx)
        }
        Op::BatchNorm { .. } => {
            let c = per_channel(name, x, 1..5)?;
            Ok(vec![x[0].shape.clone(), c.clone(), c.clone(), c.clone(), c])
        }
        Op::LayerNorm { .. } => {
            per_channel(name, x, 1..3)?;
            let rows = rows(&x[0].shape);
            Ok(vec![x[0].shape.clone(), rows.clone(), rows])
        }
        Op::RmsNorm { .. } => {
            per_channel(name, x, 1..2)?;
            Ok(vec![x[0].shape.clone(), rows(&x[0].shape)])
        }
        &Op::GroupNorm { groups, .. } => {
            per_channel(name, x, 1..3)?;
            if x[0].shape.rank() < 2 || groups == 0 || !x[0].shape.last().is_multiple_of(groups) {
                return Err(shape(name, &x[0].shape, format!("{groups} groups must divide the last dim")));
            }
            let stats = Shape::from([x[0].shape.dims()[0], groups]);
            Ok(vec![x[0].shape.clone(), stats.clone(), stats])
        }
        Op::BatchNormGrad { .. } => {
            same(name, &x[0].shape, &x[1].shape)?;
            let c = per_channel(name, x, 2..6)?;
            Ok(vec![x[0].shape.clone(), c.clone(), c])
        }
        Op::BatchNormSums => {
            per_channel(name, x, 1..2)?;
            one(channel_sums(&x[0].shape))
        }
        Op::BatchNormFromSums { .. } => {
            let c = per_channel(name, x, 1..5)?;
            same(name, &x[5].shape, &channel_sums(&x[0].shape))?;
            Ok(vec![x[0].shape.clone(), c.clone(), c.clone(), c.clone(), c])
        }
        Op::BatchNormGradSums { .. } => {
            same(name, &x[0].shape, &x[1].shape)?;
            let c = per_channel(name, x, 2..6)?;
            Ok(vec![channel_sums(&x[0].shape), c.clone(), c])
        }
        Op::BatchNormGradFromSums { .. } => {
            same(name, &x[0].shape, &x[1].shape)?;
            per_channel(name, x, 2..6)?;
            same(name, &x[6].shape, &channel_sums(&x[0].shape))?;
            one(x[0].shape.clone())
        }
        Op::LayerNormGrad | Op::GroupNormGrad { .. } => {
            same(name, &x[0].shape, &x[1].shape)?;
            let c = per_channel(name, x, 2..3)?;
            Ok(vec![x[0].shape.clone(), c.clone(), c])
        }
        Op::RmsNormGrad => {
            same(name, &x[0].shape, &x[1].shape)?;
            let c = per_channel(name, x, 2..3)?;
            Ok(vec![x[0].shape.clone(), c])
        }
        &Op::Softmax { axis } | &Op::LogSoftmax { axis } => {
            dim(name, &x[0].shape, axis)?;
            one(x[0].shape.clone())
        }
        &Op::SoftmaxGrad { axis } | &Op::LogSoftmaxGrad { axis } => {
            dim(name, &x[0].shape, axis)?;
            same(name, &x[0].shape, &x[1].shape)?;
            one(x[0].shape.clone())
        }
        Op::CrossEntropy(o) => {
            cross_entropy(name, x, 0)?;
            if !(0.0..1.0).contains(&o.label_smoothing) {
                let why = format!("label smoothing {} is not in 0..1", o.label_smoothing);
                return Err(TraceErrorKind::Option { op: name, why });
            }
            Ok(vec![Shape::scalar(), x[1].shape.clone()])
        }
        Op::CrossEntropyGrad(_) => {
            cross_entropy(name, x, 1)?;
            one(x[1].shape.clone())
        }
        Op::Embedding => {
            rank(name, &x[1].shape, 2, "[rows, width]")?;
            let mut dims = x[0].shape.dims().to_vec();
            dims.push(x[1].shape.last());
            one(dims.into())
        }
        &Op::EmbeddingGrad { rows } => one([rows, x[1].shape.last()].into()),
        Op::Attention(a) => {
            let [b, t, _, heads, d] = attention(name, a.packed, x)?;
            Ok(vec![[b, t, heads, d].into(), [b, heads, t].into()])
        }
        Op::AttentionGrad(a) => {
            attention(name, a.packed, &x[3..])?;
            let n = if a.packed { 1 } else { 3 };
            Ok(x[3..3 + n].iter().map(|v| v.shape.clone()).collect())
        }
        Op::Recurrent { cell, .. } => {
            let [b, t, h] = recurrent(name, cell.gates(), &x[0].shape, &x[1].shape)?;
            let n_states = if cell.gates() == 4 { 2 } else { 1 };
            for v in &x[3..3 + n_states] {
                same(name, &v.shape, &[b, h].into())?;
            }
            same(name, &x[2].shape, &[cell.gates() * h].into())?;
            let seq = Shape::from([b, t, h]);
            let saved = Shape::from([b, t, 4 * h]);
            Ok(if n_states == 2 { vec![seq.clone(), seq, saved] } else { vec![seq, saved] })
        }
        Op::RecurrentGrad { cell, .. } => {
            let [b, t, h] = match x[0].shape.dims() {
                &[b, t, h] => [b, t, h],
                _ => return Err(shape(name, &x[0].shape, "dy is [batch, time, hidden]".into())),
            };
            let g = cell.gates() * h;
            let mut out = vec![[b, t, g].into(), [g, h].into(), [g].into(), [b, h].into()];
            if cell.gates() == 4 {
                out.push([b, h].into());
            }
            Ok(out)
        }
    }
}

/// Rows and columns that a convolution gives, or why the kernel does not fit.
pub(crate) fn conv_out(
    op: &'static str,
    conv: &Conv,
    image: &Shape,
    (h, w): (usize, usize),
    (kh, kw): (usize, usize),
) -> Result<(usize, usize), TraceErrorKind> {
    let out = |len: usize, k: usize, stride: usize, pad: usize, dilation: usize, what: &str| {
        if k == 0 || stride == 0 || dilation == 0 {
            let why = format!("kernel {k}, stride {stride} and dilation {dilation} must all be at least 1");
            return Err(TraceErrorKind::Option { op, why });
        }
        let span = (k - 1) * dilation + 1;
        if span > len + 2 * pad {
            let why = format!(
                "the kernel spans {span} {what}, more than the padded input's {} ({len} + 2x{pad}); \
                 use a smaller kernel or more padding",
                len + 2 * pad
            );
            return Err(shape(op, image, why));
        }
        Ok((len + 2 * pad - span) / stride + 1)
    };
    Ok((
        out(h, kh, conv.stride.0, conv.padding.0, conv.dilation.0, "rows")?,
        out(w, kw, conv.stride.1, conv.padding.1, conv.dilation.1, "columns")?,
    ))
}

fn conv2d(op: &'static str, conv: &Conv, x: &Shape, weight: &Shape) -> Result<Shape, TraceErrorKind> {
    rank(op, x, 4, "[n, h, w, c]")?;
    rank(op, weight, 4, "[out, in/groups, kh, kw]")?;
    let (&[n, h, w, c], &[o, ci, kh, kw]) = (x.dims(), weight.dims()) else {
        unreachable!("ranks were checked")
    };
    if conv.groups == 0 || c != ci * conv.groups || o % conv.groups != 0 {
        let why = format!(
            "{c} channels in {} group(s) need a weight of [out, {}, kh, kw] with out a multiple of the groups",
            conv.groups,
            c / conv.groups.max(1)
        );
        return Err(shapes(op, x, weight, &why));
    }
    let (oh, ow) = conv_out(op, conv, x, (h, w), (kh, kw))?;
    Ok([n, oh, ow, o].into())
}

fn pool(op: &'static str, window: &Window, x: &Shape) -> Result<Shape, TraceErrorKind> {
    rank(op, x, 4, "[n, h, w, c]")?;
    let &[n, h, w, c] = x.dims() else { unreachable!("rank was checked") };
    let (oh, ow) = match *window {
        Window::Fixed { kernel, stride, padding, .. } => {
            if padding.0 * 2 > kernel.0 || padding.1 * 2 > kernel.1 {
                let why = format!("padding {padding:?} is more than half of the window {kernel:?}");
                return Err(TraceErrorKind::Option { op, why });
            }
            let conv = Conv { stride, padding, ..Conv::default() };
            conv_out(op, &conv, x, (h, w), kernel)?
        }
        Window::Adaptive { out } if out.0 == 0 || out.1 == 0 => {
            return Err(TraceErrorKind::Option { op, why: "the output must have at least one pixel".into() });
        }
        Window::Adaptive { out } => out,
    };
    Ok([n, oh, ow, c].into())
}

fn matmul(a: &Shape, b: &Shape, ta: bool, tb: bool) -> Result<Shape, TraceErrorKind> {
    if a.rank() < 2 || b.rank() < 2 {
        return Err(shapes("matmul", a, b, "both need at least two dims"));
    }
    let split = |s: &Shape, t: bool| {
        let (r, c) = (s.dims()[s.rank() - 2], s.last());
        if t { (c, r) } else { (r, c) }
    };
    let ((m, k), (k_b, n)) = (split(a, ta), split(b, tb));
    if k != k_b {
        return Err(shapes("matmul", a, b, &format!("the dims summed over are {k} and {k_b}")));
    }
    let lead = &a.dims()[..a.rank() - 2];
    if b.rank() > 2 && &b.dims()[..b.rank() - 2] != lead {
        return Err(shapes("matmul", a, b, "the leading dims must be equal, or the second have none"));
    }
    if b.rank() == 2 && a.rank() > 2 && ta {
        return Err(shapes("matmul", a, b, "a batch of transposed matrices needs a batch on the right too"));
    }
    let mut dims = lead.to_vec();
    dims.extend([m, n]);
    Ok(dims.into())
}

/// `[b, t_q, t_k, heads, d]` of an attention's operands.
fn attention(op: &'static str, packed: bool, x: &[&Value]) -> Result<[usize; 5], TraceErrorKind> {
    let (sizes, mask) = if packed {
        let &[b, t, 3, heads, d] = x[0].shape.dims() else {
            return Err(shape(op, &x[0].shape, "packed operands are [batch, time, 3, heads, width]".into()));
        };
        ([b, t, t, heads, d], x.get(1))
    } else {
        rank(op, &x[0].shape, 4, "[batch, time, heads, width]")?;
        rank(op, &x[1].shape, 4, "[batch, time, heads, width]")?;
        let (&[b, t, heads, d], &[b2, t_k, h2, d2]) = (x[0].shape.dims(), x[1].shape.dims()) else {
            unreachable!("ranks were checked")
        };
        if (b, heads, d) != (b2, h2, d2) {
            return Err(shapes(op, &x[0].shape, &x[1].shape, "queries and keys may differ in time only"));
        }
        same(op, &x[1].shape, &x[2].shape)?;
        ([b, t, t_k, heads, d], x.get(3))
    };
    if let Some(mask) = mask {
        let [b, t, t_k, heads, _] = sizes;
        let fits = match *mask.shape.dims() {
            [mt, mk] => (mt, mk) == (t, t_k),
            // One row for all queries of a sample: what hides its padding.
            [mb, mt, mk] => (mb, mk) == (b, t_k) && (mt == t || mt == 1),
            [mb, mh, mt, mk] => (mb, mt, mk) == (b, t, t_k) && (mh == heads || mh == 1),
            _ => false,
        };
        if !fits {
            let why = format!(
                "a mask is [{t}, {t_k}], [{b}, 1, {t_k}], [{b}, {t}, {t_k}] or [{b}, {heads}, {t}, {t_k}]"
            );
            return Err(shape(op, &mask.shape, why));
        }
    }
    Ok(sizes)
}

fn recurrent(op: &'static str, gates: usize, xp: &Shape, w_hh: &Shape) -> Result<[usize; 3], TraceErrorKind> {
    rank(op, xp, 3, "[batch, time, gates·hidden]")?;
    rank(op, w_hh, 2, "[gates·hidden, hidden]")?;
    let (&[b, t, g], &[g2, h]) = (xp.dims(), w_hh.dims()) else { unreachable!("ranks were checked") };
    if g != g2 || g != gates * h {
        return Err(shapes(op, xp, w_hh, &format!("{gates} gates of {h} are {}", gates * h)));
    }
    Ok([b, t, h])
}

fn cross_entropy(op: &'static str, x: &[&Value], logits: usize) -> Result<(), TraceErrorKind> {
    let (z, y) = (&x[logits].shape, &x[logits + 1].shape);
    if z.rank() != 2 || y.rank() != 1 || z.dims()[0] != y.dims()[0] {
        return Err(shapes(op, z, y, "logits are [samples, classes] and labels [samples]"));
    }
    let weights = if logits == 0 { x.get(2) } else { x.get(4) };
    if let Some(w) = weights {
        same(op, &w.shape, &[z.last()].into())?;
    }
    Ok(())
}

/// Operands `which` must have the length of the first one's last dim.
fn per_channel(
    op: &'static str,
    x: &[&Value],
    which: std::ops::Range<usize>,
) -> Result<Shape, TraceErrorKind> {
    let c = Shape::from([x[0].shape.last()]);
    for v in &x[which] {
        if v.shape != c {
            return Err(shapes(
                op,
                &x[0].shape,
                &v.shape,
                "it needs one element per channel of the last dim",
            ));
        }
    }
    Ok(c)
}

/// A count, and two sums per channel.
fn channel_sums(x: &Shape) -> Shape {
    [1 + 2 * x.last()].into()
}

/// One statistic per row.
fn rows(x: &Shape) -> Shape {
    x.dims()[..x.rank().saturating_sub(1)].into()
}

fn broadcast(op: &'static str, a: &Shape, b: &Shape) -> Result<Shape, TraceErrorKind> {
    a.broadcast(b).ok_or_else(|| shapes(op, a, b, "dims must be equal, or 1, from the last backwards"))
}

fn same(op: &'static str, a: &Shape, b: &Shape) -> Result<(), TraceErrorKind> {
    if a == b { Ok(()) } else { Err(shapes(op, a, b, "they must be equal")) }
}

fn rank(op: &'static str, s: &Shape, want: usize, legend: &str) -> Result<(), TraceErrorKind> {
    if s.rank() == want { Ok(()) } else { Err(shape(op, s, format!("{want} dims are needed: {legend}"))) }
}

fn dim(op: &'static str, s: &Shape, axis: usize) -> Result<usize, TraceErrorKind> {
    s.dims().get(axis).copied().ok_or_else(|| shape(op, s, format!("it has no dim {axis}")))
}

fn shape(op: &'static str, s: &Shape, why: String) -> TraceErrorKind {
    TraceErrorKind::Shape { op, shape: s.clone(), why }
}

fn shapes(op: &'static str, left: &Shape, right: &Shape, why: &str) -> TraceErrorKind {
    TraceErrorKind::Shapes { op, left: left.clone(), right: right.clone(), why: why.into() }
}

/// The shape of what ranks make of their values together.
fn exchanged(name: &'static str, kind: ExchangeKind, x: &Shape) -> Result<Shape, TraceErrorKind> {
    match kind {
        ExchangeKind::Sum | ExchangeKind::Pass { .. } => Ok(x.clone()),
        ExchangeKind::Gather { ranks, .. } => Ok([&[ranks], x.dims()].concat().into()),
        ExchangeKind::Scatter { ranks } | ExchangeKind::Swap { ranks } => match x.dims().first() {
            Some(&rows) if rows == ranks => Ok(x.clone()),
            _ => Err(shape(name, x, format!("its first dim must be the {ranks} ranks"))),
        },
    }
}
