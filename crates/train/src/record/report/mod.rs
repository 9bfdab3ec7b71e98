//! `report.html`: a run on one page, in one file that needs nothing else: no scripts, fonts or pictures from elsewhere.
//! Curves are SVG made here; a few lines of script show numbers under the pointer.

mod chart;
mod classes;
mod curve;
mod page;

use std::path::Path;

use super::append::write_whole;
use super::error::RecordError;
use super::history::History;
use crate::metrics::{Best, Confusion};

/// What a report says beside the curves. Texts need no escaping.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Summary {
    /// The run's name.
    pub title: String,
    /// How it ended, as the start of a sentence that goes on with "after N steps": `Finished`, `Stopped early`.
    pub ended: String,
    /// Steps done.
    pub steps: u64,
    /// Seconds that they took.
    pub seconds: f64,
    /// Training samples a second, over the whole run; 0 is not shown.
    pub samples_per_s: f64,
    /// The last metrics under their names, such as `test_accuracy`, the most important first.
    pub metrics: Vec<(String, f64)>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// What the job said: `train.batch` and its value; the part before the dot is a section.
    pub settings: Vec<(String, String)>,
    /// The machine and the program.
    pub system: Vec<(String, String)>,
    /// Of the last evaluation.
    pub confusion: Option<Confusion>,
    /// The names of its classes; those without one have their number.
    pub class_names: Vec<String>,
    /// What a reader should know before the numbers.
    pub warnings: Vec<String>,
}

/// The page as text.
pub fn render(history: &History, summary: &Summary) -> String {
    page::render(history, summary)
}

/// Writes the page; what was at `path` before stays until the new one is whole.
pub fn write(path: &Path, history: &History, summary: &Summary) -> Result<(), RecordError> {
    let page = render(history, summary);
    write_whole(path, page.as_bytes()).map_err(|source| RecordError::write(path, source))
}

#[cfg(test)]
mod tests;
