//! Units that are gathered from an image: the matrix of patches, of which a block exists at a time.
//!
//! [`PatchRows`] is an operand A, whose rows are windows: forward and input gradient. [`PatchColumns`] is an operand B,
//! whose columns are taps with channels and whose steps of k are windows: the weight gradient.

use polyreme_dtype::bf16;

use super::windows::{PatchWindow, Piece, WindowList, Windows};
use crate::convert::f32_from_bf16;
use crate::gemm::pairs::UnitSource;
#[cfg(target_arch = "x86_64")]
use crate::{
    Isa,
    gemm::pairs::{RUN, UNIT, UNIT_LEN},
};

/// Windows as rows.
pub(super) struct PatchRows<'a>(Patches<'a>);

/// Taps with channels as columns.
pub(super) struct PatchColumns<'a>(Patches<'a>);

impl<'a> PatchRows<'a> {
    pub(super) fn new(image: &'a [bf16], windows: Windows) -> PatchRows<'a> {
        PatchRows(Patches::new(image, windows))
    }
}

impl<'a> PatchColumns<'a> {
    pub(super) fn new(image: &'a [bf16], windows: Windows) -> PatchColumns<'a> {
        PatchColumns(Patches::new(image, windows))
    }
}

/// Windows with the images that they are in.
struct Patches<'a> {
    image: &'a [bf16],
    windows: Windows,
}

impl<'a> Patches<'a> {
    /// What is read unchecked relies on the length.
    fn new(image: &'a [bf16], windows: Windows) -> Patches<'a> {
        assert_eq!(image.len(), windows.images_len(), "windows are in these images");
        Patches { image, windows }
    }

    /// Step `k` of a window.
    fn at(&self, window: usize, k: usize) -> f32 {
        self.windows.element(window, k).map_or(0.0, |at| f32_from_bf16(self.image[at]))
    }
}

/// Channels of a column's unit if those of a tap fill units.
const COLUMNS: usize = 16;

/// What a column is.
pub(super) struct Column {
    pub(super) tap: usize,
    pub(super) channel: usize,
    /// How many columns from this one on are of the same tap, and of one channel after the other.
    pub(super) together: usize,
}

/// Column `idx` of [`PatchColumns`].
///
/// If channels fill units, a unit is of one tap, and all taps of its channels follow each other: they are neighbours in the
/// gradient, which is then written in few pieces. Otherwise columns are in the order of windows.
pub(super) fn column(windows: &Windows, idx: usize) -> Column {
    if !windows.channels.is_multiple_of(COLUMNS) {
        let (tap, channel) = (idx / windows.channels, idx % windows.channels);
        return Column { tap, channel, together: windows.channels - channel };
    }
    let (unit, lane) = (idx / COLUMNS, idx % COLUMNS);
    let (tap, first) = (unit % windows.taps(), unit / windows.taps() * COLUMNS);
    Column { tap, channel: first + lane, together: COLUMNS - lane }
}

/// The pieces of the vectors of a unit.
struct Pieces {
    all: [Piece; 32],
    n: usize,
}

impl Pieces {
    fn none() -> Pieces {
        Pieces { all: [Piece::default(); 32], n: 0 }
    }

    /// Those of steps `k..k + n` of windows.
    fn set(&mut self, windows: &Windows, k: usize, n: usize) -> &[Piece] {
        self.n = 0;
        windows.pieces(k, n, |piece| {
            self.all[self.n] = piece;
            self.n += 1;
        });
        &self.all[..self.n]
    }
}

impl UnitSource for PatchRows<'_> {
    #[cfg(target_arch = "x86_64")]
    fn copy(
        &self,
        isa: Isa,
        _: usize,
        units: (usize, usize),
        runs: (usize, usize),
        target: &mut [[u32; UNIT_LEN]],
    ) {
        let windows = &self.0.windows;
        let (mut room, mut pieces) = ([PatchWindow::default(); UNIT], Pieces::none());
        for (target, unit) in target.chunks_exact_mut(runs.1 - runs.0).zip(units.0..units.1) {
            let list = windows.list(unit * UNIT, &mut room);
            for (target, run) in target.iter_mut().zip(runs.0..) {
                let vectors = Vectors::new(&self.0, &list, pieces.set(windows, run * RUN, RUN));
                if isa.has_avx512() {
                    // SAFETY: the ISA has AVX-512.
                    unsafe { vectors.rows_avx512(target) };
                } else {
                    vectors.rows(target);
                }
            }
        }
    }

