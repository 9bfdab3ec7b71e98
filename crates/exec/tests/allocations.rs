//! A steady step makes no heap allocation, and an engine reserves what its footprint says. One test, alone in its
//! process: the counters are the allocator's.

#![allow(clippy::unwrap_used)]

#[path = "engine/nets.rs"]
mod nets;
#[path = "engine/random.rs"]
#[allow(dead_code, reason = "the other test binary uses more of it")]
mod random;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use polyreme_exec::{Engine, Options};
use polyreme_graph::Program;
use polyreme_graph::memory::ALIGN_BYTES;
use polyreme_kernels::optim::{Adafactor, Moments, Optimizer};

struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Bytes with the alignment of arenas, which nothing else here asks for.
static ARENA_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(layout: Layout) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    if layout.align() >= ALIGN_BYTES {
        ARENA_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[test]
fn a_steady_step_does_not_allocate() {
    for net in nets::all() {
        let [adamw, lamb] = [Optimizer::AdamW(Moments::DEFAULT), Optimizer::Lamb(Moments::DEFAULT)];
        for program in [
            Program::train(&net.step, adamw, Some(1.0)),
            Program::train(&net.step, lamb, Some(1.0)),
            Program::train(&net.step, Optimizer::Adafactor(Adafactor::DEFAULT), Some(1.0)),
            Program::train_at_once(&net.step, adamw),
        ] {
            let footprint = Engine::footprint(&program, 2, polyreme_exec::Isa::detect());
            let before = ARENA_BYTES.load(Ordering::Relaxed);
            let mut engine = Engine::new(program, Options::threads(2)).unwrap();
            let reserved = ARENA_BYTES.load(Ordering::Relaxed) - before;
            assert_eq!(reserved, footprint.total(), "{}: bytes reserved", net.name);

            for step in 0..2 {
                net.feed(&mut engine, step);
                engine.step(1e-3).unwrap();
            }
            let before = CALLS.load(Ordering::Relaxed);
            for step in 2..5 {
                net.feed(&mut engine, step);
                engine.step(1e-3).unwrap();
            }
            let calls = CALLS.load(Ordering::Relaxed) - before;
            assert_eq!(calls, 0, "{}: calls of the allocator in three steps", net.name);
        }
    }
}
