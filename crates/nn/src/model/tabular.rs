//! Residual blocks for rows of a table.
//!
//! The ResNet of "Revisiting Deep Learning Models for Tabular Data" (Gorishniy et al., 2021, RTDL), with three choices of ours:
//! - Numbers have vectors of learnt hinges ([`NumberVectors`]).
//! - Categories with few values come as zeros and ones, which the first layer makes vectors of; those with many have tables
//!   ([`Categories`]), and so have words of texts.
//! - Norms are layer norms, which RTDL's code has as an option, not batch norms: a step is split over ranks and microbatches,
//!   down to a single row, and a row must not depend on which others it came with.

use polyreme_graph::{Builder, Tensor, Traced};

use crate::layer::{Categories, Dropout, LayerNorm, Linear, NumberVectors, TextIds};

/// `numbers`, `embedK` and `wordsK`, `first`, `blocks.K` (`norm`, `up`, ReLU, `down`, added to what came in), `norm`, ReLU, `head`.
#[derive(Clone, PartialEq, Debug)]
pub struct Tabular {
    /// The width of a row.
    pub inputs: usize,
    /// For each category whose id comes after the numbers of a row, how many ids there are; a vector is learnt for each.
    pub categories: Vec<usize>,
    /// The words of texts, whose ids are after those; a vector is learnt for each, and their mean is that of a text.
    pub texts: Vec<TextIds>,
    /// The length of each number's vector; 0: the first layer takes numbers as they are.
    pub embed: usize,
    /// The width of the blocks.
    pub width: usize,
    /// The width between the two linear layers of a block.
    pub hidden: usize,
    /// How many blocks.
    pub layers: usize,
    /// How many classes.
    pub classes: usize,
    /// The dropout probability after each linear layer of a block in training.
    pub dropout: f32,
}

impl Default for Tabular {
    fn default() -> Tabular {
        Tabular {
            inputs: 16,
            categories: Vec::new(),
            texts: Vec::new(),
            embed: 8,
            width: 128,
            hidden: 256,
            layers: 2,
            classes: 10,
            dropout: 0.1,
        }
    }
}

impl Tabular {
    /// `x [n, inputs]` → `[n, classes]`.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let &Tabular { embed, width, hidden, classes, .. } = self;
        let drop = Dropout { p: self.dropout };
        let categories = Categories { ids: &self.categories, texts: &self.texts };
        let (numbers, vectors) = categories.taken_apart(b, x)?;
        let mut parts = Vec::new();
        if let Some(x) = numbers {
            let numbers = b.shape(x).last();
            let vectors = NumberVectors { numbers, width: embed };
            parts.push(if embed > 0 { vectors.trace(b, "numbers", x)? } else { x });
        }
        parts.extend(vectors);
        let x = if let [x] = parts[..] { x } else { b.concat(&parts, 1)? };
        let mut x = Linear::new(b.shape(x).last(), width).trace(b, "first", x)?;
        for k in 0..self.layers {
            x = b.layer(format!("blocks.{k}"), |b| {
                let y = LayerNorm::new(width).trace(b, "norm", x)?;
                let y = Linear::new(width, hidden).trace(b, "up", y)?;
                let y = b.activation("relu", y)?;
                let y = drop.trace(b, "drop1", y, training)?;
                let y = Linear::new(hidden, width).trace(b, "down", y)?;
                let y = drop.trace(b, "drop2", y, training)?;
                b.add(x, y)
            })?;
        }
        let x = LayerNorm::new(width).trace(b, "norm", x)?;
        let x = b.activation("relu", x)?;
        Linear::new(width, classes).trace(b, "head", x)
    }
}
