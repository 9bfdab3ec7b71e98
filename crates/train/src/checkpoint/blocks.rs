//! Large files, written block by block in any order.
//!
//! Blocks go to the disk past the system's cache where the file system can: the cache would take as much memory as the file, and
//! half a second of kernel time for each gigabyte more. The checksum is BLAKE3's, a tree: each block is a subtree of it, and
//! the subtrees are joined when all are there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

use super::CheckpointError;
use super::disk::{Disk, DiskOp};

/// What is written at once: a power of two, as a subtree of the checksum has to be; large enough for disks at full speed.
pub(super) const BLOCK_BYTES: usize = if cfg!(test) { 64 << 10 } else { 4 << 20 };
/// Where memory and length of a write past the cache have to begin and end.
const ALIGN_BYTES: usize = 4096;

/// What a writer takes beside what it writes.
pub(crate) const WRITER_BYTES: usize = BLOCK_BYTES + ALIGN_BYTES;

/// Where a block is put together.
pub(super) struct BlockBuffer {
    bytes: Vec<u8>,
    start: usize,
}

impl BlockBuffer {
    pub(super) fn new() -> BlockBuffer {
        let bytes = vec![0; WRITER_BYTES];
        let start = bytes.as_ptr().align_offset(ALIGN_BYTES);
        BlockBuffer { bytes, start }
    }

    fn block(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + len]
    }
}

/// A file of known length that is being written.
pub(crate) struct BlockFile<'a> {
    disk: &'a Disk,
    path: &'a Path,
    file: File,
    n_bytes: u64,
    /// Whether writes go past the cache.
    direct: bool,
    /// By block, its part of the checksum.
    sums: Vec<Option<ChainingValue>>,
    /// The checksum of a file that is one block.
    whole: Option<blake3::Hash>,
}

impl<'a> BlockFile<'a> {
    /// Makes an empty file that will have `n_bytes`, at least one.
    pub(crate) fn create(disk: &'a Disk, path: &'a Path, n_bytes: u64) -> Result<Self, CheckpointError> {
        let n_blocks = n_bytes.div_ceil(BLOCK_BYTES as u64) as usize;
        let open = || -> io::Result<(File, bool)> {
            if n_blocks > 1
                && let Ok(file) = open_direct(path)
            {
                return Ok((file, true));
            }
            Ok((File::create(path)?, false))
        };
        let opened = disk.op(DiskOp::Create(path), open);
        let (file, direct) = opened.map_err(|e| CheckpointError::writing(path, e))?;
        Ok(BlockFile { disk, path, file, n_bytes, direct, sums: vec![None; n_blocks], whole: None })
    }

    /// How many blocks it has; all but the last are equally long.
    pub(super) fn n_blocks(&self) -> usize {
        self.sums.len()
    }

