//! Moments that are stored as bf16, in half the memory.
//!
//! A step's arithmetic is that of f32: moments are widened, which is exact, and rounded when they are stored. They are rounded
//! up or down at random, so that the mean is right. To nearest, a moment that moves by less than half of its last bit would
//! never move: with `beta2 = 0.999` a mean of squares shrinks by a thousandth in a step, and a bf16 has 8 bits.
//!
//! The random bits are a function of stream, step and the element's position among all parameters. So moments have the same
//! bits on any number of threads and ranks, and whether a step is made at once or block by block.

use polyreme_dtype::bf16;

use super::{Optimizer, Pass, StepHyper, each_chunk};
use crate::lanes::twin;
use crate::{Cx, Isa, convert, random};

/// Elements that are widened at a time: three buffers of 2 KiB, which stay in the first cache.
const STAGE: usize = 512;

/// Where the random bits of a step come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rounding {
    /// The stream.
    pub key: u64,
    /// The step's number.
    pub step: u64,
    /// The position of the first element among all parameters.
    pub first: u64,
}

impl Rounding {
    /// The same, `n` elements further on.
    pub fn after(self, n: usize) -> Rounding {
        Rounding { first: self.first + n as u64, ..self }
    }
}

impl Optimizer {
    /// [`Optimizer::step`] with states of bf16, for optimizers that go [by element](Self::by_element).
    ///
    /// # Panics
    /// For the others.
    pub fn step_half(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        rounding: Rounding,
        p: &mut [f32],
        g: &[f32],
        state1: &mut [bf16],
        state2: &mut [bf16],
    ) {
        assert_eq!(g.len(), p.len(), "a gradient for each parameter");
        assert!(hyper.step >= 1, "steps are counted from 1");
        let pass = self.pass(hyper).expect("an optimizer that goes by element");
        let states = self.n_states();
        assert_eq!(state1.len(), if states >= 1 { p.len() } else { 0 }, "the first state's length");
        assert_eq!(state2.len(), if states >= 2 { p.len() } else { 0 }, "the second state's length");
        each_chunk(cx, p, state1, state2, |at, p, m, v| {
            pass.run_half(cx.isa, rounding.after(at.start), p, &g[at], m, v);
        });
    }
}

impl Pass {
    /// [`Pass::run`] with states of bf16.
    pub fn run_half(
        &self,
        isa: Isa,
        rounding: Rounding,
        p: &mut [f32],
        g: &[f32],
        state1: &mut [bf16],
        state2: &mut [bf16],
    ) {
        let (mut wide1, mut wide2, mut bits) = ([0.0; STAGE], [0.0; STAGE], [0; STAGE]);
        let len = |state: &[bf16], n: usize| if state.is_empty() { 0 } else { n };
        let (mut state1, mut state2) = (state1, state2);
        for (i, (p, g)) in p.chunks_mut(STAGE).zip(g.chunks(STAGE)).enumerate() {
            let n = p.len();
            let (now1, later1) = state1.split_at_mut(len(state1, n));
            let (now2, later2) = state2.split_at_mut(len(state2, n));
            let (wide1, wide2) = (&mut wide1[..now1.len()], &mut wide2[..now2.len()]);
            convert::widen_bf16(isa, now1, wide1);
            convert::widen_bf16(isa, now2, wide2);
            self.run(isa, p, g, wide1, wide2);
            if !now1.is_empty() {
                let Rounding { key, step, first } = rounding.after(i * STAGE);
                random::bits(isa, key, step, first, &mut bits[..n]);
                // Half of the bits for each.
                round(isa, &bits[..n], 0, wide1, now1);
                round(isa, &bits[..now2.len()], 16, wide2, now2);
            }
            (state1, state2) = (later1, later2);
        }
    }
}

twin! { fn round(bits: &[u32], shift: u32, x: &[f32], y: &mut [bf16]) = round_body }

