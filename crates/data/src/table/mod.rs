//! Tables: text files with a row per line and fields between delimiters (CSV), or a JSON object per line (`lines`). The label is a small integer or a name, or labels
//! are numbers, or zeros and ones. All of it is read at opening, so that whatever is wrong with the text is said then; its rows are kept in
//! memory, or stay in their file (`stored`).
//!
//! A table is first read as numbers, in one pass. Only if a feature is something else, or options say something about columns,
//! they are looked at one by one (`survey`), it is learnt as what each is read (`schema`), and the file is read again by that
//! (`encode`): words become categories, blanks the mean and a mark, dates some numbers. So a table of numbers costs what it
//! did before there was anything else, and its rows have the same bits.
//!
//! Columns that have names are looked for by name, in any order, where it is known which are wanted
//! ([`TableOptions::columns`], [`TableOptions::schema`]); others by position, of which there must be as many.

mod choose;
mod chunks;
mod columns;
mod date;
mod encode;
mod fields;
mod labels;
mod lines;
mod listed;
mod number;
mod opening;
#[cfg_attr(not(feature = "parquet"), path = "no_parquet.rs")]
mod parquet;
mod parts;
pub mod schema;
mod stored;
mod survey;
mod text;
mod texts;
mod words;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_kernels::Isa;

use crate::classes::{self, Distinct};
use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::remote::{FarFile, Files};
use crate::spec::{Features, IGNORED, LabelKind, Spec, Target};
pub use choose::{BLANKS, ColumnChoice, ONE_HOT};
use chunks::Chunks;
pub use columns::Columns;
use encode::RowEncoder;
pub(crate) use fields::Fields;
use labels::ReadLabels;
pub use lines::TableFormat;
pub use listed::{FileColumn, ListedFile};
pub use opening::{OpenedTable, TableFile, learn};
use parts::SameColumns;
pub use schema::TableSchema;
use stored::{ChunkIndex, Indexed, RowIndex, StoredRows};
pub use survey::{ColumnSurvey, ColumnType};
use text::{FieldPlace, Heading, Row, Text};
pub use texts::{LENGTH, TextChoice, TextColumns, WordPlace, choose_times};
use texts::{TokenRows, list_of};
pub use words::{VOCABULARY_MAX, WORDS_MAX};

/// Options for reading a table.
#[derive(Clone, PartialEq, Debug)]
pub struct TableOptions {
    /// How the table is written.
    pub format: TableFormat,
    /// The labels' columns: a name in the header, or a number counted from 0 (from the end if negative, `-1` is the
    /// last). Empty: the last column. Classes have one.
    pub labels: Vec<String>,
    /// As what labels are read.
    pub kind: LabelKind,
    /// The delimiter between fields.
    pub delimiter: u8,
    /// Whether the first row is names. Without it, the first row is names if it has a word where the second has a number,
    /// or one of `columns`.
    pub header: Option<bool>,
    /// The columns of the table that was trained on, to be found by name; empty: in the order of the file.
    pub columns: Columns,
    /// Whether labels are classes, however many there are.
    pub surely_classes: bool,
    /// Which columns are read, and as what.
    pub choice: ColumnChoice,
    /// Whether columns that look like texts are read as texts beside others.
    pub finds_texts: bool,
    /// What was learnt of the columns in training; `None`: they are numbers, or it is learnt now.
    pub schema: Option<Arc<TableSchema>>,
    /// Columns that are texts: they are the features then, and no other column is.
    pub texts: Option<TextColumns>,
    /// The column that names files: it takes the place of features then.
    pub files: Option<FileColumn>,
    /// Whether rows stay in their files, which may be larger than memory, and are read where they lie.
    pub stored: bool,
    /// Where its files are.
    pub places: Files,
    /// The instructions that fields are found with.
    pub isa: Isa,
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions {
            format: TableFormat::Csv,
            labels: Vec::new(),
            kind: LabelKind::Classes,
            delimiter: b',',
            header: None,
            columns: Columns::default(),
            surely_classes: false,
            choice: ColumnChoice::default(),
            finds_texts: true,
            schema: None,
            texts: None,
            files: None,
            stored: false,
            places: Files::default(),
            isa: Isa::detect(),
        }
    }
}

