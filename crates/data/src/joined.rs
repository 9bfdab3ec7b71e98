//! A set in several files: its parts, concatenated as one set.
//!
//! A path whose last name has a `*` stands for all files that match, in the order of their names, numbers by value:
//! `part-2` comes before `part-10`. Every rank opens all of them; what is mapped (arrays, texts of bytes) is read only
//! where a rank's own samples lie.
//!
//! `{000..031}` in a path stands for all numbers from the one to the other, as in a shell: with as many digits, in their order.
//!
//! A folder stands for the files in it that have a fitting name, in the same order; a list for everything that its paths stand for.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::dataset::{Dataset, Fetched, Scratch};
use crate::error::DataError;
use crate::remote::FarFile;
use crate::spec::{Spec, Target};

/// More files than this are a slip of the pen.
const EXPANDED_MAX: u64 = 1 << 20;

/// Sets of one kind, concatenated.
pub struct Joined {
    parts: Vec<Arc<dyn Dataset>>,
    /// The index after the last sample of each part.
    ends: Vec<usize>,
}

impl Joined {
    /// Joins parts with the same spec; `names` are for the error if they differ.
    pub fn new(parts: Vec<Arc<dyn Dataset>>, names: &[PathBuf]) -> Result<Joined, DataError> {
        let Some(first) = parts.first() else {
            return Err(DataError::Setting { why: "a set has at least one part".into() });
        };
        if let Some(other) = parts.iter().position(|p| p.spec() != first.spec()) {
            let name =
                |k: usize| names.get(k).map_or_else(|| format!("part {k}"), |p| p.display().to_string());
            let dims = |k: usize| (parts[k].spec().features.dims(), said(parts[k].spec()));
            let ((a, of_a), (b, of_b)) = (dims(0), dims(other));
            let why = format!(
                "{}: samples of {b:?} {of_b}, but those of {} are {a:?} {of_a}; all parts of a set must have the same shape and classes",
                name(other),
                name(0)
            );
            return Err(DataError::Setting { why });
        }
        let mut end = 0;
        let ends = parts.iter().map(|p| {
            end += p.len();
            end
        });
        Ok(Joined { ends: ends.collect(), parts })
    }

    /// The part that a sample is in, and its index there.
    fn find(&self, idx: usize) -> (&dyn Dataset, usize) {
        let k = self.ends.partition_point(|&end| end <= idx);
        (&*self.parts[k], idx - k.checked_sub(1).map_or(0, |before| self.ends[before]))
    }
}

impl Dataset for Joined {
    fn spec(&self) -> &Spec {
        self.parts[0].spec()
    }

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let (part, idx) = self.find(idx);
        part.fetch(idx, scratch)
    }

    fn far(&self, idx: usize) -> Option<FarFile<'_>> {
        let (part, idx) = self.find(idx);
        part.far(idx)
    }

    fn intact(&self) -> Result<(), DataError> {
        self.parts.iter().try_for_each(|part| part.intact())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        let (part, idx) = self.find(idx);
        part.class(idx)
    }

    fn tokens(&self, idx: usize) -> Option<usize> {
        let (part, idx) = self.find(idx);
        part.tokens(idx)
    }

    fn n_counted(&self, idx: usize) -> Option<usize> {
        let (part, idx) = self.find(idx);
        part.n_counted(idx)
    }
}

/// What a model is to say of samples, in words.
fn said(spec: &Spec) -> String {
    match spec.target {
        Target::Class { classes, .. } => format!("in {classes} classes"),
        Target::Tags { classes, .. } => format!("with one of {classes} tags for each word"),
        Target::NextId => "with the next id".into(),
        Target::Numbers { n, .. } => format!("with {n} numbers to predict"),
        Target::Labels { n, .. } => format!("with {n} labels"),
    }
}

/// The files that a path stands for: itself, or those that match if its last name has a `*`; of all its numbers, if it has `{0..9}`.
pub fn files(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    match path.to_str().filter(|text| text.contains("..") && !path.exists()) {
        None => matching(path),
        Some(text) => {
            let all = expanded(text)?.into_iter().map(|one| matching(Path::new(&one)));
            Ok(all.collect::<Result<Vec<_>, _>>()?.concat())
        }
    }
}

/// The paths that a path with ranges of numbers, such as `{000..031}`, stands for; others stand for themselves.
pub(crate) fn expanded(text: &str) -> Result<Vec<String>, DataError> {
    let (mut done, mut rest) = (vec![String::new()], text);
    while let Some((before, numbers, after)) = range_in(rest) {
        let (low, high) = numbers;
        let wide = |n: &str| n.len() > 1 && n.starts_with('0');
        let width = if wide(low) || wide(high) { low.len().max(high.len()) } else { 0 };
        let parsed = low.parse::<u64>().ok().zip(high.parse::<u64>().ok());
        let Some((low, high)) = parsed.filter(|(low, high)| low <= high) else {
            let why = format!("{text}: {{{low}..{high}}} is not a range; write the smaller number first");
            return Err(DataError::Setting { why });
        };
        if ((high - low).saturating_add(1)).saturating_mul(done.len() as u64) > EXPANDED_MAX {
            return Err(DataError::Setting { why: format!("{text}: more than {EXPANDED_MAX} files") });
        }
        done = done
            .iter()
            .flat_map(|start| (low..=high).map(move |n| format!("{start}{before}{n:0width$}")))
            .collect();
        rest = after;
    }
    done.iter_mut().for_each(|path| path.push_str(rest));
    Ok(done)
}

