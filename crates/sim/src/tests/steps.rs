//! What must hold of every step, whatever the numbers are.

use polyreme_collective::links::choose::{Costs, FrameOp, choose};
use polyreme_graph::{Axis, Collective};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan};
use proptest::prelude::*;

use super::{cluster, fleet, gpt, host, mlp, on};
use crate::{BetweenSpec, Cluster, Described, Fleet, InsideSpec, SimSettings, simulate};

#[test]
fn a_data_parallel_step_with_free_links_never_grows_with_ranks() {
    let step = mlp(16);
    let buckets = [usize::MAX, 1 << 20, 1 << 16];
    let mut last = [f64::INFINITY; 3];
    for (ranks, (k, bucket_bytes)) in
        [1, 2, 4, 8, 16].into_iter().flat_map(|n| buckets.into_iter().enumerate().map(move |b| (n, b)))
    {
        let plan = Plan { mesh: Mesh::data(ranks), bucket_bytes, ..Plan::alone() };
        let fleet = fleet(&step, &plan);
        let links = Cluster::of(ranks, &host(Described::default()), BetweenSpec::free());
        let report = on(&Cluster { inside: InsideSpec::free(), ..links }, &fleet, 1);
        assert!(
            report.step_us > 0.0 && report.step_us <= last[k] * (1.0 + 1e-9),
            "{ranks}: {} {last:?}",
            report.step_us
        );
        last[k] = report.step_us;
    }
}

#[test]
fn with_free_compute_time_is_what_the_algorithms_take() {
    let step = mlp(4);
    for (ranks, gbits, latency_us) in [(2, 1.0, 100.0), (4, 0.1, 1000.0), (8, 100.0, 5.0), (6, 10.0, 20.0)] {
        let plan = Plan { mesh: Mesh::data(ranks), bucket_bytes: usize::MAX, ..Plan::alone() };
        let fleet = fleet(&step, &plan);
        let free = BetweenSpec { message_us: 0.0, reduce_bytes_per_us: f64::INFINITY, ..BetweenSpec::free() };
        let link = BetweenSpec { latency_us, bytes_per_us: gbits * 125.0, ..free };
        let cluster =
            Cluster { inside: InsideSpec::free(), ..Cluster::of(ranks, &host(Described::free()), link) };
        let report = on(&cluster, &fleet, 1);
        let costs = Costs {
            latency_us,
            message_us: 0.0,
            bytes_per_us: gbits * 125.0,
            reduce_bytes_per_us: f64::INFINITY,
        };
        let program = &fleet.program(0).program;
        let mut bytes = 0;
        let each = program.exchanges.iter().map(|exchange| {
            assert_eq!(exchange.op, Collective::AllReduce);
            bytes = program.len_of(&exchange.of) * exchange.dtype.bytes();
            choose(FrameOp::AllReduce, bytes, ranks, &costs).us
        });
        let expected: f64 = each.sum();
        assert!((report.step_us - expected).abs() < 1e-6 * expected, "{} {expected}", report.step_us);
        // And by hand: whatever the algorithm, no rank sends less than twice all chunks but one.
        let sent = report.hosts[0].link_bytes[Axis::Data as usize];
        let least = 2.0 * (program.graph().param_numel() * 4 * (ranks - 1) / ranks) as f64;
        assert!(sent >= least && report.step_us >= least / link.bytes_per_us, "{sent} {least}");
        if (ranks, gbits) == (4, 0.1) {
            // A ring: six rounds of gradients. The norm is everybody's own; the totals go to all at once, and back.
            let grads = bytes as f64;
            let by_hand = 6.0 * latency_us + 1.5 * grads / link.bytes_per_us;
            assert!((report.step_us - by_hand) / by_hand < 0.02, "{} {by_hand}", report.step_us);
        }
    }
}

fn staged(pipeline: PipelineKind, microbatches: usize) -> Fleet {
    let mesh = Mesh { data: 1, tensor: 1, stage: 4, sequence: 1 };
    fleet(&gpt(8, 2), &Plan { mesh, pipeline, microbatches, ..Plan::alone() })
}

#[test]
fn zero_bubble_idles_less_than_1f1b_which_takes_less_memory_than_gpipe() {
    let cluster = cluster(4);
    let [gpipe, one, zero] = [PipelineKind::Gpipe, PipelineKind::OneFOneB, PipelineKind::ZbH1]
        .map(|kind| on(&cluster, &staged(kind, 8), 1));
    assert!(zero.bubble < one.bubble, "{} {}", zero.bubble, one.bubble);
    assert!(zero.step_us < one.step_us, "{} {}", zero.step_us, one.step_us);
    assert!(one.memory_bytes < gpipe.memory_bytes, "{} {}", one.memory_bytes, gpipe.memory_bytes);
    // The bubble of 1F1B is (s - 1) / (m + s - 1) of the time if stages are even and messages free: 3 / 11.
    assert!((0.15..0.45).contains(&one.bubble), "{}", one.bubble);
    let more = on(&cluster, &staged(PipelineKind::OneFOneB, 32), 1);
    assert!(more.bubble < one.bubble, "more microbatches fill the pipeline: {} {}", more.bubble, one.bubble);
}