/// A table: rows of numbers with labels.
#[derive(Debug)]
pub struct Table {
    spec: Spec,
    columns: Columns,
    values: Vec<f32>,
    /// Which of `distinct` each row has; empty for rows without labels.
    labels: Vec<u32>,
    distinct: Vec<Distinct<FieldPlace>>,
    /// The class of each of `distinct`.
    class_of: Vec<u32>,
    /// Labels that are numbers, row by row; empty for classes.
    targets: Vec<f32>,
    /// As what its columns were read, if they are not all numbers.
    schema: Option<Arc<TableSchema>>,
    /// The tokens of its texts, if its features are texts.
    texts: Option<TokenRows>,
    /// The files that its rows name, if it is a table of files.
    files: Vec<ListedFile>,
    /// The rows, if they stay in their file; `values` is then empty.
    stored: Option<StoredRows>,
}

/// How the features of rows are read.
enum FeatureReader<'a> {
    /// As numbers.
    Numbers(Vec<usize>),
    /// As a schema says.
    Encoded(RowEncoder),
    /// As texts.
    Texts(&'a TextColumns, Vec<usize>, TokenRows),
    /// As the name of a file.
    Files(usize, Vec<ListedFile>),
}

/// Why a table was not read.
enum Unread {
    /// Something is wrong.
    Wrong(DataError),
    /// A feature is not a number; the error says where.
    NotNumbers(DataError),
}

impl From<DataError> for Unread {
    fn from(error: DataError) -> Unread {
        Unread::Wrong(error)
    }
}

impl From<Unread> for DataError {
    fn from(unread: Unread) -> DataError {
        match unread {
            Unread::Wrong(error) | Unread::NotNumbers(error) => error,
        }
    }
}

impl Table {
    /// Reads the table at `path`. Labels that are all small integers are classes as they are, so that `0, 2` makes three
    /// classes; others are names, and classes are numbered in the order of the sorted names (numbers by value). Labels
    /// that look like numbers to be predicted are refused, unless the options say that they are classes.
    pub fn open(path: &Path, options: &TableOptions) -> Result<Table, DataError> {
        Ok(Table::open_all(&[path.to_path_buf()], options)?.remove(0))
    }

    /// Reads the table at `path` with the target of another, so that a test set has the classes of its training set.
    pub fn open_as(path: &Path, options: &TableOptions, target: &Target) -> Result<Table, DataError> {
        let kind = target.kind().unwrap_or_default();
        let table = Table::labelled(path, &TableOptions { kind, ..options.clone() });
        table.map_err(DataError::from)?.with_target(target)
    }

    /// Reads a table whose labels are not mapped to classes yet.
    fn labelled(path: &Path, options: &TableOptions) -> Result<Table, Unread> {
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        let labels = labels_of(&text, &heading, options)?;
        Table::read_labelled(text, heading, &labels, None)
    }

    /// Reads a table with labels in these fields; its rows may have been `seen` while its columns were learnt.
    fn read_labelled(
        text: Text,
        heading: Heading,
        labels: &[usize],
        seen: Option<RowIndex>,
    ) -> Result<Table, Unread> {
        // Tokens of texts are kept in memory.
        match text.is_stored() && text.texts().is_none() {
            true => Table::index(text, heading, labels, seen, Chunks::default()),
            false => Table::read(&text, &heading, labels, true),
        }
    }

    /// Reads rows of `width` features for prediction. Labels, if there are, are left out: the column with the name that
    /// the label had in training, and in a table of one column more without such a name the one that the options name,
    /// else the last; several labels likewise. Every row then has class 0 of 1; [`Table::with_target`] gives the set the
    /// target of the one that was trained on.
    pub fn features_only(path: &Path, width: usize, options: &TableOptions) -> Result<Table, DataError> {
        if width == 0 {
            return Err(DataError::Setting { why: "a row needs at least one feature".into() });
        }
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        if options.schema.is_some() || options.texts.is_some() || options.files.is_some() {
            let labels = heading.known_labels(&text);
            return Ok(Table::read(&text, &heading, &labels, false)?);
        }
        let n_labels = options.labels.len().max(1);
        let labels = match heading.is_known(&text) {
            // The error names the columns that are missing or unknown.
            true => heading.known_labels(&text),
            false => match heading.width {
                w if w == width => Vec::new(),
                w if w.checked_sub(n_labels) == Some(width) => heading.labels(&text)?,
                w => {
                    let why = format!("{w} columns, but the model takes {width} features");
                    return Err(text.error(0, 0, &why));
                }
            },
        };
        Ok(Table::read(&text, &heading, &labels, false)?)
    }

