//! A step of one rank among others: pieces whose gradients are added up, exchanges that go on while it computes, the
//! update of its own part.

use std::time::{Duration, Instant};

use polyreme_collective::Reduce;
use polyreme_graph::{Exchange, Instr, Op};
use polyreme_kernels::Cx;
use polyreme_kernels::optim::{StepHyper, clip_scale, sum_of_squares};

use crate::engine::Engine;
use crate::error::ExecError;
use crate::memory::{Memory, UpdateRange};
use crate::timeline::MomentKind;

/// Elements that one task of a pass over gradients takes.
const CHUNK: usize = 1 << 15;

/// What a step came to, over all its pieces and ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Totals {
    /// The mean loss, weighted.
    pub loss: f64,
    /// The sum of the weights.
    pub weight: f64,
    /// The caller's numbers, added up over the ranks.
    pub extra: [f64; 2],
    /// The gradients' norm, if they are clipped.
    pub grad_norm: Option<f64>,
    /// How long this rank waited for others.
    pub waited: Duration,
}

impl Engine {
    /// Begins a step.
    pub fn begin_step(&mut self) {
        let step = self.step;
        let group = self.group.as_mut().expect("an engine that joined");
        group.comm.set_step(step);
        group.totals.fill(0.0);
        (group.pieces, group.waited, group.not_finite_here) = (0, Duration::ZERO, false);
        if let Some(shards) = &mut group.shards {
            shards.begin();
        }
    }

    /// Runs a piece that is not the last of this rank's step: the loss's gradient is multiplied by `weight`, the
    /// input of that name, and the piece counts by it.
    ///
    /// Ranks that keep their own part of the gradients only sum every piece, so all of them have as many; see
    /// [`Engine::accumulate_empty`].
    pub fn accumulate(&mut self, weight: f64) -> Result<(), ExecError> {
        self.keeps_gradients()?;
        self.set_weight(weight)?;
        match self.program.buffers.is_some() {
            true => self.run_and_sum(false)?,
            false => self.run_nodes()?,
        }
        self.keep();
        self.count_loss(weight)?;
        let group = self.group.as_mut().expect("an engine that joined");
        let first = group.pieces == 0;
        group.pieces += 1;
        if self.program.buffers.is_none() {
            let cx = Cx { isa: self.options.isa, par: &self.pool };
            self.memory.make_sums()?;
            let (grads, sums) = self.memory.grads_and_sums(0..self.memory.all_grads().len());
            add_or_set(&cx, sums, grads, first);
        }
        Ok(())
    }

    /// Runs the last piece of a step, exchanges gradients with the other ranks meanwhile, and updates.
    ///
    /// If the loss over all ranks is not finite, all ranks get an error and nothing is updated.
    pub fn finish(&mut self, weight: f64, lr: f32, extra: [f64; 2]) -> Result<Totals, ExecError> {
        self.set_weight(weight)?;
        self.exchange_and_update(Some(weight), lr, extra)
    }

    /// Ends a step in which this rank has no samples.
    pub fn finish_empty(&mut self, lr: f32, extra: [f64; 2]) -> Result<Totals, ExecError> {
        self.keeps_gradients()?;
        if self.program.buffers.is_none() {
            self.memory.all_grads_mut().fill(0.0);
        }
        self.exchange_and_update(None, lr, extra)
    }

    /// Takes part in the sums over the ranks that a piece makes, without samples. Where batch norms see the rows of all
    /// ranks, and where ranks keep their own part of the gradients only, every rank makes as many pieces as the others,
    /// with this if it has nothing left.
    pub fn accumulate_empty(&mut self) -> Result<(), ExecError> {
        if self.program.buffers.is_none() {
            return (0..self.program.graph.nodes.len()).try_for_each(|i| self.sum_nothing(i));
        }
        self.run_and_sum(true)?;
        self.group.as_mut().expect("an engine that joined").pieces += 1;
        Ok(())
    }

