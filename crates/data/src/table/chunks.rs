//! A text in chunks of whole rows, read by several threads.
//!
//! A chunk ends where a row does. In a text without quotes every end of a line is one; where there are quotes, an end of a line may
//! be inside of them, so rows are walked through to find the end. Chunks are found one after the other, read at the same time, and what was read of them is
//! merged in their order: the result, and which error is reported, do not depend on how many threads there are.
//!
//! Each thread takes the next chunk when it is done with one, and hands over what it made. No thread is further ahead than some chunks of what was
//! merged: the text is gone through once, and memory is bounded by what is made of these.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;

use super::fields::Fields;
use super::lines::TableFormat;
use super::text::{Heading, Row, Text};
use crate::error::DataError;

/// How a text is cut and read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chunks {
    /// The bytes of a chunk, about.
    pub(super) bytes: usize,
    /// Threads that read.
    pub(super) threads: usize,
}

impl Default for Chunks {
    /// Chunks that are read in some milliseconds, on all cores.
    fn default() -> Chunks {
        Chunks { bytes: 4 << 20, threads: thread::available_parallelism().map_or(1, |n| n.get()).min(16) }
    }
}

/// A part of a text, of whole rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowChunk {
    /// Which it is.
    pub(super) number: usize,
    from: usize,
    to: usize,
}

/// Chunks that may be read and not merged yet, for each thread.
const AHEAD: usize = 2;

/// What the threads that read a text have in common.
struct ChunkReading<T, M> {
    /// Where the next chunk starts.
    at: usize,
    /// Which it is.
    number: usize,
    /// What was made of chunks that wait for those before them.
    made: BTreeMap<usize, Result<T, DataError>>,
    /// How many were merged.
    merged: usize,
    merge: M,
    /// The first fault in the order of chunks; nothing is read after it.
    fault: Option<DataError>,
    /// Whether a thread has panicked.
    gone: bool,
}

/// [`ChunkReading`], and what says that it has changed.
struct SharedReading<T, M> {
    reading: Mutex<ChunkReading<T, M>>,
    changed: Condvar,
}

/// Tells other threads not to wait for one that panics.
struct Panics<'a, T, M>(&'a SharedReading<T, M>);

impl<T, M> Drop for Panics<'_, T, M> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.lock().gone = true;
            self.0.changed.notify_all();
        }
    }
}

impl<T, M> SharedReading<T, M> {
    fn lock(&self) -> MutexGuard<'_, ChunkReading<T, M>> {
        self.reading.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<T, M: FnMut(T) -> Result<(), DataError>> ChunkReading<T, M> {
    /// Takes what was made of a chunk, and merges what no longer has to wait.
    fn take(&mut self, text: &Text, number: usize, made: Result<T, DataError>) {
        self.made.insert(number, made);
        while self.fault.is_none()
            && let Some(made) = self.made.remove(&self.merged)
        {
            // Checked first: the content of a file that was cut may be wrong in any way, or in none.
            let merged = text.bytes().intact().and(made).and_then(&mut self.merge);
            self.fault = merged.err();
            self.merged += 1;
        }
    }
}

impl Text {
    /// Reads all rows under the heading, chunk by chunk: calls `work` for every chunk, several at a time, and `merge` with what it
    /// made, in order.
    pub(super) fn in_chunks<T: Send>(
        &self,
        heading: &Heading,
        chunks: Chunks,
        work: impl Fn(RowChunk) -> Result<T, DataError> + Sync,
        merge: impl FnMut(T) -> Result<(), DataError> + Send,
    ) -> Result<(), DataError> {
        let (at, made) = (self.body(heading)?, BTreeMap::new());
        let reading = ChunkReading { at, number: 0, made, merged: 0, merge, fault: None, gone: false };
        let shared = SharedReading { reading: Mutex::new(reading), changed: Condvar::new() };
        let threads = chunks.threads.max(1);
        let read = || {
            let _panics = Panics(&shared);
            let mut reading = shared.lock();
            while reading.fault.is_none() && !reading.gone && reading.at < self.bytes().len() {
                if reading.number >= reading.merged + AHEAD * threads {
                    reading = shared.changed.wait(reading).unwrap_or_else(|poisoned| poisoned.into_inner());
                    continue;
                }
                let (number, from) = (reading.number, reading.at);
                let end = self.chunk_end(from, chunks.bytes);
                reading.number += 1;
                reading.at = *end.as_ref().unwrap_or(&self.bytes().len());
                drop(reading);
                let made = end.and_then(|to| work(RowChunk { number, from, to }));
                reading = shared.lock();
                reading.take(self, number, made);
                shared.changed.notify_all();
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                // Without threads of the system's this one reads all of it.
                let _ = thread::Builder::new().name("table".into()).spawn_scoped(scope, read);
            }
            read();
        });
        let reading = shared.reading.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.bytes().intact()?;
        reading.fault.map_or(Ok(()), Err)
    }

