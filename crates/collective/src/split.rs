//! Subgroups of a group: the rows and columns of a mesh.
//!
//! [`Comm::split`] divides the ranks of a group into new ones, and every rank gets its end of the one that it is in. A
//! new group has its own transport, so its operations run concurrently with those of the old group and of other new
//! ones, in any order, without mixing up:
//!
//! - ranks that share memory meet in a new segment. Blocks that the old group had by then are accessed without a copy
//!   in the new one too;
//! - ranks over sockets have new connections ([`Connect`]), with a thread that communicates while the rank computes;
//! - of ranks on several hosts, groups within one host share memory, and the others have connections;
//! - under MPI a group is a communicator.
//!
//! Reports name ranks as the whole job does. All groups share the alarm of the process, so a rank that is lost in one
//! ends the waits in all of them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use polyreme_net::{Alarm, Cause, Links, Mailbox, Pulse, Report};

use crate::background::Background;
use crate::carrier::{Carrier, measured};
use crate::comm::{Comm, CommKind, Mail};
use crate::element::Reduce;
use crate::lane::Lane;
use crate::mailbox::Office;
use crate::shared::{ShmComm, ShmSetup, no_memory};
use crate::work::{Cuts, digest};

/// Connects some ranks of the job, by their numbers in the job and in this order, and returns this rank's links to the
/// others. A group's number is the same on all of its ranks, and two groups with a common pair of ranks have different
/// numbers.
pub type Connect = Arc<dyn Fn(u16, &[usize]) -> io::Result<Links> + Send + Sync>;

/// Numbers up to this one are for groups that the job starts with; the last three are for its messages.
const NUMBERS_KEPT: u64 = 16;
/// The number of the group of all ranks for its messages: see [`NUMBERS_EACH`].
const WORLD: u16 = 13;
/// A group has one number for itself, and one for messages in each direction.
const NUMBERS_EACH: u64 = 3;

/// What reports call the making of groups.
const OP: &str = "split";

/// Room for the path of a segment.
const PATH_BYTES: usize = 128;

/// What a group knows about its ranks, to split it.
#[derive(Clone)]
pub(crate) struct Ways {
    /// Each rank's number in the job.
    pub(crate) names: Vec<usize>,
    /// How ranks of one host share memory, if they do.
    local: Option<Local>,
    /// The host of each rank, as a number.
    hosts: Vec<usize>,
    pub(crate) connect: Option<Connect>,
    pub(crate) office: Office,
    /// The last group number of this process.
    number: Arc<AtomicU64>,
}

/// Ranks that see each other's memory.
#[derive(Clone)]
enum Local {
    Threads(Arc<Lobby>),
    Processes { host: String, alarm: Alarm, stall: Duration },
}

/// Where threads leave each other their ends of what one of them has made.
pub(crate) struct Lobby {
    pub(crate) alarm: Alarm,
    stall: Duration,
    pulses: Vec<Pulse>,
    groups: LeftEnds<ShmComm>,
    pub(crate) mailboxes: LeftEnds<Mailbox>,
}

/// Ends, each until its rank takes it: by the number of what they are ends of, and the name of the first rank, who made them.
pub(crate) struct LeftEnds<T>(Mutex<HashMap<(u64, usize), Ends<T>>>);

/// By rank, an end that is still to be taken.
type Ends<T> = Vec<Option<T>>;

impl Ways {
    fn new(local: Option<Local>, hosts: Vec<usize>) -> Ways {
        let (names, number) = ((0..hosts.len()).collect(), Arc::new(AtomicU64::new(NUMBERS_KEPT)));
        Ways { names, local, hosts, connect: None, office: Office::default(), number }
    }

    pub(crate) fn threads(alarm: &Alarm, stall: Duration, pulses: &[Pulse]) -> Ways {
        let (alarm, pulses, size) = (alarm.clone(), pulses.to_vec(), pulses.len());
        let lobby =
            Lobby { alarm, stall, pulses, groups: LeftEnds::default(), mailboxes: LeftEnds::default() };
        Ways::new(Some(Local::Threads(Arc::new(lobby))), vec![0; size])
    }

