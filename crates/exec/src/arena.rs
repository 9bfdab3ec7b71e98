//! One contiguous allocation, cut up by a plan. Slices of it are handed out by `unsafe` functions.
//!
//! A large one is asked for in huge pages, and all threads of the rank write its zeros: the system has to find and clear every
//! page at its first touch, which takes longer than a step if one thread does it page by page. So the first step is as fast
//! as the second, and a lack of memory shows before training starts.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

use polyreme_collective::{Block, Span};
use polyreme_dtype::{DType, Element};
use polyreme_graph::memory::ALIGN_BYTES;
use polyreme_kernels::Parallel;

use crate::error::ExecError;

/// Memory is asked for in huge pages where whole ones fit: fewer misses when products walk large matrices.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes that a thread clears as one task: few enough that all threads have work in large arenas.
const PART_BYTES: usize = 16 << 20;

/// Zeroed memory of a fixed size.
///
/// Slices are handed out by offset through a shared reference, several at once; the callers (this crate's launches)
/// follow a memory plan that has been verified to keep them apart.
pub(crate) struct Arena {
    ptr: NonNull<u8>,
    layout: Layout,
    /// Memory that `collective` owns and frees, and that other ranks may see.
    block: Option<Block>,
}

// SAFETY: an arena owns its memory.
unsafe impl Send for Arena {}
// SAFETY: slices are handed out by unsafe functions alone, whose callers keep them apart, on any thread.
unsafe impl Sync for Arena {}

impl Arena {
    /// An empty arena.
    pub(crate) fn empty() -> Arena {
        let nowhere = std::ptr::without_provenance_mut(ALIGN_BYTES);
        let layout = Layout::from_size_align(0, ALIGN_BYTES).expect("nothing fits in memory");
        Arena { ptr: NonNull::new(nowhere).expect("not null"), layout, block: None }
    }

