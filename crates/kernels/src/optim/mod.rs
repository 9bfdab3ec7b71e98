//! Optimizer steps as one fused pass over ranges of flat arenas: parameters `p`, gradients `g`, and up to two states.
//!
//! Formulas are PyTorch's (LAMB: the paper's, with bias correction). Nothing here knows which layer a parameter belongs
//! to: a caller that wants no weight decay on some range steps that range separately with `decay_scale: 0.0`, and only
//! LAMB and Adafactor look at where tensors begin and end. Clipping is a `grad_scale` that is multiplied on read, so it
//! costs no extra pass beyond [`sum_of_squares`].

mod adafactor;
mod half;
mod split;

pub use adafactor::Adafactor;
pub use half::Rounding;
pub use split::{PartSums, SplitTensor, SumsOf};

use crate::cx::SharedMut;
use crate::lanes::twin;
use crate::{Cx, Isa};
use std::ops::Range;

/// How parameters are updated: the settings that are fixed for a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Optimizer {
    /// `g += weight_decay·p; m = momentum·m + g` (`m = g` at step 1)`; p -= lr·m`, or with `nesterov`
    /// `p -= lr·(g + momentum·m)`. State: m, if there is momentum. Dampening is 0.
    Sgd {
        /// How much of the last direction is kept; 0 for none.
        momentum: f32,
        /// Whether to look ahead along the new direction.
        nesterov: bool,
        /// Added to the gradient, times p.
        weight_decay: f32,
    },
    /// `g += weight_decay·p`, then the moments' step. State: the mean of g, the mean of g².
    Adam(Moments),
    /// `p *= 1 - lr·weight_decay`, then the moments' step. State as Adam's.
    AdamW(Moments),
    /// `u = m̂/(√v̂ + eps) + weight_decay·p; p -= lr · ‖p‖/‖u‖ · u` with the norms of each tensor; the ratio is 1 if
    /// either norm is 0. State as Adam's.
    Lamb(Moments),
    /// Lion (Chen et al., 2023): `p *= 1 - lr·weight_decay; p -= lr·sign(beta1·m + (1-beta1)·g); m = beta2·m + (1-beta2)·g`.
    /// State: m.
    Lion {
        /// The share of m in the direction of a step. In f64, as those of [`Moments`].
        beta1: f64,
        /// How slowly m moves.
        beta2: f64,
        /// Decoupled from the gradient, as in AdamW.
        weight_decay: f32,
    },
    /// Steps by the root mean square of gradients, which a matrix keeps as means of its rows and columns. State: those of rows, or
    /// of each element of a vector; those of columns.
    Adafactor(Adafactor),
}

/// A tensor among the parameters, for optimizers that look at more than one element at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParamTensor {
    /// Its elements among the parameters.
    pub range: Range<usize>,
    /// Its last two dims; `None` for a vector or a single number.
    pub matrix: Option<[usize; 2]>,
    /// Its range in each of the two states, with the size that [`Optimizer::state_dims`] says.
    pub states: [Range<usize>; 2],
}

/// What Adam, AdamW and LAMB share:
/// `m += (1-beta1)·(g-m); v = beta2·v + (1-beta2)·g²; p -= lr · m̂ / (√v̂ + eps)`, with `m̂ = m/(1-beta1^step)` and
/// `v̂ = v/(1-beta2^step)`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Moments {
    /// How slowly the mean of g moves. In f64, as `1 - beta` would enlarge the rounding of an f32.
    pub beta1: f64,
    /// How slowly the mean of g² moves.
    pub beta2: f64,
    /// Added outside the root.
    pub eps: f32,
    /// How it is applied depends on the optimizer.
    pub weight_decay: f32,
}

impl Moments {
    /// PyTorch's defaults for Adam: 0.9, 0.999, 1e-8 and no decay.
    pub const DEFAULT: Moments = Moments { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
}

/// What changes from step to step, or from range to range.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepHyper {
    /// The learning rate now.
    pub lr: f32,
    /// The number of this step; the first is 1.
    pub step: u64,
    /// Every gradient is multiplied by this first: clipping ([`clip_scale`]), or one over a count.
    pub grad_scale: f32,
    /// The weight decay is multiplied by this: 0 for ranges without decay, else 1.
    pub decay_scale: f32,
}

