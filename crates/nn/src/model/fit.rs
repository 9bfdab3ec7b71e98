//! Sizes that follow from the data: what a job leaves out is set, what it gives is checked against the data.

use polyreme_graph::TraceError;

use super::{Model, StackInput, TraceOptions};
use crate::layer::TextIds;

/// What one sample of the data is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sample<'a> {
    /// An image, `[channels, height, width]`.
    Image {
        /// The number of channels.
        channels: usize,
        /// The height in pixels.
        height: usize,
        /// The width in pixels.
        width: usize,
    },
    /// A row of numbers.
    Row {
        /// How many numbers a row has.
        width: usize,
    },
    /// A row of numbers, followed by ids of categories and of words.
    Mixed {
        /// How many numbers a row has.
        numbers: usize,
        /// How many ids each category has.
        ids: &'a [usize],
        /// The ids of the words of each text.
        texts: &'a [TextIds],
    },
    /// A sequence of token ids.
    Ids {
        /// The size of the vocabulary.
        vocab: usize,
        /// The length of the sequence.
        time: usize,
    },
    /// Sequences of token ids of different lengths, filled up at their end.
    Texts {
        /// The size of the vocabulary, with the id that fills up.
        vocab: usize,
        /// The longest sequence.
        time: usize,
        /// The id that fills up.
        padding: usize,
    },
}

/// What the data's labels are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// One of some classes for each sample.
    Class {
        /// How many classes there are.
        classes: usize,
    },
    /// One of some classes for each word of a sequence.
    Tags {
        /// How many there are.
        classes: usize,
    },
    /// The next id at each position.
    NextId,
    /// So many numbers, or labels that each hold or not, for each sample.
    Values {
        /// How many.
        n: usize,
    },
}

/// The values of [`TraceOptions`] that the data need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fitted {
    /// The length of sequences.
    pub time: Option<usize>,
    /// Rows and columns of images.
    pub image: Option<(usize, usize)>,
}

impl Fitted {
    /// The same options, with the data's sizes.
    pub fn options(&self, options: TraceOptions) -> TraceOptions {
        TraceOptions { time: self.time, image: self.image, ..options }
    }
}

/// A model and data that do not fit together.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum FitError {
    /// A size in the job that differs from the data's.
    #[error("model.{key} is {said}, the data has {found}; {advice}")]
    Differs {
        /// The size's name.
        key: &'static str,
        /// The size that the job gives.
        said: String,
        /// The size that the data have, such as `12 classes`.
        found: String,
        /// What to do.
        advice: &'static str,
    },
    /// A kind of data that the model does not take.
    #[error("the model `{model}` takes {takes}, the data are {found}; choose another model or other data")]
    Kind {
        /// The model's name.
        model: &'static str,
        /// What it takes.
        takes: &'static str,
        /// What the data are.
        found: String,
    },
    /// The layers do not take the data.
    #[error("the model does not take the data: {0}")]
    Layers(#[from] TraceError),
}

/// What layers take of a table.
const NUMBERS: &str = "numbers, images or ids (a larger `data.one_hot` makes numbers of categories with many values, and `data.ignore` leaves texts out)";

const LEAVE_OUT: &str = "leave it out to take it from the data";

