//! Files from S3, Google Cloud Storage and web servers, through a cache of bounded size.
//!
//! An object is fetched whole, in ranges at a time, into a folder that all processes of the host share (`cache`); formats then map the
//! copy as they map any file. What is read as a whole for the whole run (arrays, a corpus, folders of images) is fetched at the start and
//! held: it must fit. Tars and the rows of tables are opened in turn (`Files::open`): a file is held while it is read, fetched ahead in
//! the background in the order in which the steps need it (`ahead`), and evicted when others need its room. So a set may be
//! larger than the cache, and than the disk, if its order goes from file to file.
//!
//! The version of every object (its ETag, or when it was modified) is asked for when a set is opened. A copy of another version is
//! another entry, and an object that changed since then is an error: what a run reads is what it opened.
//!
//! Which sample is read at which step does not depend on any of this, so a run that resumes needs nothing of it but the objects.
//!
//! # Layout
//! `url`: addresses. `client`: what is asked of stores, over `http`; `absent` is there in builds without the feature `remote`. `cache`:
//! the folder. `ahead`: what is fetched next.

#[cfg(not(feature = "remote"))]
mod absent;
mod ahead;
mod cache;
#[cfg(feature = "remote")]
mod client;
#[cfg(feature = "remote")]
mod http;
mod url;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[cfg(not(feature = "remote"))]
use absent::Client;
use ahead::Ahead;
pub(crate) use ahead::tell_ahead;
pub use cache::HeldEntry;
use cache::{Cache, EntryName};
#[cfg(feature = "remote")]
use client::Client;
use url::ObjectUrl;
pub use url::is_url;

use crate::error::DataError;
use crate::joined::{by_value, expanded, files_of, has_extension, matches};
use crate::map::{self, Bytes};

/// Copies that stay open though no thread reads them, and for how long: what is open cannot make room for other processes, which wait.
const OPEN_MAX: usize = 4;
const IDLE: Duration = Duration::from_millis(100);
/// How long a reader waits for room that other processes hold.
const PATIENCE: Duration = Duration::from_secs(60);
/// More objects than this are not one set.
const OBJECTS_MAX: usize = 1 << 20;

/// What this process knows of stores: who it is to them, and where copies may lie.
#[derive(Clone, Default)]
pub struct RemoteEnv {
    /// Settings by the names of environment variables: `AWS_REGION`, `GOOGLE_APPLICATION_CREDENTIALS` and so on.
    pub settings: Vec<(String, String)>,
    /// The folder of copies, if a job names none.
    pub cache: PathBuf,
}

/// Some of the settings are secret.
impl fmt::Debug for RemoteEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.settings.iter().map(|(name, _)| name).collect();
        f.debug_struct("RemoteEnv").field("settings", &names).field("cache", &self.cache).finish()
    }
}

/// What a store says of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ObjectFacts {
    bytes: u64,
    /// Its ETag, or when it was modified.
    version: String,
}

/// An object, and where it is to be written.
#[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "without a client nothing is fetched"))]
struct Wanted {
    url: ObjectUrl,
    facts: ObjectFacts,
    file: PathBuf,
}

/// The mapped copy of an object, which cannot be evicted while this lives.
#[derive(Debug)]
pub struct HeldFile {
    bytes: Bytes,
    _held: HeldEntry,
}

impl HeldFile {
    /// Its content.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// A copy that is open.
struct OpenCopy {
    path: PathBuf,
    file: Arc<HeldFile>,
    used: Instant,
}

/// Reads from stores, through the cache.
pub struct Remote {
    client: Client,
    cache: Cache,
    /// What was opened, by address.
    known: Mutex<HashMap<PathBuf, ObjectFacts>>,
    /// Copies that are open, the one that was used last at the end.
    open: Mutex<Vec<OpenCopy>>,
    ahead: Arc<Ahead>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.ahead.stop();
    }
}

