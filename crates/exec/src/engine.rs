//! The engine of one rank: a program, its memory and its team of threads.

use std::ops::Range;
use std::time::{Duration, Instant};

use polyreme_collective::Block;
use polyreme_graph::graph::{Graph, Init, Stored};
use polyreme_graph::memory::readiness;
use polyreme_graph::{DType, Instr, MemoryPlan, NodeId, Op, Place, Program, ValueId};
use polyreme_kernels::optim::{StepHyper, clip_scale, global_norm};
use polyreme_kernels::{Cx, Isa, random};

use crate::error::ExecError;
use crate::group::Group;
use crate::kernel_types::check_kernels;
use crate::launch::{Prepared, prepare};
use crate::memory::{Keeping, Memory, Workspace};
use crate::pool::Pool;
use crate::run::{StepArgs, run};
use crate::shards::ShardSums;
use crate::timeline::Timeline;

/// How to run a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Threads of this rank, the caller's included.
    pub threads: usize,
    /// The instruction set.
    pub isa: Isa,
    /// From which parameters and masks of dropout follow.
    pub seed: u64,
}

impl Options {
    /// So many threads, the best instruction set, seed 0.
    pub fn threads(threads: usize) -> Options {
        Options { threads, isa: Isa::detect(), seed: 0 }
    }
}

/// Bytes that a program takes, known before anything is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Parameters.
    pub params: usize,
    /// Their gradients.
    pub grads: usize,
    /// Sums of a step's logical shards, or of its earlier pieces.
    pub sums: usize,
    /// Optimizer state.
    pub optimizer: usize,
    /// States without a gradient.
    pub states: usize,
    /// Inputs.
    pub inputs: usize,
    /// Activations and scratch, at their peak.
    pub activations: usize,
}

impl Footprint {
    /// All of it.
    pub fn total(&self) -> usize {
        self.params + self.grads + self.sums + self.optimizer + self.states + self.inputs + self.activations
    }

    /// The same if steps have several pieces ([`Engine::accumulate`]): the sums of the earlier ones take as much as the
    /// gradients of the last. Ranks that keep their own part of the gradients only sum every piece where it is kept, and
    /// logical shards have sums already.
    pub fn in_pieces(self, program: &Program) -> Footprint {
        let elsewhere = program.buffers.is_some() || self.sums > 0;
        Footprint { sums: if elsewhere { self.sums } else { self.grads }, ..self }
    }
}

/// Runs a program, step after step.
pub struct Engine {
    /// The other ranks. The first field, so that what runs in the background ends before its memory goes.
    pub(crate) group: Option<Group>,
    pub(crate) program: Program,
    pub(crate) prepared: Vec<Prepared>,
    pub(crate) memory: Memory,
    pub(crate) pool: Pool,
    pub(crate) options: Options,
    /// Bounds of the parameters' tensors in their arena, in the order of readiness.
    pub(crate) tensors: Vec<Range<usize>>,
    /// In the same order, where their gradients begin in theirs.
    pub(crate) grad_starts: Vec<usize>,
    pub(crate) step: u64,
    /// The place of the batch's first sample among those of the step.
    pub(crate) first_sample: u64,
    pub(crate) grad_norm: Option<f64>,
    /// The maximum that this step's norm is brought down to.
    pub(crate) clip_max: Option<f64>,
    /// Which batch size is in place, and the others.
    pub(crate) selected: usize,
    pub(crate) parked: Vec<Option<Parked>>,
    /// Where the time goes, if somebody wants to know.
    pub(crate) timeline: Option<Timeline>,
}

/// A batch size that is not in place.
pub(crate) struct Parked {
    pub(crate) program: Program,
    pub(crate) prepared: Vec<Prepared>,
    pub(crate) workspace: Workspace,
}

impl Engine {
    /// Plans and reserves everything, and initialises parameters and states.
    pub fn new(program: Program, options: Options) -> Result<Engine, ExecError> {
        let mut engine = Engine::reserve(program, options, None)?;
        engine.initialise();
        Ok(engine)
    }

