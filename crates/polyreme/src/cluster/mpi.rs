//! The MPI library that belongs to the launcher of this process.

use std::fs;
use std::path::{Path, PathBuf};

use polyreme_collective::mpi::{MpiLibrary, Search, find};
use polyreme_net::environment::MpiFamily;

use super::{MPI_LIBRARY, SECRET};

/// Folders of libraries below the prefix that a launcher is installed in, `PREFIX/bin/mpirun`.
const FOLDERS: [&str; 4] = ["lib", "lib64", DEBIAN_FOLDER, "lib/release"];
/// How many ancestors to search for the launcher: scripts may be between it and a rank.
const ANCESTORS_MAX: usize = 8;

/// Debian's library folder of this architecture.
const DEBIAN_FOLDER: &str =
    if cfg!(target_arch = "aarch64") { "lib/aarch64-linux-gnu" } else { "lib/x86_64-linux-gnu" };

/// Loads the library that can find this process's other ranks, or returns an error that says what to do.
pub fn library(families: &[MpiFamily], vars: &dyn Fn(&str) -> Option<String>) -> Result<MpiLibrary, String> {
    // Without a known launcher the user asked for MPI, and its world size tells whether it is the right library.
    let families = if families.is_empty() { &[MpiFamily::OpenMpi, MpiFamily::Mpich] } else { families };
    let search = Search {
        families: families.to_vec(),
        folders: ancestors().iter().flat_map(|program| folders(program)).collect(),
        named: vars(MPI_LIBRARY).map(PathBuf::from),
    };
    find(&search).map_err(|why| {
        format!(
            "{why}; install the library of the launcher, or name it in {MPI_LIBRARY}, or set MASTER_ADDR, MASTER_PORT and \
             {SECRET} to go over sockets"
        )
    })
}

/// What ranks of this machine would load, one line per family of launchers.
pub fn installed() -> Vec<String> {
    let row = |family: MpiFamily| {
        let search = Search {
            families: vec![family],
            folders: mpirun().iter().flat_map(|program| folders(program)).collect(),
            named: None,
        };
        match find(&search) {
            Ok(found) => format!("{}: {found}", family.name()),
            Err(_) => format!("{}: no library found", family.name()),
        }
    };
    [MpiFamily::OpenMpi, MpiFamily::Mpich].map(row).to_vec()
}

/// The library folders of a program's installation prefix.
fn folders(program: &Path) -> Vec<PathBuf> {
    let prefix = program.parent().and_then(Path::parent);
    prefix.map_or(Vec::new(), |prefix| FOLDERS.iter().map(|folder| prefix.join(folder)).collect())
}

/// The programs of this process's ancestors, the nearest first: one of them is the launcher, or its part on this host.
fn ancestors() -> Vec<PathBuf> {
    let parent = |pid: u32| -> Option<u32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
    };
    let next = |pid: &u32| parent(*pid).filter(|&pid| pid > 0);
    let pids = std::iter::successors(next(&std::process::id()), next).take(ANCESTORS_MAX);
    // Processes of other users cannot be read, and are not this one's launcher.
    pids.filter_map(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok()).collect()
}

/// The `mpirun` that a shell would start.
fn mpirun() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find_map(|folder| folder.join("mpirun").canonicalize().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_lie_below_the_prefix() {
        let found = folders(Path::new("/opt/mpi/bin/orterun"));
        assert!(found[..2] == [PathBuf::from("/opt/mpi/lib"), PathBuf::from("/opt/mpi/lib64")], "{found:?}");
        assert!(folders(Path::new("orterun")).is_empty());
    }

    #[test]
    fn the_program_that_started_this_one_is_known() {
        let parent = std::os::unix::process::parent_id();
        let program = fs::read_link(format!("/proc/{parent}/exe")).unwrap();
        assert_eq!(ancestors().first(), Some(&program));
    }

    #[test]
    fn a_named_library_that_is_not_there_is_explained() {
        let vars = |key: &str| (key == MPI_LIBRARY).then(|| "/nowhere/libmpi.so".to_string());
        let said = library(&[MpiFamily::Mpich], &vars).err().expect("no library");
        assert!(
            said.contains("/nowhere/libmpi.so cannot be loaded") && said.contains("MASTER_ADDR"),
            "{said}"
        );
    }
}
