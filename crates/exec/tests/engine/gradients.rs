//! Every op's gradient against finite differences, as rows of cases.

use polyreme_exec::{Engine, Options};
use polyreme_graph::builder::{BatchNorm, ErrorKind};
use polyreme_graph::op::{Cell, Conv, CrossEntropy, ReduceKind, Window};
use polyreme_graph::{Builder, DType, Init, Program, Tensor, Traced, differentiate};
use polyreme_kernels::elementwise::{Binary, Unary};

use crate::check::{Check, Values, check};
use crate::random::TestRandom;

/// The values at which an op is smooth, and the step of the differences. A new op does not compile without its row.
fn smooth_at(op: Unary) -> (Values, f32) {
    match op {
        Unary::Ln | Unary::Sqrt | Unary::Rsqrt | Unary::Recip => (Values::Between(0.7, 2.0), 1e-2),
        Unary::Powf(_) => (Values::Between(0.7, 2.0), 1e-2),
        Unary::Relu | Unary::LeakyRelu(_) | Unary::Elu(_) | Unary::Abs => (Values::Signed(0.1, 1.5), 1e-2),
        Unary::Sign | Unary::Positive => (Values::Signed(0.1, 1.5), 1e-2),
        // Steps so long that rounding is little of them; see `casts`, too.
        Unary::RoundF16 | Unary::RoundBf16 => (Values::Signed(0.5, 1.0), 0.4),
        // The bounds of the row's clamp are near integers too.
        Unary::Floor | Unary::Clamp(..) => (Values::OffIntegers, 1e-2),
        Unary::Neg
        | Unary::Exp
        | Unary::Tanh
        | Unary::Sigmoid
        | Unary::Gelu
        | Unary::GeluTanh
        | Unary::Silu
        | Unary::Erf
        | Unary::Square
        | Unary::Sin
        | Unary::Cos
        | Unary::Softplus
        | Unary::Scale(_)
        | Unary::Offset(_) => (Values::Between(-2.0, 2.0), 2e-2),
    }
}

#[test]
fn unary() {
    let ops = [
        Unary::Neg,
        Unary::Exp,
        Unary::Ln,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Recip,
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::Relu,
        Unary::LeakyRelu(0.1),
        Unary::Elu(0.7),
        Unary::Gelu,
        Unary::GeluTanh,
        Unary::Silu,
        Unary::Erf,
        Unary::Abs,
        Unary::Square,
        Unary::Sin,
        Unary::Cos,
        Unary::Softplus,
        Unary::Sign,
        Unary::Floor,
        Unary::Scale(-1.5),
        Unary::Offset(0.3),
        Unary::Powf(2.5),
        Unary::Powf(-1.0),
        Unary::Clamp(-0.95, 1.05),
        Unary::Positive,
        Unary::RoundF16,
    ];
    for op in ops {
        let (values, eps) = smooth_at(op);
        for shape in [&[1][..], &[3, 11], &[]] {
            let row = Check::new(&format!("{op:?} {shape:?}")).values(values).exact(eps, 5e-3);
            row.run(&[shape], |b, p| b.unary(op, p[0]));
        }
    }
}

/// Losses of numbers and of labels, whose differences are nowhere near a corner.
#[test]
fn errors_of_elements() {
    let kinds = [
        (ErrorKind::Squared, [Values::Between(-2.0, 2.0); 2]),
        (ErrorKind::Absolute, [Values::Apart(0.1), Values::Apart(0.1 * 1.7)]),
        // Squares within 3, and lines beyond 0.01.
        (ErrorKind::Huber { delta: 9.0 }, [Values::Between(-2.0, 2.0); 2]),
        (ErrorKind::Huber { delta: 0.01 }, [Values::Apart(0.1), Values::Apart(0.1 * 1.7)]),
        (ErrorKind::Bce, [Values::Between(-2.0, 2.0), Values::Between(0.0, 1.0)]),
    ];
    for (kind, each) in kinds {
        let row = Check::new(&format!("{kind:?}")).values_of(&each).exact(1e-2, 5e-3);
        row.run(&[&[4, 3], &[4, 3]], |b, p| b.error_of(kind, p[0], p[1]));
    }
}

