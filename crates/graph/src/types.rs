//! The type rule of each op: which element types its operands may have, and which its outputs have then.
//!
//! Ops compute on f32, and on f16 and bf16 as formats of storage. A result has its operands' type where an op works element
//! by element or moves data. f32 are: products and other sums over many elements, statistics, losses, softmax, and gradients
//! of weights, because rounding would pile up in them. Nothing is converted silently: a graph says where by `cast`.

use std::ops::Range;

use crate::error::TraceErrorKind;
use crate::graph::Value;
use crate::op::{ExchangeKind, Op, ReduceKind};
use crate::shape::DType;

use DType::{Bf16, F16, F32, I32};

/// The element types of an op's outputs, or which operand does not fit.
pub(crate) fn types(op: &Op, x: &[&Value]) -> Result<Vec<DType>, TraceErrorKind> {
    let given = Operands { op: op.name(), x };
    let one = |dtype: DType| Ok(vec![dtype]);
    let n = x.len();
    match op {
        Op::Input(_) | Op::Param(_) | Op::State(_) | Op::Reshape | Op::Expand | Op::Fused(_) => {
            unreachable!("{} carries its type in its value", op.name())
        }
        Op::Const(_) => one(F32),

        // Element by element.
        Op::Unary(_) | Op::Dropout { .. } => one(given.float(0)?),
        // Of a comparison, too: 0 and 1 in the type of what was compared.
        Op::Binary(_) | Op::Select => one(given.alike(0..n)?),
        Op::Epilogue(e) => {
            let mut out = types(&e.base, &x[..e.n_base_inputs])?;
            for k in e.n_base_inputs..n {
                given.float(k)?;
            }
            let mut own = e.dtypes.iter().copied();
            if !e.keeps_base {
                out[0] = own.next().expect("an expression has an output");
            }
            out.extend(own);
            Ok(out)
        }
        &Op::Cast(to) => cast(x[0].dtype, to),

        // Moved.
        Op::Permute(_) | Op::Slice { .. } => one(if x[0].dtype == I32 { I32 } else { given.float(0)? }),
        Op::Concat { .. } => one(given.alike(0..n)?),
        Op::Pad { .. } => one(given.float(0)?),
        Op::Gather { .. } => {
            given.are(1..2, I32)?;
            one(given.float(0)?)
        }
        Op::Embedding => {
            given.are(0..1, I32)?;
            one(given.float(1)?)
        }

        // Sums over many elements.
        Op::ScatterAdd { .. } => {
            given.are(1..2, I32)?;
            given.float(0)?;
            one(F32)
        }
        Op::EmbeddingGrad { .. } => {
            given.are(0..1, I32)?;
            given.float(1)?;
            one(F32)
        }
        Op::Reduce { kind, .. } => {
            let own = given.float(0)?;
            one(match kind {
                ReduceKind::Sum | ReduceKind::Mean => F32,
                // One of the elements.
                ReduceKind::Max | ReduceKind::Min => own,
            })
        }
        Op::Exchange { kind: ExchangeKind::Sum | ExchangeKind::Scatter { .. }, .. } => {
            given.are(0..1, F32)?;
            one(F32)
        }
        Op::Exchange {
            kind: ExchangeKind::Gather { .. } | ExchangeKind::Swap { .. } | ExchangeKind::Pass { .. },
            ..
        } => one(given.float(0)?),

        // Products, and windows of a few elements.
        Op::MatMul { rounded: None, .. } | Op::Conv2d(_) => {
            given.alike(0..2)?;
            one(F32)
        }
        &Op::MatMul { rounded: Some(half), .. } => {
            for k in 0..2 {
                if x[k].dtype != F32 {
                    given.are(k..k + 1, half)?;
                }
            }
            one(F32)
        }
        Op::Conv2dGradInput { .. } => one(given.alike(0..2)?),
        Op::Conv2dGradWeight { .. } => {
            given.alike(0..2)?;
            one(F32)
        }
        Op::MaxPool(_) => Ok(vec![given.float(0)?, I32]),
        Op::MaxPoolGrad { .. } => {
            given.are(1..2, I32)?;
            one(given.float(0)?)
        }
        Op::AvgPool(_) | Op::AvgPoolGrad { .. } => one(given.float(0)?),

        // Norms: data in their own type; factors, offsets, statistics and their gradients in f32.
        Op::BatchNorm { .. } | Op::BatchNormFromSums { .. } => {
            given.are(1..n, F32)?;
            Ok(vec![given.float(0)?, F32, F32, F32, F32])
        }
        Op::LayerNorm { .. } | Op::GroupNorm { .. } => {
            given.are(1..n, F32)?;
            Ok(vec![given.float(0)?, F32, F32])
        }
        Op::RmsNorm { .. } => {
            given.are(1..n, F32)?;
            Ok(vec![given.float(0)?, F32])
        }
        Op::BatchNormGrad { .. } | Op::LayerNormGrad | Op::GroupNormGrad { .. } => {
            given.are(2..n, F32)?;
            Ok(vec![given.alike(0..2)?, F32, F32])
        }
        Op::RmsNormGrad => {
            given.are(2..n, F32)?;
            Ok(vec![given.alike(0..2)?, F32])
        }
        Op::BatchNormSums => {
            given.are(1..n, F32)?;
            given.float(0)?;
            one(F32)
        }
        Op::BatchNormGradSums { .. } => {
            given.are(2..n, F32)?;
            given.alike(0..2)?;
            Ok(vec![F32, F32, F32])
        }
        Op::BatchNormGradFromSums { .. } => {
            given.are(2..n, F32)?;
            one(given.alike(0..2)?)
        }

        // Softmax and losses.
        Op::Softmax { .. } | Op::LogSoftmax { .. } => {
            given.float(0)?;
            one(F32)
        }
        Op::SoftmaxGrad { .. } | Op::LogSoftmaxGrad { .. } => {
            given.are(0..2, F32)?;
            one(F32)
        }
        Op::CrossEntropy(_) => {
            given.float(0)?;
            given.are(1..2, I32)?;
            given.are(2..n, F32)?;
            Ok(vec![F32, F32])
        }
        Op::CrossEntropyGrad(_) => {
            given.are(0..1, F32)?;
            given.are(2..3, I32)?;
            given.are(3..n, F32)?;
            one(given.float(1)?)
        }

        // Sequences. Scores, and with them the mask, are f32.
        Op::Attention(a) => {
            let n_data = if a.packed { 1 } else { 3 };
            given.are(n_data..n, F32)?;
            Ok(vec![given.alike(0..n_data)?, F32])
        }
        Op::AttentionGrad(a) => {
            let n_data = if a.packed { 1 } else { 3 };
            let own = given.alike(3..3 + n_data)?;
            given.are(0..2, own)?;
            given.are(2..3, F32)?;
            given.are(3 + n_data..n, F32)?;
            Ok(vec![own; n_data])
        }
        Op::Recurrent { cell, .. } => {
            let own = given.alike(0..n)?;
            Ok(vec![own; if cell.gates() == 4 { 3 } else { 2 }])
        }
        // dw_hh and db_hh are sums over all steps.
        Op::RecurrentGrad { cell, .. } => {
            let own = given.alike(0..n)?;
            let mut out = vec![own, F32, F32, own];
            out.extend((cell.gates() == 4).then_some(own));
            Ok(out)
        }
    }
}