impl StepHyper {
    /// What a parameter is multiplied by for a weight decay that is separate from the gradient.
    fn keep(&self, weight_decay: f32) -> f32 {
        (1.0 - f64::from(self.lr) * f64::from(weight_decay * self.decay_scale)) as f32
    }
}

/// Elements of a task: 64 KiB of each array.
const CHUNK: usize = 16 * 1024;

/// How many sums are kept on the stack at a time.
const WAVE: usize = 64;

impl Optimizer {
    /// How many states there are: 0, 1 or 2.
    pub fn n_states(&self) -> usize {
        match self {
            Optimizer::Sgd { momentum, .. } => usize::from(*momentum != 0.0),
            Optimizer::Lion { .. } => 1,
            Optimizer::Adam(_) | Optimizer::AdamW(_) | Optimizer::Lamb(_) | Optimizer::Adafactor(_) => 2,
        }
    }

    /// The same rule with another weight decay.
    pub fn with_weight_decay(self, weight_decay: f32) -> Optimizer {
        match self {
            Optimizer::Sgd { momentum, nesterov, .. } => Optimizer::Sgd { momentum, nesterov, weight_decay },
            Optimizer::Adam(m) => Optimizer::Adam(Moments { weight_decay, ..m }),
            Optimizer::AdamW(m) => Optimizer::AdamW(Moments { weight_decay, ..m }),
            Optimizer::Lamb(m) => Optimizer::Lamb(Moments { weight_decay, ..m }),
            Optimizer::Lion { beta1, beta2, .. } => Optimizer::Lion { beta1, beta2, weight_decay },
            Optimizer::Adafactor(a) => Optimizer::Adafactor(Adafactor { weight_decay, ..a }),
        }
    }

    /// The dims of what each state keeps of a tensor of these dims; `None` if that is nothing. An optimizer that goes by
    /// element keeps a number for each.
    pub fn state_dims(&self, dims: &[usize]) -> [Option<Vec<usize>>; 2] {
        match self {
            Optimizer::Adafactor(_) => Adafactor::state_dims(dims),
            Optimizer::Sgd { .. }
            | Optimizer::Lion { .. }
            | Optimizer::Adam(_)
            | Optimizer::AdamW(_)
            | Optimizer::Lamb(_) => [0, 1].map(|k| (self.n_states() > k).then(|| dims.to_vec())),
        }
    }

    /// Whether an element's step depends on nothing but its own gradient and state. If not, gradients and states of whole
    /// tensors are needed.
    pub fn by_element(&self) -> bool {
        match self {
            Optimizer::Sgd { .. } | Optimizer::Adam(_) | Optimizer::AdamW(_) | Optimizer::Lion { .. } => true,
            Optimizer::Lamb(_) | Optimizer::Adafactor(_) => false,
        }
    }

    /// One update of the range that the slices cover. States start as zeros.
    ///
    /// An optimizer that goes [by element](Self::by_element) updates all of `p`; of the states, those that there are
    /// ([`n_states`](Self::n_states)) are as long, others empty. The others update `tensors`, and nothing outside them;
    /// the tensors say where their states are.
    pub fn step(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        p: &mut [f32],
        g: &[f32],
        state1: &mut [f32],
        state2: &mut [f32],
        tensors: &[ParamTensor],
    ) {
        assert_eq!(g.len(), p.len(), "a gradient for each parameter");
        assert!(hyper.step >= 1, "steps are counted from 1");
        if let Some(pass) = self.pass(hyper) {
            let states = self.n_states();
            assert_eq!(state1.len(), if states >= 1 { p.len() } else { 0 }, "the first state's length");
            assert_eq!(state2.len(), if states >= 2 { p.len() } else { 0 }, "the second state's length");
            each_chunk(cx, p, state1, state2, |at, p, m, v| pass.run(cx.isa, p, &g[at], m, v));
            return;
        }
        for t in tensors {
            let (p, g) = (&mut p[t.range.clone()], &g[t.range.clone()]);
            let (s1, s2) = (&mut state1[t.states[0].clone()], &mut state2[t.states[1].clone()]);
            match *self {
                Optimizer::Lamb(m) => lamb_tensor(cx, m, hyper, p, g, s1, s2),
                Optimizer::Adafactor(a) => a.step(cx, hyper, t, p, g, s1, s2),
                Optimizer::Sgd { .. } | Optimizer::Adam(_) | Optimizer::AdamW(_) | Optimizer::Lion { .. } => {
                    unreachable!("these update element by element")
                }
            }
        }
    }

