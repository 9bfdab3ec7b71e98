//! Optimizers that look at whole tensors, where ranks have parts of them: over the tensor axis, and over the data axis with sharded
//! weights.
//!
//! ```text
//!  measure means                 Adafactor: squares of this rank's rows and columns
//!  all-reduce over tensor        of columns where rows are split, and the other way round
//!  all-reduce over data          if weights are sharded
//!  measure norms                 moments move; squares of parameters and of their step
//!  all-reduce over tensor, over data
//!  update
//! ```
//!
//! No tensor is put together for it: LAMB exchanges two numbers for each split tensor, and Adafactor beside these one for each
//! row or column that several ranks have. Where an axis splits nothing there is no exchange. See
//! [`split_sums`](polyreme_graph::split_sums()) for the order of the sums.
//!
//! All ranks along an axis come here with the same tensors, so they make the same exchanges; a rank without samples has
//! gradients like any other by then. If a peer dies, the exchange ends with a report, no parameter has changed, and the run goes
//! on from a checkpoint: moments may have moved.

use polyreme_graph::{Collective, DType, Instr, Optimizer, Region, SumsOf, split_sums};

use crate::schedule::Lowering;

/// What the sums are called.
const SUMS: &str = "sums of split tensors";

/// Measures what these updates need to know of split tensors; gives the updates that use it.
pub(crate) fn measured(lowering: &mut Lowering, optimizer: Optimizer, updates: Vec<Instr>) -> Vec<Instr> {
    let Some(layout) = split_sums(lowering.program.graph(), &optimizer) else { return updates };
    // A program of several steps measures in each of them.
    let known = lowering.program.buffers.iter().position(|b| b.name == SUMS);
    let sums = match known {
        Some(buffer) => Region::Buffer(buffer, 0..layout.len),
        None => lowering.program.buffer(SUMS, DType::F64, layout.len),
    };
    for what in SumsOf::ALL {
        if !layout.measures(what) {
            continue;
        }
        for update in &updates {
            if let Instr::Update { params, grads, .. } = update {
                let (params, grads, sums) = (params.clone(), grads.clone(), sums.clone());
                lowering.push(Instr::Measure { what, params, grads, sums });
            }
        }
        for over in layout.over.iter().filter(|over| over.what == what) {
            let of = sums.part(over.range.clone());
            lowering.program.exchange_now(Collective::AllReduce, over.axis, of);
        }
    }
    let by_sums = |mut update: Instr| {
        if let Instr::Update { sums: by, .. } = &mut update {
            *by = Some(sums.clone());
        }
        update
    };
    updates.into_iter().map(by_sums).collect()
}
