//! Sums over ranks that travel in fewer bytes.
//!
//! With `n` ranks and numbers that take `b` bytes as they are coded, each rank owns a part of them:
//!
//! 1. A rank codes its numbers for every other rank's part, and sends each part to its owner: `b (n - 1) / n` bytes.
//! 2. An owner decodes what arrives and adds it to its own numbers, in f32, in the order of ranks.
//! 3. It codes the sum, once, and all ranks gather these codes: `b (n - 1) / n` bytes.
//! 4. Every rank decodes all of them, the owner its own too: so all have the same bits.
//!
//! A number is coded twice on its way whatever the number of ranks. A ring would code it at every hop, and add up `n - 1` errors.
//!
//! # What codes lose
//! Each rank keeps a residual for each number, and adds it to what it codes next. Of a part that another rank owns, that is what
//! step 1 lost; of its own part, what step 3 lost of the sum. The two never meet, so one residual is enough for both.
//!
//! # Several ranks on a host
//! They add up in memory first; the hosts' leaders exchange codes; each tells its host the sum. Only leaders have residuals.
//!
//! # When a rank dies
//! The operations that this is made of end with their report. Residuals may then have changed although no sum arrived; the step
//! is not counted, and a run goes on from a checkpoint, which has residuals of its own.

mod low_rank;
mod trial;

pub use trial::{TRIAL_BYTES, sum_seconds};

use polyreme_kernels::codec::{CodedLayout, SumLayout};
use polyreme_net::Report;

use crate::carrier::elements;
use crate::comm::Comm;
use crate::element::{DType, Reduce};
use crate::links::{Linked, TwoLevel};
use crate::work::{CodedSum, Span, Work};

/// This rank's part of a coded sum; `run` runs the operations that it is made of.
///
/// # Safety
/// The memory that the sum names is valid, and nothing else accesses it meanwhile.
pub(crate) unsafe fn sum(
    of: &CodedSum,
    rank: usize,
    run: &mut dyn FnMut(&Work) -> Result<(), Report>,
) -> Result<(), Report> {
    match &of.layout {
        // SAFETY: the caller's promise.
        SumLayout::Blocks(layout) => unsafe { sum_of_blocks(of, layout, rank, run) },
        // SAFETY: the caller's promise.
        SumLayout::LowRank(layout) => unsafe { low_rank::sum(of, layout, run) },
    }
}

/// A sum of which every number is coded.
///
/// # Safety
/// As [`sum`].
unsafe fn sum_of_blocks(
    sum: &CodedSum,
    layout: &CodedLayout,
    rank: usize,
    run: &mut dyn FnMut(&Work) -> Result<(), Report>,
) -> Result<(), Report> {
    // SAFETY: the caller's promise; these are three different memories.
    let (data, residual, room) =
        unsafe { (elements::<f32>(&sum.span), elements::<f32>(&sum.residual), elements::<u8>(&sum.coded)) };
    let CodedLayout { codec, cuts, send, recv, sums } = layout;
    let (isa, ranks) = (sum.isa, cuts.len() - 1);
    assert!(cuts[ranks] == data.len() && residual.len() == data.len(), "the layout of this sum");
    let part = |q: usize| cuts[q]..cuts[q + 1];
    let (sent, rest) = room.split_at_mut(send[ranks]);
    for q in (0..ranks).filter(|q| *q != rank) {
        let coded = &mut sent[send[q]..send[q + 1]];
        codec.encode(isa, &data[part(q)], &mut residual[part(q)], coded);
    }
    let arrived = &mut rest[..recv[ranks]];
    run(&Work::AllToAll {
        send: bytes(sent),
        send_cuts: send.clone(),
        recv: bytes(arrived),
        recv_cuts: recv.clone(),
    })?;
    for q in (0..ranks).filter(|q| *q != rank) {
        codec.decode_add(isa, &arrived[recv[q]..recv[q + 1]], &mut data[part(rank)]);
    }
    if sum.scattered {
        return Ok(());
    }
    let all = &mut room[..sums[ranks]];
    let coded = &mut all[sums[rank]..sums[rank + 1]];
    codec.encode(isa, &data[part(rank)], &mut residual[part(rank)], coded);
    run(&Work::AllGather(bytes(all), sums.clone()))?;
    for q in 0..ranks {
        codec.decode(isa, &all[sums[q]..sums[q + 1]], &mut data[part(q)]);
    }
    Ok(())
}

/// A coded sum over links.
///
/// # Safety
/// As [`sum`].
pub(crate) unsafe fn over_links(linked: &mut Linked, of: &CodedSum) -> Result<(), Report> {
    let rank = linked.rank();
    if linked.size() == 1 {
        return Ok(());
    }
    // SAFETY: the caller's promise, and the operations work on what it named.
    unsafe { sum(of, rank, &mut |work| linked.work(work)) }
}

/// A coded sum between hosts; inside them numbers are added up in memory. All ranks get all of it.
///
/// # Safety
/// As [`sum`].
pub(crate) unsafe fn over_levels(levels: &mut TwoLevel<Comm, Linked>, of: &CodedSum) -> Result<(), Report> {
    // SAFETY: the caller's promise.
    let data = unsafe { elements::<f32>(&of.span) };
    levels.all_reduce_by(data, Reduce::Sum, |between, data| {
        let (host, hosts) = (between.rank(), between.size());
        if hosts == 1 {
            return Ok(());
        }
        let layout = match &of.layout {
            SumLayout::Blocks(blocks) => {
                SumLayout::Blocks(CodedLayout::even(blocks.codec, data.len(), hosts, host).into())
            }
            SumLayout::LowRank(_) => of.layout.clone(),
        };
        let of = CodedSum { span: Span::of(data), layout, scattered: false, ..of.clone() };
        // SAFETY: the caller's promise; `data` is lent to this closure, and the rest is the leader's alone.
        unsafe { sum(&of, host, &mut |work| between.work(work)) }
    })
}

fn bytes(of: &mut [u8]) -> Span {
    Span { ptr: of.as_mut_ptr(), count: of.len(), dtype: DType::U8 }
}

#[cfg(test)]
pub(crate) mod tests;
