//! What every kernel is given to run with: an instruction set and a runner of tasks.
//!
//! It is not a thread pool: the pool lives above and implements [`Parallel`].

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, Ordering};

/// The instruction set that kernels dispatch on.
///
/// A value other than [`Isa::SCALAR`] can only come from [`Isa::detect`] and [`Isa::available`], so holding one proves that this CPU has
/// those instructions: that is what makes the call of a `#[target_feature]` function sound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Isa(Level);

/// The most that [`Isa::detect`] gives.
static LIMIT: AtomicU8 = AtomicU8::new(NO_LIMIT);
const SCALAR: u8 = 0;
const AVX2: u8 = 1;
const NO_LIMIT: u8 = 2;

/// From least to most; each has what those before it have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Level {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// Plain Rust, on every architecture; the oracle of the others.
    pub const SCALAR: Isa = Isa(Level::Scalar);

    /// The best that this CPU has, and that [`Isa::limit`] allows.
    pub fn detect() -> Isa {
        let limit = match LIMIT.load(Ordering::Relaxed) {
            SCALAR => Level::Scalar,
            #[cfg(target_arch = "x86_64")]
            AVX2 => Level::Avx2,
            _ => return Isa::of_cpu(),
        };
        Isa(Isa::of_cpu().0.min(limit))
    }

    /// Has this process use no more than `scalar`, `avx2` or `avx512`, from the next [`Isa::detect`] on: to see what a lesser
    /// machine would do. Returns false if it is none of them.
    pub fn limit(name: &str) -> bool {
        let limit = match name {
            "scalar" => SCALAR,
            "avx2" => AVX2,
            "avx512" => NO_LIMIT,
            _ => return false,
        };
        LIMIT.store(limit, Ordering::Relaxed);
        true
    }

    fn of_cpu() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2")
            && std::is_x86_feature_detected!("fma")
            && std::is_x86_feature_detected!("f16c")
        {
            if std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512vl")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
            {
                return Isa(Level::Avx512);
            }
            return Isa(Level::Avx2);
        }
        Isa::SCALAR
    }

    /// All up to [`Isa::detect`]'s, the oracle first.
    pub fn available() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let levels = [Level::Scalar, Level::Avx2, Level::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let levels = [Level::Scalar];
        let best = Isa::detect().0;
        levels.into_iter().filter(move |level| *level <= best).map(Isa)
    }

    /// Whether AVX2, FMA and F16C may be used.
    #[inline]
    pub fn has_avx2(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 >= Level::Avx2;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether AVX-512 (F, VL, BW and DQ) may be used, besides all of [`Isa::has_avx2`].
    ///
    /// A kernel for it gives the bits of its AVX2 twin: sums are made in the same order, only more of them at a time.
    /// So machines with and without AVX-512 can share a reproducible run.
    #[inline]
    pub fn has_avx512(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 >= Level::Avx512;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The name for people.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2+fma+f16c",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }
}

/// Runs numbered tasks, in any order, on any number of workers.
///
/// # Safety
/// `run` must call `task(i, worker)` exactly once for each `i` in `0..n_tasks` and return only after all of them
/// have returned; two calls that may overlap in time must have different `worker` numbers, below `workers()`.
/// Kernels hand out disjoint parts of a buffer on the strength of this.
pub unsafe trait Parallel: Sync {
    /// How many tasks may run at the same time.
    fn workers(&self) -> usize;
    /// Calls `task(task_idx, worker_idx)` for every task and returns when all are done.
    fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync));
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
pub type Epilogue<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// What a kernel runs with.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// The instruction set to dispatch on.
    pub isa: Isa,
    /// Who runs the tasks.
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

    /// Tests take every instruction set that this machine has, and pass without the others; in CI that must not go unseen.
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
