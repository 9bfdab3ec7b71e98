//! Groups that share memory, as threads and as real processes: every operation, element type, length and number of
//! ranks against closed forms; and the others' reports when a rank is killed or stopped, disagrees or fails.
//!
//! Processes are this test binary, started again with `POLYREME_TEST_RANK` set, running only `one_rank_of_a_group`.

#![allow(clippy::unwrap_used)] // a test that panics is a test that fails

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use polyreme_collective::{Bool, Comm, Cuts, Element, Reduce, ShmSetup};
use polyreme_net::{Alarm, Cause, Report, Segment};
use rustix::process::{Pid, Signal};

const RANKS: [usize; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16];
const LENGTHS: [usize; 5] = [0, 1, 3, 1000, 100_003];

/// Small whole numbers, so that sums are exact in every type.
trait Whole: Element + PartialEq + std::fmt::Debug {
    fn of(x: u32) -> Self;
}
macro_rules! whole {
    ($($t:ty: $of:expr),*) => { $(impl Whole for $t { fn of(x: u32) -> $t { $of(x) } })* };
}
whole!(f32: |x| x as f32, f64: f64::from, f16: |x| f16::from_f32(x as f32), bf16: |x| bf16::from_f32(x as f32),
    i32: |x| x as i32, i64: i64::from, u8: |x| x as u8, i8: |x| x as i8, Bool: |x| Bool::from(x > 0));

/// Element `i` of rank `r`.
fn value(r: usize, i: usize) -> u32 {
    ((i * 7 + r * 3) % 5) as u32
}

fn fill<T: Whole>(r: usize, n: usize) -> Vec<T> {
    (0..n).map(|i| T::of(value(r, i))).collect()
}

/// Uneven, the first ones empty.
fn cuts(n: usize, ranks: usize) -> Cuts {
    (0..=ranks).map(|r| n * r * r / (ranks * ranks)).collect()
}

fn same<T: Whole>(got: &[T], want: impl Fn(usize) -> u32, what: &str) {
    for (i, x) in got.iter().enumerate() {
        assert!(*x == T::of(want(i)), "{what}: element {i} of {} is {x:?}, not {}", got.len(), want(i));
    }
}

/// Every operation of a group, at one length.
fn every_op<T: Whole>(comm: &mut Comm, n: usize) -> Result<(), Report> {
    let (rank, size) = (comm.rank(), comm.size());
    let cuts = cuts(n, size);
    let (from, to) = (cuts[rank], cuts[rank + 1]);
    let all = |i: usize, best: fn(u32, u32) -> u32| (0..size).map(|r| value(r, i)).reduce(best).unwrap();
    for (reduce, best) in [
        (Reduce::Sum, (|a, b| a + b) as fn(u32, u32) -> u32),
        (Reduce::Max, u32::max),
        (Reduce::Min, u32::min),
    ] {
        let mut data = fill::<T>(rank, n);
        comm.all_reduce(&mut data, reduce)?;
        same(&data, |i| all(i, best), "all-reduce");
    }
    let mut data = fill::<T>(rank, n);
    comm.reduce_scatter(&mut data, &cuts, Reduce::Sum)?;
    same(&data[from..to], |i| all(from + i, |a, b| a + b), "reduce-scatter");

    let owner = |i: usize| (0..size).find(|r| (cuts[*r]..cuts[r + 1]).contains(&i)).unwrap_or(rank);
    let mut data = fill::<T>(rank, n);
    comm.all_gather(&mut data, &cuts)?;
    same(&data, |i| value(owner(i), i), "all-gather");

    let root = n % size;
    let mut data = fill::<T>(rank, n);
    comm.broadcast(&mut data, root)?;
    same(&data, |i| value(root, i), "broadcast");

    let (mine, mut whole) = (fill::<T>(rank, to - from), fill::<T>(0, n));
    comm.gather(&mine, (rank == root).then_some(&mut whole[..]), &cuts, root)?;
    if rank == root {
        same(&whole, |i| value(owner(i), i - cuts[owner(i)]), "gather");
    }
    let (mut mine, whole) = (fill::<T>(rank, to - from), fill::<T>(root, n));
    comm.scatter(&mut mine, (rank == root).then_some(&whole[..]), &cuts, root)?;
    same(&mine, |i| value(root, from + i), "scatter");

    // Every rank sends range `r` to rank `r`, which gets its own range from each.
    let (len, recv_cuts) = (to - from, (0..=size).map(|r| r * (to - from)).collect());
    let mut got = fill::<T>(0, len * size);
    comm.all_to_all(&fill::<T>(rank, n), &cuts, &mut got, &recv_cuts)?;
    same(&got, |i| value(i / len, from + i % len), "all-to-all");

    if size > 1 {
        // Around the ring; rank 0 receives last, all others first.
        let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
        let (mine, mut got) = (fill::<T>(rank, n), fill::<T>(rank, n));
        if rank == 0 {
            comm.send(next, &mine)?;
            comm.recv(last, &mut got)?;
        } else {
            comm.recv(last, &mut got)?;
            comm.send(next, &mine)?;
        }
        same(&got, |i| value(last, i), "send and receive");
    }
    comm.barrier()
}

