//! Sums that travel coded, and steps that ranks take by themselves.

use polyreme_collective::links::choose::{Costs, FrameOp, choose};
use polyreme_graph::{Axis, BlockCodec, WireCodec};
use polyreme_parallel::{LocalSteps, Mesh, Plan};

use super::{cluster, fleet, gpt, host, mlp, on};
use crate::coding::{CodedOp, times_of};
use crate::{BetweenSpec, Cluster, Described, InsideSpec};

/// Hosts that compute in no time, with links of this bandwidth.
fn links(ranks: usize, gbits: f64) -> Cluster {
    let free = BetweenSpec { message_us: 0.0, reduce_bytes_per_us: f64::INFINITY, ..BetweenSpec::free() };
    let link = BetweenSpec { latency_us: 50.0, bytes_per_us: gbits * 125.0, ..free };
    Cluster { inside: InsideSpec::free(), ..Cluster::of(ranks, &host(Described::free()), link) }
}

fn coded(ranks: usize, wire: Option<WireCodec>) -> Plan {
    Plan { mesh: Mesh::data(ranks), bucket_bytes: usize::MAX, wire, ..Plan::alone() }
}

/// What a coded sum takes is its two rounds and the coding of every number.
#[test]
fn a_coded_sum_takes_its_rounds_and_its_codes() {
    let step = mlp(4);
    for (ranks, gbits) in [(2, 0.1), (4, 1.0), (8, 100.0)] {
        for codec in BlockCodec::ALL {
            let wire = WireCodec::Blocks(codec);
            let fleet = fleet(&step, &coded(ranks, Some(wire)));
            let report = on(&links(ranks, gbits), &fleet, 1);
            let (latency_us, bytes_per_us) = (50.0, gbits * 125.0);
            let costs =
                Costs { latency_us, message_us: 0.0, bytes_per_us, reduce_bytes_per_us: f64::INFINITY };
            let program = &fleet.program(0).program;
            let (mut by_hand, mut sent) = (0.0, 0.0);
            for exchange in &program.exchanges {
                let n = program.len_of(&exchange.of);
                if exchange.coding.is_none() {
                    by_hand += choose(FrameOp::AllReduce, n * exchange.dtype.bytes(), ranks, &costs).us;
                    continue;
                }
                let bytes = codec.coded_len(n);
                by_hand += [FrameOp::AllToAll, FrameOp::AllGather]
                    .map(|op| choose(op, bytes, ranks, &costs).us)
                    .iter()
                    .sum::<f64>();
                sent += 2.0 * bytes as f64 * (ranks - 1) as f64 / ranks as f64;
                let times = times_of(wire, None);
                let decoded = 2.0 - 1.0 / ranks as f64;
                by_hand += n as f64 * (times.encode_us + decoded * times.decode_us);
            }
            assert!(
                (report.step_us - by_hand).abs() < 1e-6 * by_hand,
                "{codec:?}: {} {by_hand}",
                report.step_us
            );
            let link = report.hosts[0].link_bytes[Axis::Data as usize];
            assert!(sent > 0.0 && link >= sent && link < 1.05 * sent + 1000.0, "{codec:?}: {link} {sent}");
        }
    }
}

/// On slow links a format gains, on fast ones it loses; factors send least.
#[test]
fn formats_gain_where_links_are_slow() {
    let step = gpt(4, 4);
    let us = |gbits: f64, wire: Option<WireCodec>| {
        let fleet = fleet(&step, &coded(4, wire));
        on(&links(4, gbits), &fleet, 1).step_us
    };
    let int8 = Some(WireCodec::Blocks(BlockCodec::Int8));
    let topk = Some(WireCodec::Blocks(BlockCodec::TopK { ppm: 10_000 }));
    let factors = Some(WireCodec::LowRank { rank: 2 });
    let plain = us(0.05, None);
    assert!(us(0.05, int8) < 0.4 * plain && us(0.05, factors) < us(0.05, int8), "{plain}");
    assert!(us(400.0, topk) > us(400.0, None) && us(400.0, factors) > us(400.0, None));
    // In shared memory nothing is coded.
    let memory = |wire: Option<WireCodec>| {
        let plan = coded(4, wire).kept(Some(polyreme_graph::Keeps::All), false);
        on(&cluster(1), &fleet(&step, &plan), 4).step_us
    };
    assert_eq!(memory(int8).to_bits(), memory(None).to_bits());
}

#[test]
fn one_that_is_estimated_is_not_above_one_that_is_lowered() {
    let program = fleet(&gpt(2, 4), &coded(2, Some(WireCodec::LowRank { rank: 2 })));
    let program = &program.program(0).program;
    let coding = program
        .exchanges
        .iter()
        .find_map(|exchange| Some((exchange.coding.as_ref()?, program.len_of(&exchange.of))));
    let (coding, numbers) = coding.unwrap();
    let known = CodedOp::new(coding, numbers);
    let least = CodedOp::at_least(known.codec, numbers as f64);
    assert!(known.wire_bytes() > 0.0 && least.wire_bytes() <= known.wire_bytes());
    assert!(known.in_matrices > 0.0 && known.in_matrices <= numbers as f64);
}

/// A step that ranks take by themselves is that of a lone rank, and a part of one exchange of the weights.
#[test]
fn local_steps_share_an_exchange() {
    let step = mlp(16);
    let hosts = cluster(4);
    let us = |every: usize| {
        let plan = Plan {
            mesh: Mesh::data(4),
            local: Some(LocalSteps { outer: None, drift: None, turns: None }),
            run_steps: every,
            ..Plan::alone()
        };
        let report = on(&hosts, &fleet(&step, &plan), 1);
        (report.step_us, report.hosts[0].link_bytes[Axis::Data as usize])
    };
    let ((one, sent), (ten, tenth), (many, _)) = (us(1), us(10), us(100));
    let alone = on(&cluster(1), &fleet(&step, &Plan::alone()), 1).step_us;
    let exchange = (one - many) / 0.99;
    assert!((ten - (many + exchange * 0.09)).abs() < 0.02 * one, "{one} {ten} {many}");
    assert!(many > 0.9 * alone && many < 1.1 * alone, "{many} {alone}");
    assert!((tenth / sent - 0.1).abs() < 0.01, "{tenth} {sent}");
}
