//! How much memory the ranks of this host may use: limits of the machine, of control groups and of ulimits.
//!
//! A job is refused by limits that do not change: all of the machine's memory, not what is free now. The page cache can
//! be evicted, and another process may be about to end; too little available memory is only worth a warning. Swap does
//! not count: a step touches all memory of a training run, so a job that needs swap runs at the speed of the disk. Of a
//! ulimit, what this process already uses is subtracted.
//!
//! The parsers are functions of file contents, given by a reader; [`limits`] and [`warning`] ask the system.

use std::fs;
use std::path::{Path, PathBuf};

use polyreme_train::record::thousands;
use polyreme_train::run::{Limit, Need, Scope};
use rustix::process::{Resource, getrlimit};

/// Gives the content of a file, if it can be read.
type Reader<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// A larger number means that there is no limit: an exbibyte.
const NO_LIMIT: usize = 1 << 60;

/// What bounds the memory of this process and those beside it.
pub fn limits() -> Vec<Limit> {
    limits_of(&system, &rlimit)
}

/// Memory that can be taken without swapping, as the kernel estimates it now.
fn available_bytes(read: Reader) -> Option<usize> {
    kib(&read(Path::new("/proc/meminfo"))?, "MemAvailable:")
}

/// Memory that this process could take now: what is available, within all limits.
pub fn free_bytes() -> Option<usize> {
    let limits = limits().into_iter().map(|limit| limit.bytes);
    available_bytes(&system).into_iter().chain(limits).min()
}

/// A warning if the job fits, but not beside the processes that run now.
pub fn warning(need: &Need) -> Option<String> {
    crowded(need, available_bytes(&system)?)
}

fn crowded(need: &Need, available: usize) -> Option<String> {
    let mib = |bytes: usize| thousands((bytes >> 20) as u64);
    (need.host > available).then(|| {
        format!(
            "training takes at least {} MiB on this host and {} MiB are available now: other processes use the rest, and the system may kill one of them",
            mib(need.host),
            mib(available)
        )
    })
}

