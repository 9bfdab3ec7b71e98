//! Parquet: a file of columns with types. Its rows become records of fields, as those of a CSV are, so that everything after is the
//! same: what a column is, what is blank, which categories there are.
//!
//! | in the file | field |
//! |---|---|
//! | null | blank |
//! | boolean | `true` or `false` |
//! | integers, floats, decimals | the number; NaN is a blank, as it is in a CSV |
//! | date, timestamp | `2024-03-31`, `2024-03-31T09:30:15`; the clock is UTC where the file says so |
//! | string, enum, JSON, and dictionaries of them | the text |
//! | list or map | `[list]`, the same everywhere, so that the column is left out, and that is said |
//!
//! Columns of a struct are called `struct.field`. Files are read a batch of rows at a time, every column in its own pages; pages that are
//! plain, or packed by snappy, gzip or zstd, can be read.
//!
//! The crate that decodes pages may panic on damaged ones; that becomes an error too. A page is unpacked whole, and its size is
//! what its header says: up to 2 GiB.

use std::fs::File;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::basic::{ConvertedType, LogicalType, TimeUnit};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArray, FixedLenByteArrayType,
    FloatType, Int32Type, Int64Type, Int96, Int96Type,
};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;

use super::date::Moment;
use super::fields::Fields;
use super::text::{Heading, Row, Text};
use crate::error::DataError;

/// Rows that are decoded at a time.
const BATCH: usize = 1024;
/// What stands for a value that is no field.
const LIST: &[u8] = b"[list]";

impl Text {
    /// The columns of a Parquet file.
    pub(super) fn parquet_columns(&self) -> Result<Heading, DataError> {
        let reader = open(self.path())?;
        let columns = reader.metadata().file_metadata().schema_descr().columns();
        match columns.is_empty() {
            true => Err(damaged(self.path(), "it has no columns")),
            false => Ok(Heading::named(columns.iter().map(|c| c.path().string()).collect())),
        }
    }

    /// Calls `each` with every row of a Parquet file.
    pub(super) fn parquet_rows(
        &self,
        heading: &Heading,
        mut each: impl FnMut(&Row) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let reader = open(self.path())?;
        let (mut fields, mut n) = (Fields::default(), 0usize);
        for group in 0..reader.metadata().num_row_groups() {
            let mut columns = guarded(self.path(), || columns_of(&reader, group))?;
            if columns.len() != heading.width {
                return Err(damaged(self.path(), "a group of rows has other columns than the file"));
            }
            loop {
                let counts = guarded(self.path(), || {
                    columns.iter_mut().map(|c| c.fill()).collect::<Result<Vec<_>, _>>()
                })?;
                let rows = counts.iter().flatten().copied().next().unwrap_or(0);
                if counts.iter().flatten().any(|count| *count != rows) {
                    return Err(damaged(self.path(), "its columns have different numbers of rows"));
                }
                for _ in 0..rows {
                    n += 1;
                    fields.begin(n);
                    for column in &mut columns {
                        fields.push_written(|to| column.write(to));
                    }
                    each(&Row::new(self, heading, &fields))?;
                }
                if rows == 0 {
                    break;
                }
            }
        }
        match n {
            0 => Err(self.error(0, 0, "the file has no rows")),
            _ => Ok(()),
        }
    }
}

/// Opens a file and reads what it says about itself.
fn open(path: &Path) -> Result<SerializedFileReader<File>, DataError> {
    let file = File::open(path).map_err(|e| DataError::io(path, e))?;
    guarded(path, || SerializedFileReader::new(file))
}

/// The result of decoding something; a panic is an error too.
fn guarded<T>(path: &Path, decode: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, DataError> {
    match catch_unwind(AssertUnwindSafe(decode)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(ParquetError::NYI(what))) => {
            let why = format!("{what}; write the file with snappy, gzip or zstd, or without compression");
            Err(DataError::Io { path: path.into(), source: io::Error::other(why) })
        }
        Ok(Err(error)) => Err(damaged(path, &error.to_string())),
        Err(_) => Err(damaged(path, "its pages are not what they say they are")),
    }
}

fn damaged(path: &Path, why: &str) -> DataError {
    let why = format!("not a Parquet file, or a damaged one: {why}");
    DataError::Io { path: path.into(), source: io::Error::other(why) }
}

/// A column of a group of rows, from which fields are written one after the other.
trait FieldSource {
    /// Decodes some rows; gives how many, 0 at the end; `None`: as many as the others have.
    fn fill(&mut self) -> Result<Option<usize>, ParquetError>;

    /// Writes the field of the next row; nothing if it is null.
    fn write(&mut self, to: &mut Vec<u8>);
}

/// Writes a value as a field.
type WriteField<V> = Box<dyn Fn(&V, &mut Vec<u8>)>;

