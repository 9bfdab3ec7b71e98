//! The plan: how a step is split over ranks, and who keeps what. Lowering follows it; the `[parallel]` section of a job file is
//! turned into one.

use std::ops::Range;

use polyreme_graph::{Axis, DType, Keeps, Microbatch, Optimizer, Precision, Weights, WireCodec};

use crate::mesh::Mesh;
use crate::pipeline::PipelineKind;
use crate::shard::ShardPlace;
use crate::tensor::StoredLayouts;
use crate::tree::run_of;

/// Over which samples batch norms take their statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Norms {
    /// Those of the rank's own microbatch.
    Local,
    /// Those of the microbatches that all ranks of the data axis run at the same time.
    Synchronised,
}

/// When parameters are updated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Updates {
    /// When all gradients are known.
    AtEnd,
    /// While gradients are computed, if it can be done: by a lone rank whose step is one microbatch, without clipping.
    AtOnce,
}

/// Parameter servers: the first ranks of the data axis host one each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerPlan {
    /// How many there are; at most as many as ranks. Equal parts of the parameters are at each of them, unless they are on all ranks and
    /// some of these only serve: then such parts that all links carry the same.
    pub servers: usize,
    /// How many ranks, the first of those with a server, only serve: they have no samples. Fewer than there are ranks.
    pub serving: usize,
    /// Whether all ranks share every step. Otherwise a step is a block of samples of one worker, and no rank waits for another in it.
    pub lockstep: bool,
}

/// How a step is split over ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// How the ranks are arranged.
    pub mesh: Mesh,
    /// This rank.
    pub rank: usize,
    /// Who holds the weights. Shared ones are written by one rank each, so each keeps the moments of its own part at least.
    pub weights: Weights,
    /// For which parameters a rank keeps gradients and optimizer state. An optimizer that needs whole tensors keeps all
    /// of them.
    pub keeps: Keeps,
    /// How many microbatches a rank splits its share of a full step into.
    pub microbatches: usize,
    /// Gradients are sent in buckets of at least this many bytes.
    pub bucket_bytes: usize,
    /// The format in which gradients travel between ranks of the data axis that do not share memory; none: as they are.
    pub wire: Option<WireCodec>,
    /// Before this step, counted from 0, gradients travel as they are: such a step has a program of its own
    /// ([`Plan::without_wire`]).
    pub wire_start: u64,
    /// Which samples batch norms take their statistics over.
    pub norms: Norms,
    /// Reproducible mode: how many logical shards the global batch has, each of them one microbatch.
    pub shards: Option<usize>,
    /// When parameters are updated.
    pub updates: Updates,
    /// In which formats activations are stored and multiplied, and by which algorithms.
    pub precision: Precision,
    /// Whether ranks of the data axis shard the large parameters, which are gathered where they are read. Then `weights` and
    /// `keeps` mean nothing: a rank keeps gradients and optimizer state of what it keeps of the weights.
    pub shard_weights: bool,
    /// With several stages: in which order they run microbatches.
    pub pipeline: PipelineKind,
    /// With a schedule that has no flush between steps, and with local steps: how many steps a whole run of them has.
    pub run_steps: usize,
    /// With several stages: the layers before which the network is cut, or other places by their names. None: where the slowest
    /// stage is as fast as can be, which [`choose_cuts`](crate::choose_cuts) finds.
    pub cuts: Vec<String>,
    /// Whether ranks may be lost: then each keeps everything, and begins to update when all sums of the step are complete. From there
    /// on it needs no other rank, so its state is always that of a whole number of steps.
    pub elastic: bool,
    /// Whether ranks of the data axis take steps by themselves, `run_steps` at a time, and then average their weights; none: they sum
    /// gradients in every step.
    pub local: Option<LocalSteps>,
    /// Whether parameter servers hold the weights, how many, and in which way.
    pub servers: Option<ServerPlan>,
    /// With several tensor ranks: how parameters and states are split. Those that it does not name: as is best for each graph.
    pub layouts: StoredLayouts,
}

/// What ranks that take steps by themselves do when they meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalSteps {
    /// A step from the weights of the last exchange, by the difference to the mean of the ranks' weights; none: the weights become that
    /// mean.
    pub outer: Option<OuterStep>,
    /// How far ranks may come from the weights of the last exchange before they meet; none: as far as all their steps take them.
    pub drift: Option<DriftBound>,
    /// Whether the model is exchanged in parts that take turns within a program; none: all of it at its end.
    pub turns: Option<FragmentTurns>,
}

/// Parts of a model that are exchanged in turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FragmentTurns {
    /// How many parts there are.
    pub fragments: usize,
    /// Each has its turn once in so many steps, at least as many as there are parts.
    pub every: usize,
    /// So many steps are taken while an exchange goes on; fewer than from one turn to the next.
    pub overlap: usize,
}

