//! What is in the columns of a table: one pass over its rows, from which types are found, what a model must know of the columns
//! is learnt, and `inspect --data` draws its pictures.
//!
//! A column is numbers, or dates, or yes and no, if all its fields that are not blank are. A column of which most fields are
//! numbers (or dates) and some are not is neither: a typing error must not make a category of every number. Everything else is
//! words: a category, or, where most rows have a value of their own, a text if fields have several words that other fields have too, and
//! what looks like an id or a name if not.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::choose::ColumnChoice;
use super::date::{DatePart, Moment};
use super::number;
use super::text::{FieldPlace, Row};
use super::words::{ColumnWords, words_of};
use crate::classes::LabelPlace;
use crate::error::DataError;

/// Different values are counted up to this many.
const DISTINCT_MAX: usize = 1 << 16;
/// Fewer rows than this say nothing about what looks like an id.
pub(super) const ROWS_OF_IDS: usize = 20;
/// A sample of the numbers, for pictures, has between half of this and this many.
const SAMPLE: usize = 4096;

/// What a column seems to hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnType {
    /// Numbers.
    Number,
    /// Yes and no.
    Boolean,
    /// Dates.
    Date,
    /// Words that occur again and again.
    Category,
    /// Words of which most rows have their own: an id, a name, or free text.
    Text,
    /// Nothing but blanks.
    Blank,
    /// Mostly numbers or dates, and some fields that are none.
    Unclear,
}

/// What is in a column.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ColumnSurvey {
    /// The column's name; its number, from 0, in a table without a header.
    pub name: String,
    /// How many rows there are.
    pub rows: usize,
    /// How many of them are blank here.
    pub blanks: usize,
    numbers: usize,
    booleans: usize,
    dates: usize,
    /// Of the numbers; of dates, in seconds since 1970.
    range: Option<(f64, f64)>,
    mean: f64,
    /// Whether each number is the one before and one more.
    counts_up: bool,
    #[serde(with = "maybe_nan")]
    first: f64,
    #[serde(with = "maybe_nan")]
    last: f64,
    /// Mean, least and largest value of each part of the dates.
    parts: Vec<PartSums>,
    /// How often each value occurs, and what it is.
    #[serde(with = "counted")]
    distinct: Words,
    /// Whether there are more than were counted.
    more: bool,
    /// Bytes of words: the least, the most, and of all together.
    word_bytes: Option<(usize, usize, usize)>,
    counts_numbers: bool,
    /// Whether a number is infinite.
    infinite: bool,
    /// The first field that is not blank and no number, and the first that is no date. Most columns have none, and a table may
    /// have very many columns.
    not_number: Option<Box<(FieldPlace, String)>>,
    not_date: Option<Box<(FieldPlace, String)>>,
    sample: Vec<f64>,
    /// The distance between two numbers that are in the sample.
    stride: usize,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct PartSums {
    sum: f64,
    least: f64,
    most: f64,
}

/// Values, each with what is known of it.
type Words = HashMap<Box<[u8]>, KnownWord, foldhash::fast::RandomState>;

/// A value that occurs again and again: what it is is found once.
#[derive(Clone, Copy, Debug)]
struct KnownWord {
    /// Rows that have it.
    rows: usize,
    is: WordKind,
}

#[derive(Clone, Copy, Debug)]
enum WordKind {
    Number(f64),
    /// As [`Moment::order`] gives it, which is smaller.
    Date(i64),
    Boolean,
    Other,
}

impl WordKind {
    fn of(text: &[u8]) -> WordKind {
        let number = || number::double(text).filter(|x| !x.is_nan()).map(WordKind::Number);
        let date = || Moment::read(text).map(|moment| WordKind::Date(moment.order()));
        let yes_or_no = || boolean(text).map(|_| WordKind::Boolean);
        number().or_else(date).or_else(yes_or_no).unwrap_or(WordKind::Other)
    }
}

/// JSON has no NaN, which stands for a number that there is not.
mod maybe_nan {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &f64, to: S) -> Result<S::Ok, S::Error> {
        Some(*number).filter(|x| !x.is_nan()).serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
    }
}