    /// The same with the target of another table, so that a test set has the classes of its training set.
    pub fn with_target(mut self, target: &Target) -> Result<Table, DataError> {
        match target {
            Target::Class { classes, names } | Target::Tags { classes, names } => {
                self.class_of = classes::look_up(&self.distinct, *classes, names)?;
            }
            // Rows for prediction have no labels: zeros stand for them.
            Target::Numbers { n, .. } | Target::Labels { n, .. } if self.targets.is_empty() => {
                self.targets = vec![0.0; self.len() * n];
            }
            Target::Numbers { .. } | Target::Labels { .. } if target.kind() == self.spec.target.kind() => {
                let have = self.spec.n_labels();
                self.spec.target = target.clone();
                if self.spec.n_labels() != have {
                    let why = format!(
                        "a row has {have} labels, and {} were trained on; name as many columns with `data.label`",
                        self.spec.n_labels()
                    );
                    return Err(DataError::Setting { why });
                }
            }
            Target::NextId | Target::Numbers { .. } | Target::Labels { .. } => {
                let why = "a table's labels are classes or numbers, as they were read".into();
                return Err(DataError::Setting { why });
            }
        }
        self.spec.target = target.clone();
        Ok(self)
    }

    /// The names of the columns; empty if the table has no header.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// As what the columns were read, if they are not all numbers.
    pub fn schema(&self) -> Option<&Arc<TableSchema>> {
        self.schema.as_ref()
    }

    /// The names of columns that are read as numbers and count the rows, as an id does.
    pub fn like_ids(&self) -> Vec<String> {
        if let Some(schema) = &self.schema {
            return schema.like_ids.clone();
        }
        if self.texts.is_some() {
            return Vec::new();
        }
        let name = |column: usize| self.columns.features.get(column).cloned().unwrap_or(column.to_string());
        if let Some(stored) = &self.stored {
            return stored.like_ids.iter().copied().map(name).collect();
        }
        let (width, rows) = (self.width(), self.len());
        let counts = |column: &usize| {
            let value = |row: usize| self.values[row * width + column];
            // An f32 cannot count further.
            rows >= survey::ROWS_OF_IDS
                && (1..rows.min(1 << 20)).all(|row| value(row) == value(row - 1) + 1.0)
        };
        (0..width).filter(counts).map(name).collect()
    }

    /// The same where texts are filled up to these lengths, ascending; the last is at least that of the longest.
    pub fn with_times(mut self, lengths: &[usize]) -> Table {
        if let Features::Texts { times, .. } = &mut self.spec.features {
            *times = lengths.to_vec();
        }
        self
    }

    /// How many tokens each row has; nothing if the features are no texts.
    pub fn lengths(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.texts.iter().flat_map(TokenRows::lengths)
    }

    /// How many texts were longer than there is room for, and were cut.
    pub fn n_cut(&self) -> usize {
        self.texts.as_ref().map_or(0, |texts| texts.cut)
    }

    /// Of rows for prediction whose words are to have tags: each word, and the place of its first token.
    pub fn words(&self) -> &[Vec<WordPlace>] {
        self.texts.as_ref().map_or(&[], TokenRows::words)
    }

    /// Whether its rows stay in their file.
    pub fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    /// Whether the rows have labels; not those of [`Table::features_only`].
    pub fn has_labels(&self) -> bool {
        !self.labels.is_empty() || !self.targets.is_empty()
    }

    fn width(&self) -> usize {
        self.spec.features.numel()
    }

