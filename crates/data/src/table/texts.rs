//! Texts with labels: a column of a table (or several, a text each) as token ids.
//!
//! Texts differ in length. A sample is its tokens; a batch fills shorter ones up with an id of its own, the padding, which models
//! take out again. How far is chosen from a few lengths, so that there is one program for each and little is computed for
//! padding: [`choose_times`]. A text that is longer than the longest of them is cut at its end.
//!
//! Several columns are one sample. A tokenizer with special tokens has a form for two texts; otherwise tokens come one after another,
//! with an id of its own between two texts. If they are too long together, tokens are taken from the end of the longest of them.
//!
//! Where every word has a label (a tag), the column has words: a JSON list, or words between spaces. A tag sits on the first token of its word;
//! other tokens, and special ones, have the label [`IGNORED`] and count for nothing.
//!
//! A model may know which of two texts a token is in (BERT's types): tokens of the second one are then `-1 - id`, so that there is still one
//! number for each token all the way to the model.
//!
//! Ids: those of the tokenizer come first; then, if it has none, the padding; then, if it is needed, what stands between texts.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use super::text::{Heading, Row, Text};
use crate::error::DataError;
use crate::spec::{Features, IGNORED};
use crate::text_tokens::{SampleTokens, TextTokenizer};

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
    /// The column with a tag for each word, by name or number; `None`: a text has one label.
    pub tags: Option<String>,
}

impl Default for TextChoice {
    fn default() -> TextChoice {
        TextChoice { columns: Vec::new(), tokenizer: None, length: None, buckets: BUCKETS, tags: None }
    }
}

/// The columns of a table that are texts, ready to be read.
#[derive(Clone, Debug)]
pub struct TextColumns {
    /// Their names, or numbers from 0.
    pub columns: Vec<String>,
    /// What makes tokens of them.
    pub tokenizer: Arc<TextTokenizer>,
    /// The most tokens of a sample.
    pub length: usize,
    /// The lengths that texts are filled up to, of a model that was trained before; empty: one, that of the longest text.
    pub times: Vec<usize>,
    /// Whether the label's column has a tag for each word.
    pub tagged: bool,
    /// Whether tokens of the second text of a pair are told from those of the first: then they are `-1 - id`.
    pub typed: bool,
}

impl PartialEq for TextColumns {
    fn eq(&self, other: &TextColumns) -> bool {
        let same = Arc::ptr_eq(&self.tokenizer, &other.tokenizer);
        let own = |texts: &TextColumns| {
            let TextColumns { columns, length, times, tagged, typed, .. } = texts.clone();
            (columns, length, times, tagged, typed)
        };
        same && own(self) == own(other)
    }
}

impl TextColumns {
    /// The id that fills texts up.
    pub fn padding(&self) -> usize {
        self.tokenizer.padding().unwrap_or(self.tokenizer.vocab())
    }

    /// What stands between the texts of several columns, where special tokens do not.
    fn separator(&self) -> usize {
        self.padding().max(self.tokenizer.vocab() - 1) + 1
    }

    /// Whether special tokens stand around texts, and between two.
    fn has_specials(&self) -> bool {
        self.tokenizer.specials(self.columns.len() > 1).is_some()
    }

    /// How many ids there are.
    pub fn vocab(&self) -> usize {
        self.separator() + usize::from(self.columns.len() > 1 && !self.has_specials())
    }

