//! What `polyreme status` is told.

use polyreme_net::members::{MemberRow, Office};
use serde_json::{Value, json};

/// How things stand, for programs.
pub(super) fn status(office: &Office) -> Value {
    let coordinator = office.coordinator();
    let (generation, ranks) = coordinator.generation();
    let row = |MemberRow { id, rank, host, pid, step, own }: MemberRow| {
        let speed = (own.busy_us > 0).then(|| own.samples as f64 * 1e6 / own.busy_us as f64);
        json!({
            "member": id, "rank": rank, "host": host, "pid": pid, "step": step,
            "samples_per_step": own.samples, "samples_per_s": speed,
        })
    };
    let tally = coordinator.tally.summary();
    let ms = |us: u64| us as f64 / 1e3;
    json!({
        "coordinator_pid": std::process::id(),
        "generation": generation,
        "ranks": ranks.len(),
        "trains": coordinator.trains(),
        "transport": coordinator.shares_memory().map(|shared| if shared { "shm" } else { "tcp" }),
        "waits_for": coordinator.waits().map(ToString::to_string),
        "members": office.rows().into_iter().map(row).collect::<Vec<_>>(),
        "ranks_lost": tally.ranks_lost,
        "ranks_joined": tally.ranks_joined,
        "steps_redone": tally.steps_redone,
        "stall_ms_p50": ms(tally.stall_us_p50),
        "stall_ms_p99": ms(tally.stall_us_p99),
        "stall_ms_max": ms(tally.stall_us_max),
    })
}