    /// Reads all rows; `fields` are columns that are no features, and are kept if `labelled`.
    fn read(text: &Text, heading: &Heading, fields: &[usize], labelled: bool) -> Result<Table, Unread> {
        let schema = text.schema().cloned();
        let mut features = match (text.files(), text.texts(), &schema) {
            (Some(column), _, _) => FeatureReader::Files(column.field(text, heading, fields)?, Vec::new()),
            (None, Some(columns), _) => {
                let places = columns.fields(text, heading, fields)?;
                FeatureReader::Texts(columns, places, TokenRows::default())
            }
            (None, None, None) => FeatureReader::Numbers(heading.features(text, fields)?),
            (None, None, Some(schema)) => {
                let names = if heading.is_named() { heading.names.as_slice() } else { &[] };
                let places = schema.find(names, heading.width).map_err(|why| text.error(0, 0, &why))?;
                FeatureReader::Encoded(RowEncoder::new(schema, &places))
            }
        };
        let mut counts = match &features {
            FeatureReader::Numbers(_) | FeatureReader::Texts(..) | FeatureReader::Files(..) => Vec::new(),
            FeatureReader::Encoded(encoder) => encoder.counts(),
        };
        let choice = match (&schema, text.files()) {
            (Some(schema), _) => Some(schema.choice()),
            (None, Some(_)) => Some(text.choice().clone()),
            (None, None) => None,
        };
        let mut labels = ReadLabels::new(heading, fields, labelled.then_some(text.kind()), choice);
        let (mut values, mut not_numbers) = (Vec::new(), false);
        let outcome = text.rows(heading, |row| {
            match &mut features {
                FeatureReader::Numbers(fields) => {
                    Table::numbers(row, fields, &mut values).map_err(|unread| {
                        not_numbers = matches!(unread, Unread::NotNumbers(_));
                        DataError::from(unread)
                    })?;
                }
                FeatureReader::Encoded(encoder) => encoder.row(row, &mut values, Some(&mut counts))?,
                FeatureReader::Texts(columns, places, rows) if columns.tagged => {
                    let tags = match fields.first().filter(|_| labelled) {
                        Some(&field) => Some(tags_of(row, field, &mut labels)?),
                        None => None,
                    };
                    return rows.push_words(columns, row, places[0], tags.as_deref());
                }
                FeatureReader::Texts(columns, places, rows) => rows.push(columns, row, places)?,
                FeatureReader::Files(field, files) => files.push(ListedFile::of(row, *field)?),
            }
            labels.row(row)
        });
        match outcome {
            Err(error) if not_numbers => return Err(Unread::NotNumbers(error)),
            outcome => outcome?,
        }
        let name = |field: usize| heading.name(field).map(String::from);
        let mut columns =
            Columns { features: Vec::new(), labels: fields.iter().copied().filter_map(name).collect() };
        let shape = match (&features, &schema) {
            (FeatureReader::Encoded(encoder), Some(schema)) => {
                encoder.finish(&counts).map_err(|why| text.error(0, 0, &why))?;
                columns.features = if schema.unnamed.is_some() { Vec::new() } else { schema.names() };
                schema.features()
            }
            (FeatureReader::Numbers(fields), _) => {
                columns.features = fields.iter().copied().filter_map(name).collect();
                Features::Row { width: fields.len() }
            }
            (FeatureReader::Texts(texts, places, rows), _) => {
                columns.features = places.iter().copied().filter_map(name).collect();
                rows.features(texts)
            }
            (FeatureReader::Files(field, files), _) => {
                columns.features = name(*field).into_iter().collect();
                // What is in the files is not known here: a row is one number, of no meaning.
                values = vec![0.0; files.len()];
                Features::Row { width: 1 }
            }
            (FeatureReader::Encoded(_), None) => unreachable!("only a schema encodes"),
        };
        let (texts, files) = match features {
            FeatureReader::Texts(_, _, rows) => (Some(rows), Vec::new()),
            FeatureReader::Files(_, files) => (None, files),
            FeatureReader::Numbers(_) | FeatureReader::Encoded(_) => (None, Vec::new()),
        };
        Ok(Table { values, texts, files, ..Table::of(text, columns, shape, labels, labelled) })
    }

    /// Goes through a table whose rows stay in their file.
    fn index(
        text: Text,
        heading: Heading,
        fields: &[usize],
        seen: Option<RowIndex>,
        chunks: Chunks,
    ) -> Result<Table, Unread> {
        if text.format() == TableFormat::Parquet || text.is_array() {
            let why = "rows of Parquet and of an array of JSON are read into memory; leave `data.in_memory` out, or write JSON lines or CSV";
            return Err(text.error(0, 0, why).into());
        }
        let schema = text.schema().cloned();
        let name = |field: &usize| heading.name(*field).map(String::from);
        let names: Vec<Option<String>> = (0..heading.width).map(|field| name(&field)).collect();
        let label_names = fields.iter().filter_map(name).collect();
        let plain = labels_to_keep(&text, &heading, fields, schema.as_ref().map(|s| s.choice()));
        let Indexed { rows, labels, features, numbers } =
            StoredRows::index(text, heading, fields, plain, seen, chunks)?;
        let features_names = match &schema {
            Some(schema) if schema.unnamed.is_none() => schema.names(),
            Some(_) => Vec::new(),
            None => numbers.iter().filter_map(|field| names[*field].clone()).collect(),
        };
        let columns = Columns { features: features_names, labels: label_names };
        let table = rows.with_text(|text| Ok(Table::of(text, columns, features, labels, true)))?;
        Ok(Table { stored: Some(rows), ..table })
    }

