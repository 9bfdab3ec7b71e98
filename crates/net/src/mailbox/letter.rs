//! Letters, and the memory of their bytes.
//!
//! What is posted is shared with the thread that sends it, and not copied. What arrives over a socket is read into memory that is
//! used again: new pages cost more than the copy out of the socket, and a server gets letters of the same length in every step.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::limits::{Class, Label};

/// Bytes to post, shared with the sending thread; they must not change before the letter is sent.
#[derive(Clone)]
pub struct Payload {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Payload {
    /// A range of what an owner holds, which must be the same bytes each time it is asked.
    ///
    /// # Panics
    /// If the owner does not hold that range.
    pub fn part(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Payload {
        let held = (*owner).as_ref().len();
        assert!(range.start <= range.end && range.end <= held, "bytes {range:?} of {held}");
        Payload { owner, range }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl<T: AsRef<[u8]> + Send + Sync + 'static> From<Arc<T>> for Payload {
    fn from(owner: Arc<T>) -> Payload {
        let range = 0..(*owner).as_ref().len();
        Payload { owner, range }
    }
}

impl From<Arc<[u8]>> for Payload {
    fn from(bytes: Arc<[u8]>) -> Payload {
        Payload::from(Arc::new(bytes))
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Payload {
        Payload::from(Arc::new(bytes))
    }
}

impl From<&[u8]> for Payload {
    fn from(bytes: &[u8]) -> Payload {
        Payload::from(bytes.to_vec())
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} bytes", self.range.len())
    }
}

/// A letter that has arrived. It derefs to its bytes.
#[derive(Debug)]
pub struct Letter {
    /// Who posted it.
    pub from: usize,
    /// Its class.
    pub class: Class,
    /// What the sender wrote on it.
    pub label: Label,
    body: LetterBody,
}

#[derive(Debug)]
enum LetterBody {
    /// Shared with the sender, which is a thread of this process.
    Given(Payload),
    /// The first bytes of memory that is used again.
    Came { memory: Vec<u8>, length: usize, shelf: Arc<Shelf> },
}

impl Letter {
    pub(super) fn given(from: usize, class: Class, label: Label, payload: Payload) -> Letter {
        Letter { from, class, label, body: LetterBody::Given(payload) }
    }

    pub(super) fn came(
        from: usize,
        class: Class,
        label: Label,
        (memory, length): (Vec<u8>, usize),
        shelf: Arc<Shelf>,
    ) -> Letter {
        Letter { from, class, label, body: LetterBody::Came { memory, length, shelf } }
    }

    /// Its bytes as a vector; copied only if the sender shares them.
    pub fn into_bytes(mut self) -> Vec<u8> {
        match &mut self.body {
            LetterBody::Given(payload) => payload.to_vec(),
            LetterBody::Came { memory, length, .. } => {
                let mut memory = std::mem::take(memory);
                memory.truncate(*length);
                memory
            }
        }
    }
}

impl Deref for Letter {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.body {
            LetterBody::Given(payload) => payload,
            LetterBody::Came { memory, length, .. } => &memory[..*length],
        }
    }
}

impl Drop for Letter {
    fn drop(&mut self) {
        if let LetterBody::Came { memory, shelf, .. } = &mut self.body {
            shelf.give(std::mem::take(memory));
        }
    }
}

/// Shorter memory is not worth keeping: the allocator is fast enough.
const KEPT_BYTES_MIN: usize = 64 << 10;

/// Memory of letters that were read, for those to come.
#[derive(Debug)]
pub(super) struct Shelf {
    bytes_max: usize,
    kept: Mutex<Vec<Vec<u8>>>,
}

impl Shelf {
    /// A shelf that keeps at most this many bytes.
    pub(super) fn new(bytes_max: usize) -> Arc<Shelf> {
        Arc::new(Shelf { bytes_max, kept: Mutex::default() })
    }

    /// Memory for this many bytes with unspecified contents; `None` if there is not enough.
    pub(super) fn take(&self, bytes: usize) -> Option<Vec<u8>> {
        let mut kept = self.kept();
        // Not a far longer one, which a short letter would hold on to.
        let fitting = kept.iter().position(|m| m.capacity() >= bytes && m.capacity() / 4 <= bytes);
        if let Some(k) = fitting {
            return Some(kept.swap_remove(k));
        }
        drop(kept);
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).ok()?;
        Some(memory)
    }

    fn give(&self, memory: Vec<u8>) {
        let bytes = memory.capacity();
        if (KEPT_BYTES_MIN..=self.bytes_max).contains(&bytes) {
            let mut kept = self.kept();
            // The oldest go first.
            while kept.iter().map(Vec::capacity).sum::<usize>() + bytes > self.bytes_max {
                kept.remove(0);
            }
            kept.push(memory);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_within_its_bound() {
        let shelf = Shelf::new(1 << 20);
        let memory = shelf.take(300_000).unwrap();
        let at = memory.as_ptr();
        drop(Letter::came(0, Class::Data, Label::default(), (memory, 0), shelf.clone()));
        assert!(shelf.take(1000).unwrap().capacity() < 300_000, "too long for that");
        let again = shelf.take(290_000).unwrap();
        assert!(again.as_ptr() == at && shelf.kept().is_empty());
        for bytes in [again.capacity(), 500_000, 600_000, 2 << 20, 1] {
            shelf.give(Vec::with_capacity(bytes));
        }
        let kept: Vec<usize> = shelf.kept().iter().map(Vec::capacity).collect();
        assert_eq!(kept, [600_000]);
        assert!(shelf.take(usize::MAX / 2).is_none());
    }

    #[test]
    fn a_payload_is_a_part_of_what_somebody_owns() {
        let owner: Arc<Vec<u8>> = Arc::new((0..10).collect());
        let part = Payload::part(owner.clone(), 3..7);
        assert_eq!(*part, [3, 4, 5, 6]);
        assert_eq!(part.as_ptr(), owner[3..].as_ptr());
        let letter = Letter::given(0, Class::Data, Label::default(), part);
        assert_eq!((letter.len(), letter.into_bytes()), (4, vec![3, 4, 5, 6]));
    }
}
