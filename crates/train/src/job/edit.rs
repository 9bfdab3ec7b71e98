//! Job files as text: which keys one sets, and how some are changed while comments and the order of lines stay.
//!
//! Only lines of the form `key = value` under a `[section]` are changed or added. Whoever changes a file reads the result again
//! and compares: a section that is written as an inline table is not understood here, and then the values differ.

use std::collections::BTreeSet;

/// The keys that a job file and overrides (`train.batch=128`) set, as `parallel.data`; of tables in tables the first two names.
/// A text that cannot be read sets none.
pub fn said_keys(text: &str, sets: &[String]) -> BTreeSet<String> {
    let root: toml::Table = text.parse().unwrap_or_default();
    let mut said = BTreeSet::new();
    for (section, value) in &root {
        match value.as_table() {
            Some(table) => said.extend(table.keys().map(|key| format!("{section}.{key}"))),
            None => drop(said.insert(section.clone())),
        }
    }
    for set in sets {
        let path = set.split('=').next().unwrap_or_default();
        let names: Vec<&str> = path.split('.').map(str::trim).take(2).collect();
        said.insert(names.join("."));
    }
    said
}

/// The text with `key = value` under `[section]`: changed where it stands, or else added at the end of the section, or else in a
/// new section at the end. `value` is TOML.
pub fn set_key(text: &str, section: &str, key: &str, value: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let header = format!("[{section}]");
    let Some(start) = lines.iter().position(|line| without_comment(line).trim() == header) else {
        if lines.last().is_some_and(|line| !line.trim().is_empty()) {
            lines.push(String::new());
        }
        lines.extend([header, format!("{key} = {value}")]);
        return lines.join("\n") + "\n";
    };
    let after = |line: &String| line.trim_start().starts_with('[');
    let end = lines[start + 1..].iter().position(after).map_or(lines.len(), |n| start + 1 + n);
    let of_key = |line: &String| line.split_once('=').is_some_and(|(name, _)| name.trim() == key);
    match (start + 1..end).find(|i| of_key(&lines[*i])) {
        Some(i) => {
            let line = &lines[i];
            let (name, _) = line.split_once('=').unwrap_or((key, ""));
            let comment = &line[without_comment(line).trim_end().len()..];
            lines[i] = format!("{name}= {value}{comment}");
        }
        None => {
            // Before the empty lines and comments that lead to the next section.
            let last =
                (start..end).rev().find(|i| !without_comment(&lines[*i]).trim().is_empty()).unwrap_or(start);
            lines.insert(last + 1, format!("{key} = {value}"));
        }
    }
    lines.join("\n") + "\n"
}

/// A line up to its comment.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, '#') => return &line[..at],
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            (None | Some(_), _) => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_and_changed() {
        let text = "name = \"a # b\"\n\n[train] # how\nbatch = 8  # few\n\n# for later\n[parallel]\ndata = \"auto\" # any\n";
        let said: Vec<_> = said_keys(text, &["train.optimizer.lr=1".into()]).into_iter().collect();
        assert_eq!(said, ["name", "parallel.data", "train.batch", "train.optimizer"]);
        let changed = set_key(text, "train", "batch", "16");
        assert_eq!(changed, text.replace("batch = 8  # few", "batch = 16  # few"));
        let changed = set_key(text, "parallel", "data", "2");
        assert_eq!(changed, text.replace("\"auto\"", "2"));
        let added = set_key(text, "train", "precision", "\"bf16\"");
        assert_eq!(added, text.replace("# few\n", "# few\nprecision = \"bf16\"\n"));
        let added = set_key("[train]\nbatch = 8", "parallel", "data", "2");
        assert_eq!(added, "[train]\nbatch = 8\n\n[parallel]\ndata = 2\n");
        assert_eq!(set_key("", "parallel", "data", "2"), "[parallel]\ndata = 2\n");
    }
}
