//! Scaled dot-product attention, fused, forward and backward.
//!
//! For each sequence and head, with rows q, k, v of `d` elements:
//!
//! ```text
//! s[i,j] = scale·q[i]·k[j] + mask[i,j]        j ≤ i only, if causal
//! lse[i] = ln Σ_j exp s[i,j]                  saved for backward
//! p[i,j] = exp(s[i,j] − lse[i])
//! o[i]   = Σ_j p[i,j]·v[j]
//!
//! delta[i] = dy[i]·o[i]
//! ds[i,j]  = p[i,j]·(dy[i]·v[j] − delta[i])
//! dq[i] = scale·Σ_j ds[i,j]·k[j]    dk[j] = scale·Σ_i ds[i,j]·q[i]    dv[j] = Σ_i p[i,j]·dy[i]
//! ```
//!
//! Scores exist for a block of queries at a time, in scratch; backward computes them again. A causal mask is aligned
//! at the top left, as PyTorch's `is_causal`. A row whose keys are all masked has `o = 0`, `lse = −∞`, and sends no
//! gradient. There is no dropout, and no sharing of keys between heads.
//!
//! q, k, v, o and their gradients may be stored in half, each in its own format; masks and `lse` are f32. The bits are
//! those of widening all of them, running in f32 and rounding the results, unless [`Attention::products`] asks for products
//! of bf16.

/// A function of [`rows::RowPasses`], with those of the instruction set.
macro_rules! by_isa {
    ($isa:expr, $($run:ident)::+) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            isa if isa.has_avx512() => $($run)::+::<Avx512>,
            #[cfg(target_arch = "x86_64")]
            isa if isa.has_avx2() => $($run)::+::<Avx2>,
            _ => $($run)::+::<scalar::Scalar>,
        }
    };
}

mod layout;
mod paired;
mod rows;
mod scalar;
mod stored;

#[cfg(test)]
mod paired_tests;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiled;

use std::ops::Range;

pub use layout::HeadLayout;
use layout::{Sizes, disjoint};
use stored::{HeadRows, HeadRowsMut};

use crate::cx::SharedMut;
use crate::floats::{Floats, FloatsMut, SharedFloats};
use crate::gemm::pairs::PairOrder;
use crate::gemm::pairs::blocks::PairBlocks;
#[cfg(target_arch = "x86_64")]
use crate::tile::{Avx2, Avx512};
use crate::{Cx, Isa};

/// Attention of `t_q` queries to `t_k` keys in each of `heads` heads of `batch` sequences. The gradients dq, dk, dv
/// have the layouts of q, k, v, and dy that of o.
#[derive(Clone, Debug)]
pub struct Attention {
    /// How many sequences.
    pub batch: usize,
    /// How many heads.
    pub heads: usize,
    /// Queries of a sequence.
    pub t_q: usize,
    /// Keys of a sequence.
    pub t_k: usize,
    /// Elements of one query, key, value, and output row.
    pub d: usize,
    /// The factor of the scores, mostly `1/√d`.
    pub scale: f32,
    /// Query `i` sees keys `0..=i` only.
    pub causal: bool,
    /// The layout of q.
    pub q: HeadLayout,
    /// The layout of k.
    pub k: HeadLayout,
    /// The layout of v.
    pub v: HeadLayout,
    /// The layout of o.
    pub o: HeadLayout,
    /// Multiplies in bf16, with sums in this order; `None` in f32.
    pub products: Option<PairOrder>,
}

/// Numbers that are added to the scores before the softmax; −∞ hides a key. Element (b, h, i, j) is
/// `data[b*batch + h*head + i*row + j]`; a stride of zero repeats.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// The numbers.
    pub data: &'a [f32],
    /// Elements from one sequence to the next.
    pub batch: usize,
    /// Elements from one head to the next.
    pub head: usize,
    /// Elements from one query to the next.
    pub row: usize,
}

