//! Whether a job fits into memory: what it takes, by the memory plan, before anything is reserved.
//!
//! Counted is what every run reserves and touches: parameters, gradients, optimizer state, the values of steps and of
//! evaluations, which share their memory, what parameter servers hold and what goes to them, averaged weights, the copies that a checkpoint is written from and what it is
//! gathered in, and batches that are read ahead. What the process has before training begins (its code, data that are held
//! in memory) comes on top of it in what a run says of itself ([`Prepared::expected_bytes`]). Pages of files that are mapped
//! are not counted: they are the system's cache, which it takes back when somebody needs memory. What would make a job fit
//! stands in `advice`.

use std::fmt;
use std::sync::Arc;

use polyreme_data::{Dataset, Spec};
use polyreme_exec::{Comms, Engine, Footprint, loan_copies};
use polyreme_graph::{Axis, Body, Collective, DType, Keeps, Program};
use polyreme_parallel::Plan;

use super::advice::Advice;
use super::prepared::Prepared;
use super::servers::served_bytes;
use crate::checkpoint::WRITER_BYTES;
use crate::error::TrainError;
use crate::evaluate::EVALUATION_PREFETCH;
use crate::judge::{Trial, block_samples};
use crate::lower::training_graph;
use crate::pace::{RankShare, StepKind};
use crate::record::thousands;
use crate::starting::StartingWeights;

/// Bytes of an element of parameters, moments, states and features.
const F32_BYTES: usize = DType::F32.bytes();

/// Of so many ranks each is counted for itself; of more, all are taken to be like the last one, which has the least.
const RANKS_COUNTED: usize = 16;

/// How the ranks of a job lie in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lodging {
    /// Ranks of this host.
    pub here: usize,
    /// Whether they are threads of one process.
    pub threads: bool,
    /// Whether all ranks of the job see each other's memory, and so hold some of it together.
    pub shared: bool,
    /// Whether what bounds a group of processes bounds all ranks of this host together.
    pub together: bool,
    /// Whether the user may choose how many ranks there are, and what the flag is called.
    pub flag: Option<&'static str>,
}

impl Lodging {
    /// All ranks are threads of one process.
    pub fn threads(ranks: usize) -> Lodging {
        Lodging { here: ranks, threads: true, shared: true, together: true, flag: Some("--ranks") }
    }
}

/// Bytes that a job takes, but for what the process has before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Need {
    /// All ranks of this host together.
    pub host: usize,
    /// The largest process, with what it shares.
    pub mapped: usize,
    /// The largest process, without that.
    pub private: usize,
    /// What a group of processes that are bounded together takes: all of this host, or one.
    pub group: usize,
}

/// What a limit bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// All processes of the host.
    Host,
    /// A group of processes.
    Group,
    /// The address space of one process.
    Mapped,
    /// Memory of one process that no other sees.
    Private,
}

/// A bound on memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limit {
    /// What it bounds.
    pub scope: Scope,
    /// How much.
    pub bytes: usize,
    /// Who says so, as `this machine has`.
    pub by: String,
}

/// A job that does not fit.
#[derive(Clone, PartialEq, Debug)]
pub struct TooLarge {
    /// What it takes.
    pub need: Need,
    /// The limit that it exceeds by most.
    pub limit: Limit,
    /// What would fit.
    pub advice: Advice,
}

impl Need {
    /// What counts for a limit.
    pub fn of(&self, scope: Scope) -> usize {
        match scope {
            Scope::Host => self.host,
            Scope::Group => self.group,
            Scope::Mapped => self.mapped,
            Scope::Private => self.private,
        }
    }

    /// The limit that this exceeds by most.
    pub fn exceeds<'a>(&self, limits: &'a [Limit]) -> Option<&'a Limit> {
        let over = |limit: &Limit| self.of(limit.scope).saturating_sub(limit.bytes);
        limits.iter().filter(|limit| over(limit) > 0).max_by_key(|limit| over(limit))
    }
}

impl Prepared {
    /// Refuses a job that cannot run within `limits`, and says what could. Returns what it certainly takes.
    pub fn fit(&self, lodging: Lodging, limits: &[Limit]) -> Result<Need, TrainError> {
        if let Some(turn) = self.turns_at {
            // What follows a change of `parallel.sync` has to fit too.
            self.clone().at_step(turn)?.fit(lodging, limits)?;
        }
        let need = self.need(lodging)?;
        let Some(limit) = need.exceeds(limits) else { return Ok(need) };
        let advice = Advice::new(self, lodging, limits, need)?;
        Err(TrainError::TooLarge(Box::new(TooLarge { need, limit: limit.clone(), advice })))
    }

