//! Which schedules there are, their names in job files, and the timetable of each.

use std::fmt;
use std::str::FromStr;

use super::timetable::Timetable;
use super::{gpipe, interleaved, one_f_one_b, two_bw, zb_h1, zb_v};

/// A pipeline schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PipelineKind {
    /// All forwards, then all backwards.
    Gpipe,
    /// One forward, one backward: as few activations as the pipeline is deep.
    OneFOneB,
    /// 1F1B over several chunks per stage: a smaller bubble, more messages.
    Interleaved {
        /// Chunks per stage.
        chunks: usize,
    },
    /// 1F1B with weight gradients put where stages would idle.
    ZbH1,
    /// Two chunks per stage, down and up again, with weight gradients put where stages would idle.
    ZbV,
    /// 1F1B that is not flushed between steps: gradients are one step old.
    TwoBw,
}

impl PipelineKind {
    /// All of them, with the default number of chunks.
    pub const ALL: [PipelineKind; 6] = [
        PipelineKind::Gpipe,
        PipelineKind::OneFOneB,
        PipelineKind::Interleaved { chunks: 2 },
        PipelineKind::ZbH1,
        PipelineKind::ZbV,
        PipelineKind::TwoBw,
    ];

    /// The name, as a job file has it.
    pub fn name(self) -> &'static str {
        match self {
            PipelineKind::Gpipe => "gpipe",
            PipelineKind::OneFOneB => "1f1b",
            PipelineKind::Interleaved { .. } => "interleaved",
            PipelineKind::ZbH1 => "zb-h1",
            PipelineKind::ZbV => "zb-v",
            PipelineKind::TwoBw => "2bw",
        }
    }

    /// How many chunks each stage has.
    pub fn chunks_per_stage(self) -> usize {
        match self {
            PipelineKind::Interleaved { chunks } => chunks,
            PipelineKind::ZbV => 2,
            PipelineKind::Gpipe | PipelineKind::OneFOneB | PipelineKind::ZbH1 | PipelineKind::TwoBw => 1,
        }
    }
}

impl fmt::Display for PipelineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PipelineKind {
    type Err = String;

    /// By name; "interleaved" has two chunks per stage.
    fn from_str(name: &str) -> Result<PipelineKind, String> {
        PipelineKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = PipelineKind::ALL.map(|kind| format!("\"{kind}\"")).join(", ");
            format!("there is no schedule \"{name}\"; use one of {names}")
        })
    }
}

/// The timetable of one step, from an empty pipeline to an empty pipeline; or why there is none, and what to change. That
/// of `2bw` is a run of a single step: [`across_steps`](super::across_steps) has the lists of a longer one.
pub fn timetable(kind: PipelineKind, stages: usize, microbatches: usize) -> Result<Timetable, String> {
    at_least_one(stages, microbatches)?;
    match kind {
        PipelineKind::Gpipe => Ok(gpipe::timetable(stages, microbatches)),
        PipelineKind::OneFOneB => Ok(one_f_one_b::timetable(stages, microbatches)),
        PipelineKind::Interleaved { chunks } if chunks < 2 => Err(format!(
            "an interleaved schedule needs 2 or more chunks per stage, not {chunks}; for one chunk per stage set \
             `parallel.schedule = \"1f1b\"`"
        )),
        PipelineKind::Interleaved { chunks } => Ok(interleaved::timetable(stages, microbatches, chunks)),
        PipelineKind::ZbH1 => Ok(zb_h1::timetable(stages, microbatches)),
        PipelineKind::ZbV => Ok(zb_v::timetable(stages, microbatches)),
        PipelineKind::TwoBw => Ok(two_bw::across_steps(stages, microbatches)?.run(1)),
    }
}

/// Refuses pipelines without stages and steps without microbatches.
pub(super) fn at_least_one(stages: usize, microbatches: usize) -> Result<(), String> {
    match (stages, microbatches) {
        (0, _) => Err("a pipeline has at least one stage; set `parallel.stage` to 1 or more".to_string()),
        (_, 0) => {
            Err("a step has at least one microbatch; set `parallel.microbatches` to 1 or more".to_string())
        }
        _ => Ok(()),
    }
}
