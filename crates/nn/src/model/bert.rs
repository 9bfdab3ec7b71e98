//! BERT, as Hugging Face's `transformers` has it.
//!
//! Vectors of tokens, positions and types are added and normalised; blocks are normalised after each sum. Names follow
//! [`Gpt2`](super::Gpt2)'s; that `transformers` has queries, keys and values apart and calls everything otherwise is a matter of files
//! (`polyreme-train`'s `pretrained`). It drops attention weights in training; here only embeddings, residual branches and what
//! the head reads are dropped.
//!
//! **Types.** A pair of texts is one sequence, and the type of a token says which of the two it is in. Everything between a file and a
//! model has one input for ids, so the type is in the sign: a token of the second text is `-1 - id`. [`Typed`] takes them apart
//! again by element-wise work that is exact (an f32 has every whole number below 2^24, and vocabularies are smaller).

use polyreme_graph::op::Unary;
use polyreme_graph::{Builder, DType, Init, Tensor, Traced};

use super::sequence;
use crate::layer::{
    Dropout, Embedding, LayerNorm, Linear, Padding, Positions, attend, by_token, divides, mean_time, positive,
};

/// The deviation that BERT's weights begin with.
const STD: f32 = 0.02;

/// What the head of a sequence reads.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Pooling {
    /// BERT's own: the first token, through `pooler` and a tanh.
    #[default]
    First,
    /// The mean over the tokens, as models of sentences have it. There is no `pooler` then.
    Mean,
}

/// `tok`, learnt `pos` and `type`, `ln`, post-norm `blocks.K`, `pooler`, and `head`. By default of the sizes of BERT-base.
#[derive(Clone, PartialEq, Debug)]
pub struct Bert {
    /// The size of the vocabulary.
    pub vocab: usize,
    /// The width of the embeddings.
    pub width: usize,
    /// How many attention heads.
    pub heads: usize,
    /// The width between the two linear layers of a block.
    pub hidden: usize,
    /// How many blocks.
    pub layers: usize,
    /// The longest sequence.
    pub context: usize,
    /// How many types of tokens there are; a pair of texts needs two.
    pub types: usize,
    /// The activation between the two linear layers of a block, by its name in the graph's list.
    pub activation: String,
    /// Added to the variance of layer norms.
    pub eps: f32,
    /// The dropout probability in training.
    pub dropout: f32,
    /// What the head of a sequence reads.
    pub pooling: Pooling,
    /// How many classes.
    pub classes: usize,
    /// The id that fills shorter sequences up; `None`: all are of one length.
    pub padding: Option<usize>,
    /// Whether every token has a class, and not the sequence.
    pub tags: bool,
}

impl Default for Bert {
    fn default() -> Bert {
        Bert {
            vocab: 30_522,
            width: 768,
            heads: 12,
            hidden: 3072,
            layers: 12,
            context: 512,
            types: 2,
            activation: "gelu".into(),
            eps: 1e-12,
            dropout: 0.0,
            pooling: Pooling::First,
            classes: 2,
            padding: None,
            tags: false,
        }
    }
}

/// Ids and types of a batch, taken apart.
struct Typed {
    /// `[batch, time]`, i32.
    ids: Tensor,
    /// `[batch, time]`: 1 for tokens of a second text.
    second: Tensor,
}

impl Typed {
    /// `id` is itself and of type 0, `-1 - id` is `id` of type 1.
    fn of(b: &mut Builder, ids: Tensor) -> Traced<Typed> {
        b.layer("types", |b| {
            let x = b.cast(ids, DType::F32)?;
            let minus = b.scale(x, -1.0)?;
            let second = b.unary(Unary::Clamp(0.0, 1.0), minus)?;
            let apart = b.unary(Unary::Abs, x)?;
            let id = b.sub(apart, second)?;
            Ok(Typed { ids: b.cast(id, DType::I32)?, second })
        })
    }
}

impl Bert {
    /// Whether there is a `pooler`.
    pub fn has_pooler(&self) -> bool {
        !self.tags && self.pooling == Pooling::First
    }

