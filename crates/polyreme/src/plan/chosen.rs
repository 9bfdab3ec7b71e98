//! A plan as keys of a job file.

use std::collections::BTreeSet;
use std::path::Path;

use polyreme_sim::Cluster;
use polyreme_sim::search::{FoundPlan, Sharding};
use polyreme_train::job::{Job, JobErrors};

use super::row::recompute_mib;

/// A key of a job file and its value, as TOML.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChosenKey {
    /// The section.
    pub section: &'static str,
    /// The key.
    pub key: &'static str,
    /// The value.
    pub value: String,
}

/// The keys that a plan sets, but for those that the job has set itself; `auto_precision` if the job leaves that open.
pub fn keys(
    plan: &FoundPlan,
    cluster: &Cluster,
    precision: &str,
    said: &BTreeSet<String>,
    auto_precision: bool,
) -> Vec<ChosenKey> {
    let choice = &plan.choice;
    let mesh = &choice.mesh;
    let mut found = Vec::new();
    let mut set = |section, key, value: String| found.push(ChosenKey { section, key, value });
    set("parallel", "data", mesh.data.to_string());
    for (key, n) in [("tensor", mesh.tensor), ("stage", mesh.stage), ("sequence", mesh.sequence)] {
        set("parallel", key, n.to_string());
    }
    // Logical shards, or what is accumulated, say it already.
    let cut = said.contains("train.accumulate") || plan.fleet.plan.shards.is_some();
    if choice.microbatches > 1 && !cut {
        set("parallel", "microbatches", choice.microbatches.to_string());
    }
    if mesh.stage > 1 {
        set("parallel", "schedule", format!("\"{}\"", choice.schedule));
    }
    match choice.sharding {
        Sharding::Usual | Sharding::Nothing => {}
        Sharding::Optimizer => set("parallel", "shard_optimizer", "true".into()),
        Sharding::Gradients => set("parallel", "shard_gradients", "true".into()),
        Sharding::Weights => set("parallel", "shard_weights", "true".into()),
    }
    set("parallel", "threads", choice.seating.threads.to_string());
    if let Some(mib) = recompute_mib(choice, cluster) {
        set("train", "memory_mib", mib.to_string());
    }
    if auto_precision {
        set("train", "precision", format!("\"{precision}\""));
    }
    let kept = |key: &ChosenKey| {
        let open = key.key == "precision" || !said.contains(&format!("{}.{}", key.section, key.key));
        // The number of ranks says the rest.
        open && !(key.key == "data" && said.contains("parallel.ranks"))
    };
    found.retain(kept);
    found
}

/// The keys as settings (`parallel.data=2`), with defaults for what the job leaves open and the plan does not need.
pub fn settings(keys: &[ChosenKey], open: &[&str]) -> Vec<String> {
    let mut sets: Vec<String> = keys.iter().map(|k| format!("{}.{}={}", k.section, k.key, k.value)).collect();
    let closed = |key: &str| keys.iter().any(|k| k.key == key);
    let defaults = [
        ("shard_weights", "false"),
        ("shard_gradients", "false"),
        ("microbatches", "1"),
        ("schedule", "1f1b"),
    ];
    let left = defaults.into_iter().filter(|(key, _)| open.contains(key) && !closed(key));
    sets.extend(left.map(|(key, value)| format!("parallel.{key}={value}")));
    sets
}

/// The job with such settings.
pub fn applied(job: &Job, sets: &[String]) -> Result<Job, JobErrors> {
    let origin = format!("{}.toml", job.name);
    Job::from_text(&job.to_toml(), &origin, Path::new("."), sets)
}
