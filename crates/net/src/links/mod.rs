//! Connections to other ranks, and one thread that keeps all of them moving.
//!
//! [`Links::run`] works through a list of [`Moves`]: all sends and receives make progress at the same time. Bytes go
//! from the caller's memory to the socket and from the socket to the caller's memory; what is to be reduced passes
//! through a staging segment, which stays in cache. Nothing is allocated once each peer has sent something to reduce.
//! Between ranks of one host large messages are not copied into the socket but lent to the receiver (`lend`).
//!
//! A pair is connected when it first talks, unless it was before (`meeting`): moves with other peers go on meanwhile.
//!
//! # When a peer dies
//! Its socket reports it at once ([`Cause::Gone`]). The rank that notices first raises the alarm, sends its other peers
//! a farewell, and ends its run; they do the same. So all ranks name the rank that was lost, not the neighbour that
//! stopped because of it. A peer that is alive and silent is judged elsewhere, by the alarm, which every wait here
//! looks at several times a second; and a final timeout ends a wait that nothing else ended. Two ranks that send to
//! each other are found earlier (`crossed`).

mod crossed;
mod farewell;
mod lend;
mod meeting;
mod peer;
mod reduce;
#[cfg(test)]
mod tests;

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use crate::alarm::Alarm;
use crate::checksum;
use crate::connection::Connection;
use crate::frame::{FrameOp, Header, SEGMENT_BYTES_MAX, Tag, Terms};
use crate::loopback;
use crate::moves::{MoveKind, Moves};
use crate::patience::{Patience, STALL};
use crate::pieces::piece;
use crate::ready;
use crate::report::{Cause, Report};
#[cfg(test)]
use crate::simulation::{Bug, makes};
use crate::system::{Os, System};
pub(crate) use meeting::Meeting;
use peer::{IoStep, LinkPeer, LinkTrouble};
use reduce::reduce;

/// How often a wait checks the alarm.
const LOOK: Duration = Duration::from_millis(100);

/// Shorter payloads are copied even where others are lent.
const LENT_BYTES_MIN: usize = 16 * 1024;

/// A rank that ends says why over another connection, which may be late: how long to wait for that before a closed
/// connection is reported.
const WATCHED_GRACE: Duration = Duration::from_secs(2);

/// How long waits may take.
#[derive(Clone, Copy, Debug)]
pub struct WaitBounds {
    /// If nothing moves for this long, the job ends. Where there is a control plane, it judges that instead.
    pub stall: Duration,
    /// How long after a connection closed the alarm may still name the cause.
    pub grace: Duration,
    /// How long the thread spins before it sleeps; for small messages the wake-up dominates.
    pub spin: Duration,
}

impl WaitBounds {
    /// For links with a control plane, which decides which ranks are lost or stuck: they wait for its decision.
    pub fn watched(patience: Patience) -> WaitBounds {
        WaitBounds {
            stall: Duration::MAX,
            grace: WATCHED_GRACE.min(patience.silence),
            ..WaitBounds::default()
        }
    }
}

impl Default for WaitBounds {
    fn default() -> WaitBounds {
        WaitBounds { stall: STALL, grace: Duration::from_millis(300), spin: Duration::from_micros(50) }
    }
}

/// One rank's connections to the others of a group.
pub struct Links {
    system: Arc<dyn System>,
    rank: usize,
    hosts: Vec<String>,
    /// Each rank's number in reports.
    names: Vec<usize>,
    /// None for this rank, and for those with which it has not talked yet.
    peers: Vec<Option<LinkPeer>>,
    meeting: Option<Meeting>,
    generation: u64,
    alarm: Alarm,
    bounds: WaitBounds,
    spins: bool,
    /// Whether ranks of this host share cores: then a spinning rank yields.
    crowded: bool,
    epoll: OwnedFd,
    /// Bytes done of each move, and for each queue the current send and receive; of the current run.
    done: Vec<usize>,
    at: Vec<(usize, usize)>,
    /// Checksums of segments, by the first one with the same bytes; of the current run.
    sums: Vec<Option<u32>>,
    /// Bytes that runs have sent, or lent.
    sent_bytes: u64,
    failed: Option<Report>,
}

/// The memory that moves read and write.
struct Memory<'a> {
    from: &'a [u8],
    into: &'a mut [u8],
}

