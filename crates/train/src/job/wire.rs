//! `parallel.wire`: in which format gradients travel between ranks, and where nothing but f32 can.

use polyreme_graph::BlockCodec;

use super::cursor::Cursor;
use super::spec::{ParallelSpec, Transport};
use super::types::{Type, one_of};

/// How the format stands in a job file.
pub(super) fn wire() -> Type<Option<BlockCodec>> {
    let plain = [("f32", None, "as they are")];
    let coded = BlockCodec::ALL.map(|codec| (codec.name(), Some(codec), words(codec)));
    one_of(plain.into_iter().chain(coded))
}

fn words(codec: BlockCodec) -> &'static str {
    match codec {
        BlockCodec::Bf16 => "half the bytes, 8 bits of each number",
        BlockCodec::F16 => "half the bytes, 11 bits of each number; a scale for each 1024",
        BlockCodec::Int8 => "a quarter of the bytes; a scale for each 256",
    }
}

/// What a format that loses something does not go together with.
pub(super) fn check(spec: &ParallelSpec, c: &Cursor) {
    let Some(codec) = spec.wire else { return };
    let name = codec.name();
    let refuse =
        |why: String, hint: &str| c.fault("wire", format!("`parallel.wire = \"{name}\"` {why}"), hint);
    if spec.reproducible {
        let why = "does not work with `reproducible`: what is lost depends on how many ranks there are";
        refuse(why.into(), "leave one of them out");
    }
    if let Transport::Local | Transport::Shm = spec.transport {
        refuse(in_memory(), "leave `wire` out, or write transport = \"tcp\"");
    }
    for key in spec.splits() {
        let why =
            format!("works where each rank has the whole model and updates all of it, and not with `{key}`");
        refuse(why, "leave one of them out");
    }
    if let Some(key) = spec.open.names().first() {
        let why = format!("is not known to the planner, which `{key} = \"auto\"` asks");
        refuse(why, "leave `wire` out, or write numbers for the axes");
    }
}

/// Why ranks that share memory have no format on the wire.
pub(crate) fn in_memory() -> String {
    "is for ranks that are connected by a network; those that share memory send nothing".into()
}
