//! CIFAR-10 and CIFAR-100 in their binary version: files of records, each a label (CIFAR-100: a coarse one and a fine
//! one, of which the fine one is the class) and an image of 32x32 in three planes. The pickled Python version is not
//! read: it is a format that carries code.

use std::fs;
use std::path::{Path, PathBuf};

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::map::{self, Bytes};
use crate::spec::{Features, Layout, Spec, Target};

const SIDE: usize = 32;
const IMAGE_BYTES: usize = 3 * SIDE * SIDE;
const COARSE_CLASSES: usize = 20;

/// Which of the two sets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CifarKind {
    /// CIFAR-10, with ten classes.
    Ten,
    /// CIFAR-100, with a hundred classes.
    Hundred,
}

/// A CIFAR set: images with labels.
#[derive(Debug)]
pub struct Cifar {
    spec: Spec,
    kind: CifarKind,
    /// Files with the number of their first record.
    files: Vec<(usize, Bytes)>,
    /// The labels, checked when opened; kept contiguous because records lie a page apart.
    labels: Vec<u8>,
}

/// Where the files of a set are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CifarFiles {
    /// Which set it is.
    pub kind: CifarKind,
    /// The training set, in order.
    pub train: Vec<PathBuf>,
    /// The test set, if there is one.
    pub test: Option<PathBuf>,
    /// The names of the classes; empty if their file is missing.
    pub names: Vec<String>,
}

impl CifarKind {
    /// How many classes.
    pub fn classes(self) -> usize {
        match self {
            CifarKind::Ten => 10,
            CifarKind::Hundred => 100,
        }
    }

    /// Bytes before the image.
    fn label_bytes(self) -> usize {
        match self {
            CifarKind::Ten => 1,
            CifarKind::Hundred => 2,
        }
    }

    fn record_bytes(self) -> usize {
        self.label_bytes() + IMAGE_BYTES
    }
}

impl Cifar {
    /// Opens files, one after another as one set.
    pub fn open<P: AsRef<Path>>(kind: CifarKind, paths: &[P]) -> Result<Cifar, DataError> {
        let (mut files, mut labels) = (Vec::new(), Vec::new());
        for path in paths {
            let bytes = map::open(path.as_ref())?;
            let first = labels.len();
            read_labels(kind, path.as_ref(), &bytes, &mut labels)?;
            files.push((first, bytes));
        }
        let features = Features::Image { channels: 3, height: SIDE, width: SIDE, layout: Layout::Planes };
        let target = Target::Class { classes: kind.classes(), names: Vec::new() };
        Ok(Cifar { spec: Spec { features, target }, kind, files, labels })
    }

    /// The same with names for the classes: as many as there are, or none.
    pub fn with_names(mut self, names: Vec<String>) -> Result<Cifar, DataError> {
        let classes = self.kind.classes();
        if !names.is_empty() && names.len() != classes {
            return Err(DataError::Setting { why: format!("{} names for {classes} classes", names.len()) });
        }
        self.spec.target = Target::Class { classes, names };
        Ok(self)
    }
}

impl Dataset for Cifar {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn fetch<'a>(&'a self, idx: usize, _scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let (first, bytes) = &self.files[self.files.partition_point(|(first, _)| *first <= idx) - 1];
        let at = (idx - first) * self.kind.record_bytes() + self.kind.label_bytes();
        let label = Label::Class(self.labels[idx] as usize);
        Ok(Fetched { values: Values::U8(&bytes[at..][..IMAGE_BYTES]), label })
    }

    fn intact(&self) -> Result<(), DataError> {
        self.files.iter().try_for_each(|(_, bytes)| bytes.intact())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(self.labels[idx] as usize))
    }
}

