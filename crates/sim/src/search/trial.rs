//! One choice, lowered as a run would be and simulated: whether it fits, and how long a step takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_graph::Graph;

use super::candidates::PlanChoice;
use super::question::Question;
use crate::cluster::{Cluster, InsideBy};
use crate::fleet::Fleet;
use crate::report::SimReport;
use crate::simulate::{SimSettings, simulate};

/// What of a host's memory a run may have: the rest is the system's, and the page cache's.
const USABLE: f64 = 0.95;
/// With more ranks, one step is simulated: that all begin it together changes little where so many wait for each other anyway.
const RANKS_OF_TWO_STEPS: usize = 256;

/// A plan that fits, with its times.
#[derive(Clone, Debug)]
pub struct FoundPlan {
    /// The plan.
    pub choice: PlanChoice,
    /// What was simulated.
    pub report: SimReport,
    /// What the largest process takes.
    pub process_bytes: usize,
    /// Where stages are cut, and the rest of what was chosen when it was lowered.
    pub fleet: Arc<Fleet>,
}

/// Why a choice is not among the plans.
#[derive(Clone, PartialEq, Debug)]
pub enum LostBy {
    /// The model cannot be split so.
    Refused(String),
    /// It takes more memory than there is, whatever is computed a second time.
    Memory {
        /// What a host or a process needs at least.
        needs: f64,
        /// What it has.
        has: f64,
    },
    /// A step takes at least this long, which is too long.
    Bound {
        /// The time.
        step_us: f64,
    },
}

/// Graphs by samples, each traced once.
pub(super) struct Graphs<'q> {
    question: &'q Question<'q>,
    known: BTreeMap<usize, Graph>,
}

impl<'q> Graphs<'q> {
    pub(super) fn new(question: &'q Question<'q>) -> Graphs<'q> {
        Graphs { question, known: BTreeMap::new() }
    }

    fn of(&mut self, samples: usize) -> Result<&Graph, String> {
        if !self.known.contains_key(&samples) {
            self.known.insert(samples, (self.question.step)(samples)?);
        }
        Ok(&self.known[&samples])
    }

    /// Lowers a choice and simulates it. Activations are computed a second time if it would not fit otherwise.
    pub(super) fn attempt(&mut self, choice: &PlanChoice, cluster: &Cluster) -> Result<FoundPlan, LostBy> {
        let question = self.question;
        if question.base.wire.is_some() && choice.shares_memory(cluster) && choice.mesh.ranks() > 1 {
            let why = "`parallel.wire` is for ranks that are connected by a network, and these share memory";
            return Err(LostBy::Refused(why.into()));
        }
        if let Some(servers) = question.base.servers.filter(|plan| plan.servers > choice.mesh.ranks()) {
            let why = format!(
                "`parallel.servers` of {} for {} ranks: a rank hosts one server at most; use fewer, or more ranks",
                servers.servers,
                choice.mesh.ranks()
            );
            return Err(LostBy::Refused(why));
        }
        let room = Room::new(question, cluster, choice);
        let lower = |graphs: &mut Graphs, budget: Option<usize>| -> Result<Fleet, LostBy> {
            let step = graphs.of(choice.samples(question)).map_err(LostBy::Refused)?;
            let bytes_of = |program: &_| (question.bytes_of)(program, choice.seating.threads);
            let plan = choice.plan(question, cluster);
            Fleet::lower(step, &plan, &question.training, &bytes_of, budget).map_err(|error| match error {
                polyreme_parallel::CompileError::Budget(error) => LostBy::Memory {
                    needs: error.least_bytes as f64 * room.ranks + room.beside,
                    has: room.bytes,
                },
                error => LostBy::Refused(error.to_string()),
            })
        };
        let mut choice = PlanChoice { budget_bytes: None, ..*choice };
        let mut fleet = lower(self, None)?;
        if room.needs(&fleet) > room.bytes {
            let budget = room.of_rank();
            (fleet, choice.budget_bytes) = (lower(self, Some(budget))?, Some(budget));
        }
        let needs = room.needs(&fleet);
        if needs > room.bytes {
            return Err(LostBy::Memory { needs, has: room.bytes });
        }
        found(question, cluster, choice, Arc::new(fleet)).map_err(LostBy::Refused)
    }
}

