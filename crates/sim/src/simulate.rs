//! From programs and a cluster to a report: places ranks on hosts, connects their groups, and lets the clock run.

use std::collections::BTreeMap;
use std::ops::Range;

use polyreme_graph::{Axis, Instr};
use thiserror::Error;

use crate::clock::{self, ChannelPlace, ClockError, ClockSeen, GroupPlace, RankPlace, Scene, ServerOrder};
use crate::cluster::Cluster;
use crate::exchange::{GroupWay, way_of};
use crate::fleet::Fleet;
use crate::report::{HostUse, RankTimeline, RankUse, SimReport};
use crate::score::{Meeting, Score};
use crate::speed::HostSpeed;
use crate::timeline::moments;

/// How ranks are placed, and what is looked at.
#[derive(Clone, PartialEq, Debug)]
pub struct SimSettings {
    /// How many ranks a host has: the first so many are on the first host.
    pub ranks_per_host: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// Whether ranks of one host slow each other down.
    pub contention: bool,
    /// How often the programs run, at least once. The time of a step is that of those after the first, if there are any: in the
    /// first one all ranks begin at the same time.
    pub runs: usize,
    /// The ranks of which a timeline is made.
    pub traced: Range<usize>,
    /// With parameter servers that apply gradients as they come: how far ranks may run ahead of the slowest, if that is bounded.
    pub staleness: Option<usize>,
}

impl Default for SimSettings {
    /// One rank of one thread on each host.
    fn default() -> SimSettings {
        SimSettings {
            ranks_per_host: 1,
            threads: 1,
            contention: true,
            runs: 2,
            traced: 0..0,
            staleness: None,
        }
    }
}

/// How many blocks each rank does where no rank waits for another: their rates are those of the second half.
const FREE_RUNS: usize = 12;

/// Why something cannot be simulated.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SimError {
    /// There are too few hosts.
    #[error("{ranks} ranks, {per_host} on each host, need {need} hosts, and the cluster has {hosts}")]
    Hosts {
        /// Ranks of the mesh.
        ranks: usize,
        /// Ranks on each host.
        per_host: usize,
        /// How many hosts they take.
        need: usize,
        /// How many there are.
        hosts: usize,
    },
    /// The programs do not fit each other.
    #[error(
        "rank {rank} calls another operation along the {axis} axis than its group; this is a bug in the lowering"
    )]
    Differs {
        /// The rank.
        rank: usize,
        /// The axis.
        axis: &'static str,
    },
    /// The programs wait for each other for ever.
    #[error("rank {rank} waits for ever for `{exchange}`; this is a bug in the lowering")]
    Stuck {
        /// The rank.
        rank: usize,
        /// What it waits for.
        exchange: String,
    },
}

/// Runs the programs of a fleet on a cluster in virtual time.
pub fn simulate(fleet: &Fleet, cluster: &Cluster, settings: &SimSettings) -> Result<SimReport, SimError> {
    let (ranks, per_host) = (fleet.of_rank.len(), settings.ranks_per_host.max(1));
    let (need, hosts) = (ranks.div_ceil(per_host), cluster.hosts.len());
    if need > hosts {
        return Err(SimError::Hosts { ranks, per_host, need, hosts });
    }
    let host_of: Vec<usize> = (0..ranks).map(|rank| rank / per_host).collect();
    let mut scores = Scores::default();
    let score_of: Vec<usize> =
        (0..ranks).map(|rank| scores.find(fleet, rank, cluster, host_of[rank], settings.threads)).collect();
    let (groups, ways, sharing) = groups(fleet, cluster, &host_of);
    let mut places: Vec<RankPlace> = (0..ranks)
        .map(|rank| RankPlace {
            score: score_of[rank],
            host: host_of[rank],
            threads: settings.threads.max(1) as f64,
            groups: [None; 4],
            channels: Vec::new(),
        })
        .collect();
    for (number, group) in groups.iter().enumerate() {
        group.members.iter().for_each(|&rank| places[rank].groups[group.axis as usize] = Some(number));
    }
    let channels = channels(fleet, &mut places, &scores.scores, &sharing);
    let is_free = fleet.plan.is_free();
    let order = match is_free {
        true => ServerOrder::Free { staleness: settings.staleness },
        false => ServerOrder::Lockstep,
    };
    let scene = Scene {
        cluster,
        scores: &scores.scores,
        ranks: places,
        groups,
        ways,
        contention: settings.contention,
        // Ranks that do not wait for each other are slow and fast for some blocks, before that shows.
        runs: settings.runs.max(if is_free { FREE_RUNS } else { 1 }),
        order,
        traced: settings.traced.start.min(ranks)..settings.traced.end.min(ranks),
    };
    let seen = clock::run(&scene, &channels).map_err(|error| match error {
        ClockError::Differs { rank, axis } => SimError::Differs { rank, axis: axis.name() },
        ClockError::Stuck(stopped) => {
            let program = &fleet.program(stopped.rank).program;
            let exchange = program.exchanges.get(stopped.exchange).map(|e| program.describe(e));
            SimError::Stuck { rank: stopped.rank, exchange: exchange.unwrap_or_default() }
        }
    })?;
    Ok(report(fleet, cluster, &scene, &seen))
}

