//! A report as bytes: what a rank that fails tells the others over the links, so that all name the same culprit.

use crate::report::{Cause, Report};

/// The longest farewell. Texts are cut to fit.
pub(super) const BYTES_MAX: usize = 1024;

/// The longest text inside a farewell; there are three.
const TEXT_BYTES_MAX: usize = 300;

pub(super) fn encode(report: &Report) -> Vec<u8> {
    let (code, ms, text) = match &report.cause {
        Cause::Gone => (0u8, 0, ""),
        Cause::Silent { ms } => (1, *ms, ""),
        Cause::Stalled { ms } => (5, *ms, ""),
        Cause::Unreachable { what } => (6, 0, what.as_str()),
        Cause::Disagrees { what } => (2, 0, what.as_str()),
        Cause::Failed { why } => (3, 0, why.as_str()),
        Cause::Damaged { what } => (4, 0, what.as_str()),
    };
    let mut bytes = vec![code];
    for word in [report.rank as u64, report.step, ms] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    for text in [&report.host, &report.op, text] {
        let text = &text[..text.floor_char_boundary(TEXT_BYTES_MAX)];
        bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

pub(super) fn decode(mut bytes: &[u8]) -> Option<Report> {
    let bytes = &mut bytes;
    let code = *bytes.split_off_first()?;
    let [rank, step, ms] = [word(bytes)?, word(bytes)?, word(bytes)?];
    let (host, op, text) = (text(bytes)?, text(bytes)?, text(bytes)?);
    let cause = match code {
        0 => Cause::Gone,
        1 => Cause::Silent { ms },
        2 => Cause::Disagrees { what: text },
        3 => Cause::Failed { why: text },
        4 => Cause::Damaged { what: text },
        5 => Cause::Stalled { ms },
        6 => Cause::Unreachable { what: text },
        _ => return None,
    };
    Some(Report { rank: usize::try_from(rank).ok()?, host, step, op, cause })
}

fn word(bytes: &mut &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.split_off(..8)?.try_into().ok()?))
}

fn text(bytes: &mut &[u8]) -> Option<String> {
    let length = u16::from_le_bytes(bytes.split_off(..2)?.try_into().ok()?);
    String::from_utf8(bytes.split_off(..usize::from(length))?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cause: Cause) -> Report {
        Report { rank: 3, host: "b".into(), step: 17, op: "all-reduce".into(), cause }
    }

    #[test]
    fn what_is_said_is_heard() {
        let rows = [
            Cause::Gone,
            Cause::Silent { ms: 4000 },
            Cause::Stalled { ms: 5000 },
            Cause::Unreachable { what: "rank 4 cannot connect to it".into() },
            Cause::Disagrees { what: "it is elsewhere".into() },
            Cause::Failed { why: "ä".repeat(100) },
            Cause::Damaged { what: String::new() },
        ];
        for cause in rows {
            let bytes = encode(&report(cause.clone()));
            assert_eq!(decode(&bytes), Some(report(cause)));
            for end in 0..bytes.len() {
                assert_eq!(decode(&bytes[..end]), None, "cut at {end}");
            }
        }
    }

    #[test]
    fn long_texts_are_cut_to_fit() {
        let long = Report {
            host: "h".repeat(5000),
            op: "ö".repeat(5000),
            ..report(Cause::Failed { why: "x".repeat(70_000) })
        };
        let bytes = encode(&long);
        assert!(bytes.len() <= BYTES_MAX);
        assert!(decode(&bytes).is_some_and(|r| r.host.len() == 300 && r.op.len() == 300));
    }
}
