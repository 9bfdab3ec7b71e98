//! A connection between every two ranks, made and checked before step 0.
//!
//! Rank i connects to every j < i, and both prove the secret again. Then each sends the other a message that is
//! longer than a packet, so that a path that carries the proof but loses full packets is found here and not in the
//! first all-reduce. All pairs go on at once in one loop without threads; a pair that is not there at the end is a
//! fault, with what was last seen of it. A rank that dies meanwhile is a fault of all its pairs.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::dial::{Dial, Dialled, widen};
use super::gate::Gate;
use super::hello::{Hello, Purpose, Turned};
use super::knock::Tell;
use super::{JoinError, Member};
use crate::connection::{Connection, Proven};
use crate::control::message::Fault;
use crate::ready;
use crate::seal::SEAL_BYTES;
use crate::secret::Secret;
use crate::socket::Listener;
use crate::system::System;

/// More than the largest packet in use (jumbo frames of 9000 bytes).
const PROBE_BYTES: usize = 16 << 10;
/// A connection that is not made in this time is tried anew.
const DIAL_TIME: Duration = Duration::from_secs(3);
const DIALS_MAX: usize = 5;
const DIAL_PAUSE: Duration = Duration::from_millis(200);
/// How often to look whether the others have given up.
const LOOK: Duration = Duration::from_millis(100);

/// Who builds it, and for how long.
pub(crate) struct MeshOptions<'a> {
    pub(crate) system: &'a dyn System,
    pub(crate) rank: usize,
    pub(crate) members: &'a [Member],
    pub(crate) secret: &'a Secret,
    /// Job and generation are taken from it.
    pub(crate) hello: Hello,
    /// No streams between ranks with equal host keys.
    pub(crate) skip_same_host: bool,
    pub(crate) tell: &'a Tell,
    pub(crate) until: Instant,
}

/// The way to one other rank.
enum Way {
    /// No stream is wanted.
    None,
    /// The other rank connects to this one.
    Awaited {
        last: &'static str,
    },
    /// This rank connects to it, from then on.
    Resting {
        until: Instant,
        last: String,
    },
    Dialling {
        dial: Box<Dial>,
        until: Instant,
    },
    Probing {
        connection: Connection,
        probe: Probe,
    },
    Open(Connection),
    Failed(String),
}

/// Builds this rank's part. Returns its streams by rank, and the ranks that it cannot talk with. If `over` says that
/// somebody else's fault ended it for all, what is not settled by then is no fault.
pub(crate) fn build(
    listener: Listener,
    options: &MeshOptions,
    over: &mut dyn FnMut() -> Result<bool, JoinError>,
) -> Result<(Vec<Option<Connection>>, Vec<Fault>), JoinError> {
    let MeshOptions { rank, members, .. } = *options;
    widen(&listener);
    let hello =
        Hello { purpose: Purpose::Data, rank: rank as u32, size: members.len() as u32, ..options.hello };
    let mut gate = Gate::new(listener, options.secret.clone(), hello, members.len(), options.tell.clone())?;
    let mut ways: Vec<Way> = members.iter().map(|peer| first(options, peer)).collect();
    let mut n_dials = vec![0; members.len()];
    let interrupted = loop {
        let now = options.system.now();
        for arrival in gate.turn(now) {
            take(&mut ways, rank, &hello, arrival);
        }
        for (peer, way) in ways.iter_mut().enumerate() {
            *way = advance(std::mem::replace(way, Way::None), peer, options, hello, &mut n_dials[peer], now)?;
        }
        let open = |way: &Way| matches!(way, Way::None | Way::Open(_) | Way::Failed(_));
        if ways.iter().all(open) || now >= options.until {
            break false;
        }
        if over()? {
            break true;
        }
        let mut fds = Vec::new();
        gate.interests(&mut fds);
        let mut until = gate.due().unwrap_or(options.until).min(options.until).min(now + LOOK);
        for way in &ways {
            match way {
                Way::Resting { until: then, .. } => until = until.min(*then),
                Way::Dialling { dial, until: then } => {
                    fds.push(dial.interest());
                    until = until.min(*then);
                }
                Way::Probing { connection, probe } => {
                    fds.push(ready::interest(connection.stream.as_fd(), probe.writes()));
                }
                Way::None | Way::Awaited { .. } | Way::Open(_) | Way::Failed(_) => {}
            }
        }
        options.system.wait(&mut fds, until)?;
    };
    let mut faults = Vec::new();
    let mut streams = Vec::new();
    for (peer, way) in ways.into_iter().enumerate() {
        let (stream, why) = match way {
            Way::None => (None, None),
            Way::Open(connection) => (Some(connection), None),
            Way::Failed(why) => (None, Some(why)),
            _ if interrupted => (None, None),
            Way::Awaited { last } => (None, Some(last.to_owned())),
            Way::Resting { last, .. } => (None, Some(last)),
            Way::Dialling { dial, .. } => (None, Some(overdue(dial.connected()).to_owned())),
            Way::Probing { probe, .. } => (None, Some(probe.stalled())),
        };
        faults.extend(why.map(|why| Fault { from: rank as u32, to: peer as u32, why }));
        streams.push(stream);
    }
    for connection in streams.iter().flatten() {
        connection.stream.set_nonblocking(false)?;
    }
    Ok((streams, faults))
}

