//! Coded sums over sockets against sums in f64, and what they send against what is stated.

use std::sync::Arc;
use std::thread;

use polyreme_kernels::Isa;
use polyreme_kernels::codec::BlockCodec;
use polyreme_net::loopback;

use super::*;

fn numbers(rank: usize, step: usize, len: usize) -> Vec<f32> {
    let of = |i: usize| ((i * 7919 + rank * 104_729 + step * 31) % 2003) as f32 / 1000.0 - 1.0;
    (0..len).map(of).collect()
}

/// One rank's memory of a sum.
struct SumMemory {
    data: Vec<f32>,
    residual: Vec<f32>,
    coded: Vec<u8>,
    layout: Arc<CodedLayout>,
}

impl SumMemory {
    fn new(codec: BlockCodec, len: usize, ranks: usize, rank: usize) -> SumMemory {
        let layout = Arc::new(CodedLayout::even(codec, len, ranks, rank));
        SumMemory { data: Vec::new(), residual: vec![0.0; len], coded: vec![0; layout.room()], layout }
    }

    fn sum(&mut self, comm: &mut Comm, data: Vec<f32>, scattered: bool) -> Vec<f32> {
        self.data = data;
        let sum = CodedSum {
            span: Span::of(&mut self.data),
            layout: SumLayout::Blocks(self.layout.clone()),
            residual: Span::of(&mut self.residual),
            coded: Span::of(&mut self.coded),
            factors: None,
            scattered,
            isa: Isa::detect(),
        };
        // SAFETY: the memory stays until the ticket was waited for.
        let ticket = unsafe { comm.start(Work::CodedSum(sum)) };
        comm.wait(ticket).unwrap();
        std::mem::take(&mut self.data)
    }
}

