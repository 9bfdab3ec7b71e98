//! A trained model, ready to be asked: the job, the network, the weights, and how samples are prepared.
//!
//! Several ranks may use it together, each with its part of the weights. Rank 0 reads the checkpoint, which may be on its host
//! alone, and tells the others: first what the model is ([`Trained::note`]), then each part of its weights.

use std::path::{Path, PathBuf};

use polyreme_collective::{Comm, Doing};
use polyreme_data::{Layout, Spec};
use polyreme_exec::{Engine, Isa, Kept, Options};
use polyreme_parallel::Plan;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, GivenPath, Loaded, MODEL_FILE};
use crate::error::TrainError;
use crate::inference::Network;
use crate::install::{install, install_kept};
use crate::job::{Job, ParallelSpec};
use crate::judge::Judge;
use crate::lower::evaluation_graph;
use crate::net::Net;
use crate::preparation::Preparation;
use crate::run::frozen::install_frozen;
use crate::run::{AVERAGE_FILE, Given, Progress};
use crate::whole::WholeModel;

/// A model out of a checkpoint.
pub struct Trained {
    /// The job, as it was resolved.
    pub job: Job,
    /// What its checkpoint says.
    pub note: CheckpointNote,
    /// The checkpoint, in a process that can read it.
    pub loaded: Option<Loaded>,
    net: Net,
    isa: Isa,
}

/// What a process must know of a checkpoint to use its model together with the one that reads it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CheckpointNote {
    /// The job, as TOML with everything resolved.
    pub job: String,
    /// How samples are prepared.
    pub preparation: Preparation,
    /// Its folder.
    pub path: PathBuf,
    /// Steps done.
    pub step: u64,
    /// Whether it has averaged parameters, which are then used.
    pub averaged: bool,
}

impl CheckpointNote {
    /// As bytes, for other processes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TrainError> {
        serde_json::to_vec(self).map_err(|e| TrainError::Progress(e.to_string()))
    }

    /// The reverse.
    pub fn from_bytes(bytes: &[u8]) -> Result<CheckpointNote, TrainError> {
        serde_json::from_slice(bytes).map_err(|e| TrainError::Progress(e.to_string()))
    }
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
        let note = CheckpointNote {
            job: loaded.manifest.job.clone(),
            preparation: Progress::of(&loaded)?.preparation,
            path: loaded.path.clone(),
            step: loaded.manifest.step,
            averaged: loaded.file(AVERAGE_FILE).is_some(),
        };
        Ok(Trained { loaded: Some(loaded), ..Trained::noted(note, given)? })
    }

    /// A model whose checkpoint another process reads.
    pub fn noted(note: CheckpointNote, given: &Given) -> Result<Trained, TrainError> {
        let origin = note.path.join("manifest.json");
        let job = Job::from_text(&note.job, &origin.display().to_string(), Path::new("."), &[])?;
        let mut model = job.model.clone();
        let net = match &given.net {
            Some(net) => net.clone(),
            None => {
                model.fit(&note.preparation.spec(Layout::Planes))?;
                Net::Model(model.model)
            }
        };
        // Factors are parameters of the network; who is frozen matters to nobody else here.
        let net = if job.model.lora.is_some() { net.tuned(job.tuning()) } else { net };
        Ok(Trained { job, note, loaded: None, net, isa: given.isa })
    }

    /// How samples are prepared.
    pub fn preparation(&self) -> &Preparation {
        &self.note.preparation
    }

    /// How `ranks` ranks have the model together, for `n` samples of `spec` at once; or why they cannot.
    pub fn plan(
        &self,
        spec: &Spec,
        n: usize,
        parallel: &ParallelSpec,
        ranks: usize,
    ) -> Result<Plan, TrainError> {
        let network = Network { net: &self.net, kind: self.job.train.loss, precision: self.job.precision() };
        network.plan(spec, n, parallel, ranks)
    }

    /// A judge with these weights for batches of at most `n` samples of `spec`, on one rank of a plan. Collective.
    pub fn judge(
        &self,
        spec: &Spec,
        n: usize,
        plan: &Plan,
        threads: usize,
        comm: Comm,
    ) -> Result<Judge, TrainError> {
        let kind = self.job.train.loss;
        let mut judge = Judge::join(&self.net, spec, n, kind, plan, self.options(threads), comm)?;
        let whole = WholeModel::of(&evaluation_graph(&self.net, spec, 1, kind)?);
        self.install(judge.engine_mut(), &whole)?;
        Ok(judge)
    }

    /// How its engines run.
    pub(crate) fn options(&self, threads: usize) -> Options {
        Options { isa: self.isa, ..Options::threads(threads) }
    }

    /// Gives all ranks of an engine their parts of the weights, which rank 0 reads. Collective.
    pub(crate) fn install(&self, engine: &mut Engine, whole: &WholeModel) -> Result<(), TrainError> {
        engine.comm().set_doing(Doing::Loading);
        let reads = engine.comm().rank() == 0;
        let loaded = self.loaded.as_ref().filter(|_| reads);
        let needed = |file: &str| loaded.map(|loaded| loaded.needed(file)).transpose();
        engine.exclusively(|engine| {
            install_frozen(engine, whole, loaded)?;
            install(engine, whole, needed(MODEL_FILE)?)?;
            if self.note.averaged {
                let slots = engine.param_slots();
                install_kept(engine, Kept::Params, &slots, &whole.params, needed(AVERAGE_FILE)?)?;
            }
            Ok(())
        })
    }

    /// The network.
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// The run's folder.
    pub fn folder(&self) -> PathBuf {
        let path = &self.note.path;
        path.parent().and_then(Path::parent).unwrap_or(path).to_path_buf()
    }
}
