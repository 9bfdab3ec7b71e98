//! Threads of the checker, whose stores have all reached memory when they end.

use std::io;

pub use shuttle::thread::{JoinHandle, yield_now};

use super::atomic::flush;

/// Starts a thread.
pub fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    shuttle::thread::spawn(|| to_the_end(run))
}

fn to_the_end<T>(run: impl FnOnce() -> T) -> T {
    let result = run();
    flush();
    result
}

/// A thread that is to be started.
#[derive(Debug, Default)]
pub struct Builder(shuttle::thread::Builder);

impl Builder {
    /// Without a name.
    pub fn new() -> Builder {
        Builder(shuttle::thread::Builder::new())
    }

    /// Gives it a name.
    pub fn name(self, name: String) -> Builder {
        Builder(self.0.name(name))
    }

    /// Starts it.
    pub fn spawn<T: Send + 'static>(
        self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        self.0.spawn(|| to_the_end(run))
    }
}
