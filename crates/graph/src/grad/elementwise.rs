//! The calculus of the element-wise ops: a row for each.

use polyreme_kernels::elementwise::{Binary, Unary};

use super::{Backward, GradResult, no_gradient};
use crate::graph::{Node, ValueId};
use crate::op::Op;

/// `y = op(x)`.
pub(super) fn unary(b: &mut Backward, node: &Node, op: Unary, dy: ValueId) -> GradResult {
    let (x, y) = (node.inputs[0], node.outputs[0]);
    let dx = match op {
        Unary::Neg => b.unary(Unary::Neg, dy),
        // d eˣ = eˣ
        Unary::Exp => b.binary(Binary::Mul, dy, y),
        Unary::Ln => b.binary(Binary::Div, dy, x),
        // d √x = 1 / 2√x
        Unary::Sqrt => {
            let half = b.unary(Unary::Scale(0.5), dy);
            b.binary(Binary::Div, half, y)
        }
        // d x^-½ = -½ x^-3/2 = -½ y³
        Unary::Rsqrt => {
            let y2 = b.unary(Unary::Square, y);
            let y3 = b.binary(Binary::Mul, y2, y);
            let dy3 = b.binary(Binary::Mul, dy, y3);
            b.unary(Unary::Scale(-0.5), dy3)
        }
        // d 1/x = -1/x² = -y²
        Unary::Recip => {
            let y2 = b.unary(Unary::Square, y);
            let m = b.binary(Binary::Mul, dy, y2);
            b.unary(Unary::Neg, m)
        }
        Unary::Tanh => b.binary(Binary::TanhGrad, dy, y),
        Unary::Sigmoid => b.binary(Binary::SigmoidGrad, dy, y),
        Unary::Relu => b.binary(Binary::ReluGrad, dy, y),
        Unary::LeakyRelu(a) => b.binary(Binary::LeakyReluGrad(a), dy, x),
        Unary::Elu(a) => b.binary(Binary::EluGrad(a), dy, x),
        Unary::Gelu => b.binary(Binary::GeluGrad, dy, x),
        Unary::GeluTanh => b.binary(Binary::GeluTanhGrad, dy, x),
        Unary::Silu => b.binary(Binary::SiluGrad, dy, x),
        Unary::Softplus => b.binary(Binary::SoftplusGrad, dy, x),
        // d erf(x) = 2/√π · e^(-x²)
        Unary::Erf => {
            let x2 = b.unary(Unary::Square, x);
            let neg = b.unary(Unary::Neg, x2);
            let e = b.unary(Unary::Exp, neg);
            let s = b.unary(Unary::Scale(std::f32::consts::FRAC_2_SQRT_PI), e);
            b.binary(Binary::Mul, dy, s)
        }
        Unary::Abs => {
            let s = b.unary(Unary::Sign, x);
            b.binary(Binary::Mul, dy, s)
        }
        Unary::Square => {
            let m = b.binary(Binary::Mul, dy, x);
            b.unary(Unary::Scale(2.0), m)
        }
        Unary::Sin => {
            let c = b.unary(Unary::Cos, x);
            b.binary(Binary::Mul, dy, c)
        }
        Unary::Cos => {
            let s = b.unary(Unary::Sin, x);
            let m = b.binary(Binary::Mul, dy, s);
            b.unary(Unary::Neg, m)
        }
        Unary::Scale(f) => b.unary(Unary::Scale(f), dy),
        Unary::Offset(_) => dy,
        // The slope of rounding is that of the values it joins, as of a `cast` to half.
        Unary::RoundF16 | Unary::RoundBf16 => dy,
        // d xᵖ = p·xᵖ⁻¹
        Unary::Powf(p) => {
            let q = b.unary(Unary::Powf(p - 1.0), x);
            let s = b.unary(Unary::Scale(p), q);
            b.binary(Binary::Mul, dy, s)
        }
        // The gradient passes where the value was not cut, bounds included.
        Unary::Clamp(low, high) => {
            let (low, high) = (b.constant(low), b.constant(high));
            let above = b.binary(Binary::GreaterEqual, x, low);
            let below = b.binary(Binary::GreaterEqual, high, x);
            let m = b.binary(Binary::Mul, dy, above);
            b.binary(Binary::Mul, m, below)
        }
        // Flat almost everywhere: nothing reaches x.
        Unary::Sign | Unary::Floor | Unary::Positive => return Ok(()),
    };
    b.reach(x, dx);
    Ok(())
}