impl Model {
    /// The sizes that [`Model::fit`] can take from the data, as job files name them.
    pub fn sizes_from_data(&self) -> &'static [&'static str] {
        match self {
            Model::Mlp(_) | Model::Tabular(_) => &["inputs", "classes"],
            Model::Lenet(_) => &["channels", "image", "classes"],
            Model::Cnn(_) | Model::AlexNet(_) | Model::ResNet(_) => &["channels", "classes"],
            Model::Gpt(_) | Model::Gpt2(_) => &["vocab", "context"],
            Model::Recurrent(_) | Model::Encoder(_) | Model::Bert(_) => &["vocab", "context", "classes"],
            Model::Layers(_) => &["input", "classes"],
        }
    }

    /// Sets the sizes named in `missing` from the data, checks the others against them, and traces the model once, so
    /// that layers that do not take the data are found here.
    pub fn fit(&mut self, sample: Sample, answer: Answer, missing: &[String]) -> Result<Fitted, FitError> {
        let open = |key: &str| missing.iter().any(|m| m == key);
        let name = self.name();
        let kind = |takes| Err(FitError::Kind { model: name, takes, found: found(sample, answer) });
        let mut fitted = Fitted { time: None, image: None };
        match (&mut *self, sample) {
            (Model::Layers(stack), _) => {
                if stack.input == StackInput::Open || open("input") {
                    stack.input = match sample {
                        Sample::Image { channels, height, width } => {
                            StackInput::Image { channels, height, width }
                        }
                        Sample::Row { width } => StackInput::Row { width },
                        Sample::Mixed { .. } => return kind(NUMBERS),
                        Sample::Ids { vocab, time } => StackInput::Ids { vocab, context: time },
                        Sample::Texts { vocab, time, padding } => {
                            StackInput::Texts { vocab, context: time, padding }
                        }
                    };
                }
                // A job file says sizes of ids; that texts differ in length is known from the data.
                if let (StackInput::Ids { vocab, context }, Sample::Texts { padding, .. }) =
                    (stack.input, sample)
                {
                    stack.input = StackInput::Texts { vocab, context, padding };
                }
                check_input(stack.input, sample, &mut fitted)?;
                match (answer, stack.is_per_token()) {
                    (Answer::NextId | Answer::Tags { .. }, false) => {
                        return kind(
                            "one label a sample: `last_step`, `mean_time` or `flatten` ends the sequence",
                        );
                    }
                    (Answer::Class { .. } | Answer::Values { .. }, true) => {
                        return kind("one label a token: no `last_step` or `mean_time` ends the sequence");
                    }
                    _ => {}
                }
                stack.set_classes(n_classes(sample, answer));
            }
            (Model::Mlp(m), Sample::Row { .. } | Sample::Image { .. }) => {
                m.categories.clear();
                m.texts.clear();
                let width = numel(sample);
                set("inputs", &mut m.inputs, width, open("inputs"), "numbers a sample")?;
            }
            (
                Model::Mlp(super::Mlp { inputs, categories, texts: of_model, .. })
                | Model::Tabular(super::Tabular { inputs, categories, texts: of_model, .. }),
                Sample::Mixed { ids, texts, .. },
            ) => {
                *categories = ids.to_vec();
                *of_model = texts.to_vec();
                set("inputs", inputs, numel(sample), open("inputs"), "numbers a sample")?;
            }
            (Model::Tabular(m), Sample::Row { width }) => {
                m.categories.clear();
                m.texts.clear();
                set("inputs", &mut m.inputs, width, open("inputs"), "numbers a sample")?;
            }
            (Model::Tabular(_), _) => return kind("rows of a table"),
            (Model::Mlp(_), _) => return kind("rows or images"),
            (Model::Lenet(m), Sample::Image { channels, height, width }) => {
                set("channels", &mut m.channels, channels, open("channels"), "channels")?;
                if open("image") {
                    m.image = (height, width);
                } else if m.image != (height, width) {
                    let (said, found) = (format!("{:?}", m.image), format!("images of {height}x{width}"));
                    return Err(FitError::Differs { key: "image", said, found, advice: LEAVE_OUT });
                }
            }
            (
                Model::Cnn(super::Cnn { channels: said, .. })
                | Model::AlexNet(super::AlexNet { channels: said, .. })
                | Model::ResNet(super::ResNet { channels: said, .. }),
                Sample::Image { channels, height, width },
            ) => {
                set("channels", said, channels, open("channels"), "channels")?;
                fitted.image = Some((height, width));
            }
            (Model::Lenet(_) | Model::Cnn(_) | Model::AlexNet(_) | Model::ResNet(_), _) => {
                return kind("images");
            }
            (
                Model::Gpt(super::Gpt { vocab: v, context: c, .. })
                | Model::Gpt2(super::Gpt2 { vocab: v, context: c, .. }),
                Sample::Ids { vocab, time },
            ) if answer == Answer::NextId => {
                set_ids(v, c, vocab, time, open("vocab"), open("context"))?;
                fitted.time = Some(time);
            }
            (Model::Gpt(_) | Model::Gpt2(_), _) => return kind("text whose labels are the next tokens"),
            (
                Model::Recurrent(super::RecurrentClassifier {
                    vocab: v, context: c, padding: p, tags, ..
                })
                | Model::Encoder(super::EncoderClassifier { vocab: v, context: c, padding: p, tags, .. })
                | Model::Bert(super::Bert { vocab: v, context: c, padding: p, tags, .. }),
                Sample::Ids { vocab, time } | Sample::Texts { vocab, time, .. },
            ) if answer != Answer::NextId => {
                *tags = matches!(answer, Answer::Tags { .. });
                *p = match sample {
                    Sample::Texts { padding, .. } => Some(padding),
                    _ => None,
                };
                set_ids(v, c, vocab, time, open("vocab"), open("context"))?;
                fitted.time = Some(time);
            }
            (Model::Recurrent(_) | Model::Encoder(_) | Model::Bert(_), _) => {
                return kind("token ids with a class a sequence, or a tag a word");
            }
        }
        let outputs = match answer {
            Answer::Class { classes } => Some((classes, "classes")),
            Answer::Tags { classes } => Some((classes, "tags")),
            Answer::Values { n } => Some((n, "targets")),
            Answer::NextId => None,
        };
        if let (Some((outputs, what)), Some(said)) = (outputs, self.classes_mut()) {
            set("classes", said, outputs, open("classes"), what)?;
        }
        let graph = self.trace(&fitted.options(TraceOptions::evaluation(1)))?;
        if let (Model::Layers(_), Some(logits)) = (&*self, graph.output("logits")) {
            let (said, classes) = (graph.shape(logits).last(), n_classes(sample, answer));
            let fits = if answer == Answer::NextId { said >= classes } else { said == classes };
            if !fits {
                let what = if matches!(answer, Answer::Values { .. }) { "targets" } else { "classes" };
                let (said, found) = (said.to_string(), format!("{classes} {what}"));
                let advice = "leave `outputs` of the last layer out to take it from the data";
                return Err(FitError::Differs { key: "classes", said, found, advice });
            }
        }
        Ok(fitted)
    }

    fn classes_mut(&mut self) -> Option<&mut usize> {
        match self {
            Model::Mlp(m) => Some(&mut m.classes),
            Model::Tabular(m) => Some(&mut m.classes),
            Model::Lenet(m) => Some(&mut m.classes),
            Model::Cnn(m) => Some(&mut m.classes),
            Model::AlexNet(m) => Some(&mut m.classes),
            Model::ResNet(m) => Some(&mut m.classes),
            Model::Recurrent(m) => Some(&mut m.classes),
            Model::Encoder(m) => Some(&mut m.classes),
            Model::Bert(m) => Some(&mut m.classes),
            Model::Gpt(_) | Model::Gpt2(_) | Model::Layers(_) => None,
        }
    }
}

