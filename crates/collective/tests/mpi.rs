//! Every operation, in the group of all ranks and in the groups of meshes, under OpenMPI's and MPICH's `mpirun`, against the
//! oracle that every other transport is compared with; and mailboxes there, which run over TCP.
//!
//! Both have to be installed, so plain `cargo test` skips this and `.ci/run` names it. `POLYREME_MPIRUN` names one more
//! `mpirun` of MPICH's kind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::fs;
use std::path::Path;
use std::process::Command;

use polyreme_collective::Comm;
use polyreme_collective::mpi::{Search, find};
use polyreme_net::environment::mpi_families;
use rustix::process::{Signal, getpid, kill_process};

// What the rows are written against, under the names that they have inside the crate.
pub use polyreme_collective::{buffer, comm, element, split, work};

// The rows of the crate's own tests.
#[path = "../src/differences/mailboxes.rs"]
mod mailboxes;
#[allow(dead_code, reason = "MPI ends the job itself when a rank is lost")]
#[path = "../src/differences/meshes.rs"]
mod meshes;
#[path = "../src/differences/messages.rs"]
mod messages;
#[allow(dead_code, reason = "bugs of shared memory cannot be put in here")]
#[path = "../src/differences/rows.rs"]
mod rows;
#[path = "../src/differences/whole.rs"]
mod whole;

/// What a rank tests: the sizes of a mesh, `mailboxes`, or `dies:`, the rank that dies, and the folder for what the others found.
const PLAY: &str = "POLYREME_MPI_PLAY";

/// A program that starts ranks, with what it takes to start more of them than there are cores, as root.
struct Mpirun {
    program: String,
    flags: &'static [&'static str],
    /// Has it leave the others alone when a rank dies.
    keeps: &'static [&'static str],
}

fn launchers() -> Vec<Mpirun> {
    let openmpi = Mpirun {
        program: "mpirun.openmpi".into(),
        flags: &["--allow-run-as-root", "--oversubscribe"],
        keeps: &["--enable-recovery"],
    };
    let mpich = |program: String| Mpirun { program, flags: &[], keeps: &["-disable-auto-cleanup"] };
    let mut all = vec![openmpi, mpich("mpirun.mpich".into())];
    all.extend(std::env::var("POLYREME_MPIRUN").ok().map(mpich));
    all
}

/// Runs this many ranks; returns what they printed, and whether the launcher succeeded.
fn play(launcher: &Mpirun, more: &[&str], ranks: usize, play: &str) -> (String, bool) {
    let mut command = Command::new(&launcher.program);
    command.args(launcher.flags).args(more).args(["-n", &ranks.to_string()]);
    if !more.is_empty() {
        // MPICH's launcher signals ranks when one has died, which would end them; a shell takes these signals.
        command.args(["sh", "-c", r#"trap "" USR1 TERM; "$@"; exit $?"#, "sh"]);
    }
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "one_rank", "--nocapture", "--test-threads=1"]).env(PLAY, play);
    let out = command.output().unwrap_or_else(|error| panic!("{}: {error}", launcher.program));
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    (said.into_owned(), out.status.success())
}

/// All ranks play, and end well.
fn well(launcher: &Mpirun, ranks: usize, what: &str) {
    let (said, success) = play(launcher, &[], ranks, what);
    let well = said.matches("end: well").count();
    assert!(success && well == ranks, "{}, {what}: {said}", launcher.program);
}

#[test]
fn every_operation_is_right_on_meshes_under_mpirun() {
    for sizes in ["2x2", "2x3"] {
        let ranks = sizes.split('x').map(|n| n.parse::<usize>().unwrap()).product();
        launchers().iter().for_each(|launcher| well(launcher, ranks, sizes));
    }
}

/// Letters from any rank in any order, in the group of all and in one that was split from it.
#[test]
fn mailboxes_are_made_under_mpirun() {
    launchers().iter().for_each(|launcher| well(launcher, 3, "mailboxes"));
}

/// Where the launcher does not end the other ranks itself, their waits at mailboxes end with a report that names the one that
/// died. Where it does, as it is set up to, the job ends.
#[test]
fn a_rank_that_dies_under_mpirun_ends_waits_at_mailboxes() {
    for launcher in launchers() {
        for lost in [0, 3] {
            // Launchers may lose the last words of ranks that outlive another one.
            let folder = std::env::temp_dir().join(format!("polyreme-mpi-{}", std::process::id()));
            fs::create_dir(&folder).unwrap();
            let dies = format!("dies:{lost}:{}", folder.display());
            let (said, _) = play(&launcher, launcher.keeps, 4, &dies);
            let found = |rank: usize| fs::read_to_string(folder.join(rank.to_string())).unwrap_or_default();
            let found: Vec<String> = (0..4).map(found).collect();
            fs::remove_dir_all(&folder).unwrap();
            let expected: Vec<&str> = (0..4).map(|rank| if rank == lost { "" } else { "well" }).collect();
            assert_eq!(found, expected, "{}, rank {lost}: {said}", launcher.program);
            let (said, success) = play(&launcher, &[], 4, &format!("dies:{lost}:/nowhere"));
            assert!(!success, "{}, rank {lost}: {said}", launcher.program);
        }
    }
}

/// One rank, if `mpirun` started this.
#[test]
fn one_rank() {
    let Ok(play) = std::env::var(PLAY) else { return };
    let families = mpi_families(&|key| std::env::var(key).ok());
    let library = find(&Search { families, ..Search::default() }).unwrap_or_else(|why| panic!("{why}"));
    let mut comm = Comm::mpi(&library).unwrap();
    if play == "mailboxes" {
        return println!("end: {}", mailboxes::run(comm).map_or_else(|what| what, |()| "well".into()));
    }
    if let Some((lost, folder)) = play.strip_prefix("dies:").and_then(|play| play.split_once(':')) {
        let die = || kill_process(getpid(), Signal::KILL).unwrap();
        let end = mailboxes::lose_one(&mut comm, lost.parse().unwrap(), die);
        let found = end.map_or_else(|what| what, |()| "well".into());
        // There is no folder where the launcher ends the ranks.
        drop(fs::write(Path::new(folder).join(comm.rank().to_string()), found));
        // MPI cannot be ended in order without the rank that is gone.
        return die();
    }
    let sizes: Vec<usize> = play.split('x').map(|n| n.parse().unwrap()).collect();
    assert_eq!(comm.size(), sizes.iter().product(), "{library}");
    // Before it is split, a rank makes blocking calls, and MPICH's do not yield the core.
    let blocking = if sizes == [2, 2] { rows::run(&mut comm, rows::PlantedBug::None) } else { Ok(()) };
    let end = blocking.and_then(|()| meshes::run(comm, &sizes));
    println!("end: {}", end.map_or_else(|what| what, |()| "well".into()));
}
