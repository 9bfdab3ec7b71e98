//! The evaluator against a naive one, over ops, shapes, sources and orders of tasks.

use super::scalar;
use super::*;
use crate::lanes::testing::Reverse;
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

pub(super) fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    (0..n).map(|_| next() * 6.0 - 3.0).collect()
}

/// The value of every register, one output element at a time, with NumPy's broadcasting done by division.
fn naive(expr: &Expr, out: &[usize], shapes: &[&[usize]], inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let n: usize = out.iter().product();
    let mut results = vec![vec![0.0; n]; expr.outputs().len()];
    for flat in 0..n {
        let mut regs = Vec::new();
        for (shape, values) in shapes.iter().zip(inputs) {
            let (mut rest, mut offset, mut stride) = (flat, 0, 1);
            for d in (0..out.len()).rev() {
                let at = rest % out[d];
                rest /= out[d];
                if let Some(e) = (d + shape.len()).checked_sub(out.len()) {
                    offset += if shape[e] == 1 { 0 } else { at * stride };
                    stride *= shape[e];
                }
            }
            regs.push(values[offset]);
        }
        for instr in expr.instrs() {
            let r = |i: Reg| regs[usize::from(i)];
            regs.push(match *instr {
                Instr::Const(v) => v,
                Instr::Unary(op, a) => scalar::unary(op, r(a)),
                Instr::Binary(op, a, b) => scalar::binary(op, r(a), r(b)),
                Instr::Select(c, a, b) => scalar::select(r(c), r(a), r(b)),
            });
        }
        for (result, &reg) in results.iter_mut().zip(expr.outputs()) {
            result[flat] = regs[usize::from(reg)];
        }
    }
    results
}

fn assert_close(got: &[f32], want: &[f32], what: &dyn std::fmt::Debug) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan());
        assert!(same || (g - w).abs() <= 2e-6 * w.abs().max(0.05), "{what:?} at {i}: {g}, not {w}");
    }
}

fn check(expr: &Expr, out: &[usize], shapes: &[&[usize]]) {
    let inputs: Vec<Vec<f32>> =
        shapes.iter().enumerate().map(|(k, s)| noise(s.iter().product(), k as u32 + 1)).collect();
    check_values(expr, out, shapes, &inputs);
}

fn check_values(expr: &Expr, out: &[usize], shapes: &[&[usize]], inputs: &[Vec<f32>]) {
    let want = naive(expr, out, shapes, inputs);
    let fused = Fused::new(expr, out, shapes).unwrap();
    let n = fused.len();
    // The bits of one instruction set for any number of workers, and of all vectors, whatever their width.
    let mut of_scalar: Option<Vec<Vec<f32>>> = None;
    let mut of_vectors: Option<Vec<Vec<f32>>> = None;
    for isa in Isa::available() {
        let first = if isa.has_avx2() { &mut of_vectors } else { &mut of_scalar };
        for workers in [1, 2, 5] {
            let mut got = vec![vec![7.0; n]; want.len()];
            let sources: Vec<_> = inputs.iter().map(|v| Source::Slice(Floats::F32(v))).collect();
            let mut outs: Vec<_> = got.iter_mut().map(|v| FloatsMut::F32(v)).collect();
            fused.run(&Cx { isa, par: &Reverse(workers) }, &sources, &mut outs);
            for (g, w) in got.iter().zip(&want) {
                assert_close(g, w, &(isa, out, shapes, expr.instrs()));
            }
            let bits = |v: &Vec<Vec<f32>>| v.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(first.get_or_insert_with(|| got.clone())), bits(&got), "same bits");
        }
        in_place(expr, out, shapes, inputs, &want, &fused, isa);
        pieces(shapes, inputs, &want, &fused, isa);
    }
}

