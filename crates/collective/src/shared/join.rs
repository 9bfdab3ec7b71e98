//! How a group of ranks with shared memory is formed: threads get their ends at once, processes meet in a segment.
//!
//! A process writes its pid and the number of cores it may run on to its desk, and waits for the others; then it
//! watches their processes, and all choose algorithms by the smallest number of cores. A rank or the parent of all may
//! create the segment. A rank that dies before it joined is not known here: the control plane raises the alarm.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use polyreme_net::patience::STALL;
use polyreme_net::{Alarm, Cause, Peers, Pulse, Report, Segment, SegmentError};

use super::ShmComm;
use super::blocks::{GroupBlocks, Handover};
use super::lateness::Lateness;
use super::layout::{Front, RANKS_MAX, ShmLayout};
use super::letters::Letters;
use super::meet::{Meet, cores};

/// What a rank needs to join a group of processes that share memory.
pub struct ShmSetup {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Made by [`crate::Comm::segment`], opened by [`crate::Comm::open_segment`].
    pub segment: Segment,
    /// This host's name, for reports.
    pub host: String,
    /// The ranks' numbers in the whole job, for reports; empty if they are the same.
    pub world: Vec<usize>,
    /// The alarm that ends every wait of this process.
    pub alarm: Alarm,
    /// How long all ranks may stand still; [`Duration::MAX`] where a control plane decides that.
    pub stall: Duration,
}

impl ShmSetup {
    /// A group that is the whole job, without a control plane.
    pub fn new(rank: usize, size: usize, segment: Segment) -> ShmSetup {
        let (host, world, alarm) = (String::new(), Vec::new(), Alarm::default());
        ShmSetup { rank, size, segment, host, world, alarm, stall: STALL }
    }
}

impl ShmComm {
    /// Threads of this process: each with a pulse and its number in reports.
    pub(crate) fn local(
        alarm: &Alarm,
        stall: Duration,
        pulses: &[Pulse],
        names: &[usize],
    ) -> Result<Vec<ShmComm>, SegmentError> {
        let size = pulses.len();
        assert!(size <= RANKS_MAX, "a group has up to {RANKS_MAX} ranks, not {size}");
        let layout = ShmLayout::of(size);
        let memory = Segment::local(if size > 1 { layout.bytes() } else { layout.warm_bytes() })?;
        let (handover, cores) = (Arc::new(Mutex::new(None)), cores());
        let boxes = Letters::boxes(size);
        let end = |rank| {
            let memory = memory.block().clone();
            let lateness = Lateness::new(stall, pulses.to_vec());
            let mut meet =
                Meet::new(rank, layout, memory, alarm.clone(), lateness, String::new(), names.to_vec());
            meet.agree_on_cores(cores);
            ShmComm::at(meet, Some(handover.clone()), Letters::new(boxes.clone()))
        };
        Ok((0..size).map(end).collect())
    }

    /// Memory for a group of processes.
    pub(crate) fn segment(size: usize, generation: u64) -> Result<Segment, SegmentError> {
        let layout = ShmLayout::of(size.clamp(1, RANKS_MAX));
        let segment = Segment::create(layout.bytes(), layout.warm_bytes())?;
        let front = segment.block().at::<Front>(0);
        front.generation.store(generation, Ordering::SeqCst);
        front.mark.store(layout.mark(), Ordering::SeqCst);
        Ok(segment)
    }

    /// Opens memory that another process created. Its number in that process may be that of an older generation's, or of a newer one's.
    pub(crate) fn open_segment(path: &str, size: usize, generation: u64) -> Result<Segment, SegmentError> {
        let layout = ShmLayout::of(size.clamp(1, RANKS_MAX));
        let segment = Segment::open(path, layout.bytes(), layout.warm_bytes())?;
        let strange = |what: String| Err(SegmentError::Strange { path: path.into(), what });
        let front = segment.block().at::<Front>(0);
        if front.mark.load(Ordering::SeqCst) != layout.mark() {
            return strange(format!("it was not made for {size} ranks of this version"));
        }
        let found = front.generation.load(Ordering::SeqCst);
        if found != generation {
            return strange(format!("it is of generation {found}, not of {generation}"));
        }
        Ok(segment)
    }

    /// One process of a group. Returns when all have joined.
    pub(crate) fn shm(setup: ShmSetup) -> Result<ShmComm, Report> {
        let ShmSetup { rank, size, segment, host, world, alarm, stall } = setup;
        let strange = |what: String| {
            let cause = Cause::Disagrees { what };
            Report { rank, host: host.clone(), step: 0, op: "joining".into(), cause }
        };
        if !(1..=RANKS_MAX).contains(&size) || rank >= size {
            return Err(strange(format!("rank {rank} of {size} is not possible (1 to {RANKS_MAX} ranks)")));
        }
        let layout = ShmLayout::of(size);
        if segment.block().bytes() != layout.bytes() {
            return Err(strange(format!("the shared memory was not made for {size} ranks")));
        }
        let memory = segment.block().clone();
        let mut meet =
            Meet::new(rank, layout, memory, alarm, Lateness::new(stall, Vec::new()), host.clone(), world);
        let taken =
            meet.my_desk().pid.compare_exchange(0, std::process::id(), Ordering::SeqCst, Ordering::SeqCst);
        if let Err(pid) = taken {
            return Err(strange(format!("process {pid} has joined as this rank already")));
        }
        meet.my_desk().cores.store(u32::try_from(cores()).unwrap_or(u32::MAX), Ordering::SeqCst);
        meet.gather_here()?;
        let fewest = (0..size).map(|r| meet.desk(r).cores.load(Ordering::SeqCst)).min();
        meet.agree_on_cores(fewest.unwrap_or(0) as usize);
        let pids: Vec<_> = (0..size).map(|r| meet.desk(r).pid.load(Ordering::SeqCst)).collect();
        meet.peers = Some(Peers::watch(&pids));
        // The creator of the segment may close it after this: every rank has mapped it.
        meet.gather_here()?;
        Ok(ShmComm::at(meet, None, Letters::new(Letters::boxes(1))))
    }

    /// In a new group: takes over its members' blocks of the group that it was split from.
    pub(crate) fn inherit(&mut self, parent: &ShmComm, members: &[usize]) {
        self.blocks = parent.blocks.of_members(members, self.meet.rank);
    }

    fn at(meet: Meet, handover: Option<Handover>, letters: Letters) -> ShmComm {
        ShmComm {
            meet,
            blocks: GroupBlocks::default(),
            handover,
            letters,
            queue: VecDeque::new(),
            published: 0,
            done: 0,
            piece: 0,
            piece_posts: [0; 2],
            said: Vec::new(),
        }
    }
}
