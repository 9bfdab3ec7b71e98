//! Every operation, in the group of all ranks and in the groups of meshes, under OpenMPI's and MPICH's `mpirun`, against the
//! oracle that every other transport is compared with.
//!
//! Both have to be installed, so plain `cargo test` skips this and `.ci/run` names it. `POLYREME_MPIRUN` names one more
//! `mpirun` of MPICH's kind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::process::Command;

use polyreme_collective::Comm;
use polyreme_collective::mpi::{Search, find};
use polyreme_net::environment::mpi_families;

// What the rows are written against, under the names that they have inside the crate.
pub use polyreme_collective::{buffer, comm, element, split, work};

// The rows of the crate's own tests.
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

/// The sizes of the mesh that a rank tests.
const PLAY: &str = "POLYREME_MPI_PLAY";

fn on_a_mesh(program: &str, flags: &[&str], sizes: &str) {
    let ranks: usize = sizes.split('x').map(|n| n.parse::<usize>().unwrap()).product();
    let mut command = Command::new(program);
    command.args(flags).args(["-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "one_rank", "--nocapture", "--test-threads=1"]).env(PLAY, sizes);
    let out = command.output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    let well = said.matches("end: well").count();
    assert!(out.status.success() && well == ranks, "{program}, mesh {sizes}: {said}");
}

#[test]
fn every_operation_is_right_on_meshes_under_mpirun() {
    let mpich = std::env::var("POLYREME_MPIRUN").ok();
    for sizes in ["2x2", "2x3"] {
        on_a_mesh("mpirun.openmpi", &["--allow-run-as-root", "--oversubscribe"], sizes);
        on_a_mesh("mpirun.mpich", &[], sizes);
        mpich.iter().for_each(|program| on_a_mesh(program, &[], sizes));
    }
}

/// One rank, if `mpirun` started this.
#[test]
fn one_rank() {
    let Ok(sizes) = std::env::var(PLAY) else { return };
    let sizes: Vec<usize> = sizes.split('x').map(|n| n.parse().unwrap()).collect();
    let families = mpi_families(&|key| std::env::var(key).ok());
    let library = find(&Search { families, ..Search::default() }).unwrap_or_else(|why| panic!("{why}"));
    let mut comm = Comm::mpi(&library).unwrap();
    assert_eq!(comm.size(), sizes.iter().product(), "{library}");
    // Before it is split, a rank makes blocking calls, and MPICH's do not yield the core.
    let blocking = if sizes == [2, 2] { rows::run(&mut comm, rows::PlantedBug::None) } else { Ok(()) };
    let end = blocking.and_then(|()| meshes::run(comm, &sizes));
    println!("end: {}", end.map_or_else(|what| what, |()| "well".into()));
}
