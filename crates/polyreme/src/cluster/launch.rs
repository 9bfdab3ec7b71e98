//! `polyreme launch --hosts a,b,c:4 JOB.toml`: a rank for each slot of each host, started over ssh.
//!
//! Each rank has its own ssh, whose standard input is its lifeline: the job's secret goes through it and is on no
//! command line. When an ssh ends, so does its rank; when the launcher ends, all lifelines do.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::crew::{CrewMember, Lost};
use super::elastic::MEMBER;
use super::spawn::place;
use super::{INTERFACE, LAUNCHED, RANKS_MAX};

/// How many connections an sshd accepts at once before login; a host's other ones are started later.
const AT_ONCE: usize = 8;
const APART: Duration = Duration::from_millis(150);

/// Exit codes of the script that runs on the host. ssh itself ends with 255, a shell with 126 and 127.
const NO_FOLDER: i32 = 92;
const NO_BINARY: i32 = 93;
const UNREACHED: i32 = 255;

/// A host and how many ranks it runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Its name, as ssh takes it.
    pub name: String,
    /// How many ranks.
    pub slots: usize,
}

/// A list of hosts that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadHosts {
    entry: String,
    why: &'static str,
}

impl fmt::Display for BadHosts {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "--hosts: {:?} {}; write names, with the number of ranks if it is not one: a,b,c:4",
            self.entry, self.why
        )
    }
}

impl std::error::Error for BadHosts {}

/// Reads `a,b,c:4`; IPv6 addresses are in brackets if a number follows.
pub fn parse_hosts(text: &str) -> Result<Vec<Host>, BadHosts> {
    let mut hosts: Vec<Host> = Vec::new();
    let mut total: usize = 0;
    for entry in text.split(',').map(str::trim) {
        let bad = |why| BadHosts { entry: entry.into(), why };
        let (name, slots) = match entry.rsplit_once(':') {
            Some((name, slots)) if !name.contains(':') || name.ends_with(']') => (name, slots),
            _ => (entry, "1"),
        };
        let slots: usize = slots.parse().map_err(|_| bad("has no number after the colon"))?;
        let name = name.trim_start_matches('[').trim_end_matches(']');
        // A name that starts with a dash would be an option of ssh.
        if name.is_empty() || name.starts_with('-') || name.contains(char::is_whitespace) {
            return Err(bad("is not a host"));
        }
        total = total.saturating_add(slots);
        if slots == 0 || total > RANKS_MAX {
            return Err(bad("asks for no rank, or for too many"));
        }
        match hosts.iter_mut().find(|h| h.name == name) {
            Some(known) => known.slots += slots,
            None => hosts.push(Host { name: name.into(), slots }),
        }
    }
    Ok(hosts)
}

/// What is started, and where.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The hosts, in the order of their ranks.
    pub hosts: Vec<Host>,
    /// The command that reaches a host, with its options.
    pub ssh: String,
    /// The name to log in with.
    pub user: Option<String>,
    /// The program on the hosts; `None` is the same path as here, or else `polyreme` in the host's `PATH`.
    pub binary: Option<PathBuf>,
    /// This program.
    pub program: PathBuf,
    /// The folder to work in, on every host.
    pub dir: PathBuf,
    /// The network that ranks use.
    pub interface: Option<String>,
    /// The arguments of each rank: `train JOB.toml ...`.
    pub args: Vec<String>,
}

