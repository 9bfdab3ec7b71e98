//! Reading a Hugging Face `tokenizer.json`.
//!
//! What would change the ids and is not implemented here (normalizers, other models, other expressions to split by) is an error
//! that names it, never ignored. What concerns single inputs of a model and not a corpus is ignored: `truncation`,
//! `padding`, and the tokens that a `post_processor` puts around an input.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::Bpe;
use super::added::{Added, AddedToken};
use super::merge::Merges;
use super::split::Rule;
use crate::error::DataError;

/// Ids are below this: far above any vocabulary.
const IDS_MAX: u64 = 1 << 24;
/// Ids may leave numbers out, but their table must not be far longer than the file: this many for each token, and this
/// many more.
const IDS_A_TOKEN_MAX: usize = 4;
const IDS_LEFT_OUT_MAX: usize = 1 << 15;

/// Reads a tokenizer from the text of a file; `path` is for errors.
pub(super) fn read(json: &[u8], path: &Path) -> Result<Bpe, DataError> {
    let value = serde_json::from_slice(json).map_err(|err| {
        let before: usize =
            json.split_inclusive(|&byte| byte == b'\n').take(err.line() - 1).map(<[u8]>::len).sum();
        let offset = (before + err.column().saturating_sub(1)) as u64;
        DataError::corrupt(path, offset, format!("not JSON: {err}; a Hugging Face tokenizer.json is needed"))
    })?;
    BpeSource { path, value }.read()
}

struct BpeSource<'a> {
    path: &'a Path,
    value: Value,
}

/// The steps of `pre_tokenizer`.
#[derive(Default)]
struct PreTokenizer {
    rules: Vec<Rule>,
    /// Whether ByteLevel, the last step, has been seen.
    bytes: bool,
    prefix: bool,
    last_rule: Option<Rule>,
}

