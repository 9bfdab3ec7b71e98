//! `polyreme plan`: from a job file and a cluster to the question of a search, and from its answer to what is shown.
//!
//! # Layout
//! - [`asked`]: a job as a question: its step graph, what it takes of memory, which of its keys are fixed.
//! - [`machine`]: this machine as a cluster, from a calibration or from probes.
//! - [`row`]: a plan as a row of the table, or as JSON. [`chosen`]: a plan as keys of a job file.
//! - [`simulated`]: what the ranks of a plan do when, to be drawn.
//! - [`tried`]: the first plans of a search, tried on this machine.
//! - [`goodput`]: what losses of hosts leave of its time.
//! - [`what_if`]: other clusters, one change at a time. [`plot`]: the result as an image.

pub mod asked;
pub mod chosen;
pub mod goodput;
pub mod machine;
pub mod plot;
pub mod row;
pub mod searching;
pub mod simulated;
pub mod tried;
pub mod what_if;
