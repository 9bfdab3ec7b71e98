//! Flags about ranks, and the resulting setup.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use polyreme_net::control::Voice;
use polyreme_net::{Control, Encrypt, Patience};
use polyreme_parallel::Mesh;
use polyreme_train::job::{Job, ParallelSpec, Transport as JobTransport};
use serde_json::json;

use super::ending::INTERRUPTED;
use super::{CommandResult, Failure};
use crate::cluster::cores::Machine;
use crate::cluster::crew::{CrewEnd, Lost};
use crate::cluster::enter::{Entered, RankEntry, Ranks, enter};
use crate::cluster::places::{RankTable, tensor_apart};
use crate::cluster::{Asked, Decided, Setup, Transport, asked_transport, decide};
use crate::output::{self, fit::cut};

const HEADING: &str = "Ranks";

/// Flags of every command that runs on ranks.
#[derive(Args, Clone, Debug)]
pub(super) struct RankArgs {
    /// Ranks that share each step: threads of this process, or processes with --transport shm or tcp [default: as
    /// many as the batch keeps busy].
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,
    /// Processes of this host, a rank each.
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=4096))]
    processes: Option<u16>,
    /// What carries data between ranks [default: depends on how they were started].
    #[arg(long, value_name = "T", help_heading = HEADING)]
    transport: Option<Transport>,
    /// Encrypt what ranks send each other over sockets: auto (where it leaves the host), true or false [default:
    /// `parallel.encrypt` of the job, or auto].
    #[arg(long, value_name = "WHEN", help_heading = HEADING, value_parser = encrypt)]
    encrypt: Option<Encrypt>,
    /// Threads of each rank [default: one per core of its share].
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Do not pin ranks to cores.
    #[arg(long, help_heading = HEADING)]
    no_pin: bool,
}

impl RankArgs {
    fn asked(&self) -> Asked {
        Asked {
            ranks: self.ranks.map(usize::from),
            processes: self.processes.map(usize::from),
            threads: self.threads.map(usize::from),
            transport: self.transport,
            encrypt: self.encrypt,
            patience: Patience::default(),
        }
    }

    /// Decides the setup from the flags, the job, the environment and this machine.
    pub(super) fn decide(&self, job: Asked, machine: &Machine) -> Result<Decided, Failure> {
        decide(self.asked(), job, &|key| std::env::var(key).ok(), machine).map_err(Failure::usage)
    }

    /// Starts the ranks of this process; `None` if it was the launcher and all is done. `stop` is set when a launcher
    /// asks this process to stop.
    pub(super) fn enter(
        &self,
        job: Asked,
        name: &str,
        stop: Arc<AtomicBool>,
    ) -> Result<Option<Ranks>, Failure> {
        let machine = Machine::read();
        let decided = self.decide(job, &machine)?;
        self.enter_as(decided, machine, name, stop)
    }

    /// The same with a decided setup.
    pub(super) fn enter_as(
        &self,
        decided: Decided,
        machine: Machine,
        name: &str,
        stop: Arc<AtomicBool>,
    ) -> Result<Option<Ranks>, Failure> {
        let (pin, job, program) = (!self.no_pin, name.to_string(), program()?);
        let args = std::env::args_os().skip(1).collect();
        match enter(RankEntry { decided, machine, pin, stop, job, program, args })
            .map_err(|e| Failure::world(&e))?
        {
            Entered::Ranks(ranks) => Ok(Some(ranks)),
            Entered::Over(end) => over(end, |lost| lost.to_string()).map(|()| None),
        }
    }

    /// Whether flags or an external launcher ask for several ranks.
    pub(super) fn any(&self) -> bool {
        let said = self.ranks.is_some() || self.processes.is_some() || self.transport.is_some();
        said || self
            .decide(Asked::default(), &Machine::read())
            .is_ok_and(|d| matches!(d.setup, Setup::Process(_)))
    }

    /// Whether rank 0 is, or will be, in this process.
    pub(super) fn speaks(&self) -> Result<bool, Failure> {
        let decided = self.decide(Asked::default(), &Machine::read())?;
        Ok(!matches!(decided.setup, Setup::Process(place) if place.rank > 0))
    }

    /// What carries data between ranks, if a flag, the environment or the job says so.
    pub(super) fn transport(&self, job: &Job) -> Result<Option<Transport>, Failure> {
        let said = asked_transport(self.transport, &|key| std::env::var(key).ok()).map_err(Failure::usage)?;
        Ok(said.or(asked_by_job(&job.parallel).transport))
    }

    /// Whether a flag says how many processes there are.
    pub(super) fn names_processes(&self) -> bool {
        self.processes.is_some()
    }

    /// How many processes or ranks the flags ask for.
    pub(super) fn n_processes(&self) -> Option<usize> {
        self.processes.or(self.ranks).map(usize::from)
    }