    /// The same without initial values; `blocks` are shared weights and visible gradients.
    pub(crate) fn reserve(
        program: Program,
        options: Options,
        blocks: Option<(Option<Block>, Block)>,
    ) -> Result<Engine, ExecError> {
        check_kernels(&program.graph)?;
        let (prepared, plan) = lay_out(&program, options.threads);
        let tensors = readiness(&program.graph)
            .into_iter()
            .map(|p| {
                let start = plan.param_offsets[p];
                start..start + program.graph.shape(program.graph.params[p].value).numel()
            })
            .collect();
        let grad_starts = grad_starts(&program.graph, &plan);
        let keeping = Keeping {
            state_per_param: program.optimizer.map_or(0, |o| o.state_per_param()),
            moment_len: moment_len(&program, &plan),
            gradients: has_grads(&program.graph) && plan.grad_len > 0,
            own_gradients: program.buffers.is_some(),
            blocks,
        };
        let memory = Memory::new(plan, keeping)?;
        let pool = Pool::new(options.threads.max(1)).map_err(|e| ExecError::Thread { why: e.to_string() })?;
        let (step, first_sample, grad_norm) = (0, 0, None);
        let parked = vec![None];
        Ok(Engine {
            group: None,
            program,
            prepared,
            memory,
            pool,
            options,
            tensors,
            grad_starts,
            step,
            first_sample,
            grad_norm,
            clip_max: None,
            selected: 0,
            parked,
            timeline: None,
        })
    }

    /// What `program` would take with these options: of optimizer state and gradients, what this rank keeps.
    pub fn footprint(program: &Program, threads: usize) -> Footprint {
        let (_, plan) = lay_out(program, threads);
        let own = moment_len(program, &plan) * 4;
        let kept = if program.buffers.is_some() { own } else { 0 };
        let shards = program.role.as_ref().and_then(|role| Some((role.shards?, role.ranks)));
        Footprint {
            params: plan.param_len * 4,
            grads: if has_grads(&program.graph) { plan.grad_len * 4 + kept } else { 0 },
            sums: shards.map_or(0, |(n, ranks)| 4 * ShardSums::floats(n, ranks, &plan)),
            optimizer: own * program.optimizer.map_or(0, |o| o.state_per_param()),
            states: plan.state_len * 4,
            inputs: plan.input_bytes,
            activations: plan.arena_bytes,
        }
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// How many steps have been done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// The norm of all gradients at the last clipping.
    pub fn grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }

    /// Runs every node: the forward pass, and the backward pass if the program has one. Nothing is updated.
    pub fn run(&mut self) -> Result<(), ExecError> {
        self.keeps_gradients()?;
        for i in 0..self.program.instrs.len() {
            if let Instr::Compute(node) = self.program.instrs[i] {
                self.run_node(node.idx())?;
            }
        }
        Ok(())
    }

    pub(crate) fn run_node(&mut self, i: usize) -> Result<(), ExecError> {
        let graph = &self.program.graph;
        let args = StepArgs {
            seed: self.options.seed,
            step: self.step,
            first_sample: self.first_sample,
            batch: batch(graph),
        };
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let slices = self.memory.node(graph, i);
        run(&cx, &self.prepared[i], &slices, args).map_err(|kind| {
            let node = &graph.nodes[i];
            ExecError::Data { layer: node.layer.clone(), op: node.op.name(), kind }
        })?;
        if let (Op::AxisSum, Some(group)) = (&graph.nodes[i].op, &mut self.group) {
            group.sum_over_axis(self.memory.write(graph, graph.nodes[i].outputs[0]))?;
        }
        Ok(())
    }

