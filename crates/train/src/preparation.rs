//! What must be known of the training data to use a model without them: what a sample is, how its numbers were
//! normalised, what the classes are called. Checkpoints keep it.

use std::path::PathBuf;

use polyreme_data::table::{Columns, TableSchema};
use polyreme_data::{Features, Layout, Spec, Stats, Target, TextIds};
use serde::{Deserialize, Serialize};

/// How samples are prepared for a model.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Preparation {
    /// What a sample is.
    pub sample: Sample,
    /// What a label is one of; 0 for the next id, numbers and labels that each hold or not.
    pub classes: usize,
    /// The names of the classes, if there are.
    pub names: Vec<String>,
    /// Subtracted from each channel; empty without normalisation.
    pub mean: Vec<f32>,
    /// What each channel is divided by.
    pub std: Vec<f32>,
    /// The tokenizer's file; `None`: bytes.
    pub tokenizer: Option<PathBuf>,
    /// The digest of that file, where ids must be those of the same tokenizer later.
    #[serde(default)]
    pub tokenizer_digest: Option<String>,
    /// Whether tokens of the second text of a pair are told from those of the first.
    #[serde(default)]
    pub types: bool,
    /// Whether classes are those of words, and not of samples.
    #[serde(default)]
    pub tags: bool,
    /// The names of a table's features, in their order; empty without a header.
    #[serde(default)]
    pub columns: Vec<String>,
    /// The name of its label's column.
    #[serde(default)]
    pub label: Option<String>,
    /// What is said in place of a class: numbers, or labels that each hold or not.
    #[serde(default)]
    pub values: Option<TargetValues>,
    /// As what the columns of a table are read; `None`: as numbers.
    #[serde(default)]
    pub schema: Option<TableSchema>,
}

/// Numbers, or labels that each hold or not, as a checkpoint keeps them.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TargetValues {
    /// Whether they are labels.
    pub labels: bool,
    /// How many there are.
    pub n: usize,
    /// Their names, if there are: those of a table's columns.
    pub names: Vec<String>,
    /// Subtracted from each number; empty without normalisation.
    pub mean: Vec<f32>,
    /// What each number is divided by.
    pub std: Vec<f32>,
}

/// What a sample is, as a checkpoint keeps it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sample {
    /// An image.
    Image {
        /// Colours.
        channels: usize,
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
    },
    /// Numbers.
    Row {
        /// How many.
        width: usize,
    },
    /// Numbers, followed by ids of categories and of the words of texts.
    Mixed {
        /// How many numbers.
        numbers: usize,
        /// For each category how many ids there are.
        ids: Vec<usize>,
        /// The ids of each text.
        #[serde(default)]
        texts: Vec<TextIds>,
    },
    /// Token ids.
    Ids {
        /// How many.
        time: usize,
        /// Ids are below this.
        vocab: usize,
    },
    /// The tokens of a text.
    Texts {
        /// The lengths that texts are filled up to.
        times: Vec<usize>,
        /// Ids are below this.
        vocab: usize,
        /// The id that fills up.
        padding: usize,
    },
}

impl Preparation {
    /// Of a set with this spec.
    pub fn new(spec: &Spec, stats: Option<&Stats>, tokenizer: Option<PathBuf>) -> Preparation {
        let sample = match &spec.features {
            &Features::Image { channels, height, width, .. } => Sample::Image { channels, height, width },
            &Features::Row { width } => Sample::Row { width },
            Features::Mixed { numbers, ids, texts } => {
                Sample::Mixed { numbers: *numbers, ids: ids.clone(), texts: texts.clone() }
            }
            &Features::Ids { time, vocab } => Sample::Ids { time, vocab },
            Features::Texts { times, vocab, padding } => {
                Sample::Texts { times: times.clone(), vocab: *vocab, padding: *padding }
            }
        };
        let (classes, names) = match &spec.target {
            Target::Class { classes, names } | Target::Tags { classes, names } => (*classes, names.clone()),
            Target::NextId | Target::Numbers { .. } | Target::Labels { .. } => (0, Vec::new()),
        };
        let values = match &spec.target {
            Target::Class { .. } | Target::Tags { .. } | Target::NextId => None,
            Target::Numbers { n, names } => Some((false, *n, names)),
            Target::Labels { n, names } => Some((true, *n, names)),
        };
        let values = values.map(|(labels, n, names)| {
            let (mean, std) = (Vec::new(), Vec::new());
            TargetValues { labels, n, names: names.clone(), mean, std }
        });
        let (mean, std) = stats.map_or_else(Default::default, |s| (s.mean.clone(), s.std.clone()));
        let (columns, label) = (Vec::new(), None);
        Preparation {
            sample,
            classes,
            names,
            mean,
            std,
            tokenizer,
            tokenizer_digest: None,
            types: false,
            tags: matches!(spec.target, Target::Tags { .. }),
            columns,
            label,
            values,
            schema: None,
        }
    }

