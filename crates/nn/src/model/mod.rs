//! The reference models: a closed set, each a struct of plain numbers whose defaults are the reference jobs', and
//! [`Stack`], a list of layers for a custom network.
//!
//! A model's `logits` traces it inside a custom trace; [`Model::trace`] makes the whole graph, from the batch to
//! the loss. Definitions and names of parameters are those of `references/models.py`, written for PyTorch.

mod alexnet;
mod bert;
mod cnn;
mod encoder;
mod fit;
mod gpt;
mod gpt2;
mod lenet;
mod mlp;
mod recurrent;
mod resnet;
mod stack;
mod tabular;

#[cfg(test)]
mod references;
#[cfg(test)]
mod tests;

pub use alexnet::AlexNet;
pub use bert::{Bert, Pooling};
pub use cnn::Cnn;
pub use encoder::EncoderClassifier;
pub use fit::{Answer, FitError, Fitted, Sample};
pub use gpt::Gpt;
pub use gpt2::Gpt2;
pub use lenet::Lenet;
pub use mlp::Mlp;
pub use recurrent::RecurrentClassifier;
pub use resnet::{Depth, ResNet, Stem};
pub use stack::{Stack, StackInput, StackLayer};
pub use tabular::Tabular;

use polyreme_graph::op::{Cell, CrossEntropy};
use polyreme_graph::{Builder, DType, Graph, Shape, Tensor, TraceErrorKind, Traced};

use crate::layer::positive;

/// Any of the reference models, or a custom list of layers.
#[derive(Clone, PartialEq, Debug)]
pub enum Model {
    /// A multilayer perceptron.
    Mlp(Mlp),
    /// Residual blocks for rows of a table.
    Tabular(Tabular),
    /// The LeNet-5 convolutional network.
    Lenet(Lenet),
    /// Convolutions with batch norm.
    Cnn(Cnn),
    /// A decoder-only transformer.
    Gpt(Gpt),
    /// The decoder-only transformer GPT-2.
    Gpt2(Gpt2),
    /// The encoder-only transformer BERT.
    Bert(Bert),
    /// torchvision's AlexNet.
    AlexNet(AlexNet),
    /// torchvision's ResNets.
    ResNet(ResNet),
    /// A classifier of sequences by LSTM or GRU.
    Recurrent(RecurrentClassifier),
    /// A classifier of sequences by a transformer encoder.
    Encoder(EncoderClassifier),
    /// A list of layers.
    Layers(Stack),
}

/// What a model is traced for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TraceOptions {
    /// The batch size: images, rows or sequences.
    pub batch: usize,
    /// The length of sequences; `None`: the model's context.
    pub time: Option<usize>,
    /// Rows and columns of images; `None`: what the model was made for.
    pub image: Option<(usize, usize)>,
    /// Whether batch norm and dropout behave as in training.
    pub training: bool,
    /// Options of the loss.
    pub loss: CrossEntropy,
}

impl TraceOptions {
    /// A training step's forward pass, with a plain cross-entropy.
    pub fn training(batch: usize) -> TraceOptions {
        let loss = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
        TraceOptions { batch, time: None, image: None, training: true, loss }
    }
    /// A forward pass in evaluation mode.
    pub fn evaluation(batch: usize) -> TraceOptions {
        TraceOptions { training: false, ..TraceOptions::training(batch) }
    }
}

/// The input of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelInput {
    /// The name: `x` for numbers, `ids` for integers.
    pub name: &'static str,
    /// The shape: `[batch, width]`, `[batch, channels, rows, columns]` or `[batch, time]`.
    pub shape: Shape,
    /// The element type: f32 or i32.
    pub dtype: DType,
}

/// A name that no model has.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown model `{name}`; known are {}", Model::NAMES.join(", "))]
pub struct UnknownModel {
    /// The unknown name.
    pub name: String,
}

impl Model {
    /// The names that [`Model::by_name`] knows.
    pub const NAMES: [&str; 21] = [
        "mlp",
        "tabular",
        "lenet",
        "cnn",
        "gpt",
        "gpt2",
        "bert",
        "alexnet",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet18_cifar",
        "resnet34_cifar",
        "resnet50_cifar",
        "resnet101_cifar",
        "lstm",
        "gru",
        "bilstm",
        "bigru",
        "encoder",
    ];

