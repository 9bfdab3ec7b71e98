//! The words of a text that is read beside other columns of a table: which a field has, and which of them a model knows.
//!
//! A word is what stands between spaces, in small letters, without what is no letter or digit at its ends: `"The end."` has the words
//! `the` and `end`. That takes no tokenizer, and what was learnt is a list of words that people can read. A model knows the words that
//! most rows have, at most [`VOCABULARY_MAX`]; a word of one row alone would be learnt from that row, so such words share the vector of
//! words that are not known, as rare values of a category do. Where there are none, nothing is learnt of words that are not known, and they are
//! passed over.
//!
//! Ids: [`NO_WORD`] fills a text up; [`UNKNOWN`] is every word that is not known; known words come after these, in the order of the list.

use std::collections::{HashMap, HashSet};

/// How many words a model knows of a text at most.
pub const VOCABULARY_MAX: usize = 10_000;
/// How many words of a text are read where nothing else is said; those after them are passed over.
pub const WORDS_MAX: usize = 128;
/// The id that fills a text up.
pub(super) const NO_WORD: usize = 0;
/// The id of a word that is not known.
pub(super) const UNKNOWN: usize = 1;
/// The id of the first word of the list.
pub(super) const FIRST: usize = 2;
/// A column whose rows mostly differ is a text if a field has at least this many words on average that occur in other fields too. Names
/// of people and things have fewer, and ids have none.
const WORDS_OF_TEXT: usize = 5;

/// What the words of a column are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ColumnWords {
    /// Words that more than one row has, those of most rows first.
    pub(super) known: Vec<String>,
    /// Whether there are others.
    pub(super) others: bool,
    /// The most words of a field.
    pub(super) longest: usize,
    /// Whether fields are made of words that occur again and again, as those of texts are.
    pub(super) recur: bool,
}

/// Calls `each` with every word of a field.
pub(super) fn each_word(field: &[u8], mut each: impl FnMut(&str)) {
    let text = String::from_utf8_lossy(field);
    let mut small = String::new();
    for word in text.split_whitespace() {
        let word = word.trim_matches(|c: char| !c.is_alphanumeric());
        if word.is_empty() {
            continue;
        }
        match word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
            true => each(word),
            false => {
                small.clear();
                small.extend(word.chars().flat_map(char::to_lowercase));
                each(&small);
            }
        }
    }
}

/// The words of a column. Each field comes with the number of rows that have it.
pub(super) fn words_of<'a>(fields: impl Iterator<Item = (&'a [u8], usize)> + Clone) -> ColumnWords {
    let (mut rows_of, mut longest) = (HashMap::<Box<str>, usize>::new(), 0);
    for (field, rows) in fields.clone() {
        let (mut n, mut seen) = (0, HashSet::<Box<str>>::new());
        each_word(field, |word| {
            n += 1;
            if seen.contains(word) {
                return;
            }
            seen.insert(word.into());
            match rows_of.get_mut(word) {
                Some(all) => *all += rows,
                None => {
                    rows_of.insert(word.into(), rows);
                }
            }
        });
        longest = longest.max(n);
    }
    let (mut again, mut present) = (0, 0);
    for (field, rows) in fields {
        present += rows;
        each_word(field, |word| again += rows * usize::from(rows_of[word] > rows));
    }
    let n_words = rows_of.len();
    let mut known: Vec<(Box<str>, usize)> = rows_of.into_iter().filter(|(_, rows)| *rows > 1).collect();
    known.sort_unstable_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    known.truncate(VOCABULARY_MAX);
    ColumnWords {
        others: known.len() < n_words,
        known: known.into_iter().map(|(word, _)| word.into()).collect(),
        longest,
        recur: present > 0 && again >= WORDS_OF_TEXT * present,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(field: &str) -> Vec<String> {
        let mut words = Vec::new();
        each_word(field.as_bytes(), |word| words.push(word.into()));
        words
    }

    #[test]
    fn words_stand_between_spaces() {
        assert_eq!(words("The end."), ["the", "end"]);
        assert_eq!(words("  \"Don't\",\tÀ-LA  carte (3.5) -- !"), ["don't", "à-la", "carte", "3.5"]);
        assert_eq!(words(""), [""; 0]);
        let mut n = 0;
        each_word(b"a \xff b", |_| n += 1);
        assert_eq!(n, 2, "what is not UTF-8 is no letter");
    }

    #[test]
    fn texts_are_told_from_names_and_ids() {
        let check = |field: &dyn Fn(usize) -> String, recur: bool, known: usize, longest: usize| {
            let fields: Vec<String> = (0..60).map(field).collect();
            let found = words_of(fields.iter().map(|field| (field.as_bytes(), 1)));
            let shown = (found.recur, found.known.len(), found.longest);
            assert_eq!(shown, (recur, known, longest), "{}", fields[0]);
        };
        check(
            &|i| format!("it was {} and {} in town {i}", ["hot", "cold"][i % 2], ["wet", "dry"][i % 3 % 2]),
            true,
            9,
            8,
        );
        check(&|i| format!("name {i}"), false, 1, 2);
        check(&|i| format!("{i}-4a-{i}"), false, 0, 1);
        check(&|i| (0..8).map(|k| format!("{} ", 8 * i + k)).collect(), false, 0, 8);
        // The same field in several rows says nothing of whether its words occur elsewhere.
        let same = words_of([(&b"a b c d e f"[..], 9), (&b"g h"[..], 1)].into_iter());
        assert_eq!((same.recur, same.known.len(), same.longest), (false, 6, 6));
    }

    #[test]
    fn the_words_of_most_rows_are_known() {
        let fields = [(&b"b b a"[..], 1), (&b"a c"[..], 2), (&b"d"[..], 1), (&b"c b"[..], 1)];
        let found = words_of(fields.into_iter());
        assert_eq!((found.known, found.others), (vec!["a".into(), "c".into(), "b".into()], true));
        assert!(!words_of([(&b"a b"[..], 2)].into_iter()).others);
    }
}
