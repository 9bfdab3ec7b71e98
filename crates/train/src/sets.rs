//! The sets of a job: where its samples come from, opened and split.

mod remote;
mod tar;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_data::arrays::Arrays;
use polyreme_data::cifar::{self, Cifar};
use polyreme_data::idx::{self, Idx};
use polyreme_data::images::{self, ImageOptions, Images};
use polyreme_data::joined::{files, files_of};
use polyreme_data::remote::{Files, HeldEntry, RemoteEnv};
use polyreme_data::table::schema::like_an_id;
use polyreme_data::table::{
    Columns, FileColumn, OpenedTable, Table, TableFile, TableFormat, TableOptions, TableSchema,
};
use polyreme_data::together::Alone;
use polyreme_data::{
    DataError, Dataset, Features, Joined, LabelKind, Layout, Spec, Synthetic, Target, Text, Tokenizer, split,
};
use polyreme_exec::Isa;
use polyreme_nn::Model;

use crate::error::TrainError;
use crate::fingerprint::{IMAGES, Origin, ToldFile};
use crate::job::{DataSpec, ImageTable, Job, OrderSpec, Source};
use crate::preparation::Preparation;
use crate::spread::{Among, Lending, RankMembers, SetFiles};
use crate::texts;
use remote::Brought;
pub(crate) use remote::told;

/// Where Debian's package puts Fashion-MNIST.
const DEBIAN_FASHION: &str = "/usr/share/datasets/fashion-mnist";

/// Images that are decoded stay in memory up to this much.
const IMAGE_CACHE_BYTES: usize = 4 << 30;

/// Of the memory that is free, the files of a table may have one in so many parts to be read into it: a field of few bytes becomes a
/// number of four, a category several, and training needs memory too.
const MEMORY_SHARE: u64 = 4;

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
    /// The digest of that file, if texts with labels are made of its tokens.
    pub tokenizer_digest: Option<String>,
    /// Whether tokens of the second text of a pair are told from those of the first.
    pub types: bool,
    /// The names of a table's columns.
    pub columns: Columns,
    /// As what they are read, if they are not all numbers.
    pub schema: Option<Arc<TableSchema>>,
    /// Columns of numbers that look like ids.
    pub like_ids: Vec<String>,
    /// What was found in texts, as lines for people.
    pub texts: Vec<String>,
    /// Whether the rows of a table stay in their files.
    pub stored: bool,
    /// Where they come from.
    pub origin: Origin,
    /// Copies of what is in stores, which are not evicted while this lives.
    pub held: Arc<[HeldEntry]>,
    /// What brings samples that only other hosts have, and gives them those of this one.
    pub lending: Option<Arc<Lending>>,
}

impl Sets {
    /// Sets that a program brings. Without a validation set nothing is chosen by its score.
    pub fn new(train: Arc<dyn Dataset>) -> Sets {
        Sets {
            train,
            validation: None,
            test: None,
            tokenizer: None,
            tokenizer_digest: None,
            types: false,
            columns: Columns::default(),
            schema: None,
            like_ids: Vec::new(),
            texts: Vec::new(),
            stored: false,
            origin: Origin::default(),
            held: Arc::default(),
            lending: None,
        }
    }

    /// The same with a set for the test.
    pub fn with_test(self, test: Arc<dyn Dataset>) -> Sets {
        Sets { test: Some(test), ..self }
    }

    /// What was found in the columns of a table, as lines for people.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = match &self.schema {
            Some(schema) => schema.lines(),
            None => self.texts.iter().cloned().chain(self.like_ids.iter().map(|n| like_an_id(n))).collect(),
        };
        if self.stored {
            notes.push(
                "rows are read where they lie, not kept in memory; `data.order = \"block\"` reads neighbours together".into(),
            );
        }
        notes
    }
}

