//! Finding the MPI library that belongs to the launcher that started this process.
//!
//! Libraries beside the launcher come first, then those that the system's loader finds. Each is asked for its version
//! before it is started: one of another family is skipped, because it would not find the launcher's other ranks and
//! would start a world of one rank each.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::path::{Path, PathBuf};

use polyreme_net::environment::MpiFamily;

use super::abi::{Abi, TEXT_BYTES_MAX, family_of};
use super::dl::{Library, NotLoaded, file_of};

/// Libraries with the standard's interface, of any family.
const STANDARD: [&str; 2] = ["libmpi_abi.so.1", "libmpi_abi.so"];

/// The libraries of a family, as the loader knows them. Debian's MPICH has another name.
fn names(family: MpiFamily) -> &'static [&'static str] {
    match family {
        MpiFamily::OpenMpi => &["libmpi.so.40", "libmpi.so"],
        MpiFamily::Mpich => &["libmpi.so.12", "libmpich.so.12", "libmpi.so", "libmpich.so"],
    }
}

/// What to look for, and where.
#[derive(Clone, Default, Debug)]
pub struct Search {
    /// Libraries that can ask the launcher for the other ranks, the likeliest first.
    pub families: Vec<MpiFamily>,
    /// Folders of libraries that belong to the launcher.
    pub folders: Vec<PathBuf>,
    /// The library that the user names; no other is tried, and its family is not checked.
    pub named: Option<PathBuf>,
}

/// A library that can be started.
pub struct MpiLibrary {
    pub(super) library: Library,
    /// Its binary interface.
    pub abi: Abi,
    /// Its file.
    pub path: PathBuf,
    /// Its version text, on one line.
    pub version: String,
}

/// No library was found; what was tried.
#[derive(Debug)]
pub struct NotFound {
    search: Search,
    /// Libraries that exist but are unsuitable, and why.
    unfit: Vec<String>,
}

/// Finds and loads a library; it is not started yet.
pub fn find(search: &Search) -> Result<MpiLibrary, NotFound> {
    let mut unfit = Vec::new();
    let mut attempt = |name: &Path, family: Option<MpiFamily>| match open(name, family) {
        Ok(found) => Some(found),
        Err(NotLoaded::Absent) => None,
        Err(NotLoaded::Broken(why)) => {
            // The same file may be found beside the launcher and by the loader.
            if !unfit.contains(&why) {
                unfit.push(why);
            }
            None
        }
    };
    let found = match &search.named {
        Some(path) => attempt(path, None),
        None => candidates(search).into_iter().find_map(|(name, family)| attempt(&name, Some(family))),
    };
    found.ok_or_else(|| NotFound { search: search.clone(), unfit })
}

/// What is tried, in order.
fn candidates(search: &Search) -> Vec<(PathBuf, MpiFamily)> {
    let mut all = Vec::new();
    for &family in &search.families {
        let names = || STANDARD.iter().chain(names(family));
        for folder in &search.folders {
            all.extend(names().map(|name| (folder.join(name), family)));
        }
        all.extend(names().map(|name| (PathBuf::from(name), family)));
    }
    all
}

/// Loads a library and asks for its version; it must be of `family`, if given.
fn open(name: &Path, family: Option<MpiFamily>) -> Result<MpiLibrary, NotLoaded> {
    let library = Library::open(name)?;
    let shown = name.display();
    let Some(symbol) = library.symbol(c"MPI_Get_library_version") else {
        return Err(NotLoaded::Broken(format!(
            "{shown} has no MPI_Get_library_version, so it is not MPI 3 or later"
        )));
    };
    let path = file_of(symbol).unwrap_or_else(|| name.to_owned());
    let mut text = vec![0u8; TEXT_BYTES_MAX];
    let mut len: c_int = 0;
    // SAFETY: the function has this signature in every MPI library, and may be called before MPI starts; there is room for
    // the longest text.
    unsafe {
        let version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int = std::mem::transmute(symbol);
        version(text.as_mut_ptr().cast(), &mut len);
    }
    text.truncate(len.max(0) as usize);
    let version = one_line(&String::from_utf8_lossy(&text));
    if let Some(family) = family
        && family_of(&version) != family
    {
        return Err(NotLoaded::Broken(format!("{} is {version}", path.display())));
    }
    let abi = abi_of(&library, &version);
    Ok(MpiLibrary { library, abi, path, version })
}