    /// A table without its rows.
    fn of(text: &Text, columns: Columns, features: Features, labels: ReadLabels, labelled: bool) -> Table {
        let (n, names) = (labels.n_fields(), columns.labels.clone());
        let target = match text.kind() {
            LabelKind::Numbers if labelled => Target::Numbers { n, names },
            LabelKind::Labels if labelled => Target::Labels { n, names },
            LabelKind::Classes | LabelKind::Numbers | LabelKind::Labels => {
                Target::Class { classes: 1, names: Vec::new() }
            }
        };
        let ReadLabels { labels, targets, distinct, .. } = labels;
        let spec = Spec { features, target };
        let (values, class_of, schema) = (Vec::new(), Vec::new(), text.schema().cloned());
        Table {
            spec,
            columns,
            values,
            labels,
            distinct,
            class_of,
            targets,
            schema,
            stored: None,
            texts: None,
            files: Vec::new(),
        }
    }

    /// The class of a row, if it has one.
    fn class_of_row(&self, idx: usize) -> Option<usize> {
        let class = || self.labels.get(idx).map_or(0, |&l| self.class_of[l as usize] as usize);
        matches!(self.spec.target, Target::Class { .. }).then(class)
    }

    /// Adds the fields of a row that are numbers to `values`.
    fn numbers(row: &Row, fields: &[usize], values: &mut Vec<f32>) -> Result<(), Unread> {
        for &field in fields {
            match row.number(field) {
                Ok(number) => values.push(number),
                Err(error) if row.is_not_number(field) => return Err(Unread::NotNumbers(error)),
                Err(error) => return Err(Unread::Wrong(error)),
            }
        }
        Ok(())
    }
}

/// The numbers of the tags in a field: a list, as words are.
fn tags_of(row: &Row, field: usize, labels: &mut ReadLabels) -> Result<Vec<u32>, DataError> {
    let tags = list_of(row, field)?;
    if let Some(at) = tags.iter().position(String::is_empty) {
        return Err(
            row.wrong(field, &format!("has a blank as tag {at}, counted from 0; give a tag to each word"))
        );
    }
    tags.iter().map(|tag| labels.number(tag, row, field)).collect()
}

/// The labels' columns of a table that has labels.
fn labels_of(text: &Text, heading: &Heading, options: &TableOptions) -> Result<Vec<usize>, DataError> {
    if heading.width < 2 {
        return Err(text.error(
            0,
            0,
            "only one column; a row is features and a label: is the delimiter right?",
        ));
    }
    let labels = heading.labels(text)?;
    if options.kind == LabelKind::Classes && labels.len() > 1 {
        let why = "classes have one label's column; for several numbers set `train.loss = \"mse\"`, for several \
                   labels of 0 or 1 `train.loss = \"bce\"`";
        return Err(text.error(0, 0, why));
    }
    Ok(labels)
}

/// Labels of a table whose rows stay in their file, before any row.
fn labels_to_keep(
    text: &Text,
    heading: &Heading,
    fields: &[usize],
    choice: Option<ColumnChoice>,
) -> ReadLabels {
    ReadLabels::new(heading, fields, Some(text.kind()), choice)
}

/// Looks at all columns of tables, labels as well. Columns are those of the first.
pub fn survey(paths: &[PathBuf], options: &TableOptions) -> Result<Vec<ColumnSurvey>, DataError> {
    let (mut surveys, mut same) = (Vec::<ColumnSurvey>::new(), SameColumns::default());
    for (k, path) in paths.iter().enumerate() {
        options.places.soon(&paths[k..]);
        let text = Text::open(path, &same.options(options))?;
        let heading = text.heading()?;
        same.check(&text, &heading)?;
        let names = heading.names_or_numbers();
        let fields = match surveys.is_empty() {
            true => {
                surveys = names.iter().map(|name| ColumnSurvey::new(name, true)).collect();
                (0..names.len()).collect()
            }
            false => places(&surveys, &names).map_err(|why| text.error(0, 0, &why))?,
        };
        look(&text, &heading, &fields, &mut surveys, None, Chunks::default())?;
    }
    Ok(surveys)
}