/// Losses and their gradients as PyTorch 2.15 has them: `mse_loss`, `l1_loss`, `huber_loss` and
/// `binary_cross_entropy_with_logits`, the mean of all elements.
#[test]
fn losses_are_those_of_pytorch() {
    let x = [0.5, -1.5, 2.0, 3.0, 0.25, -0.75];
    let numbers = [0.25, 0.5, -1.0, 2.5, 0.25, 0.125];
    let labels = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0];
    let rows: [(ErrorKind, [f32; 6], f32, [f32; 6]); 4] = [
        (
            ErrorKind::Squared,
            numbers,
            2.346_354_2,
            [0.083_333_336, -0.666_666_7, 1.0, 0.166_666_67, 0.0, -0.291_666_7],
        ),
        (
            ErrorKind::Absolute,
            numbers,
            1.104_166_6,
            [0.166_666_67, -0.166_666_67, 0.166_666_67, 0.166_666_67, 0.0, -0.166_666_67],
        ),
        (
            ErrorKind::Huber { delta: 1.0 },
            numbers,
            0.756_510_44,
            [0.041_666_668, -0.166_666_67, 0.166_666_67, 0.083_333_336, 0.0, -0.145_833_34],
        ),
        (
            ErrorKind::Bce,
            labels,
            0.802_302_66,
            [-0.062_923_44, 0.030_404_255, -0.019_867_16, 0.158_762_35, -0.072_970_58, 0.053_470_213],
        ),
    ];
    for (kind, targets, loss, gradient) in rows {
        let mut b = Builder::new();
        let p = b.param("p", [2, 3], Init::Const(0.0)).unwrap();
        let t = b.input("t", [2, 3], DType::F32).unwrap();
        let each = b.error_of(kind, p, t).unwrap();
        let mean = b.mean_all(each).unwrap();
        let forward = b.finish(&[("loss", mean)]);
        let step = differentiate(&forward, mean).unwrap();
        let mut engine = Engine::new(Program::gradients(&step), Options::threads(1)).unwrap();
        engine.param_mut("p").unwrap().copy_from_slice(&x);
        engine.input_f32("t").unwrap().copy_from_slice(&targets);
        engine.run().unwrap();
        let got = (engine.output("loss").unwrap()[0], engine.grad("p").unwrap().unwrap().to_vec());
        assert!((got.0 - loss).abs() < 1e-6, "{kind:?}: {} and not {loss}", got.0);
        for (a, b) in got.1.iter().zip(&gradient) {
            assert!((a - b).abs() < 1e-7, "{kind:?}: {:?} and not {gradient:?}", got.1);
        }
    }
}

/// The values of both operands, or `None` where there is no second derivative.
fn both_smooth_at(op: Binary) -> Option<[Values; 2]> {
    match op {
        Binary::Add | Binary::Sub | Binary::Mul => Some([Values::Between(-2.0, 2.0); 2]),
        Binary::Div => Some([Values::Between(-2.0, 2.0), Values::Signed(0.8, 2.0)]),
        // Operands from shifted lattices never come near each other.
        Binary::Max | Binary::Min | Binary::Greater | Binary::GreaterEqual | Binary::Equal => {
            Some([Values::Apart(0.1), Values::Apart(0.1 * 1.7)])
        }
        Binary::Pow => Some([Values::Between(0.7, 2.0), Values::Between(-2.0, 2.0)]),
        Binary::ReluGrad
        | Binary::TanhGrad
        | Binary::SigmoidGrad
        | Binary::GeluGrad
        | Binary::GeluTanhGrad
        | Binary::SiluGrad
        | Binary::SoftplusGrad
        | Binary::LeakyReluGrad(_)
        | Binary::EluGrad(_) => None,
    }
}

const BINARY: [Binary; 19] = [
    Binary::Add,
    Binary::Sub,
    Binary::Mul,
    Binary::Div,
    Binary::Max,
    Binary::Min,
    Binary::Pow,
    Binary::Greater,
    Binary::GreaterEqual,
    Binary::Equal,
    Binary::ReluGrad,
    Binary::TanhGrad,
    Binary::SigmoidGrad,
    Binary::GeluGrad,
    Binary::GeluTanhGrad,
    Binary::SiluGrad,
    Binary::SoftplusGrad,
    Binary::LeakyReluGrad(0.1),
    Binary::EluGrad(1.0),
];

