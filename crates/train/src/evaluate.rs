//! Evaluation of a whole set.

use std::sync::Arc;

use polyreme_data::{
    Batch, BatchValues, Dataset, Loader, LoaderOptions, Order, Target, Transform, Values, spans,
};

use crate::error::TrainError;
use crate::judge::Judge;
use crate::metrics::Scores;

/// The scores of `set` with the judge's weights. `threads` loader threads work ahead.
pub fn evaluate(
    judge: &mut Judge,
    set: &Arc<dyn Dataset>,
    transform: &Transform,
    threads: usize,
) -> Result<Scores, TrainError> {
    let spec = set.spec();
    let is_class = matches!(spec.target, Target::Class { .. });
    let mut scores = Scores::new(judge.classes(), is_class);
    if !is_class {
        scores = scores.next_token();
    }
    let options = LoaderOptions { batch_max: judge.batch(), threads, prefetch: 2, seed: 0 };
    let plan = spans(Order::in_order(set.len()), judge.batch());
    for batch in Loader::start(set.clone(), transform.clone(), plan, options) {
        let batch = batch?;
        let (logits, loss) = judge.run(values(&batch), &batch.labels)?;
        scores.add(logits, &batch.labels, loss, batch.labels.len() as f64);
    }
    Ok(scores)
}

/// A batch's features, lent.
pub fn values(batch: &Batch) -> Values<'_> {
    match &batch.x {
        BatchValues::F32(x) => Values::F32(x),
        BatchValues::I32(x) => Values::I32(x),
    }
}

/// The logits of every label of a set, row by row and in order. `tell` may fail, which ends it.
pub fn logits(
    judge: &mut Judge,
    set: &Arc<dyn Dataset>,
    transform: &Transform,
    tell: &mut dyn FnMut(&[f32]) -> std::io::Result<()>,
) -> Result<(), TrainError> {
    let options = LoaderOptions { batch_max: judge.batch(), threads: 0, prefetch: 1, seed: 0 };
    let plan = spans(Order::in_order(set.len()), judge.batch());
    for batch in Loader::start(set.clone(), transform.clone(), plan, options) {
        let (batch, classes) = (batch?, judge.classes());
        let (rows, _) = judge.run(values(&batch), &batch.labels)?;
        for row in rows.chunks_exact(classes) {
            tell(row).map_err(|source| TrainError::Io { path: "standard output".into(), source })?;
        }
    }
    Ok(())
}