/// Where backward writes; overwritten, not added to. Elements between the rows are left alone.
#[derive(Debug)]
pub enum Grads<'a> {
    /// dq, dk, dv in one buffer, at the offsets and strides of the layouts of q, k, v.
    Packed(FloatsMut<'a>),
    /// dk and dv in one buffer.
    PackedKv {
        /// The gradient of q.
        dq: FloatsMut<'a>,
        /// The gradients of k and v.
        dkv: FloatsMut<'a>,
    },
    /// A buffer for each.
    Separate {
        /// The gradient of q.
        dq: FloatsMut<'a>,
        /// The gradient of k.
        dk: FloatsMut<'a>,
        /// The gradient of v.
        dv: FloatsMut<'a>,
    },
}

impl Attention {
    /// Self-attention on a packed `[batch, t, 3, heads, d]` of q, k, v, with `o` a contiguous `[batch, t, heads, d]`
    /// and the scale `1/√d`. The same buffer is passed as q, k and v.
    pub fn packed(batch: usize, t: usize, heads: usize, d: usize, causal: bool) -> Attention {
        let [q, k, v] = [0, 1, 2].map(|part| HeadLayout::packed(part, 3, t, heads, d));
        Attention { q, k, v, ..Attention::separate(batch, t, t, heads, d, causal) }
    }

    /// Attention on contiguous `[batch, t_q, heads, d]` of q and o, and `[batch, t_k, heads, d]` of k and v, with the
    /// scale `1/√d`.
    pub fn separate(batch: usize, t_q: usize, t_k: usize, heads: usize, d: usize, causal: bool) -> Attention {
        let (q, k) = (HeadLayout::contiguous(t_q, heads, d), HeadLayout::contiguous(t_k, heads, d));
        let scale = 1.0 / (d.max(1) as f32).sqrt();
        Attention { batch, heads, t_q, t_k, d, scale, causal, q, k, v: k, o: q, products: None }
    }

    /// Whether the products of bf16 that it asks for are expected to be faster than f32 with these instructions. They never
    /// are without the order's own.
    pub fn pays(&self, isa: Isa) -> bool {
        let fast = self.products.is_some_and(|order| PairBlocks::new(isa, order).are_fast());
        fast && self.t_q.min(self.t_k) >= PAYS.0 && self.d >= PAYS.1
    }

    /// How many floats of lse `[batch, heads, t_q]` there are.
    pub fn lse_len(&self) -> usize {
        self.batch * self.heads * self.t_q
    }

    /// How many floats of scratch `forward` needs with this many workers.
    pub fn forward_scratch_len(&self, workers: usize) -> usize {
        self.forward_worker_len() * workers + SPARE
    }

    /// How many floats of scratch `backward` needs with this many workers.
    pub fn backward_scratch_len(&self, workers: usize) -> usize {
        self.backward_worker_len() * workers + SPARE
    }

    /// Computes `o` and `lse [batch, heads, t_q]`.
    pub fn forward(
        &self,
        cx: &Cx,
        q: Floats,
        k: Floats,
        v: Floats,
        mask: Option<Mask>,
        o: FloatsMut,
        lse: &mut [f32],
        scratch: &mut [f32],
    ) {
        self.check_inputs(q, k, v, mask, o.as_floats(), lse.len());
        assert!(disjoint(&[(self.o, self.sizes_q())]), "rows of o overlap: {:?}", self.o);
        assert!(
            scratch.len() >= self.forward_scratch_len(cx.par.workers()),
            "scratch of attention forward is short"
        );
        let per_worker = self.forward_worker_len();
        let scratch = SharedMut::new(crate::tile::aligned(scratch));
        let (o, lse) = (SharedFloats::new(o), SharedMut::new(lse));

        let chunk = self.query_chunk();
        let chunks = self.t_q.div_ceil(chunk);
        let units = self.batch * self.heads * chunks;
        let flops = 4 * chunk.min(self.t_q) * self.t_k * self.d;
        self.for_each_unit(cx, units, flops, &|unit, worker| {
            let head = self.head(unit / chunks, q, k, v, mask);
            let o = HeadRowsMut::new(o, self.o.at(head.b, head.h), self.o.time);
            let start = unit % chunks * chunk;
            let rows = start..(start + chunk).min(self.t_q);
            // SAFETY: a worker runs one task at a time, and this part is its own.
            let scratch = unsafe { scratch.slice(worker * per_worker, per_worker) };
            if let Some(order) = self.products {
                let with = (cx.isa, PairBlocks::new(cx.isa, order));
                let run = by_isa!(cx.isa, paired::forward);
                // SAFETY: the instruction set was detected; each unit has its own rows of o and lse.
                return unsafe { run(self, with, &head, rows, o, lse, scratch) };
            }
            #[cfg(target_arch = "x86_64")]
            if cx.isa.has_avx512() {
                // SAFETY: the instruction set was detected; `check_inputs` has proved the lengths; each unit has its
                // own rows of o and lse.
                return unsafe { tiled::forward::<Avx512>(self, cx.isa, &head, rows, o, lse, scratch) };
            } else if cx.isa.has_avx2() {
                // SAFETY: as above.
                return unsafe { tiled::forward::<Avx2>(self, cx.isa, &head, rows, o, lse, scratch) };
            }
            // SAFETY: as above.
            unsafe { scalar::forward(self, cx.isa, &head, rows, o, lse, scratch) }
        });
    }

