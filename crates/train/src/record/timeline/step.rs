//! One step of a timeline: which one is drawn, and what each rank did in it.

use std::collections::BTreeSet;

use polyreme_graph::{Axis, BlockKind, MomentKind};
use polyreme_parallel::Mesh;

use super::TimelineError;
use super::read::{RankSpans, Trace, WorkSpan};
use crate::record::trace::About;

/// More rows are not legible.
const ROWS_MAX: usize = 64;

/// The largest mesh that is believed.
const RANKS_MAX: usize = 1 << 20;

/// One step, or one run of several without a flush between them, of all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct StepTimeline {
    pub(super) about: Option<About>,
    /// The first and the last step.
    pub(super) steps: (u64, u64),
    /// From the first rank's start to the last one's end.
    pub(super) took_us: f64,
    pub(super) rows: Vec<RankRow>,
    /// Ranks that have no row, and which those are that have one.
    pub(super) left_out: Option<(usize, &'static str)>,
}

/// What one rank did.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct RankRow {
    /// Its place in the mesh, and the rest of it in small letters.
    pub(super) name: [String; 2],
    /// One after the other.
    pub(super) bars: Vec<Bar>,
    /// The share of the step in which it did nothing or waited for other ranks.
    pub(super) idle: f64,
    /// The share of the step that collectives took.
    pub(super) exchange: f64,
}

/// What a rank did for a while. Times are microseconds since the step began on the first rank.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Bar {
    pub(super) kind: BarKind,
    pub(super) microbatch: Option<u64>,
    /// Which of its rank's chunks, and how many of them there are.
    pub(super) chunk: (usize, usize),
    pub(super) start_us: f64,
    pub(super) end_us: f64,
}

/// What bars are told apart by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum BarKind {
    Forward,
    InputGrad,
    WeightGrad,
    Update,
    /// A collective of more than a few bytes, or handing over a message.
    Exchange,
    /// Loading, adding up, copying.
    Other,
    /// Waiting for other ranks.
    Waiting,
}

impl StepTimeline {
    /// The number of the step; the first and the last one of a run of several.
    pub fn steps(&self) -> (u64, u64) {
        self.steps
    }

    /// How long it took, in microseconds.
    pub fn took_us(&self) -> f64 {
        self.took_us
    }

    /// The share of the step in which ranks were idle, on average.
    pub fn idle(&self) -> f64 {
        self.rows.iter().map(|row| row.idle).sum::<f64>() / self.rows.len().max(1) as f64
    }
}

impl Trace {
    /// The step with this number; without one, a typical step: of those that all ranks recorded whole the one with the median
    /// duration, without the first, which touches memory for the first time.
    pub fn step(&self, number: Option<u64>) -> Result<StepTimeline, TimelineError> {
        let path = || self.path.clone();
        let whole = self.whole_steps();
        let (Some(first), Some(last)) = (whole.first(), whole.last()) else {
            return Err(TimelineError::NoSteps { path: path() });
        };
        let chosen = match number {
            Some(step) => whole.iter().find(|w| (w.first..=w.last).contains(&step)).ok_or_else(|| {
                let has = match (first.first, last.last) {
                    (first, last) if first == last => format!("step {first} only"),
                    (first, last) => format!("steps {first} to {last}"),
                };
                TimelineError::NoStep { path: path(), step, has }
            })?,
            None => {
                let mut later: Vec<&WholeStep> = whole.iter().skip(usize::from(whole.len() > 2)).collect();
                later.sort_by(|a, b| (a.end_us - a.start_us).total_cmp(&(b.end_us - b.start_us)));
                later[(later.len() - 1) / 2]
            }
        };
        Ok(self.drawn(chosen))
    }

    /// The steps that all ranks recorded from beginning to end, in their order.
    fn whole_steps(&self) -> Vec<WholeStep> {
        let numbers = |rank: &RankSpans| rank.steps.keys().copied().collect::<BTreeSet<u64>>();
        let mut of_all = self.ranks.values().map(numbers);
        let Some(first) = of_all.next() else { return Vec::new() };
        let common = of_all.fold(first, |a, b| a.intersection(&b).copied().collect());
        let whole = |step: u64| {
            let spans: Vec<&WorkSpan> =
                self.ranks.values().filter_map(|rank| rank.steps.get(&step)).collect();
            let start_us = spans.iter().map(|s| s.start_us).fold(f64::INFINITY, f64::min);
            let end_us = spans.iter().map(|s| s.start_us + s.us).fold(f64::NEG_INFINITY, f64::max);
            WholeStep { first: step, last: step, start_us, end_us }
        };
        let mut steps: Vec<WholeStep> = common.into_iter().map(whole).collect();
        // A program of several steps ends with a later one than it begins with.
        for rank in self.ranks.values() {
            for span in &rank.spans {
                let at = steps.partition_point(|w| w.first <= span.step);
                let Some(whole) = at.checked_sub(1).map(|at| &mut steps[at]) else { continue };
                if rank.steps.get(&whole.first).is_some_and(|s| span.start_us < s.start_us + s.us) {
                    whole.last = whole.last.max(span.step);
                }
            }
        }
        steps
    }

