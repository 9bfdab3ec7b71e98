//! The command line: flags in, events and results out, exit codes that mean something (`polyreme --help` lists them).

mod bench;
mod columns;
mod compared;
mod data;
mod elastic;
mod ending;
mod eval;
mod inspect;
mod launch;
mod machines;
mod member;
mod mesh;
mod metrics;
mod plan;
mod planned;
mod predict;
mod ranks;
mod terminal;
mod timeline;
mod train;
mod used;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use serde::Serialize;

use self::ending::Failure;
use crate::app::App;
use crate::doctor;

/// The result of a command.
type CommandResult = Result<(), Failure>;

/// Trains neural networks on all your cores and machines.
#[derive(Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true, after_help = ending::EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train what a job file describes.
    ///
    /// Writes a folder: the job as it was resolved, checkpoints, `metrics.jsonl`, TensorBoard files, `report.html` and
    /// `model.safetensors`. Ctrl-C finishes the step (with `schedule = "2bw"` those up to the next
    /// flush), saves, and prints how to resume.
    Train(train::TrainArgs),
    /// Train on several hosts: one process per slot of each host, started over ssh.
    Launch(launch::LaunchArgs),
    /// Coordinate an elastic run whose ranks all join it, and train nothing.
    ///
    /// Set POLYREME_SECRET here and for `polyreme join`. If this process is lost, the ranks go on; start it again at the same address
    /// within `parallel.patience`.
    Coordinator(elastic::CoordinatorArgs),
    /// Join an elastic run as a rank, from any machine.
    ///
    /// The run was started with `polyreme train --elastic --listen ADDR:PORT`. POLYREME_SECRET has to be the same for both. The data of
    /// the job file have to be on this machine; if the run's first rank may be lost, so has the run's folder.
    Join(elastic::JoinArgs),
    /// Show a run that is under way: the members of an elastic one, or figures and parameter servers of one with `--metrics`.
    Status(elastic::StatusArgs),
    /// Resume a run from its last complete checkpoint, as if it had never stopped.
    Resume(train::ResumeArgs),
    /// Evaluate a trained model.
    Eval(eval::EvalArgs),
    /// Use a trained model: labels with probabilities for images and tables, or generated text.
    Predict(predict::PredictArgs),
    /// Show a run, a checkpoint, a weights file or a job: parameters, history, graph; or draw a timeline.
    Inspect(inspect::InspectArgs),
    /// Find the best way to split a job over machines, before it runs: simulated times, memory and cost.
    Plan(plan::PlanArgs),
    /// Print the JSON schema of job files, with which editors complete and check them.
    ///
    /// Save it beside the job file as `job.schema.json`, and begin the job file with `#:schema ./job.schema.json`.
    Schema,
    /// Download well-known datasets.
    #[command(subcommand)]
    Data(data::Data),
    /// Measure training steps, or kernels one by one.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Describe this machine and its limits: SIMD, cores, peak, bandwidth.
    ///
    /// Every command uses the best instructions that the CPU has. With POLYREME_ISA=avx2 (or scalar, or avx512) in the
    /// environment it uses no more than those, as an older machine would; POLYREME_ISA=-amx,-avx512_bf16 turns features
    /// off, by the names that this command prints.
    Doctor {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command line of this process for `app` and returns the exit code.
pub fn run(app: App) -> ExitCode {
    let start = Instant::now();
    let mut command = Cli::command();
    if let Some(name) = app.name() {
        command = command.bin_name(name.to_string()).about(format!("Trains and uses `{name}`."));
    }
    let json = std::env::args_os().any(|word| word == "--json");
    let outcome = match command.try_get_matches().and_then(|m| Cli::from_arg_matches(&m)) {
        Ok(cli) => allowed(app).and_then(|app| execute(&cli.command, &app, start)),
        Err(refused) => ending::refuse(&refused),
    };
    ending::end(outcome, json)
}

/// The app, limited to the instructions that the environment allows.
fn allowed(app: App) -> Result<App, Failure> {
    let Some(words) = std::env::var_os(ISA_VARIABLE) else { return Ok(app) };
    let words = words.to_string_lossy();
    let isa = app.given().isa.limited(&words);
    isa.map(|isa| app.isa(isa)).map_err(|e| Failure::usage(format!("{ISA_VARIABLE}={words}: {e}")))
}

/// The variable that limits the CPU instructions of kernels.
const ISA_VARIABLE: &str = "POLYREME_ISA";

fn execute(command: &Command, app: &App, start: Instant) -> Result<(), Failure> {
    match command {
        Command::Train(args) => train::train(app, args),
        Command::Launch(args) => launch::launch(app, args),
        Command::Coordinator(args) => elastic::coordinate(app, args),
        Command::Join(args) => elastic::join(app, args),
        Command::Status(args) => elastic::status(args),
        Command::Resume(args) => train::resume(app, args),
        Command::Eval(args) => eval::eval(app, args),
        Command::Predict(args) => predict::predict(app, args),
        Command::Inspect(args) => inspect::inspect(app, args),
        Command::Plan(args) => plan::plan(app, args),
        Command::Schema => schema(),
        Command::Data(data) => data.run(),
        Command::Bench(bench) => bench.run(app, start),
        Command::Doctor { json } => print(&doctor::examine(app.given().isa), *json),
    }
}

/// Prints the schema of job files, indented.
fn schema() -> CommandResult {
    let mut out = io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, &polyreme_train::job::schema())?;
    Ok(writeln!(out)?)
}

/// Prints a report for people, or as one line of JSON.
fn print<T: Serialize + std::fmt::Display>(report: &T, json: bool) -> CommandResult {
    if json {
        return print_json(report);
    }
    Ok(writeln!(io::stdout().lock(), "{report}")?)
}

/// Prints one line of JSON.
fn print_json<T: Serialize>(report: &T) -> CommandResult {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, report)?;
    Ok(writeln!(out)?)
}
