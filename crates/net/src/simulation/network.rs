//! The simulated network: it takes what ranks write and delivers it to the other side later, in order, or not at all.
//!
//! A connection is two pairs of local sockets. The ranks hold one end of each, the network the other two. As over TCP,
//! data arrive in order or not at all; the other side sees a close after all data; data for a side that has closed are
//! answered by a reset, which may overtake what is under way in the other direction.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

use rustix::net::sockopt;

use super::local::{Backlog, LocalListener, LocalStream, Made, Making};
use super::random::SimRandom;
use super::settings::{Bug, Settings};
use super::trace::{SimEvent, Trace};

/// The first port for listeners without a port, and for connecting sockets.
const PORTS_FROM: u16 = 20_000;
/// A packet that is lost is sent again after this, in nanoseconds; then after twice, and four times this.
const RESEND_NS: u64 = 200_000_000;

/// The address of a rank's host.
pub(super) fn ip(rank: usize) -> IpAddr {
    let rank = rank as u16 + 1;
    IpAddr::V4(Ipv4Addr::new(10, 0, (rank >> 8) as u8, rank as u8))
}

/// All connections.
pub(super) struct Network {
    settings: Settings,
    listeners: Vec<(usize, SocketAddr, Weak<Backlog>)>,
    connections: Vec<Connection>,
    /// Ranks that are cut off from the others, until when, and since when.
    holds: Vec<(Vec<usize>, u64, u64)>,
    /// Pairs that are cut off from each other for good.
    parted: Vec<[usize; 2]>,
    ranks: Vec<Reach>,
    port: u16,
    buffer: Vec<u8>,
}

/// What the network knows about a rank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Alive,
    /// Its kernel answers that nothing listens here any more.
    Dead,
    /// Nothing answers.
    Vanished,
}

struct Connection {
    /// The connector's, the acceptor's.
    sides: [Side; 2],
    making: Arc<Making>,
    addrs: [SocketAddr; 2],
    /// The acceptor's end, until it arrives.
    arriving: Option<UnixStream>,
}

struct Side {
    rank: usize,
    /// The network's end of this side's pair.
    end: Option<UnixStream>,
    /// What is on its way from this side.
    out: VecDeque<Parcel>,
    out_bytes: usize,
    last_at: u64,
    /// Whether this side sends no more.
    ended: bool,
    /// Whether what comes to this side waits for it to read.
    full: bool,
}

struct Parcel {
    at: u64,
    what: Carried,
}

enum Carried {
    Syn,
    /// The answer to it: whether something listens.
    Answer(bool),
    Bytes(Vec<u8>),
    End,
    Reset,
}

impl Network {
    pub(super) fn new(ranks: usize, settings: Settings) -> Network {
        Network {
            settings,
            listeners: Vec::new(),
            connections: Vec::new(),
            holds: Vec::new(),
            parted: Vec::new(),
            ranks: vec![Reach::Alive; ranks],
            port: PORTS_FROM,
            buffer: vec![0; 256 << 10],
        }
    }

    pub(super) fn listen(&mut self, rank: usize, on: &[SocketAddr]) -> io::Result<LocalListener> {
        self.listeners.retain(|(_, _, backlog)| backlog.strong_count() > 0);
        let mut last = io::Error::from(ErrorKind::InvalidInput);
        for addr in on {
            if addr.ip() != ip(rank) {
                last = ErrorKind::AddrNotAvailable.into();
                continue;
            }
            let port = if addr.port() == 0 { self.next_port() } else { addr.port() };
            let addr = SocketAddr::new(addr.ip(), port);
            if self.listeners.iter().any(|(_, taken, _)| *taken == addr) {
                last = ErrorKind::AddrInUse.into();
                continue;
            }
            let listener = LocalListener::new(addr)?;
            self.listeners.push((rank, addr, Arc::downgrade(&listener.backlog)));
            return Ok(listener);
        }
        Err(last)
    }

