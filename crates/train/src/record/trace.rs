//! A timeline of all ranks in the format that `chrome://tracing` and Perfetto read: what each computed, which exchanges
//! were under way, and when it waited.
//!
//! Each rank has three rows. Exchanges overlap each other, so they are spans with a beginning and an end of their own;
//! the other two kinds follow one after the other.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use polyreme_collective::Comm;
use polyreme_exec::{Moment, MomentKind};
use serde_json::json;

use crate::error::TrainError;
use crate::talk;

/// A rank records at most so many moments, about 15 MiB of text; a step of `gpt` has 500.
pub const MOMENTS_MAX: usize = 100_000;

/// Gathers what all ranks recorded, and writes it on rank 0. Collective.
pub fn write(path: &Path, comm: &mut Comm, moments: &[Moment]) -> Result<(), TrainError> {
    let own = events(comm.rank(), moments);
    let all = talk::gather(comm, own.into_bytes())?;
    let Some(all) = all else { return Ok(()) };
    let failed = |source| TrainError::io(path, source);
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    let text = String::from_utf8_lossy(&all);
    let lines: Vec<&str> = text.lines().collect();
    write!(file, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
        .map_err(failed)?;
    file.flush().map_err(failed)
}

/// Events of one rank, a line each.
fn events(rank: usize, moments: &[Moment]) -> String {
    let row = |kind: MomentKind| match kind {
        MomentKind::Compute => (0, "compute"),
        MomentKind::Exchange => (1, "exchange"),
        MomentKind::Wait => (2, "wait"),
    };
    let mut text = format!(
        "{}\n",
        json!({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": format!("rank {rank}")}})
    );
    for kind in [MomentKind::Compute, MomentKind::Exchange, MomentKind::Wait] {
        let (tid, name) = row(kind);
        text += &format!(
            "{}\n",
            json!({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}})
        );
    }
    for (i, m) in moments.iter().enumerate() {
        let (tid, category) = row(m.kind);
        let args = json!({"step": m.step});
        if m.kind == MomentKind::Exchange {
            let id = format!("{rank}.{i}");
            let at = |ph: &str, ts: f64| json!({"ph": ph, "pid": rank, "tid": tid, "id": id, "cat": category, "name": m.name, "ts": ts, "args": args});
            text += &format!("{}\n{}\n", at("b", m.start_us), at("e", m.start_us + m.us));
            continue;
        }
        let event = json!({"ph": "X", "pid": rank, "tid": tid, "cat": category, "name": m.name, "ts": m.start_us, "dur": m.us, "args": args});
        text += &format!("{event}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn every_rank_has_its_rows_in_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        std::thread::scope(|s| {
            for mut comm in Comm::local(3) {
                let path = &path;
                s.spawn(move || {
                    let moment = |name: &str, kind, start_us| Moment {
                        name: name.into(),
                        kind,
                        step: 7,
                        node: None,
                        start_us,
                        us: 2.0,
                    };
                    // Ranks have recorded different numbers of moments.
                    let mut moments = vec![moment("matmul \"a\"", MomentKind::Compute, 1.0); comm.rank()];
                    moments.push(moment("bucket 0", MomentKind::Exchange, 2.0));
                    moments.push(moment("bucket 0", MomentKind::Wait, 3.0));
                    write(path, &mut comm, &moments).unwrap();
                });
            }
        });
        let trace: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count =
            |rank: usize, ph: &str| events.iter().filter(|e| e["pid"] == rank && e["ph"] == ph).count();
        for rank in 0..3 {
            assert_eq!((count(rank, "M"), count(rank, "b"), count(rank, "e")), (4, 1, 1));
            assert_eq!(count(rank, "X"), rank + 1);
        }
        let wait = events.iter().find(|e| e["cat"] == "wait").unwrap();
        assert_eq!(
            (wait["ts"].as_f64(), wait["dur"].as_f64(), &wait["args"]["step"]),
            (Some(3.0), Some(2.0), &7.into())
        );
    }
}
