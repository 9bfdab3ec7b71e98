//! The messages between rank 0 and the others on control connections, after the proof.
//!
//! Written by hand and not by a format crate: they are few and small, and every length in them is checked against what
//! has arrived before memory is reserved.

use std::net::SocketAddr;

use super::bytes::{Malformed, Put, Reader};
use super::channel::Wire;
use crate::pulse::{Doing, Position};
use crate::rendezvous::Member;
use crate::report::{Cause, Report};

/// Longest blob of an exchange.
pub const SHARE_BYTES_MAX: usize = 64 << 10;

/// Two ranks that cannot talk, as one of them saw it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LinkFault {
    /// The rank that reports it.
    pub(crate) from: u32,
    /// The rank that it cannot reach.
    pub(crate) to: u32,
    /// What happened.
    pub(crate) why: String,
}

/// One message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// Rank 0 accepts a rank, says how long it waits for the others, and how patient all ranks are.
    Welcome { wait_ms: u64, patience_ms: u64, stall_ms: u64 },
    /// Rank 0 refuses a rank, or gives up.
    Refused { why: String },
    /// A rank says where it can be reached.
    Here(Member),
    /// All ranks and where they can be reached.
    Table(Vec<Member>),
    /// Which pairs cannot talk; a rank sends its own, rank 0 sends all.
    Faults(Vec<LinkFault>),
    /// A heartbeat, with the rank's position.
    Beat(Position),
    /// A rank's part of an exchange.
    Share { seq: u64, blob: Vec<u8> },
    /// All parts of an exchange, by rank.
    Shared { seq: u64, blobs: Vec<Vec<u8>> },
    /// The job cannot go on.
    Report(Report),
    /// The regular end; answered in kind.
    Goodbye,
}

impl Wire for Message {
    fn encode(&self) -> Vec<u8> {
        Message::encode(self)
    }

    fn decode(bytes: &[u8]) -> Result<Message, Malformed> {
        Message::decode(bytes)
    }
}

impl Message {
    /// Longest message that a rank sends to rank 0.
    pub(crate) fn bytes_max_to_zero(size: usize) -> usize {
        (SHARE_BYTES_MAX + 64).max(size.saturating_mul(512)).max(16 << 10)
    }

    /// Longest message that rank 0 sends.
    pub(crate) fn bytes_max_from_zero(size: usize) -> usize {
        size.saturating_mul(SHARE_BYTES_MAX + 64).max(16 << 10)
    }

    /// Its bytes, without a length.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Message::Welcome { wait_ms, patience_ms, stall_ms } => {
                out.push(1);
                [wait_ms, patience_ms, stall_ms].into_iter().for_each(|ms| out.put_u64(*ms));
            }
            Message::Refused { why } => {
                out.push(2);
                out.put_text(why);
            }
            Message::Here(member) => {
                out.push(3);
                put_member(&mut out, member);
            }
            Message::Table(members) => {
                out.push(4);
                out.put_u32(members.len() as u32);
                members.iter().for_each(|member| put_member(&mut out, member));
            }
            Message::Faults(faults) => {
                out.push(5);
                out.put_u32(faults.len() as u32);
                for fault in faults {
                    out.put_u32(fault.from);
                    out.put_u32(fault.to);
                    out.put_text(&fault.why);
                }
            }
            Message::Beat(place) => {
                out.push(6);
                out.put_u64(place.step);
                out.push(place.doing as u8);
                out.put_u64(place.count);
                out.put_u64(place.effort);
            }
            Message::Share { seq, blob } => {
                out.push(7);
                out.put_u64(*seq);
                out.put_bytes(blob);
            }
            Message::Shared { seq, blobs } => {
                out.push(8);
                out.put_u64(*seq);
                out.put_u32(blobs.len() as u32);
                blobs.iter().for_each(|blob| out.put_bytes(blob));
            }
            Message::Report(report) => {
                out.push(9);
                out.put_u64(report.rank as u64);
                out.put_text(&report.host);
                out.put_u64(report.step);
                out.put_text(&report.op);
                put_cause(&mut out, &report.cause);
            }
            Message::Goodbye => out.push(11),
        }
        out
    }

    /// Decodes a message; no bytes may be left over.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Message, Malformed> {
        let mut r = Reader(bytes);
        let message = match r.u8()? {
            1 => Message::Welcome { wait_ms: r.u64()?, patience_ms: r.u64()?, stall_ms: r.u64()? },
            2 => Message::Refused { why: r.text()? },
            3 => Message::Here(member(&mut r)?),
            4 => {
                let n = r.count(MEMBER_BYTES_MIN)?;
                Message::Table((0..n).map(|_| member(&mut r)).collect::<Result<_, _>>()?)
            }
            5 => {
                let n = r.count(12)?;
                let fault = |r: &mut Reader| Ok(LinkFault { from: r.u32()?, to: r.u32()?, why: r.text()? });
                Message::Faults((0..n).map(|_| fault(&mut r)).collect::<Result<_, _>>()?)
            }
            6 => Message::Beat(Position {
                step: r.u64()?,
                doing: Doing::of_code(r.u8()?).ok_or(Malformed)?,
                count: r.u64()?,
                effort: r.u64()?,
            }),
            7 => Message::Share { seq: r.u64()?, blob: r.bytes(SHARE_BYTES_MAX)?.to_vec() },
            8 => {
                let seq = r.u64()?;
                let n = r.count(4)?;
                let blob = |r: &mut Reader| Ok(r.bytes(SHARE_BYTES_MAX)?.to_vec());
                Message::Shared { seq, blobs: (0..n).map(|_| blob(&mut r)).collect::<Result<_, _>>()? }
            }
            9 => Message::Report(Report {
                rank: usize::try_from(r.u64()?).map_err(|_| Malformed)?,
                host: r.text()?,
                step: r.u64()?,
                op: r.text()?,
                cause: cause(&mut r)?,
            }),
            11 => Message::Goodbye,
            _ => return Err(Malformed),
        };
        r.end()?;
        Ok(message)
    }
}

