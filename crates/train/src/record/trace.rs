//! A timeline of all ranks as a file, in the format that `chrome://tracing` and Perfetto read: what each rank computed, for which
//! microbatch, which exchanges were under way, and what it waited for.
//!
//! The file is a JSON object. `otherData` says what ran ([`About`]); `traceEvents` has the spans, a line each:
//!
//! | event | is |
//! |---|---|
//! | `M` | the name of a process, which is a rank with its place in the mesh, or of one of its two rows |
//! | `X` on row 0, "work" | what the rank did, in nested spans: a step, its instructions (blocks, updates, waits, ...), and the nodes of blocks |
//! | `b`, `e` on row 1, "exchanges" | exchanges under way while something else goes on; they overlap |
//! | `s`, `f` | an arrow from where a message was sent to the end of the wait for it |
//!
//! `cat` is a [`MomentKind`] by its name. `args` has `step`, counted from 1 as in other records, and where they apply `microbatch`,
//! `chunk` (of a pipeline, over all stages), and of exchanges `op`, `bytes` and `exchange`, its line of the printed program.
//!
//! Times are microseconds since all ranks left one barrier: clocks of hosts are not compared, so spans of different ranks may be off by as much as
//! the barrier's last message takes.
//!
//! A simulated run makes the same [`Moment`]s and the same [`text`]. [`super::timeline`] reads the file again.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use polyreme_collective::Comm;
use polyreme_graph::{Axis, BlockKind, Exchanged, Moment, MomentKind};
use polyreme_parallel::{Mesh, Plan};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::TrainError;
use crate::talk;

/// A rank records at most so many moments, about 20 MiB of text; a step of `gpt` on one rank has 600.
pub const MOMENTS_MAX: usize = 100_000;

/// The name of a timeline in a run's folder, where others look for it.
pub const FILE: &str = "trace.json";

/// Where times come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeSource {
    /// A clock.
    Measured,
    /// A cost model.
    Simulated,
}

/// What a timeline is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct About {
    /// The name of the job.
    pub job: String,
    /// Where times come from.
    pub source: TimeSource,
    /// Ranks along the data axis.
    pub data: usize,
    /// Ranks along the tensor axis.
    pub tensor: usize,
    /// Ranks along the stage axis.
    pub stage: usize,
    /// Ranks along the sequence axis.
    pub sequence: usize,
    /// The pipeline schedule, if there are stages.
    pub schedule: Option<String>,
    /// Microbatches of a step.
    pub microbatches: usize,
}

impl About {
    /// What is measured on this mesh, without a schedule and in one microbatch.
    pub fn new(job: impl Into<String>, mesh: Mesh) -> About {
        let Mesh { data, tensor, stage, sequence } = mesh;
        let (source, schedule) = (TimeSource::Measured, None);
        About { job: job.into(), source, data, tensor, stage, sequence, schedule, microbatches: 1 }
    }

    /// What is measured of steps that are split as a plan says.
    pub fn of_plan(job: &str, plan: &Plan) -> About {
        let schedule = (plan.mesh.stage > 1).then(|| plan.pipeline.name().into());
        About { schedule, microbatches: plan.microbatches, ..About::new(job, plan.mesh) }
    }

    /// How the ranks are arranged.
    pub fn mesh(&self) -> Mesh {
        Mesh { data: self.data, tensor: self.tensor, stage: self.stage, sequence: self.sequence }
    }
}

/// A rank's place in a mesh, in words: `stage 1, tensor 0`; empty if it is the only one.
pub fn place(mesh: &Mesh, rank: usize) -> String {
    let axes = [Axis::Stage, Axis::Tensor, Axis::Sequence, Axis::Data];
    let several = axes.into_iter().filter(|axis| mesh.len(*axis) > 1);
    let words = several.map(|axis| format!("{} {}", axis.name(), mesh.place(rank, axis)));
    words.collect::<Vec<_>>().join(", ")
}

/// The file's text: the moments of each rank.
pub fn text(about: &About, by_rank: &[Vec<Moment>]) -> String {
    let mesh = about.mesh();
    let lines: String = by_rank.iter().enumerate().map(|(rank, m)| events(&mesh, rank, m)).collect();
    whole(about, &lines)
}