    /// The step element by element, for callers that have gradients block by block; `None` if not
    /// [by element](Self::by_element).
    pub fn pass(&self, hyper: StepHyper) -> Option<Pass> {
        let kind = match *self {
            Optimizer::Sgd { momentum, nesterov, weight_decay } => PassKind::Sgd(Sgd {
                lr: hyper.lr,
                momentum,
                nesterov,
                decay: weight_decay * hyper.decay_scale,
                scale: hyper.grad_scale,
                first: hyper.step == 1,
            }),
            Optimizer::Adam(m) => {
                PassKind::Adam(Adam { l2: m.weight_decay * hyper.decay_scale, ..Adam::new(m, hyper) })
            }
            Optimizer::AdamW(m) => {
                PassKind::Adam(Adam { keep: hyper.keep(m.weight_decay), ..Adam::new(m, hyper) })
            }
            Optimizer::Lion { beta1, beta2, weight_decay } => PassKind::Lion(Lion {
                lr: hyper.lr,
                beta1: beta1 as f32,
                take1: (1.0 - beta1) as f32,
                beta2: beta2 as f32,
                take2: (1.0 - beta2) as f32,
                scale: hyper.grad_scale,
                keep: hyper.keep(weight_decay),
            }),
            Optimizer::Lamb(_) | Optimizer::Adafactor(_) => return None,
        };
        Some(Pass(kind))
    }
}

/// One step's update, an element at a time: [`Optimizer::pass`].
#[derive(Clone, Copy)]
pub struct Pass(PassKind);

#[derive(Clone, Copy)]
enum PassKind {
    Sgd(Sgd),
    Adam(Adam),
    Lion(Lion),
}

impl Pass {
    /// Updates these elements; states as for [`Optimizer::step`].
    pub fn run(&self, isa: Isa, p: &mut [f32], g: &[f32], state1: &mut [f32], state2: &mut [f32]) {
        match self.0 {
            PassKind::Sgd(k) if k.momentum == 0.0 => sgd_plain(isa, k, p, g),
            PassKind::Sgd(k) => sgd_momentum(isa, k, p, g, state1),
            PassKind::Adam(k) => adam(isa, k, p, g, state1, state2),
            PassKind::Lion(k) => lion(isa, k, p, g, state1),
        }
    }
}

/// The sum of the squares, in f64, over fixed chunks in their order. The sums of ranges that begin at multiples of
/// 16384 add up to that of the whole but for rounding.
pub fn sum_of_squares(cx: &Cx, g: &[f32]) -> f64 {
    let [sum] = chunk_sums(cx, g.len(), |r| [squares(cx.isa, &g[r])]);
    sum
}

/// The norm of all gradients as one vector.
pub fn global_norm(cx: &Cx, g: &[f32]) -> f64 {
    sum_of_squares(cx, g).sqrt()
}

/// The `grad_scale` that clips gradients of this norm, as PyTorch's `clip_grad_norm_`:
/// `max_norm / (norm + 1e-6)`, at most 1. A norm of NaN gives NaN: the step shows that something went wrong.
pub fn clip_scale(norm: f64, max_norm: f64) -> f32 {
    let scale = max_norm / (norm + 1e-6);
    if scale > 1.0 { 1.0 } else { scale as f32 }
}

