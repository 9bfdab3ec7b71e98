//! Links between ranks of one process, over real sockets of the loopback interface: for tests and for measuring.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::alarm::Alarm;
use crate::links::Links;
use crate::socket::Stream;

/// The links of each of these ranks, each with its own alarm.
pub fn links(ranks: usize) -> io::Result<Vec<Links>> {
    let streams = streams(ranks)?.into_iter().enumerate();
    let hosts = vec!["localhost".to_string(); ranks];
    streams.map(|(rank, row)| Links::over(rank, hosts.clone(), row, 0, Alarm::default())).collect()
}

/// Connected streams: row `r` has those of rank `r`, none for itself.
pub fn streams(ranks: usize) -> io::Result<Vec<Vec<Option<Stream>>>> {
    let mut rows: Vec<Vec<Option<Stream>>> = (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    unpaced(&listener);
    for one in 0..ranks {
        for other in one + 1..ranks {
            let ours = connect(listener.local_addr()?)?;
            // Any process of this machine may connect to the port: connections that are not ours are dropped.
            let theirs = loop {
                let (stream, from) = listener.accept()?;
                if from == ours.local_addr()? {
                    break stream;
                }
            };
            rows[one][other] = Some(ours.into());
            rows[other][one] = Some(theirs.into());
        }
    }
    Ok(rows)
}

/// Connects to an address of this machine, without pacing.
pub fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    unpaced(&socket);
    rustix::net::connect(&socket, &to)?;
    Ok(socket.into())
}

/// Keeps a socket that will talk inside this machine from pacing. BBR, where it is the system's default, paces with
/// timers, which only costs where there is no line to share: an all-reduce of 64 MiB takes 1.5 times as long in the
/// kernel. A socket that starts with BBR keeps the timers, so this is done before it connects; accepted sockets inherit
/// it from their listener. A kernel without cubic keeps its default.
pub fn unpaced(socket: impl AsFd) {
    let _ = rustix::net::sockopt::set_tcp_congestion(socket, "cubic");
}
