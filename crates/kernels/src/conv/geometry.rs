//! Which pixels and taps meet: the arithmetic that the direct and the depthwise algorithm share.
//!
//! Both the forward pass and the input gradient *gather*: each pixel that is made reads some pixels of another image.
//! Along one dim, forward output `o` reads inputs `o·s − p + k·d` for all taps `k`. The gradient at input `i` reads
//! outputs `(i + p − k·d) / s` for those `k` that divide. Which ones do depends only on the phase
//! `r = (i + p) mod s`, and within a phase the taps are an arithmetic sequence: with `g = gcd(s, d)` they are
//! `k₀, k₀ + s/g, …` and read outputs `d/g` apart. So each phase of the gradient is a plain stride-1 gather with a part
//! of the kernel, written to every `s`-th pixel, and one description, [`Lattice`], covers both passes.

/// Which of the two gathers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    /// Makes `y` from `x`.
    Forward,
    /// Makes `dx` from `dy`.
    Backward,
}

/// One spatial dim of a convolution, in one direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpatialDim {
    pub(super) way: Direction,
    /// The convolution's input length.
    pub(super) input: usize,
    /// The convolution's output length.
    pub(super) output: usize,
    pub(super) k: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

/// The pixels of one phase: number `idx` is made at `made_first + idx·made_step` and reads, for `j` in `0..taps`,
/// pixel `read_first + idx·read_step + j·tap_step` through the kernel's tap `k_first + j·k_step`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lattice {
    pub(super) made_first: usize,
    pub(super) made_step: usize,
    pub(super) count: usize,
    pub(super) read_first: isize,
    pub(super) read_step: usize,
    pub(super) taps: usize,
    pub(super) tap_step: usize,
    pub(super) k_first: usize,
    pub(super) k_step: isize,
}

impl Lattice {
    /// The numbers of the pixels made in `from..to`.
    pub(super) fn within(&self, from: usize, to: usize) -> std::ops::Range<usize> {
        let number = |at: usize| at.saturating_sub(self.made_first).div_ceil(self.made_step).min(self.count);
        number(from)..number(to)
    }

    /// The taps that fall inside an image of `len`, of a pixel whose first tap reads `read`.
    pub(super) fn taps_inside(&self, read: isize, len: usize) -> std::ops::Range<usize> {
        let reach = |end: isize| (end.max(0) as usize).div_ceil(self.tap_step).min(self.taps);
        let end = reach(len as isize - read);
        reach(-read).min(end)..end
    }

    /// The kernel's tap behind tap `j`.
    pub(super) fn tap(&self, j: usize) -> usize {
        self.k_first.wrapping_add_signed(self.k_step * j as isize)
    }
}

impl SpatialDim {
    /// Length of the image that is made.
    pub(super) fn made(&self) -> usize {
        match self.way {
            Direction::Forward => self.output,
            Direction::Backward => self.input,
        }
    }

    /// Length of the image that is read.
    pub(super) fn read(&self) -> usize {
        match self.way {
            Direction::Forward => self.input,
            Direction::Backward => self.output,
        }
    }

    /// How many phases there are.
    pub(super) fn phases(&self) -> usize {
        match self.way {
            Direction::Forward => 1,
            Direction::Backward => self.stride,
        }
    }

    /// The pixels of phase `r`.
    pub(super) fn lattice(&self, r: usize) -> Lattice {
        let (s, p, d) = (self.stride, self.padding, self.dilation);
        if self.way == Direction::Forward {
            return Lattice {
                made_first: 0,
                made_step: 1,
                count: self.output,
                read_first: -(p as isize),
                read_step: s,
                taps: self.k,
                tap_step: d,
                k_first: 0,
                k_step: 1,
            };
        }
        // The first i with (i + p) mod s = r.
        let made_first = (r + s - p % s) % s;
        let q = ((made_first + p) / s) as isize;
        let count = self.input.saturating_sub(made_first).div_ceil(s);
        let g = gcd(s, d);
        let (k_step, tap_step) = (s / g, d / g);
        let k_0 = (0..k_step.min(self.k)).find(|&k| (k * d) % s == r);
        let taps = k_0.map_or(0, |k| (self.k - k).div_ceil(k_step));
        let k_0 = k_0.unwrap_or(0);
        // Ascending reads are descending taps.
        let back = taps.saturating_sub(1);
        let offset = (r as isize - (k_0 * d) as isize).div_euclid(s as isize);
        Lattice {
            made_first,
            made_step: s,
            count,
            read_first: q + offset - (back * tap_step) as isize,
            read_step: 1,
            taps,
            tap_step,
            k_first: k_0 + back * k_step,
            k_step: -(k_step as isize),
        }
    }