    /// A model with its default sizes. ResNets named `_cifar` have the stem for small images.
    pub fn by_name(name: &str) -> Result<Model, UnknownModel> {
        let resnet = |depth, stem| Model::ResNet(ResNet { depth, stem, ..ResNet::default() });
        let recurrent = |cell, bidirectional| {
            Model::Recurrent(RecurrentClassifier { cell, bidirectional, ..RecurrentClassifier::default() })
        };
        Ok(match name {
            "mlp" => Model::Mlp(Mlp::default()),
            "tabular" => Model::Tabular(Tabular::default()),
            "lenet" => Model::Lenet(Lenet::default()),
            "cnn" => Model::Cnn(Cnn::default()),
            "gpt" => Model::Gpt(Gpt::default()),
            "gpt2" => Model::Gpt2(Gpt2::default()),
            "bert" => Model::Bert(Bert::default()),
            "alexnet" => Model::AlexNet(AlexNet::default()),
            "resnet18" => resnet(Depth::D18, Stem::ImageNet),
            "resnet34" => resnet(Depth::D34, Stem::ImageNet),
            "resnet50" => resnet(Depth::D50, Stem::ImageNet),
            "resnet101" => resnet(Depth::D101, Stem::ImageNet),
            "resnet18_cifar" => resnet(Depth::D18, Stem::Cifar),
            "resnet34_cifar" => resnet(Depth::D34, Stem::Cifar),
            "resnet50_cifar" => resnet(Depth::D50, Stem::Cifar),
            "resnet101_cifar" => resnet(Depth::D101, Stem::Cifar),
            "lstm" => recurrent(Cell::Lstm, false),
            "gru" => recurrent(Cell::Gru, false),
            "bilstm" => recurrent(Cell::Lstm, true),
            "bigru" => recurrent(Cell::Gru, true),
            "encoder" => Model::Encoder(EncoderClassifier::default()),
            _ => return Err(UnknownModel { name: name.into() }),
        })
    }