    fn at(&self, _: usize, own: usize, k: usize) -> f32 {
        self.0.at(own, k)
    }
}

impl UnitSource for PatchColumns<'_> {
    #[cfg(target_arch = "x86_64")]
    fn copy(
        &self,
        isa: Isa,
        _: usize,
        units: (usize, usize),
        runs: (usize, usize),
        target: &mut [[u32; UNIT_LEN]],
    ) {
        let windows = &self.0.windows;
        let (mut room, mut pieces) = ([PatchWindow::default(); RUN], Pieces::none());
        let n_runs = runs.1 - runs.0;
        // Run by run: the windows of one are near each other.
        for run in runs.0..runs.1 {
            let list = windows.list(run * RUN, &mut room);
            for unit in units.0..units.1 {
                let Column { tap, channel, .. } = column(windows, unit * UNIT);
                let k = tap * windows.channels + channel;
                let vectors = Vectors::new(&self.0, &list, pieces.set(windows, k, UNIT));
                let target = &mut target[(unit - units.0) * n_runs + run - runs.0];
                if isa.has_avx512() {
                    // SAFETY: the ISA has AVX-512.
                    unsafe { vectors.pairs_avx512(target) };
                } else {
                    vectors.pairs(target);
                }
            }
        }
    }

    fn at(&self, _: usize, own: usize, k: usize) -> f32 {
        let Column { tap, channel, .. } = column(&self.0.windows, own);
        self.0.at(k, tap * self.0.windows.channels + channel)
    }
}

/// The same pieces of several windows: each window fills one vector.
#[cfg(target_arch = "x86_64")]
struct Vectors<'a> {
    patches: &'a Patches<'a>,
    list: &'a [PatchWindow],
    pieces: &'a [Piece],
    /// Whether nothing of them is padding.
    inside: bool,
}

