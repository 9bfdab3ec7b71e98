//! What the operating system says about this process and this machine.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The code that training brings into memory, at most: of 5.4 MiB that were not resident yet, 1 MiB was after a step of `mlp`,
/// `lenet` or `cnn`. The rest of the program (decoders, downloads) stays on the disk.
const TRAINING_CODE_BYTES: usize = 1 << 20;

/// Resident bytes now, apart from pages of files that are mapped to be read: the system drops those when memory is short. Zero
/// where the system does not say.
fn resident_bytes() -> usize {
    mappings().map(|m| if m.read_only_file { 0 } else { m.resident }).sum()
}

/// Bytes of this program's code and constants that are not resident yet; they are loaded at their first use.
fn code_to_come_bytes() -> usize {
    mappings().filter(|m| m.program).map(|m| m.size.saturating_sub(m.resident)).sum()
}

/// A mapping of this process.
#[derive(Default)]
struct Mapping {
    /// Of this program's file.
    program: bool,
    /// Of a file that the process only reads, and shares with whoever else maps it.
    read_only_file: bool,
    size: usize,
    resident: usize,
}

fn mappings() -> impl Iterator<Item = Mapping> {
    let program = std::env::current_exe().unwrap_or_default();
    mappings_in(&fs::read_to_string("/proc/self/smaps").unwrap_or_default(), &program.to_string_lossy())
        .into_iter()
}

fn mappings_in(smaps: &str, program: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        // The first line of a mapping has its access and ends with its file; `Key: value` lines follow.
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|word| !word.ends_with(':')) {
            let read_only_file = words.next() == Some("r--s");
            found.push(Mapping { program: line.ends_with(program), read_only_file, ..Mapping::default() });
        } else if let Some(last) = found.last_mut() {
            last.size += kib(line, "Size:") * 1024;
            last.resident += kib(line, "Rss:") * 1024;
        }
    }
    found
}

/// What this process takes beside what training reserves: what is resident now, and code that training brings into memory.
pub fn bytes_before_training() -> usize {
    resident_bytes() + code_to_come_bytes().min(TRAINING_CODE_BYTES)
}

/// What a process of this program takes before it trains, and what it takes at most if nothing else is in it: 11 to 13 MiB were measured.
const PLAIN_PROCESS_BYTES: (usize, usize) = (12 << 20, 18 << 20);

/// The same for a plan, which should not differ from the same plan a second later by what happened to be resident.
pub fn bytes_of_a_planned_process() -> usize {
    let (usual, most) = PLAIN_PROCESS_BYTES;
    match bytes_before_training() {
        bytes if bytes <= most => usual,
        // A program that uses this crate, with data of its own.
        bytes => bytes,
    }
}

/// The most bytes that were resident since the start, or since [`reset_peak`].
pub fn peak_resident_bytes() -> usize {
    status_kib("VmHWM:") * 1024
}

/// Resets the peak, so that one process can measure several jobs.
pub fn reset_peak() {
    // If this is refused, the peak is that of the whole process: an upper bound.
    drop(fs::write("/proc/self/clear_refs", "5"));
}

/// The name of the CPU.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.into(), |(_, n)| n.trim().into())
}

/// Bytes of memory of this machine; zero where the system does not say.
pub fn memory_bytes() -> usize {
    kib(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemTotal:") * 1024
}

/// Lets this process and those that it starts have as many open files as the system allows. A rank has a connection to
/// each rank that it talks with, a launcher three pipes to each that it started; the usual soft limit of 1024 exists
/// for old programs that use `select`.
pub fn raise_open_files() {
    let limits = getrlimit(Resource::Nofile);
    // If this is refused, the old limit stays: a connection without a descriptor reports an error.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limits.maximum, maximum: limits.maximum });
}

/// How many cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Whether this process was started with a signal ignored, as `nohup` does.
pub fn ignores(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

fn status_kib(key: &str) -> usize {
    kib(&fs::read_to_string("/proc/self/status").unwrap_or_default(), key)
}

fn kib(text: &str, key: &str) -> usize {
    let value = text.lines().find_map(|l| l.strip_prefix(key));
    value.and_then(|v| v.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}

/// The machine and the program in a few lines, for a report.
pub fn facts() -> Vec<(String, String)> {
    vec![
        ("CPU".into(), cpu_name()),
        ("Cores".into(), cores().to_string()),
        ("Polyreme".into(), env!("CARGO_PKG_VERSION").into()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_seen() {
        // Rust ignores SIGPIPE in every program, and nothing else.
        assert!(ignores(13) && !ignores(15));
    }

    #[test]
    fn memory_is_seen_to_grow() {
        let before = resident_bytes();
        let block = vec![1u8; 64 << 20];
        assert!(std::hint::black_box(&block).iter().step_by(4096).all(|&b| b == 1));
        assert!(resident_bytes() >= before + (48 << 20), "64 MiB more are resident");
        assert!(peak_resident_bytes() >= resident_bytes() - (1 << 20));
        assert!(memory_bytes() > 64 << 20);
    }

    #[test]
    fn pages_of_files_that_are_read_are_not_counted() {
        let smaps = "5000-6000 r-xp 0 0:1 7 /bin/it\nSize:    40 kB\nRss:     8 kB\n\
            6000-7000 r--s 0 0:1 7 /data/x.csv\nSize:  4000 kB\nRss:  3000 kB\n\
            7000-8000 rw-s 0 0:1 7 /memfd:ranks (deleted)\nSize:    4 kB\nRss:     4 kB\n\
            8000-9000 rw-p 0 0:0 0\nSize:    16 kB\nRss:     12 kB\n";
        let found = mappings_in(smaps, "/bin/it");
        let counted = |m: &Mapping| (m.program, m.read_only_file, m.size >> 10, m.resident >> 10);
        let want =
            [(true, false, 40, 8), (false, true, 4000, 3000), (false, false, 4, 4), (false, false, 16, 12)];
        assert_eq!(found.iter().map(counted).collect::<Vec<_>>(), want);
    }
}
