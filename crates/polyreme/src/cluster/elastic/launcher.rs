//! The process that starts the ranks of an elastic run, here or over ssh, and coordinates all of them.
//!
//! One loop: the coordinator's sockets, the children's ends, the user's signals, and faults if they are asked for. A child that a
//! signal has killed is a lost rank, and the others go on; one that ends with an error of its own ends the run, because its
//! successor would meet the same error. Children at the far ends of ssh are started again when they are lost (`restarts`); before the
//! first group is formed a host that cannot be used ends the run.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use polyreme_net::members::{MemberAction, Office, OfficeOptions, OfficeOrder, Reason};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::super::LAUNCHED;
use super::super::crew::{CrewEnd, CrewMember, Lost, say};
use super::super::launch::{LaunchOptions, elastic_member, is_of_host};
use super::super::lifeline::LauncherMessage;
use super::super::pumps::{LastWords, Pump, PumpEvent, SaidErrors};
use super::MEMBER;
use super::chaos::{Chaos, ChaosSpec, Fault};
use super::network::OwnNetwork;
use super::restarts::Restarts;
use super::status::status;
use crate::{output, process};

/// How often children and signals are looked at.
const GLANCE: Duration = Duration::from_millis(5);
/// How long children may take to end when the run is over.
const GRACE: Duration = Duration::from_secs(10);
/// How long ranks that were told to end may take before their ssh is killed.
const LAST_GRACE: Duration = Duration::from_millis(700);
/// The exit code of a rank that was interrupted and has saved.
const INTERRUPTED: i32 = 130;

/// What to start.
pub struct ElasticLaunch {
    /// What its children are.
    pub children: Children,
    /// How many are started.
    pub processes: usize,
    /// The most ranks.
    pub max: usize,
    /// The job's secret, as text.
    pub secret: String,
    /// Faults, if they are wanted.
    pub chaos: Option<ChaosSpec>,
    /// Whether lines are for programs.
    pub json: bool,
}

/// How children are started.
pub enum Children {
    /// As copies of this program on this host.
    Here {
        /// This program.
        program: PathBuf,
        /// Its arguments.
        args: Vec<OsString>,
        /// The network in which they can be cut off, if that is wanted.
        network: Option<OwnNetwork>,
    },
    /// At the far ends of ssh, in slots.
    OverSsh(LaunchOptions),
}

impl Children {
    /// Whether they are on this host.
    pub fn are_here(&self) -> bool {
        matches!(self, Children::Here { .. })
    }

    fn network(&self) -> Option<&OwnNetwork> {
        match self {
            Children::Here { network, .. } => network.as_ref(),
            Children::OverSsh(_) => None,
        }
    }

    /// The process with this number, in a slot.
    fn member(&self, slot: usize, number: u64) -> CrewMember {
        match self {
            Children::Here { program, args, network } => {
                let mut command = match network {
                    Some(network) => network.command(program),
                    None => Command::new(program),
                };
                command.args(args).env(LAUNCHED, "1").env(MEMBER, number.to_string());
                for key in [
                    "RANK",
                    "WORLD_SIZE",
                    "LOCAL_RANK",
                    "LOCAL_WORLD_SIZE",
                    "MASTER_ADDR",
                    "MASTER_PORT",
                    "SSH_CONNECTION",
                ] {
                    command.env_remove(key);
                }
                CrewMember { rank: slot, host: String::new(), command, pause: Duration::ZERO }
            }
            Children::OverSsh(options) => {
                let mut member = elastic_member(options, slot, number);
                // Ctrl-C would end it.
                member.command.process_group(0);
                member
            }
        }
    }
}

struct Running {
    slot: usize,
    host: String,
    child: Child,
    line: Option<ChildStdin>,
    words: Arc<Mutex<LastWords>>,
}

struct Launcher {
    launch: ElasticLaunch,
    office: Office,
    addr: SocketAddr,
    running: BTreeMap<u64, Running>,
    next: u64,
    /// Which are to be started again, if lost ones are.
    restarts: Option<Restarts>,
    n_pumps: usize,
    tell: Sender<PumpEvent>,
    events: Receiver<PumpEvent>,
    said: Arc<SaidErrors>,
    chaos: Option<Chaos>,
    /// The first that failed with an error of its own.
    failed: Option<Lost>,
    /// Why the coordinator gave the run up.
    given_up: Option<String>,
    interrupted: bool,
    /// A child has left as it was asked to.
    left: bool,
    ending: Option<Instant>,
}

