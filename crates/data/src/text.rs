//! A text as a set: windows of tokens, each of which has the next token as its label.
//!
//! With bytes as tokens, samples are borrowed from the file's bytes. Otherwise the text is encoded once when it is opened, and
//! ids are kept in two bytes each where the vocabulary allows.

use std::path::Path;

use crate::bpe::Tokenizer;
use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::map::{self, Bytes};
use crate::spec::{Features, Spec, Target};

/// The windows of a text.
///
/// A sample is `context` + 1 tokens, and samples begin `context` tokens apart: they share one token, so each token
/// except the first is a label exactly once per epoch. Tokens after the last whole window are left out.
#[derive(Debug)]
pub struct Text {
    tokens: Tokens,
    context: usize,
    spec: Spec,
}

#[derive(Debug)]
enum Tokens {
    Bytes(Bytes),
    Short(Vec<u16>),
    Long(Vec<i32>),
}

impl Text {
    /// Opens the text at `path`, for samples of `context` tokens and their labels. A text that is too short for one
    /// sample, or that is not UTF-8 when the tokenizer needs it to be, is an error.
    pub fn open(path: &Path, tokenizer: &Tokenizer, context: usize) -> Result<Text, DataError> {
        if context == 0 {
            return Err(DataError::Setting {
                why: "a context of 0 tokens has nothing to learn from; use 1 or more".into(),
            });
        }
        let (tokens, n_bytes) = if tokenizer.is_bytes() {
            let bytes = map::open(path)?;
            let n_bytes = bytes.len();
            (Tokens::Bytes(bytes), n_bytes)
        } else {
            // A copy: a mapped file may change, and a text that was found to be UTF-8 must stay so.
            let bytes = map::read(path)?;
            let n_bytes = bytes.len();
            (encode(path, bytes, tokenizer)?, n_bytes)
        };
        if tokens.len() <= context {
            let why = format!(
                "{}: {n_bytes} bytes are {} tokens, and one sample with context {context} needs {}; \
                 use a longer text or a context of at most {}",
                path.display(),
                tokens.len(),
                context.saturating_add(1),
                tokens.len().saturating_sub(1),
            );
            return Err(DataError::Setting { why });
        }
        let features = Features::Ids { time: context, vocab: tokenizer.vocab() };
        Ok(Text { tokens, context, spec: Spec { features, target: Target::NextId } })
    }

    /// How many tokens the text has, including those after the last window.
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }
}

impl Dataset for Text {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        (self.tokens.len() - 1) / self.context
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let start = idx * self.context;
        let window = start..start + self.context + 1;
        let values = match &self.tokens {
            Tokens::Bytes(bytes) => Values::U8(&bytes[window]),
            Tokens::Long(ids) => Values::I32(&ids[window]),
            Tokens::Short(ids) => {
                scratch.ids.clear();
                scratch.ids.extend(ids[window].iter().map(|&id| i32::from(id)));
                Values::I32(&scratch.ids)
            }
        };
        Ok(Fetched { values, label: Label::NextId })
    }

    fn intact(&self) -> Result<(), DataError> {
        match &self.tokens {
            Tokens::Bytes(bytes) => bytes.intact(),
            Tokens::Short(_) | Tokens::Long(_) => Ok(()),
        }
    }

    fn class(&self, _idx: usize) -> Result<Option<usize>, DataError> {
        Ok(None)
    }
}

impl Tokens {
    fn len(&self) -> usize {
        match self {
            Tokens::Bytes(bytes) => bytes.len(),
            Tokens::Short(ids) => ids.len(),
            Tokens::Long(ids) => ids.len(),
        }
    }
}

