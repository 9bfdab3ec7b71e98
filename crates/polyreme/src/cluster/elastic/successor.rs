//! The coordinator as a thread of a rank's process, after the process that started the run was lost.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use polyreme_net::members::{Office, OfficeOptions, OpenOffice, Rules, Vacancy};
use polyreme_net::{Encrypt, Os, Secret, Tell};

use super::coordinator;
use crate::output;

/// What a successor needs to know of the run.
#[derive(Clone)]
pub struct Succession {
    /// The job's secret.
    pub secret: Secret,
    /// The job's name.
    pub job: String,
    /// The fewest and the most ranks.
    pub bounds: (usize, usize),
    /// How long a rank may be silent.
    pub patience: Duration,
    /// Whether connections are encrypted.
    pub encrypt: Encrypt,
    /// What tells its host from others.
    pub host_key: String,
    /// Whether lines are for programs.
    pub json: bool,
}

/// The thread, if this process has become the coordinator.
#[derive(Clone, Default)]
pub struct Successor(Arc<Mutex<Option<JoinHandle<()>>>>);

impl Successor {
    /// What this process does when it becomes the coordinator.
    pub fn opens(&self, run: Succession) -> OpenOffice {
        let thread = self.0.clone();
        Arc::new(move |vacancy| {
            let (office, json) = (Office::open(office_of(&run, vacancy))?, run.json);
            let started = std::thread::Builder::new().name("coordinator".into()).spawn(move || {
                // Others take the end of a coordinator for the end of its process, so that is what it has to be.
                if let Err(error) = coordinator::serve(office, json, &|| false) {
                    output::err().line(&format!("error: while coordinating: {error}"));
                    std::process::exit(1);
                }
            })?;
            *thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(started);
            Ok(())
        })
    }

    /// The run is over for this process: waits until all others have heard of it, if it is this one that tells them.
    pub fn last_words(&self) {
        let thread = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that has panicked tells nobody anything.
        thread.map(JoinHandle::join);
    }
}

fn office_of(run: &Succession, Vacancy { listener, tenure, own, ended, memory }: Vacancy) -> OfficeOptions {
    let Succession { secret, job, bounds: (min, max), patience, encrypt, host_key, .. } = run.clone();
    OfficeOptions {
        listener: listener.into(),
        secret,
        job,
        rules: Rules {
            min,
            max,
            start: min,
            patience,
            hold_off: coordinator::HOLD_OFF,
            exclusive: tenure.is_some(),
            memory,
        },
        first: coordinator::first_number(),
        // The first of the ranks that come back have it.
        note: Vec::new(),
        encrypt,
        host_key,
        // It has none.
        children_here: true,
        runs_on: Some(own),
        ended,
        succession: true,
        tenure,
        tell: Tell::to(|line| output::err().line(&format!("warning: {line}"))),
        system: Arc::new(Os),
    }
}
