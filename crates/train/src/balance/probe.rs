//! How a rank gets back a share that was cut: by trial.
//!
//! A process that may only use a quarter of its core is held back as soon as it has used that much. With equal shares it is four times
//! as slow as the others. With a fifth of the samples it is hardly held back any more, looks as fast as the others, and would
//! get an equal share again, and so on. No measurement at the smaller share can tell it from a process that has its whole core
//! again; only a larger share can. So a rank whose share was cut below an equal one gets half as much again, for one look. If its
//! units then take longer, all shares are as before, and the next trial has to wait; if they do not, it gets what its speed
//! deserves. A trial that fails costs a few steps that are somewhat longer, and two changes; one in three looks at most is such a trial, and
//! fewer where changes are dear.

use super::{Look, typical_units};
use crate::share::counts;

/// What a rank gets in a trial, of what it has.
const RAISE: f64 = 1.5;
/// Its units take longer by more than this: the trial failed.
const LONGER: f64 = 1.4;
/// Looks without a trial, after one that failed.
const PAUSE_LOOKS: usize = 2;
/// More of them, so that changing shares takes no more than this of the time.
const COST: f64 = 0.1;

/// Which ranks had their share cut, and what is being tried.
#[derive(Clone, Debug)]
pub(super) struct Trials {
    /// By rank.
    cut: Vec<bool>,
    pause: usize,
    running: Option<ShareTrial>,
}

#[derive(Clone, Debug)]
struct ShareTrial {
    before: Vec<usize>,
    /// The ranks that have more, and the seconds of a unit of each before.
    raised: Vec<(usize, f64)>,
}

/// What became of a trial.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum TrialVerdict {
    /// There was none.
    None,
    /// It went well.
    Passed,
    /// It did not: shares are to be as before.
    Failed { before: Vec<usize> },
}

/// What is done instead of a change.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Instead {
    /// Nothing: the change is made.
    Nothing,
    /// These counts are tried first.
    Trial(Vec<usize>),
    /// No change now: a trial failed a moment ago.
    Wait,
}

impl Trials {
    pub(super) fn new(ranks: usize) -> Trials {
        Trials { cut: vec![false; ranks], pause: 0, running: None }
    }

    /// Judges the trial that is running by the look since it began. `cost_s` is what a change costs, `look_s` how long a look takes.
    pub(super) fn verdict(&mut self, look: &Look, cost_s: f64, look_s: f64) -> TrialVerdict {
        self.pause = self.pause.saturating_sub(1);
        let Some(ShareTrial { before, raised }) = self.running.take() else { return TrialVerdict::None };
        let now = typical_units(before.len(), std::slice::from_ref(look));
        if raised.iter().any(|(rank, seconds)| now[*rank] > LONGER * seconds) {
            let dear = 2.0 * cost_s / (COST * look_s.max(1e-3));
            self.pause = PAUSE_LOOKS.max(dear.min(1e6) as usize);
            return TrialVerdict::Failed { before };
        }
        raised.iter().for_each(|(rank, _)| self.cut[*rank] = false);
        TrialVerdict::Passed
    }

    /// What is done instead of changing `now` into `then`.
    pub(super) fn instead_of(&self, now: &[usize], then: &[usize], typical: &[f64]) -> Instead {
        let raised = |rank: usize| self.cut[rank] && then[rank] > now[rank] && typical[rank] > 0.0;
        if !(0..now.len()).any(raised) {
            return Instead::Nothing;
        }
        if self.pause > 0 {
            return Instead::Wait;
        }
        let most = |rank: usize| (RAISE * now[rank] as f64).ceil() as usize;
        let mut tried: Vec<usize> =
            (0..now.len()).map(|rank| if raised(rank) { then[rank].min(most(rank)) } else { 0 }).collect();
        // The others share the rest as they will in the end.
        let rest = now.iter().sum::<usize>() - tried.iter().sum::<usize>();
        let weights: Vec<f64> =
            (0..now.len()).map(|rank| if raised(rank) { 0.0 } else { then[rank] as f64 }).collect();
        tried.iter_mut().zip(counts(rest, &weights)).for_each(|(n, more)| *n += more);
        match tried == now {
            true => Instead::Wait,
            false => Instead::Trial(tried),
        }
    }

    /// A trial of `then` begins.
    pub(super) fn begin(&mut self, now: &[usize], then: &[usize], typical: &[f64]) {
        let raised = (0..now.len()).filter(|rank| self.cut[*rank] && then[*rank] > now[*rank]);
        let raised = raised.map(|rank| (rank, typical[rank])).collect();
        self.running = Some(ShareTrial { before: now.to_vec(), raised });
    }

    /// Shares were changed for good: who has less than before, and less than an equal share, has to be tried.
    pub(super) fn cut(&mut self, before: &[usize], now: &[usize]) {
        let total: usize = now.iter().sum();
        for (rank, cut) in self.cut.iter_mut().enumerate() {
            *cut |= now[rank] < before[rank] && now[rank] * now.len() < total;
        }
    }

    /// Whether looks that belie a change are explained by a rank that is faster because it has less to do, and no rank is slower
    /// than it was.
    pub(super) fn explain(&self, before: &[usize], now: &[usize], typical: &[f64], looks: &[Look]) -> bool {
        let then = typical_units(now.len(), looks);
        let faster = |rank: usize| self.cut[rank] && now[rank] < before[rank] && then[rank] < typical[rank];
        let slower = |rank: usize| then[rank] > LONGER * typical[rank];
        (0..now.len()).any(faster) && !(0..now.len()).any(slower)
    }
}
