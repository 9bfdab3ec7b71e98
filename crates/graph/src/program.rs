//! A program: everything that one rank does in one step. Plain data with several readers; `exec` is the one that runs it.
//!
//! ```text
//!  load microbatch 0            inputs into a slot: the memory of one microbatch
//!  run  forward                 a block of nodes, on that slot
//!  count                        its loss, its weight and its samples into the totals
//!  start 0: all-reduce totals   an exchange with the other ranks ...
//!  run  input gradients ...
//!  start 1: all-reduce gradients
//!  wait 0                       ... which goes on until it is waited for
//!  judge                        the step ends here on all ranks if the loss is not finite
//!  keep                         running statistics become those that the microbatch left
//!  wait 1
//!  update                       parameters from gradients, with the optimizer
//! ```
//!
//! No communication and no ordering is left to the reader: microbatches, sums of gradients, clipping, the tree of
//! reproducible mode, statistics over an axis, a rank without samples are all instructions.

use std::ops::Range;
use std::sync::Arc;

use polyreme_kernels::codec::SumLayout;
use polyreme_kernels::optim::{Optimizer, SumsOf};

use crate::body::{Block, Body};
use crate::buffers::GradBuffers;
use crate::error::TraceError;
use crate::grad::differentiate;
use crate::graph::{Graph, ValueId};
use crate::memory::{param_ranges, readiness};
use crate::shape::DType;
use crate::tuning::Learning;

/// An axis of the mesh of ranks: those that split something along it exchange over it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Axis {
    /// Samples of the batch.
    Data,
    /// Matrices of a layer.
    Tensor,
    /// Layers.
    Stage,
    /// Positions of a sequence.
    Sequence,
}

impl Axis {
    /// All of them.
    pub const ALL: [Axis; 4] = [Axis::Data, Axis::Tensor, Axis::Stage, Axis::Sequence];

    /// Its name in job files and printed programs.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Data => "data",
            Axis::Tensor => "tensor",
            Axis::Stage => "stage",
            Axis::Sequence => "sequence",
        }
    }
}

/// Elements of an arena, of a buffer, or of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Region {
    /// Of the parameters.
    Params(Range<usize>),
    /// Of the arena of gradients.
    Grads(Range<usize>),
    /// Of the states without a gradient.
    States(Range<usize>),
    /// Of what codes of gradients have lost so far, laid out as the parameters.
    Residual(Range<usize>),
    /// Of the right factors of the last sums, where matrices travel as factors.
    Factors(Range<usize>),
    /// Of one of the program's buffers.
    Buffer(usize, Range<usize>),
    /// All of a value of a body.
    Value {
        /// The slot that the body runs on.
        slot: usize,
        /// The body.
        body: usize,
        /// The value.
        value: ValueId,
    },
}

/// Memory beside the arenas, for one step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// What it holds. Buffers of several programs with the same name share memory.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Elements.
    pub len: usize,
}

/// What the ranks along an axis do together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Collective {
    /// All get the sum.
    AllReduce,
    /// Rank `r` gets the sum of elements `cuts[r]..cuts[r + 1]`, counted from the start of the region.
    ReduceScatter(Arc<[usize]>),
    /// All get the elements that each rank has, by the same cuts.
    AllGather(Arc<[usize]>),
    /// Each rank sends its elements for rank `r`, by the cuts, and receives likewise.
    AllToAll {
        /// Which elements go to which rank.
        send: Arc<[usize]>,
        /// Where it arrives.
        into: Region,
        /// Which elements come from which rank.
        recv: Arc<[usize]>,
    },
    /// Sends the elements to one rank.
    Send {
        /// Its place along the axis.
        to: usize,
        /// What the receiver names too. Messages from one rank to another with one tag arrive in the order in which they
        /// were started.
        tag: u16,
    },
    /// Receives the elements from one rank.
    Receive {
        /// Its place along the axis.
        from: usize,
        /// The tag of the send.
        tag: u16,
    },
    /// A barrier.
    Meet,
}

impl Collective {
    /// Its name in printed programs and timelines.
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::ReduceScatter(_) => "reduce-scatter",
            Collective::AllGather(_) => "all-gather",
            Collective::AllToAll { .. } => "all-to-all",
            Collective::Send { .. } => "send",
            Collective::Receive { .. } => "receive",
            Collective::Meet => "meet",
        }
    }
}

