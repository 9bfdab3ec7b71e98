//! How long each node of a body takes: for costs that are measured instead of counted.

use std::time::Instant;

use polyreme_graph::{Graph, Precision, Program};
use polyreme_parallel::stage::measured;

use crate::engine::{Engine, Options};
use crate::error::ExecError;
use crate::timeline::Timeline;

/// The median seconds of each node of a program's first body, over some runs after a first one. The program is one of a lone
/// rank that updates nothing, its inputs are zeros, and everything is freed again. `None` if it would take more than
/// `bytes_max`.
///
/// With sequences of the same id an embedding is faster than it will be; nothing else depends on what is fed.
pub fn node_seconds(
    program: Program,
    options: Options,
    runs: usize,
    bytes_max: usize,
) -> Result<Option<Vec<f64>>, ExecError> {
    if Engine::footprint(&program, options.threads, options.isa).total() > bytes_max {
        return Ok(None);
    }
    let n = program.graph().nodes.len();
    let mut engine = Engine::new(program, options)?;
    let mut times = vec![Vec::with_capacity(runs); n];
    for run in 0..=runs {
        engine.set_timeline((run > 0).then(|| Timeline::new(Instant::now(), usize::MAX)));
        engine.run()?;
        for moment in engine.timeline().map_or(&[][..], Timeline::moments) {
            if let Some(node) = moment.label.node {
                times[node].push(moment.us / 1e6);
            }
        }
    }
    Ok(Some(times.iter_mut().map(|times| median(times)).collect()))
}

/// The seconds of each node of a differentiated graph that was not rewritten, in this precision: what the nodes of its body take.
/// As [`node_seconds`].
pub fn step_seconds(
    step: &Graph,
    precision: &Precision,
    options: Options,
    runs: usize,
    bytes_max: usize,
) -> Result<Option<Vec<f64>>, ExecError> {
    let program = precision.gradients(step);
    let body = program.bodies[0].clone();
    let seconds = node_seconds(program, options, runs, bytes_max)?;
    Ok(seconds.map(|seconds| measured(step, &body.graph, &seconds)))
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}
