//! Flags that say which machines something is simulated on.

use std::path::PathBuf;

use clap::Args;
use polyreme_sim::InsideBy;

use super::Failure;
use crate::app::App;
use crate::plan::machine::{KnownCluster, from_file, this_machine, with_hosts};
use crate::process;

/// The machines: those of a file, or some like this one.
#[derive(Args)]
pub(super) struct MachineArgs {
    /// A file that describes the cluster [default: this machine].
    #[arg(long, value_name = "CLUSTER.toml", conflicts_with = "calibration")]
    cluster: Option<PathBuf>,
    /// What `polyreme bench calibrate` wrote about this machine [default: calibration.json in the working folder, if it
    /// is of this machine; otherwise a quick look at it].
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Hosts: so many of the cluster's, or machines like this one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8192))]
    hosts: Option<u16>,
}

impl MachineArgs {
    /// Whether one of the flags is given.
    pub(super) fn any(&self) -> bool {
        self.cluster.is_some() || self.calibration.is_some() || self.hosts.is_some()
    }

    /// The machines that the flags name.
    pub(super) fn known(&self, app: &App) -> Result<KnownCluster, Failure> {
        let hosts = self.hosts.map(usize::from);
        match &self.cluster {
            Some(file) => {
                let known = from_file(file).map_err(Failure::usage)?;
                let cluster = hosts.map_or(known.cluster.clone(), |n| with_hosts(&known.cluster, n));
                Ok(KnownCluster { cluster, ..known })
            }
            None => {
                let (hosts, cores, isa) = (hosts.unwrap_or(1), process::cores(), app.given().isa);
                this_machine(self.calibration.as_deref(), hosts, cores, InsideBy::Threads, isa)
                    .map_err(Failure::usage)
            }
        }
    }
}
