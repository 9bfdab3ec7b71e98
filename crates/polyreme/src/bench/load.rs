//! `polyreme bench load`: how fast the samples of a job are loaded, ready for a step.

use std::fmt;
use std::time::Instant;

use polyreme_data::{Loader, LoaderOptions, spans};
use polyreme_train::TrainError;
use polyreme_train::run::Prepared;
use serde::Serialize;

/// The result of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// The job.
    pub job: String,
    /// The kind of data.
    pub kind: &'static str,
    /// Samples per epoch.
    pub samples: usize,
    /// Loader threads.
    pub threads: usize,
    /// Seconds from the start of the process until the first epoch began: tables are read then.
    pub opened_s: f64,
    /// Samples per second of each epoch: the first reads and decodes files, later ones may find them in memory.
    pub samples_per_s: Vec<f64>,
}

/// Loads `passes` epochs of the training set, shuffled, augmented and normalised as in training, and discards them. The process began at
/// `start`.
pub fn measure(
    prepared: &Prepared,
    threads: usize,
    passes: u64,
    start: Instant,
) -> Result<LoadReport, TrainError> {
    let opened_s = start.elapsed().as_secs_f64();
    let (job, set) = (&prepared.job, &prepared.sets.train);
    let options = LoaderOptions {
        batch_max: job.train.batch,
        threads,
        prefetch: job.data.prefetch,
        seed: job.train.seed,
    };
    let mut samples_per_s = Vec::new();
    for epoch in 0..passes {
        let plan = spans(prepared.order(epoch), job.train.batch);
        let (began, mut n) = (Instant::now(), 0);
        for batch in Loader::start(set.clone(), prepared.transform()?, plan, options) {
            n += batch?.n;
        }
        samples_per_s.push(n as f64 / began.elapsed().as_secs_f64());
    }
    let (job, kind) = (job.name.clone(), job.data.source.kind());
    Ok(LoadReport { job, kind, samples: prepared.order(0).epoch_len(), threads, opened_s, samples_per_s })
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "{}: {} samples from {}, {} loader threads, {:.3} s until all was open",
            self.job, self.samples, self.kind, self.threads, self.opened_s
        )?;
        for (pass, speed) in self.samples_per_s.iter().enumerate() {
            write!(f, "\n  epoch {}: {speed:.0} samples/s", pass + 1)?;
        }
        Ok(())
    }
}