/// Simulates a plan that was lowered, on this cluster.
pub(super) fn found(
    question: &Question,
    cluster: &Cluster,
    choice: PlanChoice,
    fleet: Arc<Fleet>,
) -> Result<FoundPlan, String> {
    let ranks = choice.mesh.ranks();
    let settings = SimSettings {
        ranks_per_host: choice.seating.ranks_per_host,
        threads: choice.seating.threads,
        runs: if ranks > RANKS_OF_TWO_STEPS { 1 } else { 2 },
        staleness: question.staleness,
        ..SimSettings::default()
    };
    let report = simulate(&fleet, cluster, &settings).map_err(|e| e.to_string())?;
    let of_ranks = match cluster.inside.by {
        InsideBy::Threads => report.hosts.iter().map(|host| host.memory_bytes).max().unwrap_or(0),
        InsideBy::Processes | InsideBy::Sockets => report.memory_bytes,
    };
    Ok(FoundPlan { choice, report, process_bytes: of_ranks + question.process_bytes, fleet })
}

/// What ranks that are bounded together may take.
struct Room {
    /// How much.
    bytes: f64,
    /// Of how many ranks.
    ranks: f64,
    /// What is taken beside their programs.
    beside: f64,
}

impl Room {
    fn new(question: &Question, cluster: &Cluster, choice: &PlanChoice) -> Room {
        let seating = &choice.seating;
        let hosts = &cluster.hosts[..seating.hosts.min(cluster.hosts.len())];
        let bytes = hosts.iter().map(|host| host.memory_bytes * USABLE).fold(f64::INFINITY, f64::min);
        let (ranks, beside) = (seating.ranks_per_host as f64, question.process_bytes as f64);
        let in_process = match cluster.inside.by {
            InsideBy::Threads => ranks,
            InsideBy::Processes | InsideBy::Sockets => 1.0,
        };
        let of_host = Room { bytes, ranks, beside: beside * ranks / in_process };
        // What this process has already is not part of what it may take.
        let of_process = hosts.iter().map(|host| host.process_bytes).fold(f64::INFINITY, f64::min);
        let of_process = Room { bytes: of_process, ranks: in_process, beside: 0.0 };
        let of_host = if of_process.of_rank() < of_host.of_rank() { of_process } else { of_host };
        match question.fixed.memory_bytes.map(|bytes| bytes as f64) {
            // What a job file bounds is the training itself.
            Some(asked) if asked / in_process < of_host.of_rank() as f64 => {
                Room { bytes: asked, ranks: in_process, beside: 0.0 }
            }
            _ => of_host,
        }
    }

    /// What one rank may take.
    fn of_rank(&self) -> usize {
        ((self.bytes - self.beside).max(0.0) / self.ranks) as usize
    }

    /// What the largest ranks take together.
    fn needs(&self, fleet: &Fleet) -> f64 {
        let largest = fleet.programs.iter().map(|program| program.memory_bytes).max().unwrap_or(0);
        // Ranks of one host need not be alike; those of a host are the next to each other.
        let n = self.ranks as usize;
        let of_hosts = fleet
            .of_rank
            .chunks(n.max(1))
            .map(|ranks| ranks.iter().map(|program| fleet.programs[*program].memory_bytes).sum::<usize>());
        of_hosts.max().unwrap_or(largest) as f64 + self.beside
    }
}

/// What a choice may take on a host, and what it needs at least if each rank takes so much.
pub(super) fn shortage(
    question: &Question,
    cluster: &Cluster,
    choice: &PlanChoice,
    rank_bytes: f64,
) -> Option<LostBy> {
    let room = Room::new(question, cluster, choice);
    let needs = rank_bytes * room.ranks + room.beside;
    (needs > room.bytes).then_some(LostBy::Memory { needs, has: room.bytes })
}
