//! A folder with copies of objects, of bounded size, that all processes of a host may share.
//!
//! An entry is a folder: `lock`, and in `data` the files. Its name is a digest of what is in it (addresses, versions, lengths) and its
//! length, so an object that changed is another entry, and sizes are known without looking inside.
//!
//! - **Whole or absent.** An entry is made under a name that begins with `.part-`, its files are written to the disk, and then it is
//!   renamed. What a process that was killed had begun is deleted by the next one that needs room or the same entry.
//! - **Never evicted in use.** Who reads an entry has a shared lock on its `lock`; who evicts takes the exclusive one, or passes on.
//!   The kernel lets go of the locks of a process that dies.
//! - **Bounded.** Room is made before an entry is begun, by deleting the ones that were used longest ago, under the lock of the whole
//!   folder. An entry being made counts with its whole length.
//! - **Once.** Who wants an entry that another process is making waits for it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::error::DataError;

/// What an entry that is being made is called first.
const PART: &str = ".part-";
/// What an entry that is being deleted is called.
const GONE: &str = ".gone-";
/// How often to look whether others have let go of an entry.
const LOOK: Duration = Duration::from_millis(20);

/// The folder.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    bytes_max: u64,
}

/// An entry that cannot be evicted while this lives.
#[derive(Debug)]
pub struct HeldEntry {
    folder: PathBuf,
    /// Locked.
    _lock: File,
}

/// What is in an entry.
#[derive(Clone, Debug)]
pub(super) struct EntryName {
    /// Of its content.
    pub(super) digest: String,
    /// The bytes of its files.
    pub(super) bytes: u64,
}

/// An entry of the folder as its name says it is.
struct FoundEntry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl HeldEntry {
    /// Where its files are.
    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }
}

impl Cache {
    pub(super) fn open(folder: &Path, bytes_max: u64) -> Result<Cache, DataError> {
        fs::create_dir_all(folder).map_err(|e| DataError::io(folder, e))?;
        Ok(Cache { folder: folder.into(), bytes_max })
    }

    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The entry, if it is there.
    pub(super) fn find(&self, name: &EntryName) -> Result<Option<HeldEntry>, DataError> {
        let folder = self.folder.join(name.file_name());
        let lock = match File::open(folder.join("lock")) {
            Ok(lock) => lock,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(DataError::io(folder, e)),
        };
        lock.lock_shared().map_err(|e| DataError::io(&folder, e))?;
        // It may have been evicted between the two.
        let mine = lock.metadata().map_err(|e| DataError::io(&folder, e))?.ino();
        if fs::metadata(folder.join("lock")).map(|found| found.ino()).ok() != Some(mine) {
            return Ok(None);
        }
        // When it was used last. That this is not noted, in a folder of another user, changes no result.
        let _ = lock.set_modified(SystemTime::now());
        Ok(Some(HeldEntry { folder, _lock: lock }))
    }

    /// The entry; if it is not there, `fill` writes its files into a folder. `release` lets go of what this process has open and
    /// does not use, and says whether there was anything. For what other processes use it waits up to `patience`.
    pub(super) fn get(
        &self,
        name: &EntryName,
        what: &str,
        fill: &mut dyn FnMut(&Path) -> Result<(), DataError>,
        release: &dyn Fn() -> bool,
        patience: Duration,
    ) -> Result<HeldEntry, DataError> {
        if name.bytes > self.bytes_max {
            let why = format!(
                "{what}: {} bytes, and the cache in {} may have {}; raise `data.cache.max_gib`",
                name.bytes,
                self.folder.display(),
                self.bytes_max
            );
            return Err(DataError::Setting { why });
        }
        let start = Instant::now();
        loop {
            if let Some(held) = self.find(name)? {
                return Ok(held);
            }
            match self.begin(name)? {
                Begun::Here => {}
                Begun::Mine(lock, part) => return self.finish(name, lock, &part, fill),
                Begun::Others(lock) => {
                    // Until it is whole, or its maker is dead. Shared: the maker goes on to use it.
                    lock.lock_shared().map_err(|e| DataError::io(&self.folder, e))?;
                }
                Begun::Full if release() => {}
                Begun::Full if start.elapsed() < patience => thread::sleep(LOOK),
                Begun::Full => {
                    let why = format!(
                        "{what}: {} bytes do not fit into the cache in {}, of whose {} bytes all others are in use; raise \
                         `data.cache.max_gib`",
                        name.bytes,
                        self.folder.display(),
                        self.bytes_max
                    );
                    return Err(DataError::Setting { why });
                }
            }
        }
    }