    /// `ids [b, t]` → `[b, classes]`, or `[b·t, classes]` where every token has a class.
    pub fn logits(&self, b: &mut Builder, ids: Tensor, training: bool) -> Traced {
        let &Bert { width, dropout, classes, .. } = self;
        let normal = Init::Normal { std: STD };
        let padding = self.padding.map(|id| Padding::of(b, ids, id)).transpose()?;
        let x = self.hidden_states(b, ids, padding, training)?;
        let x = match (self.tags, self.pooling) {
            (true, _) => by_token(b, x)?,
            (false, Pooling::Mean) => mean_time(b, x, padding)?,
            (false, Pooling::First) => {
                let batch = b.dims(x)[0];
                let first = b.slice(x, 1, 0, 1)?;
                let first = b.reshape(first, [batch, width])?;
                let pooled = Linear::new(width, width).trace_from(b, "pooler", first, normal)?;
                b.activation("tanh", pooled)?
            }
        };
        let x = Dropout { p: dropout }.trace(b, "drop_head", x, training)?;
        Linear::new(width, classes).trace_from(b, "head", x, normal)
    }

    /// `ids [b, t]` → `[b, width]`: the mean of the last hidden states over the tokens of each sequence, without a head.
    pub fn embeddings(&self, b: &mut Builder, ids: Tensor) -> Traced {
        let padding = self.padding.map(|id| Padding::of(b, ids, id)).transpose()?;
        let x = self.hidden_states(b, ids, padding, false)?;
        mean_time(b, x, padding)
    }

    /// `ids [b, t]` → `[b, t, width]`.
    fn hidden_states(
        &self,
        b: &mut Builder,
        ids: Tensor,
        padding: Option<Padding>,
        training: bool,
    ) -> Traced {
        let &Bert { vocab, width, layers, context, eps, dropout, .. } = self;
        let normal = Init::Normal { std: STD };
        sequence(b, ids)?;
        let hidden_keys = padding.map(|padding| padding.scores(b)).transpose()?;
        let Typed { ids, second } = Typed::of(b, ids)?;
        let (mut x, _) = Embedding { rows: vocab, width }.trace_shared(b, "tok", ids, normal)?;
        x = Positions { context, width }.trace_from(b, "pos", x, normal)?;
        x = self.add_types(b, x, second)?;
        x = LayerNorm { width, eps }.trace(b, "ln", x)?;
        x = Dropout { p: dropout }.trace(b, "drop", x, training)?;
        for k in 0..layers {
            x = b.layer(format!("blocks.{k}"), |b| self.block(b, x, hidden_keys, training))?;
        }
        Ok(x)
    }

    /// `x + type[0] + second · (type[1] - type[0])`. With one type all tokens are of it.
    fn add_types(&self, b: &mut Builder, x: Tensor, second: Tensor) -> Traced {
        let &Bert { width, types, .. } = self;
        b.layer("type", |b| {
            positive(b, "types", &[("types", types)])?;
            let dims = b.dims(second);
            let table = b.param("weight", [types, width], Init::Normal { std: STD })?;
            let first = b.slice(table, 0, 0, 1)?;
            let first = b.reshape(first, [1, 1, width])?;
            let x = b.add(x, first)?;
            if types == 1 {
                return Ok(x);
            }
            let other = b.slice(table, 0, 1, 1)?;
            let other = b.reshape(other, [1, 1, width])?;
            let apart = b.sub(other, first)?;
            let second = b.reshape(second, [dims[0], dims[1], 1])?;
            let more = b.mul(second, apart)?;
            b.add(x, more)
        })
    }

    /// `ln1(x + proj(attention(qkv(x))))`, then `ln2(x + down(activation(up(x))))`.
    fn block(&self, b: &mut Builder, x: Tensor, mask: Option<Tensor>, training: bool) -> Traced {
        let &Bert { width, heads, hidden, eps, dropout, .. } = self;
        let (drop, norm) = (Dropout { p: dropout }, LayerNorm { width, eps });
        let normal = Init::Normal { std: STD };
        divides(b, "attention", ("heads", heads), ("width", width))?;
        let a = Linear::new(width, 3 * width).trace_from(b, "qkv", x, normal)?;
        let a = attend(b, a, heads, false, mask)?;
        let a = Linear::new(width, width).trace_from(b, "proj", a, normal)?;
        let a = drop.trace(b, "drop1", a, training)?;
        let x = b.add(x, a)?;
        let x = norm.trace(b, "ln1", x)?;
        let f = Linear::new(width, hidden).trace_from(b, "up", x, normal)?;
        let f = b.activation(&self.activation, f)?;
        let f = Linear::new(hidden, width).trace_from(b, "down", f, normal)?;
        let f = drop.trace(b, "drop2", f, training)?;
        let x = b.add(x, f)?;
        norm.trace(b, "ln2", x)
    }
}
