//! How long work takes on a host: from tables that were measured there, or from a few numbers that describe it.
//!
//! Both give two times: of a rank that has the host to itself, and of one on a host whose other cores are all as busy. In
//! between, the clock of the simulation interpolates.

use std::sync::Arc;

use crate::calibration::Calibration;
use crate::work::{Work, WorkKind};

/// How fast a host computes.
#[derive(Clone, PartialEq, Debug)]
pub enum HostSpeed {
    /// By a few numbers.
    Described(Described),
    /// By tables.
    Measured(Arc<Calibration>),
}

/// How long some work takes, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Took {
    /// With the host to itself.
    pub alone_us: f64,
    /// While the other cores do the same.
    pub crowded_us: f64,
}

impl std::ops::AddAssign for Took {
    fn add_assign(&mut self, other: Took) {
        self.alone_us += other.alone_us;
        self.crowded_us += other.crowded_us;
    }
}

impl HostSpeed {
    /// The time of some work with this number of threads, on a host with this number of cores.
    pub fn took(&self, work: &Work, threads: usize, cores: usize) -> Took {
        if work.amount() <= 0.0 {
            return Took::default();
        }
        match self {
            HostSpeed::Described(speed) => speed.took(work, threads, cores),
            HostSpeed::Measured(calibration) => calibration.took(work, threads),
        }
    }
}

/// A host by a few numbers: a roof of multiply-adds and one of bytes, of which each kind of work reaches a share.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Described {
    /// Multiply-adds times two of one core per microsecond, in f32.
    pub flops_per_us: f64,
    /// The same of operands that are stored in half.
    pub half_flops_per_us: f64,
    /// What one core reads and writes of memory per microsecond.
    pub core_bytes_per_us: f64,
    /// What all cores together do.
    pub host_bytes_per_us: f64,
    /// What a core keeps in its own caches.
    pub cache_bytes: f64,
    /// What every op takes at least.
    pub op_us: f64,
    /// What it takes to have several threads work on one op.
    pub fork_us: f64,
}

impl Default for Described {
    /// A core of a server of today.
    fn default() -> Described {
        Described {
            flops_per_us: 60e3,
            half_flops_per_us: 60e3,
            core_bytes_per_us: 12e3,
            host_bytes_per_us: 150e3,
            cache_bytes: f64::from(1 << 20),
            op_us: 0.3,
            fork_us: 2.0,
        }
    }
}

impl Described {
    /// A host on which nothing takes time.
    pub fn free() -> Described {
        Described {
            flops_per_us: f64::INFINITY,
            half_flops_per_us: f64::INFINITY,
            core_bytes_per_us: f64::INFINITY,
            host_bytes_per_us: f64::INFINITY,
            cache_bytes: 0.0,
            op_us: 0.0,
            fork_us: 0.0,
        }
    }

    fn took(&self, work: &Work, threads: usize, cores: usize) -> Took {
        let threads = threads.max(1) as f64;
        let share = share(work.kind);
        let peak = if work.half { self.half_flops_per_us } else { self.flops_per_us };
        let computing = work.flops / (peak * share.flops * threads);
        // What fits into the caches of the threads is read there from the second op on.
        let cached = work.bytes <= self.cache_bytes * threads;
        let at_least = match work.joined {
            true => 0.0,
            false => self.op_us + if threads > 1.0 { self.fork_us } else { 0.0 },
        };
        let us = |bytes_per_us: f64| {
            let bytes_per_us = if cached { self.core_bytes_per_us * threads * CACHED } else { bytes_per_us };
            at_least + computing.max(work.bytes / (bytes_per_us * share.bytes))
        };
        let alone = (self.core_bytes_per_us * threads).min(self.host_bytes_per_us);
        let crowded = alone.min(self.host_bytes_per_us * threads / cores.max(1) as f64);
        Took { alone_us: us(alone), crowded_us: us(crowded).max(us(alone)) }
    }
}

/// How many times faster caches are than memory: assumed.
const CACHED: f64 = 4.0;

/// The shares of the two roofs that a kind of work reaches.
struct RoofShare {
    flops: f64,
    bytes: f64,
}

/// Assumed shares of the multiply-add peak and of the memory's bandwidth; none of them was measured. A convolution by 3x3 does
/// fewer multiplications than are counted.
fn share(kind: WorkKind) -> RoofShare {
    let (flops, bytes) = match kind {
        WorkKind::Product | WorkKind::ProductNt | WorkKind::ProductTn => (0.8, 0.8),
        WorkKind::Conv1 | WorkKind::Conv1GradInput | WorkKind::Conv1GradWeight => (0.7, 0.8),
        WorkKind::Conv3 | WorkKind::Conv3GradInput | WorkKind::Conv3GradWeight => (1.1, 0.8),
        WorkKind::ConvWide | WorkKind::ConvWideGradInput | WorkKind::ConvWideGradWeight => (0.6, 0.8),
        WorkKind::ConvGrouped | WorkKind::ConvGroupedGradInput | WorkKind::ConvGroupedGradWeight => {
            (0.15, 0.6)
        }
        WorkKind::Attention | WorkKind::AttentionGrad => (0.55, 0.8),
        WorkKind::Recurrent | WorkKind::RecurrentGrad => (0.4, 0.8),
        // Assumed: an exponential takes as long as ten multiply-adds.
        WorkKind::Functions => (0.05, 1.0),
        WorkKind::Elementwise | WorkKind::Copy | WorkKind::Add => (1.0, 0.8),
        WorkKind::Norm | WorkKind::NormGrad | WorkKind::BatchNorm | WorkKind::BatchNormGrad => (1.0, 0.6),
        WorkKind::Softmax | WorkKind::SoftmaxGrad | WorkKind::Reduce => (1.0, 0.5),
        WorkKind::CrossEntropy | WorkKind::CrossEntropyGrad => (1.0, 0.5),
        WorkKind::Pool
        | WorkKind::PoolGrad
        | WorkKind::Lookup
        | WorkKind::LookupGrad
        | WorkKind::Rearrange => (1.0, 0.4),
        WorkKind::Dropout => (1.0, 0.3),
        WorkKind::UpdateSgd | WorkKind::UpdateAdam | WorkKind::UpdateLion => (1.0, 0.8),
        WorkKind::UpdateWhole => (1.0, 0.4),
    };
    RoofShare { flops, bytes }
}
