//! `docs/job-file.md` and the reader agree: the same tables, the same keys, and examples that are right.

use std::collections::BTreeSet;

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_nn::Model;
use polyreme_nn::model::StackLayer;

use super::super::keys::{DATA_KINDS, GRAMMARS, METRICS, OPTIMIZER_KINDS, SCHEDULE_KINDS, TRANSPORTS};
use super::good;

const DOCUMENT: &str = include_str!("../../../../../docs/job-file.md");

/// The names in the first cells of the table under a heading that ends with a mark such as `[train]` or `train.optimizer`.
fn rows(mark: &str) -> BTreeSet<String> {
    let mark = format!("`{mark}`");
    let mut lines = DOCUMENT.lines().skip_while(|l| !(l.starts_with('#') && l.ends_with(&mark)));
    assert!(lines.next().is_some(), "no heading ends with {mark}");
    let table = lines.take_while(|l| !l.starts_with('#')).filter(|l| l.starts_with("| `"));
    // A cell may hold several names.
    let cells = table.map(|l| l.split('|').nth(1).unwrap_or_default());
    cells.flat_map(|c| c.split('`').skip(1).step_by(2)).map(String::from).collect()
}

fn set<'a>(names: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    names.into_iter().map(String::from).collect()
}

#[test]
fn keys() {
    for grammar in &GRAMMARS {
        let mark = match grammar.path {
            "" => "job.toml".to_string(),
            path if path.contains('.') => path.into(),
            path => format!("[{path}]"),
        };
        assert_eq!(rows(&mark), set(grammar.keys.iter().map(|k| k.name)), "{mark}");
    }
}

#[test]
fn kinds() {
    assert_eq!(rows("model.kind"), set(Model::NAMES.into_iter().chain(["layers"])));
    assert_eq!(rows("data.kind"), set(DATA_KINDS));
    assert_eq!(rows("train.optimizer.kind"), set(OPTIMIZER_KINDS));
    assert_eq!(rows("train.schedule.kind"), set(SCHEDULE_KINDS));
    let layers = StackLayer::KINDS.into_iter().chain(ACTIVATIONS.map(|(name, _)| name));
    assert_eq!(rows("model.layers.kind"), set(layers));
    assert_eq!(rows("metrics"), set(METRICS));
    assert_eq!(rows("parallel.transport"), set(TRANSPORTS));
}

#[test]
fn examples() {
    let blocks: Vec<_> = DOCUMENT.split("```toml\n").skip(1).filter_map(|b| b.split("```").next()).collect();
    assert!(blocks.len() >= 2);
    for block in blocks {
        good(block, &[]);
    }
}
