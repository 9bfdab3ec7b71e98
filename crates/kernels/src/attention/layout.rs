//! Where heads are in a buffer, and the proof that tasks write disjoint parts of it.

/// The index of element (b, t, h, i) of a tensor in its buffer: `offset + b*batch + t*time + h*head + i`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadLayout {
    /// Elements before the first one: where k begins in a packed buffer of q, k, v.
    pub offset: usize,
    /// Elements from one sequence of the batch to the next.
    pub batch: usize,
    /// Elements from one time step to the next.
    pub time: usize,
    /// Elements from one head to the next.
    pub head: usize,
}

/// The sizes that go with a [`HeadLayout`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sizes {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    pub d: usize,
}

impl HeadLayout {
    /// A contiguous `[batch, t, heads, d]`.
    pub fn contiguous(t: usize, heads: usize, d: usize) -> HeadLayout {
        HeadLayout { offset: 0, batch: t * heads * d, time: heads * d, head: d }
    }

    /// Part `part` of `parts` in a contiguous `[batch, t, parts, heads, d]`.
    pub fn packed(part: usize, parts: usize, t: usize, heads: usize, d: usize) -> HeadLayout {
        let row = parts * heads * d;
        HeadLayout { offset: part * heads * d, batch: t * row, time: row, head: d }
    }

    /// Where row (b, t = 0, h) begins.
    pub(super) fn at(&self, b: usize, h: usize) -> usize {
        self.offset + b * self.batch + h * self.head
    }

    /// How long a buffer must be; saturates, so that absurd strides cannot wrap around into a small answer.
    pub(super) fn span(&self, s: Sizes) -> usize {
        if s.batch == 0 || s.time == 0 || s.heads == 0 || s.d == 0 {
            return 0;
        }
        [(s.batch, self.batch), (s.time, self.time), (s.heads, self.head)]
            .iter()
            .fold(self.offset, |at, &(size, stride)| at.saturating_add((size - 1).saturating_mul(stride)))
            .saturating_add(s.d)
    }
}

/// Whether no two elements of these tensors, which share a buffer, overlap. It is true only if strides are nested: each
/// is at least the extent of all smaller ones, with the parts side by side at one of the levels.
pub(super) fn disjoint(parts: &[(HeadLayout, Sizes)]) -> bool {
    let mut live = parts.iter().filter(|(l, s)| l.span(*s) > 0);
    let Some((first, sizes)) = live.next() else { return true };
    let mut offsets = [first.offset; 3];
    let mut n = 1;
    for (l, s) in live {
        if (l.batch, l.time, l.head) != (first.batch, first.time, first.head) || s != sizes || n == 3 {
            return false;
        }
        offsets[n] = l.offset;
        n += 1;
    }
    let offsets = &mut offsets[..n];
    offsets.sort_unstable();
    let spread = offsets[n - 1] - offsets[0];
    let gap = offsets.windows(2).map(|w| w[1] - w[0]).min().unwrap_or(0);

    let mut dims = [(first.batch, sizes.batch), (first.time, sizes.time), (first.head, sizes.heads)];
    dims.sort_unstable();
    let mut extent = sizes.d;
    let mut placed = n == 1;
    for (stride, size) in dims.into_iter().filter(|&(_, size)| size > 1) {
        // The parts are side by side at this level if they fit between the smaller extents and this stride.
        if !placed && gap >= extent && spread + extent <= stride {
            extent += spread;
            placed = true;
        }
        if stride < extent {
            return false;
        }
        extent += (size - 1) * stride;
    }
    placed || gap >= extent
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks every element and compares with the proof.
    fn check(parts: &[HeadLayout], sizes: Sizes, want: bool) {
        let with: Vec<_> = parts.iter().map(|&l| (l, sizes)).collect();
        let len = with.iter().map(|(l, s)| l.span(*s)).max().unwrap_or(0);
        let mut seen = vec![false; len];
        let mut meets = false;
        for l in parts {
            for b in 0..sizes.batch {
                for t in 0..sizes.time {
                    for h in 0..sizes.heads {
                        for i in 0..sizes.d {
                            let at = l.at(b, h) + t * l.time + i;
                            meets |= std::mem::replace(&mut seen[at], true);
                        }
                    }
                }
            }
        }
        assert_eq!(meets, !want, "the row's own answer for {parts:?}");
        assert_eq!(disjoint(&with), want, "{parts:?}");
    }

    #[test]
    fn disjoint_is_what_marking_says() {
        let s = Sizes { batch: 2, time: 3, heads: 4, d: 5 };
        let packed = [0, 1, 2].map(|p| HeadLayout::packed(p, 3, 3, 4, 5));
        check(&packed, s, true);
        check(&packed[1..], s, true);
        check(&[packed[0], packed[0]], s, false);
        check(&[HeadLayout::contiguous(3, 4, 5)], s, true);
        check(&[HeadLayout { head: 4, ..packed[0] }], s, false);
        check(&[HeadLayout { offset: 0, batch: 0, time: 20, head: 5 }], s, false);
        // Heads outside time, parts inside heads, parts outside everything.
        check(&[HeadLayout { offset: 0, batch: 60, time: 5, head: 15 }], s, true);
        check(&[0, 1, 2].map(|p| HeadLayout { offset: 5 * p, batch: 180, time: 60, head: 15 }), s, true);
        check(&[0, 1, 2].map(|p| HeadLayout { offset: 120 * p, ..HeadLayout::contiguous(3, 4, 5) }), s, true);
        check(
            &[0, 1, 2].map(|p| HeadLayout { offset: 119 * p, ..HeadLayout::contiguous(3, 4, 5) }),
            s,
            false,
        );
        check(&[0, 1].map(|p| HeadLayout { offset: 3 * p, ..packed[0] }), s, false);
        // A dim of one element may have any stride.
        check(&[HeadLayout { offset: 0, batch: 0, time: 20, head: 5 }], Sizes { batch: 1, ..s }, true);
        check(&packed, Sizes { batch: 0, ..s }, true);
    }
}