/// Between f32 and the types that kernels convert it from and to.
fn cast(from: DType, to: DType) -> Result<Vec<DType>, TraceErrorKind> {
    match (from, to) {
        (F32, F16 | Bf16 | I32) | (F16 | Bf16 | I32, F32) => Ok(vec![to]),
        _ => {
            let why =
                format!("no kernel converts {from} to {to}; f32 is converted from and to f16, bf16 and i32");
            Err(TraceErrorKind::Option { op: "cast", why })
        }
    }
}

/// The operands of an op, to be asked for their types.
struct Operands<'a> {
    op: &'static str,
    x: &'a [&'a Value],
}

impl Operands<'_> {
    /// The type of operand `i`, which ops can compute on.
    fn float(&self, i: usize) -> Result<DType, TraceErrorKind> {
        match self.x[i].dtype {
            dtype @ (F32 | F16 | Bf16) => Ok(dtype),
            _ => self.refuse(i, "f32, f16 or bf16".into()),
        }
    }

    /// The one type of these operands, which ops can compute on.
    fn alike(&self, which: Range<usize>) -> Result<DType, TraceErrorKind> {
        let (first, want) = (which.start, self.float(which.start)?);
        match which.into_iter().find(|&i| self.x[i].dtype != want) {
            Some(i) => self.refuse(i, format!("{want}, the type of operand {first},")),
            None => Ok(want),
        }
    }

    /// These operands must be of this type.
    fn are(&self, mut which: Range<usize>, want: DType) -> Result<(), TraceErrorKind> {
        match which.find(|&i| self.x[i].dtype != want) {
            Some(i) => self.refuse(i, want.name().into()),
            None => Ok(()),
        }
    }

    fn refuse<T>(&self, operand: usize, want: String) -> Result<T, TraceErrorKind> {
        Err(TraceErrorKind::DType { op: self.op, operand, got: self.x[operand].dtype, want })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Attention, Cell, Conv, CrossEntropy, Window};
    use crate::program::Axis;
    use crate::{Builder, Graph, Init, differentiate, fuse};

    use polyreme_kernels::elementwise::{Binary, Unary};

    /// An operand such as `t[2,3]`, where `t` stands for each type that ops compute on in turn.
    fn operand(text: &str, t: DType) -> (Vec<usize>, DType) {
        let (name, dims) = text.trim_end_matches(']').split_once('[').unwrap();
        let dtype = if name == "t" { t } else { DType::ALL.into_iter().find(|d| d.name() == name).unwrap() };
        (dims.split(',').filter(|d| !d.is_empty()).map(|d| d.parse().unwrap()).collect(), dtype)
    }

    fn push(op: &Op, operands: &[(Vec<usize>, DType)]) -> Result<Vec<DType>, String> {
        let mut b = Builder::new();
        let inputs: Vec<_> = operands
            .iter()
            .enumerate()
            .map(|(i, (dims, dtype))| b.input(&i.to_string(), dims.clone(), *dtype).unwrap())
            .collect();
        let mut graph = b.finish(&[]);
        let outputs = graph.push(op.clone(), &inputs, "mine").map_err(|e| e.to_string())?;
        graph.verify();
        Ok(outputs.into_iter().map(|v| graph.value(v).dtype).collect())
    }

    /// Outputs are `want` for each `t`; and every operand, made another type, is refused by name.
    fn check(op: Op, operands: &str, want: &str) {
        let texts: Vec<_> = operands.split(' ').collect();
        let n_own = texts.iter().filter(|x| x.starts_with('t')).count();
        for t in [F32, F16, Bf16] {
            let given: Vec<_> = texts.iter().map(|x| operand(x, t)).collect();
            let wanted: Vec<_> = want.split(' ').map(|x| operand(&format!("{x}[]"), t).1).collect();
            assert_eq!(push(&op, &given).as_ref(), Ok(&wanted), "{} of {t}", op.name());
            for (i, text) in texts.iter().enumerate() {
                let mut wrong = vec![DType::F64, DType::U8];
                wrong.extend((!text.starts_with('t')).then_some(Bf16));
                // Mixed, where there is something to mix with.
                wrong.extend((text.starts_with('t') && n_own > 1).then_some(if t == F32 {
                    Bf16
                } else {
                    F32
                }));
                for dtype in wrong {
                    let mut given = given.clone();
                    given[i].1 = dtype;
                    let said = push(&op, &given).expect_err(op.name());
                    // Of two that differ, either may be called the wrong one.
                    assert!(said.starts_with(&format!("layer `mine`: {}: operand ", op.name())), "{said}");
                    assert!(
                        said.contains(dtype.name()) && said.ends_with("is needed; cast it first"),
                        "{said}"
                    );
                }
            }
        }
    }

    #[test]
    fn element_by_element_and_moved_the_type_stays() {
        check(Op::Unary(Unary::Gelu), "t[2,3]", "t");
        check(Op::Dropout { p: 0.5, stream: 1, slab: None }, "t[2,3]", "t");
        check(Op::Binary(Binary::Add), "t[2,3] t[3]", "t");
        check(Op::Binary(Binary::Greater), "t[2,3] t[3]", "t");
        check(Op::Select, "t[2,3] t[3] t[]", "t");
        check(Op::Permute(vec![1, 0]), "t[2,3]", "t");
        check(Op::Slice { axis: 1, start: 1, len: 2 }, "t[2,3]", "t");
        check(Op::Concat { axis: 0 }, "t[2,3] t[1,3] t[4,3]", "t");
        check(Op::Pad { axis: 0, before: 1, after: 0, value: 0.0 }, "t[2,3]", "t");
        check(Op::Gather { axis: 1 }, "t[2,3] i32[2,5]", "t");
        check(Op::Embedding, "i32[2,5] t[7,3]", "t");
        let ids = [(vec![2, 3], I32)];
        assert_eq!(push(&Op::Permute(vec![1, 0]), &ids), Ok(vec![I32]));
        assert_eq!(push(&Op::Slice { axis: 0, start: 0, len: 1 }, &ids), Ok(vec![I32]));
    }

    #[test]
    fn sums_are_f32_and_extremes_are_not() {
        let reduce = |kind| Op::Reduce { kind, axes: vec![1] };
        check(reduce(ReduceKind::Sum), "t[2,3]", "f32");
        check(reduce(ReduceKind::Mean), "t[2,3]", "f32");
        check(reduce(ReduceKind::Max), "t[2,3]", "t");
        check(reduce(ReduceKind::Min), "t[2,3]", "t");
        check(Op::ScatterAdd { axis: 1, len: 9 }, "t[2,3] i32[2,3]", "f32");
        check(Op::EmbeddingGrad { rows: 7 }, "i32[2,5] t[2,5,3]", "f32");
        let exchange = |kind| Op::Exchange { axis: Axis::Tensor, kind };
        check(exchange(ExchangeKind::Sum), "f32[3]", "f32");
        check(exchange(ExchangeKind::Scatter { ranks: 3 }), "f32[3]", "f32");
        check(exchange(ExchangeKind::Gather { ranks: 3, rank: 0 }), "t[3]", "t");
        check(exchange(ExchangeKind::Swap { ranks: 3 }), "t[3]", "t");
        check(exchange(ExchangeKind::Pass { to: Some(1), from: None }), "t[3]", "t");
    }

    #[test]
    fn products_have_one_type() {
        let (conv, window) = (Conv::default(), Window::Adaptive { out: (2, 2) });
        check(Op::MatMul { ta: false, tb: true, rounded: None }, "t[2,3] t[4,3]", "f32");
        check(Op::Conv2d(conv), "t[1,4,4,3] t[5,3,1,1]", "f32");
        check(Op::Conv2dGradInput { conv, size: (4, 4) }, "t[1,4,4,5] t[5,3,1,1]", "t");
        check(Op::Conv2dGradWeight { conv, kernel: (1, 1) }, "t[1,4,4,3] t[1,4,4,5]", "f32");
        check(Op::MaxPool(window), "t[1,4,4,3]", "t i32");
        check(Op::MaxPoolGrad { window, size: (4, 4) }, "t[1,2,2,3] i32[1,2,2,3]", "t");
        check(Op::AvgPool(window), "t[1,4,4,3]", "t");
        check(Op::AvgPoolGrad { window, size: (4, 4) }, "t[1,2,2,3]", "t");
    }

    #[test]
    fn statistics_of_norms_are_f32() {
        let (eps, momentum, relu) = (1e-5, 0.1, false);
        let four = "f32[3] f32[3] f32[3] f32[3]";
        check(Op::BatchNorm { eps, momentum, relu }, &format!("t[2,3] {four}"), "t f32 f32 f32 f32");
        check(Op::BatchNormGrad { relu }, &format!("t[2,3] t[2,3] {four}"), "t f32 f32");
        check(Op::BatchNormSums, "t[2,3] f32[3]", "f32");
        let from_sums = format!("t[2,3] {four} f32[7]");
        check(Op::BatchNormFromSums { eps, momentum, relu }, &from_sums, "t f32 f32 f32 f32");
        check(Op::BatchNormGradSums { relu }, &format!("t[2,3] t[2,3] {four}"), "f32 f32 f32");
        check(Op::BatchNormGradFromSums { relu }, &format!("t[2,3] t[2,3] {four} f32[7]"), "t");
        check(Op::LayerNorm { eps }, "t[2,3] f32[3] f32[3]", "t f32 f32");
        check(Op::LayerNormGrad, "t[2,3] t[2,3] f32[3] f32[2] f32[2]", "t f32 f32");
        check(Op::RmsNorm { eps }, "t[2,3] f32[3]", "t f32");
        check(Op::RmsNormGrad, "t[2,3] t[2,3] f32[3] f32[2]", "t f32");
        check(Op::GroupNorm { groups: 3, eps }, "t[2,3] f32[3] f32[3]", "t f32 f32");
        check(Op::GroupNormGrad { groups: 3 }, "t[2,3] t[2,3] f32[3] f32[2,3] f32[2,3]", "t f32 f32");
    }

    #[test]
    fn softmax_and_losses_are_f32() {
        let options = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
        check(Op::Softmax { axis: 1 }, "t[2,3]", "f32");
        check(Op::LogSoftmax { axis: 1 }, "t[2,3]", "f32");
        check(Op::SoftmaxGrad { axis: 1 }, "f32[2,3] f32[2,3]", "f32");
        check(Op::LogSoftmaxGrad { axis: 1 }, "f32[2,3] f32[2,3]", "f32");
        check(Op::CrossEntropy(options), "t[2,3] i32[2] f32[3]", "f32 f32");
        check(Op::CrossEntropyGrad(options), "f32[] t[2,3] i32[2] f32[2] f32[3]", "t");
    }

    #[test]
    fn sequences_keep_their_type() {
        let of = |packed| Attention { causal: false, scale: 1.0, packed };
        let (q, mask, lse) = ("t[1,2,4,3]", "f32[2,2]", "f32[1,4,2]");
        check(Op::Attention(of(true)), &format!("t[1,2,3,4,3] {mask}"), "t f32");
        check(Op::Attention(of(false)), &format!("{q} {q} {q} {mask}"), "t f32");
        check(Op::AttentionGrad(of(true)), &format!("{q} {q} {lse} t[1,2,3,4,3] {mask}"), "t");
        check(Op::AttentionGrad(of(false)), &format!("{q} {q} {lse} {q} {q} {q} {mask}"), "t t t");
        let reverse = false;
        let (lstm, gru) = (Cell::Lstm, Cell::Gru);
        let state = "t[1,3]";
        let operands = format!("t[1,2,12] t[12,3] t[12] {state} {state}");
        check(Op::Recurrent { cell: lstm, reverse }, &operands, "t t t");
        check(Op::Recurrent { cell: gru, reverse }, &format!("t[1,2,9] t[9,3] t[9] {state}"), "t t");
        let seq = "t[1,2,3]";
        let operands = format!("{seq} t[12,3] {state} {state} {seq} {seq} t[1,2,12]");
        check(Op::RecurrentGrad { cell: lstm, reverse }, &operands, "t f32 f32 t t");
        let operands = format!("{seq} t[9,3] {state} {seq} t[1,2,12]");
        check(Op::RecurrentGrad { cell: gru, reverse }, &operands, "t f32 f32 t");
    }

    #[test]
    fn errors_name_layer_op_operand_and_types() {
        let said = push(&Op::Binary(Binary::Add), &[(vec![2], Bf16), (vec![2], F32)]).unwrap_err();
        let want = "operand 1 is f32, bf16, the type of operand 0, is needed; cast it first";
        assert_eq!(said, format!("layer `mine`: add: {want}"));
        let said = push(&Op::Unary(Unary::Relu), &[(vec![2], I32)]).unwrap_err();
        assert_eq!(said, "layer `mine`: relu: operand 0 is i32, f32, f16 or bf16 is needed; cast it first");
    }

    /// A network with weights in f32 and everything else in `t`, as the ops' types have it.
    fn network(t: DType) -> Graph {
        let mut b = Builder::new();
        let trace = |b: &mut Builder| {
            let x = b.input("x", [4, 6], F32)?;
            let labels = b.input("labels", [4], I32)?;
            let (w, bias) = (b.param("w", [6, 6], Init::Const(0.1))?, b.param("b", [6], Init::Const(0.0))?);
            let (gamma, beta) = (b.param("g", [6], Init::Const(1.0))?, b.param("e", [6], Init::Const(0.0))?);
            let [x, wt, bt] = [b.cast(x, t)?, b.cast(w, t)?, b.cast(bias, t)?];
            let y = b.linear(x, wt, Some(bt))?;
            let y = b.activation("gelu", y)?;
            let y = b.layer_norm(y, gamma, beta, 1e-5)?;
            let top = b.reduce(ReduceKind::Max, y, &[1], true)?;
            let y = b.sub(y, top)?;
            let y = b.unary(Unary::Clamp(-3.0, 3.0), y)?;
            let positive = b.unary(Unary::Positive, y)?;
            let y = b.select(positive, y, top)?;
            let spread = b.sum(y, &[1])?;
            let y = b.matmul(y, wt, false, true)?;
            let none = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
            let loss = b.cross_entropy(y, labels, None, none)?;
            let other = b.mse(y, x)?;
            let third = b.mean(spread, &[0])?;
            let loss = b.add(loss, other)?;
            b.add(loss, third)
        };
        let loss = trace(&mut b).unwrap();
        differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
    }

    #[test]
    fn gradients_are_f32_whatever_the_values_are() {
        for t in [F32, F16, Bf16] {
            let step = network(t);
            assert!(step.grads.iter().flatten().all(|&v| step.value(v).dtype == F32));
            // Nothing is cast twice for the backward pass.
            let casts = step.nodes[step.n_forward..].iter().filter(|n| matches!(n.op, Op::Cast(_)));
            let mut read: Vec<_> = casts.map(|n| n.inputs[0]).collect();
            read.sort_unstable();
            assert!(read.windows(2).all(|pair| pair[0] != pair[1]), "{read:?}");
            assert_eq!(read.is_empty(), t == F32);
            let fused = fuse(&step);
            let hosts = fused.nodes.iter().filter(|n| matches!(n.op, Op::Epilogue(_)));
            assert!(hosts.clone().any(|n| fused.value(n.outputs[0]).dtype == t), "{t}");
        }
    }
}