    pub(crate) fn processes(setup: &ShmSetup) -> Ways {
        let (host, alarm, stall) = (setup.host.clone(), setup.alarm.clone(), setup.stall);
        let ways = Ways::new(Some(Local::Processes { host, alarm, stall }), vec![0; setup.size]);
        if setup.world.is_empty() { ways } else { Ways { names: setup.world.clone(), ..ways } }
    }

    pub(crate) fn apart(size: usize) -> Ways {
        Ways::new(None, (0..size).collect())
    }

    /// Ranks on hosts whose ranks share memory as those of `inside` do.
    pub(crate) fn levels(hosts: &[Vec<usize>], inside: &Ways) -> Ways {
        let size = hosts.iter().map(Vec::len).sum();
        let of = |rank| hosts.iter().position(|ranks| ranks.contains(&rank)).expect("every rank has a host");
        let local = inside.local.clone().filter(|local| matches!(local, Local::Processes { .. }));
        Ways::new(local, (0..size).map(of).collect())
    }

    /// Those of some of the ranks.
    fn of(&self, members: &[usize]) -> Ways {
        let (names, office) =
            (members.iter().map(|&rank| self.names[rank]).collect(), self.office.of_split());
        Ways { names, hosts: members.iter().map(|&rank| self.hosts[rank]).collect(), office, ..self.clone() }
    }

    /// Where ranks that are threads leave things for each other.
    pub(crate) fn lobby(&self) -> Option<Arc<Lobby>> {
        match &self.local {
            Some(Local::Threads(lobby)) => Some(lobby.clone()),
            Some(Local::Processes { .. }) | None => None,
        }
    }

    fn share_memory(&self) -> bool {
        self.local.is_some() && self.hosts.iter().all(|host| *host == self.hosts[0])
    }
}

impl Comm {
    /// Divides the ranks of this group into new ones, and returns this rank's end of the one that it is in. All ranks
    /// call it at the same time with the same `groups`, which name every rank of this group once; in a new group ranks
    /// are numbered in the order of its list. No operation may be pending in this group or in another.
    ///
    /// Operations of several groups may be started in any order. Ranks that share memory do their part of an operation
    /// while they wait for it, so they must not wait for operations of several groups in a cycle: one rank for the row
    /// first, the next for the column. Programs that wait for groups in the same order everywhere do not.
    ///
    /// # Panics
    /// If `groups` do not name every rank once.
    pub fn split(&mut self, groups: &[Vec<usize>]) -> Result<Comm, Report> {
        let (color, members) = group_of(groups, self.rank(), self.size());
        let number = self.agree_on(groups)?;
        let ways = self.ways.of(members);
        let place = members.iter().position(|rank| *rank == self.rank()).expect("the group has this rank");
        let inner = match &mut self.inner {
            CommKind::Background(background) if background.is_mpi() => {
                CommKind::Background(background.split_mpi(color, place, &ways.names)?)
            }
            _ => self.connect_group(number, place, members, &ways)?,
        };
        let mut group = self.child(place, members.len(), inner, ways);
        group.open_mail(u16::try_from(number).unwrap_or(u16::MAX));
        if self.mail.is_none() {
            self.open_mail(WORLD);
        }
        Ok(group)
    }

    /// Opens a path for messages beside operations, unless there is one already.
    fn open_mail(&mut self, number: u16) {
        let CommKind::Background(background) = &self.inner else { return };
        self.mail = match (&self.ways.connect, background.is_mpi()) {
            (_, true) => background.mpi_mail().map(Mail::Mpi),
            (Some(connect), false) => {
                let (names, connect, alarm) = (self.ways.names.clone(), connect.clone(), background.alarm());
                Some(Mail::Links(Lane::new(self.rank(), names, connect, number, alarm)))
            }
            (None, false) => None,
        };
    }