    /// Whether connections are encrypted: as the flag says, or the job.
    pub(super) fn encryption(&self, job: &Job) -> Encrypt {
        self.encrypt.or(asked_by_job(&job.parallel).encrypt).unwrap_or_default()
    }

    /// Threads of each rank, from the flags.
    pub(super) fn threads(&self) -> Option<usize> {
        self.threads.map(usize::from)
    }
}

/// Reads `auto`, `true` or `false`.
fn encrypt(text: &str) -> Result<Encrypt, &'static str> {
    match text {
        "auto" => Ok(Encrypt::Auto),
        "true" => Ok(Encrypt::Always),
        "false" => Ok(Encrypt::Never),
        _ => Err("auto, true or false"),
    }
}

/// What a job file asks for.
pub(super) fn asked_by_job(spec: &ParallelSpec) -> Asked {
    let transport = match spec.transport {
        JobTransport::Auto => None,
        JobTransport::Local => Some(Transport::Local),
        JobTransport::Shm => Some(Transport::Shm),
        JobTransport::Tcp => Some(Transport::Tcp),
        JobTransport::Mpi => Some(Transport::Mpi),
    };
    let encrypt = match spec.encrypt {
        None => Encrypt::Auto,
        Some(true) => Encrypt::Always,
        Some(false) => Encrypt::Never,
    };
    let patience = Patience {
        silence: Duration::from_secs_f64(spec.patience),
        stall: Duration::from_secs_f64(spec.stall),
    };
    let (ranks, threads, encrypt) = (spec.asked_ranks(), spec.threads, Some(encrypt));
    Asked { ranks, processes: None, threads, transport, encrypt, patience }
}

/// Shows where the ranks run, if there are several.
pub(super) fn show(ranks: &Ranks, as_json: bool) {
    if !ranks.speaks() || ranks.size() < 2 {
        return;
    }
    if as_json {
        return output::out().line(&json!({"event": "placed", "ranks": ranks.rows}).to_string());
    }
    let table = cut(&RankTable(&ranks.rows).to_string(), output::err().width());
    output::err().text(table.into_bytes());
}

/// Points out matrices that are split over hosts.
pub(super) fn note_apart(ranks: &Ranks, mesh: &Mesh) {
    if let Some(apart) = tensor_apart(&ranks.rows, mesh).filter(|_| ranks.speaks()) {
        output::err().line(&format!("note: {apart}"));
    }
}

/// Tells the user when ranks wait for one of them for long.
pub(super) fn voice_waits(ranks: &mut Ranks) {
    let voice: Voice = Arc::new(|waiting| output::err().line(&waiting.text()));
    match &ranks.control {
        Some(control) => control.on_long_wait(voice),
        None => ranks.comms[0].on_long_wait(voice),
    }
}

/// Runs what has to be done before ranks work together. If it fails, the other ranks are told why.
pub(super) fn or_tell<T>(
    ranks: &mut Ranks,
    work: impl FnOnce(&mut Ranks) -> Result<T, Failure>,
) -> Result<T, Failure> {
    work(ranks).inspect_err(|failure| {
        ranks.comms.iter_mut().for_each(|comm| comm.fail(failure.message.trim_start_matches("error: ")));
    })
}

/// Ends this process's part: tells the others that it is done, or why it failed.
pub(super) fn part(control: Option<Control>, outcome: CommandResult) -> CommandResult {
    let Some(control) = control else { return outcome };
    match outcome {
        Ok(()) => Ok(control.goodbye()?),
        Err(failure) => {
            control.fail(failure.message.trim_start_matches("error: "));
            Err(failure)
        }
    }
}

/// The exit of a launcher: its ranks have printed their messages, except how the first one was lost.
pub(super) fn over(end: CrewEnd, explain: impl Fn(&Lost) -> String) -> Result<(), Failure> {
    match end {
        CrewEnd::Done => Ok(()),
        CrewEnd::Interrupted { saved: true } => Err(Failure::interrupted()),
        CrewEnd::Interrupted { saved: false } => Err(Failure::coded(
            INTERRUPTED,
            "interrupted; the ranks ended at once and nothing more was saved",
        )),
        CrewEnd::Lost(lost) => {
            let code = match lost.how {
                Ok(code @ 1..=2) => code as u8,
                _ => 1,
            };
            let json = explain(&lost);
            // The user has already seen the rank's own message.
            let message = explain(&Lost { error: None, ..lost });
            Err(Failure { json: Some(json), ..Failure::coded(code, message) })
        }
    }
}

/// The path of this program, to start copies of it.
pub(super) fn program() -> Result<PathBuf, Failure> {
    Ok(std::env::current_exe()?)
}
