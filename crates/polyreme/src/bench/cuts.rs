//! Where `polyreme bench step --stage N` cuts the network.

use std::convert::Infallible;
use std::error::Error;
use std::str::FromStr;

use polyreme_collective::Comm;
use polyreme_exec::{Options, step_seconds};
use polyreme_graph::Graph;
use polyreme_parallel::stage::flops;
use polyreme_parallel::{CutRoom, Plan, choose};

use super::jobs::BenchJob;
use super::ranks::RankSettings;

/// Runs of the step from which costs are taken.
const RUNS: usize = 3;

/// How cuts are found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub enum CutsBy {
    /// From floating-point operations.
    #[default]
    Operations,
    /// From the time of each node, which rank 0 measures.
    Measured,
    /// By their names.
    Named(Vec<String>),
}

impl FromStr for CutsBy {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<CutsBy, Infallible> {
        Ok(match text {
            "operations" => CutsBy::Operations,
            "measured" => CutsBy::Measured,
            names => CutsBy::Named(names.split(',').map(|name| name.trim().to_string()).collect()),
        })
    }
}

/// The plan with its cuts and layouts, the same on all ranks.
pub(super) fn chosen(
    job: &BenchJob,
    comm: &mut Comm,
    plan: Plan,
    settings: &RankSettings,
) -> Result<Plan, Box<dyn Error + Send + Sync>> {
    let step = job.graph()?;
    let bytes = settings.budget_bytes.or(job.budget_bytes);
    let room = bytes.map(|bytes| CutRoom { bytes, training: &job.training });
    let plan = match &settings.cuts {
        CutsBy::Named(cuts) => Plan { cuts: cuts.clone(), ..plan },
        CutsBy::Measured if plan.mesh.stage > 1 => {
            let mut cuts = Vec::new();
            if comm.rank() == 0 {
                let costs = measured_costs(&step, &plan, settings, bytes)?;
                let cost = |i: usize| costs.as_ref().map_or_else(|| flops(&step)(i), |costs| costs[i]);
                cuts = choose(&step, &plan, &cost, room)?.cuts;
            }
            Plan { cuts: told(comm, &cuts)?, ..plan }
        }
        CutsBy::Operations | CutsBy::Measured => plan,
    };
    Ok(choose(&step, &plan, &flops(&step), room)?)
}

/// The time of each node of a step that this rank runs alone; `None` if there is no room for it.
fn measured_costs(
    step: &Graph,
    plan: &Plan,
    settings: &RankSettings,
    bytes: Option<usize>,
) -> Result<Option<Vec<f64>>, Box<dyn Error + Send + Sync>> {
    let options = Options { isa: settings.isa, ..Options::threads(settings.threads) };
    Ok(step_seconds(step, &plan.precision, options, RUNS, bytes.unwrap_or(usize::MAX))?)
}

/// What rank 0 says.
fn told(comm: &mut Comm, cuts: &[String]) -> Result<Vec<String>, Box<dyn Error + Send + Sync>> {
    let mut bytes = cuts.join("\n").into_bytes();
    let mut len = [bytes.len() as i64];
    comm.broadcast(&mut len, 0)?;
    bytes.resize(usize::try_from(len[0])?, 0);
    comm.broadcast(&mut bytes, 0)?;
    let text = String::from_utf8(bytes)?;
    Ok(text.lines().map(String::from).collect())
}
