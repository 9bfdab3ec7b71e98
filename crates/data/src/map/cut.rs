//! Mapped files that are cut short while they are in use.
//!
//! Reading a page that the file no longer has, or that the disk fails to deliver, raises SIGBUS, which would kill the process
//! without a message. A handler, installed with the first map, looks up the address among the maps of this process, records the
//! offset, and puts a page of zeros there, so that the read goes on; the reader checks ([`Watch::intact`]) after each batch and
//! gets an ordinary error that names the file. The record is made before the page is replaced, so a thread that reads zeros
//! which another thread's fault put there finds it. Addresses outside our maps go to the previous handler,
//! which is Rust's own.
//!
//! Zeros past the new end, in its last page, come without a signal: for them the file's length is checked now and then.
//!
//! The handler only reads atomics and calls `mmap`: no lock, no allocation. Nodes of the list are never freed, but
//! reused; a version that is odd while a node changes protects the handler from half-written ones.

use std::ffi::{c_int, c_void};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use crate::error::DataError;

/// The length of a mapped file is checked once in this many milliseconds.
const LOOK_MS: u64 = 1000;

static FIRST: MapNode = MapNode::new();
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);
static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// The state that the handler reads.
struct Installed {
    page: usize,
    before: libc::sigaction,
}

/// A map, or room for one.
struct MapNode {
    /// The version, odd while the node changes.
    version: AtomicU64,
    /// The address range; 0 where there is no map.
    start: AtomicUsize,
    end: AtomicUsize,
    /// The offset of the first read that failed, plus 1; 0: none.
    failed: AtomicU64,
    /// The file, which the handler does not touch.
    origin: Mutex<Option<Arc<Origin>>>,
    next: OnceLock<Box<MapNode>>,
}

/// The file of a map, as it was opened.
#[derive(Debug)]
struct Origin {
    path: PathBuf,
    id: (u64, u64),
    len: u64,
    /// When its length was last checked, in milliseconds since the first map.
    looked_ms: AtomicU64,
}

/// Registers a map with the handler while it lives.
pub(super) struct Watch {
    node: &'static MapNode,
    origin: Arc<Origin>,
}

impl Watch {
    /// Registers `bytes`, a map of the file at `path`: reads in it can no longer kill the process.
    pub(super) fn new(path: &Path, file: &fs::Metadata, bytes: &[u8]) -> Watch {
        install();
        let origin = Arc::new(Origin {
            path: path.into(),
            id: (file.dev(), file.ino()),
            len: bytes.len() as u64,
            looked_ms: AtomicU64::new(now_ms()),
        });
        let start = bytes.as_ptr().addr();
        let node = MapNode::take(start, start + bytes.len());
        *node.origin.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&origin));
        Watch { node, origin }
    }

    /// Fails if a part of the file could not be read, or no longer exists.
    pub(super) fn intact(&self) -> Result<(), DataError> {
        match self.node.failed.load(SeqCst) {
            0 if self.origin.is_time() => self.origin.still_whole(),
            0 => Ok(()),
            failed => Err(self.origin.error(failed - 1)),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.node.origin.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.node.give_back();
    }
}

/// Fails if a part of any file that this process has mapped could not be read.
pub(super) fn all_intact() -> Result<(), DataError> {
    for node in nodes() {
        let failed = node.failed.load(SeqCst);
        if failed > 0
            && let Some(origin) = &*node.origin.lock().unwrap_or_else(PoisonError::into_inner)
        {
            return Err(origin.error(failed - 1));
        }
    }
    Ok(())
}

impl Origin {
    fn is_time(&self) -> bool {
        let (now, last) = (now_ms(), self.looked_ms.load(SeqCst));
        now.saturating_sub(last) >= LOOK_MS
            && self.looked_ms.compare_exchange(last, now, SeqCst, SeqCst).is_ok()
    }

    /// The current length of the file; `None` if another file has taken its name, which does not affect the map.
    fn len_now(&self) -> Option<u64> {
        let found = fs::metadata(&self.path).ok()?;
        ((found.dev(), found.ino()) == self.id).then_some(found.len())
    }

    fn still_whole(&self) -> Result<(), DataError> {
        match self.len_now() {
            Some(len) if len < self.len => Err(self.error(len)),
            _ => Ok(()),
        }
    }

    fn error(&self, offset: u64) -> DataError {
        let why = match self.len_now() {
            Some(len) if len < self.len => format!(
                "the file was cut from {} to {len} bytes while it was in use; restore it and go on from the last \
                 checkpoint (to replace a file in use, rename the new one over it)",
                self.len
            ),
            _ => "the file could not be read here while it was in use, because it was cut or its disk failed; check \
                  the disk, restore the file and go on from the last checkpoint"
                .into(),
        };
        DataError::corrupt(&self.path, offset, why)
    }
}