/// Multiplies gradients in place, for callers that cannot pass a `grad_scale`.
pub fn scale(cx: &Cx, g: &mut [f32], by: f32) {
    cx.for_each_chunk(g, CHUNK, |_, g| scale_chunk(cx.isa, g, by));
}

/// Runs `f(range, p, state1, state2)` on fixed chunks; an absent state is an empty slice.
fn each_chunk<S: Send>(
    cx: &Cx,
    p: &mut [f32],
    state1: &mut [S],
    state2: &mut [S],
    f: impl Fn(Range<usize>, &mut [f32], &mut [S], &mut [S]) + Sync,
) {
    let n = p.len();
    let (p, s1, s2) = (SharedMut::new(p), SharedMut::new(state1), SharedMut::new(state2));
    let part = |s: &SharedMut<'_, S>, r: &Range<usize>| -> Range<usize> {
        if s.is_empty() { 0..0 } else { r.clone() }
    };
    cx.par.run(n.div_ceil(CHUNK), &|task, _| {
        let r = task * CHUNK..((task + 1) * CHUNK).min(n);
        let (r1, r2) = (part(&s1, &r), part(&s2, &r));
        // SAFETY: chunks do not overlap, and each task runs once.
        let (p, s1, s2) = unsafe {
            (p.slice(r.start, r.len()), s1.slice(r1.start, r1.len()), s2.slice(r2.start, r2.len()))
        };
        f(r, p, s1, s2);
    });
}

/// Adds up `f(chunk)` over the fixed chunks of `0..n` in their order.
fn chunk_sums<const K: usize>(cx: &Cx, n: usize, f: impl Fn(Range<usize>) -> [f64; K] + Sync) -> [f64; K] {
    chunk_sums_of(cx, n, CHUNK, f)
}

/// The same over chunks of another length, a wave of chunks at a time.
fn chunk_sums_of<const K: usize>(
    cx: &Cx,
    n: usize,
    chunk: usize,
    f: impl Fn(Range<usize>) -> [f64; K] + Sync,
) -> [f64; K] {
    let chunks = n.div_ceil(chunk);
    let mut total = [0.0; K];
    for first in (0..chunks).step_by(WAVE) {
        let mut sums = [[0.0; K]; WAVE];
        let wave = WAVE.min(chunks - first);
        cx.for_each_chunk(&mut sums[..wave], 1, |i, sum| {
            let start = (first + i) * chunk;
            sum[0] = f(start..(start + chunk).min(n));
        });
        for sum in &sums[..wave] {
            for k in 0..K {
                total[k] += sum[k];
            }
        }
    }
    total
}

/// The numbers of an SGD pass.
#[derive(Clone, Copy)]
struct Sgd {
    lr: f32,
    momentum: f32,
    nesterov: bool,
    decay: f32,
    scale: f32,
    first: bool,
}

/// The numbers of a pass with moments; bias corrections are taken in f64 and folded in.
#[derive(Clone, Copy)]
struct Adam {
    take1: f32,
    beta2: f32,
    take2: f32,
    eps: f32,
    /// `lr / (1 - beta1^step)`.
    step_size: f32,
    /// `1 / sqrt(1 - beta2^step)`.
    inv_root: f32,
    scale: f32,
    /// What is added to the gradient, times p.
    l2: f32,
    /// What p is multiplied by before the step.
    keep: f32,
}

impl Adam {
    fn new(m: Moments, h: StepHyper) -> Adam {
        let t = i32::try_from(h.step).unwrap_or(i32::MAX);
        let (bias1, bias2) = (1.0 - m.beta1.powi(t), 1.0 - m.beta2.powi(t));
        Adam {
            take1: (1.0 - m.beta1) as f32,
            beta2: m.beta2 as f32,
            take2: (1.0 - m.beta2) as f32,
            eps: m.eps,
            step_size: (f64::from(h.lr) / bias1) as f32,
            inv_root: (1.0 / bias2.sqrt()) as f32,
            scale: h.grad_scale,
            l2: 0.0,
            keep: 1.0,
        }
    }

