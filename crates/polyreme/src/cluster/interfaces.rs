//! The addresses of this host, by interface, and which one a rank binds.
//!
//! The kernel is asked over netlink, as `ip address` does. A listener binds one of these addresses, never all of them.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send, socket};

/// An address of this host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// One of its addresses.
    pub address: IpAddr,
    /// Bits of the address that are those of its network.
    pub prefix: u8,
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {}/{}", self.name, self.address, self.prefix)
    }
}

/// No address can be chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoAddress(String);

impl fmt::Display for NoAddress {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoAddress {}

/// The address that a rank binds.
///
/// `wanted` is an interface's name, an address or a network; `ssh` is `SSH_CONNECTION`, which has the address at which
/// this host was reached. Without both: the loopback if all ranks are on this host, otherwise this host's only address;
/// if there are several, the user has to choose.
pub fn choose(
    wanted: Option<&str>,
    ssh: Option<&str>,
    one_host: bool,
    interfaces: &[Interface],
) -> Result<IpAddr, NoAddress> {
    let all = || interfaces.iter().map(Interface::to_string).collect::<Vec<_>>().join(", ");
    if let Some(wanted) = wanted {
        if let Ok(address) = wanted.parse::<IpAddr>() {
            return Ok(address);
        }
        let network = wanted.split_once('/').and_then(|(a, n)| Some((a.parse().ok()?, n.parse().ok()?)));
        let fits = |i: &&Interface| match network {
            Some((address, prefix)) => within(i.address, address, prefix),
            None => i.name == wanted,
        };
        // IPv4 first: both ends are most likely to have it.
        let of_kind = |v4: bool| interfaces.iter().filter(fits).find(move |i| i.address.is_ipv4() == v4);
        let found = of_kind(true).or(of_kind(false)).map(|i| i.address);
        // A whole network can be the loopback's; any address in it is this host's.
        let loopback =
            network.filter(|(a, _): &(IpAddr, u8)| a.is_loopback()).map(|_| Ipv4Addr::LOCALHOST.into());
        return found.or(loopback).ok_or_else(|| {
            NoAddress(format!("this host has no interface or network {wanted}; it has {}", all()))
        });
    }
    let reached = ssh.and_then(|s| s.split_whitespace().nth(2)).and_then(|a| a.parse::<IpAddr>().ok());
    if let Some(address) = reached.filter(|a| one_host || !a.is_loopback()) {
        return Ok(address);
    }
    if one_host {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let outside =
        |v4: bool| interfaces.iter().filter(move |i| !i.address.is_loopback() && i.address.is_ipv4() == v4);
    let candidates: Vec<_> = match outside(true).count() {
        0 => outside(false).collect(),
        _ => outside(true).collect(),
    };
    match candidates[..] {
        [one] => Ok(one.address),
        [] => Err(NoAddress(format!("this host has no address that others can reach; it has {}", all()))),
        _ => Err(NoAddress(format!(
            "this host has several addresses ({}); choose the network of the ranks with --interface or POLYREME_INTERFACE",
            all()
        ))),
    }
}

/// Whether an address is in a network.
fn within(address: IpAddr, network: IpAddr, prefix: u8) -> bool {
    let bits = |a: IpAddr| match a {
        IpAddr::V4(a) => (u128::from(u32::from(a)) << 96, 32),
        IpAddr::V6(a) => (u128::from(a), 128),
    };
    let ((a, width), (b, other)) = (bits(address), bits(network));
    width == other && prefix <= width && (prefix == 0 || (a ^ b) >> (128 - u32::from(prefix)) == 0)
}

/// The addresses of this host; none where the system does not say. Link-local addresses are left out.
pub fn interfaces() -> Vec<Interface> {
    let Ok(messages) = dump() else { return Vec::new() };
    let names = names();
    let name = |idx: u32| names.iter().find(|(i, _)| *i == idx).map_or(format!("#{idx}"), |(_, n)| n.clone());
    let addresses = addresses(&messages).into_iter();
    let mut all: Vec<_> = addresses
        .filter(|(_, _, a)| !matches!(a, IpAddr::V6(a) if a.is_unicast_link_local()))
        .map(|(idx, prefix, address)| Interface { name: name(idx), address, prefix })
        .collect();
    all.dedup();
    all
}

fn names() -> Vec<(u32, String)> {
    let entries = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let idx = |e: &fs::DirEntry| fs::read_to_string(e.path().join("ifindex")).ok()?.trim().parse().ok();
    entries.filter_map(|e| Some((idx(&e)?, e.file_name().to_string_lossy().into_owned()))).collect()
}

const HEADER_BYTES: usize = 16;
const ANSWER_BYTES_MAX: usize = 1 << 20;
const DONE: u16 = 3;
const ERROR: u16 = 2;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;

/// The kernel's answer to "all addresses".
fn dump() -> io::Result<Vec<u8>> {
    // Protocol 0 of netlink is the routing one.
    let link = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    set_socket_timeout(&link, Timeout::Recv, Some(Duration::from_secs(2)))?;
    // Header: length, kind, REQUEST | DUMP, sequence, port. Body: any family.
    let mut ask = vec![0; HEADER_BYTES + 8];
    ask[0..4].copy_from_slice(&((HEADER_BYTES + 8) as u32).to_ne_bytes());
    ask[4..6].copy_from_slice(&GET_ADDRESS.to_ne_bytes());
    ask[6..8].copy_from_slice(&0x301u16.to_ne_bytes());
    ask[8..12].copy_from_slice(&1u32.to_ne_bytes());
    send(&link, &ask, SendFlags::empty())?;
    let mut answer = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    while answer.len() < ANSWER_BYTES_MAX {
        let (n, _) = recv(&link, &mut buffer[..], RecvFlags::empty())?;
        answer.extend_from_slice(&buffer[..n]);
        let last = messages(&buffer[..n]).last().map(|(kind, _)| kind);
        if n == 0 || matches!(last, Some(DONE | ERROR)) {
            break;
        }
    }
    Ok(answer)
}

/// Kinds and bodies of netlink messages; stops at the first incomplete one.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = u32::from_ne_bytes(bytes.get(0..4)?.try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
        let body = bytes.get(HEADER_BYTES..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, body))
    })
}