#[test]
fn binary_with_broadcasting() {
    let shapes: [[&[usize]; 2]; 7] = [
        [&[13], &[13]],
        [&[3, 5], &[5]],
        [&[5], &[3, 5]],
        [&[3, 1], &[1, 5]],
        [&[2, 3, 4], &[3, 1]],
        [&[], &[4, 3]],
        [&[2, 1, 3], &[1, 1, 1]],
    ];
    for op in BINARY {
        let Some(values) = both_smooth_at(op) else { continue };
        for [a, b] in shapes {
            let row = Check::new(&format!("{op:?} {a:?} {b:?}")).values_of(&values);
            row.exact(5e-3, 5e-3).run(&[a, b], |b, p| b.binary(op, p[0], p[1]));
        }
    }
    check("an operand with itself", &[&[9]], |b, p| b.mul(p[0], p[0]));
    check("one parameter twice", &[&[9]], |b, p| b.add(p[0], p[0]));
}

#[test]
fn the_gradients_own_ops_refuse_to_be_differentiated() {
    for op in BINARY.into_iter().filter(|op| both_smooth_at(*op).is_none()) {
        let mut b = Builder::new();
        let x = b.param("x", [3], Init::Const(1.0)).unwrap();
        let y = b.layer("twice", |b| b.binary(op, x, x)).unwrap();
        let loss = b.sum(y, &[0]).unwrap();
        let error = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap_err().to_string();
        assert!(error.starts_with("layer `twice`: ") && error.contains("no gradient"), "{error}");
    }
}

#[test]
fn operands_without_a_gradient_refuse_to_be_learnt() {
    let mut b = Builder::new();
    let x = b.param("x", [2, 3], Init::Const(1.0)).unwrap();
    let weights = b.param("weights", [3], Init::Const(1.0)).unwrap();
    let labels = b.input("labels", [2], DType::I32).unwrap();
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    let loss = b.layer("head", |b| b.cross_entropy(x, labels, Some(weights), options)).unwrap();
    let error = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap_err().to_string();
    assert!(error.starts_with("layer `head`: cross_entropy has no gradient"), "{error}");

    let mut b = Builder::new();
    let qkv = b.param("qkv", [1, 4, 3, 2, 8], Init::Const(1.0)).unwrap();
    let mask = b.param("mask", [4, 4], Init::Const(0.0)).unwrap();
    let y = b.layer("mix", |b| b.attention_packed(qkv, false, Some(mask))).unwrap();
    let loss = b.sum(y, &[0, 1, 2, 3]).unwrap();
    let error = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap_err().to_string();
    assert!(error.starts_with("layer `mix`: attention has no gradient"), "{error}");
}

#[test]
fn equal_operands_share_the_gradient() {
    // At a tie the central difference is the mean of both slopes, which is what sharing gives.
    for op in [Binary::Max, Binary::Min] {
        let row = Check::new(&format!("{op:?} at a tie")).values(Values::Between(0.5, 0.5));
        row.run(&[&[6], &[6]], |b, p| b.binary(op, p[0], p[1]));
    }
    for kind in [ReduceKind::Max, ReduceKind::Min] {
        let row = Check::new(&format!("{kind:?} of two equal elements")).values(Values::Between(0.5, 0.5));
        row.run(&[&[5, 2]], |b, p| b.reduce(kind, p[0], &[1], false));
    }
}

#[test]
fn select() {
    let condition = vec![1.0, 0.0, 0.0, -2.0, 1.0, 0.0];
    for [p, q] in [[&[2, 3][..], &[2, 3]], [&[3], &[2, 1]], [&[], &[2, 3]]] {
        let row = Check::new(&format!("select {p:?} {q:?}")).floats("c", condition.clone());
        row.run(&[p, q], |b, p| {
            let c = b.input("c", [2, 3], DType::F32)?;
            b.select(c, p[0], p[1])
        });
    }
}

