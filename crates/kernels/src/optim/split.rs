//! Steps of tensors that ranks have in parts, by optimizers that look at whole tensors.
//!
//! LAMB's step depends on two norms of the whole tensor; Adafactor's also on means of its rows and columns. So a step is cut
//! where something must be known of all parts. Each rank adds up what its part contributes, in f64; the caller adds up these
//! sums over the ranks that split the tensor, and goes on:
//!
//! ```text
//!                 LAMB                                 Adafactor
//!  means          nothing                              squares of g by row and by column; the sum of the rows' new means
//!  norms          m and v move; squares of p and u     r and c move; squares of p and u
//!  step           p -= lr · ‖p‖/‖u‖ · u                p = p·keep - rate · u
//! ```
//!
//! Where rows are split, each rank has the means of its own rows, and all have those of all columns; and the other way round.
//! The sum of the rows' new means is needed for `v = r·c / mean(r)` before the means have moved everywhere, but follows from
//! what is there: `Σr' = (1 - take)·Σr + take·Σg²/cols`. Ranks that have the same rows' means each bring their share of `Σr`.
//!
//! Sums of parts are added in another order than those of a whole tensor, so bits differ from those of one rank, by rounding of
//! f64 sums. Everything else is computed by the same kernels.

use super::{Optimizer, ParamTensor, StepHyper, lamb_norms, lamb_update};
use crate::Cx;
use std::ops::Range;

/// What is added up over the ranks that split a tensor, in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum SumsOf {
    /// What means of rows and columns take.
    Means,
    /// Squares of the parameters and of their step.
    Norms,
}

impl SumsOf {
    /// All of them, in their order.
    pub const ALL: [SumsOf; 2] = [SumsOf::Means, SumsOf::Norms];

    /// Its name in printed programs.
    pub fn name(self) -> &'static str {
        match self {
            SumsOf::Means => "means",
            SumsOf::Norms => "norms",
        }
    }
}

/// Where the sums of a tensor lie among those of all.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct PartSums {
    /// The squares of each of its rows here.
    pub rows: Range<usize>,
    /// The squares of each of its columns here.
    pub cols: Range<usize>,
    /// For each of its matrices, the sum of the new means of rows.
    pub totals: Range<usize>,
    /// The squares of the parameters and of their step.
    pub norms: Range<usize>,
}

/// A tensor of which this rank has a part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SplitTensor {
    /// The part.
    pub part: ParamTensor,
    /// Elements of the whole tensor.
    pub numel: usize,
    /// The last two dims of the whole tensor, if one of them is split: then means of rows and columns are measured.
    pub matrix: Option<[usize; 2]>,
    /// How many ranks have the same means of rows.
    pub row_copies: usize,
    /// Where its sums are.
    pub sums: PartSums,
}

impl SplitTensor {
    /// The squares of the parameters and of their step.
    pub(super) fn norms(&self, sums: &[f64]) -> [f64; 2] {
        let at = self.sums.norms.start;
        [sums[at], sums[at + 1]]
    }
}

impl Optimizer {
    /// Sets the sums of the parts that this rank has; slices as for [`step`](Self::step). Norms are measured when the means
    /// have been added up over the ranks; they move the states.
    pub fn measure(
        &self,
        what: SumsOf,
        cx: &Cx,
        hyper: StepHyper,
        (p, g): (&[f32], &[f32]),
        [state1, state2]: [&mut [f32]; 2],
        tensors: &[SplitTensor],
        sums: &mut [f64],
    ) {
        for t in tensors {
            let at = t.part.range.clone();
            let (p, g) = (&p[at.clone()], &g[at]);
            let (s1, s2) = (&mut state1[t.part.states[0].clone()], &mut state2[t.part.states[1].clone()]);
            match (*self, what) {
                (Optimizer::Lamb(_), SumsOf::Means) => {}
                (Optimizer::Lamb(m), SumsOf::Norms) => {
                    let norms = lamb_norms(cx, m, hyper, p, g, s1, s2);
                    sums[t.sums.norms.clone()].copy_from_slice(&norms);
                }
                (Optimizer::Adafactor(a), SumsOf::Means) => a.measure_means(cx, hyper, t, g, s1, sums),
                (Optimizer::Adafactor(a), SumsOf::Norms) => {
                    a.measure_norms(cx, hyper, t, p, g, [s1, s2], sums);
                }
                (
                    Optimizer::Sgd { .. } | Optimizer::Adam(_) | Optimizer::AdamW(_) | Optimizer::Lion { .. },
                    _,
                ) => unreachable!("these update element by element"),
            }
        }
    }

