//! `parallel.wire`: in which format gradients, or differences of weights, travel between ranks, and where nothing but f32 can.

use polyreme_graph::{BlockCodec, Optimizer, WireCodec};

use super::cursor::Cursor;
use super::declare::{field, keys, kinds, section};
use super::section::Section;
use super::spec::{ParallelSpec, TrainSpec, Transport};
use super::sync::SyncKind;
use super::train::COUNT_MAX;
use super::types::{flag, real, whole};

/// Factors of more columns than this are no shorter than the matrices that they stand for.
pub(super) const RANK_MAX: u64 = 1 << 10;
/// Shares are counted in millionths.
const SHARE_LEAST: f64 = 1e-6;

/// The format of gradients on the wire; of differences of weights, where ranks take steps by themselves.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct WireSpec {
    /// Which one.
    pub kind: WireKind,
    /// The first step, counted from 0, in which they travel so; before it they travel as they are.
    pub start: u64,
    /// Whether they travel so even where that gains nothing.
    pub force: bool,
}

/// Formats of gradients on the wire.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum WireKind {
    /// As they are.
    #[default]
    F32,
    /// The upper halves of f32.
    Bf16,
    /// Halves with a common scale.
    F16,
    /// Bytes with a common scale.
    Int8,
    /// The largest numbers with their places.
    TopK {
        /// The share that is sent.
        share: f64,
    },
    /// Signs with a common scale.
    OneBit,
    /// Matrices as thin factors.
    PowerSgd {
        /// Columns of the factors.
        rank: usize,
    },
    /// The fastest of f32, bf16 and int8, as measured when the run begins.
    Auto,
}

impl WireSpec {
    /// A format from the first step on.
    pub fn of(kind: WireKind) -> WireSpec {
        WireSpec { kind, start: 0, force: false }
    }

    /// Its name in job files.
    pub fn name(&self) -> &'static str {
        match self.kind {
            WireKind::F32 => "f32",
            WireKind::Bf16 => "bf16",
            WireKind::F16 => "f16",
            WireKind::Int8 => "int8",
            WireKind::TopK { .. } => "topk",
            WireKind::OneBit => "onebit",
            WireKind::PowerSgd { .. } => "powersgd",
            WireKind::Auto => "auto",
        }
    }

    /// Whether gradients travel in another format than their own, or may.
    pub fn is_coded(&self) -> bool {
        self.kind != WireKind::F32
    }

    /// Whether a format that loses something is named.
    fn is_given(&self) -> bool {
        self.is_coded() && self.kind != WireKind::Auto
    }

    /// What codes them, if that is known and anything does.
    pub fn codec(&self) -> Option<WireCodec> {
        Some(match self.kind {
            WireKind::F32 | WireKind::Auto => return None,
            WireKind::Bf16 => WireCodec::Blocks(BlockCodec::Bf16),
            WireKind::F16 => WireCodec::Blocks(BlockCodec::F16),
            WireKind::Int8 => WireCodec::Blocks(BlockCodec::Int8),
            WireKind::TopK { share } => {
                WireCodec::Blocks(BlockCodec::TopK { ppm: (share * 1e6).round() as u32 })
            }
            WireKind::OneBit => WireCodec::Blocks(BlockCodec::OneBit),
            WireKind::PowerSgd { rank } => WireCodec::LowRank { rank },
        })
    }
}

section! { WireSpec => {
    let kinds = kinds! {
        /// as they are
        "f32" => |_| WireSpec::of(WireKind::F32);
        /// half the bytes, 8 bits of each number
        "bf16" => |_| WireSpec::of(WireKind::Bf16);
        /// half the bytes, 11 bits of each number; a scale for each 1024
        "f16" => |_| WireSpec::of(WireKind::F16);
        /// a quarter of the bytes; a scale for each 256
        "int8" => |_| WireSpec::of(WireKind::Int8);
        /// the largest numbers exactly, a share of all, with their places: 1.5 times the share of the bytes
        "topk" => |_| WireSpec::of(WireKind::TopK { share: 0.01 });
        /// a 28th of the bytes: signs, and a scale for each 256; of gradients for `sgd` only
        "onebit" => |_| WireSpec::of(WireKind::OneBit);
        /// matrices as products of `rank` columns and rows, which follow the gradients from step to step (PowerSGD of Vogels et al. 2019); other
        /// tensors as they are
        "powersgd" => |_| WireSpec::of(WireKind::PowerSgd { rank: 2 });
        /// the fastest of f32, bf16 and int8 between these ranks, as measured when the run begins
        "auto" => |_| WireSpec::of(WireKind::Auto);
    };
    let keys = keys! { WireSpec;
        /// the share of the numbers that is sent
        share: real(SHARE_LEAST..=1.0) => field!(WireKind::{TopK}.share in kind);
        /// columns of the factors
        rank: whole(1..=RANK_MAX) => field!(WireKind::{PowerSgd}.rank in kind);
        /// the first step in which gradients travel so, counted from 0; before it they travel as they are
        start: whole(0..=COUNT_MAX) => |s| s.is_given().then_some(&mut s.start);
        /// gradients travel so even where sums of them take longer than as f32, which is measured when the run begins; without it such a run is refused
        force: flag() => |s| s.is_given().then_some(&mut s.force);
    };
    let such_as = "a format's name, or a table such as { kind = \"powersgd\", rank = 2 }";
    Section::of_kinds("parallel.wire", such_as, kinds, WireSpec::name, keys).short()
} }

/// What a format that loses something does not go together with.
pub(super) fn check(spec: &ParallelSpec, c: &Cursor) {
    if !spec.wire.is_coded() {
        return;
    }
    let name = spec.wire.name();
    let refuse =
        |why: String, hint: &str| c.fault("wire", format!("`parallel.wire = \"{name}\"` {why}"), hint);
    if spec.reproducible {
        let why = "does not work with `reproducible`: what is lost depends on how many ranks there are";
        refuse(why.into(), "leave one of them out");
    }
    if let Transport::Local | Transport::Shm = spec.transport
        && spec.wire.is_given()
    {
        refuse(in_memory(), "leave `wire` out, or write transport = \"tcp\"");
    }
    for key in spec.splits() {
        let why =
            format!("works where each rank has the whole model and updates all of it, and not with `{key}`");
        refuse(why, "leave one of them out");
    }
    if let Some(key) = spec.open.names().first() {
        let why = format!(
            "works where each rank has the whole model, and `{key} = \"auto\"` asks for ways to split it"
        );
        refuse(why, "leave `wire` out, or write numbers for the axes");
    }
}

/// What a format does not go together with in `[train]`; `c` is in `[parallel]`.
pub(super) fn check_with(spec: &ParallelSpec, train: &TrainSpec, c: &Cursor) {
    // Differences of weights have been divided by sizes of gradients already.
    if spec.wire.kind != WireKind::OneBit || spec.syncs().all(|sync| sync == SyncKind::Local) {
        return;
    }
    if let Optimizer::Sgd { .. } = train.optimizer.rule {
        return;
    }
    let message = format!(
        "`parallel.wire = \"onebit\"` does not work with the optimizer \"{}\": signs of gradients say nothing of their sizes, which it needs",
        train.optimizer.kind()
    );
    c.fault("wire", message, "choose sgd, or wire = \"int8\"");
}

/// Why ranks that share memory have no format on the wire.
pub(crate) fn in_memory() -> String {
    "is for ranks that are connected by a network; those that share memory send nothing".into()
}
