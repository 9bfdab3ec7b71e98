//! Linear layers, one after another.

use polyreme_graph::{Builder, Tensor, Traced};

use crate::layer::{Categories, Dropout, Linear, TextIds};

/// `fc1`, `fc2`, ..: linear layers with an activation between, after `embedK` and `wordsK` where rows have ids. By default 784-512-512-10 with ReLU.
#[derive(Clone, PartialEq, Debug)]
pub struct Mlp {
    /// The width of a row.
    pub inputs: usize,
    /// For each category whose id comes after the numbers of a row, how many ids there are; a vector is learnt for each.
    pub categories: Vec<usize>,
    /// The words of texts, whose ids are after those; a vector is learnt for each, and their mean is that of a text.
    pub texts: Vec<TextIds>,
    /// The widths of the hidden layers.
    pub hidden: Vec<usize>,
    /// How many classes.
    pub classes: usize,
    /// The activation between the layers, by its name in the graph's list.
    pub activation: String,
    /// The dropout probability after each activation in training.
    pub dropout: f32,
}

impl Default for Mlp {
    fn default() -> Mlp {
        Mlp {
            inputs: 784,
            categories: Vec::new(),
            texts: Vec::new(),
            hidden: vec![512, 512],
            classes: 10,
            activation: "relu".into(),
            dropout: 0.0,
        }
    }
}

impl Mlp {
    /// `x [n, inputs]` → `[n, classes]`.
    pub fn logits(&self, b: &mut Builder, x: Tensor, training: bool) -> Traced {
        let drop = Dropout { p: self.dropout };
        let categories = Categories { ids: &self.categories, texts: &self.texts };
        let (mut x, mut width) = (categories.trace(b, x)?, categories.width(self.inputs));
        for (i, &next) in self.hidden.iter().enumerate() {
            x = Linear::new(width, next).trace(b, &format!("fc{}", i + 1), x)?;
            x = b.activation(&self.activation, x)?;
            x = drop.trace(b, &format!("drop{}", i + 1), x, training)?;
            width = next;
        }
        Linear::new(width, self.classes).trace(b, &format!("fc{}", self.hidden.len() + 1), x)
    }
}
