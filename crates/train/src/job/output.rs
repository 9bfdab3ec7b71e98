//! `[output]`: what is left behind.

use std::ops::Bound;

use super::cursor::Cursor;
use super::keys::METRICS;
use super::spec::{OutputSpec, Source};

const COUNT_MAX: u64 = 1 << 48;

/// Reads `[output]`. What is best depends on the labels, and so on the source.
pub(super) fn read(c: &Cursor, source: Option<&Source>) -> OutputSpec {
    let count = |key, least| c.whole(key, least..=COUNT_MAX);
    let every_steps = count("every_steps", 1);
    let every_minutes = c.real("every_minutes", (Bound::Excluded(0.0), Bound::Unbounded));
    // 0 is for a job that is to have no checkpoints on the way.
    let every_epochs = count("every_epochs", 0);
    let said = ["every_steps", "every_epochs", "every_minutes"].iter().any(|key| c.has(key));
    let best = match c.get("best") {
        None => Some(default_best(source).to_string()),
        Some(at) => {
            let known: Vec<_> = METRICS.into_iter().chain(["none"]).collect();
            at.choice(&known).filter(|&name| name != "none").map(String::from)
        }
    };
    let default = OutputSpec::default();
    let spec = OutputSpec {
        path: c.path("path"),
        every_steps,
        every_epochs: if said { every_epochs.filter(|&n| n > 0) } else { default.every_epochs },
        every_minutes,
        keep: c.size("keep", 1..=(1 << 20)).unwrap_or(default.keep),
        best,
        tensorboard: c.flag("tensorboard").unwrap_or(default.tensorboard),
    };
    c.finish();
    spec
}

/// The metric whose best checkpoint stays, if none is said.
pub(super) fn default_best(source: Option<&Source>) -> &'static str {
    match source {
        Some(Source::Text { .. }) => "val_loss",
        _ => "val_accuracy",
    }
}
