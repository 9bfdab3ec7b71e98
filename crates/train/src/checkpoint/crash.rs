//! A disk whose power is cut: of what was not synced, any part may be there afterwards, in any order.
//!
//! The store runs on a real file system while [`Disk`](super::Disk) keeps a journal. [`Model`] replays the journal, and can
//! be stopped after any operation. It promises no more than POSIX does:
//! - what was written to a file is on the disk after a sync of that file; before, each write may be there, half there, or
//!   not (zeros, or a shorter file);
//! - a name is on the disk after a sync of its folder; before, each change of a name may be there or not, whatever
//!   happened to the others. One rename is one change.
//!
//! File systems in use promise more, so what holds here holds there. A [`Bug`] makes the model pass over what the store
//! did right, as if it had not: a check that is worth something must then fail.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::disk::DiskOp;

/// One operation of a journal, or what the store said by then.
#[derive(Clone, Debug)]
pub(super) enum Record {
    CreateDir(PathBuf),
    Create(PathBuf),
    Write(PathBuf, u64, Vec<u8>),
    Sync(PathBuf),
    SyncDir(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Remove(PathBuf),
    /// The newest and the best step that were reported as saved.
    Said(u64, u64),
}

impl Record {
    pub(super) fn of(op: DiskOp<'_>) -> Record {
        match op {
            DiskOp::CreateDir(at) => Record::CreateDir(at.into()),
            DiskOp::Create(at) => Record::Create(at.into()),
            DiskOp::Write(at, offset, bytes) => Record::Write(at.into(), offset, bytes.into()),
            DiskOp::Sync(at) => Record::Sync(at.into()),
            DiskOp::SyncDir(at) => Record::SyncDir(at.into()),
            DiskOp::Rename(from, to) => Record::Rename(from.into(), to.into()),
            DiskOp::Link(target, at) => Record::Link(target.into(), at.into()),
            DiskOp::Remove(at) => Record::Remove(at.into()),
        }
    }
}

/// A mistake that a store could make.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Bug {
    /// Files whose names end like this are not synced.
    NoSync(&'static str),
    /// Folders whose names begin like this are not synced.
    NoSyncDir(&'static str),
    /// A checkpoint gets its name before its files are synced.
    RenameFirst,
    /// What is deleted goes before the disk knows that it has no name any more.
    RemoveFirst,
}

enum DiskNode {
    File { synced: Vec<u8>, pending: Vec<(u64, Vec<u8>)> },
    Link(PathBuf),
    Folder { synced: Names, now: Names, pending: Vec<Change> },
}

type Names = BTreeMap<String, usize>;

/// A change of a folder's names.
enum Change {
    Put(String, usize),
    Move(String, String, usize),
    Drop(String),
}

impl Change {
    fn apply(&self, names: &mut Names) {
        match self {
            Change::Put(name, node) => drop(names.insert(name.clone(), *node)),
            Change::Move(from, to, node) => {
                if names.get(from) == Some(node) {
                    names.remove(from);
                }
                names.insert(to.clone(), *node);
            }
            Change::Drop(name) => drop(names.remove(name)),
        }
    }
}

/// What became of a change that was not synced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Lost,
    /// Of a write, the first half; of a change of names, all.
    Half,
    Kept,
}

/// What a disk holds, surely and perhaps.
pub(super) struct Model {
    base: PathBuf,
    nodes: Vec<DiskNode>,
    bug: Option<Bug>,
    /// Files whose sync comes after the next rename.
    late: Vec<usize>,
    /// Files whose sync comes so many records later.
    due: (usize, Vec<usize>),
    /// Whether the last rename was that of something to be deleted.
    deletes: bool,
}

impl Model {
    /// An empty folder `base`.
    pub(super) fn new(base: &Path, bug: Option<Bug>) -> Model {
        let root = DiskNode::Folder { synced: Names::new(), now: Names::new(), pending: Vec::new() };
        Model {
            base: base.into(),
            nodes: vec![root],
            bug,
            late: Vec::new(),
            due: (0, Vec::new()),
            deletes: false,
        }
    }

    /// Does what a record says.
    pub(super) fn apply(&mut self, record: &Record) {
        self.due.0 = self.due.0.saturating_sub(1);
        if self.due.0 == 0 {
            std::mem::take(&mut self.due.1).into_iter().for_each(|node| self.sync(node));
        }
        match record {
            Record::CreateDir(at) => {
                let folder =
                    DiskNode::Folder { synced: Names::new(), now: Names::new(), pending: Vec::new() };
                self.put(at, folder);
            }
            Record::Create(at) => self.put(at, DiskNode::File { synced: Vec::new(), pending: Vec::new() }),
            Record::Link(target, at) => self.put(at, DiskNode::Link(target.clone())),
            Record::Write(at, offset, bytes) => {
                let node = self.find(at);
                let DiskNode::File { pending, .. } = &mut self.nodes[node] else {
                    panic!("{at:?} is no file")
                };
                pending.push((*offset, bytes.clone()));
            }
            Record::Sync(at) => {
                let (name, node) = (name(at), self.find(at));
                match self.bug {
                    Some(Bug::NoSync(end)) if name.ends_with(end) => {}
                    Some(Bug::RenameFirst) => self.late.push(node),
                    _ => self.sync(node),
                }
            }
            Record::SyncDir(at) => {
                let skipped = match self.bug {
                    Some(Bug::NoSyncDir(begin)) => name(at).starts_with(begin),
                    Some(Bug::RemoveFirst) => std::mem::take(&mut self.deletes),
                    _ => false,
                };
                if !skipped {
                    let node = self.find(at);
                    self.sync(node);
                }
            }
            Record::Rename(from, to) => {
                let node = self.find(from);
                assert_eq!(from.parent(), to.parent(), "a rename stays in its folder");
                self.change(to, Change::Move(name(from), name(to), node));
                self.deletes = name(to).starts_with(".old-");
                // The folder is synced in between.
                self.due = (2, std::mem::take(&mut self.late));
            }
            Record::Remove(at) => self.change(at, Change::Drop(name(at))),
            Record::Said(..) => {}
        }
    }