    /// The new moments of one element.
    #[inline(always)]
    fn moments(&self, p: f32, g: f32, m: f32, v: f32) -> (f32, f32) {
        let g = g * self.scale + self.l2 * p;
        (m + self.take1 * (g - m), self.beta2 * v + self.take2 * (g * g))
    }

    /// `m / (√v̂ + eps)`: m's bias correction is in the step size.
    #[inline(always)]
    fn direction(&self, m: f32, v: f32) -> f32 {
        m / (v.sqrt() * self.inv_root + self.eps)
    }
}

/// The numbers of a Lion pass.
#[derive(Clone, Copy)]
struct Lion {
    lr: f32,
    beta1: f32,
    take1: f32,
    beta2: f32,
    take2: f32,
    scale: f32,
    /// What p is multiplied by before the step.
    keep: f32,
}

/// One tensor's LAMB step: the moments and both norms, then the update with the trust ratio.
fn lamb_tensor(
    cx: &Cx,
    moments: Moments,
    hyper: StepHyper,
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    let norms = lamb_norms(cx, moments, hyper, p, g, m, v);
    lamb_update(cx, moments, hyper, norms, p, m, v);
}

/// Moves the moments; returns the squares of the parameters and of their step, each added up.
fn lamb_norms(
    cx: &Cx,
    moments: Moments,
    hyper: StepHyper,
    p: &[f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) -> [f64; 2] {
    let (k, decay) = lamb_numbers(moments, hyper);
    let (ms, vs) = (SharedMut::new(m), SharedMut::new(v));
    chunk_sums(cx, p.len(), |r| {
        // SAFETY: chunks do not overlap, and each is visited once.
        let (m, v) = unsafe { (ms.slice(r.start, r.len()), vs.slice(r.start, r.len())) };
        lamb_moments(cx.isa, k, decay, &p[r.clone()], &g[r], m, v)
    })
}

/// The update itself, when the moments have moved and the norms of the tensor are known.
fn lamb_update(
    cx: &Cx,
    moments: Moments,
    hyper: StepHyper,
    [p2, u2]: [f64; 2],
    p: &mut [f32],
    m: &[f32],
    v: &[f32],
) {
    let (k, decay) = lamb_numbers(moments, hyper);
    let ratio = if p2 > 0.0 && u2 > 0.0 { (p2 / u2).sqrt() } else { 1.0 };
    let rate = (f64::from(hyper.lr) * ratio) as f32;
    cx.for_each_chunk(p, CHUNK, |task, p| {
        let r = task * CHUNK..task * CHUNK + p.len();
        lamb_apply(cx.isa, k, rate, decay, p, &m[r.clone()], &v[r]);
    });
}

/// The numbers of a LAMB pass and the decay: made with a learning rate of 1, so that `u = step_size · direction + decay · p`.
fn lamb_numbers(moments: Moments, hyper: StepHyper) -> (Adam, f32) {
    let k = Adam::new(moments, StepHyper { lr: 1.0, ..hyper });
    (k, moments.weight_decay * hyper.decay_scale)
}

twin! { fn sgd_plain(k: Sgd, p: &mut [f32], g: &[f32]) = sgd_plain_body }
twin! { fn sgd_momentum(k: Sgd, p: &mut [f32], g: &[f32], m: &mut [f32]) = sgd_momentum_body }
twin! { fn adam(k: Adam, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) = adam_body }
twin! { fn lion(k: Lion, p: &mut [f32], g: &[f32], m: &mut [f32]) = lion_body }
twin! {
    fn lamb_moments(k: Adam, decay: f32, p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32]) -> [f64; 2]
        = lamb_moments_body
}
twin! { fn lamb_apply(k: Adam, rate: f32, decay: f32, p: &mut [f32], m: &[f32], v: &[f32]) = lamb_apply_body }
twin! { fn squares(g: &[f32]) -> f64 = squares_body }
twin! { fn scale_chunk(g: &mut [f32], by: f32) = scale_chunk_body }

#[inline(always)]
fn sgd_plain_body(k: Sgd, p: &mut [f32], g: &[f32]) {
    for (p, &g) in p.iter_mut().zip(g) {
        *p -= k.lr * (g * k.scale + k.decay * *p);
    }
}

