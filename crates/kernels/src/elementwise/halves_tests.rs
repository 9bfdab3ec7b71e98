//! Inputs and outputs in half: the bits of widening everything, computing in f32 and rounding every output.

use polyreme_dtype::DType;

use super::scalar;
use super::tests::{BINARIES, BROADCASTS, UNARIES, noise, tangle};
use super::*;
use crate::floats::testing::{FORMATS, HALVES, OwnedFloats, same_rounded};
use crate::lanes::testing::Reverse;
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

/// An expression with everything it is evaluated on.
struct Case<'a> {
    expr: &'a Expr,
    out: &'a [usize],
    shapes: &'a [&'a [usize]],
    inputs: Vec<OwnedFloats>,
    outputs: Vec<DType>,
}

impl Case<'_> {
    fn fused(&self) -> Fused {
        let inputs: Vec<_> =
            self.shapes.iter().zip(&self.inputs).map(|(&s, x)| (s, x.get().dtype())).collect();
        Fused::typed(self.expr, self.out, &inputs, &self.outputs).unwrap()
    }

    fn sources(&self) -> Vec<Source<'_>> {
        self.inputs.iter().map(|x| Source::Slice(x.get())).collect()
    }

    fn unset(&self, fused: &Fused) -> Vec<OwnedFloats> {
        self.outputs.iter().map(|&dtype| OwnedFloats::unset(dtype, fused.len())).collect()
    }

    /// Widened, computed in f32, rounded.
    fn want(&self, isa: Isa) -> Vec<OwnedFloats> {
        let fused = Fused::new(self.expr, self.out, self.shapes).unwrap();
        let wide: Vec<_> = self.inputs.iter().map(OwnedFloats::wide).collect();
        let mut got = vec![vec![7.0; fused.len()]; self.outputs.len()];
        let sources: Vec<_> = wide.iter().map(|x| Source::Slice(Floats::F32(x))).collect();
        let mut outs: Vec<_> = got.iter_mut().map(|y| FloatsMut::F32(y)).collect();
        fused.run(&Cx { isa, par: &crate::Serial }, &sources, &mut outs);
        got.iter().zip(&self.outputs).map(|(y, &dtype)| OwnedFloats::new(dtype, y)).collect()
    }

    fn check(&self) {
        let fused = self.fused();
        for isa in Isa::available() {
            let want = self.want(isa);
            for workers in [1, 2, 5] {
                let mut got = self.unset(&fused);
                let mut outs: Vec<_> = got.iter_mut().map(OwnedFloats::get_mut).collect();
                fused.run(&Cx { isa, par: &Reverse(workers) }, &self.sources(), &mut outs);
                self.same(&got, &want, &("run", workers, isa));
            }
            self.in_place(&fused, &want, isa);
            self.pieces(&fused, &want, isa);
        }
    }

    fn same(&self, got: &[OwnedFloats], want: &[OwnedFloats], what: &dyn std::fmt::Debug) {
        let inputs: Vec<_> = self.inputs.iter().map(|x| x.get().dtype()).collect();
        let (out, shapes, outputs) = (self.out, self.shapes, &self.outputs);
        let what = format!("{what:?}, {outputs:?} from {inputs:?}, {shapes:?} to {out:?}, {:?}", self.expr);
        same_rounded(&what, got, want);
    }

    /// Whether input `k` can lie in the memory of output `j`.
    fn fits(&self, fused: &Fused, k: usize, j: usize) -> bool {
        let x = self.inputs[k].get();
        x.len() == fused.len() && x.dtype() == self.outputs[j]
    }

    fn in_place(&self, fused: &Fused, want: &[OwnedFloats], isa: Isa) {
        for j in 0..self.outputs.len() {
            for k in (0..self.inputs.len()).filter(|&k| self.fits(fused, k, j)) {
                let mut got = self.unset(fused);
                got[j] = self.inputs[k].clone();
                let mut sources = self.sources();
                sources[k] = Source::InPlace(j);
                let mut outs: Vec<_> = got.iter_mut().map(OwnedFloats::get_mut).collect();
                fused.run(&Cx { isa, par: &Reverse(2) }, &sources, &mut outs);
                self.same(&got, want, &("in place", k, j, isa));
            }
        }
    }

    /// The first full f32 input is the piece, which an f32 output overwrites, or which is only read; a half input is
    /// also taken from the memory of a half output.
    fn pieces(&self, fused: &Fused, want: &[OwnedFloats], isa: Isa) {
        let full = |k: &usize| self.inputs[*k].get().len() == fused.len();
        let of_f32 = |k: &usize| matches!(self.inputs[*k], OwnedFloats::F32(_));
        let Some(k) = (0..self.inputs.len()).filter(full).find(of_f32) else { return };
        let width = self.out.last().copied().unwrap_or(1).max(1);
        let to_piece = (0..self.outputs.len()).filter(|&j| self.outputs[j] == DType::F32).map(Some);
        for to_piece in to_piece.chain([None]) {
            for (len, by_rows) in [1, 7, 61, 1000].into_iter().flat_map(|len| [(len, false), (len, true)]) {
                if len == 1 && fused.len() > 2000 {
                    continue;
                }
                let mut piece = self.inputs[k].wide();
                let mut got = self.unset(fused);
                let mut sources: Vec<_> = self.inputs.iter().map(|x| PieceSource::Slice(x.get())).collect();
                sources[k] = PieceSource::Piece;
                let in_target = (0..self.inputs.len()).flat_map(|i| (0..got.len()).map(move |j| (i, j)));
                if let Some((i, j)) = in_target
                    .filter(|&(i, j)| i != k && Some(j) != to_piece)
                    .find(|&(i, j)| self.fits(fused, i, j))
                {
                    got[j] = self.inputs[i].clone();
                    sources[i] = PieceSource::Target(j);
                }
                let targets = got.iter_mut().enumerate().map(|(j, y)| {
                    if Some(j) == to_piece {
                        PieceTarget::Piece
                    } else {
                        PieceTarget::Whole(SharedFloats::new(y.get_mut()))
                    }
                });
                let targets: Vec<_> = targets.collect();
                // SAFETY: pieces are evaluated one after the other, and the wholes are distinct vectors.
                let bound = unsafe { fused.pieces(isa, &sources, &targets) };
                if by_rows {
                    for first in (0..width).step_by(len) {
                        let strip =
                            piece.chunks_mut(width).map(|row| &mut row[first..(first + len).min(width)]);
                        bound.rows(first, width, strip);
                    }
                } else {
                    for (i, part) in piece.chunks_mut(len).enumerate() {
                        bound.piece(i * len, part);
                    }
                }
                match to_piece {
                    Some(j) => got[j] = OwnedFloats::F32(piece),
                    None => assert_eq!(
                        OwnedFloats::F32(piece).bits(),
                        self.inputs[k].bits(),
                        "the piece keeps its value"
                    ),
                }
                self.same(&got, want, &("pieces", len, by_rows, to_piece, isa));
            }
        }
    }
}