/// Keys of JSON are texts, and values of a column need not be.
mod counted {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{KnownWord, WordKind, Words};

    pub(super) fn serialize<S: Serializer>(values: &Words, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(|(value, known)| (value, known.rows)))
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Words, D::Error> {
        let values = Vec::<(Box<[u8]>, usize)>::deserialize(from)?.into_iter();
        let known = |(value, rows): (Box<[u8]>, usize)| {
            let is = WordKind::of(&value);
            (value, KnownWord { rows, is })
        };
        Ok(values.map(known).collect())
    }
}

impl ColumnSurvey {
    /// Of a column that has no rows yet. Different values of numbers are only counted if asked for.
    pub(super) fn new(name: &str, counts_numbers: bool) -> ColumnSurvey {
        ColumnSurvey {
            name: name.into(),
            rows: 0,
            blanks: 0,
            numbers: 0,
            booleans: 0,
            dates: 0,
            range: None,
            mean: 0.0,
            counts_up: true,
            first: f64::NAN,
            last: f64::NAN,
            parts: Vec::new(),
            distinct: Words::default(),
            more: false,
            word_bytes: None,
            counts_numbers,
            infinite: false,
            not_number: None,
            not_date: None,
            sample: Vec::new(),
            stride: 1,
        }
    }

    /// Of the same column, with no rows yet.
    pub(super) fn again(&self) -> ColumnSurvey {
        ColumnSurvey::new(&self.name, self.counts_numbers)
    }

    /// Looks at a field.
    pub(super) fn add(&mut self, row: &Row, field: usize, choice: &ColumnChoice) {
        let text = row.field(field);
        self.rows += 1;
        if choice.is_blank(text) {
            self.blanks += 1;
            return;
        }
        // Numbers seldom occur again, words do.
        if !self.counts_numbers
            && let Some(number) = number::double(text).filter(|x| !x.is_nan())
        {
            return self.add_number(number);
        }
        let is = match self.distinct.get_mut(text) {
            Some(known) => {
                known.rows += 1;
                known.is
            }
            None => {
                let is = WordKind::of(text);
                if self.distinct.len() == DISTINCT_MAX {
                    self.more = true;
                } else {
                    self.distinct.insert(text.into(), KnownWord { rows: 1, is });
                }
                is
            }
        };
        if let WordKind::Number(number) = is {
            return self.add_number(number);
        }
        let first = |known: &mut Option<Box<(FieldPlace, String)>>| {
            known.get_or_insert_with(|| {
                let start = String::from_utf8_lossy(text).chars().take(40).collect();
                Box::new((row.place_of(field), start))
            });
        };
        let (least, most, all) = self.word_bytes.unwrap_or((usize::MAX, 0, 0));
        self.word_bytes = Some((least.min(text.len()), most.max(text.len()), all + text.len()));
        first(&mut self.not_number);
        match is {
            WordKind::Date(order) => self.add_date(Moment::at(order)),
            WordKind::Number(_) | WordKind::Boolean | WordKind::Other => first(&mut self.not_date),
        }
        self.booleans += usize::from(matches!(is, WordKind::Boolean));
    }

    fn add_number(&mut self, number: f64) {
        self.numbers += 1;
        // That an infinite one is no number to learn from is said where the row is read.
        if number.is_infinite() {
            self.infinite = true;
            return;
        }
        self.mean += (number - self.mean) / self.numbers as f64;
        self.counts_up &= self.last.is_nan() || number == self.last + 1.0;
        self.first = if self.first.is_nan() { number } else { self.first };
        self.last = number;
        self.widen(number);
    }

    fn add_date(&mut self, moment: Moment) {
        self.dates += 1;
        let none = PartSums { sum: 0.0, least: f64::INFINITY, most: f64::NEG_INFINITY };
        self.parts.resize(DatePart::ALL.len(), none);
        for (sums, part) in self.parts.iter_mut().zip(DatePart::ALL) {
            let value = part.of(moment);
            sums.sum += value;
            (sums.least, sums.most) = (sums.least.min(value), sums.most.max(value));
        }
        // Numbers and dates in one column have no range in common; it is then not clear what they are.
        self.widen(moment.order() as f64);
    }

