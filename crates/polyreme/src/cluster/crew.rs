//! Processes that are started together, watched together and ended together: the ranks of a job, as copies of this
//! program or at the far ends of ssh.
//!
//! What the launcher does for them:
//! - Rank 0's output is passed on unchanged; the others' lines are prefixed with their rank. No rank waits for the
//!   reader (see [`crate::output`]). An error that a rank reports as JSON is kept for the launcher's own report.
//! - Rank 0 says where it listens, and the others are told.
//! - Ctrl-C, SIGTERM and a hangup of the terminal become one `stop` for all: they finish the step, save, and end. A
//!   second Ctrl-C or SIGTERM ends them at once.
//! - Ranks of this host are in the launcher's process group: Ctrl-Z stops and `fg` continues all of them together.
//!   Ctrl-C reaches them too, and means no more to them than the launcher's `stop`. An ssh has its own group, because
//!   Ctrl-C would end it.
//! - When one dies, the others have [`GRACE`] to notice and report it; then they are ended.
//! - When this process dies, their lifelines break, and they stop by themselves.

use std::fmt;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::lifeline::LauncherMessage;
use super::pumps::{LastWords, Pump, PumpEvent, SaidErrors};
use crate::process;

/// How long the others may take to stop when one has died. They see it at once, but one may be in a long computation,
/// or hang; with the last grace all have ended within 5 seconds.
pub const GRACE: Duration = Duration::from_secs(4);
/// How long one that was told to end may take before it is killed.
const LAST_GRACE: Duration = Duration::from_millis(700);
/// How often children and signals are polled.
const GLANCE: Duration = Duration::from_millis(10);
/// The exit code of a rank that was interrupted and has saved.
const INTERRUPTED: i32 = 130;
/// The exit code of a rank that refuses its job: it does not fit, or something in it is wrong.
const REFUSED: i32 = 2;

/// A process to be started.
pub struct CrewMember {
    /// Its rank.
    pub rank: usize,
    /// Its host; empty for this one.
    pub host: String,
    /// How it is started. Streams are set by the crew.
    pub command: Command,
    /// How long to wait before that.
    pub pause: Duration,
}

/// How a crew ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CrewEnd {
    /// Every rank is done.
    Done,
    /// The user asked them to stop.
    Interrupted {
        /// Whether they have saved: not when the user asked twice, or before they trained.
        saved: bool,
    },
    /// One failed; it was the first.
    Lost(Lost),
}

/// The rank that failed first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lost {
    /// Its rank.
    pub rank: usize,
    /// Its host; empty for this one.
    pub host: String,
    /// Its process: that of ssh if it is on another host.
    pub pid: u32,
    /// Its exit code, or the signal that killed it.
    pub how: Result<i32, i32>,
    /// The last line of its standard error, if that went through this process.
    pub last_line: String,
    /// The error that it reported as JSON.
    pub error: Option<String>,
    /// Others that had to be ended because they did not stop by themselves.
    pub ended: Vec<usize>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        match self.host.as_str() {
            "" => write!(f, " (process {})", self.pid)?,
            host => write!(f, " on {host}")?,
        }
        match self.how {
            Ok(code) => {
                write!(f, " ended with exit code {code}")?;
                match &self.error {
                    Some(error) => write!(f, ": {error}")?,
                    None => write!(f, "; its own error is above")?,
                }
            }
            Err(signal) => write!(f, " was killed by signal {signal}")?,
        }
        if !self.ended.is_empty() {
            let list: Vec<_> = self.ended.iter().map(usize::to_string).collect();
            write!(f, "; ranks that did not stop by themselves were ended: {}", list.join(", "))?;
        }
        Ok(())
    }
}

struct Running {
    rank: usize,
    host: String,
    child: Child,
    line: Option<ChildStdin>,
    status: Option<ExitStatus>,
    /// Whether it had to be killed.
    killed: bool,
    words: Arc<Mutex<LastWords>>,
}

