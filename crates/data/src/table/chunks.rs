//! A text in chunks of whole rows, read by several threads.
//!
//! A chunk ends where a row does. In a text without quotes every end of a line is one; where there are quotes, an end of a line may
//! be inside of them, so rows are walked through to find the end. Chunks are found one after the other, read at the same time, and what was read of them is
//! merged in their order: the result, and which error is reported, do not depend on how many threads there are.
//!
//! With `t` threads `t` chunks are read at a time; the text is gone through once, and memory is bounded by what is made of `t` chunks.

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

impl Text {
    /// Reads all rows under the heading, chunk by chunk: calls `work` for every chunk, several at a time, and `merge` with what it
    /// made, in order.
    pub(super) fn in_chunks<T: Send>(
        &self,
        heading: &Heading,
        chunks: Chunks,
        work: impl Fn(RowChunk) -> Result<T, DataError> + Sync,
        mut merge: impl FnMut(T) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let (mut at, mut number) = (self.body(heading)?, 0);
        while at < self.bytes().len() {
            let mut wave = Vec::with_capacity(chunks.threads);
            // A fault in a later chunk must not hide one in an earlier.
            let mut fault = None;
            while wave.len() < chunks.threads.max(1) && at < self.bytes().len() && fault.is_none() {
                match self.chunk_end(at, chunks.bytes) {
                    Ok(to) => {
                        wave.push(RowChunk { number, from: at, to });
                        (at, number) = (to, number + 1);
                    }
                    Err(error) => fault = Some(error),
                }
            }
            let work = &work;
            let made: Vec<_> = thread::scope(|scope| {
                let start = |chunk: &RowChunk| {
                    let chunk = *chunk;
                    thread::Builder::new()
                        .name("table".into())
                        .spawn_scoped(scope, move || work(chunk))
                        .map_err(|_| chunk)
                };
                let (first, others) =
                    wave.split_first().map_or((None, &[][..]), |(first, rest)| (Some(*first), rest));
                let started: Vec<_> = others.iter().map(start).collect();
                let first = first.map(work);
                let others = started.into_iter().map(|thread| match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                    // The system has no thread to give.
                    Err(chunk) => work(chunk),
                });
                first.into_iter().chain(others.collect::<Vec<_>>()).collect()
            });
            for made in made {
                // Checked first: the content of a file that was cut may be wrong in any way, or in none.
                self.bytes().intact()?;
                merge(made?)?;
            }
            if let Some(fault) = fault {
                self.bytes().intact()?;
                return Err(fault);
            }
        }
        self.bytes().intact()
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