/// A column of one type.
struct TypedColumn<T: DataType> {
    reader: ColumnReaderImpl<T>,
    values: Vec<T::T>,
    /// For each row whether there is a value: then it is `present`.
    levels: Vec<i16>,
    present: i16,
    next_value: usize,
    next_row: usize,
    write: WriteField<T::T>,
}

impl<T: DataType> FieldSource for TypedColumn<T> {
    fn fill(&mut self) -> Result<Option<usize>, ParquetError> {
        self.values.clear();
        self.levels.clear();
        (self.next_value, self.next_row) = (0, 0);
        let mut rows = 0;
        // A page may end before the batch does.
        while rows < BATCH {
            let levels = (self.present > 0).then_some(&mut self.levels);
            let (more, _, _) = self.reader.read_records(BATCH - rows, levels, None, &mut self.values)?;
            if more == 0 {
                break;
            }
            rows += more;
        }
        let there = match self.present {
            0 => rows,
            present => self.levels.iter().filter(|level| **level == present).count(),
        };
        if there != self.values.len() || (self.present > 0 && self.levels.len() != rows) {
            return Err(ParquetError::General("a column has more or fewer values than it says".into()));
        }
        Ok(Some(rows))
    }

    fn write(&mut self, to: &mut Vec<u8>) {
        let null = self.present > 0 && self.levels[self.next_row] != self.present;
        self.next_row += 1;
        if !null {
            (self.write)(&self.values[self.next_value], to);
            self.next_value += 1;
        }
    }
}

/// A column of values that are no fields.
struct ListColumn;

impl FieldSource for ListColumn {
    fn fill(&mut self) -> Result<Option<usize>, ParquetError> {
        Ok(None)
    }

    fn write(&mut self, to: &mut Vec<u8>) {
        to.extend_from_slice(LIST);
    }
}

/// All columns of a group of rows.
fn columns_of(
    reader: &SerializedFileReader<File>,
    group: usize,
) -> Result<Vec<Box<dyn FieldSource>>, ParquetError> {
    let group = reader.get_row_group(group)?;
    let described = reader.metadata().file_metadata().schema_descr();
    let column = |(i, about): (usize, &std::sync::Arc<ColumnDescriptor>)| {
        if about.max_rep_level() > 0 {
            return Ok(Box::new(ListColumn) as Box<dyn FieldSource>);
        }
        let meaning = Meaning::of(about);
        Ok(match group.get_column_reader(i)? {
            ColumnReader::BoolColumnReader(reader) => typed::<BoolType>(reader, about, |is, to| {
                to.extend_from_slice(if *is { b"true" } else { b"false" });
            }),
            ColumnReader::Int32ColumnReader(reader) => typed::<Int32Type>(reader, about, move |n, to| {
                let n = if meaning == Meaning::Unsigned { i128::from(*n as u32) } else { i128::from(*n) };
                meaning.write(n, to);
            }),
            ColumnReader::Int64ColumnReader(reader) => typed::<Int64Type>(reader, about, move |n, to| {
                let n = if meaning == Meaning::Unsigned { i128::from(*n as u64) } else { i128::from(*n) };
                meaning.write(n, to);
            }),
            ColumnReader::Int96ColumnReader(reader) => typed::<Int96Type>(reader, about, |at, to| {
                let seconds = seconds_of(at);
                Meaning::Time { per_second: 1 }.write(seconds.into(), to);
            }),
            ColumnReader::FloatColumnReader(reader) => typed::<FloatType>(reader, about, |x, to| {
                write_float(f64::from(*x), *x, to);
            }),
            ColumnReader::DoubleColumnReader(reader) => typed::<DoubleType>(reader, about, |x, to| {
                write_float(*x, *x, to);
            }),
            ColumnReader::ByteArrayColumnReader(reader) => {
                typed::<ByteArrayType>(reader, about, move |bytes: &ByteArray, to| {
                    meaning.write_bytes(content(bytes), to);
                })
            }
            ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                typed::<FixedLenByteArrayType>(reader, about, move |bytes: &FixedLenByteArray, to| {
                    meaning.write_bytes(content(bytes), to);
                })
            }
        })
    };
    described.columns().iter().enumerate().map(column).collect()
}

fn typed<T: DataType>(
    reader: ColumnReaderImpl<T>,
    about: &ColumnDescriptor,
    write: impl Fn(&T::T, &mut Vec<u8>) + 'static,
) -> Box<dyn FieldSource> {
    let (values, levels, present) = (Vec::new(), Vec::new(), about.max_def_level());
    Box::new(TypedColumn {
        reader,
        values,
        levels,
        present,
        next_value: 0,
        next_row: 0,
        write: Box::new(write),
    })
}

/// The bytes of a value.
fn content(bytes: &ByteArray) -> &[u8] {
    bytes.data()
}

