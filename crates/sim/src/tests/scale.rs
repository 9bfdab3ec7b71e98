//! Thousands of ranks.

use std::time::Instant;

use polyreme_nn::Model;
use polyreme_nn::model::Gpt;
use polyreme_parallel::{Mesh, Plan};

use super::{adamw, cluster, step_of};
use crate::{Fleet, SimSettings, simulate};

/// A transformer of 24 layers on 4,096 ranks, every one with a clock of its own. In a release build on one core this must take less
/// than 10 s, lowering included; tests are built with checks.
#[test]
fn four_thousand_ranks_take_seconds() {
    let began = Instant::now();
    let gpt = Gpt { vocab: 50_304, width: 2048, heads: 16, layers: 24, context: 1024, dropout: 0.0 };
    let step = step_of(&Model::Gpt(gpt), 1);
    let mesh = Mesh { data: 64, tensor: 8, stage: 8, sequence: 1 };
    let plan = Plan { mesh, microbatches: 16, ..Plan::alone() };
    let fleet = Fleet::lower(&step, &plan, &adamw(), &|_| 0, None).unwrap();
    let lowered = began.elapsed();
    let settings = SimSettings { ranks_per_host: 8, threads: 1, runs: 1, ..SimSettings::default() };
    let mut hosts = cluster(512);
    let usual = simulate(&fleet, &hosts, &settings).unwrap();
    let once = began.elapsed();
    assert_eq!((usual.ranks.len(), fleet.programs.len()), (4096, 32));
    hosts.hosts[100].slowness = 2.0;
    let slow = simulate(&fleet, &hosts, &settings).unwrap();
    assert!(slow.step_us > 1.3 * usual.step_us, "one slow host shows: {} {}", slow.step_us, usual.step_us);
    println!("lowered in {lowered:?}, simulated after {once:?}, step {} ms", usual.step_us / 1e3);
    assert!(once.as_secs() < 60, "{lowered:?} {once:?}");
}
