//! Atomics whose every operation is a point where another thread may go on, and whose stores may be late.
//!
//! They are laid out as the standard library's, so that they can lie in memory that is shared and begins as zeros.
//!
//! A thread has a few stores under way. Which of them reach memory, and when, is drawn at random, in these bounds: stores to one
//! address stay in order; everything is there before a `Release` store, an operation that reads and writes with `Release` or
//! more, a `SeqCst` store, a lock, an unlock or the end of the thread; and the thread itself reads what it has stored. All
//! that is allowed by the memory model of Rust.

use std::cell::RefCell;
pub use std::sync::atomic::Ordering;

use shuttle::rand::{Rng, thread_rng};

use super::{faults, point};

/// Stores that a thread may have under way.
const UNDER_WAY_MAX: usize = 4;

/// A store that has not reached memory.
struct PendingStore {
    address: usize,
    write: Box<dyn FnOnce()>,
}

shuttle::thread_local! {
    // What is left of a thread that failed goes nowhere: its memory may be gone.
    static STORES: RefCell<Vec<PendingStore>> = const { RefCell::new(Vec::new()) };
}

/// Has all stores of this thread reach memory.
pub(crate) fn flush() {
    while take(|_| true) {}
}

/// Has the first store that fits reach memory.
fn take(fits: impl Fn(&PendingStore) -> bool) -> bool {
    let first = STORES.with(|stores| {
        let mut stores = stores.borrow_mut();
        let at = stores.iter().position(fits)?;
        Some(stores.remove(at))
    });
    first.map(|store| (store.write)()).is_some()
}

/// Has some of the stores reach memory, drawn at random; each address in its order.
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
            /// With a value.
            pub const fn new(value: $t) -> $name {
                $name(std::sync::atomic::$name::new(value))
            }

            fn address(&self) -> usize {
                &raw const self.0 as usize
            }

            /// What it has.
            pub fn load(&self, _: Ordering) -> $t {
                before_reading(self.address());
                let value = self.0.load(Ordering::SeqCst);
                // Much may happen between a look and what follows from it.
                point();
                value
            }

            /// Sets it, now or later.
            pub fn store(&self, value: $t, order: Ordering) {
                let order = of_store(order);
                // Those of one address stay in order: the new one waits behind the others.
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

            /// Sets it, and returns what it had.
            pub fn swap(&self, value: $t, order: Ordering) -> $t {
                before_writing(self.address(), order);
                self.0.swap(value, Ordering::SeqCst)
            }

            /// Sets it if it has what is expected.
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
    /// A number of things.
    AtomicUsize of usize;
    /// Yes or no.
    AtomicBool of bool;
}

macro_rules! numbers {
    ($($name:ident of $t:ty),*) => { $(impl $name {
        /// Adds; returns what it had.
        pub fn fetch_add(&self, value: $t, order: Ordering) -> $t {
            before_writing(self.address(), order);
            self.0.fetch_add(value, Ordering::SeqCst)
        }

        /// Subtracts; returns what it had.
        pub fn fetch_sub(&self, value: $t, order: Ordering) -> $t {
            before_writing(self.address(), order);
            self.0.fetch_sub(value, Ordering::SeqCst)
        }

        /// Keeps the bits that both have; returns what it had.
        pub fn fetch_and(&self, value: $t, order: Ordering) -> $t {
            before_writing(self.address(), order);
            self.0.fetch_and(value, Ordering::SeqCst)
        }

        /// What it has at the end.
        pub fn into_inner(self) -> $t {
            flush();
            self.0.into_inner()
        }
    })* };
}
numbers!(AtomicU8 of u8, AtomicU32 of u32, AtomicU64 of u64, AtomicUsize of usize);