    /// Computes the gradients from `dy` (laid out as `o`), the inputs, and the results of `forward`.
    pub fn backward(
        &self,
        cx: &Cx,
        dy: Floats,
        q: Floats,
        k: Floats,
        v: Floats,
        mask: Option<Mask>,
        o: Floats,
        lse: &[f32],
        grads: Grads,
        scratch: &mut [f32],
    ) {
        self.check_inputs(q, k, v, mask, o, lse.len());
        assert!(dy.len() >= self.o.span(self.sizes_q()), "dy is short");
        assert!(self.products.is_none() || !matches!(dy, Floats::F16(_)), "f16 is multiplied in f32");
        assert!(
            scratch.len() >= self.backward_scratch_len(cx.par.workers()),
            "scratch of attention backward is short"
        );
        let out = self.check_grads(grads);
        let per_worker = self.backward_worker_len();
        let scratch = SharedMut::new(crate::tile::aligned(scratch));

        let flops = 10 * self.t_q * self.t_k * self.d;
        self.for_each_unit(cx, self.batch * self.heads, flops, &|unit, worker| {
            let head = self.head(unit, q, k, v, mask);
            let saved = self.saved(&head, dy, o, lse);
            let out = self.grads(&head, &out);
            // SAFETY: a worker runs one task at a time, and this part is its own.
            let scratch = unsafe { scratch.slice(worker * per_worker, per_worker) };
            if let Some(order) = self.products {
                let with = (cx.isa, PairBlocks::new(cx.isa, order));
                let run = by_isa!(cx.isa, paired::backward);
                // SAFETY: the instruction set was detected; `check_grads` has proved that no two heads share an element of
                // the gradients.
                return unsafe { run(self, with, &head, &saved, &out, scratch) };
            }
            #[cfg(target_arch = "x86_64")]
            if cx.isa.has_avx512() {
                // SAFETY: the instruction set was detected; lengths are proved above; `check_grads` has proved that
                // no two heads share an element of the gradients.
                return unsafe { tiled::backward::<Avx512>(self, cx.isa, &head, &saved, &out, scratch) };
            } else if cx.isa.has_avx2() {
                // SAFETY: as above.
                return unsafe { tiled::backward::<Avx2>(self, cx.isa, &head, &saved, &out, scratch) };
            }
            // SAFETY: as above.
            unsafe { scalar::backward(self, cx.isa, &head, &saved, &out, scratch) }
        });
    }
}

