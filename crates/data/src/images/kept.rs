//! Decoded images that stay in memory up to a limit, so that later epochs need not decode them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Room for each image of a set.
#[derive(Debug)]
pub(crate) struct KeptImages {
    /// Each is set at most once, by the thread that decodes it first.
    images: Vec<OnceLock<Box<[u8]>>>,
    bytes_left: AtomicUsize,
}

impl KeptImages {
    /// For a set of `n` images, of which as many are kept as fit into `bytes`.
    pub(crate) fn new(n: usize, bytes: usize) -> KeptImages {
        KeptImages { images: (0..n).map(|_| OnceLock::new()).collect(), bytes_left: AtomicUsize::new(bytes) }
    }

    /// The pixels of an image that is kept.
    pub(crate) fn get(&self, idx: usize) -> Option<&[u8]> {
        self.images[idx].get().map(|pixels| &**pixels)
    }

    /// How many bytes there is still room for.
    #[cfg(test)]
    pub(crate) fn bytes_left(&self) -> usize {
        self.bytes_left.load(Ordering::Relaxed)
    }

    /// Keeps a copy if there is room.
    pub(crate) fn keep(&self, idx: usize, pixels: &[u8]) {
        let take = |left: usize| left.checked_sub(pixels.len());
        // Relaxed: only the sum counts, not the order.
        if self.bytes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            return;
        }
        if self.images[idx].set(pixels.into()).is_err() {
            // Another thread decoded the same image meanwhile.
            self.bytes_left.fetch_add(pixels.len(), Ordering::Relaxed);
        }
    }
}
