//! Rank 0's side of joining: it admits ranks as they come, without waiting for any of them.
//!
//! What only a wrongly started rank of this job can do (a wrong size, a rank that is taken) ends the joining for all,
//! at once and with the reason. A stranger or a rank of another job is turned away and recorded for the error message,
//! in case a rank is missing in the end.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::bounds::{mesh_time, slack};
use super::gate::Gate;
use super::hello::{Hello, Purpose};
use super::mesh::{Mesh, Opened};
use super::{Channels, JoinError, JoinOptions, Joined, Member, describe, joined, listen_for_data, mesh};
use crate::connection::Proven;
use crate::control::channel::{Channel, Ended};
use crate::control::message::{LinkFault, Message};
use crate::patience::Patience;
use crate::ready;
use crate::socket::Listener;

/// How long the end of a connection may take to be seen.
const LEAVING: Duration = Duration::from_millis(200);

/// Time for refused ranks to read the reason.
pub(crate) const CLOSE_TIME: Duration = Duration::from_secs(1);

/// How many faults are reported; more would say nothing new.
const FAULTS_MAX: usize = 32;
/// How long after the first fault the other ranks may report theirs.
const MORE_FAULTS_TIME: Duration = Duration::from_secs(1);

/// A rank that has been admitted.
struct Seat {
    addr: SocketAddr,
    channel: Channel,
    member: Option<Member>,
}

/// The ranks that have been admitted so far.
struct Hall {
    options: JoinOptions,
    hello: Hello,
    until: Instant,
    seats: Vec<Option<Seat>>,
}

/// What the ranks report about their connections.
struct LinkReports {
    /// The ranks that have not reported yet.
    waiting: Vec<usize>,
    faults: Vec<LinkFault>,
    /// When to stop waiting for more: the job cannot start, and the first to notice have reported.
    enough: Option<Instant>,
    /// Whether rank 0's own connections are done.
    built: bool,
}

/// All ranks, and this one's connections.
type Connected = (Vec<Member>, Mesh, Opened);

/// Waits for all ranks, connects them, and tells them so.
pub(super) fn gather(mut options: JoinOptions, hello: Hello) -> Result<Joined, JoinError> {
    let size = options.size;
    let until = options.system.now() + options.timeout;
    let (ip, gate) = match (size, options.listener.take()) {
        // A lone rank listens for nobody.
        (1, _) => (IpAddr::from([127, 0, 0, 1]), None),
        (_, listener) => {
            let listener = listener.map_or_else(|| listen(&options), Ok)?;
            let ip = listener.local_addr()?.ip();
            if ip.is_unspecified() {
                let all = "rank 0 was given a listener on all interfaces: bind the address of one";
                return Err(JoinError::Options(all.into()));
            }
            (ip, Some(Gate::new(listener, options.secret.clone(), hello, size, options.tell.clone())?))
        }
    };
    let (data, here) = listen_for_data(&options, ip)?;
    let mut hall = Hall { options, hello, until, seats: (0..size).map(|_| None).collect() };
    let done = match gate {
        None => Ok(vec![here]),
        Some(gate) => hall.fill(gate, here),
    };
    let done = done.and_then(|members| hall.connect(data, members));
    if let Err(e) = &done {
        hall.tell_all(&Message::Refused { why: e.to_string() });
        hall.close();
    }
    let (members, mesh, open) = done?;
    let channels: Channels = hall.seats.into_iter().map(|seat| seat.map(|seat| seat.channel)).collect();
    let patience = hall.options.patience;
    joined(hall.options, members, channels, patience, mesh, open)
}

fn listen(options: &JoinOptions) -> Result<Listener, JoinError> {
    let failed = |addr: String, source, hint| JoinError::Listen { rank: 0, addr, source, hint };
    let name = || options.master.clone();
    let resolved = options.master.to_socket_addrs();
    let mut addrs: Vec<SocketAddr> = resolved
        .map_err(|e| failed(name(), e, "the address of rank 0 is a name or number of this host, and a port"))?
        .collect();
    if let Some(ip) = options.bind {
        addrs = addrs.iter().map(|addr| SocketAddr::new(ip, addr.port())).collect();
    }
    if addrs.iter().any(|addr| addr.ip().is_unspecified()) {
        let all =
            format!("rank 0 cannot be reached at {}: give the address of one interface", options.master);
        return Err(JoinError::Options(all));
    }
    options.system.listen(&addrs).map_err(|e| {
        let hint = match e.kind() {
            std::io::ErrorKind::AddrInUse => "another rank 0 or another job is there: choose another port",
            std::io::ErrorKind::AddrNotAvailable => "this host has no such address: start rank 0 where it is",
            _ => "choose another address or port",
        };
        failed(name(), e, hint)
    })
}

impl LinkReports {
    fn add(&mut self, faults: Vec<LinkFault>, now: Instant) {
        if !faults.is_empty() {
            self.enough.get_or_insert(now + MORE_FAULTS_TIME);
        }
        self.faults.extend(faults);
    }
}