/// The fewest queries and keys, and elements of a head, for which products of bf16 are faster than those of f32.
///
/// Measured on a Zen 4 core with `examples/attention_shapes`, as shares of the time that operands in bf16 take with products
/// in f32, forward and backward: 0.61 to 0.75 for heads of 64 and 128 and sequences of 197 to 4096, 0.78 and 0.81 for heads of
/// 32, 0.94 and 0.93 for 24, 1.10 and 1.17 for 16; with heads of 32 and 64, 0.76 to 0.84 and 0.83 to 0.98 for sequences of 64,
/// 0.77 to 0.86 and 0.90 to 0.99 for 32, 1.22 and 1.41 for 16. On AMX nothing has been measured.
const PAYS: (usize, usize) = (32, 24);

/// Extra floats of scratch, to begin on a cache line.
const SPARE: usize = 15;

/// One head of one sequence: its inputs.
struct HeadInputs<'a> {
    b: usize,
    h: usize,
    q: HeadRows<'a>,
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    mask: Option<Mask<'a>>,
}

impl<'a> HeadInputs<'a> {
    /// `n` elements of the mask's row for query `t`, from key `start` on.
    fn mask_row(&self, t: usize, start: usize, n: usize) -> Option<&'a [f32]> {
        // Without keys the data may end before the row begins.
        self.mask.filter(|_| n > 0).map(|m| {
            let at = self.b * m.batch + self.h * m.head + t * m.row + start;
            &m.data[at..at + n]
        })
    }
}

/// What backward reads for one head, beside the inputs.
struct Saved<'a> {
    dy: HeadRows<'a>,
    o: HeadRows<'a>,
    lse: &'a [f32],
}

/// What backward writes for one head.
struct HeadGrads<'a> {
    dq: HeadRowsMut<'a>,
    dk: HeadRowsMut<'a>,
    dv: HeadRowsMut<'a>,
}

/// The buffers of dq, dk, dv: three, or one three times.
struct Out<'a> {
    dq: SharedFloats<'a>,
    dk: SharedFloats<'a>,
    dv: SharedFloats<'a>,
}

impl Attention {
    fn sizes_q(&self) -> Sizes {
        Sizes { batch: self.batch, time: self.t_q, heads: self.heads, d: self.d }
    }

    fn sizes_k(&self) -> Sizes {
        Sizes { time: self.t_k, ..self.sizes_q() }
    }

    /// How many keys query `t` sees.
    fn keys(&self, t: usize) -> usize {
        if self.causal { self.t_k.min(t + 1) } else { self.t_k }
    }

    /// Queries of one task: all, unless heads are too few to keep 16 workers busy. Each task packs the keys again,
    /// which costs about a twentieth of what 96 queries cost.
    fn query_chunk(&self) -> usize {
        let tasks = 32usize.div_ceil((self.batch * self.heads).max(1));
        self.t_q.div_ceil(tasks).next_multiple_of(48).max(96)
    }

    /// Runs `f(unit, worker)` on all units, several to a task where they are small.
    fn for_each_unit(&self, cx: &Cx, units: usize, flops: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        // About 20 µs of work.
        let group = (1_000_000 / flops.max(1)).clamp(1, units.max(1));
        cx.par.run(units.div_ceil(group), &|task, worker| {
            for unit in task * group..((task + 1) * group).min(units) {
                f(unit, worker);
            }
        });
    }

    fn forward_worker_len(&self) -> usize {
        if self.products.is_some() {
            return crate::tile::round_cols(paired::forward_len(self));
        }
        let len = scalar::forward_len(self);
        #[cfg(target_arch = "x86_64")]
        let len = len.max(tiled::forward_len(self));
        crate::tile::round_cols(len)
    }

    fn backward_worker_len(&self) -> usize {
        if self.products.is_some() {
            return crate::tile::round_cols(paired::backward_len(self));
        }
        let len = scalar::backward_len(self);
        #[cfg(target_arch = "x86_64")]
        let len = len.max(tiled::backward_len(self));
        crate::tile::round_cols(len)
    }

