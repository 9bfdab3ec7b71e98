//! Prints the graph of a model: `cargo run -p polyreme-nn --example trace -- MODEL [BATCH] [step]`. With `step`, the
//! whole training step: differentiated, and with its element-wise work fused.

use std::error::Error;
use std::process::ExitCode;

use polyreme_graph::{differentiate, fuse};
use polyreme_nn::{Model, TraceOptions};

fn main() -> ExitCode {
    match print(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn print(args: Vec<String>) -> Result<(), Box<dyn Error>> {
    let (step, rest): (Vec<_>, Vec<_>) = args.into_iter().partition(|a| a == "step");
    let name = rest.first().map_or("lenet", String::as_str);
    let batch = rest.get(1).map_or(Ok(64), |n| n.parse())?;
    let mut graph = Model::by_name(name)?.trace(&TraceOptions::training(batch))?;
    if !step.is_empty() {
        let loss = graph.output("loss").ok_or("a traced model has a loss")?;
        graph = fuse(&differentiate(&graph, loss)?);
    }
    print!("{graph}");
    println!("# {} parameters in {} tensors", graph.param_numel(), graph.params.len());
    Ok(())
}