/// The first range of numbers in a text, with what is before and after it.
fn range_in(text: &str) -> Option<(&str, (&str, &str), &str)> {
    let is_number = |n: &str| !n.is_empty() && n.len() < 19 && n.bytes().all(|b| b.is_ascii_digit());
    text.match_indices('{').find_map(|(open, _)| {
        let (inside, after) = text[open + 1..].split_once('}')?;
        let (low, high) = inside.split_once("..").filter(|(a, b)| is_number(a) && is_number(b))?;
        Some((&text[..open], (low, high), after))
    })
}

/// The same for a path without ranges.
fn matching(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    let Some(pattern) = path.file_name().and_then(|n| n.to_str()).filter(|n| n.contains('*')) else {
        return Ok(vec![path.to_path_buf()]);
    };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // As in a shell, a name that starts with a dot matches only if the pattern does too.
    let hidden = |n: &str| n.starts_with('.') && !pattern.starts_with('.');
    let found = files_in(folder, &|name| matches(pattern, name) && !hidden(name))?;
    if found.is_empty() {
        let hint = format!("no file in {} matches", folder.display());
        return Err(DataError::Missing { path: path.to_path_buf(), hint });
    }
    Ok(found)
}

/// The files that some paths stand for together; of a folder those with one of these extensions. A file that is there twice is an
/// error: its samples would count twice.
pub fn files_of(paths: &[PathBuf], extensions: &[&str]) -> Result<Vec<PathBuf>, DataError> {
    let mut all = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => all.extend(files_with(path, extensions)?),
            false => all.extend(files(path)?),
        }
    }
    let mut seen = HashSet::new();
    if let Some(twice) = all.iter().find(|file| !seen.insert(*file)) {
        let why =
            format!("{}: given twice, its rows would count twice; remove one of the two", twice.display());
        return Err(DataError::Setting { why });
    }
    Ok(all)
}

