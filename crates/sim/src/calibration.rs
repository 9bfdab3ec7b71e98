//! What was measured on a machine: how long kinds of work take, by shape, and what its ranks' exchanges cost each other.
//!
//! A calibration sees no job. It has a table for each kind of work, element size and number of threads: times at the points of a
//! grid of sizes. A time in between is interpolated: what is interpolated is the time per multiply-add or per byte, in the
//! logarithms of the sizes, as kernels get better step by step while shapes double. Outside of a grid the rate at its edge counts,
//! and no op is faster than the fastest that was measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cluster::BetweenSpec;
use crate::coding::MeasuredCodec;
use crate::speed::Took;
use crate::work::{Work, WorkKind};

/// The number of the format; it changes when files of before cannot be read any more.
pub const FORMAT: u32 = 1;

/// A calibration, as it is stored.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CalibrationFile {
    /// The number of the format.
    pub format: u32,
    /// Which machine it is of.
    pub machine: MachineFacts,
    /// Times of work.
    pub tables: Vec<TimeTable>,
    /// Times of exchanges.
    pub links: LinkTimes,
}

/// Which machine was measured, and when.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MachineFacts {
    /// The model of its processor.
    pub name: String,
    /// The instructions that kernels used.
    pub isa: String,
    /// How many cores.
    pub cores: usize,
    /// How much memory.
    pub memory_bytes: f64,
    /// The day, as `2026-11-18`.
    pub date: String,
}

/// Times of one kind of work at some shapes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TimeTable {
    /// The kind.
    pub kind: WorkKind,
    /// Whether operands are stored in half.
    pub half: bool,
    /// Threads of the rank.
    pub threads: usize,
    /// Whether ranks on the other cores did the same at the same time.
    pub crowded: bool,
    /// The shapes: all combinations of some sizes.
    pub points: Vec<TimePoint>,
}

/// A shape and its time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct TimePoint {
    /// The sizes that the kind has; the others are 1.
    pub sizes: [f64; 3],
    /// Multiply-adds times two, or bytes.
    pub amount: f64,
    /// The time.
    pub us: f64,
}

/// Times of exchanges.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LinkTimes {
    /// How long ranks that share memory take to meet.
    pub meet_us: f64,
    /// All-reduces between two threads of one process: bytes and time.
    pub shared: Vec<(f64, f64)>,
    /// What messages between two processes cost over the loopback interface.
    pub loopback: BetweenSpec,
    /// All-reduces between two ranks over it: bytes and time.
    pub over_loopback: Vec<(f64, f64)>,
    /// How long two ranks that compute the same for a millisecond and then meet wait for each other, as a share of it. No two cores are
    /// equally fast at every moment.
    #[serde(default)]
    pub unevenness: f64,
    /// How long a core takes for each codec of `parallel.wire`.
    #[serde(default)]
    pub codecs: Vec<MeasuredCodec>,
}

impl LinkTimes {
    /// How long so many ranks wait for the slowest, after they have computed for so long: a sum of many small differences grows as
    /// the square root of their number.
    pub(crate) fn uneven_us(&self, ranks: usize, computed_us: f64) -> f64 {
        let ms = computed_us.max(0.0) / 1e3;
        let times = if ms > 1.0 { ms.sqrt() } else { ms };
        self.unevenness * 1e3 * times * (ranks.max(1) as f64).log2()
    }
}

/// Why a calibration is refused.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum CalibrationError {
    /// It is not what `bench calibrate` writes.
    #[error(
        "the calibration cannot be read: {0}; make another one with `polyreme bench calibrate --output FILE`"
    )]
    Syntax(String),
    /// It was written by another version.
    #[error(
        "the calibration has format {0}, and this program reads {FORMAT}; make another one with `polyreme bench calibrate --output FILE`"
    )]
    Format(u32),
    /// Something was not measured, or gave a time that makes no sense.
    #[error(
        "the calibration has no usable times of {0}; make another one with `polyreme bench calibrate --output FILE`"
    )]
    Missing(String),
}

/// A calibration that is ready to be asked.
#[derive(Clone, PartialEq, Debug)]
pub struct Calibration {
    /// Which machine it is of.
    pub machine: MachineFacts,
    /// Times of exchanges.
    pub links: LinkTimes,
    grids: BTreeMap<(WorkKind, bool, bool), Vec<(usize, TimeGrid)>>,
}

impl Calibration {
    /// Reads what `bench calibrate` wrote.
    pub fn parse(text: &str) -> Result<Calibration, CalibrationError> {
        #[derive(Deserialize)]
        struct FormatHead {
            format: u32,
        }
        let failed = |e: serde_json::Error| CalibrationError::Syntax(e.to_string());
        let head: FormatHead = serde_json::from_str(text).map_err(failed)?;
        if head.format != FORMAT {
            return Err(CalibrationError::Format(head.format));
        }
        Calibration::new(serde_json::from_str(text).map_err(failed)?)
    }

