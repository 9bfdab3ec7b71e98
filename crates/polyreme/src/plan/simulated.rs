//! The timeline of a plan: its step, simulated once more with what every rank does when, as a file of `--trace` would have it.

use std::path::Path;

use polyreme_graph::MomentKind;
use polyreme_sim::search::FoundPlan;
use polyreme_sim::{Cluster, SimSettings, simulate};
use polyreme_train::record::timeline::Trace;
use polyreme_train::record::trace::{self, About, TimeSource};

/// Steps that are simulated: in the first one all ranks begin together, which is not typical.
const STEPS: usize = 3;

/// A timeline of a few steps of a plan; `job` is its name, and `path` is for messages.
pub fn timeline(plan: &FoundPlan, cluster: &Cluster, job: &str, path: &Path) -> Result<Trace, String> {
    let seating = plan.choice.seating;
    let settings = SimSettings {
        ranks_per_host: seating.ranks_per_host,
        threads: seating.threads,
        runs: STEPS,
        traced: 0..seating.ranks(),
        ..SimSettings::default()
    };
    let report = simulate(&plan.fleet, cluster, &settings).map_err(|e| e.to_string())?;
    let about = About { source: TimeSource::Simulated, ..About::of_plan(job, &plan.fleet.plan) };
    let mut by_rank: Vec<_> = report.timeline.into_iter().map(|of| of.moments).collect();
    // Nodes are not drawn, and most of the text.
    by_rank.iter_mut().for_each(|moments| moments.retain(|m| m.label.kind != MomentKind::Node));
    Trace::from_text(path, trace::text(&about, &by_rank).as_bytes()).map_err(|e| e.to_string())
}
