//! `manifest.json`: what a checkpoint holds, with a checksum over every file and over itself.
//!
//! It is plain JSON. Its last field, alone on its line, is the checksum of all bytes before that line, so that a
//! manifest that was cut off or changed is found without a second file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{CheckpointError, FORMAT, TensorShape};

/// The manifest's name in a checkpoint's folder.
pub(super) const MANIFEST_FILE: &str = "manifest.json";
/// No manifest is longer; the loop's memory is some kilobytes.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// What a checkpoint holds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the layout: [`FORMAT`].
    pub format: u64,
    /// Steps done.
    pub step: u64,
    /// Epochs done.
    pub epoch: u64,
    /// [`model_id`] of the model's tensors.
    pub model_id: String,
    /// The other files.
    pub files: Vec<FileEntry>,
    /// Metrics at that moment.
    #[serde(with = "numbers")]
    pub metrics: Vec<(String, f64)>,
    /// Whatever the loop remembers.
    pub progress: serde_json::Value,
    /// The job, as TOML.
    pub job: String,
}

/// A file of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// How many tensors it has.
    pub tensors: u64,
    /// BLAKE3 of its bytes, in hex.
    pub blake3: String,
}

/// What tells one model's checkpoint from another's: BLAKE3 over names and dims, sorted, so that the order in which
/// tensors lie does not matter.
pub fn model_id<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> String {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    for (name, dims) in tensors {
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        hasher.update(&(dims.len() as u64).to_le_bytes());
        for dim in dims {
            hasher.update(&(*dim as u64).to_le_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

impl Manifest {
    /// Whether this is a checkpoint of the model with these tensors.
    pub fn is_of(&self, model: &[TensorShape]) -> bool {
        self.model_id == model_id(model.iter().map(|t| (t.name.as_str(), t.dims.as_slice())))
    }

    /// The metric of that name.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(metric, _)| metric == name).map(|(_, value)| *value)
    }

    /// Bytes of all files, as far as they can be counted: what a manifest claims is only compared when files are read.
    pub fn n_bytes(&self) -> u64 {
        self.files.iter().fold(0, |n, file| n.saturating_add(file.bytes))
    }

    /// The manifest's text.
    pub(super) fn render(&self) -> Result<String, CheckpointError> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| CheckpointError::Snapshot { file: MANIFEST_FILE.into(), why: e.to_string() })?;
        let body = text.trim_end_matches(['}', '\n']);
        Ok(format!("{body}{}", seal(body)))
    }

    /// Reads the manifest of the checkpoint in `folder`.
    pub fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let path = folder.join(MANIFEST_FILE);
        let reading = |e| CheckpointError::reading(&path, e);
        let mut text = Vec::new();
        File::open(&path)
            .map_err(reading)?
            .take(MANIFEST_BYTES_MAX + 1)
            .read_to_end(&mut text)
            .map_err(reading)?;
        let half = |why: String| CheckpointError::HalfWritten { path: path.clone(), why };
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(half("too long".into()));
        }
        let value: serde_json::Value = serde_json::from_slice(&text).map_err(|e| half(e.to_string()))?;
        // The version comes first: how a newer format guards itself is not known here.
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(found) if found > FORMAT => {
                return Err(CheckpointError::NewerFormat { path, found, known: FORMAT });
            }
            Some(_) => {}
            None => return Err(half("it has no format".into())),
        }
        let text = str::from_utf8(&text).map_err(|e| half(e.to_string()))?;
        let body = text.rfind(SEAL).map_or("", |at| &text[..at]);
        if text[body.len()..] != seal(body) {
            return Err(half("its own checksum does not hold".into()));
        }
        let manifest: Manifest = serde_json::from_value(value).map_err(|e| half(e.to_string()))?;
        match manifest.files.iter().find(|file| !is_plain(&file.name)) {
            Some(file) => Err(half(format!("{:?} cannot be a file's name", file.name))),
            None => Ok(manifest),
        }
    }
}