impl LaunchOptions {
    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.hosts.iter().map(|h| h.slots).sum()
    }

    /// The host of a rank, and which slot of that host it has.
    fn slot(&self, rank: usize) -> (&Host, usize) {
        let mut slot = rank;
        for host in &self.hosts {
            if slot < host.slots {
                return (host, slot);
            }
            slot -= host.slots;
        }
        unreachable!("there are {} ranks", self.size())
    }

    /// The ssh that runs what is in a slot, with these variables.
    fn member(&self, rank: usize, vars: Vec<(&'static str, String)>) -> CrewMember {
        let (host, slot) = self.slot(rank);
        let mut words = self.ssh.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or("ssh"));
        command.args(words);
        command.args(["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]);
        // A host that vanishes is noticed even without traffic.
        command.args(["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"]);
        if let Some(user) = &self.user {
            command.args(["-l", user]);
        }
        command.args([&host.name, &script(self, vars)]);
        let pause = if slot < AT_ONCE { Duration::ZERO } else { APART };
        CrewMember { rank, host: host.name.clone(), command, pause }
    }
}

/// One ssh per rank.
pub fn members(options: &LaunchOptions) -> Vec<CrewMember> {
    let size = options.size();
    let of = |rank: usize| {
        let (host, slot) = options.slot(rank);
        options.member(rank, place(rank, size, slot, host.slots))
    };
    (0..size).map(of).collect()
}

/// The ssh of a member of an elastic run: a process with a number of its own, in one of the slots.
pub fn elastic_member(options: &LaunchOptions, slot: usize, number: u64) -> CrewMember {
    let (host, here) = options.slot(slot);
    let vars = [
        (LAUNCHED, "1".into()),
        (MEMBER, number.to_string()),
        ("LOCAL_RANK", here.to_string()),
        ("LOCAL_WORLD_SIZE", host.slots.to_string()),
    ];
    options.member(slot, vars.into())
}

/// Whether an exit code says that a process at the far end could not be started or reached, or that a signal ended it, rather than that it
/// failed by itself.
pub fn is_of_host(code: i32) -> bool {
    matches!(code, UNREACHED | NO_FOLDER | NO_BINARY | 126 | 127)
}

/// What went wrong with a rank, and what to do about it.
pub fn explain(lost: &Lost, options: &LaunchOptions) -> String {
    let host = &lost.host;
    let ssh = &options.ssh;
    match lost.how {
        Ok(UNREACHED) => format!(
            "host {host} (rank {}) cannot be reached, or the connection to it broke: {}; make `{ssh} -o BatchMode=yes {host} true` work without a prompt",
            lost.rank,
            if lost.last_line.is_empty() { "ssh did not say why" } else { &lost.last_line }
        ),
        Ok(NO_FOLDER) => format!(
            "host {host} (rank {}) has no folder {}; create it there with the job file and the data, or choose another one with --dir",
            lost.rank,
            options.dir.display()
        ),
        Ok(NO_BINARY | 126 | 127) => format!(
            "host {host} (rank {}) has no executable {}; copy it there, or set its path with --binary",
            lost.rank,
            options.binary.as_deref().unwrap_or(&options.program).display()
        ),
        _ => lost.to_string(),
    }
}

/// What the host's shell runs: the folder, the program, its environment, its arguments.
fn script(options: &LaunchOptions, vars: Vec<(&'static str, String)>) -> String {
    let mut env: Vec<String> = vars.into_iter().map(|(k, v)| format!("{k}={}", quote(&v))).collect();
    env.extend(interface(options).map(|i| format!("{INTERFACE}={}", quote(&i))));
    let find = match &options.binary {
        Some(path) => format!("p={}; command -v \"$p\" >/dev/null || exit {NO_BINARY}", quote_path(path)),
        None => format!(
            "p={}; [ -x \"$p\" ] || p=$(command -v polyreme) || exit {NO_BINARY}",
            quote_path(&options.program)
        ),
    };
    let args: Vec<_> = options.args.iter().map(|a| quote(a)).collect();
    let dir = quote_path(&options.dir);
    let inner = format!(
        "cd {dir} 2>/dev/null || exit {NO_FOLDER}; {find}; exec env {} \"$p\" {}",
        env.join(" "),
        args.join(" ")
    );
    // sh reads this, whatever the login shell is.
    format!("exec sh -c {}", quote(&inner))
}

/// The network that ranks use: as asked, or the loopback if there is no other host.
pub fn interface(options: &LaunchOptions) -> Option<String> {
    let is_loopback = |h: &Host| {
        let name = h.name.rsplit_once('@').map_or(h.name.as_str(), |(_, name)| name);
        name == "localhost" || name.parse().is_ok_and(|a: std::net::IpAddr| a.is_loopback())
    };
    let all_here = options.hosts.iter().all(is_loopback);
    options.interface.clone().or_else(|| all_here.then(|| "127.0.0.0/8".into()))
}

fn quote_path(path: &Path) -> String {
    quote(&path.to_string_lossy())
}

/// A word quoted for a shell.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read_or_refused() {
        let host = |name: &str, slots| Host { name: name.into(), slots };
        let rows = [
            ("a", vec![host("a", 1)]),
            ("a,b,c:4", vec![host("a", 1), host("b", 1), host("c", 4)]),
            ("me@a:2, 10.0.0.2", vec![host("me@a", 2), host("10.0.0.2", 1)]),
            ("[::1]:3,fe80::1", vec![host("::1", 3), host("fe80::1", 1)]),
            ("a,a:2", vec![host("a", 3)]),
        ];
        for (text, want) in rows {
            assert_eq!(parse_hosts(text).unwrap(), want, "{text}");
        }
        for bad in ["", "a,,b", "a:0", "a:x", "a:99999", "-oProxyCommand=x", "a b", ":3"] {
            assert!(parse_hosts(bad).unwrap_err().to_string().contains("--hosts"), "{bad}");
        }
    }

    fn options() -> LaunchOptions {
        LaunchOptions {
            hosts: parse_hosts("a,b:2").unwrap(),
            ssh: "ssh -p 2222".into(),
            user: Some("me".into()),
            binary: None,
            program: "/opt/poly reme/polyreme".into(),
            dir: "/data/it's".into(),
            interface: Some("10.0.0.0/8".into()),
            args: ["train", "job.toml", "--set", "train.batch=64"].map(String::from).to_vec(),
        }
    }

    #[test]
    fn each_slot_has_its_ssh_without_the_secret() {
        let members = members(&options());
        let places: Vec<_> = members.iter().map(|m| (m.rank, m.host.as_str())).collect();
        assert_eq!(places, [(0, "a"), (1, "b"), (2, "b")]);
        let args: Vec<_> = members[2].command.get_args().map(|a| a.to_str().unwrap()).collect();
        assert_eq!(&args[..4], ["-p", "2222", "-T", "-o"]);
        assert!(args.contains(&"BatchMode=yes") && args.contains(&"me"));
        let script = args.last().unwrap();
        for part in
            ["RANK=2", "WORLD_SIZE=3", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "POLYREME_INTERFACE=10.0.0.0/8"]
        {
            assert!(script.contains(part), "{part}: {script}");
        }
        assert!(!script.to_lowercase().contains("secret"));
    }

    #[test]
    fn a_member_of_an_elastic_run_has_a_number_and_no_rank() {
        let member = elastic_member(&options(), 2, 17);
        assert_eq!((member.rank, member.host.as_str()), (2, "b"));
        let script = member.command.get_args().last().unwrap().to_str().unwrap();
        for part in ["POLYREME_MEMBER=17", "POLYREME_LAUNCHED=1", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"] {
            assert!(script.contains(part), "{part}: {script}");
        }
        assert!(!script.contains(" RANK=") && !script.contains(" WORLD_SIZE="), "{script}");
        assert!([255, NO_FOLDER, NO_BINARY, 127].into_iter().all(is_of_host));
        assert!(![0, 1, 2, 130].into_iter().any(is_of_host));
    }

    #[test]
    fn a_shell_reads_the_script_back() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("it's here");
        std::fs::create_dir(&dir).unwrap();
        let args = ["-c", "echo $PWD/$RANK \"$0\" \"$1\"", "a b", "c'd$HOME"].map(String::from).to_vec();
        let with = |dir: &Path, binary: &str| LaunchOptions {
            binary: Some(binary.into()),
            dir: dir.into(),
            args: args.clone(),
            ..options()
        };
        let run = |options: &LaunchOptions| {
            Command::new("sh").args(["-c", &script(options, place(1, 3, 0, 2))]).output().unwrap()
        };
        let out = run(&with(&dir, "sh"));
        let said = String::from_utf8(out.stdout).unwrap();
        assert_eq!(said, format!("{}/1 a b c'd$HOME\n", dir.display()));
        assert_eq!(run(&with(&dir.join("no"), "sh")).status.code(), Some(NO_FOLDER));
        assert_eq!(run(&with(&dir, "/no/such/program")).status.code(), Some(NO_BINARY));
    }

    #[test]
    fn what_failed_is_named_with_what_to_do() {
        let lost = |code| Lost {
            rank: 1,
            host: "b".into(),
            pid: 1,
            how: Ok(code),
            last_line: "Connection refused".into(),
            error: None,
            ended: vec![],
        };
        for (code, parts) in [
            (255, ["host b", "Connection refused", "ssh -p 2222 -o BatchMode=yes b true"]),
            (NO_FOLDER, ["host b", "/data/it's", "--dir"]),
            (NO_BINARY, ["host b", "/opt/poly reme/polyreme", "--binary"]),
            (1, ["rank 1 on b", "exit code 1", "above"]),
        ] {
            let said = explain(&lost(code), &options());
            assert!(parts.iter().all(|p| said.contains(p)), "{said}");
        }
    }

    #[test]
    fn ranks_of_this_host_alone_stay_on_the_loopback() {
        let with = |hosts: &str, asked: Option<&str>| {
            interface(&LaunchOptions {
                hosts: parse_hosts(hosts).unwrap(),
                interface: asked.map(String::from),
                ..options()
            })
        };
        assert_eq!(with("localhost:4,me@127.0.0.2", None).as_deref(), Some("127.0.0.0/8"));
        assert_eq!(with("localhost,b", None), None);
        assert_eq!(with("localhost,b", Some("eth0")).as_deref(), Some("eth0"));
    }
}