/// Looks at all rows of a file, in chunks on all cores. With an empty `index` that is filled meanwhile, and given back unless a label is
/// wrong or a number is none for f32: whoever reads the rows then says which.
fn look(
    text: &Text,
    heading: &Heading,
    fields: &[usize],
    surveys: &mut [ColumnSurvey],
    mut index: Option<RowIndex>,
    chunks: Chunks,
) -> Result<Option<RowIndex>, DataError> {
    let before = surveys.first().map_or(0, |survey| survey.rows);
    let add = |surveys: &mut [ColumnSurvey], row: &Row| {
        let pairs = surveys.iter_mut().zip(fields);
        pairs.for_each(|(survey, field)| survey.add(row, *field, text.choice()));
        Ok(())
    };
    if text.format() == TableFormat::Parquet || text.is_array() {
        return text.rows(heading, |row| add(surveys, row)).map(|()| None);
    }
    let empty: Vec<ColumnSurvey> = surveys.iter().map(ColumnSurvey::again).collect();
    let empty_index = index.as_ref().map(RowIndex::chunk);
    let work = |chunk| {
        let (mut surveys, mut index) = (empty.clone(), empty_index.as_ref().map(ChunkIndex::again));
        text.rows_of(heading, chunk, |row| {
            index = index.take().and_then(|mut index| index.row(row).is_ok().then_some(index));
            add(&mut surveys, row)
        })?;
        Ok((surveys, index))
    };
    text.in_chunks(heading, chunks, work, |(more, of_chunk)| {
        index = index
            .take()
            .zip(of_chunk)
            .and_then(|(mut index, more)| index.append(more).is_ok().then_some(index));
        surveys.iter_mut().zip(more).for_each(|(survey, more)| survey.append(more));
        Ok(())
    })?;
    match surveys.first() {
        Some(survey) if survey.rows == before => Err(text.no_rows()),
        _ => Ok(index.filter(|_| surveys.iter().all(ColumnSurvey::fits_f32))),
    }
}

/// Where columns that were looked at in a first file are in another one.
fn places(surveys: &[ColumnSurvey], names: &[String]) -> Result<Vec<usize>, String> {
    let place = |survey: &ColumnSurvey| {
        let lacks = || format!("the header lacks {:?}, which the first file has", survey.name);
        names.iter().position(|name| *name == survey.name).ok_or_else(lacks)
    };
    surveys.iter().map(place).collect()
}

impl Dataset for Table {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        match (&self.texts, &self.stored) {
            (Some(texts), _) => texts.len(),
            (None, Some(stored)) => stored.len(),
            (None, None) => self.values.len() / self.width(),
        }
    }

    fn tokens(&self, idx: usize) -> Option<usize> {
        self.texts.as_ref().map(|texts| texts.row(idx).len())
    }

    fn n_counted(&self, idx: usize) -> Option<usize> {
        let tagged = matches!(self.spec.target, Target::Tags { .. });
        let texts = self.texts.as_ref().filter(|_| tagged)?;
        Some(texts.tags(idx).iter().filter(|tag| **tag != IGNORED).count())
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let values = match (&self.texts, &self.stored) {
            (Some(texts), _) if matches!(self.spec.target, Target::Tags { .. }) => {
                // Rows for prediction have no distinct labels, and the first class stands for them.
                let class = |&tag: &i32| match usize::try_from(tag) {
                    Ok(tag) => self.class_of.get(tag).map_or(0, |&class| class as i32),
                    Err(_) => IGNORED,
                };
                scratch.ids.clear();
                scratch.ids.extend(texts.tags(idx).iter().map(class));
                let label = Label::Tags(&scratch.ids);
                return Ok(Fetched { values: Values::I32(texts.row(idx)), label });
            }
            (Some(texts), _) => Values::I32(texts.row(idx)),
            (None, Some(stored)) => {
                stored.read(idx, &mut scratch.fields, &mut scratch.numbers)?;
                Values::F32(&scratch.numbers)
            }
            (None, None) => Values::F32(&self.values[idx * self.width()..][..self.width()]),
        };
        Ok(Fetched { values, label: self.label(idx) })
    }

    fn far(&self, _: usize) -> Option<FarFile<'_>> {
        self.stored.as_ref().and_then(StoredRows::far)
    }

    fn intact(&self) -> Result<(), DataError> {
        self.stored.as_ref().map_or(Ok(()), StoredRows::intact)
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(self.class_of_row(idx))
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod mixed_tests;
#[cfg(test)]
mod stored_tests;
#[cfg(test)]
mod tests;
