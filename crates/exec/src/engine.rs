//! The engine of one rank: programs, the memory that they run on, the learnt state, and a thread pool.

use std::sync::Arc;

use polyreme_collective::Span;
use polyreme_collective::servers::ServerClient;
use polyreme_graph::graph::{Graph, Init, Stored};
use polyreme_graph::memory::{ALIGN_BYTES, readiness};
use polyreme_graph::{DType, Place, Program, Region, ValueId};
use polyreme_kernels::optim::ParamTensor;
use polyreme_kernels::{Cx, Isa, random};

use crate::error::ExecError;
use crate::feed::{Filled, Inputs};
use crate::group::Group;
use crate::incoming::Arrival;
use crate::kernel_types::check_kernels;
use crate::memory::Memory;
use crate::moments;
use crate::pace::BlockPace;
use crate::pool::Pool;
use crate::reader::{StepArgs, StepProgress};
use crate::run::{DrawKey, run};
use crate::state::{Lengths, SharedBlocks, State};
use crate::timeline::Timeline;
use crate::weights::Kept;
use crate::workspace::{Need, Ready, Workspace};

/// Bytes of an element of parameters, gradients and moments.
const F32_BYTES: usize = DType::F32.bytes();

/// How an engine runs programs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of this rank, the caller's included.
    pub threads: usize,
    /// The CPU features that kernels may use.
    pub isa: Isa,
    /// The seed of initial parameters and dropout masks.
    pub seed: u64,
    /// The thread pool to use; `None` to start one.
    pub pool: Option<Arc<Pool>>,
    /// Whether an engine that joins has learnt nothing yet, not even initial parameters, and no memory for it:
    /// [`Engine::adopt`] or [`Engine::receive_learnt`] follows.
    pub inherits: bool,
}

impl Options {
    /// This many threads, the best instruction set, seed 0.
    pub fn threads(threads: usize) -> Options {
        Options { threads, isa: Isa::detect(), seed: 0, pool: None, inherits: false }
    }
}

/// The memory in bytes that a program takes, known before anything is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// The parameters.
    pub params: usize,
    /// The gradients, or the buffers in which buckets of them take turns.
    pub grads: usize,
    /// Buffers that live for one step: sums of earlier microbatches or of logical shards.
    pub sums: usize,
    /// The optimizer state that this rank keeps.
    pub optimizer: usize,
    /// States without a gradient, such as running statistics.
    pub states: usize,
    /// The averaged parameters, if this rank keeps them.
    pub average: usize,
    /// The inputs of all slots.
    pub inputs: usize,
    /// Activations and scratch, at their peak.
    pub activations: usize,
}

impl Footprint {
    /// The sum of all of these.
    pub fn total(&self) -> usize {
        let step = self.sums + self.inputs + self.activations;
        self.params + self.grads + self.optimizer + self.states + self.average + step
    }
}

/// A prepared program.
pub(crate) struct Loaded {
    pub(crate) program: Program,
    /// For each body of the program, its number in the engine.
    pub(crate) bodies: Vec<usize>,
    /// For each buffer of the program, its number in the workspace.
    pub(crate) buffers: Vec<usize>,
}

/// Runs programs over the same parameters, step after step.
pub struct Engine {
    /// The other ranks. The first field, so that background exchanges end before their memory is freed.
    pub(crate) group: Option<Group>,
    /// This rank's end of the parameter servers, if they hold the weights.
    pub(crate) servers: Option<ServerClient>,
    /// Programs by number; the first one fixes the memory layout.
    programs: Vec<Option<Arc<Loaded>>>,
    selected: usize,
    pub(crate) bodies: Vec<Option<Ready>>,
    pub(crate) memory: Memory,
    pub(crate) pool: Arc<Pool>,
    pub(crate) options: Options,
    /// The parameters' tensors, in the order in which gradients become ready.
    pub(crate) tensors: Vec<ParamTensor>,
    /// Those that the optimizer looks at as a whole.
    pub(crate) updated: moments::Updated,
    pub(crate) progress: StepProgress,
    /// Where the time goes, if it is being recorded.
    pub(crate) timeline: Option<Timeline>,
    /// How long blocks take at least, if that is set.
    pub(crate) pace: Option<BlockPace>,
    /// What is learnt, if it is still on its way from other ranks.
    pub(crate) arrival: Option<Arrival>,
}

