//! What an external launcher says about this process: its rank, the number of ranks, and where rank 0 is.
//!
//! A pure function of variables that the caller reads; nothing here touches the process's environment. Explicit
//! variables (`RANK`, `WORLD_SIZE`, as torchrun and Kubernetes operators set them) win over those that an allocation
//! sets. Incomplete variables are an error and never a guess: a rank that starts alone by mistake would train a model
//! by itself.

mod mpi;
mod nodes;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::secret::{Secret, SecretError};
pub use mpi::{MpiFamily, mpi_families};
pub use nodes::expand;

/// The variable with the job's secret.
pub const SECRET_VARIABLE: &str = "POLYREME_SECRET";
/// The first port for jobs of Slurm: above the well-known ports and below the ephemeral ones.
const SLURM_PORT_FIRST: u64 = 15_000;
const SLURM_PORTS: u64 = 15_000;

/// Who started this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Launcher {
    /// `RANK` and `WORLD_SIZE`: torchrun, Kubernetes, or by hand.
    Explicit,
    /// `mpirun` of OpenMPI.
    OpenMpi,
    /// `mpirun` of MPICH and its family, or another launcher that speaks PMI.
    Pmi,
    /// `srun`.
    Slurm,
}

/// The launcher's variables, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LauncherVars {
    /// Who set them.
    pub launcher: Launcher,
    /// This process's rank.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its number among the ranks of its host.
    pub local_rank: Option<usize>,
    /// Where rank 0 listens, `host:port`; none if the launcher does not say, and then ranks cannot meet over TCP.
    pub master: Option<String>,
    /// The job's secret, if the caller of the launcher set one.
    pub secret: Option<Secret>,
    /// The launcher's name for the job, if it has one: equal on all ranks, different for another start.
    pub job: Option<String>,
}

/// What is wrong with the variables.
#[derive(Debug, Error)]
pub enum EnvError {
    /// One variable is set without the other.
    #[error("{present} is set and {absent} is not: set both, or neither")]
    Half {
        /// The one that is set.
        present: &'static str,
        /// The one that is missing.
        absent: &'static str,
    },
    /// A value is not a number.
    #[error("{name} is {value:?} and should be a whole number")]
    Number {
        /// The variable.
        name: &'static str,
        /// What it says.
        value: String,
    },
    /// A rank beyond the size, or no ranks.
    #[error("{name} is {rank}, but ranks count from 0 and there are {size}")]
    Range {
        /// The variable with the rank.
        name: &'static str,
        /// What it says.
        rank: usize,
        /// How many there are.
        size: usize,
    },
    /// The script of a job that should start ranks, and not a rank.
    #[error(
        "this is the batch script of a Slurm job with {n_tasks} tasks, not one of the tasks: start polyreme with srun"
    )]
    Batch {
        /// How many tasks the job has.
        n_tasks: usize,
    },
    /// A list of hosts that cannot be read.
    #[error("{list:?} is not a list of hosts such as node[1-3,7]: {why}")]
    Nodes {
        /// The list.
        list: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The secret is malformed.
    #[error("{SECRET_VARIABLE}: {0}")]
    Secret(#[from] SecretError),
}

/// Reads variables through `vars`; `None` if they do not say that this process is one of several.
pub fn from_environment(vars: &dyn Fn(&str) -> Option<String>) -> Result<Option<LauncherVars>, EnvError> {
    let vars = Vars(vars);
    let found = match explicit(&vars)? {
        Some(found) => Some(found),
        None => match open_mpi(&vars)? {
            Some(found) => Some(found),
            None => pmi_or_slurm(&vars)?,
        },
    };
    let Some(mut found) = found else { return Ok(None) };
    if let Some(text) = vars.text(SECRET_VARIABLE) {
        found.secret = Some(Secret::from_text(&text)?);
    }
    Ok(Some(found))
}

fn explicit(vars: &Vars) -> Result<Option<LauncherVars>, EnvError> {
    let Some((rank, size)) = vars.rank_of("RANK", "WORLD_SIZE")? else { return Ok(None) };
    let master = vars.master()?;
    if master.is_none() && size > 1 {
        return Err(EnvError::Half { present: "WORLD_SIZE", absent: "MASTER_ADDR" });
    }
    let local_rank = vars.number("LOCAL_RANK")?;
    let job = vars.text("TORCHELASTIC_RUN_ID");
    Ok(Some(LauncherVars { launcher: Launcher::Explicit, rank, size, local_rank, master, secret: None, job }))
}

fn open_mpi(vars: &Vars) -> Result<Option<LauncherVars>, EnvError> {
    let Some((rank, size)) = vars.rank_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")? else {
        return Ok(None);
    };
    let local_rank = vars.number("OMPI_COMM_WORLD_LOCAL_RANK")?;
    let job = vars.text("PMIX_NAMESPACE").or_else(|| vars.text("OMPI_MCA_ess_base_jobid"));
    let master = vars.master()?;
    Ok(Some(LauncherVars { launcher: Launcher::OpenMpi, rank, size, local_rank, master, secret: None, job }))
}

