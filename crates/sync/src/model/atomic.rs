//! Atomics at whose every operation another thread may be scheduled, and whose stores may be delayed.
//!
//! They have the layout of the standard library's, so they can live in shared memory that starts as zeros.
//!
//! A thread has a few pending stores. Which of them reach memory, and when, is drawn at random within these bounds:
//! stores to one address stay in order; everything is there before a `Release` store, an operation that reads and
//! writes with `Release` or more, a `SeqCst` store, a lock, an unlock or the end of the thread; and the thread itself
//! reads what it has stored. All of this is allowed by Rust's memory model.

use std::cell::RefCell;
pub use std::sync::atomic::Ordering;

use shuttle::rand::{Rng, thread_rng};

use super::{faults, point};

/// How many pending stores a thread may have.
const UNDER_WAY_MAX: usize = 4;

/// A store that has not reached memory.
struct PendingStore {
    address: usize,
    write: Box<dyn FnOnce()>,
}

shuttle::thread_local! {
    // Pending stores of a thread that panicked are dropped: their memory may be gone.
    static STORES: RefCell<Vec<PendingStore>> = const { RefCell::new(Vec::new()) };
}

/// Commits all pending stores of this thread.
pub(crate) fn flush() {
    while take(|_| true) {}
}

/// Commits the first pending store that fits.
fn take(fits: impl Fn(&PendingStore) -> bool) -> bool {
    let first = STORES.with(|stores| {
        let mut stores = stores.borrow_mut();
        let at = stores.iter().position(fits)?;
        Some(stores.remove(at))
    });
    first.map(|store| (store.write)()).is_some()
}

/// Commits some of the pending stores, drawn at random; those of one address in order.
fn flush_some() {
    loop {
        let addresses: Vec<usize> =
            STORES.with(|stores| stores.borrow().iter().map(|store| store.address).collect());
        if addresses.is_empty() || (addresses.len() <= UNDER_WAY_MAX && thread_rng().gen_ratio(1, 2)) {
            return;
        }
        let address = addresses[thread_rng().gen_range(0..addresses.len())];
        take(|store| store.address == address);
    }
}

/// Before a store, or an operation that reads and writes: what must have reached memory by then.
fn before_writing(address: usize, order: Ordering) {
    point();
    match order {
        Ordering::Relaxed | Ordering::Acquire => while take(|store| store.address == address) {},
        _ => flush(),
    }
}

fn before_reading(address: usize) {
    point();
    flush_some();
    while take(|store| store.address == address) {}
}

fn of_store(order: Ordering) -> Ordering {
    faults().stores.unwrap_or(order)
}

macro_rules! atomics {
    ($($(#[$doc:meta])* $name:ident of $t:ty;)*) => { $(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Default, Debug)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            /// An atomic with this value.
            pub const fn new(value: $t) -> $name {
                $name(std::sync::atomic::$name::new(value))
            }

            fn address(&self) -> usize {
                &raw const self.0 as usize
            }

            /// The value.
            pub fn load(&self, _: Ordering) -> $t {
                before_reading(self.address());
                let value = self.0.load(Ordering::SeqCst);
                // Much may happen between a load and the code that acts on it.
                point();
                value
            }

            /// Sets it, now or later.
            pub fn store(&self, value: $t, order: Ordering) {
                let order = of_store(order);
                // Stores to one address stay in order: the new one waits behind the others.
                point();
                if order != Ordering::Relaxed {
                    flush();
                }
                if order == Ordering::SeqCst {
                    return self.0.store(value, Ordering::SeqCst);
                }
                let here = &raw const self.0 as usize;
                let write = move || {
                    // SAFETY: it is there until the thread has ended or gone on behind a point at which all its stores have
                    // reached memory; the tests of interleavings let nothing go away before.
                    let atomic = unsafe { &*(here as *const std::sync::atomic::$name) };
                    atomic.store(value, Ordering::SeqCst);
                };
                let store = PendingStore { address: self.address(), write: Box::new(write) };
                STORES.with(|stores| stores.borrow_mut().push(store));
                flush_some();
            }

            /// Sets it and returns the old value.
            pub fn swap(&self, value: $t, order: Ordering) -> $t {
                before_writing(self.address(), order);
                self.0.swap(value, Ordering::SeqCst)
            }

            /// Sets it if it has the expected value.
            pub fn compare_exchange(&self, old: $t, new: $t, order: Ordering, _: Ordering) -> Result<$t, $t> {
                before_writing(self.address(), order);
                self.0.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst)
            }
        }
    )* };
}
atomics! {
    /// A byte.
    AtomicU8 of u8;
    /// 32 bits.
    AtomicU32 of u32;
    /// 64 bits.
    AtomicU64 of u64;
    /// A machine word.
    AtomicUsize of usize;
    /// Yes or no.
    AtomicBool of bool;
}

macro_rules! numbers {
    ($($name:ident of $t:ty),*) => { $(impl $name {
        /// Adds and returns the old value.
        pub fn fetch_add(&self, value: $t, order: Ordering) -> $t {
            before_writing(self.address(), order);
            self.0.fetch_add(value, Ordering::SeqCst)
        }

        /// Subtracts and returns the old value.
        pub fn fetch_sub(&self, value: $t, order: Ordering) -> $t {
            before_writing(self.address(), order);
            self.0.fetch_sub(value, Ordering::SeqCst)
        }

        /// Bitwise and; returns the old value.
        pub fn fetch_and(&self, value: $t, order: Ordering) -> $t {
            before_writing(self.address(), order);
            self.0.fetch_and(value, Ordering::SeqCst)
        }

        /// The final value.
        pub fn into_inner(self) -> $t {
            flush();
            self.0.into_inner()
        }
    })* };
}
numbers!(AtomicU8 of u8, AtomicU32 of u32, AtomicU64 of u64, AtomicUsize of usize);
