//! The side of every rank but 0: find rank 0, prove the secret, and follow its instructions.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::bounds::{dial_time, mesh_time, slack};
use super::dial::{Dial, Dialled};
use super::hello::{Hello, Purpose, Turned};
use super::{JoinError, JoinOptions, Joined, WAIT_MAX, joined, listen_for_data, mesh};
use crate::connection::{Connection, Proven};
use crate::control::channel::{Channel, Ended};
use crate::control::message::Message;
use crate::patience::Patience;
use crate::ready;
use crate::system::System;

/// How much longer an attempt to connect to rank 0 may take than one between two other ranks: all connect to it.
const TRY_TIME: Duration = Duration::from_secs(2);
/// Pauses between attempts double from the first to the second of these.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Joins as a rank that is not 0.
pub(super) fn enlist(options: JoinOptions, hello: Hello) -> Result<Joined, JoinError> {
    let JoinOptions { rank, size, .. } = options;
    let system = &*options.system.clone();
    let connection = find(&options, hello)?;
    let ip = connection.stream.local_addr()?.ip();
    let mut channel = Channel::new(connection, Message::bytes_max_from_zero(size))?;
    let master = options.master.clone();
    let left = || JoinError::Left { rank: 0, host: master.clone() };
    let until = system.now() + options.patience.silence + slack(size);
    let Message::Welcome { wait_ms, patience_ms, stall_ms } = hear(system, &mut channel, until, left)? else {
        return Err(unexpected("an unexpected message instead of a welcome"));
    };
    let patience = Patience {
        silence: Duration::from_millis(patience_ms).min(WAIT_MAX),
        stall: Duration::from_millis(stall_ms).min(WAIT_MAX),
    };
    let (data, here) = listen_for_data(&options, ip)?;
    channel.send(&Message::Here(here.clone()));
    let wait = Duration::from_millis(wait_ms).min(WAIT_MAX);
    let Message::Table(members) =
        hear(system, &mut channel, system.now() + wait + patience.silence + slack(size), left)?
    else {
        return Err(unexpected("an unexpected message instead of the table of ranks"));
    };
    let whole = members.len() == size && members.iter().enumerate().all(|(i, member)| member.rank == i);
    if !whole || members[rank] != here {
        return Err(unexpected("the table of another job's ranks"));
    }
    let until = system.now() + mesh_time(size, patience);
    let mut mesh = mesh(&options, data, hello, &members, patience)?;
    let edges = options.first.edges(&members, rank);
    let (open, faults) = mesh.build(edges, until, &mut || match next(&mut channel, left)? {
        None => Ok(false),
        Some(_) => Err(unexpected("a message while the ranks were being connected")),
    })?;
    channel.send(&Message::Faults(faults));
    // Rank 0 waits for the slowest rank, which may have started later than this one.
    match hear(system, &mut channel, until + (patience.silence + slack(size)) * 2, left)? {
        Message::Faults(faults) if faults.is_empty() => {}
        _ => return Err(unexpected("an unexpected message instead of the result of connecting")),
    }
    let mut channels: Vec<Option<Channel>> = (0..size).map(|_| None).collect();
    channels[0] = Some(channel);
    joined(options, members, channels, patience, mesh, open)
}

/// A proven connection to rank 0.
fn find(options: &JoinOptions, hello: Hello) -> Result<Connection, JoinError> {
    let JoinOptions { rank, ref master, timeout, .. } = *options;
    let system = &*options.system;
    let until = system.now() + timeout;
    let mut pause = PAUSE_MIN;
    let mut why = "no time to try".to_owned();
    while system.now() < until {
        // A name may become resolvable meanwhile, so it is looked up each time.
        let addrs: Vec<SocketAddr> = match master.to_socket_addrs() {
            Ok(addrs) => addrs.collect(),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                return Err(JoinError::Options(format!("{master:?} is not host:port: {e}")));
            }
            Err(e) => {
                why = e.to_string();
                Vec::new()
            }
        };
        for addr in addrs {
            let dial = match Dial::start(system, addr, options.secret.clone(), hello) {
                Ok(dial) => dial,
                Err(e) => {
                    why = e.to_string();
                    continue;
                }
            };
            match dial.wait(system, until.min(system.now() + TRY_TIME + dial_time(options.size))) {
                Dialled::Proved(Proven { connection, hello: theirs, .. })
                    if theirs.rank == 0 && theirs.purpose == Purpose::Control =>
                {
                    return Ok(connection);
                }
                Dialled::Proved(Proven { hello: theirs, .. }) => {
                    why = format!("rank {} answers there", theirs.rank);
                }
                Dialled::Turned(Turned::WrongSecret) => {
                    return Err(JoinError::WrongSecret { rank, master: master.clone() });
                }
                Dialled::Turned(Turned::Encryption(zeros)) => {
                    return Err(JoinError::Encryption { rank, theirs: hello.encrypt, zeros });
                }
                Dialled::Turned(Turned::Version(theirs)) => {
                    return Err(JoinError::Version { master: master.clone(), theirs });
                }
                Dialled::Turned(Turned::Stranger) => {
                    return Err(JoinError::NoRank { master: master.clone() });
                }
                Dialled::Turned(Turned::Closed) => why = "it closed the connection".into(),
                Dialled::Turned(Turned::Failed(kind)) => why = kind.to_string(),
                Dialled::Overdue { connected: true } => {
                    why = "it accepted the connection and did not answer".into();
                }
                Dialled::Overdue { connected: false } => why = "connection timed out".into(),
                Dialled::Unconnected(e) => why = e.to_string(),
                Dialled::Pending(_) => {}
            }
        }
        system.sleep(pause.min(until.saturating_duration_since(system.now())));
        pause = (2 * pause).min(PAUSE_MAX);
    }
    Err(JoinError::Unreachable { rank, master: master.clone(), timeout, why })
}

/// The next message from rank 0, with a deadline.
fn hear(
    system: &dyn System,
    channel: &mut Channel,
    until: Instant,
    left: impl Fn() -> JoinError,
) -> Result<Message, JoinError> {
    loop {
        match next(channel, &left)? {
            Some(message) => return Ok(message),
            None if system.now() >= until => return Err(left()),
            None => {}
        }
        system.wait(&mut [ready::interest(channel.as_fd(), channel.sending())], until)?;
    }
}

/// A message that has come. A refusal is an error.
fn next(channel: &mut Channel, left: impl Fn() -> JoinError) -> Result<Option<Message>, JoinError> {
    channel.flush();
    match channel.receive() {
        Ok(Some(Message::Refused { why })) => Err(JoinError::Refused { why }),
        Ok(message) => Ok(message),
        Err(Ended::Closed) => Err(left()),
        Err(Ended::Malformed { what }) => Err(unexpected(&what)),
    }
}

fn unexpected(what: &str) -> JoinError {
    JoinError::Protocol { rank: 0, what: what.to_owned() }
}
