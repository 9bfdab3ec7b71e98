//! The largest numbers of each chunk of 16384, with their places.
//!
//! A share of the numbers is sent exactly, those of the largest magnitudes, and nothing of the others: they wait in their residuals until they
//! have grown. Of `n` numbers of a chunk `k = ⌈share · n⌉` are sent: first their values, f32, then their places in the chunk, 16 bits each. So the
//! length of a code follows from the count alone, as that of the other codecs does.
//!
//! Which they are is found without sorting: the least magnitude among them is searched for by halving, over the bits of magnitudes, which are
//! ordered as these are. Each try counts how many are at least as large, at the speed of the cache that the chunk is in, and a try that
//! finds just `k` ends it. Among equals those that come first are taken.

use super::{INFINITE, largest_bits};
use crate::lanes::{LANES, twin};

/// Numbers of a chunk: 64 KiB, which stay in the L2 cache.
pub(super) const TOPK_CHUNK: usize = 16 * 1024;

/// Bytes of a number that is sent: its value and its place.
const ENTRY_BYTES: usize = size_of::<f32>() + size_of::<u16>();

/// Shares are counted in millionths.
const WHOLE_PPM: usize = 1_000_000;

/// How many of the `n` numbers of a chunk are sent.
pub(super) fn kept(ppm: u32, n: usize) -> usize {
    (n * ppm as usize).div_ceil(WHOLE_PPM).min(n)
}

/// Bytes that `n` numbers take.
pub(super) fn coded_len(ppm: u32, n: usize) -> usize {
    let whole = n / TOPK_CHUNK * kept(ppm, TOPK_CHUNK);
    (whole + kept(ppm, n % TOPK_CHUNK)) * ENTRY_BYTES
}

twin! {
    /// Codes `x + residual`.
    pub(super) fn encode(ppm: u32, x: &[f32], residual: &mut [f32], coded: &mut [u8]) = encode_body
}

/// Writes the numbers of a code.
pub(super) fn decode(ppm: u32, coded: &[u8], y: &mut [f32]) {
    y.fill(0.0);
    add(ppm, coded, y);
}

/// Adds the numbers of a code.
pub(super) fn add(ppm: u32, mut coded: &[u8], y: &mut [f32]) {
    for y in y.chunks_mut(TOPK_CHUNK) {
        let k = kept(ppm, y.len());
        let code = coded.split_off(..k * ENTRY_BYTES).expect("a code for each chunk");
        let (values, places) = code.split_at(k * size_of::<f32>());
        for (value, place) in values.as_chunks().0.iter().zip(places.as_chunks().0) {
            // A place beyond the chunk is no code of ours, and is left out.
            if let Some(y) = y.get_mut(usize::from(u16::from_le_bytes(*place))) {
                *y += f32::from_le_bytes(*value);
            }
        }
    }
}

#[inline(always)]
fn encode_body(ppm: u32, x: &[f32], residual: &mut [f32], mut coded: &mut [u8]) {
    for (x, r) in x.chunks(TOPK_CHUNK).zip(residual.chunks_mut(TOPK_CHUNK)) {
        let k = kept(ppm, x.len());
        let code = coded.split_off_mut(..k * ENTRY_BYTES).expect("room for each chunk");
        let (values, places) = code.split_at_mut(k * size_of::<f32>());
        let mut entries = values.as_chunks_mut().0.iter_mut().zip(places.as_chunks_mut().0);
        // What is to be coded waits where its residual will be.
        r.iter_mut().zip(x).for_each(|(r, x)| *r += x);
        let largest = largest_bits(r);
        if largest >= INFINITE {
            // Whatever is not finite shows at the first places, and where it is.
            let bad = r.iter().position(|r| !r.is_finite()).unwrap_or(0);
            for (i, (value, place)) in entries.enumerate() {
                *value = f32::NAN.to_le_bytes();
                *place = (if i == 0 { bad } else { i } as u16).to_le_bytes();
            }
            r.fill(0.0);
            continue;
        }
        let least = least_kept(r, k, largest);
        // Of those that equal the least, as many as are missing.
        let mut equals = k - count(r, least + 1);
        let (blocks, rest) = r.as_chunks_mut::<LANES>();
        let mut at = 0;
        let mut take = |at: usize, r: &mut f32| {
            let bits = r.to_bits() & MAGNITUDE;
            if bits < least || (bits == least && equals == 0) {
                return;
            }
            equals -= usize::from(bits == least);
            let (value, place) = entries.next().expect("there are `k` of them");
            (*value, *place) = (r.to_le_bytes(), (at as u16).to_le_bytes());
            *r = 0.0;
        };
        for block in blocks {
            // Most blocks have none.
            if block.iter().fold(0, |most, r| (r.to_bits() & MAGNITUDE).max(most)) >= least {
                block.iter_mut().enumerate().for_each(|(i, r)| take(at + i, r));
            }
            at += LANES;
        }
        rest.iter_mut().enumerate().for_each(|(i, r)| take(at + i, r));
    }
}

/// All bits but the sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The bits of the least magnitude among the `k` largest, or others that just `k` have at least; `largest` are those of the largest.
#[inline(always)]
fn least_kept(r: &[f32], k: usize, largest: u32) -> u32 {
    // At least `k` have `low`, fewer have `high`.
    let (mut low, mut high) = (0, largest + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match count(r, middle) {
            n if n == k => return middle,
            n if n > k => low = middle,
            _ => high = middle,
        }
    }
    low
}

/// How many magnitudes have at least these bits.
#[inline(always)]
fn count(r: &[f32], least: u32) -> usize {
    let mut lanes = [0u32; LANES];
    let (chunks, rest) = r.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, r) in lanes.iter_mut().zip(chunk) {
            *lane += u32::from(r.to_bits() & MAGNITUDE >= least);
        }
    }
    let rest = rest.iter().filter(|r| r.to_bits() & MAGNITUDE >= least).count();
    rest + lanes.iter().map(|n| *n as usize).sum::<usize>()
}
