//! Which rank has which files of a set: what each says of its own becomes one list, the same on all.
//!
//! A file is known by its name and by which of the job's paths it belongs to; the folders before it may differ from host to host. Lengths are
//! compared first, then digests ([`fingerprint`]), unless ranks have one file of a file system. The run's fingerprint is
//! made of them too. Everything but listing and reading is a function of what was said ([`merge`]).

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use polyreme_data::DataError;
use polyreme_data::joined::{by_value, files_of};
use polyreme_data::together::{Members, gather};
use serde::{Deserialize, Serialize};

use crate::fingerprint::{self, ToldFile};

/// A file that a rank has.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ListedFile {
    /// Which of the job's paths it belongs to.
    pub(crate) entry: usize,
    /// Its name, from there.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Device, number there, and when it changed last: two ranks with the same have the same file.
    identity: [i64; 4],
}

/// A file of the set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct SpreadFile {
    pub(crate) entry: usize,
    pub(crate) name: String,
    bytes: u64,
    /// The ranks that have it, and where in their lists.
    holders: Vec<(usize, usize)>,
    digest: Option<String>,
}

impl ListedFile {
    pub(crate) fn new(entry: usize, name: String, found: &Metadata) -> ListedFile {
        let identity = [found.dev() as i64, found.ino() as i64, found.ctime(), found.ctime_nsec()];
        ListedFile { entry, name, bytes: found.len(), identity }
    }
}

impl SpreadFile {
    /// The rank that tells the others what is in it, and lends its samples.
    pub(crate) fn teller(&self) -> usize {
        self.holders[0].0
    }

    /// Where a rank has it in its list.
    pub(crate) fn place_of(&self, rank: usize) -> Option<usize> {
        self.holders.iter().find(|(holder, _)| *holder == rank).map(|(_, place)| *place)
    }

    /// What the run's fingerprint has of it, if its digest is known.
    pub(crate) fn told(&self) -> Option<ToldFile> {
        let name = Path::new(&self.name).file_name().unwrap_or_default().to_string_lossy().into_owned();
        Some(ToldFile { name, bytes: self.bytes, blake3: self.digest.clone()? })
    }
}

/// The files of this host that some paths stand for, and where they are. A path may stand for nothing here.
pub(crate) fn list(
    paths: &[PathBuf],
    extensions: &[&str],
) -> Result<(Vec<ListedFile>, Vec<PathBuf>), DataError> {
    let (mut listed, mut here) = (Vec::new(), Vec::<PathBuf>::new());
    for (entry, path) in paths.iter().enumerate() {
        let found = match files_of(std::slice::from_ref(path), extensions) {
            Ok(found) => found,
            Err(DataError::Missing { .. }) => Vec::new(),
            Err(error) => return Err(error),
        };
        for file in found {
            let Ok(meta) = file.metadata() else { continue };
            if here.contains(&file) {
                // The error that a set on one host has.
                files_of(paths, extensions)?;
            }
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            listed.push(ListedFile::new(entry, name, &meta));
            here.push(file);
        }
    }
    Ok((listed, here))
}

/// All files of the set, from what each rank has; `here` is where this one has its own. The digest of a file is
/// its teller's; ranks that have a file of their own under its name must have the same. Collective.
pub(crate) fn agree(
    listed: &[ListedFile],
    here: &[PathBuf],
    paths: &[PathBuf],
    by_teller: bool,
    members: &mut dyn Members,
) -> Result<Vec<SpreadFile>, DataError> {
    let lists = gather(members, listed.to_vec())?;
    let mut all = merge(&lists, paths, by_teller)?;
    let rank = members.rank();
    let mut mine: Vec<(usize, String)> = Vec::new();
    for (k, file) in all.iter().enumerate() {
        let Some(place) = file.place_of(rank) else { continue };
        let identity = |&(holder, place): &(usize, usize)| lists[holder][place].identity;
        let same = |holder: &(usize, usize)| identity(holder) == identity(&file.holders[0]);
        let own = file.teller() == rank || !same(&(rank, place));
        if own {
            let read = fingerprint::file(&here[place]).map_err(|e| DataError::io(&here[place], e))?;
            mine.push((k, read.1.to_hex().to_string()));
        }
    }
    let told = gather(members, mine)?;
    let mut digests: HashMap<usize, (usize, &String)> = HashMap::new();
    for (k, member, digest) in
        told.iter().enumerate().flat_map(|(m, list)| list.iter().map(move |(k, d)| (*k, m, d)))
    {
        match digests.get(&k) {
            Some((other, known)) if *known != digest => {
                return Err(differs(&all[k].name, (*other, member), "other content of the same length"));
            }
            Some(_) => {}
            None => {
                digests.insert(k, (member, digest));
            }
        }
    }
    for (k, (_, digest)) in digests {
        all[k].digest = Some(digest.clone());
    }
    Ok(all)
}