/// Interface numbers, prefixes and addresses.
fn addresses(bytes: &[u8]) -> Vec<(u32, u8, IpAddr)> {
    let address = |(kind, body): (u16, &[u8])| {
        let prefix = *body.get(1)?;
        let idx = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
        let mut attributes = body.get(8..).filter(|_| kind == NEW_ADDRESS)?;
        let mut found = None;
        while attributes.len() >= 4 {
            let len = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
            let value = attributes.get(4..len)?;
            // 1: the address, or a point-to-point link's other end. 2: this end.
            match (u16::from_ne_bytes([attributes[2], attributes[3]]), value.len()) {
                (2, _) | (1, _) if found.is_none() || attributes[2] == 2 => found = ip(value).or(found),
                _ => {}
            }
            attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        }
        Some((idx, prefix, found?))
    };
    messages(bytes).filter_map(address).collect()
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        16 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_loopback() {
        let all = interfaces();
        assert!(all.iter().any(|i| i.name == "lo" && i.address == Ipv4Addr::LOCALHOST), "{all:?}");
        assert!(addresses(&[9; 100]).is_empty() && addresses(&[]).is_empty());
    }

    #[test]
    fn an_address_is_chosen_or_asked_for() {
        let host = |list: &[&str]| -> Vec<Interface> {
            let interface = |text: &&str| {
                let (name, rest) = text.split_once(' ').unwrap();
                let (address, prefix) = rest.split_once('/').unwrap();
                Interface {
                    name: name.into(),
                    address: address.parse().unwrap(),
                    prefix: prefix.parse().unwrap(),
                }
            };
            list.iter().map(interface).collect()
        };
        let one = host(&["lo 127.0.0.1/8", "eth0 10.1.2.3/16", "eth0 fd00::1/64"]);
        let two = host(&["lo 127.0.0.1/8", "eth0 10.1.2.3/16", "ib0 192.168.7.1/24"]);
        let none = host(&["lo 127.0.0.1/8"]);
        /// Wanted, `SSH_CONNECTION`, whether there is one host, its addresses; the expected result.
        type Case<'a> = (Option<&'a str>, Option<&'a str>, bool, &'a [Interface], Result<&'a str, &'a str>);
        let rows: [Case; 17] = [
            (None, None, true, &two, Ok("127.0.0.1")),
            (None, None, false, &one, Ok("10.1.2.3")),
            (None, None, false, &two, Err("--interface")),
            (None, None, false, &none, Err("no address")),
            (Some("ib0"), None, false, &two, Ok("192.168.7.1")),
            (Some("192.168.0.0/16"), None, false, &two, Ok("192.168.7.1")),
            (Some("fd00::/8"), None, false, &one, Ok("fd00::1")),
            (Some("0.0.0.0/0"), None, false, &none, Ok("127.0.0.1")),
            (Some("127.0.0.0/8"), None, false, &none, Ok("127.0.0.1")),
            (Some("10.9.9.9"), None, false, &one, Ok("10.9.9.9")),
            (Some("eth7"), None, false, &one, Err("eth0 10.1.2.3/16")),
            (Some("172.16.0.0/12"), None, false, &one, Err("172.16.0.0/12")),
            (Some("10.0.0.0/99"), None, false, &one, Err("10.0.0.0/99")),
            (None, Some("10.1.0.9 4711 10.1.2.3 22"), false, &two, Ok("10.1.2.3")),
            (None, Some("127.0.0.1 4711 127.0.0.1 22"), false, &two, Err("--interface")),
            (None, Some("127.0.0.1 4711 127.0.0.2 22"), true, &two, Ok("127.0.0.2")),
            (None, Some("nonsense"), false, &one, Ok("10.1.2.3")),
        ];
        for (wanted, ssh, one_host, interfaces, want) in rows {
            let got = choose(wanted, ssh, one_host, interfaces);
            match want {
                Ok(address) => assert_eq!(got.unwrap().to_string(), address, "{wanted:?} {ssh:?}"),
                Err(say) => {
                    let said = got.unwrap_err().to_string();
                    assert!(said.contains(say), "{wanted:?} {ssh:?}: {said}");
                }
            }
        }
    }
}