/// Three empty texts, a pid, a rank.
const MEMBER_BYTES_MIN: usize = 4 + 4 + 4 + 4 + 4;

fn put_member(out: &mut Vec<u8>, member: &Member) {
    out.put_u32(member.rank as u32);
    out.put_u32(member.pid);
    out.put_text(&member.host);
    out.put_text(&member.host_key);
    out.put_text(&member.addr.to_string());
}

fn member(r: &mut Reader) -> Result<Member, Malformed> {
    let rank = r.u32()? as usize;
    let pid = r.u32()?;
    let host = r.text()?;
    let host_key = r.text()?;
    let addr: SocketAddr = r.text()?.parse().map_err(|_| Malformed)?;
    Ok(Member { rank, host, host_key, pid, addr })
}

fn put_cause(out: &mut Vec<u8>, cause: &Cause) {
    match cause {
        Cause::Gone => out.push(1),
        Cause::Silent { ms } => {
            out.push(2);
            out.put_u64(*ms);
        }
        Cause::Stalled { ms } => {
            out.push(6);
            out.put_u64(*ms);
        }
        Cause::Unreachable { what } => {
            out.push(7);
            out.put_text(what);
        }
        Cause::Disagrees { what } => {
            out.push(3);
            out.put_text(what);
        }
        Cause::Failed { why } => {
            out.push(4);
            out.put_text(why);
        }
        Cause::Damaged { what } => {
            out.push(5);
            out.put_text(what);
        }
    }
}

fn cause(r: &mut Reader) -> Result<Cause, Malformed> {
    Ok(match r.u8()? {
        1 => Cause::Gone,
        2 => Cause::Silent { ms: r.u64()? },
        3 => Cause::Disagrees { what: r.text()? },
        4 => Cause::Failed { why: r.text()? },
        5 => Cause::Damaged { what: r.text()? },
        6 => Cause::Stalled { ms: r.u64()? },
        7 => Cause::Unreachable { what: r.text()? },
        _ => return Err(Malformed),
    })
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn samples() -> Vec<Message> {
        let member = Member {
            rank: 3,
            host: "höst".into(),
            host_key: "key".into(),
            pid: 7,
            addr: "[::1]:4711".parse().unwrap(),
        };
        let report = |cause| {
            Message::Report(Report {
                rank: 1,
                host: "a".into(),
                step: u64::MAX,
                op: "all_reduce".into(),
                cause,
            })
        };
        vec![
            Message::Welcome { wait_ms: 5, patience_ms: 6, stall_ms: 7 },
            Message::Refused { why: "no".into() },
            Message::Here(member.clone()),
            Message::Table(vec![]),
            Message::Table(vec![member; 3]),
            Message::Faults(vec![LinkFault { from: 1, to: 0, why: "timed out".into() }]),
            Message::Beat(Position { step: 9, doing: Doing::Broadcast, count: 1 << 50, effort: 3 }),
            Message::Share { seq: 1, blob: vec![] },
            Message::Share { seq: 2, blob: vec![7; SHARE_BYTES_MAX] },
            Message::Shared { seq: 2, blobs: vec![vec![1], vec![], vec![2, 3]] },
            report(Cause::Gone),
            report(Cause::Silent { ms: 4000 }),
            report(Cause::Stalled { ms: 4000 }),
            report(Cause::Unreachable { what: "w".into() }),
            report(Cause::Disagrees { what: "x".into() }),
            report(Cause::Failed { why: "y".into() }),
            report(Cause::Damaged { what: "z".into() }),
            Message::Goodbye,
        ]
    }

    #[test]
    fn each_message_comes_back_and_no_part_of_one_is_taken_for_a_whole() {
        for message in samples() {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Ok(message.clone()));
            for end in (0..bytes.len()).rev().take(200) {
                assert_eq!(Message::decode(&bytes[..end]), Err(Malformed), "{message:?} cut at {end}");
            }
            let longer = [bytes.as_slice(), &[0]].concat();
            assert_eq!(Message::decode(&longer), Err(Malformed), "{message:?} and a byte");
        }
    }

    /// Counts and lengths that nothing backs are refused before memory is reserved for them; and no byte changed to
    /// anything makes it panic.
    #[test]
    fn damaged_messages_are_refused() {
        let mut huge = vec![4];
        huge.put_u32(u32::MAX);
        assert_eq!(Message::decode(&huge), Err(Malformed));
        let mut huge = vec![7];
        huge.put_u64(1);
        huge.put_u32(u32::MAX);
        assert_eq!(Message::decode(&huge), Err(Malformed));
        for message in samples() {
            let bytes = message.encode();
            for at in 0..bytes.len().min(100) {
                for value in [0, 1, 0x7f, 0xff] {
                    let mut bytes = bytes.clone();
                    bytes[at] = value;
                    let _ = Message::decode(&bytes);
                }
            }
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let why = "ä".repeat(4000);
        let Ok(Message::Refused { why: read }) =
            Message::decode(&Message::Refused { why: why.clone() }.encode())
        else {
            panic!("a cut text is a text");
        };
        assert!(why.starts_with(&read));
        assert_eq!(read.len(), 4096);
    }
}
