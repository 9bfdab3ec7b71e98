//! One contiguous allocation, cut up by a plan. The only place of this crate, beside the pool, with unsafe code.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use polyreme_collective::{Block, Span};
use polyreme_dtype::{DType, Element};
use polyreme_graph::memory::ALIGN_BYTES;

use crate::error::ExecError;

/// Memory is asked for in huge pages where whole ones fit: fewer misses when products walk large matrices.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory of a fixed size.
///
/// Slices are handed out by offset through a shared reference, several at once; the callers (this crate's launches)
/// follow a memory plan that has been verified to keep them apart.
pub(crate) struct Arena {
    ptr: NonNull<u8>,
    layout: Layout,
    /// Memory that somebody else gives back, and that other ranks may see.
    block: Option<Block>,
}

// SAFETY: an arena owns its memory.
unsafe impl Send for Arena {}

impl Arena {
    /// Reserves `bytes` for `what`, zeroed and faulted in: the first step is as fast as the second.
    pub(crate) fn new(bytes: usize, what: &'static str) -> Result<Arena, ExecError> {
        let missing = ExecError::Reserve { what, bytes };
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN_BYTES };
        let Ok(layout) = Layout::from_size_align(bytes.next_multiple_of(ALIGN_BYTES), align) else {
            return Err(missing);
        };
        if bytes == 0 {
            let nowhere = std::ptr::without_provenance_mut(ALIGN_BYTES);
            return Ok(Arena { ptr: NonNull::new(nowhere).expect("not null"), layout, block: None });
        }
        // SAFETY: the size is not zero.
        let Some(ptr) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { return Err(missing) };
        let arena = Arena { ptr, layout, block: None };
        arena.fault_in();
        Ok(arena)
    }

    /// Memory that other ranks see too. When they may touch which part of it is fixed by the program that all run.
    pub(crate) fn over(block: Block) -> Arena {
        let layout = Layout::from_size_align(block.bytes(), ALIGN_BYTES).expect("a block fits in memory");
        Arena { ptr: block.ptr(), layout, block: Some(block) }
    }

    /// How large it is.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }

    fn fault_in(&self) {
        #[cfg(unix)]
        if self.layout.align() == HUGE_PAGE_BYTES {
            // SAFETY: advice on memory that this arena owns. A refusal costs speed only.
            let refused = unsafe {
                rustix::mm::madvise(
                    self.ptr.as_ptr().cast(),
                    self.layout.size() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
                    rustix::mm::Advice::LinuxHugepage,
                )
            };
            let _: Result<(), _> = refused;
        }
        for offset in (0..self.layout.size()).step_by(4096) {
            // SAFETY: inside the allocation; volatile so that the write of a zero is not dropped.
            unsafe { self.ptr.as_ptr().add(offset).write_volatile(0) };
        }
    }

    /// Elements `start..start + len` counted from byte `offset`.
    ///
    /// # Safety
    /// Nobody may write this range while the slice lives.
    pub(crate) unsafe fn slice<T: Element>(&self, offset: usize, len: usize) -> &[T] {
        self.check(offset, len * size_of::<T>(), align_of::<T>());
        // SAFETY: in bounds and aligned by `check`; every bit pattern is a `T`; not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(offset).cast(), len) }
    }

    /// The same, to write.
    ///
    /// # Safety
    /// Nobody else may hold this range while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_mut<T: Element>(&self, offset: usize, len: usize) -> &mut [T] {
        self.check(offset, len * size_of::<T>(), align_of::<T>());
        // SAFETY: as in `slice`, and held by nobody else by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().add(offset).cast(), len) }
    }

    /// Where elements lie, for an exchange with ranks that may see the same memory: an address, which borrows nothing.
    pub(crate) fn span(&self, offset: usize, count: usize, dtype: DType) -> Span {
        self.check(offset, count * dtype.bytes(), dtype.bytes());
        Span { ptr: self.ptr.as_ptr().wrapping_add(offset), count, dtype }
    }

    /// Makes it at least so large; what it held is lost then. On an error it is as large as it was.
    pub(crate) fn grow(&mut self, bytes: usize, what: &'static str) -> Result<(), ExecError> {
        if bytes <= self.bytes() {
            return Ok(());
        }
        // Both at once may be more than there is.
        let before = self.bytes();
        *self = Arena::new(0, what)?;
        match Arena::new(bytes, what) {
            Ok(larger) => *self = larger,
            Err(error) => {
                *self = Arena::new(before, what)?;
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

/// `len` zeros for `what`, outside of any plan; an error if there is no memory for them.
pub fn floats(len: usize, what: &'static str) -> Result<Vec<f32>, ExecError> {
    let mut floats = Vec::new();
    make_room(&mut floats, len, what)?;
    floats.resize(len, 0.0);
    Ok(floats)
}

/// Lets a vector hold `len` elements, those that it has included; an error if there is no memory for them.
pub fn make_room<T>(vec: &mut Vec<T>, len: usize, what: &'static str) -> Result<(), ExecError> {
    let bytes = len.saturating_mul(size_of::<T>());
    vec.try_reserve_exact(len.saturating_sub(vec.len())).map_err(|_| ExecError::Reserve { what, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks that share weights name the same elements at the same time, also while one of them writes its own part.
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
            let error = Arena::new(bytes, "activations").err().expect("more than there is");
            assert_eq!(error, ExecError::Reserve { what: "activations", bytes });
            assert!(error.to_string().contains("for activations"), "{error}");
        }
        let error = floats(1 << 60, "sums").unwrap_err();
        assert_eq!(error, ExecError::Reserve { what: "sums", bytes: 1 << 62 });
        assert_eq!(floats(3, "sums").unwrap(), [0.0; 3]);
    }
}
