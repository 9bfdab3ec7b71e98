//! What one sample of a set is: its features and its target.

use serde::{Deserialize, Serialize};

/// The label of a row that does not count: a token without a tag, or what fills up a batch.
pub const IGNORED: i32 = -1;

/// The shape of every sample of a set, and its target.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// The input of a model.
    pub features: Features,
    /// What the model is to predict.
    pub target: Target,
}

/// The input of a model for one sample.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Features {
    /// An image; batches are `[n, channels, height, width]`, f32.
    Image {
        /// The number of channels.
        channels: usize,
        /// The height in pixels.
        height: usize,
        /// The width in pixels.
        width: usize,
        /// How the set stores it; batches are always planes.
        layout: Layout,
    },
    /// A row of numbers; batches are `[n, width]`, f32.
    Row {
        /// How many numbers a row has.
        width: usize,
    },
    /// A row of numbers, and after them ids of categories, and then of the words of texts; batches are `[n, width]`, f32. An f32 has
    /// every whole number up to 2²⁴, and there are fewer values of a category and fewer words.
    Mixed {
        /// How many numbers a row has.
        numbers: usize,
        /// For each category how many ids there are; its id is below this.
        ids: Vec<usize>,
        /// For each text how many ids its words have, and how many places it has.
        texts: Vec<TextIds>,
    },
    /// A sequence of token ids; batches are `[n, time]`, i32.
    Ids {
        /// The length of the sequence.
        time: usize,
        /// The size of the vocabulary; ids are below this.
        vocab: usize,
    },
    /// Sequences of token ids of different lengths; batches are `[n, time]`, i32, and shorter ones are filled up.
    Texts {
        /// The lengths that they may be filled up to, ascending; the last is that of the longest.
        times: Vec<usize>,
        /// The size of the vocabulary; ids are below this.
        vocab: usize,
        /// The id that fills up, which is no token's.
        padding: usize,
    },
}

/// A text in a row: the ids of its words, in a fixed number of places. Those that it does not fill have the id 0, which is no word's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TextIds {
    /// How many ids there are; ids are below this.
    pub ids: usize,
    /// How many places there are.
    pub length: usize,
}

/// The order of an image's values in a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Layout {
    /// `[channels, height, width]`.
    Planes,
    /// `[height, width, channels]`.
    Interleaved,
}

/// What a model is to predict of a sample.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Target {
    /// One of some classes.
    Class {
        /// How many classes there are.
        classes: usize,
        /// Their names, if the set has names; as many as classes.
        names: Vec<String>,
    },
    /// One of some classes for each word of a text; its label is at its first token, and other tokens have [`IGNORED`].
    Tags {
        /// How many tags there are.
        classes: usize,
        /// Their names, if the set has names; as many as tags.
        names: Vec<String>,
    },
    /// The next id at each position.
    NextId,
    /// Some numbers.
    Numbers {
        /// How many.
        n: usize,
        /// Their names, if the set has names; as many as numbers.
        names: Vec<String>,
    },
    /// Which of some labels hold: any number of them, each for itself.
    Labels {
        /// How many.
        n: usize,
        /// Their names, if the set has names; as many as labels.
        names: Vec<String>,
    },
}

/// As what the labels of a set are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LabelKind {
    /// A class for each sample: [`Target::Class`].
    #[default]
    Classes,
    /// Numbers: [`Target::Numbers`].
    Numbers,
    /// Zeros and ones: [`Target::Labels`].
    Labels,
}

impl Features {
    /// How many elements the features of one sample have.
    pub fn numel(&self) -> usize {
        match *self {
            Features::Image { channels, height, width, .. } => channels * height * width,
            Features::Row { width } => width,
            Features::Mixed { numbers, ref ids, ref texts } => {
                numbers + ids.len() + texts.iter().map(|text| text.length).sum::<usize>()
            }
            Features::Ids { time, .. } => time,
            Features::Texts { ref times, .. } => longest(times),
        }
    }