#[inline(always)]
fn sgd_momentum_body(k: Sgd, p: &mut [f32], g: &[f32], m: &mut [f32]) {
    // The first step ignores m, whatever it holds.
    if k.first {
        m.fill(0.0);
    }
    for ((p, &g), m) in p.iter_mut().zip(g).zip(m) {
        let g = g * k.scale + k.decay * *p;
        *m = k.momentum * *m + g;
        *p -= k.lr * if k.nesterov { g + k.momentum * *m } else { *m };
    }
}

#[inline(always)]
fn adam_body(k: Adam, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        (*m, *v) = k.moments(*p, g, *m, *v);
        *p = *p * k.keep - k.step_size * k.direction(*m, *v);
    }
}

#[inline(always)]
fn lion_body(k: Lion, p: &mut [f32], g: &[f32], m: &mut [f32]) {
    for ((p, &g), m) in p.iter_mut().zip(g).zip(m) {
        let g = g * k.scale;
        let mix = k.beta1 * *m + k.take1 * g;
        // Zero has no direction, and a NaN stays one: a step that went wrong shows.
        let sign = if mix == 0.0 || mix.is_nan() { mix } else { 1.0f32.copysign(mix) };
        *p = *p * k.keep - k.lr * sign;
        *m = k.beta2 * *m + k.take2 * g;
    }
}

/// Elements whose squares are summed side by side.
const SQUARES: usize = 16;

#[inline(always)]
fn lamb_moments_body(k: Adam, decay: f32, p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32]) -> [f64; 2] {
    let (mut p2, mut u2) = ([0.0f64; SQUARES], [0.0f64; SQUARES]);
    let ((p_chunks, p_rest), (g_chunks, g_rest)) = (p.as_chunks::<SQUARES>(), g.as_chunks::<SQUARES>());
    let ((m_chunks, m_rest), (v_chunks, v_rest)) =
        (m.as_chunks_mut::<SQUARES>(), v.as_chunks_mut::<SQUARES>());
    for ((p, g), (m, v)) in p_chunks.iter().zip(g_chunks).zip(m_chunks.iter_mut().zip(v_chunks)) {
        let mut u = [0.0f32; SQUARES];
        for l in 0..SQUARES {
            (m[l], v[l]) = k.moments(p[l], g[l], m[l], v[l]);
            u[l] = k.step_size * k.direction(m[l], v[l]) + decay * p[l];
        }
        for l in 0..SQUARES {
            p2[l] += f64::from(p[l]) * f64::from(p[l]);
            u2[l] += f64::from(u[l]) * f64::from(u[l]);
        }
    }
    for (l, ((&p, &g), (m, v))) in p_rest.iter().zip(g_rest).zip(m_rest.iter_mut().zip(v_rest)).enumerate() {
        (*m, *v) = k.moments(p, g, *m, *v);
        let u = k.step_size * k.direction(*m, *v) + decay * p;
        p2[l] += f64::from(p) * f64::from(p);
        u2[l] += f64::from(u) * f64::from(u);
    }
    [p2.iter().sum(), u2.iter().sum()]
}

#[inline(always)]
fn lamb_apply_body(k: Adam, rate: f32, decay: f32, p: &mut [f32], m: &[f32], v: &[f32]) {
    for ((p, &m), &v) in p.iter_mut().zip(m).zip(v) {
        *p -= rate * (k.step_size * k.direction(m, v) + decay * *p);
    }
}