/// Formats of inputs and outputs: everything in one, and mixtures in which each place has each format.
fn mixtures(n_inputs: usize, n_outputs: usize) -> Vec<(Vec<DType>, Vec<DType>)> {
    let mut all: Vec<_> = HALVES.iter().map(|&h| (vec![h; n_inputs], vec![h; n_outputs])).collect();
    for shift in 0..3 {
        for other in 0..3 {
            let inputs = (0..n_inputs).map(|k| FORMATS[(k + shift) % 3]).collect();
            let outputs = (0..n_outputs).map(|j| FORMATS[(j + other) % 3]).collect();
            all.push((inputs, outputs));
        }
    }
    all
}

fn check(expr: &Expr, out: &[usize], shapes: &[&[usize]]) {
    for (inputs, outputs) in mixtures(shapes.len(), expr.outputs().len()) {
        let values = shapes.iter().zip(&inputs).enumerate();
        let inputs = values
            .map(|(k, (s, &dtype))| OwnedFloats::new(dtype, &noise(s.iter().product(), k as u32 + 1)))
            .collect();
        Case { expr, out, shapes, inputs, outputs }.check();
    }
}

#[test]
fn every_op() {
    for n in [0, 1, 9, 100] {
        for &op in UNARIES {
            check(&Expr::unary(op), &[n], &[&[n]]);
        }
        for &op in BINARIES {
            check(&Expr::binary(op), &[n], &[&[n], &[n]]);
        }
    }
}

#[test]
fn broadcasting() {
    for (out, shapes) in BROADCASTS {
        check(&tangle(), out, shapes);
    }
}

/// More inputs and buffers than the small frame has room for.
#[test]
fn many_inputs() {
    let n = Expr::INPUTS_MAX as u8;
    let mut instrs: Vec<_> = (0..n).map(|k| Instr::Unary(Unary::Square, k)).collect();
    for k in 0..n {
        let sum = if k == 0 { 0 } else { n + n + k - 1 };
        instrs.push(Instr::Binary(Binary::Add, sum, n + k));
    }
    let expr = Expr::new(n.into(), instrs, vec![3 * n - 1, n, 2 * n + 3, 1]).unwrap();
    check(&expr, &[3, 700], &[&[3, 700][..]; Expr::INPUTS_MAX]);
    check(&expr, &[90, 7], &[&[90, 7][..]; Expr::INPUTS_MAX]);
    let mut shapes = [&[90, 7][..]; Expr::INPUTS_MAX];
    shapes[2] = &[7];
    shapes[5] = &[90, 1];
    check(&expr, &[90, 7], &shapes);
}

