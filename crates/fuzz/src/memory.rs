//! An allocator that counts what a watched thread allocates. Every test binary that uses this crate has it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// No input needs this much. Allocating it fails, which aborts the process unless the code used a fallible allocation.
const REFUSED_BYTES: i64 = 8 << 30;

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[derive(Clone, Copy)]
struct Count {
    watched: bool,
    live: i64,
    peak: i64,
}

thread_local! {
    static COUNT: Cell<Count> = const { Cell::new(Count { watched: false, live: 0, peak: 0 }) };
}

/// The result of `work`, and the peak of bytes that this thread held while it ran.
pub(crate) fn peak<T>(work: impl FnOnce() -> T) -> (T, u64) {
    COUNT.set(Count { watched: true, live: 0, peak: 0 });
    let result = work();
    let peak = COUNT.get().peak;
    COUNT.set(Count { watched: false, live: 0, peak: 0 });
    (result, peak.unsigned_abs())
}

/// Counts a change; `false` if it is refused.
fn count(bytes: i64) -> bool {
    // A thread that ends may free memory after its cell is gone.
    let counted = COUNT.try_with(|cell| {
        let mut count = cell.get();
        if !count.watched {
            return true;
        }
        let live = count.live.saturating_add(bytes);
        count.peak = count.peak.max(live);
        let fits = live < REFUSED_BYTES;
        if fits {
            count.live = live;
        }
        cell.set(count);
        fits
    });
    counted.unwrap_or(true)
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

// SAFETY: every call is forwarded unchanged to the system's allocator, or fails as an allocator may.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !count(signed(layout.size())) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !count(signed(layout.size())) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !count(signed(size) - signed(layout.size())) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-signed(layout.size()));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}