    /// Sets how ranks of the job are connected for groups over sockets and for messages.
    pub fn set_connect(&mut self, connect: Connect) {
        self.ways.connect = Some(connect);
        self.open_mail(WORLD);
    }

    /// A number for the next groups, larger than any that a rank of this one has used; an error if ranks name different
    /// groups.
    fn agree_on(&mut self, groups: &[Vec<usize>]) -> Result<u64, Report> {
        let lists: Vec<u64> = groups.iter().map(|ranks| digest(ranks)).collect();
        let all = lists.iter().fold(groups.len() as u64, |h, list| h.rotate_left(7) ^ list);
        // As a positive number, so that its negative has the same size.
        let all = (all >> 2) as i64;
        let mut said = [self.ways.number.load(Ordering::SeqCst) as i64 + 1, all, -all];
        self.all_reduce(&mut said, Reduce::Max)?;
        if said[1] != -said[2] {
            let why = "ranks split their group differently; all must name the same groups";
            return Err(self.failed(OP, why));
        }
        // Ranks that are threads count together, and one of them may be ahead in another group.
        self.ways.number.fetch_max(said[0] as u64 + NUMBERS_EACH - 1, Ordering::SeqCst);
        Ok(said[0] as u64)
    }

    fn connect_group(
        &mut self,
        number: u64,
        place: usize,
        members: &[usize],
        ways: &Ways,
    ) -> Result<CommKind, Report> {
        let mut path = String::new();
        let mut made = None;
        let leads = place == 0 && ways.share_memory() && members.len() > 1;
        if let (true, Some(local)) = (leads, &ways.local) {
            match local {
                Local::Threads(lobby) => {
                    let pulses: Vec<_> = ways.names.iter().map(|&rank| lobby.pulses[rank].clone()).collect();
                    let ends = ShmComm::local(&lobby.alarm, lobby.stall, &pulses, &ways.names);
                    let ends = ends.map_err(|error| self.failed(OP, &no_memory("a group", &error)))?;
                    lobby.groups.leave((number, ways.names[0]), ends);
                }
                Local::Processes { .. } => {
                    // Only ranks of the group that is split learn its path.
                    let segment = ShmComm::segment(members.len(), 0);
                    let segment = segment.map_err(|error| self.failed(OP, &no_memory("a group", &error)))?;
                    path = segment.path().unwrap_or_default();
                    made = Some(segment);
                }
            }
        }
        // Every rank has made what others take before any goes on.
        let paths = if self.ways.local.is_some() { self.tell_path(&path)? } else { Vec::new() };
        if members.len() == 1 {
            return Ok(CommKind::Shared(Box::new(self.one(ways)?)));
        }
        let shared = match &ways.local {
            Some(Local::Threads(lobby)) => Some(lobby.groups.take((number, ways.names[0]), place)),
            Some(Local::Processes { host, alarm, stall }) if ways.share_memory() => {
                let segment = match made {
                    Some(segment) => segment,
                    None => ShmComm::open_segment(&paths[members[0]], members.len(), 0)
                        .map_err(|error| self.failed(OP, &no_memory("a group", &error)))?,
                };
                let (host, alarm, world) = (host.clone(), alarm.clone(), ways.names.clone());
                let setup = ShmSetup::new(place, members.len(), segment);
                Some(ShmComm::shm(ShmSetup { host, alarm, world, stall: *stall, ..setup })?)
            }
            _ => None,
        };
        if let Some(mut shared) = shared {
            if let CommKind::Shared(parent) = &self.inner {
                shared.inherit(parent, members);
            }
            return Ok(CommKind::Shared(Box::new(shared)));
        }
        let Some(connect) = &ways.connect else {
            return Err(self.failed(OP, "this group was made without a way to connect some of its ranks"));
        };
        let group = u16::try_from(number).ok().filter(|n| u64::from(*n) + NUMBERS_EACH < 1 << 16);
        let group =
            group.ok_or_else(|| self.failed(OP, "no more groups can be made: there are 21,800 of them"))?;
        let connected = connect(group, &ways.names);
        let mut links =
            connected.map_err(|error| self.failed(OP, &format!("a group cannot be connected: {error}")))?;
        links.set_names(ways.names.clone());
        let carrier = Carrier::Links(Box::new(measured(crate::links::Linked::over(links))?));
        Ok(CommKind::Background(Background::new(carrier)))
    }

