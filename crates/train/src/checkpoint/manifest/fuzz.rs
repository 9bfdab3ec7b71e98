//! Any text as a manifest: an error, or one that is the same when it is written and read again.

use polyreme_fuzz::{Random, Target, json, scale};
use serde_json::{Value, json};

use super::tests::manifest;
use super::*;

const WORDS: [&[u8]; 20] = [
    b"format",
    b"step",
    b"epoch",
    b"model_id",
    b"files",
    b"metrics",
    b"progress",
    b"job",
    b"name",
    b"bytes",
    b"tensors",
    b"blake3",
    b"checksum",
    b"NaN",
    b"inf",
    b"-inf",
    b"x.safetensors",
    b"../x.safetensors",
    b",\n  \"checksum\": \"",
    b"}\n}\n",
];

/// Changes the text, or what is in it, and seals it again.
fn mend(input: &mut Vec<u8>, random: &mut Random) {
    let Ok(text) = str::from_utf8(input) else { return };
    let body = text.rfind(SEAL).map_or(text, |at| &text[..at]).to_owned();
    let body = match serde_json::from_str::<Value>(&format!("{body}\n}}")) {
        Ok(mut value) if !random.one_in(4) => {
            for _ in 0..random.below(4) {
                json::change(&mut value, &WORDS, random);
            }
            let text = serde_json::to_string_pretty(&value).unwrap();
            text.trim_end_matches(['}', '\n']).to_owned()
        }
        _ => body,
    };
    *input = format!("{body}{}", seal(&body)).into_bytes();
}

#[test]
fn manifest_file() {
    let progress =
        json!({"best": {"value": 0.5, "step": 3}, "history": [1, 2.5e-3, null, "word"], "done": false});
    let many = [("loss", 0.25), ("nan", f64::NAN), ("inf", f64::NEG_INFINITY)]
        .map(|(name, x)| (name.to_string(), x));
    let mut two = manifest(many.to_vec(), progress);
    two.files.push(FileEntry { name: "optimizer.safetensors".into(), ..two.files[0].clone() });
    let corpus = [manifest(vec![], json!({})), two].map(|m| m.render().unwrap().into_bytes());
    let target = Target {
        name: "manifest",
        corpus: corpus.into(),
        words: &WORDS,
        mend: &mend,
        memory: &|len| (64 << 10) + 256 * len,
    };
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = folder.path().join(MANIFEST_FILE);
    let read = |text: &[u8]| {
        std::fs::write(&path, text).unwrap();
        Manifest::read(folder.path())
    };
    target.run(|input| {
        let manifest = read(input).map_err(|e| e.to_string().replace(folder.path().to_str().unwrap(), ""))?;
        assert!(manifest.format <= FORMAT && manifest.files.iter().all(|file| is_plain(&file.name)));
        let text = manifest.render().unwrap();
        // As text, because numbers may be NaN.
        assert_eq!(read(text.as_bytes()).unwrap().render().unwrap(), text);
        let names = ["loss", "x"].map(|name| manifest.metric(name).is_some());
        Ok(format!("{names:?} {} {}", scale(manifest.files.len()), scale(manifest.n_bytes() as usize)))
    });
}
