//! A whole training from a few lines: synthetic data, a small network, one summary.
//!
//!     cargo run --release -p polyreme --example 2_a_job

use std::path::Path;

use polyreme::train::event::Silent;
use polyreme::{App, Job, TrainError};

const JOB: &str = r#"
[model]
kind = "mlp"
hidden = [64]

[data]
kind = "synthetic"
samples = 2000
shape = [20]
classes = 4

[train]
epochs = 5
optimizer = { kind = "adam", lr = 1e-2 }
"#;

fn main() -> Result<(), TrainError> {
    let mut job = Job::from_text(JOB, "a-job.toml", Path::new("."), &[])?;
    job.output.path = Some(std::env::temp_dir().join(format!("polyreme-a-job-{}", std::process::id())));
    let summary = App::new(job).train(&mut Silent)?;
    println!("test accuracy {:.3} after {} steps", summary.metrics["test_accuracy"], summary.steps);
    std::fs::remove_dir_all(&summary.output).map_err(|e| TrainError::io(&summary.output, e))
}