    /// The same where numbers to be predicted are normalised by `stats`.
    pub fn with_targets(mut self, stats: Option<&Stats>) -> Preparation {
        if let (Some(values), Some(stats)) = (&mut self.values, stats) {
            (values.mean, values.std) = (stats.mean.clone(), stats.std.clone());
        }
        self
    }

    /// The same for a table with these columns.
    pub fn with_columns(self, columns: Columns) -> Preparation {
        let label = columns.labels.into_iter().next().filter(|_| self.values.is_none());
        Preparation { columns: columns.features, label, ..self }
    }

    /// The same for a table whose columns are read so.
    pub fn with_schema(self, schema: Option<TableSchema>) -> Preparation {
        Preparation { schema, ..self }
    }

    /// The same for texts whose tokenizer's file has this digest.
    pub fn with_tokenizer_digest(self, tokenizer_digest: Option<String>) -> Preparation {
        Preparation { tokenizer_digest, ..self }
    }

    /// The same for texts that are pairs whose tokens have types.
    pub fn with_types(self, types: bool) -> Preparation {
        Preparation { types, ..self }
    }

    /// The columns of the table that was trained on.
    pub fn columns(&self) -> Columns {
        let several = self.values.as_ref().map(|values| values.names.clone());
        let labels = several.unwrap_or_else(|| self.label.iter().cloned().collect());
        Columns { features: self.columns.clone(), labels }
    }

    /// What of the data is not as a model with `self` has it, in words: samples cannot be read as they were.
    pub fn misfit(&self, now: &Preparation) -> Option<String> {
        let list = |names: &[String]| names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
        if !self.columns.is_empty() && !now.columns.is_empty() && self.columns != now.columns {
            return Some(format!("columns are {} and were {}", list(&now.columns), list(&self.columns)));
        }
        match (&self.schema, &now.schema) {
            (Some(was), Some(is)) => {
                if let Some(what) = was.misfit(is) {
                    return Some(what);
                }
            }
            (None, Some(_)) => {
                return Some("columns have words, dates or blanks and were all numbers".into());
            }
            (Some(_), None) => return Some("columns are all numbers and were not".into()),
            (None, None) => {}
        }
        if self.tokenizer_digest != now.tokenizer_digest {
            return Some("texts are cut into tokens by another tokenizer than they were".into());
        }
        if self.tags != now.tags {
            let words = |tags: bool| if tags { "each word has a label" } else { "each text has a label" };
            return Some(format!("{} now, and {} in training", words(now.tags), words(self.tags)));
        }
        let targets = |p: &Preparation| p.values.as_ref().map(|v| (v.labels, v.n, v.names.clone()));
        if targets(self) != targets(now) {
            let words = |p: &Preparation| match targets(p) {
                None => "not numbers".into(),
                Some((labels, n, names)) => {
                    let what = if labels { "labels of 0 or 1" } else { "numbers" };
                    let names = if names.is_empty() { String::new() } else { format!(" ({})", list(&names)) };
                    format!("{n} {what}{names}")
                }
            };
            return Some(format!("targets are {} and were {}", words(now), words(self)));
        }
        (self.names != now.names)
            .then(|| format!("classes are {} and were {}", list(&now.names), list(&self.names)))
    }

