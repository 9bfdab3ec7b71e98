//! Everything that goes over the links, as somebody who listens on the wire sees it.

use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with, sockopt};

use super::Hosts;

/// All protocols, in network order: what `ETH_P_ALL` is to a packet socket.
const EVERYTHING: NonZeroU32 = NonZeroU32::new(0x0003_u16.to_be() as u32).unwrap();

/// A listener that looks for some bytes in every packet.
pub(crate) struct Capture {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(usize, usize)>,
}

impl Hosts {
    /// Listens at the switch from now on, and counts packets in which `pattern` stands.
    pub(crate) fn capture(&self, pattern: Vec<u8>) -> Capture {
        let switch = self.switch.clone().expect("hosts that are joined by a switch");
        let socket = super::delay::inside(&switch, || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let protocol = Some(Protocol::from_raw(EVERYTHING));
            socket_with(AddressFamily::PACKET, SocketType::RAW, flags, protocol).unwrap()
        });
        // What does not fit is dropped; there is far more of everything than is looked for.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, 8 << 20);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        Capture { stop, thread: std::thread::spawn(move || listen(&socket, &pattern, &stopped)) }
    }
}

impl Capture {
    /// How many bytes were seen, and in how many packets the pattern stood.
    pub(crate) fn end(self) -> (usize, usize) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn listen(socket: &OwnedFd, pattern: &[u8], stop: &AtomicBool) -> (usize, usize) {
    let mut packet = vec![0; 1 << 17];
    let (mut bytes, mut found) = (0, 0);
    loop {
        match recv(socket, &mut packet[..], RecvFlags::empty()) {
            Ok((n, _)) => {
                bytes += n;
                found += usize::from(packet[..n].windows(pattern.len()).any(|part| part == pattern));
            }
            Err(rustix::io::Errno::AGAIN) if stop.load(Ordering::Relaxed) => return (bytes, found),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                let patience = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience));
            }
            Err(e) => panic!("the capture ended: {e}"),
        }
    }
}
