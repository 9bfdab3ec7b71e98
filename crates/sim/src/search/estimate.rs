//! How long a choice would take at best, from a few lowered steps: thousands of choices are compared for the price of a dozen.
//!
//! # What is lowered
//! One rank's whole step for each number of samples, and for one number of samples a rank's part along the tensor axis and along
//! the sequence axis, for each number of ranks there. Everything else is put together from these:
//!
//! ```text
//!  nodes(tensor t, sequence q, samples n) = nodes(n) x nodes(t) / nodes(1) x nodes(q) / nodes(1)
//!  a microbatch on a stage                = (nodes + exchanges along tensor and sequence) / stages
//!  a step                                 = (microbatches + (stages - 1) x bubble of the schedule) x that
//!                                           + update + gradients that are not summed while something is computed
//! ```
//!
//! # What it is good for
//! The estimate leaves out what only a simulation knows: stages of different length, messages that are waited for, ranks in each
//! other's way. So it is mostly too low, and a choice whose estimate is far above a time that was simulated has lost. It
//! orders the rest: what is simulated first is the best by this estimate.

use std::collections::BTreeMap;

use polyreme_collective::links::choose::FrameOp;
use polyreme_graph::{Axis, DType, Program};
use polyreme_parallel::pipeline::{PipelineKind, timetable};
use polyreme_parallel::stage::{chunk_costs, flops, place_by_name};
use polyreme_parallel::{Mesh, Plan, Updates, choose_cuts};

use super::candidates::PlanChoice;
use super::question::{Question, Seating, Sharding};
use crate::cluster::Cluster;
use crate::coding::CodedOp;
use crate::exchange::{GroupOp, GroupWay, message, way_of};
use crate::fleet::Fleet;
use crate::score::{Meeting, PartOf, Score, meeting};
use crate::speed::Took;

/// What it takes to lower a node of a body, and to go through it on a rank of a simulation.
const LOWERED_NODE_US: f64 = 40.0;
const RANK_NODE_US: f64 = 0.02;

/// What a lowered step is: parts along tensor and sequence, samples, precision.
type StepKey = (usize, usize, usize, usize);

/// Steps that were lowered to estimate by, and why some could not be.
pub(crate) struct Steps<'q> {
    question: &'q Question<'q>,
    /// The number of samples for which parts along tensor and sequence are compared.
    usual: usize,
    programs: BTreeMap<StepKey, Result<Program, String>>,
    /// Their times with so many threads, on the cluster that is looked at.
    times: BTreeMap<(StepKey, usize), StepTimes>,
    /// By axis: what is exchanged along it in a step, and how often.
    exchanged: BTreeMap<(StepKey, u8), Vec<(Exchanged, f64)>>,
    /// By stages and schedule: how much longer the longest stage takes than the mean, or why there is no such pipeline.
    stages: BTreeMap<(usize, &'static str), Result<f64, String>>,
    /// What a microbatch of the usual samples sends from stage to stage, in one pass.
    handed: Option<f64>,
    /// By ranks of a group, the distance between them and ranks of a host: how they are connected.
    ways: BTreeMap<(usize, usize, usize, bool), AxisLink>,
}

/// What is exchanged, apart from with whom.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Exchanged {
    Group(GroupOp),
    Sent { bytes: f64 },
}

/// What a lowered step takes on a host.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct StepTimes {
    /// Forward and backward pass.
    nodes_us: f64,
    /// What they take more while the other cores of the host are busy, as a factor.
    crowd: f64,
    /// The rest: updates, mostly.
    update_us: f64,
}

/// What a choice would take at best.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// The time of a step.
    pub step_us: f64,
    /// What a rank takes at least: its parameters, gradients and optimizer state.
    pub state_bytes: f64,
}

