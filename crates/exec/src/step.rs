//! A step of one rank among others: pieces whose gradients are added up, exchanges that go on while it computes, the
//! update of its own part.

use std::time::{Duration, Instant};

use polyreme_collective::{Reduce, Span, Work};
use polyreme_graph::{Exchange, Instr, Op};
use polyreme_kernels::Cx;
use polyreme_kernels::optim::{StepHyper, clip_scale, sum_of_squares};

use crate::engine::Engine;
use crate::error::ExecError;
use crate::group::Group;
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
    pub fn accumulate(&mut self, weight: f64) -> Result<(), ExecError> {
        self.set_weight(weight)?;
        self.run_nodes()?;
        self.keep();
        self.count_loss(weight)?;
        let group = self.group.as_mut().expect("an engine that joined");
        let first = group.pieces == 0;
        group.pieces += 1;
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let (grads, sums) = self.memory.grads_and_sums();
        let grads = &*grads;
        cx.for_each_chunk(sums, CHUNK, |i, sums| {
            let grads = &grads[i * CHUNK..i * CHUNK + sums.len()];
            if first {
                sums.copy_from_slice(grads);
            } else {
                sums.iter_mut().zip(grads).for_each(|(s, g)| *s += g);
            }
        });
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
        self.memory.all_grads_mut().fill(0.0);
        self.exchange_and_update(None, lr, extra)
    }

    /// Takes part in the sums over the ranks that a piece makes, without samples. Where batch norms see the rows of all
    /// ranks, every rank makes as many pieces as the others, with this if it has nothing left.
    pub fn accumulate_empty(&mut self) -> Result<(), ExecError> {
        (0..self.program.graph.nodes.len()).try_for_each(|i| self.sum_nothing(i))
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
        let n = self.program.exchanges.len();
        let group = self.group.as_mut().expect("an engine that joined");
        group.tickets.clear();
        group.tickets.resize(n, None);
        for i in 0..self.program.instrs.len() {
            match self.program.instrs[i] {
                Instr::Compute(node) if weight.is_some() => self.run_recorded(node.idx())?,
                Instr::Compute(node) => self.sum_nothing(node.idx())?,
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
            Instr::Compute(_) => {}
            Instr::Start(at) => self.start(at),
            Instr::Wait(at) => self.wait(at)?,
            Instr::Keep { state, value } => {
                let to = self.program.graph.states[state].value;
                self.memory.copy(&self.program.graph, value, to);
            }
            Instr::Clip { max_norm } => self.clip(max_norm)?,
            Instr::Update { first, last } => {
                if first < last {
                    let tensors = &self.tensors[first..last];
                    let (start, end) = (tensors[0].start, tensors[tensors.len() - 1].end);
                    self.update_elements(start, end, start, lr);
                }
            }
            Instr::UpdateOwn { start, end, moments_at } => self.update_elements(start, end, moments_at, lr),
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

    fn start_totals(&mut self, at: usize, extra: [f64; 2]) {
        let role_ranks = self.role().ranks;
        let Group { comm, totals, tickets, .. } = self.group.as_mut().expect("an engine that joined");
        (totals[2], totals[3]) = (extra[0], extra[1]);
        if role_ranks > 1 {
            let work = Work::AllReduce(Span::of(&mut totals[..]), Reduce::Sum);
            // SAFETY: the totals lie on the heap and are not touched before `wait`.
            tickets[at] = Some((unsafe { comm.start(work) }, Instant::now()));
        }
    }

    fn start(&mut self, at: usize) {
        let group = self.group.as_mut().expect("an engine that joined");
        let work = match &self.program.exchanges[at] {
            Exchange::Totals => unreachable!("totals are started with the caller's numbers"),
            Exchange::SumGrads { range, cuts } => {
                if group.pieces > 0 {
                    let cx = Cx { isa: self.options.isa, par: &self.pool };
                    let (grads, sums) = self.memory.grads_and_sums();
                    add(&cx, &mut grads[range.clone()], &sums[range.clone()]);
                }
                let span = Span::of(&mut self.memory.all_grads_mut()[range.clone()]);
                match cuts {
                    Some(cuts) => Work::ReduceScatter(span, cuts.clone(), Reduce::Sum),
                    None => Work::AllReduce(span, Reduce::Sum),
                }
            }
            Exchange::GatherParams { range, cuts } => {
                Work::AllGather(Span::of(self.memory.params_range(range.clone())), cuts.clone())
            }
            Exchange::Meet => return,
        };
        // SAFETY: these elements are not touched before `wait`: their gradients are complete, or their update is done.
        let ticket = unsafe { group.comm.start(work) };
        group.tickets[at] = Some((ticket, Instant::now()));
    }

    fn wait(&mut self, at: usize) -> Result<(), ExecError> {
        let ranks = self.role().ranks;
        let began = Instant::now();
        let group = self.group.as_mut().expect("an engine that joined");
        let ticket = group.tickets.get_mut(at).and_then(Option::take);
        match (&self.program.exchanges[at], ticket) {
            (Exchange::Meet, _) => group.comm.barrier()?,
            (_, Some((ticket, _))) => group.comm.wait(ticket)?,
            (_, None) => {}
        }
        group.waited += began.elapsed();
        if let (Some(timeline), true) = (&mut self.timeline, ranks > 1) {
            let name = || format!("{:?}", self.program.exchanges[at]);
            if let Some((_, started)) = ticket {
                timeline.push(name, MomentKind::Exchange, self.step, started);
            }
            timeline.push(name, MomentKind::Wait, self.step, began);
        }
        if matches!(self.program.exchanges[at], Exchange::Totals) {
            self.look_at_totals()?;
        }
        Ok(())
    }

    /// After the totals are known everywhere: whether the step can be taken.
    pub(crate) fn look_at_totals(&mut self) -> Result<(), ExecError> {
        let alone = self.role().ranks == 1;
        let group = self.group.as_mut().expect("an engine that joined");
        let (loss, here) = (group.totals[0], group.not_finite_here);
        if !loss.is_finite() {
            // What is under way works on this engine's memory.
            for (ticket, _) in group.tickets.iter_mut().filter_map(Option::take) {
                group.comm.wait(ticket)?;
            }
            return Err(ExecError::NotFinite { loss, here });
        }
        if alone && group.pieces > 0 {
            let cx = Cx { isa: self.options.isa, par: &self.pool };
            let (grads, sums) = self.memory.grads_and_sums();
            add(&cx, grads, sums);
        }
        self.grad_norm = None;
        Ok(())
    }

    fn clip(&mut self, max_norm: f64) -> Result<(), ExecError> {
        let role = self.role().clone();
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let grads = self.memory.all_grads();
        let group = self.group.as_mut().expect("an engine that joined");
        let squares = match &mut group.shards {
            Some(shards) => shards.squares(&cx, grads, &role, &mut group.comm)?,
            None => {
                let mut squares =
                    [role.own().iter().map(|r| sum_of_squares(&cx, &grads[r.clone()])).sum::<f64>()];
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

    fn update_elements(&mut self, start: usize, end: usize, moments_at: usize, lr: f32) {
        let Some(optimizer) = self.program.optimizer else { return };
        let began = self.timeline.is_some().then(Instant::now);
        let group = self.group.as_ref().expect("an engine that joined");
        let clip = match (self.grad_norm, self.clip_max) {
            (Some(norm), Some(max)) => clip_scale(norm, max),
            _ => 1.0,
        };
        let grad_scale = (1.0 / group.totals[1]) as f32 * clip;
        let hyper = StepHyper { lr, step: self.step + 1, grad_scale, decay_scale: 1.0 };
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let r = self.memory.update_range(start, end, moments_at);
        optimizer.step(&cx, hyper, r.params, r.grads, r.state1, r.state2, &self.tensors);
        if let (Some(began), Some(timeline)) = (began, &mut self.timeline) {
            timeline.push(|| "update".into(), MomentKind::Compute, self.step, began);
        }
    }
}

/// `to += from`.
pub(crate) fn add(cx: &Cx, to: &mut [f32], from: &[f32]) {
    cx.for_each_chunk(to, CHUNK, |i, to| {
        let from = &from[i * CHUNK..i * CHUNK + to.len()];
        to.iter_mut().zip(from).for_each(|(t, f)| *t += f);
    });
}
