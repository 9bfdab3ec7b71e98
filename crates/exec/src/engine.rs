//! The engine of one rank: a program, its memory and its team of threads.

use std::ops::Range;
use std::time::{Duration, Instant};

use polyreme_graph::graph::{Graph, Init, Stored};
use polyreme_graph::memory::readiness;
use polyreme_graph::{DType, Instr, MemoryPlan, NodeId, Op, Program, ValueId};
use polyreme_kernels::optim::{StepHyper, clip_scale, global_norm};
use polyreme_kernels::{Cx, Isa, random};

use crate::error::ExecError;
use crate::launch::{Prepared, prepare};
use crate::memory::Memory;
use crate::pool::Pool;
use crate::run::{StepArgs, run};

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
        self.params + self.grads + self.optimizer + self.states + self.inputs + self.activations
    }
}

/// Runs a program, step after step.
pub struct Engine {
    pub(crate) program: Program,
    prepared: Vec<Prepared>,
    pub(crate) memory: Memory,
    pool: Pool,
    options: Options,
    /// Bounds of the parameters' tensors in their arena, in the order of readiness.
    tensors: Vec<Range<usize>>,
    pub(crate) step: u64,
    /// The place of the batch's first sample among those of the step.
    pub(crate) first_sample: u64,
    grad_norm: Option<f64>,
}

impl Engine {
    /// Plans and reserves everything, and initialises parameters and states.
    pub fn new(program: Program, options: Options) -> Engine {
        let (prepared, plan) = lay_out(&program.graph, options.threads);
        let tensors = readiness(&program.graph)
            .into_iter()
            .map(|p| {
                let start = plan.param_offsets[p];
                start..start + program.graph.shape(program.graph.params[p].value).numel()
            })
            .collect();
        let state_per_param = program.optimizer.map_or(0, |o| o.state_per_param());
        let memory = Memory::new(plan, state_per_param, has_grads(&program.graph));
        let pool = Pool::new(options.threads.max(1));
        let (step, first_sample, grad_norm) = (0, 0, None);
        let mut engine =
            Engine { program, prepared, memory, pool, options, tensors, step, first_sample, grad_norm };
        engine.initialise();
        engine
    }

    /// What `program` would take with these options.
    pub fn footprint(program: &Program, threads: usize) -> Footprint {
        let (_, plan) = lay_out(&program.graph, threads);
        let params = plan.param_len * 4;
        Footprint {
            params,
            grads: if has_grads(&program.graph) { params } else { 0 },
            optimizer: params * program.optimizer.map_or(0, |o| o.state_per_param()),
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
        self.run_watched(&mut |_, _| {})
    }

    /// The same, and tells how long each node took.
    pub fn run_timed(&mut self, report: &mut dyn FnMut(NodeId, Duration)) -> Result<(), ExecError> {
        let mut start = Instant::now();
        self.run_watched(&mut |node, ended| {
            if ended {
                report(node, start.elapsed());
            }
            start = Instant::now();
        })
    }

    /// Runs every node; `watch(node, false)` before each and `watch(node, true)` after.
    fn run_watched(&mut self, watch: &mut dyn FnMut(NodeId, bool)) -> Result<(), ExecError> {
        for i in 0..self.program.instrs.len() {
            let Instr::Compute(node) = self.program.instrs[i] else { continue };
            watch(node, false);
            self.run_node(node.idx())?;
            watch(node, true);
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
        })
    }

    pub(crate) fn cx(&self) -> Cx<'_> {
        Cx { isa: self.options.isa, par: &self.pool }
    }

    /// One training step with this learning rate: runs every node, then keeps, clips and updates.
    pub fn step(&mut self, lr: f32) -> Result<(), ExecError> {
        if self.program.optimizer.is_none() {
            return Err(ExecError::NoOptimizer);
        }
        self.run()?;
        self.keep();
        self.update(lr);
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
                Instr::Compute(_) | Instr::Keep { .. } => {}
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
                    debug_assert_eq!(start, 0, "LAMB counts its tensors from the start of the range");
                    let r = self.memory.update_range(start, end);
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

    /// The parameter `name`, to set.
    pub fn param_mut(&mut self, name: &str) -> Result<&mut [f32], ExecError> {
        let v = find(&self.program.graph.params, "parameter", name)?.1;
        Ok(self.memory.write(&self.program.graph, v))
    }

    /// The gradient of the parameter `name` at the last run; `None` if the loss does not depend on it.
    pub fn grad(&self, name: &str) -> Result<Option<&[f32]>, ExecError> {
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
    fn initialise(&mut self) {
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

fn has_grads(graph: &Graph) -> bool {
    graph.grads.iter().any(Option::is_some)
}

fn lay_out(graph: &Graph, threads: usize) -> (Vec<Prepared>, MemoryPlan) {
    let prepared: Vec<_> = (0..graph.nodes.len()).map(|i| prepare(graph, i, threads.max(1))).collect();
    let scratch: Vec<_> = prepared.iter().map(|p| p.scratch).collect();
    (prepared, MemoryPlan::new(graph, &scratch))
}

fn find(list: &[Stored], what: &'static str, name: &str) -> Result<(usize, ValueId), ExecError> {
    let at = list.iter().position(|s| s.name == name);
    at.map(|i| (i, list[i].value)).ok_or_else(|| unknown(what, name, list.iter().map(|s| s.name.as_str())))
}

fn unknown<'a>(what: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> ExecError {
    let known: Vec<_> = known.collect();
    ExecError::Unknown { what, name: name.into(), known: known.join(", ") }
}
