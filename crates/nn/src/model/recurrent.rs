//! A classifier of sequences by LSTM or GRU.

use polyreme_graph::op::Cell;
use polyreme_graph::{Builder, Tensor, Traced};

use super::sequence;
use crate::layer::{Embedding, Linear, Padding, Recurrent, by_token, last_step, mean_time, positive};

/// `embed`, `lstm` or `gru`, and `head` on the last time step; in both directions, on the mean over time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RecurrentClassifier {
    /// LSTM or GRU.
    pub cell: Cell,
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The width of the embeddings.
    pub width: usize,
    /// The width of the hidden state.
    pub hidden: usize,
    /// How many recurrent layers.
    pub layers: usize,
    /// Whether they also run backwards in time.
    pub bidirectional: bool,
    /// The length of sequences by default; not a limit.
    pub context: usize,
    /// The dropout probability between recurrent layers in training.
    pub dropout: f32,
    /// How many classes.
    pub classes: usize,
    /// The id that fills shorter sequences up; `None`: all are of one length.
    pub padding: Option<usize>,
    /// Whether every token has a class, and not the sequence.
    pub tags: bool,
}

impl Default for RecurrentClassifier {
    fn default() -> RecurrentClassifier {
        let (cell, bidirectional) = (Cell::Lstm, false);
        RecurrentClassifier {
            cell,
            vocab: 64,
            width: 32,
            hidden: 48,
            layers: 2,
            bidirectional,
            context: 20,
            dropout: 0.0,
            classes: 5,
            padding: None,
            tags: false,
        }
    }
}

impl RecurrentClassifier {
    /// `ids [b, t]` → `[b, classes]`.
    pub fn logits(&self, b: &mut Builder, ids: Tensor, training: bool) -> Traced {
        let &RecurrentClassifier { cell, vocab, width, hidden, layers, bidirectional, dropout, .. } = self;
        let [_, t] = sequence(b, ids)?;
        positive(b, "ids", &[("time", t)])?;
        let name = match cell {
            Cell::Lstm => "lstm",
            Cell::Gru => "gru",
        };
        let recurrent = Recurrent { layers, bidirectional, dropout, ..Recurrent::new(cell, width, hidden) };
        let padding = self.padding.map(|id| Padding::of(b, ids, id)).transpose()?;
        let x = Embedding { rows: vocab, width }.trace(b, "embed", ids)?;
        let y = recurrent.trace(b, name, x, padding, training)?;
        let y = match () {
            () if self.tags => by_token(b, y)?,
            () if bidirectional => mean_time(b, y, padding)?,
            () => last_step(b, y, padding)?,
        };
        Linear::new(recurrent.outputs(), self.classes).trace(b, "head", y)
    }
}
