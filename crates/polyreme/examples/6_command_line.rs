//! A job defined in Rust with the whole command line: train, resume, eval, predict, inspect.
//!
//!     cargo run --release -p polyreme --example 6_command_line -- train --set train.epochs=3

use std::process::ExitCode;

use polyreme::graph::{Builder, Tensor, Traced};
use polyreme::nn::layer::Linear;
use polyreme::train::job::Source;
use polyreme::{App, Job};

fn net(b: &mut Builder, x: Tensor, _training: bool) -> Traced {
    let h = Linear::new(20, 32).trace(b, "first", x)?;
    let h = b.activation("relu", h)?;
    Linear::new(32, 4).trace(b, "second", h)
}

fn main() -> ExitCode {
    let mut job = Job::new("blobs");
    job.data.source = Source::Synthetic { samples: 1000, shape: vec![20], classes: 4, noise: 1.0 };
    polyreme::cli::run(App::new(job).net(net))
}
