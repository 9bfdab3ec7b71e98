//! `[data]`: where samples come from and what is done to them.

use std::ops::Bound;
use std::path::PathBuf;

use polyreme_data::remote::is_url;

use super::cursor::Cursor;
use super::declare::{field, keys, kinds, section};
use super::key::Key;
use super::model::{CONTEXT_MAX, SIDE_MAX, WIDTH_MAX};
use super::parallel::THREADS_MAX;
use super::section::{Kind, Section};
use super::shape::Bounds;
use super::spec::{
    Augment, CacheSpec, ClassWeights, ColumnChoice, DataSpec, ImageTable, Job, OrderSpec, Source, TableFormat,
};
use super::types::{
    Type, either, flag, list, maybe, one_of, pair, path, place, real, single, table, text, whole, within,
};

/// Samples of a set, or of a block.
const SAMPLES_MAX: u64 = 1 << 32;
/// Lengths that texts are filled up to: each is a program of its own.
const BUCKETS_MAX: u64 = 16;
/// Values of a category that is one-hot.
const ONE_HOT_MAX: u64 = 1 << 10;
/// The size of a cache.
const MAX_GIB: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Included(1e6) };
/// More than 0, up to everything.
const FRACTION: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Included(1.0) };

section! { DataSpec => {
    let section = Section::of_kinds("data", "a section", kinds(), |s| s.source.kind(), keys());
    let unwritten = |s: &DataSpec, key: &str| match key {
        // A well-known set whose folder was not given is looked for again.
        "path" => matches!(s.source, Source::Idx { known: Some(_), .. }),
        "augment" => s.augment == Augment::default(),
        "cache" => s.cache == CacheSpec::default(),
        // Each is refused where the other is of use.
        "one_hot" | "buckets" => {
            let has_texts = matches!(&s.source, Source::Table { choice, .. } if !choice.text.columns.is_empty());
            has_texts == (key == "one_hot")
        }
        _ => false,
    };
    section.unwritten(unwritten).check(check)
} }

fn kinds() -> Vec<Kind<DataSpec>> {
    kinds! {
        /// IDX files, gzipped or not, by their usual names in a folder
        "idx" => |_| of(Source::Idx { path: PathBuf::new(), known: None });
        /// the same, by name; without a folder of its own, Fashion-MNIST is also taken from the system's package
        "mnist" | "fashion-mnist" => |name| of(Source::Idx { path: Source::default_folder(name), known: Some(name) });
        /// the binary version of CIFAR-10
        "cifar10" => |name| of(Source::Cifar { path: Source::default_folder(name), classes: 10 });
        /// the binary version of CIFAR-100, with fine labels
        "cifar100" => |name| of(Source::Cifar { path: Source::default_folder(name), classes: 100 });
        /// a table of fields between delimiters, see `docs/tables.md`
        "csv" => |_| of(table_of(TableFormat::Csv));
        /// a table of a JSON object per line, or of one array of objects, whose keys are the columns
        "jsonl" => |_| of(table_of(TableFormat::JsonLines));
        /// a table in Parquet files
        "parquet" => |_| of(table_of(TableFormat::Parquet));
        /// a folder of images for each class, or `train` and `test` with such folders in them; or images with a table of labels (`labels`)
        "images" => |_| of(Source::Images { path: PathBuf::new(), size: None, grey: false, table: ImageTable::default() });
        /// shards of tar as WebDataset writes them, images with labels, see `docs/shards.md`
        "tar" => |_| {
            let (path, test, label) = (Vec::new(), Vec::new(), None);
            of(Source::Tar { path, test, label, size: None, grey: false })
        };
        /// a text; labels are the next tokens
        "text" => |_| of(Source::Text { path: PathBuf::new(), test: None, tokenizer: None, context: None });
        /// arrays in a safetensors file
        "arrays" => |_| of(Source::Arrays { path: PathBuf::new(), test: None, x: "x".into(), labels: "labels".into() });
        /// generated: each class is a blob around a random centre
        "synthetic" => |_| of(Source::Synthetic { samples: 1000, shape: vec![16], classes: 10, noise: 0.2 });
        /// a dataset that the program brings, for jobs defined in Rust
        "given" => |_| of(Source::Given);
    }
}

fn table_of(format: TableFormat) -> Source {
    let (path, test, label, choice) = (Vec::new(), Vec::new(), Vec::new(), ColumnChoice::default());
    Source::Table { format, path, test, label, delimiter: b',', header: None, choice, in_memory: None }
}

fn of(source: Source) -> DataSpec {
    // Ids have no mean.
    let normalise = !matches!(source, Source::Text { .. });
    DataSpec { source, normalise, ..DataSpec::default() }
}