    pub(super) fn connect(
        &mut self,
        rank: usize,
        to: SocketAddr,
        now: u64,
        random: &mut SimRandom,
    ) -> io::Result<LocalStream> {
        let Some(target) = (0..self.ranks.len()).find(|&other| ip(other) == to.ip()) else {
            return Err(ErrorKind::HostUnreachable.into());
        };
        let (ours, end) = self.pair()?;
        let (arriving, arriving_end) = self.pair()?;
        let from = SocketAddr::new(ip(rank), self.next_port());
        let making = Making::new(Made::Pending);
        let side = |rank, end| Side {
            rank,
            end: Some(end),
            out: VecDeque::new(),
            out_bytes: 0,
            last_at: 0,
            ended: false,
            full: false,
        };
        let mut connection = Connection {
            sides: [side(rank, end), side(target, arriving_end)],
            making: making.clone(),
            addrs: [from, to],
            arriving: Some(arriving),
        };
        let at = now + self.delay(random);
        connection.sides[0].post(at, Carried::Syn);
        self.connections.push(connection);
        Ok(LocalStream { socket: ours, ends: (from, to), making })
    }

    /// A rank ran: takes what it wrote, and delivers what waited for it to read.
    pub(super) fn ran(&mut self, rank: usize, now: u64, random: &mut SimRandom) {
        for c in 0..self.connections.len() {
            for s in 0..2 {
                if self.connections[c].sides[s].rank == rank {
                    self.connections[c].sides[s].full = false;
                    self.take(c, s, now, random);
                }
            }
        }
    }

    /// Delivers everything that is due. `reached` is called with the ranks that got something.
    pub(super) fn deliver(
        &mut self,
        now: u64,
        random: &mut SimRandom,
        trace: &mut Trace,
        reached: &mut [bool],
    ) {
        self.holds.retain(|(_, until, _)| *until > now);
        for c in 0..self.connections.len() {
            for s in 0..2 {
                while self.due(c, s).is_some_and(|at| at <= now) {
                    if let Some(until) = self.held(c, now) {
                        let wait = until.1 - until.0;
                        // Retransmitted at growing intervals: it arrives some time after the hold.
                        let again =
                            if until.1 == u64::MAX { u64::MAX } else { until.1 + random.within(0..wait) };
                        self.connections[c].sides[s].out[0].at = again;
                        break;
                    }
                    self.bring(c, s, now, random, trace);
                    reached[self.connections[c].sides[1 - s].rank] = true;
                    // What did not fit into the network before may now.
                    self.take(c, s, now, random);
                    reached[self.connections[c].sides[s].rank] = true;
                }
            }
        }
        self.connections.retain(|c| c.sides.iter().any(|side| side.end.is_some() || !side.out.is_empty()));
    }

    /// When the next thing arrives.
    pub(super) fn next_at(&self) -> Option<u64> {
        let all = (0..self.connections.len()).flat_map(|c| [(c, 0), (c, 1)]);
        all.filter_map(|(c, s)| self.due(c, s)).min().filter(|at| *at < u64::MAX)
    }

    pub(super) fn hold(&mut self, ranks: Vec<usize>, now: u64, until: u64) {
        self.holds.push((ranks, until, now));
    }

    pub(super) fn part(&mut self, one: usize, other: usize) {
        self.parted.extend([[one, other], [other, one]]);
    }

    pub(super) fn cut(&mut self, one: usize, other: usize, nth: usize, random: &mut SimRandom) -> bool {
        let between = |c: &&mut Connection| {
            let ranks = [c.sides[0].rank, c.sides[1].rank];
            c.making.get() == Made::Done && (ranks == [one, other] || ranks == [other, one])
        };
        let Some(connection) = self.connections.iter_mut().filter(between).nth(nth) else { return false };
        for s in 0..2 {
            connection.sides[s].lose_some(random);
            let at = connection.sides[s].last_at;
            connection.sides[s].post(at, Carried::Reset);
        }
        true
    }