#[cfg(target_arch = "x86_64")]
impl<'a> Vectors<'a> {
    fn new(patches: &'a Patches, list: &WindowList<'a>, pieces: &'a [Piece]) -> Vectors<'a> {
        let inside = pieces.iter().all(|piece| patches.windows.inside(list, piece));
        Vectors { patches, list: list.windows, pieces, inside }
    }

    /// The lanes of a piece that are inside the image.
    #[inline(always)]
    fn lanes<const INSIDE: bool>(&self, window: &PatchWindow, piece: &Piece) -> u32 {
        if INSIDE { piece.lanes() } else { self.patches.windows.lanes_inside(window, piece) }
    }

    /// One vector.
    fn vector<const N: usize>(&self, window: &PatchWindow) -> [u16; N] {
        let mut vector = [0; N];
        for piece in self.pieces {
            // They are neighbours.
            let lanes = self.lanes::<false>(window, piece);
            let (low, n) = (lanes.trailing_zeros() as usize, lanes.count_ones() as usize);
            if n > 0 {
                let first = window.first + piece.offset + low as isize;
                let from = &self.patches.image[first as usize..][..n];
                for (v, x) in vector[low..][..n].iter_mut().zip(from) {
                    *v = x.to_bits();
                }
            }
        }
        vector
    }

    /// A unit whose rows are the vectors of up to 16 windows.
    fn rows(&self, unit: &mut [u32; UNIT_LEN]) {
        unit.fill(0);
        for (row, window) in unit.chunks_exact_mut(UNIT).zip(self.list) {
            let vector = self.vector::<RUN>(window);
            for (pair, v) in row.iter_mut().zip(vector.chunks_exact(2)) {
                *pair = u32::from(v[0]) | u32::from(v[1]) << 16;
            }
        }
    }

    /// A unit whose rows are pairs of vectors of up to 32 windows.
    fn pairs(&self, unit: &mut [u32; UNIT_LEN]) {
        unit.fill(0);
        for (row, pair) in unit.chunks_exact_mut(UNIT).zip(self.list.chunks(2)) {
            let early = self.vector::<UNIT>(&pair[0]);
            let late = pair.get(1).map_or([0; UNIT], |window| self.vector::<UNIT>(window));
            for (row, (early, late)) in row.iter_mut().zip(early.into_iter().zip(late)) {
                *row = u32::from(early) | u32::from(late) << 16;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::*;

    impl Vectors<'_> {
        /// Where lane 0 of a piece would be, and its lanes.
        #[inline(always)]
        fn masked<const INSIDE: bool>(&self, window: &PatchWindow, piece: &Piece) -> (*const i16, u32) {
            let zero = self.patches.image.as_ptr().wrapping_offset(window.first + piece.offset);
            (zero.cast(), self.lanes::<INSIDE>(window, piece))
        }

        /// As `rows`.
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        pub(super) fn rows_avx512(&self, unit: &mut [u32; UNIT_LEN]) {
            match self.inside {
                true => self.rows_by::<true>(unit),
                false => self.rows_by::<false>(unit),
            }
            unit[self.list.len() * UNIT..].fill(0);
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        fn rows_by<const INSIDE: bool>(&self, unit: &mut [u32; UNIT_LEN]) {
            for (row, window) in unit.chunks_exact_mut(UNIT).zip(self.list) {
                let mut vector = _mm512_setzero_si512();
                for piece in self.pieces {
                    let (at, lanes) = self.masked::<INSIDE>(window, piece);
                    // SAFETY: these lanes are inside the images, whose length was checked, and no other is read.
                    vector = _mm512_or_si512(vector, unsafe { _mm512_maskz_loadu_epi16(lanes, at) });
                }
                // SAFETY: a row has 64 bytes.
                unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), vector) };
            }
        }

        /// As `pairs`.
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        pub(super) fn pairs_avx512(&self, unit: &mut [u32; UNIT_LEN]) {
            match self.inside {
                true => self.pairs_by::<true>(unit),
                false => self.pairs_by::<false>(unit),
            }
            unit[self.list.len().div_ceil(2) * UNIT..].fill(0);
        }

        #[inline]
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        fn pairs_by<const INSIDE: bool>(&self, unit: &mut [u32; UNIT_LEN]) {
            for (row, pair) in unit.chunks_exact_mut(UNIT).zip(self.list.chunks(2)) {
                let mut both = self.wide::<INSIDE>(&pair[0]);
                if let Some(late) = pair.get(1) {
                    both = _mm512_or_si512(both, _mm512_slli_epi32::<16>(self.wide::<INSIDE>(late)));
                }
                // SAFETY: a row has 64 bytes.
                unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), both) };
            }
        }

        /// One vector of 16, each widened to 32 bits.
        #[inline]
        #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
        fn wide<const INSIDE: bool>(&self, window: &PatchWindow) -> __m512i {
            let mut vector = _mm256_setzero_si256();
            for piece in self.pieces {
                let (at, lanes) = self.masked::<INSIDE>(window, piece);
                // SAFETY: as above; pieces have 16 lanes.
                let lanes = unsafe { _mm256_maskz_loadu_epi16(lanes as u16, at) };
                vector = _mm256_or_si256(vector, lanes);
            }
            _mm512_cvtepu16_epi32(vector)
        }
    }
}