    fn widen(&mut self, value: f64) {
        let (least, most) = self.range.unwrap_or((value, value));
        self.range = Some((least.min(value), most.max(value)));
        // The stride is a power of two.
        if (self.numbers + self.dates) & (self.stride - 1) == 0 {
            self.sample.push(value);
        }
        if self.sample.len() == SAMPLE {
            self.thin();
        }
    }

    /// Leaves every other number of the sample out.
    fn thin(&mut self) {
        let mut odd = false;
        self.sample.retain(|_| {
            odd = !odd;
            !odd
        });
        self.stride *= 2;
    }

    /// Adds what is in the rows that follow, of the same column.
    pub(super) fn append(&mut self, mut next: ColumnSurvey) {
        self.rows += next.rows;
        self.blanks += next.blanks;
        self.booleans += next.booleans;
        self.infinite |= next.infinite;
        self.counts_up &=
            next.counts_up && (self.last.is_nan() || next.first.is_nan() || next.first == self.last + 1.0);
        self.first = if self.first.is_nan() { next.first } else { self.first };
        self.last = if next.last.is_nan() { self.last } else { next.last };
        self.numbers += next.numbers;
        self.dates += next.dates;
        if next.numbers > 0 {
            self.mean += (next.mean - self.mean) * (next.numbers as f64 / self.numbers as f64);
        }
        self.range = match (self.range, next.range) {
            (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
            (range, other) => range.or(other),
        };
        match self.parts.is_empty() {
            true => self.parts = next.parts,
            false => {
                for (sums, more) in self.parts.iter_mut().zip(&next.parts) {
                    sums.sum += more.sum;
                    (sums.least, sums.most) = (sums.least.min(more.least), sums.most.max(more.most));
                }
            }
        }
        // Sorted, so that which ones are counted does not depend on the order of a hash.
        let mut values: Vec<_> = next.distinct.into_iter().collect();
        values.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        for (value, known) in values {
            let full = self.distinct.len() == DISTINCT_MAX;
            match self.distinct.get_mut(&value) {
                Some(had) => had.rows += known.rows,
                None if full => self.more = true,
                None => {
                    self.distinct.insert(value, known);
                }
            }
        }
        self.more |= next.more;
        self.word_bytes = match (self.word_bytes, next.word_bytes) {
            (Some((a, b, all)), Some((c, d, more))) => Some((a.min(c), b.max(d), all + more)),
            (known, other) => known.or(other),
        };
        self.not_number = self.not_number.take().or(next.not_number);
        self.not_date = self.not_date.take().or(next.not_date);
        while next.stride < self.stride && !next.sample.is_empty() {
            next.sample = next.sample.into_iter().step_by(2).collect();
            next.stride *= 2;
        }
        while self.stride < next.stride {
            self.thin();
        }
        self.sample.extend(next.sample);
        while self.sample.len() >= SAMPLE {
            self.thin();
        }
    }

    /// Bytes of its words: the least, the mean and the most; `None` if it has none.
    pub fn word_bytes(&self) -> Option<(usize, usize, usize)> {
        let (least, most, all) = self.word_bytes?;
        Some((least, all / (self.present() - self.numbers).max(1), most))
    }

    /// Fields that are not blank.
    pub fn present(&self) -> usize {
        self.rows - self.blanks
    }

    /// What the column seems to hold.
    pub fn kind(&self) -> ColumnType {
        let present = self.present();
        match present {
            0 => ColumnType::Blank,
            n if n == self.numbers => ColumnType::Number,
            n if n == self.booleans => ColumnType::Boolean,
            n if n == self.dates => ColumnType::Date,
            n if 2 * self.numbers.max(self.dates) >= n => ColumnType::Unclear,
            _ if self.mostly_differ() => ColumnType::Text,
            _ => ColumnType::Category,
        }
    }

    /// Whether most rows have a value of their own.
    pub(super) fn mostly_differ(&self) -> bool {
        self.present() >= ROWS_OF_IDS && (self.more || 2 * self.distinct.len() > self.present())
    }

    /// Whether all of its numbers are finite as f32.
    pub(super) fn fits_f32(&self) -> bool {
        let most = f64::from(f32::MAX);
        !self.infinite
            && self.range.is_none_or(|(a, b)| (-most..=most).contains(&a) && (-most..=most).contains(&b))
    }

    /// Whether numbers count the rows, as an id or an index does.
    pub fn counts_rows(&self) -> bool {
        self.kind() == ColumnType::Number && self.counts_up && self.rows >= ROWS_OF_IDS
    }

    /// How many different values there are that are not blank, and whether there are more than were counted.
    pub fn n_distinct(&self) -> (usize, bool) {
        (self.distinct.len(), self.more)
    }

    /// The values with how often they occur, the most frequent first.
    pub fn values(&self) -> Vec<(String, usize)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut values: Vec<_> =
            self.distinct.iter().map(|(value, known)| (text(value), known.rows)).collect();
        values.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        values
    }

