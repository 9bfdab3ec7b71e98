//! Group norm of channels-last images `[n, pixels, c]`: the channels of a group share the mean and the variance that
//! a sample has over its pixels and those channels. One group is layer norm over a whole image; as many groups as
//! channels is instance norm.
//!
//! The passes over pixels are batch norm's, on each sample; in between, columns become groups and back. Images and their
//! gradients may be stored in half.

use super::columns::{self, Affine, slab_range, slab_rows};
use crate::cx::SharedMut;
use crate::{Cx, Floats, FloatsMut, SharedFloats};
use std::ops::Range;

/// Group norm: `y = (x - mean[n, g]) * rstd[n, g] * gamma[c] + beta[c]`.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    /// Samples.
    pub n: usize,
    /// Pixels of a sample, height times width.
    pub pixels: usize,
    /// Channels, a multiple of the groups.
    pub channels: usize,
    /// Groups of consecutive channels.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f32,
}

impl GroupNorm {
    fn slabs(&self) -> usize {
        self.pixels.div_ceil(slab_rows(self.channels))
    }

    /// How many floats of scratch either method needs; `halves`: whether x, y or their gradients are stored in half.
    pub fn scratch_len(&self, halves: bool, workers: usize) -> usize {
        self.sums_room() + columns::stage(halves, self.channels).len(workers)
    }

    /// Scratch for sums and factors of channels; buffers follow it.
    fn sums_room(&self) -> usize {
        self.n * (self.slabs() * 3 + 4) * self.channels
    }

    /// Writes y, and `mean[n, groups]` and `rstd[n, groups]` for the backward.
    pub fn forward(
        &self,
        cx: &Cx,
        x: Floats,
        gamma: &[f32],
        beta: &[f32],
        y: FloatsMut,
        mean: &mut [f32],
        rstd: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (pixels, c, slabs) = (self.pixels, self.channels, self.slabs());
        let halves = x.is_half() || y.is_half();
        self.check(cx, halves, [x.len(), y.len()], gamma, beta, mean, rstd, scratch);
        if x.is_empty() {
            return;
        }
        let stage = columns::stage(halves, c);
        let (scratch, buffers) = scratch.split_at_mut(self.sums_room());
        let buffers = SharedMut::new(buffers);
        let (parts, rest) = scratch.split_at_mut(self.n * slabs * 3 * c);
        let shared = SharedMut::new(parts);
        cx.par.run(self.n * slabs, &|task, worker| {
            let e = self.elements(task);
            // SAFETY: each slab has its own part, and each task runs once.
            let part = unsafe { shared.slice(task * 3 * c, 3 * c) };
            // SAFETY: workers have their own buffers.
            let [buffer] = unsafe { stage.buffers(buffers, worker) };
            let (mean, part) = part.split_at_mut(c);
            let (m2, first) = part.split_at_mut(c);
            columns::moments(cx.isa, x.part(e.start, e.len()), c, mean, m2, first, buffer);
        });
        let per_group = c / self.groups;
        let count = (pixels * per_group) as f64;
        for (s, parts) in parts.chunks_exact(slabs * 3 * c).enumerate() {
            let (mean_c, scale_c) = rest[s * 2 * c..(s + 1) * 2 * c].split_at_mut(c);
            for g in 0..self.groups {
                let channels = g * per_group..(g + 1) * per_group;
                let rows = |slab: usize| slab_range(slab, pixels, c).len() as f64;
                let mut mu = 0.0f64;
                for (slab, part) in parts.chunks_exact(3 * c).enumerate() {
                    mu += rows(slab) * part[channels.clone()].iter().map(|&m| f64::from(m)).sum::<f64>();
                }
                mu /= count;
                let mut m2 = 0.0f64;
                for (slab, part) in parts.chunks_exact(3 * c).enumerate() {
                    for j in channels.clone() {
                        let d = f64::from(part[j]) - mu;
                        m2 += f64::from(part[c + j]) + rows(slab) * d * d;
                    }
                }
                let r = 1.0 / (m2 / count + f64::from(self.eps)).sqrt();
                (mean[s * self.groups + g], rstd[s * self.groups + g]) = (mu as f32, r as f32);
                for j in channels {
                    mean_c[j] = mu as f32;
                    scale_c[j] = r as f32 * gamma[j];
                }
            }
        }
        let y = SharedFloats::new(y);
        cx.par.run(self.n * slabs, &|task, worker| {
            let e = self.elements(task);
            let s = task / slabs;
            let (mean, scale) = rest[s * 2 * c..(s + 1) * 2 * c].split_at(c);
            // SAFETY: slabs do not overlap, and each task runs once.
            let y = unsafe { y.part(e.start, e.len()) };
            // SAFETY: workers have their own buffers.
            let [buffer] = unsafe { stage.buffers(buffers, worker) };
            let x = x.part(e.start, e.len());
            columns::apply(cx.isa, x, c, Affine { mean, scale, beta }, false, y, None, buffer);
        });
    }