/// Finds the files of a set in `folder`, or in the folder inside it that the set's archive unpacks to.
pub fn find(folder: &Path) -> Result<CifarFiles, DataError> {
    for inside in ["", "cifar-10-batches-bin", "cifar-100-binary"] {
        let folder = if inside.is_empty() { folder.to_path_buf() } else { folder.join(inside) };
        let at = |name: &str| folder.join(name);
        let test_at = |name: &str| Some(at(name)).filter(|p| p.is_file());
        if at("data_batch_1.bin").is_file() {
            let train: Vec<PathBuf> = (1..=5).map(|i| at(&format!("data_batch_{i}.bin"))).collect();
            if let Some(absent) = train.iter().find(|p| !p.is_file()) {
                let hint = "the other batches are there; unpack the archive again".into();
                return Err(DataError::Missing { path: absent.clone(), hint });
            }
            let names = names(&at("batches.meta.txt"), CifarKind::Ten)?;
            return Ok(CifarFiles { kind: CifarKind::Ten, train, test: test_at("test_batch.bin"), names });
        }
        if at("train.bin").is_file() {
            let names = names(&at("fine_label_names.txt"), CifarKind::Hundred)?;
            return Ok(CifarFiles {
                kind: CifarKind::Hundred,
                train: vec![at("train.bin")],
                test: test_at("test.bin"),
                names,
            });
        }
    }
    let hint =
        "give a folder with CIFAR's binary version: data_batch_1.bin .. data_batch_5.bin, or train.bin";
    Err(DataError::Missing { path: folder.join("data_batch_1.bin"), hint: hint.into() })
}

/// The names in a file with one name per line; none if there is no such file.
fn names(path: &Path, kind: CifarKind) -> Result<Vec<String>, DataError> {
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).map_err(|e| DataError::io(path, e))?;
    let names: Vec<String> =
        text.lines().map(str::trim).filter(|l| !l.is_empty()).map(String::from).collect();
    if names.len() != kind.classes() {
        let why =
            format!("{} names for {} classes; delete the file to do without", names.len(), kind.classes());
        return Err(DataError::corrupt(path, 0, why));
    }
    Ok(names)
}