    fn drawn(&self, step: &WholeStep) -> StepTimeline {
        let mesh = self.about.as_ref().and_then(believable);
        let (ranks, which) = shown(self.ranks.keys().copied().collect(), mesh.as_ref());
        let took_us = (step.end_us - step.start_us).max(f64::MIN_POSITIVE);
        let rows = ranks.iter().map(|rank| self.row(*rank, mesh.as_ref(), step, took_us)).collect();
        let left_out = self.ranks.len() - ranks.len();
        StepTimeline {
            about: self.about.clone(),
            steps: (step.first, step.last),
            took_us,
            rows,
            left_out: (left_out > 0).then_some((left_out, which)),
        }
    }

    fn row(&self, rank: u64, mesh: Option<&Mesh>, step: &WholeStep, took_us: f64) -> RankRow {
        let of = &self.ranks[&rank];
        let whole = of.steps.get(&step.first);
        let (from, to) = whole.map_or((0.0, 0.0), |s| (s.start_us, s.start_us + s.us));
        let within = |s: &&WorkSpan| s.start_us >= from && s.start_us < to;
        let mut spans: Vec<WorkSpan> = of.spans.iter().filter(within).copied().collect();
        spans.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
        let chunks: Vec<u64> =
            spans.iter().filter_map(|s| s.chunk).collect::<BTreeSet<_>>().into_iter().collect();
        let bar = |s: &WorkSpan| Bar {
            kind: kind_of(s),
            microbatch: s.microbatch,
            chunk: (s.chunk.map_or(0, |c| chunks.partition_point(|x| *x < c)), chunks.len()),
            start_us: s.start_us - step.start_us,
            end_us: (s.start_us + s.us).min(to) - step.start_us,
        };
        let bars: Vec<Bar> = spans.iter().map(bar).collect();
        let share = |of: &dyn Fn(BarKind) -> bool| {
            let us: f64 = bars.iter().filter(|b| of(b.kind)).map(|b| b.end_us - b.start_us).sum();
            (us / took_us).clamp(0.0, 1.0)
        };
        let idle = 1.0 - share(&|kind| kind != BarKind::Waiting);
        let exchange = share(&|kind| kind == BarKind::Exchange);
        RankRow { name: name(rank, mesh, &of.name), bars, idle, exchange }
    }
}

/// A step that all ranks recorded whole; or a run of several steps.
#[derive(Debug)]
struct WholeStep {
    first: u64,
    last: u64,
    start_us: f64,
    end_us: f64,
}

/// The mesh, unless a file claims a nonsensical one.
fn believable(about: &About) -> Option<Mesh> {
    let mesh = about.mesh();
    let lens = Axis::ALL.map(|axis| mesh.len(axis));
    let ranks = lens.iter().try_fold(1usize, |n, len| n.checked_mul(*len))?;
    (1..=RANKS_MAX).contains(&ranks).then_some(mesh)
}

/// The ranks that get a row. Of too many, those that differ along the more interesting axes.
fn shown(mut ranks: Vec<u64>, mesh: Option<&Mesh>) -> (Vec<u64>, &'static str) {
    let mut which = "the first ones";
    let Some(mesh) = mesh else {
        ranks.truncate(ROWS_MAX);
        return (ranks, which);
    };
    let axes = [(Axis::Data, "those of data 0"), (Axis::Tensor, "those of data 0, tensor 0")];
    let last = (Axis::Sequence, "those of data 0, tensor 0, sequence 0");
    for (axis, words) in axes.into_iter().chain([last]) {
        if ranks.len() > ROWS_MAX && mesh.len(axis) > 1 {
            ranks.retain(|rank| usize::try_from(*rank).is_ok_and(|rank| mesh.place(rank, axis) == 0));
            which = words;
        }
    }
    if ranks.len() > ROWS_MAX {
        ranks.truncate(ROWS_MAX);
        which = "the first ones";
    }
    (ranks, which)
}

/// What a row is called: its stage if there are several, and the rest.
fn name(rank: u64, mesh: Option<&Mesh>, in_file: &str) -> [String; 2] {
    let place = usize::try_from(rank).ok().zip(mesh).filter(|(rank, mesh)| *rank < mesh.ranks());
    let Some((rank, mesh)) = place else {
        let name = if in_file.is_empty() { format!("rank {rank}") } else { in_file.into() };
        return [name, String::new()];
    };
    let words = |axis: Axis| format!("{} {}", axis.name(), mesh.place(rank, axis));
    let others = [Axis::Tensor, Axis::Sequence, Axis::Data];
    let mut rest: Vec<String> = others.into_iter().filter(|axis| mesh.len(*axis) > 1).map(words).collect();
    if mesh.stage == 1 {
        // A mesh of data ranks only says nothing that their numbers do not.
        let rest = if mesh.data == mesh.ranks() { String::new() } else { rest.join(" · ") };
        return [format!("rank {rank}"), rest];
    }
    rest.insert(0, format!("rank {rank}"));
    [words(Axis::Stage), if rest.len() > 1 { rest.join(" · ") } else { String::new() }]
}

fn kind_of(span: &WorkSpan) -> BarKind {
    match span.kind {
        MomentKind::Block(BlockKind::Forward) => BarKind::Forward,
        MomentKind::Block(BlockKind::InputGrad) => BarKind::InputGrad,
        MomentKind::Block(BlockKind::WeightGrad) => BarKind::WeightGrad,
        MomentKind::Update => BarKind::Update,
        MomentKind::Wait if span.idle => BarKind::Waiting,
        MomentKind::Wait | MomentKind::Send | MomentKind::Exchange => BarKind::Exchange,
        MomentKind::Load
        | MomentKind::Combine
        | MomentKind::Node
        | MomentKind::Step
        | MomentKind::Evaluation => BarKind::Other,
    }
}
