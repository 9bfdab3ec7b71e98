//! Batch norm in parts, for a batch that is spread over several ranks: sums of the rank's own rows, and what follows
//! from the sums of all rows. The all-reduce happens between the parts, outside this crate.
//!
//! Forward: [`BatchNorm::sums`] → added up → [`BatchNorm::forward_from_sums`].
//! Backward: [`BatchNorm::grad_sums`] → added up → [`BatchNorm::backward_from_sums`].
//!
//! Sums are `[n, a[c], b[c]]`. The first one is the number of rows, so ranks may have different numbers of them, or none.
//! The passes over rows are those of the plain norm: on one rank the results differ from it by the rounding of the
//! sums to f32 alone.
//!
//! The forward's sums are about a `shift` that all ranks share, in practice the running mean: with
//! `d = (mean - shift) / std`, the variance that comes out of them is off by some 1e-7 · (1 + d²) of itself. At `d = 10`
//! that is 1e-5, and a running mean is soon nearer than that.

use super::batch::{BatchNorm, RunningStats, grad_sums_of};
use super::columns::Affine;
use crate::cx::RunEpilogue;
use crate::{Cx, Floats, FloatsMut};

impl BatchNorm {
    /// How many sums there are: the count, and two per channel.
    pub fn sums_len(&self) -> usize {
        1 + 2 * self.channels
    }

    /// What this rank adds to the forward's sums: `[n, Σ (x - shift), Σ (x - shift)²]`.
    ///
    /// Moments are taken about the rows' own mean and then moved, so that nothing is lost before the sums are rounded.
    pub fn sums(&self, cx: &Cx, x: Floats, shift: &[f32], sums: &mut [f32], scratch: &mut [f32]) {
        let (rows, c) = (self.rows, self.channels);
        assert_eq!(x.len(), rows * c, "x is [rows, channels]");
        assert_eq!(shift.len(), c, "shift is [channels]");
        assert_eq!(sums.len(), self.sums_len(), "sums is [1 + 2 * channels]");
        let (scratch, buffers) = self.split(cx, x.is_half(), scratch);
        sums.fill(0.0);
        sums[0] = rows as f32;
        if rows == 0 || c == 0 {
            return;
        }
        let (parts, rest) = scratch.split_at_mut(self.slabs() * 3 * c);
        let (mean, var) = rest.split_at_mut(c);
        let var = &mut var[..c];
        self.moments(cx, x, parts, mean, var, buffers);
        let (first, second) = sums[1..].split_at_mut(c);
        for j in 0..c {
            let (n, d) = (rows as f64, f64::from(mean[j]) - f64::from(shift[j]));
            first[j] = (n * d) as f32;
            second[j] = (n * (f64::from(var[j]) + d * d)) as f32;
        }
    }

    /// As [`BatchNorm::forward`], with mean and variance from the sums of all ranks.
    ///
    /// `running` is updated with the unbiased variance of all rows, as PyTorch's `SyncBatchNorm` does. `shift`
    /// is that of the sums.
    pub fn forward_from_sums(
        &self,
        cx: &Cx,
        x: Floats,
        gamma: &[f32],
        beta: &[f32],
        shift: &[f32],
        sums: &[f32],
        y: FloatsMut,
        mean: &mut [f32],
        rstd: &mut [f32],
        running: Option<RunningStats>,
        epilogue: Option<&RunEpilogue>,
        scratch: &mut [f32],
    ) {
        let c = self.channels;
        assert_eq!(shift.len(), c, "shift is [channels]");
        assert_eq!(sums.len(), self.sums_len(), "sums is [1 + 2 * channels]");
        assert_eq!(mean.len(), c, "mean is [channels]");
        assert_eq!(rstd.len(), c, "rstd is [channels]");
        let (scratch, buffers) = self.split(cx, x.is_half() || y.is_half(), scratch);
        let n = count(sums);
        let (first, second) = sums[1..].split_at(c);
        for j in 0..c {
            let d = f64::from(first[j]) / n;
            mean[j] = (f64::from(shift[j]) + d) as f32;
            let var = f64::from(second[j]) / n - d * d;
            // Rounding may leave a little less than nothing; a NaN stays one.
            rstd[j] = if var < 0.0 { 0.0 } else { var as f32 };
        }
        self.settle(n, mean, rstd, running);
        self.normalise(cx, x, gamma, beta, mean, rstd, y, epilogue, &mut scratch[..c], buffers);
    }