/// How sets are opened.
#[derive(Clone, Default, Debug)]
pub struct Opening {
    /// The instructions that samples are decoded with.
    pub isa: Isa,
    /// How many bytes of memory are free, if it is known: tables that are too large for them stay in their files.
    pub memory_bytes: Option<usize>,
    /// What this process knows of stores.
    pub remote: RemoteEnv,
}

/// Opens the sets that a job names. The job then says where they were found.
pub fn open(job: &mut Job) -> Result<Sets, TrainError> {
    open_as(job, None, &Opening { isa: Isa::detect(), ..Opening::default() })
}

/// The same for a model that was trained before: columns and classes are those of its training data, by name.
pub fn open_as(job: &mut Job, trained: Option<&Preparation>, reading: &Opening) -> Result<Sets, TrainError> {
    if let Source::Idx { path, known } = &mut job.data.source {
        *path = idx_folder(path, known.take());
    }
    let Brought { places, source, held } = remote::bring(job, &reading.remote)?;
    let among = Among { members: &mut Alone, lending: None, by_teller: false, places };
    let sets = match source {
        None => open_among(job, trained, reading, among)?,
        Some(source) => {
            let data = DataSpec { source, ..job.data.clone() };
            let sets = open_among(&Job { data, ..job.clone() }, trained, reading, among)?;
            if trained.is_none() {
                remote::check_order(job, &*sets.train)?;
            }
            sets
        }
    };
    Ok(Sets { held, ..sets })
}

/// The same for ranks that are processes, each with files of its own (`data.spread`). Collective; `comm` is that of all ranks.
pub fn open_spread(job: &Job, comm: &mut Comm, reading: &Opening) -> Result<Sets, TrainError> {
    let lending = (comm.size() > 1).then(|| Lending::start(comm)).transpose()?;
    let by_teller = job.data.order == OrderSpec::Parts;
    let mut members = RankMembers::new(comm);
    let among = Among { members: &mut members, lending, by_teller, places: Files::default() };
    let opened = open_among(job, None, reading, among);
    // What ended an operation of the group is better said as the report that all ranks have.
    match members.failed {
        Some(error) => Err(error),
        None => opened,
    }
}

fn open_among(
    job: &Job,
    trained: Option<&Preparation>,
    reading: &Opening,
    mut among: Among,
) -> Result<Sets, TrainError> {
    let mut sets = open_source(job, trained, reading, &mut among)?;
    sets.lending = among.lending;
    if sets.validation.is_none() {
        let (train, validation) = split(sets.train, job.data.validation, job.train.seed)?;
        let how = format!("{} by seed {}", job.data.validation, job.train.seed);
        sets.origin.split = validation.is_some().then_some(how);
        (sets.train, sets.validation) = (train, validation);
    }
    // Labels were read, and perhaps more.
    for set in [Some(&sets.train), sets.validation.as_ref(), sets.test.as_ref()].into_iter().flatten() {
        set.intact()?;
    }
    Ok(sets)
}

