//! `polyreme launch` against a real sshd that the test starts on the loopback, with its own keys and port.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::binary::{cannot_run, command, folder};
use crate::elastic::{LIMIT, Watched, equals_an_undisturbed_run, is_generation, pids as placed_pids};
use crate::ranks::{JOB, end, endless, living, pids, send, start, wait_for_step};

const SSHD: &str = "/usr/sbin/sshd";

/// A server that lets this user in with a key, as two hosts: 127.0.0.1 and 127.0.0.2.
struct Server {
    /// Keys and settings, which go away with it.
    _folder: TempDir,
    sshd: Child,
    /// The command that reaches it.
    ssh: String,
}

impl Server {
    /// `None` where there is no sshd and need not be one.
    fn start() -> Option<Server> {
        if !Path::new(SSHD).exists() {
            cannot_run(&format!("there is no {SSHD}; `apt-get install openssh-server` brings it"));
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host", "user"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f", &path(key)])
                .stdin(Stdio::null())
                .status();
            assert!(made.unwrap().success());
        }
        // An sshd of root wants this folder to exist.
        drop(fs::create_dir_all("/run/sshd"));
        // No other process is likely to take the port meanwhile; if one does, the next port is tried.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let config = format!(
                "Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {}\nAuthorizedKeysFile {}\n\
                 StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
                 PermitRootLogin prohibit-password\nPidFile none\nMaxStartups 100\n",
                path("host"),
                path("user.pub")
            );
            fs::write(path("config"), config).unwrap();
            let mut sshd =
                Command::new(SSHD).args(["-D", "-f", &path("config"), "-E", &path("log")]).spawn().unwrap();
            let until = Instant::now() + Duration::from_secs(10);
            while sshd.try_wait().unwrap().is_none() && Instant::now() < until {
                if TcpStream::connect(("127.0.0.2", port)).is_ok() {
                    let ssh = format!(
                        "ssh -F /dev/null -p {port} -i {} -o IdentitiesOnly=yes -o UserKnownHostsFile=/dev/null -o \
                         StrictHostKeyChecking=no -o LogLevel=ERROR",
                        path("user")
                    );
                    return Some(Server { _folder: folder, sshd, ssh });
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            drop(sshd.kill());
            sshd.wait().unwrap();
        }
        panic!("sshd did not start: {}", fs::read_to_string(path("log")).unwrap_or_default());
    }

    fn launch(&self, folder: &Path, hosts: &str, more: &[&str]) -> Command {
        let args = [&["launch", "--hosts", hosts, "--ssh", &self.ssh][..], more].concat();
        command(folder, &args)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.sshd.kill());
        drop(self.sshd.wait());
    }
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn hosts_over_ssh_train_one_job() {
    let Some(server) = Server::start() else { return };
    let folder = folder(JOB);
    // All hosts are this one, so memory is what they would take; sockets are what hosts take.
    for (name, transport) in [("memory", None), ("sockets", Some("tcp"))] {
        let mut more = vec!["job.toml", "--output", name];
        more.extend(transport.map(|_| "--transport"));
        more.extend(transport);
        let out = server.launch(folder.path(), "127.0.0.1:2,127.0.0.2", &more).output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        let table = said(&out);
        let rows = table.lines().filter(|l| l.trim_end().ends_with(transport.unwrap_or("shm"))).count();
        assert_eq!(rows, 3, "{table}");
        assert!(String::from_utf8(out.stdout).unwrap().contains("done: 48 steps"));
        assert!(folder.path().join(name).join("model.safetensors").exists());
    }
}

