//! The sets of a job whose samples are in shards of tar.

use std::path::PathBuf;
use std::sync::Arc;

use polyreme_data::images::ImageOptions;
use polyreme_data::remote::Files;
use polyreme_data::{DataError, Dataset, Features, Layout, ShardOptions, Shards};
use polyreme_exec::Isa;

use super::remote::told;
use super::{IMAGE_CACHE_BYTES, Sets};
use crate::error::TrainError;
use crate::fingerprint::Origin;
use crate::job::{Job, Source};
use crate::preparation::Preparation;

/// What shards end in, for folders of them.
const EXTENSIONS: [&str; 1] = ["tar"];

/// Opens the shards that a job names, with the classes of a model that was trained before, if there is one.
pub(super) fn open(
    job: &Job,
    trained: Option<&Preparation>,
    isa: Isa,
    places: &Files,
) -> Result<Sets, TrainError> {
    let Source::Tar { path, test, label, size, grey } = &job.data.source else {
        unreachable!("the caller looks at the kind")
    };
    let paths = places.list(path, &EXTENSIONS)?;
    let test_paths = (!test.is_empty()).then(|| places.list(test, &EXTENSIONS)).transpose()?;
    let images = ImageOptions { size: *size, grey: *grey, cache_bytes: IMAGE_CACHE_BYTES, isa };
    let options = ShardOptions {
        images,
        kind: job.train.loss.labels(),
        label: label.clone(),
        // Who says how many classes there are knows that there are classes.
        surely_classes: !job.model.from_data.iter().any(|size| size == "classes"),
        places: places.clone(),
    };
    let train = match trained {
        None => Shards::open(&paths, &options)?,
        Some(trained) => Shards::open_as(&paths, &options, &trained.spec(Layout::Interleaved).target)?,
    };
    let target = train.spec().target.clone();
    let open_test = |paths: &Vec<PathBuf>| -> Result<Arc<dyn Dataset>, DataError> {
        // They must come out as large as the training images did.
        let size = match train.spec().features {
            Features::Image { height, width, .. } => Some((height, width)),
            _ => *size,
        };
        let images = ImageOptions { size, ..options.images.clone() };
        let options = ShardOptions { images, ..options.clone() };
        Ok(Arc::new(Shards::open_as(paths, &options, &target)?))
    };
    let test = test_paths.as_ref().map(open_test).transpose()?;
    let files: Vec<PathBuf> = paths.into_iter().chain(test_paths.into_iter().flatten()).collect();
    let origin = match told(places, &files) {
        Some(told) => Origin { told: Some(told), ..Origin::default() },
        None => Origin { files, ..Origin::default() },
    };
    Ok(Sets { test, origin, ..Sets::new(Arc::new(train)) })
}
