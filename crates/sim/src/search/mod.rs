//! The search: from a job and a cluster to plans, best first, with reasons.
//!
//! # How it goes
//! ```text
//!  question, cluster ──choices──▶ thousands ──refusals, memory, estimate──▶ an order ──lower, simulate──▶ plans
//! ```
//!
//! 1. All choices are made: seatings (hosts, ranks on each, threads), meshes, microbatches, schedules, sharding, precisions. What the
//!    job has decided is kept.
//! 2. A few steps are lowered, from which the time of every choice is estimated (`estimate`). What `parallel` refuses for these
//!    is discarded, and so is what cannot hold its parameters.
//! 3. The best estimate of each family (mesh, seating, precision) is lowered as a run would be, and simulated. If it does not fit,
//!    activations are computed a second time; if that does not help, it is discarded.
//! 4. Then other microbatches, schedules and sharding of the families that came out best.
//!
//! A choice whose estimate, with some allowance, is above the best time that was simulated has lost. What is lowered costs effort, which is counted in
//! nodes and ranks rather than measured: the same question has the same answer, on a fast machine and on a slow one.
//!
//! # What it does not promise
//! It is a search, not a proof: estimates can be wrong by more than the allowance, and effort ends. Times are as good as the
//! cluster's description. Uneven splits are taken to be as slow as their largest part.
//!
//! # Layout
//! - [`question`]: what is asked. [`candidates`]: what could be done. [`estimate`]: how long that takes at best.
//! - [`trial`]: one choice, lowered and simulated. [`reasons`]: why a plan loses, and what bounds the best.

pub mod candidates;
pub mod estimate;
pub mod question;
pub mod reasons;
pub mod trial;

pub use candidates::PlanChoice;
pub use estimate::Estimate;
pub use question::{FixedKeys, Question, Seating, Sharding};
pub use reasons::{TimeShares, why_slower};
pub use trial::{FoundPlan, LostBy};

use polyreme_parallel::Mesh;
use thiserror::Error;

use self::candidates::choices;
use self::estimate::Steps;
use self::trial::{Graphs, found, shortage};
use crate::cluster::Cluster;

/// An estimate that is above the best time by less than this factor may still win.
pub(crate) const ALLOWANCE: f64 = 1.35;
/// The share of the effort that goes to the best of each family; the rest goes to variants of the best.
const FAMILIES_SHARE: f64 = 0.6;
/// Choices that may be refused, or found not to fit, when they are lowered: whoever gets so far has asked for too much.
const FAILED_MAX: usize = 400;
/// What lowering within a budget takes, in lowerings without one.
const RECOMPUTED: f64 = 12.0;
/// How far a search may go beyond its effort, to find a plan at all.
const OVER: f64 = 1.5;
/// Discarded choices that are kept with their reasons.
const LOST_MAX: usize = 64;

/// How much a search may lower and simulate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SearchEffort {
    /// About microseconds of a core of today, counted in nodes that are lowered and ranks that are simulated.
    pub units: f64,
    /// The most plans that are simulated.
    pub plans: usize,
}

impl SearchEffort {
    /// What a person waits for.
    pub const USUAL: SearchEffort = SearchEffort { units: 15e6, plans: 32 };
    /// For a look at another cluster.
    pub const LITTLE: SearchEffort = SearchEffort { units: 4e6, plans: 8 };
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct SearchAnswer {
    /// Plans that fit, the fastest first.
    pub plans: Vec<FoundPlan>,
    /// Some of those that were discarded, with the reason.
    pub lost: Vec<(PlanChoice, LostBy)>,
    /// How many choices there were.
    pub considered: usize,
    /// How many were lowered and simulated.
    pub simulated: usize,
}

/// How far a search is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SearchProgress {
    /// Choices that are left after what is refused, or does not hold its parameters; until these are known, those that were looked at.
    pub choices: usize,
    /// Plans that were simulated.
    pub simulated: usize,
    /// The share of the effort that was spent, from 0 to 1.
    pub spent: f64,
    /// The shortest step so far.
    pub best_us: Option<f64>,
}