/// An exchange with the other ranks along an axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Exchange {
    /// The collective.
    pub op: Collective,
    /// The axis whose group exchanges.
    pub axis: Axis,
    /// The elements.
    pub of: Region,
    /// Their type.
    pub dtype: DType,
    /// How they travel, if not as they are.
    pub coding: Option<Coding>,
}

/// How the elements of a sum travel between ranks that do not share memory: in fewer bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Coding {
    /// Their format, and where the coded parts lie.
    pub layout: SumLayout,
    /// What is added before coding, and then what the code lost.
    pub residual: Region,
    /// What the codes lie in. Exchanges over one axis run one after the other, so they share it.
    pub coded: Region,
    /// The right factors of the last sum, if matrices travel as factors. All ranks have the same.
    pub factors: Option<Region>,
}

/// A range of the parameters that a parameter server holds and updates.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServedRange {
    /// The server, by its number.
    pub server: usize,
    /// Which of that server's ranges it is.
    pub number: usize,
    /// Elements of the parameters' arena. Their gradients have the same place.
    pub params: Range<usize>,
    /// What is pushed of it: its gradients; or in a reproducible step sums of them over logical shards, one after the other, which the server adds up
    /// along a fixed tree.
    pub pushed: Vec<Region>,
}

/// Who holds the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weights {
    /// Every rank has its own copy.
    Own,
    /// All ranks work on one copy.
    Shared,
    /// Every rank has its own shard of each large tensor, and a copy of the small ones. Whole tensors exist where they are read.
    Sharded,
}

/// For which parameters a rank keeps gradients and optimizer state.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Keeps {
    /// Both for all; every rank updates everything.
    All,
    /// Optimizer state for its own shard, which only it updates; gradients for all.
    OwnMoments,
    /// Both for its own shard only.
    OwnGradients,
}

/// A rank's role among the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Role {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Who holds the weights.
    pub weights: Weights,
    /// What this rank keeps.
    pub keeps: Keeps,
    /// Reproducible mode: how many logical shards the global batch has; their gradients are summed in a fixed tree.
    pub shards: Option<usize>,
    /// By rank: the ranges of the arena that it updates, in order. Its moments are those of these ranges, one after the
    /// other.
    pub parts: Vec<Vec<Range<usize>>>,
}

impl Role {
    /// The ranges of this rank.
    pub fn own(&self) -> &[Range<usize>] {
        &self.parts[self.rank]
    }

    /// Whether the ranges are disjoint: each rank updates its own.
    pub fn sharded(&self) -> bool {
        self.keeps != Keeps::All
    }

    /// Whether all ranks work on one copy of the weights.
    pub fn shares_weights(&self) -> bool {
        self.weights == Weights::Shared
    }

    /// Whether each rank has its own shard of the weights.
    pub fn shards_weights(&self) -> bool {
        self.weights == Weights::Sharded
    }
}

/// Samples of a step that go through a body at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Microbatch {
    /// The body, by its number in the program.
    pub body: usize,
    /// The index of its first sample within the step; random draws depend on it.
    pub first_sample: usize,
}

