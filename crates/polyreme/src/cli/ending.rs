//! How a command ends: its last message, and the exit code.
//!
//! For people, an error is text on the standard error. With `--json` the last line of the standard output is also
//! `{"event":"error","message":…,"exit":…}`, whatever went wrong and however early.

use std::io::{self, Write};
use std::process::ExitCode;

use polyreme_data::DataError;
use polyreme_train::TrainError;
use polyreme_train::job::{JobError, JobErrors};
use signal_hook::consts::SIGPIPE;

use super::CommandResult;
use crate::cluster::pumps::ErrorLine;
use crate::output;

/// The exit codes, for `--help`.
pub(super) const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    something went wrong on the way: a file, a disk, a lost rank, a loss
       that is not finite, output that could not be written
  2    refused before anything was started: wrong flags, errors in the job
       file, a model that does not fit the data
  130  interrupted by Ctrl-C, SIGTERM or SIGHUP; training has saved, unless it
       was interrupted twice
  141  in a shell: the reader of the output has gone, as with `| head`;
       training goes on without one

With --json the last line of a command that fails is\n{\"event\":\"error\",\"message\":...,\"exit\":...}.";

const WENT_WRONG: u8 = 1;
const REFUSED: u8 = 2;
/// Interrupted by the user.
pub(super) const INTERRUPTED: u8 = 130;
const READER_GONE: u8 = 128 + SIGPIPE as u8;

/// An error with the exit code that it ends in.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What is printed; empty if nothing is left to say.
    pub(super) message: String,
    /// The message for programs, if it differs.
    pub(super) json: Option<String>,
    /// The exit code.
    pub(super) code: u8,
}

impl Failure {
    /// The request makes no sense.
    pub(super) fn usage(message: impl ToString) -> Failure {
        Failure::coded(REFUSED, message)
    }

    /// The errors of a job, which are already worded as errors.
    pub(super) fn job(errors: JobErrors) -> Failure {
        let place = |e: &JobError| match e.line {
            0 => e.origin.clone(),
            line => format!("{}:{line}:{}", e.origin, e.column),
        };
        let hint = |e: &JobError| if e.hint.is_empty() { String::new() } else { format!("; {}", e.hint) };
        let line = |e: &JobError| format!("{}: {}{}", place(e), e.message, hint(e));
        let lines: Vec<_> = errors.errors.iter().map(line).collect();
        Failure { message: errors.to_string(), json: Some(lines.join("\n")), code: REFUSED }
    }

    /// An error of any kind.
    pub(super) fn boxed(error: Box<dyn std::error::Error + Send + Sync>) -> Failure {
        Failure::world(error)
    }

    /// An error of the system, the files or the network.
    pub(super) fn world(message: impl ToString) -> Failure {
        Failure::coded(WENT_WRONG, message)
    }

    /// Anything, with its exit code.
    pub(super) fn coded(code: u8, message: impl ToString) -> Failure {
        Failure { message: format!("error: {}", message.to_string()), json: None, code }
    }

    /// A message that is complete by itself.
    pub(super) fn said(code: i32, message: &str) -> Failure {
        Failure { message: message.into(), json: None, code: u8::try_from(code).unwrap_or(REFUSED) }
    }

    /// Interrupted, saved, and already reported.
    pub(super) fn interrupted() -> Failure {
        Failure::said(INTERRUPTED.into(), "")
    }

    /// The message for programs; empty if nothing is left to say.
    fn for_programs(&self) -> &str {
        let message = self.message.trim();
        self.json.as_deref().unwrap_or(message.strip_prefix("error: ").unwrap_or(message)).trim()
    }
}

impl<E: std::error::Error + 'static> From<E> for Failure {
    fn from(error: E) -> Failure {
        match code(&error) {
            READER_GONE => Failure::said(READER_GONE.into(), ""),
            code => Failure::coded(code, error),
        }
    }
}