impl Remote {
    /// Starts the threads that read; `folder` keeps copies of up to `bytes_max` bytes.
    pub fn start(env: &RemoteEnv, folder: &Path, bytes_max: u64) -> Result<Arc<Remote>, DataError> {
        let client = Client::start(env)?;
        let (known, open) = (Mutex::default(), Mutex::default());
        let ahead = Arc::new(Ahead::default());
        let remote = Arc::new(Remote { client, cache: Cache::open(folder, bytes_max)?, known, open, ahead });
        Ahead::start(&remote);
        Ok(remote)
    }

    /// How many bytes copies may have.
    pub fn bytes_max(&self) -> u64 {
        self.cache.bytes_max()
    }

    /// The length of an object that was listed, and the digest of its version.
    pub fn facts(&self, path: &Path) -> Option<(u64, String)> {
        let known = lock(&self.known);
        let facts = known.get(path)?;
        Some((facts.bytes, blake3::hash(facts.version.as_bytes()).to_hex().to_string()))
    }

    /// The objects that addresses stand for together, each once: themselves, those that a pattern in the last part of the name
    /// matches, and of a folder those with one of these extensions. That they are there is known afterwards.
    fn list(&self, paths: &[PathBuf], extensions: &[&str]) -> Result<Vec<PathBuf>, DataError> {
        let mut all = Vec::new();
        for path in paths {
            all.extend(self.stands_for(&ObjectUrl::parse(path)?, extensions)?);
        }
        let mut known = lock(&self.known);
        let mut paths = Vec::with_capacity(all.len());
        for (url, facts) in all {
            let path = url.path();
            if paths.contains(&path) {
                let why = format!("{url}: given twice, its rows would count twice; remove one of the two");
                return Err(DataError::Setting { why });
            }
            known.insert(path.clone(), facts);
            paths.push(path);
        }
        Ok(paths)
    }

