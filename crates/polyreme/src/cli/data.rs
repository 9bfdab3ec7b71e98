//! `polyreme data`: well-known datasets.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use clap::Subcommand;
use polyreme_data::fetch::{self, FetchProgress, GetOptions};
use serde_json::json;

use super::{CommandResult, print_json};
use crate::output::{self, CLEAR};

#[derive(Subcommand)]
pub(super) enum Data {
    /// Download a set, verify its checksums, and print where it is. An interrupted download is continued.
    Get {
        /// Which set; `polyreme data list` names them.
        name: String,
        /// The folder [default: data/NAME, where job files look for it].
        #[arg(long, value_name = "FOLDER")]
        into: Option<PathBuf>,
        /// A mirror to get the files from: a URL, or a folder.
        #[arg(long, value_name = "URL")]
        mirror: Option<String>,
        /// Print JSON lines: what happens to each file, and at the end the folder.
        #[arg(long)]
        json: bool,
    },
    /// List the sets that can be downloaded.
    List {
        /// Print one JSON object per set.
        #[arg(long)]
        json: bool,
    },
}

impl Data {
    pub(super) fn run(&self) -> CommandResult {
        match self {
            Data::Get { name, into, mirror, json } => {
                let into = into.clone().unwrap_or_else(|| fetch::default_folder(name));
                let mut line =
                    DownloadLine { terminal: io::stderr().is_terminal(), json: *json, failures: Vec::new() };
                let mut progress = |p: FetchProgress<'_>| line.show(p);
                let options = GetOptions { into: &into, mirror: mirror.as_deref(), progress: &mut progress };
                let folder = fetch::get(name, options)?;
                line.show_failures();
                match json {
                    true => print_json(&json!({"name": name, "folder": folder})),
                    false => Ok(writeln!(io::stdout(), "{}", folder.display())?),
                }
            }
            Data::List { json: true } => fetch::known().iter().try_for_each(|set| {
                let bytes: u64 = set.files.iter().map(|f| f.bytes).sum();
                print_json(&json!({"name": set.name, "bytes": bytes, "about": set.about}))
            }),
            Data::List { json: false } => {
                let mut out = io::stdout().lock();
                for set in fetch::known() {
                    let bytes: u64 = set.files.iter().map(|f| f.bytes).sum();
                    writeln!(out, "{:<16} {:>5.0} MB  {}", set.name, bytes as f64 / 1e6, set.about)?;
                }
                Ok(())
            }
        }
    }
}

/// How a download is shown: one moving line on a terminal, one line per file elsewhere.
struct DownloadLine {
    terminal: bool,
    json: bool,
    /// Sources that failed for the current file. If all fail, the error lists them.
    failures: Vec<String>,
}

impl DownloadLine {
    fn show(&mut self, progress: FetchProgress<'_>) {
        if self.json {
            return self.line_of_json(progress);
        }
        match progress {
            FetchProgress::Present { file } => {
                self.show_failures();
                self.say(&format!("{file}: there"));
            }
            FetchProgress::Begin { file, from } => {
                if !self.failures.iter().all(|f| f.starts_with(&format!("{file}: "))) {
                    self.show_failures();
                }
                self.say(&format!("{file}: from {from}"));
            }
            FetchProgress::Bytes { file, have, total } if self.terminal => {
                let share = 100.0 * have as f64 / total.max(1) as f64;
                let (have, total) = (have as f64 / 1e6, total as f64 / 1e6);
                // A failed write only loses a progress line.
                drop(write!(io::stderr(), "{CLEAR}{file}: {have:.1} of {total:.1} MB, {share:.0}%"));
            }
            FetchProgress::Bytes { .. } => {}
            FetchProgress::Failed { file, from, why } => self.failures.push(format!("{file}: {from}: {why}")),
            FetchProgress::Unpack { file } => {
                self.show_failures();
                self.say(&format!("{file}: unpacking"));
            }
        }
    }

    fn say(&self, line: &str) {
        output::say(&format!("{}{line}", if self.terminal { CLEAR } else { "" }));
    }

    /// Shows which sources failed for a file that another one provided.
    fn show_failures(&mut self) {
        for failure in std::mem::take(&mut self.failures) {
            self.say(&format!("warning: {failure}"));
        }
    }

    /// One line per file and event; progress in bytes would be too many.
    fn line_of_json(&self, progress: FetchProgress<'_>) {
        let value = match progress {
            FetchProgress::Present { file } => json!({"event": "present", "file": file}),
            FetchProgress::Begin { file, from } => json!({"event": "begin", "file": file, "from": from}),
            FetchProgress::Bytes { .. } => return,
            FetchProgress::Failed { file, from, why } => {
                json!({"event": "failed", "file": file, "from": from, "why": why})
            }
            FetchProgress::Unpack { file } => json!({"event": "unpack", "file": file}),
        };
        // A closed pipe does not end the download.
        let _ = print_json(&value);
    }
}
