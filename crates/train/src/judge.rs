//! What evaluates: a forward pass with the weights of a file, or with those that are being learnt.

use std::borrow::BorrowMut;

use polyreme_collective::Comm;
use polyreme_data::{Features, Spec, Values};
use polyreme_exec::{Engine, Isa, Options};
use polyreme_graph::{Axis, Precision, Program};
use polyreme_parallel::{Plan, compile_forward};

use crate::error::TrainError;
use crate::fed::{Fed, OwnLabels};
use crate::inference::join;
use crate::loss::{IGNORED, LossKind};
use crate::lower::{evaluation_graph, logits_of_one};
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
        Features::Ids { .. } | Features::Texts { .. } => {
            (BLOCK_TOKENS / spec.features.numel().max(1)).clamp(1, BLOCK_SAMPLES)
        }
        Features::Image { .. } | Features::Row { .. } | Features::Mixed { .. } => BLOCK_SAMPLES,
    };
    Ok(n.min(BLOCK_LOGITS / logits_of_one(net, spec)?.max(1)).max(1))
}

/// How an engine is fed and read in an evaluation.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    /// The program's number in the engine.
    pub(crate) number: usize,
    /// Of texts: the lengths that they can be filled up to beside the longest, and the numbers of the programs for them.
    pub(crate) by_time: Vec<(usize, usize)>,
    input: &'static str,
    n: usize,
    /// The width of a row of logits.
    outputs: usize,
    /// Whether this rank has the logits, and no other one before it has them too.
    counts: bool,
    /// Whether the loss is counted here: ranks that cut sequences all have that of all positions.
    counts_loss: bool,
    /// Whether this rank sends to or receives from other stages.
    staged: bool,
    fed: Fed,
}

impl Trial {
    /// The program of a plan's rank for batches of at most `n` samples, and how it is fed.
    pub(crate) fn new(
        net: &Net,
        spec: &Spec,
        n: usize,
        kind: LossKind,
        plan: &Plan,
    ) -> Result<(Program, Trial), TrainError> {
        let graph = evaluation_graph(net, spec, n, kind)?;
        let outputs = graph.shape(graph.output("logits").expect("an evaluation has logits")).last();
        let program = compile_forward(&graph, plan)?;
        let fed = Fed::new(&graph, plan)?;
        let first = |axis| plan.mesh.place(plan.rank, axis) == 0;
        let here = first(Axis::Tensor) && program.graph().output("logits").is_some();
        // Each rank has the logits of its own positions, if there are any of single positions.
        let counts = here && (first(Axis::Sequence) || fed.cuts("labels"));
        let counts_loss = counts && first(Axis::Sequence);
        let input = net.input(spec, 1, false).name;
        let staged = plan.mesh.stage > 1;
        let by_time = Vec::new();
        Ok((program, Trial { number: 0, by_time, input, n, outputs, counts, counts_loss, staged, fed }))
    }
}

/// The programs for texts that are filled up less far than the longest, with their lengths. None where ranks have the network
/// together: their parts of it are made for one length.
pub(crate) fn shorter(
    net: &Net,
    spec: &Spec,
    n: usize,
    kind: LossKind,
    plan: &Plan,
) -> Result<Vec<(usize, Program)>, TrainError> {
    let Features::Texts { times, .. } = &spec.features else { return Ok(Vec::new()) };
    let times = if plan.mesh.replica_ranks() > 1 { &[] } else { &times[..times.len().saturating_sub(1)] };
    let program = |&time: &usize| {
        let spec = Spec { features: spec.features.filled_to(time), target: spec.target.clone() };
        Ok((time, Trial::new(net, &spec, n, kind, plan)?.0))
    };
    times.iter().map(program).collect()
}

/// Evaluates with an engine of its own, or with one that is lent.
pub struct Judge<E = Engine> {
    engine: E,
    trial: Trial,
    /// The program that is run next.
    number: usize,
}

impl Judge {
    /// Compiles for batches of at most `n` samples, with an engine of its own.
    pub fn new(
        net: &Net,
        spec: &Spec,
        n: usize,
        kind: LossKind,
        precision: &Precision,
        threads: usize,
        isa: Isa,
    ) -> Result<Judge, TrainError> {
        let plan = Plan { precision: precision.clone(), ..Plan::alone() };
        let options = Options { isa, ..Options::threads(threads) };
        Judge::join(net, spec, n, kind, &plan, options, Comm::alone())
    }

    /// The same for one of several ranks that have the network together, or copies of it, as a plan says. Collective.
    pub(crate) fn join(
        net: &Net,
        spec: &Spec,
        n: usize,
        kind: LossKind,
        plan: &Plan,
        options: Options,
        comm: Comm,
    ) -> Result<Judge, TrainError> {
        let (mut engine, (mut trial, shorter)) = join(comm, plan, options, |plan| {
            let (program, trial) = Trial::new(net, spec, n, kind, plan)?;
            Ok((program, (trial, shorter(net, spec, n, kind, plan)?)))
        })?;
        for (time, program) in shorter {
            trial.by_time.push((time, engine.add(program)?));
        }
        Ok(Judge::over(engine, trial))
    }

