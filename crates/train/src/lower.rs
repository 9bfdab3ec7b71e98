//! From a network and a batch to graphs and programs: what the loss is, what is fed, what is recomputed.

use std::ops::Range;

use polyreme_data::{Spec, Target};
use polyreme_exec::{Engine, Footprint};
use polyreme_graph::op::CrossEntropy;
use polyreme_graph::{
    Builder, DType, Graph, Optimizer, Program, Shape, Tensor, Traced, differentiate, recompute,
};
use polyreme_parallel::{DataPlan, data_parallel, sync_batch_norm};

use crate::error::TrainError;
use crate::net::Net;

/// The label of a row that does not count: what fills up the last batch of an evaluation.
pub const IGNORED: i32 = -1;

/// What the loss of a training step is.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Loss {
    /// Spread over the other classes.
    pub label_smoothing: f32,
    /// Whether classes have weights: the input `class_weights`.
    pub class_weights: bool,
    /// Whether samples are mixed in pairs: the inputs `labels2` and `mix`.
    pub mixup: bool,
}

/// The forward graph of a training step: inputs `x` or `ids`, `labels`, what [`Loss`] names, and `weight`, by which the
/// batch counts in its step; outputs `logits`, `loss`, and `weighted`, their product, which is what is differentiated.
pub fn training_graph(net: &Net, spec: &Spec, n: usize, loss: Loss) -> Result<Graph, TrainError> {
    let (mut b, logits) = trace(net, spec, n, true)?;
    let options = CrossEntropy { label_smoothing: loss.label_smoothing, ignore_index: None };
    let value = training_loss(&mut b, logits, spec, n, loss, options)?;
    let weight = b.input("weight", [1], DType::F32)?;
    let weighted = b.layer("loss", |b| {
        let weight = b.reshape(weight, Shape::scalar())?;
        b.mul(value, weight)
    })?;
    Ok(b.finish(&[("logits", logits), ("loss", value), ("weighted", weighted)]))
}

/// The graph of an evaluation: rows labelled [`IGNORED`] do not count.
pub fn evaluation_graph(net: &Net, spec: &Spec, n: usize) -> Result<Graph, TrainError> {
    let (mut b, logits) = trace(net, spec, n, false)?;
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: Some(IGNORED) };
    let labels = b.input("labels", [n * spec.n_labels()], DType::I32)?;
    let value = b.layer("loss", |b| b.cross_entropy(logits, labels, None, options))?;
    Ok(b.finish(&[("logits", logits), ("loss", value)]))
}

/// The differentiated graph of a training step: the gradients are those of `weighted`.
pub fn step_graph(forward: &Graph) -> Result<Graph, TrainError> {
    let weighted = forward.output("weighted").expect("a training graph has a weighted loss");
    Ok(differentiate(forward, weighted)?)
}

/// How a program of training is made.
#[derive(Clone, PartialEq, Debug)]
pub struct Lowering {
    /// What updates do.
    pub optimizer: Optimizer,
    /// The maximum of the gradients' norm.
    pub clip: Option<f64>,
    /// How the step is split over ranks.
    pub plan: DataPlan,
    /// What one rank may take; activations are recomputed for it.
    pub budget_bytes: Option<usize>,
    /// Threads of the rank.
    pub threads: usize,
}

impl Lowering {
    /// The program of one rank's training step.
    pub fn program(&self, forward: &Graph) -> Result<Program, TrainError> {
        let mut step = step_graph(forward)?;
        let mut plan = self.plan.clone();
        // Before anything is recomputed: ranks with parts of different size may recompute different things, but they
        // must meet for the same sums.
        if std::mem::take(&mut plan.sync_batch_norm) && plan.ranks > 1 {
            step = sync_batch_norm(&step);
        }
        let lower = |step: &Graph| data_parallel(step, self.optimizer, self.clip, &plan);
        if let Some(budget_bytes) = self.budget_bytes {
            let measure = |step: &Graph| self.rank_bytes(&lower(step));
            step = recompute(&step, budget_bytes, &measure)?.graph;
        }
        Ok(lower(&step))
    }

    /// What a rank takes at most: its part of what ranks hold together, and all of the rest. The same on all ranks.
    pub fn rank_bytes(&self, program: &Program) -> usize {
        let (rest, parts) = self.bytes(program);
        rest + parts.into_iter().max().unwrap_or(0)
    }

    /// What all ranks of one host take together.
    pub fn host_bytes(&self, program: &Program) -> usize {
        let (rest, parts) = self.bytes(program);
        rest * parts.len() + parts.iter().sum::<usize>()
    }

    /// What a rank takes at least: with its part of what ranks hold together; of that and the rest what its process
    /// maps; and what no other process sees, if with `visible` others map its parameters and gradients.
    pub(crate) fn rank_bytes_at_least(&self, program: &Program, visible: bool) -> [usize; 3] {
        let (rest, parts) = self.bytes(program);
        let all = rest + parts.into_iter().min().unwrap_or(0);
        let Footprint { params, grads, .. } = Engine::footprint(program, self.threads);
        let shared = program.role.as_ref().map_or(1, |r| if r.shared_weights { r.ranks } else { 1 });
        let mapped = all + params - params / shared;
        [all, mapped, if visible { mapped.saturating_sub(params + grads) } else { mapped }]
    }

    /// What a rank takes apart from what it owns, and by rank what that is.
    fn bytes(&self, program: &Program) -> (usize, Vec<usize>) {
        let mut footprint = Engine::footprint(program, self.threads);
        // A step may have several pieces.
        if !self.plan.at_once {
            footprint = footprint.in_pieces(program);
        }
        let Some(role) = &program.role else { return (footprint.total(), vec![0]) };
        let moments = program.optimizer.map_or(0, |o| o.state_per_param());
        let owned = match role.sharded {
            true => size_of::<f32>() * (moments + usize::from(program.buffers.is_some())),
            false => 0,
        };
        let of_rank = |parts: &Vec<Range<usize>>| owned * parts.iter().map(Range::len).sum::<usize>();
        let owned: Vec<usize> = role.parts.iter().map(of_rank).collect();
        let shared = if role.shared_weights { role.ranks } else { 1 };
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
    let (got, want) = (b.dims(logits), vec![n * spec.n_labels(), spec.classes()]);
    // A vocabulary may be larger than what this text uses of it.
    let wider = spec.target == Target::NextId && got.len() == 2 && got[0] == want[0] && got[1] > want[1];
    if got != want && !wider {
        return Err(TrainError::Logits { got, want });
    }
    Ok((b, logits))
}

fn training_loss(
    b: &mut Builder,
    logits: Tensor,
    spec: &Spec,
    n: usize,
    loss: Loss,
    options: CrossEntropy,
) -> Traced {
    let n_labels = n * spec.n_labels();
    let labels = b.input("labels", [n_labels], DType::I32)?;
    let weights =
        loss.class_weights.then(|| b.input("class_weights", [spec.classes()], DType::F32)).transpose()?;
    if !loss.mixup {
        return b.layer("loss", |b| b.cross_entropy(logits, labels, weights, options));
    }
    let labels2 = b.input("labels2", [n_labels], DType::I32)?;
    let mix = b.input("mix", [1], DType::F32)?;
    b.layer("loss", |b| {
        let first = b.cross_entropy(logits, labels, weights, options)?;
        let second = b.cross_entropy(logits, labels2, weights, options)?;
        let mix = b.reshape(mix, Shape::scalar())?;
        // second + mix · (first - second)
        let difference = b.sub(first, second)?;
        let part = b.mul(mix, difference)?;
        b.add(second, part)
    })
}
