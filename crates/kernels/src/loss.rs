//! Cross entropy from logits `[n, classes]` and labels, as PyTorch's `cross_entropy` with `reduction="mean"`.
//!
//! With `p = softmax(row)`, the label `t`, the class weights `w` (1 if none) and the smoothing `e`, a row costs
//! `(1-e) · w[t] · -ln p[t]  +  e/classes · Σ_k w[k] · -ln p[k]`, and the loss is the sum over the rows that are not
//! ignored divided by the sum of their `w[t]`. The forward keeps each row's `ln Σ e^x`, from which the backward gets
//! p in one pass. Logits and their gradient may be stored in half.

use crate::cx::SharedMut;
use crate::exp_rows::{exp_into, exp_sum};
use crate::lanes::{max, sum_map, sum_map2, twin};
use crate::stage::RowStage;
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};
use std::fmt;

/// The loss of `n` rows of logits against `n` labels.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// Rows.
    pub n: usize,
    /// Columns.
    pub classes: usize,
    /// The share of the target that is spread evenly over the classes; 0 for none.
    pub label_smoothing: f32,
    /// A label that says "skip this row"; PyTorch's default is -100.
    pub ignore_index: Option<i32>,
}

/// A loss and its weight: `mean * weight` of several batches add up to those of all of them together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WeightedLoss {
    /// The mean over the rows that count; NaN if there are none, as in PyTorch.
    pub mean: f32,
    /// The sum of the class weights of the rows that count: their number, if there are no class weights.
    pub weight: f64,
}

/// A label that is neither a class nor `ignore_index`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LabelError {
    /// Which row.
    pub position: usize,
    /// The label.
    pub label: i32,
    /// How many classes there are.
    pub classes: usize,
}

impl fmt::Display for LabelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LabelError { position, label, classes } = self;
        write!(
            f,
            "label {label} at position {position} is not in 0..{classes}: fix the data or the model's classes"
        )
    }
}

impl std::error::Error for LabelError {}

impl CrossEntropy {
    /// How many floats of scratch `forward` needs; `halves`: whether the logits are stored in half.
    pub fn forward_scratch_len(&self, halves: bool, workers: usize) -> usize {
        self.n + RowStage::new(halves, 1, self.classes).len(workers)
    }

    /// How many floats of scratch `backward` needs; `halves`: whether the logits or their gradient are stored in half.
    pub fn backward_scratch_len(&self, halves: bool, workers: usize) -> usize {
        RowStage::new(halves, 2, self.classes).len(workers)
    }

