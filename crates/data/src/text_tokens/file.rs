//! Tokenizers of files: Hugging Face's `tokenizers`, with its panics and errors as errors of ours.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tokenizers::utils::truncation::{TruncationParams, truncate_encodings};
use tokenizers::{EncodeInput, Encoding, PostProcessor, Tokenizer};

use super::{SampleTokens, forget_cut};
use crate::bpe::read_json;
use crate::error::DataError;

/// What the token that fills texts up is called, where the file does not say which it is.
const PADDING: [&str; 4] = ["[PAD]", "<pad>", "<PAD>", "<|pad|>"];
/// Ids are below this: a table of embeddings has a row for each.
const IDS_MAX: u32 = 1 << 24;

/// A tokenizer as a `tokenizer.json` says.
#[derive(Debug)]
pub(super) struct FileTokenizer {
    inner: Tokenizer,
    vocab: usize,
    padding: Option<usize>,
    /// Special tokens of one text, and of two.
    specials: [usize; 2],
}

impl FileTokenizer {
    pub(super) fn open(path: &Path) -> Result<FileTokenizer, DataError> {
        let json = read_json(path)?;
        let wrong = |why: String| {
            let more = "a `tokenizer.json` is needed, as `tokenizer.save_pretrained` or `tokenizer.save` of Hugging Face's \
                        libraries write it";
            DataError::corrupt(path, 0, format!("{why}; {more}"))
        };
        let mut inner = guarded(|| Tokenizer::from_bytes(&json)).map_err(wrong)?;
        let named = |name: &&str| inner.token_to_id(name);
        let padding =
            inner.get_padding().map(|padding| padding.pad_id).or_else(|| PADDING.iter().find_map(named));
        let vocab = guarded(|| Ok(inner.get_vocab(true))).map_err(wrong)?;
        let most = vocab.values().copied().chain(padding).max().ok_or_else(|| wrong("no token".into()))?;
        if most >= IDS_MAX {
            return Err(wrong(format!("a token has the id {most}, and ids are below {IDS_MAX}")));
        }
        // How far texts are cut and filled up is said by the job.
        inner.with_padding(None);
        guarded(|| inner.with_truncation(None).map(|_| ())).map_err(wrong)?;
        let specials = |pair: bool| inner.get_post_processor().map_or(0, |after| after.added_tokens(pair));
        let specials = [specials(false), specials(true)];
        let padding = padding.map(|id| id as usize);
        Ok(FileTokenizer { inner, vocab: most as usize + 1, padding, specials })
    }

    pub(super) fn vocab(&self) -> usize {
        self.vocab
    }

    pub(super) fn padding(&self) -> Option<usize> {
        self.padding
    }

    pub(super) fn specials(&self, pair: bool) -> Option<usize> {
        Some(self.specials[usize::from(pair)]).filter(|n| *n > 0)
    }

    pub(super) fn plain(&self, text: &str) -> Result<Vec<i32>, String> {
        let encoding = guarded(|| self.inner.encode_fast(text, false))?;
        self.ids(&encoding)
    }

    pub(super) fn texts(&self, texts: &[&str], length: usize) -> Result<SampleTokens, String> {
        let encode = |text: &&str| guarded(|| self.inner.encode_fast(*text, false));
        let mut parts = texts.iter().map(encode).collect::<Result<Vec<_>, _>>()?.into_iter();
        let (Some(first), second) = (parts.next(), parts.next()) else { return Ok(SampleTokens::default()) };
        let (encoding, cut) = self.around(first, second, length)?;
        let second = encoding.get_type_ids().iter().position(|kind| *kind > 0);
        Ok(SampleTokens { ids: self.ids(&encoding)?, cut, second, firsts: Vec::new() })
    }

    pub(super) fn words(&self, words: &[&str], length: usize) -> Result<SampleTokens, String> {
        let plain = guarded(|| self.inner.encode(EncodeInput::from(words), false))?;
        let (encoding, cut) = self.around(plain, None, length)?;
        let mut firsts = vec![None; words.len()];
        for (at, word) in encoding.get_word_ids().iter().enumerate() {
            let word = word.and_then(|word| firsts.get_mut(word as usize));
            if let Some(first @ None) = word {
                *first = Some(at);
            }
        }
        let ids = self.ids(&encoding)?;
        forget_cut(&mut firsts, ids.len());
        Ok(SampleTokens { ids, cut, second: None, firsts })
    }

    /// One text or two with special tokens, cut to `length`, and whether they were. Nothing around nothing.
    fn around(
        &self,
        first: Encoding,
        second: Option<Encoding>,
        length: usize,
    ) -> Result<(Encoding, bool), String> {
        let n = first.len() + second.as_ref().map_or(0, Encoding::len);
        if n == 0 {
            return Ok((first, false));
        }
        let max_length = length.saturating_sub(self.specials[usize::from(second.is_some())]).max(1);
        let params = TruncationParams { max_length, ..TruncationParams::default() };
        let encoding = guarded(|| {
            let (first, second) = truncate_encodings(first, second, &params)?;
            self.inner.post_process(first, second, true)
        })?;
        Ok((encoding, n > max_length))
    }

    fn ids(&self, encoding: &Encoding) -> Result<Vec<i32>, String> {
        let ids = encoding.get_ids();
        match ids.iter().find(|id| **id as usize >= self.vocab) {
            Some(id) => Err(format!("has the id {id}, which the tokenizer's vocabulary does not have")),
            // Ids are below 2^24.
            None => Ok(ids.iter().map(|&id| id as i32).collect()),
        }
    }
}

/// What the library gives; a panic in it is an error like any other.
fn guarded<T>(of: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(of)) {
        Ok(given) => given.map_err(|error| format!("the tokenizer says: {error}")),
        Err(_) => Err("the tokenizer cannot be used: the library that reads it stopped".into()),
    }
}

#[cfg(test)]
mod tests;
