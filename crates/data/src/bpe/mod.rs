//! Tokenizers: text to ids and back. Either each byte is an id, or byte-level BPE of the GPT-2 family, read from the
//! `tokenizer.json` that Hugging Face's libraries write.
//!
//! Encoding gives the ids that `tokenizers` gives with `add_special_tokens=False`: no start or end tokens are put around a
//! text, since a corpus is one long text; texts with labels have [`crate::text_tokens`]. Decoding gives the bytes back, special tokens included. Training a tokenizer is
//! not done here.

mod added;
mod file;
mod letters;
mod merge;
mod split;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use added::{Added, Stretch};
use merge::{Merger, Merges};
use split::Rule;

use crate::error::DataError;

/// The largest file that is read; files of the largest vocabularies in use have about 40 MB.
const FILE_BYTES_MAX: u64 = 1 << 28;
/// Pieces up to this length are cached while a text is encoded, and at most this many of them.
const REMEMBERED_BYTES_MAX: usize = 48;
const REMEMBERED_MAX: usize = 1 << 17;

/// A tokenizer: text to ids and back.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    /// `None`: bytes are ids.
    bpe: Option<Box<Bpe>>,
}

/// The content of a `tokenizer.json`.
pub(crate) fn read_json(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut json = Vec::new();
    let file = File::open(path).map_err(|err| DataError::io(path, err))?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut json).map_err(|err| DataError::io(path, err))?;
    if json.len() as u64 > FILE_BYTES_MAX {
        let why =
            format!("longer than {FILE_BYTES_MAX} bytes, the limit for a tokenizer.json; check the path");
        return Err(DataError::corrupt(path, FILE_BYTES_MAX, why));
    }
    Ok(json)
}

/// A byte-level BPE tokenizer.
#[derive(Clone, Debug)]
struct Bpe {
    /// The first rules by which a text is split, one after another.
    rules: Vec<Rule>,
    /// Whether the results are prefixed with a space, unless they begin with one.
    prefix: bool,
    /// The rule by which it is split next, if any.
    last_rule: Option<Rule>,
    /// The added tokens, which are found before anything is split.
    passes: [Added; 2],
    merges: Merges,
    /// Pieces that are tokens without any merging, where the file says so.
    whole: Option<HashMap<Box<[u8]>, u32>>,
    /// The bytes of each id; empty where there is none.
    texts: Vec<Box<[u8]>>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. An unsupported feature is an error that names it.
    pub fn from_file(path: &Path) -> Result<Tokenizer, DataError> {
        let json = read_json(path)?;
        Ok(Tokenizer { bpe: Some(Box::new(file::read(&json, path)?)) })
    }

    /// Each byte is an id: a vocabulary of 256 that needs no file and covers any text.
    pub fn bytes() -> Tokenizer {
        Tokenizer { bpe: None }
    }

    /// Whether ids are bytes.
    pub fn is_bytes(&self) -> bool {
        self.bpe.is_none()
    }

    /// The size of the vocabulary; ids are below this. Some may have no text, if the file leaves numbers out.
    pub fn vocab(&self) -> usize {
        self.bpe.as_ref().map_or(256, |bpe| bpe.texts.len())
    }

    /// The ids of a text. Added tokens in it (`<|endoftext|>`) are found wherever they occur.
    pub fn encode(&self, text: &str) -> Vec<i32> {
        match &self.bpe {
            None => text.bytes().map(i32::from).collect(),
            Some(bpe) => bpe.encode(text),
        }
    }

    /// The bytes of ids; ids without a text have none. A character that is cut at either end of the ids stays cut.
    pub fn decode_bytes(&self, ids: &[i32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &id in ids {
            match &self.bpe {
                None => bytes.extend(u8::try_from(id)),
                Some(bpe) => {
                    let text = usize::try_from(id).ok().and_then(|idx| bpe.texts.get(idx));
                    bytes.extend_from_slice(text.map_or(&[], |text| text));
                }
            }
        }
        bytes
    }

    /// The text of ids; invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[i32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids)).into_owned()
    }
}

impl Bpe {
    fn encode(&self, text: &str) -> Vec<i32> {
        let mut encoder =
            Encoder { bpe: self, merger: Merger::new(&self.merges), known: HashMap::new(), ids: Vec::new() };
        let [first, second] = &self.passes;
        first.split(text, |stretch| match stretch {
            Stretch::Token(id) => encoder.ids.push(id as i32),
            Stretch::Text(text) => second.split(text, |stretch| match stretch {
                Stretch::Token(id) => encoder.ids.push(id as i32),
                Stretch::Text(text) => encoder.text(text, &self.rules),
            }),
        });
        encoder.ids
    }
}

/// The state of encoding one text.
struct Encoder<'a> {
    bpe: &'a Bpe,
    merger: Merger<'a>,
    /// Where in `ids` a piece was encoded before: texts repeat words.
    known: HashMap<Box<str>, (usize, usize)>,
    ids: Vec<i32>,
}

impl Encoder<'_> {
    /// Adds the ids of text without added tokens, which is still to be split by `rules`.
    fn text(&mut self, text: &str, rules: &[Rule]) {
        match rules {
            [rule, rules @ ..] => rule.split(text, |piece| self.text(piece, rules)),
            [] if self.bpe.prefix && !text.starts_with(' ') => self.prefixed(&format!(" {text}")),
            [] => self.prefixed(text),
        }
    }

    fn prefixed(&mut self, text: &str) {
        match self.bpe.last_rule {
            Some(rule) => rule.split(text, |piece| self.piece(piece)),
            None => self.piece(text),
        }
    }

    fn piece(&mut self, piece: &str) {
        if let Some(&(start, end)) = self.known.get(piece) {
            self.ids.extend_from_within(start..end);
            return;
        }
        let start = self.ids.len();
        match self.bpe.whole.as_ref().and_then(|whole| whole.get(piece.as_bytes())) {
            Some(&id) => self.ids.push(id as i32),
            None => self.merger.merge(piece.as_bytes(), &mut self.ids),
        }
        if piece.len() <= REMEMBERED_BYTES_MAX && self.known.len() < REMEMBERED_MAX {
            self.known.insert(piece.into(), (start, self.ids.len()));
        }
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
