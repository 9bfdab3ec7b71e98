//! The clock against what is known without it: timetables of pipelines, and tables that follow a law.

use polyreme_graph::{BlockKind, DType};
use polyreme_parallel::pipeline::{self, Costs, PipelineKind, timetable};
use polyreme_parallel::{Mesh, Plan};

use super::{fleet, gpt, host, on};
use crate::calibration::{CalibrationFile, FORMAT, LinkTimes, MachineFacts, TimePoint, TimeTable};
use crate::speed::Took;
use crate::work::{Work, WorkKind, of_node};
use crate::{BetweenSpec, Calibration, CalibrationError, Cluster, Described, InsideSpec};

/// A step whose passes cost what its nodes do, and nothing else takes time, against the timetable that it was made from. A program sends
/// what the next stage waits for before the rest of a pass, so it may be earlier, and never later.
#[test]
fn pipelines_take_what_their_timetables_say() {
    let only_flops = Described { flops_per_us: 1e3, half_flops_per_us: 1e3, ..Described::free() };
    let cluster =
        Cluster { inside: InsideSpec::free(), ..Cluster::of(4, &host(only_flops), BetweenSpec::free()) };
    let step = gpt(8, 2);
    for kind in PipelineKind::ALL.into_iter().filter(|kind| *kind != PipelineKind::TwoBw) {
        let mesh = Mesh { data: 1, tensor: 1, stage: 4, sequence: 1 };
        let plan = Plan { mesh, pipeline: kind, microbatches: 8, ..Plan::alone() };
        let fleet = fleet(&step, &plan);
        let table = timetable(kind, 4, 8).unwrap();
        let mut costs = Costs::even(table.place.len(), 0.0, 0.0, 0.0);
        for stage in 0..4 {
            let body = &fleet.program(stage).program.bodies[0];
            for segment in &body.segments {
                let of = match segment.kind {
                    BlockKind::Forward => &mut costs.forward,
                    BlockKind::InputGrad => &mut costs.input,
                    BlockKind::WeightGrad => &mut costs.weight,
                };
                let works = segment.nodes.clone().flat_map(|node| of_node(body, node, None, DType::F32));
                of[segment.chunk] +=
                    works.map(|work| cluster.hosts[0].speed.took(&work, 1, 8).alone_us).sum::<f64>();
            }
        }
        let expected = pipeline::simulate(&table, &costs).unwrap();
        let report = on(&cluster, &fleet, 1);
        let share = report.ranks.iter().map(|rank| rank.first_end_us).fold(0.0, f64::max) / expected.makespan;
        assert!((0.8..1.0 + 1e-9).contains(&share), "{}: {share}", kind.name());
        // Whatever the order, a stage computes what it computes.
        for (stage, idle) in expected.idle.iter().enumerate() {
            let busy = expected.makespan - idle;
            assert!((report.ranks[stage].computing_us - busy).abs() < 1e-6 * busy, "stage {stage}");
        }
    }
}

fn file(us: impl Fn([f64; 3], usize) -> f64) -> CalibrationFile {
    let sizes = [8.0, 64.0, 512.0];
    let table = |kind: WorkKind, threads: usize, crowded: bool| {
        let grid = sizes.into_iter().flat_map(|a| sizes.map(|b| [a, b]));
        let grid = grid.flat_map(|[a, b]| sizes.map(|c| [a, b, c]));
        let point = |at: [f64; 3]| TimePoint {
            sizes: at,
            amount: 2.0 * at.iter().product::<f64>(),
            us: us(at, threads) * if crowded { 3.0 } else { 1.0 },
        };
        TimeTable { kind, half: false, threads, crowded, points: grid.map(point).collect() }
    };
    let tables = WorkKind::ALL
        .into_iter()
        .flat_map(|kind| [table(kind, 1, false), table(kind, 4, false), table(kind, 1, true)]);
    let machine = MachineFacts {
        name: "a machine".into(),
        isa: "some".into(),
        cores: 4,
        memory_bytes: 1e9,
        date: "2026-11-18".into(),
    };
    let points = vec![(64.0, 2.0), (1e6, 200.0)];
    let links = LinkTimes {
        meet_us: 1.0,
        shared: points.clone(),
        loopback: BetweenSpec::new(10.0, 16.0),
        over_loopback: points,
        unevenness: 0.0,
        codecs: Vec::new(),
    };
    CalibrationFile { format: FORMAT, machine, tables: tables.collect(), links }
}

/// A law of powers is a plane in logarithms, and so is interpolated exactly.
#[test]
fn tables_are_interpolated() {
    let law = |[a, b, c]: [f64; 3], threads: usize| {
        1e-2 * a.powf(0.9) * b.powf(0.8) * c.powf(0.95) / (threads as f64).powf(0.7)
    };
    let text = serde_json::to_string(&file(law)).unwrap();
    let calibration = Calibration::parse(&text).unwrap();
    let work = |sizes: [f64; 3]| {
        let flops = 2.0 * sizes.iter().product::<f64>();
        Work { kind: WorkKind::Product, half: true, flops, bytes: 0.0, sizes, joined: false }
    };
    for sizes in [[8.0, 8.0, 8.0], [512.0, 64.0, 8.0], [100.0, 30.0, 17.0], [509.0, 9.0, 333.0]] {
        for threads in [1, 2, 3, 4, 9] {
            let Took { alone_us, crowded_us } = calibration.took(&work(sizes), threads);
            let expected = law(sizes, threads.min(4));
            assert!((alone_us / expected - 1.0).abs() < 1e-9, "{sizes:?} {threads}: {alone_us} {expected}");
            let crowd = if threads < 4 { 3.0 * law(sizes, 1).max(alone_us / 3.0) } else { alone_us };
            assert!((crowded_us / crowd - 1.0).abs() < 1e-9, "{sizes:?} {threads}: {crowded_us} {crowd}");
        }
    }
    // Outside, the rate at the edge counts, and no op takes less than the fastest one.
    let twice = calibration.took(&work([1024.0, 512.0, 512.0]), 1).alone_us;
    assert!((twice / (2.0 * law([512.0; 3], 1)) - 1.0).abs() < 1e-9);
    assert_eq!(calibration.took(&work([1.0; 3]), 1).alone_us, law([8.0; 3], 1));
}

#[test]
fn a_calibration_with_holes_is_refused() {
    let mut missing = file(|_, _| 1.0);
    missing.tables.retain(|table| table.kind != WorkKind::Pool);
    let refused = |file: CalibrationFile| Calibration::new(file).unwrap_err().to_string();
    assert!(refused(missing).contains("Pool"));
    let mut hole = file(|_, _| 1.0);
    hole.tables[0].points.remove(5);
    assert!(refused(hole).contains("Product with 1 threads"));
    let mut nothing = file(|_, _| 1.0);
    nothing.tables[0].points[3].us = f64::NAN;
    assert!(refused(nothing).contains("no usable times"));
    assert!(matches!(Calibration::parse("{}"), Err(CalibrationError::Syntax(_))));
    assert!(matches!(Calibration::parse("{\"format\": 7}"), Err(CalibrationError::Format(7))));
}