impl Engine {
    /// Plans and reserves everything, and initialises parameters and states.
    pub fn new(program: Program, options: Options) -> Result<Engine, ExecError> {
        let mut engine = Engine::reserve(program, options, SharedBlocks::default())?;
        engine.initialise();
        engine.start_average();
        Ok(engine)
    }

    /// The same without initial values; `blocks` are shared weights and visible gradients.
    pub(crate) fn reserve(
        program: Program,
        options: Options,
        blocks: SharedBlocks,
    ) -> Result<Engine, ExecError> {
        check_kernels(&program.bodies[0].graph)?;
        moments::check(&program)?;
        let threads = options.threads.max(1);
        let pool = match &options.pool {
            Some(pool) => pool.clone(),
            None => Arc::new(Pool::new(threads).map_err(|e| ExecError::Thread { why: e.to_string() })?),
        };
        let first = Ready::new(&program, &program.bodies[0], threads, options.isa);
        let tensors = moments::tensors(program.optimizer, &first);
        let updated = moments::Updated::new(program.optimizer, &first, &tensors);
        let lengths = lengths(&program, &first);
        let state = match options.inherits {
            true => State::blank(lengths, blocks, &*pool)?,
            false => State::new(lengths, blocks, &*pool)?,
        };
        let memory = Memory { state, work: Workspace::new(), params_from: None };
        let mut engine = Engine {
            group: None,
            servers: None,
            programs: Vec::new(),
            selected: 0,
            bodies: vec![Some(first)],
            memory,
            pool,
            options,
            tensors,
            updated,
            progress: StepProgress::default(),
            timeline: None,
            pace: None,
            arrival: None,
        };
        engine.add(program)?;
        Ok(engine)
    }

    /// The memory that `program` would take with this many threads and these features of the CPU: of optimizer state and
    /// gradients, this rank's part.
    pub fn footprint(program: &Program, threads: usize, isa: Isa) -> Footprint {
        let ready: Vec<Ready> = program.bodies.iter().map(|b| Ready::new(program, b, threads, isa)).collect();
        let lengths = lengths(program, &ready[0]);
        let need = Need::of(program, ready.iter());
        let buffers = program.buffers.iter().map(|b| (b.len * b.dtype.bytes()).next_multiple_of(ALIGN_BYTES));
        let own: usize = match (&program.role, program.grad_buffers.is_some()) {
            (Some(role), true) => role.own().iter().map(|r| r.len() * F32_BYTES).sum::<usize>(),
            _ => 0,
        }
        .next_multiple_of(ALIGN_BYTES);
        let moment_bytes = lengths
            .moments
            .iter()
            .map(|len| (len * lengths.moments_dtype.bytes()).next_multiple_of(ALIGN_BYTES));
        Footprint {
            params: lengths.params * F32_BYTES,
            grads: lengths.grads * F32_BYTES + own,
            sums: buffers.sum::<usize>() - own
                + (lengths.residual + lengths.factors + lengths.velocity) * F32_BYTES,
            optimizer: moment_bytes.sum(),
            states: lengths.states * F32_BYTES,
            average: lengths.average * F32_BYTES,
            inputs: need.inputs(),
            activations: need.activations(),
        }
    }

    /// Prepares another program over the same parameters, gradients, moments and states: for steps of another shape, or for
    /// evaluation. Bodies that are prepared already are shared. Returns its number; the first program's number is 0.
    pub fn add(&mut self, program: Program) -> Result<usize, ExecError> {
        if let Some(first) = self.programs.first().and_then(Option::as_ref) {
            fits(&first.program, &program)?;
        }
        let known = |body: &Arc<polyreme_graph::Body>| {
            let same = |r: &Option<Ready>| r.as_ref().is_some_and(|r| Arc::ptr_eq(&r.body, body));
            self.bodies.iter().position(same)
        };
        // Prepared here, and installed once nothing can fail any more.
        let mut new: Vec<Ready> = Vec::new();
        let mut numbers = Vec::new();
        for body in &program.bodies {
            if let Some(number) = known(body) {
                numbers.push(number);
                continue;
            }
            check_kernels(&body.graph)?;
            let first = self.bodies[0].as_ref().expect("the first body stays");
            let mut ready = Ready::new(&program, body, self.options.threads, self.options.isa);
            match ready.learns() {
                true => same_layout(first, &ready)?,
                false => ready.follow(first)?,
            }
            numbers.push(self.bodies.len() + new.len());
            new.push(ready);
        }
        let at = |number: &usize| match self.bodies.get(*number) {
            Some(ready) => ready.as_ref().expect("bodies of a program stay with it"),
            None => &new[*number - self.bodies.len()],
        };
        let ready: Vec<&Ready> = numbers.iter().map(at).collect();
        let buffers = self.memory.work.make_room(&program, &ready, &*self.pool)?;
        self.bodies.extend(new.into_iter().map(Some));
        self.programs.push(Some(Arc::new(Loaded { program, bodies: numbers, buffers })));
        Ok(self.programs.len() - 1)
    }

