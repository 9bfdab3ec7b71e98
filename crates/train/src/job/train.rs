//! `[train]`: how to train.

use polyreme_dtype::DType;
use polyreme_graph::{Adafactor, Moments, Optimizer};

use super::cursor::Cursor;
use super::declare::{field, keys, kinds, section};
use super::key::Key;
use super::section::Section;
use super::shape::Bounds;
use super::spec::{EarlyStop, Length, LossKind, OptimizerSpec, PrecisionKind, TrainSpec};
use super::types::{Type, flag, list, maybe, one_of, real, single, table, text, whole, within};
use crate::schedule::{Schedule, ScheduleShape};

const BATCH_MAX: u64 = 1 << 20;
/// Steps and epochs.
pub(super) const COUNT_MAX: u64 = 1 << 48;

/// What can be watched, and what each is.
pub(super) const METRICS: [(&str, &str); 8] = [
    ("train_loss", "the mean loss of the training steps of the epoch, up to the evaluation"),
    ("val_loss", "the mean loss on the validation set"),
    ("val_accuracy", "the share of validation samples with the right class, or with all labels right"),
    ("val_top5", "the share of validation samples whose label is among the five likeliest classes"),
    ("val_perplexity", "e to the power of `val_loss`"),
    ("val_r2", "the share of the variance of numbers that is explained on the validation set (R²)"),
    ("val_mae", "the mean absolute error of numbers on the validation set, in units of the data"),
    ("val_f1", "F1 of labels on the validation set, over all labels (micro), at a probability of 0.5"),
];

section! { TrainSpec => Section::new("train", "a section", |_| TrainSpec::default(), keys()).check(check) }

fn keys() -> Vec<Key<TrainSpec>> {
    let count = || whole(1..=COUNT_MAX);
    let epochs = |s: &TrainSpec| if let Length::Epochs(n) = s.length { Some(n) } else { None };
    let steps = |s: &TrainSpec| if let Length::Steps(n) = s.length { Some(n) } else { None };
    keys! { TrainSpec;
        /// samples per step, of all ranks together
        batch: whole(1..=BATCH_MAX) => |s| Some(&mut s.batch);
        /// how many times the training set is visited
        epochs: count() => epochs, |s, n| s.length = Length::Epochs(n);
        /// how many optimizer steps, in place of `epochs`
        steps: count() => steps, |s, n| s.length = Length::Steps(n); instead_of "epochs";
        /// the optimizer and its learning rate
        optimizer: table() => |s| Some(&mut s.optimizer); or "`\"adamw\"`";
        /// parameters with a learning rate or a weight decay of their own; the first group that names one counts
        groups: list(table(), &[], "an array of tables") => |s| Some(&mut s.groups);
        /// how the learning rate changes over the run
        schedule: table() => |s| Some(&mut s.schedule); or "`\"constant\"`";
        /// the largest norm of all gradients together; larger ones are scaled down to it
        clip: maybe(within(Bounds::POSITIVE)) => |s| Some(&mut s.clip);
        /// how many microbatches a step is cut into; must divide `batch`
        accumulate: whole(1..=BATCH_MAX) => |s| Some(&mut s.accumulate);
        /// the decay of an exponential moving average of the weights, which is then evaluated and saved
        ema: maybe(within(Bounds::SHARE)) => |s| Some(&mut s.ema);
        /// what is minimised, and so what labels are
        loss: loss() => |s| Some(&mut s.loss);
        /// the share of each label that is spread over all classes
        label_smoothing: single(Bounds::BELOW_1) => |s| Some(&mut s.label_smoothing);
        /// the parameter of mixup's beta distribution; 0 for no mixup
        mixup: real(0.0..) => |s| Some(&mut s.mixup);
        /// when a run that no longer improves ends
        early_stop: maybe(table()) => |s| Some(&mut s.early_stop);
        /// steps from one evaluation to the next
        evaluate_every: maybe(count()) => |s| Some(&mut s.evaluate_every_steps); or "after each epoch";
        /// steps from one line of metrics to the next
        log_every: count() => |s| Some(&mut s.log_every_steps);
        /// everything random follows from it
        seed: whole(0..=u64::MAX) => |s| Some(&mut s.seed);
        /// the format in which activations are stored and multiplied; weights, their updates, sums and losses are f32
        precision: precision() => |s| Some(&mut s.precision);
        /// layers that stay in f32, with all that is inside them, as parameters are named: `["head", "blocks.0"]`; custom
        /// layers may say `precision = "f32"` themselves
        f32_layers: list(text(), &[], "an array of paths of layers") => |s| Some(&mut s.f32_layers);
        /// in f16: what the loss is multiplied by at first; halved where gradients overflow, doubled after 2000 good steps
        loss_scale: single(Bounds::POSITIVE) => |s| Some(&mut s.loss_scale);
        /// activations are recomputed so that training takes at most this much memory in each process
        memory_mib: maybe(whole(1..=1 << 32)) => |s| Some(&mut s.memory_mib);
    }
}

