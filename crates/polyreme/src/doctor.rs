//! `polyreme doctor`: this machine and its limits.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use polyreme_kernels::gemm::pairs::{PairOrder, amx_state};
use polyreme_kernels::{Cx, Feature, Isa, probe};
use polyreme_net::{Segment, seal};
use serde::Serialize;

use crate::cluster::cores::{self, Machine};
use crate::cluster::interfaces::interfaces;
use crate::cluster::mpi;
use crate::process;

/// How long `mpirun --version` may take.
const VERSION_TIME: Duration = Duration::from_secs(5);

/// What was found and measured.
#[derive(Clone, Debug, Serialize)]
pub struct DoctorReport {
    /// The CPU's name.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// The cores of each NUMA node that this process may use, as `0-3,8`.
    pub numa_nodes: Vec<String>,
    /// The CPU quota of this process in cores, if that is less than the cores it may run on.
    pub quota: Option<usize>,
    /// The instruction set that most kernels use.
    pub simd: String,
    /// Everything that kernels may use, as POLYREME_ISA names it.
    pub features: Vec<&'static str>,
    /// Memory of the machine.
    pub memory_gib: f64,
    /// Multiply-adds of one core, times two.
    pub fma_peak_gflops: f64,
    /// The same for products of bf16 by AVX512-BF16, if the CPU has it.
    pub pair_peak_gflops: Option<f64>,
    /// The same for products of bf16 by AMX's tiles, loads included, if they can be used.
    pub tile_peak_gflops: Option<f64>,
    /// Whether AMX is used, and why not.
    pub amx: String,
    /// `a += b` on one core.
    pub add_bandwidth_gbs: f64,
    /// A copy on one core.
    pub copy_bandwidth_gbs: f64,
    /// Encrypting a segment on one core, including the copy.
    pub seal_gbs: f64,
    /// Decrypting and checking it on one core.
    pub open_gbs: f64,
    /// This host's addresses, as `eth0 10.1.2.3/16`.
    pub interfaces: Vec<String>,
    /// What `mpirun --version` says; `None` if there is none.
    pub mpi: Option<String>,
    /// The MPI libraries that ranks would load, by the launcher that starts them.
    pub mpi_libraries: Vec<String>,
    /// Whether processes of this host can share memory; otherwise why not.
    pub shared_memory: Result<(), String>,
}

/// Examines and measures the machine with these instructions, for about a second.
pub fn examine(isa: Isa) -> DoctorReport {
    let cx = Cx { isa, ..Cx::serial() };
    // Larger than any last-level cache that two cores share.
    let (mut target, source) = (vec![1.0; 16 << 20], vec![1.0; 16 << 20]);
    let machine = Machine::read();
    // Without random numbers nothing can be sealed, and the speed is 0.
    let (seal_gbs, open_gbs) = seal::speed().map_or((0.0, 0.0), |s| (s.seal_gbs, s.open_gbs));
    DoctorReport {
        cpu: process::cpu_name(),
        cores: machine.cores(),
        numa_nodes: machine.nodes.iter().map(|node| cores::list(node)).collect(),
        quota: machine.quota,
        simd: isa.name().into(),
        features: isa.features().map(Feature::name).collect(),
        memory_gib: process::memory_bytes() as f64 / (1u64 << 30) as f64,
        fma_peak_gflops: probe::fma_peak_gflops(&cx),
        pair_peak_gflops: probe::pair_peak_gflops(&cx, PairOrder::Pairs),
        tile_peak_gflops: probe::pair_peak_gflops(&cx, PairOrder::Tiles),
        amx: amx_state().to_string(),
        add_bandwidth_gbs: probe::add_bandwidth_gbs(&mut target, &source),
        copy_bandwidth_gbs: probe::copy_bandwidth_gbs(&mut target, &source),
        seal_gbs,
        open_gbs,
        interfaces: interfaces().iter().map(ToString::to_string).collect(),
        mpi: mpi_version(),
        mpi_libraries: mpi::installed(),
        shared_memory: share_memory(),
    }
}

/// The version in the output of `mpirun --version`: the first line, and the next one where the first only has the name,
/// as MPICH's.
fn mpi_version() -> Option<String> {
    let mut asked = Command::new("mpirun");
    asked.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = asked.spawn().ok()?;
    let until = Instant::now() + VERSION_TIME;
    while child.try_wait().ok()?.is_none() {
        if Instant::now() > until {
            drop(child.kill());
            drop(child.wait());
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let said = child.wait_with_output().ok().filter(|out| out.status.success())?;
    let text = String::from_utf8_lossy(&said.stdout);
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let first = lines.next()?;
    match first.ends_with(':') {
        true => Some(format!("{first} {}", lines.next().unwrap_or_default())),
        false => Some(first),
    }
}

/// Creates shared memory as ranks of one host do, and opens it as another process would.
fn share_memory() -> Result<(), String> {
    let bytes = 1 << 16;
    let made = Segment::create(bytes, bytes).map_err(|e| e.to_string())?;
    let path = made.path().ok_or("the memory has no path")?;
    Segment::open(&path, bytes, bytes).map(drop).map_err(|e| e.to_string())
}

impl std::fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        writeln!(f, "cpu          {}", self.cpu)?;
        writeln!(f, "cores        {}", self.cores)?;
        for (i, node) in self.numa_nodes.iter().enumerate() {
            writeln!(f, "{:<12} node {i}: {node}", if i == 0 { "numa" } else { "" })?;
        }
        if let Some(quota) = self.quota {
            writeln!(f, "quota        CPU time of {quota} cores; ranks are not pinned")?;
        }
        writeln!(f, "simd         {}", self.simd)?;
        let features = if self.features.is_empty() { "none".into() } else { self.features.join(" ") };
        writeln!(f, "features     {features}")?;
        writeln!(f, "memory       {:.1} GiB", self.memory_gib)?;
        writeln!(f, "peak         {:.1} GFLOP/s per core, multiply-adds in f32", self.fma_peak_gflops)?;
        if let Some(peak) = self.pair_peak_gflops {
            writeln!(f, "             {peak:.1} GFLOP/s per core, products of bf16 in pairs")?;
        }
        match self.tile_peak_gflops {
            Some(peak) => {
                writeln!(f, "             {peak:.1} GFLOP/s per core, products of bf16 in tiles (AMX)")?
            }
            None => writeln!(f, "             {}", self.amx)?,
        }
        writeln!(f, "bandwidth    {:.1} GB/s per core for a += b", self.add_bandwidth_gbs)?;
        writeln!(f, "             {:.1} GB/s per core for a copy", self.copy_bandwidth_gbs)?;
        writeln!(
            f,
            "encryption   {:.1} GB/s per core to seal, {:.1} GB/s to open",
            self.seal_gbs, self.open_gbs
        )?;
        for (i, interface) in self.interfaces.iter().enumerate() {
            writeln!(f, "{:<12} {interface}", if i == 0 { "interfaces" } else { "" })?;
        }
        writeln!(f, "mpi          {}", self.mpi.as_deref().unwrap_or("no mpirun found"))?;
        for library in &self.mpi_libraries {
            writeln!(f, "             {library}")?;
        }
        match &self.shared_memory {
            Ok(()) => write!(f, "shm          processes of this host can share memory"),
            Err(why) => write!(f, "shm          not available: {why}; use --transport tcp"),
        }
    }
}
