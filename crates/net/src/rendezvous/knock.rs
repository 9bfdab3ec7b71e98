//! Lines about connections that were turned away while a rank waits, at a limited rate.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least time between two lines; connections in between are counted.
const PAUSE: Duration = Duration::from_secs(10);

/// Receives lines for the user who started this rank.
#[derive(Clone, Default)]
pub struct Tell(Option<Arc<TellFn>>);

type TellFn = dyn Fn(&str) + Send + Sync;

impl Tell {
    /// Hands each line to a function.
    pub fn to(tell: impl Fn(&str) + Send + Sync + 'static) -> Tell {
        Tell(Some(Arc::new(tell)))
    }
}

impl fmt::Debug for Tell {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Tell(..)" } else { "Tell(none)" })
    }
}

/// Reports connections that were turned away, and counts those that it does not report.
pub(super) struct Knocks {
    tell: Tell,
    next: Option<Instant>,
    n_untold: usize,
}

impl Knocks {
    pub(super) fn new(tell: Tell) -> Knocks {
        Knocks { tell, next: None, n_untold: 0 }
    }

    /// A connection was turned away, for this reason.
    pub(super) fn note(&mut self, now: Instant, note: &str) {
        if self.next.is_some_and(|next| now < next) {
            self.n_untold += 1;
            return;
        }
        let more = match std::mem::take(&mut self.n_untold) {
            0 => String::new(),
            n => format!(" (and {n} more before it)"),
        };
        self.next = Some(now + PAUSE);
        if let Some(tell) = &self.tell.0 {
            tell(&format!("turned away {note}{more}; give every rank the same secret and the same job"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_flood_of_knocks_is_a_line_now_and_then() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let heard = lines.clone();
        let mut knocks = Knocks::new(Tell::to(move |line| heard.lock().unwrap().push(line.to_string())));
        let begun = Instant::now();
        for tenth in 0..=200 {
            knocks.note(begun + tenth * Duration::from_millis(100), "10.0.0.7:5, as rank 1: wrong secret");
        }
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].starts_with("turned away 10.0.0.7:5, as rank 1: wrong secret;"), "{lines:?}");
        assert!(lines[2].contains("wrong secret (and 99 more before it);"), "{lines:?}");
    }
}