fn precision() -> Type<PrecisionKind> {
    one_of([
        ("f32", PrecisionKind::F32, ""),
        ("f32-strict", PrecisionKind::F32Strict, "f32 without algorithms that trade accuracy for speed"),
        ("bf16", PrecisionKind::Bf16, "half the memory of activations; faster where the CPU multiplies bf16"),
        (
            "f16",
            PrecisionKind::F16,
            "half the memory of activations, three more bits than bf16 and a smaller range",
        ),
        (
            "auto",
            PrecisionKind::Auto,
            "bf16 if steps take less time with it here, which is measured when the run begins, else f32",
        ),
    ])
}

fn loss() -> Type<LossKind> {
    let rows = [
        (LossKind::CrossEntropy, "cross-entropy; labels are classes, or the next tokens of a text"),
        (LossKind::Mse, "the mean squared error; labels are numbers"),
        (LossKind::Mae, "the mean absolute error; labels are numbers"),
        (
            LossKind::Huber,
            "Huber's loss with a delta of 1: squared near 0, absolute beyond; labels are numbers",
        ),
        (LossKind::Bce, "binary cross-entropy; labels are 0 or 1, any number of them per sample"),
    ];
    one_of(rows.map(|(kind, words)| (kind.name(), kind, words)))
}

fn check(spec: &mut TrainSpec, c: &Cursor) {
    if spec.loss != LossKind::CrossEntropy && spec.label_smoothing > 0.0 {
        let message =
            format!("`train.label_smoothing` is for classes, and `train.loss` is {:?}", spec.loss.name());
        c.fault("label_smoothing", message, "leave it out");
    }
    if !spec.groups.is_empty() && !spec.optimizer.rule.by_element() {
        let message =
            "`train.groups` needs an optimizer that goes by element, and this one looks at whole tensors";
        c.fault("groups", message, "use adamw, adam, sgd or lion, or leave `groups` out");
    }
    let metric = spec.early_stop.as_ref().map(|stop| &stop.metric);
    if let Some(metric) = metric.filter(|metric| !spec.loss.has_metric(metric)) {
        let (message, hint) = no_metric("train.early_stop.metric", metric, spec.loss);
        c.fault("early_stop", message, hint);
    }
    if !spec.batch.is_multiple_of(spec.accumulate) {
        let key = if c.has("accumulate") { "accumulate" } else { "batch" };
        let message = format!(
            "`train.accumulate` of {} does not divide `train.batch` of {}",
            spec.accumulate, spec.batch
        );
        let near = (1..=spec.accumulate).rev().find(|n| spec.batch.is_multiple_of(*n)).unwrap_or(1);
        c.fault(key, message, format!("accumulate = {near} would"));
    }
}

/// What is said of a metric that is not measured with a loss, and what to write.
pub(super) fn no_metric(key: &str, metric: &str, loss: LossKind) -> (String, String) {
    let known: Vec<String> = loss.metrics().iter().map(|name| format!("val_{name}")).collect();
    let message = format!("`{key}` is {metric:?}, which is not measured with a loss of {:?}", loss.name());
    (message, format!("take train_loss, {}", known.join(", ")))
}

section! { OptimizerSpec => {
    let kinds = kinds! {
        /// gradient descent with momentum, as PyTorch's SGD
        "sgd" => |_| OptimizerSpec::sgd();
        /// as PyTorch's Adam; weight decay is added to the gradient
        "adam" => |_| OptimizerSpec::adam();
        /// as PyTorch's AdamW; weight decay is separate from the gradient
        "adamw" => |_| OptimizerSpec::adamw();
        /// Adam with a learning rate for each tensor, for large batches
        "lamb" => |_| OptimizerSpec::lamb();
        /// Lion of Chen et al. 2023: steps of the same length for every weight, by the sign of a running mean of the gradient;
        /// weight decay as AdamW's; keeps half of what Adam keeps, and wants a smaller learning rate
        "lion" => |_| OptimizerSpec::lion();
        /// as PyTorch's `torch.optim.Adafactor`: steps are relative to the size of a tensor's weights; keeps a number for each
        /// row and column of a matrix, where Adam keeps two for each weight
        "adafactor" => |_| OptimizerSpec::adafactor();
    };
    let such_as = "an optimizer's name, or a table such as { kind = \"adamw\", lr = 0.001 }";
    let section =
        Section::of_kinds("train.optimizer", such_as, kinds, OptimizerSpec::kind, optimizer());
    section.short().fallback("adamw", None).check(check_optimizer)
} }