/// Why there is nothing to search.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SearchError {
    /// The model cannot be split as the job says, on any cluster.
    #[error("{0}")]
    Refused(String),
    /// What the job fixes does not go together with the cluster.
    #[error(
        "no mesh goes together with what the job fixes (hosts: {hosts}, cores of each: {cores}, samples of a step: {batch}); leave a key of `[parallel]` out, or set it to \"auto\""
    )]
    NoChoice {
        /// Hosts of the cluster.
        hosts: usize,
        /// Cores of a host.
        cores: usize,
        /// Samples of a step.
        batch: usize,
    },
}

/// Searches for plans, also on several clusters one after another: what was lowered serves for all of them.
pub struct Planner<'q> {
    question: &'q Question<'q>,
    steps: Steps<'q>,
    graphs: Graphs<'q>,
    watch: Option<&'q dyn Fn(SearchProgress)>,
}

impl<'q> Planner<'q> {
    /// A planner for a question.
    pub fn new(question: &'q Question<'q>) -> Planner<'q> {
        Planner { question, steps: Steps::new(question), graphs: Graphs::new(question), watch: None }
    }

    /// The same, which says now and then how far it is.
    pub fn watched(self, watch: &'q dyn Fn(SearchProgress)) -> Planner<'q> {
        Planner { watch: Some(watch), ..self }
    }

    fn say(&self, progress: SearchProgress) {
        if let Some(watch) = self.watch {
            watch(progress);
        }
    }

    /// The best plans on a cluster.
    pub fn search(&mut self, cluster: &Cluster, effort: SearchEffort) -> Result<SearchAnswer, SearchError> {
        let question = self.question;
        self.steps.forget_times();
        let all = choices(question, cluster);
        let considered = all.len();
        if all.is_empty() {
            // Most often a key that is set can be met on no cluster: then that is the reason.
            if let Some(why) = self.steps.refusal(&candidates::as_fixed(question)) {
                return Err(SearchError::Refused(why));
            }
            let (hosts, cores) = (cluster.hosts.len(), cluster.hosts.first().map_or(0, |host| host.cores));
            return Err(SearchError::NoChoice { hosts, cores, batch: question.batch });
        }
        let mut lost = Lost::default();
        let mut order: Vec<(f64, PlanChoice)> = Vec::new();
        for (number, choice) in all.into_iter().enumerate() {
            self.say(SearchProgress { choices: number, simulated: 0, spent: 0.0, best_us: None });
            if let Some(why) = self.steps.refusal(&choice) {
                lost.add(choice, LostBy::Refused(why));
                continue;
            }
            match self.steps.estimate(&choice, cluster) {
                Err(why) => lost.add(choice, LostBy::Refused(why)),
                Ok(estimate) => match shortage(question, cluster, &choice, estimate.state_bytes) {
                    Some(why) => lost.add(choice, why),
                    None => order.push((estimate.step_us, choice)),
                },
            }
        }
        // Of equal estimates the simpler choice comes first: they are made in that order.
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut run = SearchRun {
            planner: self,
            cluster,
            effort,
            choices: order.len(),
            spent: 0.0,
            plans: Vec::new(),
            lost,
            failed: Vec::new(),
        };
        // Sharding is for memory first of all, and what it costs is hard to estimate: meshes are compared without it.
        let (plain, sharded): (Vec<_>, Vec<_>) =
            order.iter().partition(|(_, choice)| is_plain(question, choice));
        run.families(&plain);
        run.families(&sharded);
        run.ways(&order);
        run.variants(&order);
        run.note_bounded(&order);
        let SearchRun { mut plans, lost, .. } = run;
        plans.sort_by(by_time);
        Ok(SearchAnswer { simulated: plans.len(), plans, lost: lost.kept, considered })
    }

    /// The same plan on another cluster, which has as many hosts at least.
    pub fn again(&self, plan: &FoundPlan, cluster: &Cluster) -> Result<FoundPlan, String> {
        found(self.question, cluster, plan.choice, plan.fleet.clone())
    }
}