    /// Writes a block. `fill` puts together what the file holds from this byte on.
    pub(super) fn put(
        &mut self,
        number: usize,
        buffer: &mut BlockBuffer,
        fill: impl FnOnce(u64, &mut [u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let start = (number * BLOCK_BYTES) as u64;
        let len = (self.n_bytes - start).min(BLOCK_BYTES as u64) as usize;
        let block = buffer.block(len);
        fill(start, block)?;
        if self.sums.len() == 1 {
            self.whole = Some(blake3::hash(block));
        } else {
            let mut hasher = Hasher::new();
            hasher.set_input_offset(start).update(block);
            self.sums[number] = Some(hasher.finalize_non_root());
        }
        // What is no whole block cannot go past the cache.
        let past_cache = self.direct && len == BLOCK_BYTES;
        if self.direct && !past_cache {
            set_direct(&self.file, false).map_err(|e| CheckpointError::writing(self.path, e))?;
        }
        let written = self.disk.write_at(&self.file, self.path, start, block);
        let written = match written {
            // A file system that refuses with the write, and not when the file is opened.
            Err(e) if past_cache && e.kind() == io::ErrorKind::InvalidInput => {
                self.direct = false;
                set_direct(&self.file, false)
                    .and_then(|()| self.disk.write_at(&self.file, self.path, start, block))
            }
            Ok(()) if self.direct && !past_cache => set_direct(&self.file, true),
            written => written,
        };
        written.map_err(|e| CheckpointError::writing(self.path, e))
    }

    /// Brings everything to the disk. Gives the checksum.
    pub(super) fn finish(self) -> Result<blake3::Hash, CheckpointError> {
        let synced = self.disk.op(DiskOp::Sync(self.path), || self.file.sync_all());
        synced.map_err(|e| CheckpointError::writing(self.path, e))?;
        let sums: Vec<ChainingValue> = self.sums.into_iter().flatten().collect();
        Ok(match self.whole {
            Some(hash) => hash,
            None => {
                let (left, right) = sums.split_at(n_left(sums.len()));
                merge_subtrees_root(&join(left), &join(right), Mode::Hash)
            }
        })
    }
}

/// How many blocks of a tree of `n` lie in its left half: as many as make a whole tree, but not all.
fn n_left(n: usize) -> usize {
    n.next_power_of_two() / 2
}

fn join(sums: &[ChainingValue]) -> ChainingValue {
    match sums {
        [one] => *one,
        _ => {
            let (left, right) = sums.split_at(n_left(sums.len()));
            merge_subtrees_non_root(&join(left), &join(right), Mode::Hash)
        }
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    OpenOptions::new().write(true).create(true).truncate(true).custom_flags(direct).open(path)
}

#[cfg(target_os = "linux")]
fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, direct);
    Ok(fcntl_setfl(file, flags)?)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn set_direct(_: &File, _: bool) -> io::Result<()> {
    Ok(())
}

impl Disk {
    /// Writes bytes at an offset of a file.
    pub(super) fn write_at(&self, file: &File, path: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut n_done = 0;
        let written = self.op(DiskOp::Write(path, offset, bytes), || {
            // Not `write_all_at`: it does not say how much went through before the disk was full.
            while n_done < bytes.len() {
                let n = match file.write_at(&bytes[n_done..], offset + n_done as u64) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    // The rest of a write that a full disk has cut at an odd place.
                    Err(e) if n_done > 0 && e.kind() == io::ErrorKind::InvalidInput => {
                        return Err(io::ErrorKind::StorageFull.into());
                    }
                    Err(e) => return Err(e),
                };
                self.count(n as u64);
                n_done += n;
            }
            Ok(())
        });
        #[cfg(test)]
        if written.is_err() && n_done == 0 {
            // A kill inside a write leaves a part of it; a whole number of sectors, or it cannot go past the cache.
            let half = bytes.len() / 2;
            let _ = file.write_all_at(&bytes[..half], offset);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Around blocks, halves of trees and the end of the file, in any order: what is there is what was put, and its checksum.
    #[test]
    fn blocks_in_any_order_are_a_file_with_its_checksum() {
        let folders =
            [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())];
        folders.into_iter().for_each(|folder| check(&folder.unwrap().path().join("file")));
    }

    fn check(path: &Path) {
        let mut buffer = BlockBuffer::new();
        for n_bytes in [1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES]
            .into_iter()
            .chain((2..10).map(|n| n * BLOCK_BYTES + 12))
        {
            let want: Vec<u8> = (0..n_bytes).map(|i| (i * 31 + i / 977) as u8).collect();
            let disk = Disk::default();
            let mut file = BlockFile::create(&disk, path, n_bytes as u64).unwrap();
            let n = file.n_blocks();
            // 7 is no divisor of any number of blocks here, so that each has its turn.
            for number in (0..n).map(|i| if n.is_multiple_of(7) { i } else { i * 7 % n }).rev() {
                file.put(number, &mut buffer, |start, block| {
                    block.copy_from_slice(&want[start as usize..][..block.len()]);
                    Ok(())
                })
                .unwrap();
            }
            assert_eq!(file.finish().unwrap(), blake3::hash(&want), "{n_bytes}");
            assert!(std::fs::read(path).unwrap() == want, "{n_bytes}");
            assert_eq!(disk.counted(), n_bytes as u64);
        }
    }
}
