//! Two ranks that send to each other and do not receive: each waits for the other to read, so neither makes progress.
//!
//! Short messages wait in the socket buffers until they are read, and the ranks never notice. With long ones nothing
//! moves, and what a rank finds in its socket ends in the middle of a frame that the other is still sending.

use std::time::{Duration, Instant};

use rustix::io::ioctl_fionread;

use super::Links;
use crate::frame::{FrameOp, Header};

/// How long nothing must move in either direction before a rank examines its unread bytes.
const STILL: Duration = Duration::from_secs(2);

impl Links {
    /// Whether a peer that does not read what this rank sends is itself stuck in the middle of sending to this rank. To
    /// be called whenever nothing moved; `unread` is how much was unread here and since when, `None` after something
    /// moved.
    pub(super) fn crossed(&self, peer: usize, unread: &mut Option<(u64, Instant)>) -> bool {
        let now = self.system.now();
        let Some(peer) = &self.peers[peer] else { return false };
        let here = ioctl_fionread(&peer.stream).unwrap_or(0);
        match unread {
            Some((before, since)) if *before == here => {
                if now.saturating_duration_since(*since) < STILL {
                    return false;
                }
            }
            _ => {
                *unread = Some((here, now));
                return false;
            }
        }
        *unread = None;
        let mut bytes = vec![0; here as usize];
        let n = peer.stream.peek(&mut bytes).unwrap_or(0);
        ends_in_a_message(&bytes[..n], peer.head_bytes(), |ahead, head| peer.decode_ahead(ahead, head))
    }
}

/// Whether these are frames of messages, the last of which is incomplete. `decode` gets the number of a frame and its
/// head.
fn ends_in_a_message(
    mut bytes: &[u8],
    head_bytes: usize,
    decode: impl Fn(u64, &[u8]) -> Option<Header>,
) -> bool {
    let mut n = 0;
    while let Some((head, payload)) = bytes.split_at_checked(head_bytes) {
        let Some(header) = decode(n, head) else { return false };
        n += 1;
        if header.op != FrameOp::Send as u8 {
            return false;
        }
        match usize::try_from(header.length).ok().and_then(|length| payload.get(length..)) {
            Some(rest) => bytes = rest,
            None => return true,
        }
    }
    !bytes.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{HEADER_BYTES, Tag, Terms};

    fn ends_in_a_message(bytes: &[u8]) -> bool {
        super::ends_in_a_message(bytes, HEADER_BYTES, |_, head| Header::decode(head.first_chunk()?).ok())
    }

    #[test]
    fn only_a_message_that_is_not_whole_counts() {
        let frame = |op: FrameOp, length: usize| {
            let tag = Tag { step: 0, op, dtype: 0, count: length as u64, terms: Terms::default() };
            [&Header::of(&tag, 0, 0, length).encode()[..], &vec![7; length]].concat()
        };
        let two = [frame(FrameOp::Send, 100), frame(FrameOp::Send, 0)].concat();
        assert!(!ends_in_a_message(&two));
        assert!(!ends_in_a_message(&[]));
        for end in 1..two.len() {
            let whole = end == HEADER_BYTES + 100;
            assert_eq!(ends_in_a_message(&two[..end]), !whole, "cut at {end}");
        }
        assert!(!ends_in_a_message(&frame(FrameOp::Farewell, 100)[..80]));
        assert!(!ends_in_a_message(&[0; 80]));
    }
}
