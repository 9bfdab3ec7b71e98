//! Ways to split a step that are worth a thought: every mesh of every seating, with microbatches, schedules and sharding.
//!
//! What a job has decided is kept. Left out is what is known to lose without a look:
//!
//! - Numbers of microbatches are powers of two, and multiples of the stages; without stages more of them only save memory.
//! - `gpipe` waits as long as `1f1b` and takes more memory. `2bw` has gradients of another step, which is not a question of speed.
//! - Axes other than data go up to 64 ranks, as in job files.

use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan};

use super::question::{Question, Seating, Sharding, seatings};
use crate::cluster::{Cluster, InsideBy};

/// The most ranks along an axis other than data.
const AXIS_MAX: usize = 64;
/// The most microbatches for each stage: the bubble is a few hundredths by then.
const MICROBATCHES_PER_STAGE_MAX: usize = 16;

/// A way to split a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlanChoice {
    /// Where ranks are.
    pub seating: Seating,
    /// How they are arranged.
    pub mesh: Mesh,
    /// Microbatches of a step: each is split over the data axis.
    pub microbatches: usize,
    /// The order in which stages run them.
    pub schedule: PipelineKind,
    /// What ranks of the data axis share out.
    pub sharding: Sharding,
    /// Which of the question's precisions.
    pub precision: usize,
    /// What a rank may take, if activations are computed a second time for it.
    pub budget_bytes: Option<usize>,
}

impl PlanChoice {
    /// Samples of a rank's microbatch; of the largest, if they cannot be split evenly.
    pub fn samples(&self, question: &Question) -> usize {
        let parts = match question.base.shards {
            Some(shards) => shards,
            // Where no rank waits for another, a step is one rank's alone.
            None if question.base.is_free() => self.microbatches,
            None => self.microbatches * self.mesh.data,
        };
        question.batch.div_ceil(parts).max(1)
    }

    /// Microbatches that a rank runs.
    pub(super) fn rounds(&self, question: &Question) -> usize {
        question.base.shards.map_or(self.microbatches, |shards| shards.div_ceil(self.mesh.data))
    }

    /// Whether all ranks see each other's memory.
    pub(super) fn shares_memory(&self, cluster: &Cluster) -> bool {
        self.seating.hosts == 1 && cluster.inside.by != InsideBy::Sockets
    }

    /// The plan that a run would have.
    pub(super) fn plan(&self, question: &Question, cluster: &Cluster) -> Plan {
        let plan = Plan {
            mesh: self.mesh,
            microbatches: self.microbatches,
            pipeline: self.schedule,
            shard_weights: self.sharding == Sharding::Weights,
            precision: question.precisions[self.precision].1.clone(),
            ..question.base.clone()
        };
        plan.kept(self.sharding.keeps(), self.shares_memory(cluster))
    }

    /// What choices with other microbatches, schedules and sharding have in common.
    pub(super) fn family(&self) -> (Seating, [usize; 4], usize) {
        let Mesh { data, tensor, stage, sequence } = self.mesh;
        (self.seating, [data, tensor, stage, sequence], self.precision)
    }
}

/// The splits that a job fixes, with nothing else: whether the model can be split so at all is asked of this.
pub(super) fn as_fixed(question: &Question) -> PlanChoice {
    let fixed = &question.fixed;
    let axis = |asked: Option<usize>| asked.unwrap_or(1);
    let (tensor, stage, sequence) = (axis(fixed.tensor), axis(fixed.stage), axis(fixed.sequence));
    let mesh = Mesh { data: 1, tensor, stage, sequence };
    PlanChoice {
        seating: Seating { hosts: 1, ranks_per_host: mesh.ranks(), threads: 1 },
        mesh,
        microbatches: fixed.microbatches.unwrap_or(stage),
        schedule: fixed.schedule.unwrap_or(PipelineKind::OneFOneB),
        sharding: fixed.sharding.unwrap_or_default(),
        precision: 0,
        budget_bytes: None,
    }
}

/// All choices.
pub(super) fn choices(question: &Question, cluster: &Cluster) -> Vec<PlanChoice> {
    let fixed = &question.fixed;
    let mut found = Vec::new();
    for seating in seatings(cluster, fixed) {
        for mesh in meshes(question, seating.ranks()) {
            for microbatches in microbatches(question, &mesh) {
                for schedule in schedules(question, &mesh) {
                    for sharding in shardings(question, &mesh) {
                        for precision in 0..question.precisions.len() {
                            let budget_bytes = None;
                            found.push(PlanChoice {
                                seating,
                                mesh,
                                microbatches,
                                schedule,
                                sharding,
                                precision,
                                budget_bytes,
                            });
                        }
                    }
                }
            }
        }
    }
    found
}

/// All ways to arrange so many ranks.
fn meshes(question: &Question, ranks: usize) -> Vec<Mesh> {
    let fixed = &question.fixed;
    let may = |asked: Option<usize>, n: usize| asked.map_or(n <= AXIS_MAX, |asked| asked == n);
    // An optimizer that looks at whole tensors has no parts of them.
    let whole = !question.training.optimizer.by_element();
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut found = Vec::new();
    for tensor in divisors(ranks).filter(|n| may(fixed.tensor, *n) && (*n == 1 || !whole)) {
        for stage in divisors(ranks / tensor).filter(|n| may(fixed.stage, *n)) {
            for sequence in divisors(ranks / tensor / stage).filter(|n| may(fixed.sequence, *n)) {
                let data = ranks / tensor / stage / sequence;
                let room = question.base.shards.unwrap_or(question.batch);
                if fixed.data.is_none_or(|asked| asked == data) && data <= room {
                    found.push(Mesh { data, tensor, stage, sequence });
                }
            }
        }
    }
    found
}

fn microbatches(question: &Question, mesh: &Mesh) -> Vec<usize> {
    if let Some(n) = question.base.shards.or(question.fixed.microbatches) {
        let fits = question.base.shards.is_some() || n * mesh.data <= question.batch;
        return if fits { vec![n] } else { Vec::new() };
    }
    let least = question.least_samples.min(question.batch).max(1);
    let most = (question.batch / mesh.data / least).max(1);
    let bound = if mesh.stage > 1 { most.min(mesh.stage * MICROBATCHES_PER_STAGE_MAX) } else { most };
    let doubled =
        |first: usize| std::iter::successors(Some(first), |n| Some(n * 2)).take_while(|n| *n <= bound);
    let mut found: Vec<usize> = doubled(1).chain(doubled(mesh.stage)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn schedules(question: &Question, mesh: &Mesh) -> Vec<PipelineKind> {
    match (mesh.stage, question.fixed.schedule) {
        (1, _) => vec![PipelineKind::OneFOneB],
        (_, Some(kind)) => vec![kind],
        (_, None) => {
            let chunks = PipelineKind::Interleaved { chunks: 2 };
            vec![PipelineKind::OneFOneB, chunks, PipelineKind::ZbH1, PipelineKind::ZbV]
        }
    }
}

fn shardings(question: &Question, mesh: &Mesh) -> Vec<Sharding> {
    if let Some(sharding) = question.fixed.sharding {
        return vec![sharding];
    }
    let may = mesh.data > 1 && question.training.optimizer.by_element() && question.base.shards.is_none();
    match may {
        true => vec![Sharding::Usual, Sharding::Gradients, Sharding::Weights],
        false => vec![Sharding::Usual],
    }
}