fn keys() -> Vec<Key<DataSpec>> {
    let shape = list(whole(1..=1 << 24), &[1, 3], "[width] or [channels, height, width]").check(
        |shape: &Vec<usize>| {
            let numel = shape.iter().fold(1_usize, |n, &d| n.saturating_mul(d));
            let most = 1 << 28;
            (numel > most)
                .then(|| (format!("has {numel} numbers per sample; at most {most} are possible"), ""))
        },
    );
    let weights = list(single(Bounds::FROM_0), &[], "an array of numbers").check(|weights: &Vec<f32>| {
        weights.is_empty().then(|| ("is empty; one number per class is needed".into(), ""))
    });
    let given = |w: &ClassWeights| if let ClassWeights::Given(w) = w { Some(w.clone()) } else { None };
    let class_weights =
        either(one_of([("balanced", ClassWeights::Balanced, "")]), weights.map(ClassWeights::Given, given));
    let has_images = |s: &mut DataSpec| !matches!(s.source, Source::Table { .. } | Source::Text { .. });
    let is_csv = |s: &mut DataSpec| matches!(s.source, Source::Table { format: TableFormat::Csv, .. });
    let has_lines =
        |s: &mut DataSpec| !matches!(s.source, Source::Table { format: TableFormat::Parquet, .. });
    let has_classes = |s: &mut DataSpec| !matches!(s.source, Source::Text { .. });
    let has_files = |s: &mut DataSpec| matches!(s.source, Source::Table { .. });
    keys! { DataSpec;
        /// the file; a list of files; a folder, for its files that have the kind's extension; or, with a `*` in the last name, all that
        /// match, as in `data/part-*.csv`. They have the same columns, and come in the order of their names, lists in their own
        path: paths() => field!(Source::{Table}.path in source);
            needed "say where the file is; paths are relative to the job file's folder";
        /// the file; a list of files; a folder, for its `.tar` files; or a pattern, as in `data/train-{000..031}.tar` or `data/train-*.tar`
        path: paths() => field!(Source::{Tar}.path in source);
            needed "say where the file is; paths are relative to the job file's folder";
        /// the file; several files if the last name has a `*`, as in `data/part-*.csv`
        path: place() => |s| match &mut s.source {
            Source::Text { path, .. } | Source::Arrays { path, .. } => Some(path),
            _ => None,
        }; needed "say where the file is; paths are relative to the job file's folder";
        /// the folder
        path: place() => |s| match &mut s.source {
            Source::Idx { path, known: None } | Source::Images { path, .. } => Some(path),
            _ => None,
        }; needed "say where the folder is; paths are relative to the job file's folder";
        /// the folder
        path: place() => |s| match &mut s.source {
            Source::Idx { path, known: Some(_) } | Source::Cifar { path, .. } => Some(path),
            _ => None,
        }; or "`data/KIND` in the working folder";
        /// the test file, or files, as for `path`; evaluated once, at the end, and nothing is chosen by it
        test: paths() => field!(Source::{Table | Tar}.test in source); or "none";
        /// the test file, or files; evaluated once, at the end, and nothing is chosen by it
        test: maybe(place()) => field!(Source::{Text | Arrays}.test in source);
        /// the column with the labels, by name or by number from 0; or several, for numbers and for labels of 0 or 1; needed for jsonl
        label: columns() => field!(Source::{Table}.label in source); or "the last column";
        /// the key of a sample's `.json` that has its label: a word or a number for classes, a number or an array of them for numbers
        label: maybe(text()) => field!(Source::{Tar}.label in source); or "the `.cls` is the label";
        /// a table with a row for each image: CSV, TSV or JSON lines with its path, relative to the folder, and its label
        labels: maybe(place()) => |s| image_table(s).map(|t| &mut t.labels); or "folders are classes";
        /// such a table of the test set, whose images are in the same folder; evaluated once, at the end, and nothing is chosen by it
        test: maybe(place()) => |s| image_table(s).map(|t| &mut t.test); or "none, or the folder `test`";
        /// the column of that table with the images' paths, by name or by number from 0
        image: maybe(column()) => |s| image_table(s).map(|t| &mut t.image);
            or "image, file, path, filename or the like, or else the first column that is no label";
        /// the column of that table with the labels, by name or by number from 0; or several, for numbers and for labels of 0 or 1; needed for jsonl
        label: columns() => |s| image_table(s).map(|t| &mut t.label); or "the last column";
        /// the character between fields
        delimiter: delimiter() => field!(Source::{Table}.delimiter in source); only is_csv;
        /// whether the first line holds names
        header: maybe(flag()) => field!(Source::{Table}.header in source); only is_csv; or "detected";
        /// the features, by name or by pattern, as in `["age", "x_*"]`; columns without names are called by their numbers from 0
        columns: patterns() => |s| choice(s).map(|c| &mut c.columns); or "all but the labels";
        /// columns that are left out, by name or by pattern
        ignore: patterns() => |s| choice(s).map(|c| &mut c.ignore); or "none";
        /// columns that are categories though they look like numbers or like ids, by name or by pattern
        categories: patterns() => |s| choice(s).map(|c| &mut c.categories); or "columns of words";
        /// columns that are texts whose words are learnt from beside the other columns (mlp, tabular), by name or by pattern
        texts: patterns() => |s| choice(s).map(|c| &mut c.texts); or "columns of words that most rows have their own of, with several words in each";
        /// what stands for a blank, besides an empty field
        blanks: patterns() => |s| choice(s).map(|c| &mut c.blanks); or "NA, N/A, NaN, null and ?";
        /// up to how many values a category is one-hot; a vector is learnt for each value of one with more
        one_hot: whole(0..=ONE_HOT_MAX) => |s| choice(s).map(|c| &mut c.one_hot);
        /// the column that is a text, by name or by number from 0; several for pairs of texts, see `docs/texts.md`
        text: columns() => |s| choice(s).map(|c| &mut c.text.columns); or "none";
        /// the column with a tag for each word of the text, by name or by number from 0: a list, or tags with spaces between
        tags: maybe(column()) => |s| choice(s).map(|c| &mut c.text.tags); or "a text has one label";
        /// the most tokens of a text, or words with `texts`; longer ones are cut
        length: maybe(whole(1..=CONTEXT_MAX)) => |s| choice(s).map(|c| &mut c.text.length);
            or "`model.context`, or as many as the longest has, at most 512; of words 128";
        /// how many lengths there are that texts are filled up to
        buckets: whole(1..=BUCKETS_MAX) => |s| choice(s).map(|c| &mut c.text.buckets);
        /// whether rows are kept in memory; otherwise they are read where they lie, from files that may be larger than memory (csv and jsonl)
        in_memory: maybe(flag()) => field!(Source::{Table}.in_memory in source); only has_lines;
            or "unless the files have more than a quarter of the bytes that are free";
        /// the size that every image is brought to
        size: maybe(pair(1..=SIDE_MAX)) => field!(Source::{Images | Tar}.size in source);
            or "all images must have the same size";
        /// whether colours are dropped
        grey: flag() => field!(Source::{Images | Tar}.grey in source);
        /// a `tokenizer.json`
        tokenizer: maybe(path()) => |s| match &mut s.source {
            Source::Text { tokenizer, .. } => Some(tokenizer),
            Source::Table { choice, .. } => Some(&mut choice.text.tokenizer),
            _ => None,
        }; or "bytes are tokens";
        /// tokens per sample
        context: maybe(whole(1..=CONTEXT_MAX)) => field!(Source::{Text}.context in source); or "the model's";
        /// the name of the array of features
        x: text() => field!(Source::{Arrays}.x in source);
        /// the name of the array of labels: `[n]` for classes, `[n]` or `[n, k]` for numbers and for labels of 0 or 1
        labels: text() => field!(Source::{Arrays}.labels in source);
        /// training samples; the test set has a fifth as many
        samples: whole(1..=SAMPLES_MAX) => field!(Source::{Synthetic}.samples in source);
        /// the dimensions of a sample
        shape: shape => field!(Source::{Synthetic}.shape in source);
        /// how many classes
        classes: whole(1..=WIDTH_MAX) => field!(Source::{Synthetic}.classes in source);
        /// the standard deviation within a class; centres are 1 apart
        noise: real(0.0..) => field!(Source::{Synthetic}.noise in source);
        /// the share of the training set that is kept for validation; with 0 there are no `val_` metrics
        validation: real(0.0..1.0) => |s| Some(&mut s.validation);
        /// shift and scale by the mean and standard deviation of the training set; numbers that are to be predicted too,
        /// and what is predicted is brought back
        normalise: flag() => |s| Some(&mut s.normalise); only has_classes;
        /// random changes of training images
        augment: table() => |s| Some(&mut s.augment); only has_images; or "none";
        /// weights of the classes in the loss; balanced: in inverse proportion to their frequency
        class_weights: class_weights => |s| Some(&mut s.class_weights); only has_classes; or "all 1";
        /// how samples are ordered in an epoch, see below
        order: order() => |s| Some(&mut s.order);
        /// samples in a block, for `order = "block"`
        block: whole(1..=SAMPLES_MAX) => |s| s.order.block(), |s, n| if let OrderSpec::Block(b) = &mut s.order { *b = n };
            or "4096";
        /// whether files of the set lie on different hosts, each on at least one, see `docs/clusters.md`
        spread: flag() => |s| Some(&mut s.spread); only has_files;
        /// where copies are kept of what `path` and `test` name by an address (`s3://`, `gs://`, `http://`, `https://`), see `docs/remote.md`
        cache: table() => |s| Some(&mut s.cache); or "as below";
        /// the share of the training set that one epoch visits
        fraction: within(FRACTION) => |s| Some(&mut s.fraction);
        /// loader threads
        threads: maybe(whole(1..=THREADS_MAX)) => |s| Some(&mut s.threads); or "chosen by the cores";
        /// batches that are loaded ahead
        prefetch: whole(1..=THREADS_MAX) => |s| Some(&mut s.prefetch);
    }
}