    /// Drops a program that is no longer needed, and bodies that no other program uses. The first one cannot be dropped.
    pub fn remove(&mut self, number: usize) {
        assert!(number != 0, "the first program fixes the memory layout");
        if number == self.selected {
            self.select(0);
        }
        self.programs[number] = None;
        let used =
            |body: usize| body == 0 || self.programs.iter().flatten().any(|p| p.bodies.contains(&body));
        for body in 0..self.bodies.len() {
            if !used(body) {
                self.bodies[body] = None;
            }
        }
    }

    /// Selects the program that inputs, outputs and runs refer to from now on.
    pub fn select(&mut self, number: usize) {
        assert!(self.programs[number].is_some(), "a number that `add` returned");
        self.selected = number;
    }

    pub(crate) fn loaded(&self) -> Arc<Loaded> {
        self.programs[self.selected].clone().expect("the selected program is there")
    }

    fn selected(&self) -> &Loaded {
        self.programs[self.selected].as_ref().expect("the selected program is there")
    }

    /// The first program, which decides what is kept, and by which rank.
    pub(crate) fn first(&self) -> &Program {
        &self.programs[0].as_ref().expect("the first program stays").program
    }

    /// The body of the first program, and where its values lie.
    pub(crate) fn layout(&self) -> &Ready {
        self.bodies[0].as_ref().expect("the first body stays")
    }

    /// The selected program.
    pub fn program(&self) -> &Program {
        &self.selected().program
    }

    /// How many training steps have been done.
    pub fn steps_done(&self) -> u64 {
        self.memory.state.step
    }

    /// The norm of all gradients at the last clipping.
    pub fn grad_norm(&self) -> Option<f64> {
        self.progress.grad_norm
    }

    /// Where the elements of a region of the selected program lie.
    pub fn span(&self, region: &Region) -> Span {
        self.memory.span(self.selected(), &self.bodies, region)
    }

    /// Runs a program that updates nothing, whose inputs have been filled.
    pub fn run(&mut self) -> Result<(), ExecError> {
        if self.program().optimizer.is_some() {
            return Err(ExecError::Updates);
        }
        self.step_with::<ExecError>(&mut Filled { weight: 1.0 }, StepArgs::default()).map(|_| ())
    }

    /// One training step with this learning rate, whose inputs have been filled.
    pub fn step(&mut self, lr: f32) -> Result<(), ExecError> {
        if self.program().optimizer.is_none() {
            return Err(ExecError::NoOptimizer);
        }
        let args = StepArgs { lr, ..StepArgs::default() };
        self.step_with::<ExecError>(&mut Filled { weight: 1.0 }, args).map(|_| ())
    }

    /// Runs a node on a slot; the slot's microbatch begins with the step's sample `first_sample`.
    pub(crate) fn run_node(
        &mut self,
        body: usize,
        slot: usize,
        node: usize,
        first_sample: u64,
    ) -> Result<(), ExecError> {
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        let (seed, step) = (self.options.seed, self.progress.drawn_at.unwrap_or(self.memory.state.step));
        let draw = DrawKey { seed, step, first_sample, samples: ready.body.samples() };
        let cx = Cx { isa: self.options.isa, par: &*self.pool };
        let slices = self.memory.node(ready, slot, node);
        run(&cx, &ready.prepared[node], &slices, draw).map_err(|kind| {
            let node = &ready.body.graph.nodes[node];
            ExecError::Data { layer: node.layer.clone(), op: node.op.name(), kind }
        })
    }

