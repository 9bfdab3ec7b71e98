//! Sets whose files lie on different hosts, with no storage in common (`data.spread`).
//!
//! # How a set is opened
//! 1. Every rank lists the files that it has (`catalog`). Together they are one set in one order: by name, as on one host; with
//!    `order = "parts"` first by the rank that tells what is in them, so that the part of a set that a rank reads is mostly its own.
//!    A file that several ranks have counts once; digests say whether it is the same.
//! 2. Every rank opens its own files, and what is learnt of all of them together is that of one host, bit for bit
//!    ([`polyreme_data::table::Table::open_together`]).
//! 3. Samples that a rank does not have it borrows while it trains (`lending`, [`polyreme_data::spread`]).
//!
//! Ranks that are threads of one process have all files, and nothing of this happens.
//!
//! # When a rank dies
//! Its samples are gone, so the run ends, as it does whenever a rank is lost: opening is made of operations of the group, and borrowing of
//! letters, and both end with the report that all ranks get. A slow rank is waited for, as it is in every step.

pub(crate) mod catalog;
mod lending;

use std::path::PathBuf;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_data::remote::Files;
use polyreme_data::spread::{SpreadRun, SpreadSet, tell_lengths};
use polyreme_data::table::TableFile;
use polyreme_data::together::Members;
use polyreme_data::{DataError, Dataset, Joined};

use crate::error::TrainError;
use crate::fingerprint::ToldFile;
use crate::sets::told;
use crate::talk;
use catalog::SpreadFile;
pub use lending::Lending;

/// Who opens a set, and how its files are ordered.
pub(crate) struct Among<'a> {
    pub(crate) members: &'a mut dyn Members,
    /// Where samples of others come from; `None` if this process has all files.
    pub(crate) lending: Option<Arc<Lending>>,
    /// Whether files are ordered by the rank that tells of them first.
    pub(crate) by_teller: bool,
    /// Where files are.
    pub(crate) places: Files,
}

/// The files of a set, in its order.
pub(crate) struct SetFiles {
    /// Where they are, as far as they are here.
    pub(crate) files: Vec<TableFile>,
    /// What they are called in errors.
    pub(crate) names: Vec<PathBuf>,
    /// Their digests, if some are elsewhere.
    pub(crate) told: Option<Vec<ToldFile>>,
}

impl SetFiles {
    /// Those that are here.
    pub(crate) fn here(&self) -> impl Iterator<Item = &PathBuf> {
        self.files.iter().filter_map(|file| file.path.as_ref())
    }
}

impl Among<'_> {
    /// The files that some paths stand for together; of a folder those with one of these extensions. Collective.
    pub(crate) fn files_of(&mut self, paths: &[PathBuf], extensions: &[&str]) -> Result<SetFiles, DataError> {
        if self.lending.is_none() {
            let names = self.places.list(paths, extensions)?;
            let file = |path: &PathBuf| TableFile { path: Some(path.clone()), teller: 0 };
            let told = told(&self.places, &names);
            return Ok(SetFiles { files: names.iter().map(file).collect(), names, told });
        }
        let (listed, here) = catalog::list(paths, extensions)?;
        let all = catalog::agree(&listed, &here, paths, self.by_teller, self.members)?;
        let rank = self.members.rank();
        let file = |file: &SpreadFile| TableFile {
            path: file.place_of(rank).map(|place| here[place].clone()),
            teller: file.teller(),
        };
        Ok(SetFiles {
            files: all.iter().map(file).collect(),
            names: all.iter().map(|file| PathBuf::from(&file.name)).collect(),
            told: Some(all.iter().filter_map(SpreadFile::told).collect()),
        })
    }

    /// The parts of a set as one, a part per file. Collective.
    pub(crate) fn join(
        &mut self,
        parts: Vec<Option<Arc<dyn Dataset>>>,
        of: &SetFiles,
        set: u32,
    ) -> Result<Arc<dyn Dataset>, DataError> {
        let Some(lending) = self.lending.clone() else {
            let mut parts: Vec<_> = parts.into_iter().flatten().collect();
            return match parts.len() {
                1 => Ok(parts.remove(0)),
                _ => Ok(Arc::new(Joined::new(parts, &of.names)?)),
            };
        };
        // Before lengths are told: who knows them may ask for samples.
        lending.lend(set, parts.clone());
        let tellers: Vec<usize> = of.files.iter().map(|file| file.teller).collect();
        let lengths = tell_lengths(&parts, &tellers, self.members)?;
        let run = |(k, (file, len)): (usize, (&TableFile, usize))| SpreadRun {
            len,
            part: k as u32,
            first: 0,
            member: file.teller,
            here: file.path.is_some(),
        };
        let runs = of.files.iter().zip(lengths).enumerate().map(run).filter(|run| run.len > 0).collect();
        Ok(Arc::new(SpreadSet::join(runs, parts, self.members, lending, set)?))
    }
}

/// The ranks of a group, as those who open a set together.
pub(crate) struct RankMembers<'a> {
    comm: &'a mut Comm,
    /// Why they cannot tell each other anything any more.
    pub(crate) failed: Option<TrainError>,
}

impl<'a> RankMembers<'a> {
    pub(crate) fn new(comm: &'a mut Comm) -> RankMembers<'a> {
        RankMembers { comm, failed: None }
    }
}

impl Members for RankMembers<'_> {
    fn size(&self) -> usize {
        self.comm.size()
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn tell(&mut self, from: usize, bytes: Vec<u8>) -> Result<Vec<u8>, DataError> {
        talk::broadcast(self.comm, bytes, from).map_err(|error| {
            let why = error.to_string();
            self.failed = Some(error);
            DataError::Setting { why }
        })
    }
}