    /// What the job certainly takes.
    pub(super) fn need(&self, lodging: Lodging) -> Result<Need, TrainError> {
        let Lodging { here, threads, shared, together, .. } = lodging;
        let (ranks, options) = (self.ranks(), self.rank_options(if threads { here } else { 1 }));
        // By place in a copy of the model: the memory of an evaluation, and what it has on its way to other stages.
        let trial = |rank: usize| -> Result<Option<(Footprint, usize)>, TrainError> {
            let Some(set) = self.evaluated() else { return Ok(None) };
            let program = self.trial_program(set.spec(), rank)?;
            let footprint = Engine::footprint(&program, self.threads, self.learner.isa);
            Ok(Some((footprint, sent_bytes(&program))))
        };
        let each = self.mesh().replica_ranks();
        let trials = (0..each).map(trial).collect::<Result<Vec<_>, _>>()?;
        // By kinds of steps: what a rank takes for itself, and what of that others see.
        let mut seen: Vec<(RankKind, [usize; 3])> = Vec::new();
        // By place in a copy of the model, and samples.
        let mut bodies: Vec<((usize, usize), Arc<Body>)> = Vec::new();
        let n_sums = self.sums_of_ranks().map_or(1, |sums| sums.counts.iter().sum());
        let mut of_rank = |rank: usize| -> Result<[usize; 3], TrainError> {
            let part = RankShare::new(self.pace, &self.cut, self.data_rank(rank));
            let lens = |kind: &StepKind| kind.microbatches.iter().map(|p| p.len).collect::<Vec<_>>();
            let mut lens: Vec<Vec<usize>> = part.kinds().iter().map(lens).collect();
            // What a rank gets of the sums of logical shards is as long as its part of the gradients.
            if self.cut.shards.is_some() {
                lens.push(vec![rank]);
            }
            // Averages are rank 0's.
            let servers = self.learner.plan.servers.map_or(0, |plan| plan.servers);
            let kind = (rank == 0, rank % self.mesh().replica_ranks(), rank.min(servers), lens);
            if let Some((_, bytes)) = seen.iter().find(|(known, _)| *known == kind) {
                return Ok(*bytes);
            }
            let lowering = options.lowering(rank, shared);
            let mut most = [0; 3];
            for kind in part.kinds() {
                let runs = self.cut.shard_runs();
                let program = lowering.step_program(kind, runs.as_deref(), &mut |n| {
                    let which = (rank % self.mesh().replica_ranks(), n);
                    if let Some((_, body)) = bodies.iter().find(|(known, _)| *known == which) {
                        return Ok(body.clone());
                    }
                    let body = lowering.body(&training_graph(&self.net, &self.spec, n, options.loss)?)?;
                    bodies.push((which, body.clone()));
                    Ok(body)
                })?;
                let bytes = lowering.rank_bytes_at_least(&program, shared && !threads);
                // An evaluation has the memory of a step's values, and what it needs beyond.
                let of_step = Engine::footprint(&program, self.threads, self.learner.isa);
                let beyond = trials[rank % each].map_or(0, |(trial, sent)| {
                    trial.activations.saturating_sub(of_step.activations)
                        + trial.inputs.saturating_sub(of_step.inputs)
                        + sent
                });
                let beyond = beyond + served_bytes(&program, rank, n_sums, self.learner.plan.elastic);
                most = std::array::from_fn(|i| most[i].max(bytes[i] + beyond));
            }
            seen.push((kind, most));
            Ok(most)
        };
        let last = of_rank(ranks - 1)?;
        let mut all = vec![last; here.max(1)];
        if here == ranks && ranks <= RANKS_COUNTED {
            for (rank, bytes) in all.iter_mut().enumerate() {
                *bytes = of_rank(rank)?;
            }
        }
        // Which ranks are here is known if all are.
        let sharded = options.lowering(0, shared).plan.keeps != Keeps::All;
        for (k, bytes) in all.iter_mut().enumerate() {
            let groups = if shared { Comms::staging_bytes(self.mesh()) } else { 0 };
            let more = groups + self.beside_engine(if here == ranks { k } else { ranks - 1 }, sharded)?;
            bytes.iter_mut().for_each(|bytes| *bytes += more);
        }
        let host = all.iter().map(|[host, ..]| host).sum();
        let most = |k: usize| all.iter().map(|bytes| bytes[k]).max().unwrap_or(0);
        let (mapped, private) = if threads { (host, host) } else { (most(1), most(2)) };
        Ok(Need { host, mapped, private, group: if together { host } else { private } })
    }

