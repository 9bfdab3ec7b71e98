//! How long a sum takes in a format here: the link and the codec together, as ranks would use them.
//!
//! A sum of 1 MiB, of a matrix, is what a bucket of gradients is by default. It is run a few times in each format, so links that shape their
//! traffic have let their bursts pass after the first.

use std::time::Instant;

use polyreme_kernels::Isa;
use polyreme_kernels::codec::{CodedLayout, LowRankLayout, LowRankMatrix, SumLayout, WireCodec};
use polyreme_net::Report;

use crate::comm::Comm;
use crate::element::Reduce;
use crate::work::{CodedSum, Span, Work};

/// Rows and columns of the matrix.
const SIDE: usize = 512;

/// How many sums are timed, after one that is not.
const TIMED: usize = 3;

/// Bytes of the numbers that [`sum_seconds`] sums.
pub const TRIAL_BYTES: usize = SIDE * SIDE * size_of::<f32>();

/// The shortest time that a sum of [`TRIAL_BYTES`] takes in this format, or as f32, on the rank on which it takes longest. Collective; all
/// ranks get the same number.
pub fn sum_seconds(comm: &mut Comm, codec: Option<WireCodec>, isa: Isa) -> Result<f64, Report> {
    let len = SIDE * SIDE;
    let (rank, ranks) = (comm.rank(), comm.size());
    let mut data: Vec<f32> = (0..len).map(|i| (i * 7919 % 2003) as f32 / 1000.0 - 1.0).collect();
    let mut residual = vec![0.0f32; len];
    let (mut bytes, mut floats, mut factors) = (Vec::new(), Vec::new(), Vec::new());
    let layout = codec.map(|codec| match codec {
        WireCodec::Blocks(codec) => {
            let layout = CodedLayout::even(codec, len, ranks, rank);
            bytes = vec![0u8; layout.room()];
            SumLayout::Blocks(layout.into())
        }
        WireCodec::LowRank { rank } => {
            let matrix = LowRankMatrix::of(0, &[SIDE, SIDE], rank);
            let layout = LowRankLayout::new(rank, len, matrix.into_iter().collect());
            (floats, factors) = (vec![0.0f32; layout.room()], vec![0.0f32; layout.factors_len()]);
            SumLayout::LowRank(layout.into())
        }
    });
    let mut best = f64::INFINITY;
    for k in 0..=TIMED {
        let span = Span::of(&mut data);
        let work = match &layout {
            None => Work::AllReduce(span, Reduce::Sum),
            Some(layout) => Work::CodedSum(CodedSum {
                span,
                layout: layout.clone(),
                residual: Span::of(&mut residual),
                coded: if bytes.is_empty() { Span::of(&mut floats) } else { Span::of(&mut bytes) },
                factors: Some(Span::of(&mut factors)),
                scattered: false,
                isa,
            }),
        };
        comm.barrier()?;
        let began = Instant::now();
        // SAFETY: what the work names lives until it was waited for, and nothing else accesses it.
        let ticket = unsafe { comm.start(work) };
        comm.wait(ticket)?;
        if k > 0 {
            best = best.min(began.elapsed().as_secs_f64());
        }
        // Sums of sums would leave the range of f32.
        data.iter_mut().for_each(|x| *x /= ranks as f32);
    }
    let mut slowest = [best];
    comm.all_reduce(&mut slowest, Reduce::Max)?;
    Ok(slowest[0])
}