    /// The step of the parts that this rank has, when all sums are known; slices as for [`step`](Self::step).
    pub fn step_split(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        p: &mut [f32],
        g: &[f32],
        [state1, state2]: [&[f32]; 2],
        tensors: &[SplitTensor],
        sums: &[f64],
    ) {
        for t in tensors {
            let (p, g) = (&mut p[t.part.range.clone()], &g[t.part.range.clone()]);
            let states = [&state1[t.part.states[0].clone()], &state2[t.part.states[1].clone()]];
            match *self {
                Optimizer::Lamb(m) => lamb_update(cx, m, hyper, t.norms(sums), p, states[0], states[1]),
                Optimizer::Adafactor(a) => a.step_split(cx, hyper, t, p, g, states, sums),
                Optimizer::Sgd { .. } | Optimizer::Adam(_) | Optimizer::AdamW(_) | Optimizer::Lion { .. } => {
                    unreachable!("these update element by element")
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Adafactor, Moments};
    use super::*;
    use crate::lanes::testing::{close, contexts, data, same_bits};

    const LAMB: Optimizer =
        Optimizer::Lamb(Moments { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 });
    const ADAFACTOR: Optimizer =
        Optimizer::Adafactor(Adafactor { d: 1.5, weight_decay: 0.1, eps1: 1e-3, ..Adafactor::DEFAULT });

    /// A rank's part of a tensor `[count, rows, cols]`, and its states: from the first to the last index of each dim.
    struct Rank {
        at: [Range<usize>; 3],
        p: Vec<f32>,
        s: [Vec<f32>; 2],
        split: SplitTensor,
    }

    /// The elements of a tensor of these dims at these indices.
    fn taken(whole: &[f32], dims: [usize; 3], at: &[Range<usize>; 3]) -> Vec<f32> {
        let mut part = Vec::new();
        for i in at[0].clone() {
            for j in at[1].clone() {
                part.extend(at[2].clone().map(|k| whole[(i * dims[1] + j) * dims[2] + k]));
            }
        }
        part
    }

    fn hyper(step: u64) -> StepHyper {
        StepHyper { lr: 0.3, step, grad_scale: 0.5, decay_scale: 0.7 }
    }

    /// A tensor that is cut into this number of parts along each dim has one rank's parameters and states, up to rounding.
    fn check(o: Optimizer, dims: [usize; 3], parts: [usize; 3]) {
        let what = format!("{o:?} {dims:?} in {parts:?}");
        let n: usize = dims.iter().product();
        let numel = |d: Option<Vec<usize>>| d.map_or(0, |d| d.iter().product());
        let lens = o.state_dims(&dims).map(numel);
        let whole = ParamTensor { range: 0..n, matrix: Some([dims[1], dims[2]]), states: lens.map(|n| 0..n) };
        let (mut p, [mut s1, mut s2]) = (data(1, n), lens.map(|n| vec![0.0; n]));
        for step in 1..=4 {
            let tensors = std::slice::from_ref(&whole);
            o.step(&Cx::serial(), hyper(step), &mut p, &data(step + 9, n), &mut s1, &mut s2, tensors);
        }
        let split = |d: usize, i: usize| i * dims[d] / parts[d]..(i + 1) * dims[d] / parts[d];
        let mut runs = Vec::new();
        for cx in contexts() {
            let mut ranks: Vec<Rank> = Vec::new();
            for i in 0..parts.iter().product() {
                let at = [
                    split(0, i / (parts[1] * parts[2])),
                    split(1, i / parts[2] % parts[1]),
                    split(2, i % parts[2]),
                ];
                let [count, rows, cols] = [0, 1, 2].map(|d| at[d].len());
                let lens = o.state_dims(&[count, rows, cols]).map(numel);
                let (r, c) = (count * rows, count * cols);
                let part = ParamTensor {
                    range: 0..count * rows * cols,
                    matrix: Some([rows, cols]),
                    states: lens.map(|n| 0..n),
                };
                let inside = parts[1] * parts[2] > 1;
                let end = if inside { r + c + count } else { 0 };
                let sums = PartSums {
                    rows: 0..if inside { r } else { 0 },
                    cols: if inside { r..r + c } else { 0..0 },
                    totals: if inside { r + c..end } else { 0..0 },
                    norms: end..end + 2,
                };
                let matrix = inside.then_some([dims[1], dims[2]]);
                let split = SplitTensor { part, numel: n, matrix, row_copies: parts[2], sums };
                ranks.push(Rank {
                    p: taken(&data(1, n), dims, &at),
                    s: lens.map(|n| vec![0.0; n]),
                    at,
                    split,
                });
            }
            for step in 1..=4 {
                run_step(&cx, o, step, dims, &mut ranks);
            }
            let compared = |rank: &Rank| [&rank.p[..], &rank.s[0], &rank.s[1]].concat();
            runs.push(ranks.iter().flat_map(compared).collect::<Vec<f32>>());
            if runs.len() == 1 {
                for rank in &ranks {
                    let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<f64>>();
                    close(&what, &rank.p, &wide(taken(&p, dims, &rank.at)), 1e-5);
                    let Optimizer::Adafactor(_) = o else { continue };
                    let [i, j, k] = rank.at.clone();
                    let r = taken(&s1, [dims[0], dims[1], 1], &[i.clone(), j, 0..1]);
                    let c = taken(&s2, [dims[0], 1, dims[2]], &[i, 0..1, k]);
                    close(&what, &rank.s[0], &wide(r), 1e-5);
                    close(&what, &rank.s[1], &wide(c), 1e-5);
                }
            }
        }
        same_bits(&what, &runs);
    }

    /// One step of all ranks, with their sums added up as those that split rows, columns or matrices do.
    fn run_step(cx: &Cx, o: Optimizer, step: u64, dims: [usize; 3], ranks: &mut [Rank]) {
        let g = data(step + 9, dims.iter().product());
        let mut sums: Vec<Vec<f64>> = ranks.iter().map(|r| vec![0.0; r.split.sums.norms.end]).collect();
        for what in SumsOf::ALL {
            for (rank, sums) in ranks.iter_mut().zip(&mut sums) {
                let g = taken(&g, dims, &rank.at);
                let [a, b] = &mut rank.s;
                let split = std::slice::from_ref(&rank.split);
                o.measure(what, cx, hyper(step), (&rank.p, &g), [a, b], split, sums);
            }
            let before = sums.clone();
            for (a, sums) in ranks.iter().zip(&mut sums) {
                let s = &a.split.sums;
                let same = |b: &Rank, d: usize| a.at[d] == b.at[d];
                let mut add = |at: &Range<usize>, with: &dyn Fn(&Rank) -> bool| {
                    for i in at.clone() {
                        let of = ranks.iter().zip(&before).filter(|(b, _)| with(b));
                        sums[i] = of.map(|(_, other)| other[i]).sum();
                    }
                };
                match what {
                    SumsOf::Norms => add(&s.norms, &|_| true),
                    SumsOf::Means => {
                        add(&s.totals, &|b| same(b, 0));
                        add(&s.rows, &|b| same(b, 0) && same(b, 1));
                        add(&s.cols, &|b| same(b, 0) && same(b, 2));
                    }
                }
            }
        }
        for (rank, sums) in ranks.iter_mut().zip(&sums) {
            let g = taken(&g, dims, &rank.at);
            let split = std::slice::from_ref(&rank.split);
            o.step_split(cx, hyper(step), &mut rank.p, &g, [&rank.s[0], &rank.s[1]], split, sums);
        }
    }

    #[test]
    fn parts_have_the_steps_of_the_whole() {
        for o in [LAMB, ADAFACTOR] {
            for dims in [[1, 12, 40], [1, 4, 16_400], [6, 4, 8], [1, 260, 136]] {
                for parts in [[1, 2, 1], [1, 1, 2], [1, 4, 1], [1, 2, 2], [1, 1, 4]] {
                    check(o, dims, parts);
                }
            }
            for parts in [[2, 1, 1], [3, 2, 1], [2, 2, 2], [6, 1, 1]] {
                check(o, [6, 4, 8], parts);
            }
        }
    }
}