impl Memory<'_> {
    fn sent(&self, kind: MoveKind, bytes: Range<usize>) -> &[u8] {
        if kind == MoveKind::SendFrom { &self.from[bytes] } else { &self.into[bytes] }
    }
}

/// Reduces what arrived (second) into the local data (first); the last argument gives the order of the operands.
pub type Combine<'a> = &'a mut dyn FnMut(&mut [u8], &[u8], bool);

impl Links {
    /// Takes over connections: one for each other rank that this one talks with, none for this one.
    pub fn over<C: Into<Connection>>(
        rank: usize,
        hosts: Vec<String>,
        streams: Vec<Option<C>>,
        generation: u64,
        alarm: Alarm,
    ) -> io::Result<Links> {
        Links::in_system(Arc::new(Os), rank, hosts, streams, generation, alarm)
    }

    /// The same, with the time and the waits of a system.
    pub fn in_system<C: Into<Connection>>(
        system: Arc<dyn System>,
        rank: usize,
        hosts: Vec<String>,
        streams: Vec<Option<C>>,
        generation: u64,
        alarm: Alarm,
    ) -> io::Result<Links> {
        assert!(hosts.len() == streams.len() && rank < hosts.len(), "a host and a stream for each rank");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let here = hosts.iter().filter(|host| **host == hosts[rank]).count();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut links = Links {
            system,
            rank,
            peers: hosts.iter().map(|_| None).collect(),
            meeting: None,
            names: (0..hosts.len()).collect(),
            hosts,
            generation,
            alarm,
            bounds: WaitBounds::default(),
            spins: true,
            crowded: here > cores,
            epoll,
            done: Vec::new(),
            at: Vec::new(),
            sums: Vec::new(),
            sent_bytes: 0,
            failed: None,
        };
        for (peer, connection) in streams.into_iter().enumerate() {
            if let Some(connection) = connection {
                links.link(peer, connection.into())?;
            }
        }
        Ok(links)
    }

    /// Takes over the connection to a peer.
    fn link(&mut self, peer: usize, connection: Connection) -> io::Result<()> {
        let stream = &connection.stream;
        stream.set_nonblocking(true)?;
        stream.set_nodelay()?;
        let here = stream.stays_here()?;
        if here {
            loopback::unpaced(stream);
        }
        // Edge-triggered is enough: before it waits, a run has tried every socket that it needs.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&self.epoll, stream, epoll::EventData::new_u64(0), flags)?;
        self.peers[peer] = Some(LinkPeer::new(connection, self.system.clone(), here));
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.hosts.len()
    }

    /// The hosts of all ranks.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Sets each rank's number in reports: for a group of some ranks of a job, their ranks in the job.
    ///
    /// # Panics
    /// If there is not one name per rank.
    pub fn set_names(&mut self, names: Vec<usize>) {
        assert_eq!(names.len(), self.hosts.len(), "a name for each rank");
        self.names = names;
    }

    /// This rank's number in reports, and its host.
    pub fn name(&self) -> (usize, String) {
        (self.names[self.rank], self.hosts[self.rank].clone())
    }

    /// What ends all waits.
    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Sets how long waits may take.
    pub fn set_bounds(&mut self, bounds: WaitBounds) {
        self.bounds = bounds;
    }

    /// How long waits may take.
    pub fn bounds(&self) -> WaitBounds {
        self.bounds
    }

    /// Sets whether waits spin before they sleep, which is the default: it pays if this rank has nothing else to do.
    /// Where ranks share cores, a spinning rank yields.
    pub fn set_spins(&mut self, spins: bool) {
        self.spins = spins;
    }

    /// Whether waits spin before they sleep.
    pub fn spins(&self) -> bool {
        self.spins
    }

