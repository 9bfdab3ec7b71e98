//! What evaluates: a forward pass with the weights of a file, or with those that are being learnt.

use std::borrow::BorrowMut;

use polyreme_data::{Features, Spec, Values};
use polyreme_exec::{Engine, Isa, Options};
use polyreme_graph::{Graph, Program};

use crate::error::TrainError;
use crate::lower::{IGNORED, evaluation_graph};
use crate::net::Net;

/// Samples of a block, and tokens of one: a forward pass alone needs little memory.
const BLOCK_SAMPLES: usize = 64;
const BLOCK_TOKENS: usize = 8192;
/// Logits of a block: with a large vocabulary they are the most of it.
const BLOCK_LOGITS: usize = 1 << 25;

/// Samples that are evaluated at once. It depends on the data and the network alone: losses are added up by blocks, so that
/// every number of ranks and threads comes to the same bits.
pub fn block_samples(net: &Net, spec: &Spec) -> Result<usize, TrainError> {
    let n = match spec.features {
        Features::Ids { time, .. } => (BLOCK_TOKENS / time.max(1)).clamp(1, BLOCK_SAMPLES),
        Features::Image { .. } | Features::Row { .. } => BLOCK_SAMPLES,
    };
    let of_one = evaluation_graph(net, spec, 1)?;
    let logits = of_one.shape(of_one.output("logits").expect("an evaluation has logits")).numel();
    Ok(n.min(BLOCK_LOGITS / logits.max(1)).max(1))
}

/// How an engine is fed and read in an evaluation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    /// The program's number in the engine.
    pub(crate) number: usize,
    input: &'static str,
    n: usize,
    classes: usize,
}

impl Trial {
    /// The graph for batches of at most `n` samples, and how it is fed.
    pub(crate) fn new(net: &Net, spec: &Spec, n: usize) -> Result<(Graph, Trial), TrainError> {
        let graph = evaluation_graph(net, spec, n)?;
        let classes = graph.shape(graph.output("logits").expect("an evaluation has logits")).last();
        Ok((graph, Trial { number: 0, input: net.input(spec, 1, false).name, n, classes }))
    }
}

/// Evaluates with an engine of its own, or with one that is lent.
pub struct Judge<E = Engine> {
    engine: E,
    trial: Trial,
}

impl Judge {
    /// Compiles for batches of at most `n` samples, with an engine of its own.
    pub fn new(net: &Net, spec: &Spec, n: usize, threads: usize, isa: Isa) -> Result<Judge, TrainError> {
        let (graph, trial) = Trial::new(net, spec, n)?;
        let options = Options { isa, ..Options::threads(threads) };
        Ok(Judge { engine: Engine::new(Program::forward(&graph), options)?, trial })
    }

    /// The engine, to set its weights from elsewhere.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl<E: BorrowMut<Engine>> Judge<E> {
    pub(crate) fn over(engine: E, trial: Trial) -> Judge<E> {
        Judge { engine, trial }
    }

    /// How many classes the logits tell apart.
    pub fn classes(&self) -> usize {
        self.trial.classes
    }

    /// Samples that fit at once.
    pub fn batch(&self) -> usize {
        self.trial.n
    }

    /// The logits of up to [`Judge::batch`] samples, `[labels, classes]`, and their mean loss.
    pub fn run(&mut self, x: Values, labels: &[i32]) -> Result<(&[f32], f64), TrainError> {
        let Trial { number, input, classes, .. } = self.trial;
        let engine = self.engine.borrow_mut();
        engine.select(number);
        match x {
            Values::F32(x) => {
                let to = engine.input_f32(input)?;
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0.0);
            }
            Values::I32(x) => {
                let to = engine.input_i32(input)?;
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0);
            }
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        }
        let to = engine.input_i32("labels")?;
        to[..labels.len()].copy_from_slice(labels);
        to[labels.len()..].fill(IGNORED);
        engine.run()?;
        let logits = engine.output("logits")?;
        Ok((&logits[..labels.len() * classes], f64::from(engine.output("loss")?[0])))
    }
}
