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

use polyreme_collective::Comm;

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

/// What each rank of a group gives, every one on a thread of its own, in their order; the error of the first that has one.
pub fn on_ranks<T: Send, E: Send>(
    comms: Vec<Comm>,
    of_rank: impl Fn(Comm) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let of_rank = &of_rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || of_rank(comm))).collect();
        let join = |rank: std::thread::ScopedJoinHandle<Result<T, E>>| {
            rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        ranks.into_iter().map(join).collect()
    })
}