    /// Runs moves: sends out of `from` and `into`, receives into `into`. After an error nothing more can be run, and
    /// the contents of `into` are unspecified.
    ///
    /// # Panics
    /// If a move is outside the memory, or names a peer to which there is no link.
    pub fn run(
        &mut self,
        tag: &Tag,
        moves: &Moves,
        from: &[u8],
        into: &mut [u8],
        combine: Combine,
    ) -> Result<(), Report> {
        assert!(moves.ends.0 <= from.len() && moves.ends.1 <= into.len(), "moves inside the memory");
        if let Some(report) = &self.failed {
            return Err(report.clone());
        }
        let mut memory = Memory { from, into };
        match self.work(tag, moves, &mut memory, combine) {
            Ok(()) => {
                self.sent_bytes += moves.sent_bytes;
                Ok(())
            }
            Err(found) => {
                let report = self.verdict(found);
                // Peers read a farewell only after whole frames.
                let rests = moves.queues.iter().zip(&self.at).filter_map(|(queue, at)| {
                    let peer = self.peers[queue.peer].as_ref().filter(|peer| peer.writing)?;
                    let Some(&k) = queue.sends.get(at.0) else {
                        return Some((queue.peer, peer.unwritten(&[]).0.to_vec()));
                    };
                    let piece = piece(&moves.list[k].bytes, self.done[k]);
                    let (head, payload) = peer.unwritten(memory.sent(moves.list[k].kind, piece));
                    Some((queue.peer, [head, payload].concat()))
                });
                let rests: Vec<_> = rests.collect();
                self.spread(&report, rests);
                self.alarm.raise(report.clone());
                self.failed = Some(report.clone());
                Err(report)
            }
        }
    }

    /// Bytes that this rank has sent, without the heads of frames. What was lent to a rank of the same host counts too: it would
    /// go over the wire to another host.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Tells every peer that this rank ends, and why. Nothing can be run afterwards.
    pub fn fail(&mut self, report: Report) {
        if self.failed.is_none() {
            self.spread(&report, Vec::new());
            self.alarm.raise(report.clone());
            self.failed = Some(report);
        }
    }