    fn stands_for(
        &self,
        url: &ObjectUrl,
        extensions: &[&str],
    ) -> Result<Vec<(ObjectUrl, ObjectFacts)>, DataError> {
        if url.key.is_empty() || url.key.ends_with('/') {
            return self.in_folder(url, extensions);
        }
        let (mut exact, mut all) = (Vec::new(), Vec::new());
        for key in expanded(&url.key)? {
            let one = url.with_key(key);
            if !one.name().contains('*') {
                exact.push(one);
                continue;
            }
            let fits = |name: &str| {
                (one.name().starts_with('.') || !name.starts_with('.')) && matches(one.name(), name)
            };
            let found = self.named(&one.with_key(one.parent()), &fits)?;
            if found.is_empty() {
                let hint = format!("no object in {} matches", url.with_key(one.parent()));
                return Err(DataError::Missing { path: one.path(), hint });
            }
            all.extend(found);
        }
        let heads = self.client.heads(&exact)?;
        let n = exact.len();
        for (one, facts) in exact.into_iter().zip(heads) {
            match facts {
                Ok(facts) => all.push((one, facts)),
                // Perhaps a folder without its slash.
                Err(error @ DataError::Missing { .. }) if n == 1 && !extensions.is_empty() => {
                    return match self.in_folder(&one, extensions) {
                        Ok(found) => Ok(found),
                        Err(_) => Err(error),
                    };
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// The objects of a folder with one of these extensions.
    fn in_folder(
        &self,
        folder: &ObjectUrl,
        extensions: &[&str],
    ) -> Result<Vec<(ObjectUrl, ObjectFacts)>, DataError> {
        let found = self.named(folder, &|name| has_extension(name, extensions))?;
        if found.is_empty() {
            let hint = format!(
                "no object in it ends in .{}; name the objects, as in \"part-*\"",
                extensions.join(" or .")
            );
            return Err(DataError::Missing { path: folder.path(), hint });
        }
        Ok(found)
    }

    /// The objects of a folder whose names fit, in the order that files have.
    fn named(
        &self,
        folder: &ObjectUrl,
        fits: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<(ObjectUrl, ObjectFacts)>, DataError> {
        let listed =
            self.client.list(folder, false)?.into_iter().map(|(key, facts)| (folder.with_key(key), facts));
        let mut found: Vec<_> = listed.filter(|(url, _)| fits(url.name())).collect();
        found.sort_by(|(a, _), (b, _)| by_value(a.name(), b.name()));
        Ok(found)
    }

    /// The copy of an object, mapped; fetched if it is not there.
    pub fn get(&self, path: &Path) -> Result<Arc<HeldFile>, DataError> {
        if let Some(file) = self.opened(path) {
            return Ok(file);
        }
        let held = self.hold(path, PATIENCE)?;
        let bytes = map::open(&held.data().join(ObjectUrl::parse(path)?.name()))?;
        let file = Arc::new(HeldFile { bytes, _held: held });
        let mut open = lock(&self.open);
        open.push(OpenCopy { path: path.into(), file: file.clone(), used: Instant::now() });
        if open.len() > OPEN_MAX {
            open.remove(0);
        }
        drop(open);
        self.ahead.look();
        Ok(file)
    }

    fn opened(&self, path: &Path) -> Option<Arc<HeldFile>> {
        let mut open = lock(&self.open);
        let at = open.iter().position(|copy| copy.path == path)?;
        let copy = open.remove(at);
        let file = copy.file.clone();
        open.push(OpenCopy { used: Instant::now(), ..copy });
        Some(file)
    }

    /// Closes copies that no thread reads; whether there were any.
    fn release(&self) -> bool {
        let mut open = lock(&self.open);
        let before = open.len();
        open.retain(|copy| Arc::strong_count(&copy.file) > 1);
        open.len() < before
    }

    /// Closes those that were not read for a while; whether others are open.
    fn release_idle(&self) -> bool {
        let mut open = lock(&self.open);
        open.retain(|copy| Arc::strong_count(&copy.file) > 1 || copy.used.elapsed() < IDLE);
        !open.is_empty()
    }

    /// The entry with the copy of an object that was listed.
    fn hold(&self, path: &Path, patience: Duration) -> Result<HeldEntry, DataError> {
        let url = ObjectUrl::parse(path)?;
        let known = lock(&self.known).get(path).cloned();
        let facts = match known {
            Some(facts) => facts,
            None => {
                let facts = self.client.heads(std::slice::from_ref(&url))?.remove(0)?;
                lock(&self.known).insert(path.into(), facts.clone());
                facts
            }
        };
        let name = url.name().to_string();
        self.entry(&url.to_string(), vec![(url, facts, name)], patience)
    }

    /// The entry with copies of some objects under these names.
    fn entry(
        &self,
        what: &str,
        objects: Vec<(ObjectUrl, ObjectFacts, String)>,
        patience: Duration,
    ) -> Result<HeldEntry, DataError> {
        let mut digest = blake3::Hasher::new();
        for (url, facts, name) in &objects {
            for text in [&url.to_string(), &facts.version, name] {
                digest.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
            }
            digest.update(&facts.bytes.to_le_bytes());
        }
        let bytes = objects.iter().map(|(_, facts, _)| facts.bytes).sum();
        let name = EntryName { digest: digest.finalize().to_hex()[..32].into(), bytes };
        let mut fill = |folder: &Path| {
            let wanted = objects.iter().map(|(url, facts, name)| {
                let file = folder.join(name);
                if let Some(parent) = file.parent() {
                    std::fs::create_dir_all(parent).map_err(|e| DataError::io(parent, e))?;
                }
                Ok(Wanted { url: url.clone(), facts: facts.clone(), file })
            });
            self.client.fetch(wanted.collect::<Result<_, DataError>>()?)
        };
        self.cache.get(&name, what, &mut fill, &|| self.release(), patience)
    }

    /// Copies of all that an address stands for, in one folder that is held: the path there that stands for the same. With
    /// `folder` the address is that of a folder, and everything in it is copied.
    pub fn whole(&self, path: &Path, folder: bool) -> Result<(PathBuf, HeldEntry), DataError> {
        let url = ObjectUrl::parse(path)?;
        let key = url.key.trim_end_matches('/');
        // Names stay as they are from the first part with a pattern on.
        let first = key.find(['*', '{']).unwrap_or(key.len());
        let base = match folder {
            true => key,
            false => key[..first].rsplit_once('/').map_or("", |(base, _)| base),
        };
        let relative = |url: &ObjectUrl| {
            url.key.strip_prefix(base).unwrap_or(&url.key).trim_start_matches('/').to_string()
        };
        let found = match folder {
            true => {
                let listed = self.client.list(&url, true)?;
                listed.into_iter().map(|(key, facts)| (url.with_key(key), facts)).collect()
            }
            false => self.stands_for(&url, &[])?,
        };
        if found.is_empty() || found.len() > OBJECTS_MAX {
            let hint = format!("{} objects are there; from 1 to {OBJECTS_MAX} are read", found.len());
            return Err(DataError::Missing { path: path.into(), hint });
        }
        let objects: Vec<_> = found.into_iter().map(|(url, facts)| (relative(&url), url, facts)).collect();
        if let Some((name, ..)) = objects.iter().find(|(name, ..)| leaves(name)) {
            let why =
                format!("{url}: the name {name:?} cannot be that of a file in a folder; rename the object");
            return Err(DataError::Setting { why });
        }
        let mut objects: Vec<_> = objects.into_iter().map(|(name, url, facts)| (url, facts, name)).collect();
        objects.sort_by(|a, b| a.2.cmp(&b.2));
        let held = self.entry(&url.to_string(), objects, PATIENCE)?;
        let path = match folder {
            true => held.data(),
            false => held.data().join(relative(&url)),
        };
        Ok((path, held))
    }
}

/// Whether a name would not be that of a file in its folder.
fn leaves(name: &str) -> bool {
    name.is_empty() || name.split('/').any(|part| matches!(part, "" | "." | "..")) || name.contains('\0')
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where files are: on this host, or in stores.
#[derive(Clone, Debug, Default)]
pub struct Files {
    remote: Option<Arc<Remote>>,
}

/// Two that read through the same threads are the same.
impl PartialEq for Files {
    fn eq(&self, other: &Files) -> bool {
        match (&self.remote, &other.remote) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

/// A file that is not on this host.
#[derive(Clone, Copy, Debug)]
pub struct FarFile<'a> {
    /// What reads it.
    pub remote: &'a Arc<Remote>,
    /// Its address.
    pub path: &'a Path,
}

impl Files {
    /// Files of this host, and of stores.
    pub fn with(remote: Arc<Remote>) -> Files {
        Files { remote: Some(remote) }
    }

    /// What reads from stores, if a path is an address.
    pub fn far<'a>(&'a self, path: &'a Path) -> Option<FarFile<'a>> {
        let remote = self.remote.as_ref().filter(|_| is_url(path))?;
        Some(FarFile { remote, path })
    }

    /// The files that paths stand for together, as [`crate::joined::files_of`]; of objects that they are there.
    pub fn list(&self, paths: &[PathBuf], extensions: &[&str]) -> Result<Vec<PathBuf>, DataError> {
        match &self.remote {
            Some(remote) if paths.iter().all(|path| is_url(path)) && !paths.is_empty() => {
                remote.list(paths, extensions)
            }
            _ => match paths.iter().find(|path| is_url(path)) {
                None => files_of(paths, extensions),
                Some(url) => {
                    let why = format!(
                        "{}: files and addresses do not mix in one list; copy the files",
                        url.display()
                    );
                    Err(DataError::Setting { why })
                }
            },
        }
    }

    /// The bytes of a file. A copy is held as long as they live.
    pub(crate) fn open(&self, path: &Path) -> Result<Bytes, DataError> {
        match self.far(path) {
            Some(far) => Ok(Bytes::Held(far.remote.get(path)?)),
            None => map::open(path),
        }
    }

    /// Says that these are opened next, in this order.
    pub(crate) fn soon(&self, paths: &[PathBuf]) {
        if let Some(remote) = &self.remote {
            remote.soon(paths.iter().filter(|path| is_url(path)).map(PathBuf::as_path));
        }
    }
}
