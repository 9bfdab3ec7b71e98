//! What an exchange costs: by the algorithm that production chooses for it, and by what carries it.
//!
//! # Which way a group goes
//! As `collective` connects ranks:
//!
//! - Ranks of one host share memory, unless the cluster says that they use sockets. Each does its part of an exchange in its own
//!   wait: nothing goes on in the background, and nobody is done before the last one has come.
//! - The group of all ranks of a job on several hosts with several ranks each goes in two levels: memory inside hosts, and links
//!   between their first ranks.
//! - Other groups over several hosts have links between any two. A thread of each rank does the exchanges in the order in
//!   which they were started, while the rank computes.
//!
//! # Links that are shared
//! A host has one link. If eight of its ranks are in eight groups along one axis, they exchange at the same time, and each has
//! an eighth of it. This is a fixed share: a group does not get more when the others happen to be done.
//!
//! # Codes
//! A sum that travels coded takes the rounds of its codec, and the time in which the exchanging thread codes (`coding`). In shared memory nothing is
//! coded; in two levels only what goes between hosts is.
//!
//! # Memory
//! In shared memory an exchange is as long as its traffic: what a rank reads and writes of its own and of others' memory. An
//! all-reduce of `S` bytes reads and writes `S` each; the others are compared with the all-reduce that has the same traffic,
//! which is what was measured.

use polyreme_collective::links::choose::{Algorithm, Costs, FrameOp, choose, estimate};
use polyreme_graph::WireCodec;

use crate::cluster::{BetweenSpec, Cluster, InsideBy, InsideSpec};
use crate::coding::{CodedOp, times_of};

/// How the ranks of a group are connected.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum GroupWay {
    /// Common memory.
    Memory,
    /// Links between any two.
    Links(LinkWay),
    /// Memory inside hosts, links between their first ranks.
    Levels { hosts: usize, way: LinkWay },
}

/// Links as the ranks of a group see them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LinkWay {
    pub(crate) costs: Costs,
    /// Ranks of the group on one host: all of them send over its link, unless they go around a ring.
    pub(crate) per_host: usize,
    /// How much of a core an exchange takes meanwhile.
    pub(crate) core_share: f64,
    /// Whether they are the loopback interface of one host.
    pub(crate) loopback: bool,
}

/// What an exchange of a group costs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct ExchangeCost {
    /// From when the last rank has come until all are done.
    pub(crate) us: f64,
    /// Bytes that each host with ranks of the group sends over its link.
    pub(crate) link_bytes: f64,
    /// Bytes that pass the memory of a host.
    pub(crate) memory_bytes: f64,
    /// How much of a core it takes of each rank meanwhile.
    pub(crate) core_share: f64,
}

/// A collective of a program: its kind on the wire, its bytes, and whether its memory is one that other processes see.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct GroupOp {
    pub(crate) op: FrameOp,
    pub(crate) bytes: f64,
    pub(crate) visible: bool,
    /// How it travels between ranks that do not share memory, if not as it is; `bytes` are then those on the wire.
    pub(crate) coded: Option<CodedOp>,
}

impl GroupOp {
    /// The same as it is, not coded.
    fn plain(self) -> GroupOp {
        let bytes = self.coded.map_or(self.bytes, |coded| coded.numbers * size_of::<f32>() as f64);
        GroupOp { bytes, coded: None, ..self }
    }
}

/// What a message costs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct MessageCost {
    /// The sender's own time: it copies the message, and is done.
    pub(crate) copy_us: f64,
    /// How long the message occupies the way between the two.
    pub(crate) transfer_us: f64,
    /// From then until it is there.
    pub(crate) latency_us: f64,
}

/// The way of a group whose ranks are on these hosts; `whole` if it is all of the job, and `sharing` groups use each host's link.
pub(crate) fn way_of(cluster: &Cluster, hosts: &[usize], whole: bool, sharing: usize) -> GroupWay {
    let mut counts: Vec<(usize, usize)> = Vec::new();
    for host in hosts {
        match counts.iter_mut().find(|(h, _)| h == host) {
            Some((_, n)) => *n += 1,
            None => counts.push((*host, 1)),
        }
    }
    let per_host = counts.iter().map(|(_, n)| *n).max().unwrap_or(1);
    if counts.len() <= 1 {
        return match cluster.inside.by {
            InsideBy::Threads | InsideBy::Processes => GroupWay::Memory,
            InsideBy::Sockets => {
                let way = link_way(&cluster.inside.sockets, 1, 1);
                GroupWay::Links(LinkWay { loopback: true, ..way })
            }
        };
    }
    let levels = whole && per_host > 1 && cluster.inside.by != InsideBy::Sockets;
    match levels {
        true => GroupWay::Levels { hosts: counts.len(), way: link_way(&cluster.between, 1, 1) },
        false => GroupWay::Links(link_way(&cluster.between, per_host, sharing)),
    }
}

