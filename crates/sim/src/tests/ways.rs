//! Every way to split a step can be simulated, and what is found adds up.

use polyreme_graph::{Axis, BlockKind, DType, Keeps, MomentKind, Precision, Weights};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan};

use super::{adamw, cluster, fleet, gpt, on, planned};
use crate::{Fleet, InsideBy, SimReport, SimSettings, simulate};

const BLOCKS: [BlockKind; 3] = [BlockKind::Forward, BlockKind::InputGrad, BlockKind::WeightGrad];

/// Busy and waiting is all that a rank does.
fn adds_up(report: &SimReport, what: &str) {
    assert!(report.step_us.is_finite() && report.step_us > 0.0, "{what}");
    for (rank, of) in report.ranks.iter().enumerate() {
        let (busy, waits) = (of.computing_us, of.waits_us());
        assert!(busy > 0.0 && busy + waits <= report.step_us * 1.5, "{what}, rank {rank}: {of:?}");
    }
}

#[test]
fn every_mesh_over_every_way() {
    let step = gpt(4, 4);
    for (data, tensor, stage, sequence) in [
        (1, 1, 1, 1),
        (4, 1, 1, 1),
        (1, 4, 1, 1),
        (1, 1, 4, 1),
        (1, 1, 1, 4),
        (2, 2, 2, 1),
        (2, 1, 2, 2),
        (2, 2, 2, 2),
    ] {
        let mesh = Mesh { data, tensor, stage, sequence };
        let fleet = fleet(&step, &Plan { mesh, microbatches: 4, ..Plan::alone() });
        for by in [InsideBy::Threads, InsideBy::Processes, InsideBy::Sockets] {
            for per_host in [1, 2, 16] {
                let mut cluster = cluster(mesh.ranks().div_ceil(per_host));
                cluster.inside.by = by;
                let report = on(&cluster, &fleet, per_host);
                adds_up(&report, &format!("{mesh:?} {by:?} {per_host}"));
                let sent: f64 = report.hosts.iter().flat_map(|h| h.link_bytes).sum();
                assert_eq!(sent > 0.0, report.hosts.len() > 1, "{mesh:?} {per_host}: {sent}");
            }
        }
    }
}

#[test]
fn every_schedule_and_every_way_to_keep() {
    let step = gpt(8, 2);
    let mesh = Mesh { data: 1, tensor: 1, stage: 4, sequence: 1 };
    for pipeline in PipelineKind::ALL {
        let plan = Plan { mesh, pipeline, microbatches: 8, ..Plan::alone() };
        let mut training = adamw();
        if pipeline == PipelineKind::TwoBw {
            training.clip = None;
        }
        let fleet = Fleet::lower(&step, &plan, &training, &planned, None).unwrap();
        adds_up(&on(&cluster(4), &fleet, 1), pipeline.name());
    }
    let data = Plan { mesh: Mesh::data(4), microbatches: 2, ..Plan::alone() };
    let rows = [
        Plan { keeps: Keeps::OwnMoments, ..data.clone() },
        Plan { keeps: Keeps::OwnGradients, ..data.clone() },
        Plan { keeps: Keeps::OwnMoments, weights: Weights::Shared, ..data.clone() },
        Plan { shard_weights: true, ..data.clone() },
        Plan { shards: Some(8), ..data.clone() },
        Plan { precision: Precision::half(DType::Bf16), ..data.clone() },
    ];
    for plan in rows {
        let fleet = fleet(&step, &plan);
        let report = on(&cluster(4), &fleet, 1);
        adds_up(&report, &format!("{plan:?}"));
        if plan.shards.is_some() {
            assert_eq!(fleet.programs.len(), 4, "every rank has its place in the tree");
        }
    }
}

#[test]
fn ranks_that_are_alike_share_a_program() {
    let mesh = Mesh { data: 8, tensor: 4, stage: 2, sequence: 1 };
    let fleet = fleet(&gpt(4, 2), &Plan { mesh, microbatches: 2, ..Plan::alone() });
    assert_eq!((fleet.of_rank.len(), fleet.programs.len()), (64, 8));
    // What is shared is what the others would have: the times of ranks that were lowered on their own are the same.
    for rank in [5, 23, 42, 63] {
        let own = Plan { rank, ..fleet.plan.clone() };
        let body = polyreme_parallel::compile(&gpt(4, 2), &own, &adamw(), None).unwrap();
        let program =
            polyreme_parallel::schedule(&own, &adamw(), &[std::sync::Arc::new(body)], &own.whole_step());
        let shared = &fleet.program(rank).program;
        assert_eq!(program.instrs.len(), shared.instrs.len());
        assert_eq!(program.exchanges.len(), shared.exchanges.len());
        let score = |p: &polyreme_graph::Program| {
            let host = &cluster(1).hosts[0];
            let score = crate::score::Score::new(p, &host.speed, 1, 8);
            (score.acts.clone(), score.stretches.iter().map(|s| s.took.alone_us).sum::<f64>(), score.meetings)
        };
        assert_eq!(score(&program), score(shared), "rank {rank}");
    }
}

#[test]
fn a_timeline_covers_the_step() {
    let mesh = Mesh { data: 1, tensor: 1, stage: 2, sequence: 1 };
    let fleet = fleet(&gpt(4, 2), &Plan { mesh, microbatches: 4, ..Plan::alone() });
    let settings = SimSettings { traced: 0..2, runs: 1, ..SimSettings::default() };
    let report = simulate(&fleet, &cluster(2), &settings).unwrap();
    for (rank, timeline) in report.timeline.iter().enumerate() {
        let of = |kinds: &[MomentKind]| {
            let kinds = kinds.to_vec();
            timeline.moments.iter().filter(move |m| kinds.contains(&m.label.kind))
        };
        let us = |kinds: &[MomentKind]| of(kinds).map(|m| m.us).sum::<f64>();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6 * report.step_us;
        assert!(near(us(&[MomentKind::Wait]), report.ranks[rank].waits_us()));
        assert!(
            near(us(&[MomentKind::Step]), report.ranks[rank].first_end_us),
            "one step, from its beginning"
        );
        let blocks = BLOCKS.map(MomentKind::Block);
        assert!(near(us(&blocks), us(&[MomentKind::Node])), "blocks consist of their nodes");
        let mut end = 0.0;
        let apart = [MomentKind::Step, MomentKind::Node, MomentKind::Exchange];
        for moment in timeline.moments.iter().filter(|m| !apart.contains(&m.label.kind)) {
            assert!(moment.start_us >= end - 1e-6, "instructions follow each other: {moment:?} after {end}");
            end = moment.start_us + moment.us;
        }
        assert!(end <= report.step_us * (1.0 + 1e-9));
        for microbatch in 0..4 {
            for kind in blocks {
                assert!(of(&[kind]).any(|m| m.label.microbatch == Some(microbatch)), "{microbatch} {kind:?}");
            }
        }
        let messages = of(&[MomentKind::Send]).count();
        assert_eq!(
            messages,
            4 * usize::from(rank == 0) + 4 * usize::from(rank == 1),
            "one for each microbatch"
        );
        assert!(of(&[MomentKind::Update]).count() > 0);
    }
    assert!(report.waits_along(Axis::Stage) > 0.0);
}
