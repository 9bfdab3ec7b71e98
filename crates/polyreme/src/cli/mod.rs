//! The command line: flags in, events and results out, exit codes that mean something.
//!
//! 0: done. 1: the world went wrong (a file, a disk, a number that is not finite). 2: what was asked for makes no sense
//! (flags, a job file). 130: interrupted, and saved.

mod bench;
mod data;
mod eval;
mod inspect;
mod launch;
mod predict;
mod ranks;
mod terminal;
mod train;

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use polyreme_kernels::Isa;
use polyreme_train::job::JobErrors;
use serde::Serialize;

use crate::app::App;
use crate::doctor;

/// Trains neural networks on all the cores and machines that somebody has.
#[derive(Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train what a job file describes.
    ///
    /// Writes a folder: the job as it was resolved, checkpoints, `metrics.jsonl`, TensorBoard files, `report.html` and
    /// `model.safetensors`. Ctrl-C finishes the step, saves, and says how to go on.
    Train(train::TrainArgs),
    /// Train on several hosts: a process for each slot of each host, started over ssh.
    Launch(launch::LaunchArgs),
    /// Go on with a run from its last whole checkpoint, as if it had never stopped.
    Resume(train::ResumeArgs),
    /// Evaluate a trained model.
    Eval(eval::EvalArgs),
    /// Ask a trained model: labels with probabilities for images and tables, or text that goes on.
    Predict(predict::PredictArgs),
    /// Show a run, a checkpoint, a weights file or a job: parameters, history, graph.
    Inspect(inspect::InspectArgs),
    /// Get well-known datasets.
    #[command(subcommand)]
    Data(data::Data),
    /// Measure training steps, or kernels one by one.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Say what this machine is and what it can do at most: SIMD, cores, peak, bandwidth.
    ///
    /// Every command uses the best instructions that the CPU has. With POLYREME_ISA=avx2 or POLYREME_ISA=scalar in the
    /// environment it uses no more than those, as a lesser machine would.
    Doctor {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

/// An error with the exit code that it ends in.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What is printed; empty if everything was said.
    message: String,
    code: u8,
}

/// What a command comes to.
type Outcome = Result<(), Failure>;

impl Failure {
    /// What was asked for makes no sense.
    fn usage(message: impl ToString) -> Failure {
        Failure { message: format!("error: {}", message.to_string()), code: 2 }
    }

    /// The mistakes of a job, which say themselves that they are errors.
    fn job(errors: JobErrors) -> Failure {
        Failure { message: errors.to_string(), code: 2 }
    }

    /// An error of any kind.
    fn boxed(error: Box<dyn std::error::Error>) -> Failure {
        Failure { message: format!("error: {error}"), code: 1 }
    }

    /// The world went wrong.
    fn world(message: impl ToString) -> Failure {
        Failure::coded(1, message)
    }

    /// Anything, with its exit code.
    fn coded(code: u8, message: impl ToString) -> Failure {
        Failure { message: format!("error: {}", message.to_string()), code }
    }

    /// A message that says itself what it is.
    fn said(code: i32, message: &str) -> Failure {
        Failure { message: message.into(), code: u8::try_from(code).unwrap_or(2) }
    }

    /// Interrupted; what there was is saved, and it was said.
    fn interrupted() -> Failure {
        Failure { message: String::new(), code: 130 }
    }
}

impl<E: std::error::Error + 'static> From<E> for Failure {
    fn from(error: E) -> Failure {
        // Whoever reads has read enough, as `head` does.
        let code = if is_broken_pipe(&error) { 0 } else { 1 };
        let message = if code == 0 { String::new() } else { format!("error: {error}") };
        Failure { message, code }
    }
}

/// Runs the command line of this process for `app` and returns the exit code.
pub fn run(app: App) -> ExitCode {
    let start = Instant::now();
    let mut command = Cli::command();
    if let Some(name) = app.name() {
        command = command.bin_name(name.to_string()).about(format!("Trains and uses `{name}`."));
    }
    let cli = match command.try_get_matches().and_then(|m| Cli::from_arg_matches(&m)) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let outcome = limit_isa().and_then(|()| execute(&cli.command, &app, start));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { message, code }) => {
            if !message.is_empty() {
                eprintln!("{}", message.trim_end());
            }
            ExitCode::from(code)
        }
    }
}

/// Keeps to the instruction set that the environment allows.
fn limit_isa() -> Result<(), Failure> {
    match std::env::var(ISA_VARIABLE) {
        Ok(name) if !Isa::limit(&name) => {
            Err(Failure::usage(format!("{ISA_VARIABLE}={name}: known are scalar, avx2 and avx512")))
        }
        _ => Ok(()),
    }
}

/// The most that kernels may use of the CPU's instructions.
const ISA_VARIABLE: &str = "POLYREME_ISA";

fn execute(command: &Command, app: &App, start: Instant) -> Result<(), Failure> {
    match command {
        Command::Train(args) => train::train(app, args),
        Command::Launch(args) => launch::launch(app, args),
        Command::Resume(args) => train::resume(app, args),
        Command::Eval(args) => eval::eval(app, args),
        Command::Predict(args) => predict::predict(app, args),
        Command::Inspect(args) => inspect::inspect(app, args),
        Command::Data(data) => data.run(),
        Command::Bench(bench) => bench.run(app, start),
        Command::Doctor { json } => print(&doctor::examine(), *json),
    }
}

/// Prints a report for people, or as one line of JSON.
fn print<T: Serialize + std::fmt::Display>(report: &T, json: bool) -> Outcome {
    if json {
        return print_json(report);
    }
    Ok(writeln!(io::stdout().lock(), "{report}")?)
}

/// Prints one line of JSON.
fn print_json<T: Serialize>(report: &T) -> Outcome {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, report)?;
    Ok(writeln!(out)?)
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let io_error = error.downcast_ref::<io::Error>().map(io::Error::kind);
    let json_error = error.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
    io_error.or(json_error) == Some(io::ErrorKind::BrokenPipe)
}