    /// Calls `each` with the rows of a chunk.
    pub(super) fn rows_of(
        &self,
        heading: &Heading,
        chunk: RowChunk,
        mut each: impl FnMut(&Row) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (mut fields, mut at) = (Fields::default(), chunk.from);
        while at < chunk.to
            && let Some(next) = self.row_at(heading, at, &mut fields)?
        {
            // Blank lines may end a chunk.
            if fields.start >= chunk.to {
                break;
            }
            at = next;
            each(&Row::new(self, heading, &fields))?;
        }
        Ok(())
    }

    /// Where a chunk of about this many bytes ends, if it starts with the row at `from`.
    fn chunk_end(&self, from: usize, bytes: usize) -> Result<usize, DataError> {
        let text: &[u8] = self.bytes();
        let target = from.saturating_add(bytes.max(1));
        if target >= text.len() {
            return Ok(text.len());
        }
        let is_csv = self.format() == TableFormat::Csv;
        let quotes = is_csv && text[from..target].contains(&b'"');
        if !quotes && let Some(last) = text[from..target].iter().rposition(|b| *b == b'\n') {
            return Ok(from + last + 1);
        }
        let (mut fields, mut at) = (Fields::default(), from);
        while at < target
            && let Some(next) = self.skip_row(at, &mut fields)?
        {
            at = next;
        }
        Ok(if at < target { text.len() } else { at })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::super::TableOptions;
    use super::*;

    /// Where a row starts, and its fields.
    type FoundRow = (usize, Vec<Vec<u8>>);

    /// The rows of a text, or an error.
    type Rows = Result<Vec<FoundRow>, String>;

    fn row(row: &Row, heading: &Heading) -> FoundRow {
        (row.start(), (0..heading.width).map(|field| row.field(field).to_vec()).collect())
    }

    /// In chunks of any size the rows are the same, and so is the first error.
    fn check(content: &[u8], format: TableFormat) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), content).unwrap();
        let options = TableOptions { format, header: Some(true), ..TableOptions::default() };
        let text = Text::open(file.path(), &options).unwrap();
        let Ok(heading) = text.heading() else { return };
        let mut whole = Vec::new();
        let outcome = text.rows(&heading, |r| {
            whole.push(row(r, &heading));
            Ok(())
        });
        let whole: Rows = outcome.map(|()| whole).map_err(|e| e.to_string());
        for (bytes, threads) in [(1, 1), (3, 2), (7, 3), (16, 1), (1 << 20, 2)] {
            let mut rows = Vec::new();
            let work = |chunk: RowChunk| {
                let mut rows = Vec::new();
                text.rows_of(&heading, chunk, |r| {
                    rows.push(row(r, &heading));
                    Ok(())
                })?;
                Ok(rows)
            };
            let outcome = text.in_chunks(&heading, Chunks { bytes, threads }, work, |more| {
                rows.extend(more);
                Ok(())
            });
            let chunked: Rows = outcome.map(|()| rows).map_err(|e| e.to_string());
            match &whole {
                // That there are no rows is found by who reads the chunks.
                Err(why) if why.contains("no rows") => assert_eq!(chunked, Ok(Vec::new())),
                whole => {
                    assert_eq!(&chunked, whole, "{bytes} {threads} {:?}", String::from_utf8_lossy(content))
                }
            }
        }
    }

    #[test]
    fn rows_of_chunks_are_those_of_the_text() {
        let csv = TableFormat::Csv;
        check(b"a,b\n1,2\n3,4\n5,6\n", csv);
        check(b"\xef\xbb\xbfa,b\r\n1,2\r\n\r\n3,4\r\n5,6", csv);
        check(b"a,b\n\"1\n\n,\",2\n3,\"4 \"\"x\"\"\n\"\n5,6\n", csv);
        check(b"a,b\r1,2\r3,4\r", csv);
        check(b"a,b\n1,2\n3\n4,5\n6,\"7\n", csv);
        check(b"a,b\n", csv);
        let lines = TableFormat::JsonLines;
        check(b"{\"a\":1}\n\n{\"a\":2,\"b\":\"x\"}\n  \n{\"b\":null}", lines);
        check(b"{\"a\":1}\n{\"a\":}\n", lines);
    }

    proptest! {
        #[test]
        fn any_rows_of_chunks_are_those_of_the_text(body in "([ab1]{0,3},[ab1]{0,3}\r?\n|\"[a,\n]{0,4}\",b\n|\n){0,12}") {
            check(format!("a,b\n{body}").as_bytes(), TableFormat::Csv);
        }
    }
}
