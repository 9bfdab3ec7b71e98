//! A process that may be a rank of an elastic run: a loop over generations. A generation is an ordinary run; between two of them it
//! stands ready, with what it has learnt.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use polyreme_net::members::{
    Apart, CoordinatorPlace, EnterOptions, JobMark, Membership, OwnShare, Ready, TallySummary, Wish,
};
use polyreme_net::{Encrypt, Secret};
use polyreme_train::event::{Ending, Event, MembershipCost, Observer};
use polyreme_train::job::{Elastic, Job};
use polyreme_train::run::elastic::{CarriedState, Generation, GenerationEnd, run_generation};
use polyreme_train::run::{Hold, Prepared};
use polyreme_train::slowness::Slowness;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::metrics::MetricsArgs;
use super::ranks::{asked_by_job, show};
use super::terminal::{Screen, catch_interrupts};
use super::train::{fit, for_ranks};
use super::{CommandResult, Failure};
use crate::app::App;
use crate::cluster::elastic::group::{GroupOptions, form_group};
use crate::cluster::elastic::host_key;
use crate::cluster::elastic::successor::{Succession, Successor};
use crate::cluster::enter::{Ranks, Seats};
use crate::cluster::join::JoinedRank;
use crate::cluster::places::{self, RankRow};
use crate::cluster::{LAUNCHED, Setup, Transport};
use crate::metrics::page::MetricsPage;
use crate::metrics::watched::Watched;
use crate::{output, process};

/// A process that may be a rank.
pub(super) struct MemberSeat<'a> {
    /// The application.
    pub(super) app: &'a App,
    /// The job.
    pub(super) job: Job,
    /// Threads of this process.
    pub(super) threads: usize,
    /// Whether a run in the folder is replaced.
    pub(super) overwrite: bool,
    /// Whether it goes on although its data have changed.
    pub(super) changed_data: bool,
    /// Whether output is for programs.
    pub(super) json: bool,
    /// Set when the run is to stop.
    pub(super) stop: Arc<AtomicBool>,
    /// Set when this process is to leave it, while the others go on.
    pub(super) leave: Arc<AtomicBool>,
    /// The number of ranks for which it checks that they fit into the memory of this host, and what carries their data, if it checks that.
    pub(super) checks: Option<(usize, Transport)>,
    /// Where the coordinator is.
    pub(super) coordinator: CoordinatorPlace,
    /// The job's secret.
    pub(super) secret: Secret,
    /// Which of the coordinator's own children this is.
    pub(super) child: Option<u64>,
    /// Whether connections are encrypted.
    pub(super) encrypt: Encrypt,
    /// How steps are slowed down.
    pub(super) slowness: Slowness,
    /// Whether rank 0 serves a page of figures.
    pub(super) metrics: MetricsArgs,
}

