//! What a model knows of the columns of its table: which there are, as what each is read, what stands for a blank, and which
//! categories there were. It is learnt once, from the training files, kept with the model, and read again whenever the model is
//! used, so that a row means the same then.
//!
//! # What a row becomes
//! | column | numbers |
//! |---|---|
//! | number | itself; a blank becomes the mean |
//! | yes and no | 1 and 0; a blank becomes the share of yes |
//! | date | the parts that vary, see [`DatePart`]; of a blank their means |
//! | category of few values | a 0 or 1 for each value, and one for blank if there were blanks; all are 0 for a value that training did not have |
//! | category of many values | an id: 0 for a value that training did not have or had once, then the values, then blank |
//! | text | ids of its words, in as many places as the longest has, see `words` |
//!
//! A number, a date, a yes or no that was blank somewhere in training is followed by a 1 where it is blank and a 0 elsewhere.
//! Ids come after all numbers, those of texts last, and the model learns a vector for each. A blank text has no words.
//!
//! Means and categories are those of the training files as they are, before a part is split off for validation.

use serde::{Deserialize, Serialize};

pub use super::date::DatePart;

use super::TableOptions;
use super::choose::ColumnChoice;
use super::columns::list;
use super::survey::{ColumnSurvey, ColumnType};
use super::words::{FIRST, WORDS_MAX};
use crate::error::DataError;
use crate::spec::{Features, TextIds};

/// What a model knows of the columns of its table.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TableSchema {
    /// The features, in the order of the file that they were learnt from.
    pub rules: Vec<ColumnRule>,
    /// Columns that are not used, and why.
    pub left_out: Vec<(String, String)>,
    /// Columns that are used though they look like ids.
    pub like_ids: Vec<String>,
    /// What stands for a blank; empty: the usual words.
    pub blanks: Vec<String>,
    /// Of a table without a header: how many columns it had, and which were its labels. Columns are then called by their
    /// numbers.
    pub unnamed: Option<(usize, Vec<usize>)>,
}

/// As what a column is read.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ColumnRule {
    /// The column's name.
    pub name: String,
    /// What its fields are.
    pub reading: Reading,
    /// Whether there were blanks.
    pub blanks: bool,
}

/// What the fields of a column are.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    /// Numbers with this mean.
    Number {
        /// What stands in for a blank.
        mean: f64,
    },
    /// Yes and no.
    Boolean {
        /// The share of yes, which stands in for a blank.
        mean: f64,
    },
    /// Dates.
    Date {
        /// Which numbers are made of them, with what stands in for a blank.
        parts: Vec<(DatePart, f64)>,
    },
    /// Categories.
    Category {
        /// The values, sorted.
        values: Vec<String>,
        /// Whether a vector is learnt for each; one-hot otherwise.
        learnt: bool,
    },
    /// Texts.
    Text {
        /// The words that are known, those of most rows first.
        words: Vec<String>,
        /// Whether there were others, which share a vector; without, words that are not known are passed over.
        others: bool,
        /// How many words are read of a field.
        length: usize,
    },
}

impl ColumnRule {
    /// How many numbers a field becomes; an id is none.
    pub fn n_numbers(&self) -> usize {
        match &self.reading {
            Reading::Number { .. } | Reading::Boolean { .. } => 1 + usize::from(self.blanks),
            Reading::Date { parts } => parts.len() + usize::from(self.blanks),
            Reading::Category { learnt: true, .. } | Reading::Text { .. } => 0,
            Reading::Category { values, learnt: false } => values.len() + usize::from(self.blanks),
        }
    }

    /// How many ids there are for its values, if it has ids: one for those that are not known, and one for blanks.
    pub fn n_ids(&self) -> Option<usize> {
        match &self.reading {
            Reading::Category { values, learnt: true } => Some(values.len() + 1 + usize::from(self.blanks)),
            Reading::Number { .. }
            | Reading::Boolean { .. }
            | Reading::Date { .. }
            | Reading::Category { learnt: false, .. }
            | Reading::Text { .. } => None,
        }
    }

    /// The ids of its words, if it is a text: one for no word, one for those that are not known, and those of the words.
    pub fn text_ids(&self) -> Option<TextIds> {
        match &self.reading {
            Reading::Text { words, length, .. } => {
                Some(TextIds { ids: FIRST + words.len(), length: *length })
            }
            Reading::Number { .. }
            | Reading::Boolean { .. }
            | Reading::Date { .. }
            | Reading::Category { .. } => None,
        }
    }

    /// What it is in a few words, such as "category of 3 values".
    fn words(&self) -> String {
        match &self.reading {
            Reading::Number { .. } => "number".into(),
            Reading::Boolean { .. } => "yes or no".into(),
            Reading::Date { .. } => "date".into(),
            Reading::Category { values, learnt: false } => format!("category of {} values", values.len()),
            Reading::Category { values, learnt: true } => {
                format!("category of {} values, with learnt vectors", values.len())
            }
            Reading::Text { words, length, .. } => {
                format!("text of up to {length} words, of which {} are known", words.len())
            }
        }
    }
}