    /// The words of the values that were counted.
    pub(super) fn words(&self) -> ColumnWords {
        words_of(self.distinct.iter().map(|(value, known)| (&**value, known.rows)))
    }

    /// Of a column of words of which most rows have their own: whether it is a text, and not names or ids; otherwise nothing.
    pub fn is_text(&self) -> Option<bool> {
        (self.kind() == ColumnType::Text).then(|| self.words().recur)
    }

    /// The mean of the numbers.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Least and largest number; of dates in seconds since 1970.
    pub fn range(&self) -> Option<(f64, f64)> {
        self.range
    }

    /// Least and largest value, as they are written.
    pub fn range_text(&self) -> Option<(String, String)> {
        let (least, most) = self.range?;
        let written = |x: f64| match self.kind() {
            ColumnType::Date => Moment::at(x as i64).written(),
            _ => (x as f32).to_string(),
        };
        Some((written(least), written(most)))
    }

    /// How many of the numbers, or dates, lie in each of `n` equal parts of their range; of a sample where there are many.
    pub fn histogram(&self, n: usize) -> Vec<usize> {
        let mut bins = vec![0; n];
        let Some((least, most)) = self.range else { return bins };
        for value in &self.sample {
            let share = if most > least { (value - least) / (most - least) } else { 0.0 };
            bins[((share * n as f64) as usize).min(n - 1)] += 1;
        }
        bins
    }

    /// The share of yes among yes and no.
    pub(super) fn share_of_true(&self) -> f64 {
        let yes = self.distinct.iter().filter(|(word, _)| boolean(word) == Some(true));
        yes.map(|(_, known)| known.rows).sum::<usize>() as f64 / self.booleans.max(1) as f64
    }

    /// The parts of the dates that are not the same everywhere, with their means.
    pub(super) fn parts(&self) -> Vec<(DatePart, f64)> {
        let parts = DatePart::ALL.into_iter().zip(&self.parts);
        let vary = parts.filter(|(_, sums)| sums.most - sums.least > 1e-9);
        vary.map(|(part, sums)| (part, sums.sum / self.dates as f64)).collect()
    }

    /// The error for a column of which it is not clear what it holds.
    pub(super) fn unclear(&self) -> DataError {
        let dates = self.dates > self.numbers;
        let (what, n, other) = match dates {
            true => ("date", self.dates, &self.not_date),
            false => ("number", self.numbers, &self.not_number),
        };
        let Some((place, text)) = other.as_deref() else {
            return DataError::Setting { why: format!("column {:?} is not clear", self.name) };
        };
        let why = format!(
            "field {:?}: {text:?} is not a {what}, but {n} of {} fields of the column are; repair it, name what stands for \
             blanks with `data.blanks`, or put the column into `data.categories` or `data.ignore`",
            self.name,
            self.present()
        );
        place.error(&why)
    }
}

/// Yes or no, if that is what a field says.
pub(super) fn boolean(field: &[u8]) -> Option<bool> {
    const WORDS: [(&str, bool); 8] = [
        ("true", true),
        ("false", false),
        ("yes", true),
        ("no", false),
        ("t", true),
        ("f", false),
        ("y", true),
        ("n", false),
    ];
    WORDS.iter().find(|(word, _)| field.eq_ignore_ascii_case(word.as_bytes())).map(|(_, is)| *is)
}
