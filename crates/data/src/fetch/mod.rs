//! The well-known sets, fetched by name: from the system's package, over HTTP, or from a mirror.
//!
//! A file gets its name only when its checksum is right and it is flushed to disk. Until then it is `NAME.part`, which stays
//! when something fails, so that the next try resumes from there. Files that exist and are right are not fetched again.
//!
//! Nothing here reads samples: what a file means is for the readers of the formats.

pub(crate) mod http;
mod known;
mod part;
mod unpack;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use http::{SETTINGS, Settings};
pub use known::{KnownSet, Member, SetFile, known};
use part::{PartFile, Trouble, md5_of};
use ureq::Agent;

use crate::error::DataError;

/// Options for fetching a set.
pub struct GetOptions<'a> {
    /// The folder for its files; created if missing.
    pub into: &'a Path,
    /// A mirror to fetch from instead: the address (`http://`, `https://`, `file://`) or path of a folder with them.
    pub mirror: Option<&'a str>,
    /// Called with events; often, while bytes arrive.
    pub progress: &'a mut dyn FnMut(FetchProgress<'_>),
}

/// An event about a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FetchProgress<'a> {
    /// The file exists and its checksum is right.
    Present {
        /// The file name.
        file: &'a str,
    },
    /// The download begins.
    Begin {
        /// The file name.
        file: &'a str,
        /// The source: an address or a path.
        from: &'a str,
    },
    /// More bytes have arrived.
    Bytes {
        /// The file name.
        file: &'a str,
        /// Bytes so far.
        have: u64,
        /// Bytes in total.
        total: u64,
    },
    /// A source failed; the next one is tried.
    Failed {
        /// The file name.
        file: &'a str,
        /// The source: an address or a path.
        from: &'a str,
        /// What went wrong.
        why: &'a str,
    },
    /// An archive has been fetched and is being unpacked.
    Unpack {
        /// The file name.
        file: &'a str,
    },
}

/// The default folder of a set: `data/NAME`.
pub fn default_folder(name: &str) -> PathBuf {
    Path::new("data").join(name)
}

/// Fetches the set `name`, one of [`known`], and returns the folder with its files.
pub fn get(name: &str, options: GetOptions<'_>) -> Result<PathBuf, DataError> {
    let Some(set) = known().iter().find(|set| set.name == name) else {
        let names: Vec<&str> = known().iter().map(|set| set.name).collect();
        return Err(DataError::Setting {
            why: format!("unknown set {name:?}; known are {}", names.join(", ")),
        });
    };
    get_set(set, options)
}

/// Fetches a set that need not be one of [`known`].
pub fn get_set(set: &KnownSet, options: GetOptions<'_>) -> Result<PathBuf, DataError> {
    get_within(set, options, SETTINGS)
}

fn get_within(set: &KnownSet, options: GetOptions<'_>, settings: Settings) -> Result<PathBuf, DataError> {
    let GetOptions { into, mirror, progress } = options;
    let sources = sources(set, mirror)?;
    fs::create_dir_all(into).map_err(|err| DataError::io(into, err))?;
    let agent = http::agent(settings);
    for file in set.files {
        let target = into.join(file.name);
        if !file.members.is_empty() && unpack::is_unpacked(file, into) {
            progress(FetchProgress::Present { file: file.name });
            continue;
        }
        if md5_of(&target).is_ok_and(|sum| sums(file).contains(&sum.as_str())) {
            progress(FetchProgress::Present { file: file.name });
        } else {
            fetch(file, &target, &sources, &agent, progress)?;
        }
        if !file.members.is_empty() {
            progress(FetchProgress::Unpack { file: file.name });
            unpack::unpack(file, into)?;
        }
    }
    Ok(into.into())
}

/// A source of files.
enum FetchSource {
    Folder(PathBuf),
    Address(String),
}