impl TableSchema {
    /// What is to be known of columns that were looked at.
    pub(super) fn learn(surveys: &[ColumnSurvey], options: &TableOptions) -> Result<TableSchema, DataError> {
        let choice = &options.choice;
        let mut schema = TableSchema {
            rules: Vec::new(),
            left_out: Vec::new(),
            like_ids: Vec::new(),
            blanks: choice.blanks.clone(),
            unnamed: None,
        };
        for survey in surveys {
            match reading(survey, options)? {
                Ok(reading) => {
                    let blanks = survey.blanks > 0;
                    schema.rules.push(ColumnRule { name: survey.name.clone(), reading, blanks });
                }
                Err(why) => schema.left_out.push((survey.name.clone(), why)),
            }
            let of_words = choice.is_category(&survey.name) || choice.is_text(&survey.name);
            if survey.counts_rows() && !of_words {
                schema.like_ids.push(survey.name.clone());
            }
        }
        if schema.features().numel() == 0 {
            let why = schema.left_out.iter().map(|(name, why)| format!("{name:?} {why}"));
            return Err(DataError::Setting {
                why: format!("no column is left to learn from: {}", why.collect::<Vec<_>>().join("; ")),
            });
        }
        Ok(schema)
    }

    /// What a row becomes.
    pub fn features(&self) -> Features {
        let numbers = self.rules.iter().map(ColumnRule::n_numbers).sum();
        let ids: Vec<usize> = self.rules.iter().filter_map(ColumnRule::n_ids).collect();
        let texts: Vec<TextIds> = self.rules.iter().filter_map(ColumnRule::text_ids).collect();
        match ids.is_empty() && texts.is_empty() {
            true => Features::Row { width: numbers },
            false => Features::Mixed { numbers, ids, texts },
        }
    }

    /// The names of the columns.
    pub fn names(&self) -> Vec<String> {
        self.rules.iter().map(|rule| rule.name.clone()).collect()
    }

    /// How columns are told apart from what stands for blanks.
    pub(super) fn choice(&self) -> ColumnChoice {
        ColumnChoice { blanks: self.blanks.clone(), ..ColumnChoice::default() }
    }

    /// Where the columns are among those of a file, which has `names` if it has a header and `width` columns.
    pub(super) fn find(&self, names: &[String], width: usize) -> Result<Vec<usize>, String> {
        if let Some((had, labels)) = &self.unnamed {
            // Labels may be left out where that moves no other column.
            let labels_last = labels.iter().all(|&l| l >= had - labels.len());
            if width != *had && !(labels_last && width == had - labels.len()) {
                let labels = if labels_last { ", or as many without the labels" } else { "" };
                return Err(format!(
                    "{width} columns, but the training file has {had} and no header: give the same columns{labels}"
                ));
            }
            return self.rules.iter().map(|r| r.name.parse().map_err(|_| format!("{:?}", r.name))).collect();
        }
        let all: Vec<&String> = self.rules.iter().map(|rule| &rule.name).collect();
        if names.is_empty() {
            return Err(format!(
                "no header, but the model knows its columns by name: {}; put the names into the first line",
                list(all)
            ));
        }
        let missing: Vec<&String> = all.into_iter().filter(|name| !names.contains(name)).collect();
        if !missing.is_empty() {
            return Err(format!(
                "the header lacks {}; the model needs all columns that it was trained on, in any order (leave fields blank \
                 where nothing is known)",
                list(missing)
            ));
        }
        let mut places = Vec::new();
        for rule in &self.rules {
            let mut at = names.iter().enumerate().filter(|(_, name)| **name == rule.name).map(|(i, _)| i);
            places.extend(at.next());
            if at.next().is_some() {
                return Err(format!("column {:?} occurs twice; remove one of the two", rule.name));
            }
        }
        Ok(places)
    }

    /// What of the columns is read otherwise than in `now`; means may differ.
    pub fn misfit(&self, now: &TableSchema) -> Option<String> {
        let same = |a: &ColumnRule, b: &ColumnRule| {
            let alike = match (&a.reading, &b.reading) {
                (Reading::Number { .. }, Reading::Number { .. }) => true,
                (Reading::Boolean { .. }, Reading::Boolean { .. }) => true,
                (Reading::Date { parts: a }, Reading::Date { parts: b }) => {
                    a.iter().map(|(part, _)| part).eq(b.iter().map(|(part, _)| part))
                }
                (a @ Reading::Category { .. }, b @ Reading::Category { .. }) => a == b,
                (a @ Reading::Text { .. }, b @ Reading::Text { .. }) => a == b,
                _ => false,
            };
            alike && a.name == b.name && a.blanks == b.blanks
        };
        let differs = self.rules.iter().zip(&now.rules).find(|(was, is)| !same(was, is));
        if let Some((was, is)) = differs {
            let words = |rule: &ColumnRule| {
                let blanks = if rule.blanks { "with" } else { "without" };
                format!("{} {blanks} blanks", rule.words())
            };
            return Some(format!("column {:?} is {} and was {}", is.name, words(is), words(was)));
        }
        (self.rules.len() != now.rules.len())
            .then(|| format!("{} columns are read and {} were", now.rules.len(), self.rules.len()))
    }