/// Starts the children and stays until the run is over.
pub fn run(launch: ElasticLaunch, office: OfficeOptions) -> io::Result<CrewEnd> {
    let (interrupt, hangup) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupt.clone())?;
    }
    // `nohup` ignores it.
    if !process::ignores(SIGHUP) {
        signal_hook::flag::register(SIGHUP, hangup.clone())?;
    }
    let office = Office::open(office)?;
    let addr = office.addr()?;
    let (tell, events) = channel();
    let restarts = (!launch.children.are_here()).then(|| Restarts::new(launch.processes, Instant::now()));
    let mut launcher = Launcher {
        office,
        addr,
        running: BTreeMap::new(),
        next: 0,
        restarts,
        n_pumps: 0,
        tell,
        events,
        said: Arc::default(),
        chaos: None,
        failed: None,
        given_up: None,
        interrupted: false,
        left: false,
        ending: None,
        launch,
    };
    for slot in 0..launcher.launch.processes {
        if let Err(error) = launcher.start(slot) {
            launcher.kill_all();
            return Err(error);
        }
    }
    let mut interrupts = 0;
    while launcher.goes_on() {
        launcher.turn()?;
        let hung_up = hangup.swap(false, Ordering::Relaxed) && interrupts == 0;
        if interrupt.swap(false, Ordering::Relaxed) || hung_up {
            interrupts += 1;
            launcher.interrupted = true;
            match interrupts {
                1 => launcher.tell_all(&LauncherMessage::Stop),
                _ => launcher.kill_all(),
            }
        }
    }
    launcher.drain();
    Ok(launcher.result(interrupts > 1))
}