/// One instruction of a rank.
#[derive(Clone, PartialEq, Debug)]
pub enum Instr {
    /// Starts the totals of the step: zeros, with the caller's two numbers at the end.
    Begin(Region),
    /// Fills the inputs of a slot with a microbatch.
    Load {
        /// The slot.
        slot: usize,
        /// The microbatch.
        microbatch: usize,
    },
    /// Runs a block on a slot.
    Run {
        /// The block, by its number in the program.
        block: usize,
        /// The slot.
        slot: usize,
        /// The microbatch in that slot.
        microbatch: usize,
    },
    /// Adds `[weight · loss, weight]` of a microbatch to two numbers, and the samples that it was fed to a tally.
    Count {
        /// The slot.
        slot: usize,
        /// The microbatch.
        microbatch: usize,
        /// The numbers.
        into: Region,
        /// The tally.
        tally: Region,
    },
    /// Keeps the states as a microbatch left them.
    Keep {
        /// The slot.
        slot: usize,
        /// The microbatch.
        microbatch: usize,
        /// Of those that these nodes of its body compute.
        nodes: Range<usize>,
    },
    /// Writes the states as a microbatch would leave them, times its weight.
    WeighStates {
        /// The slot.
        slot: usize,
        /// The microbatch.
        microbatch: usize,
        /// The destination.
        into: Region,
    },
    /// Zeros.
    Zero(Region),
    /// Copies.
    Copy {
        /// The elements.
        from: Region,
        /// The destination.
        into: Region,
    },
    /// `into += from`.
    Add {
        /// What is added.
        from: Region,
        /// To what.
        into: Region,
    },
    /// `into -= from`.
    Subtract {
        /// What is subtracted.
        from: Region,
        /// From what.
        into: Region,
    },
    /// Divides by the weight of the whole step.
    DivideByWeight(Region),
    /// Divides by a count.
    Divide {
        /// The elements.
        of: Region,
        /// The count.
        by: usize,
    },
    /// Starts an exchange, by its number in the program.
    Start(usize),
    /// Waits for an exchange that was started.
    Wait(usize),
    /// Sends what is pushed of a range to the server that holds it, by its number in the program. The server updates the range with it.
    Push(usize),
    /// Asks a server for a range; the answer is waited for later.
    Pull(usize),
    /// Waits for a range that was asked for, and takes it over.
    Await(usize),
    /// Reads the totals of the step: pairs of weighted losses and weights, the tally of samples, then the caller's numbers. If the
    /// loss is not finite the step ends here, on every rank, and nothing has been updated; if it is scaled, updates are
    /// skipped instead.
    Judge(Region),
    /// Reads the totals of a step that this rank takes by itself: its updates divide by the weight of its own samples. If its loss is
    /// not finite, this rank updates nothing more in this program, and all find out together.
    JudgeOwn(Region),
    /// Reads the totals of all steps of this program, one after the other, over all ranks: they take the place of the rank's own. If a
    /// loss is not finite the program ends here, on every rank, with its error.
    JudgeSteps(Region),
    /// Adds the sum of squares of gradients to a number; with `block`, sets one number per block of that many elements.
    Squares {
        /// The gradients.
        of: Region,
        /// The numbers.
        into: Region,
        /// Elements of a block.
        block: Option<usize>,
    },
    /// Adds the sum of squares of how far elements are from others to a number.
    SquaresApart {
        /// The elements.
        of: Region,
        /// The others.
        from: Region,
        /// The number.
        into: Region,
    },
    /// Goes on at [`Instr::Together`] if ranks that take steps by themselves have come too far: the root of what two numbers, the same on all ranks,
    /// are to each other is not at most `drift`.
    Leave {
        /// The two numbers.
        movement: Region,
        /// The bound.
        drift: f64,
    },
    /// Steps that this rank takes by itself end here.
    Together,
    /// Finds the factor that brings the norm of all gradients, whose squares are given, down to a maximum; the updates
    /// multiply by it. Where the loss is scaled and the norm is not finite, updates are skipped.
    Clip {
        /// The squares, to be added up.
        squares: Region,
        /// The maximum.
        max_norm: f64,
    },
    /// Sets the sums that updates need of tensors which ranks split ([`split_sums`](crate::split_sums())); measuring norms moves
    /// the moments of these tensors.
    Measure {
        /// Which of them.
        what: SumsOf,
        /// Elements of the parameters' arena.
        params: Range<usize>,
        /// Their gradients.
        grads: Region,
        /// All sums.
        sums: Region,
    },
    /// Updates a range of the parameters.
    Update {
        /// Elements of the parameters' arena.
        params: Range<usize>,
        /// Their gradients.
        grads: Region,
        /// The offset of their moments among this rank's.
        moments_at: usize,
        /// What was measured of tensors that ranks split, if the optimizer looks at whole ones.
        sums: Option<Region>,
        /// In which way they are learnt, all of them alike.
        learning: Learning,
    },
    /// An outer step with Nesterov's momentum: with `g = from - of`, the velocity becomes `momentum · velocity + g`, and the
    /// elements `from - lr · (g + momentum · velocity)`.
    Outer {
        /// The mean of parameters over the replicas.
        of: Region,
        /// Which elements of the parameters' arena these are, and so of the velocity.
        params: Range<usize>,
        /// The parameters as all replicas had them at the last exchange.
        from: Region,
        /// The learning rate.
        lr: f64,
        /// The momentum.
        momentum: f64,
    },
    /// Copies, if the updates of this step were skipped.
    PutBack {
        /// The elements as they were before the step.
        from: Region,
        /// The destination.
        into: Region,
    },
    /// From here on blocks read parameters there: in their arena, where they are at the start of every program, or in a copy of all of
    /// it.
    ReadParams(Region),
    /// One of several steps of this program is over: what follows updates parameters of the next one.
    NextStep,
    /// Lets the averaged parameters follow the parameters: each step takes `1 - decay` of the difference, and more in the first
    /// steps, which start from nothing.
    Follow {
        /// The decay of the average.
        decay: f64,
    },
}

