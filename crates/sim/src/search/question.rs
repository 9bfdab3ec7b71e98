//! What a search is asked: the step, what it may take, and what the job has decided already.

use polyreme_graph::{Graph, Keeps, Precision, Program};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Plan, Training};

use crate::cluster::Cluster;

/// A job that is to be split over the hosts of a cluster.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// The differentiated graph of a microbatch of so many samples, as it was traced.
    pub step: &'a dyn Fn(usize) -> Result<Graph, String>,
    /// What a step does with gradients.
    pub training: Training,
    /// Samples of a step, of all ranks together.
    pub batch: usize,
    /// The fewest samples of a microbatch on a rank, unless the job fixes it: batch norms take statistics from them.
    pub least_samples: usize,
    /// What a rank takes that runs a program with so many threads.
    pub bytes_of: &'a dyn Fn(&Program, usize) -> usize,
    /// What a process takes beside its ranks' programs.
    pub process_bytes: usize,
    /// The precisions to choose from, by name; one if the job has decided.
    pub precisions: &'a [(&'static str, Precision)],
    /// What is not searched: buckets, norms, logical shards, when parameters are updated, cuts.
    pub base: &'a Plan,
    /// With parameter servers that apply gradients as they come: how far ranks may run ahead of the slowest, if that is bounded.
    pub staleness: Option<usize>,
    /// What the job has decided.
    pub fixed: FixedKeys,
}

/// What a job has decided; the rest is searched.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FixedKeys {
    /// All ranks.
    pub ranks: Option<usize>,
    /// Ranks that the batch is split over.
    pub data: Option<usize>,
    /// Ranks that each matrix is split over.
    pub tensor: Option<usize>,
    /// Stages.
    pub stage: Option<usize>,
    /// Ranks that each sequence is split over.
    pub sequence: Option<usize>,
    /// Microbatches of a step.
    pub microbatches: Option<usize>,
    /// The order in which stages run them.
    pub schedule: Option<PipelineKind>,
    /// What ranks of the data axis share out.
    pub sharding: Option<Sharding>,
    /// Ranks on each host.
    pub ranks_per_host: Option<usize>,
    /// Threads of each rank.
    pub threads: Option<usize>,
    /// What a process may take, if less than its host has.
    pub memory_bytes: Option<usize>,
}

/// What ranks of the data axis share out, each keeping a part.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Sharding {
    /// What is usual: optimizer state where ranks share memory, otherwise nothing.
    #[default]
    Usual,
    /// Nothing at all.
    Nothing,
    /// Optimizer state.
    Optimizer,
    /// Gradients and optimizer state.
    Gradients,
    /// Weights, gradients and optimizer state.
    Weights,
}

impl Sharding {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Sharding::Usual | Sharding::Nothing => "",
            Sharding::Optimizer => "optimizer",
            Sharding::Gradients => "gradients",
            Sharding::Weights => "weights",
        }
    }

    /// What ranks keep, if that is not as usual.
    pub fn keeps(self) -> Option<Keeps> {
        match self {
            Sharding::Usual | Sharding::Weights => None,
            Sharding::Nothing => Some(Keeps::All),
            Sharding::Optimizer => Some(Keeps::OwnMoments),
            Sharding::Gradients => Some(Keeps::OwnGradients),
        }
    }
}

/// How ranks sit on hosts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Seating {
    /// Hosts that are used, the first of the cluster.
    pub hosts: usize,
    /// Ranks on each.
    pub ranks_per_host: usize,
    /// Threads of each rank.
    pub threads: usize,
}

impl Seating {
    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.hosts * self.ranks_per_host
    }
}

/// Ways to seat ranks on a cluster: on all hosts or on fewer, with few ranks of many threads or many of few.
pub(super) fn seatings(cluster: &Cluster, fixed: &FixedKeys) -> Vec<Seating> {
    let cores = cluster.hosts.iter().map(|host| host.cores).min().unwrap_or(1).max(1);
    let per_host: Vec<usize> = match fixed.ranks_per_host {
        Some(n) => vec![n],
        None => {
            let asked = fixed.ranks.filter(|ranks| *ranks > cluster.hosts.len());
            let more = asked.map(|ranks| ranks.div_ceil(cluster.hosts.len()));
            let mut found: Vec<usize> = halves(cores).chain(more).collect();
            // With a number of threads, as many ranks as they leave.
            found.extend(fixed.threads.map(|threads| (cores / threads).max(1)));
            found.sort_unstable();
            found.dedup();
            found
        }
    };
    let mut seatings = Vec::new();
    for &ranks_per_host in &per_host {
        for hosts in halves(cluster.hosts.len()) {
            let threads = fixed.threads.unwrap_or((cores / ranks_per_host).max(1));
            let seating = Seating { hosts, ranks_per_host, threads };
            let asked = fixed.ranks.is_none_or(|ranks| ranks == seating.ranks());
            // More threads than cores only take turns.
            let fits =
                ranks_per_host * threads <= cores || fixed.ranks.is_some() || fixed.ranks_per_host.is_some();
            if asked && fits {
                seatings.push(seating);
            }
        }
    }
    // Some ranks on one host, if nothing divides.
    if let (true, Some(ranks)) = (seatings.is_empty(), fixed.ranks.filter(|n| *n > 0)) {
        let ranks_per_host = fixed.ranks_per_host.unwrap_or(ranks.div_ceil(cluster.hosts.len())).max(1);
        if ranks.is_multiple_of(ranks_per_host) && ranks / ranks_per_host <= cluster.hosts.len() {
            let threads = fixed.threads.unwrap_or((cores / ranks_per_host).max(1));
            seatings.push(Seating { hosts: ranks / ranks_per_host, ranks_per_host, threads });
        }
    }
    seatings
}

/// `n`, its half, and so on to 1; halves are rounded up.
fn halves(n: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(n.max(1)), |n| (*n > 1).then(|| n.div_ceil(2)))
}
