//! What tells the data of a run from others: a run that goes on with data that changed is another run, and says so.
//!
//! Cheap rather than complete: the number of samples of each set, how the validation part was split off, and of the files
//! their names, their lengths, and a checksum of the content: of all of it up to `WHOLE_BYTES`, else of `BLOCKS` blocks
//! spread evenly from the first byte to the last. Of a folder of images, all names and the content of `IMAGES` files of
//! each part. Of sets that a program brings, or that are made up, the numbers of samples alone. Where files lie does not
//! matter.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::sets::Sets;

/// A file of so many bytes is read whole.
const WHOLE_BYTES: u64 = 16 << 20;
/// Of a longer one, so many blocks of so many bytes.
const BLOCKS: u64 = 128;
const BLOCK_BYTES: usize = 64 << 10;
/// Of a folder of images, so many.
pub(crate) const IMAGES: usize = 64;
/// More files than this are one entry.
const FILES_MAX: usize = 32;

/// What the data of a run were.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Fingerprint {
    entries: Vec<DataEntry>,
}

/// Something of the data that can change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct DataEntry {
    /// What it is, such as a file's name.
    what: String,
    /// How much of it there is, such as `300 bytes`.
    is: String,
    /// BLAKE3 of its content; empty where there is none.
    blake3: String,
}

/// Where sets come from.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// Their files; of images, some.
    pub files: Vec<PathBuf>,
    /// Of images: how many there are, and BLAKE3 of all their names.
    pub names: Option<(usize, String)>,
    /// Their digests in place of the files, if other hosts have some of them.
    pub told: Option<Vec<ToldFile>>,
    /// BLAKE3 of the files' names in the order of the set, where that depends on which rank has them.
    pub order: Option<String>,
    /// How the validation part was split off, if it was.
    pub split: Option<String>,
}

/// What is known of a file that another host may have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ToldFile {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// BLAKE3 of what is read of it, in hexadecimal digits.
    pub blake3: String,
}

impl Fingerprint {
    /// Of opened sets.
    pub fn of(sets: &Sets) -> Result<Fingerprint, TrainError> {
        let entry = |what: &str, is: String| DataEntry { what: what.into(), is, blake3: String::new() };
        let parts = [
            ("training set", Some(&sets.train)),
            ("validation set", sets.validation.as_ref()),
            ("test set", sets.test.as_ref()),
        ];
        let mut entries = Vec::new();
        for (what, set) in parts {
            entries.push(entry(what, set.map_or("absent".into(), |set| count(set.len() as u64, "sample"))));
        }
        let Origin { files, names, told, order, split } = &sets.origin;
        entries.extend(split.as_ref().map(|split| entry("validation split", split.clone())));
        if let Some((n, blake3)) = names {
            let is = count(*n as u64, "name");
            entries.push(DataEntry { what: "images".into(), is, blake3: blake3.clone() });
        }
        if let Some(order) = order {
            let (what, is) = ("order of files".into(), "by the ranks that have them".into());
            entries.push(DataEntry { what, is, blake3: order.clone() });
        }
        let mut read = told.clone().unwrap_or_default();
        for path in files {
            let (bytes, hash) = file(path).map_err(|source| TrainError::io(path, source))?;
            read.push(ToldFile { name: name(path), bytes, blake3: hash.to_hex().to_string() });
        }
        if names.is_some() || read.len() > FILES_MAX {
            let mut all = blake3::Hasher::new();
            let mut bytes = 0;
            for ToldFile { name, bytes: n, blake3 } in &read {
                let hash = blake3::Hash::from_hex(blake3).map_or([0; 32], |hash| *hash.as_bytes());
                all.update(name.as_bytes()).update(&n.to_le_bytes()).update(&hash);
                bytes += n;
            }
            let is = format!("{} of {}", count(read.len() as u64, "file"), count(bytes, "byte"));
            entries.push(DataEntry {
                what: "content".into(),
                is,
                blake3: all.finalize().to_hex().to_string(),
            });
        } else {
            for ToldFile { name, bytes, blake3 } in read {
                entries.push(DataEntry { what: name, is: count(bytes, "byte"), blake3 });
            }
        }
        Ok(Fingerprint { entries })
    }