/// Starts all members, in the order of their ranks, and stays until the last one has ended.
///
/// With `through`, rank 0 writes to this process's standard error itself, so that it can draw on a terminal.
pub fn run(members: Vec<CrewMember>, secret: &str, through: bool) -> io::Result<CrewEnd> {
    let (interrupt, hangup) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupt.clone())?;
    }
    // `nohup` ignores it.
    if !process::ignores(SIGHUP) {
        signal_hook::flag::register(SIGHUP, hangup.clone())?;
    }
    let (tell, events) = mpsc::channel();
    let mut crew =
        Crew { running: Vec::new(), events, n_pumps: 0, interrupt, hangup, interrupts: 0, first: None };
    let said = Arc::new(SaidErrors::default());
    for member in members {
        if let Err(error) = crew.start(member, secret, through, &tell, &said) {
            crew.end_all();
            return Err(error);
        }
    }
    drop(tell);
    let ended = crew.watch();
    crew.drain();
    Ok(crew.result(ended))
}

struct Crew {
    running: Vec<Running>,
    events: Receiver<PumpEvent>,
    n_pumps: usize,
    interrupt: Arc<AtomicBool>,
    /// The terminal has hung up; the system and the shell both signal it.
    hangup: Arc<AtomicBool>,
    interrupts: usize,
    /// The rank that failed first, and when that was seen.
    first: Option<(usize, Instant)>,
}

impl Crew {
    fn start(
        &mut self,
        member: CrewMember,
        secret: &str,
        through: bool,
        tell: &Sender<PumpEvent>,
        said: &Arc<SaidErrors>,
    ) -> io::Result<()> {
        let CrewMember { rank, host, mut command, pause } = member;
        std::thread::sleep(pause);
        let own_errors = rank == 0 && through;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(if own_errors { Stdio::inherit() } else { Stdio::piped() });
        if !host.is_empty() {
            command.process_group(0);
        }
        let mut child = command.spawn().map_err(|error| {
            let program = command.get_program().to_string_lossy().into_owned();
            io::Error::new(error.kind(), format!("rank {rank}: `{program}` cannot be started: {error}"))
        })?;
        let words = Arc::new(Mutex::new(LastWords::default()));
        let mut line = child.stdin.take();
        say(&mut line, &LauncherMessage::Secret(secret.into()));
        let pump = Pump { rank, tell: tell.clone(), said: said.clone(), words: words.clone() };
        if let Some(out) = child.stdout.take() {
            pump.clone().start_out(out)?;
            self.n_pumps += 1;
        }
        if let Some(errors) = child.stderr.take() {
            pump.start_err(errors)?;
            self.n_pumps += 1;
        }
        self.running.push(Running { rank, host, child, line, status: None, killed: false, words });
        Ok(())
    }

