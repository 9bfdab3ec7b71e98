//! The command line.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Parser, Subcommand};
use polyreme::bench::{kernels, step, step::Settings};
use polyreme::jobs::Job;
use polyreme::{doctor, process};
use serde::Serialize;

/// Trains neural networks on all the cores and machines that somebody has.
#[derive(Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure training steps, or kernels one by one.
    #[command(subcommand)]
    Bench(Bench),
    /// Say what this machine is and what it can do at most: SIMD, cores, peak, bandwidth.
    Doctor {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Subcommand)]
enum Bench {
    /// Whole training steps of the reference jobs: forward, backward, update; data in memory.
    ///
    /// Prints the median time of a step, GFLOP/s (convolutions counted as if computed directly), the share of the
    /// measured multiply-add peak, and planned and actual peak memory.
    Step(StepArgs),
    /// Kernels one by one, at the shapes of the reference jobs.
    Kernels(KernelArgs),
}

#[derive(Args)]
struct StepArgs {
    /// The jobs to run; all of them if none is named.
    #[arg(long = "job", value_name = "NAME", value_parser = Job::NAMES)]
    jobs: Vec<String>,
    /// Threads of the one rank [default: all cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Timed steps of each job [default: what the job says, 8 to 60].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Recompute activations so that parameters, gradients, optimizer state and activations take at most this much.
    #[arg(long, value_name = "MIB")]
    memory_mib: Option<usize>,
    /// Also say where the time goes: a line for each kind of node, the slowest first.
    #[arg(long)]
    ops: bool,
    /// Print one JSON object a job.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct KernelArgs {
    /// Only kernels whose name contains this, such as `matmul` or `conv2d grad`.
    #[arg(default_value = "")]
    filter: String,
    /// Threads [default: all cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object a kernel.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let start = Instant::now();
    let result = match Cli::parse().command {
        Command::Bench(Bench::Step(args)) => bench_step(&args, start),
        Command::Bench(Bench::Kernels(args)) => bench_kernels(&args),
        Command::Doctor { json } => print(&doctor::examine(), json),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has read enough, as `head` does.
        Err(error) if is_broken_pipe(error.as_ref()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn bench_step(args: &StepArgs, start: Instant) -> Outcome {
    let names: Vec<&str> = if args.jobs.is_empty() {
        Job::NAMES.to_vec()
    } else {
        args.jobs.iter().map(String::as_str).collect()
    };
    if !args.json {
        writeln!(io::stdout(), "{}", step::HEADER)?;
    }
    let mut since = start;
    for name in names {
        let job = Job::by_name(name).ok_or("the name of the job was checked")?;
        let settings = Settings {
            threads: threads(args.threads),
            steps: args.steps.map(|n| n as usize),
            budget_bytes: args.memory_mib.map(|mib| mib << 20),
        };
        let report = step::measure(&job, settings, || since.elapsed().as_secs_f64() * 1e3)?;
        print(&report, args.json)?;
        if args.ops {
            for op in step::measure_ops(&job, settings)? {
                print(&op, args.json)?;
            }
        }
        since = Instant::now();
    }
    Ok(())
}

fn bench_kernels(args: &KernelArgs) -> Outcome {
    if !args.json {
        writeln!(io::stdout(), "{}", kernels::HEADER)?;
    }
    let mut outcome: Outcome = Ok(());
    let mut n = 0;
    kernels::measure(threads(args.threads), &args.filter, &mut |report| {
        n += 1;
        if outcome.is_ok() {
            outcome = print(&report, args.json);
        }
    });
    if n == 0 {
        return Err(
            format!("no kernel's name contains `{}`; without a filter all are run", args.filter).into()
        );
    }
    outcome
}

fn threads(asked: Option<u16>) -> usize {
    asked.map_or_else(process::cores, usize::from)
}

fn print<T: Serialize + std::fmt::Display>(report: &T, json: bool) -> Outcome {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, report)?;
        writeln!(out)?;
    } else {
        writeln!(out, "{report}")?;
    }
    Ok(())
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let io_error = error.downcast_ref::<io::Error>().map(io::Error::kind);
    let json_error = error.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
    io_error.or(json_error) == Some(io::ErrorKind::BrokenPipe)
}
