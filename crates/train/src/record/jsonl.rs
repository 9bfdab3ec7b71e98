//! `metrics.jsonl`: a JSON object a line, such as
//!
//! ```text
//! {"step":100,"epoch":1,"seconds":3.204,"train_loss":0.4123,"lr":0.0003,"samples_per_s":12345.6}
//! {"step":469,"epoch":1,"seconds":14.881,"val_loss":0.3101,"val_accuracy":0.9012}
//! ```
//!
//! Always valid JSON: numbers that are not finite are the strings `"NaN"`, `"inf"` and `"-inf"`, which Python's `float`
//! and Rust's `parse` read. Each line is handed to the system as soon as it is made.

use std::path::Path;

use super::append::{Appender, write_whole};
use super::error::RecordError;
use super::history::{Line, each_line};

/// Keys that every line has; metrics cannot take their names.
pub(super) const RESERVED: [&str; 3] = ["step", "epoch", "seconds"];

/// The metrics of a run, a line at a time.
#[derive(Debug)]
pub struct MetricsFile {
    file: Appender,
}

impl MetricsFile {
    /// A new file; an error if there is one already.
    pub fn create(path: &Path) -> Result<MetricsFile, RecordError> {
        let file = Appender::create(path).map_err(|source| RecordError::write(path, source))?;
        Ok(MetricsFile { file })
    }

    /// The file of a run that goes on after `step`: lines of later steps are cut off, and so is a line that was only
    /// half written. What is left is what the run had written when it was at that step. The cut file is written beside
    /// the old one and then takes its place.
    pub fn resume_at(path: &Path, step: u64) -> Result<MetricsFile, RecordError> {
        let (mut kept, mut whole) = (Vec::new(), true);
        let read = each_line(path, |bytes, ended| {
            if Line::parse(bytes).is_some_and(|line| line.step <= step) {
                kept.extend_from_slice(bytes);
                kept.push(b'\n');
                whole &= ended;
            } else {
                whole = false;
            }
        });
        match read {
            Ok(()) if whole => {}
            Ok(()) => write_whole(path, &kept).map_err(|source| RecordError::write(path, source))?,
            // A run that had not logged anything yet.
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(RecordError::read(path, source)),
        }
        let file = Appender::open(path).map_err(|source| RecordError::write(path, source))?;
        Ok(MetricsFile { file })
    }

    /// The end of a file, whatever it is.
    #[cfg(all(test, target_os = "linux"))]
    pub(super) fn open_as_is(path: &Path) -> std::io::Result<MetricsFile> {
        Ok(MetricsFile { file: Appender::open(path)? })
    }

    /// Appends a line. After an error the line waits in memory, and goes out with the next that can be written.
    pub fn append(
        &mut self,
        step: u64,
        epoch: u64,
        seconds: f64,
        values: &[(&str, f64)],
    ) -> Result<(), RecordError> {
        let line = line(step, epoch, seconds, values);
        self.file.append(line.as_bytes()).map_err(|source| RecordError::write(self.file.path(), source))
    }

    /// Waits until the disk has every line.
    pub fn sync(&mut self) -> Result<(), RecordError> {
        self.file.sync().map_err(|source| RecordError::write(self.file.path(), source))
    }
}

/// A line with its end. Seconds are rounded to milliseconds; metrics keep every digit.
fn line(step: u64, epoch: u64, seconds: f64, values: &[(&str, f64)]) -> String {
    let seconds = number((seconds * 1000.0).round() / 1000.0);
    let mut line = format!("{{\"step\":{step},\"epoch\":{epoch},\"seconds\":{seconds}");
    for (name, value) in values {
        if !RESERVED.contains(name) {
            // A JSON string of a name is its own escaping.
            line += &format!(",{}:{}", serde_json::Value::from(*name), number(*value));
        }
    }
    line + "}\n"
}

