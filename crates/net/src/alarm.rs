//! One failure, seen by every wait of this process: the thread that first learns that the job cannot go on raises the
//! alarm.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::report::Report;

/// Raised once; every wait checks it regularly.
#[derive(Clone, Default, Debug)]
pub struct Alarm(Arc<AlarmState>);

#[derive(Default, Debug)]
struct AlarmState {
    raised: AtomicBool,
    report: Mutex<Option<Report>>,
    /// Whether a control plane judges suspicions.
    judged: AtomicBool,
    suspicion: Mutex<Option<Report>>,
}

impl Alarm {
    /// Raises it. The first report stays; returns whether this was it.
    pub fn raise(&self, report: Report) -> bool {
        let mut first = self.0.report.lock().unwrap_or_else(PoisonError::into_inner);
        let new = first.is_none();
        first.get_or_insert(report);
        self.0.raised.store(true, Ordering::Release);
        new
    }

    /// The report, if it was raised. Costs one load if not.
    pub fn raised(&self) -> Option<Report> {
        if !self.0.raised.load(Ordering::Acquire) {
            return None;
        }
        self.0.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records what this rank finds wrong with another one. All ranks must report the same, and another rank may have
    /// found something else, so rank 0 decides; its report raises the alarm. Returns whether there is a control plane
    /// to ask rank 0.
    pub(crate) fn suspect(&self, report: Report) -> bool {
        self.0.suspicion.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(report);
        self.judged()
    }

    /// What was suspected first.
    pub(crate) fn suspicion(&self) -> Option<Report> {
        self.0.suspicion.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether suspicions are judged.
    pub(crate) fn judged(&self) -> bool {
        self.0.judged.load(Ordering::Acquire)
    }

    /// Sets whether suspicions are judged.
    pub(crate) fn set_judged(&self, yes: bool) {
        self.0.judged.store(yes, Ordering::Release);
    }
}
