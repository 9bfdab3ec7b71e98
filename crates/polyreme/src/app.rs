//! A custom program around a job: the whole command line for a network or data written in Rust.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::Isa;
use polyreme_graph::{Builder, Tensor, Traced};
use polyreme_train::event::{Observer, Summary};
use polyreme_train::job::Job;
use polyreme_train::run::{Given, Hold, Lodging, Prepared, run_ranks_at};
use polyreme_train::sets::Sets;
use polyreme_train::{Net, TrainError};

use crate::{memory, process, stores};

/// What a program adds to the command line: nothing, or a job defined in Rust.
///
/// ```no_run
/// use polyreme::{App, Job};
/// use polyreme::nn::layer::Linear;
///
/// fn main() -> std::process::ExitCode {
///     let job = Job::new("mine");
///     polyreme::cli::run(App::new(job).net(|b, x, _training| Linear::new(64, 10).trace(b, "fc", x)))
/// }
/// ```
#[derive(Clone, Default)]
pub struct App {
    job: Option<Job>,
    given: Given,
}

impl App {
    /// The command line of `job`: no job file is needed, and `--set` changes it as it would change a file.
    pub fn new(job: Job) -> App {
        App { job: Some(job), given: Given::default() }
    }

    /// Takes the network from a function of the builder, the batch, and whether this is for training; it returns
    /// logits, `[labels, classes]`.
    pub fn net(mut self, f: impl Fn(&mut Builder, Tensor, bool) -> Traced + Send + Sync + 'static) -> App {
        self.given.net = Some(Net::Function(Arc::new(f)));
        self
    }

    /// Takes the data from the program.
    pub fn data(mut self, sets: Sets) -> App {
        self.given.sets = Some(sets);
        self
    }

    /// Limits the CPU instructions that kernels use.
    pub fn isa(mut self, isa: Isa) -> App {
        self.given.isa = isa;
        self
    }

    /// Trains the job in this process, and tells `observer` about it. Without `output.path` the run goes to
    /// `runs/NAME`.
    pub fn train(self, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
        let given = self.given();
        let job = self.job.unwrap_or_else(|| Job::new("job"));
        let mut prepared = Prepared::new(job, given, process::cores())?;
        prepared.system = process::facts();
        prepared.process_bytes = process::bytes_before_training();
        prepared.fit(Lodging::threads(prepared.ranks()), &memory::limits())?;
        let hold = Hold::new(&prepared.job, false)?;
        let (folder, comms) = (hold.folder().to_path_buf(), Comm::local(prepared.ranks()));
        run_ranks_at(prepared, &folder, Some(hold), None, comms, observer, &|_| ())
    }

    /// The job's name, if there is a job.
    pub fn name(&self) -> Option<&str> {
        self.job.as_ref().map(|job| job.name.as_str())
    }

    /// The job.
    pub fn job(&self) -> Option<&Job> {
        self.job.as_ref()
    }

    /// What the program provides: network and data; and how much memory is free for them.
    pub fn given(&self) -> Given {
        Given { memory_bytes: memory::free_bytes(), remote: stores::env(), ..self.given.clone() }
    }
}
