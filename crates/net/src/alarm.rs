//! One failure, seen by every wait of this process: whoever learns first that the job cannot go on raises the alarm.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::report::Report;

/// Raised once; everybody who waits looks at it every now and then.
#[derive(Clone, Default, Debug)]
pub struct Alarm(Arc<Inner>);

#[derive(Default, Debug)]
struct Inner {
    raised: AtomicBool,
    report: Mutex<Option<Report>>,
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
}