    /// The body of the selected program's last microbatch, whose results are there after a run.
    fn last_body(&self) -> usize {
        let loaded = self.selected();
        loaded.bodies[loaded.program.microbatches.last().map_or(0, |m| m.body)]
    }

    /// The inputs of the selected program's first microbatch.
    fn inputs(&mut self) -> Inputs<'_> {
        let loaded = self.programs[self.selected].as_ref().expect("the selected program is there");
        let body = loaded.bodies[loaded.program.microbatches.first().map_or(0, |m| m.body)];
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        Inputs { memory: &mut self.memory, ready, slot: 0 }
    }

    /// Fills the inputs of every slot of the selected program before a run: what it loads later stays as it is, if the feed does
    /// not fill it again.
    pub fn fill_slots<E>(&mut self, mut fill: impl FnMut(&mut Inputs) -> Result<(), E>) -> Result<(), E> {
        let slots = self.program().slots;
        (0..slots).try_for_each(|slot| fill(&mut Inputs { slot, ..self.inputs() }))
    }

    /// Whether the selected program is fed an input `name`: of a network in stages, each is fed what its layers read.
    pub fn has_input(&mut self, name: &str) -> bool {
        self.inputs().has(name)
    }

    /// The f32 input `name`, to be filled before a run.
    pub fn input_f32(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        self.inputs().of(name)
    }

    /// The i32 input `name`, to be filled before a run.
    pub fn input_i32(&mut self, name: &str) -> Result<&mut [i32], ExecError> {
        self.inputs().of(name)
    }

    /// The output `name` of the last run.
    pub fn output(&self, name: &str) -> Result<&[f32], ExecError> {
        self.output_of(self.last_body(), 0, name)
    }

    pub(crate) fn output_of(&self, body: usize, slot: usize, name: &str) -> Result<&[f32], ExecError> {
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        let graph = &ready.body.graph;
        let v = graph
            .output(name)
            .ok_or_else(|| unknown("output", name, graph.outputs.iter().map(|(n, _)| n.as_str())))?;
        let dtype = graph.value(v).dtype;
        if dtype != DType::F32 {
            return Err(ExecError::OutputType { name: name.into(), dtype });
        }
        Ok(self.memory.read(ready, slot, v))
    }

    /// The parameter `name`.
    pub fn param(&self, name: &str) -> Result<&[f32], ExecError> {
        let ready = self.layout();
        let v = find(&ready.body.graph.params, "parameter", name)?.1;
        Ok(self.memory.read(ready, 0, v))
    }

    /// The parameter `name`, mutable. Ranks that share weights write it inside [`Engine::exclusively`].
    pub fn param_mut(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        assert!(self.may_write_weights(), "weights that ranks share are written inside `exclusively`");
        let ready = self.bodies[0].as_ref().expect("the first body stays");
        let v = find(&ready.body.graph.params, "parameter", name)?.1;
        self.memory.state.settle(Kept::Params, 0..self.memory.state.lengths.params);
        Ok(self.memory.write(ready, 0, v))
    }

    /// The gradient of the parameter `name` at the last run; `None` if the loss does not depend on it.
    pub fn grad(&self, name: &str) -> Result<Option<&[f32]>, ExecError> {
        if self.first().grad_buffers.is_some() {
            return Err(ExecError::NotKept);
        }
        let ready = self.layout();
        if ready.body.updates_at_once() {
            return Err(ExecError::AtOnce);
        }
        let graph = &ready.body.graph;
        let p = find(&graph.params, "parameter", name)?.0;
        Ok(graph.grads.get(p).copied().flatten().map(|v| self.memory.read(ready, 0, v)))
    }

    /// The state `name`.
    pub fn state(&self, name: &str) -> Result<&[f32], ExecError> {
        let ready = self.layout();
        let v = find(&ready.body.graph.states, "state", name)?.1;
        Ok(self.memory.read(ready, 0, v))
    }

    /// The state `name`, mutable.
    pub fn state_mut(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        let ready = self.bodies[0].as_ref().expect("the first body stays");
        let v = find(&ready.body.graph.states, "state", name)?.1;
        Ok(self.memory.write(ready, 0, v))
    }

    /// Sets the averages to the current parameters, which is where they start.
    pub fn start_average(&mut self) {
        let (params, average) = self.memory.state.params_and_average();
        average.copy_from_slice(params);
    }

    /// Initialises parameters and states, each from its own random stream of the seed.
    pub(crate) fn initialise(&mut self) {
        let cx = Cx { isa: self.options.isa, par: &*self.pool };
        let ready = self.bodies[0].as_ref().expect("the first body stays");
        let graph = &ready.body.graph;
        for stored in graph.params.iter().chain(&graph.states) {
            let key = self.options.seed ^ (stored.number as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
            let data = self.memory.write::<f32>(ready, 0, stored.value);
            // What a part has is what the whole tensor has there.
            let mut rest = data;
            for run in stored.runs(graph.shape(stored.value).dims()) {
                let (data, at) = (rest.split_off_mut(..run.len()), run.start as u64);
                let data = data.expect("the runs are all elements");
                match stored.init {
                    Init::Const(value) => data.fill(value),
                    Init::Uniform { bound } => random::uniform(&cx, key, 0, at, -bound, bound, data),
                    Init::Normal { std } => random::normal(&cx, key, 0, at, 0.0, std, data),
                }
            }
        }
    }
}