    /// Locks the folder, as long as the result lives: nobody begins, evicts or names an entry meanwhile.
    fn lock(&self) -> Result<File, DataError> {
        let at = |e| DataError::io(&self.folder, e);
        let all = File::create(self.folder.join(".lock")).map_err(at)?;
        all.lock().map_err(at)?;
        Ok(all)
    }

    /// Makes room for an entry and begins it.
    fn begin(&self, name: &EntryName) -> Result<Begun, DataError> {
        let at = |e| DataError::io(&self.folder, e);
        let _all = self.lock()?;
        if self.folder.join(name.file_name()).exists() {
            return Ok(Begun::Here);
        }
        let part = self.folder.join(format!("{PART}{}", name.file_name()));
        if let Ok(lock) = File::open(part.join("lock")) {
            match lock.try_lock() {
                Ok(()) => fs::remove_dir_all(&part).map_err(at)?,
                Err(TryLockError::WouldBlock) => return Ok(Begun::Others(lock)),
                Err(TryLockError::Error(e)) => return Err(at(e)),
            }
        } else if part.exists() {
            // Its maker died before there was a lock.
            fs::remove_dir_all(&part).map_err(at)?;
        }
        if !self.make_room(name.bytes)? {
            return Ok(Begun::Full);
        }
        fs::create_dir_all(part.join("data")).map_err(at)?;
        let lock = File::create(part.join("lock")).map_err(at)?;
        lock.lock().map_err(at)?;
        Ok(Begun::Mine(lock, part))
    }

    fn finish(
        &self,
        name: &EntryName,
        lock: File,
        part: &Path,
        fill: &mut dyn FnMut(&Path) -> Result<(), DataError>,
    ) -> Result<HeldEntry, DataError> {
        let folder = self.folder.join(name.file_name());
        let done = fill(&part.join("data")).and_then(|()| {
            // The system lets go of a lock in the moment in which it becomes a shared one: without the folder's the entry could be evicted.
            let _all = self.lock()?;
            fs::rename(part, &folder).map_err(|e| DataError::io(&folder, e))?;
            lock.lock_shared().map_err(|e| DataError::io(&folder, e))
        });
        match done {
            Ok(()) => Ok(HeldEntry { folder, _lock: lock }),
            Err(error) => {
                // What is left of it is found by the next one that needs room.
                let _ = fs::remove_dir_all(part);
                Err(error)
            }
        }
    }

    /// Deletes what was used longest ago until there is room for so many bytes; whether there is. Called under the folder's lock.
    fn make_room(&self, bytes: u64) -> Result<bool, DataError> {
        let mut entries = self.entries()?;
        let mut have: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.sort_by_key(|entry| entry.used);
        for entry in entries {
            let is_part = entry.path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(PART));
            // Parts of the dead go whether or not there is room.
            if have + bytes <= self.bytes_max && !is_part {
                continue;
            }
            // Locked until it is gone: who finds it meanwhile waits, and then sees that it is.
            let Ok(lock) = File::open(entry.path.join("lock")) else { continue };
            if lock.try_lock().is_ok() && self.delete(&entry.path).is_ok() {
                have -= entry.bytes;
            }
        }
        Ok(have + bytes <= self.bytes_max)
    }

    /// All entries, and those that are being made.
    fn entries(&self) -> Result<Vec<FoundEntry>, DataError> {
        let at = |e| DataError::io(&self.folder, e);
        let mut entries = Vec::new();
        for found in fs::read_dir(&self.folder).map_err(at)? {
            let path = found.map_err(at)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with(GONE) {
                // Its deletion was not finished.
                let _ = fs::remove_dir_all(&path);
            }
            let Some(bytes) = name.rsplit_once('-').and_then(|(_, bytes)| bytes.parse().ok()) else {
                continue;
            };
            let used = fs::metadata(path.join("lock")).and_then(|lock| lock.modified());
            entries.push(FoundEntry { path, bytes, used: used.unwrap_or(SystemTime::UNIX_EPOCH) });
        }
        Ok(entries)
    }

    /// Deletes an entry: renamed first, so that a part of one is never found.
    fn delete(&self, path: &Path) -> io::Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let gone = self.folder.join(format!("{GONE}{}-{name}", std::process::id()));
        fs::rename(path, &gone)?;
        fs::remove_dir_all(gone)
    }
}

