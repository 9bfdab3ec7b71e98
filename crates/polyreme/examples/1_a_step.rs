//! Trains a reference job for some steps from Rust: `cargo run --release -p polyreme --example reference_job -- lenet`.

use std::error::Error;

use polyreme::bench::jobs::Job;
use polyreme::exec::{Engine, Options};

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "lenet".into());
    let job =
        Job::by_name(&name).ok_or_else(|| format!("no job `{name}`; there are {}", Job::NAMES.join(", ")))?;
    let mut engine = Engine::new(job.program()?, Options::threads(2))?;
    job.fill(&mut engine)?;
    for step in 1..=20 {
        engine.step(job.lr)?;
        println!("step {step:2}: loss {:.4}", engine.output("loss")?[0]);
    }
    Ok(())
}
