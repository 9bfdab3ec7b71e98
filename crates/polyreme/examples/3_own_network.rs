//! A network written in Rust: a function of a builder, a batch, and whether this is for training.
//!
//!     cargo run --release -p polyreme --example 3_own_network

use polyreme::graph::{Builder, Tensor, Traced};
use polyreme::nn::layer::{Dropout, LayerNorm, Linear};
use polyreme::train::event::Silent;
use polyreme::train::job::{Length, Source};
use polyreme::{App, Job, TrainError};

/// Two linear layers around a norm, with a skip connection.
fn net(b: &mut Builder, x: Tensor, training: bool) -> Traced {
    let h = Linear::new(20, 32).trace(b, "first", x)?;
    let inner = LayerNorm::new(32).trace(b, "norm", h)?;
    let inner = b.activation("gelu", inner)?;
    let inner = Dropout { p: 0.1 }.trace(b, "drop", inner, training)?;
    let inner = Linear::new(32, 32).trace(b, "second", inner)?;
    let h = b.add(h, inner)?;
    Linear::new(32, 4).trace(b, "head", h)
}

fn main() -> Result<(), TrainError> {
    let mut job = Job::new("own-network");
    job.data.source = Source::Synthetic { samples: 2000, shape: vec![20], classes: 4, noise: 1.0 };
    job.train.length = Length::Epochs(5);
    job.output.path = Some(std::env::temp_dir().join(format!("polyreme-own-network-{}", std::process::id())));
    let summary = App::new(job).net(net).train(&mut Silent)?;
    println!("test accuracy {:.3}", summary.metrics["test_accuracy"]);
    std::fs::remove_dir_all(&summary.output).map_err(|e| TrainError::io(&summary.output, e))
}
