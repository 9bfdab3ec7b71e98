//! 2BW (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"): 1F1B that goes on across steps.
//!
//! A flush at the end of every step costs `(p - 1) (tF + tB)`. Without one, a stage that has no more forwards in a step
//! begins those of the next step. Their weights cannot have the gradients of a step that is still running, so:
//! - a rank keeps two versions of its weights, older and newer (the same at the start of a run);
//! - in a step's list, the passes of that step use the **older** version, and forwards of the next step the **newer** one;
//! - at the end of the list, the update makes the next version: newer weights, changed by the gradients of this step, which
//!   were computed with the older ones. The newer version becomes the older one.
//!
//! So `W[t+1] = W[t] - update(gradient at W[t-1])`: gradients are one step old. All stages use the same version for a
//! microbatch, and its backward uses that of its forward.
//!
//! # What a step boundary looks like
//! Stage `s` is `a = p - 1 - s` forwards ahead of its backwards. A run of `n` steps is the list `warm_up` (`a`
//! forwards), then `n - 1` times `steady`, then `drain`; steady lists and the drain end with an update. A steady list begins
//! when the first `a` forwards of its step have been done, and does the other `m - a`, all `m` backwards, and the first `a`
//! forwards of the next step. The drain leaves those out, and the pipeline is empty: this is where a run ends, evaluates or
//! saves. The next run begins with `warm_up`, and both versions are the same again: its first step has a gradient that is not old, and
//! nothing but the weights has to be saved. How many steps a run has is thus part of the numerics.
//!
//! A step has at least `p - 1` microbatches. With fewer, two versions of the weights let the first stage run too few forwards
//! ahead, and steps with a flush between them are faster.

use super::kind::at_least_one;
use super::timetable::{Action, StagePass, Timetable};

/// An action in a step's list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepAction {
    /// What is done.
    pub action: Action,
    /// Whether it is for a microbatch of the next step: a forward, with the newer weights.
    pub next_step: bool,
}

/// The lists of a pipeline that is not flushed between steps; each by stage.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AcrossSteps {
    /// How many stages there are, with one chunk each.
    pub stages: usize,
    /// How many microbatches a step has.
    pub microbatches: usize,
    /// What is done before the first step's list: its first forwards.
    pub warm_up: Vec<Vec<Action>>,
    /// A step that another one follows.
    pub steady: Vec<Vec<StepAction>>,
    /// The last step.
    pub drain: Vec<Vec<Action>>,
}

/// The lists for steps of `microbatches`; or why there are none, and what to change.
pub fn across_steps(stages: usize, microbatches: usize) -> Result<AcrossSteps, String> {
    at_least_one(stages, microbatches)?;
    if microbatches + 1 < stages {
        return Err(format!(
            "schedule \"2bw\" with {stages} stages needs {} or more microbatches in a step, not {microbatches}; raise \
             `parallel.microbatches`, lower `parallel.stage`, or set `parallel.schedule = \"1f1b\"`",
            stages - 1
        ));
    }
    let by_stage = (0..stages).map(|stage| (stage, stages - 1 - stage));
    let forward = |chunk, microbatch| Action { pass: StagePass::Forward, chunk, microbatch };
    let steady = |(stage, ahead): (usize, usize)| -> Vec<StepAction> {
        let turn = |k: usize| {
            let (of, next_step) = match ahead + k {
                later if later >= microbatches => (later - microbatches, true),
                this => (this, false),
            };
            let backward = Action { pass: StagePass::Backward, chunk: stage, microbatch: k };
            [
                StepAction { action: forward(stage, of), next_step },
                StepAction { action: backward, next_step: false },
            ]
        };
        (0..microbatches).flat_map(turn).collect()
    };
    let warm_up = |(stage, ahead)| (0..ahead).map(|k| forward(stage, k)).collect();
    let steady: Vec<Vec<StepAction>> = by_stage.clone().map(steady).collect();
    let last = |list: &Vec<StepAction>| list.iter().filter(|a| !a.next_step).map(|a| a.action).collect();
    let drain = steady.iter().map(last).collect();
    Ok(AcrossSteps { stages, microbatches, warm_up: by_stage.map(warm_up).collect(), steady, drain })
}

impl AcrossSteps {
    /// A run of `steps` steps as one timetable: microbatch `i` of step `t` has the number `t * microbatches + i`.
    pub fn run(&self, steps: usize) -> Timetable {
        let of_stage = |stage: usize| {
            let numbered = |step: usize, action: Action| Action {
                microbatch: step * self.microbatches + action.microbatch,
                ..action
            };
            let mut actions = Vec::new();
            for step in 0..steps {
                if step == 0 {
                    actions.extend(&self.warm_up[stage]);
                }
                if step + 1 < steps {
                    let list = self.steady[stage].iter();
                    actions.extend(list.map(|a| numbered(step + usize::from(a.next_step), a.action)));
                } else {
                    actions.extend(self.drain[stage].iter().map(|a| numbered(step, *a)));
                }
            }
            actions
        };
        Timetable {
            stages: self.stages,
            microbatches: steps * self.microbatches,
            chunks_per_stage: 1,
            place: (0..self.stages).collect(),
            by_stage: (0..self.stages).map(of_stage).collect(),
        }
    }
}
