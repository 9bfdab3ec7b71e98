//! Real connections between threads: every algorithm, many ranks and lengths, against closed forms.

use std::fmt::Debug;
use std::thread;

use half::{bf16, f16};
use polyreme_net::frame::FrameOp;
use polyreme_net::{Cause, loopback};

use super::choose::candidates;
use super::*;

const RANKS: [usize; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16];
const LENGTHS: [usize; 5] = [0, 1, 3, 1000, 100_003];

/// Runs the same function at every rank, and returns what each returns.
pub(crate) fn on_all<R: Send>(ranks: usize, run: impl Fn(&mut Linked) -> R + Sync) -> Vec<R> {
    let run = &run;
    thread::scope(|scope| {
        let ranks: Vec<_> = loopback::links(ranks)
            .unwrap()
            .into_iter()
            .map(|links| scope.spawn(move || run(&mut Linked::over(links))))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Element `i` of rank `r`: sums over 16 ranks are exact in every type.
fn value(r: usize, i: usize) -> u8 {
    ((7 * r + 3 * i) % 8) as u8
}

/// The reduction of all elements `i`.
fn reduced(n: usize, i: usize, reduce: Reduce) -> u8 {
    let values = (0..n).map(|r| value(r, i));
    match reduce {
        Reduce::Sum => values.sum(),
        Reduce::Max => values.max().unwrap(),
        Reduce::Min => values.min().unwrap(),
    }
}

/// Uneven cuts, some of them empty.
fn cuts(n: usize, count: usize) -> Cuts {
    let mut cuts: Vec<usize> = (0..=n).map(|r| count * (r * r) / (n * n)).collect();
    if n > 2 {
        cuts[1] = 0;
    }
    cuts.into()
}

/// All operations with reductions at one rank, on elements that `make` makes.
fn check<T: Element + PartialEq + Debug>(
    linked: &mut Linked,
    count: usize,
    make: fn(u8) -> T,
    reduce: Reduce,
) {
    let (r, n) = (linked.rank(), linked.size());
    let cuts = cuts(n, count);
    let mine = || (0..count).map(|i| make(value(r, i))).collect::<Vec<T>>();
    let all: Vec<T> = (0..8).map(|i| make(reduced(n, i, reduce))).collect();
    let has = |data: &[T], from: usize, what: &str| {
        let wrong = data.iter().enumerate().find(|(i, x)| **x != all[(from + i) % 8]);
        assert_eq!(wrong, None, "{what} at rank {r} of {n}, {count} elements");
    };
    for &algorithm in candidates(FrameOp::AllReduce) {
        linked.set_algorithm(Some(algorithm));
        let mut data = mine();
        linked.all_reduce(&mut data, reduce).unwrap();
        has(&data, 0, &format!("all-reduce by {algorithm:?}"));
    }
    for &algorithm in candidates(FrameOp::ReduceScatter) {
        linked.set_algorithm(Some(algorithm));
        let mut data = mine();
        linked.reduce_scatter(&mut data, &cuts, reduce).unwrap();
        has(&data[cuts[r]..cuts[r + 1]], cuts[r], &format!("reduce-scatter by {algorithm:?}"));
    }
    for &algorithm in candidates(FrameOp::Reduce) {
        linked.set_algorithm(Some(algorithm));
        for root in [0, n / 2, n - 1] {
            let mut data = mine();
            linked.reduce(&mut data, reduce, root).unwrap();
            if r == root {
                has(&data, 0, &format!("reduce to {root} by {algorithm:?}"));
            }
        }
    }
    linked.set_algorithm(None);
}

#[test]
fn reductions_are_right() {
    for n in RANKS {
        on_all(n, |linked| {
            for count in LENGTHS {
                check(linked, count, f32::from, Reduce::Sum);
                if count > 1000 && n > 5 {
                    continue;
                }
                check(linked, count, f64::from, Reduce::Sum);
                check(linked, count, |x| f16::from_f32(f32::from(x)), Reduce::Sum);
                check(linked, count, |x| bf16::from_f32(f32::from(x)), Reduce::Sum);
                check(linked, count, i32::from, Reduce::Max);
                check(linked, count, i64::from, Reduce::Min);
                check(linked, count, |x| x, Reduce::Sum);
                check(linked, count, |x| x as i8, Reduce::Sum);
            }
        });
    }
}

/// Enough for several blocks of an all-reduce, the last of them as long as the others or not.
#[test]
fn large_data_go_in_blocks() {
    for (n, count) in [(2, 3 << 20), (2, 2_500_001), (3, 4_200_017), (4, 3_333_331), (5, 2_200_003)] {
        on_all(n, |linked| {
            for algorithm in [Algorithm::Ring, Algorithm::Halving] {
                linked.set_algorithm(Some(algorithm));
                let r = linked.rank();
                let mut data: Vec<f32> = (0..count).map(|i| f32::from(value(r, i))).collect();
                linked.all_reduce(&mut data, Reduce::Sum).unwrap();
                let wrong =
                    data.iter().enumerate().find(|(i, x)| **x != f32::from(reduced(n, i % 8, Reduce::Sum)));
                assert_eq!(wrong, None, "{algorithm:?} at rank {r} of {n}, {count} elements");
            }
        });
    }
}

/// Large data are lent to the other ranks of this host: they may be changed as soon as a call has ended, and no
/// algorithm lets a rank overwrite what another one still reads.
#[test]
fn large_data_are_free_after_each_call() {
    for (n, count) in [(2, 1_500_007), (3, 2_000_003), (4, 2_500_001), (6, 1_300_021)] {
        on_all(n, |linked| {
            let r = linked.rank();
            let mut data = vec![0; count];
            for (round, &algorithm) in candidates(FrameOp::AllReduce).iter().flat_map(|a| [a; 4]).enumerate()
            {
                linked.set_algorithm(Some(algorithm));
                data.iter_mut().enumerate().for_each(|(i, x)| *x = (i * (r + 1) + round) as i32);
                linked.all_reduce(&mut data, Reduce::Sum).unwrap();
                let sum = |i: usize| (i * n * (n + 1) / 2 + n * round) as i32;
                let wrong = data.iter().enumerate().find(|(i, x)| **x != sum(*i));
                assert_eq!(wrong, None, "{algorithm:?} at rank {r} of {n} in round {round}");
            }
            linked.set_algorithm(None);
            for (root, what) in (0..n).flat_map(|root| [(root, 1), (root, 2)]) {
                data.fill(if r == root { what } else { 0 });
                linked.broadcast(&mut data, root).unwrap();
                assert!(data.iter().all(|x| *x == what), "broadcast from {root} at rank {r} of {n}");
            }
        });
    }
}

/// Operations that only move data, at one rank.
fn check_moving(linked: &mut Linked, count: usize) {
    let (r, n) = (linked.rank(), linked.size());
    let cuts = cuts(n, count);
    let mark = |r: usize, i: usize| (1000 * r + i) as i32;
    let whole: Vec<i32> = (0..n).flat_map(|r| (cuts[r]..cuts[r + 1]).map(move |i| mark(r, i))).collect();
    for &algorithm in candidates(FrameOp::AllGather) {
        linked.set_algorithm(Some(algorithm));
        let mut data = vec![-1; count];
        data[cuts[r]..cuts[r + 1]].copy_from_slice(&whole[cuts[r]..cuts[r + 1]]);
        linked.all_gather(&mut data, &cuts).unwrap();
        assert!(data == whole, "all-gather by {algorithm:?} at rank {r} of {n}, {count} elements");
    }
    for root in [0, n / 2, n - 1] {
        for &algorithm in candidates(FrameOp::Broadcast) {
            linked.set_algorithm(Some(algorithm));
            let mut data: Vec<i32> = (0..count).map(|i| mark(r, i)).collect();
            linked.broadcast(&mut data, root).unwrap();
            let want = data.iter().enumerate().all(|(i, x)| *x == mark(root, i));
            assert!(want, "broadcast from {root} by {algorithm:?} at rank {r} of {n}");
        }
        let mut into = vec![-1; count];
        let mine = &whole[cuts[r]..cuts[r + 1]];
        linked.gather(mine, (r == root).then_some(&mut into[..]), &cuts, root).unwrap();
        assert!(r != root || into == whole, "gather to {root} of {n}, {count} elements");
        let mut got = vec![-1; mine.len()];
        linked.scatter(&mut got, (r == root).then_some(&whole[..]), &cuts, root).unwrap();
        assert!(got == mine, "scatter from {root} at rank {r} of {n}, {count} elements");
    }
    linked.set_algorithm(None);

    // Rank a sends rank b (a + 2 b) % 5 elements.
    let piece = |a: usize, b: usize| if count == 0 { 0 } else { (a + 2 * b) % 5 * count.div_ceil(100) };
    let pile = |lengths: Vec<usize>| -> Cuts {
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    };
    let send_cuts = pile((0..n).map(|b| piece(r, b)).collect());
    let recv_cuts = pile((0..n).map(|a| piece(a, r)).collect());
    let sent: Vec<i32> = (0..n).flat_map(|b| vec![(100 * r + b) as i32; piece(r, b)]).collect();
    let want: Vec<i32> = (0..n).flat_map(|a| vec![(100 * a + r) as i32; piece(a, r)]).collect();
    let mut got = vec![-1; want.len()];
    linked.all_to_all(&sent, &send_cuts, &mut got, &recv_cuts).unwrap();
    assert!(got == want, "all-to-all at rank {r} of {n}, {count} elements");

    // Down the line and back.
    let mut data = vec![0.0f64; count];
    if r > 0 {
        linked.recv(r - 1, &mut data).unwrap();
    }
    data.iter_mut().for_each(|x| *x += 1.0);
    if r + 1 < n {
        linked.send(r + 1, &data).unwrap();
    }
    assert!(data.iter().all(|x| *x == (r + 1) as f64));
    linked.barrier().unwrap();
}

#[test]
fn data_get_where_they_belong() {
    for n in RANKS {
        on_all(n, |linked| LENGTHS.into_iter().for_each(|count| check_moving(linked, count)));
    }
}

/// Numbers whose sums depend on the order, with NaNs and zeros of both signs.
#[test]
fn all_ranks_get_the_same_bits() {
    for n in [2, 3, 5, 8] {
        for reduce in [Reduce::Sum, Reduce::Max, Reduce::Min] {
            let bits = on_all(n, |linked| {
                let mut all = Vec::new();
                for &algorithm in candidates(FrameOp::AllReduce) {
                    linked.set_algorithm(Some(algorithm));
                    let r = linked.rank();
                    let number = |i: usize| match (r + i) % 11 {
                        0 => f32::from_bits(0x7fc0_0000 + r as u32),
                        1 => -0.0,
                        2 => 0.0,
                        k => (k as f32 * 1e5f32.powi(r as i32 % 3 - 1)).sin(),
                    };
                    let mut data: Vec<f32> = (0..997).map(number).collect();
                    linked.all_reduce(&mut data, reduce).unwrap();
                    all.extend(data.iter().map(|x| x.to_bits()));
                }
                all
            });
            assert!(bits.iter().all(|b| *b == bits[0]), "{n} ranks, {reduce:?}");
        }
    }
}

/// No rank leaves a barrier before all have entered.
#[test]
fn a_barrier_holds_everybody() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for n in RANKS {
        let came = AtomicUsize::new(0);
        on_all(n, |linked| {
            for round in 1..=20 {
                came.fetch_add(1, Ordering::SeqCst);
                linked.barrier().unwrap();
                assert!(came.load(Ordering::SeqCst) >= round * n);
            }
        });
    }
}

/// A rank that leaves in the middle is named by all the others, whatever they were doing.
#[test]
fn a_rank_that_is_lost_is_named() {
    for &algorithm in candidates(FrameOp::AllReduce) {
        let reports = on_all(4, |linked| {
            linked.set_algorithm(Some(algorithm));
            linked.set_step(3);
            let mut data = vec![1.0f32; 300_000];
            linked.all_reduce(&mut data, Reduce::Sum).unwrap();
            if linked.rank() == 2 {
                return None;
            }
            Some(linked.all_reduce(&mut data, Reduce::Sum).unwrap_err())
        });
        for report in reports.into_iter().flatten() {
            assert!(report.rank == 2 && report.cause == Cause::Gone, "{algorithm:?}: {report}");
            assert_eq!((report.step, report.op.as_str()), (3, "all-reduce"));
        }
    }
}

/// One rank calls another operation than the others.
#[test]
fn a_rank_that_disagrees_is_found() {
    type Other = fn(&mut Linked) -> Result<(), Report>;
    let rows: [(&str, Other); 4] = [
        ("it is in broadcast of 100", |linked| linked.broadcast(&mut [0.0f32; 100], 1)),
        ("all-reduce of 101 elements", |linked| linked.all_reduce(&mut [0.0f32; 101], Reduce::Sum)),
        ("elements of type 4", |linked| linked.all_reduce(&mut [0i32; 100], Reduce::Sum)),
        ("failed: out of luck", |linked| {
            linked.fail("out of luck");
            linked.barrier()
        }),
    ];
    for (says, other) in rows {
        let ends = on_all(2, |linked| {
            if linked.rank() == 1 {
                other(linked)
            } else {
                linked.all_reduce(&mut [0.0f32; 100], Reduce::Sum)
            }
        });
        let report = ends[0].clone().unwrap_err();
        assert!(report.rank == 1 && report.to_string().contains(says), "{report}");
    }
}

/// Ranks that disagree on an operation of the same name and length: they would compute wrong sums, or mix up the data
/// of two operations.
#[test]
fn ranks_that_mean_another_reducer_root_cuts_or_algorithm_are_told_so() {
    type Call = fn(&mut Linked, usize) -> Result<(), Report>;
    let rows: [(&str, Call); 4] = [
        ("reducer 1", |linked, odd| linked.all_reduce(&mut [1.0f32; 100], [Reduce::Sum, Reduce::Max][odd])),
        // Both send and neither receives: it is found by what comes next.
        ("it is in broadcast", |linked, odd| {
            linked.broadcast(&mut [1.0f32; 100], odd)?;
            linked.broadcast(&mut [1.0f32; 100], 0)?;
            linked.barrier()
        }),
        ("cuts", |linked, odd| {
            let cuts = [[0, 40, 80], [20, 60, 100]][odd];
            linked.reduce_scatter(&mut [1.0f32; 100], &cuts.into(), Reduce::Sum)
        }),
        ("algorithm 4", |linked, odd| {
            linked.set_algorithm(Some([Algorithm::Doubling, Algorithm::Tree][odd]));
            linked.all_reduce(&mut [1.0f32; 100], Reduce::Sum)
        }),
    ];
    for (says, call) in rows {
        let ends = on_all(2, |linked| call(linked, linked.rank()));
        for end in ends {
            let report = end.expect_err(says).to_string();
            assert!(report.contains("disagrees with the others") && report.contains(says), "{report}");
        }
    }
}

/// The trees of the roots 0 and 2 both have rank 3 below rank 2: what rank 2 sends as a root arrives where the data of rank 0 are
/// expected, in the same operation with the same length. Only the root in the header tells them apart.
#[test]
fn a_rank_that_gives_its_data_as_another_root_is_found_by_who_gets_them() {
    let all = std::sync::Barrier::new(4);
    let ends = on_all(4, |linked| {
        let rank = linked.rank();
        let end = linked.broadcast(&mut [rank as i64; 100], if rank == 2 { 2 } else { 0 });
        // No connection is closed before all ranks get here.
        all.wait();
        end
    });
    let report = ends[3].as_ref().expect_err("its parent means another root").to_string();
    assert!(report.contains("rank 2 on localhost disagrees with the others"), "{report}");
    assert!(report.contains("root 2,") && report.contains("root 0,"), "{report}");
}

/// Two ranks that both send first: messages that fit into the sockets work, and longer ones are reported by both.
#[test]
fn two_ranks_that_send_to_each_other_are_told_so() {
    let both = std::sync::Barrier::new(2);
    let ends = on_all(2, |linked| {
        let other = 1 - linked.rank();
        let mut exchange = |count: usize| {
            let mut data = vec![linked.rank() as u8; count];
            linked.send(other, &data)?;
            linked.recv(other, &mut data)?;
            assert!(data.iter().all(|x| *x == other as u8), "{count} elements");
            Ok::<_, Report>(())
        };
        exchange(1000).unwrap();
        let end = exchange(100 << 20);
        // Each finds it on its own, and not by the end of the other.
        both.wait();
        end.unwrap_err().to_string()
    });
    for said in ends {
        let expected = "failed: ranks 0, 1 send to each other and none of them receives; let one";
        assert!(said.starts_with("rank 0 on localhost") && said.contains(expected), "{said}");
    }
}