/// Samples in a block by default.
const BLOCK: usize = 4096;

fn order() -> Type<OrderSpec> {
    one_of([
        ("sample", OrderSpec::Sample, "every sample at random"),
        (
            "block",
            OrderSpec::Block(BLOCK),
            "blocks of neighbours at random, and samples at random inside a block",
        ),
        ("parts", OrderSpec::Parts, "each rank reads its own part of the set, at random"),
        ("in-order", OrderSpec::InOrder, "as they are stored"),
    ])
    .map(|order| order, |order| Some(order.block().map_or(*order, |_| OrderSpec::Block(BLOCK))))
}

impl OrderSpec {
    /// Samples in a block, if there are blocks.
    fn block(&self) -> Option<usize> {
        if let OrderSpec::Block(n) = self { Some(*n) } else { None }
    }
}

/// A column or several; nothing is written if there are none.
fn columns() -> Type<Vec<String>> {
    let one = column().map(
        |one| vec![one],
        |all: &Vec<String>| match all.as_slice() {
            [one] => Some(one.clone()),
            _ => None,
        },
    );
    let several = list(column(), &[], "an array of columns").check(|all: &Vec<String>| {
        all.is_empty().then(|| ("is empty; name a column".into(), "leave it out for the last column"))
    });
    either(one, several.map(|all| all, |all| (!all.is_empty()).then(|| all.clone())))
}

