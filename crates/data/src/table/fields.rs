//! The fields of a row, and how a row of a CSV is cut into them.
//!
//! A row ends at the end of a line, a field at a delimiter. A field that begins with a quote goes on to the quote that closes it,
//! whatever is between; two quotes in a row are one of the text. Blanks around a field do not count, and lines without any text
//! are no rows. A field is where it lies in the text, unless quotes had to be taken out of it.
//!
//! Rows can be read from any place where one starts, so a text can be cut into chunks and read by several threads, and a row be
//! read again where it lies. Ends of fields are not searched byte by byte: bits that say where they may be are made for some
//! bytes of the text at a time.

use polyreme_kernels::{Isa, marks};

/// Bits are made for so many bytes at a time: a row that is read alone should not pay for many others.
const WINDOW: usize = 4096;

/// How a text is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// The byte between fields.
    pub(super) delimiter: u8,
    /// The instructions that may be used.
    pub(super) isa: Isa,
}

/// Where in a window of the text are delimiters, ends of lines and quotes.
#[derive(Default, Debug)]
struct Ends {
    from: usize,
    to: usize,
    words: Vec<u64>,
}

/// The fields of one row; used again for the next.
#[derive(Default, Debug)]
pub(crate) struct Fields {
    /// Where the row starts: a byte of the text, or in a file that has no text the number of the row.
    pub(super) start: usize,
    spans: Vec<FieldSpan>,
    /// Fields that are not in the text as they are.
    own: Vec<u8>,
    ends: Ends,
}

#[derive(Clone, Copy, Debug)]
struct FieldSpan {
    from: usize,
    to: usize,
    own: bool,
}

/// A quote that is not where it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum QuoteFault {
    /// It opens at this byte, and none closes it.
    Open(usize),
    /// It opens at the first byte and closes at the second, and the field goes on.
    GoesOn(usize, usize),
}

impl Fields {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    /// A field of a row of `text`.
    pub(super) fn get<'a>(&'a self, text: &'a [u8], field: usize) -> &'a [u8] {
        let FieldSpan { from, to, own } = self.spans[field];
        if own { &self.own[from..to] } else { &text[from..to] }
    }

    /// All fields.
    pub(super) fn iter<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        (0..self.len()).map(move |field| self.get(text, field))
    }

    /// Begins another text than the one that rows were read of before.
    pub(super) fn begin_text(&mut self) {
        self.ends.to = self.ends.from;
    }

    /// Begins a row.
    pub(super) fn begin(&mut self, start: usize) {
        self.start = start;
        self.spans.clear();
        self.own.clear();
    }

    /// Adds a field that is not in the text.
    pub(super) fn push(&mut self, field: &[u8]) {
        let from = self.own.len();
        self.own.extend_from_slice(field);
        self.spans.push(FieldSpan { from, to: self.own.len(), own: true });
    }

    /// Writes a field that is not in the text, and adds it.
    pub(super) fn push_written(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let from = self.own.len();
        write(&mut self.own);
        self.spans.push(FieldSpan { from, to: self.own.len(), own: true });
    }

    /// Adds a field of the text, without the blanks around it.
    fn push_trimmed(&mut self, text: &[u8], mut from: usize, mut to: usize) {
        while from < to && text[from].is_ascii_whitespace() {
            from += 1;
        }
        while from < to && text[to - 1].is_ascii_whitespace() {
            to -= 1;
        }
        self.spans.push(FieldSpan { from, to, own: false });
    }

    /// Reads the row that starts at byte `at` of `text`, after empty lines. Gives where to go on; `None` at the end of the text.
    pub(super) fn read_csv(
        &mut self,
        text: &[u8],
        mut at: usize,
        cut: Cut,
    ) -> Result<Option<usize>, QuoteFault> {
        while matches!(text.get(at), Some(b'\r' | b'\n')) {
            at += 1;
        }
        self.begin(at);
        if at >= text.len() {
            return Ok(None);
        }
        loop {
            let end = match text.get(at) {
                Some(b'"') => self.read_quoted(text, at, cut)?,
                _ => {
                    let end = self.ends.unquoted(text, at, cut);
                    self.push_trimmed(text, at, end);
                    end
                }
            };
            match text.get(end) {
                Some(byte) if *byte == cut.delimiter => at = end + 1,
                // The other half of an end of two bytes is an empty line.
                Some(_) => return Ok(Some(end + 1)),
                None => return Ok(Some(end)),
            }
        }
    }

    /// Reads the field whose quote opens at `open`; gives where it ends.
    fn read_quoted(&mut self, text: &[u8], open: usize, cut: Cut) -> Result<usize, QuoteFault> {
        let close = self.ends.closing_quote(text, open, cut).ok_or(QuoteFault::Open(open))?;
        let end = self.ends.unquoted(text, close + 1, cut);
        if !text[close + 1..end].iter().all(u8::is_ascii_whitespace) {
            return Err(QuoteFault::GoesOn(open, close));
        }
        let inside = &text[open + 1..close];
        if !inside.contains(&b'"') {
            self.push_trimmed(text, open + 1, close);
            return Ok(end);
        }
        self.push_written(|own| {
            let mut skip = false;
            for &byte in inside.trim_ascii() {
                skip = byte == b'"' && !skip;
                if !skip {
                    own.push(byte);
                }
            }
        });
        Ok(end)
    }
}

