//! `polyreme coordinator`: decides who the ranks of an elastic run are, and runs none of them.
//!
//! It keeps nothing on disk. If it is killed, its ranks go on training and look for it for as long as `parallel.patience` says; one
//! that is started again at the same address learns from them where the run stands, and goes on. So whatever restarts processes
//! (Kubernetes, systemd, a loop in a shell) is all that it needs to survive.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use polyreme_net::members::{Decision, MemberAction, Office, OfficeOptions, OfficeOrder};
use polyreme_train::job::StoreAddress;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::status::status;
use crate::output;

/// How long a new coordinator waits for ranks of a run that trains before it begins one: they knock every tenth of a second.
pub const HOLD_OFF: Duration = Duration::from_secs(2);
/// How often signals are looked at.
const GLANCE: Duration = Duration::from_millis(50);
/// How long it stays when the run is over, for ranks that have not heard of it.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The number of its first member: one that no coordinator before it has come to.
pub fn first_number() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_millis() as u64)
}

/// Coordinates until the run is over; whether it is. It is not if this process was interrupted. `store` is where ranks find it, if not
/// at its address.
pub fn run(
    office: OfficeOptions,
    patience: Duration,
    store: Option<&StoreAddress>,
    json: bool,
) -> io::Result<bool> {
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupt.clone())?;
    }
    let office = Office::open(office)?;
    if !json {
        let at = store.map_or(office.addr()?.to_string(), StoreAddress::to_string);
        output::err().line(&format!("ranks can join: polyreme join {at} JOB.toml"));
    }
    let whole = serve(office, json, &|| interrupt.load(Ordering::Relaxed))?;
    if !whole {
        let seconds = patience.as_secs();
        let then = match store {
            Some(_) => "one of them takes the place of this process".to_string(),
            None => format!("without a coordinator at this address they save and stop in {seconds} seconds"),
        };
        output::err().line(&format!("the ranks go on; {then}"));
    }
    Ok(whole)
}

/// Coordinates until the run is over, or `interrupted` says that it is to stop; whether the run is over.
pub fn serve(mut office: Office, json: bool, interrupted: &dyn Fn() -> bool) -> io::Result<bool> {
    let mut over: Option<Instant> = None;
    while over.is_none_or(|over| over.elapsed() < LAST_WORDS) {
        for order in office.turn(Instant::now() + GLANCE)? {
            match order {
                OfficeOrder::Asked { asker } => {
                    let text = status(&office).to_string();
                    office.answer(asker, text);
                }
                OfficeOrder::Decided(decision) => {
                    if matches!(decision.action, MemberAction::End { .. }) {
                        over.get_or_insert_with(Instant::now);
                    }
                    tell(&office, &decision, json);
                }
                // It has no children.
                OfficeOrder::Kill { .. } => {}
            }
        }
        if over.is_none() && interrupted() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// One line for each change.
fn tell(office: &Office, Decision { action, why }: &Decision, json: bool) {
    let what = match action {
        MemberAction::Form { .. } => "forming",
        MemberAction::Trains => "training",
        MemberAction::Wait => "waiting",
        MemberAction::End { .. } => "over",
        MemberAction::Cancel { .. }
        | MemberAction::Change { .. }
        | MemberAction::Remove { .. }
        | MemberAction::Dismiss { .. }
        | MemberAction::Release { .. } => return,
    };
    let (generation, ranks) = office.coordinator().generation();
    let ranks = ranks.len();
    match json {
        true => {
            let why = why.to_string();
            let line = json!({"event": what, "generation": generation, "ranks": ranks, "why": why});
            output::out().line(&line.to_string());
        }
        false => output::err().line(&format!("{what}: generation {generation}, {ranks} ranks; {why}")),
    }
}
