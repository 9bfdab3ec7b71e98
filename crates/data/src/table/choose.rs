//! Which columns of a table are features: by name or pattern.

use std::collections::HashSet;

use super::texts::TextChoice;
use crate::joined::matches;

/// Up to this many different values a category is one-hot, unless options say otherwise; with more its values get vectors that
/// are learnt.
pub const ONE_HOT: usize = 32;

/// What stands for a blank unless options say otherwise, in capitals or not; an empty field always does.
pub const BLANKS: [&str; 5] = ["NA", "N/A", "NaN", "null", "?"];

/// Which columns are read, and as what. A pattern is a name in which each `*` stands for any text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ColumnChoice {
    /// Patterns of the features; empty: all but the labels.
    pub columns: Vec<String>,
    /// Patterns of columns that are left out.
    pub ignore: Vec<String>,
    /// Patterns of columns that are categories, even if they look like numbers.
    pub categories: Vec<String>,
    /// Patterns of columns that are texts beside others, whatever they look like.
    pub texts: Vec<String>,
    /// What stands for a blank; empty: [`BLANKS`].
    pub blanks: Vec<String>,
    /// Up to how many different values a category is one-hot.
    pub one_hot: usize,
    /// Columns that are texts; with them no other column is a feature.
    pub text: TextChoice,
}

impl Default for ColumnChoice {
    fn default() -> ColumnChoice {
        let none = Vec::new;
        ColumnChoice {
            columns: none(),
            ignore: none(),
            categories: none(),
            texts: none(),
            blanks: none(),
            one_hot: ONE_HOT,
            text: TextChoice::default(),
        }
    }
}

impl ColumnChoice {
    /// Whether a column is said to be a category.
    pub(super) fn is_category(&self, name: &str) -> bool {
        self.categories.iter().any(|pattern| matches(pattern, name))
    }

    /// Whether a column is said to be a text beside others.
    pub(super) fn is_text(&self, name: &str) -> bool {
        self.texts.iter().any(|pattern| matches(pattern, name))
    }

    /// Whether a column is asked for by its own name.
    pub(super) fn is_named(&self, name: &str) -> bool {
        self.columns.iter().any(|pattern| pattern == name)
    }

    /// What stands for blanks, and nothing else.
    pub(super) fn only_blanks(&self) -> ColumnChoice {
        ColumnChoice { blanks: self.blanks.clone(), ..ColumnChoice::default() }
    }

    /// Whether a field is blank.
    pub(super) fn is_blank(&self, field: &[u8]) -> bool {
        let Some(first) = field.first() else { return true };
        let is = |word: &str| field.eq_ignore_ascii_case(word.as_bytes());
        match self.blanks.is_empty() {
            // Most fields are ruled out by how they begin.
            true => matches!(first, b'n' | b'N' | b'?') && BLANKS.into_iter().any(is),
            false => self.blanks.iter().any(|word| is(word)),
        }
    }

    /// The fields of the features among columns of these names, in the order of the file; `labels` are none.
    pub(super) fn features(&self, names: &[String], labels: &[usize]) -> Result<Vec<usize>, String> {
        for (key, patterns) in [
            ("columns", &self.columns),
            ("ignore", &self.ignore),
            ("categories", &self.categories),
            ("texts", &self.texts),
        ] {
            let fits = |pattern: &String| names.iter().any(|name| matches(pattern, name));
            if let Some(pattern) = patterns.iter().find(|pattern| !fits(pattern)) {
                let shown = names.iter().take(20).map(|name| format!("{name:?}")).collect::<Vec<_>>();
                return Err(format!(
                    "`data.{key}` has {pattern:?}, and no column is called so; there are {}",
                    shown.join(", ")
                ));
            }
        }
        let chosen = |field: &usize| {
            let any = |patterns: &[String]| patterns.iter().any(|p| matches(p, &names[*field]));
            !labels.contains(field) && (self.columns.is_empty() || any(&self.columns)) && !any(&self.ignore)
        };
        let features: Vec<usize> = (0..names.len()).filter(chosen).collect();
        if features.is_empty() {
            return Err("no column is left to learn from; change `data.columns` or `data.ignore`".into());
        }
        let both = |field: &&usize| self.is_category(&names[**field]) && self.is_text(&names[**field]);
        if let Some(&field) = features.iter().find(both) {
            return Err(format!(
                "column {:?} is in `data.categories` and in `data.texts`; leave it in one of the two",
                names[field]
            ));
        }
        let mut seen = HashSet::new();
        if let Some(&twice) = features.iter().find(|field| !seen.insert(&names[**field])) {
            return Err(format!(
                "column {:?} occurs twice; give each a unique name, or leave both out with `data.ignore`",
                names[twice]
            ));
        }
        Ok(features)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(of: &[&str]) -> Vec<String> {
        of.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn columns_are_chosen_by_name_and_pattern() {
        let has = names(&["id", "x_1", "x_2", "city", "y"]);
        let check = |columns: &[&str], ignore: &[&str], want: Result<&[usize], &str>| {
            let choice =
                ColumnChoice { columns: names(columns), ignore: names(ignore), ..ColumnChoice::default() };
            match (choice.features(&has, &[4]), want) {
                (Ok(found), Ok(want)) => assert_eq!(found, want, "{columns:?} {ignore:?}"),
                (Err(said), Err(part)) => assert!(said.contains(part), "{said}"),
                (found, _) => panic!("{columns:?} {ignore:?}: {found:?}"),
            }
        };
        check(&[], &[], Ok(&[0, 1, 2, 3]));
        check(&["x_*", "city"], &[], Ok(&[1, 2, 3]));
        check(&["city", "x_*"], &["*_2"], Ok(&[1, 3]));
        check(&[], &["id"], Ok(&[1, 2, 3]));
        // The label is no feature, whatever fits it.
        check(&["*"], &[], Ok(&[0, 1, 2, 3]));
        check(
            &["town"],
            &[],
            Err("`data.columns` has \"town\", and no column is called so; there are \"id\""),
        );
        check(&[], &["z*"], Err("`data.ignore` has \"z*\""));
        check(&["id"], &["id"], Err("no column is left"));
        let both =
            ColumnChoice { categories: names(&["city"]), texts: names(&["c*"]), ..ColumnChoice::default() };
        let said = both.features(&has, &[4]).unwrap_err();
        assert!(said.contains("\"city\" is in `data.categories` and in `data.texts`"), "{said}");
        let twice = ColumnChoice::default().features(&names(&["a", "b", "a", "y"]), &[3]).unwrap_err();
        assert!(twice.contains("column \"a\" occurs twice"), "{twice}");
        let without = ColumnChoice { ignore: names(&["a"]), ..ColumnChoice::default() };
        assert_eq!(without.features(&names(&["a", "b", "a", "y"]), &[3]), Ok(vec![1]));
    }

    #[test]
    fn blanks_are_known() {
        let plain = ColumnChoice::default();
        let only = ColumnChoice { blanks: names(&["-"]), ..ColumnChoice::default() };
        for (field, of_plain, of_only) in [
            ("", true, true),
            ("na", true, false),
            ("?", true, false),
            ("-", false, true),
            ("0", false, false),
        ] {
            assert_eq!(
                (plain.is_blank(field.as_bytes()), only.is_blank(field.as_bytes())),
                (of_plain, of_only)
            );
        }
    }
}
