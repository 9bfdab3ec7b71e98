//! The front door: documents that agree with the code, and the command line as people meet it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod architecture;
mod balance;
mod binary;
mod commands;
mod deploy;
mod dial;
mod elastic;
mod etcd;
mod examples;
mod fits;
mod in_use;
mod labelled_images;
mod launch;
mod ledger;
mod lost;
mod manners;
mod meshes;
mod metrics;
mod parts;
mod plan;
mod planned;
mod ranks;
mod remote;
mod saved;
mod servers;
mod shards;
mod spread;
mod tables;
mod targets;
mod texts;
mod timelines;
mod train;
mod used;
mod wire;
mod without_mpi;
mod wrong_data;
mod wrong_weights;