impl Ends {
    /// The next byte from `at` on that is a delimiter, the end of a line or a quote, or the end of the text.
    fn next(&mut self, text: &[u8], mut at: usize, cut: Cut) -> usize {
        loop {
            if at >= text.len() {
                return text.len();
            }
            if !(self.from..self.to).contains(&at) {
                self.look(text, at, cut);
            }
            let bit = at - self.from;
            let word = self.words[bit / marks::BYTES] >> (bit % marks::BYTES);
            if word != 0 {
                return at + word.trailing_zeros() as usize;
            }
            at = self.from + (bit / marks::BYTES + 1) * marks::BYTES;
        }
    }

    /// Makes the bits of the window that begins at `from`.
    fn look(&mut self, text: &[u8], from: usize, cut: Cut) {
        (self.from, self.to) = (from, text.len().min(from + WINDOW));
        let window = &text[from..self.to];
        self.words.resize(window.len().div_ceil(marks::BYTES), 0);
        marks::find(cut.isa, window, [cut.delimiter, b'\n', b'\r', b'"'], &mut self.words);
    }

    /// What [`unquoted_end`] finds.
    fn unquoted(&mut self, text: &[u8], mut at: usize, cut: Cut) -> usize {
        loop {
            let end = self.next(text, at, cut);
            // Inside a field a quote is a letter like any other.
            if text.get(end) != Some(&b'"') {
                return end;
            }
            at = end + 1;
        }
    }

    /// What [`closing_quote`] finds.
    fn closing_quote(&mut self, text: &[u8], open: usize, cut: Cut) -> Option<usize> {
        let mut at = open + 1;
        loop {
            let found = self.next(text, at, cut);
            match (text.get(found)?, text.get(found + 1)) {
                (b'"', Some(b'"')) => at = found + 2,
                (b'"', _) => return Some(found),
                _ => at = found + 1,
            }
        }
    }
}

/// The quote that closes the one at `open`; two in a row are one of the text. The slow twin of what rows are cut by, for places of errors.
pub(super) fn closing_quote(text: &[u8], open: usize) -> Option<usize> {
    let mut at = open + 1;
    loop {
        at += text.get(at..)?.iter().position(|&b| b == b'"')?;
        if text.get(at + 1) != Some(&b'"') {
            return Some(at);
        }
        at += 2;
    }
}

/// The next delimiter or end of a line from `at` on, or the end of the text; a slow twin, too.
pub(super) fn unquoted_end(text: &[u8], at: usize, delimiter: u8) -> usize {
    let ends = |b: &u8| *b == delimiter || matches!(b, b'\r' | b'\n');
    at + text[at..].iter().position(ends).unwrap_or(text.len() - at)
}

#[cfg(test)]
mod tests {
    use csv::{ByteRecord, ReaderBuilder, Trim};
    use proptest::prelude::*;

    use super::*;

    /// Where a row starts, and its fields.
    type CutRow = (usize, Vec<Vec<u8>>);

