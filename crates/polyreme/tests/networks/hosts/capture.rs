//! Everything that goes over the links, as an eavesdropper sees it: a capture by Wireshark's tools, which also search it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::Hosts;

/// A capture that goes on.
pub(crate) struct Capture {
    dumpcap: Child,
    folder: TempDir,
}

impl Hosts {
    /// Captures at the switch from now on.
    pub(crate) fn capture(&self) -> Capture {
        let switch = self.switch.clone().expect("hosts that are joined by a switch");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("packets");
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &switch, "dumpcap", "-q", "-i", "any", "-B", "64", "-w"]).arg(&file);
        let started = command.stderr(Stdio::piped()).spawn();
        let mut dumpcap = started.expect("`ip` of iproute2, and `dumpcap` of the package tshark");
        // It says where it writes when it listens.
        let mut said = BufReader::new(dumpcap.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("File: ") {
            line.clear();
            assert!(
                said.read_line(&mut line).unwrap() > 0,
                "dumpcap ended; is the package tshark installed?"
            );
        }
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Capture { dumpcap, folder }
    }
}

impl Capture {
    /// How many bytes were captured, and how many packets contain `pattern`.
    pub(crate) fn end(mut self, pattern: &[u8]) -> (u64, usize) {
        kill_process(Pid::from_child(&self.dumpcap), Signal::INT).unwrap();
        assert!(self.dumpcap.wait().unwrap().success());
        let file = self.folder.path().join("packets");
        let hex: Vec<String> = pattern.iter().map(|byte| format!("{byte:02x}")).collect();
        let filter = format!("frame contains {}", hex.join(":"));
        let found = Command::new("tshark").arg("-r").arg(&file).args(["-Y", &filter]).output().unwrap();
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        (
            file.metadata().unwrap().len(),
            found.stdout.split(|b| *b == b'\n').filter(|l| !l.is_empty()).count(),
        )
    }
}
