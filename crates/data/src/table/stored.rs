//! Rows that stay in their file: a table that is larger than memory.
//!
//! The file is mapped and gone through once, in chunks on all cores: every row is read as it will be, so that whatever is wrong is said
//! before training, its labels are kept, and where every [`EVERY`]th row starts is noted. A sample is then read where it lies: from the
//! row that was noted before it, some rows are skipped, its fields are cut out and become numbers. Threads that load batches do this, each for its own.
//!
//! What is in memory: four bytes of labels a row, and eight bytes of places for [`EVERY`] rows. Of the file the system keeps in memory
//! what there is room for. In random order a row costs a read of the disk if it is not there; `order = "block"` reads neighbours
//! together.
//!
//! The bits are those of the same table in memory: the same code makes numbers of the same fields.

use super::chunks::Chunks;
use super::encode::{RowEncoder, WordCounts};
use super::fields::Fields;
use super::labels::ReadLabels;
use super::survey::ROWS_OF_IDS;
use super::text::{ClosedText, Heading, Row, Text};
use super::{Table, Unread};
use crate::error::DataError;
use crate::remote::FarFile;
use crate::spec::Features;

/// The place of every so-manieth row is noted.
const EVERY: usize = 8;

/// The rows of a file, read where they lie.
#[derive(Debug)]
pub(super) struct StoredRows {
    text: StoredText,
    heading: Heading,
    reader: StoredFeatures,
    /// Where every [`EVERY`]th row starts.
    starts: Vec<u64>,
    rows: usize,
    /// Columns of numbers that count the rows, by their places among the features.
    pub(super) like_ids: Vec<usize>,
}

/// The text that rows are in.
#[derive(Debug)]
enum StoredText {
    /// Of a file of this host, which stays mapped.
    Here(Text),
    /// Of an object of a store: opened whenever a row is read, since its copy may have to make room for others.
    Far(ClosedText),
}

/// How features are read.
#[derive(Debug)]
enum StoredFeatures {
    /// As numbers, in these fields.
    Numbers(Vec<usize>),
    /// As a schema says.
    Encoded(RowEncoder),
}

/// Labels and places of rows.
pub(super) struct RowIndex {
    labels: ReadLabels,
    /// Where every [`EVERY`]th row starts.
    starts: Vec<u64>,
    rows: usize,
}

/// Labels and places of the rows of a chunk.
pub(super) struct ChunkIndex {
    labels: ReadLabels,
    /// Where each row starts.
    starts: Vec<u64>,
}

/// What is made of a chunk.
struct ReadChunk {
    index: ChunkIndex,
    counts: Vec<WordCounts>,
    /// For each number of a row whether it counts the rows; of the first chunk alone.
    counting: Option<Vec<bool>>,
}

impl RowIndex {
    /// Of no rows, whose labels are to be read as those of `labels`.
    pub(super) fn new(labels: ReadLabels) -> RowIndex {
        RowIndex { labels, starts: Vec::new(), rows: 0 }
    }

    /// Of a chunk, before any of its rows.
    pub(super) fn chunk(&self) -> ChunkIndex {
        ChunkIndex::new(&self.labels)
    }

    /// Adds the rows that follow.
    pub(super) fn append(&mut self, chunk: ChunkIndex) -> Result<(), DataError> {
        self.labels.append(chunk.labels)?;
        let skip = (EVERY - self.rows % EVERY) % EVERY;
        self.starts.extend(chunk.starts.iter().skip(skip).step_by(EVERY));
        self.rows += chunk.starts.len();
        Ok(())
    }
}

impl ChunkIndex {
    /// Of no rows, whose labels are to be read as those of `labels`.
    fn new(labels: &ReadLabels) -> ChunkIndex {
        ChunkIndex { labels: labels.again(), starts: Vec::new() }
    }

    /// The same of no rows.
    pub(super) fn again(&self) -> ChunkIndex {
        ChunkIndex::new(&self.labels)
    }

    /// Adds a row.
    pub(super) fn row(&mut self, row: &Row) -> Result<(), DataError> {
        self.labels.row(row)?;
        self.starts.push(row.start() as u64);
        Ok(())
    }
}

/// What was found in a file.
pub(super) struct Indexed {
    pub(super) rows: StoredRows,
    pub(super) labels: ReadLabels,
    pub(super) features: Features,
    /// The fields of features that are numbers.
    pub(super) numbers: Vec<usize>,
}