    /// What the training of one process takes by the plan: what `train.memory_mib` bounds.
    pub(super) fn plan_bytes(&self, lodging: Lodging) -> Result<usize, TrainError> {
        let local = if lodging.threads { lodging.here } else { 1 };
        let lowering = self.rank_options(local).lowering(self.ranks() - 1, lodging.shared);
        let graph = training_graph(&self.net, &self.spec, self.micro(), self.learner.loss)?;
        Ok(local * lowering.rank_bytes(&lowering.program(&graph)?))
    }

    /// What a run takes on this host: what [`Prepared::fit`] counts, and what the process had before. All ranks are taken to be
    /// threads of one process.
    pub fn expected_bytes(&self) -> Result<usize, TrainError> {
        Ok(self.need(Lodging::threads(self.ranks()))?.host + self.process_bytes)
    }

    /// What a rank has beside the memory of its engine: batches that are read ahead, on the first rank of its data axis what is
    /// gathered for checkpoints, and on rank 0 averaged weights and what writes them. Checkpoints are gathered when no evaluation runs.
    fn beside_engine(&self, rank: usize, sharded: bool) -> Result<usize, TrainError> {
        let batches = self.training_batches(rank);
        let evaluated = self.evaluated().map_or(Ok(0), |set| self.evaluated_batches(set.as_ref()))?;
        if self.data_rank(rank) > 0 {
            return Ok(batches + evaluated);
        }
        let Copies { kept, gathered } = self.copies(sharded)?;
        Ok(batches + if rank == 0 { kept } else { 0 } + evaluated.max(gathered))
    }

    /// Batches of training that are full or being filled, and the one that is used.
    fn training_batches(&self, rank: usize) -> usize {
        let part = RankShare::new(self.pace, &self.cut, self.data_rank(rank));
        let of_a_step = part.microbatches(0).iter().filter(|microbatch| microbatch.len > 0).count() as u64;
        let all = self.pace.total_steps(self.job.train.length).saturating_mul(of_a_step);
        let batches = (self.job.data.prefetch as u64 + 1).min(all) as usize;
        batches.saturating_mul(part.lengths()[0] * sample_bytes(&self.spec))
    }

    /// The same of an evaluation.
    fn evaluated_batches(&self, set: &dyn Dataset) -> Result<usize, TrainError> {
        let block = block_samples(&self.net, set.spec())?;
        let batches = (EVALUATION_PREFETCH + 1).min(set.len().div_ceil(block).div_ceil(self.mesh().data));
        Ok(batches * block.min(set.len()) * sample_bytes(set.spec()))
    }

