//! Training as a product: job files, the loop, schedules, metrics, checkpoints and the records of a run.
//!
//! Nothing here reads flags, the environment or the terminal, and nothing here knows a kernel: a job is lowered to
//! programs, and engines run them.
//!
//! # Layout
//! - [`job`]: what to train, from a file or from Rust. [`sets`]: its data, opened. [`fingerprint`]: whether they changed.
//! - [`schedule`]: how the rate changes. [`pace`]: how a run is cut into epochs, steps and microbatches. [`flush`]: which steps a
//!   pipeline without a flush between them runs as one. [`mod@mixup`].
//! - [`mod@share`]: how a step is shared out among ranks. [`balance`]: by their speed. `talk`: what they tell each other.
//! - [`slowness`]: steps that are slowed down to try that.
//! - [`loss`]: what is minimised. [`net`], [`lower`]: from a network to programs. [`learner`], [`judge`]: the engines that train and
//!   evaluate.
//! - [`ledger`]: which samples have counted.
//! - [`run`]: the loop. [`event`]: what it tells. [`mod@evaluate`], [`metrics`]: what is measured.
//! - [`pretrained`]: models of Hugging Face's `transformers`, as they are read and written.
//! - [`low_rank`]: which tensors the files of a run with low-rank factors have, and factors merged into weights.
//! - `about`: what the file of a run's model says of itself.
//! - [`checkpoint`]: what a run leaves to go on from, whole or absent. [`weights`], [`mod@install`]: files of weights.
//!   [`whole`]: the tensors of a model, whichever rank has them.
//! - [`record`]: what a run leaves for people and tools.
//! - [`trained`], [`preparation`], [`predict`], [`mod@generate`]: a model in use. [`inference`]: by several ranks.
//! - [`error`]: what can go wrong. `draw`, `edits`: random numbers, and how far names are apart.

#![forbid(unsafe_code)]

mod about;
pub mod balance;
pub mod checkpoint;
mod draw;
mod edits;
pub mod error;
pub mod evaluate;
pub mod event;
mod fed;
pub mod fingerprint;
pub mod flush;
pub mod follow_load;
pub mod generate;
pub mod inference;
pub mod install;
pub mod job;
pub mod judge;
pub mod learner;
pub mod ledger;
pub mod loss;
pub mod loss_scale;
pub mod low_rank;
pub mod lower;
pub mod metrics;
pub mod mixup;
pub mod net;
pub mod pace;
pub mod predict;
pub mod preparation;
pub mod pretrained;
pub mod record;
pub mod run;
pub mod schedule;
pub mod sets;
pub mod share;
pub mod slowness;
pub mod spread;
pub mod starting;
mod talk;
pub mod texts;
pub mod trained;
pub mod weights;
pub mod whole;

pub use error::TrainError;
pub use net::Net;