/// Every full input in turn in the memory of every output in turn.
fn in_place(
    expr: &Expr,
    out: &[usize],
    shapes: &[&[usize]],
    inputs: &[Vec<f32>],
    want: &[Vec<f32>],
    fused: &Fused,
    isa: Isa,
) {
    for j in 0..want.len() {
        for k in (0..inputs.len()).filter(|&k| inputs[k].len() == fused.len()) {
            let mut got = vec![vec![7.0; fused.len()]; want.len()];
            got[j].copy_from_slice(&inputs[k]);
            let mut sources: Vec<_> = inputs.iter().map(|v| Source::Slice(Floats::F32(v))).collect();
            sources[k] = Source::InPlace(j);
            let mut outs: Vec<_> = got.iter_mut().map(|v| FloatsMut::F32(v)).collect();
            fused.run(&Cx { isa, par: &Reverse(2) }, &sources, &mut outs);
            for (g, w) in got.iter().zip(want) {
                assert_close(g, w, &("in place", k, j, isa, out, shapes, expr.instrs()));
            }
        }
    }
}

/// Pieces of several lengths, with the last full input as the piece and each output, or none, going to it.
fn pieces(shapes: &[&[usize]], inputs: &[Vec<f32>], want: &[Vec<f32>], fused: &Fused, isa: Isa) {
    let Some(k) = (0..inputs.len()).rev().find(|&k| inputs[k].len() == fused.len()) else { return };
    let width = shapes[k].last().copied().unwrap_or(1).max(1);
    for (to_piece, by_rows) in (0..=want.len()).flat_map(|j| [(j, false), (j, true)]) {
        for len in [1, 7, 8, 61, 1000] {
            if len == 1 && fused.len() > 2000 {
                continue;
            }
            let mut c = inputs[k].clone();
            let mut wholes = vec![vec![7.0; fused.len()]; want.len()];
            let mut sources: Vec<_> = inputs.iter().map(|v| PieceSource::Slice(Floats::F32(v))).collect();
            sources[k] = PieceSource::Piece;
            let targets: Vec<_> = wholes
                .iter_mut()
                .enumerate()
                .map(|(j, w)| {
                    if j == to_piece {
                        PieceTarget::Piece
                    } else {
                        PieceTarget::Whole(SharedFloats::new(FloatsMut::F32(w)))
                    }
                })
                .collect();
            // SAFETY: pieces are evaluated one after the other, and the wholes are distinct vectors.
            let bound = unsafe { fused.pieces(isa, &sources, &targets) };
            if by_rows {
                for first in (0..width).step_by(len) {
                    let strip = c.chunks_mut(width).map(|row| &mut row[first..(first + len).min(width)]);
                    bound.rows(first, width, strip);
                }
            } else {
                for (i, piece) in c.chunks_mut(len).enumerate() {
                    bound.piece(i * len, piece);
                }
            }
            for (j, w) in want.iter().enumerate() {
                let got = if j == to_piece { &c } else { &wholes[j] };
                assert_close(got, w, &("piece", by_rows, len, j, to_piece, isa, shapes));
            }
            if to_piece == want.len() {
                let same = c.iter().zip(&inputs[k]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "the piece keeps its value");
            }
        }
    }
}

pub(super) const UNARIES: &[Unary] = &[
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
    Unary::Elu(1.5),
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
    Unary::Scale(0.3),
    Unary::Offset(-2.0),
    Unary::Powf(2.0),
    Unary::Powf(3.0),
    Unary::Powf(-1.0),
    Unary::Powf(1.7),
    Unary::Clamp(-1.0, 0.5),
    Unary::Positive,
    Unary::RoundF16,
    Unary::RoundBf16,
];

pub(super) const BINARIES: &[Binary] = &[
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
    Binary::EluGrad(1.5),
];

#[test]
fn every_op() {
    for n in [0, 1, 7, 8, 9, 100] {
        for &op in UNARIES {
            check(&Expr::unary(op), &[n], &[&[n]]);
        }
        for &op in BINARIES {
            check(&Expr::binary(op), &[n], &[&[n], &[n]]);
        }
    }
}