/// A path or several; nothing is written if there are none.
fn paths() -> Type<Vec<PathBuf>> {
    let one = place().map(
        |one| vec![one],
        |all: &Vec<PathBuf>| match all.as_slice() {
            [one] => Some(one.clone()),
            _ => None,
        },
    );
    let several = list(place(), &[], "an array of paths")
        .check(|all: &Vec<PathBuf>| all.is_empty().then(|| ("is empty; name a file".into(), "")));
    either(one, several.map(|all| all, |all| (!all.is_empty()).then(|| all.clone())))
}

/// Which columns of a table are read.
fn choice(spec: &mut DataSpec) -> Option<&mut ColumnChoice> {
    if let Source::Table { choice, .. } = &mut spec.source { Some(choice) } else { None }
}

/// Where labels of images are.
fn image_table(spec: &mut DataSpec) -> Option<&mut ImageTable> {
    if let Source::Images { table, .. } = &mut spec.source { Some(table) } else { None }
}

/// Names or patterns; nothing is written if there are none.
fn patterns() -> Type<Vec<String>> {
    let all = list(text(), &[], "an array of strings").check(|all: &Vec<String>| {
        all.is_empty().then(|| ("is empty; name something".into(), "leave it out for the default"))
    });
    all.map(|all| all, |all| (!all.is_empty()).then(|| all.clone()))
}

/// A column, by name or number; kept as a string.
fn column() -> Type<String> {
    either(text(), whole(0..=u64::from(u32::MAX)).map(|n: u64| n.to_string(), |_| None))
}

fn delimiter() -> Type<u8> {
    let one = text().check(|text| match text.as_bytes() {
        [byte] if byte.is_ascii() && !matches!(byte, b'"' | b'\n' | b'\r') => None,
        _ => {
            let message = format!("is {text:?}; one ASCII character is needed");
            Some((message, "such as \",\", \";\" or \"\\t\""))
        }
    });
    one.map(|text| text.as_bytes()[0], |byte| Some(char::from(*byte).to_string()))
}

