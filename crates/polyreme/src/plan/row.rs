//! A plan as a row of a table for people, or as an object for programs.

use polyreme_parallel::Mesh;
use polyreme_sim::Cluster;
use polyreme_sim::search::{FoundPlan, LostBy, PlanChoice, Question, Sharding, why_slower};
use serde::Serialize;

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

/// A plan with what it takes.
#[derive(Clone, Debug, Serialize)]
pub struct PlanRow {
    /// Its place: 1 is the best.
    pub rank: usize,
    /// Ranks that the batch is split over.
    pub data: usize,
    /// Ranks that each matrix is split over.
    pub tensor: usize,
    /// Stages.
    pub stage: usize,
    /// Ranks that each sequence is split over.
    pub sequence: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// The order in which stages run them.
    pub schedule: &'static str,
    /// Of activations.
    pub precision: &'static str,
    /// The time of a step.
    pub step_ms: f64,
    /// Samples of all ranks together.
    pub samples_per_s: f64,
    /// What the largest process takes.
    pub memory_mib: f64,
    /// Hosts that are used.
    pub hosts: usize,
    /// Ranks on each.
    pub ranks_per_host: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// Whether ranks of the data axis keep parts of the gradients.
    pub shard_gradients: bool,
    /// Whether they keep parts of the weights.
    pub shard_weights: bool,
    /// What a process may take, if activations are computed a second time for it: `train.memory_mib`.
    pub recompute_mib: Option<usize>,
    /// Layers before which stages are cut.
    pub cuts: Vec<String>,
    /// The share of the time that ranks wait for other stages.
    pub bubble: f64,
    /// The share of the time that ranks wait for others.
    pub waiting: f64,
    /// The time of an epoch, if the number of samples is known.
    pub epoch_s: Option<f64>,
    /// What an epoch costs, if prices are known.
    pub epoch_cost: Option<f64>,
    /// Why it is slower than the first.
    pub why: String,
}

impl PlanRow {
    /// The row of a plan; `best` is the first one.
    pub fn new(
        rank: usize,
        plan: &FoundPlan,
        best: &FoundPlan,
        question: &Question,
        cluster: &Cluster,
        epoch_samples: Option<usize>,
    ) -> PlanRow {
        let PlanChoice { mesh, seating, .. } = plan.choice;
        let step_s = plan.report.step_us / 1e6;
        let epoch_s = epoch_samples.map(|n| n.div_ceil(question.batch) as f64 * step_s);
        PlanRow {
            rank,
            data: mesh.data,
            tensor: mesh.tensor,
            stage: mesh.stage,
            sequence: mesh.sequence,
            microbatches: plan.choice.microbatches,
            schedule: plan.choice.schedule.name(),
            precision: question.precisions[plan.choice.precision].0,
            step_ms: plan.report.step_us / 1e3,
            samples_per_s: plan.report.samples_per_s(question.batch),
            memory_mib: plan.process_bytes as f64 / MIB,
            hosts: seating.hosts,
            ranks_per_host: seating.ranks_per_host,
            threads: seating.threads,
            shard_gradients: plan.choice.sharding == Sharding::Gradients,
            shard_weights: plan.choice.sharding == Sharding::Weights,
            recompute_mib: recompute_mib(&plan.choice, cluster),
            cuts: plan.fleet.plan.cuts.clone(),
            bubble: plan.report.bubble,
            waiting: plan.report.waiting,
            epoch_s,
            epoch_cost: epoch_s
                .zip(price_per_hour(cluster, seating.hosts))
                .map(|(s, price)| s / 3600.0 * price),
            why: if rank == 1 { String::new() } else { why_slower(question, cluster, plan, best) },
        }
    }

    /// How ranks are arranged, in few letters.
    pub fn mesh(&self) -> String {
        let Self { data, tensor, stage, sequence, .. } = *self;
        mesh_words(&Mesh { data, tensor, stage, sequence })
    }

    /// What is done to save memory, in few letters.
    fn saves(&self) -> String {
        let mut words = Vec::new();
        if self.shard_weights {
            words.push("shard weights");
        } else if self.shard_gradients {
            words.push("shard gradients");
        }
        if self.recompute_mib.is_some() {
            words.push("recompute");
        }
        words.join(", ")
    }

    /// The line of a table.
    pub fn line(&self) -> String {
        let schedule = if self.stage > 1 { self.schedule } else { "-" };
        let seats = format!("{}x{}x{}", self.hosts, self.ranks_per_host, self.threads);
        let epoch = match (self.epoch_s, self.epoch_cost) {
            (Some(s), Some(cost)) => format!("{:>9} {cost:>9.2}", time(s)),
            (Some(s), None) => format!("{:>9} {:>9}", time(s), "-"),
            (None, _) => format!("{:>9} {:>9}", "-", "-"),
        };
        let saves = self.saves();
        let note = match (saves.is_empty(), self.why.is_empty()) {
            (true, _) => self.why.clone(),
            (false, true) => saves,
            (false, false) => format!("{saves}; {}", self.why),
        };
        format!(
            "{:>2}  {:<34} {:>10} {:>6} {:<11} {:<5} {:>11.2} {:>10.1} {:>9.0} {epoch}  {note}",
            self.rank,
            self.mesh(),
            seats,
            self.microbatches,
            schedule,
            self.precision,
            self.step_ms,
            self.samples_per_s,
            self.memory_mib
        )
        .trim_end()
        .to_string()
    }
}

/// The header of the table. Seats are hosts x ranks on each x threads of each.
pub const HEADER: &str = " #  mesh                                    seats micro- schedule    prec.     step ms  samples/s  MiB/proc.     epoch      cost  \
                          notes\n                                                    batches";

/// How ranks are arranged, in words.
pub fn mesh_words(mesh: &Mesh) -> String {
    let axes = [("data", mesh.data), ("tensor", mesh.tensor), ("stage", mesh.stage), ("seq", mesh.sequence)];
    let words: Vec<_> = axes.iter().filter(|(_, n)| *n > 1).map(|(axis, n)| format!("{axis} {n}")).collect();
    if words.is_empty() { "one rank".into() } else { words.join(" x ") }
}

/// A number of things, in words: `1 rank`, `2 ranks`.
pub fn counted(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// Why a choice is not among the plans, in words.
pub fn lost_words(why: &LostBy) -> String {
    match why {
        LostBy::Refused(why) => why.clone(),
        LostBy::Memory { needs, has } => format!("does not fit: {:.2} GiB of {:.2}", needs / GIB, has / GIB),
        LostBy::Bound { step_us } => format!("takes about {:.1} ms at best", step_us / 1e3),
    }
}

/// What a process may take, as a job file has it, if activations are computed a second time.
pub fn recompute_mib(choice: &PlanChoice, cluster: &Cluster) -> Option<usize> {
    let ranks = match cluster.inside.by {
        polyreme_sim::InsideBy::Threads => choice.seating.ranks_per_host,
        polyreme_sim::InsideBy::Processes | polyreme_sim::InsideBy::Sockets => 1,
    };
    choice.budget_bytes.map(|bytes| ((bytes * ranks) >> 20).max(1))
}

/// What the first hosts cost per hour, if that is known.
pub fn price_per_hour(cluster: &Cluster, hosts: usize) -> Option<f64> {
    cluster.hosts.iter().take(hosts).map(|host| host.price).sum()
}

/// A time for people.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 86_400.0 => format!("{:.1} d", s / 86_400.0),
        s if s >= 3600.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 60.0 => format!("{:.1} min", s / 60.0),
        s => format!("{s:.1} s"),
    }
}