#[test]
fn fused_chains() {
    check("a long chain", &[&[4, 33], &[33], &[4, 1]], |b, p| {
        let mut x = p[0];
        for i in 0..6 {
            let t = b.unary(Unary::Tanh, x)?;
            let s = b.mul(t, p[1])?;
            let u = if i % 2 == 0 { b.add(s, p[2])? } else { b.sub(s, p[0])? };
            x = b.add(u, x)?;
        }
        Ok(x)
    });
    check("many operands", &[&[5, 7][..]; 20], |b, p| {
        let mut sum = p[0];
        for &x in &p[1..] {
            let m = b.mul(sum, x)?;
            sum = b.add(m, x)?;
        }
        Ok(sum)
    });
    check("a product with an epilogue", &[&[6, 5], &[7, 5], &[7], &[6, 7], &[6, 1]], |b, p| {
        let y = b.linear(p[0], p[1], Some(p[2]))?;
        let g = b.unary(Unary::Gelu, y)?;
        let m = b.mul(g, p[4])?;
        let r = b.add(m, p[3])?;
        b.mul(r, y)
    });
}

#[test]
fn moves() {
    check("reshape", &[&[2, 6]], |b, p| {
        let y = b.reshape(p[0], [3, 4])?;
        let y = b.unary(Unary::Square, y)?;
        b.reshape(y, [12])
    });
    check("reshape of a parameter alone", &[&[2, 6]], |b, p| b.reshape(p[0], [4, 3]));
    check("expand", &[&[3, 1]], |b, p| b.expand(p[0], [2, 3, 4]));
    check("expand of a scalar", &[&[]], |b, p| b.expand(p[0], [2, 3]));
    for perm in [&[1, 0, 2][..], &[2, 0, 1], &[2, 1, 0], &[0, 1, 2]] {
        check(&format!("permute {perm:?}"), &[&[2, 3, 5]], |b, p| b.permute(p[0], perm));
    }
    for (axis, start, len) in [(0, 1, 2), (1, 0, 3), (2, 4, 1), (1, 2, 0)] {
        check(&format!("slice {axis}"), &[&[3, 4, 5]], |b, p| b.slice(p[0], axis, start, len));
    }
    for axis in 0..3 {
        let mut shapes = [[2, 3, 4]; 3];
        shapes[1][axis] = 1;
        shapes[2][axis] = 5;
        check(&format!("concat {axis}"), &shapes.each_ref().map(|s| &s[..]), |b, p| b.concat(p, axis));
        let name = format!("concat of one parameter twice {axis}");
        check(&name, &[&[2, 3, 4]], |b, p| b.concat(&[p[0], p[0]], axis));
        check(&format!("split {axis}"), &[&[6, 6, 6]], |b, p| {
            let parts = b.split(p[0], axis, 3)?;
            let m = b.mul(parts[0], parts[1])?;
            b.sub(m, parts[2])
        });
        check(&format!("pad {axis}"), &[&[2, 3, 4]], |b, p| b.pad(p[0], axis, 1, 2, 0.5));
        let mut index = [2, 3, 4];
        index[axis] = 6;
        let mut random = TestRandom::new(3);
        let n: usize = index.iter().product();
        let ids: Vec<_> = (0..n).map(|_| random.below([2, 3, 4][axis]) as i32).collect();
        Check::new(&format!("gather {axis}")).integers("ids", ids).run(&[&[2, 3, 4]], |b, p| {
            let ids = b.input("ids", index, DType::I32)?;
            b.gather(p[0], axis, ids)
        });
    }
}

