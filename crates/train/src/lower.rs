//! From a network and a batch to graphs and programs: what the loss is, what is fed, what is recomputed.

use std::ops::Range;
use std::sync::Arc;

use polyreme_data::{Spec, Target};
use polyreme_exec::{Engine, Footprint, Isa};
use polyreme_graph::{
    Body, Builder, DType, Graph, Keeps, Microbatch, Precision, Program, Shape, Tensor, differentiate,
};
use polyreme_parallel::pipeline::across_steps;
use polyreme_parallel::{Budget, Plan, StepShape, Training, compile, schedule};

use crate::error::TrainError;
use crate::loss::{Loss, LossKind};
use crate::net::Net;
use crate::pace::StepKind;

/// Bytes of an element of parameters, gradients and moments.
const F32_BYTES: usize = DType::F32.bytes();

/// The forward graph of a training step: inputs `x` or `ids`, `labels`, what [`Loss`] names, and `weight`, by which the
/// batch counts in its step; outputs `loss`, and `weighted`, their product, which is what is differentiated.
pub fn training_graph(net: &Net, spec: &Spec, n: usize, loss: Loss) -> Result<Graph, TrainError> {
    let (mut b, logits) = trace(net, spec, n, true)?;
    let value = loss.training(&mut b, logits, spec, n)?;
    let weight = b.input("weight", [1], DType::F32)?;
    let weighted = b.layer("loss", |b| {
        let weight = b.reshape(weight, Shape::scalar())?;
        b.mul(value, weight)
    })?;
    Ok(b.finish(&[("loss", value), ("weighted", weighted)]))
}

/// The network alone, as it is trained.
pub(crate) fn network_graph(net: &Net, spec: &Spec, n: usize) -> Result<Graph, TrainError> {
    let (b, logits) = trace(net, spec, n, true)?;
    Ok(b.finish(&[("logits", logits)]))
}

/// How many numbers the network gives for one sample.
pub(crate) fn logits_of_one(net: &Net, spec: &Spec) -> Result<usize, TrainError> {
    let (b, logits) = trace(net, spec, 1, false)?;
    Ok(b.dims(logits).iter().product())
}

/// The graph of an evaluation with a loss of this kind; samples that only fill it up do not count.
pub fn evaluation_graph(net: &Net, spec: &Spec, n: usize, kind: LossKind) -> Result<Graph, TrainError> {
    let (mut b, logits) = trace(net, spec, n, false)?;
    let value = kind.evaluation(&mut b, logits, spec, n)?;
    Ok(b.finish(&[("logits", logits), ("loss", value)]))
}

/// The graph of predictions: the network alone, as it is used.
pub(crate) fn prediction_graph(net: &Net, spec: &Spec, n: usize) -> Result<Graph, TrainError> {
    let (b, logits) = trace(net, spec, n, false)?;
    Ok(b.finish(&[("logits", logits)]))
}

/// The differentiated graph of a training step: the gradients are those of `weighted`.
pub fn step_graph(forward: &Graph) -> Result<Graph, TrainError> {
    let weighted = forward.output("weighted").expect("a training graph has a weighted loss");
    Ok(differentiate(forward, weighted)?)
}

/// The forward pass of a training step as it runs in a precision: with what is rounded for the backward pass alone.
pub fn forward_in(forward: &Graph, precision: &Precision) -> Result<Graph, TrainError> {
    if precision.half.is_none() {
        return Ok(forward.clone());
    }
    let mut step = precision.apply(&step_graph(forward)?);
    // Without the gradients, nothing needs the backward pass.
    step.grads.clear();
    Ok(step.without_dead())
}

/// How programs of training are made.
#[derive(Clone, PartialEq, Debug)]
pub struct Lowering {
    /// What a step does with gradients.
    pub training: Training,
    /// How the step is split over ranks.
    pub plan: Plan,
    /// What one rank may take; activations are recomputed for it.
    pub budget_bytes: Option<usize>,
    /// Threads of the rank.
    pub threads: usize,
    /// The CPU features that its kernels may use.
    pub isa: Isa,
}

impl Lowering {
    /// The body of a microbatch: its forward graph, differentiated and compiled.
    pub fn body(&self, forward: &Graph) -> Result<Arc<Body>, TrainError> {
        let step = step_graph(forward)?;
        let measure = |program: &Program| self.rank_bytes(program);
        let budget = self.budget_bytes.map(|bytes| Budget { bytes, measure: &measure });
        Ok(Arc::new(compile(&step, &self.plan, &self.training, budget)?))
    }

    /// The program of one rank's whole step whose microbatches all have this forward graph.
    pub fn program(&self, forward: &Graph) -> Result<Program, TrainError> {
        let bodies = [self.body(forward)?];
        Ok(schedule(&self.plan, &self.training, &bodies, &self.plan.whole_step()))
    }

    /// The same for steps before gradients travel in fewer bytes.
    pub fn without_wire(&self) -> Lowering {
        Lowering { plan: self.plan.without_wire(), ..self.clone() }
    }