#[test]
fn special_values() {
    let inf = f32::INFINITY;
    let values = [0.0, -0.0, 1.0, -1.0, inf, -inf, f32::NAN, 1e-30, 80.0, -80.0];
    let a: Vec<f32> = values.iter().flat_map(|&v| [v; 10]).collect();
    let b: Vec<f32> = (0..100).map(|i| values[i % 10]).collect();
    for &op in UNARIES {
        check_values(&Expr::unary(op), &[100], &[&[100]], std::slice::from_ref(&a));
    }
    for &op in BINARIES {
        // An infinity against a flushed zero: 0·inf is NaN in one form and 0 in the other.
        if !matches!(op, Binary::SiluGrad | Binary::GeluGrad | Binary::GeluTanhGrad | Binary::EluGrad(_)) {
            check_values(&Expr::binary(op), &[100], &[&[100], &[100]], &[a.clone(), b.clone()]);
        }
    }
}

/// The gradients against central differences of their functions in f32, on points away from the kinks.
#[test]
fn gradients() {
    let rows = [
        (Unary::Gelu, Binary::GeluGrad, false),
        (Unary::GeluTanh, Binary::GeluTanhGrad, false),
        (Unary::Silu, Binary::SiluGrad, false),
        (Unary::Softplus, Binary::SoftplusGrad, false),
        (Unary::LeakyRelu(0.1), Binary::LeakyReluGrad(0.1), false),
        (Unary::Elu(1.5), Binary::EluGrad(1.5), false),
        (Unary::Relu, Binary::ReluGrad, true),
        (Unary::Tanh, Binary::TanhGrad, true),
        (Unary::Sigmoid, Binary::SigmoidGrad, true),
    ];
    for (f, grad, of_y) in rows {
        for i in 0..61 {
            let x = -3.0 + 0.1 * i as f32 + 0.043;
            let h = 0.01;
            let numeric = (scalar::unary(f, x + h) - scalar::unary(f, x - h)) / (2.0 * h);
            let at = if of_y { scalar::unary(f, x) } else { x };
            let exact = scalar::binary(grad, 2.0, at) / 2.0;
            assert!((numeric - exact).abs() < 3e-4, "{grad:?} at {x}: {exact}, not {numeric}");
        }
    }
}

/// gelu(a·b + c)·max(a, 0.5), the inner sum as a second output, an input as a third, and something dead.
pub(super) fn tangle() -> Expr {
    let instrs = vec![
        Instr::Binary(Binary::Mul, 0, 1),
        Instr::Binary(Binary::Add, 3, 2),
        Instr::Unary(Unary::Exp, 0),
        Instr::Unary(Unary::GeluTanh, 4),
        Instr::Const(0.5),
        Instr::Binary(Binary::Max, 0, 7),
        Instr::Binary(Binary::Mul, 6, 8),
        Instr::Binary(Binary::Greater, 1, 2),
        Instr::Select(10, 9, 4),
    ];
    Expr::new(3, instrs, vec![11, 4, 1, 9]).unwrap()
}

/// An output's shape and those of three inputs.
pub(super) type Shapes = (&'static [usize], [&'static [usize]; 3]);

#[test]
fn broadcasting() {
    for (out, shapes) in BROADCASTS {
        check(&tangle(), out, shapes);
    }
}