    /// What rank 0 has of weights, moments and states beside its engine's.
    fn copies(&self, sharded: bool) -> Result<Copies, TrainError> {
        // Two samples: statistics of one make no sense.
        let graph = training_graph(&self.net, &self.spec, 2, self.learner.loss)?;
        let floats = |stored: &[polyreme_graph::graph::Stored]| -> usize {
            stored.iter().map(|s| graph.shape(s.value).numel()).sum()
        };
        let (params, states) = (floats(&graph.params), floats(&graph.states));
        let (averaged, optimizer) =
            (usize::from(self.learner.training.ema.is_some()) * params, self.learner.training.optimizer);
        let kept_of = |s: &polyreme_graph::graph::Stored| -> usize {
            let dims = optimizer.state_dims(graph.shape(s.value).dims());
            dims.iter().flatten().map(|dims| dims.iter().product::<usize>()).sum()
        };
        let moments: usize = graph.params.iter().map(kept_of).sum();
        let ranks = self.ranks();
        // Weights and moments of a lone rank are lent to whoever writes them, as they are stored; other ranks' are copied as f32.
        let moment_bytes = self.learner.training.moments.bytes();
        let plan = &self.learner.plan;
        let largest =
            graph.params.iter().map(|s| F32_BYTES * graph.shape(s.value).numel()).max().unwrap_or(0);
        let apart = plan.mesh.replica_ranks() > 1 || plan.shard_place().is_some();
        let kept = match ranks {
            // Blocks of tensors are gathered from where they are: one that is asked for, one that is packed, and one on its way.
            _ if apart => 3 * largest.min(WRITER_BYTES),
            1 => loan_copies(F32_BYTES * (params + averaged) + moment_bytes * moments),
            _ => F32_BYTES * (params + moments + averaged),
        } + F32_BYTES * states;
        // What codes have lost on each rank, gathered.
        let kept =
            kept + if plan.wire.is_some() && ranks > 1 { F32_BYTES * plan.mesh.data * params } else { 0 };
        // What the optimizer keeps on each rank, where they take steps by themselves, and its own parameters; and the velocity of outer steps.
        let kept = kept
            + match plan.local_steps() {
                Some(local) => {
                    let own = graph.params.iter().filter(|p| p.learning.own);
                    let own: usize = own.map(|p| graph.shape(p.value).numel()).sum();
                    F32_BYTES
                        * (plan.mesh.data * (moments + own) + usize::from(local.outer.is_some()) * params)
                }
                None => 0,
            };
        let gathers = plan.mesh.data > 1 && sharded && optimizer.by_element() && moments > 0;
        let gathers = gathers && plan.shard_place().is_none();
        let moments_of_all = match (gathers, apart) {
            (false, _) => 0,
            // One kind after the other, into what is written.
            (true, false) => moment_bytes * params,
            // All of them, until the writer has asked for the last, and one as it arrives.
            (true, true) => F32_BYTES * (moments + params) / plan.mesh.replica_ranks(),
        };
        let states_of_all = if ranks > 1 && self.cut.shards.is_none() { plan.mesh.data * states } else { 0 };
        // Weights to start from are read as a whole, before there is anything to save.
        let started =
            if StartingWeights::of(&self.job.model).is_some() { F32_BYTES * (params + states) } else { 0 };
        Ok(Copies {
            kept: kept.max(started) + WRITER_BYTES.min(F32_BYTES * params),
            gathered: moments_of_all + F32_BYTES * states_of_all,
        })
    }

    fn trial_program(&self, spec: &polyreme_data::Spec, rank: usize) -> Result<Program, TrainError> {
        let n = block_samples(&self.net, spec)?;
        let plan = Plan { rank, ..self.learner.plan.clone() };
        let (program, _) = Trial::new(&self.net, spec, n, self.learner.loss.kind, &plan)?;
        Ok(program)
    }
}

/// What decides how much a rank takes: whether it is rank 0, its place in its copy of the model, which server is beside it if there is one,
/// and the microbatches of its kinds of steps.
type RankKind = (bool, usize, usize, Vec<Vec<usize>>);

/// Bytes that rank 0 has of what the run learns, beside its engine.
struct Copies {
    /// From the first checkpoint on.
    kept: usize,
    /// While one is gathered.
    gathered: usize,
}

/// What a rank has sent to other stages and they have not looked at yet, at the end of a program.
fn sent_bytes(program: &Program) -> usize {
    let sent = program
        .exchanges
        .iter()
        .filter(|exchange| exchange.axis == Axis::Stage && matches!(exchange.op, Collective::Send { .. }));
    sent.map(|exchange| program.wire_bytes(exchange, program.len_of(&exchange.of))).sum()
}

/// What a sample takes in a batch.
fn sample_bytes(spec: &Spec) -> usize {
    let label_bytes = spec.n_labels() * DType::I32.bytes();
    // Ids are as long as numbers.
    spec.features.numel() * F32_BYTES + label_bytes
}

/// Bytes as whole MiB, rounded up.
pub(super) fn mib(bytes: usize) -> String {
    format!("{} MiB", thousands(bytes.div_ceil(1 << 20) as u64))
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Limit { scope, bytes, by } = &self.limit;
        let whose = match scope {
            Scope::Host => "on this host",
            Scope::Group => "in this control group",
            Scope::Mapped | Scope::Private => "in one process",
        };
        let room = thousands((bytes >> 20) as u64);
        let need = mib(self.need.of(*scope));
        write!(f, "the job does not fit: it takes at least {need} {whose}, and {by} {room} MiB")?;
        self.advice.write(f, *scope)
    }
}

impl std::error::Error for TooLarge {}