    fn rows(text: &[u8], delimiter: u8) -> Result<Vec<CutRow>, QuoteFault> {
        let cut = Cut { delimiter, isa: Isa::detect() };
        let (mut fields, mut rows, mut at) = (Fields::default(), Vec::new(), 0);
        while let Some(next) = fields.read_csv(text, at, cut)? {
            rows.push((fields.start, fields.iter(text).map(<[u8]>::to_vec).collect()));
            at = next;
        }
        Ok(rows)
    }

    /// The same rows as the `csv` crate finds, unless quotes are wrong; and the same again from each row on.
    fn check(text: &[u8], delimiter: u8) {
        let Ok(found) = rows(text, delimiter) else { return };
        let mut builder = ReaderBuilder::new();
        builder.has_headers(false).flexible(true).trim(Trim::All).delimiter(delimiter);
        let (mut reader, mut record) = (builder.from_reader(text), ByteRecord::new());
        let mut slow = Vec::new();
        while reader.read_byte_record(&mut record).unwrap() {
            slow.push(record.iter().map(<[u8]>::to_vec).collect::<Vec<_>>());
        }
        let fast: Vec<_> = found.iter().map(|(_, row)| row.clone()).collect();
        assert_eq!(fast, slow, "{:?}", String::from_utf8_lossy(text));
        if let Some((start, _)) = found.get(found.len() / 2) {
            let again: Vec<_> = rows(&text[*start..], delimiter).unwrap().into_iter().map(|r| r.1).collect();
            assert_eq!(again, slow[found.len() / 2..], "{:?}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn rows_are_those_of_the_csv_crate() {
        for text in [
            "",
            "\n\n",
            "a",
            "a,b\n1,2\n",
            "a,b\r\n1,2\r\n",
            "a\rb\rc",
            "1,2,",
            ",\n,",
            " a , b \n\t1\t,2",
            "  \n1",
            "\"a\",\"b\nc\"\r\n1,2",
            "\"a \"\"b\"\", c\" ,d\n2,e",
            "5\" nail,x\n",
            "\"\"\n\"\",\"\"\"\"",
            "\" a \" ,1",
        ] {
            check(text.as_bytes(), b',');
        }
        assert_eq!(rows(b"a\n1,\"b\n", b','), Err(QuoteFault::Open(4)));
        assert_eq!(rows(b"a\n1,\"b\"c\n", b','), Err(QuoteFault::GoesOn(4, 6)));
    }

    /// Fields that are longer than a window, and ends of fields on both sides of its end.
    #[test]
    fn rows_of_long_fields_are_those_of_the_csv_crate() {
        for long in [WINDOW - 3, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW] {
            let (plain, quoted) = ("x".repeat(long), "\"\",\n".repeat(long / 4));
            check(format!("{plain},b\n1,{plain}\n{plain}").as_bytes(), b',');
            check(format!("a,\"{quoted}\"\n\"{quoted}{plain}\",2\n").as_bytes(), b',');
            check(format!("a,{plain}\"{plain},\r\n1,2,\"{plain}\"").as_bytes(), b',');
        }
        assert_eq!(rows(format!("a\n\"{}", "x\n".repeat(WINDOW)).as_bytes(), b','), Err(QuoteFault::Open(2)));
    }

    /// The twins find the same from any place on.
    #[track_caller]
    fn check_ends(text: &[u8], delimiter: u8) {
        for isa in Isa::available() {
            let (cut, mut ends) = (Cut { delimiter, isa }, Ends::default());
            for at in (0..=text.len()).chain((0..=text.len()).rev()) {
                assert_eq!(ends.unquoted(text, at, cut), unquoted_end(text, at, delimiter), "{at}");
                assert_eq!(ends.closing_quote(text, at, cut), closing_quote(text, at), "{at}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_ends_are_those_of_the_slow_twins(text in "[ab1\", \t;\r\n]{0,200}", delimiter in prop::sample::select(b",;\t".to_vec())) {
            check_ends(text.as_bytes(), delimiter);
        }

        #[test]
        fn any_rows_are_those_of_the_csv_crate(text in "[ab1\", \t;\r\n]{0,60}", delimiter in prop::sample::select(b",;\t".to_vec())) {
            check(text.as_bytes(), delimiter);
        }
    }
}
