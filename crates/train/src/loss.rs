//! What is minimised: the kinds of losses, what labels each needs, what is measured with it, and how it is traced.
//!
//! Every loss is a mean over labels: the parts of a step are weighted by the labels that count in them.

use polyreme_data::{LabelKind, Spec, Target};
use polyreme_graph::builder::ErrorKind;
use polyreme_graph::op::CrossEntropy;
use polyreme_graph::{Builder, DType, Shape, Tensor, Traced};

pub use polyreme_data::spec::IGNORED;

/// From where on Huber's loss is linear, in units of the normalised target; PyTorch's default.
const HUBER_DELTA: f32 = 1.0;

/// What is minimised.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LossKind {
    /// Cross-entropy of a class, or of the next id.
    #[default]
    CrossEntropy,
    /// The mean squared error of numbers.
    Mse,
    /// The mean absolute error of numbers.
    Mae,
    /// Huber's loss of numbers.
    Huber,
    /// The binary cross-entropy of labels, each for itself.
    Bce,
}

impl LossKind {
    /// All of them.
    pub const ALL: [LossKind; 5] =
        [LossKind::CrossEntropy, LossKind::Mse, LossKind::Mae, LossKind::Huber, LossKind::Bce];

    /// The name, as a job file has it.
    pub fn name(self) -> &'static str {
        match self {
            LossKind::CrossEntropy => "cross_entropy",
            LossKind::Mse => "mse",
            LossKind::Mae => "mae",
            LossKind::Huber => "huber",
            LossKind::Bce => "bce",
        }
    }

    /// As what labels are read for it.
    pub fn labels(self) -> LabelKind {
        match self {
            LossKind::CrossEntropy => LabelKind::Classes,
            LossKind::Mse | LossKind::Mae | LossKind::Huber => LabelKind::Numbers,
            LossKind::Bce => LabelKind::Labels,
        }
    }

    /// Whether it is a loss of such a target.
    pub fn takes(self, target: &Target) -> bool {
        // The next id is a class at each position.
        self.labels() == target.kind().unwrap_or(LabelKind::Classes)
    }

    /// The metrics of an evaluation with it, without the prefix of the set.
    pub fn metrics(self) -> &'static [&'static str] {
        match self.labels() {
            LabelKind::Classes => &["loss", "accuracy", "top5", "perplexity"],
            LabelKind::Numbers => &["loss", "r2", "mae"],
            LabelKind::Labels => &["loss", "f1", "accuracy"],
        }
    }

    /// Whether a metric such as `val_r2` is measured with it.
    pub fn has_metric(self, metric: &str) -> bool {
        metric.split_once('_').is_none_or(|(_, name)| self.metrics().contains(&name))
    }

    /// How elements count against their targets; `None` for classes.
    fn error(self) -> Option<ErrorKind> {
        match self {
            LossKind::CrossEntropy => None,
            LossKind::Mse => Some(ErrorKind::Squared),
            LossKind::Mae => Some(ErrorKind::Absolute),
            LossKind::Huber => Some(ErrorKind::Huber { delta: HUBER_DELTA }),
            LossKind::Bce => Some(ErrorKind::Bce),
        }
    }
}

/// What the loss of a training step is.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Loss {
    /// What is minimised.
    pub kind: LossKind,
    /// Spread over the other classes.
    pub label_smoothing: f32,
    /// Whether classes have weights: the input `class_weights`.
    pub class_weights: bool,
    /// Whether samples are mixed in pairs: the inputs `labels2` and `mix`.
    pub mixup: bool,
}

impl Loss {
    /// Traces the mean loss of a training batch of `n` samples: input `labels`, and what the fields name.
    pub(crate) fn training(self, b: &mut Builder, logits: Tensor, spec: &Spec, n: usize) -> Traced {
        let labels = labels(b, "labels", spec, n)?;
        let weights =
            self.class_weights.then(|| b.input("class_weights", [spec.classes()], DType::F32)).transpose()?;
        if !self.mixup {
            return b.layer("loss", |b| self.mean(b, spec, logits, labels, weights));
        }
        let labels2 = self::labels(b, "labels2", spec, n)?;
        let mix = b.input("mix", [1], DType::F32)?;
        b.layer("loss", |b| {
            let first = self.mean(b, spec, logits, labels, weights)?;
            let second = self.mean(b, spec, logits, labels2, weights)?;
            let mix = b.reshape(mix, Shape::scalar())?;
            // second + mix · (first - second)
            let difference = b.sub(first, second)?;
            let part = b.mul(mix, difference)?;
            b.add(second, part)
        })
    }

    fn mean(
        self,
        b: &mut Builder,
        spec: &Spec,
        logits: Tensor,
        labels: Tensor,
        weights: Option<Tensor>,
    ) -> Traced {
        match self.kind.error() {
            None => {
                let ignore_index = matches!(spec.target, Target::Tags { .. }).then_some(IGNORED);
                let options = CrossEntropy { label_smoothing: self.label_smoothing, ignore_index };
                b.cross_entropy(logits, labels, weights, options)
            }
            Some(error) => {
                let each = b.error_of(error, logits, labels)?;
                b.mean_all(each)
            }
        }
    }
}

impl LossKind {
    /// Traces the loss of an evaluation of `n` samples. Classes labelled [`IGNORED`] do not count. For numbers and labels
    /// the input `counted` has a 1 for each sample that does, and the result is the mean over all `n`, where the others
    /// are 0.
    pub(crate) fn evaluation(self, b: &mut Builder, logits: Tensor, spec: &Spec, n: usize) -> Traced {
        let labels = labels(b, "labels", spec, n)?;
        let Some(error) = self.error() else {
            let options = CrossEntropy { label_smoothing: 0.0, ignore_index: Some(IGNORED) };
            return b.layer("loss", |b| b.cross_entropy(logits, labels, None, options));
        };
        let counted = b.input("counted", [n, 1], DType::F32)?;
        b.layer("loss", |b| {
            let each = b.error_of(error, logits, labels)?;
            let each = b.mul(each, counted)?;
            b.mean_all(each)
        })
    }
}

/// The input of labels: integers, or as many numbers as the model gives.
fn labels(b: &mut Builder, name: &str, spec: &Spec, n: usize) -> Traced {
    match spec.target.is_values() {
        false => b.input(name, [n * spec.n_labels()], DType::I32),
        true => b.input(name, [n, spec.n_labels()], DType::F32),
    }
}
