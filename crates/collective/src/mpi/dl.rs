//! Libraries that are loaded at run time.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A loaded library. It stays loaded until the process ends: MPI libraries leave threads and exit handlers behind.
pub(super) struct Library {
    handle: NonNull<c_void>,
}

/// Why a library was not loaded.
#[derive(Debug)]
pub(super) enum NotLoaded {
    /// There is none of this name.
    Absent,
    /// It exists, but it or one of its dependencies cannot be loaded.
    Broken(String),
}

impl Library {
    /// Loads a library: from a path, or by the loader's rules if `name` has no slash. Its symbols do not join those that
    /// other libraries see; see [`Library::join_global`].
    pub(super) fn open(name: &Path) -> Result<Library, NotLoaded> {
        load(name, libc::RTLD_LAZY | libc::RTLD_LOCAL).map(|handle| Library { handle })
    }

    /// Lets libraries that are loaded later see its symbols: OpenMPI's plugins expect them there.
    pub(super) fn join_global(&self, name: &Path) -> Result<(), NotLoaded> {
        load(name, libc::RTLD_NOW | libc::RTLD_GLOBAL).map(drop)
    }

    /// The address of a function or a global.
    pub(super) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is of a library that is never closed, and the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }
}

/// The file that a symbol came from.
pub(super) fn file_of(symbol: NonNull<c_void>) -> Option<PathBuf> {
    // SAFETY: zeros are a valid `Dl_info`, which `dladdr` fills in; the name is the loader's own, which is not unloaded.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(symbol.as_ptr(), &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(PathBuf::from(OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes())))
    }
}

fn load(name: &Path, flags: libc::c_int) -> Result<NonNull<c_void>, NotLoaded> {
    let Ok(text) = CString::new(name.as_os_str().as_bytes()) else {
        return Err(NotLoaded::Broken("a path with a zero byte".into()));
    };
    // SAFETY: the name ends with a zero. Constructors of the library run; it is one that the user installed as MPI.
    let handle = unsafe { libc::dlopen(text.as_ptr(), flags) };
    NonNull::new(handle).ok_or_else(|| {
        // SAFETY: `dlerror` returns the text of this thread's last error, valid until its next call, or null.
        let why = unsafe {
            let why = libc::dlerror();
            if why.is_null() { "unknown".into() } else { CStr::from_ptr(why).to_string_lossy().into_owned() }
        };
        match why.starts_with(&format!("{}: cannot open shared object file: No such file", name.display())) {
            true => NotLoaded::Absent,
            false => NotLoaded::Broken(why),
        }
    })
}
