//! `polyreme data`: well-known datasets.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use clap::Subcommand;
use polyreme_data::fetch::{self, GetOptions, Progress};

use super::Outcome;

#[derive(Subcommand)]
pub(super) enum Data {
    /// Download a set, check its checksums, and say where it is. A download that was cut goes on.
    Get {
        /// Which set; `polyreme data list` names them.
        name: String,
        /// The folder [default: data/NAME, where job files look for it].
        #[arg(long, value_name = "FOLDER")]
        into: Option<PathBuf>,
        /// Another place to get the files from: a URL, or a folder.
        #[arg(long, value_name = "URL")]
        mirror: Option<String>,
    },
    /// Name the sets that can be got.
    List,
}

impl Data {
    pub(super) fn run(&self) -> Outcome {
        match self {
            Data::Get { name, into, mirror } => {
                let into = into.clone().unwrap_or_else(|| fetch::default_folder(name));
                let mut line = Line { terminal: io::stderr().is_terminal() };
                let mut progress = |p: Progress<'_>| line.show(p);
                let options = GetOptions { into: &into, mirror: mirror.as_deref(), progress: &mut progress };
                let folder = fetch::get(name, options)?;
                Ok(writeln!(io::stdout(), "{}", folder.display())?)
            }
            Data::List => {
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

/// How a download looks: one line that moves on a terminal, a line a file elsewhere.
struct Line {
    terminal: bool,
}

impl Line {
    fn show(&mut self, progress: Progress<'_>) {
        let clear = if self.terminal { "\r\x1b[2K" } else { "" };
        match progress {
            Progress::Present { file } => eprintln!("{clear}{file}: there"),
            Progress::Begin { file, from } => eprintln!("{clear}{file}: from {from}"),
            Progress::Bytes { file, have, total } if self.terminal => {
                let share = 100.0 * have as f64 / total.max(1) as f64;
                eprint!(
                    "{clear}{file}: {:.1} of {:.1} MB, {share:.0}%",
                    have as f64 / 1e6,
                    total as f64 / 1e6
                );
            }
            Progress::Bytes { .. } => {}
            Progress::Failed { file, from, why } => eprintln!("{clear}{file}: {from}: {why}"),
            Progress::Unpack { file } => eprintln!("{clear}{file}: unpacking"),
        }
    }
}