/// The lengths, in elements, of the arenas of a rank with this program.
fn lengths(program: &Program, first: &Ready) -> Lengths {
    let plan = &first.plan;
    Lengths {
        params: plan.param_len,
        grads: if first.learns() { plan.grad_len } else { 0 },
        states: plan.state_len,
        moments: moments::lengths(program, first),
        moments_dtype: program.moments,
        n_moments: program.optimizer.map_or(0, |o| o.n_states()),
        average: if program.averages() { plan.param_len } else { 0 },
        residual: if program.keeps_residual() { plan.param_len } else { 0 },
        factors: program.factors_len(),
        velocity: if program.keeps_velocity() { plan.param_len } else { 0 },
    }
}

/// Bytes of the parameters and of the arena of gradients.
pub(crate) fn param_and_grad_bytes(program: &Program, threads: usize, isa: Isa) -> (usize, usize) {
    let Lengths { params, grads, .. } =
        lengths(program, &Ready::new(program, &program.bodies[0], threads, isa));
    (params * F32_BYTES, grads * F32_BYTES)
}

/// Whether a program has the memory layout of the first one. Where buckets begin decides whose moments lie where, and what is
/// summed together. A program without ranks, such as a forward pass, changes nothing that is kept.
fn fits(first: &Program, program: &Program) -> Result<(), ExecError> {
    let kept = |p: &Program| p.role.as_ref().map(|r| (r.keeps, r.weights, r.parts.clone()));
    let same = program.role.is_none()
        || (kept(first) == kept(program) && first.grad_buffers == program.grad_buffers);
    if same { Ok(()) } else { Err(ExecError::Layout) }
}

/// Whether a body has parameters, gradients and states where the first one has them.
fn same_layout(first: &Ready, other: &Ready) -> Result<(), ExecError> {
    let stored =
        |r: &Ready| (r.plan.param_offsets.clone(), r.plan.param_len, r.plan.grad_len, r.plan.state_len);
    let grads = |r: &Ready| grad_starts(&r.body.graph, r);
    let parts = |r: &Ready| {
        let graph = &r.body.graph;
        graph.params.iter().chain(&graph.states).map(|s| (s.part, s.shard)).collect::<Vec<_>>()
    };
    let same = stored(first) == stored(other) && grads(first) == grads(other) && parts(first) == parts(other);
    if same { Ok(()) } else { Err(ExecError::Layout) }
}

/// Where the gradients of parameters begin in their arena, in the order in which they become ready.
fn grad_starts(graph: &Graph, ready: &Ready) -> Vec<Option<usize>> {
    let start = |p: usize| match graph.grads.get(p).copied().flatten().map(|g| ready.plan.places[g.idx()]) {
        Some(Place::Grad(at)) => Some(at),
        _ => None,
    };
    readiness(graph).into_iter().map(start).collect()
}

fn find(list: &[Stored], what: &'static str, name: &str) -> Result<(usize, ValueId), ExecError> {
    let at = list.iter().position(|s| s.name == name);
    at.map(|i| (i, list[i].value)).ok_or_else(|| unknown(what, name, list.iter().map(|s| s.name.as_str())))
}

pub(crate) fn unknown<'a>(what: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> ExecError {
    let known: Vec<_> = known.collect();
    ExecError::Unknown { what, name: name.into(), known: known.join(", ") }
}
