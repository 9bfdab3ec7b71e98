//! Steps over a block, a vector at a time.

use super::blocks::Lane;
use super::expr::{Binary, Unary};
use super::plan::{FusedStep, StepOp};
use super::scalar::{self, GELU_CUBE, GELU_SCALE, NORMAL_PEAK};
use crate::simd::twins;

twins! {
    /// Evaluates one step over `len` elements.
    ///
    /// # Safety
    /// The slots that the step names point to `len` floats with step 1, or to [`SPLAT`](super::super::blocks::SPLAT) with step 0.
    pub(in super::super) unsafe fn step(step: &FusedStep, table: *const Lane, len: usize) {
        // SAFETY: the caller's promise, here and below.
        unsafe {
            let a = *table.add(usize::from(step.args[0]));
            let d = (*table.add(usize::from(step.dest))).ptr;
            match step.op {
                StepOp::Copy => map1(a, d, len, |x| x),
                StepOp::Unary(op) => unary(op, a, d, len),
                StepOp::Binary(op) => binary(op, a, *table.add(usize::from(step.args[1])), d, len),
                StepOp::Select => {
                    let b = *table.add(usize::from(step.args[1]));
                    let c = *table.add(usize::from(step.args[2]));
                    map3(a, b, c, d, len, |cond, a, b| {
                        select(ne(cond, zero()), a, b)
                    });
                }
            }
        }
    }

    /// `d = f(a)`, element by element.
    ///
    /// # Safety
    /// `a` is readable as [`step`] says of slots, `d` is writable for `len` floats.
    unsafe fn map1(mut a: Lane, mut d: *mut f32, len: usize, f: impl Fn(V) -> V) {
        // SAFETY: `len` floats, by the promise to `step`; the tail touches only those below `len`.
        unsafe {
            for _ in 0..len / WIDTH {
                store(d, f(load(a.ptr)));
                a.ptr = a.ptr.add(a.step * WIDTH);
                d = d.add(WIDTH);
            }
            if !len.is_multiple_of(WIDTH) {
                let n = len % WIDTH;
                store_first(d, n, f(load_first(a.ptr, n)));
            }
        }
    }

    /// `d = f(a, b)`, element by element.
    ///
    /// # Safety
    /// As for [`map1`], of both operands.
    unsafe fn map2(mut a: Lane, mut b: Lane, mut d: *mut f32, len: usize, f: impl Fn(V, V) -> V) {
        // SAFETY: as in `map1`.
        unsafe {
            for _ in 0..len / WIDTH {
                store(d, f(load(a.ptr), load(b.ptr)));
                a.ptr = a.ptr.add(a.step * WIDTH);
                b.ptr = b.ptr.add(b.step * WIDTH);
                d = d.add(WIDTH);
            }
            if !len.is_multiple_of(WIDTH) {
                let n = len % WIDTH;
                store_first(d, n, f(load_first(a.ptr, n), load_first(b.ptr, n)));
            }
        }
    }

    /// `d = f(a, b, c)`, element by element.
    ///
    /// # Safety
    /// As for [`map1`], of all operands.
    unsafe fn map3(
        mut a: Lane,
        mut b: Lane,
        mut c: Lane,
        mut d: *mut f32,
        len: usize,
        f: impl Fn(V, V, V) -> V,
    ) {
        // SAFETY: as in `map1`.
        unsafe {
            for _ in 0..len / WIDTH {
                store(d, f(load(a.ptr), load(b.ptr), load(c.ptr)));
                a.ptr = a.ptr.add(a.step * WIDTH);
                b.ptr = b.ptr.add(b.step * WIDTH);
                c.ptr = c.ptr.add(c.step * WIDTH);
                d = d.add(WIDTH);
            }
            if !len.is_multiple_of(WIDTH) {
                let n = len % WIDTH;
                store_first(d, n, f(load_first(a.ptr, n), load_first(b.ptr, n), load_first(c.ptr, n)));
            }
        }
    }

    /// For functions that have no lanes: one value after the other.
    #[cold]
    fn by_value(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
        let (mut x, mut y) = ([0.0f32; WIDTH], [0.0f32; WIDTH]);
        // SAFETY: the arrays have `WIDTH` floats.
        unsafe {
            store(x.as_mut_ptr(), a);
            store(y.as_mut_ptr(), b);
            for i in 0..WIDTH {
                x[i] = f(x[i], y[i]);
            }
            load(x.as_ptr())
        }
    }

    fn flag(mask: M) -> V {
        keep(mask, splat(1.0))
    }

    fn positive(x: V) -> M {
        gt(x, zero())
    }

    /// sigmoid(2u) with u = √(2/π)·(x + 0.044715·x³); see the scalar twin.
    fn gelu_gate(x: V) -> V {
        let x2 = mul(x, x);
        let slope =
            fmadd(x2, splat(2.0 * GELU_SCALE * GELU_CUBE), splat(2.0 * GELU_SCALE));
        sigmoid(mul(slope, x))
    }

    /// Φ(x), the distribution of the unit normal.
    fn normal_cdf(x: V) -> V {
        let e = erf(mul(x, splat(std::f32::consts::FRAC_1_SQRT_2)));
        fmadd(e, splat(0.5), splat(0.5))
    }

    /// The nearest f16. A half has a step of 2⁻²⁴ below 2⁻¹⁴, which an f32 has around 0.5; above, it has 13 bits of
    /// mantissa less. From 65520 up the nearest is infinity.
    fn round_f16(x: V) -> V {
        let sign = and(x, splat(-0.0));
        let abs = andnot(splat(-0.0), x);
        let small = sub(add(abs, splat(0.5)), splat(0.5));
        let odd = and_i(shift_right_13(bits(abs)), splat_i(1));
        let cut = |i: I| from_bits(and_i(i, splat_i(!0x1fff)));
        let rounded = cut(add_i(bits(abs), add_i(odd, splat_i(0xfff))));
        let y = select(lt(abs, splat(1.0 / 16_384.0)), small, rounded);
        let y = select(ge(abs, splat(65_520.0)), splat(f32::INFINITY), y);
        let y = select(unordered(x, x), or(cut(bits(abs)), splat(f32::NAN)), y);
        or(y, sign)
    }

    /// The nearest bf16: 16 bits of mantissa less.
    fn round_bf16(x: V) -> V {
        let odd = and_i(shift_right_16(bits(x)), splat_i(1));
        let cut = |i: I| from_bits(and_i(i, splat_i(!0xffff)));
        let rounded = cut(add_i(bits(x), add_i(odd, splat_i(0x7fff))));
        select(unordered(x, x), or(cut(bits(x)), from_bits(splat_i(0x40_0000))), rounded)
    }

    /// `d = op(a)`, element by element.
    ///
    /// # Safety
    /// As for [`map1`].
    unsafe fn unary(op: Unary, a: Lane, d: *mut f32, n: usize) {
        let one = splat(1.0);
        let zero = zero();
        let sign = splat(-0.0);
        // SAFETY: the promise to `step`.
        unsafe {
            match op {
                Unary::Neg => map1(a, d, n, |x| xor(x, sign)),
                Unary::Exp => map1(a, d, n, |x| exp(x)),
                Unary::Ln => map1(a, d, n, |x| ln(x)),
                Unary::Sqrt => map1(a, d, n, |x| sqrt(x)),
                Unary::Rsqrt => map1(a, d, n, |x| div(one, sqrt(x))),
                Unary::Recip => map1(a, d, n, |x| div(one, x)),
                Unary::Tanh => map1(a, d, n, |x| tanh(x)),
                Unary::Sigmoid => map1(a, d, n, |x| sigmoid(x)),
                // The value second: NaN and -0 stay.
                Unary::Relu => map1(a, d, n, |x| max(zero, x)),
                Unary::LeakyRelu(alpha) => {
                    let alpha = splat(alpha);
                    map1(a, d, n, |x| select(positive(x), x, mul(x, alpha)));
                }
                Unary::Elu(alpha) => {
                    let alpha = splat(alpha);
                    map1(a, d, n, |x| select(positive(x), x, mul(expm1(x), alpha)));
                }
                Unary::Gelu => map1(a, d, n, |x| mul(x, normal_cdf(x))),
                Unary::GeluTanh => map1(a, d, n, |x| mul(x, gelu_gate(x))),
                Unary::Silu => map1(a, d, n, |x| mul(x, sigmoid(x))),
                Unary::Erf => map1(a, d, n, |x| erf(x)),
                Unary::Abs => map1(a, d, n, |x| andnot(sign, x)),
                Unary::Square => map1(a, d, n, |x| mul(x, x)),
                Unary::Sin => map1(a, d, n, |x| sin(x)),
                Unary::Cos => map1(a, d, n, |x| cos(x)),
                Unary::Softplus => map1(a, d, n, |x| {
                    let e = exp(or(x, sign));
                    add(max(zero, x), ln1p(e))
                }),
                Unary::Sign => map1(a, d, n, |x| {
                    sub(flag(positive(x)), flag(lt(x, zero)))
                }),
                Unary::Floor => map1(a, d, n, |x| floor(x)),
                Unary::Scale(c) => {
                    let c = splat(c);
                    map1(a, d, n, |x| mul(x, c));
                }
                Unary::Offset(c) => {
                    let c = splat(c);
                    map1(a, d, n, |x| add(x, c));
                }
                Unary::Powf(p) => match p {
                    1.0 => map1(a, d, n, |x| x),
                    2.0 => map1(a, d, n, |x| mul(x, x)),
                    3.0 => map1(a, d, n, |x| mul(mul(x, x), x)),
                    -1.0 => map1(a, d, n, |x| div(one, x)),
                    _ => map1(a, d, n, |x| by_value(x, x, |x, _| x.powf(p))),
                },
                Unary::Clamp(lo, hi) => {
                    let (lo, hi) = (splat(lo), splat(hi));
                    map1(a, d, n, |x| min(hi, max(lo, x)));
                }
                Unary::Positive => map1(a, d, n, |x| flag(positive(x))),
                Unary::RoundF16 => map1(a, d, n, |x| round_f16(x)),
                Unary::RoundBf16 => map1(a, d, n, |x| round_bf16(x)),
            }
        }
    }

    /// `d = op(a, b)`, element by element.
    ///
    /// # Safety
    /// As for [`map2`].
    unsafe fn binary(op: Binary, a: Lane, b: Lane, d: *mut f32, n: usize) {
        let one = splat(1.0);
        // SAFETY: the promise to `step`.
        unsafe {
            match op {
                Binary::Add => map2(a, b, d, n, |a, b| add(a, b)),
                Binary::Sub => map2(a, b, d, n, |a, b| sub(a, b)),
                Binary::Mul => map2(a, b, d, n, |a, b| mul(a, b)),
                Binary::Div => map2(a, b, d, n, |a, b| div(a, b)),
                // The instruction gives its second operand when either is NaN; a NaN in the first is put back.
                Binary::Max => map2(a, b, d, n, |a, b| {
                    select(unordered(a, a), a, max(a, b))
                }),
                Binary::Min => map2(a, b, d, n, |a, b| {
                    select(unordered(a, a), a, min(a, b))
                }),
                Binary::Pow => map2(a, b, d, n, |a, b| by_value(a, b, |a, b| scalar::binary(Binary::Pow, a, b))),
                Binary::Greater => map2(a, b, d, n, |a, b| flag(gt(a, b))),
                Binary::GreaterEqual => map2(a, b, d, n, |a, b| flag(ge(a, b))),
                Binary::Equal => map2(a, b, d, n, |a, b| flag(eq(a, b))),
                Binary::ReluGrad => map2(a, b, d, n, |dy, y| keep(positive(y), dy)),
                Binary::TanhGrad => map2(a, b, d, n, |dy, y| mul(dy, fnmadd(y, y, one))),
                Binary::SigmoidGrad => {
                    map2(a, b, d, n, |dy, y| mul(dy, mul(y, sub(one, y))))
                }
                Binary::GeluGrad => map2(a, b, d, n, |dy, x| {
                    let e = exp(mul(mul(x, x), splat(-0.5)));
                    let density = mul(mul(x, splat(NORMAL_PEAK)), e);
                    mul(dy, add(normal_cdf(x), density))
                }),
                Binary::GeluTanhGrad => map2(a, b, d, n, |dy, x| {
                    let s = gelu_gate(x);
                    let two_du = fmadd(
                        mul(x, x),
                        splat(6.0 * GELU_SCALE * GELU_CUBE),
                        splat(2.0 * GELU_SCALE),
                    );
                    let ds = fnmadd(s, s, s);
                    mul(dy, fmadd(mul(x, two_du), ds, s))
                }),
                Binary::SiluGrad => map2(a, b, d, n, |dy, x| {
                    let s = sigmoid(x);
                    let t = fmadd(x, sub(one, s), one);
                    mul(dy, mul(s, t))
                }),
                Binary::SoftplusGrad => map2(a, b, d, n, |dy, x| mul(dy, sigmoid(x))),
                Binary::LeakyReluGrad(alpha) => {
                    let alpha = splat(alpha);
                    map2(a, b, d, n, |dy, x| select(positive(x), dy, mul(dy, alpha)));
                }
                Binary::EluGrad(alpha) => {
                    let alpha = splat(alpha);
                    map2(a, b, d, n, |dy, x| {
                        let slope = mul(alpha, exp(x));
                        mul(dy, select(positive(x), one, slope))
                    });
                }
            }
        }
    }
}
