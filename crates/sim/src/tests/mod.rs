//! Tests of the whole simulator on described clusters.

mod coding;
mod files;
mod scale;
mod search;
mod served;
mod steps;
mod twins;
mod ways;

use polyreme_graph::{DType, Graph, MemoryPlan, Moments, Optimizer, Program, differentiate};
use polyreme_nn::model::Gpt;
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::{Plan, Training};

use crate::{BetweenSpec, Cluster, Described, Fleet, HostSpec, HostSpeed, SimReport, SimSettings, simulate};

fn step_of(model: &Model, batch: usize) -> Graph {
    let forward = model.trace(&TraceOptions::training(batch)).unwrap();
    differentiate(&forward, forward.output("loss").unwrap()).unwrap()
}

fn mlp(batch: usize) -> Graph {
    step_of(&Model::by_name("mlp").unwrap(), batch)
}

/// A small transformer.
fn gpt(layers: usize, batch: usize) -> Graph {
    step_of(&Model::Gpt(Gpt { vocab: 64, width: 64, heads: 4, layers, context: 32, dropout: 0.0 }), batch)
}

fn adamw() -> Training {
    let optimizer = Optimizer::AdamW(Moments::DEFAULT);
    Training { optimizer, moments: DType::F32, clip: Some(1.0), scaled: false, ema: None }
}

fn host(speed: Described) -> HostSpec {
    let speed = HostSpeed::Described(speed);
    HostSpec { cores: 8, memory_bytes: 64e9, process_bytes: f64::INFINITY, speed, slowness: 1.0, price: None }
}

/// Ordinary hosts with ordinary links.
fn cluster(hosts: usize) -> Cluster {
    Cluster::of(hosts, &host(Described::default()), BetweenSpec::new(20.0, 10.0))
}

/// What a program takes without the scratch space of kernels.
fn planned(program: &Program) -> usize {
    let plan = |body: &std::sync::Arc<polyreme_graph::Body>| {
        let scratch = vec![0; body.graph.nodes.len()];
        let plan = MemoryPlan::new(&body.graph, &scratch, &body.segments);
        plan.total_bytes() + (program.slots - 1) * (plan.arena_bytes + plan.input_bytes)
    };
    program.bodies.iter().map(plan).max().unwrap()
}

fn fleet(step: &Graph, plan: &Plan) -> Fleet {
    Fleet::lower(step, plan, &adamw(), &planned, None).unwrap()
}

/// A plan on a cluster, with this many ranks on each host, without contention.
fn on(cluster: &Cluster, fleet: &Fleet, ranks_per_host: usize) -> SimReport {
    let settings = SimSettings { ranks_per_host, contention: false, ..SimSettings::default() };
    simulate(fleet, cluster, &settings).unwrap()
}