    /// The shape of one sample in a batch.
    pub fn dims(&self) -> Vec<usize> {
        match *self {
            Features::Image { channels, height, width, .. } => vec![channels, height, width],
            Features::Row { width } => vec![width],
            Features::Mixed { .. } => vec![self.numel()],
            Features::Ids { time, .. } => vec![time],
            Features::Texts { ref times, .. } => vec![longest(times)],
        }
    }

    /// Whether some of a sample's values are ids, which have no mean and cannot be mixed.
    pub fn has_ids(&self) -> bool {
        matches!(self, Features::Ids { .. } | Features::Texts { .. } | Features::Mixed { .. })
    }

    /// Whether batches are integers.
    pub fn is_ids(&self) -> bool {
        matches!(self, Features::Ids { .. } | Features::Texts { .. })
    }

    /// The length that sequences are filled up to in a batch whose longest has this many tokens; where all are alike, their length.
    pub fn time_for(&self, tokens: usize) -> usize {
        match self {
            Features::Texts { times, .. } => {
                times.iter().copied().find(|time| *time >= tokens).unwrap_or_else(|| longest(times))
            }
            Features::Image { .. } | Features::Row { .. } | Features::Mixed { .. } | Features::Ids { .. } => {
                self.numel()
            }
        }
    }

    /// The same where sequences that differ in length are all filled up to `time`.
    pub fn filled_to(&self, time: usize) -> Features {
        match self {
            Features::Texts { vocab, padding, .. } => {
                Features::Texts { times: vec![time], vocab: *vocab, padding: *padding }
            }
            Features::Image { .. } | Features::Row { .. } | Features::Mixed { .. } | Features::Ids { .. } => {
                self.clone()
            }
        }
    }
}

/// The last of some ascending lengths.
fn longest(times: &[usize]) -> usize {
    times.last().copied().unwrap_or(0)
}

impl Target {
    /// As what labels were read that gave this; `None` for the next id, which is not read.
    pub fn kind(&self) -> Option<LabelKind> {
        match self {
            Target::Class { .. } | Target::Tags { .. } => Some(LabelKind::Classes),
            Target::NextId => None,
            Target::Numbers { .. } => Some(LabelKind::Numbers),
            Target::Labels { .. } => Some(LabelKind::Labels),
        }
    }

    /// Whether labels of a batch are f32.
    pub fn is_values(&self) -> bool {
        matches!(self, Target::Numbers { .. } | Target::Labels { .. })
    }
}

impl Spec {
    /// Labels of one sample: one class, one tag or id per position, or as many numbers as the target has.
    pub fn n_labels(&self) -> usize {
        match self.target {
            Target::Class { .. } => 1,
            Target::NextId | Target::Tags { .. } => self.features.numel(),
            Target::Numbers { n, .. } | Target::Labels { n, .. } => n,
        }
    }

    /// Rows of a model's output for one sample: one, or one per position.
    pub fn n_rows(&self) -> usize {
        match self.target {
            Target::NextId | Target::Tags { .. } => self.features.numel(),
            Target::Class { .. } | Target::Numbers { .. } | Target::Labels { .. } => 1,
        }
    }

    /// The width of a row of a model's output: a logit for each class, id or label, or the numbers.
    pub fn outputs(&self) -> usize {
        match self.target {
            Target::Class { .. } | Target::Tags { .. } | Target::NextId => self.classes(),
            Target::Numbers { n, .. } | Target::Labels { n, .. } => n,
        }
    }

    /// How many classes, or ids, a label is one of; 0 where labels are not one of some.
    pub fn classes(&self) -> usize {
        match (&self.target, &self.features) {
            (Target::Class { classes, .. } | Target::Tags { classes, .. }, _) => *classes,
            (Target::NextId, Features::Ids { vocab, .. }) => *vocab,
            (Target::NextId, _) => unreachable!("only ids have a next id"),
            (Target::Numbers { .. } | Target::Labels { .. }, _) => 0,
        }
    }
}