/// Gathers what all ranks recorded, and writes it on rank 0. Collective.
pub fn write(path: &Path, about: &About, comm: &mut Comm, moments: &[Moment]) -> Result<(), TrainError> {
    let own = events(&about.mesh(), comm.rank(), moments);
    let all = talk::gather(comm, own.into_bytes())?;
    let Some(all) = all else { return Ok(()) };
    let failed = |source| TrainError::io(path, source);
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    file.write_all(whole(about, &String::from_utf8_lossy(&all)).as_bytes()).map_err(failed)?;
    file.flush().map_err(failed)
}

/// Lines of events as a file.
fn whole(about: &About, lines: &str) -> String {
    let events = lines.trim_end().replace('\n', ",\n");
    let about = json!(about);
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":[\n{events}\n]}}\n")
}

/// Events of one rank, a line each.
fn events(mesh: &Mesh, rank: usize, moments: &[Moment]) -> String {
    let mut text = String::new();
    let mut line = |event: Value| {
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{event}");
    };
    let name = match place(mesh, rank) {
        place if place.is_empty() => format!("rank {rank}"),
        place => format!("rank {rank}: {place}"),
    };
    line(json!({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}));
    line(json!({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}));
    for (tid, name) in [(WORK, "work"), (EXCHANGES, "exchanges")] {
        line(json!({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}));
    }
    let mut arrows = Arrows::default();
    for (i, m) in moments.iter().enumerate() {
        let (name, cat, args) = (&m.label.name, m.label.kind.name(), args(m));
        let [start, end, us] = [m.start_us, m.start_us + m.us, m.us].map(to_nanoseconds);
        if m.label.kind == MomentKind::Exchange {
            let id = format!("{rank}.{i}");
            let at = |ph: &str, ts: f64| json!({"ph": ph, "pid": rank, "tid": EXCHANGES, "id": id, "cat": cat, "name": name, "ts": ts, "args": args});
            line(at("b", start));
            line(at("e", end));
            continue;
        }
        let cname = colour(m.label.kind);
        line(
            json!({"ph": "X", "pid": rank, "tid": WORK, "cat": cat, "name": name, "cname": cname, "ts": start, "dur": us, "args": args}),
        );
        if let Some((ph, id)) = arrows.end(mesh, rank, m) {
            let at = if ph == "s" { start } else { to_nanoseconds(m.start_us + 0.999 * m.us) };
            line(
                json!({"ph": ph, "bp": "e", "pid": rank, "tid": WORK, "id": id, "cat": "message", "name": "message", "ts": at}),
            );
        }
    }
    text
}

/// The row of what a rank does.
pub(super) const WORK: u64 = 0;
/// The row of exchanges under way.
const EXCHANGES: u64 = 1;

/// More digits are noise.
fn to_nanoseconds(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}

/// What is known of a moment beside its name and its times.
fn args(m: &Moment) -> Value {
    let mut args = json!({"step": m.step});
    let mut set = |key: &str, value: Value| args[key] = value;
    if let Some(microbatch) = m.label.microbatch {
        set("microbatch", microbatch.into());
    }
    if let Some(chunk) = m.label.chunk {
        set("chunk", chunk.into());
    }
    if let Some(Exchanged { op, bytes, text, .. }) = &m.label.exchanged {
        set("op", (*op).into());
        set("bytes", (*bytes).into());
        set("exchange", text.as_str().into());
    }
    args
}

/// The colour in `chrome://tracing`, by the names that it has for colours; Perfetto has a colour for each name of a span.
fn colour(kind: MomentKind) -> &'static str {
    match kind {
        // Blue, green, orange.
        MomentKind::Block(BlockKind::Forward) => "rail_response",
        MomentKind::Block(BlockKind::InputGrad) => "rail_load",
        MomentKind::Block(BlockKind::WeightGrad) => "rail_idle",
        // Violet.
        MomentKind::Update => "detailed_memory_dump",
        // Shades of grey, from light to dark.
        MomentKind::Wait => "thread_state_sleeping",
        MomentKind::Step | MomentKind::Evaluation => "grey",
        MomentKind::Node => "cq_build_abandoned",
        MomentKind::Load | MomentKind::Combine | MomentKind::Send | MomentKind::Exchange => "generic_work",
    }
}

/// Numbers the messages between each two ranks, the same at both ends: those with one tag arrive in the order in which they were
/// sent, and all ranks begin to record before the same step.
#[derive(Default)]
struct Arrows(HashMap<(Axis, usize, usize, u16), u64>);