impl<'q> Steps<'q> {
    pub(crate) fn new(question: &'q Question<'q>) -> Steps<'q> {
        let usual = question.least_samples.max(2).min(question.batch.max(1));
        Steps {
            question,
            usual,
            programs: BTreeMap::new(),
            times: BTreeMap::new(),
            exchanged: BTreeMap::new(),
            stages: BTreeMap::new(),
            handed: None,
            ways: BTreeMap::new(),
        }
    }

    /// Another cluster is looked at: the programs stay.
    pub(super) fn forget_times(&mut self) {
        self.times.clear();
        self.ways.clear();
    }

    /// How the groups along an axis are connected.
    fn link(&mut self, choice: &PlanChoice, axis: Axis, cluster: &Cluster) -> AxisLink {
        let (mesh, seating) = (&choice.mesh, &choice.seating);
        let group = mesh.group(0, axis);
        let stride = group.get(1).map_or(1, |second| second - group[0]);
        let key = (group.len(), stride, seating.ranks_per_host, group.len() == mesh.ranks());
        *self.ways.entry(key).or_insert_with(|| AxisLink::new(mesh, axis, seating, cluster))
    }

    /// A lone copy of the model whose matrices or sequences are split, as lowered.
    fn program(&mut self, key: StepKey) -> &Result<Program, String> {
        let question = self.question;
        self.programs.entry(key).or_insert_with(|| {
            let (tensor, sequence, samples, precision) = key;
            let plan = Plan {
                mesh: Mesh { data: 1, tensor, stage: 1, sequence },
                microbatches: 1,
                shards: None,
                updates: Updates::AtEnd,
                shard_weights: false,
                cuts: Vec::new(),
                servers: None,
                precision: question.precisions[precision].1.clone(),
                ..question.base.clone()
            };
            let step = (question.step)(samples)?;
            let fleet =
                Fleet::lower(&step, &plan, &question.training, &|_| 0, None).map_err(|e| e.to_string())?;
            Ok(Program::clone(&fleet.programs[0].program))
        })
    }

    /// Why a copy of the model cannot be split so, if it cannot.
    pub(super) fn refusal(&mut self, choice: &PlanChoice) -> Option<String> {
        let (usual, mesh) = (self.usual, choice.mesh);
        let tensor = self.program((mesh.tensor, 1, usual, 0)).as_ref().err().cloned();
        let sequence = tensor.or_else(|| self.program((1, mesh.sequence, usual, 0)).as_ref().err().cloned());
        sequence.or_else(|| self.imbalance(choice).err())
    }

    /// A plan that only has the stages of a choice.
    fn staged(&self, stage: usize, pipeline: PipelineKind) -> Plan {
        let mesh = Mesh { stage, ..Mesh::data(1) };
        let microbatches = self.question.base.shards.unwrap_or(stage);
        Plan {
            mesh,
            pipeline,
            microbatches,
            shards: None,
            shard_weights: false,
            ..self.question.base.clone()
        }
    }

    /// How much longer the longest stage takes than the mean, by operations.
    fn imbalance(&mut self, choice: &PlanChoice) -> Result<f64, String> {
        let (stage, kind) = (choice.mesh.stage, choice.schedule);
        if stage == 1 {
            return Ok(1.0);
        }
        if let Some(known) = self.stages.get(&(stage, kind.name())) {
            return known.clone();
        }
        let find = || -> Result<f64, String> {
            let plan = self.staged(stage, kind);
            let step = (self.question.step)(self.usual)?;
            let cost = flops(&step);
            let names = choose_cuts(&step, &plan, &cost, None).map_err(|e| e.to_string())?;
            let chunks = place_by_name(&step, &names).map_err(|e| e.to_string())?;
            let place = timetable(kind, stage, plan.microbatches)?.place;
            let mut loads = vec![0.0; stage];
            for (chunk, load) in chunk_costs(&step, &chunks, &cost).into_iter().enumerate() {
                loads[place[chunk]] += load;
            }
            let most = loads.iter().copied().fold(0.0, f64::max);
            Ok(most * stage as f64 / loads.iter().sum::<f64>().max(f64::MIN_POSITIVE))
        };
        let found = find();
        self.stages.insert((stage, kind.name()), found.clone());
        found
    }

    /// The bytes of a microbatch of the usual samples that go from stage to stage in one pass.
    fn handed(&mut self) -> f64 {
        if let Some(bytes) = self.handed {
            return bytes;
        }
        let question = self.question;
        let find = || -> Result<f64, String> {
            let plan = Plan { cuts: Vec::new(), ..self.staged(2, PipelineKind::OneFOneB) };
            let step = (question.step)(self.usual)?;
            let fleet =
                Fleet::lower(&step, &plan, &question.training, &|_| 0, None).map_err(|e| e.to_string())?;
            let program = &fleet.programs[0].program;
            let sent = (0..program.exchanges.len()).filter_map(|n| match meeting(program, n) {
                (Axis::Stage, Meeting::Send { bytes, .. }) => Some(bytes),
                _ => None,
            });
            Ok(sent.fold(0.0, f64::max))
        };
        let bytes = find().unwrap_or(0.0);
        self.handed = Some(bytes);
        bytes
    }

    fn times(&mut self, key: StepKey, cluster: &Cluster, seating: &Seating) -> Result<StepTimes, String> {
        if let Some(times) = self.times.get(&(key, seating.threads)) {
            return Ok(*times);
        }
        let host = &cluster.hosts[0];
        let program = self.program(key).as_ref().map_err(Clone::clone)?;
        let score = Score::new(program, &host.speed, seating.threads, host.cores);
        let mut times = StepTimes::default();
        for part in &score.parts {
            match part.what {
                PartOf::Node { .. } => times.nodes_us += part.alone_us,
                PartOf::Instr(_) => times.update_us += part.alone_us,
            }
        }
        let sum = |of: fn(&Took) -> f64| score.stretches.iter().map(|s| of(&s.took)).sum::<f64>();
        let (alone, crowded) = (sum(|took| took.alone_us), sum(|took| took.crowded_us));
        times.crowd = if alone > 0.0 { crowded / alone } else { 1.0 };
        self.times.insert((key, seating.threads), times);
        Ok(times)
    }

    /// What a lowered step exchanges along an axis, each thing once, with how often.
    fn exchanged(&mut self, key: StepKey, axis: Axis) -> Result<&[(Exchanged, f64)], String> {
        let mut found: Vec<(Exchanged, f64)> = Vec::new();
        if !self.exchanged.contains_key(&(key, axis as u8)) {
            let program = self.program(key).as_ref().map_err(Clone::clone)?;
            let meetings = (0..program.exchanges.len()).map(|number| meeting(program, number));
            for (_, meeting) in meetings.filter(|(a, _)| *a == axis) {
                let what = match meeting {
                    Meeting::Group { op, .. } => Exchanged::Group(op),
                    Meeting::Send { bytes, .. } => Exchanged::Sent { bytes },
                    Meeting::Receive { .. } => continue,
                };
                match found.iter_mut().find(|(known, _)| *known == what) {
                    Some((_, n)) => *n += 1.0,
                    None => found.push((what, 1.0)),
                }
            }
        }
        Ok(self.exchanged.entry((key, axis as u8)).or_insert(found))
    }

    /// What the exchanges of a microbatch along the tensor or the sequence axis take, on a copy of the model without stages: those of
    /// activations, and those of gradients.
    fn exchanges_us(
        &mut self,
        axis: Axis,
        choice: &PlanChoice,
        cluster: &Cluster,
        samples: usize,
    ) -> Result<[f64; 2], String> {
        let (parts, usual) = (choice.mesh.len(axis), self.usual);
        if parts == 1 {
            return Ok([0.0; 2]);
        }
        // The other axis cuts what is exchanged, too.
        let (key, other) = match axis {
            Axis::Tensor => ((parts, 1, usual, choice.precision), choice.mesh.sequence),
            Axis::Sequence | Axis::Data | Axis::Stage => {
                ((1, parts, usual, choice.precision), choice.mesh.tensor)
            }
        };
        let scale = samples as f64 / usual as f64 / other as f64;
        let link = self.link(choice, axis, cluster);
        let mut us = [0.0; 2];
        for (what, n) in self.exchanged(key, axis)? {
            match *what {
                // Along the sequence axis gradients are summed: as many, however many samples there are.
                Exchanged::Group(op) if axis == Axis::Sequence => {
                    us[1] += n * link.group_us(cluster, parts, op)
                }
                Exchanged::Group(op) => {
                    us[0] += n * link.group_us(cluster, parts, GroupOp { bytes: op.bytes * scale, ..op });
                }
                // Blocks of a ring travel while others are computed.
                Exchanged::Sent { bytes } => {
                    us[0] += n * message(cluster, !link.crosses, link.sharing, bytes * scale).copy_us;
                }
            }
        }
        Ok(us)
    }

    /// What messages between stages add to a step: those of the first and the last microbatch are waited for, and all are copied.
    fn messages_us(&mut self, choice: &PlanChoice, cluster: &Cluster, samples: usize) -> f64 {
        let stages = choice.mesh.stage as f64;
        if choice.mesh.stage == 1 {
            return 0.0;
        }
        let bytes = self.handed() * samples as f64 / self.usual as f64 / choice.mesh.sequence as f64;
        let link = self.link(choice, Axis::Stage, cluster);
        let cost = message(cluster, !link.crosses, link.sharing, bytes);
        let chunks = choice.schedule.chunks_per_stage() as f64;
        let rounds = choice.rounds(self.question) as f64;
        let waited = cost.copy_us + cost.transfer_us + cost.latency_us;
        2.0 * chunks * ((stages - 1.0) * waited + (rounds - 1.0) * cost.copy_us)
    }

    /// What a choice would take at best; or why it cannot be.
    pub(crate) fn estimate(&mut self, choice: &PlanChoice, cluster: &Cluster) -> Result<Estimate, String> {
        let (question, mesh, seating) = (self.question, choice.mesh, choice.seating);
        let (samples, usual, precision) = (choice.samples(question), self.usual, choice.precision);
        let whole = self.times((1, 1, samples, precision), cluster, &seating)?;
        let one = self.times((1, 1, usual, precision), cluster, &seating)?;
        let by_tensor = self.times((mesh.tensor, 1, usual, precision), cluster, &seating)?;
        let by_sequence = self.times((1, mesh.sequence, usual, precision), cluster, &seating)?;
        let share = by_tensor.nodes_us / one.nodes_us * by_sequence.nodes_us / one.nodes_us;
        let hosts = &cluster.hosts[..seating.hosts.min(cluster.hosts.len())];
        let slowness = hosts.iter().map(|host| host.slowness).fold(1.0, f64::max);
        let busy = seating.ranks_per_host > 1 && seating.ranks_per_host * seating.threads >= hosts[0].cores;
        let turns = (seating.ranks_per_host * seating.threads) as f64 / hosts[0].cores as f64;
        let crowd = if busy { whole.crowd * turns.max(1.0) } else { 1.0 };
        let nodes_us = whole.nodes_us * share * slowness * crowd;
        let [by_tensor_us, tensor_sums_us] = self.exchanges_us(Axis::Tensor, choice, cluster, samples)?;
        let [by_sequence_us, sequence_sums_us] =
            self.exchanges_us(Axis::Sequence, choice, cluster, samples)?;
        let exchanges_us = by_tensor_us + by_sequence_us;
        let stages = mesh.stage as f64;
        let each_us = (nodes_us + exchanges_us) / stages;
        let rounds = choice.rounds(question) as f64;
        // The first microbatch goes through all stages and back before its last weight gradient is computed.
        let through = stages * 2.0 / 3.0 + 1.0 / 3.0;
        let longest = self.imbalance(choice)?;
        let passes_us = (rounds * longest + (stages - 1.0) * bubble(choice.schedule)).max(through) * each_us
            + self.messages_us(choice, cluster, samples);

        // Parameters, as they are split.
        let params = self.params(mesh.tensor, precision)? / stages;
        let data = mesh.data as f64;
        // Ranks that send codes, or take steps by themselves, keep everything.
        let whole_each =
            question.base.wire.is_some() || question.base.local.is_some() || question.base.servers.is_some();
        let parted = match choice.sharding {
            Sharding::Usual => choice.shares_memory(cluster) && !whole_each,
            Sharding::Nothing => false,
            Sharding::Optimizer | Sharding::Gradients | Sharding::Weights => true,
        };
        let update_us = by_tensor.update_us * slowness / stages / if parted { data } else { 1.0 };
        let link = self.link(choice, Axis::Data, cluster);
        let bytes = params * DType::F32.bytes() as f64;
        let coded = question.base.wire.map(|codec| CodedOp::at_least(codec, params));
        let bytes = coded.map_or(bytes, |coded| coded.wire_bytes());
        let gradients = GroupOp { op: FrameOp::AllReduce, bytes, visible: true, coded };
        let sums = |op: FrameOp| match mesh.data {
            1 => 0.0,
            n => link.group_us(cluster, n, GroupOp { op, ..gradients }),
        };
        // Over links, gradients are summed while the last microbatch goes back; in memory, ranks stop for it.
        let local = question.base.local.is_some();
        let hidden_us = if link.crosses && !local { each_us * 2.0 / 3.0 } else { 0.0 };
        let sums_us = rounds * ((tensor_sums_us + sequence_sums_us) / stages - each_us * 2.0 / 3.0).max(0.0);
        let data_us = sums_us
            + match choice.sharding {
                // Servers update, and what goes to them and back is hidden as far as is known here.
                _ if question.base.servers.is_some() => 0.0,
                // Weights, after some steps.
                _ if local => sums(FrameOp::AllReduce) / question.base.run_steps.max(1) as f64,
                Sharding::Weights => {
                    // Weights are gathered for every microbatch, ahead of their use; small ones are not sharded.
                    let gathered = rounds * sums(FrameOp::AllGather) + sums(FrameOp::ReduceScatter);
                    (gathered - if link.crosses { passes_us / 2.0 } else { 0.0 }).max(0.0)
                }
                Sharding::Usual | Sharding::Nothing | Sharding::Optimizer | Sharding::Gradients => {
                    match parted {
                        true => {
                            (sums(FrameOp::ReduceScatter) - hidden_us).max(0.0)
                        // Who shares memory shares the weights too.
                        + if choice.shares_memory(cluster) { 0.0 } else { sums(FrameOp::AllGather) }
                        }
                        false => (sums(FrameOp::AllReduce) - hidden_us).max(0.0),
                    }
                }
            };
        let moments = (question.training.optimizer.n_states() * question.training.moments.bytes()) as f64;
        let four = DType::F32.bytes() as f64;
        let state_bytes = params
            * match choice.sharding {
                Sharding::Usual if !parted => 2.0 * four + moments,
                Sharding::Nothing => 2.0 * four + moments,
                // Weights are shared, or everybody has them.
                Sharding::Usual => four + (four + moments) / data,
                Sharding::Optimizer => 2.0 * four + moments / data,
                Sharding::Gradients => four + (four + moments) / data,
                Sharding::Weights => (2.0 * four + moments) / data,
            };
        let step_us = match question.base.servers {
            None => passes_us + update_us + data_us,
            Some(servers) if servers.lockstep => passes_us,
            // In the time of one, each rank does one.
            Some(_) => passes_us / data,
        };
        Ok(Estimate { step_us, state_bytes })
    }

    /// About how many microseconds it takes to lower and simulate a choice.
    pub(super) fn effort(&mut self, choice: &PlanChoice) -> f64 {
        let (usual, mesh) = (self.usual, &choice.mesh);
        let nodes = self.program((1, 1, usual, 0)).as_ref().map_or(0, |p| p.graph().nodes.len()) as f64;
        let bodies = mesh.stage * mesh.sequence * mesh.tensor.min(2);
        let rounds = choice.rounds(self.question) * choice.schedule.chunks_per_stage();
        nodes * bodies as f64 * LOWERED_NODE_US
            + (mesh.ranks() * rounds) as f64 * nodes / mesh.stage as f64 * RANK_NODE_US
    }

    /// Parameters of a tensor rank.
    fn params(&mut self, tensor: usize, precision: usize) -> Result<f64, String> {
        let usual = self.usual;
        let program = self.program((tensor, 1, usual, precision)).as_ref().map_err(Clone::clone)?;
        Ok(program.graph().param_numel() as f64)
    }
}