fn open_source(
    job: &Job,
    trained: Option<&Preparation>,
    reading: &Opening,
    among: &mut Among,
) -> Result<Sets, TrainError> {
    let Opening { isa, memory_bytes, .. } = *reading;
    let both = |train: Arc<dyn Dataset>, test: Option<Arc<dyn Dataset>>| Sets { test, ..Sets::new(train) };
    let with_files =
        |sets: Sets, files: Vec<PathBuf>| Sets { origin: Origin { files, ..Origin::default() }, ..sets };
    Ok(match &job.data.source {
        Source::Idx { path, .. } => {
            let files = idx::find(path)?;
            let train = Idx::open(&files.train.0, &files.train.1)?;
            let classes = train.spec().classes();
            let test =
                files.test.as_ref().map(|(x, y)| Idx::open(x, y)?.with_classes(classes)).transpose()?;
            let paths = [Some(files.train), files.test].into_iter().flatten().flat_map(|(x, y)| [x, y]);
            with_files(both(Arc::new(train), test.map(shared)), paths.collect())
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
            let sets = both(Arc::new(open(&found.train)?), test.map(shared));
            with_files(sets, found.train.into_iter().chain(found.test).collect())
        }
        Source::Table { format, path, test, choice, in_memory, .. } => {
            let texts = match trained {
                None => texts::to_train(job, &choice.text)?,
                Some(trained) => texts::to_use(&choice.text, trained)?,
            };
            if texts.is_some() && *in_memory == Some(false) {
                let why = "`data.in_memory = false` is for tables of numbers and categories; tokens of texts are kept in memory: leave it out";
                return Err(DataError::Setting { why: why.into() }.into());
            }
            let files = among.files_of(path, format.extensions())?;
            let test_files =
                (!test.is_empty()).then(|| among.files_of(test, format.extensions())).transpose()?;
            let all = files.here().chain(test_files.iter().flat_map(SetFiles::here));
            let all: Vec<PathBuf> = all.cloned().collect();
            let may_stay = texts.is_none() && *format != TableFormat::Parquet;
            let options = TableOptions {
                texts,
                stored: may_stay && stays_in_files(&among.places, &all, *in_memory, memory_bytes),
                places: among.places.clone(),
                columns: trained.map(Preparation::columns).unwrap_or_default(),
                schema: trained.and_then(|t| t.schema.clone()).map(Arc::new),
                isa,
                ..table_options(job, &job.data.source).unwrap_or_default()
            };
            let open = |p: &Option<PathBuf>, target: &Target, options: &TableOptions| {
                p.as_ref().map(|p| Table::open_as(p, options, target)).transpose()
            };
            let opened = match trained {
                None => Table::open_together(&files.files, &options, among.members)?,
                Some(trained) => {
                    let target = trained.spec(Layout::Planes).target;
                    let tables = files.files.iter().map(|file| open(&file.path, &target, &options));
                    let tables = tables.collect::<Result<Vec<_>, _>>()?;
                    let first = tables.iter().flatten().next();
                    OpenedTable {
                        columns: first.map(|table| table.columns().clone()).unwrap_or_default(),
                        schema: first.and_then(|table| table.schema().cloned()),
                        like_ids: first.map(Table::like_ids).unwrap_or_default(),
                        tables,
                    }
                }
            };
            let OpenedTable { mut tables, columns, schema, like_ids } = opened;
            let (mut options, mut found) = (options, Vec::new());
            if let (Some(texts), None) = (&mut options.texts, trained) {
                // All of them are here: sets of texts cannot be spread.
                let (filled, times) =
                    texts::with_times(tables.into_iter().flatten().collect(), choice.text.buckets);
                found = texts::notes(&filled, texts, &times);
                tables = filled.into_iter().map(Some).collect();
                texts.length = times.last().copied().unwrap_or(1);
                texts.times = times;
            }
            let tokenizer = options.texts.as_ref().and(choice.text.tokenizer.clone());
            let tokenizer_digest = tokenizer.as_deref().map(texts::digest).transpose()?;
            let columns = if options.columns.is_empty() { columns } else { options.columns.clone() };
            let train = among.join(tables.into_iter().map(|t| t.map(shared)).collect(), &files, 0)?;
            let target = train.spec().target.clone();
            let options = TableOptions { columns: columns.clone(), schema: schema.clone(), ..options };
            let test = match &test_files {
                None => None,
                Some(files) => {
                    let part = |file: &TableFile| Ok(open(&file.path, &target, &options)?.map(shared));
                    let parts = files.files.iter().map(part).collect::<Result<Vec<_>, DataError>>()?;
                    Some(among.join(parts, files, 1)?)
                }
            };
            let (stored, types) = (options.stored, options.texts.as_ref().is_some_and(|texts| texts.typed));
            let sets = Sets {
                columns,
                schema,
                like_ids,
                stored,
                texts: found,
                tokenizer: tokenizer.clone(),
                tokenizer_digest,
                types,
                ..both(train, test)
            };
            Sets { origin: origin_of_files([Some(files), test_files], tokenizer, among.by_teller), ..sets }
        }
        Source::Images { path, size, grey, table: ImageTable { labels: Some(labels), .. } } => {
            let options = ImageOptions { size: *size, grey: *grey, cache_bytes: IMAGE_CACHE_BYTES, isa };
            listed_images(job, path, labels, &options, trained)?
        }
        Source::Images { path, size, grey, table: ImageTable { labels: None, .. } } => {
            let found = images::find(path)?;
            let options = ImageOptions { size: *size, grey: *grey, cache_bytes: IMAGE_CACHE_BYTES, isa };
            let mut train = Images::open(&found.train, &options)?;
            if let Some(trained) = trained {
                train = train.with_classes(&trained.names)?;
            }
            let Target::Class { names, .. } = train.spec().target.clone() else {
                unreachable!("images have classes")
            };
            // The others must come out as large as the training images did.
            let size = match train.spec().features {
                Features::Image { height, width, .. } => Some((height, width)),
                _ => *size,
            };
            let options = ImageOptions { size, ..options };
            let open = |folder: &PathBuf| Images::open(folder, &options)?.with_classes(&names);
            let validation = found.validation.as_ref().map(open).transpose()?;
            let test = found.test.as_ref().map(open).transpose()?;
            let parts = [(&found.train, Some(&train)), (path, validation.as_ref()), (path, test.as_ref())];
            let origin = origin_of_images(&parts);
            let sets = both(Arc::new(train), test.map(shared));
            Sets { validation: validation.map(shared), origin, ..sets }
        }
        Source::Tar { .. } => tar::open(job, trained, isa, &among.places)?,
        Source::Text { path, test, tokenizer, .. } => {
            let tokens = match tokenizer {
                Some(file) => Tokenizer::from_file(file)?,
                None => Tokenizer::bytes(),
            };
            let context = job.context();
            let mut all = Vec::new();
            let mut open = |path: &PathBuf| -> Result<_, DataError> {
                let paths = files(path)?;
                let parts = paths.iter().map(|p| Text::open(p, &tokens, context).map(shared));
                let set = join(parts.collect::<Result<Vec<_>, _>>()?, &paths);
                all.extend(paths);
                set
            };
            let train = open(path)?;
            let test = test.as_ref().map(open).transpose()?;
            all.extend(tokenizer.clone());
            with_files(Sets { tokenizer: tokenizer.clone(), ..both(train, test) }, all)
        }
        Source::Arrays { path, test, x, labels } => {
            let kind = job.train.loss.labels();
            let train = arrays(path, (x, labels, kind), None)?;
            let all = [Some(path), test.as_ref()].into_iter().flatten().map(|p| files(p));
            let all = all.collect::<Result<Vec<_>, _>>()?.concat();
            let test = test.as_ref().map(|p| arrays(p, (x, labels, kind), Some(train.spec()))).transpose()?;
            with_files(both(train, test), all)
        }
        Source::Synthetic { samples, shape, classes, noise } => {
            let (n, seed) = (*samples, job.train.seed);
            let train = Synthetic::new(n, shape, *classes, *noise, seed, 0)?;
            let test = Synthetic::new((n / 5).max(1), shape, *classes, *noise, seed, n)?;
            both(Arc::new(train.with_isa(isa)), Some(Arc::new(test.with_isa(isa))))
        }
        Source::Given => return Err(TrainError::NoData),
    })
}

