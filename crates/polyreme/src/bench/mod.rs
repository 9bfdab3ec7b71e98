//! `polyreme bench`: how fast steps and kernels are, beside what the machine can do.

pub mod kernels;
pub mod step;

use std::time::Instant;

/// The median of `n` timed calls, in seconds, after `warm_up` calls that do not count.
pub(crate) fn median_seconds<E>(
    warm_up: usize,
    n: usize,
    mut call: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    for _ in 0..warm_up {
        call()?;
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
