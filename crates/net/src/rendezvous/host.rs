//! What this process knows about its host.

use std::fs;

/// The host's name.
pub(crate) fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Equal for processes that can share memory: the same start of the same kernel, the same process ids and the same
/// network. Two containers of one machine count as two hosts, because one cannot find the other by its id.
pub(crate) fn key() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| name());
    let space = |kind: &str| {
        let link = fs::read_link(format!("/proc/self/ns/{kind}"));
        link.map(|path| path.display().to_string()).unwrap_or_default()
    };
    format!("{} {} {}", boot.trim(), space("pid"), space("net"))
}