/// One list of what each rank has, in the order of the set. A file that is missing, or that differs in length, is an error.
pub(crate) fn merge(
    lists: &[Vec<ListedFile>],
    paths: &[PathBuf],
    by_teller: bool,
) -> Result<Vec<SpreadFile>, DataError> {
    let (mut all, mut known) = (Vec::<SpreadFile>::new(), HashMap::<(usize, &str), usize>::new());
    for (rank, list) in lists.iter().enumerate() {
        for (place, file) in list.iter().enumerate() {
            let at = *known.entry((file.entry, &file.name)).or_insert(all.len());
            match all.get_mut(at) {
                Some(known) if known.bytes != file.bytes => {
                    let what = format!("{} bytes and {} bytes", known.bytes, file.bytes);
                    return Err(differs(&file.name, (known.teller(), rank), &what));
                }
                Some(known) => known.holders.push((rank, place)),
                None => all.push(SpreadFile {
                    entry: file.entry,
                    name: file.name.clone(),
                    bytes: file.bytes,
                    holders: vec![(rank, place)],
                    digest: None,
                }),
            }
        }
    }
    for (entry, path) in paths.iter().enumerate() {
        let names: Vec<&str> = all.iter().filter(|f| f.entry == entry).map(|f| f.name.as_str()).collect();
        if names.is_empty() {
            let hint =
                "no rank has such a file; with `data.spread` each file of a set lies on at least one host";
            return Err(DataError::Missing { path: path.clone(), hint: hint.into() });
        }
        if let Some(gap) = path.file_name().and_then(|pattern| gap(&pattern.to_string_lossy(), &names)) {
            let hint = "no rank has it, though others of its number are there; if there is no such file, name those that there are in a \
                        list";
            return Err(DataError::Missing { path: path.with_file_name(gap), hint: hint.into() });
        }
    }
    let compare = |a: &SpreadFile, b: &SpreadFile| -> Ordering {
        let teller = if by_teller { a.teller().cmp(&b.teller()) } else { Ordering::Equal };
        teller.then(a.entry.cmp(&b.entry)).then_with(|| by_value(&a.name, &b.name))
    };
    all.sort_by(compare);
    Ok(all)
}

/// A name that should be among those that match a pattern and is not: where `*` stands for numbers, one between the least and the largest;
/// where it stands for `3-of-8`, one of the eight.
fn gap(pattern: &str, names: &[&str]) -> Option<String> {
    let (before, after) = pattern.split_once('*').filter(|(_, after)| !after.contains('*'))?;
    let middles: Vec<&str> =
        names.iter().map(|name| name.strip_prefix(before)?.strip_suffix(after)).collect::<Option<_>>()?;
    let halves: Vec<(&str, Option<&str>)> =
        middles.iter().map(|m| m.split_once("-of-").map_or((*m, None), |(n, of)| (n, Some(of)))).collect();
    let numbers: Vec<u64> = halves.iter().map(|(n, _)| number(n)).collect::<Option<_>>()?;
    let (first, of) = *halves.first()?;
    if halves.iter().any(|(_, other)| *other != of) {
        return None;
    }
    let (least, most) = (*numbers.iter().min()?, *numbers.iter().max()?);
    let expected = match of {
        // They are counted from 0, unless one has the number of all.
        Some(of) => match number(of)? {
            n if most >= n => 1..=n,
            n => 0..=n.saturating_sub(1),
        },
        None => least..=most,
    };
    // Names with very many numbers between them are not counted by them.
    let few = expected.end() - expected.start() < 1 << 24;
    let missing = expected.filter(|_| few).find(|n| !numbers.contains(n))?;
    let width = if first.starts_with('0') { first.len() } else { 0 };
    let of = of.map_or(String::new(), |of| format!("-of-{of}"));
    Some(format!("{before}{missing:0width$}{of}{after}"))
}