/// The binary interface of a library. One with the standard's says so; in others the same function returns -1.
fn abi_of(library: &Library, version: &str) -> Abi {
    if let Some(symbol) = library.symbol(c"MPI_Abi_get_version") {
        let (mut major, mut minor): (c_int, c_int) = (-1, -1);
        // SAFETY: the function has this signature where it exists, and may be called before MPI starts.
        let code = unsafe {
            let get: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = std::mem::transmute(symbol);
            get(&mut major, &mut minor)
        };
        if code == 0 && major == 1 {
            return Abi::Standard;
        }
    }
    match family_of(version) {
        MpiFamily::OpenMpi => Abi::OpenMpi,
        MpiFamily::Mpich => Abi::Mpich,
    }
}

/// The part of a version text that tells versions apart: it goes on with how the library was built, after a comma in
/// OpenMPI's and on other lines in MPICH's.
fn one_line(text: &str) -> String {
    let line = text.trim_matches('\0').split(['\n', ',']).next().unwrap_or_default();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl fmt::Display for MpiLibrary {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} ({}, {})", self.path.display(), self.version, self.abi.name())
    }
}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.search.named {
            Some(path) => write!(f, "the MPI library {} cannot be loaded", path.display())?,
            None => {
                let families: Vec<_> = self.search.families.iter().map(|family| family.name()).collect();
                let names: Vec<_> = self.search.families.iter().flat_map(|&f| names(f)).copied().collect();
                write!(f, "no MPI library of {} was found ({}", families.join(" or "), names.join(", "))?;
                write!(f, ", {})", STANDARD.join(", "))?;
            }
        }
        self.unfit.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_beside_the_launcher_comes_first() {
        let search =
            Search { families: vec![MpiFamily::OpenMpi], folders: vec!["/opt/mpi/lib".into()], named: None };
        let tried: Vec<_> = candidates(&search).iter().map(|(name, _)| name.display().to_string()).collect();
        let expected = [
            "/opt/mpi/lib/libmpi_abi.so.1",
            "/opt/mpi/lib/libmpi_abi.so",
            "/opt/mpi/lib/libmpi.so.40",
            "/opt/mpi/lib/libmpi.so",
            "libmpi_abi.so.1",
            "libmpi_abi.so",
            "libmpi.so.40",
            "libmpi.so",
        ];
        assert_eq!(tried, expected);
    }

    #[test]
    fn a_library_that_is_not_there_or_is_not_mpi_is_explained() {
        let named = |path: &str| {
            let search = Search { named: Some(path.into()), ..Search::default() };
            find(&search).err().expect("no MPI library").to_string()
        };
        let said = named("/nowhere/libmpi.so.40");
        assert_eq!(said, "the MPI library /nowhere/libmpi.so.40 cannot be loaded");
        let said = named("libc.so.6");
        assert!(said.contains("libc.so.6 has no MPI_Get_library_version"), "{said}");
        let none = Search { families: vec![MpiFamily::Mpich], ..Search::default() };
        let said = NotFound { search: none, unfit: vec!["x is Open MPI v4".into()] }.to_string();
        assert!(
            said.contains("of MPICH was found (libmpi.so.12, ") && said.ends_with("; x is Open MPI v4"),
            "{said}"
        );
    }

    #[test]
    fn version_texts_become_a_line() {
        let mpich = "MPICH Version:      4.0.2\nMPICH Release date: Thu Apr  7\n";
        assert_eq!(one_line(mpich), "MPICH Version: 4.0.2");
        assert_eq!(family_of("MPICH Version: 4.0.2"), MpiFamily::Mpich);
        assert_eq!(family_of("Intel(R) MPI Library 2021.10 for Linux* OS"), MpiFamily::Mpich);
        let open = one_line("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4\0");
        assert_eq!((open.as_str(), family_of(&open)), ("Open MPI v4.1.4", MpiFamily::OpenMpi));
    }
}
