//! Memory that the ranks of one host can see: threads of one process, or processes that mapped the same pages.
//!
//! A block is only memory. Its users agree on which rank may read or write which part of it, and when.

use std::alloc::{Layout, alloc, dealloc};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use polyreme_sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Blocks start at multiples of this: whole pages, like mappings.
pub const ALIGN_BYTES: usize = 4096;

/// The size of a huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory of a fixed size, shared by all clones.
#[derive(Clone)]
pub struct Block {
    ptr: NonNull<u8>,
    bytes: usize,
    _owner: Arc<Owner>,
}

/// Who frees the memory, and how.
enum Owner {
    /// From this process's allocator.
    Heap { ptr: NonNull<u8>, layout: Layout },
    /// Pages of a file that others may have mapped too.
    Mapping { ptr: NonNull<u8>, bytes: usize },
}

/// Types that may live in memory that several ranks read and write at the same time.
///
/// # Safety
/// Made of atomics only, with the layout of `repr(C)`, and valid for any bytes, in particular zeros.
pub unsafe trait Shareable {}

// SAFETY: atomics.
unsafe impl Shareable for AtomicU8 {}
// SAFETY: atomics.
unsafe impl Shareable for AtomicU32 {}
// SAFETY: atomics.
unsafe impl Shareable for AtomicU64 {}
// SAFETY: an array of shareable elements is shareable.
unsafe impl<T: Shareable, const N: usize> Shareable for [T; N] {}

// SAFETY: the owner only frees its memory, once.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}
// SAFETY: a block is an address and a length; code that dereferences the address is responsible for the access.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Memory of this process; an error if there is not enough.
    pub fn of_this_process(bytes: usize) -> Result<Block, Errno> {
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN_BYTES };
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(|_| Errno::NOMEM)?;
        // SAFETY: the size is not zero.
        let ptr = NonNull::new(unsafe { alloc(layout) }).ok_or(Errno::NOMEM)?;
        let block = Block { ptr, bytes, _owner: Arc::new(Owner::Heap { ptr, layout }) };
        // Before the first touch: the kernel does not turn existing pages into huge ones. That is why the allocator is
        // not asked for zeros, which it would write at once.
        block.ask_for_huge_pages();
        // SAFETY: the memory has this length and nothing else refers to it.
        unsafe { ptr.write_bytes(0, layout.size()) };
        Ok(block)
    }

    /// Matrix products walk through large blocks, with fewer TLB misses on huge pages. A refusal only costs speed.
    fn ask_for_huge_pages(&self) {
        let whole = self.bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if whole > 0 {
            // SAFETY: advice on memory that this block owns.
            let _: Result<(), Errno> =
                unsafe { madvise(self.ptr.as_ptr().cast(), whole, Advice::LinuxHugepage) };
        }
    }

    /// Maps at least `bytes` bytes of a file, which every process that maps them sees.
    pub(crate) fn of_file(file: BorrowedFd, bytes: usize) -> Result<Block, Errno> {
        let (mapped, protection) = (bytes.max(1), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let ptr = unsafe { mmap(std::ptr::null_mut(), mapped, protection, MapFlags::SHARED, file, 0)? };
        let ptr = NonNull::new(ptr.cast()).ok_or(Errno::NOMEM)?;
        let block = Block { ptr, bytes, _owner: Arc::new(Owner::Mapping { ptr, bytes: mapped }) };
        block.ask_for_huge_pages();
        Ok(block)
    }

    /// Faults in the first `bytes` now, so that no later access waits for a page: a first touch runs at 0.8 GiB/s, a
    /// warm one at 13.
    pub(crate) fn fault_in(&self, bytes: usize) -> Result<(), Errno> {
        let bytes = bytes.min(self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range lies inside the mapping, and faulting pages in changes no byte.
        match unsafe { madvise(self.ptr.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) } {
            // Before Linux 5.14, pages are faulted in at the first touch.
            Err(Errno::INVAL) => Ok(()),
            done => done,
        }
    }

    /// The value at an offset.
    ///
    /// # Panics
    /// If it does not fit there.
    pub fn at<T: Shareable>(&self, offset: usize) -> &T {
        let end = offset.checked_add(size_of::<T>());
        assert!(end.is_some_and(|end| end <= self.bytes), "{offset} is outside of a block of {}", self.bytes);
        let ptr = self.ptr.as_ptr().wrapping_add(offset).cast::<T>();
        assert!(ptr.is_aligned(), "{offset} is not aligned for this type");
        // SAFETY: inside the block and aligned; the type promises that any bytes are valid, and that others may write
        // to it.
        unsafe { &*ptr }
    }

    /// Its address in this process.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        match *self {
            // SAFETY: allocated with this layout.
            Owner::Heap { ptr, layout } => unsafe { dealloc(ptr.as_ptr(), layout) },
            Owner::Mapping { ptr, bytes } => {
                // SAFETY: mapped with this size, and no clone of the block is left. It cannot fail for an existing
                // mapping.
                let _ = unsafe { munmap(ptr.as_ptr().cast(), bytes) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On Linux, kilobytes of huge pages behind an address, if the system says so.
    fn huge_kib(address: usize) -> Option<usize> {
        let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let inside = |line: &str| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
            Some((start..end).contains(&address))
        };
        let mut lines = maps.lines().skip_while(|line| inside(line) != Some(true));
        lines.find_map(|line| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix(" kB")?.parse().ok())
    }

    #[test]
    fn blocks_are_zeros_at_whole_pages() {
        for bytes in [0, 1, 5000, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17] {
            let block = Block::of_this_process(bytes).unwrap();
            let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN_BYTES };
            assert!(block.ptr().as_ptr().addr().is_multiple_of(align), "{bytes} bytes");
            assert_eq!(block.bytes(), bytes);
            for at in (0..bytes).step_by(1000).chain(bytes.checked_sub(1)) {
                assert_eq!(block.at::<AtomicU8>(at).load(std::sync::atomic::Ordering::Relaxed), 0);
            }
        }
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        for bytes in [1 << 62, isize::MAX as usize, usize::MAX] {
            assert_eq!(Block::of_this_process(bytes).err(), Some(Errno::NOMEM), "{bytes} bytes");
        }
    }

    /// Where the system grants huge pages on request, a fresh large block consists of them.
    #[test]
    fn large_blocks_are_of_huge_pages() {
        let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !mode.contains("[madvise]") && !mode.contains("[always]") {
            return;
        }
        let blocks: Vec<_> = (0..4).map(|_| Block::of_this_process(8 * HUGE_PAGE_BYTES).unwrap()).collect();
        let huge: usize =
            blocks.iter().map(|b| huge_kib(b.ptr().as_ptr().addr()).expect("a mapping of its own")).sum();
        assert!(huge > 0, "no huge page in {} blocks", blocks.len());
    }
}
