//! The scalar twin: each op on one value, and a step as a plain loop.

use super::blocks::Lane;
use super::expr::{Binary, Unary};
use super::plan::{FusedStep, StepOp};
use crate::convert;
use crate::math::scalar as math;

/// √(2/π), for the tanh form of GELU.
pub(super) const GELU_SCALE: f32 = 0.797_884_6;
/// The factor of x³ in the tanh form of GELU.
pub(super) const GELU_CUBE: f32 = 0.044_715;
/// 1/√(2π).
pub(super) const NORMAL_PEAK: f32 = 0.398_942_3;

/// One value of a unary op.
pub(super) fn unary(op: Unary, x: f32) -> f32 {
    match op {
        Unary::Neg => -x,
        Unary::Exp => math::exp(x),
        Unary::Ln => math::ln(x),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Recip => 1.0 / x,
        Unary::Tanh => math::tanh(x),
        Unary::Sigmoid => math::sigmoid(x),
        Unary::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Unary::LeakyRelu(alpha) => {
            if x > 0.0 {
                x
            } else {
                alpha * x
            }
        }
        Unary::Elu(alpha) => {
            if x > 0.0 {
                x
            } else {
                alpha * math::expm1(x)
            }
        }
        Unary::Gelu => 0.5 * x * (1.0 + math::erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        Unary::GeluTanh => x * gelu_gate(x),
        Unary::Silu => x * math::sigmoid(x),
        Unary::Erf => math::erf(x),
        Unary::Abs => x.abs(),
        Unary::Square => x * x,
        Unary::Sin => math::sin(x),
        Unary::Cos => math::cos(x),
        Unary::Softplus => (if x < 0.0 { 0.0 } else { x }) + math::ln1p(math::exp(-x.abs())),
        Unary::Sign => f32::from(x > 0.0) - f32::from(x < 0.0),
        Unary::Floor => x.floor(),
        Unary::Scale(c) => x * c,
        Unary::Offset(c) => x + c,
        Unary::Powf(p) => x.powf(p),
        Unary::Clamp(lo, hi) => {
            let x = if x < lo { lo } else { x };
            if x > hi { hi } else { x }
        }
        Unary::Positive => f32::from(x > 0.0),
        Unary::RoundF16 => convert::f32_from_f16(convert::f16_from_f32(x)),
        Unary::RoundBf16 => convert::f32_from_bf16(convert::bf16_from_f32(x)),
    }
}

/// (1 + tanh u)/2 = sigmoid(2u) with u = √(2/π)·(x + 0.044715·x³): one exponential and one division.
fn gelu_gate(x: f32) -> f32 {
    math::sigmoid(2.0 * GELU_SCALE * (x + GELU_CUBE * x * x * x))
}

/// One value of a binary op.
pub(super) fn binary(op: Binary, a: f32, b: f32) -> f32 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => {
            if a.is_nan() || a > b {
                a
            } else {
                b
            }
        }
        Binary::Min => {
            if a.is_nan() || a < b {
                a
            } else {
                b
            }
        }
        Binary::Pow => a.powf(b),
        Binary::Greater => f32::from(a > b),
        Binary::GreaterEqual => f32::from(a >= b),
        Binary::Equal => f32::from(a == b),
        Binary::ReluGrad => {
            if b > 0.0 {
                a
            } else {
                0.0
            }
        }
        Binary::TanhGrad => a * (1.0 - b * b),
        Binary::SigmoidGrad => a * (b * (1.0 - b)),
        Binary::GeluGrad => {
            let cdf = 0.5 * (1.0 + math::erf(b * std::f32::consts::FRAC_1_SQRT_2));
            a * (cdf + b * NORMAL_PEAK * math::exp(-0.5 * b * b))
        }
        Binary::GeluTanhGrad => {
            // d/dx x·s(2u) = s + x·s·(1-s)·2u', u' = √(2/π)·(1 + 3·0.044715·x²).
            let s = gelu_gate(b);
            let du = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * b * b);
            a * (s + s * (1.0 - s) * (2.0 * b * du))
        }
        Binary::SiluGrad => {
            let s = math::sigmoid(b);
            a * (s * (1.0 + b * (1.0 - s)))
        }
        Binary::SoftplusGrad => a * math::sigmoid(b),
        Binary::LeakyReluGrad(alpha) => {
            if b > 0.0 {
                a
            } else {
                alpha * a
            }
        }
        Binary::EluGrad(alpha) => {
            if b > 0.0 {
                a
            } else {
                a * (alpha * math::exp(b))
            }
        }
    }
}

/// One value of a select.
pub(super) fn select(cond: f32, a: f32, b: f32) -> f32 {
    if cond != 0.0 { a } else { b }
}

/// Evaluates one step over `len` elements.
///
/// # Safety
/// The slots that the step names point to `len` floats with step 1, or to `SPLAT` with step 0.
pub(super) unsafe fn step(step: &FusedStep, table: *const Lane, len: usize) {
    // SAFETY: the caller's promise.
    let lane = |slot: u8| unsafe { *table.add(usize::from(slot)) };
    let [a, b, c] = step.args.map(lane);
    let dest = lane(step.dest);
    // SAFETY: `i` is below `len`, and the first float of a lane with step 0 stands for all.
    let at = |l: Lane, i: usize| unsafe { *l.ptr.add(if l.step == 0 { 0 } else { i }) };
    for i in 0..len {
        let v = match step.op {
            StepOp::Copy => at(a, i),
            StepOp::Unary(op) => unary(op, at(a, i)),
            StepOp::Binary(op) => binary(op, at(a, i), at(b, i)),
            StepOp::Select => select(at(a, i), at(b, i), at(c, i)),
        };
        // SAFETY: as above.
        unsafe { *dest.ptr.add(i) = v };
    }
}
