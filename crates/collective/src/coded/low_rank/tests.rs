//! Sums of factors over sockets against their definition in f64.

use std::sync::Arc;

use polyreme_kernels::Isa;
use polyreme_kernels::codec::SumLayout;

use super::*;
use crate::coded::tests::over_sockets;
use crate::comm::Comm;

/// A bias, two matrices with a gap between them, and a bias.
fn layout(rank: usize) -> LowRankLayout {
    let of = |at: usize, dims: &[usize]| LowRankMatrix::of(at, dims, rank).unwrap();
    LowRankLayout::new(rank, 1900, vec![of(10, &[24, 30]), of(760, &[16, 4, 4, 4])])
}

fn numbers(rank: usize, step: usize, len: usize) -> Vec<f32> {
    let of = |i: usize| ((i * 7919 + rank * 104_729 + step * 31) % 2003) as f32 / 1000.0 - 1.0;
    (0..len).map(of).collect()
}

/// One rank's memory of a sum.
struct FactorMemory {
    residual: Vec<f32>,
    room: Vec<f32>,
    factors: Vec<f32>,
    layout: Arc<LowRankLayout>,
}

impl FactorMemory {
    fn new(layout: LowRankLayout) -> FactorMemory {
        let (residual, room) = (vec![0.0; layout.len], vec![0.0; layout.room()]);
        FactorMemory { residual, room, factors: vec![0.0; layout.factors_len()], layout: layout.into() }
    }

    fn sum(&mut self, comm: &mut Comm, mut data: Vec<f32>) -> Vec<f32> {
        let sum = CodedSum {
            span: Span::of(&mut data),
            layout: SumLayout::LowRank(self.layout.clone()),
            residual: Span::of(&mut self.residual),
            coded: Span::of(&mut self.room),
            factors: Some(Span::of(&mut self.factors)),
            scattered: false,
            isa: Isa::detect(),
        };
        // SAFETY: the memory stays until the ticket was waited for.
        let ticket = unsafe { comm.start(Work::CodedSum(sum)) };
        comm.wait(ticket).unwrap();
        data
    }
}

/// The definition, in f64: the sum of each matrix, projected on the columns that its product with `q` spans. Leaves the next `q`.
fn projected(m: &LowRankMatrix, sum: &[f64], q: &mut [f64]) -> Vec<f64> {
    let (rows, cols) = (m.rows, m.cols);
    let mut p: Vec<Vec<f64>> = Vec::new();
    for q in q.chunks(cols) {
        let dot = |i: usize| sum[i * cols..][..cols].iter().zip(q).map(|(a, b)| a * b).sum::<f64>();
        let mut column: Vec<f64> = (0..rows).map(dot).collect();
        for other in &p {
            let share: f64 = column.iter().zip(other).map(|(a, b)| a * b).sum();
            column.iter_mut().zip(other).for_each(|(x, y)| *x -= share * y);
        }
        let length = column.iter().map(|x| x * x).sum::<f64>().sqrt();
        p.push(column.iter().map(|x| x / length).collect());
    }
    for (q, p) in q.chunks_mut(cols).zip(&p) {
        q.iter_mut().enumerate().for_each(|(c, q)| *q = (0..rows).map(|i| sum[i * cols + c] * p[i]).sum());
    }
    let at = |i: usize, c: usize| p.iter().zip(q.chunks(cols)).map(|(p, q)| p[i] * q[c]).sum::<f64>();
    (0..rows * cols).map(|k| at(k / cols, k % cols)).collect()
}