fn numel(sample: Sample) -> usize {
    match sample {
        Sample::Image { channels, height, width } => channels.saturating_mul(height).saturating_mul(width),
        Sample::Row { width } => width,
        Sample::Mixed { numbers, ids, texts } => {
            let words = texts.iter().map(|text| text.length);
            words.fold(numbers.saturating_add(ids.len()), usize::saturating_add)
        }
        Sample::Ids { time, .. } | Sample::Texts { time, .. } => time,
    }
}

fn n_classes(sample: Sample, answer: Answer) -> usize {
    match (answer, sample) {
        (Answer::Class { classes } | Answer::Tags { classes }, _) => classes,
        (Answer::Values { n }, _) => n,
        (Answer::NextId, Sample::Ids { vocab, .. }) => vocab,
        (Answer::NextId, _) => 0,
    }
}

fn found(sample: Sample, answer: Answer) -> String {
    let labels = match answer {
        Answer::Class { classes } => format!("of {classes} classes"),
        Answer::Tags { classes } => format!("with one of {classes} tags for each word"),
        Answer::Values { n } => format!("with {n} targets"),
        Answer::NextId => "whose labels are the next tokens".into(),
    };
    match sample {
        Sample::Image { channels, height, width } => {
            format!("images of {channels}x{height}x{width} {labels}")
        }
        Sample::Row { width } => format!("rows of {width} numbers {labels}"),
        Sample::Mixed { numbers, ids, texts } => format!("{} {labels}", mixed(numbers, ids, texts)),
        Sample::Ids { time, .. } => format!("sequences of {time} ids {labels}"),
        Sample::Texts { time, .. } => format!("texts of up to {time} tokens {labels}"),
    }
}