/// `y = op(p, q)`, either of which may have been broadcast.
pub(super) fn binary(b: &mut Backward, node: &Node, op: Binary, dy: ValueId) -> GradResult {
    let (p, q, y) = (node.inputs[0], node.inputs[1], node.outputs[0]);
    let (for_p, for_q) = (b.needs(p), b.needs(q));
    let (mut dp, mut dq) = (None, None);
    match op {
        Binary::Add => (dp, dq) = (Some(dy), Some(dy)),
        Binary::Sub => {
            dp = Some(dy);
            dq = for_q.then(|| b.unary(Unary::Neg, dy));
        }
        Binary::Mul => {
            dp = for_p.then(|| b.binary(Binary::Mul, dy, q));
            dq = for_q.then(|| b.binary(Binary::Mul, dy, p));
        }
        // d(p/q) = dp/q - p/q²·dq = (dp - y·dq)/q
        Binary::Div => {
            let r = b.binary(Binary::Div, dy, q);
            dp = Some(r);
            dq = for_q.then(|| {
                let m = b.binary(Binary::Mul, r, y);
                b.unary(Unary::Neg, m)
            });
        }
        // The larger (or smaller) one gets it all; equal ones share.
        Binary::Max | Binary::Min => {
            let (first, second) = if op == Binary::Max { (p, q) } else { (q, p) };
            let equal = b.binary(Binary::Equal, p, q);
            let share = b.unary(Unary::Scale(0.5), equal);
            let part = |b: &mut Backward, left, right| {
                let wins = b.binary(Binary::Greater, left, right);
                let weight = b.binary(Binary::Add, wins, share);
                b.binary(Binary::Mul, dy, weight)
            };
            dp = for_p.then(|| part(b, first, second));
            dq = for_q.then(|| part(b, second, first));
        }
        // d pᵠ = q·pᵠ⁻¹·dp + pᵠ·ln p·dq
        Binary::Pow => {
            dp = for_p.then(|| {
                let less = b.unary(Unary::Offset(-1.0), q);
                let power = b.binary(Binary::Pow, p, less);
                let slope = b.binary(Binary::Mul, power, q);
                b.binary(Binary::Mul, dy, slope)
            });
            dq = for_q.then(|| {
                let l = b.unary(Unary::Ln, p);
                let slope = b.binary(Binary::Mul, y, l);
                b.binary(Binary::Mul, dy, slope)
            });
        }
        Binary::Greater | Binary::GreaterEqual | Binary::Equal => {}
        Binary::ReluGrad
        | Binary::TanhGrad
        | Binary::SigmoidGrad
        | Binary::GeluGrad
        | Binary::GeluTanhGrad
        | Binary::SiluGrad
        | Binary::SoftplusGrad
        | Binary::LeakyReluGrad(_)
        | Binary::EluGrad(_) => return no_gradient(node),
    }
    if let Some(dp) = dp.filter(|_| for_p) {
        b.reach_reduced(p, dp);
    }
    if let Some(dq) = dq.filter(|_| for_q) {
        b.reach_reduced(q, dq);
    }
    Ok(())
}

/// `y = condition ? p : q`.
pub(super) fn select(b: &mut Backward, node: &Node, dy: ValueId) -> GradResult {
    let [condition, p, q] = node.inputs[..] else { unreachable!("select has three operands") };
    let zero = b.constant(0.0);
    if b.needs(p) {
        let dp = b.one(Op::Select, &[condition, dy, zero]);
        b.reach_reduced(p, dp);
    }
    if b.needs(q) {
        let dq = b.one(Op::Select, &[condition, zero, dy]);
        b.reach_reduced(q, dq);
    }
    Ok(())
}
