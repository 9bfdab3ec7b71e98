//! Tokenizers of texts with labels: from a sample's texts, or from its words, to ids with the special tokens that a model expects around them.
//!
//! Either bytes are tokens, or a `tokenizer.json` says what is: any that Hugging Face's `tokenizers` writes (WordPiece, Unigram, BPE, with
//! their normalizers), read by that library itself, without its network parts. So ids are the ones that a pretrained model has
//! seen: `[CLS] text [SEP]`, or `[CLS] text [SEP] text [SEP]` for a pair, cut as `truncation=True` cuts them.
//!
//! [`crate::Tokenizer`] is for corpora of language models: one long text without special tokens, whose ids are decoded again. It
//! reads byte-level BPE only.
//!
//! A tokenizer's file is trusted as little as any other: what the library makes of it is checked, and a panic in it is an error.

#[cfg(feature = "tokenizers")]
mod file;

use std::path::Path;

use crate::error::DataError;

/// What makes tokens of texts with labels.
#[derive(Debug)]
pub struct TextTokenizer {
    kind: TokenKind,
}

#[derive(Debug)]
enum TokenKind {
    /// Bytes are ids.
    Bytes,
    /// As a file says.
    #[cfg(feature = "tokenizers")]
    File(Box<file::FileTokenizer>),
}

/// The tokens of one sample.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SampleTokens {
    /// Their ids.
    pub ids: Vec<i32>,
    /// Whether some had no room and were left out.
    pub cut: bool,
    /// Of a pair with special tokens: where the second text begins, with everything after it. Elsewhere `None`.
    pub second: Option<usize>,
    /// Of words: the place of the first token of each, if it has one that was not cut. Empty for texts.
    pub firsts: Vec<Option<usize>>,
}

/// A byte between words.
const SPACE: i32 = b' ' as i32;

impl TextTokenizer {
    /// Each byte is an id: a vocabulary of 256 that needs no file and covers any text.
    pub fn bytes() -> TextTokenizer {
        TextTokenizer { kind: TokenKind::Bytes }
    }

    /// Reads a `tokenizer.json`.
    #[cfg(feature = "tokenizers")]
    pub fn from_file(path: &Path) -> Result<TextTokenizer, DataError> {
        Ok(TextTokenizer { kind: TokenKind::File(Box::new(file::FileTokenizer::open(path)?)) })
    }

    /// Refuses a `tokenizer.json`.
    #[cfg(not(feature = "tokenizers"))]
    pub fn from_file(path: &Path) -> Result<TextTokenizer, DataError> {
        let why = format!(
            "{}: this program was built without the feature `tokenizers`; build it with that feature, or leave out \
             `data.tokenizer` to learn from bytes",
            path.display()
        );
        Err(DataError::Setting { why })
    }

    /// Whether ids are bytes.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, TokenKind::Bytes)
    }

    /// The size of the vocabulary; ids are below this.
    pub fn vocab(&self) -> usize {
        match &self.kind {
            TokenKind::Bytes => 256,
            #[cfg(feature = "tokenizers")]
            TokenKind::File(file) => file.vocab(),
        }
    }

    /// The id that fills texts up, if the tokenizer has one.
    pub fn padding(&self) -> Option<usize> {
        match &self.kind {
            TokenKind::Bytes => None,
            #[cfg(feature = "tokenizers")]
            TokenKind::File(file) => file.padding(),
        }
    }

    /// How many special tokens stand around one text, or around and between two; `None` if there are none, and texts of several
    /// columns are told apart in another way.
    pub fn specials(&self, pair: bool) -> Option<usize> {
        match &self.kind {
            TokenKind::Bytes => None,
            #[cfg(feature = "tokenizers")]
            TokenKind::File(file) => file.specials(pair),
        }
    }

    /// The ids of a text, without special tokens.
    pub fn plain(&self, text: &[u8]) -> Result<Vec<i32>, String> {
        match &self.kind {
            TokenKind::Bytes => Ok(text.iter().map(|&byte| i32::from(byte)).collect()),
            #[cfg(feature = "tokenizers")]
            TokenKind::File(file) => file.plain(utf8(text)?),
        }
    }

    /// The ids of one text or two with their special tokens, at most `length`; what is too long is cut at the end of the longer one. Only
    /// of a tokenizer that has [special tokens](TextTokenizer::specials). No ids if there is nothing in the texts.
    pub fn with_specials(&self, texts: &[&[u8]], length: usize) -> Result<SampleTokens, String> {
        match &self.kind {
            TokenKind::Bytes => Err(format!("{} texts have no special tokens, {length}", texts.len())),
            #[cfg(feature = "tokenizers")]
            TokenKind::File(file) => {
                let texts = texts.iter().map(|text| utf8(text)).collect::<Result<Vec<_>, _>>()?;
                file.texts(&texts, length)
            }
        }
    }

    /// The ids of words, at most `length`, with special tokens if there are, and where each word begins. Bytes have a space between
    /// words.
    pub fn words(&self, words: &[&str], length: usize) -> Result<SampleTokens, String> {
        match &self.kind {
            TokenKind::Bytes => {
                let mut tokens = SampleTokens::default();
                for (k, word) in words.iter().enumerate() {
                    if k > 0 {
                        tokens.ids.push(SPACE);
                    }
                    tokens.firsts.push((!word.is_empty()).then_some(tokens.ids.len()));
                    tokens.ids.extend(word.bytes().map(i32::from));
                }
                tokens.cut = tokens.ids.len() > length;
                tokens.ids.truncate(length);
                forget_cut(&mut tokens.firsts, length);
                Ok(tokens)
            }
            #[cfg(feature = "tokenizers")]
            TokenKind::File(file) => file.words(words, length),
        }
    }
}

/// Words that begin where there is no room have no place.
fn forget_cut(firsts: &mut [Option<usize>], room: usize) {
    firsts.iter_mut().for_each(|first| *first = first.filter(|at| *at < room));
}

#[cfg(feature = "tokenizers")]
fn utf8(text: &[u8]) -> Result<&str, String> {
    str::from_utf8(text).map_err(|_| {
        "is not UTF-8; convert the file, or leave out `data.tokenizer` to learn from bytes".to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_bytes_have_their_places() {
        let words = |words: &[&str], length| {
            let tokens = TextTokenizer::bytes().words(words, length).unwrap();
            (
                String::from_utf8(tokens.ids.iter().map(|&id| id as u8).collect()).unwrap(),
                tokens.firsts,
                tokens.cut,
            )
        };
        assert_eq!(
            words(&["a", "bc", "", "d"], 99),
            ("a bc  d".into(), vec![Some(0), Some(2), None, Some(6)], false)
        );
        assert_eq!(words(&["a", "bc", "d"], 3), ("a b".into(), vec![Some(0), Some(2), None], true));
        assert_eq!(words(&[], 3), (String::new(), vec![], false));
    }
}