    fn work(
        &mut self,
        tag: &Tag,
        moves: &Moves,
        memory: &mut Memory,
        combine: Combine,
    ) -> Result<(), Report> {
        self.done.clear();
        self.done.resize(moves.list.len(), 0);
        self.at.clear();
        self.at.resize(moves.queues.len(), (0, 0));
        self.sums.clear();
        self.sums.resize(moves.pieces.len(), None);
        let mut idle_since = None;
        let mut unread = None;
        loop {
            let (mut moved, mut left, mut lacks) = (false, None, false);
            for q in 0..moves.queues.len() {
                let queue = &moves.queues[q];
                let steps = self
                    .push(tag, moves, q, memory)
                    .and_then(|sent| Ok(sent | self.pull(tag, moves, q, memory, combine)?));
                match steps {
                    Ok(steps) => moved |= steps,
                    Err(trouble) => return Err(self.report(queue.peer, tag, trouble)),
                }
                let (send, recv) = self.at[q];
                let Some(peer) = self.peers[queue.peer].as_ref() else {
                    lacks = true;
                    left = left.filter(|&(_, owes)| owes).or(Some((queue.peer, true)));
                    continue;
                };
                // The rank to blame if nothing moves: a peer that does not send, before one that does not receive.
                let owes = recv < queue.recvs.len() || peer.lent;
                if owes || send < queue.sends.len() || peer.borrowed {
                    left = left.filter(|&(_, o)| o || !owes).or(Some((queue.peer, owes)));
                }
            }
            let Some((peer, _)) = left else { return Ok(()) };
            let raised = self.alarm.raised();
            #[cfg(test)]
            let raised = raised.filter(|_| !makes(Bug::IgnoresAlarm));
            if let Some(report) = raised {
                return Err(report);
            }
            if lacks && self.meet(moves).map_err(|e| self.cannot_link(tag, &e))? {
                moved = true;
            }
            if moved {
                idle_since = None;
                unread = None;
                continue;
            }
            let now = self.system.now();
            let idle = now.saturating_duration_since(*idle_since.get_or_insert(now));
            if self.spins && idle < self.bounds.spin {
                if self.crowded {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            if idle > self.bounds.stall {
                let cause = Cause::Stalled { ms: idle.as_millis() as u64 };
                return Err(self.blame(peer, tag, cause));
            }
            let sends = tag.op == FrameOp::Send && moves.queues.iter().all(|queue| queue.recvs.is_empty());
            if sends && self.crossed(peer, &mut unread) {
                let names = vec![self.names[peer], self.names[self.rank]];
                // Both find it, and both blame the same rank.
                return Err(self.blame(peer.min(self.rank), tag, Cause::crossed(names)));
            }
            self.rest(now);
        }
    }

    /// Sleeps until a socket is ready, or until the alarm should be checked.
    fn rest(&self, now: Instant) {
        let mut at_once = None;
        if self.system.is_simulated() {
            let _ = self.system.wait(&mut [ready::interest(self.epoll.as_fd(), false)], now + LOOK);
            at_once = Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let look = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        // Which sockets woke it does not matter, and an interrupted wait is one more round.
        let _ = epoll::wait(&self.epoll, &mut [MaybeUninit::uninit(); 4], Some(&at_once.unwrap_or(look)));
    }

    /// Sends up to a segment of what is next for the peer of a queue. Returns whether anything moved.
    fn push(&mut self, tag: &Tag, moves: &Moves, q: usize, memory: &Memory) -> Result<bool, LinkTrouble> {
        let queue = &moves.queues[q];
        let Some(peer) = self.peers[queue.peer].as_mut() else { return Ok(false) };
        let Some(&k) = queue.sends.get(self.at[q].0) else {
            // The receipt for what a peer lent is sent last.
            let all_taken = self.at[q].1 == queue.recvs.len();
            return if all_taken { peer.push_receipt(tag, self.generation) } else { Ok(false) };
        };
        let whole = &moves.list[k].bytes;
        let bytes = piece(whole, self.done[k]);
        let payload = memory.sent(moves.list[k].kind, bytes.clone());
        if !peer.writing {
            if !moves.free(k, &bytes, &self.done) {
                return Ok(false);
            }
            let mut header = Header::of(tag, self.generation, peer.sent, payload.len());
            if !peer.seals() {
                let same = moves.pieces.same(moves.pieces.number(k, whole, self.done[k]));
                header.payload_crc = *self.sums[same].get_or_insert_with(|| checksum::of(payload));
                header.lent = peer.lends && moves.lends[k] && payload.len() >= LENT_BYTES_MIN;
            }
            peer.open(header, payload);
        }
        // If the next segment follows at once, the kernel need not send the end of this one as a separate packet.
        let next = piece(whole, self.done[k] + payload.len());
        let more = !next.is_empty() && moves.free(k, &next, &self.done);
        let step = peer.push(payload, more)?;
        if step == IoStep::Whole {
            self.done[k] += payload.len();
            self.at[q].0 += usize::from(bytes.end == whole.end);
        }
        Ok(step != IoStep::Blocked)
    }

    /// Receives up to a segment of what is next from the peer of a queue. Returns whether anything moved.
    fn pull(
        &mut self,
        tag: &Tag,
        moves: &Moves,
        q: usize,
        memory: &mut Memory,
        combine: Combine,
    ) -> Result<bool, LinkTrouble> {
        let queue = &moves.queues[q];
        let Some(peer) = self.peers[queue.peer].as_mut() else { return Ok(false) };
        let Some(&k) = queue.recvs.get(self.at[q].1) else {
            let all_given = self.at[q].0 == queue.sends.len();
            return if all_given { peer.pull_receipt(tag, self.generation) } else { Ok(false) };
        };
        let whole = &moves.list[k].bytes;
        let piece = piece(whole, self.done[k]);
        let free = moves.free(k, &piece, &self.done);
        let mut step = IoStep::Blocked;
        let expected = Header::of(tag, self.generation, peer.heard, piece.len());
        let number = moves.pieces.number(k, whole, self.done[k]);
        if let MoveKind::Reduce { theirs_first } = moves.list[k].kind {
            // It is read even if it cannot be reduced yet. Otherwise two ranks that send each other the bytes that they
            // also reduce would both wait for the other to read.
            if !peer.staged {
                let mut staging = std::mem::take(&mut peer.staging);
                staging.resize(SEGMENT_BYTES_MAX, 0);
                let pulled = peer.pull(&mut staging[..piece.len()], &expected);
                peer.staging = staging;
                step = pulled?;
                peer.staged = step == IoStep::Whole;
            }
            if !peer.staged || !free {
                return Ok(step != IoStep::Blocked);
            }
            peer.staged = false;
            let (into, arrived) = (&mut memory.into[piece.clone()], &peer.staging[..piece.len()]);
            if peer.seals() {
                // Opening has authenticated it. If the result goes to a peer without seals, it is summed then.
                combine(into, arrived, theirs_first);
            } else {
                let (came, made) = reduce(into, arrived, theirs_first, moves.pieces.wanted(number), combine);
                peer.checked(came)?;
                self.sums[number] = made;
            }
        } else {
            if !free {
                return Ok(false);
            }
            let target = &mut memory.into[piece.clone()];
            step = peer.pull(target, &expected)?;
            if step != IoStep::Whole {
                return Ok(step == IoStep::Moved);
            }
            if !peer.seals() {
                self.sums[number] = Some(peer.checked(checksum::of(target))?);
            }
        }
        self.done[k] += piece.len();
        self.at[q].1 += usize::from(piece.end == whole.end);
        Ok(true)
    }

    /// The report about trouble with a peer: the cause behind it, if the alarm or the peer itself knows one.
    fn report(&self, peer: usize, tag: &Tag, trouble: LinkTrouble) -> Report {
        let lost_me = |report: &Report| report.rank == self.names[self.rank] && report.cause == Cause::Gone;
        let cause = match trouble {
            // It takes this rank for gone although it is alive: the connection between the two broke, and all ranks
            // must report the same.
            LinkTrouble::Farewell(report) if !lost_me(&report) => {
                return self.alarm.raised().unwrap_or(report);
            }
            LinkTrouble::Damaged(what) => Cause::Damaged { what },
            LinkTrouble::Disagrees(what) => Cause::Disagrees { what },
            LinkTrouble::Gone | LinkTrouble::Farewell(_) => {
                let until = self.system.now() + self.bounds.grace;
                while self.system.now() < until {
                    if let Some(report) = self.alarm.raised() {
                        return report;
                    }
                    self.system.sleep(Duration::from_millis(5));
                }
                Cause::Gone
            }
        };
        self.blame(peer, tag, cause)
    }

    /// A connection was made and cannot be used here.
    fn cannot_link(&self, tag: &Tag, e: &io::Error) -> Report {
        self.blame(self.rank, tag, Cause::Failed { why: format!("it cannot use a new connection: {e}") })
    }

    /// The report that all ranks give when this one found `found`: the same, unless another rank found something else
    /// at the same time.
    fn verdict(&self, found: Report) -> Report {
        if found.rank == self.names[self.rank] || !self.alarm.suspect(found.clone()) {
            return self.alarm.raised().unwrap_or(found);
        }
        // The control plane answers, or reports that rank 0, which decides, is lost.
        while self.alarm.judged() {
            if let Some(report) = self.alarm.raised() {
                return report;
            }
            self.system.sleep(Duration::from_millis(5));
        }
        self.alarm.raised().unwrap_or(found)
    }

    fn blame(&self, rank: usize, tag: &Tag, cause: Cause) -> Report {
        let (rank, host) = (self.names[rank], self.hosts[rank].clone());
        Report { rank, host, step: tag.step, op: tag.op.name().into(), cause }
    }

    /// Tells all peers, as far as their sockets take it within a tenth of a second; `rests`, unfinished frames, come
    /// first.
    fn spread(&mut self, report: &Report, rests: Vec<(usize, Vec<u8>)>) {
        let text = farewell::encode(report);
        let terms = Terms::default();
        let tag = Tag { step: report.step, op: FrameOp::Farewell, dtype: 0, count: 0, terms };
        let mut letters: Vec<(usize, Vec<u8>)> = Vec::new();
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let mut letter =
                rests.iter().find(|rest| rest.0 == rank).map_or(Vec::new(), |rest| rest.1.clone());
            letter.extend(peer.letter(&tag, self.generation, &text));
            letters.push((rank, letter));
        }
        let until = self.system.now() + Duration::from_millis(100);
        while !letters.is_empty() && self.system.now() < until {
            letters.retain_mut(|(rank, letter)| {
                let Some(peer) = &self.peers[*rank] else { return false };
                match peer.stream.send(&[IoSlice::new(letter)], false) {
                    Ok(n) => letter.drain(..n),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                    Err(_) => return false,
                };
                !letter.is_empty()
            });
            self.system.sleep(Duration::from_millis(1));
        }
    }
}
