//! The command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    polyreme::cli::run(polyreme::App::default())
}
