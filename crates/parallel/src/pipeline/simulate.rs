//! What a timetable takes: start times, idle times and the end of a step, from the costs of passes.
//!
//! A stage does its actions in order, each as soon as what it reads is there. A send costs the sender nothing and arrives
//! after `latency`; links are never busy. Receives are checked as messages without numbers would be: the n-th receive of a
//! channel gets the n-th message sent, and must want that microbatch.

use super::timetable::{Action, HeldMost, StagePass, Timetable};

/// What passes cost, in any unit of time.
#[derive(Clone, PartialEq, Debug)]
pub struct Costs {
    /// By chunk: the forward pass.
    pub forward: Vec<f64>,
    /// By chunk: input gradients.
    pub input: Vec<f64>,
    /// By chunk: weight gradients.
    pub weight: Vec<f64>,
    /// From the end of a pass to the arrival of its results at another stage.
    pub latency: f64,
}

impl Costs {
    /// The same costs for each of the chunks, and messages that take no time.
    pub fn even(chunks: usize, forward: f64, input: f64, weight: f64) -> Costs {
        Costs {
            forward: vec![forward; chunks],
            input: vec![input; chunks],
            weight: vec![weight; chunks],
            latency: 0.0,
        }
    }

    /// What an action costs.
    pub fn of(&self, action: &Action) -> f64 {
        let chunk = action.chunk;
        match action.pass {
            StagePass::Forward => self.forward[chunk],
            StagePass::Backward => self.input[chunk] + self.weight[chunk],
            StagePass::InputGrad => self.input[chunk],
            StagePass::WeightGrad => self.weight[chunk],
        }
    }
}

/// What a timetable takes.
#[derive(Clone, PartialEq, Debug)]
pub struct SimulatedStep {
    /// By stage: when each of its actions starts.
    pub starts: Vec<Vec<f64>>,
    /// When the last action of all ends.
    pub makespan: f64,
    /// By stage: for how long it does nothing until then.
    pub idle: Vec<f64>,
    /// By stage: how much it holds at its fullest.
    pub held: Vec<HeldMost>,
}

/// Why a timetable cannot be run to its end.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Stuck {
    /// No stage can go on; this is the first that has actions left.
    #[error(
        "the schedule deadlocks: stage {stage} waits for ever before {action}; this is a bug in the schedule"
    )]
    Deadlock {
        /// The stage.
        stage: usize,
        /// What it would do next.
        action: Action,
    },
    /// A message arrives in the place of another one.
    #[error(
        "stage {stage} gets microbatch {sent} where it expects what it needs for {action}; this is a bug in the schedule"
    )]
    OutOfOrder {
        /// The stage that receives.
        stage: usize,
        /// What it is about to do.
        action: Action,
        /// The microbatch of the message.
        sent: usize,
    },
}

/// Runs a timetable in virtual time.
pub fn simulate(timetable: &Timetable, costs: &Costs) -> Result<SimulatedStep, Stuck> {
    let n_chunks = timetable.place.len();
    let mut state = State {
        timetable,
        latency: costs.latency,
        results: vec![vec![[None; 2]; timetable.microbatches]; n_chunks],
        sent: vec![[Vec::new(), Vec::new()]; n_chunks],
        received: vec![[0; 2]; n_chunks],
    };
    let mut starts: Vec<Vec<f64>> = vec![Vec::new(); timetable.stages];
    let mut ends = vec![0.0f64; timetable.stages];
    // Stages that may be able to go on.
    let mut awake: Vec<usize> = (0..timetable.stages).collect();
    while let Some(stage) = awake.pop() {
        while let Some(action) = timetable.by_stage[stage].get(starts[stage].len()) {
            let Some(ready) = state.ready(stage, action)? else { break };
            let start = ends[stage].max(ready);
            starts[stage].push(start);
            ends[stage] = start + costs.of(action);
            state.finish(action, ends[stage]);
            awake.extend(timetable.sends(action).map(|message| message.channel.target));
        }
    }
    for (stage, actions) in timetable.by_stage.iter().enumerate() {
        if let Some(action) = actions.get(starts[stage].len()) {
            return Err(Stuck::Deadlock { stage, action: *action });
        }
    }
    let makespan = ends.iter().copied().fold(0.0, f64::max);
    let busy = |actions: &Vec<Action>| -> f64 { actions.iter().map(|action| costs.of(action)).sum() };
    Ok(SimulatedStep {
        starts,
        makespan,
        idle: timetable.by_stage.iter().map(|actions| makespan - busy(actions)).collect(),
        held: (0..timetable.stages).map(|stage| timetable.held(stage)).collect(),
    })
}

/// What has been computed and sent. Pairs are of activations and gradients, in this order.
struct State<'a> {
    timetable: &'a Timetable,
    latency: f64,
    /// By chunk and microbatch: when it was computed.
    results: Vec<Vec<[Option<f64>; 2]>>,
    /// By chunk: the microbatches in the order in which it has computed them, which is that of messages.
    sent: Vec<[Vec<usize>; 2]>,
    /// By chunk: how many messages it has received.
    received: Vec<[usize; 2]>,
}

impl State<'_> {
    /// When an action's operands are there, if that is known already.
    fn ready(&mut self, stage: usize, action: &Action) -> Result<Option<f64>, Stuck> {
        let (chunk, microbatch) = (action.chunk, action.microbatch);
        let own = match action.pass {
            StagePass::Forward => Some(0.0),
            StagePass::Backward | StagePass::InputGrad => self.results[chunk][microbatch][0],
            StagePass::WeightGrad => self.results[chunk][microbatch][1],
        };
        let (Some(own), Some(source)) = (own, self.timetable.source_chunk(action)) else { return Ok(own) };
        let what = usize::from(action.pass != StagePass::Forward);
        let mut latency = 0.0;
        if self.timetable.receives(action).is_some() {
            match self.sent[source][what].get(self.received[chunk][what]) {
                Some(sent) if *sent == microbatch => self.received[chunk][what] += 1,
                Some(sent) => return Err(Stuck::OutOfOrder { stage, action: *action, sent: *sent }),
                None => return Ok(None),
            }
            latency = self.latency;
        }
        Ok(self.results[source][microbatch][what].map(|computed| own.max(computed + latency)))
    }

    /// Notes an action's results.
    fn finish(&mut self, action: &Action, end: f64) {
        let what = match action.pass {
            StagePass::Forward => 0,
            StagePass::Backward | StagePass::InputGrad => 1,
            StagePass::WeightGrad => return,
        };
        self.results[action.chunk][action.microbatch][what] = Some(end);
        self.sent[action.chunk][what].push(action.microbatch);
    }
}