/// What one rank does in one step.
#[derive(Clone, Debug)]
pub struct Program {
    /// The graphs of microbatches, one for each size. Programs for steps of other shapes share them.
    pub bodies: Vec<Arc<Body>>,
    /// The microbatches that they run on.
    pub microbatches: Vec<Microbatch>,
    /// The runs of nodes that instructions name.
    pub blocks: Vec<Block>,
    /// How many microbatches are in memory at a time.
    pub slots: usize,
    /// Memory beside the arenas.
    pub buffers: Vec<Buffer>,
    /// What is done together with other ranks.
    pub exchanges: Vec<Exchange>,
    /// What parameter servers hold, if this rank has any.
    pub served: Vec<ServedRange>,
    /// The instructions in order.
    pub instrs: Vec<Instr>,
    /// What updates do.
    pub optimizer: Option<Optimizer>,
    /// Whether the loss is scaled: then a loss or gradients that are not finite skip the step's updates, and are no error.
    pub scaled: bool,
    /// What the optimizer's state is stored in: f32, or bf16 if it goes by element.
    pub moments: DType,
    /// This rank's role among others; `None` for a program without other ranks.
    pub role: Option<Role>,
    /// Where gradients are stored until they are summed, if each rank keeps only its own shard of them.
    pub grad_buffers: Option<GradBuffers>,
}

impl Program {
    /// A program over these bodies that does nothing yet.
    pub fn empty(bodies: Vec<Arc<Body>>) -> Program {
        Program {
            bodies,
            microbatches: Vec::new(),
            blocks: Vec::new(),
            slots: 1,
            buffers: Vec::new(),
            exchanges: Vec::new(),
            served: Vec::new(),
            instrs: Vec::new(),
            optimizer: None,
            scaled: false,
            moments: DType::F32,
            role: None,
            grad_buffers: None,
        }
    }

    /// A forward pass of one microbatch; states stay as they are.
    pub fn forward(graph: &Graph) -> Program {
        Program::of(Body::forward(graph))
    }

    /// The same with bodies that are strict or not; see [`Body::with_strict`].
    pub fn with_strict(mut self, strict: bool) -> Program {
        self.bodies.iter_mut().for_each(|body| Arc::make_mut(body).strict = strict);
        self
    }

    /// The same with bodies that are reproducible or not; see [`Body::with_reproducible`].
    pub fn with_reproducible(mut self, reproducible: bool) -> Program {
        self.bodies.iter_mut().for_each(|body| Arc::make_mut(body).reproducible = reproducible);
        self
    }

    /// The forward and backward pass of one microbatch, without an update; states stay as they are.
    pub fn gradients(step: &Graph) -> Program {
        Program::of(Body::new(step))
    }

    /// Loads one microbatch and runs every node of a body.
    pub fn of(body: Body) -> Program {
        let nodes = 0..body.graph.nodes.len();
        let mut program = Program::empty(vec![Arc::new(body)]);
        program.microbatches.push(Microbatch { body: 0, first_sample: 0 });
        program.instrs.push(Instr::Load { slot: 0, microbatch: 0 });
        program.run(0, 0, nodes);
        program
    }

    /// A whole training step of a lone rank: forward, backward, clipping if asked for, update.
    pub fn train(step: &Graph, optimizer: Optimizer, clip: Option<f64>) -> Program {
        Program::of(Body::new(step)).updating(optimizer, clip)
    }

    /// The same, with parameters updated while their gradients are computed, where that can be done.
    pub fn train_at_once(step: &Graph, optimizer: Optimizer) -> Program {
        Program::of(Body::at_once(step, optimizer)).updating(optimizer, None)
    }

    /// From a forward graph to a training step in one go: differentiates `loss`, an output of `forward`, and adds the
    /// update.
    pub fn train_loss(forward: &Graph, loss: ValueId, optimizer: Optimizer) -> Result<Program, TraceError> {
        Ok(Program::train(&differentiate(forward, loss)?, optimizer, None))
    }