/// Rows with ids, in words.
fn mixed(numbers: usize, ids: &[usize], texts: &[TextIds]) -> String {
    let mut parts = vec![format!("{numbers} numbers")];
    if !ids.is_empty() {
        parts.push(format!("{} categories with many values", ids.len()));
    }
    if !texts.is_empty() {
        parts.push(format!("{} texts", texts.len()));
    }
    format!("rows of {}", parts.join(" and "))
}

/// Takes a size from the data, or checks it against them.
fn set(key: &'static str, said: &mut usize, data: usize, open: bool, what: &str) -> Result<(), FitError> {
    if open {
        *said = data;
    } else if *said != data {
        let (said, found) = (said.to_string(), format!("{data} {what}"));
        return Err(FitError::Differs { key, said, found, advice: LEAVE_OUT });
    }
    Ok(())
}

/// Sets or checks vocabulary and context: the first may be larger than the data's, the second longer.
fn set_ids(
    said_vocab: &mut usize,
    said_context: &mut usize,
    vocab: usize,
    time: usize,
    open_vocab: bool,
    open_context: bool,
) -> Result<(), FitError> {
    if open_vocab || *said_vocab < vocab {
        set("vocab", said_vocab, vocab, open_vocab, "tokens")?;
    }
    if open_context || *said_context < time {
        set("context", said_context, time, open_context, "ids a sequence")?;
    }
    Ok(())
}

