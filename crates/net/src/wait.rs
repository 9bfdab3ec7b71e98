//! Counters in shared memory, and how a rank waits for one: it spins for a while, then sleeps.
//!
//! Spinning costs nothing while every rank has a core, and sees a change in half a microsecond where a sleeper needs
//! fifty. With more ranks than cores the awaited rank may need the very core that the waiting one holds: then a rank
//! yields at once, a few times, and then sleeps.
//!
//! No wait lasts forever: it keeps calling back its caller ([`Look`]), whose answer can end it.

use std::time::Duration;

use polyreme_sync::atomic::{AtomicU32, Ordering};
use polyreme_sync::{Instant, futex, hint, thread};

use crate::block::Shareable;

/// How often a sleeper calls back.
pub const LOOK_AROUND: Duration = Duration::from_millis(100);

/// A number that one rank counts up and others wait for. It wraps around; targets are less than 2^31 ahead.
#[repr(C)]
#[derive(Default, Debug)]
pub struct Counter {
    value: AtomicU32,
    sleepers: AtomicU32,
}

// SAFETY: two atomics.
unsafe impl Shareable for Counter {}

/// How long a rank spins before it sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long it spins without yielding.
    pub spin: Duration,
    /// How long after that it yields between looks.
    pub yields: Duration,
}

/// Why a wait calls back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// Every few microseconds: check a word or two.
    Glance,
    /// Now and then: check whether the others are alive. The counter has not moved for this long.
    Around(Duration),
}

impl Pace {
    /// For `ranks` ranks that share `cores` cores.
    ///
    /// Even with a core for each, a rank yields after a while: the scheduler may have put two of them on one core,
    /// where every wait would last for its whole spin time (48 us were measured for 4 KiB, against 3).
    pub fn of(ranks: usize, cores: usize) -> Pace {
        if ranks <= cores {
            Pace { spin: Duration::from_micros(10), yields: Duration::from_micros(100) }
        } else {
            Pace { spin: Duration::ZERO, yields: Duration::from_micros(200) }
        }
    }
}

impl Counter {
    /// Its value. Everything that was written before it was posted is visible.
    pub fn get(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Whether it has reached a target.
    pub fn reached(&self, target: u32) -> bool {
        reached(self.get(), target)
    }

    /// Sets it and wakes sleepers. Only one rank does so.
    pub fn post(&self, value: u32) {
        // Sequentially consistent with the sleeper, which counts itself and then reads the value: one of the two sees
        // the other.
        self.value.store(value, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    /// Wakes sleepers, so that they call back.
    pub fn wake(&self) {
        futex::wake(&self.value);
    }

    /// Waits until it has come to a target, or until `look` answers with an error.
    pub fn wait<E>(
        &self,
        target: u32,
        pace: Pace,
        mut look: impl FnMut(Look) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.reached(target) {
            return Ok(());
        }
        let start = Instant::now();
        while start.elapsed() < pace.spin {
            for _ in 0..64 {
                if self.reached(target) {
                    return Ok(());
                }
                hint::spin_loop();
            }
            look(Look::Glance)?;
        }
        while start.elapsed() < pace.spin + pace.yields {
            thread::yield_now();
            if self.reached(target) {
                return Ok(());
            }
            look(Look::Glance)?;
        }
        self.sleep(target, look)
    }

    fn sleep<E>(&self, target: u32, mut look: impl FnMut(Look) -> Result<(), E>) -> Result<(), E> {
        let (mut last, mut since) = (self.get(), Instant::now());
        while !reached(last, target) {
            look(Look::Around(since.elapsed()))?;
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let value = self.value.load(Ordering::SeqCst);
            if value == last {
                // Woken, timed out, interrupted or changed meanwhile: in any case, look again.
                futex::wait(&self.value, value, LOOK_AROUND);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            let now = self.get();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(())
    }
}

fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_count_in_turn_at_any_pace() {
        let none = Duration::ZERO;
        for (spin, yields) in
            [(Duration::from_micros(50), none), (none, Duration::from_micros(50)), (none, none)]
        {
            let (pace, start) = (Pace { spin, yields }, u32::MAX - 500);
            let counters = [Counter::default(), Counter::default()];
            counters.iter().for_each(|c| c.post(start));
            std::thread::scope(|s| {
                for me in 0..2 {
                    let counters = &counters;
                    s.spawn(move || {
                        for turn in 1..=1000 {
                            let target = start.wrapping_add(turn);
                            counters[me].post(target);
                            counters[1 - me].wait::<()>(target, pace, |_| Ok(())).unwrap();
                        }
                    });
                }
            });
            assert!(counters.iter().all(|c| c.get() == 499));
        }
    }

    #[test]
    fn a_wait_ends_when_the_look_says_so() {
        let counter = Counter::default();
        // So long that even a machine that is busy with other things comes to a glance before it sleeps.
        let pace = Pace { spin: Duration::from_secs(600), yields: Duration::ZERO };
        assert_eq!(counter.wait(1, pace, |look| if look == Look::Glance { Err(3) } else { Ok(()) }), Err(3));
        let quiet = Duration::from_millis(150);
        let end = counter.wait(1, Pace::of(3, 2), |look| match look {
            Look::Around(for_so_long) if for_so_long >= quiet => Err(for_so_long),
            _ => Ok(()),
        });
        assert!(end.is_err_and(|after| after < quiet * 10));
    }
}
