//! A network of ranks in one process, in virtual time.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};

/// Reads the address that a connection of the simulated network stands for: 16 bytes of an IPv6 address, 2 of a port.
pub(crate) fn read_addr(from: &mut impl Read) -> io::Result<SocketAddr> {
    let mut bytes = [0; 18];
    from.read_exact(&mut bytes)?;
    let ip: [u8; 16] = bytes[..16].try_into().expect("sixteen bytes");
    let port = u16::from_le_bytes([bytes[16], bytes[17]]);
    Ok(SocketAddr::new(IpAddr::from(ip).to_canonical(), port))
}