/// In f64 throughout: squares of f32 are exact there, and large gradients do not overflow.
#[inline(always)]
fn squares_body(g: &[f32]) -> f64 {
    let mut acc = [0.0f64; SQUARES];
    let (chunks, rest) = g.as_chunks::<SQUARES>();
    for chunk in chunks {
        for l in 0..SQUARES {
            acc[l] += f64::from(chunk[l]) * f64::from(chunk[l]);
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        *a += f64::from(v) * f64::from(v);
    }
    acc.iter().sum()
}

#[inline(always)]
fn scale_chunk_body(g: &mut [f32], by: f32) {
    for g in g {
        *g *= by;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::testing::{close, contexts, data, same_bits};

    const MOMENTS: Moments = Moments { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };
    const ALL: [Optimizer; 10] = [
        Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 },
        Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.1 },
        Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 },
        Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 },
        Optimizer::Adam(MOMENTS),
        Optimizer::Adam(Moments::DEFAULT),
        Optimizer::AdamW(MOMENTS),
        Optimizer::Lamb(MOMENTS),
        Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 },
        Optimizer::Lion { beta1: 0.8, beta2: 0.95, weight_decay: 0.1 },
    ];

    /// PyTorch's documentation, line by line in f64, on one tensor.
    fn naive(o: Optimizer, h: StepHyper, p: &mut [f64], g: &[f64], s1: &mut [f64], s2: &mut [f64]) {
        let (lr, t, d) = (f64::from(h.lr), h.step as i32, f64::from(h.decay_scale));
        let mut us = vec![];
        for i in 0..p.len() {
            let mut g = g[i] * f64::from(h.grad_scale);
            match o {
                Optimizer::Sgd { momentum, nesterov, weight_decay } => {
                    g += f64::from(weight_decay) * d * p[i];
                    if momentum != 0.0 {
                        s1[i] = if t == 1 { g } else { f64::from(momentum) * s1[i] + g };
                        g = if nesterov { g + f64::from(momentum) * s1[i] } else { s1[i] };
                    }
                    p[i] -= lr * g;
                }
                Optimizer::Lion { beta1, beta2, weight_decay } => {
                    let mix = beta1 * s1[i] + (1.0 - beta1) * g;
                    p[i] -= lr * (mix.signum() + f64::from(weight_decay) * d * p[i]);
                    s1[i] = beta2 * s1[i] + (1.0 - beta2) * g;
                }
                Optimizer::Adafactor(_) => unreachable!("`adafactor` has its own tests"),
                Optimizer::Adam(m) | Optimizer::AdamW(m) | Optimizer::Lamb(m) => {
                    let decay = f64::from(m.weight_decay) * d;
                    match o {
                        Optimizer::Adam(_) => g += decay * p[i],
                        Optimizer::AdamW(_) => p[i] -= lr * decay * p[i],
                        _ => {}
                    }
                    s1[i] = m.beta1 * s1[i] + (1.0 - m.beta1) * g;
                    s2[i] = m.beta2 * s2[i] + (1.0 - m.beta2) * g * g;
                    let (mh, vh) = (s1[i] / (1.0 - m.beta1.powi(t)), s2[i] / (1.0 - m.beta2.powi(t)));
                    let u = mh / (vh.sqrt() + f64::from(m.eps));
                    match o {
                        Optimizer::Lamb(_) => us.push(u + decay * p[i]),
                        _ => p[i] -= lr * u,
                    }
                }
            }
        }
        let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let (np, nu) = (norm(p), norm(&us));
        let ratio = if np > 0.0 && nu > 0.0 { np / nu } else { 1.0 };
        us.iter().zip(p).for_each(|(u, p)| *p -= lr * ratio * u);
    }

    /// A tensor whose states are laid out as the parameters are.
    fn as_parameters(range: Range<usize>) -> ParamTensor {
        ParamTensor { states: [range.clone(), range.clone()], matrix: None, range }
    }

    fn check(o: Optimizer, tensors: &[Range<usize>]) {
        let n = tensors.last().map_or(0, |r| r.end);
        let (len1, len2) = match o.n_states() {
            0 => (0, 0),
            1 => (n, 0),
            _ => (n, n),
        };
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let hyper = |step| StepHyper { lr: 0.03, step, grad_scale: 0.5, decay_scale: 0.7 };
        let whole: Vec<ParamTensor> = tensors.iter().cloned().map(as_parameters).collect();
        let mut runs = vec![];
        for cx in contexts() {
            let (mut p, mut s1, mut s2) = (data(1, n), vec![0.0; len1], vec![0.0; len2]);
            for step in 1..=4 {
                o.step(&cx, hyper(step), &mut p, &data(step + 9, n), &mut s1, &mut s2, &whole);
            }
            runs.push([p, s1, s2].concat());
        }
        same_bits("optimizer", &runs);
        let (mut p, mut s1, mut s2) = (wide(&data(1, n)), vec![0.0; n], vec![0.0; n]);
        for step in 1..=4 {
            let g = wide(&data(step + 9, n));
            for r in tensors {
                let r = r.clone();
                let (s1, s2) = (&mut s1[r.clone()], &mut s2[r.clone()]);
                naive(o, hyper(step), &mut p[r.clone()], &g[r], s1, s2);
            }
        }
        let want = [p, s1[..len1].to_vec(), s2[..len2].to_vec()].concat();
        close(&format!("{o:?} {tensors:?}"), &runs[0], &want, 2e-5);
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init)] // A list of tensors may well have one.
    fn matches_pytorchs_documentation() {
        for o in ALL {
            check(o, &[]);
            for n in [1, 7, 8, 9, 33, CHUNK + 5, 3 * CHUNK] {
                check(o, &[0..n]);
            }
            check(o, &[0..3, 3..3, 3..20, 20..CHUNK + 100]);
        }
    }

    #[test]
    fn lamb_leaves_what_is_in_no_tensor_and_trusts_zeros_by_one() {
        let h = StepHyper { lr: 1.0, step: 1, grad_scale: 1.0, decay_scale: 1.0 };
        let (mut p, mut m, mut v) = ([0.0, 0.0, 5.0, 0.0], [0.0; 4], [0.0; 4]);
        let o = Optimizer::Lamb(Moments { eps: 0.0, ..MOMENTS });
        o.step(
            &Cx::serial(),
            h,
            &mut p,
            &[2.0, -3.0, 1.0, 1.0],
            &mut m,
            &mut v,
            &[0..2, 3..4].map(as_parameters),
        );
        close("p", &p, &[-1.0, 1.0, 5.0, -1.0], 1e-6);
    }

    #[test]
    fn lion_stays_where_nothing_pulls_and_shows_what_went_wrong() {
        let h = StepHyper { lr: 0.5, step: 1, grad_scale: 1.0, decay_scale: 1.0 };
        let o = Optimizer::Lion { beta1: 0.5, beta2: 0.5, weight_decay: 0.0 };
        for cx in contexts() {
            let (mut p, mut m) = ([1.0; 5], [0.0, -0.0, 2.0, 0.0, -1e-30]);
            o.step(&cx, h, &mut p, &[0.0, -0.0, -2.0, f32::NAN, 0.0], &mut m, &mut [], &[]);
            assert_eq!((p[0], p[1], p[2], p[4]), (1.0, 1.0, 1.0, 1.5));
            assert!(p[3].is_nan() && m[3].is_nan());
        }
    }

    #[test]
    fn norms_and_clipping() {
        for n in [0, 1, 17, CHUNK, CHUNK * WAVE + 3] {
            let g = data(7, n);
            let want: f64 = g.iter().map(|&v| f64::from(v).powi(2)).sum();
            let got = contexts().iter().map(|cx| sum_of_squares(cx, &g)).collect::<Vec<_>>();
            assert!(got.iter().all(|v| v.to_bits() == got[0].to_bits()), "the same bits on any workers");
            assert!((got[0] - want).abs() <= 1e-12 * (1.0 + want), "{n}: {} for {want}", got[0]);
        }
        assert_eq!(global_norm(&Cx::serial(), &[3e30, 4e30]) as f32, 5e30);
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert_eq!(clip_scale(4.0, 1.0), (1.0 / (4.0 + 1e-6)) as f32);
        assert!(clip_scale(f64::NAN, 1.0).is_nan());
        let mut g = data(7, CHUNK + 1);
        let want: Vec<f64> = g.iter().map(|&v| f64::from(v) * 0.5).collect();
        scale(&Cx::serial(), &mut g, 0.5);
        close("scaled", &g, &want, 0.0);
    }
}
