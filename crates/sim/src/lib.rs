//! Runs the programs of any number of ranks in virtual time: how long a step takes, who waits for whom, what goes over which link,
//! what it takes of memory. Nothing is computed and nothing is sent.
//!
//! # One program, another reader
//! The executor runs a program with kernels and collectives. This crate reads the same program, from the same lowering, and asks
//! for each instruction how long it would take:
//!
//! ```text
//!  step graph, plan ──Fleet::lower──▶ programs ─────┐
//!  cluster.toml ──Cluster::parse──▶ hosts, links ───┼──simulate──▶ SimReport
//!  bench calibrate ──Calibration::parse──▶ tables ──┘
//! ```
//!
//! - The order of work, overlap and microbatches are those of the program. Nothing about schedules is known here.
//! - The algorithm of each collective is chosen by the function that production uses (`collective::links::choose`).
//! - Ranks have clocks of their own. One slow host shows in all that wait for it, directly or not, and in nobody else.
//!
//! # How to ask
//! ```
//! # use polyreme_graph::{DType, Moments, Optimizer, differentiate};
//! # use polyreme_nn::{Model, TraceOptions};
//! # use polyreme_parallel::{Mesh, Plan, Training};
//! use polyreme_sim::{Cluster, Fleet, SimSettings, simulate};
//! # let forward = Model::by_name("mlp").unwrap().trace(&TraceOptions::training(32)).unwrap();
//! # let step = differentiate(&forward, forward.output("loss").unwrap()).unwrap();
//! # let (optimizer, moments) = (Optimizer::AdamW(Moments::DEFAULT), DType::F32);
//! # let training = Training { optimizer, moments, clip: None, scaled: false, ema: None };
//! let cluster = Cluster::parse(
//!     "[[hosts]]\ncount = 8\ncores = 16\nmemory_gib = 64\ngflops = 60\ncore_gbs = 12\nmemory_gbs = 150\n\
//!      [between]\nlatency_us = 30\ngbits = 10\n",
//! )?;
//! // `step` is the differentiated graph of a microbatch. What a rank takes is asked of whoever runs programs.
//! let plan = Plan { mesh: Mesh::data(8), ..Plan::alone() };
//! let fleet = Fleet::lower(&step, &plan, &training, &|_program| 0, None)?;
//! let report = simulate(&fleet, &cluster, &SimSettings { threads: 16, ..SimSettings::default() })?;
//! assert!(report.step_us > 0.0 && report.ranks.len() == 8);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A planner lowers and simulates one plan after another. [`Fleet::lower`] takes most of the time, and its result serves for every
//! cluster: another bandwidth, a slow host or another price only needs [`simulate()`] again.
//!
//! # What it does not know
//! It knows nothing of sockets or kernels. Which kernel runs an op, and how fast, is in the tables of a calibration. What a rank
//! takes of memory depends on the scratch space of kernels, so the caller gives a function for it. Data are there when a
//! step begins: loading, checkpoints and evaluations are no part of a step.
//!
//! # Layout
//! - [`cluster`]: hosts and links, and the file that describes them. [`calibration`]: what was measured on a machine.
//! - [`work`]: what nodes and instructions do. [`speed`]: how long that takes on a host. `exchange`: what exchanges cost, [`coding`]: those that travel coded.
//! - [`fleet`]: the programs of all ranks. `score`: a program with times. `clock`: virtual time.
//! - [`mod@simulate`]: all of it together. [`report`]: what was found. `timeline`: what traced ranks did.
//! - [`search`]: which plan is the best. [`goodput`]: what losses of hosts leave of a run's time.

#![forbid(unsafe_code)]

pub mod calibration;
mod clock;
pub mod cluster;
pub mod coding;
mod exchange;
pub mod fleet;
pub mod goodput;
pub mod report;
mod score;
pub mod search;
pub mod simulate;
pub mod speed;
mod timeline;
pub mod work;

pub use calibration::{Calibration, CalibrationError, CalibrationFile};
pub use cluster::{BetweenSpec, Cluster, ClusterError, HostSpec, InsideBy, InsideSpec};
pub use fleet::{Fleet, FleetProgram};
pub use report::{HostUse, RankTimeline, RankUse, SimReport};
pub use simulate::{SimError, SimSettings, simulate};
pub use speed::{Described, HostSpeed};

#[cfg(test)]
mod tests;