/// Checks the input of a list of layers against the data. A row may be read as an image of as many numbers, and an image as
/// a row.
fn check_input(input: StackInput, sample: Sample, fitted: &mut Fitted) -> Result<(), FitError> {
    let differs = |said: String| {
        let found = match sample {
            Sample::Ids { vocab, time } => format!("sequences of {time} ids out of {vocab}"),
            Sample::Texts { vocab, time, .. } => format!("texts of up to {time} tokens out of {vocab}"),
            Sample::Row { width } => format!("rows of {width}"),
            Sample::Mixed { numbers, ids, texts } => mixed(numbers, ids, texts),
            Sample::Image { channels, height, width } => format!("images of {channels}x{height}x{width}"),
        };
        Err(FitError::Differs { key: "input", said, found, advice: LEAVE_OUT })
    };
    match (input, sample) {
        (StackInput::Row { width }, Sample::Row { .. } | Sample::Image { .. }) => {
            if width != numel(sample) {
                return differs(format!("[{width}]"));
            }
        }
        (StackInput::Image { channels, height, width }, Sample::Row { .. } | Sample::Image { .. }) => {
            let own = Sample::Image { channels, height, width };
            if own != sample && (matches!(sample, Sample::Image { .. }) || numel(own) != numel(sample)) {
                return differs(format!("[{channels}, {height}, {width}]"));
            }
        }
        (StackInput::Ids { vocab, context }, Sample::Ids { vocab: v, time })
        | (StackInput::Texts { vocab, context, .. }, Sample::Texts { vocab: v, time, .. }) => {
            if v > vocab || time > context {
                return differs(format!("{context} ids out of {vocab}"));
            }
            fitted.time = Some(time);
        }
        (StackInput::Open, _) => return differs("open".into()),
        (StackInput::Ids { vocab, context } | StackInput::Texts { vocab, context, .. }, _) => {
            return differs(format!("{context} ids out of {vocab}"));
        }
        (StackInput::Row { width }, _) => return differs(format!("[{width}]")),
        (StackInput::Image { channels, height, width }, _) => {
            return differs(format!("[{channels}, {height}, {width}]"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Cnn, Gpt, Mlp, Stack, StackLayer};

    const DIGITS: Sample = Sample::Image { channels: 1, height: 8, width: 8 };
    const TEXT: Sample = Sample::Ids { vocab: 100, time: 16 };
    const TEN: Answer = Answer::Class { classes: 10 };

    fn all(model: &Model) -> Vec<String> {
        model.sizes_from_data().iter().map(|s| s.to_string()).collect()
    }

    fn layers(layers: &[StackLayer]) -> Model {
        Model::Layers(Stack { input: StackInput::Open, layers: layers.to_vec() })
    }

    #[test]
    fn sizes_that_are_left_out_are_the_datas() {
        for name in Model::NAMES {
            let mut model = Model::by_name(name).unwrap();
            let (sample, answer) = match &model {
                Model::Gpt(_) | Model::Gpt2(_) => (TEXT, Answer::NextId),
                Model::Recurrent(_) | Model::Encoder(_) | Model::Bert(_) => (TEXT, TEN),
                Model::Mlp(_) | Model::Tabular(_) => (Sample::Row { width: 30 }, TEN),
                _ => (Sample::Image { channels: 2, height: 64, width: 70 }, TEN),
            };
            let missing = all(&model);
            let fitted = model.fit(sample, answer, &missing).unwrap_or_else(|e| panic!("{name}: {e}"));
            let options = fitted.options(TraceOptions::training(3));
            assert_eq!(model.input(&options).shape.numel(), 3 * numel(sample), "{name}");
            assert_eq!(model.classes(), n_classes(sample, answer), "{name}");
            assert_eq!(model.name(), name);
            // What was set agrees with the data.
            model.fit(sample, answer, &[]).unwrap();
        }
    }

    #[test]
    fn layers_take_their_input_and_classes_from_the_data() {
        let linear = |outputs| StackLayer::Linear { outputs, bias: true };
        let embedding = StackLayer::Embedding { width: 8 };
        let check = |list: &[StackLayer], sample, answer, want: &[usize]| {
            let mut model = layers(list);
            let missing = all(&model);
            let fitted = model.fit(sample, answer, &missing).unwrap();
            let options = fitted.options(TraceOptions::training(2));
            let got = [model.input(&options).shape.numel(), model.n_labels(&options), model.classes()];
            assert_eq!(got, want);
        };
        check(&[StackLayer::Flatten, linear(None)], DIGITS, TEN, &[128, 2, 10]);
        check(&[linear(None)], Sample::Row { width: 7 }, TEN, &[14, 2, 10]);
        check(&[embedding.clone(), linear(None)], TEXT, Answer::NextId, &[32, 32, 100]);
        check(&[embedding, StackLayer::MeanTime, linear(None)], TEXT, TEN, &[32, 2, 10]);
    }

    #[test]
    fn what_was_said_is_held_against_the_data() {
        let check = |mut model: Model, missing: &[&str], sample, answer, want: &str| {
            let missing: Vec<_> = missing.iter().map(|m| m.to_string()).collect();
            assert_eq!(model.fit(sample, answer, &missing).unwrap_err().to_string(), want);
        };
        let mlp = || Model::Mlp(Mlp { inputs: 64, ..Mlp::default() });
        let linear = |outputs| StackLayer::Linear { outputs, bias: true };
        check(
            mlp(),
            &[],
            DIGITS,
            Answer::Class { classes: 12 },
            "model.classes is 10, the data has 12 classes; leave it out to take it from the data",
        );
        check(
            Model::Mlp(Mlp::default()),
            &["classes"],
            DIGITS,
            TEN,
            "model.inputs is 784, the data has 64 numbers a sample; leave it out to take it from the data",
        );
        check(
            mlp(),
            &[],
            TEXT,
            Answer::NextId,
            "the model `mlp` takes rows or images, the data are sequences of 16 ids whose labels are the next tokens; \
             choose another model or other data",
        );
        check(
            Model::Gpt(Gpt { vocab: 50, ..Gpt::default() }),
            &[],
            TEXT,
            Answer::NextId,
            "model.vocab is 50, the data has 100 tokens; leave it out to take it from the data",
        );
        check(
            Model::Gpt(Gpt { context: 8, ..Gpt::default() }),
            &["vocab"],
            TEXT,
            Answer::NextId,
            "model.context is 8, the data has 16 ids a sequence; leave it out to take it from the data",
        );
        check(
            Model::Cnn(Cnn { widths: vec![8, 8, 8, 8, 8], ..Cnn::default() }),
            &["channels"],
            DIGITS,
            TEN,
            "the model does not take the data: layer `pool.3`: max_pool: shape [1, 1, 1, 8] does not fit: the kernel \
             spans 2 rows, more than the padded input's 1 (1 + 2x0); use a smaller kernel or more padding",
        );
        check(
            layers(&[linear(Some(10))]),
            &["input"],
            DIGITS,
            TEN,
            "the model does not take the data: layer `layers[0] (linear)`: linear: shape [1, 8, 8, 1] does not fit: \
             it takes rows or sequences, not images; put `flatten` or `global_mean` before it",
        );
        check(
            layers(&[StackLayer::Flatten, linear(Some(11))]),
            &["input"],
            DIGITS,
            TEN,
            "model.classes is 11, the data has 10 classes; \
             leave `outputs` of the last layer out to take it from the data",
        );
        check(
            Model::Layers(Stack { input: StackInput::Row { width: 65 }, layers: vec![linear(None)] }),
            &["classes"],
            DIGITS,
            TEN,
            "model.input is [65], the data has images of 1x8x8; leave it out to take it from the data",
        );
        check(
            layers(&[StackLayer::Embedding { width: 4 }, linear(None)]),
            &["input", "classes"],
            TEXT,
            TEN,
            "the model `layers` takes one label a token: no `last_step` or `mean_time` ends the sequence, \
             the data are sequences of 16 ids of 10 classes; choose another model or other data",
        );
    }

    #[test]
    fn rows_may_be_read_as_images_and_images_as_rows() {
        let linear = StackLayer::Linear { outputs: None, bias: true };
        let image = StackInput::Image { channels: 1, height: 8, width: 8 };
        let mut model =
            Model::Layers(Stack { input: image, layers: vec![StackLayer::Flatten, linear.clone()] });
        model.fit(Sample::Row { width: 64 }, TEN, &[]).unwrap();
        let mut model = Model::Layers(Stack { input: StackInput::Row { width: 64 }, layers: vec![linear] });
        model.fit(DIGITS, TEN, &[]).unwrap();
        let mut gpt = Model::Gpt(Gpt { vocab: 128, context: 64, ..Gpt::default() });
        assert_eq!(gpt.fit(TEXT, Answer::NextId, &[]).unwrap().time, Some(16));
        assert_eq!(gpt.classes(), 128);
    }
}