/// Outputs that swap the halves they lie in.
#[test]
fn swap_in_place() {
    let expr = Expr::new(2, vec![], vec![1, 0]).unwrap();
    for dtype in HALVES {
        let of = [(&[1000][..], dtype); 2];
        let fused = Fused::typed(&expr, &[1000], &of, &[dtype; 2]).unwrap();
        let (a, b) = (OwnedFloats::new(dtype, &noise(1000, 1)), OwnedFloats::new(dtype, &noise(1000, 2)));
        let (mut x, mut y) = (a.clone(), b.clone());
        let sources = [Source::InPlace(0), Source::InPlace(1)];
        fused.run(&Cx::serial(), &sources, &mut [x.get_mut(), y.get_mut()]);
        assert_eq!((x, y), (b, a));
    }
}

/// Every half, the middle to the next one, and a step to either side of it: rounding inside a pass gives the bits of
/// storing and reading again.
#[test]
fn rounding_inside_a_pass_is_that_of_storage() {
    let near = |v: f32| {
        let bits = v.to_bits();
        [bits.wrapping_sub(1), bits, bits.wrapping_add(1)].map(f32::from_bits)
    };
    for (dtype, op, middle) in
        [(DType::F16, Unary::RoundF16, 0x1000), (DType::Bf16, Unary::RoundBf16, 0x8000)]
    {
        let all: Vec<f32> = (0..=u16::MAX)
            .flat_map(|h| {
                let v = match dtype {
                    DType::F16 => polyreme_dtype::f16::from_bits(h).to_f32(),
                    _ => polyreme_dtype::bf16::from_bits(h).to_f32(),
                };
                let [a, b, c] = near(v);
                let [d, e, f] = near(f32::from_bits(v.to_bits().wrapping_add(middle)));
                [a, b, c, d, e, f]
            })
            // Between the subnormal halves, whose steps are not those of their bits.
            .chain((0..4096).flat_map(|i| near((i as f32 + 0.5) * 2f32.powi(-25))))
            .collect();
        let want = OwnedFloats::F32(OwnedFloats::new(dtype, &all).wide());
        let fused = Fused::new(&Expr::unary(op), &[all.len()], &[&[all.len()]]).unwrap();
        for isa in Isa::available() {
            let mut got = vec![7.0; all.len()];
            let cx = Cx { isa, par: &crate::Serial };
            fused.run(&cx, &[Source::Slice(Floats::F32(&all))], &mut [FloatsMut::F32(&mut got)]);
            for ((x, g), w) in all.iter().zip(&got).zip(want.wide()) {
                assert_eq!(g.to_bits(), w.to_bits(), "{op:?} of {x:e} ({:#x}) with {isa:?}", x.to_bits());
                assert_eq!(scalar::unary(op, *x).to_bits(), w.to_bits());
            }
        }
    }
}

#[test]
fn refusals() {
    let expr = Expr::binary(Binary::Add);
    let of = |a, b| [(&[3][..], a), (&[3][..], b)];
    let refused = |inputs: [(&[usize], DType); 2], outputs: &[DType]| {
        Fused::typed(&expr, &[3], &inputs, outputs).unwrap_err()
    };
    assert_eq!(refused(of(DType::F16, DType::I32), &[DType::F32]), ExprError::Format(DType::I32));
    assert_eq!(refused(of(DType::F16, DType::F32), &[DType::F64]), ExprError::Format(DType::F64));
    let none = ExprError::OutputFormats { formats: 0, outputs: 1 };
    assert_eq!(refused(of(DType::F16, DType::F32), &[]), none);
}

/// A slice in another format than the one compiled for would be read as other numbers.
#[test]
#[should_panic(expected = "format of input 0")]
fn another_format_is_refused() {
    let fused = Fused::typed(&Expr::unary(Unary::Neg), &[4], &[(&[4], DType::F16)], &[DType::F32]).unwrap();
    let x = OwnedFloats::new(DType::Bf16, &[1.0; 4]);
    fused.run(&Cx::serial(), &[Source::Slice(x.get())], &mut [FloatsMut::F32(&mut [0.0; 4])]);
}