impl FragmentTurns {
    /// The turns of a program of `n_steps`: the steps done when an exchange begins and when it ends, and which part it is of. Those that would
    /// not end before the program does are left to its end.
    pub fn within(self, n_steps: usize) -> impl Iterator<Item = ([usize; 2], usize)> {
        let FragmentTurns { fragments, every, overlap } = self;
        let turn = move |k: usize| {
            let begins = k * every / fragments;
            ([begins, begins + overlap], (k - 1) % fragments)
        };
        (1..).map(turn).take_while(move |([_, ends], _)| *ends < n_steps)
    }
}

/// A bound on how far ranks that take steps by themselves may come from the weights of the last exchange.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DriftBound {
    /// The root mean square of the ranks' distances, as a share of the norm of those weights; a number.
    pub drift: f64,
    /// After how many steps ranks look at it, and again after as many.
    pub look: usize,
}

// The bound is not NaN.
impl Eq for DriftBound {}

/// An outer step with Nesterov's momentum.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OuterStep {
    /// Its learning rate, a number.
    pub lr: f64,
    /// Its momentum, a number.
    pub momentum: f64,
}

// Neither is NaN.
impl Eq for OuterStep {}

/// What a step does with gradients, however it is split.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Training {
    /// What updates do.
    pub optimizer: Optimizer,
    /// What its state is stored in: f32, or bf16 if it goes by element.
    pub moments: DType,
    /// The maximum of the gradients' norm.
    pub clip: Option<f64>,
    /// Whether the loss is scaled: then updates wait until it is known that all gradients are finite, and are left out if not.
    pub scaled: bool,
    /// The decay of averaged parameters, which rank 0 keeps; of shards, each rank those of its own.
    pub ema: Option<f64>,
}

impl Training {
    /// The maximum of the gradients' norm, if updates wait for that norm.
    pub(crate) fn max_norm(&self) -> Option<f64> {
        self.clip.or(self.scaled.then_some(f64::INFINITY))
    }
}

/// One rank's share of a step, or of several that are run without a flush between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepShape {
    /// Its microbatches in their order. In reproducible mode, one for each of its logical shards: `None` without samples.
    pub microbatches: Vec<Option<Microbatch>>,
    /// The largest number of microbatches on any rank; ranks with fewer first take part in the others' exchanges.
    pub rounds: usize,
    /// Over how many steps the microbatches are spread, as many for each.
    pub steps: usize,
    /// Reproducible mode: which logical shards each rank has.
    pub runs: Vec<Range<usize>>,
}

impl Plan {
    /// One rank.
    pub fn alone() -> Plan {
        Plan {
            mesh: Mesh::data(1),
            rank: 0,
            weights: Weights::Own,
            keeps: Keeps::All,
            microbatches: 1,
            bucket_bytes: 1 << 20,
            wire: None,
            wire_start: 0,
            norms: Norms::Local,
            shards: None,
            updates: Updates::AtEnd,
            precision: Precision::F32,
            shard_weights: false,
            pipeline: PipelineKind::OneFOneB,
            run_steps: 1,
            cuts: Vec::new(),
            elastic: false,
            local: None,
            servers: None,
            layouts: StoredLayouts::new(),
        }
    }

    /// The same plan for the steps before gradients travel in fewer bytes.
    pub fn without_wire(&self) -> Plan {
        Plan { wire: None, ..self.clone() }
    }

    /// The same plan with what ranks of the data axis keep: as `keeps` says, or else as is usual. `shares_memory` says whether they
    /// can hold the weights together. Then each usually keeps the optimizer state of its own part; over a network parts cost
    /// overlap, as updated parameters are sent when there is nothing left to compute, so there each keeps everything.
    pub fn kept(self, keeps: Option<Keeps>, shares_memory: bool) -> Plan {
        // Without a flush, no rank may write weights that another one reads, or wait for its part of an update. In steps by themselves
        // ranks have different weights. A rank that may be lost keeps nothing that others need. Gradients that travel coded are of ranks that
        // do not share memory, whatever is assumed of others.
        let apart = self.elastic || self.is_flushless() || self.local_steps().is_some();
        let alone = !shares_memory || apart || self.wire.is_some();
        let usual = if alone { Keeps::All } else { Keeps::OwnMoments };
        let keeps = keeps.unwrap_or(usual);
        let shared = keeps != Keeps::All && shares_memory && self.mesh.data > 1;
        let weights = if shared { Weights::Shared } else { Weights::Own };
        Plan { keeps, weights, ..self }
    }

    /// Whether results must not depend on the machine. Those of logical shards never do.
    pub fn is_reproducible(&self) -> bool {
        self.precision.reproducible || self.shards.is_some()
    }

    /// How many ranks the batch is split over.
    pub fn ranks(&self) -> usize {
        self.mesh.len(Axis::Data)
    }

    /// This rank's place among those that shard weights, if they do.
    pub fn shard_place(&self) -> Option<ShardPlace> {
        let (rank, ranks) = (self.mesh.place(self.rank, Axis::Data), self.ranks());
        let in_tree = self.shards.is_some();
        (self.shard_weights && ranks > 1).then_some(ShardPlace { rank, ranks, in_tree })
    }

