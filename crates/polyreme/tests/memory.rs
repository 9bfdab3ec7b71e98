//! Ranks that are threads share their weights and the optimizer's state: what four of them take, counted by the
//! allocator. One test, alone in its process: the counter is the allocator's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use polyreme::bench::jobs::BenchJob;
use polyreme::bench::ranks;
use polyreme::exec::{Engine, Held, Options};
use polyreme::graph::memory::ALIGN_BYTES;
use polyreme_collective::Comm;
use polyreme_parallel::Mesh;

struct CountingAllocator;

/// Bytes in use that have the alignment of arenas and of shared blocks.
static LIVING: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn is_arena(layout: Layout) -> bool {
    layout.align() >= ALIGN_BYTES
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVING.fetch_add(if is_arena(layout) { layout.size() } else { 0 }, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVING.fetch_add(if is_arena(layout) { layout.size() } else { 0 }, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVING.fetch_sub(if is_arena(layout) { layout.size() } else { 0 }, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// What all ranks report to hold after two steps of `gpt`; the allocator must agree.
fn held(ranks: usize, shard_gradients: bool) -> Held {
    // The batch makes activations, not weights.
    let job = BenchJob { batch: 1, ..BenchJob::by_name("gpt").unwrap() };
    let comms = Comm::local(ranks);
    let before = LIVING.load(Ordering::Relaxed);
    let meet = Barrier::new(ranks);
    let of_ranks: Vec<_> = std::thread::scope(|s| {
        let rank = |comm: Comm| {
            let (job, meet) = (&job, &meet);
            s.spawn(move || {
                let program =
                    job.program(&ranks::plan(&comm, Mesh::data(ranks), shard_gradients), None, 1).unwrap();
                let planned = Engine::footprint(&program, 1, polyreme_exec::Isa::detect());
                let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
                job.fill(&mut engine).unwrap();
                for _ in 0..2 {
                    job.step(&mut engine).unwrap();
                }
                meet.wait();
                let living = LIVING.load(Ordering::Relaxed) - before;
                meet.wait();
                (engine.held(), planned.inputs + planned.activations, living)
            })
        };
        let ranks: Vec<_> = comms.into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let sum = |of: fn(&Held) -> usize| of_ranks.iter().map(|(held, ..)| of(held)).sum();
    let all = Held {
        params: sum(|h| h.params),
        grads: sum(|h| h.grads),
        optimizer: sum(|h| h.optimizer),
        states: sum(|h| h.states),
        average: sum(|h| h.average),
        totals: sum(|h| h.totals),
    };
    let values: usize = of_ranks.iter().map(|(_, values, _)| values).sum();
    let said = all.params + all.grads + all.optimizer + all.states + all.average + all.totals + values;
    assert_eq!(of_ranks[0].2, said, "{ranks} ranks: bytes in use, and what engines say of it: {all:?}");
    all
}

#[test]
fn four_thread_ranks_have_the_weights_and_the_optimizer_of_one() {
    let (one, four) = (held(1, false), held(4, false));
    assert!(one.params > 4 * 10_000_000 && one.optimizer == 2 * one.params, "{one:?}");
    let learnt = |held: &Held| (held.params + held.optimizer) as f64;
    let ratio = learnt(&four) / learnt(&one);
    println!("one rank {one:?}, four ranks {four:?}: {ratio:.4} times parameters and optimizer state");
    assert!(ratio < 1.6, "{ratio}: {one:?} and {four:?}");
    // Each has gradients of its own, and nothing else that grows with the ranks.
    assert_eq!(four.grads, 4 * one.grads);
    // On request gradients too: those of the ranks together once, and two buckets of 1 MiB and more on each.
    let own = held(4, true);
    println!("with gradients that only their owners keep: {own:?}");
    assert_eq!((own.params, own.optimizer), (four.params, four.optimizer));
    assert!(own.grads < 2 * one.grads, "{own:?}");
}