    /// What was found, as lines for people.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let count = |n: usize, one: &str, many: &str| match n {
            0 => None,
            1 => Some(format!("1 {one}")),
            n => Some(format!("{n} {many}")),
        };
        let of = |is: fn(&Reading) -> bool| self.rules.iter().filter(|rule| is(&rule.reading)).count();
        let kinds = [
            count(of(|r| matches!(r, Reading::Number { .. })), "number", "numbers"),
            count(of(|r| matches!(r, Reading::Boolean { .. })), "yes or no", "yes or no"),
            count(of(|r| matches!(r, Reading::Date { .. })), "date", "dates"),
            count(
                of(|r| matches!(r, Reading::Category { learnt: false, .. })),
                "category (one-hot)",
                "categories (one-hot)",
            ),
            count(
                of(|r| matches!(r, Reading::Category { learnt: true, .. })),
                "category (learnt vectors)",
                "categories (learnt vectors)",
            ),
            count(of(|r| matches!(r, Reading::Text { .. })), "text", "texts"),
        ];
        let kinds: Vec<String> = kinds.into_iter().flatten().collect();
        let blanks = self.rules.iter().filter(|rule| rule.blanks).count();
        let blanks = if blanks > 0 { format!("; {blanks} with blanks") } else { String::new() };
        lines.push(format!("{}{blanks}; {} inputs", kinds.join(", "), self.features().numel()));
        let of_text = |rule: &ColumnRule| match &rule.reading {
            Reading::Text { words, length, .. } => Some(format!(
                "{:?} is a text of up to {length} words, of which {} are known; `data.ignore` leaves it out",
                rule.name,
                words.len()
            )),
            _ => None,
        };
        lines.extend(self.rules.iter().filter_map(of_text));
        lines.extend(self.left_out.iter().map(|(name, why)| format!("{name:?} is left out: it {why}")));
        lines.extend(self.like_ids.iter().map(|name| like_an_id(name)));
        lines
    }
}

/// What is said of numbers that count the rows.
pub fn like_an_id(name: &str) -> String {
    format!("{name:?} counts the rows, as an id does, and is used; `data.ignore` leaves it out")
}

/// As what a column is read, or why it is left out.
fn reading(survey: &ColumnSurvey, options: &TableOptions) -> Result<Result<Reading, String>, DataError> {
    let choice = &options.choice;
    let (n, more) = survey.n_distinct();
    let many = if more { "over " } else { "" };
    Ok(match survey.kind() {
        ColumnType::Blank => Err("is blank everywhere".into()),
        _ if choice.is_category(&survey.name) => category(survey, choice),
        _ if choice.is_text(&survey.name) => text(survey, choice),
        ColumnType::Number => Ok(Reading::Number { mean: survey.mean() }),
        ColumnType::Boolean => Ok(Reading::Boolean { mean: survey.share_of_true() }),
        ColumnType::Date => match survey.parts() {
            parts if parts.is_empty() => Err("is the same date everywhere".into()),
            parts => Ok(Reading::Date { parts }),
        },
        ColumnType::Unclear => return Err(survey.unclear()),
        ColumnType::Text if survey.words().recur => match options.finds_texts {
            true => text(survey, choice),
            false => Err(format!(
                "looks like a text ({many}{n} different values in {} rows); `mlp` and `tabular` take texts beside other columns, and \
                 `data.text` learns from it alone",
                survey.rows
            )),
        },
        ColumnType::Text if !choice.is_named(&survey.name) => Err(format!(
            "looks like an id or a name ({many}{n} different values in {} rows); put it into `data.texts` to learn from its words, or \
             into `data.categories`",
            survey.rows
        )),
        ColumnType::Category | ColumnType::Text => category(survey, choice),
    })
}

fn category(survey: &ColumnSurvey, choice: &ColumnChoice) -> Result<Reading, String> {
    let counted = survey.values();
    let learnt = counted.len() > choice.one_hot;
    // A vector for a value of one row would be learnt from that row alone: such values share the one for values that are not
    // known, which is learnt in this way.
    let kept = counted.into_iter().filter(|(_, rows)| !learnt || *rows > 1);
    let mut values: Vec<String> = kept.map(|(value, _)| value).collect();
    values.sort();
    match (values.len(), survey.blanks) {
        (0, _) => Err("has no value twice".into()),
        (1, 0) if !learnt => Err(format!("is {:?} everywhere", values[0])),
        _ => Ok(Reading::Category { values, learnt }),
    }
}

fn text(survey: &ColumnSurvey, choice: &ColumnChoice) -> Result<Reading, String> {
    let words = survey.words();
    let length = words.longest.min(choice.text.length.unwrap_or(WORDS_MAX));
    match words.known.is_empty() {
        true => Err("has no word that two rows have".into()),
        false => Ok(Reading::Text { words: words.known, others: words.others, length }),
    }
}
