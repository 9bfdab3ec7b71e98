//! Whether a format on the wire gains anything here: measured before the run begins, between the ranks of the run.
//!
//! Most networks of data centres are faster than codecs (in a study of over 200 set-ups compression beat tuned synchronous training in 6; Agarwal et al.,
//! MLSys 2022). So a format that was asked for is refused where a sum of gradients takes longer with it than without, unless the job insists;
//! and `wire = "auto"` takes the fastest of those that lose next to nothing.

use polyreme_collective::{Comm, TRIAL_BYTES, sum_seconds};
use polyreme_graph::{BlockCodec, WireCodec};

use super::prepared::Prepared;
use crate::error::TrainError;
use crate::job::{SyncKind, WireKind, WireSpec};

/// A format must take less than this share of what f32 takes: a gain that is smaller may be chance.
const GAIN: f64 = 0.95;

/// What `"auto"` chooses from, beside f32.
const OPEN: [(WireKind, BlockCodec); 2] =
    [(WireKind::Bf16, BlockCodec::Bf16), (WireKind::Int8, BlockCodec::Int8)];

impl Prepared {
    /// The same with the format on the wire that the job leaves open, or an error if one that it names gains nothing here. Collective.
    pub(super) fn with_wire(mut self, comm: &mut Comm) -> Result<Prepared, TrainError> {
        let wire = self.job.parallel.wire;
        if comm.size() == 1 || comm.shares_memory() || !wire.is_coded() || wire.force {
            return Ok(self);
        }
        let isa = self.learner.isa;
        let plain = sum_seconds(comm, None, isa)?;
        if wire.kind == WireKind::Auto {
            let mut best = (plain * GAIN, WireKind::F32);
            for (kind, codec) in OPEN {
                let seconds = sum_seconds(comm, Some(WireCodec::Blocks(codec)), isa)?;
                if seconds < best.0 {
                    best = (seconds, kind);
                }
            }
            // A run that goes on from a checkpoint goes on with it.
            self.job.parallel.wire = WireSpec { force: true, ..WireSpec::of(best.1) };
            self.learner.plan.wire = self.job.parallel.wire.codec();
            return Ok(self);
        }
        let coded = sum_seconds(comm, wire.codec(), isa)?;
        if coded < plain * GAIN {
            return Ok(self);
        }
        let (name, mib) = (wire.name(), TRIAL_BYTES >> 20);
        let of = match self.job.parallel.sync {
            SyncKind::Local => "differences of weights",
            SyncKind::AllReduce | SyncKind::Ps | SyncKind::PsBounded | SyncKind::PsAsync => "gradients",
        };
        Err(TrainError::Mesh(format!(
            "`wire = \"{name}\"` gains nothing here: a sum of {mib} MiB of {of} takes {:.2} ms as {name} and {:.2} ms as f32; leave `wire` out, \
             write \"auto\", or insist with wire = {{ kind = \"{name}\", force = true }}",
            coded * 1e3,
            plain * 1e3
        )))
    }
}
