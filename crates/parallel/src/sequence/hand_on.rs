//! Recurrent layers of sequences that are cut over the ranks: the state is handed on from rank to rank.
//!
//! ```text
//! forward     rank 0 runs its piece from the initial state, and sends its last (h, c) to rank 1, which begins with it, …
//! backward    the last rank begins; each sends the gradients of the state that it began with to the rank before
//! ```
//!
//! A layer that runs from the end goes the other way round. Each rank waits for the one before in each layer: `R` ranks hold
//! sequences `R` times as long, in the time that one would take for them; where a layer is one of several, or a step one of
//! several microbatches, ranks work at the same time. A message is the state of the samples, whatever the length of the sequence.

use polyreme_graph::op::{Cell, ExchangeKind};
use polyreme_graph::{Axis, Op, ValueId};

use super::convert::Nodes;

/// A recurrent layer, and in which direction it runs.
#[derive(Clone, Copy)]
pub(super) struct Layer {
    pub(super) cell: Cell,
    pub(super) reverse: bool,
}

/// What a rank computes of a layer.
pub(super) struct Handed {
    /// Its results.
    pub(super) outputs: Vec<ValueId>,
    /// Forward, the states that it began with.
    pub(super) initial: Vec<ValueId>,
    /// What it sent, if anything; no other node needs that.
    pub(super) sent: Option<ValueId>,
}

impl Layer {
    fn n_states(self) -> usize {
        match self.cell {
            Cell::Lstm => 2,
            Cell::Gru => 1,
        }
    }

    /// The ranks before and after this one, in the order in which the layer runs.
    fn neighbours(self, nodes: &Nodes) -> [Option<usize>; 2] {
        let (rank, ranks) = (nodes.place.rank, nodes.place.ranks);
        let (lower, upper) = (rank.checked_sub(1), Some(rank + 1).filter(|r| *r < ranks));
        if self.reverse { [upper, lower] } else { [lower, upper] }
    }

    /// `x` are the operands of [`Op::Recurrent`]: this rank's piece of the sequence, weights, and the initial state.
    pub(super) fn forward(self, nodes: &mut Nodes, x: &[ValueId]) -> Handed {
        let [before, after] = self.neighbours(nodes);
        let initial = self.receive(nodes, before, &x[3..]).unwrap_or_else(|| x[3..].to_vec());
        let op = Op::Recurrent { cell: self.cell, reverse: self.reverse };
        let outputs = nodes.push_all(op, &[&x[..3], &initial].concat());
        let sent = after.map(|to| {
            let last = outputs[..self.n_states()].to_vec();
            let last = last.into_iter().map(|y| self.last_step(nodes, y)).collect();
            send(nodes, to, last)
        });
        Handed { outputs, initial, sent }
    }

    /// `x` are the operands of [`Op::RecurrentGrad`], with the state that the rank began with.
    pub(super) fn backward(self, nodes: &mut Nodes, x: &[ValueId]) -> Handed {
        let [before, after] = self.neighbours(nodes);
        let mut operands = x.to_vec();
        operands.extend(self.receive(nodes, after, &x[2..2 + self.n_states()]).unwrap_or_default());
        let op = Op::RecurrentGrad { cell: self.cell, reverse: self.reverse };
        let mut outputs = nodes.push_all(op, &operands);
        let sent = before.map(|to| send(nodes, to, outputs[3..].to_vec()));
        if sent.is_some() {
            // The initial state of the whole sequence has no gradient here.
            for d in &mut outputs[3..] {
                let (shape, dtype) = (nodes.graph.shape(*d).clone(), nodes.graph.value(*d).dtype);
                *d = nodes.zeros(shape, dtype);
            }
        }
        Handed { outputs, initial: Vec::new(), sent }
    }

    /// `[b, h]` of the step after which the sequence goes on elsewhere.
    fn last_step(self, nodes: &mut Nodes, y: ValueId) -> ValueId {
        let &[b, t, h] = nodes.graph.shape(y).dims() else { unreachable!("states of a sequence") };
        let step = nodes.slice(y, 1, if self.reverse { 0 } else { t - 1 }, 1);
        nodes.reshape(step, [b, h].into())
    }

    /// States, or their gradients, as another rank sends them; `like` have their shapes.
    fn receive(self, nodes: &mut Nodes, from: Option<usize>, like: &[ValueId]) -> Option<Vec<ValueId>> {
        let from = from?;
        let h = nodes.graph.shape(like[0]).last();
        let like = joined(nodes, like.to_vec());
        let kind = ExchangeKind::Pass { to: None, from: Some(from) };
        let all = nodes.push(Op::Exchange { axis: Axis::Sequence, kind }, &[like]);
        Some((0..self.n_states()).map(|k| nodes.slice(all, 1, k * h, h)).collect())
    }
}

/// Sends states, or their gradients, as one message.
fn send(nodes: &mut Nodes, to: usize, states: Vec<ValueId>) -> ValueId {
    let all = joined(nodes, states);
    let kind = ExchangeKind::Pass { to: Some(to), from: None };
    nodes.push(Op::Exchange { axis: Axis::Sequence, kind }, &[all])
}

fn joined(nodes: &mut Nodes, states: Vec<ValueId>) -> ValueId {
    match states[..] {
        [one] => one,
        _ => nodes.push(Op::Concat { axis: 1 }, &states),
    }
}
