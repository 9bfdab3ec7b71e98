//! The records of one run, tied together. A disk that is full or gone does not end a training: the first error is
//! handed to the caller to be told, and the run goes on.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::RecordError;
use super::history::History;
use super::jsonl::MetricsFile;
use super::report::{self, Summary};
use super::tensorboard::{self, EventFile, Writer};

/// The file of metrics in a run's folder.
pub const METRICS: &str = "metrics.jsonl";
/// The report in a run's folder.
pub const REPORT: &str = "report.html";

/// What to record, and for whom.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Whether event files for TensorBoard are written, in the run's folder itself: the folder above it is the one to
    /// show to TensorBoard.
    pub tensorboard: bool,
    /// The name of this machine, for the names of event files.
    pub host: String,
}

impl Default for Options {
    fn default() -> Options {
        Options { tensorboard: true, host: "localhost".into() }
    }
}

/// Records a run into its folder.
#[derive(Debug)]
pub struct Recorder {
    folder: PathBuf,
    metrics: MetricsFile,
    events: Option<EventFile>,
    failing: bool,
}

impl Recorder {
    /// The records of a new run. The folder is made if there is none; an error if it holds the metrics of another run.
    pub fn create(folder: &Path, options: &Options) -> Result<Recorder, RecordError> {
        make(folder)?;
        let metrics = MetricsFile::create(&folder.join(METRICS))?;
        Recorder::with(folder, metrics, options, None)
    }

    /// The records of a run that goes on after `step`: what was recorded of later steps is gone, from the metrics at
    /// once, and from TensorBoard when it reads the new event file.
    pub fn resume(folder: &Path, step: u64, options: &Options) -> Result<Recorder, RecordError> {
        make(folder)?;
        let metrics = MetricsFile::resume_at(&folder.join(METRICS), step)?;
        Recorder::with(folder, metrics, options, Some(step))
    }

    fn with(
        folder: &Path,
        metrics: MetricsFile,
        options: &Options,
        resumed_at: Option<u64>,
    ) -> Result<Recorder, RecordError> {
        let writer = Writer { host: options.host.clone(), pid: std::process::id(), now: tensorboard::now() };
        let events =
            if options.tensorboard { Some(EventFile::create(folder, &writer, resumed_at)?) } else { None };
        Ok(Recorder { folder: folder.into(), metrics, events, failing: false })
    }

    /// Records metrics after `step` steps, in the epoch `epoch`, `seconds` after the start. An error is returned the
    /// first time only, and again after it had gone away: it is a warning to print. What could not be written waits in
    /// memory, up to a megabyte a file, and is written as soon as that is possible.
    pub fn log(
        &mut self,
        step: u64,
        epoch: u64,
        seconds: f64,
        values: &[(&str, f64)],
    ) -> Option<RecordError> {
        let written = self.metrics.append(step, epoch, seconds, values);
        let sent = match &mut self.events {
            Some(events) => events.append(tensorboard::now(), step, values),
            None => Ok(()),
        };
        // Both lie on one disk: one warning is enough.
        let error = written.and(sent).err();
        let known = std::mem::replace(&mut self.failing, error.is_some());
        error.filter(|_| !known)
    }

    /// Waits until the disk has everything: before a checkpoint counts on it.
    pub fn sync(&mut self) -> Result<(), RecordError> {
        self.metrics.sync()?;
        self.events.as_mut().map_or(Ok(()), EventFile::sync)
    }

    /// Writes the report from the metrics of the whole run, and says where it is. The other files are whole by then,
    /// or the error says why not; the report is tried in any case.
    pub fn finish(mut self, summary: &Summary) -> Result<PathBuf, RecordError> {
        let synced = self.sync();
        let path = self.folder.join(REPORT);
        let history = History::read(&self.folder.join(METRICS))?;
        report::write(&path, &history, summary)?;
        synced.map(|()| path)
    }
}

fn make(folder: &Path) -> Result<(), RecordError> {
    fs::create_dir_all(folder).map_err(|source| RecordError::Write { path: folder.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn log(recorder: &mut Recorder, steps: std::ops::RangeInclusive<u64>) {
        for step in steps {
            assert!(recorder.log(step, 0, 1.0, &[("train_loss", 1.0), ("lr", 0.1)]).is_none());
        }
    }

    #[test]
    fn a_run_that_stops_and_goes_on_leaves_one_history() {
        let folder = tempfile::tempdir().unwrap();
        let (once, twice) = (folder.path().join("deep/once"), folder.path().join("twice"));
        let options = Options::default();
        let mut recorder = Recorder::create(&once, &options).unwrap();
        log(&mut recorder, 1..=9);
        let report = recorder.finish(&Summary::default()).unwrap();
        assert!(fs::read_to_string(report).unwrap().contains("<h2>Loss</h2>"));

        let mut recorder = Recorder::create(&twice, &options).unwrap();
        log(&mut recorder, 1..=7);
        drop(recorder);
        let mut recorder = Recorder::resume(&twice, 4, &options).unwrap();
        log(&mut recorder, 5..=9);
        recorder.finish(&Summary::default()).unwrap();
        let read = |folder: &Path| fs::read_to_string(folder.join(METRICS)).unwrap();
        assert_eq!(read(&once), read(&twice));

        let found = names(&twice);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].starts_with("events.out.tfevents.") && found[0] < found[1]);
        assert!(matches!(Recorder::create(&once, &options), Err(RecordError::Taken { .. })));
    }

    #[test]
    fn without_tensorboard_there_are_no_event_files() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { tensorboard: false, ..Options::default() };
        let mut recorder = Recorder::create(folder.path(), &options).unwrap();
        log(&mut recorder, 1..=2);
        recorder.finish(&Summary::default()).unwrap();
        assert_eq!(names(folder.path()), [METRICS, REPORT]);
    }

    /// `/dev/full` takes no byte: the warning comes once, and the run can end.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS);
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let options = Options { tensorboard: false, ..Options::default() };
        let file = MetricsFile::open_as_is(&path).unwrap();
        let mut recorder = Recorder::with(folder.path(), file, &options, None).unwrap();
        let first = recorder.log(1, 0, 1.0, &[]).expect("a warning");
        assert_eq!(first.path(), path);
        assert!(first.to_string().contains("make room"), "{first}");
        assert!(recorder.log(2, 0, 1.0, &[]).is_none());
        // Reading it back would never end: a device is no history.
        fs::remove_file(&path).unwrap();
        assert!(recorder.finish(&Summary::default()).is_err());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Recorder::create(&file.join("run"), &Options::default()).unwrap_err();
        assert!(matches!(error, RecordError::Write { .. }), "{error}");
        assert!(matches!(Recorder::resume(&file, 3, &Options::default()), Err(RecordError::Write { .. })));
    }
}