    fn head<'a>(
        &self,
        unit: usize,
        q: Floats<'a>,
        k: Floats<'a>,
        v: Floats<'a>,
        mask: Option<Mask<'a>>,
    ) -> HeadInputs<'a> {
        let (b, h) = (unit / self.heads, unit % self.heads);
        let rows = |x: Floats<'a>, l: HeadLayout| HeadRows::new(x, l.at(b, h), l.time);
        HeadInputs { b, h, q: rows(q, self.q), k: rows(k, self.k), v: rows(v, self.v), mask }
    }

    fn saved<'a>(&self, head: &HeadInputs, dy: Floats<'a>, o: Floats<'a>, lse: &'a [f32]) -> Saved<'a> {
        let rows = |x: Floats<'a>| HeadRows::new(x, self.o.at(head.b, head.h), self.o.time);
        Saved { dy: rows(dy), o: rows(o), lse: &lse[self.lse_range(head, 0..self.t_q)] }
    }

    fn grads<'a>(&self, head: &HeadInputs, out: &Out<'a>) -> HeadGrads<'a> {
        let rows = |x: SharedFloats<'a>, l: HeadLayout| HeadRowsMut::new(x, l.at(head.b, head.h), l.time);
        HeadGrads { dq: rows(out.dq, self.q), dk: rows(out.dk, self.k), dv: rows(out.dv, self.v) }
    }

    fn lse_range(&self, head: &HeadInputs, rows: Range<usize>) -> Range<usize> {
        let at = (head.b * self.heads + head.h) * self.t_q;
        at + rows.start..at + rows.end
    }

    fn check_inputs(&self, q: Floats, k: Floats, v: Floats, mask: Option<Mask>, o: Floats, lse_len: usize) {
        assert!(self.d > 0, "a head has at least one element");
        let is_f16 = |x: &Floats| matches!(x, Floats::F16(_));
        assert!(
            self.products.is_none() || ![q, k, v].iter().any(is_f16),
            "f16 is multiplied in f32: leave `products` unset"
        );
        assert!(q.len() >= self.q.span(self.sizes_q()), "q is short: {}", q.len());
        assert!(k.len() >= self.k.span(self.sizes_k()), "k is short: {}", k.len());
        assert!(v.len() >= self.v.span(self.sizes_k()), "v is short: {}", v.len());
        assert!(o.len() >= self.o.span(self.sizes_q()), "o is short: {}", o.len());
        assert_eq!(lse_len, self.lse_len(), "lse is [batch, heads, t_q]");
        if let Some(m) = mask {
            let layout = HeadLayout { offset: 0, batch: m.batch, time: m.row, head: m.head };
            let span = layout.span(Sizes { d: self.t_k, ..self.sizes_q() });
            assert!(m.data.len() >= span, "the mask is short: {} of {span}", m.data.len());
        }
    }

    /// Checks lengths and that no two gradients share an element.
    fn check_grads<'a>(&self, grads: Grads<'a>) -> Out<'a> {
        let (q, k, v) = ((self.q, self.sizes_q()), (self.k, self.sizes_k()), (self.v, self.sizes_k()));
        let check = |buffer: &FloatsMut, parts: &[(HeadLayout, Sizes)], name: &str| {
            for (layout, sizes) in parts {
                assert!(buffer.len() >= layout.span(*sizes), "{name} is short: {}", buffer.len());
            }
            assert!(disjoint(parts), "{name} overlap: {parts:?}");
        };
        match grads {
            Grads::Packed(all) => {
                check(&all, &[q, k, v], "packed gradients");
                let all = SharedFloats::new(all);
                Out { dq: all, dk: all, dv: all }
            }
            Grads::PackedKv { dq, dkv } => {
                check(&dq, &[q], "rows of dq");
                check(&dkv, &[k, v], "packed gradients of k and v");
                let dkv = SharedFloats::new(dkv);
                Out { dq: SharedFloats::new(dq), dk: dkv, dv: dkv }
            }
            Grads::Separate { dq, dk, dv } => {
                check(&dq, &[q], "rows of dq");
                check(&dk, &[k], "rows of dk");
                check(&dv, &[v], "rows of dv");
                Out { dq: SharedFloats::new(dq), dk: SharedFloats::new(dk), dv: SharedFloats::new(dv) }
            }
        }
    }
}