/// Images whose labels are in a table, and the test set that has another one.
fn listed_images(
    job: &Job,
    folder: &PathBuf,
    labels: &Path,
    options: &ImageOptions,
    trained: Option<&Preparation>,
) -> Result<Sets, TrainError> {
    let Source::Images { table, .. } = &job.data.source else { return Err(TrainError::NoData) };
    let read = |path: &Path| -> Result<TableOptions, DataError> {
        Ok(TableOptions {
            labels: table.label.clone(),
            kind: job.train.loss.labels(),
            surely_classes: !job.model.from_data.iter().any(|size| size == "classes"),
            ..label_options(path, &table.image)?
        })
    };
    let like = |path: &Path, target: &Target| Table::open_as(path, &read(path)?, target);
    let own = match trained {
        None => Table::open(labels, &read(labels)?)?,
        Some(trained) => like(labels, &trained.spec(Layout::Planes).target)?,
    };
    let target = own.spec().target.clone();
    let train = Images::open_listed(folder, own, options)?;
    // The test images must come out as large as the training images did.
    let size = match train.spec().features {
        Features::Image { height, width, .. } => Some((height, width)),
        _ => options.size,
    };
    let options = ImageOptions { size, ..options.clone() };
    let open = |path: &PathBuf| Images::open_listed(folder, like(path, &target)?, &options);
    let test = table.test.as_ref().map(open).transpose()?;
    let mut origin = origin_of_images(&[(folder, Some(&train)), (folder, test.as_ref())]);
    origin.files.extend([Some(labels.to_path_buf()), table.test.clone()].into_iter().flatten());
    Ok(Sets { test: test.map(shared), origin, ..Sets::new(Arc::new(train)) })
}