    pub(crate) fn cx(&self) -> Cx<'_> {
        Cx { isa: self.options.isa, par: &self.pool }
    }

    /// One training step with this learning rate: runs every node, then keeps, clips and updates.
    pub fn step(&mut self, lr: f32) -> Result<(), ExecError> {
        self.step_watched(lr, &mut |_, _| {})
    }

    /// The same, and tells how long each node took, and (`None`) what came after them.
    pub fn step_timed(
        &mut self,
        lr: f32,
        report: &mut dyn FnMut(Option<NodeId>, Duration),
    ) -> Result<(), ExecError> {
        let mut start = Instant::now();
        self.step_watched(lr, &mut |node, ended| {
            if ended {
                report(node, start.elapsed());
            }
            start = Instant::now();
        })
    }

    /// One training step; `watch(what, false)` before each node and the rest, and `watch(what, true)` after.
    fn step_watched(
        &mut self,
        lr: f32,
        watch: &mut dyn FnMut(Option<NodeId>, bool),
    ) -> Result<(), ExecError> {
        if self.program.optimizer.is_none() {
            return Err(ExecError::NoOptimizer);
        }
        let hyper = StepHyper { lr, step: self.step + 1, grad_scale: 1.0, decay_scale: 1.0 };
        for i in 0..self.program.instrs.len() {
            let Some(node) = self.program.instrs[i].node() else { continue };
            watch(Some(node), false);
            match self.program.instrs[i] {
                Instr::Apply { node, param } => self.apply(node, param, hyper),
                _ => self.run_node(node.idx())?,
            }
            watch(Some(node), true);
        }
        watch(None, false);
        self.keep();
        self.update(lr);
        watch(None, true);
        Ok(())
    }

    /// Takes over the states that the last run made.
    pub fn keep(&mut self) {
        for instr in &self.program.instrs {
            if let Instr::Keep { state, value } = *instr {
                let to = self.program.graph.states[state].value;
                self.memory.copy(&self.program.graph, value, to);
            }
        }
    }

    /// Clips and updates, from the gradients that the last run left; without an optimizer it only counts the step.
    pub fn update(&mut self, lr: f32) {
        self.step += 1;
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let mut grad_scale = 1.0;
        for instr in &self.program.instrs {
            match *instr {
                Instr::Compute(_) | Instr::Apply { .. } | Instr::Keep { .. } => {}
                Instr::Start(_) | Instr::Wait(_) | Instr::Take { .. } | Instr::UpdateOwn { .. } => {
                    unreachable!("a program of several ranks is run by `finish`")
                }
                Instr::Clip { max_norm } => {
                    let norm = global_norm(&cx, self.memory.all_grads());
                    grad_scale = clip_scale(norm, max_norm);
                    self.grad_norm = Some(norm);
                }
                Instr::Update { first, last } => {
                    let (Some(optimizer), true) = (self.program.optimizer, first < last) else { continue };
                    let tensors = &self.tensors[first..last];
                    let (start, end) = (tensors[0].start, tensors[tensors.len() - 1].end);
                    let hyper = StepHyper { lr, step: self.step, grad_scale, decay_scale: 1.0 };
                    debug_assert!(
                        start == 0 || optimizer.by_element(),
                        "LAMB counts its tensors from the start of the range"
                    );
                    let r = self.memory.update_whole(start, end, self.grad_starts[first]);
                    optimizer.step(&cx, hyper, r.params, r.grads, r.state1, r.state2, tensors);
                }
            }
        }
    }

    /// The input `name`, to fill before a run; f32.
    pub fn input_f32(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        let v = self.input(name, DType::F32)?;
        Ok(self.memory.write(&self.program.graph, v))
    }

    /// The input `name`, to fill before a run; i32.
    pub fn input_i32(&mut self, name: &str) -> Result<&mut [i32], ExecError> {
        let v = self.input(name, DType::I32)?;
        Ok(self.memory.write(&self.program.graph, v))
    }

    /// The output `name` of the last run.
    pub fn output(&self, name: &str) -> Result<&[f32], ExecError> {
        let graph = &self.program.graph;
        let v = graph
            .output(name)
            .ok_or_else(|| unknown("output", name, graph.outputs.iter().map(|(n, _)| n.as_str())))?;
        let dtype = graph.value(v).dtype;
        if dtype != DType::F32 {
            return Err(ExecError::OutputType { name: name.into(), dtype });
        }
        Ok(self.memory.read(graph, v))
    }

    /// The parameter `name`.
    pub fn param(&self, name: &str) -> Result<&[f32], ExecError> {
        let v = find(&self.program.graph.params, "parameter", name)?.1;
        Ok(self.memory.read(&self.program.graph, v))
    }

    /// The parameter `name`, to set. Ranks that share weights do it inside [`Engine::exclusively`].
    pub fn param_mut(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        assert!(self.may_write_weights(), "weights that ranks share are written inside `exclusively`");
        let v = find(&self.program.graph.params, "parameter", name)?.1;
        Ok(self.memory.write(&self.program.graph, v))
    }

    /// The gradient of the parameter `name` at the last run; `None` if the loss does not depend on it.
    pub fn grad(&self, name: &str) -> Result<Option<&[f32]>, ExecError> {
        if self.program.buffers.is_some() {
            return Err(ExecError::NotKept);
        }
        self.keeps_gradients()?;
        let graph = &self.program.graph;
        let p = find(&graph.params, "parameter", name)?.0;
        Ok(graph.grads.get(p).copied().flatten().map(|v| self.memory.read(graph, v)))
    }

    /// The state `name`.
    pub fn state(&self, name: &str) -> Result<&[f32], ExecError> {
        let v = find(&self.program.graph.states, "state", name)?.1;
        Ok(self.memory.read(&self.program.graph, v))
    }

    /// The state `name`, to set.
    pub fn state_mut(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        let v = find(&self.program.graph.states, "state", name)?.1;
        Ok(self.memory.write(&self.program.graph, v))
    }

    fn input(&self, name: &str, got: DType) -> Result<ValueId, ExecError> {
        let graph = &self.program.graph;
        let input = graph.inputs.iter().find(|i| i.name == name);
        let input =
            input.ok_or_else(|| unknown("input", name, graph.inputs.iter().map(|i| i.name.as_str())))?;
        let want = graph.value(input.value).dtype;
        if want != got {
            return Err(ExecError::Type { name: name.into(), want, got });
        }
        Ok(input.value)
    }

    /// Parameters and states from their initialisers (each its own stream of the seed), constants.
    pub(crate) fn initialise(&mut self) {
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let graph = &self.program.graph;
        for (i, stored) in graph.params.iter().chain(&graph.states).enumerate() {
            let key = self.options.seed ^ (i as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
            let data = self.memory.write::<f32>(graph, stored.value);
            match stored.init {
                Init::Const(value) => data.fill(value),
                Init::Uniform { bound } => random::uniform(&cx, key, 0, 0, -bound, bound, data),
                Init::Normal { std } => random::normal(&cx, key, 0, 0, 0.0, std, data),
            }
        }
        self.set_constants();
    }

    /// Constants are written once: nobody else uses their places.
    pub(crate) fn set_constants(&mut self) {
        let graph = &self.program.graph;
        for node in &graph.nodes {
            if let Op::Const(value) = node.op {
                self.memory.write::<f32>(graph, node.outputs[0])[0] = value;
            }
        }
    }
}

