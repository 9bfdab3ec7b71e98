//! Flags about how ranks split a step.

use clap::Args;
use polyreme_parallel::Mesh;
use polyreme_parallel::pipeline::{PipelineKind, timetable};

use super::Failure;
use crate::bench::cuts::CutsBy;
use crate::bench::jobs::BenchJob;

const HEADING: &str = "Mesh";

/// Steps between two drains of a pipeline without a flush between steps.
const RUN_STEPS: usize = 8;

/// How many ranks there are along each axis, and how stages run.
#[derive(Args, Clone, Debug)]
pub(super) struct MeshArgs {
    /// Ranks that the batch is split over [default: those that the other axes leave].
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=4096))]
    data: Option<u16>,
    /// Ranks that each matrix is split over.
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=64))]
    tensor: Option<u16>,
    /// Stages that the layers are split over.
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=64))]
    stage: Option<u16>,
    /// Ranks that each sequence is cut over.
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=64))]
    sequence: Option<u16>,
    /// Microbatches that a step is cut into [default: what the job says, or with several stages 4 for each].
    #[arg(long, value_name = "N", help_heading = HEADING, value_parser = clap::value_parser!(u16).range(1..=4096))]
    microbatches: Option<u16>,
    /// In which order stages run microbatches: gpipe, 1f1b, interleaved, zb-h1, zb-v or 2bw [default: 1f1b].
    #[arg(long, value_name = "NAME", help_heading = HEADING, requires = "stage")]
    schedule: Option<PipelineKind>,
    /// Add gradients up in a fixed tree over the step's microbatches, which all data ranks share out: the numbers of
    /// stages and of data ranks change no bit.
    #[arg(long, help_heading = HEADING)]
    reproducible: bool,
    /// Ranks that the batch is split over shard the weights too: each layer's are gathered ahead of their use.
    #[arg(long, help_heading = HEADING)]
    shard_weights: bool,
    /// Where stages are cut: `operations` or `measured` for parts of the same cost, or the layers before which to cut,
    /// such as `blocks.3,blocks.6` [default: operations].
    #[arg(long, value_name = "HOW", help_heading = HEADING, requires = "stage")]
    cuts: Option<CutsBy>,
}

impl MeshArgs {
    /// Whether something was asked for.
    pub(super) fn any(&self) -> bool {
        self.ranks().is_some() || self.microbatches.is_some() || self.reproducible || self.shard_weights
    }

    /// Whether ranks of the data axis shard the weights.
    pub(super) fn shard_weights(&self) -> bool {
        self.shard_weights
    }

    /// How many ranks the axes make, if they say.
    pub(super) fn ranks(&self) -> Option<usize> {
        let asked = [self.data, self.tensor, self.stage, self.sequence];
        let of = |n: &Option<u16>| usize::from(n.unwrap_or(1));
        asked.iter().any(Option::is_some).then(|| asked.iter().map(of).product())
    }

    pub(super) fn schedule(&self) -> PipelineKind {
        self.schedule.unwrap_or(PipelineKind::OneFOneB)
    }

    pub(super) fn cuts(&self) -> CutsBy {
        self.cuts.clone().unwrap_or_default()
    }

    /// The mesh of `ranks` ranks.
    pub(super) fn mesh(&self, ranks: usize) -> Result<Mesh, Failure> {
        let [tensor, stage, sequence] =
            [self.tensor, self.stage, self.sequence].map(|n| usize::from(n.unwrap_or(1)));
        let rest = tensor * stage * sequence;
        if !ranks.is_multiple_of(rest) {
            return Err(Failure::usage(format!(
                "--tensor {tensor}, --stage {stage} and --sequence {sequence} need a multiple of {rest} ranks, and there are {ranks}"
            )));
        }
        let mesh = Mesh { tensor, stage, sequence, ..Mesh::data(ranks / rest) };
        match self.data.map(usize::from) {
            Some(data) if data != mesh.data => Err(Failure::usage(format!(
                "--data, --tensor, --stage and --sequence make {} ranks, and there are {ranks}; leave one of the flags out",
                data * rest
            ))),
            _ if self.shard_weights && mesh.data == 1 => Err(Failure::usage(
                "--shard-weights needs several ranks that the batch is split over; set their number with --ranks or --data",
            )),
            _ => Ok(mesh),
        }
    }

    /// Cuts a job's step into microbatches for the ranks of a mesh; `batch` is that of all ranks together.
    pub(super) fn cut(&self, job: &mut BenchJob, mesh: &Mesh, batch: Option<usize>) -> Result<(), Failure> {
        let flushless = self.schedule() == PipelineKind::TwoBw && mesh.stage > 1;
        job.run_steps = if flushless { RUN_STEPS } else { 1 };
        let usual = if mesh.stage > 1 { 4 * mesh.stage } else { job.accumulate };
        let microbatches = self.microbatches.map_or(usual, usize::from);
        let samples = batch.unwrap_or(job.batch * job.accumulate * mesh.data);
        // Logical shards are those of all ranks together.
        let parts = if self.reproducible { microbatches } else { microbatches * mesh.data };
        job.shards = self.reproducible.then_some(microbatches);
        if !samples.is_multiple_of(parts) || samples == 0 {
            let data = parts / microbatches;
            return Err(Failure::usage(format!(
                "a step of {samples} samples cannot be cut into {microbatches} microbatches for {data} ranks each; \
                 use a batch that {parts} divides"
            )));
        }
        timetable(self.schedule(), mesh.stage, microbatches).map_err(Failure::usage)?;
        (job.accumulate, job.batch) = (microbatches, samples / parts);
        Ok(())
    }
}