    /// A group of this rank alone.
    fn one(&mut self, ways: &Ways) -> Result<ShmComm, Report> {
        let made = ShmComm::local(&Alarm::default(), Duration::MAX, &[self.pulse()], &ways.names);
        let made = made.map_err(|error| self.failed(OP, &no_memory("a group", &error)))?;
        Ok(made.into_iter().next().expect("a group of one has a member"))
    }

    /// Exchanges paths: every rank gets those of all.
    fn tell_path(&mut self, path: &str) -> Result<Vec<String>, Report> {
        if path.len() > PATH_BYTES {
            return Err(self.failed(OP, "the path of shared memory is too long"));
        }
        let (rank, size) = (self.rank(), self.size());
        let mut told = vec![0u8; size * PATH_BYTES];
        told[rank * PATH_BYTES..][..path.len()].copy_from_slice(path.as_bytes());
        let cuts: Cuts = (0..=size).map(|rank| rank * PATH_BYTES).collect();
        self.all_gather(&mut told, &cuts)?;
        let text = |row: &[u8]| String::from_utf8_lossy(row).trim_end_matches('\0').to_owned();
        Ok(told.chunks_exact(PATH_BYTES).map(text).collect())
    }

    /// Ends this group because of this rank; the report says why.
    pub(crate) fn failed(&mut self, op: &str, why: &str) -> Report {
        self.fail(why);
        let (rank, step) = (self.ways.names[self.rank()], self.step());
        let cause = Cause::Failed { why: why.into() };
        Report { rank, host: String::new(), step, op: op.into(), cause }
    }
}

impl<T> Default for LeftEnds<T> {
    fn default() -> LeftEnds<T> {
        LeftEnds(Mutex::default())
    }
}

impl<T> LeftEnds<T> {
    /// Before all ranks meet.
    pub(crate) fn leave(&self, group: (u64, usize), ends: Vec<T>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(group, ends.into_iter().map(Some).collect());
    }

    /// After that, every rank takes its end once, and the last one cleans up.
    pub(crate) fn take(&self, group: (u64, usize), place: usize) -> T {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = all.get_mut(&group).expect("the first rank left them before the ranks met");
        let end = ends[place].take().expect("every rank takes its end once");
        if ends.iter().all(Option::is_none) {
            all.remove(&group);
        }
        end
    }
}

/// The group that a rank is in, and which one that is.
fn group_of(groups: &[Vec<usize>], rank: usize, size: usize) -> (usize, &[usize]) {
    let mut all: Vec<usize> = groups.iter().flatten().copied().collect();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..size), "groups {groups:?} name every one of {size} ranks once");
    let color = groups.iter().position(|ranks| ranks.contains(&rank)).expect("every rank is named");
    (color, &groups[color])
}

/// The groups along one axis of a mesh of ranks: those whose coordinates differ in that axis only. `sizes` are those of the
/// axes, and the last one's coordinate counts fastest.
pub fn along(sizes: &[usize], axis: usize) -> Vec<Vec<usize>> {
    let stride: usize = sizes[axis + 1..].iter().product();
    let (size, all) = (sizes[axis], sizes.iter().product());
    let firsts = (0..all).filter(|rank| (rank / stride).is_multiple_of(size));
    firsts.map(|first| (0..size).map(|k| first + k * stride).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_of_a_mesh() {
        assert_eq!(along(&[2, 3], 0), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(along(&[2, 3], 1), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(along(&[2, 2, 2], 1), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(along(&[3], 0), [[0, 1, 2]]);
        assert_eq!(along(&[2, 1], 1), [[0], [1]]);
    }
}
