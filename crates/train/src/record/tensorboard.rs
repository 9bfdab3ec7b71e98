//! Event files that TensorBoard reads: `events.out.tfevents.TIME.HOST.PID.polyreme`.
//!
//! A file is a list of TFRecords, and a record is framed like this, in little endian:
//!
//! ```text
//! u64 length | u32 masked crc32c of the length | bytes | u32 masked crc32c of the bytes
//! ```
//!
//! The bytes are protobuf messages of the type `Event`. Five of its fields are needed, so they are encoded here by
//! hand: a field is a varint `number << 3 | wire type` and its value. The first event says the version of the format.
//! A resumed run has a file of its own; it starts with a `SessionLog` at the first step to come, which makes TensorBoard
//! drop what earlier files have from that step on.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::append::Appender;
use super::error::RecordError;

const PREFIX: &str = "events.out.tfevents.";

/// A file of events that grows.
#[derive(Debug)]
pub struct EventFile {
    file: Appender,
}

/// Who writes an event file: parts of its name, and the time of its first event.
#[derive(Clone, PartialEq, Debug)]
pub struct Writer {
    /// The name of this machine.
    pub host: String,
    /// The number of this process.
    pub pid: u32,
    /// Seconds since 1970.
    pub now: f64,
}

impl EventFile {
    /// A new file in `folder`. With `resumed_at`, for a run that goes on after that step.
    pub fn create(folder: &Path, writer: &Writer, resumed_at: Option<u64>) -> Result<EventFile, RecordError> {
        // TensorBoard reads files in the order of their names, so a later one needs a later time.
        let time = latest(folder).map_or(0, |latest| latest.saturating_add(1)).max(writer.now as u64);
        let host: String = writer
            .host
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
            .collect();
        let path = folder.join(format!("{PREFIX}{time:010}.{host}.{}.polyreme", writer.pid));
        let failed = |source| RecordError::write(&path, source);
        let mut file = Appender::create(&path).map_err(failed)?;
        let mut head = record(&event(writer.now, 0, Body::Version));
        if let Some(step) = resumed_at {
            head.extend(record(&event(writer.now, step.saturating_add(1), Body::Start)));
        }
        file.append(&head).map_err(failed)?;
        Ok(EventFile { file })
    }

    /// Appends values of a step, all in one event. After an error they wait in memory, and go out with the next that
    /// can be written.
    pub fn append(&mut self, now: f64, step: u64, values: &[(&str, f64)]) -> Result<(), RecordError> {
        let bytes = record(&event(now, step, Body::Scalars(values)));
        self.file.append(&bytes).map_err(|source| RecordError::write(self.file.path(), source))
    }

    /// Waits until the disk has every event.
    pub fn sync(&mut self) -> Result<(), RecordError> {
        self.file.sync().map_err(|source| RecordError::write(self.file.path(), source))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

/// The tag of a metric: `val_loss` is `loss/val`, so that TensorBoard puts all losses in one section.
pub fn tag(name: &str) -> String {
    match name.split_once('_') {
        Some((part @ ("train" | "val" | "test"), metric)) => format!("{metric}/{part}"),
        _ => name.into(),
    }
}

/// Whether this is the name of an event file.
pub(crate) fn is_event_file(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The greatest time in the names of the folder's event files.
fn latest(folder: &Path) -> Option<u64> {
    let names = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()).max()
}

enum Body<'a> {
    Version,
    Start,
    Scalars(&'a [(&'a str, f64)]),
}

/// `Event { wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7 }`.
fn event(now: f64, step: u64, body: Body) -> Vec<u8> {
    let mut event = Vec::new();
    fixed64(&mut event, 1, now);
    varint_field(&mut event, 2, step.min(i64::MAX as u64));
    match body {
        Body::Version => bytes(&mut event, 3, b"brain.Event:2"),
        Body::Start => {
            // SessionLog { status = 1: START = 1 }.
            let mut log = Vec::new();
            varint_field(&mut log, 1, 1);
            bytes(&mut event, 7, &log);
        }
        Body::Scalars(values) => {
            // Summary { repeated value = 1 { tag = 1, simple_value = 2 } }.
            let mut summary = Vec::new();
            for (name, number) in values {
                let mut value = Vec::new();
                bytes(&mut value, 1, tag(name).as_bytes());
                fixed32(&mut value, 2, *number as f32);
                bytes(&mut summary, 1, &value);
            }
            bytes(&mut event, 5, &summary);
        }
    }
    event
}