    /// The loss; `lse[n]` (the `ln Σ e^x` of each row) is kept for the backward. A wrong label is found before
    /// anything is written.
    pub fn forward(
        &self,
        cx: &Cx,
        logits: Floats,
        labels: &[i32],
        class_weights: Option<&[f32]>,
        lse: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<WeightedLoss, LabelError> {
        self.check_shapes(logits, labels, class_weights);
        assert_eq!(lse.len(), self.n, "lse is [n]");
        let stage = RowStage::new(logits.is_half(), 1, self.classes);
        assert!(scratch.len() >= self.n + stage.len(cx.par.workers()), "scratch is too short");
        self.check_labels(labels)?;
        let (c, step) = (self.classes, self.task_rows());
        let (costs, rest) = scratch.split_at_mut(self.n);
        let (lse, shared, rest) = (SharedMut::new(lse), SharedMut::new(&mut *costs), SharedMut::new(rest));
        cx.par.run(self.n.div_ceil(step), &|task, worker| {
            // SAFETY: workers have their own buffers.
            let [x_stage] = unsafe { stage.buffers(rest, worker) };
            for r in stage.cut(task * step..((task + 1) * step).min(self.n)) {
                // SAFETY: tasks have disjoint rows, and each runs once.
                let (lse, costs) = unsafe { (lse.slice(r.start, r.len()), shared.slice(r.start, r.len())) };
                let x = logits.staged(cx.isa, r.start * c, r.len() * c, x_stage);
                let rows = LossRows { c, labels: &labels[r], weights: class_weights, loss: self };
                forward_rows(cx.isa, x, rows, lse, costs);
            }
        });
        let sum: f64 = costs.iter().map(|&v| f64::from(v)).sum();
        let weight = self.weight(labels, class_weights);
        Ok(WeightedLoss { mean: (sum / weight) as f32, weight })
    }

    /// `dlogits` from the forward's lse and the gradient of the mean. Ignored rows get 0, also when all are ignored
    /// (and the loss is NaN), as in PyTorch.
    ///
    /// The labels are those that the forward accepted; it panics on others.
    pub fn backward(
        &self,
        cx: &Cx,
        dloss: f32,
        logits: Floats,
        labels: &[i32],
        class_weights: Option<&[f32]>,
        lse: &[f32],
        dlogits: FloatsMut,
        scratch: &mut [f32],
    ) {
        self.check_shapes(logits, labels, class_weights);
        assert_eq!(lse.len(), self.n, "lse is [n]");
        assert_eq!(dlogits.len(), logits.len(), "dlogits is [n, classes]");
        let stage = RowStage::new(logits.is_half() || dlogits.is_half(), 2, self.classes);
        assert!(scratch.len() >= stage.len(cx.par.workers()), "scratch is too short");
        let (c, step) = (self.classes, self.task_rows());
        let scale = (f64::from(dloss) / self.weight(labels, class_weights)) as f32;
        let (dlogits, scratch) = (SharedFloats::new(dlogits), SharedMut::new(scratch));
        cx.par.run(self.n.div_ceil(step), &|task, worker| {
            // SAFETY: workers have their own buffers.
            let [x_stage, dx_stage] = unsafe { stage.buffers(scratch, worker) };
            for r in stage.cut(task * step..((task + 1) * step).min(self.n)) {
                // SAFETY: tasks have disjoint rows, and each runs once.
                let dlogits = unsafe { dlogits.part(r.start * c, r.len() * c) };
                let x = logits.staged(cx.isa, r.start * c, r.len() * c, x_stage);
                let rows = LossRows { c, labels: &labels[r.clone()], weights: class_weights, loss: self };
                dlogits.staged(cx.isa, dx_stage, |dx| {
                    backward_rows(cx.isa, x, rows, &lse[r], scale, dx);
                });
            }
        });
    }

    fn task_rows(&self) -> usize {
        (8 * 1024 / self.classes.max(1)).clamp(1, 1024)
    }

    fn counts(&self, label: i32) -> bool {
        Some(label) != self.ignore_index
    }

    /// The sum of `w[t]` over the rows that count.
    fn weight(&self, labels: &[i32], class_weights: Option<&[f32]>) -> f64 {
        let counted = labels.iter().filter(|&&t| self.counts(t));
        match class_weights {
            Some(w) => counted.map(|&t| f64::from(w[t as usize])).sum(),
            None => counted.count() as f64,
        }
    }

    fn check_labels(&self, labels: &[i32]) -> Result<(), LabelError> {
        for (position, &label) in labels.iter().enumerate() {
            let known = usize::try_from(label).is_ok_and(|t| t < self.classes);
            if !known && self.counts(label) {
                return Err(LabelError { position, label, classes: self.classes });
            }
        }
        Ok(())
    }

    fn check_shapes(&self, logits: Floats, labels: &[i32], class_weights: Option<&[f32]>) {
        assert_eq!(logits.len(), self.n * self.classes, "logits are [n, classes]");
        assert_eq!(labels.len(), self.n, "labels are [n]");
        assert!(class_weights.is_none_or(|w| w.len() == self.classes), "class weights are [classes]");
    }
}

/// What a task knows about its rows.
#[derive(Clone, Copy)]
struct LossRows<'a> {
    c: usize,
    labels: &'a [i32],
    weights: Option<&'a [f32]>,
    loss: &'a CrossEntropy,
}