    /// What this rank keeps, with this optimizer.
    ///
    /// # Panics
    /// If gradients are to be kept in part by an optimizer that needs those of whole tensors, or with logical shards, whose
    /// whole gradients are added up in a tree.
    pub(crate) fn ownership(&self, optimizer: Optimizer) -> (Keeps, Weights) {
        if self.shard_place().is_some() {
            return (Keeps::All, Weights::Sharded);
        }
        if self.elastic || self.local_steps().is_some() {
            return (Keeps::All, Weights::Own);
        }
        if self.servers.is_some() {
            // A rank keeps the moments of what the server beside it holds.
            return (Keeps::OwnMoments, Weights::Own);
        }
        let whole = !optimizer.by_element();
        let own_gradients = self.keeps == Keeps::OwnGradients;
        assert!(
            !own_gradients || !whole,
            "this optimizer needs the gradients of whole tensors on every rank"
        );
        assert!(!own_gradients || self.shards.is_none(), "logical shards need whole gradients");
        if self.ranks() == 1 || whole {
            return (Keeps::All, Weights::Own);
        }
        let needs_parts = self.weights == Weights::Shared || self.shards.is_some();
        let keeps = if needs_parts { self.keeps.max(Keeps::OwnMoments) } else { self.keeps };
        (keeps, self.weights)
    }

    /// Whether parameters are updated while gradients are computed.
    pub(crate) fn updates_at_once(&self, training: &Training) -> bool {
        let lone = self.mesh.ranks() == 1 && self.shards.is_none() && training.max_norm().is_none();
        let lone = lone && self.servers.is_none();
        self.updates == Updates::AtOnce && lone && self.microbatches <= 1
    }

    /// How many ranks push gradients to servers, if there are any: those that do not only serve.
    pub fn workers(&self) -> usize {
        self.ranks() - self.servers.map_or(0, |servers| servers.serving)
    }

    /// Whether this rank only serves.
    pub fn only_serves(&self) -> bool {
        self.servers.is_some_and(|servers| self.mesh.place(self.rank, Axis::Data) < servers.serving)
    }

    /// Whether each worker does whole steps of its own, and pushes their gradients to servers when it likes.
    pub fn is_free(&self) -> bool {
        self.servers.is_some_and(|servers| !servers.lockstep)
    }

    /// Whether stages go on from step to step without a flush.
    pub fn is_flushless(&self) -> bool {
        self.mesh.stage > 1 && self.pipeline == PipelineKind::TwoBw
    }

    /// What ranks do when they meet, if there are several and they take steps by themselves.
    pub fn local_steps(&self) -> Option<LocalSteps> {
        self.local.filter(|_| self.ranks() > 1)
    }

    /// Whether one program has several steps.
    pub fn runs_several_steps(&self) -> bool {
        self.is_flushless() || self.local_steps().is_some()
    }

    /// The shape of a full step, or of a whole run of them, in which every microbatch runs the first body.
    pub fn whole_step(&self) -> StepShape {
        let microbatch = Microbatch { body: 0, first_sample: 0 };
        let Some(shards) = self.shards else {
            let n = self.microbatches.max(1);
            let steps = if self.runs_several_steps() { self.run_steps } else { 1 };
            return StepShape::rounds(&vec![microbatch; n], n).times(steps);
        };
        let runs: Vec<_> = (0..self.ranks()).map(|rank| run_of(shards, self.ranks(), rank)).collect();
        let mine = runs[self.mesh.place(self.rank, Axis::Data)].len();
        StepShape::shards(vec![Some(microbatch); mine], runs)
    }

    /// Whether batch norms exchange statistics with other ranks. Logical shards are computed one by one, each with its
    /// own statistics.
    pub(crate) fn syncs_norms(&self) -> bool {
        self.norms == Norms::Synchronised && self.ranks() > 1 && self.shards.is_none()
    }
}

impl StepShape {
    /// One microbatch of the first body, on every rank.
    pub fn one() -> StepShape {
        StepShape::rounds(&[Microbatch { body: 0, first_sample: 0 }], 1)
    }

    /// These microbatches, in a step where the rank with the most has `rounds`.
    pub fn rounds(microbatches: &[Microbatch], rounds: usize) -> StepShape {
        let microbatches: Vec<_> = microbatches.iter().copied().map(Some).collect();
        StepShape { rounds: rounds.max(microbatches.len()).max(1), microbatches, steps: 1, runs: Vec::new() }
    }

    /// The same shape for several steps, without a flush between them.
    pub fn times(self, steps: usize) -> StepShape {
        let steps = steps.max(1);
        StepShape {
            microbatches: self.microbatches.repeat(steps),
            rounds: self.rounds * steps,
            steps,
            ..self
        }
    }

    /// This rank's logical shards; `runs` says which each rank has.
    pub fn shards(microbatches: Vec<Option<Microbatch>>, runs: Vec<Range<usize>>) -> StepShape {
        StepShape { rounds: microbatches.len(), microbatches, steps: 1, runs }
    }
}