    fn updating(mut self, optimizer: Optimizer, clip: Option<f64>) -> Program {
        let body = self.bodies[0].clone();
        if !body.graph.updates.is_empty() {
            let nodes = 0..body.graph.nodes.len();
            self.instrs.push(Instr::Keep { slot: 0, microbatch: 0, nodes });
        }
        let updates = body.whole_updates();
        if let Some(max_norm) = clip {
            let of = updates.iter().filter_map(|u| match u {
                Instr::Update { grads, .. } => Some(grads.clone()),
                _ => None,
            });
            self.clip(of.collect(), max_norm);
        }
        self.instrs.extend(updates);
        self.optimizer = Some(optimizer);
        self
    }

    /// Bytes that elements of an exchange take as they travel.
    pub fn wire_bytes(&self, exchange: &Exchange, elements: usize) -> usize {
        match &exchange.coding {
            Some(coding) => coding.layout.wire_bytes(elements),
            None => elements * exchange.dtype.bytes(),
        }
    }

    /// Whether there are outer steps, whose velocity is kept.
    pub fn keeps_velocity(&self) -> bool {
        self.instrs.iter().any(|instr| matches!(instr, Instr::Outer { .. }))
    }

    /// Whether some of what ranks send is coded with a loss, of which they keep a residual.
    pub fn keeps_residual(&self) -> bool {
        self.exchanges.iter().any(|exchange| exchange.coding.is_some())
    }

    /// How many numbers of right factors are kept from one sum to the next.
    pub fn factors_len(&self) -> usize {
        let end = |exchange: &Exchange| match exchange.coding.as_ref()?.factors.as_ref()? {
            Region::Factors(range) => Some(range.end),
            Region::Params(_)
            | Region::Grads(_)
            | Region::States(_)
            | Region::Residual(_)
            | Region::Buffer(..)
            | Region::Value { .. } => None,
        };
        self.exchanges.iter().filter_map(end).max().unwrap_or(0)
    }

    /// Whether the rank keeps averaged parameters.
    pub fn averages(&self) -> bool {
        self.instrs.iter().any(|instr| matches!(instr, Instr::Follow { .. }))
    }

    /// The graph of the first body.
    pub fn graph(&self) -> &Graph {
        &self.bodies[0].graph
    }

    /// Runs nodes of a microbatch, by blocks.
    pub fn run(&mut self, slot: usize, microbatch: usize, nodes: Range<usize>) {
        self.run_body(self.microbatches[microbatch].body, slot, microbatch, nodes);
    }

    /// Runs nodes of any body, by blocks. If they read no samples it does not matter which microbatch they are said to be of.
    pub fn run_body(&mut self, number: usize, slot: usize, microbatch: usize, nodes: Range<usize>) {
        for block in self.bodies[number].clone().blocks(number, nodes) {
            let known = self.blocks.iter().position(|b| *b == block);
            let block = known.unwrap_or_else(|| {
                self.blocks.push(block);
                self.blocks.len() - 1
            });
            self.instrs.push(Instr::Run { block, slot, microbatch });
        }
    }

    /// Adds a buffer and returns all of it as a region.
    pub fn buffer(&mut self, name: impl Into<String>, dtype: DType, len: usize) -> Region {
        self.buffers.push(Buffer { name: name.into(), dtype, len });
        Region::Buffer(self.buffers.len() - 1, 0..len)
    }

    /// Adds an exchange of elements in their own type; returns its number.
    pub fn exchange(&mut self, op: Collective, axis: Axis, of: Region) -> usize {
        let dtype = self.dtype(&of);
        self.exchanges.push(Exchange { op, axis, of, dtype, coding: None });
        self.exchanges.len() - 1
    }

    /// Adds an exchange that is waited for at once.
    pub fn exchange_now(&mut self, op: Collective, axis: Axis, of: Region) {
        let number = self.exchange(op, axis, of);
        self.instrs.extend([Instr::Start(number), Instr::Wait(number)]);
    }

    /// Clips by the norm of gradients that this rank has.
    fn clip(&mut self, of: Vec<Region>, max_norm: f64) {
        let squares = self.buffer("squares", DType::F64, 1);
        self.instrs.push(Instr::Zero(squares.clone()));
        for of in of {
            self.instrs.push(Instr::Squares { of, into: squares.clone(), block: None });
        }
        self.instrs.push(Instr::Clip { squares, max_norm });
    }

