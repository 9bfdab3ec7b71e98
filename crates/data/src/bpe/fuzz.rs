//! Any file as a tokenizer: an error, or one that encodes any text into its ids and decodes them to the same text.

use polyreme_fuzz::{InFile, Random, Target, json, scale};
use serde_json::{Value, json};

use super::tests::{fixture_json, patched};
use super::*;

const TEXTS: [&str; 4] = [
    "",
    "It's 2024: Call me  Ishmael,\n\nthe whale's friend<|endoftext|> <mask> ",
    "\u{0}\u{7f}äß 🐳\r\n\t'S 12345 \u{2003}x",
    "aaaaaaaabababab the the there",
];

/// The fixture's tokenizer with few merges: all bytes, and what these merges need.
fn small(replace: &Value) -> Vec<u8> {
    let mut file = patched(replace);
    let model = file["model"].as_object_mut().unwrap();
    let Some(merges) = model["merges"].as_array_mut() else { panic!("merges are a list") };
    merges.truncate(12);
    let joined: Vec<String> =
        merges.iter().map(|m| m[0].as_str().unwrap().to_owned() + m[1].as_str().unwrap()).collect();
    let vocab = model["vocab"].as_object_mut().unwrap();
    vocab.retain(|token, _| token.chars().count() == 1 || joined.contains(token));
    file.to_string().into_bytes()
}

const WORDS: [&[u8]; 34] = [
    b"ByteLevel",
    b"Sequence",
    b"Digits",
    b"Split",
    b"pretokenizers",
    b"Regex",
    b"pattern",
    b"behavior",
    b"Isolated",
    b"Removed",
    b"invert",
    b"individual_digits",
    b"add_prefix_space",
    b"use_regex",
    b"BPE",
    b"ignore_merges",
    b"lstrip",
    b"rstrip",
    b"single_word",
    b"normalized",
    b"special",
    b"content",
    b"id",
    b"merges",
    b"vocab",
    b"added_tokens",
    b"dropout",
    b"unk_token",
    b"type",
    b"a",
    "Ġ".as_bytes(),
    "Ġt".as_bytes(),
    "\u{144}".as_bytes(),
    b"the",
];

#[test]
fn tokenizer() {
    let expected = fixture_json("bpe_expected.json");
    let variants = expected["variants"].as_array().unwrap();
    let corpus = variants.iter().map(|variant| small(&variant["replace"])).collect();
    let mend = |input: &mut Vec<u8>, random: &mut Random| {
        let Ok(mut value) = serde_json::from_slice::<Value>(input) else { return };
        for _ in 0..random.below(4) {
            // Most values are ids of bytes, which matter least.
            let part = *random.pick(&["", "pre_tokenizer", "added_tokens", "merges", "model"]);
            let part = match part {
                "merges" if value["model"]["merges"].is_array() => &mut value["model"]["merges"],
                "" | "merges" => &mut value,
                part if value.get(part).is_some() => &mut value[part],
                _ => &mut value,
            };
            json::change(part, &WORDS, random);
        }
        if random.one_in(8) && value.is_object() {
            value["added_tokens"] =
                json!([{"content": "<|endoftext|>", "id": random.below(1 << 24), "special": true}]);
        }
        *input = value.to_string().into_bytes();
    };
    let target = Target {
        name: "tokenizer",
        corpus,
        words: &WORDS,
        mend: &mend,
        memory: &|len| (1 << 20) + 256 * len,
    };
    let file = InFile::new("tokenizer.json");
    target.run(|input| {
        let tokenizer = Tokenizer::from_file(file.with(input)).map_err(|e| e.to_string())?;
        let bpe = tokenizer.bpe.as_ref().unwrap();
        let mut plain = !bpe.prefix;
        for pass in &bpe.passes {
            TEXTS.iter().for_each(|text| pass.split(text, |part| plain &= matches!(part, Stretch::Text(_))));
        }
        for text in TEXTS {
            let ids = tokenizer.encode(text);
            assert!(ids.iter().all(|&id| (0..tokenizer.vocab() as i32).contains(&id)), "{ids:?}");
            let again = tokenizer.decode(&ids);
            assert!(!plain || again == text, "{text:?} came back as {again:?}");
        }
        Ok(format!("{} {:?} {:?} {}", bpe.prefix, bpe.rules, bpe.last_rule, scale(tokenizer.vocab())))
    });
}
