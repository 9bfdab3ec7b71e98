//! Clusters: from a file, from a calibration, or from a quick look at this machine.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use polyreme_exec::Isa;
use polyreme_sim::{BetweenSpec, Calibration, Cluster, Described, HostSpec, HostSpeed, InsideBy};
use polyreme_train::run::Scope;

use crate::bench::predict;
use crate::doctor::{self, DoctorReport};
use crate::{memory, process};

/// The file that `bench calibrate` writes if it is not told another one.
const CALIBRATION: &str = "calibration.json";
/// What connects hosts if nothing says so: ten gigabits in a data centre.
const BETWEEN: (f64, f64) = (30.0, 10.0);

/// A cluster, and where its numbers come from.
pub struct KnownCluster {
    /// The cluster.
    pub cluster: Cluster,
    /// In words.
    pub source: String,
}

/// Reads a description of a cluster.
pub fn from_file(path: &Path) -> Result<KnownCluster, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let cluster = Cluster::parse(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(KnownCluster { cluster, source: path.display().to_string() })
}

/// Hosts like this machine: by a calibration, by the one in the working folder if it is of this machine, or by probes.
///
/// `cores` is how many a host has, which a process that is pinned cannot see, and `by` is how ranks of one host reach each other.
pub fn this_machine(
    calibration: Option<&Path>,
    hosts: usize,
    cores: usize,
    by: InsideBy,
    isa: Isa,
) -> Result<KnownCluster, String> {
    let between = BetweenSpec::new(BETWEEN.0, BETWEEN.1);
    let links = match hosts {
        1 => String::new(),
        _ => format!(", links of {} Gbit/s", BETWEEN.1),
    };
    let known = |path: &Path, calibration: &Arc<Calibration>| {
        let mut cluster = Cluster::measured(calibration, hosts, by, between);
        for host in &mut cluster.hosts {
            host.memory_bytes = host.memory_bytes.min(memory_bytes());
            host.process_bytes = process_limit();
        }
        KnownCluster { cluster, source: format!("{}{links}", path.display()) }
    };
    if let Some(path) = calibration {
        return predict::read(path).map(|calibration| known(path, &calibration));
    }
    let at_hand = Path::new(CALIBRATION);
    let of_this = |c: &Arc<Calibration>| c.machine.name == process::cpu_name() && c.machine.cores == cores;
    if let Some(calibration) = predict::read(at_hand).ok().filter(of_this) {
        return Ok(known(at_hand, &calibration));
    }
    let host = described(&doctor::examine(isa), cores);
    let source = format!("a quick look at this machine (better: `polyreme bench calibrate`){links}");
    let mut cluster = Cluster::of(hosts, &host, between);
    cluster.inside.by = by;
    Ok(KnownCluster { cluster, source })
}

/// A machine by what `doctor` measured. Its cores are taken not to slow each other down.
fn described(report: &DoctorReport, cores: usize) -> HostSpec {
    let half = report.tile_peak_gflops.or(report.pair_peak_gflops).unwrap_or(report.fma_peak_gflops);
    let core_bytes_per_us = report.copy_bandwidth_gbs * 1e3;
    let speed = Described {
        flops_per_us: report.fma_peak_gflops * 1e3,
        half_flops_per_us: half * 1e3,
        core_bytes_per_us,
        host_bytes_per_us: core_bytes_per_us * cores as f64,
        ..Described::default()
    };
    HostSpec {
        cores,
        memory_bytes: memory_bytes(),
        process_bytes: process_limit(),
        speed: HostSpeed::Described(speed),
        slowness: 1.0,
        price: None,
    }
}

/// What ranks of this machine may take together.
fn memory_bytes() -> f64 {
    let limits = memory::limits();
    let of_all = limits.iter().filter(|limit| matches!(limit.scope, Scope::Host | Scope::Group));
    of_all.map(|limit| limit.bytes as f64).fold(process::memory_bytes() as f64, f64::min)
}

/// What one process may take beyond what this one has: ulimits.
fn process_limit() -> f64 {
    let limits = memory::limits();
    let of_one = limits.iter().filter(|limit| matches!(limit.scope, Scope::Mapped | Scope::Private));
    of_one.map(|limit| limit.bytes as f64).fold(f64::INFINITY, f64::min)
}

/// The cluster with another number of hosts: the first ones, or all of them again and again.
pub fn with_hosts(cluster: &Cluster, hosts: usize) -> Cluster {
    let hosts = cluster.hosts.iter().cycle().take(hosts.max(1)).cloned().collect();
    Cluster { hosts, ..cluster.clone() }
}