    pub(super) fn kill(&mut self, rank: usize, now: u64, random: &mut SimRandom) {
        self.ran(rank, now, random);
        self.ranks[rank] = Reach::Dead;
        for c in 0..self.connections.len() {
            let delay = self.delay(random);
            for side in self.connections[c].sides.iter_mut().filter(|side| side.rank == rank) {
                // With unread data the kernel resets the connection and discards what it has not sent.
                let reset = random.chance(500);
                if reset {
                    side.lose_some(random);
                }
                if !side.ended {
                    side.ended = true;
                    side.post(now + delay, if reset { Carried::Reset } else { Carried::End });
                }
                side.end = None;
            }
        }
    }

    pub(super) fn vanish(&mut self, rank: usize) {
        self.ranks[rank] = Reach::Vanished;
    }

    /// Since when and until when nothing gets through this connection.
    fn held(&self, c: usize, now: u64) -> Option<(u64, u64)> {
        let ranks = [0, 1].map(|s| self.connections[c].sides[s].rank);
        if ranks.iter().any(|&rank| self.ranks[rank] == Reach::Vanished) || self.parted.contains(&ranks) {
            return Some((now, u64::MAX));
        }
        let apart = |among: &[usize]| among.contains(&ranks[0]) != among.contains(&ranks[1]);
        let hold = self.holds.iter().filter(|(among, _, _)| apart(among)).max_by_key(|hold| hold.1)?;
        Some((hold.2, hold.1))
    }

    fn due(&self, c: usize, s: usize) -> Option<u64> {
        let connection = &self.connections[c];
        if connection.sides[1 - s].full {
            return None;
        }
        Some(connection.sides[s].out.front()?.at)
    }

