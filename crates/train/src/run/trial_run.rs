//! Which precision is faster here: both are tried on a few samples when a run with `precision = "auto"` begins.

use std::time::{Duration, Instant};

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Precision, cost};

use super::prepared::Prepared;
use crate::error::TrainError;
use crate::job::PrecisionKind;
use crate::lower::{step_graph, training_graph};

/// How long both are measured together.
const TIME: Duration = Duration::from_millis(800);
/// About as many operations as fit into a tenth of a second: more samples are not taken at once.
const FLOPS: u64 = 5_000_000_000;

/// What was measured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct PrecisionTrial {
    /// Milliseconds of forward and backward pass in f32 and in bf16.
    pub(super) ms: [f64; 2],
    /// How many samples they had.
    pub(super) samples: usize,
}

impl PrecisionTrial {
    /// The faster one.
    pub(super) fn faster(&self) -> PrecisionKind {
        if self.ms[1] < self.ms[0] { PrecisionKind::Bf16 } else { PrecisionKind::F32 }
    }

    /// The choice and what it rests on.
    pub(super) fn words(&self) -> String {
        let [f32_ms, bf16_ms] = self.ms;
        let (name, n) = (self.faster().name(), self.samples);
        format!("{name}, as measured: {n} samples take {f32_ms:.1} ms in f32, {bf16_ms:.1} in bf16")
    }
}

impl Prepared {
    /// Times forward and backward pass of some samples in f32 and in bf16, by turns.
    pub(super) fn measure_precisions(&self) -> Result<PrecisionTrial, TrainError> {
        let most = self.micro().max(1);
        let trace = |n: usize| step_graph(&training_graph(&self.net, &self.spec, n, self.learner.loss)?);
        let flops = cost::product_flops(&trace(most)?).max(1);
        let samples = usize::try_from(most as u64 * FLOPS / flops).unwrap_or(most).clamp(2.min(most), most);
        let step = trace(samples)?;
        let engine = |precision: Precision| {
            let options = Options { isa: self.learner.isa, ..Options::threads(self.threads) };
            Engine::new(precision.gradients(&step), options)
        };
        let bf16 = self.job.precision_as(PrecisionKind::Bf16);
        let mut engines = [engine(Precision::F32)?, engine(bf16)?];
        let (mut best, began) = ([f64::INFINITY; 2], Instant::now());
        // The first run of each only brings its memory in.
        for round in 0_u32.. {
            for (engine, best) in engines.iter_mut().zip(&mut best) {
                let one = Instant::now();
                engine.run()?;
                let ms = one.elapsed().as_secs_f64() * 1e3;
                *best = if round == 0 { f64::INFINITY } else { best.min(ms) };
            }
            if round > 0 && began.elapsed() > TIME {
                break;
            }
        }
        Ok(PrecisionTrial { ms: best, samples })
    }
}