/// So many of the best families are looked at together: one that is a little behind may win with another schedule.
const VARIANTS_TOGETHER: usize = 4;
/// So many choices of a way to split are tried, to say of one why it loses.
const TRIES_OF_A_WAY: usize = 3;

/// The ways to split, of each of which the best is shown.
const WAYS: [fn(&Mesh) -> bool; 4] = [
    |mesh| mesh.replica_ranks() == 1,
    |mesh| mesh.tensor > 1,
    |mesh| mesh.stage > 1,
    |mesh| mesh.sequence > 1,
];

fn by_time(a: &FoundPlan, b: &FoundPlan) -> std::cmp::Ordering {
    a.report.step_us.total_cmp(&b.report.step_us)
}

/// A search that is under way.
struct SearchRun<'p, 'q, 'c> {
    planner: &'p mut Planner<'q>,
    cluster: &'c Cluster,
    effort: SearchEffort,
    choices: usize,
    spent: f64,
    plans: Vec<FoundPlan>,
    lost: Lost,
    /// Choices that were refused or do not fit: nothing like them is tried again.
    failed: Vec<(PlanChoice, LostBy)>,
}

/// A choice and its estimate.
type Estimated = (f64, PlanChoice);

impl SearchRun<'_, '_, '_> {
    /// The best of each family, in the order of estimates.
    fn families(&mut self, order: &[Estimated]) {
        let mut seen: Vec<_> = self.plans.iter().map(|plan| plan.choice.family()).collect();
        for (estimate_us, choice) in order {
            let enough =
                self.spent >= self.effort.units * FAMILIES_SHARE || self.plans.len() >= self.effort.plans / 2;
            if self.has_lost(*estimate_us) || (enough && !self.plans.is_empty()) {
                return;
            }
            if !seen.contains(&choice.family()) && self.simulate(choice) {
                seen.push(choice.family());
            }
        }
    }

    /// The best of each way to split, also if it has lost: so that it can be said why.
    fn ways(&mut self, order: &[Estimated]) {
        for uses in WAYS {
            if self.plans.iter().any(|plan| uses(&plan.choice.mesh)) {
                continue;
            }
            let best = order.iter().filter(|(_, choice)| uses(&choice.mesh)).take(TRIES_OF_A_WAY);
            for (_, choice) in best {
                if self.simulate(choice) {
                    break;
                }
            }
        }
    }

    /// Other microbatches, schedules and sharding of the best families; then whatever is left.
    fn variants(&mut self, order: &[Estimated]) {
        self.plans.sort_by(by_time);
        let families: Vec<_> = self.plans.iter().map(|plan| plan.choice.family()).collect();
        let rank = |choice: &PlanChoice| {
            let at = families.iter().position(|family| *family == choice.family());
            at.map_or(usize::MAX, |at| at / VARIANTS_TOGETHER)
        };
        let mut left: Vec<&Estimated> = order.iter().take_while(|(us, _)| !self.has_lost(*us)).collect();
        left.sort_by_key(|(_, choice)| rank(choice));
        for (estimate_us, choice) in left {
            if self.spent >= self.effort.units || self.plans.len() >= self.effort.plans {
                return;
            }
            if !self.has_lost(*estimate_us)
                && !self.plans.iter().any(|plan| same_choice(&plan.choice, choice))
            {
                self.simulate(choice);
            }
        }
    }

    /// Keeps some of those that have lost by their estimates.
    fn note_bounded(&mut self, order: &[Estimated]) {
        for (step_us, choice) in order {
            if self.has_lost(*step_us) {
                self.lost.add(*choice, LostBy::Bound { step_us: *step_us });
            }
        }
    }

    /// Whether an estimate is too long for a choice to win.
    fn has_lost(&self, estimate_us: f64) -> bool {
        let best = self.plans.iter().map(|plan| plan.report.step_us).fold(f64::INFINITY, f64::min);
        estimate_us > best * ALLOWANCE
    }

    /// Lowers and simulates a choice. Returns whether it is a plan.
    fn simulate(&mut self, choice: &PlanChoice) -> bool {
        let question = self.planner.question;
        let known = self.failed.iter().any(|(other, why)| is_like(question, choice, other, why));
        // Without any plan a search goes on a little longer.
        let over = self.spent >= self.effort.units * OVER || self.failed.len() >= FAILED_MAX;
        if known || over {
            return false;
        }
        let best_us = self.plans.iter().map(|plan| plan.report.step_us).min_by(f64::total_cmp);
        let (choices, simulated) = (self.choices, self.plans.len());
        let spent = (self.spent / self.effort.units).min(1.0);
        self.planner.say(SearchProgress { choices, simulated, spent, best_us });
        self.spent += self.planner.steps.effort(choice);
        match self.planner.graphs.attempt(choice, self.cluster) {
            Ok(plan) => {
                self.plans.push(plan);
                true
            }
            Err(why) => {
                // It was lowered again and again, with more and more that is computed a second time.
                if matches!(why, LostBy::Memory { .. }) {
                    self.spent += RECOMPUTED * self.planner.steps.effort(choice);
                }
                self.failed.push((*choice, why.clone()));
                self.lost.add(*choice, why);
                false
            }
        }
    }
}

