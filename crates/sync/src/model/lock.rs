//! Locks that commit all pending stores of a thread when they are taken and released.

use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError};

use super::atomic::flush;

/// The checker's lock.
#[derive(Debug, Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

/// Unlocks when it is dropped.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

/// The checker's condition variable.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

impl<T> Mutex<T> {
    /// A lock around this value.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(shuttle::sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        flush();
        of(self.0.lock())
    }
}

impl Condvar {
    /// A condition variable without waiters.
    pub const fn new() -> Condvar {
        Condvar(shuttle::sync::Condvar::new())
    }

    /// Unlocks, waits to be woken, and locks again.
    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        flush();
        let inner = guard.0.take().expect("a guard has a lock until it is dropped");
        of(self.0.wait(inner))
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        flush();
        self.0.notify_all();
    }
}

fn of<T>(locked: LockResult<shuttle::sync::MutexGuard<'_, T>>) -> LockResult<MutexGuard<'_, T>> {
    match locked {
        Ok(guard) => Ok(MutexGuard(Some(guard))),
        Err(poisoned) => Err(PoisonError::new(MutexGuard(Some(poisoned.into_inner())))),
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_deref().expect("a guard has a lock until it is dropped")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_deref_mut().expect("a guard has a lock until it is dropped")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if self.0.is_some() && !std::thread::panicking() {
            flush();
        }
    }
}
