//! One rank of a job that does nothing: it joins, shares a few bytes, and then waits for a line or for the alarm.
//!
//! ```text
//! join RANK SIZE HOST:PORT SECRET [JOB]
//! ```
//!
//! The secret is 64 hexadecimal digits; it is on the command line only because this is an example: other users of a
//! host can see command lines. With standard input closed it ends at once; with a pipe it stays until something is
//! written.

use std::io::Read;
use std::process::ExitCode;
use std::time::Duration;

use polyreme_net::Doing;
use polyreme_net::rendezvous::{JoinOptions, join};
use polyreme_net::secret::Secret;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Joins, shares a few bytes and ends.
pub(crate) fn run(args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [rank, size, master, secret, rest @ ..] = args else {
        return Err("usage: join RANK SIZE HOST:PORT SECRET [JOB]".into());
    };
    let mut options = JoinOptions::new(rank.parse()?, size.parse()?, master, Secret::from_text(secret)?);
    options.job = rest.first().cloned().unwrap_or_default();
    options.timeout = Duration::from_secs(20);
    options.patience.silence = Duration::from_secs(4);
    let joined = join(options)?;
    joined.control.pulse().at(7, Doing::AllReduce);
    let shared = joined.control.share(format!("blob {}", joined.rank).as_bytes())?;
    let shared: Vec<_> = shared.iter().map(|blob| String::from_utf8_lossy(blob)).collect();
    println!("rank {} of {} joined: {}", joined.rank, joined.size, shared.join(", "));

    let (line, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut byte = [0];
        let read = std::io::stdin().read(&mut byte);
        line.send(read)
    });
    let alarm = joined.control.alarm();
    loop {
        if let Some(report) = alarm.raised() {
            return Err(report.into());
        }
        if lines.recv_timeout(Duration::from_millis(20)).is_ok() {
            joined.control.goodbye()?;
            println!("rank {} ended", joined.rank);
            return Ok(());
        }
    }
}