/// Slurm's tasks may have variables of PMI too, and then Slurm's say more. But MPICH starts its ranks from tasks of
/// Slurm and they inherit its variables: if the two disagree, PMI's are right.
fn pmi_or_slurm(vars: &Vars) -> Result<Option<LauncherVars>, EnvError> {
    match pmi(vars)? {
        Some(pmi) => match slurm(vars) {
            Ok(Some(slurm)) if (slurm.rank, slurm.size) == (pmi.rank, pmi.size) => Ok(Some(slurm)),
            _ => Ok(Some(pmi)),
        },
        None => match (slurm(vars)?, vars.text("PMIX_RANK")) {
            (Some(slurm), _) => Ok(Some(slurm)),
            // PMIx gives the size only through its library, which MPI calls.
            (None, Some(_)) => Err(EnvError::Half { present: "PMIX_RANK", absent: "OMPI_COMM_WORLD_SIZE" }),
            (None, None) => Ok(None),
        },
    }
}

fn pmi(vars: &Vars) -> Result<Option<LauncherVars>, EnvError> {
    let Some((rank, size)) = vars.rank_of("PMI_RANK", "PMI_SIZE")? else { return Ok(None) };
    let local_rank = vars.number("MPI_LOCALRANKID")?;
    let job = vars.text("PMI_JOBID");
    let master = vars.master()?;
    Ok(Some(LauncherVars { launcher: Launcher::Pmi, rank, size, local_rank, master, secret: None, job }))
}

fn slurm(vars: &Vars) -> Result<Option<LauncherVars>, EnvError> {
    let step = vars.text("SLURM_STEP_ID").or_else(|| vars.text("SLURM_STEPID"));
    let Some(step) = step else {
        // A batch script has a task number although it is not a task.
        return match (vars.text("SLURM_PROCID"), vars.number("SLURM_NTASKS")?) {
            (Some(_), Some(n_tasks)) if n_tasks > 1 => Err(EnvError::Batch { n_tasks }),
            _ => Ok(None),
        };
    };
    let sizes = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
    let size_name = sizes.into_iter().find(|name| vars.text(name).is_some()).unwrap_or("SLURM_NTASKS");
    let Some((rank, size)) = vars.rank_of("SLURM_PROCID", size_name)? else { return Ok(None) };
    let local_rank = vars.number("SLURM_LOCALID")?;
    let id = vars.text("SLURM_JOB_ID").or_else(|| vars.text("SLURM_JOBID"));
    let mut master = vars.master()?;
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    if master.is_none()
        && let Some(list) = lists.into_iter().find_map(|name| vars.text(name))
    {
        let hosts = expand(&list)?;
        let first = hosts.first().ok_or(EnvError::Nodes { list, why: "it is empty" })?;
        master = Some(format!("{first}:{}", slurm_port(id.as_deref().unwrap_or_default(), &step)));
    }
    let job = id.map(|id| format!("slurm {id}.{step}"));
    Ok(Some(LauncherVars { launcher: Launcher::Slurm, rank, size, local_rank, master, secret: None, job }))
}

