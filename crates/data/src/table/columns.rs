//! The columns of a table by name: finds the wanted features among a file's columns, in any order and among others.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

/// How many names of a list an error shows.
const SHOWN: usize = 10;

/// The names of a table's columns; empty where it has no header.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Columns {
    /// The names of the features, in their order.
    pub features: Vec<String>,
    /// Of the labels.
    pub labels: Vec<String>,
}

impl Columns {
    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.features.is_empty()
    }

    /// Where the features are among the columns that a file `has`; `labels` are its labels' columns, as far as it has them.
    /// Others are passed over; an error says which are missing, and which are there that training did not have.
    pub(super) fn find(&self, has: &[String], labels: &[usize]) -> Result<Vec<usize>, String> {
        let others = |i: &usize| !labels.contains(i);
        let in_order: Vec<usize> = (0..has.len()).filter(others).collect();
        if in_order.iter().map(|&i| &has[i]).eq(&self.features) {
            return Ok(in_order);
        }
        let twice = |names: &[&String]| {
            let mut seen = HashSet::new();
            let wanted = |name: &&&String| self.features.contains(**name);
            names.iter().filter(wanted).find(|name| !seen.insert(**name)).map(|name| name.to_string())
        };
        let here: Vec<&String> = in_order.iter().map(|&i| &has[i]).collect();
        let wanted: Vec<&String> = self.features.iter().collect();
        if let Some(name) = twice(&here).or_else(|| twice(&wanted)) {
            return Err(format!(
                "column {name:?} occurs twice, and the columns are not in the order of the training file: {}; give \
                 each a unique name",
                list(wanted)
            ));
        }
        let places: HashMap<&String, usize> = in_order.iter().map(|&i| (&has[i], i)).collect();
        let missing: Vec<&String> =
            wanted.iter().copied().filter(|name| !places.contains_key(name)).collect();
        let unknown: Vec<&String> = here.into_iter().filter(|name| !self.features.contains(name)).collect();
        if missing.is_empty() {
            return Ok(self.features.iter().map(|name| places[name]).collect());
        }
        let mut parts = vec![format!("the header lacks {}", list(missing))];
        if !unknown.is_empty() {
            parts.push(format!("it has {}, which training did not", list(unknown)));
        }
        Err(format!("{}; the columns are those of the training file, in any order", parts.join("; ")))
    }
}

/// Some names, the first of them in full.
pub(super) fn list(names: Vec<&String>) -> String {
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    let more = names.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(of: &[&str]) -> Vec<String> {
        of.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn columns_are_found_by_name() {
        let check = |wanted: &[&str], has: &[&str], label: Option<usize>, want: Result<&[usize], &[&str]>| {
            let columns = Columns { features: names(wanted), labels: Vec::new() };
            match (columns.find(&names(has), label.as_slice()), want) {
                (Ok(found), Ok(want)) => assert_eq!(found, want, "{has:?}"),
                (Err(said), Err(parts)) => {
                    parts.iter().for_each(|part| assert!(said.contains(part), "{said} lacks {part}"))
                }
                (found, _) => panic!("{has:?}: {found:?}"),
            }
        };
        check(&["a", "b"], &["a", "b"], None, Ok(&[0, 1]));
        check(&["a", "b"], &["b", "a"], None, Ok(&[1, 0]));
        check(&["a", "b"], &["b", "y", "a"], Some(1), Ok(&[2, 0]));
        check(&["a", "b"], &["a", "c"], None, Err(&["lacks \"b\"", "it has \"c\""]));
        check(&["a", "b"], &["a", "id", "b"], None, Ok(&[0, 2]));
        check(&["a", "b"], &["b"], None, Err(&["lacks \"a\""]));
        // Names that occur twice identify nothing, unless all columns are in the same order.
        check(&["a", "a"], &["a", "a"], None, Ok(&[0, 1]));
        check(&["a", "a", "b"], &["a", "b", "a"], None, Err(&["column \"a\" occurs twice"]));
    }
}
