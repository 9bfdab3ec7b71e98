//! What must be known of the training data to use a model without them: what a sample is, how its numbers were
//! normalised, what the classes are called. Checkpoints keep it.

use std::path::PathBuf;

use polyreme_data::table::Columns;
use polyreme_data::{Features, Layout, Spec, Stats, Target};
use serde::{Deserialize, Serialize};

/// How samples are prepared for a model.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Preparation {
    /// What a sample is.
    pub sample: Sample,
    /// What a label is one of; 0 for the next id.
    pub classes: usize,
    /// The names of the classes, if there are.
    pub names: Vec<String>,
    /// Subtracted from each channel; empty without normalisation.
    pub mean: Vec<f32>,
    /// What each channel is divided by.
    pub std: Vec<f32>,
    /// The tokenizer's file; `None`: bytes.
    pub tokenizer: Option<PathBuf>,
    /// The names of a table's features, in their order; empty without a header.
    #[serde(default)]
    pub columns: Vec<String>,
    /// The name of its label's column.
    #[serde(default)]
    pub label: Option<String>,
}

/// What a sample is, as a checkpoint keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
    /// Token ids.
    Ids {
        /// How many.
        time: usize,
        /// Ids are below this.
        vocab: usize,
    },
}

impl Preparation {
    /// Of a set with this spec.
    pub fn new(spec: &Spec, stats: Option<&Stats>, tokenizer: Option<PathBuf>) -> Preparation {
        let sample = match spec.features {
            Features::Image { channels, height, width, .. } => Sample::Image { channels, height, width },
            Features::Row { width } => Sample::Row { width },
            Features::Ids { time, vocab } => Sample::Ids { time, vocab },
        };
        let (classes, names) = match &spec.target {
            Target::Class { classes, names } => (*classes, names.clone()),
            Target::NextId => (0, Vec::new()),
        };
        let (mean, std) = stats.map_or_else(Default::default, |s| (s.mean.clone(), s.std.clone()));
        let (columns, label) = (Vec::new(), None);
        Preparation { sample, classes, names, mean, std, tokenizer, columns, label }
    }

    /// The same for a table with these columns.
    pub fn with_columns(self, columns: Columns) -> Preparation {
        Preparation { columns: columns.features, label: columns.label, ..self }
    }

    /// The columns of the table that was trained on.
    pub fn columns(&self) -> Columns {
        Columns { features: self.columns.clone(), label: self.label.clone() }
    }

    /// What of the data is not as a model with `self` has it, in words: samples cannot be read as they were.
    pub fn misfit(&self, now: &Preparation) -> Option<String> {
        let list = |names: &[String]| names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
        if !self.columns.is_empty() && !now.columns.is_empty() && self.columns != now.columns {
            return Some(format!("columns are {} and were {}", list(&now.columns), list(&self.columns)));
        }
        (self.names != now.names)
            .then(|| format!("classes are {} and were {}", list(&now.names), list(&self.names)))
    }

    /// The spec of samples that are to be predicted; images lie as `layout` says.
    pub fn spec(&self, layout: Layout) -> Spec {
        let features = match self.sample {
            Sample::Image { channels, height, width } => Features::Image { channels, height, width, layout },
            Sample::Row { width } => Features::Row { width },
            Sample::Ids { time, vocab } => Features::Ids { time, vocab },
        };
        let target = match self.classes {
            0 => Target::NextId,
            classes => Target::Class { classes, names: self.names.clone() },
        };
        Spec { features, target }
    }

    /// The normalisation, if there is one.
    pub fn stats(&self) -> Option<Stats> {
        (!self.mean.is_empty()).then(|| Stats { mean: self.mean.clone(), std: self.std.clone() })
    }

    /// The name of a class, or its number.
    pub fn class_name(&self, class: usize) -> String {
        self.names.get(class).cloned().unwrap_or_else(|| class.to_string())
    }
}
