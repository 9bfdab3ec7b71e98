//! Texts with labels: a column of a table (or several, a text each) as token ids.
//!
//! Texts differ in length. A sample is its tokens; a batch fills shorter ones up with an id of its own, the padding, which models
//! take out again. How far is chosen from a few lengths, so that there is one program for each and little is computed for
//! padding: [`choose_times`]. A text that is longer than the longest of them is cut at its end.
//!
//! Several columns are one sample: their tokens one after another, with an id of its own between two. If they are too long
//! together, tokens are taken from the end of the longest of them.
//!
//! Ids: those of the tokenizer come first; then, if it has none, the padding; then, if there are several columns, what stands between.

use std::path::PathBuf;
use std::sync::Arc;

use super::text::{Heading, Row, Text};
use crate::bpe::Tokenizer;
use crate::error::DataError;
use crate::spec::Features;

/// The longest text where nothing else is said.
pub const LENGTH: usize = 512;
/// How many lengths there are to fill texts up to, where nothing else is said.
const BUCKETS: usize = 4;
/// Lengths that are chosen are multiples of this, but for the longest.
const ROUND: usize = 8;
/// How many lengths a choice is made from.
const CANDIDATES: usize = 64;

/// Which columns of a table are texts, and how they are read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TextChoice {
    /// Their names, or numbers from 0; empty: the table has no texts.
    pub columns: Vec<String>,
    /// `tokenizer.json`; `None`: bytes are tokens.
    pub tokenizer: Option<PathBuf>,
    /// The most tokens of a sample; `None`: as many as the longest has, and at most [`LENGTH`].
    pub length: Option<usize>,
    /// How many lengths there are to fill texts up to.
    pub buckets: usize,
}

impl Default for TextChoice {
    fn default() -> TextChoice {
        TextChoice { columns: Vec::new(), tokenizer: None, length: None, buckets: BUCKETS }
    }
}

/// The columns of a table that are texts, ready to be read.
#[derive(Clone, Debug)]
pub struct TextColumns {
    /// Their names, or numbers from 0.
    pub columns: Vec<String>,
    /// What makes tokens of them.
    pub tokenizer: Arc<Tokenizer>,
    /// The most tokens of a sample.
    pub length: usize,
    /// The lengths that texts are filled up to, of a model that was trained before; empty: one, that of the longest text.
    pub times: Vec<usize>,
}

impl PartialEq for TextColumns {
    fn eq(&self, other: &TextColumns) -> bool {
        let same = Arc::ptr_eq(&self.tokenizer, &other.tokenizer);
        same && (&self.columns, self.length, &self.times) == (&other.columns, other.length, &other.times)
    }
}

impl TextColumns {
    /// The id that fills texts up.
    pub fn padding(&self) -> usize {
        self.tokenizer.padding().unwrap_or(self.tokenizer.vocab())
    }

    /// What stands between the texts of several columns.
    fn separator(&self) -> usize {
        self.padding().max(self.tokenizer.vocab() - 1) + 1
    }

    /// How many ids there are.
    pub fn vocab(&self) -> usize {
        self.separator() + usize::from(self.columns.len() > 1)
    }

    /// Where the columns are in a file.
    pub(super) fn fields(
        &self,
        text: &Text,
        heading: &Heading,
        labels: &[usize],
    ) -> Result<Vec<usize>, DataError> {
        let mut fields = Vec::new();
        for name in &self.columns {
            let field = heading.label(text, name)?;
            if labels.contains(&field) {
                let why =
                    format!("column {name:?} is the text and the label; name the label's with `data.label`");
                return Err(text.error(0, field, &why));
            }
            if fields.contains(&field) {
                return Err(text.error(0, field, &format!("`data.text` names column {name:?} twice")));
            }
            fields.push(field);
        }
        Ok(fields)
    }

    /// The tokens of a row, cut to the longest that there may be.
    fn tokens(&self, row: &Row, fields: &[usize]) -> Result<(Vec<i32>, bool), DataError> {
        let mut parts = Vec::with_capacity(fields.len());
        for &field in fields {
            let bytes = row.field(field);
            let ids = match self.tokenizer.is_bytes() {
                true => bytes.iter().map(|&byte| i32::from(byte)).collect(),
                false => {
                    let what =
                        "is not UTF-8; convert the file, or leave out `data.tokenizer` to learn from bytes";
                    let text = str::from_utf8(bytes).map_err(|_| row.wrong(field, what))?;
                    self.tokenizer.encode(text)
                }
            };
            parts.push(ids);
        }
        if parts.iter().all(Vec::is_empty) {
            let why = "has no tokens, and there is nothing to learn from or to predict; fill it, or leave out the row";
            return Err(row.wrong(fields[0], why));
        }
        let room = self.length.saturating_sub(parts.len() - 1).max(1);
        let cut = shorten(&mut parts, room);
        // The separator is below 2^31: it is a size of a table in memory.
        Ok((parts.join(&(self.separator() as i32)), cut))
    }
}

/// Takes tokens from the end of the longest part until there are at most `room`; whether any were.
fn shorten(parts: &mut [Vec<i32>], room: usize) -> bool {
    let total: usize = parts.iter().map(Vec::len).sum();
    if total <= room {
        return false;
    }
    // The most that each may have: parts that are shorter leave the rest to the others.
    let mut lengths: Vec<usize> = parts.iter().map(Vec::len).collect();
    lengths.sort_unstable();
    let (mut left, mut most) = (room, room);
    for (k, length) in lengths.iter().enumerate() {
        most = left / (lengths.len() - k);
        if *length > most {
            break;
        }
        left -= length;
    }
    parts.iter_mut().for_each(|part| part.truncate(most.max(1)));
    true
}