/// Whether a choice shards no more than the job asks for.
fn is_plain(question: &Question, choice: &PlanChoice) -> bool {
    question.fixed.sharding.is_some() || choice.sharding == Sharding::Usual
}

/// Whether two choices differ in nothing but what is computed a second time.
fn same_choice(a: &PlanChoice, b: &PlanChoice) -> bool {
    PlanChoice { budget_bytes: None, ..*a } == PlanChoice { budget_bytes: None, ..*b }
}

/// Whether a choice would fail as another one did.
fn is_like(question: &Question, choice: &PlanChoice, failed: &PlanChoice, why: &LostBy) -> bool {
    let parts = |mesh: &Mesh| (mesh.tensor, mesh.sequence, mesh.stage);
    let same = parts(&choice.mesh) == parts(&failed.mesh)
        && (choice.sharding, choice.schedule) == (failed.sharding, failed.schedule);
    match why {
        LostBy::Refused(_) | LostBy::Bound { .. } => same,
        // With as many samples, on as many ranks of a host, and no more ranks to share with.
        LostBy::Memory { .. } => {
            same && choice.precision == failed.precision
                && choice.seating.ranks_per_host >= failed.seating.ranks_per_host
                && choice.mesh.data <= failed.mesh.data
                && choice.samples(question) >= failed.samples(question)
        }
    }
}

/// Discarded choices; of those with the same reason the first.
#[derive(Default)]
struct Lost {
    kept: Vec<(PlanChoice, LostBy)>,
}

impl Lost {
    fn add(&mut self, choice: PlanChoice, why: LostBy) {
        let alike = |(other, known): &(PlanChoice, LostBy)| match (&why, known) {
            (LostBy::Refused(a), LostBy::Refused(b)) => a == b,
            (LostBy::Memory { .. }, LostBy::Memory { .. }) | (LostBy::Bound { .. }, LostBy::Bound { .. }) => {
                let Mesh { data, tensor, stage, sequence } = other.mesh;
                (tensor, stage, sequence) == (choice.mesh.tensor, choice.mesh.stage, choice.mesh.sequence)
                    && data == choice.mesh.data
            }
            (LostBy::Refused(_) | LostBy::Memory { .. } | LostBy::Bound { .. }, _) => false,
        };
        if self.kept.len() < LOST_MAX && !self.kept.iter().any(alike) {
            self.kept.push((choice, why));
        }
    }
}
