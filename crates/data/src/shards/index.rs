//! What is in a tar, found from its headers: for each sample where its image lies and what its label is.
//!
//! As in WebDataset, the name of a member up to the first dot of its last part is the key of a sample, and the rest says what the
//! member is: `a/0001.jpg` and `a/0001.cls` are the image and the class of sample `a/0001`. WebDataset reads tars as streams, so
//! there the members of a sample must be neighbours; here they need not be.
//!
//! Headers are read by the `tar` crate, which knows the long names and sizes of GNU tar and of PAX. Nothing is ever unpacked, so
//! a name cannot make anything be written anywhere; names that leave their folder are refused all the same, since no honest tool
//! writes them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Cursor;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tar::{Archive, Entry, EntryType};

use super::label::{LabelWanted, ReadLabel};
use crate::error::DataError;
use crate::images::starts_as_image;

/// The length of a header, and of what content is filled up to.
const BLOCK: usize = 512;
/// The longest member that is an image.
const IMAGE_BYTES_MAX: u64 = 1 << 30;
/// The endings of images.
const IMAGES: [&str; 3] = ["jpg", "jpeg", "png"];

/// The samples of a tar.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TarIndex {
    /// Where the image of each sample lies.
    pub(super) images: Vec<ImageRange>,
    /// Which of `words` is the label of each sample; empty where labels are no classes.
    pub(super) labels: Vec<u32>,
    /// Labels of classes as they are written, in the order in which they occur.
    pub(super) words: Vec<LabelWord>,
    /// Labels that are numbers, sample by sample, as their bits: those of a float survive any way of writing.
    pub(super) target_bits: Vec<u32>,
}

/// A label as it is written.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct LabelWord {
    pub(super) text: String,
    /// The offset of the header of the member that it is in first.
    pub(super) header: u64,
    /// How many samples have it.
    pub(super) samples: usize,
}

/// Where an image lies in its tar.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct ImageRange {
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// A member of a sample: its content, and its header.
#[derive(Clone, Copy)]
struct TarMember {
    header: u64,
    start: u64,
    len: u64,
}

/// A sample whose members are being gathered.
#[derive(Default)]
struct Gathered {
    image: Option<TarMember>,
    label: Option<TarMember>,
    /// The header of its first member.
    first: u64,
}

impl TarIndex {
    /// Reads the headers and labels of a tar; `path` is for errors.
    pub(crate) fn read(path: &Path, bytes: &[u8], wanted: &LabelWanted) -> Result<TarIndex, DataError> {
        let mut index = TarIndex::default();
        let mut known: HashMap<String, u32> = HashMap::new();
        let mut per_sample = None;
        for sample in gather(path, bytes, wanted)? {
            let flawed = |at: u64, why: &str| DataError::corrupt(path, at, why);
            let named = |header: u64, why: String| {
                DataError::corrupt(path, header, format!("{}: {why}", member_name(bytes, header)))
            };
            let Some(image) = sample.image else {
                let key = key_of(bytes, sample.first);
                let why = format!(
                    "sample {key:?} has no image; it is the member {key}.jpg, .jpeg or .png (a key ends at the first dot of a name)"
                );
                return Err(flawed(sample.first, &why));
            };
            if !starts_as_image(part(bytes, image)) {
                let why = "neither PNG nor JPEG, whatever its name says; convert it, or leave the sample out";
                return Err(named(image.header, why.into()));
            }
            let len = u32::try_from(image.len).expect("longer ones were refused");
            index.images.push(ImageRange { offset: image.start, len });
            let Some(ending) = wanted.ending() else { continue };
            let Some(label) = sample.label else {
                let key = key_of(bytes, image.header);
                let why = format!("sample {key:?} has no label: {}", wanted.missing(&key, ending));
                return Err(flawed(image.header, &why));
            };
            let read = wanted.read(part(bytes, label), per_sample);
            match read.map_err(|why| named(label.header, why))? {
                ReadLabel::Word(text) => {
                    let number = match known.get(&text) {
                        Some(&number) => number,
                        None => {
                            let number = index.words.len() as u32;
                            known.insert(text.clone(), number);
                            index.words.push(LabelWord { text, header: label.header, samples: 0 });
                            number
                        }
                    };
                    index.words[number as usize].samples += 1;
                    index.labels.push(number);
                }
                ReadLabel::Numbers(numbers) => {
                    per_sample = Some(numbers.len());
                    index.target_bits.extend(numbers.into_iter().map(f32::to_bits));
                }
            }
        }
        if index.images.is_empty() {
            return Err(DataError::corrupt(
                path,
                0,
                "no samples; a sample is an image and its label, as in 0001.jpg and 0001.cls",
            ));
        }
        Ok(index)
    }

    /// How many numbers each sample has to predict.
    pub(super) fn targets_per_sample(&self) -> usize {
        self.target_bits.len().checked_div(self.images.len()).unwrap_or(0)
    }
}