/// Whether a shard's name stays in its folder and says what it is.
pub(super) fn is_plain(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

const SEAL: &str = ",\n  \"checksum\": \"";

/// The end of a manifest: its last field.
fn seal(body: &str) -> String {
    format!("{SEAL}{}\"\n}}\n", blake3::hash(body.as_bytes()).to_hex())
}

/// Metrics as pairs in their order. JSON has no NaN and no infinities: those are written as words.
pub(crate) mod numbers {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Number {
        Finite(f64),
        Word(String),
        /// What earlier versions wrote for a number that is not finite.
        Lost(()),
    }

    pub(crate) fn serialize<S: Serializer>(metrics: &[(String, f64)], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(metrics.iter().map(|(name, value)| match value.is_finite() {
            true => (name, Number::Finite(*value)),
            false => (name, Number::Word(value.to_string())),
        }))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(String, f64)>, D::Error> {
        let pairs: Vec<(String, Number)> = Vec::deserialize(from)?;
        let number = |number| match number {
            Number::Finite(value) => Ok(value),
            Number::Word(word) => word.parse().map_err(serde::de::Error::custom),
            Number::Lost(()) => Ok(f64::NAN),
        };
        pairs.into_iter().map(|(name, value)| Ok((name, number(value)?))).collect()
    }
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(super) fn manifest(metrics: Vec<(String, f64)>, progress: serde_json::Value) -> Manifest {
        let files = vec![FileEntry {
            name: "model.safetensors".into(),
            bytes: 12,
            tensors: 1,
            blake3: blake3::hash(b"x").to_hex().to_string(),
        }];
        let (model_id, job) = (model_id([]), "name = \"x\"\n}\n".into());
        Manifest { format: FORMAT, step: 5, epoch: 1, model_id, files, metrics, progress, job }
    }

    fn written(text: &[u8]) -> Result<Manifest, CheckpointError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(MANIFEST_FILE), text).unwrap();
        Manifest::read(folder.path())
    }

    proptest! {
        #[test]
        fn numbers_come_back_exactly(bits in any::<u64>(), n in any::<u64>(), name in ".*") {
            let x = f64::from_bits(bits);
            let progress = serde_json::json!({ "x": x, "n": n, "name": name, "}": [{}] });
            let put = manifest(vec![(name, x), ("z".into(), f64::INFINITY)], progress);
            let got = written(put.render().unwrap().as_bytes()).unwrap();
            prop_assert_eq!(&got.progress, &put.progress);
            prop_assert!(got.metrics[0].1 == x || x.is_nan() && got.metrics[0].1.is_nan());
            prop_assert_eq!(got.metrics[1].1, f64::INFINITY);
        }
    }

    #[test]
    fn a_cut_or_changed_manifest_is_found() {
        let whole = manifest(vec![("a".into(), 0.5)], serde_json::json!({})).render().unwrap().into_bytes();
        assert!(written(&whole).is_ok());
        for n in 0..whole.len() {
            assert!(matches!(written(&whole[..n]), Err(CheckpointError::HalfWritten { .. })), "cut at {n}");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            // A flip in the format's number may look like another version; it is refused all the same.
            assert!(written(&changed).is_err(), "flipped at {at}");
        }
        assert!(matches!(written(b"{\"format\": 2}"), Err(CheckpointError::NewerFormat { found: 2, .. })));
        assert!(matches!(written(b"{}"), Err(CheckpointError::HalfWritten { .. })));
    }

    #[test]
    fn a_checkpoint_that_claims_more_bytes_than_can_be_counted_is_listed_without_a_crash() {
        let mut manifest = manifest(vec![], serde_json::json!({}));
        manifest.files.push(FileEntry { bytes: u64::MAX, ..manifest.files[0].clone() });
        let read = written(manifest.render().unwrap().as_bytes()).unwrap();
        assert_eq!(read.n_bytes(), u64::MAX);
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["../x.safetensors", "/x.safetensors", ".x.safetensors", "x", "a/b.safetensors", ""] {
            let mut manifest = manifest(vec![], serde_json::json!({}));
            manifest.files[0].name = name.into();
            let read = written(manifest.render().unwrap().as_bytes());
            assert!(matches!(read, Err(CheckpointError::HalfWritten { .. })), "{name}");
        }
    }

    #[test]
    fn a_model_is_its_names_and_dims() {
        let of = |tensors: &[(&'static str, &'static [usize])]| model_id(tensors.iter().copied());
        assert_eq!(of(&[("a", &[1]), ("b", &[2])]), of(&[("b", &[2]), ("a", &[1])]));
        assert_ne!(of(&[("a", &[1]), ("b", &[2])]), of(&[("a", &[2]), ("b", &[1])]));
        assert_ne!(of(&[("a", &[1, 2])]), of(&[("a", &[2, 1])]));
        assert_ne!(of(&[("a", &[])]), of(&[]));
    }
}
