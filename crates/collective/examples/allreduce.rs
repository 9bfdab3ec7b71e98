//! How long an all-reduce of f32 takes between ranks of one host.
//!
//!     allreduce [--transport local|shm|block] [--ranks N] [--kib 4,64,1024] [--turns N] [--rounds N]
//!
//! `shm` runs processes with ordinary memory, `block` processes with memory that the others see. Prints one object per
//! size: `op`, `transport`, `ranks`, `bytes`, `us` (the mean of the turns at rank 0, in the best round).

use std::process::{Child, Command};
use std::time::Instant;

use polyreme_collective::{Comm, Reduce, ShmSetup, Span, Work};

struct ExampleOptions {
    transport: String,
    ranks: usize,
    kib: Vec<usize>,
    turns: usize,
    rounds: usize,
    /// Set for the children: this rank, and where the shared memory is.
    child: Option<(usize, String)>,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let options = parse(&args);
    if let Some((rank, path)) = &options.child {
        let segment = Comm::open_segment(path, options.ranks, 0).expect("the parent made the shared memory");
        return join(*rank, segment, &options);
    }
    if options.transport == "local" {
        std::thread::scope(|s| {
            for mut comm in Comm::local(options.ranks) {
                let options = &options;
                s.spawn(move || {
                    time(&mut comm, options);
                    comm.finish().expect("all ranks finish");
                });
            }
        });
        return;
    }
    let segment = Comm::segment(options.ranks, 0).expect("there is memory for a group");
    let path = segment.path().expect("it is a file");
    let exe = std::env::current_exe().expect("this program has a file");
    let start = |rank: usize| {
        let mut command = Command::new(&exe);
        command.args(&args).args(["--child", &rank.to_string(), &path]);
        command.spawn().expect("this program can be started again")
    };
    let mut children: Vec<Child> = (1..options.ranks).map(start).collect();
    join(0, segment, &options);
    for child in &mut children {
        assert!(child.wait().expect("it was started").success());
    }
}

fn parse(args: &[String]) -> ExampleOptions {
    let of = |name: &str| args.iter().position(|a| a == name).map(|i| &args[i + 1]);
    let number = |s: &String| s.parse().expect("a number");
    ExampleOptions {
        transport: of("--transport").map_or("local", |s| s).into(),
        ranks: of("--ranks").map_or(2, number),
        kib: of("--kib")
            .map_or("4,64,1024,16384,65536", |s| s)
            .split(',')
            .map(|s| number(&s.into()))
            .collect(),
        turns: of("--turns").map_or(20, number),
        rounds: of("--rounds").map_or(1, number),
        child: args.iter().position(|a| a == "--child").map(|i| (number(&args[i + 1]), args[i + 2].clone())),
    }
}

fn join(rank: usize, segment: polyreme_net::Segment, options: &ExampleOptions) {
    let mut comm = Comm::shm(ShmSetup::new(rank, options.ranks, segment)).expect("all ranks join");
    time(&mut comm, options);
    comm.finish().expect("all ranks finish");
}

fn time(comm: &mut Comm, options: &ExampleOptions) {
    for kib in &options.kib {
        let n = kib * 256;
        let mut data = vec![1.0f32; n];
        let block = comm
            .block(if options.transport == "block" { n * 4 } else { 0 }, "numbers")
            .expect("there is memory");
        let mut turn = |comm: &mut Comm| {
            let span = match &options.transport[..] {
                "block" => Span { ptr: block.ptr().as_ptr(), ..Span::of(&mut data) },
                _ => Span::of(&mut data),
            };
            // SAFETY: both live longer than the operation, and nothing else accesses them meanwhile.
            let ticket = unsafe { comm.start(Work::AllReduce(span, Reduce::Sum)) };
            comm.wait(ticket).expect("all ranks are here");
        };
        (0..3).for_each(|_| turn(comm));
        comm.barrier().expect("all ranks are here");
        // The best of several means: on a shared machine, the mean of all says more about its other users.
        let mut us = f64::INFINITY;
        for _ in 0..options.rounds {
            let start = Instant::now();
            (0..options.turns).for_each(|_| turn(comm));
            us = us.min(start.elapsed().as_secs_f64() * 1e6 / options.turns as f64);
        }
        if comm.rank() == 0 {
            println!(
                r#"{{"op":"allreduce","transport":"{}","ranks":{},"bytes":{},"us":{us:.1}}}"#,
                options.transport,
                options.ranks,
                n * 4
            );
        }
    }
}
