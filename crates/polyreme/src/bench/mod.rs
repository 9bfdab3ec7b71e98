//! `polyreme bench`: how fast steps and kernels are, compared with what the machine can do.

pub mod calibrate;
pub mod collective;
pub mod cuts;
pub mod jobs;
pub mod kernels;
pub mod load;
pub mod predict;
pub mod ranks;
pub mod step;

use std::time::{Duration, Instant};

/// The least time of warm-up: an idle core needs this long to reach its clock rate (steps of `mlp` are 4 % slower
/// before).
const WARM_UP: Duration = Duration::from_millis(300);

/// The median of `n` timed calls, in seconds, after at least `warm_up` untimed calls.
pub(crate) fn median_seconds<E>(
    warm_up: usize,
    n: usize,
    mut call: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let began = Instant::now();
    let mut calls = 0;
    while calls < warm_up || began.elapsed() < WARM_UP {
        call()?;
        calls += 1;
    }
    let mut times = Vec::with_capacity(n);
    for _ in 0..n.max(1) {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