    /// The spec of samples that are to be predicted; images lie as `layout` says.
    pub fn spec(&self, layout: Layout) -> Spec {
        let features = match &self.sample {
            &Sample::Image { channels, height, width } => Features::Image { channels, height, width, layout },
            &Sample::Row { width } => Features::Row { width },
            Sample::Mixed { numbers, ids, texts } => {
                Features::Mixed { numbers: *numbers, ids: ids.clone(), texts: texts.clone() }
            }
            &Sample::Ids { time, vocab } => Features::Ids { time, vocab },
            Sample::Texts { times, vocab, padding } => {
                Features::Texts { times: times.clone(), vocab: *vocab, padding: *padding }
            }
        };
        let target = match (&self.values, self.classes) {
            (Some(TargetValues { labels: false, n, names, .. }), _) => {
                Target::Numbers { n: *n, names: names.clone() }
            }
            (Some(TargetValues { labels: true, n, names, .. }), _) => {
                Target::Labels { n: *n, names: names.clone() }
            }
            (None, 0) => Target::NextId,
            (None, classes) if self.tags => Target::Tags { classes, names: self.names.clone() },
            (None, classes) => Target::Class { classes, names: self.names.clone() },
        };
        Spec { features, target }
    }

    /// The normalisation, if there is one.
    pub fn stats(&self) -> Option<Stats> {
        (!self.mean.is_empty()).then(|| Stats { mean: self.mean.clone(), std: self.std.clone() })
    }

    /// The normalisation of numbers that are predicted, if there is one.
    pub fn target_stats(&self) -> Option<Stats> {
        let values = self.values.as_ref().filter(|values| !values.mean.is_empty())?;
        Some(Stats { mean: values.mean.clone(), std: values.std.clone() })
    }

    /// The name of a class or a label, or its number.
    pub fn class_name(&self, class: usize) -> String {
        let names = self.values.as_ref().map_or(&self.names, |values| &values.names);
        names.get(class).cloned().unwrap_or_else(|| class.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(target: Target, stats: Option<&Stats>) -> Preparation {
        let spec = Spec { features: Features::Row { width: 2 }, target };
        Preparation::new(&spec, None, None).with_targets(stats)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn targets_and_their_normalisation_are_kept() {
        let stats = Stats { mean: vec![1e6 + 0.3, -0.1], std: vec![3.3e-7, 1.0 / 3.0] };
        let numbers = Target::Numbers { n: 2, names: names(&["price", "age"]) };
        let kept = of(numbers.clone(), Some(&stats));
        let again: Preparation = serde_json::from_str(&serde_json::to_string(&kept).unwrap()).unwrap();
        assert_eq!((again.spec(Layout::Planes).target, again.target_stats()), (numbers, Some(stats)));
        assert_eq!((again.columns().labels, again.class_name(1)), (names(&["price", "age"]), "age".into()));
        // What earlier versions wrote has classes.
        let classes = of(Target::Class { classes: 3, names: Vec::new() }, None);
        let mut before = serde_json::to_value(&classes).unwrap();
        before.as_object_mut().unwrap().remove("values");
        assert_eq!(serde_json::from_value::<Preparation>(before).unwrap(), classes);
    }

    #[test]
    fn other_targets_do_not_fit() {
        let numbers = |list: &[&str]| of(Target::Numbers { n: 2, names: names(list) }, None);
        let labels = of(Target::Labels { n: 2, names: Vec::new() }, None);
        let classes = of(Target::Class { classes: 3, names: Vec::new() }, None);
        let said = |was: &Preparation, now: &Preparation| was.misfit(now).unwrap();
        assert_eq!(numbers(&["a", "b"]).misfit(&numbers(&["a", "b"])), None);
        assert_eq!(
            said(&numbers(&["a", "b"]), &numbers(&["b", "a"])),
            "targets are 2 numbers (b, a) and were 2 numbers (a, b)"
        );
        assert_eq!(said(&labels, &numbers(&[])), "targets are 2 numbers and were 2 labels of 0 or 1");
        assert_eq!(said(&classes, &labels), "targets are 2 labels of 0 or 1 and were not numbers");
    }
}
