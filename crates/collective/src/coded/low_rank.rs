//! Sums of which matrices travel as thin factors (PowerSGD). The steps and what they keep are described in
//! [`polyreme_kernels::codec::low_rank`]; here is who sends what.
//!
//! # What goes over the wire
//! Two all-reduces of f32, of numbers in the thousands where the bucket has millions:
//!
//! 1. what travels as it is (biases, norms, small matrices), and the left factors of all matrices, in one message;
//! 2. their right factors.
//!
//! All-reduce leaves the same bits on all ranks, and each computes the sum from them in the same way: so all have the same sum, and the same
//! right factors for the next one. The second message is the memory of the factors itself, which stays.
//!
//! # Several ranks on a host
//! They add up in memory first, and the hosts' leaders exchange factors: only they have residuals and factors.
//!
//! # When a rank dies
//! As for other coded sums: residuals and factors may have changed although no sum arrived, and a run goes on from a checkpoint.

use polyreme_kernels::codec::{LowRankLayout, LowRankMatrix, add_to};
use polyreme_net::Report;

use crate::carrier::elements;
use crate::element::Reduce;
use crate::work::{CodedSum, Span, Work};

/// This rank's part of such a sum; `run` runs the operations that it is made of.
///
/// # Safety
/// The memory that the sum names is valid, and nothing else accesses it meanwhile.
pub(super) unsafe fn sum(
    of: &CodedSum,
    layout: &LowRankLayout,
    run: &mut dyn FnMut(&Work) -> Result<(), Report>,
) -> Result<(), Report> {
    let factors = of.factors.as_ref().expect("a sum of factors has memory for them");
    // SAFETY: the caller's promise; these are four different memories.
    let (data, residual, room, factors) = unsafe {
        (
            elements::<f32>(&of.span),
            elements::<f32>(&of.residual),
            elements::<f32>(&of.coded),
            elements::<f32>(factors),
        )
    };
    assert!(data.len() == layout.len && residual.len() == layout.len, "the layout of this sum");
    assert!(factors.len() == layout.factors_len() && room.len() >= layout.room(), "room for factors");
    let isa = of.isa;
    let (first, room) = room.split_at_mut(layout.first_len());
    let (own, scratch) = room.split_at_mut(factors.len());
    let (plain, lefts) = first.split_at_mut(layout.plain_len());
    let mut rest = &mut plain[..];
    for range in &layout.plain {
        let to = rest.split_off_mut(..range.len()).expect("as long as all of them");
        to.copy_from_slice(&data[range.clone()]);
    }
    for (m, p, q) in parts(layout, lefts, factors) {
        let residual = &mut residual[m.at..m.at + m.len()];
        add_to(isa, residual, &data[m.at..m.at + m.len()]);
        m.begin(q);
        m.left(isa, residual, q, p, scratch);
    }
    run(&Work::AllReduce(Span::of(first), Reduce::Sum))?;
    let (plain, lefts) = first.split_at_mut(layout.plain_len());
    let mut finite = Vec::with_capacity(layout.matrices.len());
    for (m, p, q) in parts(layout, lefts, factors) {
        finite.push(m.orthogonalise(p));
        m.right(isa, &residual[m.at..m.at + m.len()], p, q, scratch);
    }
    own.copy_from_slice(factors);
    run(&Work::AllReduce(Span::of(factors), Reduce::Sum))?;
    let mut rest = &*plain;
    for range in &layout.plain {
        let from = rest.split_off(..range.len()).expect("as long as all of them");
        data[range.clone()].copy_from_slice(from);
    }
    let mut own = &*own;
    for ((m, p, q), finite) in parts(layout, lefts, factors).zip(finite) {
        let own = own.split_off(..m.right_len()).expect("as long as all of them");
        let (sum, residual) = (&mut data[m.at..m.at + m.len()], &mut residual[m.at..m.at + m.len()]);
        if finite && q.iter().all(|x| x.is_finite()) {
            m.expand(isa, p, [q, own], sum, residual);
        } else {
            // The same on all ranks: what is not finite shows, and nothing of it stays.
            sum.fill(f32::NAN);
            residual.fill(0.0);
            q.fill(0.0);
        }
    }
    Ok(())
}

/// The matrices of a bucket with their left and right factors.
fn parts<'a>(
    layout: &'a LowRankLayout,
    mut lefts: &'a mut [f32],
    mut rights: &'a mut [f32],
) -> impl Iterator<Item = (&'a LowRankMatrix, &'a mut [f32], &'a mut [f32])> {
    layout.matrices.iter().map(move |m| {
        let left = lefts.split_off_mut(..m.left_len()).expect("as long as all left factors");
        let right = rights.split_off_mut(..m.right_len()).expect("as long as all right factors");
        (m, left, right)
    })
}

#[cfg(test)]
mod tests;