impl OptimizerSpec {
    /// The name, as a job file has it.
    pub(super) fn kind(&self) -> &'static str {
        match self.rule {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Adam(_) => "adam",
            Optimizer::AdamW(_) => "adamw",
            Optimizer::Lamb(_) => "lamb",
            Optimizer::Lion { .. } => "lion",
            Optimizer::Adafactor(_) => "adafactor",
        }
    }

    fn moments(&mut self) -> Option<&mut Moments> {
        match &mut self.rule {
            Optimizer::Sgd { .. } | Optimizer::Lion { .. } | Optimizer::Adafactor(_) => None,
            Optimizer::Adam(m) | Optimizer::AdamW(m) | Optimizer::Lamb(m) => Some(m),
        }
    }

    fn adafactor_mut(&mut self) -> Option<&mut Adafactor> {
        match &mut self.rule {
            Optimizer::Adafactor(a) => Some(a),
            Optimizer::Sgd { .. }
            | Optimizer::Adam(_)
            | Optimizer::AdamW(_)
            | Optimizer::Lamb(_)
            | Optimizer::Lion { .. } => None,
        }
    }

    fn betas(&mut self) -> Option<[&mut f64; 2]> {
        match &mut self.rule {
            Optimizer::Sgd { .. } | Optimizer::Adafactor(_) => None,
            Optimizer::Adam(m) | Optimizer::AdamW(m) | Optimizer::Lamb(m) => {
                Some([&mut m.beta1, &mut m.beta2])
            }
            Optimizer::Lion { beta1, beta2, .. } => Some([beta1, beta2]),
        }
    }

    fn weight_decay(&mut self) -> Option<&mut f32> {
        match &mut self.rule {
            Optimizer::Sgd { weight_decay, .. } | Optimizer::Lion { weight_decay, .. } => Some(weight_decay),
            Optimizer::Adam(m) | Optimizer::AdamW(m) | Optimizer::Lamb(m) => Some(&mut m.weight_decay),
            Optimizer::Adafactor(a) => Some(&mut a.weight_decay),
        }
    }
}

fn optimizer() -> Vec<Key<OptimizerSpec>> {
    let moments = one_of([("f32", DType::F32, ""), ("bf16", DType::Bf16, "")]);
    let betas = list(real(0.0..1.0), &[2], "an array of two numbers");
    keys! { OptimizerSpec;
        /// the base learning rate
        lr: within(Bounds::POSITIVE) => |s| Some(&mut s.lr);
        /// element type of the optimizer's state; `"bf16"` halves it, and rounds at random so that means stay right
        moments: moments => |s| s.rule.by_element().then_some(&mut s.moments);
        /// how strongly weights are pulled towards 0
        weight_decay: single(Bounds::FROM_0) => OptimizerSpec::weight_decay;
        /// the share of the last update that is kept
        momentum: single(Bounds::BELOW_1) => field!(Optimizer::{Sgd}.momentum in rule);
        /// Nesterov's momentum, which looks ahead; needs a momentum
        nesterov: flag() => field!(Optimizer::{Sgd}.nesterov in rule);
        /// the decays of the running means of the gradient and of its square; for lion, of the mean that a step follows and of the
        /// one that is kept
        betas: betas => |s| s.clone().betas().map(|betas| betas.map(|beta| *beta).to_vec()), |s, new| {
            if let (Some([beta1, beta2]), [new1, new2]) = (s.betas(), new.as_slice()) {
                (*beta1, *beta2) = (*new1, *new2);
            }
        }; only |s| s.betas().is_some();
        /// added to the root of the mean square
        eps: single(Bounds::POSITIVE) => |s| s.moments().map(|m| &mut m.eps);
        /// the mean squares of step t move by t to the power of this
        beta2_decay: real(..=0.0) => |s| s.adafactor_mut().map(|a| &mut a.beta2_decay);
        /// the least root mean square that a gradient is divided by
        eps1: single(Bounds::POSITIVE) => |s| s.adafactor_mut().map(|a| &mut a.eps1);
        /// a tensor's steps are scaled by the root mean square of its weights, but at least by this
        eps2: single(Bounds::FROM_0) => |s| s.adafactor_mut().map(|a| &mut a.eps2);
        /// the largest root mean square of a tensor's step, before the learning rate; larger ones are scaled down to it
        d: single(Bounds::POSITIVE) => |s| s.adafactor_mut().map(|a| &mut a.d);
    }
}