#[test]
fn casts() {
    // Rounding to 11 or 8 bits is noise of the differences, so steps are long and the tolerance wide.
    let formats = [(DType::F16, Unary::RoundF16, 1e-2), (DType::Bf16, Unary::RoundBf16, 3e-2)];
    for (to, round, tolerance) in formats {
        let row =
            || Check::new(&format!("cast to {to}")).values(Values::Signed(0.5, 1.0)).exact(0.4, tolerance);
        let there_and_back = |b: &mut Builder, x| {
            let low = b.cast(x, to)?;
            b.cast(low, DType::F32)
        };
        row().run(&[&[37]], |b, p| there_and_back(b, p[0]));
        row().run(&[&[37]], |b, p| b.unary(round, p[0]));
        // The stored value is read twice: contributions to its gradient add up.
        row().run(&[&[37], &[37]], |b, p| {
            let low = b.cast(p[0], to)?;
            let (one, two) = (b.cast(low, DType::F32)?, b.cast(low, DType::F32)?);
            let scaled = b.scale(one, 3.0)?;
            let sum = b.add(scaled, two)?;
            b.add(sum, p[1])
        });
        row().run(&[&[4, 9]], |b, p| {
            let low = b.cast(p[0], to)?;
            let flat = b.reshape(low, [36])?;
            b.cast(flat, DType::F32)
        });
    }
    let row = Check::new("f16 to bf16").values(Values::Signed(0.5, 1.0)).exact(0.4, 3e-2);
    row.run(&[&[37]], |b, p| {
        let f16 = b.cast(p[0], DType::F16)?;
        let bf16 = b.cast(f16, DType::Bf16)?;
        b.cast(bf16, DType::F32)
    });
}

#[test]
fn reductions() {
    let kinds = [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max, ReduceKind::Min];
    for kind in kinds {
        for axes in [&[0][..], &[1], &[2], &[0, 2], &[1, 2], &[0, 1, 2], &[]] {
            for keep in [true, false] {
                let row = Check::new(&format!("{kind:?} {axes:?} keep {keep}")).values(Values::Apart(0.05));
                row.run(&[&[3, 4, 5]], |b, p| b.reduce(kind, p[0], axes, keep));
            }
        }
        let row = Check::new(&format!("long {kind:?}")).values(Values::Apart(0.03)).exact(5e-3, 5e-3);
        row.run(&[&[3, 130]], |b, p| b.reduce(kind, p[0], &[1], false));
    }
}

#[test]
fn products() {
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        for lead in [&[][..], &[1], &[3], &[2, 2]] {
            for (m, k, n) in [(5, 7, 3), (1, 9, 17), (8, 1, 8)] {
                let (a, q) = (if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] });
                let (a, q) = ([lead, &a].concat(), [lead, &q].concat());
                let name = format!("matmul {a:?} {q:?} {ta} {tb}");
                check(&name, &[&a, &q], |b, p| b.matmul(p[0], p[1], ta, tb));
            }
        }
    }
    for tb in [false, true] {
        let q: &[usize] = if tb { &[6, 5] } else { &[5, 6] };
        for a in [&[3, 4, 5][..], &[1, 4, 5], &[2, 3, 4, 5]] {
            check(&format!("shared right {a:?} {tb}"), &[a, q], |b, p| b.matmul(p[0], p[1], false, tb));
        }
    }
    check("a product with itself", &[&[5, 5]], |b, p| b.matmul(p[0], p[0], false, true));
}

/// Convolutions are linear in each operand, so a long step costs nothing and hides rounding.
fn linear(name: &str) -> Check {
    Check::new(name).exact(0.25, 2e-3)
}