    /// Waits until all have ended; returns those that had to be ended.
    fn watch(&mut self) -> Vec<usize> {
        loop {
            match self.events.recv_timeout(GLANCE) {
                Ok(PumpEvent::Listening(address)) => {
                    let said = LauncherMessage::Master(address);
                    self.running.iter_mut().filter(|r| r.rank != 0).for_each(|r| say(&mut r.line, &said));
                }
                Ok(PumpEvent::Drained) => self.n_pumps -= 1,
                // Without pumps there is no output, but processes are still waited for.
                Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(GLANCE),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let hangup = self.hangup.swap(false, Ordering::Relaxed) && self.interrupts == 0;
            if self.interrupt.swap(false, Ordering::Relaxed) || hangup {
                self.interrupts += 1;
                match self.interrupts {
                    1 => self.running.iter_mut().for_each(|r| say(&mut r.line, &LauncherMessage::Stop)),
                    _ => return self.end_all(),
                }
            }
            self.look();
            if self.running.iter().all(|r| r.status.is_some()) {
                return Vec::new();
            }
            if self.first.is_some_and(|(_, at)| at.elapsed() >= GRACE) {
                return self.end_all();
            }
        }
    }

    /// Checks which processes have ended.
    fn look(&mut self) {
        for (i, r) in self.running.iter_mut().enumerate() {
            if r.status.is_some() {
                continue;
            }
            let Ok(Some(status)) = r.child.try_wait() else { continue };
            r.status = Some(status);
            r.line = None;
            if !status.success() && status.code() != Some(INTERRUPTED) && self.first.is_none() {
                self.first = Some((i, Instant::now()));
            }
        }
    }

    /// Ends the processes that still run: asks first, then kills. Returns their ranks.
    fn end_all(&mut self) -> Vec<usize> {
        self.look();
        for r in &mut self.running {
            say(&mut r.line, &LauncherMessage::End);
            r.line = None;
        }
        let began = Instant::now();
        let living: Vec<_> = self.running.iter().filter(|r| r.status.is_none()).map(|r| r.rank).collect();
        while self.running.iter().any(|r| r.status.is_none()) && began.elapsed() < LAST_GRACE {
            std::thread::sleep(GLANCE);
            self.look();
        }
        for r in self.running.iter_mut().filter(|r| r.status.is_none()) {
            // It is a child that was not waited for yet, so its pid is still valid.
            drop(r.child.kill());
            r.killed = true;
            r.status = r.child.wait().ok();
        }
        living
    }

    /// Waits for the rest of the output. A foreign process that holds a stream open is not waited for.
    fn drain(&mut self) {
        let until = Instant::now() + LAST_GRACE;
        while self.n_pumps > 0 {
            let left = until.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(PumpEvent::Drained) => self.n_pumps -= 1,
                Ok(PumpEvent::Listening(_)) => {}
                Err(_) => return,
            }
        }
    }

    /// The rank that failed first. The connections of a killed process break before it is gone, so others may have
    /// reported it and ended before: a process that a signal ended comes first. A rank that refuses the job need not be
    /// the first to end either: it tells the others why, and those fail.
    fn culprit(&self) -> Option<&Running> {
        let (first, _) = self.first?;
        let signalled = |r: &&Running| !r.killed && r.status.and_then(|s| s.signal()).is_some();
        let refused = |r: &&Running| r.status.and_then(|s| s.code()) == Some(REFUSED);
        // Of several, the one that was seen first.
        let in_order = || std::iter::once(&self.running[first]).chain(&self.running);
        in_order().find(signalled).or_else(|| in_order().find(refused)).or(Some(&self.running[first]))
    }

    fn result(&self, ended: Vec<usize>) -> CrewEnd {
        let code = |r: &Running| r.status.and_then(|s| s.code());
        let interrupted =
            CrewEnd::Interrupted { saved: self.running.first().and_then(code) == Some(INTERRUPTED) };
        if let Some(r) = self.culprit() {
            let status = r.status.expect("it was seen to end");
            let how = status.code().ok_or_else(|| status.signal().unwrap_or(0));
            // After a second Ctrl-C all were ended, and no rank is to blame; nor after one that came before ranks could
            // react to it.
            let early = self.interrupts > 0 && matches!(how, Err(SIGINT | SIGTERM | SIGHUP));
            if self.interrupts > 1 || early {
                return interrupted;
            }
            let words = r.words.lock().unwrap_or_else(PoisonError::into_inner);
            let (last_line, error) = (words.last_line.clone(), words.error.clone());
            let (rank, host, pid) = (r.rank, r.host.clone(), r.child.id());
            return CrewEnd::Lost(Lost { rank, host, pid, how, last_line, error, ended });
        }
        match self.interrupts > 1 || self.running.iter().any(|r| code(r) == Some(INTERRUPTED)) {
            true => interrupted,
            false => CrewEnd::Done,
        }
    }
}

