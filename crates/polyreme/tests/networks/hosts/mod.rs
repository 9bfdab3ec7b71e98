//! Hosts on one machine: network namespaces, joined by links of a given bandwidth or delay.
//!
//! Bandwidth: each host has a veth into a bridge in another namespace; both ends are shaped by a
//! token bucket. Delay: each host has a tun, and a thread of the test carries packets between them, late.

#[allow(dead_code, reason = "one of the two test binaries with hosts listens on the wire")]
mod capture;
mod delay;
mod ranks;

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) use ranks::root;

/// Hosts that are there as long as this is.
pub(crate) struct Hosts {
    names: Vec<String>,
    switch: Option<String>,
    _delay: Option<delay::Delay>,
}

/// What a link is like.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    /// Megabits per second, each way.
    Mbit(u32),
    /// A delay of packets, in milliseconds.
    DelayMs(u64),
}

impl Hosts {
    /// `n` hosts, each pair joined by such a link.
    pub(crate) fn new(n: usize, link: Link) -> Hosts {
        // Names of this process and this call, at most 15 characters with what follows.
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let base = format!("p{:x}x{}", std::process::id(), CALLS.fetch_add(1, Ordering::Relaxed));
        let names: Vec<_> = (0..n).map(|i| format!("{base}h{i}")).collect();
        let mut hosts = Hosts { names, switch: None, _delay: None };
        for name in &hosts.names {
            ip(&["netns", "add", name]);
            within(name, &["ip", "link", "set", "lo", "up"]);
        }
        match link {
            Link::Mbit(rate) => hosts.join_by_bridge(&base, rate),
            Link::DelayMs(ms) => hosts._delay = Some(delay::Delay::start(&hosts.names, ms)),
        }
        hosts
    }

    /// The address of a host.
    pub(crate) fn address(&self, host: usize) -> String {
        address(host)
    }

    /// A command that runs on a host.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host], program]);
        command
    }

    /// How many bytes a host has sent over its link.
    #[allow(dead_code, reason = "one of the two test binaries with hosts counts them")]
    pub(crate) fn sent_bytes(&self, host: usize) -> u64 {
        let output =
            self.command(host, "cat").arg("/sys/class/net/eth0/statistics/tx_bytes").output().unwrap();
        String::from_utf8_lossy(&output.stdout)
            .trim()
            .parse()
            .expect("a link that was made here has a counter")
    }

    /// Pulls a host's cable, or puts it in again; of hosts on a bridge.
    #[allow(dead_code, reason = "one of the two test binaries with hosts cuts links")]
    pub(crate) fn set_cable(&self, host: usize, there: bool) {
        let switch = self.switch.as_ref().expect("hosts on a bridge have a switch");
        let state = if there { "up" } else { "down" };
        within(switch, &["ip", "link", "set", &format!("port{host}"), state]);
    }

    fn join_by_bridge(&mut self, base: &str, rate: u32) {
        let switch = format!("{base}sw");
        ip(&["netns", "add", &switch]);
        self.switch = Some(switch.clone());
        within(&switch, &["ip", "link", "add", "br0", "type", "bridge"]);
        within(&switch, &["ip", "link", "set", "br0", "up"]);
        for (i, name) in self.names.iter().enumerate() {
            let port = format!("port{i}");
            let peer = ["peer", "name", &port, "netns", &switch];
            let link = ["link", "add", "eth0", "netns", name, "type", "veth"];
            ip(&[&link[..], &peer[..]].concat());
            within(&switch, &["ip", "link", "set", &port, "master", "br0"]);
            within(&switch, &["ip", "link", "set", &port, "up"]);
            within(name, &["ip", "addr", "add", &format!("{}/24", address(i)), "dev", "eth0"]);
            within(name, &["ip", "link", "set", "eth0", "up"]);
            // A bucket of 2 ms, and at least one large packet.
            let burst = format!("{}", (u64::from(rate) * 1_000_000 / 8 / 500).max(70_000));
            let rate = format!("{rate}mbit");
            for (namespace, device) in [(name.as_str(), "eth0"), (&switch, &port)] {
                let tbf = ["root", "tbf", "rate", &rate, "burst", &burst, "latency", "100ms"];
                within(namespace, &[&["tc", "qdisc", "add", "dev", device], &tbf[..]].concat());
            }
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in self.names.iter().chain(&self.switch) {
            // What is left behind by a failed test is not worth a second failure.
            drop(Command::new("ip").args(["netns", "del", name]).status());
        }
    }
}

fn address(host: usize) -> String {
    format!("10.213.7.{}", host + 1)
}

fn ip(args: &[&str]) {
    run(Command::new("ip").args(args));
}

/// Runs a command in a namespace.
fn within(namespace: &str, args: &[&str]) {
    run(Command::new("ip").args(["netns", "exec", namespace]).args(args));
}

fn run(command: &mut Command) {
    let output = command.output().expect("iproute2 is installed, as .ci/run does");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    /// Sends `bytes` from host 0 to host 1 and waits for an answer: the time of it.
    fn round_trip(hosts: &Hosts, bytes: usize) -> Duration {
        let (from, to) = (hosts.names[0].clone(), hosts.names[1].clone());
        let listener = delay::inside(&to, || TcpListener::bind((address(1).as_str(), 0)).unwrap());
        let target = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = vec![0; bytes];
            for _ in 0..2 {
                stream.read_exact(&mut buffer).unwrap();
                stream.write_all(&[1]).unwrap();
            }
        });
        let mut stream = delay::inside(&from, move || TcpStream::connect(target).unwrap());
        let mut times = Vec::new();
        for _ in 0..2 {
            let start = Instant::now();
            stream.write_all(&vec![7; bytes]).unwrap();
            stream.read_exact(&mut [0]).unwrap();
            times.push(start.elapsed());
        }
        server.join().unwrap();
        times[1]
    }

    #[test]
    fn links_are_as_slow_as_asked() {
        let _machine = crate::alone();
        let late = round_trip(&Hosts::new(2, Link::DelayMs(10)), 100);
        assert!((20..60).contains(&late.as_millis()), "{late:?} for a round trip of 10 ms each way");
        // 2.5 MB at 100 Mbit/s take 200 ms; a bucket and the start of TCP's window come on top.
        let slow = round_trip(&Hosts::new(2, Link::Mbit(100)), 2_500_000);
        assert!((190..400).contains(&slow.as_millis()), "{slow:?} for 2.5 MB at 100 Mbit/s");
    }
}
