//! Where certain bytes are in a text, as bits: what a reader of delimited text jumps along instead of looking at every byte.

use crate::Isa;

/// Bytes that one word of bits is about.
pub const BYTES: usize = 64;

/// Sets bit `i % 64` of `words[i / 64]` where `text[i]` is one of `bytes`, and clears all other bits.
pub fn find(isa: Isa, text: &[u8], bytes: [u8; 4], words: &mut [u64]) {
    assert_eq!(words.len(), text.len().div_ceil(BYTES), "a word of bits for each {BYTES} bytes");
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() {
        // SAFETY: the CPU has AVX-512.
        return unsafe { avx512::find(text, bytes, words) };
    }
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: the CPU has AVX2.
        return unsafe { avx2::find(text, bytes, words) };
    }
    let _ = isa;
    scalar::find(text, bytes, words);
}

mod scalar {
    use super::BYTES;

    pub(super) fn find(text: &[u8], bytes: [u8; 4], words: &mut [u64]) {
        for (block, word) in text.chunks(BYTES).zip(words) {
            let bit = |(i, byte): (usize, &u8)| u64::from(bytes.contains(byte)) << i;
            *word = block.iter().enumerate().map(bit).fold(0, |word, bit| word | bit);
        }
    }
}

/// Cuts the text into blocks of [`BYTES`], of which the last one is copied if it is short. What it is filled up with has no bits.
#[cfg(target_arch = "x86_64")]
macro_rules! by_blocks {
    ($text:ident, $bytes:ident, $words:ident, $word:expr) => {
        let (blocks, rest) = $text.as_chunks::<BYTES>();
        for (block, word) in blocks.iter().zip($words.iter_mut()) {
            *word = $word(block, $bytes);
        }
        if let Some(word) = $words.get_mut(blocks.len()) {
            let mut block = [0; BYTES];
            block[..rest.len()].copy_from_slice(rest);
            *word = $word(&block, $bytes) & ((1 << rest.len()) - 1);
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::BYTES;

    #[target_feature(enable = "avx2")]
    pub(super) fn find(text: &[u8], bytes: [u8; 4], words: &mut [u64]) {
        by_blocks!(text, bytes, words, word);
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn word(block: &[u8; BYTES], bytes: [u8; 4]) -> u64 {
        half(block.first_chunk().expect("half of a block"), bytes)
            | half(block.last_chunk().expect("half of a block"), bytes) << 32
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn half(block: &[u8; BYTES / 2], [a, b, c, d]: [u8; 4]) -> u64 {
        // SAFETY: the block has 32 bytes.
        let text = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
        let a = _mm256_cmpeq_epi8(text, _mm256_set1_epi8(a as i8));
        let b = _mm256_cmpeq_epi8(text, _mm256_set1_epi8(b as i8));
        let c = _mm256_cmpeq_epi8(text, _mm256_set1_epi8(c as i8));
        let d = _mm256_cmpeq_epi8(text, _mm256_set1_epi8(d as i8));
        let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
        u64::from(_mm256_movemask_epi8(any) as u32)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::BYTES;

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn find(text: &[u8], bytes: [u8; 4], words: &mut [u64]) {
        by_blocks!(text, bytes, words, word);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn word(block: &[u8; BYTES], [a, b, c, d]: [u8; 4]) -> u64 {
        // SAFETY: the block has 64 bytes.
        let text = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
        let a = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8(a as i8));
        let b = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8(b as i8));
        let c = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8(c as i8));
        let d = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8(d as i8));
        (a | b) | (c | d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_the_scalar_twin() {
        let text: Vec<u8> = (0..1000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 % 61).collect();
        for isa in Isa::available() {
            for len in [0usize, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000] {
                for bytes in [[0, 1, 2, 3], [44, 10, 13, 34], [255; 4]] {
                    let mut fast = vec![u64::MAX; len.div_ceil(BYTES)];
                    find(isa, &text[..len], bytes, &mut fast);
                    for (i, byte) in text[..len].iter().enumerate() {
                        assert_eq!(
                            fast[i / 64] >> (i % 64) & 1 == 1,
                            bytes.contains(byte),
                            "{isa:?} {len} {i}"
                        );
                    }
                    let mut slow = vec![u64::MAX; fast.len()];
                    scalar::find(&text[..len], bytes, &mut slow);
                    assert_eq!(fast, slow, "{isa:?} {len}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a word of bits")]
    fn too_few_words_are_refused() {
        find(Isa::detect(), &[0; 65], [1, 2, 3, 4], &mut [0]);
    }
}