    /// The gradients, from the forward's x, mean and rstd.
    ///
    /// With `h = (x - mean) * rstd`, `k = dy * gamma` and `m` elements in a group of a sample:
    /// `dx = rstd * (k - Σk/m - h * Σ(k h)/m)`, `dgamma = Σ dy h`, `dbeta = Σ dy`.
    pub fn backward(
        &self,
        cx: &Cx,
        dy: Floats,
        x: Floats,
        gamma: &[f32],
        mean: &[f32],
        rstd: &[f32],
        dx: FloatsMut,
        dgamma: &mut [f32],
        dbeta: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (c, slabs) = (self.channels, self.slabs());
        assert_eq!(dy.len(), x.len(), "dy has the shape of x");
        let halves = dy.is_half() || x.is_half() || dx.is_half();
        self.check(cx, halves, [x.len(), dx.len()], gamma, dgamma, mean, rstd, scratch);
        assert_eq!(dbeta.len(), c, "dbeta is [channels]");
        dgamma.fill(0.0);
        dbeta.fill(0.0);
        if x.is_empty() {
            return;
        }
        let stage = columns::stage(halves, c);
        let (scratch, buffers) = scratch.split_at_mut(self.sums_room());
        let buffers = SharedMut::new(buffers);
        let per_group = c / self.groups;
        let (parts, rest) = scratch.split_at_mut(self.n * slabs * 2 * c);
        // For each sample: mean, scale, k1 and k2 of each channel.
        let known = &mut rest[..self.n * 4 * c];
        for (s, known) in known.chunks_exact_mut(4 * c).enumerate() {
            for j in 0..c {
                let at = s * self.groups + j / per_group;
                known[j] = mean[at];
                known[c + j] = rstd[at] * gamma[j];
            }
        }
        let shared = SharedMut::new(parts);
        cx.par.run(self.n * slabs, &|task, worker| {
            let e = self.elements(task);
            // SAFETY: each slab has its own part, and each task runs once.
            let (sum_dy, sum_dyx) = unsafe { shared.slice(task * 2 * c, 2 * c) }.split_at_mut(c);
            // SAFETY: workers have their own buffers.
            let [buffer] = unsafe { stage.buffers(buffers, worker) };
            let p = affine(&known[task / slabs * 4 * c..], c);
            let (dy, x) = (dy.part(e.start, e.len()), x.part(e.start, e.len()));
            columns::dot_sums(cx.isa, dy, x, c, p, false, sum_dy, sum_dyx, buffer);
        });
        // The first slab of each sample takes in the others; the sums of a sample are then those of its columns.
        let count = (self.pixels * per_group) as f64;
        for j in 0..c {
            let (mut sum_b, mut sum_g) = (0.0f64, 0.0f64);
            for s in 0..self.n {
                let (mut sum_dy, mut sum_dyx) = (0.0f64, 0.0f64);
                for slab in 0..slabs {
                    let at = (s * slabs + slab) * 2 * c + j;
                    sum_dy += f64::from(parts[at]);
                    sum_dyx += f64::from(parts[at + c]);
                }
                parts[s * slabs * 2 * c + j] = sum_dy as f32;
                parts[s * slabs * 2 * c + c + j] = sum_dyx as f32;
                sum_b += sum_dy;
                sum_g += sum_dyx * f64::from(rstd[s * self.groups + j / per_group]);
            }
            (dbeta[j], dgamma[j]) = (sum_b as f32, sum_g as f32);
        }
        for (s, known) in known.chunks_exact_mut(4 * c).enumerate() {
            let sums = &parts[s * slabs * 2 * c..][..2 * c];
            for g in 0..self.groups {
                let channels = g * per_group..(g + 1) * per_group;
                let (mut sum_k, mut sum_kx) = (0.0f64, 0.0f64);
                for j in channels.clone() {
                    sum_k += f64::from(gamma[j]) * f64::from(sums[j]);
                    sum_kx += f64::from(gamma[j]) * f64::from(sums[c + j]);
                }
                let r = f64::from(rstd[s * self.groups + g]);
                known[2 * c..3 * c][channels.clone()].fill((r * sum_k / count) as f32);
                known[3 * c..][channels].fill((r * r * r * sum_kx / count) as f32);
            }
        }
        let dx = SharedFloats::new(dx);
        cx.par.run(self.n * slabs, &|task, worker| {
            let e = self.elements(task);
            let known = &known[task / slabs * 4 * c..][..4 * c];
            let (k1, k2) = known[2 * c..].split_at(c);
            // SAFETY: slabs do not overlap, and each task runs once.
            let dx = unsafe { dx.part(e.start, e.len()) };
            // SAFETY: workers have their own buffers.
            let [buffer] = unsafe { stage.buffers(buffers, worker) };
            let (dy, x) = (dy.part(e.start, e.len()), x.part(e.start, e.len()));
            columns::input_grad(cx.isa, dy, x, c, affine(known, c), k1, k2, false, dx, buffer);
        });
    }