#[test]
fn convolutions() {
    let base = Conv::default();
    // Name, [n, h, w, c], [out, in/groups, kh, kw].
    let rows: [(&str, [usize; 4], [usize; 4], Conv); 14] = [
        ("plain", [2, 5, 6, 3], [4, 3, 3, 3], base),
        ("stride", [1, 7, 6, 3], [4, 3, 3, 2], Conv { stride: (2, 3), ..base }),
        ("padding", [1, 4, 5, 3], [2, 3, 3, 3], Conv { padding: (1, 2), ..base }),
        ("dilation", [1, 7, 8, 2], [3, 2, 3, 2], Conv { dilation: (2, 3), padding: (1, 1), ..base }),
        ("groups", [2, 5, 4, 6], [4, 3, 3, 3], Conv { groups: 2, padding: (1, 1), ..base }),
        ("depthwise", [2, 6, 5, 8], [8, 1, 3, 3], Conv { groups: 8, padding: (1, 1), ..base }),
        (
            "depthwise of 2",
            [1, 6, 5, 5],
            [10, 1, 3, 3],
            Conv { groups: 5, padding: (1, 1), stride: (2, 1), ..base },
        ),
        ("winograd's size", [1, 8, 8, 16], [16, 16, 3, 3], Conv { padding: (1, 1), ..base }),
        ("odd image", [1, 9, 7, 16], [24, 16, 3, 3], Conv { padding: (1, 1), ..base }),
        ("pointwise", [2, 4, 3, 9], [17, 9, 1, 1], base),
        ("pointwise with stride", [1, 5, 4, 8], [8, 8, 1, 1], Conv { stride: (2, 2), ..base }),
        ("large kernel", [1, 12, 11, 3], [5, 3, 7, 7], Conv { stride: (2, 2), padding: (3, 3), ..base }),
        // In bf16 these are products of pairs, where there are instructions for it.
        (
            "many channels with stride",
            [4, 9, 8, 64],
            [50, 64, 3, 3],
            Conv { stride: (2, 2), padding: (1, 1), ..base },
        ),
        ("many channels, pointwise", [2, 7, 6, 66], [48, 66, 1, 1], base),
    ];
    for (name, x, w, conv) in rows {
        linear(name).run(&[&x, &w, &[w[0]]], |b, p| b.conv2d(p[0], p[1], Some(p[2]), conv));
    }
    check("a convolution with an epilogue", &[&[1, 6, 6, 4], &[5, 4, 3, 3], &[5]], |b, p| {
        let y = b.conv2d(p[0], p[1], Some(p[2]), Conv { padding: (1, 1), ..base })?;
        b.unary(Unary::Silu, y)
    });
}