fn first(options: &MeshOptions, peer: &Member) -> Way {
    let here = &options.members[options.rank];
    let same_host = peer.host_key == here.host_key;
    if peer.rank == options.rank || (options.skip_same_host && same_host) {
        Way::None
    } else if peer.rank < options.rank {
        Way::Resting { until: options.system.now(), last: "no time to connect".into() }
    } else {
        Way::Awaited { last: "it did not connect" }
    }
}

/// Somebody proved the secret: is it one of the ranks that are awaited?
fn take(ways: &mut [Way], rank: usize, mine: &Hello, mut arrival: Proven) {
    let theirs = arrival.hello;
    let peer = theirs.rank as usize;
    let agrees = theirs.purpose == Purpose::Data
        && theirs.peer as usize == rank
        && (theirs.job, theirs.generation, theirs.size) == (mine.job, mine.generation, mine.size);
    // A rank that comes a second time lost its first connection.
    if agrees && peer > rank && peer < ways.len() && !matches!(ways[peer], Way::None) {
        let probe = Probe::new(rank, peer, &mut arrival.connection);
        ways[peer] = Way::Probing { connection: arrival.connection, probe };
    }
}

fn advance(
    way: Way,
    peer: usize,
    options: &MeshOptions,
    hello: Hello,
    n_dials: &mut usize,
    now: Instant,
) -> Result<Way, JoinError> {
    let again = |n_dials: usize, last: String| match n_dials {
        DIALS_MAX.. => Way::Failed(last),
        _ => Way::Resting { until: now + DIAL_PAUSE, last },
    };
    Ok(match way {
        Way::Resting { until, .. } if until <= now => {
            let hello = Hello { peer: peer as u32, ..hello };
            let dialled =
                Dial::start(options.system, options.members[peer].addr, options.secret.clone(), hello);
            *n_dials += 1;
            match dialled {
                Ok(dial) => Way::Dialling { dial, until: (now + DIAL_TIME).min(options.until) },
                Err(e) => again(*n_dials, explain(&e)),
            }
        }
        Way::Dialling { dial, until } => match dial.turn() {
            Dialled::Proved(Proven { mut connection, hello: theirs, .. })
                if theirs.rank as usize == peer && theirs.purpose == Purpose::Data =>
            {
                let probe = Probe::new(options.rank, peer, &mut connection);
                Way::Probing { connection, probe }
            }
            Dialled::Proved(proven) => Way::Failed(format!("rank {} answers there", proven.hello.rank)),
            Dialled::Turned(Turned::WrongSecret) => Way::Failed("it does not know the job's secret".into()),
            Dialled::Turned(Turned::Encryption(theirs)) => {
                Way::Failed(format!("it has parallel.encrypt = {theirs}"))
            }
            Dialled::Turned(Turned::Stranger) => Way::Failed("something else than a rank answers".into()),
            Dialled::Turned(Turned::Version(v)) => {
                Way::Failed(format!("it speaks version {v} of the protocol"))
            }
            Dialled::Turned(Turned::Closed) => again(*n_dials, "it closed the connection".into()),
            Dialled::Turned(Turned::Failed(kind)) => again(*n_dials, kind.to_string()),
            Dialled::Unconnected(e) => again(*n_dials, explain(&e)),
            Dialled::Pending(dial) if until <= now && now < options.until => {
                // It may stand still for a while: that is no refusal, and does not count as one.
                *n_dials -= 1;
                again(*n_dials, overdue(dial.connected()).into())
            }
            Dialled::Pending(dial) => Way::Dialling { dial, until },
            Dialled::Overdue { connected } => again(*n_dials, overdue(connected).into()),
        },
        Way::Probing { mut connection, mut probe } => match probe.advance(&mut connection) {
            Ok(true) => Way::Open(connection),
            Ok(false) => Way::Probing { connection, probe },
            Err(_) if peer > options.rank => Way::Awaited { last: "it closed the connection" },
            Err(why) => Way::Failed(why),
        },
        other => other,
    })
}