    /// What is not as it was `before`, in words; empty if everything is.
    pub fn changes(&self, before: &Fingerprint) -> Vec<String> {
        let mut changes = Vec::new();
        let find = |entries: &[DataEntry], like: &DataEntry, nth: usize| {
            entries.iter().filter(|e| e.what == like.what).nth(nth).cloned()
        };
        // Files of one name (in the folders of different parts) are told apart by their order.
        let nth = |entries: &[DataEntry], i: usize| {
            entries[..i].iter().filter(|e| e.what == entries[i].what).count()
        };
        for (i, now) in self.entries.iter().enumerate() {
            match find(&before.entries, now, nth(&self.entries, i)) {
                None => changes.push(format!("{} ({}) is new", now.what, now.is)),
                Some(old) if old.is != now.is => {
                    changes.push(format!("{}: {} now, {} before", now.what, now.is, old.is));
                }
                Some(old) if old.blake3 != now.blake3 => changes.push(format!("{}: other content", now.what)),
                Some(_) => {}
            }
        }
        for (i, old) in before.entries.iter().enumerate() {
            if find(&self.entries, old, nth(&before.entries, i)).is_none() {
                changes.push(format!("{} ({}) is gone", old.what, old.is));
            }
        }
        changes
    }
}

/// The length of a file, and the checksum of what is read of it.
pub(crate) fn file(path: &Path) -> std::io::Result<(u64, blake3::Hash)> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    let mut block = vec![0; BLOCK_BYTES];
    let starts: Vec<u64> = match len {
        0..=WHOLE_BYTES => (0..len.div_ceil(BLOCK_BYTES as u64)).map(|i| i * BLOCK_BYTES as u64).collect(),
        _ => {
            let last = u128::from(len - BLOCK_BYTES as u64);
            (0..BLOCKS).map(|i| (last * u128::from(i) / u128::from(BLOCKS - 1)) as u64).collect()
        }
    };
    for start in starts {
        file.seek(SeekFrom::Start(start))?;
        let mut n = 0;
        while n < block.len() {
            match file.read(&mut block[n..])? {
                0 => break,
                more => n += more,
            }
        }
        hasher.update(&block[..n]);
    }
    Ok((len, hasher.finalize()))
}

/// The last part of a path: data that were moved have not changed.
fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use polyreme_data::Synthetic;

    use super::*;

    fn sets(files: &[&Path]) -> Sets {
        let set = Arc::new(Synthetic::new(100, &[4], 3, 0.2, 0, 0).unwrap());
        let origin = Origin { files: files.iter().map(|f| f.to_path_buf()).collect(), ..Origin::default() };
        Sets { origin, ..Sets::new(set) }
    }

    /// Every byte of a short file counts, and the ends and lengths of a long one.
    #[test]
    fn a_file_that_changed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (short, long) = (folder.path().join("short"), folder.path().join("long"));
        let write = |path: &Path, len: usize, changed: Option<usize>| {
            let mut bytes = vec![7u8; len];
            changed.into_iter().for_each(|at| bytes[at] = 8);
            fs::write(path, bytes).unwrap();
        };
        let (small, large) = (200_000, WHOLE_BYTES as usize + 5000);
        write(&short, small, None);
        write(&long, large, None);
        let print = || Fingerprint::of(&sets(&[&short, &long])).unwrap();
        let before = print();
        assert_eq!(print().changes(&before), [""; 0]);
        for at in [0, 1, 65_535, 65_536, 150_000, small - 1] {
            write(&short, small, Some(at));
            assert_eq!(print().changes(&before), ["short: other content"], "at {at}");
        }
        write(&short, small, None);
        for at in [0, large - 1] {
            write(&long, large, Some(at));
            assert_eq!(print().changes(&before), ["long: other content"], "at {at}");
        }
        write(&long, large + 1, None);
        let want = format!("long: {} bytes now, {large} bytes before", large + 1);
        assert_eq!(print().changes(&before), [want]);
        write(&long, large, None);
        assert_eq!(print().changes(&before), [""; 0]);
        let alone = Fingerprint::of(&sets(&[&long])).unwrap();
        assert_eq!(alone.changes(&before), ["short (200000 bytes) is gone"]);
        assert_eq!(before.changes(&alone), ["short (200000 bytes) is new"]);
    }
}
