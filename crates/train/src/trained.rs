//! A trained model, ready to be asked: the job, the network, the weights, and how samples are prepared.

use std::path::{Path, PathBuf};

use polyreme_data::{Layout, Spec};
use polyreme_exec::{Isa, Kept};

use crate::checkpoint::{self, GivenPath, Loaded, MODEL_FILE};
use crate::error::TrainError;
use crate::install::{install, install_kept};
use crate::job::Job;
use crate::judge::Judge;
use crate::lower::evaluation_graph;
use crate::net::Net;
use crate::preparation::Preparation;
use crate::run::{AVERAGE_FILE, Given, Progress};
use crate::whole::WholeModel;

/// A model out of a checkpoint.
pub struct Trained {
    /// The job, as it was resolved.
    pub job: Job,
    /// How samples are prepared.
    pub preparation: Preparation,
    /// The checkpoint.
    pub loaded: Loaded,
    net: Net,
    isa: Isa,
}

impl Trained {
    /// Opens a run (its best checkpoint, or else its newest whole one) or a checkpoint.
    pub fn open(path: &Path, given: &Given) -> Result<Trained, TrainError> {
        let loaded = match checkpoint::resolve(path)? {
            GivenPath::Run(run) => match checkpoint::best(&run)? {
                Some(best) => checkpoint::load(&best)?,
                None => checkpoint::latest_whole(&run)?.0,
            },
            GivenPath::Checkpoint(path) => checkpoint::load(&path)?,
            GivenPath::Weights(path) => return Err(TrainError::WeightsOnly { path }),
        };
        let origin = loaded.path.join("manifest.json");
        let job = Job::from_text(&loaded.manifest.job, &origin.display().to_string(), Path::new("."), &[])?;
        let preparation = Progress::of(&loaded)?.preparation;
        let mut model = job.model.clone();
        let net = match &given.net {
            Some(net) => net.clone(),
            None => {
                model.fit(&preparation.spec(Layout::Planes))?;
                Net::Model(model.model)
            }
        };
        Ok(Trained { job, preparation, loaded, net, isa: given.isa })
    }

    /// An engine with these weights for batches of at most `n` samples of `spec`.
    pub fn judge(&self, spec: &Spec, n: usize, threads: usize) -> Result<Judge, TrainError> {
        let mut judge =
            Judge::new(&self.net, spec, n, self.job.train.loss, &self.job.precision(), threads, self.isa)?;
        let engine = judge.engine_mut();
        let whole = WholeModel::of(&evaluation_graph(&self.net, spec, 1, self.job.train.loss)?);
        install(engine, &whole, Some(self.loaded.needed(MODEL_FILE)?))?;
        if let Some(average) = self.loaded.file(AVERAGE_FILE) {
            let slots = engine.param_slots();
            install_kept(engine, Kept::Params, &slots, &whole.params, Some(average))?;
        }
        Ok(judge)
    }

    /// The network.
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// The run's folder.
    pub fn folder(&self) -> PathBuf {
        self.loaded.path.parent().and_then(Path::parent).unwrap_or(&self.loaded.path).to_path_buf()
    }
}
