//! Trains a reference job for some steps from Rust: `cargo run --release -p polyreme --example 1_a_step -- lenet`.

use std::error::Error;

use polyreme::bench::jobs::BenchJob;
use polyreme::exec::Isa;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "lenet".into());
    let job = BenchJob::by_name(&name)
        .ok_or_else(|| format!("no job `{name}`; there are {}", BenchJob::NAMES.join(", ")))?;
    let mut engine = job.engine(job.lone_program(None, 2)?, 2, Isa::detect())?;
    for step in 1..=20 {
        let totals = job.step(&mut engine)?;
        println!("step {step:2}: loss {:.4}", totals.loss);
    }
    Ok(())
}