    /// Takes what side `s` wrote, as long as the network has room for it.
    fn take(&mut self, c: usize, s: usize, now: u64, random: &mut SimRandom) {
        let mut buffer = std::mem::take(&mut self.buffer);
        while self.connections[c].sides[s].out_bytes < self.settings.buffer_bytes {
            let side = &mut self.connections[c].sides[s];
            let Some(end) = side.end.as_mut().filter(|_| !side.ended) else { break };
            match end.read(&mut buffer) {
                Ok(0) => {
                    side.ended = true;
                    let at = now + self.delay(random);
                    self.connections[c].sides[s].post(at, Carried::End);
                }
                Ok(n) => {
                    let cut = if random.chance(250) { random.within(0..n as u64) as usize } else { 0 };
                    let mut parts = [&buffer[..cut], &buffer[cut..n]];
                    if self.settings.bug == Some(Bug::Overtakes) && random.chance(5) {
                        parts.reverse();
                    }
                    for part in parts {
                        let at = now + self.delay(random);
                        if !part.is_empty() {
                            self.connections[c].sides[s].post(at, Carried::Bytes(part.to_vec()));
                        }
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // Closed with something unread in it.
                Err(_) => self.reset(c, s, now, random),
            }
        }
        self.buffer = buffer;
    }

    /// Delivers the first parcel of side `s` to the other side.
    fn bring(&mut self, c: usize, s: usize, now: u64, random: &mut SimRandom, trace: &mut Trace) {
        let connection = &mut self.connections[c];
        let [from, to] = [connection.sides[s].rank, connection.sides[1 - s].rank];
        let Some(mut parcel) = connection.sides[s].out.pop_front() else { return };
        let event = |what| SimEvent::Arrived { from, to, what };
        match &mut parcel.what {
            Carried::Syn => {
                trace.add(now, event("a connection"));
                let [ours, theirs] = connection.addrs;
                let to_this = |(rank, addr, _): &&(usize, SocketAddr, _)| *rank == to && *addr == theirs;
                let backlog = self.listeners.iter().rev().find(to_this).and_then(|l| l.2.upgrade());
                let backlog = backlog.filter(|_| self.ranks[to] == Reach::Alive);
                let listens = backlog.is_some();
                if let (Some(backlog), Some(socket)) = (backlog, connection.arriving.take()) {
                    let making = Making::new(Made::Done);
                    backlog.push(LocalStream { socket, ends: (theirs, ours), making });
                }
                let at = now + self.delay(random);
                self.connections[c].sides[1].post(at, Carried::Answer(listens));
            }
            Carried::Answer(listens) => {
                trace.add(now, event(if *listens { "an answer" } else { "a refusal" }));
                connection.making.set(if *listens { Made::Done } else { Made::Refused });
                if !*listens {
                    connection.close();
                }
            }
            Carried::Bytes(bytes) => {
                connection.sides[s].out_bytes -= bytes.len();
                match self.settings.bug {
                    Some(Bug::Doubles) if random.chance(5) => bytes.extend_from_within(..),
                    Some(Bug::Drops) if random.chance(5) => bytes.clear(),
                    _ => {}
                }
                let brought = match &mut self.connections[c].sides[1 - s].end {
                    Some(end) => end.write(bytes),
                    None => Err(ErrorKind::BrokenPipe.into()),
                };
                let n = match brought {
                    Ok(n) => n,
                    Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
                    // It has closed, and its kernel answers with a reset.
                    Err(_) => {
                        trace.add(now, event("data that are discarded"));
                        return self.reset(c, 1 - s, now, random);
                    }
                };
                trace.add(now, SimEvent::Bytes { from, to, bytes: n });
                bytes.drain(..n);
                if !bytes.is_empty() {
                    let sides = &mut self.connections[c].sides;
                    sides[s].out_bytes += bytes.len();
                    sides[s].out.push_front(parcel);
                    sides[1 - s].full = true;
                }
            }
            Carried::End => {
                trace.add(now, event("the end"));
                if let Some(end) = &connection.sides[1 - s].end {
                    // It fails if the other side has closed, and then it knows.
                    let _ = end.shutdown(Shutdown::Write);
                }
                if connection.sides.iter().all(|side| side.ended && side.out.is_empty()) {
                    connection.close();
                }
            }
            Carried::Reset => {
                trace.add(now, event("a reset"));
                connection.close();
            }
        }
    }

    /// Side `s` has closed and takes nothing more: the other side is told.
    fn reset(&mut self, c: usize, s: usize, now: u64, random: &mut SimRandom) {
        let delay = self.delay(random);
        let side = &mut self.connections[c].sides[s];
        side.end = None;
        side.ended = true;
        if random.chance(500) {
            side.lose_some(random);
        }
        side.post(now + delay, Carried::Reset);
        let other = &mut self.connections[c].sides[1 - s];
        other.out.clear();
        other.out_bytes = 0;
    }

    fn pair(&self) -> io::Result<(UnixStream, UnixStream)> {
        let (ours, end) = UnixStream::pair()?;
        for socket in [&ours, &end] {
            socket.set_nonblocking(true)?;
            sockopt::set_socket_send_buffer_size(socket, self.settings.buffer_bytes)?;
        }
        Ok((ours, end))
    }

    fn next_port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    /// How long something is under way.
    fn delay(&self, random: &mut SimRandom) -> u64 {
        let Settings { delay, losses, .. } = &self.settings;
        let way = random.within(delay.start.as_nanos() as u64..delay.end.as_nanos() as u64);
        let lost = if random.chance(*losses) { RESEND_NS << random.within(0..3) } else { 0 };
        way + lost
    }
}

impl Connection {
    fn close(&mut self) {
        for side in &mut self.sides {
            (side.end, side.ended, side.out_bytes) = (None, true, 0);
            side.out.clear();
        }
        self.arriving = None;
    }
}

impl Side {
    /// Sends something, behind what is on its way.
    fn post(&mut self, at: u64, what: Carried) {
        self.last_at = self.last_at.max(at);
        if let Carried::Bytes(bytes) = &what {
            self.out_bytes += bytes.len();
        }
        self.out.push_back(Parcel { at: self.last_at, what });
    }

    /// Loses some of what is on its way, from some point on.
    fn lose_some(&mut self, random: &mut SimRandom) {
        let kept = random.within(0..self.out.len() as u64 + 1) as usize;
        self.out.truncate(kept);
        let bytes = self.out.iter().map(|p| if let Carried::Bytes(b) = &p.what { b.len() } else { 0 });
        self.out_bytes = bytes.sum();
    }
}