/// Adds 16 random bits to the 16 that are cut off: they carry with the probability that the cut-off part is of the last bit.
/// A NaN stays one.
#[inline(always)]
fn round_body(bits: &[u32], shift: u32, x: &[f32], y: &mut [bf16]) {
    for ((y, x), &random) in y.iter_mut().zip(x).zip(bits) {
        let exact = x.to_bits();
        let carried = exact.wrapping_add(random >> shift & 0xffff) >> 16;
        *y = bf16::from_bits(if x.is_nan() { (exact >> 16) as u16 | 0x40 } else { carried as u16 });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CHUNK, Moments};
    use super::*;
    use crate::lanes::testing::{contexts, data};

    const ALL: [Optimizer; 5] = [
        Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.1 },
        Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 },
        Optimizer::Adam(Moments { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 }),
        Optimizer::AdamW(Moments::DEFAULT),
        Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 },
    ];

    fn hyper(step: u64) -> StepHyper {
        StepHyper { lr: 0.01, step, grad_scale: 0.5, decay_scale: 1.0 }
    }

    fn rounding(step: u64) -> Rounding {
        Rounding { key: 7, step, first: 1001 }
    }

    fn states(o: Optimizer, n: usize) -> [Vec<bf16>; 2] {
        [0, 1].map(|k| vec![bf16::ZERO; if o.n_states() > k { n } else { 0 }])
    }

    #[test]
    fn moments_have_the_same_bits_everywhere_however_a_step_is_cut_up() {
        for o in ALL {
            for n in [0, 1, 7, STAGE - 1, STAGE, STAGE + 1, CHUNK + 37] {
                let runs = contexts().into_iter().map(|cx| {
                    let (mut p, [mut m, mut v]) = (data(1, n), states(o, n));
                    for step in 1..=3 {
                        let g = data(step + 9, n);
                        o.step_half(&cx, hyper(step), rounding(step), &mut p, &g, &mut m, &mut v);
                    }
                    (p, m, v)
                });
                let runs: Vec<_> = runs.collect();
                assert!(runs.iter().all(|run| *run == runs[0]), "{o:?}, {n}");
                let (mut p, [mut m, mut v]) = (data(1, n), states(o, n));
                for step in 1..=3 {
                    let (g, pass) = (data(step + 9, n), o.pass(hyper(step)).unwrap());
                    let cuts = [0, n / 3, n / 3 + n / 7, n];
                    for cut in cuts.windows(2) {
                        let r = cut[0]..cut[1];
                        let of = |s: &[bf16]| if s.is_empty() { 0..0 } else { r.clone() };
                        let (r1, r2) = (of(&m), of(&v));
                        let (from, isa) = (rounding(step).after(r.start), Isa::detect());
                        pass.run_half(isa, from, &mut p[r.clone()], &g[r], &mut m[r1], &mut v[r2]);
                    }
                }
                assert!((p, m, v) == runs[0], "{o:?}, {n}");
            }
        }
    }

    /// What is stored is one of the two neighbours of what f32 moments would be; the parameters of the first step are theirs.
    #[test]
    fn a_step_is_that_of_f32_but_for_what_is_stored() {
        for o in ALL {
            let n = 2 * STAGE + 3;
            let (mut p, [mut m, mut v]) = (data(1, n), states(o, n));
            let (mut p32, mut m32, mut v32) = (data(1, n), vec![0.0; m.len()], vec![0.0; v.len()]);
            let (cx, g) = (Cx::serial(), data(2, n));
            o.step_half(&cx, hyper(1), rounding(1), &mut p, &g, &mut m, &mut v);
            o.step(&cx, hyper(1), &mut p32, &g, &mut m32, &mut v32, &[]);
            assert_eq!(p, p32, "{o:?}");
            for (half, exact) in m.iter().chain(&v).zip(m32.iter().chain(&v32)) {
                let below = exact.to_bits() >> 16;
                let above = below + u32::from(exact.to_bits() & 0xffff != 0);
                assert!((below..=above).contains(&u32::from(half.to_bits())), "{o:?}: {half} for {exact}");
            }
        }
    }

    #[test]
    fn roundings_are_right_in_the_mean_and_keep_what_is_exact() {
        let n = 1 << 16;
        for (x, shift) in [(1.001f32, 0), (-0.3, 16), (3e-30, 0), (1.0, 16), (-2.5, 0)] {
            let mut bits = vec![0; n];
            random::bits(Isa::detect(), 3, 5, 0, &mut bits);
            let mut y = vec![bf16::ZERO; n];
            round(Isa::detect(), &bits, shift, &vec![x; n], &mut y);
            let mean = y.iter().map(|y| f64::from(y.to_f32())).sum::<f64>() / n as f64;
            // The last bit is at most 2^-7 of it; a mean of 65536 draws is within 5 deviations of at most half of that.
            let error = (mean - f64::from(x)).abs() / f64::from(x.abs());
            assert!(error < 5.0 * 2f64.powi(-8) / 256.0, "{x}: {mean}");
            if bf16::from_f32(x).to_f32() == x {
                assert!(y.iter().all(|y| y.to_f32() == x), "{x} is exact");
            }
        }
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::from_bits(0x7f80_0001)];
        let mut y = [bf16::ZERO; 6];
        round(Isa::detect(), &[u32::MAX; 6], 0, &odd, &mut y);
        assert!(y[0].is_nan() && y[5].is_nan());
        assert_eq!([1, 2, 3, 4].map(|i| y[i].to_bits()), [0x7f80, 0xff80, 0, 0x8000]);
    }

    /// Rounded to nearest, a mean of squares that shrinks by a thousandth per step would stay where it is.
    #[test]
    fn a_mean_of_squares_fades_as_that_of_f32() {
        let (n, steps) = (4096, 2000);
        let o = Optimizer::Adam(Moments::DEFAULT);
        let (mut p, [mut m, mut v]) = (vec![0.0; n], states(o, n));
        let (cx, mut want) = (Cx::serial(), 0.0f64);
        for step in 1..=steps {
            let g = if step <= 10 { 1.0f32 } else { 0.0 };
            o.step_half(
                &cx,
                StepHyper { grad_scale: 1.0, ..hyper(step) },
                rounding(step),
                &mut p,
                &vec![g; n],
                &mut m,
                &mut v,
            );
            want = 0.999 * want + 0.001 * f64::from(g * g);
        }
        let mean = v.iter().map(|v| f64::from(v.to_f32())).sum::<f64>() / n as f64;
        assert!((mean / want - 1.0).abs() < 0.02, "{mean} for {want}");
    }
}
