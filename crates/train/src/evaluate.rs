//! Evaluation of a whole set, by one rank or by many.
//!
//! The set is cut into blocks by position ([`block_samples`](crate::judge::block_samples)). Each rank judges a run of
//! blocks, and the sums of all are put together: counts are whole numbers, and losses are added up block by block in
//! the order of the set. So every rank has the same scores, and they are those of one rank, bit for bit.

use std::borrow::BorrowMut;
use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::{Comm, Reduce};
use polyreme_data::{
    Batch, BatchValues, Dataset, Loader, LoaderOptions, Order, Span, Target, Transform, Values, spans,
};
use polyreme_exec::Engine;

use crate::error::TrainError;
use crate::judge::Judge;
use crate::metrics::Scores;

/// Batches that are read ahead of an evaluation.
pub(crate) const EVALUATION_PREFETCH: usize = 2;

/// The scores of `set` with the judge's weights. `threads` loader threads work ahead.
pub fn evaluate<E: BorrowMut<Engine>>(
    judge: &mut Judge<E>,
    set: &Arc<dyn Dataset>,
    transform: &Transform,
    threads: usize,
) -> Result<Scores, TrainError> {
    let blocks = 0..n_blocks(judge, set.as_ref());
    Ok(evaluate_blocks(judge, set, transform, threads, blocks)?.whole())
}

/// Into how many blocks a set is cut.
pub fn n_blocks<E: BorrowMut<Engine>>(judge: &Judge<E>, set: &dyn Dataset) -> usize {
    set.len().div_ceil(judge.batch())
}

/// What one rank found out.
#[derive(Clone, PartialEq, Debug)]
pub struct PartScores {
    /// Counts, without losses.
    counted: Scores,
    /// By block of the whole set: the sum of its losses, and their number. Zeros for blocks of others.
    losses: Vec<f64>,
}

/// Judges some of the blocks of `set`.
pub fn evaluate_blocks<E: BorrowMut<Engine>>(
    judge: &mut Judge<E>,
    set: &Arc<dyn Dataset>,
    transform: &Transform,
    threads: usize,
    blocks: Range<usize>,
) -> Result<PartScores, TrainError> {
    let is_class = matches!(set.spec().target, Target::Class { .. });
    let mut counted = Scores::new(judge.classes(), is_class);
    if !is_class {
        counted = counted.next_token();
    }
    let (n, len) = (judge.batch(), set.len());
    let mut losses = vec![0.0; 2 * n_blocks(judge, set.as_ref())];
    let options = LoaderOptions { batch_max: n, threads, prefetch: EVALUATION_PREFETCH, seed: 0 };
    let order = Order::in_order(len);
    let plan = blocks.clone().map(move |b| Span { order, start: b * n, len: n.min(len - b * n) });
    for (batch, block) in Loader::start(set.clone(), transform.clone(), plan, options).zip(blocks) {
        let batch = batch?;
        let (logits, loss) = judge.run(values(&batch), &batch.labels)?;
        counted.add(logits, &batch.labels, 0.0, 0.0);
        let weight = batch.labels.len() as f64;
        losses[2 * block..][..2].copy_from_slice(&[loss * weight, weight]);
    }
    Ok(PartScores { counted, losses })
}

impl PartScores {
    /// The scores of all ranks together. Collective.
    pub fn gather(mut self, comm: &mut Comm) -> Result<Scores, TrainError> {
        // Every block is one rank's: the others add zeros, which changes nothing.
        comm.all_reduce(&mut self.losses, Reduce::Sum)?;
        let mut counts = self.counted.counts();
        comm.all_reduce(&mut counts, Reduce::Sum)?;
        self.counted.set_counts(&counts);
        Ok(self.whole())
    }

    /// The scores, if this rank has judged everything.
    fn whole(mut self) -> Scores {
        self.losses.chunks_exact(2).for_each(|block| self.counted.add_losses(block[0], block[1]));
        self.counted
    }
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