/// Scores by program and speed of host; few speeds are different.
#[derive(Default)]
struct Scores {
    scores: Vec<Score>,
    known: Vec<(usize, usize)>,
}

impl Scores {
    fn find(&mut self, fleet: &Fleet, rank: usize, cluster: &Cluster, host: usize, threads: usize) -> usize {
        let (program, spec) = (fleet.of_rank[rank], &cluster.hosts[host]);
        let same = |(p, h): &(usize, usize)| {
            let other = &cluster.hosts[*h];
            *p == program
                && (*h == host || (other.cores == spec.cores && same_speed(&other.speed, &spec.speed)))
        };
        if let Some(at) = self.known.iter().position(same) {
            return at;
        }
        let score = Score::new(&fleet.programs[program].program, &spec.speed, threads.max(1), spec.cores);
        self.scores.push(score);
        self.known.push((program, host));
        self.scores.len() - 1
    }
}

fn same_speed(a: &HostSpeed, b: &HostSpeed) -> bool {
    match (a, b) {
        (HostSpeed::Described(a), HostSpeed::Described(b)) => a == b,
        (HostSpeed::Measured(a), HostSpeed::Measured(b)) => std::sync::Arc::ptr_eq(a, b),
        (HostSpeed::Described(_), HostSpeed::Measured(_))
        | (HostSpeed::Measured(_), HostSpeed::Described(_)) => false,
    }
}

/// By axis and host: how many groups use the host's link.
type LinkSharing = [Vec<usize>; 4];

fn groups(
    fleet: &Fleet,
    cluster: &Cluster,
    host_of: &[usize],
) -> (Vec<GroupPlace>, Vec<GroupWay>, LinkSharing) {
    let mut found: Vec<(Axis, Vec<usize>, Vec<usize>)> = Vec::new();
    let mut sharing: LinkSharing = std::array::from_fn(|_| vec![0; cluster.hosts.len()]);
    for axis in Axis::ALL.into_iter().filter(|axis| fleet.mesh.len(*axis) > 1) {
        for members in fleet.mesh.groups(axis) {
            let mut hosts: Vec<usize> = members.iter().map(|&rank| host_of[rank]).collect();
            hosts.sort_unstable();
            hosts.dedup();
            if hosts.len() > 1 {
                hosts.iter().for_each(|&host| sharing[axis as usize][host] += 1);
            }
            found.push((axis, members, hosts));
        }
    }
    let mut ways: Vec<GroupWay> = Vec::new();
    let mut groups = Vec::with_capacity(found.len());
    for (axis, members, hosts) in found {
        let of_members: Vec<usize> = members.iter().map(|&rank| host_of[rank]).collect();
        let most = hosts.iter().map(|&host| sharing[axis as usize][host]).max().unwrap_or(1);
        let way = way_of(cluster, &of_members, members.len() == host_of.len(), most);
        let number = ways.iter().position(|known| *known == way).unwrap_or_else(|| {
            ways.push(way);
            ways.len() - 1
        });
        groups.push(GroupPlace { axis, members, hosts, way: number });
    }
    (groups, ways, sharing)
}