pub(super) const BROADCASTS: &[Shapes] = &[
    (&[], [&[], &[], &[]]),
    (&[1], [&[], &[1], &[1]]),
    (&[5], [&[5], &[1], &[]]),
    (&[0, 3], [&[0, 3], &[3], &[1, 1]]),
    (&[3, 5], [&[3, 5], &[5], &[3, 1]]),
    (&[3, 5], [&[1, 5], &[3, 1], &[]]),
    (&[7, 65], [&[7, 65], &[65], &[7, 1]]),
    (&[9, 600], [&[9, 600], &[600], &[9, 1]]),
    (&[400, 6], [&[400, 6], &[6], &[400, 1]]),
    (&[2, 3, 4], [&[2, 3, 4], &[2, 1, 4], &[3, 1]]),
    (&[2, 1, 4, 1], [&[2, 1, 4, 1], &[4, 1], &[1, 1, 1, 1]]),
    (&[2, 3, 2, 70], [&[2, 3, 2, 70], &[3, 1, 70], &[2, 1, 2, 1]]),
    (&[2, 3, 2, 3, 5], [&[2, 3, 2, 3, 5], &[2, 1, 2, 1, 5], &[3, 1, 3, 1]]),
    (&[2, 3, 1, 3, 130], [&[2, 3, 1, 3, 130], &[2, 3, 1, 1, 1], &[1, 3, 130]]),
    (&[40, 1000], [&[40, 1000], &[40, 1000], &[1000]]),
];

#[test]
fn many_registers_alive_at_once() {
    let n = 60u8;
    let mut instrs: Vec<Instr> = (0..30u8).map(|i| Instr::Unary(Unary::Offset(f32::from(i)), 0)).collect();
    let mut sum = 1;
    for i in 2..=30 {
        instrs.push(Instr::Binary(Binary::Add, sum, i));
        sum = instrs.len() as u8;
    }
    instrs.push(Instr::Unary(Unary::Scale(0.1), sum));
    assert_eq!(instrs.len(), usize::from(n));
    let expr = Expr::new(1, instrs, vec![n]).unwrap();
    check(&expr, &[3, 700], &[&[3, 700]]);
    check(&expr, &[30, 7], &[&[7]]);
}

/// Outputs that swap the inputs they lie in.
#[test]
fn swap_in_place() {
    let expr = Expr::new(2, vec![], vec![1, 0]).unwrap();
    let fused = Fused::new(&expr, &[1000], &[&[1000], &[1000]]).unwrap();
    let (a, b) = (noise(1000, 1), noise(1000, 2));
    let (mut x, mut y) = (a.clone(), b.clone());
    fused.run(
        &Cx::serial(),
        &[Source::InPlace(0), Source::InPlace(1)],
        &mut [FloatsMut::F32(&mut x), FloatsMut::F32(&mut y)],
    );
    assert_eq!((x, y), (b, a));
}

#[test]
fn refusals() {
    let add = |a, b| Instr::Binary(Binary::Add, a, b);
    assert_eq!(Expr::new(17, vec![], vec![0]), Err(ExprError::TooManyInputs(17)));
    assert_eq!(Expr::new(1, vec![Instr::Const(0.0); 65], vec![0]), Err(ExprError::TooManyInstrs(65)));
    assert_eq!(Expr::new(1, vec![], vec![]), Err(ExprError::OutputCount(0)));
    assert_eq!(Expr::new(1, vec![], vec![0; 5]), Err(ExprError::OutputCount(5)));
    assert_eq!(Expr::new(1, vec![add(0, 1)], vec![1]), Err(ExprError::UnknownReg { instr: 0, reg: 1 }));
    assert_eq!(Expr::new(1, vec![], vec![1]), Err(ExprError::UnknownOutput(1)));
    let expr = Expr::binary(Binary::Add);
    let refused = Fused::new(&expr, &[2, 3], &[&[2, 3]]).unwrap_err();
    assert_eq!(refused, ExprError::InputCount { shapes: 1, inputs: 2 });
    for bad in [&[2][..], &[3, 3], &[1, 2, 3]] {
        let refused = Fused::new(&expr, &[2, 3], &[&[2, 3], bad]).unwrap_err();
        assert_eq!(refused, ExprError::Broadcast { input: 1, shape: bad.to_vec(), out: vec![2, 3] });
    }
    assert!(Fused::new(&expr, &[1; 9], &[&[1], &[1]]).is_err());
}
