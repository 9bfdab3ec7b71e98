//! What an eavesdropper between two hosts sees of an all-reduce.

use crate::hosts::{Hosts, Link};

const BINARY: &str = env!("CARGO_BIN_EXE_polyreme");

/// `bench collective` sums buffers that are full of ones, so the first thing that goes over the wire is sixteen of them.
#[test]
fn a_capture_between_hosts_shows_no_plain_gradient() {
    let _machine = crate::alone();
    if std::process::Command::new("tshark").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "this test must run in CI: `apt-get install tshark`");
        eprintln!("skipped: no tshark on this machine; `apt-get install tshark` brings it");
        return;
    }
    let ones: Vec<u8> = 1.0f32.to_le_bytes().repeat(16);
    let hosts = Hosts::new(2, Link::Mbit(1000));
    let sums = ["bench", "collective", "--transport", "tcp", "--no-pin", "--sizes", "1M"];
    let seen = |more: &[&str]| {
        let capture = hosts.capture();
        hosts.run(BINARY, 1, &[&sums[..], more].concat());
        let (bytes, found) = capture.end(&ones);
        assert!(bytes > 10 << 20, "{more:?}: {bytes} bytes were seen, and there were more");
        found
    };
    assert!(seen(&["--encrypt", "false"]) > 0, "the search finds what is plain");
    assert_eq!(seen(&[]), 0, "by default");
    assert_eq!(seen(&["--encrypt", "true"]), 0);
}