impl MapNode {
    const fn new() -> MapNode {
        MapNode {
            version: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            failed: AtomicU64::new(0),
            origin: Mutex::new(None),
            next: OnceLock::new(),
        }
    }

    /// Takes a free node for these addresses. An empty map needs none, since it cannot be read.
    fn take(start: usize, end: usize) -> &'static MapNode {
        let mut node = &FIRST;
        loop {
            let version = node.version.load(SeqCst);
            let free = version.is_multiple_of(2) && node.start.load(SeqCst) == 0;
            if free && node.version.compare_exchange(version, version + 1, SeqCst, SeqCst).is_ok() {
                node.failed.store(0, SeqCst);
                node.end.store(end, SeqCst);
                node.start.store(start, SeqCst);
                node.version.store(version + 2, SeqCst);
                return node;
            }
            node = node.next.get_or_init(|| Box::new(MapNode::new()));
        }
    }

    fn give_back(&self) {
        // No other thread changes a node that is taken.
        self.version.fetch_add(1, SeqCst);
        self.start.store(0, SeqCst);
        self.end.store(0, SeqCst);
        self.failed.store(0, SeqCst);
        self.version.fetch_add(1, SeqCst);
    }

    /// The offset of an address in this map, if it is in it. The map of a thread that is reading does not change.
    fn offset(&self, address: usize) -> Option<u64> {
        let version = self.version.load(SeqCst);
        let (start, end) = (self.start.load(SeqCst), self.end.load(SeqCst));
        let settled = version.is_multiple_of(2) && self.version.load(SeqCst) == version;
        (settled && (start..end).contains(&address)).then(|| (address - start) as u64)
    }
}

fn nodes() -> impl Iterator<Item = &'static MapNode> {
    std::iter::successors(Some(&FIRST), |node| node.next.get().map(|next| &**next))
}

fn now_ms() -> u64 {
    STARTED.elapsed().as_millis() as u64
}

/// Installs the handler, once. Where the system refuses, a cut file kills the process, as without it.
#[allow(unsafe_code)]
fn install() {
    INSTALLED.get_or_init(|| {
        // SAFETY: both calls get valid, zeroed structures of their own type, for which zeros are a value; the handler is
        // a function with the signature that SA_SIGINFO asks for. What was there before is read first: the handler
        // may run as soon as it is in place.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, ptr::null(), &mut before);
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
            Installed { page: libc::sysconf(libc::_SC_PAGESIZE).max(1) as usize, before }
        }
    });
}

#[allow(unsafe_code)]
extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // Between the call that installs the handler and the end of `install`, nothing is mapped yet.
    let Some(Installed { page, before }) = INSTALLED.get() else { return default_action() };
    // SAFETY: the kernel gives a handler that was installed with SA_SIGINFO a valid record.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // A positive code is the kernel's: a signal that a process sent has no address.
    let found = nodes().find_map(|node| Some((node, node.offset(address)?)));
    if let (Some((node, offset)), true) = (found, code > 0) {
        let _ = node.failed.compare_exchange(0, offset + 1, SeqCst, SeqCst);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let start = ptr::without_provenance_mut(address - address % page);
        // SAFETY: the page lies in a map of this process, whose reader waits for it in this very thread, so that it
        // cannot be unmapped meanwhile; it is replaced by one that can be read as well, and is unmapped with the rest.
        // errno is put back for the code that was interrupted.
        let replaced = unsafe {
            let errno = *libc::__errno_location();
            let replaced = libc::mmap(start, *page, libc::PROT_READ, flags, -1, 0);
            *libc::__errno_location() = errno;
            replaced
        };
        if replaced != libc::MAP_FAILED {
            return;
        }
    }
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => default_action(),
        // SAFETY: the address is that of the handler that was installed before, with the signature that its flags say.
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => unsafe {
            type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            std::mem::transmute::<libc::sighandler_t, Handler>(handler)(signal, info, context);
        },
        // SAFETY: as above.
        handler => unsafe {
            std::mem::transmute::<libc::sighandler_t, extern "C" fn(c_int)>(handler)(signal);
        },
    }
}

/// Restores the default action: the instruction is retried, and this time the signal kills the process.
#[allow(unsafe_code)]
fn default_action() {
    // SAFETY: a zeroed structure with the default action is a valid one; the call may be made in a handler.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
    }
}