impl BpeSource<'_> {
    fn read(&self) -> Result<Bpe, DataError> {
        if !self.value.is_object() {
            return Err(self.wrong("the file is not a JSON object; a Hugging Face tokenizer.json is needed"));
        }
        let normalizer = &self.value["normalizer"];
        if !normalizer.is_null() {
            return Err(self.unsupported(format!("the normalizer {}", type_of(normalizer))));
        }
        let decoder = &self.value["decoder"];
        if !decoder.is_null() && type_of(decoder) != "ByteLevel" {
            return Err(self.unsupported(format!("the decoder {}", type_of(decoder))));
        }
        let mut cuts = PreTokenizer::default();
        self.cuts(&self.value["pre_tokenizer"], &mut cuts)?;
        if !cuts.bytes {
            return Err(self.unsupported("a pre_tokenizer without ByteLevel".into()));
        }

        let ids = self.vocabulary()?;
        let merges = self.merges(&ids)?;
        let mut texts = Vec::new();
        for (token, &id) in &ids {
            self.put(&mut texts, id, bytes_of(token).unwrap_or_else(|| token.as_bytes().into()))?;
        }
        let passes = self.added(&ids, &mut texts)?;
        let whole = self.value["model"]["ignore_merges"]
            .as_bool()
            .unwrap_or(false)
            .then(|| ids.iter().filter_map(|(token, &id)| Some((bytes_of(token)?, id))).collect());
        let PreTokenizer { rules, prefix, last_rule, .. } = cuts;
        Ok(Bpe { rules, prefix, last_rule, passes, merges, whole, texts })
    }

    /// Adds the steps of one pre-tokenizer to `cuts`.
    fn cuts(&self, step: &Value, cuts: &mut PreTokenizer) -> Result<(), DataError> {
        let kind = type_of(step);
        if cuts.bytes {
            return Err(self.unsupported(format!("the pre_tokenizer {kind} after ByteLevel")));
        }
        let flag = |name: &str, default: bool| step[name].as_bool().unwrap_or(default);
        match kind {
            "Sequence" => {
                let steps = step["pretokenizers"].as_array();
                for step in steps.ok_or_else(|| self.wrong("pre_tokenizer.pretokenizers is not a list"))? {
                    self.cuts(step, cuts)?;
                }
            }
            "ByteLevel" => {
                cuts.bytes = true;
                cuts.prefix = flag("add_prefix_space", true);
                cuts.last_rule = flag("use_regex", true).then_some(Rule::Gpt2);
            }
            "Digits" => cuts.rules.push(Rule::Digits { each: flag("individual_digits", false) }),
            "Split" => {
                let Some(regex) = step["pattern"]["Regex"].as_str() else {
                    return Err(self.unsupported(format!("Split by the pattern {}", step["pattern"])));
                };
                let Some(rule) = Rule::of_regex(regex) else {
                    return Err(self.unsupported(format!("Split by the expression {regex}")));
                };
                // Our expressions match every character, so keeping the matches and isolating them are the same.
                match (step["behavior"].as_str().unwrap_or(""), flag("invert", false)) {
                    ("Isolated", _) | ("Removed", true) => cuts.rules.push(rule),
                    (behavior, invert) => {
                        return Err(
                            self.unsupported(format!("Split with behavior {behavior}, invert {invert}"))
                        );
                    }
                }
            }
            _ => return Err(self.unsupported(format!("the pre_tokenizer {kind}"))),
        }
        Ok(())
    }

    /// Reads `model.vocab`, after checking the settings of the model.
    fn vocabulary(&self) -> Result<HashMap<&str, u32>, DataError> {
        let model = &self.value["model"];
        // Early files have no type; only BPE has merges.
        let kind = if model["type"].is_null() && model["merges"].is_array() { "BPE" } else { type_of(model) };
        if kind != "BPE" {
            return Err(self.unsupported(format!("the model {kind}")));
        }
        for name in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if model[name].as_str().is_some_and(|text| !text.is_empty()) {
                return Err(self.unsupported(format!("model.{name} = {}", model[name])));
            }
        }
        if model["dropout"].as_f64().is_some_and(|rate| rate != 0.0) {
            return Err(self.unsupported(format!("model.dropout = {}", model["dropout"])));
        }
        let vocab = model["vocab"].as_object().ok_or_else(|| self.wrong("model.vocab is not an object"))?;
        vocab.iter().map(|(token, id)| Ok((token.as_str(), self.id(token, id)?))).collect()
    }

    fn merges(&self, ids: &HashMap<&str, u32>) -> Result<Merges, DataError> {
        let mut bytes = [0; 256];
        for byte in 0..=255 {
            let symbol = String::from(char_of(byte));
            bytes[usize::from(byte)] = *ids.get(symbol.as_str()).ok_or_else(|| {
                self.unsupported(format!(
                    "model.vocab without the byte 0x{byte:02x} ({symbol:?}; train with initial_alphabet = ByteLevel.alphabet())"
                ))
            })?;
        }
        let mut merges = Merges::new(bytes);
        let list = self.value["model"]["merges"]
            .as_array()
            .ok_or_else(|| self.wrong("model.merges is not a list"))?;
        for (rank, merge) in list.iter().enumerate() {
            let halves = match merge {
                Value::String(text) => text.split_once(' '),
                Value::Array(pair) => match &pair[..] {
                    [Value::String(left), Value::String(right)] => Some((left.as_str(), right.as_str())),
                    _ => None,
                },
                _ => None,
            };
            let found = halves.and_then(|(left, right)| {
                let joined = format!("{left}{right}");
                Some((*ids.get(left)?, *ids.get(right)?, *ids.get(joined.as_str())?))
            });
            let (left, right, id) = found.ok_or_else(|| {
                self.wrong(format!(
                    "model.merges[{rank}] is {merge}: not two tokens of the vocabulary that make a third"
                ))
            })?;
            let rank = u32::try_from(rank).map_err(|_| self.wrong("model.merges is too long"))?;
            merges.insert(left, right, rank, id);
        }
        Ok(merges)
    }

    /// The added tokens, in the two passes in which they are looked for: those that a normalizer must not touch, then the
    /// rest. Their texts are added to the table as they are.
    fn added(&self, ids: &HashMap<&str, u32>, texts: &mut Vec<Box<[u8]>>) -> Result<[Added; 2], DataError> {
        let mut passes = [Vec::new(), Vec::new()];
        let none = Vec::new();
        for token in self.value["added_tokens"].as_array().unwrap_or(&none) {
            let content =
                token["content"].as_str().ok_or_else(|| self.wrong("an added token has no content"))?;
            if content.is_empty() {
                continue;
            }
            let id = self.id(content, &token["id"])?;
            let flag = |name: &str| token[name].as_bool().unwrap_or(false);
            if flag("single_word") {
                return Err(self.unsupported(format!("single_word of the added token {content:?}")));
            }
            match ids.get(content) {
                None => self.put(texts, id, content.as_bytes().into())?,
                Some(&same) if same == id => texts[id as usize] = content.as_bytes().into(),
                Some(other) => {
                    return Err(self
                        .wrong(format!("{content:?} is {other} in the vocabulary and {id} as added token")));
                }
            }
            let (lstrip, rstrip) = (flag("lstrip"), flag("rstrip"));
            let normalized = token["normalized"].as_bool().unwrap_or(!flag("special"));
            passes[usize::from(normalized)].push(AddedToken { content: content.into(), id, lstrip, rstrip });
        }
        Ok(passes.map(Added::new))
    }

    fn id(&self, token: &str, id: &Value) -> Result<u32, DataError> {
        match id.as_u64() {
            Some(id) if id < IDS_MAX => {
                let vocab = self.value["model"]["vocab"].as_object().map_or(0, serde_json::Map::len);
                let n = vocab + self.value["added_tokens"].as_array().map_or(0, Vec::len);
                if id as usize >= IDS_LEFT_OUT_MAX + IDS_A_TOKEN_MAX * n {
                    return Err(self.wrong(format!(
                        "the id of {token:?} is {id}, and the file has {n} tokens; number them without large gaps"
                    )));
                }
                Ok(id as u32)
            }
            _ => Err(self.wrong(format!("the id of {token:?} is {id}: not a whole number below {IDS_MAX}"))),
        }
    }

    /// Adds the text of an id to the table; ids in between may have none.
    fn put(&self, texts: &mut Vec<Box<[u8]>>, id: u32, text: Box<[u8]>) -> Result<(), DataError> {
        let idx = id as usize;
        if texts.len() <= idx {
            texts.resize(idx + 1, Box::default());
        }
        if !texts[idx].is_empty() && texts[idx] != text {
            let (first, second) = (String::from_utf8_lossy(&texts[idx]), String::from_utf8_lossy(&text));
            return Err(self.wrong(format!("{first:?} and {second:?} both have the id {id}")));
        }
        texts[idx] = text;
        Ok(())
    }

    fn wrong(&self, why: impl Into<String>) -> DataError {
        DataError::corrupt(self.path, 0, why)
    }

    fn unsupported(&self, what: String) -> DataError {
        let path = self.path.display();
        DataError::Setting {
            why: format!(
                "{path}: {what} is not supported; use a byte-level BPE tokenizer of the GPT-2 family"
            ),
        }
    }
}