#[test]
fn sums_are_projections_and_all_ranks_have_the_same() {
    let steps = 3;
    for (ranks, rank) in [(2, 1), (3, 2), (5, 4)] {
        let of_ranks = over_sockets(ranks, |mut comm| {
            let (place, mut memory) = (comm.rank(), FactorMemory::new(layout(rank)));
            let before = comm.sent_bytes().unwrap();
            let one = |step| memory.sum(&mut comm, numbers(place, step, 1900));
            let sums: Vec<_> = (0..steps).map(one).collect();
            (sums, memory, comm.sent_bytes().unwrap() - before)
        });
        let (layout, first) = (layout(rank), &of_ranks[0]);
        assert!(of_ranks.iter().all(|r| r.0 == first.0 && r.1.factors == first.1.factors), "the same bits");
        // An all-reduce sends each number to all but one rank, twice. If sockets were slow to answer when the group began, it goes by recursive
        // doubling: every rank of a power of two sends all numbers in each round, the others one message each way; or all send all to all.
        let sent: u64 = of_ranks.iter().map(|r| r.2).sum();
        let rounds = ranks.ilog2() as usize;
        let doubling = (rounds << rounds) + 2 * (ranks - (1 << rounds));
        let each = (steps * 4 * layout.sent_len()) as u64;
        let known = [2 * (ranks - 1), doubling, ranks * (ranks - 1)].map(|times| each * times as u64);
        assert!(known.contains(&sent), "{sent} bytes over {ranks} ranks, not one of {known:?}");
        let mut begin = vec![0.0; layout.factors_len()];
        let mut lefts = vec![0.0; layout.first_len()];
        parts(&layout, &mut lefts, &mut begin).for_each(|(m, _, q)| m.begin(q));
        let mut q: Vec<f64> = begin.iter().map(|x| f64::from(*x)).collect();
        let mut lost = vec![0.0f64; 1900];
        for (step, got) in first.0.iter().enumerate() {
            let all: Vec<_> = (0..ranks).map(|r| numbers(r, step, 1900)).collect();
            let sum = |i: usize| all.iter().map(|x| f64::from(x[i])).sum::<f64>();
            for i in layout.plain.iter().flat_map(Clone::clone) {
                assert!((f64::from(got[i]) - sum(i)).abs() < 1e-5, "{i} as it is");
            }
            let mut at = 0;
            for m in &layout.matrices {
                let of: Vec<f64> = (m.at..m.at + m.len()).map(|i| sum(i) + lost[i]).collect();
                let want = projected(m, &of, &mut q[at..at + m.right_len()]);
                at += m.right_len();
                for (k, want) in want.iter().enumerate() {
                    let x = f64::from(got[m.at + k]);
                    assert!((x - want).abs() < 1e-3, "step {step}, {k}: {x} for {want}");
                    lost[m.at + k] = of[k] - want;
                }
            }
        }
        // What all keep together is what the sums lack.
        for m in &layout.matrices {
            for i in m.at..m.at + m.len() {
                let kept: f64 = of_ranks.iter().map(|r| f64::from(r.1.residual[i])).sum();
                assert!((kept - lost[i]).abs() < 1e-3);
            }
        }
    }
}

/// Over many sums nothing is lost: a gradient that stays the same arrives whole.
#[test]
fn what_is_lost_comes_later() {
    let (ranks, steps) = (2, 300);
    let means = over_sockets(ranks, |mut comm| {
        let (place, mut memory) = (comm.rank(), FactorMemory::new(layout(2)));
        let mut total = vec![0.0f64; 1900];
        for _ in 0..steps {
            let sum = memory.sum(&mut comm, numbers(place, 0, 1900));
            total.iter_mut().zip(sum).for_each(|(t, s)| *t += f64::from(s));
        }
        total.iter().map(|t| t / steps as f64).collect::<Vec<_>>()
    });
    let all: Vec<_> = (0..ranks).map(|r| numbers(r, 0, 1900)).collect();
    let want: Vec<f64> = (0..1900).map(|i| all.iter().map(|x| f64::from(x[i])).sum()).collect();
    let square = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error =
        square(&mut means[0].iter().zip(&want).map(|(a, b)| a - b)) / square(&mut want.iter().copied());
    assert!(error < 0.1, "{error}");
}

/// A number that is not finite shows on all ranks, and the next sum knows nothing of it.
#[test]
fn what_is_not_finite_shows_and_leaves_nothing() {
    over_sockets(2, |mut comm| {
        let (place, mut memory) = (comm.rank(), FactorMemory::new(layout(2)));
        let mut data = numbers(place, 0, 1900);
        data[200] = if place == 1 { f32::NAN } else { 1.0 };
        let sum = memory.sum(&mut comm, data);
        let m = memory.layout.matrices[0];
        assert!(sum[m.at..m.at + m.len()].iter().all(|x| x.is_nan()));
        assert!(sum[m.at + m.len()..].iter().all(|x| x.is_finite()));
        assert!(memory.residual[m.at..m.at + m.len()].iter().all(|x| *x == 0.0));
        let next = memory.sum(&mut comm, numbers(place, 1, 1900));
        assert!(next.iter().all(|x| x.is_finite()));
    });
}