/// The exit code of an error.
fn code(error: &(dyn std::error::Error + 'static)) -> u8 {
    let json_kind = |e: &serde_json::Error| e.io_error_kind();
    let kind = error.downcast_ref().map(io::Error::kind);
    if kind.or(error.downcast_ref().and_then(json_kind)) == Some(io::ErrorKind::BrokenPipe) {
        return READER_GONE;
    }
    if let Some(error) = error.downcast_ref() {
        return code_of_data(error);
    }
    error.downcast_ref().map_or(WENT_WRONG, code_of_training)
}

/// A bad job has another code than failing files or a failing machine.
fn code_of_training(error: &TrainError) -> u8 {
    match error {
        TrainError::Data(error) => code_of_data(error),
        TrainError::Io { source, .. } => code(source),
        TrainError::Trace(_)
        | TrainError::Budget(_)
        | TrainError::Plan(_)
        | TrainError::Misfit { .. }
        | TrainError::Logits { .. }
        | TrainError::Fit(_)
        | TrainError::Job(_)
        | TrainError::Taken { .. }
        | TrainError::NoData
        | TrainError::TooLarge(_)
        | TrainError::DataChanged { .. }
        | TrainError::DataMisfit { .. }
        | TrainError::NoValidation { .. }
        | TrainError::MixupOfIds
        | TrainError::LossMisfit { .. }
        | TrainError::ClassWeights { .. }
        | TrainError::Balance { .. }
        | TrainError::TooFew { .. }
        | TrainError::Mesh(_)
        | TrainError::UseMesh { .. }
        | TrainError::Copies { .. }
        | TrainError::ShardGradients { .. }
        | TrainError::NoLayer { .. }
        | TrainError::NoParameter { .. }
        | TrainError::AllFrozen
        | TrainError::NoText
        | TrainError::WeightsOnly { .. } => REFUSED,
        TrainError::Exec(_)
        | TrainError::Rank(_)
        | TrainError::NotFinite { .. }
        | TrainError::Overflows { .. }
        | TrainError::Checkpoint(_)
        | TrainError::Record(_)
        | TrainError::Empty
        | TrainError::Thread { .. }
        | TrainError::Progress(_) => WENT_WRONG,
    }
}

fn code_of_data(error: &DataError) -> u8 {
    match error {
        DataError::Setting { .. } => REFUSED,
        DataError::Missing { .. }
        | DataError::Io { .. }
        | DataError::Corrupt { .. }
        | DataError::Remote { .. }
        | DataError::Panicked { .. } => WENT_WRONG,
    }
}

/// Prints help or the version if asked for, or what is wrong with the flags.
pub(super) fn refuse(refused: &clap::Error) -> CommandResult {
    if !refused.use_stderr() {
        return Ok(refused.print()?);
    }
    // It has colours on a terminal, which is why it is printed here.
    drop(refused.print());
    let text = refused.render().to_string();
    let json = text.strip_prefix("error: ").unwrap_or(&text).trim().to_string();
    Err(Failure { json: Some(json), ..Failure::said(refused.exit_code(), "") })
}

/// Prints the last message, waits for readers with a timeout, and returns the exit code.
pub(super) fn end(outcome: CommandResult, json: bool) -> ExitCode {
    // An unfinished line is still buffered by the standard library.
    let outcome = outcome.and_then(|()| Ok(io::stdout().flush()?));
    let mut exit = outcome.as_ref().map_or_else(|failure| failure.code, |()| 0);
    if exit == READER_GONE {
        // As programs do that die of SIGPIPE; a shell does not report them.
        drop(signal_hook::low_level::emulate_default_handler(SIGPIPE));
    }
    if let Err(failure) = &outcome {
        if !failure.message.is_empty() {
            output::err().last(&format!("{}\n", failure.message.trim_end()));
        }
        let message = failure.for_programs();
        if json && !message.is_empty() {
            output::err().settle();
            output::out().last(&format!("{}\n", ErrorLine::new(message, exit)));
        }
    }
    output::out().settle();
    match output::out().failure() {
        // Training went on.
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Some(error) => {
            output::err().last(&format!(
                "error: the standard output could not be written: {error}; the run's folder is complete\n"
            ));
            exit = exit.max(WENT_WRONG);
        }
        None => {
            let unread = output::out().unread();
            if unread > 0 {
                output::err()
                    .last(&format!("warning: {unread} lines of the standard output were not read\n"));
            }
        }
    }
    output::err().settle();
    ExitCode::from(exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_codes_that_help_tells() {
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let failures: [(Failure, u8, &str); 6] = [
            (gone().into(), 141, ""),
            (TrainError::io("standard output", gone()).into(), 141, ""),
            (full().into(), 1, "no storage space"),
            (TrainError::io("x", full()).into(), 1, "x: no storage space"),
            (TrainError::NoData.into(), 2, "the job has no data"),
            (Failure::interrupted(), 130, ""),
        ];
        for (failure, code, says) in failures {
            assert_eq!(failure.code, code, "{failure:?}");
            let said = failure.for_programs();
            assert!(said.starts_with(says) && said.is_empty() == says.is_empty(), "{said}");
            assert!(EXIT_CODES.contains(&format!("\n  {code:<5}")), "{code} is told");
        }
    }
}