    /// The name that [`Model::by_name`] knows; `layers` for a list of layers.
    pub fn name(&self) -> &'static str {
        match self {
            Model::Mlp(_) => "mlp",
            Model::Tabular(_) => "tabular",
            Model::Lenet(_) => "lenet",
            Model::Cnn(_) => "cnn",
            Model::Gpt(_) => "gpt",
            Model::Gpt2(_) => "gpt2",
            Model::Bert(_) => "bert",
            Model::AlexNet(_) => "alexnet",
            Model::ResNet(m) => match (m.depth, m.stem) {
                (Depth::D18, Stem::ImageNet) => "resnet18",
                (Depth::D34, Stem::ImageNet) => "resnet34",
                (Depth::D50, Stem::ImageNet) => "resnet50",
                (Depth::D101, Stem::ImageNet) => "resnet101",
                (Depth::D18, Stem::Cifar) => "resnet18_cifar",
                (Depth::D34, Stem::Cifar) => "resnet34_cifar",
                (Depth::D50, Stem::Cifar) => "resnet50_cifar",
                (Depth::D101, Stem::Cifar) => "resnet101_cifar",
            },
            Model::Recurrent(m) => match (m.cell, m.bidirectional) {
                (Cell::Lstm, false) => "lstm",
                (Cell::Gru, false) => "gru",
                (Cell::Lstm, true) => "bilstm",
                (Cell::Gru, true) => "bigru",
            },
            Model::Encoder(_) => "encoder",
            Model::Layers(_) => "layers",
        }
    }

    /// The input of the model with these options.
    pub fn input(&self, options: &TraceOptions) -> ModelInput {
        let n = options.batch;
        let numbers = |shape: Shape| ModelInput { name: "x", shape, dtype: DType::F32 };
        let image = |channels, size| {
            let (h, w) = options.image.unwrap_or(size);
            numbers([n, channels, h, w].into())
        };
        let ids = |context| {
            let shape = [n, options.time.unwrap_or(context)].into();
            ModelInput { name: "ids", shape, dtype: DType::I32 }
        };
        match self {
            Model::Mlp(m) => numbers([n, m.inputs].into()),
            Model::Tabular(m) => numbers([n, m.inputs].into()),
            Model::Lenet(m) => image(m.channels, m.image),
            Model::Cnn(m) => image(m.channels, Cnn::IMAGE),
            Model::AlexNet(m) => image(m.channels, AlexNet::IMAGE),
            Model::ResNet(m) => image(m.channels, m.stem.image()),
            Model::Gpt(m) => ids(m.context),
            Model::Gpt2(m) => ids(m.context),
            Model::Bert(m) => ids(m.context),
            Model::Recurrent(m) => ids(m.context),
            Model::Encoder(m) => ids(m.context),
            Model::Layers(m) => m.input(options),
        }
    }

    /// How many labels a batch has: one per sample, or one per token.
    pub fn n_labels(&self, options: &TraceOptions) -> usize {
        match self {
            Model::Gpt(m) => options.batch * options.time.unwrap_or(m.context),
            Model::Recurrent(RecurrentClassifier { context, tags: true, .. })
            | Model::Encoder(EncoderClassifier { context, tags: true, .. })
            | Model::Bert(Bert { context, tags: true, .. }) => {
                options.batch * options.time.unwrap_or(*context)
            }
            Model::Gpt2(m) => options.batch * options.time.unwrap_or(m.context),
            Model::Layers(m) if m.is_per_token() => {
                // Saturating: sizes that no memory holds are errors of the layers.
                m.input(options).shape.dims().iter().fold(1, |n, &d| n.saturating_mul(d))
            }
            _ => options.batch,
        }
    }

    /// The number of classes, the last dim of the logits.
    pub fn classes(&self) -> usize {
        match self {
            Model::Mlp(m) => m.classes,
            Model::Tabular(m) => m.classes,
            Model::Lenet(m) => m.classes,
            Model::Cnn(m) => m.classes,
            Model::Gpt(m) => m.vocab,
            Model::Gpt2(m) => m.vocab,
            Model::Bert(m) => m.classes,
            Model::AlexNet(m) => m.classes,
            Model::ResNet(m) => m.classes,
            Model::Recurrent(m) => m.classes,
            Model::Encoder(m) => m.classes,
            Model::Layers(m) => m.classes(),
        }
    }

    /// What [`Model::input`] describes → `[labels, classes]`, inside a custom trace.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        match self {
            Model::Mlp(m) => m.logits(b, x, training),
            Model::Tabular(m) => m.logits(b, x, training),
            Model::Lenet(m) => m.logits(b, x, training),
            Model::Cnn(m) => m.logits(b, x, training),
            Model::Gpt(m) => m.logits(b, x, training),
            Model::Gpt2(m) => m.logits(b, x, training),
            Model::Bert(m) => m.logits(b, x, training),
            Model::AlexNet(m) => m.logits(b, x, training),
            Model::ResNet(m) => m.logits(b, x, training),
            Model::Recurrent(m) => m.logits(b, x, training),
            Model::Encoder(m) => m.logits(b, x, training),
            Model::Layers(m) => m.logits(b, x, training),
        }
    }

    /// The graph from the inputs `x` or `ids`, and `labels` (i32), to the outputs `logits` and `loss`, the mean
    /// cross-entropy.
    pub fn trace(&self, options: &TraceOptions) -> Traced<Graph> {
        let mut b = Builder::new();
        if let Model::Layers(m) = self {
            m.closed(&b)?;
        }
        let input = self.input(options);
        let sizes: Vec<_> = input.shape.dims().iter().map(|&d| (input.name, d)).collect();
        positive(&b, "input", &sizes)?;
        let x = b.input(input.name, input.shape, input.dtype)?;
        let labels = b.input("labels", [self.n_labels(options)], DType::I32)?;
        let logits = self.logits(&mut b, x, options.training)?;
        let loss = b.layer("loss", |b| b.cross_entropy(logits, labels, None, options.loss))?;
        Ok(b.finish(&[("logits", logits), ("loss", loss)]))
    }
}

/// The dims `[batch, time]` of a batch of sequences.
fn sequence(b: &Builder, ids: Tensor) -> Traced<[usize; 2]> {
    match b.shape(ids).dims() {
        &[batch, time] => Ok([batch, time]),
        _ => {
            let (shape, why) = (b.shape(ids).clone(), "2 dims are needed: [batch, time]".into());
            b.error(TraceErrorKind::Shape { op: "ids", shape, why })
        }
    }
}