    /// What this rank adds to the backward's sums, `[n, Σ g, Σ g h]` in the terms of [`BatchNorm::backward`], and its
    /// own share of the parameters' gradients: the same numbers.
    pub fn grad_sums(
        &self,
        cx: &Cx,
        dy: Floats,
        x: Floats,
        gamma: &[f32],
        beta: &[f32],
        mean: &[f32],
        rstd: &[f32],
        sums: &mut [f32],
        dgamma: &mut [f32],
        dbeta: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (rows, c) = (self.rows, self.channels);
        self.check_backward(dy, x, [gamma, beta, mean, rstd]);
        let (scratch, buffers) = self.split(cx, dy.is_half() || x.is_half(), scratch);
        assert_eq!(dgamma.len(), c, "dgamma is [channels]");
        assert_eq!(dbeta.len(), c, "dbeta is [channels]");
        assert_eq!(sums.len(), self.sums_len(), "sums is [1 + 2 * channels]");
        sums[0] = rows as f32;
        if c == 0 {
            return;
        }
        let (scale, rest) = scratch.split_at_mut(c);
        for j in 0..c {
            scale[j] = rstd[j] * gamma[j];
        }
        let parts = &mut rest[..self.slabs() * 2 * c];
        self.grad_parts(cx, dy, x, Affine { mean, scale, beta }, parts, buffers);
        for j in 0..c {
            let (sum_dy, sum_dyx) = grad_sums_of(parts, c, j);
            dbeta[j] = sum_dy as f32;
            dgamma[j] = (sum_dyx * f64::from(rstd[j])) as f32;
        }
        sums[1..1 + c].copy_from_slice(dbeta);
        sums[1 + c..].copy_from_slice(dgamma);
    }

    /// `dx = gamma rstd (g - Σ g / n - h Σ g h / n)`, with the sums of all ranks.
    pub fn backward_from_sums(
        &self,
        cx: &Cx,
        dy: Floats,
        x: Floats,
        gamma: &[f32],
        beta: &[f32],
        mean: &[f32],
        rstd: &[f32],
        sums: &[f32],
        dx: FloatsMut,
        scratch: &mut [f32],
    ) {
        let c = self.channels;
        self.check_backward(dy, x, [gamma, beta, mean, rstd]);
        let (scratch, buffers) = self.split(cx, dy.is_half() || x.is_half() || dx.is_half(), scratch);
        assert_eq!(dx.len(), x.len(), "dx is [rows, channels]");
        assert_eq!(sums.len(), self.sums_len(), "sums is [1 + 2 * channels]");
        if c == 0 {
            return;
        }
        let (scale, rest) = scratch.split_at_mut(c);
        let (k1, rest) = rest.split_at_mut(c);
        let k2 = &mut rest[..c];
        let n = count(sums);
        let (sum_g, sum_gh) = sums[1..].split_at(c);
        for j in 0..c {
            scale[j] = rstd[j] * gamma[j];
            let r = f64::from(rstd[j]);
            let factor = f64::from(gamma[j]) * r / n;
            k1[j] = (factor * f64::from(sum_g[j])) as f32;
            k2[j] = (factor * r * f64::from(sum_gh[j])) as f32;
        }
        self.input_grad(cx, dy, x, Affine { mean, scale, beta }, k1, k2, dx, buffers);
    }
}