/// Frames a record.
fn record(bytes: &[u8]) -> Vec<u8> {
    let len = (bytes.len() as u64).to_le_bytes();
    [&len[..], &masked(&len).to_le_bytes(), bytes, &masked(bytes).to_le_bytes()].concat()
}

/// The checksum of TFRecords: rotated and shifted, so that a checksum over data with checksums in it is a good one.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

fn varint_field(out: &mut Vec<u8>, field: u64, x: u64) {
    varint(out, field << 3);
    varint(out, x);
}

fn fixed64(out: &mut Vec<u8>, field: u64, x: f64) {
    varint(out, field << 3 | 1);
    out.extend_from_slice(&x.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn fixed32(out: &mut Vec<u8>, field: u64, x: f32) {
    varint(out, field << 3 | 5);
    out.extend_from_slice(&x.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The records of a file; every length and checksum holds.
    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !file.is_empty() {
            let (len, rest) = file.split_first_chunk::<8>().unwrap();
            let (crc, rest) = rest.split_first_chunk::<4>().unwrap();
            assert_eq!(u32::from_le_bytes(*crc), masked(len));
            let (bytes, rest) = rest.split_at(u64::from_le_bytes(*len) as usize);
            let (crc, rest) = rest.split_first_chunk::<4>().unwrap();
            assert_eq!(u32::from_le_bytes(*crc), masked(bytes));
            records.push(bytes.to_vec());
            file = rest;
        }
        records
    }

    fn writer() -> Writer {
        Writer { host: "a host.local".into(), pid: 42, now: 1_700_000_000.25 }
    }

    /// The bytes of `fixtures/events.hex`, which `fixtures/check_events.py` shows to the real TensorBoard.
    #[test]
    fn the_bytes_are_those_that_tensorboard_was_shown() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(folder.path(), &writer(), Some(299)).unwrap();
        events.append(1_700_000_001.5, 300, &[("train_loss", 0.25), ("lr", 3e-4)]).unwrap();
        events.append(1_700_000_002.0, 1 << 40, &[("val_loss", f64::NAN), ("samples_per_s", 1e9)]).unwrap();
        let name = events.path().file_name().unwrap().to_str().unwrap();
        assert_eq!(name, "events.out.tfevents.1700000000.a_host_local.42.polyreme");
        let file = fs::read(events.path()).unwrap();
        assert_eq!(records(&file).len(), 4);
        let hex: Vec<String> = records(&file)
            .iter()
            .map(|bytes| record(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
            .collect();
        let want: Vec<&str> = include_str!("../../fixtures/events.hex").lines().collect();
        assert_eq!(hex, want, "\n{}", hex.join("\n"));
    }

    #[test]
    fn the_checksum_is_that_of_tfrecords() {
        // crc32c("123456789") is 0xe3069283, by the standard; turned right by 15 bits, plus 0xa282ead8.
        assert_eq!(masked(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn a_resumed_run_has_a_later_file() {
        let folder = tempfile::tempdir().unwrap();
        let names: Vec<String> = [None, Some(10), Some(20)]
            .map(|step| {
                let events = EventFile::create(folder.path(), &writer(), step).unwrap();
                let n_records = records(&fs::read(events.path()).unwrap()).len();
                assert_eq!(n_records, 1 + usize::from(step.is_some()));
                events.path().file_name().unwrap().to_string_lossy().into_owned()
            })
            .to_vec();
        assert!(names.is_sorted() && names[1].contains("1700000001"), "{names:?}");
        for (step, want) in [(10, 11), (u64::MAX, i64::MAX as u64)] {
            let mut expected = Vec::new();
            varint_field(&mut expected, 2, want);
            let event = event(0.0, u64::saturating_add(step, 1), Body::Start);
            assert_eq!(event[9..9 + expected.len()], expected);
        }
    }

    #[test]
    fn tags_put_a_metric_in_one_section() {
        for (name, want) in [
            ("train_loss", "loss/train"),
            ("val_accuracy", "accuracy/val"),
            ("test_top5", "top5/test"),
            ("lr", "lr"),
            ("samples_per_s", "samples_per_s"),
            ("validity_x", "validity_x"),
        ] {
            assert_eq!(tag(name), want);
        }
    }
}