/// Takes part in an elastic run until it is over.
pub(super) fn member(seat: MemberSeat) -> CommandResult {
    let MemberSeat { app, job, threads, overwrite, changed_data, json, stop, leave, checks, .. } = seat;
    let MemberSeat { coordinator, secret, child, encrypt, slowness, metrics, .. } = seat;
    process::raise_open_files();
    let asked = asked_by_job(&job.parallel);
    match std::env::var_os(LAUNCHED).is_some() {
        true => {
            // The terminal interrupts all processes of the run, and a hangup is for all; but who terminates one of them means that one.
            signal_hook::flag::register(SIGTERM, leave.clone())?;
            signal_hook::flag::register(SIGINT, stop.clone())?;
            if !process::ignores(SIGHUP) {
                signal_hook::flag::register(SIGHUP, stop.clone())?;
            }
        }
        false => catch_interrupts(&leave, false)?,
    }
    let name = job.name.clone();
    let mut prepared = for_ranks(app, job, 1, threads, 0)?;
    if let Some((processes, transport)) = checks {
        let setup = Setup::Spawn { processes, threads, transport };
        fit(&prepared.clone().for_ranks(processes)?, &setup)?;
    }
    prepared.system = process::facts();
    prepared.changed_data = changed_data;
    prepared.slowness = slowness;
    prepared.process_bytes = process::bytes_before_training();
    let job = JobMark { name: name.clone(), digest: prepared.digest() };
    let successor = Successor::default();
    let succeed = {
        let Elastic { min, max, .. } = prepared.job.parallel.elastic.clone().unwrap_or_default();
        let (bounds, patience) = ((min, max), asked.patience.silence);
        let (secret, job) = (secret.clone(), name.clone());
        let host_key = host_key();
        Some(successor.opens(Succession { secret, job, bounds, patience, encrypt, host_key, json }))
    };
    let (entering, host_key) = (secret.clone(), host_key());
    let enter = EnterOptions { coordinator, secret: entering, job, child, encrypt, host_key, succeed };
    let membership = Membership::enter(&enter).map_err(|e| Failure::world(&e))?;
    let (local, patience) = (membership.local(), asked.patience);
    let options = GroupOptions { secret, job: name, local, patience, encrypt };
    let mut screen = Screen::new(json, stop.clone());
    let mut kept = Kept::default();
    let mut page = None;
    loop {
        let listener = TcpListener::bind((membership.local(), 0))?;
        let ready = Ready {
            generation: 0,
            held: kept.carried.as_ref().map(|carried| carried.held()),
            redoes: std::mem::take(&mut kept.redoes),
            listen: listener.local_addr()?.to_string(),
            why: std::mem::take(&mut kept.why),
        };
        let wish = || match (stop.load(Ordering::Relaxed), leave.load(Ordering::Relaxed)) {
            (true, _) => Wish::Stop,
            (false, true) => Wish::Leave,
            (false, false) => Wish::Nothing,
        };
        let form = match membership.ready(ready, &wish).map_err(|e| Failure::world(&e))? {
            Apart::Form(form) => form,
            Apart::End { why: None } if stop.load(Ordering::Relaxed) => return Err(Failure::interrupted()),
            Apart::End { why: None } => return Ok(()),
            Apart::End { why: Some(why) } => return Err(Failure::coded(1, why)),
        };
        let joined = form_group(&form, listener, &options, &|| membership.is_cancelled());
        let JoinedRank { comm, control, transport } = match joined {
            Ok(joined) => joined,
            Err(why) => {
                kept.why = why;
                continue;
            }
        };
        if let Some(control) = &control {
            membership.watch(control.alarm(), form.rank);
        }
        let group = FormedGroup { form: &form, comm, transport, threads };
        page = match form.rank {
            0 => page.or_else(|| opened(&metrics, json)),
            _ => None,
        };
        let mut observer = MemberObserver {
            page: page.as_ref(),
            screen: &mut screen,
            membership: &membership,
            leave: &leave,
            speaks: form.rank == 0,
        };
        let outcome = generation(group, &prepared, &mut kept, &mut observer, overwrite, json);
        membership.unwatch();
        match outcome? {
            Next::Over(ending) => {
                if let Some(control) = control {
                    // Whoever is lost now has nothing left to do.
                    drop(control.goodbye());
                }
                membership.done(form.generation);
                successor.last_words();
                screen.close();
                return match ending {
                    Ending::Interrupted => Err(Failure::interrupted()),
                    Ending::Finished | Ending::EarlyStop => Ok(()),
                };
            }
            Next::Generation { agreed: true } => {
                if let Some(control) = control {
                    // A rank that is lost now is no rank of the next generation.
                    drop(control.goodbye());
                }
            }
            Next::Generation { agreed: false } => drop(control),
        }
    }
}

/// The page of a rank 0, which may be another one's than before. A run is not given up for want of it.
fn opened(metrics: &MetricsArgs, json: bool) -> Option<MetricsPage> {
    let warn = |failure: Failure| output::err().line(&format!("warning: {}", failure.message));
    metrics.open(true, json).unwrap_or_else(|failure| {
        warn(failure);
        None
    })
}

/// What a member keeps between generations.
#[derive(Default)]
struct Kept {
    carried: Option<Box<CarriedState>>,
    /// The new run's folder, until it was begun.
    hold: Option<Hold>,
    folder: Option<PathBuf>,
    redoes: bool,
    why: String,
}

/// A group that was formed.
struct FormedGroup<'a> {
    form: &'a polyreme_net::members::Formation,
    comm: polyreme_collective::Comm,
    transport: Transport,
    threads: usize,
}

/// What a member does after a generation.
enum Next {
    Over(Ending),
    /// `agreed`: all ranks ended it together.
    Generation {
        agreed: bool,
    },
}

