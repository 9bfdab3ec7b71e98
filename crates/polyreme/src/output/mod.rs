//! The standard streams of a training process: writers never wait for readers.
//!
//! A paused terminal (Ctrl-S, a pane that is being copied from) or a pager (`| less`) reads nothing for as long as its
//! user likes. So lines go into a queue, and a thread writes them. While nothing is read:
//! - of frames, the progress lines that replace each other, the newest is kept;
//! - lines are kept up to [`KEPT_BYTES`]; later ones are dropped and counted, and a note in their place says how many,
//!   once the reader reads again;
//! - the last message of a stream ([`Stream::last`]: a summary, an error) is always kept.
//!
//! At the end [`Stream::settle`] waits for the reader as long as it goes on reading, and for [`PATIENCE`] if it does not.
//!
//! A stream that cannot be written (a full disk, a reader that has gone) accepts nothing more; [`Stream::failure`] says
//! why. Where both streams are one file, usually a terminal, they share a queue, so that lines keep their order.
//!
//! Commands that do not train write to the standard output directly: a pager should hold them.
//!
//! - [`fit`]: text for the width of a terminal.

pub mod fit;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much text of a stream is kept for its reader.
pub const KEPT_BYTES: usize = 4 << 20;
/// How long to wait at the end for a reader that reads nothing. Less than a launcher gives its ranks to end.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// How much is written at once. Writes of this size to a pipe are atomic, so a short line is never cut.
const CHUNK_BYTES: usize = 4096;
/// How long to wait when another program has set the terminal to non-blocking.
const NOT_NOW: Duration = Duration::from_millis(10);
/// The width of a terminal that does not report it.
const WIDTH: usize = 80;
/// Clears the progress line.
pub const CLEAR: &str = "\r\x1b[2K";

/// The standard output.
pub fn out() -> &'static Stream {
    &STANDARD.0
}

/// The standard error.
pub fn err() -> &'static Stream {
    &STANDARD.1
}

/// Prints a line on the standard error before or after training, where waiting for the reader is right.
pub fn say(line: &str) {
    // A closed pipe is no reason to end; `eprintln!` would panic.
    drop(writeln!(io::stderr(), "{line}"));
}

/// One pair per process, in front of the standard library's.
static STANDARD: LazyLock<(Stream, Stream)> = LazyLock::new(|| {
    let (out, err) = (own(io::stdout().as_fd()), own(io::stderr().as_fd()));
    let place = |file: &File| file.metadata().ok().map(|m| (m.dev(), m.ino()));
    let shared = place(&out).is_some_and(|place_of_out| place(&err) == Some(place_of_out));
    let out = Stream::over(out);
    let err = match shared {
        true => Stream { queue: out.queue.clone(), file: Arc::new(err) },
        false => Stream::over(err),
    };
    (out, err)
});

/// A separate descriptor: the standard library holds a lock on its streams while it writes.
fn own(fd: BorrowedFd) -> File {
    let null = || File::options().write(true).open("/dev/null").map(OwnedFd::from);
    let own = fd.try_clone_to_owned().or_else(|_| null());
    File::from(own.expect("a process that starts has room for two descriptors"))
}

/// A stream that never makes its writer wait.
pub struct Stream {
    queue: Arc<Queue>,
    file: Arc<File>,
}

impl Stream {
    /// A stream with its own queue and thread.
    pub fn over(file: File) -> Stream {
        let queue = Arc::new(Queue::default());
        let body = {
            let queue = queue.clone();
            move || queue.write()
        };
        let writer = std::thread::Builder::new().name("output".into());
        writer.spawn(body).expect("a process that starts can start a thread");
        Stream { queue, file: Arc::new(file) }
    }

    /// Columns, if this is a terminal.
    pub fn width(&self) -> Option<usize> {
        let columns = |fd: &File| rustix::termios::tcgetwinsize(fd).ok().map(|s| usize::from(s.ws_col));
        self.file.is_terminal().then(|| columns(&self.file).filter(|w| *w > 0).unwrap_or(WIDTH))
    }

    /// A line.
    pub fn line(&self, line: &str) {
        self.text(format!("{line}\n").into_bytes());
    }

    /// Whole lines, as they are.
    pub fn text(&self, bytes: Vec<u8>) {
        self.queue.add(self.entry(bytes));
    }