impl Hall {
    /// Waits until every rank has been admitted and said where it can be reached.
    fn fill(&mut self, mut gate: Gate, here: Member) -> Result<Vec<Member>, JoinError> {
        let listening = gate.addr()?;
        loop {
            let now = self.options.system.now();
            for arrival in gate.turn(now) {
                self.admit(&mut gate, arrival)?;
            }
            if let Some(theirs) = gate.unlike.take().filter(|theirs| self.is_ours(theirs)) {
                let (rank, zeros) = (theirs.rank as usize, self.hello.encrypt);
                return Err(JoinError::Encryption { rank, theirs: theirs.encrypt, zeros });
            }
            for rank in 1..self.seats.len() {
                self.listen_to(&mut gate, rank)?;
            }
            let missing: Vec<usize> =
                (1..self.seats.len()).filter(|&rank| self.member(rank).is_none()).collect();
            if missing.is_empty() {
                let others = (1..self.seats.len()).filter_map(|rank| self.member(rank).cloned());
                return Ok(std::iter::once(here).chain(others).collect());
            }
            if now >= self.until {
                let loopback = listening.ip().is_loopback();
                let note = if loopback { ", which only this host reaches" } else { "" };
                let (timeout, turned_away) = (self.options.timeout, gate.turned_away());
                return Err(JoinError::Missing { ranks: missing, timeout, listening, note, turned_away });
            }
            let mut fds = Vec::new();
            gate.interests(&mut fds);
            let seats = self.seats.iter().flatten();
            fds.extend(seats.map(|seat| ready::interest(seat.channel.as_fd(), seat.channel.sending())));
            self.options.system.wait(&mut fds, gate.due().unwrap_or(self.until).min(self.until))?;
        }
    }

    fn is_ours(&self, theirs: &Hello) -> bool {
        (theirs.job, theirs.generation) == (self.hello.job, self.hello.generation)
    }

    fn member(&self, rank: usize) -> Option<&Member> {
        self.seats[rank].as_ref()?.member.as_ref()
    }

    /// A peer knows the secret. Is it a rank of this job?
    fn admit(&mut self, gate: &mut Gate, arrival: Proven) -> Result<(), JoinError> {
        let Proven { connection, addr, hello } = arrival;
        let (rank, size) = (hello.rank as usize, hello.size as usize);
        let Ok(mut channel) = Channel::new(connection, Message::bytes_max_to_zero(self.options.size)) else {
            return Ok(());
        };
        let mut refuse = |why: &str| channel.send(&Message::Refused { why: why.into() });
        if hello.purpose != Purpose::Control {
            gate.note(format!("{addr}: asked for a data connection to rank {}", hello.peer));
            return Ok(());
        }
        if hello.job != self.hello.job {
            refuse(&format!(
                "rank 0 at {} belongs to job {:?} and rank {rank} to another one: choose another port for one of the two",
                self.options.master, self.options.job
            ));
            gate.note(format!("{addr}, as rank {rank}: of another job"));
            return Ok(());
        }
        if hello.generation != self.hello.generation {
            refuse(&format!(
                "this is start {} of the job and rank {rank} is of start {}",
                self.hello.generation, hello.generation
            ));
            gate.note(format!("{addr}, as rank {rank}: of start {} of the job", hello.generation));
            return Ok(());
        }
        if size != self.options.size {
            let e = JoinError::Size { rank, addr, theirs: size, ours: self.options.size };
            refuse(&e.to_string());
            return Err(e);
        }
        if rank >= size {
            return Err(JoinError::Protocol { rank, what: format!("a rank number beyond the {size} ranks") });
        }
        // Only if the first one is still there do two have this rank. Its end may come a moment late: a process that is
        // just being started has its parent's sockets until it runs.
        let system = self.options.system.clone();
        let until = system.now() + LEAVING;
        self.listen_to(gate, rank)?;
        while self.seats[rank].is_some() && system.now() < until {
            system.sleep(LEAVING / 20);
            self.listen_to(gate, rank)?;
        }
        // One that has not said where it is may be an old connection of the rank that has come now: it gave up waiting for
        // the end of the proof, which the network held back, and the end of that connection is still under way.
        let first = match &self.seats[rank] {
            _ if rank == 0 => Some("rank 0 itself".to_owned()),
            Some(Seat { addr, member: Some(_), .. }) => Some(addr.to_string()),
            Some(Seat { member: None, .. }) | None => None,
        };
        if let Some(first) = first {
            let e = JoinError::Duplicate { rank, first, second: addr };
            refuse(&e.to_string());
            return Err(e);
        }
        if let Some(seat) = &mut self.seats[rank] {
            let why = format!("rank {rank} came again from {addr}: each process needs its own rank");
            seat.channel.send(&Message::Refused { why });
            gate.note(format!("{}, rank {rank}: came again from {addr}", seat.addr));
        }
        let wait = self.until.saturating_duration_since(system.now());
        let Patience { silence, stall } = self.options.patience;
        channel.send(&Message::Welcome {
            wait_ms: wait.as_millis() as u64,
            patience_ms: silence.as_millis() as u64,
            stall_ms: stall.as_millis() as u64,
        });
        self.seats[rank] = Some(Seat { addr, channel, member: None });
        Ok(())
    }