pub(super) fn over_sockets<R: Send>(ranks: usize, run: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let run = &run;
    thread::scope(|scope| {
        let links = loopback::links(ranks).unwrap().into_iter();
        let ranks: Vec<_> = links.map(|links| scope.spawn(move || run(Comm::tcp(links).unwrap()))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What coding twice may lose of a sum of numbers up to 1.
fn tolerance(codec: BlockCodec, ranks: usize) -> f64 {
    let each = match codec {
        BlockCodec::Bf16 => 1.0 / 256.0,
        BlockCodec::F16 => 1.0 / 2048.0,
        BlockCodec::Int8 => 0.6 / 127.0,
        BlockCodec::TopK { ppm: 1_000_000 } => 1e-6,
        // Next to nothing of a number arrives at once.
        BlockCodec::OneBit | BlockCodec::TopK { .. } => 2.0,
    };
    2.0 * ranks as f64 * each
}

#[test]
fn all_ranks_get_the_same_sum() {
    let all = BlockCodec::ALL.into_iter().chain([BlockCodec::TopK { ppm: 1_000_000 }]);
    let cases: Vec<_> = all.map(|codec| [0, 1, 1000, 1024, 10_007].map(|len| (codec, len))).collect();
    for ranks in [1, 2, 3, 5] {
        let of_ranks = over_sockets(ranks, |mut comm| {
            let mut done = Vec::new();
            for (codec, len) in cases.concat() {
                let (rank, before) = (comm.rank(), comm.sent_bytes().unwrap());
                let mut memory = SumMemory::new(codec, len, ranks, rank);
                let sum = memory.sum(&mut comm, numbers(rank, 0, len), false);
                let sent = comm.sent_bytes().unwrap() - before;
                done.push((sum, sent, memory.layout.sent_bytes(rank, false) as u64));
            }
            done
        });
        for (k, (codec, len)) in cases.concat().into_iter().enumerate() {
            let (name, sums) = (codec.name(), of_ranks.iter().map(|done| &done[k].0));
            assert!(sums.clone().all(|sum| *sum == of_ranks[0][k].0), "{name} over {ranks}");
            // Which rank passes on what of a gather depends on the algorithm; the sum does not.
            let (sent, stated) = of_ranks.iter().fold((0, 0), |(a, b), done| (a + done[k].1, b + done[k].2));
            assert!(ranks == 1 || sent == stated, "{name} over {ranks}: {sent} for {stated}");
            let all: Vec<_> = (0..ranks).map(|r| numbers(r, 0, len)).collect();
            for (i, sum) in of_ranks[0][k].0.iter().enumerate() {
                let want: f64 = all.iter().map(|x| f64::from(x[i])).sum();
                let near = (f64::from(*sum) - want).abs() <= tolerance(codec, ranks);
                assert!(near, "{name} over {ranks}, [{i}] of {len}: {sum} for {want}");
            }
        }
    }
}

/// Each owner has the sum of its part, of numbers that were coded once.
#[test]
fn parts_are_sums_of_what_was_coded_once() {
    let (ranks, len) = (3, 10_007);
    for codec in BlockCodec::ALL {
        over_sockets(ranks, |mut comm| {
            let rank = comm.rank();
            let mut memory = SumMemory::new(codec, len, ranks, rank);
            let sum = memory.sum(&mut comm, numbers(rank, 0, len), true);
            let all: Vec<_> = (0..ranks).map(|r| numbers(r, 0, len)).collect();
            for i in memory.layout.cuts[rank]..memory.layout.cuts[rank + 1] {
                let want: f64 = all.iter().map(|x| f64::from(x[i])).sum();
                assert!(
                    (f64::from(sum[i]) - want).abs() <= tolerance(codec, ranks) / 2.0,
                    "{}",
                    codec.name()
                );
            }
        });
    }
}

/// Over many steps nothing is lost: the sum of sums tends to the sum of everything.
#[test]
fn what_is_lost_comes_later() {
    let (ranks, len, steps) = (3, 3000, 40);
    for codec in [BlockCodec::Bf16, BlockCodec::F16, BlockCodec::Int8] {
        let totals = over_sockets(ranks, |mut comm| {
            let rank = comm.rank();
            let mut memory = SumMemory::new(codec, len, ranks, rank);
            let mut total = vec![0.0f64; len];
            for step in 0..steps {
                let sum = memory.sum(&mut comm, numbers(rank, step, len), false);
                total.iter_mut().zip(sum).for_each(|(t, s)| *t += f64::from(s));
            }
            total
        });
        let all: Vec<_> = (0..steps * ranks).map(|k| numbers(k % ranks, k / ranks, len)).collect();
        for (i, total) in totals[0].iter().enumerate() {
            let want: f64 = all.iter().map(|x| f64::from(x[i])).sum();
            // The error of all steps is that of one.
            let near = (total - want).abs() <= tolerance(codec, ranks) + 1e-3;
            assert!(near, "{}[{i}]: {total} for {want}", codec.name());
        }
    }
}

/// Two hosts with two ranks each: leaders exchange codes, all get the same.
#[test]
fn hosts_add_up_in_memory_first() {
    let hosts = vec![vec![0, 1], vec![2, 3]];
    let mut ends = Vec::new();
    for (host, links) in hosts.iter().zip(loopback::links(2).unwrap()) {
        let mut between = Some(Linked::over(links));
        for (rank, inside) in host.iter().zip(Comm::local(2)) {
            ends.push(TwoLevel::new(*rank, hosts.clone(), inside, between.take()));
        }
    }
    let len = 5000;
    let sums: Vec<Vec<f32>> = thread::scope(|scope| {
        let run = |mut levels: TwoLevel<Comm, Linked>| {
            let rank = levels.rank();
            let mut memory = SumMemory::new(BlockCodec::Int8, len, 4, rank);
            memory.data = numbers(rank, 0, len);
            let sum = CodedSum {
                span: Span::of(&mut memory.data),
                layout: SumLayout::Blocks(memory.layout.clone()),
                residual: Span::of(&mut memory.residual),
                coded: Span::of(&mut memory.coded),
                factors: None,
                scattered: false,
                isa: Isa::detect(),
            };
            // SAFETY: the memory stays until this returns.
            unsafe { over_levels(&mut levels, &sum) }.unwrap();
            let sent = levels.leading().map_or(0, Linked::sent_bytes);
            let want = CodedLayout::even(BlockCodec::Int8, len, 2, rank / 2).sent_bytes(rank / 2, false);
            assert_eq!(sent, if rank.is_multiple_of(2) { want as u64 } else { 0 });
            memory.data
        };
        let ranks: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || run(end))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(sums.iter().all(|sum| *sum == sums[0]));
    let all: Vec<_> = (0..4).map(|r| numbers(r, 0, len)).collect();
    for i in 0..len {
        let want: f64 = all.iter().map(|x| f64::from(x[i])).sum();
        assert!((f64::from(sums[0][i]) - want).abs() <= tolerance(BlockCodec::Int8, 4));
    }
}

/// Codecs that send next to nothing of a number need more sums: the mean of many tends to what was meant.
#[test]
fn what_is_left_out_comes_later() {
    let (ranks, len, steps) = (3, 3000, 400);
    for codec in [BlockCodec::OneBit, BlockCodec::TopK { ppm: 50_000 }] {
        let totals = over_sockets(ranks, |mut comm| {
            let rank = comm.rank();
            let mut memory = SumMemory::new(codec, len, ranks, rank);
            let mut total = vec![0.0f64; len];
            for _ in 0..steps {
                let sum = memory.sum(&mut comm, numbers(rank, 0, len), false);
                total.iter_mut().zip(sum).for_each(|(t, s)| *t += f64::from(s) / steps as f64);
            }
            total
        });
        assert!(totals.iter().all(|total| *total == totals[0]));
        let all: Vec<_> = (0..ranks).map(|r| numbers(r, 0, len)).collect();
        let (mut wrong, mut whole) = (0.0, 0.0);
        for (i, total) in totals[0].iter().enumerate() {
            let want: f64 = all.iter().map(|x| f64::from(x[i])).sum();
            wrong += (total - want).powi(2);
            whole += want.powi(2);
        }
        assert!(wrong.sqrt() < 0.1 * whole.sqrt(), "{}: {wrong} of {whole}", codec.name());
    }
}