    /// Why texts cannot be read so, if they cannot.
    pub fn refusal(&self) -> Option<String> {
        let n = self.columns.len();
        if self.tagged && n > 1 {
            let why = "`data.tags` is for one column of words, and `data.text` names several; name the one whose words have tags";
            return Some(why.into());
        }
        if n > 2 && self.has_specials() {
            let why = format!(
                "`data.text` names {n} columns, and the tokenizer has special tokens for one text or two; name at most two, or leave \
                 out `data.tokenizer`"
            );
            return Some(why);
        }
        let specials = self.tokenizer.specials(n > 1).unwrap_or(n - 1);
        (self.length < specials + n).then(|| {
            format!(
                "a length of {} tokens has no room for {n} text{} beside {specials} special tokens; give a larger `data.length`",
                self.length,
                if n > 1 { "s" } else { "" }
            )
        })
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

    /// The tokens of a row's texts, cut to the longest that there may be.
    fn tokens(&self, row: &Row, fields: &[usize]) -> Result<SampleTokens, DataError> {
        let tokens = match self.has_specials() {
            true => {
                let texts: Vec<&[u8]> = fields.iter().map(|&field| row.field(field)).collect();
                let tokens = self.tokenizer.with_specials(&texts, self.length);
                tokens.map_err(|why| row.wrong(fields[0], &why))?
            }
            false => {
                let plain = |&field: &usize| {
                    self.tokenizer.plain(row.field(field)).map_err(|why| row.wrong(field, &why))
                };
                let mut parts = fields.iter().map(plain).collect::<Result<Vec<_>, _>>()?;
                let room = self.length.saturating_sub(parts.len() - 1).max(1);
                let nothing = parts.iter().all(Vec::is_empty);
                let cut = shorten(&mut parts, room);
                // The separator is below 2^31: it is a size of a table in memory.
                let ids = if nothing { Vec::new() } else { parts.join(&(self.separator() as i32)) };
                SampleTokens { ids, cut, second: None, firsts: Vec::new() }
            }
        };
        let mut tokens = self.checked(tokens, row, fields[0])?;
        if let (true, Some(second)) = (self.typed, tokens.second) {
            tokens.ids[second..].iter_mut().for_each(|id| *id = -1 - *id);
        }
        Ok(tokens)
    }

    /// The tokens of a row's words, cut to the longest that there may be, and the words.
    fn words(&self, row: &Row, field: usize) -> Result<(SampleTokens, Vec<String>), DataError> {
        let words = list_of(row, field)?;
        let borrowed: Vec<&str> = words.iter().map(String::as_str).collect();
        let tokens = self.tokenizer.words(&borrowed, self.length).map_err(|why| row.wrong(field, &why))?;
        let tokens = self.checked(tokens, row, field)?;
        match tokens.firsts.iter().any(Option::is_some) {
            true => Ok((tokens, words)),
            false => Err(row.wrong(field, "has no word with a token; fill it, or leave out the row")),
        }
    }

    /// Fails for texts without tokens, and for ones in which the padding is written.
    fn checked(&self, tokens: SampleTokens, row: &Row, field: usize) -> Result<SampleTokens, DataError> {
        let padding = self.padding() as i32;
        let why = match () {
            () if tokens.ids.is_empty() => {
                "has no tokens, and there is nothing to learn from or to predict; fill it, or leave out the row"
            }
            () if tokens.ids.contains(&padding) => {
                "has the token in it that marks padding, and padding is hidden from the model; take it out of the text, or leave \
                 out the row"
            }
            () => return Ok(tokens),
        };
        Err(row.wrong(field, why))
    }
}

/// The words of a field: a JSON list of strings (or of numbers), or what is between spaces.
pub(super) fn list_of(row: &Row, field: usize) -> Result<Vec<String>, DataError> {
    let text = str::from_utf8(row.field(field)).map_err(|_| row.wrong(field, "is not UTF-8"))?;
    if !text.starts_with('[') {
        return Ok(text.split_whitespace().map(String::from).collect());
    }
    let not_a_list = || {
        row.wrong(
            field,
            "is not a JSON list of words such as [\"Call\", \"me\"]; write one, or words with spaces between",
        )
    };
    let list: Vec<Value> = match serde_json::from_str(text) {
        Ok(list) => list,
        // Words between spaces may begin with a bracket too.
        Err(_) if !text.ends_with(']') => return Ok(text.split_whitespace().map(String::from).collect()),
        Err(_) => return Err(not_a_list()),
    };
    let word = |value: Value| match value {
        Value::String(word) => Ok(word),
        Value::Number(number) => Ok(number.to_string()),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => Err(not_a_list()),
    };
    list.into_iter().map(word).collect()
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
    /// Of rows whose words have tags, for each token: the number of its tag among the distinct ones, or [`IGNORED`].
    tags: Vec<i32>,
    /// Of rows for prediction whose words are to have tags: each word, and the place of its first token.
    words: Vec<Vec<WordPlace>>,
}

/// A word, and the place of its first token among those of its sample; `None` if it has none, or was cut.
pub type WordPlace = (String, Option<usize>);

impl TokenRows {
    /// Adds a row of texts.
    pub(super) fn push(
        &mut self,
        columns: &TextColumns,
        row: &Row,
        fields: &[usize],
    ) -> Result<(), DataError> {
        let tokens = columns.tokens(row, fields)?;
        self.add(tokens);
        Ok(())
    }

    /// Adds a row of words; `tags` are those of its words, as numbers. Without them the row is for prediction.
    pub(super) fn push_words(
        &mut self,
        columns: &TextColumns,
        row: &Row,
        field: usize,
        tags: Option<&[u32]>,
    ) -> Result<(), DataError> {
        let (tokens, words) = columns.words(row, field)?;
        if let Some(tags) = tags.filter(|tags| tags.len() != words.len()) {
            let why = format!(
                "has {} words, and the row has {} tags; give a tag to each word",
                words.len(),
                tags.len()
            );
            return Err(row.wrong(field, &why));
        }
        let start = self.tags.len();
        self.tags.resize(start + tokens.ids.len(), IGNORED);
        for (k, first) in tokens.firsts.iter().enumerate() {
            if let Some(at) = first {
                // There are fewer tags than classes can be.
                self.tags[start + at] = tags.map_or(0, |tags| tags[k] as i32);
            }
        }
        if tags.is_none() {
            self.words.push(words.into_iter().zip(tokens.firsts.iter().copied()).collect());
        }
        self.add(tokens);
        Ok(())
    }

    fn add(&mut self, tokens: SampleTokens) {
        self.ids.extend_from_slice(&tokens.ids);
        self.ends.push(self.ids.len());
        self.cut += usize::from(tokens.cut);
    }

    /// The tags of a row, a number for each token; nothing if its words have none.
    pub(super) fn tags(&self, idx: usize) -> &[i32] {
        match self.tags.is_empty() {
            true => &[],
            false => &self.tags[self.start(idx)..self.ends[idx]],
        }
    }

    /// The words of each row for prediction.
    pub(super) fn words(&self) -> &[Vec<WordPlace>] {
        &self.words
    }

    fn start(&self, idx: usize) -> usize {
        if idx == 0 { 0 } else { self.ends[idx - 1] }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn row(&self, idx: usize) -> &[i32] {
        &self.ids[self.start(idx)..self.ends[idx]]
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