/// The whole grid for one group. Long data of wide types only where they test something new.
fn grid(comm: &mut Comm) -> Result<(), Report> {
    for n in LENGTHS {
        every_op::<f32>(comm, n)?;
        every_op::<u8>(comm, n)?;
        if n < 100_000 || comm.size() <= 4 {
            every_op::<f64>(comm, n)?;
            every_op::<f16>(comm, n)?;
            every_op::<bf16>(comm, n)?;
            every_op::<i32>(comm, n)?;
            every_op::<i64>(comm, n)?;
            every_op::<i8>(comm, n)?;
            every_op::<Bool>(comm, n)?;
        }
    }
    Ok(())
}

/// Memory that others read without a copy: blocks of each rank, and one for all.
fn blocks(comm: &mut Comm) -> Result<(), Report> {
    let (rank, size, n) = (comm.rank(), comm.size(), 300_000);
    let block = comm.block(n * 4 + 64, "a test")?;
    let one = comm.shared_block(n * 4, "a test")?;
    // SAFETY: this rank's own, and used by the others only inside operations.
    let mine = unsafe { std::slice::from_raw_parts_mut(block.ptr().as_ptr().cast::<f32>(), n + 16) };
    assert!(mine.iter().all(|x| *x == 0.0), "blocks are zeroed");
    for (at, len) in [(0, n), (16, n), (3, 1000), (7, 50_000)] {
        let data = &mut mine[at..at + len];
        (0..len).for_each(|i| data[i] = value(rank, i) as f32);
        comm.all_reduce(data, Reduce::Sum)?;
        same(data, |i| (0..size).map(|r| value(r, i)).sum(), "all-reduce in blocks");
        // Rank 0 uses other memory: all ranks use staging.
        let mut other = fill::<f32>(rank, len);
        (0..len).for_each(|i| data[i] = value(rank, i) as f32);
        let data = if rank == 0 { &mut other[..] } else { data };
        comm.all_reduce(data, Reduce::Sum)?;
        same(data, |i| (0..size).map(|r| value(r, i)).sum(), "all-reduce in some blocks");
        comm.broadcast(data, size - 1)?;
    }
    if size > 1 && rank < 2 {
        (0..n).for_each(|i| mine[i] = value(rank, i) as f32);
        if rank == 0 {
            comm.send(1, &mine[..n])?;
        } else {
            comm.recv(0, &mut mine[..n])?;
            same(&mine[..n], |i| value(0, i), "send of a block");
        }
    }
    let (cuts, ptr) = (cuts(n, size), one.ptr().as_ptr().cast::<f32>());
    for turn in 0..3 {
        for i in cuts[rank]..cuts[rank + 1] {
            // SAFETY: inside the block, in the range that is this rank's.
            unsafe { *ptr.add(i) = value(turn, i) as f32 };
        }
        // SAFETY: ranks write to their own ranges only, and not while the operation runs.
        let data = unsafe { std::slice::from_raw_parts_mut(ptr, n) };
        comm.all_gather(data, &cuts)?;
        same(data, |i| value(turn, i), "all-gather in a shared block");
        comm.barrier()?;
    }
    Ok(())
}