twin! { fn forward_rows(isa; x: &[f32], rows: LossRows<'_>, lse: &mut [f32], costs: &mut [f32]) = forward_rows_body }
twin! {
    fn backward_rows(isa; x: &[f32], rows: LossRows<'_>, lse: &[f32], scale: f32, dx: &mut [f32]) = backward_rows_body
}

#[inline(always)]
fn forward_rows_body(isa: Isa, x: &[f32], rows: LossRows<'_>, lse: &mut [f32], costs: &mut [f32]) {
    let LossRows { c, labels, weights, loss } = rows;
    let smoothing = loss.label_smoothing;
    for (i, &label) in labels.iter().enumerate() {
        let x = &x[i * c..(i + 1) * c];
        let m = max(x);
        let log_sum = exp_sum(isa, x, m).ln();
        lse[i] = m + log_sum;
        costs[i] = 0.0;
        if !loss.counts(label) {
            continue;
        }
        let t = label as usize;
        // In this order: the maximum and the label's logit may be large and near each other.
        costs[i] = (log_sum - (x[t] - m)) * weights.map_or(1.0, |w| w[t]);
        if smoothing > 0.0 {
            let all = match weights {
                Some(w) => sum_map2(x, w, |x, w| (log_sum - (x - m)) * w),
                None => sum_map(x, |x| log_sum - (x - m)),
            };
            costs[i] = (1.0 - smoothing) * costs[i] + smoothing / c as f32 * all;
        }
    }
}

#[inline(always)]
fn backward_rows_body(isa: Isa, x: &[f32], rows: LossRows<'_>, lse: &[f32], scale: f32, dx: &mut [f32]) {
    let LossRows { c, labels, weights, loss } = rows;
    // d(-ln p[k])/dx[j] = p[j] - (j == k): every class k adds its share of p, and takes it from its own column.
    let even = scale * loss.label_smoothing / c as f32;
    let even_sum = even * weights.map_or(c as f32, |w| sum_map(w, |v| v));
    for (i, &label) in labels.iter().enumerate() {
        let (x, dx) = (&x[i * c..(i + 1) * c], &mut dx[i * c..(i + 1) * c]);
        if !loss.counts(label) {
            dx.fill(0.0);
            continue;
        }
        let t = label as usize;
        let own = scale * (1.0 - loss.label_smoothing) * weights.map_or(1.0, |w| w[t]);
        let share = own + even_sum;
        exp_into(isa, x, lse[i], dx);
        match weights {
            Some(w) if even != 0.0 => dx.iter_mut().zip(w).for_each(|(dx, &w)| *dx = *dx * share - even * w),
            _ => dx.iter_mut().for_each(|dx| *dx = *dx * share - even),
        }
        dx[t] -= own;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{FORMATS, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};
    use polyreme_dtype::DType;

    /// dlogits in a format, the mean, and lse.
    fn run(
        ce: &CrossEntropy,
        cx: &Cx,
        x: &OwnedFloats,
        labels: &[i32],
        w: Option<&[f32]>,
        to: DType,
    ) -> [OwnedFloats; 3] {
        let (x, workers) = (x.get(), cx.par.workers());
        let mut s = vec![f32::NAN; ce.forward_scratch_len(x.is_half(), workers)];
        let mut lse = vec![0.0; ce.n];
        let mut dx = OwnedFloats::unset(to, x.len());
        let loss = ce.forward(cx, x, labels, w, &mut lse, &mut s).unwrap();
        let mut s = vec![f32::NAN; ce.backward_scratch_len(x.is_half() || to != DType::F32, workers)];
        ce.backward(cx, 0.7, x, labels, w, &lse, dx.get_mut(), &mut s);
        [dx, OwnedFloats::F32(vec![loss.mean]), OwnedFloats::F32(lse)]
    }

    fn naive(ce: &CrossEntropy, x: &[f64], labels: &[i32], w: Option<&[f32]>) -> f64 {
        let (c, e) = (ce.classes, f64::from(ce.label_smoothing));
        let w = |k: usize| w.map_or(1.0, |w| f64::from(w[k]));
        let (mut sum, mut weight) = (0.0, 0.0);
        for (i, &t) in labels.iter().enumerate().filter(|(_, t)| Some(**t) != ce.ignore_index) {
            let row = &x[i * c..(i + 1) * c];
            let lse = row.iter().map(|v| v.exp()).sum::<f64>().ln();
            let even: f64 = (0..c).map(|k| w(k) * (lse - row[k])).sum();
            sum += (1.0 - e) * w(t as usize) * (lse - row[t as usize]) + e / c as f64 * even;
            weight += w(t as usize);
        }
        sum / weight
    }

    fn check(n: usize, classes: usize, label_smoothing: f32, weighted: bool, ignore_index: Option<i32>) {
        let ce = CrossEntropy { n, classes, label_smoothing, ignore_index };
        let x: Vec<f32> = data(1, n * classes).iter().map(|v| v * 5.0).collect();
        let labels: Vec<i32> = data(2, n)
            .iter()
            .enumerate()
            .map(|(i, v)| match ignore_index {
                Some(skip) if i % 3 == 1 => skip,
                _ => ((v * 0.5 + 0.5) * classes as f32) as i32,
            })
            .collect();
        let weights: Vec<f32> = data(3, classes).iter().map(|v| v + 1.5).collect();
        let w = weighted.then_some(&weights[..]);
        let mut runs = vec![];
        for cx in contexts() {
            let x = OwnedFloats::F32(x.clone());
            let [dx, loss, _] = run(&ce, &cx, &x, &labels, w, DType::F32);
            runs.push([dx.wide(), loss.wide()].concat());
            for (from, to) in FORMATS.into_iter().flat_map(|from| FORMATS.map(|to| (from, to))) {
                let x = OwnedFloats::new(from, &x.wide());
                let want = run(&ce, &cx, &OwnedFloats::F32(x.wide()), &labels, w, DType::F32);
                let got = run(&ce, &cx, &x, &labels, w, to);
                same_rounded(&format!("{n}x{classes} {from} to {to}"), &got, &want);
            }
        }
        same_bits("cross entropy", &runs[1..]);
        let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        let loss = naive(&ce, &x, &labels, w);
        for run in &runs[..2] {
            close("loss", &run[x.len()..], &[loss], 1e-5);
        }
        for i in (0..x.len()).step_by(1 + x.len() / 50) {
            let (mut up, mut down) = (x.clone(), x.clone());
            up[i] += 1e-4;
            down[i] -= 1e-4;
            let d = (naive(&ce, &up, &labels, w) - naive(&ce, &down, &labels, w)) / 2e-4;
            for run in &runs[..2] {
                close("dlogits", &run[i..=i], &[0.7 * d], 1e-5);
            }
        }
    }

    #[test]
    fn matches_pytorchs_definition_and_finite_differences() {
        for (n, c) in [(1, 1), (1, 2), (4, 7), (3, 8), (5, 9), (17, 33), (64, 256)] {
            check(n, c, 0.0, false, None);
            check(n, c, 0.1, true, None);
            check(n, c, 0.2, false, Some(-100));
            // A class may be the ignored label; with very few rows it could be the only one.
            if n > 3 {
                check(n, c, 0.0, true, Some(0));
            }
        }
    }

    #[test]
    fn a_wrong_label_is_said_before_anything_is_written() {
        let ce = CrossEntropy { n: 3, classes: 4, label_smoothing: 0.0, ignore_index: Some(-100) };
        for label in [4, -1, i32::MIN, i32::MAX] {
            let (mut lse, mut s) = ([9.0; 3], [9.0; 3]);
            let got =
                ce.forward(&Cx::serial(), Floats::F32(&[0.0; 12]), &[0, -100, label], None, &mut lse, &mut s);
            assert_eq!(got, Err(LabelError { position: 2, label, classes: 4 }));
            assert_eq!((lse, s), ([9.0; 3], [9.0; 3]));
        }
    }

    #[test]
    fn all_ignored_is_nan_with_zero_gradients() {
        let ce = CrossEntropy { n: 2, classes: 3, label_smoothing: 0.1, ignore_index: Some(7) };
        let (mut lse, mut s, mut dx) = ([0.0; 2], [0.0; 2], [1.0; 6]);
        let x = Floats::F32(&[0.5; 6]);
        let loss = ce.forward(&Cx::serial(), x, &[7, 7], None, &mut lse, &mut s).unwrap();
        assert!(loss.mean.is_nan() && loss.weight == 0.0);
        ce.backward(&Cx::serial(), 1.0, x, &[7, 7], None, &lse, FloatsMut::F32(&mut dx), &mut []);
        assert_eq!(dx, [0.0; 6]);
    }

    #[test]
    fn a_masked_logit_costs_nothing_and_gets_no_gradient() {
        let ce = CrossEntropy { n: 1, classes: 3, label_smoothing: 0.0, ignore_index: None };
        let (mut lse, mut s, mut dx) = ([0.0], [0.0], [9.0; 3]);
        let x = Floats::F32(&[1.0, f32::NEG_INFINITY, 1.0]);
        let loss = ce.forward(&Cx::serial(), x, &[0], None, &mut lse, &mut s).unwrap();
        close("loss", &[loss.mean], &[2f64.ln()], 1e-6);
        ce.backward(&Cx::serial(), 1.0, x, &[0], None, &lse, FloatsMut::F32(&mut dx), &mut []);
        close("dx", &dx, &[-0.5, 0.0, 0.5], 1e-6);
    }
}