impl Launcher {
    fn start(&mut self, slot: usize) -> io::Result<()> {
        let number = self.next;
        self.next += 1;
        let CrewMember { host, mut command, pause, .. } = self.launch.children.member(slot, number);
        std::thread::sleep(pause);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            let program = command.get_program().to_string_lossy().into_owned();
            io::Error::new(error.kind(), format!("`{program}` cannot be started: {error}"))
        })?;
        // It waits for its first line.
        let connected =
            self.launch.children.network().map_or(Ok(()), |network| network.connect(number, child.id()));
        if let Err(error) = connected {
            drop(child.kill());
            drop(child.wait());
            return Err(error);
        }
        let words = Arc::new(Mutex::new(LastWords::default()));
        let mut line = child.stdin.take();
        say(&mut line, &LauncherMessage::Secret(self.launch.secret.clone()));
        say(&mut line, &LauncherMessage::Master(self.addr.to_string()));
        // Whichever of them is rank 0 speaks for all, so no line is marked with a rank.
        let pump = Pump { rank: 0, tell: self.tell.clone(), said: self.said.clone(), words: words.clone() };
        if let Some(out) = child.stdout.take() {
            pump.clone().start_out(out)?;
            self.n_pumps += 1;
        }
        if let Some(errors) = child.stderr.take() {
            pump.start_err(errors)?;
            self.n_pumps += 1;
        }
        self.running.insert(number, Running { slot, host, child, line, words });
        Ok(())
    }

    /// Whether there is anything to wait for.
    fn goes_on(&self) -> bool {
        let over = self.office.coordinator().is_over() || self.failed.is_some() || self.interrupted;
        let waits = self.restarts.as_ref().is_some_and(Restarts::any);
        // Members of other hosts go on without children here.
        !self.running.is_empty() || (!over && (waits || !self.office.rows().is_empty()))
    }

    fn turn(&mut self) -> io::Result<()> {
        for order in self.office.turn(Instant::now() + GLANCE)? {
            match order {
                OfficeOrder::Kill { child } => {
                    if let Some(running) = self.running.get_mut(&child) {
                        // It is a child that was not waited for yet, so its pid is still valid.
                        drop(running.child.kill());
                    }
                }
                OfficeOrder::Asked { asker } => {
                    let text = status(&self.office).to_string();
                    self.office.answer(asker, text);
                }
                OfficeOrder::Decided(decision) => self.note(&decision.action, &decision.why),
            }
        }
        while let Ok(event) = self.events.try_recv() {
            self.n_pumps -= usize::from(matches!(event, PumpEvent::Drained));
        }
        self.look();
        self.start_again()?;
        self.strike()?;
        if self.ending.is_some_and(|at| at.elapsed() >= GRACE) {
            self.kill_all();
        }
        Ok(())
    }

    /// Tells the user what ranks cannot tell, because none trains.
    fn note(&mut self, action: &MemberAction, why: &Reason) {
        match action {
            MemberAction::Wait if self.launch.json => {
                output::out().line(&json!({"event": "waiting", "why": why.to_string()}).to_string());
            }
            MemberAction::Wait if self.office.coordinator().generation().0 > 0 => {
                output::err().line(&format!("waiting: {why}"));
            }
            MemberAction::End { finished } => {
                self.ending.get_or_insert_with(Instant::now);
                if !finished {
                    self.given_up = Some(why.to_string());
                }
            }
            MemberAction::Wait
            | MemberAction::Form { .. }
            | MemberAction::Cancel { .. }
            | MemberAction::Change { .. }
            | MemberAction::Remove { .. }
            | MemberAction::Dismiss { .. }
            | MemberAction::Release { .. }
            | MemberAction::Trains => {}
        }
    }

    /// Looks which children have ended.
    fn look(&mut self) {
        let mut ended = Vec::new();
        for (number, running) in &mut self.running {
            if let Ok(Some(status)) = running.child.try_wait() {
                ended.push((*number, status));
            }
        }
        for (number, status) in ended {
            let running = self.running.remove(&number).expect("it was there");
            let is_here = self.launch.children.are_here();
            if is_here {
                self.office.exited(number);
            }
            let (pid, code) = (running.child.id(), status.code());
            // Of a rank that has trained, what its ssh says is that it was lost.
            let begun = self.office.coordinator().generation().0 > 0;
            let lost = code.is_none_or(|code| !is_here && begun && is_of_host(code));
            if status.success() || code == Some(INTERRUPTED) || self.failed.is_some() {
                self.left |= status.success();
                continue;
            }
            let words = running.words.lock().unwrap_or_else(PoisonError::into_inner);
            let last_line = words.last_line.clone();
            match code.filter(|_| !lost) {
                Some(code) => {
                    let (error, host) = (words.error.clone(), running.host.clone());
                    // Members have no ranks of their own; slots are numbered as ranks are.
                    let rank = if is_here { number as usize } else { running.slot };
                    let (how, ended) = (Ok(code), Vec::new());
                    self.failed = Some(Lost { rank, host, pid, how, last_line, error, ended });
                    let why = format!("process {pid} ended with exit code {code}");
                    drop(words);
                    self.office.end(Some(why));
                    self.ending.get_or_insert_with(Instant::now);
                }
                None => {
                    drop(words);
                    let signal = status.signal().unwrap_or(0);
                    if self.ending.is_none() {
                        self.tell_loss(&running, signal, &last_line);
                    }
                }
            }
        }
    }

    /// A child was lost; it is started again if that is wanted.
    fn tell_loss(&mut self, running: &Running, signal: i32, last_line: &str) {
        let (pid, host) = (running.child.id(), &running.host);
        let Some(restarts) = &mut self.restarts else {
            return match self.launch.json {
                true => {
                    output::out().line(&json!({"event": "lost", "pid": pid, "signal": signal}).to_string())
                }
                false => output::err()
                    .line(&format!("process {pid} was killed by signal {signal}; the others go on")),
            };
        };
        let again = restarts.lost(running.slot, Instant::now()).as_secs();
        match self.launch.json {
            true => {
                let line = json!({
                    "event": "lost", "host": host, "slot": running.slot, "why": last_line, "again_s": again,
                });
                output::out().line(&line.to_string());
            }
            false => {
                let why = if last_line.is_empty() { String::new() } else { format!(" ({last_line})") };
                output::err().line(&format!(
                    "host {host}: a rank was lost{why}; the others go on, and it is started again in {again} s"
                ));
            }
        }
    }

    /// Starts what is due to be started again.
    fn start_again(&mut self) -> io::Result<()> {
        let goes_on = self.ending.is_none() && !self.interrupted && self.failed.is_none();
        let Some(restarts) = self.restarts.as_mut().filter(|_| goes_on) else { return Ok(()) };
        for slot in restarts.due(Instant::now()) {
            self.start(slot)?;
        }
        Ok(())
    }

    /// Does what `--chaos` asks for.
    fn strike(&mut self) -> io::Result<()> {
        let Some(spec) = self.launch.chaos.clone().filter(|_| self.ending.is_none() && !self.interrupted)
        else {
            return Ok(());
        };
        let now = Instant::now();
        if self.chaos.is_none() && self.office.coordinator().trains() {
            self.chaos = Some(Chaos::new(spec, now));
        }
        let ranks = self.office.child_ranks();
        let room = self.running.len() < self.launch.max;
        let Some(chaos) = &mut self.chaos else { return Ok(()) };
        for fault in chaos.due(now, &ranks, room) {
            let pid = match fault {
                Fault::Kill(number)
                | Fault::Stop(number, _)
                | Fault::Continue(number)
                | Fault::Cut(number, _)
                | Fault::Mend(number) => {
                    // A child that was not waited for yet: its pid is still its own.
                    let running = self.running.get(&number);
                    let Some(pid) = running.and_then(|r| Pid::from_raw(r.child.id() as i32)) else {
                        continue;
                    };
                    pid
                }
                Fault::Join => {
                    self.start(0)?;
                    continue;
                }
            };
            match fault {
                Fault::Kill(number) => {
                    self.office.struck(number);
                    kill_process(pid, Signal::KILL)?;
                }
                Fault::Stop(..) => kill_process(pid, Signal::STOP)?,
                Fault::Continue(_) => kill_process(pid, Signal::CONT)?,
                Fault::Cut(number, _) | Fault::Mend(number) => {
                    if let Some(network) = self.launch.children.network() {
                        network.set_link(number, matches!(fault, Fault::Mend(_)))?;
                    }
                }
                Fault::Join => {}
            }
            self.tell_fault(fault, pid);
        }
        Ok(())
    }

    /// A line for programs that judge what a run made of it.
    fn tell_fault(&self, fault: Fault, pid: Pid) {
        let (what, lasts) = match fault {
            Fault::Kill(_) => ("kill", None),
            Fault::Stop(_, lasts) => ("stop", Some(lasts)),
            Fault::Cut(_, lasts) => ("cut", Some(lasts)),
            Fault::Continue(_) => ("continue", None),
            Fault::Mend(_) => ("mend", None),
            Fault::Join => return,
        };
        if self.launch.json {
            let lasts = lasts.map(|lasts| lasts.as_secs_f64());
            let pid = pid.as_raw_nonzero().get();
            let line = json!({"event": "fault", "fault": what, "pid": pid, "lasts_s": lasts});
            output::out().line(&line.to_string());
        }
    }

    fn tell_all(&mut self, message: &LauncherMessage) {
        self.running.values_mut().for_each(|running| say(&mut running.line, message));
    }

    fn kill_all(&mut self) {
        if !self.launch.children.are_here() {
            // To kill an ssh does not end its rank at once.
            self.tell_all(&LauncherMessage::End);
            let until = Instant::now() + LAST_GRACE;
            while self.running.values_mut().any(|running| matches!(running.child.try_wait(), Ok(None)))
                && Instant::now() < until
            {
                std::thread::sleep(GLANCE);
            }
        }
        for running in self.running.values_mut() {
            drop(running.child.kill());
        }
    }

    /// Waits a moment for the rest of the output.
    fn drain(&mut self) {
        let until = Instant::now() + Duration::from_millis(700);
        while self.n_pumps > 0 {
            match self.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(PumpEvent::Drained) => self.n_pumps -= 1,
                Ok(PumpEvent::Listening(_)) => {}
                Err(_) => return,
            }
        }
    }

    fn result(self, at_once: bool) -> CrewEnd {
        if let Some(lost) = self.failed {
            return CrewEnd::Lost(lost);
        }
        if self.interrupted {
            return CrewEnd::Interrupted { saved: !at_once };
        }
        let finished = self.office.coordinator().is_over() && self.given_up.is_none();
        if finished {
            return CrewEnd::Done;
        }
        // All ranks were asked to leave: the last ones have saved.
        if self.left && self.given_up.is_none() {
            return CrewEnd::Interrupted { saved: true };
        }
        let why = self
            .given_up
            .unwrap_or_else(|| "no rank is left; `polyreme resume` goes on from the last checkpoint".into());
        let (rank, host, pid, last_line, ended) = (0, String::new(), 0, String::new(), Vec::new());
        CrewEnd::Lost(Lost { rank, host, pid, how: Ok(1), last_line, error: Some(why), ended })
    }
}
