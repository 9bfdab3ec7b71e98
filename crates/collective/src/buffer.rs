//! Elements in memory of a group ([`Comm::block`]), which the other ranks of a host access without a copy.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use polyreme_net::{Block, Report};

use crate::comm::Comm;
use crate::element::Element;

/// Elements of one rank that the others access without a copy while it takes part in an operation on them.
pub struct Buffer<T> {
    block: Block,
    len: usize,
    of: PhantomData<T>,
}

impl Comm {
    /// Zeros in memory of the group. All ranks must ask for the same number at the same time. The memory lives as long
    /// as the group.
    pub fn buffer<T: Element>(&mut self, len: usize) -> Result<Buffer<T>, Report> {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits in memory");
        let block = self.block(bytes, "a buffer")?;
        assert!(block.bytes() >= bytes, "a block is as long as it was asked for");
        Ok(Buffer { block, len, of: PhantomData })
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the block is this rank's own and has no other clone; it is page-aligned and zeroed, and any bits are
        // a valid element. Other ranks touch it only inside operations, for which this rank lends it by `&mut`.
        unsafe { std::slice::from_raw_parts(self.block.ptr().as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow of the buffer is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.block.ptr().as_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reduce;

    #[test]
    fn a_buffer_is_summed_like_any_other_memory() {
        let ranks: Vec<_> = Comm::local(3)
            .into_iter()
            .map(|mut comm| {
                std::thread::spawn(move || {
                    for len in [0, 1, 1000, 100_000] {
                        let mut data = comm.buffer::<f32>(len).unwrap();
                        assert!(data.iter().all(|x| *x == 0.0) && data.len() == len);
                        data.fill(comm.rank() as f32 + 1.0);
                        comm.all_reduce(&mut data, Reduce::Sum).unwrap();
                        assert!(data.iter().all(|x| *x == 6.0), "{len}");
                    }
                    comm.finish().unwrap();
                })
            })
            .collect();
        ranks.into_iter().for_each(|r| r.join().unwrap());
    }
}