    /// Reserves `bytes` for `what`, zeroed and faulted in by the threads of `par`.
    pub(crate) fn new(bytes: usize, what: &'static str, par: &dyn Parallel) -> Result<Arena, ExecError> {
        if bytes == 0 {
            return Ok(Arena::empty());
        }
        let missing = ExecError::Reserve { what, bytes };
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN_BYTES };
        let Ok(layout) = Layout::from_size_align(bytes.next_multiple_of(ALIGN_BYTES), align) else {
            return Err(missing);
        };
        // Not the allocator's zeros, which one thread would write before huge pages can be asked for.
        // SAFETY: the size is not zero.
        let Some(ptr) = NonNull::new(unsafe { alloc(layout) }) else { return Err(missing) };
        ask_for_huge_pages(ptr, layout.size());
        clear(ptr, layout.size(), par);
        Ok(Arena { ptr, layout, block: None })
    }

    /// Memory that other ranks see too. The program, which all ranks run, fixes when each may touch which part of it.
    pub(crate) fn over(block: Block) -> Arena {
        let layout = Layout::from_size_align(block.bytes(), ALIGN_BYTES).expect("a block fits in memory");
        Arena { ptr: block.ptr(), layout, block: Some(block) }
    }

    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Elements `start..start + len` counted from byte `offset`.
    ///
    /// # Safety
    /// Nothing may write this range while the slice lives.
    pub(crate) unsafe fn slice<T: Element>(&self, offset: usize, len: usize) -> &[T] {
        self.check(offset, len * size_of::<T>(), align_of::<T>());
        // SAFETY: in bounds and aligned by `check`; every bit pattern is a `T`; not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(offset).cast(), len) }
    }

    /// The same elements, mutable.
    ///
    /// # Safety
    /// Nothing else may hold this range while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_mut<T: Element>(&self, offset: usize, len: usize) -> &mut [T] {
        self.check(offset, len * size_of::<T>(), align_of::<T>());
        // SAFETY: as in `slice`, and not held elsewhere by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().add(offset).cast(), len) }
    }

    /// Where elements lie, for an exchange with ranks that may see the same memory: a raw address, which borrows nothing.
    pub(crate) fn span(&self, offset: usize, count: usize, dtype: DType) -> Span {
        self.check(offset, count * dtype.bytes(), dtype.bytes());
        Span { ptr: self.ptr.as_ptr().wrapping_add(offset), count, dtype }
    }

    /// Grows it to at least this size, which loses its contents. On an error the size stays as it was.
    pub(crate) fn grow(
        &mut self,
        bytes: usize,
        what: &'static str,
        par: &dyn Parallel,
    ) -> Result<(), ExecError> {
        if bytes <= self.bytes() {
            return Ok(());
        }
        // Holding both at once may take more memory than there is.
        let before = self.bytes();
        *self = Arena::empty();
        match Arena::new(bytes, what, par) {
            Ok(larger) => *self = larger,
            Err(error) => {
                *self = Arena::new(before, what, par)?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn check(&self, offset: usize, bytes: usize, align: usize) {
        assert!(
            offset <= self.layout.size() && bytes <= self.layout.size() - offset,
            "slice inside the arena"
        );
        assert!(offset.is_multiple_of(align), "slice aligned");
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.block.is_none() && self.layout.size() > 0 {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
        }
    }
}

/// Asks for huge pages before the first touch: the system does not merge small pages that exist already.
fn ask_for_huge_pages(ptr: NonNull<u8>, bytes: usize) {
    let whole = bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    #[cfg(target_os = "linux")]
    if whole > 0 {
        use rustix::mm::{Advice, madvise};
        // SAFETY: advice on memory of a new allocation. A refusal costs speed only.
        let _: Result<(), _> = unsafe { madvise(ptr.as_ptr().cast(), whole, Advice::LinuxHugepage) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (ptr, whole);
}

/// Fills a new allocation with zeros.
fn clear(ptr: NonNull<u8>, bytes: usize, par: &dyn Parallel) {
    let start = Start(ptr.as_ptr());
    par.run(bytes.div_ceil(PART_BYTES), &|part, _| {
        let range = part * PART_BYTES..bytes.min((part + 1) * PART_BYTES);
        for at in range.clone().step_by(HUGE_PAGE_BYTES) {
            // SAFETY: inside the allocation, which is not in use yet, and each part is cleared by one task.
            unsafe { fault_in_and_clear(start.plus(at), HUGE_PAGE_BYTES.min(range.end - at)) };
        }
    });
}

/// Clears a part of an allocation that is still in the cache from the system's own clearing of its pages.
///
/// # Safety
/// The caller owns this memory and may write it.
unsafe fn fault_in_and_clear(start: *mut u8, bytes: usize) {
    // In one call where there are no huge pages. Before Linux 5.14, and where a part begins inside a page, the pages
    // are faulted in as they are written.
    #[cfg(target_os = "linux")]
    if bytes == HUGE_PAGE_BYTES {
        use rustix::mm::{Advice, madvise};
        // SAFETY: it does not change the contents of the memory.
        let _: Result<(), _> = unsafe { madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) };
    }
    // SAFETY: the caller's promise.
    unsafe { start.write_bytes(0, bytes) };
}

/// Where a new allocation begins, for the threads that clear it.
struct Start(*mut u8);

// SAFETY: an address; each thread writes through it to its own part.
unsafe impl Sync for Start {}

impl Start {
    fn plus(&self, bytes: usize) -> *mut u8 {
        self.0.wrapping_add(bytes)
    }
}

/// `len` zeros for `what`, outside of any plan; an error if there is no memory for them.
pub fn floats(len: usize, what: &'static str) -> Result<Vec<f32>, ExecError> {
    let mut floats = Vec::new();
    make_room(&mut floats, len, what)?;
    floats.resize(len, 0.0);
    Ok(floats)
}

/// Reserves room for `len` elements in total; an error if there is no memory for them.
pub fn make_room<T>(vec: &mut Vec<T>, len: usize, what: &'static str) -> Result<(), ExecError> {
    let bytes = len.saturating_mul(size_of::<T>());
    vec.try_reserve_exact(len.saturating_sub(vec.len())).map_err(|_| ExecError::Reserve { what, bytes })
}

#[cfg(test)]
mod tests {
    use polyreme_kernels::Serial;

    use super::*;
    use crate::pool::Pool;

    /// Sizes around a huge page and around what a thread clears as one task.
    #[test]
    fn arenas_of_all_sizes_are_zero_and_aligned() {
        let pool = Pool::new(3).unwrap();
        let around = |n: usize| [n - 1, n, n + 1];
        let sizes =
            [[0, 1, 4097], around(HUGE_PAGE_BYTES), around(PART_BYTES), around(3 * PART_BYTES + 4096)];
        for bytes in sizes.into_iter().flatten().flat_map(|bytes| [bytes; 2]) {
            let arena = Arena::new(bytes, "activations", &pool).unwrap();
            assert_eq!(arena.bytes(), bytes.next_multiple_of(ALIGN_BYTES));
            let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN_BYTES };
            assert!(arena.ptr.addr().get().is_multiple_of(align), "{bytes}");
            // SAFETY: the only slice of this memory.
            let all: &mut [u8] = unsafe { arena.slice_mut(0, bytes) };
            assert!(all.iter().all(|b| *b == 0), "{bytes}");
            // Memory that the allocator reuses is then not zero.
            all.fill(1);
        }
    }

    /// Ranks that share weights refer to the same elements at the same time, even while one of them writes its own part.
    #[test]
    fn ranks_name_shared_memory_without_borrowing_it() {
        let block = Block::of_this_process(4096).unwrap();
        let ranks = [Arena::over(block.clone()), Arena::over(block)];
        // SAFETY: the only slice of this memory.
        let own: &mut [f32] = unsafe { ranks[0].slice_mut(256, 64) };
        let named = ranks.each_ref().map(|arena| arena.span(0, 1024, DType::F32));
        own.fill(1.0);
        assert!(
            named.iter().all(|span| span.ptr == named[0].ptr && (span.count, span.bytes()) == (1024, 4096))
        );
        assert_eq!(own.as_mut_ptr().cast(), named[1].ptr.wrapping_add(256));
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_that_says_for_what() {
        for bytes in [1 << 62, isize::MAX as usize, usize::MAX - ALIGN_BYTES] {
            let error = Arena::new(bytes, "activations", &Serial).err().expect("more than there is");
            assert_eq!(error, ExecError::Reserve { what: "activations", bytes });
            assert!(error.to_string().contains("for activations"), "{error}");
        }
        let error = floats(1 << 60, "sums").unwrap_err();
        assert_eq!(error, ExecError::Reserve { what: "sums", bytes: 1 << 62 });
        assert_eq!(floats(3, "sums").unwrap(), [0.0; 3]);
    }
}