/// How a table that names images is read, by the ending of its name; `image` is the column with the names.
pub fn label_options(path: &Path, image: &Option<String>) -> Result<TableOptions, DataError> {
    let Some(format) = TableFormat::of(path) else {
        let why = format!("{}: a table of labels is called .csv, .tsv or .jsonl; rename it", path.display());
        return Err(DataError::Setting { why });
    };
    let is_tsv = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("tsv"));
    Ok(TableOptions {
        format,
        delimiter: if is_tsv { b'\t' } else { b',' },
        files: Some(FileColumn { name: image.clone() }),
        ..TableOptions::default()
    })
}

/// Whether the rows of tables stay in their files: if the job says so, or if they are too large for the memory that is free.
fn stays_in_files(
    places: &Files,
    paths: &[PathBuf],
    in_memory: Option<bool>,
    memory_bytes: Option<usize>,
) -> bool {
    let bytes: u64 = paths.iter().filter_map(|path| remote::bytes_of(places, path)).sum();
    let fits = memory_bytes.is_none_or(|free| bytes <= free as u64 / MEMORY_SHARE);
    !in_memory.unwrap_or(fits)
}

/// How the table of a job is read, if its source is one.
fn table_options(job: &Job, source: &Source) -> Option<TableOptions> {
    let Source::Table { format, label, delimiter, header, choice, .. } = source else { return None };
    Some(TableOptions {
        format: *format,
        labels: choice.text.tags.clone().map_or_else(|| label.clone(), |tags| vec![tags]),
        kind: job.train.loss.labels(),
        delimiter: *delimiter,
        header: *header,
        // Who says how many classes there are knows that there are classes.
        surely_classes: !job.model.from_data.iter().any(|size| size == "classes"),
        choice: choice.clone(),
        // For other models what looks like a text is left out.
        finds_texts: matches!(job.model.model, Model::Mlp(_) | Model::Tabular(_)),
        ..TableOptions::default()
    })
}

/// The training files of a job's table, and how they are read; `None` if its data are not a table.
pub fn table_of(job: &Job) -> Result<Option<(Vec<PathBuf>, TableOptions)>, TrainError> {
    let (Source::Table { format, path, .. }, Some(options)) =
        (&job.data.source, table_options(job, &job.data.source))
    else {
        return Ok(None);
    };
    Ok(Some((files_of(path, format.extensions())?, options)))
}