fn number(x: f64) -> String {
    match serde_json::Number::from_f64(x) {
        Some(number) => number.to_string(),
        None => format!("\"{x}\""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn lines_are_json_whatever_the_numbers_are() {
        for (values, want) in [
            (vec![], r#"{"step":7,"epoch":2,"seconds":1.235}"#),
            (vec![("lr", 3e-4), ("n", 2.0)], r#"{"step":7,"epoch":2,"seconds":1.235,"lr":0.0003,"n":2.0}"#),
            (vec![("a", f64::NAN)], r#"{"step":7,"epoch":2,"seconds":1.235,"a":"NaN"}"#),
            (
                vec![("a", f64::INFINITY), ("b", f64::NEG_INFINITY)],
                r#"{"step":7,"epoch":2,"seconds":1.235,"a":"inf","b":"-inf"}"#,
            ),
            (vec![("a\"\n", 1.0), ("step", 9.0)], r#"{"step":7,"epoch":2,"seconds":1.235,"a\"\n":1.0}"#),
        ] {
            let got = line(7, 2, 1.23456, &values);
            assert_eq!(got, format!("{want}\n"));
            serde_json::from_str::<serde_json::Value>(&got).unwrap();
        }
    }

    const THREE: &str = "{\"step\":1,\"a\":1.5}\n{\"step\":2,\"a\":\"NaN\"}\n{\"step\":2,\"val\":1}\n";

    /// What is left of a file after it was taken up at a step.
    fn check(before: &str, step: u64, after: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, before).unwrap();
        let mut file = MetricsFile::resume_at(&path, step).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), after, "{before:?} at {step}");
        file.append(9, 0, 1.0, &[]).unwrap();
        let want = format!("{after}{}", line(9, 0, 1.0, &[]));
        assert_eq!(fs::read_to_string(&path).unwrap(), want);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn resuming_cuts_what_came_after() {
        check("", 5, "");
        check(THREE, 2, THREE);
        check(THREE, 9, THREE);
        check(THREE, 1, "{\"step\":1,\"a\":1.5}\n");
        check(THREE, 0, "");
        // Half lines, at every byte; a line that lacks only its end is whole.
        let last = THREE.rfind("{").unwrap();
        for cut in last..THREE.len() - 2 {
            check(&THREE[..cut], 9, &THREE[..last]);
        }
        check(&THREE[..THREE.len() - 1], 9, THREE);
        // What a crashed disk leaves: zeros, rubbish, no step.
        check("\0\0\0\n{\"step\":1}\n[1]\n{\"a\":1}\n{\"step\":-1}\n{\"step\":1.5}\n", 9, "{\"step\":1}\n");
        check("{\"step\":1}\n\u{fffd}\u{fffd}", 9, "{\"step\":1}\n");
    }

    #[test]
    fn a_run_cut_anywhere_has_the_history_of_one_that_was_not() {
        let folder = tempfile::tempdir().unwrap();
        let log = |file: &mut MetricsFile, steps: std::ops::RangeInclusive<u64>| {
            for step in steps {
                file.append(step, step / 4, step as f64, &[("train_loss", 1.0 / step as f64)]).unwrap();
            }
        };
        let whole = folder.path().join("whole.jsonl");
        log(&mut MetricsFile::create(&whole).unwrap(), 1..=12);
        let want = fs::read(&whole).unwrap();
        for crash in [0, 1, 57, 120, 300, want.len()] {
            let path = folder.path().join(format!("{crash}.jsonl"));
            fs::write(&path, &want[..crash]).unwrap();
            let whole_lines = want[..crash].iter().filter(|&&byte| byte == b'\n').count() as u64;
            for checkpoint in [0, whole_lines / 2, whole_lines] {
                let mut file = MetricsFile::resume_at(&path, checkpoint).unwrap();
                log(&mut file, checkpoint + 1..=12);
                assert_eq!(fs::read(&path).unwrap(), want, "crash at {crash}, checkpoint of {checkpoint}");
            }
        }
        assert!(matches!(MetricsFile::create(&whole), Err(RecordError::Taken { .. })));
    }
}