    fn listen_to(&mut self, gate: &mut Gate, rank: usize) -> Result<(), JoinError> {
        let Some(seat) = &mut self.seats[rank] else { return Ok(()) };
        seat.channel.flush();
        match seat.channel.receive() {
            Ok(None) => {}
            Ok(Some(Message::Here(member))) if member.rank == rank => seat.member = Some(member),
            Ok(Some(_)) => {
                return Err(JoinError::Protocol {
                    rank,
                    what: "an unexpected message instead of its address".into(),
                });
            }
            Err(Ended::Malformed { what }) => return Err(JoinError::Protocol { rank, what }),
            // It may have been restarted, and connects again.
            Err(Ended::Closed) => {
                gate.note(format!("{}, rank {rank}: joined and left again", seat.addr));
                self.seats[rank] = None;
            }
        }
        Ok(())
    }

    /// Sends all ranks the table, connects the pairs, and tells all ranks the result.
    fn connect(&mut self, data: Listener, members: Vec<Member>) -> Result<Connected, JoinError> {
        self.tell_all(&Message::Table(members.clone()));
        let system = &*self.options.system.clone();
        let patience = self.options.patience;
        let until = system.now() + mesh_time(members.len(), patience);
        let enough = until + patience.silence + slack(members.len());
        let mut mesh = mesh(&self.options, data, self.hello, &members, patience)?;
        let edges = self.options.first.edges(&members, 0);
        let mut found = LinkReports {
            waiting: (1..members.len()).collect(),
            faults: Vec::new(),
            enough: None,
            built: false,
        };
        let (open, faults) = mesh.build(edges, until, &mut || self.collect(&members, &mut found))?;
        found.add(faults, system.now());
        found.built = true;
        while !self.collect(&members, &mut found)? {
            if let Some(&rank) = found.waiting.first().filter(|_| system.now() >= enough) {
                return Err(JoinError::Left { rank, host: members[rank].host.clone() });
            }
            // Only ranks that are waited for: one that ended meanwhile would keep this loop awake.
            let seats = found.waiting.iter().filter_map(|&rank| self.seats[rank].as_ref());
            let mut fds: Vec<_> =
                seats.map(|seat| ready::interest(seat.channel.as_fd(), seat.channel.sending())).collect();
            system.wait(&mut fds, found.enough.unwrap_or(enough))?;
        }
        found.faults.sort();
        let mut pairs = describe(&found.faults, &members);
        if pairs.is_empty() {
            self.tell_all(&Message::Faults(Vec::new()));
            return Ok((members, mesh, open));
        }
        pairs.truncate(FAULTS_MAX);
        Err(JoinError::Mesh { pairs })
    }

    /// Collects the other ranks' reports so far. Returns whether they are enough to decide.
    fn collect(&mut self, members: &[Member], found: &mut LinkReports) -> Result<bool, JoinError> {
        for rank in std::mem::take(&mut found.waiting) {
            let seat = self.seats[rank].as_mut().expect("all seats are taken");
            seat.channel.flush();
            match seat.channel.receive() {
                Ok(Some(Message::Faults(theirs))) => found.add(theirs, self.options.system.now()),
                Ok(Some(_)) => {
                    return Err(JoinError::Protocol {
                        rank,
                        what: "an unexpected message instead of the state of its connections".into(),
                    });
                }
                Ok(None) => found.waiting.push(rank),
                Err(Ended::Closed) => {
                    return Err(JoinError::Left { rank, host: members[rank].host.clone() });
                }
                Err(Ended::Malformed { what }) => return Err(JoinError::Protocol { rank, what }),
            }
        }
        let enough = found.enough.is_some_and(|then| then <= self.options.system.now());
        Ok(enough || (found.waiting.is_empty() && found.built))
    }

    /// Reads on, within a time limit, until the others have closed. Closing a connection with unread data resets it,
    /// and the reset may overtake the last message.
    fn close(&mut self) {
        let system = &*self.options.system.clone();
        let until = system.now() + CLOSE_TIME;
        loop {
            let mut fds = Vec::new();
            for seat in self.seats.iter_mut().flatten() {
                if seat.channel.close() {
                    fds.push(ready::interest(seat.channel.as_fd(), seat.channel.sending()));
                }
            }
            if fds.is_empty() || system.now() >= until || system.wait(&mut fds, until).is_err() {
                return;
            }
        }
    }

    /// Sends a message to all admitted ranks, and waits a moment for it to be sent.
    fn tell_all(&mut self, message: &Message) {
        let system = &*self.options.system.clone();
        let until = system.now() + slack(self.seats.len());
        self.seats.iter_mut().flatten().for_each(|seat| seat.channel.send(message));
        loop {
            let seats = self.seats.iter_mut().flatten();
            let sending: Vec<&mut Seat> = seats.filter_map(|s| (!s.channel.flush()).then_some(s)).collect();
            if sending.is_empty() || system.now() >= until {
                return;
            }
            let mut fds: Vec<_> = sending.iter().map(|s| ready::writable(s.channel.as_fd())).collect();
            if system.wait(&mut fds, until).is_err() {
                return;
            }
        }
    }
}