#[test]
fn the_same_input_gives_the_same_output() {
    let mesh = Mesh { data: 2, tensor: 2, stage: 2, sequence: 1 };
    let plan = Plan { mesh, microbatches: 4, ..Plan::alone() };
    let settings = SimSettings { ranks_per_host: 4, threads: 2, traced: 0..8, ..SimSettings::default() };
    let once = || {
        let report = simulate(&fleet(&gpt(4, 2), &plan), &cluster(2), &settings).unwrap();
        (format!("{report:?}"), report)
    };
    let (text, report) = once();
    assert_eq!(once().0, text);
    // Whether somebody watches makes no difference.
    let untraced = SimSettings { traced: 0..0, ..settings };
    let unwatched = simulate(&fleet(&gpt(4, 2), &plan), &cluster(2), &untraced).unwrap();
    assert_eq!((unwatched.step_us.to_bits(), &unwatched.ranks), (report.step_us.to_bits(), &report.ranks));
}

#[test]
fn one_slow_host_shows() {
    let mesh = Mesh { data: 4, tensor: 1, stage: 2, sequence: 1 };
    let fleet = fleet(&gpt(4, 2), &Plan { mesh, microbatches: 4, ..Plan::alone() });
    let usual = on(&cluster(8), &fleet, 1);
    let mut slow = cluster(8);
    slow.hosts[3].slowness = 3.0;
    let slow = on(&slow, &fleet, 1);
    assert!(slow.step_us > 1.5 * usual.step_us, "{} {}", slow.step_us, usual.step_us);
    let waits = |rank: usize| slow.ranks[rank].waits_us();
    assert!((0..8).filter(|r| *r != 3).all(|r| waits(r) > waits(3)), "all wait for it");
    assert!(slow.ranks[3].computing_us > 2.5 * usual.ranks[3].computing_us);
}

#[test]
fn ranks_of_one_host_slow_each_other_down() {
    let fleet = fleet(&mlp(64), &Plan { mesh: Mesh::data(4), ..Plan::alone() });
    let mut few = cluster(1);
    few.hosts[0].cores = 2;
    let settings = SimSettings { ranks_per_host: 4, ..SimSettings::default() };
    let crowded = simulate(&fleet, &few, &settings).unwrap();
    let alone = simulate(&fleet, &few, &SimSettings { contention: false, ..settings }).unwrap();
    assert!(
        crowded.ranks[0].computing_us > 1.99 * alone.ranks[0].computing_us,
        "two take turns on each core"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is slower: a link, a host, a core.
    #[test]
    fn nothing_slower_makes_a_plan_faster(
        kind in 0usize..5,
        per_host in prop::sample::select(vec![1usize, 2, 4]),
        latency_us in 1.0f64..200.0,
        gbits in 0.1f64..100.0,
        slower in 1.0f64..4.0,
        slow_host in 0usize..2,
    ) {
        let plans = plans();
        let fleet = &plans[kind];
        let link = BetweenSpec::new(latency_us, gbits);
        let speed = Described::default();
        let hosts = 8 / per_host;
        let of = |speed: Described, link: BetweenSpec| Cluster::of(hosts, &host(speed), link);
        let usual = on(&of(speed, link), fleet, per_host).step_us;
        let mut slow = of(speed, link);
        slow.hosts[slow_host.min(hosts - 1)].slowness = slower;
        let others = [
            of(speed, BetweenSpec { latency_us: latency_us * slower, ..link }),
            of(speed, BetweenSpec { bytes_per_us: link.bytes_per_us / slower, ..link }),
            of(Described { flops_per_us: speed.flops_per_us / slower, ..speed }, link),
            of(Described { core_bytes_per_us: speed.core_bytes_per_us / slower, ..speed }, link),
            slow,
        ];
        for (k, other) in others.iter().enumerate() {
            let us = on(other, fleet, per_host).step_us;
            prop_assert!(us >= usual * (1.0 - 1e-9), "{k}: {us} against {usual}");
        }
    }
}

/// Five ways to use eight ranks.
fn plans() -> &'static [Fleet] {
    static PLANS: std::sync::OnceLock<Vec<Fleet>> = std::sync::OnceLock::new();
    PLANS.get_or_init(|| {
        let mesh = |data, tensor, stage, sequence| Mesh { data, tensor, stage, sequence };
        let zero = PipelineKind::ZbH1;
        let rows = [
            (mesh(8, 1, 1, 1), PipelineKind::OneFOneB, 1),
            (mesh(2, 2, 2, 1), PipelineKind::OneFOneB, 4),
            (mesh(2, 1, 4, 1), zero, 8),
            (mesh(2, 4, 1, 1), zero, 2),
            (mesh(2, 2, 1, 2), zero, 1),
        ];
        let step = gpt(4, 2);
        let fleet = |(mesh, pipeline, microbatches)| {
            super::fleet(&step, &Plan { mesh, pipeline, microbatches, ..Plan::alone() })
        };
        rows.into_iter().map(fleet).collect()
    })
}
