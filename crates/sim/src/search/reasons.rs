//! Why a plan is slower than another one, and what bounds the best: from the numbers of their simulations.

use polyreme_graph::Axis;

use super::candidates::PlanChoice;
use super::estimate::AxisLink;
use super::question::Question;
use super::trial::FoundPlan;
use crate::cluster::Cluster;
use crate::speed::HostSpeed;
use crate::work::{of_instr, of_node};

/// What the time of a step goes to, as shares of it; on average over ranks.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct TimeShares {
    /// Products, convolutions, attention: bounded by multiply-adds.
    pub computing: f64,
    /// Passes over memory: bounded by its bandwidth.
    pub memory: f64,
    /// Waiting for gradients or weights of other ranks that have the same part of the model.
    pub data: f64,
    /// Waiting for ranks with other parts of the same matrices.
    pub tensor: f64,
    /// Waiting for other stages: the bubble.
    pub stage: f64,
    /// Waiting for other parts of the same sequences.
    pub sequence: f64,
}

impl TimeShares {
    /// The shares of a plan on its cluster.
    pub fn of(plan: &FoundPlan, cluster: &Cluster) -> TimeShares {
        let report = &plan.report;
        let (step_us, ranks) = (report.step_us.max(f64::MIN_POSITIVE), report.ranks.len().max(1) as f64);
        let busy = report.ranks.iter().map(|rank| rank.computing_us).sum::<f64>() / ranks / step_us;
        let waits = |axis: Axis| report.waits_along(axis) / step_us;
        let computing = busy * computing_part(plan, cluster);
        TimeShares {
            computing,
            memory: busy - computing,
            data: waits(Axis::Data),
            tensor: waits(Axis::Tensor),
            stage: waits(Axis::Stage),
            sequence: waits(Axis::Sequence),
        }
    }

    /// The largest share, in words.
    pub fn largest(&self) -> (&'static str, f64) {
        let rows = [
            ("computing", self.computing),
            ("memory bandwidth", self.memory),
            ("exchanges along the data axis", self.data),
            ("exchanges along the tensor axis", self.tensor),
            ("the bubble of the pipeline", self.stage),
            ("exchanges along the sequence axis", self.sequence),
        ];
        rows.into_iter().fold(rows[0], |best, row| if row.1 > best.1 { row } else { best })
    }
}

/// Which part of a rank's busy time is bounded by multiply-adds.
fn computing_part(plan: &FoundPlan, cluster: &Cluster) -> f64 {
    let program = &plan.fleet.programs[0].program;
    let (host, threads) = (&cluster.hosts[0], plan.choice.seating.threads);
    let us = |work: &crate::work::Work, speed: &HostSpeed| speed.took(work, threads, host.cores).alone_us;
    let (mut by_flops, mut all) = (0.0, 0.0);
    for body in &program.bodies {
        for node in 0..body.graph.nodes.len() {
            for work in of_node(body, node, program.optimizer, program.moments) {
                let took = us(&work, &host.speed);
                all += took;
                by_flops += if work.flops > 0.0 { took } else { 0.0 };
            }
        }
    }
    // Bodies run once for each microbatch, the rest once.
    let rounds = program.microbatches.len().max(1) as f64;
    let rest: f64 = program
        .instrs
        .iter()
        .flat_map(|instr| of_instr(program, instr))
        .map(|work| us(&work, &host.speed))
        .sum();
    if all > 0.0 { by_flops * rounds / (all * rounds + rest) } else { 0.0 }
}

/// Why `plan` is slower than `best`, in a few words.
pub fn why_slower(question: &Question, cluster: &Cluster, plan: &FoundPlan, best: &FoundPlan) -> String {
    let mean = |of: &FoundPlan| {
        let ranks = &of.report.ranks;
        ranks.iter().map(|rank| rank.computing_us).sum::<f64>() / ranks.len().max(1) as f64
    };
    let (step_us, extra) = (plan.report.step_us, plan.report.step_us - best.report.step_us);
    if extra <= 0.01 * best.report.step_us {
        return "as fast".into();
    }
    let computing = mean(plan) - mean(best);
    let waits = |axis| plan.report.waits_along(axis) - best.report.waits_along(axis);
    let axis = Axis::ALL
        .into_iter()
        .fold(Axis::Data, |most, axis| if waits(axis) > waits(most) { axis } else { most });
    if computing >= waits(axis) {
        return longer(question, plan, best, computing / mean(best));
    }
    let percent = |us: f64| us / step_us * 100.0;
    let waited = percent(plan.report.waits_along(axis));
    match axis {
        Axis::Stage => format!("bubble {waited:.0} %"),
        Axis::Data | Axis::Tensor | Axis::Sequence => {
            let what = match axis {
                Axis::Data => "sums of gradients",
                Axis::Tensor => "parts of matrices",
                Axis::Sequence | Axis::Stage => "parts of sequences",
            };
            format!("waits {waited:.0} % of the step for {what}{}", over(plan, cluster, axis))
        }
    }
}

/// What carries the exchanges along an axis, and how much of it, in words.
fn over(plan: &FoundPlan, cluster: &Cluster, axis: Axis) -> String {
    let link = AxisLink::new(&plan.choice.mesh, axis, &plan.choice.seating, cluster);
    if !link.crosses {
        return " in memory".into();
    }
    let bytes = plan.report.hosts.iter().map(|host| host.link_bytes[axis as usize]).fold(0.0, f64::max);
    format!(": a host sends {} over {:.0} Gbit/s", size(bytes), cluster.between.bytes_per_us / 125.0)
}

/// Bytes for people, as links count them.
fn size(bytes: f64) -> String {
    match bytes {
        b if b >= 1e9 => format!("{:.1} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.0} kB", b / 1e3),
    }
}

/// Why ranks of a plan compute longer than those of another.
fn longer(question: &Question, plan: &FoundPlan, best: &FoundPlan, by: f64) -> String {
    let (this, other): (&PlanChoice, &PlanChoice) = (&plan.choice, &best.choice);
    let cores = |choice: &PlanChoice| choice.seating.ranks() * choice.seating.threads;
    let reason = if this.budget_bytes.is_some() && other.budget_bytes.is_none() {
        "activations are computed twice to fit".to_string()
    } else if cores(this) < cores(other) {
        format!("uses {} cores of {}", cores(this), cores(other))
    } else if this.precision != other.precision {
        format!("in {}", question.precisions[this.precision].0)
    } else if this.mesh.tensor * this.mesh.sequence > other.mesh.tensor * other.mesh.sequence {
        "parts of matrices are smaller, and not all work is split".to_string()
    } else if this.samples(question) * this.mesh.data * this.microbatches > question.batch {
        "samples cannot be split evenly".to_string()
    } else if this.seating.threads > other.seating.threads {
        format!("{} threads of a rank scale worse than {}", this.seating.threads, other.seating.threads)
    } else if this.samples(question) < other.samples(question) {
        format!("microbatches of {} samples instead of {}", this.samples(question), other.samples(question))
    } else {
        "ranks are in each other's way".to_string()
    };
    format!("computes {:.0} % longer: {reason}", by * 100.0)
}