fn encode(path: &Path, bytes: Vec<u8>, tokenizer: &Tokenizer) -> Result<Tokens, DataError> {
    let text = String::from_utf8(bytes).map_err(|err| {
        let offset = err.utf8_error().valid_up_to();
        let byte = err.as_bytes()[offset];
        let why = format!("0x{byte:02x} is not UTF-8; convert the text, or train on bytes");
        DataError::corrupt(path, offset as u64, why)
    })?;
    let ids = tokenizer.encode(&text);
    // All ids are below the vocabulary, so the conversion does not truncate any.
    if tokenizer.vocab() <= 1 << 16 {
        return Ok(Tokens::Short(ids.into_iter().map(|id| id as u16).collect()));
    }
    Ok(Tokens::Long(ids))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn bpe() -> Tokenizer {
        Tokenizer::from_file(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/bpe.json")).unwrap()
    }

    fn open(content: &[u8], tokenizer: &Tokenizer, context: usize) -> Result<Text, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        std::fs::write(&path, content).unwrap();
        Text::open(&path, tokenizer, context)
    }

    /// All samples are windows, and the labels concatenated are the tokens except the first, up to the last window.
    fn check(content: &str, tokenizer: &Tokenizer, context: usize) {
        let text = open(content.as_bytes(), tokenizer, context).unwrap();
        let tokens = tokenizer.encode(content);
        assert_eq!(text.n_tokens(), tokens.len());
        assert_eq!(text.len(), (tokens.len() - 1) / context);
        assert_eq!(text.spec().features, Features::Ids { time: context, vocab: tokenizer.vocab() });
        let mut scratch = Scratch::default();
        let mut labels = Vec::new();
        for idx in 0..text.len() {
            let fetched = text.fetch(idx, &mut scratch).unwrap();
            let window: Vec<i32> = match fetched.values {
                Values::U8(bytes) => bytes.iter().map(|&byte| i32::from(byte)).collect(),
                Values::I32(ids) => ids.to_vec(),
                Values::F32(_) => panic!("text has no numbers"),
            };
            assert_eq!(window[0], tokens[idx * context]);
            assert_eq!((window.len(), fetched.label), (context + 1, Label::NextId));
            labels.extend_from_slice(&window[1..]);
            assert_eq!(text.class(idx).unwrap(), None);
        }
        assert_eq!(labels, tokens[1..=text.len() * context]);
        assert!(tokens.len() - 1 - labels.len() < context);
    }

    #[test]
    fn each_token_but_the_first_is_predicted_once() {
        let content = "Call me Ishmael. Some years ago—never mind how long precisely.\n";
        for tokenizer in [Tokenizer::bytes(), bpe()] {
            let n = tokenizer.encode(content).len();
            for context in [1, 2, 3, 7, n - 2, n - 1] {
                check(content, &tokenizer, context);
            }
        }
    }

    #[test]
    fn what_cannot_be_windows_is_refused_with_numbers() {
        for (content, tokenizer, context, expected) in [
            (&b"abc"[..], Tokenizer::bytes(), 0, "a context of 0 tokens"),
            (b"abc", Tokenizer::bytes(), 3, "3 bytes are 3 tokens, and one sample with context 3 needs 4"),
            (b"", Tokenizer::bytes(), 1, "0 bytes are 0 tokens, and one sample with context 1 needs 2"),
            (b"abc", Tokenizer::bytes(), usize::MAX, "3 bytes are 3 tokens"),
            (b"white  whale", bpe(), 1, "12 bytes are 1 tokens, and one sample with context 1 needs 2"),
            (b"ab\xffcd", bpe(), 1, "at byte 2: 0xff is not UTF-8"),
            (b"abc\xc3", bpe(), 1, "at byte 3: 0xc3 is not UTF-8"),
        ] {
            let found = open(content, &tokenizer, context).unwrap_err().to_string();
            assert!(found.contains(expected), "{found}\nand not {expected}");
        }
        assert_eq!(open(b"ab\xffcd", &Tokenizer::bytes(), 2).unwrap().len(), 2);
        assert!(matches!(
            Text::open(Path::new("/nowhere/x.txt"), &Tokenizer::bytes(), 4),
            Err(DataError::Missing { .. })
        ));
    }
}