/// The files of a folder that have one of these extensions.
fn files_with(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, DataError> {
    let found = files_in(folder, &|name| has_extension(name, extensions))?;
    if found.is_empty() {
        let hint = format!(
            "no file in this folder ends in .{}; name the files, as in \"{}/part-*\"",
            extensions.join(" or ."),
            folder.display()
        );
        return Err(DataError::Missing { path: folder.to_path_buf(), hint });
    }
    Ok(found)
}

/// Whether a name ends in one of these extensions, and is not hidden.
pub(crate) fn has_extension(name: &str, extensions: &[&str]) -> bool {
    let extension = Path::new(name).extension().and_then(|e| e.to_str()).unwrap_or_default();
    !name.starts_with('.') && extensions.iter().any(|e| extension.eq_ignore_ascii_case(e))
}

/// The files of a folder whose names fit, in their order.
fn files_in(folder: &Path, fits: &dyn Fn(&str) -> bool) -> Result<Vec<PathBuf>, DataError> {
    let entries = std::fs::read_dir(folder).map_err(|e| DataError::io(folder, e))?;
    let mut found = Vec::new();
    for entry in entries {
        let file = entry.map_err(|e| DataError::io(folder, e))?.path();
        let name = file.file_name().and_then(|n| n.to_str());
        if name.is_some_and(fits) && file.is_file() {
            found.push(file);
        }
    }
    let name = |p: &PathBuf| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    found.sort_by(|a, b| by_value(&name(a), &name(b)));
    Ok(found)
}

/// Whether a name matches the pattern, in which each `*` stands for any text.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(pieces.next().unwrap_or_default()) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        // The earliest match leaves most for the others.
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Compares names, with runs of digits as numbers: the order of a set's files.
pub fn by_value(a: &str, b: &str) -> Ordering {
    fn digits(s: &str) -> usize {
        s.bytes().take_while(u8::is_ascii_digit).count()
    }
    let (mut x, mut y) = (a, b);
    while let (Some(c), Some(d)) = (x.chars().next(), y.chars().next()) {
        let (m, n) = (digits(x), digits(y));
        let order = if m > 0 && n > 0 {
            let (p, q) = (x[..m].trim_start_matches('0'), y[..n].trim_start_matches('0'));
            (x, y) = (&x[m..], &y[n..]);
            p.len().cmp(&q.len()).then_with(|| p.cmp(q))
        } else {
            (x, y) = (&x[c.len_utf8()..], &y[d.len_utf8()..]);
            c.cmp(&d)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    x.len().cmp(&y.len()).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Synthetic;

    #[test]
    fn names_match_and_have_their_order() {
        for (pattern, name, expected) in [
            ("a-*.csv", "a-1.csv", true),
            ("a-*.csv", "a-.csv", true),
            ("a-*.csv", "b-1.csv", false),
            ("a-*.csv", "a-1.txt", false),
            ("*", "anything", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "ac", false),
            ("a*a", "a", false),
            ("*ab*ab", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
        let mut names = ["p10", "p9", "p09", "p1", "q0", "p", "p1a", "p1b2", "p1b10"];
        names.sort_by(|a, b| by_value(a, b));
        assert_eq!(names, ["p", "p1", "p1a", "p1b2", "p1b10", "p09", "p9", "p10", "q0"]);
    }

    #[test]
    fn files_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["x-2", "x-10", "x-1", ".x-3", "y-1"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("x-4")).unwrap();
        let found = files(&folder.path().join("x-*")).unwrap();
        assert_eq!(found, ["x-1", "x-2", "x-10"].map(|n| folder.path().join(n)));
        let alone = folder.path().join("nosuch");
        assert_eq!(files(&alone).unwrap(), std::slice::from_ref(&alone));
        let error = files(&folder.path().join("z*")).unwrap_err().to_string();
        assert!(error.contains("z*") && error.contains("no file"), "{error}");
        assert!(files(&alone.join("*")).is_err());
    }

    #[test]
    fn ranges_of_numbers_are_expanded() {
        for (text, expected) in [
            ("a-{8..11}.tar", "a-8.tar a-9.tar a-10.tar a-11.tar"),
            ("a-{008..010}", "a-008 a-009 a-010"),
            ("{0..1}/{1..2}", "0/1 0/2 1/1 1/2"),
            ("a-{x..y}{3..3}", "a-{x..y}3"),
            ("../a", "../a"),
            ("{..}", "{..}"),
        ] {
            assert_eq!(expanded(text).unwrap().join(" "), expected, "{text}");
        }
        for text in ["{3..1}", "{0..9999999}", "{0..1000}{0..1000}{0..1000}"] {
            assert!(expanded(text).is_err(), "{text}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        ["p-00", "p-01", "{1..2}"].iter().for_each(|name| std::fs::write(path(name), "").unwrap());
        assert_eq!(files(&path("p-{00..01}")).unwrap(), ["p-00", "p-01"].map(path));
        // A file that has such a name is meant.
        assert_eq!(files(&path("{1..2}")).unwrap(), [path("{1..2}")]);
    }

    #[test]
    fn folders_and_lists_stand_for_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["a-2.csv", "a-10.CSV", "b.tsv", ".c.csv", "notes.txt"] {
            std::fs::write(path(name), "").unwrap();
        }
        let found = |paths: &[PathBuf]| files_of(paths, &["csv", "tsv"]).map_err(|e| e.to_string());
        let inside = ["a-2.csv", "a-10.CSV", "b.tsv"].map(path);
        assert_eq!(found(&[folder.path().into()]).unwrap(), inside);
        // A list keeps its own order.
        assert_eq!(found(&[path("b.tsv"), path("a-*")]).unwrap(), ["b.tsv", "a-2.csv", "a-10.CSV"].map(path));
        let twice = found(&[path("a-2.csv"), folder.path().into()]).unwrap_err();
        assert!(twice.contains("a-2.csv: given twice"), "{twice}");
        let none = files_of(&[folder.path().into()], &["parquet"]).unwrap_err().to_string();
        assert!(none.contains("ends in .parquet"), "{none}");
    }

    #[test]
    fn parts_are_one_set() {
        let part = |n: usize, first: usize| -> Arc<dyn Dataset> {
            Arc::new(Synthetic::new(n, &[5], 3, 0.2, 7, first).unwrap())
        };
        // Samples of a synthetic set depend on their index alone.
        let (whole, joined) =
            (part(12, 0), Joined::new(vec![part(5, 0), part(1, 5), part(6, 6)], &[]).unwrap());
        assert_eq!((joined.len(), joined.spec()), (12, whole.spec()));
        let (mut a, mut b) = (Scratch::default(), Scratch::default());
        for i in 0..12 {
            assert_eq!(joined.fetch(i, &mut a).unwrap(), whole.fetch(i, &mut b).unwrap(), "{i}");
            assert_eq!(joined.class(i).unwrap(), whole.class(i).unwrap());
        }
        let other: Arc<dyn Dataset> = Arc::new(Synthetic::new(3, &[4], 3, 0.2, 7, 0).unwrap());
        let error =
            Joined::new(vec![part(5, 0), other], &["a".into(), "b".into()]).err().unwrap().to_string();
        assert!(error.starts_with("b: ") && error.contains("[4]") && error.contains("[5]"), "{error}");
        assert!(Joined::new(Vec::new(), &[]).is_err());
    }
}
