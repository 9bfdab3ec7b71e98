//! A classifier of sequences by a transformer encoder.

use polyreme_graph::{Builder, Tensor, Traced};

use super::sequence;
use crate::layer::{
    Embedding, LayerNorm, Linear, Padding, Positions, TransformerEncoderLayer, by_token, mean_time,
};

/// `tok` and learnt `pos`, pre-norm `encoder.layers.K` with GELU, `norm`, and `head` on the mean over time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EncoderClassifier {
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The width of the embeddings.
    pub width: usize,
    /// How many attention heads.
    pub heads: usize,
    /// The width between the linear layers of an encoder layer.
    pub hidden: usize,
    /// How many encoder layers.
    pub layers: usize,
    /// The longest sequence.
    pub context: usize,
    /// The dropout probability in training.
    pub dropout: f32,
    /// How many classes.
    pub classes: usize,
    /// The id that fills shorter sequences up; `None`: all are of one length.
    pub padding: Option<usize>,
    /// Whether every token has a class, and not the sequence.
    pub tags: bool,
}

impl Default for EncoderClassifier {
    fn default() -> EncoderClassifier {
        let (vocab, width, heads, hidden, layers, context) = (64, 64, 4, 128, 2, 32);
        EncoderClassifier {
            vocab,
            width,
            heads,
            hidden,
            layers,
            context,
            dropout: 0.0,
            classes: 5,
            padding: None,
            tags: false,
        }
    }
}

impl EncoderClassifier {
    /// `ids [b, t]` → `[b, classes]`.
    pub fn logits(&self, b: &mut Builder, ids: Tensor, training: bool) -> Traced {
        let &EncoderClassifier { vocab, width, heads, hidden, context, dropout, .. } = self;
        let layer = TransformerEncoderLayer {
            activation: "gelu".into(),
            dropout,
            norm_first: true,
            ..TransformerEncoderLayer::new(width, heads, hidden)
        };
        sequence(b, ids)?;
        let padding = self.padding.map(|id| Padding::of(b, ids, id)).transpose()?;
        let hidden_keys = padding.map(|padding| padding.scores(b)).transpose()?;
        let mut x = Embedding { rows: vocab, width }.trace(b, "tok", ids)?;
        x = Positions { context, width }.trace(b, "pos", x)?;
        for k in 0..self.layers {
            x = layer.trace(b, &format!("encoder.layers.{k}"), x, hidden_keys, training)?;
        }
        x = LayerNorm::new(width).trace(b, "norm", x)?;
        x = if self.tags { by_token(b, x)? } else { mean_time(b, x, padding)? };
        Linear::new(width, self.classes).trace(b, "head", x)
    }
}
