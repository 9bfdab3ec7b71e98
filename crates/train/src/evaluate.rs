//! Evaluation of a whole set, by one rank or by many.
//!
//! The set is cut into blocks by position ([`block_samples`](crate::judge::block_samples)). Each rank of the data axis judges a
//! run of blocks, and the sums of all are put together: counts are whole numbers, and losses are added up block by block in
//! the order of the set. So every rank has the same scores, and the number of data ranks changes no bit of them.

use std::borrow::BorrowMut;
use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::{Comm, Doing, Reduce};
use polyreme_data::{Dataset, Loader, LoaderOptions, Order, Span, Transform, Values, time_of};
use polyreme_exec::Engine;

use crate::error::TrainError;
use crate::judge::Judge;
use crate::loss::IGNORED;
use crate::metrics::Measured;
use crate::share::{counts, share};
use crate::talk;

/// Batches that are read ahead of an evaluation.
pub(crate) const EVALUATION_PREFETCH: usize = 2;

/// The scores of `set` with the judge's weights, the same on all ranks. Ranks of the data axis have blocks in proportion to
/// `weights`, one for each. `threads` loader threads work ahead. Collective.
pub fn evaluate<E: BorrowMut<Engine>>(
    judge: &mut Judge<E>,
    set: &Arc<dyn Dataset>,
    transform: &Transform,
    threads: usize,
    weights: &[f64],
) -> Result<Measured, TrainError> {
    same_set(judge.engine().comm(), set.as_ref())?;
    judge.engine().comm().set_doing(Doing::Evaluating);
    let n = n_blocks(judge, set.as_ref());
    let role = judge.engine().role();
    let (blocks, sharded) = (share(n, weights, role.rank), role.shards_weights());
    let most = counts(n, weights).into_iter().max().unwrap_or(0);
    let idle = most - blocks.len();
    let part = evaluate_blocks(judge, set, transform, threads, blocks)?;
    if sharded {
        (0..idle).try_for_each(|_| judge.idle())?;
    }
    part.gather(judge.engine().comm())
}

/// How many labels of a batch count.
pub(crate) fn n_counted(labels: Values) -> usize {
    match labels {
        Values::I32(labels) => labels.iter().filter(|label| **label != IGNORED).count(),
        labels => labels.len(),
    }
}

/// Ends with a report that names a rank whose set is another: ranks would wait for each other. Collective.
pub(crate) fn same_set(comm: &mut Comm, set: &dyn Dataset) -> Result<(), TrainError> {
    let about = format!("{} {:?}", set.len(), set.spec());
    let what = "its samples are not those of rank 0; give all the same files";
    talk::agree(comm, "comparing samples", &about, what)
}

/// Into how many blocks a set is cut.
fn n_blocks<E: BorrowMut<Engine>>(judge: &Judge<E>, set: &dyn Dataset) -> usize {
    set.len().div_ceil(judge.batch())
}

/// What one rank found out.
#[derive(Clone, PartialEq, Debug)]
struct PartScores {
    /// Counts, without what is added up by blocks.
    counted: Measured,
    /// By block of the whole set: the sum of its losses, their number, and what [`Measured::add`] gives. Zeros for blocks
    /// of others.
    sums: Vec<f64>,
}

/// Judges some of the blocks of `set`.
fn evaluate_blocks<E: BorrowMut<Engine>>(
    judge: &mut Judge<E>,
    set: &Arc<dyn Dataset>,
    transform: &Transform,
    threads: usize,
    blocks: Range<usize>,
) -> Result<PartScores, TrainError> {
    let mut counted = Measured::new(&set.spec().target, judge.outputs(), transform.targets());
    let (n, len) = (judge.batch(), set.len());
    let each = 2 + counted.sums();
    let mut sums = vec![0.0; each * n_blocks(judge, set.as_ref())];
    let options = LoaderOptions { batch_max: n, threads, prefetch: EVALUATION_PREFETCH, seed: 0 };
    let order = Order::in_order(len);
    let by_block = judge.fills_by_block().then(|| set.clone());
    let plan = blocks.clone().map(move |b| {
        let (start, len) = (b * n, n.min(len - b * n));
        let time = by_block.as_ref().and_then(|set| time_of(set.as_ref(), order, start, len));
        Span { order, start, len, time }
    });
    for (batch, block) in Loader::start(set.clone(), transform.clone(), plan, options).zip(blocks) {
        let batch = batch?;
        let labels = batch.labels.values();
        let (counts, counts_loss, own_labels) =
            (judge.counts(), judge.counts_loss(), judge.own_labels(&labels));
        judge.fill_up_to(batch.span.time);
        let (logits, loss) = judge.run(batch.x.values(), labels)?;
        // Of ranks that have a network together, one counts for all.
        if counts {
            let (weight, own) = (n_counted(labels) as f64, &mut sums[each * block..][..each]);
            if counts_loss {
                own[..2].copy_from_slice(&[loss * weight, weight]);
            }
            counted.add(logits, own_labels.values(), &mut own[2..]);
        }
        judge.keep_together(block)?;
    }
    Ok(PartScores { counted, sums })
}

impl PartScores {
    /// The scores of all ranks together. Collective.
    fn gather(mut self, comm: &mut Comm) -> Result<Measured, TrainError> {
        // Every block is one rank's: the others add zeros, which changes nothing.
        comm.all_reduce(&mut self.sums, Reduce::Sum)?;
        let mut counts = self.counted.counts();
        comm.all_reduce(&mut counts, Reduce::Sum)?;
        self.counted.set_counts(&counts);
        Ok(self.whole())
    }

    /// The scores, if there is nothing to be added of other ranks.
    fn whole(mut self) -> Measured {
        let each = 2 + self.counted.sums();
        self.sums
            .chunks_exact(each)
            .for_each(|block| self.counted.add_block(block[0], block[1], &block[2..]));
        self.counted
    }
}