    /// How many of the kernel's taps belong to the phases before `r`.
    pub(super) fn taps_before(&self, r: usize) -> usize {
        (0..r).map(|r| self.lattice(r).taps).sum()
    }

    /// The pixels `lo..hi` that making `from..to` reads, padding included. `lo` may be negative.
    pub(super) fn reads(&self, from: usize, to: usize) -> (isize, isize) {
        let (mut lo, mut hi) = (isize::MAX, isize::MIN);
        for r in 0..self.phases() {
            let lattice = self.lattice(r);
            let numbers = lattice.within(from, to);
            if numbers.is_empty() || lattice.taps == 0 {
                continue;
            }
            let first = lattice.read_first + (numbers.start * lattice.read_step) as isize;
            let last = lattice.read_first
                + ((numbers.end - 1) * lattice.read_step + (lattice.taps - 1) * lattice.tap_step) as isize;
            lo = lo.min(first);
            hi = hi.max(last + 1);
        }
        if lo > hi { (0, 0) } else { (lo, hi) }
    }

    /// The most pixels that making `len` consecutive ones can read.
    pub(super) fn reads_max(&self, len: usize) -> usize {
        let reach = (self.k - 1) * self.dilation;
        match self.way {
            Direction::Forward => (len - 1) * self.stride + reach + 1,
            Direction::Backward => (len - 1 + reach) / self.stride + 2,
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Cuts `len` into pieces of at most `max`, as even as possible: the first few are one longer than the rest. Even
/// pieces matter because a register tile with few rows waits for its own multiply-adds.
pub(super) fn pieces(len: usize, max: usize) -> impl Iterator<Item = (usize, usize)> {
    let n = len.div_ceil(max);
    let (short, longer) = (len / n.max(1), len % n.max(1));
    (0..n).map(move |i| (i * short + i.min(longer), short + usize::from(i < longer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lattice_is_the_definition() {
        for (input, k, stride, padding, dilation) in [
            (7, 3, 1, 1, 1),
            (9, 3, 2, 1, 1),
            (11, 5, 3, 4, 2),
            (22, 4, 4, 0, 6),
            (8, 2, 4, 1, 2),
            (5, 1, 3, 0, 1),
        ] {
            let output = (input + 2 * padding - dilation * (k - 1) - 1) / stride + 1;
            for way in [Direction::Forward, Direction::Backward] {
                let axis = SpatialDim { way, input, output, k, stride, padding, dilation };
                let mut met = Vec::new();
                for r in 0..axis.phases() {
                    let l = axis.lattice(r);
                    for idx in 0..l.count {
                        for j in 0..l.taps {
                            let read = l.read_first + (idx * l.read_step + j * l.tap_step) as isize;
                            let (lo, hi) = axis.reads(0, axis.made());
                            assert!(lo <= read && read < hi, "{axis:?}");
                            assert!((hi - lo) as usize <= axis.reads_max(axis.made()), "{axis:?}");
                            if read >= 0 && (read as usize) < axis.read() {
                                met.push((l.made_first + idx * l.made_step, read as usize, l.tap(j)));
                            }
                        }
                    }
                }
                let mut want = Vec::new();
                for o in 0..output {
                    for k in 0..k {
                        if let Some(i) =
                            (o * stride + k * dilation).checked_sub(padding).filter(|&i| i < input)
                        {
                            want.push(if way == Direction::Forward { (o, i, k) } else { (i, o, k) });
                        }
                    }
                }
                met.sort_unstable();
                want.sort_unstable();
                assert_eq!(met, want, "{axis:?}");
                assert_eq!(axis.taps_before(axis.phases()), k, "{axis:?}");
            }
        }
    }

    #[test]
    fn pieces_cover_evenly() {
        for (len, max) in [(0, 6), (1, 6), (6, 6), (7, 6), (15, 12), (28, 12), (64, 6)] {
            let all: Vec<_> = pieces(len, max).collect();
            assert_eq!(all.iter().map(|p| p.1).sum::<usize>(), len);
            assert!(all.windows(2).all(|w| w[0].0 + w[0].1 == w[1].0 && w[0].1 - w[1].1 <= 1));
            assert!(all.iter().all(|p| p.1 <= max));
        }
    }
}