    /// The program of a kind of steps; in reproducible mode each rank has such a run of logical shards. `body` gives the body for
    /// a number of samples.
    pub fn step_program(
        &self,
        kind: StepKind,
        runs: Option<&[Range<usize>]>,
        body: &mut dyn FnMut(usize) -> Result<Arc<Body>, TrainError>,
    ) -> Result<Program, TrainError> {
        let mut bodies: Vec<(usize, Arc<Body>)> = Vec::new();
        let mut microbatches = Vec::new();
        for range in kind.microbatches {
            if range.len > 0 && bodies.iter().all(|(len, _)| *len != range.len) {
                bodies.push((range.len, body(range.len)?));
            }
            let known = bodies.iter().position(|(len, _)| *len == range.len);
            microbatches.push(known.map(|body| Microbatch { body, first_sample: range.offset }));
        }
        if bodies.is_empty() {
            // A rank without samples knows the model too: of two, as statistics of one make no sense.
            bodies.push((2, body(2)?));
        }
        let shape = match runs {
            Some(runs) => StepShape::shards(microbatches, runs.to_vec()),
            None => {
                let microbatches: Vec<_> = microbatches.into_iter().flatten().collect();
                if self.plan.is_flushless() && kind.steps > 1 {
                    across_steps(self.plan.mesh.stage, microbatches.len()).map_err(TrainError::Mesh)?;
                }
                StepShape::rounds(&microbatches, kind.rounds).times(kind.steps)
            }
        };
        let bodies: Vec<_> = bodies.into_iter().map(|(_, body)| body).collect();
        Ok(schedule(&self.plan, &self.training, &bodies, &shape))
    }

    /// What a rank takes at most: its part of what ranks hold together, and all of the rest. The same on all ranks.
    pub fn rank_bytes(&self, program: &Program) -> usize {
        let (rest, parts) = self.bytes(program);
        rest + parts.into_iter().max().unwrap_or(0)
    }

    /// What all ranks of one host take together.
    pub fn host_bytes(&self, program: &Program) -> usize {
        let (rest, parts) = self.bytes(program);
        let Footprint { params, average, .. } = Engine::footprint(program, self.threads, self.isa);
        // One rank has the averages of all.
        let of_all = if self.training.ema.is_some() { params } else { 0 };
        (rest - average) * parts.len() + of_all + parts.iter().sum::<usize>()
    }

    /// What a rank takes at least: with its part of what ranks hold together; of that and the rest what its process
    /// maps; and what no other process sees, if with `visible` others map its parameters and gradients.
    pub(crate) fn rank_bytes_at_least(&self, program: &Program, visible: bool) -> [usize; 3] {
        let (rest, parts) = self.bytes(program);
        let all = rest + parts.into_iter().min().unwrap_or(0);
        let Footprint { params, grads, .. } = Engine::footprint(program, self.threads, self.isa);
        let shared = program.role.as_ref().map_or(1, |r| if r.shares_weights() { r.ranks } else { 1 });
        let mapped = all + params - params / shared;
        [all, mapped, if visible { mapped.saturating_sub(params + grads) } else { mapped }]
    }

    /// What a rank takes apart from what it owns, and by rank what that is.
    fn bytes(&self, program: &Program) -> (usize, Vec<usize>) {
        let footprint = Engine::footprint(program, self.threads, self.isa);
        let Some(role) = &program.role else { return (footprint.total(), vec![0]) };
        let moments = program.moments.bytes() * program.optimizer.map_or(0, |o| o.n_states());
        let owned = match role.keeps {
            Keeps::All => 0,
            Keeps::OwnMoments => moments,
            Keeps::OwnGradients => F32_BYTES + moments,
        };
        let of_rank = |parts: &Vec<Range<usize>>| owned * parts.iter().map(Range::len).sum::<usize>();
        let owned: Vec<usize> = role.parts.iter().map(of_rank).collect();
        let shared = if role.shares_weights() { role.ranks } else { 1 };
        let Footprint { params, .. } = footprint;
        (footprint.total() - params + params / shared - owned[role.rank], owned)
    }
}

fn trace(net: &Net, spec: &Spec, n: usize, training: bool) -> Result<(Builder, Tensor), TrainError> {
    let mut b = Builder::new();
    let input = net.input(spec, n, training);
    let (want, have) = (input.shape.numel(), n * spec.features.numel());
    let fits = want == have && (input.dtype == DType::I32) == spec.features.is_ids();
    if !fits {
        let (model, data) = (input.shape.dims()[1..].to_vec(), spec.features.dims());
        return Err(TrainError::Misfit { model, ids: input.dtype == DType::I32, data });
    }
    let x = b.input(input.name, input.shape, input.dtype)?;
    let logits = net.logits(&mut b, x, training)?;
    let (got, want) = (b.dims(logits), vec![n * spec.n_rows(), spec.outputs()]);
    // A vocabulary may be larger than what this text uses of it.
    let wider = spec.target == Target::NextId && got.len() == 2 && got[0] == want[0] && got[1] > want[1];
    if got != want && !wider {
        return Err(TrainError::Logits { got, want });
    }
    Ok((b, logits))
}
