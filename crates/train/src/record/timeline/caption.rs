//! What is written above and below a picture.

use super::lettering::duration;
use super::step::StepTimeline;
use crate::record::trace::{About, TimeSource};

/// What ran.
pub(super) fn title(steps: &[StepTimeline]) -> String {
    let Some(about) = steps.iter().find_map(|step| step.about.as_ref()) else { return "Timeline".into() };
    let About { job, schedule, microbatches, .. } = about;
    let mut parts = vec![job.clone()];
    parts.extend(schedule.clone());
    let axes = [(about.stage, "stage"), (about.tensor, "tensor rank"), (about.sequence, "sequence rank")];
    for (n, name) in axes.into_iter().chain([(about.data, "data rank")]) {
        if n > 1 {
            parts.push(format!("{n} {name}s"));
        }
    }
    if *microbatches > 1 {
        parts.push(format!("{microbatches} microbatches"));
    }
    parts.join(" · ")
}

/// Which step it is, and how it went.
pub(super) fn heading(step: &StepTimeline) -> String {
    let source = match step.about.as_ref().map(|about| about.source) {
        Some(TimeSource::Simulated) => "Simulated, ",
        Some(TimeSource::Measured) => "Measured, ",
        None => "",
    };
    let which = match step.steps {
        (first, last) if first == last => format!("step {first}"),
        (first, last) => format!("steps {first} to {last}"),
    };
    let idle = format!("{:.0} % idle", 100.0 * step.idle());
    format!("{source}{which}: {}, {idle}", duration(step.took_us))
}

/// Which ranks have a row, where not all have one.
pub(super) fn left_out(step: &StepTimeline, n: usize, which: &str) -> String {
    let shown = step.rows.len();
    format!("{shown} of {} ranks are shown, {which}.", shown + n)
}
