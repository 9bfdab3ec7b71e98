//! Timetables: the order of passes on every stage, the messages that follow from it, and what each stage holds.

use std::fmt;

/// What is computed for a chunk and a microbatch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum StagePass {
    /// The forward pass.
    Forward,
    /// Input gradients, then weight gradients.
    Backward,
    /// Gradients of the chunk's activations and inputs: all that earlier chunks wait for.
    InputGrad,
    /// Gradients of the chunk's weights: only the update waits for them.
    WeightGrad,
}

/// One pass of one microbatch through one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Action {
    /// What is computed.
    pub pass: StagePass,
    /// The chunk, numbered over all stages from the network's input to its output.
    pub chunk: usize,
    /// The microbatch.
    pub microbatch: usize,
}

impl Action {
    /// Whether the microbatch's activations in this chunk are no longer needed after it.
    pub fn frees(&self) -> bool {
        matches!(self.pass, StagePass::Backward | StagePass::WeightGrad)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pass = match self.pass {
            StagePass::Forward => "forward",
            StagePass::Backward => "backward",
            StagePass::InputGrad => "input gradients",
            StagePass::WeightGrad => "weight gradients",
        };
        write!(f, "{pass} of microbatch {} in chunk {}", self.microbatch, self.chunk)
    }
}

/// What messages with one tag have in common. They are received in the order in which they were sent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Channel {
    /// The stage that sends.
    pub source: usize,
    /// The stage that receives.
    pub target: usize,
    /// The chunk that computed what is sent.
    pub from: usize,
    /// The chunk that reads it: a later one gets activations, an earlier one gradients.
    pub to: usize,
}

/// What crosses between two stages for one microbatch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Message {
    /// Between which chunks.
    pub channel: Channel,
    /// The microbatch.
    pub microbatch: usize,
}

/// How much a stage holds at its fullest. An activation is held from the start of its forward to the end of the last part
/// of its backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldMost {
    /// Activations: a microbatch counts once for each chunk that holds it.
    pub activations: usize,
    /// Microbatches, however many of the stage's chunks hold them.
    pub microbatches: usize,
}

/// The order of passes on every stage.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timetable {
    /// How many stages there are.
    pub stages: usize,
    /// How many microbatches a step has.
    pub microbatches: usize,
    /// How many chunks each stage has.
    pub chunks_per_stage: usize,
    /// By chunk: the stage that has it.
    pub place: Vec<usize>,
    /// By stage: what it does, in order.
    pub by_stage: Vec<Vec<Action>>,
}

impl Timetable {
    /// The chunks of a stage, from the network's input to its output.
    pub fn chunks_of(&self, stage: usize) -> Vec<usize> {
        (0..self.place.len()).filter(|chunk| self.place[*chunk] == stage).collect()
    }

    /// Whether backward passes are split into input and weight gradients.
    pub fn splits_backward(&self) -> bool {
        self.by_stage.iter().flatten().any(|action| action.pass == StagePass::WeightGrad)
    }

    /// The chunk whose results an action waits for, the action's own apart.
    pub fn source_chunk(&self, action: &Action) -> Option<usize> {
        match action.pass {
            StagePass::Forward => action.chunk.checked_sub(1),
            StagePass::Backward | StagePass::InputGrad => {
                (action.chunk + 1 < self.place.len()).then_some(action.chunk + 1)
            }
            StagePass::WeightGrad => None,
        }
    }

    /// The chunk that waits for an action's results.
    pub fn target_chunk(&self, action: &Action) -> Option<usize> {
        match action.pass {
            StagePass::Forward => (action.chunk + 1 < self.place.len()).then_some(action.chunk + 1),
            StagePass::Backward | StagePass::InputGrad => action.chunk.checked_sub(1),
            StagePass::WeightGrad => None,
        }
    }

    /// The message that must arrive before an action, if another stage computes what it reads.
    pub fn receives(&self, action: &Action) -> Option<Message> {
        self.message(self.source_chunk(action)?, action.chunk, action.microbatch)
    }

    /// The message that an action sends, if another stage reads its results.
    pub fn sends(&self, action: &Action) -> Option<Message> {
        self.message(action.chunk, self.target_chunk(action)?, action.microbatch)
    }

    /// How much a stage holds at its fullest. It follows from the order alone, whatever passes cost.
    pub fn held(&self, stage: usize) -> HeldMost {
        let mut chunks = vec![0usize; self.microbatches];
        let (mut activations, mut microbatches) = (0, 0);
        let mut peak = HeldMost { activations: 0, microbatches: 0 };
        for action in &self.by_stage[stage] {
            let of = &mut chunks[action.microbatch];
            if action.pass == StagePass::Forward {
                activations += 1;
                microbatches += usize::from(*of == 0);
                *of += 1;
            } else if action.frees() {
                activations -= 1;
                *of -= 1;
                microbatches -= usize::from(*of == 0);
            }
            peak.activations = peak.activations.max(activations);
            peak.microbatches = peak.microbatches.max(microbatches);
        }
        peak
    }

    fn message(&self, from: usize, to: usize, microbatch: usize) -> Option<Message> {
        let (source, target) = (self.place[from], self.place[to]);
        (source != target).then_some(Message { channel: Channel { source, target, from, to }, microbatch })
    }
}
