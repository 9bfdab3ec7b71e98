//! A failure report in shared memory: the first one stays, and all ranks give the same report.

use std::time::Duration;

use polyreme_sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use polyreme_sync::{Instant, thread};

use crate::block::Shareable;
use crate::report::{Cause, Report};

/// Room for one report in shared memory; all zeros is none.
#[repr(C, align(64))]
pub struct Notice {
    state: AtomicU32,
    rank: AtomicU32,
    kind: AtomicU32,
    _room: AtomicU32,
    step: AtomicU64,
    ms: AtomicU64,
    host: [AtomicU8; 96],
    op: [AtomicU8; 64],
    text: [AtomicU8; 832],
}

// SAFETY: atomics, in C's order.
unsafe impl Shareable for Notice {}

const NONE: u32 = 0;
const WRITING: u32 = 1;
const WRITTEN: u32 = 2;

/// Writing a notice takes a few microseconds; if the writer dies meanwhile, the others wait no longer than this.
const WRITER_MAX: Duration = Duration::from_millis(50);

impl Notice {
    /// Whether a rank has written one or is about to. One load.
    pub fn is_up(&self) -> bool {
        self.state.load(Ordering::SeqCst) != NONE
    }

    /// Writes a report if there is none; returns whether this is it now.
    pub fn put_up(&self, report: &Report) -> bool {
        if self.state.compare_exchange(NONE, WRITING, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return false;
        }
        let (kind, ms, text) = match &report.cause {
            Cause::Gone => (0, 0, ""),
            Cause::Silent { ms } => (1, *ms, ""),
            Cause::Stalled { ms } => (5, *ms, ""),
            Cause::Unreachable { what } => (6, 0, &what[..]),
            Cause::Disagrees { what } => (2, 0, &what[..]),
            Cause::Failed { why } => (3, 0, &why[..]),
            Cause::Damaged { what } => (4, 0, &what[..]),
        };
        self.rank.store(u32::try_from(report.rank).unwrap_or(u32::MAX), Ordering::Relaxed);
        self.kind.store(kind, Ordering::Relaxed);
        self.step.store(report.step, Ordering::Relaxed);
        self.ms.store(ms, Ordering::Relaxed);
        write(&self.host, &report.host);
        write(&self.op, &report.op);
        write(&self.text, text);
        self.state.store(WRITTEN, Ordering::SeqCst);
        true
    }

    /// The report, if there is one.
    pub fn read(&self) -> Option<Report> {
        let start = Instant::now();
        loop {
            match self.state.load(Ordering::SeqCst) {
                NONE => return None,
                WRITING if start.elapsed() < WRITER_MAX => thread::yield_now(),
                _ => break,
            }
        }
        let text = read(&self.text);
        let cause = match self.kind.load(Ordering::Relaxed) {
            0 => Cause::Gone,
            1 => Cause::Silent { ms: self.ms.load(Ordering::Relaxed) },
            2 => Cause::Disagrees { what: text },
            3 => Cause::Failed { why: text },
            5 => Cause::Stalled { ms: self.ms.load(Ordering::Relaxed) },
            6 => Cause::Unreachable { what: text },
            _ => Cause::Damaged { what: text },
        };
        Some(Report {
            rank: self.rank.load(Ordering::Relaxed) as usize,
            host: read(&self.host),
            step: self.step.load(Ordering::Relaxed),
            op: read(&self.op),
            cause,
        })
    }
}

fn write(to: &[AtomicU8], text: &str) {
    let mut end = text.len().min(to.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (cell, byte) in to.iter().zip(text.as_bytes()[..end].iter().chain(std::iter::once(&0))) {
        cell.store(*byte, Ordering::Relaxed);
    }
}

fn read(from: &[AtomicU8]) -> String {
    let bytes = from.iter().map(|b| b.load(Ordering::Relaxed)).take_while(|b| *b != 0);
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Block;

    #[test]
    fn the_first_report_stays_and_reads_as_it_was() {
        let report =
            |cause| Report { rank: 7, host: "höst".into(), step: 1 << 40, op: "barrier".into(), cause };
        for cause in [
            Cause::Gone,
            Cause::Silent { ms: 60_000 },
            Cause::Stalled { ms: 1_800_000 },
            Cause::Disagrees { what: "10, not 12".into() },
            Cause::Failed { why: "ä".repeat(2000) },
            Cause::Damaged { what: String::new() },
        ] {
            let block = Block::of_this_process(size_of::<Notice>()).unwrap();
            let notice = block.at::<Notice>(0);
            assert!(!notice.is_up() && notice.read().is_none());
            assert!(notice.put_up(&report(cause.clone())));
            assert!(!notice.put_up(&report(Cause::Gone)));
            let want = match cause {
                Cause::Failed { .. } => Cause::Failed { why: "ä".repeat(416) },
                other => other,
            };
            assert!(notice.is_up());
            assert_eq!(notice.read(), Some(report(want)));
        }
    }
}