#[test]
fn transposed_convolutions() {
    let base = Conv::default();
    let two = Conv { stride: (2, 2), padding: (1, 1), ..base };
    /// Name, [n, h, w, in], [in, out/groups, kh, kw], options, output padding.
    type Row = (&'static str, [usize; 4], [usize; 4], Conv, (usize, usize));
    let rows: [Row; 6] = [
        ("plain", [1, 4, 5, 3], [3, 4, 3, 3], base, (0, 0)),
        ("stride 2", [2, 3, 4, 4], [4, 3, 4, 4], two, (0, 0)),
        ("output padding", [1, 3, 4, 4], [4, 3, 3, 3], two, (1, 1)),
        ("groups", [1, 3, 4, 6], [6, 2, 3, 3], Conv { groups: 3, ..two }, (1, 0)),
        ("dilation", [1, 3, 4, 3], [3, 2, 3, 3], Conv { dilation: (2, 1), ..base }, (0, 0)),
        ("two by two", [1, 4, 4, 16], [16, 8, 2, 2], Conv { stride: (2, 2), ..base }, (0, 0)),
    ];
    for (name, x, w, conv, extra) in rows {
        let bias = [w[1] * conv.groups];
        linear(&format!("transposed {name}")).run(&[&x, &w, &bias], |b, p| {
            let y = b.conv_transpose2d(p[0], p[1], Some(p[2]), conv, extra)?;
            let size = |i: usize, s: usize, pad: usize, d: usize, e: usize| {
                (x[1 + i] - 1) * s + (w[2 + i] - 1) * d + 1 + e - 2 * pad
            };
            let want = [
                x[0],
                size(0, conv.stride.0, conv.padding.0, conv.dilation.0, extra.0),
                size(1, conv.stride.1, conv.padding.1, conv.dilation.1, extra.1),
                bias[0],
            ];
            assert_eq!(b.dims(y), want, "{name}");
            Ok(y)
        });
    }
}

#[test]
fn pools() {
    let fixed = |kernel, stride, padding, count_include_pad| Window::Fixed {
        kernel,
        stride,
        padding,
        count_include_pad,
    };
    let windows = [
        fixed((2, 2), (2, 2), (0, 0), true),
        fixed((3, 3), (2, 2), (1, 1), true),
        fixed((3, 3), (2, 2), (1, 1), false),
        fixed((3, 2), (1, 1), (1, 0), true),
        fixed((3, 2), (1, 1), (1, 1), false),
        fixed((1, 1), (2, 3), (0, 0), true),
        Window::Adaptive { out: (1, 1) },
        Window::Adaptive { out: (3, 2) },
        Window::Adaptive { out: (7, 6) },
        Window::Adaptive { out: (9, 8) },
    ];
    for window in windows {
        for c in [3, 16] {
            let x: &[usize] = &[2, 7, 6, c];
            // In bf16 some of these are equal, and the gradient goes to another one.
            let max = Check::new(&format!("max {window:?}")).values(Values::Apart(0.03)).roundings(80.0);
            max.run(&[x], |b, p| b.max_pool(p[0], window));
            linear(&format!("average {window:?}")).run(&[x], |b, p| b.avg_pool(p[0], window));
        }
    }
}

#[test]
fn norms() {
    let close = |name: &str| Check::new(name).exact(5e-3, 5e-3);
    for shape in [&[6, 5][..], &[3, 2, 2, 19], &[40, 8]] {
        let c = shape[shape.len() - 1];
        for training in [true, false] {
            let name = format!("batch norm {shape:?} training {training}");
            let f = |b: &mut Builder, p: &[Tensor]| batch_norm(b, p, c, training);
            close(&name).run(&[shape, &[c], &[c]], f);
        }
        close(&format!("batch norm and relu {shape:?}"))
            .values_of(&[Values::Apart(0.05), Values::Signed(0.5, 1.5)])
            .run(&[shape, &[c], &[c]], |b, p| {
                // Far above or below zero at each channel's scale: no element crosses the kink.
                let wide = b.scale(p[2], 8.0)?;
                let y = batch_norm(b, &[p[0], p[1], wide], c, true)?;
                b.unary(Unary::Relu, y)
            });
        let name = format!("layer norm {shape:?}");
        close(&name).run(&[shape, &[c], &[c]], |b, p| b.layer_norm(p[0], p[1], p[2], 1e-3));
        close(&format!("rms norm {shape:?}")).run(&[shape, &[c]], |b, p| b.rms_norm(p[0], p[1], 1e-3));
    }
    for (shape, groups) in [(&[2, 3, 4, 6][..], 2), (&[2, 3, 3, 8], 8), (&[3, 2, 2, 5], 1), (&[2, 9, 12], 3)]
    {
        let c = shape[shape.len() - 1];
        let name = format!("group norm {shape:?} {groups}");
        close(&name).run(&[shape, &[c], &[c]], |b, p| b.group_norm(p[0], p[1], p[2], groups, 1e-3));
    }
}

fn batch_norm(b: &mut Builder, p: &[Tensor], c: usize, training: bool) -> Traced {
    let running_mean = b.state("mean", [c], Init::Const(0.2))?;
    let running_var = b.state("var", [c], Init::Const(1.7))?;
    let at = BatchNorm { gamma: p[1], beta: p[2], running_mean, running_var, eps: 1e-3, momentum: 0.1 };
    b.batch_norm(p[0], at, training)
}

#[test]
fn softmaxes() {
    for axis in 0..3 {
        for shape in [[3, 4, 5], [2, 9, 17], [1, 1, 3]] {
            check(&format!("softmax {axis} {shape:?}"), &[&shape], |b, p| b.softmax(p[0], axis));
            check(&format!("log softmax {axis} {shape:?}"), &[&shape], |b, p| b.log_softmax(p[0], axis));
        }
    }
}

#[test]
fn losses() {
    let labels = vec![2, 0, -100, 4, 4, 1];
    let plain = CrossEntropy { label_smoothing: 0.0, ignore_index: Some(-100) };
    for label_smoothing in [0.0, 0.1] {
        for weighted in [false, true] {
            let options = CrossEntropy { label_smoothing, ..plain };
            let name = format!("cross entropy {label_smoothing} {weighted}");
            let mut row =
                Check::new(&name).integers("labels", labels.clone()).values(Values::Between(-2.0, 2.0));
            if weighted {
                row = row.floats("class weights", vec![0.5, 1.0, 2.0, 0.1, 1.5]);
            }
            row.run(&[&[6, 5]], |b, p| {
                let labels = b.input("labels", [6], DType::I32)?;
                let weights = if weighted { Some(b.input("class weights", [5], DType::F32)?) } else { None };
                b.cross_entropy(p[0], labels, weights, options)
            });
        }
    }
    let none = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    Check::new("cross entropy of 33 classes").integers("labels", vec![32, 0, 7]).run(&[&[3, 33]], |b, p| {
        let labels = b.input("labels", [3], DType::I32)?;
        let loss = b.cross_entropy(p[0], labels, None, none)?;
        b.scale(loss, 3.0)
    });
    check("mse", &[&[4, 5], &[4, 5]], |b, p| b.mse(p[0], p[1]));
    check("bce", &[&[4, 5], &[4, 5]], |b, p| b.bce_with_logits(p[0], p[1]));
}

#[test]
fn embeddings() {
    for (ids, width) in [(vec![3, 0, 3, 3, 1, 6], 5), (vec![0; 6], 16), (vec![6, 5, 4, 3, 2, 1], 33)] {
        let row = Check::new(&format!("embedding {ids:?}")).integers("ids", ids);
        row.run(&[&[7, width]], |b, p| {
            let ids = b.input("ids", [2, 3], DType::I32)?;
            b.embedding(ids, p[0])
        });
    }
}

#[test]
fn attentions() {
    let mut random = TestRandom::new(5);
    let mut mask = |n: usize| -> Vec<f32> {
        (0..n).map(|i| if i % 5 == 3 { -1e4 } else { random.uniform(-1.0, 1.0) }).collect()
    };
    let (b_, h, d) = (2, 3, 8);
    for causal in [false, true] {
        for t in [1, 5, 17] {
            let name = format!("packed attention {causal} {t}");
            check(&name, &[&[b_, t, 3, h, d]], |b, p| b.attention_packed(p[0], causal, None));
        }
        for (t_q, t_k) in [(5, 5), (3, 7), (7, 3), (1, 9), (20, 33)] {
            let shapes: [&[usize]; 3] = [&[b_, t_q, h, d], &[b_, t_k, h, d], &[b_, t_k, h, d]];
            let name = format!("attention {causal} {t_q} {t_k}");
            check(&name, &shapes, |b, p| b.attention([p[0], p[1], p[2]], causal, None));
        }
        let (t_q, t_k) = (4, 6);
        for dims in [&[t_q, t_k][..], &[b_, 1, t_k], &[b_, t_q, t_k], &[b_, 1, t_q, t_k], &[b_, h, t_q, t_k]]
        {
            let row = Check::new(&format!("masked attention {causal} {dims:?}"));
            let row = row.floats("mask", mask(dims.iter().product()));
            row.run(&[&[b_, t_q, h, d], &[b_, t_k, h, d], &[b_, t_k, h, d]], |b, p| {
                let mask = b.input("mask", dims, DType::F32)?;
                b.attention([p[0], p[1], p[2]], causal, Some(mask))
            });
        }
        let row = Check::new(&format!("masked packed attention {causal}")).floats("mask", mask(25));
        row.run(&[&[b_, 5, 3, h, d]], |b, p| {
            let mask = b.input("mask", [5, 5], DType::F32)?;
            b.attention_packed(p[0], causal, Some(mask))
        });
    }
}

#[test]
fn dropouts() {
    check("dropout", &[&[50]], |b, p| b.dropout(p[0], 0.3));
    check("two masks", &[&[40]], |b, p| {
        let (one, two) = (b.dropout(p[0], 0.5)?, b.dropout(p[0], 0.5)?);
        b.mul(one, two)
    });
    check("no dropout", &[&[4]], |b, p| b.dropout(p[0], 0.0));
}

#[test]
fn recurrent_layers() {
    for cell in [Cell::Lstm, Cell::Gru] {
        for reverse in [false, true] {
            for (b_, t, h) in [(2, 4, 5), (1, 1, 3), (3, 3, 16)] {
                let g = cell.gates() * h;
                let name = format!("{cell:?} reverse {reverse} {b_} {t} {h}");
                let weights: [&[usize]; 5] = [&[b_, t, g], &[g, h], &[g], &[b_, h], &[b_, h]];
                let n = if cell == Cell::Lstm { 5 } else { 4 };
                check(&name, &weights[..3], |b, p| b.recurrent(cell, p[0], p[1], p[2], &[], reverse));
                check(&name, &weights[..n], |b, p| b.recurrent(cell, p[0], p[1], p[2], &p[3..], reverse));
            }
        }
    }
}