impl Arrows {
    /// Which end of an arrow a moment is, and the arrow's number.
    fn end(&mut self, mesh: &Mesh, rank: usize, m: &Moment) -> Option<(&'static str, u64)> {
        let Exchanged { op, axis, message, .. } = m.label.exchanged.as_ref()?;
        let (place, tag) = (*message)?;
        let peer = *mesh.group(rank, *axis).get(place)?;
        let (ph, from, to) = match (m.label.kind, *op) {
            (MomentKind::Send, _) => ("s", rank, peer),
            (MomentKind::Wait, "receive") => ("f", peer, rank),
            _ => return None,
        };
        let sent = self.0.entry((*axis, from, to, tag)).or_default();
        let words = format!("{} {from} {to} {tag} {sent}", axis.name());
        *sent += 1;
        // Numbers up to 2^53 are exact in every reader.
        let hash = *blake3::hash(words.as_bytes()).as_bytes().first_chunk::<8>()?;
        Some((ph, u64::from_le_bytes(hash) >> 12))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polyreme_graph::MomentLabel;

    fn moment(name: &str, kind: MomentKind, start_us: f64) -> Moment {
        Moment { label: MomentLabel::new(name, kind), step: 7, start_us, us: 2.0 }
    }

    #[test]
    fn every_rank_has_its_rows_in_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let about = About::new("job", Mesh { stage: 3, ..Mesh::data(1) });
        std::thread::scope(|s| {
            for mut comm in Comm::local(3) {
                let (path, about) = (&path, &about);
                s.spawn(move || {
                    // Ranks have recorded different numbers of moments.
                    let mut moments = vec![moment("matmul \"a\"", MomentKind::Node, 1.0); comm.rank()];
                    moments.push(moment("bucket 0", MomentKind::Exchange, 2.0));
                    moments.push(moment("bucket 0", MomentKind::Wait, 3.0));
                    write(path, about, &mut comm, &moments).unwrap();
                });
            }
        });
        let trace: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(
            (&trace["otherData"]["stage"], &trace["otherData"]["source"]),
            (&3.into(), &"measured".into())
        );
        let events = trace["traceEvents"].as_array().unwrap();
        let count =
            |rank: usize, ph: &str| events.iter().filter(|e| e["pid"] == rank && e["ph"] == ph).count();
        for rank in 0..3 {
            assert_eq!((count(rank, "M"), count(rank, "b"), count(rank, "e")), (4, 1, 1));
            assert_eq!(count(rank, "X"), rank + 1);
            let name = events.iter().find(|e| e["pid"] == rank && e["name"] == "process_name").unwrap();
            assert_eq!(name["args"]["name"], format!("rank {rank}: stage {rank}"));
        }
        let wait = events.iter().find(|e| e["cat"] == "wait").unwrap();
        assert_eq!(
            (wait["ts"].as_f64(), wait["dur"].as_f64(), &wait["args"]["step"]),
            (Some(3.0), Some(2.0), &7.into())
        );
    }

    #[test]
    fn messages_are_arrows_between_the_right_ranks() {
        let mesh = Mesh { stage: 2, tensor: 2, ..Mesh::data(1) };
        let message = |kind, op, place, tag, start_us| {
            let (axis, text) = (Axis::Stage, String::new());
            let exchanged = Exchanged { op, axis, message: Some((place, tag)), bytes: 8, text };
            let label = MomentLabel { exchanged: Some(exchanged), ..MomentLabel::new(op, kind) };
            Moment { label, step: 1, start_us, us: 1.0 }
        };
        let send = |tag, at| message(MomentKind::Send, "send", 1, tag, at);
        let receive = |tag, at| message(MomentKind::Wait, "receive", 0, tag, at);
        // Both tensor ranks of stage 0 send three messages; a wait for a send is no end of an arrow.
        let sends =
            vec![send(1, 0.0), send(2, 1.0), message(MomentKind::Wait, "send", 1, 1, 2.0), send(1, 3.0)];
        let receives = vec![receive(2, 5.0), receive(1, 6.0), receive(1, 7.0)];
        let text = text(&About::new("job", mesh), &[sends.clone(), sends, receives.clone(), receives]);
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let ends = |rank: usize, ph: &str| {
            let of = events.iter().filter(|e| e["pid"] == rank && e["ph"] == ph);
            of.map(|e| e["id"].as_u64().unwrap()).collect::<Vec<_>>()
        };
        for tensor in 0..2 {
            let (sent, got) = (ends(tensor, "s"), ends(2 + tensor, "f"));
            assert_eq!(sent.len(), 3);
            assert_eq!(got, [sent[1], sent[0], sent[2]]);
        }
        assert!(ends(0, "s").iter().all(|id| !ends(1, "s").contains(id)));
    }
}