    /// How many changes are not synced.
    pub(super) fn n_pending(&self) -> usize {
        let of = |node: &DiskNode| match node {
            DiskNode::File { pending, .. } => pending.len(),
            DiskNode::Link(_) => 0,
            DiskNode::Folder { pending, .. } => pending.len(),
        };
        self.nodes.iter().map(of).sum()
    }

    /// What a power cut leaves: for every path below the base its content, `None` for a folder. `fates` has one for each
    /// change that is not synced.
    pub(super) fn after_cut(&self, fates: &[Fate]) -> BTreeMap<PathBuf, Option<Left>> {
        let mut fates = fates.iter();
        let mut take = |n: usize| -> Vec<Fate> { fates.by_ref().take(n).copied().collect() };
        let fates: Vec<Vec<Fate>> = self
            .nodes
            .iter()
            .map(|node| match node {
                DiskNode::File { pending, .. } => take(pending.len()),
                DiskNode::Link(_) => Vec::new(),
                DiskNode::Folder { pending, .. } => take(pending.len()),
            })
            .collect();
        let mut left = BTreeMap::new();
        self.leave(0, Path::new(""), &fates, &mut left);
        left
    }

    fn leave(&self, node: usize, at: &Path, fates: &[Vec<Fate>], left: &mut BTreeMap<PathBuf, Option<Left>>) {
        match &self.nodes[node] {
            DiskNode::Link(target) => drop(left.insert(at.into(), Some(Left::Link(target.clone())))),
            DiskNode::File { synced, pending } => {
                let mut bytes = synced.clone();
                for ((offset, written), fate) in pending.iter().zip(&fates[node]) {
                    let n = match fate {
                        Fate::Lost => continue,
                        Fate::Half => written.len() / 2,
                        Fate::Kept => written.len(),
                    };
                    write_at(&mut bytes, *offset as usize, &written[..n]);
                }
                left.insert(at.into(), Some(Left::File(bytes)));
            }
            DiskNode::Folder { synced, pending, .. } => {
                left.insert(at.into(), None);
                let mut names = synced.clone();
                let kept = pending.iter().zip(&fates[node]).filter(|(_, fate)| **fate != Fate::Lost);
                kept.for_each(|(change, _)| change.apply(&mut names));
                for (name, node) in names {
                    self.leave(node, &at.join(name), fates, left);
                }
            }
        }
    }

    fn put(&mut self, at: &Path, node: DiskNode) {
        self.nodes.push(node);
        self.change(at, Change::Put(name(at), self.nodes.len() - 1));
    }

    fn change(&mut self, at: &Path, change: Change) {
        let folder = self.find(at.parent().expect("below the base"));
        let DiskNode::Folder { now, pending, .. } = &mut self.nodes[folder] else { panic!("{at:?}") };
        change.apply(now);
        pending.push(change);
    }

    fn sync(&mut self, node: usize) {
        match &mut self.nodes[node] {
            DiskNode::File { synced, pending } => {
                pending.drain(..).for_each(|(offset, bytes)| write_at(synced, offset as usize, &bytes));
            }
            DiskNode::Link(_) => {}
            DiskNode::Folder { synced, now, pending } => {
                synced.clone_from(now);
                pending.clear();
            }
        }
    }

    fn find(&self, at: &Path) -> usize {
        let below = at.strip_prefix(&self.base).unwrap_or_else(|_| panic!("{at:?} is below {:?}", self.base));
        below.components().fold(0, |node, part| {
            let DiskNode::Folder { now, .. } = &self.nodes[node] else { panic!("{at:?}") };
            now[part.as_os_str().to_str().unwrap()]
        })
    }
}

/// What a power cut leaves under a name.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Left {
    File(Vec<u8>),
    Link(PathBuf),
}

/// Puts what is left into a real folder.
pub(super) fn build(left: &BTreeMap<PathBuf, Option<Left>>, folder: &Path) {
    for (at, what) in left.iter().filter(|(at, _)| !at.as_os_str().is_empty()) {
        let at = folder.join(at);
        match what {
            None => fs::create_dir(at).unwrap(),
            Some(Left::File(bytes)) => fs::write(at, bytes).unwrap(),
            Some(Left::Link(target)) => std::os::unix::fs::symlink(target, at).unwrap(),
        }
    }
}

fn write_at(bytes: &mut Vec<u8>, offset: usize, written: &[u8]) {
    if written.is_empty() {
        return;
    }
    bytes.resize(bytes.len().max(offset + written.len()), 0);
    bytes[offset..][..written.len()].copy_from_slice(written);
}

fn name(at: &Path) -> String {
    at.file_name().unwrap().to_str().unwrap().into()
}
