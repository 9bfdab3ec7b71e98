//! What every kernel is given to run with: an instruction set and a runner of tasks.
//!
//! It is not a thread pool: the pool lives above and implements [`Parallel`].

use std::marker::PhantomData;

use crate::isa::Isa;

/// Runs numbered tasks, in any order, on any number of workers.
///
/// # Safety
/// `run` must call `task(i, worker)` exactly once for each `i` in `0..n_tasks` and return only after all of them
/// have returned; two calls that may overlap in time must have different `worker` numbers, below `workers()`.
/// Kernels rely on this to hand out disjoint parts of a buffer.
pub unsafe trait Parallel: Sync {
    /// How many tasks may run at the same time.
    fn workers(&self) -> usize;
    /// Calls `task(task_idx, worker_idx)` for every task and returns when all are done.
    fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync));
    /// As [`Parallel::run`], where what was last accessed in the same tasks before should be accessed first, because it may still be in
    /// cache: in the cache of the worker that had it, so workers should have the same tasks as in `run`.
    fn run_backwards(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        self.run(n_tasks, &|i, worker| task(n_tasks - 1 - i, worker));
    }
}

/// Runs every task on the caller, in order.
pub struct Serial;

// SAFETY: the loop calls each index once, on one worker, and returns after the last.
unsafe impl Parallel for Serial {
    fn workers(&self) -> usize {
        1
    }
    fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        for i in 0..n_tasks {
            task(i, 0);
        }
    }
}

/// What is called once for each finished run of a result, while it is still in cache: `(first position, the run)`,
/// positions counted over the whole result.
pub type RunEpilogue<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// What a kernel runs with.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// The instruction set to dispatch on.
    pub isa: Isa,
    /// The runner of the tasks.
    pub par: &'a dyn Parallel,
}

impl Cx<'static> {
    /// The best instruction set, on the calling thread alone.
    pub fn serial() -> Cx<'static> {
        Cx { isa: Isa::detect(), par: &Serial }
    }
    /// The scalar twins, on the calling thread alone: the oracle.
    pub fn oracle() -> Cx<'static> {
        Cx { isa: Isa::SCALAR, par: &Serial }
    }
}

impl Cx<'_> {
    /// Cuts `data` into chunks of `chunk` elements (the last may be shorter) and runs `f(chunk_idx, chunk)` on each,
    /// in parallel. `chunk` must not depend on the number of workers if results are to be the same bits everywhere.
    pub fn for_each_chunk<T: Send>(&self, data: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        assert!(chunk > 0, "a chunk has at least one element");
        let shared = SharedMut::new(data);
        let n = shared.len().div_ceil(chunk);
        self.par.run(n, &|i, _| {
            let start = i * chunk;
            let end = (start + chunk).min(shared.len());
            // SAFETY: chunks of different tasks do not overlap, and each task runs once.
            f(i, unsafe { shared.slice(start, end - start) });
        });
    }
}

/// A mutable slice that several tasks write in parts; the one place where that is allowed.
///
/// The borrow checker sees the whole slice lent out for `'a`; the tasks promise to take disjoint parts.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    lent: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are taken through the unsafe `slice`, whose callers promise that they are disjoint; handing a
// disjoint `&mut [T]` to another thread is what `T: Send` allows.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Lends `data` out in parts.
    pub fn new(data: &'a mut [T]) -> Self {
        SharedMut { ptr: data.as_mut_ptr(), len: data.len(), lent: PhantomData }
    }
    /// The length of the whole.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether the whole is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The part `start..start + len`. Panics if it is not inside the whole.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    #[inline]
    pub unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part {start}+{len} of {}", self.len);
        // SAFETY: in bounds by the assertion; disjoint from the others by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
    /// The start of the whole, for kernels that write strided tiles.
    pub fn as_mut_ptr(&self) -> *mut T {
        self.ptr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_slice_once() {
        for (len, chunk) in [(0, 3), (1, 3), (3, 3), (10, 3), (7, 100)] {
            let mut data = vec![0u32; len];
            Cx::serial().for_each_chunk(&mut data, chunk, |i, part| {
                for (j, v) in part.iter_mut().enumerate() {
                    *v += (i * chunk + j) as u32 + 1;
                }
            });
            assert_eq!(data, (1..=len as u32).collect::<Vec<_>>());
        }
    }

    /// Tests use every instruction set that this machine has, and pass without the others; in CI that must not go
    /// unnoticed.
    #[test]
    fn the_machine_of_ci_has_the_instructions_that_are_tested() {
        let isa = Isa::detect();
        assert!(
            std::env::var_os("CI").is_none() || isa.has_avx2(),
            "tests of vectors must run in CI: no AVX2 here"
        );
        if !isa.has_avx512() {
            eprintln!("skipped: everything with AVX-512");
        }
    }
}