fn check_optimizer(spec: &mut OptimizerSpec, c: &Cursor) {
    if matches!(spec.rule, Optimizer::Sgd { nesterov: true, momentum: 0.0, .. }) {
        let message = "`train.optimizer.nesterov` needs a momentum";
        c.fault("nesterov", message, "write momentum = 0.9, or leave `nesterov` out");
    }
}

section! { Schedule => {
    let kinds = kinds! {
        /// the base learning rate throughout
        "constant" => |_| of(ScheduleShape::Constant);
        /// multiplied by `factor` after every `every_epochs`
        "step" => |_| of(ScheduleShape::Step { every_epochs: 10, factor: 0.1 });
        /// multiplied by `factor` after each epoch
        "exponential" => |_| of(ScheduleShape::Exponential { factor: 0.95 });
        /// half a cosine down to `floor`, with restarts if wanted
        "cosine" => |_| of(ScheduleShape::Cosine { floor: 0.0, restarts: 0 });
        /// up to the base learning rate, then down to nearly 0
        "one-cycle" => |_| of(ScheduleShape::OneCycle { start_share: 0.3, div: 25.0, final_div: 1e4 });
        /// a straight line down to `floor`
        "linear" => |_| of(ScheduleShape::Linear { floor: 0.0 });
    };
    let such_as = "a schedule's name, or a table such as { kind = \"cosine\", warmup = 100 }";
    let section = Section::of_kinds("train.schedule", such_as, kinds, schedule_kind, schedule());
    section.short()
} }

fn of(shape: ScheduleShape) -> Schedule {
    Schedule { shape, warmup: 0 }
}

fn schedule_kind(schedule: &Schedule) -> &'static str {
    match schedule.shape {
        ScheduleShape::Constant => "constant",
        ScheduleShape::Step { .. } => "step",
        ScheduleShape::Exponential { .. } => "exponential",
        ScheduleShape::Cosine { .. } => "cosine",
        ScheduleShape::OneCycle { .. } => "one-cycle",
        ScheduleShape::Linear { .. } => "linear",
    }
}

fn schedule() -> Vec<Key<Schedule>> {
    // One-cycle has its own warm-up.
    let warmup = |s: &mut Schedule| !matches!(s.shape, ScheduleShape::OneCycle { .. });
    keys! { Schedule;
        /// epochs from one cut to the next
        every_epochs: whole(1..=COUNT_MAX) => field!(ScheduleShape::{Step}.every_epochs in shape);
        /// what the learning rate is multiplied by
        factor: within(Bounds::POSITIVE) => field!(ScheduleShape::{Step | Exponential}.factor in shape);
        /// the share of the base learning rate at the end
        floor: real(0.0..=1.0) => field!(ScheduleShape::{Cosine | Linear}.floor in shape);
        /// how many times it starts again from the base learning rate
        restarts: whole(0..=COUNT_MAX) => field!(ScheduleShape::{Cosine}.restarts in shape);
        /// the share of the run in which the learning rate grows
        start_share: within(Bounds::SHARE) => field!(ScheduleShape::{OneCycle}.start_share in shape);
        /// the base learning rate divided by the first one
        div: within(Bounds::POSITIVE) => field!(ScheduleShape::{OneCycle}.div in shape);
        /// the first learning rate divided by the last one
        final_div: within(Bounds::POSITIVE) => field!(ScheduleShape::{OneCycle}.final_div in shape);
        /// steps in which the learning rate grows from nearly 0
        warmup: whole(0..=COUNT_MAX) => |s| Some(&mut s.warmup); only warmup;
    }
}

section! { EarlyStop => {
    let such_as = "a table such as { metric = \"val_loss\", patience = 3 }";
    let metric = one_of(METRICS.map(|(name, words)| (name, name.to_string(), words)));
    let keys = keys! { EarlyStop;
        /// the metric that is watched
        metric: metric => |s| Some(&mut s.metric);
        /// evaluations without an improvement before the run ends
        patience: whole(1..=COUNT_MAX) => |s| Some(&mut s.patience);
        /// the least change that counts as an improvement
        min_delta: real(0.0..) => |s| Some(&mut s.min_delta);
    };
    Section::new("train.early_stop", such_as, |_| EarlyStop::default(), keys)
} }
