//! A network in which links can be cut: for `--chaos cut=...`, and nothing else.
//!
//! The launcher starts itself again in a network namespace of its own, with a bridge. Each rank it starts has a namespace too, with one
//! link to that bridge. Cutting a rank off takes the bridge's end of its link down: packets are lost, and no connection is closed, as when a cable is
//! pulled. Nothing of it is visible from outside, and all of it is gone when the processes are.
//!
//! The system's own programs do it: `unshare` and `nsenter` of util-linux, `ip` of iproute2. A user who is not root gets a user namespace,
//! where the system allows that.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Set in a launcher that has a network of its own.
const OWN: &str = "POLYREME_OWN_NETWORK";
/// The bridge.
const BRIDGE: &str = "polyreme0";
/// Addresses are 10.73.0.1 for the launcher, and from 10.73.1.0 on for ranks.
const NETWORK: [u8; 2] = [10, 73];
/// A child that is started in a namespace is there after milliseconds.
const ENTERS: Duration = Duration::from_secs(5);

/// The launcher's network.
pub struct OwnNetwork(());

impl OwnNetwork {
    /// The network of this process, if it was started again in one of its own; otherwise starts it again there, which returns only on
    /// an error.
    pub fn enter() -> io::Result<OwnNetwork> {
        if std::env::var_os(OWN).is_some() {
            return OwnNetwork::build();
        }
        let mut command = Command::new("unshare");
        command.arg("--net");
        if !rustix::process::geteuid().is_root() {
            command.arg("--map-root-user");
        }
        command.arg("--").arg(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(OWN, "1");
        Err(command.exec())
    }

    fn build() -> io::Result<OwnNetwork> {
        ip(&["link", "set", "lo", "up"])?;
        ip(&["link", "add", "name", BRIDGE, "type", "bridge"])?;
        let network = OwnNetwork(());
        ip(&["address", "add", &format!("{}/16", network.address()), "dev", BRIDGE])?;
        ip(&["link", "set", BRIDGE, "up"])?;
        Ok(network)
    }

    /// The launcher's address.
    pub fn address(&self) -> IpAddr {
        Ipv4Addr::new(NETWORK[0], NETWORK[1], 0, 1).into()
    }

    /// The command that starts a program in a namespace of its own.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--net", "--"]).arg(program).env_remove(OWN);
        command
    }

    /// Gives a child that was started so its link.
    pub fn connect(&self, number: u64, pid: u32) -> io::Result<()> {
        let own = namespace("self")?;
        let until = Instant::now() + ENTERS;
        while namespace(&pid.to_string())? == own {
            if Instant::now() >= until {
                return Err(io::Error::other(format!("process {pid} does not enter a network of its own")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let (link, pid) = (link(number), pid.to_string());
        ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
        ip(&["link", "set", &link, "master", BRIDGE, "up"])?;
        let [high, low] = ((number % 0xfe00) as u16 + 0x100).to_be_bytes();
        let address = format!("{}/16", Ipv4Addr::new(NETWORK[0], NETWORK[1], high, low));
        for of in [
            &["address", "add", &address, "dev", "eth0"][..],
            &["link", "set", "eth0", "up"],
            &["link", "set", "lo", "up"],
        ] {
            run("nsenter", &[&["--target", &pid, "--net", "ip"], of].concat())?;
        }
        Ok(())
    }

    /// Cuts a child off, or connects it again.
    pub fn set_link(&self, number: u64, up: bool) -> io::Result<()> {
        ip(&["link", "set", &link(number), if up { "up" } else { "down" }])
    }
}

/// The launcher's end of a child's link.
fn link(number: u64) -> String {
    format!("rank{number}")
}

fn namespace(process: &str) -> io::Result<std::path::PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/net"))
}

fn ip(args: &[&str]) -> io::Result<()> {
    run("ip", args)
}

fn run(program: &str, args: &[&str]) -> io::Result<()> {
    let why = |what: String| {
        let hint = "`--chaos cut` needs `ip`, `unshare` and `nsenter`, and root or user namespaces";
        io::Error::other(format!("{program} {}: {what}; {hint}", args.join(" ")))
    };
    let out = Command::new(program).args(args).output().map_err(|e| why(e.to_string()))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(why(String::from_utf8_lossy(&out.stderr).trim().to_string())),
    }
}