/// Samples of a batch: the first dim of the first input.
fn batch(graph: &Graph) -> usize {
    graph.inputs.first().and_then(|i| graph.shape(i.value).dims().first().copied()).unwrap_or(1)
}

/// Parameters that a rank keeps moments for: what it updates, or everything.
fn moment_len(program: &Program, plan: &MemoryPlan) -> usize {
    match &program.role {
        Some(role) if role.sharded => role.own().iter().map(|r| r.len()).sum(),
        _ => plan.param_len,
    }
}

/// Where the gradients of parameters begin in their arena, in the order of readiness.
pub(crate) fn grad_starts(graph: &Graph, plan: &MemoryPlan) -> Vec<usize> {
    let start = |p: usize| match graph.grads.get(p).copied().flatten().map(|g| plan.places[g.idx()]) {
        Some(Place::Grad(at)) => at,
        _ => 0,
    };
    readiness(graph).into_iter().map(start).collect()
}

fn has_grads(graph: &Graph) -> bool {
    graph.grads.iter().any(Option::is_some)
}

pub(crate) fn lay_out(program: &Program, threads: usize) -> (Vec<Prepared>, MemoryPlan) {
    let graph = &program.graph;
    let mut at_once = vec![false; graph.nodes.len()];
    for instr in &program.instrs {
        if let Instr::Apply { node, .. } = instr {
            at_once[node.idx()] = true;
        }
    }
    let prepared: Vec<_> =
        at_once.iter().enumerate().map(|(i, &at_once)| prepare(graph, i, at_once, threads.max(1))).collect();
    let scratch: Vec<_> = prepared.iter().map(|p| p.scratch).collect();
    let mut plan = MemoryPlan::new(graph, &scratch);
    program.place_gradients(&mut plan);
    if let Some(buffers) = &program.buffers {
        buffers.verify(program);
        buffers.apply(&mut plan);
    }
    (prepared, plan)
}

fn find(list: &[Stored], what: &'static str, name: &str) -> Result<(usize, ValueId), ExecError> {
    let at = list.iter().position(|s| s.name == name);
    at.map(|i| (i, list[i].value)).ok_or_else(|| unknown(what, name, list.iter().map(|s| s.name.as_str())))
}

fn unknown<'a>(what: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> ExecError {
    let known: Vec<_> = known.collect();
    ExecError::Unknown { what, name: name.into(), known: known.join(", ") }
}