fn link_way(link: &BetweenSpec, per_host: usize, sharing: usize) -> LinkWay {
    let costs = Costs {
        latency_us: link.latency_us,
        message_us: link.message_us,
        bytes_per_us: link.bytes_per_us / sharing.max(1) as f64,
        reduce_bytes_per_us: link.reduce_bytes_per_us,
    };
    LinkWay { costs, per_host, core_share: link.core_share, loopback: false }
}

impl GroupWay {
    /// What a collective of `ranks` ranks costs on hosts of so many cores.
    pub(crate) fn cost(&self, inside: &InsideSpec, ranks: usize, cores: usize, op: GroupOp) -> ExchangeCost {
        match self {
            GroupWay::Memory => in_memory(inside, ranks, cores, op.plain()),
            GroupWay::Links(way) => over_links(inside, way, ranks, op),
            GroupWay::Levels { hosts, way } => {
                let inner = op.plain();
                let per_host = ranks.div_ceil(*hosts);
                let level = |op: FrameOp, bytes: f64| {
                    in_memory(inside, per_host, cores, GroupOp { op, bytes, visible: false, coded: None })
                };
                let (first, last) = match op.op {
                    FrameOp::AllReduce => {
                        (level(FrameOp::AllReduce, inner.bytes), level(FrameOp::Broadcast, inner.bytes))
                    }
                    FrameOp::ReduceScatter => {
                        let own = inner.bytes / *hosts as f64;
                        (level(FrameOp::AllReduce, inner.bytes), level(FrameOp::Broadcast, own))
                    }
                    FrameOp::AllGather => {
                        let own = op.bytes / *hosts as f64;
                        (level(FrameOp::AllGather, own), level(FrameOp::Broadcast, op.bytes))
                    }
                    FrameOp::Barrier => (level(FrameOp::Barrier, 0.0), level(FrameOp::Barrier, 0.0)),
                    // What does not involve all goes between any two.
                    FrameOp::Broadcast
                    | FrameOp::Reduce
                    | FrameOp::Gather
                    | FrameOp::Scatter
                    | FrameOp::AllToAll
                    | FrameOp::Send
                    | FrameOp::Receipt
                    | FrameOp::Farewell => {
                        let way = LinkWay { per_host, ..*way };
                        return over_links(inside, &way, ranks, op);
                    }
                };
                let between = over_links(inside, way, *hosts, op);
                ExchangeCost {
                    us: first.us + between.us + last.us,
                    link_bytes: between.link_bytes,
                    memory_bytes: first.memory_bytes + last.memory_bytes,
                    core_share: between.core_share,
                }
            }
        }
    }

    /// Whether exchanges go on while ranks compute.
    pub(crate) fn in_background(&self) -> bool {
        !matches!(self, GroupWay::Memory)
    }
}

/// What each rank reads and writes in shared memory.
fn traffic(op: FrameOp, ranks: f64, bytes: f64) -> f64 {
    match op {
        FrameOp::AllReduce | FrameOp::Broadcast => 2.0 * bytes,
        FrameOp::ReduceScatter | FrameOp::Reduce => bytes + bytes / ranks,
        FrameOp::AllGather | FrameOp::AllToAll | FrameOp::Gather | FrameOp::Scatter => {
            2.0 * bytes * (ranks - 1.0) / ranks
        }
        FrameOp::Send => 2.0 * bytes,
        FrameOp::Barrier | FrameOp::Receipt | FrameOp::Farewell => 0.0,
    }
}

fn in_memory(inside: &InsideSpec, ranks: usize, cores: usize, op: GroupOp) -> ExchangeCost {
    let each = traffic(op.op, ranks as f64, op.bytes);
    // Processes copy what others cannot see, once more in and once more out.
    let staged = inside.by == InsideBy::Processes && !op.visible;
    let passes = if staged { 2.0 } else { 1.0 };
    let crowd = (ranks as f64 / cores.max(1) as f64).max(1.0);
    let measured = inside.measured.as_ref().map(|calibration| &calibration.links.shared[..]);
    let us = match measured {
        // As long as the all-reduce with the same traffic.
        Some(points) => inside.meet_us.max(at_bytes(points, each * passes / 2.0)),
        None => 2.0 * inside.meet_us + each * passes / inside.bytes_per_us,
    };
    let memory_bytes = each * passes * ranks as f64;
    ExchangeCost { us: us * crowd, link_bytes: 0.0, memory_bytes, core_share: 0.0 }
}

fn over_links(inside: &InsideSpec, way: &LinkWay, ranks: usize, op: GroupOp) -> ExchangeCost {
    match op.coded {
        None => as_it_is(inside, way, ranks, op),
        Some(coded) => in_codes(inside, way, ranks, op, &coded),
    }
}