impl StoredRows {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.rows
    }

    /// Does something with the file's text.
    pub(super) fn with_text<T>(
        &self,
        work: impl FnOnce(&Text) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        match &self.text {
            StoredText::Here(text) => work(text),
            StoredText::Far(text) => work(&text.open()?),
        }
    }

    /// The file, if it is not on this host.
    pub(super) fn far(&self) -> Option<FarFile<'_>> {
        match &self.text {
            StoredText::Here(_) => None,
            StoredText::Far(text) => text.far(),
        }
    }

    /// Fails if the file was cut since it was opened.
    pub(super) fn intact(&self) -> Result<(), DataError> {
        match &self.text {
            StoredText::Here(text) => text.bytes().intact(),
            // Nobody cuts a copy.
            StoredText::Far(_) => Ok(()),
        }
    }

    /// Reads the features of a row.
    pub(super) fn read(&self, idx: usize, fields: &mut Fields, to: &mut Vec<f32>) -> Result<(), DataError> {
        fields.begin_text();
        self.with_text(|text| {
            let mut at = self.starts[idx / EVERY] as usize;
            let gone = || text.error(text.bytes().len(), 0, "rows are gone since the file was opened");
            for _ in 0..idx % EVERY {
                at = text.skip_row(at, fields)?.ok_or_else(gone)?;
            }
            text.row_at(&self.heading, at, fields)?.ok_or_else(gone)?;
            to.clear();
            self.reader.row(&Row::new(text, &self.heading, fields), to, None).map_err(DataError::from)
        })
    }

    /// Goes through a file whose `labels` are to be read so; not again if that was done while its columns were learnt (`seen`).
    pub(super) fn index(
        text: Text,
        heading: Heading,
        fields: &[usize],
        labels: ReadLabels,
        seen: Option<RowIndex>,
        chunks: Chunks,
    ) -> Result<Indexed, Unread> {
        let schema = text.schema().cloned();
        let (reader, features, numbers) = match &schema {
            None => {
                let numbers = heading.features(&text, fields)?;
                let width = numbers.len();
                (StoredFeatures::Numbers(numbers.clone()), Features::Row { width }, numbers)
            }
            Some(schema) => {
                let names = if heading.is_named() { heading.names.as_slice() } else { &[] };
                let places = schema.find(names, heading.width).map_err(|why| text.error(0, 0, &why))?;
                (StoredFeatures::Encoded(RowEncoder::new(schema, &places)), schema.features(), Vec::new())
            }
        };
        let (index, like_ids) = match seen {
            Some(index) => (index, Vec::new()),
            None => reader.look(&text, &heading, labels, numbers.len(), chunks)?,
        };
        let RowIndex { labels, mut starts, rows } = index;
        if rows == 0 {
            return Err(text.no_rows().into());
        }
        starts.shrink_to_fit();
        text.bytes().read_at_random();
        let text = if text.is_far() { StoredText::Far(text.close()) } else { StoredText::Here(text) };
        let rows = StoredRows { text, heading, reader, starts, rows, like_ids };
        Ok(Indexed { rows, labels, features, numbers })
    }
}

impl StoredFeatures {
    /// Reads all rows as they will be read again. Gives which of the `width` numbers of a row count the rows, too.
    fn look(
        &self,
        text: &Text,
        heading: &Heading,
        labels: ReadLabels,
        width: usize,
        chunks: Chunks,
    ) -> Result<(RowIndex, Vec<usize>), Unread> {
        let (mut all, mut counts, mut like_ids) = (RowIndex::new(labels), self.counts(), Vec::new());
        let empty = all.chunk();
        // An error that says that a column is not numbers goes through `in_chunks` as it is.
        let not_numbers = std::sync::Mutex::new(None::<(usize, usize)>);
        let work = |chunk: super::chunks::RowChunk| {
            let mut made = ReadChunk { index: empty.again(), counts: self.counts(), counting: None };
            let (mut values, mut before) = (Vec::new(), Vec::new());
            let mut counting = (chunk.number == 0).then(|| vec![true; width]);
            text.rows_of(heading, chunk, |row| {
                values.clear();
                self.row(row, &mut values, Some(&mut made.counts)).map_err(|unread| {
                    if let Unread::NotNumbers(_) = unread {
                        let mut found = not_numbers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                        let here = (chunk.number, row.start());
                        *found = Some(found.map_or(here, |first| first.min(here)));
                    }
                    DataError::from(unread)
                })?;
                made.index.row(row)?;
                if let Some(counting) = &mut counting {
                    let steps = values.iter().zip(&before).zip(counting.iter_mut());
                    steps.for_each(|((now, before), counts)| *counts &= *now == *before + 1.0);
                    before.clone_from(&values);
                }
                Ok(())
            })?;
            made.counting = counting.filter(|_| made.index.starts.len() >= ROWS_OF_IDS);
            Ok(made)
        };
        let mut merged = 0;
        let outcome = text.in_chunks(heading, chunks, work, |made: ReadChunk| {
            merged += 1;
            all.append(made.index)?;
            counts.iter_mut().zip(&made.counts).for_each(|(all, more)| all.add(more));
            if let Some(counting) = made.counting {
                like_ids = (0..counting.len()).filter(|column| counting[*column]).collect();
            }
            Ok(())
        });
        if let Err(error) = outcome {
            // It is the error of the first chunk that was not merged.
            let found = not_numbers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            return Err(match *found {
                Some((chunk, _)) if chunk == merged => Unread::NotNumbers(error),
                _ => Unread::Wrong(error),
            });
        }
        if let StoredFeatures::Encoded(encoder) = self {
            encoder.finish(&counts).map_err(|why| text.error(0, 0, &why))?;
        }
        Ok((all, like_ids))
    }

    /// Adds what a row becomes to `values`.
    fn row(
        &self,
        row: &Row,
        values: &mut Vec<f32>,
        counts: Option<&mut Vec<WordCounts>>,
    ) -> Result<(), Unread> {
        match self {
            StoredFeatures::Numbers(fields) => Table::numbers(row, fields, values),
            StoredFeatures::Encoded(encoder) => Ok(encoder.row(row, values, counts)?),
        }
    }

    /// What is counted of each column, before any row.
    fn counts(&self) -> Vec<WordCounts> {
        match self {
            StoredFeatures::Numbers(_) => Vec::new(),
            StoredFeatures::Encoded(encoder) => encoder.counts(),
        }
    }
}
