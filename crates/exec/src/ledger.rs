//! What has been read of memory that is lent: one thread reads everything once, in any order, while another is about to overwrite
//! it bit by bit. What is read before it is overwritten costs nothing; the rest is copied as far as there is room,
//! and beyond that the overwriting thread waits for the reader.
//!
//! It knows nothing of engines: [`crate::loan`] does.

use std::ops::Range;

use polyreme_sync::{Condvar, Mutex, MutexGuard};

/// Elements of one chunk, the unit of accounting: copying one takes a millisecond at most.
const CHUNK_LEN: usize = if cfg!(feature = "interleave") { 2 } else { 1 << 20 };

/// The state of everything that is lent.
pub struct Ledger<T> {
    book: Mutex<Book<T>>,
    /// Signalled when something was read, or nothing more will be.
    changed: Condvar,
    /// Elements that copies may hold at the same time.
    room: usize,
}

struct Book<T> {
    /// The chunks of each arena.
    arenas: Vec<Vec<Chunk<T>>>,
    /// Elements that copies hold.
    copied: usize,
    /// The reader is gone.
    closed: bool,
}

struct Chunk<T> {
    /// Elements of the chunk that are still to be read.
    left: usize,
    /// A copy of the chunk, if it may have been overwritten.
    copy: Option<Box<[T]>>,
}

impl<T: Copy> Ledger<T> {
    /// Lends ranges of arenas, of which every element will be read once. Copies hold at most `room` elements, or one chunk.
    pub fn new(arenas: impl Iterator<Item = Vec<Range<usize>>>, room: usize) -> Ledger<T> {
        let chunks = |ranges: Vec<Range<usize>>| {
            let end = ranges.iter().map(|r| r.end).max().unwrap_or(0);
            let mut chunks: Vec<Chunk<T>> = Vec::new();
            chunks.resize_with(end.div_ceil(CHUNK_LEN), || Chunk { left: 0, copy: None });
            for (chunk, part) in ranges.iter().flat_map(|r| cut(r.clone())) {
                chunks[chunk].left += part.len();
            }
            chunks
        };
        let book = Book { arenas: arenas.map(chunks).collect(), copied: 0, closed: false };
        Ledger { book: Mutex::new(book), changed: Condvar::new(), room: room.max(CHUNK_LEN) }
    }

    /// Reads a range of an arena, in place unless it has been overwritten. `read` gets parts of it in order;
    /// `lies` returns a part in place.
    pub fn read<'a>(
        &self,
        arena: usize,
        range: Range<usize>,
        lies: impl Fn(Range<usize>) -> &'a [T],
        read: &mut dyn FnMut(&[T]),
    ) where
        T: 'a,
    {
        for (number, part) in cut(range) {
            // The reader only copies here, so the other thread does not wait for long.
            let mut book = self.lock();
            let chunk = &mut book.arenas[arena][number];
            assert!(chunk.left >= part.len(), "every element is read once");
            match &chunk.copy {
                None => read(lies(part.clone())),
                Some(copy) => {
                    let first = number * CHUNK_LEN;
                    read(&copy[part.start - first..part.end - first]);
                }
            }
            chunk.left -= part.len();
            if chunk.left == 0 {
                let freed = chunk.copy.take().map_or(0, |copy| copy.len());
                book.copied -= freed;
                self.changed.notify_all();
            }
        }
    }

    /// Waits until a range of an arena may be overwritten. `len` is the length of the arena.
    pub fn settle<'a>(
        &self,
        arena: usize,
        len: usize,
        range: Range<usize>,
        lies: impl Fn(Range<usize>) -> &'a [T],
    ) where
        T: 'a,
    {
        let mut book = self.lock();
        for (number, _) in cut(range) {
            while book.is_lying(arena, number) {
                let whole = number * CHUNK_LEN..len.min((number + 1) * CHUNK_LEN);
                if book.copied + whole.len() <= self.room {
                    book.copied += whole.len();
                    book.arenas[arena][number].copy = Some(lies(whole).into());
                } else {
                    book = self.changed.wait(book).unwrap_or_else(|e| e.into_inner());
                }
            }
        }
    }

    /// Ends the loan: nothing more will be read.
    pub fn close(&self) {
        let mut book = self.lock();
        book.closed = true;
        book.arenas.iter_mut().flatten().for_each(|chunk| chunk.copy = None);
        self.changed.notify_all();
    }

    /// Whether the loan has ended.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Nothing inside panics halfway, but for what the reader does with what it gets.
    fn lock(&self) -> MutexGuard<'_, Book<T>> {
        self.book.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl<T> Book<T> {
    /// Whether a part of a chunk is still to be read in place.
    fn is_lying(&self, arena: usize, number: usize) -> bool {
        let chunk = self.arenas[arena].get(number);
        !self.closed && chunk.is_some_and(|chunk| chunk.left > 0 && chunk.copy.is_none())
    }
}

/// The chunks that a range touches, and which elements of it lie in each.
fn cut(range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let chunks = range.start / CHUNK_LEN..range.end.div_ceil(CHUNK_LEN);
    chunks.filter_map(move |number| {
        let part = range.start.max(number * CHUNK_LEN)..range.end.min((number + 1) * CHUNK_LEN);
        (!part.is_empty()).then_some((number, part))
    })
}
