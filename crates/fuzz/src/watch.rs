//! Saves the input when a process hangs or dies: writes it to a file and prints the path.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// An input that takes this long counts as a hang, however busy the machine is.
const HANGS: Duration = Duration::from_secs(60);

/// The input that is being read.
pub(crate) struct InputWatch {
    current: Arc<Mutex<Current>>,
    /// With `FUZZ_TRACE` each input is written to a file before it is read, for processes that die without a message:
    /// of a stack overflow or a failed allocation.
    trace: Option<(PathBuf, File)>,
    _ends: Sender<()>,
}

#[derive(Default)]
struct Current {
    number: u64,
    input: Vec<u8>,
}

impl InputWatch {
    pub(crate) fn new(name: &str) -> io::Result<InputWatch> {
        let current = Arc::new(Mutex::new(Current::default()));
        let (ends, ended) = channel();
        let (watched, of) = (current.clone(), name.to_owned());
        std::thread::Builder::new().name("fuzz-watch".into()).spawn(move || watch(&ended, &watched, &of))?;
        let trace = match std::env::var_os("FUZZ_TRACE") {
            Some(_) => {
                let path = place(name, "last");
                let file = File::create(&path)?;
                println!("{name}: the last input is in {}", path.display());
                Some((path, file))
            }
            None => None,
        };
        Ok(InputWatch { current, trace, _ends: ends })
    }

    /// Sets the input that is read next.
    pub(crate) fn next(&self, input: &[u8]) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.number += 1;
        current.input.clear();
        current.input.extend_from_slice(input);
        if let Some((path, file)) = &self.trace {
            let written = file.write_all_at(input, 0).and_then(|()| file.set_len(input.len() as u64));
            written.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
}

impl Drop for InputWatch {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.trace {
            // The file survives only if the process died.
            let _ = fs::remove_file(path);
        }
    }
}

fn watch(ended: &Receiver<()>, current: &Mutex<Current>, name: &str) {
    let mut before = 0;
    while ended.recv_timeout(HANGS) == Err(RecvTimeoutError::Timeout) {
        let current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number == before {
            let kept = keep(name, &current.input);
            // Not through the test's capture of output, which ends with the process.
            let _ = writeln!(io::stderr(), "{name}: input {before} hangs; it is in {kept:?}");
            std::process::abort();
        }
        before = current.number;
    }
}

/// Writes an input to a new file.
pub(crate) fn keep(name: &str, input: &[u8]) -> io::Result<PathBuf> {
    let number = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let path = place(name, &format!("{number:016x}"));
    fs::write(&path, input)?;
    Ok(path)
}

/// A path for a file, on a memory file system if there is one: some files are written for each input.
pub(crate) fn place(name: &str, which: &str) -> PathBuf {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
    folder.join(format!("fuzz-{}-{which}", name.replace([' ', '/'], "-")))
}