    /// The last message of this process on this stream, which is never dropped.
    pub fn last(&self, text: &str) {
        let mut state = self.queue.lock();
        state.note();
        state.keep(self.entry(text.into()));
        self.queue.changed.notify_all();
    }

    /// The progress line; it replaces the previous one.
    pub fn frame(&self, text: &str) {
        let mut state = self.queue.lock();
        if state.failed.is_none() {
            let replaced = state.frame.replace(self.entry(text.into()));
            state.left_out.frames += u64::from(replaced.is_some());
            self.queue.changed.notify_all();
        }
    }

    /// Clears the progress line.
    pub fn clear(&self) {
        self.frame("");
    }

    /// Waits until everything is written; false if the reader does not read, or the stream is broken.
    pub fn settle(&self) -> bool {
        self.queue.settle(PATIENCE)
    }

    /// How many lines are waiting.
    pub fn unread(&self) -> usize {
        let state = self.queue.lock();
        state.lines.len() + usize::from(state.writing)
    }

    /// Why nothing can be written.
    pub fn failure(&self) -> Option<io::Error> {
        self.queue.lock().failed.map(io::Error::from_raw_os_error)
    }

    fn entry(&self, bytes: Vec<u8>) -> QueuedOutput {
        QueuedOutput { file: self.file.clone(), bytes }
    }
}

struct QueuedOutput {
    file: Arc<File>,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<OutputState>,
    /// Something was added, taken or given up.
    changed: Condvar,
}

#[derive(Default)]
struct OutputState {
    lines: VecDeque<QueuedOutput>,
    /// Of `lines`.
    bytes: usize,
    frame: Option<QueuedOutput>,
    left_out: LeftOut,
    /// Whether an entry is with the writer.
    writing: bool,
    /// Bytes that the reader has read.
    taken: u64,
    /// How many it had read when it was last waited for in vain.
    given_up: Option<u64>,
    /// The error number that broke the stream.
    failed: Option<i32>,
}

/// What was dropped.
#[derive(Default)]
struct LeftOut {
    lines: u64,
    frames: u64,
    /// Where the note goes.
    file: Option<Arc<File>>,
    json: bool,
}

impl OutputState {
    fn keep(&mut self, entry: QueuedOutput) {
        if self.failed.is_none() {
            self.bytes += entry.bytes.len();
            self.lines.push_back(entry);
            // The progress line is drawn again below it.
            self.frame = None;
        }
    }