    /// Runs all nodes of a piece and sums its gradients over the ranks; without samples, adds nothing to the sums.
    fn run_and_sum(&mut self, empty: bool) -> Result<(), ExecError> {
        self.begin_exchanges(empty);
        for i in 0..self.program.instrs.len() {
            match self.program.instrs[i] {
                Instr::Compute(node) if empty => self.sum_nothing(node.idx())?,
                Instr::Compute(node) => self.run_recorded(node.idx())?,
                Instr::Start(at) if self.sums_gradients(at) => self.start(at),
                Instr::Wait(at) if self.sums_gradients(at) => self.wait(at)?,
                Instr::Take { exchange, to } => self.take(exchange, to),
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds nothing to a sum over the ranks; no other node is run.
    fn sum_nothing(&mut self, node: usize) -> Result<(), ExecError> {
        let graph = &self.program.graph;
        if let (Op::AxisSum, Some(group)) = (&graph.nodes[node].op, &mut self.group) {
            let value = self.memory.write::<f32>(graph, graph.nodes[node].outputs[0]);
            value.fill(0.0);
            group.sum_over_axis(value)?;
        }
        Ok(())
    }

    fn exchange_and_update(
        &mut self,
        weight: Option<f64>,
        lr: f32,
        extra: [f64; 2],
    ) -> Result<Totals, ExecError> {
        self.begin_exchanges(weight.is_none());
        for i in 0..self.program.instrs.len() {
            match self.program.instrs[i] {
                Instr::Compute(node) if weight.is_some() => self.run_recorded(node.idx())?,
                Instr::Compute(node) => self.sum_nothing(node.idx())?,
                Instr::Apply { node, param } => self.apply(node, param, self.hyper(lr)),
                Instr::Start(at) if matches!(self.program.exchanges[at], Exchange::Totals) => {
                    if let Some(weight) = weight {
                        self.count_loss(weight)?;
                    }
                    self.start_totals(at, extra);
                }
                Instr::Keep { .. } if weight.is_none() => {}
                _ => self.after_backward(i, lr)?,
            }
        }
        Ok(self.end_step())
    }

    /// Instructions that need no samples: exchanges, the end of the step.
    pub(crate) fn after_backward(&mut self, instr: usize, lr: f32) -> Result<(), ExecError> {
        match self.program.instrs[instr] {
            Instr::Compute(_) | Instr::Apply { .. } => {}
            Instr::Start(at) => self.start(at),
            Instr::Wait(at) => self.wait(at)?,
            Instr::Take { exchange, to } => self.take(exchange, to),
            Instr::Keep { state, value } => {
                let to = self.program.graph.states[state].value;
                self.memory.copy(&self.program.graph, value, to);
            }
            Instr::Clip { max_norm } => self.clip(max_norm)?,
            Instr::Update { first, last } => {
                if first < last {
                    let tensors = &self.tensors[first..last];
                    let (start, end) = (tensors[0].start, tensors[tensors.len() - 1].end);
                    let grads_at = self.grad_starts[first];
                    self.update_with(lr, |memory| memory.update_whole(start, end, grads_at));
                }
            }
            Instr::UpdateOwn { start, end, moments_at } => {
                self.update_with(lr, |memory| memory.update_own(start, end, moments_at));
            }
        }
        Ok(())
    }

    pub(crate) fn end_step(&mut self) -> Totals {
        self.step += 1;
        let group = self.group.as_mut().expect("an engine that joined");
        let [loss, weight, a, b] = *group.totals;
        let grad_norm = self.grad_norm;
        Totals { loss: loss / weight, weight, extra: [a, b], grad_norm, waited: group.waited }
    }

    pub(crate) fn set_weight(&mut self, weight: f64) -> Result<(), ExecError> {
        self.input_f32("weight")?[0] = weight as f32;
        Ok(())
    }

    /// Runs all nodes.
    pub(crate) fn run_nodes(&mut self) -> Result<(), ExecError> {
        (0..self.program.graph.nodes.len()).try_for_each(|i| self.run_recorded(i))
    }

    fn run_recorded(&mut self, node: usize) -> Result<(), ExecError> {
        let start = self.timeline.is_some().then(Instant::now);
        self.run_node(node)?;
        if let (Some(start), Some(timeline)) = (start, &mut self.timeline) {
            let node = &self.program.graph.nodes[node];
            let name = || format!("{} {}", node.op.name(), node.layer);
            timeline.push(name, MomentKind::Compute, self.step, start);
        }
        Ok(())
    }

    /// Adds the loss of the last run to the step's.
    pub(crate) fn count_loss(&mut self, weight: f64) -> Result<f64, ExecError> {
        let loss = f64::from(self.output("loss")?[0]);
        let group = self.group.as_mut().expect("an engine that joined");
        group.totals[0] += weight * loss;
        group.totals[1] += weight;
        group.not_finite_here |= !loss.is_finite();
        Ok(loss)
    }

    fn clip(&mut self, max_norm: f64) -> Result<(), ExecError> {
        let role = self.role().clone();
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let group = self.group.as_mut().expect("an engine that joined");
        let squares = match &mut group.shards {
            Some(shards) => shards.squares(&cx, self.memory.all_grads(), &role, &mut group.comm)?,
            None => {
                let (mut squares, mut moments_at) = ([0.0], 0);
                for range in role.own() {
                    squares[0] += sum_of_squares(&cx, self.memory.own_grads(range.clone(), moments_at));
                    moments_at += range.len();
                }
                if role.sharded {
                    group.comm.all_reduce(&mut squares, Reduce::Sum)?;
                }
                squares[0]
            }
        };
        self.grad_norm = Some(squares.sqrt() / group.totals[1]);
        self.clip_max = Some(max_norm);
        Ok(())
    }

    /// What this step's updates are told; when the totals are known.
    fn hyper(&self, lr: f32) -> StepHyper {
        let group = self.group.as_ref().expect("an engine that joined");
        let clip = match (self.grad_norm, self.clip_max) {
            (Some(norm), Some(max)) => clip_scale(norm, max),
            _ => 1.0,
        };
        let grad_scale = (1.0 / group.totals[1]) as f32 * clip;
        StepHyper { lr, step: self.step + 1, grad_scale, decay_scale: 1.0 }
    }

    fn update_with(&mut self, lr: f32, range: impl FnOnce(&mut Memory) -> UpdateRange<'_>) {
        let Some(optimizer) = self.program.optimizer else { return };
        let began = self.timeline.is_some().then(Instant::now);
        let hyper = self.hyper(lr);
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let r = range(&mut self.memory);
        optimizer.step(&cx, hyper, r.params, r.grads, r.state1, r.state2, &self.tensors);
        if let (Some(began), Some(timeline)) = (began, &mut self.timeline) {
            timeline.push(|| "update".into(), MomentKind::Compute, self.step, began);
        }
    }
}

/// `to = from` if `set`, `to += from` otherwise.
pub(crate) fn add_or_set(cx: &Cx, to: &mut [f32], from: &[f32], set: bool) {
    if !set {
        return add(cx, to, from);
    }
    cx.for_each_chunk(to, CHUNK, |i, to| to.copy_from_slice(&from[i * CHUNK..i * CHUNK + to.len()]));
}

/// `to += from`.
pub(crate) fn add(cx: &Cx, to: &mut [f32], from: &[f32]) {
    cx.for_each_chunk(to, CHUNK, |i, to| {
        let from = &from[i * CHUNK..i * CHUNK + to.len()];
        to.iter_mut().zip(from).for_each(|(t, f)| *t += f);
    });
}
