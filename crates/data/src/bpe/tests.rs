//! Against the real `tokenizers`: `fixtures/make_bpe.py` wrote the tokenizer file and the ids.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

pub(super) fn fixture_json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name)).unwrap()).unwrap()
}

/// The fixture with some entries, and some of its model's, replaced.
pub(super) fn patched(replace: &Value) -> Value {
    let mut file = fixture_json("bpe.json");
    for (name, value) in replace.as_object().unwrap() {
        if name == "model" {
            for (name, value) in value.as_object().unwrap() {
                file["model"][name] = value.clone();
            }
        } else {
            file[name] = value.clone();
        }
    }
    file
}

fn from_value(file: &Value) -> Result<Tokenizer, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, file.to_string()).unwrap();
    Tokenizer::from_file(&path)
}

#[test]
fn ids_are_those_of_the_real_tokenizers() {
    let expected = fixture_json("bpe_expected.json");
    for variant in expected["variants"].as_array().unwrap() {
        let tokenizer = from_value(&patched(&variant["replace"])).unwrap();
        assert_eq!(json!(tokenizer.vocab()), expected["vocab"]);
        for (text, ids) in
            expected["texts"].as_array().unwrap().iter().zip(variant["ids"].as_array().unwrap())
        {
            let text = text.as_str().unwrap();
            let found = tokenizer.encode(text);
            assert_eq!(json!(found), *ids, "{text:?} with {}", variant["replace"]);
        }
    }
}

#[test]
fn decoding_gives_the_text_back() {
    let tokenizer = Tokenizer::from_file(&fixture("bpe.json")).unwrap();
    for text in fixture_json("bpe_expected.json")["texts"].as_array().unwrap() {
        let text = text.as_str().unwrap();
        // These absorb the white space around them.
        if !text.contains("<mask>") && !text.contains("<pad>") {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text)), text);
        }
        assert_eq!(Tokenizer::bytes().decode(&Tokenizer::bytes().encode(text)), text);
    }
    let whale = tokenizer.encode("🐳");
    assert!(whale.len() > 1);
    assert_eq!(tokenizer.decode_bytes(&whale[..1]), "🐳".as_bytes()[..1]);
    assert_eq!(tokenizer.decode(&whale[..1]), "\u{fffd}");
    assert_eq!(tokenizer.decode(&[-1, i32::MAX, 0, 1260]), "<|endoftext|>");
    assert_eq!(Tokenizer::bytes().decode(&[104, 105, 256, -1]), "hi");
}

#[test]
fn merges_may_be_pairs_or_strings_and_a_type_may_be_missing() {
    let mut file = fixture_json("bpe.json");
    let model = file["model"].as_object_mut().unwrap();
    model.remove("type");
    for merge in model["merges"].as_array_mut().unwrap() {
        *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
    }
    let pairs = Tokenizer::from_file(&fixture("bpe.json")).unwrap();
    let text = "Call me Ishmael, the whale's friend";
    assert_eq!(from_value(&file).unwrap().encode(text), pairs.encode(text));
}

#[test]
fn what_is_not_supported_or_wrong_is_named() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false});
    let split = |regex: &str, behavior: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": false}, byte_level]})
    };
    let token =
        |content: &str, id: i64| json!([{"content": content, "id": id, "single_word": content == "one"}]);
    for (replace, expected) in [
        (json!({"normalizer": {"type": "NFC"}}), "the normalizer NFC is not supported"),
        (json!({"decoder": {"type": "WordPiece"}}), "the decoder WordPiece is not supported"),
        (json!({"pre_tokenizer": null}), "the pre_tokenizer null is not supported"),
        (json!({"pre_tokenizer": {"type": "Metaspace"}}), "the pre_tokenizer Metaspace is not supported"),
        (json!({"pre_tokenizer": {"type": "Digits"}}), "a pre_tokenizer without ByteLevel is not supported"),
        (json!({"pre_tokenizer": {"type": "Sequence"}}), "pre_tokenizer.pretokenizers is not a list"),
        (
            json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level, {"type": "Digits"}]}}),
            "the pre_tokenizer Digits after ByteLevel is not supported",
        ),
        (
            json!({"pre_tokenizer": split("\\w+", "Isolated")}),
            "Split by the expression \\w+ is not supported",
        ),
        (
            json!({"pre_tokenizer": split(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", "Removed")}),
            "Split with behavior Removed, invert false is not supported",
        ),
        (json!({"model": {"type": "WordPiece"}}), "the model WordPiece is not supported"),
        (json!({"model": {"dropout": 0.1}}), "model.dropout = 0.1 is not supported"),
        (
            json!({"model": {"end_of_word_suffix": "</w>"}}),
            "model.end_of_word_suffix = \"</w>\" is not supported",
        ),
        (json!({"model": {"vocab": {}}}), "model.vocab without the byte 0x00"),
        (json!({"model": {"vocab": {"a": -1}}}), "the id of \"a\" is -1: not a whole number below 16777216"),
        (json!({"model": {"vocab": {"a": 4294967296_i64}}}), "the id of \"a\" is 4294967296"),
        (json!({"model": {"vocab": 7}}), "model.vocab is not an object"),
        (json!({"model": {"merges": [["a", "q"]]}}), "model.merges[0] is [\"a\",\"q\"]: not two tokens"),
        (json!({"model": {"merges": ["ab"]}}), "model.merges[0] is \"ab\": not two tokens"),
        (json!({"model": {"merges": [1]}}), "model.merges[0] is 1: not two tokens"),
        (json!({"model": {"merges": 1}}), "model.merges is not a list"),
        (
            json!({"added_tokens": token("one", 3000)}),
            "single_word of the added token \"one\" is not supported",
        ),
        (json!({"added_tokens": token("new", 5)}), "\"%\" and \"new\" both have the id 5"),
        (json!({"added_tokens": token("a", 5)}), "\"a\" is 65 in the vocabulary and 5 as added token"),
        (json!({"added_tokens": token("new", -5)}), "the id of \"new\" is -5"),
        (
            json!({"added_tokens": token("new", 16_000_000)}),
            "the id of \"new\" is 16000000, and the file has 1258 tokens; number them without large gaps",
        ),
        (json!({"added_tokens": [{}]}), "an added token has no content"),
    ] {
        let found = from_value(&patched(&replace)).unwrap_err().to_string();
        assert!(found.contains(expected) && found.contains("tokenizer.json"), "{found}\nand not {expected}");
    }

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    assert!(matches!(Tokenizer::from_file(&path), Err(DataError::Missing { .. })));
    for (json, offset) in [("", 0), ("[]", 0), ("{\"a\": 1,\n \"b\" 2}", 14), ("{\"a\"", 3)] {
        fs::write(&path, json).unwrap();
        match Tokenizer::from_file(&path) {
            Err(DataError::Corrupt { offset: found, .. }) => assert_eq!(found, offset, "{json}"),
            other => panic!("{json}: {other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_text_comes_back(text in "(\\PC|[ \n\r\t']|[a-e]){0,60}") {
        for tokenizer in THREE.iter() {
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text)), &text[..]);
        }
    }
}

/// Variants of the fixture that keep all of a text.
static THREE: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let expected = fixture_json("bpe_expected.json");
    let variants = expected["variants"].as_array().unwrap();
    [0, 4, 9].map(|idx| from_value(&patched(&variants[idx]["replace"])).unwrap()).into()
});