    /// The elements of a task's slab: tasks are numbered by sample, then slab.
    fn elements(&self, task: usize) -> Range<usize> {
        let (s, slab) = (task / self.slabs(), task % self.slabs());
        let r = slab_range(slab, self.pixels, self.channels);
        (s * self.pixels + r.start) * self.channels..(s * self.pixels + r.end) * self.channels
    }

    fn check(
        &self,
        cx: &Cx,
        halves: bool,
        image_lens: [usize; 2],
        gamma: &[f32],
        beta: &[f32],
        mean: &[f32],
        rstd: &[f32],
        scratch: &[f32],
    ) {
        assert!(
            self.groups > 0 && self.channels.is_multiple_of(self.groups),
            "{} channels do not make {} groups",
            self.channels,
            self.groups
        );
        for len in image_lens {
            assert_eq!(len, self.n * self.pixels * self.channels, "images are [n, pixels, channels]");
        }
        assert_eq!(gamma.len(), self.channels, "gamma is [channels]");
        assert_eq!(beta.len(), self.channels, "beta and dgamma are [channels]");
        assert_eq!(mean.len(), self.n * self.groups, "mean is [n, groups]");
        assert_eq!(rstd.len(), self.n * self.groups, "rstd is [n, groups]");
        assert!(scratch.len() >= self.scratch_len(halves, cx.par.workers()), "scratch is too short");
    }
}