/// The channels of all messages, and which one each exchange of each rank uses.
fn channels(
    fleet: &Fleet,
    places: &mut [RankPlace],
    scores: &[Score],
    sharing: &LinkSharing,
) -> Vec<ChannelPlace> {
    let mut channels: Vec<ChannelPlace> = Vec::new();
    let mut known: BTreeMap<(usize, usize, u8, u16), usize> = BTreeMap::new();
    let mut lines: BTreeMap<(usize, usize, u8), usize> = BTreeMap::new();
    for rank in 0..places.len() {
        let score = &scores[places[rank].score];
        let mut of_rank = vec![None; score.meetings.len()];
        for (exchange, (axis, meeting)) in score.meetings.iter().enumerate() {
            let peer = |place: usize| fleet.mesh.group(rank, *axis)[place];
            let (from, to, tag) = match *meeting {
                Meeting::Group { .. } => continue,
                Meeting::Send { to, tag, .. } => (rank, peer(to), tag),
                Meeting::Receive { from, tag } => (peer(from), rank, tag),
            };
            let number = *known.entry((from, to, *axis as u8, tag)).or_insert_with(|| {
                let n_lines = lines.len();
                let line = *lines.entry((from, to, *axis as u8)).or_insert(n_lines);
                let host = places[from].host;
                let (crosses, sharing) = (host != places[to].host, sharing[*axis as usize][host]);
                channels.push(ChannelPlace { axis: *axis, from, crosses, sharing, line });
                channels.len() - 1
            });
            of_rank[exchange] = Some(number);
        }
        places[rank].channels = of_rank;
    }
    channels
}

fn report(fleet: &Fleet, cluster: &Cluster, scene: &Scene, seen: &ClockSeen) -> SimReport {
    let steps_of = |rank: usize| {
        let instrs = &fleet.program(rank).program.instrs;
        1 + instrs.iter().filter(|instr| matches!(instr, Instr::NextStep)).count()
    };
    let per_run = (0..scene.ranks.len()).map(steps_of).max().unwrap_or(1) as f64;
    let runs = scene.runs as f64;
    let last = |run: usize| seen.ends.iter().map(|ends| ends[run]).fold(0.0, f64::max);
    let run_us = match scene.runs {
        1 => last(0),
        n => (last(n - 1) - last(0)) / (runs - 1.0),
    };
    // A step is a block of one rank, where ranks do not do every step together: in the time of one, each of them does one.
    let is_free = fleet.plan.is_free();
    let rate = |ends: &Vec<f64>| {
        let (half, last) = (scene.runs / 2, scene.runs - 1);
        (last - half) as f64 / (ends[last] - ends[half]).max(f64::MIN_POSITIVE)
    };
    let step_us = match is_free {
        true => 1.0 / seen.ends.iter().map(rate).sum::<f64>(),
        false => run_us / per_run,
    };
    // What ranks and hosts did in the time in which each rank does one.
    let round_us = if is_free { step_us * scene.ranks.len() as f64 } else { step_us };
    let steps = runs * per_run;
    let all_steps = if is_free { steps * scene.ranks.len() as f64 } else { steps };
    let rank_use = |rank: usize| RankUse {
        host: scene.ranks[rank].host,
        places: Axis::ALL.map(|axis| fleet.mesh.place(rank, axis)),
        computing_us: seen.computed[rank] / steps,
        waiting_us: seen.waited[rank].map(|us| us / steps),
        first_end_us: seen.ends[rank][0] / per_run,
        memory_bytes: fleet.program(rank).memory_bytes,
    };
    let ranks: Vec<RankUse> = (0..scene.ranks.len()).map(rank_use).collect();
    let host_use = |host: usize| HostUse {
        link_bytes: seen.link_bytes[host].map(|bytes| bytes / all_steps),
        exchanged_bytes: seen.memory_bytes[host] / all_steps,
        memory_bytes: ranks.iter().filter(|rank| rank.host == host).map(|rank| rank.memory_bytes).sum(),
    };
    let used = ranks.iter().map(|rank| rank.host + 1).max().unwrap_or(0).min(cluster.hosts.len());
    let share = |us: f64| if round_us > 0.0 { us / (round_us * ranks.len() as f64) } else { 0.0 };
    let timeline = scene.traced.clone().enumerate().map(|(k, rank)| {
        let score = &scene.scores[scene.ranks[rank].score];
        RankTimeline { rank, moments: moments(&fleet.program(rank).program, score, &seen.marks[k]) }
    });
    SimReport {
        step_us,
        waiting: share(ranks.iter().map(RankUse::waits_us).sum()),
        bubble: share(ranks.iter().map(|rank| rank.waiting_us[Axis::Stage as usize]).sum()),
        memory_bytes: ranks.iter().map(|rank| rank.memory_bytes).max().unwrap_or(0),
        hosts: (0..used).map(host_use).collect(),
        timeline: timeline.collect(),
        ranks,
    }
}