/// The `type` of a JSON value; a description of the value if it has none.
fn type_of(value: &Value) -> &str {
    match value {
        Value::Null => "null",
        _ => value["type"].as_str().unwrap_or("without a type"),
    }
}

/// The character that stands for a byte in a vocabulary: printable Latin-1 stands for itself, the rest is mapped from 256 on.
fn char_of(byte: u8) -> char {
    match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            let n_before = match byte {
                0..=0x20 => byte,
                0x7f..=0xa0 => byte - 0x7f + 0x21,
                _ => 0x43,
            };
            char::from_u32(256 + u32::from(n_before)).expect("256 to 323 are characters")
        }
    }
}

/// The bytes of a token, if it is written in characters that stand for bytes.
fn bytes_of(token: &str) -> Option<Box<[u8]>> {
    token
        .chars()
        .map(|c| match u32::from(c) {
            code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
            code @ 0x100..=0x120 => Some((code - 0x100) as u8),
            code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
            0x143 => Some(0xad),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_its_character() {
        for byte in 0..=255 {
            let found = bytes_of(&char_of(byte).to_string());
            assert_eq!(found.as_deref(), Some(&[byte][..]), "{byte}");
        }
        assert_eq!((char_of(b' '), char_of(b'\n'), char_of(0x7f), char_of(0xad)), ('Ġ', 'Ċ', 'ġ', 'Ń'));
        assert_eq!(bytes_of("a b"), None);
        assert_eq!(bytes_of("a\u{144}"), None);
    }
}
