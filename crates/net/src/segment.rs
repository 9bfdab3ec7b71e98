//! Memory that all ranks of one host see: pages of an anonymous file, or of this process alone.
//!
//! The file is a memfd. The others open it as `/proc/PID/fd/N` of its creator, so only a path has to be passed, no file
//! has a name, and nothing is left behind when all processes are killed. Its size is sealed: a peer cannot truncate it
//! and make our accesses fault.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;

use crate::block::Block;

/// Memory of a fixed size that the ranks of one host see.
pub struct Segment {
    block: Block,
    /// Kept open: the path that others use leads through it.
    file: Option<OwnedFd>,
}

/// Why there is no such memory.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// It could not be made.
    #[error("cannot make shared memory of {bytes} bytes: {source}; free memory or use fewer ranks")]
    Make {
        /// How much.
        bytes: usize,
        /// The system's reason.
        source: Errno,
    },
    /// It could not be opened.
    #[error(
        "cannot open shared memory {path}: {source}; all ranks of a host must run as one user in one pid namespace"
    )]
    Open {
        /// Its path.
        path: String,
        /// The system's reason.
        source: Errno,
    },
    /// It was not made by [`Segment::create`].
    #[error("{path} is not shared memory of this job: {what}")]
    Strange {
        /// Its path.
        path: String,
        /// What is wrong with it.
        what: String,
    },
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl Segment {
    /// Memory of this process, for its threads.
    pub fn local(bytes: usize) -> Result<Segment, SegmentError> {
        let made = Block::of_this_process(bytes);
        let block = made.map_err(|source| SegmentError::Make { bytes, source })?;
        Ok(Segment { block, file: None })
    }

    /// New zeroed memory that other processes of this user can open; its first `warm` bytes are faulted in.
    pub fn create(bytes: usize, warm: usize) -> Result<Segment, SegmentError> {
        let make = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("polyreme", flags)?;
            rustix::fs::ftruncate(&file, bytes as u64)?;
            rustix::fs::fcntl_add_seals(&file, SEALS)?;
            let block = Block::of_file(file.as_fd(), bytes)?;
            block.fault_in(warm)?;
            Ok(Segment { block, file: Some(file) })
        };
        make().map_err(|source| SegmentError::Make { bytes, source })
    }

    /// Opens what another process made, if it has this size; its first `warm` bytes are faulted in.
    pub fn open(path: &str, bytes: usize, warm: usize) -> Result<Segment, SegmentError> {
        let open = |source| SegmentError::Open { path: path.into(), source };
        let strange = |what: String| SegmentError::Strange { path: path.into(), what };
        if !is_file_of_process(path) {
            return Err(strange("its path does not read /proc/PID/fd/N".into()));
        }
        // Opening a pipe or a device may block: NONBLOCK turns that into an error or a file that is refused below.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(Path::new(path), flags, Mode::empty()).map_err(open)?;
        let stat = rustix::fs::fstat(&file).map_err(open)?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(strange("it belongs to another user".into()));
        }
        // Only memfds have seals; other files report none.
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SEALS) {
            return Err(strange("its size is not sealed".into()));
        }
        if u64::try_from(stat.st_size) != Ok(bytes as u64) {
            return Err(strange(format!("it has {} bytes, not {bytes}", stat.st_size)));
        }
        let block = Block::of_file(file.as_fd(), bytes).map_err(open)?;
        block.fault_in(warm).map_err(open)?;
        Ok(Segment { block, file: Some(file) })
    }

    /// Where another process opens it; none if it is memory of this process.
    pub fn path(&self) -> Option<String> {
        self.file_number().map(|n| path_of(std::process::id(), n))
    }

    /// The number N of [`path_of`]; none if it is memory of this process.
    pub fn file_number(&self) -> Option<u32> {
        self.file.as_ref().and_then(|file| u32::try_from(file.as_raw_fd()).ok())
    }

    /// The memory.
    pub fn block(&self) -> &Block {
        &self.block
    }
}

/// Where a file of a process can be opened.
pub fn path_of(pid: u32, file_number: u32) -> String {
    format!("/proc/{pid}/fd/{file_number}")
}

fn is_file_of_process(path: &str) -> bool {
    let number = |s: &str| !s.is_empty() && s.len() <= 10 && s.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<_> = path.split('/').collect();
    matches!(parts[..], ["", "proc", pid, "fd", n] if number(pid) && number(n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use polyreme_sync::atomic::{AtomicU32, Ordering};
    use std::os::fd::AsRawFd;

    #[test]
    fn what_one_writes_the_other_reads() {
        for bytes in [1, 4096, 100_000] {
            let ours = Segment::create(bytes.max(8), bytes).unwrap();
            let theirs = Segment::open(&ours.path().unwrap(), bytes.max(8), bytes).unwrap();
            assert_ne!(ours.block().ptr(), theirs.block().ptr());
            ours.block().at::<AtomicU32>(4).store(77, Ordering::Release);
            assert_eq!(theirs.block().at::<AtomicU32>(4).load(Ordering::Acquire), 77);
        }
        assert!(Segment::local(100).unwrap().path().is_none());
        assert_eq!(Segment::create(0, 0).unwrap().block().bytes(), 0);
    }

    #[test]
    fn strangers_are_turned_away() {
        let check = |path: &str, bytes: usize, want: &str| {
            let error = Segment::open(path, bytes, 0).err().expect(path).to_string();
            assert!(error.contains(want), "{error}");
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let unsealed =
            rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        let (pipe, _other) = std::io::pipe().unwrap();
        let ours = Segment::create(4096, 0).unwrap();
        let me = std::process::id();
        let number = |fd: i32| path_of(me, fd as u32);
        check(file.path().to_str().unwrap(), 0, "/proc/PID/fd/N");
        check("/proc/self/fd/0", 0, "/proc/PID/fd/N");
        check("/proc/1/fd/3/..", 0, "/proc/PID/fd/N");
        check(&number(1_000_000), 4096, "cannot open");
        check(&number(file.as_file().as_raw_fd()), 0, "not sealed");
        check(&number(unsealed.as_raw_fd()), 4096, "not sealed");
        check(&number(pipe.as_raw_fd()), 0, "");
        check(&ours.path().unwrap(), 4097, "it has 4096 bytes, not 4097");
        check(&ours.path().unwrap(), 0, "it has 4096 bytes");
        for made in [Segment::create(usize::MAX / 2, 0), Segment::local(usize::MAX / 2)] {
            let error = made.err().expect("more than there is").to_string();
            assert!(error.contains("9223372036854775807 bytes") && error.contains("free memory"), "{error}");
        }
    }
}