fn number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()))
}

fn differs(name: &str, (a, b): (usize, usize), what: &str) -> DataError {
    let why = format!(
        "{name} is not the same on rank {a} and on rank {b} ({what}); a file of a set is the same wherever it lies: remove or rename one \
         of the two"
    );
    DataError::Setting { why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(files: &[(&str, u64)]) -> Vec<ListedFile> {
        let file = |(name, bytes): &(&str, u64)| ListedFile {
            entry: 0,
            name: (*name).into(),
            bytes: *bytes,
            identity: [0; 4],
        };
        files.iter().map(file).collect()
    }

    #[test]
    fn lists_become_one() {
        let lists =
            [listed(&[("p-10", 3), ("p-9", 1)]), listed(&[]), listed(&[("p-9", 1), ("p-8", 5), ("p-11", 2)])];
        let all = |by_teller| {
            let all = merge(&lists, &["x/p-*".into()], by_teller).unwrap();
            all.into_iter().map(|f| (f.name.clone(), f.teller(), f.holders.len())).collect::<Vec<_>>()
        };
        let (p8, p9) = (("p-8".to_string(), 2, 1), ("p-9".to_string(), 0, 2));
        let (p10, p11) = (("p-10".to_string(), 0, 1), ("p-11".to_string(), 2, 1));
        assert_eq!(all(false), [p8.clone(), p9.clone(), p10.clone(), p11.clone()]);
        assert_eq!(all(true), [p9, p10, p8, p11]);
    }

    #[test]
    fn what_is_missing_or_differs_is_named() {
        let said = |lists: &[Vec<ListedFile>], path: &str| {
            merge(lists, &[path.into()], false).map(|_| ()).unwrap_err().to_string()
        };
        let differs = said(&[listed(&[("a", 1)]), listed(&[("b", 1)]), listed(&[("a", 2)])], "*");
        assert!(
            differs.contains("a is not the same on rank 0 and on rank 2 (1 bytes and 2 bytes)"),
            "{differs}"
        );
        let none = said(&[listed(&[]), listed(&[])], "data/a.csv");
        assert!(none.contains("data/a.csv: not found; no rank has such a file"), "{none}");
        let gap = said(&[listed(&[("p-1.csv", 1)]), listed(&[("p-3.csv", 1)])], "data/p-*.csv");
        assert!(gap.contains("data/p-2.csv: not found; no rank has it, though"), "{gap}");
    }

    #[test]
    fn gaps_are_found_where_files_are_numbered() {
        for (pattern, names, missing) in [
            ("p-*", &["p-1", "p-2", "p-3"][..], None),
            ("p-*", &["p-001", "p-003"], Some("p-002")),
            ("p-*", &["p-9", "p-11"], Some("p-10")),
            ("p-*", &["p-a", "p-3", "p-9"], None),
            ("*.csv", &["2019.csv", "2020.csv"], None),
            ("t-*.pq", &["t-00000-of-00003.pq", "t-00001-of-00003.pq"], Some("t-00002-of-00003.pq")),
            ("t-*.pq", &["t-1-of-2.pq", "t-2-of-2.pq"], None),
            ("a*b*", &["a1b1", "a3b1"], None),
            ("whole.csv", &["whole.csv"], None),
        ] {
            assert_eq!(gap(pattern, names).as_deref(), missing, "{pattern} {names:?}");
        }
    }
}