#[test]
fn a_host_that_does_not_work_is_named_with_what_to_do() {
    let Some(server) = Server::start() else { return };
    let folder = folder(JOB);
    let began = Instant::now();
    for (hosts, more, parts) in [
        (
            "127.0.0.1,127.0.0.3",
            &["job.toml"][..],
            &["host 127.0.0.3", "cannot be reached", "BatchMode=yes"][..],
        ),
        ("127.0.0.1", &["--binary", "/no/such/polyreme", "job.toml"], &["/no/such/polyreme", "--binary"]),
        (
            "127.0.0.2",
            &["--dir", "/no/such/folder", "job.toml"],
            &["host 127.0.0.2", "/no/such/folder", "--dir"],
        ),
        ("127.0.0.1", &["missing.toml"], &["missing.toml"]),
        ("127.0.0.1:2", &["job.toml", "--ranks", "3"], &["--hosts"]),
        ("127.0.0.1:0", &["job.toml"], &["--hosts"]),
        ("127.0.0.1", &["job.toml", "--rank", "3"], &["--rank"]),
    ] {
        let out = server.launch(folder.path(), hosts, more).output().unwrap();
        let said = said(&out);
        assert!(!out.status.success(), "{hosts} {more:?}");
        assert!(parts.iter().all(|p| said.contains(p)), "{hosts} {more:?}: {said}");
    }
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn ctrl_c_reaches_every_host_and_no_secret_is_seen() {
    let Some(server) = Server::start() else { return };
    let folder = folder(&endless());
    let (run, errors) = (folder.path().join("run"), folder.path().join("errors"));
    let until = Instant::now() + Duration::from_secs(60);
    let launcher =
        start(server.launch(folder.path(), "127.0.0.1,127.0.0.2", &["job.toml", "--output", "run"]), &errors);
    let pids = pids(&errors, 2, until);
    wait_for_step(&run, 25, until);
    for pid in pids.iter().chain([&(launcher.id() as i32)]) {
        for file in ["cmdline", "environ"] {
            let text = fs::read(format!("/proc/{pid}/{file}")).unwrap();
            let hex = text.split(|b| !b.is_ascii_hexdigit()).any(|word| word.len() >= 64);
            assert!(!hex, "{file} of {pid}: {}", String::from_utf8_lossy(&text));
        }
    }
    send(launcher.id() as i32, Signal::INT);
    let out = end(launcher, Duration::from_secs(30));
    assert_eq!(out.status.code(), Some(130), "{}", fs::read_to_string(&errors).unwrap());
    assert!(String::from_utf8(out.stdout).unwrap().contains("steps are saved"));
    assert_eq!(living(&pids), [0; 0]);
}

#[test]
fn a_host_that_dies_ends_the_others_and_a_launcher_that_dies_too() {
    let Some(server) = Server::start() else { return };
    let folder = folder(&endless());
    for (name, kills_launcher) in [("rank", false), ("launcher", true)] {
        let (run, errors) = (folder.path().join(name), folder.path().join(format!("errors_{name}")));
        let until = Instant::now() + Duration::from_secs(60);
        let args = ["job.toml", "--output", name, "--transport", "tcp"];
        let launcher = start(server.launch(folder.path(), "127.0.0.1,127.0.0.2:2", &args), &errors);
        let pids = pids(&errors, 3, until);
        wait_for_step(&run, 25, until);
        send(if kills_launcher { launcher.id() as i32 } else { pids[1] }, Signal::KILL);
        let killed = Instant::now();
        let out = end(launcher, Duration::from_secs(30));
        assert!(!out.status.success());
        if !kills_launcher {
            assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
            let said = fs::read_to_string(&errors).unwrap();
            assert!(
                said.contains("rank 1") && said.contains("is gone") && said.contains("at step"),
                "{said}"
            );
        }
        let gone = Instant::now() + Duration::from_secs(25);
        while !living(&pids).is_empty() {
            assert!(Instant::now() < gone, "{name}: {:?} live on", living(&pids));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// An ssh that this launcher has for a member of an elastic run.
fn ssh_of(launcher: i32) -> i32 {
    let is = |pid: &i32| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        // Behind the name in brackets: the state, and the parent.
        let stat = read("stat");
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        parent == Some(&launcher.to_string()) && read("cmdline").contains("POLYREME_MEMBER=")
    };
    let all =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    all.into_iter().find(is).expect("the launcher has an ssh for each member")
}

/// A rank that is killed is started again over ssh and enters the run that went on without it; so is one whose ssh is lost, which
/// leaves by itself. No bit changes. When the launcher is killed, the ranks save and stop.
#[test]
fn lost_ranks_of_an_elastic_launch_are_started_again() {
    let Some(server) = Server::start() else { return };
    let folder = folder(&crate::elastic::endless());
    let more = ["--elastic", "job.toml", "--json", "--output", "run"];
    let mut run = Watched::start(server.launch(folder.path(), "127.0.0.1:2,127.0.0.2", &more));
    let pids = placed_pids(&run.until(|line| line["event"] == "placed"));
    assert_eq!(pids.len(), 3);
    run.until(|line| line["event"] == "checkpoint");
    send(pids[1], Signal::KILL);
    let lost = run.until(|line| line["event"] == "lost");
    assert!(lost["host"].as_str().unwrap().starts_with("127.0.0.") && lost["again_s"] == 1, "{lost}");
    let back = run.until(|line| is_generation(line, 3) && line["ranks"] == 3);
    assert_eq!(back["why"], "a rank joins");
    // A rank that loses its launcher leaves, and is no loss.
    send(ssh_of(run.child.id() as i32), Signal::KILL);
    run.until(|line| line["event"] == "lost");
    let fourth = run.until(|line| is_generation(line, 4));
    assert!(fourth["why"].as_str().unwrap().ends_with("leaves"), "{fourth}");
    run.until(|line| is_generation(line, 5) && line["ranks"] == 3);
    run.until(|line| line["event"] == "checkpoint");
    let summary = run.interrupt();
    assert_eq!((&summary["ranks_lost"], &summary["ranks_joined"]), (&1.into(), &2.into()), "{summary}");
    equals_an_undisturbed_run(folder.path(), &summary);

    let more = ["--elastic", "job.toml", "--json", "--output", "again"];
    let launch = server.launch(folder.path(), "127.0.0.1,127.0.0.2", &more);
    let mut run = Watched::start(launch);
    let pids = placed_pids(&run.until(|line| line["event"] == "placed"));
    run.until(|line| line["event"] == "checkpoint");
    let before = crate::ranks::steps_in(&folder.path().join("again"));
    send(run.child.id() as i32, Signal::KILL);
    let until = Instant::now() + LIMIT;
    while !living(&pids).is_empty() {
        assert!(Instant::now() < until, "{:?} live on", living(&pids));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(crate::ranks::steps_in(&folder.path().join("again")) > before, "they saved");
}

#[test]
fn what_an_elastic_launch_cannot_do_is_refused_before_any_login() {
    let folder = folder(&crate::elastic::endless());
    for (hosts, more, part) in [
        ("a,b:16", &["--interface", "127.0.0.1", "--elastic", "job.toml"][..], "`parallel.elastic.max` is 8"),
        ("a,b", &["--elastic", "--interface", "10.255.255.1", "missing.toml"], "missing.toml"),
        ("a,b", &["--elastic", "resume", "run"], "polyreme coordinator"),
        ("a,b", &["--elastic", "job.toml", "--chaos", "kill=1s"], "train --elastic"),
        ("a,b", &["job.toml", "--elastic", "--trace", "t.json"], "--trace"),
    ] {
        let args = [&["launch", "--hosts", hosts, "--ssh", "false"][..], more].concat();
        let out = command(folder.path(), &args).output().unwrap();
        let said = said(&out).replace('\n', " ");
        assert!(out.status.code() == Some(2) && said.contains(part), "{more:?}: {said}");
    }
}