impl FetchSource {
    /// The address or path of a file.
    fn of(&self, file: &str) -> String {
        match self {
            FetchSource::Folder(folder) => folder.join(file).display().to_string(),
            FetchSource::Address(base) => format!("{}/{file}", base.trim_end_matches('/')),
        }
    }
}

/// The mirror, if there is one; otherwise what the system has installed, and then the set's addresses.
fn sources(set: &KnownSet, mirror: Option<&str>) -> Result<Vec<FetchSource>, DataError> {
    let Some(mirror) = mirror else {
        let folder = set.installed.map(PathBuf::from).filter(|folder| folder.is_dir());
        let addresses = set.bases.iter().map(|base| FetchSource::Address(base.to_string()));
        return Ok(folder.map(FetchSource::Folder).into_iter().chain(addresses).collect());
    };
    let folder = match mirror.split_once("://") {
        Some(("http" | "https", _)) => return Ok(vec![FetchSource::Address(mirror.into())]),
        Some(("file", path)) => path.strip_prefix("localhost").unwrap_or(path),
        Some((scheme, _)) => {
            let why =
                format!("the mirror {mirror:?} is {scheme}; use http, https, file, or the path of a folder");
            return Err(DataError::Setting { why });
        }
        None => mirror,
    };
    if !Path::new(folder).is_dir() {
        return Err(DataError::Missing {
            path: folder.into(),
            hint: "a mirror is a folder or an address".into(),
        });
    }
    Ok(vec![FetchSource::Folder(folder.into())])
}

/// Fetches one file from the first source that has it.
fn fetch(
    file: &SetFile,
    target: &Path,
    sources: &[FetchSource],
    agent: &Agent,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<(), DataError> {
    let mut failures = Vec::new();
    let mut n_kept = 0;
    for source in sources {
        let from = source.of(file.name);
        progress(FetchProgress::Begin { file: file.name, from: &from });
        let mut part = PartFile::open(target)?;
        let fetched = match source {
            FetchSource::Folder(_) => copy(file, Path::new(&from), &mut part, progress),
            FetchSource::Address(_) => {
                let mut bytes =
                    |have| progress(FetchProgress::Bytes { file: file.name, have, total: file.bytes });
                http::fetch(agent, &from, file.bytes, &mut part, &mut bytes)
            }
        };
        let finished = match fetched {
            Ok(()) => {
                n_kept = 0;
                part.finish(&sums(file))
            }
            Err(trouble) => {
                n_kept = part.leave()?;
                Err(trouble)
            }
        };
        match finished {
            Ok(()) => return Ok(()),
            Err(Trouble::Disk(err)) => return Err(err),
            Err(Trouble::Source(why)) => {
                progress(FetchProgress::Failed { file: file.name, from: &from, why: &why });
                failures.push(format!("{from}: {why}"));
            }
        }
    }
    let next = match n_kept {
        0 => "try again later, or name a mirror".into(),
        n => format!("{n} bytes are kept: try again to resume from there, or name a mirror"),
    };
    let why = format!("could not be fetched; {}; {next}", failures.join("; "));
    Err(DataError::Io { path: target.into(), source: io::Error::other(why) })
}

/// Copies a file from a local folder.
fn copy(
    file: &SetFile,
    from: &Path,
    part: &mut PartFile,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<(), Trouble> {
    let open = File::open(from).and_then(|source| Ok((source.metadata()?.len(), source)));
    let (total, mut source) = open.map_err(|err| Trouble::Source(err.to_string()))?;
    part.restart().map_err(Trouble::Disk)?;
    let mut bytes = |have| progress(FetchProgress::Bytes { file: file.name, have, total });
    // The installed copy may be a little longer or shorter than the published one.
    part.append(&mut source, file.bytes.saturating_mul(2), &mut bytes)
}

/// The checksums that a file may have.
fn sums(file: &SetFile) -> Vec<&'static str> {
    std::iter::once(file.md5).chain(file.md5_installed).collect()
}

#[cfg(test)]
mod server;
#[cfg(test)]
mod tests;
