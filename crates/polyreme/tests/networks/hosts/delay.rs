//! Links with a delay: a tun in each host, and threads that carry each packet to the host it is meant for, late.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Packets are large, so that few of them carry much.
const MTU: usize = 16_000;

/// The threads that carry packets; they end when this is dropped.
pub(super) struct Delay {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

type Packet = (Instant, Vec<u8>);

impl Delay {
    /// Joins the hosts by links that take `ms` each way.
    pub(super) fn start(names: &[String], ms: u64) -> Delay {
        let stop = Arc::new(AtomicBool::new(false));
        let tuns: Vec<Arc<File>> = names.iter().map(|name| Arc::new(open_tun(name))).collect();
        for (i, name) in names.iter().enumerate() {
            let address = format!("{}/24", super::address(i));
            super::within(name, &["ip", "addr", "add", &address, "dev", "tun0"]);
            super::within(name, &["ip", "link", "set", "tun0", "mtu", &MTU.to_string(), "up"]);
        }
        let (senders, receivers): (Vec<Sender<Packet>>, Vec<Receiver<Packet>>) =
            names.iter().map(|_| channel()).unzip();
        let mut threads = Vec::new();
        for tun in &tuns {
            let (tun, senders, stop) = (tun.clone(), senders.clone(), stop.clone());
            let late = Duration::from_millis(ms);
            threads.push(std::thread::spawn(move || carry_out(&tun, &senders, late, &stop)));
        }
        for (tun, packets) in tuns.iter().zip(receivers) {
            let tun = tun.clone();
            threads.push(std::thread::spawn(move || carry_in(&tun, &packets)));
        }
        Delay { stop, threads }
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// Takes what a host sends and gives it to whom it is meant for.
fn carry_out(tun: &File, senders: &[Sender<Packet>], late: Duration, stop: &AtomicBool) {
    let mut buffer = vec![0; 2 * MTU];
    let patience = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    while !stop.load(Ordering::Relaxed) {
        let mut ready = [PollFd::new(tun, PollFlags::IN)];
        if !matches!(poll(&mut ready, Some(&patience)), Ok(n) if n > 0) {
            continue;
        }
        let Ok(len) = (&*tun).read(&mut buffer) else { continue };
        // IPv4: the last byte of the target's address.
        let Some(&last) = buffer[..len].get(19) else { continue };
        if let (4, Some(to)) = (buffer[0] >> 4, senders.get(usize::from(last).wrapping_sub(1))) {
            drop(to.send((Instant::now() + late, buffer[..len].to_vec())));
        }
    }
}

/// Gives a host its packets when their time has come.
fn carry_in(tun: &File, packets: &Receiver<Packet>) {
    while let Ok((due, packet)) = packets.recv() {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        // A packet that the host does not take is lost, as on a wire.
        drop((&*tun).write(&packet));
    }
}

/// A tun called `tun0` in a namespace.
fn open_tun(namespace: &str) -> File {
    inside(namespace, || {
        let tun = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        let mut request = Request { name: [0; 16], flags: TUN_NO_INFO, rest: [0; 22] };
        request.name[..4].copy_from_slice(b"tun0");
        // SAFETY: TUNSETIFF takes an `ifreq` of 40 bytes: the name, then the flags.
        unsafe {
            let call = rustix::ioctl::Updater::<TUNSETIFF, Request>::new(&mut request);
            rustix::ioctl::ioctl(&tun, call).unwrap();
        }
        tun
    })
}

/// Runs `f` on a thread that has moved into a namespace.
pub(super) fn inside<T: Send + 'static>(namespace: &str, f: impl FnOnce() -> T + Send + 'static) -> T {
    let namespace = File::open(format!("/run/netns/{namespace}")).unwrap();
    let moved = move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        f()
    };
    std::thread::spawn(moved).join().unwrap()
}

const TUNSETIFF: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 202);

/// IFF_TUN | IFF_NO_PI: bare IP packets.
const TUN_NO_INFO: i16 = 0x1001;

#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    rest: [u8; 22],
}
