//! Rows that end with ids of categories, and after them ids of the words of texts: each id is looked up in a table of vectors, which
//! take its place. A text becomes the mean of the vectors of its words, one vector however many there are.
//!
//! Texts differ in length and are filled up with [`NO_WORD`], which counts for nothing in that mean; a text without words becomes zeros.

use polyreme_graph::{Builder, DType, Tensor, TraceErrorKind, Traced};

use super::{Embedding, Padding, mean_time};

/// The id that fills texts up; words have the ids after it.
pub const NO_WORD: usize = 0;

/// The ids of a text in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextIds {
    /// How many ids there are, with [`NO_WORD`].
    pub ids: usize,
    /// How many places it has in a row.
    pub length: usize,
}

/// `embed1`, `embed2`, ..: an [`Embedding`] for each category; `words1`, `words2`, ..: one for each text. The ids come as numbers,
/// after the others of a row, those of texts last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Categories<'a> {
    /// How many ids each category has.
    pub ids: &'a [usize],
    /// The ids of each text.
    pub texts: &'a [TextIds],
}

impl Categories<'_> {
    /// The length of the vectors of a category with so many ids: it grows with their number, and slower, as fastai's does. The same
    /// for words.
    pub fn vector(ids: usize) -> usize {
        ((1.6 * (ids as f64).powf(0.56)).round() as usize).clamp(1, 50)
    }

    /// How many values of a row are ids.
    fn n_ids(&self) -> usize {
        self.texts.iter().fold(self.ids.len(), |n, text| n.saturating_add(text.length))
    }

    /// How wide rows of `inputs` values become.
    pub fn width(&self, inputs: usize) -> usize {
        let tables = self.ids.iter().copied().chain(self.texts.iter().map(|text| text.ids));
        let vectors: usize = tables.map(Categories::vector).sum();
        inputs.saturating_sub(self.n_ids()).saturating_add(vectors)
    }

    /// `x [n, numbers + ids]` → `[n, numbers + vectors]`; `x` itself if there are no ids.
    pub fn trace(&self, b: &mut Builder, x: Tensor) -> Traced {
        if self.n_ids() == 0 {
            return Ok(x);
        }
        let (numbers, vectors) = self.taken_apart(b, x)?;
        let parts: Vec<_> = numbers.into_iter().chain(vectors).collect();
        if let [only] = parts[..] { Ok(only) } else { b.concat(&parts, 1) }
    }

    /// `x [n, numbers + ids]` → `[n, numbers]`, or nothing if there are none, and the vectors of each category and text.
    pub fn taken_apart(&self, b: &mut Builder, x: Tensor) -> Traced<(Option<Tensor>, Vec<Tensor>)> {
        let (shape, n_ids) = (b.shape(x).clone(), self.n_ids());
        let (n, numbers) = match *shape.dims() {
            [n, width] if width >= n_ids => (n, width - n_ids),
            _ => {
                let why = format!("[batch, width] is needed, with {n_ids} ids at the end of a row");
                return b.error(TraceErrorKind::Shape { op: "categories", shape, why });
            }
        };
        let rest = match (numbers, n_ids) {
            (0, _) => None,
            (_, 0) => Some(x),
            _ => Some(b.slice(x, 1, 0, numbers)?),
        };
        let (mut vectors, mut at) = (Vec::new(), numbers);
        // Ids become integers before anything else is done to them: half a float has no room for those above 256.
        let mut ids_of = |b: &mut Builder, length: usize| {
            let ids = b.slice(x, 1, at, length)?;
            at += length;
            b.cast(ids, DType::I32)
        };
        for (k, &ids) in self.ids.iter().enumerate() {
            let column = ids_of(b, 1)?;
            let column = b.reshape(column, [n])?;
            let embedding = Embedding { rows: ids, width: Categories::vector(ids) };
            vectors.push(embedding.trace(b, &format!("embed{}", k + 1), column)?);
        }
        for (k, text) in self.texts.iter().enumerate() {
            let words = ids_of(b, text.length)?;
            let padding = Padding::of(b, words, NO_WORD)?;
            let embedding = Embedding { rows: text.ids, width: Categories::vector(text.ids) };
            let words = embedding.trace(b, &format!("words{}", k + 1), words)?;
            vectors.push(mean_time(b, words, Some(padding))?);
        }
        Ok((rest, vectors))
    }
}