/// What the integers or bytes of a column stand for.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Meaning {
    /// Themselves.
    Plain,
    /// Integers without a sign.
    Unsigned,
    /// Numbers with this many decimals.
    Decimal(u32),
    /// Days since 1970.
    Day,
    /// Ticks since 1970, this many a second.
    Time { per_second: i64 },
    /// A float of two bytes.
    Half,
    /// An identifier of 16 bytes.
    Uuid,
}

impl Meaning {
    fn of(about: &ColumnDescriptor) -> Meaning {
        // More decimals than that an i128 has no digits for.
        let decimal = |scale: i32| Meaning::Decimal(u32::try_from(scale).unwrap_or(0).min(38));
        match about.logical_type_ref() {
            Some(LogicalType::Integer(integer)) if !integer.is_signed => return Meaning::Unsigned,
            Some(LogicalType::Decimal(said)) => return decimal(said.scale),
            Some(LogicalType::Date) => return Meaning::Day,
            Some(LogicalType::Timestamp(said)) => {
                let per_second = match said.unit {
                    TimeUnit::MILLIS => 1_000,
                    TimeUnit::MICROS => 1_000_000,
                    TimeUnit::NANOS => 1_000_000_000,
                };
                return Meaning::Time { per_second };
            }
            Some(LogicalType::Float16) => return Meaning::Half,
            Some(LogicalType::Uuid) => return Meaning::Uuid,
            // All others are what their bytes or integers are; files of older programs have the converted type alone.
            _ => {}
        }
        match about.converted_type() {
            ConvertedType::UINT_8
            | ConvertedType::UINT_16
            | ConvertedType::UINT_32
            | ConvertedType::UINT_64 => Meaning::Unsigned,
            ConvertedType::DECIMAL => decimal(about.type_scale()),
            ConvertedType::DATE => Meaning::Day,
            ConvertedType::TIMESTAMP_MILLIS => Meaning::Time { per_second: 1_000 },
            ConvertedType::TIMESTAMP_MICROS => Meaning::Time { per_second: 1_000_000 },
            _ => Meaning::Plain,
        }
    }

    /// Writes an integer.
    fn write(self, n: i128, to: &mut Vec<u8>) {
        // Writing to a vector cannot fail.
        let _ = match self {
            Meaning::Plain | Meaning::Unsigned | Meaning::Half | Meaning::Uuid => write!(to, "{n}"),
            Meaning::Decimal(0) => write!(to, "{n}"),
            Meaning::Decimal(scale) => {
                let one = 10u128.pow(scale);
                let (sign, size) = (if n < 0 { "-" } else { "" }, n.unsigned_abs());
                write!(to, "{sign}{}.{:0width$}", size / one, size % one, width = scale as usize)
            }
            Meaning::Day => write!(to, "{}", Moment::at((n as i64).saturating_mul(86_400)).written()),
            Meaning::Time { per_second } => {
                let seconds = (n as i64).div_euclid(per_second);
                let clock = seconds.rem_euclid(86_400);
                let (hour, minute, second) = (clock / 3600, clock / 60 % 60, clock % 60);
                write!(to, "{}T{hour:02}:{minute:02}:{second:02}", Moment::at(seconds).written())
            }
        };
    }

    /// Writes a value of bytes.
    fn write_bytes(self, bytes: &[u8], to: &mut Vec<u8>) {
        match self {
            Meaning::Decimal(_) if (1..=16).contains(&bytes.len()) => {
                // Big-endian, with the sign in the first bit.
                let sign = if bytes[0] >= 0x80 { -1i128 } else { 0 };
                self.write(bytes.iter().fold(sign, |n, byte| n << 8 | i128::from(*byte)), to);
            }
            Meaning::Half if bytes.len() == 2 => {
                let x = f16(u16::from_le_bytes([bytes[0], bytes[1]]));
                write_float(f64::from(x), x, to);
            }
            Meaning::Uuid => bytes.iter().for_each(|byte| {
                let _ = write!(to, "{byte:02x}");
            }),
            _ => to.extend_from_slice(bytes.trim_ascii()),
        }
    }
}

/// A float as the shortest text that is read back as the same one.
fn write_float(size: f64, shown: impl std::fmt::Display + std::fmt::LowerExp, to: &mut Vec<u8>) {
    let plain = size == 0.0 || !size.is_finite() || (1e-5..1e16).contains(&size.abs());
    // Writing to a vector cannot fail.
    let _ = if plain { write!(to, "{shown}") } else { write!(to, "{shown:e}") };
}

/// The float of these bits.
fn f16(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if sign == 1 { -size } else { size }
}

/// Seconds since 1970 of the timestamps that old programs write: nanoseconds of a day, and the day.
fn seconds_of(at: &Int96) -> i64 {
    let parts = at.data();
    let nanos = u64::from(parts[1]) << 32 | u64::from(parts[0]);
    // Days are counted from noon of a day in 4714 BC.
    (i64::from(parts[2]) - 2_440_588) * 86_400 + (nanos / 1_000_000_000) as i64
}

#[cfg(test)]
mod tests;
