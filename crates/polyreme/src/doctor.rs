//! `polyreme doctor`: what this machine is, and what it can do at most.

use polyreme_kernels::{Cx, Isa, probe};
use serde::Serialize;

use crate::process;

/// What was found and measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The CPU's name.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// The instruction set that kernels use.
    pub simd: String,
    /// Memory of the machine.
    pub memory_gib: f64,
    /// Multiply-adds of one core, times two.
    pub fma_peak_gflops: f64,
    /// `a += b` on one core.
    pub add_bandwidth_gbs: f64,
    /// A copy on one core.
    pub copy_bandwidth_gbs: f64,
}

/// Looks and measures, for about a second.
pub fn examine() -> Report {
    let cx = Cx::serial();
    // Larger than any last-level cache that two cores share.
    let (mut target, source) = (vec![1.0; 16 << 20], vec![1.0; 16 << 20]);
    Report {
        cpu: process::cpu_name(),
        cores: process::cores(),
        simd: Isa::detect().name().into(),
        memory_gib: process::memory_bytes() as f64 / (1u64 << 30) as f64,
        fma_peak_gflops: probe::fma_peak_gflops(&cx),
        add_bandwidth_gbs: probe::add_bandwidth_gbs(&mut target, &source),
        copy_bandwidth_gbs: probe::copy_bandwidth_gbs(&mut target, &source),
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        writeln!(f, "cpu          {}", self.cpu)?;
        writeln!(f, "cores        {}", self.cores)?;
        writeln!(f, "simd         {}", self.simd)?;
        writeln!(f, "memory       {:.1} GiB", self.memory_gib)?;
        writeln!(f, "peak         {:.1} GFLOP/s a core, multiply-adds in f32", self.fma_peak_gflops)?;
        writeln!(f, "bandwidth    {:.1} GB/s a core for a += b", self.add_bandwidth_gbs)?;
        write!(f, "             {:.1} GB/s a core for a copy", self.copy_bandwidth_gbs)
    }
}