/// Sums of numbers that round: in the order of the ranks, bit for bit, whichever algorithm runs.
fn order(comm: &mut Comm) -> Result<(), Report> {
    let value = |r: usize, i: usize| 1.0 / (r * 31 + i % 97 + 1) as f32;
    for n in [10, 1000, 5000, 300_000] {
        let mut data: Vec<f32> = (0..n).map(|i| value(comm.rank(), i)).collect();
        comm.all_reduce(&mut data, Reduce::Sum)?;
        for (i, x) in data.iter().enumerate() {
            let want = (1..comm.size()).fold(value(0, i), |sum, r| sum + value(r, i));
            assert_eq!(x.to_bits(), want.to_bits(), "element {i} of {n}");
        }
    }
    Ok(())
}

/// Operations that are started long before they are waited for.
fn overlapped(comm: &mut Comm) -> Result<(), Report> {
    let (rank, size) = (comm.rank(), comm.size());
    let lens: Vec<usize> = (0..100).map(|k| [1, 10, 5000, 70_000][k % 4]).collect();
    let mut data: Vec<Vec<f32>> = lens.iter().map(|n| fill(rank, *n)).collect();
    let work = |data: &mut Vec<f32>| {
        polyreme_collective::Work::AllReduce(polyreme_collective::Span::of(data), Reduce::Sum)
    };
    // SAFETY: nothing accesses the data before the last one was waited for.
    let tickets: Vec<_> = data.iter_mut().map(|data| unsafe { comm.start(work(data)) }).collect();
    comm.wait(tickets[50])?;
    comm.barrier()?;
    comm.wait(tickets[99])?;
    for data in &data {
        same(data, |i| (0..size).map(|r| value(r, i)).sum(), "overlapped");
    }
    Ok(())
}