/// Of files that are all here, or that were told of.
fn origin_of_files(sets: [Option<SetFiles>; 2], tokenizer: Option<PathBuf>, by_teller: bool) -> Origin {
    let (mut files, mut told, mut names) = (Vec::new(), None::<Vec<ToldFile>>, blake3::Hasher::new());
    for set in sets.into_iter().flatten() {
        match set.told {
            Some(of_set) => {
                for file in &of_set {
                    names.update(file.name.as_bytes()).update(b"\n");
                }
                told.get_or_insert_default().extend(of_set);
            }
            None => files.extend(set.names),
        }
    }
    files.extend(tokenizer);
    let order = told.as_ref().filter(|_| by_teller).map(|_| names.finalize().to_hex().to_string());
    Origin { files, told, order, ..Origin::default() }
}

/// All names of some sets of images, each under its folder, and some of the files.
fn origin_of_images(parts: &[(&PathBuf, Option<&Images>)]) -> Origin {
    let (mut names, mut n, mut some) = (blake3::Hasher::new(), 0, Vec::new());
    for (folder, images) in parts {
        let Some(images) = images else { continue };
        for idx in 0..images.len() {
            let name = images.path(idx).strip_prefix(folder).unwrap_or(images.path(idx));
            names.update(name.as_os_str().as_encoded_bytes()).update(b"\n");
        }
        n += images.len();
        let picked = images.len().min(IMAGES);
        some.extend((0..picked).map(|i| images.path(i * images.len() / picked).to_path_buf()));
    }
    Origin { files: some, names: Some((n, names.finalize().to_hex().to_string())), ..Origin::default() }
}

/// The folder of IDX files; a known set that is not there may be installed.
fn idx_folder(path: &Path, known: Option<&'static str>) -> PathBuf {
    let installed = Path::new(DEBIAN_FASHION);
    if known == Some("fashion-mnist") && !path.exists() && installed.exists() {
        return installed.to_path_buf();
    }
    path.to_path_buf()
}

/// The arrays of the files that a path stands for, with the classes and ids of `like`, or of all of them together.
fn arrays(
    path: &Path,
    (x, labels, kind): (&str, &str, LabelKind),
    like: Option<&Spec>,
) -> Result<Arc<dyn Dataset>, DataError> {
    let paths = files(path)?;
    let parts = paths.iter().map(|p| Arrays::open_as(p, x, labels, kind)).collect::<Result<Vec<_>, _>>()?;
    if let Some((part, like)) =
        parts.iter().map(Arrays::spec).zip(like).find(|(p, l)| p.outputs() != l.outputs())
        && kind != LabelKind::Classes
    {
        let why = format!(
            "{}: {} labels per sample, and the training set has {}",
            path.display(),
            part.outputs(),
            like.outputs()
        );
        return Err(DataError::Setting { why });
    }
    let vocab = |spec: &Spec| match spec.features {
        Features::Ids { vocab, .. } => Some(vocab),
        _ => None,
    };
    let most = |of: &dyn Fn(&Spec) -> Option<usize>| match like {
        Some(spec) => of(spec),
        None => parts.iter().filter_map(|p| of(p.spec())).max(),
    };
    let (classes, ids) = (most(&|spec| Some(spec.classes())), most(&vocab));
    let alike = |part: Arrays| -> Result<Arc<dyn Dataset>, DataError> {
        let part = match classes {
            Some(classes) if kind == LabelKind::Classes => part.with_classes(classes)?,
            _ => part,
        };
        match ids.filter(|_| part.spec().features.is_ids()) {
            Some(vocab) => part.with_vocab(vocab).map(shared),
            None => Ok(shared(part)),
        }
    };
    join(parts.into_iter().map(alike).collect::<Result<Vec<_>, _>>()?, &paths)
}

/// Parts of a set as one.
fn join(
    parts: impl IntoIterator<Item = Arc<dyn Dataset>>,
    paths: &[PathBuf],
) -> Result<Arc<dyn Dataset>, DataError> {
    let mut parts: Vec<_> = parts.into_iter().collect();
    match parts.len() {
        1 => Ok(parts.remove(0)),
        _ => Joined::new(parts, paths).map(shared),
    }
}

fn shared(set: impl Dataset + 'static) -> Arc<dyn Dataset> {
    Arc::new(set)
}
