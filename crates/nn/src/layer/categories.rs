//! Rows that end with ids of categories: each id is looked up in a table of vectors, which take its place.

use polyreme_graph::{Builder, DType, Tensor, TraceErrorKind, Traced};

use super::Embedding;

/// `embed1`, `embed2`, ..: an [`Embedding`] for each category. The ids come as numbers, after the others of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Categories<'a> {
    /// How many ids each category has.
    pub ids: &'a [usize],
}

impl Categories<'_> {
    /// The length of the vectors of a category with so many ids: it grows with their number, and slower, as fastai's does.
    pub fn vector(ids: usize) -> usize {
        ((1.6 * (ids as f64).powf(0.56)).round() as usize).clamp(1, 50)
    }

    /// How wide rows of `inputs` values become.
    pub fn width(&self, inputs: usize) -> usize {
        let vectors: usize = self.ids.iter().map(|&ids| Categories::vector(ids)).sum();
        inputs.saturating_sub(self.ids.len()).saturating_add(vectors)
    }

    /// `x [n, numbers + ids]` → `[n, numbers + vectors]`; `x` itself if there are no categories.
    pub fn trace(&self, b: &mut Builder, x: Tensor) -> Traced {
        if self.ids.is_empty() {
            return Ok(x);
        }
        let (numbers, vectors) = self.taken_apart(b, x)?;
        let parts: Vec<_> = numbers.into_iter().chain(vectors).collect();
        b.concat(&parts, 1)
    }

    /// `x [n, numbers + ids]` → `[n, numbers]`, or nothing if there are none, and the vectors of each category.
    pub fn taken_apart(&self, b: &mut Builder, x: Tensor) -> Traced<(Option<Tensor>, Vec<Tensor>)> {
        let shape = b.shape(x).clone();
        let (n, numbers) = match *shape.dims() {
            [n, width] if width >= self.ids.len() => (n, width - self.ids.len()),
            _ => {
                let why =
                    format!("[batch, width] is needed, with {} ids at the end of a row", self.ids.len());
                return b.error(TraceErrorKind::Shape { op: "categories", shape, why });
            }
        };
        let rest = match (numbers, self.ids.len()) {
            (0, _) => None,
            (_, 0) => Some(x),
            _ => Some(b.slice(x, 1, 0, numbers)?),
        };
        let mut vectors = Vec::new();
        for (k, &ids) in self.ids.iter().enumerate() {
            let column = b.slice(x, 1, numbers + k, 1)?;
            let column = b.reshape(column, [n])?;
            let column = b.cast(column, DType::I32)?;
            let embedding = Embedding { rows: ids, width: Categories::vector(ids) };
            vectors.push(embedding.trace(b, &format!("embed{}", k + 1), column)?);
        }
        Ok((rest, vectors))
    }
}
