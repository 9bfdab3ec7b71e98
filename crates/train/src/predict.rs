//! Predictions: the logits of samples that have no labels, on every rank.
//!
//! Ranks of the data axis each take `n` samples of a round, one rank after another. The program gathers the logits of all of
//! them, and sends them to every stage, so rank 0 has them in the order of the samples. In the last round a rank may have fewer
//! samples, or none: it runs all the same, on zeros, and its rows are not told.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_data::{Dataset, Loader, LoaderOptions, Order, Span, Spec, Transform, Values};
use polyreme_exec::Engine;
use polyreme_parallel::{AnswerRows, Plan, compile_answer};

use crate::error::TrainError;
use crate::evaluate::same_set;
use crate::fed::Fed;
use crate::inference::join;
use crate::lower::prediction_graph;
use crate::trained::Trained;
use crate::whole::WholeModel;

/// Predicts with a trained model.
pub struct Predictor {
    engine: Engine,
    input: &'static str,
    fed: Fed,
    /// Samples of each data rank at once.
    n: usize,
    /// Rows of logits for each sample, and their width.
    rows: usize,
    outputs: usize,
}

impl Predictor {
    /// A predictor for at most `n` samples of `spec` at once on each data rank, on one rank of a plan. Collective.
    pub fn new(
        trained: &Trained,
        spec: &Spec,
        n: usize,
        plan: &Plan,
        threads: usize,
        comm: Comm,
    ) -> Result<Predictor, TrainError> {
        let net = trained.net();
        let (engine, (fed, whole, outputs)) = join(comm, plan, trained.options(threads), |plan| {
            let graph = prediction_graph(net, spec, n)?;
            let outputs = graph.shape(graph.outputs[0].1).last();
            let more = (Fed::new(&graph, plan)?, WholeModel::of(&graph), outputs);
            Ok((compile_answer(&graph, plan, AnswerRows::All)?, more))
        })?;
        let input = net.input(spec, 1, false).name;
        let mut predictor = Predictor { engine, input, fed, n, rows: spec.n_rows(), outputs };
        trained.install(&mut predictor.engine, &whole)?;
        Ok(predictor)
    }

    /// The logits of every row of a set, or the numbers of every sample, in order and on all ranks. `tell` may fail, which ends it.
    /// Collective.
    pub fn logits(
        &mut self,
        set: &Arc<dyn Dataset>,
        transform: &Transform,
        tell: &mut dyn FnMut(&[f32]) -> std::io::Result<()>,
    ) -> Result<(), TrainError> {
        same_set(self.engine.comm(), set.as_ref())?;
        let role = self.engine.role();
        let (rank, ranks, n, len) = (role.rank, role.ranks, self.n, set.len());
        // The samples of a rank in a round.
        let span = move |round: usize, rank: usize| {
            let start = ((round * ranks + rank) * n).min(len);
            (start, n.min(len - start))
        };
        let rounds = len.div_ceil(n * ranks);
        let order = Order::in_order(len);
        let mine = (0..rounds).map(move |round| span(round, rank)).filter(|(_, len)| *len > 0);
        let mine = mine.map(move |(start, len)| Span::new(order, start, len));
        let options = LoaderOptions { batch_max: n, threads: 0, prefetch: 1, seed: 0 };
        let mut loader = Loader::start(set.clone(), transform.clone(), mine, options);
        for round in 0..rounds {
            let batch = if span(round, rank).1 > 0 { loader.next().transpose()? } else { None };
            self.fill(batch.as_ref().map(|batch| batch.x.values()))?;
            self.engine.run()?;
            let (all, per_sample) = (self.engine.output("logits")?, self.rows * self.outputs);
            for (rank, logits) in all.chunks_exact(n * per_sample).enumerate() {
                let told = &logits[..span(round, rank).1 * per_sample];
                for row in told.chunks_exact(self.outputs) {
                    tell(row).map_err(|source| TrainError::Io { path: "standard output".into(), source })?;
                }
            }
        }
        Ok(())
    }

    /// Feeds samples, and zeros for those that are missing; a stage is fed what its layers read.
    fn fill(&mut self, x: Option<Values>) -> Result<(), TrainError> {
        let Predictor { engine, input, fed, .. } = self;
        if !engine.has_input(input) {
            return Ok(());
        }
        match x {
            None => {
                if let Ok(ids) = engine.input_i32(input) {
                    ids.fill(0);
                } else {
                    engine.input_f32(input)?.fill(0.0);
                }
            }
            Some(Values::F32(x)) => {
                let (x, to) = (&fed.own(input, x), engine.input_f32(input)?);
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0.0);
            }
            Some(Values::I32(x)) => {
                let (x, to) = (&fed.own(input, x), engine.input_i32(input)?);
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0);
            }
            Some(Values::U8(_)) => unreachable!("batches are f32 or i32"),
        }
        Ok(())
    }

    /// The engine, which knows what it holds of the weights.
    pub fn engine(&self) -> &Engine {
        &self.engine
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
