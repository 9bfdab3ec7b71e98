//! Text that goes on: one token after another, each drawn from what the model says comes next.
//!
//! On several ranks the program of a token ends with the logits of the last position on all of them: tensor ranks gather their
//! parts of the vocabulary, ranks that cut the sequence add up one term and zeros, and the last stage sends the row to the
//! others. All ranks draw from the same bits with the same seed, so all know the token, and nothing has to be told.

use polyreme_collective::Comm;
use polyreme_data::{Layout, Tokenizer};
use polyreme_exec::Engine;
use polyreme_parallel::{AnswerRows, Plan, compile_answer};

use crate::draw::Draw;
use crate::error::TrainError;
use crate::fed::Fed;
use crate::inference::join;
use crate::job::ParallelSpec;
use crate::lower::prediction_graph;
use crate::preparation::Sample;
use crate::talk;
use crate::trained::Trained;
use crate::whole::WholeModel;

/// How tokens are drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// How many tokens.
    pub length: usize,
    /// 0: always the likeliest. 1: as the model says. More: wilder.
    pub temperature: f64,
    /// Only so many of the likeliest are drawn from; 0: all.
    pub top: usize,
    /// From which draws follow.
    pub seed: u64,
}

/// Says what may come next in a text, with a trained model.
pub struct NextToken {
    engine: Engine,
    input: &'static str,
    fed: Fed,
    /// The most tokens that it sees.
    time: usize,
    vocab: usize,
}

impl NextToken {
    /// How `ranks` ranks have the model together, or why they cannot: copies of it have nothing to do.
    pub fn plan(trained: &Trained, parallel: &ParallelSpec, ranks: usize) -> Result<Plan, TrainError> {
        let plan = trained.plan(&trained.preparation().spec(Layout::Planes), 1, parallel, ranks)?;
        match plan.ranks() {
            data if data > 1 && plan.shard_place().is_none() => Err(TrainError::Copies { data, ranks }),
            _ => Ok(plan),
        }
    }

    /// On one rank of a plan. Collective.
    pub fn new(trained: &Trained, plan: &Plan, threads: usize, comm: Comm) -> Result<NextToken, TrainError> {
        let &Sample::Ids { time, vocab } = &trained.preparation().sample else {
            return Err(TrainError::NoText);
        };
        let (net, spec) = (trained.net(), trained.preparation().spec(Layout::Planes));
        let (mut engine, (fed, whole)) = join(comm, plan, trained.options(threads), |plan| {
            let graph = prediction_graph(net, &spec, 1)?;
            let fed = Fed::new(&AnswerRows::One.made_of(&graph, plan), plan)?;
            Ok((compile_answer(&graph, plan, AnswerRows::One)?, (fed, WholeModel::of(&graph))))
        })?;
        trained.install(&mut engine, &whole)?;
        let input = net.input(&spec, 1, false).name;
        Ok(NextToken { engine, input, fed, time, vocab })
    }

    /// The logits of what comes after `ids`, of which there is at least one; the same bits on all ranks that have the network
    /// together. Collective.
    fn after(&mut self, ids: &[i32]) -> Result<&[f32], TrainError> {
        // The last `time` tokens; what stands behind them cannot be seen by those before.
        let seen = &ids[ids.len().saturating_sub(self.time)..];
        let NextToken { engine, input, fed, time, vocab } = self;
        if engine.has_input(input) {
            let mut window = vec![0; *time];
            window[..seen.len()].copy_from_slice(seen);
            engine.input_i32(input)?.copy_from_slice(&fed.own(input, &window));
        }
        if engine.has_input(AnswerRows::AT) {
            let mut at = vec![0.0; *time];
            at[seen.len() - 1] = 1.0;
            engine.input_f32(AnswerRows::AT)?.copy_from_slice(&fed.own(AnswerRows::AT, &at));
        }
        engine.run()?;
        // A model may have more logits than its text has tokens.
        Ok(&engine.output("logits")?[..*vocab])
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

/// Continues `prompt`, and tells each token as it comes. Collective: all ranks draw the same tokens.
pub fn generate(
    next: &mut NextToken,
    tokenizer: &Tokenizer,
    prompt: &str,
    how: Sampling,
    tell: &mut dyn FnMut(i32),
) -> Result<Vec<i32>, TrainError> {
    let mut ids = tokenizer.encode(prompt);
    if ids.is_empty() {
        // Something must come first: a line break is in every text.
        ids = tokenizer.encode("\n");
    }
    let what = "its prompt or its tokenizer is not that of rank 0; give all the same";
    talk::agree(next.engine.comm(), "comparing prompts", &format!("{ids:?}"), what)?;
    let start = ids.len();
    let mut random = Draw::new(how.seed);
    for _ in 0..how.length {
        let id = choose(next.after(&ids)?, how, &mut random);
        ids.push(id);
        tell(id);
    }
    Ok(ids.split_off(start))
}

/// An id, drawn from logits.
fn choose(logits: &[f32], how: Sampling, random: &mut Draw) -> i32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if how.temperature <= 0.0 {
        return order[0] as i32;
    }
    let n = if how.top == 0 { order.len() } else { how.top.min(order.len()) };
    let best = f64::from(logits[order[0]]);
    let weight = |i: usize| ((f64::from(logits[i]) - best) / how.temperature).exp();
    let total: f64 = order[..n].iter().map(|&i| weight(i)).sum();
    let mut left = random.uniform() * total;
    for &i in &order[..n] {
        left -= weight(i);
        if left < 0.0 {
            return i as i32;
        }
    }
    order[n - 1] as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_logits() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 1f32.ln()];
        let count = |temperature, top| {
            let (mut counts, mut random) = ([0; 4], Draw::new(1));
            for _ in 0..4000 {
                let how = Sampling { length: 1, temperature, top, seed: 0 };
                counts[choose(&logits, how, &mut random) as usize] += 1;
            }
            counts
        };
        let [a, b, c, d] = count(1.0, 0);
        assert!((900..1100).contains(&a) && (1900..2100).contains(&b) && c == 0 && (900..1100).contains(&d));
        assert_eq!(count(0.0, 0), [0, 4000, 0, 0]);
        assert_eq!(count(1.0, 1), [0, 4000, 0, 0]);
        assert_eq!(count(1.0, 2)[3], 0, "of equals the first is among the two likeliest");
    }
}
