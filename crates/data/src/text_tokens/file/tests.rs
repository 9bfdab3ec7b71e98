//! Ids against those that Python's `tokenizers` and `transformers` made (`fixtures/make_text_tokens.py`), and files that are none.

use std::path::PathBuf;

use polyreme_fuzz::{InFile, Random, Target, json, scale};
use serde_json::Value;

use super::*;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

#[test]
fn ids_are_those_of_the_python_libraries() {
    let expected = std::fs::read_to_string(fixture("text_tokens_expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    for (name, rows) in expected.as_object().unwrap() {
        let tokenizer = FileTokenizer::open(&fixture(&format!("{name}.json"))).unwrap();
        assert_eq!(tokenizer.padding().map(|id| id as u64), rows["padding"].as_u64());
        assert_eq!(Some(tokenizer.vocab() as u64), rows["vocab"].as_u64());
        let each = |what: &str| rows[what].as_array().unwrap().iter();
        let length = |value: &Value| value.as_u64().unwrap() as usize;
        let mut cut = 0;
        for row in each("texts") {
            let text = row[0].as_str().unwrap();
            let tokens = tokenizer.texts(&[text], length(&row[1])).unwrap();
            assert_eq!(tokens.ids, ids(&row[2]), "{name}: {row}");
            cut += usize::from(tokens.cut);
            // What is inside is what there is without special tokens.
            let plain = tokenizer.plain(text).unwrap();
            assert_eq!(tokens.cut, plain.len() + 2 > length(&row[1]), "{name}: {row}");
        }
        for row in each("pairs") {
            let texts = [row[0].as_str().unwrap(), row[1].as_str().unwrap()];
            let tokens = tokenizer.texts(&texts, length(&row[2])).unwrap();
            assert_eq!(tokens.ids, ids(&row[3]), "{name}: {row}");
        }
        for row in each("words") {
            let words: Vec<&str> = row[0].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
            let tokens = tokenizer.words(&words, length(&row[1])).unwrap();
            let firsts: Vec<Option<usize>> =
                row[3].as_array().unwrap().iter().map(|at| at.as_u64().map(|at| at as usize)).collect();
            assert_eq!((tokens.ids, tokens.firsts), (ids(&row[2]), firsts), "{name}: {row}");
        }
        assert!(cut > 0);
        assert_eq!(tokenizer.texts(&[""], 9).unwrap().ids, [] as [i32; 0]);
    }
}

#[test]
fn files_that_are_none_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (content, part) in [
        ("", "tokenizer.json` is needed"),
        ("{}", "tokenizer.json` is needed"),
        ("{\"model\": {\"type\": \"Other\"}}", "tokenizer.json` is needed"),
    ] {
        let path = folder.path().join("x.json");
        std::fs::write(&path, content).unwrap();
        let error = FileTokenizer::open(&path).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("x.json"), "{error}");
    }
    assert!(matches!(FileTokenizer::open(&folder.path().join("none.json")), Err(DataError::Missing { .. })));
}

const WORDS: [&[u8]; 24] = [
    b"WordPiece",
    b"Unigram",
    b"BPE",
    b"WordLevel",
    b"BertNormalizer",
    b"Sequence",
    b"Metaspace",
    b"ByteLevel",
    b"TemplateProcessing",
    b"unk_id",
    b"unk_token",
    b"max_input_chars_per_word",
    b"continuing_subword_prefix",
    b"special_tokens",
    b"single",
    b"pair",
    b"type_id",
    b"padding",
    b"pad_id",
    b"truncation",
    b"vocab",
    b"[CLS]",
    b"[PAD]",
    b"id",
];

#[test]
fn any_file_is_an_error_or_a_tokenizer() {
    let corpus = ["wordpiece.json", "unigram.json"].map(|name| std::fs::read(fixture(name)).unwrap());
    let mend = |input: &mut Vec<u8>, random: &mut Random| {
        let Ok(mut value) = serde_json::from_slice::<Value>(input) else { return };
        for _ in 0..random.below(4) {
            let part =
                *random.pick(&["", "normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model"]);
            let part = match part {
                part if value.get(part).is_some() => &mut value[part],
                _ => &mut value,
            };
            json::change(part, &WORDS, random);
        }
        *input = value.to_string().into_bytes();
    };
    let target = Target {
        name: "text_tokenizer",
        corpus: corpus.into(),
        words: &WORDS,
        mend: &mend,
        memory: &|len| (8 << 20) + 1024 * len,
    };
    let file = InFile::new("tokenizer.json");
    target.run(|input| {
        let tokenizer = FileTokenizer::open(file.with(input)).map_err(|e| e.to_string())?;
        let fits = |ids: &[i32]| ids.iter().all(|&id| (0..tokenizer.vocab() as i32).contains(&id));
        for text in ["", "Call me  Ishmael,\n the whale's", "\u{0}äß 🐳 12345 \u{2003}x"] {
            let found = [
                tokenizer.texts(&[text], 9),
                tokenizer.texts(&[text, "x"], 9),
                tokenizer.words(&[text, "x"], 9),
            ];
            for tokens in found.into_iter().flatten() {
                assert!(fits(&tokens.ids), "{:?}", tokens.ids);
                assert!(tokens.firsts.iter().flatten().all(|at| *at < tokens.ids.len()));
            }
        }
        Ok(format!(
            "{} {:?} {:?}",
            scale(tokenizer.vocab()),
            tokenizer.padding().is_some(),
            tokenizer.specials
        ))
    });
}
