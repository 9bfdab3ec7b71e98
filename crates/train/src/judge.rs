//! The engine that evaluates: a forward pass with the weights of a learner, or of a file.

use polyreme_data::{Spec, Values};
use polyreme_exec::{Engine, Options};
use polyreme_graph::Program;

use crate::error::TrainError;
use crate::lower::{IGNORED, evaluation_graph};
use crate::net::Net;
use crate::team::Team;

/// An engine that evaluates: a forward pass with the weights of a learner.
pub struct Judge {
    engine: Engine,
    input: &'static str,
    n: usize,
    classes: usize,
}

impl Judge {
    /// Compiles for batches of at most `n` samples.
    pub fn new(net: &Net, spec: &Spec, n: usize, threads: usize) -> Result<Judge, TrainError> {
        let graph = evaluation_graph(net, spec, n)?;
        let classes = graph.shape(graph.output("logits").expect("an evaluation has logits")).last();
        let engine = Engine::new(Program::forward(&graph), Options::threads(threads));
        Ok(Judge { engine, input: net.input(spec, 1, false).name, n, classes })
    }

    /// How many classes the logits tell apart.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Samples that fit at once.
    pub fn batch(&self) -> usize {
        self.n
    }

    /// Takes the weights that a team would ship.
    pub fn take(&mut self, team: &Team) -> Result<(), TrainError> {
        let (slots, params) = team.shipped();
        self.engine.copy_params(&slots, params)?;
        Ok(self.engine.copy_states_from(team.learner())?)
    }

    /// The engine, to set its weights from elsewhere.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The logits of up to [`Judge::batch`] samples, `[labels, classes]`, and their mean loss.
    pub fn run(&mut self, x: Values, labels: &[i32]) -> Result<(&[f32], f64), TrainError> {
        match x {
            Values::F32(x) => {
                let to = self.engine.input_f32(self.input)?;
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0.0);
            }
            Values::I32(x) => {
                let to = self.engine.input_i32(self.input)?;
                to[..x.len()].copy_from_slice(x);
                to[x.len()..].fill(0);
            }
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        }
        let to = self.engine.input_i32("labels")?;
        to[..labels.len()].copy_from_slice(labels);
        to[labels.len()..].fill(IGNORED);
        self.engine.run()?;
        let logits = self.engine.output("logits")?;
        Ok((&logits[..labels.len() * self.classes], f64::from(self.engine.output("loss")?[0])))
    }
}
