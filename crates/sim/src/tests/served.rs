//! Parameter servers.

use polyreme_graph::{Axis, Graph};
use polyreme_parallel::{Mesh, Plan, ServerPlan, Training};

use super::{adamw, cluster, host, mlp, planned};
use crate::{BetweenSpec, Cluster, Described, Fleet, InsideSpec, SimReport, SimSettings, simulate};

fn fleet(step: &Graph, ranks: usize, servers: usize, lockstep: bool) -> Fleet {
    let servers = Some(ServerPlan { servers, serving: 0, lockstep });
    let plan = Plan { mesh: Mesh::data(ranks), bucket_bytes: usize::MAX, servers, ..Plan::alone() };
    Fleet::lower(step, &plan, &Training { clip: None, ..adamw() }, &planned, None).unwrap()
}

fn on(cluster: &Cluster, fleet: &Fleet, staleness: Option<usize>) -> SimReport {
    let settings = SimSettings { contention: false, staleness, ..SimSettings::default() };
    simulate(fleet, cluster, &settings).unwrap()
}

/// If nothing else takes time, a step takes what the busiest link does: all gradients in and all weights out, at the same time at best and one after the
/// other at worst. A rank that has its weights sends its next gradient while others still get theirs.
#[test]
fn with_free_compute_time_is_what_links_of_servers_take() {
    let step = mlp(4);
    let free = BetweenSpec { message_us: 0.0, reduce_bytes_per_us: f64::INFINITY, ..BetweenSpec::free() };
    let link = BetweenSpec { latency_us: 10.0, bytes_per_us: 12.5, ..free };
    for (ranks, servers) in [(2, 1), (4, 1), (4, 2), (4, 4), (8, 2)] {
        let cluster =
            Cluster { inside: InsideSpec::free(), ..Cluster::of(ranks, &host(Described::free()), link) };
        let fleet = fleet(&step, ranks, servers, true);
        let report = on(&cluster, &fleet, None);
        let bytes = (fleet.program(0).program.graph().param_numel() * 4) as f64;
        let of_server = bytes / servers as f64 * (ranks - 1) as f64;
        // A rank that hosts none sends everything.
        let of_worker = bytes * if servers < ranks { 1.0 } else { (servers - 1) as f64 / servers as f64 };
        let one_way = of_server.max(of_worker) / link.bytes_per_us;
        let ways = report.step_us / one_way;
        assert!((0.999..2.06).contains(&ways), "{ranks} {servers}: {} {one_way}", report.step_us);
        if servers == 1 {
            // The last weights are out when all others have been sent, and the gradient that answers them has the link to itself.
            let by_hand = ranks as f64 * bytes / link.bytes_per_us;
            assert!((report.step_us / by_hand - 1.0).abs() < 0.03, "{ranks}: {} {by_hand}", report.step_us);
        }
        // The host of server 0 sends weights to all, and gradients to the other servers.
        let sent = report.hosts[0].link_bytes[Axis::Data as usize];
        let want = of_server + bytes * (servers - 1) as f64 / servers as f64;
        assert!((sent / want - 1.0).abs() < 0.01, "{ranks} {servers}: {sent} {want}");
    }
}

/// With one slow host, ranks that wait for nobody do more of the steps; a bound lets them run ahead no further.
#[test]
fn who_waits_for_nobody_does_more() {
    let mut hosts = cluster(4);
    hosts.hosts[3].slowness = 4.0;
    // Each rank has a quarter of the batch, or all of it.
    let lockstep = on(&hosts, &fleet(&mlp(64), 4, 4, true), None);
    let together = fleet(&mlp(256), 4, 4, false);
    let (free, bounded) = (on(&hosts, &together, None), on(&hosts, &together, Some(1)));
    assert!(free.step_us < 0.75 * lockstep.step_us, "{} {}", free.step_us, lockstep.step_us);
    assert!(bounded.step_us > 1.3 * free.step_us, "{} {}", bounded.step_us, free.step_us);
    // Where all are alike a bound costs nothing.
    let (free, bounded) = (on(&cluster(4), &together, None), on(&cluster(4), &together, Some(3)));
    assert!((bounded.step_us / free.step_us - 1.0).abs() < 0.02, "{} {}", bounded.step_us, free.step_us);
}

/// The same input gives the same times, and what ranks do between the servers is in their timelines.
#[test]
fn times_are_the_same_and_waits_are_seen() {
    let fleet = fleet(&mlp(16), 2, 2, true);
    let settings = SimSettings { threads: 2, traced: 0..2, ..SimSettings::default() };
    let once = || simulate(&fleet, &cluster(2), &settings).unwrap();
    let report = once();
    assert_eq!(format!("{:?}", once()), format!("{report:?}"));
    let waits: f64 = report.ranks.iter().map(|rank| rank.waits_us()).sum();
    assert!(waits > 0.0 && report.waiting > 0.0, "{report:?}");
    assert!(report.timeline[0].moments.iter().any(|moment| moment.us > 0.0));
}