    /// The engine, to set its weights from elsewhere.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Tells the other ranks that this one ends here.
    pub fn fail(&mut self, why: &str) {
        self.engine.comm().fail(why);
    }

    /// Gives up the engine; its communicator stays.
    pub fn leave(self) -> Comm {
        self.engine.leave()
    }
}

impl<E: BorrowMut<Engine>> Judge<E> {
    pub(crate) fn over(engine: E, trial: Trial) -> Judge<E> {
        let number = trial.number;
        Judge { engine, trial, number }
    }

    /// Whether texts may be filled up less far than the longest of the set.
    pub(crate) fn fills_by_block(&self) -> bool {
        !self.trial.by_time.is_empty()
    }

    /// What runs next is texts that are filled up to this length; `None`: to that of the longest.
    pub(crate) fn fill_up_to(&mut self, time: Option<usize>) {
        let of_time = self.trial.by_time.iter().find(|(t, _)| Some(*t) == time);
        self.number = of_time.map_or(self.trial.number, |(_, number)| *number);
    }

    /// The engine.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        self.engine.borrow_mut()
    }

    /// The width of a row of logits: how many classes they tell apart, or how many numbers there are.
    pub fn outputs(&self) -> usize {
        self.trial.outputs
    }

    /// Whether this rank has the logits. Of ranks that have a network together one has, and the others compute for it.
    pub fn counts(&self) -> bool {
        self.trial.counts
    }

    /// The labels that this rank's logits are of: those of its own positions, where ranks cut sequences.
    pub(crate) fn own_labels<'a>(&self, labels: &Values<'a>) -> OwnLabels<'a> {
        self.trial.fed.own_labels(labels)
    }

    /// Whether this rank counts the loss of a block; others that have logits have the same one.
    pub(crate) fn counts_loss(&self) -> bool {
        self.trial.counts_loss
    }

    /// Waits for the other ranks of a network that is cut into stages, after every second block. A stage does not wait for those that
    /// it sends to: a fast one would be ahead of a slow one by the whole set, with all that it sent in memory. Collective.
    pub(crate) fn keep_together(&mut self, block: usize) -> Result<(), TrainError> {
        if self.trial.staged && block % 2 == 1 {
            self.engine().comms().replica().barrier()?;
        }
        Ok(())
    }

    /// Takes part in a pass of other ranks, where weights are gathered from all for each, with samples that count for nothing.
    pub fn idle(&mut self) -> Result<(), TrainError> {
        let engine = self.engine.borrow_mut();
        engine.select(self.trial.number);
        // Another program may have left anything there.
        for name in [self.trial.input, "labels", "counted"] {
            if let Ok(ids) = engine.input_i32(name) {
                ids.fill(0);
            } else if let Ok(numbers) = engine.input_f32(name) {
                numbers.fill(0.0);
            }
        }
        Ok(engine.run()?)
    }

    /// Samples that fit at once.
    pub fn batch(&self) -> usize {
        self.trial.n
    }

    /// The logits of up to [`Judge::batch`] samples, `[labels, classes]` or `[samples, numbers]`, and their mean loss; nothing on
    /// a rank that does not have them. All ranks that have a network together are given the same samples.
    pub fn run(&mut self, x: Values, labels: Values) -> Result<(&[f32], f64), TrainError> {
        let Trial { input, n, outputs, counts, ref fed, .. } = self.trial;
        let (number, engine) = (self.number, self.engine.borrow_mut());
        engine.select(number);
        match x {
            _ if !engine.has_input(input) => {}
            Values::F32(x) => {
                let (x, to) = (&fed.own(input, x), engine.input_f32(input)?);
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0.0);
            }
            Values::I32(x) => {
                let (x, to) = (&fed.own(input, x), engine.input_i32(input)?);
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0);
            }
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        }
        // What a mean over all that fits is multiplied by, to be that of the samples that count.
        let mut factor = 1.0;
        let rows = match labels {
            _ if !engine.has_input("labels") => 0,
            Values::I32(labels) => {
                let (labels, to) = (&fed.own("labels", labels), engine.input_i32("labels")?);
                to[..labels.len()].copy_from_slice(labels);
                to[labels.len()..].fill(IGNORED);
                labels.len()
            }
            Values::F32(labels) => {
                let to = engine.input_f32("labels")?;
                to[..labels.len()].copy_from_slice(labels);
                to[labels.len()..].fill(0.0);
                let rows = labels.len() / outputs.max(1);
                let counted = engine.input_f32("counted")?;
                counted[..rows].fill(1.0);
                counted[rows..].fill(0.0);
                factor = n as f64 / rows as f64;
                rows
            }
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        };
        engine.run()?;
        if !counts {
            return Ok((&[], 0.0));
        }
        let logits = engine.output("logits")?;
        Ok((&logits[..rows * outputs], f64::from(engine.output("loss")?[0]) * factor))
    }
}
