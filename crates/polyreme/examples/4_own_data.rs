//! Data made in Rust and a custom observer: two spirals, told apart by a small network.
//!
//!     cargo run --release -p polyreme --example 4_own_data

use std::sync::Arc;

use polyreme::data::{Dataset, Features, InMemory, Spec, Target};
use polyreme::nn::Model;
use polyreme::nn::model::Mlp;
use polyreme::train::event::{Event, Observer};
use polyreme::train::job::{Length, ModelSpec, OptimizerSpec};
use polyreme::train::sets::Sets;
use polyreme::{App, Job, TrainError};

/// `n` points on two spirals, from the `first` on.
fn spirals(first: usize, n: usize) -> Result<Arc<dyn Dataset>, TrainError> {
    let (mut points, mut labels) = (Vec::new(), Vec::new());
    for i in first..first + n {
        let arm = i % 2;
        // The golden ratio spreads points over the arm, whatever part of them is taken.
        let along = (i as f32 * 0.618_034).fract().sqrt();
        let angle = along * 9.0 + arm as f32 * std::f32::consts::PI;
        points.extend([along * angle.cos(), along * angle.sin()]);
        labels.push(arm);
    }
    let target = Target::Class { classes: 2, names: vec!["in".into(), "out".into()] };
    let spec = Spec { features: Features::Row { width: 2 }, target };
    Ok(Arc::new(InMemory::new(spec, points, labels)?))
}

/// Prints every tenth evaluation.
struct Watcher(usize);

impl Observer for Watcher {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Evaluated { epoch, metrics, .. } = event {
            self.0 += 1;
            if self.0.is_multiple_of(10) {
                println!("epoch {epoch}: {metrics:.3?}");
            }
        }
    }
}

fn main() -> Result<(), TrainError> {
    let mut job = Job::new("spirals");
    job.model =
        ModelSpec::new(Model::Mlp(Mlp { hidden: vec![64, 64], activation: "tanh".into(), ..Mlp::default() }));
    job.train.batch = 32;
    job.train.length = Length::Epochs(40);
    job.train.optimizer = OptimizerSpec { lr: 1e-2, ..OptimizerSpec::adam() };
    job.output.path = Some(std::env::temp_dir().join(format!("polyreme-own-data-{}", std::process::id())));
    let sets = Sets::new(spirals(0, 1000)?).with_test(spirals(1000, 200)?);
    let summary = App::new(job).data(sets).train(&mut Watcher(0))?;
    println!("test accuracy {:.3}", summary.metrics["test_accuracy"]);
    std::fs::remove_dir_all(&summary.output).map_err(|e| TrainError::io(&summary.output, e))
}
