//! The line that shows how far a search is, on a terminal: a large cluster takes half a minute.

use std::cell::Cell;
use std::time::{Duration, Instant};

use polyreme_sim::search::SearchProgress;

use crate::output::{self, fit::cut};

/// The least time between two redraws; a search that is over before it has no line at all.
const FRAME: Duration = Duration::from_millis(200);

/// A line on the standard error that is there as long as this is.
pub struct SearchLine {
    shown: Cell<Instant>,
    is_there: Cell<bool>,
}

impl SearchLine {
    /// None yet.
    pub fn begin() -> SearchLine {
        SearchLine { shown: Cell::new(Instant::now()), is_there: Cell::new(false) }
    }

    /// Shows how far a search is.
    pub fn show(&self, progress: SearchProgress) {
        let width = output::err().width();
        if width.is_none() || self.shown.get().elapsed() < FRAME {
            return;
        }
        self.shown.set(Instant::now());
        self.is_there.set(true);
        output::err().frame(cut(&words(progress), width).trim_end());
    }

    /// Takes it away, before something is printed.
    pub fn clear(&self) {
        if self.is_there.replace(false) {
            output::err().clear();
            output::err().settle();
        }
    }
}

impl Drop for SearchLine {
    fn drop(&mut self) {
        self.clear();
    }
}

fn words(progress: SearchProgress) -> String {
    let SearchProgress { choices, simulated, spent, best_us } = progress;
    match best_us {
        None => format!("planning: {choices} choices"),
        Some(us) => format!(
            "planning: {choices} choices, {simulated} simulated, best {:.1} ms per step, {:.0} %",
            us / 1e3,
            spent * 100.0
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_is_known() {
        let begun = SearchProgress { choices: 12, simulated: 0, spent: 0.0, best_us: None };
        assert_eq!(words(begun), "planning: 12 choices");
        let later = SearchProgress { simulated: 3, spent: 0.421, best_us: Some(12_340.0), ..begun };
        assert_eq!(words(later), "planning: 12 choices, 3 simulated, best 12.3 ms per step, 42 %");
    }
}