fn system(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn rlimit(resource: Resource) -> Option<usize> {
    getrlimit(resource).current.and_then(|bytes| usize::try_from(bytes).ok())
}

fn limits_of(read: Reader, rlimit: &dyn Fn(Resource) -> Option<usize>) -> Vec<Limit> {
    let text = |path: &str| read(Path::new(path)).unwrap_or_default();
    let mut limits = Vec::new();
    if let Some(bytes) = kib(&text("/proc/meminfo"), "MemTotal:") {
        limits.push(Limit { scope: Scope::Host, bytes, by: "this machine has".into() });
    }
    for file in limit_files(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo")) {
        let number = read(&file).and_then(|text| text.trim().parse::<usize>().ok());
        if let Some(bytes) = number.filter(|bytes| *bytes < NO_LIMIT) {
            let by = format!("its control group allows ({})", file.display());
            limits.push(Limit { scope: Scope::Group, bytes, by });
        }
    }
    let status = text("/proc/self/status");
    for (resource, scope, taken, by) in [
        (Resource::As, Scope::Mapped, "VmSize:", "`ulimit -v` leaves"),
        (Resource::Data, Scope::Private, "VmData:", "`ulimit -d` leaves"),
    ] {
        if let Some(bytes) = rlimit(resource).filter(|bytes| *bytes < NO_LIMIT) {
            let bytes = bytes.saturating_sub(kib(&status, taken).unwrap_or(0));
            limits.push(Limit { scope, bytes, by: by.into() });
        }
    }
    limits
}

/// The files that hold the limits of this process's control groups, its own first and then those around it, as far as
/// they can be seen: `cgroup` and `mountinfo` are the contents of the files of these names in `/proc/self`.
fn limit_files(cgroup: &str, mountinfo: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in cgroup.lines() {
        // "4:memory:/a/b" in version 1, "0::/a/b" in version 2.
        let mut words = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let (kind, file) = match controllers {
            "" => ("cgroup2", "memory.max"),
            _ if controllers.split(',').any(|c| c == "memory") => ("cgroup", "memory.limit_in_bytes"),
            _ => continue,
        };
        for (root, mount) in mountinfo.lines().filter_map(|line| mount_of(line, kind)) {
            // A container may see only a part of the tree, and not the groups around it.
            let inside = Path::new(group).strip_prefix(&root).unwrap_or(Path::new(""));
            let hidden = inside.components().any(|c| c.as_os_str() == "..");
            let folder = if hidden { mount.clone() } else { mount.join(inside) };
            let around = folder.ancestors().take_while(|folder| folder.starts_with(&mount));
            files.extend(around.map(|folder| folder.join(file)));
        }
    }
    files
}

/// Of a line of `mountinfo`: which part of a tree of control groups is seen where, if it is a tree of this kind that
/// has memory.
fn mount_of(line: &str, kind: &str) -> Option<(PathBuf, PathBuf)> {
    let (mount, source) = line.split_once(" - ")?;
    let mut source = source.split(' ');
    let is_kind = source.next()? == kind;
    let has_memory = kind == "cgroup2" || source.nth(1)?.split(',').any(|option| option == "memory");
    let mut words = mount.split(' ').skip(3);
    let (root, mount) = (plain(words.next()?), plain(words.next()?));
    (is_kind && has_memory).then_some((root, mount))
}

/// A path of `mountinfo`, where blanks are written as `\040`.
fn plain(path: &str) -> PathBuf {
    let path =
        path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\");
    path.into()
}

/// The bytes that a line such as `MemTotal:  24682416 kB` says.
fn kib(text: &str, key: &str) -> Option<usize> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().trim_end_matches("kB").trim().parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Version 1, a controller in each tree.
    const MOUNTS_1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const MOUNTS_2: &str = "\
30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate
";

    #[track_caller]
    fn check(cgroup: &str, mountinfo: &str, want: &[&str]) {
        let got = limit_files(cgroup, mountinfo);
        assert_eq!(got.iter().map(|p| p.to_str().unwrap()).collect::<Vec<_>>(), want);
    }

    #[test]
    fn groups_are_found_with_those_around_them_in_both_versions() {
        let v1 = "9:name=systemd:/\n4:memory:/a/b c\n1:cpu,cpuacct:/x\n0::/u\n";
        let memory = "/sys/fs/cgroup/memory";
        check(
            v1,
            MOUNTS_1,
            &[
                &format!("{memory}/a/b c/memory.limit_in_bytes"),
                &format!("{memory}/a/memory.limit_in_bytes"),
                &format!("{memory}/memory.limit_in_bytes"),
                "/sys/fs/cgroup/unified/u/memory.max",
                "/sys/fs/cgroup/unified/memory.max",
            ],
        );
        check(
            "0::/user.slice/job.scope\n",
            MOUNTS_2,
            &[
                "/sys/fs/cgroup/user.slice/job.scope/memory.max",
                "/sys/fs/cgroup/user.slice/memory.max",
                "/sys/fs/cgroup/memory.max",
            ],
        );
        // A container with a namespace of its own, and one without, which sees its part of the tree.
        check("0::/\n", MOUNTS_2, &["/sys/fs/cgroup/memory.max"]);
        let part = "7 6 0:3 /docker/f00 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        check("4:memory:/docker/f00\n", part, &["/sys/fs/cgroup/memory/memory.limit_in_bytes"]);
        check(
            "4:memory:/docker/f00/in\n",
            part,
            &[
                "/sys/fs/cgroup/memory/in/memory.limit_in_bytes",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            ],
        );
        check("0::/../elsewhere\n", MOUNTS_2, &["/sys/fs/cgroup/memory.max"]);
        let blank = "7 6 0:3 / /mnt/c\\040g rw - cgroup2 none rw\n";
        check("0::/a\n", blank, &["/mnt/c g/a/memory.max", "/mnt/c g/memory.max"]);
        for (cgroup, mountinfo) in
            [("", MOUNTS_2), ("0::/a", ""), ("nonsense", "nonsense"), ("3:cpu:/a", MOUNTS_1)]
        {
            check(cgroup, mountinfo, &[]);
        }
    }

    fn limits_with(files: &[(&str, &str)], rlimits: [Option<usize>; 2]) -> Vec<(Scope, usize)> {
        let read = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| text.to_string())
        };
        let rlimit = |resource: Resource| rlimits[usize::from(resource == Resource::Data)];
        limits_of(&read, &rlimit).into_iter().map(|l| (l.scope, l.bytes)).collect()
    }

    #[test]
    fn limits_of_machines_groups_and_processes_are_read() {
        let meminfo = ("/proc/meminfo", "MemTotal:       24682416 kB\nMemFree: 1 kB\nMemAvailable: 2 kB\n");
        let status = ("/proc/self/status", "VmSize:\t   1024 kB\nVmData:\t 512 kB\n");
        let machine = (Scope::Host, 24_682_416 << 10);
        assert_eq!(limits_with(&[], [None, None]), []);
        assert_eq!(limits_with(&[meminfo, status], [None, None]), [machine]);
        // What the process uses is subtracted, even if that is more than its limit.
        let ulimits = [Some(3 << 20), Some(100)];
        assert_eq!(
            limits_with(&[meminfo, status], ulimits),
            [machine, (Scope::Mapped, 2 << 20), (Scope::Private, 0)]
        );
        assert_eq!(limits_with(&[meminfo, status], [Some(usize::MAX), None]), [machine]);
        let v2 = [
            meminfo,
            ("/proc/self/cgroup", "0::/a/b\n"),
            ("/proc/self/mountinfo", MOUNTS_2),
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "536870912\n"),
        ];
        assert_eq!(limits_with(&v2, [None, None]), [machine, (Scope::Group, 512 << 20)]);
        let v1 = [
            ("/proc/self/cgroup", "4:memory:/a\n"),
            ("/proc/self/mountinfo", MOUNTS_1),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1048576\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(limits_with(&v1, [None, None]), [(Scope::Group, 1 << 20)]);
    }

    #[test]
    fn a_machine_that_is_in_use_is_worth_a_warning() {
        let read = |_: &Path| Some("MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 3072 kB\n".to_string());
        assert_eq!(available_bytes(&read), Some(3 << 20));
        let need = Need { host: 2 << 20, ..Need::default() };
        assert_eq!(crowded(&need, 3 << 20), None);
        let said = crowded(&need, 1 << 20).unwrap();
        assert!(said.contains("at least 2 MiB") && said.contains("1 MiB are available now"), "{said}");
        assert!(limits().iter().any(|l| l.scope == Scope::Host && l.bytes > 64 << 20), "{:?}", limits());
    }
}