/// How much of a microbatch's time on a stage passes idle for each stage but one.
fn bubble(schedule: PipelineKind) -> f64 {
    match schedule {
        PipelineKind::Gpipe | PipelineKind::OneFOneB => 1.0,
        PipelineKind::Interleaved { chunks } => 1.0 / chunks as f64,
        // A third: backward passes are in two halves, one of which fills gaps.
        PipelineKind::ZbH1 => 1.0 / 3.0,
        PipelineKind::ZbV | PipelineKind::TwoBw => 0.0,
    }
}

/// How the groups along an axis of a mesh are connected: all of them alike, as ranks are numbered regularly.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisLink {
    way: GroupWay,
    /// Whether they go from host to host.
    pub(super) crosses: bool,
    /// Groups that use the link of a host.
    sharing: usize,
    cores: usize,
}

impl AxisLink {
    pub(super) fn new(mesh: &Mesh, axis: Axis, seating: &Seating, cluster: &Cluster) -> AxisLink {
        let per_host = seating.ranks_per_host.max(1);
        let hosts: Vec<usize> = mesh.group(0, axis).into_iter().map(|rank| rank / per_host).collect();
        let here = hosts.iter().filter(|host| **host == hosts[0]).count().max(1);
        let crosses = here < hosts.len();
        let sharing = if crosses { (per_host / here).max(1) } else { 1 };
        let way = way_of(cluster, &hosts, hosts.len() == mesh.ranks(), sharing);
        AxisLink { way, crosses, sharing, cores: cluster.hosts[0].cores }
    }

    fn group_us(&self, cluster: &Cluster, ranks: usize, op: GroupOp) -> f64 {
        self.way.cost(&cluster.inside, ranks, self.cores, op).us
    }
}