fn check(spec: &mut DataSpec, c: &Cursor) {
    if c.has("block") && spec.order.block().is_none() {
        let message = "`data.block` is given, but `data.order` is not \"block\"";
        c.fault("block", message, "write order = \"block\"");
    }
    if let Source::Table { choice, .. } = &spec.source {
        let texts = !choice.text.columns.is_empty();
        for key in ["tokenizer", "length", "buckets", "tags"] {
            let words = key == "length" && !choice.texts.is_empty();
            if c.has(key) && !texts && !words {
                let message = format!("`data.{key}` is for texts, and `data.text` names no column");
                c.fault(key, message, "write text = \"COLUMN\"");
            }
        }
        for key in ["columns", "ignore", "categories", "texts", "blanks", "one_hot"] {
            if c.has(key) && texts {
                let message = format!(
                    "`data.{key}` is for columns of numbers and words, and `data.text` leaves those out"
                );
                c.fault(key, message, "leave out one of the two");
            }
        }
    }
    if let Source::Table { choice, .. } = &spec.source
        && c.has("tags")
    {
        if c.has("label") {
            let message = "`data.tags` and `data.label` are both given, and a text has either a tag for each word or one label";
            c.fault("tags", message, "leave out one of the two");
        }
        if choice.text.columns.len() > 1 {
            let message = "`data.tags` is for one column of words, and `data.text` names several";
            c.fault("tags", message, "name the one whose words have tags");
        }
        if c.has("class_weights") && spec.class_weights == ClassWeights::Balanced {
            let message =
                "`data.class_weights = \"balanced\"` counts one class for each sample, and tags are of words";
            c.fault("class_weights", message, "give the weights, one per tag");
        }
    }
    if let Source::Images { table: ImageTable { labels: None, .. }, .. } = &spec.source {
        for key in ["test", "image", "label"].into_iter().filter(|key| c.has(key)) {
            let message = format!("`data.{key}` is about a table of labels, and there is no `data.labels`");
            c.fault(key, message, "write labels = \"labels.csv\", or leave it out");
        }
    }
    if let Source::Table { choice, .. } = &spec.source
        && spec.spread
        && !choice.text.columns.is_empty()
    {
        let message = "`data.spread` does not work with `data.text`: the lengths of all texts must be known on every host";
        c.fault("spread", message, "put the files where all hosts see them");
    }
    if let Source::Table { path, test, .. } = &spec.source
        && spec.spread
        && path.iter().chain(test).any(|path| is_url(path))
    {
        let message = "`data.spread` is for files of hosts, and every host reads the same from an address";
        c.fault("spread", message, "leave it out");
    }
    // A folder that was given is just a folder with IDX files.
    if let Source::Idx { known, .. } = &mut spec.source
        && c.has("path")
    {
        *known = None;
    }
}

/// What does not go together with files on different hosts.
pub(super) fn check_with(job: &Job, c: &Cursor) {
    let Some(c) = c.inside("data").filter(|_| job.data.spread) else { return };
    if job.parallel.elastic.is_some() {
        let message = "`data.spread` does not work with `parallel.elastic`: a rank that is lost takes its files with it";
        c.fault("spread", message, "leave `elastic` out, or put the files where all hosts see them");
    }
    if let Some(key) = job.parallel.open.names().first() {
        let message = format!(
            "`data.spread` does not work with `parallel.{key} = \"auto\"`: no rank has all files before the plan is chosen"
        );
        c.fault("spread", message, "write the value that `polyreme plan` finds for such samples");
    }
}

section! { CacheSpec => {
    let such_as = "a table such as { path = \"/scratch/cache\", max_gib = 200 }";
    let keys = keys! { CacheSpec;
        /// the folder; processes of a host may share it
        path: maybe(path()) => |s| Some(&mut s.path); or "`polyreme` in the user's folder for caches";
        /// how much copies may take of the disk together, in GiB; those used longest ago make room
        max_gib: within(MAX_GIB) => |s| Some(&mut s.max_gib);
    };
    Section::new("data.cache", such_as, |_| CacheSpec::default(), keys)
} }

section! { Augment => {
    let such_as = "a table such as { crop = 4, flip = true }";
    let keys = keys! { Augment;
        /// zeros added on each side before a random crop of the old size
        crop: whole(0..=SIDE_MAX) => |s| Some(&mut s.crop);
        /// half of the images are mirrored left to right
        flip: flag() => |s| Some(&mut s.flip);
        /// the most pixels that an image is shifted by
        shift: whole(0..=SIDE_MAX) => |s| Some(&mut s.shift);
        /// the probability that a random rectangle is erased
        erase: real(0.0..=1.0) => |s| Some(&mut s.erase);
    };
    Section::new("data.augment", such_as, |_| Augment::default(), keys)
} }
