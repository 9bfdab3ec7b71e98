//! Programs of local steps: what they exchange, and what they leave to each rank.

use std::sync::Arc;

use polyreme_graph::{Builder, Graph, Init, Microbatch, Moments, Optimizer, Program, differentiate};

use super::*;
use crate::mesh::Mesh;
use crate::passes::compile;
use crate::plan::{OuterStep, Plan};
use crate::schedule::schedule;

const ADAM: Training = Training {
    optimizer: Optimizer::Adam(Moments::DEFAULT),
    moments: DType::F32,
    clip: Some(1.0),
    ema: None,
    scaled: false,
};

fn step() -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [4, 16], DType::F32).unwrap();
    let w = b.param("w", [16, 16], Init::Uniform { bound: 0.5 }).unwrap();
    let y = b.linear(x, w, None).unwrap();
    let loss = b.mean(y, &[0, 1]).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

fn lower(plan: &Plan, shape: &StepShape) -> Program {
    let body = compile(&step(), plan, &ADAM, None).unwrap();
    schedule(plan, &ADAM, &[Arc::new(body)], shape)
}

fn plan(outer: Option<OuterStep>) -> Plan {
    Plan {
        mesh: Mesh::data(2),
        rank: 1,
        run_steps: 3,
        local: Some(LocalSteps { outer, drift: None, turns: None }),
        ..Plan::alone()
    }
}

#[test]
fn ranks_meet_once_after_all_steps() {
    let plan = plan(Some(OuterStep { lr: 0.7, momentum: 0.9 }));
    let program = lower(&plan, &plan.whole_step());
    let said = program.to_string();
    let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with("  ")).collect();
    let at = |what: &str| lines.iter().position(|line| line.contains(what)).expect(what);
    let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
    assert_eq!(lines[0], "weights at the last exchange 0..256 = params 0..256");
    assert_eq!([count("load"), count("judge own"), count("clip"), count("update params")], [3; 4], "{said}");
    assert_eq!(count("next step"), 2, "{said}");
    let last_update = lines.iter().rposition(|line| line.starts_with("update params")).unwrap();
    assert!(last_update < at("start"), "nothing is exchanged before the last update: {said}");
    let end = [
        "start 0: all-reduce f64 totals of steps 0..27 over data",
        "wait 0",
        "judge all steps by totals of steps 0..27",
        "start 1: all-reduce f32 params 0..256 over data: w",
        "wait 1",
        "params 0..256 /= 2",
        "outer step of params 0..256 from weights at the last exchange 0..256: rate 0.7, momentum 0.9",
    ];
    assert_eq!(lines[last_update + 1..], end);
    assert!(program.keeps_velocity());
    // What steps need one after the other is there once.
    let names: Vec<&str> = program.buffers.iter().map(|b| b.name.as_str()).collect();
    assert_eq!(names, ["totals of steps", BEFORE, "squares"]);
}

#[test]
fn plain_averages_need_no_memory_of_their_own() {
    let plan = plan(None);
    let program = lower(&plan, &plan.whole_step());
    assert!(!program.keeps_velocity() && program.buffers.iter().all(|b| b.name != BEFORE));
    assert_eq!(program.exchanges.len(), 2);
}

#[test]
fn a_step_is_that_of_a_lone_rank() {
    let plan = plan(None);
    let microbatches: Vec<_> = (0..2).map(|k| Microbatch { body: 0, first_sample: 4 * k }).collect();
    let shape = StepShape::rounds(&microbatches, 2);
    let own = lower(&plan, &shape).to_string();
    let alone =
        lower(&Plan { local: None, rank: 0, mesh: Mesh::data(1), ..plan.clone() }, &shape).to_string();
    let renamed = alone.replace("judge totals", "judge own totals").replace("totals", "totals of steps");
    assert!(own.starts_with(&renamed), "\n--- own ---\n{own}\n--- alone ---\n{renamed}");
}

#[test]
fn a_rank_without_samples_meets_the_others() {
    let plan = plan(None);
    let program = lower(&plan, &StepShape::rounds(&[], 1));
    let said = program.to_string();
    assert!(!said.contains("update") && !said.contains("run"), "{said}");
    assert_eq!(program.exchanges.len(), 2, "{said}");
}

#[test]
fn one_rank_has_no_others_to_meet() {
    let plan = Plan { mesh: Mesh::data(1), rank: 0, ..plan(None) };
    assert!(lower(&plan, &plan.whole_step()).exchanges.is_empty());
}
