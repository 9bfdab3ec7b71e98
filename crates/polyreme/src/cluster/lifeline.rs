//! What a launcher tells its ranks: lines on their standard input, which stays open as long as the launcher lives.
//!
//! The same few lines serve a process of this host and one at the far end of ssh. The job's secret comes this way, so
//! it is on no command line and in no environment. When the input ends, the launcher is gone: the rank finishes its
//! step, saves and stops, and if it cannot, it is killed. So no rank outlives its launcher, but those of an elastic run that others can join.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use polyreme_net::patience::{Patience, SILENCE};

/// The longest line.
const LINE_BYTES_MAX: u64 = 1024;
/// How long to wait for the launcher's first line.
const PATIENCE: Duration = Duration::from_secs(120);
/// How the line begins in which rank 0 says where it listens, the first of its standard output.
const LISTENING: &str = "polyreme listening ";

/// A message of a launcher.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LauncherMessage {
    /// The job's secret.
    Secret(String),
    /// Where rank 0 listens.
    Master(String),
    /// Finish the step, save and stop.
    Stop,
    /// End at once.
    End,
}

impl fmt::Display for LauncherMessage {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            LauncherMessage::Secret(secret) => writeln!(f, "secret {secret}"),
            LauncherMessage::Master(address) => writeln!(f, "master {address}"),
            LauncherMessage::Stop => writeln!(f, "stop"),
            LauncherMessage::End => writeln!(f, "end"),
        }
    }
}

impl LauncherMessage {
    fn parse(line: &str) -> Option<LauncherMessage> {
        match line.trim_end().split_once(' ').unwrap_or((line.trim_end(), "")) {
            ("secret", secret) if !secret.is_empty() => Some(LauncherMessage::Secret(secret.into())),
            ("master", address) if !address.is_empty() => Some(LauncherMessage::Master(address.into())),
            ("stop", "") => Some(LauncherMessage::Stop),
            ("end", "") => Some(LauncherMessage::End),
            _ => None,
        }
    }
}

/// What rank 0 tells its launcher.
pub fn listening(address: &str) -> String {
    format!("{LISTENING}{address}\n")
}

/// Reads what [`listening`] writes.
pub fn parse_listening(line: &str) -> Option<&str> {
    line.strip_prefix(LISTENING).map(str::trim_end)
}

/// The launcher did not send what was expected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unsaid {
    what: &'static str,
    gone: bool,
}

impl fmt::Display for Unsaid {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Unsaid { what, gone } = self;
        match gone {
            true => write!(f, "the launcher ended before it sent {what}; start the job again"),
            false => write!(
                f,
                "the launcher did not send {what} within {} s; unset POLYREME_LAUNCHED if there is no launcher",
                PATIENCE.as_secs()
            ),
        }
    }
}

impl std::error::Error for Unsaid {}

/// How long a rank whose launcher is gone may take to finish its step and save. Where patience is longer, so is this: the ranks may
/// have to wait for one that stands still before they can save. A short patience does not make it shorter: that is about
/// silence, and a rank that computes or writes is not silent.
pub fn last_words(patience: Patience) -> Duration {
    patience.silence.max(SILENCE)
}

/// A rank's end.
pub struct Lifeline {
    heard: Receiver<LauncherMessage>,
}

impl Lifeline {
    /// Reads `input` from now on. `stop` is set when the rank should finish, and `gone` when the launcher has gone; `end` is called when it
    /// must end now, which is `last_words` after that. Without `last_words` the rank goes on without its launcher.
    pub fn listen(
        input: impl Read + Send + 'static,
        last_words: Option<Duration>,
        stop: Arc<AtomicBool>,
        gone: Arc<AtomicBool>,
        end: impl FnOnce() + Send + 'static,
    ) -> Lifeline {
        let (tell, heard) = mpsc::channel();
        let body = move || {
            let told_to_end = follow(input, &stop, &tell);
            drop(tell);
            match last_words {
                _ if told_to_end => stop.store(true, Ordering::Relaxed),
                Some(last_words) => {
                    gone.store(true, Ordering::Relaxed);
                    std::thread::sleep(last_words);
                }
                None => return,
            }
            end();
        };
        std::thread::Builder::new()
            .name("lifeline".into())
            .spawn(body)
            .expect("a process that starts can start a thread");
        Lifeline { heard }
    }

