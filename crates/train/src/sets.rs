//! The sets of a job: where its samples come from, opened and split.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_data::arrays::Arrays;
use polyreme_data::cifar::{self, Cifar};
use polyreme_data::idx::{self, Idx};
use polyreme_data::images::{self, ImageOptions, Images};
use polyreme_data::table::{Table, TableOptions};
use polyreme_data::{DataError, Dataset, Features, Synthetic, Target, Text, Tokenizer, split};

use crate::error::TrainError;
use crate::job::{Job, Source};

/// Where Debian's package puts Fashion-MNIST.
const DEBIAN_FASHION: &str = "/usr/share/datasets/fashion-mnist";

/// Images that are decoded stay in memory up to this much.
const IMAGE_CACHE_BYTES: usize = 4 << 30;

/// The sets of a run.
#[derive(Clone)]
pub struct Sets {
    /// What is learnt from.
    pub train: Arc<dyn Dataset>,
    /// What is watched meanwhile.
    pub validation: Option<Arc<dyn Dataset>>,
    /// What is evaluated at the end.
    pub test: Option<Arc<dyn Dataset>>,
    /// The tokenizer's file.
    pub tokenizer: Option<PathBuf>,
}

impl Sets {
    /// Sets that a program brings.
    pub fn new(train: Arc<dyn Dataset>) -> Sets {
        Sets { train, validation: None, test: None, tokenizer: None }
    }

    /// The same with a set for the test.
    pub fn with_test(self, test: Arc<dyn Dataset>) -> Sets {
        Sets { test: Some(test), ..self }
    }
}

/// Opens the sets that a job names. The job then says where they were found.
pub fn open(job: &mut Job) -> Result<Sets, TrainError> {
    if let Source::Idx { path, known } = &mut job.data.source {
        *path = idx_folder(path, known.take());
    }
    let mut sets = open_source(job)?;
    if sets.validation.is_none() {
        let (train, validation) = split(sets.train, job.data.validation, job.train.seed)?;
        (sets.train, sets.validation) = (train, validation);
    }
    Ok(sets)
}

fn open_source(job: &Job) -> Result<Sets, TrainError> {
    let both = |train: Arc<dyn Dataset>, test: Option<Arc<dyn Dataset>>| Sets { test, ..Sets::new(train) };
    Ok(match &job.data.source {
        Source::Idx { path, .. } => {
            let files = idx::find(path)?;
            let train = Idx::open(&files.train.0, &files.train.1)?;
            let classes = train.spec().classes();
            let test = files.test.map(|(x, y)| Idx::open(&x, &y)?.with_classes(classes)).transpose()?;
            both(Arc::new(train), test.map(shared))
        }
        Source::Cifar { path, classes } => {
            let found = cifar::find(path)?;
            if found.kind.classes() != *classes {
                let why =
                    format!("{} holds CIFAR-{}, not CIFAR-{classes}", path.display(), found.kind.classes());
                return Err(DataError::Setting { why }.into());
            }
            let open = |files: &[PathBuf]| Cifar::open(found.kind, files)?.with_names(found.names.clone());
            let test = found.test.as_ref().map(|file| open(std::slice::from_ref(file))).transpose()?;
            both(Arc::new(open(&found.train)?), test.map(shared))
        }
        Source::Csv { path, test, label, delimiter, header } => {
            let options = TableOptions { label: label.clone(), delimiter: *delimiter, header: *header };
            let train = Table::open(path, &options)?;
            let target = train.spec().target.clone();
            let test = test.as_ref().map(|p| Table::open(p, &options)?.with_classes(&target)).transpose()?;
            both(Arc::new(train), test.map(shared))
        }
        Source::Images { path, size, grey } => {
            let found = images::find(path)?;
            let options = ImageOptions { size: *size, grey: *grey, cache_bytes: IMAGE_CACHE_BYTES };
            let train = Images::open(&found.train, &options)?;
            let Target::Class { names, .. } = train.spec().target.clone() else {
                unreachable!("images have classes")
            };
            // The others must come out as large as the training images did.
            let size = match train.spec().features {
                Features::Image { height, width, .. } => Some((height, width)),
                _ => *size,
            };
            let options = ImageOptions { size, ..options };
            let open = |folder: &PathBuf| Images::open(folder, &options)?.with_classes(&names).map(shared);
            let validation = found.validation.as_ref().map(open).transpose()?;
            let test = found.test.as_ref().map(open).transpose()?;
            Sets { validation, ..both(Arc::new(train), test) }
        }
        Source::Text { path, test, tokenizer, .. } => {
            let tokens = match tokenizer {
                Some(file) => Tokenizer::from_file(file)?,
                None => Tokenizer::bytes(),
            };
            let context = job.context();
            let train = Text::open(path, &tokens, context)?;
            let test = test.as_ref().map(|p| Text::open(p, &tokens, context)).transpose()?;
            Sets { tokenizer: tokenizer.clone(), ..both(Arc::new(train), test.map(shared)) }
        }
        Source::Arrays { path, test, x, labels } => {
            let train = Arrays::open(path, x, labels)?;
            let classes = train.spec().classes();
            let test =
                test.as_ref().map(|p| Arrays::open(p, x, labels)?.with_classes(classes)).transpose()?;
            both(Arc::new(train), test.map(shared))
        }
        Source::Synthetic { samples, shape, classes, noise } => {
            let (n, seed) = (*samples, job.train.seed);
            let train = Synthetic::new(n, shape, *classes, *noise, seed, 0)?;
            let test = Synthetic::new((n / 5).max(1), shape, *classes, *noise, seed, n)?;
            both(Arc::new(train), Some(Arc::new(test)))
        }
        Source::Given => return Err(TrainError::NoData),
    })
}

/// The folder of IDX files; a known set that is not there may be installed.
fn idx_folder(path: &Path, known: Option<&'static str>) -> PathBuf {
    let installed = Path::new(DEBIAN_FASHION);
    if known == Some("fashion-mnist") && !path.exists() && installed.exists() {
        return installed.to_path_buf();
    }
    path.to_path_buf()
}

fn shared(set: impl Dataset + 'static) -> Arc<dyn Dataset> {
    Arc::new(set)
}