/// How an entry was begun.
enum Begun {
    /// It is there now.
    Here,
    /// By this caller, in this folder.
    Mine(File, PathBuf),
    /// By another one, which has this lock.
    Others(File),
    /// Not: what is there is in use.
    Full,
}

impl EntryName {
    fn file_name(&self) -> String {
        format!("{}-{}", self.digest, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn name(digest: &str, bytes: u64) -> EntryName {
        EntryName { digest: digest.into(), bytes }
    }

    fn get(cache: &Cache, digest: &str, bytes: u64) -> Result<HeldEntry, DataError> {
        let mut fill = |folder: &Path| {
            fs::write(folder.join("file"), vec![7; bytes as usize]).map_err(|e| DataError::io(folder, e))
        };
        cache.get(&name(digest, bytes), digest, &mut fill, &|| false, Duration::ZERO)
    }

    fn there(cache: &Cache) -> Vec<String> {
        let mut all: Vec<String> = fs::read_dir(&cache.folder)
            .unwrap()
            .map(|found| found.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != ".lock")
            .collect();
        all.sort();
        all
    }

    #[test]
    fn what_was_used_longest_ago_and_is_not_in_use_makes_room() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 100).unwrap();
        let (a, b) = (get(&cache, "a", 40).unwrap(), get(&cache, "b", 40).unwrap());
        assert_eq!(fs::read(a.data().join("file")).unwrap(), vec![7; 40]);
        drop((a, b));
        // Used again, `a` is the newer one.
        drop(get(&cache, "a", 40).unwrap());
        let c = get(&cache, "c", 40).unwrap();
        assert_eq!(there(&cache), ["a-40", "c-40"]);
        // In use, nothing goes: `c` is older than `a` is then.
        drop(get(&cache, "a", 40).unwrap());
        drop(get(&cache, "d", 40).unwrap());
        assert_eq!(there(&cache), ["c-40", "d-40"]);
        drop(c);
        let large = get(&cache, "large", 101).unwrap_err().to_string();
        assert!(large.contains("101 bytes") && large.contains("data.cache.max_gib"), "{large}");
        assert!(cache.find(&name("a", 40)).unwrap().is_none());
        assert!(cache.find(&name("d", 40)).unwrap().is_some());
    }

    #[test]
    fn what_a_dead_process_began_is_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 100).unwrap();
        for part in ["a-60", "b-60"] {
            let part = folder.path().join(format!("{PART}{part}"));
            fs::create_dir_all(part.join("data")).unwrap();
            fs::write(part.join("lock"), "").unwrap();
            fs::write(part.join("data/file"), "half").unwrap();
        }
        fs::create_dir_all(folder.path().join(".gone-1-x-10/data")).unwrap();
        let a = get(&cache, "a", 60).unwrap();
        assert_eq!(fs::read(a.data().join("file")).unwrap(), vec![7; 60]);
        assert_eq!(there(&cache), ["a-60"]);
        // One that could not be filled leaves nothing.
        let mut fill = |folder: &Path| Err(DataError::corrupt(folder, 0, "broken"));
        assert!(cache.get(&name("c", 10), "c", &mut fill, &|| false, Duration::ZERO).is_err());
        assert_eq!(there(&cache), ["a-60"]);
    }

    #[test]
    fn an_entry_is_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let fills = AtomicUsize::new(0);
        let (fills, path) = (&fills, folder.path());
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(move || {
                    let cache = Cache::open(path, 100).unwrap();
                    let mut fill = |folder: &Path| {
                        fills.fetch_add(1, Ordering::SeqCst);
                        fs::write(folder.join("file"), "x").map_err(|e| DataError::io(folder, e))
                    };
                    let held = cache.get(&name("a", 1), "a", &mut fill, &|| false, Duration::ZERO).unwrap();
                    assert_eq!(fs::read(held.data().join("file")).unwrap(), b"x");
                });
            }
        });
        assert_eq!(fills.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn who_holds_what_is_not_used_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 100).unwrap();
        let idle = std::cell::RefCell::new(vec![get(&cache, "a", 60).unwrap()]);
        let mut fill =
            |folder: &Path| fs::write(folder.join("file"), "x").map_err(|e| DataError::io(folder, e));
        let held =
            cache.get(&name("b", 60), "b", &mut fill, &|| idle.borrow_mut().pop().is_some(), Duration::ZERO);
        assert!(held.is_ok());
        assert_eq!(there(&cache), ["b-60"]);
    }
}
