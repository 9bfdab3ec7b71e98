//! Ranks on hosts, started as by an external launcher.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::Hosts;

/// The secret of the tests' ranks.
pub(crate) const SECRET: &str = "8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";

impl Hosts {
    /// Runs `polyreme` with these arguments, `per_host` ranks on each host, neighbours together; what rank 0 printed.
    pub(crate) fn run(&self, binary: &str, per_host: usize, args: &[&str]) -> String {
        let n = self.names.len() * per_host;
        let start = |rank: usize| -> Child {
            let mut command: Command = self.command(rank / per_host, binary);
            command.args(args).env("RANK", rank.to_string()).env("WORLD_SIZE", n.to_string());
            command.env("MASTER_ADDR", self.address(0)).env("MASTER_PORT", "29500");
            command.env("POLYREME_SECRET", SECRET).current_dir(root());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks: Vec<Child> = (0..n).map(start).collect();
        let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
        for (rank, output) in outputs.iter().enumerate() {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "rank {rank} of {args:?}: {text}");
        }
        String::from_utf8_lossy(&outputs[0].stdout).into_owned()
    }
}

/// The repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}
