//! The ranks' output, on its way through their launcher.
//!
//! One thread per stream of each rank reads it to its end, whether or not anyone reads the launcher's own: lines go to
//! [`output`], which never blocks. So a rank never blocks on a full pipe.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{ChildStderr, ChildStdout};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::lifeline::parse_listening;
use crate::output::{self, fit::fold};

/// A longer line of rank 0 is passed on in parts, and one of another rank is cut. The longest one, the table of 4096
/// ranks as JSON, is half as long.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// How many different errors are remembered, to print each once.
const ERRORS_MAX: usize = 64;
/// The indentation of continuation lines.
const HANG: usize = 4;

/// The last line of a command that fails, for programs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ErrorLine {
    event: String,
    /// What went wrong.
    pub message: String,
    /// The exit code.
    pub exit: u8,
}

impl ErrorLine {
    /// An error with its exit code.
    pub fn new(message: &str, exit: u8) -> ErrorLine {
        ErrorLine { event: "error".into(), message: message.into(), exit }
    }

    fn parse(line: &[u8]) -> Option<ErrorLine> {
        // Most lines are not errors.
        line.starts_with(b"{\"event\":\"error\"").then(|| serde_json::from_slice(line).ok())?
    }
}

impl fmt::Display for ErrorLine {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

/// What pumps report.
pub(super) enum PumpEvent {
    /// Rank 0 says where it listens.
    Listening(String),
    /// A stream has ended.
    Drained,
}

/// What a rank printed that may explain its end.
#[derive(Default)]
pub(super) struct LastWords {
    /// The last line of its standard error.
    pub(super) last_line: String,
    /// The error that it reported as JSON.
    pub(super) error: Option<String>,
}

/// Errors, with the rank that printed each first.
#[derive(Default)]
pub(super) struct SaidErrors(Mutex<HashMap<String, usize>>);

/// What the threads of a rank's streams share.
#[derive(Clone)]
pub(super) struct Pump {
    pub(super) rank: usize,
    pub(super) tell: Sender<PumpEvent>,
    pub(super) said: Arc<SaidErrors>,
    pub(super) words: Arc<Mutex<LastWords>>,
}

impl Pump {
    /// Passes on the standard output of the rank, except a first line that is meant for the launcher, and errors.
    pub(super) fn start_out(self, out: ChildStdout) -> io::Result<()> {
        self.start(move |pump| {
            let mut is_first = true;
            each_line(out, |line| {
                let is_first = std::mem::take(&mut is_first);
                let address = std::str::from_utf8(line).ok().and_then(parse_listening);
                match address.filter(|_| is_first && pump.rank == 0) {
                    Some(address) => drop(pump.tell.send(PumpEvent::Listening(address.into()))),
                    None => match ErrorLine::parse(line) {
                        Some(error) => pump.words(|words| words.error = Some(error.message)),
                        None if pump.rank == 0 => output::out().text(fitted(line)),
                        None => pump.mark(line),
                    },
                }
            });
        })
    }

    /// Passes its standard error on.
    pub(super) fn start_err(self, errors: ChildStderr) -> io::Result<()> {
        self.start(move |pump| {
            each_line(errors, |line| {
                let text = String::from_utf8_lossy(line);
                if !text.trim().is_empty() {
                    pump.words(|words| words.last_line = text.trim().chars().take(400).collect());
                }
                match pump.rank {
                    0 => output::err().text(line.to_vec()),
                    _ => pump.mark(line),
                }
            });
        })
    }

    fn start(self, read: impl FnOnce(&Pump) + Send + 'static) -> io::Result<()> {
        let body = move || {
            read(&self);
            drop(self.tell.send(PumpEvent::Drained));
        };
        std::thread::Builder::new().name("ranks' output".into()).spawn(body).map(drop)
    }

    fn words(&self, change: impl FnOnce(&mut LastWords)) {
        change(&mut self.words.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Passes a line on with the rank in front of it. An error that several ranks share is printed once.
    fn mark(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end_matches(['\n', '\r']);
        if text.starts_with("error") {
            let mut said = self.said.0.lock().unwrap_or_else(PoisonError::into_inner);
            if said.len() < ERRORS_MAX && *said.entry(text.into()).or_insert(self.rank) != self.rank {
                return;
            }
        }
        // It may overwrite a progress line of rank 0, which is drawn again.
        let clear = if output::err().width().is_some() { output::CLEAR } else { "" };
        output::err().line(&format!("{clear}[rank {}] {text}", self.rank));
    }
}

/// A line of rank 0 folded to the terminal, which rank 0 does not know. Lines for programs are not changed.
fn fitted(line: &[u8]) -> Vec<u8> {
    let (width, text) = (output::out().width(), std::str::from_utf8(line));
    match (width, text) {
        (Some(_), Ok(text)) if !text.starts_with('{') => fold(text, width, HANG).into_bytes(),
        _ => line.to_vec(),
    }
}

/// Reads lines to the end; of one that is too long, parts.
fn each_line(from: impl Read, mut take: impl FnMut(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while let Ok(1..) = from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
        take(&line);
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_for_programs_is_read_back() {
        let error = ErrorLine::new("the \"data\"\nare gone", 1);
        let line = error.to_string();
        assert_eq!(line, "{\"event\":\"error\",\"message\":\"the \\\"data\\\"\\nare gone\",\"exit\":1}");
        assert_eq!(ErrorLine::parse(format!("{line}\n").as_bytes()), Some(error));
        for other in ["", "{}", "{\"event\":\"error\"}", "{\"event\":\"step\",\"message\":\"\",\"exit\":1}"] {
            assert_eq!(ErrorLine::parse(other.as_bytes()), None, "{other}");
        }
    }
}
