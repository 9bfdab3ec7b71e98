//! An observer that keeps the figures of a run, and passes everything on to another.

use std::time::Instant;

use polyreme_train::event::{Event, MembershipCost, Observer};

use super::page::MetricsPage;

/// Keeps the figures of a page, if there is one.
pub(crate) struct Watched<'a> {
    /// Who else watches the run.
    pub(crate) inner: &'a mut dyn Observer,
    /// The page.
    pub(crate) page: Option<&'a MetricsPage>,
}

impl Observer for Watched<'_> {
    fn event(&mut self, event: Event<'_>) {
        if let Some(page) = self.page {
            page.figures().note(Instant::now(), &event);
        }
        self.inner.event(event);
    }

    fn stop_requested(&self) -> bool {
        self.inner.stop_requested()
    }

    fn change_requested(&self) -> bool {
        self.inner.change_requested()
    }

    fn membership(&self) -> Option<MembershipCost> {
        self.inner.membership()
    }
}
