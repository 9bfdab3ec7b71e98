//! What was measured of a set, by what a model is to say: classes, the next token, numbers or labels.

use polyreme_data::{Stats, Target, Values};

use super::confusion::Confusion;
use super::labels::LabelScores;
use super::numbers::NumberScores;
use super::scores::Scores;

/// The sums of one evaluation.
#[derive(Clone, PartialEq, Debug)]
pub enum Measured {
    /// Of classes or next tokens.
    Classes(Scores),
    /// Of numbers.
    Numbers(NumberScores),
    /// Of labels that each hold or not.
    Labels(LabelScores),
}

impl Measured {
    /// Nothing added yet. A row of logits has so many `outputs`; `targets` is how numbers were normalised.
    pub fn new(target: &Target, outputs: usize, targets: Option<&Stats>) -> Measured {
        match target {
            Target::Class { .. } | Target::Tags { .. } => Measured::Classes(Scores::new(outputs, true)),
            Target::NextId => Measured::Classes(Scores::new(outputs, false).next_token()),
            Target::Numbers { n, .. } => {
                Measured::Numbers(NumberScores::new(targets.map_or(vec![1.0; *n], |stats| stats.std.clone())))
            }
            Target::Labels { n, .. } => Measured::Labels(LabelScores::new(*n)),
        }
    }

    /// How many sums a block has beside its losses.
    pub(crate) fn sums(&self) -> usize {
        match self {
            Measured::Classes(_) | Measured::Labels(_) => 0,
            Measured::Numbers(scores) => scores.sums(),
        }
    }

    /// Counts a block of logits and labels; what is not counted but added up is written to `sums`.
    pub(crate) fn add(&mut self, logits: &[f32], labels: Values, sums: &mut [f64]) {
        match (self, labels) {
            (Measured::Classes(scores), Values::I32(labels)) => scores.add(logits, labels, 0.0, 0.0),
            (Measured::Numbers(scores), Values::F32(labels)) => scores.block(logits, labels, sums),
            (Measured::Labels(scores), Values::F32(labels)) => scores.add(logits, labels),
            _ => unreachable!("classes and ids are i32, and numbers and labels f32"),
        }
    }

    /// Adds the losses of a block, their number, and its sums. Blocks come in the order of the set.
    pub(crate) fn add_block(&mut self, loss_sum: f64, n_losses: f64, sums: &[f64]) {
        match self {
            Measured::Classes(scores) => scores.add_losses(loss_sum, n_losses),
            Measured::Numbers(scores) => scores.add_block(loss_sum, n_losses, sums),
            Measured::Labels(scores) => scores.add_losses(loss_sum, n_losses),
        }
    }

    /// Everything that was counted, to be added up over ranks.
    pub(crate) fn counts(&self) -> Vec<i64> {
        match self {
            Measured::Classes(scores) => scores.counts(),
            Measured::Numbers(_) => Vec::new(),
            Measured::Labels(scores) => scores.counts(),
        }
    }

    /// Takes counts over, laid out as [`Measured::counts`] gives them.
    pub(crate) fn set_counts(&mut self, counts: &[i64]) {
        match self {
            Measured::Classes(scores) => scores.set_counts(counts),
            Measured::Numbers(_) => {}
            Measured::Labels(scores) => scores.set_counts(counts),
        }
    }

    /// The metrics under their names: with the prefix `val`, `val_loss` first.
    pub fn named(&self, prefix: &str) -> Vec<(String, f64)> {
        match self {
            Measured::Classes(scores) => scores.named(prefix),
            Measured::Numbers(scores) => scores.named(prefix),
            Measured::Labels(scores) => scores.named(prefix),
        }
    }

    /// Which classes were taken for which, if that was kept.
    pub fn confusion(&self) -> Option<&Confusion> {
        match self {
            Measured::Classes(scores) => scores.confusion(),
            Measured::Numbers(_) | Measured::Labels(_) => None,
        }
    }
}