fn overdue(connected: bool) -> &'static str {
    if connected { "it accepted the connection and did not answer" } else { "connection timed out" }
}

/// An error without the number that the system gives it.
fn explain(e: &io::Error) -> String {
    match e.kind() {
        ErrorKind::TimedOut => "connection timed out".into(),
        ErrorKind::ConnectionRefused => "connection refused".into(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "it closed the connection".into(),
        _ => e.to_string(),
    }
}

/// The message that each of a pair sends the other: the first frame of the connection, sealed if it is encrypted.
struct Probe {
    output: Vec<u8>,
    n_sent: usize,
    input: Vec<u8>,
    n_received: usize,
    peer: usize,
}

impl Probe {
    fn new(rank: usize, peer: usize, connection: &mut Connection) -> Probe {
        let mut output: Vec<u8> = (0..PROBE_BYTES).map(|i| pattern(rank, i)).collect();
        if let Some(seals) = &mut connection.seals {
            let mut head = [0; SEAL_BYTES];
            seals.out.seal(&mut head, &mut output);
            output.splice(..0, head);
        }
        Probe { n_sent: 0, input: vec![0; output.len()], output, n_received: 0, peer }
    }

    fn writes(&self) -> bool {
        self.n_sent < self.output.len()
    }

    fn stalled(&self) -> String {
        let Probe { n_sent, n_received, .. } = self;
        format!(
            "connected, but a message of {} bytes does not get through ({n_sent} bytes sent, {n_received} received)",
            self.output.len()
        )
    }

    /// Whether both messages are through.
    fn advance(&mut self, connection: &mut Connection) -> Result<bool, String> {
        let (mut can_write, mut can_read) = (true, true);
        while can_write && self.writes() {
            match connection.stream.write(&self.output[self.n_sent..]) {
                Ok(n) => self.n_sent += n,
                Err(e) => can_write = interrupted(e)?,
            }
        }
        while can_read && self.n_received < self.input.len() {
            match connection.stream.read(&mut self.input[self.n_received..]) {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(n) => self.n_received += n,
                Err(e) => can_read = interrupted(e)?,
            }
            if self.n_received == self.input.len() && !self.is_whole(connection) {
                return Err("what it sent arrived damaged".into());
            }
        }
        Ok(!self.writes() && self.n_received == self.input.len())
    }

    /// Whether all that came is what the other side sent.
    fn is_whole(&mut self, connection: &mut Connection) -> bool {
        let mut input = &mut self.input[..];
        if let Some(seals) = &mut connection.seals {
            let (head, payload) = input.split_at_mut(SEAL_BYTES);
            let opened = seals.into.open_head(head).and_then(|()| seals.into.open_payload(payload));
            if opened.is_err() {
                return false;
            }
            input = payload;
        }
        input.iter().copied().eq((0..PROBE_BYTES).map(|i| pattern(self.peer, i)))
    }
}

fn pattern(rank: usize, i: usize) -> u8 {
    (rank.wrapping_mul(31).wrapping_add(i.wrapping_mul(7)).wrapping_add(i >> 8)) as u8
}

/// Whether to try again at once.
fn interrupted(e: io::Error) -> Result<bool, String> {
    match e.kind() {
        ErrorKind::Interrupted => Ok(true),
        ErrorKind::WouldBlock => Ok(false),
        _ => Err(explain(&e)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::seal::Encrypt;
    use crate::system::Os;

    const TIME: Duration = Duration::from_millis(1500);

    fn member(rank: usize, listener: &TcpListener) -> Member {
        let addr = listener.local_addr().unwrap();
        Member { rank, host: format!("h{rank}"), host_key: format!("k{}", rank / 2), pid: 1, addr }
    }

    fn hello(generation: u64) -> Hello {
        let (encrypt, here, key) = (Encrypt::Always, false, [0; 32]);
        Hello { purpose: Purpose::Control, job: 1, generation, rank: 0, size: 0, peer: 0, encrypt, here, key }
    }

    /// Ranks of this test, each with its secret and generation; `None` is a listener that never answers.
    fn mesh(ranks: &[Option<(&str, u64)>], skip_same_host: bool) -> Vec<(Vec<bool>, Vec<String>)> {
        let listeners: Vec<_> = ranks.iter().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let members: Vec<_> = listeners.iter().enumerate().map(|(i, l)| member(i, l)).collect();
        let members = &members;
        std::thread::scope(|s| {
            let build = |rank: usize, listener: TcpListener, (secret, generation): (&str, u64)| {
                let secret = &crate::secret::tests::secret(secret);
                let tell = &Tell::default();
                let until = Instant::now() + TIME;
                let hello = hello(generation);
                let options =
                    MeshOptions { system: &Os, rank, members, secret, hello, skip_same_host, tell, until };
                let (streams, faults) = build(listener.into(), &options, &mut || Ok(false)).unwrap();
                let faults = faults.iter().map(|f| format!("{} to {}: {}", f.from, f.to, f.why)).collect();
                (streams.iter().map(Option::is_some).collect::<Vec<_>>(), faults)
            };
            let mut silent = Vec::new();
            let mut running = Vec::new();
            for ((rank, kind), listener) in ranks.iter().enumerate().zip(listeners) {
                match *kind {
                    Some(kind) => running.push(s.spawn(move || build(rank, listener, kind))),
                    None => silent.push(listener),
                }
            }
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn pairs_that_cannot_talk_are_named_and_the_others_talk() {
        let check = |ranks: &[Option<(&str, u64)>], skip: bool, expected: &[(&[usize], &[&str])]| {
            let got = mesh(ranks, skip);
            for ((streams, faults), (to, says)) in got.iter().zip(expected) {
                let open: Vec<usize> = (0..streams.len()).filter(|&i| streams[i]).collect();
                assert_eq!((open.as_slice(), faults.len()), (*to, says.len()), "{ranks:?}: {faults:?}");
                for (fault, says) in faults.iter().zip(*says) {
                    assert!(fault.contains(says), "{ranks:?}: {fault}");
                }
            }
        };
        let good = Some(("correct horse", 1));
        check(&[good; 3], false, &[(&[1, 2], &[]), (&[0, 2], &[]), (&[0, 1], &[])]);
        // Ranks 0 and 1 share a host.
        check(&[good; 3], true, &[(&[2], &[]), (&[2], &[]), (&[0, 1], &[])]);
        let deaf: &[(&[usize], &[&str])] = &[
            (&[2], &["0 to 1: it did not connect"]),
            (&[0], &["2 to 1: it accepted the connection and did not answer"]),
        ];
        check(&[good, None, good], false, deaf);
        let secret: &[(&[usize], &[&str])] = &[
            (&[1], &["0 to 2: it did not connect"]),
            (&[0], &["1 to 2: it did not connect"]),
            (
                &[],
                &["2 to 0: it does not know the job's secret", "2 to 1: it does not know the job's secret"],
            ),
        ];
        check(&[good, good, Some(("wrong horse", 1))], false, secret);
        let old: &[(&[usize], &[&str])] =
            &[(&[], &["0 to 1: it did not connect"]), (&[], &["1 to 0: it closed the connection"])];
        check(&[good, Some(("correct horse", 2))], false, old);
    }
}