    /// The element type of a region.
    pub fn dtype(&self, region: &Region) -> DType {
        match region {
            Region::Params(_)
            | Region::Grads(_)
            | Region::States(_)
            | Region::Residual(_)
            | Region::Factors(_) => DType::F32,
            Region::Buffer(buffer, _) => self.buffers[*buffer].dtype,
            Region::Value { body, value, .. } => self.bodies[*body].graph.value(*value).dtype,
        }
    }

    /// How many elements a region has.
    pub fn len_of(&self, region: &Region) -> usize {
        match region {
            Region::Params(r)
            | Region::Grads(r)
            | Region::States(r)
            | Region::Residual(r)
            | Region::Factors(r)
            | Region::Buffer(_, r) => r.len(),
            Region::Value { body, value, .. } => self.bodies[*body].graph.shape(*value).numel(),
        }
    }
}

impl Region {
    /// A part of an arena or a buffer, counted from the start of this region.
    ///
    /// # Panics
    /// If the region is a value, which is taken as a whole, or shorter.
    pub fn part(&self, part: Range<usize>) -> Region {
        let cut = |range: &Range<usize>| {
            assert!(part.end <= range.len(), "a part of {range:?}: {part:?}");
            range.start + part.start..range.start + part.end
        };
        match self {
            Region::Params(r) => Region::Params(cut(r)),
            Region::Grads(r) => Region::Grads(cut(r)),
            Region::States(r) => Region::States(cut(r)),
            Region::Residual(r) => Region::Residual(cut(r)),
            Region::Factors(r) => Region::Factors(cut(r)),
            Region::Buffer(buffer, r) => Region::Buffer(*buffer, cut(r)),
            Region::Value { .. } => panic!("a value is taken as a whole"),
        }
    }
}

impl Body {
    /// The parameters that are not updated at once, as runs that follow each other in the order of readiness, with the
    /// places of their gradients.
    pub fn whole_updates(&self) -> Vec<Instr> {
        let graph = &self.graph;
        let numel = |p: usize| graph.shape(graph.params[p].value).numel();
        let places = self.grad_places();
        let ranges = param_ranges(graph);
        let mut updates: Vec<(Range<usize>, usize, usize, Learning)> = Vec::new();
        for (i, (p, range)) in ranges.iter().enumerate().take(self.n_learnt()) {
            let Some(at) = places[*p] else { continue };
            let (end, learning) = (range.start + numel(*p), graph.params[*p].learning);
            match updates.last_mut() {
                Some((params, _, last, alike)) if *last + 1 == i && *alike == learning => {
                    (params.end, *last) = (end, i);
                }
                _ => updates.push((range.start..end, at, i, learning)),
            }
        }
        let update = |(params, at, _, learning): (Range<usize>, usize, usize, Learning)| {
            let (moments_at, grads) = (params.start, Region::Grads(at..at + params.len()));
            Instr::Update { params, grads, moments_at, sums: None, learning }
        };
        updates.into_iter().map(update).collect()
    }

    /// By parameter: where its gradient begins in the arena of gradients; `None` if it has none, or if it is never
    /// stored.
    pub fn grad_places(&self) -> Vec<Option<usize>> {
        let graph = &self.graph;
        let mut places = vec![None; graph.params.len()];
        let at_once = self.updated_at_once();
        let (dense, mut next) = (at_once.contains(&true), 0);
        for (p, range) in param_ranges(graph) {
            let learnt = graph.grads.get(p).copied().flatten().is_some();
            if !at_once[p] {
                places[p] = learnt.then_some(if dense { next } else { range.start });
                next += range.len();
            }
        }
        places
    }

    /// By parameter, whether it is updated while its gradient is computed.
    pub(crate) fn updated_at_once(&self) -> Vec<bool> {
        let mut at_once = vec![false; self.graph.params.len()];
        self.applied.iter().flatten().for_each(|&p| at_once[p] = true);
        at_once
    }

    /// Names of the parameters in the order in which gradients become ready.
    pub fn ready_names(&self) -> Vec<&str> {
        readiness(&self.graph).into_iter().map(|p| self.graph.params[p].name.as_str()).collect()
    }
}