/// The members of each sample, in the order in which samples begin.
fn gather(path: &Path, bytes: &[u8], wanted: &LabelWanted) -> Result<Vec<Gathered>, DataError> {
    let mut samples: Vec<Gathered> = Vec::new();
    let mut places: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut archive = Archive::new(Cursor::new(bytes));
    let mut next = 0_u64;
    let broken = |at: u64, e: std::io::Error| {
        let why = format!(
            "not a tar from here on: {e}; it is damaged, cut, or packed (tars are read as they are: unpack a .gz)"
        );
        DataError::corrupt(path, at.min(bytes.len() as u64), why)
    };
    for entry in archive.entries_with_seek().map_err(|e| broken(0, e))? {
        let mut entry = entry.map_err(|e| broken(next, e))?;
        let found = TarMember {
            header: entry.raw_header_position(),
            start: entry.raw_file_position(),
            len: entry.size(),
        };
        let name = entry.path_bytes().into_owned();
        let flawed = |why: String| {
            DataError::corrupt(path, found.header, format!("{}: {why}", String::from_utf8_lossy(&name)))
        };
        next = end_of(found, bytes.len() as u64).ok_or_else(|| {
            flawed(format!(
                "the tar ends here, before the {} bytes of this member do; copy it again",
                found.len
            ))
        })?;
        if let Some(why) = leaves(&name) {
            return Err(flawed(why.into()));
        }
        if !is_content(&mut entry).map_err(flawed)? {
            continue;
        }
        let Some((key, ending)) = split_name(&name) else { continue };
        let idx = *places.entry(key.to_vec()).or_insert(samples.len());
        if idx == samples.len() {
            samples.push(Gathered { first: found.header, ..Gathered::default() });
        }
        let sample = &mut samples[idx];
        let is_image = IMAGES.iter().any(|image| ending.eq_ignore_ascii_case(image));
        let slot = match ending {
            _ if is_image => &mut sample.image,
            _ if wanted.ending().is_some_and(|label| ending.eq_ignore_ascii_case(label)) => &mut sample.label,
            _ => continue,
        };
        if let Some(other) = slot {
            let other = member_name(bytes, other.header);
            return Err(flawed(format!(
                "sample {:?} has {other} already; keys must differ, and a sample has one image and one label: remove one of the two",
                String::from_utf8_lossy(key)
            )));
        }
        if is_image && found.len > IMAGE_BYTES_MAX {
            return Err(flawed(format!("{} bytes, too long for an image", found.len)));
        }
        *slot = Some(found);
    }
    // Without the mark, a tar that was cut between two members would look whole.
    let end = next as usize;
    if !bytes.get(end..end + BLOCK).is_some_and(|block| block.iter().all(|&byte| byte == 0)) {
        let why =
            "the tar ends here without the block of zeros that marks the end: it was cut; copy it again";
        return Err(DataError::corrupt(path, end as u64, why));
    }
    // A sample of which neither is there is something else, such as notes.
    samples.retain(|sample| sample.image.is_some() || sample.label.is_some());
    Ok(samples)
}

/// Where the header after a member is; `None` if the file ends before its content does.
fn end_of(member: TarMember, len: u64) -> Option<u64> {
    let end = member.start.checked_add(member.len).filter(|&end| end <= len)?;
    Some(end.next_multiple_of(BLOCK as u64))
}

/// Whether a member has content of its own, or why it cannot be read.
fn is_content<R: std::io::Read>(entry: &mut Entry<'_, R>) -> Result<bool, String> {
    let kind = entry.header().entry_type();
    match kind {
        EntryType::Regular | EntryType::Continuous => Ok(!entry.path_bytes().ends_with(b"/")),
        EntryType::Directory | EntryType::XGlobalHeader => Ok(false),
        EntryType::Link | EntryType::Symlink => {
            Err("a link; write the tar with `--dereference --hard-dereference`, so that every member has its content".into())
        }
        EntryType::GNUSparse => Err("a sparse file; write the tar without `--sparse`".into()),
        other => Err(format!("neither a file nor a folder (type {:?}); leave it out", char::from(other.as_byte()))),
    }
}

/// Why a name is refused.
fn leaves(name: &[u8]) -> Option<&'static str> {
    let outside = name.starts_with(b"/") || name.split(|&byte| byte == b'/').any(|part| part == b"..");
    outside.then_some("this name leaves the folder of the tar; write it with names from the folder of the samples, without / before them and without ..")
}

/// A name as key and ending, if it has both. Hidden names and `__names__` are not samples.
fn split_name(name: &[u8]) -> Option<(&[u8], Cow<'_, str>)> {
    let name = name.strip_prefix(b"./").unwrap_or(name);
    let base = name.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
    let dot = base + name[base..].iter().position(|&byte| byte == b'.')?;
    let hidden = dot == base || name[base..].starts_with(b"__");
    (!hidden).then(|| (&name[..dot], String::from_utf8_lossy(&name[dot + 1..])))
}

fn part(bytes: &[u8], member: TarMember) -> &[u8] {
    &bytes[member.start as usize..(member.start + member.len) as usize]
}

/// The name of the member whose header is there; for errors, so it may take its time.
pub(super) fn member_name(bytes: &[u8], header: u64) -> String {
    let mut archive = Archive::new(Cursor::new(bytes));
    let found = archive.entries_with_seek().ok().and_then(|entries| {
        entries.map_while(Result::ok).find(|entry| entry.raw_header_position() == header)
    });
    found.map_or_else(|| "a member".into(), |entry| String::from_utf8_lossy(&entry.path_bytes()).into_owned())
}

/// The name of the member whose content starts there.
pub(super) fn name_at(bytes: &[u8], start: u64) -> String {
    // Content follows its header.
    member_name(bytes, start.saturating_sub(BLOCK as u64))
}

/// The names of all members, by where their content starts.
pub(super) fn names_by_start(bytes: &[u8]) -> HashMap<u64, String> {
    let mut archive = Archive::new(Cursor::new(bytes));
    let entries = archive.entries_with_seek().into_iter().flatten().map_while(Result::ok);
    let name = |entry: &Entry<'_, _>| String::from_utf8_lossy(&entry.path_bytes()).into_owned();
    entries.map(|entry| (entry.raw_file_position(), name(&entry))).collect()
}

/// The key of the sample that the member belongs to.
fn key_of(bytes: &[u8], header: u64) -> String {
    let name = member_name(bytes, header);
    split_name(name.as_bytes())
        .map_or_else(|| name.clone(), |(key, _)| String::from_utf8_lossy(key).into_owned())
}