/// The backward's view of a sample's columns; no ReLU is fused here, so nothing reads beta.
fn affine(known: &[f32], c: usize) -> Affine<'_> {
    Affine { mean: &known[..c], scale: &known[c..2 * c], beta: &known[..c] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};

    /// y, mean, rstd, dx, dgamma and dbeta; x, y and their gradients in a format.
    fn run(
        cx: &Cx,
        gn: &GroupNorm,
        [x, dy]: [&OwnedFloats; 2],
        gamma: &[f32],
        beta: &[f32],
    ) -> [OwnedFloats; 6] {
        let (len, x, dy) = (x.get().len(), x.get(), dy.get());
        let s = &mut vec![f32::NAN; gn.scratch_len(x.is_half(), cx.par.workers())];
        let [mut y, mut dx] = [(); 2].map(|()| OwnedFloats::unset(x.dtype(), len));
        let [mut mean, mut rstd] = [(); 2].map(|()| vec![0.0; gn.n * gn.groups]);
        let [mut dg, mut db] = [(); 2].map(|()| vec![f32::NAN; gn.channels]);
        gn.forward(cx, x, gamma, beta, y.get_mut(), &mut mean, &mut rstd, s);
        gn.backward(cx, dy, x, gamma, &mean, &rstd, dx.get_mut(), &mut dg, &mut db, s);
        [y, OwnedFloats::F32(mean), OwnedFloats::F32(rstd), dx, OwnedFloats::F32(dg), OwnedFloats::F32(db)]
    }

    fn check(n: usize, pixels: usize, c: usize, groups: usize) {
        let gn = GroupNorm { n, pixels, channels: c, groups, eps: 1e-5 };
        let len = n * pixels * c;
        let x: Vec<f32> = data(1, len).iter().map(|v| v * 2.0 + 3.0).collect();
        let (dy, gamma, beta) = (data(2, len), data(3, c), data(4, c));
        let mut runs = vec![];
        for cx in contexts() {
            let of_f32 = [&OwnedFloats::F32(x.clone()), &OwnedFloats::F32(dy.clone())];
            runs.push(run(&cx, &gn, of_f32, &gamma, &beta).map(|v| v.wide()).concat());
            for half in HALVES {
                let [x, dy] = [&x, &dy].map(|v| OwnedFloats::new(half, v));
                let wide = [&x, &dy].map(|v| OwnedFloats::F32(v.wide()));
                let want = run(&cx, &gn, [&wide[0], &wide[1]], &gamma, &beta);
                same_rounded(&format!("{gn:?}"), &run(&cx, &gn, [&x, &dy], &gamma, &beta), &want);
            }
        }
        same_bits("group norm", &runs);

        let per = c / groups;
        let f = |v: f32| f64::from(v);
        let (mut y, mut dx) = (vec![0.0; len], vec![0.0; len]);
        let (mut means, mut rstds, mut dg, mut db) = (vec![], vec![], vec![0.0; c], vec![0.0; c]);
        for s in 0..n {
            for g in 0..groups {
                let at: Vec<usize> = (0..pixels)
                    .flat_map(|p| (0..per).map(move |k| (s * pixels + p) * c + g * per + k))
                    .collect();
                let m = at.len() as f64;
                let mu = at.iter().map(|&i| f(x[i])).sum::<f64>() / m;
                let r = 1.0 / (at.iter().map(|&i| (f(x[i]) - mu).powi(2)).sum::<f64>() / m + 1e-5).sqrt();
                let hat = |i: usize| (f(x[i]) - mu) * r;
                let k = |i: usize| f(dy[i]) * f(gamma[i % c]);
                let sk = at.iter().map(|&i| k(i)).sum::<f64>() / m;
                let skh = at.iter().map(|&i| k(i) * hat(i)).sum::<f64>() / m;
                for &i in &at {
                    y[i] = hat(i) * f(gamma[i % c]) + f(beta[i % c]);
                    dx[i] = r * (k(i) - sk - hat(i) * skh);
                    dg[i % c] += f(dy[i]) * hat(i);
                    db[i % c] += f(dy[i]);
                }
                means.push(mu);
                rstds.push(r);
            }
        }
        let mut at = 0;
        for (name, want) in ["y", "mean", "rstd", "dx", "dg", "db"].iter().zip([y, means, rstds, dx, dg, db])
        {
            close(&format!("{n}x{pixels}x{c}/{groups} {name}"), &runs[0][at..at + want.len()], &want, 3e-5);
            at += want.len();
        }
    }

    #[test]
    fn matches_the_textbook() {
        for (n, pixels, c, groups) in
            [(0, 4, 4, 2), (2, 3, 4, 2), (1, 5, 6, 6), (3, 7, 9, 1), (2, 1500, 32, 4), (1, 9, 33, 11)]
        {
            check(n, pixels, c, groups);
        }
    }
}