/// One generation on this member.
fn generation(
    group: FormedGroup,
    prepared: &Prepared,
    kept: &mut Kept,
    observer: &mut MemberObserver,
    overwrite: bool,
    json: bool,
) -> Result<Next, Failure> {
    let FormedGroup { form, mut comm, transport, threads } = group;
    let row = RankRow::here(form.rank, threads, None, transport.name());
    let lost = |kept: &mut Kept, report: polyreme_net::Report| {
        kept.why = report.to_string();
        Ok(Next::Generation { agreed: false })
    };
    let rows = match places::gather(&mut comm, &row) {
        Ok(rows) => rows,
        Err(report) => return lost(kept, report),
    };
    let mut ranks =
        Ranks { comms: vec![comm], seats: Seats::anywhere(form.rank), threads, rows, control: None };
    if form.generation == 1 {
        show(&ranks, json);
    }
    // Rank 0 knows the folder, from an earlier generation or because it chooses it now.
    let noted = (!form.note.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(&form.note)));
    let known = kept.folder.clone().or(noted);
    let is_new = ranks.speaks() && known.as_ref().is_none_or(|folder| !folder.join("job.toml").exists());
    if is_new && kept.hold.is_none() {
        let mut job = prepared.job.clone();
        job.output.path = known.clone().or(job.output.path);
        let hold = Hold::new(&job, overwrite);
        let hold = hold.inspect_err(|error| ranks.comms[0].fail(&error.to_string()))?;
        observer.membership.note(hold.folder().as_os_str().as_bytes().to_vec());
        kept.folder = Some(hold.folder().to_path_buf());
        kept.hold = Some(hold);
    }
    let own = kept.folder.clone().or(known).unwrap_or_default();
    let told = ranks.tell(own.into_os_string().into_encoded_bytes());
    let folder = match told {
        Ok(bytes) => PathBuf::from(OsStr::from_bytes(&bytes)),
        Err(report) => return lost(kept, report),
    };
    if kept.folder.replace(folder.clone()).is_none() {
        // Whichever rank is left can tell it to another coordinator.
        observer.membership.note(folder.as_os_str().as_bytes().to_vec());
    }
    let comm = ranks.comms.pop().expect("the one of this rank");
    let generation = Generation {
        number: form.generation,
        folder: &folder,
        is_new,
        held: &form.held,
        source: form.source,
        save_only: form.save_only,
        why: &form.why,
    };
    let hold = kept.hold.take();
    let ended = run_generation(prepared.clone(), comm, hold, kept.carried.take(), &generation, observer)?;
    Ok(match ended {
        GenerationEnd::Finished(summary) => Next::Over(summary.ending),
        GenerationEnd::Changed(carried) => {
            kept.carried = Some(carried);
            Next::Generation { agreed: true }
        }
        GenerationEnd::Lost { report, carried, redoes } => {
            (kept.carried, kept.redoes, kept.why) = (carried, redoes, report.to_string());
            Next::Generation { agreed: false }
        }
    })
}

/// Shows a run if this is rank 0, and tells the coordinator how it gets on.
struct MemberObserver<'a> {
    page: Option<&'a MetricsPage>,
    screen: &'a mut Screen,
    membership: &'a Membership,
    /// Whether this rank is to leave while the others go on.
    leave: &'a AtomicBool,
    speaks: bool,
}

impl Observer for MemberObserver<'_> {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(done) => {
                self.membership.at(done.step);
                let busy_us = done.own_busy.as_micros() as u64;
                self.membership.had(OwnShare { samples: done.own_samples as u64, busy_us });
                if self.leave.load(Ordering::Relaxed) {
                    self.membership.leave();
                }
            }
            Event::TooSlow => self.leave.store(true, Ordering::Relaxed),
            Event::Membership { generation, step, .. } => {
                self.membership.at(step);
                self.membership.running(generation);
            }
            Event::Started(_)
            | Event::Evaluated { .. }
            | Event::Saving { .. }
            | Event::Balanced { .. }
            | Event::Followed { .. }
            | Event::Servers(_)
            | Event::Turned { .. }
            | Event::Warning(_)
            | Event::Finished(_) => {}
        }
        if self.speaks {
            Watched { inner: self.screen, page: self.page }.event(event);
        }
    }

    fn stop_requested(&self) -> bool {
        // A run without its coordinator saves and ends.
        self.screen.stop_requested() || self.membership.is_orphan()
    }

    fn change_requested(&self) -> bool {
        self.membership.leaves_at_step_end()
    }

    fn membership(&self) -> Option<MembershipCost> {
        let TallySummary { ranks_lost, ranks_joined, steps_redone, .. } = self.membership.tally();
        let TallySummary { stall_us_p50, stall_us_p99, stall_us_max, parts_us_p50, .. } =
            self.membership.tally();
        let ms = |us: u64| us as f64 / 1e3;
        Some(MembershipCost {
            ranks_lost,
            ranks_joined,
            steps_redone,
            stall_ms_p50: ms(stall_us_p50),
            stall_ms_p99: ms(stall_us_p99),
            stall_ms_max: ms(stall_us_max),
            stall_parts_ms_p50: parts_us_p50.map(ms),
        })
    }
}