    /// Notes what was dropped, if anything.
    fn note(&mut self) {
        if self.left_out.lines == 0 {
            return;
        }
        let LeftOut { lines, frames, file, json } = std::mem::take(&mut self.left_out);
        let text = match json {
            true => format!("{{\"event\":\"dropped\",\"lines\":{lines}}}\n"),
            false => format!(
                "({lines} lines and {frames} progress updates were dropped here: they were not read in time)\n"
            ),
        };
        if let Some(file) = file {
            self.keep(QueuedOutput { file, bytes: text.into_bytes() });
        }
    }

    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.left_out.lines == 0 && self.frame.is_none() && !self.writing
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, entry: QueuedOutput) {
        let mut state = self.lock();
        // Once lines are dropped, all are until the reader has caught up: one gap, one note.
        if state.left_out.lines > 0 || state.bytes + entry.bytes.len() > KEPT_BYTES {
            state.left_out.lines += 1;
            state.left_out.json |= entry.bytes.starts_with(b"{");
            state.left_out.file = Some(entry.file);
        } else {
            state.keep(entry);
        }
        self.changed.notify_all();
    }

    /// The thread that writes.
    fn write(&self) {
        let mut drawn = false;
        loop {
            let (file, bytes) = self.next(&mut drawn);
            let written = write_all(&file, &bytes, |n| {
                self.lock().taken += n as u64;
                self.changed.notify_all();
            });
            let mut state = self.lock();
            state.writing = false;
            if let Err(error) = written {
                *state =
                    OutputState { failed: Some(error.raw_os_error().unwrap_or(0)), ..OutputState::default() };
            }
            self.changed.notify_all();
        }
    }

    /// Waits for the next bytes. `drawn`: whether the terminal shows a frame.
    fn next(&self, drawn: &mut bool) -> (Arc<File>, Vec<u8>) {
        let mut state = self.lock();
        loop {
            if state.lines.is_empty() {
                state.note();
            }
            let clear = if *drawn { CLEAR } else { "" };
            if let Some(QueuedOutput { file, bytes }) = state.lines.pop_front() {
                state.bytes -= bytes.len();
                state.writing = true;
                *drawn = false;
                return (file, [clear.as_bytes(), &bytes].concat());
            }
            if let Some(QueuedOutput { file, bytes }) = state.frame.take()
                && (*drawn || !bytes.is_empty())
            {
                state.writing = true;
                *drawn = !bytes.is_empty();
                return (file, [CLEAR.as_bytes(), &bytes].concat());
            }
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn settle(&self, patience: Duration) -> bool {
        let mut state = self.lock();
        let (mut taken, mut since) = (state.taken, Instant::now());
        while !state.is_idle() && state.failed.is_none() {
            if state.taken != taken {
                (taken, since) = (state.taken, Instant::now());
            }
            let left = patience.saturating_sub(since.elapsed());
            if left.is_zero() || state.given_up == Some(taken) {
                state.given_up = Some(taken);
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.failed.is_none()
    }
}

/// Writes everything, and calls `taken` with each number of bytes written.
fn write_all(mut file: &File, bytes: &[u8], mut taken: impl FnMut(usize)) -> io::Result<()> {
    for mut chunk in bytes.chunks(CHUNK_BYTES) {
        while !chunk.is_empty() {
            match file.write(chunk) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    taken(n);
                    chunk = &chunk[n..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(NOT_NOW),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read};

    fn piped() -> (BufReader<io::PipeReader>, Stream) {
        let (reader, writer) = io::pipe().unwrap();
        (BufReader::new(reader), Stream::over(File::from(OwnedFd::from(writer))))
    }

    #[test]
    fn a_reader_that_does_not_read_is_told_what_it_missed() {
        let (mut reader, stream) = piped();
        let line = "x".repeat(1000);
        let n = 3 * KEPT_BYTES / line.len();
        for _ in 0..n {
            stream.line(&line);
        }
        let began = Instant::now();
        assert!(!stream.settle() && stream.unread() > 0);
        assert!(began.elapsed() >= PATIENCE);
        assert!(!stream.settle() && began.elapsed() < 2 * PATIENCE, "it is given up once");
        stream.last("the end\n");
        let (mut text, mut lines) = (String::new(), 0);
        let left_out: usize = loop {
            text.clear();
            reader.read_line(&mut text).unwrap();
            match text.strip_prefix('(') {
                Some(note) => break note.split(' ').next().unwrap().parse().unwrap(),
                None => lines += usize::from(text.trim_end() == line),
            }
        };
        assert_eq!(lines + left_out, n);
        // At least what is kept; what the pipe took meanwhile comes on top, if the thread that writes was that fast.
        assert!(lines >= KEPT_BYTES / 1001 && left_out > 0, "{lines} {left_out}");
        text.clear();
        reader.read_line(&mut text).unwrap();
        assert_eq!(text, "the end\n");
        assert!(stream.settle());
        stream.line("{\"event\":1}");
        text.clear();
        reader.read_line(&mut text).unwrap();
        assert_eq!(text, "{\"event\":1}\n", "it goes on as before");
    }

    #[test]
    fn frames_make_way_for_lines_and_for_each_other() {
        let (mut reader, stream) = piped();
        stream.frame("one");
        assert!(stream.settle());
        stream.line("a line");
        stream.frame("two");
        assert!(stream.settle());
        stream.clear();
        stream.clear();
        stream.line("another");
        assert!(stream.settle());
        let mut bytes = vec![0; format!("{CLEAR}one{CLEAR}a line\n{CLEAR}two{CLEAR}another\n").len()];
        reader.read_exact(&mut bytes).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(text, format!("{CLEAR}one{CLEAR}a line\n{CLEAR}two{CLEAR}another\n"));
    }

    #[test]
    fn a_stream_that_cannot_be_written_says_why_and_holds_nobody() {
        let stream = Stream::over(File::options().write(true).open("/dev/full").unwrap());
        stream.line("lost");
        assert!(!stream.settle());
        assert_eq!(stream.failure().unwrap().kind(), io::ErrorKind::StorageFull);
        stream.line("lost too");
        assert!(!stream.settle() && stream.unread() == 0);
        let (reader, stream) = piped();
        drop(reader);
        stream.last("gone");
        assert!(!stream.settle());
        assert_eq!(stream.failure().unwrap().kind(), io::ErrorKind::BrokenPipe);
    }
}
