//! Steps of every kind of model, small, and of graphs that are awkward to cut.

use polyreme_graph::op::{Cell, CrossEntropy};
use polyreme_graph::{Builder, DType, Graph, Init, Tensor, Traced, differentiate};
use polyreme_nn::model::{
    Cnn, EncoderClassifier, Gpt, Lenet, Mlp, RecurrentClassifier, ResNet, Stem, Tabular,
};
use polyreme_nn::{Model, TraceOptions};

fn step(model: Model, options: TraceOptions) -> Graph {
    let forward = model.trace(&options).unwrap();
    differentiate(&forward, forward.output("loss").unwrap()).unwrap()
}

fn images(n: usize, side: usize) -> TraceOptions {
    TraceOptions { image: Some((side, side)), ..TraceOptions::training(n) }
}

pub(crate) fn mlp() -> Graph {
    step(Model::Mlp(Mlp::default()), TraceOptions::training(3))
}

pub(crate) fn tabular() -> Graph {
    step(Model::Tabular(Tabular { layers: 3, ..Tabular::default() }), TraceOptions::training(3))
}

pub(crate) fn lenet() -> Graph {
    step(Model::Lenet(Lenet::default()), TraceOptions::training(2))
}

pub(crate) fn cnn() -> Graph {
    step(Model::Cnn(Cnn::default()), images(2, 16))
}

pub(crate) fn resnet18() -> Graph {
    step(Model::ResNet(ResNet { stem: Stem::Cifar, ..ResNet::default() }), images(2, 8))
}

pub(crate) fn lstm() -> Graph {
    let model = RecurrentClassifier { layers: 3, dropout: 0.2, context: 5, ..RecurrentClassifier::default() };
    step(Model::Recurrent(model), TraceOptions::training(3))
}

pub(crate) fn bigru() -> Graph {
    let model = RecurrentClassifier {
        cell: Cell::Gru,
        bidirectional: true,
        context: 5,
        ..RecurrentClassifier::default()
    };
    step(Model::Recurrent(model), TraceOptions::training(3))
}

pub(crate) fn encoder() -> Graph {
    let model = EncoderClassifier { layers: 3, dropout: 0.1, context: 6, ..EncoderClassifier::default() };
    step(Model::Encoder(model), TraceOptions::training(3))
}

pub(crate) fn gpt() -> Graph {
    step(Model::Gpt(small_gpt(0.1)), TraceOptions::training(2))
}

pub(crate) fn small_gpt(dropout: f32) -> Gpt {
    Gpt { vocab: 11, width: 24, heads: 3, layers: 4, context: 7, dropout }
}

/// The step of a graph that is traced by hand: `f` returns the logits of 4 samples.
fn traced(f: impl FnOnce(&mut Builder) -> Traced) -> Graph {
    let mut b = Builder::new();
    let labels = b.input("labels", [4], DType::I32).unwrap();
    let logits = f(&mut b).unwrap();
    let plain = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    let loss = b.layer("loss", |b| b.cross_entropy(logits, labels, None, plain)).unwrap();
    let forward = b.finish(&[("logits", logits), ("loss", loss)]);
    differentiate(&forward, loss).unwrap()
}

fn linear(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let width = b.shape(x).last();
        let w = b.param("weight", [out, width], Init::Const(0.0))?;
        let bias = b.param("bias", [out], Init::Const(0.0))?;
        let y = b.linear(x, w, Some(bias))?;
        b.activation("tanh", y)
    })
}

/// A table for embedding and for logits, and a weight that four layers use: of these, one through a reshape.
pub(crate) fn tied() -> Graph {
    traced(|b| {
        let ids = b.input("ids", [4], DType::I32)?;
        let table = b.param("table", [10, 12], Init::Const(0.0))?;
        let shared = b.param("shared", [12, 12], Init::Const(0.0))?;
        let flat = b.param("flat", [144], Init::Const(0.0))?;
        let scale = b.param("scale", [4, 12], Init::Const(0.0))?;
        let view = b.reshape(flat, [12, 12])?;
        let mut x = b.embedding(ids, table)?;
        for k in 0..4 {
            x = linear(b, &format!("own{k}"), x, 12)?;
            x = b.linear(x, shared, None)?;
            x = b.linear(x, view, None)?;
            // Its gradient is that of the sum, as it is.
            x = b.add(x, scale)?;
        }
        b.matmul(x, table, false, true)
    })
}

/// Values that skip over several cuts, to users in different chunks, also as a reshape.
pub(crate) fn skips() -> Graph {
    traced(|b| {
        let x = b.input("x", [4, 12], DType::F32)?;
        let first = linear(b, "first", x, 12)?;
        let view = b.reshape(first, [2, 24])?;
        let mut h = first;
        for k in 0..5 {
            h = linear(b, &format!("middle{k}"), h, 12)?;
            // The first one, the input, and the first one in another shape.
            h = b.add(h, first)?;
            h = b.mul(h, x)?;
            let wide = b.reshape(h, [2, 24])?;
            let wide = b.add(wide, view)?;
            h = b.reshape(wide, [4, 12])?;
        }
        let h = b.concat(&[h, first], 1)?;
        linear(b, "last", h, 10)
    })
}

/// One value is the gradient of several parameters, in different chunks.
pub(crate) fn shared_gradients() -> Graph {
    traced(|b| {
        let x = b.input("x", [4, 10], DType::F32)?;
        let mut h = x;
        for k in 0..6 {
            let p = b.param(&format!("p{k}"), [4, 10], Init::Const(0.0))?;
            h = b.add(h, p)?;
        }
        Ok(h)
    })
}