/// The rounds of a coded sum, and the coding, one after the other. A rank codes on a core of its own, and sockets take their share of one.
fn in_codes(inside: &InsideSpec, way: &LinkWay, ranks: usize, op: GroupOp, coded: &CodedOp) -> ExchangeCost {
    let scattered = op.op == FrameOp::ReduceScatter;
    let rounds: &[(FrameOp, f64)] = match (coded.codec, scattered) {
        (WireCodec::Blocks(_), true) => &[(FrameOp::AllToAll, op.bytes)],
        (WireCodec::Blocks(_), false) => &[(FrameOp::AllToAll, op.bytes), (FrameOp::AllGather, op.bytes)],
        (WireCodec::LowRank { .. }, _) => &coded.messages.map(|bytes| (FrameOp::AllReduce, bytes)),
    };
    let mut sum = ExchangeCost::default();
    for &(op, bytes) in rounds {
        let cost = as_it_is(inside, way, ranks, GroupOp { op, bytes, visible: false, coded: None });
        sum.us += cost.us;
        sum.link_bytes += cost.link_bytes;
        sum.memory_bytes += cost.memory_bytes;
    }
    let links = inside.measured.as_ref().map(|calibration| &calibration.links);
    let coding_us = coded.core_us(&times_of(coded.codec, links), ranks, scattered);
    let busy_us = sum.us * way.core_share + coding_us;
    sum.us += coding_us;
    sum.core_share = if sum.us > 0.0 { busy_us / sum.us } else { 0.0 };
    sum
}

fn as_it_is(inside: &InsideSpec, way: &LinkWay, ranks: usize, op: GroupOp) -> ExchangeCost {
    let bytes = op.bytes as usize;
    let algorithm = choose(op.op, bytes, ranks, &way.costs).algorithm;
    let effort = estimate(op.op, algorithm, bytes, ranks);
    // Around a ring only one rank of a host sends to another host.
    let senders = if algorithm == Algorithm::Ring { 1 } else { way.per_host };
    let costs = Costs { bytes_per_us: way.costs.bytes_per_us / senders as f64, ..way.costs };
    let us = effort.us(&costs);
    let factor = match (&inside.measured, way.loopback) {
        // Unless it is said to be slower than what was measured.
        (Some(calibration), true) if inside.sockets == calibration.links.loopback => {
            let points = &calibration.links.over_loopback;
            let pair = |bytes: f64| {
                let algorithm = choose(FrameOp::AllReduce, bytes as usize, 2, &way.costs).algorithm;
                estimate(FrameOp::AllReduce, algorithm, bytes as usize, 2).us(&way.costs)
            };
            at_bytes(points, op.bytes) / pair(op.bytes).max(1e-3)
        }
        _ => 1.0,
    };
    let crossing = (ranks - way.per_host) as f64 / (ranks as f64 - 1.0).max(1.0);
    let share = if algorithm == Algorithm::Ring { 1.0 } else { crossing * way.per_host as f64 };
    let (link, memory) = if way.loopback { (0.0, ranks as f64) } else { (share, 0.0) };
    ExchangeCost {
        us: us * factor,
        link_bytes: effort.sent_bytes * link,
        memory_bytes: effort.sent_bytes * memory,
        core_share: way.core_share,
    }
}

/// Interpolates times by bytes, in logarithms; outside, by the rate at the edge, but never less than the least time.
fn at_bytes(points: &[(f64, f64)], bytes: f64) -> f64 {
    let first = points[0];
    if bytes <= first.0 {
        return first.1;
    }
    let above = points.partition_point(|(b, _)| *b <= bytes);
    let low = points[above - 1];
    match points.get(above) {
        None => low.1 * bytes / low.0,
        Some(high) => {
            let t = (bytes / low.0).ln() / (high.0 / low.0).ln();
            (low.1.ln() * (1.0 - t) + high.1.ln() * t).exp()
        }
    }
}

/// What a message of so many bytes costs between ranks of one host, or of two.
pub(crate) fn message(cluster: &Cluster, same_host: bool, sharing: usize, bytes: f64) -> MessageCost {
    let inside = &cluster.inside;
    let copy_us = 2.0 * bytes / inside.bytes_per_us;
    let over = |link: &BetweenSpec, sharing: usize| MessageCost {
        copy_us,
        transfer_us: bytes * sharing.max(1) as f64 / link.bytes_per_us,
        latency_us: link.latency_us + link.message_us,
    };
    match (same_host, inside.by) {
        (false, _) => over(&cluster.between, sharing),
        (true, InsideBy::Sockets) => over(&inside.sockets, 1),
        (true, InsideBy::Threads) => MessageCost { copy_us, transfer_us: 0.0, latency_us: inside.meet_us },
        // The receiver copies it out of the sender's buffer.
        (true, InsideBy::Processes) => {
            MessageCost { copy_us, transfer_us: 0.0, latency_us: inside.meet_us + copy_us }
        }
    }
}
