//! The file of a timeline, read: by rank, the spans that a picture needs. Nodes and exchanges under way are left out as the
//! file is read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use polyreme_graph::MomentKind;
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

use super::TimelineError;
use crate::record::trace::{About, WORK};

/// An exchange of so few bytes takes no time by itself: who waits for one waits for other ranks.
const BYTES_FEW: u64 = 4096;

/// Times beyond this many microseconds, 30 years, are no times.
const US_MAX: f64 = 1e15;

/// A timeline: what all ranks did.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    pub(super) path: PathBuf,
    pub(super) about: Option<About>,
    /// By the number of the process, which is the rank.
    pub(super) ranks: BTreeMap<u64, RankSpans>,
}

/// What a rank did.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct RankSpans {
    /// The name that the file has for it.
    pub(super) name: String,
    /// Whole steps by their number; a program of several has that of the first.
    pub(super) steps: BTreeMap<u64, WorkSpan>,
    /// Everything inside of them, in the order of the file.
    pub(super) spans: Vec<WorkSpan>,
}

/// A span of time on the row of what a rank does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct WorkSpan {
    pub(super) kind: MomentKind,
    pub(super) step: u64,
    pub(super) microbatch: Option<u64>,
    pub(super) chunk: Option<u64>,
    /// Of a wait: whether it is for other ranks and nothing else, which is a message or an exchange of a few bytes.
    pub(super) idle: bool,
    pub(super) start_us: f64,
    pub(super) us: f64,
}

impl Trace {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Trace, TimelineError> {
        let text = fs::read(path).map_err(|source| TimelineError::Read { path: path.into(), source })?;
        Trace::from_text(path, &text)
    }

    /// Reads what a file has, or what it would have; `path` is for messages.
    pub fn from_text(path: &Path, text: &[u8]) -> Result<Trace, TimelineError> {
        let no = |why: String| TimelineError::NotATrace { path: path.into(), why };
        let file: RawFile = serde_json::from_slice(text).map_err(|e| no(e.to_string()))?;
        Ok(Trace { path: path.into(), about: file.about, ranks: file.ranks.0 })
    }
}

#[derive(Deserialize)]
struct RawFile {
    #[serde(rename = "otherData", default, deserialize_with = "if_ours")]
    about: Option<About>,
    #[serde(rename = "traceEvents")]
    ranks: Ranks,
}

/// What others write about their traces is ignored.
fn if_ours<'de, D: Deserializer<'de>>(from: D) -> Result<Option<About>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Ours(About),
        Theirs(serde::de::IgnoredAny),
    }
    Ok(match Either::deserialize(from)? {
        Either::Ours(about) => Some(about),
        Either::Theirs(_) => None,
    })
}

struct Ranks(BTreeMap<u64, RankSpans>);

impl<'de> Deserialize<'de> for Ranks {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Ranks, D::Error> {
        from.deserialize_seq(Events)
    }
}

/// Sorts events by rank as they come.
struct Events;

impl<'de> Visitor<'de> for Events {
    type Value = Ranks;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<Ranks, A::Error> {
        let mut ranks = BTreeMap::<u64, RankSpans>::new();
        while let Some(event) = events.next_element::<RawEvent>()? {
            event.sort_into(&mut ranks)?;
        }
        Ok(Ranks(ranks))
    }
}

/// An event as the format has it, of which most are of no interest here.
#[derive(Deserialize)]
struct RawEvent<'a> {
    #[serde(borrow)]
    ph: Cow<'a, str>,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    #[serde(borrow, default)]
    cat: Cow<'a, str>,
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(borrow, default)]
    args: RawArgs<'a>,
}

#[derive(Deserialize, Default)]
struct RawArgs<'a> {
    #[serde(default)]
    step: Option<u64>,
    #[serde(default)]
    microbatch: Option<u64>,
    #[serde(default)]
    chunk: Option<u64>,
    #[serde(default)]
    bytes: Option<u64>,
    #[serde(borrow, default)]
    op: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    name: Option<Cow<'a, str>>,
}

impl RawEvent<'_> {
    fn sort_into<E: Error>(self, ranks: &mut BTreeMap<u64, RankSpans>) -> Result<(), E> {
        if self.ph == "M" && self.name == "process_name" {
            ranks.entry(self.pid).or_default().name = self.args.name.unwrap_or_default().into_owned();
            return Ok(());
        }
        let kind = MomentKind::ALL.into_iter().find(|kind| kind.name() == self.cat);
        let (true, Some(kind), Some(step)) = (self.ph == "X" && self.tid == WORK, kind, self.args.step)
        else {
            return Ok(());
        };
        if !(self.ts.abs() <= US_MAX && (0.0..=US_MAX).contains(&self.dur)) {
            return Err(E::custom(format!("a span of {} µs that begins at {} µs", self.dur, self.ts)));
        }
        let message = self.args.op.is_some_and(|op| op == "receive" || op == "send");
        let idle = message || self.args.bytes.is_some_and(|bytes| bytes <= BYTES_FEW);
        let (microbatch, chunk) = (self.args.microbatch, self.args.chunk);
        let span = WorkSpan { kind, step, microbatch, chunk, idle, start_us: self.ts, us: self.dur };
        let rank = ranks.entry(self.pid).or_default();
        match kind {
            MomentKind::Step => drop(rank.steps.insert(step, span)),
            MomentKind::Block(_)
            | MomentKind::Load
            | MomentKind::Combine
            | MomentKind::Update
            | MomentKind::Send
            | MomentKind::Wait => rank.spans.push(span),
            MomentKind::Evaluation | MomentKind::Node | MomentKind::Exchange => {}
        }
        Ok(())
    }
}