/// Runs a scene, which children get by its name.
fn play(scene: &str, comm: &mut Comm) -> Result<(), Report> {
    let rank = comm.rank();
    comm.set_step(7);
    match scene {
        "grid" => grid(comm),
        "blocks" => blocks(comm).and_then(|()| overlapped(comm)).and_then(|()| order(comm)),
        // Ends only with a report: one rank is killed or stopped from outside, in the middle of whatever it does.
        "endless" => {
            let mut data = vec![1.0f32; 200_000];
            comm.barrier()?;
            println!("going");
            loop {
                comm.all_reduce(&mut data, Reduce::Max)?;
                comm.all_reduce(&mut data[..10], Reduce::Max)?;
            }
        }
        "other count" => comm.all_reduce(&mut vec![0.0f32; if rank == 1 { 70_000 } else { 10 }], Reduce::Sum),
        "other type" if rank == 1 => comm.all_reduce(&mut [0.0f64; 9000], Reduce::Sum),
        "other type" => comm.all_reduce(&mut [0.0f32; 9000], Reduce::Sum),
        "other reducer" => comm.all_reduce(&mut [0u8], if rank == 1 { Reduce::Max } else { Reduce::Min }),
        "other op" if rank == 1 => comm.barrier(),
        "other op" => comm.broadcast(&mut [0u8; 100_000], 0),
        "other root" => comm.broadcast(&mut [0u8; 4], if rank == 1 { 1 } else { 2 }),
        "other cuts" => {
            let cuts = if rank == 1 { [0, 2, 3, 3] } else { [0, 1, 2, 3] };
            comm.all_gather(&mut [0i64; 3], &cuts.into())
        }
        "other lengths" => {
            let cuts = if rank == 1 { [0, 2, 3, 4] } else { [0, 1, 2, 3] };
            comm.all_to_all(&[0i64; 4], &cuts.into(), &mut [0i64; 3], &[0, 1, 2, 3].into())
        }
        "bad cuts" => {
            let cuts = if rank == 1 { [0, 5, 2, 3] } else { [0, 1, 2, 3] };
            comm.reduce_scatter(&mut [0i64; 3], &cuts.into(), Reduce::Sum)
        }
        "other message" if rank == 1 => comm.send(0, &[0u8; 4]),
        "other message" if rank == 0 => comm.recv(1, &mut [0u8; 5]),
        "other message" => comm.barrier(),
        // Two of them, or all in a circle; short ones are kept for the receiver, long ones are not.
        "crossed" if rank == 2 => comm.barrier(),
        "crossed" | "circle" => {
            let around = if scene == "circle" { comm.size() } else { 2 };
            let (to, from) = ((rank + 1) % around, (rank + around - 1) % around);
            for bytes in [1000, 200_000] {
                comm.send(to, &vec![rank as u8; bytes])?;
                comm.recv(from, &mut vec![0u8; bytes])?;
            }
            Ok(())
        }
        "fails" if rank == 1 => {
            comm.fail("the disk is full");
            comm.barrier()
        }
        "leaves" if rank == 1 => Ok(()),
        // Threads of this process: one works alone for longer than a stall may last, the others wait for it.
        "works" => {
            let work = |mut comm: Comm| {
                let until = Instant::now() + Duration::from_secs(6);
                while comm.rank() == 1 && Instant::now() < until {
                    std::hint::spin_loop();
                }
                comm.barrier()?;
                // The rank that worked was waited for, so the report is about what follows. Now no rank does anything.
                comm.set_step(1);
                if comm.rank() == 1 {
                    std::thread::park_timeout(Duration::from_secs(60));
                }
                comm.barrier()
            };
            let ranks = Comm::threads(3, &Alarm::default(), Duration::from_secs(3)).into_iter();
            let ranks: Vec<_> = ranks.map(|comm| std::thread::spawn(move || work(comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).next().unwrap()
        }
        "fails" | "leaves" => comm.all_reduce(&mut [0.0f32; 100_000], Reduce::Sum),
        other => panic!("no scene {other}"),
    }
}

fn threads(scene: &'static str, size: usize) -> Vec<Result<(), Report>> {
    let play = move |mut comm: Comm| {
        play(scene, &mut comm)?;
        if scene == "leaves" { Ok(()) } else { comm.finish() }
    };
    let ranks: Vec<_> = Comm::local(size).into_iter().map(|c| std::thread::spawn(move || play(c))).collect();
    ranks.into_iter().map(|r| r.join().unwrap()).collect()
}

const RANK: &str = "POLYREME_TEST_RANK";

/// Starts a group of processes. Each prints its result.
fn processes(scene: &str, size: usize, stall_ms: u64) -> (Segment, Vec<Child>) {
    let segment = Comm::segment(size, 0).unwrap();
    let path = segment.path().unwrap();
    let start = |rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "one_rank_of_a_group", "--nocapture", "--test-threads=1"])
            .env(RANK, format!("{rank} {size} {stall_ms} {path} {scene}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children = (0..size).map(start).collect();
    (segment, children)
}

/// What a rank printed as its end: empty if all was well.
fn end_of(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let end = text.lines().find_map(|l| l.split_once("end: ")).map(|(_, end)| end.trim().to_string());
    end.unwrap_or_else(|| format!("ended with {} saying {text}", output.status))
}

#[test]
fn one_rank_of_a_group() {
    let Ok(line) = std::env::var(RANK) else { return };
    let [rank, size, stall, path, scene] = line.splitn(5, ' ').collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    let size = size.parse().unwrap();
    let setup = ShmSetup {
        host: "here".into(),
        stall: Duration::from_millis(stall.parse().unwrap()),
        ..ShmSetup::new(rank.parse().unwrap(), size, Comm::open_segment(path, size, 0).unwrap())
    };
    let mut comm = Comm::shm(setup).unwrap();
    let end = play(scene, &mut comm).and_then(|()| if scene == "leaves" { Ok(()) } else { comm.finish() });
    println!("end: {}", end.map_or_else(|report| report.to_string(), |()| String::new()));
}

#[test]
fn threads_do_every_operation_with_every_number_of_ranks() {
    for size in RANKS {
        for scene in ["grid", "blocks"] {
            threads(scene, size).into_iter().for_each(|r| r.unwrap());
        }
    }
}

#[test]
fn processes_do_every_operation_with_every_number_of_ranks() {
    for size in RANKS {
        for scene in ["grid", "blocks"] {
            let (_segment, children) = processes(scene, size, 60_000);
            for (rank, child) in children.into_iter().enumerate() {
                assert_eq!(end_of(child), "", "rank {rank} of {size}, {scene}");
            }
        }
    }
}

#[test]
fn all_give_the_same_report() {
    let check = |scene: &'static str, size: usize, want: &str| {
        for (rank, end) in
            threads(scene, size).into_iter().enumerate().filter(|(r, _)| scene != "leaves" || *r != 1)
        {
            let report = end.expect_err(scene).to_string();
            assert_eq!(report, want.replace(" on here", ""), "thread {rank}, {scene}");
        }
        let (_segment, children) = processes(scene, size, 60_000);
        for (rank, child) in children.into_iter().enumerate() {
            let want = if scene == "leaves" && rank == 1 { "" } else { want };
            assert_eq!(end_of(child), want, "process {rank}, {scene}");
        }
    };
    let one = |what: &str, op: &str| {
        format!("rank 1 on here disagrees with the others: {what} (at step 7, in {op})")
    };
    let both = |a: &str, b: &str, op: &str| {
        format!(
            "rank 1 on here disagrees with the others: it calls {a}, rank 0 calls {b} (at step 7, in {op})"
        )
    };
    let sum = |n: &str| format!("all-reduce (sum) of {n}");
    check("other count", 3, &both(&sum("70000 f32"), &sum("10 f32"), "all-reduce"));
    check("other type", 3, &both(&sum("9000 f64"), &sum("9000 f32"), "all-reduce"));
    let reducers = ["all-reduce (max) of 1 u8", "all-reduce (min) of 1 u8"];
    check("other reducer", 3, &both(reducers[0], reducers[1], "all-reduce"));
    let roots = ["broadcast of 4 u8 with root 1", "broadcast of 4 u8 with root 2"];
    check("other root", 3, &both(roots[0], roots[1], "broadcast"));
    check("other op", 3, &both("barrier", "broadcast of 100000 u8 with root 0", "broadcast"));
    let cuts = ["all-gather of 3 i64 with cuts 74c3", "all-gather of 3 i64 with cuts 9ad3"];
    check("other cuts", 3, &both(cuts[0], cuts[1], "all-gather"));
    check("other message", 3, &one("it sends 4 u8, rank 0 expects 5 u8", "receive"));
    check("other lengths", 3, &one("it sends 2 elements to rank 0, which expects 1", "all-to-all"));
    check("bad cuts", 3, &one("the cuts [0, 5, 2, 3] do not ascend up to 3", "reduce-scatter"));
    let crossed = |ranks: &str| {
        let todo = "let one of them receive first, or call all_to_all";
        let what = format!("ranks {ranks} send to each other and none of them receives; {todo}");
        format!("rank 0 on here failed: {what} (at step 7, in send)")
    };
    check("crossed", 3, &crossed("0, 1"));
    check("circle", 4, &crossed("0, 1, 2, 3"));
    check("fails", 4, "rank 1 on here failed: the disk is full (at step 7, in its own work)");
    check("leaves", 4, "rank 1 on here is gone (at step 7, in all-reduce)");
}

/// One of four ranks gets a signal in the middle of its work; checks why and when the others end.
fn check_signal(signal: Signal, stall_ms: u64, within: Duration, want: &str) {
    let (_segment, mut children) = processes("endless", 4, stall_ms);
    let mut struck = children.remove(2);
    let mut first = [0; 1];
    let mut printed = struck.stdout.take().unwrap();
    // A line after "going" means that all ranks are at work.
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("going") {
        assert_eq!(printed.read(&mut first).unwrap(), 1, "the rank ended before it began");
        seen.extend(first);
    }
    let start = Instant::now();
    let pid = Pid::from_raw(struck.id() as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
    let ends: Vec<_> = children.into_iter().map(end_of).collect();
    let took = start.elapsed();
    struck.kill().unwrap();
    struck.wait().unwrap();
    for end in &ends {
        assert!(end.starts_with(want), "{end}");
        assert_eq!(*end, ends[0]);
    }
    assert!(took < within, "it took {took:?}");
}

#[test]
fn a_killed_process_ends_the_waits_of_the_others() {
    check_signal(
        Signal::KILL,
        60_000,
        Duration::from_secs(5),
        "rank 2 on here is gone (at step 7, in all-reduce)",
    );
}

#[test]
fn a_stopped_process_ends_the_waits_of_the_others() {
    check_signal(
        Signal::STOP,
        1_000,
        Duration::from_secs(10),
        "rank 2 on here is alive, but nothing has moved for 1 s",
    );
}

#[test]
fn a_thread_that_works_is_waited_for_and_one_that_does_nothing_is_not() {
    let (_segment, children) = processes("works", 1, 60_000);
    for child in children {
        let end = end_of(child);
        assert!(end.starts_with("rank 1 is alive, but nothing has moved for 3 s"), "{end}");
        assert!(end.ends_with("(at step 1, in barrier)"), "{end}");
    }
}

#[test]
fn an_alarm_ends_the_waits_of_all() {
    let alarm = Alarm::default();
    let mut ends = Comm::threads(3, &alarm, Duration::from_secs(60));
    let busy = ends.pop().unwrap();
    let cause = Cause::Silent { ms: 5000 };
    let report = Report { rank: 9, host: "there".into(), step: 3, op: "ring".into(), cause };
    std::thread::scope(|s| {
        let waits: Vec<_> = ends.iter_mut().map(|comm| s.spawn(|| comm.barrier())).collect();
        alarm.raise(report.clone());
        waits.into_iter().for_each(|w| assert_eq!(w.join().unwrap(), Err(report.clone())));
    });
    assert_eq!(busy.finish(), Err(report));
}

#[test]
fn threads_that_give_up_leave_no_memory_that_others_still_touch() {
    // A rank that gets the report frees its buffers while others may be accessing them.
    for turn in 0..50 {
        let ranks: Vec<_> = Comm::local(4)
            .into_iter()
            .map(|mut comm| {
                std::thread::spawn(move || -> Result<(), Report> {
                    for k in 0.. {
                        let mut data = vec![1.0f32; 100_000 + k];
                        if comm.rank() == 3 && k == turn % 7 {
                            comm.fail("enough");
                        }
                        comm.all_reduce(&mut data, Reduce::Sum)?;
                        assert!(data.iter().all(|x| *x == 4.0));
                    }
                    Ok(())
                })
            })
            .collect();
        for rank in ranks {
            let report = rank.join().unwrap().unwrap_err();
            assert_eq!((report.rank, report.cause), (3, Cause::Failed { why: "enough".into() }));
        }
    }
}

#[test]
fn memory_that_is_not_there_is_a_report_on_all_ranks() {
    for common in [false, true] {
        let ranks: Vec<_> = Comm::local(3)
            .into_iter()
            .map(|mut comm| {
                std::thread::spawn(move || {
                    let made = match common {
                        true => comm.shared_block(1 << 62, "the weights").map(drop),
                        false => comm.block(1 << 62, "the gradients").map(drop),
                    };
                    let report = made.and_then(|()| comm.barrier()).unwrap_err();
                    assert!(matches!(report.cause, Cause::Failed { .. }), "{report}");
                    report.to_string()
                })
            })
            .collect();
        for report in ranks.into_iter().map(|r| r.join().unwrap()) {
            let what = if common { "the weights" } else { "the gradients" };
            assert!(report.contains(&format!("no memory for {what}: ")), "{report}");
            assert!(report.contains("4611686018427387904 bytes"), "{report}");
        }
    }
}
