//! How long a core takes to code and decode numbers that travel between ranks.

use std::time::Instant;

use polyreme_kernels::codec::{LowRankMatrix, WireCodec};
use polyreme_kernels::{Cx, Isa, random};
use polyreme_sim::coding::{CodecTimes, MeasuredCodec};

/// Rows and columns of a matrix of a bucket of 1 MiB.
const SIDE: usize = 512;
/// How often each is measured: the least counts.
const TAKES: usize = 9;
/// Columns of factors by which it is found what each of them takes.
const RANKS: [usize; 2] = [1, 9];

pub(super) fn measure(isa: Isa) -> Vec<MeasuredCodec> {
    let of = |codec: WireCodec| MeasuredCodec { name: codec.name().into(), times: times(codec, isa) };
    WireCodec::USUAL.into_iter().map(of).collect()
}

fn times(codec: WireCodec, isa: Isa) -> CodecTimes {
    let n = SIDE * SIDE;
    let (mut x, mut residual) = (vec![0.0f32; n], vec![0.0f32; n]);
    random::normal(&Cx { isa, ..Cx::serial() }, 1, 0, 0, 0.0, 1.0, &mut x);
    match codec {
        WireCodec::Blocks(codec) => {
            let mut coded = vec![0u8; codec.coded_len(n)];
            let encode_us = least(|| codec.encode(isa, &x, &mut residual, &mut coded)) / n as f64;
            let decode_us = least(|| codec.decode(isa, &coded, &mut x)) / n as f64;
            CodecTimes { encode_us, decode_us }
        }
        WireCodec::LowRank { .. } => {
            let us = RANKS.map(|rank| {
                let m = LowRankMatrix::of(0, &[SIDE, SIDE], rank).expect("much longer than its factors");
                let (mut p, mut q) = (vec![0.0f32; m.left_len()], vec![0.0f32; m.right_len()]);
                let (mut own, mut scratch) = (q.clone(), vec![0.0f32; m.scratch_len()]);
                least(|| {
                    polyreme_kernels::codec::add_to(isa, &mut residual, &x);
                    m.begin(&mut q);
                    m.left(isa, &residual, &q, &mut p, &mut scratch);
                    m.orthogonalise(&mut p);
                    m.right(isa, &residual, &p, &mut q, &mut scratch);
                    own.copy_from_slice(&q);
                    m.expand(isa, &p, [&q, &own], &mut x, &mut residual);
                }) / n as f64
            });
            let encode_us = ((us[1] - us[0]) / (RANKS[1] - RANKS[0]) as f64).max(0.0);
            CodecTimes { encode_us, decode_us: (us[0] - RANKS[0] as f64 * encode_us).max(0.0) }
        }
    }
}

/// The least time of some runs, in microseconds.
fn least(mut run: impl FnMut()) -> f64 {
    let mut us = f64::INFINITY;
    for _ in 0..TAKES {
        let began = Instant::now();
        run();
        us = us.min(began.elapsed().as_secs_f64() * 1e6);
    }
    us
}
