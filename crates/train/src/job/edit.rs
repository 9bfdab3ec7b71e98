//! Job files as text: which keys one sets, and how some are changed while comments, layout and everything else stay.
//!
//! The text is edited as a document of `toml_edit`, so it does not matter how a section is written: under a header, as dotted keys or as
//! an inline table.

use std::collections::BTreeSet;

use toml_edit::{DocumentMut, Item, Table, TomlError, Value};

/// The keys that a job file and overrides (`train.batch=128`) set, as `parallel.data`; of tables in tables the first two names.
/// A text that cannot be read sets none.
pub fn said_keys(text: &str, sets: &[String]) -> BTreeSet<String> {
    let root: DocumentMut = text.parse().unwrap_or_default();
    let mut said = BTreeSet::new();
    for (section, item) in root.iter() {
        match item.as_table_like() {
            Some(table) => said.extend(table.iter().map(|(key, _)| format!("{section}.{key}"))),
            None => drop(said.insert(section.to_string())),
        }
    }
    for set in sets {
        let path = set.split('=').next().unwrap_or_default();
        let names: Vec<&str> = path.split('.').map(str::trim).take(2).collect();
        said.insert(names.join("."));
    }
    said
}

/// The text with `key = value` in `section`, for each of `keys` (section, key, value as TOML): changed where it stands, or else at the end of
/// its section, or else in a new section at the end.
///
/// An error if the text or a value is not TOML. A key whose section is not a table is left out: no job file reads so.
pub fn with_keys<'a>(
    text: &str,
    keys: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>,
) -> Result<String, TomlError> {
    let mut root: DocumentMut = text.parse()?;
    for (section, key, value) in keys {
        let mut value: Value = value.parse()?;
        let section = root.entry(section).or_insert(Item::Table(Table::new()));
        let Some(table) = section.as_table_like_mut() else { continue };
        match table.get_mut(key).and_then(Item::as_value_mut) {
            Some(old) => {
                // What stands around a value is its comment, and how the line is aligned.
                *value.decor_mut() = old.decor().clone();
                *old = value;
            }
            None => {
                table.insert(key, Item::Value(value));
                // The space before a closing brace belongs to the value that was the last.
                if let Some(inline) = section.as_inline_table_mut() {
                    inline.fmt();
                }
            }
        }
    }
    Ok(root.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str, section: &str, key: &str, value: &str) -> String {
        with_keys(text, [(section, key, value)]).unwrap()
    }

    #[test]
    fn keys_are_found_and_changed() {
        let text = "name = \"a # b\"\n\n[train] # how\nbatch  =  8  # few\n\n# for later\n[parallel]\ndata = \"auto\" # any\n";
        let said: Vec<_> = said_keys(text, &["train.optimizer.lr=1".into()]).into_iter().collect();
        assert_eq!(said, ["name", "parallel.data", "train.batch", "train.optimizer"]);
        assert_eq!(set(text, "train", "batch", "16"), text.replace("8  # few", "16  # few"));
        assert_eq!(set(text, "parallel", "data", "2"), text.replace("\"auto\"", "2"));
        let added = text.replace("# few\n", "# few\nprecision = \"bf16\"\n");
        assert_eq!(set(text, "train", "precision", "\"bf16\""), added);
        let two = with_keys(text, [("parallel", "data", "2"), ("parallel", "stage", "4")]).unwrap();
        assert_eq!(two, text.replace("\"auto\" # any\n", "2 # any\nstage = 4\n"));
    }

    #[test]
    fn sections_may_be_written_in_any_way() {
        for (text, want) in [
            ("", "[parallel]\ndata = 2\n"),
            ("[train]\nbatch = 8", "[train]\nbatch = 8\n\n[parallel]\ndata = 2\n"),
            ("parallel = { tensor = 2 } # so\n", "parallel = { tensor = 2, data = 2 } # so\n"),
            ("parallel = { data = 1 }\n[train]\n", "parallel = { data = 2 }\n[train]\n"),
            ("parallel.data = 1\nparallel.stage = 2\n", "parallel.data = 2\nparallel.stage = 2\n"),
            ("parallel.stage = 2\n[train]\n", "parallel.stage = 2\nparallel.data = 2\n[train]\n"),
            ("[parallel]\n# none yet\n", "[parallel]\ndata = 2\n# none yet\n"),
            ("[parallel]\r\nstage = 2\r\n", "[parallel]\nstage = 2\ndata = 2\n"),
        ] {
            assert_eq!(set(text, "parallel", "data", "2"), want, "{text}");
        }
        assert!(with_keys("[parallel", []).is_err() && with_keys("", [("a", "b", "2 3")]).is_err());
    }
}