    /// The job's secret.
    pub fn secret(&self) -> Result<String, Unsaid> {
        match self.next("the secret")? {
            LauncherMessage::Secret(secret) => Ok(secret),
            _ => Err(Unsaid { what: "the secret", gone: false }),
        }
    }

    /// Where rank 0 listens.
    pub fn master(&self) -> Result<String, Unsaid> {
        match self.next("the address of rank 0")? {
            LauncherMessage::Master(address) => Ok(address),
            _ => Err(Unsaid { what: "the address of rank 0", gone: false }),
        }
    }

    fn next(&self, what: &'static str) -> Result<LauncherMessage, Unsaid> {
        self.heard
            .recv_timeout(PATIENCE)
            .map_err(|e| Unsaid { what, gone: e == RecvTimeoutError::Disconnected })
    }
}

/// Reads lines until they end, or until the rank is told to end; returns whether it was.
fn follow(input: impl Read, stop: &AtomicBool, tell: &Sender<LauncherMessage>) -> bool {
    let mut input = BufReader::new(input);
    let mut line = Vec::new();
    loop {
        line.clear();
        match input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
        match std::str::from_utf8(&line).ok().and_then(LauncherMessage::parse) {
            Some(LauncherMessage::Stop) => stop.store(true, Ordering::Relaxed),
            Some(LauncherMessage::End) => return true,
            // The rank may no longer be waiting.
            Some(said) => drop(tell.send(said)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Instant;

    #[test]
    fn lines_are_heard_in_order_and_the_end_is_noticed() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (ended, end) = mpsc::channel();
        let (line, gone) = (Some(SILENCE), Arc::default());
        let line = Lifeline::listen(reader, line, stop.clone(), gone, move || ended.send(()).unwrap());
        write!(writer, "{}", LauncherMessage::Secret("ab12".into())).unwrap();
        write!(writer, "nonsense\n{}", LauncherMessage::Master("[::1]:80".into())).unwrap();
        assert_eq!(line.secret().unwrap(), "ab12");
        assert_eq!(line.master().unwrap(), "[::1]:80");
        assert!(!stop.load(Ordering::Relaxed));
        write!(writer, "{}", LauncherMessage::Stop).unwrap();
        write!(writer, "{}", LauncherMessage::End).unwrap();
        end.recv_timeout(Duration::from_secs(5)).unwrap();
        assert!(stop.load(Ordering::Relaxed));
    }

    #[test]
    fn a_launcher_that_is_gone_is_said_at_once() {
        let (reader, writer) = std::io::pipe().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let line = Lifeline::listen(reader, Some(SILENCE), Arc::default(), stop.clone(), || {});
        drop(writer);
        let began = Instant::now();
        assert!(line.secret().unwrap_err().to_string().contains("ended before"));
        assert!(began.elapsed() < Duration::from_secs(5));
        while !stop.load(Ordering::Relaxed) {
            assert!(began.elapsed() < Duration::from_secs(5));
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_rank_whose_launcher_is_gone_has_time_to_save_before_it_ends() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (ended, end) = mpsc::channel();
        let time = Duration::from_millis(200);
        let began = Instant::now();
        let (stop, gone) = (Arc::default(), Arc::default());
        let told = move || ended.send(Instant::now()).unwrap();
        let _line = Lifeline::listen(reader, Some(time), stop, gone, told);
        drop(writer);
        assert!(end.recv_timeout(Duration::from_secs(20)).unwrap() >= began + time);
    }

    #[test]
    fn the_time_to_save_follows_a_long_patience_and_not_a_short_one() {
        for (patience, time) in [(1, 60), (60, 60), (61, 61), (600, 600)] {
            let patience = Patience { silence: Duration::from_secs(patience), ..Patience::default() };
            assert_eq!(last_words(patience), Duration::from_secs(time));
        }
    }

    #[test]
    fn every_line_is_read_back() {
        for said in [
            LauncherMessage::Secret("0f".into()),
            LauncherMessage::Master("h:1".into()),
            LauncherMessage::Stop,
            LauncherMessage::End,
        ] {
            assert_eq!(LauncherMessage::parse(&said.to_string()), Some(said));
        }
        for bad in ["", "secret", "master ", "stop now", "x y"] {
            assert_eq!(LauncherMessage::parse(bad), None, "{bad:?}");
        }
        assert_eq!(parse_listening(&listening("a:1")), Some("a:1"));
        assert_eq!(parse_listening("{}"), None);
    }
}
