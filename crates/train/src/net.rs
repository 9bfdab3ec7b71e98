//! The network of a job: one of `nn`'s models, or a function of the program's own.

use std::fmt;
use std::sync::Arc;

use polyreme_data::{Features, Spec};
use polyreme_graph::{Builder, DType, Shape, Tensor, Traced, Tuning};
use polyreme_nn::{Model, ModelInput, TraceOptions};

/// Traces the logits of a batch: the builder, the batch, and whether this is for training.
pub type TraceFn = dyn Fn(&mut Builder, Tensor, bool) -> Traced + Send + Sync;

/// What turns a batch into logits.
#[derive(Clone)]
pub enum Net {
    /// A model that a job file can name.
    Model(Model),
    /// A function. Its batch is `[n, ..]` as the data are; its logits are `[labels, classes]`.
    Function(Arc<TraceFn>),
    /// One of these, whose parameters are not all learnt alike.
    Tuned(Arc<Net>, Arc<Tuning>),
}

impl Net {
    /// What the network is fed: `x` or `ids`, for a batch of `n` samples of `spec`.
    pub fn input(&self, spec: &Spec, n: usize, training: bool) -> ModelInput {
        match self {
            Net::Tuned(net, _) => net.input(spec, n, training),
            Net::Model(model) => model.input(&options(spec, n, training)),
            Net::Function(_) => {
                let dims: Vec<usize> = [n].into_iter().chain(spec.features.dims()).collect();
                let ids = spec.features.is_ids();
                let (name, dtype) = if ids { ("ids", DType::I32) } else { ("x", DType::F32) };
                ModelInput { name, shape: Shape::from(dims), dtype }
            }
        }
    }

    /// The logits of a batch, `[labels, classes]`.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        match self {
            Net::Model(model) => model.logits(b, x, training),
            Net::Function(f) => f(b, x, training),
            Net::Tuned(net, tuning) => {
                b.tune(tuning.clone());
                net.logits(b, x, training)
            }
        }
    }

    /// The same network with parameters that are learnt so.
    pub fn tuned(self, tuning: Tuning) -> Net {
        if tuning == Tuning::default() { self } else { Net::Tuned(Arc::new(self), Arc::new(tuning)) }
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        match self {
            Net::Model(model) => model.name(),
            Net::Function(_) => "function",
            Net::Tuned(net, _) => net.name(),
        }
    }
}

/// How a model is traced for `n` samples of `spec`.
pub fn options(spec: &Spec, n: usize, training: bool) -> TraceOptions {
    let mut options = if training { TraceOptions::training(n) } else { TraceOptions::evaluation(n) };
    match spec.features {
        Features::Image { height, width, .. } => options.image = Some((height, width)),
        Features::Ids { .. } | Features::Texts { .. } => options.time = Some(spec.features.numel()),
        Features::Row { .. } | Features::Mixed { .. } => {}
    }
    options
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Net::Model(model) => model.fmt(f),
            Net::Function(_) => f.write_str("a function"),
            Net::Tuned(net, tuning) => write!(f, "{net:?} with {tuning:?}"),
        }
    }
}
