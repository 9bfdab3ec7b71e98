//! Which MPI libraries can find the other ranks of a launcher.

use super::Vars;

/// The family of an MPI library. A library asks its launcher for the other ranks, in a protocol that launchers of the
/// other family may not speak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MpiFamily {
    /// OpenMPI.
    OpenMpi,
    /// MPICH and what is made from it: Intel MPI, MVAPICH, Cray MPICH.
    Mpich,
}

impl MpiFamily {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            MpiFamily::OpenMpi => "OpenMPI",
            MpiFamily::Mpich => "MPICH",
        }
    }
}

/// The libraries that can ask the launcher of this process for the other ranks, the likeliest first; empty if it was
/// not started by a launcher that MPI can ask.
pub fn mpi_families(vars: &dyn Fn(&str) -> Option<String>) -> Vec<MpiFamily> {
    let vars = Vars(vars);
    let is_set = |name: &str| vars.text(name).is_some();
    if is_set("OMPI_COMM_WORLD_SIZE") {
        return vec![MpiFamily::OpenMpi];
    }
    if is_set("PMIX_RANK") {
        return vec![MpiFamily::OpenMpi, MpiFamily::Mpich];
    }
    match (is_set("PMI_RANK"), is_set("SLURM_JOB_ID")) {
        // Slurm's PMI serves both, if OpenMPI was built with it.
        (true, true) => vec![MpiFamily::Mpich, MpiFamily::OpenMpi],
        (true, false) => vec![MpiFamily::Mpich],
        (false, _) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_tells_the_family() {
        let check = |set: &str, expected: &str| {
            let vars = |name: &str| set.split(' ').any(|key| key == name).then(|| "1".to_string());
            let names: Vec<_> = mpi_families(&vars).into_iter().map(MpiFamily::name).collect();
            assert_eq!(names.join(" "), expected, "{set}");
        };
        check("", "");
        check("SLURM_JOB_ID SLURM_STEP_ID", "");
        check("OMPI_COMM_WORLD_SIZE PMIX_RANK", "OpenMPI");
        check("PMI_RANK PMI_SIZE", "MPICH");
        check("PMIX_RANK SLURM_JOB_ID", "OpenMPI MPICH");
        check("PMI_RANK SLURM_JOB_ID", "MPICH OpenMPI");
    }
}