/// The rows of all ranks; at least one, to avoid a division by zero.
fn count(sums: &[f32]) -> f64 {
    f64::from(sums[0]).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};
    use polyreme_dtype::DType;

    /// What a norm and its gradient give, in the order of [`NAMES`].
    type Results = [OwnedFloats; 8];
    const NAMES: [&str; 8] = ["y", "mean", "rstd", "running mean", "running var", "dx", "dgamma", "dbeta"];
    const RUNNING: (f32, f32) = (0.5, 2.0);

    /// The data of a whole batch.
    struct WholeBatch {
        c: usize,
        relu: bool,
        x: OwnedFloats,
        dy: OwnedFloats,
        gamma: Vec<f32>,
        beta: Vec<f32>,
    }

    impl WholeBatch {
        fn new(rows: usize, c: usize, relu: bool, offset: f32) -> WholeBatch {
            let x = OwnedFloats::F32(data(1, rows * c).iter().map(|v| v + offset).collect());
            let dy = OwnedFloats::F32(data(2, rows * c));
            WholeBatch { c, relu, x, dy, gamma: data(3, c), beta: data(4, c) }
        }
        fn len(&self) -> usize {
            self.x.get().len()
        }
        /// Rounded to a format.
        fn to(&self, dtype: DType) -> WholeBatch {
            let [x, dy] = [&self.x, &self.dy].map(|v| OwnedFloats::new(dtype, &v.wide()));
            WholeBatch { x, dy, gamma: self.gamma.clone(), beta: self.beta.clone(), ..*self }
        }
        fn unset(&self) -> [OwnedFloats; 2] {
            [(); 2].map(|()| OwnedFloats::unset(self.x.get().dtype(), self.len()))
        }
        fn scratch(&self, bn: &BatchNorm, cx: &Cx) -> Vec<f32> {
            room(bn.scratch_len(self.x.get().is_half(), cx.par.workers()))
        }
        fn norm(&self, rows: usize) -> BatchNorm {
            BatchNorm { rows, channels: self.c, eps: 1e-5, relu: self.relu }
        }
    }

    fn room(len: usize) -> Vec<f32> {
        vec![f32::NAN; len]
    }

    /// The plain norm of the whole batch.
    fn plain(cx: &Cx, b: &WholeBatch) -> Results {
        let c = b.c;
        let bn = b.norm(b.len() / c);
        let mut s = b.scratch(&bn, cx);
        let [mut y, mut dx] = b.unset();
        let [mut mean, mut rstd, mut dgamma, mut dbeta] = std::array::from_fn(|_| room(c));
        let (mut rm, mut rv) = (vec![RUNNING.0; c], vec![RUNNING.1; c]);
        let running = RunningStats { mean: &mut rm, var: &mut rv, momentum: 0.1 };
        let (m, r) = (&mut mean, &mut rstd);
        let (x, dy) = (b.x.get(), b.dy.get());
        bn.forward(cx, x, &b.gamma, &b.beta, y.get_mut(), m, r, Some(running), None, &mut s);
        let (dg, db) = (&mut dgamma, &mut dbeta);
        bn.backward(cx, dy, x, &b.gamma, &b.beta, &mean, &rstd, dx.get_mut(), dg, db, &mut s);
        let [mean, rstd, rm, rv, dgamma, dbeta] = [mean, rstd, rm, rv, dgamma, dbeta].map(OwnedFloats::F32);
        [y, mean, rstd, rm, rv, dx, dgamma, dbeta]
    }

    fn add(total: &mut [f32], part: &[f32]) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }

    /// The norm of the batch cut into shards of these rows, one rank after another; results as of one.
    fn synced(cx: &Cx, b: &WholeBatch, shards: &[usize]) -> Results {
        let c = b.c;
        let ranks: Vec<_> = shards
            .iter()
            .scan(0, |first, &rows| {
                let part = (*first * c, rows * c);
                *first += rows;
                Some((b.norm(rows), part))
            })
            .collect();
        let shift = vec![RUNNING.0; c];
        let (mut sums, mut part) = (vec![0.0; 1 + 2 * c], room(1 + 2 * c));
        let (x, dy) = (b.x.get(), b.dy.get());
        for &(ref bn, (first, len)) in &ranks {
            bn.sums(cx, x.part(first, len), &shift, &mut part, &mut b.scratch(bn, cx));
            add(&mut sums, &part);
        }
        let [mut y, mut dx] = b.unset();
        let mut stats: Option<[Vec<f32>; 4]> = None;
        for &(ref bn, (first, len)) in &ranks {
            let [mut mean, mut rstd] = [room(c), room(c)];
            let (mut rm, mut rv) = (vec![RUNNING.0; c], vec![RUNNING.1; c]);
            let running = Some(RunningStats { mean: &mut rm, var: &mut rv, momentum: 0.1 });
            let mut y = y.get_mut();
            let (x, y, m) = (x.part(first, len), y.part(first, len), &mut mean);
            let (g, be, s) = (&b.gamma, &b.beta, &mut b.scratch(bn, cx));
            bn.forward_from_sums(cx, x, g, be, &shift, &sums, y, m, &mut rstd, running, None, s);
            let now = [mean, rstd, rm, rv];
            assert!(stats.as_ref().is_none_or(|s| *s == now), "ranks have the same statistics");
            stats = Some(now);
        }
        let [mean, rstd, rm, rv] = stats.unwrap();
        let (mut sums, [mut dgamma, mut dbeta]) = (vec![0.0; 1 + 2 * c], [vec![0.0; c], vec![0.0; c]]);
        for &(ref bn, (first, len)) in &ranks {
            let (dy, x, s) = (dy.part(first, len), x.part(first, len), &mut b.scratch(bn, cx));
            let (mut dg, mut db) = (room(c), room(c));
            let (g, be) = (&b.gamma, &b.beta);
            bn.grad_sums(cx, dy, x, g, be, &mean, &rstd, &mut part, &mut dg, &mut db, s);
            add(&mut sums, &part);
            add(&mut dgamma, &dg);
            add(&mut dbeta, &db);
        }
        for &(ref bn, (first, len)) in &ranks {
            let (dy, x, s) = (dy.part(first, len), x.part(first, len), &mut b.scratch(bn, cx));
            let mut dx = dx.get_mut();
            let dx = dx.part(first, len);
            bn.backward_from_sums(cx, dy, x, &b.gamma, &b.beta, &mean, &rstd, &sums, dx, s);
        }
        let [mean, rstd, rm, rv, dgamma, dbeta] = [mean, rstd, rm, rv, dgamma, dbeta].map(OwnedFloats::F32);
        [y, mean, rstd, rm, rv, dx, dgamma, dbeta]
    }

    fn check(shards: &[usize], c: usize, relu: bool, offset: f32, tol: f64) {
        let b = WholeBatch::new(shards.iter().sum(), c, relu, offset);
        for (cx, half) in contexts().iter().flat_map(|cx| HALVES.map(|half| (cx, half))) {
            let b = b.to(half);
            let want = synced(cx, &b.to(DType::F32), shards);
            same_rounded(&format!("{shards:?} x {c}"), &synced(cx, &b, shards), &want);
        }
        let wide = |results: Results| results.map(|v| v.wide());
        let runs: Vec<_> = contexts().iter().map(|cx| wide(synced(cx, &b, shards))).collect();
        same_bits("synced", &runs.iter().map(|r| r.concat()).collect::<Vec<_>>());
        for ((name, got), want) in NAMES.iter().zip(&runs[0]).zip(wide(plain(&Cx::oracle(), &b))) {
            // Relative to the largest of its kind, or to the data's 1: sums may cancel, and their roundings do not.
            let size = want.iter().fold(1.0f32, |m, v| m.max(v.abs()));
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let off = f64::from((g - w).abs() / size);
                assert!(off <= tol, "{shards:?} x {c}: {name}[{i}] is {g} for {w}, off by {off:e} of {size}");
            }
        }
    }

    #[test]
    fn one_rank_is_the_plain_norm() {
        for (rows, c) in [(2, 1), (3, 3), (5, 7), (9, 8), (4, 9), (1029, 33), (2500, 16), (40, 1030)] {
            // A few rows may lie so near to each other that the shift is several deviations away.
            let tol = if rows < 16 { 1e-5 } else { 1e-6 };
            check(&[rows], c, false, 0.0, tol);
            check(&[rows], c, true, 0.0, tol);
        }
    }

    #[test]
    fn uneven_shards_are_the_whole_batch() {
        for shards in [&[1029, 500][..], &[64, 0, 900], &[1, 40, 7, 2000], &[1; 50]] {
            for c in [1, 3, 16, 33] {
                check(shards, c, false, 0.0, 1e-5);
                check(shards, c, true, 0.0, 1e-5);
            }
        }
        // Far from the running mean, one rounding of a sum of squares is 1e4 of that of the variance.
        check(&[700, 1300], 16, false, 60.0, 2e-3);
    }

    #[test]
    fn running_variance_is_unbiased_over_all_rows() {
        // PyTorch: BatchNorm1d(1) in training on [[1.], [2.], [4.], [9.]], momentum 0.1: 0.1 * 4 and 0.9 + 0.1 * 12.666667.
        let (x, one) = ([1.0f32, 2.0, 4.0, 9.0], [1.0f32]);
        let cx = Cx::serial();
        let mut sums = vec![0.0; 3];
        for shard in [&x[..1], &x[1..]] {
            let bn = BatchNorm { rows: shard.len(), channels: 1, eps: 1e-5, relu: false };
            let mut part = vec![0.0; 3];
            bn.sums(&cx, Floats::F32(shard), &[0.0], &mut part, &mut room(bn.scratch_len(false, 1)));
            add(&mut sums, &part);
        }
        assert_eq!(sums, [4.0, 16.0, 102.0]);
        let bn = BatchNorm { rows: 1, channels: 1, eps: 1e-5, relu: false };
        let (mut y, mut m, mut r, mut rm, mut rv) = ([0.0], [0.0], [0.0], [0.0], [1.0]);
        let running = Some(RunningStats { mean: &mut rm, var: &mut rv, momentum: 0.1 });
        let s = &mut room(bn.scratch_len(false, 1));
        let (x, of_y, zero) = (Floats::F32(&x[..1]), FloatsMut::F32(&mut y), &[0.0]);
        bn.forward_from_sums(&cx, x, &one, zero, zero, &sums, of_y, &mut m, &mut r, running, None, s);
        close("running mean", &rm, &[0.4], 1e-6);
        close("running var", &rv, &[2.166_666_7], 1e-6);
        close("y", &y, &[-0.973_328], 1e-5);
    }

    #[test]
    fn an_epilogue_sees_each_row_once() {
        let b = WholeBatch::new(1029, 5, true, 0.0);
        let (c, bn) = (b.c, b.norm(1029));
        for cx in contexts() {
            let s = &mut b.scratch(&bn, &cx);
            let (shift, mut sums) = (vec![0.0; c], room(1 + 2 * c));
            bn.sums(&cx, b.x.get(), &shift, &mut sums, s);
            let ep = |first: usize, piece: &mut [f32]| {
                for (k, v) in piece.iter_mut().enumerate() {
                    *v = *v * 2.0 + ((first + k) / c) as f32;
                }
            };
            let mut run = |epilogue: Option<&RunEpilogue>| {
                let (mut y, mut m, mut r) = (room(b.len()), room(c), room(c));
                let (g, be, m, r) = (&b.gamma, &b.beta, &mut m, &mut r);
                let (x, of_y) = (b.x.get(), FloatsMut::F32(&mut y));
                bn.forward_from_sums(&cx, x, g, be, &shift, &sums, of_y, m, r, None, epilogue, s);
                y
            };
            let (y, seen) = (run(None), run(Some(&ep)));
            for i in 0..y.len() {
                assert_eq!(seen[i], y[i] * 2.0 + (i / c) as f32, "epilogue {i}");
            }
        }
    }

    #[test]
    fn nothing_at_all_does_not_panic() {
        for (rows, c) in [(0, 0), (0, 3), (3, 0), (1, 5)] {
            let bn = BatchNorm { rows, channels: c, eps: 1e-5, relu: false };
            let (cx, x, p) = (Cx::serial(), vec![1.0; rows * c], vec![1.0; c]);
            let (s, mut sums) = (&mut room(bn.scratch_len(false, 1)), room(1 + 2 * c));
            let of_x = Floats::F32(&x);
            bn.sums(&cx, of_x, &p, &mut sums, s);
            assert!(sums[0] == rows as f32 && sums[1..].iter().all(|&v| v == 0.0), "{sums:?}");
            let (mut y, mut m, mut r) = (x.clone(), p.clone(), p.clone());
            let of_y = FloatsMut::F32(&mut y);
            bn.forward_from_sums(&cx, of_x, &p, &p, &p, &sums, of_y, &mut m, &mut r, None, None, s);
            let (mut dx, mut dg, mut db) = (x.clone(), p.clone(), p.clone());
            let (dy, of_dx) = (Floats::F32(&y), FloatsMut::F32(&mut dx));
            bn.grad_sums(&cx, dy, of_x, &p, &p, &m, &r, &mut sums, &mut dg, &mut db, s);
            bn.backward_from_sums(&cx, dy, of_x, &p, &p, &m, &r, &sums, of_dx, s);
            assert!(m.iter().chain(&y).all(|&v| v == 1.0), "a lone row is its own mean");
            assert!(dx.iter().all(|&v| v == 0.0));
        }
    }
}