/// The token ids of all rows.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenRows {
    ids: Vec<i32>,
    /// Where each row ends.
    ends: Vec<usize>,
    /// How many rows were cut.
    pub(super) cut: usize,
}

impl TokenRows {
    /// Adds a row.
    pub(super) fn push(
        &mut self,
        columns: &TextColumns,
        row: &Row,
        fields: &[usize],
    ) -> Result<(), DataError> {
        let (ids, cut) = columns.tokens(row, fields)?;
        self.ids.extend_from_slice(&ids);
        self.ends.push(self.ids.len());
        self.cut += usize::from(cut);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn row(&self, idx: usize) -> &[i32] {
        let start = if idx == 0 { 0 } else { self.ends[idx - 1] };
        &self.ids[start..self.ends[idx]]
    }

    /// The tokens of each row.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        (0..self.len()).map(|idx| self.row(idx).len())
    }

    /// What a sample is.
    pub(super) fn features(&self, columns: &TextColumns) -> Features {
        let times = match columns.times.is_empty() {
            true => vec![self.lengths().max().unwrap_or(1)],
            false => columns.times.clone(),
        };
        Features::Texts { times, vocab: columns.vocab(), padding: columns.padding() }
    }
}

/// At most `n` lengths to fill texts of these lengths up to, ascending, such that together they are filled up least. The
/// last is that of the longest text.
pub fn choose_times(lengths: impl Iterator<Item = usize> + Clone, n: usize) -> Vec<usize> {
    let longest = lengths.clone().max().unwrap_or(1).max(1);
    let unit = longest.div_ceil(CANDIDATES).next_multiple_of(ROUND);
    let units = longest.div_ceil(unit);
    let time = |k: usize| (k * unit).min(longest);
    // By units, how many texts are no longer.
    let mut up_to = vec![0_u64; units + 1];
    lengths.for_each(|length| up_to[length.div_ceil(unit)] += 1);
    (1..=units).for_each(|k| up_to[k] += up_to[k - 1]);
    // The least number of positions of texts of up to k units with m lengths, of which k is the last; and the one before it.
    let n = n.clamp(1, units);
    let mut best = vec![vec![(u64::MAX, 0); units + 1]; n + 1];
    best[0][0] = (0, 0);
    for m in 1..=n {
        for k in 1..=units {
            let from = |j: usize| {
                let before = best[m - 1][j].0;
                let own = (up_to[k] - up_to[j]) * time(k) as u64;
                (before != u64::MAX).then(|| (before + own, j))
            };
            best[m][k] = (0..k).filter_map(from).min().unwrap_or((u64::MAX, 0));
        }
    }
    let mut m = (1..=n).min_by_key(|m| (best[*m][units].0, *m)).unwrap_or(1);
    let (mut k, mut times) = (units, Vec::new());
    while m > 0 && k > 0 {
        times.push(time(k));
        (k, m) = (best[m][k].1, m - 1);
    }
    times.reverse();
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions of texts that are filled up to these lengths.
    fn positions(lengths: &[usize], times: &[usize]) -> usize {
        lengths.iter().map(|n| *times.iter().find(|time| *time >= n).expect("the last is the longest")).sum()
    }

    #[test]
    fn lengths_are_chosen_that_fill_up_least() {
        let lengths: Vec<usize> =
            (0..500).map(|i| 1 + (i * i * 7 + i) % (if i % 10 == 0 { 300 } else { 40 })).collect();
        let times = |n: usize| choose_times(lengths.iter().copied(), n);
        let longest = *lengths.iter().max().unwrap();
        let mut last = usize::MAX;
        for n in 1..=6 {
            let times = times(n);
            assert!(times.len() <= n && times.is_sorted() && times.last() == Some(&longest), "{times:?}");
            assert!(times.iter().rev().skip(1).all(|t| t.is_multiple_of(ROUND)), "{times:?}");
            let now = positions(&lengths, &times);
            assert!(now < last, "{n}: {times:?}");
            last = now;
        }
        // The slow twin tries all.
        let best = (8..longest).step_by(8).map(|t| positions(&lengths, &[t, longest])).min();
        assert_eq!(best, Some(positions(&lengths, &times(2))));
    }

    #[test]
    fn edges() {
        assert_eq!(choose_times([].into_iter(), 4), [1]);
        assert_eq!(choose_times([5, 5, 5].into_iter(), 4), [5]);
        assert_eq!(choose_times([1, 17].into_iter(), 1), [17]);
        assert_eq!(choose_times([1, 17].into_iter(), 9), [8, 17]);
        let huge = choose_times([3, 100_000].into_iter(), 2);
        assert!(huge.len() == 2 && huge[1] == 100_000, "{huge:?}");
    }

    #[test]
    fn the_longest_of_several_is_cut_first() {
        for (lengths, room, want) in [
            ([3, 3], 6, [3, 3]),
            ([10, 2], 6, [4, 2]),
            ([10, 9], 6, [3, 3]),
            ([2, 10], 7, [2, 5]),
            ([9, 9], 7, [3, 3]),
        ] {
            let mut parts = lengths.map(|n: usize| vec![0; n]);
            let cut = shorten(&mut parts, room);
            let got = [parts[0].len(), parts[1].len()];
            assert!(got.iter().sum::<usize>() <= room, "{lengths:?}");
            assert_eq!(cut, got != lengths, "{lengths:?}");
            let close = got.iter().zip(want).all(|(got, want)| got.abs_diff(want) <= 1);
            assert!(close, "{lengths:?} in {room}: {got:?}");
        }
    }
}