/// A port that all ranks of a step agree on, and that another job on the same host is unlikely to use.
fn slurm_port(job: &str, step: &str) -> u64 {
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    // Steps of one job on one host are far apart.
    let mixed = number(job).wrapping_add(number(step).wrapping_mul(7919));
    SLURM_PORT_FIRST + mixed % SLURM_PORTS
}

/// Variables, with the ways to read them.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// The value of a variable; `None` if it is empty.
    fn text(&self, name: &str) -> Option<String> {
        let text = (self.0)(name)?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn number(&self, name: &'static str) -> Result<Option<usize>, EnvError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        usize::from_str(&value).map(Some).map_err(|_| EnvError::Number { name, value })
    }

    /// A rank and a size: both or neither.
    fn rank_of(&self, rank: &'static str, size: &'static str) -> Result<Option<(usize, usize)>, EnvError> {
        match (self.number(rank)?, self.number(size)?) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(EnvError::Half { present: rank, absent: size }),
            (None, Some(_)) => Err(EnvError::Half { present: size, absent: rank }),
            (Some(n), Some(size)) if n >= size => Err(EnvError::Range { name: rank, rank: n, size }),
            (Some(n), Some(size)) => Ok(Some((n, size))),
        }
    }

    fn master(&self) -> Result<Option<String>, EnvError> {
        let port = self.number("MASTER_PORT")?;
        let (host, port) = match (self.text("MASTER_ADDR"), port) {
            (None, None) => return Ok(None),
            (Some(_), None) => return Err(EnvError::Half { present: "MASTER_ADDR", absent: "MASTER_PORT" }),
            (None, Some(_)) => return Err(EnvError::Half { present: "MASTER_PORT", absent: "MASTER_ADDR" }),
            (Some(host), Some(port)) => (host, port),
        };
        let Ok(port) = u16::try_from(port) else {
            return Err(EnvError::Number { name: "MASTER_PORT", value: port.to_string() });
        };
        let bare_v6 = host.contains(':') && !host.starts_with('[');
        Ok(Some(if bare_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") }))
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Launcher::Explicit => "RANK and WORLD_SIZE",
            Launcher::OpenMpi => "OpenMPI",
            Launcher::Pmi => "PMI",
            Launcher::Slurm => "Slurm",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &str) -> Result<Option<LauncherVars>, EnvError> {
        let pairs: Vec<(&str, &str)> =
            set.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        from_environment(&|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        })
    }

    /// What is set, and what it means: launcher, rank, size, local rank, master.
    #[test]
    fn launchers_are_recognised() {
        let check = |set: &str, expected: Option<&str>| {
            let found = read(set).unwrap_or_else(|e| panic!("{set}: {e}"));
            let said = found.map(|f| {
                let local = f.local_rank.map_or("-".into(), |rank| rank.to_string());
                let master = f.master.unwrap_or("-".into());
                format!("{}: {} of {}, local {local}, {master}", f.launcher, f.rank, f.size)
            });
            assert_eq!(said.as_deref(), expected, "{set}");
        };
        let torch = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=29500";
        let slurm = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=1234 SLURM_STEP_ID=0 \
                     SLURM_JOB_NODELIST=node[07-09],x";
        check("", None);
        check("MASTER_ADDR=left-over", None);
        check("RANK= WORLD_SIZE=", None);
        let said = "RANK and WORLD_SIZE: 1 of 4, local 1, a:29500";
        check(torch, Some(said));
        check(&format!("{torch} {slurm} PMI_RANK=3 PMI_SIZE=9 OMPI_COMM_WORLD_RANK=7"), Some(said));
        check("RANK=0 WORLD_SIZE=1", Some("RANK and WORLD_SIZE: 0 of 1, local -, -"));
        let v6 = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=fe80::1 MASTER_PORT=1";
        check(v6, Some("RANK and WORLD_SIZE: 0 of 2, local -, [fe80::1]:1"));
        let ompi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_RANK=2";
        check(ompi, Some("OpenMPI: 2 of 3, local 0, -"));
        check(&format!("{ompi} {slurm}"), Some("OpenMPI: 2 of 3, local 0, -"));
        check("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0", Some("PMI: 0 of 2, local 0, -"));
        check(slurm, Some("Slurm: 5 of 8, local 1, node07:16234"));
        check(
            &format!("{slurm} PMIX_RANK=5 PMI_RANK=5 PMI_SIZE=8"),
            Some("Slurm: 5 of 8, local 1, node07:16234"),
        );
        // MPICH within Slurm: from a step with one task per host, and from a batch script.
        check(&format!("{slurm} PMI_RANK=0 PMI_SIZE=2"), Some("PMI: 0 of 2, local -, -"));
        check("SLURM_PROCID=0 SLURM_NTASKS=4 PMI_RANK=1 PMI_SIZE=4", Some("PMI: 1 of 4, local -, -"));
        let step = "SLURM_STEP_NUM_TASKS=6 SLURM_STEP_NODELIST=node09";
        check(&format!("{slurm} {step}"), Some("Slurm: 5 of 6, local 1, node09:16234"));
        check(&format!("{slurm} MASTER_ADDR=b MASTER_PORT=7"), Some("Slurm: 5 of 8, local 1, b:7"));
        // A batch script of one task, and an allocation without tasks.
        check("SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_NTASKS=1", None);
        check("SLURM_JOB_ID=5 SLURM_JOB_NODELIST=a", None);
    }

    #[test]
    fn half_set_variables_are_errors() {
        let check = |set: &str, says: &str| {
            let e = read(set).expect_err(set).to_string();
            assert!(e.contains(says), "{set}: {e}");
        };
        check("RANK=1", "RANK is set and WORLD_SIZE is not");
        check("WORLD_SIZE=1", "WORLD_SIZE is set and RANK is not");
        check("RANK=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0", "RANK is set and WORLD_SIZE is not");
        check("RANK=0 WORLD_SIZE=2", "WORLD_SIZE is set and MASTER_ADDR is not");
        check("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_ADDR is set and MASTER_PORT is not");
        check("RANK=0 WORLD_SIZE=2 MASTER_PORT=1", "MASTER_PORT is set and MASTER_ADDR is not");
        check("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT is \"65536\"");
        check("RANK=x WORLD_SIZE=2", "RANK is \"x\" and should be a whole number");
        check("RANK=-1 WORLD_SIZE=2", "RANK is \"-1\" and should be a whole number");
        check("RANK=2 WORLD_SIZE=2", "RANK is 2, but ranks count from 0 and there are 2");
        check("OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not");
        check("PMI_SIZE=2", "PMI_SIZE is set and PMI_RANK is not");
        check("PMIX_RANK=2", "PMIX_RANK is set and OMPI_COMM_WORLD_SIZE is not");
        check("SLURM_PROCID=2 SLURM_STEP_ID=0", "SLURM_PROCID is set and SLURM_NTASKS is not");
        check("SLURM_PROCID=0 SLURM_NTASKS=4", "start polyreme with srun");
        let nodes = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=a[1";
        check(nodes, "\"a[1\" is not a list of hosts");
        let words = "RANK=0 WORLD_SIZE=1 POLYREME_SECRET=correct-horse-battery";
        check(words, "POLYREME_SECRET: a job secret is 64 hexadecimal digits and this one is not");
    }

    #[test]
    fn a_secret_comes_along() {
        let digits = "00ff".repeat(16);
        let found = read(&format!("RANK=0 WORLD_SIZE=1 POLYREME_SECRET={digits}")).unwrap().unwrap();
        assert_eq!(found.secret, Some(Secret::from_text(&digits).unwrap()));
    }
}
