//! LSTM and GRU layers over whole sequences, batch first.

use polyreme_graph::op::Cell;
use polyreme_graph::{Builder, Tensor, Traced};

use super::{Dropout, Padding, positive, uniform};

/// `torch.nn.LSTM` or `torch.nn.GRU` with `batch_first=True`, from a zero state. For layer `k`: `weight_ih_lk
/// [gates·hidden, inputs]`, `weight_hh_lk [gates·hidden, hidden]`, `bias_ih_lk` and `bias_hh_lk [gates·hidden]`, and
/// the same with the suffix `_reverse` for the other direction. Gates are in PyTorch's order.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Recurrent {
    /// LSTM or GRU.
    pub cell: Cell,
    /// The width of the input sequence.
    pub inputs: usize,
    /// The width of the hidden state.
    pub hidden: usize,
    /// How many stacked layers.
    pub layers: usize,
    /// Whether each layer also runs backwards in time; the outputs are concatenated.
    pub bidirectional: bool,
    /// The dropout probability between layers in training.
    pub dropout: f32,
}

impl Recurrent {
    /// One layer in one direction.
    pub fn new(cell: Cell, inputs: usize, hidden: usize) -> Recurrent {
        Recurrent { cell, inputs, hidden, layers: 1, bidirectional: false, dropout: 0.0 }
    }
    /// The width of the output sequence.
    pub fn outputs(&self) -> usize {
        self.hidden * (1 + usize::from(self.bidirectional))
    }

    /// `[batch, time, inputs]` → `[batch, time, outputs]`. What comes out at padded positions means nothing.
    pub fn trace(
        &self,
        b: &mut Builder,
        name: &str,
        x: Tensor,
        padding: Option<Padding>,
        training: bool,
    ) -> Traced {
        b.layer(name, |b| {
            let sizes = [("inputs", self.inputs), ("hidden", self.hidden), ("layers", self.layers)];
            positive(b, "recurrent", &sizes)?;
            let mut y = x;
            for k in 0..self.layers {
                if k > 0 {
                    y = Dropout { p: self.dropout }.trace(b, &format!("dropout_l{}", k - 1), y, training)?;
                }
                let inputs = if k == 0 { self.inputs } else { self.outputs() };
                let forward = self.direction(b, y, inputs, k, None)?;
                y = if self.bidirectional {
                    let backward = self.direction(b, y, inputs, k, Some(padding))?;
                    b.concat(&[forward, backward], 2)?
                } else {
                    forward
                };
            }
            Ok(y)
        })
    }

    /// Layer `k` in one direction; `reverse` is what it meets first if it runs backwards in time.
    fn direction(
        &self,
        b: &mut Builder,
        x: Tensor,
        inputs: usize,
        k: usize,
        reverse: Option<Option<Padding>>,
    ) -> Traced {
        let (h, gates) = (self.hidden, self.cell.gates() * self.hidden);
        let suffix = if reverse.is_some() { "_reverse" } else { "" };
        let init = uniform(h);
        let w_ih = b.param(&format!("weight_ih_l{k}{suffix}"), [gates, inputs], init)?;
        let w_hh = b.param(&format!("weight_hh_l{k}{suffix}"), [gates, h], init)?;
        let b_ih = b.param(&format!("bias_ih_l{k}{suffix}"), [gates], init)?;
        let b_hh = b.param(&format!("bias_hh_l{k}{suffix}"), [gates], init)?;
        // The input projection is one product for all time steps; only the recurrent part is sequential.
        let xp = b.linear(x, w_ih, Some(b_ih))?;
        let xp = match reverse.flatten() {
            Some(padding) => padding.closed(b, self.cell, xp)?,
            None => xp,
        };
        b.recurrent(self.cell, xp, w_hh, b_hh, &[], reverse.is_some())
    }
}