/// Sends a line to a rank. One that no longer listens is noticed when it ends.
pub(super) fn say(line: &mut Option<ChildStdin>, said: &LauncherMessage) {
    if let Some(to) = line {
        drop(write!(to, "{said}").and_then(|()| to.flush()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(scripts: &[&str]) -> Vec<CrewMember> {
        let member = |(rank, script): (usize, &&str)| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            CrewMember { rank, host: String::new(), command, pause: Duration::ZERO }
        };
        scripts.iter().enumerate().map(member).collect()
    }

    #[test]
    fn a_crew_ends_as_its_members_do() {
        assert_eq!(run(shell(&["exit 0", "exit 0"]), "s", false).unwrap(), CrewEnd::Done);
        assert_eq!(
            run(shell(&["exit 130", "exit 130"]), "s", false).unwrap(),
            CrewEnd::Interrupted { saved: true }
        );
        let CrewEnd::Lost(lost) =
            run(shell(&["read s; read x", "echo why >&2; exit 3"]), "s", false).unwrap()
        else {
            panic!("one is lost")
        };
        assert_eq!((lost.rank, lost.how, lost.last_line.as_str()), (1, Ok(3), "why"));
        assert_eq!(lost.ended, [0], "the other one waited forever");
    }

    #[test]
    fn one_that_is_killed_is_named() {
        let began = Instant::now();
        let CrewEnd::Lost(lost) =
            run(shell(&["exit 1", "kill -9 $$", "sleep 0.2; exit 1"]), "s", false).unwrap()
        else {
            panic!("one is lost")
        };
        assert!(lost.rank == 1 && lost.ended.is_empty(), "{lost}");
        assert!(began.elapsed() < GRACE, "no rank was waited for");
        let CrewEnd::Lost(lost) = run(shell(&["exit 0", "kill -9 $$"]), "s", false).unwrap() else {
            panic!("one is lost")
        };
        assert_eq!((lost.rank, lost.how), (1, Err(9)));
        // Its end is seen after that of the ranks that noticed it.
        let CrewEnd::Lost(lost) = run(shell(&["exit 1", "sleep 0.1; kill -9 $$"]), "s", false).unwrap()
        else {
            panic!("one is lost")
        };
        assert_eq!((lost.rank, lost.how), (1, Err(9)));
        assert!(lost.to_string().contains("killed by signal 9"), "{lost}");
    }

    /// Rank 0 finds that the job does not fit and tells rank 1, which may end first.
    #[test]
    fn a_job_that_a_rank_refuses_is_refused_whoever_ends_first() {
        for members in [["sleep 0.1; exit 2", "exit 1"], ["exit 2", "sleep 0.1; exit 1"]] {
            let CrewEnd::Lost(lost) = run(shell(&members), "s", false).unwrap() else {
                panic!("one is lost")
            };
            assert_eq!((lost.rank, lost.how), (0, Ok(2)), "{members:?}");
        }
    }

    #[test]
    fn an_error_for_programs_is_kept_for_the_launcher() {
        use super::super::pumps::ErrorLine;
        let line = ErrorLine::new("the \"data\"\nare gone", 1).to_string();
        let script = format!("cat <<'E'\n{line}\nE\nexit 1");
        for members in [&[&script[..], "exit 0"], &["exit 0", &script[..]]] {
            let CrewEnd::Lost(lost) = run(shell(members), "s", false).unwrap() else { panic!("one is lost") };
            assert_eq!(lost.error.as_deref(), Some("the \"data\"\nare gone"));
        }
    }

    #[test]
    fn the_others_are_told_where_rank_0_listens() {
        let check = "read s; read m; test \"$s\" = 'secret 5ec' && test \"$m\" = 'master h:7'";
        let crew = shell(&["read s; echo 'polyreme listening h:7'", check, check]);
        assert_eq!(run(crew, "5ec", false).unwrap(), CrewEnd::Done);
    }

    #[test]
    fn what_cannot_be_started_is_said_and_nobody_stays() {
        let mut crew = shell(&["read s; read x"]);
        let command = Command::new("/no/such/program");
        crew.push(CrewMember { rank: 1, host: String::new(), command, pause: Duration::ZERO });
        let error = run(crew, "s", false).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("/no/such/program"), "{error}");
    }
}