fn read_labels(kind: CifarKind, path: &Path, bytes: &[u8], labels: &mut Vec<u8>) -> Result<(), DataError> {
    let record_bytes = kind.record_bytes();
    if bytes.is_empty() || !bytes.len().is_multiple_of(record_bytes) {
        let why = format!(
            "the file ends here, after {} records of {record_bytes} bytes and {} bytes; fetch it again",
            bytes.len() / record_bytes,
            bytes.len() % record_bytes
        );
        return Err(DataError::corrupt(path, bytes.len() as u64, why));
    }
    for (i, record) in bytes.chunks_exact(record_bytes).enumerate() {
        let limits: &[(&str, usize)] = match kind {
            CifarKind::Ten => &[("label", 10)],
            CifarKind::Hundred => &[("coarse label", COARSE_CLASSES), ("label", 100)],
        };
        for (k, &(what, classes)) in limits.iter().enumerate() {
            if record[k] as usize >= classes {
                let why = format!("{what} {} of record {i}, but there are {classes} classes", record[k]);
                return Err(DataError::corrupt(path, (i * record_bytes + k) as u64, why));
            }
        }
        labels.push(record[kind.label_bytes() - 1]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::damage;

    /// `n` records; record `i` of file `file` has label `i`, and pixels `10 * file + i`.
    fn records(kind: CifarKind, file: u8, n: u8) -> Vec<u8> {
        let record = |i: u8| {
            let coarse = if kind == CifarKind::Hundred { vec![19] } else { vec![] };
            [coarse, vec![i], vec![10 * file + i; IMAGE_BYTES]].concat()
        };
        (0..n).flat_map(record).collect()
    }

    fn ten(folder: &Path) {
        for file in 1..=5u8 {
            fs::write(folder.join(format!("data_batch_{file}.bin")), records(CifarKind::Ten, file, 1 + file))
                .unwrap();
        }
        fs::write(folder.join("test_batch.bin"), records(CifarKind::Ten, 6, 1)).unwrap();
    }

    #[test]
    fn ten_is_read_across_its_files() {
        let folder = tempfile::tempdir().unwrap();
        ten(folder.path());
        let found = find(folder.path()).unwrap();
        assert_eq!((found.kind, found.train.len(), found.names.len()), (CifarKind::Ten, 5, 0));
        let set = Cifar::open(found.kind, &found.train).unwrap();
        assert_eq!(set.len(), 2 + 3 + 4 + 5 + 6);
        damage::read_all(&set).unwrap();
        let mut scratch = Scratch::default();
        for (idx, pixel, label) in [(0, 10, 0), (1, 11, 1), (2, 20, 0), (4, 22, 2), (19, 55, 5)] {
            let fetched = set.fetch(idx, &mut scratch).unwrap();
            assert_eq!(fetched, Fetched { values: Values::U8(&[pixel; 3072]), label: Label::Class(label) });
        }
        assert_eq!(Cifar::open(found.kind, &[found.test.unwrap()]).unwrap().len(), 1);
    }

    #[test]
    fn hundred_takes_the_fine_label_and_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("cifar-100-binary");
        fs::create_dir(&inside).unwrap();
        fs::write(inside.join("train.bin"), records(CifarKind::Hundred, 0, 60)).unwrap();
        let names: Vec<String> = (0..100).map(|i| format!("name{i}")).collect();
        fs::write(inside.join("fine_label_names.txt"), names.join("\n") + "\n\n").unwrap();
        let found = find(folder.path()).unwrap();
        assert_eq!((found.kind, &found.test, &found.names), (CifarKind::Hundred, &None, &names));
        let set = Cifar::open(found.kind, &found.train).unwrap().with_names(found.names).unwrap();
        assert_eq!(set.spec().target, Target::Class { classes: 100, names });
        assert_eq!(set.class(57).unwrap(), Some(57));
        damage::read_all(&set).unwrap();
        assert!(set.with_names(vec!["one".into()]).is_err());
    }

    #[test]
    fn bad_files_are_errors_with_file_and_offset() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.bin");
        let check = |kind, content: &[u8], want: &str| {
            fs::write(&path, content).unwrap();
            let error = Cifar::open(kind, &[&path]).expect_err(want).to_string();
            assert!(error.contains(&format!("file.bin: at byte {want}")), "{error:?} lacks {want:?}");
        };
        let good = records(CifarKind::Ten, 1, 3);
        let with = |kind, at: usize, byte| {
            let mut bytes = records(kind, 1, 3);
            bytes[at] = byte;
            bytes
        };
        check(CifarKind::Ten, b"", "0: the file ends here, after 0 records");
        check(
            CifarKind::Ten,
            &good[..5000],
            "5000: the file ends here, after 1 records of 3073 bytes and 1927 bytes",
        );
        check(CifarKind::Ten, &[&good[..], b"x"].concat(), "9220: the file ends here, after 3 records");
        check(CifarKind::Hundred, &good, "9219: the file ends here, after 2 records of 3074 bytes");
        check(
            CifarKind::Ten,
            &with(CifarKind::Ten, 3073, 10),
            "3073: label 10 of record 1, but there are 10 classes",
        );
        check(CifarKind::Hundred, &with(CifarKind::Hundred, 6148, 20), "6148: coarse label 20 of record 2");
        check(CifarKind::Hundred, &with(CifarKind::Hundred, 3075, 100), "3075: label 100 of record 1");
        damage::each(&good, 300, &path, || damage::read_all(&Cifar::open(CifarKind::Ten, &[&path])?));
    }

    #[test]
    fn half_a_set_is_not_a_set() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            find(folder.path())
                .unwrap_err()
                .to_string()
                .contains("data_batch_1.bin: not found; give a folder")
        );
        ten(folder.path());
        fs::write(folder.path().join("batches.meta.txt"), "airplane\nbird\n").unwrap();
        let error = find(folder.path()).unwrap_err().to_string();
        assert!(error.contains("batches.meta.txt: at byte 0: 2 names for 10 classes"), "{error}");
        fs::remove_file(folder.path().join("data_batch_3.bin")).unwrap();
        let error = find(folder.path()).unwrap_err().to_string();
        assert!(error.contains("data_batch_3.bin: not found; the other batches are there"), "{error}");
    }
}