    /// Checks a calibration: every kind of work has times, for one thread at least.
    pub fn new(file: CalibrationFile) -> Result<Calibration, CalibrationError> {
        let mut grids: BTreeMap<_, Vec<(usize, TimeGrid)>> = BTreeMap::new();
        for table in &file.tables {
            let what = || format!("{:?} with {} threads", table.kind, table.threads);
            let grid = TimeGrid::new(&table.points).ok_or_else(|| CalibrationError::Missing(what()))?;
            let of_kind = grids.entry((table.kind, table.half, table.crowded)).or_default();
            of_kind.push((table.threads.max(1), grid));
            of_kind.sort_by_key(|(threads, _)| *threads);
        }
        for kind in WorkKind::ALL {
            if !grids.contains_key(&(kind, false, false)) {
                return Err(CalibrationError::Missing(format!("{kind:?}")));
            }
        }
        let usable = |points: &[(f64, f64)]| {
            !points.is_empty() && points.iter().all(|(bytes, us)| *bytes > 0.0 && *us > 0.0)
        };
        if !usable(&file.links.shared) || !usable(&file.links.over_loopback) {
            return Err(CalibrationError::Missing("exchanges".into()));
        }
        let sensible = |us: f64| us.is_finite() && us >= 0.0;
        let bad =
            |known: &&MeasuredCodec| !sensible(known.times.encode_us) || !sensible(known.times.decode_us);
        if let Some(known) = file.links.codecs.iter().find(bad) {
            return Err(CalibrationError::Missing(format!("codec {}", known.name)));
        }
        Ok(Calibration { machine: file.machine, links: file.links, grids })
    }

    /// The time of some work with this number of threads.
    pub(crate) fn took(&self, work: &Work, threads: usize) -> Took {
        let alone_us = self.us(work, threads, false).unwrap_or(0.0);
        let crowded_us = self.us(work, threads, true).unwrap_or(alone_us);
        // With all cores of the host there is nobody else.
        let lone = threads >= self.machine.cores;
        Took { alone_us, crowded_us: if lone { alone_us } else { crowded_us.max(alone_us) } }
    }

    /// What one core copies, in bytes read and written per microsecond, of long ranges.
    pub fn copy_bytes_per_us(&self) -> f64 {
        let work = Work::pass(WorkKind::Copy, f64::from(64 << 20));
        self.us(&work, 1, false).map_or(f64::INFINITY, |us| work.bytes / us)
    }

    fn us(&self, work: &Work, threads: usize, crowded: bool) -> Option<f64> {
        let of = |half| self.grids.get(&(work.kind, half, crowded));
        let grids = of(work.half).or_else(|| of(false))?;
        let at = grids.partition_point(|(n, _)| *n < threads);
        let (below, above) = (&grids[at.saturating_sub(1)], &grids[at.min(grids.len() - 1)]);
        let (low, high) = (below.1.us(work), above.1.us(work));
        if below.0 >= above.0 || threads <= below.0 {
            return Some(low);
        }
        if threads >= above.0 {
            return Some(high);
        }
        let t = (threads as f64 / below.0 as f64).ln() / (above.0 as f64 / below.0 as f64).ln();
        Some((low.ln() * (1.0 - t) + high.ln() * t).exp())
    }
}

/// Points of a grid, with the logarithms of rates.
#[derive(Clone, PartialEq, Debug)]
struct TimeGrid {
    /// By axis: the logarithms of its sizes, ascending.
    axes: [Vec<f64>; 3],
    /// The logarithm of microseconds per amount, by the first size, the second, the third.
    rates: Vec<f64>,
    /// The shortest time that was measured.
    least_us: f64,
}

impl TimeGrid {
    /// `None` if points are missing, or are no times.
    fn new(points: &[TimePoint]) -> Option<TimeGrid> {
        let sensible = |p: &TimePoint| {
            let all = p.sizes.iter().chain([&p.amount, &p.us]);
            all.into_iter().all(|x| x.is_finite() && *x > 0.0)
        };
        if points.is_empty() || !points.iter().all(sensible) {
            return None;
        }
        let axis = |k: usize| {
            let mut sizes: Vec<f64> = points.iter().map(|p| p.sizes[k]).collect();
            sizes.sort_by(f64::total_cmp);
            sizes.dedup();
            sizes
        };
        let axes = [axis(0), axis(1), axis(2)];
        let mut rates = Vec::new();
        for &a in &axes[0] {
            for &b in &axes[1] {
                for &c in &axes[2] {
                    let point = points.iter().find(|p| p.sizes == [a, b, c])?;
                    rates.push((point.us / point.amount).ln());
                }
            }
        }
        let least_us = points.iter().map(|p| p.us).fold(f64::INFINITY, f64::min);
        Some(TimeGrid { axes: axes.map(|sizes| sizes.into_iter().map(f64::ln).collect()), rates, least_us })
    }

    fn us(&self, work: &Work) -> f64 {
        let cells: [(usize, f64); 3] =
            std::array::from_fn(|k| cell(&self.axes[k], work.sizes[k].max(1.0).ln()));
        let [_, n_b, n_c] = [0, 1, 2].map(|k| self.axes[k].len());
        let mut rate = 0.0;
        for corner in 0..8usize {
            let mut weight = 1.0;
            let at: [usize; 3] = std::array::from_fn(|k| {
                let (index, t) = cells[k];
                let upper = corner >> k & 1 == 1;
                weight *= if upper { t } else { 1.0 - t };
                (index + usize::from(upper)).min(self.axes[k].len() - 1)
            });
            if weight > 0.0 {
                rate += weight * self.rates[(at[0] * n_b + at[1]) * n_c + at[2]];
            }
        }
        let least_us = if work.joined { 0.0 } else { self.least_us };
        (rate.exp() * work.amount()).max(least_us)
    }
}

/// Between which two sizes of an axis one lies, and how far; at its ends if it lies outside.
fn cell(axis: &[f64], at: f64) -> (usize, f64) {
    let above = axis.partition_point(|x| *x <= at);
    match (above.checked_sub(1), axis.get(above)) {
        (None, _) => (0, 0.0),
        (Some(below), None) => (below, 0.0),
        (Some(below), Some(next)) => (below, (at - axis[below]) / (next - axis[below])),
    }
}
