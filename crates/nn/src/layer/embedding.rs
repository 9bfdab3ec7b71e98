//! Tables of vectors: looked up by id, or taken in order as positions.

use polyreme_graph::{Builder, Init, Tensor, TraceErrorKind, Traced};

use super::positive;

/// PyTorch's default.
const UNIT: Init = Init::Normal { std: 1.0 };

/// `torch.nn.Embedding`: `weight [rows, width]`. There is no row for padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Embedding {
    /// How many ids there are.
    pub rows: usize,
    /// The length of each vector.
    pub width: usize,
}

impl Embedding {
    /// Integer ids of any shape → `[ids.., width]`.
    pub fn trace(&self, b: &mut Builder, name: &str, ids: Tensor) -> Traced {
        b.layer(name, |b| {
            let table = self.table(b, UNIT)?;
            b.embedding(ids, table)
        })
    }

    /// The same with a table that begins as `init` says, and the table, for layers that share it.
    pub fn trace_shared(
        &self,
        b: &mut Builder,
        name: &str,
        ids: Tensor,
        init: Init,
    ) -> Traced<(Tensor, Tensor)> {
        b.layer(name, |b| {
            let table = self.table(b, init)?;
            Ok((b.embedding(ids, table)?, table))
        })
    }

    fn table(&self, b: &mut Builder, init: Init) -> Traced {
        positive(b, "embedding", &[("rows", self.rows), ("width", self.width)])?;
        b.param("weight", [self.rows, self.width], init)
    }
}

/// Learnt positions: `x + Embedding(context, width)(0..t)`, with the embedding's `weight [context, width]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Positions {
    /// The longest sequence.
    pub context: usize,
    /// The length of each vector.
    pub width: usize,
}

impl Positions {
    /// `[batch, time, width]` → the same; `time` is at most the context.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        self.trace_from(b, name, x, UNIT)
    }

    /// The same with a table that begins as `init` says.
    pub fn trace_from(&self, b: &mut Builder, name: &str, x: Tensor, init: Init) -> Traced {
        let &Positions { context, width } = self;
        b.layer(name, |b| {
            let shape = b.shape(x).clone();
            let &[_, t, _] = shape.dims() else {
                let why = "3 dims are needed: [batch, time, width]".into();
                return b.error(TraceErrorKind::Shape { op: "positions", shape, why });
            };
            if t > context {
                let why = format!("the sequence of {t} is longer than the context of {context}");
                return b.error(TraceErrorKind::Shape { op: "positions", shape, why });
            }
            let table = Embedding { rows: context, width }.table(b, init)?;
            let rows = if t < context { b.slice(table, 0, 0, t)? } else { table };
            b.add(x, rows)
        })
    }
}
